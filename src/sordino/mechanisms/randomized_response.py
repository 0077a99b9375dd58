"""Randomised response: every record is randomised on its own, before anybody collects it (floor 1).

References:
    Warner 1965. Kairouz, Oh, Viswanath 2014, "Extremal mechanisms for local differential privacy" (k answers).
"""

import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from decimal import Decimal, localcontext

import numpy as np
import numpy.typing as npt

from sordino import checks
from sordino.errors import InvalidArgument
from sordino.events import Event
from sordino.events import RandomizedResponse as RandomizedResponseEvent
from sordino.mechanisms.exact import uniform_below
from sordino.mechanisms.releases import recordable
from sordino.mechanisms.values import FloatArray, category_codes
from sordino.randomness import Randomness

__all__ = ["RandomizedResponse"]

_UNIT = 1 << 62


@dataclass(frozen=True, kw_only=True)
class RandomizedResponse:
    """The truth with probability e^ε/(e^ε + k − 1), otherwise one of the other k − 1 answers at random. Exact.

    Guarantee: each record's answer is ε-private in the local model, under replace-one of that record. A value that
    is not a declared category is answered by a category at random, hence tells nothing.

    Args:
        epsilon: > 0.
        categories: the possible answers, ≥ 2, declared, never read from the data.
        randomness: where the coins come from; by default a fresh key of this object's own.

    Example:
        >>> mechanism = RandomizedResponse(epsilon=1.0, categories=("yes", "no"))
        >>> round(mechanism.truth_probability, 4), len(mechanism.release(["yes", "no", "no"]))
        (0.7311, 3)
    """

    epsilon: float
    categories: tuple[Hashable, ...] = (False, True)
    randomness: Randomness = field(default_factory=Randomness, repr=False, compare=False)

    def __post_init__(self) -> None:
        checks.positive(epsilon=self.epsilon)
        checks.in_range(2.0**-40, math.inf, epsilon=self.epsilon, hint="Coins have 62 bits.")
        distinct = len(set(self.categories))
        if distinct != len(self.categories) or distinct < 2:
            raise InvalidArgument(
                f"categories must be at least two different answers, got {len(self.categories)} of which {distinct} "
                "differ. Declare every possible answer once."
            )

    @property
    def _threshold(self) -> int:
        # Rounded down, so that the odds of truth against any one other answer never exceed e^ε.
        with localcontext() as context:
            context.prec = 60
            odds = Decimal(self.epsilon).exp()
            return min(int(odds / (odds + len(self.categories) - 1) * _UNIT), _UNIT - 1)

    @property
    def truth_probability(self) -> float:
        """Probability that an answer is the record's own."""
        return self._threshold / _UNIT

    def event(self) -> Event:
        """The event of one record's answer."""
        return RandomizedResponseEvent(epsilon=self.epsilon, categories=len(self.categories))

    @recordable
    def release(self, values: Iterable[object]) -> npt.NDArray[np.generic]:
        """One randomised answer for each value, in order."""
        codes = category_codes(values, self.categories)
        stream = self.randomness.fresh("randomized-response")
        truthful = uniform_below(_UNIT, len(codes), stream) < self._threshold
        shift = 1 + uniform_below(len(self.categories) - 1, len(codes), stream)
        anything = uniform_below(len(self.categories), len(codes), stream)
        answers = np.where(truthful, codes, (codes + shift) % len(self.categories))
        return np.array(self.categories)[np.where(codes < 0, anything, answers)]

    def estimate(self, answers: Iterable[object]) -> FloatArray:
        """Unbiased shares of the categories among the records, from their answers (post-processing).

        Noise can make a share negative; shares sum to 1.
        """
        codes = category_codes(answers, self.categories)
        if not len(codes) or (codes < 0).any():
            raise InvalidArgument("answers must be at least one declared category. Give what `release` returned.")
        observed = np.bincount(codes, minlength=len(self.categories)) / len(codes)
        other = (1.0 - self.truth_probability) / (len(self.categories) - 1)
        return (observed - other) / (self.truth_probability - other)
