"""Exact draws of a small non-negative integer from its tail probabilities, however many digits they have (floor 1).

X = #{k ≥ 1 : U < P(X ≥ k)} for a uniform U of endless binary digits. The first 64 digits are looked up in a table;
only when they equal those of some tail probability (once in 10¹⁸ draws) further digits of both are compared.

References:
    Knuth, Yao 1976, "The complexity of nonuniform random number generation" (comparison digit by digit).
"""

from collections.abc import Callable
from decimal import Decimal, localcontext
from functools import cached_property

import numpy as np
import numpy.typing as npt

from sordino.randomness import Stream

__all__ = ["TailTable", "geometric_at_inverse_e", "half_normal_integer"]

_WORD = 64


class TailTable:
    """The law of an integer X ≥ 0.

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

    def draw(self, count: int, stream: Stream) -> npt.NDArray[np.int64]:
        """`count` independent draws of X."""
        words = stream.integers64(count)
        position = np.searchsorted(self._tails, words, side="right")
        drawn = len(self._tails) - position
        # The largest tail that is not above the word is the one that may share its 64 digits.
        for tied in np.flatnonzero(self._tails[position - 1] == words):
            drawn[tied] = self._settle(int(words[tied]), stream)
        return drawn

    def _settle(self, uniform: int, stream: Stream) -> int:
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
