"""Whom privacy costs most (floor 4): accuracy by subgroup, of the private model against its non-private twin."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sordino.errors import InvalidArgument

__all__ = ["SubgroupGap", "subgroup_gaps"]

_Z95 = 1.959963984540054


@dataclass(frozen=True, kw_only=True)
class SubgroupGap:
    """One group's accuracies.

    Args:
        column: what the records are grouped by.
        value: the group.
        records: records in it.
        private: accuracy of the private model, in [0, 1].
        plain: accuracy of the twin.
        gap: private − plain: negative where privacy costs accuracy.
        lower: end of the gap's 95 % interval, for this group alone.
        upper: the other end.
    """

    column: str
    value: str
    records: int
    private: float
    plain: float
    gap: float
    lower: float
    upper: float


def subgroup_gaps(
    private: ArrayLike, plain: ArrayLike, labels: ArrayLike, groups: Mapping[str, Sequence[str]]
) -> tuple[SubgroupGap, ...]:
    """The cost of privacy for each group of public records, the dearest first within a column.

    Both models are measured on the same records, so the interval is that of a paired difference, narrower than
    two intervals side by side.

    Guarantee: none beyond the models'; measure on public records.

    Args:
        private: the private model's probabilities, (records, classes).
        plain: the twin's.
        labels: (records,), indices of classes.
        groups: for each column the value of every record.

    References:
        Bagdasaryan, Poursaeed, Shmatikov 2019, "Differential privacy has disparate impact on model accuracy"; Agresti,
        Min 2005, section 2, for the interval.
    """
    right = np.asarray(labels)
    one, two = (_correct(chances, right) for chances in (private, plain))
    found = []
    for column, values in groups.items():
        names = np.asarray([str(value) for value in values])
        if names.shape != right.shape:
            raise InvalidArgument(
                f"groups must have one value a record, got {len(names)} for {len(right)} records in {column!r}."
            )
        gaps = [
            _gap(column, value, one[names == value], two[names == value]) for value in dict.fromkeys(names.tolist())
        ]
        found += sorted(gaps, key=lambda part: part.gap)
    return tuple(found)


def _correct(chances: ArrayLike, labels: NDArray[np.int64]) -> NDArray[np.bool_]:
    values = np.asarray(chances, dtype=np.float64)
    if values.ndim != 2 or values.shape[:1] != labels.shape:
        raise InvalidArgument(
            f"probabilities must have shape (records, classes), got {values.shape} for {len(labels)} records."
        )
    return values.argmax(axis=1) == labels


def _gap(column: str, value: str, private: NDArray[np.bool_], plain: NDArray[np.bool_]) -> SubgroupGap:
    count = len(private)
    lost, won = int((plain & ~private).sum()), int((private & ~plain).sum())
    # Half a record more in each of the four cells keeps the interval honest where hardly anything differs.
    n, b, c = count + 2, lost + 0.5, won + 0.5
    centre, half = (c - b) / n, _Z95 * math.sqrt((b + c) - (c - b) ** 2 / n) / n
    return SubgroupGap(
        column=column,
        value=value,
        records=count,
        private=float(private.mean()),
        plain=float(plain.mean()),
        gap=(won - lost) / count,
        lower=max(-1.0, centre - half),
        upper=min(1.0, centre + half),
    )
