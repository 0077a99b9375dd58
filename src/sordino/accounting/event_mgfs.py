"""The moment generating function of a Gaussian-mixture loss by the trapezoid rule, with its error.

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
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from sordino.accounting.base import EventCounts, Repeated
from sordino.accounting.discrete_gaussian import DiscreteGaussianPLD, DiscreteGaussianTransform
from sordino.accounting.dominating_pairs import DominatingPair, composed_pairs
from sordino.accounting.gaussian_mixtures import FloatArray, MixturePair
from sordino.accounting.mgf import (
    UNIT_ROUNDOFF,
    ComplexArray,
    CumulantValues,
    GaussianMGF,
    LaplaceMGF,
    MomentGeneratingFunction,
    RepeatedMGF,
)
from sordino.accounting.pld_mechanisms import DiscretePLD, GaussianMixturePLD, LaplacePLD
from sordino.definitions import NeighboringRelation
from sordino.errors import AccountingError, UnsupportedEvent

_TAIL = 9.6  # P(N(0,1) > 9.6) < 5e-22
_LOG_TAIL = 46.0
_PANELS = 512
_LONG = 80.0
_LARGEST_GRID = 400_000
_CHUNK = 4096
_DIRECT = 20_000
_ROUGH_STEP, _ROUGH_SPREAD, _ROUGH_EXPONENT = 0.3, 2.5, 200.0
_SHIFTS = np.geomspace(0.003, 1.0, 12)
_SUMMATION = 64.0  # units of roundoff of a pairwise sum of up to 400 000 terms (and of the weights' products)


@dataclass(frozen=True)
class GaussianMixtureMGF:
    """K(s) of one direction of one step with Gaussian-mixture pair."""

    pair: MixturePair
    decays: bool = True

    @property
    def largest_loss(self) -> float:
        """Bounded only when the loss saturates: P is N(0,1) alone, so L ≤ −log(weight of Q at 0)."""
        if self.pair.upper.parts:
            return math.inf
        rest = 1 - math.fsum(part.weight for part in self.pair.lower.parts)
        return -math.log(rest) if rest > 1e-12 else math.inf  # a smaller rest may be rounding of the weights

    def moments(self, lam: float, *, certified: bool = True) -> CumulantValues:
        """K, K', K'' at λ, to near machine precision."""
        if not certified:
            rough = self._rough(lam)
            if rough is not None:
                return rough
        line = GaussianMixtureCharacteristicFunction(pair=self.pair, lam=lam, largest_u=0.0, tolerance=1e-17)
        return line.moments if certified else line.steering

    def _rough(self, lam: float) -> CumulantValues | None:
        """The same by one coarse sum, for steering only; None where the range is long or K is huge."""
        pair = self.pair
        low = min((lam + 1) * pair.upper.lowest - lam * pair.lower.highest, 0.0) - _TAIL
        high = max((lam + 1) * pair.upper.highest - lam * pair.lower.lowest, 0.0) + _TAIL
        if high - low > _LONG or pair.spread > _ROUGH_SPREAD:
            return None
        y = low + _ROUGH_STEP * np.arange(math.ceil((high - low) / _ROUGH_STEP) + 1, dtype=np.float64)
        upper, lower = pair.upper.log_density(y), pair.lower.log_density(y)
        exponent, loss = (lam + 1) * upper - lam * lower, upper - lower
        if float(exponent.max()) > _ROUGH_EXPONENT:
            return None
        base = np.exp(y * y * -0.5) * (_ROUGH_STEP / math.sqrt(2 * math.pi))
        growth = base * np.expm1(exponent)
        weights = base + growth
        total = float(weights.sum())
        mean = float(weights @ loss) / total
        centered = loss - mean
        variance = float(weights @ (centered * centered)) / total
        return CumulantValues(
            log_mgf=max(0.0, math.log1p(float(growth.sum()))), error=math.inf, mean=mean, variance=variance
        )

    def line(self, lam: float, largest_u: float, tolerance: float) -> "GaussianMixtureCharacteristicFunction":
        """The line at λ."""
        return GaussianMixtureCharacteristicFunction(pair=self.pair, lam=lam, largest_u=largest_u, tolerance=tolerance)


@dataclass(frozen=True, kw_only=True)
class GaussianMixtureCharacteristicFunction:
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
        """The largest h whose discretization error is below the tolerance at `largest_u`."""
        needed = self._penalty + self.largest_u * self.pair.max_shift * self._alphas + math.log(4 / self.tolerance)
        return float(np.max(2 * math.pi * self._alphas / needed))

    def discretization_error(self, u: FloatArray) -> FloatArray:
        """Bound relative to e^{K(λ)} at each u."""
        exponent = (
            math.log(4)
            + self._penalty[:, None]
            + self.pair.max_shift * self._alphas[:, None] * np.abs(u)[None, :]
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
        """Ends at least `_TAIL` beyond every point where the integrand can have a mode."""
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
    def _log_tilted(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Log of N(0,1)'s weight at each node, (λ+1) log w_P − λ log w_Q, and the loss."""
        y = self._nodes
        exponent, loss = self._log_weight(y)
        return y * y / -2 + math.log(self.step / math.sqrt(2 * math.pi)), exponent, loss

    @cached_property
    def _tilted(self) -> tuple[FloatArray, float, float]:
        """Weights relative to e^{shift}, the shift (0 unless K is huge), and K(λ)."""
        log_base, exponent, _ = self._log_tilted
        total = exponent + log_base
        peak = float(total.max())
        if peak >= 600:
            weights = np.exp(total - peak)
            return weights, peak, peak + math.log(float(weights.sum()))
        return np.exp(total), 0.0, math.log1p(float(self._growth.sum()))

    @cached_property
    def _growth(self) -> FloatArray:
        """Integrand minus N(0,1), accurate where they nearly agree: their difference integrates to e^K − 1."""
        log_base, exponent, _ = self._log_tilted
        near = np.exp(log_base) * np.expm1(np.minimum(exponent, 1.0))
        if float(exponent.max()) < 1:
            return near
        return np.where(exponent < 1, near, np.exp(exponent + log_base) - np.exp(log_base))

    @cached_property
    def _probabilities(self) -> FloatArray:
        weights = self._tilted[0]
        return weights / float(weights.sum())

    @cached_property
    def _error(self) -> float:
        """Bound on the error of K(λ): discretization, truncation and rounding."""
        y = self._nodes
        weights, shift, log_mgf = self._tilted
        if shift == 0:
            slack = float(np.sum(np.abs(self._growth) * (_SUMMATION + 4 * y * y)))
            moved = float(np.sum(weights * self._exponent_error(y)))
            rounding = (slack + moved) * math.exp(-log_mgf)
        else:
            moved = float(np.sum(self._probabilities * (self._exponent_error(y) + 4 * y * y)))
            rounding = _SUMMATION + moved + 4 * abs(log_mgf)
        discretized = float(self.discretization_error(np.zeros(1))[0])
        return 1.01 * (UNIT_ROUNDOFF * (rounding + abs(log_mgf)) + discretized + self._truncation)

    def _exponent_error(self, y: FloatArray) -> FloatArray:
        """Error of (λ+1) log w_P − λ log w_Q in units of roundoff."""
        return 8 * ((self.lam + 1) * self._sensitivity(y)[0] + self.lam * self._sensitivity(y)[1])

    def _sensitivity(self, y: FloatArray) -> tuple[FloatArray, FloatArray]:
        return self.pair.upper.loss_sensitivity(y), self.pair.lower.loss_sensitivity(y)

    @cached_property
    def _truncation(self) -> float:
        """Mass of the integrand and of N(0,1) outside the nodes' range, relative to e^{K} ≥ 1."""
        ends = np.array(self._full_range)
        # Beyond a full end, which lies _TAIL past every mode, log f falls with slope ≤ −_TAIL: mass ≤ f(end)/_TAIL.
        beyond = np.append(self._log_weight(ends)[0] - ends**2 / 2, self._range[2])
        return float(np.sum(np.exp(np.minimum(beyond - self._tilted[2], 0.0)))) + 1e-21

    # ── what the accountant asks for ────────────────────────────────────────────────────────────────────────

    @property
    def steering(self) -> CumulantValues:
        """K(λ), K'(λ), K''(λ) without a bound on K's error."""
        return self._steering

    @cached_property
    def _steering(self) -> CumulantValues:
        weights, (_, _, loss) = self._probabilities, self._log_tilted
        mean = float(np.sum(weights * loss))
        centered = loss - mean
        return CumulantValues(
            log_mgf=max(0.0, self._tilted[2]),
            error=math.inf,
            mean=mean,
            variance=float(np.sum(weights * centered * centered)),
        )

    @property
    def moments(self) -> CumulantValues:
        """K(λ), its error, K'(λ), K''(λ)."""
        return replace(self.steering, error=self._error)

    @property
    def size(self) -> int:
        """Number of nodes in y."""
        return self._nodes.size

    @cached_property
    def _rounding_rate(self) -> float:
        """Rounding of φ_c(u) is at most this times u: weights, losses and sums, term by term."""
        weights, (_, _, loss) = self._probabilities, self._log_tilted
        y = self._nodes
        centered = np.abs(loss - self.steering.mean)
        upper, lower = self._sensitivity(y)
        relative = 2 * (8 * ((self.lam + 1) * upper + self.lam * lower) + 4 * y * y + 8) + _SUMMATION
        spread = float(np.sum(weights * centered))
        terms = weights * (relative * centered + 8 * (upper + lower) + 4 * centered)
        return UNIT_ROUNDOFF * (float(np.sum(terms)) + spread * float(np.sum(weights * relative)))

    def characteristic(self, u: FloatArray) -> tuple[ComplexArray, FloatArray]:
        """Log φ_c by way of φ_c − 1 = Σ π (e^{iu(L−K′)} − 1), which keeps relative accuracy near u = 0."""
        weights, loss = self._probabilities, self._log_tilted[2]
        significant = weights > 1e-24  # dropping the rest moves φ by less than 2e-24 × nodes
        excess, matrix_error = _mean_of_exponentials(weights[significant], (loss - self.steering.mean)[significant], u)
        real, imaginary = excess.real, excess.imag
        square = real * (2 + real) + imaginary * imaginary
        small = np.log(np.maximum(np.hypot(1 + real, imaginary), 1e-300))
        log_modulus = np.where(square > -0.75, np.log1p(np.maximum(square, -0.75)) / 2, small)
        log_phi = log_modulus + 1j * np.arctan2(imaginary, 1 + real)
        dropped = 2e-24 * self._nodes.size
        fixed = 2 * self._truncation + dropped + float(self.discretization_error(np.zeros(1))[0])
        error = self.discretization_error(u) + fixed + self._rounding_rate * u + matrix_error
        return log_phi, np.where(u > 0, 1.01 * error, 0.0)

    def decay(self) -> Callable[[float], float]:
        """Shift the contour of y by iβ, against the sign of u: |φ(u)| ≤ E[… e^{−u|arg|}], which falls with u."""
        sign = 1.0 if self.pair.loss_is_increasing else -1.0
        quarter = math.pi / (2 * self.pair.spread)
        beta = 0.72 * min(quarter, 12.0) * _SHIFTS[:, None]
        y = self._nodes
        log_p, arg_p = self.pair.upper.log_density_off_axis(y, sign * beta)
        log_q, arg_q = self.pair.lower.log_density_off_axis(y, sign * beta)
        base = self._log_tilted[0] - self.steering.log_mgf
        sizes = np.exp(np.minimum(base + beta * beta / 2 + (self.lam + 1) * log_p - self.lam * log_q, 700.0))
        angles = -np.abs(arg_p - arg_q)
        errors = self._decay_errors(beta[:, 0], quarter)

        def bound(u: float) -> float:
            totals = np.sum(sizes * np.exp(u * angles), axis=1) * (1 + 1e-12) + errors
            return min(0.0, math.log(float(totals.min())) + self._error)

        return bound

    def _decay_errors(self, beta: FloatArray, quarter: float) -> FloatArray:
        """Discretization of the shifted integral: its own strip has half-width π/(2·spread) − β."""
        width = np.minimum(0.98 * (quarter - beta), 2 * math.pi / self.step)
        angle = self.pair.lower.spread * (beta + width) / 2
        exponent = (beta * beta + width * width) / 2 - self.lam * np.log(np.cos(angle))
        cut = beta * beta / 2 - self.lam * np.log(np.cos(self.pair.lower.spread * beta / 2))
        discretized = np.exp(np.minimum(0.0, exponent + math.log(4) - 2 * math.pi * width / self.step))
        return discretized + self._truncation * np.exp(np.minimum(700.0, cut))


def _mean_of_exponentials(weights: FloatArray, values: FloatArray, u: FloatArray) -> tuple[ComplexArray, FloatArray]:
    """Σ_k w_k (e^{i u_n v_k} − 1) on the uniform grid u_n = n·u_1, and the matrix product's rounding error.

    With n = aB + b, e^{i(x+y)} − 1 = E_a E_b + E_a + E_b for E = e^{i·} − 1, so that a grid of N points needs sines
    at 2√N points and one matrix product of inner length K. Its error is at most 2(K+8) roundoffs times
    Σ w |E_a||E_b| ≤ (Σ w|E_a|² · Σ w|E_b|²)^{1/2}, and |E|² = −2 Re E.
    """
    if u.size * weights.size <= _DIRECT:
        return _sums(weights, _exponentials_minus_one(u, values)), np.zeros(u.size)
    block = math.ceil(math.sqrt(u.size))
    coarse, fine = u[::block], u[:block]
    product = np.zeros((coarse.size, fine.size), dtype=np.complex128)
    coarse_sum = np.zeros(coarse.size, dtype=np.complex128)
    fine_sum = np.zeros(fine.size, dtype=np.complex128)
    for start in range(0, weights.size, _CHUNK):
        w, v = weights[start : start + _CHUNK], values[start : start + _CHUNK]
        at_coarse, at_fine = _exponentials_minus_one(coarse, v), _exponentials_minus_one(fine, v)
        coarse_sum += _sums(w, at_coarse)
        fine_sum += _sums(w, at_fine)
        product += (at_coarse * w) @ at_fine.T
    scale = 2 * (weights.size + 8) * UNIT_ROUNDOFF
    error = scale * 2 * np.sqrt(np.multiply.outer(np.abs(coarse_sum.real), np.abs(fine_sum.real)))
    total = product + coarse_sum[:, None] + fine_sum[None, :]
    return total.ravel()[: u.size], error.ravel()[: u.size]


def _exponentials_minus_one(u: FloatArray, values: FloatArray) -> ComplexArray:
    """e^{ix} − 1 = 2t(i − t)/(1 + t²) with t = tan(x/2): one transcendental, and relative accuracy at small x."""
    tangent = np.tan(np.multiply.outer(u / 2, values))
    ratio = 2 * tangent / (1 + tangent * tangent)
    terms = np.empty(tangent.shape, dtype=np.complex128)
    terms.real, terms.imag = -tangent * ratio, ratio
    return terms


def _sums(weights: FloatArray, terms: ComplexArray) -> ComplexArray:
    return np.sum(weights * terms, axis=1)


# ----------------------------------------------------------------------------------------------------------------------
# Transforms of losses with finitely many values: randomized response and discrete noise.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DiscreteMGF:
    """K(s) = log Σ p_i e^{s L_i}."""

    pld: DiscretePLD
    decays: bool = False

    @property
    def largest_loss(self) -> float:
        """The largest atom."""
        return self.pld.losses[-1]

    def moments(self, lam: float, *, certified: bool = True) -> CumulantValues:  # noqa: ARG002
        """Exact up to rounding."""
        return DiscreteCharacteristicFunction(pld=self.pld, lam=lam).moments

    def line(self, lam: float, largest_u: float, tolerance: float) -> "DiscreteCharacteristicFunction":  # noqa: ARG002
        """The tilted atoms."""
        return DiscreteCharacteristicFunction(pld=self.pld, lam=lam)


@dataclass(frozen=True, kw_only=True)
class DiscreteCharacteristicFunction:
    """Atoms tilted by e^{λL}."""

    pld: DiscretePLD
    lam: float

    @property
    def size(self) -> int:
        """Number of atoms."""
        return len(self.pld.losses)

    @cached_property
    def _losses(self) -> FloatArray:
        return np.array(self.pld.losses)

    @cached_property
    def _tilted(self) -> tuple[FloatArray, float]:
        exponent = self.lam * self._losses + np.log(np.array(self.pld.masses))
        peak = float(exponent.max())
        weights = np.exp(exponent - peak)
        total = float(weights.sum())
        return weights / total, peak + math.log(total)

    @property
    def moments(self) -> CumulantValues:
        """K(λ), its error, K'(λ), K''(λ)."""
        weights, log_mgf = self._tilted
        mean = float(weights @ self._losses)
        error = UNIT_ROUNDOFF * (64 + 4 * self.size + 8 * self.lam * float(np.max(np.abs(self._losses))))
        variance = float(weights @ (self._losses - mean) ** 2)
        return CumulantValues(log_mgf=max(0.0, log_mgf), error=error, mean=mean, variance=variance)

    def characteristic(self, u: FloatArray) -> tuple[ComplexArray, FloatArray]:
        """Log φ_c by direct summation."""
        weights, _ = self._tilted
        centered = self._losses - self.moments.mean
        phi = np.exp(1j * np.multiply.outer(u, centered)) @ weights.astype(np.complex128)
        reach = float(np.max(np.abs(centered)))
        error = UNIT_ROUNDOFF * (64 + 8 * self.size + 8 * self.lam * reach + 4 * u * reach)
        return np.log(np.where(phi == 0, 1e-300, phi)), error

    def decay(self) -> Callable[[float], float]:
        """Atoms do not decay."""
        return _no_decay


def _no_decay(_: float) -> float:
    return 0.0


# ----------------------------------------------------------------------------------------------------------------------
# The transforms of an event's dominating pairs.
# ----------------------------------------------------------------------------------------------------------------------


def mgf_directions(
    steps: EventCounts, neighboring_relation: NeighboringRelation
) -> tuple[tuple[RepeatedMGF, ...], ...]:
    """The transforms of all steps, once for each direction of the relation.

    Raises:
        UnsupportedEvent: a step has no transform under this relation.
    """
    return tuple(
        tuple(Repeated(pair_mgf(pair), count) for pair, count in side)
        for side in composed_pairs(steps, neighboring_relation)
    )


def pair_mgf(pair: DominatingPair) -> MomentGeneratingFunction:
    """The moment generating function of a pair's loss.

    Raises:
        UnsupportedEvent: it is not known off the real axis, or some loss is infinite.
    """
    match pair:
        case GaussianMixturePLD():
            mixtures = pair.pair
            certain = mixtures.upper.certain or mixtures.lower.certain
            return GaussianMGF(mu=mixtures.max_shift) if certain else GaussianMixtureMGF(mixtures)
        case LaplacePLD():
            return LaplaceMGF(scale=pair.scale)
        case DiscreteGaussianPLD():
            return DiscreteGaussianTransform(stddev=pair.stddev, sensitivity=pair.sensitivity)
        case DiscretePLD() if pair.infinite == 0:
            return DiscreteMGF(pair)
        case _:
            raise UnsupportedEvent(
                "event must have a moment generating function here, got one without. Use the pld or rdp accountant."
            )
