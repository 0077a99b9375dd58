"""`sordino synthesize`: the file, the run folder, the ledger, and what is refused before anything is charged."""

import csv
import json

import pytest
from typer.testing import CliRunner

from sordino.cli import app
from sordino.events import ZeroConcentratedDP
from sordino.ledger import Ledger
from sordino.runs import RunFolder

SCHEMA = {
    "target": "rich",
    "labels": ["no", "yes"],
    "columns": [
        {"name": "age", "type": "numeric", "low": 0, "high": 100},
        {"name": "job", "type": "category", "categories": ["clerk", "sales"]},
    ],
}


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = ["age,job,rich,secret"]
    lines += [f"{20 + i % 60},{('clerk', 'sales')[i % 3 == 0]},{('no', 'yes')[i % 60 > 30]},xyzzy" for i in range(600)]
    (tmp_path / "people.csv").write_text("\n".join(lines) + "\n")
    (tmp_path / "s.json").write_text(json.dumps(SCHEMA))
    return tmp_path


def run(*arguments):
    return CliRunner().invoke(app, ["synthesize", *arguments], env={"COLUMNS": "80", "TERM": "dumb", "NO_COLOR": "1"})


GIVEN = ("people.csv", "--schema", "s.json", "--epsilon", "2", "--bins", "4")


@pytest.mark.parametrize("out", ["t.csv", "t.tsv", "t.parquet"])
def test_a_table_a_run_folder_and_a_page_of_eighty_columns(files, out):
    result = run(*GIVEN, "--method", "mst", "--out", out, "--run", "runs/one")
    assert result.exit_code == 0, result.stderr
    assert "(ε = 2.00, δ = 1e-06)" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "xyzzy" not in result.output
    folder = RunFolder.open(files / "runs/one")
    (line,) = folder
    assert isinstance(line.event, ZeroConcentratedDP)
    assert folder.guarantee is not None
    assert folder.guarantee.epsilon <= 2
    assert folder.plan["dataset_size_is_public"] is False
    if out != "t.parquet":
        with (files / out).open() as file:
            rows = list(csv.DictReader(file, delimiter="\t" if out == "t.tsv" else ","))
        assert list(rows[0]) == ["age", "job", "rich"]
        assert 500 < len(rows) < 700
    verified = CliRunner().invoke(app, ["verify", "runs/one"])
    assert verified.exit_code == 0, verified.output


def test_the_document_and_the_ledger(files):
    Ledger(files / "l.db").create()
    Ledger(files / "l.db").declare("people", epsilon=2.2, delta=1e-5)
    paid = ("--ledger", "l.db", "--dataset-name", "people")
    result = run(*GIVEN, "--rows", "7", "--json", *paid)
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["records"] == 7
    assert document["epsilon"] <= 2
    assert {tuple(one["columns"]) for one in document["measured"]} >= {("age",), ("job",), ("rich",)}
    account = Ledger(files / "l.db").account("people")
    (charge,) = [entry for entry in account.history() if entry.kind == "charge"]
    assert charge.event == next(iter(RunFolder.open(document["run"]))).event
    refused = run(*GIVEN, "--out", "u.csv", "--run", "runs/refused", *paid)
    assert refused.exit_code == 3
    assert not (files / "runs/refused").exists()
    assert not (files / "u.csv").exists()


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ((*GIVEN, "--out", "people.csv"), "new file"),
        ((*GIVEN, "--out", "t.txt"), ".parquet"),
        ((*GIVEN, "--out", "nowhere/t.csv"), "folder"),
        (("people.csv", "--epsilon", "1"), "schema"),
        (("nothing.csv", "--schema", "s.json", "--epsilon", "1"), "no such file"),
        (("people.txt", "--schema", "s.json", "--epsilon", "1"), ".csv"),
        (("adult", "--schema", "s.json", "--epsilon", "1"), "schema"),
        ((*GIVEN, "--method", "gan"), "method"),
        ((*GIVEN, "--rows", "-1"), "rows"),
        ((*GIVEN, "--delta", "0"), "delta"),
        ((*GIVEN, "--bins", "0"), "bins"),
        ((*GIVEN, "--degree", "0"), "degree"),
        ((*GIVEN, "--seed", "1"), "reproducible"),
        ((*GIVEN, "--target", "age"), "target"),
        (("people.csv", "--public-schema-from", "people.csv", "--target", "rich", "--epsilon", "1"), "private file"),
    ],
)
def test_wrong_arguments_charge_nothing(files, arguments, word):
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert word in result.stderr
    assert not (files / "runs").exists()
    assert not (files / "synthetic.csv").exists()


def test_a_schema_that_names_a_column_that_is_not_there_is_refused_before_the_charge(files):
    wrong = {**SCHEMA, "columns": [{"name": "height", "type": "numeric", "low": 0, "high": 3}]}
    (files / "w.json").write_text(json.dumps(wrong))
    result = run("people.csv", "--schema", "w.json", "--epsilon", "1")
    assert result.exit_code == 2
    assert "'height'" in result.stderr
    assert not (files / "runs").exists()
