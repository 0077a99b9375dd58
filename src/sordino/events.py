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
    "ApproximateDP",
    "BoundedRange",
    "Composed",
    "DiscreteGaussian",
    "DiscreteLaplace",
    "Event",
    "FixedSizeSampled",
    "Gaussian",
    "GroupPoissonSampled",
    "Laplace",
    "MatrixGaussian",
    "NoPrivacy",
    "Nothing",
    "Parallel",
    "PoissonSampled",
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
class ReplacementSampled(Event, kind="replacement_sampled"):
    """`event` on `size` records drawn uniformly *with* replacement from `population`; a record may come repeatedly."""

    population: int
    size: int
    event: Event

    def __post_init__(self) -> None:
        checks.integer(1, population=self.population)
        checks.integer(0, size=self.size)


@dataclass(frozen=True, kw_only=True)
class TruncatedPoissonSampled(Event, kind="truncated_poisson_sampled"):
    """A Poisson sample of `population` records, cut down at random to `largest` when it is bigger."""

    sample_rate: float
    population: int
    largest: int
    event: Event

    def __post_init__(self) -> None:
        checks.probability(sample_rate=self.sample_rate)
        checks.integer(1, population=self.population)
        checks.integer(1, largest=self.largest)


@dataclass(frozen=True, kw_only=True)
class GroupPoissonSampled(Event, kind="group_poisson_sampled"):
    """`event` on a Poisson sample where the privacy unit owns `group_size` records, each drawn on its own."""

    sample_rate: float
    group_size: int
    event: Event

    def __post_init__(self) -> None:
        checks.probability(sample_rate=self.sample_rate)
        checks.integer(1, group_size=self.group_size)


@dataclass(frozen=True, kw_only=True)
class ShuffledEpochs(Event, kind="shuffled_epochs"):
    """`epochs` passes over shuffled data in `steps_per_epoch` batches: each record is used once a pass.

    No amplification is claimed: the cost is that of `epochs` uses without sampling.
    """

    epochs: int
    steps_per_epoch: int
    event: Event

    def __post_init__(self) -> None:
        checks.integer(0, epochs=self.epochs)
        checks.integer(1, steps_per_epoch=self.steps_per_epoch)


@dataclass(frozen=True, kw_only=True)
class RandomAllocation(Event, kind="random_allocation"):
    """Each record takes part in `participations` of `steps` steps, chosen uniformly; `epochs` times afresh.

    Balls-in-bins sampling is `participations` = 1.
    """

    steps: int
    participations: int
    epochs: int
    event: Event

    def __post_init__(self) -> None:
        checks.integer(1, steps=self.steps)
        checks.integer(1, participations=self.participations)
        checks.integer(0, epochs=self.epochs)
        if self.participations > self.steps:
            raise InvalidArgument(
                f"participations must be ≤ steps ({self.steps}), got {self.participations}. Use fewer participations."
            )


@dataclass(frozen=True, kw_only=True)
class MatrixGaussian(Event, kind="matrix_gaussian"):
    """Correlated Gaussian noise (tree aggregation, matrix mechanism): all steps together are one Gaussian.

    `noise_multiplier` is std of the uncorrelated noise over one record's ℓ2 bound under the relation;
    `sensitivity` is the largest norm of the strategy matrix's columns that one record can reach.
    """

    noise_multiplier: float
    sensitivity: float

    def __post_init__(self) -> None:
        checks.non_negative(noise_multiplier=self.noise_multiplier)
        checks.non_negative(sensitivity=self.sensitivity)


@dataclass(frozen=True, kw_only=True)
class DiscreteGaussian(Event, kind="discrete_gaussian"):
    """Discrete Gaussian noise of parameter `stddev` on an integer that one record moves by ≤ `sensitivity`."""

    stddev: float
    sensitivity: int

    def __post_init__(self) -> None:
        checks.non_negative(stddev=self.stddev)
        checks.integer(1, sensitivity=self.sensitivity)


@dataclass(frozen=True, kw_only=True)
class DiscreteLaplace(Event, kind="discrete_laplace"):
    """Noise ∝ e^{−|x|/scale} on an integer that one record moves by ≤ `sensitivity`."""

    scale: float
    sensitivity: int

    def __post_init__(self) -> None:
        checks.non_negative(scale=self.scale)
        checks.integer(1, sensitivity=self.sensitivity)


@dataclass(frozen=True, kw_only=True)
class PureDP(Event, kind="pure_dp"):
    """Any ε-private mechanism, such as the K-norm mechanism; only its ε is known."""

    epsilon: float

    def __post_init__(self) -> None:
        checks.non_negative(epsilon=self.epsilon)


@dataclass(frozen=True, kw_only=True)
class ApproximateDP(Event, kind="approximate_dp"):
    """Any (ε, δ)-private mechanism; only its ε and δ are known."""

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        checks.non_negative(epsilon=self.epsilon)
        checks.probability(delta=self.delta)


@dataclass(frozen=True, kw_only=True)
class ZeroConcentratedDP(Event, kind="zero_concentrated_dp"):
    """Any ρ-zCDP mechanism (Bun and Steinke 2016); only its ρ is known."""

    rho: float

    def __post_init__(self) -> None:
        checks.non_negative(rho=self.rho)


@dataclass(frozen=True, kw_only=True)
class RandomizedResponse(Event, kind="randomized_response"):
    """k-ary randomised response: the truth with probability e^ε/(e^ε + k − 1), any other answer equally likely."""

    epsilon: float
    categories: int

    def __post_init__(self) -> None:
        checks.non_negative(epsilon=self.epsilon)
        checks.integer(2, categories=self.categories)


@dataclass(frozen=True, kw_only=True)
class BoundedRange(Event, kind="bounded_range"):
    """An ε-bounded-range mechanism, such as the exponential mechanism (Durfee and Rogers 2019).

    The loss takes values in an interval of length ε, so it is ε-private and ε²/8-zCDP.
    """

    epsilon: float

    def __post_init__(self) -> None:
        checks.non_negative(epsilon=self.epsilon)


@dataclass(frozen=True, kw_only=True)
class Selection(Event, kind="selection"):
    """The best of a random number of runs of `event` (Papernot and Steinke 2022).

    `distribution` of the number of runs is ``poisson`` with this mean, or ``negative_binomial`` with this mean and
    `shape` η ≥ 0: 1 is geometric, 0 logarithmic. `shape` is ignored for ``poisson``.
    """

    event: Event
    distribution: str
    mean: float
    shape: float

    def __post_init__(self) -> None:
        checks.one_of(("poisson", "negative_binomial"), distribution=self.distribution)
        checks.positive(mean=self.mean)
        checks.non_negative(shape=self.shape)


@dataclass(frozen=True, kw_only=True)
class Parallel(Event, kind="parallel"):
    """`events` on disjoint parts of the data, the part of a record fixed by the record alone."""

    events: tuple[Event, ...]


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
