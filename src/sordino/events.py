"""What a mechanism did (floor 0): frozen, plain descriptions that accountants consume. JSON both ways.

An event says nothing about data and nothing about ε. Sensitivity is already divided out: `noise_multiplier`
is always noise standard deviation (or Laplace scale) over sensitivity *under the declared neighbouring
relation*, which stands beside the event, in the plan, not inside it.

Example:
    >>> from sordino.events import Gaussian, PoissonSampled, SelfComposed, from_json, to_json
    >>> event = SelfComposed(event=PoissonSampled(sample_rate=0.01, event=Gaussian(noise_multiplier=4.0)), count=10)
    >>> from_json(to_json(event)) == event
    True
"""

import json
from dataclasses import fields

from sordino.errors import InvalidArgument
from sordino.event_kinds import (
    KINDS,
    ApproximateDP,
    BoundedRange,
    Composed,
    DiscreteGaussian,
    DiscreteLaplace,
    Event,
    FixedSizeSampled,
    Gaussian,
    GaussianMixture,
    GroupPoissonSampled,
    Laplace,
    MatrixGaussian,
    NoPrivacy,
    Nothing,
    Parallel,
    PoissonSampled,
    ProjectedGaussian,
    PureDP,
    RandomAllocation,
    RandomizedResponse,
    ReplacementSampled,
    Selection,
    SelfComposed,
    ShuffledEpochs,
    TruncatedPoissonSampled,
    ZeroConcentratedDP,
)

__all__ = [
    "ApproximateDP",
    "BoundedRange",
    "Composed",
    "DiscreteGaussian",
    "DiscreteLaplace",
    "Event",
    "FixedSizeSampled",
    "Gaussian",
    "GaussianMixture",
    "GroupPoissonSampled",
    "Laplace",
    "MatrixGaussian",
    "NoPrivacy",
    "Nothing",
    "Parallel",
    "PoissonSampled",
    "ProjectedGaussian",
    "PureDP",
    "RandomAllocation",
    "RandomizedResponse",
    "ReplacementSampled",
    "Selection",
    "SelfComposed",
    "ShuffledEpochs",
    "TruncatedPoissonSampled",
    "ZeroConcentratedDP",
    "compose",
    "from_dict",
    "from_json",
    "to_dict",
    "to_json",
]


def compose(events: list[Event] | tuple[Event, ...]) -> Event:
    """The composition of a run's events, with equal neighbours in time folded into `SelfComposed`.

    Example:
        >>> compose([Gaussian(noise_multiplier=1.0)] * 3)
        SelfComposed(event=Gaussian(noise_multiplier=1.0), count=3)
    """
    folded: list[tuple[Event, int]] = []
    for event in events:
        base, count = (event.event, event.count) if isinstance(event, SelfComposed) else (event, 1)
        if folded and folded[-1][0] == base:
            folded[-1] = (base, folded[-1][1] + count)
        else:
            folded.append((base, count))
    parts = tuple(event if count == 1 else SelfComposed(event=event, count=count) for event, count in folded)
    if not parts:
        return Nothing()
    return parts[0] if len(parts) == 1 else Composed(events=parts)


def to_dict(event: Event) -> dict[str, object]:
    """The event as plain JSON types, with its `kind`."""
    body: dict[str, object] = {"kind": event.kind}
    for item in fields(event):
        value = getattr(event, item.name)
        if isinstance(value, Event):
            body[item.name] = to_dict(value)
        elif isinstance(value, tuple):
            body[item.name] = [to_dict(part) if isinstance(part, Event) else part for part in value]
        else:
            body[item.name] = value
    return body


def from_dict(body: object) -> Event:
    """The event that `to_dict` wrote. Unknown kinds, missing and surplus fields raise `InvalidArgument`."""
    if not isinstance(body, dict) or body.get("kind") not in KINDS:
        got = body.get("kind") if isinstance(body, dict) else type(body).__name__
        raise InvalidArgument(f"kind must be one of {', '.join(sorted(KINDS))}, got {got!r}. Check the event's JSON.")
    event_class = KINDS[body["kind"]]
    given = {name: value for name, value in body.items() if name != "kind"}
    expected = {item.name for item in fields(event_class)}
    if set(given) != expected:
        raise InvalidArgument(
            f"fields of {event_class.kind} must be {sorted(expected)}, got {sorted(given)}. Check the event's JSON."
        )
    return event_class(**{name: _decode(value) for name, value in given.items()})


def _decode(value: object) -> object:
    if isinstance(value, dict):
        return from_dict(value)
    if isinstance(value, list):
        return tuple(_decode(part) for part in value)
    return value


def to_json(event: Event) -> str:
    """The event as one line of JSON."""
    return json.dumps(to_dict(event), sort_keys=True, allow_nan=False)


def from_json(text: str) -> Event:
    """The event that `to_json` wrote."""
    try:
        body = json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidArgument(
            f"event must be JSON, got text that fails at {error.pos}. Check the event's JSON."
        ) from error
    return from_dict(body)
