"""Influence measured on public data against its closed form; policies that are learned, saved and taken elsewhere."""

import json
import math

import pytest
import torch
from torch import nn

from sordino import fit
from sordino.errors import InvalidArgument
from sordino.randomness import KeyedRNG
from sordino.research import (
    LearnedSchedule,
    estimate_influence,
    exponential_influence,
    learn_schedule,
    noise_influence,
    optimal_noise_schedule,
)
from sordino.research.noise_schedules import _Unrolled
from sordino.training import Plan


class Quadratic(nn.Module):
    """Loss ½·x·w² of one weight: curvature x."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, x):
        return 0.5 * x * self.weight**2


def quadratic(model, x):
    return model(x)


def logistic(model, x, y):
    return nn.functional.cross_entropy(model(x), y, reduction="none")


def task(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(count, 6, generator=generator)
    return features, (features[:, 0] + 0.3 * torch.randn(count, generator=generator) > 0).long()


def fixed():
    return KeyedRNG(seed=0, reproducible=True)


def test_on_a_quadratic_the_measured_influence_is_the_closed_form():
    # One curvature c and rate η: each step contracts by 1 − ηc, so noise of step t costs (1 − ηc)^(2(T−1−t)).
    found = estimate_influence(
        Quadratic(),
        quadratic,
        (torch.full((3,), 0.5, dtype=torch.float64),),
        steps=6,
        learning_rate=0.4,
        perturbation=0.3,
        places=6,
        rng=fixed(),
    )
    expected = [(1 - 0.4 * 0.5) ** (2 * (5 - t)) for t in range(6)]
    assert found == pytest.approx(expected, rel=1e-6)
    gamma = (1 - 0.4 * 0.5) ** 2
    assert found == pytest.approx(noise_influence(6, condition_number=1 / (1 - gamma)), rel=1e-6)
    assert optimal_noise_schedule(found, budget=1.0).values[0] > optimal_noise_schedule(found, budget=1.0).values[-1]


def test_the_model_is_left_alone_and_steps_between_are_interpolated():
    model = nn.Linear(6, 2)
    before = model.weight.detach().clone()
    found = estimate_influence(
        model, logistic, task(60), steps=9, learning_rate=0.5, perturbation=0.2, places=3, rng=fixed()
    )
    assert torch.equal(before, model.weight)
    assert len(found) == 9
    assert max(found) == 1.0
    assert math.log(found[2]) == pytest.approx((math.log(found[0]) + math.log(found[4])) / 2)


def test_an_exponential_is_found_again_in_noise():
    generator = torch.Generator().manual_seed(0)
    noisy = [math.exp(0.1 * t + 0.2 * float(torch.randn((), generator=generator))) for t in range(60)]
    fitted = exponential_influence(noisy)
    assert math.log(fitted[1] / fitted[0]) == pytest.approx(0.1, abs=0.01)
    assert fitted[-1] == 1


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"learning_rate": 0.0}, {"perturbation": -1.0}, {"places": 1}])
def test_values_out_of_range_are_refused(wrong):
    given = {"steps": 3, "learning_rate": 0.1, "perturbation": 0.1, **wrong}
    with pytest.raises(InvalidArgument, match=next(iter(wrong))):
        estimate_influence(nn.Linear(6, 2), logistic, task(10), **given)


def test_the_unrolled_steps_are_the_private_ones_without_noise():
    torch.manual_seed(0)
    model = nn.Linear(6, 2)
    features, labels = task(40)
    unrolled = _Unrolled(model, logistic, (features, labels), 0.4)
    rate = torch.tensor([0.7, 0.2, 0.5], dtype=torch.float64)
    found = float(unrolled.last_loss(torch.zeros(3, dtype=torch.float64), rate, fixed().new_stream("x")).detach())
    plan = Plan(noise_multiplier=0.0, max_grad_norm=0.4, sample_rate=1.0, steps=3, expected_batch_size=20.0, delta=1e-5)
    rates = rate.tolist()
    fit(
        model,
        logistic,
        (features[:20], labels[:20]),
        plan,
        optimizer=lambda p: torch.optim.SGD(p, lr=rates[0]),
        scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda t: rates[min(t, 2)] / rates[0]),
        progress=False,
    )
    expected = float(logistic(model, features[20:], labels[20:]).detach().mean())
    assert found == pytest.approx(expected, rel=1e-4)


def test_learning_keeps_the_budget_and_lowers_the_loss_it_learns_on():
    torch.manual_seed(0)
    model = nn.Linear(6, 2)
    given = {"steps": 8, "budget": 0.05, "max_grad_norm": 1.0, "expected_batch_size": 20.0, "learning_rate": 8.0}
    policy = learn_schedule(model, logistic, task(80), rounds=25, rng=fixed(), **given)
    assert sum(value**-2 for value in policy.noise_multiplier) == pytest.approx(0.05)
    unrolled = _Unrolled(model, logistic, task(80), 1.0)

    def loss_of(noise, rate):
        stddev, rates = (torch.tensor(part, dtype=torch.float64) for part in (noise, rate))
        stream = KeyedRNG(seed=1, reproducible=True).new_stream("held out")
        return sum(float(unrolled.last_loss(stddev / 20, rates, stream).detach()) for _ in range(30)) / 30

    uniform = [math.sqrt(8 / 0.05)] * 8
    assert loss_of(policy.noise_multiplier, policy.learning_rate) < loss_of(uniform, [8.0] * 8)


def test_a_learned_policy_is_a_plan_that_keeps_its_target():
    policy = LearnedSchedule(noise_multiplier=(3.0, 2.0, 1.0), learning_rate=(1.0, 0.5, 0.2))
    plan = Plan.for_epsilon(
        target_epsilon=1.0,
        delta=1e-5,
        sample_rate=1.0,
        steps=3,
        max_grad_norm=1.0,
        expected_batch_size=100.0,
        noise_shape=policy.noise_shape(),
    )
    assert plan.guarantee().epsilon <= 1.0
    first, last = plan.step_plan(0).noise_multiplier, plan.step_plan(2).noise_multiplier
    assert first / last == pytest.approx(3.0)


def test_files_are_checked():
    other = {"schema": 2, "noise_multiplier": [1.0], "learning_rate": [1.0]}
    for text in ("[]", json.dumps(other), json.dumps({"noise_multiplier": [1.0]})):
        with pytest.raises(InvalidArgument):
            LearnedSchedule.from_json(text)
    with pytest.raises(InvalidArgument):
        LearnedSchedule(noise_multiplier=(1.0,), learning_rate=(1.0, 2.0))
