"""Composition of mechanisms known by (ε, δ) only: basic and optimal. `strong` has the advanced theorem.

basic      Σ ε_i, Σ δ_i (Dwork et al. 2006).
optimal    the exact region for mechanisms known by (ε_i, δ_i): the composition of their dominating pairs
(Kairouz, Oh and Vishwanath 2015, theorem 3.3), computed on a lattice, which for distinct ε_i is the
approximation scheme of Murtagh and Vadhan 2016 with its error certified.
"""

import math
from dataclasses import dataclass

from sordino import checks
from sordino.accounting.base import EventCounts, Interval, flatten, sampled_epsilon
from sordino.accounting.closed_form import bracket_crossing, gaussian_epsilon
from sordino.accounting.event_mgfs import mgf_directions
from sordino.accounting.mgf import evaluate_saddle_point
from sordino.accounting.pld import RepeatedPLD, pld_delta, pld_epsilon
from sordino.accounting.pld_mechanisms import approximate_pld
from sordino.accounting.zcdp_gdp import HeuristicEstimate
from sordino.definitions import NeighboringRelation
from sordino.errors import AccountingError, UnsupportedEvent
from sordino.events import (
    ApproximateDP,
    BoundedRange,
    DiscreteLaplace,
    Event,
    Gaussian,
    Laplace,
    PoissonSampled,
    PureDP,
    RandomizedResponse,
    RepeatAndSelect,
)

__all__ = [
    "AdvancedCompositionAccountant",
    "BasicCompositionAccountant",
    "MomentsAccountant",
    "OptimalCompositionAccountant",
    "parameters",
    "published_advanced_composition",
    "step_parameters",
]


def parameters(event: Event, neighboring_relation: NeighboringRelation) -> list[tuple[float, float, int]]:
    """(ε_i, δ_i, count) of every distinct step.

    Raises:
        UnsupportedEvent: a step is not (ε, δ)-private with one pair to name, such as a Gaussian.
    """
    return [
        (*step_parameters(base, neighboring_relation), count)
        for base, count in flatten(event, neighboring_relation).counts
    ]


def step_parameters(event: Event, neighboring_relation: NeighboringRelation) -> tuple[float, float]:
    """(ε, δ) of one step that has a pair to name."""
    match event:
        case PureDP() | RandomizedResponse() | BoundedRange():
            return event.epsilon, 0.0
        case ApproximateDP():
            return event.epsilon, event.delta
        case Laplace():
            return 1 / event.noise_multiplier, 0.0
        case DiscreteLaplace():
            return event.sensitivity / event.scale, 0.0
        case PoissonSampled() if neighboring_relation is not NeighboringRelation.REPLACE_ONE:
            epsilon, delta = step_parameters(event.event, neighboring_relation)
            return sampled_epsilon(epsilon, event.sample_rate), event.sample_rate * delta
        case RepeatAndSelect() if event.distribution != "poisson":
            # Liu and Talwar 2019 (η = 1: 3ε; a threshold: 2ε); Papernot and Steinke 2022, theorem 2 at infinite
            # orders. With probability ≤ E[K]·δ some run shows all; the law of K given that none does is of its kind.
            parts = parameters(event.event, neighboring_relation)
            shape = 0.0 if event.distribution == "threshold" else event.shape
            lost = max(1.0, event.mean) * math.fsum(count * delta for _, delta, count in parts) * (1 + 1e-9)
            return (2 + shape) * math.fsum(count * epsilon for epsilon, _, count in parts), min(1.0, lost)
        case _:
            raise UnsupportedEvent(
                f"event must be (ε, δ)-private by itself, got {event.kind}. Use contour, pld or rdp."
            )


def _supported(event: Event, neighboring_relation: NeighboringRelation) -> bool:
    try:
        return bool(parameters(event, neighboring_relation))
    except UnsupportedEvent:
        return False


@dataclass(frozen=True)
class BasicCompositionAccountant:
    """Sums of ε and δ.

    Guarantee:
        `upper` is an upper bound; `lower` is 0.
    """

    name: str = "basic"
    automatic: bool = True

    def supports(self, event: Event, neighboring_relation: NeighboringRelation) -> bool:
        """Steps with an (ε, δ)."""
        return _supported(event, neighboring_relation)

    def epsilon(self, event: Event, delta: float, neighboring_relation: NeighboringRelation) -> Interval:
        """Σ ε_i when δ ≥ Σ δ_i, otherwise ∞."""
        parts = parameters(event, neighboring_relation)
        spent = math.fsum(count * part_delta for _, part_delta, count in parts)
        total = math.fsum(count * epsilon for epsilon, _, count in parts)
        return Interval(lower=0.0, upper=total if delta >= spent else math.inf, accountant=self.name)

    def delta(self, event: Event, epsilon: float, neighboring_relation: NeighboringRelation) -> Interval:
        """Σ δ_i when ε ≥ Σ ε_i, otherwise 1."""
        parts = parameters(event, neighboring_relation)
        total = math.fsum(count * part for part, _, count in parts)
        spent = math.fsum(count * part_delta for _, part_delta, count in parts)
        return Interval(lower=0.0, upper=min(1.0, spent) if epsilon >= total else 1.0, accountant=self.name)


@dataclass(frozen=True)
class OptimalCompositionAccountant:
    """The best that can be said of mechanisms known by (ε_i, δ_i) only.

    Guarantee:
        `upper` bounds the event's ε. For `PureDP` and `ApproximateDP` steps the interval contains the exact answer;
        for others, whose loss says more than their ε, `lower` is 0.
    """

    name: str = "optimal"
    automatic: bool = False

    def supports(self, event: Event, neighboring_relation: NeighboringRelation) -> bool:
        """Steps with an (ε, δ)."""
        return _supported(event, neighboring_relation)

    def _laws(self, event: Event, neighboring_relation: NeighboringRelation) -> list[RepeatedPLD]:
        return [
            RepeatedPLD(law=approximate_pld(epsilon, delta), count=count)
            for epsilon, delta, count in parameters(event, neighboring_relation)
        ]

    def _exact(self, event: Event, neighboring_relation: NeighboringRelation) -> bool:
        return all(isinstance(base, PureDP | ApproximateDP) for base, _ in flatten(event, neighboring_relation).counts)

    def epsilon(self, event: Event, delta: float, neighboring_relation: NeighboringRelation) -> Interval:
        """By the pairs' loss distribution."""
        lower, upper = pld_epsilon(self._laws(event, neighboring_relation), delta)
        return Interval(
            lower=lower if self._exact(event, neighboring_relation) else 0.0, upper=upper, accountant=self.name
        )

    def delta(self, event: Event, epsilon: float, neighboring_relation: NeighboringRelation) -> Interval:
        """By the pairs' loss distribution."""
        lower, upper = pld_delta(self._laws(event, neighboring_relation), epsilon)
        return Interval(
            lower=lower if self._exact(event, neighboring_relation) else 0.0, upper=upper, accountant=self.name
        )


# ----------------------------------------------------------------------------------------------------------------------
# Advanced ("strong") composition of mechanisms known by (ε, δ), sampled Gaussians among them.
#
# Dwork, Rothblum and Vadhan 2010, theorem III.3, step by step for distinct ε_i: k mechanisms are
#
#     (Σ ε_i(e^{ε_i} − 1) + √(2 log(1/δ̃) Σ ε_i²),  Σ δ_i + δ̃)-private.
#
# A Gaussian has no single ε. It is taken at a δ₀ that is a share of the δ to spend, where its ε₀ is exact (Balle and
# Wang 2018), and a Poisson sample of rate q makes of it log(1 + q(e^{ε₀} − 1)) at qδ₀ (Balle, Barthe and Gaboardi 2018,
# theorem 8). The best of a few shares is kept: each of them is sound.
#
# Abadi et al. 2016 compare with ε = 9.34 for q = 0.01, σ = 4, 10 000 steps, δ = 1e-5. That number comes from
#
#     ε₀ = √(2 log(1.25/δ₀))/σ,    ε₁ = q ε₀,    ε = T ε₁² + ε₁ √(2T log(1/δ̃)),    T q δ₀ = δ̃ = δ/2,
#
# which is smaller than the theorem in three places: 1.25 is proved for ε₀ < 1 only (here ε₀ = 1.46), q ε₀ is the first
# order of log(1 + q(e^{ε₀} − 1)), and ε₁² the first order of ε₁(e^{ε₁} − 1). It is kept as a `HeuristicEstimate`.
# ----------------------------------------------------------------------------------------------------------------------


_SHARES = (0.25, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
_SLACK = 1e-12  # kept back from δ, against the rounding of its own split
_LARGEST_LAWS = 64


@dataclass(frozen=True, kw_only=True)
class _Parts:
    """Steps by what is known of them: (ε, δ, count), and (rate, noise multiplier, count) of Gaussians."""

    known: list[tuple[float, float, int]]
    gaussian: list[tuple[float, float, int]]

    @property
    def spent(self) -> float:
        """Σ δ of the steps with a δ of their own."""
        return math.fsum(count * delta for _, delta, count in self.known)


def _parts(steps: EventCounts, neighboring_relation: NeighboringRelation) -> _Parts:
    known: list[tuple[float, float, int]] = []
    gaussian: list[tuple[float, float, int]] = []
    for event, count in steps.counts:
        match event:
            case Gaussian():
                gaussian.append((1.0, event.noise_multiplier, count))
            case PoissonSampled(event=Gaussian()) if neighboring_relation is not NeighboringRelation.REPLACE_ONE:
                assert isinstance(event.event, Gaussian)
                gaussian.append((event.sample_rate, event.event.noise_multiplier, count))
            case _:
                known.append((*step_parameters(event, neighboring_relation), count))
    if len(gaussian) > _LARGEST_LAWS:
        raise AccountingError(
            f"advanced composition must be given ≤ {_LARGEST_LAWS} distinct Gaussian steps, got {len(gaussian)}. "
            "Use the contour accountant."
        )
    return _Parts(known=known, gaussian=gaussian)


def _theorem(parts: list[tuple[float, float, int]], slack: float) -> float:
    """The smaller of the theorem's ε with δ̃ = `slack` and the plain sum."""
    plain = math.fsum(count * epsilon for epsilon, _, count in parts)
    if slack <= 0 or not math.isfinite(plain):
        return plain
    drift = math.fsum(count * epsilon * math.expm1(min(epsilon, 700.0)) for epsilon, _, count in parts)
    deviation = math.fsum(count * epsilon * epsilon for epsilon, _, count in parts)
    return min(plain, drift + math.sqrt(2 * math.log(1 / slack) * deviation))


def _sampled(rate: float, epsilon: float) -> float:
    return epsilon if epsilon > 700 else math.log1p(rate * math.expm1(epsilon))


@dataclass(frozen=True)
class AdvancedCompositionAccountant:
    """The advanced composition theorem, or basic composition where that is smaller.

    Guarantee:
        `upper` is an upper bound; `lower` is 0.
    """

    name: str = "advanced"
    automatic: bool = False

    def supports(self, event: Event, neighboring_relation: NeighboringRelation) -> bool:
        """Steps with an (ε, δ), Gaussians, and their Poisson samples (not under replace-one)."""
        try:
            _parts(flatten(event, neighboring_relation), neighboring_relation)
        except AccountingError:
            return True
        except UnsupportedEvent:
            return False
        return True

    def epsilon(self, event: Event, delta: float, neighboring_relation: NeighboringRelation) -> Interval:
        """The theorem at the best of a few ways to spend δ."""
        parts = _parts(flatten(event, neighboring_relation), neighboring_relation)
        return Interval(lower=0.0, upper=_best(parts, delta), accountant=self.name)

    def delta(self, event: Event, epsilon: float, neighboring_relation: NeighboringRelation) -> Interval:
        """The smallest δ found at which the theorem gives at most ε."""
        parts = _parts(flatten(event, neighboring_relation), neighboring_relation)
        if not parts.gaussian:
            basic = BasicCompositionAccountant().delta(event, epsilon, neighboring_relation).upper
            return Interval(lower=0.0, upper=min(basic, _solved(parts, epsilon)), accountant=self.name)
        low, high = bracket_crossing(lambda x: _best(parts, math.exp(x)) > epsilon, -700.0, 0.0, 1e-7)
        upper = math.exp(low) if _best(parts, math.exp(low)) <= epsilon else math.exp(high)
        return Interval(lower=0.0, upper=min(1.0, upper), accountant=self.name)


def _best(parts: _Parts, delta: float) -> float:
    room = (delta - parts.spent) * (1 - _SLACK)
    if not parts.gaussian:
        return _theorem(parts.known, room) if delta >= parts.spent else math.inf
    if room <= 0:
        return math.inf
    weight = math.fsum(rate * count for rate, _, count in parts.gaussian)
    best = math.inf
    for share in _SHARES:
        each = share * room / weight
        if each >= 1:
            continue
        spent = [
            (_sampled(rate, gaussian_epsilon(each, 1 / noise)[1]), rate * each, count)
            for rate, noise, count in parts.gaussian
        ]
        best = min(best, _theorem([*parts.known, *spent], (1 - share) * room))
    return best


def _solved(parts: _Parts, epsilon: float) -> float:
    """δ with the theorem solved for δ̃."""
    drift = math.fsum(count * one * math.expm1(min(one, 700.0)) for one, _, count in parts.known)
    deviation = math.fsum(count * one * one for one, _, count in parts.known)
    room = epsilon - drift
    return min(1.0, parts.spent + math.exp(-(room**2) / (2 * deviation))) if room > 0 and deviation > 0 else 1.0


def published_advanced_composition(event: Event, delta: float) -> HeuristicEstimate:
    """The strong composition number that Abadi et al. 2016 compare with: NO GUARANTEE, see the module's formula.

    Args:
        event: Gaussian steps, Poisson-sampled or not, all alike.
        delta: in (0, 1).

    Raises:
        UnsupportedEvent: something else took part, or the steps differ.

    Example:
        >>> from sordino.events import SelfComposed
        >>> step = PoissonSampled(sample_rate=0.01, event=Gaussian(noise_multiplier=4.0))
        >>> round(published_advanced_composition(SelfComposed(event=step, count=10_000), 1e-5).value, 2)
        9.34
    """
    delta = checks.probability(delta=delta, zero=False, one=False)
    steps = flatten(event)
    parts = _parts(steps, NeighboringRelation.ADD_OR_REMOVE_ONE)
    if len(parts.gaussian) != 1 or parts.known:
        raise UnsupportedEvent(f"strong composition must be of one kind of Gaussian step, got {event.kind}.")
    rate, noise, count = parts.gaussian[0]
    each = delta / 2 / (count * rate)
    single = rate * math.sqrt(2 * math.log(max(1.25 / each, 1.0))) / noise
    return HeuristicEstimate(
        value=count * single**2 + single * math.sqrt(2 * count * math.log(2 / delta)),
        method="strong composition with first-order terms (as compared with in Abadi et al. 2016)",
        warning="no guarantee: the theorem itself gives a larger ε",
    )


# ----------------------------------------------------------------------------------------------------------------------
# The moments accountant as published: integer moments up to 32 and Markov's inequality.
#
#     α(λ) = max over both directions of log E[e^{λL}],   ε = min over λ of (Σ α(λ) + log(1/δ)) / λ,
#
# for λ = 1, …, 32, the moments by numerical integration (Abadi et al. 2016, section 3.2 and theorem 2). Kept as a
# definition to compare with: the conversion is looser than `rdp`'s and the orders are few.
# ----------------------------------------------------------------------------------------------------------------------


_LARGEST_MOMENT = 32


@dataclass(frozen=True)
class MomentsAccountant:
    """Abadi et al.'s moments accountant, for Gaussians and Poisson-sampled Gaussians.

    Guarantee:
        `upper` is an upper bound; `lower` is 0.
    """

    name: str = "moments"
    automatic: bool = False

    def supports(self, event: Event, neighboring_relation: NeighboringRelation) -> bool:
        """Gaussians with and without Poisson sampling, as in the paper; not under replace-one."""
        if neighboring_relation is NeighboringRelation.REPLACE_ONE:
            return False
        try:
            steps = flatten(event, neighboring_relation)
        except UnsupportedEvent:
            return False
        return bool(steps.counts) and all(
            isinstance(base, Gaussian) or (isinstance(base, PoissonSampled) and isinstance(base.event, Gaussian))
            for base, _ in steps.counts
        )

    def _log_moments(self, event: Event, neighboring_relation: NeighboringRelation) -> list[tuple[int, float]]:
        found: list[tuple[int, float]] = []
        sides = mgf_directions(flatten(event, neighboring_relation), neighboring_relation)
        for order in range(1, _LARGEST_MOMENT + 1):
            try:
                at = [evaluate_saddle_point(steps, float(order), certified=True) for steps in sides]
            except AccountingError:
                break
            found.append((order, max(one.log_mgf + one.error for one in at)))
        return found

    def epsilon(self, event: Event, delta: float, neighboring_relation: NeighboringRelation) -> Interval:
        """Min over λ of (α(λ) + log(1/δ))/λ."""
        upper = min(
            (moment - math.log(delta)) / order for order, moment in self._log_moments(event, neighboring_relation)
        )
        return Interval(lower=0.0, upper=max(0.0, upper), accountant=self.name)

    def delta(self, event: Event, epsilon: float, neighboring_relation: NeighboringRelation) -> Interval:
        """Min over λ of e^{α(λ) − λε}."""
        exponent = min(moment - order * epsilon for order, moment in self._log_moments(event, neighboring_relation))
        return Interval(lower=0.0, upper=math.exp(min(0.0, exponent)), accountant=self.name)
