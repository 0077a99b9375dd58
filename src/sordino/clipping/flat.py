"""Flat clipping: one bound on the norm of a record's whole gradient (floor 1, clipping)."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from sordino import checks
from sordino.definitions import NeighboringRelation

__all__ = ["FlatClipping"]

# A norm is a product of at most two lengths, each off by at most 1e-6 relative (sums over blocks of 256 in single
# precision). What cancelling terms add to that is in the bounds that are given.
_SLACK = 2e-6


@dataclass(frozen=True, kw_only=True)
class FlatClipping:
    """Scale each record's gradient so that its ℓ2 norm is at most `max_grad_norm`.

    Guarantee:
        For every record, ``factor · norm ≤ max_grad_norm``; a record whose gradient is not finite contributes
        exactly zero. Adding or removing one record therefore moves the clipped sum by at most `max_grad_norm`,
        replacing one by at most twice that. See ``docs/proofs/clipping.md``.

    | squared norm n²          | factor                    |
    |--------------------------|---------------------------|
    | 0                        | 1                         |
    | n ≤ C/(1 + 2e-6)         | 1                         |
    | n > C/(1 + 2e-6)         | C/(n(1 + 2e-6))           |
    | tiny (C/n overflows)     | 1                         |
    | infinite, NaN            | 0                         |
    | no records               | an empty tensor           |

    Args:
        max_grad_norm: the bound C, finite and > 0, in units of the gradient.

    Example:
        >>> import torch
        >>> FlatClipping(max_grad_norm=1.0).factors(torch.tensor([0.25, 4.0, torch.nan], dtype=torch.float64))
        tensor([1.0000, 0.5000, 0.0000], dtype=torch.float64)

    References:
        Abadi et al. 2016, "Deep learning with differential privacy", Algorithm 1.
    """

    max_grad_norm: float

    def __post_init__(self) -> None:
        checks.positive(max_grad_norm=self.max_grad_norm)

    def factors(self, squared_norms: Float[Tensor, " B"]) -> Float[Tensor, " B"]:
        """One factor in [0, 1] per record.

        Args:
            squared_norms: squared gradient norms n², one per record, or squares of bounds on them; may hold infinities
                and NaN. Clip gradients of a model by the bounds, `GradientCapture.squared_bounds`.

        Returns:
            ``min(1, C/(n(1 + 2e-6)))``, exactly 0 where n² is not finite; the type of `squared_norms`.
        """
        norms = squared_norms.clamp(min=0).sqrt()
        factors = (self.max_grad_norm / (norms * (1 + _SLACK))).clamp(max=1)
        return torch.where(squared_norms.isfinite(), factors, torch.zeros_like(factors))

    def sensitivity(self, relation: NeighboringRelation) -> float:
        """How far one unit moves the clipped sum, in ℓ2 norm: C, or 2C under replace-one."""
        return self.max_grad_norm * relation.sensitivity_factor
