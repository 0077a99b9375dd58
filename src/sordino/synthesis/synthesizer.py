"""`TableSynthesizer`: a private synthetic table from a private one.

Which marginals are measured decides the method: AIM, MST, or the columns alone. Every look at the records is charged
first.

Proof: docs/proofs/synthetic-tables.md.

References:
    McKenna, Mullins, Sheldon, Miklau 2022, "AIM: an adaptive and iterative mechanism for differentially private
    synthetic data", algorithms 2 to 4 (AIM).
    McKenna, Miklau, Sheldon 2021, "Winning the NIST contest: a scalable and general approach to differentially private
    synthetic data", algorithm 3 (MST).
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from sklearn.utils.validation import check_is_fitted

from sordino import checks
from sordino.accounting.filters import ZCDPFilter
from sordino.data import Schema
from sordino.data.discretization import TableDomain, TableSource
from sordino.estimators.base import PrivateEstimator, require_declared
from sordino.events import Event, ZeroConcentratedDP
from sordino.installation import require
from sordino.mechanisms import ExponentialMechanism, GaussianBudget, PrivateHistogram
from sordino.randomness import KeyedRNG
from sordino.synthesis.graphical_model import Clique, GraphicalModel, NoisyMarginal, fit_model, tree_cells

if TYPE_CHECKING:
    import pyarrow as pa

IntegerArray = npt.NDArray[np.int64]

# Scores are whole multiples of 1/4096 of a record: sums of them have no rounding, so a record moves them by 1 at most.
_UNIT = 4096.0
_LARGEST = 2.0**45
# Exact counts kept between rounds: at most this many cells.
_KEPT_CELLS = 1 << 24


# ----------------------------------------------------------------------------------------------------------------------
# The records, behind the filter.
# ----------------------------------------------------------------------------------------------------------------------


class ChargedMarginals:
    """The records of a table as cells, which only answers what its privacy filter admits.

    Guarantee: all answers together are ρ-zCDP with ρ = `privacy_filter.budget`, under add-or-remove-one: each record
    is one row, it lies in one cell of a marginal, and every mechanism is charged before it is used.

    Args:
        codes: int64 [n, d], one row a record.
        sizes: number of cells of each column.
        privacy_filter: what may be spent.
        rng: where all randomness comes from.
    """

    def __init__(self, codes: IntegerArray, sizes: Sequence[int], *, privacy_filter: ZCDPFilter, rng: KeyedRNG) -> None:
        self.sizes = tuple(sizes)
        self.privacy_filter = privacy_filter
        self.events: list[Event] = []
        self.measured: list[NoisyMarginal] = []
        self._codes, self._rng = codes, rng
        self._counts: dict[Clique, IntegerArray] = {}
        self._kept = 0

    @property
    def remaining(self) -> float:
        """ρ that may still be spent."""
        return self.privacy_filter.remaining

    def measure(self, clique: Clique, stddev: float) -> NoisyMarginal:
        """Noisy counts of the cells of these columns, with Gaussian noise of this deviation, rounded to integers."""
        shape = tuple(self.sizes[column] for column in clique)
        mechanism = PrivateHistogram(
            budget=GaussianBudget(noise_multiplier=stddev), edges=tuple(range(math.prod(shape) + 1)), rng=self._rng
        )
        self._charge(mechanism.event())
        counts = np.asarray(mechanism.release(self._cells_of(clique)), dtype=np.float64).reshape(shape)
        part = NoisyMarginal(clique=clique, counts=counts, stddev=stddev)
        self.measured.append(part)
        return part

    def select(
        self,
        expected: Mapping[Clique, npt.NDArray[np.float64]],
        weights: Mapping[Clique, int],
        *,
        stddev: float,
        epsilon: float,
    ) -> Clique:
        """The columns whose marginal is likely to be farthest from an expected one, by the exponential mechanism.

        The score of a set r is w_r·(‖M_r − expected_r‖₁ − √(2/π)·stddev·cells_r): how far the marginal is off, less
        the error that measuring it would leave. A record moves it by at most w_r.

        Args:
            expected: expected counts by columns; functions of what was released before.
            weights: whole numbers ≥ 1.
            stddev: of the noise with which the chosen marginal will be measured; 0 for no allowance.
            epsilon: of the selection.
        """
        cliques = list(expected)
        mechanism = ExponentialMechanism(
            epsilon=epsilon, sensitivity=float(max(weights[clique] for clique in cliques)), rng=self._rng
        )
        self._charge(mechanism.event())
        scores = [self.score(clique, expected[clique], weights[clique], stddev) for clique in cliques]
        return cliques[mechanism.release(scores)]

    def score(self, clique: Clique, expected: npt.NDArray[np.float64], weight: int, stddev: float) -> float:
        """The score of one set of columns. Not private."""
        allowance = math.floor(math.sqrt(2 / math.pi) * stddev * expected.size * _UNIT)
        grid = np.rint(np.clip(expected.ravel(), 0.0, _LARGEST) * _UNIT).astype(np.int64)
        distance = int(np.abs(self._exact(clique) * int(_UNIT) - grid).sum())
        return weight * (distance - allowance) / _UNIT

    def _charge(self, event: Event) -> None:
        self.privacy_filter.require(event)
        self.events.append(event)

    def _cells_of(self, clique: Clique) -> IntegerArray:
        shape = [self.sizes[column] for column in clique]
        return np.ravel_multi_index([self._codes[:, column] for column in clique], shape).astype(np.int64)

    def _exact(self, clique: Clique) -> IntegerArray:
        if (known := self._counts.get(clique)) is not None:
            return known
        cells = math.prod(self.sizes[column] for column in clique)
        counts = np.bincount(self._cells_of(clique), minlength=cells).astype(np.int64)
        if self._kept + cells <= _KEPT_CELLS:
            self._counts[clique] = counts
            self._kept += cells
        return counts


def all_cliques(sizes: Sequence[int], degree: int, max_cells: int) -> list[Clique]:
    """All sets of 1 to `degree` columns with at most `max_cells` cells; single columns always."""
    columns = range(len(sizes))
    found = [(column,) for column in columns]
    for many in range(2, degree + 1):
        sets = itertools.combinations(columns, many)
        found += [one for one in sets if math.prod(sizes[column] for column in one) <= max_cells]
    return found


# ----------------------------------------------------------------------------------------------------------------------
# The methods.
# ----------------------------------------------------------------------------------------------------------------------


def select_independent(records: ChargedMarginals) -> GraphicalModel:
    """Every column measured by itself, with the whole budget: the baseline, in which columns are independent."""
    _measure_columns(records, records.remaining)
    return fit_model(records.sizes, records.measured)


def _measure_columns(records: ChargedMarginals, rho: float) -> None:
    stddev = _stddev(rho / len(records.sizes))
    for column in range(len(records.sizes)):
        records.measure((column,), stddev)


def _stddev(rho: float) -> float:
    """Of Gaussian noise that costs `rho`, or a trifle less, so that rounding never exceeds a budget."""
    return math.sqrt(1 / (2 * rho)) * (1 + 1e-9)


def _selection_epsilon(rho: float) -> float:
    """ε of an exponential mechanism that costs `rho`, or a trifle less."""
    return math.sqrt(8 * rho) * (1 - 1e-9)


def select_mst(records: ChargedMarginals) -> GraphicalModel:
    """MST: all columns, then the pairs of a spanning tree of the columns that depend on each other most.

    A third of the budget each goes to the columns, to selecting the pairs, and to measuring them.
    """
    rho, columns = records.remaining, len(records.sizes)
    if columns == 1:
        return select_independent(records)
    _measure_columns(records, rho / 3)
    model = fit_model(records.sizes, records.measured)
    group = list(range(columns))
    pairs: list[Clique] = []
    weights = dict.fromkeys(itertools.combinations(range(columns), 2), 1)
    expected = {pair: model.marginal(pair) for pair in weights}
    for _ in range(columns - 1):
        apart = {pair: expected[pair] for pair in weights if group[pair[0]] != group[pair[1]]}
        pair = records.select(apart, weights, stddev=0.0, epsilon=_selection_epsilon(rho / 3 / (columns - 1)))
        pairs.append(pair)
        group = [group[pair[0]] if number == group[pair[1]] else number for number in group]
    for pair in pairs:
        records.measure(pair, _stddev(rho / 3 / (columns - 1)))
    return fit_model(records.sizes, records.measured, start=model, steps=300)


_ALPHA = 0.9  # of the budget for measuring; the rest selects
_ROUNDS_PER_COLUMN = 16


def select_aim(
    records: ChargedMarginals,
    *,
    degree: int,
    max_tree_cells: int,
    max_cells: int,
    progress: Callable[[float], None] = lambda _: None,
) -> GraphicalModel:
    """AIM: in each round the marginal that the model gets most wrong is selected, measured, and fitted.

    Marginals of up to `degree` columns are wanted alike. A candidate is left out while the junction tree with it would
    have more than `max_tree_cells` cells times the part of the budget that is spent.

    Args:
        records: the records behind their filter, whose whole budget is spent.
        degree: the most columns of a wanted marginal.
        max_tree_cells: the most cells of the model's tables.
        max_cells: the most cells of one marginal.
        progress: called with the spent part of the budget after each round.
    """
    sizes, rho = records.sizes, records.remaining
    candidates = _weighted_candidates(sizes, degree, max_cells)
    stddev = math.sqrt(_ROUNDS_PER_COLUMN * len(sizes) / (2 * _ALPHA * rho))
    epsilon = math.sqrt(8 * (1 - _ALPHA) * rho / (_ROUNDS_PER_COLUMN * len(sizes)))
    for column in range(len(sizes)):
        records.measure((column,), stddev)
    model = fit_model(sizes, records.measured)
    last = False
    while not last:
        # What would be left after the round is too little for another one of its kind: all of it goes into this one.
        if records.remaining <= 2 * (1 / (2 * stddev**2) + epsilon**2 / 8):
            last = True
            stddev, epsilon = _stddev(_ALPHA * records.remaining), _selection_epsilon((1 - _ALPHA) * records.remaining)
        spent = 1 - (records.remaining - 1 / (2 * stddev**2) - epsilon**2 / 8) / rho
        allowed = _allowed(sizes, candidates, model, max_tree_cells * spent)
        expected = {clique: model.marginal(clique) for clique in allowed}
        clique = records.select(expected, candidates, stddev=stddev, epsilon=epsilon)
        part = records.measure(clique, stddev)
        model = fit_model(sizes, records.measured, start=model)
        change = float(np.abs(model.marginal(clique) - expected[clique]).sum())
        if change <= math.sqrt(2 / math.pi) * stddev * part.counts.size:
            stddev, epsilon = stddev / 2, 2 * epsilon
        progress(1 - records.remaining / rho)
    return fit_model(sizes, records.measured, start=model, steps=1000)


def _weighted_candidates(sizes: Sequence[int], degree: int, max_cells: int) -> dict[Clique, int]:
    """Every candidate r with its weight Σ |r ∩ s| over the wanted sets s, those of exactly `degree` columns."""
    columns = len(sizes)
    degree = min(degree, columns)
    # A column is in C(columns − 1, degree − 1) wanted sets.
    each = math.comb(columns - 1, degree - 1)
    return {clique: each * len(clique) for clique in all_cliques(sizes, degree, max_cells)}


def _allowed(sizes: Sequence[int], candidates: Iterable[Clique], model: GraphicalModel, limit: float) -> list[Clique]:
    """The candidates with which the junction tree stays small enough; what is in the tree already always is."""
    inside = [frozenset(clique) for clique in model.tree.cliques]
    measured = list(model.potentials)

    def fits(clique: Clique) -> bool:
        return any(known.issuperset(clique) for known in inside) or tree_cells(sizes, [*measured, clique]) <= limit

    return [clique for clique in candidates if fits(clique)]


# ----------------------------------------------------------------------------------------------------------------------
# The estimator.
# ----------------------------------------------------------------------------------------------------------------------


_METHODS = ("aim", "mst", "independent")
# Noisy counts have fewer cells than this each; larger sets of columns are no candidates.
_MAX_CELLS = 10_000
_MANY_SETS = 1000


def default_degree(columns: int) -> int:
    """3 where there are at most 1000 sets of three columns, that is, up to 19 columns; 2 otherwise.

    Example:
        >>> default_degree(15), default_degree(30)
        (3, 2)
    """
    return 3 if math.comb(columns, 3) <= _MANY_SETS else 2


@dataclass(frozen=True, kw_only=True)
class MeasuredMarginal:
    """A marginal that was measured.

    Args:
        columns: their names.
        stddev: standard deviation of the noise on each count, in records.
    """

    columns: tuple[str, ...]
    stddev: float


@dataclass(kw_only=True, eq=False, repr=False)
class TableSynthesizer(PrivateEstimator):
    """Learns the joint distribution of a table's columns privately, and draws synthetic records from it.

    Each column is cut into public cells by the schema (`TableDomain`). Noisy counts of the cells of chosen sets of
    columns are fitted by a graphical model, from which records are drawn; numbers are uniform within their cell.
    ``aim`` measures, round by round, what the model gets most wrong; ``mst`` the pairs of a spanning tree of the
    columns; ``independent`` each column alone, which keeps no dependence between columns and is the baseline.

    Guarantee: the fitted model, and so any number of records drawn from it, is (epsilon, delta)-differentially private
    for one record added or removed. All selections and measurements are together ρ-zCDP, charged in advance; the
    number of records is private and only measured with noise. A record that the schema leaves out (its label is not in
    the label set) contributes nothing.

    Args:
        schema: the declared schema, public. Required.
        epsilon: ε > 0. Required.
        delta: δ in (0, 1), well below 1 / number of records. Required.
        method: ``aim``, ``mst`` or ``independent``.
        degree: ``aim`` only: the most columns of a measured marginal; `default_degree` of the number of columns if
            None.
        bins: number of equal parts of each numeric column between its bounds.
        max_model_mb: ``aim`` only: the most megabytes of the model's tables. Larger ones follow more dependences and
            take longer, about in proportion.
        random_state: None, or a seed together with `reproducible`.
        reproducible: whether this is a test run; `guarantee_` then carries "not for release".
        ledger: None, or the account, or a reservation on it, that every fit is charged to.

    Attributes:
        domain_: the public cells.
        model_: the fitted `GraphicalModel`; its `total` is the noisy number of records.
        measured_: the marginals that were measured, in order.
        releases_: the events of the single selections and measurements, in order.
        guarantee_: the guarantee.
        events_: what was charged: one event of ρ-zCDP, of which `releases_` are the parts.

    Raises:
        MissingDeclaration: schema, ε or δ is not declared.
        InvalidArgument: a parameter is out of range, or the table lacks a column.
        BudgetExceeded: the ledger has not enough left; nothing was read.

    Example:
        >>> from sordino.data import CategoricalColumn, NumericColumn, Schema
        >>> job = CategoricalColumn(name="job", categories=("clerk", "sales"))
        >>> age = NumericColumn(name="age", low=0, high=100)
        >>> schema = Schema(columns=(age, job), target="rich", labels=("no", "yes"))
        >>> table = {"age": [30, 60] * 500, "job": ["clerk", "sales"] * 500, "rich": ["no", "yes"] * 500}
        >>> synthesizer = TableSynthesizer(schema=schema, epsilon=5.0, delta=1e-6, method="mst").fit(table)
        >>> synthesizer.sample(3).column_names, synthesizer.sample(3).num_rows
        (['age', 'job', 'rich'], 3)

    References:
        McKenna, Mullins, Sheldon, Miklau 2022 (AIM); McKenna, Miklau, Sheldon 2021 (MST); McKenna, Sheldon, Miklau
        2019 (graphical models of noisy marginals).
    """

    schema: Schema | None = None
    method: str = "aim"
    degree: int | None = None
    bins: int = 20
    max_model_mb: float = 4.0

    def planned_events(self) -> tuple[Event, ...]:
        """What a fit will charge: one event, ρ-zCDP with the largest ρ within (ε, δ). Checks all parameters."""
        return (ZeroConcentratedDP(rho=self._settings().guard.budget),)

    def fit(self, table: TableSource, *, progress: Callable[[float], None] = lambda _: None) -> "TableSynthesizer":
        """Learn from a table; charged first, then read.

        Args:
            table: a CSV, TSV or Parquet file, or anything that gives columns by name: a pandas or Polars data frame, an
                Arrow table, a dictionary.
            progress: called with the spent part of the budget after each round of ``aim``.
        """
        settings, rng = self._settings(), self._randomness()
        self._charge(self.planned_events())
        domain = settings.domain
        records = ChargedMarginals(domain.codes(table), domain.sizes, privacy_filter=settings.guard, rng=rng)
        if self.method == "aim":
            cells = settings.max_tree_cells
            model = select_aim(
                records,
                degree=settings.degree,
                max_tree_cells=cells,
                max_cells=min(_MAX_CELLS, cells),
                progress=progress,
            )
        else:
            model = {"mst": select_mst, "independent": select_independent}[self.method](records)
        self.domain_: TableDomain = domain
        self.model_: GraphicalModel = model
        self.releases_: tuple[Event, ...] = tuple(records.events)
        self.measured_: tuple[MeasuredMarginal, ...] = tuple(
            MeasuredMarginal(columns=tuple(domain.names[column] for column in part.clique), stddev=part.stddev)
            for part in records.measured
        )
        self._num_drawn = 0
        return self

    def sample(self, n: int | None = None) -> "pa.Table":
        """Synthetic records, as many as asked for, or as many as the noisy number of records; free of charge.

        Columns stand in the schema's order, the target last; a missing number is null, a category that is missing or
        not listed is empty.
        """
        require("tables", "pyarrow", user="a table")
        import pyarrow as pa

        check_is_fitted(self, "model_")
        count = round(self.model_.total) if n is None else checks.integer(0, n=n)
        # A key of its own: who holds the fitted object must not hold the key of its noise.
        stream = self._randomness().stream("synthetic-records", step=self._num_drawn)
        self._num_drawn += 1
        codes = self.model_.sample(count, stream)
        uniforms = stream.uniform(codes.size).reshape(codes.shape)
        values = self.domain_.values(codes, uniforms)
        kinds = {True: pa.float64(), False: pa.string()}
        return pa.table(
            {
                name: pa.array(column, type=kinds[isinstance(column, np.ndarray)], from_pandas=True)
                for name, column in values.items()
            }
        )

    def _settings(self) -> "_Settings":
        require("tables", "pyarrow", user="a synthetic table")  # before anything is charged
        checks.one_of(_METHODS, method=self.method)
        schema = require_declared(self.schema, name="schema", meaning="bounds, categories and labels of all columns")
        domain = TableDomain.of_schema(schema, bins=self.bins)
        degree = default_degree(len(domain.columns)) if self.degree is None else self.degree
        epsilon, delta = self._budget()
        checks.probability(zero=False, one=False, delta=delta, hint="Synthetic tables use Gaussian noise: give δ > 0.")
        return _Settings(
            domain=domain,
            degree=checks.integer(1, degree=degree),
            max_tree_cells=int(checks.positive(max_model_mb=self.max_model_mb) * 2**20 / 8),
            guard=ZCDPFilter(epsilon=epsilon, delta=delta),
        )


@dataclass(frozen=True, kw_only=True)
class _Settings:
    """The checked parameters."""

    domain: TableDomain
    degree: int
    max_tree_cells: int
    guard: ZCDPFilter
