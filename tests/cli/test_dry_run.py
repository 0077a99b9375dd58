"""`--dry-run` says what a command would cost and whether the ledger has it, and does nothing else."""

import csv
import json

import numpy as np
import pytest
from typer.testing import CliRunner

from sordino.cli import app
from sordino.errors import BudgetExceeded
from sordino.events import Gaussian
from sordino.ledger import Ledger, preview_charge

SCHEMA = {
    "target": "income",
    "labels": ["low", "high"],
    "columns": [
        {"name": "age", "type": "numeric", "low": 0, "high": 100},
        {"name": "job", "type": "category", "categories": ["clerk", "nurse"]},
    ],
}
DECLARED = ["--schema", "schema.json"]
CHARGING = {
    "module": ["train", "people.csv", *DECLARED, "--epsilon", "1"],
    "estimator": ["train", "people.csv", *DECLARED, "--epsilon", "1", "--model", "boosting"],
    "estimator, δ of its own": ["train", "people.csv", *DECLARED, "--epsilon", "1", "--model", "objective"],
    "recipe": ["train", "people.csv", *DECLARED, "--recipe", "adult-logistic", "--epsilon", "1"],
    "tune": ["tune", "people.csv", *DECLARED, "--epsilon", "1"],
    "compare": [
        "compare", "people.csv", *DECLARED, "--epsilon", "1", "--test", "test.csv", "--methods", "dp-gd,objective"
    ],
    "describe": ["describe", "people.csv", *DECLARED, "--epsilon", "1"],
    "synthesize": ["synthesize", "people.csv", *DECLARED, "--epsilon", "1"],
    "schema check": ["schema", "check", "people.csv", *DECLARED, "--epsilon", "1"],
    "federate": ["federate", "adult", "--epsilon", "1", "--clients", "20", "--rounds", "2", "--cohort", "5"],
}  # fmt: skip
NEEDS_UNIT = {"federate": "client"}


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(1)
    for name, count in (("people.csv", 400), ("test.csv", 100)):
        with open(name, "w", newline="") as file:
            table = csv.writer(file)
            table.writerow(["age", "job", "income"])
            for age in draw.integers(18, 90, count):
                table.writerow([age, draw.choice(["clerk", "nurse"]), "high" if age > 50 else "low"])
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    return tmp_path


def declare(name, *, epsilon, delta=1e-4):
    return Ledger("l.db").declare("people", epsilon=epsilon, delta=delta, privacy_unit=NEEDS_UNIT.get(name, "record"))


def listed(folder):
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("l.db"))


@pytest.mark.parametrize("name", CHARGING)
def test_a_charge_that_fits_is_shown_and_not_made(files, name):
    account, before = declare(name, epsilon=4.0), listed(files)
    result = CliRunner().invoke(
        app, [*CHARGING[name], "--ledger", "l.db", "--dataset-name", "people", "--dry-run", "--json"]
    )
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["ledger"]["fits"] is True
    assert 0.5 < document["cost"]["epsilon"] <= 1.0 + 1e-9
    assert document["cost"]["privacy_unit"] == NEEDS_UNIT.get(name, "record")
    assert len(account.history()) == 1
    assert listed(files) == before


@pytest.mark.parametrize("name", CHARGING)
def test_a_charge_that_does_not_fit_is_code_3_with_what_would(files, name):
    account, before = declare(name, epsilon=0.1), listed(files)
    result = CliRunner().invoke(app, [*CHARGING[name], "--ledger", "l.db", "--dataset-name", "people", "--dry-run"])
    assert result.exit_code == 3, result.stderr
    assert "the account does NOT cover it" in " ".join(result.stdout.split())
    assert len(account.history()) == 1
    assert listed(files) == before


@pytest.mark.parametrize("name", ["estimator", "describe", "schema check"])
def test_what_a_dry_run_shows_is_what_is_charged(files, name):
    account = declare(name, epsilon=4.0)
    arguments = [*CHARGING[name], "--ledger", "l.db", "--dataset-name", "people", "--json"]
    shown = json.loads(CliRunner().invoke(app, [*arguments, "--dry-run"]).stdout)
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert account.epsilon_of(account.event()) == pytest.approx(
        Ledger("l.db").account("people").epsilon_of(_event(shown)), abs=1e-9
    )


def _event(document):
    from sordino.events import from_dict

    return from_dict(document["cost"]["event"])


@pytest.mark.parametrize("model", ["objective", "output"])
def test_a_first_charge_is_not_refused_for_the_way_the_account_splits_its_delta(files, model):
    """ε = 1 of 3 on an untouched account; δ was not asked for."""
    account = declare("estimator", epsilon=3.0, delta=1e-5)
    arguments = ["train", "people.csv", *DECLARED, "--epsilon", "1", "--model", model, "--ledger", "l.db"]
    result = CliRunner().invoke(app, [*arguments, "--dataset-name", "people", "--out", "run", "--json"])
    assert result.exit_code == 0, result.stderr
    # Only the first has events with a δ of their own.
    assert (json.loads(result.stdout)["delta"] <= 1e-5 / 8) == (model == "objective")
    assert len(account.history()) == 2
    asked = CliRunner().invoke(app, [*arguments, "--dataset-name", "people", "--delta", "1e-5", "--out", "other"])
    assert asked.exit_code == (3 if model == "objective" else 0)


def test_public_records_cost_nothing_to_compare(files):
    result = CliRunner().invoke(app, ["compare", "adult", "--dry-run"])
    assert result.exit_code == 0
    assert "would cost nothing" in result.stdout
    assert not list(files.glob("compare-*.png"))


def test_an_evaluation_is_priced_and_a_report_costs_nothing(files):
    made = CliRunner().invoke(app, [*CHARGING["estimator"], "--out", "r"])
    assert made.exit_code == 0, made.stderr
    account, before = declare("", epsilon=1.0), {path: path.stat().st_mtime_ns for path in (files / "r").iterdir()}
    paid = ["--evaluate", "test.csv", *DECLARED, "--ledger", "l.db", "--dataset-name", "people", "--evaluation-epsilon"]
    assert CliRunner().invoke(app, ["report", "r", *paid, "0.5", "--dry-run"]).exit_code == 0
    assert CliRunner().invoke(app, ["report", "r", *paid, "5", "--dry-run"]).exit_code == 3
    free = CliRunner().invoke(app, ["report", "r", "--dry-run", "--json"])
    assert json.loads(free.stdout)["cost"] is None
    assert len(account.history()) == 1
    assert {path: path.stat().st_mtime_ns for path in (files / "r").iterdir()} == before


def test_a_charge_by_hand_is_priced(files):
    account = declare("", epsilon=1.0)
    event = '{"kind": "gaussian", "noise_multiplier": %s}'
    for noise, code in ((10, 0), (0.5, 3)):
        arguments = ["ledger", "charge", "l.db", "people", "--event", event % noise, "--dry-run"]
        assert CliRunner().invoke(app, arguments).exit_code == code
    assert len(account.history()) == 1


def test_from_python_the_first_charge_of_any_work_is_found(tmp_path):
    account = Ledger(tmp_path / "l.db").declare("x", epsilon=1.0, delta=1e-5)
    account.charge(Gaussian(noise_multiplier=10.0))
    large, small = Gaussian(noise_multiplier=0.5), Gaussian(noise_multiplier=20.0)
    assert preview_charge(lambda ledger: ledger.charge(small), account).fits is True
    found = preview_charge(lambda ledger: ledger.reserve(large), account)
    assert (found.fits, found.event) == (False, large)
    assert "Nothing was charged" in found.refusal
    assert preview_charge(lambda ledger: ledger.charge(small)).fits is None
    assert preview_charge(lambda _: None, account) is None
    with account.reserve(small) as reserved:
        assert preview_charge(lambda ledger: ledger.charge(small), reserved).fits is True
        assert preview_charge(lambda ledger: ledger.charge(large), reserved).fits is False
    with pytest.raises(BudgetExceeded, match="of another"):
        preview_charge(_refused, account)
    assert len(account.history()) == 4


def _refused(_):
    raise BudgetExceeded("the budget of another ledger must fit, got more. Ask it.")
