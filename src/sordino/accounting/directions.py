"""Which transforms dominate an event, in each direction of the neighbouring relation (floor 1).

A dominating pair (P, Q) bounds the privacy curve of every pair of neighbours; pairs of adaptively composed steps
compose into a dominating pair of the whole, *direction by direction*: all steps remove the same record, or all
add it (Zhu, Dong and Wang 2022, theorem 10). ε is the larger of the two directions' ε.
"""

from sordino.accounting.atoms import AtomicTransform
from sordino.accounting.composition import Steps
from sordino.accounting.discrete_gaussian import DiscreteGaussianTransform
from sordino.accounting.law_directions import laws_of
from sordino.accounting.laws import AtomicLaw
from sordino.accounting.mixture_line import MixtureTransform
from sordino.accounting.saddle import Step
from sordino.accounting.samples import gaussian_pairs
from sordino.accounting.transforms import GaussianTransform, LaplaceTransform, Transform
from sordino.definitions import NeighboringRelation
from sordino.errors import UnsupportedEvent
from sordino.events import DiscreteGaussian, Event, Gaussian, Laplace

__all__ = ["directions", "joined", "transforms_of"]


def directions(steps: Steps, relation: NeighboringRelation) -> tuple[tuple[Step, ...], ...]:
    """The transforms of all steps, once for each direction of the relation.

    Raises:
        UnsupportedEvent: a step has no transform under this relation.
    """
    return joined([(transforms_of(event, relation), count) for event, count in steps.counts])


def joined(choices: list[tuple[tuple[Transform, ...], int]]) -> tuple[tuple[Step, ...], ...]:
    """One list of steps for each direction; symmetric steps stand in both."""
    width = max(len(choice) for choice, _ in choices)
    return tuple(
        tuple(Step(transform=choice[min(index, len(choice) - 1)], count=count) for choice, count in choices)
        for index in range(width)
    )


def transforms_of(event: Event, relation: NeighboringRelation) -> tuple[Transform, ...]:
    """(removing, adding), or one transform when the two are equal."""
    if isinstance(event, Gaussian):
        return (GaussianTransform(mu=1 / event.noise_multiplier),)
    if isinstance(event, Laplace):
        return (LaplaceTransform(scale=event.noise_multiplier),)
    if isinstance(event, DiscreteGaussian):
        return (DiscreteGaussianTransform(stddev=event.stddev, sensitivity=event.sensitivity),)
    pairs = gaussian_pairs(event, relation)
    if pairs is not None:
        if any(pair.upper.certain or pair.lower.certain for pair in pairs):
            return (GaussianTransform(mu=max(pair.reach for pair in pairs)),)
        return tuple(MixtureTransform(pair) for pair in pairs)
    laws = laws_of(event, relation)
    atomic = tuple(AtomicTransform(law) for law in laws if isinstance(law, AtomicLaw) and law.infinite == 0)
    if len(atomic) == len(laws):
        return atomic
    raise UnsupportedEvent(
        f"event must have a moment generating function here, got {event.kind}. Use the pld or rdp accountant."
    )
