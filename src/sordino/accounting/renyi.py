"""Rényi accounting with the order chosen adaptively and the tight conversion (floor 1).

The Rényi divergence of order α = λ + 1 of P from Q is K(λ)/λ with K the log moment generating function of the
loss, so orders are real numbers and composition is addition. The conversion is Chernoff's bound for the exact
functional (1 − e^{ε−L})₊ ≤ e^{λ(L−ε)} λ^λ/(λ+1)^{λ+1} (Canonne, Kamath and Steinke 2020, proposition 12; Balle et
al. 2020, theorem 21 in another form):

    ε = (K(λ) − log δ + λ log λ − (λ+1) log(λ+1)) / λ.

Every order gives a valid bound; the best one solves λK'(λ) − K(λ) + log δ + log(λ+1) = 0, whose left side grows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sordino.accounting.composition import flatten
from sordino.accounting.directions import directions
from sordino.accounting.interval import Interval
from sordino.accounting.saddle import Step
from sordino.definitions import NeighboringRelation
from sordino.errors import AccountingError, UnsupportedEvent
from sordino.events import Event

__all__ = ["Renyi", "renyi_divergence"]

_SMALLEST, _LARGEST = 1e-4, 1e12


def _moments(steps: Sequence[Step], lam: float) -> tuple[float, float]:
    """Upper bound on K(λ), and K'(λ)."""
    moments = [(step.count, step.transform.moments(lam)) for step in steps]
    log_mgf = math.fsum(count * (m.log_mgf + m.error) for count, m in moments)
    return log_mgf, math.fsum(count * m.mean for count, m in moments)


def _constant(lam: float) -> float:
    """Log of max_l (1 − e^{−l}) e^{−λl}: λ log λ − (λ+1) log(λ+1)."""
    return -lam * math.log1p(1 / lam) - math.log1p(lam)


def _order_for_delta(steps: Sequence[Step], log_delta: float) -> tuple[float, float]:
    """Smallest conversion found and its λ."""
    low, high = math.log(_SMALLEST), math.log(_LARGEST)
    variance = 2 * max(_moments(steps, 1e-3)[1], 1e-300)
    position = min(high, max(low, math.log(max(1.0, -2 * log_delta)) / 2 - math.log(variance) / 2))
    best = math.inf, 0.0
    for _ in range(60):
        lam = math.exp(position)
        try:
            log_mgf, mean = _moments(steps, lam)
        except AccountingError:
            high = position  # the order is out of the quadrature's reach: look lower
            position = (low + high) / 2
            continue
        best = min(best, ((log_mgf - log_delta + _constant(lam)) / lam, lam))
        slope = lam * mean - log_mgf + log_delta + math.log1p(lam)
        low, high = (position, high) if slope < 0 else (low, position)
        if abs(slope) < 1e-7 * (1 + abs(log_delta)) or high - low < 1e-9:
            break
        position = (low + high) / 2 if high - low < 6 else position + math.copysign(1.0, -slope)
        position = min(max(position, low), high)
    return best


def _epsilon(steps: Sequence[Step], delta: float) -> float:
    epsilon, _ = _order_for_delta(steps, math.log(delta))
    return max(0.0, epsilon * (1 + 1e-14))


def _delta(steps: Sequence[Step], epsilon: float) -> float:
    """Min over λ of the Chernoff bound, by golden section on log λ (the exponent is convex in λ)."""

    def exponent(position: float) -> float:
        lam = math.exp(position)
        try:
            return _moments(steps, lam)[0] - lam * epsilon + _constant(lam)
        except AccountingError:
            return math.inf

    low, high = math.log(_SMALLEST), math.log(_LARGEST)
    ratio = (math.sqrt(5) - 1) / 2
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    at_left, at_right = exponent(left), exponent(right)
    for _ in range(70):
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - ratio * (high - low)
            at_left = exponent(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + ratio * (high - low)
            at_right = exponent(right)
    best = min(at_left, at_right, 0.0)
    return min(1.0, math.exp(best) * (1 + 1e-12) + 5e-324)


@dataclass(frozen=True)
class Renyi:
    """Rényi differential privacy of all real orders, then the tight conversion.

    Guarantee:
        `upper` is an upper bound on ε (δ); `lower` is 0, because the conversion proves nothing from below.
    """

    name: str = "rdp"
    automatic: bool = True

    def supports(self, event: Event, relation: NeighboringRelation) -> bool:
        """Every event whose loss has a moment generating function here."""
        try:
            return bool(directions(flatten(event, relation), relation))
        except UnsupportedEvent:
            return False

    def epsilon(self, event: Event, delta: float, relation: NeighboringRelation) -> Interval:
        """The best conversion over all orders, worse direction."""
        upper = max(_epsilon(steps, delta) for steps in directions(flatten(event, relation), relation))
        return Interval(lower=0.0, upper=upper, accountant=self.name)

    def delta(self, event: Event, epsilon: float, relation: NeighboringRelation) -> Interval:
        """The best Chernoff bound over all orders, worse direction."""
        upper = max(_delta(steps, epsilon) for steps in directions(flatten(event, relation), relation))
        return Interval(lower=0.0, upper=upper, accountant=self.name)


def renyi_divergence(
    event: Event, order: float, *, relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE
) -> float:
    """Upper bound on the Rényi divergence of the given order > 1, worse direction.

    Example:
        >>> from sordino.events import Gaussian
        >>> round(renyi_divergence(Gaussian(noise_multiplier=2.0), 4.0), 12)
        0.5
    """
    from sordino import checks

    order = checks.positive(order=order)
    if order <= 1:
        from sordino.errors import InvalidArgument

        raise InvalidArgument(f"order must be > 1, got {order!r}. Order 1 is the Kullback–Leibler divergence.")
    flat = flatten(event, relation)
    if flat.unprotected:
        return math.inf
    if flat.empty:
        return 0.0
    return max(_moments(steps, order - 1)[0] / (order - 1) for steps in directions(flat, relation))
