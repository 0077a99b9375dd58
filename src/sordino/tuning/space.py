"""Search spaces: what may be tried, and how likely, declared before a record is read (floor 5)."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Protocol, runtime_checkable

from sordino import checks
from sordino.errors import InvalidArgument
from sordino.randomness import Stream

__all__ = ["Choice", "Config", "Integers", "LogUniform", "Prior", "SearchSpace", "Uniform"]

Config = dict[str, object]


@runtime_checkable
class Prior(Protocol):
    """The law of one setting."""

    def at(self, u: float) -> object:
        """The value at quantile u in (0, 1)."""
        ...


@dataclass(frozen=True)
class Uniform:
    """A number in [low, high], every one as likely.

    Example:
        >>> Uniform(0.0, 2.0).at(0.25)
        0.5
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        _ordered(self.low, self.high)

    def at(self, u: float) -> float:
        """The value at quantile u in (0, 1)."""
        return self.low + u * (self.high - self.low)


@dataclass(frozen=True)
class LogUniform:
    """A number in [low, high] whose logarithm is uniform; 0 < low.

    Example:
        >>> round(LogUniform(0.01, 1.0).at(0.5), 12)
        0.1
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        checks.positive(low=self.low)
        _ordered(self.low, self.high)

    def at(self, u: float) -> float:
        """The value at quantile u in (0, 1)."""
        return min(self.high, max(self.low, self.low * math.exp(u * math.log(self.high / self.low))))


@dataclass(frozen=True)
class Integers:
    """An integer in [low, high], every one as likely.

    Example:
        >>> [Integers(1, 3).at(u) for u in (0.1, 0.5, 0.9)]
        [1, 2, 3]
    """

    low: int
    high: int

    def __post_init__(self) -> None:
        if type(self.low) is not int or type(self.high) is not int:
            raise InvalidArgument(f"bounds must be integers, got {self.low!r} and {self.high!r}. Take Uniform.")
        if self.low > self.high:
            raise InvalidArgument(f"high must be ≥ low ({self.low}), got {self.high}. Order the bounds.")

    def at(self, u: float) -> int:
        """The value at quantile u in (0, 1)."""
        return min(self.high, self.low + int(u * (self.high - self.low + 1)))


@dataclass(frozen=True, init=False)
class Choice:
    """One of the options, every one as likely; repeat one to make it likelier.

    Example:
        >>> Choice("relu", "tanh").at(0.7)
        'tanh'
    """

    options: tuple[object, ...]

    def __init__(self, *options: object) -> None:
        if not options:
            raise InvalidArgument("options must be at least one, got none. List what may be tried.")
        object.__setattr__(self, "options", options)

    def at(self, u: float) -> object:
        """The value at quantile u in (0, 1)."""
        return self.options[min(len(self.options) - 1, int(u * len(self.options)))]


@dataclass(frozen=True)
class SearchSpace:
    """Settings by name, each with its own law, drawn independently of each other and of all data.

    The bounds of private selection hold for settings that are drawn afresh in every run. A search that looks at earlier
    scores to choose the next settings (Bayesian optimisation, successive halving) is not covered and not offered.

    Args:
        priors: names ↦ `Uniform`, `LogUniform`, `Integers` or `Choice`. A list or tuple is a `Choice` of its entries.

    Example:
        >>> from sordino.randomness import Randomness
        >>> space = SearchSpace({"learning_rate": LogUniform(0.1, 10.0), "steps": [50, 100]})
        >>> config = space.draw(Randomness().fresh("doc"))
        >>> 0.1 <= config["learning_rate"] <= 10.0, config["steps"] in {50, 100}
        (True, True)
        >>> list(SearchSpace({"a": [1, 2], "b": ["x"]}).grid())
        [{'a': 1, 'b': 'x'}, {'a': 2, 'b': 'x'}]
    """

    priors: Mapping[str, Prior] = field()

    def __init__(self, priors: Mapping[str, object]) -> None:
        found: dict[str, Prior] = {}
        for name, prior in priors.items():
            told = Choice(*prior) if isinstance(prior, list | tuple) else prior
            if not isinstance(told, Prior):
                raise InvalidArgument(
                    f"{name} must be Uniform, LogUniform, Integers, Choice or a list, got {type(prior).__name__}. "
                    "Declare how the setting is drawn."
                )
            found[name] = told
        object.__setattr__(self, "priors", found)

    def draw(self, stream: Stream) -> Config:
        """One setting of everything, from one uniform number each."""
        if not self.priors:
            return {}
        numbers = stream.uniform(len(self.priors))
        return {name: prior.at(float(u)) for (name, prior), u in zip(self.priors.items(), numbers, strict=True)}

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
        return cls({name: _translated(name, told) for name, told in distributions.items()})


def _translated(name: str, told: object) -> Prior:
    choices = getattr(told, "choices", None)
    if choices is not None:
        return Choice(*choices)
    low, high, step = (getattr(told, part, None) for part in ("low", "high", "step"))
    if not isinstance(low, int | float) or not isinstance(high, int | float):
        raise InvalidArgument(f"{name} must have low and high, or choices, got {type(told).__name__}. See Optuna.")
    whole = isinstance(low, int) and isinstance(high, int)
    if getattr(told, "log", False):
        if not whole:
            return LogUniform(low, high)
        law = LogUniform(low - 0.5, high + 0.5)
        return Choice(*(min(int(high), max(int(low), round(law.at((i + 0.5) / 256)))) for i in range(256)))
    if step is not None and (not whole or step != 1):
        count = math.floor((high - low) / float(step) + 1e-9) + 1
        return Choice(*(low + i * step for i in range(count)))
    return Integers(int(low), int(high)) if whole else Uniform(low, high)


def _ordered(low: float, high: float) -> None:
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise InvalidArgument(f"high must be a finite number > low ({low!r}), got {high!r}. Order the bounds.")
