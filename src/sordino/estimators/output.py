"""Output perturbation: the exact minimiser of a strongly convex objective, plus noise (floor 4).

Proof: docs/proofs/output-perturbation.md.

References:
    Chaudhuri, Monteleoni, Sarwate 2011, algorithm 1 and corollary 8.
"""

from dataclasses import dataclass, field

import numpy as np

from sordino import checks
from sordino.definitions import NeighboringRelation
from sordino.estimators.losses import Loss
from sordino.estimators.minimiser import minimiser
from sordino.events import Event
from sordino.mechanisms import ArrayGaussianMechanism, KNormMechanism, PureBudget, budget
from sordino.mechanisms.budgets import Budget
from sordino.mechanisms.values import FloatArray
from sordino.randomness import Randomness

__all__ = ["OutputPerturbation"]

_TOLERANCE = 1e-7


@dataclass(frozen=True, kw_only=True)
class OutputPerturbation:
    """The minimiser of Σ ℓ + (λ/2)‖W‖² plus noise at its ℓ2 sensitivity, (L + 2τ)/λ; 2(L + τ)/λ under replace-one.

    The objective is a sum, not a mean, so nothing depends on the number of records, which is private.

    Guarantee: one release spends (epsilon, delta) under the declared relation; ℓ2 K-norm noise for δ = 0.

    Args:
        loss: of scores of rows of norm ≤ 1.
        epsilon: > 0.
        delta: in [0, 1).
        regularization: λ > 0, for rows of norm 1, on every weight; None takes 10·z^⅔ with z the noise multiplier,
            chosen on public data.
        dimension: number of columns p ≥ 1, with the intercept's.
        relation: the neighbouring relation.
        randomness: where the noise comes from; by default a fresh key of this object's own.

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
    relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE
    randomness: Randomness = field(default_factory=Randomness, repr=False, compare=False)

    def __post_init__(self) -> None:
        checks.integer(1, dimension=self.dimension)
        checks.positive(regularization=self.strength)

    @property
    def _budget(self) -> Budget:
        return budget(epsilon=self.epsilon, delta=self.delta)

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
        return (self.loss.lipschitz * self.relation.sensitivity_factor + 2 * _TOLERANCE) / self.strength

    def event(self) -> Event:
        """The event of one release."""
        return self._budget.event()

    def exact(self, rows: FloatArray, targets: FloatArray) -> FloatArray:
        """The minimiser [p, k] before noise. Not private."""
        nothing = np.zeros((self.dimension, self.loss.outputs))
        return minimiser(self.loss, rows, targets, linear=nothing, regularization=self.strength, tolerance=_TOLERANCE)

    def release(self, rows: FloatArray, targets: FloatArray) -> FloatArray:
        """Weights [p, k] for rows [n, p] of norm ≤ 1 and targets [n]."""
        return self.noisy(self.exact(rows, targets))

    def noisy(self, weights: FloatArray) -> FloatArray:
        """Weights plus noise."""
        spent = self._budget
        if isinstance(spent, PureBudget):
            ball = KNormMechanism(
                epsilon=spent.epsilon,
                sensitivity=self.l2_sensitivity,
                norm=2,
                dimension=weights.size,
                randomness=self.randomness,
            )
            return np.asarray(ball.release(weights))
        gaussian = ArrayGaussianMechanism(
            noise_multiplier=spent.noise_multiplier, l2_sensitivity=self.l2_sensitivity, randomness=self.randomness
        )
        return np.asarray(gaussian.release(weights))
