"""Upper bounds on the log moment generating function for every event that has one (floor 1).

Rényi accounting needs less than the contour integral: an upper bound on K(λ) at real λ. That also exists for
mechanisms known by their zCDP parameter only, for laws with atoms, for fixed-size samples under replace-one, and
for the selection of the best of several runs.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from sordino.accounting.allocation import AllocationLaw
from sordino.accounting.allocation_moments import adding_moment, removing_moment
from sordino.accounting.composition import Steps, flatten
from sordino.accounting.directions import joined, transforms_of
from sordino.accounting.discrete_gaussian import sampled_discrete_gaussian_moments
from sordino.accounting.lattice import LatticeLaw, upper_lattice
from sordino.accounting.law_directions import laws_of
from sordino.accounting.mixture_line import MixtureTransform
from sordino.accounting.mixtures import MixturePair
from sordino.accounting.saddle import Step
from sordino.accounting.samples import displaced_shift
from sordino.accounting.transforms import GaussianTransform, Line, Moments, Transform
from sordino.definitions import NeighboringRelation
from sordino.errors import AccountingError, UnsupportedEvent
from sordino.events import (
    BoundedRange,
    DiscreteGaussian,
    Event,
    FixedSizeSampled,
    Gaussian,
    PoissonSampled,
    RandomAllocation,
    Selection,
    ZeroConcentratedDP,
)

__all__ = ["BoundTransform", "renyi_directions", "success_probability"]

_LATTICE_POINTS = 1 << 13


@dataclass(frozen=True)
class BoundTransform:
    """K(λ) ≤ `bound`(λ) at real λ, and nothing on the line."""

    bound: Callable[[float], float]
    largest_loss: float = math.inf
    decays: bool = False

    def moments(self, lam: float, *, certified: bool = True) -> Moments:  # noqa: ARG002
        """The bound, and its slope by a difference quotient, which only steers the choice of the order."""
        value = self.bound(lam)
        nearby = self.bound(lam * 1.0001)
        return Moments(
            log_mgf=value, error=1e-13 * abs(value), mean=(nearby - value) / (lam * 0.0001), variance=math.nan
        )

    def line(self, lam: float, largest_u: float, tolerance: float) -> Line:  # noqa: ARG002
        """Refused: an upper bound has no value off the real axis."""
        raise UnsupportedEvent("the contour accountant must know the loss exactly, got an upper bound. Use rdp.")


def renyi_directions(steps: Steps, relation: NeighboringRelation) -> tuple[tuple[Step, ...], ...]:
    """Bounds on K of all steps, once for each direction.

    Raises:
        UnsupportedEvent: a step's loss has no finite moments here.
    """
    return joined([(_bounds(event, relation), count) for event, count in steps.counts])


def _bounds(event: Event, relation: NeighboringRelation) -> tuple[Transform, ...]:
    match event:
        case ZeroConcentratedDP():
            return (GaussianTransform(mu=math.sqrt(2 * event.rho)),)
        case BoundedRange():
            # ε²/8-zCDP (Cesar and Rogers 2021, lemma 3.2).
            return (GaussianTransform(mu=event.epsilon / 2),)
        case RandomAllocation():
            if not isinstance(event.event, Gaussian) or relation is NeighboringRelation.REPLACE_ONE:
                # A mixture over the step used is no worse than the worst of them: one use, no amplification.
                return _bounds(event.event, relation)
            shift = 1 / event.event.noise_multiplier
            return tuple(BoundTransform(moment(event.steps, shift)) for moment in (removing_moment, adding_moment))
        case Selection():
            return _selection(event, relation)
        case PoissonSampled(event=DiscreteGaussian()) if relation is not NeighboringRelation.REPLACE_ONE:
            base = event.event
            assert isinstance(base, DiscreteGaussian)
            return tuple(
                BoundTransform(
                    sampled_discrete_gaussian_moments(base.stddev, base.sensitivity, event.sample_rate, removing=side)
                )
                for side in (True, False)
            )
        case FixedSizeSampled() if relation is not NeighboringRelation.ADD_OR_REMOVE_ONE:
            return (_fused(event, relation),)
    try:
        return transforms_of(event, relation)
    except UnsupportedEvent:
        laws = [law for law in laws_of(event, relation) if not isinstance(law, AllocationLaw)]
        if any(law.infinite > 0 for law in laws) or any(math.isinf(end) for law in laws for end in law.support):
            raise
        lattices = [upper_lattice(law, (law.support[1] - law.support[0]) / _LATTICE_POINTS) for law in laws]
        if any(lattice.infinite > 0 for lattice in lattices):
            raise
        return tuple(BoundTransform(_lattice_bound(lattice)) for lattice in lattices)


def _lattice_bound(lattice: LatticeLaw) -> Callable[[float], float]:
    """e^{λL} = y^{−λ} is convex in y = e^{−L}, so that the lattice rounded up bounds the moment."""
    import numpy as np

    def bound(lam: float) -> float:
        exponent = lattice.log_masses + lam * lattice.losses
        peak = float(exponent.max())
        return max(0.0, peak + math.log(float(np.sum(np.exp(exponent - peak)))) + 1e-12)

    return bound


def _fused(event: FixedSizeSampled, relation: NeighboringRelation) -> Transform:
    """The larger of removing's and adding's curves: moments above 1 add up, e^K ≤ e^{K₁} + e^{K₂} − 1."""
    if not isinstance(event.event, Gaussian):
        raise UnsupportedEvent(f"a fixed-size sample must be used by a Gaussian, got {event.event.kind}.")
    rate, shift = event.size / event.population, displaced_shift(event.event.noise_multiplier, relation)
    if rate == 1:
        return GaussianTransform(mu=shift)
    parts = [MixtureTransform(MixturePair.remove(rate, shift)), MixtureTransform(MixturePair.add(rate, shift))]

    def bound(lam: float) -> float:
        moments = [part.moments(lam) for part in parts]
        high, low = sorted((m.log_mgf + m.error for m in moments), reverse=True)
        return high + math.log1p(math.exp(-high) * math.expm1(low)) if low < 700 else high + math.log(2)

    return BoundTransform(bound)


# ── selection of the best run ───────────────────────────────────────────────────────────────────────────────


def _selection(event: Selection, relation: NeighboringRelation) -> tuple[Transform, ...]:
    inner = flatten(event.event, relation)
    directions = renyi_directions(inner, relation)

    def base(lam: float) -> float:
        """Rényi divergence of order λ + 1, worse direction: the theorems need both."""
        totals = []
        for steps in directions:
            moments = [(step.count, step.transform.moments(lam)) for step in steps]
            totals.append(math.fsum(count * (m.log_mgf + m.error) for count, m in moments))
        return max(totals) / lam

    bound = (
        _poisson_bound(base, event.mean) if event.distribution == "poisson" else _negative_binomial_bound(base, event)
    )
    return (BoundTransform(bound),)


def _negative_binomial_bound(base: Callable[[float], float], event: Selection) -> Callable[[float], float]:
    """Papernot and Steinke 2022, theorem 2: ε' = ε(λ) + (1+η)(1−1/λ̂) ε(λ̂) + (1+η) log(1/γ)/λ̂ + log E[K]/(λ−1)."""
    shape, gamma = event.shape, success_probability(event.mean, event.shape)
    if event.distribution == "threshold":
        # The same by Hölder's inequality, with η = 0 and 1/γ in place of E[K]: docs/proofs/tuning-profiles.md.
        shape, gamma = 0.0, 1 / event.mean

    def second(order: float) -> float:
        return (1 + shape) * ((1 - 1 / order) * base(order - 1) - math.log(gamma) / order)

    # The second term does not depend on λ: minimise it once over λ̂ > 1 (any λ̂ is valid).
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
