"""Standard normal draws from a stream of secret bits, in blocks and on several threads (floor 1).

A block of draws takes a fixed stretch of the stream, whoever makes it: so the draws don't depend on the number of
threads, and any part of a long row of draws can be made without the rest.

References:
    Box, Muller 1958.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from sordino import checks
from sordino.randomness import Stream

__all__ = ["add_normal_", "add_normal_part_", "standard_normal"]

# Pairs a block: its intermediates stay in the processor's cache, and each call is long beside handing over the
# interpreter, so that two threads take 0.6 of the time of one.
_BLOCK = 1 << 16
# Blocks that are worth a thread: starting one takes as long as a tenth of a block.
_BLOCKS_A_THREAD = 2
# Draws that are sent to another device at once: whole blocks.
_SENT = 1 << 24
_EXPONENT_OF_ONE = 0x3FF0_0000_0000_0000
# Words of 32 bits below this get 52 bits more, so that the tail has them where it needs them.
_SHORT = 1 << 12
# Where in the stream those lie, as seen from the pair's own bits: further than any row of draws reaches.
_RESERVE = 1 << 80
# 2⁻³², and a little less, so that a word of ones is not rounded to U = 1, which would be a draw of exactly zero.
_UNIT = np.float32(2.0**-32 * (1 - 2.0**-24))

_Use = Callable[[int, np.ndarray], None]


def standard_normal(count: int, stream: Stream, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """`count` independent standard normal draws, shape (count,), on the CPU.

    Box–Muller: √(−2 ln U)·(cos 2πV, sin 2πV). For float32 results U and V have 32 bits each, and where U < 2⁻²⁰ it has
    52 bits more: the tail reaches 10.8 standard deviations (32 bits alone would end at 6.8). For float64 results
    both have 52 bits, and the tail reaches 8.5.

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

    _run([_Job(last=count, working=rows.dtype, use=keep)], stream, 1.0)
    return noise


def add_normal_(rows: Sequence[Tensor], stream: Stream, *, stddev: float) -> None:
    """Add `stddev` times standard normal draws in place, block by block: the noise is never in memory as a whole.

    Args:
        rows: shape (n,) each, contiguous, any floating dtype and device; each takes its own stretch of the stream.
        stream: source of the bits; read in order.
        stddev: > 0.
    """
    jobs: list[_Job] = []
    for row in rows:
        working = np.dtype(np.float64 if row.dtype == torch.float64 else np.float32)
        if row.device.type == "cpu" and row.dtype in (torch.float32, torch.float64):
            jobs.append(_Job(last=len(row), working=working, use=_adding_to(row.detach().numpy())))
            continue
        _run(jobs, stream, stddev)
        jobs = []
        for part in row.split(_SENT):
            draws = standard_normal(len(part), stream, dtype=part.dtype)
            part.add_(draws.to(part.device, part.dtype), alpha=stddev)
    _run(jobs, stream, stddev)


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
        part = _Job(first=begun, last=last, working=working, use=add)
        part.run(stream.ahead(_bytes(begun, working)), stddev)
    stream.skip(_bytes(count, working))


def _adding_to(rows: np.ndarray) -> _Use:
    def add(start: int, block: np.ndarray) -> None:
        part = rows[start : start + len(block)]
        np.add(part, block, out=part)

    return add


def _bytes(count: int, working: np.dtype) -> int:
    """How much of the stream the first `count` draws take: two words a pair, of 4 or 8 bytes."""
    return (count + 1) // 2 * 2 * working.itemsize


# --- jobs and threads ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Job:
    """The draws `first` to `last` of one row; `first` begins a block.

    `use` gets (position of the first, a block that the next one overwrites).
    """

    first: int = 0
    last: int
    working: np.dtype
    use: _Use

    @property
    def blocks(self) -> int:
        return -(-(self.last - self.first) // (2 * _BLOCK))

    @property
    def bytes(self) -> int:
        """How much of the stream it takes."""
        return _bytes(self.last - self.first, self.working)

    def parted(self, blocks: int) -> tuple["_Job", "_Job"]:
        """The first `blocks` blocks, and the rest."""
        middle = self.first + 2 * _BLOCK * blocks
        return replace(self, last=middle), replace(self, first=middle)

    def run(self, stream: Stream, stddev: float) -> None:
        pairs = min(_BLOCK, (self.last - self.first + 1) // 2)
        with _arrays(self.working, pairs) as arrays:
            for start in range(self.first, self.last, 2 * _BLOCK):
                pairs = min(_BLOCK, (self.last - start + 1) // 2)
                self.use(start, arrays.draw(pairs, stream, stddev)[: self.last - start])


def _run(jobs: Sequence[_Job], stream: Stream, stddev: float) -> None:
    """All jobs, one after the other in `stream`, on as many of torch's threads as they are worth."""
    blocks = sum(job.blocks for job in jobs)
    threads = max(1, min(torch.get_num_threads(), blocks // _BLOCKS_A_THREAD))
    if threads == 1:
        _run_in_order(jobs, stream, stddev)
        return
    shares: list[tuple[list[_Job], Stream]] = []
    position = 0
    for share in _shares(jobs, [blocks * (place + 1) // threads for place in range(threads)]):
        shares.append((share, stream.ahead(position)))
        position += sum(job.bytes for job in share)
    with ThreadPoolExecutor(threads - 1) as others:
        waiting = [others.submit(_run_in_order, *share, stddev) for share in shares[1:]]
        _run_in_order(*shares[0], stddev)
        for thread in waiting:
            thread.result()
    stream.skip(position)


def _run_in_order(jobs: Sequence[_Job], stream: Stream, stddev: float) -> None:
    for job in jobs:
        job.run(stream, stddev)


def _shares(jobs: Sequence[_Job], cuts: Sequence[int]) -> Iterator[list[_Job]]:
    """`jobs` cut where so many blocks lie before: the last cut is the end."""
    share: list[_Job] = []
    done, places = 0, iter(cuts)
    cut = next(places)
    for whole in jobs:
        job = whole
        while done + job.blocks > cut:
            if cut > done:
                part, job = job.parted(cut - done)
                share.append(part)
            yield share
            share, done, cut = [], cut, next(places)
        share.append(job)
        done += job.blocks
    yield share


# --- one block ----------------------------------------------------------------------------------------------------


class _Arrays:
    """Space for one block. The work is done in place, in arrays that stay in the processor's cache.

    NumPy's functions are vectorised for whatever processor they run on, and let other threads run.
    """

    def __init__(self, working: np.dtype, pairs: int) -> None:
        self.pairs, self._words = pairs, np.empty(2 * pairs, np.uint64 if working == np.float64 else np.uint32)
        self._radii, self._angles = np.empty(pairs, working), np.empty(pairs, working)
        self._draws = np.empty(2 * pairs, working)

    def draw(self, pairs: int, stream: Stream, stddev: float) -> np.ndarray:
        """`stddev` times 2·`pairs` draws; the next call overwrites them."""
        words, block = self._words[: 2 * pairs], self._draws[: 2 * pairs]
        radius, angle = self._radii[:pairs], self._angles[:pairs]
        stream.fill(words.data)
        single = words.dtype == np.uint32
        if single:
            _single_logarithms(words[:pairs], radius, stream)
        else:
            np.log(_uniforms(words[:pairs]), out=radius)
        np.multiply(radius, -2.0, out=radius, casting="same_kind")
        np.sqrt(radius, out=radius)
        np.multiply(radius, stddev, out=radius, casting="same_kind")
        if single:
            # Of 32 bits, in [−π, π).
            np.copyto(angle, words[pairs:].view(np.int32), casting="same_kind")
            np.multiply(angle, np.float32(2 * math.pi * 2.0**-32), out=angle)
        else:
            np.multiply(_uniforms(words[pairs:]), 2 * math.pi, out=angle)
        np.multiply(np.cos(angle, out=block[:pairs]), radius, out=block[:pairs])
        np.multiply(np.sin(angle, out=block[pairs:]), radius, out=block[pairs:])
        return block


# Arrays that no draw is using. New ones would go back to the system after each draw, and their pages would be fetched
# anew for the next, which takes longer than the draws of a block.
_free: dict[np.dtype, list[_Arrays]] = {np.dtype(np.float32): [], np.dtype(np.float64): []}


@contextmanager
def _arrays(working: np.dtype, pairs: int) -> Iterator[_Arrays]:
    """Space for blocks of so many pairs, which no other thread has."""
    free = _free[working]
    try:
        arrays = free.pop()
    except IndexError:
        arrays = _Arrays(working, pairs)
    if arrays.pairs < pairs:
        arrays = _Arrays(working, pairs)
    yield arrays
    free.append(arrays)


def _single_logarithms(words: np.ndarray, out: np.ndarray, stream: Stream) -> None:
    """The logarithm of U in single precision; `stream` stands behind both words of every pair of the block.

    U = w·2⁻³² for a word w, and (w + V)·2⁻³² with a uniform V of 52 bits where w is small.
    """
    np.copyto(out, words, casting="same_kind")
    if words.min() < _SHORT:
        for place in np.flatnonzero(words < _SHORT):
            # As far behind this pair's own bits as the reserve of any other pair lies behind those.
            own = _RESERVE - 2 * words.nbytes + 8 * int(place)
            out[place] = words[place] + stream.ahead(own).uniform(1)[0]
    np.multiply(out, _UNIT, out=out)
    np.log(out, out=out)


def _uniforms(words: np.ndarray) -> np.ndarray:
    """Float64 uniforms in (0, 1), in the memory of `words` (uint64): odd multiples of 2⁻⁵³."""
    # The top 52 bits become the fraction of a float in [1, 2).
    np.right_shift(words, np.uint64(12), out=words)
    np.bitwise_or(words, np.uint64(_EXPONENT_OF_ONE), out=words)
    uniforms = words.view(np.float64)
    uniforms -= 1.0 - 2.0**-53
    return uniforms
