"""Count, means and variances of columns with declared bounds (floor 4): what naive Bayes and standardising need.

Proof: docs/proofs/bounded-moments.md.
"""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from sordino.events import Event
from sordino.mechanisms import PrivateCount, PrivateSum
from sordino.mechanisms.budgets import Budget
from sordino.mechanisms.values import FloatArray
from sordino.randomness import Randomness

__all__ = ["BoundedMoments", "Moments"]


@dataclass(frozen=True, kw_only=True)
class Moments:
    """Noisy moments of one group of records.

    Args:
        count: number of records, ≥ 1 after noise.
        means: [d], inside the bounds.
        variances: [d], > 0.
    """

    count: float
    means: FloatArray
    variances: FloatArray


@dataclass(frozen=True, kw_only=True)
class BoundedMoments:
    """The moments of records clipped to bounds, from a noisy count and noisy sums of u and u² − ½, −1 ≤ u ≤ 1.

    u is the record moved to the middle of the bounds and scaled by half their distance: so a record moves a sum by at
    most 1, wherever the bounds lie, and u² − ½ by at most ½.

    Guarantee: one release spends `budget` for one record added or removed.

    Args:
        budget: pure or Gaussian; a fifth goes to the count.
        lower: [d].
        upper: [d], above `lower`.
        randomness: where the noise comes from; by default a fresh key of this object's own.

    Example:
        >>> from sordino.mechanisms import budget
        >>> moments = BoundedMoments(budget=budget(epsilon=50.0), lower=np.zeros(1), upper=np.full(1, 10.0))
        >>> moments.release(np.repeat([[2.0], [6.0]], 5000, axis=0)).means.round(1).tolist()
        [4.0]
    """

    budget: Budget
    lower: FloatArray
    upper: FloatArray
    randomness: Randomness = field(default_factory=Randomness, repr=False, compare=False)

    @cached_property
    def count(self) -> PrivateCount:
        """The number of records."""
        share, _ = self.budget.split(1, 4)
        return PrivateCount(budget=share, randomness=self.randomness)

    @cached_property
    def sums(self) -> PrivateSum:
        """The sums of u [d], then of u² − ½ [d]."""
        _, share = self.budget.split(1, 4)
        columns = len(self.lower)
        bounds = ((-1.0, 1.0),) * columns + ((-0.5, 0.5),) * columns
        return PrivateSum(budget=share, bounds=bounds, randomness=self.randomness)

    def events(self) -> list[Event]:
        """The events of one release, one a part."""
        return [self.count.event(), self.sums.event()]

    def release(self, records: FloatArray) -> Moments:
        """Noisy moments of records [n, d]; a group without records has the moments of noise alone."""
        middle, half = self.lower / 2 + self.upper / 2, self.upper / 2 - self.lower / 2
        u = np.clip((np.clip(records, self.lower, self.upper) - middle) / half, -1.0, 1.0)
        count = max(float(self.count.release(records)), 1.0)
        sums = np.asarray(self.sums.release(np.hstack([u, u * u - 0.5])))
        means = np.clip(sums[: len(middle)] / count, -1.0, 1.0)
        squares = np.clip(sums[len(middle) :] / count + 0.5, 0.0, 1.0)
        # A variance below what its own noise can tell from 0 is raised to that, and never below a thousandth.
        floor = max(float(np.asarray(self.sums.scales)[-1]) / count, 1e-3)
        variances = np.maximum(squares - means * means, min(floor, 1.0))
        return Moments(count=count, means=middle + half * means, variances=half * half * variances)
