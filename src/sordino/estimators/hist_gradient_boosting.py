"""Explainable boosting: `HistGradientBoostingClassifier` and `HistGradientBoostingRegressor`.

The model is a sum of one curve a feature, so it can be drawn and read; see `CyclicBoosting` for how it is learned.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Self

import numpy as np
import numpy.typing as npt
from sklearn.utils.validation import check_is_fitted

from sordino import checks
from sordino.definitions import NeighboringRelation
from sordino.errors import InvalidArgument
from sordino.estimators.base import (
    ColumnBounds,
    Labels,
    PrivateEstimator,
    PrivateRegressor,
    SumsMechanism,
    WeightedClassifier,
    class_probabilities,
    column_bounds,
    declared_classes,
    declared_relation,
    noise_stddev,
    sums_mechanism,
    validate_matrix,
)
from sordino.estimators.losses import HuberResidual, Logistic, Loss, Softmax
from sordino.events import Event, SelfComposed
from sordino.mechanisms import PrivateHistogram, make_budget
from sordino.mechanisms.base import FloatArray, Numbers
from sordino.mechanisms.calibration import Budget
from sordino.randomness import KeyedRNG, RandomStream

# ----------------------------------------------------------------------------------------------------------------------
# Columns of a table as features with a fixed list of bins: intervals, categories, one-hot groups.
#
# Everything here is declared: which columns belong together, where intervals begin, which categories exist.
# ----------------------------------------------------------------------------------------------------------------------


IntegerArray = npt.NDArray[np.int64]
Categories = Mapping[int, Sequence[float]]
Edges = Mapping[int, Sequence[float]]

_GRID_BITS = 20


@dataclass(frozen=True, kw_only=True)
class Feature:
    """One feature: a column cut into intervals or listed by value, or columns of which one at most is set.

    Args:
        columns: where it stands in the table; more than one for a one-hot group.
        edges: rising ends of the intervals, the first and last included; a number beyond them is in the nearest.
        values: or the categories of the one column.

    Example:
        >>> Feature(columns=(0,), edges=(0.0, 1.0, 2.0)).bins_of(np.array([[0.5], [1.0], [9.0]])).tolist()
        [0, 1, 1]
        >>> Feature(columns=(0,), values=(3.0, 7.0)).bins_of(np.array([[7.0], [5.0]])).tolist()
        [1, -1]
    """

    columns: tuple[int, ...]
    edges: tuple[float, ...] | None = None
    values: tuple[float, ...] | None = None

    @property
    def bins(self) -> int:
        """Number of bins."""
        if self.edges is not None:
            return len(self.edges) - 1
        return len(self.values) if self.values is not None else len(self.columns)

    @property
    def ordered(self) -> bool:
        """Whether neighboring bins are alike: intervals are, categories are not."""
        return self.edges is not None

    def bins_of(self, records: FloatArray) -> IntegerArray:
        """The one bin of each record [n]: of the middle where a number is missing; −1 for an undeclared category."""
        if self.edges is not None:
            inner, column = np.array(self.edges[1:-1]), records[:, self.columns[0]]
            numbers = np.where(np.isnan(column), self.edges[0] / 2 + self.edges[-1] / 2, column)
            return np.searchsorted(inner, numbers, side="right").astype(np.int64)
        if self.values is not None:
            order = np.argsort(self.values)
            listed = np.array(self.values)[order]
            column = records[:, self.columns[0]]
            nearest = np.minimum(np.searchsorted(listed, column), len(listed) - 1)
            return np.where(listed[nearest] == column, order[nearest], -1).astype(np.int64)
        group = np.nan_to_num(records[:, list(self.columns)])
        return np.where(group.max(axis=1) > 0, group.argmax(axis=1), -1).astype(np.int64)


def declared_features(
    columns: int,
    *,
    bounds: ColumnBounds | None,
    categories: Categories | None,
    one_hot: Sequence[Sequence[int]] | None,
    edges: Edges | None,
    max_bins: int,
) -> tuple[Feature, ...]:
    """The features of a table, in the order of their first columns.

    Args:
        columns: number of columns d of the table.
        bounds: (lower, upper) of the columns that become intervals of equal width.
        categories: the listed values of some columns.
        one_hot: groups of columns, each group one category.
        edges: intervals of some columns, in place of those of equal width.
        max_bins: number of intervals of equal width, ≥ 2.
    """
    checks.integer(2, max_bins=max_bins)
    lower, upper = column_bounds(bounds, columns)
    groups = [tuple(int(column) for column in group) for group in one_hot or ()]
    listed = {int(column): _different(values) for column, values in (categories or {}).items()}
    cut = {int(column): _rising(ends) for column, ends in (edges or {}).items()}
    named = [column for group in (*groups, tuple(listed), tuple(cut)) for column in group]
    if len(set(named)) < len(named) or any(not 0 <= column < columns for column in named) or not all(groups):
        raise InvalidArgument(
            f"categories, one_hot and edges must name each of the columns 0 … {columns - 1} once at most, got "
            f"{sorted(named)}. Correct the lists."
        )
    found = [Feature(columns=group) for group in groups]
    for column in range(columns):
        if column in listed:
            found.append(Feature(columns=(column,), values=listed[column]))
        elif column in cut:
            found.append(Feature(columns=(column,), edges=cut[column]))
        elif column not in named:
            ends = np.linspace(lower[column], upper[column], max_bins + 1)
            found.append(Feature(columns=(column,), edges=_rising(ends.tolist())))
    return tuple(sorted(found, key=lambda feature: feature.columns[0]))


def bins_of_records(features: Sequence[Feature], records: FloatArray) -> IntegerArray:
    """The bins of records [n, d] in all features [n, features]."""
    return np.stack([feature.bins_of(records) for feature in features], axis=1)


def leaf_sums(bins: IntegerArray, contributions: FloatArray, leaves: int) -> FloatArray:
    """Sums of the contributions [n, k] of records in these leaves [leaves, k]; −1 is in none. Not private.

    Contributions are rounded towards zero to multiples of 2^-20, so that sums of them are exact in any order.
    """
    steps = np.trunc(np.ldexp(contributions, _GRID_BITS))
    inside = bins >= 0
    columns = [np.bincount(bins[inside], weights=column[inside], minlength=leaves) for column in steps.T]
    return np.ldexp(np.stack(columns, axis=1), -_GRID_BITS)


def _different(values: Sequence[float]) -> tuple[float, ...]:
    numbers = tuple(float(value) for value in values)
    if not numbers or len(set(numbers)) < len(numbers) or not np.isfinite(numbers).all():
        raise InvalidArgument(f"categories must be different finite numbers, got {numbers!r}. List each once.")
    return numbers


def _rising(ends: Sequence[float]) -> tuple[float, ...]:
    numbers = tuple(float(end) for end in ends)
    if len(numbers) < 2 or not np.isfinite(numbers).all() or not (np.diff(numbers) > 0).all():
        raise InvalidArgument(f"edges must be at least two rising numbers, got {len(numbers)}. Declare wider bounds.")
    return numbers


# ----------------------------------------------------------------------------------------------------------------------
# Cyclic boosting of one-feature trees on noisy sums of residuals.
#
# Proof: docs/proofs/cyclic-boosting.md.
#
# References:
#     Lou, Caruana, Gehrke 2012 (boosting one feature at a time). Nori, Caruana, Bu, Shen, Kulkarni 2021, "Accuracy,
#     interpretability, and differential privacy via explainable boosting", algorithm 2 (random splits, noisy sums).
# ----------------------------------------------------------------------------------------------------------------------


_COUNTS_SHARE = 0.05
# A leaf of the finest tree should hold so many times more than the noise that one whole run adds to it.
_FINEST = 5.0


@dataclass(frozen=True, kw_only=True)
class ShapeFunctions:
    """What was learned, one entry a feature.

    Args:
        values: what each bin adds to the scores [bins, k].
        counts: noisy numbers of records [bins], ≥ 0.
    """

    values: list[FloatArray]
    counts: list[FloatArray]


@dataclass(frozen=True, kw_only=True)
class CyclicBoosting:
    """Additive model Σⱼ fⱼ(xⱼ), fⱼ constant on bins: round by round, feature by feature, one noisy tree.

    A tree's leaves are intervals with random ends, or single categories: nothing in them depends on records. Its
    values come from one noisy vector, the sums of residuals in its leaves, and from noisy counts that are released
    once. A record lies in one leaf of each tree, so it moves the vector by its own residual and no more.

    Guarantee: one release spends `budget` under the declared relation: 1/20 of it on one histogram a feature, the
    rest on rounds × features releases of equal shares.

    Args:
        loss: of scores; its gradient's bound is what one record can move.
        budget: Gaussian, or pure for discrete Laplace noise.
        features: at least one.
        rounds: ≥ 1.
        learning_rate: > 0.
        smoothing: ≥ 0; every leaf is shrunk as if it held that many times the noise of one release more, at unit 1.
        unit: > 0, how far scores reach about: the smaller, the less noise they bear.
        neighboring_relation: the neighboring relation.
        rng: of the noise and of the trees; by default a fresh key of this object's own.
    """

    loss: Loss
    budget: Budget
    features: tuple[Feature, ...]
    rounds: int
    learning_rate: float
    smoothing: float
    unit: float = 1.0
    neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE
    rng: KeyedRNG = field(default_factory=KeyedRNG, repr=False, compare=False)

    def __post_init__(self) -> None:
        checks.integer(1, rounds=self.rounds)
        checks.positive(learning_rate=self.learning_rate)
        checks.non_negative(smoothing=self.smoothing)
        checks.positive(unit=self.unit)

    @property
    def releases(self) -> int:
        """How many vectors of sums are released."""
        return self.rounds * len(self.features)

    @cached_property
    def sums_share(self) -> Budget:
        """The budget of one vector of sums."""
        return self.budget.split(_COUNTS_SHARE, 1 - _COUNTS_SHARE)[1].split(*[1.0] * self.releases)[0]

    @cached_property
    def histograms(self) -> list[PrivateHistogram]:
        """The release of each feature's counts."""
        share = self.budget.split(_COUNTS_SHARE, 1 - _COUNTS_SHARE)[0].split(*[1.0] * len(self.features))[0]
        return [
            PrivateHistogram(
                budget=share,
                edges=tuple(np.arange(feature.bins + 1) - 0.5),
                neighboring_relation=self.neighboring_relation,
                rng=self.rng,
            )
            for feature in self.features
        ]

    def sums(self, leaves: int) -> SumsMechanism:
        """The release of residual sums [leaves, k]: one record moves them by its residual, replacing one by two."""
        bound = self.loss.lipschitz * self.neighboring_relation.sensitivity_factor
        return sums_mechanism(
            self.sums_share,
            # With several outputs a residual is e_y − p, of ℓ2 norm ≤ √2 and ℓ1 norm ≤ 2.
            l1_sensitivity=bound if self.loss.outputs == 1 else bound * 2**0.5,
            l2_sensitivity=bound,
            dimension=leaves * self.loss.outputs,
            rng=self.rng,
        )

    @cached_property
    def noise(self) -> float:
        """Deviation of the noise on one sum."""
        return noise_stddev(self.sums(1))

    def events(self) -> list[Event]:
        """The events of one release: the histograms, then all vectors of sums."""
        return [
            *(histogram.event() for histogram in self.histograms),
            SelfComposed(event=self.sums_share.event(), count=self.releases),
        ]

    def exact_value(
        self,
        bins: IntegerArray,
        leaves: int,
        scores: FloatArray,
        targets: FloatArray,
        weights: npt.ArrayLike = 1.0,
    ) -> FloatArray:
        """Sums of weighted residuals [leaves, k] of records in these leaves; −1 is in none. Not private."""
        residuals = -self.loss.gradients(scores, targets)
        return leaf_sums(bins, np.reshape(weights, (-1, 1)) * residuals, leaves)

    def release(self, bins: IntegerArray, targets: FloatArray, weights: npt.ArrayLike = 1.0) -> ShapeFunctions:
        """Shapes for records in bins [n, features] with targets [n].

        Weights in [0, 1] multiply residuals [n], which moves sums less; counts are of all records.
        """
        released = [histogram.release(column) for histogram, column in zip(self.histograms, bins.T, strict=True)]
        counts = [np.maximum(count, 0).astype(np.float64) for count in released]
        total = max(float(np.mean([count.sum() for count in released])), 1.0)
        most = self._most_leaves(total)
        trees = self.rng.new_stream("boosting-trees")
        values = [np.zeros((feature.bins, self.loss.outputs)) for feature in self.features]
        scores = np.zeros((len(bins), self.loss.outputs))
        for _ in range(self.rounds):
            for index, feature in enumerate(self.features):
                leaves = _leaves(feature, most, trees)
                step = self._tree(leaves, counts[index], bins[:, index], scores, targets, weights)[leaves]
                values[index] += step
                scores += np.where(bins[:, index, None] >= 0, step[bins[:, index]], 0.0)
        return ShapeFunctions(values=values, counts=counts)

    @property
    def _bend(self) -> float:
        """Curvature of a record's loss in one score."""
        return self.loss.curvature if self.loss.outputs == 1 else self.loss.curvature / 2

    def _most_leaves(self, total: float) -> float:
        """How fine a tree may be, by noisy numbers alone."""
        whole_run = self.noise / self.rounds**0.5
        return max(total * self._bend * self.unit / (_FINEST * whole_run), 2.0)

    def _tree(
        self,
        leaves: IntegerArray,
        counts: FloatArray,
        bins: IntegerArray,
        scores: FloatArray,
        targets: FloatArray,
        weights: npt.ArrayLike,
    ) -> FloatArray:
        """What each leaf adds to the scores [leaves, k]."""
        number = int(leaves.max()) + 1
        sums = self.exact_value(np.where(bins >= 0, leaves[bins], -1), number, scores, targets, weights)
        noisy = np.asarray(self.sums(number).release(sums))
        weight = np.bincount(leaves, weights=counts, minlength=number) * self._bend
        shrunk = np.maximum(weight, self._bend) + self.smoothing / self.unit * self.noise
        return self.learning_rate * noisy / shrunk[:, None]


def _leaves(feature: Feature, most: float, trees: RandomStream) -> IntegerArray:
    """The leaf of each bin [bins]: its own for categories; for intervals 2 … `most` leaves, few as often as many."""
    bins = feature.bins
    if not feature.ordered or bins <= 2:
        return np.arange(bins)
    drawn = trees.uniform(bins)
    number = min(round(2.0 * (min(most, bins) / 2.0) ** float(drawn[0])), bins)
    # The cuts are those with the smallest of independent numbers: any set of that size as likely as any other.
    cuts = np.sort(np.argsort(drawn[1:])[: number - 1]) + 1
    return np.searchsorted(cuts, np.arange(bins), side="right").astype(np.int64)


# ----------------------------------------------------------------------------------------------------------------------
# Explainable boosting: `HistGradientBoostingClassifier` and `HistGradientBoostingRegressor`.
# ----------------------------------------------------------------------------------------------------------------------


# About how far one curve of a regression reaches, in units of half the target's range; log-odds reach about 1.
_TARGET_UNIT = 0.1


@dataclass(kw_only=True, eq=False, repr=False)
class BinnedEstimator(PrivateEstimator):
    """An estimator that sees each record by the bins of its declared features."""

    bounds: ColumnBounds | None = None
    categories: Categories | None = None
    one_hot: Sequence[Sequence[int]] | None = None
    edges: Edges | None = None
    max_bins: int = 256
    neighboring_relation: str = "add_or_remove_one"

    def _declared_features(self, columns: int) -> tuple[Feature, ...]:
        return declared_features(
            columns,
            bounds=self.bounds,
            categories=self.categories,
            one_hot=self.one_hot,
            edges=self.edges,
            max_bins=self.max_bins,
        )

    def set_learned_arrays(self, arrays: Mapping[str, npt.NDArray[np.generic]], *, columns: int) -> Self:
        """As every estimator does it; the features follow from the parameters."""
        self.features_ = self._declared_features(columns)
        return super().set_learned_arrays(arrays, columns=columns)


@dataclass(kw_only=True, eq=False, repr=False)
class _Boosting(BinnedEstimator):
    """Parameters and steps that classifier and regressor share."""

    max_iter: int = 100
    learning_rate: float = 0.2
    smoothing: float = 3.0

    def _mechanism(self, columns: int, loss: Loss, *, unit: float = 1.0) -> CyclicBoosting:
        epsilon, delta = self._budget()
        return CyclicBoosting(
            loss=loss,
            budget=make_budget(epsilon=epsilon, delta=delta),
            features=self._declared_features(columns),
            rounds=checks.integer(1, max_iter=self.max_iter),
            learning_rate=self.learning_rate,
            smoothing=self.smoothing,
            unit=unit,
            neighboring_relation=declared_relation(self.neighboring_relation),
            rng=self._randomness(),
        )

    def _learn(self, boosting: CyclicBoosting, records: FloatArray, targets: FloatArray, weights: FloatArray) -> None:
        """Charge, release, and move each curve's mean into the intercept; records whose target is NaN are left out."""
        self._charge(boosting.events(), neighboring_relation=boosting.neighboring_relation)
        present = np.isfinite(targets)
        shapes = boosting.release(
            bins_of_records(boosting.features, records[present]), targets[present], weights[present]
        )
        # The means of the curves over noisy counts [features, k].
        means = [
            (count + 1.0) @ values / (count + 1.0).sum()
            for count, values in zip(shapes.counts, shapes.values, strict=True)
        ]
        self.features_ = boosting.features
        self.curves_ = np.concatenate([values - mean for values, mean in zip(shapes.values, means, strict=True)])
        self.intercept_: FloatArray = np.sum(means, axis=0)
        self.n_iter_ = boosting.rounds

    def shape_function(self, feature: int) -> tuple[Feature, FloatArray]:
        """The curve of one feature: its bins (`edges`, `values` or `columns`), and what each adds [bins] or [bins, K].

        Args:
            feature: index in `features_`.
        """
        check_is_fitted(self)
        checks.in_range(0, len(self.features_) - 1, feature=checks.integer(0, feature=feature))
        start = sum(other.bins for other in self.features_[:feature])
        curve = self.curves_[start : start + self.features_[feature].bins]
        return self.features_[feature], curve[:, 0] if curve.shape[1] == 1 else curve

    def feature_contributions(self, X: Numbers) -> FloatArray:
        """What each feature adds to each record's score [n, features], or [n, features, K]; with the intercept, all.

        An undeclared category adds nothing.
        """
        check_is_fitted(self)
        records = validate_matrix(X, estimator=self, reset=False)
        found = np.zeros((len(records), len(self.features_), self.curves_.shape[1]))
        start = 0
        for index, feature in enumerate(self.features_):
            bins = feature.bins_of(records)
            inside = bins >= 0
            found[inside, index] = self.curves_[start + bins[inside]]
            start += feature.bins
        return found[:, :, 0] if found.shape[2] == 1 else found

    def _scores(self, X: Numbers) -> FloatArray:
        sums = self.feature_contributions(X).sum(axis=1)
        return sums + (self.intercept_[0] if sums.ndim == 1 else self.intercept_)


@dataclass(kw_only=True, eq=False, repr=False)
class HistGradientBoostingClassifier(_Boosting, WeightedClassifier):
    """Private explainable boosting: log-odds that are a sum of one curve a feature.

    The most accurate estimator here for tables from ε = 1 on: it finds steps and plateaus that no line has, and
    `shape_function` shows what it found. Every numeric column is cut into intervals between its declared bounds.

    Guarantee: all curves are (epsilon, delta)-differentially private under `neighboring_relation`, as `guarantee_`
    states. A missing number is the middle of its bounds, numbers beyond them count as being on them, and a record with
    a label that is not among `classes` contributes nothing. Nothing else depends on the data: no attribute, no warning,
    no stopping rule.

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
        class_weight: None, or how much a record of each class counts, {class: weight ≥ 0}, from public knowledge or
            from counts that were paid for; a class that is not named counts 1.
        max_sample_weight: None, or the largest `sample_weight` of `fit`, > 0, from public knowledge; larger ones are
            cut to it.
        neighboring_relation: ``add_or_remove_one``, ``replace_special`` or ``replace_one``.
        ledger: None, or the account, or a reservation on it, that every fit is charged to.
        random_state: None, or a seed together with `reproducible`.
        reproducible: whether this is a test run; `guarantee_` then carries "not for release".

    Attributes:
        features_: the features, as declared.
        curves_: what each bin adds, one feature after the other [bins of all features, 1 or K].
        intercept_: [1] or [K].
        n_iter_: `max_iter`.
        classes_: the declared classes.
        guarantee_: the guarantee.
        events_: what was done.

    Example:
        >>> X, y = np.repeat([[0.2], [0.5], [0.8]], 2000, axis=0), np.repeat([0, 1, 0], 2000)
        >>> model = HistGradientBoostingClassifier(epsilon=2.0, delta=1e-6, bounds=(0.0, 1.0), classes=(0, 1))
        >>> model.fit(X, y).predict([[0.2], [0.5], [0.8]]).tolist()
        [0, 1, 0]

    References:
        Nori, Caruana, Bu, Shen, Kulkarni 2021, algorithm 2; docs/proofs/cyclic-boosting.md.
    """

    def fit(self, X: Numbers, y: Labels, sample_weight: Numbers | None = None) -> "HistGradientBoostingClassifier":
        """Fit to records X [n, d] with labels y [n]; charged first, then read.

        Args:
            X: [n, d].
            y: [n].
            sample_weight: None, or how much each record counts [n], from 0 to the declared `max_sample_weight`; a
                weight that is no number is 0.
        """
        classes = declared_classes(self.classes)
        records = validate_matrix(X, estimator=self, reset=True)
        found, weights = self._weighted_labels(y, len(records), sample_weight)
        if len(classes) == 2:
            loss, targets = Logistic(), 2.0 * found - 1.0
        else:
            loss, targets = Softmax(outputs=len(classes)), found.astype(np.float64)
        boosting = self._mechanism(records.shape[1], loss)
        self._learn(boosting, records, np.where(found >= 0, targets, np.nan), weights)
        self.classes_ = classes
        return self

    def predict_proba(self, X: Numbers) -> FloatArray:
        """Class probabilities [n, K]."""
        return class_probabilities(self._scores(X))


@dataclass(kw_only=True, eq=False, repr=False)
class HistGradientBoostingRegressor(_Boosting, PrivateRegressor):
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
        max_sample_weight: None, or the largest `sample_weight` of `fit`, > 0, from public knowledge; larger ones are
            cut to it.
        neighboring_relation: ``add_or_remove_one``, ``replace_special`` or ``replace_one``.
        ledger: None, or the account, or a reservation on it, that every fit is charged to.
        random_state: None, or a seed together with `reproducible`.
        reproducible: whether this is a test run; `guarantee_` then carries "not for release".

    Attributes:
        features_: the features, as declared.
        curves_: what each bin adds, one feature after the other [bins of all features, 1].
        intercept_: [1].
        n_iter_: `max_iter`.
        guarantee_: the guarantee.
        events_: what was done.

    Example:
        >>> X, y = np.repeat([[0.2], [0.5], [0.8]], 2000, axis=0), np.repeat([1.0, 9.0, 1.0], 2000)
        >>> model = HistGradientBoostingRegressor(epsilon=2.0, delta=1e-6, bounds=(0.0, 1.0), target_bounds=(0, 10))
        >>> bool(np.abs(model.fit(X, y).predict([[0.2], [0.5], [0.8]]) - [1, 9, 1]).max() < 1.0)
        True
    """

    max_residual: float = 0.25

    def fit(self, X: Numbers, y: Numbers, sample_weight: Numbers | None = None) -> "HistGradientBoostingRegressor":
        """Fit to records X [n, d] with targets y [n]; charged first, then read.

        Args:
            X: [n, d].
            y: [n].
            sample_weight: None, or how much each record counts [n], from 0 to the declared `max_sample_weight`; a
                weight that is no number is 0.
        """
        center, half = self._target_scale()
        records = validate_matrix(X, estimator=self, reset=True)
        targets, weights = self._targets(y, len(records), sample_weight, scale=(center, half))
        loss = HuberResidual(threshold=checks.positive(max_residual=self.max_residual))
        self._learn(self._mechanism(records.shape[1], loss, unit=_TARGET_UNIT), records, targets, weights)
        self.curves_ = self.curves_ * half
        self.intercept_ = self.intercept_ * half + center
        return self

    def predict(self, X: Numbers) -> FloatArray:
        """Predicted targets [n]; a missing entry is the middle of its bounds."""
        return self._scores(X)
