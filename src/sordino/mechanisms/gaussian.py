"""The Gaussian mechanism on tensors, with noise from the run's cryptographic randomness (floor 1).

The noise is floating-point Gaussian noise: it protects against every adversary who sees values as real
numbers, not against one who inspects the last bits of the released floats (Mironov 2012). It is labelled so.

References:
    Dwork, Roth 2014, appendix A (mechanism); Box, Muller 1958 (transform).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sordino import checks
from sordino.events import Event, Gaussian
from sordino.mechanisms.releases import recordable
from sordino.randomness import Randomness, Stream

__all__ = ["GaussianMechanism", "standard_normal"]

# Pairs a block: the float64 intermediates of one block stay in the processor's cache.
_BLOCK = 1 << 15


def standard_normal(count: int, stream: Stream, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """`count` independent standard normal draws, shape (count,), on the CPU.

    Box–Muller: √(−2 ln U)·(cos 2πV, sin 2πV). U has 53 bits and its logarithm is taken in float64, so the
    tail reaches 8.6 standard deviations (32 bits would end at 6.8). V has 32 bits for float32 results and
    53 bits for float64.

    Args:
        count: ≥ 0.
        stream: source of the bits; read in order.
        dtype: float64 gives float64 arithmetic throughout; every other dtype is drawn in float32.

    Returns:
        A tensor of float64 when asked for, otherwise float32.
    """
    working = torch.float64 if dtype == torch.float64 else torch.float32
    noise = torch.empty(checks.integer(0, count=count), dtype=working)
    for start, block in _blocks(count, stream, working):
        noise[start : start + len(block)] = block
    return noise


def _blocks(count: int, stream: Stream, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
    """`count` draws as (position of the first, a block of them); a block is overwritten by the next one.

    The work is done in place, in arrays that stay in the processor's cache. NumPy's functions are vectorised for
    whatever processor they run on.
    """
    working = np.float64 if dtype == torch.float64 else np.float32
    most = min(_BLOCK, (count + 1) // 2)
    words, uniforms = np.empty(most, np.int64), np.empty(most, np.float64)
    turns, radii, draws = np.empty(most, np.int32), np.empty(most, working), np.empty(2 * most, working)
    angles = uniforms if dtype == torch.float64 else np.empty(most, np.float32)
    for start in range(0, count, 2 * _BLOCK):
        pairs = min(_BLOCK, (count - start + 1) // 2)
        radius, angle, block = radii[:pairs], angles[:pairs], draws[: 2 * pairs]
        _uniform53(words[:pairs], uniforms[:pairs], stream)
        np.log(uniforms[:pairs], out=uniforms[:pairs])
        # After the logarithm single precision loses nothing: the radius is rounded to it anyway.
        np.multiply(uniforms[:pairs], -2.0, out=radius, casting="same_kind")
        np.sqrt(radius, out=radius)
        if dtype == torch.float64:
            _uniform53(words[:pairs], angle, stream)
            angle *= 2 * math.pi
        else:
            stream.fill(turns[:pairs].data)
            np.copyto(angle, turns[:pairs], casting="same_kind")
            angle *= np.float32(2 * math.pi * 2.0**-32)
        np.multiply(np.cos(angle, out=block[:pairs]), radius, out=block[:pairs])
        np.multiply(np.sin(angle, out=block[pairs:]), radius, out=block[pairs:])
        yield start, torch.from_numpy(block[: count - start])


def _uniform53(words: np.ndarray, uniforms: np.ndarray, stream: Stream) -> None:
    """Float64 uniforms in (0, 1): odd multiples of 2⁻⁵⁴, rounded."""
    stream.fill(words.data)
    np.bitwise_and(words, (1 << 53) - 1, out=words)
    np.copyto(uniforms, words)
    uniforms += 0.5
    uniforms *= 2.0**-53


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

    @recordable
    def add_noise_(self, tensors: Sequence[Tensor], *, randomness: Randomness, step: int, rank: int = 0) -> None:
        """Add fresh noise to `tensors` in place; (`step`, `rank`) must never repeat within one `randomness`.

        All tensors take their noise from one stream, each its own stretch of it.
        """
        if self.stddev == 0:
            return
        stream = randomness.stream("gaussian", step=step, rank=rank)
        for group in _drawn_together(tensors):
            if len(group) == 1 and group[0].is_contiguous():
                self._add_to(group[0].view(-1), stream)
                continue
            sizes = [tensor.numel() for tensor in group]
            noise = standard_normal(sum(sizes), stream, dtype=group[0].dtype)
            for tensor, part in zip(group, noise.split(sizes), strict=True):
                tensor.add_(part.view(tensor.shape).to(tensor.device, tensor.dtype), alpha=self.stddev)

    def _add_to(self, entries: Tensor, stream: Stream) -> None:
        """Block by block, so that the noise of a large tensor is never in memory as a whole."""
        for start, block in _blocks(entries.numel(), stream, entries.dtype):
            part = entries[start : start + len(block)]
            part.add_(block.to(part.device, part.dtype), alpha=self.stddev)


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
