"""The Gaussian mechanism in closed form (floor 1), accurate in the far tail and for tiny losses.

With μ = sensitivity / standard deviation, a = ε/μ − μ/2 and b = ε/μ + μ/2 (Balle and Wang 2018, theorem 8),

    δ(ε) = Φ(−a) − e^ε Φ(−b) = φ(a) (m(a) − m(b)),        m(t) = Φ(−t)/φ(t), the Mills ratio,

because e^ε φ(b) = φ(a). The second form has no overflow and keeps its relative accuracy at δ = 1e-300; the
difference of Mills ratios cancels only when μ is tiny, where −m′ is convex and Hermite–Hadamard brackets it.
"""

import math

__all__ = ["gaussian_delta", "gaussian_epsilon"]

_UNIT = 2.0**-53
# erfcx and erfc are accurate to a few ulp; the factor leaves an order of magnitude.
_SPECIAL_ERROR = 32 * _UNIT
_TINY_MU = 1e-4
# Beyond it ε is above 5e11, and what is left of double precision says nothing about δ.
_HUGE_MU = 1e6


def _normal_cdf(t: float) -> float:
    return math.erfc(-t / math.sqrt(2)) / 2


def _mills(t: float) -> float:
    from scipy.special import erfcx  # here, because importing scipy.special costs a fifth of a second

    return math.sqrt(math.pi / 2) * float(erfcx(t / math.sqrt(2)))


def _minus_mills_slope(t: float) -> tuple[float, float]:
    """Bounds on −m′(t) = 1 − t·m(t), which is positive, decreasing and convex."""
    value = 1 - t * _mills(t)
    error = _SPECIAL_ERROR * (1 + abs(t * _mills(t)))
    return max(0.0, value - error), value + error


def _mills_difference(a: float, mu: float) -> tuple[float, float]:
    if mu < _TINY_MU:
        middle, _ = _minus_mills_slope(a + mu / 2)
        ends = (_minus_mills_slope(a)[1] + _minus_mills_slope(a + mu)[1]) / 2
        return mu * middle, mu * ends
    value = _mills(a) - _mills(a + mu)
    error = _SPECIAL_ERROR * (1 + abs(a)) * _mills(a)
    return max(0.0, value - error), value + error


def gaussian_delta(epsilon: float, mu: float) -> tuple[float, float]:
    """Bounds on δ(ε) of a μ-GDP (Gaussian) mechanism, for any real ε.

    Example:
        >>> lower, upper = gaussian_delta(1.0, 1 / 3.730631634815942)
        >>> lower <= 1e-5 <= upper
        True
    """
    if mu == 0:
        exact = max(0.0, -math.expm1(epsilon))
        return exact, exact
    a, b = epsilon / mu - mu / 2, epsilon / mu + mu / 2
    # Rounding of a enters φ(a) as a·Δa and of b − a = μ not at all, because the difference is taken at a + μ.
    relative = _SPECIAL_ERROR * (2 + abs(a) * (abs(epsilon / mu) + mu))
    if a < -1:
        first, second = _normal_cdf(-a), math.exp(-a * a / 2) / math.sqrt(2 * math.pi) * _mills(b)
        if b < 0:
            first, second = _normal_cdf(-a), math.exp(epsilon) * _normal_cdf(-b)
        # Rounding of a moves Φ(−a) by no more than the density there.
        moved = _SPECIAL_ERROR * (abs(epsilon / mu) + mu)
        nearest = math.exp(-(max(0.0, abs(a) - moved) ** 2) / 2)
        error = _SPECIAL_ERROR * 2 * first + moved * nearest + relative * second
        lower, upper = first - second - error, first - second + error
    else:
        density = math.exp(-a * a / 2) / math.sqrt(2 * math.pi)
        low, high = _mills_difference(a, mu)
        lower, upper = density * low * (1 - relative), density * high * (1 + relative) + 5e-324
    return min(1.0, max(0.0, lower)), min(1.0, max(0.0, upper))


def gaussian_epsilon(delta: float, mu: float) -> tuple[float, float]:
    """Bounds on the ε ≥ 0 at which a μ-GDP mechanism has the given δ.

    Example:
        >>> lower, upper = gaussian_epsilon(1e-5, 1.0)
        >>> lower <= 4.377178095681225 <= upper and upper - lower < 1e-11
        True
    """
    from sordino.accounting.inversion import invert

    if mu == 0:
        return 0.0, 0.0
    if delta == 0:
        return math.inf, math.inf
    if mu > _HUGE_MU:
        # δ(μ²/2 − μ) > Φ(1) − φ(1) > 1/2, and Chernoff's bound; between them lies less than a millionth of ε.
        upper = mu * (mu / 2 + math.sqrt(2 * math.log(1 / delta))) * (1 + 16 * _UNIT)
        return (mu * (mu / 2 - 1) * (1 - 16 * _UNIT) if delta <= 0.5 else 0.0), upper
    return invert(lambda epsilon: gaussian_delta(epsilon, mu), delta)
