"""The Gaussian mechanism on tensors, with noise from the run's cryptographic randomness (floor 1).

The noise is floating-point Gaussian noise: it protects against every adversary who sees values as real
numbers, not against one who inspects the last bits of the released floats (Mironov 2012). It is labelled so.

References:
    Dwork, Roth 2014, appendix A (mechanism); Box, Muller 1958 (transform).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sordino import checks
from sordino.events import Event, Gaussian
from sordino.randomness import Randomness, Stream

__all__ = ["GaussianMechanism", "standard_normal"]

# Pairs a block: the float64 intermediates of one block stay in the processor's cache.
_BLOCK = 1 << 15


def standard_normal(count: int, stream: Stream, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """`count` independent standard normal draws, shape (count,), on the CPU.

    Box–Muller: √(−2 ln U)·(cos 2πV, sin 2πV). U has 53 bits and its logarithm is taken in float64, so the
    tail reaches 8.6 standard deviations (32 bits would end at 6.8). V has 24 bits for float32 results and
    53 bits for float64.

    Args:
        count: ≥ 0.
        stream: source of the bits; read in order.
        dtype: float64 gives float64 arithmetic throughout; every other dtype is drawn in float32.

    Returns:
        A tensor of float64 when asked for, otherwise float32.
    """
    working = torch.float64 if dtype == torch.float64 else torch.float32
    noise = torch.empty(2 * ((checks.integer(0, count=count) + 1) // 2), dtype=working)
    for start in range(0, len(noise) // 2, _BLOCK):
        pairs = min(_BLOCK, len(noise) // 2 - start)
        # After the logarithm single precision loses nothing: the radius is rounded to it anyway.
        radius = _uniform53(pairs, stream).log_().to(working).mul_(-2.0).sqrt_()
        angle = (_uniform53(pairs, stream) if working == torch.float64 else _uniform24(pairs, stream)).mul_(2 * math.pi)
        torch.mul(radius, angle.cos(), out=noise[2 * start : 2 * start + pairs])
        torch.mul(radius, angle.sin_(), out=noise[2 * start + pairs : 2 * (start + pairs)])
    return noise[:count]


def _uniform53(count: int, stream: Stream) -> Tensor:
    """Float64 uniforms in (0, 1): odd multiples of 2⁻⁵⁴, rounded."""
    words = torch.empty(count, dtype=torch.int64)
    stream.fill(words.numpy().data)
    return words.bitwise_and_((1 << 53) - 1).to(torch.float64).add_(0.5).mul_(2.0**-53)


def _uniform24(count: int, stream: Stream) -> Tensor:
    """Float32 uniforms in [0, 1): multiples of 2⁻²⁴."""
    words = torch.empty(count, dtype=torch.int32)
    stream.fill(words.numpy().data)
    return words.bitwise_and_((1 << 24) - 1).to(torch.float32).mul_(2.0**-24)


@dataclass(frozen=True, kw_only=True)
class GaussianMechanism:
    """Adds N(0, (noise_multiplier · l2_sensitivity)²) to every coordinate of a value.

    Guarantee: one release is ``Gaussian(noise_multiplier)`` when one privacy unit moves the value, all its
    tensors taken together, by at most `l2_sensitivity` in ℓ2 norm under the declared relation.

    Args:
        noise_multiplier: standard deviation over sensitivity, ≥ 0. Zero is for debugging: ε is ∞.
        l2_sensitivity: > 0.

    Example:
        >>> GaussianMechanism(noise_multiplier=2.0, l2_sensitivity=0.5).stddev
        1.0
    """

    noise_multiplier: float
    l2_sensitivity: float

    def __post_init__(self) -> None:
        checks.non_negative(noise_multiplier=self.noise_multiplier)
        checks.positive(l2_sensitivity=self.l2_sensitivity)

    @property
    def stddev(self) -> float:
        """Standard deviation of the noise on each coordinate."""
        return self.noise_multiplier * self.l2_sensitivity

    def event(self) -> Event:
        """The event of one release."""
        return Gaussian(noise_multiplier=self.noise_multiplier)

    def add_noise_(self, tensors: Sequence[Tensor], *, randomness: Randomness, step: int, rank: int = 0) -> None:
        """Add fresh noise to `tensors` in place; (`step`, `rank`) must never repeat within one `randomness`.

        All tensors take their noise from one stream, each its own stretch of it.
        """
        if self.stddev == 0:
            return
        stream = randomness.stream("gaussian", step=step, rank=rank)
        for group in _drawn_together(tensors):
            sizes = [tensor.numel() for tensor in group]
            noise = standard_normal(sum(sizes), stream, dtype=group[0].dtype)
            for tensor, part in zip(group, noise.split(sizes), strict=True):
                tensor.add_(part.view(tensor.shape).to(tensor.device, tensor.dtype), alpha=self.stddev)


def _drawn_together(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours of one type, as many as fit a block: small tensors would spend their time on starting draws."""
    group: list[Tensor] = []
    for tensor in tensors:
        size = sum(other.numel() for other in group)
        if group and (tensor.dtype != group[0].dtype or size + tensor.numel() > 2 * _BLOCK):
            yield group
            group = []
        group.append(tensor)
    if group:
        yield group
