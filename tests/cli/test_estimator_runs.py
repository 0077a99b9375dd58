"""Estimator runs are verified, listed, reported, evaluated, attacked and diagnosed as runs of modules are."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from sordino import verification
from sordino.cli.app import app
from sordino.ledger import Ledger
from sordino.runs import RunFolder

SCHEMA = {
    "target": "ill",
    "labels": ["no", "yes"],
    "columns": [
        {"name": "age", "type": "numeric", "low": 0, "high": 100},
        {"name": "sex", "type": "category", "categories": ["f", "m"]},
    ],
}
METHODS = ["objective", "boosting", "svm", "naive-bayes", "sufficient-statistics"]


def write(path, rows, seed):
    rng = np.random.default_rng(seed)
    ages = rng.uniform(0, 100, rows).round(2)
    lines = [f"{age},{'fm'[k % 2]},{'yes' if age + rng.normal(0, 20) > 50 else 'no'}" for k, age in enumerate(ages)]
    path.write_text("age,sex,ill\n" + "\n".join(lines) + "\n")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    home = tmp_path_factory.mktemp("estimators")
    (home / "schema.json").write_text(json.dumps(SCHEMA))
    write(home / "train.csv", 500, 0)
    write(home / "test.csv", 400, 1)
    for method in METHODS:
        options = ("--schema", home / "schema.json", "--epsilon", "2", "--model", method, "--out", home / method)
        done = run("train", home / "train.csv", *options)
        assert done.exit_code == 0, done.output
    return home


@pytest.fixture
def here(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return folder


def run(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))


def document(*arguments):
    done = run(*arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.mark.parametrize("method", METHODS)
def test_the_plan_of_an_estimator_is_checked_charge_by_charge(here, method):
    found = verification.verify(here / method)
    assert found.item("plan").status == "pass"
    assert found.passed


def test_another_charge_than_the_plans_fails(tmp_path, here):
    plan = RunFolder.open(here / "boosting").plan
    lines = list(RunFolder.open(here / "boosting"))
    assert len({line.event for line in lines}) > 1
    for events in ([line.event for line in lines][::-1], [line.event for line in lines] + [lines[0].event]):
        copy = tmp_path / f"run{len(events)}-{events[0] == lines[0].event}"
        with RunFolder.create(copy, plan=json.dumps(plan)) as run:
            for step, event in enumerate(events):
                run.append(step=step, event=event, epsilon=None)
        assert verification.verify(copy).item("plan").status == "fail"


def test_a_finished_run_is_complete_and_one_that_was_cut_off_is_not(here, tmp_path):
    states = {row["run"].rsplit("/", 1)[1]: row["state"] for row in document("runs", "list", here)["runs"]}
    assert states == dict.fromkeys(METHODS, "complete")
    plan, lines = RunFolder.open(here / "boosting").plan, list(RunFolder.open(here / "boosting"))
    with RunFolder.create(tmp_path / "runs" / "cut", plan=json.dumps(plan)) as run:
        run.append(step=0, event=lines[0].event, epsilon=None)
    assert document("runs", "list", tmp_path / "runs")["runs"][0]["state"] == "cut off"
    run.write_guarantee(RunFolder.open(here / "boosting").guarantee)
    assert document("runs", "list", tmp_path / "runs")["runs"][0]["state"] == "interrupted"


@pytest.mark.parametrize("method", METHODS)
def test_a_report_of_a_default_run_lacks_nothing(here, method):
    body = document("report", here / method)
    assert body["missing"] == []
    assert run("report", here / method, "--strict").exit_code == 0
    hazards = [value for value in body.values() if isinstance(value, list) and value and "severity" in value[0]]
    assert hazards
    assert not [item for found in hazards for item in found if item["status"] == "violated"]
    # Without a ledger nobody knows of other uses: that is never called met.
    (uses,) = [item for found in hazards for item in found if item["title"].startswith("Other uses")]
    assert uses["status"] != "met"


def test_with_a_ledger_the_report_is_complete(here):
    assert run("ledger", "init", "l.db").exit_code == 0
    assert run("ledger", "declare", "l.db", "people", "--epsilon", "9", "--delta", "1e-4").exit_code == 0
    options = ("--schema", here / "schema.json", "--epsilon", "2", "--model", "boosting", "--out", "run")
    done = run("train", here / "train.csv", *options, "--ledger", "l.db", "--dataset-name", "people")
    assert done.exit_code == 0, done.output
    done = run("report", "run", "--strict", "--ledger", "l.db")
    assert done.exit_code == 0, done.output
    # The ledger holds one charge, which pays for every line; without it the lines are unpaid.
    (entry,) = [entry for entry in Ledger("l.db").account("people").history() if entry.kind == "charge"]
    assert {line.charge for line in RunFolder.open("run")} == {entry.digest}
    assert verification.verify("run", ledger="l.db").item("ledger").status == "pass"
    assert run("ledger", "init", "other.db").exit_code == 0
    assert verification.verify("run", ledger="other.db").item("ledger").status == "fail"
    # A second run that does not fit is refused and leaves neither a folder nor a charge.
    dear = ("--schema", here / "schema.json", "--epsilon", "20", "--model", "boosting", "--out", "dear")
    done = run("train", here / "train.csv", *dear, "--ledger", "l.db", "--dataset-name", "people")
    assert done.exit_code == 3
    assert not Path("dear").exists()
    assert len([one for one in Ledger("l.db").account("people").history() if one.kind == "charge"]) == 1


@pytest.mark.parametrize("method", METHODS)
def test_an_estimator_is_evaluated_on_private_records(here, tmp_path, method):
    import shutil

    copy = shutil.copytree(here / method, tmp_path / "copy")
    asked = ("--evaluate", here / "test.csv", "--schema", here / "schema.json", "--evaluation-epsilon", "5")
    done = run("report", copy, *asked, "--evaluation-by", "sex")
    assert done.exit_code == 0, done.output
    (evaluation,) = RunFolder.open(copy).evaluations
    whole = evaluation.table("all")
    assert 0.6 < whole.right[0] / (whole.right[0] + whole.wrong[0]) < 1.0
    assert verification.verify(copy).item("evaluations").status == "pass"


@pytest.mark.parametrize("method", ["objective", "svm", "sufficient-statistics"])
def test_an_estimator_is_attacked(here, method):
    files = ("--data", here / "train.csv", "--schema", here / "schema.json", "--test", here / "test.csv")
    body = document("attack", here / method, *files, "--references", "4", "--members", "100")
    assert len(body["attacks"]) > 4
    assert body["references"] == 4
    alone = document("attack", here / method, *files, "--references", "0", "--members", "100")
    assert alone["references"] == 0


def test_an_estimator_is_diagnosed(here):
    files = ("--data", here / "train.csv", "--schema", here / "schema.json", "--test", here / "test.csv")
    body = document("diagnose", here / "naive-bayes", *files, "--data-is-public")
    assert body["tangent_kernel"] is None
    assert {"test_accuracy", "test_ece", "test_auc"} <= body["metrics"]["private"].keys()
    assert body["metrics"]["baseline"]["test_accuracy"] > 0.7
    assert {row["column"] for row in body["subgroups"]} == {"label", "sex"}
    assert "Calibration" in run("diagnose", here / "svm", *files).output


def test_other_columns_than_the_runs_are_refused(here, tmp_path):
    other = {**SCHEMA, "columns": SCHEMA["columns"][:1]}
    (tmp_path / "other.json").write_text(json.dumps(other))
    files = ("--data", here / "train.csv", "--schema", "other.json", "--test", here / "test.csv")
    for command in ("attack", "diagnose"):
        done = run(command, here / "objective", *files, "--data-is-public")
        assert done.exit_code == 2
        assert "columns and labels of the run" in done.output


def test_a_chosen_seed_is_in_the_transcript(here, tmp_path):
    options = ("--schema", here / "schema.json", "--epsilon", "2", "--model", "objective")
    done = run("train", here / "train.csv", *options, "--seed", "3", "--reproducible", "--out", "seeded")
    assert done.exit_code == 0, done.output
    assert [segment.seeded for segment in RunFolder.open("seeded").segments()] == [True]
    assert [segment.seeded for segment in RunFolder.open(here / "objective").segments()] == [False]
    assert verification.verify("seeded").passed
