"""Gaussian differential privacy (floor 1): exact where exact, the central limit approximation as no guarantee.

μ-GDP is the privacy curve of one Gaussian with sensitivity/std = μ; composition is √(Σ μ²) (Dong, Roth and Su 2022,
corollary 3.3). For Poisson-sampled Gaussians the limit μ = q√(T(e^{1/σ²} − 1)) (Bu et al. 2020) is *not* an upper
bound: at q = 0.01, σ = 4, T = 10000, δ = 1e-5 it gives 0.9424 where the truth is 0.9469.
"""

import math
from dataclasses import dataclass

from sordino import checks
from sordino.accounting.composition import flatten
from sordino.accounting.gaussian import gaussian_delta, gaussian_epsilon
from sordino.accounting.interval import Interval
from sordino.accounting.inversion import safe_crossing
from sordino.definitions import NeighboringRelation
from sordino.errors import UnsupportedEvent
from sordino.events import Event, Gaussian, PoissonSampled

__all__ = ["GaussianDP", "Heuristic", "central_limit_epsilon", "largest_mu"]


@dataclass(frozen=True, kw_only=True)
class Heuristic:
    """A number that guarantees nothing: it may lie below the true ε. Deliberately not an `Interval`."""

    value: float
    method: str
    warning: str


@dataclass(frozen=True)
class GaussianDP:
    """μ-GDP of Gaussians without sampling, where it is exact.

    Guarantee:
        The interval is the exact curve with its rounding error.
    """

    name: str = "gdp"
    automatic: bool = False

    def supports(self, event: Event, relation: NeighboringRelation) -> bool:
        """Gaussians without sampling, in any number."""
        try:
            steps = flatten(event, relation)
        except UnsupportedEvent:
            return False
        return len(steps.counts) == 1 and isinstance(steps.counts[0][0], Gaussian)

    def _mu(self, event: Event, relation: NeighboringRelation) -> float:
        base = flatten(event, relation).counts[0][0]
        assert isinstance(base, Gaussian)
        return 1 / base.noise_multiplier

    def epsilon(self, event: Event, delta: float, relation: NeighboringRelation) -> Interval:
        """The Gaussian curve inverted."""
        lower, upper = gaussian_epsilon(delta, self._mu(event, relation))
        return Interval(lower=lower, upper=upper, accountant=self.name)

    def delta(self, event: Event, epsilon: float, relation: NeighboringRelation) -> Interval:
        """The Gaussian curve."""
        lower, upper = gaussian_delta(epsilon, self._mu(event, relation))
        return Interval(lower=lower, upper=upper, accountant=self.name)


def central_limit_epsilon(event: Event, delta: float) -> Heuristic:
    """Bu et al.'s central limit ε of Gaussians with and without Poisson sampling: NO GUARANTEE.

    Raises:
        UnsupportedEvent: something else took part.

    Example:
        >>> from sordino.events import SelfComposed
        >>> step = PoissonSampled(sample_rate=0.01, event=Gaussian(noise_multiplier=4.0))
        >>> round(central_limit_epsilon(SelfComposed(event=step, count=10_000), 1e-5).value, 6)
        0.94244
    """
    delta = checks.probability(delta=delta, zero=False)
    square = 0.0
    for base, count in flatten(event).counts:
        if isinstance(base, Gaussian):
            square += count / base.noise_multiplier**2
        elif isinstance(base, PoissonSampled) and isinstance(base.event, Gaussian):
            square += count * base.sample_rate**2 * math.expm1(min(700.0, base.event.noise_multiplier**-2))
        else:
            raise UnsupportedEvent(f"the central limit must be of Gaussians, got {base.kind}. Use the pld accountant.")
    return Heuristic(
        value=gaussian_epsilon(delta, math.sqrt(square))[1],
        method="Gaussian DP, central limit theorem (Bu et al. 2020)",
        warning="no guarantee: the true ε may be larger",
    )


def largest_mu(epsilon: float, delta: float) -> float:
    """The largest μ whose Gaussian curve is (ε, δ)-private, rounded down.

    Example:
        >>> round(largest_mu(1.0, 1e-5), 6)
        0.268051
    """
    high = 1.0
    while gaussian_delta(epsilon, high)[1] <= delta:
        high *= 2
    low, _ = safe_crossing(lambda mu: gaussian_delta(epsilon, mu)[1] <= delta, 0.0, high, 1e-15)
    return low
