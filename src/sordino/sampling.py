"""How batches are drawn (floor 1). A sampler yields batches *and* knows the event that accounts for them.

A logical batch is drawn once, whole, then split into chunks of `microbatch_size` records, which only bounds
memory. Step number, chunk number and `is_last` travel inside the chunk.

Example:
    >>> from sordino.randomness import Randomness
    >>> sampler = PoissonSampling(sample_rate=0.5)
    >>> indices = sampler.draw(population=6, step=0, randomness=Randomness(seed=1, reproducible=True))
    >>> [chunk.is_last for chunk in split(indices, step=0, microbatch_size=2)][-1]
    True
"""

import math
from dataclasses import dataclass

import numpy as np

from sordino import checks
from sordino.events import Event, PoissonSampled
from sordino.randomness import Randomness

__all__ = ["Chunk", "PoissonSampling", "split"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Chunk:
    """A part of one logical batch.

    Args:
        step: number of the logical batch, from 0, never used twice in a run.
        chunk: position inside the logical batch, from 0.
        is_last: whether the step is complete after this chunk.
        indices: int64 positions of the records, possibly none.
    """

    step: int
    chunk: int
    is_last: bool
    indices: np.ndarray

    @property
    def records(self) -> int:
        """Number of records in the chunk. Under Poisson sampling it is private."""
        return len(self.indices)


@dataclass(frozen=True, kw_only=True)
class PoissonSampling:
    """Each record joins each batch independently with probability `sample_rate`.

    Guarantee: with `sample_rate` q, a step that is ``event`` on its batch is ``PoissonSampled(q, event)`` on the
    data set. The batch size is random, secret, and may be zero.

    Args:
        sample_rate: in (0, 1]; 1 is the whole data set in every step.

    References:
        Abadi et al. 2016, section 2.2 ("lots"); Balle, Barthe, Gaboardi 2018, theorem 8.
    """

    sample_rate: float

    def __post_init__(self) -> None:
        checks.probability(zero=False, sample_rate=self.sample_rate)

    @property
    def words(self) -> str:
        """The sampler as it is written in a guarantee."""
        return "full batches" if self.sample_rate == 1 else f"Poisson sampling at rate {self.sample_rate:.6g}"

    def event(self, event: Event) -> Event:
        """The event on the whole data set of a step that is `event` on its batch."""
        return event if self.sample_rate == 1 else PoissonSampled(sample_rate=self.sample_rate, event=event)

    def draw(self, *, population: int, step: int, randomness: Randomness) -> np.ndarray:
        """Sorted int64 indices, shape (b,), of the records in batch `step` out of `population` records.

        The gaps between successes of a Bernoulli(q) sequence are geometric: P[gap > k] = (1 − q)ᵏ, so
        gap = ⌈log U / log(1 − q)⌉ for U uniform in (0, 1). The cost is that of the batch, not of the data set.
        """
        population = checks.integer(0, population=population)
        if self.sample_rate == 1:
            return np.arange(population, dtype=np.int64)
        stream = randomness.stream("poisson", step=step)
        log_miss = math.log1p(-self.sample_rate)
        expected = population * self.sample_rate
        block = int(expected + 4 * math.sqrt(expected)) + 8
        position, parts = -1, []
        while position < population:
            # A gap beyond the data set ends the draw however large it is; the cap keeps int64 from overflowing.
            gaps = np.ceil(np.log(stream.uniform(block)) / log_miss)
            positions = position + np.cumsum(np.minimum(gaps, population + 1).astype(np.int64))
            parts.append(positions)
            position = int(positions[-1])
        indices = np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
        return indices[indices < population]


def split(indices: np.ndarray, *, step: int, microbatch_size: int | None = None) -> tuple[Chunk, ...]:
    """The chunks of one logical batch; an empty batch is one empty chunk, since it is a real step."""
    size = len(indices) if microbatch_size is None else checks.integer(1, microbatch_size=microbatch_size)
    starts = range(0, len(indices), max(size, 1)) if len(indices) else range(1)
    last = len(starts) - 1
    return tuple(
        Chunk(step=step, chunk=number, is_last=number == last, indices=indices[start : start + size])
        for number, start in enumerate(starts)
    )
