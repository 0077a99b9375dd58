"""Which marginals are measured: AIM, MST, and the columns alone; every look at the records is charged first.

References:
    McKenna, Mullins, Sheldon, Miklau 2022, "AIM: an adaptive and iterative mechanism for differentially private
    synthetic data", algorithms 2 to 4 (AIM).
    McKenna, Miklau, Sheldon 2021, "Winning the NIST contest: a scalable and general approach to differentially private
    synthetic data", algorithm 3 (MST).
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from sordino.accounting.filters import ZCDPFilter
from sordino.events import Event
from sordino.mechanisms import ExponentialMechanism, GaussianBudget, PrivateHistogram
from sordino.randomness import KeyedRNG
from sordino.synthesis.graphical_model import Clique, GraphicalModel, NoisyMarginal, fit_model, tree_cells

__all__ = ["ChargedMarginals", "all_cliques", "select_aim", "select_independent", "select_mst"]


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
        counts = np.asarray(mechanism.release(self._places(clique)), dtype=np.float64).reshape(shape)
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

    def _places(self, clique: Clique) -> IntegerArray:
        shape = [self.sizes[column] for column in clique]
        return np.ravel_multi_index([self._codes[:, column] for column in clique], shape).astype(np.int64)

    def _exact(self, clique: Clique) -> IntegerArray:
        if (known := self._counts.get(clique)) is not None:
            return known
        cells = math.prod(self.sizes[column] for column in clique)
        counts = np.bincount(self._places(clique), minlength=cells).astype(np.int64)
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
