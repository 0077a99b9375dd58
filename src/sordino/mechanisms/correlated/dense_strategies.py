"""Dense strategies: the best matrix for few steps, whatever its shape.

The optimum minimizes tr(AᵀA X⁻¹), the summed variance of the workload A, over X = CᵀC of sensitivity 1. At the
optimum X⁻¹AᵀAX⁻¹ = Λ lives where X is held fixed, so X = Λ^(−1/2) (Λ^(1/2) AᵀA Λ^(1/2))^(1/2) Λ^(−1/2); iterating
that equation finds it. For several epochs the columns that one record reaches are held orthogonal, and their squared
norms add up to 1.

References:
    Denisov et al. 2022, theorem 3.2 (fixed point). Choquette-Choo, McMahan, Rush, Thakurta 2022 (several epochs).
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from sordino import checks
from sordino.errors import InvalidArgument
from sordino.mechanisms.correlated.strategies import FloatArray, Recurrence, noise_matrix, prefix_workload, toeplitz

__all__ = ["BinaryTree", "DenseStrategy", "optimize_dense", "tree_sensitivity"]


@dataclass(frozen=True, kw_only=True, eq=False)
class DenseStrategy:
    """Any lower-triangular C with a positive diagonal; the stream holds as many noises as C has bands below.

    Args:
        coefficients: C, shape (steps, steps).
    """

    coefficients: FloatArray

    def __post_init__(self) -> None:
        matrix = np.array(self.coefficients, dtype=np.float64)
        fits = matrix.ndim == 2 and matrix.shape[0] == matrix.shape[1] > 0 and bool(np.isfinite(matrix).all())
        if not fits or bool(np.triu(matrix, 1).any()) or bool((np.diag(matrix) <= 0).any()):
            raise InvalidArgument(
                f"coefficients must be a lower-triangular square matrix with diagonal > 0, got shape {matrix.shape}. "
                "Put the QR or Cholesky factor here."
            )
        matrix.setflags(write=False)
        object.__setattr__(self, "coefficients", matrix)

    @property
    def steps(self) -> int:
        """Number of rows."""
        return self.coefficients.shape[0]

    @property
    def bands(self) -> int:
        """Counted in the matrix."""
        rows, columns = np.nonzero(self.coefficients)
        return int((rows - columns).max()) + 1

    @property
    def buffers(self) -> int:
        """One less than bands."""
        return self.bands - 1

    def column(self) -> None:
        """C is not treated as Toeplitz."""
        return

    def noise_column(self) -> None:
        """C⁻¹ is not treated as Toeplitz."""
        return

    def matrix(self) -> FloatArray:
        """C."""
        return self.coefficients

    def recurrence(self, step: int) -> Recurrence:
        """Forward substitution: x_t = (z_t − Σ_{s<t} C[t, s] x_s)/C[t, t]."""
        size, row = self.buffers, self.coefficients[step]
        read = np.zeros(size)
        for back in range(1, min(size, step) + 1):
            read[(step - back) % size] = -row[step - back] / row[step]
        return Recurrence(gain=1.0 / row[step], read=read, slot=step % size if size else None)

    def leading(self, steps: int) -> "DenseStrategy":
        """The leading block."""
        return DenseStrategy(coefficients=self.coefficients[:steps, :steps])

    def numbers(self) -> FloatArray:
        """The matrix."""
        return self.coefficients.ravel()


def optimize_dense(steps: int, *, epochs: int = 1, momentum: float = 0.0, tolerance: float = 1e-10) -> DenseStrategy:
    """The strategy of sensitivity 1 with the least mean squared error on prefix sums.

    Args:
        steps: a multiple of `epochs`; the time grows with its cube, 256 takes seconds.
        epochs: passes over batches that come in the same order every epoch (`FixedEpochOrder`).
        momentum: of the optimizer, in [0, 1).
        tolerance: relative change at which the iteration ends, at most 5000 rounds.

    Returns:
        The lower-triangular factor C of the optimal X = CᵀC.

    Example:
        >>> optimize_dense(2).matrix().round(4).tolist()
        [[0.9242, 0.0], [0.382, 1.0]]
    """
    if checks.integer(1, steps=steps) % checks.integer(1, epochs=epochs):
        raise InvalidArgument(f"steps must be a multiple of epochs ({epochs}), got {steps}. Pad the last epoch.")
    workload = toeplitz(prefix_workload(steps, momentum=momentum))
    gram = workload.T @ workload
    places = np.arange(steps)
    held = np.subtract.outer(places, places) % (steps // epochs) == 0
    squares = np.full(steps, 1.0 / epochs)
    multiplier = np.where(held, gram, 0.0) / epochs
    optimum = np.diag(squares)
    for _ in range(5000):
        scale = np.sqrt(squares)
        target = gram / np.outer(scale, scale)
        half, inverse_half = _powers(multiplier)
        root = _powers(half @ target @ half)[0]
        optimum = np.where(held, np.diag(squares), inverse_half @ root @ inverse_half * np.outer(scale, scale))
        updated = np.where(held, root, 0.0)
        # Within a record's columns all multipliers must become equal: a column that costs more gets more.
        shares = np.sqrt(squares * np.diag(updated)).reshape(epochs, -1)
        new_squares = (shares / shares.sum(axis=0)).ravel()
        change = max(
            float(np.abs(updated - multiplier).max() / np.abs(updated).max()),
            float(np.abs(new_squares / squares - 1).max()),
        )
        growth = np.sqrt(new_squares / squares)
        multiplier, squares = updated * np.outer(growth, growth), new_squares
        if change < tolerance:
            break
    flipped = np.linalg.cholesky(optimum[::-1, ::-1])[::-1, ::-1]
    return DenseStrategy(coefficients=np.tril(flipped.T))


def _powers(matrix: FloatArray) -> tuple[FloatArray, FloatArray]:
    """The square root of a positive-definite matrix and its inverse."""
    values, vectors = np.linalg.eigh((matrix + matrix.T) / 2)
    roots = np.sqrt(np.maximum(values, values.max() * 1e-300))
    return vectors * roots @ vectors.T, vectors / roots @ vectors.T


# ----------------------------------------------------------------------------------------------------------------------
# Binary-tree noise as a strategy: every prefix sum is the sum of few noisy nodes, refined from below.
#
# A node of level h sums 2^h steps. When its two children are complete, the node's own noisy sum and its children's are
# two estimates of one number; they are averaged with inverse-variance weights (Honaker 2015, "estimation from below").
# A prefix is the sum of the largest complete nodes. A step completes at most one node that is read later, and the
# noises of the nodes inside it are read nowhere else: together they are one Gaussian draw of known variance. So the
# noise of a step needs one draw and ⌊log₂ n⌋ + 1 buffers, and the tree is a strategy like the others, C = (that map)⁻¹.
#
# References:
#     Dwork, Naor, Pitassi, Rothblum 2010; Chan, Shi, Song 2011 (the tree). Honaker 2015 (estimation from below).
#     Kairouz et al. 2021, section 4.1 and appendix D (training with it).
# ----------------------------------------------------------------------------------------------------------------------


_LARGEST_WORK = 2e9


@dataclass(frozen=True, kw_only=True)
class BinaryTree:
    """Noise of a binary tree over the steps, each node refined by the nodes below it.

    Args:
        steps: ≥ 1; need not be a power of two.

    Example:
        >>> BinaryTree(steps=1024).buffers
        11
    """

    steps: int

    def __post_init__(self) -> None:
        checks.integer(1, steps=self.steps)

    @property
    def bands(self) -> int:
        """All of them."""
        return self.steps

    @property
    def buffers(self) -> int:
        """One for each level that a complete node can have."""
        return self.steps.bit_length()

    def column(self) -> None:
        """C is not Toeplitz."""
        return

    def noise_column(self) -> None:
        """C⁻¹ is not Toeplitz."""
        return

    def matrix(self) -> FloatArray:
        """C, the inverse of the noise that is really added."""
        from scipy.linalg import solve_triangular

        return np.tril(solve_triangular(noise_matrix(self), np.eye(self.steps), lower=True))

    def recurrence(self, step: int) -> Recurrence:
        """The step completes one node of level r, r the number of ones that end the step's binary form."""
        level = (~step & (step + 1)).bit_length() - 1
        read, carry = np.zeros(self.buffers), np.zeros(self.buffers)
        fresh, variance = 1.0, 1.0
        for below in range(level):
            own = 2 * variance / (1 + 2 * variance)
            fresh = own**2 + (1 - own) ** 2 * fresh
            read[: below + 1] = (read[: below + 1] + (np.arange(below + 1) == below)) * (1 - own)
            variance = own
        read[:level] -= 1.0
        carry[:level] = 1.0
        return Recurrence(gain=math.sqrt(fresh), read=read, slot=level, carry=carry)

    def unrefined_variances(self) -> FloatArray:
        """Variance of each prefix sum with unit noise a node and no refinement: the number of its nodes.

        For comparison: this is the tree as it was first published, at the sensitivity of `tree_sensitivity`.
        """
        return np.array([float(end.bit_count()) for end in range(1, self.steps + 1)])

    def leading(self, steps: int) -> "BinaryTree":
        """Fewer steps of the same."""
        return replace(self, steps=steps)

    def numbers(self) -> FloatArray:
        """No number is free."""
        return np.empty(0)


def tree_sensitivity(steps: int, *, separation: int = 1, participations: int = 1) -> float:
    """ℓ2 sensitivity of the tree's complete nodes: √ max over participations of Σ_nodes (how many fall into the node)².

    Exact, by joining equal halves from the leaves up: for a block, the best score with m participations whose first
    is at least f steps from the left end and whose last is at least l steps from the right end.

    Args:
        steps: ≥ 1.
        separation: participations i < j have j − i ≥ separation.
        participations: at most so many.

    Raises:
        InvalidArgument: the search would take minutes.

    Example:
        >>> round(tree_sensitivity(8) ** 2), round(tree_sensitivity(9, separation=4, participations=3) ** 2)
        (4, 11)
    """
    checks.integer(1, steps=steps)
    gap = min(checks.integer(1, separation=separation), steps)
    most = min(checks.integer(1, participations=participations), -(-steps // gap))
    gap = 1 if most == 1 else gap
    if steps.bit_length() * most**2 * gap**3 > _LARGEST_WORK:
        raise InvalidArgument(f"separation must be smaller for an exact search, got {gap}. Use a matrix's sensitivity.")
    block = np.full((most + 1, gap, gap), -math.inf)
    block[0], block[1, 0, 0] = 0.0, 1.0
    forest, width, bonus = None, 1, np.arange(most + 1.0)[:, None, None] ** 2
    rest = steps
    pieces: list[tuple[int, FloatArray]] = []
    while rest:
        if rest & 1:
            pieces.append((width, block))
        rest >>= 1
        if rest:
            block, width = _joined(block, block, width, width) + bonus, 2 * width
    # The largest block comes first in time.
    for width, block in reversed(pieces):
        forest = (width, block) if forest is None else (forest[0] + width, _joined(forest[1], block, forest[0], width))
    assert forest is not None
    return math.sqrt(float(forest[1][:, 0, 0].max()))


def _joined(left: FloatArray, right: FloatArray, left_width: int, right_width: int) -> FloatArray:
    """Scores of two neighboring blocks together, without a node of their own."""
    most, gap = left.shape[0] - 1, left.shape[1]
    beyond_left = np.maximum(np.arange(gap) - left_width, 0)
    beyond_right = np.maximum(np.arange(gap) - right_width, 0)
    best = np.maximum(right[:, beyond_left, :], left[:, :, beyond_right])
    best[0] = 0.0
    for mine in range(1, most):
        for theirs in range(1, most + 1 - mine):
            for apart in range(gap):
                # Between the last of the left block and the first of the right lie `apart` and gap − 1 − apart steps.
                pair = left[mine, :, apart, None] + right[theirs, None, gap - 1 - apart, :]
                np.maximum(best[mine + theirs], pair, out=best[mine + theirs])
    return best
