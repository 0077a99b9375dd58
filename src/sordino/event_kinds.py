"""The kinds of events (floor 0): one frozen class for each thing a mechanism or a sampler can do.

Import them from `sordino.events`, which adds composition and JSON.
"""

import math
from dataclasses import dataclass
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
]

KINDS: dict[str, type["Event"]] = {}
"""Every kind of event by its name in JSON."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """Base of all events. Subclasses are final, frozen and named by `kind` in JSON."""

    kind: ClassVar[str] = ""

    def __init_subclass__(cls, *, kind: str) -> None:
        super().__init_subclass__()
        cls.kind = kind
        KINDS[kind] = cls


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
class GaussianMixture(Event, kind="gaussian_mixture"):
    """Gaussian noise on a sum that the unit moves by a *random* distance (Ganesh 2024).

    The distance is `sensitivities[i]` × the noise multiplier's own sensitivity with probability `probabilities[i]`:
    a user who owns several records of a sample, or takes part in several of a step's batches.
    """

    noise_multiplier: float
    sensitivities: tuple[float, ...]
    probabilities: tuple[float, ...]

    def __post_init__(self) -> None:
        checks.non_negative(noise_multiplier=self.noise_multiplier)
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

    def __post_init__(self) -> None:
        checks.non_negative(noise_multiplier=self.noise_multiplier)
        checks.integer(1, projections=self.projections)


@dataclass(frozen=True, kw_only=True)
class Laplace(Event, kind="laplace"):
    """Laplace noise of scale `noise_multiplier` × ℓ1 sensitivity."""

    noise_multiplier: float

    def __post_init__(self) -> None:
        checks.non_negative(noise_multiplier=self.noise_multiplier)


@dataclass(frozen=True, kw_only=True)
class PoissonSampled(Event, kind="poisson_sampled"):
    """`event` on a subset that holds each record independently with probability `sample_rate`.

    Under replace-one a batch without the record must lie in the middle: each value that a record can add to a Gaussian
    sum is at most *half* of the sensitivity away from adding nothing, as a clipped gradient is and a value in [0, b] is
    not. Center such values first.
    """

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
        checks.one_of(("poisson", "negative_binomial", "threshold"), distribution=self.distribution)
        checks.positive(mean=self.mean)
        checks.in_range(-1, 1e6, shape=self.shape)
        if self.shape <= -1:
            raise InvalidArgument(f"shape must be > −1, got {self.shape!r}. Take 0 (logarithmic) or 1 (geometric).")
        if self.distribution != "poisson" and self.mean < 1:
            raise InvalidArgument(f"mean must be ≥ 1 for {self.distribution}, got {self.mean!r}. There is a first run.")


@dataclass(frozen=True, kw_only=True)
class Parallel(Event, kind="parallel"):
    """`events` on disjoint parts of the data, the part of a record fixed by the record alone."""

    events: tuple[Event, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "events", tuple(self.events))


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

    def __post_init__(self) -> None:
        object.__setattr__(self, "events", tuple(self.events))
