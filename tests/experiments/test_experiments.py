"""The experiments of the repository: files, guarantees, resumption, and the page that shows their pictures."""

import json
import os
import re
import runpy
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from matplotlib.image import imread

from sordino import accounting
from sordino.data.catalog import find, get_named_dataset
from sordino.errors import InvalidArgument
from sordino.events import Gaussian, PoissonSampled, SelfComposed, compose
from sordino.randomness import KeyedRNG

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "experiments.md").read_text(encoding="utf-8")
FILES = sorted((ROOT / "experiments").glob("*.toml"))
TEXT = """title = "Adult, small"
[data]
name = "adult"
records = 3000
[base]
batch_size = 500
learning_rate = 2.0
epochs = 5
max_grad_norm = 1.0
noise_multiplier = 1.0
[[grids]]
noise_multiplier = [1.0, 500.0]
seed = [0, 1]
[[grids]]
mode = ["noise without clipping", "clipping without noise", "neither"]
noise_multiplier = [1.0, 2.0]
[[panels]]
x = "noise_multiplier"
lines = "mode"
[[panels]]
x = "epoch"
lines = "mode"
"""


@pytest.fixture(scope="module")
def run():
    return SimpleNamespace(**runpy.run_path(str(ROOT / "experiments" / "run.py")))


def parse(run, tmp_path, text=TEXT):
    (tmp_path / "small.toml").write_text(text)
    return run.read_experiment(tmp_path / "small.toml")


def steps_event(sigma, rate, steps):
    return SelfComposed(event=PoissonSampled(sample_rate=rate, event=Gaussian(noise_multiplier=sigma)), count=steps)


def test_cells_are_all_combinations_and_settings_without_a_part_make_no_second_cell(run, tmp_path):
    cells = parse(run, tmp_path).cells
    # σ has no part where there is no noise, so both of its values are one cell.
    assert [(cell.mode, cell.noise_multiplier, cell.seed) for cell in cells] == [
        ("private", 1.0, 0),
        ("private", 1.0, 1),
        ("private", 500.0, 0),
        ("private", 500.0, 1),
        ("noise without clipping", 1.0, 0),
        ("noise without clipping", 2.0, 0),
        ("clipping without noise", None, 0),
        ("neither", None, 0),
    ]
    assert len({cell.key for cell in cells}) == len(cells)


def test_epsilon_is_the_accountants_and_only_private_cells_have_one(run, tmp_path):
    for cell in parse(run, tmp_path).cells:
        if cell.mode != "private":
            assert cell.epsilon is cell.guarantee() is None
            continue
        wanted = accounting.epsilon(steps_event(cell.noise_multiplier, 500 / 3000, 30), 1e-5).upper
        assert cell.epsilon == wanted
        assert (
            cell.guarantee(12).epsilon
            == accounting.epsilon(steps_event(cell.noise_multiplier, 500 / 3000, 12), 1e-5).upper
        )


def test_private_components_are_part_of_epsilon_and_of_a_target(run, tmp_path):
    text = TEXT.partition("[[grids]]")[0] + "pca = 20\npca_noise_multiplier = 12\n[grid]\n"
    panel = '\n[[panels]]\nx = "epoch"\n'
    (cell,) = parse(run, tmp_path, text + "width = 64" + panel).cells
    both = compose([Gaussian(noise_multiplier=12.0), steps_event(1.0, 500 / 3000, 30)])
    assert cell.epsilon == accounting.epsilon(both, 1e-5).upper
    (cell,) = parse(run, tmp_path, text + "target_epsilon = [0.9]" + panel).cells
    assert 0.9 * 0.995 < cell.epsilon <= 0.9
    event = compose([Gaussian(noise_multiplier=12.0), steps_event(cell.value("noise_multiplier"), 500 / 3000, 30)])
    assert accounting.epsilon(event, 1e-5).upper <= 0.9


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('name = "adult"', 'name = "mine.csv"', "name must be"),
        ("learning_rate = 2.0\n", "", "learning_rate"),
        ("epochs = 5", "epoch = 5", "epoch"),
        ('x = "epoch"', 'x = "seed"', "x must be"),
        (
            'x = "epoch"\nlines = "mode"',
            'x = "epoch"\nwhere = { noise_multiplier = 3.0, mode = "private" }',
            "show a cell",
        ),
        ('x = "epoch"\nlines = "mode"', 'x = "mode"\nwhere = { noise_multiplier = 1.0 }', None),
        ("noise_multiplier = [1.0, 500.0]", "noise_multiplier = [1.0]\nwidth = [3, 4]", "one setting at each point"),
        ('mode = ["noise', 'mode = ["no noise', "mode must be"),
    ],
)
def test_files_that_say_something_impossible_are_refused(run, tmp_path, old, new, words):
    assert old in TEXT
    if words is None:
        assert parse(run, tmp_path, TEXT.replace(old, new)).panels
        return
    with pytest.raises(InvalidArgument, match=re.escape(words)):
        parse(run, tmp_path, TEXT.replace(old, new))


def test_modes_train_what_they_say(run, tmp_path):
    text = TEXT.replace("[1.0, 500.0]", "[1.0, 400.0]").replace("[1.0, 2.0]", "[400.0]").replace("seed = [0, 1]", "")
    experiment = parse(run, tmp_path, text)
    results = {cell.key: run.train_cell(cell) for cell in experiment.cells}
    found = {(cell.mode, cell.noise_multiplier): results[cell.key] for cell in experiment.cells}
    # So much noise drowns what it is added to; the others learn.
    assert found["private", 1.0].accuracy > 0.8 > found["private", 400.0].accuracy
    assert found["noise without clipping", 400.0].accuracy < 0.79
    assert min(found["clipping without noise", None].accuracy, found["neither", None].accuracy) > 0.8
    private = found["private", 1.0]
    assert [point[0] for point in private.curve] == [1, 2, 3, 4, 5]
    assert private.curve[-1][1] == private.accuracy
    assert [point[3] for point in private.curve][-1] == private.epsilon
    # The seed follows from the settings: the same cell comes to the same model.
    again = run.train_cell(experiment.cells[0])
    assert (again.accuracy, again.curve) == (private.accuracy, private.curve)

    rows = run.collect_rows(experiment, results)
    body = json.loads(json.dumps(run.document(experiment, rows)))["cells"]
    table = [line for line in run.markdown(experiment, rows).splitlines() if line.startswith("| ")][1:]
    for row, cell, line in zip(rows, body, table, strict=True):
        unprotected = row.cell.mode != "private"
        assert (cell["epsilon"] == "no guarantee") == (cell["guarantee"] is None) == unprotected
        assert ("no guarantee" in line) == unprotected
    run.draw(experiment, rows, tmp_path / "small.svg")
    run.draw(experiment, rows, tmp_path / "small.png")
    assert np.var(imread(tmp_path / "small.png")[..., :3]) > 0.003


def test_noise_without_clipping_has_the_stated_size(run, monkeypatch):
    # With gradients of zero the weights after one step are the noise alone: σ·C/B times the learning rate.
    cell = run.Cell(
        data="adult",
        records=3000,
        mode="noise without clipping",
        noise_multiplier=400.0,
        max_grad_norm=3.0,
        batch_size=500,
        steps=1,
        learning_rate=2.0,
    )
    model = torch.nn.Linear(400, 100, bias=False)
    torch.nn.init.zeros_(model.weight)
    monkeypatch.setitem(
        run.train_unclipped.__globals__, "cross_entropy_per_record", lambda model, x, y: 0 * model(x).sum(1)
    )
    records = (torch.ones(3000, 400), torch.zeros(3000, dtype=torch.long))
    run.train_unclipped(cell, model, records, lambda step: None, KeyedRNG())
    wanted = 2.0 * 400.0 * 3.0 / 500
    assert abs(model.weight.std().item() / wanted - 1) < 0.02


def test_components_are_those_of_the_records_when_noise_is_small_and_not_when_it_is_large(run):
    rows = torch.zeros(2000, 6)
    rows[:1200, 2] = 3.0
    rows[1200:, 4] = 3.0
    basis = run.directions(rows, noise_multiplier=1.0, rng=KeyedRNG())[:, :2]
    assert torch.allclose(basis.T @ basis, torch.eye(2, dtype=basis.dtype), atol=1e-9)
    assert min(basis[2, 0].abs(), basis[4, 1].abs()) > 0.999
    drowned = run.directions(rows, noise_multiplier=1e6, rng=KeyedRNG(seed=3, reproducible=True))
    assert drowned[2, 0].abs() < 0.95


def test_finished_cells_are_kept_a_torn_line_is_passed_over_and_changed_cells_are_new(run, tmp_path):
    cells = parse(run, tmp_path).cells[:3]
    result = run.Result(accuracy=0.5, epsilon=float("inf"), curve=((1.0, 0.5, 0.4, None),), seconds=1.0, memory=None)
    for cell in cells:
        run.keep(tmp_path, cell, result)
    path = tmp_path / "cells.jsonl"
    assert run.finished(tmp_path, cells) == {cell.key: result for cell in cells}
    path.write_text(path.read_text()[:-30])
    assert run.finished(tmp_path, cells).keys() == {cell.key for cell in cells[:2]}
    # What is added after a torn line stands on a line of its own.
    run.keep(tmp_path, cells[2], result)
    assert run.finished(tmp_path, cells).keys() == {cell.key for cell in cells}
    assert not run.finished(tmp_path, [replace(cells[0], learning_rate=2.5)])
    # Nothing is left to train: no process is started, and the results are those that were kept.
    experiment = replace(parse(run, tmp_path), cells=cells)
    assert run.run_experiment(experiment, tmp_path, say=pytest.fail).keys() == {cell.key for cell in cells}


def test_a_failed_cell_is_named_the_others_go_on_and_the_next_call_tries_it_again(run, tmp_path, monkeypatch):
    experiment, said = parse(run, tmp_path), []
    result = run.Result(accuracy=0.5, epsilon=1.0, curve=(), seconds=1.0, memory=5.0)

    def train(cell):
        if cell.noise_multiplier == 500.0:
            raise ValueError("no luck")
        return result

    names = run.run_experiment.__globals__
    monkeypatch.setitem(names, "ProcessPoolExecutor", lambda jobs, **_: ThreadPoolExecutor(jobs))
    monkeypatch.setitem(names, "train_cell", train)
    results = run.run_experiment(experiment, tmp_path, say=said.append)
    assert len(results) == 6
    assert len([words for words in said if "failed, ValueError: no luck" in words]) == 2
    assert [row.missing for row in run.collect_rows(experiment, results)] == [0, 2, 0, 0, 0, 0]
    # Memory of a process that trains several cells is no measurement.
    assert {found.memory for found in results.values()} == {None}
    said.clear()
    monkeypatch.setitem(names, "train_cell", lambda cell: result)
    assert len(run.run_experiment(experiment, tmp_path, say=said.append)) == len(experiment.cells)
    assert len(said) == 2


@pytest.mark.slow
def test_the_command_draws_and_goes_on_where_it_was_cut_off(tmp_path):
    command = [sys.executable, "experiments/run.py", "fashion-projections", "--quick", "--jobs", "2", "--out", tmp_path]
    subprocess.run(command, cwd=ROOT, check=True)
    assert np.var(imread(tmp_path / "fashion-projections.png")[..., :3]) > 0.003
    first, *others = (tmp_path / "cells.jsonl").read_text().splitlines()
    assert json.loads(first)["result"]["memory"] > 0
    (tmp_path / "cells.jsonl").write_text("".join(line + "\n" for line in others))
    said = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert len(re.findall(r"^  \d/3  ", said, re.MULTILINE)) == 1
    lines = (tmp_path / "cells.jsonl").read_text().splitlines()
    assert lines[:-1] == others
    assert json.loads(lines[-1])["result"]["accuracy"] == json.loads(first)["result"]["accuracy"]


def test_every_file_is_read_quickly_and_in_full_and_its_picture_is_on_the_page(run):
    assert len(FILES) == 15
    for path in FILES:
        full, quick = run.read_experiment(path), run.read_experiment(path, quick=True)
        longer = run.read_experiment(path, full=True)
        # Curves and points of trainings have a long form; time and memory of a few steps need none.
        epochs = [cell.steps * cell.batch_size / cell.records for cell in longer.cells]
        assert path.stem == "fashion-projections" or max(epochs) >= 49
        seeds = {cell.seed for cell in longer.cells}
        assert {0, 1, 2} <= seeds
        assert len(longer.cells) == len(seeds) * len({replace(cell, seed=0) for cell in full.cells})
        assert max(cell.steps for cell in longer.cells) >= max(cell.steps for cell in full.cells)
        assert len({cell.records for cell in full.cells}) == 1
        assert full.cells[0].records >= 11_552
        assert max(cell.steps for cell in quick.cells) <= 5
        assert max(cell.records for cell in quick.cells) <= 6000
        assert len({cell.key for cell in (*full.cells, *quick.cells)}) == len(full.cells) + len(quick.cells)
        assert f"`experiments/{path.name}`" in PAGE
        assert f"](pictures/experiments-{path.stem}.png)" in PAGE
        assert np.var(imread(ROOT / "docs" / "pictures" / f"experiments-{path.stem}.png")[..., :3]) > 0.003
    pictures = {path.stem for path in (ROOT / "docs" / "pictures").glob("experiments-*.png")}
    assert pictures == {f"experiments-{path.stem}" for path in FILES}


def test_the_plan_touches_no_data(run, monkeypatch, capsys):
    monkeypatch.setitem(run.main.__globals__, "run_experiment", lambda *_, **__: pytest.fail("data were touched"))
    monkeypatch.setitem(run.main.__globals__, "_load", lambda *_: pytest.fail("data were touched"))
    assert run.main(["fashion-clipping", "--plan"]) == 0
    shown = capsys.readouterr().out
    assert "29 cells" in shown
    assert "sordino tune" in shown
    with pytest.raises(SystemExit):
        run.main(["--help"])
    for option in set(re.findall(r"--[a-z]+", capsys.readouterr().out)) - {"--help"}:
        assert option in PAGE


def test_the_full_form_replaces_base_and_seeds_and_knows_no_other_key(run, tmp_path):
    (tmp_path / "small.toml").write_text(TEXT + '[full]\nepochs = 20\nnote = "longer"\n')
    full = run.read_experiment(tmp_path / "small.toml", full=True)
    assert {cell.steps for cell in full.cells} == {120}
    assert {cell.seed for cell in full.cells} == {0, 1, 2}
    assert (full.note, run.read_experiment(tmp_path / "small.toml").note) == ("longer", "")
    (tmp_path / "small.toml").write_text(TEXT + "[full]\nepoch = 20\n")
    with pytest.raises(InvalidArgument, match="epoch"):
        run.read_experiment(tmp_path / "small.toml", full=True)


def test_a_panel_can_show_a_model_without_privacy_and_lines_stand_in_order(run, tmp_path):
    text = TEXT.replace("[1.0, 500.0]", "[500.0, 1.0]").replace(
        'x = "epoch"\nlines = "mode"', 'x = "epoch"\nlines = "noise_multiplier"\nwhere = { mode = "all" }'
    )
    experiment = parse(run, tmp_path, text.replace('"noise without clipping", "clipping without noise", ', ""))
    assert {cell.mode for cell in experiment.cells_of(experiment.panels[1])} == {"private", "neither"}
    curve = ((1.0, 0.5, 0.4, 0.1), (2.0, 0.6, 0.5, 0.2))
    result = run.Result(accuracy=0.5, epsilon=1.0, curve=curve, seconds=1.0, memory=None)
    rows = run.collect_rows(experiment, {cell.key: result for cell in experiment.cells})
    run.draw(experiment, rows, tmp_path / "small.svg")
    shown = (tmp_path / "small.svg").read_text()
    places = [shown.index(f"<!-- {label} -->") for label in ("σ = 1", "σ = 500", "not private: no guarantee")]
    assert places == sorted(places)


def test_all_pixels_are_a_line_and_no_point_at_zero_components(run):
    panel = run.Panel(x="pca")
    settings = {"data": "mnist", "records": 60_000, "noise_multiplier": 4.0, "batch_size": 600, "steps": 5}
    rows = [
        run.Row(cell=run.Cell(**settings, learning_rate=0.1, pca=pca), results=(), missing=1) for pca in (0, 10, 60)
    ]
    assert [run._across(panel, row, []) for row in rows] == [None, 10.0, 60.0]


def test_a_grid_with_steps_takes_no_epochs_of_the_base(run, tmp_path):
    text = TEXT.replace("[[panels]]", "[[grids]]\nsteps = [12]\nmax_grad_norm = [3.0]\n[[panels]]", 1)
    cells = parse(run, tmp_path, text).cells
    assert {cell.steps for cell in cells if cell.max_grad_norm == 3.0} == {12}
    assert {cell.steps for cell in cells if cell.mode == "private" and cell.max_grad_norm == 1.0} == {30}


def test_delta_over_epochs_is_that_of_the_accountant_at_each_lines_epsilon(run, tmp_path):
    panel = '[[panels]]\nx = "epoch"\ny = "delta"\nlines = "noise_multiplier"\nwhere = { mode = "private" }\n'
    experiment = parse(run, tmp_path, TEXT + panel + "epsilons = { 1 = 2.0, 500 = 0.001 }\n")
    shown = experiment.panels[-1]
    cell = next(cell for cell in experiment.cells if cell.noise_multiplier == 1.0)
    wanted = [accounting.delta(steps_event(1.0, 500 / 3000, steps), 2.0).upper for steps in (6, 30)]
    assert run._deltas(shown, cell, np.array([1.0, 5.0])) == pytest.approx(wanted)
    assert wanted[0] < wanted[1] < 1
    with pytest.raises(InvalidArgument, match="an ε for each line"):
        parse(run, tmp_path, TEXT + panel + "epsilons = { 1 = 2.0 }\n")


def test_private_and_plain_training_of_one_setting_are_two_lines(run, tmp_path):
    text = TEXT.replace(
        'x = "epoch"\nlines = "mode"',
        'x = "epoch"\nlines = "batch_size"\nwhere = { noise_multiplier = 1.0, mode = "all" }',
    )
    text = text.replace('mode = ["noise without clipping", "clipping without noise", "neither"]', 'mode = ["neither"]')
    experiment = parse(run, tmp_path, text.replace("[[grids]]\nnoise", "[[grids]]\nbatch_size = [500, 1000]\nnoise", 1))
    assert {cell.mode for cell in experiment.cells_of(experiment.panels[1])} == {"private", "neither"}


@pytest.mark.slow
@pytest.mark.skipif(
    find(get_named_dataset("mnist")) is None or not Path(os.environ.get("SORDINO_DATA", "data"), "uci").is_dir(),
    reason="MNIST and the UCI tables are not on this machine",
)
def test_tasks_made_of_public_datasets_have_the_records_that_they_state(run):
    for name in ("mnist-3-5", "bike"):
        (features, labels), (tests, truth), classes = run._load(name)
        assert (len(features), classes) == (run.TASKS[name][0], 2)
        assert features.shape[1:] == tests.shape[1:]
        assert 0.3 < labels.float().mean() < 0.7
        assert set(truth.tolist()) == {0, 1}
        # Neither column nor pixel gives the label away.
        if name == "bike":
            assert features.shape[1] == 15
            sums = torch.corrcoef(torch.cat([features, labels[:, None].float()], 1).T)[-1, :-1]
            assert sums.abs().max() < 0.7
