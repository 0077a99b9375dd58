"""Features of pictures by small patches: how much each place looks like patches of made pictures (floor 1).

Every small square of a picture is brought to mean 0 and length 1, evened out, and compared with a few hundred patches
of pictures that were made of random numbers; what is clearly alike, and clearly opposite, is averaged over parts of
the picture. Nothing in it was ever trained or saw a record, so features of private pictures are one function of one
record: they cost no privacy and need no public data.

References:
    Coates, Ng, Lee 2011, "An analysis of single-layer networks in unsupervised feature learning" (whitened patches,
    pooled over quarters; random patches do nearly as well as learned ones); Coates, Ng 2011, "The importance of
    encoding versus training with sparse coding and vector quantization" (two-sided thresholds).
"""

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sordino import checks
from sordino.errors import InvalidArgument
from sordino.randomness import Randomness
from sordino.transfer.pictures import made_pictures

__all__ = ["PatchFeatures"]

_PICTURES, _A_PICTURE = 2000, 50
# Variance that is added to a patch's, so that noise in flat places is not blown up; of values in [0, 1].
_FLAT = 1.5e-3
# Ridge of the whitening of patches, whose directions have a variance of 1 on average.
_RIDGE = 0.1
# Patches of less variance tell nothing of edges.
_LEAST = 1e-3


class PatchFeatures(nn.Module):
    """Likeness to patches of made pictures, averaged over parts of the picture: a fixed map, nothing is trained.

    When: colour photographs and no public data to pre-train on.

    Guarantee: releases nothing. A record's features depend on that record alone: no record of a batch is mixed with
    another, and nothing is estimated from data.

    Args:
        colours: of the pictures.
        patches: K ≥ 1 patches to compare with.
        side: of a patch, ≥ 2 pixels.
        threshold: ≥ 0, what likeness has to exceed; likeness varies by about 1.
        grid: parts along each side ≥ 1.
        seed: of the choice of patches.

    Example:
        >>> PatchFeatures(3, patches=8)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 64])
    """

    def __init__(
        self,
        colours: int = 3,
        *,
        patches: int = 512,
        side: int = 6,
        threshold: float = 0.5,
        grid: int = 2,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.side, self.grid = checks.integer(2, side=side), checks.integer(1, grid=grid)
        self.threshold = checks.non_negative(threshold=threshold)
        count, colours = checks.integer(1, patches=patches), checks.integer(1, colours=colours)
        filters = _filters(colours, self.side, count, seed).reshape(count, colours, self.side, self.side)
        self.register_buffer("_filters", filters, persistent=False)
        mean = torch.full((1, colours, self.side, self.side), 1 / (colours * self.side**2))
        self.register_buffer("_mean", mean, persistent=False)

    @property
    def columns(self) -> int:
        """Features of a picture."""
        return 2 * len(self.get_buffer("_filters")) * self.grid**2

    def forward(self, pictures: Tensor) -> Tensor:
        """Features [n, columns] of float pictures [n, colours, H, W] in [0, 1]."""
        filters, mean = self.get_buffer("_filters"), self.get_buffer("_mean")
        least = self.side - 1 + self.grid
        if pictures.ndim != 4 or pictures.shape[1] != filters.shape[1] or min(pictures.shape[2:]) < least:
            raise InvalidArgument(
                f"pictures must be of shape (records, {filters.shape[1]}, height, width) with sides of at least "
                f"{least}, got {tuple(pictures.shape)}. Give the number of colours to PatchFeatures."
            )
        pictures = pictures.to(filters.dtype)
        variance = F.conv2d(pictures.square(), mean) - F.conv2d(pictures, mean).square()
        alike = F.conv2d(pictures, filters) / torch.sqrt(variance.clamp(min=0) + _FLAT)
        parts = [F.adaptive_avg_pool2d(F.relu(sign * alike - self.threshold), self.grid) for sign in (1, -1)]
        return torch.cat(parts, dim=1).flatten(1)


def _filters(colours: int, side: int, count: int, seed: int) -> Tensor:
    """[K, columns]: filters of mean 0 whose product with a patch is that of the two whitened, the first of length 1."""
    pictures = made_pictures(_PICTURES, (32, 32), colours, seed=1)
    found = F.unfold(pictures, side)
    stream = Randomness(seed=checks.integer(0, seed=seed), reproducible=True).stream("patches", step=0)
    places = torch.from_numpy((stream.uniform(_PICTURES * _A_PICTURE) * found.shape[2]).astype(np.int64))
    places = places.reshape(_PICTURES, 1, _A_PICTURE)
    rows = found.gather(2, places.expand(-1, found.shape[1], -1)).permute(0, 2, 1).flatten(0, 1)
    rows = rows - rows.mean(1, keepdim=True)
    variance = rows.square().mean(1, keepdim=True)
    rows = (rows / torch.sqrt(variance + _FLAT))[variance[:, 0] > _LEAST]
    values, vectors = torch.linalg.eigh(rows.T @ rows / len(rows))
    whitening = (vectors / torch.sqrt(values + _RIDGE)) @ vectors.T
    chosen = rows[torch.from_numpy(np.argsort(stream.uniform(len(rows)))[:count])] @ whitening
    filters = F.normalize(chosen, dim=1) @ whitening
    return filters - filters.mean(1, keepdim=True)
