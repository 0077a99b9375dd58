"""Policies learned together: plans keep ε, the update is post-processing, the search finds what it is asked for."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from sordino import fit
from sordino.errors import InvalidArgument
from sordino.randomness import KeyedRNG
from sordino.research import LearnedPolicy, LearnedUpdate, learn_policy

IDENTITY = (1.0, *(0.0 for _ in range(22)))
POLICY = LearnedPolicy(
    steps=6,
    sample_rate=0.4,
    noise_shape=(2.0, 1.0, 0.5),
    max_grad_norm=(1.0, 0.5, 0.25),
    learning_rate=(1.0, 0.5),
    update=IDENTITY,
)


@pytest.mark.parametrize("epsilon", [0.3, 2.0])
def test_a_plan_has_the_policys_shape_and_never_more_than_the_target(epsilon):
    plan = POLICY.plan(target_epsilon=epsilon, delta=1e-5, dataset_size=500)
    assert 0.99 * epsilon < plan.guarantee().epsilon <= epsilon
    steps = [plan.step_plan(step) for step in range(6)]
    assert [step.max_grad_norm for step in steps] == [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]
    assert steps[0].noise_multiplier / steps[5].noise_multiplier == pytest.approx(4.0)
    assert {step.expected_batch_size for step in steps} == {200.0}
    assert POLICY.update_filter(plan).noise_stddev == tuple(step.gradient_noise_stddev for step in steps)
    assert replace(POLICY, update=()).update_filter(plan) is None


def test_the_network_is_what_its_formula_says_in_another_computation():
    weights = tuple(torch.randn(23, generator=torch.Generator().manual_seed(1)).tolist())
    update, memory = LearnedUpdate(weights=weights, noise_stddev=(0.5, 0.25, 0.25)), {}
    seen = [1.0, -2.0, 0.5]
    fast = slow = 0.0
    for step, gradient in enumerate(seen):
        fast, slow = 0.5 * fast + 0.5 * gradient, 0.9 * slow + 0.1 * gradient
        scale = update.noise_stddev[step]
        z = [gradient / scale, fast / (1 - 0.5 ** (step + 1)) / scale, slow / (1 - 0.9 ** (step + 1)) / scale]
        total = sum(a * b for a, b in zip(weights, z, strict=False))
        for unit in range(4):
            *w, b, v = weights[3 + 5 * unit : 8 + 5 * unit]
            total += v * math.tanh(sum(a * c for a, c in zip(w, z, strict=True)) + b)
        found = update.filter_gradient(torch.full((2, 3), gradient, dtype=torch.float64), memory)
        assert found.shape == (2, 3)
        assert found == pytest.approx(scale * total, rel=1e-6)
    with pytest.raises(InvalidArgument, match="noise_stddev"):
        update.filter_gradient(torch.zeros(2, 3), memory)


def test_the_identity_trains_as_no_update_and_the_state_is_in_the_optimizer():
    x = torch.randn(200, 3, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long()

    def losses(model, x, y):
        return nn.functional.cross_entropy(model(x), y, reduction="none")

    plan = POLICY.plan(target_epsilon=2.0, delta=1e-5, dataset_size=200)
    ends = []
    for rule in (
        POLICY.update_filter(plan),
        None,
        LearnedUpdate(weights=(0.5, *IDENTITY[1:]), noise_stddev=(1.0,) * 6),
    ):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        if rule is not None:
            rule.attach(optimizer)
        rng = KeyedRNG(seed=1, reproducible=True)
        result = fit(model, losses, (x, y), plan, optimizer=optimizer, progress=False, rng=rng)
        assert result.guarantee.epsilon == pytest.approx(plan.guarantee().epsilon)
        ends.append(model.weight.detach().clone())
    assert torch.allclose(ends[0], ends[1], atol=1e-6)
    assert not torch.allclose(ends[1], ends[2], atol=1e-3)


def test_the_search_learns_every_kind_of_setting_and_leaves_others_alone():
    goal = replace(POLICY, steps=12, sample_rate=0.1, update=(0.5, 0.5, *IDENTITY[2:]))

    def distance(policy, _):
        gap = (math.log(policy.steps / goal.steps)) ** 2 + math.log(policy.sample_rate / goal.sample_rate) ** 2
        gap += sum((a - b) ** 2 for a, b in zip(policy.update, goal.update, strict=True))
        return gap + sum(math.log(a / b) ** 2 for a, b in zip(policy.noise_shape, (1.0, 1.0, 1.0), strict=True))

    found = learn_policy(
        distance,
        POLICY,
        learn=("steps", "sample_rate", "noise_shape", "update"),
        rounds=30,
        population=40,
        rng=KeyedRNG(seed=3, reproducible=True),
    )
    assert distance(found, 0) < 0.1 * distance(POLICY, 0)
    assert (found.max_grad_norm, found.learning_rate) == (POLICY.max_grad_norm, POLICY.learning_rate)
    assert LearnedPolicy.from_json(found.to_json()) == found
    # What diverges is never kept.
    wild = learn_policy(
        lambda policy, _: math.nan if policy.learning_rate[0] > 1 else -policy.learning_rate[0],
        replace(POLICY, learning_rate=(0.5,)),
        learn=("learning_rate",),
        rng=KeyedRNG(seed=3, reproducible=True),
    )
    assert 0.8 < wild.learning_rate[0] <= 1.01


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"steps": 0}, "steps"),
        ({"sample_rate": 0.0}, "sample_rate"),
        ({"noise_shape": ()}, "noise_shape"),
        ({"max_grad_norm": (1.0, -1.0)}, "max_grad_norm"),
        ({"update": (1.0,)}, "weights"),
        ({"update": (math.nan, *IDENTITY[1:])}, "weights"),
    ],
)
def test_a_policy_that_means_nothing_is_refused(change, word):
    with pytest.raises(InvalidArgument, match=word):
        replace(POLICY, **change)


def test_a_search_of_nothing_or_of_an_unknown_setting_is_refused():
    for learn in ((), ("momentum",)):
        with pytest.raises(InvalidArgument, match="learn must"):
            learn_policy(lambda *_: 0.0, POLICY, learn=learn)
    with pytest.raises(InvalidArgument, match="policy must"):
        LearnedPolicy.from_json('{"schema": 9}')
    with pytest.raises(InvalidArgument, match="policy must"):
        LearnedPolicy.from_json("no policy")
