"""The optimizer's settings stay from the first part of a logical batch to its step, and follow no batch afterwards."""

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from sordino.errors import CoupledRecords, NonPrivateStep
from sordino.training.engine import PrivacyEngine
from sordino.training.loss_tracing.carried import CrossBatchState, OptimizerSettingsWatch


def private(microbatch_size=4, records=12):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return PrivacyEngine().make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(TensorDataset(torch.ones(records, 3)), batch_size=records),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        microbatch_size=microbatch_size,
        sample_rate=1.0,
        expected_batch_size=12,
    )


def train(model, optimizer, loader, after_step):
    for (features,) in loader:
        model(features).sum(1).mean().backward()
        optimizer.step()
        after_step()


SCHEDULERS = {
    "every step": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9),
    "a step within the batch": lambda optimizer: lr_scheduler.StepLR(optimizer, 2),
    "warm-up": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 100)),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_that_steps_with_every_part_of_a_batch_is_refused(name):
    model, optimizer, loader = private()
    scheduler = SCHEDULERS[name](optimizer)
    with pytest.raises(NonPrivateStep, match="is_last_microbatch"):
        train(model, optimizer, loader, scheduler.step)


def test_a_scheduler_may_count_parts_as_their_number_is_public():
    rates = set()
    for count in (11, 12, 13):
        model, optimizer, loader = private(records=count)
        scheduler = lr_scheduler.StepLR(optimizer, 1000)
        train(model, optimizer, loader, scheduler.step)
        rates.add((scheduler.last_epoch, optimizer.param_groups[0]["lr"]))
    assert len(rates) == 1


@pytest.mark.parametrize("records", [12, 9, 3])
def test_a_scheduler_that_steps_when_the_loader_ends_a_step_counts_logical_batches(records):
    model, optimizer, loader = private(records=records)
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
    for _ in range(3):
        train(model, optimizer, loader, lambda: scheduler.step() if loader.is_last_microbatch else None)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**3)


def test_a_learning_rate_set_by_hand_within_a_batch_is_refused():
    model, optimizer, loader = private()

    def lower():
        optimizer.param_groups[0]["lr"] *= 0.9

    with pytest.raises(NonPrivateStep, match="settings"):
        train(model, optimizer, loader, lower)


def test_without_parts_a_scheduler_may_step_with_every_batch():
    model, optimizer, loader = private(microbatch_size=None)
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
    for _ in range(3):
        train(model, optimizer, loader, scheduler.step)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**3)


def follow(sizes, rates):
    """Batches of these sizes, each followed by a learning rate, as the engine's hooks show them to the watch."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    watch = OptimizerSettingsWatch(optimizer, CrossBatchState())
    for size, rate in zip(sizes, rates, strict=True):
        watch.check_unchanged(begins=True, rows=size)
        optimizer.param_groups[0]["lr"] = rate


@pytest.mark.parametrize("sizes", [[7, 6, 5, 9, 8], [70, 60, 90, 80, 75], [2000, 1900, 2050, 2010]])
def test_a_schedule_that_agrees_with_a_few_batch_sizes_by_accident_goes_on(sizes):
    linear = [0.01 * (sizes[0] - (sizes[0] - sizes[1]) * place) for place in range(len(sizes))]
    follow(sizes, linear)


@pytest.mark.parametrize("sizes", [[7, 9, 6, 8, 5, 9, 10], [70, 81, 64, 75, 60], [2000, 1900, 2050, 2010]])
def test_a_rate_that_follows_the_batch_sizes_is_refused(sizes):
    with pytest.raises(CoupledRecords, match="settings"):
        follow(sizes, [0.01 * size for size in sizes])
