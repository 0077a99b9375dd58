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
from dataclasses import dataclass, fields
from typing import ClassVar

from sordino import checks
from sordino.errors import InvalidArgument

__all__ = [
    "Composed",
    "Event",
    "FixedSizeSampled",
    "Gaussian",
    "Laplace",
    "NoPrivacy",
    "Nothing",
    "PoissonSampled",
    "SelfComposed",
    "compose",
    "from_dict",
    "from_json",
    "sampling_words",
    "to_dict",
    "to_json",
]

_KINDS: dict[str, type["Event"]] = {}


@dataclass(frozen=True, kw_only=True)
class Event:
    """Base of all events. Subclasses are final, frozen and named by `kind` in JSON."""

    kind: ClassVar[str] = ""

    def __init_subclass__(cls, *, kind: str) -> None:
        super().__init_subclass__()
        cls.kind = kind
        _KINDS[kind] = cls


@dataclass(frozen=True, kw_only=True)
class Nothing(Event, kind="nothing"):
    """No data were touched: ε = 0."""


@dataclass(frozen=True, kw_only=True)
class NoPrivacy(Event, kind="no_privacy"):
    """Data were touched without protection: ε = ∞. `reason` says how."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Gaussian(Event, kind="gaussian"):
    """Gaussian noise of standard deviation `noise_multiplier` × ℓ2 sensitivity."""

    noise_multiplier: float

    def __post_init__(self) -> None:
        checks.non_negative(noise_multiplier=self.noise_multiplier)


@dataclass(frozen=True, kw_only=True)
class Laplace(Event, kind="laplace"):
    """Laplace noise of scale `noise_multiplier` × ℓ1 sensitivity."""

    noise_multiplier: float

    def __post_init__(self) -> None:
        checks.non_negative(noise_multiplier=self.noise_multiplier)


@dataclass(frozen=True, kw_only=True)
class PoissonSampled(Event, kind="poisson_sampled"):
    """`event` on a subset that holds each record independently with probability `sample_rate`."""

    sample_rate: float
    event: Event

    def __post_init__(self) -> None:
        checks.probability(sample_rate=self.sample_rate)


@dataclass(frozen=True, kw_only=True)
class FixedSizeSampled(Event, kind="fixed_size_sampled"):
    """`event` on a uniform subset of `size` out of `population` records, drawn without replacement."""

    population: int
    size: int
    event: Event

    def __post_init__(self) -> None:
        checks.integer(1, population=self.population)
        checks.integer(0, size=self.size)
        if self.size > self.population:
            raise InvalidArgument(
                f"size must be ≤ population ({self.population}), got {self.size}. Draw fewer records."
            )


@dataclass(frozen=True, kw_only=True)
class SelfComposed(Event, kind="self_composed"):
    """`event`, `count` times, each with fresh randomness."""

    event: Event
    count: int

    def __post_init__(self) -> None:
        checks.integer(0, count=self.count)


@dataclass(frozen=True, kw_only=True)
class Composed(Event, kind="composed"):
    """All `events`, one after the other, each with fresh randomness; later ones may see earlier results."""

    events: tuple[Event, ...]


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


def sampling_words(event: Event) -> str:
    """How the batches of an event were drawn, as it is written in a guarantee.

    Example:
        >>> sampling_words(PoissonSampled(sample_rate=0.01, event=Gaussian(noise_multiplier=1.0)))
        'Poisson sampling at rate 0.01'
    """
    return " and ".join(dict.fromkeys(_samplings(event))) or "none"


def _samplings(event: Event) -> list[str]:
    match event:
        case PoissonSampled():
            return [f"Poisson sampling at rate {event.sample_rate:.6g}"]
        case FixedSizeSampled():
            return [f"fixed-size batches of {event.size} out of {event.population}"]
        case SelfComposed():
            return _samplings(event.event)
        case Composed():
            return [words for part in event.events for words in _samplings(part)]
        case Nothing() | NoPrivacy():
            return []
        case _:
            return ["full batches"]


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
    if not isinstance(body, dict) or body.get("kind") not in _KINDS:
        got = body.get("kind") if isinstance(body, dict) else type(body).__name__
        raise InvalidArgument(f"kind must be one of {', '.join(sorted(_KINDS))}, got {got!r}. Check the event's JSON.")
    event_class = _KINDS[body["kind"]]
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
