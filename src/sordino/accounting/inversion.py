"""From a bounded privacy curve ε ↦ [δ_lower, δ_upper] to a bounded ε at a given δ (floor 1)."""

import math
from collections.abc import Callable

from sordino.errors import AccountingError

__all__ = ["invert", "safe_crossing"]

_LARGEST_EPSILON = 1e15


def safe_crossing(above: Callable[[float], bool], low: float, high: float, tolerance: float) -> tuple[float, float]:
    """Bisection of a monotone predicate that holds at `low` and not at `high`: the final bracket.

    Stops at the relative `tolerance`, or when no float lies between the ends.
    """
    for _ in range(200):
        middle = (low + high) / 2
        if not low < middle < high or high - low <= tolerance * abs(high):
            break
        if above(middle):
            low = middle
        else:
            high = middle
    return low, high


def invert(
    curve: Callable[[float], tuple[float, float]], delta: float, *, tolerance: float = 2e-15
) -> tuple[float, float]:
    """Bounds on the smallest ε ≥ 0 with δ(ε) ≤ `delta`, for a curve that falls with ε.

    The upper end is a point where the *upper* bound of the curve was seen to be ≤ `delta`; the lower end is a
    point where the *lower* bound was seen to be > `delta` (or 0). No smoothness is assumed.

    Example:
        >>> import math
        >>> low, high = invert(lambda e: (math.exp(-e), math.exp(-e)), 0.5)
        >>> low <= math.log(2) <= high
        True
    """
    if curve(0.0)[1] <= delta:
        return 0.0, 0.0
    high = 1.0
    while curve(high)[1] > delta:
        high *= 2
        if high > _LARGEST_EPSILON:
            raise AccountingError(
                f"delta must be reachable by some ε ≤ {_LARGEST_EPSILON:g}, got {delta!r}. Use a larger δ."
            )
    start = 0.0 if high == 1.0 else high / 2
    below, upper = safe_crossing(lambda epsilon: curve(epsilon)[1] > delta, start, high, tolerance)
    if curve(below)[0] > delta:
        return below, upper
    # The curve's own width separates its two crossings: walk down from the upper one until the lower bound exceeds δ.
    step = max(upper - below, math.ulp(upper))
    low = below
    while low > 0 and curve(low)[0] <= delta:
        step *= 2
        low = max(0.0, low - step)
    if curve(low)[0] <= delta:
        return 0.0, upper
    lower, _ = safe_crossing(lambda epsilon: curve(epsilon)[0] > delta, low, upper, tolerance)
    return lower, upper
