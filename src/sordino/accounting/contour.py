"""The default accountant: δ(ε) as one integral over a vertical line, with a bound on every error.

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

from sordino.accounting.base import Accountant, EventCounts, worst_direction
from sordino.accounting.closed_form import (
    HitCounts,
    gaussian_delta,
    gaussian_epsilon,
    sampled_gaussian_delta,
    sampled_gaussian_epsilon,
)
from sordino.accounting.contour_equal_steps import equal_steps_epsilon
from sordino.accounting.dominating_pairs import dominating_pairs
from sordino.accounting.event_mgfs import mgf_directions
from sordino.accounting.mgf import (
    UNIT_ROUNDOFF,
    CharacteristicFunction,
    ComplexArray,
    RepeatedMGF,
    SaddlePoint,
    choose_contour,
    evaluate_saddle_point,
    saddle_for_delta,
    saddle_for_epsilon,
    subsample_steps,
)
from sordino.accounting.pld_mechanisms import GaussianMixturePLD
from sordino.definitions import NeighboringRelation
from sordino.errors import AccountingError
from sordino.events import Gaussian, PoissonSampled

# Relative error of δ aimed at, and the largest work (nodes in u × nodes in y, over all steps) spent on it.
_ATTEMPTS = ((1e-11, 4e6), (1e-9, 6e7), (1e-7, 3e8))
_ROUGH = 1e-4  # the same, where δ is only compared with a target
_SMALLEST_LOG_DELTA = -740.0
_NOISE = 24.0  # units of roundoff of the last sum and of exponentials
_LARGEST_LINE = 4_000_000


class ContourIntegral:
    """All steps on one vertical line: δ(ε) with its error for any ε near the one it was set up for.

    Args:
        steps: transforms with counts.
        start: the sums at a λ near the saddle.
        epsilon: the ε around which tolerances are set.
        log_delta: about the log of δ there.
        tolerance: relative error of δ aimed at; the error certified is computed, not assumed.
        work: refuse beyond this many operations.

    Raises:
        AccountingError: the integral would need more work.
    """

    def __init__(
        self,
        steps: Sequence[RepeatedMGF],
        start: SaddlePoint,
        epsilon: float,
        log_delta: float,
        *,
        tolerance: float,
        work: float,
    ) -> None:
        goal = math.log(tolerance) + log_delta
        at, self._period, guard = choose_contour(subsample_steps(steps), start, epsilon, goal)
        self.lam = at.lam
        # φ must be known relative to δ, not to the integrand: far below Chernoff's bound the integral cancels.
        cancelled = math.exp(max(-40.0, min(0.0, log_delta - at.exponent(epsilon))))
        self._accuracy = max(1e-22, 1e-3 * tolerance * cancelled / sum(step.count for step in steps))
        wanted = goal + self.lam * epsilon - at.log_mgf + math.log(math.pi)
        cutoff = self._cutoff(subsample_steps(steps), at, wanted, work)
        self._lines = self._build(steps, cutoff)
        self._refuse(sum(line.size for line in self._lines) * cutoff * self._period / (2 * math.pi), work)
        self._guard = evaluate_saddle_point(steps, guard, certified=True)
        moments = [(step.count, line.moments) for step, line in zip(steps, self._lines, strict=True)]
        self._log_mgf = math.fsum(count * m.log_mgf for count, m in moments)
        self._error = math.fsum(count * m.error for count, m in moments)
        self._mean = math.fsum(count * m.mean for count, m in moments)
        decay = math.fsum(step.count * line.decay()(cutoff) for step, line in zip(steps, self._lines, strict=True))
        # The bound on the tail, without e^{−λε}.
        self._log_tail = self._log_mgf + self._error + decay - math.log(math.pi * cutoff)
        self._evaluate(steps, cutoff)

    # ── where to stop ───────────────────────────────────────────────────────────────────────────────────────

    def _build(self, steps: Sequence[RepeatedMGF], cutoff: float) -> list[CharacteristicFunction]:
        return [step.loss.line(self.lam, 1.0001 * cutoff, self._accuracy) for step in steps]

    def _cutoff(self, steps: Sequence[RepeatedMGF], at: SaddlePoint, wanted: float, work: float) -> float:
        """The smallest multiple of the spacing, within 15 %, whose tail bound is below e^{wanted}."""
        spacing = 2 * math.pi / self._period
        cutoff = max(spacing, 5.0 / math.sqrt(at.curvature))
        bounds = [line.decay() for line in self._build(steps, cutoff)]

        def log_tail(u: float) -> float:
            return math.fsum(step.count * bound(u) for step, bound in zip(steps, bounds, strict=True)) - math.log(u)

        growth = 1.8
        while growth > 1.1:
            while log_tail(cutoff) > wanted:
                self._refuse(8 * cutoff / spacing, work)
                cutoff *= growth
            if cutoff <= max(spacing, 5.0 / math.sqrt(at.curvature)) * 1.0001:
                break
            cutoff, growth = cutoff / growth * math.sqrt(growth), math.sqrt(growth)
        while log_tail(cutoff) > wanted:
            cutoff *= 1.1
        return spacing * math.ceil(cutoff / spacing)

    @staticmethod
    def _refuse(needed: float, work: float) -> None:
        if needed > work or needed > 64.0 * _LARGEST_LINE * 1024:
            raise AccountingError(
                f"the contour integral must need ≤ {work:.0e} operations, got {needed:.0e}: the loss's characteristic "
                "function decays too slowly. Use the pld or rdp accountant."
            )

    # ── the integrand on the line ───────────────────────────────────────────────────────────────────────────

    def _evaluate(self, steps: Sequence[RepeatedMGF], cutoff: float) -> None:
        spacing = 2 * math.pi / self._period
        u = spacing * np.arange(round(cutoff / spacing) + 1, dtype=np.float64)
        log_phi = np.zeros(u.size, dtype=np.complex128)
        grown, noise = np.zeros(u.size), np.zeros(u.size)
        for step, line in zip(steps, self._lines, strict=True):
            value, radius = line.characteristic(u)
            log_phi += step.count * value
            grown += step.count * np.log1p(np.minimum(radius / np.maximum(np.exp(value.real), 1e-300), 1e300))
            noise += step.count * np.abs(value)
        s = self.lam + 1j * u
        log_kernel = -np.log(s) - np.log1p(s)
        self._u, self._s, self._log_node = u, s, log_phi + log_kernel
        self._weight = np.full(u.size, 2 / self._period)
        self._weight[0] /= 2
        size = np.exp(self._log_node.real)
        far = np.exp(np.minimum(self._log_node.real + grown, 700.0)) - size
        moved = np.where(grown < 1, size * np.expm1(np.minimum(grown, 1.0)), far)
        self._transform_error = float(np.sum(self._weight * moved))
        self._size_sum = float(np.sum(self._weight * size))
        self._noise_sum = float(np.sum(self._weight * size * (noise + np.abs(log_kernel))))
        self._phase_sum = float(np.sum(self._weight * size * u))

    def __call__(self, epsilon: float) -> tuple[float, float, float, float]:
        """δ's value, the error above it, the error below it, and the slope dδ/dε."""
        scale = math.exp(min(self._log_mgf - self.lam * epsilon, 700.0))
        node: ComplexArray = np.exp(self._log_node + 1j * self._u * (self._mean - epsilon))
        value = scale * float(np.sum(self._weight * node.real))
        slope = -scale * float(np.sum(self._weight * (self._s * node).real))
        rounding = UNIT_ROUNDOFF * (
            _NOISE * self._size_sum + 8 * self._noise_sum + 4 * (abs(self._mean) + abs(epsilon)) * self._phase_sum
        )
        # e^{K(λ) − λε} is a factor of the whole sum: its error is relative to the value, not to the integrand.
        common = self._error + UNIT_ROUNDOFF * (8 + 4 * abs(self._log_mgf) + 4 * abs(self.lam * epsilon))
        inner = 1.02 * scale * (rounding + self._transform_error)
        numeric = inner + 1.02 * math.expm1(min(common, 700.0)) * (abs(value) + inner)
        tail = math.exp(min(self._log_tail - self.lam * epsilon, 0.0))
        return value, numeric + tail, numeric + tail + self._alias(epsilon), slope

    def _alias(self, epsilon: float) -> float:
        guard, period = self._guard, self._period
        left = math.exp(-self.lam * period) / -math.expm1(-self.lam * period)
        gap = guard.lam - self.lam
        right = guard.log_mgf + guard.error - guard.lam * epsilon - gap * period
        return left + math.exp(min(right, 0.0)) / -math.expm1(-gap * period)

    def bounds(self, epsilon: float) -> tuple[float, float]:
        """Certified [δ_lower, δ_upper] at ε."""
        value, above, below, _ = self(epsilon)
        return min(1.0, max(0.0, value - below)), min(1.0, max(0.0, value + above))

    @property
    def nodes(self) -> int:
        """Number of points on the line."""
        return self._u.size


# ── one direction ───────────────────────────────────────────────────────────────────────────────────────────


def _line(steps: Sequence[RepeatedMGF], start: SaddlePoint, epsilon: float, log_delta: float) -> ContourIntegral:
    refusal: AccountingError | None = None
    for tolerance, work in _ATTEMPTS:
        try:
            return ContourIntegral(steps, start, epsilon, log_delta, tolerance=tolerance, work=work)
        except AccountingError as error:
            refusal = error
    assert refusal is not None
    raise refusal


def contour_delta(steps: Sequence[RepeatedMGF], epsilon: float) -> tuple[float, float]:
    """Certified bounds on δ(ε) of one direction, for ε ≥ 0."""
    if math.fsum(step.count * step.loss.largest_loss for step in steps) <= epsilon:
        return 0.0, 0.0
    start = saddle_for_epsilon(subsample_steps(steps), epsilon)
    if start.exponent(epsilon) < _SMALLEST_LOG_DELTA:
        certain = evaluate_saddle_point(steps, start.lam, certified=True)
        if certain.log_mgf + certain.error - certain.lam * epsilon < -690:  # Chernoff: δ ≤ e^{K(λ)−λε}
            return 0.0, 1e-299
    log_delta = start.log_delta(epsilon)
    bounds = 0.0, 1.0
    for _ in range(3):
        bounds = _line(steps, start, epsilon, log_delta).bounds(epsilon)
        if bounds[1] - bounds[0] < 1e-6 * bounds[1] or bounds[1] <= 0:
            break
        log_delta = min(math.log(bounds[1]), log_delta) - 3.0
    return bounds


def contour_epsilon(steps: Sequence[RepeatedMGF], delta: float) -> tuple[float, float]:
    """Certified bounds on the smallest ε ≥ 0 with δ(ε) ≤ `delta`, 0 < `delta` < 1, of one direction."""
    start = saddle_for_delta(subsample_steps(steps), delta)
    epsilon, log_delta = start.epsilon, math.log(delta)
    if epsilon < 1e-3 or delta > 0.05:
        at_zero = contour_delta(steps, 0.0)
        if at_zero[1] <= delta:
            return 0.0, 0.0
    line = _line(steps, start, epsilon, log_delta)
    for _ in range(2):
        epsilon = _root(line, epsilon, delta)
        value, _, below, _ = line(epsilon)
        if below < 1e-7 * value:
            break
        line = _line(steps, start, epsilon, log_delta)
    return _lower_end(line, epsilon, delta), _upper_end(line, epsilon, delta)


def certifies_delta_bound(steps: Sequence[RepeatedMGF], epsilon: float, delta: float) -> bool:
    """Whether Chernoff's bound or one line with a rough goal proves δ(ε) ≤ `delta`; False says nothing."""
    if epsilon <= 0 or not math.isfinite(epsilon):
        return False
    start = saddle_for_epsilon(subsample_steps(steps), epsilon)
    try:
        lam, certain = start.lam, evaluate_saddle_point(steps, start.lam, certified=True)
        # (1 − e^{−x}) ≤ λ^λ/(λ+1)^{λ+1} e^{λx}
        best = certain.log_mgf + certain.error - lam * epsilon - lam * math.log1p(1 / lam) - math.log1p(lam)
        if best < math.log(delta) - 1e-9:
            return True
        line = ContourIntegral(steps, start, epsilon, math.log(delta), tolerance=_ROUGH, work=_ATTEMPTS[0][1])
    except AccountingError:
        return False
    return line.bounds(epsilon)[1] <= delta


def _root(line: ContourIntegral, epsilon: float, delta: float) -> float:
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


def _upper_end(line: ContourIntegral, epsilon: float, delta: float) -> float:
    _, above, _, slope = line(epsilon)
    if slope >= 0:
        raise AccountingError("ε must be boundable at this δ, got one beyond double precision. Use more noise.")
    reach = 1.05 * above / -slope + 4 * math.ulp(abs(epsilon) + 1e-12)
    for _ in range(60):
        if line.bounds(epsilon + reach)[1] <= delta:
            return max(0.0, epsilon + reach)
        reach *= 2
    raise AccountingError("ε must be boundable at this δ, got an error larger than δ. Use the pld or rdp accountant.")


def _lower_end(line: ContourIntegral, epsilon: float, delta: float) -> float:
    _, _, below, slope = line(epsilon)
    if slope >= 0:
        return 0.0
    reach = 1.05 * below / -slope + 4 * math.ulp(abs(epsilon) + 1e-12)
    for _ in range(60):
        if epsilon - reach <= 0:
            return 0.0
        if line.bounds(epsilon - reach)[0] >= delta:
            return epsilon - reach
        reach *= 2
    return 0.0


# ----------------------------------------------------------------------------------------------------------------------
# The contour, closed-form and Rényi accountants: events in, intervals out.
# ----------------------------------------------------------------------------------------------------------------------


_REPLACE = NeighboringRelation.REPLACE_ONE


def _equal_steps(
    flat: EventCounts, delta: float, neighboring_relation: NeighboringRelation
) -> tuple[float, float] | None:
    """The short way for one kind of Poisson-sampled Gaussian step, where it holds."""
    if len(flat.counts) != 1 or neighboring_relation is _REPLACE:
        return None
    event, count = flat.counts[0]
    if not isinstance(event, PoissonSampled) or not isinstance(event.event, Gaussian):
        return None
    return equal_steps_epsilon(event.sample_rate, 1 / event.event.noise_multiplier, count, delta)


@dataclass(frozen=True, kw_only=True)
class _ContourSteps:
    """What `ContourAccountant` needs: the steps, and the transforms of each direction."""

    steps: EventCounts
    neighboring_relation: NeighboringRelation
    sides: tuple[tuple[RepeatedMGF, ...], ...]


class ContourAccountant(Accountant[_ContourSteps]):
    """Contour inversion of the composed loss's moment generating function: certified, tight, the default.

    Guarantee:
        The interval contains the exact ε (δ) of the dominating pair, worst direction; see `contour`.
    """

    name = "contour"

    def prepare(self, steps: EventCounts, neighboring_relation: NeighboringRelation) -> _ContourSteps | None:
        """Sampled and unsampled Gaussians in any number, together with any steps with atoms."""
        sides = mgf_directions(steps, neighboring_relation)
        decays = all(any(step.loss.decays for step in side) for side in sides)
        return _ContourSteps(steps=steps, neighboring_relation=neighboring_relation, sides=sides) if decays else None

    def epsilon_bounds(self, prepared: _ContourSteps, delta: float) -> tuple[float, float]:
        """Removing, and adding where a rough check doesn't show that it costs less."""
        bounds = _equal_steps(prepared.steps, delta, prepared.neighboring_relation)
        if bounds is not None:
            return bounds
        first, *others = prepared.sides
        found = [contour_epsilon(first, delta)]
        found += [
            contour_epsilon(steps, delta) for steps in others if not certifies_delta_bound(steps, found[0][0], delta)
        ]
        return worst_direction(found)

    def delta_bounds(self, prepared: _ContourSteps, epsilon: float) -> tuple[float, float]:
        """Each direction by itself."""
        return worst_direction([contour_delta(steps, epsilon) for steps in prepared.sides])


class ClosedFormAccountant(Accountant[HitCounts | tuple[float, float]]):
    """Exact formulas: Gaussians without sampling, one sampled Gaussian step, equal ones with hardly any noise.

    Guarantee:
        The interval is the formula's value with its rounding error.

    References:
        Balle and Wang 2018, theorem 8; Balle, Barthe and Gaboardi 2018, theorem 8 (one sampled step).
    """

    name = "closed_form"

    def prepare(
        self, steps: EventCounts, neighboring_relation: NeighboringRelation
    ) -> HitCounts | tuple[float, float] | None:
        """Sampling rate and μ of one Gaussian after merging or one Poisson-sampled Gaussian step, or `HitCounts`."""
        if len(steps.counts) != 1:
            return None
        event, count = steps.counts[0]
        if count > 1:
            first = dominating_pairs(event, neighboring_relation)[0]
            return HitCounts.of(first.pair, count) if isinstance(first, GaussianMixturePLD) else None
        match event:
            case Gaussian():
                return 1.0, 1 / event.noise_multiplier
            case PoissonSampled(event=Gaussian() as inner) if neighboring_relation is not _REPLACE:
                return event.sample_rate, 1 / inner.noise_multiplier
            case _:
                return None

    def epsilon_bounds(self, prepared: HitCounts | tuple[float, float], delta: float) -> tuple[float, float]:
        """ε by inverting the closed form."""
        if isinstance(prepared, HitCounts):
            return prepared.epsilon(delta)
        rate, mu = prepared
        return gaussian_epsilon(delta, mu) if rate == 1 else sampled_gaussian_epsilon(delta, rate, mu)

    def delta_bounds(self, prepared: HitCounts | tuple[float, float], epsilon: float) -> tuple[float, float]:
        """δ by the closed form."""
        if isinstance(prepared, HitCounts):
            return prepared.delta(epsilon)
        rate, mu = prepared
        return gaussian_delta(epsilon, mu) if rate == 1 else sampled_gaussian_delta(epsilon, rate, mu)
