"""Value → noisy value, with the event that accounts for it (floor 1).

Mechanisms on numpy values need no torch; the Gaussian mechanism on tensors, which training uses, loads it.
"""

from typing import TYPE_CHECKING

from sordino.lazy_names import lazy_names

if TYPE_CHECKING:
    from sordino.mechanisms.analytic_gaussian import (
        analytic_noise_multiplier,
        classical_noise_multiplier,
        gaussian_delta,
    )
    from sordino.mechanisms.array_gaussian import ArrayGaussianMechanism, GridGaussianMechanism
    from sordino.mechanisms.budgets import GaussianBudget, PureBudget, budget
    from sordino.mechanisms.discrete_gaussian import DiscreteGaussianMechanism
    from sordino.mechanisms.discrete_laplace import DiscreteLaplaceMechanism, GeometricMechanism
    from sordino.mechanisms.exponential import ExponentialMechanism
    from sordino.mechanisms.gaussian import GaussianMechanism
    from sordino.mechanisms.generalized_exponential import GeneralizedExponentialMechanism
    from sordino.mechanisms.knorm import KNormMechanism
    from sordino.mechanisms.laplace import LaplaceMechanism
    from sordino.mechanisms.noisy_max import PermuteAndFlip, ReportNoisyMax
    from sordino.mechanisms.normal_draws import standard_normal
    from sordino.mechanisms.private_count import PrivateCount
    from sordino.mechanisms.private_covariance import PrivateCovariance, PrivateSecondMoment
    from sordino.mechanisms.private_histogram import PrivateHistogram
    from sordino.mechanisms.private_mean import PrivateMean
    from sordino.mechanisms.private_quantile import PrivateQuantile
    from sordino.mechanisms.private_sum import PrivateSum
    from sordino.mechanisms.randomized_response import RandomizedResponse
    from sordino.mechanisms.sparse_vector import AboveThreshold, AboveThresholdSession
    from sordino.mechanisms.thresholded_histogram import ThresholdedHistogram

__all__ = [
    "AboveThreshold",
    "AboveThresholdSession",
    "ArrayGaussianMechanism",
    "DiscreteGaussianMechanism",
    "DiscreteLaplaceMechanism",
    "ExponentialMechanism",
    "GaussianBudget",
    "GaussianMechanism",
    "GeneralizedExponentialMechanism",
    "GeometricMechanism",
    "GridGaussianMechanism",
    "KNormMechanism",
    "LaplaceMechanism",
    "PermuteAndFlip",
    "PrivateCount",
    "PrivateCovariance",
    "PrivateHistogram",
    "PrivateMean",
    "PrivateQuantile",
    "PrivateSecondMoment",
    "PrivateSum",
    "PureBudget",
    "RandomizedResponse",
    "ReportNoisyMax",
    "ThresholdedHistogram",
    "analytic_noise_multiplier",
    "budget",
    "classical_noise_multiplier",
    "gaussian_delta",
    "standard_normal",
]

_HOMES = {
    "AboveThreshold": "sparse_vector",
    "AboveThresholdSession": "sparse_vector",
    "ArrayGaussianMechanism": "array_gaussian",
    "DiscreteGaussianMechanism": "discrete_gaussian",
    "DiscreteLaplaceMechanism": "discrete_laplace",
    "ExponentialMechanism": "exponential",
    "GaussianBudget": "budgets",
    "GaussianMechanism": "gaussian",
    "GeneralizedExponentialMechanism": "generalized_exponential",
    "GeometricMechanism": "discrete_laplace",
    "GridGaussianMechanism": "array_gaussian",
    "KNormMechanism": "knorm",
    "LaplaceMechanism": "laplace",
    "PermuteAndFlip": "noisy_max",
    "PrivateCount": "private_count",
    "PrivateCovariance": "private_covariance",
    "PrivateHistogram": "private_histogram",
    "PrivateMean": "private_mean",
    "PrivateQuantile": "private_quantile",
    "PrivateSecondMoment": "private_covariance",
    "PrivateSum": "private_sum",
    "PureBudget": "budgets",
    "RandomizedResponse": "randomized_response",
    "ReportNoisyMax": "noisy_max",
    "ThresholdedHistogram": "thresholded_histogram",
    "analytic_noise_multiplier": "analytic_gaussian",
    "budget": "budgets",
    "classical_noise_multiplier": "analytic_gaussian",
    "gaussian_delta": "analytic_gaussian",
    "standard_normal": "normal_draws",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
