"""What a statistic may spend, and how it is shared among the releases it is made of (floor 1).

A pure budget is ε; a Gaussian budget is the noise multiplier z of one Gaussian release. Shares add up to the whole:
ε = Σ εᵢ, and 1/z² = Σ 1/zᵢ², because Gaussian releases compose to one Gaussian with exactly that multiplier.

References:
    Dong, Roth, Su 2022, "Gaussian differential privacy", corollary 3.3 (composition of Gaussians).
"""

import math
from dataclasses import dataclass
from typing import TypeAlias

from sordino import checks
from sordino.errors import InvalidArgument
from sordino.events import Event, Gaussian, PureDP
from sordino.mechanisms.analytic_gaussian import analytic_noise_multiplier

__all__ = ["Budget", "GaussianBudget", "PureBudget", "budget"]


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


def budget(*, epsilon: float, delta: float = 0.0) -> Budget:
    """The budget that (ε, δ) buys: pure for δ = 0, otherwise Gaussian by the analytic calibration.

    Example:
        >>> budget(epsilon=1.0)
        PureBudget(epsilon=1.0)
        >>> round(budget(epsilon=1.0, delta=1e-5).noise_multiplier, 4)
        3.7306
    """
    checks.probability(delta=delta, one=False)
    if delta == 0:
        return PureBudget(epsilon=epsilon)
    return GaussianBudget(noise_multiplier=analytic_noise_multiplier(epsilon=epsilon, delta=delta))
