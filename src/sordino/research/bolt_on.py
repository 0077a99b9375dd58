"""Bolt-on private descent: ordinary stochastic gradient descent over permutations, and noise on its last weights alone.

Nothing is clipped or noised on the way, so any solver of this form can be used as it is. One record moves the weights
of a convex, smooth loss by a bound that the number of passes, the step and the batch size fix in advance.

Proof: docs/proofs/bolt-on-descent.md.

References:
    Wu, Li, Kumar, Chaudhuri, Jha, Naughton 2017, "Bolt-on differential privacy for scalable stochastic gradient
    descent-based analytics", algorithm 1 and lemma 7.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from sordino import checks
from sordino.definitions import NeighboringRelation
from sordino.errors import InvalidArgument
from sordino.events import Event
from sordino.mechanisms import make_budget
from sordino.mechanisms.additive import release_in_l2
from sordino.mechanisms.base import FloatArray
from sordino.randomness import KeyedRNG

if TYPE_CHECKING:
    from sordino.estimators.losses import Loss

# Steps of two runs next to each other are computed in double precision: what rounding adds is far below this share.
_ROUNDING = 1e-6


@dataclass(frozen=True, kw_only=True)
class BoltOnDescent:
    """Weights after `passes` over a random permutation of the records, plus noise at their ℓ2 sensitivity.

    Guarantee: one release spends (epsilon, delta) for one record replaced, or zeroed out; the number of records is
    public, as it fixes the batches. Pure with δ = 0.

    Args:
        loss: convex, of scores of rows of norm ≤ 1.
        epsilon: > 0.
        delta: in [0, 1).
        dimension: number of columns p ≥ 1.
        learning_rate: η in (0, 2/curvature], the same at every step; None takes 1/curvature.
        passes: k ≥ 1.
        batch_size: b ≥ 1; sums of gradients are divided by it, those of the last, smaller batch too.
        neighboring_relation: ``replace_one`` or ``replace_special``.
        rng: of the permutation and of the noise; by default a fresh key of this object's own.

    Example:
        >>> from sordino.estimators.losses import Logistic
        >>> BoltOnDescent(loss=Logistic(), epsilon=1.0, delta=1e-6, dimension=3, passes=5, batch_size=50).l2_sensitivity
        0.8000008
    """

    loss: "Loss"
    epsilon: float
    delta: float
    dimension: int
    learning_rate: float | None = None
    passes: int = 5
    batch_size: int = 50
    neighboring_relation: NeighboringRelation = NeighboringRelation.REPLACE_ONE
    rng: KeyedRNG = field(default_factory=KeyedRNG, repr=False, compare=False)

    def __post_init__(self) -> None:
        checks.integer(1, dimension=self.dimension)
        checks.integer(1, passes=self.passes)
        checks.integer(1, batch_size=self.batch_size)
        make_budget(epsilon=self.epsilon, delta=self.delta)
        if checks.positive(learning_rate=self.step) > 2.0 / self.loss.curvature:
            raise InvalidArgument(
                f"learning_rate must be ≤ {2.0 / self.loss.curvature:g} for this loss, got {self.step:g}: beyond it "
                "steps may drive two runs apart. Lower it."
            )
        if self.neighboring_relation is NeighboringRelation.ADD_OR_REMOVE_ONE:
            raise InvalidArgument(
                "neighboring_relation must be 'replace_one' or 'replace_special', got 'add_or_remove_one': a record "
                "more moves all later batches. Use objective perturbation."
            )

    @property
    def step(self) -> float:
        """η."""
        return 1.0 / self.loss.curvature if self.learning_rate is None else self.learning_rate

    @property
    def l2_sensitivity(self) -> float:
        """k·η·L/b, twice that where a record is replaced."""
        moved = self.passes * self.step * self.loss.lipschitz / self.batch_size
        return round(moved * self.neighboring_relation.sensitivity_factor * (1 + _ROUNDING), 15)

    def event(self) -> Event:
        """The event of one release."""
        return make_budget(epsilon=self.epsilon, delta=self.delta).event()

    def exact_value(self, rows: FloatArray, targets: FloatArray, order: np.ndarray) -> FloatArray:
        """The last weights [p, k] before noise, records visited in `order` [n] on every pass. Not private."""
        weights = np.zeros((self.dimension, self.loss.outputs))
        for _ in range(self.passes):
            for start in range(0, len(order), self.batch_size):
                batch = order[start : start + self.batch_size]
                slopes = rows[batch].T @ self.loss.gradients(rows[batch] @ weights, targets[batch])
                weights = weights - self.step / self.batch_size * slopes
        return weights

    def release(self, rows: FloatArray, targets: FloatArray) -> FloatArray:
        """Weights [p, k] for rows [n, p] of norm ≤ 1 and targets [n]."""
        order = np.argsort(self.rng.new_stream("bolt-on-permutation").uniform(len(rows)), kind="stable")
        weights = self.exact_value(rows, targets, order)
        budget = make_budget(epsilon=self.epsilon, delta=self.delta)
        return release_in_l2(weights, budget=budget, l2_sensitivity=self.l2_sensitivity, rng=self.rng)
