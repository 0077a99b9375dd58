"""What a mechanism did: frozen, plain descriptions that accountants consume. JSON both ways.

An event says nothing about data and nothing about ε. Sensitivity is already divided out: `noise_multiplier`
is always noise standard deviation (or Laplace scale) over sensitivity *under the declared neighboring
relation*, which is stored in the plan, not in the event.

Example:
    >>> from sordino.events import Gaussian, PoissonSampled, SelfComposed, from_json, to_json
    >>> event = SelfComposed(event=PoissonSampled(sample_rate=0.01, event=Gaussian(noise_multiplier=4.0)), count=10)
    >>> from_json(to_json(event)) == event
    True
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
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
    "Gaussian",
    "GaussianMixture",
    "GroupPoissonSampled",
    "Laplace",
    "MatrixGaussian",
    "NoOp",
    "NonPrivate",
    "ParallelComposed",
    "PoissonSampled",
    "ProjectedGaussian",
    "PureDP",
    "RandomAllocation",
    "RandomizedResponse",
    "RepeatAndSelect",
    "SampledWithReplacement",
    "SampledWithoutReplacement",
    "SelfComposed",
    "ShuffledEpochs",
    "TruncatedPoissonSampled",
    "ZeroConcentratedDP",
    "compose",
    "compose_counts",
    "describe_sampling",
    "event_counts",
    "from_dict",
    "from_json",
    "subtract_counts",
    "to_dict",
    "to_json",
]


# ----------------------------------------------------------------------------------------------------------------------
# The kinds of events: one frozen class for each thing a mechanism or a sampler can do.
#
# Import them from `sordino.events`, which adds composition and JSON.
# ----------------------------------------------------------------------------------------------------------------------


EVENT_TYPES: dict[str, type["Event"]] = {}
"""Every kind of event by its name in JSON."""

_RANGES: dict[str, Callable[..., object]] = {
    "noise_multiplier": checks.non_negative,
    "stddev": checks.non_negative,
    "scale": checks.non_negative,
    "epsilon": checks.non_negative,
    "rho": checks.non_negative,
    "mean": checks.positive,
    "delta": checks.probability,
    "sample_rate": checks.probability,
    "count": partial(checks.integer, 0),
    "epochs": partial(checks.integer, 0),
    "sample_size": partial(checks.integer, 0),
    "categories": partial(checks.integer, 2),
    **dict.fromkeys(
        ("dataset_size", "group_size", "max_batch_size", "participations", "projections", "steps", "steps_per_epoch"),
        partial(checks.integer, 1),
    ),
}
"""The range of every field that means the same in all events; what is special to an event is checked there."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """Base of all events. Subclasses are final, frozen and named by `kind` in JSON."""

    kind: ClassVar[str] = ""

    def __init_subclass__(cls, *, kind: str) -> None:
        super().__init_subclass__()
        cls.kind = kind
        EVENT_TYPES[kind] = cls

    def __post_init__(self) -> None:
        """Check every field with a declared range; fields of events are stored as tuples."""
        for name, value in vars(self).items():
            if name == "events":
                object.__setattr__(self, name, tuple(value))
            elif name in _RANGES:
                _RANGES[name](**{name: value})


@dataclass(frozen=True, kw_only=True)
class NoOp(Event, kind="no_op"):
    """No data were touched: ε = 0."""


@dataclass(frozen=True, kw_only=True)
class NonPrivate(Event, kind="non_private"):
    """Data were touched without protection: ε = ∞. `reason` says how."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Gaussian(Event, kind="gaussian"):
    """Gaussian noise of standard deviation `noise_multiplier` × ℓ2 sensitivity."""

    noise_multiplier: float


@dataclass(frozen=True, kw_only=True)
class GaussianMixture(Event, kind="gaussian_mixture"):
    """Gaussian noise on a sum that the unit moves by a *random* distance (Ganesh 2024).

    The distance is `sensitivities[i]` × the noise multiplier's own sensitivity with probability `probabilities[i]`:
    a user who owns several records of a sample, or takes part in several of a step's batches.
    """

    noise_multiplier: float
    sensitivities: tuple[float, ...]
    probabilities: tuple[float, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("sensitivities", "probabilities"):
            object.__setattr__(self, name, tuple(float(value) for value in getattr(self, name)))
        for value in self.sensitivities:
            checks.non_negative(sensitivities=value)
        for value in self.probabilities:
            checks.probability(probabilities=value)
        total = math.fsum(self.probabilities)
        if len(self.sensitivities) != len(self.probabilities) or abs(total - 1) > 1e-9:
            raise InvalidArgument(
                f"probabilities must be one for each sensitivity and sum to 1, got {len(self.probabilities)} for "
                f"{len(self.sensitivities)} with sum {total:g}. Add sensitivity 0 for what is left."
            )


@dataclass(frozen=True, kw_only=True)
class ProjectedGaussian(Event, kind="projected_gaussian"):
    """Gaussian noise on a sum of records clipped by an estimate of their norm (Bu et al. 2021).

    The estimate comes from `projections` Gaussian projections, so the unit moves the sum by up to √(r/χ²_r) times the
    noise multiplier's own sensitivity: more than 1 as often as not. It costs more than `Gaussian`.
    """

    noise_multiplier: float
    projections: int


@dataclass(frozen=True, kw_only=True)
class Laplace(Event, kind="laplace"):
    """Laplace noise of scale `noise_multiplier` × ℓ1 sensitivity."""

    noise_multiplier: float


@dataclass(frozen=True, kw_only=True)
class PoissonSampled(Event, kind="poisson_sampled"):
    """`event` on a subset that holds each record independently with probability `sample_rate`.

    Under replace-one a batch without the record must lie in the middle: each value that a record can add to a Gaussian
    sum is at most *half* of the sensitivity away from adding nothing, as a clipped gradient is and a value in [0, b] is
    not. Center such values first.
    """

    sample_rate: float
    event: Event


@dataclass(frozen=True, kw_only=True)
class SampledWithoutReplacement(Event, kind="sampled_without_replacement"):
    """`event` on a uniform subset of `sample_size` out of `dataset_size` records, drawn without replacement."""

    dataset_size: int
    sample_size: int
    event: Event

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sample_size > self.dataset_size:
            raise InvalidArgument(
                f"sample_size must be ≤ dataset_size ({self.dataset_size}), got {self.sample_size}. Draw fewer records."
            )


@dataclass(frozen=True, kw_only=True)
class SampledWithReplacement(Event, kind="sampled_with_replacement"):
    """`event` on `sample_size` records drawn uniformly *with* replacement from `dataset_size`; records may repeat."""

    dataset_size: int
    sample_size: int
    event: Event


@dataclass(frozen=True, kw_only=True)
class TruncatedPoissonSampled(Event, kind="truncated_poisson_sampled"):
    """A Poisson sample of `dataset_size` records, cut down at random to `max_batch_size` when it is bigger."""

    sample_rate: float
    dataset_size: int
    max_batch_size: int
    event: Event


@dataclass(frozen=True, kw_only=True)
class GroupPoissonSampled(Event, kind="group_poisson_sampled"):
    """`event` on a Poisson sample where the privacy unit owns `group_size` records, each drawn on its own."""

    sample_rate: float
    group_size: int
    event: Event


@dataclass(frozen=True, kw_only=True)
class ShuffledEpochs(Event, kind="shuffled_epochs"):
    """`epochs` passes over shuffled data in `steps_per_epoch` batches: each record is used once a pass.

    No amplification is claimed: the cost is that of `epochs` uses without sampling.
    """

    epochs: int
    steps_per_epoch: int
    event: Event


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
        super().__post_init__()
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
        super().__post_init__()
        checks.non_negative(sensitivity=self.sensitivity)


@dataclass(frozen=True, kw_only=True)
class DiscreteGaussian(Event, kind="discrete_gaussian"):
    """Discrete Gaussian noise of parameter `stddev` on an integer that one record moves by ≤ `sensitivity`."""

    stddev: float
    sensitivity: int

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.integer(1, sensitivity=self.sensitivity)


@dataclass(frozen=True, kw_only=True)
class DiscreteLaplace(Event, kind="discrete_laplace"):
    """Noise ∝ e^{−|x|/scale} on an integer that one record moves by ≤ `sensitivity`."""

    scale: float
    sensitivity: int

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.integer(1, sensitivity=self.sensitivity)


@dataclass(frozen=True, kw_only=True)
class PureDP(Event, kind="pure_dp"):
    """Any ε-private mechanism, such as the K-norm mechanism; only its ε is known."""

    epsilon: float


@dataclass(frozen=True, kw_only=True)
class ApproximateDP(Event, kind="approximate_dp"):
    """Any (ε, δ)-private mechanism; only its ε and δ are known."""

    epsilon: float
    delta: float


@dataclass(frozen=True, kw_only=True)
class ZeroConcentratedDP(Event, kind="zero_concentrated_dp"):
    """Any ρ-zCDP mechanism (Bun and Steinke 2016); only its ρ is known."""

    rho: float


@dataclass(frozen=True, kw_only=True)
class RandomizedResponse(Event, kind="randomized_response"):
    """k-ary randomized response: the truth with probability e^ε/(e^ε + k − 1), any other answer equally likely."""

    epsilon: float
    categories: int


@dataclass(frozen=True, kw_only=True)
class BoundedRange(Event, kind="bounded_range"):
    """An ε-bounded-range mechanism, such as the exponential mechanism (Durfee and Rogers 2019).

    The loss takes values in an interval of length ε, so it is ε-private and ε²/8-zCDP.
    """

    epsilon: float


@dataclass(frozen=True, kw_only=True)
class RepeatAndSelect(Event, kind="repeat_and_select"):
    """The best of a random number of runs of `event` (Papernot and Steinke 2022).

    `distribution` of the number of runs is ``poisson`` with this mean, or ``negative_binomial`` (truncated, at least
    one run) with this mean and `shape` η > −1: 1 is geometric, 0 logarithmic. With ``threshold`` the first run whose
    score passes a fixed threshold leaves, and after each run that does not everything ends with probability 1/`mean`
    (Liu and Talwar 2019). `shape` counts for ``negative_binomial`` only.
    """

    event: Event
    distribution: str
    mean: float
    shape: float

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.one_of(("poisson", "negative_binomial", "threshold"), distribution=self.distribution)
        checks.in_range(-1, 1e6, shape=self.shape)
        if self.shape <= -1:
            raise InvalidArgument(f"shape must be > −1, got {self.shape!r}. Take 0 (logarithmic) or 1 (geometric).")
        if self.distribution != "poisson" and self.mean < 1:
            raise InvalidArgument(f"mean must be ≥ 1 for {self.distribution}, got {self.mean!r}. There is a first run.")


@dataclass(frozen=True, kw_only=True)
class ParallelComposed(Event, kind="parallel_composed"):
    """`events` on disjoint parts of the data, the part of a record fixed by the record alone."""

    events: tuple[Event, ...]


@dataclass(frozen=True, kw_only=True)
class SelfComposed(Event, kind="self_composed"):
    """`event`, `count` times, each with fresh randomness."""

    event: Event
    count: int


@dataclass(frozen=True, kw_only=True)
class Composed(Event, kind="composed"):
    """All `events`, one after the other, each with fresh randomness; later ones may see earlier results."""

    events: tuple[Event, ...]


# ----------------------------------------------------------------------------------------------------------------------
# What a mechanism did: frozen, plain descriptions that accountants consume. JSON both ways.
# ----------------------------------------------------------------------------------------------------------------------


def compose(events: list[Event] | tuple[Event, ...]) -> Event:
    """The composition of a run's events, with equal neighbors in time folded into `SelfComposed`.

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
        return NoOp()
    return parts[0] if len(parts) == 1 else Composed(events=parts)


def event_counts(event: Event) -> dict[Event, int]:
    """The leaves of an event with their counts ≥ 1, in the order of their first appearance.

    Example:
        >>> event_counts(SelfComposed(event=Gaussian(noise_multiplier=1.0), count=3))
        {Gaussian(noise_multiplier=1.0): 3}
    """
    found: dict[Event, int] = {}
    _collect(event, 1, found)
    return found


def _collect(event: Event, count: int, found: dict[Event, int]) -> None:
    if count == 0 or isinstance(event, NoOp):
        return
    if isinstance(event, SelfComposed):
        _collect(event.event, count * event.count, found)
    elif isinstance(event, Composed):
        for part in event.events:
            _collect(part, count, found)
    else:
        found[event] = found.get(event, 0) + count


def compose_counts(leaves: Mapping[Event, int]) -> Event:
    """One event with these leaves."""
    return compose([SelfComposed(event=event, count=count) for event, count in leaves.items()])


def subtract_counts(leaves: Mapping[Event, int], taken: Mapping[Event, int]) -> dict[Event, int] | None:
    """What is left of `leaves` after `taken`; None when something is taken that is not there."""
    if any(leaves.get(event, 0) < count for event, count in taken.items()):
        return None
    left = {event: count - taken.get(event, 0) for event, count in leaves.items()}
    return {event: count for event, count in left.items() if count}


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
    if not isinstance(body, dict) or body.get("kind") not in EVENT_TYPES:
        got = body.get("kind") if isinstance(body, dict) else type(body).__name__
        raise InvalidArgument(
            f"kind must be one of {', '.join(sorted(EVENT_TYPES))}, got {got!r}. Check the event's JSON."
        )
    event_class = EVENT_TYPES[body["kind"]]
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


# ----------------------------------------------------------------------------------------------------------------------
# Events in words: what a guarantee says about how batches were drawn.
# ----------------------------------------------------------------------------------------------------------------------


def describe_sampling(event: Event) -> str:
    """How the batches of an event were drawn, as it is written in a guarantee; "none" when no data were touched.

    Example:
        >>> from sordino.events import Gaussian
        >>> describe_sampling(PoissonSampled(sample_rate=0.01, event=Gaussian(noise_multiplier=1.0)))
        'Poisson sampling at rate 0.01'
    """
    return " and ".join(dict.fromkeys(_samplings(event))) or "none"


def _samplings(event: Event) -> list[str]:
    match event:
        case NoOp() | NonPrivate():
            return []
        case SelfComposed():
            return _samplings(event.event) if event.count else []
        case Composed() | ParallelComposed():
            return [words for part in event.events for words in _samplings(part)]
        case PoissonSampled():
            return [f"Poisson sampling at rate {event.sample_rate:.6g}"]
        case SampledWithoutReplacement():
            return [f"fixed-size batches of {event.sample_size} out of {event.dataset_size}"]
        case GaussianMixture():
            return ["random participation as stated"]
        case ShuffledEpochs():
            return ["shuffled epochs without amplification"]
    if any(isinstance(getattr(event, item.name), Event) for item in fields(event)):
        # Some other way of sampling an inner event: named as its JSON names it.
        return [event.kind.replace("_", " ")]
    return ["full batches"]
