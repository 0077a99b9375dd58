"""From records to the rows of a convex problem and back: clipped, with a constant column, of norm ≤ 1 (floor 4)."""

import math
from dataclasses import dataclass

import numpy as np

from sordino import checks
from sordino.errors import InvalidArgument
from sordino.estimators.intake import unit_rows
from sordino.mechanisms.values import FloatArray, Numbers, numeric

__all__ = ["Design"]


@dataclass(frozen=True, kw_only=True)
class Design:
    """Records x become rows [x, c]/N with N = √(data_norm² + c²); without an intercept x/data_norm.

    The constant column is a column like any other: it is part of the row's norm and its weight is penalised.

    Args:
        data_norm: the largest ℓ2 norm of a record, > 0; longer ones are cut back to it.
        columns: number of columns d ≥ 1 of the records.
        intercept: c > 0, or 0 for a model without intercept.

    Example:
        >>> Design(data_norm=3.0, columns=2, intercept=4.0).rows(np.array([[30.0, 0.0]])).round(6).tolist()
        [[0.6, 0.0, 0.8]]
    """

    data_norm: float
    columns: int
    intercept: float

    def __post_init__(self) -> None:
        checks.in_range(2.0**-200, 2.0**200, data_norm=self.data_norm, hint="Rescale the records.")
        checks.non_negative(intercept=self.intercept)

    @classmethod
    def declared(
        cls, *, data_norm: float, columns: int, fit_intercept: bool, intercept_scaling: float | None
    ) -> "Design":
        """The design for an estimator's parameters; by default c is half of `data_norm`."""
        if not fit_intercept:
            return cls(data_norm=data_norm, columns=columns, intercept=0.0)
        scaling = data_norm / 2 if intercept_scaling is None else checks.positive(intercept_scaling=intercept_scaling)
        return cls(data_norm=data_norm, columns=columns, intercept=scaling)

    @property
    def dimension(self) -> int:
        """Number of columns p of the rows."""
        return self.columns + (self.intercept > 0)

    @property
    def norm(self) -> float:
        """N."""
        return math.hypot(self.data_norm, self.intercept)

    def rows(self, records: FloatArray) -> FloatArray:
        """Rows [n, p] of norm ≤ 1."""
        clipped = unit_rows(records, self.data_norm) * (self.data_norm / self.norm)
        if self.intercept > 0:
            clipped = np.hstack([clipped, np.full((len(clipped), 1), self.intercept / self.norm)])
        # Once more, for the rounding of the two steps.
        return unit_rows(clipped, 1.0)

    def coefficients(self, weights: FloatArray) -> tuple[FloatArray, FloatArray]:
        """(coefficients [k, d], intercepts [k]) of the records for weights [p, k] of the rows."""
        coefficients = weights[: self.columns].T / self.norm
        if self.intercept == 0:
            return coefficients, np.zeros(weights.shape[1])
        return coefficients, weights[self.columns] * (self.intercept / self.norm)

    def weights(self, candidates: Numbers, outputs: int) -> FloatArray:
        """Weights [m, p, k] of the rows for candidate coefficients of the records, the intercept last.

        Args:
            candidates: [m, p], or [m, k, p] for several outputs.
            outputs: k.
        """
        given = numeric(candidates, "candidates")
        listed = given
        if listed.ndim == 2 and outputs == 1:
            listed = listed[:, None, :]
        if listed.ndim != 3 or listed.shape[1:] != (outputs, self.dimension):
            raise InvalidArgument(
                f"candidates must have shape (m, {f'{outputs}, ' if outputs > 1 else ''}{self.dimension}), got "
                f"{given.shape}. Give coefficients and then the intercept."
            )
        scaled = listed.copy()
        scaled[:, :, : self.columns] *= self.norm
        if self.intercept > 0:
            scaled[:, :, self.columns] *= self.norm / self.intercept
        return scaled.transpose(0, 2, 1)
