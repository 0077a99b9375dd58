"""The discrete Gaussian mechanism: exact, on integers or on an integer grid (floor 1).

It has the same zCDP and Rényi bounds as Gaussian noise of the same multiplier and releases integers. Where the
ε–δ curve of a vector release matters, `GridGaussianMechanism` is tighter: its event is the Gaussian's own.

References:
    Canonne, Kamath, Steinke 2020, theorem 4 (zCDP), algorithm 3 (sampler).
"""

import math
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from sordino import checks
from sordino.events import DiscreteGaussian, Event, ZeroConcentratedDP
from sordino.mechanisms.exact import discrete_gaussian
from sordino.mechanisms.grid import Grid, ratio_at_least, whole_array
from sordino.mechanisms.releases import recordable
from sordino.mechanisms.values import Numbers, Released, shaped
from sordino.randomness import Randomness

__all__ = ["DiscreteGaussianMechanism"]

# Above this many grid steps the exact law has more atoms than an accountant wants to list.
_LARGEST_LISTED = 4096.0


@dataclass(frozen=True, kw_only=True)
class DiscreteGaussianMechanism:
    """Adds integers with P(x) ∝ exp(−x²/(2σ²)) on a grid, σ = noise_multiplier · sensitivity. Exact.

    With `integers` the values are integers and the grid is ℤ: nothing is rounded. Otherwise the value is rounded to
    the grid, which raises its ℓ2 sensitivity to Δ₂ + step·√dimension.

    Guarantee: one release is 1/(2·noise_multiplier²)-zCDP when one privacy unit moves the value by at most
    `l2_sensitivity` in ℓ2 norm; ``DiscreteGaussian`` for a single number. An entry that is not finite is released as
    if it were 0.

    Args:
        noise_multiplier: σ over sensitivity, > 0.
        l2_sensitivity: > 0, under the declared relation, before rounding.
        dimension: number of entries of every value, ≥ 1. Public.
        granularity: step of the grid, a power of two; by default about 2⁻³⁰ of the sensitivity. 1 with `integers`.
        integers: whether values are integers.
        randomness: where the noise comes from; by default a fresh key of this object's own.

    Example:
        >>> mechanism = DiscreteGaussianMechanism(noise_multiplier=2.0, l2_sensitivity=1.0, integers=True)
        >>> mechanism.event()
        DiscreteGaussian(stddev=2.0, sensitivity=1)
    """

    noise_multiplier: float
    l2_sensitivity: float
    dimension: int = 1
    granularity: float | None = None
    integers: bool = False
    randomness: Randomness = field(default_factory=Randomness, repr=False, compare=False)

    def __post_init__(self) -> None:
        checks.positive(noise_multiplier=self.noise_multiplier)
        checks.positive(l2_sensitivity=self.l2_sensitivity)
        checks.integer(1, dimension=self.dimension)
        if self.integers:
            checks.one_of((None, 1.0), granularity=self.granularity, hint="Integers live on the grid of step 1.")
            checks.in_range(1.0, math.inf, l2_sensitivity=self.l2_sensitivity, hint="An integer moves by 1 or not.")
        checks.in_range(2.0**-20, 2.0**50, grid_stddev=self.stddev / self.grid.step, hint="Change the granularity.")

    @property
    def grid(self) -> Grid:
        """Where values live after rounding."""
        if self.integers:
            return Grid(exponent=0)
        if self.granularity is not None:
            return Grid.of_step(self.granularity)
        return Grid.below(self.l2_sensitivity * max(2.0**-30, self.noise_multiplier * 2.0**-48))

    @property
    def grid_sensitivity(self) -> Fraction:
        """ℓ2 sensitivity in grid steps after rounding; whole for a single number."""
        exact = Fraction(self.l2_sensitivity) / Fraction(self.grid.step)
        if self.dimension == 1:
            return Fraction(math.floor(exact) + (0 if self.integers else 1))
        return exact + (0 if self.integers else math.isqrt(self.dimension - 1) + 1)

    @property
    def ratio(self) -> tuple[int, int]:
        """σ in grid steps as a ratio of integers, rounded up."""
        return ratio_at_least(Fraction(self.noise_multiplier) * self.grid_sensitivity)

    @property
    def stddev(self) -> float:
        """σ in the value's own unit; the standard deviation is at most that."""
        return self.ratio[0] / self.ratio[1] * self.grid.step

    def event(self) -> Event:
        """The event of one release."""
        stddev = self.ratio[0] / self.ratio[1]
        if self.dimension == 1 and stddev <= _LARGEST_LISTED:
            return DiscreteGaussian(stddev=stddev, sensitivity=int(self.grid_sensitivity))
        return ZeroConcentratedDP(rho=0.5 / self.noise_multiplier**2)

    @recordable
    def release(self, value: Numbers) -> Released | np.int64 | npt.NDArray[np.int64]:
        """The value on the grid plus noise, same shape: int64 with `integers`, otherwise float64."""
        whole = whole_array(value) if self.integers else self.grid.integers(value)
        shaped(whole, self.dimension)
        noise = discrete_gaussian(*self.ratio, whole.size, self.randomness.fresh("discrete-gaussian"))
        noisy = np.asarray(whole + noise.reshape(whole.shape))
        return noisy[()] if self.integers else self.grid.values(noisy)[()]
