"""`sordino attack RUN`: membership attacks on a run's model, held against the ceiling of its guarantee."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from sordino import checks
from sordino.cli.console import JsonOption, Output, heading, key_value_table
from sordino.cli.train import load_model_factory
from sordino.definitions import format_upper_bound
from sordino.errors import InvalidArgument
from sordino.runs import Metric, RunFolder

if TYPE_CHECKING:
    from torch import Tensor, nn

    from sordino.audit.attacks import MembershipReport, TrainReference
    from sordino.data import DatasetSplits
    from sordino.recipes import TrainingConfig
    from sordino.recipes.saved_model import SavedModel
    from sordino.research import Convergence, SubgroupGap, TangentKernel

__all__ = ["attack", "diagnose", "load_run_dataset", "recipe_of_run"]


_PRIVATE = "Private: these numbers are statistics of the members, without noise. Keep them with the data."
_SHOWN_SLICES = 5
_LEAST_REFERENCES = 4


def attack(
    run: Annotated[Path, typer.Argument(help="A run folder with a model.")],
    data: Annotated[
        str | None, typer.Option(help="The records of the run: a name, or a file; as the run says.")
    ] = None,
    schema: Annotated[Path | None, typer.Option(help="The declared schema of your file.")] = None,
    test: Annotated[
        Path | None, typer.Option(help="A file of records that were NOT trained on, of the same form.")
    ] = None,
    data_is_public: Annotated[
        bool, typer.Option("--data-is-public", help="Declare both files public: the results may be shown.")
    ] = False,
    model: Annotated[str, typer.Option(help="module:factory, for a model of your own.")] = "",
    references: Annotated[int, typer.Option(help="Reference models, even; 0 makes only attacks without any.")] = 8,
    members: Annotated[int, typer.Option(help="Members to attack, and as many others; the first of each.")] = 2000,
    out_folder: Annotated[
        Path | None, typer.Option("--out", help="Where attack.json and attack.png go; attacks/NAME if not given.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Attack a run's model: who was in its training data? Results stay local; a failed attack is no proof."""
    if references != 0 and (checks.integer(0, references=references) < _LEAST_REFERENCES or references % 2):
        raise InvalidArgument(
            f"references must be 0 or an even number ≥ {_LEAST_REFERENCES}, got {references}: every record is in half "
            "of the reference models. Give --references 8."
        )
    checks.integer(1, members=members)

    out, folder = Output(as_json=as_json), RunFolder.open(run)
    target = out_folder or Path("attacks") / run.resolve().name
    if target.resolve().is_relative_to(run.resolve()):
        raise InvalidArgument(
            f"out must lie outside the run folder, got {str(target)!r}: a run folder may be published."
        )
    dataset = load_run_dataset(folder, data, schema, test, public=data_is_public)
    if _is_estimator(folder):
        saved = _saved_classifier(folder, dataset)
        attacked, reference = _as_module(saved), _estimators_like(saved, len(dataset.train))
    else:
        recipe = recipe_of_run(folder, dataset, model)
        attacked, reference = _with_parameters(recipe, folder), _like_the_run(recipe, len(dataset.train))
    out.print_status(Text.assemble((run.name, "bold"), f": {references} reference models, then every attack"))
    with out.progress("training reference models", total=references or None) as advance:

        def counted(features: "Tensor", labels: "Tensor") -> "nn.Module":
            trained = reference(features, labels)
            advance()
            return trained

        report = _attacked(folder, dataset, attacked, counted if references else None, references, members)
    target.mkdir(parents=True, exist_ok=True)
    picture, file = target / "attack.png", target / "attack.json"
    document = report.to_dict() | {"run": run.name, "picture": str(picture), "file": str(file)}
    from sordino.audit.attacks import plot_roc

    plot_roc(report, picture, title=f"Membership attacks on {run.name}")
    file.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    out.print_result(document, *_page(report, {"picture": str(picture), "numbers": str(file)}))
    if report.above_ceiling:
        raise typer.Exit(1)


def load_run_dataset(
    folder: RunFolder, data: str | None, schema: Path | None, test: Path | None, *, public: bool
) -> "DatasetSplits":
    """The dataset of a run, with records that were not trained on.

    Args:
        folder: the `RunFolder`.
        data: a name or a file; None takes the name that the run states.
        schema: of a file.
        test: records that were not trained on, for a file.
        public: declares a file's records public.
    """
    from sordino.data import load_dataset

    said = folder.meta.get("data")
    name = data or (str(said.get("name", "")) if isinstance(said, dict) else "")
    dataset = load_dataset(name, schema=schema, test=test, test_is_public=public)
    if isinstance(said, dict) and said.get("held_out_every") is not None:
        # Whose every fifth record was kept out of training: these are no members.
        split = replace(dataset, public=True, test=None).with_held_out_records()
        dataset = replace(dataset, train=split.train, test=split.test if dataset.test is None else dataset.test)
    if dataset.test is None or not len(dataset.test):
        raise InvalidArgument(
            "test must be a file of records that were not trained on, got none. Give --test: an "
            "attack compares members with such records."
        )
    return replace(dataset, public=dataset.public or public)


def recipe_of_run(folder: RunFolder, dataset: "DatasetSplits", model: str) -> "TrainingConfig":
    """The recipe of a run; `model` names the factory of a model of the user's own and is empty otherwise."""
    from sordino.cli.train import get_training_config

    training = folder.meta.get("training")
    said = str(training.get("model", "")) if isinstance(training, dict) else ""
    return get_training_config(folder.path, dataset, load_model_factory(model or said))


def _is_estimator(folder: RunFolder) -> bool:
    return folder.model_description.get("kind") == "estimator"


def _saved_classifier(folder: RunFolder, dataset: "DatasetSplits") -> "SavedModel":
    """The estimator of a run, for records of its form."""
    from sordino.recipes.saved_model import load_model

    saved = load_model(folder)
    if saved.is_regressor:
        raise InvalidArgument(
            "run must predict a label, got one of a number, which no attack here is made for. "
            "Its ε bounds every attack: see sordino report."
        )
    if saved.schema is not None and dataset.schema != saved.schema:
        raise InvalidArgument("data must have the columns and labels of the run, got others. Give the run's schema.")
    return saved


def _as_module(saved: "SavedModel") -> "nn.Module":
    """An estimator as features ↦ logits: logarithms of its probabilities, or its scores."""
    import numpy as np
    import torch

    from sordino.data import Records

    class Logits(torch.nn.Module):
        def forward(self, features: "Tensor") -> "Tensor":
            array = features.detach().cpu().numpy()
            records = Records(array, np.zeros(len(array), dtype=np.int64))
            chances = saved.probabilities(records)
            found = saved.scores(records) if chances is None else np.log(np.maximum(chances, 1e-300))
            return torch.from_numpy(np.asarray(found, dtype=np.float64))

    return Logits()


def _estimators_like(saved: "SavedModel", dataset_size: int) -> "TrainReference":
    """Reference models are fitted as the run's was, with the same ratio of noise to signal on fewer records."""
    from sordino.data import Records
    from sordino.estimators.base import independent_copy
    from sordino.recipes.tabular import FittedTable

    assert isinstance(saved.fitted, FittedTable)
    fitted = saved.fitted

    def train(features: "Tensor", labels: "Tensor") -> "nn.Module":
        own = independent_copy(fitted.estimator)
        parameters = own.get_params(deep=False)
        # Noise on sums falls as ε grows, and the sums of fewer records are smaller.
        changes: dict[str, object] = {"epsilon": parameters["epsilon"] * dataset_size / max(1, len(labels))}
        if parameters.get("dataset_size") is not None:
            changes["dataset_size"] = len(labels)
        own.set_params(**changes)
        targets = labels.numpy()
        rows = saved.rows(Records(features.numpy(), targets))
        own.fit(rows, 2.0 * targets - 1.0 if fitted.signs else targets)  # pyright: ignore[reportAttributeAccessIssue]
        return _as_module(replace(saved, fitted=FittedTable(estimator=own, signs=fitted.signs)))

    return train


def _with_parameters(recipe: "TrainingConfig", folder: RunFolder) -> "nn.Module":
    model = recipe.build_model()
    model.load_state_dict(folder.load_model())
    return model


def _attacked(
    folder: RunFolder,
    dataset: "DatasetSplits",
    model: "nn.Module",
    reference: "TrainReference | None",
    references: int,
    members: int,
) -> "MembershipReport":
    from sordino.audit.attacks import membership_report
    from sordino.randomness import KeyedRNG

    assert dataset.test is not None
    features, labels = dataset.train.tensors()
    others, other_labels = dataset.test.tensors()
    rng = KeyedRNG()
    count = min(members, len(labels), len(other_labels) // 2)
    return membership_report(
        model,
        (features[:count], labels[:count]),
        (others[:count], other_labels[:count]),
        population=(others[count : 3 * count], other_labels[count : 3 * count]),
        event=folder.event(),
        claim=folder.guarantee,
        train_reference=reference,
        references=references,
        label_names=dataset.labels,
        public=dataset.public,
        rng=rng,
    )


def _like_the_run(recipe: "TrainingConfig", population: int) -> "TrainReference":
    """Reference models are trained as the run was: same steps and clipping, and as much noise in the mean gradient."""
    import torch

    from sordino.recipes.training_config import cross_entropy_per_record
    from sordino.training.fit import fit

    def train(features: "Tensor", labels: "Tensor") -> torch.nn.Module:
        plan, share = recipe.plan, len(labels) / population
        own = replace(
            plan,
            expected_batch_size=plan.step_plan(0).expected_batch_size * share,
            noise_multiplier=plan.step_plan(0).noise_multiplier * share,
        )
        return fit(
            recipe.build_model(),
            cross_entropy_per_record,
            (features, labels),
            own,
            optimizer=recipe.build_optimizer,
            averaging=recipe.averaging,
            performance=recipe.performance,
            progress=False,
        ).model

    return train


def _page(report: "MembershipReport", files: dict[str, str]) -> tuple[RenderableType, ...]:
    best, ceiling = report.strongest, report.ceiling
    words = f"{best.name} finds members best: AUC {best.roc.auc:.3f}, no attack can exceed {ceiling.auc:.3f}"
    verdict = [
        Text(
            f"ABOVE THE CEILING: {', '.join(report.above_ceiling)}. The claimed guarantee is refuted.", style="bold red"
        )
        if report.above_ceiling
        else Text("No attack is above the ceiling."),
        Text("An attack that fails is no proof of privacy.", style="dim"),
    ]
    banner = [] if report.public else [Text(_PRIVATE, style="bold yellow"), Text()]
    claim = (
        "none"
        if report.claim is None
        else f"ε = {format_upper_bound(report.claim.epsilon)}, δ = {report.claim.delta:g}"
    )
    rows = [
        ("claim", claim),
        ("ceiling from", ceiling.source),
        ("attacked", f"{best.roc.members:,} members, {best.roc.non_members:,} others"),
        ("reference models", f"{report.references}, trained as the run was"),
        *files.items(),
    ]
    known = key_value_table([(one.name, one.knowledge) for one in report.attacks])
    blocks = (
        _attacks(report),
        Text("What the attacker knows besides the record"),
        known,
        _slices(report),
        key_value_table(rows),
    )
    return (*banner, heading(words), Group(*verdict), Text(), *blocks)


def _attacks(report: "MembershipReport") -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    rates = [rate.false_positive_rate for rate in report.strongest.roc.rates]
    table.add_column("attack", overflow="fold")
    for name in ("AUC", "advantage", *(f"TPR at {100 * rate:g} %" for rate in rates)):
        table.add_column(name, justify="right")
    for one in report.attacks:
        shown = [f"{100 * rate.value:.1f} % ({100 * rate.lower:.1f}–{100 * rate.upper:.1f})" for rate in one.roc.rates]
        table.add_row(one.name, f"{one.roc.auc:.3f}", f"{one.roc.advantage:.3f}", *shown)
    most = [f"{100 * report.ceiling.true_positive_rate(rate):.1f} %" for rate in rates]
    style, advantage = "bold", f"{report.ceiling.advantage:.3f}"
    table.add_row("ceiling of the claim", f"{report.ceiling.auc:.3f}", advantage, *most, style=style)
    return table


def _slices(report: "MembershipReport") -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("worst groups, each alone", "members", "AUC"):
        table.add_column(name, justify="left" if name.startswith("worst") else "right")
    for part in report.slices[:_SHOWN_SLICES]:
        table.add_row(part.name, f"{part.members:,}", f"{part.auc:.3f} ({part.lower:.3f}–{part.upper:.3f})")
    return table


# ----------------------------------------------------------------------------------------------------------------------
# `sordino diagnose RUN`: what clipping and noise did to a run's model, measured on public test records.
# ----------------------------------------------------------------------------------------------------------------------


_MARK = {True: "yes", False: "no"}
_TRAINED_ON = 256


@dataclass(frozen=True, kw_only=True)
class _Found:
    """What was measured; an estimator takes no gradient steps, so it has neither kernel nor courses."""

    kernel: "TangentKernel | None"
    courses: "Convergence | None"
    calibration: dict[str, dict[str, Metric]]
    gaps: "tuple[SubgroupGap, ...]"


def diagnose(
    run: Annotated[Path, typer.Argument(help="A run folder with a model.")],
    data: Annotated[
        str | None, typer.Option(help="The records of the run: a name, or a file; as the run says.")
    ] = None,
    schema: Annotated[Path | None, typer.Option(help="The declared schema of your file.")] = None,
    test: Annotated[Path | None, typer.Option(help="A PUBLIC file of the same form; all is measured on it.")] = None,
    data_is_public: Annotated[
        bool,
        typer.Option(
            "--data-is-public", help="Declare the training records public: a non-private baseline may be trained."
        ),
    ] = False,
    model: Annotated[str, typer.Option(help="module:factory, for a model of your own.")] = "",
    records: Annotated[int, typer.Option(help="Test records in the tangent kernel.")] = 16,
    steps: Annotated[int, typer.Option(help="Steps of training with noise alone, clipping alone, both, neither.")] = 40,
    out_file: Annotated[Path | None, typer.Option("--out", help="Also write the numbers to this file.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Tangent kernel, convergence, calibration and subgroups of a run's model, on public test records only."""
    checks.integer(1, records=records)
    checks.integer(1, steps=steps)
    out, folder = Output(as_json=as_json), RunFolder.open(run)
    dataset = load_run_dataset(folder, data, schema, test, public=data_is_public)
    if not dataset.public and test is None:
        raise InvalidArgument("test must be public records to measure on, got none. Give --test.")
    out.print_status(Text.assemble((run.name, "bold"), ": measured on public test records, nothing else is read"))
    with out.progress("measuring"):
        if _is_estimator(folder):
            found = _measured_estimator(_saved_classifier(folder, dataset), dataset)
        else:
            found = _measured(folder, dataset, recipe_of_run(folder, dataset, model), records, steps)
    document = {"run": run.name} | _document(found)
    if out_file is not None:
        out_file.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    out.print_result(document, *_diagnose_page(found))


def _measured(
    folder: RunFolder, dataset: "DatasetSplits", recipe: "TrainingConfig", records: int, steps: int
) -> _Found:
    from sordino.cli.training_job import probabilities, subgroups_of
    from sordino.recipes import non_private_baseline
    from sordino.report import compute_utility
    from sordino.research import measure_convergence, measure_tangent_kernel, subgroup_gaps

    assert dataset.test is not None
    private = recipe.build_model()
    start = recipe.build_model()
    private.load_state_dict(folder.load_model())
    features, labels = dataset.test.tensors()
    step = recipe.plan.step_plan(0)
    models: dict[str, nn.Module] = {"private": private}
    if dataset.public:
        models["baseline"] = non_private_baseline(dataset, recipe)
    chances = {name: probabilities(one, dataset.test) for name, one in models.items()}
    few = min(_TRAINED_ON, len(labels))
    return _Found(
        kernel=measure_tangent_kernel(private, features[:records], labels[:records], max_grad_norm=step.max_grad_norm),
        courses=measure_convergence(
            start,
            features[:few],
            labels[:few],
            steps=steps,
            learning_rate=recipe.learning_rate,
            max_grad_norm=step.max_grad_norm,
            # As much noise in the mean gradient as the run had, on far fewer records.
            noise_multiplier=step.noise_multiplier * few / step.expected_batch_size,
        ),
        calibration={
            name: compute_utility(chance, dataset.test.labels, public=True) for name, chance in chances.items()
        },
        gaps=subgroup_gaps(
            chances["private"], chances["baseline"], dataset.test.labels, subgroups_of(dataset, dataset.test)
        )
        if "baseline" in chances
        else (),
    )


def _measured_estimator(saved: "SavedModel", dataset: "DatasetSplits") -> _Found:
    """Accuracy, calibration and subgroups of an estimator, and of scikit-learn's linear model, on public records."""
    from scipy.special import softmax

    from sordino.cli.predict import measure
    from sordino.cli.training_job import subgroups_of
    from sordino.recipes.tabular import make_tabular_task, non_private_linear_predictions
    from sordino.report import compute_utility
    from sordino.research import subgroup_gaps

    assert dataset.test is not None
    test = dataset.test
    groups = subgroups_of(dataset, test)
    calibration = {"private": measure(saved, test, test.labels, groups)}
    gaps: tuple[SubgroupGap, ...] = ()
    if dataset.public:
        baseline = non_private_linear_predictions(make_tabular_task(dataset))
        calibration["baseline"] = compute_utility(baseline, test.labels, public=True)
        chances = saved.probabilities(test)
        own = softmax(saved.scores(test), axis=1) if chances is None else chances
        gaps = subgroup_gaps(own, baseline, test.labels, groups)
    return _Found(kernel=None, courses=None, calibration=calibration, gaps=gaps)


def _document(found: _Found) -> dict[str, object]:
    kernel, courses = found.kernel, found.courses
    return {
        "tangent_kernel": None
        if kernel is None
        else {
            "max_grad_norm": kernel.max_grad_norm,
            "records": kernel.records,
            "layers": list(kernel.layers),
            "rows": [
                {name: value for name, value in vars(row).items() if name != "matrix"}
                | {
                    "symmetric": row.symmetric,
                    "positive_form": row.positive_form,
                    "positive_eigenvalues": row.positive_eigenvalues,
                    "refutes": list(row.refutes),
                }
                for row in kernel.rows
            ],
        },
        "convergence": None if courses is None else {name: list(losses) for name, losses in courses.losses.items()},
        "metrics": {
            model: {name: metric.value for name, metric in metrics.items() if not name.startswith("subgroup")}
            for model, metrics in found.calibration.items()
        },
        "subgroups": [vars(gap) for gap in found.gaps],
    }


def _diagnose_page(found: _Found) -> tuple[RenderableType, ...]:
    blocks: list[RenderableType] = []
    if found.kernel is not None:
        refuted = [f"{row.name} ({', '.join(row.refutes)})" for row in found.kernel.rows if row.refutes]
        words = f"Beyond the published table: not kept here by {'; '.join(refuted)}" if refuted else ""
        note = f"clipping norm {found.kernel.max_grad_norm:g}; symmetric, form ≥ 0, eigenvalues ≥ 0; slope of the loss"
        head = heading("Clipping and the tangent kernel", note)
        blocks += [head, _kernel(found.kernel), Text(words, style="yellow"), Text()]
    if found.courses is not None:
        last = [(name, f"loss {losses[0]:.4f} → {losses[-1]:.4f}") for name, losses in found.courses.losses.items()]
        blocks += [
            heading("Noise and clipping apart", f"{found.courses.steps} full-batch steps"),
            key_value_table(last),
            Text(),
        ]
    blocks += [heading("Calibration"), _calibration(found.calibration)]
    if found.gaps:
        blocks += [heading("Whom privacy costs"), _gaps(found.gaps)]
    return tuple(blocks)


def _kernel(kernel: "TangentKernel") -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("clipping", "sym.", "form", "eig.", "predicted", "measured", "kept"):
        table.add_column(name, justify="left" if name == "clipping" else "right", no_wrap=True)
    for row in kernel.rows:
        marks = (_MARK[row.symmetric], _MARK[row.positive_form], _MARK[row.positive_eigenvalues])
        slopes = (f"{row.predicted:.4g}", f"{row.measured:.4g}", f"{100 * row.kept:.0f} %")
        table.add_row(row.name, *marks, *slopes)
    return table


def _calibration(calibration: dict[str, dict[str, Metric]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("model", "accuracy", "ECE", "MCE"):
        table.add_column(name, justify="left" if name == "model" else "right")
    for name, metrics in calibration.items():
        keys = ("test_accuracy", "test_ece", "test_mce")
        # A model without probabilities has no calibration.
        shown = [f"{100 * metrics[key].value:.1f} %" if key in metrics else "" for key in keys]
        table.add_row(name, *shown)
    return table


def _gaps(gaps: "tuple[SubgroupGap, ...]") -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("group", "records", "private", "baseline", "gap (95 %)"):
        table.add_column(name, justify="left" if name == "group" else "right")
    for gap in gaps:
        span = f"{100 * gap.gap:+.1f} ({100 * gap.lower:+.1f} to {100 * gap.upper:+.1f})"
        shares = (f"{100 * gap.private:.1f} %", f"{100 * gap.plain:.1f} %")
        table.add_row(f"{gap.column}: {gap.value}", f"{gap.records:,}", *shares, span)
    return table
