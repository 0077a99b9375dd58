"""`verify(head=…)` stands for all that a run released: every leaf of every JSON file, every file, runs of each kind."""

import copy
import csv
import json
import random
import shutil

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from typer.testing import CliRunner

from patterned import DELTA, made_up, seeded
from sordino import PrivacyEngine
from sordino.cli import app
from sordino.recipes import get_recipe
from sordino.runs import RunFolder
from sordino.runs.results import Metric
from sordino.training.fit import fit
from sordino.training.noisy_releases import LossRelease
from sordino.training.plan import Plan
from sordino.verification import verify

PLAN = Plan(
    noise_multiplier=2.0,
    max_grad_norm=1.0,
    sample_rate=0.5,
    steps=3,
    expected_batch_size=20.0,
    delta=1e-5,
    dataset_size_is_public=True,
    loss_release=LossRelease(max_loss=1.0),
)
SCHEMA = {
    "target": "income",
    "labels": ["low", "high"],
    "columns": [{"name": "age", "type": "numeric", "low": 0, "high": 100}],
}


def _module(place):
    data = torch.ones(40, 3), torch.zeros(40).long()

    def losses(model, x, y):
        return nn.functional.cross_entropy(model(x), y, reduction="none")

    fit(nn.Linear(3, 2), losses, data, PLAN, run_folder=place, progress=False, checkpoint_every=2)
    RunFolder.open(place).write_metrics({"test_accuracy": Metric(value=0.5, public=True, what="on public records")})


def _pipeline(place):
    get_recipe("logistic-pixels").fit(made_up(), epsilon=8.0, delta=DELTA, rng=seeded(), run_folder=place)


def _estimator(place):
    generator = random.Random(1)
    file = place.parent / "people.csv"
    with file.open("w", newline="") as target:
        table = csv.writer(target)
        table.writerow(["age", "income"])
        table.writerows((age := generator.randint(18, 90), "high" if age > 50 else "low") for _ in range(300))
    (place.parent / "schema.json").write_text(json.dumps(SCHEMA))
    asked = ["--schema", str(place.parent / "schema.json"), "--epsilon", "1", "--model", "objective"]
    result = CliRunner().invoke(app, ["train", str(file), *asked, "--out", str(place)])
    assert result.exit_code == 0, result.output


KINDS = {"module": _module, "pipeline": _pipeline, "estimator": _estimator}


@pytest.fixture(scope="module", params=list(KINDS))
def published(request, tmp_path_factory):
    """A finished run, and the hash that was published of it."""
    place = tmp_path_factory.mktemp(request.param) / "run"
    KINDS[request.param](place)
    with pytest.MonkeyPatch.context() as patch:
        # The second accountant says nothing about files, and takes most of the time.
        patch.setattr("sordino.verification.verifier.is_available", lambda: False)
        found = verify(place)
        assert found.passed, found
        assert verify(place, head=found.head).item("anchor").status == "pass"
        yield place, found.head


def failed(folder, head):
    return [item.name for item in verify(folder, head=head).items if item.status == "fail"]


def sealed(folder):
    """What a forger does last: the manifest agrees with the files."""
    (folder / "manifest.json").unlink(missing_ok=True)
    run = RunFolder.open(folder)
    from sordino.runs.transcript import file_digest, write_json

    files = {name: file_digest(folder / name) for name in run.files()}
    try:
        ends = {"head": run.chain_head, "lines": run.lines}
    except Exception:  # a chain that does not fit has no end
        ends = {"head": "0" * 64, "lines": 1}
    write_json(folder / "manifest.json", {"schema": 1, **ends, "files": files})


def leaves(body, path=()):
    if isinstance(body, dict):
        for name, value in body.items():
            yield from leaves(value, (*path, name))
    elif isinstance(body, list):
        for place, value in enumerate(body):
            yield from leaves(value, (*path, place))
    else:
        yield path


def changed(body, path):
    body = copy.deepcopy(body)
    inner = body
    for step in path[:-1]:
        inner = inner[step]
    old = inner[path[-1]]
    inner[path[-1]] = (
        (not old)
        if isinstance(old, bool)
        else old + 1
        if isinstance(old, int)
        else old * 1.5 + 0.25
        if isinstance(old, float)
        else f"{old} "
    )
    return body


@pytest.mark.parametrize("reseal", [False, True], ids=["files alone", "with a manifest that agrees"])
def test_another_value_in_any_leaf_of_any_file_is_caught(published, tmp_path, reseal):
    place, head = published
    folder = tmp_path / "run"
    shutil.copytree(place, folder)
    tried = 0
    for name in sorted(path.name for path in place.glob("*.json")):
        text = (place / name).read_text()
        body = json.loads(text)
        paths = list(leaves(body))
        # Lists of many alike, such as points of a curve: some of them.
        for path in paths if len(paths) <= 60 else random.Random(0).sample(paths, 60):
            (folder / name).write_text(json.dumps(changed(body, path), indent=2, ensure_ascii=False) + "\n")
            if reseal and name != "manifest.json":
                sealed(folder)
            assert failed(folder, head), (name, path)
            shutil.copy(place / name, folder / name)
            shutil.copy(place / "manifest.json", folder / "manifest.json")
            tried += 1
    assert tried > 30
    assert not failed(folder, head)


@pytest.mark.parametrize("reseal", [False, True], ids=["files alone", "with a manifest that agrees"])
def test_a_file_that_is_changed_removed_or_added_is_caught(published, tmp_path, reseal):
    place, head = published
    folder = tmp_path / "run"

    def fresh():
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(place, folder)

    for name in RunFolder.open(place).files():
        for change in ("changed", "removed", "longer", "linked"):
            fresh()
            file = folder / name
            content = file.read_bytes()
            if change == "removed" or change == "linked":
                file.unlink()
            if change == "linked":
                file.symlink_to(place / name)
            if change == "changed" and content:
                file.write_bytes(content[:-2] + bytes([content[-2] ^ 1, content[-1]]))
            if change == "longer":
                file.write_bytes(content + b"\n")
            if name in ("plan.json", "run.json", "transcript.jsonl") and change == "removed":
                continue  # no run lies there any more
            if reseal and change != "linked":
                sealed(folder)
            assert failed(folder, head), (name, change)
    for name in ("notes.txt", "model.pkl", ".hidden", "more/inside.json", "loss_curve.json", "evaluations.json"):
        fresh()
        if (folder / name).exists():
            continue
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{}\n")
        if reseal:
            sealed(folder)
        assert failed(folder, head), name
    fresh()
    (folder / "manifest.json").unlink()
    assert failed(folder, head)


def test_the_hash_of_the_transcript_alone_does_not_stand_for_the_run(published):
    place, head = published
    chain = RunFolder.open(place).chain_head
    assert chain != head
    assert "anchor" in failed(place, chain)


@pytest.mark.parametrize(
    "name", ["metrics.json", "loss_curve.json", "evaluations.json", "report.html", "more/model.bin"]
)
def test_the_hash_of_a_transcript_does_not_stand_for_what_lies_beside_it(published, tmp_path, name):
    folder = tmp_path / "run"
    shutil.copytree(published[0], folder)
    for file in RunFolder.open(folder).files():
        if file not in ("plan.json", "run.json", "transcript.jsonl", "environment.json"):
            (folder / file).unlink()
    (folder / "manifest.json").unlink()
    chain = RunFolder.open(folder).chain_head
    assert "anchor" not in failed(folder, chain)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("{}\n")
    assert "anchor" in failed(folder, chain)


def test_a_report_is_part_of_the_run_once_it_lies_there(published, tmp_path):
    from sordino.report import write_report

    place, head = published
    folder = tmp_path / "run"
    shutil.copytree(place, folder)
    write_report(RunFolder.open(folder), folder=tmp_path / "elsewhere")
    assert not failed(folder, head)
    had_one = (folder / "report.html").exists()
    page = write_report(RunFolder.open(folder)).page
    later = verify(folder)
    assert later.passed
    # The same report again is the same bytes.
    assert (later.head == head) is had_one
    page.write_text(page.read_text().replace("ε", "ε ", 1))
    assert {"files", "anchor"} <= set(failed(folder, later.head))


def test_what_the_command_writes_into_a_run_belongs_to_it(tmp_path):
    _module(tmp_path / "run")
    for form in ("html", "md", "json"):
        assert CliRunner().invoke(app, ["report", str(tmp_path / "run"), "--format", form]).exit_code == 0
        assert verify(tmp_path / "run").passed
    assert (tmp_path / "run" / "report.md").is_file()


@pytest.mark.parametrize(
    "change",
    [
        {"sampler": "Poisson sampling at rate 0.25"},
        {"sampler": "none"},
        {"accountant": "rdp"},
        {"caveats": []},
        {"privacy_unit": "user"},
        {"neighboring_relation": "replace_one"},
        {"delta": 1e-4},
    ],
)
def test_a_claim_that_plan_and_steps_do_not_bear_out_is_caught_without_any_hash(tmp_path, change):
    _module(tmp_path / "run")
    run = RunFolder.open(tmp_path / "run")
    body = json.loads((run.path / "guarantee.json").read_text())
    run._put_json("guarantee.json", body | change)
    claim = run.guarantee
    run._put_json("guarantee.json", body | change | {"description": claim.describe()})
    found = {item.name: item.status for item in verify(run).items}
    assert found["guarantee"] == "fail"
    assert found["files"] == "pass"


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (2, 0, 1)])
def test_models_with_rates_of_their_own_are_claimed_and_verified_together(tmp_path, order):
    engine = PrivacyEngine(run_folder=tmp_path / "run")
    data = TensorDataset(torch.ones(64, 3), torch.zeros(64, dtype=torch.long))
    made = []
    for rate in (0.25, 0.5, 0.75):
        model = torch.nn.Linear(3, 2)
        made.append(
            engine.make_private(
                module=model,
                optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
                data_loader=DataLoader(data, batch_size=16),
                noise_multiplier=1.0,
                max_grad_norm=1.0,
                sample_rate=rate,
            )
        )
    for number in order:
        model, optimizer, loader = made[number]
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    engine.detach()
    run = RunFolder.open(tmp_path / "run")
    assert verify(run).passed
    body = json.loads((run.path / "guarantee.json").read_text())
    run._put_json("guarantee.json", body | {"sampler": "Poisson sampling at rate 0.75"})
    run._put_json(
        "guarantee.json",
        json.loads((run.path / "guarantee.json").read_text()) | {"description": run.guarantee.describe()},
    )
    assert verify(run).item("guarantee").status == "fail"
