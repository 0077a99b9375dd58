"""A wide residual network without batch statistics (floor 6): group normalisation and standardised weights.

Every layer treats records alone. Weights are standardised per output channel, which is a function of parameters only,
so it is the same for all records.

References:
    Zagoruyko, Komodakis 2016 (wide residual networks); Wu, He 2018 (group normalisation); Qiao et al. 2019 (weight
    standardisation); De et al. 2022, section 3 (both together in private training).
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from sordino import checks
from sordino.errors import InvalidArgument

__all__ = ["Block", "StandardisedConv", "wide_resnet"]

_GROUPS = 16
_ROUNDING = 1e-4


class StandardisedConv(nn.Module):
    """A convolution whose weights have mean 0 and variance 1 / fan-in for each output channel, times a learned gain."""

    def __init__(self, inputs: int, outputs: int, size: int, *, stride: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, size, size))
        self.gain = nn.Parameter(torch.ones(outputs, 1, 1, 1))
        self.bias = nn.Parameter(torch.zeros(outputs))
        self.stride, self.padding = stride, size // 2
        nn.init.kaiming_normal_(self.weight)

    def forward(self, x_BCHW: Float[Tensor, "B C H W"]) -> Float[Tensor, "B D I J"]:
        """(B, C, H, W) → (B, D, H/stride, W/stride)."""
        fan_in = self.weight[0].numel()
        centred = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        variance = centred.square().mean((1, 2, 3), keepdim=True)
        weight = self.gain * centred * torch.rsqrt(variance * fan_in + _ROUNDING)
        return F.conv2d(x_BCHW, weight, self.bias, stride=self.stride, padding=self.padding)


class Block(nn.Module):
    """Two convolutions with normalisation and ReLU before each, beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, *, stride: int) -> None:
        super().__init__()
        self.first_norm = nn.GroupNorm(min(_GROUPS, inputs), inputs)
        self.first = StandardisedConv(inputs, outputs, 3, stride=stride)
        self.second_norm = nn.GroupNorm(min(_GROUPS, outputs), outputs)
        self.second = StandardisedConv(outputs, outputs, 3)
        changes = stride != 1 or inputs != outputs
        self.shortcut = StandardisedConv(inputs, outputs, 1, stride=stride) if changes else None

    def forward(self, x_BCHW: Float[Tensor, "B C H W"]) -> Float[Tensor, "B D I J"]:
        """(B, C, H, W) → (B, D, H/stride, W/stride)."""
        active = F.relu(self.first_norm(x_BCHW))
        beside = x_BCHW if self.shortcut is None else self.shortcut(active)
        return self.second(F.relu(self.second_norm(self.first(active)))) + beside


def wide_resnet(shape: Sequence[int], classes: int, *, depth: int = 16, width: int = 4) -> nn.Module:
    """WRN-depth-width: three stages of (depth − 4) / 6 blocks with 16, 32 and 64 times `width` channels.

    Args:
        shape: (channels, height, width) of images in [0, 1], at least 8 × 8 pixels.
        classes: ≥ 2.
        depth: 6k + 4 with k ≥ 1: 10, 16, 22, 28, 40, …
        width: ≥ 1.

    Returns:
        A module (B, channels, height, width) → (B, classes) of logits; 2.75 million parameters for WRN-16-4.

    Example:
        >>> sum(p.numel() for p in wide_resnet((3, 32, 32), 10).parameters()) // 1000
        2753
    """
    checks.integer(1, width=width)
    blocks, rest = divmod(checks.integer(10, depth=depth) - 4, 6)
    if rest:
        raise InvalidArgument(f"depth must be 6k + 4, got {depth}. Take 10, 16, 22, 28 or 40.")
    channels = (16, 16 * width, 32 * width, 64 * width)
    parts: list[nn.Module] = [StandardisedConv(shape[0], channels[0], 3)]
    for stage in range(3):
        for block in range(blocks):
            inputs = channels[stage] if block == 0 else channels[stage + 1]
            parts.append(Block(inputs, channels[stage + 1], stride=2 if stage and block == 0 else 1))
    head = nn.Linear(channels[3], checks.integer(2, classes=classes))
    norm = nn.GroupNorm(min(_GROUPS, channels[3]), channels[3])
    return nn.Sequential(*parts, norm, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)
