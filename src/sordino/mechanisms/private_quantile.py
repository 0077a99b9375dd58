"""A private quantile by the exponential mechanism on a declared grid (floor 1).

The candidates are all points of the grid, handled in pieces: the gaps between distinct values and the values
themselves. A value that many records share is a piece of its own and keeps its weight; the continuous form of the
mechanism gives it length zero, loses it, and divides zero by zero when everything else underflows.

References:
    Smith 2011, "Privacy-preserving statistical estimation with optimal convergence rates", algorithm 2.
    McSherry, Talwar 2007 (exponential mechanism).
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sordino import checks
from sordino.definitions import NeighboringRelation
from sordino.events import Event
from sordino.mechanisms.exact import uniform_below
from sordino.mechanisms.exponential import ExponentialMechanism
from sordino.mechanisms.releases import recordable
from sordino.mechanisms.values import Bounds, FloatArray, Numbers, checked_bounds, record_matrix
from sordino.randomness import Randomness

__all__ = ["PrivateQuantile"]

IntegerArray = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class PrivateQuantile:
    """A grid point near the `quantile` of records that are clipped to declared bounds.

    A point's score is minus how many records' ranks it is away from quantile·n. One record moves a score by at most
    max(quantile, 1 − quantile) when n is private, by 1 when n is public (replace-one, zero-out).

    Guarantee: one release is ``BoundedRange(epsilon)`` under the declared relation, hence ε-private. A record that is
    not a finite number is left out of the ranks.

    Args:
        epsilon: > 0.
        quantile: in [0, 1]; 0.5 is the median.
        bounds: (lower, upper), public, never the data's own extremes.
        resolution: number of grid points ≥ 2 from lower to upper. Choose the unit of the data (years, cents).
        relation: the neighbouring relation.
        randomness: where the noise comes from; by default a fresh key of this object's own.

    Example:
        >>> mechanism = PrivateQuantile(epsilon=20.0, quantile=0.5, bounds=(0.0, 100.0), resolution=101)
        >>> float(mechanism.release([30.0] * 50))
        30.0
    """

    epsilon: float
    quantile: float
    bounds: Bounds
    resolution: int = 1 << 16
    relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE
    randomness: Randomness = field(default_factory=Randomness, repr=False, compare=False)

    def __post_init__(self) -> None:
        checks.probability(quantile=self.quantile)
        checks.in_range(2, 2**52, resolution=checks.integer(2, resolution=self.resolution))
        checked_bounds(self.bounds)
        _ = self._mechanism

    @property
    def sensitivity(self) -> float:
        """The largest change of a score."""
        if self.relation is NeighboringRelation.ADD_OR_REMOVE_ONE:
            return max(self.quantile, 1.0 - self.quantile)
        return 1.0

    @property
    def _mechanism(self) -> ExponentialMechanism:
        return ExponentialMechanism(epsilon=self.epsilon, sensitivity=self.sensitivity, randomness=self.randomness)

    def event(self) -> Event:
        """The event of one release."""
        return self._mechanism.event()

    def pieces(self, records: Numbers) -> tuple[IntegerArray, IntegerArray, FloatArray]:
        """First point, number of points and score of every piece of the grid. Not private."""
        lower, upper = self.bounds
        matrix, present = record_matrix(records, 1)
        scaled = (np.clip(matrix[:, 0], lower, upper) - lower) / (upper - lower) * (self.resolution - 1)
        points, counts = np.unique(np.rint(scaled[present]).astype(np.int64), return_counts=True)
        below = np.concatenate([[0], np.cumsum(counts)])
        # Under add-or-remove the records present are counted; otherwise all are, which is public.
        target = self.quantile * (below[-1] if self.relation is NeighboringRelation.ADD_OR_REMOVE_ONE else len(present))
        # Pieces alternate: gap, value, gap, value, …, gap. Strictly below and at or below count the ranks.
        first = np.empty(2 * len(points) + 1, dtype=np.int64)
        first[0], first[1::2], first[2::2] = 0, points, points + 1
        sizes = np.diff(np.concatenate([first, [self.resolution]]))
        strictly, weakly = np.empty(len(first)), np.empty(len(first))
        strictly[0::2], strictly[1::2] = below, below[:-1]
        weakly[0::2], weakly[1::2] = below, below[1:]
        return first, sizes, -np.maximum(np.maximum(strictly - target, target - weakly), 0.0)

    @recordable
    def release(self, records: Numbers) -> float:
        """A grid point between the bounds."""
        first, sizes, scores = self.pieces(records)
        chosen = self._mechanism.release(scores, measures=sizes)
        inside = uniform_below(int(sizes[chosen]), 1, self.randomness.fresh("quantile"))
        lower, upper = self.bounds
        return lower + (upper - lower) * (int(first[chosen]) + int(inside[0])) / (self.resolution - 1)
