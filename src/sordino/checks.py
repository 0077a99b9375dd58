"""The one form of argument check: ``positive(noise_multiplier=x)`` returns x or raises.

Every function takes exactly one keyword argument, whose name becomes the name in the message:
``<name> must be <constraint>, got <value>. <hint>.``
"""

import math
from collections.abc import Collection, Iterable
from numbers import Integral, Real

from sordino.errors import InvalidArgument

__all__ = ["in_range", "integer", "non_negative", "one_of", "positive", "probability", "several"]


def _single(argument: dict[str, object]) -> tuple[str, object]:
    if len(argument) != 1:
        raise TypeError(f"a check takes exactly one keyword argument, got {sorted(argument)}")
    return next(iter(argument.items()))


def _raise_invalid(name: str, constraint: str, value: object, hint: str) -> InvalidArgument:
    return InvalidArgument(f"{name} must be {constraint}, got {value!r}.{' ' + hint if hint else ''}")


def _real(name: str, value: object, constraint: str, hint: str) -> float:
    # Asking an abstract class takes longer than the rest of a check.
    if type(value) is not float and (isinstance(value, bool) or not isinstance(value, Real)):
        raise _raise_invalid(name, constraint, value, hint)
    number = float(value)
    if math.isnan(number):
        raise _raise_invalid(name, constraint, value, hint)
    return number


def positive(*, hint: str = "", **argument: object) -> float:
    """A finite real number > 0."""
    name, value = _single(argument)
    number = _real(name, value, "a finite number > 0", hint)
    if not 0 < number < math.inf:
        raise _raise_invalid(name, "a finite number > 0", value, hint)
    return number


def non_negative(*, hint: str = "", **argument: object) -> float:
    """A finite real number ≥ 0."""
    name, value = _single(argument)
    number = _real(name, value, "a finite number ≥ 0", hint)
    if not 0 <= number < math.inf:
        raise _raise_invalid(name, "a finite number ≥ 0", value, hint)
    return number


def in_range(low: float, high: float, *, hint: str = "", **argument: object) -> float:
    """A real number in the closed interval [low, high]."""
    name, value = _single(argument)
    constraint = f"a number in [{low:g}, {high:g}]"
    number = _real(name, value, constraint, hint)
    if not low <= number <= high:
        raise _raise_invalid(name, constraint, value, hint)
    return number


def probability(*, zero: bool = True, one: bool = True, hint: str = "", **argument: object) -> float:
    """A real number in [0, 1], with either end open when `zero` or `one` is False."""
    name, value = _single(argument)
    constraint = f"a number in {'[' if zero else '('}0, 1{']' if one else ')'}"
    number = _real(name, value, constraint, hint)
    if not 0 <= number <= 1 or (number == 0 and not zero) or (number == 1 and not one):
        raise _raise_invalid(name, constraint, value, hint)
    return number


def integer(low: int | None = None, *, hint: str = "", **argument: object) -> int:
    """An integer, at least `low` when given. Floats are refused even when they are whole."""
    name, value = _single(argument)
    constraint = "an integer" if low is None else f"an integer ≥ {low}"
    if type(value) is not int and (isinstance(value, bool) or not isinstance(value, Integral)):
        raise _raise_invalid(name, constraint, value, hint)
    number = int(value)
    if low is not None and number < low:
        raise _raise_invalid(name, constraint, value, hint)
    return number


def one_of(choices: Collection[object], *, hint: str = "", **argument: object) -> object:
    """One of the listed values."""
    name, value = _single(argument)
    if value not in choices:
        raise _raise_invalid(name, "one of " + ", ".join(map(str, choices)), value, hint)
    return value


def several(*, hint: str = "", **argument: object) -> list[object]:
    """A list of values: a sequence or an array, and no single number or text. What is in it is not checked."""
    name, value = _single(argument)
    if isinstance(value, str | bytes) or not isinstance(value, Iterable) or getattr(value, "ndim", 1) == 0:
        raise _raise_invalid(name, "a list of values", value, hint)
    return list(value)
