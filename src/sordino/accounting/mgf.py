"""What the contour integral needs to know of one step's privacy loss L under P.

A transform knows K(s) = log E_P[e^{sL}]. A line is that transform on the vertical line Re s = λ:

    E_P[e^{(λ+iu)L}] = e^{K(λ)} · φ(u),      φ(u) = characteristic function of the *tilted* loss,

returned as log φ_c(u), with φ_c the characteristic function of L − K'(λ), so that phases stay small and T steps
are T · log φ_c with relative accuracy. Every numerical result comes with a bound on its error.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sordino.accounting.base import Repeated
from sordino.accounting.gaussian_mixtures import FloatArray

ComplexArray = NDArray[np.complex128]

UNIT_ROUNDOFF = 2.0**-53


@dataclass(frozen=True, kw_only=True)
class CumulantValues:
    """K(λ) with a bound on its error, and the mean and variance of the tilted loss (no bound: they only steer)."""

    log_mgf: float
    error: float
    mean: float
    variance: float


class CharacteristicFunction(Protocol):
    """One step's loss on the line Re s = λ."""

    @property
    def moments(self) -> CumulantValues:
        """K, K', K'' at λ."""
        ...

    @property
    def size(self) -> int:
        """Cost of one evaluation, in nodes."""
        ...

    def characteristic(self, u: FloatArray) -> tuple[ComplexArray, FloatArray]:
        """Log φ_c on the uniform grid u_n = n·u_1, and a bound on |error of φ_c| at each point."""
        ...

    def decay(self) -> Callable[[float], float]:
        """A function U ↦ bound on log |φ(u)| that holds for *all* u ≥ U."""
        ...


class MomentGeneratingFunction(Protocol):
    """K(s) of one step, and its lines."""

    @property
    def largest_loss(self) -> float:
        """The essential supremum of the loss, ∞ when it is unbounded."""
        ...

    @property
    def decays(self) -> bool:
        """Whether the characteristic function of the loss tends to 0: no atoms."""
        ...

    def moments(self, lam: float, *, certified: bool = True) -> CumulantValues:
        """K(λ), K'(λ), K''(λ) at a real λ > 0; `certified` = False may skip the bound on K's error."""
        ...

    def line(self, lam: float, largest_u: float, tolerance: float) -> CharacteristicFunction:
        """The line at λ, set up so that |error of φ| ≤ about `tolerance` up to `largest_u`."""
        ...


@dataclass(frozen=True, kw_only=True)
class GaussianMGF:
    """The Gaussian mechanism with μ = sensitivity/std: K(s) = s(s+1)μ²/2; the loss is N(μ²/2, μ²)."""

    mu: float
    largest_loss: float = math.inf
    decays: bool = True

    def moments(self, lam: float, *, certified: bool = True) -> CumulantValues:  # noqa: ARG002
        """Exact up to rounding."""
        square = self.mu * self.mu
        log_mgf = lam * (lam + 1) * square / 2
        return CumulantValues(
            log_mgf=log_mgf, error=8 * UNIT_ROUNDOFF * log_mgf, mean=(lam + 0.5) * square, variance=square
        )

    def line(self, lam: float, largest_u: float, tolerance: float) -> "GaussianCharacteristicFunction":  # noqa: ARG002
        """The tilted loss is N((λ+½)μ², μ²)."""
        return GaussianCharacteristicFunction(moments=self.moments(lam), mu=self.mu)


@dataclass(frozen=True, kw_only=True)
class GaussianCharacteristicFunction:
    """φ_c(u) = e^{−μ²u²/2}."""

    moments: CumulantValues
    mu: float
    size: int = 1

    def characteristic(self, u: FloatArray) -> tuple[ComplexArray, FloatArray]:
        """Exact up to rounding."""
        log_phi = -((self.mu * u) ** 2) / 2
        return log_phi.astype(np.complex128), 8 * UNIT_ROUNDOFF * -log_phi * np.exp(log_phi)

    def decay(self) -> Callable[[float], float]:
        """The bound is the value itself."""
        return lambda u: -((self.mu * u) ** 2) / 2


@dataclass(frozen=True, kw_only=True)
class LaplaceMGF:
    """The Laplace mechanism with scale b × ℓ1 sensitivity.

    The loss is 1/b with probability ½, −1/b with probability ½e^{−1/b}, and has a density between, so that
    E[e^{sL}] = ((s+1) e^{s/b} + s e^{−(s+1)/b}) / (2s+1) (Mironov 2017, proposition 6, with α = s + 1).
    """

    scale: float
    decays: bool = False

    @property
    def largest_loss(self) -> float:
        """1/b."""
        return 1 / self.scale

    def moments(self, lam: float, *, certified: bool = True) -> CumulantValues:  # noqa: ARG002
        """K by the closed form with e^{λ/b} factored out; derivatives from the exact tilted distribution."""
        top = 1 / self.scale
        upper, lower, inner = self._masses(lam)
        total = upper + lower + inner
        # The inner part is a density ∝ e^{(λ+½)l} on [−top, top].
        mean_inner, square_inner = _exponential_moments(lam + 0.5, top)
        mean = (top * (upper - lower) + inner * mean_inner) / total
        square = (top * top * (upper + lower) + inner * square_inner) / total
        log_mgf = lam * top + math.log(total)
        return CumulantValues(
            log_mgf=max(0.0, log_mgf),
            error=UNIT_ROUNDOFF * (8 * lam * top + 32),
            mean=mean,
            variance=max(0.0, square - mean * mean),
        )

    def _masses(self, lam: float) -> tuple[float, float, float]:
        """Tilted masses of the top atom, the bottom atom and the inner part, relative to e^{λ/b}."""
        top = 1 / self.scale
        inner = -math.expm1(-(2 * lam + 1) * top) / (2 * (2 * lam + 1))
        return 0.5, 0.5 * math.exp(-(2 * lam + 1) * top), inner

    def line(self, lam: float, largest_u: float, tolerance: float) -> "LaplaceCharacteristicFunction":  # noqa: ARG002
        """The tilted loss: two atoms and an exponential density between."""
        return LaplaceCharacteristicFunction(moments=self.moments(lam), lam=lam, top=1 / self.scale)


def _no_decay(_: float) -> float:
    return 0.0


def _exponential_moments(rate: float, top: float) -> tuple[float, float]:
    """Mean and mean square of the density ∝ e^{rate·l} on [−top, top], rate > 0."""
    x = rate * top
    if x < 1e-3:
        return top * x / 3, top * top / 3
    coth = 1 / math.tanh(x) if x < 350 else 1.0
    mean = top * (coth - 1 / x)
    return mean, top * top * (1 - 2 * coth / x + 2 / (x * x))


@dataclass(frozen=True, kw_only=True)
class LaplaceCharacteristicFunction:
    """φ(u) from E[e^{sL}] in closed form."""

    moments: CumulantValues
    lam: float
    top: float
    size: int = 1

    def characteristic(self, u: FloatArray) -> tuple[ComplexArray, FloatArray]:
        """The closed form at s = λ + iu over its value at λ, centered."""
        s = self.lam + 1j * u
        value = (
            (s + 1) * np.exp(1j * u * self.top) + s * np.exp(-(2 * self.lam + 1) * self.top - 1j * u * self.top)
        ) / (2 * s + 1)
        phi = value * math.exp(self.lam * self.top - self.moments.log_mgf)
        centered = phi * np.exp(-1j * u * self.moments.mean)
        error = UNIT_ROUNDOFF * (64 + 8 * u * self.top + 8 * self.lam * self.top)
        return np.log(centered), np.asarray(error)

    def decay(self) -> Callable[[float], float]:
        """The atoms do not decay: |φ| ≤ 1 is all that is claimed."""
        return _no_decay


# ----------------------------------------------------------------------------------------------------------------------
# Where to put the contour: the saddle point, the period, and the cut-off.
#
# Nothing here is part of the certificate. A poor choice costs time or width, never soundness, so everything is steered
# by K without its error, and by every k-th step of a long schedule standing for its neighbors.
# ----------------------------------------------------------------------------------------------------------------------


_SMALLEST_LOG_DELTA = -740.0
_STEERING_STEPS = 48
_GUARDS = (1.0005, 1.002, 1.005, 1.01, 1.02, 1.04, 1.07, 1.12, 1.2, 1.35, 1.6, 2.2, 4.0)
_FIRST_GUARD = 8


RepeatedMGF: TypeAlias = Repeated[MomentGeneratingFunction]


@dataclass(frozen=True, kw_only=True)
class SaddlePoint:
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


def evaluate_saddle_point(steps: Sequence[RepeatedMGF], lam: float, *, certified: bool = False) -> SaddlePoint:
    """The sums at λ, with K's error only when `certified`."""
    moments = [(step.count, step.loss.moments(lam, certified=certified)) for step in steps]
    return SaddlePoint(
        lam=lam,
        log_mgf=math.fsum(count * m.log_mgf for count, m in moments),
        error=math.fsum(count * m.error for count, m in moments),
        mean=math.fsum(count * m.mean for count, m in moments),
        variance=math.fsum(count * m.variance for count, m in moments),
    )


def subsample_steps(steps: Sequence[RepeatedMGF]) -> Sequence[RepeatedMGF]:
    """At most about fifty steps that stand for all: the middle of each group, with the group's count."""
    if len(steps) <= _STEERING_STEPS:
        return steps
    size = math.ceil(len(steps) / _STEERING_STEPS)
    groups = [steps[start : start + size] for start in range(0, len(steps), size)]
    return [Repeated(group[len(group) // 2].loss, sum(step.count for step in group)) for group in groups]


def _start(steps: Sequence[RepeatedMGF], log_inverse: float) -> float:
    variance = 2 * evaluate_saddle_point(steps, 1e-3).mean
    return min(1e12, max(1e-3, math.sqrt(2 * log_inverse) / math.sqrt(max(variance, 1e-300))))


def saddle_for_delta(steps: Sequence[RepeatedMGF], delta: float) -> SaddlePoint:
    """λ whose saddle-point δ at its own ε is `delta`, by Newton on log λ inside a bracket; a rough λ is enough."""
    target = math.log(delta)
    low, high = 1e-6, 1e13
    lam = _start(steps, max(0.5, -target))
    here = evaluate_saddle_point(steps, lam)
    for _ in range(80):
        gap = here.exponent(here.epsilon) - math.log(2 * math.pi * here.curvature) / 2 - target
        if abs(gap) < 0.05 * max(1.0, -target / 5) or high / low < 1 + 1e-9:
            break
        low, high = (lam, high) if gap > 0 else (low, lam)
        move = gap / (lam * lam * here.curvature)
        proposal = lam * math.exp(max(-2.5, min(2.5, move)))
        lam = proposal if low < proposal < high else math.sqrt(low * high)
        here = evaluate_saddle_point(steps, lam)
    return here


def saddle_for_epsilon(steps: Sequence[RepeatedMGF], epsilon: float) -> SaddlePoint:
    """λ whose saddle-point ε is `epsilon`; stops early when δ is below the smallest double."""
    low, high = 1e-9, 1e13
    lam = 1.0
    here = evaluate_saddle_point(steps, lam)
    for _ in range(100):
        gap = here.epsilon - epsilon
        if abs(gap) * lam < 0.05 or high / low < 1 + 1e-9 or here.exponent(epsilon) < _SMALLEST_LOG_DELTA:
            break
        low, high = (lam, high) if gap < 0 else (low, lam)
        proposal = lam * math.exp(max(-2.5, min(2.5, -gap / (lam * here.curvature))))
        lam = proposal if low < proposal < high else math.sqrt(low * high)
        here = evaluate_saddle_point(steps, lam)
    return here


# ── the period ──────────────────────────────────────────────────────────────────────────────────────────────


def _period(steps: Sequence[RepeatedMGF], at: SaddlePoint, epsilon: float, goal: float) -> tuple[float, float]:
    """The smallest P whose aliases are about e^{goal}, and the λ' that bounds those with k > 0.

    Left aliases are at most e^{−λP} each. For the right ones (K(λ') + const)/(λ' − λ) has one minimum: walk the
    list of candidates towards it, and stop where the left side rules.
    """
    left = (0.7 - goal) / at.lam

    def right(factor: float) -> tuple[float, float]:
        guard = evaluate_saddle_point(steps, factor * at.lam)
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


def choose_contour(
    steps: Sequence[RepeatedMGF], at: SaddlePoint, epsilon: float, goal: float
) -> tuple[SaddlePoint, float, float]:
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
        moved = evaluate_saddle_point(steps, factor * at.lam)
        if moved.exponent(epsilon) > allowed:
            break
        period, guard = _period(steps, moved, epsilon, goal)
        if period < best[1]:
            best = moved, period, guard
    return best
