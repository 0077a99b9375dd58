"""Exact noise for whole-number statistics: what counts, sums and histograms share (floor 1).

A statistic is a vector of integers. One privacy unit moves at most `moved` of its entries, entry i by at most
`sensitivities[i]`. Each entry gets noise in proportion to its own sensitivity, so entries of different ranges are
served alike.
"""

import math
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from sordino import checks
from sordino.errors import InvalidArgument
from sordino.events import DiscreteLaplace, Event, Gaussian, SelfComposed, compose
from sordino.mechanisms.budgets import Budget, PureBudget
from sordino.mechanisms.discrete_laplace import coarse_multiple, laplace_event
from sordino.mechanisms.exact import discrete_laplace
from sordino.mechanisms.grid import ratio_at_least
from sordino.mechanisms.rounded_gaussian import rounded_gaussian
from sordino.randomness import Stream

__all__ = ["IntegerNoise", "record_bits"]

IntegerArray = npt.NDArray[np.int64]


def record_bits(budget: Budget, moved: int, *, most: int = 30) -> int:
    """How finely records may be rounded (log₂ of grid steps in a record's bound), so that noise stays inside 2⁵⁰."""
    units = moved / budget.epsilon if isinstance(budget, PureBudget) else budget.noise_multiplier * math.sqrt(moved)
    bits = min(most, 49 - math.ceil(math.log2(units)))
    if bits < 8:
        raise InvalidArgument(f"budget must allow noise below 2^41 times a record, got {budget!r}. Raise it.")
    return bits


@dataclass(frozen=True, kw_only=True)
class IntegerNoise:
    """Noise on a vector of integers: discrete Laplace for a pure budget, rounded Gaussian for a Gaussian one.

    Guarantee: releasing integers plus one draw spends at most `budget`; the noise is exact.

    Args:
        sensitivities: the largest change of each entry, whole numbers ≥ 1.
        moved: how many entries one privacy unit can change, 1 … len(sensitivities); all when sensitivities differ.
        budget: what the whole vector may spend.
    """

    sensitivities: tuple[int, ...]
    moved: int
    budget: Budget

    def __post_init__(self) -> None:
        for sensitivity in self.sensitivities:
            checks.integer(1, sensitivity=sensitivity)
        checks.in_range(1, len(self.sensitivities), moved=self.moved)
        if self.moved < len(self.sensitivities) and len(set(self.sensitivities)) > 1:
            raise InvalidArgument(
                f"moved must be {len(self.sensitivities)} for entries of different sensitivities, got {self.moved}. "
                "Which of them move is not known."
            )

    def _ratio(self, sensitivity: int) -> tuple[int, int]:
        """Discrete Laplace scale of an entry: each of the moved entries may spend ε/moved."""
        return ratio_at_least(Fraction(coarse_multiple(sensitivity)) * self.moved / Fraction(self._epsilon))

    @property
    def _epsilon(self) -> float:
        return self.budget.epsilon if isinstance(self.budget, PureBudget) else math.inf

    def _stddev(self, sensitivity: int) -> Fraction:
        """Gaussian deviation of an entry: entries moved by their full sensitivities add up to 1/noise_multiplier²."""
        multiplier = 0.0 if isinstance(self.budget, PureBudget) else self.budget.noise_multiplier
        return Fraction(multiplier) * sensitivity * _root_above(self.moved)

    @property
    def scales(self) -> npt.NDArray[np.float64]:
        """Laplace scale or Gaussian standard deviation of each entry's noise."""
        by_size = {
            size: self._ratio(size)[0] / self._ratio(size)[1]
            if isinstance(self.budget, PureBudget)
            else float(self._stddev(size))
            for size in set(self.sensitivities)
        }
        return np.array([by_size[size] for size in self.sensitivities])

    def event(self) -> Event:
        """The event of one draw."""
        if not isinstance(self.budget, PureBudget):
            return Gaussian(noise_multiplier=self.budget.noise_multiplier)
        # Of laws on the same grid the one with the least scale dominates: the others add independent noise to it.
        worst: dict[int, tuple[DiscreteLaplace, int]] = {}
        for size, entries in Counter(self.sensitivities).items():
            event = laplace_event(self._ratio(size), coarse_multiple(size))
            known, others = worst.get(event.sensitivity, (event, 0))
            worst[event.sensitivity] = (min(event, known, key=_scale), others + entries)
        # Where fewer entries move than there are, they are all alike.
        return compose(
            [SelfComposed(event=event, count=min(entries, self.moved)) for _, (event, entries) in sorted(worst.items())]
        )

    def draw(self, stream: Stream) -> IntegerArray:
        """One noise vector."""
        sizes = np.array(self.sensitivities, dtype=np.int64)
        noise = np.empty(len(sizes), dtype=np.int64)
        for size in sorted(set(self.sensitivities)):
            places = np.flatnonzero(sizes == size)
            if isinstance(self.budget, PureBudget):
                noise[places] = discrete_laplace(*self._ratio(size), len(places), stream)
            else:
                noise[places] = _gaussian_integers(self._stddev(size), len(places), stream)
        return noise


def _root_above(count: int) -> Fraction:
    """A fraction ≥ √count, at most 2⁻³⁰ above."""
    root = math.isqrt(count << 60)
    return Fraction(root if root * root == count << 60 else root + 1, 1 << 30)


def _scale(event: DiscreteLaplace) -> float:
    return event.scale


def _gaussian_integers(stddev: Fraction, count: int, stream: Stream) -> IntegerArray:
    """Gaussian noise of this deviation, rounded to integers by way of a finer grid where the deviation is small."""
    bits = 0
    while stddev * (1 << bits) < 1 << 28:
        bits += 1
    fine = rounded_gaussian(math.ceil(stddev * (1 << bits)), count, stream)
    return (fine + ((1 << bits) >> 1)) >> bits
