"""A private mean of bounded records (floor 1)."""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from sordino import checks
from sordino.definitions import NeighboringRelation
from sordino.errors import InvalidArgument, MissingDeclaration
from sordino.events import Event, compose
from sordino.mechanisms.budgets import Budget
from sordino.mechanisms.private_count import PrivateCount
from sordino.mechanisms.private_sum import PrivateSum, columns_of
from sordino.mechanisms.values import Bounds, FloatArray, Numbers, record_matrix
from sordino.randomness import Randomness

__all__ = ["PrivateMean"]


@dataclass(frozen=True, kw_only=True)
class PrivateMean:
    """The column means of records that are clipped to declared bounds.

    Records are centred at the middle of the bounds, so a record moves the sum by half the range. Under add-or-remove
    the number of records is private: the sum is divided by a noisy count that has a share of the budget. Under
    replace-one and zero-out it is public and must be declared.

    Guarantee: one release spends `budget` under the declared relation. A record with an entry that is not finite is
    left out; where the number of records is public it counts as the middle of the bounds.

    Args:
        budget: pure or Gaussian, for the whole release.
        bounds: (lower, upper) of one column, or one pair for each column. Public, never taken from the data.
        relation: the neighbouring relation.
        records: the public number of records; required under replace-one and zero-out, refused otherwise.
        count_share: the noisy count's share of the budget, in (0, 1), where there is one.
        randomness: where the noise comes from; by default a fresh key of this object's own.

    Example:
        >>> from sordino.mechanisms import budget
        >>> mechanism = PrivateMean(budget=budget(epsilon=50.0), bounds=(0.0, 10.0))
        >>> abs(float(mechanism.release([4.0] * 1000)) - 4.0) < 0.1
        True
    """

    budget: Budget
    bounds: Bounds | tuple[Bounds, ...]
    relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE
    records: int | None = None
    count_share: float = 0.5
    randomness: Randomness = field(default_factory=Randomness, repr=False, compare=False)

    def __post_init__(self) -> None:
        checks.probability(count_share=self.count_share, zero=False, one=False)
        if self._counts and self.records is not None:
            raise InvalidArgument(
                f"records must be None under add-or-remove, got {self.records}. The number of records is private there."
            )
        if not self._counts:
            if self.records is None:
                raise MissingDeclaration(
                    f"records must be the public number of records under {self.relation.words}, got None. Declare it."
                )
            checks.integer(1, records=self.records)
        _ = self.parts

    @property
    def _counts(self) -> bool:
        return self.relation is NeighboringRelation.ADD_OR_REMOVE_ONE

    @cached_property
    def _frame(self) -> tuple[FloatArray, FloatArray]:
        """Middle and half range of each column."""
        ends = np.array(columns_of(self.bounds))
        return ends.mean(axis=1), np.diff(ends, axis=1)[:, 0] / 2

    @cached_property
    def parts(self) -> tuple[PrivateSum, PrivateCount | None]:
        """The centred sum, and the count where the number of records is private."""
        shares = self.budget.split(1 - self.count_share, self.count_share) if self._counts else (self.budget, None)
        half = tuple((-float(radius), float(radius)) for radius in self._frame[1])
        total = PrivateSum(budget=shares[0], bounds=half, relation=self.relation, randomness=self.randomness)
        return total, None if shares[1] is None else PrivateCount(budget=shares[1], randomness=self.randomness)

    def event(self) -> Event:
        """The event of one release: those of its parts, composed."""
        return compose([part.event() for part in self.parts if part is not None])

    def release(self, values: Numbers) -> np.float64 | FloatArray:
        """The noisy means [columns], inside the bounds; a single number when `bounds` is a single pair."""
        middle, radius = self._frame
        matrix, present = record_matrix(values, len(middle), name="values")
        centred = np.clip(matrix, middle - radius, middle + radius) - middle
        centred[~present] = np.nan  # absent from the sum
        total, count = self.parts
        if count is None:
            if len(matrix) != self.records:
                raise InvalidArgument(
                    f"values must have {self.records} records as declared, got another number. Declare the right one."
                )
            size = float(len(matrix))
        else:
            size = float(max(count.release(matrix[present]), 1))
        means = middle + np.clip(total.release(centred) / size, -radius, radius)
        return means if isinstance(self.bounds[0], tuple) else means[0]
