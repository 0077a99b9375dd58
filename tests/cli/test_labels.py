"""Labels outside the schema: refused with their number in public test files, named ahead for private data."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from sordino.cli.app import app
from sordino.data import ArraySchema, NumericColumn, Schema, load_dataset
from sordino.errors import InvalidArgument

SCHEMA = Schema(columns=(NumericColumn(name="age", low=0, high=100),), target="ill", labels=("no", "yes"))


def table(folder, name, labels):
    path = folder / name
    path.write_text("age,ill\n" + "".join(f"{20 + k % 60},{label}\n" for k, label in enumerate(labels)))
    return path


def test_unlisted_labels_of_a_public_test_file_are_an_error_with_their_number(tmp_path):
    train = table(tmp_path, "train.csv", ["no", "yes", "maybe"] * 5)
    with pytest.raises(InvalidArgument, match=r"must be among 'no', 'yes', .* got 3 rows with another label"):
        load_dataset(train, schema=SCHEMA, test=table(tmp_path, "test.csv", ["no", "Yes", "YES", "1", "", "?", "NA"]))
    found = load_dataset(train, schema=SCHEMA, test=table(tmp_path, "fine.csv", ["no", "yes", "", "?"]))
    assert (len(found.train), len(found.test)) == (10, 2)


@pytest.mark.parametrize("labels", [[], ["", "?", "n/a"]])
def test_a_public_test_file_without_any_listed_label_is_refused(tmp_path, labels):
    train = table(tmp_path, "train.csv", ["no", "yes"] * 5)
    with pytest.raises(InvalidArgument, match="must hold records with one of the labels 'no', 'yes'"):
        load_dataset(train, schema=SCHEMA, test=table(tmp_path, "test.csv", labels))


def test_labels_of_a_test_file_that_is_not_public_are_not_counted(tmp_path):
    train = table(tmp_path, "train.csv", ["no", "yes"] * 5)
    test = table(tmp_path, "test.csv", ["no", "maybe"])
    assert len(load_dataset(train, schema=SCHEMA, test=test, test_is_public=False).test) == 1


def test_arrays_are_looked_at_too(tmp_path):
    schema = ArraySchema(labels=("a", "b"), low=0, high=1)
    np.savez(tmp_path / "a.npz", x=np.full((4, 2), 0.25), y=np.array([0, 1, 2, np.nan]))
    np.savez(tmp_path / "b.npz", x=np.full((4, 2), 0.5), y=np.array([0, 7, -1, np.nan]))
    with pytest.raises(InvalidArgument, match="got 2 rows with another label"):
        load_dataset(tmp_path / "a.npz", schema=schema, test=tmp_path / "b.npz")


def run(folder, monkeypatch, *arguments):
    monkeypatch.chdir(folder)
    (folder / "s.json").write_text(json.dumps(SCHEMA.to_dict()))
    return CliRunner().invoke(app, [*arguments, "--schema", "s.json", "--epsilon", "1"])


@pytest.mark.parametrize(
    "command",
    [["train", "p.csv", "--model", "objective", "--out", "run"], ["train", "p.csv", "--steps", "2", "--out", "run"]],
)
def test_the_listed_labels_are_named_before_training_and_nothing_of_the_others(tmp_path, monkeypatch, command):
    table(tmp_path, "p.csv", ["no", "yes", "maybe"] * 100)
    done = run(tmp_path, monkeypatch, *command)
    assert done.exit_code == 0
    said = " ".join(done.output.split())
    assert "labels in column 'ill': 'no', 'yes'. Records with another label, or with none, are left out." in said
    assert "maybe" not in said


@pytest.mark.parametrize("command", [["train", "p.csv"], ["tune", "p.csv"], ["compare", "p.csv"]])
def test_no_listed_label_at_all_is_said_so(tmp_path, monkeypatch, command):
    table(tmp_path, "p.csv", ["0", "1"] * 100)
    done = run(tmp_path, monkeypatch, *command)
    assert done.exit_code != 0
    said = f"{done.exception} {' '.join(done.output.split())}"
    assert "one of the listed labels, 'no', 'yes', got none in column 'ill'" in said


@pytest.mark.parametrize("model", ["objective", "logistic"])
def test_an_accuracy_is_shown_with_that_of_the_majority_class(tmp_path, monkeypatch, model):
    table(tmp_path, "p.csv", ["no", "yes"] * 100)
    table(tmp_path, "t.csv", ["no", "no", "no", "yes"] * 10)
    steps = ["--steps", "2"] if model == "logistic" else []
    done = run(tmp_path, monkeypatch, "train", "p.csv", "--test", "t.csv", "--model", model, "--out", "run", *steps)
    assert done.exit_code == 0, done.output
    assert "the majority class" in done.output
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert metrics["majority_accuracy"]["value"] == 0.75
