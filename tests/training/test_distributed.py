"""Several processes are one run: the same sums, one noise, one bill, whatever each of them holds."""

import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from sordino.events import compose
from sordino.ledger import Ledger
from sordino.runs import RunFolder
from sordino.training.distributed import DistributedContext
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
        {"plan": {"noise_multiplier": 0.5, "secure_mode": True, "steps": 2}},
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
    run(tmp_path, 2, run="run_folder", every=2, stop=5, plan=plan)
    assert len(list(RunFolder.open(tmp_path / "run"))) == 5
    found = run(tmp_path, 3, run="resume_from", plan=plan)
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


def test_of_a_budget_that_adapts_the_first_process_decides_for_all(tmp_path):
    """Where each used a scale of its own, two models with one noise would give the sum away."""
    settings = {
        "seed": 5,
        "budget": 4.0,
        "norm_budget_fraction": 0.1,
        "plan": {"noise_multiplier": 2.0, "sample_rate": 0.5},
    }
    settings["plan"]["steps"] = 40
    (alone,) = run(tmp_path, 0, **settings)
    assert 3 < alone["steps"] < 40
    for one in run(tmp_path, 2, **settings):
        assert one["steps"] == alone["steps"]
        assert one["epsilon"] == alone["epsilon"] == 4.0
        assert np.abs(flat(one) - flat(alone)).max() < 1e-5


@pytest.mark.slow
def test_a_budget_goes_on_where_it_was_and_ends_own_loops_together(tmp_path):
    plan = {"noise_multiplier": 2.0, "sample_rate": 1.0, "steps": 40}
    ledger = Ledger(tmp_path / "ledger.db")
    ledger.create()
    account = ledger.declare("records", epsilon=16.0, delta=3e-5)
    run(tmp_path, 2, run="run_folder", every=2, stop=3, plan=plan, budget=8.0, epsilon=8.0)
    once = account.spent().epsilon
    found = run(tmp_path, 3, run="resume_from", plan=plan, budget=8.0, epsilon=8.0)
    assert len({one["steps"] for one in found}) == 1
    assert 3 < found[0]["steps"] < 40
    assert len(list(RunFolder.open(tmp_path / "run"))) == found[0]["steps"] + 1
    assert flat(found[0]).tolist() == flat(found[2]).tolist()
    # The budget was charged as a whole by the first segment.
    assert account.spent().epsilon == once
    assert verify(tmp_path / "run").passed
    settings = {"engine": 6, "noise": 2.0, "seed": 3, "budget": 0.8}
    (alone,) = run(tmp_path, 0, **settings)
    for one in run(tmp_path, 2, **settings):
        assert one["seen"] == alone["seen"] < 8
        assert np.abs(flat(one) - flat(alone)).max() < 1e-5


def test_processes_with_different_data_are_refused_everywhere(tmp_path):
    """The usual mistake: each process is given its own shard."""
    found = run(tmp_path, 2, uneven=3, plan={"noise_multiplier": 1.0})
    assert [one["error"] for one in found] == ["InvalidArgument"] * 2


def test_a_launcher_without_a_process_group_is_refused_before_data(tmp_path):
    """Each process would train a model of its own, with its own noise and its own bill."""
    script = "import sys; sys.path.insert(0, sys.argv[1]); import ranks; x, y = ranks.records(); "
    script += "ranks.fit(ranks.net(), ranks.loss, (x, y), ranks.plan_of({}), progress=False, run_folder=sys.argv[2])"
    done = subprocess.run(
        [sys.executable, "-c", script, str(WORKER.parent), str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "RANK": "0", "WORLD_SIZE": "2"},
    )
    assert "InvalidArgument: process group must be started" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("evenly", [True, False])
@pytest.mark.parametrize("records", [0, 1, 4, 7, 24])
def test_chunks_of_all_processes_hold_each_record_once_and_are_as_many_where_they_must(records, evenly):
    indices = np.arange(100, 100 + records)
    all_chunks = [
        DistributedContext(rank=number, world_size=3).local_microbatches(
            indices, step=5, microbatch_size=2, evenly=evenly
        )
        for number in range(3)
    ]
    assert sorted(np.concatenate([chunk.indices for chunks in all_chunks for chunk in chunks])) == indices.tolist()
    for chunks in all_chunks:
        assert [chunk.index for chunk in chunks] == list(range(len(chunks)))
        assert [chunk.is_last for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        assert {chunk.step for chunk in chunks} == {5}
    if evenly:
        assert len({len(chunks) for chunks in all_chunks}) == 1


def started(folder, processes, **settings):
    """Processes without a launcher: nobody ends the others when one dies."""
    with socket.socket() as port:
        port.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port.getsockname()[1])}
    return [
        subprocess.Popen(
            [sys.executable, str(WORKER), json.dumps(settings), str(folder)],
            env={**os.environ, **address, "OMP_NUM_THREADS": "1", "RANK": str(rank), "WORLD_SIZE": str(processes)},
        )
        for rank in range(processes)
    ]


def kill_within_a_step(folder, processes, **settings):
    """Kill the process that waits in the middle of a step; how long the others then took to end."""
    running = started(folder, processes, **settings)
    try:
        patience = time.monotonic() + 200
        while not (folder / "pid").exists() or not (folder / "pid").read_text():
            assert time.monotonic() < patience
            assert all(process.poll() is None for process in running)
            time.sleep(0.05)
        killed = int((folder / "pid").read_text())
        os.kill(killed, signal.SIGKILL)
        died = time.monotonic()
        for process in running:
            process.wait(timeout=60)
        return time.monotonic() - died
    finally:
        for process in running:
            process.kill()


@pytest.mark.parametrize(("processes", "victim"), [(2, 1), pytest.param(3, 0, marks=pytest.mark.slow)])
def test_when_one_process_is_killed_the_others_end_and_the_run_goes_on_with_another_number(tmp_path, processes, victim):
    ledger = Ledger(tmp_path / "ledger.db")
    ledger.create()
    account = ledger.declare("records", epsilon=1000.0, delta=1e-5)
    plan = {"noise_multiplier": 1.0, "sample_rate": 0.5, "steps": 8}
    halt = {"rank": victim, "after": 5}
    kill_within_a_step(tmp_path, processes, run="run_folder", every=2, plan=plan, epsilon=1000.0, halt=halt)
    others = [json.loads(file.read_text()) for file in tmp_path.glob("rank*.json")]
    assert len(others) == processes - 1
    for one in others:
        assert one["error"] == "SordinoError"
        assert "one that is gone" in one["message"]
        assert "resume_from=" in one["message"]
    # The step that was cut off is charged in both places: its records were read.
    assert len(list(RunFolder.open(tmp_path / "run"))) == 6
    assert account.spent().epsilon == pytest.approx(bill(ledger, tmp_path / "run", "six"))
    found = run(tmp_path, 5 - processes, run="resume_from", every=2, plan=plan, epsilon=1000.0)
    assert [one["steps"] for one in found] == [8] * (5 - processes)
    # Six steps, and those after the checkpoint of the fourth again: no step was paid for twice, and none forgotten.
    assert len(list(RunFolder.open(tmp_path / "run"))) == 10
    assert account.spent().epsilon == pytest.approx(bill(ledger, tmp_path / "run", "ten"))
    assert verify(tmp_path / "run").passed


def bill(ledger, folder, name):
    """What the lines of a transcript cost an account on which nothing else was charged."""
    account = ledger.declare(name, epsilon=1000.0, delta=1e-5)
    account.charge(compose([line.event for line in RunFolder.open(folder)]), note="all lines")
    return account.spent().epsilon
