"""Where to put the contour: the saddle point, the period, and the cut-off (floor 1).

Nothing here is part of the certificate. A poor choice costs time or width, never soundness, so everything is
steered by K without its error, and by every k-th step of a long schedule standing for its neighbours.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sordino.accounting.transforms import Transform

__all__ = ["Saddle", "Step", "saddle", "saddle_for_delta", "saddle_for_epsilon", "settle", "thinned"]

_SMALLEST_LOG_DELTA = -740.0
_STEERING_STEPS = 48
_GUARDS = (1.0005, 1.002, 1.005, 1.01, 1.02, 1.04, 1.07, 1.12, 1.2, 1.35, 1.6, 2.2, 4.0)
_FIRST_GUARD = 8


@dataclass(frozen=True, kw_only=True)
class Step:
    """One transform, `count` times."""

    transform: Transform
    count: int


@dataclass(frozen=True, kw_only=True)
class Saddle:
    """Σ count · (K, K', K'') at λ, and the error of K."""

    lam: float
    log_mgf: float
    error: float
    mean: float
    variance: float

    @property
    def epsilon(self) -> float:
        """The ε whose saddle point is λ: K'(λ) − 1/λ − 1/(λ+1)."""
        return self.mean - 1 / self.lam - 1 / (self.lam + 1)

    @property
    def curvature(self) -> float:
        """Second derivative of the exponent, with that of −log s(s+1)."""
        return self.variance + 1 / self.lam**2 + 1 / (self.lam + 1) ** 2

    def exponent(self, epsilon: float) -> float:
        """Log of |integrand| at u = 0."""
        return self.log_mgf - self.lam * epsilon - math.log(self.lam) - math.log1p(self.lam)

    def log_delta(self, epsilon: float) -> float:
        """The saddle-point approximation of log δ(ε)."""
        return min(0.0, self.exponent(epsilon) - math.log(2 * math.pi * self.curvature) / 2)


def saddle(steps: Sequence[Step], lam: float, *, certified: bool = False) -> Saddle:
    """The sums at λ, with K's error only when `certified`."""
    moments = [(step.count, step.transform.moments(lam, certified=certified)) for step in steps]
    return Saddle(
        lam=lam,
        log_mgf=math.fsum(count * m.log_mgf for count, m in moments),
        error=math.fsum(count * m.error for count, m in moments),
        mean=math.fsum(count * m.mean for count, m in moments),
        variance=math.fsum(count * m.variance for count, m in moments),
    )


def thinned(steps: Sequence[Step]) -> Sequence[Step]:
    """At most about fifty steps that stand for all: the middle of each group, with the group's count."""
    if len(steps) <= _STEERING_STEPS:
        return steps
    size = math.ceil(len(steps) / _STEERING_STEPS)
    groups = [steps[start : start + size] for start in range(0, len(steps), size)]
    return [
        Step(transform=group[len(group) // 2].transform, count=sum(step.count for step in group)) for group in groups
    ]


def _start(steps: Sequence[Step], log_inverse: float) -> float:
    variance = 2 * saddle(steps, 1e-3).mean
    return min(1e12, max(1e-3, math.sqrt(2 * log_inverse) / math.sqrt(max(variance, 1e-300))))


def saddle_for_delta(steps: Sequence[Step], delta: float) -> Saddle:
    """λ whose saddle-point δ at its own ε is `delta`, by Newton on log λ inside a bracket; a rough λ is enough."""
    target = math.log(delta)
    low, high = 1e-6, 1e13
    lam = _start(steps, max(0.5, -target))
    here = saddle(steps, lam)
    for _ in range(80):
        gap = here.exponent(here.epsilon) - math.log(2 * math.pi * here.curvature) / 2 - target
        if abs(gap) < 0.05 * max(1.0, -target / 5) or high / low < 1 + 1e-9:
            break
        low, high = (lam, high) if gap > 0 else (low, lam)
        move = gap / (lam * lam * here.curvature)
        proposal = lam * math.exp(max(-2.5, min(2.5, move)))
        lam = proposal if low < proposal < high else math.sqrt(low * high)
        here = saddle(steps, lam)
    return here


def saddle_for_epsilon(steps: Sequence[Step], epsilon: float) -> Saddle:
    """λ whose saddle-point ε is `epsilon`; stops early when δ is below the smallest double."""
    low, high = 1e-9, 1e13
    lam = 1.0
    here = saddle(steps, lam)
    for _ in range(100):
        gap = here.epsilon - epsilon
        if abs(gap) * lam < 0.05 or high / low < 1 + 1e-9 or here.exponent(epsilon) < _SMALLEST_LOG_DELTA:
            break
        low, high = (lam, high) if gap < 0 else (low, lam)
        proposal = lam * math.exp(max(-2.5, min(2.5, -gap / (lam * here.curvature))))
        lam = proposal if low < proposal < high else math.sqrt(low * high)
        here = saddle(steps, lam)
    return here


# ── the period ──────────────────────────────────────────────────────────────────────────────────────────────


def _period(steps: Sequence[Step], at: Saddle, epsilon: float, goal: float) -> tuple[float, float]:
    """The smallest P whose aliases are about e^{goal}, and the λ' that bounds those with k > 0.

    Left aliases are at most e^{−λP} each. For the right ones (K(λ') + const)/(λ' − λ) has one minimum: walk the
    list of candidates towards it, and stop where the left side rules.
    """
    left = (0.7 - goal) / at.lam

    def right(factor: float) -> tuple[float, float]:
        guard = saddle(steps, factor * at.lam)
        return (guard.log_mgf - guard.lam * epsilon + 0.7 - goal) / (guard.lam - at.lam), guard.lam

    best = right(_GUARDS[_FIRST_GUARD])
    for direction in (_GUARDS[_FIRST_GUARD + 1 :], _GUARDS[_FIRST_GUARD - 1 :: -1]):
        for factor in direction:
            if best[0] <= left:
                break
            other = right(factor)
            if other[0] >= best[0]:
                break
            best = other
    return max(left, best[0]), best[1]


def settle(steps: Sequence[Step], at: Saddle, epsilon: float, goal: float) -> tuple[Saddle, float, float]:
    """A line, its period and its guard λ', moved left of the saddle where that shortens the period.

    With rare large losses K explodes just right of the saddle, so that right aliases need a long period there,
    while the integrand at u = 0 is nearly flat on the left.
    """
    period, guard = _period(steps, at, epsilon, goal)
    best = at, period, guard
    allowed = at.exponent(epsilon) + 6.0
    for factor in (0.93, 0.86, 0.78, 0.68):
        if best[1] < 1.6 * (0.7 - goal) / best[0].lam:
            break
        moved = saddle(steps, factor * at.lam)
        if moved.exponent(epsilon) > allowed:
            break
        period, guard = _period(steps, moved, epsilon, goal)
        if period < best[1]:
            best = moved, period, guard
    return best
