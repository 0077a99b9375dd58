"""Numbers that are never rounded to the wrong side: ε upwards."""

import math

from sordino.definitions import format_upper_bound

__all__ = ["rounded"]

_SMALL, _LONGEST = 0.01, 300


def rounded(epsilon: float, digits: int = 5, *, most: float = math.inf) -> float | str:
    """ε with few digits, never below itself: five decimals, or as many more as it takes for five that are not 0.

    Args:
        epsilon: ≥ 0.
        digits: decimals of a number that is not small.
        most: what it is known to be at most; rounding does not take it above.
    """
    if math.isinf(epsilon):
        return "inf"
    if 0 < epsilon < _SMALL:
        digits += -2 - math.floor(math.log10(epsilon))
    found = float(format_upper_bound(epsilon, digits))
    while found > most >= epsilon and digits < _LONGEST:
        digits += 1
        found = float(format_upper_bound(epsilon, digits))
    return min(found, most) if epsilon <= most else found
