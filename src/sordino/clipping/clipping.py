"""What every clipping method is (floor 1, clipping)."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import fields
from typing import ClassVar, final

import torch
from jaxtyping import Float
from torch import Tensor

from sordino import checks
from sordino.definitions import NeighboringRelation

__all__ = ["Clipping", "contributions_within"]

# A norm is a product of at most two lengths, each off by at most 1e-6 relative (sums over blocks of 256 in single
# precision). What cancelling terms add to that is in the bounds that are given.
_SLACK = 2e-6


class Clipping(ABC):
    """How a record's gradient is made small enough: one factor a record, or one for each group of parameters.

    A method knows no bound of its own. The bound `max_grad_norm` C is the plan's, may change from step to step, and is
    given with every call, so that clip factors and noise always read the same number.

    Guarantee: for every method, a record's gradient after clipping has ℓ2 norm at most C over all parameters
    together, and a record whose gradient is not finite contributes exactly zero.
    """

    kind: ClassVar[str]

    @property
    @abstractmethod
    def words(self) -> str:
        """The method as it is written in a report."""

    @abstractmethod
    def factors(self, squared_norms: Float[Tensor, "*B"], *, max_grad_norm: float) -> Float[Tensor, "*B"]:
        """One factor ≥ 0 for each squared norm n², with ``factor · n ≤ max_grad_norm``; 0 where n² is not finite.

        Args:
            squared_norms: squared gradient norms n², one per record, or squares of bounds on them; may hold infinities
                and NaN. Clip gradients of a model by the bounds, `GradientCapture.squared_bounds`.
            max_grad_norm: the bound C, finite and > 0, in units of the gradient.
        """

    def groups(self, sizes: Mapping[str, int]) -> tuple[tuple[str, ...], ...]:
        """The parameters that are clipped together; `sizes` holds the number of entries of each, by name."""
        return (tuple(sizes),)

    def thresholds(self, sizes: Mapping[str, int], *, max_grad_norm: float) -> tuple[float, ...]:  # noqa: ARG002
        """The bound of each group; the root of the sum of their squares is at most `max_grad_norm`."""
        return (max_grad_norm,)

    @final
    def sensitivity(self, relation: NeighboringRelation, *, max_grad_norm: float) -> float:
        """How far one unit moves the clipped sum, in ℓ2 norm: C, or 2C under replace-one."""
        return checks.positive(max_grad_norm=max_grad_norm) * relation.sensitivity_factor

    @final
    def options(self) -> dict[str, object]:
        """The method's options by name, as they were given."""
        return {item.name: getattr(self, item.name) for item in fields(self)}  # pyright: ignore[reportArgumentType]


def contributions_within(
    squared_norms: Float[Tensor, "*B"], largest: Float[Tensor, "*B"], factors: Float[Tensor, "*B"]
) -> Float[Tensor, "*B"]:
    """`factors`, lowered to `largest` where they exceed it, and 0 where the squared norm is not finite.

    `largest` is C/(n(1 + 2e-6)): the norms that are given may be too small by rounding.
    """
    return torch.where(squared_norms.isfinite(), torch.minimum(factors, largest), torch.zeros_like(factors))


def largest_factors(norms: Float[Tensor, "*B"], max_grad_norm: float) -> Float[Tensor, "*B"]:
    """The largest factor that is allowed for each norm n: C/(n(1 + 2e-6)), infinite for 0."""
    return checks.positive(max_grad_norm=max_grad_norm) / (norms * (1 + _SLACK))
