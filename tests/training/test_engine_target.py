"""A target ε is for everything that an engine spends: phases, several models, checkpoints, and epochs past the plan."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from sordino import PrivacyEngine
from sordino.errors import BudgetExceeded, InvalidArgument

DELTA = 1e-5


def records():
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(64, 8, generator=generator), torch.randint(0, 3, (64,), generator=generator))


def private(engine, model, *, target=3.0, epochs=2, **options):
    return engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(records(), batch_size=16),
        target_epsilon=target,
        target_delta=DELTA,
        epochs=epochs,
        max_grad_norm=1.0,
        **options,
    )


def train(parts, epochs):
    model, optimizer, loader = parts
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()


def test_a_second_phase_is_calibrated_for_what_the_first_has_left():
    engine, model = PrivacyEngine(), nn.Linear(8, 3)
    train(private(engine, model, target=1.0), 2)
    first = engine.get_epsilon(DELTA)
    engine.detach()
    train(private(engine, model, target=3.0), 2)
    assert first <= 1.0
    assert 2.97 < engine.get_epsilon(DELTA) <= 3.0


def test_a_phase_for_which_nothing_is_left_is_refused_and_a_larger_target_helps():
    engine, model = PrivacyEngine(), nn.Linear(8, 3)
    train(private(engine, model, target=1.0), 2)
    engine.detach()
    for target in (1.0, 0.5):
        with pytest.raises(BudgetExceeded, match="target_epsilon"):
            private(engine, model, target=target)
    train(private(engine, model, target=2.0), 2)
    assert engine.get_epsilon(DELTA) <= 2.0


def test_what_was_spent_without_a_target_counts_as_well():
    engine, model = PrivacyEngine(), nn.Linear(8, 3)
    parts = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(records(), batch_size=16),
        noise_multiplier=2.0,
        max_grad_norm=1.0,
    )
    train(parts, 2)
    engine.detach()
    spent = engine.get_epsilon(DELTA)
    with pytest.raises(BudgetExceeded, match="spent"):
        private(engine, model, target=0.9 * spent)
    train(private(engine, model, target=spent + 1.0), 2)
    assert spent < engine.get_epsilon(DELTA) <= spent + 1.0


@pytest.mark.parametrize("options", [{}, {"poisson_sampling": False, "neighboring_relation": "replace_one"}])
def test_a_batch_past_the_epochs_is_refused_before_it_is_charged(options):
    engine, model = PrivacyEngine(), nn.Linear(8, 3)
    parts = private(engine, model, **options)
    train(parts, 2)
    spent = engine.get_epsilon(DELTA)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(BudgetExceeded, match="exceed_target"):
        train(parts, 1)
    assert engine.get_epsilon(DELTA) == spent <= 3.0
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))


def test_who_asks_for_it_goes_on_and_is_told_what_it_costs():
    engine, model = PrivacyEngine(), nn.Linear(8, 3)
    parts = private(engine, model, exceed_target=True)
    train(parts, 2)
    spent = engine.get_epsilon(DELTA)
    train(parts, 1)
    assert spent <= 3.0 < engine.get_epsilon(DELTA)
    with pytest.raises(InvalidArgument, match="exceed_target"):
        private(PrivacyEngine(), nn.Linear(8, 3), exceed_target="yes")


def test_epochs_that_end_early_leave_their_steps_for_later_ones():
    engine, model = PrivacyEngine(), nn.Linear(8, 3)
    model, optimizer, loader = private(engine, model, epochs=1)

    def one_step():
        x, y = next(iter(loader))
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    for _ in range(4):
        one_step()
    with pytest.raises(BudgetExceeded):
        one_step()
    assert engine.get_epsilon(DELTA) <= 3.0


def test_two_models_of_one_engine_share_the_target():
    engine, first, second = PrivacyEngine(), nn.Linear(8, 3), nn.Linear(8, 3)
    one = private(engine, first, target=2.0)
    with pytest.raises(BudgetExceeded, match="set aside"):
        private(engine, second, target=2.0)
    other = private(engine, second, target=4.0)
    for _ in range(2):
        train(one, 1)
        train(other, 1)
    assert 3.9 < engine.get_epsilon(DELTA) <= 4.0


def test_a_checkpoint_goes_on_to_the_end_of_its_plan_and_no_farther(tmp_path):
    engine, model = PrivacyEngine(), nn.Linear(8, 3)
    train(private(engine, model, epochs=4), 2)
    engine.save_checkpoint(path=tmp_path / "half.safetensors", module=model)
    resumed, again = PrivacyEngine(), nn.Linear(8, 3)
    parts = private(resumed, again, epochs=4)
    resumed.load_checkpoint(path=tmp_path / "half.safetensors", module=again)
    train(parts, 2)
    assert 2.97 < resumed.get_epsilon(DELTA) <= 3.0
    with pytest.raises(BudgetExceeded):
        train(parts, 1)


def test_going_back_to_an_older_checkpoint_does_not_exceed_the_target(tmp_path):
    engine, model = PrivacyEngine(), nn.Linear(8, 3)
    parts = private(engine, model, epochs=4)
    train(parts, 1)
    engine.save_checkpoint(path=tmp_path / "old.safetensors", module=model)
    train(parts, 2)
    engine.save_checkpoint(path=tmp_path / "new.safetensors", module=model)
    resumed, again = PrivacyEngine(), nn.Linear(8, 3)
    parts = private(resumed, again, epochs=4)
    resumed.load_checkpoint(path=tmp_path / "old.safetensors", module=again)
    with pytest.raises(BudgetExceeded):
        train(parts, 4)
    assert resumed.get_epsilon(DELTA) <= 3.0


def test_engines_that_take_turns_on_one_run_folder_keep_the_target(tmp_path):
    one = PrivacyEngine(run_folder=tmp_path / "run")
    first = private(one, nn.Linear(8, 3), target=2.0, epochs=3)
    train(first, 1)
    other = PrivacyEngine(run_folder=tmp_path / "run")
    train(private(other, nn.Linear(8, 3), target=2.0, epochs=3), 3)
    with pytest.raises(BudgetExceeded):
        train(first, 1)
    assert other.get_epsilon(DELTA) <= 2.0
    assert one.get_epsilon(DELTA) == pytest.approx(other.get_epsilon(DELTA))


def test_the_advice_past_the_epochs_goes_on_with_a_larger_target():
    engine, model = PrivacyEngine(), nn.Linear(8, 3)
    with pytest.raises(BudgetExceeded, match=r"after detach\(\).*larger target_epsilon"):
        train(private(engine, model, target=1.0), 3)
    engine.detach()
    train(private(engine, model, target=2.0), 2)
    assert 1.98 < engine.get_epsilon(DELTA) <= 2.0
