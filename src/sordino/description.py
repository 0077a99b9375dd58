"""`describe`: counts, means, quantiles, histograms and cross tables of a private table, with intervals, in one charge.

Proof: docs/proofs/description.md.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from scipy.special import ndtri

from sordino import checks
from sordino.data import NumericColumn, Schema
from sordino.data.discretization import DiscreteColumn, TableSource, table_columns
from sordino.errors import InvalidArgument
from sordino.estimators.base import PrivateEstimator, require_declared
from sordino.ledger import Account, Reservation
from sordino.mechanisms import PrivateCount, PrivateHistogram, PrivateSum, make_budget
from sordino.mechanisms.calibration import Budget
from sordino.randomness import KeyedRNG

if TYPE_CHECKING:
    from sordino.data.tables import Column
    from sordino.definitions import Guarantee
    from sordino.events import Event

__all__ = [
    "CategorySummary",
    "CrossTable",
    "Estimate",
    "NumericSummary",
    "TableDescriber",
    "TableDescription",
    "describe",
]

FloatArray = npt.NDArray[np.float64]

# Parts of the budget: the number of records, all sums together, all histograms together, all cross tables together.
_WEIGHTS = (1.0, 2.0, 4.0, 3.0)
_CROSS_PARTS = 4
_FINE = 3 * _CROSS_PARTS  # cells of a histogram's part, from which quantiles are read
_MOST_CATEGORIES = 20


# ----------------------------------------------------------------------------------------------------------------------
# What is released.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Estimate:
    """A noisy value and the interval that holds the table's own value at the stated confidence."""

    value: float
    low: float
    high: float

    def to_dict(self) -> dict[str, float]:
        """As JSON types."""
        return {"value": self.value, "low": self.low, "high": self.high}


@dataclass(frozen=True, kw_only=True)
class NumericSummary:
    """A numeric column: values are clipped to their bounds.

    Args:
        name: of the column.
        missing: number of records without a number.
        mean: of the others.
        quantiles: (level, value) of the others; the value is the smallest that at least this part does not exceed.
        histogram: (part of the range, number of records).
    """

    name: str
    missing: Estimate
    mean: Estimate
    quantiles: tuple[tuple[float, Estimate], ...]
    histogram: tuple[tuple[str, Estimate], ...]

    def to_dict(self) -> dict[str, object]:
        """As JSON types."""
        return {
            "name": self.name,
            "type": "numeric",
            "missing": self.missing.to_dict(),
            "mean": self.mean.to_dict(),
            "quantiles": [{"level": level, **estimate.to_dict()} for level, estimate in self.quantiles],
            "histogram": [{"part": part, **estimate.to_dict()} for part, estimate in self.histogram],
        }


@dataclass(frozen=True, kw_only=True)
class CategorySummary:
    """The number of records of each value of a category, level or boolean, or in each part of a date's range, in order.

    Missing and unlisted values stand last.
    """

    name: str
    counts: tuple[tuple[str, Estimate], ...]

    def to_dict(self) -> dict[str, object]:
        """As JSON types."""
        return {
            "name": self.name,
            "type": "category",
            "counts": [{"category": category, **estimate.to_dict()} for category, estimate in self.counts],
        }


@dataclass(frozen=True, kw_only=True)
class CrossTable:
    """Numbers of records by the values of two columns; a number is in equal parts of its range.

    Args:
        columns: the two names.
        rows: values of the first.
        header: values of the second.
        counts: noisy counts, one row for each of `rows`; they may be negative.
        margin: each count's interval is so much to either side.
    """

    columns: tuple[str, str]
    rows: tuple[str, ...]
    header: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]
    margin: float

    def to_dict(self) -> dict[str, object]:
        """As JSON types."""
        return {
            "columns": list(self.columns),
            "rows": list(self.rows),
            "header": list(self.header),
            "counts": [list(row) for row in self.counts],
            "margin": self.margin,
        }


@dataclass(frozen=True, kw_only=True)
class TableDescription:
    """Everything that `describe` released.

    Args:
        guarantee: of all of it together.
        confidence: of each interval by itself.
        records: number of records.
        columns: one summary a column, in the schema's order, the target last.
        cross_tables: in the order asked for.
    """

    guarantee: "Guarantee"
    confidence: float
    records: Estimate
    columns: tuple[NumericSummary | CategorySummary, ...]
    cross_tables: tuple[CrossTable, ...]

    def column(self, name: str) -> NumericSummary | CategorySummary:
        """The summary of one column."""
        found = {summary.name: summary for summary in self.columns}
        checks.one_of(found, name=name)
        return found[name]

    def to_dict(self) -> dict[str, object]:
        """As JSON types."""
        guarantee = self.guarantee
        return {
            "epsilon": guarantee.epsilon,
            "delta": guarantee.delta,
            "privacy_unit": guarantee.privacy_unit.value,
            "neighboring_relation": guarantee.neighboring_relation.value,
            "accountant": guarantee.accountant,
            "caveats": list(guarantee.caveats),
            "description": guarantee.describe(),
            "confidence": self.confidence,
            "records": self.records.to_dict(),
            "columns": [summary.to_dict() for summary in self.columns],
            "cross_tables": [table.to_dict() for table in self.cross_tables],
        }


# ----------------------------------------------------------------------------------------------------------------------
# Intervals. Noise is the only error: they hold the value of the table itself, not of a population behind it.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Noise:
    """How many standard deviations make an interval, for Gaussian noise or for sums of Laplace noise.

    A Laplace variable exceeds ln(1/(1 − c))/√2 of its deviations with probability 1 − c; sums are nearer to Gaussian.
    """

    confidence: float
    pure: bool

    @property
    def deviations(self) -> float:
        """In units of the standard deviation."""
        gaussian = float(ndtri((1 + self.confidence) / 2))
        return max(gaussian, -math.log1p(-self.confidence) / math.sqrt(2)) if self.pure else gaussian

    def variance(self, scale: float) -> float:
        """Of integer noise with this Laplace scale or Gaussian deviation, from above."""
        return 2 * scale**2 if self.pure else scale**2 + 1 / 12

    def count(self, value: float, variance: float) -> Estimate:
        """A count and its interval, which holds no negative number; rounding of the noise is allowed for."""
        margin = self.deviations * math.sqrt(variance) + 0.5
        low, high = float(math.ceil(value - margin)), float(math.floor(value + margin))
        return Estimate(float(value), max(0.0, low), max(0.0, high))

    def ratio(self, total: float, size: float, variances: tuple[float, float], radius: float) -> tuple[float, float]:
        """All m in [−radius, radius] for which (total − m·size)² is small for its variance v₁ + m²·v₂ (Fieller)."""
        squared = self.deviations**2
        leading = size**2 - squared * variances[1]
        if size <= 0 or leading <= 0:  # the number of records may be 0: nothing is known
            return -radius, radius
        inner = squared * (size**2 * variances[0] + total**2 * variances[1] - squared * variances[0] * variances[1])
        middle, half = total * size / leading, math.sqrt(inner) / leading
        return float(np.clip(middle - half, -radius, radius)), float(np.clip(middle + half, -radius, radius))


def _quantile(counts: FloatArray, edges: FloatArray, level: float, variance: float, noise: _Noise) -> Estimate:
    """A quantile from noisy counts of cells in order, cell j from edges[j] to edges[j + 1].

    With F the cumulated counts, n their sum and j the quantile's cell, F(j − 1) < level·n ≤ F(j). Both differences are
    sums of cells with known noise; the interval is made of all cells for which neither is contradicted.
    """
    from sklearn.isotonic import isotonic_regression  # what misses it is named by the estimators that this module uses

    cumulated = np.cumsum(counts)
    count = len(counts)
    below = np.arange(1, count + 1)
    gaps = cumulated - level * cumulated[-1]
    margins = noise.deviations * np.sqrt(variance * ((1 - level) ** 2 * below + level**2 * (count - below)))
    possible = np.ones(count, dtype=bool)
    possible[1:] &= gaps[:-1] <= margins[:-1]
    possible[:-1] &= gaps[:-1] >= -margins[:-1]
    cells = np.flatnonzero(possible)
    first, last = (int(cells[0]), int(cells[-1])) if len(cells) else (0, count - 1)
    rising = np.maximum(np.asarray(isotonic_regression(cumulated)), 0.0)
    goal = level * rising[-1]
    cell = min(int(np.searchsorted(rising, goal)), count - 1)
    before = rising[cell - 1] if cell else 0.0
    part = (goal - before) / (rising[cell] - before) if rising[cell] > before else 0.5
    value = edges[cell] + min(max(part, 0.0), 1.0) * (edges[cell + 1] - edges[cell])
    low, high = float(edges[first]), float(edges[last + 1])
    return Estimate(min(max(float(value), low), high), low, high)


# ----------------------------------------------------------------------------------------------------------------------
# The releases.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True, eq=False, repr=False)
class TableDescriber(PrivateEstimator):
    """Describes a table privately; `sordino.describe` is the short form.

    One noisy count of the records, noisy sums of the numeric columns, a noisy histogram of every column and noisy
    cross tables. Means, quantiles and intervals are computed from these.

    Guarantee: `description_` is (epsilon, delta)-differentially private for one record added or removed, with exact
    integer noise. Everything is one charge, made before the table is read. Numbers are clipped to their bounds; what
    is missing or not listed is counted as such.

    Args:
        schema: the declared schema, public. Required.
        epsilon: ε > 0. Required.
        delta: δ in [0, 1), well below 1 / number of records; 0 for geometric and Laplace noise. Required.
        quantiles: levels in (0, 1); they cost nothing.
        bins: number of equal parts of a numeric column's histogram.
        cross: pairs of columns for cross tables; None takes the target with every category of at most 20 values.
        confidence: of each interval by itself, in [0.5, 1).
        random_state: None, or a seed together with `reproducible`.
        reproducible: whether this is a test run; `guarantee_` then carries "not for release".
        ledger: None, or the account, or a reservation on it, that every fit is charged to.

    Attributes:
        description_: the `TableDescription`.
        guarantee_: the guarantee.
        events_: what was done, one event a release.
    """

    schema: Schema | None = None
    quantiles: Sequence[float] = (0.25, 0.5, 0.75)
    bins: int = 10
    cross: Sequence[tuple[str, str]] | None = None
    confidence: float = 0.95

    def planned_events(self) -> "tuple[Event, ...]":
        """What a fit will charge. Checks all parameters."""
        return _Releases(self, self._randomness()).events()

    def fit(self, table: TableSource) -> "TableDescriber":
        """Describe a table; charged first, then read.

        Args:
            table: a CSV, TSV or Parquet file, or anything that gives columns by name: a pandas or Polars data frame, an
                Arrow table, a dictionary.
        """
        releases = _Releases(self, self._randomness())
        self._charge(releases.events())
        self.description_: TableDescription = releases.describe(table, self.guarantee_)
        return self


class _Releases:
    """The mechanisms of one description, made from checked parameters before a record is read."""

    def __init__(self, asked: TableDescriber, rng: KeyedRNG) -> None:
        schema = require_declared(asked.schema, name="schema", meaning="bounds and categories of all columns")
        self.levels = tuple(checks.probability(zero=False, one=False, quantile=level) for level in asked.quantiles)
        bins = checks.integer(1, bins=asked.bins)
        checks.in_range(1, 1000, bins=bins)
        confidence = checks.in_range(0.5, 1 - 1e-12, confidence=asked.confidence)
        epsilon, delta = asked._budget()  # pyright: ignore[reportPrivateUsage]
        declared = (*schema.columns, schema.target_column)
        self.columns = [DiscreteColumn(column=one, bins=_FINE * bins) for one in declared]
        self.table_format = schema.table_format
        self.pairs = self._pairs(asked.cross, schema.target)
        self.noise = _Noise(confidence=confidence, pure=delta == 0)
        self.numeric = [one for one in self.columns if isinstance(one.column, NumericColumn)]
        self._share(make_budget(epsilon=epsilon, delta=delta), rng)

    def _pairs(self, cross: Sequence[tuple[str, str]] | None, target: str) -> "list[tuple[_Side, _Side]]":
        by_name = {one.name: _Side(one) for one in self.columns}
        if cross is None:
            few = [one.name for one in self.columns if one.bounds is None and len(one.listed) <= _MOST_CATEGORIES]
            return [(by_name[name], by_name[target]) for name in few if name != target]
        for pair in cross:
            if len(pair) != 2 or pair[0] == pair[1]:
                raise InvalidArgument(f"cross must be pairs of different columns, got {pair!r}. Name two columns.")
            for name in pair:
                checks.one_of(by_name, cross=name)
        return [(by_name[one], by_name[other]) for one, other in cross]

    def _share(self, budget: Budget, rng: KeyedRNG) -> None:
        weights = [_WEIGHTS[0]]
        weights += [_WEIGHTS[1]] if self.numeric else []
        weights += [_WEIGHTS[2] / len(self.columns)] * len(self.columns)
        weights += [_WEIGHTS[3] / len(self.pairs)] * len(self.pairs) if self.pairs else []
        shares = list(budget.split(*weights))
        self.count = PrivateCount(budget=shares.pop(0), rng=rng)
        half = tuple((-_radius(one), _radius(one)) for one in self.numeric)
        self.sums = PrivateSum(budget=shares.pop(0), bounds=half, rng=rng) if half else None
        self.histograms = [_histogram(shares.pop(0), one.size, rng) for one in self.columns]
        self.tables = [_histogram(shares.pop(0), one.size * two.size, rng) for one, two in self.pairs]

    def events(self) -> "tuple[Event, ...]":
        """One a release, in order."""
        sums = [] if self.sums is None else [self.sums.event()]
        return (
            self.count.event(),
            *sums,
            *(one.event() for one in self.histograms),
            *(one.event() for one in self.tables),
        )

    def describe(self, table: TableSource, guarantee: "Guarantee") -> TableDescription:
        """Read the table, release, and summarize what was released."""
        found = table_columns(table, [one.column for one in self.columns], table_format=self.table_format)
        codes = [one.codes(found[one.name]) for one in self.columns]
        size = self.count.release(codes[0])
        size_variance = self.noise.variance(float(self.count.noise.scales[0]))
        sums, scales = self._sums(found)
        summaries = []
        for one, histogram, cells in zip(self.columns, self.histograms, codes, strict=True):
            counts = np.asarray(histogram.release(cells), dtype=np.float64)
            variance = self.noise.variance(float(histogram.noise.scales[0]))
            if one.bounds is None:
                named = zip(one.labels(), counts, strict=True)
                estimates = tuple((name, self.noise.count(count, variance)) for name, count in named)
                summaries.append(CategorySummary(name=one.name, counts=estimates))
            elif one not in self.numeric:  # a date
                missing = ("(missing)", self.noise.count(counts[-1], variance))
                summaries.append(CategorySummary(name=one.name, counts=(*self._parts(one, counts, variance), missing)))
            else:
                present = (float(size - counts[-1]), size_variance + variance)
                total = (sums[one.name], scales[one.name] ** 2 * (2 if self.noise.pure else 1))
                summaries.append(self._numeric(one, counts, variance, total, present))
        return TableDescription(
            guarantee=guarantee,
            confidence=self.noise.confidence,
            records=self.noise.count(size, size_variance),
            columns=tuple(summaries),
            cross_tables=tuple(self._crossed(dict(zip([c.name for c in self.columns], codes, strict=True)))),
        )

    def _sums(self, found: "dict[str, Column]") -> tuple[dict[str, float], dict[str, float]]:
        """Noisy sums of the numeric columns around the middles of their bounds, and the scale of each one's noise."""
        if self.sums is None:
            return {}, {}
        centered = []
        for one in self.numeric:
            # A missing number adds nothing to its own column's sum, and the record's others count.
            centered.append(np.nan_to_num(one.numbers(found[one.name]) - _middle(one), nan=0.0))
        noisy = np.asarray(self.sums.release(np.stack(centered, axis=1)))
        names = [one.name for one in self.numeric]
        return dict(zip(names, noisy.tolist(), strict=True)), dict(zip(names, self.sums.scales.tolist(), strict=True))

    def _numeric(
        self,
        one: DiscreteColumn,
        counts: FloatArray,
        variance: float,
        total: tuple[float, float],
        present: tuple[float, float],
    ) -> NumericSummary:
        """The summary from released values: `total` and `present` are a noisy value and its variance each."""
        middle, radius = _middle(one), _radius(one)
        low, high = self.noise.ratio(total[0], present[0], (total[1], present[1]), radius)
        value = float(np.clip(total[0] / max(present[0], 1.0), low, high))
        edges = np.concatenate([one.edges[:1], one.edges, one.edges[-1:]])
        return NumericSummary(
            name=one.name,
            missing=self.noise.count(counts[-1], variance),
            mean=Estimate(middle + value, middle + low, middle + high),
            quantiles=tuple(
                (level, _quantile(counts[:-1], edges, level, variance, self.noise)) for level in self.levels
            ),
            histogram=self._parts(one, counts, variance),
        )

    def _parts(self, one: DiscreteColumn, counts: FloatArray, variance: float) -> tuple[tuple[str, Estimate], ...]:
        """The histogram of a number or a date: each of its parts is made of several cells."""
        bars = counts[1:-2].reshape(-1, _FINE).sum(axis=1)
        names = DiscreteColumn(column=one.column, bins=len(bars)).labels()
        heights = [(counts[0], variance), *((bar, _FINE * variance) for bar in bars), (counts[-2], variance)]
        return tuple((name, self.noise.count(*height)) for name, height in zip(names, heights, strict=False))

    def _crossed(self, codes: dict[str, npt.NDArray[np.int64]]) -> list[CrossTable]:
        found = []
        for (one, two), mechanism in zip(self.pairs, self.tables, strict=True):
            cells = one.cells(codes[one.name]) * two.size + two.cells(codes[two.name])
            noisy = mechanism.release(cells).reshape(one.size, two.size)
            margin = self.noise.count(0.0, self.noise.variance(float(mechanism.noise.scales[0]))).high
            found.append(
                CrossTable(
                    columns=(one.name, two.name),
                    rows=one.labels(),
                    header=two.labels(),
                    counts=tuple(tuple(row) for row in noisy.tolist()),
                    margin=margin,
                )
            )
        return found


@dataclass(frozen=True)
class _Side:
    """A column as one side of a cross table: a number in equal parts of its range, a category as it is."""

    fine: DiscreteColumn

    @property
    def name(self) -> str:
        return self.fine.name

    @property
    def size(self) -> int:
        return self.fine.size if self.fine.bounds is None else _CROSS_PARTS + 1

    def labels(self) -> tuple[str, ...]:
        if self.fine.bounds is None:
            return self.fine.labels()
        _, *parts, _, missing = DiscreteColumn(column=self.fine.column, bins=_CROSS_PARTS).labels()
        return (*parts, missing)

    def cells(self, codes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        if self.fine.bounds is None:
            return codes
        bins = self.fine.bins
        inside = (np.clip(codes, 1, bins) - 1) * _CROSS_PARTS // bins
        return np.where(codes == bins + 2, _CROSS_PARTS, inside)


def _middle(one: DiscreteColumn) -> float:
    assert one.bounds is not None
    return one.bounds[0] / 2 + one.bounds[1] / 2


def _radius(one: DiscreteColumn) -> float:
    assert one.bounds is not None
    return one.bounds[1] / 2 - one.bounds[0] / 2


def _histogram(share: Budget, cells: int, rng: KeyedRNG) -> PrivateHistogram:
    return PrivateHistogram(budget=share, edges=tuple(range(cells + 1)), rng=rng)


def describe(
    table: TableSource,
    *,
    schema: Schema,
    epsilon: float,
    delta: float,
    quantiles: Sequence[float] = (0.25, 0.5, 0.75),
    bins: int = 10,
    cross: Sequence[tuple[str, str]] | None = None,
    confidence: float = 0.95,
    ledger: Account | Reservation | None = None,
) -> TableDescription:
    """Counts, means, quantiles, histograms and cross tables of a table, with intervals, in one charge.

    Guarantee: everything in the result is (epsilon, delta)-differentially private for one record added or removed.

    Arguments and errors are those of `TableDescriber`.

    Example:
        >>> from sordino.data import NumericColumn, Schema
        >>> schema = Schema(columns=(NumericColumn(name="age", low=0, high=100),), target="y", labels=("no", "yes"))
        >>> table = {"age": [20, 30, 70] * 1000, "y": ["no", "no", "yes"] * 1000}
        >>> found = describe(table, schema=schema, epsilon=5.0, delta=0.0)
        >>> 39.0 < found.column("age").mean.low < found.column("age").mean.high < 41.0
        True
    """
    describer = TableDescriber(
        schema=schema,
        epsilon=epsilon,
        delta=delta,
        quantiles=quantiles,
        bins=bins,
        cross=cross,
        confidence=confidence,
        ledger=ledger,
    )
    return describer.fit(table).description_
