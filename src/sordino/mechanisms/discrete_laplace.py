"""The discrete Laplace and geometric mechanisms: exact pure privacy on integers and on an integer grid (floor 1).

References:
    Ghosh, Roughgarden, Sundararajan 2009 (geometric). Canonne, Kamath, Steinke 2020, algorithm 2 (sampler).
"""

import math
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from sordino import checks
from sordino.events import DiscreteLaplace, Event, PureDP
from sordino.mechanisms.exact import discrete_laplace
from sordino.mechanisms.grid import Grid, ratio_at_least, whole_array
from sordino.mechanisms.releases import recordable
from sordino.mechanisms.values import Numbers, Released, shaped
from sordino.randomness import Randomness

__all__ = ["DiscreteLaplaceMechanism", "GeometricMechanism", "coarse_multiple", "laplace_event"]


# A fine grid's sensitivity is made a multiple of a whole number of coarse steps, and this many of them are listed.
_COARSE_STEPS = 256


def coarse_multiple(sensitivity: int) -> int:
    """The sensitivity or a little more: a multiple of ⌈sensitivity/256⌉.

    From 2¹⁶ on it is 256 times that, at most 2⁻⁸ more (2⁻²² at the usual 2³⁰), so that all fine grids have like events.
    """
    step = -(-sensitivity // _COARSE_STEPS)
    return step * (_COARSE_STEPS if sensitivity >= 1 << 16 else -(-sensitivity // step))


def laplace_event(ratio: tuple[int, int], sensitivity: int) -> DiscreteLaplace:
    """The event of one integer that moves by ≤ `sensitivity`, a value of `coarse_multiple`, noise of scale a/b.

    Noise on ℤ is noise on rℤ plus independent noise: dividing the characteristic functions leaves that of the
    difference of two truncated geometric variables. So the mechanism on the fine grid is post-processing of the one
    on the grid of step r with r times less sensitivity and scale, whose few atoms an accountant can list.
    """
    step = -(-sensitivity // _COARSE_STEPS)
    return DiscreteLaplace(scale=ratio[0] / (ratio[1] * step), sensitivity=sensitivity // step)


def _event(ratio: tuple[int, int], sensitivity: int, dimension: int) -> Event:
    """One number has the exact event; for a vector only ε is claimed."""
    if dimension == 1:
        return laplace_event(ratio, sensitivity)
    return PureDP(epsilon=sensitivity * ratio[1] / ratio[0])


@dataclass(frozen=True, kw_only=True)
class GeometricMechanism:
    """Adds two-sided geometric noise, P(x) ∝ exp(−epsilon·|x|/l1_sensitivity), to integers. Exact.

    Guarantee: one release is ε-private with δ = 0 when one privacy unit moves the integer vector by at most
    `l1_sensitivity` in ℓ1 norm; ``DiscreteLaplace`` for a single integer.

    Args:
        epsilon: > 0.
        l1_sensitivity: a whole number ≥ 1, under the declared relation.
        dimension: number of entries of every value, ≥ 1. Public.
        randomness: where the noise comes from; by default a fresh key of this object's own.

    Example:
        >>> GeometricMechanism(epsilon=1.0, l1_sensitivity=1).release(5).dtype
        dtype('int64')
    """

    epsilon: float
    l1_sensitivity: int = 1
    dimension: int = 1
    randomness: Randomness = field(default_factory=Randomness, repr=False, compare=False)

    def __post_init__(self) -> None:
        checks.positive(epsilon=self.epsilon)
        checks.integer(1, l1_sensitivity=self.l1_sensitivity)
        checks.integer(1, dimension=self.dimension)
        checks.in_range(2.0**-20, 2.0**40, scale=self.l1_sensitivity / self.epsilon, hint="Rescale ε or the value.")

    @property
    def ratio(self) -> tuple[int, int]:
        """The scale Δ₁/ε as a ratio of integers, rounded up."""
        return ratio_at_least(Fraction(coarse_multiple(self.l1_sensitivity)) / Fraction(self.epsilon))

    @property
    def scale(self) -> float:
        """Scale t of the noise, P(x) ∝ e^{−|x|/t}."""
        return self.ratio[0] / self.ratio[1]

    def event(self) -> Event:
        """The event of one release."""
        return _event(self.ratio, coarse_multiple(self.l1_sensitivity), self.dimension)

    @recordable
    def release(self, value: Numbers) -> np.int64 | npt.NDArray[np.int64]:
        """The integers plus noise, same shape, int64."""
        integers = whole_array(value)
        shaped(integers, self.dimension)
        noise = discrete_laplace(*self.ratio, integers.size, self.randomness.fresh("geometric"))
        return np.asarray(integers + noise.reshape(integers.shape))[()]


@dataclass(frozen=True, kw_only=True)
class DiscreteLaplaceMechanism:
    """The Laplace mechanism for real values without its floating-point gap: values and noise live on a grid. Exact.

    The value is rounded to the grid, which raises its ℓ1 sensitivity to Δ₁ + step·dimension.

    Guarantee: one release is ε-private with δ = 0 when one privacy unit moves the value by at most `l1_sensitivity`
    in ℓ1 norm. An entry that is not finite is released as if it were 0.

    Args:
        epsilon: > 0.
        l1_sensitivity: > 0, under the declared relation, before rounding.
        dimension: number of entries of every value, ≥ 1. Public.
        granularity: step of the grid, a power of two; by default about 2⁻³⁰ of the sensitivity.
        randomness: where the noise comes from; by default a fresh key of this object's own.

    Example:
        >>> mechanism = DiscreteLaplaceMechanism(epsilon=1.0, l1_sensitivity=1.0, granularity=0.25)
        >>> mechanism.grid_sensitivity, float(mechanism.release(0.3)) * 4 % 1
        (5, 0.0)
    """

    epsilon: float
    l1_sensitivity: float
    dimension: int = 1
    granularity: float | None = None
    randomness: Randomness = field(default_factory=Randomness, repr=False, compare=False)

    def __post_init__(self) -> None:
        checks.positive(epsilon=self.epsilon)
        checks.positive(l1_sensitivity=self.l1_sensitivity)
        checks.integer(1, dimension=self.dimension)
        checks.in_range(
            2.0**-20, 2.0**50, grid_scale=self.grid_sensitivity / self.epsilon, hint="Choose another granularity."
        )

    @property
    def grid(self) -> Grid:
        """Where values live after rounding."""
        if self.granularity is not None:
            return Grid.of_step(self.granularity)
        return Grid.below(self.l1_sensitivity * max(2.0**-30, 2.0**-48 / self.epsilon))

    @property
    def grid_sensitivity(self) -> int:
        """ℓ1 sensitivity in grid steps after rounding: about Δ₁/step + dimension, a whole number."""
        moved = math.floor(Fraction(self.l1_sensitivity) / Fraction(self.grid.step)) + self.dimension
        return coarse_multiple(moved)

    @property
    def ratio(self) -> tuple[int, int]:
        """The scale in grid steps as a ratio of integers, rounded up."""
        return ratio_at_least(Fraction(self.grid_sensitivity) / Fraction(self.epsilon))

    @property
    def scale(self) -> float:
        """Scale of the noise in the value's own unit."""
        return self.ratio[0] / self.ratio[1] * self.grid.step

    def event(self) -> Event:
        """The event of one release."""
        return _event(self.ratio, self.grid_sensitivity, self.dimension)

    @recordable
    def release(self, value: Numbers) -> Released:
        """The value, rounded to the grid, plus noise on the grid; same shape, float64."""
        integers = self.grid.integers(value)
        shaped(integers, self.dimension)
        noise = discrete_laplace(*self.ratio, integers.size, self.randomness.fresh("discrete-laplace"))
        return self.grid.values(np.asarray(integers + noise.reshape(integers.shape)))[()]
