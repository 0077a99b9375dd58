"""Weights of classes and of records: they steer the model, and change no sensitivity."""

import numpy as np
import pytest
from sklearn.linear_model import LinearRegression as PlainLinear
from sklearn.linear_model import LogisticRegression as PlainLogistic

from sordino import estimators
from sordino.errors import InvalidArgument, MissingDeclaration
from sordino.estimators import LinearRegression, LinearSVC, LogisticRegression
from sordino.estimators.losses import HuberHinge, Logistic, SmoothMargin, Softmax
from sordino.estimators.perturbation import OutputPerturbation

DECLARED = {"epsilon": 1.0, "delta": 1e-6, "data_norm": 2.0, "classes": ("no", "yes")}
TEST_RUN = {"random_state": 1, "reproducible": True}


def imbalanced(count=4000, seed=0):
    generator = np.random.default_rng(seed)
    X = np.clip(generator.normal(size=(count, 2)), -1.4, 1.4)
    chance = 1 / (1 + np.exp(3.5 - 2 * X[:, 0]))
    return X, np.where(generator.random(count) < chance, "yes", "no")


@pytest.mark.parametrize("method", ["objective", "output", "dp-gd", "dp-sgd"])
@pytest.mark.parametrize("kind", [LogisticRegression, LinearSVC])
def test_a_heavier_class_is_found_more_often_for_the_same_epsilon(kind, method):
    X, y = imbalanced()
    given = DECLARED | TEST_RUN | {"method": method, "dataset_size": 4000, "epsilon": 5.0}
    plain = kind(**given).fit(X, y)
    heavy = kind(class_weight={"yes": 10.0}, **given).fit(X, y)
    recalls = [np.mean(model.predict(X[y == "yes"]) == "yes") for model in (plain, heavy)]
    assert recalls[1] > recalls[0] + 0.2
    assert heavy.events_ == plain.events_
    assert heavy.guarantee_.epsilon == plain.guarantee_.epsilon


def test_with_plenty_of_budget_weights_do_what_scikit_learns_do():
    X, y = imbalanced()
    given = DECLARED | TEST_RUN | {"epsilon": 500.0, "delta": 1e-3, "regularization": 1e-2}
    weights = np.random.default_rng(1).uniform(0, 3, size=len(X))
    ours = LogisticRegression(class_weight={"no": 0.5, "yes": 4.0}, max_sample_weight=3.0, **given)
    ours.fit(X, y, sample_weight=weights)
    plain = PlainLogistic(class_weight={"no": 0.5, "yes": 4.0}, C=1e6, tol=1e-8).fit(X, y, sample_weight=weights)
    assert ours.coef_ == pytest.approx(plain.coef_, rel=0.05, abs=0.05)
    assert ours.intercept_ == pytest.approx(plain.intercept_, rel=0.05)


@pytest.mark.parametrize("method", ["objective", "output", "dp-gd"])
def test_a_record_of_weight_zero_or_of_no_number_contributes_nothing(method):
    X, y = imbalanced(300)
    model = LogisticRegression(method=method, dataset_size=300, max_sample_weight=2.0, **DECLARED, **TEST_RUN)
    weights = np.full(300, 2.0)
    weights[:3] = [0.0, np.nan, -1.0]
    weights[5] = np.inf  # cut to the declared bound
    found = model.fit(X, y, sample_weight=weights).coef_
    assert found == pytest.approx(model.fit(X, np.where(np.arange(300) < 3, "?", y)).coef_, rel=1e-6)


@pytest.mark.parametrize("loss", [Logistic(), Softmax(outputs=3), HuberHinge(), SmoothMargin(outputs=3)])
def test_no_weight_moves_the_minimizer_by_more_than_the_declared_sensitivity(loss):
    generator = np.random.default_rng(0)
    for _ in range(20):
        rows = generator.normal(size=(12, 3))
        rows /= np.linalg.norm(rows, axis=1, keepdims=True)
        targets = generator.integers(0, 3, size=12) if loss.outputs > 1 else generator.choice([-1.0, 1.0], size=12)
        weights = generator.choice([0.0, 0.3, 1.0], size=12)

        def minimizer(kept, rows=rows, targets=targets, weights=weights):
            mechanism = OutputPerturbation(loss=loss, epsilon=1.0, delta=1e-5, regularization=0.5, dimension=3)
            return mechanism.exact_value(rows[kept], targets[kept], weights[kept]), mechanism.l2_sensitivity

        whole, sensitivity = minimizer(np.arange(12))
        for gone in range(12):
            part, _ = minimizer(np.delete(np.arange(12), gone))
            assert np.linalg.norm(whole - part) <= sensitivity * weights[gone] + 1e-6


def test_weighted_losses_keep_the_constants_of_the_proof():
    scores, loss = np.linspace(-8, 8, 201)[:, None], Logistic()
    for weight in (0.0, 0.2, 1.0):
        for target in (-1.0, 1.0):
            targets = np.full(201, target)
            pull = weight * np.abs(loss.gradients(scores, targets)[:, 0])
            bend = weight * loss.hessians(scores, targets)[:, 0, 0]
            assert (bend <= pull * (1 - pull) + 1e-12).all()  # flat at the corners
            assert pull.max() <= loss.lipschitz


@pytest.mark.parametrize(
    ("changes", "weights", "error", "words"),
    [
        ({"class_weight": "balanced"}, None, InvalidArgument, "class_weight must be a dict of weights by class"),
        ({"class_weight": {"perhaps": 1.0}}, None, InvalidArgument, "class_weight must name declared classes"),
        ({"class_weight": {"yes": -1.0}}, None, InvalidArgument, "class_weight"),
        ({"class_weight": {"yes": 0.0, "no": 0.0}}, None, InvalidArgument, "largest_class_weight"),
        ({}, np.ones(50), MissingDeclaration, "max_sample_weight must be declared"),
        ({"max_sample_weight": 0.0}, np.ones(50), InvalidArgument, "max_sample_weight"),
        ({"max_sample_weight": 1.0}, np.ones(49), InvalidArgument, "sample_weight must have one entry"),
        ({"class_weight": {"yes": 2.0}, "inference": True}, None, InvalidArgument, "inference must be False"),
    ],
)
def test_weights_that_would_be_read_from_the_data_are_refused_before_anything_is_charged(
    changes, weights, error, words
):
    X, y = imbalanced(50)
    model = LogisticRegression(**DECLARED, **changes)
    with pytest.raises(error, match=words):
        model.fit(X, y, sample_weight=weights)
    assert not hasattr(model, "events_")


WEIGHED = {
    "RandomForestClassifier": {"bounds": (-1.4, 1.4)},
    "HistGradientBoostingClassifier": {"bounds": (-1.4, 1.4), "max_iter": 20},
    "GaussianNB": {"bounds": (-1.4, 1.4)},
    "DPClassifier": {"dataset_size": 4000, "epochs": 12.0, "batch_size": 400, "max_grad_norm": 8.0},
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name == "DPClassifier" else []) for name in WEIGHED]
)
def test_a_heavier_class_is_found_more_often_by_the_other_classifiers_too(name):
    X, y = imbalanced()
    given = {"epsilon": 5.0, "delta": 1e-6, "classes": ("no", "yes")} | TEST_RUN | WEIGHED[name]
    plain = getattr(estimators, name)(**given).fit(X, y)
    heavy = getattr(estimators, name)(class_weight={"yes": 10.0}, **given).fit(X, y)
    recalls = [np.mean(model.predict(X[y == "yes"]) == "yes") for model in (plain, heavy)]
    assert recalls[1] > recalls[0] + 0.2
    assert heavy.events_ == plain.events_
    assert heavy.guarantee_.epsilon == plain.guarantee_.epsilon
    with pytest.raises(InvalidArgument, match="class_weight must be a dict"):
        getattr(estimators, name)(class_weight="balanced", **given).fit(X, y)


REGRESSIONS = [
    ("LinearRegression", {"data_norm": 2.0}),
    ("LinearRegression", {"data_norm": 2.0, "method": "adassp"}),
    ("LinearRegression", {"data_norm": 2.0, "method": "output", "huber_threshold": 2.0}),
    ("LinearRegression", {"data_norm": 2.0, "method": "objective", "huber_threshold": 2.0}),
    pytest.param(
        "LinearRegression", {"data_norm": 2.0, "method": "dp-gd", "dataset_size": 4000}, marks=pytest.mark.slow
    ),
    ("Ridge", {"data_norm": 2.0}),
    ("HistGradientBoostingRegressor", {"bounds": (-1.4, 1.4), "max_iter": 20}),
    ("RandomForestRegressor", {"bounds": (-1.4, 1.4), "n_estimators": 20}),
    pytest.param("DPRegressor", {"dataset_size": 4000, "epochs": 5.0, "batch_size": 1000}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "given"), REGRESSIONS, ids=lambda value: value if isinstance(value, str) else None)
def test_numbers_are_learned_from_the_records_that_count(name, given):
    X = np.clip(np.random.default_rng(0).normal(size=(4000, 2)), -1.4, 1.4)
    first = np.arange(4000) < 2000
    y = np.where(first, 3.0, -3.0)  # half of the records say so, half the opposite
    kind = getattr(estimators, name)
    declared = {"epsilon": 20.0, "delta": 1e-6, "target_bounds": (-4.0, 4.0), "max_sample_weight": 5.0} | TEST_RUN
    model = kind(**declared, **given)
    means = [model.fit(X, y, sample_weight=weights).predict(X).mean() for weights in (5.0 * first, 5.0 * ~first)]
    assert means[0] > 1.0
    assert means[1] < -1.0
    assert abs(model.fit(X, y).predict(X).mean()) < 1.0
    weights = np.where(first, 5.0, np.nan)  # no number is 0
    assert model.fit(X, y, sample_weight=weights).predict(X).mean() == pytest.approx(means[0], rel=1e-5)
    with pytest.raises(MissingDeclaration, match="max_sample_weight must be declared"):
        kind(**(declared | {"max_sample_weight": None}), **given).fit(X, y, sample_weight=weights)


@pytest.mark.parametrize("weight", [0.5, 1.0])
def test_weighted_least_squares_is_scikit_learns_with_plenty_of_budget(weight):
    generator = np.random.default_rng(0)
    X = np.clip(generator.normal(size=(3000, 3)), -1, 1)
    y = np.clip(X @ [1.0, -2.0, 0.5] + 0.3 + generator.normal(size=3000), -6, 6)
    weights = np.where(X[:, 0] > 0, 1.0, weight * generator.random(3000))
    given = {"epsilon": 1e4, "delta": 1e-3, "data_norm": 2.0, "target_bounds": (-6.0, 6.0), "max_sample_weight": 1.0}
    ours = LinearRegression(**given).fit(X, y, sample_weight=weights)
    plain = PlainLinear().fit(X, y, sample_weight=weights)
    assert ours.coef_ == pytest.approx(plain.coef_, abs=0.02)
    assert ours.intercept_ == pytest.approx(plain.intercept_, abs=0.02)


def test_weighted_moments_move_by_no_more_than_those_of_records_that_all_count():
    generator = np.random.default_rng(0)
    rows = generator.normal(size=(8, 3))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    for weight in (0.0, 0.1, 0.7, 1.0):
        scaled = rows * np.sqrt(weight)
        assert np.allclose(scaled.T @ scaled, weight * rows.T @ rows)
        assert np.linalg.norm(scaled, axis=1).max() <= 1 + 1e-12


def test_a_class_of_weight_zero_is_never_chosen_by_naive_bayes_and_means_stay():
    X, y = imbalanced()
    given = {"epsilon": 5.0, "delta": 1e-6, "classes": ("no", "yes"), "bounds": (-1.4, 1.4)} | TEST_RUN
    plain, silent = (estimators.GaussianNB(**given, class_weight=weights).fit(X, y) for weights in (None, {"no": 0.0}))
    assert (silent.predict(X) == "yes").all()
    assert (silent.theta_ == plain.theta_).all()
    assert np.isfinite(silent.predict_log_proba(X)).all()


def test_intervals_are_refused_for_records_that_count_differently():
    model = LinearRegression(
        epsilon=1.0, delta=1e-6, data_norm=1.0, target_bounds=(0.0, 1.0), inference=True, max_sample_weight=2.0
    )
    with pytest.raises(InvalidArgument, match="inference must be False with max_sample_weight"):
        model.fit([[0.5]], [0.5])
