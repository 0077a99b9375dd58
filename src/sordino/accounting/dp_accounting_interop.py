"""Reading and writing dp-accounting's DpEvents, the field's interchange form.

dp-accounting is imported only when one of these functions is called. Its `GaussianDpEvent` counts noise over the
sensitivity under add-or-remove; under replace-one its PLD accountant doubles the sensitivity. Here a noise
multiplier is always relative to the sensitivity under the declared relation, so replace-one halves it on reading.
"""

import math
from dataclasses import fields
from numbers import Integral
from operator import attrgetter
from typing import Any

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
# Each kind of event, its DpEvent, and the names of the latter's arguments in the order of the event's fields.
_COUNTERPARTS: tuple[tuple[type[Event], str, tuple[str, ...]], ...] = (
    (NoOp, "NoOpDpEvent", ()),
    (Gaussian, "GaussianDpEvent", ("noise_multiplier",)),
    (GaussianMixture, "dp_event.MixtureOfGaussiansDpEvent", ("standard_deviation", "sensitivities", "sampling_probs")),
    (Laplace, "LaplaceDpEvent", ("noise_multiplier",)),
    (PoissonSampled, "PoissonSampledDpEvent", ("sampling_probability", "event")),
    (SampledWithoutReplacement, "SampledWithoutReplacementDpEvent", ("source_dataset_size", "sample_size", "event")),
    (SampledWithReplacement, "SampledWithReplacementDpEvent", ("source_dataset_size", "sample_size", "event")),
    (SelfComposed, "SelfComposedDpEvent", ("event", "count")),
    (Composed, "ComposedDpEvent", ("events",)),
    (ZeroConcentratedDP, "ZCDpEvent", ("rho",)),
)


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
    relation = NeighboringRelation(neighboring_relation)
    if isinstance(source, dpa.NonPrivateDpEvent):
        return NonPrivate(reason="NonPrivateDpEvent")

    def value(given: Any) -> Any:
        if isinstance(given, dpa.DpEvent):
            return from_dp_event(given, neighboring_relation=relation)
        if isinstance(given, int | Integral):
            return int(given)
        return tuple(map(value, given)) if hasattr(given, "__len__") else float(given)

    for kind, name, arguments in _COUNTERPARTS:
        # A zCDP event with an offset ξ has no counterpart.
        if isinstance(source, attrgetter(name)(dpa)) and float(getattr(source, "xi", 0.0)) == 0:
            values = [value(getattr(source, argument)) for argument in arguments]
            if kind in (Gaussian, Laplace):
                values = [values[0] / relation.sensitivity_factor]
            return kind(**dict(zip((item.name for item in fields(kind)), values, strict=True)))
    raise UnsupportedEvent(f"DpEvent must have a counterpart here, got {type(source).__name__}. Describe it by hand.")


def to_dp_event(event: Event, *, neighboring_relation: NeighboringRelation = _ADD) -> object:
    """The DpEvent that describes the event.

    Raises:
        UnsupportedEvent: the event has no counterpart.
    """
    dpa = _module()
    relation = NeighboringRelation(neighboring_relation)

    def value(given: object) -> object:
        if isinstance(given, Event):
            return to_dp_event(given, neighboring_relation=relation)
        return list(map(value, given)) if isinstance(given, tuple) else given

    if isinstance(event, NonPrivate):
        return dpa.NonPrivateDpEvent()
    if isinstance(event, RandomizedResponse):
        share = event.categories / (event.categories - 1 + math.exp(min(event.epsilon, 700.0)))
        return dpa.RandomizedResponseDpEvent(share, event.categories)
    for kind, name, _ in _COUNTERPARTS:
        if type(event) is kind:
            values = [value(getattr(event, item.name)) for item in fields(event)]
            if isinstance(event, Gaussian | Laplace):
                values = [event.noise_multiplier * relation.sensitivity_factor]
            return attrgetter(name)(dpa)(*values)
    raise UnsupportedEvent(f"event must have a DpEvent, got {event.kind}. Exchange its JSON instead.")
