"""Exact draws of ⌊σN + ½⌋ for a standard normal N and a whole σ: Gaussian noise rounded to the grid (floor 1).

An integer plus rounded Gaussian noise is the same as the rounding of (integer + Gaussian noise), so a mechanism that
adds it is post-processing of the real-valued Gaussian mechanism and has exactly its guarantee, for vectors too.
(The discrete Gaussian, by contrast, is a law of its own: equal in Rényi divergence bounds, not in its ε–δ curve.)

N's digits are made one word at a time, and a comparison that the words so far leave open draws the next word, so no
float and no truncation enters.

References:
    Karney 2016, "Sampling exactly from the normal distribution", algorithm N. Forsythe 1972.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from sordino import checks
from sordino.errors import InvalidArgument
from sordino.mechanisms.exact import uniform_below
from sordino.mechanisms.tail_table import half_normal_integer
from sordino.randomness import Stream

__all__ = ["LARGEST_STDDEV", "rounded_gaussian"]

IntegerArray = npt.NDArray[np.int64]
BooleanArray = npt.NDArray[np.bool_]

LARGEST_STDDEV = 1 << 50
_BLOCK = 1 << 14
_WORD = 32


def rounded_gaussian(stddev: int, count: int, stream: Stream, *, word_bits: int = _WORD) -> IntegerArray:
    """`count` independent draws of ⌊stddev·N + ½⌋.

    Args:
        stddev: a whole number of grid steps, 1 … 2⁵⁰.
        count: ≥ 0.
        stream: source of the bits; read in order.
        word_bits: digits drawn at once, 1 … 32. The law doesn't depend on it; few digits exercise the rare branches.
    """
    checks.integer(1, stddev=stddev)
    checks.in_range(1, _WORD, word_bits=word_bits)
    if stddev > LARGEST_STDDEV:
        raise InvalidArgument(f"stddev must be ≤ 2^50 grid steps, got {stddev}. Use a coarser grid.")
    parts: list[IntegerArray] = []
    missing = count
    while missing > 0:
        part = _propose(stddev, min(int(missing * 1.5) + 16, _BLOCK), stream, word_bits)[:missing]
        parts.append(part)
        missing -= len(part)
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


class _LazyUniforms:
    """Uniforms of (0, 1) whose first word is drawn at once and whose further words when they are needed."""

    def __init__(self, count: int, stream: Stream, word_bits: int) -> None:
        self._stream = stream
        self._bits = word_bits
        self.first = uniform_below(1 << word_bits, count, stream)
        self._more: dict[int, list[int]] = {}

    def second(self, places: IntegerArray) -> IntegerArray:
        """The second word of each of these uniforms; those that a comparison has drawn already are kept."""
        words = uniform_below(1 << self._bits, len(places), self._stream)
        if self._more:
            for position, place in enumerate(places):
                if self._more.get(int(place)):
                    words[position] = self._more[int(place)][0]
        return words

    def digits(self, place: int, *, second: int | None = None) -> Iterator[int]:
        """All words of one uniform, without end; the first time they are asked for they are drawn and kept."""
        yield int(self.first[place])
        kept = self._more.setdefault(place, [])
        if not kept and second is not None:
            kept.append(second)
        position = 0
        while True:
            if position == len(kept):
                kept.append(self.word())
            yield kept[position]
            position += 1

    def word(self) -> int:
        """One fresh word."""
        return int(uniform_below(1 << self._bits, 1, self._stream)[0])

    def exceed_fresh(self, places: IntegerArray) -> BooleanArray:
        """Whether each of these uniforms is above a fresh one."""
        rivals = uniform_below(1 << self._bits, len(places), self._stream)
        own = self.first[places]
        above = rivals < own
        for tied in np.flatnonzero(rivals == own):
            later = self.digits(int(places[tied]))
            next(later)
            above[tied] = self._above_fresh(later)
        return above

    def _above_fresh(self, later: Iterator[int]) -> bool:
        while True:
            own, rival = next(later), self.word()
            if own != rival:
                return rival < own


def _propose(stddev: int, count: int, stream: Stream, word_bits: int) -> IntegerArray:
    """Karney's algorithm N: N = ±(k + x), kept with probability exp(−x(2k + x)/2), rounded on the grid."""
    whole = half_normal_integer.draw(count, stream)
    fraction = _LazyUniforms(len(whole), stream, word_bits)
    kept = np.flatnonzero(_exp_half_square(fraction, stream))
    # e^{−kx} is k successes at e^{−x}.
    turns = whole[kept].copy()
    while (active := np.flatnonzero(turns > 0)).size:
        success = _exp_minus(fraction, kept[active], stream)
        turns[active] -= 1
        failed = np.zeros(len(kept), dtype=np.bool_)
        failed[active[~success]] = True
        kept, turns = kept[~failed], turns[~failed]
    magnitude = stddev * whole[kept] + _rounded(stddev, fraction, kept, word_bits)
    return np.where(uniform_below(2, len(kept), stream) == 1, -magnitude, magnitude)


def _exp_half_square(fraction: _LazyUniforms, stream: Stream) -> BooleanArray:
    """For every uniform x: True with probability e^{−x²/2}, by the alternating series in x²/(2K)."""
    outcome = np.empty(len(fraction.first), dtype=np.bool_)
    alive = np.arange(len(outcome))
    turn = 1
    while alive.size:
        success = uniform_below(2 * turn, len(alive), stream) == 0
        for _ in range(2):
            hopeful = np.flatnonzero(success)
            success[hopeful] = fraction.exceed_fresh(alive[hopeful])
        outcome[alive[~success]] = turn % 2 == 1
        alive = alive[success]
        turn += 1
    return outcome


def _exp_minus(fraction: _LazyUniforms, places: IntegerArray, stream: Stream) -> BooleanArray:
    """For the uniforms x at these places: True with probability e^{−x}, by the alternating series in x/K."""
    outcome = np.empty(len(places), dtype=np.bool_)
    alive = np.arange(len(places))
    turn = 1
    while alive.size:
        success = fraction.exceed_fresh(places[alive])
        if turn > 1:
            hopeful = np.flatnonzero(success)
            success[hopeful] = uniform_below(turn, len(hopeful), stream) == 0
        outcome[alive[~success]] = turn % 2 == 1
        alive = alive[success]
        turn += 1
    return outcome


def _rounded(stddev: int, fraction: _LazyUniforms, places: IntegerArray, word_bits: int) -> IntegerArray:
    """⌊stddev·x + ½⌋ for the uniforms x at these places.

    x lies in [w, w + 1)/2^bits after two words, so the result is known unless a half-integer falls into that interval
    times stddev; then more digits are used.
    """
    bits = 2 * word_bits
    second = fraction.second(places)
    low = (fraction.first[places].astype(np.uint64) << np.uint64(word_bits)) | second.astype(np.uint64)
    rounded, above = _round_product(stddev, low, bits, extra=0), _round_product(stddev, low, bits, extra=stddev - 1)
    # The interval is open above: its last point is just below low + stddev.
    for place in np.flatnonzero(above != rounded):
        words = fraction.digits(int(places[place]), second=int(second[place]))
        value, used = next(words), word_bits
        while True:
            value, used = (value << word_bits) | next(words), used + word_bits
            half = 1 << (used - 1)
            result = (stddev * value + half) >> used
            if (stddev * (value + 1) - 1 + half) >> used == result:
                break
        rounded[place] = result
    return rounded


def _round_product(stddev: int, words: npt.NDArray[np.uint64], bits: int, *, extra: int) -> IntegerArray:
    """⌊(stddev·word + extra)/2^bits + ½⌋ for words of `bits` ≤ 64 binary digits, from products of 32-bit halves."""
    mask, half_word = np.uint64((1 << 32) - 1), np.uint64(32)
    high_factor, low_factor = np.uint64(stddev >> 32), np.uint64(stddev & ((1 << 32) - 1))
    high_word, low_word = words >> half_word, words & mask
    # stddev·word + extra + 2^(bits−1) = high·2⁶⁴ + low; extra < 2⁵⁰ keeps every partial sum inside 64 bits.
    middle = low_factor * high_word
    first = low_factor * low_word
    carry = (first >> half_word) + (middle & mask) + ((high_factor * low_word) & mask)
    high = high_factor * high_word + (middle >> half_word) + ((high_factor * low_word) >> half_word)
    high += carry >> half_word
    low = (carry << half_word) | (first & mask)
    for addend in (extra, 1 << (bits - 1)):
        total = low + np.uint64(addend)  # wraps around on purpose
        high += total < low
        low = total
    if bits == 64:
        return high.astype(np.int64)
    return ((high << np.uint64(64 - bits)) | (low >> np.uint64(bits))).astype(np.int64)
