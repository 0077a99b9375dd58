"""A private sum of bounded records, exact to the last bit (floor 1).

Records are clipped, rounded to a grid and added as integers: integer addition doesn't round, so one record moves the
sum by its own grid value and no more, in every order of summation. (Sums of floats can move by far more: Casacuberta,
Shoemate, Vadhan, Wagaman 2022, "Widespread underestimation of sensitivity in differentially private libraries".)
"""

import math
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from sordino import checks
from sordino.definitions import NeighboringRelation
from sordino.errors import InvalidArgument
from sordino.events import Event
from sordino.mechanisms.budgets import Budget
from sordino.mechanisms.integer_noise import IntegerNoise, record_bits
from sordino.mechanisms.releases import recordable
from sordino.mechanisms.values import Bounds, FloatArray, Numbers, checked_bounds, record_matrix
from sordino.randomness import Randomness

__all__ = ["PrivateSum", "columns_of"]

IntegerArray = npt.NDArray[np.int64]


def columns_of(bounds: Bounds | tuple[Bounds, ...]) -> tuple[Bounds, ...]:
    """One checked (lower, upper) for each column; a single pair is one column."""
    pairs = [ends for ends in bounds if isinstance(ends, tuple)]
    if len(pairs) not in (0, len(bounds)) or (not pairs and len(bounds) != 2):
        raise InvalidArgument(
            f"bounds must be (lower, upper) or a tuple of such pairs, got {bounds!r}. Declare them so."
        )
    if not pairs:
        lower, upper = (float(end) for end in bounds if not isinstance(end, tuple))
        pairs = [(lower, upper)]
    return tuple(checked_bounds(pair) for pair in pairs)


@dataclass(frozen=True, kw_only=True)
class PrivateSum:
    """The column sums of records that are clipped to declared bounds, plus exact noise.

    Guarantee: one release spends `budget` under the declared relation. Every record is clipped to `bounds`, exactly;
    a record with an entry that is not finite adds nothing. Each column gets noise in proportion to its own bound.

    Args:
        budget: pure (discrete Laplace noise) or Gaussian, for all columns together.
        bounds: (lower, upper) of one column, or one pair for each column. Public, never taken from the data.
        relation: the neighbouring relation.
        randomness: where the noise comes from; by default a fresh key of this object's own.

    Example:
        >>> from sordino.mechanisms import budget
        >>> mechanism = PrivateSum(budget=budget(epsilon=1.0), bounds=(0.0, 100.0))
        >>> mechanism.sensitivities.tolist()
        [100.0]
    """

    budget: Budget
    bounds: Bounds | tuple[Bounds, ...]
    relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE
    randomness: Randomness = field(default_factory=Randomness, repr=False, compare=False)

    def __post_init__(self) -> None:
        _ = self.noise

    @cached_property
    def _columns(self) -> tuple[Bounds, ...]:
        return columns_of(self.bounds)

    @cached_property
    def _exponents(self) -> IntegerArray:
        """Grid of each column: its larger bound is 2^(bits−1) … 2^bits steps."""
        bits = record_bits(self.budget, len(self._columns))
        largest = np.max(np.abs(np.array(self._columns)), axis=1)
        checks.in_range(2.0**-500, 2.0**500, largest_bound=float(largest.min()), hint="Rescale the column.")
        checks.in_range(2.0**-500, 2.0**500, largest_bound=float(largest.max()), hint="Rescale the column.")
        return np.array([math.frexp(bound)[1] - bits for bound in largest], dtype=np.int64)

    def _grid_bounds(self) -> tuple[IntegerArray, IntegerArray]:
        ends = np.rint(np.ldexp(np.array(self._columns), -self._exponents[:, None])).astype(np.int64)
        return ends[:, 0], ends[:, 1]

    @cached_property
    def _grid_sensitivities(self) -> tuple[int, ...]:
        lower, upper = self._grid_bounds()
        if self.relation is NeighboringRelation.REPLACE_ONE:
            # A record that is absent adds 0, which may lie outside the bounds.
            moved = np.maximum(upper, 0) - np.minimum(lower, 0)
        else:
            moved = np.maximum(np.abs(lower), np.abs(upper))
        return tuple(int(change) for change in moved)

    @property
    def sensitivities(self) -> FloatArray:
        """The largest change of each column's sum: max(|lower|, |upper|), or the whole range under replace-one."""
        return np.ldexp(np.array(self._grid_sensitivities, dtype=np.float64), self._exponents)

    @cached_property
    def noise(self) -> IntegerNoise:
        """What is added, in grid steps."""
        sensitivities = self._grid_sensitivities
        return IntegerNoise(sensitivities=sensitivities, moved=len(sensitivities), budget=self.budget)

    @property
    def scales(self) -> FloatArray:
        """Laplace scale or Gaussian standard deviation of each column's noise, in the column's unit."""
        return np.ldexp(self.noise.scales, self._exponents)

    def event(self) -> Event:
        """The event of one release."""
        return self.noise.event()

    def exact(self, records: Numbers) -> IntegerArray:
        """The sums in grid steps before noise. Not private."""
        matrix, present = record_matrix(records, len(self._columns))
        ends = np.array(self._columns)
        steps = np.rint(np.ldexp(np.clip(matrix, ends[:, 0], ends[:, 1]), -self._exponents)).astype(np.int64)
        return steps[present].sum(axis=0)

    @recordable
    def release(self, records: Numbers) -> np.float64 | FloatArray:
        """The noisy sums [columns]; a single number when `bounds` is a single pair."""
        noisy = self.exact(records) + self.noise.draw(self.randomness.fresh("sum"))
        sums = np.ldexp(noisy.astype(np.float64), self._exponents)
        return sums if isinstance(self.bounds[0], tuple) else sums[0]
