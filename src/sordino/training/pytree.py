"""Batches as trees of tensors: map over them, list their tensors.

A batch may be a tensor, a mapping, a tuple, a named tuple, a list, a dataclass, or any nesting of them. Everything
else (a string, a number, None) is a leaf that is carried along unchanged.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, TypeGuard, cast

import torch
from torch import Tensor

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_PLAIN_LEAVES = frozenset({type(None), bool, int, float, str, Tensor})
_PLAIN_CONTAINERS = frozenset({tuple, list, dict})


def tree_map(function: Callable[[object], object], batch: object) -> object:
    """The same structure with `function` applied to everything that is not a container."""
    kind = type(batch)
    if _is_leaf_type(kind):
        return function(batch)
    if kind is tuple:
        return tuple([tree_map(function, part) for part in batch])  # pyright: ignore[reportGeneralTypeIssues]
    if kind is dict:
        return {key: tree_map(function, part) for key, part in batch.items()}  # pyright: ignore[reportAttributeAccessIssue]
    return tree_rebuild(batch, lambda part: tree_map(function, part))


def map_tensors(function: Callable[[Tensor], object], batch: object) -> object:
    """The same structure with `function` applied to every tensor."""
    return tree_map(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, batch)


def tree_leaves(batch: object) -> Iterator[object]:
    """Everything in the batch that is not a container, in order."""
    found: list[object] = []
    _add_leaves(batch, found)
    return iter(found)


def _add_leaves(batch: object, found: list[object]) -> None:
    kind = type(batch)
    if _is_leaf_type(kind):
        found.append(batch)
        return
    if kind is tuple or kind is list:
        parts = batch
    else:
        parts = batch.values() if kind is dict else container_items(batch).values()  # pyright: ignore[reportAttributeAccessIssue]
    for part in parts:  # pyright: ignore[reportGeneralTypeIssues]
        # Leaves without another call: arguments of every operation in a traced loop come here.
        kind = type(part)
        if kind in _PLAIN_LEAVES or _is_leaf_type(kind):
            found.append(part)
        else:
            _add_leaves(part, found)


def tensors_in(batch: object) -> Iterator[Tensor]:
    """Every tensor of the batch, in order."""
    found: list[object] = []
    _add_leaves(batch, found)
    return iter([leaf for leaf in found if isinstance(leaf, Tensor)])


def container_items(container: object) -> dict[object, object]:
    """The parts of a container by their names, keys or positions, in order."""
    if _is_record_type(container):
        return {item.name: getattr(container, item.name) for item in fields(container)}
    if isinstance(container, Mapping):
        return dict(container)
    return dict(enumerate(container)) if isinstance(container, tuple | list) else {}


def tree_rebuild(batch: object, function: Callable[[object], object]) -> object:
    """The same container with `function` applied to its parts."""
    make = cast("Callable[..., object]", type(batch))
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


def is_leaf(batch: object) -> bool:
    """Whether it is carried along whole: not a mapping, tuple, list or dataclass."""
    return _is_leaf_type(type(batch))


def _is_leaf_type(kind: type) -> bool:
    """`is_leaf` of its objects: asked for every argument of every call in a traced loop."""
    if kind in _PLAIN_LEAVES:
        return True
    if kind in _PLAIN_CONTAINERS:
        return False
    # torch.compile looks past a cache, and says so.
    return _look_at_type(kind) if torch.compiler.is_dynamo_compiling() else _known_type(kind)


def _look_at_type(kind: type) -> bool:
    return issubclass(kind, Tensor) or not (issubclass(kind, Mapping | tuple | list) or is_dataclass(kind))


_known_type = lru_cache(maxsize=4096)(_look_at_type)
