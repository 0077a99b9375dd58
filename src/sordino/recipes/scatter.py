"""Scattering features of images, then one linear layer by private training (floor 6): no public data needed.

`scatter` whitens the features by what they do on pictures made of random numbers, which costs no privacy, and keeps
the main directions; full-batch descent on the whitened rows spends the whole budget, as one Gaussian. `scatter-sgd` is
the linear classifier of Tramèr and Boneh, on Poisson-sampled batches.

References:
    Tramèr, Boneh 2021, "Differentially private learning needs better features (or much more data)", section 3 and
    table 2; Mehta, Krichene, Thakurta, Kurakin, Cutkosky 2022 (full batches on whitened features).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from sordino.data import Records
from sordino.errors import InvalidArgument
from sordino.recipes.feature_cache import once_a_block
from sordino.recipes.made_directions import linear_on, main_directions
from sordino.recipes.network import Network, image_shape, network
from sordino.recipes.pipeline import Pipeline
from sordino.recipes.task import Prepared, Task
from sordino.transfer.pictures import made_pictures
from sordino.transfer.scattering import scattering_features

__all__ = ["SCATTER", "SCATTER_SGD", "mirrored", "scattered"]

Rows = npt.NDArray[np.float32]

_CHUNK = 500
# The most directions of the made pictures that are kept, and the pictures they come from.
_DIRECTIONS, _PICTURES = 1000, 4000
# Ridge of the first whitening, in units of the mean eigenvalue.
_RIDGE = 1.0
# Data sets where a mirrored picture is as likely as the picture: letters and digits are none.
_MIRRORED = ("cifar10",)


@dataclass(frozen=True, kw_only=True)
class _Sgd:
    """Settings of a data set from the source: expected batch, learning rate, epochs, noise multiplier at its ε = 3."""

    batch_size: int
    learning_rate: float
    epochs: float
    noise_multiplier: float


_SGD = {
    "mnist": _Sgd(batch_size=4096, learning_rate=8.0, epochs=40, noise_multiplier=3.04),
    "fashion-mnist": _Sgd(batch_size=8192, learning_rate=16.0, epochs=40, noise_multiplier=4.05),
    "cifar10": _Sgd(batch_size=8192, learning_rate=4.0, epochs=60, noise_multiplier=5.67),
}


def mirrored(features: nn.Module, pictures: Tensor) -> Tensor:
    """Half the sum of the features of a picture and of its mirror image: a linear model on it is a symmetric one."""
    return (features(pictures) + features(pictures.flip(-1))) / 2


@torch.no_grad()
def scattered(pictures: Tensor, *, mirror: bool, directions: Tensor | None) -> Rows:
    """Rows of length 1 of pictures [n, C, H, W], each by itself; what is not finite gives a row of zeros."""
    features = _features(tuple(pictures.shape[1:]))
    rows = []
    for part in pictures.split(_CHUNK):
        found = nn.functional.normalize(mirrored(features, part) if mirror else features(part), dim=1)
        if directions is not None:
            found = nn.functional.normalize(found @ directions, dim=1)
        rows.append(torch.where(found.isfinite().all(dim=1, keepdim=True), found, 0.0))
    return torch.cat(rows).numpy()


@lru_cache(maxsize=2)
def _features(shape: tuple[int, int, int]) -> nn.Module:
    return scattering_features(shape[1:], shape[0])


@lru_cache(maxsize=2)
@torch.no_grad()
def _directions(shape: tuple[int, int, int], *, mirror: bool) -> Tensor:
    """[columns, directions]: the features' main directions on made pictures, each over the root of its share."""
    rows = torch.from_numpy(scattered(made_pictures(_PICTURES, shape[1:], shape[0]), mirror=mirror, directions=None))
    return main_directions(rows, count=_DIRECTIONS, ridge=_RIDGE)


def _rows_of(task: Task, *, whitened: bool) -> Callable[[Records], Rows]:
    """Records ↦ rows; those of the same object are made once in a block of `feature_cache`."""
    shape = _shape(task)
    mirror = task.data in _MIRRORED

    def rows(records: Records) -> Rows:
        def made() -> Rows:
            directions = _directions(shape, mirror=mirror) if whitened else None
            return scattered(records.tensors()[0], mirror=mirror, directions=directions)

        return once_a_block(("scatter", shape, mirror, whitened), records, made)

    return rows


def _shape(task: Task) -> tuple[int, int, int]:
    shape = image_shape(task, channels=(1, 3), least=16)
    if shape[1] % 4 or shape[2] % 4:
        raise InvalidArgument(
            f"dataset must have images whose sides are multiples of 4, got {shape[1]} × {shape[2]}. Pad or crop them."
        )
    return shape


def _prepare(task: Task) -> Prepared:
    rows = _rows_of(task, whitened=True)
    words = "logistic regression on whitened directions of scattering features"
    return network(task, linear_on(lambda records: torch.from_numpy(rows(records)), words=words))


def _prepare_sgd(task: Task) -> Prepared:
    rows = _rows_of(task, whitened=False)
    chosen = _SGD.get(task.data, _SGD["fashion-mnist"])
    rate = min(1.0, chosen.batch_size / task.population)
    made = Network(
        build=lambda shape, classes: nn.Linear(shape[0], classes),
        batch_size=chosen.batch_size,
        steps=max(1, round(chosen.epochs / rate)),
        max_grad_norm=0.1,
        learning_rate=chosen.learning_rate,
        nesterov=False,
        microbatch_size=4096,
        noise_multiplier=None if task.setting is None else chosen.noise_multiplier,
        inputs=lambda records: torch.from_numpy(rows(records)) * math.sqrt(81 * math.prod(task.shape) / 16),
        words="logistic regression on scattering features",
    )
    return network(task, made)


SCATTER = Pipeline(
    name="scatter",
    words="logistic regression on scattering features, whitened by what they do on made-up pictures",
    data_sets=("fashion-mnist", "mnist", "cifar10"),
    prepare=_prepare,
    constants="Chosen on 10 000 of the training records of Fashion-MNIST; the other sets took them over.",
    chosen_on=("fashion-mnist",),
    guarantee="every full-batch step; nothing else reads a record",
)
SCATTER_SGD = Pipeline(
    name="scatter-sgd",
    words="logistic regression on scattering features by DP-SGD, with the source's settings",
    data_sets=("fashion-mnist", "mnist", "cifar10"),
    prepare=_prepare_sgd,
    constants="The source's own, but group normalisation on every data set, and batches that are really Poisson's.",
    chosen_on=(),
    guarantee="every Poisson-sampled step; nothing else reads a record",
    settings=("source",),
)
