"""How alike two pictures are (floor 4): PSNR and SSIM."""

import torch
from torch import Tensor
from torch.nn import functional as F

from sordino import checks
from sordino.errors import InvalidArgument

__all__ = ["psnr", "ssim"]

_WINDOW, _STD = 11, 1.5
_K1, _K2 = 0.01, 0.03
_MOST = 200.0


def psnr(found: Tensor, truth: Tensor, *, peak: float = 1.0) -> float:
    """Peak signal-to-noise ratio in dB, at most 200: above 20 a digit can be read, above 30 it is nearly the original.

    Args:
        found: a picture, any shape.
        truth: the original, of the same shape.
        peak: largest value of a pixel, > 0.

    Example:
        >>> round(psnr(torch.zeros(4), torch.full((4,), 0.1)), 6)
        20.0
    """
    _same_shape(found, truth)
    checks.positive(peak=peak)
    error = float((found.double() - truth.double()).square().mean())
    return _MOST if error == 0 else min(_MOST, 10 * float(torch.log10(torch.tensor(peak**2 / error))))


def ssim(found: Tensor, truth: Tensor, *, peak: float = 1.0) -> float:
    """Structural similarity in [−1, 1], 1 for the same picture.

    Args:
        found: a picture (channels, height, width) of at least 11 × 11 pixels.
        truth: the original, of the same shape.
        peak: largest value of a pixel, > 0.

    References:
        Wang, Bovik, Sheikh, Simoncelli 2004, equation 13; Gaussian window of 11 × 11, standard deviation 1.5.
    """
    _same_shape(found, truth)
    checks.positive(peak=peak)
    if found.ndim != 3 or min(found.shape[1:]) < _WINDOW:
        raise InvalidArgument(
            f"found must be (channels, height, width) of {_WINDOW} × {_WINDOW} pixels or more, got "
            f"{tuple(found.shape)}. Use psnr."
        )
    place = torch.arange(_WINDOW, dtype=torch.float64) - _WINDOW // 2
    line = torch.exp(-(place**2) / (2 * _STD**2))
    window = (line[:, None] * line[None, :] / line.sum() ** 2)[None, None]

    def mean(picture: Tensor) -> Tensor:
        return F.conv2d(picture.unsqueeze(1), window)

    x, y = found.detach().double().cpu(), truth.detach().double().cpu()
    mean_x, mean_y = mean(x), mean(y)
    var_x, var_y = mean(x * x) - mean_x**2, mean(y * y) - mean_y**2
    both = mean(x * y) - mean_x * mean_y
    c1, c2 = (_K1 * peak) ** 2, (_K2 * peak) ** 2
    top = (2 * mean_x * mean_y + c1) * (2 * both + c2)
    return float((top / ((mean_x**2 + mean_y**2 + c1) * (var_x + var_y + c2))).mean())


def _same_shape(found: Tensor, truth: Tensor) -> None:
    if found.shape != truth.shape:
        raise InvalidArgument(
            f"found and truth must have one shape, got {tuple(found.shape)} and {tuple(truth.shape)}."
        )
