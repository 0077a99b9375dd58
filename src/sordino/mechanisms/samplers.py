"""Floating-point draws: normal, Laplace, exponential, Gumbel, Gamma, points of unit balls.

These are the usual transforms of 52-bit uniforms. Their results protect against everyone who reads values as real
numbers; the last bits of a released float can tell more (Mironov 2012). Mechanisms that use them say so; the
integer-grid mechanisms don't have this gap.

References:
    Box, Muller 1958. Devroye 1986, "Non-uniform random variate generation", sections II.2 and V.4.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from decimal import Decimal, localcontext
from functools import cached_property

import numpy as np
import numpy.typing as npt

from sordino import checks
from sordino.errors import InvalidArgument
from sordino.randomness import RandomStream

FloatArray = npt.NDArray[np.float64]


def exponential(count: int, stream: RandomStream) -> FloatArray:
    """`count` standard exponential draws, −ln U."""
    return -np.log(stream.uniform(count))


def laplace(count: int, stream: RandomStream) -> FloatArray:
    """`count` Laplace draws of scale 1: the difference of two exponentials."""
    return exponential(count, stream) - exponential(count, stream)


def gumbel(count: int, stream: RandomStream) -> FloatArray:
    """`count` standard Gumbel draws, −ln E for an exponential E."""
    return -np.log(exponential(count, stream))


def normal(count: int, stream: RandomStream) -> FloatArray:
    """`count` standard normal draws by Box–Muller; the tail reaches 8.5 standard deviations."""
    half = (count + 1) // 2
    radius = np.sqrt(2.0 * exponential(half, stream))
    angle = 2.0 * math.pi * stream.uniform(half)
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]


def gamma(shape: int, stream: RandomStream) -> float:
    """One Gamma(shape, 1) draw for a whole shape: the sum of as many exponentials."""
    return float(exponential(shape, stream).sum())


def unit_ball_point(dimension: int, norm: float, stream: RandomStream) -> FloatArray:
    """A uniform point of {z : ‖z‖ ≤ 1} in ℝ^dimension for the ℓ1, ℓ2 or ℓ∞ norm (1, 2 or math.inf)."""
    if norm == math.inf:
        return 2.0 * stream.uniform(dimension) - 1.0
    if norm == 1:
        # |z| and the slack 1 − ‖z‖₁ are exponentials over their sum: a uniform point of the simplex.
        parts = exponential(dimension + 1, stream)
        signs = np.where(stream.uniform(dimension) < 0.5, -1.0, 1.0)
        return signs * parts[:dimension] / parts.sum()
    direction = normal(dimension, stream)
    radius = float(stream.uniform(1)[0]) ** (1.0 / dimension)
    return radius * direction / float(np.linalg.norm(direction))


# ----------------------------------------------------------------------------------------------------------------------
# Exact draws of a small non-negative integer from its tail probabilities, however many digits they have.
#
# X = #{k ≥ 1 : U < P(X ≥ k)} for a uniform U of endless binary digits. The first 64 digits are looked up in a table;
# only when they equal those of some tail probability (once in 10¹⁸ draws) further digits of both are compared.
#
# References:
#     Knuth, Yao 1976, "The complexity of nonuniform random number generation" (comparison digit by digit).
# ----------------------------------------------------------------------------------------------------------------------


_WORD = 64


class TailTable:
    """The distribution of an integer X ≥ 0.

    Args:
        digits: (k, bits) → ⌊2^bits · P(X ≥ k)⌋ for k ≥ 1, falling in k and exact for every number of bits.
    """

    def __init__(self, digits: Callable[[int, int], int]) -> None:
        self._digits = digits

    @cached_property
    def _tails(self) -> npt.NDArray[np.uint64]:
        """The first 64 digits of every tail probability that is not below 2⁻⁶⁴, ascending, and a zero for the rest."""
        found: list[int] = []
        while not found or found[-1] > 0:
            found.append(self._digits(len(found) + 1, _WORD))
        return np.array(found[::-1], dtype=np.uint64)

    def draw(self, count: int, stream: RandomStream) -> npt.NDArray[np.int64]:
        """`count` independent draws of X."""
        words = stream.integers64(count)
        position = np.searchsorted(self._tails, words, side="right")
        drawn = len(self._tails) - position
        # The largest tail that is not above the word is the one that may share its 64 digits.
        for tied in np.flatnonzero(self._tails[position - 1] == words):
            drawn[tied] = self._settle(int(words[tied]), stream)
        return drawn

    def _settle(self, uniform: int, stream: RandomStream) -> int:
        bits = _WORD
        while True:
            uniform, bits = (uniform << _WORD) | int(stream.integers64(1)[0]), bits + _WORD
            drawn = 0
            while uniform < (tail := self._digits(drawn + 1, bits)):
                drawn += 1
            if uniform > tail:
                return drawn


def _geometric_digits(value: int, bits: int) -> int:
    with localcontext() as context:
        context.prec = bits  # a decimal digit for every bit: more than three times what is asked for
        return int(Decimal(-value).exp() * (1 << bits))


def _half_normal_digits(value: int, bits: int) -> int:
    with localcontext() as context:
        context.prec = bits
        # The terms that are left out are below 10^(−3·bits).
        terms = [(Decimal(-j * j) / 2).exp() for j in range(value + 4 * int(bits**0.5) + 4)]
        return int(sum(terms[value:], Decimal(0)) / sum(terms, Decimal(0)) * (1 << bits))


# P(X ≥ k) = e^{−k}: successes at e⁻¹ before the first failure.
geometric_at_inverse_e = TailTable(_geometric_digits)

# P(X = k) ∝ e^{−k²/2}, k ≥ 0: the whole part of a half-normal before the correction for its fraction.
half_normal_integer = TailTable(_half_normal_digits)


# ----------------------------------------------------------------------------------------------------------------------
# Exact draws of integers: uniform, Bernoulli(e^−γ), geometric, discrete Laplace, discrete Gaussian.
#
# Only integers are compared and only random words are drawn, so what is below is exact: no logarithm, no rounding of
# a float. All draws are vectorized by rejection: propose many, keep the accepted ones. Which proposals are accepted is
# independent of the accepted values, hence the first `count` of them are a fair sample. The time a draw takes depends
# on secret bits; a timing observer is not covered.
#
# References:
#     Canonne, Kamath, Steinke 2020, "The discrete Gaussian for differential privacy", algorithms 1–3.
#     Forsythe 1972, von Neumann's comparison method for e^−γ.
# ----------------------------------------------------------------------------------------------------------------------


IntegerArray = npt.NDArray[np.int64]
BooleanArray = npt.NDArray[np.bool_]

# A geometric draw is below 2⁸ times its numerator except with probability e⁻²⁵⁶; int64 has room for it.
LARGEST_NUMERATOR = 1 << 54

# Proposals made at once: their words and masks stay in the processor's cache.
_BLOCK = 1 << 14


def uniform_below(bound: int, count: int, stream: RandomStream) -> IntegerArray:
    """`count` independent uniform integers of {0, …, bound − 1}; `bound` ≤ 2⁶²."""
    words = stream.integers64(count)
    if bound & (bound - 1) == 0:
        return (words & np.uint64(bound - 1)).astype(np.int64)
    # The top incomplete cycle of residues is drawn again; what remains holds each residue equally often.
    limit = np.uint64((1 << 64) - (1 << 64) % bound)
    refused = np.flatnonzero(words >= limit)
    while refused.size:
        words[refused] = stream.integers64(len(refused))
        refused = refused[words[refused] >= limit]
    return (words % np.uint64(bound)).astype(np.int64)


def bernoulli_exp(numerator: IntegerArray, denominator: int, stream: RandomStream) -> BooleanArray:
    """For each numerator independently: True with probability exp(−numerator/denominator).

    The whole part of the exponent is that many successes at e⁻¹ (algorithm 1 of the reference).
    """
    whole, rest = np.divmod(numerator, denominator)
    success = _bernoulli_exp_fraction(rest, denominator, stream)
    alive = np.flatnonzero(success & (whole > 0))
    while alive.size:
        kept = _bernoulli_exp_fraction(np.ones(len(alive), dtype=np.int64), 1, stream)
        success[alive[~kept]] = False
        whole[alive] -= 1
        alive = alive[kept]
        alive = alive[whole[alive] > 0]
    return success


def _bernoulli_exp_fraction(numerator: IntegerArray, denominator: int, stream: RandomStream) -> BooleanArray:
    """The case 0 ≤ numerator ≤ denominator."""

    def trial(index: IntegerArray) -> BooleanArray:
        return uniform_below(denominator, len(index), stream) < numerator[index]

    return _alternate(trial, len(numerator), 1, stream)


def _alternating(count: int, survives: Callable[[IntegerArray, int], BooleanArray]) -> BooleanArray:
    """Von Neumann's comparison: for each index, whether its run of successes is broken at an odd turn.

    Where turn K = 1, 2, … succeeds with probability γ/K, that has probability 1 − γ + γ²/2! − γ³/3! + … = e^−γ.

    Args:
        count: of independent runs.
        survives: (indices of the runs that go on, turn) ↦ fresh outcomes of their turn.
    """
    outcome = np.empty(count, dtype=np.bool_)
    alive = np.arange(count)
    turn = 1
    while alive.size:
        success = survives(alive, turn)
        outcome[alive[~success]] = turn % 2 == 1
        alive = alive[success]
        turn += 1
    return outcome


def _alternate(
    trial: Callable[[IntegerArray], BooleanArray], count: int, divisor: int, stream: RandomStream
) -> BooleanArray:
    """True with probability exp(−p/divisor) where `trial` draws fresh Bernoulli(p) at the given indices."""

    def survives(index: IntegerArray, turn: int) -> BooleanArray:
        success = trial(index)
        if divisor * turn > 1:
            hopeful = np.flatnonzero(success)
            success[hopeful] = uniform_below(divisor * turn, len(hopeful), stream) == 0
        return success

    return _alternating(count, survives)


def _accepted(count: int, rate: float, propose: Callable[[int], IntegerArray]) -> IntegerArray:
    """The first `count` accepted proposals; `rate` is a guess of the share accepted, for speed alone."""
    parts: list[IntegerArray] = []
    missing = count
    while missing > 0:
        part = propose(min(int(missing / rate * 1.02) + 16, _BLOCK))[:missing]
        parts.append(part)
        missing -= len(part)
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def _checked_ratio(numerator: int, denominator: int) -> None:
    checks.integer(1, scale_numerator=numerator)
    checks.integer(1, scale_denominator=denominator)
    if max(numerator, denominator) > LARGEST_NUMERATOR:
        raise InvalidArgument(
            f"scale must be a ratio of integers ≤ 2^54, got {numerator}/{denominator}. Use a coarser grid."
        )


def geometric(numerator: int, denominator: int, count: int, stream: RandomStream) -> IntegerArray:
    """`count` draws of X ≥ 0 with P(X ≥ x) = exp(−x·denominator/numerator)."""
    _checked_ratio(numerator, denominator)

    def propose(size: int) -> IntegerArray:
        remainder = uniform_below(numerator, size, stream)
        if numerator > 1:
            remainder = remainder[_bernoulli_exp_fraction(remainder, numerator, stream)]
        return remainder + numerator * geometric_at_inverse_e.draw(len(remainder), stream)

    return _accepted(count, 0.63 if numerator > 1 else 1.0, propose) // denominator


def discrete_laplace(numerator: int, denominator: int, count: int, stream: RandomStream) -> IntegerArray:
    """`count` integers with P(x) ∝ exp(−|x|·denominator/numerator) (algorithm 2 of the reference)."""

    def propose(size: int) -> IntegerArray:
        magnitude = geometric(numerator, denominator, size, stream)
        negative = _bits(size, stream)
        signed = np.where(negative, -magnitude, magnitude)
        return signed[~(negative & (magnitude == 0))]  # zero would be drawn twice as often

    return _accepted(count, 0.5 if numerator < 4 * denominator else 0.9, propose)


def _bits(count: int, stream: RandomStream) -> BooleanArray:
    packed = np.empty((count + 7) // 8, dtype=np.uint8)
    if count:
        stream.fill(packed.data)
    return np.unpackbits(packed)[:count].astype(np.bool_)


def discrete_gaussian(numerator: int, denominator: int, count: int, stream: RandomStream) -> IntegerArray:
    """`count` integers with P(x) ∝ exp(−x²/(2σ²)), σ = numerator/denominator (algorithm 3 of the reference).

    Proposals are discrete Laplace of scale σ. With d = |denominator·|x| − numerator| = numerator·q + r, a
    proposal is kept with probability exp(−d²/(2·numerator²)) = e^{−q²/2} · e^{−qr/numerator} · e^{−(r/numerator)²/2},
    three factors whose integers stay small.
    """

    def propose(size: int) -> IntegerArray:
        proposal = discrete_laplace(numerator, denominator, size, stream)
        quotient, remainder = np.divmod(np.abs(denominator * np.abs(proposal) - numerator), numerator)

        def both_below(index: IntegerArray) -> BooleanArray:
            below = uniform_below(numerator, len(index), stream) < remainder[index]
            hopeful = np.flatnonzero(below)
            below[hopeful] = uniform_below(numerator, len(hopeful), stream) < remainder[index[hopeful]]
            return below

        kept = _alternate(both_below, size, 2, stream)
        far = np.flatnonzero(kept & (quotient > 0))
        kept[far] = bernoulli_exp(quotient[far] ** 2, 2, stream)
        far = far[kept[far]]
        kept[far] = bernoulli_exp(quotient[far] * remainder[far], numerator, stream)
        return proposal[kept]

    return _accepted(count, 0.6, propose)


# ----------------------------------------------------------------------------------------------------------------------
# Exact draws of ⌊σN + ½⌋ for a standard normal N and a whole σ: Gaussian noise rounded to the grid.
#
# An integer plus rounded Gaussian noise is the same as the rounding of (integer + Gaussian noise), so a mechanism that
# adds it is post-processing of the real-valued Gaussian mechanism and has exactly its guarantee, for vectors too. (The
# discrete Gaussian, by contrast, is a distribution of its own: equal in Rényi divergence bounds, not in its ε–δ curve.)
#
# N's digits are made one word at a time, and a comparison that the words so far leave open draws the next word, so no
# float and no truncation enters.
#
# References:
#     Karney 2016, "Sampling exactly from the normal distribution", algorithm N. Forsythe 1972.
# ----------------------------------------------------------------------------------------------------------------------


LARGEST_STDDEV = 1 << 50
_ROUNDED_GAUSSIAN_WORD = 32


def rounded_gaussian(
    stddev: int, count: int, stream: RandomStream, *, word_bits: int = _ROUNDED_GAUSSIAN_WORD
) -> IntegerArray:
    """`count` independent draws of ⌊stddev·N + ½⌋.

    Args:
        stddev: a whole number of grid steps, 1 … 2⁵⁰.
        count: ≥ 0.
        stream: source of the bits; read in order.
        word_bits: digits drawn at once, 1 … 32. It doesn't change the distribution; few digits exercise rare branches.
    """
    checks.integer(1, stddev=stddev)
    checks.in_range(1, _ROUNDED_GAUSSIAN_WORD, word_bits=word_bits)
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

    def __init__(self, count: int, stream: RandomStream, word_bits: int) -> None:
        self._stream = stream
        self._bits = word_bits
        self.first = uniform_below(1 << word_bits, count, stream)
        self._more: dict[int, list[int]] = {}

    def second(self, index: IntegerArray) -> IntegerArray:
        """The second word of each of these uniforms; those that a comparison has drawn already are kept."""
        words = uniform_below(1 << self._bits, len(index), self._stream)
        if self._more:
            for position, uniform in enumerate(index.tolist()):
                if self._more.get(uniform):
                    words[position] = self._more[uniform][0]
        return words

    def digits(self, index: int, *, second: int | None = None) -> Iterator[int]:
        """All words of one uniform, without end; the first time they are asked for they are drawn and kept."""
        yield int(self.first[index])
        kept = self._more.setdefault(index, [])
        if not kept and second is not None:
            kept.append(second)
        for position in itertools.count():
            if position == len(kept):
                kept.append(self.word())
            yield kept[position]

    def word(self) -> int:
        """One fresh word."""
        return int(uniform_below(1 << self._bits, 1, self._stream)[0])

    def exceed_fresh(self, index: IntegerArray) -> BooleanArray:
        """Whether each of these uniforms is above a fresh one."""
        rivals = uniform_below(1 << self._bits, len(index), self._stream)
        own = self.first[index]
        above = rivals < own
        for tied in np.flatnonzero(rivals == own):
            later = itertools.islice(self.digits(int(index[tied])), 1, None)
            above[tied] = next(rival < word for word in later if (rival := self.word()) != word)
        return above


def _propose(stddev: int, count: int, stream: RandomStream, word_bits: int) -> IntegerArray:
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


def _exp_half_square(fraction: _LazyUniforms, stream: RandomStream) -> BooleanArray:
    """For every uniform x: True with probability e^{−x²/2}, by the alternating series in x²/(2K)."""

    def survives(index: IntegerArray, turn: int) -> BooleanArray:
        success = uniform_below(2 * turn, len(index), stream) == 0
        for _ in range(2):
            hopeful = np.flatnonzero(success)
            success[hopeful] = fraction.exceed_fresh(index[hopeful])
        return success

    return _alternating(len(fraction.first), survives)


def _exp_minus(fraction: _LazyUniforms, index: IntegerArray, stream: RandomStream) -> BooleanArray:
    """For the uniforms x at these indices: True with probability e^{−x}, by the alternating series in x/K."""
    return _alternate(lambda run: fraction.exceed_fresh(index[run]), len(index), 1, stream)


def _rounded(stddev: int, fraction: _LazyUniforms, index: IntegerArray, word_bits: int) -> IntegerArray:
    """⌊stddev·x + ½⌋ for the uniforms x at these indices.

    x lies in [w, w + 1)/2^bits after two words, so the result is known unless a half-integer falls into that interval
    times stddev; then more digits are used.
    """
    bits = 2 * word_bits
    second = fraction.second(index)
    low = (fraction.first[index].astype(np.uint64) << np.uint64(word_bits)) | second.astype(np.uint64)
    rounded, above = _round_product(stddev, low, bits, extra=0), _round_product(stddev, low, bits, extra=stddev - 1)
    # The interval is open above: its last point is just below low + stddev.
    for undecided in np.flatnonzero(above != rounded):
        words = fraction.digits(int(index[undecided]), second=int(second[undecided]))
        value, used = next(words), word_bits
        while True:
            value, used = (value << word_bits) | next(words), used + word_bits
            half = 1 << (used - 1)
            result = (stddev * value + half) >> used
            if (stddev * (value + 1) - 1 + half) >> used == result:
                break
        rounded[undecided] = result
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
