"""What a mechanism does to the values it is given before its proof applies.

A value's kind and shape are public: a wrong one is refused. Its entries are private: none raises, none is quoted. An
entry that is not finite has no bounded change, so it is taken as 0 (a record with such an entry: as absent).

Example:
    >>> from sordino.mechanisms import LaplaceMechanism
    >>> class Listener:
    ...     def released(self, release, draw):
    ...         print(release.operation, release.value, release.mechanism.scale)
    ...         return 7.0
    >>> with observe_releases(Listener()):
    ...     LaplaceMechanism(epsilon=2.0, l1_sensitivity=1.0).release(3.0)
    release 3.0 0.5
    7.0
"""

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import wraps
from numbers import Real
from typing import Concatenate, ParamSpec, Protocol, TypeAlias, TypeGuard, TypeVar, cast, runtime_checkable

import numpy as np
import numpy.typing as npt

from sordino import checks
from sordino.errors import InvalidArgument

FloatArray: TypeAlias = npt.NDArray[np.float64]
Released: TypeAlias = np.float64 | FloatArray
Bounds: TypeAlias = tuple[float, float]
Numbers: TypeAlias = npt.ArrayLike | Sequence[object]


# Types of columns (pandas, Polars) of which every entry may be missing. An array of objects may hold numbers and None.
_TEXT_TYPES = frozenset({"object", "str", "string", "category", "String", "Utf8", "Categorical", "Object"})


def check_column_types(value: object, name: str) -> None:
    """Refuse a table (pandas, Polars, Arrow), or a column of one, whose type is neither numbers nor booleans.

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
    kind = None if columns or isinstance(value, np.ndarray) else getattr(value, "dtype", None)
    if kind is not None and str(kind) in _TEXT_TYPES:
        raise not_numeric(name, kind)
    if wrong:
        raise InvalidArgument(
            f"{name} must have columns of numbers or booleans only, got {', '.join(wrong[:5])}"
            f"{f' and {len(wrong) - 5} more' if len(wrong) > 5 else ''}. Leave them out, or encode them by a "
            "public rule: one-hot of declared categories, numbers with NaN where missing."
        )


def not_numeric(name: str, kind: object) -> InvalidArgument:
    """The refusal of a column or array by its type, which is public."""
    return InvalidArgument(
        f"{name} must be of a numeric type, got {kind}. Convert it with {name}.astype(float): missing values "
        "become NaN. Encode texts by a public rule first."
    )


def _is_numeric_type(kind: object) -> bool:
    letter = getattr(kind, "kind", None)
    if isinstance(letter, str):  # numpy's and pandas' types
        return letter in "biuf"
    if callable(is_numeric := getattr(kind, "is_numeric", None)):  # Polars'
        return bool(is_numeric()) or str(kind) == "Boolean"
    return str(kind).startswith(("int", "uint", "float", "halffloat", "double", "bool", "decimal"))


def to_float_array(value: Numbers, name: str) -> FloatArray:
    """The value as a fresh float64 array; among objects, whatever is no real number is NaN.

    Raises:
        InvalidArgument: the type, or that of a column of a table, holds no real numbers, or rows differ in length.
    """
    check_column_types(value, name)
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
    array = to_float_array(value, name)
    array[~np.isfinite(array)] = 0.0
    return array


def check_dimension(array: npt.NDArray[np.generic], dimension: int, *, name: str = "value") -> None:
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
    array = to_float_array(records, name)
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
    """A value as an undeclared category; None for one that can't be one: no hash, or not finite.

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


# ----------------------------------------------------------------------------------------------------------------------
# The one door through which every mechanism releases, so that an audit can register an observer.
#
# `observable_release` marks the methods that turn a value into a noisy one. Without an observer a
# marked method has no overhead but one look at a variable. Inside ``with observe_releases(observer)`` the observer
# is asked instead, with the value, the mechanism, which knows its sensitivity and scale, and a way to draw the true
# answer.
# ----------------------------------------------------------------------------------------------------------------------


_Owner = TypeVar("_Owner")
_Answer = TypeVar("_Answer")
_Asked = ParamSpec("_Asked")


@dataclass(frozen=True, kw_only=True)
class Release:
    """One call of a mechanism. It holds private values: it is for audits on data made for them.

    Args:
        mechanism: the object that was asked; it states sensitivity, scale and event.
        operation: name of the method.
        value: its first argument, what is to be released.
        rest: the other arguments by position.
        named: the other arguments by name.
    """

    mechanism: object
    operation: str
    value: object
    rest: tuple[object, ...] = ()
    named: Mapping[str, object]


@runtime_checkable
class ReleaseObserver(Protocol):
    """The observers of the mechanisms."""

    def released(self, release: Release, draw: Callable[[], object]) -> object:
        """What the caller is answered: ``draw()``, or something else in its place."""
        ...


_OBSERVER: ContextVar[ReleaseObserver | None] = ContextVar("sordino_release_observer", default=None)


@contextmanager
def observe_releases(observer: ReleaseObserver) -> Iterator[None]:
    """Let `observer` see every release in the block, in this thread or task.

    Guarantee: none; whatever the observer keeps or changes is outside every guarantee. For tests and audits.
    """
    token = _OBSERVER.set(observer)
    try:
        yield
    finally:
        _OBSERVER.reset(token)


def observable_release(
    method: Callable[Concatenate[_Owner, _Asked], _Answer],
) -> Callable[Concatenate[_Owner, _Asked], _Answer]:
    """Mark a method of a mechanism as a release. Releases inside it belong to it and are not shown by themselves."""

    @wraps(method)
    def release(mechanism: _Owner, *args: _Asked.args, **kwargs: _Asked.kwargs) -> _Answer:
        observer = _OBSERVER.get()
        if observer is None:
            return method(mechanism, *args, **kwargs)

        def draw() -> object:
            token = _OBSERVER.set(None)
            try:
                return method(mechanism, *args, **kwargs)
            finally:
                _OBSERVER.reset(token)

        asked = Release(
            mechanism=mechanism,
            operation=method.__name__,
            value=args[0] if args else next(iter(kwargs.values()), None),
            rest=tuple(args[1:]),
            named=dict(kwargs),
        )
        return cast("_Answer", observer.released(asked, draw))

    return release


# ----------------------------------------------------------------------------------------------------------------------
# The integer grid that exact mechanisms live on: multiples of a power of two.
#
# Multiplying by a power of two is exact in floating point, so rounding to the grid is the only rounding there is. It
# moves two values apart by less than one step in each coordinate, which is added to the sensitivity.
#
# References:
#     Canonne, Kamath, Steinke 2020, "The discrete Gaussian for differential privacy", section 1.
# ----------------------------------------------------------------------------------------------------------------------


IntegerArray = npt.NDArray[np.int64]

# Values are clamped here (a map that moves no two values apart), so that value + noise stays inside int64.
_LARGEST = 1 << 61


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Multiples of 2^exponent.

    Example:
        >>> grid = Grid(exponent=-2)
        >>> grid.integers(0.8).tolist(), float(grid.values(grid.integers(0.8)))
        (3, 0.75)
    """

    exponent: int

    def __post_init__(self) -> None:
        checks.in_range(-900, 900, exponent=self.exponent, hint="Rescale the value or its sensitivity.")

    @classmethod
    def of_step(cls, granularity: float) -> "Grid":
        """The grid with this step, which must be a power of two."""
        mantissa, exponent = math.frexp(checks.positive(granularity=granularity))
        if mantissa != 0.5:
            raise InvalidArgument(
                f"granularity must be a power of two, got {granularity!r}. "
                f"Use {math.ldexp(1.0, exponent - 1)!r}: only then is dividing by it exact."
            )
        return cls(exponent=exponent - 1)

    @classmethod
    def below(cls, step: float) -> "Grid":
        """The grid with the largest power of two that is at most `step`."""
        return cls(exponent=math.frexp(checks.positive(step=step))[1] - 1)

    @property
    def step(self) -> float:
        """Distance of neighboring grid points."""
        return math.ldexp(1.0, self.exponent)

    def integers(self, value: Numbers) -> IntegerArray:
        """The nearest grid points as int64 multiples of the step; entries that are not finite are 0."""
        with np.errstate(all="ignore"):  # ±∞ after scaling is clamped; a warning would tell
            scaled = np.rint(np.ldexp(finite_array(value), -self.exponent))
        return np.asarray(np.clip(scaled, -_LARGEST, _LARGEST), dtype=np.int64)

    def values(self, integers: IntegerArray) -> FloatArray:
        """The grid points as floats."""
        return np.asarray(np.ldexp(integers.astype(np.float64), self.exponent))


def whole_array(value: Numbers) -> IntegerArray:
    """An integer value as int64, clamped so that noise can be added."""
    array = np.asarray(value)
    if array.dtype.kind not in "biu":
        raise InvalidArgument(
            f"value must be an array of integers, got dtype {array.dtype}. Use the mechanism for real values."
        )
    if array.dtype.kind == "u":
        array = np.minimum(array, _LARGEST)
    return np.asarray(np.clip(array.astype(np.int64), -_LARGEST, _LARGEST))


def ratio_at_least(scale: Fraction) -> tuple[int, int]:
    """Integers (a, b), b a power of two ≤ 2⁴⁰, with scale ≤ a/b: noise is never less than asked for.

    At most 2⁻³⁰ more, relatively, for scales above 2⁻¹⁰; smaller ones hardly ever give noise other than 0.

    Example:
        >>> ratio_at_least(Fraction(3, 2))[0] / ratio_at_least(Fraction(3, 2))[1]
        1.5
    """
    bits = 0
    while bits < 40 and math.ceil(scale * (1 << bits)) < 1 << 30:
        bits += 1
    denominator = 1 << bits
    numerator = math.ceil(scale * denominator)
    # Small terms make the draws cheaper; a common power of two changes nothing.
    common = math.gcd(numerator, denominator)
    return numerator // common, denominator // common
