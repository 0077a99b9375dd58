"""Calls of torch as they stand on a tape (floor 3): what was called, on which values, with which results."""

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sordino.training.structure import leaves_in, map_leaves, tensors_in

__all__ = ["Call", "Slot", "Stale", "map_values", "targets_of", "values_in"]


class Slot:
    """A value's place on the tape. Not a dataclass: those are containers to `map_leaves`."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


class Stale:
    """A value that belongs to an earlier batch."""

    __slots__ = ()


@dataclass(frozen=True, kw_only=True)
class Call:
    """One noted call.

    Args:
        function: what was called.
        args: positional arguments, with slots for values of the tape.
        kwargs: arguments by name.
        results: the slot of each tensor in the result, in order, or that of the number.
        place: how many calls and reads came before.
        grad_enabled: whether gradients were on.
        autocast: device type and type of autocast, if it was on.
        writes: the memory that was changed in place, or None.
        is_number: whether the result is a number.
        is_broken: whether an argument took part in autograd by something that is not on the tape.
    """

    function: Callable[..., object]
    args: object
    kwargs: object
    results: tuple[int, ...]
    place: int
    grad_enabled: bool
    autocast: tuple[str, torch.dtype] | None
    writes: int | None = None
    is_number: bool = False
    is_broken: bool = False

    def run(self, value_of: Callable[[object], object]) -> object:
        """Call again with the values of a replay."""
        args = map_values(value_of, self.args)
        kwargs = map_values(value_of, self.kwargs)
        assert isinstance(args, tuple)
        assert isinstance(kwargs, dict)
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.grad_enabled))
            if self.autocast is not None:
                stack.enter_context(torch.autocast(self.autocast[0], dtype=self.autocast[1]))
            return self.function(*args, **kwargs)

    def inputs(self) -> Iterator[object]:
        """Every argument that is not a container."""
        yield from values_in(self.args)
        yield from values_in(self.kwargs)

    def numbers(self) -> list[float]:
        """The constants among the arguments."""
        return [float(leaf) for leaf in self.inputs() if isinstance(leaf, float | int) and not isinstance(leaf, bool)]

    def form(self, names: Mapping[int, int]) -> Hashable:
        """What is called on what, with `names` for slots and without the values of constants."""
        function = self.function
        owner = getattr(getattr(function, "__self__", None), "__name__", "")
        who = (
            id(function) if isinstance(function, nn.Module) else getattr(function, "__name__", repr(type(function))),
            owner,
        )
        return (who, self.grad_enabled, self.autocast, *(_form(leaf, names) for leaf in self.inputs()))


def _form(leaf: object, names: Mapping[int, int]) -> Hashable:
    if isinstance(leaf, Slot):
        return ("slot", names.get(leaf.number))
    if isinstance(leaf, Tensor):
        return ("tensor", leaf.dtype, leaf.requires_grad)
    if isinstance(leaf, str | bool | torch.dtype | torch.device | type(None)):
        return leaf
    return type(leaf).__name__


def map_values(function: Callable[[object], object], arguments: object) -> object:
    """`map_leaves`, which also looks into slices."""

    def mapped(leaf: object) -> object:
        if isinstance(leaf, slice):
            return slice(function(leaf.start), function(leaf.stop), function(leaf.step))
        return function(leaf)

    return map_leaves(mapped, arguments)


def values_in(arguments: object) -> Iterator[object]:
    """`leaves_in`, which also looks into slices."""
    for leaf in leaves_in(arguments):
        if isinstance(leaf, slice):
            yield from (leaf.start, leaf.stop, leaf.step)
        else:
            yield leaf


def targets_of(function: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]) -> list[Tensor]:
    """The tensors that a function of torch changes: its first one, or those of ``out=``."""
    name = getattr(function, "__name__", "")
    in_place = name.startswith("__i") or name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    first = list(tensors_in((args, dict(kwargs))))[:1] if in_place else []
    return [*first, *tensors_in(kwargs.get("out"))]
