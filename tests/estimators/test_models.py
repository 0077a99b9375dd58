"""What the estimators learn: against scikit-learn where privacy is cheap, and on Adult at the stated budgets."""

import itertools

import numpy as np
import pytest
from sklearn import decomposition
from sklearn.linear_model import Ridge as PlainRidge
from sklearn.naive_bayes import GaussianNB as PlainNB
from sklearn.preprocessing import StandardScaler as PlainScaler

import sordino.data
from sordino import accounting
from sordino.errors import InvalidArgument
from sordino.estimators import (
    PCA,
    GaussianNB,
    KMeans,
    LinearRegression,
    LinearSVC,
    LogisticRegression,
    MinMaxScaler,
    Ridge,
    StandardScaler,
)
from sordino.events import compose

LOOSE = {"epsilon": 200.0, "delta": 1e-3}


@pytest.fixture(scope="module")
def adult():
    return sordino.data.load_dataset("adult")


def table(count=4000, columns=3, seed=0):
    generator = np.random.default_rng(seed)
    X = np.clip(generator.normal(size=(count, columns)) * [1.0, 0.5, 0.2][:columns] + 0.3, -2, 2)
    return X, generator


@pytest.mark.parametrize(
    ("method", "epsilon", "least"),
    [
        ("objective", 0.1, 0.828),
        ("objective", 1.0, 0.844),
        ("objective", 8.0, 0.847),
        ("output", 8.0, 0.840),
        ("dp-gd", 0.1, 0.836),
    ],
)
def test_adult_is_learned_at_the_stated_budgets(adult, method, epsilon, least):
    # All eight categories are one-hot and five numbers lie in [-1, 1]: the norm is at most √13, without a look.
    model = LogisticRegression(
        epsilon=epsilon,
        delta=1e-5,
        data_norm=13**0.5,
        classes=(0, 1),
        method=method,
        dataset_size=30_000,
        random_state=1,
        reproducible=True,
    )
    assert model.fit(adult.train.features, adult.train.labels).score(adult.test.features, adult.test.labels) > least


@pytest.mark.slow
@pytest.mark.parametrize(("epsilon", "least"), [(0.1, 0.818), (1.0, 0.834), (8.0, 0.838)])
def test_objective_perturbation_reaches_its_goal_on_adult_on_average(adult, epsilon, least):
    model = LogisticRegression(epsilon=epsilon, delta=1e-5, data_norm=13**0.5, classes=(0, 1))
    scores = [
        model.fit(adult.train.features, adult.train.labels).score(adult.test.features, adult.test.labels)
        for _ in range(5)
    ]
    assert np.mean(scores) > least


def test_a_support_vector_classifier_learns_adult(adult):
    model = LinearSVC(
        epsilon=1.0, delta=1e-5, data_norm=13**0.5, classes=(0, 1), random_state=1, reproducible=True
    ).fit(adult.train.features, adult.train.labels)
    assert model.score(adult.test.features, adult.test.labels) > 0.84


@pytest.mark.parametrize("method", ["objective", "output", "dp-gd"])
@pytest.mark.parametrize("kind", [LogisticRegression, LinearSVC])
def test_three_classes_are_learned(kind, method):
    generator = np.random.default_rng(0)
    X = generator.normal(size=(6000, 4))
    y = np.array(["a", "b", "c"])[np.argmax(X[:, :3], axis=1)]
    model = kind(
        epsilon=4.0,
        delta=1e-6,
        data_norm=4.0,
        classes=("a", "b", "c"),
        method=method,
        dataset_size=6000,
        random_state=1,
        reproducible=True,
    ).fit(X, y)
    assert model.coef_.shape == (3, 4)
    assert model.score(X, y) > 0.85
    if kind is LinearSVC:
        return
    probabilities = model.predict_proba(X)
    assert probabilities.sum(axis=1) == pytest.approx(np.ones(6000))
    assert np.log(probabilities) == pytest.approx(model.predict_log_proba(X))
    assert (model.classes_[probabilities.argmax(axis=1)] == model.predict(X)).all()


def test_a_candidate_is_chosen_from_a_declared_grid_in_the_units_of_the_records():
    generator = np.random.default_rng(0)
    X = generator.uniform(0, 10, size=(3000, 1))
    y = (X[:, 0] > 6).astype(int)
    grid = np.array([[1.0, -edge] for edge in range(11)])
    model = LogisticRegression(
        epsilon=3.0,
        delta=0.0,
        data_norm=10.0,
        classes=(0, 1),
        method="exponential",
        candidates=grid,
        intercept_scaling=5.0,
    ).fit(X, y)
    assert model.coef_.ravel().tolist() == pytest.approx([1.0])
    assert model.intercept_[0] == pytest.approx(-6.0, abs=1.01)


@pytest.mark.parametrize("method", ["adassp", "sufficient-statistics", "output", "objective", "dp-gd"])
def test_a_line_is_found_where_privacy_is_cheap(method):
    X, generator = table(columns=2)
    y = 3 + 2 * X[:, 0] - X[:, 1] + 0.1 * generator.normal(size=len(X))
    model = LinearRegression(
        **LOOSE,
        data_norm=3.0,
        target_bounds=(-4.0, 10.0),
        method=method,
        dataset_size=4000,
        steps=300,
        random_state=2,
        reproducible=True,
    ).fit(X, y)
    assert model.score(X, y) > 0.9
    if method in {"adassp", "sufficient-statistics"}:
        assert model.coef_ == pytest.approx([2.0, -1.0], abs=0.15)
        assert model.intercept_ == pytest.approx(3.0, abs=0.15)


def test_without_an_intercept_the_line_passes_through_zero_wherever_the_bounds_lie():
    X, _ = table(columns=2)
    model = LinearRegression(
        **LOOSE, data_norm=3.0, target_bounds=(-1.0, 9.0), fit_intercept=False, random_state=2, reproducible=True
    ).fit(X, X @ [1.0, 0.5])
    assert model.intercept_ == 0.0
    assert model.predict(np.zeros((1, 2)))[0] == 0.0
    assert model.coef_ == pytest.approx([1.0, 0.5], abs=0.1)


@pytest.mark.parametrize("method", ["adassp", "objective", "output"])
def test_alpha_is_that_of_scikit_learns_ridge_without_intercept(method):
    X, generator = table(columns=2)
    y = np.clip(X @ [1.0, 0.5] + 0.1 * generator.normal(size=len(X)), -3.9, 3.9)
    plain = PlainRidge(alpha=2000.0, fit_intercept=False).fit(X, y)
    model = Ridge(
        alpha=2000.0,
        epsilon=500.0,
        delta=0.01,
        data_norm=3.0,
        target_bounds=(-4.0, 4.0),
        fit_intercept=False,
        method=method,
        random_state=2,
        reproducible=True,
    ).fit(X, y)
    assert model.coef_ == pytest.approx(plain.coef_, rel=0.02)


def test_components_are_scikit_learns_where_privacy_is_cheap():
    X, _ = table(count=20_000)
    plain = decomposition.PCA(2).fit(X)
    pca = PCA(2, **LOOSE, data_norm=3.0, center=X.mean(axis=0), random_state=0, reproducible=True).fit(X)
    assert np.abs(np.diag(pca.components_ @ plain.components_.T)) == pytest.approx([1.0, 1.0], abs=1e-2)
    assert pca.explained_variance_ratio_ == pytest.approx(plain.explained_variance_ratio_, abs=0.02)
    assert pca.components_ @ pca.components_.T == pytest.approx(np.eye(2), abs=1e-12)
    whole = PCA(**LOOSE, data_norm=3.0, random_state=0, reproducible=True).fit(X)
    assert whole.inverse_transform(whole.transform(X)) == pytest.approx(X, abs=1e-9)


def test_normalised_rows_count_alike():
    X = np.vstack([np.tile([1e-6, 0.0], (500, 1)), np.tile([0.0, 1.0], (100, 1))])
    kinds = [
        PCA(1, epsilon=5.0, delta=1e-5, data_norm=1.0, normalize=flag, random_state=0, reproducible=True).fit(X)
        for flag in (False, True)
    ]
    assert np.abs(kinds[0].components_[0, 1]) > 0.9
    assert np.abs(kinds[1].components_[0, 0]) > 0.9


def test_naive_bayes_is_scikit_learns_where_privacy_is_cheap():
    X, generator = table()
    y = np.where(X[:, 0] + 0.3 * generator.normal(size=len(X)) > 0.3, 7, 3)
    plain = PlainNB().fit(X, y)
    model = GaussianNB(**LOOSE, bounds=(-2.0, 2.0), classes=(3, 7), random_state=0, reproducible=True).fit(X, y)
    assert model.theta_ == pytest.approx(plain.theta_, abs=0.02)
    assert model.var_ == pytest.approx(plain.var_, abs=0.02)
    assert model.class_prior_ == pytest.approx(plain.class_prior_, abs=0.01)
    assert (model.predict(X) == plain.predict(X)).mean() > 0.98
    assert np.exp(model.predict_log_proba(X)) == pytest.approx(model.predict_proba(X))


def test_naive_bayes_clips_what_it_predicts_as_it_clips_what_it_learns_from():
    X, _ = table(count=500)
    model = GaussianNB(**LOOSE, bounds=(-2.0, 2.0), classes=(0, 1)).fit(X, (X[:, 0] > 0).astype(int))
    far, near = np.full((1, X.shape[1]), 1e300), np.full((1, X.shape[1]), 2.0)
    assert np.isfinite(model.predict_proba(far)).all()
    np.testing.assert_array_equal(model.predict_proba(far), model.predict_proba(near))


def test_class_counts_are_noisy_and_do_not_sum_to_the_exact_number_of_records():
    X, _ = table(count=500)
    y = np.arange(500) % 2
    sums = {
        GaussianNB(epsilon=0.5, delta=0.0, bounds=(-2.0, 2.0), classes=(0, 1)).fit(X, y).class_count_.sum()
        for _ in range(5)
    }
    assert len(sums) > 1


def test_clusters_are_found_where_they_are():
    generator = np.random.default_rng(0)
    true = np.array([[-6.0, -6.0], [6.0, -5.0], [0.0, 7.0]])
    X = np.vstack([center + generator.normal(size=(3000, 2)) for center in true])
    model = KMeans(3, epsilon=1.0, delta=1e-6, bounds=(-10.0, 10.0), random_state=0, reproducible=True).fit(X)
    gaps = np.linalg.norm(model.cluster_centers_[:, None] - true, axis=2)
    assert gaps.min(axis=0) == pytest.approx(np.zeros(3), abs=0.3)
    assert len(set(model.predict(true))) == 3
    assert not hasattr(model, "labels_")
    assert not hasattr(model, "inertia_")


@pytest.mark.parametrize("delta", [0.0, 1e-6])
@pytest.mark.parametrize("columns", [1, 5, 100, 784])
def test_the_shares_of_k_means_sum_to_the_declared_budget(columns, delta):
    # Counts and columns sharing a budget in the wrong order spends up to 5 times as much at 784 columns.
    model = KMeans(2, epsilon=1.0, delta=delta, bounds=(0.0, 1.0)).fit(np.zeros((3, columns)))
    assert len(model.events_) == 10
    assert 0.999 < accounting.epsilon(compose(list(model.events_)), delta).upper <= 1 + 1e-9


def test_a_scaler_is_scikit_learns_where_privacy_is_cheap():
    X, _ = table()
    plain = PlainScaler().fit(X)
    scaler = StandardScaler(
        **LOOSE, bounds=([-2.0, -2.0, -1.0], [2.0, 2.0, 2.0]), random_state=0, reproducible=True
    ).fit(X)
    assert scaler.mean_ == pytest.approx(plain.mean_, abs=0.02)
    assert scaler.scale_ == pytest.approx(plain.scale_, rel=0.05)
    assert not hasattr(scaler, "n_samples_seen_")


def test_a_min_max_scaler_reads_no_record():
    scaler = MinMaxScaler(bounds=([0.0, -1.0], [10.0, 1.0])).fit(np.full((3, 2), np.nan))
    assert scaler.transform([[5.0, 3.0], [np.nan, 0.0]]).tolist() == [[0.5, 1.0], [0.5, 0.5]]
    assert scaler.guarantee_.epsilon == 0.0


def test_bounds_closer_than_a_rounding_tolerance_are_kept():
    scaler = MinMaxScaler(bounds=(0.0, 1e-9)).fit([[0.0]])
    assert scaler.transform([[5e-9]]).tolist() == [[1.0]]


def test_the_default_regularization_falls_with_epsilon_and_knows_the_columns():
    def default(epsilon, loss=None, columns=4):
        model = LogisticRegression(epsilon=epsilon, delta=1e-6, data_norm=1.0, classes=(0, 1) if loss is None else loss)
        return mechanism_of(model, columns).regularization

    epsilons = (0.1, 0.5, 1.0, 2.0, 4.0, 8.0)
    for classes in ((0, 1), (0, 1, 2)):
        values = [default(epsilon, classes) for epsilon in epsilons]
        assert all(earlier > later for earlier, later in itertools.pairwise(values))
        assert values[-1] < 0.2 * values[2]
    assert default(1.0) == pytest.approx(1.0, rel=0.01)  # where the logistic loss pays nothing
    assert default(8.0, columns=100) > default(8.0, columns=4)


def mechanism_of(model, columns):
    """The mechanism of a fit to no records."""
    made = []
    original = model._mechanism
    model._mechanism = lambda *args: made.append(original(*args)) or made[-1]
    model.fit(np.zeros((0, columns)), np.zeros(0))
    return made[0]


@pytest.mark.parametrize("neighboring_relation", ["add_or_remove_one", "replace_one"])
@pytest.mark.parametrize("delta", [0.0, 1e-6])
@pytest.mark.parametrize("epsilon", [0.1, 1.0, 10.0])
def test_regression_is_no_worse_by_default_than_adassp(epsilon, delta, neighboring_relation):
    # Correlated columns, of which one hardly varies: the smallest eigenvalue tells nothing.
    generator = np.random.default_rng(3)
    X = generator.normal(size=(8000, 1)) * 0.3 + generator.normal(size=(8000, 8)) * np.geomspace(0.5, 0.02, 8)
    y = X @ np.linspace(1, -1, 8) + 0.3 + 0.1 * generator.normal(size=8000)
    given = {"epsilon": epsilon, "data_norm": 2.0, "target_bounds": (-2.0, 2.0), "reproducible": True}
    given["neighboring_relation"] = neighboring_relation

    def error(seed, **changes):
        model = LinearRegression(**given, random_state=seed, **changes).fit(X, y)
        return np.mean((model.predict(X) - y) ** 2)

    ours = np.mean([error(seed, delta=delta) for seed in range(6)])
    if delta == 0:
        assert ours < 1.5 * np.var(y)
    else:
        adaptive = np.mean([error(seed, delta=delta, method="adassp") for seed in range(6)])
        assert ours < adaptive


def test_naive_bayes_does_not_get_worse_as_budget_grows():
    # The second column hardly varies in one class and says nothing beyond the first: without a floor it decides alone.
    generator = np.random.default_rng(0)
    y = generator.integers(0, 2, size=6000)
    X = np.column_stack([0.25 * generator.normal(size=6000) + 0.2 * (2 * y - 1), np.zeros(6000)])
    X[:, 1] = np.where((y == 1) & (generator.random(6000) < 0.5), 0.0, 0.05 * generator.normal(size=6000))
    X = np.clip(X, -1.0, 1.0)

    def score(epsilon, **changes):
        given = {"delta": 1e-6, "bounds": (-1.0, 1.0), "classes": (0, 1), "reproducible": True}
        models = (GaussianNB(epsilon=epsilon, random_state=seed, **given, **changes) for seed in (1, 2, 3))
        return np.mean([model.fit(X, y).score(X, y) for model in models])

    assert score(100.0) > score(0.3) - 0.01
    model = GaussianNB(epsilon=100.0, delta=1e-6, bounds=([-1.0, 0.0], [1.0, 8.0]), classes=(0, 1), var_smoothing=0.04)
    assert model.fit(np.zeros((500, 2)), np.zeros(500)).var_.min(axis=0) == pytest.approx([0.04, 0.64])


def test_naive_bayes_takes_one_hot_groups_as_categories():
    generator = np.random.default_rng(0)
    y = generator.integers(0, 2, size=6000)
    place = np.where(generator.random(6000) < 0.7, 3 * y, generator.integers(0, 6, size=6000))
    X = np.column_stack([generator.uniform(-1, 1, size=6000), np.eye(6)[place]])
    given = {"epsilon": 20.0, "delta": 1e-6, "bounds": (-1.0, 1.0), "classes": (0, 1)}
    model = GaussianNB(**given, one_hot=[range(1, 7)]).fit(X, y)
    (group,) = model.one_hot_groups(7)
    shares = np.array([np.bincount(place[y == label], minlength=6) / (y == label).sum() for label in (0, 1)])
    assert np.exp(model.log_shares(group)) == pytest.approx(shares, abs=0.02)
    one, other = X[:1].copy(), X[:1].copy()
    one[0, 1:], other[0, 1:] = np.eye(6)[3], 0.0  # no category that was declared
    odds = [np.diff(model.predict_log_proba(row))[0, 0] for row in (one, other)]
    assert odds[0] - odds[1] == pytest.approx(np.log(shares[1, 3] / shares[0, 3]), abs=0.2)
    other[0, 1:] = np.nan  # nor one that is missing
    assert np.diff(model.predict_log_proba(other))[0, 0] == pytest.approx(odds[1])
    with pytest.raises(InvalidArgument, match="name each of the columns"):
        GaussianNB(**given, one_hot=[(1, 2), (2, 3)]).fit(X, y)


def test_naive_bayes_with_categories_does_better_on_adult_and_no_worse_with_more_budget(adult):
    given = {"delta": 1e-5, "bounds": (-1.0, 1.0), "classes": (0, 1)}
    groups = [group for group in adult.schema.one_hot if len(group) > 1]

    def score(epsilon, one_hot):
        model = GaussianNB(**given, epsilon=epsilon, one_hot=one_hot, random_state=1, reproducible=True)
        return model.fit(adult.train.features, adult.train.labels).score(adult.test.features, adult.test.labels)

    little, much = score(0.5, groups), score(8.0, groups)
    assert little > 0.8
    assert much > little - 0.01
    assert much > score(8.0, None) + 0.02
