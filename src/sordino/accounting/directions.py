"""Which transforms dominate an event, in each direction of the neighbouring relation (floor 1).

A dominating pair (P, Q) bounds the privacy curve of every pair of neighbours; pairs of adaptively composed steps
compose into a dominating pair of the whole, *direction by direction*: all steps remove the same record, or all
add it (Zhu, Dong and Wang 2022, theorem 10). ε is the larger of the two directions' ε.
"""

from collections.abc import Callable

from sordino.accounting.composition import Steps
from sordino.accounting.mixture_line import MixtureTransform
from sordino.accounting.mixtures import MixturePair
from sordino.accounting.saddle import Step
from sordino.accounting.transforms import GaussianTransform, LaplaceTransform, Transform
from sordino.definitions import NeighboringRelation
from sordino.errors import UnsupportedEvent
from sordino.events import Event, Gaussian, Laplace, PoissonSampled

__all__ = ["directions"]

_Pair = Callable[[float, float], MixturePair]

_PAIRS: dict[NeighboringRelation, tuple[_Pair, ...]] = {
    NeighboringRelation.ADD_OR_REMOVE_ONE: (MixturePair.remove, MixturePair.add),
    # Zeroing a record out of a Poisson sample gives the same two distributions as removing it.
    NeighboringRelation.REPLACE_SPECIAL: (MixturePair.remove, MixturePair.add),
    # Replacing is symmetric: one direction stands for both.
    NeighboringRelation.REPLACE_ONE: (MixturePair.replace,),
}


def directions(steps: Steps, relation: NeighboringRelation) -> tuple[tuple[Step, ...], ...]:
    """The transforms of all steps, once for each direction of the relation.

    Raises:
        UnsupportedEvent: a step has no transform under this relation.
    """
    return tuple(
        tuple(Step(transform=_transform(event, pair), count=count) for event, count in steps.counts)
        for pair in _PAIRS[relation]
    )


def _transform(event: Event, pair: _Pair) -> Transform:
    if isinstance(event, Gaussian):
        return GaussianTransform(mu=1 / event.noise_multiplier)
    if isinstance(event, Laplace):
        return LaplaceTransform(scale=event.noise_multiplier)
    if isinstance(event, PoissonSampled) and isinstance(event.event, Gaussian):
        return MixtureTransform(pair(event.sample_rate, 1 / event.event.noise_multiplier))
    raise UnsupportedEvent(
        f"event must have a moment generating function here, got {event.kind}. Use another accountant."
    )
