"""The exponential mechanism over a declared finite list of weights (floor 4): exact, with δ = 0.

Over a continuous range the mechanism would need exact samples of a density; Markov chains that stop after finitely many
steps give only approximate ones, whose privacy nobody knows. So there is no such method here.

Proof: docs/proofs/exponential-mechanism.md; the sensitivity is that of `CandidateChoice.sensitivity`.

References:
    McSherry, Talwar 2007. Bassily, Smith, Thakurta 2014, section 3 (losses relative to one fixed model).
"""

from dataclasses import dataclass, field

import numpy as np

from sordino import checks
from sordino.definitions import NeighboringRelation
from sordino.errors import InvalidArgument
from sordino.estimators.losses import Loss
from sordino.events import Event
from sordino.mechanisms import ExponentialMechanism
from sordino.mechanisms.values import FloatArray
from sordino.randomness import Randomness

__all__ = ["CandidateChoice"]


@dataclass(frozen=True, kw_only=True)
class CandidateChoice:
    """One of the declared candidates, with probability growing as its summed loss falls.

    Guarantee: one release is ``BoundedRange(epsilon)`` under the declared relation: pure ε-privacy.

    Args:
        loss: of scores of rows of norm ≤ 1.
        epsilon: > 0.
        candidates: weights [m, p, k], public.
        relation: the neighbouring relation.
        randomness: where the noise comes from; by default a fresh key of this object's own.

    Example:
        >>> from sordino.estimators.losses import Logistic
        >>> grid = np.array([[[-1.0]], [[0.0]], [[1.0]]])
        >>> CandidateChoice(loss=Logistic(), epsilon=1.0, candidates=grid).sensitivity
        1.0
    """

    loss: Loss
    epsilon: float
    candidates: FloatArray
    relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE
    randomness: Randomness = field(default_factory=Randomness, repr=False, compare=False)

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
        return max(self.loss.lipschitz * farthest * self.relation.sensitivity_factor, 1e-12)

    @property
    def _mechanism(self) -> ExponentialMechanism:
        return ExponentialMechanism(epsilon=self.epsilon, sensitivity=self.sensitivity, randomness=self.randomness)

    def event(self) -> Event:
        """The event of one release."""
        return self._mechanism.event()

    def scores(self, rows: FloatArray, targets: FloatArray) -> FloatArray:
        """Minus the summed loss of each candidate, relative to zero weights [m]. Not private."""
        nothing = self.loss.values(np.zeros((len(rows), self.loss.outputs)), targets)
        found = [(nothing - self.loss.values(rows @ weights, targets)).sum() for weights in self.candidates]
        return np.array(found, dtype=np.float64)

    def release(self, rows: FloatArray, targets: FloatArray) -> FloatArray:
        """The chosen weights [p, k]."""
        return self.candidates[self._mechanism.release(self.scores(rows, targets))].copy()
