"""One step of a Poisson-subsampled Gaussian in closed form (floor 1).

With D the Gaussian mechanism's curve at μ (Balle, Barthe and Gaboardi 2018, theorem 8; Zhu, Dong and Wang 2022),

    remove   δ(ε) = q · D(log(1 + (e^ε − 1)/q))
    add      δ(ε) = A · D(log(q e^ε / A)),   A = 1 − (1−q) e^ε,   and 0 when A ≤ 0.
"""

import math

from sordino.accounting.gaussian import gaussian_delta
from sordino.accounting.inversion import invert

__all__ = ["add_direction_delta", "remove_direction_delta", "sampled_gaussian_delta", "sampled_gaussian_epsilon"]

_UNIT = 2.0**-53


def _amplified(epsilon: float, sample_rate: float) -> float:
    """log(1 + (e^ε − 1)/q) without overflow."""
    if epsilon > 30:
        return epsilon - math.log(sample_rate) + math.log1p(-(1 - sample_rate) * math.exp(-epsilon))
    return math.log1p(math.expm1(epsilon) / sample_rate)


def _bracketed(exponent: float, mu: float, error: float) -> tuple[float, float]:
    """D over all exponents within `error` of the one computed."""
    return gaussian_delta(exponent + error, mu)[0], gaussian_delta(exponent - error, mu)[1]


def remove_direction_delta(epsilon: float, sample_rate: float, mu: float) -> tuple[float, float]:
    """Bounds on δ(ε) when the record is in P's data set, for ε ≥ 0."""
    inner = _amplified(epsilon, sample_rate)
    low, high = _bracketed(inner, mu, 8 * _UNIT * (1 + abs(inner) + epsilon))
    return sample_rate * low * (1 - 4 * _UNIT), sample_rate * high * (1 + 4 * _UNIT)


def add_direction_delta(epsilon: float, sample_rate: float, mu: float) -> tuple[float, float]:
    """Bounds on δ(ε) when the record is in Q's data set, for ε ≥ 0."""
    # A = q − (1−q)(e^ε − 1) keeps its accuracy for small ε.
    grown = (1 - sample_rate) * math.expm1(min(epsilon, 700.0))
    share = sample_rate - grown
    slack = 4 * _UNIT * (sample_rate + grown)
    if share + slack <= 0:
        return 0.0, 0.0
    # A·D(log(q e^ε/A)) = ∫ (A φ₀ − q e^ε φ₁)₊ grows with A, so A's rounding error is an interval of A.
    high_share = share + slack
    high = high_share * _curve(epsilon, sample_rate, high_share, mu)[1]
    low_share = share - slack
    low = low_share * _curve(epsilon, sample_rate, low_share, mu)[0] if low_share > 0 else 0.0
    return low * (1 - 4 * _UNIT), high * (1 + 4 * _UNIT)


def _curve(epsilon: float, sample_rate: float, share: float, mu: float) -> tuple[float, float]:
    exponent = epsilon + math.log(sample_rate / share)
    return _bracketed(exponent, mu, 8 * _UNIT * (1 + abs(exponent) + epsilon))


def sampled_gaussian_delta(epsilon: float, sample_rate: float, mu: float) -> tuple[float, float]:
    """Bounds on δ(ε), worse direction."""
    removed = remove_direction_delta(epsilon, sample_rate, mu)
    added = add_direction_delta(epsilon, sample_rate, mu)
    return max(removed[0], added[0]), max(removed[1], added[1])


def sampled_gaussian_epsilon(delta: float, sample_rate: float, mu: float) -> tuple[float, float]:
    """Bounds on ε at δ, worse direction.

    Example:
        >>> lower, upper = sampled_gaussian_epsilon(1e-5, 0.01, 1.0)
        >>> lower <= 0.19945044779591473 <= upper and upper - lower < 1e-12
        True
    """
    if delta == 0:
        return math.inf, math.inf
    return invert(lambda epsilon: sampled_gaussian_delta(epsilon, sample_rate, mu), delta)
