"""How much noise a strategy leaves in the prefix sums, which is what the model's positions are made of (floor 1).

The noise of the workload's rows is A C⁻¹ Z: row t has variance Σ_s (A C⁻¹)[t, s]² for unit Z. A record's privacy fixes
the size of Z to noise multiplier × sensitivity, so strategies compare by sensitivity × root of the variance.
"""

import math

import numpy as np

from sordino.errors import InvalidArgument
from sordino.mechanisms.correlated.participation import Participation, SingleParticipation
from sordino.mechanisms.correlated.sensitivity import LARGEST_MATRIX, sensitivity
from sordino.mechanisms.correlated.series import FloatArray, prefix_workload, product, toeplitz
from sordino.mechanisms.correlated.strategies import Strategy, noise_matrix

__all__ = ["max_error", "mean_error", "prefix_variances"]


def prefix_variances(strategy: Strategy, *, momentum: float = 0.0) -> FloatArray:
    """Variance of the noise in each step's model position, for unit Z and learning rate 1; shape (steps,).

    Args:
        strategy: the correlation of the noise.
        momentum: of the optimizer, in [0, 1).

    Example:
        >>> from sordino.mechanisms.correlated.strategies import IndependentNoise
        >>> prefix_variances(IndependentNoise(steps=3)).tolist()
        [1.0, 2.0, 3.0]
    """
    workload = prefix_workload(strategy.steps, momentum=momentum)
    column = strategy.noise_column()
    if column is not None:
        return np.cumsum(product(column, workload, strategy.steps) ** 2)
    if strategy.steps > LARGEST_MATRIX:
        raise InvalidArgument(
            f"steps must be at most {LARGEST_MATRIX} for a strategy that is not Toeplitz, got {strategy.steps}. "
            "Use a Toeplitz strategy."
        )
    return np.sum((toeplitz(workload) @ noise_matrix(strategy)) ** 2, axis=1)


def mean_error(strategy: Strategy, participation: Participation | None = None, *, momentum: float = 0.0) -> float:
    """Sensitivity × root mean variance over the steps, at noise multiplier 1 and clipping norm 1.

    `participation` is a single one by default.
    """
    size = sensitivity(strategy, participation or SingleParticipation())
    return size * math.sqrt(float(np.mean(prefix_variances(strategy, momentum=momentum))))


def max_error(strategy: Strategy, participation: Participation | None = None, *, momentum: float = 0.0) -> float:
    """Sensitivity × root of the largest variance of a step, at noise multiplier 1 and clipping norm 1."""
    size = sensitivity(strategy, participation or SingleParticipation())
    return size * math.sqrt(float(np.max(prefix_variances(strategy, momentum=momentum))))
