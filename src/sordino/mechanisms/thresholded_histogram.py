"""A private histogram whose categories nobody declared: only those with many records are shown (floor 1).

References:
    Korolova, Kenthapadi, Mishra, Ntoulas 2009, "Releasing search queries and clicks privately". Bun, Nissim, Stemmer
    2016, "Simultaneous private learning of multiple concepts" (stability-based histograms).
"""

import math
from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

import numpy as np

from sordino import checks
from sordino.definitions import NeighboringRelation
from sordino.events import ApproximateDP, Event
from sordino.mechanisms.budgets import PureBudget
from sordino.mechanisms.integer_noise import IntegerNoise
from sordino.mechanisms.releases import recordable
from sordino.mechanisms.values import open_category
from sordino.randomness import Randomness

__all__ = ["ThresholdedHistogram"]


@dataclass(frozen=True, kw_only=True)
class ThresholdedHistogram:
    """Noisy counts of the categories whose noisy count reaches a threshold; the others stay unknown.

    Where the categories can be declared, `PrivateHistogram` needs no δ and shows the rare ones too.

    Guarantee: one release is (epsilon, delta)-private under the declared relation. δ pays for the chance that a
    category held by a single record is shown: P(1 + noise ≥ threshold) ≤ δ, the tail that includes the threshold.

    Args:
        epsilon: > 0.
        delta: in (0, 1).
        relation: the neighbouring relation; replace-one changes two categories, each gets half of ε and δ.
        randomness: where the noise comes from; by default a fresh key of this object's own.

    Example:
        >>> mechanism = ThresholdedHistogram(epsilon=1.0, delta=1e-6)
        >>> mechanism.threshold, list(mechanism.release(["a"] * 1000 + ["b"]))
        (15, ['a'])
    """

    epsilon: float
    delta: float
    relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE
    randomness: Randomness = field(default_factory=Randomness, repr=False, compare=False)

    def __post_init__(self) -> None:
        checks.positive(epsilon=self.epsilon)
        checks.probability(delta=self.delta, zero=False, one=False)
        _ = self.threshold

    @property
    def _moved(self) -> int:
        return 2 if self.relation is NeighboringRelation.REPLACE_ONE else 1

    @property
    def _scale(self) -> float:
        return float(self._noise(1).scales[0])

    def _noise(self, categories: int) -> IntegerNoise:
        return IntegerNoise(
            sensitivities=(1,) * categories, moved=1, budget=PureBudget(epsilon=self.epsilon / self._moved)
        )

    @property
    def threshold(self) -> int:
        """The least noisy count that is shown: a whole number, at least 2."""
        # P(noise ≥ k) = q^k/(1 + q) with q = e^{−1/scale}; the smallest k for which it is ≤ δ.
        log_tail = math.log(self.delta / self._moved) + math.log1p(math.exp(-1.0 / self._scale))
        steps = max(math.ceil(-log_tail * self._scale * (1 + 1e-12)), 1)
        return 1 + steps

    def event(self) -> Event:
        """The event of one release."""
        return ApproximateDP(epsilon=self.epsilon, delta=self.delta)

    @recordable
    def release(self, values: Iterable[object]) -> dict[Hashable, int]:
        """Categories and their noisy counts, largest first; their order tells nothing about the order of records.

        None, numbers that are not finite and values without a hash are dropped; equal numbers are one category.
        """
        listed = values.tolist() if isinstance(values, np.ndarray) else values
        counts = Counter(open_category(value) for value in listed)
        counts.pop(None, None)
        if not counts:
            return {}
        noise = self._noise(len(counts)).draw(self.randomness.fresh("thresholded-histogram"))
        noisy = [(key, count + int(extra)) for (key, count), extra in zip(counts.items(), noise, strict=True)]
        shown = [(key, count) for key, count in noisy if count >= self.threshold]
        return dict(sorted(shown, key=lambda pair: (-pair[1], type(pair[0]).__name__, repr(pair[0]))))
