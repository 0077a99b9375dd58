"""The Gaussian mechanism on tensors, with noise from the run's cryptographic randomness (floor 1).

The noise is floating-point Gaussian noise: it protects against every adversary who sees values as real
numbers, not against one who inspects the last bits of the released floats (Mironov 2012). It is labelled so.

References:
    Dwork, Roth 2014, appendix A (mechanism); Box, Muller 1958 (transform).
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sordino import checks
from sordino.events import Event, Gaussian
from sordino.mechanisms.normal_draws import add_normal_
from sordino.mechanisms.releases import recordable
from sordino.randomness import Randomness

__all__ = ["GaussianMechanism", "alike"]


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

        All tensors take their noise from one stream, each its own draws.
        """
        if self.stddev == 0:
            return
        stream = randomness.stream("gaussian", step=step, rank=rank)
        for group in alike(tensors):
            add_normal_(group, stream, stddev=self.stddev)


def alike(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Neighbours whose noise is drawn in one row: in double precision, or in single precision for every other type."""
    return [list(group) for _, group in itertools.groupby(tensors, lambda tensor: tensor.dtype == torch.float64)]
