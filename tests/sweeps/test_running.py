"""Sweeps that run: numbers, resumption, failures, processes, tables and pictures."""

import csv
import json
import os
import signal
import subprocess
import sys
import time

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib.image import imread
from typer.testing import CliRunner

from sordino import accounting, sweeps
from sordino.cli import app
from sordino.errors import InvalidArgument
from sordino.events import Gaussian, PoissonSampled, SelfComposed
from sordino.randomness import KeyedRNG
from sordino.sweeps import runner
from sordino.sweeps.results import comma_separated, document, markdown
from sordino.sweeps.runner import directions

TEXT = """title = "Adult, small"
[data]
name = "adult"
records = 3000
[base]
batch_size = 500
learning_rate = 2.0
epochs = 5
max_grad_norm = 1.0
[grid]
noise_multiplier = [1.0, 500.0]
max_grad_norm = [0.5, 1.0]
"""
ARMS = """title = "Arms"
[data]
name = "adult"
records = 3000
[base]
arm = "private"
batch_size = 500
learning_rate = 2.0
epochs = 5
noise_multiplier = 400.0
[grid]
arm = ["private", "noise without clipping", "clipping without noise", "neither"]
[[panels]]
x = "epoch"
lines = "arm"
[[panels]]
x = "arm"
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    sweep = sweeps.parse_sweep(TEXT, name="small")
    return sweep, sweeps.run_sweep(sweep, folder), folder


def lines(folder):
    return [json.loads(line) for line in (folder / "cells.jsonl").read_text().splitlines()]


def test_a_small_sweep_learns_and_more_noise_learns_less(small):
    sweep, outcomes, _ = small
    rows = sweeps.collect_rows(sweep, outcomes)
    assert len(rows) == 4
    accuracy = {(row.values["noise_multiplier"], row.values["max_grad_norm"]): row.mean("accuracy") for row in rows}
    assert accuracy[1.0, 1.0] > 0.8 > accuracy[500.0, 1.0]
    for row in rows:
        (outcome,) = row.outcomes
        assert [point.epoch for point in outcome.course] == [1, 2, 3, 4, 5]
        assert outcome.course[-1].accuracy == outcome.accuracy
        assert outcome.seconds > 0


def test_epsilon_in_every_table_is_the_accountants(small, tmp_path):
    sweep, outcomes, _ = small
    rows = sweeps.collect_rows(sweep, outcomes)
    body = document(sweep, rows)
    table = list(csv.DictReader(comma_separated(sweep, rows).splitlines()))
    for cell, told, line in zip(sweep.cells, body["cells"], table, strict=True):
        sigma = cell.told["noise_multiplier"]
        step = PoissonSampled(sample_rate=500 / 3000, event=Gaussian(noise_multiplier=sigma))
        wanted = accounting.epsilon(SelfComposed(event=step, count=30), 1e-5).upper
        assert told["epsilon"] == outcomes[cell.key].epsilon == float(line["epsilon"]) == wanted
        halfway = accounting.epsilon(SelfComposed(event=step, count=18), 1e-5).upper
        assert outcomes[cell.key].course[2].epsilon == halfway
        assert f"(ε = {wanted:.2f}"[:6] in told["guarantee"]


def test_a_second_run_trains_nothing_and_a_changed_cell_alone_is_trained(small):
    sweep, outcomes, folder = small
    before, seen = lines(folder), []
    assert sweeps.run_sweep(sweep, folder, on_cell=lambda cell, *_: seen.append(cell)) == outcomes
    assert not seen
    other = sweeps.parse_sweep(TEXT.replace("[1.0, 500.0]", "[1.0, 501.0]"), name="small")
    sweeps.run_sweep(other, folder, on_cell=lambda cell, *_: seen.append(cell.told["noise_multiplier"]))
    assert seen == [501.0, 501.0]
    assert lines(folder)[: len(before)] == before


def test_a_torn_line_is_passed_over_and_its_cell_trained_again(small, tmp_path):
    sweep, outcomes, folder = small
    text = (folder / "cells.jsonl").read_text()
    whole = text.split("\n")[:4]
    (tmp_path / "cells.jsonl").write_text("\n".join(whole[:3]) + "\n" + whole[3][:100])
    seen = []
    again = sweeps.run_sweep(sweep, tmp_path, on_cell=lambda cell, *_: seen.append(cell.key))
    assert seen == [json.loads(whole[3])["key"]]
    # The seed follows from the settings: the same cell comes to the same model.
    assert {key: outcome.accuracy for key, outcome in again.items()} == {
        key: outcome.accuracy for key, outcome in outcomes.items()
    }
    assert sweeps.Store(tmp_path).outcomes(sweep.cells).keys() == outcomes.keys()


def test_cells_that_protect_nobody_say_so_everywhere(tmp_path):
    sweep = sweeps.parse_sweep(ARMS, name="arms")
    outcomes = sweeps.run_sweep(sweep, tmp_path)
    rows = sweeps.collect_rows(sweep, outcomes)
    told = {cell["settings"]["arm"]: cell for cell in document(sweep, rows)["cells"]}
    for arm, cell in told.items():
        assert (cell["epsilon"] == "no guarantee") == (arm != "private")
        assert (cell["guarantee"] is None) == (arm != "private")
    table = [line for line in markdown(sweep, rows).splitlines() if line.startswith("| ")][1:]
    assert [("no guarantee" in line) for line in table] == [False, True, True, True]
    assert comma_separated(sweep, rows).count("no guarantee") == 3
    accuracy = {arm: cell["accuracy"] for arm, cell in told.items()}
    # So much noise drowns what it is added to; the two without noise learn.
    assert max(accuracy["private"], accuracy["noise without clipping"]) < 0.79
    assert min(accuracy["clipping without noise"], accuracy["neither"]) > 0.8
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        sweeps.draw(sweep, rows, tmp_path / "arms.svg")
    picture = (tmp_path / "arms.svg").read_text()
    for arm in ("noise without clipping", "clipping without noise", "neither"):
        assert f">{arm}: no guarantee<" in picture
    assert ">private<" in picture


def test_noise_without_clipping_has_the_stated_size(monkeypatch):
    # With gradients of zero the weights after one step are the noise alone: σ·C/B times the learning rate.
    from sordino.sweeps import runner

    text = (
        ARMS.partition("[grid]")[0].replace("epochs = 5", "steps = 1").replace('"private"', '"noise without clipping"')
    )
    (cell,) = sweeps.parse_sweep(text + "max_grad_norm = 3.0\n").cells
    model = torch.nn.Linear(400, 100, bias=False)
    torch.nn.init.zeros_(model.weight)
    monkeypatch.setattr(runner, "cross_entropy_per_record", lambda model, x, y: 0 * model(x).sum(1))
    records = (torch.ones(3000, 400), torch.zeros(3000, dtype=torch.long))
    runner._train_unclipped(cell, model, records, lambda step: None, KeyedRNG())
    wanted = 2.0 * 400.0 * 3.0 / 500
    entries = model.weight.detach().numpy()
    assert abs(entries.std() / wanted - 1) < 0.02
    assert abs(entries.std() / (1.05 * wanted) - 1) > 0.02


def test_components_are_those_of_the_records_when_noise_is_small_and_not_when_it_is_large():
    rows = torch.zeros(2000, 6)
    rows[:1200, 2] = 1.0
    rows[1200:, 4] = 1.0
    basis = directions(rows, noise_multiplier=1.0, rng=KeyedRNG())[:, :2]
    assert basis.shape == (6, 2)
    assert torch.allclose(basis.T @ basis, torch.eye(2, dtype=basis.dtype), atol=1e-9)
    assert basis[2, 0].abs() > 0.999
    assert basis[4, 1].abs() > 0.999
    drowned = directions(rows, noise_multiplier=1e6, rng=KeyedRNG(seed=3, reproducible=True))
    assert drowned[2, 0].abs() < 0.95


def test_a_failure_is_noted_and_the_others_go_on(tmp_path, monkeypatch):
    sweep = sweeps.parse_sweep(TEXT, name="small")
    real = runner.train_cell

    def sometimes(cell, dataset):
        if cell.told["noise_multiplier"] == 500.0:
            raise ValueError("no luck")
        return real(cell, dataset)

    monkeypatch.setattr(runner, "train_cell", sometimes)
    rows = sweeps.collect_rows(sweep, sweeps.run_sweep(sweep, tmp_path))
    assert [row.failures for row in rows] == [(), (), ("ValueError: no luck",), ("ValueError: no luck",)]
    assert "failed" in markdown(sweep, rows)
    monkeypatch.setattr(runner, "train_cell", real)
    seen = []
    after = sweeps.run_sweep(sweep, tmp_path, on_cell=lambda cell, *_: seen.append(cell))
    assert len(seen) == 2
    assert not any(row.failures for row in sweeps.collect_rows(sweep, after))


def test_two_sweeps_do_not_write_to_one_folder(tmp_path):
    with sweeps.Store(tmp_path).writing(), pytest.raises(InvalidArgument, match="no other sweep"):
        sweeps.run_sweep(sweeps.parse_sweep(TEXT), tmp_path)


@pytest.mark.slow
def test_a_killed_sweep_goes_on_where_it_was_cut_off(tmp_path):
    file = tmp_path / "killed.toml"
    file.write_text(TEXT.replace("[1.0, 500.0]", "[1.0, 2.0, 4.0, 8.0, 16.0]").replace("epochs = 5", "epochs = 10"))
    command = [sys.executable, "-m", "sordino", "sweep", str(file), "--jobs", "2", "--out", str(tmp_path / "out")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    path, deadline = tmp_path / "out/cells.jsonl", time.monotonic() + 120
    while time.monotonic() < deadline and not (path.is_file() and path.read_text().count("\n") >= 2):
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    before = lines(tmp_path / "out")
    assert 2 <= len(before) < 10
    sweep, seen = sweeps.read_sweep(file), []
    outcomes = sweeps.run_sweep(sweep, tmp_path / "out", on_cell=lambda cell, *_: seen.append(cell.key))
    assert len(outcomes) == 10
    assert len(seen) == 10 - len(before)
    assert not {line["key"] for line in before} & set(seen)
    assert lines(tmp_path / "out")[: len(before)] == before


def test_a_process_that_dies_costs_one_cell(tmp_path, monkeypatch):
    class Doomed(runner._Worker):
        def give(self, cell):
            super().give(cell)
            if cell.told["max_grad_norm"] == 0.5:
                self.process.kill()

    monkeypatch.setattr(runner, "_Worker", Doomed)
    sweep = sweeps.parse_sweep(TEXT.replace("[1.0, 500.0]", "[1.0]"))
    outcomes = sweeps.run_sweep(sweep, tmp_path, jobs=2)
    found = {cell.told["max_grad_norm"]: outcomes[cell.key] for cell in sweep.cells}
    assert "exit code -9" in found[0.5].failure
    assert found[1.0].failure is None
    assert found[1.0].accuracy > 0.8


def test_the_command_writes_a_picture_and_three_tables(small, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, _, folder = small
    (tmp_path / "small.toml").write_text(TEXT)
    result = CliRunner().invoke(app, ["sweep", "small.toml", "--out", str(folder), "--json"])
    assert result.exit_code == 0, result.stderr
    body = json.loads(result.stdout)
    assert [cell["missing"] for cell in body["cells"]] == [0] * 4
    picture = imread(folder / "small.png")
    assert picture.shape[0] > 400
    assert np.var(picture[..., :3]) > 0.003
    assert json.loads((folder / "small.json").read_text())["axes"] == ["noise_multiplier", "max_grad_norm"]
    assert (folder / "small.csv").read_text().count("\n") == 5
    assert "sordino tune" in (folder / "small.md").read_text()
    page = CliRunner().invoke(app, ["sweep", "small.toml", "--out", str(folder)])
    assert page.exit_code == 0
    assert "picture" in page.stdout


def test_the_plan_touches_no_data(tmp_path, monkeypatch):
    from sordino.sweeps.config import DataSource

    def never(self):
        raise AssertionError("data were touched")

    monkeypatch.setattr(DataSource, "load", never)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.toml").write_text(TEXT)
    result = CliRunner().invoke(app, ["sweep", "small.toml", "--plan", "--json"])
    assert result.exit_code == 0, result.stderr
    cells = json.loads(result.stdout)["cells"]
    assert [cell["epsilon"] for cell in cells] == [cell.epsilon for cell in sweeps.parse_sweep(TEXT).cells]
    assert "4 cells" in CliRunner().invoke(app, ["sweep", "small.toml", "--plan"]).stdout
    assert list(tmp_path.iterdir()) == [tmp_path / "small.toml"]


def test_a_private_file_is_refused_by_the_command(tmp_path):
    (tmp_path / "s.toml").write_text(TEXT.replace('"adult"', '"mine.csv"'))
    result = CliRunner().invoke(app, ["sweep", str(tmp_path / "s.toml")])
    assert result.exit_code == 2
    assert "sordino tune" in " ".join(result.stderr.split())


def test_a_file_that_is_declared_public_is_swept(tmp_path):
    rng = np.random.default_rng(0)
    for name, count in (("train", 600), ("test", 200)):
        x = rng.normal(size=(count, 2))
        rows = [f"{a:.3f},{b:.3f},{'yes' if a + b > 0 else 'no'}" for a, b in x]
        (tmp_path / f"{name}.csv").write_text("a,b,label\n" + "\n".join(rows) + "\n")
    schema = {
        "columns": [{"name": name, "type": "numeric", "low": -3, "high": 3} for name in "ab"],
        "target": "label",
        "labels": ["no", "yes"],
    }
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    text = TEXT.replace(
        'name = "adult"', 'name = "train.csv"\npublic = true\ntest = "test.csv"\nschema = "schema.json"'
    )
    (tmp_path / "own.toml").write_text(text.replace("3000", "600").replace("500", "100"))
    outcomes = sweeps.run_sweep(sweeps.read_sweep(tmp_path / "own.toml"), tmp_path / "out")
    assert [outcome.failure for outcome in outcomes.values()] == [None] * 4
    assert max(outcome.accuracy for outcome in outcomes.values()) > 0.9


def test_memory_is_measured_in_a_process_of_its_own(tmp_path):
    text = TEXT.replace("[1.0, 500.0]", "[1.0]") + '[[panels]]\nx = "max_grad_norm"\ny = "memory"\n'
    sweep = sweeps.parse_sweep(text)
    outcomes = sweeps.run_sweep(sweep, tmp_path)
    assert sweep.is_isolated
    if os.path.exists("/proc/self/clear_refs"):
        assert all(0 < outcome.memory < 500 for outcome in outcomes.values())


@pytest.mark.parametrize("arm", ["private", "neither"])
def test_a_cell_that_is_interrupted_is_not_kept(arm, tmp_path, monkeypatch):
    from sordino.sweeps import runner

    real = runner._Watch.__call__

    def interrupting(self, step):
        real(self, step)
        if len(self.points) == 2:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(runner._Watch, "__call__", interrupting)
    text = ARMS.partition("[grid]")[0].replace('arm = "private"', f'arm = "{arm}"')
    with pytest.raises(KeyboardInterrupt):
        sweeps.run_sweep(sweeps.parse_sweep(text), tmp_path)
    assert not (tmp_path / "cells.jsonl").exists()


def test_a_hidden_layer_learns_on_private_components(tmp_path):
    text = (
        TEXT.partition("[grid]")[0].replace("epochs = 5", "epochs = 10")
        + 'model = "relu"\nmomentum = 0.5\naveraging = 0.5\n'
    )
    text += "pca = 20\npca_noise_multiplier = 4\ntarget_epsilon = 3.0\n[grid]\nwidth = [32]\nseed = [0, 1]\n"
    rows = sweeps.collect_rows(sweeps.parse_sweep(text), sweeps.run_sweep(sweeps.parse_sweep(text), tmp_path))
    (row,) = rows
    assert len(row.outcomes) == 2
    assert row.mean("accuracy") > 0.78
    first, second = row.measured("accuracy")
    assert abs(row.spread("accuracy") - abs(first - second) / 2**0.5) < 1e-12
    assert first != second
    assert 2.97 < row.epsilon <= 3.0
