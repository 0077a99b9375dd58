"""Objective perturbation against the exact densities of what it releases, and its noise."""

import math

import numpy as np
import pytest
from scipy.special import expit

from sordino.errors import InvalidArgument
from sordino.estimators.losses import HuberHinge, HuberResidual, Logistic, SmoothMargin, Softmax
from sordino.estimators.perturbation import ObjectivePerturbation, min_regularization, newton_minimize
from sordino.events import ApproximateDP, PureDP
from sordino.mechanisms import analytic_noise_multiplier, gaussian_mechanism_delta


def log_density(weights, loss, records, strength, stddev):
    """Logarithm of the density of the exact minimizer at weights [m, k], rows being numbers in [−1, 1]."""
    slope = strength * weights
    bend = np.tile(strength * np.eye(loss.outputs), (len(weights), 1, 1))
    for x, y in records:
        targets = np.full(len(weights), y)
        slope = slope + x * loss.gradients(x * weights, targets)
        bend = bend + x * x * loss.hessians(x * weights, targets)
    constant = loss.outputs * math.log(stddev * math.sqrt(2 * math.pi))
    return -np.square(slope).sum(axis=1) / (2 * stddev**2) - constant + np.linalg.slogdet(bend)[1]


def grid(loss, records, strength, stddev, points):
    reach = (9 * stddev + loss.lipschitz * (len(records) + 1)) / strength
    axis = np.linspace(-reach, reach, points)
    mesh = np.stack(np.meshgrid(*[axis] * loss.outputs, indexing="ij"), axis=-1).reshape(-1, loss.outputs)
    return mesh, (axis[1] - axis[0]) ** loss.outputs


def largest_delta(loss, records, new, strength, stddev, epsilon, points):
    mesh, cell = grid(loss, records, strength, stddev, points)
    more = log_density(mesh, loss, [*records, new], strength, stddev)
    less = log_density(mesh, loss, records, strength, stddev)
    return max(
        float(np.clip(np.exp(p) - np.exp(epsilon + q), 0, None).sum() * cell) for p, q in ((more, less), (less, more))
    )


def bound(loss, strength, stddev, epsilon):
    """What the proof page states."""
    general = loss.rank * math.log1p(loss.trace / (loss.rank * strength))
    cost = 0.0 if loss.flat_at_corners and strength * epsilon >= 1 else general
    return loss.corners * gaussian_mechanism_delta(noise_multiplier=stddev / loss.lipschitz, epsilon=epsilon - cost)


@pytest.mark.parametrize(
    ("loss", "labels"),
    [(Logistic(), (-1.0, 1.0)), (HuberHinge(width=0.3), (-1.0, 1.0)), (HuberResidual(), (-1.0, 0.0, 0.5, 1.0))],
    ids=["logistic", "huber-hinge", "huber-residual"],
)
def test_the_exact_delta_of_scalar_models_is_never_above_the_stated_one(loss, labels):
    generator = np.random.default_rng(5)
    tightest = 0.0
    for _ in range(60):
        epsilon, stddev = 10 ** generator.uniform(-1, 1), 10 ** generator.uniform(-0.5, 1)
        strength = min_regularization(loss, epsilon, 0.5) * generator.choice([1.0, 1.0, 2.0])
        count = generator.integers(0, 4)
        records = [(generator.uniform(-1, 1), generator.choice(labels)) for _ in range(count)]
        new = (generator.choice([1.0, -1.0, generator.uniform(-1, 1)]), generator.choice(labels))
        stated = bound(loss, strength, stddev, epsilon)
        exact = largest_delta(loss, records, new, strength, stddev, epsilon, 20_001)
        assert exact <= stated * (1 + 1e-4) + 1e-10
        if stated > 1e-6:
            tightest = max(tightest, exact / stated)
    assert tightest > 0.2  # the bound isn't idle


def test_for_the_logistic_loss_the_bound_is_nearly_reached_and_fails_for_weaker_regularization():
    epsilon, stddev = 1.0, 2.0
    plain = gaussian_mechanism_delta(noise_multiplier=stddev, epsilon=epsilon)
    enough = largest_delta(Logistic(), [], (1.0, 1.0), 1 / epsilon, stddev, epsilon, 200_001)
    assert 0.8 * plain < enough < plain
    assert largest_delta(Logistic(), [], (1.0, 1.0), 0.1 / epsilon, stddev, epsilon, 200_001) > 1.5 * plain


@pytest.mark.parametrize(("classes", "points"), [(2, 301), (3, 61)])
@pytest.mark.parametrize("kind", [Softmax, SmoothMargin])
def test_the_exact_delta_of_a_softmax_is_never_above_the_stated_one(kind, classes, points):
    loss = kind(outputs=classes)
    generator = np.random.default_rng(6)
    for _ in range(6 if classes == 2 else 3):
        epsilon, stddev = 10 ** generator.uniform(-0.3, 0.7), 10 ** generator.uniform(-0.2, 0.7)
        strength = min_regularization(loss, epsilon, 0.5)
        records = [(generator.uniform(-1, 1), int(generator.integers(0, classes))) for _ in range(2)]
        exact = largest_delta(loss, records, (1.0, 0), strength, stddev, epsilon, points)
        assert exact <= bound(loss, strength, stddev, epsilon) * (1 + 1e-3) + 1e-9


@pytest.mark.parametrize(
    "loss",
    [Logistic(), HuberHinge(), HuberResidual(), Softmax(outputs=4), SmoothMargin(outputs=4)],
    ids=lambda loss: type(loss).__name__,
)
def test_the_scale_spends_epsilon_and_delta_together_with_the_output_noise(loss):
    release = ObjectivePerturbation(loss=loss, epsilon=1.0, delta=1e-5, regularization=6.0, dimension=3)
    spent = bound(loss, 6.0, release.scale, 0.999)
    assert spent <= 0.999e-5
    assert spent == pytest.approx(0.999e-5, rel=1e-6)
    assert release.event() == ApproximateDP(epsilon=1.0, delta=1e-5)


def test_the_logistic_scale_is_that_of_the_gaussian_mechanism_once_lambda_is_one_over_epsilon():
    free = ObjectivePerturbation(loss=Logistic(), epsilon=1.0, delta=1e-5, regularization=1.01, dimension=3)
    assert free.jacobian_cost == 0
    assert free.scale == pytest.approx(analytic_noise_multiplier(epsilon=0.999, delta=0.999e-5), rel=1e-9)
    paid = ObjectivePerturbation(loss=Logistic(), epsilon=1.0, delta=1e-5, regularization=0.9, dimension=3)
    assert paid.jacobian_cost == pytest.approx(math.log1p(0.25 / 0.9))
    assert paid.scale > free.scale


def test_too_little_regularisation_is_refused_with_the_number_that_would_do():
    with pytest.raises(InvalidArgument, match=r"regularization must be > 0\.583 for epsilon=1"):
        ObjectivePerturbation(loss=HuberResidual(), epsilon=1.0, delta=1e-5, regularization=0.5, dimension=2)
    ObjectivePerturbation(loss=HuberResidual(), epsilon=1.0, delta=1e-5, regularization=0.6, dimension=2)


@pytest.mark.parametrize("regularization", [2.0, 0.5])
def test_without_delta_the_log_ratio_of_densities_stays_below_epsilon(regularization):
    epsilon = 1.0
    release = ObjectivePerturbation(
        loss=Logistic(), epsilon=epsilon, delta=0.0, regularization=regularization, dimension=1
    )
    weights = np.linspace(-60, 60, 200_001)[:, None]
    generator = np.random.default_rng(1)
    worst = 0.0
    for _ in range(20):
        records = [(generator.uniform(-1, 1), generator.choice([-1.0, 1.0])) for _ in range(generator.integers(0, 4))]
        logs = []
        for chosen in (records, [*records, (1.0, 1.0)]):
            slope = regularization * weights + sum(
                x * Logistic().gradients(x * weights, np.full(len(weights), y)) for x, y in chosen
            )
            bend = regularization + sum(
                x * x * Logistic().hessians(x * weights, np.full(len(weights), y))[:, :, 0] for x, y in chosen
            )
            logs.append(-np.abs(slope) / release.scale + np.log(bend + 0.0 * weights))
        worst = max(worst, float(np.abs(logs[0] - logs[1]).max()))
    assert 0.5 * epsilon < worst <= epsilon
    assert release.event() == PureDP(epsilon=epsilon)


def test_without_records_the_weights_are_the_noise_over_lambda(seeded, two_armed):
    release = ObjectivePerturbation(
        loss=Logistic(), epsilon=1.0, delta=1e-5, regularization=5.0, dimension=20_000, rng=seeded(1)
    )
    weights = release.release(np.zeros((0, 20_000)), np.zeros(0))
    two_armed(weights, release.scale / 5.0)


def test_the_pure_noise_has_a_gamma_norm(seeded):
    norms = []
    release = ObjectivePerturbation(
        loss=Logistic(), epsilon=2.0, delta=0.0, regularization=1.0, dimension=50, rng=seeded(2)
    )
    for _ in range(300):
        norms.append(np.linalg.norm(release.release(np.zeros((0, 50)), np.zeros(0))))
    assert np.mean(norms) == pytest.approx(50 * release.scale, rel=0.025)
    assert release.scale == pytest.approx(1 / (2.0 * 0.999))


def test_the_intercept_is_penalised_like_every_weight():
    # Otherwise the objective is not strongly convex and the proof is void.
    pulled = newton_minimize(
        Logistic(), np.zeros((0, 3)), np.zeros(0), linear=np.eye(3)[:, 2:], regularization=4.0, tolerance=1e-9
    )
    assert pulled[:, 0] == pytest.approx([0.0, 0.0, -0.25])


def test_the_curvature_that_counts_is_that_of_rows_of_norm_one(seeded):
    # c·R² for rows of norm R: scaling the records and their norm together changes nothing but the weights' unit.
    from sordino.estimators import LogisticRegression

    generator = np.random.default_rng(0)
    X = generator.normal(size=(200, 3))
    y = (X[:, 0] > 0).astype(int)
    fits = [
        LogisticRegression(
            epsilon=1.0, delta=1e-5, data_norm=2.0 * factor, classes=(0, 1), random_state=4, reproducible=True
        ).fit(X * factor, y)
        for factor in (1.0, 1e5)
    ]
    assert fits[1].coef_ * 1e5 == pytest.approx(fits[0].coef_, rel=1e-6)
    assert fits[1].intercept_ == pytest.approx(fits[0].intercept_, rel=1e-6)


def test_the_curvature_of_the_logistic_loss_vanishes_where_its_gradient_is_largest():
    scores = np.linspace(-40, 40, 2001)[:, None]
    pull = np.abs(Logistic().gradients(scores, np.ones(2001)))[:, 0]
    assert (Logistic().hessians(scores, np.ones(2001))[:, 0, 0] <= pull * (1 - pull) + 1e-12).all()
    assert pull == pytest.approx(expit(-scores[:, 0]))


@pytest.mark.parametrize("loss", [Logistic(), HuberHinge(), HuberResidual()], ids=lambda loss: type(loss).__name__)
def test_what_is_released_has_the_density_of_the_proof(loss, seeded):
    # The proof speaks of this density: that of another noise, 20 % off, does not fit the same releases.
    release = ObjectivePerturbation(loss=loss, epsilon=2.0, delta=1e-4, regularization=1.5, dimension=1, rng=seeded(7))
    rows, targets = np.array([[1.0], [-0.7], [0.9]]), np.array([1.0, 1.0, -1.0])
    drawn = np.sort([float(release.release(rows, targets)[0, 0]) for _ in range(1500)])
    records = list(zip(rows[:, 0], targets, strict=True))

    def distance(stddev):
        mesh = np.linspace(-12, 12, 20_001)[:, None]
        mass = np.exp(log_density(mesh, loss, records, 1.5, stddev))
        cumulative = np.cumsum(mass) * (mesh[1, 0] - mesh[0, 0])
        assert cumulative[-1] == pytest.approx(1.0, abs=1e-3)
        expected = np.interp(drawn, mesh[:, 0], cumulative)
        return np.abs(expected - (np.arange(1500) + 0.5) / 1500).max()

    critical = 1.36 / math.sqrt(1500)  # Kolmogorov and Smirnov, 5 %
    assert distance(release.scale) < critical
    assert distance(1.2 * release.scale) > critical
