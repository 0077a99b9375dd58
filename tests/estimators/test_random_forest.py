"""Random forests: sensitivity, splits that no record moves, leaves, shares by hand, interactions, rare classes."""

import math

import numpy as np
import pytest

from sordino import accounting
from sordino.definitions import NeighboringRelation
from sordino.errors import InvalidArgument
from sordino.estimators import HistGradientBoostingClassifier, RandomForestClassifier, RandomForestRegressor
from sordino.estimators.hist_gradient_boosting import Feature, leaf_sums
from sordino.estimators.random_forest import LeafCounts, RandomTrees, draw_trees, leaf_shares
from sordino.events import compose
from sordino.mechanisms import make_budget
from sordino.mechanisms.calibration import GaussianBudget
from sordino.randomness import KeyedRNG

TEST_RUN = {"random_state": 1, "reproducible": True}
INTERVALS = Feature(columns=(0,), edges=tuple(np.linspace(-1, 1, 9).tolist()))
CODES = Feature(columns=(1,), values=(1.0, 2.0, 5.0))
GROUP = Feature(columns=(2, 3))
LONE = Feature(columns=(4,))
FEATURES = (INTERVALS, CODES, GROUP, LONE)


def trees(features=FEATURES, count=20, depth=5, seed=0):
    return draw_trees(
        features, count=count, depth=depth, stream=KeyedRNG(seed=seed, reproducible=True).new_stream("forest-trees")
    )


def all_bins(features=FEATURES):
    choices = [range(-1 if not feature.ordered else 0, feature.bins) for feature in features]
    return np.stack([axis.ravel() for axis in np.meshgrid(*choices, indexing="ij")], axis=1)


def test_leaves_are_those_of_a_walk_down_each_tree():
    drawn, bins = trees(), all_bins()
    found = drawn.leaves(bins)
    for row in range(0, len(bins), 7):
        for tree in range(20):
            node = 0
            for _ in range(5):
                feature = drawn.features[tree, node]
                place = bins[row, feature]
                node = 2 * node + 1 + bool(place >= 0 and drawn.right[tree, node, place])
            assert found[row, tree] == node - 31
    assert found.min() >= 0
    assert found.max() < 32


def test_every_split_divides_what_is_left_of_its_feature():
    drawn = trees(count=200)
    for tree in range(200):
        spans = {0: (0, 8)}
        for node in range(31):
            low, high = spans[node]
            feature = FEATURES[drawn.features[tree, node]]
            right = drawn.right[tree, node]
            assert not right[-1]  # no bin goes left
            assert not right[feature.bins :].any()
            left, there = (low, high), (low, high)
            if feature is INTERVALS:
                cut = int(np.flatnonzero(right[:8])[0])
                assert low < cut < high
                assert right[cut:8].all()
                left, there = (low, cut), (cut, high)
            else:
                assert right.sum() == 1 if feature.bins < 3 else 1 <= right.sum() < feature.bins
            spans[2 * node + 1], spans[2 * node + 2] = left, there
    counted = np.bincount(drawn.features[:, 0], minlength=4)
    assert counted.min() > 25  # of 200, each feature a quarter


def test_a_tree_with_nothing_left_to_split_sends_all_to_one_side():
    drawn = trees((Feature(columns=(0,), edges=(0.0, 0.5, 1.0)),), count=3, depth=4)
    found = drawn.leaves(np.array([[0], [1]]))
    assert (found[0] != found[1]).all()


def test_splits_are_the_same_for_any_records():
    X = np.random.default_rng(0).uniform(-1, 1, size=(300, 3))
    given = {"epsilon": 1.0, "delta": 1e-6, "bounds": (-1.0, 1.0), "classes": (0, 1), "n_estimators": 5}
    one = RandomForestClassifier(**given, **TEST_RUN).fit(X, X[:, 0] > 0)
    other = RandomForestClassifier(**given, **TEST_RUN).fit(np.zeros((0, 3)), np.zeros(0))
    assert (one.split_features_ == other.split_features_).all()
    assert (one.goes_right_ == other.goes_right_).all()


@pytest.mark.parametrize("relation", list(NeighboringRelation))
@pytest.mark.parametrize("delta", [0.0, 1e-6])
def test_no_neighbor_moves_a_tree_by_more_than_is_stated_and_one_reaches_it(relation, delta):
    mechanism = LeafCounts(
        budget=make_budget(epsilon=1.0, delta=delta), trees=3, outputs=3, neighboring_relation=relation
    )
    stated = mechanism.sums(8).l1_sensitivity if delta == 0 else mechanism.sums(8).l2_sensitivity
    generator, largest = np.random.default_rng(0), 0.0
    for trial in range(300):
        leaf = generator.integers(0, 8, size=6)
        rows = generator.dirichlet(np.ones(3), size=6) * generator.uniform(0, 1, size=(6, 1))
        if trial % 3 == 0:
            rows = np.eye(3)[generator.integers(0, 3, size=6)]
        others = leaf.copy(), rows.copy()
        if relation is NeighboringRelation.REPLACE_ONE:
            others[0][0], others[1][0] = generator.integers(0, 8), np.roll(rows[0], 1)
        else:
            others = leaf[1:], rows[1:]
        change = leaf_sums(leaf, rows, 8) - leaf_sums(*others, 8)
        largest = max(largest, np.abs(change).sum() if delta == 0 else np.linalg.norm(change))
    assert 0.99 * stated <= largest <= stated


@pytest.mark.parametrize(("epsilon", "delta"), [(1.0, 1e-5), (0.3, 0.0)])
def test_what_is_released_is_what_is_charged(epsilon, delta, monkeypatch):
    mechanism = LeafCounts(budget=make_budget(epsilon=epsilon, delta=delta), trees=100, outputs=2)
    spent = accounting.epsilon(compose(mechanism.events()), delta).upper
    assert 0.999 * epsilon < spent <= epsilon * (1 + 1e-9)
    if delta:
        assert mechanism.tree_share.noise_multiplier == pytest.approx(3.7306 * math.sqrt(100 / 0.98), rel=1e-4)
    asked = []
    kind = type(mechanism.sums(1))
    original = kind.release
    monkeypatch.setattr(kind, "release", lambda self, value: asked.append(self) or original(self, value))
    mechanism.release(np.zeros((50, 100), dtype=np.int64), np.ones((50, 2)) / 2, depth=3)
    assert len(asked) == 100


def test_the_noise_has_the_deviation_that_is_stated():
    mechanism = LeafCounts(budget=GaussianBudget(noise_multiplier=1.0), trees=400, outputs=2)
    sums, levels = mechanism.release(np.zeros((0, 400), dtype=np.int64), np.zeros((0, 2)), depth=8)
    assert levels == 2
    assert sums.shape == (400, 4, 2)
    assert sums.std() == pytest.approx(mechanism.noise, rel=0.05)


def test_shares_are_those_worked_out_by_hand():
    sums = np.array([[[6.0, 2.0], [1.0, 7.0]]])
    whole, found = leaf_shares(sums, noise=1.0, smoothing=3.0)
    assert whole == pytest.approx([8 / 18, 10 / 18])
    assert found[0, 0, 0] == pytest.approx((6 + 4 * 8 / 18) / 12)
    assert found[0, 1, 1] == pytest.approx((7 + 4 * 10 / 18) / 12)
    _, alone = leaf_shares(np.array([[[-5.0, 1.0], [3.0, 3.0]]]), noise=1.0, smoothing=0.0)
    assert alone.sum(axis=2) == pytest.approx(1)
    assert alone.min() > 0


def test_interactions_are_found_that_no_sum_of_curves_has():
    X = np.random.default_rng(0).uniform(-1, 1, size=(6000, 2))
    y = (X[:, 0] > 0) ^ (X[:, 1] > 0)
    given = {"epsilon": 1.0, "delta": 1e-6, "bounds": (-1.0, 1.0), "classes": (False, True)} | TEST_RUN
    assert RandomForestClassifier(**given).fit(X, y).score(X, y) > 0.85
    assert HistGradientBoostingClassifier(**given, max_iter=20).fit(X, y).score(X, y) < 0.65


@pytest.mark.parametrize("classes", [2, 3])
def test_classes_are_told_apart_by_numbers_codes_and_groups(classes):
    generator = np.random.default_rng(0)
    y = generator.integers(0, classes, size=4000)
    code = np.where(generator.random(4000) < 0.8, y, generator.integers(0, classes, size=4000))
    X = np.column_stack([generator.uniform(-1, 1, size=4000), code, np.eye(3)[(y + 1) % 3]])
    model = RandomForestClassifier(
        epsilon=1.0,
        delta=1e-6,
        bounds=(-1.0, 3.0),
        classes=tuple(range(classes)),
        categories={1: (0.0, 1.0, 2.0)},
        one_hot=[(2, 3, 4)],
        **TEST_RUN,
    ).fit(X, y)
    assert model.score(X, y) > 0.95
    chances = model.predict_proba(X[:50])
    assert chances.sum(axis=1) == pytest.approx(1)
    assert (model.classes_[chances.argmax(axis=1)] == model.predict(X[:50])).all()


def test_a_heavier_class_is_found_more_often_for_the_same_epsilon():
    generator = np.random.default_rng(0)
    X = generator.uniform(-1, 1, size=(8000, 4))
    y = generator.random(8000) < 1 / (1 + np.exp(4 - 4 * X[:, 0] - 3 * X[:, 1]))
    given = {"epsilon": 2.0, "delta": 1e-6, "bounds": (-1.0, 1.0), "classes": (False, True)} | TEST_RUN
    plain = RandomForestClassifier(**given).fit(X, y)
    heavy = RandomForestClassifier(**given, class_weight={True: 5.0}).fit(X, y)
    recalls = [float(model.predict(X[y]).mean()) for model in (plain, heavy)]
    assert recalls[1] > recalls[0] + 0.2
    assert heavy.events_ == plain.events_


def test_a_record_of_weight_zero_counts_as_a_record_and_nothing_else():
    X = np.random.default_rng(0).uniform(-1, 1, size=(500, 2))
    given = {"epsilon": 5.0, "delta": 1e-6, "bounds": (-1.0, 1.0), "target_bounds": (0.0, 10.0), "n_estimators": 10}
    model = RandomForestRegressor(**given, max_sample_weight=2.0, **TEST_RUN)
    weights = np.full(500, 2.0)
    weights[:100] = 0.0
    y = np.where(np.arange(500) < 100, 0.0, 8.0)
    assert model.fit(X, y, sample_weight=weights).predict(X).mean() > 6.5
    assert model.fit(X, y).predict(X).mean() < 6.5


def test_predictions_of_a_number_stay_in_their_range_and_near_the_truth():
    X = np.random.default_rng(0).uniform(-1, 1, size=(8000, 3))
    y = 20 + 8 * X[:, 0] + 5 * np.abs(X[:, 1])
    model = RandomForestRegressor(epsilon=3.0, delta=1e-6, bounds=(-1.0, 1.0), target_bounds=(10.0, 35.0), **TEST_RUN)
    found = model.fit(X, y).predict(X)
    assert found.min() >= 10
    assert found.max() <= 35
    assert np.mean((found - y) ** 2) < 0.5 * np.var(y)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"n_estimators": 0}, "n_estimators"),
        ({"max_depth": 13}, "max_depth"),
        ({"max_depth": 0}, "max_depth"),
        ({"smoothing": -1.0}, "smoothing"),
        ({"neighboring_relation": "some"}, "neighboring_relation"),
        ({"class_weight": "balanced"}, "class_weight must be a dict"),
    ],
)
def test_settings_out_of_range_are_refused_before_anything_is_charged(changes, words):
    model = RandomForestClassifier(epsilon=1.0, delta=1e-6, bounds=(0.0, 1.0), classes=(0, 1), **changes)
    with pytest.raises(InvalidArgument, match=words):
        model.fit([[0.5]], [1])
    assert not hasattr(model, "events_")


def test_a_forest_that_was_saved_predicts_as_before():
    X = np.random.default_rng(0).uniform(-1, 1, size=(400, 3))
    given = {"epsilon": 1.0, "delta": 1e-6, "bounds": (-1.0, 1.0), "classes": ("a", "b"), "n_estimators": 4}
    model = RandomForestClassifier(**given, **TEST_RUN).fit(X, np.where(X[:, 0] > 0, "a", "b"))
    again = RandomForestClassifier(**given).set_learned_arrays(model.learned_arrays(), columns=3)
    assert (again.predict_proba(X) == model.predict_proba(X)).all()
    assert isinstance(RandomTrees(features=model.split_features_, right=model.goes_right_).depth, int)
