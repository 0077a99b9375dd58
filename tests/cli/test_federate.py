"""`sordino federate`: a simulated run leaves a folder that holds together, and says whom it protects."""

import json

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

from sordino.cli import app
from sordino.runs import RunFolder
from sordino.verification import verify


def run(*arguments):
    return CliRunner().invoke(app, ["federate", *arguments])


def test_a_simulated_run_protects_clients_and_can_be_verified(tmp_path):
    folder = tmp_path / "run"
    result = run("adult", "--epsilon", "3", "--rounds", "12", "--clients", "150", "--out", str(folder), "--json")
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    noise = f"noise multiplier {RunFolder.open(folder).plan['noise_multiplier']:.4g}."
    assert noise in " ".join(result.stderr.split())
    assert document["privacy_unit"] == "client"
    assert document["epsilon"] <= 3.0
    assert document["metrics"]["test_accuracy"] > 0.78
    assert verify(folder).passed
    assert RunFolder.open(folder).guarantee.privacy_unit.value == "client"
    assert (folder / "report.html").is_file()


def test_so_much_noise_that_nothing_is_learned(tmp_path):
    result = run(
        "adult", "--epsilon", "0.001", "--rounds", "12", "--fixed-norm", "--out", str(tmp_path / "run"), "--json"
    )
    assert result.exit_code == 0, result.stderr
    weights = load_file(tmp_path / "run" / "model.safetensors")
    # A trained logistic regression has weights of about 1; these are a hundred times the bound of an update.
    assert max(float(value.abs().max()) for value in weights.values()) > 30


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["adult", "--epsilon", "0"], "target_epsilon"),
        (["adult", "--epsilon", "1", "--model", "transformer"], "model"),
        (["adult", "--epsilon", "1", "--optimizer", "krum"], "optimizer"),
        (["adult", "--epsilon", "1", "--clients", "0"], "clients"),
        (["adult", "--epsilon", "1", "--ledger", "x.db"], "--dataset-name"),
    ],
)
def test_bad_options_are_usage_errors_and_leave_no_folder(tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    result = run(*arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert not list(tmp_path.iterdir())
