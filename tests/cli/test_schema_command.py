"""`sordino schema draft` and `check`, and how files of other formats are read or refused by the commands."""

import json
import tomllib

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from typer.testing import CliRunner

from sordino import accounting
from sordino.cli.app import app
from sordino.data.schema import Schema, read_schema
from sordino.events import from_dict
from sordino.ledger import Ledger

SCHEMA = {
    "target": "again",
    "labels": ["no", "yes"],
    "columns": [
        {"name": "age", "type": "integer", "low": 0, "high": 100},
        {"name": "dose", "type": "numeric", "low": 0, "high": 5, "missing": True},
        {"name": "ward", "type": "category", "categories": ["A", "B"]},
        {"name": "seen", "type": "date", "low": "2023-01-01", "high": "2023-12-31"},
        {"name": "smokes", "type": "boolean"},
        {"name": "pain", "type": "ordinal", "levels": ["low", "high"]},
    ],
}
HEADER = "id,age,dose,ward,seen,smokes,pain,again"
ROWS = [
    "1,40,1.5,A,2023-05-01,yes,low,no",
    "2,140,,B,2024-05-01,no,high,yes",
    "3,?,x,C,soon,perhaps,worse,maybe",
    "4,,9,,,,,",
]
EXPECTED = {
    "again": {"listed": 2, "not listed": 1, "missing": 1},
    "age": {"in range": 1, "outside": 1, "missing": 2, "unreadable": 0},
    "dose": {"in range": 1, "outside": 1, "missing": 1, "unreadable": 1},
    "ward": {"listed": 2, "not listed": 1, "missing": 1},
    "seen": {"in range": 1, "outside": 1, "missing": 1, "unreadable": 1},
    "smokes": {"listed": 2, "not listed": 1, "missing": 1},
    "pain": {"listed": 2, "not listed": 1, "missing": 1},
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.csv").write_text("\n".join([HEADER, *ROWS]) + "\n")
    (tmp_path / "s.json").write_text(json.dumps(SCHEMA))
    return tmp_path


def call(*arguments, code=0):
    done = CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "120", "NO_COLOR": "1"})
    assert done.exit_code == code, done.output
    return done


def document(*arguments):
    return json.loads(call(*arguments, "--json").stdout)


# --- draft ---


def test_a_draft_reads_the_header_and_nothing_of_the_records(folder):
    plain = call("schema", "draft", "t.csv", "--target", "again").output
    text = (folder / "t.schema.toml").read_text()
    (folder / "u.csv").write_bytes(HEADER.encode() + b'\n"\xff\x00 never closed')
    call("schema", "draft", "u.csv", "--target", "again")
    assert (folder / "u.schema.toml").read_text() == text.replace("t.csv", "u.csv").replace("t.schema", "u.schema")
    assert "sordino schema check t.csv --schema t.schema.toml" in " ".join(plain.split())
    fields = tomllib.loads(text)
    assert fields["target"] == "again"
    assert [column["name"] for column in fields["columns"]] == HEADER.split(",")[:-1]
    assert {column["type"] for column in fields["columns"]} == {"?"}


def test_an_unfilled_draft_says_what_is_missing_and_a_filled_one_is_a_schema(folder):
    call("schema", "draft", "t.csv", "--target", "again")
    said = call("schema", "check", "t.csv", "--schema", "t.schema.toml", code=2).output
    assert "'labels'" in said
    assert "'type' of column 'ward'" in said
    path = folder / "t.schema.toml"
    text = path.read_text().replace('labels = "?"', 'labels = ["no", "yes"]')
    text = text.replace('[[columns]]\nname = "id"\ntype = "?"\n', "")
    for name, filled in {
        "age": 'type = "integer"\nlow = 0\nhigh = 100',
        "dose": 'type = "numeric"\nlow = 0\nhigh = 5\nmissing = true',
        "ward": 'type = "category"\ncategories = ["A", "B"]',
        "seen": 'type = "date"\nlow = 2023-01-01\nhigh = "2023-12-31"',
        "smokes": 'type = "boolean"',
        "pain": 'type = "ordinal"\nlevels = ["low", "high"]',
    }.items():
        text = text.replace(f'name = "{name}"\ntype = "?"', f'name = "{name}"\n{filled}')
    path.write_text(text)
    assert read_schema(path) == Schema.from_dict(SCHEMA)


def test_a_draft_of_a_file_with_types_has_them(folder):
    table = pa.table(
        {
            "n": pa.array([1.5]),
            "i": pa.array([1]),
            "b": pa.array([True]),
            "d": pa.array([0], type=pa.date32()),
            "s": pa.array(["Zq7"]),
            "l": pa.array([[1]]),
        }
    )
    pa.parquet.write_table(table, folder / "t.parquet")
    call("schema", "draft", "t.parquet", "--out", "d.json")
    text = (folder / "d.json").read_text()
    assert "Zq7" not in text
    kinds = {column["name"]: column["type"] for column in json.loads(text)["columns"]}
    assert kinds == {"n": "numeric", "i": "integer", "b": "boolean", "d": "date", "s": "category", "l": "?"}


def test_a_draft_overwrites_nothing_and_names_what_is_wrong(folder):
    assert "new file" in call("schema", "draft", "t.csv", "--out", "s.json", code=2).output
    assert json.loads((folder / "s.json").read_text()) == SCHEMA
    assert "toml or .json" in call("schema", "draft", "t.csv", "--out", "s.yaml", code=2).output
    assert "'agian'" in call("schema", "draft", "t.csv", "--target", "agian", code=2).output
    (folder / "semicolons.csv").write_text(HEADER.replace(",", ";") + "\n")
    assert "--separator ';'" in call("schema", "draft", "semicolons.csv", code=2).output
    assert not (folder / "semicolons.schema.toml").exists()
    call("schema", "draft", "semicolons.csv", "--separator", ";", "--decimal", ",")
    fields = tomllib.loads((folder / "semicolons.schema.toml").read_text())
    assert fields["format"] == {"separator": ";", "decimal": ","}
    (folder / "t.xlsx").write_bytes(b"PK")
    assert "Save the sheet as CSV UTF-8" in call("schema", "draft", "t.xlsx", code=2).output


def test_names_with_quotes_and_line_breaks_survive_a_draft(folder):
    name = 'a "quoted"\\ größe'
    (folder / "q.csv").write_text('"' + name.replace('"', '""') + '",b\n')
    call("schema", "draft", "q.csv")
    assert tomllib.loads((folder / "q.schema.toml").read_text())["columns"][0]["name"] == name


# --- check ---


def test_a_check_counts_what_each_column_holds_and_says_that_it_is_not_for_release(folder):
    found = document("schema", "check", "t.csv", "--schema", "s.json")
    assert {column["name"]: column["counts"] for column in found["columns"]} == EXPECTED
    assert "not for release" in found["release"]
    assert "guarantee" not in found
    assert "NOT FOR RELEASE" in call("schema", "check", "t.csv", "--schema", "s.json").output


def test_a_check_counts_the_same_in_parquet_and_a_numeric_target(folder):
    schema = {"target": "y", "low": 0, "high": 10, "columns": [{"name": "x", "type": "numeric", "low": 0, "high": 1}]}
    (folder / "n.json").write_text(json.dumps(schema))
    pa.parquet.write_table(pa.table({"x": [0.5, None, 3.0], "y": [5.0, 50.0, float("nan")]}), folder / "n.parquet")
    found = document("schema", "check", "n.parquet", "--schema", "n.json")
    assert {column["name"]: list(column["counts"].values()) for column in found["columns"]} == {
        "y": [1, 1, 1, 0],
        "x": [1, 1, 1, 0],
    }


@pytest.mark.parametrize("delta", ["0", "1e-6"])
def test_noisy_shares_are_paid_for_and_cost_no_more_than_they_say(folder, delta):
    Ledger("l.db").create()
    account = Ledger("l.db").declare("t", epsilon=3.0, delta=1e-5)
    given = ("schema", "check", "t.csv", "--schema", "s.json", "--epsilon", "0.5", "--delta", delta)
    found = document(*given, "--ledger", "l.db", "--dataset-name", "t")
    again = document(*given)
    event = account.event()
    assert accounting.epsilon(event, float(delta)).upper <= 0.5 * (1 + 1e-9)
    assert found["guarantee"]["epsilon"] <= 0.5
    assert [column["counts"] for column in found["columns"]] != [column["counts"] for column in again["columns"]]
    # Seven histograms share the budget, and every cell of each has its noise.
    spread = found["columns"][0]["noise_stddev"]
    assert spread == pytest.approx(14 * 2**0.5 if delta == "0" else 21.3, rel=0.02)
    errors = [
        count - EXPECTED[column["name"]][kind]
        for _ in range(6)
        for column in document(*given)["columns"]
        for kind, count in column["counts"].items()
    ]
    assert np.std(errors) == pytest.approx(spread, rel=0.35)


def test_a_check_over_budget_or_without_a_declared_column_is_refused_before_a_record_is_read(folder):
    Ledger("l.db").create()
    account = Ledger("l.db").declare("t", epsilon=0.1, delta=1e-5)
    given = ("--epsilon", "1", "--ledger", "l.db", "--dataset-name", "t")
    call("schema", "check", "t.csv", "--schema", "s.json", *given, code=3)
    account.change_budget(epsilon=9.0, note="more")
    (folder / "short.csv").write_text("age,again\n1,no\n")
    call("schema", "check", "short.csv", "--schema", "s.json", *given, code=2)
    call("schema", "check", "none.csv", "--schema", "s.json", *given, code=2)
    assert [entry.kind for entry in account.history()] == ["declare", "budget"]
    assert "left out without --epsilon" in " ".join(
        call("schema", "check", "t.csv", "--schema", "s.json", *given[2:], code=2).output.split()
    )


# --- formats on the command line ---


def written(folder, name, separator=",", decimal=".", encoding="utf-8"):
    """400 records of which `dose` decides; as many public ones."""
    generator = np.random.default_rng(3)
    for file in (name, f"public-{name}"):
        lines = [separator.join(("age", "dose", "ward", "again"))]
        for dose in generator.uniform(0, 5, 400):
            text = f"{dose:.2f}".replace(".", decimal)
            text = f'"{text}"' if separator == decimal else text
            lines.append(separator.join(("40", text, "ä", "yes" if dose > 2.5 else "no")))
        (folder / file).write_bytes(("\n".join(lines) + "\n").encode(encoding))
    columns = [SCHEMA["columns"][0], SCHEMA["columns"][1], {"name": "ward", "type": "category", "categories": ["ä"]}]
    (folder / "f.json").write_text(json.dumps({**SCHEMA, "columns": columns}))


TRAIN = ("--schema", "f.json", "--epsilon", "8", "--model", "objective", "--out", "run")


@pytest.mark.parametrize(
    ("form", "options"),
    [
        ({"separator": ";", "decimal": ",", "encoding": "latin-1"}, "--separator ; --decimal , --encoding latin-1"),
        ({"decimal": ","}, "--decimal ,"),
        ({"separator": "\t"}, "--separator tab"),
    ],
)
def test_options_and_the_schema_say_how_files_are_written(folder, form, options):
    written(folder, "f.csv", **form)
    call("train", "f.csv", "--test", "public-f.csv", *TRAIN, *options.split())
    metrics = json.loads((folder / "run" / "metrics.json").read_text())
    assert metrics["test_accuracy"]["value"] > 0.8
    own = json.loads((folder / "f.json").read_text())
    (folder / "f.json").write_text(json.dumps({**own, "format": form}))
    call("train", "f.csv", "--test", "public-f.csv", *TRAIN[:-1], "again")
    call("compare", "f.csv", "--test", "public-f.csv", "--schema", "f.json", "--epsilon", "8", "--methods", "objective")


def test_a_private_column_of_which_nothing_can_be_read_changes_no_word_of_the_output(folder):
    """It may follow from one record: nothing that is said, and no exit code, may depend on it."""
    said = []
    for decimal in (".", ","):
        written(folder, "f.csv", decimal=decimal)
        said.append(call("train", "f.csv", *TRAIN[:-1], f"run{decimal}").output.replace(f"run{decimal}", "run"))
    assert "decimal mark of CSV files: '.'" in said[0]
    assert said[0].splitlines()[:4] == said[1].splitlines()[:4]


def test_a_column_of_which_nothing_can_be_read_is_refused_with_the_option(folder):
    written(folder, "f.csv", decimal=",")
    said = " ".join(call("train", "f.csv", "--data-is-public", *TRAIN, code=2).output.split())
    assert "column 'dose' must hold a number" in said
    assert "--decimal , if its numbers are written like 3,5" in said
    assert not (folder / "run").exists()
    written(folder, "f.csv", encoding="latin-1")
    said = " ".join(call("train", "f.csv", "--data-is-public", *TRAIN, code=2).output.split())
    assert "column 'ward' must hold a listed value" in said


def test_ledger_entries_of_a_check_name_no_value(folder):
    Ledger("l.db").create()
    account = Ledger("l.db").declare("t", epsilon=3.0, delta=1e-5)
    call("schema", "check", "t.csv", "--schema", "s.json", "--epsilon", "1", "--ledger", "l.db", "--dataset-name", "t")
    (entry,) = [entry for entry in account.history() if entry.kind == "charge"]
    assert entry.note == "schema check"
    assert from_dict(entry.contents["event"]) is not None
