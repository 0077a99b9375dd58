"""Numbers read from a taped tensor (floor 3): ordinary floats and ints that remember where they come from.

``x - x.mean().item()`` couples the records of a batch as ``x - x.mean()`` does. The number that ``item()`` gives notes
the arithmetic done with it on the same tape, and is computed anew in a replay.
"""

import operator
from collections.abc import Callable
from typing import Protocol

__all__ = ["Source", "TaintedFloat", "TaintedInt", "tainted", "untainted"]


class Source(Protocol):
    """What a number was read from: a tape."""

    def note_number(
        self, function: Callable[..., object], args: tuple[object, ...], result: object, *, counts: bool = False
    ) -> object:
        """Note a computation with numbers and return its result, tainted."""
        ...

    def decide(self, *, counts: bool) -> None:
        """A comparison, which a loop may branch on, is being made."""
        ...

    def read(self, value: float) -> None:
        """The bare number is being read."""
        ...


class _Tainted:
    """Arithmetic of numbers that came from a tape.

    Attributes:
        source: the tape.
        slot: place on it, None when it was closed by then.
        counts: whether it is a number of records, or made of such numbers and constants only.
    """

    source: Source
    slot: int | None
    counts: bool

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object]]:
        value = untainted(self)
        return type(value), (value,)

    def __deepcopy__(self, memo: object) -> object:
        return untainted(self)

    def __bool__(self) -> bool:
        self.source.decide(counts=self.counts)
        return bool(untainted(self))


class TaintedFloat(_Tainted, float):
    """A float that came from a tape."""

    __hash__ = float.__hash__


class TaintedInt(_Tainted, int):
    """An int that came from a tape."""

    __hash__ = int.__hash__


def tainted(value: object, source: Source, slot: int | None, *, counts: bool = False) -> object:
    """`value` with its origin; anything but a float or an int is returned as it is."""
    if isinstance(value, bool) or not isinstance(value, float | int):
        return value
    number = TaintedFloat(value) if isinstance(value, float) else TaintedInt(value)
    number.source, number.slot, number.counts = source, slot, counts
    return number


def untainted(value: object) -> object:
    """The bare number; anything else is returned as it is."""
    if isinstance(value, TaintedFloat):
        return float.__pos__(value)
    return int.__pos__(value) if isinstance(value, TaintedInt) else value


def _arithmetic(name: str, function: Callable[..., object], *, reflected: bool) -> Callable[..., object]:
    def compute(self: _Tainted, *others: object) -> object:
        args = (*others, self) if reflected else (self, *others)
        if any(not isinstance(other, float | int | None) for other in others):
            return NotImplemented
        result = function(*map(untainted, args))
        counts = all(arg.counts for arg in args if isinstance(arg, _Tainted))
        return self.source.note_number(function, args, result, counts=counts)

    compute.__name__ = name
    return compute


def _comparison(name: str, function: Callable[..., object]) -> Callable[..., object]:
    def compare(self: _Tainted, other: object) -> object:
        if not isinstance(other, float | int):
            return NotImplemented
        self.source.decide(counts=self.counts)
        return function(untainted(self), untainted(other))

    compare.__name__ = name
    return compare


def _conversion(name: str, function: Callable[..., object]) -> Callable[..., object]:
    def convert(self: _Tainted) -> object:
        result = function(untainted(self))
        if not self.counts and isinstance(result, float | int):
            self.source.read(result)
        return result

    convert.__name__ = name
    return convert


_BINARY = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "truediv": operator.truediv,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "pow": operator.pow,
}
_UNARY = {"neg": operator.neg, "pos": operator.pos, "abs": abs, "round": round}
_COMPARED = {name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}

for _kind in (TaintedFloat, TaintedInt):
    for _name, _function in {**_BINARY, **_UNARY}.items():
        setattr(_kind, f"__{_name}__", _arithmetic(_name, _function, reflected=False))
    for _name, _function in _BINARY.items():
        setattr(_kind, f"__r{_name}__", _arithmetic(f"r{_name}", _function, reflected=True))
    for _name, _function in _COMPARED.items():
        setattr(_kind, f"__{_name}__", _comparison(_name, _function))
    for _name, _function in {"int": int, "float": float}.items():
        setattr(_kind, f"__{_name}__", _conversion(_name, _function))
