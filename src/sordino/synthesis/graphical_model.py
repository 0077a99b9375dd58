"""Graphical models: distributions over discrete columns, as products of factors on small sets of columns.

A model answers marginals exactly, by belief propagation on a junction tree in the log domain, and is fitted to noisy
marginals by maximum entropy: of all distributions it is the one of highest entropy whose marginals are as near to the
noisy ones as their noise warrants. Everything here is post-processing of released values; no record is read.

References:
    McKenna, Sheldon, Miklau 2019, "Graphical-model based estimation and inference for differential privacy".
    Wainwright, Jordan 2008, "Graphical models, exponential families, and variational inference", sections 2.5 and 3.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from scipy.optimize import minimize

from sordino import checks
from sordino.errors import InvalidArgument
from sordino.randomness import RandomStream

Clique: TypeAlias = tuple[int, ...]
FloatArray: TypeAlias = npt.NDArray[np.float64]


# ----------------------------------------------------------------------------------------------------------------------
# Junction trees.
# ----------------------------------------------------------------------------------------------------------------------


def _elimination_cliques(sizes: Sequence[int], cliques: Iterable[Clique]) -> list[frozenset[int]]:
    """The maximal cliques of a triangulated graph in which every set of `cliques` is connected.

    Columns are eliminated one by one: one whose neighbors are all connected, where there is any, else one whose clique
    has the fewest cells; ties go to the first.
    """
    neighbors: dict[int, set[int]] = {column: set() for column in range(len(sizes))}
    for clique in cliques:
        for column in clique:
            neighbors[column].update(clique)
            neighbors[column].discard(column)

    def cost(column: int) -> tuple[bool, int]:
        around = neighbors[column]
        fills = any(not around <= neighbors[other] | {other} for other in around)
        return fills, _cells(sizes, around | {column})

    costs = {column: cost(column) for column in neighbors}
    found: list[frozenset[int]] = []
    while costs:
        column = min(costs, key=lambda one: (costs[one], one))
        around = neighbors.pop(column)
        del costs[column]
        clique = frozenset(around | {column})
        if not any(clique <= known for known in found):
            found.append(clique)
        for other in around:
            neighbors[other] |= around
            neighbors[other] -= {column, other}
        # A new edge changes the costs of its ends and of their common neighbors.
        for other in around.union(*(neighbors[other] for other in around)):
            costs[other] = cost(other)
    return found


def _cells(sizes: Sequence[int], columns: Iterable[int]) -> int:
    return math.prod(sizes[column] for column in columns)


def tree_cells(sizes: Sequence[int], cliques: Iterable[Clique]) -> int:
    """Number of cells in all tables of the junction tree that holds these cliques.

    Example:
        >>> tree_cells([2, 3, 5], [(0, 1), (1, 2)]), tree_cells([2, 3, 5], [(0, 1), (1, 2), (0, 2)])
        (21, 30)
    """
    return sum(_cells(sizes, clique) for clique in _elimination_cliques(sizes, cliques))


@dataclass(frozen=True)
class JunctionTree:
    """Cliques in an order in which each is behind its parent, and what each shares with its parent.

    Args:
        cliques: rising column numbers; the first is the root.
        parents: position of each clique's parent, −1 for the root.
    """

    cliques: tuple[Clique, ...]
    parents: tuple[int, ...]

    @classmethod
    def of_cliques(cls, sizes: Sequence[int], cliques: Iterable[Clique]) -> "JunctionTree":
        """A tree in which every one of `cliques`, and every column, is inside some clique.

        A spanning tree of the maximal cliques with the largest common parts has the running intersection property.
        """
        maximal = [tuple(sorted(clique)) for clique in _elimination_cliques(sizes, cliques)]
        order, parents = [0], [-1]
        # How much each clique that is not in the tree shares with the tree, and with which clique of it.
        nearest = {index: (len(set(maximal[0]) & set(maximal[index])), 0) for index in range(1, len(maximal))}
        while nearest:
            index = max(nearest, key=lambda one: (nearest[one][0], -one))
            _, parent = nearest.pop(index)
            order.append(index)
            parents.append(parent)
            for other, (shared, _) in nearest.items():
                common = len(set(maximal[index]) & set(maximal[other]))
                if common > shared:
                    nearest[other] = (common, len(order) - 1)
        return cls(cliques=tuple(maximal[index] for index in order), parents=tuple(parents))

    def separator(self, index: int) -> Clique:
        """The columns that a clique shares with its parent."""
        parent = self.parents[index]
        return () if parent < 0 else tuple(sorted(set(self.cliques[index]) & set(self.cliques[parent])))

    def home(self, clique: Collection[int]) -> int:
        """The first clique that holds all these columns."""
        wanted = set(clique)
        return next(index for index, known in enumerate(self.cliques) if wanted <= set(known))


# ----------------------------------------------------------------------------------------------------------------------
# Belief propagation.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class NoisyMarginal:
    """What was measured: noisy counts of the cells of some columns.

    Args:
        clique: rising column numbers.
        counts: float64, one axis a column.
        stddev: standard deviation of the noise on each count, > 0.
    """

    clique: Clique
    counts: FloatArray
    stddev: float


class GraphicalModel:
    """The distribution p(x) ∝ exp(Σ θ_r(x_r)), with potentials θ_r on sets r of columns.

    Args:
        sizes: number of cells of each column.
        potentials: logarithms of the factors by their columns (rising); shapes follow the sizes.
        total: number of records that the model stands for, > 0.
        tree: a junction tree that holds all potentials; made when None.

    Example:
        >>> model = GraphicalModel([2, 2], {(0, 1): np.log([[4.0, 1.0], [1.0, 4.0]])}, total=100.0)
        >>> model.marginal((1,)).tolist(), model.marginal((0, 1)).round(6).tolist()
        ([50.0, 50.0], [[40.0, 10.0], [10.0, 40.0]])
    """

    def __init__(
        self,
        sizes: Sequence[int],
        potentials: Mapping[Clique, FloatArray],
        *,
        total: float,
        tree: JunctionTree | None = None,
    ) -> None:
        self.sizes = tuple(sizes)
        self.total = checks.positive(total=total)
        self.potentials = dict(potentials)
        self.tree = JunctionTree.of_cliques(sizes, potentials) if tree is None else tree
        self._propagation = _Propagation(self.sizes, self.tree, tuple(self.potentials))
        self.log_partition = self._propagation.run(self.potentials)
        self._answers: dict[tuple[object, ...], FloatArray] = {}

    def probabilities(self, clique: Clique) -> FloatArray:
        """The model's probabilities of the cells of these columns (rising), one axis a column."""
        if list(clique) != sorted(set(clique)) or not set(clique) <= set(range(len(self.sizes))):
            raise InvalidArgument(f"clique must be rising column numbers, got {clique!r}. Sort them.")
        if not clique:
            return np.array(1.0)
        homes = {column: self.tree.home((column,)) for column in clique}
        top = self._common_ancestor(set(homes.values()))
        return self._sum_out(top, frozenset(clique), homes, self._propagation.beliefs[top], clique)

    def marginal(self, clique: Clique) -> FloatArray:
        """Expected counts of the cells of these columns."""
        return self.total * self.probabilities(clique)

    def _common_ancestor(self, indices: set[int]) -> int:
        """Cliques stand behind their parents, so the one that stands last is never an ancestor of the others."""
        indices = set(indices)
        while len(indices) > 1:
            last = max(indices)
            indices.remove(last)
            indices.add(self.tree.parents[last])
        return indices.pop()

    def _sum_out(
        self, index: int, wanted: frozenset[int], homes: Mapping[int, int], table: FloatArray, keep: Clique
    ) -> FloatArray:
        """Σ over all but `keep` of a clique's table times what lies below it and holds wanted columns."""
        own = self.tree.cliques[index]
        below: dict[int, frozenset[int]] = {}
        for column in wanted - set(own):
            child = homes[column]
            while self.tree.parents[child] != index:
                child = self.tree.parents[child]
            below[child] = below.get(child, frozenset()) | {column}
        needed = set(keep).intersection(own).union(*(self.tree.separator(child) for child in below))
        shape = tuple(column for column in own if column in needed)
        key = (index, table is self._propagation.beliefs[index], shape)
        if key not in self._answers:
            self._answers[key] = table.sum(axis=tuple(axis for axis, column in enumerate(own) if column not in needed))
        operands: list[object] = [self._answers[key], list(shape)]
        for child, columns in sorted(below.items()):
            columns = columns | (wanted & set(self.tree.separator(child)))
            kept = tuple(sorted(set(self.tree.separator(child)) | columns))
            conditional = self._propagation.conditionals[child]
            operands += [self._sum_out(child, columns, homes, conditional, kept), list(kept)]
        if len(operands) == 2:
            return self._answers[key] if shape == keep else self._answers[key].transpose([shape.index(c) for c in keep])
        return np.einsum(*operands, list(keep), optimize=True)  # pyright: ignore[reportCallIssue, reportArgumentType]

    def sample(self, count: int, stream: RandomStream) -> npt.NDArray[np.int64]:
        """`count` records [count, columns], each with the model's distribution.

        Records are drawn in strata: within each group of records that agree on what a clique shares with its parent,
        the rest follows equally spaced quantiles, in random order. So counts stay close to their expectations.
        """
        checks.integer(0, count=count)
        records = np.zeros((count, len(self.sizes)), dtype=np.int64)
        for index, clique in enumerate(self.tree.cliques):
            separator = self.tree.separator(index)
            rest = tuple(column for column in clique if column not in separator)
            table = self._propagation.conditionals[index]
            axes = [clique.index(column) for column in (*separator, *rest)]
            shape = [self.sizes[column] for column in separator]
            rows = np.ascontiguousarray(table.transpose(axes)).reshape(math.prod(shape), -1)
            group = (
                np.ravel_multi_index([records[:, column] for column in separator], shape)
                if separator
                else np.zeros(count, dtype=np.int64)
            )
            drawn = _stratified(rows, group, stream)
            for column, codes in zip(rest, np.unravel_index(drawn, [self.sizes[c] for c in rest]), strict=True):
                records[:, column] = codes
        return records


def _stratified(rows: FloatArray, group: npt.NDArray[np.int64], stream: RandomStream) -> npt.NDArray[np.int64]:
    """A column of `rows` for each record, by the probabilities in the row that is its group."""
    count = len(group)
    order = np.lexsort((stream.uniform(count), group))  # groups together, random order within each
    sizes = np.bincount(group, minlength=len(rows))
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    ordered = group[order]
    rank = np.arange(count) - starts[ordered]
    positions = (rank + stream.uniform(len(rows))[ordered]) / np.maximum(sizes, 1)[ordered]
    drawn = np.empty(count, dtype=np.int64)
    for number in np.unique(ordered):
        first, last = starts[number], starts[number] + sizes[number]
        bounds = np.cumsum(rows[number])
        drawn[order[first:last]] = np.searchsorted(bounds, positions[first:last] * bounds[-1], side="right")
    return np.minimum(drawn, rows.shape[1] - 1)


class _Propagation:
    """One collecting pass up the tree and one distributing pass down, with the shapes prepared once."""

    def __init__(self, sizes: Sequence[int], tree: JunctionTree, cliques: tuple[Clique, ...]) -> None:
        self.tree = tree
        self.homes = {clique: tree.home(clique) for clique in cliques}

        def shape(index: int, columns: Collection[int]) -> tuple[int, ...]:
            """The shape of a table on some of a clique's columns among the axes of all of them."""
            return tuple(sizes[column] if column in columns else 1 for column in tree.cliques[index])

        self._shapes = [shape(index, clique) for index, clique in enumerate(tree.cliques)]
        self._views = {clique: shape(home, clique) for clique, home in self.homes.items()}
        self._kept = {clique: _other_axes(tree.cliques[home], clique) for clique, home in self.homes.items()}
        separators = [tree.separator(index) for index in range(len(tree.cliques))]
        self._summed = [_other_axes(own, shared) for own, shared in zip(tree.cliques, separators, strict=True)]
        self._in_child = [shape(index, shared) for index, shared in enumerate(separators)]
        # Of the root, which has no parent, the next two are not used.
        above = list(zip(tree.parents, separators, strict=True))
        self._in_parent = [shape(parent, shared) for parent, shared in above]
        self._from_parent = [_other_axes(tree.cliques[parent], shared) for parent, shared in above]
        self.beliefs: list[FloatArray] = []
        self.conditionals: list[FloatArray] = []

    def run(self, potentials: Mapping[Clique, FloatArray]) -> float:
        """Sets `beliefs` (probabilities of each clique) and `conditionals` (given its separator); returns log Z."""
        tables = [np.zeros(shape) for shape in self._shapes]
        for clique, home in self.homes.items():
            tables[home] += potentials[clique].reshape(self._views[clique])
        log_partition = 0.0
        for index in range(len(tables) - 1, -1, -1):
            table, axes = tables[index], self._summed[index]
            # Every row is shifted by its own largest value, so nothing overflows and no row is lost.
            largest = table.max(axis=axes, keepdims=True)
            table -= largest
            np.exp(table, out=table)
            sums = table.sum(axis=axes, keepdims=True)
            table /= sums
            message = largest + np.log(sums)
            parent = self.tree.parents[index]
            if parent < 0:
                log_partition = float(message.sum())
            else:
                tables[parent] += message.reshape(self._in_parent[index])
        beliefs = [tables[0]]
        for index in range(1, len(tables)):
            shared = beliefs[self.tree.parents[index]].sum(axis=self._from_parent[index])
            beliefs.append(tables[index] * shared.reshape(self._in_child[index]))
        self.conditionals, self.beliefs = tables, beliefs
        return log_partition

    def probabilities(self, clique: Clique) -> FloatArray:
        """The probabilities of a potential's own columns."""
        return self.beliefs[self.homes[clique]].sum(axis=self._kept[clique])


def _other_axes(clique: Clique, kept: Clique) -> tuple[int, ...]:
    return tuple(axis for axis, column in enumerate(clique) if column not in kept)


# ----------------------------------------------------------------------------------------------------------------------
# Fitting a model to noisy marginals.
# ----------------------------------------------------------------------------------------------------------------------


# A fitted count may miss the measured one by this part of its noise, times its log-potential. With 0 the problem is no
# longer smooth; on Adult 0.1 and 0.3 give the same errors, and 0.03 takes three times as many iterations.
_SOFTNESS = 0.3


def fit_model(
    sizes: Sequence[int],
    measured: Sequence[NoisyMarginal],
    *,
    start: GraphicalModel | None = None,
    steps: int = 100,
) -> GraphicalModel:
    """The model of highest entropy whose marginals fit noisy ones as well as their noise warrants.

    With p the distribution, N the number of records, which is estimated first, and s a small constant, it minimizes
    Σ_r ‖N·p_r − y_r‖²/(2sNσ_r) − H(p). The dual of this problem, log Z(θ) − Σ⟨θ_r, y_r/N⟩ + Σ (sσ_r/N)‖θ_r‖²/2, is
    convex and smooth, its gradient is a difference of marginals, and L-BFGS minimizes it. At the minimum
    N·p_r − y_r = −sσ_r·θ_r. New potentials begin with a step of iterative proportional fitting.

    Args:
        sizes: number of cells of each column.
        measured: noisy marginals; several of the same columns are averaged by their precision.
        start: a model whose potentials are gone on from.
        steps: the most iterations of L-BFGS.

    Returns:
        A model of which every distribution is a valid one, however early the iterations end.
    """
    targets = _averaged(measured)
    total = max(estimate_total(targets.values()), 1.0)
    cliques = tuple(targets)
    tree = JunctionTree.of_cliques(sizes, cliques)
    propagation = _Propagation(tuple(sizes), tree, cliques)
    counts = [part.counts for part in targets.values()]
    ends = np.cumsum([table.size for table in counts])
    wanted = np.concatenate([table.ravel() / total for table in counts])
    softness = np.repeat([_SOFTNESS * part.stddev / total for part in targets.values()], [t.size for t in counts])

    # Variables are scaled by about the root of their curvature, so that frequent and rare cells converge alike.
    root = np.sqrt(np.maximum(wanted, 0.0) + softness)

    def split(vector: FloatArray) -> dict[Clique, FloatArray]:
        parts = np.split(vector, ends[:-1])
        return {clique: part.reshape(t.shape) for clique, part, t in zip(cliques, parts, counts, strict=True)}

    def dual(scaled: FloatArray) -> tuple[float, FloatArray]:
        vector = scaled / root
        log_partition = propagation.run(split(vector))
        found = np.concatenate([propagation.probabilities(clique).ravel() for clique in cliques])
        value = log_partition - vector @ wanted + (softness * vector) @ vector / 2
        return float(value), (found - wanted + softness * vector) / root

    potentials = {clique: np.zeros(table.shape) for clique, table in zip(cliques, counts, strict=True)}
    known = {} if start is None else start.potentials
    potentials |= {clique: known[clique] for clique in cliques if clique in known}
    for clique in cliques:
        if clique not in known:
            # A step of iterative proportional fitting: alone it makes this marginal what was measured.
            propagation.run(potentials)
            goal = _positive(targets[clique], total)
            potentials[clique] = np.log(goal) - np.log(np.maximum(propagation.probabilities(clique), 1e-30))
    first = np.concatenate([potentials[clique].ravel() for clique in cliques])
    result = minimize(dual, first * root, jac=True, method="L-BFGS-B", options={"maxiter": steps, "maxfun": 2 * steps})
    return GraphicalModel(sizes, split(np.asarray(result.x) / root), total=total, tree=tree)


def _positive(part: NoisyMarginal, total: float) -> FloatArray:
    """The nearest probabilities to a noisy marginal, all a little above 0."""
    values = part.counts.ravel() / total
    falling = np.sort(values)[::-1]
    shifts = (np.cumsum(falling) - 1) / np.arange(1, len(values) + 1)
    nearest = np.maximum(values - shifts[np.flatnonzero(falling > shifts)[-1]], 0.0)
    mixed = min(0.01, part.stddev / total)
    return ((1 - mixed) * nearest + mixed / len(values)).reshape(part.counts.shape)


def estimate_total(measured: Iterable[NoisyMarginal]) -> float:
    """The number of records: sums of noisy marginals, averaged by their precision."""
    parts = [(float(part.counts.sum()), 1 / (part.counts.size * part.stddev**2)) for part in measured]
    return math.fsum(value * weight for value, weight in parts) / math.fsum(weight for _, weight in parts)


def _averaged(measured: Sequence[NoisyMarginal]) -> dict[Clique, NoisyMarginal]:
    """One noisy marginal for each set of columns."""
    found: dict[Clique, NoisyMarginal] = {}
    for part in measured:
        if (known := found.get(part.clique)) is not None:
            weights = (1 / known.stddev**2, 1 / part.stddev**2)
            counts = (known.counts * weights[0] + part.counts * weights[1]) / sum(weights)
            part = NoisyMarginal(clique=part.clique, counts=counts, stddev=1 / math.sqrt(sum(weights)))
        found[part.clique] = part
    return found
