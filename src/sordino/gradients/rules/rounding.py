"""How far rounding may carry what is released away from the gradient that was measured (floor 1, gradients).

A record chooses its own inputs, so it can make the terms of its gradient as large as it likes and let them cancel.
Then the norm of the true gradient says nothing about the rounding error of a sum that was formed in single precision.
The bound that decides the clipping factor therefore grows with the lengths of the terms, not only with the length of
their sum. Derivation: ``docs/proofs/clipping.md``.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from sordino.gradients.numerics import row_squared_norms
from sordino.gradients.products import transposed_product

__all__ = ["PIECE", "Rounding", "additions", "gram_rounding", "product", "unit"]

# Positions that one matrix product adds up; longer sums are cut into pieces of this length. Each halving halves the
# allowance and doubles the additions of whole matrices.
PIECE = 512


@dataclass(frozen=True, eq=False, kw_only=True)
class Rounding:
    """What the computed squared norm and the computed sum of a use may lack, per record.

    Args:
        squares: the true squared norm is at most this much above the computed one.
        length: the distance between the record's gradient and what is released for it at weight 1.
    """

    squares: Float[Tensor, " B"]
    length: Float[Tensor, " B"]


def unit(dtype: torch.dtype) -> float:
    """Largest relative error of one rounding."""
    return torch.finfo(dtype).eps / 2


def additions(positions: int) -> int:
    """How many roundings a term passes on its way through `product` over that many positions, at most."""
    pieces = -(-positions // PIECE)
    # One addition fewer than there are terms; one rounding for the weight, one for the product.
    return min(positions, PIECE + pieces) + 1


def product(
    left: Float[Tensor, "K m"], right: Float[Tensor, "K n"], weights: Float[Tensor, " K"]
) -> Float[Tensor, "m n"]:
    """``Σ_k weights[k] · left[k] ⊗ right[k]`` with sums over at most `PIECE` positions, whose results are added.

    What a library does inside a product isn't known; what it can do wrong in `PIECE` additions is.
    """
    if 0 < len(left) <= PIECE:
        return _piece(left, right, weights[:, None])
    total: Tensor | None = None
    for a, b, w in zip(left.split(PIECE), right.split(PIECE), weights[:, None].split(PIECE), strict=True):
        part = _piece(a, b, w)
        total = part if total is None else total.add_(part)
    return left.new_zeros(left.shape[1], right.shape[1]) if total is None else total


def _piece(left: Float[Tensor, "K m"], right: Float[Tensor, "K n"], weights: Float[Tensor, "K 1"]) -> Tensor:
    # The weights go to the narrower side.
    if left.shape[1] >= right.shape[1]:
        return transposed_product(left, right * weights)
    return transposed_product(left * weights, right)


def gram_rounding(
    first: Float[Tensor, "B T T"], second: Float[Tensor, "B T T"], *, inputs: int, outputs: int
) -> tuple[Float[Tensor, " B"], Float[Tensor, " B"]]:
    """What the rounding of ``n² = Σ_{s,t} first[s,t]·second[s,t]`` depends on: a bound on it, and the terms' lengths.

    An entry of `first` is an inner product over `inputs` numbers: its error is at most `inputs` roundings of the
    product of the two lengths, and the other matrix says how much that counts: with lengths a and the other matrix γ
    together ``Σ_{s,t} a_s a_t |γ_st| ≤ Σ_t a_t² · ‖γ‖``.
    """
    unit_, tiny = unit(first.dtype), torch.finfo(first.dtype).tiny
    a, g = (products.diagonal(dim1=1, dim2=2).clamp(min=0).double() for products in (first, second))
    of_first, of_second = (row_squared_norms(products).sqrt_() for products in (first, second))
    # One rounding more for the product of the entries; results below the smallest number are lost whole.
    squares = unit_ * ((inputs + 3) * of_second * a.sum(1) + (outputs + 3) * of_first * g.sum(1))
    a, g = a.sqrt(), g.sqrt()
    squares += tiny * (outputs * a.sum(1).square() + inputs * g.sum(1).square())
    return squares, (a * g).sum(1)
