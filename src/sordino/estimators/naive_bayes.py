"""Gaussian naive Bayes, with categories as categories."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import logsumexp
from sklearn.utils.validation import check_is_fitted

from sordino import checks
from sordino.estimators.base import (
    ColumnBounds,
    Labels,
    PrivateClassifier,
    class_weights,
    column_bounds,
    declared_classes,
    fill_missing,
    validate_matrix,
)
from sordino.estimators.hist_gradient_boosting import Feature, declared_features
from sordino.estimators.preprocessing import BoundedMoments
from sordino.mechanisms import make_budget
from sordino.mechanisms.base import FloatArray, Numbers

# No category of a one-hot group is rarer than this in a class: noise would make it 0.
_LEAST_SHARE = 1e-3


@dataclass(kw_only=True, eq=False, repr=False)
class GaussianNB(PrivateClassifier):
    """Private Gaussian naive Bayes: a count, means and variances of each class, all noisy.

    Guarantee: everything learned is (epsilon, delta)-differentially private for one record added or removed. A record
    has one label, so it changes the statistics of one class only, and each class's may spend the whole budget. Records
    are clipped to `bounds`, in predictions too, and a missing entry is their middle; a label that is not among
    `classes` contributes nothing.

    Args:
        epsilon: ε > 0. Required.
        delta: δ in [0, 1); 0 for geometric and Laplace noise. Required.
        bounds: (lower, upper), numbers or one a column, from public knowledge. Required.
        classes: all labels, at least two. Required.
        one_hot: groups of columns of which one is set: each group is one category, and its shares in a class are the
            noisy means of its columns. As numbers the columns would count again and again, and be far from normal.
        var_smoothing: ≥ 0; variances below this share of a column's squared half-range are raised to it. Columns that
            hardly vary in a class would otherwise decide alone, the more so the less noise there is.
        class_weight: None, or how much a record of each class counts, {class: weight ≥ 0}, from public knowledge or
            from counts that were paid for; a class that is not named counts 1.
        random_state: None, or a seed together with `reproducible`.
        reproducible: whether this is a test run; `guarantee_` then carries "not for release".
        ledger: None, or the account, or a reservation on it, that every fit is charged to.

    Attributes:
        theta_: means [K, d].
        var_: variances [K, d].
        class_count_: noisy numbers of records [K], at least 1.
        class_prior_: their shares, by weight [K].
        classes_: the declared classes.
        guarantee_: the guarantee.
        events_: what was done to each class; the classes hold different records.

    Example:
        >>> X, y = np.repeat([[1.0, 0.0], [0.0, 1.0]], 500, axis=0), np.repeat([0, 1], 500)
        >>> model = GaussianNB(epsilon=1.0, delta=1e-6, bounds=(0.0, 1.0), classes=(0, 1)).fit(X, y)
        >>> float(model.score(X, y))
        1.0
    """

    bounds: ColumnBounds | None = None
    one_hot: Sequence[Sequence[int]] | None = None
    var_smoothing: float = 0.01
    class_weight: Mapping[Hashable, float] | None = None

    def fit(self, X: Numbers, y: Labels) -> "GaussianNB":
        """Fit to records X [n, d] with labels y [n]; charged first, then read."""
        epsilon, delta = self._budget()
        classes = declared_classes(self.classes)
        smoothing = checks.non_negative(var_smoothing=self.var_smoothing)
        rng = self._randomness()
        records = validate_matrix(X, estimator=self, reset=True)
        found, _ = self._labels(y, len(records))
        weights = class_weights(self.class_weight, classes)
        lower, upper = column_bounds(self.bounds, records.shape[1])
        self.one_hot_groups(records.shape[1])
        records = fill_missing(records, bounds=(lower, upper))
        mechanism = BoundedMoments(budget=make_budget(epsilon=epsilon, delta=delta), lower=lower, upper=upper, rng=rng)
        self._charge(mechanism.events())
        groups = [mechanism.release(records[found == index]) for index in range(len(classes))]
        self.classes_ = classes
        self.theta_ = np.stack([group.means for group in groups])
        least = smoothing * ((upper - lower) / 2) ** 2
        self.var_ = np.stack([np.maximum(group.variances, least) for group in groups])
        self.class_count_ = np.array([group.count for group in groups])
        # Weights of classes change no mean or variance of a class; a class of weight 0 is as rare as can be.
        weighted = self.class_count_ if weights is None else np.maximum(self.class_count_ * weights, 1e-300)
        self.class_prior_ = weighted / weighted.sum()
        return self

    def one_hot_groups(self, columns: int) -> list[Feature]:
        """The declared one-hot groups."""
        features = declared_features(
            columns, bounds=self.bounds, categories=None, one_hot=self.one_hot, edges=None, max_bins=2
        )
        return [feature for feature in features if not feature.ordered]

    def log_shares(self, group: Feature) -> FloatArray:
        """Logarithms of the shares of a group's categories in each class [K, categories]."""
        check_is_fitted(self)
        shares = np.clip(self.theta_[:, list(group.columns)], _LEAST_SHARE, 1.0)
        return np.log(shares / shares.sum(axis=1, keepdims=True))

    def _scores(self, X: Numbers) -> FloatArray:
        """Joint log-densities [n, K]."""
        check_is_fitted(self)
        given = validate_matrix(X, estimator=self, reset=False)
        columns = given.shape[1]
        lower, upper = column_bounds(self.bounds, columns)
        records = np.clip(fill_missing(given, bounds=(lower, upper)), lower, upper)
        groups = self.one_hot_groups(columns)
        numbers = np.setdiff1d(np.arange(columns), [column for group in groups for column in group.columns])
        means, variances = self.theta_[:, numbers], self.var_[:, numbers]
        distances = (records[:, None, numbers] - means) ** 2 / variances + np.log(2 * np.pi * variances)
        joint = np.log(self.class_prior_) - distances.sum(axis=2) / 2
        for group in groups:
            bins = group.bins_of(given)
            joint[bins >= 0] += self.log_shares(group).T[bins[bins >= 0]]
        return joint

    def predict_log_proba(self, X: Numbers) -> FloatArray:
        """Logarithms of the class probabilities [n, K]."""
        joint = self._scores(X)
        return joint - logsumexp(joint, axis=1, keepdims=True)

    def predict_proba(self, X: Numbers) -> FloatArray:
        """Class probabilities [n, K]."""
        return np.exp(self.predict_log_proba(X))
