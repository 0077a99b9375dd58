"""From a target to a parameter, always on the safe side (floor 1)."""

import math
from collections.abc import Callable

from sordino import checks
from sordino.accounting.front import epsilon
from sordino.definitions import NeighboringRelation
from sordino.errors import AccountingError
from sordino.events import Event

__all__ = ["calibrate_noise_multiplier"]

_SMALLEST_NOISE, _LARGEST_NOISE = 1e-3, 1e7
_DIGITS = 6


def calibrate_noise_multiplier(
    make_event: Callable[[float], Event],
    *,
    target_epsilon: float,
    target_delta: float,
    relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE,
    accountant: str = "auto",
) -> float:
    """The smallest noise multiplier whose reported ε is at most `target_epsilon`, to 6 significant digits.

    Guarantee:
        ε of the event with the value returned was computed and is ≤ `target_epsilon`; nothing is extrapolated.

    Args:
        make_event: noise multiplier ↦ event, such that more noise means less ε.
        target_epsilon: > 0.
        target_delta: in (0, 1).
        relation: the neighbouring relation.
        accountant: a name, or ``auto``.

    Returns:
        A multiplier rounded up in its sixth digit. When noise 0.001 is already enough, 0.001.

    Raises:
        AccountingError: even noise 1e7 does not reach the target.

    Example:
        >>> from sordino.events import Gaussian
        >>> calibrate_noise_multiplier(lambda z: Gaussian(noise_multiplier=z), target_epsilon=1.0, target_delta=1e-5)
        3.73064
    """
    target_epsilon = checks.positive(target_epsilon=target_epsilon)
    target_delta = checks.probability(target_delta=target_delta, zero=False, one=False)

    def reported(noise_multiplier: float) -> float:
        try:
            return epsilon(make_event(noise_multiplier), target_delta, relation=relation, accountant=accountant).upper
        except AccountingError:
            # Too little noise for the accountant to answer is too little noise.
            return math.inf

    low, high = _bracket(reported, target_epsilon)
    if low == high:
        return high
    low, high = _narrow(reported, target_epsilon, low, high)
    return _rounded(reported, target_epsilon, high)


def _bracket(reported: Callable[[float], float], target: float) -> tuple[float, float]:
    """Multipliers with ε above and at most the target."""
    if reported(1.0) <= target:
        high, low = 1.0, 0.5
        while reported(low) <= target:
            high, low = low, low / 2
            if low < _SMALLEST_NOISE:
                return _SMALLEST_NOISE, _SMALLEST_NOISE if reported(_SMALLEST_NOISE) <= target else high
        return low, high
    low, high = 1.0, 2.0
    while reported(high) > target:
        low, high = high, high * 2
        if high > _LARGEST_NOISE:
            raise AccountingError(
                f"target_epsilon must be reachable with a noise multiplier ≤ {_LARGEST_NOISE:g}, got {target!r}. "
                "Use fewer steps or a smaller sample rate."
            )
    return low, high


def _narrow(reported: Callable[[float], float], target: float, low: float, high: float) -> tuple[float, float]:
    """Illinois false position on log ε against log noise, which is nearly a line; bisection when it stalls."""
    goal = math.log(target)
    at_low, at_high = (math.log(max(reported(x), 1e-300)) - goal for x in (low, high))
    for _ in range(60):
        if high / low < 1 + 2e-8:
            break
        x, y = math.log(low), math.log(high)
        finite = math.isfinite(at_low) and at_low - at_high > 1e-12
        middle = x + (y - x) * at_low / (at_low - at_high) if finite else (x + y) / 2
        middle = min(max(middle, x + 1e-3 * (y - x)), y - 1e-3 * (y - x))
        value = math.log(max(reported(math.exp(middle)), 1e-300)) - goal
        if value > 0:
            low, at_low, at_high = math.exp(middle), value, at_high / 2
        else:
            high, at_high, at_low = math.exp(middle), value, at_low / 2
    return low, high


def _rounded(reported: Callable[[float], float], target: float, value: float) -> float:
    """`value` rounded up to `_DIGITS` significant digits and verified there."""
    unit = 10.0 ** (math.floor(math.log10(value)) + 1 - _DIGITS)
    ticks = math.ceil(value / unit - 1e-6)
    for extra in range(100):
        candidate = float(f"{(ticks + extra) * unit:.{_DIGITS}g}")
        if reported(candidate) <= target:
            return candidate
    raise AccountingError("ε must fall with the noise multiplier, got an event where it doesn't. Check make_event.")
