"""Gaussian noise that is made where the tensor is: a counter-based stream of bits, and nothing sent.

The bits are ChaCha20 with 20 rounds, under a key that a `RandomStream` gives for one row of draws. Draw number i of a
row depends on the key and on i alone, so any stretch of a row can be made without the rest, on any rank.

Blocks of the stream come in tiles of 128, one a lane. A block's 16 words are 8 pairs in single precision or 4 in double
precision; each pair gives two draws by Box–Muller, and draw ``(row, lane)`` of a tile stands at ``128·row + lane``.

On a CUDA or XPU device with Triton one kernel does all of it; elsewhere torch's operations on whole numbers do. Both
have the same words, bit by bit, and the kernel is compared with the operations once in each process, before it is used.

References:
    RFC 8439, section 2.3 (block function); Box, Muller 1958.
"""

import math
from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from torch import Tensor

from sordino.errors import PrivacyError
from sordino.installation import is_installed
from sordino.shapes import Float, Int

# Blocks a tile: consecutive threads write consecutive draws.
LANES = 128
_WORDS = 16
# Blocks that torch's operations make at once, so that what lies in between stays small.
_AT_ONCE = 1 << 18
# Words below this get 64 bits more, so that the tail has them where it needs them.
SHORT = 1 << 12
# The word of a block's nonce that says what its words are for.
DRAWS, TAIL = 0, 1
# 2⁻³², and a little less, so that a word of ones is not rounded to U = 1, which would be a draw of exactly zero.
UNIT = float(np.float32(2.0**-32 * (1 - 2.0**-24)))
ANGLE = float(np.float32(2 * math.pi * 2.0**-32))
# "expand 32-byte k"
CONSTANTS = (0x61707865, 0x3320646E, 0x79622D32, 0x6B206574)
# What kernels are tried with, and the position of a draw whose first word is 27.
PUBLIC_KEY = tuple(range(-3, 5))
RARE = 137_904_951


def add_device_normal_(tensor: Tensor, key: bytes, *, first: int, stddev: float) -> None:
    """Add `stddev` times draws number `first` and following of the row of `key`, in place.

    Args:
        tensor: of any shape, device and floating type; float64 gives draws in double precision.
        key: 32 bytes, of this row of draws alone.
        first: number of the first draw, ≥ 0.
        stddev: ≥ 0.

    Raises:
        PrivacyError: a CUDA graph is being captured, which would repeat the noise.
    """
    if not tensor.numel():
        return
    refuse_graph_capture(tensor.device)
    held = tensor.detach()
    flat = held.contiguous().view(-1)
    kernel, words = _kernel(tensor.device), _signed_words(key)
    if kernel is not None:
        kernel(flat, words, first=first, stddev=stddev)
    else:
        _add_by_operations_(flat, words, first=first, stddev=stddev)
    if not held.is_contiguous():
        held.copy_(flat.view(held.shape))


def refuse_graph_capture(device: torch.device) -> None:
    """Raise where a CUDA graph is being captured on `device`.

    Raises:
        PrivacyError: replays would add the noise, and take in the records, of this one step again.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise PrivacyError(
            "a private step must run again each time, got one that is being captured as a CUDA graph: each replay "
            "would add the same noise. Run the step outside torch.cuda.graph."
        )


def normal_draws(
    key: bytes, *, first: int, count: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Float[Tensor, " count"]:
    """Draws number `first` to ``first + count − 1`` of the row of `key`, by torch's operations."""
    draws = torch.zeros(count, dtype=dtype, device=device)
    _add_by_operations_(draws, _signed_words(key), first=first, stddev=1.0)
    return draws


# ----------------------------------------------------------------------------------------------------------------------
# By torch's operations on whole numbers of 32 bits, whose sums wrap around.
# ----------------------------------------------------------------------------------------------------------------------


def chacha20_words(
    key: tuple[int, ...], blocks: Int[Tensor, " n"], *, nonce: tuple[int, int] = (DRAWS, 0)
) -> Int[Tensor, "16 n"]:
    """The words of ChaCha20's blocks, as int32 whose bits are meant.

    Args:
        key: eight words, as signed numbers.
        blocks: block numbers, int64: the low half is RFC 8439's counter and the high half its first nonce word.
        nonce: the other two nonce words.
    """
    count = blocks.shape[0]
    low, high = _signed(blocks & 0xFFFFFFFF).to(torch.int32), (blocks >> 32).to(torch.int32)
    fixed = [_signed_number(word) for word in (*CONSTANTS, *key)]
    rows = [low.new_full((), word).expand(count) for word in fixed]
    rows += [low, high, *(low.new_full((), _signed_number(word)).expand(count) for word in nonce)]
    start = torch.stack(rows).view(4, 4, count)
    a, b, c, d = start.unbind(0)
    for _ in range(10):
        a, b, c, d = _quarter(a, b, c, d)
        b, c, d = b.roll(-1, 0), c.roll(-2, 0), d.roll(-3, 0)
        a, b, c, d = _quarter(a, b, c, d)
        b, c, d = b.roll(1, 0), c.roll(2, 0), d.roll(3, 0)
    return torch.stack([a, b, c, d]).add_(start).view(_WORDS, count)


def _quarter(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    for left, right in ((16, 12), (8, 7)):
        a = a + b
        d = _rotated(d ^ a, left)
        c = c + d
        b = _rotated(b ^ c, right)
    return a, b, c, d


def _rotated(x: Tensor, by: int) -> Tensor:
    # A shift to the right brings in the sign.
    return (x << by) | ((x >> (32 - by)) & ((1 << by) - 1))


def _signed(x: Tensor) -> Tensor:
    return torch.where(x >= 1 << 31, x - (1 << 32), x)


def _signed_number(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


def _signed_words(key: bytes) -> tuple[int, ...]:
    return tuple(int(word) for word in np.frombuffer(key, "<i4"))


def _unsigned(words: Tensor) -> Tensor:
    return words.long() & 0xFFFFFFFF


def _add_by_operations_(flat: Float[Tensor, " n"], key: tuple[int, ...], *, first: int, stddev: float) -> None:
    double = flat.dtype == torch.float64
    a_tile = LANES * (_WORDS // 2 if double else _WORDS)
    tile, position = divmod(first, a_tile)
    at_once = _AT_ONCE // LANES
    done = 0
    while done < flat.shape[0]:
        tiles = min(at_once, -(-(position + flat.shape[0] - done) // a_tile))
        blocks = torch.arange(tile * LANES, (tile + tiles) * LANES, device=flat.device)
        drawn = (_double_draws if double else _single_draws)(key, blocks)
        # Row by row in each tile.
        row = drawn.view(-1, tiles, LANES).transpose(0, 1).reshape(-1)[position:]
        row = row[: flat.shape[0] - done]
        part = flat[done : done + row.shape[0]]
        part.copy_(part.to(row.dtype).add_(row, alpha=stddev))
        done, tile, position = done + row.shape[0], tile + tiles, 0


def _single_draws(key: tuple[int, ...], blocks: Int[Tensor, " n"]) -> Float[Tensor, "16 n"]:
    words = chacha20_words(key, blocks)
    radius, angle = words[0::2], words[1::2].float().mul_(ANGLE)
    # Of all blocks: to look which of them need it would be to wait for the device.
    more = _unsigned(chacha20_words(key, blocks, nonce=(TAIL, 0)))
    fraction = more[0::2].float() * 2.0**-32 + (more[1::2].float() + 0.5) * 2.0**-64
    whole = _unsigned(radius)
    uniform = torch.where(whole < SHORT, whole.float() + fraction, whole.float())
    length = uniform.mul_(UNIT).log_().mul_(-2.0).sqrt_()
    return torch.stack([length * angle.cos(), length * angle.sin()], 1).flatten(0, 1)


def _double_draws(key: tuple[int, ...], blocks: Int[Tensor, " n"]) -> Float[Tensor, "8 n"]:
    words = _unsigned(chacha20_words(key, blocks))
    # The top 52 bits of two words, in the middle of their cells.
    radius, angle = (((words[i::4] << 20) | (words[i + 1 :: 4] >> 12)).double().add_(0.5) * 2.0**-52 for i in (0, 2))
    length, angle = radius.log_().mul_(-2.0).sqrt_(), angle * (2 * math.pi)
    return torch.stack([length * angle.cos(), length * angle.sin()], 1).flatten(0, 1)


# ----------------------------------------------------------------------------------------------------------------------
# By one kernel, where there is a compiler for it.
# ----------------------------------------------------------------------------------------------------------------------


@cache
def _kernel(device: torch.device) -> Callable[..., None] | None:
    """The kernel for `device`, or None: without Triton, or where it doesn't give what the operations give."""
    if device.type not in ("cuda", "xpu") or not is_installed("triton"):
        return None
    try:
        from sordino.mechanisms.device_noise_kernel import add_normal_by_kernel_

        return add_normal_by_kernel_ if agrees_with_operations(add_normal_by_kernel_, device) else None
    except Exception:
        # No compiler, an old driver: what a kernel may fail by is not a list that ends.
        return None


def agrees_with_operations(kernel: Callable[..., None], device: torch.device) -> bool:
    """Whether `kernel` gives the draws of torch's operations, up to the rounding of logarithm, cosine and sine.

    With a public key, at positions of the row that go every way there is.
    """
    for dtype, first in ((torch.float32, RARE - 2500), (torch.float32, (1 << 45) + 1000), (torch.float64, 77)):
        ours, theirs = (torch.ones(5000, dtype=dtype, device=device) for _ in range(2))
        kernel(ours, PUBLIC_KEY, first=first, stddev=2.0)
        _add_by_operations_(theirs, PUBLIC_KEY, first=first, stddev=2.0)
        close = 1e-5 if dtype == torch.float32 else 1e-12
        if not torch.allclose(ours, theirs, rtol=close, atol=close):
            return False
    return True
