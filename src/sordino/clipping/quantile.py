"""Clipping bounds that follow a private quantile of the norms (floor 1, clipping)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, final

import torch
from jaxtyping import Float
from torch import Tensor

from sordino import checks
from sordino.clipping.clipping import Clipping
from sordino.clipping.flat import FlatClipping
from sordino.definitions import NeighboringRelation
from sordino.errors import InvalidArgument

__all__ = ["QuantileClipping", "QuantileThresholds"]

# How far a bound may move from where it began, as a factor.
_FARTHEST = 1e6


@final
@dataclass(frozen=True, kw_only=True)
class QuantileClipping(Clipping):
    """Let each bound follow the `quantile` of the gradient norms: C ← C · exp(−η(b̃ − γ)), b̃ the noisy share below C.

    When: the scale of the gradients is unknown or changes, and a public guess of the bound would be poor. The plan's
    `max_grad_norm` is where the bound begins.

    Guarantee:
        The clipped sum and the counts of records below their bounds are released together as *one* Gaussian
        mechanism: counts are scaled so that the same noise covers both, and the sensitivity is that of the joint
        vector. A step is ``Gaussian(noise_multiplier)`` exactly as without the counts; what they cost is a larger
        noise on the gradient, z_Δ = (z⁻² − z_b⁻²)^(−1/2). New bounds are computed from released counts only.

    Args:
        quantile: γ in (0, 1), the share of records to be left unclipped.
        learning_rate: η > 0 of the bound's logarithm.
        count_noise: standard deviation of the noise on the count of a batch, in records, > 0; a twentieth of the
            expected batch size is usual. It must exceed noise_multiplier · √G / 2 for G groups (twice that under
            replace-one).
        inner: how gradients are clipped to the bounds; a `GroupedClipping` gives every group its own quantile.

    Raises:
        InvalidArgument: a value is out of its range, or `inner` adapts itself.

    Example:
        >>> QuantileClipping(quantile=0.5, count_noise=12.8).words
        'flat clipping at the private 0.5 quantile'

    References:
        Andrew, Thakkar, McMahan, Ramaswamy 2021, "Differentially private learning with adaptive clipping", algorithm 1
        and theorem 1; He et al. 2023, section 3.2 (per-layer quantiles).
    """

    quantile: float = 0.5
    learning_rate: float = 0.2
    count_noise: float
    inner: Clipping = field(default_factory=FlatClipping)
    kind: ClassVar[str] = "quantile"

    def __post_init__(self) -> None:
        checks.probability(zero=False, one=False, quantile=self.quantile)
        checks.positive(learning_rate=self.learning_rate)
        checks.positive(count_noise=self.count_noise)
        if isinstance(self.inner, QuantileClipping):
            raise InvalidArgument("inner must have fixed bounds, got QuantileClipping. Give FlatClipping().")

    @property
    def words(self) -> str:
        """The method as it is written in a report."""
        return f"{self.inner.words} at the private {self.quantile:g} quantile"

    def groups(self, sizes: Mapping[str, int]) -> tuple[tuple[str, ...], ...]:
        """The groups of `inner`."""
        return self.inner.groups(sizes)

    def thresholds(self, sizes: Mapping[str, int], *, max_grad_norm: float) -> tuple[float, ...]:
        """The bounds of the first step: those of `inner`."""
        return self.inner.thresholds(sizes, max_grad_norm=max_grad_norm)

    def factors(self, squared_norms: Float[Tensor, "*B"], *, max_grad_norm: float) -> Float[Tensor, "*B"]:
        """The factors of `inner` for one group whose bound is `max_grad_norm`."""
        return self.inner.factors(squared_norms, max_grad_norm=max_grad_norm)

    def begin(self, thresholds: Sequence[float]) -> "QuantileThresholds":
        """The moving bounds of a run that begins with `thresholds`."""
        return QuantileThresholds(self, thresholds)


class QuantileThresholds:
    """The bounds of a run with `QuantileClipping`: functions of released counts, so they may be published.

    Args:
        clipping: the method.
        start: the bound of each group before the first step.
    """

    def __init__(self, clipping: QuantileClipping, start: Sequence[float]) -> None:
        self._clipping = clipping
        self._start = tuple(checks.positive(start=bound) for bound in start)
        self.values = self._start

    def below(self, squared_norms: Float[Tensor, "G B"]) -> Float[Tensor, " G"]:
        """``Σ_b (1[n ≤ C_g] − 1/2)`` for each group: a record moves each entry by at most 1/2 (1 when replaced)."""
        bounds = torch.tensor(self.values, dtype=torch.float64, device=squared_norms.device)[:, None]
        inside = squared_norms.double() <= bounds.square()
        return (inside.to(torch.float64) - 0.5).sum(1)

    def joint(self, relation: NeighboringRelation, noise_multiplier: float) -> tuple[float, float]:
        """(scale κ of the counts, ℓ2 sensitivity Δ of the clipped sum and κ times the counts together).

        With noise s = zΔ on every entry, Δ² = f²(Σ_g C_g² + κ²G/4) and κ = s / count_noise:
        s² = z²f²ΣC_g² / (1 − z²f²G / (4 count_noise²)), f = 2 under replace-one and 1 otherwise.

        Raises:
            InvalidArgument: `count_noise` is too small for the noise multiplier: the counts alone would cost more.
        """
        factor, noise = relation.sensitivity_factor, self._clipping.count_noise
        total = math.fsum(bound**2 for bound in self.values)
        share = (noise_multiplier * factor) ** 2 * len(self.values) / (4 * noise**2)
        if share >= 1:
            least = noise_multiplier * factor * math.sqrt(len(self.values)) / 2
            raise InvalidArgument(
                f"count_noise must exceed noise_multiplier · √groups / 2 = {least:g}, got {noise:g}. Raise it, or use "
                "fewer groups."
            )
        if noise_multiplier == 0:
            return 1.0, factor * math.sqrt(total + len(self.values) / 4)
        stddev = noise_multiplier * factor * math.sqrt(total / (1 - share))
        return stddev / noise, stddev / noise_multiplier

    def update(self, noisy_counts: Sequence[float], *, expected_batch_size: float) -> None:
        """Move each bound by what was released; `expected_batch_size` is public."""
        moved = []
        for bound, start, count in zip(self.values, self._start, noisy_counts, strict=True):
            share = count / expected_batch_size + 0.5
            exponent = -self._clipping.learning_rate * (share - self._clipping.quantile)
            # The exponent is cut so that no noise can overflow the bound.
            moved.append(min(max(bound * math.exp(min(max(exponent, -50), 50)), start / _FARTHEST), start * _FARTHEST))
        self.values = tuple(moved)
