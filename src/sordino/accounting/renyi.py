"""Rényi accounting with the order chosen adaptively and the tight conversion (floor 1).

The Rényi divergence of order α = λ + 1 of P from Q is K(λ)/λ with K the log moment generating function of the
loss, so orders are real numbers and composition is addition. The conversion is Chernoff's bound for the exact
functional (1 − e^{ε−L})₊ ≤ e^{λ(L−ε)} λ^λ/(λ+1)^{λ+1} (Canonne, Kamath and Steinke 2020, proposition 12; Balle et
al. 2020, theorem 21 in another form):

    ε = (K(λ) − log δ + λ log λ − (λ+1) log(λ+1)) / λ.

Every order gives a valid bound; the best one solves λK'(λ) − K(λ) + log δ + log(λ+1) = 0, whose left side grows.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sordino.accounting.accountant import double_precision
from sordino.accounting.composition import flatten
from sordino.accounting.interval import Interval
from sordino.accounting.renyi_steps import renyi_directions
from sordino.accounting.saddle import Step, saddle, thinned
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


def _walk(slope: Callable[[float], float], start: float) -> None:
    """Visits λ towards the zero of a growing `slope`, starting near `start`; an unreachable λ counts as too large."""
    low, high = math.log(_SMALLEST), math.log(_LARGEST)
    position = min(high, max(low, math.log(start)))
    stride = 0.7
    below = above = False
    for _ in range(60):
        try:
            value = slope(math.exp(position))
        except AccountingError:
            value = math.inf
        if abs(value) < 1e-7 or high - low < 1e-9:
            return
        if value < 0:
            low, below = position, True
        else:
            high, above = position, True
        if below and above:
            position = (low + high) / 2
        else:
            position = min(high, max(low, position - math.copysign(stride, value)))
            stride *= 1.6


def _start(steps: Sequence[Step], log_delta: float) -> float:
    variance = 2 * max(saddle(thinned(steps), 1e-3).mean, 1e-300)
    return math.sqrt(max(1.0, -2 * log_delta) / variance)


def _best_order(
    steps: Sequence[Step], start: float, value: Callable[[float, float], float], slope: Callable[..., float]
) -> float:
    """The λ with the smallest value(λ, K) among those visited, steered without certificate on a thinned schedule."""
    few = thinned(steps)
    best = math.inf, start

    def visit(lam: float) -> float:
        nonlocal best
        here = saddle(few, lam)
        best = min(best, (value(lam, here.log_mgf), lam))
        return slope(lam, here.log_mgf, here.mean)

    _walk(visit, start)
    return best[1]


def _epsilon(steps: Sequence[Step], delta: float) -> float:
    """The conversion at the best order."""
    log_delta = math.log(delta)

    def value(lam: float, log_mgf: float) -> float:
        return (log_mgf - log_delta + _constant(lam)) / lam

    def slope(lam: float, log_mgf: float, mean: float) -> float:
        return (lam * mean - log_mgf + log_delta + math.log1p(lam)) / (1 + abs(log_delta))

    lam = _best_order(steps, _start(steps, log_delta), value, slope)
    return max(0.0, value(lam, _moments(steps, lam)[0]) * (1 + 1e-14))


def _delta(steps: Sequence[Step], epsilon: float) -> float:
    """The Chernoff bound at the best order; its exponent is convex in λ."""

    def value(lam: float, log_mgf: float) -> float:
        return log_mgf - lam * epsilon + _constant(lam)

    def slope(lam: float, log_mgf: float, mean: float) -> float:  # noqa: ARG001
        return (mean - epsilon - math.log1p(1 / lam)) / (1 + epsilon)

    lam = _best_order(steps, _start(steps, -10.0), value, slope)
    return min(1.0, math.exp(min(0.0, value(lam, _moments(steps, lam)[0]))) * (1 + 1e-12) + 5e-324)


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
            return bool(renyi_directions(flatten(event, relation), relation))
        except UnsupportedEvent:
            return False

    def epsilon(self, event: Event, delta: float, relation: NeighboringRelation) -> Interval:
        """The best conversion over all orders, worse direction."""
        upper = max(_epsilon(steps, delta) for steps in renyi_directions(flatten(event, relation), relation))
        return Interval(lower=0.0, upper=upper, accountant=self.name)

    def delta(self, event: Event, epsilon: float, relation: NeighboringRelation) -> Interval:
        """The best Chernoff bound over all orders, worse direction."""
        upper = max(_delta(steps, epsilon) for steps in renyi_directions(flatten(event, relation), relation))
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
    relation = NeighboringRelation(relation)
    flat = flatten(event, relation)
    if flat.unprotected:
        return math.inf
    if flat.empty:
        return 0.0
    with double_precision("the divergence"):
        found = max(_moments(steps, order - 1)[0] / (order - 1) for steps in renyi_directions(flat, relation))
        return math.inf if math.isnan(found) else found


def gaussian_conversion(rho: float, delta: float) -> float:
    """The best conversion of D_α ≤ ρα for all α (zCDP) to ε at δ."""
    if rho == 0 or delta >= 1:
        return 0.0
    if delta == 0 or math.isinf(rho):
        return math.inf
    log_delta = math.log(delta)

    def value(lam: float) -> float:
        return rho * (lam + 1) + (_constant(lam) - log_delta) / lam

    low, high = math.log(1e-9), math.log(1e12)
    # λK' − K + log δ + log(λ+1) = λ²ρ + log δ + log(λ+1) grows with λ.
    for _ in range(200):
        middle = (low + high) / 2
        lam = math.exp(middle)
        low, high = (middle, high) if lam * lam * rho + log_delta + math.log1p(lam) < 0 else (low, middle)
    return max(0.0, min(value(math.exp(low)), value(math.exp(high))) * (1 + 1e-14))
