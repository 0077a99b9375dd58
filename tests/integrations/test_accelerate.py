"""accelerate: its loop with private steps is that of the plain engine, bit by bit; what can't be private is refused."""

import fcntl
import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("accelerate", reason="accelerate is not installed")

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState

from sordino import NeighboringRelation, PrivacyEngine, accounting, verify
from sordino.errors import InvalidArgument, PrivacyError
from sordino.events import Gaussian, PoissonSampled, SelfComposed
from sordino.integrations.accelerate import prepare_private

OPTIONS = {"noise_multiplier": 0.8, "max_grad_norm": 0.5}


@pytest.fixture(autouse=True)
def _fresh_state():
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()
    yield
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()


def data():
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x[:, 0] > 0).long())


def parts():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return {"module": model, "optimizer": optimizer, "data_loader": DataLoader(data(), batch_size=8)}


def engine():
    return PrivacyEngine(seed=7, reproducible=True)


def plain(**more):
    model, optimizer, loader = engine().make_private(**parts(), **OPTIONS, **more)
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def by_accelerate(accelerator, made, *, clips=False):
    model, optimizer, loader = made
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            if clips:
                accelerator.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach().clone() for p in accelerator.unwrap_model(model).parameters()]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("more", [{}, {"microbatch_size": 3}])
@pytest.mark.parametrize("clips", [False, True])
def test_the_loop_is_that_of_the_plain_engine_bit_by_bit(more, clips):
    accelerator = Accelerator(cpu=True)
    made = prepare_private(accelerator, engine(), **parts(), **OPTIONS, **more)
    assert same(by_accelerate(accelerator, made, clips=clips), plain(**more))


def test_preparing_by_hand_after_make_private_is_the_same():
    accelerator = Accelerator(cpu=True)
    made = accelerator.prepare(*engine().make_private(**parts(), **OPTIONS))
    assert same(by_accelerate(accelerator, made), plain())


def test_what_was_charged_is_saved_and_loaded_with_the_state(tmp_path):
    first, accelerator = engine(), Accelerator(cpu=True)
    by_accelerate(accelerator, prepare_private(accelerator, first, **parts(), **OPTIONS))
    accelerator.save_state(str(tmp_path / "state"))
    AcceleratorState._reset_state()
    GradientState._reset_state()
    second, accelerator = PrivacyEngine(), Accelerator(cpu=True)
    prepare_private(accelerator, second, **parts(), **OPTIONS)
    assert second.get_epsilon(1e-5) == 0.0
    accelerator.load_state(str(tmp_path / "state"))
    assert second.get_epsilon(1e-5) == first.get_epsilon(1e-5) > 0


def begun_anew(one=None):
    AcceleratorState._reset_state()
    GradientState._reset_state()
    accelerator, one = Accelerator(cpu=True), one or PrivacyEngine()
    return accelerator, one, prepare_private(accelerator, one, **parts(), **OPTIONS)


def test_nothing_is_charged_twice_by_loading(tmp_path):
    accelerator, first, made = begun_anew()
    by_accelerate(accelerator, made)
    by_accelerate(accelerator, prepare_private(accelerator, first, **parts(), **OPTIONS))
    spent = first.get_epsilon(1e-5)
    accelerator.save_state(str(tmp_path / "state"))
    accelerator.load_state(str(tmp_path / "state"))
    assert first.get_epsilon(1e-5) == spent
    accelerator, second, _ = begun_anew()
    prepare_private(accelerator, second, **parts(), **OPTIONS)
    accelerator.load_state(str(tmp_path / "state"))
    accelerator.load_state(str(tmp_path / "state"))
    assert second.get_epsilon(1e-5) == spent > 0


def test_going_back_to_an_older_state_pays_for_what_newer_ones_showed(tmp_path):
    accelerator, first, made = begun_anew()
    for name in ("one", "two"):
        by_accelerate(accelerator, made)
        accelerator.save_state(str(tmp_path / name))
    accelerator, second, _ = begun_anew()
    accelerator.load_state(str(tmp_path / "one"))
    assert second.get_epsilon(1e-5) == first.get_epsilon(1e-5)


def test_a_state_without_a_bill_is_refused(tmp_path):
    model = nn.Linear(4, 2)
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.save_state(str(tmp_path / "state"))
    accelerator, one, _ = begun_anew()
    with pytest.raises(InvalidArgument, match="what was spent is not known"):
        accelerator.load_state(str(tmp_path / "state"))
    assert one.get_epsilon(1e-5) == 0.0


def test_bfloat16_trains():
    accelerator, one = Accelerator(cpu=True, mixed_precision="bf16"), engine()
    moved = by_accelerate(accelerator, prepare_private(accelerator, one, **parts(), **OPTIONS))
    assert all(p.isfinite().all() for p in moved)
    assert all(torch.allclose(a, b, atol=0.02) for a, b in zip(moved, plain(), strict=True))


def test_a_schedule_that_is_prepared_steps_once_a_logical_batch():
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = prepare_private(accelerator, engine(), **parts(), **OPTIONS, microbatch_size=3)
    schedule = accelerator.prepare(torch.optim.lr_scheduler.LambdaLR(optimizer.optimizer, lambda step: 0.5**step))
    for x, y in loader:
        accelerator.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        if loader.is_last_microbatch:
            schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**4)


def test_accumulation_is_refused_by_name():
    with pytest.raises(InvalidArgument, match="gradient_accumulation_steps"):
        prepare_private(Accelerator(cpu=True, gradient_accumulation_steps=2), engine(), **parts(), **OPTIONS)


def test_a_loss_scaler_is_refused_by_name(monkeypatch):
    accelerator = Accelerator(cpu=True)
    monkeypatch.setattr(type(accelerator), "mixed_precision", "fp16")
    with pytest.raises(InvalidArgument, match="mixed_precision"):
        prepare_private(accelerator, engine(), **parts(), **OPTIONS)


@pytest.mark.parametrize("name", ["module", "optimizer", "data_loader"])
def test_parts_that_were_prepared_before_are_refused(name):
    accelerator, given = Accelerator(cpu=True), parts()
    given[name] = accelerator.prepare(given[name])
    with pytest.raises(InvalidArgument, match="prepared"):
        prepare_private(accelerator, engine(), **given, **OPTIONS)


@pytest.mark.parametrize("names", [("optimizer",), ("data_loader",), ("module", "optimizer", "data_loader")])
def test_the_engine_itself_refuses_what_accelerate_made_of_loader_and_optimizer(names):
    accelerator, given = Accelerator(cpu=True), parts()
    given.update({name: accelerator.prepare(given[name]) for name in names})
    with pytest.raises((PrivacyError, InvalidArgument)):
        engine().make_private(**given, **OPTIONS)


# --- runs that never ended -------------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys
import torch
from accelerate import Accelerator
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from sordino import PrivacyEngine
from sordino.integrations.accelerate import prepare_private

place, steps, how = sys.argv[1], int(sys.argv[2]), sys.argv[3]
x = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
model = torch.nn.Linear(4, 2)
accelerator = Accelerator(cpu=True, project_dir=place)
model, optimizer, loader = prepare_private(
    accelerator, PrivacyEngine(), module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    data_loader=DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=8), noise_multiplier=0.8,
    max_grad_norm=0.5)
for number, (x, y) in enumerate(loader):
    accelerator.backward(F.cross_entropy(model(x), y))
    optimizer.step()
    optimizer.zero_grad()
    if number + 1 == steps:
        break
if how == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if how == "raised":
    raise KeyError("as in a script of the user's own")
if how == "ended":
    accelerator.end_training()
"""


def died(folder, steps, how):
    """A script that trains for so many steps in a process of its own and saves no state."""
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(folder), str(steps), how], capture_output=True, text=True, check=False
    )
    assert done.returncode == {"killed": -signal.SIGKILL, "raised": 1}.get(how, 0), done.stderr


def under(folder, one=None, **options):
    AcceleratorState._reset_state()
    GradientState._reset_state()
    accelerator, one = Accelerator(cpu=True, project_dir=str(folder)), one or PrivacyEngine()
    return accelerator, one, prepare_private(accelerator, one, **parts(), **(OPTIONS | options))


def epsilon_of(steps):
    event = SelfComposed(event=PoissonSampled(sample_rate=0.25, event=Gaussian(noise_multiplier=0.8)), count=steps)
    return accounting.epsilon(event, 1e-5).upper


@pytest.mark.parametrize("how", ["killed", "raised"])
def test_a_run_that_died_before_its_first_state_is_charged_when_it_is_begun_again(how, tmp_path, caplog):
    died(tmp_path, 3, how)
    accelerator, one, made = under(tmp_path)
    by_accelerate(accelerator, made)
    assert "never ended" in caplog.text
    assert one.get_epsilon(1e-5) == pytest.approx(epsilon_of(3 + 4), rel=1e-9)
    accelerator.end_training()
    runs = sorted((tmp_path / "sordino-runs").iterdir())
    assert [path.name for path in runs] == ["1"]
    assert verify(runs[0]).passed
    # Whoever ended a run begins another one.
    accelerator, one, made = under(tmp_path)
    by_accelerate(accelerator, made)
    assert one.get_epsilon(1e-5) == pytest.approx(epsilon_of(4), rel=1e-9)


def test_a_run_that_died_twice_is_charged_twice(tmp_path):
    died(tmp_path, 2, "killed")
    died(tmp_path, 1, "killed")
    accelerator, one, made = under(tmp_path)
    by_accelerate(accelerator, made)
    assert one.get_epsilon(1e-5) == pytest.approx(epsilon_of(2 + 1 + 4), rel=1e-9)


def test_a_run_that_ended_or_still_goes_on_is_not_gone_on_with(tmp_path):
    died(tmp_path, 2, "ended")
    accelerator, first, made = under(tmp_path)
    by_accelerate(accelerator, made)
    other, second, theirs = under(tmp_path)
    by_accelerate(other, theirs)
    assert first.get_epsilon(1e-5) == second.get_epsilon(1e-5) == pytest.approx(epsilon_of(4), rel=1e-9)
    assert len(list((tmp_path / "sordino-runs").iterdir())) == 3


def test_a_run_that_another_process_has_open_is_not_passed_over(tmp_path):
    """Workers of a killed process outlive it: its run may have died."""
    died(tmp_path, 2, "killed")
    lock = os.open(tmp_path / "sordino-runs" / "1", os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    _, one, (_, _, loader) = under(tmp_path)
    with pytest.raises(InvalidArgument, match="open elsewhere"):
        next(iter(loader))
    os.close(lock)
    next(iter(loader))
    assert one.get_epsilon(1e-5) == pytest.approx(epsilon_of(2 + 1), rel=1e-9)


def test_a_state_of_another_run_may_be_loaded_beside_one_that_died(tmp_path):
    accelerator, _, made = under(tmp_path)
    by_accelerate(accelerator, made)
    accelerator.save_state(str(tmp_path / "state"))
    accelerator.end_training()
    died(tmp_path, 2, "killed")
    accelerator, second, made = under(tmp_path)
    accelerator.load_state(str(tmp_path / "state"))
    by_accelerate(accelerator, made)
    assert second.get_epsilon(1e-5) == pytest.approx(epsilon_of(8), rel=1e-9)


def test_a_run_that_died_under_another_relation_is_not_mixed_with_this_one(tmp_path):
    died(tmp_path, 2, "killed")
    _, one, (_, _, loader) = under(tmp_path, neighboring_relation=NeighboringRelation.REPLACE_ONE)
    with pytest.raises(InvalidArgument, match="neighboring_relation"):
        next(iter(loader))
    assert one.get_epsilon(1e-5) == 0.0


@pytest.mark.filterwarnings("error")
def test_a_run_folder_that_was_deleted_is_an_error_while_it_is_needed_and_none_at_the_end(tmp_path):
    accelerator, one, (model, optimizer, loader) = under(tmp_path)
    batches = iter(loader)
    x, y = next(batches)
    accelerator.backward(F.cross_entropy(model(x), y))
    optimizer.step()
    shutil.rmtree(tmp_path / "sordino-runs")
    for further in (
        lambda: next(batches),
        lambda: accelerator.save_state(str(tmp_path / "state")),
        accelerator.end_training,
        one.detach,
    ):
        with pytest.raises(InvalidArgument, match="run folder must stay"):
            further()
    assert one.get_epsilon(1e-5) == pytest.approx(epsilon_of(1), rel=1e-9)


def test_a_deleted_run_folder_ends_a_process_without_a_traceback(tmp_path):
    script = KILLED + "\nimport shutil; shutil.rmtree(place + '/sordino-runs')\n"
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path), "2", "left"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    assert "Traceback" not in done.stderr, done.stderr


# --- the sampler that is named ----------------------------------------------------------------------------------------


def test_a_model_that_was_never_stepped_names_no_sampler(tmp_path):
    one = PrivacyEngine()
    assert one.guarantee(1e-5).sampler == "none"
    model, optimizer, loader = one.make_private(**parts(), **OPTIONS)
    one.make_private(**parts() | {"data_loader": DataLoader(data(), batch_size=16)}, **OPTIONS)
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert one.guarantee(1e-5).sampler == "Poisson sampling at rate 0.25"
    one.detach()
    assert one.guarantee(1e-5).sampler == "Poisson sampling at rate 0.25"
    second = PrivacyEngine()
    second.make_private(**parts() | {"data_loader": DataLoader(data(), batch_size=16)}, **OPTIONS)
    second.load_state_dict(one.state_dict())
    assert second.guarantee(1e-5).sampler == "Poisson sampling at rate 0.25"
