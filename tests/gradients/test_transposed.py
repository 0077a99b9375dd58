"""Linear layers with the matrix as (inputs, outputs)."""

import pytest
import torch
from torch import nn

from agreement import check
from sordino.gradients import check_layer_rule, get_rule


class Conv1D(nn.Module):
    """The layer of Hugging Face's GPT-2, written down from its documentation: ``y = x W + b``."""

    __module__ = "transformers.pytorch_utils"

    def __init__(self, outputs, inputs):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(inputs, outputs)), nn.Parameter(torch.randn(outputs))

    def forward(self, x):
        rows = torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight)
        return rows.view(*x.shape[:-1], self.bias.numel())


@pytest.mark.parametrize("shape", [(5, 3), (5, 2, 3), (5, 70, 3), (2, 2, 2, 3)])
def test_the_layer_is_read_by_a_rule_and_exact(shape):
    torch.manual_seed(0)
    layer = Conv1D(4, 3)
    assert get_rule(layer) is not None
    check_layer_rule(layer, torch.randn(shape))


@pytest.mark.parametrize("records", [0, 1, 2, 5])
@pytest.mark.parametrize(("inputs", "outputs", "steps"), [(3, 4, 2), (30, 40, 3), (4, 3, 60)])
def test_every_kernel_is_exact(records, inputs, outputs, steps):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, inputs), Conv1D(outputs, inputs), nn.Tanh(), Conv1D(2, outputs))
    check(model, lambda m, x: m(x).square().sum((1, 2)), torch.randn(records, steps, 3))


def test_another_layer_of_that_name_is_left_to_the_fallback():
    class Other(Conv1D):
        def forward(self, x):
            return super().forward(x) * 2

    assert get_rule(Other(4, 3)) is None
    torch.manual_seed(0)
    check(Other(4, 3), lambda m, x: m(x).square().sum((1, 2)), torch.randn(5, 2, 3))
