"""The private grid search over pipelines: every private step of every candidate is charged, others are refused."""

import numpy as np
import pyarrow as pa
import pytest
import sklearn.decomposition
import sklearn.linear_model
import sklearn.preprocessing
from sklearn.compose import ColumnTransformer
from sklearn.feature_selection import SelectKBest, VarianceThreshold
from sklearn.impute import SimpleImputer
from sklearn.pipeline import FeatureUnion, Pipeline, make_pipeline

from sordino import accounting
from sordino.data import CategoricalColumn, NumericColumn, Schema, SchemaEncoder
from sordino.errors import BudgetExceeded, InvalidArgument, MissingDeclaration
from sordino.estimators import (
    PCA,
    GaussianNB,
    HistGradientBoostingClassifier,
    LinearRegression,
    LogisticRegression,
    MinMaxScaler,
    PrivateGridSearch,
    StandardScaler,
)
from sordino.events import BoundedRange, compose
from sordino.ledger import Ledger

BUDGET = {"epsilon": 4.0, "delta": 1e-6}
TEST_RUN = {"random_state": 3, "reproducible": True}


def logistic(**changes):
    return LogisticRegression(data_norm=2.0, classes=(0, 1), **changes)


def records(count=3000):
    X = np.random.default_rng(0).normal(size=(count, 4))
    return X, (X[:, 0] > 0).astype(int)


def whole():
    return Pipeline(
        [
            ("scale", StandardScaler(bounds=(-4.0, 4.0))),
            ("pca", PCA(data_norm=4.0)),
            ("model", logistic()),
        ]
    )


def declared_account(folder):
    return Ledger(folder / "ledger.db").declare("people", epsilon=5.0, delta=1e-5)


def charges(account):
    return [entry for entry in account.history() if entry.kind == "charge"]


def spent(search):
    return accounting.epsilon(compose(list(search.events_)), search.guarantee_.delta).upper


def test_every_fit_of_every_private_step_is_charged():
    X, y = records()
    found = PrivateGridSearch(whole(), {"pca__n_components": [1, 3], "model__fit_intercept": [True, False]}, **BUDGET)
    found.fit(X, y)
    inside = [step.events_ for _, step in found.best_estimator_.steps]
    assert len(found.events_) == 4 * sum(map(len, inside)) + 1
    assert isinstance(found.events_[-1], BoundedRange)
    assert 3.5 < spent(found) <= 4.0
    assert found.guarantee_.epsilon == pytest.approx(spent(found))
    assert isinstance(found.best_estimator_, Pipeline)
    assert found.best_estimator_["pca"].n_components_ == found.best_params_["pca__n_components"]
    assert {step.epsilon for _, step in found.best_estimator_.steps} == {found.best_estimator_["model"].epsilon}
    assert found.score(X, y) > 0.6
    assert found.predict_proba(X[:5]).shape == (5, 2)


def test_the_better_of_two_pipelines_is_chosen():
    X, y = records(6000)
    grid = {"model__intercept_scaling": [1.0, 1e6]}  # the second leaves nothing of the records
    for _ in range(3):
        found = PrivateGridSearch(whole(), grid, **BUDGET).fit(X, y)
        assert found.best_params_ == {"model__intercept_scaling": 1.0}


def test_steps_can_be_exchanged_and_left_out():
    X, y = records()
    grid = [
        {"pca": ["passthrough", PCA(2, data_norm=4.0)], "scale": [MinMaxScaler(bounds=(-4.0, 4.0))]},
        {"model": [GaussianNB(bounds=(-4.0, 4.0), classes=(0, 1))], "scale": ["passthrough"], "pca": ["passthrough"]},
    ]
    found = PrivateGridSearch(whole(), grid, **BUDGET, **TEST_RUN).fit(X, y)
    single = GaussianNB(epsilon=1.0, delta=1e-8, bounds=(-4.0, 4.0), classes=(0, 1)).fit(X, y)
    assert len(found.events_) == 1 + 2 + len(single.events_) + 1
    assert spent(found) <= 4.0
    assert found.score(X, y) > 0.7


def test_pipelines_inside_pipelines_are_looked_into():
    X, y = records()
    inner = Pipeline([("scale", StandardScaler(bounds=(-4.0, 4.0))), ("pca", PCA(data_norm=4.0))])
    outer = Pipeline([("before", inner), ("model", logistic())])
    found = PrivateGridSearch(outer, {"before__pca__n_components": [1, 2]}, **BUDGET).fit(X, y)
    assert found.best_estimator_["before"]["pca"].n_components_ in {1, 2}
    assert found.predict(X).shape == (3000,)
    leaking = Pipeline([("scale", sklearn.preprocessing.StandardScaler())])
    with pytest.raises(InvalidArgument, match="got StandardScaler as 'before__scale'"):
        PrivateGridSearch(Pipeline([("before", leaking), ("model", logistic())]), {}, **BUDGET).fit(X, y)


def test_tables_are_encoded_by_a_schema_at_no_charge():
    generator = np.random.default_rng(0)
    age, job = generator.uniform(20, 60, size=3000), generator.choice(["a", "b", "?"], size=3000)
    table = pa.table({"age": [None, *age[1:].tolist()], "job": job.tolist(), "other": ["x"] * 3000})
    columns = (NumericColumn(name="age", low=0, high=100), CategoricalColumn(name="job", categories=("a", "b")))
    schema = Schema(columns=columns, target="ill", labels=("no", "yes"))
    y = np.where(job == "a", "yes", "no")
    pipeline = Pipeline(
        [
            ("encode", SchemaEncoder(schema)),
            ("model", LogisticRegression(data_norm=schema.data_norm, classes=("no", "yes"))),
        ]
    )
    search = PrivateGridSearch(pipeline, {"model__regularization": [1.0, 10.0]}, **BUDGET).fit(table, y)
    assert len(search.events_) == 3
    assert search.score(table, y) > 0.95
    assert search.best_estimator_.predict(table).tolist()[:5] == search.predict(table).tolist()[:5]
    with pytest.raises(InvalidArgument, match="must not vary the SchemaEncoder"):
        PrivateGridSearch(pipeline, {"encode__schema": [schema]}, **BUDGET).fit(table, y)
    late = make_pipeline(MinMaxScaler(bounds=(0.0, 1.0)), SchemaEncoder(schema), logistic())
    with pytest.raises(InvalidArgument, match="SchemaEncoder must be the first step"):
        PrivateGridSearch(late, {}, **BUDGET).fit(np.zeros((3, 2)), np.zeros(3))


def test_row_by_row_steps_are_free_behind_one_that_fills_missing_entries():
    X, y = records()
    X[0, 0], X[1] = np.nan, np.inf
    middle = sklearn.preprocessing.PolynomialFeatures(include_bias=False)
    line = make_pipeline(MinMaxScaler(bounds=(-4.0, 4.0)), middle, logistic())
    found = PrivateGridSearch(line, {"polynomialfeatures__degree": [1, 2]}, **BUDGET).fit(X, y)
    assert len(found.events_) == 3
    assert found.predict(X).shape == (3000,)
    first = make_pipeline(sklearn.preprocessing.Normalizer(), logistic())
    with pytest.raises(InvalidArgument, match="normalizer must follow a step that fills missing entries"):
        PrivateGridSearch(first, {}, **BUDGET).fit(X, y)


def test_a_number_is_searched_for_too():
    X, _ = records()
    line = make_pipeline(StandardScaler(bounds=(-4.0, 4.0)), LinearRegression(data_norm=4.0, target_bounds=(-4.0, 4.0)))
    found = PrivateGridSearch(line, {"linearregression__fit_intercept": [True, False]}, **BUDGET).fit(X, X[:, 0])
    assert found.score(X, X[:, 0]) > 0.5
    assert spent(found) <= 4.0


REFUSED = [
    (sklearn.preprocessing.StandardScaler(), "Use sordino.estimators.StandardScaler"),
    (sklearn.preprocessing.MinMaxScaler(), "Use sordino.estimators.MinMaxScaler"),
    (sklearn.preprocessing.OneHotEncoder(), "SchemaEncoder"),
    (sklearn.preprocessing.FunctionTransformer(), "Apply its function to each record"),
    (sklearn.decomposition.PCA(2), "Use sordino.estimators.PCA"),
    (SelectKBest(k=1), "Choose columns from public knowledge"),
    (VarianceThreshold(), "Choose columns from public knowledge"),
    (SimpleImputer(), "Leave it out"),
    (ColumnTransformer([("all", "passthrough", [0])]), "SchemaEncoder"),
    (FeatureUnion([("pca", PCA(1, data_norm=1.0))]), "SchemaEncoder"),
    (sklearn.linear_model.LogisticRegression(), "Leave it out"),
    (GaussianNB(bounds=(0.0, 1.0), classes=(0, 1)), "Put it last"),
]


@pytest.mark.parametrize(("step", "advice"), REFUSED, ids=lambda value: type(value).__name__)
def test_a_step_that_learns_from_records_without_a_charge_is_refused_by_name(step, advice, tmp_path):
    account = declared_account(tmp_path)
    pipeline = Pipeline([("step", step), ("model", logistic())])
    search = PrivateGridSearch(pipeline, {"model__fit_intercept": [True]}, **BUDGET, ledger=account)
    with pytest.raises(InvalidArgument, match=type(step).__name__) as refusal:
        search.fit(*records(20))
    assert advice in str(refusal.value)
    with pytest.raises(InvalidArgument, match=type(step).__name__):  # through the grid as well
        PrivateGridSearch(
            Pipeline([("step", "passthrough"), ("model", logistic())]), {"step": [step]}, **BUDGET, ledger=account
        ).fit(*records(20))
    assert not charges(account)


@pytest.mark.parametrize(
    ("pipeline", "grid", "error", "words"),
    [
        (make_pipeline(sklearn.linear_model.LogisticRegression()), {}, MissingDeclaration, "a Pipeline that ends in"),
        (make_pipeline(logistic(), "passthrough"), {"logisticregression__epsilon": [1.0]}, InvalidArgument, "epsilon"),
        (make_pipeline(PCA(1, data_norm=1.0)), {}, InvalidArgument, "a classifier or a regressor, got PCA"),
        (make_pipeline(PCA(9, data_norm=1.0), logistic()), {}, InvalidArgument, "n_components"),
        (
            make_pipeline(PCA(1, data_norm=1.0, neighboring_relation="replace_one"), logistic()),
            {},
            InvalidArgument,
            "neighboring_relation must be the same",
        ),
        (make_pipeline(PCA(1, data_norm=1.0), logistic()), {"pca__wrong": [1]}, ValueError, "wrong"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_charged(pipeline, grid, error, words, tmp_path):
    account = declared_account(tmp_path)
    with pytest.raises(error, match=words):
        PrivateGridSearch(pipeline, grid, **BUDGET, ledger=account).fit(*records(20))
    assert not charges(account)


def test_a_ledger_is_charged_once_for_all_and_refuses_what_does_not_fit(tmp_path):
    account = declared_account(tmp_path)
    search = PrivateGridSearch(whole(), {"pca__n_components": [1, 2]}, **BUDGET, ledger=account)
    search.fit(*records(50))
    assert len(charges(account)) == 1
    with pytest.raises(BudgetExceeded):
        search.fit(*records(50))


def test_the_charge_and_the_noise_do_not_depend_on_the_records():
    def fitted(X, y):
        return PrivateGridSearch(whole(), {"pca__n_components": [1, 2]}, **BUDGET).fit(X, y)

    first, second = fitted(*records(200)), fitted(np.full((0, 4), np.nan), np.zeros(0))
    assert first.events_ == second.events_
    assert first.guarantee_ == second.guarantee_


def test_equal_candidates_of_a_repeatable_search_have_noise_of_their_own():
    X, y = records(50)
    found = []
    for place in (0, 1):
        search = PrivateGridSearch(whole(), {"model__fit_intercept": [True, True]}, **BUDGET, **TEST_RUN)
        found.append(search._candidate({}, 1.0, 1e-6, place).fit(X, y)._fitted[0].mean_)
    assert (found[0] != found[1]).all()


def test_boosting_behind_components_is_one_chain_of_charges():
    line = make_pipeline(PCA(2, data_norm=4.0), HistGradientBoostingClassifier(bounds=(-4.0, 4.0), classes=(0, 1)))
    found = PrivateGridSearch(line, {"histgradientboostingclassifier__max_iter": [2, 4]}, **BUDGET)
    assert spent(found.fit(*records(300))) <= 4.0
