"""Objective perturbation: minimise a convex objective with a random linear term (floor 4).

Proof: docs/proofs/objective-perturbation.md.

References:
    Chaudhuri, Monteleoni, Sarwate 2011, algorithm 2 (pure). Kifer, Smith, Thakurta 2012, algorithm 1 (Gaussian noise).
    Iyengar, Near, Song, Thakkar, Thakurta, Wang 2019, algorithm 1 (approximate minimiser with output noise).
    Redberg, Koskela, Wang 2023, theorem 3.1 (privacy profile for generalised linear models).
"""

import math
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from sordino import checks
from sordino.errors import InvalidArgument
from sordino.estimators.losses import Loss
from sordino.estimators.minimiser import minimiser
from sordino.events import ApproximateDP, Event, PureDP
from sordino.mechanisms import ArrayGaussianMechanism, KNormMechanism, analytic_noise_multiplier
from sordino.mechanisms.releases import recordable
from sordino.mechanisms.values import FloatArray
from sordino.randomness import Randomness

__all__ = ["ObjectivePerturbation"]

# What pays for the distance between the minimiser and what the solver returns: this share of ε and of δ.
_OUTPUT_SHARE = 1e-3
_TOLERANCE = 1e-8


@dataclass(frozen=True, kw_only=True)
class ObjectivePerturbation:
    """W near the minimiser of Σ ℓ + (λ/2)‖W‖² + ⟨B, W⟩ with a random B, plus a tiny output noise.

    With j the cost of the change of variables, s the deviation of B and L the loss's Lipschitz constant, the release
    spends δ(ε) = corners·H(ε − j), where H is the privacy profile of one Gaussian with multiplier s/L. For the
    logistic loss j = 0 as soon as λ ≥ 1/ε: where a record pulls hardest on the minimiser its curvature vanishes, so
    the two costs never fall due together.

    Guarantee: one release is (epsilon, delta)-private for one record added, removed or zeroed; pure with δ = 0.

    Args:
        loss: of scores of rows of norm ≤ 1.
        epsilon: > 0.
        delta: in [0, 1).
        regularization: λ > 0, for rows of norm 1, on every weight.
        dimension: number of columns p ≥ 1, with the intercept's.
        randomness: where the noise comes from; by default a fresh key of this object's own.

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
    randomness: Randomness = field(default_factory=Randomness, repr=False, compare=False)

    def __post_init__(self) -> None:
        checks.positive(epsilon=self.epsilon)
        checks.probability(delta=self.delta, one=False)
        checks.positive(regularization=self.regularization)
        checks.integer(1, dimension=self.dimension)
        if self.jacobian_cost >= self._objective_epsilon:
            raise InvalidArgument(
                f"regularization must be > {least_regularization(self.loss, self._objective_epsilon, 1.0):.3g} for "
                f"epsilon={self.epsilon:g}, got {self.regularization:g}. Raise it, or leave it to the default."
            )

    @property
    def _objective_epsilon(self) -> float:
        return self.epsilon * (1 - _OUTPUT_SHARE)

    @property
    def jacobian_cost(self) -> float:
        """j: what the change of variables from B to W adds to ε."""
        if self.loss.flat_at_corners and self.regularization * self._objective_epsilon >= 1:
            return 0.0
        return _jacobian_cost(self.loss, self.regularization)

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
        """Two answers of the solver that belong to one minimiser are at most this far apart: 2τ/λ."""
        return 2 * _TOLERANCE / self.regularization

    def event(self) -> Event:
        """The event of one release."""
        if self.delta == 0:
            return PureDP(epsilon=self.epsilon)
        return ApproximateDP(epsilon=self.epsilon, delta=self.delta)

    @recordable
    def release(self, rows: FloatArray, targets: FloatArray) -> FloatArray:
        """Weights [p, k] for rows [n, p] of norm ≤ 1 and targets [n]."""
        exact = minimiser(
            self.loss,
            rows,
            targets,
            linear=self._noise(),
            regularization=self.regularization,
            tolerance=_TOLERANCE,
        )
        return self._blurred(exact)

    def _noise(self) -> FloatArray:
        shape = (self.dimension, self.loss.outputs)
        if self.delta == 0:
            ball = KNormMechanism(
                epsilon=1.0, sensitivity=self.scale, norm=2, dimension=math.prod(shape), randomness=self.randomness
            )
            return ball.noise().reshape(shape)
        gaussian = ArrayGaussianMechanism(noise_multiplier=self.scale, l2_sensitivity=1.0, randomness=self.randomness)
        return np.asarray(gaussian.release(np.zeros(shape)))

    @cached_property
    def _output_multiplier(self) -> float:
        """Noise multiplier of the Gaussian output noise."""
        return analytic_noise_multiplier(epsilon=self.epsilon * _OUTPUT_SHARE, delta=self.delta * _OUTPUT_SHARE)

    def _blurred(self, weights: FloatArray) -> FloatArray:
        if self.delta == 0:
            ball = KNormMechanism(
                epsilon=self.epsilon * _OUTPUT_SHARE,
                sensitivity=self.output_sensitivity,
                norm=2,
                dimension=weights.size,
                randomness=self.randomness,
            )
            return np.asarray(ball.release(weights))
        gaussian = ArrayGaussianMechanism(
            noise_multiplier=self._output_multiplier,
            l2_sensitivity=self.output_sensitivity,
            randomness=self.randomness,
        )
        return np.asarray(gaussian.release(weights))


def _jacobian_cost(loss: Loss, regularization: float) -> float:
    """Log det(I + S/λ) for a score Hessian S of this trace and rank, at most: equal eigenvalues are the worst."""
    return loss.rank * math.log1p(loss.trace / (loss.rank * regularization))


def least_regularization(loss: Loss, epsilon: float, share: float) -> float:
    """The λ for which the change of variables costs `share` of ε."""
    general = loss.trace / (loss.rank * math.expm1(min(share * epsilon / loss.rank, 700.0)))
    return min(general, 1 / epsilon) if loss.flat_at_corners else general
