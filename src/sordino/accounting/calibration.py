"""From a target to a parameter, always on the safe side."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from sordino import checks
from sordino.accounting.api import delta as delta_of
from sordino.accounting.api import epsilon as epsilon_of
from sordino.definitions import NeighboringRelation
from sordino.errors import AccountingError, UnsupportedEvent
from sordino.events import (
    Composed,
    DiscreteGaussian,
    DiscreteLaplace,
    Event,
    Gaussian,
    GaussianMixture,
    GroupPoissonSampled,
    Laplace,
    MatrixGaussian,
    NonPrivate,
    NoOp,
    ParallelComposed,
    PoissonSampled,
    PureDP,
    RandomAllocation,
    SampledWithoutReplacement,
    SampledWithReplacement,
    SelfComposed,
    TruncatedPoissonSampled,
    ZeroConcentratedDP,
)

_SMALLEST_NOISE, _LARGEST_NOISE = 1e-3, 1e7
_DIGITS = 6
_Value = TypeVar("_Value", int, float)


def calibrate_noise_multiplier(
    make_event: Callable[[float], Event],
    *,
    target_epsilon: float,
    delta: float,
    neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE,
    accountant: str = "auto",
) -> float:
    """The smallest noise multiplier whose reported ε is at most `target_epsilon`, to 6 significant digits.

    Guarantee:
        ε of the event with the value returned was computed and is ≤ `target_epsilon`; nothing is extrapolated.

    Args:
        make_event: noise multiplier ↦ event, such that more noise means less ε.
        target_epsilon: > 0.
        delta: in (0, 1).
        neighboring_relation: the neighboring relation.
        accountant: a name, or ``auto``.

    Returns:
        A multiplier rounded up in its sixth digit. When noise 0.001 is already enough, 0.001.

    Raises:
        AccountingError: even noise 1e7 does not reach the target.

    Example:
        >>> from sordino.events import Gaussian
        >>> calibrate_noise_multiplier(lambda z: Gaussian(noise_multiplier=z), target_epsilon=1.0, delta=1e-5)
        3.73064
    """
    target_epsilon = checks.positive(target_epsilon=target_epsilon)
    delta = checks.probability(delta=delta, zero=False, one=False)

    def reported(noise_multiplier: float) -> float:
        # Too little noise for the accountant to answer is too little noise.
        return _reported(make_event(noise_multiplier), delta, neighboring_relation, accountant)

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


# ----------------------------------------------------------------------------------------------------------------------
# Questions about a plan: steps, sample rates and batch sizes for a target; groups; no amplification.
# ----------------------------------------------------------------------------------------------------------------------


_ADD = NeighboringRelation.ADD_OR_REMOVE_ONE
_LARGEST_STEPS = 10**9


def _reported(event: Event, delta: float, neighboring_relation: NeighboringRelation, accountant: str) -> float:
    """The event's ε; ∞ where no accountant can bound its own error."""
    try:
        return epsilon_of(event, delta, neighboring_relation=neighboring_relation, accountant=accountant).upper
    except AccountingError:
        return math.inf


def _fits(
    make_event: Callable[[_Value], Event],
    target_epsilon: float,
    delta: float,
    neighboring_relation: NeighboringRelation,
    accountant: str,
) -> Callable[[_Value], bool]:
    """Whether the event of a value is within the target."""
    checks.positive(target_epsilon=target_epsilon)
    checks.probability(delta=delta, zero=False, one=False)
    return lambda value: _reported(make_event(value), delta, neighboring_relation, accountant) <= target_epsilon


def calibrate_steps(
    make_event: Callable[[int], Event],
    *,
    target_epsilon: float,
    delta: float,
    neighboring_relation: NeighboringRelation = _ADD,
    accountant: str = "auto",
) -> int:
    """The largest number of steps whose reported ε is at most `target_epsilon`, 0 when one is too many.

    Guarantee:
        ε of the event with the value returned was computed and is ≤ `target_epsilon`.

    Raises:
        AccountingError: a thousand million steps still fit, so the number is not what limits.

    Example:
        >>> calibrate_steps(
        ...     lambda t: SelfComposed(event=Gaussian(noise_multiplier=100.0), count=t),
        ...     target_epsilon=1.0, delta=1e-5)
        718
    """
    fits = _fits(make_event, target_epsilon, delta, neighboring_relation, accountant)
    return _max_integer(fits, _LARGEST_STEPS, "steps")


def calibrate_batch_size(
    make_event: Callable[[int], Event],
    *,
    dataset_size: int,
    target_epsilon: float,
    delta: float,
    neighboring_relation: NeighboringRelation = _ADD,
    accountant: str = "auto",
) -> int:
    """The largest (expected) batch size up to `dataset_size` within the target, 0 when one record is too many."""
    checks.integer(1, dataset_size=dataset_size)
    fits = _fits(make_event, target_epsilon, delta, neighboring_relation, accountant)
    if fits(dataset_size):
        return dataset_size
    return _max_integer(lambda size: size <= dataset_size and fits(size), dataset_size, "batch size")


def _max_integer(fits: Callable[[int], bool], limit: int, name: str) -> int:
    # Wide strides first: a handful of steps is the hardest case for the tight accountants, and rarely the answer.
    if not fits(1):
        return 0
    low, high = 1, 256
    while fits(high):
        low, high = high, high * 64
        if low >= limit:
            raise AccountingError(f"{name} must be limited by the target, got {low} within it. Lower target_epsilon.")
    while high - low > 1:
        middle = max(low + 1, min(high - 1, math.isqrt(low * high)))
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def calibrate_sample_rate(
    make_event: Callable[[float], Event],
    *,
    target_epsilon: float,
    delta: float,
    neighboring_relation: NeighboringRelation = _ADD,
    accountant: str = "auto",
) -> float:
    """The largest sample rate in (0, 1] within the target, rounded down to 6 digits and verified.

    Raises:
        AccountingError: not even a rate of 1e-9 fits.
    """
    fits = _fits(make_event, target_epsilon, delta, neighboring_relation, accountant)
    if fits(1.0):
        return 1.0
    # From above: tiny rates with few steps are the hardest to account and rarely the answer.
    low, high = 0.25, 1.0
    while not fits(low):
        low, high = low / 4, low
        if low < 1e-9:
            raise AccountingError("target_epsilon must be reachable by sampling, got one that isn't. Add noise.")
    while high / low > 1 + 2e-7:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if fits(middle) else (low, middle)
    unit = 10.0 ** (math.floor(math.log10(low)) - 5)
    for back in range(50):
        rate = float(f"{(math.floor(low / unit) - back) * unit:.6g}")
        if rate > 0 and fits(rate):
            return rate
    raise AccountingError("ε must grow with the sample rate, got an event where it doesn't. Check make_event.")


def calibrate_delta(
    event: Event, *, target_epsilon: float, neighboring_relation: NeighboringRelation = _ADD, accountant: str = "auto"
) -> float:
    """The smallest δ that can be stated with `target_epsilon`: the upper end of δ(ε)."""
    return delta_of(event, target_epsilon, neighboring_relation=neighboring_relation, accountant=accountant).upper


def marginal_epsilon(
    event: Event, additional: Event, delta: float, *, neighboring_relation: NeighboringRelation = _ADD
) -> float:
    """How much the reported ε grows when `additional` (one more epoch, say) follows `event`; ≥ 0."""
    before = epsilon_of(event, delta, neighboring_relation=neighboring_relation).upper
    after = epsilon_of(Composed(events=(event, additional)), delta, neighboring_relation=neighboring_relation).upper
    return math.inf if math.isinf(after) else max(0.0, after - before)


# ── other versions of an event ──────────────────────────────────────────────────────────────────────────────


def without_amplification(event: Event) -> Event:
    """The event as if every record took part in every step: what is left when the sampler can't be trusted.

    Example:
        >>> without_amplification(PoissonSampled(sample_rate=0.01, event=Gaussian(noise_multiplier=1.0)))
        Gaussian(noise_multiplier=1.0)
    """
    match event:
        case (
            PoissonSampled()
            | SampledWithoutReplacement()
            | SampledWithReplacement()
            | GroupPoissonSampled()
            | TruncatedPoissonSampled()
        ):
            return without_amplification(event.event)
        case RandomAllocation():
            count = event.steps * event.epochs
            return SelfComposed(event=without_amplification(event.event), count=count)
        case GaussianMixture():
            reached = [m for m, p in zip(event.sensitivities, event.probabilities, strict=True) if p > 0]
            farthest = max(reached, default=0.0)
            return Gaussian(noise_multiplier=event.noise_multiplier / farthest) if farthest > 0 else NoOp()
        case ParallelComposed() | Composed():
            return replace(event, events=tuple(without_amplification(part) for part in event.events))
        case SelfComposed():
            return replace(event, event=without_amplification(event.event))
        case _:
            return event


def group_privacy_event(event: Event, size: int) -> Event:
    """The event as a group of `size` records experiences it: the unit becomes the group.

    Noise mechanisms have `size` times the sensitivity; each record joins a Poisson sample on its own.

    Raises:
        UnsupportedEvent: no rule is known for a part of the event.

    Example:
        >>> group_privacy_event(Gaussian(noise_multiplier=6.0), 3)
        Gaussian(noise_multiplier=2.0)
    """
    size = checks.integer(1, size=size)
    match event:
        case NoOp() | NonPrivate():
            return event
        case Gaussian() | Laplace():
            return replace(event, noise_multiplier=event.noise_multiplier / size)
        case MatrixGaussian() | DiscreteGaussian() | DiscreteLaplace():
            return replace(event, sensitivity=event.sensitivity * size)
        case PureDP():
            return PureDP(epsilon=event.epsilon * size)
        case ZeroConcentratedDP():
            return ZeroConcentratedDP(rho=event.rho * size**2)
        case PoissonSampled() if isinstance(event.event, Gaussian):
            return GroupPoissonSampled(sample_rate=event.sample_rate, group_size=size, event=event.event)
        case SelfComposed():
            return replace(event, event=group_privacy_event(event.event, size))
        case Composed():
            return replace(event, events=tuple(group_privacy_event(part, size) for part in event.events))
        case _:
            raise UnsupportedEvent(f"event must have a rule for groups, got {event.kind}. Account for users as units.")
