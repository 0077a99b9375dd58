"""Reading and writing dp-accounting's DpEvents, the field's interchange form.

dp-accounting is imported only when one of these functions is called. Its `GaussianDpEvent` counts noise over the
sensitivity under add-or-remove; under replace-one its PLD accountant doubles the sensitivity. Here a noise
multiplier is always relative to the sensitivity under the declared relation, so replace-one halves it on reading.
"""

from typing import Any, cast

from sordino.definitions import NeighboringRelation
from sordino.errors import UnsupportedEvent
from sordino.events import (
    Composed,
    Event,
    Gaussian,
    GaussianMixture,
    Laplace,
    NonPrivate,
    NoOp,
    PoissonSampled,
    RandomizedResponse,
    SampledWithoutReplacement,
    SampledWithReplacement,
    SelfComposed,
    ZeroConcentratedDP,
)
from sordino.installation import require

_ADD = NeighboringRelation.ADD_OR_REMOVE_ONE


def _module() -> Any:
    require("verify", "dp_accounting", user="an exchange of events")
    import dp_accounting

    return dp_accounting


def from_dp_event(source: object, *, neighboring_relation: NeighboringRelation = _ADD) -> Event:
    """The event that a DpEvent describes.

    Args:
        source: a `dp_accounting.DpEvent`.
        neighboring_relation: the relation under which the result will be accounted.

    Raises:
        UnsupportedEvent: the DpEvent has no counterpart.
    """
    dpa = _module()
    factor = NeighboringRelation(neighboring_relation).sensitivity_factor
    item = cast("Any", source)
    if isinstance(source, dpa.NoOpDpEvent):
        return NoOp()
    if isinstance(source, dpa.NonPrivateDpEvent):
        return NonPrivate(reason="NonPrivateDpEvent")
    if isinstance(source, dpa.GaussianDpEvent):
        return Gaussian(noise_multiplier=float(item.noise_multiplier) / factor)
    if isinstance(source, dpa.dp_event.MixtureOfGaussiansDpEvent):
        return GaussianMixture(
            noise_multiplier=float(item.standard_deviation),
            sensitivities=tuple(float(value) for value in item.sensitivities),
            probabilities=tuple(float(value) for value in item.sampling_probs),
        )
    if isinstance(source, dpa.LaplaceDpEvent):
        return Laplace(noise_multiplier=float(item.noise_multiplier) / factor)
    if isinstance(source, dpa.PoissonSampledDpEvent):
        inner = from_dp_event(item.event, neighboring_relation=neighboring_relation)
        return PoissonSampled(sample_rate=float(item.sampling_probability), event=inner)
    if isinstance(source, dpa.SampledWithoutReplacementDpEvent):
        inner = from_dp_event(item.event, neighboring_relation=neighboring_relation)
        return SampledWithoutReplacement(
            dataset_size=int(item.source_dataset_size), sample_size=int(item.sample_size), event=inner
        )
    if isinstance(source, dpa.SampledWithReplacementDpEvent):
        inner = from_dp_event(item.event, neighboring_relation=neighboring_relation)
        return SampledWithReplacement(
            dataset_size=int(item.source_dataset_size), sample_size=int(item.sample_size), event=inner
        )
    if isinstance(source, dpa.SelfComposedDpEvent):
        return SelfComposed(
            event=from_dp_event(item.event, neighboring_relation=neighboring_relation), count=int(item.count)
        )
    if isinstance(source, dpa.ComposedDpEvent):
        return Composed(
            events=tuple(from_dp_event(part, neighboring_relation=neighboring_relation) for part in item.events)
        )
    return _from_parameters(dpa, source)


def _from_parameters(dpa: Any, source: object) -> Event:
    item = cast("Any", source)
    if isinstance(source, dpa.ZCDpEvent) and float(getattr(item, "xi", 0.0)) == 0:
        return ZeroConcentratedDP(rho=float(item.rho))
    raise UnsupportedEvent(f"DpEvent must have a counterpart here, got {type(source).__name__}. Describe it by hand.")


def to_dp_event(event: Event, *, neighboring_relation: NeighboringRelation = _ADD) -> object:
    """The DpEvent that describes the event.

    Raises:
        UnsupportedEvent: the event has no counterpart.
    """
    dpa = _module()
    factor = NeighboringRelation(neighboring_relation).sensitivity_factor
    match event:
        case NoOp():
            return dpa.NoOpDpEvent()
        case NonPrivate():
            return dpa.NonPrivateDpEvent()
        case Gaussian():
            return dpa.GaussianDpEvent(event.noise_multiplier * factor)
        case GaussianMixture():
            return dpa.dp_event.MixtureOfGaussiansDpEvent(
                event.noise_multiplier, list(event.sensitivities), list(event.probabilities)
            )
        case Laplace():
            return dpa.LaplaceDpEvent(event.noise_multiplier * factor)
        case PoissonSampled():
            return dpa.PoissonSampledDpEvent(
                event.sample_rate, to_dp_event(event.event, neighboring_relation=neighboring_relation)
            )
        case SampledWithoutReplacement():
            inner = to_dp_event(event.event, neighboring_relation=neighboring_relation)
            return dpa.SampledWithoutReplacementDpEvent(event.dataset_size, event.sample_size, inner)
        case SampledWithReplacement():
            inner = to_dp_event(event.event, neighboring_relation=neighboring_relation)
            return dpa.SampledWithReplacementDpEvent(event.dataset_size, event.sample_size, inner)
        case SelfComposed():
            return dpa.SelfComposedDpEvent(
                to_dp_event(event.event, neighboring_relation=neighboring_relation), event.count
            )
        case Composed():
            return dpa.ComposedDpEvent(
                [to_dp_event(part, neighboring_relation=neighboring_relation) for part in event.events]
            )
        case ZeroConcentratedDP():
            return dpa.ZCDpEvent(event.rho)
        case RandomizedResponse():
            share = event.categories / (event.categories - 1 + _exp(event.epsilon))
            return dpa.RandomizedResponseDpEvent(share, event.categories)
        case _:
            raise UnsupportedEvent(f"event must have a DpEvent, got {event.kind}. Exchange its JSON instead.")


def _exp(x: float) -> float:
    import math

    return math.exp(min(x, 700.0))
