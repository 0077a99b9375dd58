"""`train --recipe` on a file of one's own: nothing is measured, the account pays once, what does not fit is refused."""

import csv
import json
import random

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


def write_people(path, records, *, seed):
    generator = random.Random(seed)
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["age", "job", "income"])
        for _ in range(records):
            age, job = generator.randint(18, 90), generator.choice(["clerk", "nurse"])
            table.writerow([age, job, "high" if age + 20 * (job == "nurse") > 60 else "low"])


@pytest.fixture
def people(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_people(tmp_path / "people.csv", 400, seed=1)
    write_people(tmp_path / "public.csv", 100, seed=2)
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    return tmp_path


def train(*arguments):
    given = ["train", "people.csv", "--schema", "schema.json", "--recipe", "adult-logistic", "--json", *arguments]
    return CliRunner().invoke(app, given)


def test_a_private_file_is_trained_on_and_nothing_is_measured_on_it(people):
    result = train("--epsilon", "2", "--out", "run")
    assert result.exit_code == 0, result.stderr
    told = json.loads(result.stdout)
    assert told["metrics"] == {}
    assert told["recipe"] == "adult-logistic"
    assert 1.9 < told["epsilon"] <= 2
    run = RunFolder.open("run")
    assert run.meta["data"]["source"] == "not public"
    assert CliRunner().invoke(app, ["verify", "run"]).exit_code == 0


def test_accuracy_is_measured_on_a_file_that_is_declared_public(people):
    told = json.loads(train("--epsilon", "8", "--test", "public.csv").stdout)
    assert told["metrics"]["test_accuracy"] > 0.8


def test_the_account_pays_once_and_a_second_run_that_does_not_fit_is_refused(people):
    account = Ledger("privacy.db").declare("people", epsilon=2.5, delta=1e-5)
    paid = ["--epsilon", "2", "--ledger", "privacy.db", "--dataset-name", "people"]
    assert train(*paid, "--out", "first").exit_code == 0
    assert [entry.kind for entry in account.history()].count("charge") == 1
    assert train(*paid, "--out", "second").exit_code == 3
    assert not (people / "second").exists()


def test_a_chosen_seed_is_marked(people):
    told = json.loads(train("--epsilon", "2", "--seed", "3", "--reproducible").stdout)
    assert "fixed seed: not for release" in told["caveats"]
    again = json.loads(train("--epsilon", "2", "--seed", "3", "--reproducible").stdout)
    first, second = (RunFolder.open(run["run"]).load_model() for run in (told, again))
    assert all((first[name] == second[name]).all() for name in first)


@pytest.mark.parametrize("wrong", [["--setting", "none"], ["--epsilon", "2", "--model", "mlp"], []])
def test_what_a_recipe_can_not_do_is_a_usage_error(people, wrong):
    assert train(*wrong).exit_code == 2


@pytest.mark.parametrize("option", [["--device", "tpu"], ["--setting", "paper"]])
def test_options_of_recipes_are_refused_without_one(option):
    result = CliRunner().invoke(app, ["train", "adult", "--epsilon", "1", *option])
    assert result.exit_code == 2
    assert f"{option[0]} must be left out without --recipe" in result.stderr
