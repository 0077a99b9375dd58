"""The Laplace mechanism on numpy values, in floating point (floor 1).

For values whose last bits matter use `DiscreteLaplaceMechanism`.

References:
    Dwork, McSherry, Nissim, Smith 2006, proposition 1. Mironov 2012 (what floating point leaks).
"""

from dataclasses import dataclass, field

from sordino import checks
from sordino.events import Event, Laplace
from sordino.mechanisms.continuous import laplace
from sordino.mechanisms.releases import recordable
from sordino.mechanisms.values import Numbers, Released, finite_array
from sordino.randomness import Randomness

__all__ = ["LaplaceMechanism"]


@dataclass(frozen=True, kw_only=True)
class LaplaceMechanism:
    """Adds Laplace noise of scale l1_sensitivity/epsilon to every entry of a value, in floating point.

    Guarantee: one release is ``Laplace(1/epsilon)``, hence ε-private with δ = 0, when one privacy unit moves the
    value by at most `l1_sensitivity` in ℓ1 norm. An entry that is not finite is released as if it were 0.

    Args:
        epsilon: > 0.
        l1_sensitivity: > 0, under the declared relation.
        randomness: where the noise comes from; by default a fresh key of this object's own.

    Example:
        >>> mechanism = LaplaceMechanism(epsilon=0.5, l1_sensitivity=2.0)
        >>> mechanism.scale, mechanism.release([1.0, 2.0]).shape
        (4.0, (2,))
    """

    epsilon: float
    l1_sensitivity: float
    randomness: Randomness = field(default_factory=Randomness, repr=False, compare=False)

    def __post_init__(self) -> None:
        checks.positive(epsilon=self.epsilon)
        checks.positive(l1_sensitivity=self.l1_sensitivity)
        checks.positive(scale=self.l1_sensitivity / self.epsilon, hint="Rescale the value.")

    @property
    def scale(self) -> float:
        """Scale b of the noise, density ∝ e^{−|z|/b}; its standard deviation is √2·b."""
        return self.l1_sensitivity / self.epsilon

    def event(self) -> Event:
        """The event of one release."""
        return Laplace(noise_multiplier=1.0 / self.epsilon)

    @recordable
    def release(self, value: Numbers) -> Released:
        """The value plus noise, same shape."""
        array = finite_array(value)
        noise = laplace(array.size, self.randomness.fresh("laplace"))
        return (array + self.scale * noise.reshape(array.shape))[()]
