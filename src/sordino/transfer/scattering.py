"""The scattering transform: image features from fixed wavelets, for when there are no public data.

A picture is convolved with oriented waves of several sizes, the modulus is taken, and again; a Gaussian blur and
coarse sampling end it. Small shifts and deformations change the result little, and nothing in it was ever trained, so
features of private images are one function of one record: they cost no privacy and need no public data.

References:
    Bruna, Mallat 2013, "Invariant scattering convolution networks" (paths, section 2; Morlet wavelets, equation 3).
    Oyallon, Mallat 2015, "Deep roto-translation scattering for object classification" (order 2 as a linear front end).
    Tramèr, Boneh 2021, "Differentially private learning needs better features" (with private training).
"""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from scipy.special import expit, ndtri
from torch import Tensor, nn
from torch.nn import functional as F

from sordino import checks
from sordino.errors import InvalidArgument
from sordino.randomness import KeyedRNG, RandomStream

_BANDWIDTH = 0.8
_FREQUENCY = 3 * math.pi / 4
# Chunks whose spectra stay in a core's cache; changes speed alone.
_PLANES = 16
# Copies of the plane, on each side, that a filter is summed over; further ones are below 1e-16.
_COPIES = 3


def gaussian_window(size: int, scale: int) -> npt.NDArray[np.float64]:
    """The Gaussian of standard deviation 0.8·2^(scale − 1) on a ring of `size` pixels, of sum 1; [size]."""
    offsets = _ring(size)
    window = np.exp(-np.square(offsets) / (2 * (_BANDWIDTH * 2.0 ** (scale - 1)) ** 2)).sum(axis=1)
    return window / window.sum()


def morlet_wavelet(size: tuple[int, int], *, scale: int, angle: float, slant: float) -> npt.NDArray[np.complex128]:
    """A wave under an elliptic Gaussian, less what it would answer to a constant; on a torus, [height, width].

    ψ(u) = (exp(iξ·u) − κ) exp(−(u₁² + s²u₂²)/2σ²) · s/(2πσ²), with σ = 0.8·2^scale, |ξ| = (3π/4)/2^scale, u turned
    by `angle`, and κ such that the sum over all pixels is zero.

    Args:
        size: pixels (height, width) of the torus.
        scale: j ≥ 0.
        angle: direction of the wave, in radians from the rows' direction.
        slant: s > 0; the smaller, the longer the crests.

    References:
        Bruna, Mallat 2013, equation 3.
    """
    height, width = size
    deviation = _BANDWIDTH * 2.0**scale
    y, x = _ring(height).reshape(-1, 1), _ring(width).reshape(1, -1)
    along = math.cos(angle) * x + math.sin(angle) * y
    across = math.cos(angle) * y - math.sin(angle) * x
    envelope = np.exp(-(np.square(along) + np.square(slant * across)) / (2 * deviation**2))
    wave = _wrapped(envelope * np.exp(1j * _FREQUENCY / 2.0**scale * along), size)
    bump = _wrapped(envelope, size)
    return (wave - wave.sum() / bump.sum() * bump) * (slant / (2 * math.pi * deviation**2))


def _ring(size: int) -> npt.NDArray[np.float64]:
    """All whole numbers that stand for each place of a ring; [size, copies]."""
    return np.arange(size)[:, None] + size * np.arange(-_COPIES, _COPIES + 1)[None, :].astype(np.float64)


def _wrapped(plane: npt.NDArray[np.complex128], size: tuple[int, int]) -> npt.NDArray[np.complex128]:
    height, width = size
    return plane.reshape(height, 2 * _COPIES + 1, width, 2 * _COPIES + 1).sum(axis=(1, 3))


class Scattering(nn.Module):
    """Scattering coefficients of images, up to order 2: a fixed feature map, nothing in it is trained.

    When: images and no public data to pre-train on. A linear classifier on these features beats small networks trained
    end to end at every common ε (docs/scattering.md).

    Each color is transformed by itself. With J scales and L angles it gives 1 + JL + L²J(J−1)/2 planes of one
    2^J-th of the height and width: first the blurred image, then order 1 by (scale, angle), then order 2 by (scale,
    angle, second scale, second angle), the second scale being the coarser one.

    Guarantee: releases nothing. A record's features depend on that record alone, to the last bit: no record of a
    batch is mixed with another, and nothing is estimated from data.

    Args:
        shape: (height, width) of the images, multiples of 2^scales.
        scales: J ≥ 1.
        angles: L ≥ 1 directions in a half turn.
        order: 1 or 2.

    Example:
        >>> features = Scattering(shape=(28, 28))(torch.ones(3, 1, 28, 28))
        >>> features.shape
        torch.Size([3, 81, 7, 7])

    References:
        Bruna, Mallat 2013, section 2.
    """

    def __init__(self, shape: Sequence[int] = (28, 28), scales: int = 2, angles: int = 8, order: int = 2) -> None:
        super().__init__()
        self.scales = checks.integer(1, scales=scales)
        self.angles = checks.integer(1, angles=angles)
        self.order = checks.one_of((1, 2), order=order)
        self.shape = _usable(shape, scales)
        self._border = 2**scales
        height, width = (side + 2 * self._border for side in self.shape)
        for level, scale in _pairs(scales):
            spectra = _wave_spectra((height, width), level=level, scale=scale, angles=angles)
            self.register_buffer(f"_waves{level}_{scale}", torch.from_numpy(spectra).float(), persistent=False)
        for level in range(scales):
            for name, side, kept in (("rows", height, self.shape[0]), ("columns", width, self.shape[1])):
                blur = _sampled_blur(side, kept, scales=scales, level=level)
                self.register_buffer(f"_{name}{level}", torch.from_numpy(blur).float(), persistent=False)

    @property
    def planes(self) -> int:
        """Number of output planes for each color."""
        first = self.scales * self.angles
        second = self.angles**2 * self.scales * (self.scales - 1) // 2
        return 1 + first + (second if self.order == 2 else 0)

    def forward(self, images: Tensor) -> Tensor:
        """Coefficients [n, C·planes, H/2^J, W/2^J] of float images [n, C, H, W]."""
        if images.ndim != 4 or tuple(images.shape[2:]) != self.shape or not images.is_floating_point():
            raise InvalidArgument(
                f"images must be floats of shape (records, channels, {self.shape[0]}, {self.shape[1]}), got "
                f"{images.dtype} of {images.ndim} dimensions and record shape {tuple(images.shape[1:])}. Give the "
                "images' shape to Scattering."
            )
        count, channels = images.shape[:2]
        small = tuple(side // 2**self.scales for side in self.shape)
        planes = images.flatten(0, 1).float()
        chunks = [self._coefficients(part) for part in planes.split(_PLANES)] if len(planes) else []
        found = torch.cat(chunks) if chunks else planes.new_zeros(0, self.planes, *small)
        return found.reshape(count, channels * self.planes, *small).to(images.dtype)

    def _coefficients(self, planes: Tensor) -> Tensor:
        """[m, planes, h, w] of single colors [m, H, W]."""
        padded = nn.functional.pad(planes[:, None], (self._border,) * 4, mode="reflect")
        spectrum = torch.fft.fft2(padded)
        first, second = [], []
        for scale in range(self.scales):
            moduli = self._moduli(spectrum, 0, scale)[:, 0]
            first.append(self._blurred(moduli, scale))
            if self.order == 2 and scale + 1 < self.scales:
                again = torch.fft.fft2(moduli)
                coarser = [
                    self._blurred(self._moduli(again, scale, other), other) for other in range(scale + 1, self.scales)
                ]
                # [m, angle, second scale, second angle, h, w]
                second.append(torch.stack(coarser, dim=2).flatten(1, 3))
        return torch.cat([self._blurred(padded, 0), *first, *second], dim=1)

    def _moduli(self, spectra: Tensor, level: int, scale: int) -> Tensor:
        """|x ⋆ ψ| at every 2^scale-th pixel for spectra [m, a, ·, ·] sampled at every 2^level-th; [m, a, L, ·, ·].

        To sample a picture at every k-th pixel is to average its spectrum over k² blocks; so the inverse transform
        is of the small size already.
        """
        step = 2 ** (scale - level)
        small = [side // step for side in spectra.shape[-2:]]
        waves = getattr(self, f"_waves{level}_{scale}").reshape(self.angles, step, small[0], step, small[1])
        blocks = spectra.reshape(*spectra.shape[:-2], 1, step, small[0], step, small[1])
        total = blocks[..., 0, :, 0, :] * waves[:, 0, :, 0]
        for i in range(step):
            for k in range(step):
                if i or k:
                    total += blocks[..., i, :, k, :] * waves[:, i, :, k]
        return torch.fft.ifft2(total / step**2 if step > 1 else total).abs()

    def _blurred(self, planes: Tensor, level: int) -> Tensor:
        """The window's average at every 2^J-th pixel of the image, of planes sampled at every 2^level-th."""
        return getattr(self, f"_rows{level}") @ planes @ getattr(self, f"_columns{level}").T


def scattering_features(
    shape: Sequence[int] = (28, 28), channels: int = 1, *, scales: int = 2, angles: int = 8, groups: int = 27
) -> nn.Sequential:
    """Images [n, C, H, W] ↦ rows [n, columns]: scattering, group normalization without parameters, flattening.

    The normalization takes each record's planes in `groups` groups to mean 0 and variance 1, by that record alone.

    Args:
        shape: (height, width) of the images.
        channels: C ≥ 1.
        scales: J ≥ 1.
        angles: L ≥ 1.
        groups: a divisor of the number of planes.

    Example:
        >>> scattering_features((28, 28))(torch.ones(2, 1, 28, 28)).shape
        torch.Size([2, 3969])

    References:
        Tramèr, Boneh 2021, section 3 (group normalization of scattering coefficients).
    """
    scattering = Scattering(shape, scales, angles)
    planes = checks.integer(1, channels=channels) * scattering.planes
    if planes % checks.integer(1, groups=groups):
        raise InvalidArgument(f"groups must be a divisor of the {planes} planes, got {groups}. Choose one.")
    return nn.Sequential(scattering, nn.GroupNorm(groups, planes, affine=False), nn.Flatten())


def _usable(shape: Sequence[int], scales: int) -> tuple[int, int]:
    if len(shape) != 2:
        raise InvalidArgument(f"shape must be (height, width), got {len(shape)} numbers. Leave the channels out.")
    for side in shape:
        if checks.integer(1, shape=side) % 2**scales or side < 2 ** (scales + 1):
            raise InvalidArgument(
                f"shape must have multiples of {2**scales} that are at least {2 ** (scales + 1)} for {scales} scales, "
                f"got {tuple(shape)}. Crop or pad the images, or take fewer scales."
            )
    return int(shape[0]), int(shape[1])


def _pairs(scales: int) -> list[tuple[int, int]]:
    """(level, scale): waves of every scale for the image, and coarser ones for the moduli at each level."""
    return [(level, scale) for level in range(scales) for scale in range(level, scales) if level < scale or not level]


def _wave_spectra(size: tuple[int, int], *, level: int, scale: int, angles: int) -> npt.NDArray[np.float64]:
    """Spectra [L, ·, ·] of the waves sampled at every 2^level-th pixel; they are real.

    A Morlet wavelet is the conjugate of its own mirror image, hence the real spectrum.
    """
    step = 2**level
    waves = [morlet_wavelet(size, scale=scale, angle=math.pi * k / angles, slant=4 / angles) for k in range(angles)]
    return np.stack([np.fft.fft2(wave[::step, ::step]).real * step**2 for wave in waves])


def _sampled_blur(side: int, kept: int, *, scales: int, level: int) -> npt.NDArray[np.float64]:
    """The window around every 2^J-th pixel of the image, at every 2^level-th pixel of the ring; [kept/2^J, ·]."""
    border, step = (side - kept) // 2, 2**level
    window = gaussian_window(side, scales)
    centers = border + 2**scales * np.arange(kept // 2**scales)
    return window[(np.arange(0, side, step)[None, :] - centers[:, None]) % side] * step


# ----------------------------------------------------------------------------------------------------------------------
# Pictures made of nothing but random numbers, to see how features vary where no public data are at hand.
#
# Objects of a few turned ellipses and boxes with cloudy surfaces: dark around them in gray pictures, filled up to the
# edges in color. They resemble no dataset more than any other, and the same seed gives the same pictures everywhere.
# So whatever is computed from them is a constant, as public as the code.
#
# References:
#     Baradad, Wulff, Wang, Isola, Torralba 2021, "Learning to see by looking at noise" (dead leaves, spectra 1/f).
#     DP-KFC 2026 and Tang, Panda, Sehwag, Mittal 2023 use noise images to prepare private training.
# ----------------------------------------------------------------------------------------------------------------------


Floats = npt.NDArray[np.float64]

_BATCH = 500
_SHAPES = 5
_EDGE = 15.0  # how steeply a shape's edge falls off, per half picture


def synthetic_images(count: int, shape: Sequence[int], channels: int = 1, *, seed: int = 0) -> Tensor:
    """Pictures [count, channels, H, W] in [0, 1], the same for the same arguments.

    Args:
        count: ≥ 1.
        shape: (height, width).
        channels: 1 for objects on black, more for colored pictures without a background.
        seed: any integer.

    Example:
        >>> synthetic_images(2, (28, 28)).shape
        torch.Size([2, 1, 28, 28])
    """
    checks.integer(1, count=count)
    height, width = (checks.integer(2, shape=side) for side in shape)
    rng = KeyedRNG(seed=checks.integer(seed=seed), reproducible=True)
    parts = [
        _batch(rng.stream("pictures", step=start), min(_BATCH, count - start), (height, width), channels)
        for start in range(0, count, _BATCH)
    ]
    return torch.from_numpy(np.concatenate(parts)).float()


@torch.no_grad()
def synthetic_second_moments(
    features: nn.Module, shape: Sequence[int], channels: int = 1, *, count: int = 8000, seed: int = 0
) -> Tensor:
    """Mean of xxᵀ over the unit rows x that `features` makes of `synthetic_images`; [columns, columns], float32.

    When: features are to be whitened and no part of the budget shall be spent on their covariance.

    Guarantee: releases nothing: no record is involved.

    Args:
        features: pictures ↦ rows [n, columns].
        shape: (height, width) of the pictures.
        channels: of the pictures.
        count: number of pictures.
        seed: of the pictures.
    """
    pictures = synthetic_images(count, shape, channels, seed=seed)
    total: Tensor | None = None
    for part in pictures.split(_BATCH):
        rows = nn.functional.normalize(features(part).float(), dim=1)
        moments = rows.T @ rows
        total = moments if total is None else total.add_(moments)
    assert total is not None
    return total / count


def _batch(stream: RandomStream, count: int, size: tuple[int, int], channels: int) -> Floats:
    def uniform(low: float, high: float, *shape: int) -> Floats:
        draws = stream.uniform(int(np.prod((count, *shape))))
        return low + (high - low) * draws.reshape(count, *shape, *(1,) * (3 - len(shape)))

    def normal(mean: float, deviation: float) -> Floats:
        return mean + deviation * ndtri(uniform(0.0, 1.0))

    height, width = size
    y, x = np.linspace(-1, 1, height)[:, None], np.linspace(-1, 1, width)[None, :]
    picture = np.zeros((count, channels, height, width))
    if channels > 1:
        picture += uniform(0.0, 1.0, channels)
    for _ in range(_SHAPES):
        center_x, center_y = normal(0.0, 0.35), normal(0.0, 0.35)
        angle = uniform(0.0, np.pi) * (uniform(0.0, 1.0) < 0.5)
        long, wide = np.exp(normal(-1.0, 0.6)), np.exp(normal(-1.0, 0.6))
        along = (np.cos(angle) * (x - center_x) + np.sin(angle) * (y - center_y)) / long
        across = (np.cos(angle) * (y - center_y) - np.sin(angle) * (x - center_x)) / wide
        power = np.where(uniform(0.0, 1.0) < 0.5, 2.0, 8.0)
        distance = (np.minimum(np.abs(along), 9.0) ** power + np.minimum(np.abs(across), 9.0) ** power) ** (1 / power)
        inside = expit(_EDGE * (1 - distance)) * (uniform(0.0, 1.0) < 0.8)
        picture = picture * (1 - inside) + inside * uniform(0.0, 1.0, channels)
    clouds = _clouds(stream, count, size)[:, None]
    return np.clip(picture * (1 + uniform(0.0, 0.35) * clouds), 0.0, 1.0)


def _clouds(stream: RandomStream, count: int, size: tuple[int, int]) -> Floats:
    """Noise of spectrum 1/f, a quarter of a torus, of mean 0 and variance 1 in each picture; [count, H, W]."""
    height, width = 2 * size[0], 2 * size[1]
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None, :])
    frequency[0, 0] = 1.0
    white = ndtri(stream.uniform(count * height * width)).reshape(count, height, width)
    noise = np.fft.irfft2(np.fft.rfft2(white) / frequency, s=(height, width))[:, : size[0], : size[1]]
    noise = noise - noise.mean(axis=(1, 2), keepdims=True)
    return noise / noise.std(axis=(1, 2), keepdims=True)


# ----------------------------------------------------------------------------------------------------------------------
# Features of pictures by small patches: how much each place looks like patches of made pictures.
#
# Every small square of a picture is brought to mean 0 and length 1, evened out, and compared with a few hundred patches
# of pictures that were made of random numbers; what is clearly alike, and clearly opposite, is averaged over parts of
# the picture. Nothing in it was ever trained or saw a record, so features of private pictures are one function of one
# record: they cost no privacy and need no public data.
#
# References:
#     Coates, Ng, Lee 2011, "An analysis of single-layer networks in unsupervised feature learning" (whitened patches,
#     pooled over quarters; random patches do nearly as well as learned ones); Coates, Ng 2011, "The importance of
#     encoding versus training with sparse coding and vector quantization" (two-sided thresholds).
# ----------------------------------------------------------------------------------------------------------------------


_PICTURES, _A_PICTURE = 2000, 50
# Variance that is added to a patch's, so that noise in flat places is not blown up; of values in [0, 1].
_FLAT = 1.5e-3
# Ridge of the whitening of patches, whose directions have a variance of 1 on average.
_RIDGE = 0.1
# Patches of less variance tell nothing of edges.
_LEAST = 1e-3


class PatchFeatures(nn.Module):
    """Similarity to patches of synthetic images, averaged over parts of the image: a fixed map, nothing is trained.

    When: color photographs and no public data to pre-train on.

    Guarantee: releases nothing. A record's features depend on that record alone: no record of a batch is mixed with
    another, and nothing is estimated from data.

    Args:
        channels: of the pictures.
        patches: K ≥ 1 patches to compare with.
        side: of a patch, ≥ 2 pixels.
        threshold: ≥ 0, what similarity has to exceed; similarity varies by about 1.
        grid: parts along each side ≥ 1.
        seed: of the choice of patches.

    Example:
        >>> PatchFeatures(3, patches=8)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 64])
    """

    def __init__(
        self,
        channels: int = 3,
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
        count, channels = checks.integer(1, patches=patches), checks.integer(1, channels=channels)
        filters = _filters(channels, self.side, count, seed).reshape(count, channels, self.side, self.side)
        self.register_buffer("_filters", filters, persistent=False)
        mean = torch.full((1, channels, self.side, self.side), 1 / (channels * self.side**2))
        self.register_buffer("_mean", mean, persistent=False)

    @property
    def columns(self) -> int:
        """Features of a picture."""
        return 2 * len(self.get_buffer("_filters")) * self.grid**2

    def forward(self, pictures: Tensor) -> Tensor:
        """Features [n, columns] of float pictures [n, channels, H, W] in [0, 1]."""
        filters, mean = self.get_buffer("_filters"), self.get_buffer("_mean")
        least = self.side - 1 + self.grid
        if pictures.ndim != 4 or pictures.shape[1] != filters.shape[1] or min(pictures.shape[2:]) < least:
            raise InvalidArgument(
                f"pictures must be of shape (records, {filters.shape[1]}, height, width) with sides of at least "
                f"{least}, got {tuple(pictures.shape)}. Give the number of colors to PatchFeatures."
            )
        pictures = pictures.to(filters.dtype)
        variance = F.conv2d(pictures.square(), mean) - F.conv2d(pictures, mean).square()
        alike = F.conv2d(pictures, filters) / torch.sqrt(variance.clamp(min=0) + _FLAT)
        parts = [F.adaptive_avg_pool2d(F.relu(sign * alike - self.threshold), self.grid) for sign in (1, -1)]
        return torch.cat(parts, dim=1).flatten(1)


def _filters(channels: int, side: int, count: int, seed: int) -> Tensor:
    """[K, columns]: filters of mean 0 whose product with a patch is that of the two whitened, the first of length 1."""
    pictures = synthetic_images(_PICTURES, (32, 32), channels, seed=1)
    found = F.unfold(pictures, side)
    stream = KeyedRNG(seed=checks.integer(0, seed=seed), reproducible=True).stream("patches", step=0)
    starts = torch.from_numpy((stream.uniform(_PICTURES * _A_PICTURE) * found.shape[2]).astype(np.int64))
    starts = starts.reshape(_PICTURES, 1, _A_PICTURE)
    rows = found.gather(2, starts.expand(-1, found.shape[1], -1)).permute(0, 2, 1).flatten(0, 1)
    rows = rows - rows.mean(1, keepdim=True)
    variance = rows.square().mean(1, keepdim=True)
    rows = (rows / torch.sqrt(variance + _FLAT))[variance[:, 0] > _LEAST]
    values, vectors = torch.linalg.eigh(rows.T @ rows / len(rows))
    whitening = (vectors / torch.sqrt(values + _RIDGE)) @ vectors.T
    chosen = rows[torch.from_numpy(np.argsort(stream.uniform(len(rows)))[:count])] @ whitening
    filters = F.normalize(chosen, dim=1) @ whitening
    return filters - filters.mean(1, keepdim=True)
