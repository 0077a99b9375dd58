"""Concentrated and Gaussian differential privacy: zCDP with the tight conversion, GDP where it is exact.

ρ-zCDP is D_α ≤ ρα for all α > 1 (Bun and Steinke 2016); composition adds ρ.
"""

import math
from dataclasses import dataclass

from sordino.accounting.base import Interval, flatten
from sordino.accounting.closed_form import bracket_crossing, gaussian_delta, gaussian_epsilon
from sordino.accounting.rdp import gaussian_conversion
from sordino.definitions import NeighboringRelation
from sordino.errors import UnsupportedEvent
from sordino.events import (
    BoundedRange,
    DiscreteGaussian,
    DiscreteLaplace,
    Event,
    Gaussian,
    Laplace,
    PureDP,
    RandomizedResponse,
    ZeroConcentratedDP,
)

__all__ = [
    "GDPAccountant",
    "ZCDPAccountant",
    "max_mu",
    "max_rho",
    "rho_to_epsilon",
    "step_rho",
    "zcdp_rho",
]


def zcdp_rho(event: Event, neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE) -> float:
    """Σ ρ of an event whose steps are all zCDP without sampling.

    Raises:
        UnsupportedEvent: a step has no zCDP parameter.

    Example:
        >>> zcdp_rho(Gaussian(noise_multiplier=10.0))
        0.005
    """
    steps = flatten(event, NeighboringRelation(neighboring_relation))
    return math.inf if steps.non_private else math.fsum(count * step_rho(base) for base, count in steps.counts)


def step_rho(event: Event) -> float:
    """ρ of one step without sampling."""
    match event:
        case Gaussian():
            return 1 / (2 * event.noise_multiplier**2)
        case DiscreteGaussian():
            # Canonne, Kamath and Steinke 2020, theorem 4.
            return event.sensitivity**2 / (2 * event.stddev**2)
        case ZeroConcentratedDP():
            return event.rho
        case BoundedRange():
            return event.epsilon**2 / 8
        case PureDP() | RandomizedResponse():
            return event.epsilon**2 / 2
        case Laplace():
            return 1 / (2 * event.noise_multiplier**2)
        case DiscreteLaplace():
            return (event.sensitivity / event.scale) ** 2 / 2
        case _:
            raise UnsupportedEvent(f"event must have a zCDP parameter, got {event.kind}. Use the contour accountant.")


def rho_to_epsilon(rho: float, delta: float) -> float:
    """The ε of a ρ-zCDP mechanism at δ, best order (Canonne, Kamath and Steinke 2020, proposition 12).

    Example:
        >>> round(rho_to_epsilon(0.5, 1e-5), 9)
        4.728386985
    """
    return gaussian_conversion(rho, delta)


def max_rho(epsilon: float, delta: float) -> float:
    """The largest ρ with `rho_to_epsilon` ≤ ε, rounded down.

    Example:
        >>> round(max_rho(1.0, 1e-5), 12)
        0.030556595198
    """
    high = 1.0
    while rho_to_epsilon(high, delta) <= epsilon:
        high *= 2
    low, _ = bracket_crossing(lambda rho: rho_to_epsilon(rho, delta) <= epsilon, 0.0, high, 1e-15)
    return low


@dataclass(frozen=True)
class ZCDPAccountant:
    """zCDP: sums of ρ.

    Guarantee:
        `upper` is an upper bound; `lower` is 0.
    """

    name: str = "zcdp"
    automatic: bool = True

    def supports(self, event: Event, neighboring_relation: NeighboringRelation) -> bool:
        """Steps without sampling that have a ρ."""
        try:
            return math.isfinite(zcdp_rho(event, neighboring_relation))
        except UnsupportedEvent:
            return False

    def epsilon(self, event: Event, delta: float, neighboring_relation: NeighboringRelation) -> Interval:
        """The tight conversion of the sum."""
        return Interval(
            lower=0.0, upper=rho_to_epsilon(zcdp_rho(event, neighboring_relation), delta), accountant=self.name
        )

    def delta(self, event: Event, epsilon: float, neighboring_relation: NeighboringRelation) -> Interval:
        """The δ at which the conversion gives ε."""
        rho = zcdp_rho(event, neighboring_relation)
        low, high = bracket_crossing(lambda x: rho_to_epsilon(rho, math.exp(x)) > epsilon, -745.0, 0.0, 1e-14)
        upper = math.exp(high) if rho_to_epsilon(rho, math.exp(low)) > epsilon else math.exp(low)
        return Interval(lower=0.0, upper=min(1.0, upper), accountant=self.name)


# ----------------------------------------------------------------------------------------------------------------------
# Gaussian differential privacy, where it is exact.
#
# μ-GDP is the privacy curve of one Gaussian with sensitivity/std = μ; composition is √(Σ μ²) (Dong, Roth and Su 2022,
# corollary 3.3).
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GDPAccountant:
    """μ-GDP of Gaussians without sampling, where it is exact.

    Guarantee:
        The interval is the exact curve with its rounding error.
    """

    name: str = "gdp"
    automatic: bool = False

    def supports(self, event: Event, neighboring_relation: NeighboringRelation) -> bool:
        """Gaussians without sampling, in any number."""
        try:
            steps = flatten(event, neighboring_relation)
        except UnsupportedEvent:
            return False
        return len(steps.counts) == 1 and isinstance(steps.counts[0][0], Gaussian)

    def _mu(self, event: Event, neighboring_relation: NeighboringRelation) -> float:
        base = flatten(event, neighboring_relation).counts[0][0]
        assert isinstance(base, Gaussian)
        return 1 / base.noise_multiplier

    def epsilon(self, event: Event, delta: float, neighboring_relation: NeighboringRelation) -> Interval:
        """The Gaussian curve inverted."""
        lower, upper = gaussian_epsilon(delta, self._mu(event, neighboring_relation))
        return Interval(lower=lower, upper=upper, accountant=self.name)

    def delta(self, event: Event, epsilon: float, neighboring_relation: NeighboringRelation) -> Interval:
        """The Gaussian curve."""
        lower, upper = gaussian_delta(epsilon, self._mu(event, neighboring_relation))
        return Interval(lower=lower, upper=upper, accountant=self.name)


def max_mu(epsilon: float, delta: float) -> float:
    """The largest μ whose Gaussian curve is (ε, δ)-private, rounded down.

    Example:
        >>> round(max_mu(1.0, 1e-5), 6)
        0.268051
    """
    high = 1.0
    while gaussian_delta(epsilon, high)[1] <= delta:
        high *= 2
    low, _ = bracket_crossing(lambda mu: gaussian_delta(epsilon, mu)[1] <= delta, 0.0, high, 1e-15)
    return low
