"""From an event and a neighboring relation to its dominating pairs: the one place that knows what bounds an event.

A pair (P, Q) dominates a step when no two neighbors' outputs have a larger δ(ε) at any ε. A pair is given as the
distribution of its loss log(P/Q) under P and Q, from which both engines compute: `event_mgfs` its moment generating
function, `pld` its distribution on a lattice.

Pairs of adaptively composed steps compose into a dominating pair of the whole, *direction by direction*: all steps
remove the same record, or all add it (Zhu, Dong and Wang 2022, theorem 10). ε is the larger of the two directions' ε.

In units of the noise's standard deviation, with m = 1/z the shift of a record under the relation:

    Poisson              add/remove, zero-out: shift m with probability q. Replace-one: ±m/2, each with probability q.
    Poisson, group of k  Binomial(k, q) records, shift m each (Ganesh 2024). Add/remove and zero-out only.
    fixed size           the sampled record *displaces* another one, which may lie opposite: shift 2m under add/remove
                         (Lebeda et al. 2024), m under replace-one, where z already counts the full diameter.
                         Under replace-one and zero-out each step may look like removing or like adding, as the rest
                         of the data chooses, so that the pair is the larger of both curves (`PointwiseMaxPLD`).
    random distance      the mixture that the event states (Ganesh 2024). Add/remove and zero-out only.
    with replacement     Binomial(size, 1/population) displaced records, shift 2m each under add/remove. Under
                         replace-one (m each) and zero-out (2m each) the number of displaced records counts as known
                         where there are any (Balle, Barthe and Gaboardi 2018, theorem 10), and the pair is the larger
                         of removing's and adding's curves: docs/proofs/sampling.md.
"""

import math
from collections.abc import Iterable, Sequence
from typing import TypeAlias, TypeVar

from sordino.accounting.base import EventCounts, Repeated
from sordino.accounting.discrete_gaussian import DiscreteGaussianPLD
from sordino.accounting.gaussian_mixtures import Mixture, MixtureComponent, MixturePair
from sordino.accounting.pld_discretized import RandomAllocationPLD
from sordino.accounting.pld_mechanisms import (
    AveragedPLD,
    DiscretePLD,
    GaussianMixturePLD,
    LaplacePLD,
    PointwiseMaxPLD,
    PoissonSampledPLD,
    PrivacyLossDistribution,
    approximate_pld,
    projected_plds,
    randomized_response_pld,
)
from sordino.definitions import NeighboringRelation
from sordino.errors import UnsupportedEvent
from sordino.events import (
    ApproximateDP,
    BoundedRange,
    DiscreteGaussian,
    DiscreteLaplace,
    Event,
    Gaussian,
    GaussianMixture,
    GroupPoissonSampled,
    Laplace,
    PoissonSampled,
    PureDP,
    RandomAllocation,
    RandomizedResponse,
    SampledWithoutReplacement,
    SampledWithReplacement,
)

DominatingPair: TypeAlias = PrivacyLossDistribution | RandomAllocationPLD
"""A pair (P, Q), as the distribution of its loss."""

_NEGLIGIBLE = 1e-60
_LARGEST_COUNT = 400
_ADD, _ZERO, _REPLACE = (
    NeighboringRelation.ADD_OR_REMOVE_ONE,
    NeighboringRelation.REPLACE_SPECIAL,
    NeighboringRelation.REPLACE_ONE,
)


def dominating_pairs(event: Event, neighboring_relation: NeighboringRelation) -> tuple[DominatingPair, ...]:
    """(removing, adding), or one pair when both directions have the same loss.

    Args:
        event: one step of a flattened event.
        neighboring_relation: the relation.

    Raises:
        UnsupportedEvent: no pair is known for the event under the relation.
    """
    projected = projected_plds(event, neighboring_relation)
    if projected is not None:
        return projected
    match event:
        case PoissonSampled(event=Gaussian() as inner):
            shift = 1 / inner.noise_multiplier
            if neighboring_relation is _REPLACE:
                return (GaussianMixturePLD(pair=MixturePair.replace(event.sample_rate, shift)),)
            return _both(_hit(event.sample_rate, shift))
        case GroupPoissonSampled(event=Gaussian() as inner):
            _require(event, neighboring_relation, _ADD, _ZERO)
            return _both(_binomial(event.group_size, event.sample_rate, 1 / inner.noise_multiplier))
        case SampledWithoutReplacement(event=Gaussian() as inner):
            # The record displaces another one, at most the diameter of contributions away.
            shift = (1.0 if neighboring_relation is _REPLACE else 2.0) / inner.noise_multiplier
            pairs = _both(_hit(event.sample_size / event.dataset_size, shift))
            if neighboring_relation is _ADD or len(pairs) == 1:
                return pairs
            return (PointwiseMaxPLD(positive=pairs[0], negative=pairs[1]),)
        case SampledWithReplacement(event=Gaussian() as inner):
            return _with_replacement(event, inner, neighboring_relation)
        case GaussianMixture():
            _require(event, neighboring_relation, _ADD, _ZERO)
            return _both(_random_distance(event))
        case RandomAllocation(event=Gaussian() as inner):
            shift = 1 / inner.noise_multiplier
            return tuple(RandomAllocationPLD(steps=event.steps, shift=shift, removing=side) for side in (True, False))
        case PoissonSampled():
            return _poisson(event, neighboring_relation)
        case SampledWithoutReplacement() | SampledWithReplacement() | GroupPoissonSampled():
            raise UnsupportedEvent(f"{event.kind} must be used by a Gaussian, got {event.event.kind}. Use Poisson.")
        case _:
            return (_plain(event),)


_T = TypeVar("_T")


def pair_directions(pairs: Sequence[tuple[tuple[_T, ...], int]]) -> tuple[tuple[Repeated[_T], ...], ...]:
    """The repeated steps of each direction; steps with one pair for both stand in both."""
    width = max(len(choice) for choice, _ in pairs)
    return tuple(
        tuple(Repeated(choice[min(index, len(choice) - 1)], count) for choice, count in pairs) for index in range(width)
    )


def composed_pairs(
    steps: EventCounts, neighboring_relation: NeighboringRelation
) -> tuple[tuple[Repeated[DominatingPair], ...], ...]:
    """The pairs of all steps with their counts, once for each direction."""
    return pair_directions([(dominating_pairs(event, neighboring_relation), count) for event, count in steps.counts])


# ── Gaussians, sampled and not ──────────────────────────────────────────────────────────────────────────────


def _gaussian(shift: float) -> GaussianMixturePLD:
    return GaussianMixturePLD(pair=MixturePair.remove(1.0, shift))


def _hit(sample_rate: float, shift: float) -> Mixture:
    return Mixture((MixtureComponent(weight=sample_rate, shift=shift),))


def _both(mixture: Mixture) -> tuple[GaussianMixturePLD, ...]:
    """Removing and adding; a mixture of one component is a Gaussian, the same both ways."""
    if mixture.certain:
        return (_gaussian(mixture.parts[0].shift),)
    nothing = Mixture()
    return GaussianMixturePLD(pair=MixturePair(mixture, nothing)), GaussianMixturePLD(
        pair=MixturePair(nothing, mixture)
    )


def _with_replacement(
    event: SampledWithReplacement, inner: Gaussian, neighboring_relation: NeighboringRelation
) -> tuple[DominatingPair, ...]:
    """With k of the draws displaced: k is known where it is ≥ 1, unless the relation is add-or-remove-one."""
    shift = (1.0 if neighboring_relation is _REPLACE else 2.0) / inner.noise_multiplier
    hits = _binomial(event.sample_size, 1 / event.dataset_size, shift)
    if neighboring_relation is _ADD or hits.certain:
        return _both(hits)
    missed = event.sample_size * math.log1p(-1 / event.dataset_size)
    hit, total = min(1.0, -math.expm1(missed) * (1 + 1e-12)), math.fsum(part.weight for part in hits.parts)

    def known(removing: bool) -> AveragedPLD:
        make = MixturePair.remove if removing else MixturePair.add
        parts = tuple((part.weight / total, GaussianMixturePLD(pair=make(hit, part.shift))) for part in hits.parts)
        return AveragedPLD(parts=parts, unprotected=0.0, sample_rate=hit, removing=removing)

    return (PointwiseMaxPLD(positive=known(True), negative=known(False)),)


def _random_distance(event: GaussianMixture) -> Mixture:
    """One component for each distance other than 0."""
    chances = zip(event.sensitivities, event.probabilities, strict=True)
    shifts = _joined((m / event.noise_multiplier, chance) for m, chance in chances if m > 0 and chance > 0)
    return Mixture(tuple(MixtureComponent(weight=min(1.0, weight), shift=shift) for shift, weight in shifts))


def _joined(pairs: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """(value, weight) ascending, the weights of equal values added up."""
    weights: dict[float, list[float]] = {}
    for value, weight in pairs:
        weights.setdefault(value, []).append(weight)
    return [(value, math.fsum(weights[value])) for value in sorted(weights)]


def _require(event: Event, neighboring_relation: NeighboringRelation, *allowed: NeighboringRelation) -> None:
    if neighboring_relation not in allowed:
        raise UnsupportedEvent(
            f"{event.kind} must be accounted under {' or '.join(one.describe() for one in allowed)}, "
            f"got {neighboring_relation.describe()}. Set the relation."
        )


def _binomial(trials: int, rate: float, shift: float) -> Mixture:
    """Binomial(trials, rate) shifts. Counts with probability below 1e-60 are dropped, which moves no δ in a double."""
    from scipy.special import bdtrc

    most = min(trials, _LARGEST_COUNT)
    if trials > most and float(bdtrc(most, trials, rate)) > _NEGLIGIBLE:
        raise UnsupportedEvent(
            f"a record must take part at most {_LARGEST_COUNT} times in a batch, got {trials} draws at rate {rate:g}. "
            "Use smaller batches or groups."
        )
    logs = [
        math.lgamma(trials + 1) - math.lgamma(j + 1) - math.lgamma(trials - j + 1) + j * math.log(rate)
        for j in range(1, most + 1)
    ]
    if rate < 1:
        logs = [value + (trials - j) * math.log1p(-rate) for j, value in enumerate(logs, start=1)]
    else:
        logs = [0.0 if j == trials else -math.inf for j in range(1, most + 1)]
    kept = [(j, math.exp(value)) for j, value in enumerate(logs, start=1) if value > math.log(_NEGLIGIBLE)]
    return Mixture(tuple(MixtureComponent(weight=weight, shift=j * shift) for j, weight in kept))


# ── other mechanisms ────────────────────────────────────────────────────────────────────────────────────────


def _plain(event: Event) -> PrivacyLossDistribution:
    """Laws that are the same in both directions and under every relation."""
    match event:
        case Gaussian():
            return _gaussian(1 / event.noise_multiplier)
        case Laplace():
            return LaplacePLD(scale=event.noise_multiplier)
        case RandomizedResponse():
            return randomized_response_pld(event.epsilon, event.categories)
        case PureDP() | BoundedRange():
            return randomized_response_pld(event.epsilon)
        case ApproximateDP():
            return approximate_pld(event.epsilon, event.delta)
        case DiscreteLaplace():
            return _discrete_laplace(event.scale, event.sensitivity)
        case DiscreteGaussian():
            return DiscreteGaussianPLD(stddev=event.stddev, sensitivity=event.sensitivity)
        case _:
            raise UnsupportedEvent(
                f"event must have a privacy loss distribution here, got {event.kind}. Use the rdp accountant."
            )


def _poisson(event: PoissonSampled, neighboring_relation: NeighboringRelation) -> tuple[PrivacyLossDistribution, ...]:
    if neighboring_relation is _REPLACE:
        raise UnsupportedEvent(
            f"a Poisson sample under replace one must be used by a Gaussian, got {event.event.kind}. "
            "Account under add or remove one."
        )
    base = _plain(event.event)
    return (
        PoissonSampledPLD(base=base, sample_rate=event.sample_rate, removing=True),
        PoissonSampledPLD(base=base, sample_rate=event.sample_rate, removing=False),
    )


def _discrete_laplace(scale: float, sensitivity: int) -> DiscretePLD:
    """P(x) ∝ e^{−|x|/b}, Q shifted by s: L(x) = (|x−s| − |x|)/b, constant outside 0 < x < s."""
    ratio = math.exp(-1 / scale)
    normal = (1 - ratio) / (1 + ratio)
    top = normal / (1 - ratio)  # P(x ≤ 0)
    atoms = [(sensitivity / scale, top), (-sensitivity / scale, ratio**sensitivity * top)]
    atoms += [((sensitivity - 2 * x) / scale, normal * ratio**x) for x in range(1, sensitivity)]
    losses, masses = zip(*_joined(atoms), strict=True)
    return DiscretePLD(losses=losses, masses=masses)
