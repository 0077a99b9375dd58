"""Objective perturbation: minimize a convex objective with a random linear term.

Proof: docs/proofs/objective-perturbation.md.

References:
    Chaudhuri, Monteleoni, Sarwate 2011, algorithm 2 (pure). Kifer, Smith, Thakurta 2012, algorithm 1 (Gaussian noise).
    Iyengar, Near, Song, Thakkar, Thakurta, Wang 2019, algorithm 1 (approximate minimizer with output noise).
    Redberg, Koskela, Wang 2023, theorem 3.1 (privacy profile for generalized linear models).
"""

import math
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt
from scipy.linalg import cho_factor, cho_solve

from sordino import checks
from sordino.definitions import NeighboringRelation
from sordino.errors import InvalidArgument
from sordino.estimators.losses import Loss
from sordino.events import ApproximateDP, Event, PureDP
from sordino.mechanisms import (
    ExponentialMechanism,
    GaussianMechanism,
    KNormMechanism,
    PureBudget,
    analytic_noise_multiplier,
    make_budget,
)
from sordino.mechanisms.additive import release_in_l2
from sordino.mechanisms.base import FloatArray, observable_release
from sordino.mechanisms.calibration import Budget
from sordino.randomness import KeyedRNG

# ----------------------------------------------------------------------------------------------------------------------
# The minimizer of a strongly convex sum of losses, to a gradient norm that is fixed in advance.
#
# J(W) = Σᵢ ℓ(aᵢ·W; yᵢ) + ⟨B, W⟩ + (λ/2)‖W‖², all of W penalized, the intercept's weight too: without that J would not
# be strongly convex in every direction, which every proof here needs.
#
# References:
#     Deuflhard 2004, "Newton methods for nonlinear problems", section 3.1 (residual-based damping).
# ----------------------------------------------------------------------------------------------------------------------


_MOST_STEPS = 300
_DENSE = 1200
_BLOCK = 4096


def newton_minimize(
    loss: Loss,
    rows: FloatArray,
    targets: FloatArray,
    *,
    linear: FloatArray,
    regularization: float,
    tolerance: float,
    record_weights: npt.ArrayLike = 1.0,
) -> FloatArray:
    """W [p, k] with ‖∇J(W)‖ ≤ tolerance.

    Newton steps are shortened until the gradient's norm falls; since J is λ-strongly convex such a step always exists,
    so only rounding can stand in the way. Should it do so, the answer is 0 whatever the data: nothing is raised, and
    nothing that wasn't accounted for is returned.

    Args:
        loss: of scores.
        rows: [n, p], each of norm ≤ 1.
        targets: [n].
        linear: B [p, k].
        regularization: λ > 0.
        tolerance: > 0.
        record_weights: [n] in [0, 1], how much each record's loss counts.
    """
    weights = -linear / (regularization + loss.curvature * len(rows))
    counts = np.reshape(record_weights, (-1, 1))

    def gradient(at: FloatArray) -> FloatArray:
        return rows.T @ (counts * loss.gradients(rows @ at, targets)) + linear + regularization * at

    slope = gradient(weights)
    for _ in range(_MOST_STEPS):
        size = float(np.linalg.norm(slope))
        # Half of the tolerance is left to the rounding of the gradient itself.
        if size <= tolerance / 2:
            return weights
        curvatures = counts[:, :, None] * loss.hessians(rows @ weights, targets)
        direction = _newton_direction(rows, curvatures, slope, regularization)
        length = 1.0
        while length > 1e-6:
            tried = weights + length * direction
            slope_there = gradient(tried)
            if float(np.linalg.norm(slope_there)) <= (1 - 0.1 * length) * size:
                break
            length /= 2
        else:
            # Where the loss has kinks in its slope a Newton step may fail; a short step downhill does not.
            tried = weights - slope / (regularization + loss.curvature * len(rows))
            slope_there = gradient(tried)
        weights, slope = tried, slope_there
    return np.zeros_like(weights)


def _newton_direction(rows: FloatArray, curvatures: FloatArray, slope: FloatArray, regularization: float) -> FloatArray:
    if slope.size > _DENSE:
        return -_conjugate_gradients(rows, curvatures, slope, regularization)
    p, k = slope.shape
    hessian = np.zeros((p, k, p, k))
    for start in range(0, len(rows), _BLOCK):
        part, bent = rows[start : start + _BLOCK], curvatures[start : start + _BLOCK]
        for i in range(k):
            for j in range(i, k):
                block = part.T @ (part * bent[:, i, j, None])
                hessian[:, i, :, j] += block
                if i != j:
                    hessian[:, j, :, i] += block
    square = hessian.reshape(p * k, p * k)
    square[np.diag_indices(p * k)] += regularization
    return -cho_solve(cho_factor(square, lower=True), slope.ravel()).reshape(p, k)


def _conjugate_gradients(
    rows: FloatArray, curvatures: FloatArray, slope: FloatArray, regularization: float
) -> FloatArray:
    """(H + λ)⁻¹·slope to a tenth of a thousandth, without forming H."""

    def product(direction: FloatArray) -> FloatArray:
        bent = np.einsum("nij,nj->ni", curvatures, rows @ direction)
        return rows.T @ bent + regularization * direction

    solution = np.zeros_like(slope)
    residual, step = slope.copy(), slope.copy()
    size = float((residual * residual).sum())
    goal = 1e-8 * size
    for _ in range(1000):
        if size <= goal:
            break
        image = product(step)
        rate = size / float((step * image).sum())
        solution += rate * step
        residual -= rate * image
        smaller = float((residual * residual).sum())
        step = residual + smaller / size * step
        size = smaller
    return solution


# ----------------------------------------------------------------------------------------------------------------------
# Objective perturbation: minimize a convex objective with a random linear term.
# ----------------------------------------------------------------------------------------------------------------------


# What pays for the distance between the minimizer and what the solver returns: this share of ε and of δ.
_OUTPUT_SHARE = 1e-3
_TOLERANCE = 1e-8


@dataclass(frozen=True, kw_only=True)
class ObjectivePerturbation:
    """W near the minimizer of Σ ℓ + (λ/2)‖W‖² + ⟨B, W⟩ with a random B, plus a tiny output noise.

    With j the cost of the change of variables, s the deviation of B and L the loss's Lipschitz constant, the release
    spends δ(ε) = corners·H(ε − j), where H is the privacy profile of one Gaussian with multiplier s/L. For the
    logistic loss j = 0 as soon as λ ≥ 1/ε: where a record pulls hardest on the minimizer its curvature vanishes, so
    the two costs never fall due together.

    Guarantee: one release is (epsilon, delta)-private for one record added, removed or zeroed; pure with δ = 0.

    Args:
        loss: of scores of rows of norm ≤ 1.
        epsilon: > 0.
        delta: in [0, 1).
        regularization: λ > 0, for rows of norm 1, on every weight.
        dimension: number of columns p ≥ 1, with the intercept's.
        rng: where the noise comes from; by default a fresh key of this object's own.

    Example:
        >>> from sordino.estimators.losses import Logistic
        >>> release = ObjectivePerturbation(loss=Logistic(), epsilon=1.0, delta=1e-5, regularization=1.01, dimension=3)
        >>> round(release.scale, 3)
        3.734
    """

    loss: Loss
    epsilon: float
    delta: float
    regularization: float
    dimension: int
    rng: KeyedRNG = field(default_factory=KeyedRNG, repr=False, compare=False)

    def __post_init__(self) -> None:
        checks.positive(epsilon=self.epsilon)
        checks.probability(delta=self.delta, one=False)
        checks.positive(regularization=self.regularization)
        checks.integer(1, dimension=self.dimension)
        if self.jacobian_cost >= self._objective_epsilon:
            raise InvalidArgument(
                f"regularization must be > {min_regularization(self.loss, self._objective_epsilon, 1.0):.3g} for "
                f"epsilon={self.epsilon:g}, got {self.regularization:g}. Raise it, or leave it to the default."
            )

    @property
    def _objective_epsilon(self) -> float:
        return self.epsilon * (1 - _OUTPUT_SHARE)

    @property
    def jacobian_cost(self) -> float:
        """j: what the change of variables from B to W adds to ε.

        Log det(I + S/λ) for a score Hessian S of this trace and rank, at most: equal eigenvalues are the worst.
        """
        if self.loss.flat_at_corners and self.regularization * self._objective_epsilon >= 1:
            return 0.0
        return self.loss.rank * math.log1p(self.loss.trace / (self.loss.rank * self.regularization))

    @cached_property
    def scale(self) -> float:
        """Deviation s of every entry of B; for δ = 0 the scale γ of its density ∝ exp(−‖B‖/γ)."""
        rest = self._objective_epsilon - self.jacobian_cost
        if self.delta == 0:
            return self.loss.lipschitz / rest
        delta = self.delta * (1 - _OUTPUT_SHARE) / self.loss.corners
        return self.loss.lipschitz * analytic_noise_multiplier(epsilon=rest, delta=delta)

    @property
    def stddev(self) -> float:
        """Deviation of every entry of B, for δ = 0 too: ‖B‖ is Gamma distributed, so E‖B‖² = γ²·m(m + 1)."""
        return self.scale if self.delta else self.scale * math.sqrt(self.dimension * self.loss.outputs + 1)

    @property
    def output_sensitivity(self) -> float:
        """Two answers of the solver that belong to one minimizer are at most this far apart: 2τ/λ."""
        return 2 * _TOLERANCE / self.regularization

    def event(self) -> Event:
        """The event of one release."""
        if self.delta == 0:
            return PureDP(epsilon=self.epsilon)
        return ApproximateDP(epsilon=self.epsilon, delta=self.delta)

    @observable_release
    def release(self, rows: FloatArray, targets: FloatArray, record_weights: npt.ArrayLike = 1.0) -> FloatArray:
        """Weights [p, k] for rows [n, p] of norm ≤ 1 and targets [n], each record weighted by a number in [0, 1]."""
        exact = newton_minimize(
            self.loss,
            rows,
            targets,
            linear=self._noise(),
            regularization=self.regularization,
            tolerance=_TOLERANCE,
            record_weights=record_weights,
        )
        return release_in_l2(exact, budget=self._output_budget, l2_sensitivity=self.output_sensitivity, rng=self.rng)

    def _noise(self) -> FloatArray:
        shape = (self.dimension, self.loss.outputs)
        if self.delta == 0:
            ball = KNormMechanism(epsilon=1.0, sensitivity=self.scale, norm=2, dimension=math.prod(shape), rng=self.rng)
            return ball.noise().reshape(shape)
        gaussian = GaussianMechanism(noise_multiplier=self.scale, l2_sensitivity=1.0, rng=self.rng)
        return np.asarray(gaussian.release(np.zeros(shape)))

    @cached_property
    def _output_budget(self) -> Budget:
        return make_budget(epsilon=self.epsilon * _OUTPUT_SHARE, delta=self.delta * _OUTPUT_SHARE)


def min_regularization(loss: Loss, epsilon: float, share: float) -> float:
    """The λ for which the change of variables costs `share` of ε."""
    general = loss.trace / (loss.rank * math.expm1(min(share * epsilon / loss.rank, 700.0)))
    return min(general, 1 / epsilon) if loss.flat_at_corners else general


# ----------------------------------------------------------------------------------------------------------------------
# Output perturbation: the exact minimizer of a strongly convex objective, plus noise.
#
# Proof: docs/proofs/output-perturbation.md.
#
# References:
#     Chaudhuri, Monteleoni, Sarwate 2011, algorithm 1 and corollary 8.
# ----------------------------------------------------------------------------------------------------------------------


_OUTPUT_TOLERANCE = 1e-7


@dataclass(frozen=True, kw_only=True)
class OutputPerturbation:
    """The minimizer of Σ ℓ + (λ/2)‖W‖² plus noise at its ℓ2 sensitivity, (L + 2τ)/λ; 2(L + τ)/λ under replace-one.

    The objective is a sum, not a mean, so nothing depends on the number of records, which is private.

    Guarantee: one release spends (epsilon, delta) under the declared relation; ℓ2 K-norm noise for δ = 0.

    Args:
        loss: of scores of rows of norm ≤ 1.
        epsilon: > 0.
        delta: in [0, 1).
        regularization: λ > 0, for rows of norm 1, on every weight; None takes 10·z^⅔ with z the noise multiplier,
            chosen on public data.
        dimension: number of columns p ≥ 1, with the intercept's.
        neighboring_relation: the neighboring relation.
        rng: where the noise comes from; by default a fresh key of this object's own.

    Example:
        >>> from sordino.estimators.losses import Logistic
        >>> release = OutputPerturbation(loss=Logistic(), epsilon=1.0, delta=1e-5, regularization=10.0, dimension=3)
        >>> round(release.l2_sensitivity, 4)
        0.1
    """

    loss: Loss
    epsilon: float
    delta: float
    regularization: float | None = None
    dimension: int
    neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE
    rng: KeyedRNG = field(default_factory=KeyedRNG, repr=False, compare=False)

    def __post_init__(self) -> None:
        checks.integer(1, dimension=self.dimension)
        checks.positive(regularization=self.strength)

    @property
    def _budget(self) -> Budget:
        return make_budget(epsilon=self.epsilon, delta=self.delta)

    @property
    def strength(self) -> float:
        """λ."""
        if self.regularization is not None:
            return self.regularization
        spent = self._budget
        # For K-norm noise: the Gaussian multiplier of the same expected squared norm, about.
        size = self.dimension * self.loss.outputs
        multiplier = size**0.5 / spent.epsilon if isinstance(spent, PureBudget) else spent.noise_multiplier
        return 10.0 * multiplier ** (2 / 3)

    @property
    def l2_sensitivity(self) -> float:
        """How far one unit moves what the solver returns."""
        return (
            self.loss.lipschitz * self.neighboring_relation.sensitivity_factor + 2 * _OUTPUT_TOLERANCE
        ) / self.strength

    def event(self) -> Event:
        """The event of one release."""
        return self._budget.event()

    def exact_value(self, rows: FloatArray, targets: FloatArray, record_weights: npt.ArrayLike = 1.0) -> FloatArray:
        """The minimizer [p, k] before noise. Not private."""
        return newton_minimize(
            self.loss,
            rows,
            targets,
            linear=np.zeros((self.dimension, self.loss.outputs)),
            regularization=self.strength,
            tolerance=_OUTPUT_TOLERANCE,
            record_weights=record_weights,
        )

    def release(self, rows: FloatArray, targets: FloatArray, record_weights: npt.ArrayLike = 1.0) -> FloatArray:
        """Weights [p, k] for rows [n, p] of norm ≤ 1 and targets [n], each record weighted by a number in [0, 1]."""
        return self.noisy(self.exact_value(rows, targets, record_weights))

    def noisy(self, weights: FloatArray) -> FloatArray:
        """Weights plus noise."""
        return release_in_l2(weights, budget=self._budget, l2_sensitivity=self.l2_sensitivity, rng=self.rng)


# ----------------------------------------------------------------------------------------------------------------------
# The exponential mechanism over a declared finite list of weights: exact, with δ = 0.
#
# Over a continuous range the mechanism would need exact samples of a density; Markov chains that stop after finitely
# many steps give only approximate ones, whose privacy is unknown. So there is no such method here.
#
# Proof: docs/proofs/exponential-mechanism.md; the sensitivity is that of `CandidateSelection.sensitivity`.
#
# References:
#     McSherry, Talwar 2007. Bassily, Smith, Thakurta 2014, section 3 (losses relative to one fixed model).
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class CandidateSelection:
    """One of the declared candidates, with probability growing as its summed loss falls.

    Guarantee: one release is ``BoundedRange(epsilon)`` under the declared relation: pure ε-privacy.

    Args:
        loss: of scores of rows of norm ≤ 1.
        epsilon: > 0.
        candidates: weights [m, p, k], public.
        neighboring_relation: the neighboring relation.
        rng: where the noise comes from; by default a fresh key of this object's own.

    Example:
        >>> from sordino.estimators.losses import Logistic
        >>> grid = np.array([[[-1.0]], [[0.0]], [[1.0]]])
        >>> CandidateSelection(loss=Logistic(), epsilon=1.0, candidates=grid).sensitivity
        1.0
    """

    loss: Loss
    epsilon: float
    candidates: FloatArray
    neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE
    rng: KeyedRNG = field(default_factory=KeyedRNG, repr=False, compare=False)

    def __post_init__(self) -> None:
        checks.positive(epsilon=self.epsilon)
        if self.candidates.ndim != 3 or 0 in self.candidates.shape or not np.isfinite(self.candidates).all():
            raise InvalidArgument(
                f"candidates must be finite weights, at least one, got shape {self.candidates.shape}. Declare them."
            )

    @property
    def sensitivity(self) -> float:
        """How far one unit moves a score: a record's loss differs from that of zero weights by at most L·‖W‖."""
        farthest = float(np.sqrt(np.square(self.candidates).sum(axis=(1, 2))).max())
        # Candidates that are all zero are all alike; any positive number serves.
        return max(self.loss.lipschitz * farthest * self.neighboring_relation.sensitivity_factor, 1e-12)

    @property
    def _mechanism(self) -> ExponentialMechanism:
        return ExponentialMechanism(epsilon=self.epsilon, sensitivity=self.sensitivity, rng=self.rng)

    def event(self) -> Event:
        """The event of one release."""
        return self._mechanism.event()

    def scores(self, rows: FloatArray, targets: FloatArray, record_weights: npt.ArrayLike = 1.0) -> FloatArray:
        """Minus the summed loss of each candidate, relative to zero weights [m]. Not private."""

        def losses(scores: FloatArray) -> FloatArray:
            return np.asarray(record_weights) * self.loss.values(scores, targets)

        nothing = losses(np.zeros((len(rows), self.loss.outputs)))
        found = [(nothing - losses(rows @ weights)).sum() for weights in self.candidates]
        return np.array(found, dtype=np.float64)

    def release(self, rows: FloatArray, targets: FloatArray, record_weights: npt.ArrayLike = 1.0) -> FloatArray:
        """The chosen weights [p, k], each record weighted by a number in [0, 1]."""
        return self.candidates[self._mechanism.release(self.scores(rows, targets, record_weights))].copy()
