"""The K-norm mechanism: pure privacy with noise shaped like the norm in which the value moves (floor 1).

References:
    Hardt, Talwar 2010, "On the geometry of differential privacy" (density and sampler).
"""

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sordino import checks
from sordino.events import Event, Laplace, PureDP
from sordino.mechanisms.continuous import gamma, unit_ball_point
from sordino.mechanisms.releases import recordable
from sordino.mechanisms.values import Numbers, Released, finite_array, shaped
from sordino.randomness import Randomness

__all__ = ["KNormMechanism"]


@dataclass(frozen=True, kw_only=True)
class KNormMechanism:
    """Adds noise of density ∝ exp(−epsilon·‖z‖/sensitivity) for the ℓ1, ℓ2 or ℓ∞ norm, in floating point.

    Where the sensitivity is known in ℓ2 or ℓ∞, this adds far less noise than Laplace noise at the ℓ1 sensitivity
    that follows from it.

    Guarantee: one release is ε-private with δ = 0 when one privacy unit moves the value by at most `sensitivity` in
    the named norm. An entry that is not finite is released as if it were 0.

    Args:
        epsilon: > 0.
        sensitivity: > 0, in the norm `norm`, under the declared relation.
        norm: 1, 2 or ``math.inf``.
        dimension: number of entries k of every value, ≥ 1. Public.
        randomness: where the noise comes from; by default a fresh key of this object's own.

    Example:
        >>> mechanism = KNormMechanism(epsilon=1.0, sensitivity=1.0, norm=2, dimension=3)
        >>> mechanism.release([0.0, 1.0, 2.0]).shape
        (3,)
    """

    epsilon: float
    sensitivity: float
    norm: float
    dimension: int
    randomness: Randomness = field(default_factory=Randomness, repr=False, compare=False)

    def __post_init__(self) -> None:
        checks.positive(epsilon=self.epsilon)
        checks.positive(sensitivity=self.sensitivity)
        checks.one_of((1, 2, math.inf), norm=self.norm)
        checks.integer(1, dimension=self.dimension)
        checks.positive(scale=self.sensitivity / self.epsilon, hint="Rescale the value.")

    @property
    def scale(self) -> float:
        """Δ/ε: the norm of the noise is Gamma(dimension, scale)."""
        return self.sensitivity / self.epsilon

    def event(self) -> Event:
        """The event of one release: for ℓ1 and in one dimension the noise is Laplace noise."""
        if self.norm == 1 or self.dimension == 1:
            return Laplace(noise_multiplier=1.0 / self.epsilon)
        return PureDP(epsilon=self.epsilon)

    def noise(self) -> npt.NDArray[np.float64]:
        """One draw of the noise: r·u with r ~ Gamma(k + 1, Δ/ε) and u uniform in the unit ball of the norm."""
        stream = self.randomness.fresh("k-norm")
        radius = self.scale * gamma(self.dimension + 1, stream)
        return radius * unit_ball_point(self.dimension, self.norm, stream)

    @recordable
    def release(self, value: Numbers) -> Released:
        """The value plus noise, same shape."""
        array = finite_array(value)
        shaped(array, self.dimension)
        return (array + self.noise().reshape(array.shape))[()]
