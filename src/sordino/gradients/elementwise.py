"""Operations on the entries of small arrays, by torch or by numpy (floor 1, gradients).

A loop over time steps calls many operations on a few thousand numbers each. There numpy's way in is shorter than
torch's, and its tanh has kernels for wide registers, several times as fast. Which is taken depends on the place, type
and size alone, never on a clock or on data, and changes only rounding.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sordino.gradients.usual import is_recorded

__all__ = ["Array", "Elementwise", "NUMPY", "TORCH", "elementwise"]

# A tensor, or numpy's array on the same memory: both are cut and assigned to alike.
Array = Any

# Twice the size from which torch uses several threads: there these could make up for numpy's wider kernels.
_MOST = 65536


@dataclass(frozen=True, kw_only=True)
class Elementwise:
    """One library's operations. Results go to the last argument, which overlaps no other unless they are the same.

    Args:
        of: a tensor's memory as the library's array.
        multiply: (a, b, out).
        add: (a, b, out).
        subtract: (a, b, out).
        tanh: (x, out).
        less_product: (a, b, c, out): ``a − b·c``, out being none of the three.
        plus_product: (a, b, c, out): ``a + b·c``, out being a or none of the three.
    """

    of: Callable[[Tensor], Array]
    multiply: Callable[[Array, Array, Array], object]
    add: Callable[[Array, Array, Array], object]
    subtract: Callable[[Array, Array, Array], object]
    tanh: Callable[[Array, Array], object]
    less_product: Callable[[Array, Array, Array, Array], object]
    plus_product: Callable[[Array, Array, Array, Array], object]


def elementwise(like: Tensor, entries: int) -> Elementwise:
    """What is faster for arrays of about so many entries."""
    by_numpy = (
        entries <= _MOST
        and type(like) is Tensor
        and like.device.type == "cpu"
        and like.dtype in (torch.float32, torch.float64)
        # What is recorded must be seen by torch.
        and not is_recorded()
        and not torch._C._len_torch_dispatch_stack()  # pyright: ignore[reportPrivateUsage]
    )
    return NUMPY if by_numpy else TORCH


def _numpy_less_product(a: Array, b: Array, c: Array, out: Array) -> None:
    np.multiply(b, c, out)
    np.subtract(a, out, out)


def _numpy_plus_product(a: Array, b: Array, c: Array, out: Array) -> None:
    np.add(a, np.multiply(b, c), out)


TORCH = Elementwise(
    of=lambda tensor: tensor,
    multiply=lambda a, b, out: torch.mul(a, b, out=out),
    add=lambda a, b, out: torch.add(a, b, out=out),
    subtract=lambda a, b, out: torch.sub(a, b, out=out),
    tanh=lambda x, out: torch.tanh(x, out=out),
    less_product=lambda a, b, c, out: torch.addcmul(a, b, c, value=-1, out=out),
    plus_product=lambda a, b, c, out: torch.addcmul(a, b, c, out=out),
)
NUMPY = Elementwise(
    of=Tensor.numpy,
    multiply=np.multiply,
    add=np.add,
    subtract=np.subtract,
    tanh=np.tanh,
    less_product=_numpy_less_product,
    plus_product=_numpy_plus_product,
)
