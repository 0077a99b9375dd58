"""Standard normal draws from a stream of secret bits, in blocks and on several threads (floor 1).

A block of draws takes a fixed stretch of the stream, whoever makes it: so the draws don't depend on the number of
threads, and any part of a long row of draws can be made without the rest.

References:
    Box, Muller 1958.
"""

import itertools
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from sordino import checks
from sordino.randomness import Stream

__all__ = ["add_normal_", "add_normal_part_", "standard_normal"]

# Pairs a block: its float64 intermediates stay in the processor's cache, and each call is long beside handing over
# the interpreter, so that two threads take 0.6 of the time of one.
_BLOCK = 1 << 16
# Blocks that are worth a thread: starting one takes as long as a tenth of a block.
_BLOCKS_A_THREAD = 2
# Draws that are sent to another device at once: whole blocks.
_SENT = 1 << 24
_EXPONENT_OF_ONE = 0x3FF0_0000_0000_0000

_Use = Callable[[int, np.ndarray], None]


def standard_normal(count: int, stream: Stream, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """`count` independent standard normal draws, shape (count,), on the CPU.

    Box–Muller: √(−2 ln U)·(cos 2πV, sin 2πV). U has 52 bits and its logarithm is taken in float64, so the
    tail reaches 8.5 standard deviations (32 bits would end at 6.8). V has 32 bits for float32 results and
    52 bits for float64.

    Args:
        count: ≥ 0.
        stream: source of the bits; read in order.
        dtype: float64 gives float64 arithmetic throughout; every other dtype is drawn in float32.

    Returns:
        A tensor of float64 when asked for, otherwise float32.
    """
    working = torch.float64 if dtype == torch.float64 else torch.float32
    noise = torch.empty(checks.integer(0, count=count), dtype=working)
    rows = noise.numpy()

    def keep(start: int, block: np.ndarray) -> None:
        rows[start : start + len(block)] = block

    _draw(count, stream, rows.dtype, 1.0, keep)
    return noise


def add_normal_(entries: Tensor, stream: Stream, *, stddev: float) -> None:
    """Add `stddev` times standard normal draws in place, block by block: the noise is never in memory as a whole.

    Args:
        entries: shape (n,), contiguous, any floating dtype and device.
        stream: source of the bits; read in order.
        stddev: > 0.
    """
    if entries.device.type != "cpu" or entries.dtype not in (torch.float32, torch.float64):
        for part in entries.split(_SENT):
            draws = standard_normal(len(part), stream, dtype=part.dtype)
            part.add_(draws.to(part.device, part.dtype), alpha=stddev)
        return
    rows = entries.detach().numpy()

    def add(start: int, block: np.ndarray) -> None:
        part = rows[start : start + len(block)]
        np.add(part, block, out=part)

    _draw(len(rows), stream, rows.dtype, stddev, add)


def add_normal_part_(entries: Tensor, stream: Stream, *, stddev: float, first: int, count: int) -> None:
    """What `add_normal_` adds to the entries from `first` on of a row of `count`: only their blocks are drawn.

    Args:
        entries: shape (n,), contiguous, with first + n ≤ count.
        stream: source of the bits; afterwards it stands behind the whole row.
        stddev: > 0.
        first: place of the first entry, ≥ 0.
        count: length of the row.
    """
    working = np.dtype(np.float64 if entries.dtype == torch.float64 else np.float32)
    end, begun = first + len(entries), first // (2 * _BLOCK) * 2 * _BLOCK

    def add(start: int, block: np.ndarray) -> None:
        low, high = max(first, start), min(end, start + len(block))
        part = entries[low - first : high - first]
        part.add_(torch.from_numpy(block[low - start : high - start]).to(part.device, part.dtype))

    if len(entries):
        # The last block of a row is shorter, and its pairs lie closer together.
        last = min(count, -(-end // (2 * _BLOCK)) * 2 * _BLOCK)
        _draw_part(begun, last, stream.ahead(_bytes(begun, working)), working, stddev, add)
    stream.skip(_bytes(count, working))


def _draw(count: int, stream: Stream, working: np.dtype, stddev: float, use: _Use) -> None:
    """Hand `count` draws times `stddev` to `use`, as (position of the first, a block that the next one overwrites)."""
    blocks = -(-count // (2 * _BLOCK))
    threads = max(1, min(torch.get_num_threads(), blocks // _BLOCKS_A_THREAD))
    if threads == 1:
        _draw_part(0, count, stream, working, stddev, use)
        return
    cuts = [2 * _BLOCK * (blocks * place // threads) for place in range(threads)] + [count]
    parts = [(first, last, stream.ahead(_bytes(first, working))) for first, last in itertools.pairwise(cuts)]
    with ThreadPoolExecutor(threads - 1) as others:
        waiting = [others.submit(_draw_part, *part, working, stddev, use) for part in parts[1:]]
        _draw_part(*parts[0], working, stddev, use)
        for thread in waiting:
            thread.result()
    stream.skip(_bytes(count, working))


def _bytes(count: int, working: np.dtype) -> int:
    """How much of the stream the first `count` draws take: 8 bytes a radius, 4 or 8 an angle."""
    return (count + 1) // 2 * (8 + working.itemsize)


def _draw_part(first: int, last: int, stream: Stream, working: np.dtype, stddev: float, use: _Use) -> None:
    """The draws `first` to `last`; `first` begins a block.

    The work is done in place, in arrays that stay in the processor's cache. NumPy's functions are vectorised for
    whatever processor they run on, and let other threads run.
    """
    most = min(_BLOCK, (last - first + 1) // 2)
    words, turns = np.empty(most, np.int64), np.empty(most, np.int64 if working == np.float64 else np.int32)
    radii, angles, draws = np.empty(most, working), np.empty(most, working), np.empty(2 * most, working)
    for start in range(first, last, 2 * _BLOCK):
        pairs = min(_BLOCK, (last - start + 1) // 2)
        radius, angle, block = radii[:pairs], angles[:pairs], draws[: 2 * pairs]
        _logarithms(words[:pairs], stream)
        # After the logarithm single precision loses nothing: the radius is rounded to it anyway.
        np.multiply(words[:pairs].view(np.float64), -2.0, out=radius, casting="same_kind")
        np.sqrt(radius, out=radius)
        np.multiply(radius, stddev, out=radius)
        _angles(turns[:pairs], angle, stream)
        np.multiply(np.cos(angle, out=block[:pairs]), radius, out=block[:pairs])
        np.multiply(np.sin(angle, out=block[pairs:]), radius, out=block[pairs:])
        use(start, block[: last - start])


def _uniform(words: np.ndarray, stream: Stream) -> np.ndarray:
    """Float64 uniforms in (0, 1), in the memory of `words` (int64): odd multiples of 2⁻⁵³."""
    stream.fill(words.data)
    # The top 52 bits become the fraction of a float in [1, 2).
    unsigned, uniforms = words.view(np.uint64), words.view(np.float64)
    np.right_shift(unsigned, np.uint64(12), out=unsigned)
    np.bitwise_or(words, _EXPONENT_OF_ONE, out=words)
    uniforms -= 1.0 - 2.0**-53
    return uniforms


def _logarithms(words: np.ndarray, stream: Stream) -> None:
    uniforms = _uniform(words, stream)
    np.log(uniforms, out=uniforms)


def _angles(turns: np.ndarray, angle: np.ndarray, stream: Stream) -> None:
    """Uniform angles: of 32 bits in (−π, π) for float32, of 52 bits in (0, 2π) for float64."""
    if angle.dtype == np.float64:
        np.multiply(_uniform(turns, stream), 2 * math.pi, out=angle)
        return
    stream.fill(turns.data)
    np.copyto(angle, turns, casting="same_kind")
    angle *= np.float32(2 * math.pi * 2.0**-32)
