"""The private grid search: all fits and the choice are on one bill, and the score moves by at most one a record."""

import copy
import pickle
import warnings

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV, cross_val_score

from sordino import accounting
from sordino.errors import BudgetExceeded, InvalidArgument, MissingDeclaration
from sordino.estimators import DPClassifier, LinearRegression, LogisticRegression, PrivateGridSearch, Ridge
from sordino.estimators.base import dry_run_events, split_budget_equally
from sordino.events import BoundedRange, compose
from sordino.ledger import Ledger

GRID = {"intercept_scaling": [1.0, 1e6]}  # the second leaves nothing of the records


def classifier(**changes):
    return LogisticRegression(**({"data_norm": 2.0, "classes": (0, 1)} | changes))


def records(count=3000, seed=0):
    X = np.random.default_rng(seed).normal(size=(count, 3))
    return X, (X[:, 0] > 0).astype(int)


def search(estimator=None, grid=GRID, **changes):
    return PrivateGridSearch(estimator or classifier(), grid, **({"epsilon": 2.0, "delta": 1e-6} | changes))


def test_all_fits_and_the_choice_are_charged_and_stay_within_the_budget():
    for epsilon in (0.5, 2.0, 8.0):
        found = search(epsilon=epsilon).fit(*records(200))
        assert len(found.events_) == 3
        assert isinstance(found.events_[-1], BoundedRange)
        spent = accounting.epsilon(compose(list(found.events_)), 1e-6).upper
        assert 0.9 * epsilon < spent <= epsilon
        assert spent == pytest.approx(found.guarantee_.epsilon)
        assert found.best_estimator_.guarantee_.epsilon < 0.6 * epsilon


def test_many_candidates_get_more_than_an_equal_part_each():
    inner = classifier(method="dp-gd", dataset_size=50, steps=3)
    found = search(inner, {"learning_rate": [1.0, 2.0, 3.0, 4.0]}).fit(*records(50))
    assert found.best_estimator_.epsilon > 1.7 * 0.9 * 2.0 / 4  # close to the √4 of Gaussian noise
    assert found.guarantee_.epsilon <= 2.0


def test_the_better_candidate_is_chosen():
    X, y = records()
    for _ in range(5):
        found = search().fit(X, y)
        assert found.best_params_ == {"intercept_scaling": 1.0}
        assert found.best_index_ == 0
        assert found.score(X, y) > 0.8
        assert (found.predict(X) == found.best_estimator_.predict(X)).all()
        assert found.predict_proba(X).shape == (3000, 2)


@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_a_record_more_moves_every_score_up_by_at_most_one(kind):
    X, y = records(60)
    if kind == "classification":
        found = search(grid={"fit_intercept": [True]}).fit(X, y)
        others = [
            (np.full(3, 1e6), 0),
            (np.full(3, -1e6), 0),
            (-np.ones(3), 1),
            (np.full(3, np.nan), 1),
            (np.ones(3), 7),
            (np.zeros(3), 1),
        ]
    else:
        inner = LinearRegression(data_norm=2.0, target_bounds=(0.0, 1.0))
        found = search(inner, {"fit_intercept": [True, False]}).fit(X, y)
        others = [
            (np.full(3, 1e9), -5.0),
            (-np.ones(3), 1e12),
            (np.ones(3), np.nan),
            (np.full(3, np.inf), 0.0),
            (np.zeros(3), 0.5),  # whatever was fitted, predictions lie in the bounds: half their width away at most
        ]
    model = found.best_estimator_

    def score(X, y):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return found._score(model, X, y)

    before = score(X, y)
    moved = [score(np.vstack([X, x]), np.append(y, target)) - before for x, target in others]
    assert min(moved) >= -1e-9
    assert max(moved) <= 1 + 1e-9
    assert max(moved) > 0


def test_replacing_a_record_can_lower_a_score_so_the_choice_gets_twice_the_noise():
    scales = []
    for neighboring_relation in ("add_or_remove_one", "replace_one"):
        inner = classifier(method="output", neighboring_relation=neighboring_relation)
        found = search(inner).fit(*records(50))
        assert found.guarantee_.neighboring_relation == neighboring_relation
        scales.append(found.events_[-1])
    assert scales[0] == scales[1]  # the same ε; ReportNoisyMax doubles the scale itself


def test_the_bill_does_not_depend_on_the_records():
    first = search().fit(*records(300))
    second = search().fit(np.full((1, 3), np.nan), np.zeros(1))
    assert first.events_ == second.events_
    assert first.guarantee_ == second.guarantee_


def test_one_candidate_gets_all_but_the_choice():
    found = search(grid={"regularization": [5.0]}).fit(*records(50))
    assert found.best_estimator_.epsilon == pytest.approx(1.8)


def test_a_pure_budget_is_composed_too():
    found = search(delta=0.0).fit(*records(50))
    assert found.guarantee_.delta == 0.0
    assert 0.95 * 2.0 < found.guarantee_.epsilon <= 2.0


def test_networks_and_ridges_are_searched_too():
    X, y = records(300)
    network = DPClassifier(classes=(0, 1), dataset_size=300, epochs=1.0)
    found = search(network, {"max_grad_norm": [0.5, 1.0]}).fit(X, y)
    assert set(found.predict(X)) <= {0, 1}
    assert found.guarantee_.epsilon <= 2.0
    ridge = search(Ridge(data_norm=2.0, target_bounds=(0.0, 1.0)), {"alpha": [1.0, 1e6]}).fit(X, y)
    assert not hasattr(ridge, "predict_proba")
    assert ridge.predict(X).shape == (300,)


def test_candidates_draw_noise_of_their_own_even_in_a_repeatable_search():
    grid = {"fit_intercept": [True, True]}
    X, y = records(100)
    seeded = {"random_state": 4, "reproducible": True}
    found, again = search(grid=grid, **seeded).fit(X, y), search(grid=grid, **seeded).fit(X, y)
    assert (found.best_estimator_.coef_ == again.best_estimator_.coef_).all()
    assert found.guarantee_.caveats == ("fixed seed: not for release",)
    first, second = (found._candidate({}, 1.0, 1e-6, place).fit(X, y).coef_ for place in (0, 1))
    assert (first != second).any()


def test_searches_survive_clones_and_pickles():
    X, y = records(100)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = clone(search()).fit(X, y)
        again = pickle.loads(pickle.dumps(found))
        assert (again.predict(X) == found.predict(X)).all()
    assert copy.deepcopy(found).guarantee_ == found.guarantee_


@pytest.mark.parametrize(
    ("made", "error", "words"),
    [
        (lambda: PrivateGridSearch(epsilon=1.0, delta=0.0), MissingDeclaration, "estimator must be"),
        (lambda: PrivateGridSearch(classifier(), epsilon=1.0, delta=0.0), MissingDeclaration, "param_grid must be"),
        (lambda: search(epsilon=None), MissingDeclaration, "epsilon must be declared"),
        (lambda: search(grid={"epsilon": [1.0, 2.0]}), InvalidArgument, "param_grid must not hold epsilon"),
        (lambda: search(score_fraction=1.0), InvalidArgument, "score_fraction must be"),
        (lambda: search(random_state=3), InvalidArgument, "random_state must be None"),
        (
            lambda: search(classifier(method="output"), {"neighboring_relation": ["replace_one", "replace_special"]}),
            InvalidArgument,
            "neighboring_relation must be the same",
        ),
    ],
)
def test_what_can_not_be_priced_is_refused_before_anything_is_charged(made, error, words):
    found = made()
    with pytest.raises(error, match=words):
        found.fit(*records(20))
    assert not hasattr(found, "guarantee_")


def test_equal_shares_are_the_largest_that_the_accountant_allows():
    def build(epsilon, delta):
        return [classifier(epsilon=epsilon, delta=delta) for _ in range(9)]

    kept = split_budget_equally(build, columns=3, epsilon=1.0, delta=1e-6)
    events = [event for each in kept for event in dry_run_events(each, 3)[0]]
    assert accounting.epsilon(compose(events), 1e-6).upper <= 1.0
    larger = [event for each in build(kept[0].epsilon * 1.05, kept[0].delta) for event in dry_run_events(each, 3)[0]]
    assert accounting.epsilon(compose(larger), 1e-6).upper > 1.0


@pytest.fixture
def account(tmp_path):
    return Ledger(tmp_path / "privacy.db").declare("people", epsilon=12.0, delta=1e-4)


@pytest.mark.parametrize("jobs", [1, 2])
def test_scikit_learns_own_search_is_charged_for_every_fit_when_a_ledger_is_given(account, jobs):
    X, y = records(100)
    model = classifier(epsilon=0.5, delta=1e-6, ledger=account)
    found = GridSearchCV(model, {"regularization": [2.0, 20.0]}, cv=3, n_jobs=jobs).fit(X, y)
    # In workers the ledger alone counts the fits: the guarantee is that of all it holds, and the caveat says so.
    assert found.best_estimator_.guarantee_.epsilon == pytest.approx(7 * 0.5, rel=1e-2)
    assert bool([each for each in found.best_estimator_.guarantee_.caveats if "ledger" in each]) is (jobs == 2)
    charged = [entry for entry in account.history() if entry.kind == "charge"]
    assert len(charged) == 2 * 3 + 1  # every fold of every candidate, and the last fit
    assert 0.5 < account.spent().epsilon <= 7 * 0.5 * (1 + 1e-9)
    cross_val_score(model, X, y, cv=2)
    assert len([entry for entry in account.history() if entry.kind == "charge"]) == 9


def test_a_search_that_does_not_fit_the_account_ends_in_a_refusal(tmp_path):
    small = Ledger(tmp_path / "small.db").declare("people", epsilon=1.2, delta=1e-4)
    model = classifier(epsilon=0.5, delta=1e-6, ledger=small)
    with pytest.raises(BudgetExceeded):
        GridSearchCV(model, {"regularization": [2.0, 20.0]}, cv=2, error_score="raise").fit(*records(100))
    assert small.spent().epsilon <= 1.2


def test_a_private_search_is_charged_once_and_whole(account):
    found = search(classifier(ledger=account), ledger=account, epsilon=1.0).fit(*records(100))
    (entry,) = [entry for entry in account.history() if entry.kind == "charge"]
    assert account.spent().epsilon >= 0.99 * found.guarantee_.epsilon
    assert found.best_estimator_.ledger is None
    assert entry.note == "PrivateGridSearch"
