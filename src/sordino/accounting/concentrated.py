"""Concentrated differential privacy (floor 1): zCDP with the tight conversion, tCDP as published.

ρ-zCDP   D_α ≤ ρα for all α > 1 (Bun and Steinke 2016); composition adds ρ.
(ρ, ω)-tCDP   the same for 1 < α < ω only (Bun, Dwork, Rothblum and Steinke 2018); composition adds ρ and takes the
smallest ω. A sample of rate q turns (ρ, ·) into (13 q²ρ, log(1/q)/(4ρ)), if ρ and q are ≤ 0.1 and
log(1/q) ≥ 3ρ(2 + log₂(1/ρ)). Loose by a factor of about five in ε at typical settings: a definition, not
a way to account.
"""

import math
from dataclasses import dataclass

from sordino.accounting.composition import flatten
from sordino.accounting.interval import Interval
from sordino.accounting.inversion import invert, safe_crossing
from sordino.accounting.renyi import gaussian_conversion
from sordino.definitions import NeighboringRelation
from sordino.errors import UnsupportedEvent
from sordino.events import (
    BoundedRange,
    DiscreteGaussian,
    DiscreteLaplace,
    Event,
    Gaussian,
    Laplace,
    PoissonSampled,
    PureDP,
    RandomizedResponse,
    ZeroConcentratedDP,
)

__all__ = ["TruncatedConcentrated", "ZeroConcentrated", "concentrated_rho", "largest_rho", "rho_epsilon"]


def concentrated_rho(event: Event, relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE) -> float:
    """Σ ρ of an event whose steps are all zCDP without sampling.

    Raises:
        UnsupportedEvent: a step has no zCDP parameter.

    Example:
        >>> concentrated_rho(Gaussian(noise_multiplier=10.0))
        0.005
    """
    steps = flatten(event, NeighboringRelation(relation))
    return math.inf if steps.unprotected else math.fsum(count * _rho(base) for base, count in steps.counts)


def _rho(event: Event) -> float:
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


def rho_epsilon(rho: float, delta: float) -> float:
    """The ε of a ρ-zCDP mechanism at δ, best order (Canonne, Kamath and Steinke 2020, proposition 12).

    Example:
        >>> round(rho_epsilon(0.5, 1e-5), 9)
        4.728386985
    """
    return gaussian_conversion(rho, delta)


def largest_rho(epsilon: float, delta: float) -> float:
    """The largest ρ with `rho_epsilon` ≤ ε, rounded down.

    Example:
        >>> round(largest_rho(1.0, 1e-5), 12)
        0.030556595198
    """
    high = 1.0
    while rho_epsilon(high, delta) <= epsilon:
        high *= 2
    low, _ = safe_crossing(lambda rho: rho_epsilon(rho, delta) <= epsilon, 0.0, high, 1e-15)
    return low


@dataclass(frozen=True)
class ZeroConcentrated:
    """zCDP: sums of ρ.

    Guarantee:
        `upper` is an upper bound; `lower` is 0.
    """

    name: str = "zcdp"
    automatic: bool = True

    def supports(self, event: Event, relation: NeighboringRelation) -> bool:
        """Steps without sampling that have a ρ."""
        try:
            return math.isfinite(concentrated_rho(event, relation))
        except UnsupportedEvent:
            return False

    def epsilon(self, event: Event, delta: float, relation: NeighboringRelation) -> Interval:
        """The tight conversion of the sum."""
        return Interval(lower=0.0, upper=rho_epsilon(concentrated_rho(event, relation), delta), accountant=self.name)

    def delta(self, event: Event, epsilon: float, relation: NeighboringRelation) -> Interval:
        """The δ at which the conversion gives ε."""
        rho = concentrated_rho(event, relation)
        low, high = safe_crossing(lambda x: rho_epsilon(rho, math.exp(x)) > epsilon, -745.0, 0.0, 1e-14)
        upper = math.exp(high) if rho_epsilon(rho, math.exp(low)) > epsilon else math.exp(low)
        return Interval(lower=0.0, upper=min(1.0, upper), accountant=self.name)


@dataclass(frozen=True)
class TruncatedConcentrated:
    """tCDP with its subsampling theorem, under the theorem's conditions only.

    Guarantee:
        `upper` is an upper bound; `lower` is 0.
    """

    name: str = "tcdp"
    automatic: bool = False

    def supports(self, event: Event, relation: NeighboringRelation) -> bool:
        """Gaussians without sampling, and Poisson samples within the conditions."""
        try:
            self._parameters(event, relation)
        except UnsupportedEvent:
            return False
        return True

    @staticmethod
    def _parameters(event: Event, relation: NeighboringRelation) -> tuple[float, float]:
        rho, omega = 0.0, math.inf
        for base, count in flatten(event, relation).counts:
            if not isinstance(base, PoissonSampled):
                rho += count * _rho(base)
                continue
            if not isinstance(base.event, Gaussian) or relation is NeighboringRelation.REPLACE_ONE:
                raise UnsupportedEvent("tCDP's subsampling must be of Gaussians under add or remove. Use contour.")
            inner, rate = _rho(base.event), base.sample_rate
            gain = math.log(1 / rate)
            if inner > 0.1 or rate > 0.1 or gain < 3 * inner * (2 + math.log2(1 / inner)):
                raise UnsupportedEvent(
                    f"rho and sample_rate must be ≤ 0.1 with log(1/q) ≥ 3ρ(2 + log₂(1/ρ)), got {inner:.3g} and "
                    f"{rate:.3g}. Use the contour accountant."
                )
            rho += count * 13 * rate**2 * inner
            omega = min(omega, gain / (4 * inner))
        return rho, omega

    def epsilon(self, event: Event, delta: float, relation: NeighboringRelation) -> Interval:
        """ρ + 2√(ρ log 1/δ), or the linear branch when the order would exceed ω (Bun et al. 2018, lemma 6)."""
        rho, omega = self._parameters(event, relation)
        return Interval(lower=0.0, upper=_tcdp_epsilon(rho, omega, delta), accountant=self.name)

    def delta(self, event: Event, epsilon: float, relation: NeighboringRelation) -> Interval:
        """The δ at which the formula gives ε."""
        rho, omega = self._parameters(event, relation)

        def curve(exponent: float) -> tuple[float, float]:
            value = _tcdp_epsilon(rho, omega, math.exp(-exponent))
            return -value, -value

        _, upper = invert(curve, -epsilon, tolerance=1e-12) if _tcdp_epsilon(rho, omega, 1.0) < epsilon else (0.0, 0.0)
        # The formula grows with log 1/δ: step back below the crossing found from above.
        return Interval(lower=0.0, upper=min(1.0, math.exp(-upper * (1 - 1e-9))), accountant=self.name)


def _tcdp_epsilon(rho: float, omega: float, delta: float) -> float:
    inverse = -math.log(delta)
    if inverse <= (omega - 1) ** 2 * rho:
        return rho + 2 * math.sqrt(rho * inverse)
    return rho * omega + inverse / (omega - 1)
