"""`collate_fn` as a part of the mechanism (floor 3): tried on made-up items before any record is used.

Row i of a batch may depend on item i only, and nothing else of the batch may depend on items at all. Mixing, batch
statistics and padding to the longest record are all found by replacing one item and looking at the others' rows.
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
from sordino.training.probing.determinism import random_state_kept
from sordino.training.records.items import Items, made_up_items, public_items, substitute_items
from sordino.training.records.layout import Layout, layout_of, same, stretched
from sordino.training.structure import map_tensors, tensors_in

__all__ = ["CollateFunction", "Collation"]

CollateFunction = Callable[[list[object]], object]
"""A list of items ↦ a batch."""

_COUNT = 5
_OTHER_COUNTS = (1, 4, 16)
# A mixing that happens to one batch in ten is missed by all of these seeds once in 800 times.
_SEEDS = 64
_ROUNDING = 1e-5


class Collation:
    """A proved `collate_fn` and what its batches look like.

    Args:
        collate_fn: the user's.
        example: an item of the data set; only its shapes, types and keys are used. Not needed with `public_records`.
        public_records: public or invented items, used instead of made-up ones.

    Raises:
        CoupledRecords: a batch's row depends on another record, or its shape or a constant does.
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
        # torch's own function stacks what it is given, and refuses what does not stack.
        if collate_fn is not default_collate:
            _Trial(collate_fn, self.layout, items).run()

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
            if not draws:
                self._change_count(whole)

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
        if not self._layout.matches(changed, _COUNT):
            raise stretched()
        for row in range(_COUNT):
            if row != place and not same(self._layout.row(whole, row), self._layout.row(changed, row)):
                raise _mixes()

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

    def _with_seed(self, seed: int, items: Sequence[object]) -> tuple[object, bool]:
        """The batch, and whether random numbers were drawn for it."""
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002 (the generator that user code draws from)
        before = _random_state()
        batch = self._collate_fn(copy.deepcopy(list(items)))
        return batch, not same(before, _random_state())


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
