"""One private step: chunks add up, noise comes once, what is abandoned is gone."""

import numpy as np
import pytest
import torch
from torch import nn

from oracles import clipped_sum, per_record_gradients, relative_error
from sordino.errors import NonPrivateStep
from sordino.gradients import GradientCapture
from sordino.randomness import KeyedRNG
from sordino.sampling import Microbatch, split_into_microbatches
from sordino.training.plan import Plan
from sordino.training.step import PrivateStep


def plan(noise_multiplier=0.0, max_grad_norm=0.5, expected_batch_size=10.0):
    return Plan(
        noise_multiplier=noise_multiplier,
        max_grad_norm=max_grad_norm,
        sample_rate=0.5,
        steps=1,
        expected_batch_size=expected_batch_size,
        delta=1e-5,
    )


def step_of(model, plan):
    return PrivateStep(GradientCapture(model), plan, KeyedRNG())


def squares(model, batch):
    return model(batch[0]).square().sum()


def run(step, model, x, microbatch_size=None, number=0):
    for chunk in split_into_microbatches(np.arange(len(x)), step=number, microbatch_size=microbatch_size):
        with step.capturing(chunk):
            squares(model, (x[torch.from_numpy(chunk.indices)],)).backward()
        step.add(chunk)


@pytest.mark.parametrize("microbatch_size", [None, 1, 3, 7])
def test_the_gradient_is_the_clipped_sum_over_all_chunks_by_the_public_size(microbatch_size):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), torch.randn(7, 4)
    expected = clipped_sum(per_record_gradients(model, squares, (x,)), 0.5)
    step = step_of(model, plan())
    run(step, model, x, microbatch_size)
    step.finish()
    for parameter, total in zip(model.parameters(), expected, strict=True):
        assert relative_error(parameter.grad * 10, total) < 1e-5


def test_gradients_have_the_types_of_their_parameters():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3).bfloat16(), nn.Linear(3, 2))
    x, step = torch.randn(7, 4), step_of(model, plan())
    chunk = Microbatch(step=0, index=0, is_last=True, indices=np.arange(7))
    with step.capturing(chunk):
        model[1](model[0](x.bfloat16()).float()).square().sum().backward()
    step.add(chunk)
    totals = [step._sums[parameter].clone() / 10 for parameter in model.parameters()]
    step.finish()
    for parameter, total in zip(model.parameters(), totals, strict=True):
        assert total.dtype is torch.float32
        assert torch.equal(parameter.grad, total.to(parameter.dtype))


def test_an_empty_batch_is_noise_of_the_same_scale():
    model = nn.Linear(300, 200)
    step = step_of(model, plan(noise_multiplier=2.0, max_grad_norm=0.5))
    run(step, model, torch.zeros(0, 300))
    step.finish()
    noise = model.weight.grad.double()
    assert abs(float(noise.square().mean().sqrt()) / (2.0 * 0.5 / 10) - 1) < 0.02


def test_an_abandoned_batch_leaves_nothing_and_its_number_is_not_used_again():
    model, x = nn.Linear(4, 1), torch.ones(6, 4)
    step = step_of(model, plan())
    first, second = split_into_microbatches(np.arange(6), step=3, microbatch_size=3)
    with step.capturing(first):
        squares(model, (x[:3],)).backward()
    step.add(first)
    step.abandon()
    assert not step.is_open
    with pytest.raises(NonPrivateStep):
        step.capturing(second)
    with pytest.raises(NonPrivateStep):
        step.capturing(first)
    run(step, model, torch.zeros(2, 4), number=4)
    step.finish()
    assert float(model.weight.grad.abs().max()) == 0


def test_chunks_out_of_order_are_refused_and_the_batch_is_given_up():
    model = nn.Linear(4, 1)
    step = step_of(model, plan())
    first, second, third = split_into_microbatches(np.arange(6), step=0, microbatch_size=2)
    with step.capturing(first):
        squares(model, (torch.ones(2, 4),)).backward()
    step.add(first)
    assert step.expects(second)
    assert not step.expects(third)
    with pytest.raises(NonPrivateStep, match="next one"):
        step.capturing(third)
    assert not step.is_open


def test_a_chunk_can_not_be_added_twice():
    model = nn.Linear(4, 1)
    step = step_of(model, plan())
    (chunk,) = split_into_microbatches(np.arange(2), step=0)
    with step.capturing(chunk):
        squares(model, (torch.ones(2, 4),)).backward()
    step.add(chunk)
    with pytest.raises(NonPrivateStep):
        step.add(chunk)


def test_finishing_nothing_is_refused():
    with pytest.raises(NonPrivateStep, match="open"):
        step_of(nn.Linear(4, 1), plan()).finish()


def test_freezing_within_a_batch_is_refused():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    step = step_of(model, plan())
    run(step, model, torch.ones(2, 4))
    model[0].requires_grad_(False)
    with pytest.raises(NonPrivateStep, match="stay the same"):
        step.finish()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_later_session_goes_on_after_the_steps_of_an_earlier_one():
    step = PrivateStep(GradientCapture(nn.Linear(2, 1)), plan(), KeyedRNG(), after_step=6)
    assert step.last_step == 6
    with pytest.raises(NonPrivateStep, match="after step 6"):
        step.capturing(Microbatch(step=6, index=0, is_last=True, indices=np.arange(2)))


def test_half_precision_gradients_are_summed_in_single_precision():
    model = nn.Linear(64, 1, bias=False).to(torch.bfloat16)
    step = step_of(model, plan(max_grad_norm=1e6))
    chunks = split_into_microbatches(np.arange(400), step=0, microbatch_size=1)
    for chunk in chunks:
        with step.capturing(chunk):
            model(torch.full((1, 64), 1.0, dtype=torch.bfloat16)).sum().backward()
        step.add(chunk)
    step.finish()
    # bfloat16 would stop counting at 256.
    assert torch.equal(model.weight.grad, torch.full((1, 64), 40.0, dtype=torch.bfloat16))
