"""A public file without a test file: every fifth record is kept out of training and measured on, by every command."""

import json
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from sordino.cli import app
from sordino.commands.attacks import load_run_dataset
from sordino.data import load_dataset
from sordino.errors import InvalidArgument
from sordino.runs import RunFolder

SCHEMA = {
    "target": "income",
    "labels": ["low", "high"],
    "columns": [{"name": "age", "type": "numeric", "low": 0, "high": 100}],
}


@pytest.fixture
def people(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where attacks write
    ages = np.random.default_rng(0).integers(18, 90, 500)
    lines = "".join(f"{age},{'high' if age > 50 else 'low'}\n" for age in ages)
    (tmp_path / "people.csv").write_text("age,income\n" + lines)
    (tmp_path / "people.json").write_text(json.dumps(SCHEMA))
    return tmp_path


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def train(folder, *options, data="people.csv"):
    return invoke(
        "train", folder / data, "--epsilon", "3", "--schema", folder / "people.json", "--out", folder / "run", *options
    )


def splits(folder):
    return load_dataset(str(folder / "people.csv"), schema=folder / "people.json")


@pytest.mark.parametrize("model", ["logistic", "objective"])
def test_accuracy_and_baseline_are_shown(people, model):
    done = train(people, "--data-is-public", "--model", model, "--json")
    assert done.exit_code == 0, done.output
    body = json.loads(done.stdout)
    assert body["metrics"]["test_accuracy"] > 0.8
    assert "baseline_test_accuracy" in body["metrics"]
    facts = json.loads((people / "run" / "run.json").read_text())["data"]
    assert (facts["records"], facts["held_out_every"]) == (400, 5)


def test_a_private_file_is_trained_on_whole_and_not_measured(people):
    done = train(people, "--model", "objective", "--json")
    assert json.loads(done.stdout)["metrics"] == {}
    assert json.loads((people / "run" / "run.json").read_text())["data"]["held_out_every"] is None


def test_the_split_is_by_number_and_complete(people):
    whole = splits(people)
    split = replace(whole, public=True).with_held_out_records()
    assert (len(split.train), len(split.test), split.held_out_every) == (400, 100, 5)
    assert np.array_equal(split.test.features, whole.train.features[4::5])
    assert np.array_equal(split.train.labels, np.delete(whole.train.labels, np.s_[4::5]))
    assert split.with_held_out_records() is split


def test_private_records_are_never_held_out(people):
    with pytest.raises(InvalidArgument, match="records must be public"):
        splits(people).with_held_out_records()


def test_an_attack_takes_the_records_kept_out_as_strangers(people):
    assert train(people, "--data-is-public", "--model", "logistic").exit_code == 0
    options = ("--data", people / "people.csv", "--schema", people / "people.json", "--data-is-public", "--json")
    done = invoke("attack", people / "run", *options)
    assert done.exit_code == 0, done.output
    found = load_run_dataset(
        RunFolder.open(people / "run"), str(people / "people.csv"), people / "people.json", None, public=True
    )
    assert np.array_equal(found.test.features, splits(people).train.features[4::5])
    assert len(found.train) == 400


def test_a_file_without_a_readable_record_says_so(people):
    (people / "comma.csv").write_text("age,income\n" + "".join(f"{20 + k},low,\n" for k in range(60)))
    for options in ((), ("--data-is-public",)):
        done = train(people, *options, data="comma.csv")
        assert done.exit_code == 2
        assert "as many cells as the header" in done.output


def test_a_recipe_holds_out_the_same_records(people):
    done = invoke(
        *("train", people / "people.csv", "--recipe", "adult-logistic", "--epsilon", "3"),
        *("--schema", people / "people.json", "--out", people / "run", "--data-is-public", "--json"),
    )
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["metrics"]["test_accuracy"] > 0.7
    assert json.loads((people / "run" / "run.json").read_text())["data"]["held_out_every"] == 5
