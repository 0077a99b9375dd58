"""Concentrated differential privacy: zCDP with the tight conversion, tCDP as published.

ρ-zCDP   D_α ≤ ρα for all α > 1 (Bun and Steinke 2016); composition adds ρ.
(ρ, ω)-tCDP   the same for 1 < α < ω only (Bun, Dwork, Rothblum and Steinke 2018); composition adds ρ and takes the
smallest ω. A sample of rate q turns (ρ, ·) into (13 q²ρ, log(1/q)/(4ρ)), if ρ and q are ≤ 0.1 and
log(1/q) ≥ 3ρ(2 + log₂(1/ρ)). Loose by a factor of about five in ε at typical settings: a definition, not
a way to account.
"""

import math
from dataclasses import dataclass

from sordino import checks
from sordino.accounting.base import Interval, flatten
from sordino.accounting.closed_form import bracket_crossing, gaussian_delta, gaussian_epsilon, invert_privacy_profile
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
    PoissonSampled,
    PureDP,
    RandomizedResponse,
    ZeroConcentratedDP,
)

__all__ = [
    "GDPAccountant",
    "HeuristicEstimate",
    "TCDPAccountant",
    "ZCDPAccountant",
    "central_limit_epsilon",
    "max_mu",
    "max_rho",
    "rho_to_epsilon",
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
    return math.inf if steps.non_private else math.fsum(count * _rho(base) for base, count in steps.counts)


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


@dataclass(frozen=True)
class TCDPAccountant:
    """tCDP with its subsampling theorem, under the theorem's conditions only.

    Guarantee:
        `upper` is an upper bound; `lower` is 0.
    """

    name: str = "tcdp"
    automatic: bool = False

    def supports(self, event: Event, neighboring_relation: NeighboringRelation) -> bool:
        """Gaussians without sampling, and Poisson samples within the conditions."""
        try:
            self._parameters(event, neighboring_relation)
        except UnsupportedEvent:
            return False
        return True

    @staticmethod
    def _parameters(event: Event, neighboring_relation: NeighboringRelation) -> tuple[float, float]:
        rho, omega = 0.0, math.inf
        for base, count in flatten(event, neighboring_relation).counts:
            if not isinstance(base, PoissonSampled):
                rho += count * _rho(base)
                continue
            if not isinstance(base.event, Gaussian) or neighboring_relation is NeighboringRelation.REPLACE_ONE:
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

    def epsilon(self, event: Event, delta: float, neighboring_relation: NeighboringRelation) -> Interval:
        """ρ + 2√(ρ log 1/δ), or the linear branch when the order would exceed ω (Bun et al. 2018, lemma 6)."""
        rho, omega = self._parameters(event, neighboring_relation)
        return Interval(lower=0.0, upper=_tcdp_epsilon(rho, omega, delta), accountant=self.name)

    def delta(self, event: Event, epsilon: float, neighboring_relation: NeighboringRelation) -> Interval:
        """The δ at which the formula gives ε."""
        rho, omega = self._parameters(event, neighboring_relation)

        def curve(exponent: float) -> tuple[float, float]:
            value = _tcdp_epsilon(rho, omega, math.exp(-exponent))
            return -value, -value

        _, upper = (
            invert_privacy_profile(curve, -epsilon, tolerance=1e-12)
            if _tcdp_epsilon(rho, omega, 1.0) < epsilon
            else (0.0, 0.0)
        )
        # The formula grows with log 1/δ: step back below the crossing found from above.
        return Interval(lower=0.0, upper=min(1.0, math.exp(-upper * (1 - 1e-9))), accountant=self.name)


def _tcdp_epsilon(rho: float, omega: float, delta: float) -> float:
    inverse = -math.log(delta)
    if inverse <= (omega - 1) ** 2 * rho:
        return rho + 2 * math.sqrt(rho * inverse)
    return rho * omega + inverse / (omega - 1)


# ----------------------------------------------------------------------------------------------------------------------
# Gaussian differential privacy: exact where exact, the central limit approximation as no guarantee.
#
# μ-GDP is the privacy curve of one Gaussian with sensitivity/std = μ; composition is √(Σ μ²) (Dong, Roth and Su 2022,
# corollary 3.3). For Poisson-sampled Gaussians the limit μ = q√(T(e^{1/σ²} − 1)) (Bu et al. 2020) is *not* an upper
# bound: at q = 0.01, σ = 4, T = 10000, δ = 1e-5 it gives 0.9424 where the truth is 0.9469.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class HeuristicEstimate:
    """A number that guarantees nothing: it may lie below the true ε. Deliberately not an `Interval`."""

    value: float
    method: str
    warning: str


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


def central_limit_epsilon(event: Event, delta: float) -> HeuristicEstimate:
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
    return HeuristicEstimate(
        value=gaussian_epsilon(delta, math.sqrt(square))[1],
        method="Gaussian DP, central limit theorem (Bu et al. 2020)",
        warning="no guarantee: the true ε may be larger",
    )


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
