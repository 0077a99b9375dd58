"""Scattering features of images, then one linear layer by private training: no public data needed.

`scatter` whitens the features by what they do on pictures made of random numbers, which costs no privacy, and keeps
the main directions; full-batch descent on the whitened rows spends the whole budget, as one Gaussian. `scatter-sgd` is
the linear classifier of Tramèr and Boneh, on Poisson-sampled batches.

References:
    Tramèr, Boneh 2021, "Differentially private learning needs better features (or much more data)", section 3 and
    table 2; Mehta, Krichene, Thakurta, Kurakin, Cutkosky 2022 (full batches on whitened features).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from sordino.data import Records
from sordino.errors import InvalidArgument
from sordino.recipes.recipe import PreparedRecipe, Recipe, RecipeTask, once_a_block
from sordino.recipes.stages import image_shape, network_recipe
from sordino.recipes.training_config import NetworkSpec, noise_limited
from sordino.training.averaging import TailWeightAverage
from sordino.transfer import PatchFeatures
from sordino.transfer.scattering import scattering_features, synthetic_images

# ----------------------------------------------------------------------------------------------------------------------
# Rows whitened by what their features do on pictures made of random numbers, and a linear layer on them.
#
# The main directions of the made pictures' rows, each over the root of its share and a ridge, bring out what plain
# descent would see last. Real pictures share them roughly; that is enough. As nothing of it reads a record, full-batch
# descent spends the whole budget, as one Gaussian.
# ----------------------------------------------------------------------------------------------------------------------


_CONSTANT = 0.1


def principal_components(rows: Tensor, *, count: int, ridge: float) -> Tensor:
    """[columns, ≤ count]: the main directions of rows [n, columns], each over the root of its share plus a ridge.

    With fewer rows than columns, the axes come from the rows' products: X'X and XX' share their eigenvalues.

    Args:
        rows: of public or made records.
        count: the most directions that are kept.
        ridge: in units of the mean eigenvalue of rows of length 1.
    """
    few = len(rows) < rows.shape[1]
    values, vectors = torch.linalg.eigh((rows @ rows.T if few else rows.T @ rows) / len(rows))
    values, vectors = values.flip(0)[:count].clamp(min=1e-12), vectors.flip(1)[:, :count]
    axes = rows.T @ (vectors / torch.sqrt(values * len(rows))) if few else vectors
    return axes / torch.sqrt(values + ridge / rows.shape[1])


@dataclass(frozen=True, kw_only=True, eq=False)
class SyntheticWhitening:
    """A fixed map of rows [n, columns] to rows of length 1 [n, directions], each row by itself.

    Args:
        center: [columns], subtracted first.
        directions: [columns, directions].
    """

    center: Tensor
    directions: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, made: Tensor, *, count: int, ridge: float) -> "SyntheticWhitening":
        """The map that made pictures' rows give: their mean, and the main directions around it."""
        center = made.mean(0)
        rows = nn.functional.normalize(made - center, dim=1)
        return cls(center=center, directions=principal_components(rows, count=count, ridge=ridge))

    @torch.no_grad()
    def __call__(self, rows: Tensor) -> Tensor:
        """Whitened rows; one with an entry that is not finite becomes a row of zeros."""
        centered = nn.functional.normalize(rows - self.center, dim=1)
        found = nn.functional.normalize(centered @ self.directions, dim=1)
        return torch.where(found.isfinite().all(dim=1, keepdim=True), found, 0.0)


def linear_on(rows: Callable[[Records], Tensor], *, words: str) -> NetworkSpec:
    """Logistic regression by full-batch descent on rows of length 1.

    Args:
        rows: records ↦ rows [n, columns], each record by itself.
        words: for the report.
    """
    return NetworkSpec(
        build=_linear,
        batch_size=None,
        steps=80,
        max_grad_norm=0.25,
        learning_rate=noise_limited(largest=150.0, noise_per_weight=1.2),
        averaging=TailWeightAverage(fraction=0.1),
        microbatch_size=8192,
        # A small constant for the intercept: a constant of 1 would take up half of the squared clipping norm.
        inputs=lambda records: nn.functional.pad(rows(records), (0, 1), value=_CONSTANT),
        description=words,
    )


def _linear(shape: Sequence[int], classes: int) -> nn.Module:
    """Scores without an intercept of their own, zero at the start."""
    linear = nn.Linear(shape[0], classes, bias=False)
    nn.init.zeros_(linear.weight)
    return linear


# ----------------------------------------------------------------------------------------------------------------------
# Scattering features of images, then one linear layer by private training: no public data needed.
# ----------------------------------------------------------------------------------------------------------------------


Rows = npt.NDArray[np.float32]

_CHUNK = 500
# The most directions of the made pictures that are kept, and the pictures they come from.
_DIRECTIONS, _PICTURES = 1000, 4000
# Ridge of the first whitening, in units of the mean eigenvalue.
_RIDGE = 1.0
# Datasets where a mirrored picture is as likely as the picture: letters and digits are none.
_MIRRORED = ("cifar10",)


@dataclass(frozen=True, kw_only=True)
class _Sgd:
    """Settings of a dataset from the source: expected batch, learning rate, epochs, noise multiplier at its ε = 3."""

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
    rows = torch.from_numpy(scattered(synthetic_images(_PICTURES, shape[1:], shape[0]), mirror=mirror, directions=None))
    return principal_components(rows, count=_DIRECTIONS, ridge=_RIDGE)


def _rows_of(task: RecipeTask, *, whitened: bool) -> Callable[[Records], Rows]:
    """Records ↦ rows; those of the same object are made once in a block of `feature_cache`."""
    shape = _shape(task)
    mirror = task.data in _MIRRORED

    def rows(records: Records) -> Rows:
        def made() -> Rows:
            directions = _directions(shape, mirror=mirror) if whitened else None
            return scattered(records.tensors()[0], mirror=mirror, directions=directions)

        return once_a_block(("scatter", shape, mirror, whitened), records, made)

    return rows


def _shape(task: RecipeTask) -> tuple[int, int, int]:
    shape = image_shape(task, channels=(1, 3), least=16)
    if shape[1] % 4 or shape[2] % 4:
        raise InvalidArgument(
            f"dataset must have images whose sides are multiples of 4, got {shape[1]} × {shape[2]}. Pad or crop them."
        )
    return shape


def _prepare(task: RecipeTask) -> PreparedRecipe:
    rows = _rows_of(task, whitened=True)
    words = "logistic regression on whitened directions of scattering features"
    return network_recipe(task, linear_on(lambda records: torch.from_numpy(rows(records)), words=words))


def _prepare_sgd(task: RecipeTask) -> PreparedRecipe:
    rows = _rows_of(task, whitened=False)
    chosen = _SGD.get(task.data, _SGD["fashion-mnist"])
    rate = min(1.0, chosen.batch_size / task.dataset_size)
    made = NetworkSpec(
        build=lambda shape, classes: nn.Linear(shape[0], classes),
        batch_size=chosen.batch_size,
        steps=max(1, round(chosen.epochs / rate)),
        max_grad_norm=0.1,
        learning_rate=chosen.learning_rate,
        nesterov=False,
        microbatch_size=4096,
        noise_multiplier=None if task.setting is None else chosen.noise_multiplier,
        inputs=lambda records: torch.from_numpy(rows(records)) * math.sqrt(81 * math.prod(task.shape) / 16),
        description="logistic regression on scattering features",
    )
    return network_recipe(task, made)


SCATTER = Recipe(
    name="scatter",
    description="logistic regression on scattering features, whitened by what they do on synthetic pictures",
    data_sets=("fashion-mnist", "mnist", "cifar10"),
    prepare=_prepare,
    constants="Chosen on 10 000 of the training records of Fashion-MNIST; the other sets took them over.",
    chosen_on=("fashion-mnist",),
    guarantee="every full-batch step; nothing else reads a record",
)
SCATTER_SGD = Recipe(
    name="scatter-sgd",
    description="logistic regression on scattering features by DP-SGD, with the source's settings",
    data_sets=("fashion-mnist", "mnist", "cifar10"),
    prepare=_prepare_sgd,
    constants="The source's own, but group normalization on every dataset, and batches that are really Poisson's.",
    chosen_on=(),
    guarantee="every Poisson-sampled step; nothing else reads a record",
    settings=("source",),
)


# ----------------------------------------------------------------------------------------------------------------------
# Color photographs by small patches of made pictures, then one linear layer, with no public data.
#
# The features of a picture and of its mirror image are averaged, and their roots whitened by what they do on made
# pictures, which costs no privacy; full-batch descent on the whitened rows spends the whole budget, as one Gaussian.
#
# References:
#     Coates, Ng, Lee 2011, "An analysis of single-layer networks in unsupervised feature learning"; Mehta, Krichene,
#     Thakurta, Kurakin, Cutkosky 2022 (full batches on whitened features).
# ----------------------------------------------------------------------------------------------------------------------


# So few pictures at a time stay in a core's cache.
_PATCHES_CHUNK = 8
_PATCHES, _SIDE, _THRESHOLD, _GRID = 512, 6, 0.75, 3
# The most directions of the made pictures that are kept, and the pictures they come from.
_PATCHES_DIRECTIONS, _PATCHES_PICTURES = 3000, 4000


@torch.no_grad()
def patched(pictures: Tensor) -> Tensor:
    """Rows [n, columns] of color pictures [n, 3, H, W]: roots of the mean of features of a picture and its mirror."""
    features = _patches_features()
    # A similarity is never negative, and the root of its mean is less skewed.
    return torch.cat([mirrored(features, part).sqrt() for part in pictures.split(_PATCHES_CHUNK)])


@lru_cache(maxsize=1)
def _patches_features() -> nn.Module:
    return PatchFeatures(3, patches=_PATCHES, side=_SIDE, threshold=_THRESHOLD, grid=_GRID)


@lru_cache(maxsize=2)
def _whitening(size: tuple[int, int]) -> SyntheticWhitening:
    return SyntheticWhitening.of(
        patched(synthetic_images(_PATCHES_PICTURES, size, 3)), count=_PATCHES_DIRECTIONS, ridge=_RIDGE
    )


def _patches_prepare(task: RecipeTask) -> PreparedRecipe:
    size = image_shape(task, channels=(3,), least=16)[1:]

    def rows(records: Records) -> Tensor:
        def made() -> Tensor:
            whitening = _whitening(size)
            return torch.cat([whitening(patched(part)) for part in records.tensors()[0].split(_PATCHES_PICTURES)])

        return once_a_block(("patches", size), records, made)

    words = "logistic regression on whitened similarity to patches of made pictures"
    return network_recipe(task, linear_on(rows, words=words))


PATCHES = Recipe(
    name="patches",
    description="logistic regression on similarity to small patches of synthetic pictures, for color photographs",
    data_sets=("cifar10",),
    prepare=_patches_prepare,
    constants=(
        "Features on training records of CIFAR-10, the second choice there: the first had been measured on the test "
        "records; descent as on scattering features."
    ),
    chosen_on=("CIFAR-10 (JPEG)", "fashion-mnist"),
    guarantee="every full-batch step; nothing else reads a record",
)
