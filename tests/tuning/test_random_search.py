"""Random search over estimators, and `sordino tune` and `plan --recommend` on the command line."""

import json

import numpy as np
import pytest
from sklearn.base import clone
from typer.testing import CliRunner

from sordino import accounting
from sordino.cli import app
from sordino.errors import BudgetExceeded, InvalidArgument, MissingDeclaration, SordinoError
from sordino.estimators import LinearRegression, LogisticRegression
from sordino.events import Gaussian, PureDP, RepeatAndSelect
from sordino.ledger import Ledger
from sordino.runs import RunFolder
from sordino.tuning import LogUniform, PrivateRandomSearch, recommend_settings
from sordino.tuning.random_search import EstimatorRuns
from sordino.tuning.search import TrialBudget

SCALES = {"intercept_scaling": [1.0, 1e6]}  # the second leaves nothing of the records


def classifier(**changes):
    return LogisticRegression(**({"data_norm": 2.0, "classes": (0, 1)} | changes))


def records(count=3000, seed=0):
    X = np.random.default_rng(seed).normal(size=(count, 3))
    return X, (X[:, 0] > 0).astype(int)


def search(space=SCALES, estimator=None, **changes):
    given = {"epsilon": 2.0, "delta": 1e-6, "mean": 12.0} | changes
    return PrivateRandomSearch(estimator or classifier(), space, **given)


def test_the_better_setting_wins_and_the_bill_is_one_selection():
    found = search(shape=1.0, mean=12.0, random_state=7, reproducible=True).fit(*records())
    assert found.best_params_ == {"intercept_scaling": 1.0}
    assert found.score(*records(seed=1)) > 0.9
    (event,) = found.events_
    assert isinstance(event, RepeatAndSelect)
    assert accounting.epsilon(event, 1e-6).upper == found.guarantee_.epsilon <= 2.0
    assert found.best_score_ > 2500


def test_it_is_an_estimator_and_refuses_what_it_sets_itself():
    made = clone(search({"regularization": LogUniform(1.0, 10.0)}))
    assert made.get_params()["mean"] == 12.0
    for space, error in (
        ({"epsilon": [1.0, 2.0]}, InvalidArgument),
        ({"regularisation": [1.0]}, InvalidArgument),
        (None, MissingDeclaration),
    ):
        with pytest.raises(error):
            search(space).fit(*records(50))
    with pytest.raises(InvalidArgument, match="regularization"):
        search({"regularization": [-1.0]}, mean=2.0).fit(*records(50))


def test_it_charges_an_account_first_or_not_at_all(tmp_path):
    account = Ledger(str(tmp_path / "privacy.db")).declare("people", epsilon=1.0, delta=1e-6, policy="pld")
    with pytest.raises(BudgetExceeded):
        search(ledger=account).fit(*records(50))
    assert len(account.history()) == 1
    assert search(ledger=account, epsilon=1.0).fit(*records(50)).events_ == (account.event(),)


def test_regressions_are_searched_too():
    X, _ = records()
    y = np.clip(X[:, 0], -3, 3)
    model = LinearRegression(data_norm=3.0, target_bounds=(-3.0, 3.0))
    found = search({"fit_intercept": [True, False]}, model, mean=3.0).fit(X, y)
    assert found.score(X, y) > 0.5


def test_fits_that_are_one_gaussian_are_known_by_their_noise_and_checked_against_it():
    def build(config, epsilon, delta, seed):
        return classifier(method="dp-gd", dataset_size=200, epsilon=epsilon, delta=delta, **config)

    runs = EstimatorRuns(build=build, examples=[{"steps": 5}, {"steps": 20}], columns=3, run_delta=1e-6)
    assert runs.gaussian
    share = TrialBudget(event=Gaussian(noise_multiplier=4.0), epsilon=None, delta=None, noise_multiplier=4.0)
    for steps in (5, 7, 20):
        made = runs.estimator({"steps": steps}, share).fit(*records(200))
        runs.check(made, share)
    less = TrialBudget(event=Gaussian(noise_multiplier=4.1), epsilon=None, delta=None, noise_multiplier=4.1)
    with pytest.raises(SordinoError, match="share"):
        runs.check(made, less)
    other = EstimatorRuns(
        build=lambda config, epsilon, delta, seed: classifier(epsilon=epsilon, delta=delta),
        examples=[{}],
        columns=3,
        run_delta=1e-6,
    )
    assert not other.gaussian
    assert other.run is None
    tight = TrialBudget(event=PureDP(epsilon=0.5), epsilon=0.5, delta=0.0, noise_multiplier=None)
    with pytest.raises(SordinoError, match="share"):
        other.check(classifier(epsilon=1.0, delta=0.0).fit(*records(200)), tight)


# ── rules of scale ──────────────────────────────────────────────────────────────────────────────────────────


def test_recommended_settings_obey_their_rules():
    goal = {"target_epsilon": 1.0, "delta": 1e-5}
    found = recommend_settings(dataset_size=60_000, num_parameters=7850, **goal)
    spent = accounting.epsilon
    from sordino.commands.planning import subsampled_gaussian

    event = subsampled_gaussian(
        sample_rate=found.sample_rate, noise_multiplier=found.noise_multiplier, steps=found.steps
    )
    assert spent(event, 1e-5).upper <= 1.0
    assert found.signal == pytest.approx(found.sample_rate * found.steps**0.5 / found.noise_multiplier)
    assert 0.85 * found.signal_ceiling < found.signal <= found.signal_ceiling
    assert found.signal_ceiling == pytest.approx(1 / 3.73064)
    spread = (1 + 7850 * found.noise_multiplier**2 / found.batch_size**2) ** 0.5
    assert found.learning_rate == pytest.approx(1 / (found.steps**0.5 * spread), rel=1e-2)
    # Twice the way, twice the rate; the trial keeps B/σ.
    twice = recommend_settings(dataset_size=60_000, num_parameters=7850, distance=2.0, **goal)
    assert twice.learning_rate == pytest.approx(2 * found.learning_rate, rel=1e-2)
    trial, noise = found.small_batch
    assert trial / noise == pytest.approx(found.batch_size / found.noise_multiplier)
    # A model too large for its records gets no more steps than can help.
    huge = recommend_settings(dataset_size=2000, num_parameters=100_000, **goal)
    assert huge.steps <= max(1.0, huge.useful_steps)


def call(*arguments):
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "120", "NO_COLOR": "1"})


def test_the_command_recommends_settings_with_their_sources():
    asked = (
        "plan",
        "--recommend",
        "--epsilon",
        "1",
        "--delta",
        "1e-5",
        "--dataset-size",
        "60000",
        "--parameters",
        "7850",
    )
    result = call(*asked, "--json")
    assert result.exit_code == 0, result.stderr
    body = json.loads(result.stdout)
    assert body["epsilon"] <= 1.0
    assert set(body["sources"]) <= set(body)
    assert "Sablayrolles" in call(*asked).stdout
    assert call(*asked, "--steps", "10").exit_code == 2
    assert call(*asked[:-2]).exit_code == 2


# ── sordino tune ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def people(tmp_path, monkeypatch):
    """A private file, a public one, and the schema of both."""
    monkeypatch.chdir(tmp_path)
    schema = {
        "target": "income",
        "labels": ["low", "high"],
        "columns": [{"name": "age", "type": "numeric", "low": 0, "high": 100}],
    }
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    for name, seed in (("people", 1), ("public", 2)):
        ages = np.random.default_rng(seed).integers(18, 90, 2000)
        lines = [f"{age},{'high' if age > 55 else 'low'}" for age in ages]
        (tmp_path / f"{name}.csv").write_text("\n".join(["age,income", *lines]) + "\n")
    (tmp_path / "space.json").write_text(json.dumps({"regularization": {"log_uniform": [1.0, 4.0]}}))
    return tmp_path


TUNE = ("tune", "people.csv", "--schema", "schema.json", "--model", "objective", "--epsilon", "2", "--runs", "2")


def test_the_command_tunes_on_private_records_and_leaves_a_run_that_says_so(people):
    result = call(*TUNE, "--space", "space.json", "--test", "public.csv", "--out", "run", "--json")
    assert result.exit_code == 0, result.stderr
    body = json.loads(result.stdout)
    assert body["epsilon"] <= 2.0
    assert 1.0 <= body["settings"]["regularization"] <= 4.0
    assert body["metrics"]["test_accuracy"] > 0.8
    run = RunFolder.open(people / "run")
    (line,) = list(run)
    assert isinstance(line.event, RepeatAndSelect)
    assert "secret random number" in run.meta["data_accesses"]["tuning"]
    assert "secret random number" in (people / "run/report.html").read_text()
    told = call("account", "run", "--json")
    assert json.loads(told.stdout)["epsilon"] <= 2.0


def test_the_command_refuses_before_anything_is_trained(people):
    for more, code in (
        (("--space", "people.csv"), 2),
        (("--score", "public"), 2),
        (("--runs", "1"), 2),
        (("--model", "mlp"), 2),
        (("--model", "naive-bayes"), 2),
    ):
        assert call(*TUNE, *more, "--out", "none").exit_code == code
        assert not (people / "none").exists()
    assert (
        call("ledger", "declare", "l.db", "people", "--epsilon", "1", "--delta", "1e-6", "--policy", "pld").exit_code
        == 0
    )
    charged = ("--ledger", "l.db", "--dataset-name")
    assert call(*TUNE, *charged, "people", "--out", "none").exit_code == 3
    assert not (people / "none").exists()
    # An account with the usual policy has room for a search of its own size, priced as the account does.
    assert call("ledger", "declare", "l.db", "others", "--epsilon", "2", "--delta", "1e-5").exit_code == 0
    paid = call(*TUNE, "--delta", "1e-5", "--space", "space.json", *charged, "others", "--out", "paid", "--json")
    assert paid.exit_code == 0, paid.stderr
    assert json.loads(paid.stdout)["accountant"] == "basic"
    assert call(*TUNE, "--delta", "1e-5", *charged, "others", "--out", "none").exit_code == 3
