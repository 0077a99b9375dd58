"""The map of dynamic schedules: where theory and measurement agree, and what the page says of it."""

import re
import runpy
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "optimizers.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def run():
    return runpy.run_path(str(ROOT / "experiments" / "schedules.py"))


def expected(run, noise, condition):
    """The exact mean of the final loss: each coordinate is a sum of independent normals."""
    curvature = np.geomspace(1 / condition, 1.0, run["DIMENSIONS"])
    scale = 2 * run["ALPHA"] * run["BUDGET"] / run["DIMENSIONS"]
    left = np.arange(len(noise) - 1, -1, -1)
    second = 2 / (run["DIMENSIONS"] * curvature) * (1 - curvature) ** (2 * len(noise))
    second += scale * ((1 - curvature[:, None]) ** (2 * left) * noise**2).sum(axis=1)
    return (curvature * second).sum() / 2


@pytest.mark.parametrize(("steps", "condition"), [(40, 10.0), (80, 2.0), (20, 50.0)])
def test_measured_losses_are_those_of_the_formula_and_below_the_bound(run, steps, condition):
    found, told = run["measured"](steps, condition, runs=4000, seed=1), run["bounds"](steps, condition)
    for name, noise in run["schedules"](steps, condition).items():
        assert np.sum(noise**-2.0) == pytest.approx(run["BUDGET"])
        exact = expected(run, noise, condition)
        assert found[name].mean() == pytest.approx(exact, rel=0.05)
        assert exact <= told[name]


def test_it_pays_where_steps_are_many_beside_the_condition_number(run):
    def saved(steps, condition):
        values = {name: expected(run, noise, condition) for name, noise in run["schedules"](steps, condition).items()}
        return 1 - values["dynamic"] / values["uniform"]

    assert saved(320, 10.0) > 0.9
    assert saved(80, 2.0) > 0.9
    assert saved(20, 50.0) < 0.01
    assert saved(10, 20.0) < 0.01


def test_the_table_of_the_page_is_what_is_computed(run):
    for name in ("uniform", "dynamic"):
        (cells,) = re.findall(
            rf"^\| {name}(?:: excess loss over the first)? \| (0\.00.*) \|$", PAGE, flags=re.MULTILINE
        )
        for steps, cell in zip((20, 40, 80, 160, 320), cells.split(" | "), strict=True):
            exact = expected(run, run["schedules"](steps, 10.0)[name], 10.0)
            assert exact == pytest.approx(float(cell), rel=0.05, abs=6e-5)
    (cells,) = re.findall(r"^\| saved, by the bound \| (.*) \|$", PAGE, flags=re.MULTILINE)
    for steps, cell in zip((20, 40, 80, 160, 320), cells.split(" | "), strict=True):
        told = run["bounds"](steps, 10.0)
        assert 100 * (1 - told["dynamic"] / told["uniform"]) == pytest.approx(float(cell.split()[0]), abs=0.5)


def test_the_picture_is_drawn_from_few_runs(run, tmp_path):
    from matplotlib.image import imread

    rows = run["main"](["--out", str(tmp_path), "--runs", "5"])
    assert len(rows) == 35
    assert np.var(imread(tmp_path / "schedules-map.png")[..., :3]) > 0.003
