"""Steps that spare memory: the gradients of fast ones, from norms that are taken while the backward pass runs."""

import numpy as np
import pytest
import torch
from torch import nn

from sordino.clipping import AutomaticClipping, FlatClipping, GroupedClipping
from sordino.gradients import GradientCapture
from sordino.randomness import KeyedRNG
from sordino.sampling import Microbatch
from sordino.training import PrivateStep
from training.memory_models import MODELS, batch_for, gradients, plan_of


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "clipping",
    [FlatClipping(), AutomaticClipping(), GroupedClipping(by="layer"), GroupedClipping(by="parameter")],
    ids=lambda clipping: clipping.describe(),
)
def test_gradients_are_those_of_fast_steps(name, clipping):
    torch.manual_seed(0)
    model, x = MODELS[name]().eval(), batch_for(name)
    for chunks in (1, 2):
        expected = gradients(model, x, clipping=clipping, memory="fast", chunks=chunks)
        found = gradients(model, x, clipping=clipping, memory="low_memory", chunks=chunks)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_every_record_keeps_the_bound_alone():
    torch.manual_seed(0)
    for name, build in MODELS.items():
        model = build().eval()
        for record in batch_for(name).split(1):
            found = gradients(model, record, memory="low_memory")
            assert torch.cat([part.flatten() for part in found]).norm() <= 0.3 * (1 + 1e-6)


@pytest.mark.parametrize("memory", ["fast", "low_memory"])
def test_a_lean_step_measures_while_the_backward_pass_runs(memory):
    model = nn.Sequential(nn.GroupNorm(2, 6), nn.Flatten())
    capture = GradientCapture(model, low_memory=memory == "low_memory")
    step = PrivateStep(capture, plan_of(FlatClipping()), KeyedRNG(), clipping_mode=memory)
    with step.capturing(Microbatch(step=0, index=0, is_last=True, indices=np.arange(3))):
        step.backward(model(torch.randn(3, 6, 5)).square().sum(1))
    (use,) = capture.layer_calls()
    assert bool(use.grads) == (memory == "fast")
    capture.detach()
