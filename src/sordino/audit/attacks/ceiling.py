"""What no membership attack can exceed (floor 4): the ceiling that a mechanism sets, or ε and δ alone."""

import math
from dataclasses import dataclass

import numpy as np

from sordino import accounting, checks
from sordino.definitions import Guarantee, NeighboringRelation
from sordino.errors import AccountingError, UnsupportedEvent
from sordino.events import Event

__all__ = ["Ceiling", "ceiling", "ceiling_of_claim", "ceiling_of_epsilon"]

_FLAT = 600
_LOGARITHMIC = 60


@dataclass(frozen=True, kw_only=True)
class Ceiling:
    """Upper bounds on every membership attack on the release, whatever it knows and however it was found.

    Per record TPR ≤ T(FPR) with a concave T, so the bounds hold as well for rates averaged over records.

    Args:
        curve: (FPR, largest TPR), rising.
        advantage: largest TPR − FPR.
        auc: largest area under a ROC curve.
        accuracy: largest share of right guesses when half of the records are members.
        source: what it was computed from.
    """

    curve: tuple[tuple[float, float], ...]
    advantage: float
    auc: float
    source: str

    @property
    def accuracy(self) -> float:
        """(1 + advantage) / 2."""
        return (1 + self.advantage) / 2

    def true_positive_rate(self, false_positive_rate: float) -> float:
        """The bound at a false-positive rate: that of the next larger rate on the curve, so never too low."""
        rate = checks.probability(false_positive_rate=false_positive_rate)
        return next((most for at, most in self.curve if at >= rate * (1 - 1e-12)), 1.0)


def ceiling(
    event: Event,
    *,
    relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE,
    false_positive_rates: tuple[float, ...] = (0.1, 0.01, 0.001),
) -> Ceiling:
    """The ceiling that a mechanism sets, from its whole trade-off curve.

    Args:
        event: what was done, a run's composed event for instance.
        relation: the neighbouring relation.
        false_positive_rates: at these the bound is computed exactly; up to eight.

    Raises:
        UnsupportedEvent: no accountant has a curve for the event; use `ceiling_of_epsilon`.

    Example:
        >>> from sordino.events import Gaussian
        >>> most = ceiling(Gaussian(noise_multiplier=1.0))
        >>> round(most.true_positive_rate(0.01), 4), round(most.advantage, 4)
        (0.0924, 0.3829)

    References:
        Dong, Roth and Su 2022, "Gaussian differential privacy", proposition 2.12.
    """
    relation, grid = NeighboringRelation(relation), _grid()
    exact = {rate: accounting.true_positive_rate(event, rate, relation=relation) for rate in false_positive_rates}
    missed = accounting.trade_off(event, grid, relation=relation)
    points = dict(zip(grid, (1 - share for share in missed), strict=True)) | exact
    return _made(points, accounting.advantage(event, relation=relation).upper, "the whole mechanism")


def ceiling_of_epsilon(
    *, epsilon: float, delta: float, false_positive_rates: tuple[float, ...] = (0.1, 0.01, 0.001)
) -> Ceiling:
    """The ceiling when only ε and δ are known: it is higher than the mechanism's own.

    Args:
        epsilon: ≥ 0, may be ∞.
        delta: in [0, 1].
        false_positive_rates: points that the curve must hold.

    Example:
        >>> [round(ceiling_of_epsilon(epsilon=e, delta=0.0).accuracy, 4) for e in (0.5, 1, 2, 4)]
        [0.6225, 0.7311, 0.8808, 0.982]

    References:
        Kairouz, Oh, Viswanath 2015, "The composition theorem for differential privacy", theorem 2.1.
    """
    checks.probability(delta=delta)
    if math.isinf(epsilon):
        return _made(dict.fromkeys([*_grid(), *false_positive_rates], 1.0), 1.0, "an infinite ε")
    checks.non_negative(epsilon=epsilon)
    growth, kept = math.exp(min(epsilon, 700.0)), math.exp(-epsilon)
    points = {x: min(1.0, growth * x + delta, 1 - kept * (1 - delta - x)) for x in (*_grid(), *false_positive_rates)}
    advantage = math.tanh(epsilon / 2) + 2 * delta / (1 + growth)
    return _made(points, min(1.0, advantage), "ε and δ alone")


def ceiling_of_claim(event: Event, claim: Guarantee | None, *, rates: tuple[float, ...]) -> Ceiling:
    """The mechanism's ceiling; that of the claimed ε and δ where no curve can be computed for the event."""
    if claim is None:
        return ceiling(event, false_positive_rates=rates)
    try:
        return ceiling(event, relation=claim.relation, false_positive_rates=rates)
    except (AccountingError, UnsupportedEvent):
        return ceiling_of_epsilon(epsilon=claim.epsilon, delta=claim.delta, false_positive_rates=rates)


def _grid() -> list[float]:
    return sorted({*np.geomspace(1e-5, 0.1, _LOGARITHMIC).tolist(), *np.linspace(0, 1, _FLAT + 1)[1:-1].tolist()})


def _made(points: dict[float, float], advantage: float, source: str) -> Ceiling:
    curve = sorted(points.items())
    rates, most = [0.0, *(rate for rate, _ in curve), 1.0], [*(value for _, value in curve), 1.0]
    # T rises, so each strip lies below its right edge: the area is bounded from above.
    area = sum((right - left) * top for left, right, top in zip(rates, rates[1:], most, strict=False))
    return Ceiling(curve=tuple(curve), advantage=advantage, auc=min(1.0, area), source=source)
