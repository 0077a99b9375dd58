"""Explainable boosting: `HistGradientBoostingClassifier` and `HistGradientBoostingRegressor` (floor 4).

The model is a sum of one curve a feature, so it can be drawn and read; see `CyclicBoosting` for how it is learned.
"""

from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt
from scipy.special import expit, softmax
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.utils.validation import check_is_fitted

from sordino import checks
from sordino.definitions import NeighboringRelation
from sordino.estimators.base import PrivateEstimator
from sordino.estimators.boosting import CyclicBoosting, Shapes
from sordino.estimators.features import Categories, Edges, Feature, declared_features
from sordino.estimators.intake import (
    ColumnBounds,
    Labels,
    codes,
    declared,
    declared_classes,
    matrix,
    one_a_record,
    scaled_targets,
)
from sordino.estimators.losses import HuberResidual, Logistic, Loss, Softmax
from sordino.ledger import Account, Reservation
from sordino.mechanisms import budget
from sordino.mechanisms.values import Bounds, FloatArray, Numbers, checked_bounds

__all__ = ["HistGradientBoostingClassifier", "HistGradientBoostingRegressor"]


# About how far one curve of a regression reaches, in units of half the target's range; log-odds reach about 1.
_TARGET_UNIT = 0.1


class _Boosting(PrivateEstimator):
    """Parameters and steps that classifier and regressor share."""

    bounds: ColumnBounds | None
    categories: Categories | None
    one_hot: Sequence[Sequence[int]] | None
    edges: Edges | None
    max_iter: int
    max_bins: int
    learning_rate: float
    smoothing: float
    neighboring_relation: str
    features_: tuple[Feature, ...]
    curves_: FloatArray
    intercept_: FloatArray

    def _prepared(self, columns: int, loss: Loss, *, unit: float = 1.0) -> CyclicBoosting:
        epsilon, delta = self._budget()
        relation = NeighboringRelation(
            checks.one_of(list(NeighboringRelation), neighboring_relation=self.neighboring_relation)
        )
        features = declared_features(
            columns,
            bounds=self.bounds,
            categories=self.categories,
            one_hot=self.one_hot,
            edges=self.edges,
            max_bins=self.max_bins,
        )
        return CyclicBoosting(
            loss=loss,
            budget=budget(epsilon=epsilon, delta=delta),
            features=features,
            rounds=checks.integer(1, max_iter=self.max_iter),
            learning_rate=checks.positive(learning_rate=self.learning_rate),
            smoothing=checks.non_negative(smoothing=self.smoothing),
            unit=unit,
            relation=relation,
            randomness=self._randomness(),
        )

    def _learn(self, boosting: CyclicBoosting, records: FloatArray, targets: FloatArray) -> None:
        """Charge, release, and move each curve's mean into the intercept."""
        self._charge(boosting.events(), relation=boosting.relation)
        bins = np.stack([feature.bins_of(records) for feature in boosting.features], axis=1)
        shapes = boosting.release(bins, targets)
        means = [_mean(shapes, place) for place in range(len(boosting.features))]
        self.features_ = boosting.features
        self.curves_ = np.concatenate([values - mean for values, mean in zip(shapes.values, means, strict=True)])
        self.intercept_ = np.sum(means, axis=0)
        self.n_iter_ = boosting.rounds

    def shape_function(self, feature: int) -> tuple[Feature, FloatArray]:
        """The curve of one feature: its bins (`edges`, `values` or `columns`), and what each adds [bins] or [bins, K].

        Args:
            feature: position in `features_`.
        """
        check_is_fitted(self)
        place = checks.integer(0, feature=feature)
        checks.in_range(0, len(self.features_) - 1, feature=place)
        start = sum(other.bins for other in self.features_[:place])
        curve = self.curves_[start : start + self.features_[place].bins]
        return self.features_[place], curve[:, 0] if curve.shape[1] == 1 else curve

    def feature_contributions(self, X: Numbers) -> FloatArray:
        """What each feature adds to each record's score [n, features], or [n, features, K]; with the intercept, all.

        A category that nobody declared adds nothing.
        """
        check_is_fitted(self)
        records, _ = matrix(X, estimator=self, reset=False)
        found = np.zeros((len(records), len(self.features_), self.curves_.shape[1]))
        start = 0
        for place, feature in enumerate(self.features_):
            bins = feature.bins_of(records)
            inside = bins >= 0
            found[inside, place] = self.curves_[start + bins[inside]]
            start += feature.bins
        return found[:, :, 0] if found.shape[2] == 1 else found

    def _scores(self, X: Numbers) -> FloatArray:
        contributions = self.feature_contributions(X)
        if contributions.ndim == 2:
            return contributions.sum(axis=1) + self.intercept_[0]
        return contributions.sum(axis=1) + self.intercept_


def _mean(shapes: Shapes, place: int) -> FloatArray:
    """The mean of a curve over noisy counts [k]."""
    weights = shapes.counts[place] + 1.0
    return weights @ shapes.values[place] / weights.sum()


class HistGradientBoostingClassifier(ClassifierMixin, _Boosting):
    """Private explainable boosting: log-odds that are a sum of one curve a feature.

    The most accurate estimator here for tables from ε = 1 on: it finds steps and plateaus that no line has, and
    `shape_function` shows what it found. Every numeric column is cut into intervals between its declared bounds.

    Guarantee: all curves are (epsilon, delta)-differentially private under `neighboring_relation`, as `privacy_`
    states. A record with a NaN or with a label that is not among `classes` contributes nothing; numbers beyond the
    bounds count as being on them. Nothing else depends on the data: no attribute, no warning, no stopping rule.

    Args:
        epsilon: ε > 0. Required.
        delta: δ in [0, 1); 0 for geometric and Laplace noise. Required.
        bounds: (lower, upper), numbers or one a column, from public knowledge. Required.
        classes: all labels, at least two. Required.
        categories: the listed values of columns that hold codes, {column: values}; others contribute nothing.
        one_hot: groups of columns of which one is set, each group one feature; 104 features cost more than 13.
        edges: intervals of single columns, {column: rising ends}, where equal widths serve badly.
        max_iter: rounds ≥ 1; each visits every feature once.
        max_bins: number of intervals of a numeric column, ≥ 2.
        learning_rate: > 0.
        smoothing: ≥ 0; shrinks leaves that hold little against the noise.
        neighboring_relation: ``add_or_remove_one``, ``replace_special`` or ``replace_one``.
        ledger: None, or the account, or a reservation on it, that every fit is charged to.
        random_state: None, or a seed together with `reproducible`.
        reproducible: whether this is a test run; `privacy_` then carries "not for release".

    Attributes:
        features_: the features, as declared.
        curves_: what each bin adds, one feature after the other [bins of all features, 1 or K].
        intercept_: [1] or [K].
        n_iter_: `max_iter`.
        classes_: the declared classes.
        privacy_: the guarantee.
        events_: what was done.

    Example:
        >>> X, y = np.repeat([[0.2], [0.5], [0.8]], 2000, axis=0), np.repeat([0, 1, 0], 2000)
        >>> model = HistGradientBoostingClassifier(epsilon=2.0, delta=1e-6, bounds=(0.0, 1.0), classes=(0, 1))
        >>> model.fit(X, y).predict([[0.2], [0.5], [0.8]]).tolist()
        [0, 1, 0]

    References:
        Nori, Caruana, Bu, Shen, Kulkarni 2021, algorithm 2; docs/proofs/cyclic-boosting.md.
    """

    def __init__(
        self,
        *,
        epsilon: float | None = None,
        delta: float | None = None,
        bounds: ColumnBounds | None = None,
        classes: Sequence[Hashable] | None = None,
        categories: Categories | None = None,
        one_hot: Sequence[Sequence[int]] | None = None,
        edges: Edges | None = None,
        max_iter: int = 100,
        max_bins: int = 256,
        learning_rate: float = 0.2,
        smoothing: float = 3.0,
        neighboring_relation: str = "add_or_remove_one",
        ledger: Account | Reservation | None = None,
        random_state: int | None = None,
        reproducible: bool = False,
    ) -> None:
        self.epsilon = epsilon
        self.delta = delta
        self.bounds = bounds
        self.classes = classes
        self.categories = categories
        self.one_hot = one_hot
        self.edges = edges
        self.max_iter = max_iter
        self.max_bins = max_bins
        self.learning_rate = learning_rate
        self.smoothing = smoothing
        self.neighboring_relation = neighboring_relation
        self.ledger = ledger
        self.random_state = random_state
        self.reproducible = reproducible

    def fit(self, X: Numbers, y: Labels) -> "HistGradientBoostingClassifier":
        """Fit to records X [n, d] with labels y [n]; charged first, then read."""
        self._budget()
        classes = declared_classes(self.classes)
        records, present = matrix(X, estimator=self, reset=True)
        one_a_record(y, len(records))
        loss = Logistic() if len(classes) == 2 else Softmax(outputs=len(classes))
        boosting = self._prepared(records.shape[1], loss)
        found = codes(y, classes.tolist())
        present = present & (found >= 0)
        targets = found.astype(np.float64) if loss.outputs > 1 else np.where(found == 1, 1.0, -1.0)
        self._learn(boosting, records[present], targets[present])
        self.classes_ = classes
        return self

    def decision_function(self, X: Numbers) -> FloatArray:
        """Log-odds [n] of the second class, or scores [n, K]."""
        return self._scores(X)

    def predict_proba(self, X: Numbers) -> FloatArray:
        """Class probabilities [n, K]."""
        scores = self._scores(X)
        if scores.ndim == 1:
            return np.stack([expit(-scores), expit(scores)], axis=1)
        return softmax(scores, axis=1)

    def predict(self, X: Numbers) -> npt.NDArray[np.generic]:
        """The class of each record [n]; a record with an entry that is not finite is taken as zero."""
        scores = self._scores(X)
        places = (scores > 0).astype(np.int64) if scores.ndim == 1 else scores.argmax(axis=1)
        return self.classes_[places]


class HistGradientBoostingRegressor(RegressorMixin, _Boosting):
    """Private explainable boosting of a number that is a sum of one curve a feature.

    Guarantee: that of `HistGradientBoostingClassifier`; targets are clipped to `target_bounds`, residuals to
    `max_residual`.

    Args:
        epsilon: ε > 0. Required.
        delta: δ in [0, 1); 0 for geometric and Laplace noise. Required.
        bounds: (lower, upper), numbers or one a column, from public knowledge. Required.
        target_bounds: (lowest, highest) target, from public knowledge. Required.
        categories: the listed values of columns that hold codes, {column: values}; others contribute nothing.
        one_hot: groups of columns of which one is set, each group one feature.
        edges: intervals of single columns, {column: rising ends}.
        max_iter: rounds ≥ 1; each visits every feature once.
        max_bins: number of intervals of a numeric column, ≥ 2.
        learning_rate: > 0.
        smoothing: ≥ 0; shrinks leaves that hold little against the noise.
        max_residual: > 0; what one record can move a sum by, in units of half the target's range.
        neighboring_relation: ``add_or_remove_one``, ``replace_special`` or ``replace_one``.
        ledger: None, or the account, or a reservation on it, that every fit is charged to.
        random_state: None, or a seed together with `reproducible`.
        reproducible: whether this is a test run; `privacy_` then carries "not for release".

    Attributes:
        features_: the features, as declared.
        curves_: what each bin adds, one feature after the other [bins of all features, 1].
        intercept_: [1].
        n_iter_: `max_iter`.
        privacy_: the guarantee.
        events_: what was done.

    Example:
        >>> X, y = np.repeat([[0.2], [0.5], [0.8]], 2000, axis=0), np.repeat([1.0, 9.0, 1.0], 2000)
        >>> model = HistGradientBoostingRegressor(epsilon=2.0, delta=1e-6, bounds=(0.0, 1.0), target_bounds=(0, 10))
        >>> bool(np.abs(model.fit(X, y).predict([[0.2], [0.5], [0.8]]) - [1, 9, 1]).max() < 1.0)
        True
    """

    def __init__(
        self,
        *,
        epsilon: float | None = None,
        delta: float | None = None,
        bounds: ColumnBounds | None = None,
        target_bounds: Bounds | None = None,
        categories: Categories | None = None,
        one_hot: Sequence[Sequence[int]] | None = None,
        edges: Edges | None = None,
        max_iter: int = 100,
        max_bins: int = 256,
        learning_rate: float = 0.2,
        smoothing: float = 3.0,
        max_residual: float = 0.25,
        neighboring_relation: str = "add_or_remove_one",
        ledger: Account | Reservation | None = None,
        random_state: int | None = None,
        reproducible: bool = False,
    ) -> None:
        self.epsilon = epsilon
        self.delta = delta
        self.bounds = bounds
        self.target_bounds = target_bounds
        self.categories = categories
        self.one_hot = one_hot
        self.edges = edges
        self.max_iter = max_iter
        self.max_bins = max_bins
        self.learning_rate = learning_rate
        self.smoothing = smoothing
        self.max_residual = max_residual
        self.neighboring_relation = neighboring_relation
        self.ledger = ledger
        self.random_state = random_state
        self.reproducible = reproducible

    def fit(self, X: Numbers, y: Numbers) -> "HistGradientBoostingRegressor":
        """Fit to records X [n, d] with targets y [n]; charged first, then read."""
        self._budget()
        ends = checked_bounds(declared(self.target_bounds, name="target_bounds", meaning="(lowest, highest) target"))
        records, present = matrix(X, estimator=self, reset=True)
        one_a_record(y, len(records))
        loss = HuberResidual(threshold=checks.positive(max_residual=self.max_residual))
        boosting = self._prepared(records.shape[1], loss, unit=_TARGET_UNIT)
        centre = ends[0] / 2 + ends[1] / 2
        half = max(ends[1] - centre, centre - ends[0])
        targets = scaled_targets(y, ends, centre=centre, half=half)
        present = present & np.isfinite(targets)
        self._learn(boosting, records[present], targets[present])
        self.curves_ = self.curves_ * half
        self.intercept_ = self.intercept_ * half + centre
        return self

    def predict(self, X: Numbers) -> FloatArray:
        """Predicted targets [n]; a record with an entry that is not finite is taken as zero."""
        return self._scores(X)
