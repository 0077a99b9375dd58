"""Residual networks with group normalization, for images of 32 × 32."""

from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["ResNet18", "WideResNet"]


class Residual(nn.Module):
    """Two 3 × 3 convolutions around an identity, or a projection where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first_norm, self.second_norm = nn.GroupNorm(16, inputs), nn.GroupNorm(16, outputs)
        self.first = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.across = None if (inputs, stride) == (outputs, 1) else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        hidden = F.relu(self.first_norm(x_BCHW))
        short = x_BCHW if self.across is None else self.across(hidden)
        return short + self.second(F.relu(self.second_norm(self.first(hidden))))


class WideResNet(nn.Module):
    """WRN-16-4: three stages of two residual blocks, 64, 128 and 256 channels."""

    def __init__(self, *, blocks: int = 2, width: int = 4, classes: int = 10) -> None:
        super().__init__()
        channels, stages = 16, []
        for stage, outputs in enumerate((16 * width, 32 * width, 64 * width)):
            for block in range(blocks):
                stages.append(Residual(channels, outputs, 2 if stage and not block else 1))
                channels = outputs
        self.stem = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.stages = nn.Sequential(*stages)
        self.norm, self.head = nn.GroupNorm(16, channels), nn.Linear(channels, classes)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        hidden = F.relu(self.norm(self.stages(self.stem(x_BCHW))))
        return self.head(hidden.mean((2, 3)))


class Basic(nn.Module):
    """Two 3 × 3 convolutions, each behind its normalization, beside an identity or a projection."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.first_norm, self.second_norm = nn.GroupNorm(32, outputs), nn.GroupNorm(32, outputs)
        same = (inputs, stride) == (outputs, 1)
        self.across = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        hidden = F.relu(self.first_norm(self.first(x_BCHW)))
        return F.relu(self.second_norm(self.second(hidden)) + self.across(x_BCHW))


class ResNet18(nn.Module):
    """ResNet-18 with a 3 × 3 stem: four stages of two blocks, 64 to 512 channels."""

    def __init__(self, *, classes: int = 10) -> None:
        super().__init__()
        channels, blocks = 64, []
        for stage, outputs in enumerate((64, 128, 256, 512)):
            blocks += [Basic(channels, outputs, 2 if stage else 1), Basic(outputs, outputs, 1)]
            channels = outputs
        self.stem, self.norm = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.GroupNorm(32, 64)
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(channels, classes)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return self.head(self.blocks(F.relu(self.norm(self.stem(x_BCHW)))).mean((2, 3)))
