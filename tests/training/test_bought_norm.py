"""The norm that a choice reads is released with the gradient as one Gaussian, and paid for."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from sordino import PrivacyEngine, fit
from sordino.clipping import AdaClip, QuantileClipping
from sordino.errors import InvalidArgument
from sordino.events import Gaussian
from sordino.gradients import GradientCapture
from sordino.randomness import KeyedRNG
from sordino.sampling import split_into_microbatches
from sordino.training import AdaptiveBudget, Plan, PrivateStep
from sordino.training.noisy_releases import NormRelease


def plan(**changes):
    values = {
        "noise_multiplier": 8.0,
        "max_grad_norm": 0.5,
        "sample_rate": 1.0,
        "steps": 2,
        "expected_batch_size": 50.0,
        "delta": 1e-5,
    }
    return Plan(**{**values, **changes})


class Lines:
    def __init__(self):
        self.events = []

    def append(self, *, step, event, epsilon):
        self.events.append(event)


def released(features, *, share, seed=0, **changes):
    """The first private gradient times the batch size, and what the second choice was told; and the charges."""
    told, moves, lines = [], [], Lines()

    def choose(step, seen):
        told.append(seen)
        return 8.0

    model = nn.Linear(features.shape[1], 1, bias=False)
    start = model.weight.detach().clone()
    fit(
        model, lambda model, x: model(x).sum(1), (features,), plan(**changes), progress=False, transcript=lines,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        on_step=lambda _: moves.append((start - model.weight.detach()).double() * 50),
        budget=AdaptiveBudget(epsilon=5.0, choose=choose, norm_budget_fraction=share),
        rng=KeyedRNG(seed=seed, reproducible=True),
    )  # fmt: skip
    return moves[0], told, lines.events


def told_norms(features, *, share, count):
    """The norms that `count` steps on the same model release."""
    model = nn.Linear(features.shape[1], 1, bias=False)
    capture, found = GradientCapture(model), []
    step = PrivateStep(capture, plan(steps=count), KeyedRNG(), norm=NormRelease(budget_fraction=share))
    for number in range(count):
        (chunk,) = split_into_microbatches(np.arange(len(features)), step=number)
        with step.capturing(chunk):
            model(features).sum().backward()
        step.add(chunk)
        step.finish()
        found.append(step.released_norm)
    return found


@pytest.mark.parametrize("share", [0.05, 0.5])
def test_sum_and_norm_have_the_noise_of_one_gaussian_of_their_joint_sensitivity(share):
    noise, told, events = released(torch.zeros(50, 40_000), share=share)
    expected = 8.0 * 0.5 / math.sqrt(1 - share)
    # 40 000 draws: 2 % is six standard errors.
    assert float(noise.std()) == pytest.approx(expected, rel=0.02)
    assert float(noise.std()) != pytest.approx(expected * 1.05, rel=0.02)
    assert events == [Gaussian(noise_multiplier=8.0)] * 2, "the step costs what it cost before"
    assert told[0].last_clipped_norm is None
    norms = told_norms(torch.zeros(50, 3), share=share, count=400)
    spread = 8.0 * 0.5 / math.sqrt(share) / 50
    assert float(torch.tensor(norms).std()) == pytest.approx(spread, rel=0.15)
    # Both together are worth what is charged: 1/z² is the sum of what each is worth.
    worth = (0.5 / expected) ** 2 + (0.5 / (spread * 50)) ** 2
    assert worth**-0.5 == pytest.approx(8.0, rel=1e-9)


def test_the_norm_is_that_of_the_clipped_sum():
    features = torch.zeros(50, 3)
    features[:, 0] = 7.0  # every record is clipped to 0.5 in one direction: the sum is 25 long
    norms = told_norms(features, share=0.5, count=400)
    assert sum(norms) / 400 == pytest.approx(0.5, abs=4 * 8.0 * 0.5 / math.sqrt(0.5) / 50 / math.sqrt(400))
    # One noisy sum in a space of many dimensions would say nothing of it.
    assert told_norms(features * 0, share=0.5, count=400) != norms


def test_one_record_moves_sum_and_norm_by_no_more_than_the_joint_sensitivity():
    generator = torch.Generator().manual_seed(0)
    bought = NormRelease(budget_fraction=0.3)
    for _ in range(200):
        total = torch.randn(6, generator=generator, dtype=torch.float64) * 3
        record = nn.functional.normalize(torch.randn(6, generator=generator, dtype=torch.float64), dim=0) * 0.5
        mechanism = plan().step_plan(0).mechanism
        joint, norm = bought.joint_scale(mechanism, [total])
        _, other = bought.joint_scale(mechanism, [total + record])
        moved = math.hypot(float(record.norm()), float(other - norm))
        assert moved <= joint.l2_sensitivity * (1 + 1e-12)
    # A record along the sum reaches it: the sensitivity is not larger than it need be.
    _, other = bought.joint_scale(mechanism, [total * (1 + 0.5 / total.norm())])
    assert math.hypot(0.5, float(other - bought.joint_scale(mechanism, [total])[1])) == pytest.approx(
        joint.l2_sensitivity
    )


def test_loops_and_checkpoints_carry_the_norm(tmp_path):
    def made(seen):
        def choose(step, released):
            seen.append(released.last_clipped_norm)
            return 8.0

        model = nn.Linear(3, 1, bias=False)
        engine = PrivacyEngine()
        parts = engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(TensorDataset(torch.ones(50, 3)), batch_size=50),
            noise_multiplier=8.0,
            max_grad_norm=0.5,
            clipping=QuantileClipping(count_noise=60.0),
            budget=AdaptiveBudget(epsilon=5.0, delta=1e-5, choose=choose, norm_budget_fraction=0.1),
        )
        return engine, *parts

    def step(parts):
        for (x,) in parts[3]:
            parts[1](x).sum(1).mean().backward()
            parts[2].step()

    first, again = [], []
    parts = made(first)
    step(parts)
    step(parts)
    parts[0].save_checkpoint(path=tmp_path / "a.safetensors", module=parts[1])
    step(parts)
    other = made(again)
    other[0].load_checkpoint(path=tmp_path / "a.safetensors", module=other[1])
    step(other)
    assert first[0] is None
    assert again == [first[2]]


@pytest.mark.parametrize("changes", [{"clipping": AdaClip()}, {"secure_mode": True}])
def test_sums_without_one_gaussian_are_refused_by_name(changes):
    with pytest.raises(InvalidArgument, match="norm_budget_fraction must be None"):
        released(torch.zeros(9, 3), share=0.1, **changes)
