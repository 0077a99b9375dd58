"""The Gaussian mechanism on numpy values: in floating point, and exactly, on an integer grid (floor 1).

References:
    Balle, Wang 2018, theorem 8 (calibration). Mironov 2012 (what floating point leaks).
"""

import math
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

from sordino import checks
from sordino.events import Event, Gaussian
from sordino.mechanisms.analytic_gaussian import analytic_noise_multiplier, classical_noise_multiplier
from sordino.mechanisms.continuous import normal
from sordino.mechanisms.grid import Grid
from sordino.mechanisms.releases import recordable
from sordino.mechanisms.rounded_gaussian import LARGEST_STDDEV, rounded_gaussian
from sordino.mechanisms.values import Numbers, Released, finite_array, shaped
from sordino.randomness import Randomness

__all__ = ["ArrayGaussianMechanism", "GridGaussianMechanism", "calibrated_noise_multiplier"]


def calibrated_noise_multiplier(*, epsilon: float, delta: float, calibration: str = "analytic") -> float:
    """The noise multiplier for (ε, δ): ``analytic`` is exact for all ε, ``classical`` is refused for ε ≥ 1."""
    checks.one_of(("analytic", "classical"), calibration=calibration)
    chosen = analytic_noise_multiplier if calibration == "analytic" else classical_noise_multiplier
    return chosen(epsilon=epsilon, delta=delta)


@dataclass(frozen=True, kw_only=True)
class ArrayGaussianMechanism:
    """Adds N(0, (noise_multiplier · l2_sensitivity)²) to every entry of a numpy value, in floating point.

    For values whose last bits matter use `GridGaussianMechanism`.

    Guarantee: one release is ``Gaussian(noise_multiplier)`` when one privacy unit moves the value by at most
    `l2_sensitivity` in ℓ2 norm. An entry that is not finite is released as if it were 0.

    Args:
        noise_multiplier: standard deviation over sensitivity, > 0.
        l2_sensitivity: > 0, under the declared relation.
        randomness: where the noise comes from; by default a fresh key of this object's own.

    Example:
        >>> mechanism = ArrayGaussianMechanism.for_budget(epsilon=1.0, delta=1e-5, l2_sensitivity=2.0)
        >>> round(mechanism.stddev, 4), mechanism.release([1.0, 2.0]).shape
        (7.4613, (2,))
    """

    noise_multiplier: float
    l2_sensitivity: float
    randomness: Randomness = field(default_factory=Randomness, repr=False, compare=False)

    def __post_init__(self) -> None:
        checks.positive(noise_multiplier=self.noise_multiplier)
        checks.positive(l2_sensitivity=self.l2_sensitivity)

    @classmethod
    def for_budget(
        cls,
        *,
        epsilon: float,
        delta: float,
        l2_sensitivity: float,
        calibration: str = "analytic",
        randomness: Randomness | None = None,
    ) -> "ArrayGaussianMechanism":
        """The mechanism with the least noise that is (ε, δ)-private."""
        multiplier = calibrated_noise_multiplier(epsilon=epsilon, delta=delta, calibration=calibration)
        return cls(noise_multiplier=multiplier, l2_sensitivity=l2_sensitivity, randomness=randomness or Randomness())

    @property
    def stddev(self) -> float:
        """Standard deviation of the noise on each entry."""
        return self.noise_multiplier * self.l2_sensitivity

    def event(self) -> Event:
        """The event of one release."""
        return Gaussian(noise_multiplier=self.noise_multiplier)

    @recordable
    def release(self, value: Numbers) -> Released:
        """The value plus noise, same shape."""
        array = finite_array(value)
        noise = normal(array.size, self.randomness.fresh("array-gaussian"))
        return (array + self.stddev * noise.reshape(array.shape))[()]


@dataclass(frozen=True, kw_only=True)
class GridGaussianMechanism:
    """Gaussian noise, exactly rounded to an integer grid: what is released has no low bits that could tell.

    The value is rounded to the grid, which raises its ℓ2 sensitivity to Δ + step·√dimension; the noise is drawn by
    integer comparisons alone, and is post-processing of real Gaussian noise (`rounded_gaussian`).

    Guarantee: one release is ``Gaussian(noise_multiplier)`` when one privacy unit moves the value by at most
    `l2_sensitivity` in ℓ2 norm. An entry that is not finite is released as if it were 0.

    Args:
        noise_multiplier: standard deviation over sensitivity, > 0.
        l2_sensitivity: > 0, under the declared relation, before rounding.
        dimension: number of entries of every value, ≥ 1. Public.
        granularity: step of the grid, a power of two; by default about 2⁻³⁰ of the sensitivity.
        randomness: where the noise comes from; by default a fresh key of this object's own.

    Example:
        >>> mechanism = GridGaussianMechanism(noise_multiplier=1.0, l2_sensitivity=1.0, dimension=3, granularity=0.125)
        >>> bool((mechanism.release([0.1, 0.2, 0.3]) * 8 % 1 == 0).all())
        True
    """

    noise_multiplier: float
    l2_sensitivity: float
    dimension: int = 1
    granularity: float | None = None
    randomness: Randomness = field(default_factory=Randomness, repr=False, compare=False)

    def __post_init__(self) -> None:
        checks.positive(noise_multiplier=self.noise_multiplier)
        checks.positive(l2_sensitivity=self.l2_sensitivity)
        checks.integer(1, dimension=self.dimension)
        checks.in_range(1, LARGEST_STDDEV, grid_stddev=self.grid_stddev, hint="Choose a coarser granularity.")

    @property
    def grid(self) -> Grid:
        """Where values live after rounding."""
        if self.granularity is not None:
            return Grid.of_step(self.granularity)
        return Grid.below(self.l2_sensitivity * max(2.0**-30, self.noise_multiplier * 2.0**-48))

    @property
    def grid_stddev(self) -> int:
        """Standard deviation of the noise in grid steps, rounded up."""
        # The root is rounded up to an integer's and the products are exact fractions, so nothing is rounded down.
        rounding = math.isqrt(self.dimension - 1) + 1
        sensitivity = Fraction(self.l2_sensitivity) / Fraction(self.grid.step) + rounding
        return math.ceil(Fraction(self.noise_multiplier) * sensitivity)

    @property
    def stddev(self) -> float:
        """Standard deviation of the noise on each entry."""
        return self.grid_stddev * self.grid.step

    def event(self) -> Event:
        """The event of one release."""
        return Gaussian(noise_multiplier=self.noise_multiplier)

    @recordable
    def release(self, value: Numbers) -> Released:
        """The value, rounded to the grid, plus noise on the grid; same shape, float64."""
        integers = self.grid.integers(value)
        shaped(integers, self.dimension)
        noise = rounded_gaussian(self.grid_stddev, integers.size, self.randomness.fresh("grid-gaussian"))
        return self.grid.values(np.asarray(integers + noise.reshape(integers.shape)))[()]
