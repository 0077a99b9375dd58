"""Scalers with declared bounds: `StandardScaler`, which spends privacy, and `MinMaxScaler`, which doesn't (floor 4)."""

import numpy as np
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.utils.validation import check_is_fitted

from sordino.definitions import Guarantee
from sordino.estimators.base import PrivateEstimator
from sordino.estimators.bounded_moments import BoundedMoments
from sordino.estimators.intake import ColumnBounds, column_bounds, matrix
from sordino.events import Event
from sordino.ledger import Account, Reservation
from sordino.mechanisms import budget
from sordino.mechanisms.values import FloatArray, Numbers

__all__ = ["MinMaxScaler", "StandardScaler"]


class StandardScaler(TransformerMixin, PrivateEstimator):
    """Subtracts noisy means and divides by noisy standard deviations.

    Bounds that are known well need no private moments: `MinMaxScaler` is free. What is fitted on the scaled records
    afterwards spends its own budget on top.

    Guarantee: means and deviations are (epsilon, delta)-differentially private for one record added or removed; the
    number of records is private and not an attribute. `transform` changes each record by itself and is not private.

    Args:
        epsilon: ε > 0. Required.
        delta: δ in [0, 1). Required.
        bounds: (lower, upper), numbers or one a column, from public knowledge. Required.
        random_state: None, or a seed together with `reproducible`.
        reproducible: whether this is a test run; `privacy_` then carries "not for release".
        ledger: None, or the account, or a reservation on it, that every fit is charged to.

    Attributes:
        mean_: [d].
        var_: [d].
        scale_: [d], their square roots.
        privacy_: the guarantee.
        events_: what was done.

    Example:
        >>> X = np.repeat([[2.0], [6.0]], 5000, axis=0)
        >>> scaler = StandardScaler(epsilon=10.0, delta=1e-6, bounds=(0.0, 10.0)).fit(X)
        >>> scaler.transform([[8.0]]).round(0).tolist()
        [[2.0]]
    """

    def __init__(
        self,
        *,
        epsilon: float | None = None,
        delta: float | None = None,
        bounds: ColumnBounds | None = None,
        random_state: int | None = None,
        reproducible: bool = False,
        ledger: Account | Reservation | None = None,
    ) -> None:
        self.epsilon = epsilon
        self.delta = delta
        self.bounds = bounds
        self.random_state = random_state
        self.reproducible = reproducible
        self.ledger = ledger

    def fit(self, X: Numbers, y: object = None) -> "StandardScaler":  # noqa: ARG002 (scikit-learn's signature)
        """Fit to records X [n, d]; charged first, then read."""
        epsilon, delta = self._budget()
        randomness = self._randomness()
        records, present = matrix(X, estimator=self, reset=True)
        lower, upper = column_bounds(self.bounds, records.shape[1])
        mechanism = BoundedMoments(
            budget=budget(epsilon=epsilon, delta=delta), lower=lower, upper=upper, randomness=randomness
        )
        self._charge(mechanism.events())
        moments = mechanism.release(records[present])
        self.mean_, self.var_ = moments.means, moments.variances
        self.scale_ = np.sqrt(self.var_)
        return self

    def transform(self, X: Numbers) -> FloatArray:
        """Scaled records [n, d]; a record with an entry that is not finite is taken as the mean."""
        check_is_fitted(self)
        records, present = matrix(X, estimator=self, reset=False)
        return np.where(present[:, None], (records - self.mean_) / self.scale_, 0.0)


class MinMaxScaler(TransformerMixin, BaseEstimator):
    """Moves columns from declared bounds to [0, 1], clipping what lies outside. Nothing is learned from records.

    Guarantee: `fit` reads the number of columns and no record: ε = 0. `transform` changes each record by itself.

    Args:
        bounds: (lower, upper), numbers or one a column, from public knowledge. Required.

    Attributes:
        data_min_: [d], the declared lower bounds.
        data_max_: [d], the declared upper bounds.
        privacy_: ε = 0.
        events_: empty.

    Example:
        >>> MinMaxScaler(bounds=(0.0, 10.0)).fit([[3.0]]).transform([[5.0], [99.0]]).tolist()
        [[0.5], [1.0]]
    """

    def __init__(self, *, bounds: ColumnBounds | None = None) -> None:
        self.bounds = bounds

    def fit(self, X: Numbers, y: object = None) -> "MinMaxScaler":  # noqa: ARG002 (scikit-learn's signature)
        """Take the number of columns from X [n, d]."""
        records, _ = matrix(X, estimator=self, reset=True)
        self.data_min_, self.data_max_ = column_bounds(self.bounds, records.shape[1])
        self.events_: tuple[Event, ...] = ()
        self.privacy_ = Guarantee(epsilon=0.0, delta=0.0, accountant="exact", sampler="none")
        return self

    def transform(self, X: Numbers) -> FloatArray:
        """Records in [0, 1] [n, d]; a record with an entry that is not finite is taken as the middle."""
        check_is_fitted(self)
        records, present = matrix(X, estimator=self, reset=False)
        clipped = np.clip(records, self.data_min_, self.data_max_)
        scaled = np.clip((clipped - self.data_min_) / (self.data_max_ - self.data_min_), 0.0, 1.0)
        return np.where(present[:, None], scaled, 0.5)
