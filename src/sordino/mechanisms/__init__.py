"""Value → noisy value, with the event that accounts for it.

Mechanisms on numpy values need no torch; the Gaussian mechanism on tensors, which training uses, loads it.
"""

from typing import TYPE_CHECKING

from sordino.installation import lazy_names

if TYPE_CHECKING:
    from sordino.mechanisms.additive import (
        DiscreteGaussianMechanism,
        DiscreteLaplaceMechanism,
        GaussianMechanism,
        GeometricMechanism,
        GridGaussianMechanism,
        KNormMechanism,
        LaplaceMechanism,
    )
    from sordino.mechanisms.calibration import (
        GaussianBudget,
        PureBudget,
        analytic_noise_multiplier,
        classical_noise_multiplier,
        gaussian_mechanism_delta,
        make_budget,
    )
    from sordino.mechanisms.categorical import (
        AboveThreshold,
        AboveThresholdSession,
        ExponentialMechanism,
        GeneralizedExponentialMechanism,
        PermuteAndFlip,
        RandomizedResponseMechanism,
        ReportNoisyMax,
    )
    from sordino.mechanisms.covariance import PrivateCovariance, PrivateSecondMoment
    from sordino.mechanisms.statistics import (
        PrivateCount,
        PrivateHistogram,
        PrivateMean,
        PrivateQuantile,
        PrivateSum,
        ThresholdedHistogram,
    )
    from sordino.mechanisms.tensor_noise import TensorGaussianMechanism, standard_normal

__all__ = [
    "AboveThreshold",
    "AboveThresholdSession",
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
    "RandomizedResponseMechanism",
    "ReportNoisyMax",
    "TensorGaussianMechanism",
    "ThresholdedHistogram",
    "analytic_noise_multiplier",
    "classical_noise_multiplier",
    "gaussian_mechanism_delta",
    "make_budget",
    "standard_normal",
]

__getattr__, __dir__ = lazy_names(__name__)
