"""What leaves the process of a training in release mode must be the same for neighboring datasets."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from typer.testing import CliRunner

from sordino import PrivacyEngine
from sordino.cli import app
from sordino.runs import RunFolder
from sordino.training.fit import fit
from sordino.training.noisy_releases import LossRelease
from sordino.training.plan import Plan
from sordino.verification import verify

PLAN = Plan(noise_multiplier=1.0, max_grad_norm=1.0, sample_rate=0.1, steps=6, expected_batch_size=6.0, delta=1e-5)
SCHEMA = {
    "target": "income",
    "labels": ["low", "high", "rare"],
    "columns": [
        {"name": "age", "type": "numeric", "low": 0, "high": 100},
        {"name": "job", "type": "category", "categories": ["clerk", "nurse"]},
    ],
}


def records():
    generator = torch.Generator().manual_seed(3)
    features, labels = torch.randn(60, 3, generator=generator), torch.arange(60) % 2
    labels[7] = 2
    return features, labels


def neighbors():
    """The dataset, and what one record can do to it: carry a NaN, carry huge values, be missing, be the only one."""
    features, labels = records()
    broken, huge = features.clone(), features.clone()
    broken[7], huge[7] = torch.nan, 1e30
    return {
        "plain": (features, labels),
        "nan": (broken, labels),
        "huge": (huge, labels),
        "without the rare class": (torch.cat([features[:7], features[8:]]), torch.cat([labels[:7], labels[8:]])),
    }


def losses(model, x, y):
    return nn.functional.cross_entropy(model(x), y, reduction="none")


def files_of(folder):
    return {path.name: path.stat().st_size for path in sorted(folder.iterdir())}


def settled(text):
    """Without what the clock alone decides, and without control codes."""
    return re.sub(r"\d+:\d\d:\d\d|-:--:--|\x1b\[[0-9;?]*[A-Za-z]", "", text)


@pytest.mark.parametrize("curve", [None, LossRelease(max_loss=2.0)], ids=["plain", "with a loss curve"])
@pytest.mark.parametrize("seed", [1, 2])
def test_fit_says_and_writes_the_same_for_neighbors(tmp_path, capfd, caplog, seed, curve):
    """The seed fixes the batches, so that only the records differ."""
    from sordino.randomness import KeyedRNG

    seen = {}
    for name, data in neighbors().items():
        done = []
        torch.manual_seed(0)
        fit(
            nn.Linear(3, 3),
            losses,
            data,
            replace(PLAN, loss_release=curve),
            run_folder=tmp_path / name.replace(" ", "-"),
            checkpoint_every=2,
            on_step=done.append,
            rng=KeyedRNG(seed=seed, reproducible=True),
        )
        folder = tmp_path / name.replace(" ", "-")
        out, err = capfd.readouterr()
        events = [(line.step, line.event, line.epsilon) for line in RunFolder.open(folder)]
        seen[name] = out, settled(err), caplog.text, files_of(folder), done, events
    assert len({str(value) for value in seen.values()}) == 1
    assert seen["plain"][3]["model.safetensors"] > 0


def test_the_secret_batch_size_changes_and_nothing_that_is_seen_changes_with_it(tmp_path, capfd):
    sizes, seen = [], []
    for number in range(3):
        count = []

        def counting(model, x, y, count=count):
            count.append(len(x))
            return losses(model, x, y)

        fit(nn.Linear(3, 3), counting, records(), PLAN, run_folder=tmp_path / str(number))
        out, err = capfd.readouterr()
        sizes.append(tuple(count))
        seen.append((out, settled(err), str(files_of(tmp_path / str(number)))))
    assert len(set(sizes)) > 1
    assert len(set(seen)) == 1


def test_the_engine_says_the_same_for_neighbors_of_one_size(capfd, caplog, tmp_path):
    seen = {}
    for name, data in neighbors().items():
        torch.manual_seed(0)
        model = nn.Linear(3, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = PrivacyEngine(seed=1, reproducible=True)
        declared = {"sample_rate": 0.25, "expected_batch_size": 15.0}
        options = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, **declared}
        loader = DataLoader(TensorDataset(*data), batch_size=15)
        model, optimizer, loader = engine.make_private(module=model, optimizer=optimizer, data_loader=loader, **options)
        batches = 0
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            batches += 1
        file = tmp_path / "checkpoint.safetensors"
        engine.save_checkpoint(path=file, module=model, optimizer=optimizer)
        assert all(parameter.isfinite().all() for parameter in model.parameters())
        seen[name] = capfd.readouterr(), caplog.text, batches, file.stat().st_size, engine.guarantee(1e-5)
        file.unlink()
    assert len({str(value) for value in seen.values()}) == 1


def test_a_failure_names_no_value_of_a_record():
    features, labels = records()
    features[7] = 1234.5

    def broken(model, x, y):
        return losses(model, x, y).mean(0, keepdim=True).expand(len(x) + 1)

    with pytest.raises(Exception, match="must") as caught:
        fit(nn.Linear(3, 3), broken, (features, labels), PLAN, progress=False)
    text = str(caught.value)
    assert "1234" not in text
    assert not re.search(r"\b\d+ records\b", text)


def write_people(path, *, odd):
    rows = [["age", "job", "income"]] + [
        [str(20 + place % 60), "nurse" if place % 3 else "clerk", "high" if place % 2 else "low"]
        for place in range(200)
    ]
    rows[8] = {"rare": ["33", "nurse", "rare"], "common": ["33", "nurse", "low"], "missing": ["", "nurse", "low"]}[odd]
    path.write_text("\n".join(",".join(row) for row in rows) + "\n")


def sordino(*arguments, folder):
    environment = os.environ | {"COLUMNS": "100", "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "sordino", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )


def test_the_command_says_and_writes_the_same_for_neighbors(tmp_path):
    seen = {}
    for odd in ("rare", "common"):
        folder = tmp_path / odd
        folder.mkdir()
        write_people(folder / "people.csv", odd=odd)
        (folder / "schema.json").write_text(json.dumps(SCHEMA))
        asked = [
            "train",
            "people.csv",
            "--schema",
            "schema.json",
            "--epsilon",
            "1",
            "--steps",
            "4",
            "--batch-size",
            "20",
        ]
        done = sordino(*asked, "--out", "run", folder=folder)
        assert done.returncode == 0, done.stderr
        files = {name: size for name, size in files_of(folder / "run").items() if not name.startswith("report")}
        seen[odd] = done.stdout, settled(done.stderr), files
        assert set(RunFolder.open(folder / "run").metrics) == set()
    assert seen["rare"] == seen["common"]


def test_private_diagnostics_are_shown_below_a_warning_and_recorded(tmp_path, capfd):
    result = fit(
        nn.Linear(3, 3), losses, records(), PLAN, run_folder=tmp_path / "run", diagnostics="private", progress=False
    )
    _, err = capfd.readouterr()
    assert "PRIVATE DIAGNOSTICS" in err
    assert len(re.findall(r"loss (?:\d+\.\d+|nan), \d+ records", err)) == PLAN.steps
    assert any("losses and batch sizes were shown" in caveat for caveat in result.guarantee.caveats)
    run = RunFolder.open(tmp_path / "run")
    assert run.meta["diagnostics"] == "private"
    assert "losses and batch sizes were shown" in run.guarantee_description
    assert not re.search(r"loss \d", (run.path / "transcript.jsonl").read_text())
    with pytest.raises(ValueError, match="diagnostics must be one of private"):
        fit(nn.Linear(3, 3), losses, records(), PLAN, diagnostics="public")


def test_the_command_resumes_a_run_and_pays_for_repeated_steps(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_people(tmp_path / "people.csv", odd="common")
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    base = ["train", "people.csv", "--schema", "schema.json"]
    runner = CliRunner()
    real = RunFolder.append

    def dies(self, **fields):
        if fields["step"] == 4:
            raise OSError("no space left")
        real(self, **fields)

    monkeypatch.setattr(RunFolder, "append", dies)
    asked = [*base, "--epsilon", "1", "--steps", "6", "--checkpoint-every", "3", "--out", "run"]
    assert runner.invoke(app, asked).exit_code == 1
    monkeypatch.setattr(RunFolder, "append", real)
    assert len(list(RunFolder.open("run"))) == 4
    assert runner.invoke(app, [*base, "--resume", "run", "--epsilon", "2"]).exit_code == 2
    assert runner.invoke(app, [*base, "--epsilon", "-1"]).exit_code == 2
    assert runner.invoke(app, base).exit_code == 2
    done = runner.invoke(app, [*base, "--resume", "run", "--json"])
    assert done.exit_code == 0, done.stderr
    run = RunFolder.open("run")
    assert [line.step for line in run] == [0, 1, 2, 3, 3, 4, 5]
    assert json.loads(done.stdout)["epsilon"] == run.guarantee.epsilon > 1
    assert verify(run).passed
