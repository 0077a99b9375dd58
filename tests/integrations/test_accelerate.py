"""accelerate: its loop with private steps is that of the plain engine, bit by bit; what can't be private is refused."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("accelerate", reason="accelerate is not installed")

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState

from sordino import PrivacyEngine
from sordino.errors import InvalidArgument, PrivacyError
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
        if loader.ends_step:
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
