import hashlib
import json
import os
import pickle
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from sordino import accounting
from sordino.clipping import QuantileClipping
from sordino.errors import InvalidArgument, UnsupportedModule
from sordino.events import SelfComposed
from sordino.ledger import Ledger
from sordino.randomness import KeyedRNG
from sordino.runs import RunFolder
from sordino.training.accumulators import ClippedSumAccumulator
from sordino.training.averaging import TailWeightAverage
from sordino.training.fit import fit
from sordino.training.plan import Plan
from sordino.verification import verify

PLAN = Plan(noise_multiplier=2.0, max_grad_norm=1.0, sample_rate=1.0, steps=12, expected_batch_size=100.0, delta=1e-5)
STEP = PLAN.step_event()
DATA = (
    torch.randn(100, 4, generator=torch.Generator().manual_seed(1)),
    torch.randint(0, 2, (100,), generator=torch.Generator().manual_seed(2)),
)


class Crash(Exception):
    """Stands for a process that ends in the middle."""


def losses(model, x, y):
    return nn.functional.cross_entropy(model(x), y, reduction="none")


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.05)


def run_until(crash, path, *, plan=PLAN, model=None, error=Crash, **options):
    def stop(done):
        if done == crash:
            raise error

    settings = {"optimizer": adam, "checkpoint_every": 4, "progress": False, "on_step": stop} | options
    where = {"resume_from": path} if Path(path).exists() else {"run_folder": path}
    return fit(net() if model is None else model, losses, DATA, plan, **where, **settings)


def crashed(path, at, **options):
    with pytest.raises(Crash):
        run_until(at, path, **options)
    return RunFolder.open(path)


def attempts(run):
    return [(line.step, line.attempt) for line in run]


def test_steps_after_the_last_checkpoint_are_taken_again_and_both_times_are_charged(tmp_path):
    run = crashed(tmp_path / "run", 7)
    assert attempts(run) == [(step, 1) for step in range(7)]
    result = run_until(None, run.path)
    assert attempts(run)[7:] == [(4, 2), (5, 2), (6, 2), *((step, 1) for step in range(7, 12))]
    assert run.event() == SelfComposed(event=STEP, count=15)
    assert result.steps == result.charged_steps == 12
    assert result.guarantee.epsilon == accounting.epsilon(SelfComposed(event=STEP, count=15), 1e-5).upper
    assert result.guarantee.epsilon > PLAN.guarantee().epsilon
    assert run.guarantee == result.guarantee
    assert list(run)[-1].epsilon == result.guarantee.epsilon
    assert verify(run).passed


def test_a_run_without_a_checkpoint_begins_again_and_pays_again(tmp_path):
    run = crashed(tmp_path / "run", 3)
    run_until(None, run.path)
    assert run.event() == SelfComposed(event=STEP, count=15)


def test_a_run_that_crashes_again_and_again_pays_for_every_attempt(tmp_path):
    run = crashed(tmp_path / "run", 5)
    for _ in range(3):
        crashed(run.path, 6)
    run_until(None, run.path)
    assert [line.attempt for line in run if line.step == 4] == [1, 2, 3, 4, 5]
    assert [segment.first_step for segment in run.segments()] == [0, 4, 4, 4, 4]
    assert run.guarantee.epsilon == accounting.epsilon(SelfComposed(event=STEP, count=5 + 3 * 2 + 8), 1e-5).upper
    assert verify(run).passed


def test_without_noise_a_resumed_run_ends_with_the_very_weights_of_one_that_was_never_cut(tmp_path):
    plan = replace(PLAN, noise_multiplier=0.0)
    options = {
        "plan": plan,
        "averaging": TailWeightAverage(fraction=0.8),
        "scheduler": lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 9], gamma=0.5),
    }
    whole = run_until(None, tmp_path / "whole", **options).model
    folder = tmp_path / "cut"
    crashed(folder, 6, **options)
    crashed(folder, 9, model=nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)), **options)
    parts = run_until(None, folder, **options).model.state_dict()
    assert all(torch.equal(parts[name], value) for name, value in whole.state_dict().items())
    assert all(torch.equal(RunFolder.open(folder).load_model()[name], value) for name, value in parts.items())


def test_clipping_bounds_that_adapt_go_on_from_where_they_were(tmp_path, monkeypatch):
    plan = replace(PLAN, clipping=QuantileClipping(count_noise=10.0))
    seen, learn = [], ClippedSumAccumulator.update_clip_norms

    def spy(self, released):
        before = self.state_dict()["bounds"]
        learn(self, released)
        seen.append((before, self.state_dict()["bounds"]))

    monkeypatch.setattr(ClippedSumAccumulator, "update_clip_norms", spy)
    run = crashed(tmp_path / "run", 6, plan=plan)
    assert seen[3][1] != seen[0][0]
    run_until(None, run.path, plan=plan)
    assert seen[6][0] == seen[3][1]
    assert verify(run).passed


def test_ctrl_c_leaves_a_checkpoint_so_that_no_step_is_repeated(tmp_path):
    first = run_until(6, tmp_path / "run", error=KeyboardInterrupt)
    assert first.interrupted
    run = RunFolder.open(tmp_path / "run")
    assert run.guarantee.epsilon == PLAN.guarantee(steps=6).epsilon
    assert verify(run).passed
    result = run_until(None, run.path)
    assert attempts(run) == [(step, 1) for step in range(12)]
    assert result.guarantee == run.guarantee == PLAN.guarantee()


def test_a_checkpoint_that_was_made_by_ctrl_c_holds_the_weights_and_not_their_average(tmp_path):
    result = run_until(10, tmp_path / "run", error=KeyboardInterrupt, averaging=TailWeightAverage(fraction=0.5))
    tensors = load_file(tmp_path / "run" / "checkpoint.safetensors")
    assert not torch.equal(tensors["/model/0.weight"], result.model[0].weight)
    assert torch.equal(tensors["/averaging/0"], result.model[0].weight)


def test_after_a_resume_claims_about_the_earlier_end_are_withdrawn(tmp_path):
    run_until(6, tmp_path / "run", error=KeyboardInterrupt)
    run = crashed(tmp_path / "run", 8)
    assert run.guarantee is None
    assert not verify(run).complete


def test_noise_and_batches_are_fresh_in_every_segment(tmp_path, monkeypatch):
    drawn, plain = [], KeyedRNG.stream

    def spy(self, purpose, *, step, tensor=0, rank=0):
        first = bytearray(32)
        plain(self, purpose, step=step, tensor=tensor, rank=rank).fill(memoryview(first))
        if purpose == "gaussian":
            drawn.append((purpose, step, hashlib.sha256(first).hexdigest()))
        return plain(self, purpose, step=step, tensor=tensor, rank=rank)

    monkeypatch.setattr(KeyedRNG, "stream", spy)
    run = crashed(tmp_path / "run", 7)
    run_until(None, run.path)
    assert sum(purpose == "gaussian" for purpose, _, _ in drawn) == 15
    assert len({bits for _, _, bits in drawn}) == len(drawn)
    commitments = [line.indices for line in run]
    assert len(set(commitments)) == 15
    assert len({segment.key for segment in run.segments()}) == 2


def test_a_seed_that_was_used_before_is_refused_because_its_noise_would_come_again(tmp_path):
    seeded = {"rng": KeyedRNG(seed=5, reproducible=True)}
    run = crashed(tmp_path / "run", 6, **seeded)
    with pytest.raises(InvalidArgument, match="noise would come again"):
        run_until(None, run.path, rng=KeyedRNG(seed=5, reproducible=True))
    result = run_until(None, run.path)
    assert "fixed seed: not for release" in result.guarantee.caveats
    assert [segment.seeded for segment in run.segments()] == [True, False]


def test_a_resumed_shuffled_epoch_is_paid_for_again(tmp_path):
    plan = replace(PLAN, poisson_sampling=False, sample_rate=0.25, neighboring_relation="replace_one")
    run = crashed(tmp_path / "run", 7, plan=plan, checkpoint_every=3)
    assert run.event() == plan.event(7)
    result = run_until(None, run.path, plan=plan)
    paid = sum(line.event == plan.step_event() for line in run)
    assert [line.step for line in run if line.event == plan.step_event()] == [0, 4, 6, 8]
    assert paid == 4
    exact = accounting.epsilon(
        SelfComposed(event=plan.step_event(), count=4), 1e-5, neighboring_relation=plan.neighboring_relation
    )
    assert result.guarantee.epsilon == exact.upper
    assert verify(run).passed


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"plan": replace(PLAN, noise_multiplier=1.0)}, "plan must be that of the run folder.*noise_multiplier"),
        ({"plan": replace(PLAN, steps=13, delta=1e-6)}, "plan must be that of the run folder.*delta, steps"),
        ({"optimizer": lambda p: torch.optim.SGD(p, lr=0.1)}, "optimizer must be Adam"),
        ({"averaging": TailWeightAverage()}, "averaging must be None"),
        ({"scheduler": lambda o: torch.optim.lr_scheduler.StepLR(o, 3)}, "schedule must be None"),
        ({"model": nn.Linear(4, 2), "optimizer": adam}, "same groups|module must be the one"),
    ],
    ids=["noise", "steps and delta", "optimizer", "averaging", "scheduler", "model"],
)
def test_a_checkpoint_of_something_else_is_refused_by_name_and_nothing_is_charged(tmp_path, changes, message):
    run = crashed(tmp_path / "run", 6)
    before = (run.path / "transcript.jsonl").read_bytes()
    with pytest.raises(InvalidArgument, match=message):
        run_until(None, run.path, **changes)
    assert (run.path / "transcript.jsonl").read_bytes() == before
    run_until(None, run.path)


class Bomb:
    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return (open, (str(self.target), "w"))


def test_a_pickle_in_place_of_the_checkpoint_is_refused_and_not_run(tmp_path):
    run = crashed(tmp_path / "run", 6)
    (run.path / "checkpoint.safetensors").write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    with pytest.raises(InvalidArgument, match="Pickle files"):
        run_until(None, run.path)
    assert not (tmp_path / "ran").exists()
    assert verify(run).item("checkpoint").status == "fail"


def test_a_run_that_is_complete_or_open_elsewhere_is_not_resumed(tmp_path):
    run = crashed(tmp_path / "run", 6)
    with RunFolder.resume(run.path), pytest.raises(InvalidArgument, match="another process is writing"):
        run_until(None, run.path)
    run_until(None, run.path)
    with pytest.raises(InvalidArgument, match="is complete"):
        run_until(None, run.path)


def test_two_resumes_of_one_checkpoint_are_both_charged_in_the_folder(tmp_path):
    run = crashed(tmp_path / "run", 6)
    saved = (run.path / "checkpoint.safetensors").read_bytes()
    crashed(run.path, 9)
    (run.path / "checkpoint.safetensors").write_bytes(saved)
    run_until(None, run.path)
    assert run.event() == SelfComposed(event=STEP, count=6 + 5 + 8)


def test_two_resumes_in_copies_of_the_folder_are_both_charged_in_the_ledger(tmp_path):
    ledger = Ledger(tmp_path / "privacy.db")
    account = ledger.declare("records", epsilon=20.0, delta=1e-5)
    crashed(tmp_path / "one", 6, ledger=account)
    before = _charged(account)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    for name in ("one", "two"):
        run_until(None, tmp_path / name, ledger=account)
        # Each folder is in order, and neither can know of the other: the ledger can.
        assert verify(tmp_path / name, ledger=tmp_path / "privacy.db").complete
    assert before >= 6
    assert _charged(account) == before + 8 + 8


def _charged(account):
    event = account.event()
    return event.count if isinstance(event, SelfComposed) else sum(part.count for part in event.events)


def test_a_failure_before_the_first_step_leaves_no_folder(tmp_path):
    with pytest.raises(UnsupportedModule, match="synthetic records"):
        fit(nn.Linear(9, 2), losses, DATA, PLAN, run_folder=tmp_path / "run", progress=False)
    assert os.listdir(tmp_path) == []


def test_run_and_resume_exclude_each_other_and_checkpoints_need_a_run(tmp_path):
    with pytest.raises(InvalidArgument, match="resume_from must be None"):
        fit(net(), losses, DATA, PLAN, run_folder=tmp_path / "a", resume_from=tmp_path / "b")
    with pytest.raises(InvalidArgument, match="checkpoint_every must be None"):
        fit(net(), losses, DATA, PLAN, checkpoint_every=3)
    with pytest.raises(InvalidArgument, match="checkpoint_every must be an integer ≥ 1"):
        fit(net(), losses, DATA, PLAN, run_folder=tmp_path / "a", checkpoint_every=0)
    assert os.listdir(tmp_path) == []


def test_a_finished_run_holds_plan_transcript_model_guarantee_and_passes_verification(tmp_path):
    result = run_until(None, tmp_path / "run")
    run = RunFolder.open(tmp_path / "run")
    assert Plan.from_json((run.path / "plan.json").read_text()) == PLAN
    assert run.guarantee == result.guarantee
    assert all(torch.equal(run.load_model()[name], value) for name, value in result.model.state_dict().items())
    found = verify(run)
    assert found.complete, found
    assert not [name for name in os.listdir(run.path) if "draft" in name]


def kill(tmp_path, kills, steps, seed):
    script = Path(__file__).parent / "kill_loop.py"
    arguments = [str(tmp_path / "run"), str(kills), str(seed), str(steps)]
    done = subprocess.run(
        [sys.executable, script, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def check_killed(tmp_path, *, kills, steps, seed):
    seen = kill(tmp_path, kills, steps, seed)
    assert seen["killed"] == kills
    assert seen["status"] == 0
    # Readable after every kill; no noise was ever drawn for a step that is not on the bill; nothing is ever taken off.
    assert all(look["readable"] and look["billed"] for look in [*seen["looks"], seen["last"]])
    counts = [look["lines"] for look in seen["looks"]]
    assert counts == sorted(counts)
    run = RunFolder.open(tmp_path / "run")
    lines = list(run)
    repeated = sum(line.attempt > 1 for line in lines)
    assert {line.step for line in lines} == set(range(steps))
    assert len(lines) == steps + repeated
    step = PLAN_OF_THE_LOOP.step_event()
    exact = accounting.epsilon(SelfComposed(event=step, count=steps + repeated), 1e-5).upper
    assert run.guarantee.epsilon == exact
    noise = [line.split()[-1] for line in (tmp_path / "noise.txt").read_text().splitlines()]
    assert len(set(noise)) == len(noise) <= len(lines)
    assert all(value.isfinite().all() for value in run.load_model().values())
    assert verify(run).complete
    return seen, repeated


PLAN_OF_THE_LOOP = replace(PLAN, sample_rate=0.1)


def test_killed_at_five_random_points_a_run_ends_with_every_attempt_on_the_bill(tmp_path):
    check_killed(tmp_path, kills=5, steps=40, seed=1)


@pytest.mark.slow
def test_killed_at_fifty_random_points_a_run_ends_with_every_attempt_on_the_bill(tmp_path):
    _, repeated = check_killed(tmp_path, kills=50, steps=150, seed=2)
    assert repeated > 0
