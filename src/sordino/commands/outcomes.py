"""What a training leaves behind and what is measured of it: folder, guarantee, and figures on public records."""

import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from sordino.definitions import Guarantee
from sordino.errors import InvalidArgument
from sordino.runs import Metric, RunFolder

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import nn

    from sordino.data import DatasetSplits, Records
    from sordino.recipes.saved_model import SavedModel

__all__ = [
    "Format",
    "RunOutcome",
    "closed_after_failure",
    "composition_statement",
    "describe_data",
    "measure",
    "probabilities",
    "run_folder",
    "subgroups_of",
]

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
    details: Mapping[str, object] = field(default_factory=dict)

    def to_dict(self) -> dict[str, object]:
        """The outcome as JSON types."""
        guarantee, path = self.guarantee, self.run.path
        return {
            "epsilon": "inf" if math.isinf(guarantee.epsilon) else guarantee.epsilon,
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
