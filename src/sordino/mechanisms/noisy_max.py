"""Report-noisy-max and permute-and-flip: the position of a high score, and nothing else (floor 1).

References:
    Dwork, Roth 2014, section 3.3 (noisy max). McKenna, Sheldon 2020, "Permute-and-flip". Ding, Kifer, Steinke,
    Wang, Xiao, Zhang 2021, "The permute-and-flip mechanism is identical to report-noisy-max with exponential noise".
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sordino import checks
from sordino.events import BoundedRange, Event, PureDP
from sordino.mechanisms.continuous import exponential, gumbel, laplace
from sordino.mechanisms.exponential import clean_scores
from sordino.mechanisms.releases import recordable
from sordino.mechanisms.values import Bounds, FloatArray, Numbers, checked_bounds
from sordino.randomness import Randomness, Stream

__all__ = ["PermuteAndFlip", "ReportNoisyMax"]

_DRAWS = {"exponential": exponential, "gumbel": gumbel, "laplace": laplace}


@dataclass(frozen=True, kw_only=True)
class ReportNoisyMax:
    """Adds noise to every score and reports which is largest: the position alone, never the noisy score.

    ``gumbel`` noise gives the law of the exponential mechanism; ``exponential`` noise that of permute-and-flip, which
    is never worse in expected score; ``laplace`` is the textbook form.

    Guarantee: one release is ε-private when one privacy unit moves every score by at most `sensitivity` (all in the
    same direction with `monotone`). Only with ``gumbel`` noise is it ε-bounded-range; the others are charged as
    ε-private and no less.

    Args:
        epsilon: > 0.
        sensitivity: > 0, the largest change of any score, under the declared relation.
        noise: ``gumbel``, ``exponential`` or ``laplace``.
        monotone: whether adding a record can only raise, or only lower, all scores.
        score_bounds: (lowest, highest) score; scores are clipped to it. Needed where a score may be NaN or infinite.
        randomness: where the noise comes from; by default a fresh key of this object's own.

    Example:
        >>> ReportNoisyMax(epsilon=50.0, sensitivity=1.0).release([0.0, 100.0, 3.0])
        1
    """

    epsilon: float
    sensitivity: float
    noise: str = "gumbel"
    monotone: bool = False
    score_bounds: Bounds | None = None
    randomness: Randomness = field(default_factory=Randomness, repr=False, compare=False)

    def __post_init__(self) -> None:
        checks.positive(epsilon=self.epsilon)
        checks.positive(sensitivity=self.sensitivity)
        checks.one_of(tuple(_DRAWS), noise=self.noise)
        if self.score_bounds is not None:
            checked_bounds(self.score_bounds, name="score_bounds")

    @property
    def scale(self) -> float:
        """Scale of the noise on each score."""
        return (1.0 if self.monotone else 2.0) * self.sensitivity / self.epsilon

    def event(self) -> Event:
        """The event of one release."""
        return BoundedRange(epsilon=self.epsilon) if self.noise == "gumbel" else PureDP(epsilon=self.epsilon)

    @recordable
    def release(self, scores: Numbers) -> int:
        """The position of the largest noisy score."""
        cleaned = clean_scores(scores, bounds=self.score_bounds)
        noise = _DRAWS[self.noise](cleaned.size, self.randomness.fresh("noisy-max"))
        return int(np.argmax((cleaned - cleaned.max()) / self.scale + noise))


@dataclass(frozen=True, kw_only=True)
class PermuteAndFlip:
    """Visits candidates in random order and takes one with probability exp(ε·(score − best)/(2Δ)).

    Its expected score is never below the exponential mechanism's.

    Guarantee: one release is ε-private when one privacy unit moves every score by at most `sensitivity` (all in the
    same direction with `monotone`). It is not ε-bounded-range: it is charged ε, hence ε²/2-zCDP, not ε²/8.

    Args:
        epsilon: > 0.
        sensitivity: > 0, the largest change of any score, under the declared relation.
        monotone: whether adding a record can only raise, or only lower, all scores.
        score_bounds: (lowest, highest) score; scores are clipped to it. Needed where a score may be NaN or infinite.
        randomness: where the coins come from; by default a fresh key of this object's own.

    Example:
        >>> PermuteAndFlip(epsilon=50.0, sensitivity=1.0).release([0.0, 100.0, 3.0])
        1
    """

    epsilon: float
    sensitivity: float
    monotone: bool = False
    score_bounds: Bounds | None = None
    randomness: Randomness = field(default_factory=Randomness, repr=False, compare=False)

    def __post_init__(self) -> None:
        checks.positive(epsilon=self.epsilon)
        checks.positive(sensitivity=self.sensitivity)
        if self.score_bounds is not None:
            checked_bounds(self.score_bounds, name="score_bounds")

    def event(self) -> Event:
        """The event of one release."""
        return PureDP(epsilon=self.epsilon)

    def acceptance(self, scores: Numbers) -> FloatArray:
        """Probability of taking each candidate when it is visited; 1 for the best."""
        cleaned = clean_scores(scores, bounds=self.score_bounds)
        return np.exp(self.epsilon * (cleaned - cleaned.max()) / ((1.0 if self.monotone else 2.0) * self.sensitivity))

    @recordable
    def release(self, scores: Numbers) -> int:
        """The position of the chosen candidate."""
        acceptance = self.acceptance(scores)
        stream = self.randomness.fresh("permute-and-flip")
        order = _random_order(acceptance.size, stream)
        # All coins are flipped at once; the first candidate that is taken in the random order is the result.
        taken = stream.uniform(acceptance.size) < acceptance[order]
        return int(order[np.argmax(taken)])


def _random_order(count: int, stream: Stream) -> npt.NDArray[np.intp]:
    """A uniform permutation: the ranks of random words, drawn again when two are equal."""
    while True:
        words = stream.integers64(count)
        order = np.argsort(words)
        if not (np.diff(words[order]) == 0).any():
            return order
