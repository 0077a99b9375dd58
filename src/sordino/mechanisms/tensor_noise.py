"""The Gaussian mechanism on tensors, with noise from the run's cryptographic randomness.

The noise is floating-point Gaussian noise: it protects against every adversary who sees values as real
numbers, not against one who inspects the last bits of the released floats (Mironov 2012). It is labeled so.

References:
    Dwork, Roth 2014, appendix A (mechanism); Box, Muller 1958 (transform).
"""

import ctypes
import itertools
import math
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from sordino import checks
from sordino.errors import InvalidArgument
from sordino.events import Event, Gaussian
from sordino.installation import is_installed
from sordino.mechanisms.base import observable_release
from sordino.mechanisms.device_noise import add_device_normal_
from sordino.randomness import KeyedRNG, RandomStream

# ----------------------------------------------------------------------------------------------------------------------
# Threads of torch's that wait for work give their processors free, where that is asked for.
#
# After an operation on several threads those of OpenMP go on asking for work for some milliseconds, each on a
# processor. Other threads that begin to work then share these with them: the noise of ten million numbers takes a third
# longer.
#
# References:
#     OpenMP API 5.0, omp_pause_resource_all.
# ----------------------------------------------------------------------------------------------------------------------


_SOFT = 1
_ends_idle_threads: ContextVar[bool] = ContextVar("sordino ends idle threads", default=False)


@contextmanager
def idle_threads_ended() -> Iterator[None]:
    """A block in which threads that wait for torch's next operation, which starts them again, end before noise.

    Only the calling thread's are ended, and only where noise is drawn on several threads.
    """
    before = _ends_idle_threads.set(True)
    try:
        yield
    finally:
        _ends_idle_threads.reset(before)


def _end_idle_threads() -> None:
    library = _openmp() if _ends_idle_threads.get() else None
    if library is not None:
        library.omp_pause_resource_all(_SOFT)


@cache
def _openmp() -> ctypes.CDLL | None:
    """The library that torch came with, and has loaded."""
    found = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*")) if sys.platform == "linux" else []
    loaded = Path("/proc/self/maps").read_text() if found else ""
    names = [name for name in found if str(name) in loaded]
    if not names:
        return None
    library = ctypes.CDLL(str(names[0]))
    return library if hasattr(library, "omp_pause_resource_all") else None


# ----------------------------------------------------------------------------------------------------------------------
# Standard normal draws from a stream of secret bits, in blocks and on several threads.
#
# A block of draws takes a fixed range of the stream on every thread: so the draws don't depend on the number of
# threads, and any part of a long row of draws can be made without the rest.
#
# References:
#     Box, Muller 1958.
# ----------------------------------------------------------------------------------------------------------------------


# Pairs a block: its intermediates, 3 MB, stay in the processor's cache, and each call is long compared with handing
# over the interpreter, so that two threads take 0.57 of the time of one.
_BLOCK = 1 << 17
# Draws a block.
_DRAWS = 2 * _BLOCK
# Blocks that a thread takes at once: each time its position in the stream has to be found.
_MOST_AT_ONCE = 4
_EXPONENT_OF_ONE = 0x3FF0_0000_0000_0000
# Words of 32 bits below this get 52 bits more, so that the tail has them where it needs them.
SHORT = 1 << 12
# Where in the stream those lie, as seen from the pair's own bits: further than any row of draws reaches.
_RESERVE = 1 << 80
# 2⁻³², and a little less, so that a word of ones is not rounded to U = 1, which would be a draw of exactly zero.
UNIT = np.float32(2.0**-32 * (1 - 2.0**-24))
# Draws of a row that are worth loading Numba for, which takes under a second.
_LONG = 1 << 16

# Where in the row of draws an array begins, and the array.
_Target = tuple[int, np.ndarray]


def standard_normal(
    count: int,
    stream: RandomStream,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Tensor:
    """`count` independent standard normal draws, shape (count,).

    Box–Muller: √(−2 ln U)·(cos 2πV, sin 2πV). For float32 results U and V have 32 bits each, and where U < 2⁻²⁰ it has
    52 bits more: the tail reaches 10.8 standard deviations (32 bits alone would end at 6.8). For float64 results
    both have 52 bits, and the tail reaches 8.5.

    Args:
        count: ≥ 0.
        stream: source of the bits; read in order.
        dtype: float64 gives float64 arithmetic throughout; every other dtype is drawn in float32.
        device: where they are made. Another device than the CPU has draws of its own, see `device_noise`.

    Returns:
        A tensor of float64 when asked for, otherwise float32.
    """
    noise = torch.zeros(checks.integer(0, count=count), dtype=_working(dtype), device=device)
    add_normal_([noise], stream, stddev=1.0)
    return noise


def add_normal_(
    tensors: Sequence[Tensor],
    stream: RandomStream,
    *,
    stddev: float,
    starts: Sequence[int] | None = None,
    count: int | None = None,
) -> None:
    """Add `stddev` times standard normal draws in place.

    There is one row of draws, and every tensor gets those of its position in it. They are made on the tensor's device,
    block by block, so the noise of a tensor of single or double precision is never in memory as a whole.

    Args:
        tensors: of any shape, device and floating type; either all of them are float64 or none is.
        stream: source of the bits; afterwards it stands behind the whole row.
        stddev: > 0.
        starts: where in the row each tensor begins, in order and without overlap; by default each behind the last.
        count: length of the row; by default to the end of the last tensor.
    """
    if not tensors:
        return
    sizes = [tensor.numel() for tensor in tensors]
    starts = list(itertools.accumulate(sizes[:-1], initial=0)) if starts is None else list(starts)
    length = starts[-1] + sizes[-1] if count is None else count
    near: list[_Target] = []
    others: list[tuple[int, Tensor]] = []
    for start, tensor in zip(starts, tensors, strict=True):
        if not tensor.numel():
            continue
        if _is_away(tensor):
            add_device_normal_(tensor, stream.device_key(), first=start, stddev=stddev)
        elif tensor.dtype in (torch.float32, torch.float64) and tensor.is_contiguous():
            near.append((start, tensor.detach().view(-1).numpy()))
        else:
            others.append((start, tensor))
    if near:
        _draw(near, length, stream, stddev)
    if others:
        noise = [torch.zeros(tensor.numel(), dtype=_working(tensor.dtype)) for _, tensor in others]
        targets = [(start, own.numpy()) for (start, _), own in zip(others, noise, strict=True)]
        _draw(targets, length, stream, stddev)
        for (_, tensor), own in zip(others, noise, strict=True):
            tensor.add_(own.view(tensor.shape).to(tensor.dtype))
    stream.skip(_bytes(length, _working(tensors[0].dtype).itemsize))


def _is_away(tensor: Tensor) -> bool:
    return tensor.device.type != "cpu"


def _working(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _bytes(count: int, itemsize: int) -> int:
    """How much of the stream the first `count` draws take: two words a pair, of 4 or 8 bytes."""
    return (count + 1) // 2 * 2 * itemsize


def _draw(targets: Sequence[_Target], count: int, stream: RandomStream, stddev: float) -> None:
    """The blocks of the row that `targets` lie in, on as many of torch's threads as they are worth."""
    blocks = sorted(
        {block for start, row in targets for block in range(start // _DRAWS, -(-(start + len(row)) // _DRAWS))}
    )
    # A whole block is worth a thread: starting one takes a twentieth of its time.
    threads = max(1, min(torch.get_num_threads(), sum(len(row) for _, row in targets) // _DRAWS))
    single = targets[0][1].dtype == np.float32
    compiled = _compiled_noise() if single and count >= _LONG else None
    if threads == 1:
        _draw_blocks(blocks, targets, count, stream, stddev, compiled)
        return
    _end_idle_threads()
    # Who is done takes the next few, whatever else keeps the processors busy.
    few = max(1, min(_MOST_AT_ONCE, len(blocks) // (4 * threads)))
    waiting = iter([blocks[first : first + few] for first in range(0, len(blocks), few)])

    def work() -> None:
        for part in waiting:
            _draw_blocks(part, targets, count, stream, stddev, compiled)

    with ThreadPoolExecutor(threads - 1) as others:
        started = [others.submit(work) for _ in range(threads - 1)]
        work()
        for thread in started:
            thread.result()


def _draw_blocks(
    blocks: Sequence[int],
    targets: Sequence[_Target],
    count: int,
    stream: RandomStream,
    stddev: float,
    compiled: ModuleType | None,
) -> None:
    working = targets[0][1].dtype
    starts = [start for start, _ in targets]
    reader, position = stream, -1
    with _arrays(working, min(_BLOCK, (count + 1) // 2)) as arrays:
        for block in blocks:
            first, last = block * _DRAWS, min((block + 1) * _DRAWS, count)
            if first != position:
                reader = stream.ahead(_bytes(first, working.itemsize))
            position = last
            near = targets[max(0, bisect_right(starts, first) - 1) : bisect_left(starts, last)]
            start, row = near[0]
            if compiled is not None and start <= first and last - start <= len(row) and (last - first) % 2 == 0:
                arrays.add_compiled(row[first - start : last - start], reader, stddev, compiled)
                continue
            drawn = arrays.draw((last - first + 1) // 2, reader, stddev, compiled)
            for start, row in near:
                low, high = max(first, start), min(last, start + len(row))
                if low < high:
                    part = row[low - start : high - start]
                    np.add(part, drawn[low - first : high - first], out=part)


# --- one block ----------------------------------------------------------------------------------------------------


class _Arrays:
    """Space for one block. The work is done in place, in arrays that stay in the processor's cache.

    NumPy's functions are vectorized for whatever processor they run on, and let other threads run.
    """

    def __init__(self, working: np.dtype, pairs: int) -> None:
        self.pairs, self._words = pairs, np.empty(2 * pairs, np.uint64 if working == np.float64 else np.uint32)
        self._radii, self._angles = np.empty(pairs, working), np.empty(pairs, working)
        self._draws = np.empty(2 * pairs, working)
        # Pages that nothing is written to take no memory.
        self._rare: np.ndarray | None = None

    def draw(self, pairs: int, stream: RandomStream, stddev: float, compiled: ModuleType | None) -> np.ndarray:
        """`stddev` times 2·`pairs` draws; the next call overwrites them."""
        words, draws = self._words[: 2 * pairs], self._draws[: 2 * pairs]
        if compiled is None:
            stream.fill(words.data)
            self._transform(words, draws, stream, stddev)
        else:
            draws.fill(0)
            self.add_compiled(draws, stream, stddev, compiled)
        return draws

    def add_compiled(self, out: np.ndarray, stream: RandomStream, stddev: float, compiled: ModuleType) -> None:
        """Add `stddev` times an even number of draws of single precision to `out`."""
        pairs, scale = len(out) // 2, np.float32(stddev)
        if self._rare is None:
            self._rare = np.empty((self.pairs, 3), np.uint32)
        count = compiled.add_block(out, stream, scale, self._words[: len(out)], self._rare)
        if count:
            rare, words, turns = self._rare[:count].T
            cosines, sines = compiled.normal_pair(_with_more_bits(words, rare, pairs, stream), turns, scale)
            out[rare] += cosines
            out[pairs + rare] += sines

    def _transform(self, words: np.ndarray, draws: np.ndarray, stream: RandomStream, stddev: float) -> None:
        """Box–Muller by NumPy's functions."""
        pairs = len(words) // 2
        radius, angle = self._radii[:pairs], self._angles[:pairs]
        single = words.dtype == np.uint32
        if single:
            np.copyto(radius, words[:pairs], casting="same_kind")
            if words[:pairs].min() < SHORT:
                rare = np.flatnonzero(words[:pairs] < SHORT)
                radius[rare] = _with_more_bits(words[rare], rare, pairs, stream)
            np.multiply(radius, UNIT, out=radius)
            np.log(radius, out=radius)
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
        np.multiply(np.cos(angle, out=draws[:pairs]), radius, out=draws[:pairs])
        np.multiply(np.sin(angle, out=draws[pairs:]), radius, out=draws[pairs:])


@cache
def _compiled_noise() -> ModuleType | None:
    """The compiled draws, or None: without Numba, or where machine code doesn't give the bits of its source."""
    if not is_installed("numba"):
        return None
    try:
        from sordino.mechanisms import compiled_noise

        return compiled_noise if compiled_noise.equals_its_source() else None
    except Exception:
        # A version of Numba that is too old or too new for this Python: what compiling may fail by is not a list.
        return None


# Arrays that no draw is using. New ones would go back to the system after each draw, and their pages would be fetched
# again for the next, which takes longer than the draws of a block.
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


def _with_more_bits(words: np.ndarray, rare: np.ndarray, pairs: int, stream: RandomStream) -> np.ndarray:
    """2³²·U of the pairs at the positions `rare`, whose words w are small: w + V with a uniform V of 52 bits.

    `stream` has been read up to the end of the words of the block's `pairs`.
    """
    # As far behind a pair's own bits as the reserve of any other pair lies behind those.
    behind = _RESERVE - 8 * pairs
    further = [stream.ahead(behind + 8 * int(position)).uniform(1)[0] for position in rare]
    return (words + np.array(further)).astype(np.float32)


def _uniforms(words: np.ndarray) -> np.ndarray:
    """Float64 uniforms in (0, 1), in the memory of `words` (uint64): odd multiples of 2⁻⁵³."""
    # The top 52 bits become the fraction of a float in [1, 2).
    np.right_shift(words, np.uint64(12), out=words)
    np.bitwise_or(words, np.uint64(_EXPONENT_OF_ONE), out=words)
    uniforms = words.view(np.float64)
    uniforms -= 1.0 - 2.0**-53
    return uniforms


# ----------------------------------------------------------------------------------------------------------------------
# The Gaussian mechanism on tensors, with noise from the run's cryptographic randomness.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TensorGaussianMechanism:
    """Adds N(0, (noise_multiplier · l2_sensitivity)²) to every coordinate of a value.

    Guarantee: one release is ``Gaussian(noise_multiplier)`` when one privacy unit moves the value, all its
    tensors taken together, by at most `l2_sensitivity` in ℓ2 norm under the declared relation.

    Args:
        noise_multiplier: standard deviation over sensitivity, ≥ 0. Zero is for debugging: ε is ∞.
        l2_sensitivity: > 0.

    Example:
        >>> TensorGaussianMechanism(noise_multiplier=2.0, l2_sensitivity=0.5).stddev
        1.0
    """

    noise_multiplier: float
    l2_sensitivity: float

    def __post_init__(self) -> None:
        checks.non_negative(noise_multiplier=self.noise_multiplier)
        checks.positive(l2_sensitivity=self.l2_sensitivity)

    @property
    def stddev(self) -> float:
        """Standard deviation of the noise on each coordinate."""
        return self.noise_multiplier * self.l2_sensitivity

    def event(self) -> Event:
        """The event of one release."""
        return Gaussian(noise_multiplier=self.noise_multiplier)

    @observable_release
    def add_noise_(self, tensors: Sequence[Tensor], *, rng: KeyedRNG, step: int, rank: int = 0) -> None:
        """Add fresh noise to `tensors` in place; (`step`, `rank`) must never repeat within one `rng`.

        All tensors take their noise from one stream, each its own draws.
        """
        if self.stddev == 0:
            return
        stream = rng.stream("gaussian", step=step, rank=rank)
        for group in group_by_precision(tensors):
            add_normal_(group, stream, stddev=self.stddev)


def group_by_precision(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Neighbors whose noise is drawn in one row: in double precision, or in single precision for every other type."""
    kinds = [tensor.dtype is torch.float64 for tensor in tensors]
    if not kinds or all(kind is kinds[0] for kind in kinds):
        return [list(tensors)] if kinds else []
    return [list(group) for _, group in itertools.groupby(tensors, lambda tensor: tensor.dtype == torch.float64)]


# ----------------------------------------------------------------------------------------------------------------------
# The noise of tensors of which each process holds a part: every part takes its stretch of the one noise.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ShardSlice:
    """Where a held tensor lies in the whole one, counted in entries of the flattened whole.

    Args:
        first: position of its first entry.
        whole: number of entries of the whole tensor; the held one has at most so many.
    """

    first: int
    whole: int


@dataclass(frozen=True, kw_only=True)
class ShardGaussianMechanism:
    """Adds to the held parts of tensors the noise that `mechanism` would add to the whole tensors.

    Guarantee: all parts of all processes together are one release of `mechanism` on the whole tensors, when every
    process draws from the same key: each entry gets the draw of its own position, so noise on different parts is
    independent, and the same on copies of one part.

    Args:
        mechanism: of the whole tensors.
        parts: what is held of each tensor, in order.

    Example:
        >>> import torch
        >>> mechanism = TensorGaussianMechanism(noise_multiplier=1.0, l2_sensitivity=1.0)
        >>> rng, whole, held = KeyedRNG(), torch.zeros(5), torch.zeros(2)
        >>> mechanism.add_noise_([whole], rng=rng, step=0)
        >>> ShardGaussianMechanism(mechanism=mechanism, parts=(ShardSlice(first=3, whole=5),)).add_noise_(
        ...     [held], rng=rng, step=0)
        >>> bool((held == whole[3:]).all())
        True

    References:
        NIST SP 800-38A, section 6.5: any stretch of a counter-mode stream can be made without the rest.
    """

    mechanism: TensorGaussianMechanism
    parts: tuple[ShardSlice, ...]

    @property
    def noise_multiplier(self) -> float:
        """Standard deviation over sensitivity."""
        return self.mechanism.noise_multiplier

    @property
    def l2_sensitivity(self) -> float:
        """Of all whole tensors together."""
        return self.mechanism.l2_sensitivity

    @property
    def stddev(self) -> float:
        """Standard deviation of the noise on each entry."""
        return self.mechanism.stddev

    def event(self) -> Event:
        """The event of one release of the whole tensors."""
        return self.mechanism.event()

    @observable_release
    def add_noise_(self, tensors: Sequence[Tensor], *, rng: KeyedRNG, step: int, rank: int = 0) -> None:
        """Add the noise of their places to `tensors` in place; (`step`, `rank`) must never repeat.

        Raises:
            InvalidArgument: a part doesn't lie in its whole.
        """
        for tensor, part in zip(tensors, self.parts, strict=True):
            if not 0 <= part.first <= part.first + tensor.numel() <= part.whole:
                raise InvalidArgument("parts must lie within their tensors, got one beyond its end. Check the shards.")
        if self.stddev == 0:
            return
        stream = rng.stream("gaussian", step=step, rank=rank)
        left = list(self.parts)
        for group in group_by_precision(tensors):
            parts, left = left[: len(group)], left[len(group) :]
            wholes = list(itertools.accumulate((part.whole for part in parts), initial=0))
            starts = [start + part.first for start, part in zip(wholes, parts, strict=False)]
            add_normal_(group, stream, stddev=self.stddev, starts=starts, count=wholes[-1])
