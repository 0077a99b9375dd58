"""Choice among privately trained models by the exponential mechanism and its kin (floor 5).

All candidates are trained and all are paid for; the choice is cheap. Good for few candidates: k runs with Gaussian
noise share a budget as 1/√k, whereas random stopping costs a factor that hardly depends on the number of runs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from sordino import checks
from sordino.events import BoundedRange, Composed, Event, PureDP, SelfComposed
from sordino.mechanisms import (
    ExponentialMechanism,
    GeneralizedExponentialMechanism,
    PermuteAndFlip,
    ReportNoisyMax,
)
from sordino.randomness import Randomness
from sordino.tuning.space import Config

__all__ = ["ExponentialChoice", "GeneralizedChoice"]

_MECHANISMS = ("exponential", "laplace", "permute-and-flip")


@dataclass(frozen=True, kw_only=True)
class ExponentialChoice:
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
        >>> ExponentialChoice(candidates=3, epsilon=0.1).event(PureDP(epsilon=0.2))
        Composed(events=(SelfComposed(event=PureDP(epsilon=0.2), count=3), BoundedRange(epsilon=0.1)))
    """

    candidates: int = 10
    epsilon: float = 0.1
    sensitivity: float = 1.0
    mechanism: str = "exponential"
    monotone: bool = False

    def __post_init__(self) -> None:
        checks.integer(1, candidates=self.candidates)
        checks.positive(epsilon=self.epsilon)
        checks.positive(sensitivity=self.sensitivity)
        checks.one_of(_MECHANISMS, mechanism=self.mechanism)

    def event(self, run: Event) -> Event:
        """What everything does, when one run does `run`."""
        exponential = self.mechanism == "exponential"
        choice = BoundedRange(epsilon=self.epsilon) if exponential else PureDP(epsilon=self.epsilon)
        return Composed(events=(SelfComposed(event=run, count=self.candidates), choice))

    def prepared(self, configs: Sequence[Config]) -> "ExponentialChoice":
        """Ready for these settings; what it wants of each is asked before a record is read."""
        del configs
        return self

    def choose(self, scores: Sequence[float], configs: Sequence[Config], randomness: Randomness) -> int:
        """The position of the chosen candidate."""
        del configs
        parts = {"epsilon": self.epsilon, "sensitivity": self.sensitivity, "randomness": randomness}
        if self.mechanism == "permute-and-flip":
            return PermuteAndFlip(monotone=self.monotone, **parts).release(scores)
        if self.mechanism == "laplace":
            return ReportNoisyMax(monotone=self.monotone, noise="laplace", **parts).release(scores)
        return ExponentialMechanism(monotone=self.monotone, **parts).release(scores)


@dataclass(frozen=True, kw_only=True)
class GeneralizedChoice:
    """Train every candidate, then choose by the generalised exponential mechanism: each score has a sensitivity.

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
    candidates: int = 10
    epsilon: float = 0.1

    def __post_init__(self) -> None:
        checks.integer(1, candidates=self.candidates)
        checks.positive(epsilon=self.epsilon)

    def event(self, run: Event) -> Event:
        """What everything does, when one run does `run`."""
        choice = BoundedRange(epsilon=self.epsilon)
        return Composed(events=(SelfComposed(event=run, count=self.candidates), choice))

    def prepared(self, configs: Sequence[Config]) -> "GeneralizedChoice":
        """Ready for these settings; what it wants of each is asked before a record is read."""
        for config in configs:
            checks.positive(sensitivity=self.sensitivity(config))
        return self

    def choose(self, scores: Sequence[float], configs: Sequence[Config], randomness: Randomness) -> int:
        """The position of the chosen candidate; an error is a score with its sign changed."""
        mechanism = GeneralizedExponentialMechanism(
            epsilon=self.epsilon,
            sensitivities=tuple(float(self.sensitivity(config)) for config in configs),
            randomness=randomness,
        )
        return mechanism.release(-np.asarray(scores, dtype=np.float64))
