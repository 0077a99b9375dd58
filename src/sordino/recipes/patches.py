"""Colour photographs by small patches of made pictures, then one linear layer, with no public data (floor 6).

The features of a picture and of its mirror image are averaged, and their roots whitened by what they do on made
pictures, which costs no privacy; full-batch descent on the whitened rows spends the whole budget, as one Gaussian.

References:
    Coates, Ng, Lee 2011, "An analysis of single-layer networks in unsupervised feature learning"; Mehta, Krichene,
    Thakurta, Kurakin, Cutkosky 2022 (full batches on whitened features).
"""

from functools import lru_cache

import torch
from torch import Tensor, nn

from sordino.data import Records
from sordino.recipes.feature_cache import once_a_block
from sordino.recipes.made_directions import MadeWhitening, linear_on
from sordino.recipes.network import image_shape, network
from sordino.recipes.pipeline import Pipeline
from sordino.recipes.scatter import mirrored
from sordino.recipes.task import Prepared, Task
from sordino.transfer import PatchFeatures, made_pictures

__all__ = ["PATCHES", "patched"]

# So few pictures at a time stay in a core's cache.
_CHUNK = 8
_PATCHES, _SIDE, _THRESHOLD, _GRID = 512, 6, 0.75, 3
# The most directions of the made pictures that are kept, and the pictures they come from.
_DIRECTIONS, _PICTURES = 3000, 4000
# Ridge of the whitening, in units of the mean eigenvalue.
_RIDGE = 1.0


@torch.no_grad()
def patched(pictures: Tensor) -> Tensor:
    """Rows [n, columns] of colour pictures [n, 3, H, W]: roots of the mean of features of a picture and its mirror."""
    features = _features()
    # A likeness is never negative, and the root of its mean is less skewed.
    return torch.cat([mirrored(features, part).sqrt() for part in pictures.split(_CHUNK)])


@lru_cache(maxsize=1)
def _features() -> nn.Module:
    return PatchFeatures(3, patches=_PATCHES, side=_SIDE, threshold=_THRESHOLD, grid=_GRID)


@lru_cache(maxsize=2)
def _whitening(size: tuple[int, int]) -> MadeWhitening:
    return MadeWhitening.of(patched(made_pictures(_PICTURES, size, 3)), count=_DIRECTIONS, ridge=_RIDGE)


def _prepare(task: Task) -> Prepared:
    size = image_shape(task, channels=(3,), least=16)[1:]

    def rows(records: Records) -> Tensor:
        def made() -> Tensor:
            whitening = _whitening(size)
            return torch.cat([whitening(patched(part)) for part in records.tensors()[0].split(_PICTURES)])

        return once_a_block(("patches", size), records, made)

    words = "logistic regression on whitened likeness to patches of made pictures"
    return network(task, linear_on(rows, words=words))


PATCHES = Pipeline(
    name="patches",
    words="logistic regression on likeness to small patches of made-up pictures, for colour photographs",
    data_sets=("cifar10",),
    prepare=_prepare,
    constants=(
        "Features on training records of CIFAR-10, the second choice there: the first had been measured on the test "
        "records; descent as on scattering features."
    ),
    chosen_on=("CIFAR-10 (JPEG)", "fashion-mnist"),
    guarantee="every full-batch step; nothing else reads a record",
)
