"""Power series: first columns of lower-triangular Toeplitz matrices, their products and inverses (floor 1).

A lower-triangular Toeplitz matrix is its first column; products of such matrices multiply the columns as power series.
"""

import numpy as np
import numpy.typing as npt

from sordino import checks

__all__ = ["FloatArray", "prefix_workload", "product", "ratio", "toeplitz"]

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


def product(first: FloatArray, second: FloatArray, steps: int) -> FloatArray:
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
