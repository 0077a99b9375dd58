"""Rényi accounting with the order chosen adaptively and the tight conversion; concentrated and Gaussian privacy.

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
from functools import lru_cache

import numpy as np

from sordino import checks
from sordino.accounting.base import Accountant, EventCounts, double_precision, flatten
from sordino.accounting.closed_form import bracket_crossing, gaussian_delta, gaussian_epsilon
from sordino.accounting.discrete_gaussian import DiscreteGaussianPLD, sampled_discrete_gaussian_moments
from sordino.accounting.dominating_pairs import DominatingPair, dominating_pairs, pair_directions
from sordino.accounting.event_mgfs import pair_mgf
from sordino.accounting.gaussian_mixtures import FloatArray
from sordino.accounting.mgf import (
    CharacteristicFunction,
    CumulantValues,
    GaussianMGF,
    MomentGeneratingFunction,
    RepeatedMGF,
    evaluate_saddle_point,
    subsample_steps,
)
from sordino.accounting.pld_discretized import DiscretizedPLD, RandomAllocationPLD, pessimistic_discretization
from sordino.accounting.pld_mechanisms import AveragedPLD, PointwiseMaxPLD, PoissonSampledPLD
from sordino.definitions import NeighboringRelation
from sordino.errors import AccountingError, InvalidArgument, UnsupportedEvent
from sordino.events import (
    BoundedRange,
    DiscreteGaussian,
    DiscreteLaplace,
    Event,
    Gaussian,
    Laplace,
    PureDP,
    RandomizedResponse,
    RepeatAndSelect,
    ZeroConcentratedDP,
)

# ----------------------------------------------------------------------------------------------------------------------
# Moments of one use in one of t steps: what Rényi accounting knows of random allocation, at any δ.
#
# With V = (W_1 + … + W_t)/t as in `allocation`, W_i = e^{m x_i − m²/2} iid under Q:
#
#     removing   e^{K(n−1)} = E_Q[Vⁿ] = n!/tⁿ · [xⁿ] (Σ_j e^{m²j(j−1)/2} xʲ/j!)^t   for whole n; K is convex, so the
#     chord
#                between whole orders bounds it from above;
#     adding     e^{K(λ)} = E_Q[V^{−λ}] ≤ Π_i E[W_i^{−λ/t}] = e^{m²λ(1+λ/t)/2}, as a mean is at least the geometric
#     mean.
#
# Both are at most the Gaussian's own m²λ(λ+1)/2, without amplification, because δ is convex in the pair.
# ----------------------------------------------------------------------------------------------------------------------


_ORDERS = 160


def _product(left: FloatArray, right: FloatArray) -> FloatArray:
    """Logs of the coefficients of the product of two series with positive coefficients."""
    terms = np.full((left.size, left.size), -np.inf)
    for order in range(left.size):
        terms[order, : order + 1] = left[: order + 1] + right[order::-1]
    peak = terms.max(axis=1)
    return peak + np.log(np.exp(terms - peak[:, None]).sum(axis=1))


@lru_cache(maxsize=64)
def _log_moments(steps: int, shift: float) -> tuple[float, ...]:
    """Upper bounds on log E[Vⁿ] for n = 1, …, by repeated squaring; all terms are positive, so that nothing cancels."""
    orders = np.arange(_ORDERS + 1, dtype=np.float64)
    log_factorial = np.array([math.lgamma(order + 1) for order in range(_ORDERS + 1)])
    power = shift * shift * orders * (orders - 1) / 2 - log_factorial
    total = np.where(orders == 0, 0.0, -np.inf)
    rest = steps
    while rest:
        if rest & 1:
            total = _product(total, power)
        rest >>= 1
        if rest:
            power = _product(power, power)
    values = total + log_factorial - orders * math.log(steps)
    # Each logarithm errs by a few units of the largest one; some forty sums and products follow each other.
    slack = 2e-14 * (1 + np.abs(total) + log_factorial + orders * math.log(max(2, steps)))
    return tuple(np.maximum(values + slack, 0.0)[1:].tolist())


def removing_moment(steps: int, shift: float) -> Callable[[float], float]:
    """λ ↦ an upper bound on K(λ) when the record is in P's dataset.

    Example:
        >>> import math
        >>> at_one = removing_moment(100, 1.0)(1.0)
        >>> round(at_one - math.log(1 + (math.e - 1) / 100), 9)
        0.0
    """
    known = _log_moments(steps, shift)

    def bound(lam: float) -> float:
        bare = shift * shift * lam * (lam + 1) / 2
        low = math.floor(lam)
        if low + 2 > len(known):
            return bare
        left = known[low] if low else 0.0
        return min(bare, left + (lam - low) * (known[low + 1] - left))

    return bound


def adding_moment(steps: int, shift: float) -> Callable[[float], float]:
    """λ ↦ an upper bound on K(λ) when the record is in Q's dataset."""
    return lambda lam: shift * shift * lam * min(lam + 1, 1 + lam / steps) / 2


# ----------------------------------------------------------------------------------------------------------------------
# Upper bounds on the log moment generating function for every event that has one.
#
# Rényi accounting needs less than the contour integral: an upper bound on K(λ) at real λ. That also exists for
# mechanisms known by their zCDP parameter only, for PLDs with atoms, for fixed-size samples under replace-one, and for
# the selection of the best of several runs.
# ----------------------------------------------------------------------------------------------------------------------


_LATTICE_POINTS = 1 << 13


@dataclass(frozen=True)
class MGFUpperBound:
    """K(λ) ≤ `bound`(λ) at real λ, and nothing on the line."""

    bound: Callable[[float], float]
    largest_loss: float = math.inf
    decays: bool = False

    def moments(self, lam: float, *, certified: bool = True) -> CumulantValues:  # noqa: ARG002
        """The bound, and its slope by a difference quotient, which only steers the choice of the order."""
        value = self.bound(lam)
        nearby = self.bound(lam * 1.0001)
        return CumulantValues(
            log_mgf=value, error=1e-13 * abs(value), mean=(nearby - value) / (lam * 0.0001), variance=math.nan
        )

    def line(self, lam: float, largest_u: float, tolerance: float) -> CharacteristicFunction:  # noqa: ARG002
        """Refused: an upper bound has no value off the real axis."""
        raise UnsupportedEvent("the contour accountant must know the loss exactly, got an upper bound. Use rdp.")


def renyi_directions(
    steps: EventCounts, neighboring_relation: NeighboringRelation
) -> tuple[tuple[RepeatedMGF, ...], ...]:
    """Bounds on K of all steps, once for each direction.

    Raises:
        UnsupportedEvent: a step's loss has no finite moments here.
    """
    return pair_directions([(_bounds(event, neighboring_relation), count) for event, count in steps.counts])


def _bounds(event: Event, neighboring_relation: NeighboringRelation) -> tuple[MomentGeneratingFunction, ...]:
    """Of what is known by its moments alone, and otherwise of the dominating pairs."""
    match event:
        case ZeroConcentratedDP():
            return (GaussianMGF(mu=math.sqrt(2 * event.rho)),)
        case BoundedRange():
            # ε²/8-zCDP (Cesar and Rogers 2021, lemma 3.2).
            return (GaussianMGF(mu=event.epsilon / 2),)
        case RepeatAndSelect():
            return _selection(event, neighboring_relation)
    return tuple(_pair_bound(pair) for pair in dominating_pairs(event, neighboring_relation))


def _pair_bound(pair: DominatingPair) -> MomentGeneratingFunction:
    match pair:
        case RandomAllocationPLD():
            moment = removing_moment if pair.removing else adding_moment
            return MGFUpperBound(moment(pair.steps, pair.shift))
        case PoissonSampledPLD(base=DiscreteGaussianPLD() as base):
            return MGFUpperBound(
                sampled_discrete_gaussian_moments(
                    base.stddev, base.sensitivity, pair.sample_rate, removing=pair.removing
                )
            )
        case PointwiseMaxPLD():
            return MGFUpperBound(_larger_curve_bound(_pair_bound(pair.positive), _pair_bound(pair.negative)))
        case AveragedPLD() if pair.unprotected == 0:
            return MGFUpperBound(_average_bound([(share, pair_mgf(part)) for share, part in pair.parts]))
    try:
        return pair_mgf(pair)
    except UnsupportedEvent:
        if pair.infinite > 0 or any(math.isinf(end) for end in pair.support):
            raise
        lattice = pessimistic_discretization(pair, (pair.support[1] - pair.support[0]) / _LATTICE_POINTS)
        if lattice.infinite > 0:
            raise
        return MGFUpperBound(_lattice_bound(lattice))


def _lattice_bound(lattice: DiscretizedPLD) -> Callable[[float], float]:
    """e^{λL} = y^{−λ} is convex in y = e^{−L}, so that the lattice rounded up bounds the moment."""

    def bound(lam: float) -> float:
        exponent = lattice.log_masses + lam * lattice.losses
        peak = float(exponent.max())
        return max(0.0, peak + math.log(float(np.sum(np.exp(exponent - peak)))) + 1e-12)

    return bound


def _average_bound(parts: Sequence[tuple[float, MomentGeneratingFunction]]) -> Callable[[float], float]:
    """Of one of several pairs at random, and which one is known: moments are averaged."""

    def bound(lam: float) -> float:
        moments = [(share, part.moments(lam)) for share, part in parts]
        exponents = [math.log(share) + m.log_mgf + m.error for share, m in moments]
        peak = max(exponents)
        return max(0.0, peak + math.log(math.fsum(math.exp(value - peak) for value in exponents)))

    return bound


def _larger_curve_bound(first: MomentGeneratingFunction, second: MomentGeneratingFunction) -> Callable[[float], float]:
    """Of the larger of two curves: moments above 1 add up, e^K ≤ e^{K₁} + e^{K₂} − 1."""

    def bound(lam: float) -> float:
        moments = [part.moments(lam) for part in (first, second)]
        high, low = sorted((m.log_mgf + m.error for m in moments), reverse=True)
        return high + math.log1p(math.exp(-high) * math.expm1(low)) if low < 700 else high + math.log(2)

    return bound


# ── selection of the best run ───────────────────────────────────────────────────────────────────────────────


def _selection(
    event: RepeatAndSelect, neighboring_relation: NeighboringRelation
) -> tuple[MomentGeneratingFunction, ...]:
    inner = flatten(event.event, neighboring_relation)
    directions = renyi_directions(inner, neighboring_relation)

    def base(lam: float) -> float:
        """Rényi divergence of order λ + 1, worse direction: the theorems need both."""
        return max(_moments(steps, lam)[0] for steps in directions) / lam

    bound = (
        _poisson_bound(base, event.mean) if event.distribution == "poisson" else _negative_binomial_bound(base, event)
    )
    return (MGFUpperBound(bound),)


def _negative_binomial_bound(base: Callable[[float], float], event: RepeatAndSelect) -> Callable[[float], float]:
    """Papernot and Steinke 2022, theorem 2: ε' = ε(λ) + (1+η)(1−1/λ̂) ε(λ̂) + (1+η) log(1/γ)/λ̂ + log E[K]/(λ−1)."""
    shape, gamma = event.shape, success_probability(event.mean, event.shape)
    if event.distribution == "threshold":
        # The same by Hölder's inequality, with η = 0 and 1/γ in place of E[K]: docs/proofs/tuning-profiles.md.
        shape, gamma = 0.0, 1 / event.mean

    def second(order: float) -> float:
        return (1 + shape) * ((1 - 1 / order) * base(order - 1) - math.log(gamma) / order)

    # The second term does not depend on λ: minimize it once over λ̂ > 1 (any λ̂ is valid).
    coarse = min(range(-24, 60), key=lambda x: _finite(second, 1 + math.exp(x / 8)))
    best = min(_finite(second, 1 + math.exp((coarse + x / 16) / 8)) for x in range(-16, 17))

    def bound(lam: float) -> float:
        order = lam + 1
        return lam * (base(lam) + best) + math.log(event.mean) if order > 1 else math.inf

    return bound


def _poisson_bound(base: Callable[[float], float], mean: float) -> Callable[[float], float]:
    """Papernot and Steinke 2022, theorem 6: ε' = ε(λ) + μ·δ̂ + log(μ)/(λ−1), for e^ε̂ ≤ 1 + 1/(λ−1).

    δ̂ is any δ of the base mechanism at ε̂ = log(1 + 1/(λ−1)); here the best Chernoff bound.
    """
    orders = [math.exp(x / 24) for x in range(-72, 192)]
    known = [(lam, _finite(base, lam)) for lam in orders]

    def delta(epsilon: float) -> float:
        exponent = min(lam * (value - epsilon) - lam * math.log1p(1 / lam) - math.log1p(lam) for lam, value in known)
        return math.exp(min(0.0, exponent))

    def bound(lam: float) -> float:
        value = lam * (base(lam) + mean * delta(math.log1p(1 / lam))) + math.log(mean)
        if mean >= 1:
            return value
        # Below one run in the mean, "no run" has its own share e^{−μ} of the moment, and the theorem's log μ is < 0.
        return max(value, -mean) + math.log1p(math.exp(-abs(value + mean)))

    return bound


def _finite(function: Callable[[float], float], at: float) -> float:
    try:
        return function(at)
    except AccountingError:
        return math.inf


def success_probability(mean: float, shape: float) -> float:
    """γ of the truncated negative binomial with this mean: η(1−γ)/(γ(1−γ^η)), or (1/γ−1)/log(1/γ) at η = 0."""
    if mean <= 1:
        return 1 - 1e-12

    def expected(gamma: float) -> float:
        if shape == 0:
            return (1 / gamma - 1) / -math.log(gamma)
        return shape * (1 - gamma) / (gamma * -math.expm1(shape * math.log(gamma)))

    low, high = 1e-15, 1 - 1e-12
    for _ in range(200):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if expected(middle) > mean else (low, middle)
    # The smaller γ has the larger mean and the larger bound.
    return low


# ----------------------------------------------------------------------------------------------------------------------
# Rényi accounting with the order chosen adaptively and the tight conversion.
# ----------------------------------------------------------------------------------------------------------------------


_SMALLEST, _LARGEST = 1e-4, 1e12


def _moments(steps: Sequence[RepeatedMGF], lam: float) -> tuple[float, float]:
    """Upper bound on K(λ), and K'(λ)."""
    moments = [(step.count, step.loss.moments(lam)) for step in steps]
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


def _start(steps: Sequence[RepeatedMGF], log_delta: float) -> float:
    variance = 2 * max(evaluate_saddle_point(subsample_steps(steps), 1e-3).mean, 1e-300)
    return math.sqrt(max(1.0, -2 * log_delta) / variance)


def _best_order(
    steps: Sequence[RepeatedMGF], start: float, value: Callable[[float, float], float], slope: Callable[..., float]
) -> float:
    """The λ with the smallest value(λ, K) among those visited, steered without certificate on a thinned schedule."""
    few = subsample_steps(steps)
    best = math.inf, start

    def visit(lam: float) -> float:
        nonlocal best
        here = evaluate_saddle_point(few, lam)
        best = min(best, (value(lam, here.log_mgf), lam))
        return slope(lam, here.log_mgf, here.mean)

    _walk(visit, start)
    return best[1]


def _epsilon(steps: Sequence[RepeatedMGF], delta: float) -> float:
    """The conversion at the best order."""
    log_delta = math.log(delta)

    def value(lam: float, log_mgf: float) -> float:
        return (log_mgf - log_delta + _constant(lam)) / lam

    def slope(lam: float, log_mgf: float, mean: float) -> float:
        return (lam * mean - log_mgf + log_delta + math.log1p(lam)) / (1 + abs(log_delta))

    lam = _best_order(steps, _start(steps, log_delta), value, slope)
    return max(0.0, value(lam, _moments(steps, lam)[0]) * (1 + 1e-14))


def _delta(steps: Sequence[RepeatedMGF], epsilon: float) -> float:
    """The Chernoff bound at the best order; its exponent is convex in λ."""

    def value(lam: float, log_mgf: float) -> float:
        return log_mgf - lam * epsilon + _constant(lam)

    def slope(lam: float, log_mgf: float, mean: float) -> float:  # noqa: ARG001
        return (mean - epsilon - math.log1p(1 / lam)) / (1 + epsilon)

    lam = _best_order(steps, _start(steps, -10.0), value, slope)
    return min(1.0, math.exp(min(0.0, value(lam, _moments(steps, lam)[0]))) * (1 + 1e-12) + 5e-324)


class RDPAccountant(Accountant[tuple[tuple[RepeatedMGF, ...], ...]]):
    """Rényi differential privacy of all real orders, then the tight conversion.

    Guarantee:
        `upper` is an upper bound on ε (δ); `lower` is 0, because the conversion proves nothing from below.
    """

    name = "rdp"

    def prepare(
        self, steps: EventCounts, neighboring_relation: NeighboringRelation
    ) -> tuple[tuple[RepeatedMGF, ...], ...]:
        """Every event whose loss has a moment generating function here."""
        return renyi_directions(steps, neighboring_relation)

    def epsilon_bounds(self, prepared: tuple[tuple[RepeatedMGF, ...], ...], delta: float) -> tuple[float, float]:
        """The best conversion over all orders, worse direction."""
        return 0.0, max(_epsilon(steps, delta) for steps in prepared)

    def delta_bounds(self, prepared: tuple[tuple[RepeatedMGF, ...], ...], epsilon: float) -> tuple[float, float]:
        """The best Chernoff bound over all orders, worse direction."""
        return 0.0, max(_delta(steps, epsilon) for steps in prepared)


def renyi_divergence(
    event: Event, order: float, *, neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE
) -> float:
    """Upper bound on the Rényi divergence of the given order > 1, worse direction.

    Example:
        >>> from sordino.events import Gaussian
        >>> round(renyi_divergence(Gaussian(noise_multiplier=2.0), 4.0), 12)
        0.5
    """
    order = checks.positive(order=order)
    if order <= 1:
        raise InvalidArgument(f"order must be > 1, got {order!r}. Order 1 is the Kullback–Leibler divergence.")
    neighboring_relation = NeighboringRelation(neighboring_relation)
    flat = flatten(event, neighboring_relation)
    if flat.non_private:
        return math.inf
    if flat.empty:
        return 0.0
    with double_precision("the divergence"):
        found = max(
            _moments(steps, order - 1)[0] / (order - 1) for steps in renyi_directions(flat, neighboring_relation)
        )
        return math.inf if math.isnan(found) else found


# ----------------------------------------------------------------------------------------------------------------------
# Concentrated and Gaussian differential privacy: zCDP with the tight conversion, GDP where it is exact.
#
# ρ-zCDP is D_α ≤ ρα for all α > 1 (Bun and Steinke 2016); composition adds ρ. μ-GDP is the privacy curve of one
# Gaussian with sensitivity/std = μ; composition is √(Σ μ²) (Dong, Roth and Su 2022, corollary 3.3).
# ----------------------------------------------------------------------------------------------------------------------


def zcdp_rho(event: Event, neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE) -> float:
    """Σ ρ of an event whose steps are all zCDP without sampling.

    Raises:
        UnsupportedEvent: a step has no zCDP parameter.

    Example:
        >>> zcdp_rho(Gaussian(noise_multiplier=10.0))
        0.005
    """
    steps = flatten(event, NeighboringRelation(neighboring_relation))
    return math.inf if steps.non_private else _total_rho(steps)


def _total_rho(steps: EventCounts) -> float:
    return math.fsum(count * step_rho(base) for base, count in steps.counts)


def step_rho(event: Event) -> float:
    """ρ of one step without sampling."""
    match event:
        case Gaussian():
            return 1 / (2 * event.noise_multiplier**2)
        case DiscreteGaussian():
            # Canonne, Kamath and Steinke 2020, theorem 4.
            return event.sensitivity**2 / (2 * event.stddev**2)
        case ZeroConcentratedDP():
            return event.rho
        case BoundedRange():
            return event.epsilon**2 / 8
        case PureDP() | RandomizedResponse():
            return event.epsilon**2 / 2
        case Laplace():
            return 1 / (2 * event.noise_multiplier**2)
        case DiscreteLaplace():
            return (event.sensitivity / event.scale) ** 2 / 2
        case _:
            raise UnsupportedEvent(f"event must have a zCDP parameter, got {event.kind}. Use the contour accountant.")


def rho_to_epsilon(rho: float, delta: float) -> float:
    """The ε of a ρ-zCDP mechanism at δ, best order (Canonne, Kamath and Steinke 2020, proposition 12).

    Example:
        >>> round(rho_to_epsilon(0.5, 1e-5), 9)
        4.728386985
    """
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


def max_rho(epsilon: float, delta: float) -> float:
    """The largest ρ with `rho_to_epsilon` ≤ ε, rounded down.

    Example:
        >>> round(max_rho(1.0, 1e-5), 12)
        0.030556595198
    """
    return _largest(lambda rho: rho_to_epsilon(rho, delta) <= epsilon)


def max_mu(epsilon: float, delta: float) -> float:
    """The largest μ whose Gaussian curve is (ε, δ)-private, rounded down.

    Example:
        >>> round(max_mu(1.0, 1e-5), 6)
        0.268051
    """
    return _largest(lambda mu: gaussian_delta(epsilon, mu)[1] <= delta)


def _largest(fits: Callable[[float], bool]) -> float:
    high = 1.0
    while fits(high):
        high *= 2
    return bracket_crossing(fits, 0.0, high, 1e-15)[0]


class ZCDPAccountant(Accountant[float]):
    """zCDP: sums of ρ.

    Guarantee:
        `upper` is an upper bound; `lower` is 0.
    """

    name = "zcdp"

    def prepare(self, steps: EventCounts, neighboring_relation: NeighboringRelation) -> float | None:  # noqa: ARG002
        """Σ ρ of steps without sampling that have one."""
        rho = _total_rho(steps)
        return rho if math.isfinite(rho) else None

    def epsilon_bounds(self, prepared: float, delta: float) -> tuple[float, float]:
        """The tight conversion of the sum."""
        return 0.0, rho_to_epsilon(prepared, delta)

    def delta_bounds(self, prepared: float, epsilon: float) -> tuple[float, float]:
        """The δ at which the conversion gives ε."""
        low, high = bracket_crossing(lambda x: rho_to_epsilon(prepared, math.exp(x)) > epsilon, -745.0, 0.0, 1e-14)
        upper = math.exp(high) if rho_to_epsilon(prepared, math.exp(low)) > epsilon else math.exp(low)
        return 0.0, min(1.0, upper)


class GDPAccountant(Accountant[float]):
    """μ-GDP of Gaussians without sampling, where it is exact.

    Guarantee:
        The interval is the exact curve with its rounding error.
    """

    name = "gdp"
    automatic = False

    def prepare(self, steps: EventCounts, neighboring_relation: NeighboringRelation) -> float | None:  # noqa: ARG002
        """The μ of Gaussians without sampling, in any number."""
        base = steps.counts[0][0] if len(steps.counts) == 1 else None
        return 1 / base.noise_multiplier if isinstance(base, Gaussian) else None

    def epsilon_bounds(self, prepared: float, delta: float) -> tuple[float, float]:
        """The Gaussian curve inverted."""
        return gaussian_epsilon(delta, prepared)

    def delta_bounds(self, prepared: float, epsilon: float) -> tuple[float, float]:
        """The Gaussian curve."""
        return gaussian_delta(epsilon, prepared)
