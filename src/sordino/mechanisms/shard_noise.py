"""The noise of tensors of which each process holds a part: every part takes its stretch of the one noise (floor 1)."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from sordino.errors import InvalidArgument
from sordino.events import Event
from sordino.mechanisms.gaussian import GaussianMechanism, alike
from sordino.mechanisms.normal_draws import add_normal_
from sordino.mechanisms.releases import recordable
from sordino.randomness import Randomness

__all__ = ["Part", "ShardNoise"]


@dataclass(frozen=True, kw_only=True)
class Part:
    """Where a held tensor lies in the whole one, counted in entries of the flattened whole.

    Args:
        first: place of its first entry.
        whole: number of entries of the whole tensor; the held one has at most so many.
    """

    first: int
    whole: int


@dataclass(frozen=True, kw_only=True)
class ShardNoise:
    """Adds to the held parts of tensors the noise that `mechanism` would add to the whole tensors.

    Guarantee: all parts of all processes together are one release of `mechanism` on the whole tensors, when every
    process draws from the same key: each entry gets the draw of its own place, so noise on different parts is
    independent, and the same on copies of one part.

    Args:
        mechanism: of the whole tensors.
        parts: what is held of each tensor, in order.

    Example:
        >>> import torch
        >>> mechanism = GaussianMechanism(noise_multiplier=1.0, l2_sensitivity=1.0)
        >>> randomness, whole, held = Randomness(), torch.zeros(5), torch.zeros(2)
        >>> mechanism.add_noise_([whole], randomness=randomness, step=0)
        >>> ShardNoise(mechanism=mechanism, parts=(Part(first=3, whole=5),)).add_noise_(
        ...     [held], randomness=randomness, step=0)
        >>> bool((held == whole[3:]).all())
        True

    References:
        NIST SP 800-38A, section 6.5: any stretch of a counter-mode stream can be made without the rest.
    """

    mechanism: GaussianMechanism
    parts: tuple[Part, ...]

    @property
    def noise_multiplier(self) -> float:
        """Standard deviation over sensitivity."""
        return self.mechanism.noise_multiplier

    @property
    def l2_sensitivity(self) -> float:
        """Of all whole tensors together."""
        return self.mechanism.l2_sensitivity

    @property
    def stddev(self) -> float:
        """Standard deviation of the noise on each entry."""
        return self.mechanism.stddev

    def event(self) -> Event:
        """The event of one release of the whole tensors."""
        return self.mechanism.event()

    @recordable
    def add_noise_(self, tensors: Sequence[Tensor], *, randomness: Randomness, step: int, rank: int = 0) -> None:
        """Add the noise of their places to `tensors` in place; (`step`, `rank`) must never repeat.

        Raises:
            InvalidArgument: a part doesn't lie in its whole.
        """
        for tensor, part in zip(tensors, self.parts, strict=True):
            if not 0 <= part.first <= part.first + tensor.numel() <= part.whole:
                raise InvalidArgument("parts must lie within their tensors, got one beyond its end. Check the shards.")
        if self.stddev == 0:
            return
        stream = randomness.stream("gaussian", step=step, rank=rank)
        left = list(self.parts)
        for group in alike(tensors):
            parts, left = left[: len(group)], left[len(group) :]
            wholes = list(itertools.accumulate((part.whole for part in parts), initial=0))
            places = [start + part.first for start, part in zip(wholes, parts, strict=False)]
            add_normal_(group, stream, stddev=self.stddev, places=places, count=wholes[-1])
