"""What an estimator does with the records it is given, before any proof applies (floor 4).

Shapes, types and the number of columns are public: wrong ones are refused. Entries are private: none raises, none is
quoted. A record with an entry that is not finite, or with a label that nobody declared, stays in its place and
contributes nothing, so the same rule serves every neighbouring relation.
"""

import warnings
from collections.abc import Hashable, Sequence
from typing import TypeAlias, TypeVar, cast

import numpy as np
import numpy.typing as npt
from scipy.sparse import issparse
from sklearn.base import BaseEstimator
from sklearn.exceptions import DataConversionWarning
from sklearn.utils.validation import validate_data

from sordino import checks
from sordino.errors import InvalidArgument, MissingDeclaration
from sordino.mechanisms.values import FloatArray, Numbers, category_codes, numeric

__all__ = [
    "ColumnBounds",
    "Labels",
    "codes",
    "column_bounds",
    "declared",
    "declared_classes",
    "matrix",
    "normalised_rows",
    "one_a_record",
    "scaled_targets",
    "unit_rows",
]

Labels: TypeAlias = Sequence[Hashable] | npt.NDArray[np.generic]
ColumnBounds: TypeAlias = tuple[npt.ArrayLike, npt.ArrayLike]
_Value = TypeVar("_Value")

# Rows at the boundary are kept this much inside, so that rounding can't lengthen them past it.
_INSIDE = 1e-12


def declared(value: _Value | None, *, name: str, meaning: str) -> _Value:
    """The value, unless nobody declared it."""
    if value is None:
        raise MissingDeclaration(
            f"{name} must be declared ({meaning}), got None. Take it from public knowledge, never from the data."
        )
    return value


def matrix(X: Numbers, *, estimator: BaseEstimator, reset: bool) -> tuple[FloatArray, npt.NDArray[np.bool_]]:
    """X as float64 [n, d] and which rows are whole; the others are zero. Sets or checks the number of columns."""
    if issparse(X):
        raise InvalidArgument("X must be dense, got a sparse container. Convert it with .toarray().")
    if getattr(getattr(X, "dtype", None), "kind", "") == "c":
        raise InvalidArgument("X must be real. Complex data not supported: split real and imaginary parts.")
    _refuse_objects(X, "X")
    array = numeric(X, "X")
    if array.ndim != 2 or array.shape[1] == 0:
        raise InvalidArgument(
            f"X must be a matrix, one row a record, with at least one column, got {array.ndim} dimensions"
            f"{' and 0 feature(s) while a minimum of 1 is required' if array.ndim == 2 else ''}. Reshape your data."
        )
    validate_data(estimator, cast("str", X), reset=reset, skip_check_array=True)  # its stub knows only the default
    present = np.asarray(np.isfinite(array).all(axis=1))
    array[~present] = 0.0
    return array, present


def _refuse_objects(values: object, name: str) -> None:
    """Refuse an array or column that is declared to hold objects: of texts, every record would be missing."""
    kind = getattr(values, "dtype", None)
    if kind is not None and not hasattr(values, "columns") and str(kind) in ("object", "str", "string", "category"):
        raise InvalidArgument(
            f"{name} must be of a numeric type, got {kind}. Convert it with {name}.astype(float): missing values "
            "become NaN. Encode texts by a public rule first."
        )


def codes(y: Labels, classes: Sequence[Hashable]) -> npt.NDArray[np.int64]:
    """The position of each label among the declared classes [n]; −1 for one that is none of them."""
    listed = np.asarray(y).ravel() if hasattr(y, "__array__") else y
    return category_codes(listed, tuple(classes))


def scaled_targets(y: Numbers, bounds: tuple[float, float], *, centre: float, half: float) -> FloatArray:
    """Targets clipped to the bounds, then (y − centre)/half in [−1, 1], float64 [n]; NaN where one is not finite."""
    _refuse_objects(y, "y")
    targets = numeric(y, "y").ravel()
    with np.errstate(all="ignore"):  # warnings would tell of extreme targets
        scaled = np.clip((np.clip(targets, *bounds) - centre) / half, -1.0, 1.0)
    scaled[~np.isfinite(targets)] = np.nan
    return scaled


def one_a_record(y: Numbers | Labels | None, records: int) -> None:
    """Refuse targets that are not one a record; how many there are is not told."""
    if y is None:
        raise InvalidArgument("y must be given: requires y to be passed, but the target y is None.")
    shape = np.asarray(y).shape
    if not (len(shape) == 1 or (len(shape) == 2 and shape[1] == 1)):
        raise InvalidArgument(f"y must be a vector, got {len(shape)} dimensions. Give one target a record.")
    if len(shape) == 2:  # the shape is public, so the warning tells nothing
        warnings.warn("A column-vector y was passed when a 1d array was expected.", DataConversionWarning, stacklevel=3)
    if shape[0] != records:
        raise InvalidArgument(
            "y must have one entry for each row of X, got inconsistent numbers of samples. Align them."
        )


def unit_rows(rows: FloatArray, norm: float) -> FloatArray:
    """Rows divided by `norm`, and those that are then longer than 1 cut back to length 1."""
    largest = np.maximum(np.abs(rows).max(axis=1, initial=0.0, keepdims=True), norm * 2.0**-40)
    with np.errstate(all="ignore"):
        # Entries are scaled before they are divided: neither huge nor tiny ones overflow. largest/norm may, to ∞.
        directions = rows / largest
        lengths = np.sqrt(np.square(directions).sum(axis=1, keepdims=True))
        return directions * np.minimum(largest / norm, 1 / (lengths * (1 + _INSIDE)))


def normalised_rows(rows: FloatArray) -> FloatArray:
    """Rows [n, d] scaled to length 1, each by itself; zero stays zero."""
    largest = np.abs(rows).max(axis=1, initial=0.0, keepdims=True)
    with np.errstate(all="ignore"):  # a warning would tell that a row is zero or extreme
        directions = np.where(largest > 0, rows / largest, 0.0)
        lengths = np.sqrt(np.square(directions).sum(axis=1, keepdims=True))
    return directions / np.maximum(lengths, 1.0)


def declared_classes(classes: Sequence[Hashable] | None) -> npt.NDArray[np.generic]:
    """The declared classes as an array of at least two, all different."""
    listed = declared(classes, name="classes", meaning="all labels that may occur")
    array = np.asarray(listed)
    if array.ndim != 1 or len(array) < 2 or len(set(array.tolist())) != len(array):
        raise InvalidArgument(f"classes must be at least two different labels, got {listed!r}. List each once.")
    return array


def column_bounds(bounds: ColumnBounds | None, columns: int) -> tuple[FloatArray, FloatArray]:
    """(lower, upper), one number a column each; a single number serves all columns."""
    ends = declared(bounds, name="bounds", meaning="(lower, upper) of the columns")
    if len(ends) != 2:
        raise InvalidArgument(f"bounds must be a pair (lower, upper), got {len(ends)} parts. Declare them so.")
    lower, upper = (np.asarray(end, dtype=np.float64) for end in ends)
    if any(end.ndim > 1 or (end.ndim == 1 and len(end) != columns) for end in (lower, upper)):
        raise InvalidArgument(f"bounds must be numbers or vectors of {columns} entries. Declare one of each a column.")
    lower, upper = np.broadcast_to(lower, columns), np.broadcast_to(upper, columns)
    with np.errstate(all="ignore"):
        fine = np.isfinite(lower) & np.isfinite(upper) & (lower < upper) & np.isfinite(upper - lower)
    if not fine.all():
        raise InvalidArgument("bounds must be finite with lower < upper in every column. Declare public bounds.")
    checks.in_range(2.0**-400, 2.0**400, smallest_range=float((upper - lower).min()), hint="Rescale the column.")
    checks.in_range(2.0**-400, 2.0**400, largest_range=float((upper - lower).max()), hint="Rescale the column.")
    return lower.copy(), upper.copy()
