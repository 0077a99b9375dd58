"""Every clipping method with every schedule and relation: bounded influence, the declared noise, the right charge."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from sordino import PrivacyEngine, accounting, fit
from sordino.clipping import (
    AutomaticClipping,
    FlatClipping,
    GlobalClipping,
    GroupedClipping,
    PsacClipping,
    QuantileClipping,
)
from sordino.definitions import NeighboringRelation
from sordino.errors import UnknownSampler
from sordino.events import Composed, Gaussian, PoissonSampled
from sordino.gradients import GradientCapture
from sordino.randomness import KeyedRNG
from sordino.sampling import split_into_microbatches
from sordino.schedules import CosineSchedule, ExponentialSchedule, LinearSchedule, ListSchedule, StepSchedule
from sordino.training import Plan
from sordino.training.step import PrivateStep

CLIPPINGS = [
    FlatClipping(),
    AutomaticClipping(),
    AutomaticClipping(stability=0.0),
    PsacClipping(),
    GlobalClipping(threshold=2.0),
    GroupedClipping(by="layer"),
    GroupedClipping(by="parameter", weights="proportional", inner=AutomaticClipping()),
    QuantileClipping(count_noise=30.0),
    QuantileClipping(count_noise=30.0, inner=GroupedClipping(by="parameter")),
]
NOISES = [
    1.5,
    LinearSchedule(start=2.0, end=1.0),
    ExponentialSchedule(start=3.0, end=1.0),
    ListSchedule(values=(1.0, 2.0, 1.5, 1.2)),
]
BOUNDS = [0.5, StepSchedule(start=0.8, factor=0.5, every=2), CosineSchedule(start=1.0, end=0.25)]
RELATIONS = [NeighboringRelation.ADD_OR_REMOVE_ONE, NeighboringRelation.REPLACE_ONE]


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def plan(**changes):
    values = {
        "noise_multiplier": 1.5,
        "max_grad_norm": 0.5,
        "sample_rate": 0.5,
        "steps": 4,
        "expected_batch_size": 8.0,
        "delta": 1e-5,
    }
    return Plan(**{**values, **changes})


def private_sum(model, records, the_plan, *, step=1, seed=1):
    """What one step hands to the optimizer, times the divisor, for a batch of `records` taken whole."""
    capture = GradientCapture(model)
    private = PrivateStep(capture, the_plan, KeyedRNG(seed=seed, reproducible=True))
    features, targets = records
    for chunk in split_into_microbatches(np.arange(len(features)), step=step, microbatch_size=3):
        with private.capturing(chunk):
            if chunk.num_records:
                rows = torch.from_numpy(chunk.indices)
                (model(features[rows]) - targets[rows]).square().sum().backward()
        private.add(chunk)
    private.finish()
    capture.detach()
    divisor = the_plan.step_plan(step).expected_batch_size
    flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters()]) * divisor
    model.zero_grad(set_to_none=True)
    return flat.double()


def records(count, *, scale=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 3, generator=generator) * scale, torch.randn(count, 2, generator=generator)


@pytest.mark.parametrize("clipping", CLIPPINGS, ids=lambda clipping: clipping.describe())
@pytest.mark.parametrize("bound", BOUNDS, ids=lambda bound: type(bound).__name__)
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_one_record_moves_the_sum_by_at_most_its_bound(clipping, bound, scale):
    the_plan = plan(noise_multiplier=0.0, clipping=clipping, max_grad_norm=bound)
    features, targets = records(7, scale=scale)
    model, most = network(), the_plan.step_plan(1).max_grad_norm
    whole = private_sum(model, (features, targets), the_plan)
    for left_out in (0, 6):
        kept = [row for row in range(7) if row != left_out]
        rest = private_sum(model, (features[kept], targets[kept]), the_plan)
        assert float((whole - rest).norm()) <= most * (1 + 1e-5)


@pytest.mark.parametrize("clipping", CLIPPINGS, ids=lambda clipping: clipping.describe())
def test_a_record_that_is_not_finite_in_one_layer_adds_nothing_in_any(clipping):
    the_plan = plan(noise_multiplier=0.0, clipping=clipping)
    features, targets = records(5)
    model = network()
    without = private_sum(model, (features[:4], targets[:4]), the_plan)
    targets[4] = math.inf
    assert torch.equal(private_sum(model, (features, targets), the_plan), without)


@pytest.mark.parametrize("clipping", CLIPPINGS, ids=lambda clipping: clipping.describe())
@pytest.mark.parametrize("neighboring_relation", RELATIONS, ids=lambda neighboring_relation: neighboring_relation.value)
@pytest.mark.parametrize("noise", NOISES, ids=lambda noise: type(noise).__name__)
def test_the_noise_is_what_the_step_is_charged_for(clipping, neighboring_relation, noise):
    the_plan = plan(
        noise_multiplier=noise, clipping=clipping, neighboring_relation=neighboring_relation, max_grad_norm=BOUNDS[1]
    )
    model = nn.Linear(300, 200)
    empty = torch.zeros(0, 300), torch.zeros(0, 200)
    for step in (0, 3):
        now = the_plan.step_plan(step)
        measured = float(private_sum(model, empty, the_plan, step=step).square().mean().sqrt())
        # What the noise is worth for the gradient alone, and for the counts beside it.
        gradient = measured / now.sensitivity
        cost = gradient**-2
        if isinstance(clipping, QuantileClipping):
            groups = len(clipping.groups({name: value.numel() for name, value in model.named_parameters()}))
            cost += (groups / 4) * (neighboring_relation.sensitivity_factor / clipping.count_noise) ** 2
        assert cost**-0.5 == pytest.approx(now.noise_multiplier, rel=0.02)
        assert now.event == Gaussian(noise_multiplier=now.noise_multiplier)
        assert the_plan.step_event(step) == PoissonSampled(sample_rate=0.5, event=now.event)


def test_a_two_percent_weaker_noise_would_have_been_seen():
    weaker = float(private_sum(nn.Linear(300, 200), (torch.zeros(0, 300), torch.zeros(0, 200)), plan()).norm())
    assert weaker / math.sqrt(300 * 200 + 200) / 0.5 * 0.95 != pytest.approx(1.5, rel=0.02)


@pytest.mark.parametrize("rate", [0.1, LinearSchedule(start=0.05, end=0.2)], ids=lambda rate: type(rate).__name__)
@pytest.mark.parametrize("noise", NOISES[:3], ids=lambda noise: type(noise).__name__)
def test_the_guarantee_composes_the_steps_as_they_run(rate, noise):
    the_plan = plan(noise_multiplier=noise, sample_rate=rate, steps=6)
    steps = [the_plan.step_event(step) for step in range(6)]
    composed = accounting.epsilon(accounting_event(steps), 1e-5).upper
    assert the_plan.guarantee().epsilon == pytest.approx(composed, rel=1e-6)
    assert the_plan.guarantee(steps=3).epsilon < the_plan.guarantee().epsilon


def accounting_event(steps):
    return Composed(events=tuple(steps))


@pytest.mark.parametrize("noise", NOISES[1:3], ids=lambda noise: type(noise).__name__)
def test_a_schedule_is_calibrated_as_a_whole_and_keeps_its_shape(noise):
    made = Plan.for_epsilon(
        target_epsilon=2.0,
        delta=1e-5,
        sample_rate=0.1,
        steps=20,
        max_grad_norm=1.0,
        expected_batch_size=10.0,
        noise_shape=noise,
    )
    assert 1.99 < made.guarantee().epsilon <= 2.0
    ratio = made.step_plan(0).noise_multiplier / made.step_plan(19).noise_multiplier
    assert ratio == pytest.approx(noise.value(0, 20) / noise.value(19, 20))


@pytest.mark.parametrize("clipping", CLIPPINGS, ids=lambda clipping: clipping.describe())
def test_a_plan_with_every_part_scheduled_survives_json_and_trains(clipping):
    made = plan(
        clipping=clipping,
        noise_multiplier=ExponentialSchedule(start=3.0, end=1.5),
        max_grad_norm=StepSchedule(start=1.0, factor=0.5, every=2),
        sample_rate=LinearSchedule(start=0.2, end=0.6),
        expected_batch_size=LinearSchedule(start=8.0, end=24.0),
    )
    assert Plan.from_json(made.to_json()) == made
    model, (features, targets) = network(), records(40)
    before = [parameter.clone() for parameter in model.parameters()]
    loss = lambda module, x, y: (module(x) - y).square().mean(1)  # noqa: E731
    result = fit(model, loss, (features, targets), made, progress=False)
    assert result.guarantee.epsilon == pytest.approx(made.guarantee().epsilon)
    assert all((old != new).any() for old, new in zip(before, model.parameters(), strict=True))


def test_adapted_bounds_approach_the_quantile_of_the_norms():
    the_plan = plan(
        noise_multiplier=0.5,
        clipping=QuantileClipping(count_noise=5.0, quantile=0.5, learning_rate=0.5),
        sample_rate=1.0,
        steps=60,
        max_grad_norm=0.01,
        expected_batch_size=400.0,
    )
    model = nn.Linear(3, 1, bias=False)
    features = torch.randn(400, 3, generator=torch.Generator().manual_seed(3))
    capture = GradientCapture(model)
    private = PrivateStep(capture, the_plan, KeyedRNG(seed=5, reproducible=True))
    for step in range(60):
        (chunk,) = split_into_microbatches(np.arange(400), step=step)
        with private.capturing(chunk):
            model(features).sum().backward()
        private.add(chunk)
        private.finish()
    (bound,) = private.bounds.state_dict()["bounds"]
    median = float(features.norm(dim=1).median())
    assert bound == pytest.approx(median, rel=0.1)


def test_shuffled_epochs_take_no_schedule():
    with pytest.raises(UnknownSampler, match="schedule"):
        plan(
            poisson_sampling=False,
            neighboring_relation=NeighboringRelation.REPLACE_ONE,
            noise_multiplier=LinearSchedule(start=2.0, end=1.0),
        )


@pytest.mark.parametrize("clipping", ["per_layer", "automatic", "psac", "global", QuantileClipping(count_noise=3.0)])
def test_an_own_loop_takes_methods_and_schedules_and_is_charged_step_by_step(clipping):
    model, data = network(), TensorDataset(*records(40))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    noise = StepSchedule(start=2.0, factor=0.75, every=3)
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(data, batch_size=8),
        noise_multiplier=noise,
        max_grad_norm=LinearSchedule(start=1.0, end=0.5, over=10),
        clipping=clipping,
    )
    for features, targets in loader:
        optimizer.zero_grad()
        (model(features) - targets).square().sum(1).mean().backward()
        optimizer.step()
    spent = [PoissonSampled(sample_rate=0.2, event=Gaussian(noise_multiplier=noise.value(step))) for step in range(5)]
    assert engine.get_epsilon(1e-5) == pytest.approx(accounting.epsilon(accounting_event(spent), 1e-5).upper, rel=1e-6)
