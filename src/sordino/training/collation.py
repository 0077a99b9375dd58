"""`collate_fn` as a part of the mechanism: tried on synthetic items before any record is used.

Row i of a batch may depend on item i only, and nothing else of the batch may depend on items at all. Mixing and batch
statistics are found by replacing one item and looking at the others' rows. Padding to the longest record is described,
so that the probe can check whether the padded length matters.
"""

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from sordino.errors import CoupledRecords, InvalidArgument, RecordCountMismatch, SordinoError
from sordino.training.probing.padding import PaddedTensor, Padding
from sordino.training.probing.snapshots import preserve_rng_state, random_states
from sordino.training.probing.synthetic import SyntheticItems, make_synthetic_items, public_items, substitute_items
from sordino.training.pytree import container_items, is_leaf, map_tensors, tensors_in, tree_leaves, tree_rebuild

# ----------------------------------------------------------------------------------------------------------------------
# What every batch of one loader looks like: which parts hold a row a record, and what is constant.
#
# Everything about the other dimensions of a batch is public and the same for all batches: a longest record that
# stretches its batch would reach every other record.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """A tensor or array with one row a record; `shape` is that of a row."""

    shape: tuple[int, ...]
    dtype: object


@dataclass(frozen=True)
class _Entries:
    """A list or tuple with one entry a record; an entry is its record's own affair."""


@dataclass(frozen=True, kw_only=True)
class _Constant:
    """The same in every batch."""

    value: object


# A container is a dictionary of its named parts.
_Node = _Rows | _Entries | _Constant | dict[object, "_Node"]


def _matches(node: _Node, value: object, records: int, *, any_length: bool = False) -> bool:
    if isinstance(node, dict):
        found = container_items(value)
        return list(found) == list(node) and all(
            _matches(part, found[name], records, any_length=any_length) for name, part in node.items()
        )
    if isinstance(node, _Rows):
        if not isinstance(value, Tensor | np.ndarray) or value.dtype != node.dtype or not value.ndim:
            return False
        shape = tuple(value.shape[1:])
        return len(value) == records and (shape == node.shape or (any_length and len(shape) == len(node.shape)))
    if isinstance(node, _Entries):
        return isinstance(value, list | tuple) and len(value) == records
    return same(value, node.value)


def _row(node: _Node, value: object, index: int) -> object:
    if isinstance(node, dict):
        found = container_items(value)
        return [_row(part, found[name], index) for name, part in node.items()]
    return None if isinstance(node, _Constant) else cast("Sequence[object]", value)[index]


def _empty(node: _Node, value: object) -> object:
    """The part as it is in a batch with no records."""
    if isinstance(node, dict):
        parts = iter(node.values())
        return tree_rebuild(value, lambda part: _empty(next(parts), part))
    if isinstance(value, Tensor) and isinstance(node, _Rows):
        return value[:0].clone()
    if isinstance(node, _Rows):
        return np.asarray(value)[:0].copy()
    return node.value if isinstance(node, _Constant) else cast("type[list[object]]", type(value))()


@dataclass(frozen=True, kw_only=True)
class BatchLayout:
    """What batches look like. `empty` is one with no records: shapes, types and constants, no values of records."""

    root: _Node
    empty: object

    def matches(self, batch: object, records: int, *, any_length: bool = False) -> bool:
        """Whether `batch` is one of `records` records; with `any_length`, rows may have other sizes."""
        return _matches(self.root, batch, records, any_length=any_length)

    def row(self, batch: object, index: int) -> object:
        """Everything that the batch holds for its record number `index`."""
        return _row(self.root, batch, index)

    @property
    def holds_tensors_of_rows_only(self) -> bool:
        """Whether every tensor of a batch has one row a record, so that its index in the batch says which it is."""
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
            raise inconsistent_batch_error()
        padding.meet(batch)

    def _differs_in_length(self, batch: object, records: int, padding: Padding) -> bool:
        if not self.matches(batch, records, any_length=True):
            return False
        for index, (one, other) in enumerate(zip(tensors_in(self.empty), tensors_in(batch), strict=True)):
            dims = padding.tensors[index].dims if index in padding.tensors else ()
            if any(one.shape[dim] != other.shape[dim] for dim in range(1, one.dim()) if dim not in dims):
                return False
        return True


def inconsistent_batch_error() -> CoupledRecords:
    """What is raised when batches differ in more than their records."""
    return CoupledRecords(
        "collate_fn must give batches that differ in their records only, got another shape, type or batch-wide value: "
        "what the longest record of a batch, or all of them together, decide reaches every record. Pad and cut each "
        "record to a public length (padding='max_length', pad_to), and make batch-wide values public constants."
    )


def infer_batch_layout(one: object, records: int, other: object, other_records: int) -> BatchLayout:
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
    return BatchLayout(root=root, empty=_empty(root, one))


def _has(kind: type, node: _Node) -> bool:
    parts = node.values() if isinstance(node, dict) else ()
    return isinstance(node, kind) or any(_has(kind, part) for part in parts)


def _shapes(node: _Node, value: object) -> list[tuple[int, ...]]:
    if isinstance(node, _Rows) and isinstance(value, Tensor | np.ndarray):
        return [tuple(value.shape)]
    parts, found = (node, container_items(value)) if isinstance(node, dict) else ({}, {})
    return [shape for name, part in parts.items() for shape in _shapes(part, found[name])]


def _node(one: object, records: int, other: object, other_records: int) -> _Node:
    if isinstance(one, Tensor | np.ndarray) and type(other) is type(one):
        rows = _Rows(shape=tuple(one.shape[1:]), dtype=one.dtype)
        if _matches(rows, one, records) and _matches(rows, other, other_records):
            return rows
    elif (
        isinstance(one, list | tuple)
        and isinstance(other, list | tuple)
        and (len(one), len(other)) == (records, other_records)
    ):
        return _Entries()
    if not is_leaf(one):
        parts, others = container_items(one), container_items(other)
        if list(parts) == list(others):
            return {name: _node(parts[name], records, others[name], other_records) for name in parts}
    elif same(one, other):
        return _Constant(value=one)
    if isinstance(one, Tensor) and one.dim() and one.shape[1:] != getattr(other, "shape", (0,))[1:]:
        raise inconsistent_batch_error()
    raise CoupledRecords(
        "collate_fn must give parts that hold one row a record, or constants, got a part that changes with the records "
        "or their number: it belongs to all of them. Leave it out, or make it a public constant."
    )


def same(one: object, other: object, *, rounding: float = 0.0) -> bool:
    """Whether two trees hold the same values; NaN is itself. `rounding` is a relative tolerance for floats."""
    if isinstance(one, Tensor | np.ndarray):
        return _same_array(torch.as_tensor(one), other, rounding)
    if not is_leaf(one):
        parts, others = container_items(one), container_items(other)
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


# ----------------------------------------------------------------------------------------------------------------------
# `collate_fn` as a part of the mechanism: tried on synthetic items before any record is used.
# ----------------------------------------------------------------------------------------------------------------------


CollateFunction = Callable[[list[object]], object]
"""A list of items ↦ a batch."""

_COUNT = 5
_OTHER_COUNTS = (1, 4, 16)
# A mixing that happens to one batch in ten is missed by all of these seeds once in 800 times.
_SEEDS = 64
_ROUNDING = 1e-5


class Collation:
    """A `collate_fn` that was tried on synthetic items, and what its batches look like.

    Args:
        collate_fn: the user's.
        example: an item of the dataset; only its shapes, types and keys are used. Not needed with `public_records`.
        public_records: public or invented items, used instead of synthetic ones.

    Attributes:
        layout: of every batch.
        padding: how batches follow their longest record; None where they don't, or in a way that is no padding. Without
            it every batch must have the layout's shape.

    Raises:
        CoupledRecords: a batch's row depends on another record, or its type or a constant does.
        RecordCountMismatch: no tensor of a batch has the records first.
        InvalidArgument: too few public records.
    """

    def __init__(
        self, collate_fn: CollateFunction, example: object = None, public_records: Sequence[object] | None = None
    ) -> None:
        if public_records is not None and len(public_records) < _COUNT:
            raise InvalidArgument(f"public_records must hold at least {_COUNT} items, got fewer. Invent some more.")
        self._collate_fn = collate_fn
        self._example = example
        self._public = None if public_records is None else list(public_records)
        items = make_synthetic_items(example, _COUNT) if self._public is None else public_items(self._public, _COUNT)
        self.layout = self._first_look(items)
        self.padding: Padding | None = None
        # torch's own function stacks what it is given, and refuses what does not stack.
        if collate_fn is not default_collate:
            trial = _Trial(collate_fn, self.layout, items)
            trial.run()
            self.padding = trial.padding()

    def substitute(self, count: int, public_batch: object = None) -> object:
        """A batch of `count` records for a loop when none was drawn: public ones, otherwise synthetic ones."""
        if self._public is None:
            items = substitute_items(self._example, count)
        else:
            items = public_items(self._public, count).items
        with preserve_rng_state():
            batch = self._collate_fn(copy.deepcopy(items))
        rows = iter(list(tensors_in(public_batch)))

        def exchanged(tensor: Tensor) -> Tensor:
            given = next(rows, None)
            fits = given is not None and given.dim() and len(given) and given.shape[1:] == tensor.shape[1:]
            if given is None or not fits or tensor.size(0) != count:
                return tensor
            return given[torch.arange(count) % len(given)].to(tensor.device, tensor.dtype)

        return map_tensors(exchanged, batch)

    def _first_look(self, items: SyntheticItems) -> BatchLayout:
        try:
            with preserve_rng_state():
                one, other = (self._collate_fn(copy.deepcopy(items.items[:count])) for count in (_COUNT - 1, _COUNT))
        except SordinoError:
            raise
        except Exception as failure:
            raise _does_not_run() from failure
        return infer_batch_layout(one, _COUNT - 1, other, _COUNT)


class _Trial:
    """Replaces one item after another and looks at the others' rows."""

    def __init__(self, collate_fn: CollateFunction, layout: BatchLayout, items: SyntheticItems) -> None:
        self._collate_fn = collate_fn
        self._layout = layout
        self._items = items.items
        self._others = items.others
        self._tensors: dict[int, PaddedTensor] = {}
        self._is_padding = layout.holds_tensors_of_rows_only

    def padding(self) -> Padding | None:
        """How batches of items of different lengths are padded; None where that is not what happens."""
        return Padding(tensors=self._tensors) if self._tensors and self._is_padding else None

    def run(self) -> None:
        with preserve_rng_state():
            whole, draws = self._with_seed(0, self._items)
            if not same(whole, self._with_seed(0, self._items)[0]):
                raise CoupledRecords(
                    "collate_fn must give the same batch for the same items and random seed, got two different ones. "
                    "Draw from torch's, numpy's or Python's own generator, and keep no state."
                )
            for seed in range(_SEEDS if draws else 1):
                # Chance is tried with ordinary values, everything else once.
                self._replace(seed, self._others if seed == 0 else self._others[:1])
            if draws:
                self._refuse_seeds()
            else:
                self._change_count(whole)
                self._turn_round(whole)

    def _replace(self, seed: int, others: Sequence[object]) -> None:
        """Put stand-ins at every index; and after a stand-in, another one at the next index."""
        whole, _ = self._with_seed(seed, self._items)
        for index in range(_COUNT):
            neighbor = (index + 1) % _COUNT
            for number, other in enumerate(others):
                items = [*self._items[:index], other, *self._items[index + 1 :]]
                # Strange values and lengths may be refused by the user's code; ordinary ones may not.
                changed = self._batch(seed, items) if number == 0 else self._tried(seed, items)
                if changed is None:
                    continue
                self._compare(whole, changed, index)
                items[neighbor] = self._others[0]
                again = self._tried(seed, items)
                if again is not None:
                    self._compare(changed, again, neighbor)

    def _batch(self, seed: int, items: Sequence[object]) -> object:
        try:
            return self._with_seed(seed, items)[0]
        except Exception as failure:
            raise _does_not_run() from failure

    def _tried(self, seed: int, items: Sequence[object]) -> object:
        """The batch; None where the user's code refuses these items."""
        try:
            return self._with_seed(seed, items)[0]
        except Exception:
            return None

    def _compare(self, whole: object, changed: object, index: int) -> None:
        if not self._layout.matches(changed, _COUNT, any_length=True):
            raise inconsistent_batch_error()
        if self._layout.shapes(whole) != self._layout.shapes(changed):
            self._note_padding(whole, changed, index)
            return
        for row in range(_COUNT):
            if row != index and not same(self._layout.row(whole, row), self._layout.row(changed, row)):
                raise _mixes()

    def _note_padding(self, whole: object, changed: object, index: int) -> None:
        """Where all other rows are the same and equal a constant, one item's length pads them."""
        others = [row for row in range(_COUNT) if row != index]
        # Only of tensors is the length followed any further.
        self._is_padding = self._is_padding and not any(isinstance(leaf, np.ndarray) for leaf in tree_leaves(whole))
        if not self._is_padding:
            return
        for number, (one, other) in enumerate(zip(tensors_in(whole), tensors_in(changed), strict=True)):
            if one.shape == other.shape and number not in self._tensors:
                self._is_padding = self._is_padding and (one.dim() == 0 or same(one[others], other[others]))
                continue
            short, long = sorted((one[others], other[others]), key=Tensor.numel)
            found = _padded(short, long, self._tensors.get(number))
            if found is None:
                self._is_padding = False
                return
            self._tensors[number] = found

    def _change_count(self, whole: object) -> None:
        """A record's row must not depend on how many others there are."""
        for count in _OTHER_COUNTS:
            batch = self._batch(0, [self._items[index % _COUNT] for index in range(count)])
            if not self._layout.matches(batch, count):
                raise inconsistent_batch_error()
            for row in range(min(count, _COUNT)):
                expected = self._layout.row(whole, row)
                if not same(expected, self._layout.row(batch, row), rounding=_ROUNDING):
                    raise _mixes()

    def _turn_round(self, whole: object) -> None:
        """A record's row must not depend on its index: one record less moves all later ones."""
        batch = self._batch(0, self._items[::-1])
        for row in range(_COUNT):
            expected = self._layout.row(whole, _COUNT - 1 - row)
            if not same(expected, self._layout.row(batch, row), rounding=_ROUNDING):
                raise CoupledRecords(
                    "collate_fn must make each row of a batch from its own item only, got a row that changes with its "
                    "place in the batch. Draw random numbers from torch's, numpy's or Python's global generator, and "
                    "leave out what counts rows."
                )

    def _refuse_seeds(self) -> None:
        """Generators that have the same state after two different seeds were seeded on the way."""
        ends = []
        for seed in (1, 2):
            self._with_seed(seed, self._items)
            ends.append(random_states())
        if any(map(np.array_equal, *ends)):
            # Those that were not used still have their seeds' states, which differ.
            raise CoupledRecords(
                "collate_fn must not seed random generators, got one that has a new seed: random numbers would follow "
                "from a record's place in the batch. Leave it out."
            )

    def _with_seed(self, seed: int, items: Sequence[object]) -> tuple[object, bool]:
        """The batch, and whether random numbers were drawn for it."""
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002 (the generator that user code draws from)
        before = _random_state()
        batch = self._collate_fn(copy.deepcopy(list(items)))
        return batch, not same(before, _random_state())


def _padded(short: Tensor, long: Tensor, known: PaddedTensor | None) -> PaddedTensor | None:
    """How `long` is made of `short`, in agreement with what is known; None if it is not by one constant at one end."""
    dims = tuple(dim for dim in range(1, short.dim()) if short.shape[dim] != long.shape[dim])
    if known is not None and not dims:
        return known if same(short, long) else None
    if not dims or any(short.shape[dim] > long.shape[dim] for dim in dims):
        return None
    corner = tuple(0 if dim in dims else slice(None) for dim in range(long.dim()))
    last = tuple(-1 if dim in dims else slice(None) for dim in range(long.dim()))
    for in_front, where in ((False, last), (True, corner)):
        filled = long[where].flatten()
        padded = PaddedTensor(dims=dims, fill=filled[0].item(), in_front=in_front)
        if same(padded.padded(short, long.shape), long) and known in {None, padded}:
            return padded
    return None


def _random_state() -> object:
    return [torch.get_rng_state(), list(random.getstate()[1]), list(np.random.get_state())]  # noqa: NPY002


def _does_not_run() -> CoupledRecords:
    return CoupledRecords(
        "collate_fn must run on one and on several synthetic items to show that it keeps records apart, got a "
        "failure on "
        "items of random numbers and words. Pass public_records=, five public or invented items of the dataset."
    )


def _mixes() -> CoupledRecords:
    return CoupledRecords(
        "collate_fn must make each row of a batch from its own item only, got a row that changes with another item. "
        "Mixing, batch statistics, sorting and padding to the longest record belong to all records of a batch."
    )
