"""Exact draws of integers: uniform, Bernoulli(e^−γ), geometric, discrete Laplace, discrete Gaussian (floor 1).

Only integers are compared and only random words are drawn, so the laws below are exact: no logarithm, no
rounding of a float. All draws are vectorised by rejection: propose many, keep the accepted ones. Which places
are accepted is independent of the accepted values, hence the first `count` of them are a fair sample. The time a
draw takes depends on secret bits; a timing observer is not covered.

References:
    Canonne, Kamath, Steinke 2020, "The discrete Gaussian for differential privacy", algorithms 1–3.
    Forsythe 1972, von Neumann's comparison method for e^−γ.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from sordino import checks
from sordino.errors import InvalidArgument
from sordino.mechanisms.tail_table import geometric_at_inverse_e
from sordino.randomness import Stream

__all__ = ["bernoulli_exp", "discrete_gaussian", "discrete_laplace", "geometric", "uniform_below"]

IntegerArray = npt.NDArray[np.int64]
BooleanArray = npt.NDArray[np.bool_]

# A geometric draw is below 2⁸ times its numerator except with probability e⁻²⁵⁶; int64 has room for it.
LARGEST_NUMERATOR = 1 << 54

# Proposals made at once: their words and masks stay in the processor's cache.
_BLOCK = 1 << 14


def uniform_below(bound: int, count: int, stream: Stream) -> IntegerArray:
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


def bernoulli_exp(numerator: IntegerArray, denominator: int, stream: Stream) -> BooleanArray:
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


def _bernoulli_exp_fraction(numerator: IntegerArray, denominator: int, stream: Stream) -> BooleanArray:
    """The case 0 ≤ numerator ≤ denominator."""

    def trial(index: IntegerArray) -> BooleanArray:
        return uniform_below(denominator, len(index), stream) < numerator[index]

    return _alternate(trial, len(numerator), 1, stream)


def _alternate(trial: Callable[[IntegerArray], BooleanArray], count: int, divisor: int, stream: Stream) -> BooleanArray:
    """True with probability exp(−p/divisor) where `trial` draws fresh Bernoulli(p) at the given places.

    The run of successes of Bernoulli(p/(divisor·K)), K = 1, 2, …, is broken at an odd K with probability
    1 − γ + γ²/2! − γ³/3! + … = e^−γ, γ = p/divisor.
    """
    outcome = np.empty(count, dtype=np.bool_)
    alive = np.arange(count)
    turn = 1
    while alive.size:
        success = trial(alive)
        if divisor * turn > 1:
            hopeful = np.flatnonzero(success)
            success[hopeful] = uniform_below(divisor * turn, len(hopeful), stream) == 0
        outcome[alive[~success]] = turn % 2 == 1
        alive = alive[success]
        turn += 1
    return outcome


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


def geometric(numerator: int, denominator: int, count: int, stream: Stream) -> IntegerArray:
    """`count` draws of X ≥ 0 with P(X ≥ x) = exp(−x·denominator/numerator)."""
    _checked_ratio(numerator, denominator)

    def propose(size: int) -> IntegerArray:
        remainder = uniform_below(numerator, size, stream)
        if numerator > 1:
            remainder = remainder[_bernoulli_exp_fraction(remainder, numerator, stream)]
        return remainder + numerator * geometric_at_inverse_e.draw(len(remainder), stream)

    return _accepted(count, 0.63 if numerator > 1 else 1.0, propose) // denominator


def discrete_laplace(numerator: int, denominator: int, count: int, stream: Stream) -> IntegerArray:
    """`count` integers with P(x) ∝ exp(−|x|·denominator/numerator) (algorithm 2 of the reference)."""

    def propose(size: int) -> IntegerArray:
        magnitude = geometric(numerator, denominator, size, stream)
        negative = _bits(size, stream)
        signed = np.where(negative, -magnitude, magnitude)
        return signed[~(negative & (magnitude == 0))]  # zero would be drawn twice as often

    return _accepted(count, 0.5 if numerator < 4 * denominator else 0.9, propose)


def _bits(count: int, stream: Stream) -> BooleanArray:
    packed = np.empty((count + 7) // 8, dtype=np.uint8)
    if count:
        stream.fill(packed.data)
    return np.unpackbits(packed)[:count].astype(np.bool_)


def discrete_gaussian(numerator: int, denominator: int, count: int, stream: Stream) -> IntegerArray:
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
