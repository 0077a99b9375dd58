"""AdaClip: gradients are centred and scaled entry by entry before they are clipped (floor 1, clipping)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from jaxtyping import Float
from torch import Tensor

from sordino import checks
from sordino.clipping.clipping import Clipping
from sordino.clipping.flat import FlatClipping
from sordino.errors import InvalidArgument

__all__ = ["AdaClip", "AdaClipState"]


@final
@dataclass(frozen=True, kw_only=True)
class AdaClip(Clipping):
    """Clip w = (g − a)/b to norm 1, add noise to Σ w, and go back: less noise where gradients are small.

        w_i = (g_i − a)/b,   w̃ = Σ_i w_i·min(1, 1/‖w_i‖) + N(0, (z·Δ)² I),   g̃ = a + b·w̃/B                     (1)

    With b the same for all entries and a = 0 this is flat clipping at b, which is how a run begins. Noise reaches entry
    j as z·b_j/B. For a total Σ b_j² = d·C², that of flat clipping at C = `max_grad_norm`, E‖w‖² is least at

        b_j = C·√(d·s_j / Σ_k s_k),     s_j² the variance of entry j.                                            (2)

    When: entries differ much in scale. Each record's gradient is formed apart: slower than flat clipping by far.

    Guarantee:
        Every record adds a vector of norm at most 1 to Σ w, so that a step is ``Gaussian(noise_multiplier)``, whatever
        a and b are, as long as they are fixed before the step: they follow from released g̃ alone. Nothing else is
        released. See ``docs/proofs/adaclip.md``.

    Args:
        mean_decay: β₁ in [0, 1) of a ← β₁ a + (1 − β₁) g̃.
        variance_decay: β₂ in [0, 1) of u ← β₂ u + (1 − β₂)[(g̃ − a)² − (z Δ b/B)²], of which s² is the positive part.
        smallest: s is at least this times its root mean square, in (0, 1].
        largest: s is at most this times its root mean square, ≥ 1.

    Raises:
        InvalidArgument: a value is out of its range.

    Example:
        >>> AdaClip().words
        'AdaClip'

    References:
        Pichapati, Suresh, Yu, Reddi, Kumar 2019, "AdaClip: adaptive clipping for private SGD", theorem 2, algorithm 2.
        There the variance's estimate is cut before it is averaged, and the scale of b is that of s; here the average is
        cut, which leaves less bias, and the plan's clipping norm gives the scale.
    """

    mean_decay: float = 0.99
    variance_decay: float = 0.99
    smallest: float = 0.1
    largest: float = 10.0
    kind: ClassVar[str] = "adaclip"

    def __post_init__(self) -> None:
        checks.probability(one=False, mean_decay=self.mean_decay)
        checks.probability(one=False, variance_decay=self.variance_decay)
        checks.probability(zero=False, smallest=self.smallest)
        if not checks.positive(largest=self.largest) >= 1:
            raise InvalidArgument(f"largest must be ≥ 1, got {self.largest!r}. It is a multiple of the mean scale.")

    @property
    def words(self) -> str:
        """The method as it is written in a report."""
        return "AdaClip"

    def factors(self, squared_norms: Float[Tensor, "*B"], *, max_grad_norm: float) -> Float[Tensor, "*B"]:
        """Those of flat clipping; in (1) the norms are those of w and the bound is 1."""
        return FlatClipping().factors(squared_norms, max_grad_norm=max_grad_norm)

    def begin(self, sizes: Sequence[int]) -> "AdaClipState":
        """The transform before the first step; `sizes` are the numbers of entries of the parameters."""
        return AdaClipState(self, [torch.zeros(size, dtype=torch.float64) for size in sizes])


class AdaClipState:
    """a and b of (1) and (2) in one run: functions of released gradients, so they may be published.

    Args:
        clipping: the method.
        zeros: one vector of zeros for each parameter.
    """

    def __init__(self, clipping: AdaClip, zeros: Sequence[Tensor]) -> None:
        self._clipping = clipping
        self.mean = [part.clone() for part in zeros]
        self.variance = [part.clone() for part in zeros]

    def scale(self, max_grad_norm: float) -> list[Tensor]:
        """The scale b of (2), one vector a parameter; C everywhere while nothing is known."""
        entries = sum(part.numel() for part in self.variance)
        square = sum((float(part.clamp_min(0).sum()) for part in self.variance), 0.0) / max(1, entries)
        if square <= 0:
            return [torch.full_like(part, max_grad_norm) for part in self.variance]
        root = square**0.5
        low, high = self._clipping.smallest * root, self._clipping.largest * root
        spread = [part.clamp_min(0).sqrt().clamp(low, high) for part in self.variance]
        total = sum(float(part.sum()) for part in spread)
        return [max_grad_norm * (part * (entries / total)).sqrt() for part in spread]

    def learn(self, released: Sequence[Tensor], noise: Sequence[Tensor]) -> None:
        """Take in a released gradient g̃; `noise` is the standard deviation z·Δ·b/B of its entries."""
        kept, remembered = self._clipping.variance_decay, self._clipping.mean_decay
        for place, (gradient, stddev) in enumerate(zip(released, noise, strict=True)):
            excess = (gradient - self.mean[place]).square() - stddev.square()
            self.variance[place] = kept * self.variance[place] + (1 - kept) * excess
            self.mean[place] = remembered * self.mean[place] + (1 - remembered) * gradient
