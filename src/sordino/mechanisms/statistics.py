"""A private count of records."""

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Sized
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from sordino import checks
from sordino.definitions import NeighboringRelation
from sordino.errors import InvalidArgument, MissingDeclaration
from sordino.events import ApproximateDP, Event, compose
from sordino.mechanisms.base import (
    Bounds,
    FloatArray,
    Numbers,
    category_codes,
    checked_bounds,
    observable_release,
    open_category,
    record_matrix,
    to_float_array,
)
from sordino.mechanisms.calibration import Budget, PureBudget
from sordino.mechanisms.categorical import ExponentialMechanism
from sordino.mechanisms.integer_noise import IntegerNoise, record_bits
from sordino.mechanisms.samplers import uniform_below
from sordino.randomness import KeyedRNG


@dataclass(frozen=True, kw_only=True)
class PrivateCount:
    """The number of records plus exact whole-number noise; the result may be negative.

    Guarantee: one release spends `budget`. A record changes the count by at most 1 under every neighboring relation.

    Args:
        budget: pure (geometric noise) or Gaussian.
        rng: where the noise comes from; by default a fresh key of this object's own.

    Example:
        >>> from sordino.mechanisms import make_budget
        >>> abs(PrivateCount(budget=make_budget(epsilon=50.0)).release(range(10)) - 10) < 5
        True
    """

    budget: Budget
    rng: KeyedRNG = field(default_factory=KeyedRNG, repr=False, compare=False)

    @property
    def noise(self) -> IntegerNoise:
        """What is added."""
        return IntegerNoise(sensitivities=(1,), moved=1, budget=self.budget)

    def event(self) -> Event:
        """The event of one release."""
        return self.noise.event()

    @observable_release
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
        return count + int(self.noise.draw(self.rng.new_stream("count"))[0])


# ----------------------------------------------------------------------------------------------------------------------
# A private sum of bounded records, exact to the last bit.
#
# Records are clipped, rounded to a grid and added as integers: integer addition doesn't round, so one record moves the
# sum by its own grid value and no more, in every order of summation. (Sums of floats can move by far more: Casacuberta,
# Shoemate, Vadhan, Wagaman 2022, "Widespread underestimation of sensitivity in differentially private libraries".)
# ----------------------------------------------------------------------------------------------------------------------


IntegerArray = npt.NDArray[np.int64]


def expand_column_bounds(bounds: Bounds | tuple[Bounds, ...]) -> tuple[Bounds, ...]:
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
        neighboring_relation: the neighboring relation.
        rng: where the noise comes from; by default a fresh key of this object's own.

    Example:
        >>> from sordino.mechanisms import make_budget
        >>> mechanism = PrivateSum(budget=make_budget(epsilon=1.0), bounds=(0.0, 100.0))
        >>> mechanism.sensitivities.tolist()
        [100.0]
    """

    budget: Budget
    bounds: Bounds | tuple[Bounds, ...]
    neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE
    rng: KeyedRNG = field(default_factory=KeyedRNG, repr=False, compare=False)

    def __post_init__(self) -> None:
        _ = self.noise

    @cached_property
    def _columns(self) -> tuple[Bounds, ...]:
        return expand_column_bounds(self.bounds)

    @cached_property
    def _exponents(self) -> IntegerArray:
        """Grid of each column: its larger bound is 2^(bits−1) … 2^bits steps."""
        bits = record_bits(self.budget, len(self._columns))
        largest = np.max(np.abs(np.array(self._columns)), axis=1)
        checks.in_range(2.0**-500, 2.0**500, largest_bound=float(largest.min()), hint="Rescale the column.")
        checks.in_range(2.0**-500, 2.0**500, largest_bound=float(largest.max()), hint="Rescale the column.")
        return np.array([math.frexp(bound)[1] - bits for bound in largest], dtype=np.int64)

    @cached_property
    def _grid_sensitivities(self) -> tuple[int, ...]:
        ends = np.rint(np.ldexp(np.array(self._columns), -self._exponents[:, None])).astype(np.int64)
        lower, upper = ends.T
        if self.neighboring_relation is NeighboringRelation.REPLACE_ONE:
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

    def exact_value(self, records: Numbers) -> IntegerArray:
        """The sums in grid steps before noise. Not private."""
        matrix, present = record_matrix(records, len(self._columns))
        ends = np.array(self._columns)
        steps = np.rint(np.ldexp(np.clip(matrix, ends[:, 0], ends[:, 1]), -self._exponents)).astype(np.int64)
        return steps[present].sum(axis=0)

    @observable_release
    def release(self, records: Numbers) -> np.float64 | FloatArray:
        """The noisy sums [columns]; a single number when `bounds` is a single pair."""
        noisy = self.exact_value(records) + self.noise.draw(self.rng.new_stream("sum"))
        sums = np.ldexp(noisy.astype(np.float64), self._exponents)
        return sums if isinstance(self.bounds[0], tuple) else sums[0]


# ----------------------------------------------------------------------------------------------------------------------
# A private mean of bounded records.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PrivateMean:
    """The column means of records that are clipped to declared bounds.

    Records are centered at the middle of the bounds, so a record moves the sum by half the range. Under add-or-remove
    the number of records is private: the sum is divided by a noisy count that has a share of the budget. Under
    replace-one and zero-out it is public and must be declared.

    Guarantee: one release spends `budget` under the declared relation. A record with an entry that is not finite is
    left out; where the number of records is public it counts as the middle of the bounds.

    Args:
        budget: pure or Gaussian, for the whole release.
        bounds: (lower, upper) of one column, or one pair for each column. Public, never taken from the data.
        neighboring_relation: the neighboring relation.
        records: the public number of records; required under replace-one and zero-out, refused otherwise.
        count_share: the noisy count's share of the budget, in (0, 1), where there is one.
        rng: where the noise comes from; by default a fresh key of this object's own.

    Example:
        >>> from sordino.mechanisms import make_budget
        >>> mechanism = PrivateMean(budget=make_budget(epsilon=50.0), bounds=(0.0, 10.0))
        >>> abs(float(mechanism.release([4.0] * 1000)) - 4.0) < 0.1
        True
    """

    budget: Budget
    bounds: Bounds | tuple[Bounds, ...]
    neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE
    records: int | None = None
    count_share: float = 0.5
    rng: KeyedRNG = field(default_factory=KeyedRNG, repr=False, compare=False)

    def __post_init__(self) -> None:
        checks.probability(count_share=self.count_share, zero=False, one=False)
        if self._counts and self.records is not None:
            raise InvalidArgument(
                f"records must be None under add-or-remove, got {self.records}. The number of records is private there."
            )
        if not self._counts:
            if self.records is None:
                raise MissingDeclaration(
                    f"records must be the public number of records under {self.neighboring_relation.describe()}, "
                    f"got None. Declare it."
                )
            checks.integer(1, records=self.records)
        _ = self.parts

    @property
    def _counts(self) -> bool:
        return self.neighboring_relation is NeighboringRelation.ADD_OR_REMOVE_ONE

    @cached_property
    def _frame(self) -> tuple[FloatArray, FloatArray]:
        """Middle and half range of each column."""
        ends = np.array(expand_column_bounds(self.bounds))
        return ends.mean(axis=1), np.diff(ends, axis=1)[:, 0] / 2

    @cached_property
    def parts(self) -> tuple[PrivateSum, PrivateCount | None]:
        """The centered sum, and the count where the number of records is private."""
        shares = self.budget.split(1 - self.count_share, self.count_share) if self._counts else (self.budget, None)
        half = tuple((-float(radius), float(radius)) for radius in self._frame[1])
        total = PrivateSum(budget=shares[0], bounds=half, neighboring_relation=self.neighboring_relation, rng=self.rng)
        return total, None if shares[1] is None else PrivateCount(budget=shares[1], rng=self.rng)

    def event(self) -> Event:
        """The event of one release: those of its parts, composed."""
        return compose([part.event() for part in self.parts if part is not None])

    def release(self, values: Numbers) -> np.float64 | FloatArray:
        """The noisy means [columns], inside the bounds; a single number when `bounds` is a single pair."""
        middle, radius = self._frame
        matrix, present = record_matrix(values, len(middle), name="values")
        centered = np.clip(matrix, middle - radius, middle + radius) - middle
        centered[~present] = np.nan  # absent from the sum
        total, count = self.parts
        if count is None:
            if len(matrix) != self.records:
                raise InvalidArgument(
                    f"values must have {self.records} records as declared, got another number. Declare the right one."
                )
            size = float(len(matrix))
        else:
            size = float(max(count.release(matrix[present]), 1))
        means = middle + np.clip(total.release(centered) / size, -radius, radius)
        return means if isinstance(self.bounds[0], tuple) else means[0]


# ----------------------------------------------------------------------------------------------------------------------
# A private quantile by the exponential mechanism on a declared grid.
#
# The candidates are all points of the grid, handled in pieces: the gaps between distinct values and the values
# themselves. A value that many records share is a piece of its own and keeps its weight; the continuous form of the
# mechanism gives it length zero, loses it, and divides zero by zero when everything else underflows.
#
# References:
#     Smith 2011, "Privacy-preserving statistical estimation with optimal convergence rates", algorithm 2.
#     McSherry, Talwar 2007 (exponential mechanism).
# ----------------------------------------------------------------------------------------------------------------------


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
        neighboring_relation: the neighboring relation.
        rng: where the noise comes from; by default a fresh key of this object's own.

    Example:
        >>> mechanism = PrivateQuantile(epsilon=20.0, quantile=0.5, bounds=(0.0, 100.0), resolution=101)
        >>> float(mechanism.release([30.0] * 50))
        30.0
    """

    epsilon: float
    quantile: float
    bounds: Bounds
    resolution: int = 1 << 16
    neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE
    rng: KeyedRNG = field(default_factory=KeyedRNG, repr=False, compare=False)

    def __post_init__(self) -> None:
        checks.probability(quantile=self.quantile)
        checks.in_range(2, 2**52, resolution=checks.integer(2, resolution=self.resolution))
        checked_bounds(self.bounds)
        _ = self._mechanism

    @property
    def sensitivity(self) -> float:
        """The largest change of a score."""
        if self.neighboring_relation is NeighboringRelation.ADD_OR_REMOVE_ONE:
            return max(self.quantile, 1.0 - self.quantile)
        return 1.0

    @property
    def _mechanism(self) -> ExponentialMechanism:
        return ExponentialMechanism(epsilon=self.epsilon, sensitivity=self.sensitivity, rng=self.rng)

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
        target = self.quantile * (
            below[-1] if self.neighboring_relation is NeighboringRelation.ADD_OR_REMOVE_ONE else len(present)
        )
        # Pieces alternate: gap, value, gap, value, …, gap. Strictly below and at or below count the ranks.
        first = np.empty(2 * len(points) + 1, dtype=np.int64)
        first[0], first[1::2], first[2::2] = 0, points, points + 1
        sizes = np.diff(np.concatenate([first, [self.resolution]]))
        strictly, weakly = np.empty(len(first)), np.empty(len(first))
        strictly[0::2], strictly[1::2] = below, below[:-1]
        weakly[0::2], weakly[1::2] = below, below[1:]
        return first, sizes, -np.maximum(np.maximum(strictly - target, target - weakly), 0.0)

    @observable_release
    def release(self, records: Numbers) -> float:
        """A grid point between the bounds."""
        first, sizes, scores = self.pieces(records)
        chosen = self._mechanism.release(scores, measures=sizes)
        inside = uniform_below(int(sizes[chosen]), 1, self.rng.new_stream("quantile"))
        lower, upper = self.bounds
        return lower + (upper - lower) * (int(first[chosen]) + int(inside[0])) / (self.resolution - 1)


# ----------------------------------------------------------------------------------------------------------------------
# A private histogram over declared bins.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PrivateHistogram:
    """Counts of records in each declared bin plus exact whole-number noise; counts may be negative.

    Bins are intervals between `edges` (closed below, open above, the last closed) or `categories`. Every bin is
    released, the empty ones too: which bins hold records is private.

    Guarantee: one release spends `budget`. A record lies in at most one bin, so it changes one count by 1, and two
    counts under replace-one.

    Args:
        budget: pure (geometric noise) or Gaussian, for all bins together.
        edges: rising numbers, one more than there are bins. Public, never the data's own extremes.
        categories: or the bins by name. Public, never read from the data.
        outside: what happens to a number beyond the edges: ``drop`` or ``clip`` to the nearest bin. A value that is
            no category, or is not a number, is always dropped.
        neighboring_relation: the neighboring relation.
        rng: where the noise comes from; by default a fresh key of this object's own.

    Example:
        >>> from sordino.mechanisms import make_budget
        >>> mechanism = PrivateHistogram(budget=make_budget(epsilon=100.0), categories=("a", "b", "c"))
        >>> mechanism.release(["a", "c", "c", "?"]).tolist()
        [1, 0, 2]
    """

    budget: Budget
    edges: tuple[float, ...] | None = None
    categories: tuple[Hashable, ...] | None = None
    outside: str = "drop"
    neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE
    rng: KeyedRNG = field(default_factory=KeyedRNG, repr=False, compare=False)

    def __post_init__(self) -> None:
        checks.one_of(("drop", "clip"), outside=self.outside)
        if (self.edges is None) == (self.categories is None):
            raise MissingDeclaration("edges must be given, or categories, and not both. Declare the bins.")
        if self.edges is not None and not (
            len(self.edges) > 1 and np.isfinite(self.edges).all() and (np.diff(self.edges) > 0).all()
        ):
            raise InvalidArgument(f"edges must be at least two rising numbers, got {self.edges!r}. Declare them so.")
        if self.categories is not None and len(set(self.categories)) != max(len(self.categories), 1):
            raise InvalidArgument(
                f"categories must be different and at least one, got {self.categories!r}. Declare each once."
            )

    @property
    def bins(self) -> int:
        """Number of bins."""
        return len(self.categories) if self.categories is not None else len(self.edges or ()) - 1

    @cached_property
    def noise(self) -> IntegerNoise:
        """What is added."""
        moved = 2 if self.neighboring_relation is NeighboringRelation.REPLACE_ONE and self.bins > 1 else 1
        return IntegerNoise(sensitivities=(1,) * self.bins, moved=moved, budget=self.budget)

    def event(self) -> Event:
        """The event of one release."""
        return self.noise.event()

    def exact_value(self, values: Iterable[object]) -> IntegerArray:
        """The counts before noise [bins]. Not private."""
        positions = self._positions(values) if self.categories is None else category_codes(values, self.categories)
        return np.bincount(positions[positions >= 0], minlength=self.bins).astype(np.int64)

    @observable_release
    def release(self, values: Iterable[object]) -> IntegerArray:
        """The noisy counts [bins], int64, in the order of the bins."""
        return self.exact_value(values) + self.noise.draw(self.rng.new_stream("histogram"))

    def _positions(self, values: Iterable[object]) -> IntegerArray:
        edges = np.array(self.edges)
        listed = values if isinstance(values, np.ndarray) else list(values)
        numbers = to_float_array(listed, "values")
        if numbers.ndim != 1:
            raise InvalidArgument(f"values must be a vector, got {numbers.ndim} dimensions. Flatten them.")
        positions = np.searchsorted(edges, numbers, side="right") - 1
        positions[numbers == edges[-1]] = self.bins - 1
        beyond = ~((numbers >= edges[0]) & (numbers <= edges[-1]))
        positions = np.clip(positions, 0, self.bins - 1)
        positions[beyond if self.outside == "drop" else np.isnan(numbers)] = -1
        return positions.astype(np.int64)


# ----------------------------------------------------------------------------------------------------------------------
# A private histogram over undeclared categories: only those with many records are shown.
#
# References:
#     Korolova, Kenthapadi, Mishra, Ntoulas 2009, "Releasing search queries and clicks privately". Bun, Nissim, Stemmer
#     2016, "Simultaneous private learning of multiple concepts" (stability-based histograms).
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ThresholdedHistogram:
    """Noisy counts of the categories whose noisy count reaches a threshold; the others stay unknown.

    Where the categories can be declared, `PrivateHistogram` needs no δ and shows the rare ones too.

    Guarantee: one release is (epsilon, delta)-private under the declared relation. δ pays for the chance that a
    category held by a single record is shown: P(1 + noise ≥ threshold) ≤ δ, the tail that includes the threshold.

    Args:
        epsilon: > 0.
        delta: in (0, 1).
        neighboring_relation: the neighboring relation; replace-one changes two categories, each gets half of ε and δ.
        rng: where the noise comes from; by default a fresh key of this object's own.

    Example:
        >>> mechanism = ThresholdedHistogram(epsilon=1.0, delta=1e-6)
        >>> mechanism.threshold, list(mechanism.release(["a"] * 1000 + ["b"]))
        (15, ['a'])
    """

    epsilon: float
    delta: float
    neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE
    rng: KeyedRNG = field(default_factory=KeyedRNG, repr=False, compare=False)

    def __post_init__(self) -> None:
        checks.positive(epsilon=self.epsilon)
        checks.probability(delta=self.delta, zero=False, one=False)
        _ = self.threshold

    @property
    def _moved(self) -> int:
        return 2 if self.neighboring_relation is NeighboringRelation.REPLACE_ONE else 1

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

    @observable_release
    def release(self, values: Iterable[object]) -> dict[Hashable, int]:
        """Categories and their noisy counts, largest first; their order tells nothing about the order of records.

        None, numbers that are not finite and values without a hash are dropped; equal numbers are one category.
        """
        listed = values.tolist() if isinstance(values, np.ndarray) else values
        counts = Counter(open_category(value) for value in listed)
        counts.pop(None, None)
        if not counts:
            return {}
        noise = self._noise(len(counts)).draw(self.rng.new_stream("thresholded-histogram"))
        noisy = [(key, count + int(extra)) for (key, count), extra in zip(counts.items(), noise, strict=True)]
        shown = [(key, count) for key, count in noisy if count >= self.threshold]
        return dict(sorted(shown, key=lambda pair: (-pair[1], type(pair[0]).__name__, repr(pair[0]))))
