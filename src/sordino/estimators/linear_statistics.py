"""Sufficient statistics of least squares with noise, and what can be solved from them.

Proof: docs/proofs/sufficient-statistics.md.

References:
    Vu, Slavkovic 2009; Foulds, Geumlek, Welling, Chaudhuri 2016 (sufficient statistics with Laplace noise).
    Wang 2018, "Revisiting differentially private linear regression", algorithm 2 (AdaSSP).
"""

import math
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from scipy.special import ndtri

from sordino import checks
from sordino.definitions import NeighboringRelation
from sordino.estimators.base import SumsMechanism, sums_mechanism
from sordino.estimators.losses import Logistic
from sordino.events import Event, compose
from sordino.mechanisms import (
    DiscreteLaplaceMechanism,
    GridGaussianMechanism,
    PrivateSecondMoment,
    PrivateSum,
    PureBudget,
)
from sordino.mechanisms.base import FloatArray
from sordino.mechanisms.calibration import Budget, GaussianBudget
from sordino.mechanisms.samplers import laplace, normal
from sordino.randomness import KeyedRNG, RandomStream

_GRID_BITS = 30
_NOISE_SHARE = 0.5  # chosen on six public sets, shown on six others (`./run bench defaults`)
# The computed smallest eigenvalue of a matrix of norm n is off by about n·1e-15: below this share of the sensitivity.
_EIGENVALUE_ROUNDING = 1e-6


def cross_moment(rows: FloatArray, targets: FloatArray) -> FloatArray:
    """Aᵀt [p], rounded towards zero record by record and added as integers: sums of floats may move by more."""
    steps = np.trunc(np.ldexp(rows * targets[:, None], _GRID_BITS)).astype(np.int64)
    return np.ldexp(steps.sum(axis=0).astype(np.float64), -_GRID_BITS)


@dataclass(frozen=True, kw_only=True)
class _Statistics:
    """Releases of statistics of rows of p columns, under one budget."""

    budget: Budget
    dimension: int
    neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE
    rng: KeyedRNG = field(default_factory=KeyedRNG, repr=False, compare=False)

    def __post_init__(self) -> None:
        checks.integer(1, dimension=self.dimension)

    def _least_squares(self, budget: Budget) -> "LeastSquaresStatistics":
        return LeastSquaresStatistics(
            budget=budget, dimension=self.dimension, neighboring_relation=self.neighboring_relation, rng=self.rng
        )

    def _second_moment(self, budget: Budget, data_norm: float) -> PrivateSecondMoment:
        return PrivateSecondMoment(
            budget=budget,
            data_norm=data_norm,
            columns=self.dimension,
            neighboring_relation=self.neighboring_relation,
            rng=self.rng,
        )


@dataclass(frozen=True, kw_only=True)
class LeastSquaresStatistics(_Statistics):
    """AᵀA and Aᵀt with exact noise, for rows of norm ≤ 1 and targets in [−1, 1].

    Guarantee: one release spends `budget` under the declared relation; the two parts' shares add up to it.

    Args:
        budget: Gaussian, or pure for discrete Laplace noise.
        dimension: number of columns p ≥ 1.
        neighboring_relation: the neighboring relation.
        rng: where the noise comes from; by default a fresh key of this object's own.

    Example:
        >>> from sordino.mechanisms import make_budget
        >>> statistics = LeastSquaresStatistics(budget=make_budget(epsilon=1.0, delta=1e-6), dimension=3)
        >>> round(statistics.gram.scale / statistics.cross.stddev, 3)
        1.0
    """

    @cached_property
    def gram(self) -> PrivateSecondMoment:
        """The release of AᵀA."""
        share, _ = self.budget.split(1, 1)
        return self._second_moment(share, 1.0)

    @cached_property
    def cross(self) -> SumsMechanism:
        """The release of Aᵀt, of ℓ2 sensitivity 1 and ℓ1 sensitivity √p; twice that under replace-one."""
        _, share = self.budget.split(1, 1)
        factor = self.neighboring_relation.sensitivity_factor
        return sums_mechanism(
            share,
            l1_sensitivity=factor * math.sqrt(self.dimension),
            l2_sensitivity=factor,
            dimension=self.dimension,
            rng=self.rng,
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
            regularization: λ ≥ 0 added to AᵀA, at least half of `spectral_noise`, which None takes.
        """
        gram, cross = self.release(rows, targets)
        values, vectors = np.linalg.eigh(gram)
        # Half of the noise's largest eigenvalue: more biases directions that are well seen, less lets noise through.
        added = max(regularization or 0.0, _NOISE_SHARE * self.spectral_noise)
        return vectors @ ((vectors.T @ cross) / (np.maximum(values, 0.0) + added))


@dataclass(frozen=True, kw_only=True)
class FunctionalMechanism:
    """Logistic regression by the functional mechanism: the loss is a polynomial, and its coefficients are noisy.

    At 0 the loss log(1 + e^{−t·s}) is log 2 − t·s/2 + s²/8 up to third order, so the sum over records is a quadratic
    whose coefficients are AᵀA and Aᵀt; its minimizer is 2(AᵀA + 4λ)⁻¹Aᵀt. It is shrunk where scores are large.

    Guarantee: that of `statistics`: one release spends its budget.

    Args:
        statistics: for rows of norm ≤ 1 and targets ±1.
        regularization: λ ≥ 0 of (λ/2)‖w‖², or None for what noise needs.

    References:
        Zhang, Zhang, Xiao, Yang, Winslett 2012, "Functional mechanism: regression analysis under differential privacy";
        docs/proofs/functional-mechanism.md.
    """

    statistics: LeastSquaresStatistics
    regularization: float | None = None

    def event(self) -> Event:
        """The event of one release."""
        return compose(self.statistics.events())

    def release(self, rows: FloatArray, targets: FloatArray) -> FloatArray:
        """Weights [p, 1]."""
        added = None if self.regularization is None else 4.0 * checks.non_negative(regularization=self.regularization)
        return 2.0 * self.statistics.weights(rows, targets, regularization=added)[:, None]


@dataclass(frozen=True, kw_only=True)
class AdaptiveStatistics(_Statistics):
    """AdaSSP: sufficient statistics, and a regularization chosen by a noisy smallest eigenvalue.

    Wang's algorithm gives each of its three releases (ε/3, δ/3); here they are three shares of one Gaussian budget,
    which for the same (ε, δ) is 1.6 times less noise at ε = 1, δ = 10⁻⁶.

    Guarantee: one release spends `budget` under the declared relation.

    Args:
        budget: Gaussian.
        dimension: number of columns p ≥ 1.
        failure: probability, in (0, 1), with which the regularization may be too small for the noise.
        neighboring_relation: the neighboring relation.
        rng: where the noise comes from; by default a fresh key of this object's own.

    Example:
        >>> from sordino.mechanisms import GaussianBudget
        >>> round(AdaptiveStatistics(budget=GaussianBudget(noise_multiplier=1.0), dimension=4).stddev, 4)
        1.7321
    """

    budget: GaussianBudget
    failure: float = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.probability(zero=False, one=False, failure=self.failure)

    @cached_property
    def statistics(self) -> LeastSquaresStatistics:
        """AᵀA and Aᵀt, with two thirds of the budget."""
        share, _ = self.budget.split(2, 1)
        return self._least_squares(share)

    @cached_property
    def eigenvalue(self) -> GridGaussianMechanism:
        """The smallest eigenvalue of AᵀA: by Weyl's inequality a row moves it by at most 1, exchanged rows too."""
        _, share = self.budget.split(2, 1)
        return GridGaussianMechanism(
            noise_multiplier=share.noise_multiplier,
            l2_sensitivity=1.0 + _EIGENVALUE_ROUNDING,
            rng=self.rng,
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


# ----------------------------------------------------------------------------------------------------------------------
# How far private coefficients may be from the population's: intervals that count the noise.
#
# Both ways state an asymptotic distribution, sampling and privacy noise together; neither holds for small tables.
#
# Proof and measured coverage: docs/proofs/confidence-intervals.md.
#
# References:
#     Ferrando, Wang, Sheldon 2022, "Parametric bootstrap for differentially private confidence intervals", section 5.
#     Wang, Kifer, Lee 2019, "Differentially private confidence intervals for empirical risk minimization", section 4.
# ----------------------------------------------------------------------------------------------------------------------


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
class RegressionInference(_Statistics):
    """Least squares from noisy AᵀA and Aᵀt, with Σt² for the residual variance, and a parametric bootstrap of it.

    Each replicate draws Aᵀt from the fitted model with normal residuals, adds fresh noise of the same kind to all
    statistics and solves again: post-processing of what was released.

    Guarantee: one release spends `budget` under the declared relation: 9/10 on the two moments, 1/10 on Σt².

    Args:
        budget: Gaussian or pure.
        dimension: number of columns p ≥ 2, the last one constant.
        constant: its value, > 0, which tells the number of records from AᵀA.
        neighboring_relation: the neighboring relation.
        rng: where the noise comes from; by default a fresh key of this object's own.
    """

    constant: float

    def __post_init__(self) -> None:
        checks.integer(2, dimension=self.dimension)
        checks.positive(constant=self.constant)

    @cached_property
    def statistics(self) -> LeastSquaresStatistics:
        """The release of AᵀA and Aᵀt."""
        share, _ = self.budget.split(9, 1)
        return self._least_squares(share)

    @cached_property
    def square(self) -> PrivateSum:
        """The release of Σ(t² − ½), which one record moves by at most ½."""
        _, share = self.budget.split(9, 1)
        return PrivateSum(
            budget=share, bounds=(-0.5, 0.5), neighboring_relation=self.neighboring_relation, rng=self.rng
        )

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
        # Where noise leaves less than nothing, the deviation of Σt²'s own noise is the least that can be known.
        least = float(np.asarray(self.square.scales).ravel()[0])
        variance = max(whole - float(weights @ cross), least) / records
        stream = self.rng.new_stream("bootstrap")
        sampled = normal(_REPLICATES * self.dimension, stream).reshape(_REPLICATES, -1) @ (vectors * np.sqrt(values)).T
        gram_noise, cross_noise = self._noise(stream)
        again, turned = np.linalg.eigh((vectors * values) @ vectors.T + gram_noise)
        right = vectors @ (values * (vectors.T @ weights)) + np.sqrt(variance) * sampled + cross_noise
        solved = np.einsum("bij,bi->bj", turned, right) / np.maximum(again, floor)
        return weights, np.einsum("bij,bj->bi", turned, solved)

    def _noise(self, stream: RandomStream) -> tuple[FloatArray, FloatArray]:
        """Noise of the distribution of the releases, in floating point: on AᵀA [500, p, p] and on Aᵀt [500, p]."""
        p = self.dimension
        shapes = (_REPLICATES, p, p), (_REPLICATES, p)
        gram, cross = self.statistics.gram, self.statistics.cross
        if isinstance(cross, DiscreteLaplaceMechanism):
            square, line = (laplace(math.prod(shape), stream).reshape(shape) for shape in shapes)
            upper = np.triu(square) * gram.scale
            return upper + np.triu(upper, 1).transpose(0, 2, 1), line * cross.scale
        square, line = (normal(math.prod(shape), stream).reshape(shape) for shape in shapes)
        # (Z + Zᵀ)/2 has variance 1 on the diagonal and ½ off it, as the release has.
        return gram.scale * (square + square.transpose(0, 2, 1)) / 2, line * cross.stddev


@dataclass(frozen=True, kw_only=True)
class CurvatureInference(_Statistics):
    """Standard errors of logistic weights from objective perturbation, by a noisy Hessian at the released weights.

    Guarantee: one release spends `budget` under the declared relation.

    Args:
        budget: Gaussian or pure.
        dimension: number of columns p ≥ 1.
        neighboring_relation: the neighboring relation.
        rng: where the noise comes from; by default a fresh key of this object's own.
    """

    @cached_property
    def hessian(self) -> PrivateSecondMoment:
        """The release of Σ q(1 − q)·aaᵀ: the second moments of rows √(q(1 − q))·a, at most ½ long."""
        return self._second_moment(self.budget, 0.5)

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
