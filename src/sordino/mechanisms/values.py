"""What a mechanism does to the values it is given before its proof applies (floor 1).

A value's kind and shape are public: a wrong one is refused. Its entries are private: none raises, none is quoted. An
entry that is not finite has no bounded change, so it is taken as 0 (a record with such an entry: as absent).
"""

from collections.abc import Hashable, Iterable, Sequence
from decimal import Decimal
from numbers import Real
from typing import TypeAlias, TypeGuard

import numpy as np
import numpy.typing as npt

from sordino import checks
from sordino.errors import InvalidArgument

__all__ = [
    "Bounds",
    "FloatArray",
    "Numbers",
    "Released",
    "category_codes",
    "checked_bounds",
    "finite_array",
    "numeric",
    "open_category",
    "record_matrix",
    "refuse_column_types",
    "shaped",
]

FloatArray: TypeAlias = npt.NDArray[np.float64]
Released: TypeAlias = np.float64 | FloatArray
Bounds: TypeAlias = tuple[float, float]
Numbers: TypeAlias = npt.ArrayLike | Sequence[object]


def refuse_column_types(value: object, name: str) -> None:
    """Refuse a table (pandas, Polars, Arrow) with a column whose type is neither numbers nor booleans.

    The types are public; what a text column would give, only missing values, would be an answer of noise.
    """
    types = getattr(value, "dtypes", None)
    if types is not None and hasattr(value, "columns"):
        columns = list(zip(getattr(value, "columns"), types, strict=True))  # noqa: B009 (no type checker knows it)
    elif hasattr(value, "schema") and hasattr(getattr(value, "schema"), "types"):  # noqa: B009
        columns = list(zip(value.schema.names, value.schema.types, strict=True))  # pyright: ignore[reportAttributeAccessIssue]
    else:
        columns = []
    wrong = [f"{column!r} ({kind})" for column, kind in columns if not _is_numeric_type(kind)]
    if wrong:
        raise InvalidArgument(
            f"{name} must have columns of numbers or booleans only, got {', '.join(wrong[:5])}"
            f"{f' and {len(wrong) - 5} more' if len(wrong) > 5 else ''}. Leave them out, or encode them by a "
            "public rule: one-hot of declared categories, numbers with NaN where missing."
        )


def _is_numeric_type(kind: object) -> bool:
    letter = getattr(kind, "kind", None)
    if isinstance(letter, str):  # numpy's and pandas' types
        return letter in "biuf"
    if callable(is_numeric := getattr(kind, "is_numeric", None)):  # Polars'
        return bool(is_numeric()) or str(kind) == "Boolean"
    return str(kind).startswith(("int", "uint", "float", "halffloat", "double", "bool", "decimal"))


def numeric(value: Numbers, name: str) -> FloatArray:
    """The value as a fresh float64 array; among objects, whatever is no real number is NaN.

    Raises:
        InvalidArgument: the type, or that of a column of a table, holds no real numbers, or rows differ in length.
    """
    refuse_column_types(value, name)
    try:
        array = np.asarray(value)
    except ValueError:  # its message would tell how many records there are
        array = None
    if array is None:
        raise InvalidArgument(f"{name} must be an array, got rows of different lengths. Give each record all columns.")
    if array.dtype == object:
        numbers = [_real(entry) for entry in array.flat]
        return np.array(numbers, dtype=np.float64).reshape(array.shape)
    if array.dtype.kind not in "biuf":
        raise InvalidArgument(f"{name} must be an array of real numbers, got dtype {array.dtype}. Convert it first.")
    with np.errstate(all="ignore"):  # a warning would tell that some entry overflows
        return np.array(array, dtype=np.float64)


def _real(entry: object) -> float:
    try:
        return float(entry) if isinstance(entry, Real | Decimal | np.bool_) else np.nan
    except (OverflowError, TypeError, ValueError):  # a whole number or fraction beyond the range of float64
        return np.nan


def finite_array(value: Numbers, *, name: str = "value") -> FloatArray:
    """A fresh float64 array of the value with every entry that is not finite set to 0."""
    array = numeric(value, name)
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
    array = numeric(records, name)
    if array.size == 0 and array.ndim <= 1:
        array = np.zeros((0, columns))
    if array.ndim == 1 and columns == 1:
        array = array[:, np.newaxis]
    if array.ndim != 2 or array.shape[1] != columns:
        raise InvalidArgument(
            f"{name} must have shape (n, {columns}), one row a record, got {array.ndim} dimensions"
            f"{f' and {array.shape[1]} columns' if array.ndim == 2 else ''}. Reshape them or declare other bounds."
        )
    present = np.asarray(np.isfinite(array).all(axis=1))
    array[~present] = 0.0
    return array, present


def category_codes(values: Iterable[object], categories: tuple[Hashable, ...]) -> npt.NDArray[np.int64]:
    """The position of each value among the declared categories; −1 for one that is none of them."""
    number = {category: position for position, category in enumerate(categories)}
    listed = values.tolist() if isinstance(values, np.ndarray) else values
    return np.array([number.get(value, -1) if _has_hash(value) else -1 for value in listed], dtype=np.int64)


def open_category(value: object) -> Hashable:
    """A value as a category that nobody declared; None for one that can't be one: no hash, or not finite.

    Equal numbers become one and the same (True and 1.0 are 1): which of them came first is private.
    """
    if not _has_hash(value):
        return None
    if isinstance(value, Real | Decimal):
        number = float(value)
        return None if not np.isfinite(number) else int(number) if number == int(number) else number
    return value


def _has_hash(value: object) -> TypeGuard[Hashable]:
    try:
        hash(value)
    except TypeError:  # a tuple may hold something without one
        return False
    return True
