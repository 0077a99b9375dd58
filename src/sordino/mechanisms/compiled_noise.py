"""Normal draws of single precision from random words, compiled by Numba. Imported only where Numba is.

Every operation below is one that IEEE 754 rounds exactly (sum, product, square root, conversion) or one on the bits of
whole numbers, in a fixed order. So the functions give the same draws bit by bit as machine code, and on NumPy's arrays,
for which they can be called as they are; and on every processor. NumPy's own logarithm, cosine and sine differ
between processors in the last bit.

Where the processor has instructions for two blocks of AES at once, the words are made here too, and used while they
are in its nearest cache.

References:
    Box, Muller 1958. Cody, Waite 1980, "Software manual for the elementary functions", chapters 5 and 8 (reduction of
    the argument, a polynomial on what remains).
"""

# Numba is not always there.
# pyright: reportMissingImports=false

import math
from collections.abc import Callable
from typing import Any, no_type_check

import numpy as np

from sordino.installation import require
from sordino.mechanisms.tensor_noise import SHORT, UNIT
from sordino.randomness import RandomStream

require("numba", "numba", user="compiled noise")

import numba  # noqa: E402
from numba.extending import register_jitable  # noqa: E402

from sordino.mechanisms import compiled_words  # noqa: E402

_INT, _SINGLE = np.int32, np.float32

# The bits of √½, where the exponent of a number is one less: mantissas then lie in [√½, √2).
_ROOT_HALF = _INT(0x3F35_04F3)
_MANTISSA = _INT(23)
_LOG_2 = _SINGLE(math.log(2.0))
_ZERO, _HALF, _ONE, _MINUS_TWO = _SINGLE(0.0), _SINGLE(0.5), _SINGLE(1.0), _SINGLE(-2.0)
# (log(1 + f) − f + f²/2)/f³ on [√½ − 1, √2 − 1], times f³ within 7·10⁻⁹.
_L0, _L1, _L2, _L3 = _SINGLE(0.33334166), _SINGLE(-0.25001699), _SINGLE(0.19954875), _SINGLE(-0.16564426)
_L4, _L5, _L6 = _SINGLE(0.14977995), _SINGLE(-0.14379008), _SINGLE(0.08672184)
# (sin t − t)/t³ and (cos t − 1 + t²/2)/t⁴ on [−π/4, π/4] as polynomials of t², within 2·10⁻⁹ once multiplied out.
_S0, _S1, _S2 = _SINGLE(-0.16666651), _SINGLE(0.0083319787), _SINGLE(-0.00019495636)
_C0, _C1, _C2 = _SINGLE(0.041666646), _SINGLE(-0.0013887368), _SINGLE(2.4438452e-05)
# Of 2³² steps of a turn, 2³⁰ are a quarter; half a quarter more, and the first quarter lies about the angle 0.
_EIGHTH, _QUARTER_BITS, _REST_BITS = _INT(1 << 29), _INT(30), _INT(2)
_STEP = _SINGLE(2 * math.pi * 2.0**-32)
_FIRST_BIT, _SECOND_BIT, _TO_SIGN = _INT(1), _INT(2), _INT(30)


@register_jitable
@no_type_check
def logarithm(x):
    """The logarithm of a normal x > 0 of single precision: x = 2^k·(1 + f) with √½ ≤ 1 + f < √2."""
    bits = np.float32(x).view(np.int32)
    exponent = np.int32(np.int32(bits - _ROOT_HALF) >> _MANTISSA)
    f = np.int32(bits - np.int32(exponent << _MANTISSA)).view(np.float32) - _ONE
    tail = ((((((_L6 * f + _L5) * f + _L4) * f + _L3) * f + _L2) * f + _L1) * f + _L0) * f
    return np.float32(exponent) * _LOG_2 + (f + f * f * (tail - _HALF))


@register_jitable
@no_type_check
def cosine_and_sine(turn):
    """The pair cos 2πV, sin 2πV for V = turn·2⁻³², a word read as a signed number."""
    steps = np.uint32(turn).view(np.int32)
    quarter = np.int32(np.int32(steps + _EIGHTH) >> _QUARTER_BITS)
    t = np.float32(np.int32(np.int32(steps << _REST_BITS) >> _REST_BITS)) * _STEP
    square = t * t
    sine = t + t * square * ((_S2 * square + _S1) * square + _S0)
    cosine = (_ONE - _HALF * square) + square * square * ((_C2 * square + _C1) * square + _C0)
    # An odd quarter exchanges the two; a bit of the quarter is the sign of each.
    sine_bits, cosine_bits = np.float32(sine).view(np.int32), np.float32(cosine).view(np.int32)
    exchange = np.int32(np.int32(sine_bits ^ cosine_bits) & np.int32(-np.int32(quarter & _FIRST_BIT)))
    cosine_sign = np.int32(np.int32(np.int32(quarter + _FIRST_BIT) & _SECOND_BIT) << _TO_SIGN)
    sine_sign = np.int32(np.int32(quarter & _SECOND_BIT) << _TO_SIGN)
    return (
        np.int32(np.int32(cosine_bits ^ exchange) ^ cosine_sign).view(np.float32),
        np.int32(np.int32(sine_bits ^ exchange) ^ sine_sign).view(np.float32),
    )


@register_jitable
@no_type_check
def normal_pair(numerator, turn, stddev):
    """Box–Muller: σ·√(−2 log U)·(cos 2πV, sin 2πV) with U = numerator·2⁻³² and V = turn·2⁻³².

    Args:
        numerator: single precision, > 0.
        turn: a word of 32 bits.
        stddev: single precision.

    Returns:
        Two draws, each of single precision.
    """
    radius = np.sqrt(logarithm(numerator * UNIT) * _MINUS_TWO) * stddev
    cosine, sine = cosine_and_sine(turn)
    return radius * cosine, radius * sine


# ----------------------------------------------------------------------------------------------------------------------
# A block of draws: cosines first, pair i from the words i and n + i. Pairs whose first word is below `SHORT`, which
# needs more bits than it has, get zeros, and are listed.
# ----------------------------------------------------------------------------------------------------------------------

# Pairs whose words are made at once.
_FEW = 1024
_MOST = np.uint32(0xFFFF_FFFF)


@register_jitable
@no_type_check
def _add(numerators, turns, stddev, cosines, sines):
    """Add the draws of pairs; the smallest numerator."""
    smallest = _MOST
    for i in range(len(cosines)):
        smallest = min(smallest, numerators[i])
        own = stddev if numerators[i] >= SHORT else _ZERO
        cosine, sine = normal_pair(np.float32(numerators[i]), turns[i], own)
        cosines[i] += cosine
        sines[i] += sine
    return smallest


@register_jitable
@no_type_check
def _list(numerators, turns, first, rare, found):
    """Write position, numerator and turn of pairs that need more bits to `rare`, behind those found already."""
    for i in range(len(numerators)):
        if numerators[i] < SHORT:
            rare[found, 0], rare[found, 1], rare[found, 2] = first + i, numerators[i], turns[i]
            found += 1
    return found


@no_type_check
def _add_pairs(words, stddev, out, rare):
    pairs = len(words) // 2
    smallest = _add(words[:pairs], words[pairs:], stddev, out[:pairs], out[pairs:])
    return _list(words[:pairs], words[pairs:], 0, rare, 0) if smallest < SHORT else 0


@no_type_check
def _add_draws(key, first, stddev, out, rare):
    pairs, found = len(out) // 2, 0
    keys = compiled_words.expand(key)
    size = _FEW + 2 * compiled_words.WORDS_AT_ONCE
    first_words, second_words = np.empty(size, np.uint32), np.empty(size, np.uint32)
    for start in range(0, pairs, _FEW):
        few = min(_FEW, pairs - start)
        begin = compiled_words.fill(first_words, keys, first + start, few)
        numerators = first_words[begin : begin + few]
        begin = compiled_words.fill(second_words, keys, first + pairs + start, few)
        turns = second_words[begin : begin + few]
        cosines, sines = out[start : start + few], out[pairs + start : pairs + start + few]
        if _add(numerators, turns, stddev, cosines, sines) < SHORT:
            found = _list(numerators, turns, start, rare, found)
    return found


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    try:
        return numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:  # no folder can be written that machine code could be kept in
        return numba.njit(nogil=True)(function)


add_pairs = _compiled(_add_pairs)
add_draws = _compiled(_add_draws)


def add_block(out: np.ndarray, stream: RandomStream, stddev: np.float32, words: np.ndarray, rare: np.ndarray) -> int:
    """Add `stddev` times an even number of draws to `out`, and read their words from the stream.

    Args:
        out: single precision.
        stream: source of the words; afterwards it has been read up to their end.
        stddev: ≥ 0.
        words: space for as many words of 32 bits as `out` has entries.
        rare: space for three words of 32 bits for each pair. A row for each pair that has no draws yet is written:
            position, numerator, turn.

    Returns:
        How many such pairs there are.
    """
    key, position = stream.key_and_position()
    if not (_HAS_INSTRUCTIONS and position % 4 == 0 and position < _FAR):
        stream.fill(words.data)
        return add_pairs(words, stddev, out, rare)
    stream.skip(out.nbytes)
    return add_draws(np.frombuffer(key, np.uint32), position // 4, stddev, out, rare)


_HAS_INSTRUCTIONS = compiled_words.is_supported()
# Bytes; further counters would need more than 64 bits.
_FAR = 1 << 62


def equals_its_source() -> bool:
    """Whether machine code was made, and gives the bits that its source gives on NumPy's arrays.

    For words near each power of two, where exponents and quarters of a turn change, and for words spread over all. If
    the words are made here too, they are compared with those of the stream.
    """
    if numba.config.DISABLE_JIT:
        return False
    near = [(1 << bit) + step for bit in range(33) for step in range(-2, 3)]
    spread = np.arange(1, 1 << 12, dtype=np.uint32) * np.uint32(0x9E37_79B1)
    turns = np.concatenate([np.array([word for word in near if 0 <= word < 1 << 32], np.uint32), spread])
    # Each word meets another as numerator and as turn.
    numerators, stddev = np.maximum(turns[::-1], np.uint32(SHORT)), np.float32(1.1)
    made, rare = np.zeros(2 * len(turns), np.float32), np.empty((len(turns), 3), np.uint32)
    add_pairs(np.concatenate([numerators, turns]), stddev, made, rare)
    if not np.array_equal(np.concatenate(normal_pair(np.float32(numerators), turns, stddev)), made):
        return False
    return not _HAS_INSTRUCTIONS or all(_has_the_words_of(position) for position in (0, 4, 2**34 - 40, 2**61 + 8))


def _has_the_words_of(position: int) -> bool:
    """Whether draws from this byte of a stream on are those of its words; they cross a boundary of `_FEW`."""
    pairs, key = _FEW + 5, bytes(range(32))
    words, rare = np.empty(2 * pairs, np.uint32), np.empty((pairs, 3), np.uint32)
    RandomStream(key, position=position).fill(words.data)
    made, right = np.zeros(2 * pairs, np.float32), np.zeros(2 * pairs, np.float32)
    add_block(made, RandomStream(key, position=position), np.float32(1), words.copy(), rare)
    add_pairs(words, np.float32(1), right, rare)
    return np.array_equal(made, right)
