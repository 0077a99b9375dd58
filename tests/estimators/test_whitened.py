import math

import numpy as np
import pytest

from sordino.estimators import WhitenedLogisticRegression
from sordino.events import Gaussian, SelfComposed
from sordino.mechanisms import PrivateSecondMoment, make_budget


def correlated(count, seed=0, columns=40):
    """Three classes that differ in directions of small variance only."""
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, 3, count)
    loud = generator.normal(size=(count, 3)) @ np.random.default_rng(99).normal(size=(3, columns))
    quiet = np.eye(columns)[labels * 5] + 0.3 * generator.normal(size=(count, columns))
    return loud + quiet, labels


def test_all_releases_together_are_the_one_gaussian_that_the_budget_buys():
    X, y = correlated(300)
    model = WhitenedLogisticRegression(epsilon=1.3, delta=1e-5, classes=(0, 1, 2), dataset_size=300, steps=7).fit(X, y)
    moments, descent = model.events_
    assert isinstance(moments, Gaussian)
    assert isinstance(descent, SelfComposed)
    assert isinstance(descent.event, Gaussian)
    whole = make_budget(epsilon=1.3, delta=1e-5).noise_multiplier
    spent = moments.noise_multiplier**-2 + descent.count * descent.event.noise_multiplier**-2
    assert spent == pytest.approx(whole**-2, rel=1e-12)
    assert moments.noise_multiplier**-2 == pytest.approx(0.3 * whole**-2, rel=1e-12)
    assert 1.299 < model.guarantee_.epsilon <= 1.3


def test_the_second_moments_are_those_of_unit_rows_whatever_the_records_lengths(monkeypatch):
    seen = []
    release = PrivateSecondMoment.release
    monkeypatch.setattr(
        PrivateSecondMoment, "release", lambda self, rows: seen.append(rows.copy()) or release(self, rows)
    )
    X, y = correlated(60)
    X[0] *= 1e200
    X[1] *= 1e-200
    X[2] = 0.0
    X[3] = math.nan
    y[4] = 9
    WhitenedLogisticRegression(epsilon=1.0, delta=1e-5, classes=(0, 1, 2), dataset_size=60, steps=2).fit(X, y)
    (rows,) = seen
    assert len(rows) == 60
    lengths = np.linalg.norm(rows, axis=1)
    assert np.allclose(np.delete(lengths, [2, 3, 4]), 1.0)
    assert (lengths[2:5] == 0.0).all()


def test_whitening_is_the_inverse_root_of_the_noisy_moments_with_their_ridge(monkeypatch):
    seen = []
    release = PrivateSecondMoment.release
    monkeypatch.setattr(PrivateSecondMoment, "release", lambda self, rows: seen.append(release(self, rows)) or seen[-1])
    X, y = correlated(500)
    model = WhitenedLogisticRegression(epsilon=1.0, delta=1e-5, classes=(0, 1, 2), dataset_size=500, steps=2).fit(X, y)
    (noisy,) = seen
    values, vectors = np.linalg.eigh(noisy)
    inverse = np.linalg.inv(model.whitening_ @ model.whitening_)
    ridge = 0.5 * 2 * math.sqrt(40) * model.events_[0].noise_multiplier / math.sqrt(2)
    expected = (vectors * (np.maximum(values, 0) + ridge)) @ vectors.T
    assert np.allclose(inverse, expected, rtol=1e-3, atol=1e-3 * ridge)
    assert (values < 0).any()


def test_classes_in_quiet_directions_are_told_apart_without_a_declared_norm():
    X, y = correlated(30_000)
    T, u = correlated(4000, seed=1)
    lengths = np.exp(np.random.default_rng(5).normal(size=(30_000, 1)) * 5)
    model = WhitenedLogisticRegression(epsilon=3.0, delta=1e-5, classes=(0, 1, 2), dataset_size=30_000)
    assert model.fit(X * lengths, y).score(T, u) > 0.95


def test_probabilities_agree_with_predictions_for_two_classes_and_for_more():
    X, y = correlated(500)
    for classes in ((0, 1, 2), (0, 1)):
        model = WhitenedLogisticRegression(
            epsilon=5.0, delta=1e-5, classes=classes, dataset_size=500, steps=5, random_state=1, reproducible=True
        ).fit(X, y)
        shares = model.predict_proba(X)
        assert np.allclose(shares.sum(axis=1), 1)
        assert (model.predict(X) == np.asarray(classes)[shares.argmax(axis=1)]).all()


def test_float32_and_float64_records_give_the_same_model_chunk_by_chunk():
    X, y = correlated(9000, columns=12)
    X[5, 3], X[6] = math.nan, 3e38
    X = X.astype(np.float32)

    def fitted(rows):
        return WhitenedLogisticRegression(
            epsilon=3.0, delta=1e-5, classes=(0, 1, 2), dataset_size=9000, steps=5, random_state=4, reproducible=True
        ).fit(rows, y)

    single, double = fitted(X), fitted(X.astype(np.float64))
    assert np.allclose(single.whitening_, double.whitening_, rtol=1e-6)
    assert np.allclose(single.coef_, double.coef_, atol=1e-4)
    assert X[6, 0] == np.float32(3e38)
    assert math.isnan(X[5, 3])


def test_a_smaller_clipping_norm_has_its_noise_and_a_small_constant_leaves_it_to_the_row():
    X, y = correlated(3000)
    given = {"epsilon": 3.0, "delta": 1e-5, "classes": (0, 1, 2), "dataset_size": 3000}
    small = WhitenedLogisticRegression(**given, max_grad_norm=0.25, intercept_scaling=0.1).fit(X, y)
    plain = WhitenedLogisticRegression(**given).fit(X, y)
    assert small.events_ == plain.events_
    assert small.guarantee_ == plain.guarantee_
    assert small.score(X, y) > 0.9
    # The intercept sees a tenth of what a column sees, once in its gradient and once in the score.
    assert np.abs(small.intercept_).max() < np.abs(small.coef_).max()
