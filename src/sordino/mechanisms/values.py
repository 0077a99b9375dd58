"""What a mechanism does to the values it is given before its proof applies (floor 1).

A value's kind and shape are public: a wrong one is refused. Its entries are private: none raises, none is quoted. An
entry that is not finite has no bounded change, so it is taken as 0 (a record with such an entry: as absent).
"""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from sordino import checks
from sordino.errors import InvalidArgument

__all__ = ["Bounds", "FloatArray", "Numbers", "Released", "checked_bounds", "finite_array", "record_matrix", "shaped"]

FloatArray: TypeAlias = npt.NDArray[np.float64]
Released: TypeAlias = np.float64 | FloatArray
Bounds: TypeAlias = tuple[float, float]
Numbers: TypeAlias = npt.ArrayLike | Sequence[object]


def finite_array(value: Numbers, *, name: str = "value") -> FloatArray:
    """A fresh float64 array of the value with every entry that is not finite set to 0."""
    array = np.asarray(value)
    if array.dtype.kind not in "biuf":
        raise InvalidArgument(f"{name} must be an array of real numbers, got dtype {array.dtype}. Convert it first.")
    with np.errstate(all="ignore"):  # a warning would tell that some entry overflows
        array = array.astype(np.float64)
    array[~np.isfinite(array)] = 0.0
    return array


def shaped(array: npt.NDArray[np.generic], dimension: int, *, name: str = "value") -> None:
    """Refuse an array whose number of entries is not the declared one."""
    if array.size != dimension:
        raise InvalidArgument(
            f"{name} must have {dimension} entries, got {array.size}. Declare dimension={array.size} or reshape."
        )


def checked_bounds(bounds: Bounds, *, name: str = "bounds") -> Bounds:
    """(lower, upper), both finite, lower < upper."""
    lower, upper = (float(end) for end in bounds)
    if not (np.isfinite(lower) and np.isfinite(upper) and lower < upper):
        raise InvalidArgument(
            f"{name} must be two finite numbers with lower < upper, got ({lower!r}, {upper!r}). "
            "Declare public bounds; never take them from the data."
        )
    checks.positive(range=upper - lower, hint="Declare closer bounds.")
    return lower, upper


def record_matrix(records: Numbers, columns: int, *, name: str = "records") -> tuple[FloatArray, npt.NDArray[np.bool_]]:
    """The records as float64 [n, columns], and which of them are present: those whose entries are all numbers.

    A record with a NaN or an infinite entry is absent; its row is zero.
    """
    array = np.asarray(records)
    if array.size == 0 and array.ndim <= 1:
        array = np.zeros((0, columns))
    if array.ndim == 1 and columns == 1:
        array = array[:, np.newaxis]
    if array.ndim != 2 or array.shape[1] != columns:
        raise InvalidArgument(
            f"{name} must have shape (n, {columns}), one row a record, got {array.ndim} dimensions"
            f"{f' and {array.shape[1]} columns' if array.ndim == 2 else ''}. Reshape them or declare other bounds."
        )
    if array.dtype.kind not in "biuf":
        raise InvalidArgument(f"{name} must be an array of real numbers, got dtype {array.dtype}. Convert it first.")
    with np.errstate(all="ignore"):
        matrix = array.astype(np.float64)
    present = np.asarray(np.isfinite(matrix).all(axis=1))
    matrix[~present] = 0.0
    return matrix, present
