"""Sufficient statistics of least squares with noise, and what can be solved from them (floor 4).

Proof: docs/proofs/sufficient-statistics.md.

References:
    Vu, Slavkovic 2009; Foulds, Geumlek, Welling, Chaudhuri 2016 (sufficient statistics with Laplace noise).
    Wang 2018, "Revisiting differentially private linear regression", algorithm 2 (AdaSSP).
"""

import math
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from sordino import checks
from sordino.definitions import NeighboringRelation
from sordino.events import Event
from sordino.mechanisms import DiscreteLaplaceMechanism, GridGaussianMechanism, PrivateSecondMoment, PureBudget
from sordino.mechanisms.budgets import Budget, GaussianBudget
from sordino.mechanisms.values import FloatArray
from sordino.randomness import Randomness

__all__ = ["AdaptiveStatistics", "LeastSquaresStatistics", "cross_moment"]

_GRID_BITS = 30
# The computed smallest eigenvalue of a matrix of norm n is off by about n·1e-15: below this share of the sensitivity.
_EIGENVALUE_ROUNDING = 1e-6


def cross_moment(rows: FloatArray, targets: FloatArray) -> FloatArray:
    """Aᵀt [p], rounded towards zero record by record and added as integers: sums of floats may move by more."""
    steps = np.trunc(np.ldexp(rows * targets[:, None], _GRID_BITS)).astype(np.int64)
    return np.ldexp(steps.sum(axis=0).astype(np.float64), -_GRID_BITS)


@dataclass(frozen=True, kw_only=True)
class LeastSquaresStatistics:
    """AᵀA and Aᵀt with exact noise, for rows of norm ≤ 1 and targets in [−1, 1].

    Guarantee: one release spends `budget` under the declared relation; the two parts' shares add up to it.

    Args:
        budget: Gaussian, or pure for discrete Laplace noise.
        dimension: number of columns p ≥ 1.
        relation: the neighbouring relation.
        randomness: where the noise comes from; by default a fresh key of this object's own.

    Example:
        >>> from sordino.mechanisms import budget
        >>> statistics = LeastSquaresStatistics(budget=budget(epsilon=1.0, delta=1e-6), dimension=3)
        >>> round(statistics.gram.scale / statistics.cross.stddev, 3)
        1.0
    """

    budget: Budget
    dimension: int
    relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE
    randomness: Randomness = field(default_factory=Randomness, repr=False, compare=False)

    def __post_init__(self) -> None:
        checks.integer(1, dimension=self.dimension)

    @cached_property
    def gram(self) -> PrivateSecondMoment:
        """The release of AᵀA."""
        share, _ = self.budget.split(1, 1)
        return PrivateSecondMoment(
            budget=share, data_norm=1.0, columns=self.dimension, relation=self.relation, randomness=self.randomness
        )

    @cached_property
    def cross(self) -> GridGaussianMechanism | DiscreteLaplaceMechanism:
        """The release of Aᵀt, of ℓ2 sensitivity 1 and ℓ1 sensitivity √p; twice that under replace-one."""
        _, share = self.budget.split(1, 1)
        factor = self.relation.sensitivity_factor
        if isinstance(share, PureBudget):
            return DiscreteLaplaceMechanism(
                epsilon=share.epsilon,
                l1_sensitivity=factor * math.sqrt(self.dimension),
                dimension=self.dimension,
                randomness=self.randomness,
            )
        return GridGaussianMechanism(
            noise_multiplier=share.noise_multiplier,
            l2_sensitivity=factor,
            dimension=self.dimension,
            randomness=self.randomness,
        )

    @property
    def spectral_noise(self) -> float:
        """About the largest eigenvalue of the noise on AᵀA, from public numbers."""
        if isinstance(self.budget, PureBudget):
            return self.gram.scale * 2.0 * math.sqrt(2.0 * self.dimension)
        return self.gram.scale * math.sqrt(2.0 * self.dimension)

    def events(self) -> list[Event]:
        """The events of one release, one a part."""
        return [self.gram.event(), self.cross.event()]

    def release(self, rows: FloatArray, targets: FloatArray) -> tuple[FloatArray, FloatArray]:
        """(AᵀA [p, p], Aᵀt [p]), both noisy."""
        return self.gram.release(rows), np.asarray(self.cross.release(cross_moment(rows, targets)))

    def weights(self, rows: FloatArray, targets: FloatArray, *, regularization: float | None) -> FloatArray:
        """The ridge solution [p] from one release: negative eigenvalues are cut off, λ is at least what noise needs.

        Args:
            rows: [n, p].
            targets: [n].
            regularization: λ ≥ 0 added to AᵀA; None takes `spectral_noise`.
        """
        gram, cross = self.release(rows, targets)
        values, vectors = np.linalg.eigh(gram)
        added = self.spectral_noise if regularization is None else max(regularization, 1e-6 * self.spectral_noise)
        return vectors @ ((vectors.T @ cross) / (np.maximum(values, 0.0) + added))


@dataclass(frozen=True, kw_only=True)
class AdaptiveStatistics:
    """AdaSSP: sufficient statistics, and a regularisation chosen by a noisy smallest eigenvalue.

    Wang's algorithm gives each of its three releases (ε/3, δ/3); here they are three shares of one Gaussian budget,
    which for the same (ε, δ) is 1.6 times less noise at ε = 1, δ = 10⁻⁶.

    Guarantee: one release spends `budget` under the declared relation.

    Args:
        budget: Gaussian.
        dimension: number of columns p ≥ 1.
        failure: probability, in (0, 1), with which the regularisation may be too small for the noise.
        relation: the neighbouring relation.
        randomness: where the noise comes from; by default a fresh key of this object's own.

    Example:
        >>> from sordino.mechanisms import GaussianBudget
        >>> round(AdaptiveStatistics(budget=GaussianBudget(noise_multiplier=1.0), dimension=4).stddev, 4)
        1.7321
    """

    budget: GaussianBudget
    dimension: int
    failure: float = 0.05
    relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE
    randomness: Randomness = field(default_factory=Randomness, repr=False, compare=False)

    def __post_init__(self) -> None:
        checks.probability(zero=False, one=False, failure=self.failure)

    @cached_property
    def statistics(self) -> LeastSquaresStatistics:
        """AᵀA and Aᵀt, with two thirds of the budget."""
        share, _ = self.budget.split(2, 1)
        return LeastSquaresStatistics(
            budget=share, dimension=self.dimension, relation=self.relation, randomness=self.randomness
        )

    @cached_property
    def eigenvalue(self) -> GridGaussianMechanism:
        """The smallest eigenvalue of AᵀA: by Weyl's inequality a row moves it by at most 1, exchanged rows too."""
        _, share = self.budget.split(2, 1)
        return GridGaussianMechanism(
            noise_multiplier=share.noise_multiplier,
            l2_sensitivity=1.0 + _EIGENVALUE_ROUNDING,
            randomness=self.randomness,
        )

    @property
    def stddev(self) -> float:
        """Deviation of the noise on the diagonal of AᵀA."""
        return self.statistics.gram.scale

    def events(self) -> list[Event]:
        """The events of one release, one a part."""
        return [*self.statistics.events(), self.eigenvalue.event()]

    def regularization(self, smallest: float) -> float:
        """λ for a noisy smallest eigenvalue: Wang 2018, algorithm 2, whose √log(6/δ)/(ε/3) is the noise's deviation."""
        # Four deviations below the noisy value: a lower bound but once in 30 000 fits; √log(6/δ) at δ = 10⁻⁶.
        certain = max(smallest - 4.0 * self.eigenvalue.stddev, 0.0)
        needed = self.stddev * math.sqrt(self.dimension * math.log(2 * self.dimension**2 / self.failure))
        return max(0.0, needed - certain)

    def weights(self, rows: FloatArray, targets: FloatArray, *, regularization: float | None) -> FloatArray:
        """The ridge solution [p] from one release; λ is at least `regularization`."""
        exact = rows.T @ rows
        smallest = float(self.eigenvalue.release(np.linalg.eigvalsh(exact)[0]))
        gram, cross = self.statistics.release(rows, targets)
        added = max(self.regularization(smallest), regularization or 0.0)
        values, vectors = np.linalg.eigh(gram)
        # Where the noise is worse than foreseen a shifted eigenvalue may still be negative; it is kept away from 0.
        shifted = np.maximum(values + added, 1e-3 * self.stddev)
        return vectors @ ((vectors.T @ cross) / shifted)
