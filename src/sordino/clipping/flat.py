"""Flat clipping: one bound on the norm of a record's whole gradient (floor 1, clipping)."""

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from jaxtyping import Float
from torch import Tensor

from sordino.clipping.clipping import Clipping, contributions_within, largest_factors

__all__ = ["FlatClipping"]


@final
@dataclass(frozen=True, kw_only=True)
class FlatClipping(Clipping):
    """Scale each record's gradient down so that its ℓ2 norm is at most `max_grad_norm`; leave smaller ones alone.

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

    Example:
        >>> import torch
        >>> FlatClipping().factors(torch.tensor([0.25, 4.0, torch.nan], dtype=torch.float64), max_grad_norm=1.0)
        tensor([1.0000, 0.5000, 0.0000], dtype=torch.float64)

    References:
        Abadi et al. 2016, "Deep learning with differential privacy", Algorithm 1.
    """

    kind: ClassVar[str] = "flat"

    @property
    def words(self) -> str:
        """The method as it is written in a report."""
        return "flat clipping"

    def factors(self, squared_norms: Float[Tensor, "*B"], *, max_grad_norm: float) -> Float[Tensor, "*B"]:
        """``min(1, C/(n(1 + 2e-6)))``, exactly 0 where n² is not finite; the type of `squared_norms`."""
        norms = squared_norms.clamp(min=0).sqrt()
        return contributions_within(squared_norms, largest_factors(norms, max_grad_norm), torch.ones_like(norms))
