"""`sordino predict`: a run's model on new records, for every kind of run and file, and what is refused."""

import csv
import gzip
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import sordino
from sordino.cli.app import app

SCHEMA = {
    "target": "ill",
    "labels": ["no", "yes"],
    "columns": [
        {"name": "age", "type": "numeric", "low": 0, "high": 100},
        {"name": "town", "type": "category", "categories": ["Köln", "Ulm"]},
    ],
}


def rows(count, seed=0):
    rng = np.random.default_rng(seed)
    ages = rng.integers(0, 101, count)
    # A text with separators, quotes and a line break in a column that the schema does not name.
    return [
        [
            str(k),
            str(age) if k % 7 else "?",
            ["Köln", "Ulm", ""][k % 3],
            'said "so",\nthen left',
            "yes" if age > 50 else "no",
        ]
        for k, age in enumerate(ages)
    ]


def write(path, records, *, label=True, separator=",", opener=open):
    with opener(path, "wt", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter=separator, lineterminator="\n")
        names = ["id", "age", "town", "note", "ill"]
        writer.writerows(row if label else row[:-1] for row in [names, *records])


def read(path, separator=","):
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.reader(file, delimiter=separator))


def run(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))


def document(*arguments):
    done = run(*arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with runs of every kind."""
    folder = tmp_path_factory.mktemp("predict")
    (folder / "schema.json").write_text(json.dumps(SCHEMA))
    write(folder / "train.csv", rows(800))
    write(folder / "new.csv", rows(60, seed=1))
    options = ("--schema", folder / "schema.json", "--epsilon", 20)
    kinds = {
        "estimator": ("train", "--model", "objective"),
        "module": ("train", "--steps", 5),
        "recipe": ("train", "--recipe", "adult-logistic"),
        "tuned": ("tune", "--model", "objective", "--runs", 2),
    }
    for kind, (command, *more) in kinds.items():
        done = run(command, folder / "train.csv", *options, *more, "--out", folder / kind)
        assert done.exit_code == 0, done.output
    return folder


@pytest.fixture
def here(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return trained


@pytest.mark.parametrize("kind", ["estimator", "module", "recipe", "tuned"])
def test_every_kind_of_run_predicts_with_and_without_a_label_column(here, tmp_path, kind):
    records = rows(60, seed=1)
    write("bare.csv", records, label=False)
    body = document("predict", here / kind, here / "new.csv", "--out", "labeled.csv")
    assert (body["records"], body["metrics"]) == (60, {})
    assert document("predict", here / kind, "bare.csv", "--out", "scored.csv")["columns"] == ["prediction"]
    scored, labeled = read("scored.csv"), read("labeled.csv")
    assert labeled[0] == ["id", "age", "town", "note", "ill", "prediction"]
    # Every cell of the new file stands there as it was, line breaks and quotes too.
    assert [row[:-1] for row in labeled[1:]] == records
    assert [row[-1] for row in scored] == [row[-1] for row in labeled]
    right = [row[4] == row[5] for row, record in zip(labeled[1:], records, strict=True) if record[1] != "?"]
    assert np.mean(right) > 0.8
    # As Python gives it.
    model = sordino.load_model(here / kind)
    frame = {name: [record[k] for record in records] for k, name in enumerate(["id", "age", "town"])}
    assert model.predict(frame).tolist() == [row[-1] for row in labeled[1:]]
    assert sordino.verify(here / kind).passed


@pytest.mark.parametrize("kind", ["estimator", "module", "recipe", "tuned"])
def test_probabilities_stand_beside_the_prediction(here, kind):
    document("predict", here / kind, here / "new.csv", "--probabilities")
    head, *scored = read("scored.csv")
    assert head[-3:] == ["prediction", "probability_no", "probability_yes"]
    chances = np.array([[float(cell) for cell in row[-2:]] for row in scored])
    assert np.allclose(chances.sum(axis=1), 1)
    assert [["no", "yes"][k] for k in chances.argmax(axis=1)] == [row[-3] for row in scored]


def test_true_values_are_measured_on_public_records_only(here):
    done = run("predict", here / "estimator", here / "new.csv")
    assert "Nothing was measured on it" in " ".join(done.output.split())
    assert "accuracy," not in done.output
    body = document("predict", here / "estimator", here / "new.csv", "--data-is-public")
    labeled = read("scored.csv")[1:]
    assert body["metrics"]["test_accuracy"] == np.mean([row[4] == row[5] for row in labeled])
    assert {"test_auc", "majority_accuracy", "test_balanced_accuracy"} <= body["metrics"].keys()
    write("odd.csv", [[*record[:-1], "maybe"] for record in rows(5)])
    done = run("predict", here / "estimator", "odd.csv", "--data-is-public")
    assert done.exit_code == 2
    assert "none" in done.output


@pytest.mark.parametrize("form", ["new.csv.gz", "new.tsv", "new.parquet"])
@pytest.mark.parametrize("out", ["scored.csv", "scored.tsv", "scored.parquet"])
def test_every_form_of_table_is_read_and_written(here, form, out):
    records = rows(60, seed=1)
    if form.endswith("parquet"):
        columns = list(zip(*records, strict=True))
        ages = [None if age == "?" else float(age) for age in columns[1]]
        pq.write_table(pa.table({"age": ages, "town": list(columns[2]), "id": list(range(60))}), form)
    else:
        zipped = form.endswith("gz")
        write(form, records, separator="\t" if "tsv" in form else ",", opener=gzip.open if zipped else open)
    document("predict", here / "estimator", form, "--out", out)
    if out.endswith("parquet"):
        found = pq.read_table(out).column("prediction").to_pylist()
    else:
        found = [row[-1] for row in read(out, "\t" if "tsv" in out else ",")[1:]]
    document("predict", here / "estimator", here / "new.csv", "--out", "plain.csv")
    assert found == [row[-1] for row in read("plain.csv")[1:]]


def test_a_number_is_predicted_in_its_unit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    schema = {"target": "cost", "low": 0, "high": 300, "columns": SCHEMA["columns"]}
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    lines = [f"{age},Ulm,{3 * age}" for age in range(100)] * 30
    (tmp_path / "train.csv").write_text("age,town,cost\n" + "\n".join(lines) + "\n")
    document("train", "train.csv", "--schema", "schema.json", "--epsilon", 20, "--model", "objective", "--out", "run")
    (tmp_path / "new.csv").write_text("town,age\nUlm,10\nUlm,90\n")
    document("predict", "run", "new.csv")
    low, high = (float(row[-1]) for row in read("scored.csv")[1:])
    assert abs(low - 30) < 40
    assert abs(high - 270) < 40
    assert run("predict", "run", "new.csv", "--probabilities").exit_code == 2


@pytest.mark.slow
def test_a_named_set_gives_its_test_records(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    document("train", "adult", "--epsilon", 1, "--model", "sufficient-statistics", "--out", "run")
    body = document("predict", "run", "adult")
    assert body["records"] == 15060
    assert body["metrics"]["test_accuracy"] > 0.8
    assert read("scored.csv")[0] == ["record", "prediction"]


def test_arrays_are_predicted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    pixels, labels = rng.integers(0, 256, (500, 4)).astype(np.float64), rng.integers(0, 2, 500)
    np.savez("train.npz", x=pixels, y=labels)
    np.savez("new.npz", x=pixels[:7], y=labels[:7].astype(float))
    (tmp_path / "schema.json").write_text('{"array": {"low": 0, "high": 255}, "labels": ["a", "b"]}')
    document("train", "train.npz", "--schema", "schema.json", "--epsilon", 5, "--model", "objective", "--out", "run")
    assert document("predict", "run", "new.npz")["records"] == 7
    assert {row[1] for row in read("scored.csv")[1:]} <= {"a", "b"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda lines: [line.replace("age,", "years,") for line in lines[:1]] + lines[1:], "without 'age'"),
        (lambda lines: [*lines[:2], "1,2", *lines[2:]], "line 3 of 'bad.csv' must have 5 cells"),
        (lambda lines: [lines[0].replace("note", "prediction"), *lines[1:]], "no column named prediction"),
    ],
)
def test_a_file_that_would_be_scored_wrongly_is_refused(here, tmp_path, change, words):
    lines = ["id,age,town,note,ill", "1,40,Ulm,x,no", "2,60,Ulm,y,yes"]
    (tmp_path / "bad.csv").write_text("\n".join(change(lines)) + "\n")
    done = run("predict", here / "estimator", "bad.csv")
    assert done.exit_code == 2
    assert words in " ".join(done.output.split())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--out", "scored.txt"), ".csv, .tsv or .parquet"),
        (("--out", "missing/scored.csv"), "folder that exists"),
        (("--model", "mlp"), "module:factory"),
        (("--model", "json:loads"), "left out for a run of kind estimator"),
    ],
)
def test_options_that_do_not_fit_are_refused(here, options, words):
    done = run("predict", here / "estimator", here / "new.csv", *options)
    assert done.exit_code == 2
    assert words in " ".join(done.output.split())


def test_neither_the_records_nor_the_run_folder_are_overwritten(here, tmp_path):
    write("new.csv", rows(3))
    assert "another file than the records" in run("predict", here / "estimator", "new.csv", "--out", "new.csv").output
    inside = here / "estimator" / "scored.csv"
    assert "outside the run folder" in run("predict", here / "estimator", "new.csv", "--out", inside).output
    assert not inside.exists()


def test_an_empty_file_gives_an_empty_one(here, tmp_path):
    write("empty.csv", [])
    assert document("predict", here / "module", "empty.csv", "--probabilities")["records"] == 0
    assert len(read("scored.csv")) == 1
