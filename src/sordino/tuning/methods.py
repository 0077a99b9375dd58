"""Search spaces: what may be tried, and how likely, declared before a record is read."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import product
from typing import Protocol, runtime_checkable

import numpy as np

from sordino import checks
from sordino.errors import InvalidArgument
from sordino.events import BoundedRange, Composed, Event, NoOp, PureDP, RepeatAndSelect, SelfComposed
from sordino.mechanisms import ExponentialMechanism, GeneralizedExponentialMechanism, PermuteAndFlip, ReportNoisyMax
from sordino.randomness import KeyedRNG, RandomStream

Config = dict[str, object]


@runtime_checkable
class Prior(Protocol):
    """The distribution of one setting."""

    def quantile(self, u: float) -> object:
        """The value at quantile u in (0, 1)."""
        ...


@dataclass(frozen=True)
class Uniform:
    """A number in [low, high], every one as likely.

    Example:
        >>> Uniform(0.0, 2.0).quantile(0.25)
        0.5
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        _ordered(self.low, self.high)

    def quantile(self, u: float) -> float:
        """The value at quantile u in (0, 1)."""
        return self.low + u * (self.high - self.low)


@dataclass(frozen=True)
class LogUniform:
    """A number in [low, high] whose logarithm is uniform; 0 < low.

    Example:
        >>> round(LogUniform(0.01, 1.0).quantile(0.5), 12)
        0.1
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        checks.positive(low=self.low)
        _ordered(self.low, self.high)

    def quantile(self, u: float) -> float:
        """The value at quantile u in (0, 1)."""
        return min(self.high, max(self.low, self.low * math.exp(u * math.log(self.high / self.low))))


@dataclass(frozen=True)
class Integers:
    """An integer in [low, high], every one as likely.

    Example:
        >>> [Integers(1, 3).quantile(u) for u in (0.1, 0.5, 0.9)]
        [1, 2, 3]
    """

    low: int
    high: int

    def __post_init__(self) -> None:
        if type(self.low) is not int or type(self.high) is not int:
            raise InvalidArgument(f"bounds must be integers, got {self.low!r} and {self.high!r}. Take Uniform.")
        if self.low > self.high:
            raise InvalidArgument(f"high must be ≥ low ({self.low}), got {self.high}. Order the bounds.")

    def quantile(self, u: float) -> int:
        """The value at quantile u in (0, 1)."""
        return min(self.high, self.low + int(u * (self.high - self.low + 1)))


@dataclass(frozen=True, init=False)
class Choice:
    """One of the options, every one as likely; repeat one to make it likelier.

    Example:
        >>> Choice("relu", "tanh").quantile(0.7)
        'tanh'
    """

    options: tuple[object, ...]

    def __init__(self, *options: object) -> None:
        if not options:
            raise InvalidArgument("options must be at least one, got none. List what may be tried.")
        object.__setattr__(self, "options", options)

    def quantile(self, u: float) -> object:
        """The value at quantile u in (0, 1)."""
        return self.options[min(len(self.options) - 1, int(u * len(self.options)))]


@dataclass(frozen=True)
class SearchSpace:
    """Settings by name, each with its own distribution, drawn independently of each other and of all data.

    The bounds of private selection hold for settings that are drawn afresh in every run. A search that looks at earlier
    scores to choose the next settings (Bayesian optimization, successive halving) is not covered and not offered.

    Args:
        priors: names ↦ `Uniform`, `LogUniform`, `Integers` or `Choice`. A list or tuple is a `Choice` of its entries.

    Example:
        >>> from sordino.randomness import KeyedRNG
        >>> space = SearchSpace({"learning_rate": LogUniform(0.1, 10.0), "steps": [50, 100]})
        >>> config = space.draw(KeyedRNG().new_stream("doc"))
        >>> 0.1 <= config["learning_rate"] <= 10.0, config["steps"] in {50, 100}
        (True, True)
        >>> list(SearchSpace({"a": [1, 2], "b": ["x"]}).grid())
        [{'a': 1, 'b': 'x'}, {'a': 2, 'b': 'x'}]
    """

    priors: Mapping[str, Prior] = field()

    def __init__(self, priors: Mapping[str, object]) -> None:
        found: dict[str, Prior] = {}
        for name, prior in priors.items():
            given = Choice(*prior) if isinstance(prior, list | tuple) else prior
            if not isinstance(given, Prior):
                raise InvalidArgument(
                    f"{name} must be Uniform, LogUniform, Integers, Choice or a list, got {type(prior).__name__}. "
                    "Declare how the setting is drawn."
                )
            found[name] = given
        object.__setattr__(self, "priors", found)

    def draw(self, stream: RandomStream) -> Config:
        """One setting of everything, from one uniform number each."""
        if not self.priors:
            return {}
        numbers = stream.uniform(len(self.priors))
        return {name: prior.quantile(float(u)) for (name, prior), u in zip(self.priors.items(), numbers, strict=True)}

    @property
    def size(self) -> int | None:
        """How many combinations there are, or None when there is a range."""
        if not all(isinstance(prior, Choice) for prior in self.priors.values()):
            return None
        return math.prod(len(prior.options) for prior in self.priors.values() if isinstance(prior, Choice))

    def grid(self) -> Iterator[Config]:
        """All combinations, of choices only.

        Raises:
            InvalidArgument: a setting has a range.
        """
        for name, prior in self.priors.items():
            if not isinstance(prior, Choice):
                raise InvalidArgument(f"{name} must be a Choice for a grid, got {type(prior).__name__}. List values.")
        lists = [prior.options for prior in self.priors.values() if isinstance(prior, Choice)]
        for values in product(*lists):
            yield dict(zip(self.priors, values, strict=True))

    @classmethod
    def from_optuna(cls, distributions: Mapping[str, object]) -> "SearchSpace":
        """The space that Optuna's distributions declare; nothing of Optuna is imported and its samplers are not used.

        Args:
            distributions: names ↦ objects with ``low``, ``high``, ``log`` and ``step``, or with ``choices``.

        Raises:
            InvalidArgument: a distribution has neither.
        """
        return cls({name: _translated(name, given) for name, given in distributions.items()})


def _translated(name: str, given: object) -> Prior:
    choices = getattr(given, "choices", None)
    if choices is not None:
        return Choice(*choices)
    low, high, step = (getattr(given, part, None) for part in ("low", "high", "step"))
    if not isinstance(low, int | float) or not isinstance(high, int | float):
        raise InvalidArgument(f"{name} must have low and high, or choices, got {type(given).__name__}. See Optuna.")
    whole = isinstance(low, int) and isinstance(high, int)
    if getattr(given, "log", False):
        if not whole:
            return LogUniform(low, high)
        distribution = LogUniform(low - 0.5, high + 0.5)
        return Choice(
            *(min(int(high), max(int(low), round(distribution.quantile((i + 0.5) / 256)))) for i in range(256))
        )
    if step is not None and (not whole or step != 1):
        count = math.floor((high - low) / float(step) + 1e-9) + 1
        return Choice(*(low + i * step for i in range(count)))
    return Integers(int(low), int(high)) if whole else Uniform(low, high)


def _ordered(low: float, high: float) -> None:
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise InvalidArgument(f"high must be a finite number > low ({low!r}), got {high!r}. Order the bounds.")


# ----------------------------------------------------------------------------------------------------------------------
# How many runs a random search makes, drawn before data are read and never shown.
#
# References:
#     Liu, Talwar 2019, "Private selection from private candidates". Papernot, Steinke 2022, "Hyperparameter tuning with
#     Rényi differential privacy", definition 1 and theorems 2 and 6.
# ----------------------------------------------------------------------------------------------------------------------


_LARGEST = 1_000_000  # far beyond what any distribution here reaches


@dataclass(frozen=True, kw_only=True)
class RandomStopping:
    """K runs, K truncated negative binomial, and the best of them leaves.

    P(K = k) = (1−γ)^k/(γ^{−η} − 1) · Π_{l<k} (l+η)/(l+1), for η = 0 (1−γ)^k/(k·log(1/γ)), k ≥ 1. η = 1 is geometric
    (Liu and Talwar's best of geometrically many), η = 0 logarithmic. A larger η makes K steadier and costs more: pure
    ε becomes (2+η)ε.

    Guarantee: with runs that are independent and alike, the best run is private as ``event(run)`` says.

    Args:
        mean: of K, > 1.
        shape: η > −1.

    Example:
        >>> distribution = RandomStopping(mean=10, shape=1.0)
        >>> round(distribution.gamma, 6), round(distribution.probability(1), 6)
        (0.1, 0.1)
    """

    mean: float = 10.0
    shape: float = 0.0

    def __post_init__(self) -> None:
        if checks.positive(mean=self.mean) <= 1:
            raise InvalidArgument(f"mean must be > 1, got {self.mean!r}. One run needs no selection.")
        self.event(NoOp())

    @property
    def gamma(self) -> float:
        """γ in (0, 1): η(1−γ)/(γ(1−γ^η)) = mean, or (1/γ − 1)/log(1/γ) = mean for η = 0."""
        return _gamma(self.mean, self.shape)

    def event(self, run: Event) -> Event:
        """What the whole search does, when one run does `run`."""
        return RepeatAndSelect(event=run, distribution="negative_binomial", mean=self.mean, shape=self.shape)

    def probability(self, count: int) -> float:
        """P(K = count)."""
        eta, gamma = self.shape, self.gamma
        if checks.integer(1, count=count) == 1:
            return self._first(gamma)
        logs = math.lgamma(count + eta) - math.lgamma(1 + eta) - math.lgamma(count + 1)
        return self._first(gamma) * math.exp((count - 1) * math.log1p(-gamma) + logs)

    def _first(self, gamma: float) -> float:
        if self.shape == 0:
            return (1 - gamma) / -math.log(gamma)
        return (1 - gamma) * self.shape / math.expm1(-self.shape * math.log(gamma))

    def draw(self, stream: RandomStream) -> int:
        """K, by inversion of its distribution function."""
        left, gamma = float(stream.uniform(1)[0]), self.gamma
        weight, count = self._first(gamma), 1
        while left > weight and count < _LARGEST:
            left -= weight
            weight *= (1 - gamma) * (count + self.shape) / (count + 1)
            count += 1
        return count


@dataclass(frozen=True, kw_only=True)
class PoissonStopping:
    """K runs, K Poisson; with K = 0 nothing is trained and nothing leaves. For few runs: its cost grows with the mean.

    Guarantee: with runs that are independent and alike, the best run is private as ``event(run)`` says.

    Args:
        mean: of K, > 0.

    Example:
        >>> round(PoissonStopping(mean=2.0).probability(0), 6)
        0.135335
    """

    mean: float = 5.0

    def __post_init__(self) -> None:
        checks.positive(mean=self.mean)

    def event(self, run: Event) -> Event:
        """What the whole search does, when one run does `run`."""
        return RepeatAndSelect(event=run, distribution="poisson", mean=self.mean, shape=0.0)

    def probability(self, count: int) -> float:
        """P(K = count)."""
        checks.integer(0, count=count)
        return math.exp(count * math.log(self.mean) - self.mean - math.lgamma(count + 1))

    def draw(self, stream: RandomStream) -> int:
        """K: how many arrivals of rate 1 fit into `mean`."""
        passed, count = 0.0, 0
        while True:
            passed -= math.log(float(stream.uniform(1)[0]))
            if passed > self.mean:
                return count
            count += 1


@dataclass(frozen=True, kw_only=True)
class ThresholdStopping:
    """Runs until one scores at least `threshold`; after each that does not, everything ends with `stop_probability`.

    The cheapest of all when a score that is good enough is known in advance: pure ε becomes 2ε, however many runs it
    takes. With p the chance of a good run, one leaves with probability p/(p + γ(1−p)) after 1/(p + γ(1−p)) runs.

    Guarantee: with runs that are independent and alike, what is released (a run, or nothing) is private as
    ``event(run)`` says.

    Args:
        threshold: fixed without looking at the records.
        stop_probability: γ in (0, 1].

    Example:
        >>> ThresholdStopping(threshold=0.8, stop_probability=0.05).success(0.1)  # doctest: +ELLIPSIS
        0.68965...
    """

    threshold: float
    stop_probability: float = 0.05

    def __post_init__(self) -> None:
        checks.in_range(-math.inf, math.inf, threshold=self.threshold)
        checks.probability(zero=False, stop_probability=self.stop_probability)

    def event(self, run: Event) -> Event:
        """What the whole search does, when one run does `run`."""
        return RepeatAndSelect(event=run, distribution="threshold", mean=1 / self.stop_probability, shape=0.0)

    def success(self, good: float) -> float:
        """Probability that a run leaves when each is good with probability `good`."""
        return good / (good + self.stop_probability * (1 - good))

    def ends(self, stream: RandomStream) -> bool:
        """Whether everything ends after a run that was not good enough."""
        return float(stream.uniform(1)[0]) < self.stop_probability


@lru_cache(maxsize=64)
def _gamma(mean: float, shape: float) -> float:
    from sordino.accounting.rdp import success_probability

    return success_probability(mean, shape)


# ----------------------------------------------------------------------------------------------------------------------
# Choice among privately trained models by the exponential mechanism and its kin.
#
# All candidates are trained and all are paid for; the choice is cheap. Good for few candidates: k runs with Gaussian
# noise share a budget as 1/√k, whereas random stopping costs a factor that hardly depends on the number of runs.
# ----------------------------------------------------------------------------------------------------------------------


_MECHANISMS: Mapping[str, Callable[..., ExponentialMechanism | ReportNoisyMax | PermuteAndFlip]] = {
    "exponential": ExponentialMechanism,
    "laplace": partial(ReportNoisyMax, noise="laplace"),
    "permute-and-flip": PermuteAndFlip,
}


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Train every candidate, then choose one by its score on the records."""

    candidates: int = 10
    epsilon: float = 0.1

    def __post_init__(self) -> None:
        checks.integer(1, candidates=self.candidates)
        checks.positive(epsilon=self.epsilon)

    @property
    def choice(self) -> Event:
        """The event of one choice."""
        return BoundedRange(epsilon=self.epsilon)

    def event(self, run: Event) -> Event:
        """What everything does, when one run does `run`."""
        return Composed(events=(SelfComposed(event=run, count=self.candidates), self.choice))

    def check_candidates(self, configs: Sequence[Config]) -> None:
        """Refuse settings that a choice can't be made among, before a record is read."""

    def choose(self, scores: Sequence[float], configs: Sequence[Config], rng: KeyedRNG) -> int:
        """The index of the chosen candidate."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class ExponentialSelection(Selection):
    """Train every candidate, then choose one with probability growing with its score on the records.

    Guarantee: ``event(run)``: all runs, and one choice, when one privacy unit moves every score by at most
    `sensitivity`. The scores stay inside.

    Args:
        candidates: how many settings are drawn from a space, ≥ 1; a list of settings is tried whole.
        epsilon: of the choice, > 0, out of the whole budget.
        sensitivity: > 0, of every score: 1 for a number of right answers.
        mechanism: ``exponential``, ``laplace`` (report noisy max) or ``permute-and-flip`` (never worse in expected
            score, but its loss has no bounded range).
        monotone: whether a record more can only raise, or only lower, all scores.

    Example:
        >>> ExponentialSelection(candidates=3, epsilon=0.1).event(PureDP(epsilon=0.2))
        Composed(events=(SelfComposed(event=PureDP(epsilon=0.2), count=3), BoundedRange(epsilon=0.1)))
    """

    sensitivity: float = 1.0
    mechanism: str = "exponential"
    monotone: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive(sensitivity=self.sensitivity)
        checks.one_of(_MECHANISMS, mechanism=self.mechanism)

    @property
    def choice(self) -> Event:
        """The event of one choice."""
        return super().choice if self.mechanism == "exponential" else PureDP(epsilon=self.epsilon)

    def choose(self, scores: Sequence[float], configs: Sequence[Config], rng: KeyedRNG) -> int:  # noqa: ARG002
        """The index of the chosen candidate."""
        parts = {"epsilon": self.epsilon, "sensitivity": self.sensitivity, "monotone": self.monotone, "rng": rng}
        return _MECHANISMS[self.mechanism](**parts).release(scores)


@dataclass(frozen=True, kw_only=True)
class GeneralizedExponentialSelection(Selection):
    """Train every candidate, then choose by the generalized exponential mechanism: each score has a sensitivity.

    For scores that are sums of losses, whose bound differs with the settings, a candidate with a small bound is chosen
    as precisely as if the others were not there.

    Guarantee: ``event(run)``: all runs, and one choice, when one privacy unit moves the score of a candidate with
    settings c by at most ``sensitivity(c)``. The scores stay inside.

    Args:
        sensitivity: settings ↦ a number > 0, asked before a record is read.
        candidates: how many settings are drawn from a space, ≥ 1; a list of settings is tried whole.
        epsilon: of the choice, > 0, out of the whole budget.

    References:
        Raskhodnikova, Smith 2016; docs/proofs/generalized-exponential-mechanism.md.
    """

    sensitivity: Callable[[Config], float]

    def check_candidates(self, configs: Sequence[Config]) -> None:
        """Ask for the sensitivity of each of these settings."""
        for config in configs:
            checks.positive(sensitivity=self.sensitivity(config))

    def choose(self, scores: Sequence[float], configs: Sequence[Config], rng: KeyedRNG) -> int:
        """The index of the chosen candidate; an error is a score with its sign changed."""
        mechanism = GeneralizedExponentialMechanism(
            epsilon=self.epsilon,
            sensitivities=tuple(float(self.sensitivity(config)) for config in configs),
            rng=rng,
        )
        return mechanism.release(-np.asarray(scores, dtype=np.float64))
