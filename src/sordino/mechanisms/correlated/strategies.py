"""Strategies of correlated noise: independent, banded, banded inverse, buffered, dense, and the binary tree.

A strategy is an invertible lower-triangular matrix C, steps × steps. The noise of the steps is X = C⁻¹Z for
white Z, so that the noisy gradients are C⁻¹(CG + Z): private as the Gaussian mechanism on CG, useful because sums
of the rows of X cancel. C⁻¹Z is never computed from matrices: each strategy says, for every step, how the step's noise
comes from one fresh draw and a few buffers (`Recurrence`).

References:
    Denisov et al. 2022 (the mechanism). Choquette-Choo et al. 2023 (bands). Dvijotham et al. 2024; McMahan et
    al. 2024 (buffers). Kalinin, McKenna, Upadhyay, Lampert 2025 (banded inverse).
"""

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from sordino import checks
from sordino.errors import InvalidArgument

# ----------------------------------------------------------------------------------------------------------------------
# Power series: first columns of lower-triangular Toeplitz matrices, their products and inverses.
#
# A lower-triangular Toeplitz matrix is its first column; products of such matrices multiply the columns as power
# series.
# ----------------------------------------------------------------------------------------------------------------------


FloatArray = npt.NDArray[np.float64]


def prefix_workload(steps: int, *, momentum: float = 0.0) -> FloatArray:
    """First column of the map from the steps' gradients to the model's positions, at learning rate 1.

    Plain steps add the gradients up: all ones. With heavy-ball momentum β entry k is 1 + β + … + β^k.

    Args:
        steps: ≥ 1.
        momentum: β in [0, 1).
    """
    checks.integer(1, steps=steps)
    checks.in_range(0.0, 1.0 - 1e-9, momentum=momentum)
    return np.cumsum(momentum ** np.arange(steps, dtype=np.float64))


def series_product(first: FloatArray, second: FloatArray, steps: int) -> FloatArray:
    """The first `steps` coefficients of the product of two series."""
    from scipy.signal import fftconvolve

    return fftconvolve(first[:steps], second[:steps])[:steps]


def ratio(numerator: FloatArray, denominator: FloatArray, steps: int) -> FloatArray:
    """The first `steps` coefficients of numerator/denominator, by the recursion; denominator[0] ≠ 0."""
    from scipy.signal import lfilter

    unit = np.zeros(steps)
    unit[0] = 1.0
    return np.asarray(lfilter(numerator[:steps], denominator[:steps], unit), dtype=np.float64)


def toeplitz(column: FloatArray) -> FloatArray:
    """The lower-triangular Toeplitz matrix with this first column."""
    gaps = np.subtract.outer(np.arange(len(column)), np.arange(len(column)))
    return np.where(gaps >= 0, column[np.maximum(gaps, 0)], 0.0)


# ----------------------------------------------------------------------------------------------------------------------
# Strategies of correlated noise whose matrix is Toeplitz: independent, banded, banded inverse, buffered.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class Recurrence:
    """One step of x = C⁻¹z over buffers S of shape (m, d): x = gain·z + readᵀS, then S is brought forward.

    Args:
        gain: factor of the fresh draw z.
        read: m weights of the buffers in x.
        slot: the buffer that is overwritten, or None.
        keep: what it is overwritten with: ``noise`` is x, ``draw`` is z.
        carry: m weights of the old buffers that are added to what is kept; None adds nothing.
        decay: m factors: every buffer becomes decay·S + x; None leaves them.
    """

    gain: float
    read: FloatArray
    slot: int | None = None
    keep: str = "noise"
    carry: FloatArray | None = None
    decay: FloatArray | None = None


class Strategy(ABC):
    """What every strategy knows; those whose matrix is Toeplitz give its first column and that of its inverse."""

    steps: int
    """Number of rows and columns."""

    @property
    @abstractmethod
    def bands(self) -> int:
        """C[i, j] = 0 for i − j ≥ bands."""

    @property
    @abstractmethod
    def buffers(self) -> int:
        """How many past tensors the stream holds."""

    @abstractmethod
    def recurrence(self, step: int) -> Recurrence:
        """How the noise of `step` is made."""

    def column(self) -> FloatArray | None:
        """First column of C if C is Toeplitz, otherwise None."""
        return None

    def noise_column(self) -> FloatArray | None:
        """First column of C⁻¹ if C is Toeplitz, otherwise None."""
        return None

    def matrix(self) -> FloatArray:
        """C, shape (steps, steps)."""
        column = self.column()
        assert column is not None
        return toeplitz(column)

    def leading(self, steps: int) -> "Strategy":
        """The strategy of the first `steps` steps: the leading block of C."""
        return replace(cast("Any", self), steps=steps)

    def numbers(self) -> FloatArray:
        """All numbers that define C, besides its kind and steps."""
        return np.empty(0)


def noise_matrix(strategy: Strategy) -> FloatArray:
    """C⁻¹ as the stream makes it, row by row from the recurrence: shape (steps, steps)."""
    identity = np.eye(strategy.steps)
    rows, buffers = np.zeros_like(identity), np.zeros((strategy.buffers, strategy.steps))
    for step, draw in enumerate(identity):
        rule = strategy.recurrence(step)
        rows[step] = rule.gain * draw + rule.read @ buffers
        if rule.decay is not None:
            buffers = rule.decay[:, None] * buffers + rows[step]
        elif rule.slot is not None:
            kept = rows[step] if rule.keep == "noise" else draw
            buffers[rule.slot] = kept if rule.carry is None else kept + rule.carry @ buffers
    return rows


def strategy_digest(strategy: Strategy) -> str:
    """A hash of the strategy's kind, size and numbers: a saved stream must not go on under another matrix."""
    text = f"{type(strategy).__name__} {strategy.steps} ".encode()
    return hashlib.blake2b(text + strategy.numbers().astype("<f8").tobytes(), digest_size=16).hexdigest()


def square_root_coefficients(count: int) -> tuple[float, ...]:
    """The first coefficients of (1 − x)^(−1/2): 1, 1/2, 3/8, …, C(2k, k)/4^k (Fichtenberger et al. 2023).

    As a whole column they are the square root of the prefix-sum matrix; cut to `count` bands, a good strategy without
    any optimization (Kalinin, Lampert 2024).
    """
    checks.integer(1, count=count)
    return (1.0, *np.cumprod(1 - 1 / (2 * np.arange(1, count, dtype=np.float64))).tolist())


@dataclass(frozen=True, kw_only=True)
class IndependentNoise(Strategy):
    """C = I: the noise of DP-SGD, a fresh draw every step."""

    steps: int

    def __post_init__(self) -> None:
        checks.integer(1, steps=self.steps)

    @property
    def bands(self) -> int:
        """One: the main diagonal."""
        return 1

    @property
    def buffers(self) -> int:
        """None are needed."""
        return 0

    def column(self) -> FloatArray:
        """First column of C."""
        return _padded((1.0,), self.steps)

    noise_column = column

    def recurrence(self, step: int) -> Recurrence:  # noqa: ARG002
        """The draw itself."""
        return Recurrence(gain=1.0, read=np.empty(0))


@dataclass(frozen=True, kw_only=True)
class _Banded(Strategy):
    """A strategy by the diagonal and some bands below of C or of C⁻¹; a ring holds what the bands multiply."""

    coefficients: tuple[float, ...]
    steps: int

    def __post_init__(self) -> None:
        checks.integer(1, steps=self.steps)
        values = tuple(float(value) for value in self.coefficients)
        if not 1 <= len(values) <= self.steps or not np.isfinite(values).all() or values[0] <= 0:
            raise InvalidArgument(
                f"coefficients must be 1 to {self.steps} finite numbers with the first > 0, got {len(values)} of them. "
                "Use at most one for each step."
            )
        object.__setattr__(self, "coefficients", values)

    @property
    def buffers(self) -> int:
        """One less than the coefficients."""
        return len(self.coefficients) - 1

    def _given(self) -> FloatArray:
        """First column of the matrix whose bands are given."""
        return _padded(self.coefficients, self.steps)

    def _inverse(self) -> FloatArray:
        """First column of its inverse, the reciprocal series."""
        return ratio(np.ones(1), self.numbers(), self.steps)

    def _ring(self, step: int) -> tuple[FloatArray, int | None]:
        """Weights of the last values (value t lies in slot t mod size), and the slot of the next one."""
        read = np.zeros(self.buffers)
        for back in range(1, min(self.buffers, step) + 1):
            read[(step - back) % self.buffers] = self.coefficients[back]
        return read, step % self.buffers if self.buffers else None

    def leading(self, steps: int) -> "Strategy":
        """Fewer steps of the same; bands beyond them fall away."""
        return replace(self, coefficients=self.coefficients[:steps], steps=steps)

    def numbers(self) -> FloatArray:
        """The coefficients."""
        return np.asarray(self.coefficients, dtype=np.float64)


@dataclass(frozen=True, kw_only=True)
class BandedToeplitz(_Banded):
    """C has `coefficients` on its main diagonal and the ones below: x_t = (z_t − Σ_j c_j x_{t−j})/c₀.

    The stream holds the last bands − 1 noises. Columns that are `bands` or more apart are orthogonal, which is what
    sampling in cycles needs.

    Args:
        coefficients: c₀ > 0, c₁, …; more than `steps` are refused.
        steps: ≥ 1.

    Example:
        >>> BandedToeplitz(coefficients=(1.0, 0.5), steps=3).matrix().tolist()
        [[1.0, 0.0, 0.0], [0.5, 1.0, 0.0], [0.0, 0.5, 1.0]]
    """

    column, noise_column = _Banded._given, _Banded._inverse

    @property
    def bands(self) -> int:
        """Number of coefficients."""
        return len(self.coefficients)

    def recurrence(self, step: int) -> Recurrence:
        """A ring of past noises; the oldest, just read, is overwritten."""
        first = self.coefficients[0]
        read, slot = self._ring(step)
        return Recurrence(gain=1.0 / first, read=-read / first, slot=slot)


@dataclass(frozen=True, kw_only=True)
class BandedInverse(_Banded):
    """C⁻¹ has `coefficients` on its main diagonal and the ones below: x_t = Σ_j m_j z_{t−j}.

    The stream holds the last draws. C itself is a full triangle.

    Args:
        coefficients: m₀ > 0, m₁, …; more than `steps` are refused.
        steps: ≥ 1.
    """

    column, noise_column = _Banded._inverse, _Banded._given

    @classmethod
    def square_root(cls, *, bands: int, steps: int) -> "BandedInverse":
        """The inverse of the square root of the prefix-sum matrix, cut to `bands`: 1, −1/2, −1/8, −1/16, …."""
        root = np.asarray(square_root_coefficients(steps))
        return cls(coefficients=tuple(ratio(np.ones(1), root, steps)[:bands].tolist()), steps=steps)

    @property
    def bands(self) -> int:
        """All of them."""
        return self.steps if len(self.coefficients) > 1 else 1

    def recurrence(self, step: int) -> Recurrence:
        """A ring of past draws; the oldest, just read, is overwritten."""
        read, slot = self._ring(step)
        return Recurrence(gain=self.coefficients[0], read=read, slot=slot, keep="draw")


@dataclass(frozen=True, kw_only=True)
class BufferedToeplitz(Strategy):
    """C's first column is 1, then Σ_i ω_i θ_i^(k−1): a few buffers, each forgetting at its own rate, for any length.

    x_t = z_t − Σ_i ω_i s_i, then s_i ← θ_i s_i + x_t.

    Args:
        decays: θ_i, each in [0, 1].
        scales: ω_i, as many; any sign.
        steps: ≥ 1.

    References:
        Dvijotham et al. 2024, section 3; McMahan, Xu, Zhang 2024, algorithm 1.
    """

    decays: tuple[float, ...]
    scales: tuple[float, ...]
    steps: int

    def __post_init__(self) -> None:
        checks.integer(1, steps=self.steps)
        for decay in self.decays:
            checks.in_range(0.0, 1.0, decays=decay)
        if len(self.decays) != len(self.scales) or not np.isfinite(self.scales).all():
            raise InvalidArgument(
                f"scales must be {len(self.decays)} finite numbers, one for each decay, got {self.scales!r}. Pair them."
            )

    @property
    def bands(self) -> int:
        """All of them."""
        return self.steps if self.decays else 1

    @property
    def buffers(self) -> int:
        """One for each decay."""
        return len(self.decays)

    def column(self) -> FloatArray:
        """First column of C."""
        powers = np.power.outer(np.asarray(self.decays), np.arange(self.steps - 1))
        return np.concatenate([[1.0], np.asarray(self.scales) @ powers])

    def noise_column(self) -> FloatArray:
        """First column of C⁻¹, by the recursion of its rational generating function."""
        above = np.ones(1)
        for decay in self.decays:
            above = np.convolve(above, [1.0, -decay])
        below = above.copy()
        for i, scale in enumerate(self.scales):
            others = np.array([0.0, 1.0])
            for j, decay in enumerate(self.decays):
                if j != i:
                    others = np.convolve(others, [1.0, -decay])
            below += scale * others
        return ratio(above, below, self.steps)

    def recurrence(self, step: int) -> Recurrence:  # noqa: ARG002
        """Every buffer decays and takes the new noise in."""
        return Recurrence(gain=1.0, read=-np.asarray(self.scales), decay=np.asarray(self.decays))

    def numbers(self) -> FloatArray:
        """Decays, then scales."""
        return np.asarray([*self.decays, *self.scales], dtype=np.float64)


def _padded(values: Sequence[float], steps: int) -> FloatArray:
    column = np.zeros(steps)
    column[: len(values)] = values
    return column


# ----------------------------------------------------------------------------------------------------------------------
# Dense strategies: the best matrix for few steps, whatever its shape.
#
# The optimum minimizes tr(AᵀA X⁻¹), the summed variance of the workload A, over X = CᵀC of sensitivity 1. At the
# optimum X⁻¹AᵀAX⁻¹ = Λ lives where X is held fixed, so X = Λ^(−1/2) (Λ^(1/2) AᵀA Λ^(1/2))^(1/2) Λ^(−1/2); iterating
# that equation finds it. For several epochs the columns that one record reaches are held orthogonal, and their squared
# norms add up to 1.
#
# References:
#     Denisov et al. 2022, theorem 3.2 (fixed point). Choquette-Choo, McMahan, Rush, Thakurta 2022 (several epochs).
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class DenseStrategy(Strategy):
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
        object.__setattr__(self, "steps", len(matrix))

    @property
    def bands(self) -> int:
        """Counted in the matrix."""
        rows, columns = np.nonzero(self.coefficients)
        return int((rows - columns).max()) + 1

    @property
    def buffers(self) -> int:
        """One less than bands."""
        return self.bands - 1

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

    def leading(self, steps: int) -> "Strategy":
        """The leading block."""
        return replace(self, coefficients=self.coefficients[:steps, :steps])

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
    held = np.subtract.outer(np.arange(steps), np.arange(steps)) % (steps // epochs) == 0
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
class BinaryTree(Strategy):
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
