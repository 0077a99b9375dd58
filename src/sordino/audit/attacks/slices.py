"""Where an attack bites hardest (floor 4): by class, and by how hard a record is."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sordino import checks
from sordino.audit.attacks.roc import roc

__all__ = ["Slice", "slices"]

_FEWEST = 20


@dataclass(frozen=True, kw_only=True)
class Slice:
    """The attack on a group of records alone.

    Args:
        name: of the group.
        members: members in it.
        non_members: non-members in it.
        auc: area under the curve within the group.
        lower: end of its 95 % interval, for this group alone: of many groups one looks bad by chance.
        upper: the other end.
    """

    name: str
    members: int
    non_members: int
    auc: float
    lower: float
    upper: float


def slices(
    scores: NDArray[np.float64],
    *,
    members: int,
    labels: NDArray[np.int64],
    difficulty: NDArray[np.float64],
    label_names: tuple[str, ...] = (),
) -> tuple[Slice, ...]:
    """Classes and tenths of difficulty, the worst first; groups with fewer than 20 records on either side are left out.

    Args:
        scores: of all candidates, members first.
        members: how many of them are members, ≥ 1.
        labels: class of each candidate.
        difficulty: how hard each is for a model that has not seen it, a loss for instance.
        label_names: names of the classes.
    """
    inside = np.arange(len(scores)) < checks.integer(1, members=members)
    groups = {
        f"class {label_names[label] if label < len(label_names) else label}": labels == label
        for label in np.unique(labels).tolist()
    }
    tenth = np.minimum(10 * difficulty.argsort(kind="stable").argsort(kind="stable") // len(scores), 9)
    for k in range(10):
        words = " (easiest)" if k == 0 else " (hardest)" if k == 9 else ""
        groups[f"difficulty, tenth {k + 1}{words}"] = tenth == k
    found = []
    for name, mask in groups.items():
        mine, others = scores[mask & inside], scores[mask & ~inside]
        if min(len(mine), len(others)) < _FEWEST:
            continue
        curve = roc(mine, others, false_positive_rates=())
        lower, upper = curve.auc_interval
        found.append(
            Slice(name=name, members=len(mine), non_members=len(others), auc=curve.auc, lower=lower, upper=upper)
        )
    return tuple(sorted(found, key=lambda part: part.lower, reverse=True))
