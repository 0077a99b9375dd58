"""How much Gaussian noise a budget (ε, δ) needs: the exact calibration and the classical bound.

References:
    Balle, Wang 2018, "Improving the Gaussian mechanism for differential privacy", theorem 8.
    Dwork, Roth 2014, appendix A, theorem A.1 (classical).
"""

import math
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from scipy.special import erfcx, log_ndtr, ndtr

from sordino import checks
from sordino.errors import InvalidArgument
from sordino.events import Event, Gaussian, PureDP

# The closed form is evaluated with a relative error below 1e-11 for δ ≥ 1e-300; the calibration stays that far inside.
_MARGIN = 1e-9

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(10)


def gaussian_mechanism_delta(*, noise_multiplier: float, epsilon: float) -> float:
    """The smallest δ for which Gaussian noise of this multiplier is (ε, δ)-private.

    δ = Φ(μ/2 − ε/μ) − e^ε·Φ(−μ/2 − ε/μ) with μ = 1/noise_multiplier.

    Example:
        >>> round(gaussian_mechanism_delta(noise_multiplier=3.730632, epsilon=1.0), 10)
        1e-05
    """
    mu = 1.0 / checks.positive(noise_multiplier=noise_multiplier)
    checks.non_negative(epsilon=epsilon)
    near, far = epsilon / mu - mu / 2, epsilon / mu + mu / 2
    if near > -5:
        # Both terms share the factor φ(near): e^ε·φ(far) = φ(near). What is left is a difference of scaled tails.
        return 0.5 * math.exp(-near * near / 2) * _scaled_tail_gap(near / math.sqrt(2), mu / math.sqrt(2))
    return float(ndtr(-near)) - math.exp(epsilon + float(log_ndtr(-far)))


def _scaled_tail_gap(low: float, width: float) -> float:
    """erfcx(low) − erfcx(low + width), also for a small width.

    Then it is integrated: the slope of erfcx is 2x·erfcx(x) − 2/√π, smooth enough for ten Gauss–Legendre points.
    """
    if width > 0.5:
        return float(erfcx(low) - erfcx(low + width))
    points = low + width * (_NODES + 1) / 2
    slopes = 2 / math.sqrt(math.pi) - 2 * points * erfcx(points)
    return float(width / 2 * (_WEIGHTS * slopes).sum())


def analytic_noise_multiplier(*, epsilon: float, delta: float) -> float:
    """The least noise multiplier (standard deviation over ℓ2 sensitivity) that is (ε, δ)-private, for every ε > 0.

    The result is on the safe side: its δ is at most the asked one.

    Example:
        >>> round(analytic_noise_multiplier(epsilon=1.0, delta=1e-5), 6)
        3.730632
    """
    checks.positive(epsilon=epsilon)
    checks.probability(delta=delta, zero=False, one=False, hint="Gaussian noise needs some δ > 0.")

    def needs_more(multiplier: float) -> bool:
        return gaussian_mechanism_delta(noise_multiplier=multiplier, epsilon=epsilon) > delta

    low = high = 1.0
    while needs_more(high):
        low, high = high, 2 * high
    while low == high or not needs_more(low):
        low, high = low / 2, low
    # Bisection of the logarithm down to neighboring floats; `high` always has δ at most the asked one.
    multiplier = high
    while (middle := math.sqrt(low) * math.sqrt(high)) not in (low, high) and high / low - 1 > 1e-14:
        low, high = (middle, high) if needs_more(middle) else (low, middle)
        multiplier = high
    while gaussian_mechanism_delta(noise_multiplier=multiplier, epsilon=epsilon) > delta * (1 - _MARGIN):
        multiplier *= 1 + _MARGIN / 4
    return multiplier


def classical_noise_multiplier(*, epsilon: float, delta: float) -> float:
    """√(2·ln(1.25/δ))/ε, proved for ε < 1 only; for larger ε it is refused because its δ would be false.

    Kept for comparison with older work: the analytic calibration needs less noise everywhere.

    Raises:
        InvalidArgument: for ε ≥ 1.
    """
    checks.positive(epsilon=epsilon)
    checks.probability(delta=delta, zero=False, one=False)
    if epsilon >= 1:
        raise InvalidArgument(
            f"epsilon must be < 1 for the classical calibration, got {epsilon!r}. Use the analytic calibration."
        )
    return math.sqrt(2 * math.log(1.25 / delta)) / epsilon


# ----------------------------------------------------------------------------------------------------------------------
# What a statistic may spend, and how it is shared among the releases it is made of.
#
# A pure budget is ε; a Gaussian budget is the noise multiplier z of one Gaussian release. Shares add up to the whole: ε
# = Σ εᵢ, and 1/z² = Σ 1/zᵢ², because Gaussian releases compose to one Gaussian with exactly that multiplier.
#
# References:
#     Dong, Roth, Su 2022, "Gaussian differential privacy", corollary 3.3 (composition of Gaussians).
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PureBudget:
    """ε-differential privacy with δ = 0.

    Example:
        >>> [share.epsilon for share in PureBudget(epsilon=1.0).split(3, 1)]
        [0.75, 0.25]
    """

    epsilon: float

    def __post_init__(self) -> None:
        checks.positive(epsilon=self.epsilon)

    def split(self, *weights: float) -> tuple["PureBudget", ...]:
        """Shares in proportion to the weights; their ε sum to this one's, never above it."""
        return tuple(PureBudget(epsilon=self.epsilon * share) for share in _shares(weights))

    def event(self) -> Event:
        """The whole budget as one event."""
        return PureDP(epsilon=self.epsilon)


@dataclass(frozen=True, kw_only=True)
class GaussianBudget:
    """One Gaussian release of this noise multiplier (μ-GDP with μ = 1/noise_multiplier).

    Example:
        >>> [round(share.noise_multiplier, 3) for share in GaussianBudget(noise_multiplier=1.0).split(1, 1)]
        [1.414, 1.414]
    """

    noise_multiplier: float

    def __post_init__(self) -> None:
        checks.positive(noise_multiplier=self.noise_multiplier)

    def split(self, *weights: float) -> tuple["GaussianBudget", ...]:
        """Shares whose 1/z² are in proportion to the weights and sum to this one's."""
        return tuple(
            GaussianBudget(noise_multiplier=self.noise_multiplier / math.sqrt(share)) for share in _shares(weights)
        )

    def event(self) -> Event:
        """The whole budget as one event."""
        return Gaussian(noise_multiplier=self.noise_multiplier)


Budget: TypeAlias = PureBudget | GaussianBudget


def _shares(weights: tuple[float, ...]) -> list[float]:
    if not weights:
        raise InvalidArgument("weights must be at least one number, got none. Say how to share the budget.")
    checked = [checks.positive(weight=weight) for weight in weights]
    total = math.fsum(checked)
    shares = [weight / total for weight in checked]
    # Rounding may leave a sum a few units in the last place above 1; the scaling keeps it at or below.
    return [share * (1 - 4e-16) for share in shares] if math.fsum(shares) > 1 else shares


def make_budget(*, epsilon: float, delta: float = 0.0) -> Budget:
    """The budget for (ε, δ): pure for δ = 0, otherwise Gaussian by the analytic calibration.

    Example:
        >>> make_budget(epsilon=1.0)
        PureBudget(epsilon=1.0)
        >>> round(make_budget(epsilon=1.0, delta=1e-5).noise_multiplier, 4)
        3.7306
    """
    checks.probability(delta=delta, one=False)
    if delta == 0:
        return PureBudget(epsilon=epsilon)
    return GaussianBudget(noise_multiplier=analytic_noise_multiplier(epsilon=epsilon, delta=delta))
