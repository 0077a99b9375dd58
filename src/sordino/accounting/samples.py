"""What sampling does to a dominating pair (floor 1): one place for every scheme, for Gaussians and for laws.

In units of the noise's standard deviation, with m = 1/z the shift of a record under the relation:

    Poisson              add/remove, zero-out: shift m with probability q. Replace-one: ±m/2, each with probability q.
    Poisson, group of k  Binomial(k, q) records, shift m each (Ganesh 2024). Add/remove and zero-out only.
    fixed size           the sampled record *displaces* another one, which may lie opposite: shift 2m under add/remove
                         (Lebeda et al. 2024), m under replace-one, where z already counts the full diameter.
                         Under replace-one and zero-out each step may look like removing or like adding, as the rest
                         of the data chooses, so that the pair is the larger of both curves (`FusedLaw`).
    random distance      the mixture that the event states (Ganesh 2024). Add/remove and zero-out only.
    with replacement     Binomial(size, 1/population) displaced records, shift 2m each, add/remove only.
"""

import math

from sordino.accounting.mixtures import Mixture, MixturePair, Weighted
from sordino.definitions import NeighboringRelation
from sordino.errors import UnsupportedEvent
from sordino.events import (
    Event,
    FixedSizeSampled,
    Gaussian,
    GaussianMixture,
    GroupPoissonSampled,
    PoissonSampled,
    ReplacementSampled,
)

__all__ = ["displaced_shift", "gaussian_pairs"]

_NEGLIGIBLE = 1e-60
_LARGEST_COUNT = 400


def displaced_shift(noise_multiplier: float, relation: NeighboringRelation) -> float:
    """Largest distance between two records' contributions, in standard deviations."""
    return (1.0 if relation is NeighboringRelation.REPLACE_ONE else 2.0) / noise_multiplier


def gaussian_pairs(event: Event, relation: NeighboringRelation) -> tuple[MixturePair, ...] | None:
    """The pairs of a sampled Gaussian: (remove, add), or one for a symmetric relation; None if it isn't one.

    Raises:
        UnsupportedEvent: the scheme has no pair of this form under the relation.
    """
    if isinstance(event, PoissonSampled) and isinstance(event.event, Gaussian):
        shift = 1 / event.event.noise_multiplier
        if relation is NeighboringRelation.REPLACE_ONE:
            return (MixturePair.replace(event.sample_rate, shift),)
        return MixturePair.remove(event.sample_rate, shift), MixturePair.add(event.sample_rate, shift)
    if isinstance(event, GroupPoissonSampled) and isinstance(event.event, Gaussian):
        _require(event, relation, (NeighboringRelation.ADD_OR_REMOVE_ONE, NeighboringRelation.REPLACE_SPECIAL))
        return _both(_binomial(event.group_size, event.sample_rate, 1 / event.event.noise_multiplier))
    if isinstance(event, FixedSizeSampled) and isinstance(event.event, Gaussian):
        _require(event, relation, (NeighboringRelation.ADD_OR_REMOVE_ONE,))
        shift, rate = displaced_shift(event.event.noise_multiplier, relation), event.size / event.population
        if rate == 1:
            return MixturePair.remove(1.0, shift), MixturePair.add(1.0, shift)
        return MixturePair.remove(rate, shift), MixturePair.add(rate, shift)
    if isinstance(event, ReplacementSampled) and isinstance(event.event, Gaussian):
        _require(event, relation, (NeighboringRelation.ADD_OR_REMOVE_ONE,))
        shift = displaced_shift(event.event.noise_multiplier, relation)
        return _both(_binomial(event.size, 1 / event.population, shift))
    if isinstance(event, GaussianMixture):
        _require(event, relation, (NeighboringRelation.ADD_OR_REMOVE_ONE, NeighboringRelation.REPLACE_SPECIAL))
        return _both(_random_distance(event))
    return None


def _random_distance(event: GaussianMixture) -> Mixture:
    """One component for each distance other than 0; equal ones joined."""
    weights: dict[float, list[float]] = {}
    for distance, probability in zip(event.sensitivities, event.probabilities, strict=True):
        if distance > 0 and probability > 0:
            weights.setdefault(distance / event.noise_multiplier, []).append(probability)
    return Mixture(tuple(Weighted(weight=min(1.0, math.fsum(weights[m])), shift=m) for m in sorted(weights)))


def _require(event: Event, relation: NeighboringRelation, allowed: tuple[NeighboringRelation, ...]) -> None:
    if relation not in allowed:
        raise UnsupportedEvent(
            f"{event.kind} must be accounted under {' or '.join(one.words for one in allowed)} here, "
            f"got {relation.words}. Use the pld accountant or set the relation."
        )


def _both(mixture: Mixture) -> tuple[MixturePair, ...]:
    return MixturePair(mixture, Mixture()), MixturePair(Mixture(), mixture)


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
    return Mixture(tuple(Weighted(weight=weight, shift=j * shift) for j, weight in kept))
