"""Run folders: what a training writes and what is measured of it; `runs_list`, `runs_show`, `runs_compare`."""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sordino.definitions import Guarantee, format_upper_bound
from sordino.errors import InvalidArgument, SordinoError
from sordino.runs import Metric, RunFolder
from sordino.runs.results import guarantee_body
from sordino.runs.transcript import encode_number

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import nn

    from sordino.data import DatasetSplits, Records
    from sordino.recipes.saved_model import SavedModel

# Columns with more values than this make subgroups that are too small to read.
_MOST_VALUES = 6


class Format(StrEnum):
    """What a report is written as."""

    HTML = "html"
    MD = "md"
    JSON = "json"
    REGISTRY = "registry"
    WORKSHEET = "worksheet"

    @property
    def file(self) -> str:
        """The name that the file has in a run folder."""
        others = {"registry": "registry.yaml", "worksheet": "worksheet.md"}
        return others.get(self.value, f"report.{self.value}")


@dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """What came out of a training.

    Args:
        run: its folder.
        guarantee: of everything in the folder.
        metrics: what was measured, on public records.
        steps: that were charged.
        interrupted: whether it was stopped before its end.
        details: what else the command tells, in JSON types.
    """

    run: RunFolder
    guarantee: Guarantee
    metrics: Mapping[str, Metric]
    steps: int
    interrupted: bool = False
    details: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, object]:
        """The outcome as JSON types."""
        guarantee, path = self.guarantee, self.run.path
        return {
            **guarantee_body(guarantee),
            "steps": self.steps,
            "interrupted": self.interrupted,
            "metrics": {
                name: metric.value for name, metric in self.metrics.items() if metric.public and ":" not in name
            },
            "run": str(path),
            "model": str(path / "model.safetensors"),
            "report": str(path / "report.html"),
            "picture": str(path / "report.png"),
            **self.details,
        }


def run_folder(name: str, out: Path | str | None) -> Path:
    """`out`, or the first unused ``runs/NAME-DATE-NUMBER``."""
    if out is not None:
        return Path(out)
    stem, number = f"{name}-{datetime.now():%Y-%m-%d}", 1
    while (path := Path("runs") / f"{stem}-{number}").exists():
        number += 1
    return path


@contextmanager
def closed_after_failure(run: RunFolder) -> Iterator[None]:
    """After a failure the run is closed; one in which nothing was charged leaves no folder."""
    try:
        yield
    except BaseException:
        run.close()
        if run.path.exists() and not any(run):
            shutil.rmtree(run.path)
        raise


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


def describe_data(dataset: "DatasetSplits", *, records: int | None, labels: int | None) -> dict[str, object]:
    """What a run states of its records; their number only where it counts as public."""
    return {
        "name": dataset.name,
        "records": records,
        "labels": labels,
        "source": dataset.source if dataset.public else "not public",
        "license": dataset.license,
        "public": dataset.public,
        "held_out_every": dataset.held_out_every,
    }


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
    for column in dataset.schema.columns if dataset.schema else ():
        names = getattr(column, "groups", ())
        if 2 <= len(names) <= _MOST_VALUES and ":" not in column.name:
            rest = "missing" if "other" in names else "other"
            groups[column.name] = category_values(dataset, records, column.name, [*names, rest])
    return groups


def category_values(dataset: "DatasetSplits", records: "Records", name: str, values: Sequence[str]) -> list[str]:
    """Each record's value in a category column of a table, of those listed; the last of `values` for any other."""
    import numpy as np

    first = 0
    for column in dataset.schema.columns if dataset.schema else ():
        if column.name == name:
            part = records.features[:, first : first + column.width]
            # A value that the schema does not list is all zeros.
            codes = np.where(part.max(axis=1) > 0, part.argmax(axis=1), column.width)
            return np.array(values, dtype=object)[codes].tolist()
        first += column.width
    raise KeyError(name)


def measure_test_records(
    dataset: "DatasetSplits", predict: "Callable[[Records], npt.NDArray[np.floating]]"
) -> dict[str, Metric]:
    """Accuracy, calibration and subgroups of probabilities on test records that are public; nothing without such."""
    from sordino.report import compute_utility

    test = dataset.test
    if test is None or not len(test) or not dataset.test_is_public:
        return {}
    return compute_utility(predict(test), test.labels, public=True, groups=subgroups_of(dataset, test))


def write_results(run: RunFolder, metrics: Mapping[str, Metric]) -> None:
    """Write what was measured, and the report."""
    from sordino.report import write_report

    run.write_metrics(metrics)
    write_report(run)


def measure(
    saved: "SavedModel",
    records: "Records",
    targets: "npt.NDArray[np.generic]",
    groups: Mapping[str, Sequence[str]] | None = None,
) -> dict[str, Metric]:
    """Accuracy and what is shown with it, or errors of a predicted number, on public records.

    Guarantee: none for the records: only call it for public ones.

    Args:
        saved: the model.
        records: encoded.
        targets: positions of the right labels, −1 where one is not listed; or numbers, NaN where there is none.
        groups: subgroups, by column.
    """
    import numpy as np

    from sordino.report import compute_label_utility, compute_regression_utility, compute_utility

    known = np.isfinite(targets) if saved.is_regressor else targets.astype(np.int64) >= 0
    if not known.any():
        raise InvalidArgument(
            f"column {saved.target!r} must hold {'numbers' if saved.is_regressor else 'listed labels'} to measure on, "
            "got none. Correct the column, or leave out --data-is-public."
        )
    if not saved.is_regressor and not known.all():
        raise InvalidArgument(
            f"labels of column {saved.target!r} must be among {', '.join(saved.labels[:12])}, got "
            f"{int((~known).sum()):,} rows with another label, or none. Correct them, or leave out --data-is-public."
        )
    if saved.is_regressor:
        return compute_regression_utility(saved.predict_encoded(records)[known], targets[known], public=True)
    chances = saved.probabilities(records)
    if chances is not None:
        return compute_utility(chances, targets, public=True, groups=groups)
    found, classes = saved.predict_encoded(records), len(saved.labels)
    scores = saved.scores(records)
    return compute_label_utility(found, targets, classes=classes, scores=scores, public=True, groups=groups)


# ----------------------------------------------------------------------------------------------------------------------
# Run folders at a glance.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """One run in a few numbers, none of which depends on a record unless it was declared public."""

    path: Path
    started: str
    state: str
    charged: int
    repeated: int
    segments: int
    guarantee: Guarantee | None
    epsilon: float | None
    plan: Mapping[str, object]
    facts: Mapping[str, object]
    metrics: Mapping[str, float]

    @classmethod
    def of(cls, run: RunFolder) -> "RunSummary":
        """Read them from the run's folder."""
        meta, guarantee, metrics = run.meta, run.guarantee, run.metrics
        lines = list(run)
        stated = [line.epsilon for line in lines if line.epsilon is not None]
        planned = run.plan.get("steps")
        reached = max((line.step + 1 for line in lines), default=0)
        is_whole = reached == planned or meta.get("open_ended") is True
        state = "cut off" if guarantee is None else "complete" if is_whole else "interrupted"
        return cls(
            path=run.path,
            started=str(meta.get("started", "")),
            state=state,
            charged=len(lines),
            repeated=sum(line.attempt > 1 for line in lines),
            segments=max(1, len(run.segments())),
            guarantee=guarantee,
            epsilon=guarantee.epsilon if guarantee else max(stated, default=None),
            plan=run.plan,
            facts={name: meta[name] for name in ("data", "training") if isinstance(meta.get(name), Mapping)},
            metrics={name: metric.value for name, metric in metrics.items() if metric.public},
        )

    @property
    def data(self) -> str:
        """Name of the dataset, when the run says it."""
        data = self.facts.get("data")
        return str(data.get("name", "")) if isinstance(data, Mapping) else ""

    @property
    def model(self) -> str:
        """Name of the model, when the run says it."""
        training = self.facts.get("training")
        return str(training.get("model", "")) if isinstance(training, Mapping) else ""

    def flat_facts(self) -> list[tuple[str, str, object]]:
        """Part, name and value of each fact."""
        return [
            (part, str(name), value)
            for part, body in self.facts.items()
            if isinstance(body, Mapping)
            for name, value in body.items()
            if value is not None
        ]

    def measured(self) -> dict[str, str]:
        """Values for all records; bins and subgroups are for the report and the JSON."""
        return {name: f"{value:.4f}" for name, value in self.metrics.items() if ":" not in name}

    def to_dict(self) -> dict[str, object]:
        """As plain JSON types."""
        return {
            "run": str(self.path),
            "started": self.started,
            "state": self.state,
            "epsilon": encode_number(self.epsilon),
            "delta": self.plan.get("delta"),
            "charged_steps": self.charged,
            "repeated_steps": self.repeated,
            "segments": self.segments,
            "description": None if self.guarantee is None else self.guarantee.describe(),
            "plan": dict(self.plan),
            **self.facts,
            "metrics": dict(self.metrics),
        }


@dataclass(frozen=True, kw_only=True)
class ListedRuns:
    """The runs in a folder.

    Args:
        runs: oldest first.
        unreadable: names of those that can't be read.
    """

    runs: Sequence[RunSummary]
    unreadable: Sequence[str]

    def to_dict(self) -> dict[str, Any]:
        """As JSON types."""
        return {"runs": [one.to_dict() for one in self.runs], "unreadable": list(self.unreadable)}


def runs_list(folder: Path | str = "runs") -> ListedRuns:
    """All runs in a folder, oldest first.

    Args:
        folder: Folder that contains the run folders.
    """
    folder, found, broken = Path(folder), [], []
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if not (path / "run.json").is_file():
            continue
        try:
            found.append(RunSummary.of(RunFolder.open(path)))
        except SordinoError:
            broken.append(path.name)
    return ListedRuns(runs=sorted(found, key=lambda one: (one.started, one.path.name)), unreadable=broken)


def runs_show(run: Path | str) -> RunSummary:
    """One run: what was planned, what was charged, what came out.

    Args:
        run: Run folder.
    """
    return RunSummary.of(RunFolder.open(run))


@dataclass(frozen=True, kw_only=True)
class RunsComparison:
    """Runs side by side.

    Args:
        runs: in the order given.
        columns: fields of each run, as texts.
    """

    runs: Sequence[RunSummary]
    columns: Sequence[Mapping[str, str]]

    @property
    def differing(self) -> list[str]:
        """Names of the fields that differ."""
        names = list(dict.fromkeys(name for column in self.columns for name in column))
        return [name for name in names if len({column.get(name, "") for column in self.columns}) > 1]

    def to_dict(self) -> dict[str, Any]:
        """As JSON types."""
        return {"runs": [one.to_dict() for one in self.runs], "differing": self.differing}


def runs_compare(folders: Sequence[Path | str]) -> RunsComparison:
    """Runs side by side, and what differs between them.

    Args:
        folders: Two or more run folders.
    """
    found = [RunSummary.of(RunFolder.open(folder)) for folder in folders]
    return RunsComparison(runs=found, columns=[_fields(one) for one in found])


def _fields(one: RunSummary) -> dict[str, str]:
    return {
        "state": one.state,
        "ε": "" if one.epsilon is None else format_upper_bound(one.epsilon, 4),
        "steps charged": f"{one.charged:,}",
        "repeated": f"{one.repeated:,}",
        **{name: describe_value(value) for name, value in one.plan.items()},
        **{f"{part} {name}": describe_value(value) for part, name, value in one.flat_facts()},
        **one.measured(),
    }


def describe_value(value: object) -> str:
    """A value of a plan on one line: objects as names and values."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {describe_value(part)}" for name, part in value.items())
    if isinstance(value, list):
        return " ".join(map(describe_value, value))
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    return f"{value:.6g}" if isinstance(value, float) else str(value)
