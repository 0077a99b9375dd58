"""The kernel of `device_noise`: bits, normal draws and their addition, one program a tile, in Triton's language.

Imported only where Triton is. The constants are those of `device_noise`, which says what is computed and why.
"""

# The types of what a kernel computes are Triton's, and Triton is not always there.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false

import torch
from torch import Tensor

from sordino.installation import require
from sordino.mechanisms.device_noise import ANGLE, CONSTANTS, DRAWS, LANES, SHORT, TAIL, UNIT

require("triton", "triton", user="noise by a kernel")

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

_LANES = tl.constexpr(LANES)
_C0, _C1, _C2, _C3 = (tl.constexpr(word) for word in CONSTANTS)
_DRAWS, _TAIL = tl.constexpr(DRAWS), tl.constexpr(TAIL)
_SHORT = tl.constexpr(SHORT)
_UNIT, _ANGLE = tl.constexpr(UNIT), tl.constexpr(ANGLE)
_WORD, _TWO_WORDS, _CELL = tl.constexpr(2.0**-32), tl.constexpr(2.0**-64), tl.constexpr(2.0**-52)
_TURN = tl.constexpr(6.283185307179586)


@triton.jit
def _rotated(x, by: tl.constexpr):
    return (x << by) | (x >> (32 - by))


@triton.jit
def _quarter(a, b, c, d):
    a = a + b
    d = _rotated(d ^ a, 16)
    c = c + d
    b = _rotated(b ^ c, 12)
    a = a + b
    d = _rotated(d ^ a, 8)
    c = c + d
    b = _rotated(b ^ c, 7)
    return a, b, c, d


@triton.jit
def chacha20(k0, k1, k2, k3, k4, k5, k6, k7, block, purpose: tl.constexpr, last: tl.constexpr):
    """The 16 words of one block a lane, by the key's signed words and the block's number."""
    low, high = block.to(tl.uint32), (block >> 32).to(tl.uint32)
    zero = low ^ low
    s0, s1, s2, s3 = zero + _C0, zero + _C1, zero + _C2, zero + _C3
    s4, s5 = zero + k0.to(tl.uint32, bitcast=True), zero + k1.to(tl.uint32, bitcast=True)
    s6, s7 = zero + k2.to(tl.uint32, bitcast=True), zero + k3.to(tl.uint32, bitcast=True)
    s8, s9 = zero + k4.to(tl.uint32, bitcast=True), zero + k5.to(tl.uint32, bitcast=True)
    s10, s11 = zero + k6.to(tl.uint32, bitcast=True), zero + k7.to(tl.uint32, bitcast=True)
    s14, s15 = zero + purpose, zero + last
    x0, x1, x2, x3, x4, x5, x6, x7 = s0, s1, s2, s3, s4, s5, s6, s7
    x8, x9, x10, x11, x12, x13, x14, x15 = s8, s9, s10, s11, low, high, s14, s15
    for _ in range(10):
        x0, x4, x8, x12 = _quarter(x0, x4, x8, x12)
        x1, x5, x9, x13 = _quarter(x1, x5, x9, x13)
        x2, x6, x10, x14 = _quarter(x2, x6, x10, x14)
        x3, x7, x11, x15 = _quarter(x3, x7, x11, x15)
        x0, x5, x10, x15 = _quarter(x0, x5, x10, x15)
        x1, x6, x11, x12 = _quarter(x1, x6, x11, x12)
        x2, x7, x8, x13 = _quarter(x2, x7, x8, x13)
        x3, x4, x9, x14 = _quarter(x3, x4, x9, x14)
    x0, x1, x2, x3, x4, x5, x6, x7 = x0 + s0, x1 + s1, x2 + s2, x3 + s3, x4 + s4, x5 + s5, x6 + s6, x7 + s7
    x8, x9, x10, x11, x12, x13, x14, x15 = (
        x8 + s8,
        x9 + s9,
        x10 + s10,
        x11 + s11,
        x12 + low,
        x13 + high,
        x14 + s14,
        x15 + s15,
    )
    return x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15


@triton.jit
def _add_pair(out, index, count, radius, angle):
    inside, other = (index >= 0) & (index < count), index + _LANES
    held = tl.load(out + index, mask=inside, other=0.0).to(radius.dtype)
    tl.store(out + index, held + radius * tl.cos(angle), mask=inside)
    inside = (other >= 0) & (other < count)
    held = tl.load(out + other, mask=inside, other=0.0).to(radius.dtype)
    tl.store(out + other, held + radius * tl.sin(angle), mask=inside)


@triton.jit
def _single_pair(out, index, count, stddev, word, turn, more, less):
    fraction = more.to(tl.float32) * _WORD + (less.to(tl.float32) + 0.5) * _TWO_WORDS
    uniform = word.to(tl.float32)
    uniform = tl.where(word.to(tl.int64) < _SHORT, uniform + fraction, uniform) * _UNIT
    radius = tl.sqrt(-2.0 * tl.log(uniform)) * stddev
    _add_pair(out, index, count, radius, turn.to(tl.int32, bitcast=True).to(tl.float32) * _ANGLE)


@triton.jit
def _uniform(more, less):
    return (((more.to(tl.int64) << 20) | (less.to(tl.int64) >> 12)).to(tl.float64) + 0.5) * _CELL


@triton.jit
def _double_pair(out, index, count, stddev, rest, first, second, third, fourth):
    length = tl.sqrt(-2.0 * tl.log(_uniform(first, second)))
    _add_pair(out, index, count, length * stddev + length * rest, _uniform(third, fourth) * _TURN)


# Keys and positions differ from step to step: no kernel is made for a value of theirs.
_VALUES = ["k0", "k1", "k2", "k3", "k4", "k5", "k6", "k7", "tile", "position", "count", "stddev", "rest"]


@triton.jit(do_not_specialize=_VALUES)
def _add_draws(
    out, k0, k1, k2, k3, k4, k5, k6, k7, tile, position, count, stddev, rest, DOUBLE: tl.constexpr
):  # fmt: skip
    own = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, _LANES)
    block = (own + tile) * _LANES + lane
    w0, w1, w2, w3, w4, w5, w6, w7, w8, w9, w10, w11, w12, w13, w14, w15 = chacha20(
        k0, k1, k2, k3, k4, k5, k6, k7, block, _DRAWS, 0
    )
    if DOUBLE:
        index = own * (8 * _LANES) + lane - position
        _double_pair(out, index, count, stddev, rest, w0, w1, w2, w3)
        _double_pair(out, index + 2 * _LANES, count, stddev, rest, w4, w5, w6, w7)
        _double_pair(out, index + 4 * _LANES, count, stddev, rest, w8, w9, w10, w11)
        _double_pair(out, index + 6 * _LANES, count, stddev, rest, w12, w13, w14, w15)
    else:
        t0 = w0 ^ w0
        t1, t2, t3, t4, t5, t6, t7, t8, t9, t10, t11, t12, t13, t14, t15 = (
            t0, t0, t0, t0, t0, t0, t0, t0, t0, t0, t0, t0, t0, t0, t0
        )  # fmt: skip
        least = tl.minimum(tl.minimum(tl.minimum(w0, w2), tl.minimum(w4, w6)), tl.minimum(w8, w10))
        least = tl.minimum(least, tl.minimum(w12, w14)).to(tl.int64)
        # One tile in a thousand.
        if tl.min(least, axis=0) < _SHORT:
            t0, t1, t2, t3, t4, t5, t6, t7, t8, t9, t10, t11, t12, t13, t14, t15 = chacha20(
                k0, k1, k2, k3, k4, k5, k6, k7, block, _TAIL, 0
            )
        index = own * (16 * _LANES) + lane - position
        _single_pair(out, index, count, stddev, w0, w1, t0, t1)
        _single_pair(out, index + 2 * _LANES, count, stddev, w2, w3, t2, t3)
        _single_pair(out, index + 4 * _LANES, count, stddev, w4, w5, t4, t5)
        _single_pair(out, index + 6 * _LANES, count, stddev, w6, w7, t6, t7)
        _single_pair(out, index + 8 * _LANES, count, stddev, w8, w9, t8, t9)
        _single_pair(out, index + 10 * _LANES, count, stddev, w10, w11, t10, t11)
        _single_pair(out, index + 12 * _LANES, count, stddev, w12, w13, t12, t13)
        _single_pair(out, index + 14 * _LANES, count, stddev, w14, w15, t14, t15)


def add_normal_by_kernel_(flat: Tensor, key: tuple[int, ...], *, first: int, stddev: float) -> None:
    """Add `stddev` times draws number `first` and following to a contiguous tensor of one dimension."""
    double = flat.dtype == torch.float64
    a_tile = LANES * (8 if double else 16)
    tile, position = divmod(first, a_tile)
    tiles = -(-(position + flat.numel()) // a_tile)
    # A number is given in single precision, so this one in two parts.
    high = float(torch.tensor(stddev, dtype=torch.float32))
    with torch.cuda.device_of(flat):
        _add_draws[(tiles,)](
            flat, *key, tile, position, flat.numel(), high, stddev - high, DOUBLE=double, num_warps=4
        )  # fmt: skip
