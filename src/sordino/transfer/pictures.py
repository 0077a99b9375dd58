"""Pictures made of nothing but random numbers, to see how features vary where no public data are at hand (floor 1).

Objects of a few turned ellipses and boxes with cloudy surfaces: dark around them in grey pictures, filled up to the
edges in colour. They resemble no data set more than any other, and the same seed gives the same pictures everywhere.
So whatever is computed from them is a constant, as public as the code.

References:
    Baradad, Wulff, Wang, Isola, Torralba 2021, "Learning to see by looking at noise" (dead leaves, spectra 1/f).
    DP-KFC 2026 and Tang, Panda, Sehwag, Mittal 2023 use noise images to prepare private training.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from scipy.special import expit, ndtri
from torch import Tensor, nn

from sordino import checks
from sordino.randomness import Randomness, Stream

__all__ = ["made_pictures", "second_moments_of_pictures"]

Floats = npt.NDArray[np.float64]

_BATCH = 500
_SHAPES = 5
_EDGE = 15.0  # how steeply a shape's edge falls off, per half picture


def made_pictures(count: int, shape: Sequence[int], colours: int = 1, *, seed: int = 0) -> Tensor:
    """Pictures [count, colours, H, W] in [0, 1], the same for the same arguments.

    Args:
        count: ≥ 1.
        shape: (height, width).
        colours: 1 for objects on black, more for coloured pictures without a background.
        seed: any integer.

    Example:
        >>> made_pictures(2, (28, 28)).shape
        torch.Size([2, 1, 28, 28])
    """
    checks.integer(1, count=count)
    height, width = (checks.integer(2, shape=side) for side in shape)
    randomness = Randomness(seed=checks.integer(seed=seed), reproducible=True)
    parts = [
        _batch(randomness.stream("pictures", step=start), min(_BATCH, count - start), (height, width), colours)
        for start in range(0, count, _BATCH)
    ]
    return torch.from_numpy(np.concatenate(parts)).float()


@torch.no_grad()
def second_moments_of_pictures(
    features: nn.Module, shape: Sequence[int], colours: int = 1, *, count: int = 8000, seed: int = 0
) -> Tensor:
    """Mean of xxᵀ over the unit rows x that `features` makes of `made_pictures`; [columns, columns], float32.

    When: features are to be whitened and no part of the budget shall be spent on their covariance.

    Guarantee: releases nothing: no record is involved.

    Args:
        features: pictures ↦ rows [n, columns].
        shape: (height, width) of the pictures.
        colours: of the pictures.
        count: number of pictures.
        seed: of the pictures.
    """
    pictures = made_pictures(count, shape, colours, seed=seed)
    total: Tensor | None = None
    for part in pictures.split(_BATCH):
        rows = nn.functional.normalize(features(part).float(), dim=1)
        moments = rows.T @ rows
        total = moments if total is None else total.add_(moments)
    assert total is not None
    return total / count


def _batch(stream: Stream, count: int, size: tuple[int, int], colours: int) -> Floats:
    def uniform(low: float, high: float, *shape: int) -> Floats:
        draws = stream.uniform(int(np.prod((count, *shape))))
        return low + (high - low) * draws.reshape(count, *shape, *(1,) * (3 - len(shape)))

    def normal(mean: float, deviation: float) -> Floats:
        return mean + deviation * ndtri(uniform(0.0, 1.0))

    height, width = size
    y, x = np.linspace(-1, 1, height)[:, None], np.linspace(-1, 1, width)[None, :]
    picture = np.zeros((count, colours, height, width))
    if colours > 1:
        picture += uniform(0.0, 1.0, colours)
    for _ in range(_SHAPES):
        centre_x, centre_y = normal(0.0, 0.35), normal(0.0, 0.35)
        angle = uniform(0.0, np.pi) * (uniform(0.0, 1.0) < 0.5)
        long, wide = np.exp(normal(-1.0, 0.6)), np.exp(normal(-1.0, 0.6))
        along = (np.cos(angle) * (x - centre_x) + np.sin(angle) * (y - centre_y)) / long
        across = (np.cos(angle) * (y - centre_y) - np.sin(angle) * (x - centre_x)) / wide
        power = np.where(uniform(0.0, 1.0) < 0.5, 2.0, 8.0)
        distance = (np.minimum(np.abs(along), 9.0) ** power + np.minimum(np.abs(across), 9.0) ** power) ** (1 / power)
        inside = expit(_EDGE * (1 - distance)) * (uniform(0.0, 1.0) < 0.8)
        picture = picture * (1 - inside) + inside * uniform(0.0, 1.0, colours)
    clouds = _clouds(stream, count, size)[:, None]
    return np.clip(picture * (1 + uniform(0.0, 0.35) * clouds), 0.0, 1.0)


def _clouds(stream: Stream, count: int, size: tuple[int, int]) -> Floats:
    """Noise of spectrum 1/f, a quarter of a torus, of mean 0 and variance 1 in each picture; [count, H, W]."""
    height, width = 2 * size[0], 2 * size[1]
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None, :])
    frequency[0, 0] = 1.0
    white = ndtri(stream.uniform(count * height * width)).reshape(count, height, width)
    noise = np.fft.irfft2(np.fft.rfft2(white) / frequency, s=(height, width))[:, : size[0], : size[1]]
    noise = noise - noise.mean(axis=(1, 2), keepdims=True)
    return noise / noise.std(axis=(1, 2), keepdims=True)
