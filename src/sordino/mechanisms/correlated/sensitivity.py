"""Participation: in which steps one record can take part.

The sensitivity of a strategy depends on it, and so does the event. A participation is a promise about the batches:
the sampler must keep it.
"""

import math
from dataclasses import dataclass

import numpy as np

from sordino import checks
from sordino.errors import InvalidArgument
from sordino.mechanisms.correlated.strategies import (
    BinaryTree,
    FloatArray,
    Strategy,
    tree_sensitivity,
)


@dataclass(frozen=True, kw_only=True)
class SingleParticipation:
    """Each record takes part in at most one step: one pass over the data."""

    @property
    def min_separation(self) -> int:
        """Nothing is promised between participations, as there is one."""
        return 1

    def max_participations(self, steps: int) -> int:  # noqa: ARG002
        """Once."""
        return 1


@dataclass(frozen=True, kw_only=True)
class MinSeparation:
    """Participations of a record are at least `min_separation` steps apart: steps i < j with j − i ≥ separation.

    Args:
        min_separation: ≥ 1.
        participations: how often a record takes part at most; None is as often as the steps allow.
    """

    min_separation: int
    participations: int | None = None

    def __post_init__(self) -> None:
        checks.integer(1, min_separation=self.min_separation)
        if self.participations is not None:
            checks.integer(1, participations=self.participations)

    def max_participations(self, steps: int) -> int:
        """The most participations in `steps` steps."""
        fits = -(-steps // self.min_separation)
        return fits if self.participations is None else min(fits, self.participations)


@dataclass(frozen=True, kw_only=True)
class FixedEpochOrder:
    """Batches are dealt once and come in the same order every epoch: a record is in steps j, j + e, j + 2e, ….

    Which batch a record is in must depend on that record alone, or the neighboring relation must keep the others where
    they are (replace-one, zero-out).

    Args:
        steps_per_epoch: e ≥ 1.
    """

    steps_per_epoch: int

    def __post_init__(self) -> None:
        checks.integer(1, steps_per_epoch=self.steps_per_epoch)

    @property
    def min_separation(self) -> int:
        """One epoch."""
        return self.steps_per_epoch

    def max_participations(self, steps: int) -> int:
        """Once an epoch."""
        return -(-steps // self.steps_per_epoch)


@dataclass(frozen=True, kw_only=True)
class CyclicPoisson:
    """Records are in `groups` fixed groups; step t draws from group t mod groups alone, each record by its own coin.

    Which group a record belongs to must depend on that record alone (or on chance of its own), never on how many others
    there are.

    Args:
        groups: ≥ 1; 1 is ordinary Poisson sampling.
        sample_rate: the part of *all* records in an expected batch, in (0, 1/groups]. A member of the group
            whose turn it is joins with probability groups · sample_rate.

    References:
        Choquette-Choo et al. 2023, "(Amplified) banded matrix factorization", algorithm 2 and theorem 4.
    """

    groups: int
    sample_rate: float

    def __post_init__(self) -> None:
        checks.integer(1, groups=self.groups)
        checks.probability(zero=False, sample_rate=self.sample_rate)
        if self.groups * self.sample_rate > 1 + 1e-9:
            raise InvalidArgument(
                f"sample_rate must be at most 1/groups ({1 / self.groups:.6g}), got {self.sample_rate!r}. A batch "
                "comes from one group: use fewer groups or smaller batches."
            )

    @property
    def min_separation(self) -> int:
        """One cycle."""
        return self.groups

    @property
    def group_rate(self) -> float:
        """The probability that a member of the group whose turn it is joins the batch."""
        return min(1.0, self.groups * self.sample_rate)

    def max_participations(self, steps: int) -> int:
        """Once a cycle."""
        return -(-steps // self.groups)


Participation = SingleParticipation | MinSeparation | FixedEpochOrder | CyclicPoisson


# ----------------------------------------------------------------------------------------------------------------------
# Sensitivity of a strategy under a participation, from the matrix that is really used.
#
# A record moves row i of the gradients by at most 1 (times the clipping norm) in every step i of its participation π.
# The change of CG has squared norm Σ_{i,j∈π} X_ij ⟨u_i, u_j⟩ ≤ Σ_{i,j∈π} |X_ij| with X = CᵀC. Closed forms of the
# maximum are used only where their conditions hold in the numbers at hand; otherwise the sum is maximized or bounded
# from above.
#
# References:
#     Choquette-Choo et al. 2023, section 4 (bands; the bound by two nested searches). Kalinin, Lampert 2024, theorem 2
#     (non-increasing Toeplitz columns).
# ----------------------------------------------------------------------------------------------------------------------


LARGEST_MATRIX = 4096
"""Steps up to which strategies without a closed form are written out as matrices."""


def sensitivity(strategy: Strategy, participation: Participation) -> float:
    """How far one record moves CG in ℓ2 norm when it moves each gradient it takes part in by 1.

    Under `CyclicPoisson` it is that of one participation: the largest column's norm, which the amplified event needs.

    Returns:
        The exact value for one participation, for at most as many bands as there are steps between participations,
        for Toeplitz strategies with a non-negative, non-increasing first column, and for `FixedEpochOrder` when CᵀC ≥
        0;
        otherwise an upper bound.

    Raises:
        InvalidArgument: more bands than groups under `CyclicPoisson`; more than 4096 steps without a closed form
            (a tree then has the bound of its nodes).

    Example:
        >>> from sordino.mechanisms.correlated.strategies import BandedToeplitz
        >>> from sordino.mechanisms.correlated.sensitivity import MinSeparation
        >>> strategy = BandedToeplitz(coefficients=(0.8, 0.6), steps=8)
        >>> round(sensitivity(strategy, MinSeparation(min_separation=2)), 6)
        2.0
    """
    if isinstance(participation, CyclicPoisson):
        if strategy.bands > participation.groups:
            raise InvalidArgument(
                f"bands must be at most groups ({participation.groups}), got {strategy.bands}: columns that one record "
                "reaches would overlap. Use fewer bands or more groups."
            )
        participation = SingleParticipation()
    column = strategy.column()
    if column is not None:
        closed = _toeplitz(column, strategy.bands, participation)
        if closed is not None:
            return closed
    nodes = _tree(strategy, participation) if isinstance(strategy, BinaryTree) else math.inf
    if strategy.steps > LARGEST_MATRIX and nodes < math.inf:
        return nodes
    if strategy.steps > LARGEST_MATRIX:
        raise InvalidArgument(
            f"steps must be at most {LARGEST_MATRIX} for a strategy without a closed-form sensitivity, got "
            f"{strategy.steps}. Use a banded strategy or one with a non-increasing first column."
        )
    return min(nodes, matrix_sensitivity(strategy.matrix(), participation))


def _toeplitz(column: FloatArray, bands: int, participation: Participation) -> float | None:
    """Closed forms: the record that starts in step 0 is the worst case. None where no theorem speaks."""
    steps = len(column)
    apart, most = participation.min_separation, participation.max_participations(steps)
    monotone = bool((column >= 0).all()) and bool((np.diff(column) <= 0).all())
    if most > 1 and bands > apart and not monotone:
        return None
    total = np.zeros(steps)
    for start in range(0, apart * most, apart):
        total[start:] += column[: steps - start]
    # Where columns don't overlap their signs don't matter, and the earlier ones are the longer ones.
    return math.sqrt(math.fsum((total**2).tolist()))


def _tree(strategy: BinaryTree, participation: Participation) -> float:
    """The bound from the tree's nodes, where the search is affordable."""
    most = participation.max_participations(strategy.steps)
    try:
        return tree_sensitivity(strategy.steps, separation=participation.min_separation, participations=most)
    except InvalidArgument:
        return math.inf


def matrix_sensitivity(matrix: FloatArray, participation: Participation) -> float:
    """`sensitivity` of a matrix that is written out, of any shape with one column a step."""
    gram = np.abs(matrix.T @ matrix)
    steps = gram.shape[0]
    most, apart = participation.max_participations(steps), participation.min_separation
    if most == 1:
        return math.sqrt(float(np.diag(gram).max()))
    if isinstance(participation, FixedEpochOrder):
        return math.sqrt(max(float(gram[first::apart, first::apart].sum()) for first in range(min(apart, steps))))
    # Σ_{i∈π} Σ_{j∈π} |X_ij| ≤ max_π Σ_{i∈π} r_i, where r_i is the largest inner sum that any π with i in it can have.
    reach = _max_rows(gram, apart, most)
    return math.sqrt(_spaced(reach[:, None], apart, most)[-1][-1, 0])


def _spaced(values: FloatArray, apart: int, most: int) -> list[FloatArray]:
    """For every prefix length: the largest sums of ≤ 0, 1, …, `most` entries ≥ `apart` from each other.

    `values` has shape (steps, lanes), each lane a problem of its own, entries ≥ 0; results have (most + 1, lanes).
    """
    best = [np.zeros((most + 1, values.shape[1]))]
    for end in range(1, len(values) + 1):
        taken = best[max(end - apart, 0)][:-1] + values[end - 1]
        best.append(np.concatenate([best[-1][:1], np.maximum(best[-1][1:], taken)]))
    return best


def _max_rows(gram: FloatArray, apart: int, most: int) -> FloatArray:
    """r_i = |X_ii| + the best of m entries of row i to the left and most − 1 − m to the right."""
    steps = len(gram)
    left, right = _one_sided(gram, apart, most - 1), _one_sided(gram[::-1, ::-1], apart, most - 1)[:, ::-1]
    joined = np.max(left + right[::-1], axis=0)
    return np.diag(gram) + joined[:steps]


def _one_sided(gram: FloatArray, apart: int, most: int) -> FloatArray:
    """Shape (most + 1, steps): for every row i the best sums of ≤ m of its entries at least `apart` before i."""
    steps = len(gram)
    found = np.zeros((most + 1, steps))
    recent: list[FloatArray] = [np.zeros((most + 1, steps))]
    for end in range(1, steps - apart + 1):
        # A window of the last `apart` prefixes is all that the recursion looks back to.
        taken = recent[max(len(recent) - apart, 0)][:-1] + gram[end - 1]
        recent.append(np.concatenate([recent[-1][:1], np.maximum(recent[-1][1:], taken)]))
        recent = recent[-apart - 1 :]
        found[:, end + apart - 1] = recent[-1][:, end + apart - 1]
    return found
