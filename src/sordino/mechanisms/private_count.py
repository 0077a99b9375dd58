"""A private count of records (floor 1)."""

from collections.abc import Sized
from dataclasses import dataclass, field

import numpy as np

from sordino.errors import InvalidArgument
from sordino.events import Event
from sordino.mechanisms.budgets import Budget
from sordino.mechanisms.integer_noise import IntegerNoise
from sordino.mechanisms.releases import recordable
from sordino.mechanisms.values import Numbers
from sordino.randomness import Randomness

__all__ = ["PrivateCount"]


@dataclass(frozen=True, kw_only=True)
class PrivateCount:
    """The number of records plus exact whole-number noise; the result may be negative.

    Guarantee: one release spends `budget`. A record changes the count by at most 1 under every neighbouring relation.

    Args:
        budget: pure (geometric noise) or Gaussian.
        randomness: where the noise comes from; by default a fresh key of this object's own.

    Example:
        >>> from sordino.mechanisms import budget
        >>> abs(PrivateCount(budget=budget(epsilon=50.0)).release(range(10)) - 10) < 5
        True
    """

    budget: Budget
    randomness: Randomness = field(default_factory=Randomness, repr=False, compare=False)

    @property
    def noise(self) -> IntegerNoise:
        """What is added."""
        return IntegerNoise(sensitivities=(1,), moved=1, budget=self.budget)

    def event(self) -> Event:
        """The event of one release."""
        return self.noise.event()

    @recordable
    def release(self, records: Sized, *, where: Numbers | None = None) -> int:
        """The noisy number of records, or of those for which the boolean vector `where` is True."""
        count = len(records)
        if where is not None:
            chosen = np.asarray(where)
            if chosen.dtype != np.bool_ or chosen.shape != (count,):
                raise InvalidArgument(
                    f"where must be a boolean vector with one entry a record, got {chosen.ndim} dimensions of "
                    f"{chosen.dtype}. Compare a column with a public value."
                )
            count = int(chosen.sum())
        return count + int(self.noise.draw(self.randomness.fresh("count"))[0])
