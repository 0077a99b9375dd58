"""Gaussian noise on a sum of whole-number vectors, one a record, each of a checked norm: exact (floor 1).

Where records are rounded to the grid one by one, their sum has no rounding at all: integers add up the same in every
order. So one record moves the sum by its own vector and by nothing else, and an integer plus rounded Gaussian noise is
the rounding of (integer + Gaussian noise): post-processing of the real-valued Gaussian mechanism.

References:
    Kairouz, Liu, Steinke 2021, "The distributed discrete Gaussian mechanism", section 4.1 (clip, round, check again).
    Casacuberta, Shoemate, Vadhan, Wagaman 2022, "Widespread underestimation of sensitivity", section 5.
"""

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from sordino import checks
from sordino.events import Event, Gaussian
from sordino.mechanisms.grid import Grid
from sordino.mechanisms.releases import recordable
from sordino.mechanisms.rounded_gaussian import LARGEST_STDDEV, rounded_gaussian
from sordino.randomness import Randomness, Stream

__all__ = ["GridSumMechanism"]

# A record's bound is 2²⁹ to 2³⁰ grid steps: fine enough that rounding costs nothing, coarse enough that sums of 2³²
# records and the noise stay inside int64.
_BITS = 29


@dataclass(frozen=True, kw_only=True)
class GridSumMechanism:
    """Noise for Σ_i v_i, v_i ∈ ℤ^d with ‖v_i‖₂ ≤ `largest_norm`, in steps of a public grid.

    A vector of norm at most `record_norm`, rounded to the nearest grid points, has norm at most `largest_norm`: √d/2
    steps are allowed for. The caller checks the integers, not the floats.

    Guarantee: the noisy integers are the event ``Gaussian(noise_multiplier)`` when neighbours differ in at most
    `moved` of the v_i, and every v_i is a function of its own record. Nothing is left to floating point.

    Args:
        noise_multiplier: standard deviation over sensitivity, ≥ 0; 0 adds nothing and is for debugging.
        record_norm: bound C > 0 on a record's vector before it is rounded.
        dimension: number of entries of the sum, ≥ 1. Public.
        moved: in how many v_i neighbours differ: 1 when a record is added, removed or zeroed, 2 when replaced.

    Raises:
        InvalidArgument: noise of 2⁵⁰ grid steps or more.

    Example:
        >>> mechanism = GridSumMechanism(noise_multiplier=2.0, record_norm=1.0, dimension=100)
        >>> mechanism.largest_norm - 2**29, mechanism.grid_stddev == 2 * mechanism.largest_norm
        (5, True)

    References:
        See ``docs/proofs/secure-gradient-noise.md``.
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
        """How far neighbours move the sum of integers, in ℓ2 norm."""
        return self.moved * self.largest_norm

    @property
    def stddev(self) -> float:
        """Standard deviation of the noise on each entry, in the unit of `record_norm`."""
        return self.grid_stddev * self.grid.step

    def event(self) -> Event:
        """The event of one release."""
        return Gaussian(noise_multiplier=self.noise_multiplier)

    @recordable
    def release(
        self, value: npt.NDArray[np.int64], *, randomness: Randomness, step: int, rank: int = 0
    ) -> npt.NDArray[np.int64]:
        """The sum of integers plus noise, in grid steps; (`step`, `rank`) must never repeat within one `randomness`."""
        return value + self.noise(value.size, randomness.stream("grid-gaussian", step=step, rank=rank))

    def noise(self, count: int, stream: Stream) -> npt.NDArray[np.int64]:
        """`count` independent draws of the noise, in grid steps."""
        if self.grid_stddev == 0:
            return np.zeros(checks.integer(0, count=count), dtype=np.int64)
        return rounded_gaussian(self.grid_stddev, count, stream)
