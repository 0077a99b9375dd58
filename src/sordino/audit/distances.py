"""How far one unit moved what a mechanism was given, in units of its declared sensitivity (room `audit`, floor 4)."""

import math
from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor

from sordino.mechanisms import (
    AboveThreshold,
    AboveThresholdSession,
    ArrayGaussianMechanism,
    DiscreteGaussianMechanism,
    DiscreteLaplaceMechanism,
    ExponentialMechanism,
    GaussianMechanism,
    GeometricMechanism,
    GridGaussianMechanism,
    KNormMechanism,
    LaplaceMechanism,
    PermuteAndFlip,
    PrivateCount,
    PrivateHistogram,
    PrivateSecondMoment,
    PrivateSum,
    PureBudget,
    ReportNoisyMax,
)
from sordino.mechanisms.correlated.noise import CorrelatedNoise
from sordino.mechanisms.exponential import clean_scores
from sordino.mechanisms.grid_sum import GridSumMechanism
from sordino.mechanisms.releases import Release
from sordino.mechanisms.values import FloatArray, Numbers

__all__ = ["exact", "noise_deviation", "share_of_sensitivity"]


def exact(release: Release) -> FloatArray | None:
    """What the mechanism adds its noise to, flat and in float64; None where it adds none."""
    mechanism, value = release.mechanism, release.value
    match mechanism:
        case GaussianMechanism() | CorrelatedNoise():
            parts = [tensor.detach().cpu().double().flatten() for tensor in cast("Sequence[Tensor]", value)]
            return torch.cat(parts).numpy() if parts else np.empty(0)
        case PrivateCount():
            where = release.named.get("where")
            counted = len(cast("Sequence[object]", value)) if where is None else np.sum(np.asarray(where))
            return np.array([float(counted)])
        case PrivateSum() | PrivateHistogram():
            return np.asarray(mechanism.exact(value), dtype=np.float64).ravel()  # pyright: ignore[reportArgumentType]
        case PrivateSecondMoment():
            return mechanism.exact(cast("Numbers", value)).astype(np.float64).ravel() * mechanism.unit
        case ExponentialMechanism() | ReportNoisyMax() | PermuteAndFlip():
            return clean_scores(cast("Numbers", value), bounds=mechanism.score_bounds)
        case (
            ArrayGaussianMechanism()
            | GridGaussianMechanism()
            | DiscreteGaussianMechanism()
            | GridSumMechanism()
            | LaplaceMechanism()
            | DiscreteLaplaceMechanism()
            | GeometricMechanism()
            | KNormMechanism()
            | AboveThreshold()
            | AboveThresholdSession()
        ):
            return np.array(value, dtype=np.float64).ravel()
        case _:
            return None


def share_of_sensitivity(release: Release, before: FloatArray, after: FloatArray) -> float:
    """The distance of two exact values over the sensitivity that `release`'s mechanism declares.

    At most 1 for neighbours; NaN where a difference is none; ∞ where the shapes differ.
    """
    if before.shape != after.shape:
        return math.inf
    mechanism = release.mechanism
    with np.errstate(all="ignore"):
        change = after - before
        match mechanism:
            case PrivateCount():
                return float(np.abs(change).sum())
            case PrivateHistogram():
                moved = mechanism.noise.moved
                return max(float(np.abs(change).sum()) / moved, float(np.abs(change).max(initial=0.0)))
            case PrivateSum():
                return float(np.max(np.abs(change) / np.array(mechanism.noise.sensitivities), initial=0.0))
            case PrivateSecondMoment():
                return _moments(mechanism, change)
            case LaplaceMechanism() | DiscreteLaplaceMechanism() | GeometricMechanism():
                return float(np.abs(change).sum()) / mechanism.l1_sensitivity
            case GridSumMechanism():
                return float(np.linalg.norm(change)) / mechanism.sensitivity
            case KNormMechanism():
                return float(np.linalg.norm(change, ord=mechanism.norm)) / mechanism.sensitivity
            case ExponentialMechanism() | ReportNoisyMax() | PermuteAndFlip() | AboveThreshold():
                return float(np.abs(change).max(initial=0.0)) / mechanism.sensitivity
            case AboveThresholdSession():
                return float(np.abs(change).max(initial=0.0)) / mechanism.mechanism.sensitivity
            case CorrelatedNoise():
                return float(np.linalg.norm(change)) / mechanism.mechanism.l2_sensitivity
            case GaussianMechanism() | ArrayGaussianMechanism() | GridGaussianMechanism() | DiscreteGaussianMechanism():
                return float(np.linalg.norm(change)) / mechanism.l2_sensitivity
            case _:
                return math.nan


def _moments(mechanism: PrivateSecondMoment, change: FloatArray) -> float:
    matrix = change.reshape(mechanism.columns, mechanism.columns)
    pure = isinstance(mechanism.budget, PureBudget)
    size = np.abs(matrix[np.triu_indices(len(matrix))]).sum() if pure else np.linalg.norm(matrix)
    return float(size) / mechanism.sensitivity


def noise_deviation(release: Release) -> float | None:
    """Standard deviation of the Gaussian noise on each entry, where that is one number; otherwise None."""
    match release.mechanism:
        case GaussianMechanism() | ArrayGaussianMechanism() | GridGaussianMechanism():
            return release.mechanism.stddev
        case GridSumMechanism():
            return float(release.mechanism.grid_stddev)
        case _:
            return None
