"""How many runs a random search makes, drawn before data are read and told to nobody (floor 5).

References:
    Liu, Talwar 2019, "Private selection from private candidates". Papernot, Steinke 2022, "Hyperparameter tuning with
    Rényi differential privacy", definition 1 and theorems 2 and 6.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

from sordino import checks
from sordino.errors import InvalidArgument
from sordino.events import Event, Nothing, Selection
from sordino.randomness import Stream

__all__ = ["PoissonStopping", "RandomStopping", "ThresholdStopping"]

_LARGEST = 1_000_000  # far beyond what any law here reaches


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
        >>> law = RandomStopping(mean=10, shape=1.0)
        >>> round(law.gamma, 6), round(law.probability(1), 6)
        (0.1, 0.1)
    """

    mean: float = 10.0
    shape: float = 0.0

    def __post_init__(self) -> None:
        if checks.positive(mean=self.mean) <= 1:
            raise InvalidArgument(f"mean must be > 1, got {self.mean!r}. One run needs no selection.")
        self.event(Nothing())

    @property
    def gamma(self) -> float:
        """γ in (0, 1): η(1−γ)/(γ(1−γ^η)) = mean, or (1/γ − 1)/log(1/γ) = mean for η = 0."""
        return _gamma(self.mean, self.shape)

    def event(self, run: Event) -> Event:
        """What the whole search does, when one run does `run`."""
        return Selection(event=run, distribution="negative_binomial", mean=self.mean, shape=self.shape)

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

    def draw(self, stream: Stream) -> int:
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
        return Selection(event=run, distribution="poisson", mean=self.mean, shape=0.0)

    def probability(self, count: int) -> float:
        """P(K = count)."""
        checks.integer(0, count=count)
        return math.exp(count * math.log(self.mean) - self.mean - math.lgamma(count + 1))

    def draw(self, stream: Stream) -> int:
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

    The cheapest of all when a score that is good enough is known beforehand: pure ε becomes 2ε, however many runs it
    takes. With p the chance of a good run, one leaves with probability p/(p + γ(1−p)) after 1/(p + γ(1−p)) runs.

    Guarantee: with runs that are independent and alike, what leaves (a run, or nothing) is private as ``event(run)``
    says.

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
        return Selection(event=run, distribution="threshold", mean=1 / self.stop_probability, shape=0.0)

    def success(self, good: float) -> float:
        """Probability that a run leaves when each is good with probability `good`."""
        return good / (good + self.stop_probability * (1 - good))

    def ends(self, stream: Stream) -> bool:
        """Whether everything ends after a run that was not good enough."""
        return float(stream.uniform(1)[0]) < self.stop_probability


@lru_cache(maxsize=64)
def _gamma(mean: float, shape: float) -> float:
    from sordino.accounting.renyi_steps import success_probability

    return success_probability(mean, shape)
