"""Sizes that depend on records (floor 3): on their number, or on values, as those of ``x[y == 1]``."""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from sordino.training.loops.tainted import TaintedFloat, TaintedInt
from sordino.training.structure import leaves_in, tensors_in

__all__ = ["counts_rows", "rows_of", "size_at", "sized_by_values"]

_BY_VALUES = frozenset(
    {"nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount", "repeat_interleave"}
    | {"_unique2", "unique_dim", "_return_output", "_return_inverse", "_return_counts", "_return_inverse_false"}
)
_MASKS = (torch.bool, torch.uint8)


def sized_by_values(function: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]) -> bool:
    """Whether the shape of what a function of torch returns may depend on more than shapes."""
    name = getattr(function, "__name__", "")
    if name in _BY_VALUES or (name == "where" and len(args) + len(kwargs) == 1):
        return True
    if any(getattr(tensor, "sized_by_values", False) for tensor in tensors_in((args, dict(kwargs)))):
        return True
    if name == "__getitem__" and any(tensor.dtype in _MASKS for tensor in tensors_in(args[1:])):
        return True
    return any(isinstance(leaf, TaintedFloat | TaintedInt) and not leaf.counts for leaf in _numbers(args, kwargs))


def _numbers(args: tuple[object, ...], kwargs: Mapping[str, object]) -> Iterator[object]:
    for leaf in leaves_in((args, dict(kwargs))):
        if isinstance(leaf, slice):
            yield from (leaf.start, leaf.stop, leaf.step)
        elif isinstance(leaf, TaintedInt):
            yield leaf


def counts_rows(tensor: Tensor, records: int) -> bool:
    """Whether records have a part in the sizes of `tensor`."""
    return tensor.dim() > 0 and (tensor.size(0) == records or getattr(tensor, "sized_by_values", False))


def rows_of(tensor: Tensor) -> int:
    """The first size."""
    return tensor.size(0)


def size_at(tensor: Tensor, place: int) -> int:
    """The size of one dimension."""
    return tensor.size(place)
