"""The benchmark of policies on synthetic records: every part that it is built of runs, and what was kept can be "
"read."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

from sordino.research import Kalman

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
BENCH = runpy.run_path(str(ROOT / "benchmarks" / "policies.py"))


def task(count, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 5, generator=generator)
    y = (x[:, 0] > 0).long()
    return (x, y), (x, y)


def test_a_run_returns_what_is_measured():
    plan = BENCH["base_plan"](60, 2.0, 4)
    found = BENCH["trained"](BENCH["network"], task(60, 0), plan, seed=0, rate=0.5, rule=Kalman())
    assert set(found) == {"loss", "accuracy", "seconds"}
    again = BENCH["trained"](BENCH["network"], task(60, 0), plan, seed=0, rate=0.5, rule=Kalman())
    assert again["loss"] == found["loss"]


def test_all_schedules_cost_the_same():
    plan = BENCH["base_plan"](60, 1.0, 4)
    found = BENCH["schedules"](BENCH["logistic"], task(40, 1)[0], plan, 0.5, {"places": 2, "rounds": 2})
    spent = [chosen.guarantee().epsilon for chosen, _ in found.values()]
    assert len(found) == 6
    assert spent == pytest.approx([spent[0]] * 6, rel=1e-3)
    assert max(spent) <= 1.001


def test_kept_results_are_json_and_hold_every_part():
    kept = json.loads((ROOT / "benchmarks" / "results" / "policies.json").read_text())
    assert {"dynamic", "clippings", "optimizers", "projections"} <= set(kept)
    rows, peaks = kept["projections"]["training"], kept["projections"]["memory"]
    for kind in ("SGD", "Adam"):
        assert rows[f"{kind}, r = 1"]["epsilon"] is None
        assert rows[f"{kind}, r = 50"]["epsilon"] > rows[f"{kind}, exact"]["epsilon"]
    assert set(peaks) == {"exact", "r = 1", "r = 5", "r = 10", "r = 50"}
