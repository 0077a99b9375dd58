"""Products of matrices by the faster of the libraries that torch comes with (floor 1, gradients).

torch hands single-precision products on x86 to MKL, which takes its AVX-512 kernels on Intel's processors only. oneDNN,
which torch takes for convolutions, has such kernels for every processor: twice as fast there. Which library is taken
depends on the processor and the sizes alone, never on a clock or on data, and changes only the order of additions.
"""

import platform
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from sordino.gradients.usual import is_recorded

__all__ = ["affine", "affine_map", "grams", "per_record_product", "transposed_product"]

Activation = Literal["none", "tanh", "sigmoid", "relu"]

# Multiply-adds from which a call of oneDNN pays for its longer way in.
_LEAST = 2_000_000
# Lengths of sums are multiples of this, and what is left is added apart.
_ROWS = 64
_APPLIED = {"none": lambda x: x, "tanh": torch.tanh_, "sigmoid": torch.sigmoid_, "relu": torch.relu_}


def affine(
    x: Float[Tensor, "K d"], weight: Float[Tensor, "p d"], bias: Tensor | None = None, activation: Activation = "none"
) -> Float[Tensor, "K p"]:
    """``activation(x W^T + b)``, without a graph."""
    if _by_onednn(x, weight, x.numel() * weight.shape[0]):
        return torch.ops.mkldnn._linear_pointwise.default(x, _dense(weight), bias, activation, [], "")
    return _applied(x, weight.t(), bias, activation)


def affine_map(
    rows: int, weight: Float[Tensor, "p d"], bias: Tensor | None = None, activation: Activation = "none"
) -> Callable[[Float[Tensor, "K d"]], Float[Tensor, "K p"]]:
    """`affine` as a function of x alone, for many calls with about as many `rows` each.

    The weight is brought into the order of oneDNN's kernels once; it must stay as it is.
    """
    if _by_onednn(weight, weight, rows * weight.numel()):
        call = torch.ops.mkldnn._linear_pointwise.default
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), rows)
        return lambda x: call(x, packed, bias, activation, [], "")
    turned = weight.t()
    return lambda x: _applied(x, turned, bias, activation)


def transposed_product(left: Float[Tensor, "K m"], right: Float[Tensor, "K n"]) -> Float[Tensor, "m n"]:
    """``left^T right``; it may be laid out column by column."""
    # Few columns are no faster.
    thin = min(left.shape[1], right.shape[1]) < 16
    if thin or not _by_onednn(left, right, left.numel() * right.shape[1]):
        return left.t() @ right
    rows, wide, narrow = left.shape[0], left.shape[1], right.shape[1]
    if wide > narrow and rows * (wide - narrow) >= wide * narrow:
        # The library wants its first factor turned in memory: the smaller one, if turning the result costs no more.
        return transposed_product(right, left).t()
    # Kernels are made for each length: sampled batches, which have any, are cut so that there are few.
    whole = rows if rows < _ROWS else rows // _ROWS * _ROWS
    a, b = _dense(left[:whole]), _dense(right[:whole])
    result = torch.ops.mkldnn._linear_pointwise.default(a.t(), b.t(), None, "none", [], "")
    return result if whole == rows else result.addmm_(left[whole:].t(), right[whole:])


def per_record_product(left: Float[Tensor, "B T p"], right: Float[Tensor, "B T d"]) -> Float[Tensor, "B p d"]:
    """``left[b]^T right[b]`` for each record b."""
    records, rows, columns = left.shape[0], left.shape[2], right.shape[2]
    if not _by_onednn(left, right, left.shape[1] * rows * columns):
        return torch.bmm(left.transpose(1, 2), right)
    result = left.new_empty(records, rows, columns)
    for b in range(records):
        result[b] = transposed_product(left[b], right[b])
    return result


def grams(x: Float[Tensor, "B T d"]) -> Float[Tensor, "B T T"]:
    """Inner products of every two positions of each record."""
    records, positions, width = x.shape
    work = positions**2 * width
    if work < 2 * _LEAST and positions >= 64 and width >= 256 and x.device.type == "cpu" and not is_recorded():
        return _halved_grams(x)
    if not _by_onednn(x, x, work):
        return torch.bmm(x, x.transpose(1, 2))
    result = x.new_empty(records, positions, positions)
    for b in range(records):
        rows = _dense(x[b])
        result[b] = torch.ops.mkldnn._linear_pointwise.default(rows, rows, None, "none", [], "")
    return result


def _halved_grams(x: Float[Tensor, "B T d"]) -> Float[Tensor, "B T T"]:
    """Each quarter of the positions with itself and those before it; the rest by symmetry.

    For products of this size that is worth more than wider kernels, which are called for each record.
    """
    records, positions, _ = x.shape
    result, turned, step = x.new_empty(records, positions, positions), x.transpose(1, 2), -(-positions // 4)
    for first in range(0, positions, step):
        last = min(first + step, positions)
        part = torch.bmm(x[:, first:last], turned[:, :, :last])
        result[:, first:last, :last] = part
        result[:, :first, first:last] = part[:, :, :first].transpose(1, 2)
    return result


def _applied(x: Tensor, turned: Tensor, bias: Tensor | None, activation: Activation) -> Tensor:
    return _APPLIED[activation](x @ turned if bias is None else torch.addmm(bias, x, turned))


def _dense(matrix: Tensor) -> Tensor:
    """A copy where rows are apart in memory: oneDNN has no fast kernel for these."""
    return matrix if matrix.is_contiguous() or matrix.t().is_contiguous() else matrix.contiguous()


def _by_onednn(left: Tensor, right: Tensor, work: int) -> bool:
    return (
        work >= _LEAST
        and left.dtype is right.dtype is torch.float32
        and left.device.type == "cpu"
        # A graph that is recorded is compiled from plain operations; nothing may be tried out while it is.
        and not is_recorded()
        and not torch._C._len_torch_dispatch_stack()  # pyright: ignore[reportPrivateUsage]
        and torch._C._get_mkldnn_enabled()  # pyright: ignore[reportPrivateUsage]
        and _is_faster()
    )


@cache
def _is_faster() -> bool:
    """Whether oneDNN's kernels are wider than MKL's on this processor, and are where they are expected."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or "Intel" in _maker():
        return False
    x, weight = torch.linspace(-1, 1, 32).view(8, 4), torch.linspace(-2, 3, 12).view(3, 4)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, 8)
        results = [torch.ops.mkldnn._linear_pointwise.default(x, w, None, "tanh", [], "") for w in (weight, packed)]
    except (AttributeError, RuntimeError):
        return False
    return all(torch.allclose(result, torch.tanh(x @ weight.t()), atol=1e-6) for result in results)


def _maker() -> str:
    """The processor's maker, as the system calls it; Intel where nothing is known."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        lines = (line for line in info.read_text().splitlines() if line.startswith("vendor_id"))
        return next(lines, "Intel")
    return platform.processor() or "Intel"
