"""The Gaussian mechanism on tensors, with noise from the run's cryptographic randomness (floor 1).

The noise is floating-point Gaussian noise: it protects against every adversary who sees values as real
numbers, not against one who inspects the last bits of the released floats (Mironov 2012). It is labelled so.

References:
    Dwork, Roth 2014, appendix A (mechanism); Box, Muller 1958 (transform).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sordino import checks
from sordino.events import Event, Gaussian
from sordino.mechanisms.normal_draws import add_normal_, standard_normal
from sordino.mechanisms.releases import recordable
from sordino.randomness import Randomness

__all__ = ["GaussianMechanism", "drawn_together"]

# Small tensors would spend their time on starting draws: neighbours up to this many numbers draw together.
_TOGETHER = 1 << 16


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
        left = list(tensors)
        alone: list[Tensor] = []
        for number in drawn_together([(tensor.dtype, tensor.numel()) for tensor in tensors]):
            group, left = left[:number], left[number:]
            if len(group) == 1 and group[0].is_contiguous():
                alone.append(group[0].view(-1))
                continue
            add_normal_(alone, stream, stddev=self.stddev)
            alone = []
            sizes = [tensor.numel() for tensor in group]
            noise = standard_normal(sum(sizes), stream, dtype=group[0].dtype)
            parts = zip(group, noise.split(sizes), strict=True)
            own = [part.view(tensor.shape).to(tensor.device, tensor.dtype) for tensor, part in parts]
            torch._foreach_add_(group, own, alpha=self.stddev)
        add_normal_(alone, stream, stddev=self.stddev)


def drawn_together(tensors: Sequence[tuple[torch.dtype, int]]) -> Iterator[int]:
    """How many neighbours draw together, group by group: as many of one type as are worth it.

    Args:
        tensors: type and number of entries of each.
    """
    number = size = 0
    last: torch.dtype | None = None
    for dtype, entries in tensors:
        if number and (dtype != last or size + entries > _TOGETHER):
            yield number
            number = size = 0
        number, size, last = number + 1, size + entries, dtype
    if number:
        yield number
