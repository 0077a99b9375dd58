"""Small models that train well under clipping and noise: logistic regression, a multilayer perceptron, a CNN.

Every layer treats records alone, and features are brought to a fixed scale record by record: without statistics of
the data, no record says anything about another, and the gradient of a record with large features is not clipped away.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sordino import checks
from sordino.errors import InvalidArgument
from sordino.shapes import Float

MODELS = ("logistic", "mlp", "cnn")
"""Names that `recommend` and the command line know."""


class UnitNorm(nn.Module):
    """Scales every record to ℓ2 norm `norm`; a record of zeros stays zero.

    Args:
        norm: > 0.
    """

    def __init__(self, norm: float = 1.0) -> None:
        super().__init__()
        self.norm = checks.positive(norm=norm)

    def forward(self, x_BD: Float[Tensor, "B D"]) -> Float[Tensor, "B D"]:
        """(B, D) → (B, D)."""
        return x_BD * (self.norm / x_BD.norm(dim=1, keepdim=True).clamp_min(1e-12))


class Centered(nn.Module):
    """Moves values in [0, 1] to [−1, 1]."""

    def forward(self, x: Float[Tensor, "B ..."]) -> Float[Tensor, "B ..."]:
        """Any shape → the same shape."""
        return 2 * x - 1


def logistic(shape: Sequence[int], classes: int) -> nn.Module:
    """Multinomial logistic regression on records of norm 2, started at zero: the loss is convex.

    Args:
        shape: shape of one record's features.
        classes: ≥ 2.

    Returns:
        A module (B, *shape) → (B, classes) of logits.

    Example:
        >>> sum(p.numel() for p in logistic((104,), 2).parameters())
        210
    """
    head = nn.Linear(_size(shape), checks.integer(2, classes=classes))
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return nn.Sequential(nn.Flatten(), UnitNorm(2.0), head)


def mlp(shape: Sequence[int], classes: int, *, width: int = 64) -> nn.Module:
    """One hidden layer of `width` tanh units on records of norm 2.

    Bounded activations keep the norms of gradients, and with them what clipping takes away, small (Papernot et al.
    2021, "Tempered sigmoid activations for deep learning with differential privacy").

    Args:
        shape: shape of one record's features.
        classes: ≥ 2.
        width: hidden units, ≥ 1.

    Returns:
        A module (B, *shape) → (B, classes) of logits.
    """
    inputs = _size(shape)
    hidden = nn.Linear(inputs, checks.integer(1, width=width))
    # Records have norm 2: weights of variance 1/4 give pre-activations of variance 1 whatever the dimension is.
    nn.init.normal_(hidden.weight, std=0.5)
    nn.init.zeros_(hidden.bias)
    head = nn.Linear(width, checks.integer(2, classes=classes))
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return nn.Sequential(nn.Flatten(), UnitNorm(2.0), hidden, nn.Tanh(), head)


def cnn(shape: Sequence[int], classes: int) -> nn.Module:
    """A small tanh CNN for images in [0, 1] of at least 16 × 16 pixels.

    Two convolutions (16 of 8 × 8 and 32 of 4 × 4, both with stride 2), each with a max pooling of 2 × 2, then 32 hidden
    units: 26 010 parameters for 1 × 28 × 28 pixels and 10 classes.

    Args:
        shape: (channels, height, width).
        classes: ≥ 2.

    Returns:
        A module (B, channels, height, width) → (B, classes) of logits.

    References:
        Papernot et al. 2021, table 1; Tramèr, Boneh 2021, appendix C.
    """
    channels, height, width = _image(shape)
    return nn.Sequential(
        Centered(),
        *_two_convolutions(channels),
        nn.Linear(32 * _side(height) * _side(width), 32),
        nn.Tanh(),
        nn.Linear(32, checks.integer(2, classes=classes)),
    )


def convolutions(shape: Sequence[int], classes: int) -> nn.Module:
    """The two tanh convolutions of `cnn` and a linear layer on all they give, for pictures of order 1 about 0.

    Without the hidden units there is less for the noise to fall on: 14 394 parameters for 1 × 28 × 28 pixels and 10
    classes.

    Args:
        shape: (channels, height, width), at least 16 × 16 pixels.
        classes: ≥ 2.

    Returns:
        A module (B, channels, height, width) → (B, classes) of logits.

    Example:
        >>> sum(p.numel() for p in convolutions((1, 28, 28), 10).parameters())
        14394
    """
    channels, height, width = _image(shape)
    head = nn.Linear(32 * _side(height) * _side(width), checks.integer(2, classes=classes))
    return nn.Sequential(*_two_convolutions(channels), head)


def _two_convolutions(channels: int) -> list[nn.Module]:
    return [
        nn.Conv2d(channels, 16, 8, stride=2, padding=2),
        nn.Tanh(),
        nn.MaxPool2d(2, stride=1),
        nn.Conv2d(16, 32, 4, stride=2),
        nn.Tanh(),
        nn.MaxPool2d(2, stride=1),
        nn.Flatten(),
    ]


def _image(shape: Sequence[int]) -> tuple[int, int, int]:
    if len(shape) != 3:
        raise InvalidArgument(
            f"shape must be (channels, height, width) for a CNN, got {tuple(shape)}. Choose logistic or mlp for tables."
        )
    channels, height, width = (checks.integer(1, shape=size) for size in shape)
    if min(height, width) < 16:
        raise InvalidArgument(
            f"shape must have at least 16 × 16 pixels for a CNN, got {height} × {width}. Choose logistic or mlp."
        )
    return channels, height, width


def _size(shape: Sequence[int]) -> int:
    return math.prod(checks.integer(1, shape=size) for size in shape)


def _side(pixels: int) -> int:
    """Pixels of one side after both convolutions and poolings."""
    first = (pixels + 4 - 8) // 2 + 1 - 1
    return (first - 4) // 2 + 1 - 1


# ----------------------------------------------------------------------------------------------------------------------
# A wide residual network without batch statistics: group normalization and standardized weights.
#
# Every layer treats records alone. Weights are standardized per output channel, which is a function of parameters only,
# so it is the same for all records.
#
# References:
#     Zagoruyko, Komodakis 2016 (wide residual networks); Wu, He 2018 (group normalization); Qiao et al. 2019 (weight
#     standardization); De et al. 2022, section 3 (both together in private training).
# ----------------------------------------------------------------------------------------------------------------------


_GROUPS = 16
_ROUNDING = 1e-4


class StandardizedConv(nn.Module):
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
        centered = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        variance = centered.square().mean((1, 2, 3), keepdim=True)
        weight = self.gain * centered * torch.rsqrt(variance * fan_in + _ROUNDING)
        return F.conv2d(x_BCHW, weight, self.bias, stride=self.stride, padding=self.padding)


class Block(nn.Module):
    """Two convolutions with normalization and ReLU before each, and a shortcut."""

    def __init__(self, inputs: int, outputs: int, *, stride: int) -> None:
        super().__init__()
        self.first_norm = nn.GroupNorm(min(_GROUPS, inputs), inputs)
        self.first = StandardizedConv(inputs, outputs, 3, stride=stride)
        self.second_norm = nn.GroupNorm(min(_GROUPS, outputs), outputs)
        self.second = StandardizedConv(outputs, outputs, 3)
        changes = stride != 1 or inputs != outputs
        self.shortcut = StandardizedConv(inputs, outputs, 1, stride=stride) if changes else None

    def forward(self, x_BCHW: Float[Tensor, "B C H W"]) -> Float[Tensor, "B D I J"]:
        """(B, C, H, W) → (B, D, H/stride, W/stride)."""
        active = F.relu(self.first_norm(x_BCHW))
        skipped = x_BCHW if self.shortcut is None else self.shortcut(active)
        return self.second(F.relu(self.second_norm(self.first(active)))) + skipped


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
    parts: list[nn.Module] = [StandardizedConv(shape[0], channels[0], 3)]
    for stage in range(3):
        for block in range(blocks):
            inputs = channels[stage] if block == 0 else channels[stage + 1]
            parts.append(Block(inputs, channels[stage + 1], stride=2 if stage and block == 0 else 1))
    head = nn.Linear(channels[3], checks.integer(2, classes=classes))
    norm = nn.GroupNorm(min(_GROUPS, channels[3]), channels[3])
    return nn.Sequential(*parts, norm, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)
