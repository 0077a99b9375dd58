"""A clipping method is either carried out with its own sensitivity, or refused; threshold and noise move together."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from conformance_adapter import clipped_sum, distance
from sordino import PrivacyEngine
from sordino.errors import InvalidArgument
from sordino.gradients import GradientCapture
from sordino.randomness import KeyedRNG
from sordino.sampling import split_into_microbatches
from sordino.training import Plan, PrivateStep


def test_a_clipping_method_that_is_not_offered_is_refused_and_not_replaced_by_no_clipping():
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loader = DataLoader(TensorDataset(torch.zeros(8, 4), torch.zeros(8).long()), batch_size=4)
    for clipping in ("adaptive", "ghost"):
        with pytest.raises(InvalidArgument, match="clipping must be one of"):
            PrivacyEngine().make_private(
                module=model,
                optimizer=optimizer,
                data_loader=loader,
                noise_multiplier=1.0,
                max_grad_norm=1.0,
                clipping=clipping,
            )


def test_one_replaced_row_moves_a_cross_entropy_sum_by_at_most_two_at_norm_one(library):
    torch.manual_seed(0)
    model, x, y = nn.Linear(4, 3), torch.randn(12, 4), torch.randint(0, 3, (12,))

    def loss(model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    before = clipped_sum(library, model, (x, y), loss, max_grad_norm=1.0)
    x[0] *= -1000
    assert distance(before, clipped_sum(library, model, (x, y), loss, max_grad_norm=1.0)) <= 2 * (1 + 1e-5)


def gradient_and_noise(plan):
    """The noiseless private gradient of hostile records, and the noise on records without gradient."""
    found = []
    for noise_multiplier, size in ((0.0, 1e6), (plan.noise_multiplier, 0.0)):
        torch.manual_seed(0)
        model = nn.Linear(100, 50)
        here = replace(plan, noise_multiplier=noise_multiplier)
        step = PrivateStep(GradientCapture(model), here, KeyedRNG())
        (chunk,) = split_into_microbatches(torch.arange(4).numpy(), step=0)
        with step.capturing(chunk):
            (size * model(torch.ones(4, 100))).sum().backward()
        step.add(chunk)
        step.finish()
        found.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    return float(found[0].norm()), float(found[1].std())


def test_a_threshold_ten_times_smaller_makes_gradient_and_noise_ten_times_smaller():
    plan = Plan(noise_multiplier=2.0, max_grad_norm=1.0, sample_rate=1.0, steps=1, expected_batch_size=4.0, delta=1e-5)
    norm, noise = gradient_and_noise(plan)
    smaller_norm, smaller_noise = gradient_and_noise(replace(plan, max_grad_norm=0.1))
    assert smaller_norm == pytest.approx(0.1 * norm, rel=1e-3)
    assert smaller_noise == pytest.approx(0.1 * noise, rel=0.1)
