"""Sums of squares that neither drift, overflow nor underflow (floor 1, gradients).

A norm that is too small lets a record contribute more than the clipping norm, so every sum of squares here is good
to about 3e-7 relative, whatever the magnitude of the entries. Shapes: B records first.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from operator import attrgetter

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from sordino.gradients.usual import is_recorded

__all__ = ["compute_dtype", "full_precision", "row_squared_norms"]

# A single-precision running sum over 1e7 entries drifts by 7e-4; over a block of this length by at most 2e-7.
_BLOCK = 256

_PRODUCTS_ON_CPU = (attrgetter("mkldnn.matmul"), attrgetter("mkldnn.conv"))
_PRODUCTS_ON_CUDA = (attrgetter("cuda.matmul"), attrgetter("cudnn.conv"))


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """The common floating type of `tensors`, at least float32."""
    dtype = torch.float32
    for tensor in tensors:
        if tensor.dtype is not dtype:
            dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Products of single-precision matrices in single precision, whatever faster mode the user trains in.

    With TF32 or bfloat16 products, by setting or by autocast, a norm would be off by 1e-3, and the released sum would
    not be the one that was measured.
    """
    backends = [get(torch.backends) for get in (_PRODUCTS_ON_CUDA if device.type == "cuda" else _PRODUCTS_ON_CPU)]
    reduced = [(backend, mode) for backend in backends if (mode := backend.fp32_precision) not in ("ieee", "none")]
    for backend, _ in reduced:
        backend.fp32_precision = "ieee"
    autocast = torch.is_autocast_enabled(device.type)
    try:
        with torch.autocast(device.type, enabled=False) if autocast else nullcontext():
            yield
    finally:
        for backend, mode in reduced:
            backend.fp32_precision = mode


def row_squared_norms(x: Shaped[Tensor, "B *shape"]) -> Float[Tensor, " B"]:
    """Sum of squares of each record's entries, in float64.

    Blocks of entries are reduced in single precision and the blocks are added in double precision. Rows whose sum
    left the safe range of single precision are rescaled by their largest entry and summed again.

    | entries                   | result                     |
    |---------------------------|----------------------------|
    | none (an empty row)       | 0                          |
    | all 1e-30 or all 1e30     | exact to 1e-6              |
    | float16, 1000 × 1e-4      | 1e-5                       |
    | any NaN or infinity       | NaN or infinity            |
    """
    records = x.shape[0]
    if x.numel() == 0:
        return torch.zeros(records, dtype=torch.float64, device=x.device)
    rows = x.reshape(records, -1).to(compute_dtype(x))
    if is_recorded():
        # A compiler reads the entries once, whatever it adds them up in.
        return rows.double().square().sum(1)
    sums = _blocked(rows)
    if rows.dtype == torch.float64:
        return sums
    # Below this, squares of single-precision entries may have been flushed to zero. A NaN fails both comparisons.
    smallest, largest = rows.shape[1] * 1e-30, 1e37
    low, high = (float(end) for end in torch.aminmax(sums.detach()))
    if not (low > smallest and high < largest):
        index = (~((sums > smallest) & (sums < largest))).nonzero().flatten()
        sums[index] = _rescaled(rows.index_select(0, index))
    return sums


def _blocked(rows: Float[Tensor, "B n"]) -> Float[Tensor, " B"]:
    length = rows.shape[1]
    if rows.dtype == torch.float64 or length <= _BLOCK:
        return torch.linalg.vector_norm(rows, dim=1).double().square()
    block = _block_length(length)
    whole = length // block * block
    blocks = rows[:, :whole].unflatten(1, (-1, block))
    sums = torch.linalg.vector_norm(blocks, dim=2).double().square().sum(1)
    if whole < length:
        sums += torch.linalg.vector_norm(rows[:, whole:], dim=1).double().square()
    return sums


@lru_cache
def _block_length(length: int) -> int:
    """A divisor of `length`, so that no shorter block is left, or the longest block."""
    return next((block for block in range(_BLOCK, _BLOCK // 4, -1) if length % block == 0), _BLOCK)


def _rescaled(rows: Float[Tensor, "B n"]) -> Float[Tensor, " B"]:
    largest = rows.abs().amax(1)
    divisor = torch.where((largest > 0) & largest.isfinite(), largest, torch.ones_like(largest))
    return _blocked(rows / divisor[:, None]) * divisor.double().square()
