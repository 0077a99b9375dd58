"""The default accountant: δ(ε) as one integral over a vertical line, with a bound on every error (floor 1).

For independent steps with losses L_j under P and K(s) = Σ log E_P[e^{sL_j}] (Alghamdi et al. 2023, theorem 3.1),

    δ(ε) = E[(1 − e^{ε−L})₊] = (1/π) Re ∫₀^∞ e^{K(s)−sε} / (s(s+1)) du,     s = λ + iu,   any λ > 0.

λ is taken at the saddle point, where the integrand doesn't oscillate, and the integral by the trapezoid rule of
step h. Composition is addition of K, T equal steps are a multiplication. With P = 2π/h the errors are

    aliasing    the rule gives Σ_k e^{λkP} δ(ε+kP) (Poisson summation). All terms are ≥ 0, so it overstates δ, by at
                most Σ_{k>0} e^{−λkP} from below and by a Chernoff bound at some λ' > λ from above;
    tail        |φ(u)| ≤ g(U) for all u ≥ U with an explicit g, and ∫_U^∞ du/u² = 1/U;
    transforms  |φ_j^T| moves by at most (|φ_j| + r_j)^T − |φ_j|^T when φ_j is known to r_j;
    rounding    of the exponents and of the final sum.

The interval is the value with all of these added; its ends in ε are found by evaluating the certified curve.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sordino.accounting.transforms import UNIT_ROUNDOFF, ComplexArray, Line, Transform
from sordino.errors import AccountingError

__all__ = ["CertifiedLine", "Step", "contour_delta", "contour_epsilon"]

_TOLERANCES = (1e-11, 1e-8, 1e-5)
_LARGEST_WORK = 4e7  # nodes in u × nodes in y, over all transforms: about a second
_SMALLEST_LOG_DELTA = -740.0
_GUARDS = (1.0005, 1.001, 1.002, 1.004, 1.008, 1.016, 1.03, 1.06, 1.12, 1.25, 1.45, 2.0, 3.5)
_FIRST_GUARD = 9
_NOISE = 24.0  # units of roundoff of the last sum and of exponentials


@dataclass(frozen=True, kw_only=True)
class Step:
    """One transform, `count` times."""

    transform: Transform
    count: int


@dataclass(frozen=True, kw_only=True)
class _Saddle:
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

    @property
    def log_delta(self) -> float:
        """The saddle-point approximation of log δ at its own ε; only steers."""
        return self.exponent(self.epsilon) - math.log(2 * math.pi * self.curvature) / 2


def _saddle(steps: Sequence[Step], lam: float) -> _Saddle:
    moments = [(step.count, step.transform.moments(lam)) for step in steps]
    return _Saddle(
        lam=lam,
        log_mgf=math.fsum(count * m.log_mgf for count, m in moments),
        error=math.fsum(count * m.error for count, m in moments),
        mean=math.fsum(count * m.mean for count, m in moments),
        variance=math.fsum(count * m.variance for count, m in moments),
    )


class CertifiedLine:
    """All steps on the line Re s = λ: δ(ε) with its error for any ε near the saddle's.

    Args:
        steps: transforms with counts.
        saddle: their sums at λ.
        epsilon: the ε around which tolerances are set.
        log_delta: about the log of δ there.
        tolerance: relative error of δ aimed at; the error certified is computed, not assumed.
    """

    def __init__(
        self, steps: Sequence[Step], saddle: _Saddle, epsilon: float, log_delta: float, tolerance: float
    ) -> None:
        self._saddle = saddle
        self._steps = steps
        goal = math.log(tolerance) + log_delta
        self._period, self._guard = self._choose_period(epsilon, goal)
        self._lines, cutoff, self._tail_exponent = self._choose_cutoff(epsilon, goal, tolerance)
        self._cutoff = cutoff
        spacing = 2 * math.pi / self._period
        self._u = spacing * np.arange(round(cutoff / spacing) + 1, dtype=np.float64)
        self._evaluate()

    # ── where to stop and how finely to step ────────────────────────────────────────────────────────────────

    def _choose_period(self, epsilon: float, goal: float) -> tuple[float, _Saddle]:
        """The smallest P whose aliases are below e^{goal}, and the λ' that proves it for k > 0."""
        saddle = self._saddle
        left = (0.7 - goal) / saddle.lam

        def right(factor: float) -> tuple[float, _Saddle]:
            guard = _saddle(self._steps, factor * saddle.lam)
            need = guard.log_mgf + guard.error - guard.lam * epsilon + 0.7 - goal
            return need / (guard.lam - saddle.lam), guard

        # (K(λ') + const)/(λ' − λ) has one minimum: walk the list towards it, and stop where the left side rules.
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

    def _choose_cutoff(self, epsilon: float, goal: float, tolerance: float) -> tuple[list[Line], float, float]:
        """U with a tail below e^{goal}, lines accurate up to U, and the log of the tail bound without e^{−λε}."""
        saddle, count = self._saddle, sum(step.count for step in self._steps)
        accuracy = max(1e-22, 1e-3 * tolerance / count)
        head = saddle.log_mgf - math.log(math.pi)
        cutoff = max(2 * math.pi / self._period, 6.0 / math.sqrt(saddle.curvature))
        lines = [step.transform.line(saddle.lam, cutoff, accuracy) for step in self._steps]
        bounds = [line.decay() for line in lines]

        def log_tail(u: float) -> float:
            total = math.fsum(step.count * bound(u) for step, bound in zip(self._steps, bounds, strict=True))
            return head + total - math.log(u)

        wanted = goal + saddle.lam * epsilon
        while log_tail(cutoff) > wanted:
            cutoff *= 1.25
            if cutoff * self._period > 2 * math.pi * _LARGEST_WORK / 64:
                raise AccountingError(
                    "the loss's characteristic function must decay for the contour accountant, got one that does not. "
                    "Use the pld or rdp accountant."
                )
        spacing = 2 * math.pi / self._period
        cutoff = spacing * math.ceil(cutoff / spacing)  # the last node, and what the lines must be accurate for
        lines = [step.transform.line(saddle.lam, 1.0001 * cutoff, accuracy) for step in self._steps]
        self._refuse_work(lines, cutoff)
        bounds = [line.decay() for line in lines]
        return lines, cutoff, log_tail(cutoff)

    def _refuse_work(self, lines: Sequence[Line], cutoff: float) -> None:
        work = sum(line.size for line in lines) * cutoff * self._period / (2 * math.pi)
        if work > _LARGEST_WORK:
            raise AccountingError(
                f"the contour integral must need ≤ {_LARGEST_WORK:g} operations, got {work:.1g}. "
                "Use the pld or rdp accountant."
            )

    # ── the integrand on the line ───────────────────────────────────────────────────────────────────────────

    def _evaluate(self) -> None:
        u, saddle = self._u, self._saddle
        log_phi = np.zeros(u.size, dtype=np.complex128)
        high = np.zeros(u.size)
        noise = np.zeros(u.size)
        for step, line in zip(self._steps, self._lines, strict=True):
            value, radius = line.characteristic(u)
            log_phi += step.count * value
            modulus = np.exp(value.real)
            high += step.count * np.log1p(np.minimum(radius / np.maximum(modulus, 1e-300), 1e300))
            noise += step.count * np.abs(value)
        mean = math.fsum(step.count * line.moments.mean for step, line in zip(self._steps, self._lines, strict=True))
        self._mean = mean
        s = saddle.lam + 1j * u
        log_kernel = -np.log(s) - np.log1p(s)
        weight = np.full(u.size, 1 / self._period * 2)
        weight[0] /= 2
        self._log_node = log_phi + log_kernel
        self._weight = weight
        self._s = s
        size = np.exp(self._log_node.real)
        grown = np.where(
            high < 1,
            size * np.expm1(np.minimum(high, 1.0)),
            np.exp(np.minimum(self._log_node.real + high, 700.0)) - size,
        )
        self._transform_error = float(np.sum(weight * grown))
        self._size_sum = float(np.sum(weight * size))
        self._noise_sum = float(np.sum(weight * size * (noise + np.abs(log_kernel))))
        self._phase_sum = float(np.sum(weight * size * u))

    def __call__(self, epsilon: float) -> tuple[float, float, float, float]:
        """δ's value, the error above it, the error below it, and the slope dδ/dε."""
        saddle = self._saddle
        exponent = saddle.log_mgf - saddle.lam * epsilon
        scale = math.exp(exponent)
        node: ComplexArray = np.exp(self._log_node + 1j * self._u * (self._mean - epsilon))
        value = scale * float(np.sum(self._weight * node.real))
        slope = -scale * float(np.sum(self._weight * (self._s * node).real))
        phase = 4 * (abs(self._mean) + abs(epsilon)) * self._phase_sum
        rounding = UNIT_ROUNDOFF * (
            (_NOISE + 4 * abs(saddle.log_mgf) + 4 * abs(saddle.lam * epsilon)) * self._size_sum
            + 8 * self._noise_sum
            + phase
        )
        log_mgf_error = math.expm1(min(saddle.error, 700.0)) * self._size_sum
        numeric = 1.02 * scale * (rounding + self._transform_error + log_mgf_error)
        tail = math.exp(min(self._tail_exponent - saddle.lam * epsilon, 0.0))
        return value, numeric + tail, numeric + tail + self._alias(epsilon), slope

    def _alias(self, epsilon: float) -> float:
        saddle, guard, period = self._saddle, self._guard, self._period
        left = math.exp(-saddle.lam * period) / -math.expm1(-saddle.lam * period)
        gap = guard.lam - saddle.lam
        right = guard.log_mgf + guard.error - guard.lam * epsilon - gap * period
        return left + math.exp(min(right, 0.0)) / -math.expm1(-gap * period)

    def bounds(self, epsilon: float) -> tuple[float, float]:
        """Certified [δ_lower, δ_upper] at ε."""
        value, above, below, _ = self(epsilon)
        return min(1.0, max(0.0, value - below)), min(1.0, max(0.0, value + above))

    @property
    def lam(self) -> float:
        """The real part of the line."""
        return self._saddle.lam

    @property
    def nodes(self) -> int:
        """Number of points on the line."""
        return self._u.size


# ── the saddle point ────────────────────────────────────────────────────────────────────────────────────────


def _start(steps: Sequence[Step], log_inverse: float) -> float:
    variance = 2 * math.fsum(step.count * step.transform.moments(1e-3).mean for step in steps)
    return max(1e-3, math.sqrt(2 * log_inverse) / math.sqrt(max(variance, 1e-300)))


def _saddle_for_delta(steps: Sequence[Step], delta: float) -> _Saddle:
    """λ whose saddle-point δ is `delta`, by Newton on log λ inside a bracket; a rough λ is enough."""
    target = math.log(delta)
    low, high = 1e-6, 1e13
    lam = min(1e12, _start(steps, max(0.5, -target)))
    saddle = _saddle(steps, lam)
    for _ in range(80):
        gap = saddle.log_delta - target
        if abs(gap) < 0.02 * max(1.0, min(5.0, -target / 4)) or high / low < 1 + 1e-9:
            break
        low, high = (lam, high) if gap > 0 else (low, lam)
        move = gap / (lam * lam * saddle.curvature)
        proposal = lam * math.exp(max(-2.5, min(2.5, move)))
        lam = proposal if low < proposal < high else math.sqrt(low * high)
        saddle = _saddle(steps, lam)
    return saddle


def _saddle_for_epsilon(steps: Sequence[Step], epsilon: float) -> _Saddle:
    """λ whose saddle-point ε is `epsilon`; stops early when δ is below the smallest double."""
    low, high = 1e-9, 1e13
    lam = 1.0
    saddle = _saddle(steps, lam)
    for _ in range(100):
        gap = saddle.epsilon - epsilon
        if abs(gap) * lam < 0.02 or high / low < 1 + 1e-9 or saddle.exponent(epsilon) < _SMALLEST_LOG_DELTA:
            break
        low, high = (lam, high) if gap < 0 else (low, lam)
        proposal = lam * math.exp(max(-2.5, min(2.5, -gap / (lam * saddle.curvature))))
        lam = proposal if low < proposal < high else math.sqrt(low * high)
        saddle = _saddle(steps, lam)
    return saddle


# ── one direction ───────────────────────────────────────────────────────────────────────────────────────────


def _line(steps: Sequence[Step], saddle: _Saddle, epsilon: float, log_delta: float) -> CertifiedLine:
    refusal: AccountingError | None = None
    for tolerance in _TOLERANCES:
        try:
            return CertifiedLine(steps, saddle, epsilon, log_delta, tolerance)
        except AccountingError as error:
            refusal = error
    assert refusal is not None
    raise refusal


def contour_delta(steps: Sequence[Step], epsilon: float) -> tuple[float, float]:
    """Certified bounds on δ(ε) of one direction, for ε ≥ 0."""
    if math.fsum(step.count * step.transform.largest_loss for step in steps) <= epsilon:
        return 0.0, 0.0
    saddle = _saddle_for_epsilon(steps, epsilon)
    if saddle.exponent(epsilon) < _SMALLEST_LOG_DELTA:
        return 0.0, 1e-300
    log_delta = min(0.0, saddle.exponent(epsilon) - math.log(2 * math.pi * saddle.curvature) / 2)
    bounds = 0.0, 1.0
    for _ in range(3):
        bounds = _line(steps, saddle, epsilon, log_delta).bounds(epsilon)
        if bounds[1] - bounds[0] < 1e-7 * bounds[1] or bounds[1] <= 0:
            break
        log_delta = min(math.log(bounds[1]), log_delta - 5.0)
    return bounds


def contour_epsilon(steps: Sequence[Step], delta: float) -> tuple[float, float]:
    """Certified bounds on the smallest ε ≥ 0 with δ(ε) ≤ `delta`, 0 < `delta` < 1, of one direction."""
    saddle = _saddle_for_delta(steps, delta)
    if saddle.epsilon < 1e-3 or delta > 0.05:
        at_zero = contour_delta(steps, 0.0)
        if at_zero[1] <= delta:
            return 0.0, 0.0
    epsilon, log_delta = saddle.epsilon, math.log(delta)
    line = _line(steps, saddle, epsilon, log_delta)
    for _ in range(2):
        epsilon = _root(line, epsilon, delta)
        value, _, below, _ = line(epsilon)
        if below < 1e-7 * value:
            break
        line = _line(steps, saddle, epsilon, log_delta)
    return _lower_end(line, epsilon, delta), _upper_end(line, epsilon, delta)


def _root(line: CertifiedLine, epsilon: float, delta: float) -> float:
    """Root of the uncertified value: Newton on log δ, which is nearly linear in ε, inside a bracket."""
    low, high = -math.inf, math.inf
    stride = 1 / line.lam
    for _ in range(200):
        value, error, _, slope = line(epsilon)
        low, high = (epsilon, high) if value > delta else (low, epsilon)
        trusted = value > 4 * error and slope < 0
        proposal = epsilon - math.log(value / delta) * value / slope if trusted else math.nan
        if trusted and abs(proposal - epsilon) <= 1e-15 * (1e-3 + abs(epsilon)):
            return proposal
        if not low < proposal < high:
            if math.isinf(low) or math.isinf(high):
                proposal = epsilon - stride if math.isinf(low) else epsilon + stride
                stride *= 2
            else:
                proposal = (low + high) / 2
                if not low < proposal < high:
                    return epsilon
        epsilon = proposal
    return epsilon


def _upper_end(line: CertifiedLine, epsilon: float, delta: float) -> float:
    _, above, _, slope = line(epsilon)
    reach = 1.05 * above / -slope + 4 * math.ulp(abs(epsilon) + 1e-12)
    for _ in range(60):
        if line.bounds(epsilon + reach)[1] <= delta:
            return max(0.0, epsilon + reach)
        reach *= 2
    raise AccountingError("ε must be boundable at this δ, got an error larger than δ. Use the pld or rdp accountant.")


def _lower_end(line: CertifiedLine, epsilon: float, delta: float) -> float:
    _, _, below, slope = line(epsilon)
    reach = 1.05 * below / -slope + 4 * math.ulp(abs(epsilon) + 1e-12)
    for _ in range(60):
        if epsilon - reach <= 0:
            return 0.0
        if line.bounds(epsilon - reach)[0] >= delta:
            return epsilon - reach
        reach *= 2
    return 0.0
