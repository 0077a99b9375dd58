"""`sordino attack`: numbers and a picture beside the run, never in it, and a banner on private records."""

import json

import pytest
from typer.testing import CliRunner

from sordino.cli import app


def call(*arguments):
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "140", "NO_COLOR": "1"})


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("attacked") / "run"
    result = call("train", "adult", "--epsilon", "1", "--steps", "3", "--out", str(folder))
    assert result.exit_code == 0, result.stderr
    return folder


def test_the_attack_leaves_numbers_and_a_picture_outside_the_run(run, tmp_path):
    before = sorted(run.iterdir())
    result = call("attack", str(run), "--references", "4", "--members", "600", "--out", str(tmp_path / "a"), "--json")
    assert result.exit_code == 0, result.stderr
    body = json.loads(result.stdout)
    assert body == json.loads((tmp_path / "a" / "attack.json").read_text())
    assert body["references"] == 4
    assert body["members"] == body["non_members"] == 600
    assert body["claim"].startswith("(ε = 1.0")
    assert [rate["false_positive_rate"] for rate in body["attacks"][0]["rates"]] == [0.01, 0.1]
    assert body["public"] is True
    assert body["above_ceiling"] == []
    assert (tmp_path / "a" / "attack.png").is_file()
    assert sorted(run.iterdir()) == before


def test_the_page_says_what_the_attacker_knows_and_that_failing_is_no_proof(run, tmp_path):
    page = call("attack", str(run), "--references", "0", "--members", "600", "--out", str(tmp_path / "a")).stdout
    assert "no proof of privacy" in page
    assert "the model's loss on the record, nothing else" in page
    assert "bound of the claim" in page
    assert "Private:" not in page


def test_results_are_not_written_into_a_run_folder(run):
    result = call("attack", str(run), "--out", str(run / "attack"))
    assert result.exit_code == 2
    assert "must lie outside the run folder" in result.stderr


def test_private_records_carry_a_banner_and_need_strangers(tmp_path):
    schema = {
        "target": "income",
        "labels": ["low", "high"],
        "columns": [{"name": "age", "type": "numeric", "low": 0, "high": 100}],
    }
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    for name, first in (("people", 20), ("others", 21)):
        rows = "\n".join(f"{first + k % 60},{'high' if k % 7 < 3 else 'low'}" for k in range(200))
        (tmp_path / f"{name}.csv").write_text(f"age,income\n{rows}\n")
    files = ["--schema", str(tmp_path / "schema.json")]
    people, run = str(tmp_path / "people.csv"), str(tmp_path / "run")
    assert call("train", people, *files, "--epsilon", "1", "--steps", "3", "--out", run).exit_code == 0
    alone = call("attack", run, "--data", people, *files)
    assert alone.exit_code == 2
    assert "records that were not trained on" in alone.stderr
    out = str(tmp_path / "a")
    whole = call(
        "attack",
        run,
        "--data",
        people,
        *files,
        "--test",
        str(tmp_path / "others.csv"),
        "--references",
        "0",
        "--out",
        out,
    )
    assert whole.exit_code == 0, whole.stderr
    assert "Private: these numbers are statistics of the members" in whole.stdout
