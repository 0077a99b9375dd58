"""The contour integral for T equal Poisson-sampled Gaussian steps, in few array passes.

The same integral and the same five errors as `contour`, for the one schedule that is asked about most: one
sample rate q < ½, one noise multiplier. With ℓ(y) = log(1 + q(e^{my − m²/2} − 1)) both directions are E_{N(0,1)} of
e^{aℓ}: a = s + 1 when removing (loss ℓ), a = −s when adding (loss −ℓ).

Every λ that steers is one row of one array, K at the line and at its guard are two rows of another, and adding is
only *checked*: where its certified δ at removing's lower ε is at most the δ asked for, its ε is no larger.

Each function returns None where a short cut doesn't hold; `contour` then takes the long way.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from sordino.accounting.gaussian_mixtures import FloatArray
from sordino.accounting.mgf import UNIT_ROUNDOFF, ComplexArray

_TAIL = 9.6
_LONGEST = 80.0
_LADDER = 1.5 * 0.82 ** np.arange(16, dtype=np.float64)
_LINES = 5
_FACTORS = np.array([0.68, 0.78, 0.86, 0.93, 1.0, 1.01, 1.02, 1.04, 1.07, 1.12, 1.2, 1.35, 1.6, 2.2, 3.0])
_STRETCH = np.array([1.0, 1.1, 1.2, 1.35, 1.55, 1.8, 2.2])
_WIDEST = 2.3
_SHIFTS = np.array([0.75, 1.05])
_ALPHAS = np.linspace(0.04, 1.0, 25)
_LOG_NORMAL = math.log(2 * math.pi) / 2
_TOLERANCE = 1e-11
_ROUGH = 1e-3  # relative error of δ with which adding is checked
_MOST_NODES = 800
_NOISE = 24.0


@dataclass(frozen=True, kw_only=True)
class _ContourParameters:
    """Where a line shall lie: λ, its guard, the period, ε there, and the composed loss's mean and variance."""

    lam: float
    guard: float
    period: float
    epsilon: float
    variance: float
    exponent: float


def equal_steps_epsilon(sample_rate: float, shift: float, count: int, delta: float) -> tuple[float, float] | None:
    """Certified bounds on ε at δ over both directions, or None: ask `contour`."""
    if not 1e-12 < sample_rate < 0.5 or not 1e-3 <= shift <= 5 or count < 50 or not 1e-300 < delta < 0.01:
        return None
    parameters = _steer(sample_rate, shift, count, delta)
    if parameters is None:
        return None
    log_delta = math.log(delta)
    line = EqualStepsIntegral.build(
        sample_rate, shift, count, parameters, log_delta, removing=True, tolerance=_TOLERANCE
    )
    bounds = None if line is None else _inverted(line, parameters.epsilon, delta)
    if bounds is None or bounds[1] - bounds[0] > 1e-6 * bounds[1]:
        return None
    # An upper bound needs no guard: aliases only raise the sum, here by about e^{−8} of δ.
    period = min(parameters.period, (8 - log_delta) / parameters.lam)
    other = replace(parameters, epsilon=bounds[0], period=period, guard=parameters.lam * (1 + 1e-9))
    added = EqualStepsIntegral.build(sample_rate, shift, count, other, log_delta, removing=False, tolerance=_ROUGH)
    if added is None or added.bounds(np.array([bounds[0]]))[1][0] > delta:
        return None
    return bounds


# ── steering: nothing here is part of the certificate ───────────────────────────────────────────────────────


def _steer(rate: float, shift: float, count: int, delta: float) -> _ContourParameters | None:
    """λ at the saddle and the shortest period, from two passes over a coarse grid."""
    log_delta = math.log(delta)
    # Of a step's loss the bulk's variance is at least E[(w − 1)²]; the ladder goes down from there.
    start = math.sqrt(2 * max(0.5, -log_delta) / (count * rate * rate * math.expm1(shift * shift)))
    top = min(1.5 * start, (_LONGEST / 1.5 - 2 * _TAIL) / shift)
    if top < 0.1 * start:
        return None
    lams = top / 1.5 * _LADDER
    y = np.arange(-_TAIL, (top + 1) * shift + _TAIL + 0.3, 0.3)
    if y.size > 300:
        return None
    loss = np.log1p(rate * np.expm1(np.minimum(shift * y - shift * shift / 2, 600.0)))
    powers = np.stack([np.ones(y.size), loss, loss * loss])
    base = y * y * -0.5 + (math.log(0.3) - _LOG_NORMAL)
    lam = _root(lams, lambda rows: _steered(rows, loss, base, powers, count)[3] - log_delta)
    if lam is None:
        return None
    factors = _FACTORS[(_FACTORS <= 1.12) | (lam * _FACTORS <= top)]
    return _shortest(lam, factors, _steered(lam * factors, loss, base, powers, count), log_delta)


def _root(lams: FloatArray, gaps: Callable[[FloatArray], FloatArray]) -> float | None:
    """Where the gap, which falls with λ, is nearly zero: a descending ladder, then finer ones."""
    for _ in range(4):
        gap = gaps(lams)
        low = int((gap < 0).sum())  # the ladder goes down: rows before are above the root
        if not 0 < low < gap.size or not gap[low - 1] < 0 <= gap[low]:
            return None
        if gap[low] - gap[low - 1] < 6:
            part = float(gap[low] / (gap[low] - gap[low - 1]))
            return math.sqrt(lams[low] ** 2 + part * (lams[low - 1] ** 2 - lams[low] ** 2))
        lams = np.linspace(lams[low - 1], lams[low], 6)
    return None


def _steered(lams: FloatArray, loss: FloatArray, base: FloatArray, powers: FloatArray, count: int) -> FloatArray:
    """K, mean and variance of the composed loss at each λ, and the saddle point's log δ."""
    weights = np.exp(np.minimum(np.multiply.outer(lams + 1, loss) + base, 600.0))
    total, first, second = powers @ weights.T
    mean = first / total
    log_mgf, variance = count * np.log(total), count * (second / total - mean * mean)
    mean = count * mean
    inverse, shifted = 1 / lams, 1 / (lams + 1)
    curvature = variance + inverse * inverse + shifted * shifted
    log_delta = (
        log_mgf - lams * (mean - inverse - shifted) - np.log(lams * (lams + 1) * np.sqrt(2 * math.pi * curvature))
    )
    return np.stack([log_mgf, mean, variance, log_delta])


def _shortest(lam: float, factors: FloatArray, sums: FloatArray, log_delta: float) -> _ContourParameters | None:
    """The line, at the saddle or left of it, whose aliases are small with the shortest period."""
    log_mgf, mean, variance, _ = sums
    center = _LINES - 1
    epsilon = float(mean[center]) - 1 / lam - 1 / (lam + 1)
    if epsilon < 1e-3:
        return None
    lams = lam * factors
    exponents = log_mgf[:_LINES] - lams[:_LINES] * epsilon - np.log(lams[:_LINES] * (lams[:_LINES] + 1))
    goal = math.log(_TOLERANCE) + log_delta
    right = (log_mgf[_LINES:] - lams[_LINES:] * epsilon + 0.7 - goal) / (lams[_LINES:] - lams[:_LINES, None])
    best = right.argmin(axis=1)
    periods = np.maximum(right[np.arange(_LINES), best], (0.7 - goal) / lams[:_LINES])
    periods[exponents > exponents[center] + 6] = math.inf
    line = int(periods.argmin())
    if periods[line] > 0.8 * periods[center]:
        line = center
    return _ContourParameters(
        lam=float(lams[line]),
        guard=float(lams[_LINES + int(best[line])]),
        period=float(periods[line]),
        epsilon=epsilon,
        variance=float(variance[line]),
        exponent=float(exponents[line]),
    )


# ── the certified line ──────────────────────────────────────────────────────────────────────────────────────


class EqualStepsIntegral:
    """One direction of T equal steps on one line: δ(ε) with its error.

    Guarantee:
        `bounds` contains the exact δ(ε) of the direction, by the argument of `contour` and `mixture_line`.
    """

    def __init__(
        self, rate: float, shift: float, count: int, parameters: _ContourParameters, *, removing: bool
    ) -> None:
        self._rate, self._shift, self._count, self._removing = rate, shift, count, removing
        self._parameters, self._lam = parameters, parameters.lam
        self._a = parameters.lam + 1 if removing else -parameters.lam

    @classmethod
    def build(
        cls,
        rate: float,
        shift: float,
        count: int,
        parameters: _ContourParameters,
        log_delta: float,
        *,
        removing: bool,
        tolerance: float,
    ) -> "EqualStepsIntegral | None":
        """The line with its certificate, or None where a short cut doesn't hold."""
        line = cls(rate, shift, count, parameters, removing=removing)
        cancelled = math.exp(max(-40.0, min(0.0, log_delta - parameters.exponent)))
        accuracy = max(1e-22, 1e-3 * tolerance * cancelled / count)
        goal = math.log(tolerance) + log_delta
        # |φ|^T is about a Gaussian's, so that the cut-off is nearly known; the bound decides.
        scale = math.sqrt(max(-2 * (goal - parameters.exponent) - 4, 8.0) / parameters.variance)
        if not line._placed(_WIDEST * scale, accuracy) or not line._summed():
            return None
        cutoff = line._cutoff(scale, goal + parameters.lam * parameters.epsilon + math.log(math.pi))
        return line if cutoff is not None and line._evaluated(cutoff) else None

    def _placed(self, largest_u: float, accuracy: float) -> bool:
        """Nodes in y: the strip's errors and the range, as in `GaussianMixtureCharacteristicFunction`."""
        lam, guard, shift = self._lam, self._parameters.guard, self._shift
        alphas = min(0.98 * math.pi / shift, 40.0) * _ALPHAS
        self._alphas = alphas
        self._penalty = alphas * alphas / 2
        if not self._removing:
            self._penalty = self._penalty - guard * np.log(np.cos(np.minimum(alphas * (shift / 2), 0.49 * math.pi)))
        needed = self._penalty + largest_u * shift * alphas + math.log(4 / accuracy)
        self._step = step = float((2 * math.pi * alphas / needed).max())
        low, high = (-_TAIL, (guard + 1) * shift + _TAIL) if self._removing else (-guard * shift - _TAIL, _TAIL)
        size = math.ceil((high - low) / step) + 1
        if size > _MOST_NODES or high - low > _LONGEST:
            return False
        self._y = y = low + step * np.arange(size, dtype=np.float64)
        if shift * float(y[-1]) - shift * shift / 2 > 30:
            return False
        excess = self._rate * np.expm1(shift * y - shift * shift / 2)
        self._excess, self._loss, self._square = excess, np.log1p(excess), y * y
        ends = shift * np.array([low, high]) - shift * shift / 2
        self._ends = self._rate * np.expm1(np.minimum(ends, 600.0)), np.array([low * low, high * high]) / 2
        self._base = self._square * -0.5 + (math.log(step) - _LOG_NORMAL)
        return lam > 0

    def _disc(self, u: FloatArray) -> FloatArray:
        """Discretization error of φ at each u, relative to e^{K(λ)}; the penalty is the guard's, the larger one."""
        fixed = self._penalty + (math.log(4) - 2 * math.pi / self._step * self._alphas)
        return np.exp(np.minimum((fixed[:, None] + np.multiply.outer(self._shift * self._alphas, u)).min(axis=0), 0.0))

    def _summed(self) -> bool:
        """K at the line and at its guard, with their errors; the tilted distribution's mean and the rounding of φ."""
        guard = self._parameters.guard
        a = np.array([[self._a], [guard + 1 if self._removing else -guard]])
        exponent = a * self._loss
        if float(exponent.max()) > 500:
            return False
        base = np.exp(self._base)
        growth = base * np.expm1(exponent)
        weights = base + growth
        totals = growth.sum(axis=1)
        if not bool((totals > -0.5).all()):
            return False
        log_mgf = np.log1p(totals)
        # Error of ℓ in units of roundoff: the share of the shifted component times its exponent's size.
        shift, y = self._shift, self._y
        sensitivity = (self._excess + self._rate) / (1 + self._excess) * (shift * np.abs(y) + (shift * shift + 1))
        slack = np.abs(growth) @ (16 + y.size + 4 * self._square)
        moved = 8 * np.abs(a[:, 0]) * (weights @ sensitivity)
        excess, squares = self._ends
        beyond = a * np.log1p(excess) - squares - log_mgf[:, None]
        self._truncation = float(np.exp(np.minimum(beyond, 0.0)).sum()) + 1e-21
        self._disc_zero = float(self._disc(np.zeros(1))[0])
        rounding = (slack + moved) * np.exp(-log_mgf)
        errors = 1.01 * (UNIT_ROUNDOFF * (rounding + np.abs(log_mgf)) + self._disc_zero + self._truncation)
        self._log_mgf, self._guard_mgf = (float(value) for value in np.maximum(log_mgf, 0.0))
        self._error, self._guard_error = (float(value) for value in errors)
        self._base_weights = base
        self._center(weights[0], sensitivity)
        return True

    def _center(self, weights: FloatArray, sensitivity: FloatArray) -> None:
        self._p = p = weights / float(weights.sum())
        loss = self._loss if self._removing else -self._loss
        self._mean = float(p @ loss)
        self._centered = centered = loss - self._mean
        size = np.abs(centered)
        # A sum in any order errs by at most one unit for each term.
        relative = (16 * abs(self._a)) * sensitivity + 8 * self._square + (48 + p.size)
        terms = relative * size + 8 * sensitivity + 4 * size
        self._rounding = UNIT_ROUNDOFF * (float(p @ terms) + float(p @ size) * float(p @ relative))

    def _cutoff(self, scale: float, wanted: float) -> float | None:
        """The first of a few multiples of `scale` where the bound on |φ| for all larger u is small enough."""
        shift, lam, count = self._shift, self._lam, self._count
        quarter = math.pi / (2 * shift)
        slope = math.sqrt(self._parameters.variance / count)
        beta = np.minimum(_SHIFTS * (scale * slope), 0.72 * min(quarter, 12.0))[:, None]
        hit = self._excess + self._rate
        real, imaginary = (1 - self._rate) + hit * np.cos(shift * beta), hit * np.sin(shift * beta)
        modulus = real * real + imaginary * imaginary
        if not float(modulus.min()) > 1e-12:
            return None
        sizes = (self._base_weights * np.exp(beta * beta / 2 - self._log_mgf)) * modulus ** (self._a / 2)
        angles = np.abs(np.arctan2(imaginary, real))
        errors = self._shifted_errors(beta[:, 0], quarter)
        u = scale * _STRETCH
        totals = (sizes * np.exp(-u[:, None, None] * angles)).sum(axis=2) * (1 + 1e-12) + errors
        decay = np.minimum(np.log(totals.min(axis=1)) + self._error, 0.0)
        tails = count * (self._log_mgf + self._error) + count * decay - np.log(u)
        found = np.flatnonzero(tails < wanted)
        if not found.size:
            return None
        self._log_tail = float(tails[found[0]]) - math.log(math.pi)
        self._spacing = 2 * math.pi / self._parameters.period
        self._lowest_u = float(u[found[0]])
        return self._lowest_u if lam > 0 else None

    def _shifted_errors(self, beta: FloatArray, quarter: float) -> FloatArray:
        """Discretization and truncation of the shifted integrals."""
        width = np.minimum(0.98 * (quarter - beta), 2 * math.pi / self._step)
        exponent = (beta * beta + width * width) / 2
        cut = beta * beta / 2
        if not self._removing:
            exponent = exponent - self._lam * np.log(np.cos(self._shift / 2 * (beta + width)))
            cut = cut - self._lam * np.log(np.cos(self._shift / 2 * beta))
        discretized = np.exp(np.minimum(0.0, exponent + math.log(4) - 2 * math.pi / self._step * width))
        return discretized + self._truncation * np.exp(np.minimum(700.0, cut))

    def _evaluated(self, cutoff: float) -> bool:
        """φ^T/(s(s+1)) on the line, and everything that may be wrong with it."""
        nodes = math.ceil(cutoff / self._spacing) + 1
        if nodes > _MOST_NODES:
            return False
        count, lam = self._count, self._lam
        u = self._spacing * np.arange(nodes, dtype=np.float64)
        # e^{ix} − 1 = 2t(i − t)/(1 + t²) with t = tan(x/2): one transcendental, and relative accuracy at small x.
        tangent = np.tan(np.multiply.outer(u / 2, self._centered))
        ratio = tangent / (1 + tangent * tangent)
        real, imaginary = -2 * ((tangent * ratio) @ self._p), 2 * (ratio @ self._p)
        square = real * (2 + real) + imaginary * imaginary
        if not float(square.min()) > -0.75:
            return False
        log_modulus, phase = np.log1p(square) / 2, np.arctan2(imaginary, 1 + real)
        radius = 1.01 * (self._disc(u) + (2 * self._truncation + self._disc_zero) + self._rounding * u)
        radius[0] = 0.0
        grown = count * np.log1p(radius * np.exp(-log_modulus))
        if not float(grown.max()) < 1:
            return False
        s = lam + 1j * u
        log_kernel: ComplexArray = -np.log(s * (s + 1))
        self._u, self._s = u, s
        self._node: ComplexArray = (count * log_modulus + log_kernel.real) + 1j * (count * phase + log_kernel.imag)
        weight = np.full(nodes, 2 / self._parameters.period)
        weight[0] /= 2
        self._weight = weight
        size = weight * np.exp(self._node.real)
        noise = count * (np.abs(log_modulus) + np.abs(phase)) + np.abs(log_kernel)
        self._sums = float(size.sum()), float(size @ noise), float(size @ u), float(size @ np.expm1(grown))
        return True

    # ── asked ───────────────────────────────────────────────────────────────────────────────────────────────

    def value(self, epsilon: float) -> tuple[float, float]:
        """δ without its error, and dδ/dε."""
        scale = math.exp(min(self._count * self._log_mgf - self._lam * epsilon, 700.0))
        node: ComplexArray = self._weight * np.exp(self._node + (1j * (self._count * self._mean - epsilon)) * self._u)
        return scale * float(node.real.sum()), -scale * float((self._s * node).real.sum())

    def bounds(self, epsilon: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Certified [δ_lower, δ_upper] at each ε."""
        count, lam, period = self._count, self._lam, self._parameters.period
        log_mgf, mean = count * self._log_mgf, count * self._mean
        scale = np.exp(np.minimum(log_mgf - lam * epsilon, 700.0))
        node: ComplexArray = np.exp(self._node + 1j * np.multiply.outer(mean - epsilon, self._u))
        value = scale * (node.real @ self._weight)
        size, noise, phase, moved = self._sums
        rounding = UNIT_ROUNDOFF * (
            (_NOISE + self._u.size) * size + 8 * noise + 4 * (abs(mean) + np.abs(epsilon)) * phase
        )
        common = count * self._error + UNIT_ROUNDOFF * (8 + 4 * log_mgf + 4 * lam * np.abs(epsilon))
        inner = 1.02 * scale * (rounding + moved)
        numeric = inner + 1.02 * np.expm1(np.minimum(common, 700.0)) * (np.abs(value) + inner)
        above = numeric + np.exp(np.minimum(self._log_tail - lam * epsilon, 0.0))
        gap = self._parameters.guard - lam
        right = count * (self._guard_mgf + self._guard_error) - self._parameters.guard * epsilon - gap * period
        alias = math.exp(-lam * period) / -math.expm1(-lam * period)
        alias = alias + np.exp(np.minimum(right, 0.0)) / -math.expm1(-gap * period)
        return np.maximum(value - above - alias, 0.0), np.minimum(value + above, 1.0)


def _inverted(line: EqualStepsIntegral, epsilon: float, delta: float) -> tuple[float, float] | None:
    """Newton on log δ from the saddle point's ε, then both ends by evaluating the certified curve."""
    slope = -1.0
    for _ in range(12):
        value, slope = line.value(epsilon)
        if not value > 0 or not slope < 0:
            return None
        move = math.log(value / delta) * value / slope
        epsilon -= move
        if abs(move) < 1e-12 * epsilon:
            break
    else:
        return None
    if not epsilon > 1e-6:
        return None
    low, high = line.bounds(np.array([epsilon]))
    reach = 1.1 * max(float(high[0]) - delta, delta - float(low[0])) / -slope + 8 * math.ulp(epsilon)
    ends = np.array([epsilon - reach, epsilon + reach])
    low, high = line.bounds(ends)
    if float(low[0]) >= delta and float(high[1]) <= delta and ends[0] > 0:
        return float(ends[0]), float(ends[1])
    return None
