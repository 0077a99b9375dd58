"""Moments of one use in one of t steps (floor 1): what Rényi accounting knows of random allocation, at any δ.

With V = (W_1 + … + W_t)/t as in `allocation`, W_i = e^{m x_i − m²/2} iid under Q:

    removing   e^{K(n−1)} = E_Q[Vⁿ] = n!/tⁿ · [xⁿ] (Σ_j e^{m²j(j−1)/2} xʲ/j!)^t   for whole n; K is convex, so the chord
               between whole orders bounds it from above;
    adding     e^{K(λ)} = E_Q[V^{−λ}] ≤ Π_i E[W_i^{−λ/t}] = e^{m²λ(1+λ/t)/2}, as a mean is at least the geometric mean.

Both are at most the Gaussian's own m²λ(λ+1)/2, without amplification, because δ is convex in the pair.
"""

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np

from sordino.accounting.mixtures import FloatArray

__all__ = ["adding_moment", "removing_moment"]

_ORDERS = 160


def _product(left: FloatArray, right: FloatArray) -> FloatArray:
    """Logs of the coefficients of the product of two series with positive coefficients."""
    terms = np.full((left.size, left.size), -np.inf)
    for order in range(left.size):
        terms[order, : order + 1] = left[: order + 1] + right[order::-1]
    peak = terms.max(axis=1)
    return peak + np.log(np.exp(terms - peak[:, None]).sum(axis=1))


@lru_cache(maxsize=64)
def _log_moments(steps: int, shift: float) -> tuple[float, ...]:
    """Upper bounds on log E[Vⁿ] for n = 1, …, by repeated squaring; all terms are positive, so that nothing cancels."""
    orders = np.arange(_ORDERS + 1, dtype=np.float64)
    log_factorial = np.array([math.lgamma(order + 1) for order in range(_ORDERS + 1)])
    power = shift * shift * orders * (orders - 1) / 2 - log_factorial
    total = np.where(orders == 0, 0.0, -np.inf)
    rest = steps
    while rest:
        if rest & 1:
            total = _product(total, power)
        rest >>= 1
        if rest:
            power = _product(power, power)
    values = total + log_factorial - orders * math.log(steps)
    # Each logarithm errs by a few units of the largest one; some forty sums and products follow each other.
    slack = 2e-14 * (1 + np.abs(total) + log_factorial + orders * math.log(max(2, steps)))
    return tuple(np.maximum(values + slack, 0.0)[1:].tolist())


def removing_moment(steps: int, shift: float) -> Callable[[float], float]:
    """λ ↦ an upper bound on K(λ) when the record is in P's data set.

    Example:
        >>> import math
        >>> at_one = removing_moment(100, 1.0)(1.0)
        >>> round(at_one - math.log(1 + (math.e - 1) / 100), 9)
        0.0
    """
    known = _log_moments(steps, shift)

    def bound(lam: float) -> float:
        bare = shift * shift * lam * (lam + 1) / 2
        low = math.floor(lam)
        if low + 2 > len(known):
            return bare
        left = known[low] if low else 0.0
        return min(bare, left + (lam - low) * (known[low + 1] - left))

    return bound


def adding_moment(steps: int, shift: float) -> Callable[[float], float]:
    """λ ↦ an upper bound on K(λ) when the record is in Q's data set."""
    return lambda lam: shift * shift * lam * min(lam + 1, 1 + lam / steps) / 2
