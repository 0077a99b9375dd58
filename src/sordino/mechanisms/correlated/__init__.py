"""Gaussian noise that is correlated over the steps of a run, so that it cancels in the model's position.

A *strategy* is the correlation, a *participation* says in which steps one record can be, the mechanism joins both to
noise and an event, and its stream adds the noise to tensors. Only the stream loads torch.
"""

from sordino.mechanisms.correlated.mechanism import (
    CorrelatedGaussianMechanism,
    CyclicPoisson,
    FixedEpochOrder,
    MinSeparation,
    Participation,
    SingleParticipation,
    matrix_sensitivity,
    participation_from_dict,
    participation_to_dict,
    sensitivity,
    strategy_from_dict,
    strategy_to_dict,
)
from sordino.mechanisms.correlated.optimization import (
    NoiseCandidate,
    choose_correlated_noise,
    max_error,
    mean_error,
    optimize_banded,
    optimize_buffered,
    prefix_variances,
)
from sordino.mechanisms.correlated.strategies import (
    BandedInverse,
    BandedToeplitz,
    BinaryTree,
    BufferedToeplitz,
    DenseStrategy,
    IndependentNoise,
    Strategy,
    noise_matrix,
    optimize_dense,
    square_root_coefficients,
    tree_sensitivity,
)

__all__ = [
    "BandedInverse",
    "BandedToeplitz",
    "BinaryTree",
    "BufferedToeplitz",
    "CorrelatedGaussianMechanism",
    "CyclicPoisson",
    "DenseStrategy",
    "FixedEpochOrder",
    "IndependentNoise",
    "MinSeparation",
    "NoiseCandidate",
    "Participation",
    "SingleParticipation",
    "Strategy",
    "choose_correlated_noise",
    "matrix_sensitivity",
    "max_error",
    "mean_error",
    "noise_matrix",
    "optimize_banded",
    "optimize_buffered",
    "optimize_dense",
    "participation_from_dict",
    "participation_to_dict",
    "prefix_variances",
    "sensitivity",
    "square_root_coefficients",
    "strategy_from_dict",
    "strategy_to_dict",
    "tree_sensitivity",
]
