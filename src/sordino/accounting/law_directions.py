"""Which loss laws dominate an event, in each direction of the neighbouring relation (floor 1)."""

import math
from dataclasses import dataclass

from sordino.accounting.allocation import AllocationLaw
from sordino.accounting.composition import Steps
from sordino.accounting.discrete_gaussian import DiscreteGaussianLaw
from sordino.accounting.laws import (
    AtomicLaw,
    FusedLaw,
    LaplaceLaw,
    Law,
    MixtureLaw,
    SampledLaw,
    approximate_law,
    randomized_response_law,
)
from sordino.accounting.mixtures import MixturePair
from sordino.accounting.projected import projected_laws
from sordino.accounting.samples import displaced_shift, gaussian_pairs
from sordino.definitions import NeighboringRelation
from sordino.errors import UnsupportedEvent
from sordino.events import (
    ApproximateDP,
    BoundedRange,
    DiscreteGaussian,
    DiscreteLaplace,
    Event,
    FixedSizeSampled,
    Gaussian,
    Laplace,
    PoissonSampled,
    PureDP,
    RandomAllocation,
    RandomizedResponse,
)

__all__ = ["LawStep", "law_directions", "laws_of"]


@dataclass(frozen=True, kw_only=True)
class LawStep:
    """One law, `count` times."""

    law: Law | AllocationLaw
    count: int


def law_directions(steps: Steps, relation: NeighboringRelation) -> tuple[tuple[LawStep, ...], ...]:
    """The laws of all steps, once for each direction; symmetric steps stand in both.

    Raises:
        UnsupportedEvent: a step has no law under this relation.
    """
    laws = [(laws_of(event, relation), count) for event, count in steps.counts]
    width = max(len(choice) for choice, _ in laws)
    return tuple(
        tuple(LawStep(law=choice[min(index, len(choice) - 1)], count=count) for choice, count in laws)
        for index in range(width)
    )


def laws_of(event: Event, relation: NeighboringRelation) -> tuple[Law | AllocationLaw, ...]:
    """(removing, adding), or one law when the two are equal."""
    if isinstance(event, RandomAllocation):
        assert isinstance(event.event, Gaussian)
        shift = 1 / event.event.noise_multiplier
        return tuple(AllocationLaw(steps=event.steps, shift=shift, removing=side) for side in (True, False))
    if isinstance(event, FixedSizeSampled) and relation is not NeighboringRelation.ADD_OR_REMOVE_ONE:
        return (_fused_fixed_size(event, relation),)
    projected = projected_laws(event, relation)
    if projected is not None:
        return projected
    pairs = gaussian_pairs(event, relation)
    if pairs is not None:
        return tuple(MixtureLaw(pair=pair) for pair in pairs)
    if isinstance(event, PoissonSampled):
        return _poisson(event, relation)
    return (_plain(event),)


def _plain(event: Event) -> Law:
    """Laws that are the same in both directions and under every relation."""
    match event:
        case Gaussian():
            return MixtureLaw(pair=MixturePair.remove(1.0, 1 / event.noise_multiplier))
        case Laplace():
            return LaplaceLaw(scale=event.noise_multiplier)
        case RandomizedResponse():
            return randomized_response_law(event.epsilon, event.categories)
        case PureDP() | BoundedRange():
            return randomized_response_law(event.epsilon)
        case ApproximateDP():
            return approximate_law(event.epsilon, event.delta)
        case DiscreteLaplace():
            return _discrete_laplace(event.scale, event.sensitivity)
        case DiscreteGaussian():
            return DiscreteGaussianLaw(stddev=event.stddev, sensitivity=event.sensitivity)
        case _:
            raise UnsupportedEvent(
                f"event must have a privacy loss distribution here, got {event.kind}. Use the rdp accountant."
            )


def _poisson(event: PoissonSampled, relation: NeighboringRelation) -> tuple[Law, ...]:
    if relation is NeighboringRelation.REPLACE_ONE:
        raise UnsupportedEvent(
            f"a Poisson sample under replace one must be used by a Gaussian, got {event.event.kind}. "
            "Account under add or remove one."
        )
    base = _plain(event.event)
    return (
        SampledLaw(base=base, sample_rate=event.sample_rate, removing=True),
        SampledLaw(base=base, sample_rate=event.sample_rate, removing=False),
    )


def _fused_fixed_size(event: FixedSizeSampled, relation: NeighboringRelation) -> Law:
    """The larger of removing's and adding's curves, with the record displacing an opposite one."""
    rate = event.size / event.population
    if not isinstance(event.event, Gaussian):
        raise UnsupportedEvent(f"a fixed-size sample must be used by a Gaussian, got {event.event.kind}.")
    shift = displaced_shift(event.event.noise_multiplier, relation)
    if rate == 1:
        return MixtureLaw(pair=MixturePair.remove(1.0, shift))
    return FusedLaw(
        positive=MixtureLaw(pair=MixturePair.remove(rate, shift)),
        negative=MixtureLaw(pair=MixturePair.add(rate, shift)),
    )


def _collected(pairs: list[tuple[float, float]]) -> AtomicLaw:
    """Atoms with equal losses joined, ascending."""
    masses: dict[float, list[float]] = {}
    for loss, mass in pairs:
        masses.setdefault(loss, []).append(mass)
    losses = sorted(masses)
    return AtomicLaw(losses=tuple(losses), masses=tuple(math.fsum(masses[loss]) for loss in losses))


def _discrete_laplace(scale: float, sensitivity: int) -> AtomicLaw:
    """P(x) ∝ e^{−|x|/b}, Q shifted by s: L(x) = (|x−s| − |x|)/b, constant outside 0 < x < s."""
    ratio = math.exp(-1 / scale)
    normal = (1 - ratio) / (1 + ratio)
    top = normal / (1 - ratio)  # P(x ≤ 0)
    atoms = [(sensitivity / scale, top), (-sensitivity / scale, ratio**sensitivity * top)]
    atoms += [((sensitivity - 2 * x) / scale, normal * ratio**x) for x in range(1, sensitivity)]
    return _collected(atoms)
