"""Small models that train well under clipping and noise (floor 6): logistic regression, a multilayer perceptron, a CNN.

Every layer treats records alone, and features are brought to a fixed scale record by record: without statistics of
the data, no record says anything about another, and the gradient of a record with large features is not clipped away.
"""

import math
from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor, nn

from sordino import checks
from sordino.errors import InvalidArgument

__all__ = ["MODELS", "UnitNorm", "cnn", "convolutions", "logistic", "mlp"]

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


class Centred(nn.Module):
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
        Centred(),
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
