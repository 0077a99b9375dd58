"""Accountants of the literature that newer ones have replaced, kept to compare with; loaded only when asked for.

advanced   the advanced ("strong") composition theorem (Dwork, Rothblum and Vadhan 2010).
moments    the moments accountant as published (Abadi et al. 2016).
tcdp       truncated concentrated differential privacy (Bun, Dwork, Rothblum and Steinke 2018).

Numbers that were published as ε and guarantee nothing are `HeuristicEstimate`: `published_advanced_composition`,
`asymptotic_moments_epsilon`, `central_limit_epsilon`.
"""

import math
from dataclasses import dataclass
from typing import Any

from sordino import checks
from sordino.accounting.base import Accountant, EventCounts, flatten, sampled_epsilon
from sordino.accounting.closed_form import bracket_crossing, gaussian_epsilon, invert_privacy_profile
from sordino.accounting.composition_theorems import step_parameters
from sordino.accounting.event_mgfs import mgf_directions
from sordino.accounting.mgf import RepeatedMGF, evaluate_saddle_point
from sordino.accounting.rdp import step_rho
from sordino.definitions import NeighboringRelation
from sordino.errors import AccountingError, UnsupportedEvent
from sordino.events import Event, Gaussian, PoissonSampled


@dataclass(frozen=True, kw_only=True)
class HeuristicEstimate:
    """A number that guarantees nothing: it may lie below the true ε. Deliberately not an `Interval`."""

    value: float
    method: str
    warning: str


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
_MAX_STEPS = 64


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
    return _Parts(known=known, gaussian=gaussian)


def _theorem(parts: list[tuple[float, float, int]], slack: float) -> float:
    """The smaller of the theorem's ε with δ̃ = `slack` and the plain sum."""
    plain = math.fsum(count * epsilon for epsilon, _, count in parts)
    if slack <= 0 or not math.isfinite(plain):
        return plain
    drift = math.fsum(count * epsilon * math.expm1(min(epsilon, 700.0)) for epsilon, _, count in parts)
    deviation = math.fsum(count * epsilon * epsilon for epsilon, _, count in parts)
    return min(plain, drift + math.sqrt(2 * math.log(1 / slack) * deviation))


class AdvancedCompositionAccountant(Accountant[_Parts]):
    """The advanced composition theorem, or basic composition where that is smaller.

    Guarantee:
        `upper` is an upper bound; `lower` is 0.
    """

    name = "advanced"
    automatic = False

    def prepare(self, steps: EventCounts, neighboring_relation: NeighboringRelation) -> _Parts:
        """Steps with an (ε, δ), Gaussians, and their Poisson samples (not under replace-one)."""
        return _parts(steps, neighboring_relation)

    def epsilon_bounds(self, prepared: _Parts, delta: float) -> tuple[float, float]:
        """The theorem at the best of a few ways to spend δ."""
        return 0.0, _best(prepared, delta)

    def delta_bounds(self, prepared: _Parts, epsilon: float) -> tuple[float, float]:
        """The smallest δ found at which the theorem gives at most ε."""
        if not prepared.gaussian:
            total = math.fsum(count * one for one, _, count in prepared.known)
            basic = min(1.0, prepared.spent) if epsilon >= total else 1.0
            return 0.0, min(basic, _solved(prepared, epsilon))
        low, high = bracket_crossing(lambda x: _best(prepared, math.exp(x)) > epsilon, -700.0, 0.0, 1e-7)
        return 0.0, min(1.0, math.exp(low) if _best(prepared, math.exp(low)) <= epsilon else math.exp(high))


def _best(parts: _Parts, delta: float) -> float:
    if len(parts.gaussian) > _MAX_STEPS:
        raise AccountingError(
            f"advanced composition must be given ≤ {_MAX_STEPS} distinct Gaussian steps, got {len(parts.gaussian)}. "
            "Use the contour accountant."
        )
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
            (sampled_epsilon(gaussian_epsilon(each, 1 / noise)[1], rate), rate * each, count)
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
#
# The paper also bounds the moments by a formula (lemma 3), for σ ≥ 1, q < 1/(16σ) and λ ≤ σ² log(1/(qσ)):
#
#     α(λ) ≤ q²λ(λ+1)/((1−q)σ²) + O(q³λ³/σ³).
#
# Its first term is about twice the moment itself, q²λ(λ+1)/(2σ²) to the same order; without the constant of the
# second it is no bound, so that `asymptotic_moments_epsilon` returns a `HeuristicEstimate`.
# ----------------------------------------------------------------------------------------------------------------------


_LARGEST_MOMENT = 32


class MomentsAccountant(Accountant[tuple[tuple[RepeatedMGF, ...], ...]]):
    """Abadi et al.'s moments accountant, for Gaussians and Poisson-sampled Gaussians.

    Guarantee:
        `upper` is an upper bound; `lower` is 0.
    """

    name = "moments"
    automatic = False

    def prepare(
        self, steps: EventCounts, neighboring_relation: NeighboringRelation
    ) -> tuple[tuple[RepeatedMGF, ...], ...] | None:
        """Gaussians with and without Poisson sampling, as in the paper; not under replace-one."""
        if neighboring_relation is NeighboringRelation.REPLACE_ONE or not steps.counts:
            return None
        bases = [base.event if isinstance(base, PoissonSampled) else base for base, _ in steps.counts]
        gaussian = all(isinstance(base, Gaussian) for base in bases)
        return mgf_directions(steps, neighboring_relation) if gaussian else None

    def epsilon_bounds(self, prepared: tuple[tuple[RepeatedMGF, ...], ...], delta: float) -> tuple[float, float]:
        """Min over λ of (α(λ) + log(1/δ))/λ."""
        upper = min((moment - math.log(delta)) / order for order, moment in _integer_moments(prepared))
        return 0.0, max(0.0, upper)

    def delta_bounds(self, prepared: tuple[tuple[RepeatedMGF, ...], ...], epsilon: float) -> tuple[float, float]:
        """Min over λ of e^{α(λ) − λε}."""
        exponent = min(moment - order * epsilon for order, moment in _integer_moments(prepared))
        return 0.0, math.exp(min(0.0, exponent))


def _integer_moments(sides: tuple[tuple[RepeatedMGF, ...], ...]) -> list[tuple[int, float]]:
    """(λ, α(λ)), as far as moments can be computed."""
    found: list[tuple[int, float]] = []
    for order in range(1, _LARGEST_MOMENT + 1):
        try:
            at = [evaluate_saddle_point(steps, float(order), certified=True) for steps in sides]
        except AccountingError:
            break
        found.append((order, max(one.log_mgf + one.error for one in at)))
    return found


def asymptotic_log_moment(sample_rate: float, noise_multiplier: float, order: float) -> float:
    """The first term of Abadi et al.'s lemma 3 for one step: q²λ(λ+1)/((1−q)σ²). No bound without the second.

    Args:
        sample_rate: q in [0, 1).
        noise_multiplier: σ > 0.
        order: λ > 0.

    Example:
        >>> round(asymptotic_log_moment(0.01, 4.0, 10.0), 9)
        0.000694444
    """
    rate = checks.probability(sample_rate=sample_rate, one=False)
    sigma = checks.positive(noise_multiplier=noise_multiplier)
    order = checks.positive(order=order)
    return (rate / sigma) ** 2 * order * (order + 1) / (1 - rate)


def asymptotic_moments_epsilon(event: Event, delta: float) -> HeuristicEstimate:
    """ε by the moments accountant with lemma 3's first term in place of the moments: NO GUARANTEE.

    Only orders that satisfy the lemma's conditions are used.

    Args:
        event: Poisson-sampled Gaussian steps.
        delta: in (0, 1).

    Raises:
        UnsupportedEvent: something else took part, or no order λ in 1, …, 32 satisfies the lemma's conditions.

    Example:
        >>> from sordino.events import SelfComposed
        >>> step = PoissonSampled(sample_rate=0.01, event=Gaussian(noise_multiplier=4.0))
        >>> round(asymptotic_moments_epsilon(SelfComposed(event=step, count=10_000), 1e-5).value, 2)
        1.77
    """
    delta = checks.probability(delta=delta, zero=False, one=False)
    steps: list[tuple[float, float, int]] = []
    largest = float(_LARGEST_MOMENT)
    for base, count in flatten(event).counts:
        if not (isinstance(base, PoissonSampled) and isinstance(base.event, Gaussian)):
            raise UnsupportedEvent(f"lemma 3 must be used for Poisson-sampled Gaussians, got {base.kind}. Use moments.")
        rate, sigma = base.sample_rate, base.event.noise_multiplier
        largest = min(largest, sigma**2 * math.log(1 / (rate * sigma)) if sigma >= 1 > 16 * rate * sigma else 0.0)
        steps.append((rate, sigma, count))
    if largest < 1:
        raise UnsupportedEvent(
            "noise_multiplier must be ≥ 1 and sample_rate < 1/(16 noise_multiplier) for lemma 3, got others. "
            "Use the moments or contour accountant."
        )
    totals = [
        (order, math.fsum(count * asymptotic_log_moment(rate, sigma, order) for rate, sigma, count in steps))
        for order in range(1, math.floor(largest) + 1)
    ]
    return HeuristicEstimate(
        value=min((total - math.log(delta)) / order for order, total in totals),
        method="moments accountant with the asymptotic bound q²λ(λ+1)/((1−q)σ²) (Abadi et al. 2016, lemma 3)",
        warning="no guarantee: the lemma's second term has no constant",
    )


# ----------------------------------------------------------------------------------------------------------------------
# (ρ, ω)-tCDP: D_α ≤ ρα for 1 < α < ω only (Bun, Dwork, Rothblum and Steinke 2018); composition adds ρ and takes the
# smallest ω. A sample of rate q turns (ρ, ·) into (13 q²ρ, log(1/q)/(4ρ)), if ρ and q are ≤ 0.1 and
# log(1/q) ≥ 3ρ(2 + log₂(1/ρ)). Loose by a factor of about five in ε at typical settings.
# ----------------------------------------------------------------------------------------------------------------------


class TCDPAccountant(Accountant[tuple[float, float]]):
    """tCDP with its subsampling theorem, under the theorem's conditions only.

    Guarantee:
        `upper` is an upper bound; `lower` is 0.
    """

    name = "tcdp"
    automatic = False

    def prepare(self, steps: EventCounts, neighboring_relation: NeighboringRelation) -> tuple[float, float]:
        """(ρ, ω) of Gaussians without sampling, and of Poisson samples within the conditions."""
        rho, omega = 0.0, math.inf
        for base, count in steps.counts:
            if not isinstance(base, PoissonSampled):
                rho += count * step_rho(base)
                continue
            if not isinstance(base.event, Gaussian) or neighboring_relation is NeighboringRelation.REPLACE_ONE:
                raise UnsupportedEvent("tCDP's subsampling must be of Gaussians under add or remove. Use contour.")
            inner, rate = step_rho(base.event), base.sample_rate
            gain = math.log(1 / rate)
            if inner > 0.1 or rate > 0.1 or gain < 3 * inner * (2 + math.log2(1 / inner)):
                raise UnsupportedEvent(
                    f"rho and sample_rate must be ≤ 0.1 with log(1/q) ≥ 3ρ(2 + log₂(1/ρ)), got {inner:.3g} and "
                    f"{rate:.3g}. Use the contour accountant."
                )
            rho += count * 13 * rate**2 * inner
            omega = min(omega, gain / (4 * inner))
        return rho, omega

    def epsilon_bounds(self, prepared: tuple[float, float], delta: float) -> tuple[float, float]:
        """ρ + 2√(ρ log 1/δ), or the linear branch when the order would exceed ω (Bun et al. 2018, lemma 6)."""
        return 0.0, _tcdp_epsilon(*prepared, delta)

    def delta_bounds(self, prepared: tuple[float, float], epsilon: float) -> tuple[float, float]:
        """The δ at which the formula gives ε."""

        def curve(exponent: float) -> tuple[float, float]:
            value = _tcdp_epsilon(*prepared, math.exp(-exponent))
            return -value, -value

        upper = 0.0
        if _tcdp_epsilon(*prepared, 1.0) < epsilon:
            _, upper = invert_privacy_profile(curve, -epsilon, tolerance=1e-12)
        # The formula grows with log 1/δ: step back below the crossing found from above.
        return 0.0, min(1.0, math.exp(-upper * (1 - 1e-9)))


def _tcdp_epsilon(rho: float, omega: float, delta: float) -> float:
    inverse = -math.log(delta)
    if inverse <= (omega - 1) ** 2 * rho:
        return rho + 2 * math.sqrt(rho * inverse)
    return rho * omega + inverse / (omega - 1)


# ----------------------------------------------------------------------------------------------------------------------
# The central limit of Gaussian differential privacy: μ = q√(T(e^{1/σ²} − 1)) (Bu et al. 2020), *not* an upper bound: at
# q = 0.01, σ = 4, T = 10000, δ = 1e-5 it gives 0.9424 where the truth is 0.9469.
# ----------------------------------------------------------------------------------------------------------------------


def central_limit_epsilon(event: Event, delta: float) -> HeuristicEstimate:
    """Bu et al.'s central limit ε of Gaussians with and without Poisson sampling: NO GUARANTEE.

    Raises:
        UnsupportedEvent: something else took part.

    Example:
        >>> from sordino.events import SelfComposed
        >>> step = PoissonSampled(sample_rate=0.01, event=Gaussian(noise_multiplier=4.0))
        >>> round(central_limit_epsilon(SelfComposed(event=step, count=10_000), 1e-5).value, 6)
        0.94244
    """
    delta = checks.probability(delta=delta, zero=False)
    square = 0.0
    for base, count in flatten(event).counts:
        if isinstance(base, Gaussian):
            square += count / base.noise_multiplier**2
        elif isinstance(base, PoissonSampled) and isinstance(base.event, Gaussian):
            square += count * base.sample_rate**2 * math.expm1(min(700.0, base.event.noise_multiplier**-2))
        else:
            raise UnsupportedEvent(f"the central limit must be of Gaussians, got {base.kind}. Use the pld accountant.")
    return HeuristicEstimate(
        value=gaussian_epsilon(delta, math.sqrt(square))[1],
        method="Gaussian DP, central limit theorem (Bu et al. 2020)",
        warning="no guarantee: the true ε may be larger",
    )


HISTORICAL_ACCOUNTANTS: tuple[Accountant[Any], ...] = (
    AdvancedCompositionAccountant(),
    MomentsAccountant(),
    TCDPAccountant(),
)
"""By name; ``auto`` asks none of them."""
