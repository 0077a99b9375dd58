"""`TableSynthesizer`: a private synthetic table from a private one.

Proof: docs/proofs/synthetic-tables.md.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from sklearn.utils.validation import check_is_fitted

from sordino import checks
from sordino.accounting.filters import ZCDPFilter
from sordino.data import Schema
from sordino.data.discretization import TableDomain, TableSource
from sordino.estimators.base import PrivateEstimator, require_declared
from sordino.events import Event, ZeroConcentratedDP
from sordino.installation import require
from sordino.synthesis.graphical_model import GraphicalModel
from sordino.synthesis.selection import ChargedMarginals, select_aim, select_independent, select_mst

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["MeasuredMarginal", "TableSynthesizer", "default_degree"]

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
