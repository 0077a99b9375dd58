"""`sordino describe`: the page, the document, the run folder, and what is refused before anything is charged."""

import json

import pytest
from typer.testing import CliRunner

from sordino.cli import app
from sordino.runs import RunFolder

SCHEMA = {
    "target": "rich",
    "labels": ["no", "yes"],
    "columns": [
        {"name": "age", "type": "numeric", "low": 0, "high": 100},
        {"name": "a column with quite a long name, as surveys have them", "type": "numeric", "low": -1e7, "high": 1e7},
        {"name": "job", "type": "category", "categories": ["clerk", "sales", "x" * 60]},
    ],
}


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = ['age,"a column with quite a long name, as surveys have them",job,rich']
    lines += [
        f"{20 + i % 60},{1e5 * i},{('clerk', 'sales')[i % 3 == 0]},{('no', 'yes')[i % 60 > 30]}" for i in range(600)
    ]
    (tmp_path / "people.csv").write_text("\n".join(lines) + "\n")
    (tmp_path / "s.json").write_text(json.dumps(SCHEMA))
    return tmp_path


def run(*arguments):
    return CliRunner().invoke(app, ["describe", *arguments], env={"COLUMNS": "80", "TERM": "dumb", "NO_COLOR": "1"})


GIVEN = ("people.csv", "--schema", "s.json", "--epsilon", "3")


@pytest.mark.parametrize("more", [(), ("--delta", "0"), ("--cross", "age:rich", "--cross", "job:age", "--bins", "3")])
def test_a_page_of_eighty_columns_and_a_run_that_verifies(files, more):
    result = run(*GIVEN, *more, "--run", "runs/one", "--out", "d.json")
    assert result.exit_code == 0, result.stderr
    assert "(ε = 3.00" in result.stdout
    assert "median" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80
    document = json.loads((files / "d.json").read_text())
    assert [one["name"] for one in document["columns"]] == [*(one["name"] for one in SCHEMA["columns"]), "rich"]
    assert len(document["cross_tables"]) == (2 if "--cross" in more else 1)
    (line,) = RunFolder.open(files / "runs/one")
    assert line.epsilon is not None
    verified = CliRunner().invoke(app, ["verify", "runs/one"])
    assert verified.exit_code == 0, verified.output
    assert "did not finish" not in verified.output


def test_json_is_the_document_and_none_means_no_cross_table(files):
    result = run(*GIVEN, "--cross", "none", "--quantiles", "0.9", "--json")
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["cross_tables"] == []
    assert [one["level"] for one in document["columns"][0]["quantiles"]] == [0.9]
    assert document["records"]["low"] <= 600 <= document["records"]["high"] + 30


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ((*GIVEN, "--out", "s.json"), "new file"),
        ((*GIVEN, "--out", "d.txt"), ".json"),
        ((*GIVEN, "--cross", "age"), "COLUMN:COLUMN"),
        ((*GIVEN, "--cross", "age:height"), "height"),
        ((*GIVEN, "--quantiles", "half"), "quantiles"),
        ((*GIVEN, "--quantiles", "1.5"), "quantile"),
        ((*GIVEN, "--confidence", "2"), "confidence"),
        ((*GIVEN, "--bins", "0"), "bins"),
        ((*GIVEN, "--seed", "3"), "reproducible"),
        (("people.csv", "--epsilon", "1"), "schema"),
    ],
)
def test_wrong_arguments_charge_nothing(files, arguments, word):
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert word in result.stderr
    assert not (files / "runs").exists()
