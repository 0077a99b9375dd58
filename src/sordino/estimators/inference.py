"""How far private coefficients may be from the population's: intervals that count the noise (floor 4).

Both ways state an asymptotic law, sampling and privacy noise together; neither is a guarantee for small tables.

Proof and measured coverage: docs/proofs/confidence-intervals.md.

References:
    Ferrando, Wang, Sheldon 2022, "Parametric bootstrap for differentially private confidence intervals", section 5.
    Wang, Kifer, Lee 2019, "Differentially private confidence intervals for empirical risk minimization", section 4.
"""

import math
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from scipy.special import ndtri

from sordino import checks
from sordino.definitions import NeighboringRelation
from sordino.estimators.losses import Logistic
from sordino.estimators.moments import LeastSquaresStatistics
from sordino.events import Event
from sordino.mechanisms import DiscreteLaplaceMechanism, PrivateSecondMoment, PrivateSum
from sordino.mechanisms.budgets import Budget
from sordino.mechanisms.continuous import laplace, normal
from sordino.mechanisms.values import FloatArray
from sordino.randomness import Randomness, Stream

__all__ = ["CurvatureInference", "RegressionInference", "normal_intervals", "replicate_intervals"]

_REPLICATES = 500
# Eigenvalues below this share of what noise alone would show are raised to it.
_FLOOR = 0.25


def replicate_intervals(estimate: FloatArray, replicates: FloatArray, level: float) -> FloatArray:
    """[p, 2] from replicates [B, p] of the estimate [p]: their deviations, turned round (the basic bootstrap)."""
    checks.probability(zero=False, one=False, level=level)
    tail = (1 - level) / 2
    low, high = np.quantile(replicates - estimate, [tail, 1 - tail], axis=0)
    return np.stack([estimate - high, estimate - low], axis=1)


def normal_intervals(estimate: FloatArray, errors: FloatArray, level: float) -> FloatArray:
    """[p, 2] from standard errors [p]."""
    checks.probability(zero=False, one=False, level=level)
    reach = float(ndtri((1 + level) / 2)) * errors
    return np.stack([estimate - reach, estimate + reach], axis=1)


@dataclass(frozen=True, kw_only=True)
class RegressionInference:
    """Least squares from noisy AᵀA and Aᵀt, with Σt² for the residual variance, and a parametric bootstrap of it.

    Each replicate draws Aᵀt from the fitted model with normal residuals, adds fresh noise of the same law to all
    statistics and solves again: post-processing of what was released.

    Guarantee: one release spends `budget` under the declared relation: 9/10 on the two moments, 1/10 on Σt².

    Args:
        budget: Gaussian or pure.
        dimension: number of columns p ≥ 2, the last one constant.
        constant: its value, > 0, which tells the number of records from AᵀA.
        relation: the neighbouring relation.
        randomness: where the noise comes from; by default a fresh key of this object's own.
    """

    budget: Budget
    dimension: int
    constant: float
    relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE
    randomness: Randomness = field(default_factory=Randomness, repr=False, compare=False)

    def __post_init__(self) -> None:
        checks.integer(2, dimension=self.dimension)
        checks.positive(constant=self.constant)

    @cached_property
    def statistics(self) -> LeastSquaresStatistics:
        """The release of AᵀA and Aᵀt."""
        share, _ = self.budget.split(9, 1)
        return LeastSquaresStatistics(
            budget=share, dimension=self.dimension, relation=self.relation, randomness=self.randomness
        )

    @cached_property
    def square(self) -> PrivateSum:
        """The release of Σ(t² − ½), which one record moves by at most ½."""
        _, share = self.budget.split(9, 1)
        return PrivateSum(budget=share, bounds=(-0.5, 0.5), relation=self.relation, randomness=self.randomness)

    def events(self) -> list[Event]:
        """The events of one release, one a part."""
        return [*self.statistics.events(), self.square.event()]

    def release(self, rows: FloatArray, targets: FloatArray) -> tuple[FloatArray, FloatArray]:
        """(weights [p], replicates of them [500, p])."""
        gram, cross = self.statistics.release(rows, targets)
        square = float(self.square.release(targets * targets - 0.5))
        floor = _FLOOR * self.statistics.spectral_noise
        values, vectors = np.linalg.eigh(gram)
        values = np.maximum(values, floor)
        weights = vectors @ ((vectors.T @ cross) / values)
        records = max(float(gram[-1, -1]) / self.constant**2, 1.0)
        whole = square + records / 2
        # Where noise leaves less than nothing, the deviation of Σt²'s own noise is the least that can be told.
        least = float(np.asarray(self.square.scales).ravel()[0])
        variance = max(whole - float(weights @ cross), least) / records
        stream = self.randomness.fresh("bootstrap")
        sampled = normal(_REPLICATES * self.dimension, stream).reshape(_REPLICATES, -1) @ (vectors * np.sqrt(values)).T
        gram_noise, cross_noise = self._noise(stream)
        again, turned = np.linalg.eigh((vectors * values) @ vectors.T + gram_noise)
        right = vectors @ (values * (vectors.T @ weights)) + np.sqrt(variance) * sampled + cross_noise
        solved = np.einsum("bij,bi->bj", turned, right) / np.maximum(again, floor)
        return weights, np.einsum("bij,bj->bi", turned, solved)

    def _noise(self, stream: Stream) -> tuple[FloatArray, FloatArray]:
        """Noise of the law of the releases, in floating point: on AᵀA [500, p, p] and on Aᵀt [500, p]."""
        p = self.dimension
        shapes = (_REPLICATES, p, p), (_REPLICATES, p)
        gram, cross = self.statistics.gram, self.statistics.cross
        if isinstance(cross, DiscreteLaplaceMechanism):
            square, line = (laplace(math.prod(shape), stream).reshape(shape) for shape in shapes)
            upper = np.triu(square) * gram.scale
            return upper + np.triu(upper, 1).transpose(0, 2, 1), line * cross.scale
        square, line = (normal(math.prod(shape), stream).reshape(shape) for shape in shapes)
        # (Z + Zᵀ)/2 has variance 1 on the diagonal and ½ beside it, as the release has.
        return gram.scale * (square + square.transpose(0, 2, 1)) / 2, line * cross.stddev


@dataclass(frozen=True, kw_only=True)
class CurvatureInference:
    """Standard errors of logistic weights from objective perturbation, by a noisy Hessian at the released weights.

    Guarantee: one release spends `budget` under the declared relation.

    Args:
        budget: Gaussian or pure.
        dimension: number of columns p ≥ 1.
        relation: the neighbouring relation.
        randomness: where the noise comes from; by default a fresh key of this object's own.
    """

    budget: Budget
    dimension: int
    relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE
    randomness: Randomness = field(default_factory=Randomness, repr=False, compare=False)

    @cached_property
    def hessian(self) -> PrivateSecondMoment:
        """The release of Σ q(1 − q)·aaᵀ: the second moments of rows √(q(1 − q))·a, at most ½ long."""
        return PrivateSecondMoment(
            budget=self.budget,
            data_norm=0.5,
            columns=self.dimension,
            relation=self.relation,
            randomness=self.randomness,
        )

    def event(self) -> Event:
        """The event of one release."""
        return self.hessian.event()

    def release(
        self, rows: FloatArray, weights: FloatArray, *, regularization: float, stddev: float
    ) -> tuple[FloatArray, FloatArray]:
        """(weights without the penalty's pull [p], standard errors [p]).

        With F the sum of curvatures, W ≈ θ − (F + λ)⁻¹(λθ + score + noise). So θ ≈ W + λF⁻¹W, of covariance
        F⁻¹(F + s²)F⁻¹.

        Args:
            rows: [n, p].
            weights: released [p].
            regularization: λ.
            stddev: s, the deviation of each entry of the objective's noise.
        """
        curvature = Logistic().hessians(rows @ weights[:, None], np.ones(len(rows)))[:, 0, 0]
        noisy = self.hessian.release(rows * np.sqrt(curvature)[:, None])
        values, vectors = np.linalg.eigh(noisy)
        values = np.maximum(values, _FLOOR * self.hessian.scale * np.sqrt(2.0 * self.dimension))
        unpulled = weights + regularization * (vectors @ ((vectors.T @ weights) / values))
        return unpulled, np.sqrt(np.square(vectors) @ ((values + stddev**2) / values**2))
