"""Captured under autocast: half-precision activations, single-precision parameters."""

import pytest
import torch
from torch import Tensor, nn

from sordino.clipping import FlatClipping
from sordino.gradients import GradientCapture


class Chain(nn.Module):
    """A linear layer, whose output is in half precision under autocast, and what comes behind it."""

    def __init__(self, behind: nn.Module, *, copies: int = 1, channels_first: bool = False) -> None:
        super().__init__()
        self.linear, self.behind = nn.Linear(8, 8), behind
        self.copies, self.channels_first = copies, channels_first

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        h = h.transpose(1, 2) if self.channels_first else h
        out = self.behind(*[h] * self.copies)
        return out if isinstance(out, Tensor) else out[0]


class Custom(nn.Module):
    """A bare matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight) @ self.weight.t()


MODELS = {
    "linear": lambda: Chain(nn.Linear(8, 3)),
    "layer norm": lambda: Chain(nn.LayerNorm(8)),
    "attention": lambda: Chain(nn.MultiheadAttention(8, 2, batch_first=True), copies=3),
    "lstm": lambda: Chain(nn.LSTM(8, 6, batch_first=True)),
    "gru": lambda: Chain(nn.GRU(8, 6, batch_first=True)),
    "custom": lambda: Chain(Custom()),
    "convolution": lambda: Chain(nn.Conv1d(8, 4, 3), channels_first=True),
    "transposed convolution": lambda: Chain(nn.ConvTranspose1d(8, 4, 3), channels_first=True),
    "prelu": lambda: Chain(nn.PReLU()),
}


def read(model: nn.Module, x: Tensor, *, bound: float, autocast: bool) -> tuple[Tensor, dict[nn.Parameter, Tensor]]:
    capture = GradientCapture(model)
    with capture.capturing(records=x.shape[0]):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = model(x)
        out.float().square().flatten(1).mean(1).sum().backward()
    squared = capture.squared_norms()
    sums: dict[nn.Parameter, Tensor] = {}
    capture.add_weighted_sums(FlatClipping().clip_factors(capture.squared_norm_bounds(), max_grad_norm=bound), sums)
    capture.detach()
    return squared, sums


def length(sums: dict[nn.Parameter, Tensor]) -> float:
    return sum(float(value.double().square().sum()) for value in sums.values()) ** 0.5


@pytest.mark.parametrize("name", MODELS)
def test_half_precision_activations_give_the_gradients_of_single_precision(name):
    torch.manual_seed(0)
    model, x = MODELS[name](), torch.randn(5, 4, 8)
    squared, sums = read(model, x, bound=1e6, autocast=False)
    squared_half, sums_half = read(model, x, bound=1e6, autocast=True)
    assert torch.allclose(squared_half, squared, rtol=0.05)
    assert all(value.dtype == torch.float32 for value in sums_half.values())
    assert length({p: value - sums_half[p] for p, value in sums.items()}) <= 0.03 * length(sums)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("size", [1.0, 1e4, 1e12])
def test_a_record_under_autocast_contributes_at_most_the_bound(name, size):
    torch.manual_seed(0)
    model = MODELS[name]()
    _, sums = read(model, torch.randn(1, 4, 8) * size, bound=1e-3, autocast=True)
    assert length(sums) <= 1e-3 * (1 + 1e-6)
