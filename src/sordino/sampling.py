"""How batches are drawn. A sampler yields batches *and* knows the event that accounts for them.

A logical batch is drawn once, whole, then split into chunks of `microbatch_size` records, which only bounds
memory. Step number, chunk number and `is_last` travel inside the chunk.

Example:
    >>> from sordino.randomness import KeyedRNG
    >>> sampler = PoissonSampling(sample_rate=0.5)
    >>> indices = sampler.draw(dataset_size=6, step=0, rng=KeyedRNG(seed=1, reproducible=True))
    >>> [chunk.is_last for chunk in split_into_microbatches(indices, step=0, microbatch_size=2)][-1]
    True
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from sordino import checks
from sordino.errors import InvalidArgument
from sordino.events import Event, PoissonSampled, RandomAllocation, SampledWithoutReplacement, SampledWithReplacement
from sordino.randomness import KeyedRNG, RandomStream

__all__ = [
    "CyclicPoissonSampling",
    "FixedBatchSampling",
    "FixedSizeSampling",
    "Microbatch",
    "PoissonSampling",
    "RandomAllocationSampling",
    "SAMPLERS",
    "Sampler",
    "ScheduledPoissonSampling",
    "ShuffledSampling",
    "even_borders",
    "make_sampler",
    "split_evenly",
    "split_into_microbatches",
]


@dataclass(frozen=True, kw_only=True, eq=False)
class Microbatch:
    """A part of one logical batch.

    Args:
        step: number of the logical batch, from 0, never used twice in a run.
        index: position inside the logical batch, from 0.
        is_last: whether the step is complete after this chunk.
        indices: int64 positions of the records, possibly none.
    """

    step: int
    index: int
    is_last: bool
    indices: np.ndarray

    @property
    def num_records(self) -> int:
        """Number of records in the chunk. Under Poisson sampling it is private."""
        return len(self.indices)

    def only(self, positions: list[int]) -> "Microbatch":
        """The same chunk with only some of its records, by their positions in it."""
        return replace(self, indices=self.indices[positions])

    def at_step(self, step: int) -> "Microbatch":
        """The same chunk as a part of batch number `step`."""
        return replace(self, step=step)


class _StepSampler(ABC):
    """A sampler whose batches are drawn one by one, each at its own cost."""

    @abstractmethod
    def draw(self, *, dataset_size: int, step: int, rng: KeyedRNG) -> np.ndarray:
        """Sorted int64 indices of the records in batch `step`."""

    def num_charges(self, steps: int) -> int:
        """How many events are spent in `steps` steps: one a step."""
        return steps

    def batches(self, *, dataset_size: int, first_step: int, steps: int, rng: KeyedRNG) -> Iterator[np.ndarray]:
        """Batches `first_step`, `first_step` + 1, …, `steps` of them, each drawn when it is asked for."""
        for step in range(first_step, first_step + steps):
            yield self.draw(dataset_size=dataset_size, step=step, rng=rng)


@dataclass(frozen=True, kw_only=True)
class _EpochSampler(ABC):
    """A sampler of whole epochs: an epoch costs one event, and so does one that is broken off."""

    steps_per_epoch: int

    def __post_init__(self) -> None:
        checks.integer(1, steps_per_epoch=self.steps_per_epoch)

    def event(self, event: Event) -> Event:
        """The event on the whole dataset of an epoch whose every step is `event` on its batch."""
        return event

    def num_charges(self, steps: int) -> int:
        """How many times `event` is spent in `steps` steps without a break: once for each epoch begun."""
        return math.ceil(steps / self.steps_per_epoch)

    @abstractmethod
    def deal(self, *, dataset_size: int, epoch: int, rng: KeyedRNG) -> Sequence[np.ndarray]:
        """The batches of an epoch, indices in any order; each is taken when its step comes."""

    def draw(self, *, dataset_size: int, step: int, rng: KeyedRNG) -> np.ndarray:
        """Sorted int64 indices of the records in batch `step`."""
        return next(self.batches(dataset_size=dataset_size, first_step=step, steps=1, rng=rng))

    def batches(self, *, dataset_size: int, first_step: int, steps: int, rng: KeyedRNG) -> Iterator[np.ndarray]:
        """Batches `first_step`, …; epoch e holds the steps from e · `steps_per_epoch`. Sorted int64 indices."""
        dataset_size = checks.integer(0, dataset_size=dataset_size)
        dealt_epoch, dealt = -1, ()
        for step in range(first_step, first_step + steps):
            epoch, index = divmod(step, self.steps_per_epoch)
            if epoch != dealt_epoch:
                dealt_epoch, dealt = epoch, self.deal(dataset_size=dataset_size, epoch=epoch, rng=rng)
            yield np.sort(dealt[index]).astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class PoissonSampling(_StepSampler):
    """Each record joins each batch independently with probability `sample_rate`.

    Guarantee: with `sample_rate` q, a step that is ``event`` on its batch is ``PoissonSampled(q, event)`` on the
    dataset. The batch size is random, secret, and may be zero.

    Args:
        sample_rate: in (0, 1]; 1 is the whole dataset in every step.

    References:
        Abadi et al. 2016, section 2.2 ("lots"); Balle, Barthe, Gaboardi 2018, theorem 8.
    """

    sample_rate: float

    def __post_init__(self) -> None:
        checks.probability(zero=False, sample_rate=self.sample_rate)

    def describe(self) -> str:
        """The sampler as it is written in a guarantee."""
        return "full batches" if self.sample_rate == 1 else f"Poisson sampling at rate {self.sample_rate:.6g}"

    def event(self, event: Event) -> Event:
        """The event on the whole dataset of a step that is `event` on its batch."""
        return event if self.sample_rate == 1 else PoissonSampled(sample_rate=self.sample_rate, event=event)

    def draw(self, *, dataset_size: int, step: int, rng: KeyedRNG) -> np.ndarray:
        """Sorted int64 indices, shape (b,), of the records in batch `step` out of `dataset_size` records.

        The gaps between successes of a Bernoulli(q) sequence are geometric: P[gap > k] = (1 − q)ᵏ, so
        gap = ⌈log U / log(1 − q)⌉ for U uniform in (0, 1). The cost is that of the batch, not of the dataset.
        """
        dataset_size = checks.integer(0, dataset_size=dataset_size)
        if self.sample_rate == 1:
            return np.arange(dataset_size, dtype=np.int64)
        stream = rng.stream("poisson", step=step)
        log_miss = math.log1p(-self.sample_rate)
        expected = dataset_size * self.sample_rate
        block = int(expected + 4 * math.sqrt(expected)) + 8
        position, parts = -1, []
        while position < dataset_size:
            # A gap beyond the dataset ends the draw however large it is; the cap keeps int64 from overflowing.
            gaps = np.ceil(np.log(stream.uniform(block)) / log_miss)
            positions = position + np.cumsum(np.minimum(gaps, dataset_size + 1).astype(np.int64))
            parts.append(positions)
            position = int(positions[-1])
        indices = np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
        return indices[indices < dataset_size]


@dataclass(frozen=True, kw_only=True)
class ScheduledPoissonSampling(_StepSampler):
    """Poisson sampling whose rate is planned step by step: the dynamic batch size.

    Guarantee: batch t is drawn as by ``PoissonSampling(rate(t))``, and costs what that says. The rates are fixed before
    the run; rates that follow from what was released need a privacy filter.

    Args:
        rate: the sample rate of a step in (0, 1], by its number.
    """

    rate: Callable[[int], float]

    def describe(self) -> str:
        """The sampler as it is written in a guarantee."""
        return "Poisson sampling at planned rates"

    def draw(self, *, dataset_size: int, step: int, rng: KeyedRNG) -> np.ndarray:
        """Sorted int64 indices of the records in batch `step`."""
        return PoissonSampling(sample_rate=self.rate(step)).draw(dataset_size=dataset_size, step=step, rng=rng)


@dataclass(frozen=True, kw_only=True)
class ShuffledSampling(_EpochSampler):
    """Each epoch shuffles the records and deals them into `steps_per_epoch` disjoint batches of nearly equal size.

    Guarantee: a record is in exactly one batch of an epoch, so when each batch is one ``event``, a whole epoch is one
    ``event`` on the dataset under replace-one and zero-out: the batches without the record are the same for both
    neighbors. Nothing is claimed from the shuffling itself. Adding or removing a record would move the borders of
    all batches, so that relation has no guarantee here.

    Args:
        steps_per_epoch: number of batches an epoch, ≥ 1.

    References:
        McSherry 2009, theorem 4 (parallel composition), for neighbors that replace a record.
    """

    def describe(self) -> str:
        """The sampler as it is written in a guarantee."""
        return "shuffled epochs without amplification"

    def deal(self, *, dataset_size: int, epoch: int, rng: KeyedRNG) -> list[np.ndarray]:
        """The shuffled records, cut into batches."""
        order = np.argsort(rng.stream("shuffle", step=epoch).integers64(dataset_size), kind="stable")
        return [order[start:end] for start, end in even_borders(dataset_size, self.steps_per_epoch)]


@dataclass(frozen=True, kw_only=True)
class CyclicPoissonSampling(_StepSampler):
    """Record number i is in group i mod `groups`; step t draws each member of group t mod `groups` independently.

    When: noise is correlated over at most `groups` steps: a record is in at most one step of a cycle.

    Guarantee: a record is drawn at most once a cycle, with probability ``groups · sample_rate``, whatever was drawn
    before. When each step is one ``event`` on its batch, a cycle is ``event(event)`` on the dataset. A record's group
    depends on its number alone, in every segment of a run: neighbors must agree in the numbers of all other records,
    so under add-or-remove-one the number of a removed record stays vacant.

    Args:
        groups: ≥ 1; 1 is Poisson sampling.
        sample_rate: the part of all records in an expected batch, in (0, 1/groups].

    References:
        Choquette-Choo et al. 2023, "(Amplified) banded matrix factorization", algorithm 2.
    """

    groups: int
    sample_rate: float

    def __post_init__(self) -> None:
        checks.integer(1, groups=self.groups)
        checks.probability(zero=False, sample_rate=self.sample_rate)
        checks.in_range(0, 1 + 1e-9, groups_times_sample_rate=self.groups * self.sample_rate)

    def describe(self) -> str:
        """The sampler as it is written in a guarantee."""
        return f"cyclic Poisson sampling at rate {self.sample_rate:.6g} from {self.groups} groups by record number"

    @property
    def _within(self) -> PoissonSampling:
        return PoissonSampling(sample_rate=min(1.0, self.groups * self.sample_rate))

    def event(self, event: Event) -> Event:
        """The event on the whole dataset of a cycle whose every step is `event` on its batch."""
        return self._within.event(event)

    def num_charges(self, steps: int) -> int:
        """How many times `event` is spent in `steps` steps: once for each cycle begun."""
        return math.ceil(steps / self.groups)

    def draw(self, *, dataset_size: int, step: int, rng: KeyedRNG) -> np.ndarray:
        """Sorted int64 indices of the records in batch `step`."""
        group = step % self.groups
        members = max(0, math.ceil((checks.integer(0, dataset_size=dataset_size) - group) / self.groups))
        return self._within.draw(dataset_size=members, step=step, rng=rng) * self.groups + group


@dataclass(frozen=True, kw_only=True)
class FixedBatchSampling(_EpochSampler):
    """Record number i is in batch i mod `steps_per_epoch` of every epoch: the same batches in the same order.

    When: noise is correlated over an epoch's steps, and nothing should be claimed from sampling. Nothing is random, so
    records that come sorted should be numbered in a random order first, once.

    Guarantee: a record's steps are exactly `steps_per_epoch` apart, and depend on its number alone. Neighbors must
    agree in the numbers of all other records, so under add-or-remove-one the number of a removed record stays vacant.

    Args:
        steps_per_epoch: number of batches an epoch, ≥ 1; 1 takes all records in every step.
    """

    def describe(self) -> str:
        """The sampler as it is written in a guarantee."""
        return f"{self.steps_per_epoch} fixed batches by record number"

    def deal(self, *, dataset_size: int, epoch: int, rng: KeyedRNG) -> list[np.ndarray]:  # noqa: ARG002
        """Records by their number alone."""
        count = self.steps_per_epoch
        return [np.arange(batch, dataset_size, count, dtype=np.int64) for batch in range(count)]


@dataclass(frozen=True, kw_only=True)
class FixedSizeSampling(_StepSampler):
    """Each batch has `batch_size` records, drawn uniformly from `dataset_size` without or with replacement.

    Guarantee: a step that is ``event`` on its batch is ``SampledWithoutReplacement(dataset_size, batch_size, event)``,
    or ``SampledWithReplacement(…)``, on the dataset, under replace-one and zero-out: neighbors have the same number
    of records, which is public. Batches of different steps are independent. With replacement a record that was drawn
    k times counts k times, as k records.

    Args:
        dataset_size: number of records N ≥ 1 that batches are drawn from, public.
        batch_size: records b ≥ 1 in every batch; at most N without replacement.
        with_replacement: whether a record may be drawn several times.

    References:
        Balle, Barthe, Gaboardi 2018, theorems 9 and 10; Wang, Balle, Kasiviswanathan 2019.
    """

    dataset_size: int
    batch_size: int
    with_replacement: bool = False

    def __post_init__(self) -> None:
        checks.integer(1, dataset_size=self.dataset_size)
        checks.integer(1, batch_size=self.batch_size)
        if not self.with_replacement and self.batch_size > self.dataset_size:
            raise InvalidArgument(
                f"batch_size must be ≤ dataset_size ({self.dataset_size}), got {self.batch_size}. Draw fewer records."
            )

    def describe(self) -> str:
        """The sampler as it is written in a guarantee."""
        how = "with" if self.with_replacement else "without"
        return f"fixed-size sampling {how} replacement, {self.batch_size} of {self.dataset_size}"

    def event(self, event: Event) -> Event:
        """The event on the whole dataset of a step that is `event` on its batch."""
        sampled = SampledWithReplacement if self.with_replacement else SampledWithoutReplacement
        return sampled(dataset_size=self.dataset_size, sample_size=self.batch_size, event=event)

    def check_dataset_size(self, dataset_size: int) -> None:
        """Refuse a dataset of another size: the rate of draws would be another one.

        Raises:
            InvalidArgument: it differs.
        """
        if dataset_size != self.dataset_size:
            raise InvalidArgument(
                f"dataset_size must be the number of records (or units) that batches are drawn from, {dataset_size}, "
                f"got {self.dataset_size} in the plan. Make the plan for this dataset."
            )

    def draw(self, *, dataset_size: int, step: int, rng: KeyedRNG) -> np.ndarray:
        """Sorted int64 indices, shape (batch_size,), of the records in batch `step`.

        Without replacement: the first b distinct values of a sequence of uniform ones are a uniform b-subset. Of more
        than half of the records the ones left out are drawn instead.
        """
        self.check_dataset_size(checks.integer(0, dataset_size=dataset_size))
        stream = rng.stream("fixed size", step=step)
        if self.with_replacement:
            return np.sort(_uniform_below(stream, dataset_size, self.batch_size))
        rest = dataset_size - self.batch_size
        if rest < self.batch_size:
            left_out = np.zeros(dataset_size, dtype=bool)
            left_out[_distinct_below(stream, dataset_size, rest)] = True
            return np.flatnonzero(~left_out).astype(np.int64)
        return np.sort(_distinct_below(stream, dataset_size, self.batch_size))


def _uniform_below(stream: RandomStream, bound: int, count: int) -> np.ndarray:
    """`count` independent uniform int64 in [0, `bound`), exactly: words beyond the last multiple of it are redrawn."""
    largest = np.uint64(2**64 - 1 - 2**64 % bound)
    parts, missing = [np.empty(0, dtype=np.int64)], count
    while missing:
        words = stream.integers64(missing)
        words = words[words <= largest]
        parts.append((words % np.uint64(bound)).astype(np.int64))
        missing -= len(words)
    return np.concatenate(parts)


def _distinct_below(stream: RandomStream, bound: int, count: int) -> np.ndarray:
    """The first `count` distinct values of a sequence of uniform ones in [0, `bound`), for count ≤ bound / 2."""
    drawn = _uniform_below(stream, bound, 2 * count)
    while True:
        values, first = np.unique(drawn, return_index=True)
        if len(values) >= count:
            return values[np.argsort(first, kind="stable")[:count]]
        drawn = np.concatenate([drawn, _uniform_below(stream, bound, count)])


@dataclass(frozen=True, kw_only=True)
class RandomAllocationSampling(_EpochSampler):
    """In each epoch every record joins `participations` of `steps_per_epoch` batches, chosen uniformly by itself.

    One participation is balls in bins: each record falls into one batch of the epoch. Batch sizes are random, secret.

    Guarantee: an epoch whose every step is one ``event`` on its batch is
    ``RandomAllocation(steps_per_epoch, participations, 1, event)`` on the dataset under every relation, with
    amplification for Gaussians under add-or-remove-one and zero-out. A broken-off epoch costs a whole one; what follows
    it begins another.

    Args:
        steps_per_epoch: number of batches an epoch, ≥ 1.
        participations: batches of an epoch that a record joins, in [1, steps_per_epoch].

    References:
        Chua et al. 2025, "Balls-and-bins sampling for DP-SGD"; Feldman, Shenfeld 2025.
    """

    participations: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.integer(1, participations=self.participations)
        if self.participations > self.steps_per_epoch:
            raise InvalidArgument(
                f"participations must be ≤ steps_per_epoch ({self.steps_per_epoch}), got {self.participations}. Use "
                "fewer participations."
            )

    def describe(self) -> str:
        """The sampler as it is written in a guarantee."""
        if self.participations == 1:
            return f"balls in bins, {self.steps_per_epoch} batches an epoch"
        return f"random allocation to {self.participations} of {self.steps_per_epoch} batches an epoch"

    def event(self, event: Event) -> Event:
        """The event on the whole dataset of an epoch whose every step is `event` on its batch."""
        return RandomAllocation(steps=self.steps_per_epoch, participations=self.participations, epochs=1, event=event)

    def deal(self, *, dataset_size: int, epoch: int, rng: KeyedRNG) -> list[np.ndarray]:
        """Every record in the batches that it chose."""
        chosen = self._chosen(dataset_size, rng.stream("allocation", step=epoch))
        order = np.argsort(chosen, axis=None, kind="stable") // self.participations
        ends = np.searchsorted(np.sort(chosen, axis=None), np.arange(1, self.steps_per_epoch))
        return np.split(order, ends)

    def _chosen(self, records: int, stream: RandomStream) -> np.ndarray:
        """The batches of each record, shape (records, participations): Floyd's uniform subsets, one for each row."""
        chosen = np.empty((records, self.participations), dtype=np.int64)
        for taken in range(self.participations):
            newest = self.steps_per_epoch - self.participations + taken
            drawn = _uniform_below(stream, newest + 1, records)
            is_taken = (chosen[:, :taken] == drawn[:, None]).any(axis=1)
            chosen[:, taken] = np.where(is_taken, newest, drawn)
        return chosen


Sampler: TypeAlias = (
    PoissonSampling
    | ScheduledPoissonSampling
    | ShuffledSampling
    | FixedSizeSampling
    | RandomAllocationSampling
    | CyclicPoissonSampling
    | FixedBatchSampling
)


def split_into_microbatches(
    indices: np.ndarray, *, step: int, microbatch_size: int | None = None
) -> tuple[Microbatch, ...]:
    """The chunks of one logical batch; an empty batch is one empty chunk, since it is a real step."""
    size = len(indices) if microbatch_size is None else checks.integer(1, microbatch_size=microbatch_size)
    starts = range(0, len(indices), max(size, 1)) if len(indices) else range(1)
    last = len(starts) - 1
    return tuple(
        Microbatch(step=step, index=number, is_last=number == last, indices=indices[start : start + size])
        for number, start in enumerate(starts)
    )


def split_evenly(indices: np.ndarray, *, step: int, parts: int) -> tuple[Microbatch, ...]:
    """One logical batch in exactly `parts` ≥ 1 chunks, whose sizes differ by at most one and may be 0.

    Guarantee: the number of chunks does not depend on the records.
    """
    borders = even_borders(len(indices), parts)
    return tuple(
        Microbatch(step=step, index=number, is_last=number == parts - 1, indices=indices[start:end])
        for number, (start, end) in enumerate(borders)
    )


def even_borders(records: int, parts: int) -> list[tuple[int, int]]:
    """Where `parts` stretches of `records` begin and end, as equal as can be."""
    return [(records * part // parts, records * (part + 1) // parts) for part in range(parts)]


SAMPLERS = ("poisson", "without_replacement", "with_replacement", "balls_in_bins", "shuffled")
"""Ways to draw batches, by name: each record by a coin; so many records, without or with repetition; each record into
one batch of an epoch, by chance; the records of an epoch in random order, cut into batches, without amplification."""


def make_sampler(
    name: str, *, sample_rate: float, dataset_size: int | None = None
) -> PoissonSampling | FixedSizeSampling | RandomAllocationSampling | ShuffledSampling:
    """The sampler of a name, with batches of about `sample_rate` times the records.

    Args:
        name: one of `SAMPLERS`.
        sample_rate: in (0, 1]; taken to the nearest whole batch size or number of batches an epoch.
        dataset_size: number of records, which batches of fixed size need.

    Example:
        >>> make_sampler("balls_in_bins", sample_rate=0.012).steps_per_epoch
        83
        >>> make_sampler("without_replacement", sample_rate=0.012, dataset_size=1000).batch_size
        12
    """
    checks.one_of(SAMPLERS, sampling=name)
    rate = checks.probability(zero=False, sample_rate=sample_rate)
    if name == "poisson":
        return PoissonSampling(sample_rate=rate)
    if name in ("balls_in_bins", "shuffled"):
        steps = max(1, round(1 / rate))
        shuffled = name == "shuffled"
        return ShuffledSampling(steps_per_epoch=steps) if shuffled else RandomAllocationSampling(steps_per_epoch=steps)
    if dataset_size is None:
        raise InvalidArgument(f"dataset_size must be the number of records with sampling={name!r}, got None. Give it.")
    size = max(1, round(rate * checks.integer(1, dataset_size=dataset_size)))
    return FixedSizeSampling(dataset_size=dataset_size, batch_size=size, with_replacement=name == "with_replacement")
