"""Questions about a plan (floor 1): steps, sample rates and batch sizes for a target; groups; no amplification."""

import math
from collections.abc import Callable

from sordino import checks
from sordino.accounting.front import delta as delta_of
from sordino.accounting.front import epsilon as epsilon_of
from sordino.definitions import NeighboringRelation
from sordino.errors import AccountingError, UnsupportedEvent
from sordino.events import (
    Composed,
    DiscreteGaussian,
    DiscreteLaplace,
    Event,
    FixedSizeSampled,
    Gaussian,
    GaussianMixture,
    GroupPoissonSampled,
    Laplace,
    MatrixGaussian,
    NoPrivacy,
    Nothing,
    Parallel,
    PoissonSampled,
    PureDP,
    RandomAllocation,
    ReplacementSampled,
    SelfComposed,
    TruncatedPoissonSampled,
    ZeroConcentratedDP,
)

__all__ = [
    "calibrate_batch_size",
    "calibrate_delta",
    "calibrate_sample_rate",
    "calibrate_steps",
    "for_group",
    "marginal_epsilon",
    "without_amplification",
]

_ADD = NeighboringRelation.ADD_OR_REMOVE_ONE
_LARGEST_STEPS = 10**9


def _within(event: Event, epsilon: float, delta: float, relation: NeighboringRelation, accountant: str) -> bool:
    try:
        return epsilon_of(event, delta, relation=relation, accountant=accountant).upper <= epsilon
    except AccountingError:
        return False


def calibrate_steps(
    make_event: Callable[[int], Event],
    *,
    target_epsilon: float,
    target_delta: float,
    relation: NeighboringRelation = _ADD,
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
        ...     target_epsilon=1.0, target_delta=1e-5)
        718
    """
    checks.positive(target_epsilon=target_epsilon)
    checks.probability(target_delta=target_delta, zero=False, one=False)

    def fits(steps: int) -> bool:
        return _within(make_event(steps), target_epsilon, target_delta, relation, accountant)

    return _largest_integer(fits, _LARGEST_STEPS, "steps")


def calibrate_batch_size(
    make_event: Callable[[int], Event],
    *,
    population: int,
    target_epsilon: float,
    target_delta: float,
    relation: NeighboringRelation = _ADD,
    accountant: str = "auto",
) -> int:
    """The largest (expected) batch size up to `population` within the target, 0 when one record is too many."""
    checks.integer(1, population=population)

    def fits(size: int) -> bool:
        return size <= population and _within(make_event(size), target_epsilon, target_delta, relation, accountant)

    return population if fits(population) else _largest_integer(fits, population, "batch size")


def _largest_integer(fits: Callable[[int], bool], limit: int, name: str) -> int:
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
    target_delta: float,
    relation: NeighboringRelation = _ADD,
    accountant: str = "auto",
) -> float:
    """The largest sample rate in (0, 1] within the target, rounded down to 6 digits and verified.

    Raises:
        AccountingError: not even a rate of 1e-9 fits.
    """
    checks.positive(target_epsilon=target_epsilon)
    checks.probability(target_delta=target_delta, zero=False, one=False)

    def fits(rate: float) -> bool:
        return _within(make_event(rate), target_epsilon, target_delta, relation, accountant)

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
    event: Event, *, target_epsilon: float, relation: NeighboringRelation = _ADD, accountant: str = "auto"
) -> float:
    """The smallest δ that can be stated with `target_epsilon`: the upper end of δ(ε)."""
    return delta_of(event, target_epsilon, relation=relation, accountant=accountant).upper


def marginal_epsilon(event: Event, more: Event, delta: float, *, relation: NeighboringRelation = _ADD) -> float:
    """How much the reported ε grows when `more` (one more epoch, say) follows `event`; ≥ 0."""
    before = epsilon_of(event, delta, relation=relation).upper
    after = epsilon_of(Composed(events=(event, more)), delta, relation=relation).upper
    return math.inf if math.isinf(after) else max(0.0, after - before)


# ── other versions of an event ──────────────────────────────────────────────────────────────────────────────


def without_amplification(event: Event) -> Event:
    """The event as if every record took part in every step: what is left when the sampler can't be trusted.

    Example:
        >>> without_amplification(PoissonSampled(sample_rate=0.01, event=Gaussian(noise_multiplier=1.0)))
        Gaussian(noise_multiplier=1.0)
    """
    match event:
        case PoissonSampled() | FixedSizeSampled() | ReplacementSampled() | GroupPoissonSampled():
            return without_amplification(event.event)
        case RandomAllocation():
            count = event.steps * event.epochs
            return SelfComposed(event=without_amplification(event.event), count=count)
        case GaussianMixture():
            reached = [m for m, p in zip(event.sensitivities, event.probabilities, strict=True) if p > 0]
            farthest = max(reached, default=0.0)
            return Gaussian(noise_multiplier=event.noise_multiplier / farthest) if farthest > 0 else Nothing()
        case TruncatedPoissonSampled():
            return without_amplification(event.event)
        case Parallel():
            return Parallel(events=tuple(without_amplification(part) for part in event.events))
        case SelfComposed():
            return SelfComposed(event=without_amplification(event.event), count=event.count)
        case Composed():
            return Composed(events=tuple(without_amplification(part) for part in event.events))
        case _:
            return event


def for_group(event: Event, size: int) -> Event:
    """The event as a group of `size` records experiences it: the unit becomes the group.

    Noise mechanisms have `size` times the sensitivity; each record joins a Poisson sample on its own.

    Raises:
        UnsupportedEvent: no rule is known for a part of the event.

    Example:
        >>> for_group(Gaussian(noise_multiplier=6.0), 3)
        Gaussian(noise_multiplier=2.0)
    """
    size = checks.integer(1, size=size)
    match event:
        case Nothing() | NoPrivacy():
            return event
        case Gaussian() | Laplace():
            return type(event)(noise_multiplier=event.noise_multiplier / size)
        case MatrixGaussian():
            return MatrixGaussian(noise_multiplier=event.noise_multiplier, sensitivity=event.sensitivity * size)
        case DiscreteGaussian():
            return DiscreteGaussian(stddev=event.stddev, sensitivity=event.sensitivity * size)
        case DiscreteLaplace():
            return DiscreteLaplace(scale=event.scale, sensitivity=event.sensitivity * size)
        case PureDP():
            return PureDP(epsilon=event.epsilon * size)
        case ZeroConcentratedDP():
            return ZeroConcentratedDP(rho=event.rho * size**2)
        case PoissonSampled() if isinstance(event.event, Gaussian):
            return GroupPoissonSampled(sample_rate=event.sample_rate, group_size=size, event=event.event)
        case SelfComposed():
            return SelfComposed(event=for_group(event.event, size), count=event.count)
        case Composed():
            return Composed(events=tuple(for_group(part, size) for part in event.events))
        case _:
            raise UnsupportedEvent(f"event must have a rule for groups, got {event.kind}. Account for users as units.")
