"""The loader that comes back from the engine: the user's dataset, drawn and charged by the plan's sampler.

A logical batch is drawn once, whole, and charged before its first chunk is fetched. Its chunk travels inside the item
through worker processes and `collate_fn`; the user sees plain batches. When no record was drawn, the user's loop runs
on synthetic records that count for nothing.

Which batches are stepped, and how many a loop counts, must not follow from the records: a batch that was not stepped is
not left out, but comes again, and a batch has as many parts whatever was drawn (docs/proofs/private-step.md).
"""

import copy
import math
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    default_collate,
)
from torch.utils.data.distributed import DistributedSampler

from sordino import checks
from sordino.errors import CoupledRecords, InvalidArgument, NonPrivateStep, NotOffered, UnknownSampler
from sordino.randomness import KeyedRNG, RandomStream
from sordino.sampling import Microbatch, split_evenly, split_into_microbatches
from sordino.training.collation import Collation
from sordino.training.generators import owned_generators, private_generators
from sordino.training.plan import Plan
from sordino.training.pytree import map_tensors
from sordino.training.record_source import (
    UnitAssignment,
    UnitIndex,
    check_no_repeated_units,
    check_not_data_frame,
    collated,
    readable,
)

# ----------------------------------------------------------------------------------------------------------------------
# Numbers of batches and of records in them, from public numbers only.
# ----------------------------------------------------------------------------------------------------------------------


# So many steps of a schedule are looked at, and so many standard deviations of a batch's size: more come in one of
# thirty thousand batches.
_LOOKED_AT, _DEVIATIONS = 256, 4.0
# A batch is larger than `batch_bound` with at most this probability.
_SELDOM = 1e-6


def steps_per_epoch(data_loader: Sized, sample_rate: float | None) -> int:
    """Logical batches an epoch, from public numbers only when a rate was declared.

    Fewer records than one batch are one batch, also where the loader would drop it.
    """
    return max(1, len(data_loader) if sample_rate is None else round(1 / sample_rate))


def num_synthetic_records(expected_batch_size: float, microbatch_size: int | None) -> int:
    """How many synthetic records stand for an empty batch: an ordinary number, so that loops run as they always do."""
    most = max(2, round(expected_batch_size))
    return most if microbatch_size is None else min(most, max(1, microbatch_size))


def max_batch_size(plan: Plan, microbatch_size: int | None, *, records_each: int = 1, processes: int = 1) -> int:
    """The most records that the model is given at once, but for one batch in thirty thousand: a public number.

    Args:
        plan: of the steps.
        microbatch_size: most records in one forward and backward, or None.
        records_each: records of a privacy unit in one forward.
        processes: that share a batch.

    Example:
        >>> plan = Plan(noise_multiplier=1.0, max_grad_norm=1.0, sample_rate=0.1, steps=5, expected_batch_size=64.0,
        ...             delta=1e-5)
        >>> max_batch_size(plan, None), max_batch_size(plan, 16)
        (96, 16)
    """
    steps = range(0, plan.steps, max(1, plan.steps // _LOOKED_AT)) if plan.is_scheduled else range(1)
    expected = max(plan.step_plan(step).expected_batch_size for step in (*steps, max(0, plan.steps - 1)))
    spread = _DEVIATIONS * math.sqrt(expected) if plan.has_random_batch_size else 0.0
    most = max(1, math.ceil((expected + spread) * records_each / processes))
    return most if microbatch_size is None else min(most, microbatch_size)


def batch_bound(mean: float, most: int | None = None) -> int:
    """How many records a batch drawn by chance has at most, all but once in a million batches.

    Bernstein's bound for a sum of independent draws, P[b ≥ μ + s] ≤ exp(−s² / 2(μ + s/3)).

    Args:
        mean: expected number of records μ ≥ 0, public.
        most: what no batch can exceed, public; None for nothing.

    Returns:
        An integer ≥ 1.
    """
    log = -math.log(_SELDOM)
    bound = math.ceil(mean + log / 3 + math.sqrt(log * log / 9 + 2 * mean * log))
    return max(1, bound if most is None else min(bound, most))


def num_microbatches(largest: int, microbatch_size: int) -> int:
    """Parts of every logical batch: as many whatever was drawn, so that a loop that counts them learns nothing.

    A larger batch than `largest` still comes in as many parts, each with a record more.
    """
    return math.ceil(largest / microbatch_size)


# ----------------------------------------------------------------------------------------------------------------------
# The loader that comes back from the engine: the user's dataset, drawn and charged by the plan's sampler.
# ----------------------------------------------------------------------------------------------------------------------


# What loaders elsewhere have, and what to write here.
_NOT_OFFERED = {
    "batch_sampler": (
        "Of BatchMemoryManager or wrap_data_loader leave the wrapper out, iterate over the loader itself, and pass "
        "microbatch_size=, the largest physical batch, to make_private"
    ),
    "generator": "Leave it out: draws are keyed by run and step; PrivacyEngine(seed=…, reproducible=True) repeats them",
    "sample_rate": "Write 1 / len(loader), the probability that a record joins a batch",
    "sampler": "Leave set_epoch and the like out: every epoch draws new batches, on all processes alike",
}
# The user's options that keep their meaning, or have none here.
_OPTIONS = frozenset(
    {"drop_last", "multiprocessing_context", "persistent_workers", "pin_memory", "prefetch_factor", "timeout"}
    | {"worker_init_fn"}
)
_DECLARE = "Use a DataLoader with shuffle=True or False over the dataset"
# How often a batch that was not stepped is given again.
_AGAIN = 3


class _Sampling(Protocol):
    def batches(self, *, dataset_size: int, first_step: int, steps: int, rng: KeyedRNG) -> Iterator[np.ndarray]: ...


class _Numbers(Protocol):
    """What numbers batches in order: a run."""

    @property
    def next_step(self) -> int: ...

    @property
    def num_left(self) -> int | None: ...


class _Open:
    """A logical batch that was begun, and the part of it that was given last.

    Args:
        step: its number.
        draw: its number among the draws.
    """

    def __init__(self, step: int, draw: int) -> None:
        self.step, self.draw = step, draw
        self.part, self._times = -1, 0

    def give(self, part: int) -> None:
        """A part is given, maybe again.

        Raises:
            NonPrivateStep: it was given too often, and never stepped.
        """
        self._times = self._times + 1 if part == self.part else 0
        self.part = part
        if self._times > _AGAIN:
            raise left_out()


class PrivateLoader:
    """Iterates over one epoch of private batches; ``len`` is the number of logical batches an epoch.

    Guarantee: every logical batch is an independent draw of `sampling`; `charge` is called once for each, before
    its first record is fetched for the user, whatever becomes of the batch afterwards. No batch is given before the
    one before it was stepped: `leave_out` refuses it in one and the same loop, and a later loop gets the same batch.
    With `largest` the number of parts of a batch does not depend on the records. `collate_fn` was shown to make
    each row of a batch from its own record; of the records, building the loader reads only the first one's structure.

    Args:
        data_loader: the user's; its dataset, `collate_fn`, workers and memory options are kept.
        sampling: how batches are drawn.
        steps: logical batches an epoch, ≥ 1.
        microbatch_size: most records in one chunk; None hands every logical batch out whole.
        rng: source of the draws.
        largest: of a draw's number, what its batch's records exceed hardly ever, from public numbers; None splits a
            batch by its size.
        charge: called before a logical batch is touched with whether it begins an epoch; returns its step number, or
            None when there is no budget for it: the epoch then ends.
        set_microbatch: called with each chunk, its batch and the batch's number of rows; returns the batch as the user
            gets it.
        let_go: called with a chunk when its batch is over: the next one is asked for, or the loop has ended.
        substitutes: synthetic records in the batch that stands for an empty one, ≥ 1.
        public_records: public or invented items to try `collate_fn` on; then no record is read before the first batch.
        public_batch: public or invented records as `collate_fn` gives them, to stand for an empty batch.
        share: this process's part of a logical batch, where several train together.
        rank: this process's number among them.
        numbers: where batches must be drawn in the order in which they are charged, what numbers them.
        units: which records belong together: units are drawn, and their records handed out.
        taken: how many parts of the batch at hand were stepped, None when all were; by default all that were given.
        leave_out: called when a loop asks for more without a step on what it got; may raise.

    Raises:
        CoupledRecords: `collate_fn` lets records touch each other, by values or by padding to the longest.
    """

    def __init__(
        self,
        data_loader: DataLoader[object],
        *,
        sampling: _Sampling,
        steps: int,
        microbatch_size: int | None,
        rng: KeyedRNG,
        charge: Callable[[bool], int | None],
        set_microbatch: Callable[[Microbatch, object, int], object],
        let_go: Callable[[Microbatch], None] = lambda _chunk: None,
        substitutes: int = 2,
        public_records: Sequence[object] | None = None,
        public_batch: object = None,
        share: Callable[[np.ndarray], np.ndarray] | None = None,
        rank: int = 0,
        numbers: _Numbers | None = None,
        units: UnitAssignment | None = None,
        largest: Callable[[int], int] | None = None,
        taken: Callable[[], int | None] | None = None,
        leave_out: Callable[[], None] | None = None,
    ) -> None:
        check_not_data_frame(data_loader.dataset, "the dataset of data_loader")
        indices = dataset_size_of(data_loader)
        if units is None:
            check_no_repeated_units(data_loader.dataset)
        table = None if units is None else UnitIndex(units, _owners(units, data_loader.dataset)[np.asarray(indices)])
        self.own_loader = data_loader
        self.dataset = data_loader.dataset
        self.batch_size = data_loader.batch_size
        self.collate_fn = data_loader.collate_fn
        self.num_workers = data_loader.num_workers
        if microbatch_size is not None:
            checks.integer(1, microbatch_size=microbatch_size)
        # Whether a batch may come in several parts of more than one record.
        self.is_split = microbatch_size is not None and 1 < microbatch_size < len(indices)
        self._steps = checks.integer(1, steps=steps)
        self._charge, self._numbers = charge, numbers
        self._set_microbatch, self._let_go = set_microbatch, let_go
        self._randomness, self._rank = rng, rank
        dataset = cast(Dataset[object], self.dataset)
        example = None
        if public_records is None:
            # How many numbers a record draws may depend on it.
            with private_generators(rng.stream("first record", step=0), owned_generators(dataset)):
                example = _structure_of_an_item(dataset, int(indices[0]))
        collation = Collation(self.collate_fn, example, public_records)
        self._layout, self.padding = collation.layout, collation.padding
        self.empty_batch = collation.layout.empty
        self._substitutes = checks.integer(1, substitutes=substitutes)
        substitute = collation.substitute(substitutes, public_batch)
        self._records = _ChunkDataset(dataset, self.collate_fn, indices, substitute)
        self._ends_step, self._epochs = True, 0
        self._open: _Open | None = None
        self._taken = self._all_given if taken is None else taken
        self._leave_out = leave_out
        self._chunks = _Chunks(
            sampling=sampling,
            dataset_size=len(indices),
            steps=self._steps,
            microbatch_size=microbatch_size,
            rng=rng,
            table=table,
            share=share,
            largest=largest,
            rank=rank,
        )
        self._loader: DataLoader[object] = DataLoader(
            self._records,
            batch_size=None,
            sampler=self._chunks,
            collate_fn=_unchanged,
            num_workers=data_loader.num_workers,
            pin_memory=data_loader.pin_memory,
            timeout=data_loader.timeout,
            worker_init_fn=data_loader.worker_init_fn,
            multiprocessing_context=data_loader.multiprocessing_context,
            prefetch_factor=data_loader.prefetch_factor,
            persistent_workers=data_loader.persistent_workers,
        )

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[object]:
        self._epochs += 1
        # The batch that an earlier loop began and did not step to its end.
        epoch, begun = self._epochs, self._open if self._taken() is not None else None
        if begun is not None:
            yield from self._go_on(begun)
        steps = self._steps - (begun is not None)
        if self._numbers is not None:
            self._chunks.next_draw = self._numbers.next_step
            # The last epoch of a run with a fixed number of steps may be short; one more batch is refused.
            left = steps if self._numbers.num_left is None else self._numbers.num_left
            steps = min(steps, left if begun is not None else max(1, left))
        # Workers are seeded with a number that is drawn here.
        with private_generators(self._randomness.stream("workers", step=epoch, rank=self._rank)):
            items = iter(self._loader)
        for number in range(steps):
            step = self._charge(number == 0)
            if step is None:
                return
            is_last = False
            while not is_last:
                if self._loader.persistent_workers and epoch != self._epochs:
                    raise NonPrivateStep(
                        "loader must be read by one loop at a time with persistent_workers=True, got a second one that "
                        "took over the workers. Finish one loop first, or set persistent_workers=False."
                    )
                drawn, batch = cast(tuple[Microbatch, object], next(items))
                if self._numbers is not None and drawn.step != step:
                    raise NonPrivateStep(
                        "loader must be read by one loop at a time with correlated noise or a budget, got a second "
                        "one: a step's batch is the one of its number. Finish one loop first."
                    )
                if drawn.index == 0:
                    self._open = _Open(step, drawn.step)
                is_last = drawn.is_last
                chunk = drawn.at_step(step)
                yield from self._give(chunk, batch)
                # After the last one nothing more is given.
                if not is_last or number < steps - 1:
                    self._require_step(chunk)

    def _go_on(self, begun: _Open) -> Iterator[object]:
        """The parts of a batch that were not stepped, read again: the loop may have written into what it got."""
        drawn, records = self._chunks.parts(begun.draw), copy.copy(self._records)
        for part in drawn[self._taken() :]:
            chunk, batch = records[part]
            here = chunk.at_step(begun.step)
            yield from self._give(here, batch)
            if not chunk.is_last or self._steps > 1:
                self._require_step(here)

    def _give(self, chunk: Microbatch, batch: object) -> Iterator[object]:
        """The batch of a part, as the loop gets it, and then the end of what the loop does with it."""
        assert self._open is not None
        self._open.give(chunk.index)
        self._ends_step = chunk.is_last
        rows = chunk.num_records or self._substitutes
        self._layout.check(batch, rows, self.padding)
        try:
            yield self._set_microbatch(chunk, batch, rows)
        finally:
            self._let_go(chunk)

    def _require_step(self, chunk: Microbatch) -> None:
        """Refuse the next batch, or part, before the present one was stepped."""
        taken = self._taken()
        mine = self._open is not None and self._open.step == chunk.step
        if mine and taken is not None and taken <= chunk.index:
            if self._leave_out is None:
                raise left_out()
            self._leave_out()
            self._open = None if chunk.is_last else self._open
        elif (taken is not None and not (mine and taken == chunk.index + 1)) or (taken is None and not chunk.is_last):
            raise NonPrivateStep(
                "loader must be read by one loop at a time, got a second one in the middle of a batch. Finish one loop "
                "first."
            )

    def _all_given(self) -> int | None:
        """What was stepped, for a loader that yields no batch numbers."""
        return None if self._open is None or self._ends_step else self._open.part + 1

    def split_by_size(self) -> None:
        """Split batches by their size alone: for a loop that takes whole batches and never ends between two parts."""
        self._chunks.largest = None

    def __getattr__(self, name: str) -> object:
        """The user's options; for other names of loaders `NotOffered` with what to write, and ``hasattr`` is False."""
        own = vars(self).get("own_loader")
        if own is not None and name in _OPTIONS:
            return getattr(own, name)
        if name in _NOT_OFFERED:
            raise NotOffered(f"loader must be used by its own names, got {name}. {_NOT_OFFERED[name]}.")
        raise AttributeError(f"'PrivateLoader' object has no attribute {name!r}")

    @property
    def is_last_microbatch(self) -> bool:
        """Whether the batch that came last completes a logical batch: always, unless `microbatch_size` splits them.

        A scheduler that steps once a batch must step here only: ``if loader.is_last_microbatch: scheduler.step()``.
        """
        return self._ends_step


@dataclass(kw_only=True, eq=False)
class _Chunks:
    """The chunks of one epoch after another; each epoch draws again. For the fields see `PrivateLoader`."""

    sampling: _Sampling
    dataset_size: int
    steps: int
    microbatch_size: int | None
    rng: KeyedRNG
    table: UnitIndex | None
    share: Callable[[np.ndarray], np.ndarray] | None
    largest: Callable[[int], int] | None
    rank: int
    next_draw: int = 0

    def __iter__(self) -> Iterator[tuple[Microbatch, bytes]]:
        """Each chunk with the key of the random numbers that reading its records may take."""
        # An epoch owns its draw numbers from its start, so that a broken or a parallel epoch never repeats a draw.
        first = self.next_draw
        self.next_draw += self.steps
        for draw, drawn in enumerate(self._draws(first, self.steps), start=first):
            for chunk in self._split(drawn, draw):
                yield chunk, self._key(chunk, draw)

    def parts(self, draw: int) -> Sequence[tuple[Microbatch, bytes]]:
        """The parts of a draw that was made before, with the keys that they had."""
        return [(chunk, self._key(chunk, draw)) for chunk in self._split(next(self._draws(draw, 1)), draw)]

    def _draws(self, first: int, steps: int) -> Iterator[np.ndarray]:
        size = self.dataset_size if self.table is None else self.table.units.num_units
        return iter(self.sampling.batches(dataset_size=size, first_step=first, steps=steps, rng=self.rng))

    def _key(self, chunk: Microbatch, draw: int) -> bytes:
        """The key of the random numbers that reading the records of a part may take."""
        stream = self.rng.stream("records", step=draw, tensor=chunk.index, rank=self.rank)
        return stream.device_key()

    def _split(self, drawn: np.ndarray, draw: int) -> Sequence[Microbatch]:
        indices = drawn if self.share is None else self.share(drawn)
        size, largest, table = self.microbatch_size, self.largest, self.table
        if table is None and (size is None or largest is None):
            return split_into_microbatches(indices, step=draw, microbatch_size=size)
        records = len(indices) if table is None else int(table.sizes[indices].sum())
        parts = 1 if size is None else num_microbatches(max(1, records) if largest is None else largest(draw), size)
        if table is not None:
            return tuple(table.chunks(indices, step=draw, parts=parts))
        return split_evenly(indices, step=draw, parts=parts)


class _ChunkDataset(Dataset[tuple[Microbatch, object]]):
    """Turns a chunk into (chunk, batch) in whichever process fetches it, with secret random numbers."""

    def __init__(
        self,
        dataset: Dataset[object],
        collate_fn: Callable[[list[object]], object],
        indices: np.ndarray | range,
        substitute: object,
    ) -> None:
        self._dataset = dataset
        self._collate_fn = collate_fn
        self._indices = indices
        self._substitute = substitute
        self._owned: list[object] | None = None

    def _positions(self, chunk: Microbatch) -> np.ndarray:
        """Positions in the dataset; of a hundred million records that are all there, none is listed."""
        return chunk.indices if isinstance(self._indices, range) else self._indices[chunk.indices]

    def __getitem__(self, drawn: tuple[Microbatch, bytes]) -> tuple[Microbatch, object]:
        chunk, key = drawn
        if not chunk.num_records:
            return chunk, map_tensors(Tensor.clone, self._substitute)
        if type(self._dataset) is TensorDataset and self._collate_fn is default_collate:
            # What collating the rows one by one gives, in one call a tensor.
            rows = torch.from_numpy(self._positions(chunk))
            return chunk, [tensor.index_select(0, rows.to(tensor.device)) for tensor in self._dataset.tensors]
        if self._owned is None:
            # In the process that reads, after the worker's own preparations.
            self._owned = owned_generators(self._dataset, self._collate_fn)
        with private_generators(RandomStream(key), self._owned):
            found, items = readable(self._dataset, self._positions(chunk).tolist())
            kept, batch = collated(self._collate_fn, items)
        if len(kept) < chunk.num_records:
            chunk = chunk.only([found[index] for index in kept])
        return chunk, batch if kept else map_tensors(Tensor.clone, self._substitute)


def _structure_of_an_item(dataset: Dataset[object], index: int) -> object:
    """An item whose shapes, types and keys stand for all; of tensors in memory they are known without reading one."""
    if type(dataset) is TensorDataset:
        return tuple(tensor.new_zeros(tensor.shape[1:]) for tensor in dataset.tensors)
    found, items = readable(dataset, [index])
    if not found:
        raise CoupledRecords(
            "data_loader must give the structure of a record, got a failure, whose message is not shown as it may "
            "quote the record. Pass public_records=, five public or invented items of the dataset."
        )
    return items[0]


def _owners(units: UnitAssignment, dataset: object) -> np.ndarray:
    """The unit of every record of the dataset."""
    of = np.asarray(units.unit_ids)
    if not isinstance(dataset, Sized) or len(of) != len(dataset):
        raise InvalidArgument("units must name one unit per record of the dataset, got another number of records.")
    return of


def left_out() -> NonPrivateStep:
    """What is raised when a loop does not step on every batch that it was given."""
    return NonPrivateStep(
        "optimizer.step must follow every batch of the private loader before the next one is taken, got a batch left "
        "out (continue, break, an exception, a loop that only looked at batches): which ones are left out may follow "
        "from the records, from their number too, and the number of steps would tell. A batch without records comes as "
        "synthetic ones, and a record whose gradient is not finite counts for nothing, so none need be left out. To "
        "gather several batches, use a larger one with microbatch_size; for evaluation, a DataLoader of your own. "
        "After an interruption a new loop gives the same batch again, a few times; then call engine.detach() and "
        "make_private again: what was spent stays counted."
    )


def own_loader(data_loader: DataLoader[object]) -> DataLoader[object]:
    """The user's own `DataLoader`: of a `PrivateLoader` the one that it was made from, anything else as it is."""
    return data_loader.own_loader if isinstance(data_loader, PrivateLoader) else data_loader


def _unchanged(item: object) -> object:
    return item


def dataset_size_of(data_loader: DataLoader[object]) -> np.ndarray | range:
    """The positions in the dataset of all records that the loader's sampler can reach, each once.

    Args:
        data_loader: the user's.

    Returns:
        Sorted int64 positions, shape (N,), N ≥ 1; a range when they are all there are.

    Raises:
        UnknownSampler: the loader draws in a way whose event isn't known, or could draw a record twice an epoch.
    """
    if not isinstance(data_loader, DataLoader) or type(data_loader).__iter__ is not DataLoader.__iter__:
        raise UnknownSampler(
            f"data_loader must be a torch DataLoader, got {type(data_loader).__name__}. Pass the loader you would "
            "train with."
        )
    dataset = data_loader.dataset
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
        raise UnknownSampler(
            f"data_loader must read a dataset with a length, got {type(dataset).__name__}: a stream can't be sampled "
            "by chance record by record. Give the dataset __len__ and __getitem__, or write the records to disk once "
            "(sordino.data.mapped_table or MappedArrays); `sordino explain data` names what else remains for a stream."
        )
    batches = data_loader.batch_sampler
    if type(batches) is not BatchSampler:
        raise UnknownSampler(f"data_loader must batch by batch_size, got {type(batches).__name__}. {_DECLARE}.")
    # With batch_sampler= the loader's own sampler is a default that is not used.
    found = _reachable(batches.sampler, len(dataset))
    if batches.sampler is not data_loader.sampler and not isinstance(found, range):
        raise UnknownSampler(
            f"batch_sampler must draw from the whole dataset, got one over {type(batches.sampler).__name__}. Give the "
            "DataLoader that sampler as sampler=, with batch_size=; batches are then drawn from its records by Poisson "
            "sampling."
        )
    return found


def _reachable(sampler: object, size: int) -> np.ndarray | range:
    if size < 1:
        raise UnknownSampler("data_loader must read at least one record, got an empty dataset. Check the dataset.")
    name = type(sampler).__name__
    if type(sampler) is SubsetRandomSampler:
        chosen = np.sort(np.asarray([int(index) for index in sampler.indices], dtype=np.int64))
        if not len(chosen) or len(np.unique(chosen)) != len(chosen) or chosen[0] < 0 or chosen[-1] >= size:
            raise UnknownSampler(
                "sampler must name each record at most once, got indices that repeat or lie outside the dataset. "
                "Pass distinct indices."
            )
        return chosen
    if type(sampler) is SequentialSampler:
        covered = len(sampler)
    elif type(sampler) is DistributedSampler:
        # Its parts make up the dataset. Ours are drawn from one logical batch instead.
        covered = len(cast(Sized, sampler.dataset))
    elif type(sampler) is RandomSampler and not sampler.replacement:
        covered = sampler.num_samples if len(sampler.data_source) == size else -1
    else:
        raise UnknownSampler(
            f"sampler must be one whose draws can be accounted for, got {name}. {_DECLARE}, or SubsetRandomSampler for "
            "a part of it; batches are then drawn by Poisson sampling."
        )
    if covered != size:
        raise UnknownSampler(f"{name} must cover the dataset exactly once an epoch. {_DECLARE}.")
    return range(size)
