"""Several processes are one run: the same sums, one noise, one bill, whatever each of them holds."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from sordino.ledger import Ledger
from sordino.runs import RunFolder
from sordino.verification import verify

WORKER = Path(__file__).with_name("ranks.py")


def run(folder, processes, **settings):
    """What every process saw, in order; without processes, one without a process group."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes else []
    for file in folder.glob("rank*.json"):
        file.unlink()
    done = subprocess.run(
        [sys.executable, *launcher, str(WORKER), json.dumps(settings), str(folder)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(processes or 1)]


def flat(outcome):
    return np.concatenate([np.array(part) for part in outcome["weights"]])


def test_two_and_three_processes_give_what_one_gives(tmp_path):
    """Full batches without noise, other initial weights in each process; chunks of odd sizes; DDP around the model."""
    (alone,) = run(tmp_path, 0)
    for processes, more in ((2, {}), (3, {"ddp": True, "microbatch_size": 5}), (2, {"clipping": "grouped"})):
        expected = alone if "clipping" not in more else run(tmp_path, 0, **more)[0]
        found = run(tmp_path, processes, **more)
        for one in found:
            assert one["steps"] == 3
            assert np.abs(flat(one) - flat(expected)).max() < 1e-6
            assert flat(one).tolist() == flat(found[0]).tolist()


def test_noise_is_added_once_with_its_declared_variance_and_is_the_same_everywhere(tmp_path):
    settings = {"wide": True, "plan": {"noise_multiplier": 2.0, "max_grad_norm": 0.5, "steps": 1}}
    found = run(tmp_path, 2, **settings)
    assert flat(found[0]).tolist() == flat(found[1]).tolist()
    z = flat(found[0]) * 24 / (2.0 * 0.5)
    assert abs((z**2).mean() - 1) < 4 * math.sqrt(2 / len(z))
    assert abs((z**2).mean() / 1.05**2 - 1) > 4 * math.sqrt(2 / len(z))
    assert found[0]["epsilon"] == found[1]["epsilon"]


@pytest.mark.slow
def test_adaptive_bounds_whole_numbers_and_correlated_noise_are_of_one_mind(tmp_path):
    for more in (
        {"clipping": "quantile", "plan": {"noise_multiplier": 0.5, "steps": 4}},
        {"plan": {"noise_multiplier": 0.5, "secure_noise": True, "steps": 2}},
        {"correlated": True, "plan": {"noise_multiplier": 0.5, "steps": 4, "sample_rate": 0.5}},
    ):
        found = run(tmp_path, 2, seed=7, **more)
        (alone,) = run(tmp_path, 0, seed=7, **more)
        assert flat(found[0]).tolist() == flat(found[1]).tolist()
        # The same key draws the same batches and the same noise, so only the order of additions differs.
        assert np.abs(flat(found[0]) - flat(alone)).max() < 1e-5


@pytest.mark.slow
def test_steps_without_records_are_steps_everywhere(tmp_path):
    settings = {"records": 5, "plan": {"noise_multiplier": 1.0, "sample_rate": 0.1, "steps": 12}}
    found = run(tmp_path, 3, **settings)
    assert [one["seen"] for one in found] == [list(range(1, 13))] * 3
    assert flat(found[0]).tolist() == flat(found[2]).tolist()


def test_a_run_is_written_once_and_goes_on_with_another_number_of_processes(tmp_path):
    plan = {"noise_multiplier": 1.0, "sample_rate": 0.5, "steps": 8}
    run(tmp_path, 2, run="run", every=2, stop=5, plan=plan)
    assert len(list(RunFolder.open(tmp_path / "run"))) == 5
    found = run(tmp_path, 3, run="resume", plan=plan)
    assert [one["steps"] for one in found] == [8, 8, 8]
    assert len({one["epsilon"] for one in found}) == 1
    # Five steps, and those from the checkpoint after the fourth again.
    assert len(list(RunFolder.open(tmp_path / "run"))) == 9
    assert verify(tmp_path / "run").passed
    assert RunFolder.open(tmp_path / "run").guarantee.epsilon == found[0]["epsilon"]


def test_the_account_pays_once_and_refuses_for_all(tmp_path):
    ledger = Ledger(tmp_path / "ledger.db")
    ledger.create()
    account = ledger.declare("records", epsilon=8.0, delta=1e-5)
    plan = {"noise_multiplier": 2.0, "sample_rate": 0.5, "steps": 6}
    found = run(tmp_path, 2, epsilon=8.0, plan=plan)
    assert "error" not in found[0]
    once = account.spent().epsilon
    assert found[0]["epsilon"] <= once * 1.5
    found = run(tmp_path, 2, epsilon=8.0, plan={**plan, "steps": 2000})
    assert [one["error"] for one in found] == ["BudgetExceeded"] * 2
    assert account.spent().epsilon == once
    assert [one.get("seen") for one in found] == [None, None]


@pytest.mark.slow
def test_an_own_loop_gives_in_several_processes_what_it_gives_in_one(tmp_path):
    (alone,) = run(tmp_path, 0, engine=24)
    for processes, more in ((2, {"ddp": True}), (3, {"microbatch_size": 3}), (2, {"sampler": True, "engine": 12})):
        for one in run(tmp_path, processes, **{"engine": 24, **more}):
            assert np.abs(flat(one) - flat(alone)).max() < 1e-6
            assert one["seen"] == 2


def test_an_own_loop_draws_one_logical_batch_and_charges_it_once(tmp_path):
    settings = {"engine": 6, "noise": 1.0, "seed": 3}
    found = run(tmp_path, 2, **settings)
    (alone,) = run(tmp_path, 0, **settings)
    assert flat(found[0]).tolist() == flat(found[1]).tolist()
    assert np.abs(flat(found[0]) - flat(alone)).max() < 1e-5
    assert {one["epsilon"] for one in found} == {alone["epsilon"]}
    assert [one["seen"] for one in found] == [8, 8]


def test_processes_with_different_data_are_refused_everywhere(tmp_path):
    """The usual mistake: each process is given its own shard."""
    found = run(tmp_path, 2, uneven=3, plan={"noise_multiplier": 1.0})
    assert [one["error"] for one in found] == ["InvalidArgument"] * 2
