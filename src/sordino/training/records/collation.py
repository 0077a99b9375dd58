"""`collate_fn` as a part of the mechanism (floor 3): tried on made-up items before any record is used.

Row i of a batch may depend on item i only, and nothing else of the batch may depend on items at all. Mixing and batch
statistics are found by replacing one item and looking at the others' rows. Padding to the longest record is described,
so that the probe can check whether the padded length matters.
"""

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from sordino.errors import CoupledRecords, InvalidArgument, SordinoError
from sordino.training.probing.determinism import random_state_kept, random_states
from sordino.training.probing.padding import PaddedTensor, Padding
from sordino.training.records.items import Items, made_up_items, public_items, substitute_items
from sordino.training.records.layout import Layout, layout_of, same, stretched
from sordino.training.structure import leaves_in, map_tensors, tensors_in

__all__ = ["CollateFunction", "Collation"]

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
        example: an item of the data set; only its shapes, types and keys are used. Not needed with `public_records`.
        public_records: public or invented items, used instead of made-up ones.

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
        items = made_up_items(example, _COUNT) if self._public is None else public_items(self._public, _COUNT)
        self.layout = self._first_look(items)
        self.padding: Padding | None = None
        # torch's own function stacks what it is given, and refuses what does not stack.
        if collate_fn is not default_collate:
            trial = _Trial(collate_fn, self.layout, items)
            trial.run()
            self.padding = trial.padding()

    def substitute(self, count: int, public_batch: object = None) -> object:
        """A batch of `count` records for a loop to run on when none was drawn: public ones, otherwise made up."""
        items = substitute_items(self._example, count) if self._public is None else self._repeated(count)
        with random_state_kept():
            batch = self._collate_fn(copy.deepcopy(items))
        rows = iter(list(tensors_in(public_batch)))

        def exchanged(tensor: Tensor) -> Tensor:
            given = next(rows, None)
            fits = given is not None and given.dim() and len(given) and given.shape[1:] == tensor.shape[1:]
            if given is None or not fits or tensor.size(0) != count:
                return tensor
            return given[torch.arange(count) % len(given)].to(tensor.device, tensor.dtype)

        return map_tensors(exchanged, batch)

    def _repeated(self, count: int) -> list[object]:
        assert self._public is not None
        return public_items(self._public, count).items

    def _first_look(self, items: Items) -> Layout:
        try:
            with random_state_kept():
                one, other = (self._collate_fn(copy.deepcopy(items.items[:count])) for count in (_COUNT - 1, _COUNT))
        except SordinoError:
            raise
        except Exception as failure:
            raise _does_not_run() from failure
        return layout_of(one, _COUNT - 1, other, _COUNT)


@dataclass(frozen=True, kw_only=True)
class _Attempt:
    items: list[object]
    batch: object


class _Trial:
    """Replaces one item after another and looks at the others' rows."""

    def __init__(self, collate_fn: CollateFunction, layout: Layout, items: Items) -> None:
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
        with random_state_kept():
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
        """Put stand-ins in every place; and beside a stand-in, another one in the next place."""
        for place in range(_COUNT):
            whole, _ = self._with_seed(seed, self._items)
            for number, other in enumerate(others):
                changed = self._exchanged(seed, self._items, place, other, required=number == 0)
                if changed is None:
                    continue
                self._compare(whole, changed.batch, place)
                beside = (place + 1) % _COUNT
                again = self._exchanged(seed, changed.items, beside, self._others[0], required=False)
                if again is not None:
                    self._compare(changed.batch, again.batch, beside)

    def _exchanged(
        self, seed: int, items: Sequence[object], place: int, other: object, *, required: bool
    ) -> "_Attempt | None":
        exchanged = [*items[:place], other, *items[place + 1 :]]
        try:
            return _Attempt(items=exchanged, batch=self._with_seed(seed, exchanged)[0])
        except Exception as failure:
            # Strange values and lengths may be refused by the user's code; ordinary ones may not.
            if required:
                raise _does_not_run() from failure
            return None

    def _compare(self, whole: object, changed: object, place: int) -> None:
        if not self._layout.matches(changed, _COUNT, any_length=True):
            raise stretched()
        if self._layout.shapes(whole) != self._layout.shapes(changed):
            self._note_padding(whole, changed, place)
            return
        for row in range(_COUNT):
            if row != place and not same(self._layout.row(whole, row), self._layout.row(changed, row)):
                raise _mixes()

    def _note_padding(self, whole: object, changed: object, place: int) -> None:
        """Where all other rows are the same and a constant beside it, one item's length pads them."""
        others = [row for row in range(_COUNT) if row != place]
        # Only of tensors is the length followed any further.
        self._is_padding = self._is_padding and not any(isinstance(leaf, np.ndarray) for leaf in leaves_in(whole))
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
            items = [self._items[place % _COUNT] for place in range(count)]
            try:
                batch, _ = self._with_seed(0, items)
            except Exception as failure:
                raise _does_not_run() from failure
            if not self._layout.matches(batch, count):
                raise stretched()
            for row in range(min(count, _COUNT)):
                expected = self._layout.row(whole, row)
                if not same(expected, self._layout.row(batch, row), rounding=_ROUNDING):
                    raise _mixes()

    def _turn_round(self, whole: object) -> None:
        """A record's row must not depend on its place: one record less moves all later ones."""
        try:
            batch, _ = self._with_seed(0, self._items[::-1])
        except Exception as failure:
            raise _does_not_run() from failure
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
        "collate_fn must run on one and on several made-up items to show that it keeps records apart, got a failure on "
        "items of random numbers and words. Pass public_records=, five public or invented items of the data set."
    )


def _mixes() -> CoupledRecords:
    return CoupledRecords(
        "collate_fn must make each row of a batch from its own item only, got a row that changes with another item. "
        "Mixing, batch statistics, sorting and padding to the longest record belong to all records of a batch."
    )
