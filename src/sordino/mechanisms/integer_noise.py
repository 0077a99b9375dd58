"""Exact noise for whole-number statistics: what counts, sums and histograms share.

A statistic is a vector of integers. One privacy unit moves at most `moved` of its entries, entry i by at most
`sensitivities[i]`. Each entry gets noise in proportion to its own sensitivity, so entries of different ranges are
served alike.
"""

import math
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from sordino import checks
from sordino.errors import InvalidArgument
from sordino.events import DiscreteLaplace, Event, Gaussian, SelfComposed, compose
from sordino.mechanisms.additive import coarse_multiple, laplace_event
from sordino.mechanisms.base import Grid, observable_release, ratio_at_least
from sordino.mechanisms.calibration import Budget, PureBudget
from sordino.mechanisms.samplers import LARGEST_STDDEV, discrete_laplace, rounded_gaussian
from sordino.randomness import KeyedRNG, RandomStream

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
        # Of distributions on the same grid the least scale dominates: the others add independent noise to it.
        worst: dict[int, tuple[DiscreteLaplace, int]] = {}
        for size, entries in Counter(self.sensitivities).items():
            event = laplace_event(self._ratio(size), coarse_multiple(size))
            known, others = worst.get(event.sensitivity, (event, 0))
            worst[event.sensitivity] = (min(event, known, key=attrgetter("scale")), others + entries)
        # Where fewer entries move than there are, they are all alike.
        return compose(
            [SelfComposed(event=event, count=min(entries, self.moved)) for _, (event, entries) in sorted(worst.items())]
        )

    def draw(self, stream: RandomStream) -> IntegerArray:
        """One noise vector."""
        sizes = np.array(self.sensitivities, dtype=np.int64)
        noise = np.empty(len(sizes), dtype=np.int64)
        for size in sorted(set(self.sensitivities)):
            positions = np.flatnonzero(sizes == size)
            if isinstance(self.budget, PureBudget):
                noise[positions] = discrete_laplace(*self._ratio(size), len(positions), stream)
            else:
                noise[positions] = _gaussian_integers(self._stddev(size), len(positions), stream)
        return noise


def _root_above(count: int) -> Fraction:
    """A fraction ≥ √count, at most 2⁻³⁰ above."""
    root = math.isqrt(count << 60)
    return Fraction(root if root * root == count << 60 else root + 1, 1 << 30)


def _gaussian_integers(stddev: Fraction, count: int, stream: RandomStream) -> IntegerArray:
    """Gaussian noise of this deviation, rounded to integers by way of a finer grid where the deviation is small."""
    bits = 0
    while stddev * (1 << bits) < 1 << 28:
        bits += 1
    fine = rounded_gaussian(math.ceil(stddev * (1 << bits)), count, stream)
    return (fine + ((1 << bits) >> 1)) >> bits


# ----------------------------------------------------------------------------------------------------------------------
# Gaussian noise on a sum of whole-number vectors, one a record, each of a checked norm: exact.
#
# Where records are rounded to the grid one by one, their sum has no rounding at all: integers add up the same in every
# order. So one record moves the sum by its own vector and by nothing else, and an integer plus rounded Gaussian noise
# is the rounding of (integer + Gaussian noise): post-processing of the real-valued Gaussian mechanism.
#
# References:
#     Kairouz, Liu, Steinke 2021, "The distributed discrete Gaussian mechanism", section 4.1 (clip, round, check again).
#     Casacuberta, Shoemate, Vadhan, Wagaman 2022, "Widespread underestimation of sensitivity", section 5.
# ----------------------------------------------------------------------------------------------------------------------


# A record's bound is 2²⁹ to 2³⁰ grid steps: fine enough that rounding costs nothing, coarse enough that sums of 2³²
# records and the noise stay inside int64.
_BITS = 29


@dataclass(frozen=True, kw_only=True)
class GridSumMechanism:
    """Noise for Σ_i v_i, v_i ∈ ℤ^d with ‖v_i‖₂ ≤ `largest_norm`, in steps of a public grid.

    A vector of norm at most `record_norm`, rounded to the nearest grid points, has norm at most `largest_norm`: √d/2
    steps are allowed for. The caller checks the integers, not the floats.

    Guarantee: the noisy integers are the event ``Gaussian(noise_multiplier)`` when neighbors differ in at most
    `moved` of the v_i, and every v_i is a function of its own record. Nothing is left to floating point.

    Args:
        noise_multiplier: standard deviation over sensitivity, ≥ 0; 0 adds nothing and is for debugging.
        record_norm: bound C > 0 on a record's vector before it is rounded.
        dimension: number of entries of the sum, ≥ 1. Public.
        moved: in how many v_i neighbors differ: 1 when a record is added, removed or zeroed, 2 when replaced.

    Raises:
        InvalidArgument: noise of 2⁵⁰ grid steps or more.

    Example:
        >>> mechanism = GridSumMechanism(noise_multiplier=2.0, record_norm=1.0, dimension=100)
        >>> mechanism.largest_norm - 2**29, mechanism.grid_stddev == 2 * mechanism.largest_norm
        (5, True)

    References:
        See ``docs/proofs/secure-mode.md``.
    """

    noise_multiplier: float
    record_norm: float
    dimension: int
    moved: int = 1

    def __post_init__(self) -> None:
        checks.non_negative(noise_multiplier=self.noise_multiplier)
        checks.positive(record_norm=self.record_norm)
        checks.integer(1, dimension=self.dimension)
        checks.one_of((1, 2), moved=self.moved)
        checks.in_range(0, LARGEST_STDDEV, grid_stddev=self.grid_stddev, hint="Use a smaller noise_multiplier.")

    @property
    def grid(self) -> Grid:
        """Where the sum lives: 2²⁹ to 2³⁰ steps make a record's bound."""
        return Grid.below(math.ldexp(self.record_norm, -_BITS))

    @property
    def largest_norm(self) -> int:
        """Largest ℓ2 norm of a record's integers, in grid steps: ⌊C/step⌋ + ⌈√d/2⌉."""
        root_above = math.isqrt(self.dimension - 1) + 1
        return math.floor(Fraction(self.record_norm) / Fraction(self.grid.step)) + (root_above + 1) // 2

    @property
    def grid_stddev(self) -> int:
        """Standard deviation of the noise in grid steps, rounded up."""
        return math.ceil(Fraction(self.noise_multiplier) * self.sensitivity)

    @property
    def sensitivity(self) -> int:
        """How far neighbors move the sum of integers, in ℓ2 norm."""
        return self.moved * self.largest_norm

    @property
    def stddev(self) -> float:
        """Standard deviation of the noise on each entry, in the unit of `record_norm`."""
        return self.grid_stddev * self.grid.step

    def event(self) -> Event:
        """The event of one release."""
        return Gaussian(noise_multiplier=self.noise_multiplier)

    @observable_release
    def release(
        self, value: npt.NDArray[np.int64], *, rng: KeyedRNG, step: int, rank: int = 0
    ) -> npt.NDArray[np.int64]:
        """The sum of integers plus noise, in grid steps; (`step`, `rank`) must never repeat within one `rng`."""
        return value + self.noise(value.size, rng.stream("grid-gaussian", step=step, rank=rank))

    def noise(self, count: int, stream: RandomStream) -> npt.NDArray[np.int64]:
        """`count` independent draws of the noise, in grid steps."""
        if self.grid_stddev == 0:
            return np.zeros(checks.integer(0, count=count), dtype=np.int64)
        return rounded_gaussian(self.grid_stddev, count, stream)
