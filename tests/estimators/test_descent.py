"""Noisy gradient descent of linear models: more budget never makes a worse model."""

import numpy as np
import pytest

from sordino.estimators import LinearRegression, LinearSVC, LogisticRegression
from sordino.estimators.linear_mechanisms import DescentSettings, DesignMatrix, DPGradientDescent
from sordino.estimators.losses import HuberHinge, HuberResidual, Logistic, SmoothMargin, Softmax
from sordino.estimators.perturbation import newton_minimize

RECORDS = 4000
EPSILONS = (0.1, 1.0, 8.0)


def classification(columns, seed=0):
    """Records of norm ≤ 1, the first column far from centered as years of education are; labels of a logistic model."""
    generator = np.random.default_rng(seed)
    X = generator.normal(size=(RECORDS, columns)) / np.sqrt(columns) * 0.4
    X[:, 0] = generator.uniform(0.2, 0.9, size=RECORDS)
    X /= np.maximum(np.linalg.norm(X, axis=1, keepdims=True), 1.0)
    slopes = np.where(np.arange(columns) == 0, 5.0, 3.0 / np.sqrt(columns))
    return X, (generator.random(RECORDS) < 1 / (1 + np.exp(3.0 - X @ slopes))).astype(int)


def exact_loss(loss, rows, targets):
    weights = newton_minimize(
        loss, rows, targets, linear=np.zeros((rows.shape[1], loss.outputs)), regularization=1e-3, tolerance=1e-6
    )
    return float(loss.values(rows @ weights, targets).mean())


def logistic_excess(model, X, y):
    """The mean loss above the smallest that any weights have on the records."""
    rows = DesignMatrix.declared(data_norm=1.0, columns=X.shape[1], fit_intercept=True, intercept_scaling=None).rows(X)
    signs = np.where(y == 1, 1.0, -1.0)
    found = float(np.logaddexp(0.0, -signs * model.fit(X, y).decision_function(X)).mean())
    return found - exact_loss(Logistic(), rows, signs)


@pytest.mark.parametrize("columns", [1, 40])
@pytest.mark.parametrize("method", ["dp-gd", "dp-sgd"])
def test_the_loss_of_logistic_descent_falls_with_epsilon(method, columns):
    X, y = classification(columns)
    excess = [
        logistic_excess(
            LogisticRegression(
                method=method,
                epsilon=epsilon,
                delta=1e-5,
                data_norm=1.0,
                classes=(0, 1),
                dataset_size=RECORDS,
                batch_size=None if method == "dp-gd" else 1000,
                random_state=1,
                reproducible=True,
            ),
            X,
            y,
        )
        for epsilon in EPSILONS
    ]
    assert excess[0] > excess[1] > excess[2]
    assert excess[2] < 0.004


@pytest.mark.parametrize("columns", [1, 30])
def test_the_error_of_linear_descent_falls_with_epsilon(columns):
    generator = np.random.default_rng(1)
    X, _ = classification(columns)
    y = X @ np.where(np.arange(columns) == 0, 1.0, 0.5 / np.sqrt(columns)) - 0.5
    y += 0.1 * generator.normal(size=RECORDS)
    exact = np.linalg.lstsq(np.column_stack([X, np.ones(RECORDS)]), y, rcond=None)[0]
    least = np.mean((y - np.column_stack([X, np.ones(RECORDS)]) @ exact) ** 2)
    excess = []
    for epsilon in EPSILONS:
        model = LinearRegression(
            method="dp-gd",
            epsilon=epsilon,
            delta=1e-5,
            data_norm=1.0,
            target_bounds=(-1.0, 1.0),
            dataset_size=RECORDS,
            random_state=1,
            reproducible=True,
        )
        excess.append(float(np.mean((model.fit(X, y).predict(X) - y) ** 2) - least))
    assert excess[0] > excess[1] > excess[2]
    assert excess[2] < 0.003


def test_the_coefficients_of_one_feature_are_the_exact_ones_where_budget_is_plenty():
    X, y = classification(1)
    rows = DesignMatrix.declared(data_norm=1.0, columns=1, fit_intercept=True, intercept_scaling=None)
    signs = np.where(y == 1, 1.0, -1.0)
    exact = newton_minimize(
        Logistic(), rows.rows(X), signs, linear=np.zeros((2, 1)), regularization=1e-6, tolerance=1e-7
    )
    slope, intercept = rows.coefficients(exact)
    model = LogisticRegression(
        method="dp-gd",
        epsilon=100.0,
        delta=1e-5,
        data_norm=1.0,
        classes=(0, 1),
        dataset_size=RECORDS,
        steps=400,
        random_state=1,
        reproducible=True,
    ).fit(X, y)
    assert model.coef_.ravel() == pytest.approx(slope.ravel(), rel=0.03)
    assert model.intercept_ == pytest.approx(intercept, rel=0.03)


@pytest.mark.parametrize(
    "loss",
    [Logistic(), Softmax(outputs=4), HuberHinge(width=0.1), SmoothMargin(outputs=3), HuberResidual(threshold=1.0)],
)
@pytest.mark.parametrize("dimension", [2, 400])
def test_steps_and_clipping_norms_come_from_the_loss(loss, dimension):
    def descent(epsilon):
        settings = DescentSettings(dataset_size=20_000)
        return DPGradientDescent(loss=loss, epsilon=epsilon, delta=1e-6, dimension=dimension, settings=settings)

    plenty, little = descent(50.0), descent(0.02)
    assert plenty.learning_rate == pytest.approx(1 / loss.curvature)
    assert plenty.plan.max_grad_norm == loss.lipschitz
    assert little.learning_rate <= 1 / loss.curvature
    assert little.plan.max_grad_norm <= loss.lipschitz
    if dimension > 100 and loss.curvature <= 1:
        assert little.plan.max_grad_norm == loss.lipschitz / 4
    # A clipping norm changes noise and sensitivity alike.
    assert little.plan.step_plan(0).noise_multiplier == pytest.approx(
        DPGradientDescent(
            loss=loss,
            epsilon=0.02,
            delta=1e-6,
            dimension=dimension,
            settings=DescentSettings(dataset_size=20_000, max_grad_norm=0.3),
        )
        .plan.step_plan(0)
        .noise_multiplier
    )


def test_the_curvature_bound_is_that_of_the_worst_records():
    # All records alike and of norm 1, three of four in one class: 0.75·(1.5 − w) = 0.25 at the minimum, where three
    # quarters of the records have the largest curvature. A step of 1/curvature is stable, one of 3 times that is not.
    model = LinearSVC(
        method="dp-gd",
        epsilon=50.0,
        delta=1e-5,
        data_norm=1.0,
        classes=(0, 1),
        fit_intercept=False,
        dataset_size=2000,
        steps=200,
        random_state=1,
        reproducible=True,
    )
    X, y = np.ones((2000, 1)), np.repeat([0, 1], [500, 1500])
    assert abs(model.fit(X, y).coef_[0, 0] - 7 / 6) < 0.01
    assert abs(model.set_params(learning_rate=3.0).fit(X, y).coef_[0, 0] - 7 / 6) > 0.1
