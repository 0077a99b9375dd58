"""Dense strategies: the best matrix for few steps, whatever its shape (floor 1).

The optimum minimises tr(AᵀA X⁻¹), the summed variance of the workload A, over X = CᵀC of sensitivity 1. At the
optimum X⁻¹AᵀAX⁻¹ = Λ lives where X is held fixed, so X = Λ^(−1/2) (Λ^(1/2) AᵀA Λ^(1/2))^(1/2) Λ^(−1/2); iterating
that equation finds it. For several epochs the columns that one record reaches are held orthogonal, and their squared
norms add up to 1.

References:
    Denisov et al. 2022, theorem 3.2 (fixed point). Choquette-Choo, McMahan, Rush, Thakurta 2022 (several epochs).
"""

from dataclasses import dataclass

import numpy as np

from sordino import checks
from sordino.errors import InvalidArgument
from sordino.mechanisms.correlated.series import FloatArray, prefix_workload, toeplitz
from sordino.mechanisms.correlated.strategies import Recurrence

__all__ = ["DenseStrategy", "optimal_dense"]


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


def optimal_dense(steps: int, *, epochs: int = 1, momentum: float = 0.0, tolerance: float = 1e-10) -> DenseStrategy:
    """The strategy of sensitivity 1 with the least mean squared error on prefix sums.

    Args:
        steps: a multiple of `epochs`; the time grows with its cube, 256 takes seconds.
        epochs: passes over batches that come in the same order every epoch (`EveryEpoch`).
        momentum: of the optimizer, in [0, 1).
        tolerance: relative change at which the iteration ends, at most 5000 rounds.

    Returns:
        The lower-triangular factor C of the optimal X = CᵀC.

    Example:
        >>> optimal_dense(2).matrix().round(4).tolist()
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
