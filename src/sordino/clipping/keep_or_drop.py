"""Global clipping: a gradient counts whole or not at all (floor 1, clipping)."""

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from jaxtyping import Float
from torch import Tensor

from sordino import checks
from sordino.clipping.clipping import Clipping, contributions_within, largest_factors

__all__ = ["GlobalClipping"]


@final
@dataclass(frozen=True, kw_only=True)
class GlobalClipping(Clipping):
    """Keep every gradient up to the threshold, all scaled alike, and drop the others: factor C/(ρC) if n ≤ ρC, else 0.

    When: the direction of the mean gradient matters more than every record's say. The tangent kernel of the clipped
    dynamics stays symmetric and positive semi-definite, and large thresholds leave a model better calibrated.

    Guarantee: ``factor · norm ≤ max_grad_norm`` for every record; not finite contributes zero.

    Args:
        threshold: ρ > 0, the norm up to which gradients count, as a multiple of `max_grad_norm`; 1 keeps them as
            they are, larger ones shrink all by 1/ρ and drop fewer.

    Example:
        >>> import torch
        >>> GlobalClipping(threshold=2.0).factors(torch.tensor([0.25, 1.0, 9.0]), max_grad_norm=1.0)
        tensor([0.5000, 0.5000, 0.0000])

    References:
        Bu, Wang, Long 2023, "On the convergence and calibration of deep learning with differential privacy", section 4.
    """

    threshold: float = 1.0
    kind: ClassVar[str] = "global"

    def __post_init__(self) -> None:
        checks.positive(threshold=self.threshold)

    @property
    def words(self) -> str:
        """The method as it is written in a report."""
        return f"global clipping, threshold {self.threshold:g} times the bound"

    def factors(self, squared_norms: Float[Tensor, "*B"], *, max_grad_norm: float) -> Float[Tensor, "*B"]:
        """``1/ρ`` where n(1 + 2e-6) ≤ ρC, else 0; 0 where n² is not finite."""
        norms = squared_norms.clamp(min=0).sqrt()
        largest = largest_factors(norms, max_grad_norm)
        share = torch.full_like(norms, 1 / self.threshold)
        return contributions_within(
            squared_norms, largest, torch.where(largest >= share, share, torch.zeros_like(norms))
        )
