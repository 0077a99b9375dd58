"""Explainable boosting: sensitivity, noise, the bill, random trees, curves, and Adult."""

import math

import numpy as np
import pytest
from sklearn.ensemble import HistGradientBoostingRegressor as PlainBoosting

import sordino.data
from sordino import accounting
from sordino.definitions import NeighboringRelation
from sordino.errors import InvalidArgument
from sordino.estimators import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sordino.estimators.hist_gradient_boosting import CyclicBoosting, Feature, _leaves, declared_features
from sordino.estimators.losses import HuberResidual, Logistic, Softmax
from sordino.events import SelfComposed, compose
from sordino.mechanisms import GaussianBudget, PureBudget, make_budget

ADD, REPLACE, ZERO = NeighboringRelation
INTERVALS = Feature(columns=(0,), edges=tuple(np.linspace(0, 1, 33)))
COLOURS = Feature(columns=(1, 2, 3))
LOSSES = pytest.mark.parametrize(
    ("loss", "labels"),
    [
        (Logistic(), (-1.0, 1.0)),
        (HuberResidual(threshold=0.3), (-1.0, 0.0, 1.0)),
        (Softmax(outputs=3), (0.0, 1.0, 2.0)),
    ],
    ids=["logistic", "huber-residual", "softmax"],
)


def boosting(loss=Logistic(), spent=GaussianBudget(noise_multiplier=1.0), **changes):  # noqa: B008 (frozen)
    settings = {"features": (INTERVALS, COLOURS), "rounds": 6, "learning_rate": 0.2, "smoothing": 3.0}
    return CyclicBoosting(loss=loss, budget=spent, **(settings | changes))


@LOSSES
@pytest.mark.parametrize("neighboring_relation", [ADD, REPLACE])
@pytest.mark.parametrize("pure", [False, True])
def test_no_neighbor_moves_the_sums_by_more_than_their_sensitivity(loss, labels, neighboring_relation, pure):
    spent = PureBudget(epsilon=1.0) if pure else GaussianBudget(noise_multiplier=1.0)
    mechanism = boosting(loss, spent, neighboring_relation=neighboring_relation)
    release = mechanism.sums(4)
    stated = release.l1_sensitivity if pure else release.l2_sensitivity
    generator = np.random.default_rng(0)
    largest = 0.0
    for _ in range(300):
        count = int(generator.integers(1, 8))
        bins = generator.integers(-1, 4, size=count)
        scores = generator.choice([0.0, 1.0, -60.0, 60.0], size=(count, loss.outputs)) * generator.random()
        targets = generator.choice(labels, size=count)
        more = mechanism.exact_value(bins, 4, scores, targets)
        if neighboring_relation is ADD:
            less = mechanism.exact_value(bins[1:], 4, scores[1:], targets[1:])
        else:
            bins[0], targets[0] = generator.integers(-1, 4), generator.choice(labels)
            scores[0] = generator.choice([0.0, -60.0, 60.0], size=loss.outputs)
            less = mechanism.exact_value(bins, 4, scores, targets)
        largest = max(largest, float(np.linalg.norm((more - less).ravel(), ord=1 if pure else 2)))
    assert 0.7 * stated < largest <= stated


def test_sums_are_those_of_residuals_and_the_same_in_any_order():
    generator = np.random.default_rng(1)
    bins, scores = generator.integers(0, 5, size=1000), generator.normal(size=(1000, 1))
    targets = generator.choice([-1.0, 1.0], size=1000)
    expected = np.zeros(5)
    for place, score, target in zip(bins, scores[:, 0], targets, strict=True):
        expected[place] += (target > 0) - 1 / (1 + math.exp(-score))
    found = boosting().exact_value(bins, 5, scores, targets)
    assert found[:, 0] == pytest.approx(expected, abs=1e-3)
    order = generator.permutation(1000)
    assert (boosting().exact_value(bins[order], 5, scores[order], targets[order]) == found).all()


def test_the_noise_of_a_sum_is_that_of_all_releases_together(seeded, two_armed):
    mechanism = boosting(
        spent=GaussianBudget(noise_multiplier=2.0), features=(INTERVALS,) * 13, rounds=100, rng=seeded(1)
    )
    noise = np.asarray(mechanism.sums(20_000).release(np.zeros(20_000)))
    two_armed(noise, 2.0 * math.sqrt(1300 / 0.95))
    assert mechanism.noise == pytest.approx(2.0 * math.sqrt(1300 / 0.95), rel=1e-4)
    counts = np.array([h.release(np.zeros(0)) for h in mechanism.histograms * 50]).ravel().astype(float)
    two_armed(counts, 2.0 * math.sqrt(13 / 0.05))


@pytest.mark.parametrize(("epsilon", "delta"), [(1.0, 0.0), (0.1, 1e-5), (1.0, 1e-5), (8.0, 1e-6)])
@pytest.mark.parametrize("features", [1, 13])
def test_histograms_and_sums_spend_what_is_declared(epsilon, delta, features):
    mechanism = boosting(spent=make_budget(epsilon=epsilon, delta=delta), features=(INTERVALS,) * features, rounds=20)
    events = mechanism.events()
    assert len(events) == features + 1
    assert 0.999 * epsilon < accounting.epsilon(compose(events), delta).upper <= epsilon * (1 + 1e-9)
    rounds = events[-1]
    assert isinstance(rounds, SelfComposed)
    assert rounds.count == 20 * features
    if delta > 0:  # and by hand: 1/z² add up
        parts = sum(event.noise_multiplier**-2 for event in events[:-1])
        total = parts + rounds.count * rounds.event.noise_multiplier**-2
        assert total == pytest.approx(mechanism.budget.noise_multiplier**-2, rel=1e-12)


def test_as_many_vectors_are_released_as_were_charged(seeded, monkeypatch):
    mechanism = boosting(rng=seeded(0))
    asked = []
    original = CyclicBoosting.sums
    monkeypatch.setattr(CyclicBoosting, "sums", lambda self, leaves: asked.append(leaves) or original(self, leaves))
    assert mechanism.noise > 0  # asks once, and is kept
    del asked[:]
    mechanism.release(np.zeros((5, 2), dtype=np.int64), np.ones(5))
    assert len(asked) == mechanism.releases == 12


def test_trees_don_t_depend_on_records_and_cuts_are_anywhere_alike(seeded):
    trees = seeded(3).new_stream("test")
    sizes, cuts = [], np.zeros(31)
    for _ in range(3000):
        leaves = _leaves(INTERVALS, 8.0, trees)
        assert leaves[0] == 0
        assert set(np.diff(leaves)) <= {0, 1}
        sizes.append(leaves[-1] + 1)
        cuts += np.diff(leaves)
    assert (min(sizes), max(sizes)) == (2, 8)
    assert np.median(sizes) == pytest.approx(4, abs=1)
    assert cuts == pytest.approx(np.full(31, cuts.mean()), rel=0.25)
    assert _leaves(COLOURS, 2.0, trees).tolist() == [0, 1, 2]


def test_bins_are_those_of_the_declared_features():
    features = declared_features(
        6, bounds=(0.0, 10.0), categories={1: (5.0, 3.0)}, one_hot=[(2, 3)], edges={5: (0.0, 1.0, 100.0)}, max_bins=10
    )
    assert [feature.columns for feature in features] == [(0,), (1,), (2, 3), (4,), (5,)]
    X = np.array([[0.0, 3.0, 0, 1, 10.0, 50.0], [9.99, 5.0, 1, 0, -7.0, 1e9], [4.0, 4.0, 0, 0, 99.0, 0.5]])
    bins = np.stack([feature.bins_of(X) for feature in features], axis=1)
    assert bins.tolist() == [[0, 1, 1, 9, 1], [9, 0, 0, 0, 1], [4, -1, -1, 9, 0]]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"categories": {0: (1.0, 1.0)}}, "categories must be different"),
        ({"edges": {0: (1.0, 1.0)}}, "edges must be at least two rising"),
        ({"one_hot": [(0, 1)], "categories": {1: (1.0,)}}, "once at most"),
        ({"one_hot": [(0, 7)]}, "once at most"),
        ({"max_bins": 1}, "max_bins"),
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"smoothing": -1.0}, "smoothing"),
        ({"max_iter": 0}, "max_iter"),
    ],
)
def test_declarations_that_contradict_one_another_are_refused(changes, words):
    model = HistGradientBoostingClassifier(epsilon=1.0, delta=1e-5, bounds=(0.0, 1.0), classes=(0, 1), **changes)
    with pytest.raises(InvalidArgument, match=words):
        model.fit(np.zeros((4, 2)), [0, 1, 0, 1])
    assert not hasattr(model, "guarantee_")


def curved(count=8000, seed=0):
    generator = np.random.default_rng(seed)
    X = generator.uniform(0, 1, size=(count, 3))
    return X, np.sin(6 * X[:, 0]) + 2.0 * (X[:, 1] > 0.7), generator


def test_curves_are_found_where_privacy_is_cheap():
    X, clean, generator = curved()
    y = clean + 0.1 * generator.normal(size=len(X))
    model = HistGradientBoostingRegressor(
        epsilon=300.0, delta=1e-3, bounds=(0.0, 1.0), target_bounds=(-1.5, 3.5), random_state=0, reproducible=True
    ).fit(X, y)
    assert model.score(X, clean) > 0.98
    plain = PlainBoosting(interaction_cst="no_interactions").fit(X, y)
    assert np.abs(model.predict(X) - plain.predict(X)).mean() < 0.1  # near a step both may err
    feature, curve = model.shape_function(0)
    middles = (np.array(feature.edges[1:]) + np.array(feature.edges[:-1])) / 2
    truth = np.sin(6 * middles)
    assert curve == pytest.approx(truth - truth.mean(), abs=0.3)
    assert np.abs(model.shape_function(2)[1]).max() < 0.2


@pytest.mark.parametrize("classes", [2, 3])
def test_scores_are_the_sum_of_the_contributions(classes):
    X, clean, _ = curved(3000)
    y = np.digitize(clean, [1.0] if classes == 2 else [0.0, 1.5])
    model = HistGradientBoostingClassifier(
        epsilon=20.0, delta=1e-4, bounds=(0.0, 1.0), classes=range(classes), random_state=0, reproducible=True
    ).fit(X, y)
    assert model.score(X, y) > 0.85
    parts = model.feature_contributions(X)
    assert parts.shape == (3000, 3) if classes == 2 else (3000, 3, 3)
    scores = parts.sum(axis=1) + (model.intercept_[0] if classes == 2 else model.intercept_)
    assert scores == pytest.approx(model.decision_function(X))
    assert model.predict_proba(X).sum(axis=1) == pytest.approx(np.ones(3000))
    assert (model.classes_[model.predict_proba(X).argmax(axis=1)] == model.predict(X)).all()
    # By hand, for one record and one feature.
    feature, curve = model.shape_function(1)
    place = sum(edge <= X[7, 1] for edge in feature.edges) - 1
    assert parts[7, 1] == pytest.approx(curve[place])


def test_a_category_that_nobody_declared_adds_nothing():
    generator = np.random.default_rng(0)
    X = generator.integers(0, 4, size=(4000, 1)).astype(float)  # 3 is not declared
    model = HistGradientBoostingClassifier(
        epsilon=5.0, delta=1e-5, bounds=(0.0, 1.0), classes=(0, 1), categories={0: (0, 1, 2)}
    ).fit(X, X[:, 0] == 1)
    assert model.predict([[0.0], [1.0], [2.0]]).tolist() == [0, 1, 0]
    assert model.feature_contributions([[3.0], [7.5]]).tolist() == [[0.0], [0.0]]


def test_noise_alone_never_makes_a_model_much_worse_than_none():
    # With the shrinkage of log-odds a number's curves were worse than their mean from ε = 1 down.
    X, clean, _ = curved(4000)
    errors = {}
    for epsilon in (0.01, 0.2, 1.0, 50.0):
        model = HistGradientBoostingRegressor(
            epsilon=epsilon, delta=1e-5, bounds=(0.0, 1.0), target_bounds=(-1.5, 3.5), random_state=0, reproducible=True
        ).fit(X, clean)
        errors[epsilon] = float(np.mean((model.predict(X) - clean) ** 2) / clean.var())
    assert errors[0.01] < 1.7
    assert errors[0.2] < 0.7
    assert errors[1.0] < 0.15
    assert errors[50.0] < 0.02


@pytest.fixture(scope="module")
def adult():
    return sordino.data.load_dataset("adult")


def adult_model(adult, epsilon, **changes):
    return HistGradientBoostingClassifier(
        epsilon=epsilon, delta=1e-5, bounds=(-1.0, 1.0), classes=(0, 1), one_hot=adult.schema.one_hot, **changes
    ).fit(adult.train.features, adult.train.labels)


@pytest.mark.parametrize(("epsilon", "least"), [(0.1, 0.82), (1.0, 0.846), (8.0, 0.859)])
def test_adult_is_learned_at_the_stated_budgets(adult, epsilon, least):
    model = adult_model(adult, epsilon, random_state=1, reproducible=True)
    assert len(model.features_) == 13
    assert sum(feature.bins for feature in model.features_) == 5 * 256 + 99
    assert model.score(adult.test.features, adult.test.labels) > least


@pytest.mark.slow
@pytest.mark.parametrize(("epsilon", "least"), [(0.1, 0.828), (1.0, 0.848), (8.0, 0.860)])
def test_boosting_reaches_its_goal_on_adult_on_average(adult, epsilon, least):
    scores = [adult_model(adult, epsilon).score(adult.test.features, adult.test.labels) for _ in range(5)]
    assert np.mean(scores) > least
