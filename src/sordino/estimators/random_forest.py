"""Random forests: `RandomForestClassifier` and `RandomForestRegressor`.

Splits are drawn from the declared ranges, as in extremely randomized trees, and never from records; what is released
are noisy counts in the leaves.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt
from sklearn.utils.validation import check_is_fitted

from sordino import checks
from sordino.definitions import NeighboringRelation
from sordino.estimators.base import (
    Labels,
    PrivateRegressor,
    SumsMechanism,
    WeightedClassifier,
    class_probabilities,
    declared_classes,
    declared_relation,
    noise_stddev,
    sums_mechanism,
    validate_matrix,
)
from sordino.estimators.hist_gradient_boosting import BinnedEstimator, Feature, bins_of_records, leaf_sums
from sordino.events import Event, SelfComposed
from sordino.mechanisms import PrivateCount, make_budget
from sordino.mechanisms.base import FloatArray, Numbers
from sordino.mechanisms.calibration import Budget
from sordino.randomness import KeyedRNG, RandomStream

IntegerArray = npt.NDArray[np.int64]
BooleanArray = npt.NDArray[np.bool_]


# ----------------------------------------------------------------------------------------------------------------------
# Trees whose splits are drawn without a look at records.
#
# References:
#     Geurts, Ernst, Wehenkel 2006, "Extremely randomized trees". Fletcher, Islam 2017, "Differentially private random
#     decision forests using smooth sensitivity".
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class RandomTrees:
    """Complete binary trees: node i has the children 2i + 1 (left) and 2i + 2 (right).

    Args:
        features: the feature of each node [T, 2^depth − 1].
        right: the bins of that feature that go right [T, 2^depth − 1, bins + 1]; the last entry means no bin.
    """

    features: IntegerArray
    right: BooleanArray

    @property
    def depth(self) -> int:
        """Number of levels of splits."""
        return (self.features.shape[1] + 1).bit_length() - 1

    def leaves(self, bins: IntegerArray) -> IntegerArray:
        """The leaf of each record in each tree [n, T], 0 … 2^depth − 1, for its bins [n, features]."""
        columns = self.right.shape[2]
        everywhere = np.ascontiguousarray(np.where(bins < 0, columns - 1, bins).T)
        rows = np.arange(len(bins))
        found = np.zeros((len(bins), len(self.features)), dtype=np.int64)
        for tree, (features, right) in enumerate(zip(self.features, self.right, strict=True)):
            goes_right, node = right.ravel(), np.zeros(len(bins), dtype=np.int64)
            for _ in range(self.depth):
                node = 2 * node + 1 + goes_right[node * columns + everywhere[features[node], rows]]
            found[:, tree] = node - self.features.shape[1]
        return found


def draw_trees(features: Sequence[Feature], *, count: int, depth: int, stream: RandomStream) -> RandomTrees:
    """Trees whose nodes split a random feature: intervals at a random end that is left there, categories in two sets.

    Example:
        >>> trees = draw_trees([Feature(columns=(0,), edges=(0.0, 0.5, 1.0))], count=3, depth=1,
        ...                    stream=KeyedRNG().new_stream("forest-trees"))
        >>> trees.leaves(np.array([[0], [1], [1]])).tolist()
        [[0, 0, 0], [1, 1, 1], [1, 1, 1]]
    """
    sizes = np.array([feature.bins for feature in features])
    ordered = np.array([feature.ordered for feature in features])
    most = int(sizes.max())
    chosen = np.zeros((count, 2**depth - 1), dtype=np.int64)
    right = np.zeros((count, 2**depth - 1, most + 1), dtype=np.bool_)
    low = np.zeros((count, 1, len(sizes)), dtype=np.int32)
    high = np.broadcast_to(sizes.astype(np.int32), low.shape).copy()
    for level in range(depth):
        width = 2**level
        drawn = stream.uniform(count * width * (len(sizes) + 1)).reshape(count, width, -1)
        # Features whose interval is down to one bin come last.
        picked = np.where(ordered & (high - low < 2), -1.0, drawn[:, :, :-1]).argmax(axis=2)
        first, last = (np.take_along_axis(ends, picked[:, :, None], axis=2)[:, :, 0] for ends in (low, high))
        cut = first + 1 + (drawn[:, :, -1] * np.maximum(last - first - 1, 0)).astype(np.int32)
        nodes = slice(width - 1, 2 * width - 1)
        chosen[:, nodes] = picked
        right[:, nodes, :most] = np.arange(most) >= cut[:, :, None]
        unordered = np.nonzero(~ordered[picked])
        here = sizes[picked[unordered]]
        # A set of 1 … bins − 1 categories: those with the smallest of independent numbers.
        numbers = stream.uniform(len(here) * most).reshape(len(here), most)
        ranks = np.where(np.arange(most) < here[:, None], numbers, 2.0).argsort(axis=1).argsort(axis=1)
        size = 1 + (drawn[:, :, -1][unordered] * np.maximum(here - 1, 1)).astype(np.int64)
        right[unordered[0], unordered[1] + width - 1, :most] = ranks < size[:, None]
        low, high = np.repeat(low, 2, axis=1), np.repeat(high, 2, axis=1)
        trees, parents = np.nonzero(ordered[picked])
        feature = picked[trees, parents]
        high[trees, 2 * parents, feature] = cut[trees, parents]
        low[trees, 2 * parents + 1, feature] = cut[trees, parents]
    return RandomTrees(features=chosen, right=right)


# ----------------------------------------------------------------------------------------------------------------------
# Noisy counts in the leaves.
#
# Proof: docs/proofs/random-forests.md.
# ----------------------------------------------------------------------------------------------------------------------


_COUNT_SHARE = 0.02
# No leaf is surer than this of any class.
_LEAST_SHARE = 1e-3
# The least depth, where the trees have it: what single features tell apart is found at any noise.
_LEAST_DEPTH = 2


@dataclass(frozen=True, kw_only=True)
class LeafCounts:
    """One vector a tree: what its leaves hold of each class.

    A record adds its contribution, non-negative numbers with a sum of at most 1, to one leaf of each tree.

    Guarantee: one release spends `budget` under the declared relation: 1/50 of it on the number of records, the rest
    on one vector a tree, of equal shares.

    Args:
        budget: Gaussian, or pure for discrete Laplace noise.
        trees: number of trees.
        outputs: number of classes K; 2 for a number between the ends of its range.
        neighboring_relation: the neighboring relation.
        rng: of the noise; by default a fresh key of this object's own.
    """

    budget: Budget
    trees: int
    outputs: int
    neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE
    rng: KeyedRNG = field(default_factory=KeyedRNG, repr=False, compare=False)

    @cached_property
    def count(self) -> PrivateCount:
        """The release of the number of records."""
        return PrivateCount(budget=self.budget.split(_COUNT_SHARE, 1 - _COUNT_SHARE)[0], rng=self.rng)

    @cached_property
    def tree_share(self) -> Budget:
        """The budget of one tree."""
        return self.budget.split(_COUNT_SHARE, 1 - _COUNT_SHARE)[1].split(*[1.0] * self.trees)[0]

    def sums(self, leaves: int) -> SumsMechanism:
        """The release of one tree's leaves [leaves, K].

        Contributions are non-negative with a sum of at most 1: two of them differ by at most √2 in ℓ2 norm and 2 in ℓ1.
        """
        moved = self.neighboring_relation.sensitivity_factor
        return sums_mechanism(
            self.tree_share,
            l1_sensitivity=moved,
            l2_sensitivity=moved**0.5,
            dimension=leaves * self.outputs,
            rng=self.rng,
        )

    @cached_property
    def noise(self) -> float:
        """Deviation of the noise on one number."""
        return noise_stddev(self.sums(1))

    def events(self) -> list[Event]:
        """The events of one release."""
        return [self.count.event(), SelfComposed(event=self.tree_share.event(), count=self.trees)]

    def release(self, leaves: IntegerArray, contributions: FloatArray, *, depth: int) -> tuple[FloatArray, int]:
        """Noisy sums [T, 2^levels, K] and the number of levels, at most `depth`, that the noise lets the trees have.

        Args:
            leaves: of each record in each tree, at full depth [n, T].
            contributions: [n, K].
            depth: of the trees.
        """
        records = max(self.count.release(contributions), 1)
        levels = int(np.clip(round(float(np.log2(records / self.noise))), min(_LEAST_DEPTH, depth), depth))
        mechanism = self.sums(2**levels)
        exact = (leaf_sums(column, contributions, 2**levels) for column in (leaves >> (depth - levels)).T)
        return np.stack([np.asarray(mechanism.release(value)) for value in exact]), levels


def leaf_shares(sums: FloatArray, *, noise: float, smoothing: float) -> tuple[FloatArray, FloatArray]:
    """Shares of the classes in all records [K] and in each leaf [T, leaves, K].

    From the root down each node is shrunk towards its parent, as if it held `smoothing` times the deviation of its
    noise of records like the parent's. Post-processing of noisy sums.
    """
    trees, leaves, outputs = sums.shape
    total = np.maximum(sums.sum(axis=(0, 1)), 0.0) + 1.0
    whole = total / total.sum()
    found = np.broadcast_to(whole, (trees, 1, outputs))
    depth = leaves.bit_length() - 1
    for level in range(1, depth + 1):
        node = sums.reshape(trees, 2**level, -1, outputs).sum(axis=2)
        pseudo = smoothing * noise * 2 ** ((depth - level) / 2) * outputs / 2 + 1.0
        held = node.sum(axis=2, keepdims=True)
        mixed = (np.where(held > 0, node, 0.0) + pseudo * np.repeat(found, 2, axis=1)) / (
            np.maximum(held, 0.0) + pseudo
        )
        mixed = np.clip(mixed, _LEAST_SHARE, 1.0)
        found = mixed / mixed.sum(axis=2, keepdims=True)
    return whole, found


# ----------------------------------------------------------------------------------------------------------------------
# The estimators.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True, eq=False, repr=False)
class _Forest(BinnedEstimator):
    """Parameters and steps that classifier and regressor share."""

    n_estimators: int = 100
    max_depth: int = 8
    max_bins: int = 64
    smoothing: float = 1.0
    values_: FloatArray = field(init=False)
    intercept_: FloatArray = field(init=False)

    def _mechanism(self, outputs: int) -> LeafCounts:
        epsilon, delta = self._budget()
        checks.in_range(1, 12, max_depth=checks.integer(1, max_depth=self.max_depth))
        checks.non_negative(smoothing=self.smoothing)
        return LeafCounts(
            budget=make_budget(epsilon=epsilon, delta=delta),
            trees=checks.integer(1, n_estimators=self.n_estimators),
            outputs=outputs,
            neighboring_relation=declared_relation(self.neighboring_relation),
            rng=self._randomness(),
        )

    def _shares(
        self, mechanism: LeafCounts, records: FloatArray, contributions: FloatArray
    ) -> tuple[FloatArray, FloatArray, float]:
        """Shares of the classes [K], in each leaf [T, leaves, K], and how much each tree's difference counts."""
        features = self._declared_features(records.shape[1])
        self._charge(mechanism.events(), neighboring_relation=mechanism.neighboring_relation)
        trees = draw_trees(
            features, count=mechanism.trees, depth=self.max_depth, stream=mechanism.rng.new_stream("forest-trees")
        )
        bins = bins_of_records(features, records)
        sums, levels = mechanism.release(trees.leaves(bins), contributions, depth=self.max_depth)
        self.features_ = features
        self.split_features_, self.goes_right_, self.depth_ = trees.features, trees.right, levels
        whole, found = leaf_shares(sums, noise=mechanism.noise, smoothing=self.smoothing)
        # Each feature is split trees · levels / features times: with this weight it counts about once.
        weight = max(len(features) / levels, 1.0) / mechanism.trees
        return whole, np.repeat(found, 2 ** (self.max_depth - levels), axis=1), min(weight, 1.0)

    def _leaf_values(self, X: Numbers) -> FloatArray:
        """Intercept and the values of all leaves that a record is in, added up [n, K]."""
        check_is_fitted(self)
        records = validate_matrix(X, estimator=self, reset=False)
        bins = bins_of_records(self.features_, records)
        trees = RandomTrees(features=self.split_features_, right=self.goes_right_)
        scores = np.tile(self.intercept_, (len(records), 1))
        for values, leaves in zip(self.values_, trees.leaves(bins).T, strict=True):
            scores += values[leaves]
        return scores


@dataclass(kw_only=True, eq=False, repr=False)
class RandomForestClassifier(_Forest, WeightedClassifier):
    """A private random forest: trees with random splits of the declared ranges, and noisy counts in their leaves.

    It finds interactions of features, which the curves of boosting don't have; where features add up, boosting is more
    accurate from ε = 1 on. Splits are those of extremely randomized trees: splits that are chosen by records cost
    budget at every node. Trees don't vote: each
    adds its log-odds less those of all records, weighted so that every feature counts about once.

    Guarantee: all leaves are (epsilon, delta)-differentially private under `neighboring_relation`, as `guarantee_`
    states. A missing number is the middle of its bounds, numbers beyond them count as being on them, and a record with
    a label that is not among `classes` contributes nothing. Nothing else depends on the data: no split, no attribute,
    no warning.

    Args:
        epsilon: ε > 0. Required.
        delta: δ in [0, 1); 0 for geometric and Laplace noise. Required.
        bounds: (lower, upper), numbers or one a column, from public knowledge. Required.
        classes: all labels, at least two. Required.
        categories: the listed values of columns that hold codes, {column: values}; others go left everywhere.
        one_hot: groups of columns of which one is set, each group one feature.
        edges: intervals of single columns, {column: rising ends}, where equal widths serve badly.
        n_estimators: number of trees ≥ 1; they share the budget.
        max_depth: 1 … 12; trees are no deeper than a noisy count and the noise allow.
        max_bins: number of intervals of a numeric column, ≥ 2.
        smoothing: ≥ 0; how strongly nodes are drawn towards their parents, in units of their noise.
        class_weight: None, or how much a record of each class counts, {class: weight ≥ 0}, from public knowledge or
            from counts that were paid for; a class that is not named counts 1.
        max_sample_weight: None, or the largest `sample_weight` of `fit`, > 0, from public knowledge.
        neighboring_relation: ``add_or_remove_one``, ``replace_special`` or ``replace_one``.
        ledger: None, or the account, or a reservation on it, that every fit is charged to.
        random_state: None, or a seed together with `reproducible`.
        reproducible: whether this is a test run; `guarantee_` then carries "not for release".

    Attributes:
        features_: the features, as declared.
        split_features_: the feature of each node [T, 2^max_depth − 1].
        goes_right_: the bins of it that go right [T, 2^max_depth − 1, bins + 1].
        values_: what each leaf adds [T, 2^max_depth, 1 or K].
        intercept_: log-odds, or logarithms of the shares, of all records [1 or K].
        depth_: levels whose leaves were released.
        classes_: the declared classes.
        guarantee_: the guarantee.
        events_: what was done.

    Example:
        >>> X, y = np.repeat([[0.2], [0.5], [0.8]], 2000, axis=0), np.repeat([0, 1, 0], 2000)
        >>> model = RandomForestClassifier(epsilon=2.0, delta=1e-6, bounds=(0.0, 1.0), classes=(0, 1))
        >>> model.fit(X, y).predict([[0.2], [0.5], [0.8]]).tolist()
        [0, 1, 0]

    References:
        Geurts, Ernst, Wehenkel 2006; docs/proofs/random-forests.md.
    """

    def fit(self, X: Numbers, y: Labels, sample_weight: Numbers | None = None) -> "RandomForestClassifier":
        """Fit to records X [n, d] with labels y [n]; charged first, then read.

        Args:
            X: [n, d].
            y: [n].
            sample_weight: None, or how much each record counts [n], from 0 to the declared `max_sample_weight`; a
                weight that is no number is 0.
        """
        classes = declared_classes(self.classes)
        mechanism = self._mechanism(len(classes))
        records = validate_matrix(X, estimator=self, reset=True)
        found, weights = self._weighted_labels(y, len(records), sample_weight)
        present = found >= 0
        contributions = np.eye(len(classes))[found[present]] * weights[present, None]
        whole, leaves, weight = self._shares(mechanism, records[present], contributions)
        self.intercept_ = np.log(whole)
        self.values_ = weight * (np.log(leaves) - self.intercept_)
        if len(classes) == 2:
            self.intercept_ = self.intercept_[1:] - self.intercept_[:1]
            self.values_ = self.values_[:, :, 1:] - self.values_[:, :, :1]
        self.classes_ = classes
        return self

    def _scores(self, X: Numbers) -> FloatArray:
        scores = self._leaf_values(X)
        return scores[:, 0] if scores.shape[1] == 1 else scores

    def predict_proba(self, X: Numbers) -> FloatArray:
        """Class probabilities [n, K]."""
        return class_probabilities(self._scores(X))


@dataclass(kw_only=True, eq=False, repr=False)
class RandomForestRegressor(_Forest, PrivateRegressor):
    """A private random forest for a number: that of `RandomForestClassifier` between the ends of the target's range.

    A target at 30 % of its range counts 0.7 for the lower end and 0.3 for the upper one, so a leaf's mean comes from
    one noisy vector. Predictions are cut to `target_bounds`.

    Guarantee: that of `RandomForestClassifier`; targets are clipped to `target_bounds`, and a record whose target is no
    finite number contributes nothing.

    Args:
        epsilon: ε > 0. Required.
        delta: δ in [0, 1); 0 for geometric and Laplace noise. Required.
        bounds: (lower, upper), numbers or one a column, from public knowledge. Required.
        target_bounds: (lowest, highest) target, from public knowledge. Required.
        categories: the listed values of columns that hold codes, {column: values}; others go left everywhere.
        one_hot: groups of columns of which one is set, each group one feature.
        edges: intervals of single columns, {column: rising ends}.
        n_estimators: number of trees ≥ 1; they share the budget.
        max_depth: 1 … 12; trees are no deeper than a noisy count and the noise allow.
        max_bins: number of intervals of a numeric column, ≥ 2.
        smoothing: ≥ 0; how strongly nodes are drawn towards their parents, in units of their noise.
        max_sample_weight: None, or the largest `sample_weight` of `fit`, > 0, from public knowledge.
        neighboring_relation: ``add_or_remove_one``, ``replace_special`` or ``replace_one``.
        ledger: None, or the account, or a reservation on it, that every fit is charged to.
        random_state: None, or a seed together with `reproducible`.
        reproducible: whether this is a test run; `guarantee_` then carries "not for release".

    Attributes:
        features_: the features, as declared.
        split_features_: the feature of each node [T, 2^max_depth − 1].
        goes_right_: the bins of it that go right [T, 2^max_depth − 1, bins + 1].
        values_: what each leaf adds [T, 2^max_depth, 1].
        intercept_: the mean [1].
        depth_: levels whose leaves were released.
        guarantee_: the guarantee.
        events_: what was done.

    Example:
        >>> X, y = np.repeat([[0.2], [0.5], [0.8]], 2000, axis=0), np.repeat([1.0, 9.0, 1.0], 2000)
        >>> model = RandomForestRegressor(epsilon=5.0, delta=1e-6, bounds=(0.0, 1.0), target_bounds=(0, 10))
        >>> low, high, again = model.fit(X, y).predict([[0.2], [0.5], [0.8]])
        >>> bool(high > low + 2 and high > again + 2)
        True
    """

    smoothing: float = 6.0

    def fit(self, X: Numbers, y: Numbers, sample_weight: Numbers | None = None) -> "RandomForestRegressor":
        """Fit to records X [n, d] with targets y [n]; charged first, then read.

        Args:
            X: [n, d].
            y: [n].
            sample_weight: None, or how much each record counts [n], from 0 to the declared `max_sample_weight`; a
                weight that is no number is 0.
        """
        center, half = self._target_scale()
        mechanism = self._mechanism(2)
        records = validate_matrix(X, estimator=self, reset=True)
        targets, weights = self._targets(y, len(records), sample_weight, scale=(center, half))
        present = np.isfinite(targets)
        upper = (1.0 + targets[present]) / 2
        contributions = np.stack([1.0 - upper, upper], axis=1) * weights[present, None]
        whole, leaves, weight = self._shares(mechanism, records[present], contributions)
        self.intercept_ = center + half * (2 * whole[1:] - 1)
        self.values_ = half * weight * 2 * (leaves[:, :, 1:] - whole[1])
        return self

    def predict(self, X: Numbers) -> FloatArray:
        """Predicted targets [n], within `target_bounds`; a missing entry is the middle of its bounds."""
        return np.clip(self._leaf_values(X)[:, 0], *self._target_ends())
