"""`sordino train` under torch's launcher: one model, one noise, one bill, one run folder."""

import csv
import json
import os
import random
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from sordino.cli import app
from sordino.ledger import Ledger
from sordino.runs import RunFolder
from sordino.verification import verify

SCHEMA = {
    "target": "income",
    "labels": ["low", "high"],
    "columns": [
        {"name": "age", "type": "numeric", "low": 0, "high": 100},
        {"name": "job", "type": "category", "categories": ["clerk", "nurse"]},
    ],
}
SETTINGS = ("train", "people.csv", "--schema", "schema.json", "--epsilon", "1", "--steps", "8", "--batch-size", "100")
SEEDED = (*SETTINGS, "--seed", "7", "--reproducible", "--json")
IN_TWO = {"RANK": "1", "WORLD_SIZE": "2"}


@pytest.fixture
def people(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    generator = random.Random(1)
    with (tmp_path / "people.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["age", "job", "income"])
        for _ in range(400):
            age, job = generator.randint(18, 90), generator.choice(["clerk", "nurse"])
            table.writerow([age, job, "high" if age + 20 * (job == "nurse") > 60 else "low"])
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    return tmp_path


def alone(*arguments, **env):
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "120", "NO_COLOR": "1", **env})


def together(*arguments):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "sordino"]
    return subprocess.run(
        [sys.executable, *launcher, *arguments],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_two_processes_are_one_run_with_one_bill_and_the_result_of_one_process(people):
    ledger = Ledger(people / "ledger.db")
    ledger.create()
    accounts = [ledger.declare(name, epsilon=3.0, delta=1e-4) for name in ("together", "alone")]
    paid = ("--ledger", "ledger.db", "--dataset-name")
    done = together(*SEEDED, *paid, "together", "--out", "two")
    assert done.returncode == 0, done.stderr[-3000:]
    body = json.loads(done.stdout)  # one document, though two processes ran
    assert body["steps"] == len(list(RunFolder.open("two"))) == 8
    assert verify(people / "two").passed
    lone = alone(*SEEDED, *paid, "alone", "--out", "one")
    assert lone.exit_code == 0, lone.output
    assert json.loads(lone.stdout)["epsilon"] == body["epsilon"]
    assert accounts[0].spent().epsilon == accounts[1].spent().epsilon > 0
    one, two = RunFolder.open("one").load_model(), RunFolder.open("two").load_model()
    # The same key draws the same batches and the same noise, and the first weights are the first process's.
    assert one.keys() == two.keys()
    assert max(float((one[name] - two[name]).abs().max()) for name in one) < 1e-6
    assert any(float(value.abs().max()) > 0.01 for value in two.values())
    assert not torch.equal(one["2.weight"], torch.zeros_like(one["2.weight"]))


def test_a_refused_budget_and_a_used_folder_are_refused_by_all_and_leave_nothing(people):
    ledger = Ledger(people / "ledger.db")
    ledger.create()
    account = ledger.declare("people", epsilon=0.5, delta=1e-4)
    done = together(*SEEDED, "--ledger", "ledger.db", "--dataset-name", "people", "--out", "two")
    assert done.returncode != 0
    assert json.loads(done.stdout)["error"]["kind"] == "BudgetExceeded", done.stderr[-2000:]
    assert account.spent().epsilon == 0
    assert not (people / "two").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ("demo",),
        ("tune", "people.csv", "--epsilon", "1"),
        (*SETTINGS, "--model", "dp-gd"),
        (*SETTINGS, "--diagnostics", "private"),
        ("train", "people.csv", "--epsilon", "1", "--recipe", "mnist-scattering"),
    ],
)
def test_what_would_run_once_in_each_process_is_refused_before_data(arguments, people):
    (people / "people.csv").unlink()
    result = alone(*arguments, **IN_TWO)
    assert result.exit_code == 2
    assert "in several processes" in result.stderr
