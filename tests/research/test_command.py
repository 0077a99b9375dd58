"""`sordino diagnose`: the four measurements of a run on public test records, and nothing on private ones."""

import json

import pytest
from typer.testing import CliRunner

from sordino.cli import app
from sordino.data import load_dataset
from sordino.research import PUBLISHED


def call(*arguments):
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "140", "NO_COLOR": "1"})


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("diagnosed") / "run"
    result = call("train", "adult", "--epsilon", "1", "--steps", "3", "--out", str(folder))
    assert result.exit_code == 0, result.stderr
    return folder


def test_the_document_holds_kernel_convergence_calibration_and_subgroups(run, tmp_path):
    result = call("diagnose", str(run), "--steps", "5", "--records", "8", "--out", str(tmp_path / "d.json"), "--json")
    assert result.exit_code == 0, result.stderr
    body = json.loads(result.stdout)
    assert body == json.loads((tmp_path / "d.json").read_text())
    rows = body["tangent_kernel"]["rows"]
    assert [row["name"] for row in rows] == list(PUBLISHED)
    for row in rows:
        assert row["predicted"] == pytest.approx(row["measured"], rel=1e-3, abs=1e-9)
    assert {len(losses) for losses in body["convergence"].values()} == {6}
    assert {"test_ece", "test_mce"} <= set(body["metrics"]["private"])
    assert {"test_ece", "test_mce"} <= set(body["metrics"]["baseline"])
    sexes = {row["value"]: row["records"] for row in body["subgroups"] if row["column"] == "sex"}
    assert sum(sexes.values()) == len(load_dataset("adult").test)


def test_the_page_names_what_the_table_promises_in_vain(run):
    page = call("diagnose", str(run), "--steps", "2").stdout
    for words in (
        "Clipping and the tangent kernel",
        "Noise and clipping apart",
        "Calibration",
        "Cost of privacy by subgroup",
    ):
        assert words in page


def test_without_public_test_records_nothing_is_measured(tmp_path):
    schema = {
        "target": "income",
        "labels": ["low", "high"],
        "columns": [{"name": "age", "type": "numeric", "low": 0, "high": 100}],
    }
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    rows = "\n".join(f"{20 + k % 60},{'high' if k % 7 < 3 else 'low'}" for k in range(100))
    (tmp_path / "people.csv").write_text(f"age,income\n{rows}\n")
    files = ["--schema", str(tmp_path / "schema.json")]
    people, run = str(tmp_path / "people.csv"), str(tmp_path / "run")
    assert call("train", people, *files, "--epsilon", "1", "--steps", "2", "--out", run).exit_code == 0
    result = call("diagnose", run, "--data", people, *files)
    assert result.exit_code == 2
    assert "test must be" in result.stderr
    # A public test file is enough; no twin is trained on private records.
    public = tmp_path / "public.csv"
    public.write_text(
        "age,income\n" + "\n".join(f"{25 + k % 50},{'high' if k % 5 < 2 else 'low'}" for k in range(60)) + "\n"
    )
    shown = call("diagnose", run, "--data", people, *files, "--test", str(public), "--json", "--steps", "2")
    assert shown.exit_code == 0, shown.stderr
    assert json.loads(shown.stdout)["subgroups"] == []
