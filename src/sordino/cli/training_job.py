"""What `demo` and `train` share: a run folder, a private training into it, its files, and the page at the end."""

import contextlib
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from sordino.cli.console import Output, finite, heading, key_value_table
from sordino.definitions import Guarantee, format_upper_bound
from sordino.runs import Metric, RunFolder

if TYPE_CHECKING:
    import numpy as np
    from torch import nn

    from sordino.data import DatasetSplits, Records
    from sordino.ledger import Account
    from sordino.randomness import KeyedRNG
    from sordino.recipes import TrainingConfig
    from sordino.training.distributed import DistributedContext
    from sordino.training.fit import FitResult

__all__ = [
    "Outcome",
    "TrainingJob",
    "composition_statement",
    "default_delta",
    "evaluate_run",
    "probabilities",
    "render_metrics",
    "render_outcome",
    "run_folder",
    "run_training_job",
    "run_training_worker",
    "subgroups_of",
]


# ----------------------------------------------------------------------------------------------------------------------
# What `demo` and `train` measure after a run: the private model on public test records, the baseline on public data.
# ----------------------------------------------------------------------------------------------------------------------


# Columns with more values than this make subgroups that are too small to read.
_MOST_VALUES = 6


def evaluate_run(
    dataset: "DatasetSplits", recipe: "TrainingConfig", model: "nn.Module", *, test_is_public: bool
) -> dict[str, Metric]:
    """Accuracy, calibration and subgroups on the test records, if they are public; nothing otherwise.

    Guarantee: reads no record that is not declared public.

    Args:
        dataset: whose test records are measured on, and whose training records the baseline sees when all are public.
        recipe: of the private model; the baseline is trained by it.
        model: the private model.
        test_is_public: whether the test records were declared public.
    """
    from sordino.recipes import accuracy, non_private_baseline

    test = dataset.test
    if test is None or not len(test) or not test_is_public:
        return {}
    from sordino.report import compute_utility

    found = compute_utility(
        probabilities(model, test), test.labels, public=test_is_public, groups=subgroups_of(dataset, test)
    )
    if dataset.public:
        baseline = non_private_baseline(dataset, recipe)
        found["baseline_test_accuracy"] = Metric(
            value=accuracy(baseline, test), public=True, what="non-private baseline, public data"
        )
    return found


def probabilities(model: "nn.Module", records: "Records") -> "np.ndarray":
    """The model's probability of each class for each record, shape (records, classes), in evaluation mode."""
    import torch

    features, _ = records.tensors()
    modes = [(module, module.training) for module in model.modules()]
    device = next(model.parameters()).device
    model.eval()
    try:
        with torch.no_grad():
            parts = [model(x.to(device)).double().softmax(1).cpu() for x in features.split(4096)]
    finally:
        for module, mode in modes:
            module.training = mode
    return torch.cat(parts).numpy()


def subgroups_of(dataset: "DatasetSplits", records: "Records") -> dict[str, list[str]]:
    """Subgroups by true label, and by each category column of a table with few values."""
    groups = {"label": [dataset.labels[label] for label in records.labels.tolist()]}
    if len(dataset.labels) > 2 * _MOST_VALUES:
        groups.clear()
    first = 0
    for column in dataset.schema.columns if dataset.schema else ():
        names = getattr(column, "groups", ())
        part = records.features[:, first : first + column.width]
        first += column.width
        if 2 <= len(names) <= _MOST_VALUES and ":" not in column.name:
            # A value that the schema does not list is all zeros.
            known, rest = part.max(axis=1) > 0, "missing" if "other" in names else "other"
            places = part.argmax(axis=1)
            groups[column.name] = [
                names[place] if found else rest for place, found in zip(places.tolist(), known.tolist(), strict=True)
            ]
    return groups


# ----------------------------------------------------------------------------------------------------------------------
# What `demo` and `train` share: a run folder, a private training into it, its files, and the page at the end.
# ----------------------------------------------------------------------------------------------------------------------


_TUNED_ON = ("adult", "mnist", "fashion-mnist")


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """One training as a command asks for it.

    Args:
        dataset: what is trained on; `dataset.public` decides what may be measured.
        test_is_public: whether accuracy on `dataset.test` may be measured.
        recipe: model, plan and optimizer.
        target_epsilon: the goal.
        overrides: names of settings that were given by hand.
        rng: fresh.
        folder: where the run goes, or where it lies when `resumes`.
        resumes: whether the run in `folder` is taken up again.
        checkpoint_every: steps between checkpoints; None makes about ten.
        diagnostics: None, or "private".
        ledger: the dataset's account, or None.
    """

    dataset: "DatasetSplits"
    test_is_public: bool
    recipe: "TrainingConfig"
    target_epsilon: float
    overrides: tuple[str, ...]
    rng: "KeyedRNG"
    folder: Path
    resumes: bool = False
    checkpoint_every: int | None = None
    diagnostics: str | None = None
    ledger: "Account | None" = None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came out of a job: everything a command prints."""

    run: RunFolder
    guarantee: Guarantee
    metrics: Mapping[str, Metric]
    steps: int
    interrupted: bool

    def to_dict(self) -> dict[str, object]:
        """The outcome as JSON types."""
        guarantee, path = self.guarantee, self.run.path
        return {
            "epsilon": finite(guarantee.epsilon),
            "delta": guarantee.delta,
            "privacy_unit": guarantee.privacy_unit.value,
            "neighboring_relation": guarantee.neighboring_relation.value,
            "sampler": guarantee.sampler,
            "accountant": guarantee.accountant,
            "caveats": list(guarantee.caveats),
            "description": guarantee.describe(),
            "steps": self.steps,
            "interrupted": self.interrupted,
            "metrics": {
                name: metric.value for name, metric in self.metrics.items() if metric.public and ":" not in name
            },
            "run": str(path),
            "model": str(path / "model.safetensors"),
            "report": str(path / "report.html"),
            "picture": str(path / "report.png"),
        }


def run_folder(name: str, out: Path | None) -> Path:
    """`out`, or the first unused ``runs/NAME-DATE-NUMBER``."""
    if out is not None:
        return out
    stem, number = f"{name}-{datetime.now():%Y-%m-%d}", 1
    while (path := Path("runs") / f"{stem}-{number}").exists():
        number += 1
    return path


def default_delta(population: int) -> float:
    """1e-5, or for large datasets the largest power of ten that stays below 2/3 of 1 / population.

    Example:
        >>> default_delta(30_162), default_delta(2_000_000)
        (1e-05, 1e-07)
    """
    return min(1e-5, float(f"1e-{len(str(3 * population // 2))}"))


def run_training_job(job: TrainingJob, out: Output, ranks: "DistributedContext | None" = None) -> Outcome:
    """Train, and leave a complete run folder.

    Guarantee: `Outcome.guarantee`. Nothing is measured on records that are not declared public. A failure before the
    first step leaves no folder; a later one leaves the folder with all that was charged.

    Args:
        job: what to train.
        out: where it is said what is going on.
        ranks: the processes that train together, of which this is the first and the others call `assist`.
    """
    from sordino.recipes import train_with_config
    from sordino.recipes.saved_model import describe_module
    from sordino.report import write_report
    from sordino.training import tuned_process

    plan = job.recipe.plan
    every = max(1, plan.steps // 10) if job.checkpoint_every is None else job.checkpoint_every

    def begun() -> RunFolder:
        if job.resumes:
            return RunFolder.open(job.folder)
        return RunFolder.create(job.folder, plan=plan.to_json(), meta=_meta(job))

    run = begun() if ranks is None else ranks.rank_zero_first(begun)
    # Whatever a model or a progress line prints belongs on stderr: stdout is for the command's own last word.
    with contextlib.redirect_stdout(sys.stderr), tuned_process(), _seeded(job.rng), _closed(run):
        result = train_with_config(
            job.dataset,
            job.recipe,
            run_folder=None if job.resumes else run,
            resume_from=job.folder if job.resumes else None,
            checkpoint_every=every,
            diagnostics=job.diagnostics,
            ledger=job.ledger,
            rng=job.rng,
        )
    with out.progress("measuring and writing the report"):
        metrics = evaluate_run(job.dataset, job.recipe, result.model, test_is_public=job.test_is_public)
        run.write_metrics(metrics)
        run.write_model_description(describe_module(job.dataset, job.recipe.model))
        write_report(run)
    return _outcome(run, result, metrics)


def run_training_worker(job: TrainingJob, ranks: "DistributedContext") -> None:
    """Train as one of several processes while the first one calls `perform`, which pays, writes and measures.

    Guarantee: that of `fit`, of which this is a part.
    """
    from sordino.recipes import train_with_config
    from sordino.training import tuned_process

    # A folder that can't be made is refused in all processes.
    ranks.rank_zero_first(lambda: None)
    with contextlib.redirect_stdout(sys.stderr), tuned_process(), _seeded(job.rng):
        train_with_config(
            job.dataset,
            job.recipe,
            resume_from=job.folder if job.resumes else None,
            ledger=job.ledger,
            progress=False,
            rng=job.rng,
        )


@contextlib.contextmanager
def _closed(run: RunFolder) -> Iterator[None]:
    """After a failure the run is closed; one in which nothing was charged leaves no folder."""
    try:
        yield
    except BaseException:
        run.close()
        if run.path.exists() and not any(run):
            shutil.rmtree(run.path)
        raise


def render_outcome(outcome: Outcome) -> tuple[RenderableType, ...]:
    """The outcome for people."""
    guarantee, path = outcome.guarantee, outcome.run.path
    rows = [
        ("unit", guarantee.privacy_unit.describe()),
        ("neighbors", guarantee.neighboring_relation.describe()),
        ("sampler", guarantee.sampler),
        ("accountant", guarantee.accountant.replace("_", " ")),
        *(("caveat", caveat) for caveat in guarantee.caveats),
    ]
    if outcome.interrupted:
        rows.append(("interrupted", f"after {outcome.steps:,} steps; what was charged stays charged"))
    claim = f"(ε = {format_upper_bound(guarantee.epsilon)}, δ = {guarantee.delta:g})"
    claim += "-differentially private" if guarantee.is_private else ": NOT private"
    blocks: list[RenderableType] = [heading(claim), key_value_table(rows)]
    if outcome.metrics:
        blocks += [Text(), render_metrics(outcome.metrics)]
    files = [("model", "model.safetensors"), ("report", "report.html"), ("picture", "report.png")]
    where = key_value_table([(name, str(path / file)) for name, file in files])
    return (*blocks, Text(), where)


def render_metrics(metrics: Mapping[str, Metric]) -> RenderableType:
    """Accuracy or errors on public records, and what they are compared with."""
    names = {
        "test_accuracy": "test accuracy, private",
        "baseline_test_accuracy": "non-private baseline",
        "majority_accuracy": "the commonest label",
    }
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    for name, words in names.items():
        if name in metrics:
            own = name == "test_accuracy"
            bar = Text("━" * round(40 * metrics[name].value), style="cyan" if own else "bright_black")
            table.add_row(words, Text(f"{100 * metrics[name].value:.1f} %", style="bold" if own else ""), bar)
    blocks: list[RenderableType] = [table] if table.row_count else []
    if metrics.get("test_accuracy") and _learned_nothing(metrics):
        words = "Not above the commonest label: this accuracy is reached without learning."
        blocks.append(Text(words, style="yellow"))
    from sordino.report import describe_figures

    return Group(*blocks, key_value_table(describe_figures(metrics)))


def _learned_nothing(metrics: Mapping[str, Metric]) -> bool:
    floor = metrics.get("majority_accuracy")
    return floor is not None and metrics["test_accuracy"].value <= floor.value


def _outcome(run: RunFolder, result: "FitResult", metrics: Mapping[str, Metric]) -> Outcome:
    return Outcome(
        run=run, guarantee=result.guarantee, metrics=metrics, steps=result.steps, interrupted=result.interrupted
    )


def _meta(job: TrainingJob) -> dict[str, object]:
    """Public facts about the run. No path of this machine is among them."""
    dataset, recipe = job.dataset, job.recipe
    settings = "The settings come from a recipe that was fixed in advance on public datasets"
    if job.overrides:
        settings += f", except for those given by hand: {', '.join(job.overrides)}"
    return {
        "target_epsilon": job.target_epsilon,
        "reproducible": job.rng.reproducible,
        **({} if job.diagnostics is None else {"diagnostics": job.diagnostics}),
        "settings": settings,
        "tuned_on_these_data": dataset.public and dataset.name in _TUNED_ON,
        "data": {
            "name": dataset.name,
            "records": len(dataset.train) if recipe.plan.dataset_size_is_public else None,
            "labels": dataset.num_classes,
            "source": dataset.source if dataset.public else "not public",
            "license": dataset.license,
            "public": dataset.public,
            "held_out_every": dataset.held_out_every,
        },
        "training": {
            "model": recipe.model,
            "optimizer": f"SGD, momentum {recipe.momentum:g}",
            "learning_rate": recipe.learning_rate,
            "averaging": re.sub(r"(?<!^)(?=[A-Z])", " ", type(recipe.averaging).__name__).lower()
            if recipe.averaging
            else None,
        },
        "noise_arithmetic": "integers on a grid, drawn exactly" if recipe.plan.secure_mode else "floating point",
        "data_accesses": _data_accesses(job),
        **composition_statement(public=dataset.public, charged=job.ledger is not None),
    }


def composition_statement(*, public: bool, charged: bool) -> dict[str, object]:
    """What a run states of other uses of its records; nothing where a ledger holds them."""
    if public:
        return {"composition": "The records are public: other uses need not be counted."}
    if charged:
        return {}
    return {
        "composition": "The run was charged to no ledger. Everything else that is computed from the same records adds "
        "to this ε, and is not counted here.",
        "other_uses_are_counted": False,
    }


def _data_accesses(job: TrainingJob) -> dict[str, str]:
    """What the command does to the records outside the mechanism: in one line."""
    schema = job.dataset.schema
    origin = "a public sample" if schema is not None and schema.origin == "public_sample" else "a declaration"
    shape = f"Bounds, categories and labels come from {origin}, never from the records."
    measured = "Accuracy, calibration and subgroups on test records that are declared public."
    if job.dataset.public:
        measured += " A baseline was trained without privacy on the records, which are public."
    return {
        "preprocessing": "Each record is scaled and encoded on its own, by the declared schema."
        if schema is not None
        else "Each record is scaled on its own, by fixed numbers.",
        "normalization": "No statistic of the records is computed.",
        "schema": shape if schema is not None else "The form of the records and the labels are fixed by the dataset.",
        "early_stopping": "None: steps were fixed in advance, and the last model, or an average, is kept.",
        "evaluation": measured if job.test_is_public and job.dataset.test is not None else "None.",
        "logging": (
            "Progress shows steps, ε and time. No loss, norm or batch size is printed or stored"
            + (", except for noisy losses that ε pays for." if job.recipe.plan.loss_release is not None else ".")
        )
        if job.diagnostics is None
        else "Losses and batch sizes were shown on the terminal, without noise; they are not stored.",
    }


@contextlib.contextmanager
def _seeded(rng: "KeyedRNG") -> Iterator[None]:
    """Initial weights come from torch's generator; a repeatable run repeats them too."""
    import torch

    if not rng.reproducible or rng.seed is None:
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(rng.seed % 2**63)
        yield
