"""Columns of a table as features with a fixed list of bins (floor 4): intervals, categories, one-hot groups.

Everything here is declared: which columns belong together, where intervals begin, which categories exist.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sordino import checks
from sordino.errors import InvalidArgument
from sordino.estimators.intake import ColumnBounds, column_bounds
from sordino.mechanisms.values import FloatArray

__all__ = ["Categories", "Edges", "Feature", "declared_features"]

Categories = Mapping[int, Sequence[float]]
Edges = Mapping[int, Sequence[float]]


@dataclass(frozen=True, kw_only=True)
class Feature:
    """One feature: a column cut into intervals or listed by value, or columns of which one at most is set.

    Args:
        columns: where it stands in the table; more than one for a one-hot group.
        edges: rising ends of the intervals, the first and last included; a number beyond them is in the nearest.
        values: or the categories of the one column.

    Example:
        >>> Feature(columns=(0,), edges=(0.0, 1.0, 2.0)).bins_of(np.array([[0.5], [1.0], [9.0]])).tolist()
        [0, 1, 1]
        >>> Feature(columns=(0,), values=(3.0, 7.0)).bins_of(np.array([[7.0], [5.0]])).tolist()
        [1, -1]
    """

    columns: tuple[int, ...]
    edges: tuple[float, ...] | None = None
    values: tuple[float, ...] | None = None

    @property
    def bins(self) -> int:
        """Number of bins."""
        if self.edges is not None:
            return len(self.edges) - 1
        return len(self.values) if self.values is not None else len(self.columns)

    @property
    def ordered(self) -> bool:
        """Whether neighbouring bins are alike: intervals are, categories are not."""
        return self.edges is not None

    def bins_of(self, records: FloatArray) -> npt.NDArray[np.int64]:
        """The one bin of each record [n]; −1 for a category that nobody declared."""
        if self.edges is not None:
            inner = np.array(self.edges[1:-1])
            return np.searchsorted(inner, records[:, self.columns[0]], side="right").astype(np.int64)
        if self.values is not None:
            order = np.argsort(self.values)
            listed = np.array(self.values)[order]
            column = records[:, self.columns[0]]
            places = np.minimum(np.searchsorted(listed, column), len(listed) - 1)
            return np.where(listed[places] == column, order[places], -1).astype(np.int64)
        group = records[:, list(self.columns)]
        return np.where(group.max(axis=1) > 0, group.argmax(axis=1), -1).astype(np.int64)


def declared_features(
    columns: int,
    *,
    bounds: ColumnBounds | None,
    categories: Categories | None,
    one_hot: Sequence[Sequence[int]] | None,
    edges: Edges | None,
    max_bins: int,
) -> tuple[Feature, ...]:
    """The features of a table, in the order of their first columns.

    Args:
        columns: number of columns d of the table.
        bounds: (lower, upper) of the columns that become intervals of equal width.
        categories: the listed values of some columns.
        one_hot: groups of columns, each group one category.
        edges: intervals of some columns, in place of those of equal width.
        max_bins: number of intervals of equal width, ≥ 2.
    """
    checks.integer(2, max_bins=max_bins)
    lower, upper = column_bounds(bounds, columns)
    groups = [tuple(int(column) for column in group) for group in one_hot or ()]
    listed = {int(column): _different(values) for column, values in (categories or {}).items()}
    cut = {int(column): _rising(ends) for column, ends in (edges or {}).items()}
    named = [column for group in (*groups, tuple(listed), tuple(cut)) for column in group]
    if len(set(named)) < len(named) or any(not 0 <= column < columns for column in named) or not all(groups):
        raise InvalidArgument(
            f"categories, one_hot and edges must name each of the columns 0 … {columns - 1} once at most, got "
            f"{sorted(named)}. Correct the lists."
        )
    found = [Feature(columns=group) for group in groups]
    for column in range(columns):
        if column in listed:
            found.append(Feature(columns=(column,), values=listed[column]))
        elif column in cut:
            found.append(Feature(columns=(column,), edges=cut[column]))
        elif column not in named:
            ends = np.linspace(lower[column], upper[column], max_bins + 1)
            found.append(Feature(columns=(column,), edges=_rising(ends.tolist())))
    return tuple(sorted(found, key=lambda feature: feature.columns[0]))


def _different(values: Sequence[float]) -> tuple[float, ...]:
    numbers = tuple(float(value) for value in values)
    if not numbers or len(set(numbers)) < len(numbers) or not np.isfinite(numbers).all():
        raise InvalidArgument(f"categories must be different finite numbers, got {numbers!r}. List each once.")
    return numbers


def _rising(ends: Sequence[float]) -> tuple[float, ...]:
    numbers = tuple(float(end) for end in ends)
    if len(numbers) < 2 or not np.isfinite(numbers).all() or not (np.diff(numbers) > 0).all():
        raise InvalidArgument(f"edges must be at least two rising numbers, got {len(numbers)}. Declare wider bounds.")
    return numbers
