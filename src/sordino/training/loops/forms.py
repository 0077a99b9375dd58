"""Losses that were proved, by their form, and when one has to be proved again (floor 3).

A form leaves out the values of constants. ``loss + beta * penalty`` is proved with the beta of its first batch; where
that was 0, nothing was seen of the penalty.
"""

import functools
import itertools
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import FunctionType, MethodType, ModuleType

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.overrides import _get_current_function_mode_stack as _function_modes  # pyright: ignore[reportPrivateUsage]
from torch.utils._python_dispatch import (
    _get_current_dispatch_mode_stack as _dispatch_modes,  # pyright: ignore[reportPrivateUsage]
)

from sordino.errors import CoupledRecords
from sordino.training.loops.tainted import untainted

__all__ = ["ModuleMarks", "ProvedForm", "magnitude", "proves_again", "public_marks"]

_OF_TORCH = frozenset(vars(nn.Module()))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = tuple(getattr(torch_module, f"_global{name}") for name in _HOOKS)
# Objects of these packages in a module's attributes are the loop's, not the model's.
_OF_LOOPS = frozenset(
    {"torch", "lightning", "lightning_fabric", "pytorch_lightning", "accelerate", "sordino", "logging"}
)
# How deep objects in attributes are looked into, and how many values of each.
_DEPTH, _MOST = 4, 64
_FIRST_AGAIN, _FACTOR = 16, 4


def proves_again(times: int) -> bool:
    """Whether what came this many times is proved again: at 16, 64, 256, …"""
    while times > _FIRST_AGAIN and times % _FACTOR == 0:
        times //= _FACTOR
    return times == _FIRST_AGAIN


def magnitude(number: float) -> Hashable:
    """Sign and power of two of a number; zero is by itself."""
    if isinstance(number, int) and number:
        return math.copysign(1.0, number), number.bit_length()  # It may be too large for a float.
    if number == 0 or not math.isfinite(number):
        return str(abs(number))
    return math.copysign(1.0, number), math.frexp(number)[1]


@dataclass(frozen=True, kw_only=True)
class ModuleMarks:
    """What a module does besides its parameters and buffers, roughly.

    Args:
        modes: which parts are in training.
        rest: kinds of its parts, frozen parameters, hooks, replaced methods, plain attributes and what they hold.
    """

    modes: tuple[bool, ...]
    rest: tuple[Hashable, ...]


class _Itself:
    """An object that is known by its identity, and kept, so that no other takes its place."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def public_marks(module: nn.Module) -> ModuleMarks:
    """The marks of a module at this moment; two states that do different things have different ones, as far as known.

    Numbers count by their magnitude, tensors not at all: those of a batch are known by their notes.
    """
    marks: list[Hashable] = [parameter.requires_grad for parameter in module.parameters()]
    # A mode of torch that the loop has entered sees every call inside the module.
    marks += [_Itself(mode) for mode in (*_function_modes(), *_dispatch_modes()) if _is_users(mode)]
    seen: set[int] = set()
    for hooks in _GLOBAL_HOOKS:
        _add_hooks(hooks, marks, seen)
    modes: list[bool] = []
    for part in module.modules():
        kind, attributes = type(part), vars(part)
        modes.append(part.training)
        marks += (kind, getattr(kind, "forward", None))
        for name in _HOOKS:
            if attributes.get(name):
                _add_hooks(attributes[name], marks, seen)
        for name, value in attributes.items():
            if name not in _OF_TORCH:
                marks.append(name)
                _add(value, marks, seen, _DEPTH)
    return ModuleMarks(modes=tuple(modes), rest=tuple(marks))


def _is_users(mode: object) -> bool:
    """Whether a mode is neither torch's nor ours."""
    return type(mode).__module__.partition(".")[0] not in {"torch", "sordino"}


def _add_hooks(hooks: Mapping[object, object], marks: list[Hashable], seen: set[int]) -> None:
    for hook in hooks.values():
        if not str(getattr(hook, "__module__", "")).startswith("sordino."):
            _add(hook, marks, seen, _DEPTH)


def _add(value: object, marks: list[Hashable], seen: set[int], depth: int) -> None:
    """Append what is known of a value, and of what it holds."""
    if isinstance(value, bool | str | bytes | Enum | torch.dtype | torch.device | type | None):
        marks.append(value)
    elif isinstance(value, int | float):
        marks.append(magnitude(untainted(value)))  # pyright: ignore[reportArgumentType]
    elif isinstance(value, Tensor | nn.Module | ModuleType):
        marks.append(type(value))
    elif isinstance(value, list | tuple | set | frozenset | dict):
        marks += (type(value), magnitude(len(value)))
        held = itertools.chain(value, value.values()) if isinstance(value, dict) else value
        _add_all(held, id(value), marks, seen, depth)
    elif isinstance(value, np.ndarray):
        marks.append(value.tobytes() if value.size <= _MOST and value.dtype != object else value.shape)
    elif isinstance(value, FunctionType):
        marks.append(_Itself(value))
        _add_all([*_cells(value), *(value.__defaults__ or ())], id(value), marks, seen, depth)
    elif isinstance(value, MethodType):
        marks.append(_Itself(value.__func__))
        _add(value.__self__, marks, seen, depth)
    elif isinstance(value, functools.partial):
        marks.append(_Itself(value))
        _add_all([value.func, *value.args, *value.keywords.values()], id(value), marks, seen, depth)
    else:
        marks.append(type(value))
        if callable(value):
            marks.append(_Itself(value))
        if type(value).__module__.partition(".")[0] not in _OF_LOOPS:
            held = [*getattr(value, "__dict__", {}).values(), *_slots(value)]
            _add_all(held, id(value), marks, seen, depth)


def _add_all(values: Iterable[object], place: int, marks: list[Hashable], seen: set[int], depth: int) -> None:
    if depth and place not in seen:
        seen.add(place)
        for value in itertools.islice(values, _MOST):
            _add(value, marks, seen, depth - 1)


def _cells(function: FunctionType) -> Iterator[object]:
    """What a function holds of the scope that it was made in."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            continue  # It is not set yet.


def _slots(value: object) -> list[object]:
    names = getattr(type(value), "__slots__", ())
    return [getattr(value, name, None) for name in ((names,) if isinstance(names, str) else names)]


@dataclass(eq=False, kw_only=True)
class ProvedForm:
    """What is known of a loss of one form.

    Args:
        late: constants behind a place where values left the tape; they must stay.
        numbers: all constants in the batch before.
        records: number of records in the batch before.
        shapes: those of tensors from outside that were taken as constants though they may have a row a record.

    Attributes:
        times: how many times it came.
        has_grown: whether a constant was of a new size in the batch that came last.
    """

    late: tuple[float, ...]
    numbers: tuple[float, ...]
    records: int
    shapes: Hashable = None
    _magnitudes: list[set[Hashable]] = field(init=False)
    _in_step: list[int] = field(init=False)
    times: int = field(init=False, default=1)
    has_grown: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self._magnitudes = [{magnitude(number)} for number in self.numbers]
        self._in_step = [0] * len(self.numbers)

    def meet(self, late: tuple[float, ...], numbers: tuple[float, ...], records: int) -> bool:
        """Whether a loss of this form has to be proved again in the batch at hand.

        Raises:
            CoupledRecords: its constants follow the records.
        """
        if late != self.late:
            raise CoupledRecords(
                "loss must keep its constants from batch to batch when values of the batch were read into numpy or "
                "lists before it, got another one: it may have been computed from records. Stay with tensors up to the "
                "loss, and compute metrics after it."
            )
        self.times += 1
        self.has_grown = False
        if len(numbers) != len(self.numbers):
            self.numbers, self._magnitudes = numbers, [set() for _ in numbers]
            self._in_step = [0] * len(numbers)
        elif records != self.records:
            self._refuse_counts(numbers, records)
        for number, known in zip(numbers, self._magnitudes, strict=True):
            size = magnitude(number)
            self.has_grown = self.has_grown or size not in known
            known.add(size)
        self.numbers, self.records = numbers, records
        return self.has_grown or proves_again(self.times)

    def fits(self, shapes: Hashable) -> bool:
        """Whether what was proved as a constant may be one in the batch at hand: it has the same shape."""
        return self.shapes is None or self.shapes == shapes

    def _refuse_counts(self, numbers: Sequence[float], records: int) -> None:
        """A constant that changes as the number of records does was made from it (``len(batch)``)."""
        for place, (old, new) in enumerate(zip(self.numbers, numbers, strict=True)):
            exact = (old, new) in {(self.records, records), (1 / self.records, 1 / records)}
            one, other = old * records, new * self.records
            inverse = math.isclose(old * self.records, new * records, rel_tol=1e-9)
            follows = old != new and (exact or inverse or math.isclose(one, other, rel_tol=1e-9))
            self._in_step[place] = self._in_step[place] + 1 if follows else 0
            if follows and (exact or self._in_step[place] > 1):
                raise CoupledRecords(
                    "loss must not use the number of records as a Python number, got a constant that follows it: one "
                    "record more would change what all others do. Take .mean() over records with "
                    "loss_reduction='mean', or divide by x.size(0), which is understood; len(x) is not."
                )
