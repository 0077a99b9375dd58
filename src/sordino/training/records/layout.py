"""What every batch of one loader looks like (floor 3): which parts hold a row a record, and what is constant.

Everything about the other dimensions of a batch is public and the same for all batches: a longest record that stretches
its batch would reach every other record.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sordino.errors import CoupledRecords, RecordCountMismatch
from sordino.training.probing.padding import Padding
from sordino.training.structure import is_leaf, parts_of, rebuild, tensors_in

__all__ = ["Layout", "layout_of", "same", "stretched"]


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """A tensor or array with one row a record; `shape` is that of a row."""

    shape: tuple[int, ...]
    dtype: object

    def matches(self, value: object, records: int, *, any_length: bool = False) -> bool:
        if not isinstance(value, Tensor | np.ndarray) or value.dtype != self.dtype or not value.ndim:
            return False
        same_shape = len(value.shape) == len(self.shape) + 1 if any_length else tuple(value.shape[1:]) == self.shape
        return same_shape and value.shape[0] == records

    def row(self, value: Sequence[object], place: int) -> object:
        return value[place]

    def empty(self, value: object) -> object:
        return value[:0].clone() if isinstance(value, Tensor) else np.asarray(value)[:0].copy()


@dataclass(frozen=True, kw_only=True)
class _Entries:
    """A list or tuple with one entry a record; an entry is its record's own affair."""

    def matches(self, value: object, records: int, *, any_length: bool = False) -> bool:  # noqa: ARG002
        return isinstance(value, list | tuple) and len(value) == records

    def row(self, value: Sequence[object], place: int) -> object:
        return value[place]

    def empty(self, value: object) -> object:
        return type(value)() if isinstance(value, list | tuple) else ()


@dataclass(frozen=True, kw_only=True)
class _Constant:
    """The same in every batch."""

    value: object

    def matches(self, value: object, records: int, *, any_length: bool = False) -> bool:  # noqa: ARG002 (one signature)
        return same(value, self.value)

    def row(self, value: object, place: int) -> object:  # noqa: ARG002
        return None

    def empty(self, value: object) -> object:  # noqa: ARG002
        return self.value


@dataclass(frozen=True, kw_only=True)
class _Parts:
    """A container of named parts."""

    parts: Mapping[object, "_Node"]

    def matches(self, value: object, records: int, *, any_length: bool = False) -> bool:
        found = parts_of(value)
        return list(found) == list(self.parts) and all(
            node.matches(found[name], records, any_length=any_length) for name, node in self.parts.items()
        )

    def row(self, value: object, place: int) -> object:
        found = parts_of(value)
        return [node.row(found[name], place) for name, node in self.parts.items()]  # pyright: ignore[reportArgumentType]

    def empty(self, value: object) -> object:
        nodes = iter(self.parts.values())
        return rebuild(value, lambda part: next(nodes).empty(part))


_Node = _Rows | _Entries | _Constant | _Parts


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What batches look like. `empty` is one with no records: shapes, types and constants, no values of records."""

    root: _Node
    empty: object

    def matches(self, batch: object, records: int, *, any_length: bool = False) -> bool:
        """Whether `batch` is one of `records` records; with `any_length`, rows may have other sizes."""
        return self.root.matches(batch, records, any_length=any_length)

    def row(self, batch: object, place: int) -> object:
        """Everything that the batch holds for its record number `place`."""
        return self.root.row(batch, place)  # pyright: ignore[reportArgumentType]

    @property
    def holds_tensors_of_rows_only(self) -> bool:
        """Whether every tensor of a batch has one row a record, so that its place in the batch says which it is."""
        return not _has(_Entries, self.root)

    def shapes(self, batch: object) -> list[tuple[int, ...]]:
        """The shapes of everything that holds one row a record."""
        return _shapes(self.root, batch)

    def check(self, batch: object, records: int, padding: Padding | None = None) -> None:
        """Refuse a batch that looks otherwise.

        Args:
            batch: as `collate_fn` gave it.
            records: how many it holds.
            padding: how batches are padded; where it may vary, so may the padded dimensions.

        Raises:
            CoupledRecords: a dimension, a type or a constant changed.
        """
        if self.matches(batch, records):
            return
        if padding is None or not self._differs_in_length(batch, records, padding):
            raise stretched()
        padding.meet(batch)

    def _differs_in_length(self, batch: object, records: int, padding: Padding) -> bool:
        if not self.matches(batch, records, any_length=True):
            return False
        for place, (one, other) in enumerate(zip(tensors_in(self.empty), tensors_in(batch), strict=True)):
            dims = padding.tensors[place].dims if place in padding.tensors else ()
            if any(one.shape[dim] != other.shape[dim] for dim in range(1, one.dim()) if dim not in dims):
                return False
        return True


def stretched() -> CoupledRecords:
    """What is raised when batches differ in more than their records."""
    return CoupledRecords(
        "collate_fn must give batches that differ in their records only, got another shape, type or batch-wide value: "
        "what the longest record of a batch, or all of them together, decide reaches every record. Pad and cut each "
        "record to a public length (padding='max_length', pad_to), and make batch-wide values public constants."
    )


def layout_of(one: object, records: int, other: object, other_records: int) -> Layout:
    """The layout of two batches of different numbers of records.

    Raises:
        RecordCountMismatch: no tensor has the records first.
        CoupledRecords: the batches differ in something that is neither a row a record nor constant.
    """
    root = _node(one, records, other, other_records)
    if not _has(_Rows, root):
        raise RecordCountMismatch(
            "batch must hold a tensor with the records first, got none. Let collate_fn return tensors, dicts, lists, "
            "tuples or dataclasses of tensors of shape (records, …)."
        )
    return Layout(root=root, empty=root.empty(one))


def _has(kind: type, node: _Node) -> bool:
    parts = node.parts.values() if isinstance(node, _Parts) else ()
    return isinstance(node, kind) or any(_has(kind, part) for part in parts)


def _shapes(node: _Node, value: object) -> list[tuple[int, ...]]:
    if isinstance(node, _Rows) and isinstance(value, Tensor | np.ndarray):
        return [tuple(value.shape)]
    found = parts_of(value) if isinstance(node, _Parts) else {}
    return [shape for name in found for shape in _shapes(node.parts[name], found[name])]  # pyright: ignore[reportAttributeAccessIssue]


def _node(one: object, records: int, other: object, other_records: int) -> _Node:
    if isinstance(one, Tensor | np.ndarray) and type(other) is type(one):
        rows = _Rows(shape=tuple(one.shape[1:]), dtype=one.dtype)
        if rows.matches(one, records) and rows.matches(other, other_records):
            return rows
    elif (
        isinstance(one, list | tuple)
        and isinstance(other, list | tuple)
        and (len(one), len(other)) == (records, other_records)
    ):
        return _Entries()
    if not is_leaf(one):
        parts, others = parts_of(one), parts_of(other)
        if list(parts) == list(others):
            nodes = {name: _node(parts[name], records, others[name], other_records) for name in parts}
            return _Parts(parts=nodes)
    elif same(one, other):
        return _Constant(value=one)
    if isinstance(one, Tensor) and one.dim() and one.shape[1:] != getattr(other, "shape", (0,))[1:]:
        raise stretched()
    raise CoupledRecords(
        "collate_fn must give parts that hold one row a record, or constants, got a part that changes with the records "
        "or their number: it belongs to all of them. Leave it out, or make it a public constant."
    )


def same(one: object, other: object, *, rounding: float = 0.0) -> bool:
    """Whether two trees hold the same values; NaN is itself. `rounding` is a relative tolerance for floats."""
    if isinstance(one, Tensor | np.ndarray):
        return _same_array(torch.as_tensor(one), other, rounding)
    if not is_leaf(one):
        parts, others = parts_of(one), parts_of(other)
        return list(parts) == list(others) and all(same(parts[k], others[k], rounding=rounding) for k in parts)
    if isinstance(one, float) and isinstance(other, float):
        return one == other or (one != one and other != other)
    if type(one) is not type(other):
        return False
    if type(one).__eq__ is object.__eq__ and hasattr(one, "__dict__"):
        return one is other or same(vars(one), vars(other), rounding=rounding)
    return bool(one == other)


def _same_array(one: Tensor, other: object, rounding: float) -> bool:
    if not isinstance(other, Tensor | np.ndarray):
        return False
    values = torch.as_tensor(other)
    if one.shape != values.shape or one.dtype != values.dtype:
        return False
    if not (one.dtype.is_floating_point or one.dtype.is_complex):
        return torch.equal(one, values)
    return bool(torch.isclose(one, values, rtol=rounding, atol=rounding, equal_nan=True).all())
