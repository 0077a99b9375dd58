"""`runs_list`, `runs_show`, `runs_compare`: run folders at a glance."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sordino.definitions import Guarantee, format_upper_bound
from sordino.errors import SordinoError
from sordino.runs import RunFolder

if TYPE_CHECKING:
    pass

__all__ = [
    "ListedRuns",
    "RunSummary",
    "RunsComparison",
    "describe_value",
    "runs_compare",
    "runs_list",
    "runs_show",
]


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
            "epsilon": None if self.epsilon is None else ("inf" if math.isinf(self.epsilon) else self.epsilon),
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
        folder: that holds the run folders.
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
        run: a run folder.
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
        folders: run folders.
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
