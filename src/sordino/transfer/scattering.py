"""The scattering transform: image features from fixed wavelets, for when there are no public data (floor 1).

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
from torch import Tensor, nn

from sordino import checks
from sordino.errors import InvalidArgument

__all__ = ["Scattering", "gaussian_window", "morlet_wavelet", "scattering_features"]

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

    Each colour is transformed by itself. With J scales and L angles it gives 1 + JL + L²J(J−1)/2 planes of one
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
        """Number of output planes for each colour."""
        first = self.scales * self.angles
        second = self.angles**2 * self.scales * (self.scales - 1) // 2
        return 1 + first + (second if self.order == 2 else 0)

    def forward(self, images: Tensor) -> Tensor:
        """Coefficients [n, C·planes, H/2^J, W/2^J] of float images [n, C, H, W]."""
        if images.ndim != 4 or tuple(images.shape[2:]) != self.shape or not images.is_floating_point():
            raise InvalidArgument(
                f"images must be floats of shape (records, colours, {self.shape[0]}, {self.shape[1]}), got "
                f"{images.dtype} of {images.ndim} dimensions and record shape {tuple(images.shape[1:])}. Give the "
                "images' shape to Scattering."
            )
        count, colours = images.shape[:2]
        small = tuple(side // 2**self.scales for side in self.shape)
        planes = images.flatten(0, 1).float()
        chunks = [self._coefficients(part) for part in planes.split(_PLANES)] if len(planes) else []
        found = torch.cat(chunks) if chunks else planes.new_zeros(0, self.planes, *small)
        return found.reshape(count, colours * self.planes, *small).to(images.dtype)

    def _coefficients(self, planes: Tensor) -> Tensor:
        """[m, planes, h, w] of single colours [m, H, W]."""
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
    shape: Sequence[int] = (28, 28), colours: int = 1, *, scales: int = 2, angles: int = 8, groups: int = 27
) -> nn.Sequential:
    """Images [n, C, H, W] ↦ rows [n, columns]: scattering, group normalisation without parameters, flattening.

    The normalisation takes each record's planes in `groups` groups to mean 0 and variance 1, by that record alone.

    Args:
        shape: (height, width) of the images.
        colours: C ≥ 1.
        scales: J ≥ 1.
        angles: L ≥ 1.
        groups: a divisor of the number of planes.

    Example:
        >>> scattering_features((28, 28))(torch.ones(2, 1, 28, 28)).shape
        torch.Size([2, 3969])

    References:
        Tramèr, Boneh 2021, section 3 (group normalisation of scattering coefficients).
    """
    scattering = Scattering(shape, scales, angles)
    planes = checks.integer(1, colours=colours) * scattering.planes
    if planes % checks.integer(1, groups=groups):
        raise InvalidArgument(f"groups must be a divisor of the {planes} planes, got {groups}. Choose one.")
    return nn.Sequential(scattering, nn.GroupNorm(groups, planes, affine=False), nn.Flatten())


def _usable(shape: Sequence[int], scales: int) -> tuple[int, int]:
    if len(shape) != 2:
        raise InvalidArgument(f"shape must be (height, width), got {len(shape)} numbers. Leave the colours out.")
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
    centres = border + 2**scales * np.arange(kept // 2**scales)
    return window[(np.arange(0, side, step)[None, :] - centres[:, None]) % side] * step
