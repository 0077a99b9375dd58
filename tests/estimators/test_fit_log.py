"""Several fits of an estimator and its clones: each states the composition of all of them, or is refused."""

import copy
import math
import multiprocessing
import pickle
import subprocess
import sys

import numpy as np
import pytest
from scipy.stats import norm
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.model_selection import GridSearchCV, cross_val_score, cross_validate
from sklearn.multiclass import OneVsRestClassifier
from sklearn.pipeline import make_pipeline

from sordino import accounting
from sordino.definitions import Guarantee
from sordino.errors import InvalidArgument, UnsupportedEvent
from sordino.estimators import (
    PCA,
    GaussianNB,
    LogisticRegression,
    MinMaxScaler,
    PrivateGridSearch,
    StandardScaler,
)
from sordino.estimators.base import dry_run_events, independent_copy
from sordino.events import PureDP, RepeatAndSelect, compose
from sordino.ledger import Ledger
from sordino.tuning import PrivateRandomSearch

X = np.random.default_rng(0).normal(size=(120, 2))
Y = (X[:, 0] > 0).astype(int)


def bayes(epsilon=0.5, **changes):
    return GaussianNB(**({"epsilon": epsilon, "delta": 0.0, "bounds": (-2.0, 2.0), "classes": (0, 1)} | changes))


def logistic(**changes):
    return LogisticRegression(**({"epsilon": 1.0, "delta": 1e-6, "data_norm": 3.0, "classes": (0, 1)} | changes))


def components(**changes):
    return PCA(1, **({"epsilon": 1.0, "delta": 1e-6, "data_norm": 3.0} | changes))


def gaussian_delta(epsilon, mu):
    return norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)


def test_a_grid_search_states_all_of_its_fits():
    search = GridSearchCV(logistic(), {"regularization": [1.0, 10.0]}, cv=3).fit(X, Y)
    claim = search.best_estimator_.guarantee_
    assert (claim.epsilon, claim.delta) == (pytest.approx(7.0), pytest.approx(7e-6))
    assert claim.caveats[0].startswith("7 fits of this estimator and its clones: scores on the records")
    assert len(search.best_estimator_.events_) == 1  # of its last fit


def test_the_budgets_of_a_grid_search_over_epsilon_add_up():
    search = GridSearchCV(bayes(), {"epsilon": [0.25, 1.0]}, cv=2).fit(X, Y)
    expected = 2 * 0.25 + 2 * 1.0 + search.best_params_["epsilon"]
    assert search.best_estimator_.guarantee_.epsilon == pytest.approx(expected)
    assert search.best_estimator_.guarantee_.delta == 0


def test_every_step_of_a_pipeline_counts_its_own_fits():
    line = make_pipeline(components(), logistic(data_norm=1.0))
    best = GridSearchCV(line, {"logisticregression__regularization": [1.0, 10.0]}, cv=2).fit(X, Y).best_estimator_
    assert [step.guarantee_.caveats[0][:6] for _, step in best.steps] == ["5 fits", "5 fits"]
    assert best.steps[1][1].guarantee_.epsilon == pytest.approx(5.0)


def test_models_of_cross_validation_and_of_calibration_state_each_others_fits():
    model = bayes()
    kept = cross_validate(model, X, Y, cv=3, return_estimator=True)["estimator"]
    assert [each.guarantee_.epsilon for each in kept] == pytest.approx([1.5] * 3)
    cross_val_score(model, X, Y, cv=2)
    assert [each.guarantee_.epsilon for each in kept] == pytest.approx([2.5] * 3)
    assert not hasattr(model, "guarantee_")
    assert model.fit(X, Y).guarantee_.epsilon == pytest.approx(3.0)
    calibrated = CalibratedClassifierCV(bayes(), cv=4).fit(X, Y)
    claims = [pair.estimator.guarantee_ for pair in calibrated.calibrated_classifiers_]
    assert [claim.epsilon for claim in claims] == pytest.approx([2.0] * 4)
    assert "calibrated by them, are not covered" in claims[0].describe()


def test_clones_of_clones_copies_pickles_and_second_fits_are_counted_together():
    model = bayes()
    chain = clone(clone(model))
    for each in (chain, copy.deepcopy(chain), copy.copy(model), pickle.loads(pickle.dumps(model)), model, model):
        each.fit(X, Y)
    assert model.guarantee_.epsilon == chain.guarantee_.epsilon == pytest.approx(3.0)
    assert pickle.loads(pickle.dumps(chain)).guarantee_ == chain.guarantee_
    assert bayes().fit(X, Y).guarantee_ == independent_copy(model).fit(X, Y).guarantee_
    assert bayes().fit(X, Y).guarantee_.caveats == ()
    assert model.guarantee_.epsilon == pytest.approx(3.0)


def test_the_attributes_of_a_clone_are_its_parameters():
    assert set(vars(clone(logistic().fit(X, Y)))) == set(logistic().get_params())


def test_a_fit_that_fails_after_its_charge_is_counted(monkeypatch):
    model = bayes()
    with monkeypatch.context() as patch:
        patch.setattr("sordino.estimators.naive_bayes.BoundedMoments.release", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            clone(model).fit(X, Y)
    assert model.fit(X, Y).guarantee_.epsilon == pytest.approx(1.0)


@pytest.mark.parametrize("count", [2, 5])
def test_gaussian_fits_compose_as_one_gaussian(count):
    model = components()
    for _ in range(count):
        model.fit(X)
    claim = model.guarantee_
    (event,) = model.events_
    composed = accounting.epsilon(compose([event] * count), 1e-6).upper
    assert (claim.epsilon, claim.delta) == (composed, 1e-6)
    # By the exact curve of one Gaussian with √count less noise.
    mu = math.sqrt(count) / event.noise_multiplier
    assert gaussian_delta(claim.epsilon, mu) <= 1e-6 * (1 + 1e-6)
    assert gaussian_delta(claim.epsilon * 0.99, mu) > 1e-6
    assert 1.0 < claim.epsilon < count


def test_fits_at_different_deltas_are_each_stated_where_they_are_finite():
    model = logistic(delta=1e-6)
    other = clone(model).set_params(delta=1e-5).fit(X, Y)
    model.fit(X, Y)
    for each in (model, other):  # an (ε, δ) fit has no ε below its δ: the sum of both
        assert each.guarantee_.delta == pytest.approx(1.1e-5)
        assert each.guarantee_.epsilon == pytest.approx(2.0)


def test_what_a_test_run_adds_marks_all():
    model = bayes(random_state=1, reproducible=True)
    model.fit(X, Y)
    again = clone(model).set_params(random_state=None, reproducible=False).fit(X, Y)
    assert "fixed seed: not for release" in again.guarantee_.caveats


def test_fits_under_different_relations_are_refused():
    model = components().fit(X)
    with pytest.raises(InvalidArgument, match="neighboring_relation must be the same for all fits of an estimator"):
        clone(model).set_params(neighboring_relation="replace_one").fit(X)
    assert model.guarantee_.epsilon == pytest.approx(1.0)


@pytest.mark.parametrize("delta", [0.0, 1e-7])
def test_a_guarantee_that_is_set_counts_as_a_fit(delta):
    """As of a model that was read from a run folder."""
    model = bayes()
    model.guarantee_ = Guarantee(epsilon=2.0, delta=delta, accountant="pld", sampler="none")
    assert model.guarantee_.epsilon == 2.0
    assert clone(model).fit(X, Y).guarantee_.epsilon == pytest.approx(2.5)
    model.guarantee_ = Guarantee(epsilon=math.inf, delta=0.0, accountant="pld", sampler="none")
    assert not model.guarantee_.is_private


def test_what_has_no_price_together_adds_up_and_never_claims_less(monkeypatch):
    model = bayes(epsilon=0.5)
    other = clone(model).set_params(epsilon=1.0, delta=1e-6).fit(X, Y)
    model.fit(X, Y)

    def unsupported(*_, **__):
        raise UnsupportedEvent("no sound answer")

    monkeypatch.setattr(accounting, "epsilon", unsupported)
    for each in (model, other):
        claim = each.guarantee_
        assert 1.5 <= claim.epsilon < 1.5 + 1e-6
        assert 1e-6 <= claim.delta < 1e-6 * (1 + 1e-6)
        assert "accountant basic composition" in claim.describe()


# --- other processes ----------------------------------------------------------------------------------------------


@pytest.mark.slow  # starts workers
def test_clones_and_copies_in_workers_are_refused_without_a_ledger(tmp_path):
    for meta in (
        GridSearchCV(bayes(), {"epsilon": [0.5, 1.0]}, cv=2, n_jobs=2),
        CalibratedClassifierCV(bayes(), cv=2, n_jobs=2),
        OneVsRestClassifier(bayes(), n_jobs=2),  # sends the estimator itself, and clones it there
    ):
        with pytest.raises(ValueError, match=r"GaussianNB must be fitted in the process[\s\S]*n_jobs=None, or ledger="):
            meta.fit(X, np.where(X[:, 1] > 1, 2, Y) if isinstance(meta, OneVsRestClassifier) else Y)
    account = Ledger(tmp_path / "privacy.db").declare("people", epsilon=9.0, delta=0.0)
    search = GridSearchCV(bayes(ledger=account), {"epsilon": [0.5, 1.0]}, cv=2, n_jobs=2, error_score="raise")
    claim = search.fit(X, Y).best_estimator_.guarantee_
    # Four fits of folds, in workers, and the refit here: all that the account holds.
    assert claim.epsilon == pytest.approx(account.spent().epsilon)
    assert claim.epsilon >= 2 * (0.5 + 1.0) + 0.5
    assert "everything charged to the ledger's account is counted: copies may be fitted elsewhere" in claim.caveats
    saved = pickle.loads(pickle.dumps(search))
    assert saved.best_estimator_.guarantee_ == claim


def test_a_copy_that_may_be_fitted_elsewhere_makes_the_ledger_say_what_was_spent(tmp_path):
    account = Ledger(tmp_path / "privacy.db").declare("people", epsilon=9.0, delta=0.0)
    model = bayes(ledger=account)
    copy = pickle.dumps(clone(model))
    model.fit(X, Y)
    assert model.guarantee_.epsilon == pytest.approx(0.5)
    code = (
        "import pickle, sys; import numpy as np; m = pickle.loads(bytes.fromhex(sys.stdin.read()));"
        " m.fit(np.zeros((20, 2)), np.tile([0, 1], 10))"
    )
    subprocess.run([sys.executable, "-c", code], input=copy.hex(), text=True, check=True)
    assert model.guarantee_.epsilon == pytest.approx(1.0)
    with account.reserve(PureDP(epsilon=0.5)) as reservation:
        model.ledger = reservation
        assert model.guarantee_.epsilon == pytest.approx(1.0)
    model.ledger = None
    assert model.guarantee_.epsilon == np.inf


ELSEWHERE = """
import pickle, sys
import numpy as np
X = np.zeros((20, 2)); y = np.tile([0, 1], 10)
from sklearn.base import clone
for name in sys.argv[1:]:
    model = pickle.load(open(name, "rb"))
    try:
        print(round(model.fit(X, y).guarantee_.epsilon, 6), round(clone(model).fit(X, y).guarantee_.epsilon, 6))
    except Exception as error:
        print(type(error).__name__)
"""


def test_a_saved_estimator_goes_on_counting_elsewhere_and_a_saved_clone_is_refused(tmp_path):
    fitted, unfitted = bayes().fit(X, Y), bayes()
    saved = {"clone": clone(bayes()), "fitted": fitted, "unfitted": unfitted}
    for name, model in saved.items():
        (tmp_path / name).write_bytes(pickle.dumps(model))
    found = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, *(str(tmp_path / name) for name in saved)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.split("\n")[:3] == ["InvalidArgument", "1.0 1.5", "0.5 1.0"]


def _fit_inherited(found, results):
    try:
        model = pickle.loads(found) if isinstance(found, bytes) else found
        results.put(type(model.fit(X, Y)).__name__)
    except InvalidArgument as error:
        results.put(str(error))


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_estimator_that_another_process_inherits_or_is_sent_is_refused_there(tmp_path):
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    kept = bayes()
    account = Ledger(tmp_path / "privacy.db").declare("people", epsilon=9.0, delta=0.0)
    refused = (kept, clone(kept), pickle.dumps(kept), pickle.dumps(clone(kept)), pickle.dumps(bayes()))
    for found in (*refused, bayes(ledger=account)):
        allowed = getattr(found, "ledger", None) is not None
        process = context.Process(target=_fit_inherited, args=(found, results))
        process.start()
        text = results.get()
        process.join()
        assert text == "GaussianNB" if allowed else "must be fitted in the process that made it" in text
    assert account.spent().epsilon == pytest.approx(0.5)


# --- what composes by itself --------------------------------------------------------------------------------------


def test_dry_runs_and_private_searches_count_nothing_on_the_estimator_they_copy():
    model = logistic()
    dry_run_events(model, 2)
    search = PrivateGridSearch(model, {"regularization": [1.0, 10.0]}, epsilon=1.0, delta=1e-6).fit(X, Y)
    assert search.guarantee_.epsilon <= 1.0
    assert search.guarantee_.caveats == search.best_estimator_.guarantee_.caveats == ()
    assert search.best_estimator_.guarantee_.epsilon < 1.0
    assert model.fit(X, Y).guarantee_.epsilon == pytest.approx(1.0)
    cross_val_score(search, X, Y, cv=2)
    assert search.guarantee_.caveats[0].startswith("3 fits")
    assert 2.0 < search.guarantee_.epsilon <= 3.0 * (1 + 1e-6)


def test_random_searches_are_counted_too():
    model = logistic(method="output", epsilon=None, delta=None)
    search = PrivateRandomSearch(model, {"fit_intercept": [True, False]}, epsilon=2.0, delta=1e-6, mean=2.0)
    alone = search.fit(X, Y).guarantee_
    assert len(alone.caveats) == 1  # the search's own
    assert isinstance(search.events_[0], RepeatAndSelect)
    both = clone(search).fit(X, Y).guarantee_
    assert both == search.guarantee_
    assert alone.epsilon < both.epsilon <= 2 * alone.epsilon * (1 + 1e-6)
    assert both.caveats[0].startswith("2 fits")


# --- names and containers of transformers -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("transformer", "names"),
    [
        (MinMaxScaler(bounds=(-2.0, 2.0)), ["x0", "x1"]),
        (StandardScaler(epsilon=1.0, delta=0.0, bounds=(-2.0, 2.0)), ["x0", "x1"]),
        (components(), ["pca0"]),
    ],
    ids=["MinMaxScaler", "StandardScaler", "PCA"],
)
def test_transformers_name_their_columns(transformer, names):
    assert transformer.fit(X).get_feature_names_out().tolist() == names
    assert transformer.set_output(transform="default").transform(X).shape == (len(X), len(names))
    polars = pytest.importorskip("polars")
    frame = polars.DataFrame({"age": X[:, 0], "dose": X[:, 1]})
    out = clone(transformer).set_output(transform="polars").fit_transform(frame)
    assert out.columns == (["age", "dose"] if len(names) == 2 else names)
