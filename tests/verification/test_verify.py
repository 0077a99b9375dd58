import json
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from sordino.cli import app
from sordino.definitions import Guarantee, NeighboringRelation, PrivacyUnit
from sordino.events import Gaussian
from sordino.ledger import Ledger
from sordino.runs import MANIFEST_FILES, RunFolder
from sordino.runs.results import guarantee_body
from sordino.runs.transcript import TranscriptReader, chain_start_hash, read_transcript
from sordino.training.fit import fit
from sordino.training.noisy_releases import LossRelease
from sordino.training.plan import Plan
from sordino.verification import verify

PLAN = Plan(
    noise_multiplier=2.0,
    max_grad_norm=1.0,
    sample_rate=0.5,
    steps=8,
    expected_batch_size=20.0,
    delta=1e-5,
    loss_release=LossRelease(max_loss=1.0),
)


def losses(model, x, y):
    return nn.functional.cross_entropy(model(x), y, reduction="none")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run that was cut off once, resumed, and charged to a ledger."""
    place = tmp_path_factory.mktemp("finished")
    account = Ledger(place / "privacy.db").declare("records", epsilon=30.0, delta=1e-5)
    data = torch.ones(40, 3), torch.zeros(40).long()

    def interrupt(done):
        if done == 5:
            raise KeyboardInterrupt

    options = {"checkpoint_every": 3, "progress": False, "ledger": account}
    fit(nn.Linear(3, 2), losses, data, PLAN, run_folder=place / "run", on_step=interrupt, **options)
    fit(nn.Linear(3, 2), losses, data, PLAN, resume_from=place / "run", **options)
    RunFolder.open(place / "run").write_model_description({"kind": "module"})
    RunFolder.open(place / "run").write_metrics({})
    return place


@pytest.fixture
def run(finished, tmp_path):
    shutil.copytree(finished / "run", tmp_path / "run")
    return RunFolder.open(tmp_path / "run")


def failed(run, **options):
    return {item.name for item in verify(run, **options).items if item.status == "fail"}


def lines_of(run):
    return (run.path / "transcript.jsonl").read_bytes().splitlines(keepends=True)


def write_lines(run, lines):
    (run.path / "transcript.jsonl").write_bytes(b"".join(lines))


def test_a_run_that_was_left_alone_passes_every_item(finished):
    found = verify(finished / "run", ledger=finished / "privacy.db")
    assert found.complete, found
    names = [item.name for item in found.items]
    numbers = ["files", "chain", "plan", "guarantee", "second accountant", "ledger"]
    assert names == [*numbers, "model", "loss curve", "checkpoint"]


def test_all_files_of_a_run_are_listed(finished):
    there = {path.name for path in (finished / "run").iterdir()}
    assert there == {*MANIFEST_FILES, "manifest.json"} - {"evaluations.json"}


@pytest.mark.parametrize("name", sorted({*MANIFEST_FILES, "manifest.json"} - {"evaluations.json"}))
@pytest.mark.parametrize("place", [0.02, 0.5, 0.97])
def test_one_flipped_bit_in_any_file_is_caught(run, name, place):
    file = run.path / name
    content = bytearray(file.read_bytes())
    if not content:
        pytest.skip("an empty file has no bits")
    content[int(place * (len(content) - 1))] ^= 1
    file.write_bytes(bytes(content))
    assert failed(run)


@pytest.mark.parametrize("place", [0, 3, -1])
def test_a_dropped_line_is_caught(run, place):
    lines = lines_of(run)
    del lines[place]
    write_lines(run, lines)
    assert failed(run) & {"chain", "files"}


def test_swapped_and_doubled_lines_are_caught(run):
    lines = lines_of(run)
    write_lines(run, [*lines[:2], lines[3], lines[2], *lines[4:]])
    assert "chain" in failed(run)
    write_lines(run, [*lines, lines[-1]])
    assert "chain" in failed(run)


def test_another_noise_in_the_plan_is_caught(run):
    file = run.path / "plan.json"
    file.write_text(file.read_text().replace('"noise_multiplier": 2.0', '"noise_multiplier": 4.0'))
    assert {"chain", "files"} <= failed(run)


def test_another_noise_in_the_transcript_is_caught(run):
    file = run.path / "transcript.jsonl"
    file.write_text(file.read_text().replace('"noise_multiplier": 2.0', '"noise_multiplier": 4.0'))
    assert {"chain", "files"} <= failed(run)


def rebuild(run, *, change=lambda entry: entry):
    """What a forger does: every line written again, so that the chain fits."""
    old = TranscriptReader(
        chain_start_hash((run.path / "plan.json").read_bytes(), (run.path / "run.json").read_bytes())
    )
    old.head = json.loads(lines_of(run)[0])["previous"]
    entries = list(read_transcript(run.path / "transcript.jsonl", old))
    new = TranscriptReader(
        chain_start_hash((run.path / "plan.json").read_bytes(), (run.path / "run.json").read_bytes())
    )
    write_lines(run, [new.written(change(entry)) for entry in entries])
    return RunFolder.resume(run.path)


def test_another_noise_in_the_transcript_with_a_chain_that_fits_is_caught_by_the_plan(run):
    def louder(entry):
        event = getattr(entry, "event", None)
        return entry if event is None else replace(entry, event=replace(event, event=Gaussian(noise_multiplier=4.0)))

    rebuild(run, change=louder).close()
    assert {"plan", "guarantee"} <= failed(run)


def test_another_noise_in_plan_and_transcript_is_caught_by_the_guarantee_the_checkpoint_and_the_ledger(run, finished):
    file = run.path / "plan.json"
    file.write_text(file.read_text().replace('"noise_multiplier": 2.0', '"noise_multiplier": 4.0'))
    heads = [run_head(finished)]

    def louder(entry):
        event = getattr(entry, "event", None)
        return entry if event is None else replace(entry, event=replace(event, event=Gaussian(noise_multiplier=4.0)))

    rebuild(run, change=louder).close()
    found = failed(run, ledger=finished / "privacy.db", head=heads[0])
    assert {"guarantee", "checkpoint", "ledger", "anchor"} <= found


def run_head(finished):
    return RunFolder.open(finished / "run").head


def test_a_folder_that_was_rebuilt_as_a_whole_fits_and_only_an_anchor_tells(run, finished):
    """The limit of a chain of hashes, kept honest by a test."""

    def no_receipt(entry):
        return replace(entry, charge=None) if hasattr(entry, "charge") else entry

    with rebuild(run, change=no_receipt):
        (run.path / "checkpoint.safetensors").unlink()
    assert not failed(run)
    assert failed(run, head=run_head(finished)) == {"anchor"}


@pytest.mark.parametrize(
    ("change", "item"),
    [
        ({"epsilon": 1.0}, "guarantee"),
        ({"epsilon": 1e3}, "guarantee"),
        ({"delta": 1e-3}, "guarantee"),
        ({"neighboring_relation": "replace_one"}, "guarantee"),
        ({"privacy_unit": "user"}, "guarantee"),
        ({"description": "perfectly private"}, "guarantee"),
    ],
)
def test_another_guarantee_is_caught_even_when_the_manifest_agrees(run, change, item):
    claim = run.guarantee
    fields = {name: value for name, value in change.items() if name != "description"}
    fields |= (
        {"neighboring_relation": NeighboringRelation(fields["neighboring_relation"])}
        if "neighboring_relation" in fields
        else {}
    )
    fields |= {"privacy_unit": PrivacyUnit(fields["privacy_unit"])} if "privacy_unit" in fields else {}
    made = Guarantee(**{name: getattr(claim, name) for name in claim.__dataclass_fields__} | fields)
    run._put_json("guarantee.json", guarantee_body(made) | change)
    assert item in failed(run)
    assert "files" not in failed(run)


def test_another_model_is_caught(run):
    (run.path / "model.safetensors").write_bytes((run.path / "model.safetensors").read_bytes() + b"\0")
    assert failed(run) == {"files", "model"}


def test_an_extra_model_beside_a_manifest_without_one_is_caught(run):
    (run.path / "metrics.json").unlink()
    assert failed(run) == {"files"}


def test_the_second_accountant_catches_a_guarantee_that_is_too_small(run):
    claim = run.guarantee
    run.write_guarantee(replace(claim, epsilon=claim.epsilon * 0.95))
    assert {"guarantee", "second accountant"} <= failed(run)
    run.write_guarantee(claim)
    assert not failed(run)


def test_without_the_second_implementation_that_item_is_not_checked_and_strict_says_so(run, monkeypatch):
    monkeypatch.setattr("sordino.verification.verifier.is_available", lambda: False)
    assert verify(run).item("second accountant").status == "not checked"
    runner = CliRunner()
    assert runner.invoke(app, ["verify", str(run.path)]).exit_code == 0
    assert runner.invoke(app, ["verify", str(run.path), "--strict"]).exit_code == 1


def test_the_command_prints_items_as_a_page_and_as_json_and_the_anchor_alone(run, finished):
    runner = CliRunner()
    page = runner.invoke(app, ["verify", str(run.path)], env={"COLUMNS": "140"})
    assert page.exit_code == 0
    assert "The run folder is consistent." in page.stdout
    ledger = ["--ledger", str(finished / "privacy.db")]
    body = json.loads(runner.invoke(app, ["verify", str(run.path), "--json", "--strict", *ledger]).stdout)
    assert body["ok"]
    assert body["head"] == run.head
    anchor = runner.invoke(app, ["verify", str(run.path), "--anchor"])
    assert anchor.stdout == run.head + "\n"
    assert runner.invoke(app, ["verify", str(run.path), "--head", run.head]).exit_code == 0
    broken = runner.invoke(app, ["verify", str(run.path), "--head", "0" * 64])
    assert broken.exit_code == 1
    assert "is NOT consistent" in broken.stdout
    assert runner.invoke(app, ["verify", str(run.path / "nothing")]).exit_code == 2


def test_a_receipt_that_the_ledger_does_not_hold_is_caught(run, tmp_path):
    other = Ledger(tmp_path / "other.db")
    other.declare("records", epsilon=30.0, delta=1e-5)
    assert failed(run, ledger=tmp_path / "other.db") == {"ledger"}


def test_a_run_that_was_cut_off_can_be_verified_as_far_as_it_went(run):
    for name in ("manifest.json", "guarantee.json", "model.safetensors"):
        (run.path / name).unlink()
    lines = lines_of(run)
    write_lines(run, [*lines[:-1], lines[-1][:-20]])
    found = verify(run)
    assert found.passed
    assert "1 torn, counted as steps" in found.item("chain").detail
    assert {item.name for item in found.items if item.status == "not checked"} == {
        "files",
        "guarantee",
        "ledger",
        "model",
    }
    assert len(list(run)) == 8


def test_verifying_imports_no_torch(run):
    code = "import sys, sordino; sordino.verify(sys.argv[1]); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, str(run.path)], check=True)


def test_runs_are_listed_shown_and_compared(run, tmp_path):
    shutil.copytree(run.path, tmp_path / "other")
    (tmp_path / "other" / "guarantee.json").unlink()
    shutil.copytree(run.path, tmp_path / "broken")
    (tmp_path / "broken" / "transcript.jsonl").write_text("{}\n")
    runner = CliRunner()
    wide = {"COLUMNS": "140"}
    listed = runner.invoke(app, ["runs", "list", str(tmp_path)], env=wide)
    assert listed.exit_code == 0
    assert "complete" in listed.stdout
    assert "cut off" in listed.stdout
    assert "can't be read" in listed.stdout
    body = json.loads(runner.invoke(app, ["runs", "list", str(tmp_path), "--json"]).stdout)
    assert {entry["state"] for entry in body["runs"]} == {"complete", "cut off"}
    assert body["unreadable"] == ["broken"]
    shown = json.loads(runner.invoke(app, ["runs", "show", str(run.path), "--json"]).stdout)
    assert (shown["charged_steps"], shown["segments"], shown["repeated_steps"]) == (8, 2, 0)
    assert runner.invoke(app, ["runs", "show", str(run.path)], env=wide).exit_code == 0
    pair = [str(run.path), str(tmp_path / "other")]
    compared = json.loads(runner.invoke(app, ["runs", "compare", *pair, "--json"]).stdout)
    assert compared["differing"] == ["state"]
    assert "cut off" in runner.invoke(app, ["runs", "compare", *pair], env=wide).stdout
