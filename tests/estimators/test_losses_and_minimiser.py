"""Losses against finite differences and their own constants; the minimizer against scikit-learn and a residual."""

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from sordino.estimators import perturbation as solver
from sordino.estimators.losses import HuberHinge, HuberResidual, Logistic, SmoothMargin, Softmax
from sordino.estimators.perturbation import newton_minimize

LOSSES = [
    (Logistic(), (-1.0, 1.0)),
    (HuberHinge(width=0.5), (-1.0, 1.0)),
    (HuberHinge(width=0.1), (-1.0, 1.0)),
    (HuberResidual(threshold=0.7), (-1.0, 0.0, 1.0)),
    (Softmax(outputs=2), (0.0, 1.0)),
    (Softmax(outputs=5), (0.0, 2.0, 4.0)),
    (SmoothMargin(outputs=2, width=0.5), (0.0, 1.0)),
    (SmoothMargin(outputs=4, width=0.2), (0.0, 1.0, 3.0)),
]
EACH = pytest.mark.parametrize(("loss", "labels"), LOSSES, ids=lambda value: str(value)[:28])


def points(loss, labels):
    generator = np.random.default_rng(0)
    scores = np.concatenate(
        [generator.normal(size=(500, loss.outputs)), 30 * generator.normal(size=(500, loss.outputs))]
    )
    return scores, generator.choice(labels, size=1000)


@EACH
def test_gradients_and_hessians_are_those_of_the_values(loss, labels):
    scores, targets = points(loss, labels)
    step = 1e-6
    for axis in range(loss.outputs):
        moved = step * np.eye(loss.outputs)[axis]
        slopes = (loss.values(scores + moved, targets) - loss.values(scores - moved, targets)) / (2 * step)
        assert loss.gradients(scores, targets)[:, axis] == pytest.approx(slopes, abs=1e-6)
        bends = (loss.gradients(scores + moved, targets) - loss.gradients(scores - moved, targets)) / (2 * step)
        near_kink = np.abs(bends - loss.hessians(scores, targets)[:, axis]).max(axis=1) > 1e-5
        assert near_kink.mean() < 0.002


@EACH
def test_no_score_breaks_a_constant(loss, labels):
    scores, targets = points(loss, labels)
    gradients, hessians = loss.gradients(scores, targets), loss.hessians(scores, targets)
    assert np.linalg.norm(gradients, axis=1).max() <= loss.lipschitz * (1 + 1e-12)
    assert np.linalg.norm(gradients, axis=1).max() > 0.99 * loss.lipschitz
    assert np.linalg.eigvalsh(hessians)[:, -1].max() <= loss.curvature * (1 + 1e-12)
    assert np.trace(hessians, axis1=1, axis2=2).max() <= loss.trace * (1 + 1e-12)
    assert max(np.linalg.matrix_rank(hessian, tol=1e-9) for hessian in hessians[:100]) <= loss.rank


def test_a_softmax_gradient_is_a_mean_of_zero_and_its_corners():
    loss = Softmax(outputs=4)
    scores, targets = points(loss, (0.0, 3.0))
    weights = loss.gradients(scores, targets)
    weights[np.arange(len(targets)), targets.astype(int)] = 0.0
    assert (weights >= 0).all()
    assert (weights.sum(axis=1) <= 1 + 1e-12).all()


@EACH
def test_the_minimiser_reaches_its_tolerance(loss, labels):
    generator = np.random.default_rng(1)
    rows = generator.normal(size=(400, 4))
    rows /= np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1.0)
    targets = generator.choice(labels, size=400)
    linear = 3 * generator.normal(size=(4, loss.outputs))
    for strength in (1e-2, 1.0, 100.0):
        found = newton_minimize(loss, rows, targets, linear=linear, regularization=strength, tolerance=1e-8)
        slope = rows.T @ loss.gradients(rows @ found, targets) + linear + strength * found
        assert np.linalg.norm(slope) <= 1e-8


def test_a_rounded_margin_is_the_hinge_but_for_the_rounding():
    generator = np.random.default_rng(0)
    scores, targets = 2 * generator.normal(size=(200, 4)), generator.integers(0, 4, size=200)
    hinge = np.array(
        [max((k != y) + row[k] - row[y] for k in range(4)) for row, y in zip(scores, targets, strict=True)]
    )
    for width in (0.5, 0.01):
        above = SmoothMargin(outputs=4, width=width).values(scores, targets.astype(float)) - hinge
        assert (above >= -1e-12).all()
        assert above.max() <= width * np.log(4)


def test_the_minimiser_is_scikit_learns():
    generator = np.random.default_rng(2)
    rows = generator.normal(size=(300, 5)) / 4
    labels = generator.integers(0, 3, size=300)
    peer = LogisticRegression(C=1 / 0.8, fit_intercept=False, tol=1e-10, max_iter=5000).fit(rows, labels)
    ours = newton_minimize(
        Softmax(outputs=3), rows, labels.astype(float), linear=np.zeros((5, 3)), regularization=0.8, tolerance=1e-9
    )
    assert pytest.approx(peer.coef_, abs=1e-5) == ours.T


def test_conjugate_gradients_find_the_same_minimizer(monkeypatch):
    generator = np.random.default_rng(3)
    rows, labels = generator.normal(size=(200, 6)) / 5, generator.integers(0, 3, size=200).astype(float)
    question = {"linear": np.ones((6, 3)), "regularization": 0.5, "tolerance": 1e-9}
    dense = newton_minimize(Softmax(outputs=3), rows, labels, **question)
    monkeypatch.setattr(solver, "_DENSE", 1)
    assert newton_minimize(Softmax(outputs=3), rows, labels, **question) == pytest.approx(dense, abs=1e-8)


def test_where_rounding_forbids_the_tolerance_the_answer_is_zero_and_nothing_is_raised():
    rows = np.random.default_rng(4).normal(size=(500, 7)) / 8
    found = newton_minimize(Logistic(), rows, np.ones(500), linear=np.ones((7, 1)), regularization=0.3, tolerance=1e-40)
    assert (found == 0).all()
