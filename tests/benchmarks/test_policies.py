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
    assert {"dynamic", "clippings", "optimizers", "projections", "joint"} <= set(kept)
    rows, peaks = kept["projections"]["training"], kept["projections"]["memory"]
    for kind in ("SGD", "Adam"):
        assert rows[f"{kind}, r = 1"]["epsilon"] is None
        assert rows[f"{kind}, r = 50"]["epsilon"] > rows[f"{kind}, exact"]["epsilon"]
    assert set(peaks) == {"exact", "r = 1", "r = 5", "r = 10", "r = 50"}


def test_the_simulated_noise_is_close_to_the_exact_accountants_and_learned_policies_keep_the_target():
    from policy import joint

    kept = json.loads((ROOT / "benchmarks" / "results" / "policies.json").read_text())["joint"]
    budget = joint.gaussian_budget(0.3, 1e-5)
    for text in list(kept["policies"].values())[:3]:
        policy = joint.LearnedPolicy.from_json(text)
        plan = policy.plan(target_epsilon=0.3, delta=1e-5, dataset_size=2000)
        assert plan.guarantee().epsilon <= 0.3
        exact = [plan.step_plan(step).noise_multiplier for step in range(plan.steps)]
        assert list(joint.noise_of(policy, budget)) == pytest.approx(exact, rel=0.03)
    for title in ("logistic, digits 3 and 5", "network, digits 3 and 5", "logistic, Adult"):
        assert all(row["epsilon"] <= 0.3 for row in kept[title].values())
        assert set(kept[title]) == {*joint.ARMS, "half that learning rate"}


def test_a_simulation_repeats_learns_and_is_drowned_by_little_budget():
    from policy import joint

    data = task(300, 0)
    policy = joint.replace(joint.PHASES, learning_rate=(2.0,) * 4, update=(1.0, *(0.0,) * 22))
    found = [joint.simulated(policy, data, records=300, budget=budget, seed=1) for budget in (3.0, 3.0, 0.01)]
    assert found[0] == found[1] < 0.69 < found[2]
    plain = joint.simulated(joint.replace(policy, update=()), data, records=300, budget=3.0, seed=1)
    assert plain == pytest.approx(found[0], rel=1e-4)
