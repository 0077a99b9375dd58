"""Sums of squares that neither drift, overflow nor underflow.

A norm that is too small lets a record contribute more than the clipping norm, so every sum of squares here is good
to about 3e-7 relative, whatever the magnitude of the entries. Shapes: B records first.
"""

import platform
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, lru_cache
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from sordino.shapes import Bool, Float, Shaped

# ----------------------------------------------------------------------------------------------------------------------
# Decisions that depend on values, and what becomes of them in a graph that is recorded.
#
# Some kernels look at their results and take a slower way where rounding or the range of a number type would spoil
# them. A recorded graph has no such turns: it is recorded as if everything were usual, and says with each run whether
# it was. A batch for which it wasn't has to be computed again, without the graph.
# ----------------------------------------------------------------------------------------------------------------------


_noted: list[Tensor] | None = None


def guard_holds(condition: Tensor) -> bool:
    """Whether `condition` holds everywhere; in a graph that is recorded it is noted, and taken to hold."""
    if _noted is None:
        return bool(condition.all())
    _noted.append(condition.all())
    return True


def is_tracing_graph() -> bool:
    """Whether a graph is recorded now."""
    return _noted is not None


@contextmanager
def tracing_graph() -> Iterator[list[Tensor]]:
    """A block whose operations are recorded as a graph; gives the conditions that must hold when the graph is run."""
    global _noted  # noqa: PLW0603 (a recording covers all that runs meanwhile)
    _noted = []
    try:
        yield _noted
    finally:
        _noted = None


# ----------------------------------------------------------------------------------------------------------------------
# Devices that work while the processor goes on. To look at a value there is to wait for all that was asked of them.
# ----------------------------------------------------------------------------------------------------------------------


# The kind of device whose values are looked at freely.
_HOST = "cpu"


def is_away(tensor: Tensor) -> bool:
    """Whether reading a value of `tensor` means waiting: kernels then take ways that need no look at results."""
    return tensor.device.type != _HOST


def storage_number(tensor: Tensor) -> int:
    """A number of the tensor's memory, which no other memory has while it lives; tensors without values have it too."""
    return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]


def read_flags(flags: Sequence[Tensor]) -> list[bool]:
    """Single truth values, with one read of each device that holds some."""
    found: dict[torch.device, list[int]] = {}
    for position, flag in enumerate(flags):
        found.setdefault(flag.device, []).append(position)
    values = [False] * len(flags)
    for indices in found.values():
        for position, value in zip(
            indices, torch.stack([flags[position] for position in indices]).tolist(), strict=True
        ):
            values[position] = value
    return values


def read_numbers(tensors: Sequence[Tensor]) -> list[list[float]]:
    """The entries of short vectors in double precision, with one read of each device that holds some."""
    found: dict[torch.device, list[int]] = {}
    for position, tensor in enumerate(tensors):
        found.setdefault(tensor.device, []).append(position)
    values: list[list[float]] = [[] for _ in tensors]
    for indices in found.values():
        together = torch.cat([tensors[position].double() for position in indices]).tolist()
        for position in indices:
            values[position], together = together[: tensors[position].numel()], together[tensors[position].numel() :]
    return values


def has_weight(weights: Float[Tensor, "G B"]) -> Bool[Tensor, "G B"]:
    """The records with weight; the others are left out of a sum, because a product with zero keeps NaN.

    Below the smallest normal number a weight has lost its precision.
    """
    return weights.abs() > torch.finfo(torch.float32).tiny


# ----------------------------------------------------------------------------------------------------------------------
# Sums of squares that neither drift, overflow nor underflow.
# ----------------------------------------------------------------------------------------------------------------------


# Entries that are widened to double precision at once, on devices that widen in memory; and on the processor, where
# fewer operations are faster up to so many.
_WIDENED, _WIDENED_ON_HOST = 1 << 24, 1 << 14
# Entries of a tensor up to which it is small, on the processor and away from it.
_JOINED, _JOINED_AWAY = 1 << 14, 1 << 20
# A single-precision running sum over 1e7 entries drifts by 7e-4; over a block of this length by at most 2e-7.
_BLOCK = 256

_HALF = (torch.bfloat16, torch.float16)

_PRODUCTS_ON_CPU = (attrgetter("mkldnn.matmul"), attrgetter("mkldnn.conv"))
_PRODUCTS_ON_CUDA = (attrgetter("cuda.matmul"), attrgetter("cudnn.conv"))


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """The common floating type of `tensors`, at least float32."""
    dtype = torch.float32
    for tensor in tensors:
        if tensor.dtype is not dtype and tensor.dtype not in _HALF:
            dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def chunks(rows: Tensor, step: int) -> Sequence[Tensor]:
    """`rows`, at most `step` in each part."""
    return (rows,) if len(rows) <= step else rows.split(step)


def is_autocast(kind: str) -> bool:
    """Whether operations on devices of this kind are cast now; torch raises for kinds it knows no casts for."""
    return (kind in ("cpu", "cuda") or torch.amp.is_autocast_available(kind)) and torch.is_autocast_enabled(kind)


def product_mode(device: torch.device, *, convolutions: bool) -> Literal["full", "tf32", "bf16"]:
    """What torch multiplies single precision in, by the user's settings, where convolutions count or don't."""
    backends = [get(torch.backends) for get in (_PRODUCTS_ON_CUDA if device.type == "cuda" else _PRODUCTS_ON_CPU)]
    modes = {backend.fp32_precision for backend in (backends if convolutions else backends[:1])}
    return "bf16" if "bf16" in modes else "tf32" if "tf32" in modes else "full"


def without_autocast(kind: str) -> AbstractContextManager[object]:
    """A block in which operations on devices of this kind are not cast."""
    return torch.autocast(kind, enabled=False) if is_autocast(kind) else nullcontext()


# The kinds of products that the user lets torch take in TF32, where the block that reads gradients runs.
_tf32_asked: frozenset[str] = frozenset()


def full_precision(device: torch.device) -> AbstractContextManager[object]:
    """Products of single-precision matrices in single precision, whatever faster mode the user trains in.

    With TF32 or bfloat16 products, by setting or by autocast, a norm would be off by 1e-3, and the released sum would
    not be the one that was measured. What is taken in such a mode on purpose, with its rounding known, is taken by the
    functions of this module alone; they do so where the user allows TF32.
    """
    on_cuda = device.type == "cuda"
    backends = _product_backends(on_cuda)
    reduced = [(backend, mode) for backend in backends if (mode := backend.fp32_precision) not in ("ieee", "none")]
    # Nothing to set is the usual case, and every step asks.
    return _precise(device, backends, reduced) if reduced or on_cuda or is_autocast(device.type) else _NOTHING_SET


_NOTHING_SET = nullcontext()


@cache
def _product_backends(on_cuda: bool) -> list[Any]:
    """Whose modes matter for products and convolutions; each is asked for its mode every time."""
    return [get(torch.backends) for get in (_PRODUCTS_ON_CUDA if on_cuda else _PRODUCTS_ON_CPU)]


@contextmanager
def _precise(device: torch.device, backends: list[Any], reduced: list[tuple[Any, str]]) -> Iterator[None]:
    global _tf32_asked  # noqa: PLW0603 (torch's own setting is one of the process, too)
    for backend, _ in reduced:
        backend.fp32_precision = "ieee"
    before = _tf32_asked
    if device.type == "cuda":
        asked = {
            kind for kind, backend in zip(("matmul", "conv"), backends, strict=True) if (backend, "tf32") in reduced
        }
        # A block within this one finds the modes that were set here.
        _tf32_asked = before | asked
    try:
        with without_autocast(device.type):
            yield
    finally:
        _tf32_asked = before
        for backend, mode in reduced:
            backend.fp32_precision = mode


def row_squared_norms(x: Shaped[Tensor, "B *shape"]) -> Float[Tensor, " B"]:
    """Sum of squares of each record's entries, in float64.

    Blocks of entries are reduced in single precision and the blocks are added in double precision. Rows whose sum
    left the safe range of single precision are summed again in double precision, in whose range no square is lost. Few
    entries, and all away from the processor, are summed so at once.

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
    rows = x if x.dim() == 2 else x.reshape(records, -1)
    if x.numel() <= _WIDENED_ON_HOST and not is_tracing_graph():
        return _widened(rows)
    if is_away(x) and not is_tracing_graph():
        step = max(1, _WIDENED // rows.shape[1])
        parts = [_widened(part) for part in chunks(rows, step)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)
    if x.dtype is not torch.float32:
        rows = rows.to(compute_dtype(x))
    if is_tracing_graph():
        # A compiler reads the entries once, whatever it adds them up in.
        return rows.double().square().sum(1)
    sums = _blocked(rows)
    if rows.dtype == torch.float64:
        return sums
    # Below this, squares of single-precision entries may have been flushed to zero. A NaN fails both comparisons.
    smallest, largest = rows.shape[1] * 1e-30, 1e37
    low, high = torch.aminmax(sums)
    if not (low.item() > smallest and high.item() < largest):
        index = (~((sums > smallest) & (sums < largest))).nonzero().flatten()
        sums[index] = _widened(rows.index_select(0, index))
    return sums


def _widened(rows: Float[Tensor, "B n"]) -> Float[Tensor, " B"]:
    return torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64).square_()


def joint_squared_norms(parts: Sequence[Shaped[Tensor, "B ..."]]) -> Float[Tensor, " B"]:
    """Sum of squares of each record's entries in all `parts`, of which there is at least one, in float64."""
    # On the processor sums of blocks are in single precision: their rounding should not depend on the other parts.
    small = [part for part in parts if is_small(part)] if is_away(parts[0]) else []
    if len(small) > 1:
        parts = [side_by_side(small), *(part for part in parts if not is_small(part))]
    squares = [row_squared_norms(part) for part in parts]
    return squares[0] if len(squares) == 1 else torch.stack(squares).sum(0)


def is_small(part: Tensor) -> bool:
    """Whether an operation on `part` takes more time than to copy it beside others, with which it is then done once."""
    return part.numel() <= (_JOINED_AWAY if is_away(part) else _JOINED)


def side_by_side(parts: Sequence[Shaped[Tensor, "B ..."]]) -> Shaped[Tensor, "B n"]:
    """Each record's entries in all `parts`, one part after the other."""
    return torch.cat([part.reshape(part.shape[0], -1) for part in parts], dim=1)


def _blocked(rows: Float[Tensor, "B n"]) -> Float[Tensor, " B"]:
    length = rows.shape[1]
    if rows.dtype == torch.float64 or length <= _BLOCK:
        return torch.linalg.vector_norm(rows, dim=1).double().square_()
    block = _block_length(length)
    whole = length // block * block
    blocks = (rows if whole == length else rows[:, :whole]).view(rows.shape[0], -1, block)
    # The norm of the blocks' norms.
    sums = _widened(torch.linalg.vector_norm(blocks, dim=2))
    if whole < length:
        sums += torch.linalg.vector_norm(rows[:, whole:], dim=1).double().square()
    return sums


@lru_cache
def _block_length(length: int) -> int:
    """A divisor of `length`, so that no shorter block is left, or the longest block."""
    return next((block for block in range(_BLOCK, _BLOCK // 4, -1) if length % block == 0), _BLOCK)


# ----------------------------------------------------------------------------------------------------------------------
# Products on another device: which operands are taken in fewer bits, and how far the results may be from the true ones.
#
# Matrix units multiply numbers of bfloat16, half precision and TF32 exactly and add the products up in single
# precision. What they lose in an addition is less than three roundings of it, however their additions are ordered.
# Numbers of more bits are taken apart into the nearest one and the nearest one to the rest; no number is rounded to
# the format alone. Derivation: ``docs/proofs/clipping.md``.
# ----------------------------------------------------------------------------------------------------------------------


# Bits that TF32 leaves out, and the constant that splits a number so that the first part has the other 11.
_SPLITTER = float(2**13 + 1)
# Devices whose products of half precision torch gives in single precision, and the one that has no values.
_WIDE_DEVICES = ("cuda", "meta")
# Positions that one product adds up: on the processor, and where more of them are faster.
_PIECE, _PIECE_AWAY = 512, 2048
# Entries of the products of pieces that are held at once before they are added up.
_PIECES_AT_ONCE = 1 << 26


@dataclass(frozen=True, kw_only=True)
class ProductFormat:
    """How matrices are multiplied, and how far a product may be from the true one.

    An entry adds up K products x_k·y_k. Its error is at most ``(K·addition + formed)·Σ_k|x_k||y_k|``, and with
    ``weighted`` instead of ``formed`` if x carries weights.

    Args:
        addition: of one addition.
        formed: what the operands lose, for a product of matrices as they are.
        weighted: the same where weights in single precision were multiplied in.
        parts: how many products are added up into one.
        piece: positions that one product adds up.
        away: whether another device than the processor multiplies.
        speed: multiply-adds in the time that a byte takes to be moved, roughly.
    """

    addition: float
    formed: float = 0.0
    weighted: float = 0.0
    parts: int = 1
    piece: int = _PIECE
    away: bool = False
    speed: float = 0.0


_SINGLE = ProductFormat(addition=2.0**-24)
_DOUBLE = ProductFormat(addition=2.0**-53)
_SINGLE_AWAY = ProductFormat(addition=2.0**-24, piece=_PIECE_AWAY, away=True, speed=8.0)
_DOUBLE_AWAY = ProductFormat(addition=2.0**-53, piece=_PIECE_AWAY, away=True, speed=8.0)
_TF32 = ProductFormat(
    addition=3 * 2.0**-24, formed=2.0**-20, weighted=2.0**-20, parts=3, piece=_PIECE_AWAY, away=True, speed=16.0
)
_OF_HALF = {
    # Weights make numbers of more bits: two parts of 8 bits, or two parts of TF32 with its 11 bits.
    torch.bfloat16: ProductFormat(
        addition=3 * 2.0**-24, weighted=2.0**-16, parts=2, piece=_PIECE_AWAY, away=True, speed=100.0
    ),
    torch.float16: ProductFormat(
        addition=3 * 2.0**-24, weighted=2.0**-21, parts=2, piece=_PIECE_AWAY, away=True, speed=100.0
    ),
}


def product_operands(inputs: Tensor, grads: Tensor) -> tuple[Tensor, Tensor]:
    """What a layer saw and the gradient at its output in the type in which they are multiplied.

    On the processor that is at least single precision. On another device gradients in half precision stay as they are,
    and inputs are taken as autocast has taken them for the layer: in the type of its output.
    """
    if inputs.dtype is grads.dtype is torch.float32:
        return inputs, grads
    if grads.dtype in _HALF and inputs.dtype in (grads.dtype, torch.float32) and _is_multiplied_away(grads):
        return inputs.to(grads.dtype), grads
    dtype = compute_dtype(inputs, grads)
    return inputs.to(dtype), grads.to(dtype)


def product_format(inputs: Tensor, grads: Tensor, *, kind: str = "matmul") -> ProductFormat:
    """How `product_operands` of these tensors are multiplied; `kind` is torch's, "matmul" or "conv"."""
    if not _is_multiplied_away(grads):
        return _DOUBLE if compute_dtype(inputs, grads) == torch.float64 else _SINGLE
    if grads.dtype in _HALF and inputs.dtype in (grads.dtype, torch.float32):
        return _OF_HALF[grads.dtype]
    if compute_dtype(inputs, grads) == torch.float64:
        return _DOUBLE_AWAY
    return _TF32 if kind in _tf32_asked else _SINGLE_AWAY


def _is_multiplied_away(tensor: Tensor) -> bool:
    return is_away(tensor) and not is_tracing_graph()


def row_products(
    left: Float[Tensor, "N m k"], right: Float[Tensor, "N k n"], *, kind: str = "matmul"
) -> Float[Tensor, "N m n"]:
    """``left[i] right[i]`` for each i, in at least single precision."""
    if left.dtype in _HALF:
        return _wide_product(left, right)
    if left.dtype == torch.float32 and kind in _tf32_asked and _is_multiplied_away(left):
        (a, rest_a), (b, rest_b) = _two_parts(left), _two_parts(right)
        return _tf32_product(a, b) + _tf32_product(a, rest_b) + _tf32_product(rest_a, b)
    return torch.bmm(left, right)


def weighted_row_products(
    left: Float[Tensor, "N K m"], right: Float[Tensor, "N K n"], weights: Float[Tensor, " R"], *, kind: str = "matmul"
) -> Float[Tensor, "N m n"]:
    """``Σ_k weights[k]·left[i, k] ⊗ right[i, k]`` for each i on another device, with sums over a piece of positions.

    The pieces are products of one call, where they are small enough to be held together. Each weight may be that of
    K/R rows which follow each other.
    """
    rows, piece = left.shape[1], _PIECE_AWAY
    swapped = left.shape[2] > right.shape[2]
    # The weights go to the narrower side.
    narrow, wide = (right, left) if swapped else (left, right)
    rows_each = rows // max(len(weights), 1)
    narrow = (narrow.unflatten(1, (len(weights), rows_each)) * weights.view(-1, 1, 1)).flatten(1, 2)
    whole = rows // piece
    step = max(1, _PIECES_AT_ONCE // max(len(left) * left.shape[2] * right.shape[2], 1))
    spans = [(first * piece, min(first + step, whole) * piece) for first in range(0, whole, step)]
    spans += [(whole * piece, rows)] if whole * piece < rows or not rows else []
    total: Tensor | None = None
    for first, last in spans:
        length = min(piece, last - first)
        pieces = (last - first) // length if length else 1
        span = (narrow, wide) if last - first == rows else (narrow[:, first:last], wide[:, first:last])
        a, b = (x.unflatten(1, (pieces, length)).flatten(0, 1) for x in span)
        # The parts of weighted numbers, side by side, are one matrix.
        a = _weighted_parts(a, b.dtype)
        one, other = (b, a.flatten(2)) if swapped else (a.flatten(2), b)
        if b.dtype is torch.float16:
            product = _tf32_product(one.transpose(1, 2).float(), other.float())
        else:
            product = row_products(one.transpose(1, 2), other, kind=kind)
        # Those of pieces and parts are added up together: [N, pieces, m, n] with the parts before the narrower side.
        product = product.unflatten(0, (-1, pieces)).unflatten(3 if swapped else 2, a.shape[2:])
        of_parts = 3 if swapped else 2
        several = pieces * product.shape[of_parts] > 1
        part = product.sum((1, of_parts)) if several else product.squeeze(of_parts).squeeze(1)
        total = part if total is None else total.add_(part)
    assert total is not None
    return total


def _weighted_parts(x: Float[Tensor, "P K m"], dtype: torch.dtype) -> Float[Tensor, "P K C m"]:
    """Numbers with the bits of single precision as C parts that a matrix of `dtype` is multiplied with."""
    if dtype is torch.bfloat16:
        parts = x.new_empty(*x.shape[:2], 2, x.shape[2], dtype=dtype)
        first, rest = parts.unbind(2)
        first.copy_(x)
        torch.sub(x, first, out=rest)
        return parts
    return torch.stack(_two_parts(x), 2) if dtype is torch.float16 else x[:, :, None]


def _two_parts(x: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest numbers of 11 bits to the entries of `x`, and to what is left of them.

    Entries above 2¹¹⁴ become NaN: their record counts as one that is not finite.
    """
    scaled = x * _SPLITTER
    first = scaled - (scaled - x)
    rest = x - first
    scaled = rest * _SPLITTER
    return first, scaled - (scaled - rest)


def _wide_product(left: Tensor, right: Tensor) -> Tensor:
    """The product of matrices in half precision with sums in single precision."""
    if left.device.type in _WIDE_DEVICES:
        return torch.bmm(left, right, out_dtype=torch.float32)
    return torch.bmm(left.float(), right.float())


def _tf32_product(left: Tensor, right: Tensor) -> Tensor:
    """The product of matrices in single precision whose entries have 11 bits, by the units that take no more."""
    with ExitStack() as stack:
        if left.device.type == "cuda":
            stack.enter_context(_in_tf32())
        return torch.bmm(left, right)


@contextmanager
def _in_tf32() -> Iterator[None]:
    matmul = torch.backends.cuda.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "tf32"
    try:
        yield
    finally:
        matmul.fp32_precision = before


# ----------------------------------------------------------------------------------------------------------------------
# Products of matrices by the faster of the libraries that torch comes with.
#
# torch hands single-precision products on x86 to MKL, which takes its AVX-512 kernels on Intel's processors only.
# oneDNN, which torch takes for convolutions, has such kernels for every processor: twice as fast there. Which library
# is taken depends on the processor and the sizes alone, never on a clock or on data, and changes only the order of
# additions.
# ----------------------------------------------------------------------------------------------------------------------


Activation = Literal["none", "tanh", "sigmoid", "relu"]

# Multiply-adds from which a call of oneDNN pays for its longer way in.
_LEAST = 2_000_000
# Entries of a weight up to which its kernels are no faster where they are no wider: see `_has_whole_units`.
_SMALL_WEIGHT = 1 << 17
# MKL takes three to eight times as long for a product of fewer columns than this as for the same one turned.
_FEW_COLUMNS = 16
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
) -> Callable[[Float[Tensor, "K d"], Float[Tensor, "K p"]], object]:
    """`affine` as a function of x and of where the result goes, for many calls with about as many `rows` each.

    The weight must stay as it is. It is brought into the order of oneDNN's kernels once, where these are faster.
    """
    by_onednn = _by_onednn(weight, weight, rows * weight.numel())
    if by_onednn and (weight.numel() > _SMALL_WEIGHT or _has_whole_units()):
        call = torch.ops.mkldnn._linear_pointwise.default
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), rows)
        return lambda x, out: out.copy_(call(x, packed, bias, activation, [], ""))
    turned, apply = weight.t(), _APPLIED[activation]
    if bias is None:
        return lambda x, out: apply(torch.mm(x, turned, out=out))
    return lambda x, out: apply(torch.addmm(bias, x, turned, out=out))


def transposed_product(left: Float[Tensor, "K m"], right: Float[Tensor, "K n"]) -> Float[Tensor, "m n"]:
    """``left^T right``; it may be laid out column by column."""
    work = left.numel() * right.shape[1]
    # With few columns or rows the call pays from larger products on.
    thin = min(left.shape[1], right.shape[1]) < _FEW_COLUMNS
    if not _by_onednn(left, right, work // 3 if thin else work):
        return (right.t() @ left).t() if right.shape[1] < min(_FEW_COLUMNS, left.shape[1]) else left.t() @ right
    rows, wide, narrow = left.shape[0], left.shape[1], right.shape[1]
    if wide > narrow and rows * (wide - narrow) >= wide * narrow:
        # The library wants its first factor turned in memory: the smaller one, if turning the result costs no more.
        return transposed_product(right, left).t()
    # Kernels are made for each length: sampled batches, which have any, are cut so that there are few.
    whole = rows if rows < _ROWS else rows // _ROWS * _ROWS
    a, b = _dense(left[:whole]), _dense(right[:whole])
    result = torch.ops.mkldnn._linear_pointwise.default(a.t(), b.t(), None, "none", [], "")
    return result if whole == rows else result.addmm_(left[whole:].t(), right[whole:])


def per_record_product(
    left: Float[Tensor, "B T p"], right: Float[Tensor, "B T d"], *, kind: str = "matmul"
) -> Float[Tensor, "B p d"]:
    """``left[b]^T right[b]`` for each record b, in at least single precision."""
    if _is_multiplied_away(left):
        return row_products(left.transpose(1, 2), right, kind=kind)
    records, rows, columns = left.shape[0], left.shape[2], right.shape[2]
    if columns < min(_FEW_COLUMNS, rows):
        return torch.bmm(right.transpose(1, 2), left).transpose(1, 2).contiguous()
    if not (_by_onednn(left, right, left.shape[1] * rows * columns) and _has_whole_units()):
        return torch.bmm(left.transpose(1, 2), right)
    # One call and one copy for each record: worth it for kernels that are twice as fast.
    result = left.new_empty(records, rows, columns)
    for b in range(records):
        result[b] = transposed_product(left[b], right[b])
    return result


def grams(x: Float[Tensor, "B T d"], *, kind: str = "matmul") -> Float[Tensor, "B T T"]:
    """Inner products of every two positions of each record, in at least single precision."""
    if _is_multiplied_away(x):
        return _grams_away(x, kind)
    records, positions, width = x.shape
    work = positions**2 * width
    by_onednn = work >= 2 * _LEAST and _by_onednn(x, x, work) and _has_whole_units()
    if not by_onednn and positions >= 96 and width >= 128 and x.device.type == "cpu" and not is_tracing_graph():
        return _halved_grams(x)
    if not by_onednn:
        return torch.bmm(x, x.transpose(1, 2))
    result = x.new_empty(records, positions, positions)
    for b in range(records):
        rows = _dense(x[b])
        result[b] = torch.ops.mkldnn._linear_pointwise.default(rows, rows, None, "none", [], "")
    return result


def _grams_away(x: Float[Tensor, "B T d"], kind: str) -> Float[Tensor, "B T T"]:
    if x.dtype != torch.float32 or kind not in _tf32_asked:
        return row_products(x, x.transpose(1, 2))
    first, rest = _two_parts(x)
    crossed = _tf32_product(first, rest.transpose(1, 2))
    return _tf32_product(first, first.transpose(1, 2)).add_(crossed).add_(crossed.transpose(1, 2))


def _halved_grams(x: Float[Tensor, "B T d"]) -> Float[Tensor, "B T T"]:
    """Each quarter of the positions with itself and those before it; the rest by symmetry.

    That takes 5/8 of the additions. Wider kernels, which are called for each record, are worth more in large products.
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
        and not is_tracing_graph()
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


@cache
def _has_whole_units() -> bool:
    """Whether the processor takes an operation on 512 bits at once: AMD's did so from family 26 on (Zen 5).

    Before, it took them in two turns, and MKL's kernels for 256 bits are as fast.
    """
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.is_file() else platform.processor().replace("Family ", "cpu family : ")
    found = re.search(r"cpu family\s*:\s*(\d+)", text)
    return "AMD" in _maker() and found is not None and int(found[1]) >= 26


def _maker() -> str:
    """The processor's maker, as the system calls it; Intel where nothing is known."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        lines = (line for line in info.read_text().splitlines() if line.startswith("vendor_id"))
        return next(lines, "Intel")
    return platform.processor() or "Intel"
