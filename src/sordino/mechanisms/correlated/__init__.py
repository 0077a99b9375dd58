"""Gaussian noise that is correlated over the steps of a run, so that it cancels in the model's position (floor 1).

A *strategy* is the correlation, a *participation* says in which steps one record can be, the mechanism joins both to
noise and an event, and its stream adds the noise to tensors. Only the stream loads torch.
"""

from sordino.mechanisms.correlated.choice import NoiseChoice, choose_correlated_noise
from sordino.mechanisms.correlated.dense import DenseStrategy, optimal_dense
from sordino.mechanisms.correlated.description import (
    participation_from_dict,
    participation_to_dict,
    strategy_from_dict,
    strategy_to_dict,
)
from sordino.mechanisms.correlated.mechanism import CorrelatedGaussianMechanism
from sordino.mechanisms.correlated.optimal import optimal_banded, optimal_buffered
from sordino.mechanisms.correlated.participation import (
    CyclicPoisson,
    EveryEpoch,
    MinSeparation,
    Participation,
    SingleParticipation,
)
from sordino.mechanisms.correlated.prefix_error import max_error, mean_error, prefix_variances
from sordino.mechanisms.correlated.sensitivity import matrix_sensitivity, sensitivity
from sordino.mechanisms.correlated.strategies import (
    BandedInverse,
    BandedToeplitz,
    BufferedToeplitz,
    IndependentNoise,
    Strategy,
    noise_matrix,
    square_root_coefficients,
)
from sordino.mechanisms.correlated.tree import BinaryTree, tree_sensitivity

__all__ = [
    "BandedInverse",
    "BandedToeplitz",
    "BinaryTree",
    "BufferedToeplitz",
    "CorrelatedGaussianMechanism",
    "CyclicPoisson",
    "DenseStrategy",
    "EveryEpoch",
    "IndependentNoise",
    "MinSeparation",
    "NoiseChoice",
    "Participation",
    "SingleParticipation",
    "Strategy",
    "choose_correlated_noise",
    "matrix_sensitivity",
    "max_error",
    "mean_error",
    "noise_matrix",
    "optimal_banded",
    "optimal_buffered",
    "optimal_dense",
    "participation_from_dict",
    "participation_to_dict",
    "prefix_variances",
    "sensitivity",
    "square_root_coefficients",
    "strategy_from_dict",
    "strategy_to_dict",
    "tree_sensitivity",
]
