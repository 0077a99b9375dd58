"""`sordino train --release-losses` and `sordino report --evaluate`: bought, charged first, shown, verified."""

import json

import pytest
from typer.testing import CliRunner

from sordino.cli import app
from sordino.ledger import Ledger
from sordino.runs import RunFolder

SCHEMA = {
    "target": "income",
    "labels": ["low", "high"],
    "columns": [
        {"name": "age", "type": "numeric", "low": 0, "high": 100},
        {"name": "job", "type": "category", "categories": ["clerk", "nurse"]},
    ],
}


def write_people(file, count):
    rows = [
        f"{20 + k % 60},{('clerk', 'nurse', 'judge')[k % 3]},{'high' if k % 60 > 25 else 'low'}" for k in range(count)
    ]
    file.write_text("\n".join(["age,job,income", *rows]) + "\n")


def ask(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "200", "NO_COLOR": "1"})


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    write_people(folder / "people.csv", 240)
    write_people(folder / "others.csv", 200)
    (folder / "schema.json").write_text(json.dumps(SCHEMA))
    Ledger(folder / "privacy.db").declare("others", epsilon=5.0, delta=1e-5)
    schema, run = ("--schema", folder / "schema.json"), folder / "run"
    asked = ("--epsilon", 8, "--steps", 6, "--batch-size", 60, "--release-losses", 1.4, "--out", run)
    result = ask("train", folder / "people.csv", *schema, *asked)
    assert result.exit_code == 0, result.stderr
    return folder


def evaluated(folder, data, *more):
    paid = ("--evaluation-epsilon", 1, "--ledger", folder / "privacy.db", "--dataset-name", "others")
    return ask("report", folder / "run", "--evaluate", data, "--schema", folder / "schema.json", *paid, *more)


def test_a_curve_is_bought_shown_and_verified(trained):
    run = RunFolder.open(trained / "run")
    assert len(run.released_losses.points) == 6
    assert run.released_losses.max_loss == 1.4
    assert "loss curve" in (run.path / "report.html").read_text()
    found = json.loads(ask("verify", run.path, "--json").stdout)
    assert {item["name"]: item["status"] for item in found["items"]}["loss curve"] == "pass"


def test_an_estimator_has_no_losses_to_sell(trained, tmp_path):
    asked = ("--epsilon", 1, "--model", "objective", "--release-losses", 1.4, "--out", tmp_path / "run")
    result = ask("train", trained / "people.csv", "--schema", trained / "schema.json", *asked)
    assert result.exit_code == 2
    assert "loss curve" in result.stderr


def test_private_records_are_evaluated_on_and_the_ledger_pays(trained):
    result = evaluated(
        trained, trained / "others.csv", "--evaluation-by", "job", "--evaluation-delta", "1e-6", "--json"
    )
    assert result.exit_code == 0, result.stderr
    (found,) = [one for one in json.loads(result.stdout)["evaluations"] if one["shares"]]
    assert found["records"] == "records of others.csv"
    assert {(share["column"], share["value"]) for share in found["shares"]} >= {("all", "all"), ("job", "nurse")}
    assert found["charged"]
    paid = Ledger(trained / "privacy.db").account("others").history()[-1]
    assert paid.digest == RunFolder.open(trained / "run").evaluations[-1].charge
    items = json.loads(ask("verify", trained / "run", "--ledger", trained / "privacy.db", "--json").stdout)["items"]
    assert {item["name"]: item["status"] for item in items}["evaluations"] == "pass"


def test_a_file_is_opened_after_the_charge(trained, tmp_path):
    broken = tmp_path / "broken.csv"
    broken.write_text("nothing,that,fits\n1,2,3\n")
    account = Ledger(trained / "privacy.db").account("others")
    before = len(account.history())
    assert evaluated(trained, broken).exit_code == 2
    assert len(account.history()) == before + 1
    assert RunFolder.open(trained / "run").evaluations[-1].tables is None


@pytest.mark.parametrize(
    "arguments",
    [
        ("--evaluation-epsilon", 1),
        ("--evaluation-by", "job"),
        ("--evaluate", "missing.csv", "--evaluation-epsilon", 1),
        ("--evaluate", "mnist.csv"),
    ],
)
def test_an_evaluation_that_is_not_whole_is_a_usage_error_and_costs_nothing(trained, arguments):
    before = len(RunFolder.open(trained / "run").evaluations)
    assert ask("report", trained / "run", *arguments).exit_code == 2
    assert len(RunFolder.open(trained / "run").evaluations) == before


def test_what_does_not_fit_the_account_is_refused_before_reading(trained):
    run = RunFolder.open(trained / "run")
    before = len(run.evaluations)
    assert evaluated(trained, trained / "others.csv", "--evaluation-epsilon", 50).exit_code == 3
    assert len(run.evaluations) == before
