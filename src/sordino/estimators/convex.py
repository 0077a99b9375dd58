"""Which mechanism fits a linear model: one table for all methods and all losses (floor 4)."""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from sordino import checks
from sordino.definitions import NeighboringRelation
from sordino.errors import InvalidArgument, MissingDeclaration
from sordino.estimators.candidates import CandidateChoice
from sordino.estimators.descent import Descent, DescentSettings
from sordino.estimators.losses import Loss
from sordino.estimators.objective import ObjectivePerturbation, least_regularization
from sordino.estimators.output import OutputPerturbation
from sordino.mechanisms.values import FloatArray
from sordino.randomness import Randomness

__all__ = ["ConvexFit", "ConvexMechanism", "released"]

ConvexMechanism: TypeAlias = ObjectivePerturbation | OutputPerturbation | Descent | CandidateChoice

METHODS = ("objective", "output", "dp-gd", "dp-sgd", "exponential")


@dataclass(frozen=True, kw_only=True)
class ConvexFit:
    """A linear model's weights by the named method.

    Args:
        method: one of `METHODS`.
        loss: of scores of rows of norm ≤ 1.
        epsilon: > 0.
        delta: in [0, 1).
        dimension: number of columns p, with the intercept's.
        regularization: λ for rows of norm 1, or None for the method's own choice.
        settings: for the two descents, or None.
        candidates: weights [m, p, k] for the exponential mechanism, or None.
        relation: the neighbouring relation.
        randomness: of this fit.
    """

    method: str
    loss: Loss
    epsilon: float
    delta: float
    dimension: int
    regularization: float | None
    settings: DescentSettings | None
    candidates: FloatArray | None
    relation: NeighboringRelation
    randomness: Randomness

    def mechanism(self) -> ConvexMechanism:
        """The mechanism, which knows its event."""
        checks.one_of(METHODS, method=self.method)
        match self.method:
            case "objective":
                return self._objective()
            case "output":
                return OutputPerturbation(
                    loss=self.loss,
                    epsilon=self.epsilon,
                    delta=self.delta,
                    regularization=self.regularization,
                    dimension=self.dimension,
                    relation=self.relation,
                    randomness=self.randomness,
                )
            case "exponential":
                if self.candidates is None:
                    raise MissingDeclaration(
                        "candidates must be declared for method='exponential', got None. List weights to choose from."
                    )
                return CandidateChoice(
                    loss=self.loss,
                    epsilon=self.epsilon,
                    candidates=self.candidates,
                    relation=self.relation,
                    randomness=self.randomness,
                )
            case _:
                return self._descent()

    def _objective(self) -> ObjectivePerturbation:
        if self.relation is NeighboringRelation.REPLACE_ONE:
            raise InvalidArgument(
                "neighboring_relation must be 'add_or_remove_one' or 'replace_special' for method='objective', got "
                "'replace_one': its proof is for one record more or less. Use method='output'."
            )
        chosen = self.regularization
        if chosen is None:
            # Enough for the change of variables to cost nothing (logistic) or a quarter of ε, and one more: on public
            # data a little more shrinkage than privacy needs was better at every ε.
            chosen = 1.0 + least_regularization(self.loss, self.epsilon * (1 - 2e-3), 0.25)
        return ObjectivePerturbation(
            loss=self.loss,
            epsilon=self.epsilon,
            delta=self.delta,
            regularization=chosen,
            dimension=self.dimension,
            randomness=self.randomness,
        )

    def _descent(self) -> Descent:
        if self.settings is None:
            raise MissingDeclaration(
                f"population must be declared for method={self.method!r}, got None. Give the public number of records, "
                "or a public guess of it."
            )
        return Descent(
            loss=self.loss,
            epsilon=self.epsilon,
            delta=self.delta,
            dimension=self.dimension,
            settings=self.settings,
            relation=self.relation,
            randomness=self.randomness,
        )


def released(
    mechanism: ConvexMechanism,
    rows: FloatArray,
    targets: FloatArray,
    present: npt.NDArray[np.bool_],
) -> FloatArray:
    """Weights [p, k]: absent records are left out, or have loss 0 where batches are drawn by position."""
    if isinstance(mechanism, Descent):
        return mechanism.release(rows, np.where(present, targets, 0.0), present)
    return mechanism.release(rows[present], targets[present])
