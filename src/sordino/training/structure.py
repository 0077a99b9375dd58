"""Batches as trees of tensors: map over them, list their tensors, take the records out (floor 3).

A batch may be a tensor, a mapping, a tuple, a named tuple, a list, a dataclass, or any nesting of them. Everything
else (a string, a number, None) is a leaf that is carried along unchanged.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, TypeGuard, cast

from torch import Tensor

from sordino.errors import RecordCountMismatch

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = ["empty_batch", "leaves_in", "map_leaves", "map_tensors", "tensors_in"]


def map_leaves(function: Callable[[object], object], batch: object) -> object:
    """The same structure with `function` applied to everything that is not a container."""
    if _is_leaf(batch):
        return function(batch)
    return _rebuild(batch, lambda part: map_leaves(function, part))


def map_tensors(function: Callable[[Tensor], object], batch: object) -> object:
    """The same structure with `function` applied to every tensor."""
    return map_leaves(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, batch)


def leaves_in(batch: object) -> Iterator[object]:
    """Everything in the batch that is not a container, in order."""
    if _is_leaf(batch):
        yield batch
        return
    for part in _parts(batch):
        yield from leaves_in(part)


def tensors_in(batch: object) -> Iterator[Tensor]:
    """Every tensor of the batch, in order."""
    return (leaf for leaf in leaves_in(batch) if isinstance(leaf, Tensor))


def _parts(batch: object) -> Iterator[object]:
    if _is_record_type(batch):
        yield from (getattr(batch, item.name) for item in fields(batch))
    elif isinstance(batch, Mapping):
        yield from batch.values()
    elif isinstance(batch, tuple | list):
        yield from batch


def _rebuild(batch: object, function: Callable[[object], object]) -> object:
    """The same container with `function` applied to its parts."""
    make = cast(Callable[..., object], type(batch))
    if _is_record_type(batch):
        return replace(batch, **{item.name: function(getattr(batch, item.name)) for item in fields(batch)})
    if isinstance(batch, Mapping):
        parts = {key: function(value) for key, value in batch.items()}
        try:
            return make(parts)
        except TypeError:
            return parts
    if isinstance(batch, tuple):
        changed = [function(part) for part in batch]
        # Named tuples take their fields one by one, torch's own result types take one sequence.
        if hasattr(batch, "_fields"):
            return make(*changed)
        return make(changed) if hasattr(batch, "n_fields") else tuple(changed)
    if isinstance(batch, list):
        return [function(part) for part in batch]
    return batch


def _is_record_type(batch: object) -> TypeGuard["DataclassInstance"]:
    return is_dataclass(batch) and not isinstance(batch, type)


def _is_leaf(batch: object) -> bool:
    return not isinstance(batch, Mapping | tuple | list) and not _is_record_type(batch)


def empty_batch(two: object) -> object:
    """A batch with no records, from the batch that `collate_fn` makes of one record given twice.

    Tensors whose first dimension is 2 keep their other dimensions and get 0 records; a list or tuple of two leaves
    (strings, numbers) becomes empty; everything else is not per record and is kept.

    Raises:
        RecordCountMismatch: no tensor of the batch has the records first.
    """
    if not any(tensor.dim() and tensor.size(0) == 2 for tensor in tensors_in(two)):
        raise RecordCountMismatch(
            "batch must hold a tensor with the records first, got none. Let collate_fn return tensors, dicts, lists, "
            "tuples or dataclasses of tensors of shape (records, …)."
        )
    return _without_records(two)


def _without_records(two: object) -> object:
    if isinstance(two, Tensor):
        return two[:0].clone() if two.dim() and two.size(0) == 2 else two
    if isinstance(two, list | tuple) and not hasattr(two, "_fields"):
        words = len(two) == 2 and all(_is_leaf(part) and not isinstance(part, Tensor) for part in two)
        if words:
            return type(two)()
    return _rebuild(two, _without_records)
