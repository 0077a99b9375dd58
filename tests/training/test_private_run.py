"""One private run: states, numbers, and charges that come before everything else."""

import numpy as np
import pytest
import torch
from torch import nn

from sordino.errors import BudgetExceeded, NonPrivateStep
from sordino.events import Gaussian, PoissonSampled, SelfComposed
from sordino.gradients import GradientCapture
from sordino.ledger import Ledger
from sordino.randomness import KeyedRNG
from sordino.sampling import split_into_microbatches
from sordino.training import AdaptiveBudget, Plan
from sordino.training.adaptive_budget import AdaptiveBudgetRun
from sordino.training.charging import ChargeLog, EpsilonTarget, OpenCharges, PlannedCharges
from sordino.training.private_run import PrivateRun, RunState

STEP = PoissonSampled(sample_rate=0.5, event=Gaussian(noise_multiplier=2.0))


def plan(**changes):
    values = {
        "noise_multiplier": 2.0,
        "max_grad_norm": 1.0,
        "sample_rate": 0.5,
        "steps": 4,
        "expected_batch_size": 5.0,
        "delta": 1e-5,
    }
    return Plan(**{**values, **changes})


def run_of(the_plan=None, **options):
    the_plan = plan() if the_plan is None else the_plan
    options = {"rng": KeyedRNG(), "charges": PlannedCharges(the_plan), **options}
    return PrivateRun(the_plan, **options)


def gather(run, model, batch):
    for chunk in split_into_microbatches(batch.indices, step=batch.step, microbatch_size=None):
        with run.step.capturing(chunk):
            model(torch.ones(len(batch.indices), 3)).sum().backward()
        run.step.add(chunk)


def test_a_batch_is_charged_gathered_and_released_in_this_order():
    model = nn.Linear(3, 2)
    run = run_of()
    run.attach(GradientCapture(model))
    assert run.state is RunState.IDLE
    for number, batch in enumerate(run.batches(dataset_size=10)):
        assert batch.step == number
        assert batch.event == STEP
        assert run.state is RunState.CHARGED
        gather(run, model, batch)
        assert run.state is RunState.GATHERING
        run.release(model.parameters())
        assert run.state is RunState.IDLE
    assert run.next_step == 4
    assert run.log.event() == SelfComposed(event=STEP, count=4)
    assert run.guarantee().epsilon == plan().guarantee().epsilon
    run.end()
    assert run.state is RunState.ENDED


def test_a_batch_is_recorded_after_its_ledger_charge_and_before_it_is_given_out(tmp_path):
    ledger = Ledger(tmp_path / "privacy.db")
    ledger.create()
    account = ledger.declare("data", epsilon=50.0, delta=1e-4)
    the_plan, seen = plan(), []
    charges = PlannedCharges(the_plan)
    run = run_of(
        the_plan,
        charges=charges,
        record=lambda batch: seen.append((batch.step, batch.receipt, {entry.digest for entry in account.history()})),
    )
    with charges.reserve(account):
        for batch in run.batches(dataset_size=10):
            number, receipt, history = seen[-1]
            assert (number, receipt) == (batch.step, batch.receipt)
            assert receipt in history
    assert len(seen) == 4


def test_a_batch_that_could_not_be_recorded_is_not_given_out_and_its_number_stays_free():
    fails, seen = [True], []

    def record(batch):
        if fails.pop() if fails else False:
            raise OSError("disk full")
        seen.append(batch.step)

    run = run_of(record=record)
    with pytest.raises(OSError, match="disk full"):
        next(run.batches(dataset_size=10))
    assert run.next_step == 0
    assert next(run.batches(dataset_size=10)).step == 0
    assert seen == [0]


def test_a_step_that_ctrl_c_left_in_the_record_counts():
    """The guarantee must never say less than a transcript whose last line was written."""

    def record(batch):
        raise KeyboardInterrupt

    run = run_of(record=record)
    with pytest.raises(KeyboardInterrupt):
        next(run.batches(dataset_size=10))
    assert run.next_step == 1
    assert run.guarantee().epsilon > 0


def test_the_number_of_an_abandoned_batch_is_used_up():
    model = nn.Linear(3, 2)
    run = run_of()
    run.attach(GradientCapture(model))
    batches = run.batches(dataset_size=10)
    gather(run, model, next(batches))
    run.abandon()
    second = next(batches)
    assert (second.step, run.next_step) == (1, 2)
    gather(run, model, second)
    run.release(model.parameters())
    with pytest.raises(NonPrivateStep):
        run.release(model.parameters())


def test_asking_for_the_next_batch_abandons_the_open_one():
    model = nn.Linear(3, 2)
    run = run_of()
    run.attach(GradientCapture(model))
    batches = run.batches(dataset_size=10)
    gather(run, model, next(batches))
    next(batches)
    assert run.state is RunState.CHARGED
    with pytest.raises(NonPrivateStep):
        run.release(model.parameters())


def test_batches_of_two_loops_never_mix():
    run = run_of()
    first, second = run.batches(dataset_size=10), run.batches(dataset_size=10)
    assert next(first).step == 0
    assert next(second).step == 1
    with pytest.raises(NonPrivateStep, match="one loop at a time"):
        next(first)
    assert next(second).step == 2


def test_nothing_is_given_out_after_the_end():
    run = run_of()
    run.end()
    with pytest.raises(NonPrivateStep, match="detach"):
        run.begin_batch()
    assert run.next_step == 0


def test_a_target_refuses_a_batch_and_charges_nothing():
    the_plan, log = plan(steps=0), ChargeLog()
    epsilon = plan().guarantee(steps=2).epsilon * (1 + 1e-6)
    target = EpsilonTarget(
        epsilon=epsilon, delta=1e-5, neighboring_relation=the_plan.neighboring_relation, accountant="auto"
    )
    charges = OpenCharges(the_plan, log=log, ledger=None, epoch_steps=3, target=target)
    run = run_of(the_plan, charges=charges, log=log)
    assert [run.begin_batch(begins_epoch=number == 0).step for number in range(2)] == [0, 1]
    with pytest.raises(BudgetExceeded):
        run.begin_batch()
    assert (run.next_step, log.count) == (2, 2)


def test_a_budget_that_is_used_up_ends_the_batches():
    the_plan = plan(sample_rate=1.0)
    adaptive = AdaptiveBudgetRun(AdaptiveBudget(epsilon=1.0, choose=lambda *_: 10.0 if _[0] < 2 else 0.1), the_plan)
    run = run_of(the_plan, charges=PlannedCharges(the_plan, adaptive=adaptive), adaptive=adaptive)
    assert [batch.step for batch in run.batches(dataset_size=3)] == [0, 1]
    assert run.guarantee().epsilon == run.epsilon() == 1.0


def test_running_epsilon_never_falls_below_that_of_the_steps_charged():
    run = run_of(plan(steps=30))
    for batch in run.batches(dataset_size=10):
        assert run.epsilon() >= plan().guarantee(steps=batch.step + 1).epsilon
    assert run.epsilon() == pytest.approx(plan(steps=30).guarantee().epsilon)


def test_under_shuffled_epochs_the_first_batch_of_a_pass_is_charged_for_all_of_it():
    the_plan = plan(poisson_sampling=False, neighboring_relation="replace_one", steps=0)
    log = ChargeLog()
    run = run_of(the_plan, charges=OpenCharges(the_plan, log=log, ledger=None, epoch_steps=2), log=log)
    for begins in (True, False, True, False):
        run.begin_batch(begins_epoch=begins)
    assert log.event() == SelfComposed(event=the_plan.step_event(0), count=2)


def test_a_resumed_run_numbers_no_step_twice():
    run = run_of()
    run.attach(GradientCapture(nn.Linear(3, 2)))
    run.begin_batch(draw=lambda: np.arange(3))
    run.resume(7)
    assert run.begin_batch(draw=lambda: np.arange(3)).step == 7
    run.resume(2)
    assert run.begin_batch(draw=lambda: np.arange(3)).step == 8
