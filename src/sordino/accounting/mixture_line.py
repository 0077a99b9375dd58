"""The moment generating function of a Gaussian-mixture loss by the trapezoid rule, with its error (floor 1).

E_P[e^{sL}] = ∫ φ(y) w_P(y)^{s+1} w_Q(y)^{−s} dy. The integrand is analytic for |Im y| < π/spread, so that the
trapezoid rule of step h converges geometrically (Trefethen and Weideman 2014, theorem 5.1): on Im y = α its
modulus is at most φ(y)e^{α²/2} w_P^{λ+1} w_Q^{−λ} · cos(Δ_Q α/2)^{−λ} · e^{|u| D α}, because

    |w_P(y+iα)| ≤ w_P(y),   |w_Q(y+iα)| ≥ w_Q(y) cos(Δ_Q α/2),   |arg w_P − arg w_Q| ≤ D α,

which integrates to e^{K(λ)} times a constant. Relative to e^{K(λ)} the error is therefore at most

    2 e^{α²/2 + |u|Dα} cos(Δ_Q α/2)^{−λ} / (e^{2πα/h} − 1)      for every admissible α.

The range of y is cut where the integrand's mass is below 1e-20 (proved by posterior means that are monotone in
y), and rounding is bounded term by term. All three errors are added.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sordino.accounting.mixtures import FloatArray, MixturePair
from sordino.accounting.transforms import UNIT_ROUNDOFF, ComplexArray, Moments
from sordino.errors import AccountingError

__all__ = ["MixtureLine", "MixtureTransform"]

_TAIL = 9.6  # P(N(0,1) > 9.6) < 5e-22
_LOG_TAIL = 46.0
_PANELS = 512
_LONG = 80.0
_LARGEST_GRID = 400_000
_CHUNK = 1 << 19
_SUMMATION = 64.0  # units of roundoff of a pairwise sum of up to 400 000 terms (and of the weights' products)


@dataclass(frozen=True)
class MixtureTransform:
    """K(s) of one direction of one step with Gaussian-mixture pair."""

    pair: MixturePair

    @property
    def largest_loss(self) -> float:
        """Bounded only when the loss saturates: P is N(0,1) alone, so L ≤ −log(weight of Q at 0)."""
        if self.pair.upper.parts:
            return math.inf
        rest = 1 - math.fsum(part.weight for part in self.pair.lower.parts)
        return -math.log(rest) if rest > 0 else math.inf

    def moments(self, lam: float) -> Moments:
        """K, K', K'' at λ, to near machine precision."""
        return MixtureLine(pair=self.pair, lam=lam, largest_u=0.0, tolerance=1e-17).moments

    def line(self, lam: float, largest_u: float, tolerance: float) -> "MixtureLine":
        """The line at λ."""
        return MixtureLine(pair=self.pair, lam=lam, largest_u=largest_u, tolerance=tolerance)


@dataclass(frozen=True, kw_only=True)
class MixtureLine:
    """The trapezoid nodes at λ, fine enough for |u| ≤ `largest_u`."""

    pair: MixturePair
    lam: float
    largest_u: float
    tolerance: float

    # ── the nodes ──────────────────────────────────────────────────────────────────────────────────────────

    @cached_property
    def _alphas(self) -> FloatArray:
        limit = 0.98 * math.pi / self.pair.spread
        return np.minimum(limit, 40.0) * np.linspace(0.04, 1.0, 25)

    @cached_property
    def _penalty(self) -> FloatArray:
        """α²/2 − λ log cos(Δ_Q α/2) at each candidate α."""
        angle = np.minimum(self.pair.lower.spread * self._alphas / 2, 0.49 * math.pi)
        return self._alphas**2 / 2 - self.lam * np.log(np.cos(angle))

    @cached_property
    def step(self) -> float:
        """The largest h whose discretisation error is below the tolerance at `largest_u`."""
        needed = self._penalty + self.largest_u * self.pair.reach * self._alphas + math.log(4 / self.tolerance)
        return float(np.max(2 * math.pi * self._alphas / needed))

    def discretisation_error(self, u: FloatArray) -> FloatArray:
        """Bound relative to e^{K(λ)} at each u."""
        exponent = (
            math.log(4)
            + self._penalty[:, None]
            + self.pair.reach * self._alphas[:, None] * np.abs(u)[None, :]
            - 2 * math.pi * self._alphas[:, None] / self.step
        )
        return np.exp(np.minimum(np.min(exponent, axis=0), 0.0))

    def _log_weight(self, y: FloatArray) -> tuple[FloatArray, FloatArray]:
        """(λ+1) log w_P − λ log w_Q, and the loss log w_P − log w_Q."""
        upper, lower = self.pair.upper.log_density(y), self.pair.lower.log_density(y)
        return (self.lam + 1) * upper - self.lam * lower, upper - lower

    def _slope(self, y: FloatArray, ahead: FloatArray) -> FloatArray:
        """Upper bound on d/dy log integrand over [y, ahead], as posterior means grow with y."""
        return (
            -y + (self.lam + 1) * self.pair.upper.posterior_mean(ahead) - self.lam * self.pair.lower.posterior_mean(y)
        )

    @cached_property
    def _full_range(self) -> tuple[float, float]:
        """Ends at least `_TAIL` beyond every place where the integrand can have a mode."""
        pair, lam = self.pair, self.lam
        low = (lam + 1) * pair.upper.lowest - lam * pair.lower.highest
        high = (lam + 1) * pair.upper.highest - lam * pair.lower.lowest
        return min(low, 0.0) - _TAIL, max(high, 0.0) + _TAIL

    @cached_property
    def _range(self) -> tuple[float, float, float]:
        """Where the nodes lie, and the log of a bound on the integrand's mass between there and the full range."""
        low, high = self._full_range
        return self._trimmed(low, high) if high - low > _LONG else (low, high, -math.inf)

    def _trimmed(self, low: float, high: float) -> tuple[float, float, float]:
        edges = np.linspace(low, high, _PANELS + 1)
        log_f = self._log_weight(edges)[0] - edges**2 / 2 - math.log(2 * math.pi) / 2
        width = edges[1] - edges[0]
        rise = np.maximum(self._slope(edges[:-1], edges[1:]), 0.0) * width  # log f rises no more than this in a panel
        bound = log_f[:-1] + rise + math.log(width + 1)  # nodes of step ≤ 1 included
        inner = (edges[:-1] < _TAIL) & (edges[1:] > -_TAIL)
        keep = (bound > max(0.0, float(np.max(log_f))) - _LOG_TAIL - math.log(_PANELS)) | inner
        first, last = int(np.argmax(keep)), _PANELS - int(np.argmax(keep[::-1]))
        removed = np.concatenate([bound[:first], bound[last:]])
        if not removed.size:
            return low, high, -math.inf
        peak = float(np.max(removed))
        return float(edges[first]), float(edges[last]), peak + math.log(float(np.sum(np.exp(removed - peak))))

    @cached_property
    def _nodes(self) -> FloatArray:
        low, high, _ = self._range
        count = math.ceil((high - low) / self.step) + 1
        if count > _LARGEST_GRID:
            raise AccountingError(
                f"the loss's quadrature must need ≤ {_LARGEST_GRID} nodes, got {count}. Use the rdp accountant."
            )
        return low + self.step * np.arange(count, dtype=np.float64)

    @cached_property
    def _tilted(self) -> tuple[FloatArray, FloatArray, float, float]:
        """Tilted probabilities π, losses L, K(λ), and the bound on K's error."""
        y = self._nodes
        exponent, loss = self._log_weight(y)
        log_base = -(y**2) / 2 + math.log(self.step / math.sqrt(2 * math.pi))
        total_exponent = exponent + log_base
        peak = float(np.max(total_exponent))
        if peak < 600:
            base = np.exp(log_base)
            growth = np.where(exponent < 1, base * np.expm1(np.minimum(exponent, 1.0)), np.exp(total_exponent) - base)
            weights = np.exp(total_exponent)
            excess = float(np.sum(growth))
            log_mgf, size = math.log1p(excess), 1 + excess
            slack = float(np.sum(np.abs(growth) * (_SUMMATION + 4 * y**2)))
            moved = float(np.sum(weights * self._exponent_error(y)))
            rounding = UNIT_ROUNDOFF * (slack + moved) / size
        else:
            weights = np.exp(total_exponent - peak)
            size = float(np.sum(weights))
            log_mgf = peak + math.log(size)
            moved = float(np.sum(weights * (self._exponent_error(y) + 4 * y**2))) / size
            rounding = UNIT_ROUNDOFF * (_SUMMATION + moved + 4 * abs(log_mgf))
        error = rounding + float(self.discretisation_error(np.zeros(1))[0]) + self._truncated(log_mgf)
        return weights / float(np.sum(weights)), loss, log_mgf, 1.01 * error + UNIT_ROUNDOFF * abs(log_mgf)

    def _exponent_error(self, y: FloatArray) -> FloatArray:
        """Error of (λ+1) log w_P − λ log w_Q in units of roundoff."""
        return 8 * ((self.lam + 1) * self._sensitivity(y)[0] + self.lam * self._sensitivity(y)[1])

    def _sensitivity(self, y: FloatArray) -> tuple[FloatArray, FloatArray]:
        return self.pair.upper.loss_sensitivity(y), self.pair.lower.loss_sensitivity(y)

    def _truncated(self, log_mgf: float) -> float:
        """Mass of the integrand and of N(0,1) outside the nodes' range, relative to e^{K} ≥ 1."""
        ends = np.array(self._full_range)
        # Beyond a full end, which lies _TAIL past every mode, log f falls with slope ≤ −_TAIL: mass ≤ f(end)/_TAIL.
        beyond = np.append(self._log_weight(ends)[0] - ends**2 / 2, self._range[2])
        return float(np.sum(np.exp(np.minimum(beyond - log_mgf, 0.0)))) + 1e-21

    @cached_property
    def _truncation(self) -> float:
        return self._truncated(self.moments.log_mgf)

    # ── what the accountant asks for ────────────────────────────────────────────────────────────────────────

    @property
    def moments(self) -> Moments:
        """K(λ), its error, K'(λ), K''(λ)."""
        return self._moments

    @cached_property
    def _moments(self) -> Moments:
        weights, loss, log_mgf, error = self._tilted
        mean = float(np.sum(weights * loss))
        return Moments(
            log_mgf=max(0.0, log_mgf), error=error, mean=mean, variance=float(np.sum(weights * (loss - mean) ** 2))
        )

    @property
    def size(self) -> int:
        """Number of nodes in y."""
        return self._nodes.size

    @cached_property
    def _rounding_rate(self) -> float:
        """Rounding of φ_c(u) is at most this times u: weights, losses and sums, term by term."""
        weights, loss, _, _ = self._tilted
        y = self._nodes
        centred = np.abs(loss - self.moments.mean)
        upper, lower = self._sensitivity(y)
        relative = 2 * (self._exponent_error(y) + 4 * y**2 + 8) + _SUMMATION
        spread = float(np.sum(weights * centred))
        terms = weights * (relative * centred + 8 * (upper + lower) + 2 * centred)
        return UNIT_ROUNDOFF * (float(np.sum(terms)) + spread * float(np.sum(weights * relative)))

    def characteristic(self, u: FloatArray) -> tuple[ComplexArray, FloatArray]:
        """Log φ_c(u) through φ_c − 1 = Σ π (−2 sin²(uL/2) + i sin(uL)), which keeps relative accuracy near u = 0."""
        weights, loss, _, _ = self._tilted
        significant = weights > 1e-24  # dropping the rest moves φ by less than 1e-24 × nodes
        weights, centred = weights[significant], (loss - self.moments.mean)[significant]
        real, imaginary = np.empty_like(u), np.empty_like(u)
        rows = max(1, _CHUNK // max(1, weights.size))
        for start in range(0, u.size, rows):
            half = np.multiply.outer(u[start : start + rows] / 2, centred)
            sine = np.sin(half)
            real[start : start + rows] = -2 * np.sum(weights * sine * sine, axis=1)
            imaginary[start : start + rows] = 2 * np.sum(weights * sine * np.cos(half), axis=1)
        excess = real * (2 + real) + imaginary * imaginary
        small = np.log(np.maximum(np.hypot(1 + real, imaginary), 1e-300))
        log_modulus = np.where(excess > -0.75, np.log1p(np.maximum(excess, -0.75)) / 2, small)
        log_phi = log_modulus + 1j * np.arctan2(imaginary, 1 + real)
        dropped = 2e-24 * self._nodes.size
        fixed = 2 * self._truncation + dropped + float(self.discretisation_error(np.zeros(1))[0])
        error = self.discretisation_error(u) + np.where(u > 0, fixed, 0.0) + self._rounding_rate * u
        return log_phi, np.where(u > 0, 1.01 * error, 0.0)

    def decay(self) -> Callable[[float], float]:
        """Shift the contour of y by iβ, against the sign of u: |φ(u)| ≤ E[… e^{−u|arg|}], which falls with u."""
        sign = 1.0 if self.pair.rises else -1.0
        quarter = math.pi / (2 * self.pair.spread)
        y, rows = self._nodes, []
        base = -(y**2) / 2 + math.log(self.step / math.sqrt(2 * math.pi)) - self.moments.log_mgf
        for beta in 0.72 * min(quarter, 12.0) * np.geomspace(0.003, 1.0, 12):
            log_p, arg_p = self.pair.upper.log_density_off_axis(y, sign * float(beta))
            log_q, arg_q = self.pair.lower.log_density_off_axis(y, sign * float(beta))
            log_size = base + beta * beta / 2 + (self.lam + 1) * log_p - self.lam * log_q
            rows.append((log_size, np.abs(arg_p - arg_q), self._decay_error(float(beta), quarter)))
        sizes = np.exp(np.minimum(np.array([row[0] for row in rows]), 700.0))
        angles = np.array([row[1] for row in rows])
        errors = np.array([row[2] for row in rows])

        def bound(u: float) -> float:
            totals = np.sum(sizes * np.exp(-u * angles), axis=1) * (1 + 1e-12) + errors
            return min(0.0, math.log(float(np.min(totals))))

        return bound

    def _decay_error(self, beta: float, quarter: float) -> float:
        """Discretisation of the shifted integral: its own strip has half-width π/(2·spread) − β."""
        width = min(0.98 * (quarter - beta), 2 * math.pi / self.step)
        angle = self.pair.lower.spread * (beta + width) / 2
        exponent = (beta * beta + width * width) / 2 - self.lam * math.log(math.cos(angle))
        cut = beta * beta / 2 - self.lam * math.log(math.cos(self.pair.lower.spread * beta / 2))
        discretised = math.exp(min(0.0, exponent + math.log(4) - 2 * math.pi * width / self.step))
        return discretised + self._truncation * math.exp(min(700.0, cut))
