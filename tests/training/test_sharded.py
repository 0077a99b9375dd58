"""Models of `fully_shard`: every process holds rows of each parameter, and the result is that of one process."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from sordino.errors import InvalidArgument
from sordino.runs import RunFolder
from sordino.training import Plan
from sordino.training.exclusions import Option
from sordino.training.sharded import find_sharded_model
from sordino.verification import verify

WORKER = Path(__file__).with_name("shards.py")
NOISY = {"noise_multiplier": 0.5, "sample_rate": 0.5, "steps": 4}
CASES = {
    "flat": {"plan": NOISY, "optimizer": "adam"},
    "chunks": {"plan": NOISY, "microbatch_size": 5, "shard": "whole", "optimizer": "momentum"},
    "grouped": {"plan": NOISY, "clipping": "grouped", "shard": "parts", "average": True},
    "quantile": {"plan": NOISY, "clipping": "quantile", "microbatch_size": 7},
    "groupwise": {"plan": NOISY, "clipping": "grouped", "clipping_mode": "groupwise", "microbatch_size": 3},
    "low_memory": {"plan": NOISY, "microbatch_size": 1, "clipping_mode": "low_memory", "bucket": 1},
    "two_pass": {"plan": NOISY, "microbatch_size": 4, "clipping_mode": "two_pass", "bucket": 50},
    "some": {"plan": NOISY, "shard": "some", "optimizer": "momentum", "clipping_mode": "low_memory", "bucket": 50},
    "rare": {"plan": {"noise_multiplier": 1.0, "sample_rate": 0.1, "steps": 6}, "records": 5},
    "rare-lean": {
        "plan": {"noise_multiplier": 1.0, "sample_rate": 0.1, "steps": 6},
        "records": 5,
        "clipping_mode": "low_memory",
    },
    "loop": {"engine": 6, "noise": 1.0, "microbatch_size": 2, "optimizer": "adamw"},
    "loop-lean": {"engine": 6, "noise": 1.0, "microbatch_size": 2, "clipping_mode": "low_memory", "bucket": 1},
    "loop-quantile": {"engine": 12, "noise": 1.0, "clipping": "quantile", "shard": "whole", "epochs": 2},
}


def run(folder, processes, cases):
    """What every process saw of every case, in order of the processes; without processes, one unsharded model."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes else []
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *launcher, str(WORKER), json.dumps(cases), str(folder)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(processes or 1)]


def flat(outcome, what="weights"):
    assert what in outcome, outcome
    return np.concatenate([np.array(part) for part in outcome[what]])


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    cases = [{**case, "seed": 5} for case in CASES.values()]
    return dict(zip(CASES, run(tmp_path_factory.mktemp("alone"), 0, cases)[0], strict=True))


@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_sharded_model_is_trained_as_one_process_trains_it(alone, tmp_path, processes):
    """Rows that don't divide, fewer rows than processes, steps without records: one key, so one batch and one noise."""
    found = run(tmp_path, processes, [{**case, "seed": 5} for case in CASES.values()])
    for number, (name, expected) in enumerate(alone.items()):
        for one in (outcomes[number] for outcomes in found):
            assert np.abs(flat(one) - flat(expected)).max() < 1e-6, name
            assert one["epsilon"] == expected["epsilon"]
            # Afterwards torch's own averaging of gradients works again.
            assert one["sharded"]
            assert np.abs(flat(one, "ordinary") - flat(expected, "ordinary")).max() < 1e-5, name
            assert flat(one).tolist() == flat(found[0][number]).tolist()


def test_the_noise_of_all_shards_has_its_declared_variance_and_is_not_correlated(tmp_path):
    """What is learned from losses without gradient is noise alone, from a fresh key each time."""
    wide = {"wide": True, "plan": {"noise_multiplier": 2.0, "max_grad_norm": 0.5, "steps": 1}}
    found = run(tmp_path, 2, [wide, wide])
    first, second = (flat(outcome) * 24 / (2.0 * 0.5) for outcome in found[0])
    assert flat(found[1][0]).tolist() == flat(found[0][0]).tolist()
    spread = math.sqrt(2 / len(first))
    for noise in (first, second):
        assert abs((noise**2).mean() - 1) < 4 * spread
        for wrong in (0.95, 1.05):
            assert abs((noise**2).mean() / wrong**2 - 1) > 4 * spread
    half = len(first) // 2
    for one, other in ((first, second), (first[:half], first[half : 2 * half])):
        assert abs((one * other).mean()) < 4 / math.sqrt(len(one))


def test_a_run_goes_on_with_another_number_of_processes_and_unsharded(tmp_path):
    """Without noise and with all records in each batch, where a run was cut off can't be seen in its end."""
    plan = {"steps": 6}
    settings = {"plan": plan, "optimizer": "adam", "average": True, "every": 2}
    begun = [{**settings, "run": "run_folder", "name": name, "stop": 5} for name in ("one", "three")]
    assert all(one["stopped"] for outcomes in run(tmp_path, 2, begun) for one in outcomes)
    whole, unsharded = run(
        tmp_path, 0, [settings | {"every": None}, {**settings, "run": "resume_from", "name": "one"}]
    )[0]
    assert np.abs(flat(unsharded) - flat(whole)).max() < 1e-6
    for (outcome,) in run(tmp_path, 3, [{**settings, "run": "resume_from", "name": "three"}]):
        assert np.abs(flat(outcome) - flat(whole)).max() < 1e-6
        assert outcome["steps"] == 6
    for name in ("one", "three"):
        assert len(list(RunFolder.open(tmp_path / name))) == 7
        assert verify(tmp_path / name).passed
        saved = RunFolder.open(tmp_path / name).load_model()
        in_order = np.concatenate([saved[name].flatten() for name in whole["names"]])
        assert np.abs(in_order - flat(whole)).max() < 1e-6


@pytest.mark.slow
def test_an_own_loop_goes_on_with_another_number_of_processes_and_unsharded(tmp_path):
    settings = {"engine": 24, "optimizer": "adam", "name": "loop"}
    run(tmp_path, 2, [{**settings, "save": True, "epochs": 3}])
    whole, unsharded = run(tmp_path, 0, [{**settings, "epochs": 5}, {**settings, "load": True, "epochs": 2}])[0]
    assert np.abs(flat(unsharded) - flat(whole)).max() < 1e-6
    for (outcome,) in run(tmp_path, 3, [{**settings, "load": True, "epochs": 2}]):
        assert np.abs(flat(outcome) - flat(whole)).max() < 1e-6
        assert outcome["epsilon"] == whole["epsilon"]


@pytest.mark.slow
def test_every_optimizer_of_torch_keeps_its_state_in_shards(tmp_path):
    names = ("momentum", "adam", "adamw", "rmsprop", "adagrad", "adadelta", "nadam", "adamax")
    cases = [{"plan": NOISY, "optimizer": name, "seed": 5} for name in names]
    (expected,) = run(tmp_path, 0, cases)
    for outcomes in run(tmp_path, 2, cases):
        for name, one, other in zip(names, outcomes, expected, strict=True):
            assert np.abs(flat(one) - flat(other)).max() < 1e-6, name


@pytest.mark.slow
def test_passes_in_half_precision_work_on_shards_in_full(tmp_path):
    """The policy's type is that of the passes; sums, noise and steps are those of the shards."""
    case = {"plan": {"noise_multiplier": 0.5, "steps": 2}, "seed": 5}
    (expected,) = run(tmp_path, 0, [case])
    for (outcome,) in run(tmp_path, 2, [case | {"bfloat16": True}]):
        assert 0 < np.abs(flat(outcome) - flat(expected[0])).max() < 0.02


def test_after_a_refusal_the_model_is_as_before(tmp_path):
    cases = [{"plan": NOISY, "coupled": True, "shard": how} for how in ("blocks", "parts")]
    (expected,) = run(tmp_path, 0, cases)
    for outcomes in run(tmp_path, 2, cases):
        for one, other in zip(outcomes, expected, strict=True):
            assert one["error"] == other["error"] == "CoupledRecords"
            assert flat(one).tolist() == flat(other).tolist()
            assert np.abs(flat(one, "ordinary") - flat(other, "ordinary")).max() < 1e-6


REFUSED = {
    "offload": ({"shard": "offload"}, "CPUOffloadPolicy"),
    "columns": ({"shard": "columns"}, "sharded by rows"),
    "hsdp": ({"shard": "hsdp"}, "HSDP"),
    "tensor": ({"shard": "tensor"}, "tensor parallel"),
    "secure": ({"plan": {"noise_multiplier": 0.5, "secure_mode": True}}, "secure mode"),
    "correlated": ({"correlated": True, "plan": {"noise_multiplier": 0.5, "steps": 4}}, "correlated noise"),
    "adaclip": ({"clipping": "adaclip", "plan": {"noise_multiplier": 0.5}}, "AdaClip"),
    "compile": ({"compile": True}, "compile must be False"),
}


def test_what_shards_can_not_do_is_refused_by_name_before_data(tmp_path):
    cases = [{**case, "run": "run_folder", "name": name} for name, (case, _) in REFUSED.items()]
    for outcomes in run(tmp_path, 2, cases):
        for (name, (_, words)), outcome in zip(REFUSED.items(), outcomes, strict=True):
            assert outcome.get("error") == "InvalidArgument", (name, outcome)
            assert words in outcome["message"], name
            assert not (tmp_path / name).exists()


def test_the_older_way_of_sharding_is_refused_by_name():
    """It needs an accelerator to be made whole: this one is only of its class."""
    old = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    nn.Module.__init__(old)
    with pytest.raises(InvalidArgument, match="got FullyShardedDataParallel"):
        find_sharded_model(nn.Sequential(old), world_size=2, rank=0, device=torch.device("cpu"))


def test_budgets_that_adapt_are_refused_for_shards():
    plan = Plan(noise_multiplier=1.0, max_grad_norm=1.0, sample_rate=0.5, steps=3, expected_batch_size=12.0, delta=1e-5)
    plan.check_options({Option.FULLY_SHARD})
    with pytest.raises(InvalidArgument, match="a budget that adapts, got fully_shard"):
        plan.check_options({Option.FULLY_SHARD, Option.BUDGET})
