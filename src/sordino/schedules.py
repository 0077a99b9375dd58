"""Values that change from step to step, planned before any data are touched.

A schedule may stand wherever a plan takes a number: noise multiplier, clipping norm, sample rate, expected batch size;
and it drives a learning rate. What it says for a step depends on the number of the step alone, so the accountant
composes the steps as they were planned.

Example:
    >>> [LinearSchedule(start=4.0, end=2.0).value(step, 3) for step in range(3)]
    [4.0, 3.0, 2.0]
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Self

from sordino import checks
from sordino.errors import InvalidArgument

__all__ = [
    "CosineSchedule",
    "ExponentialSchedule",
    "LinearSchedule",
    "ListSchedule",
    "Schedule",
    "StepSchedule",
    "constant_noise_schedule",
    "excess_risk_bound",
    "momentum_influence",
    "noise_influence",
    "noise_to_signal",
    "optimal_noise_schedule",
    "optimal_steps",
    "scale_schedule",
    "schedule_from_dict",
    "schedule_to_dict",
    "schedule_value",
]


# ----------------------------------------------------------------------------------------------------------------------
# The shapes a planned value can take over the steps of a run.
# ----------------------------------------------------------------------------------------------------------------------


class Schedule(ABC):
    """A positive number for each step, fixed before the run."""

    @abstractmethod
    def value(self, step: int, steps: int | None = None) -> float:
        """The value at `step`, from 0; `steps` is the length of the run where the shape is drawn over all of it."""

    @abstractmethod
    def scaled(self, factor: float) -> Self:
        """The same shape with every value multiplied by `factor` > 0."""

    def relative(self, steps: int | None = None) -> Callable[[int], float]:
        """The value of a step over that of step 0: what ``torch.optim.lr_scheduler.LambdaLR`` asks for."""
        first = self.value(0, steps)
        return lambda step: self.value(step if steps is None else min(step, max(steps - 1, 0)), steps) / first


@dataclass(frozen=True, kw_only=True)
class _Between(Schedule):
    """A value that moves from `start` to `end` over `over` steps and stays there."""

    start: float
    end: float
    over: int | None = None

    def __post_init__(self) -> None:
        checks.positive(start=self.start)
        checks.positive(end=self.end)
        if self.over is not None:
            checks.integer(1, over=self.over)

    def value(self, step: int, steps: int | None = None) -> float:
        """The value at `step`."""
        step = checks.integer(0, step=step)
        if self.over is None and steps is None:
            raise InvalidArgument("over must be a number of steps when the length of the run is open, got None.")
        over = max((steps or 1) - 1, 1) if self.over is None else self.over
        return self._at(min(1.0, step / over))

    @abstractmethod
    def _at(self, way: float) -> float:
        """The value when the part `way` in [0, 1] of the way is done."""

    def scaled(self, factor: float) -> Self:
        """The same shape, `factor` times as high."""
        factor = checks.positive(factor=factor)
        return replace(self, start=self.start * factor, end=self.end * factor)


@dataclass(frozen=True, kw_only=True)
class LinearSchedule(_Between):
    """A straight line from `start` to `end`, then flat.

    Args:
        start: value of step 0, > 0.
        end: value from step `over` on, > 0.
        over: number of steps the way takes; None lets the run's last step have the value `end`.

    Example:
        >>> rate = LinearSchedule(start=0.1, end=0.052, over=1000)
        >>> round(rate.value(500), 4), rate.value(5000)
        (0.076, 0.052)
    """

    def _at(self, way: float) -> float:
        return self.start + (self.end - self.start) * way if way < 1 else self.end


@dataclass(frozen=True, kw_only=True)
class ExponentialSchedule(_Between):
    """Equal ratios from `start` to `end`: start · (end / start)^(step / over), then flat.

    Args:
        start: value of step 0, > 0.
        end: value from step `over` on, > 0.
        over: number of steps the way takes; None lets the run's last step have the value `end`.

    Example:
        >>> [round(ExponentialSchedule(start=4.0, end=1.0).value(step, 3), 6) for step in range(3)]
        [4.0, 2.0, 1.0]
    """

    def _at(self, way: float) -> float:
        return self.start * (self.end / self.start) ** way if way < 1 else self.end


@dataclass(frozen=True, kw_only=True)
class CosineSchedule(_Between):
    """Half a cosine wave from `start` to `end`, flat at both ends.

    Args:
        start: value of step 0, > 0.
        end: value from step `over` on, > 0.
        over: number of steps the way takes; None lets the run's last step have the value `end`.

    Example:
        >>> [round(CosineSchedule(start=3.0, end=1.0).value(step, 3), 6) for step in range(3)]
        [3.0, 2.0, 1.0]
    """

    def _at(self, way: float) -> float:
        return self.end + (self.start - self.end) * (1 + math.cos(math.pi * way)) / 2 if way < 1 else self.end


@dataclass(frozen=True, kw_only=True)
class StepSchedule(Schedule):
    """`start`, multiplied by `factor` after every `every` steps.

    Args:
        start: value of the first `every` steps, > 0.
        factor: > 0.
        every: number of steps between two changes, ≥ 1.

    Example:
        >>> [StepSchedule(start=1.0, factor=0.5, every=2).value(step) for step in range(5)]
        [1.0, 1.0, 0.5, 0.5, 0.25]
    """

    start: float
    factor: float
    every: int

    def __post_init__(self) -> None:
        checks.positive(start=self.start)
        checks.positive(factor=self.factor)
        checks.integer(1, every=self.every)

    def value(self, step: int, steps: int | None = None) -> float:  # noqa: ARG002
        """The value at `step`."""
        return checks.positive(value=self.start * self.factor ** (checks.integer(0, step=step) // self.every))

    def scaled(self, factor: float) -> Self:
        """The same shape, `factor` times as high."""
        return replace(self, start=self.start * checks.positive(factor=factor))


@dataclass(frozen=True, kw_only=True)
class ListSchedule(Schedule):
    """One value a step, written out.

    Args:
        values: each > 0; as many as the run has steps, or more.

    Example:
        >>> ListSchedule(values=(2.0, 1.5)).value(1)
        1.5
    """

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", tuple(checks.positive(values=value) for value in self.values))

    def value(self, step: int, steps: int | None = None) -> float:  # noqa: ARG002
        """The value at `step`."""
        if not 0 <= checks.integer(0, step=step) < len(self.values):
            raise InvalidArgument(
                f"values must hold one number for every step, got {len(self.values)} for step {step}. List more."
            )
        return self.values[step]

    def scaled(self, factor: float) -> Self:
        """The same shape, `factor` times as high."""
        factor = checks.positive(factor=factor)
        return replace(self, values=tuple(value * factor for value in self.values))


_KINDS: dict[str, type[LinearSchedule | ExponentialSchedule | CosineSchedule | StepSchedule | ListSchedule]] = {
    "linear": LinearSchedule,
    "exponential": ExponentialSchedule,
    "cosine": CosineSchedule,
    "stepped": StepSchedule,
    "listed": ListSchedule,
}


def schedule_value(value: float | Schedule, step: int, steps: int | None = None) -> float:
    """The value at `step` of a number or a schedule."""
    return value.value(step, steps) if isinstance(value, Schedule) else value


def scale_schedule(value: float | Schedule, factor: float) -> float | Schedule:
    """A number or a schedule, `factor` times as large."""
    return value.scaled(factor) if isinstance(value, Schedule) else value * factor


def schedule_to_dict(value: float | Schedule) -> object:
    """Plain JSON types: a number stays a number."""
    if not isinstance(value, Schedule):
        return value
    for name, kind in _KINDS.items():
        if isinstance(value, kind):
            body = {item.name: getattr(value, item.name) for item in fields(value)}
            return {"schedule": name, **{key: list(part) if key == "values" else part for key, part in body.items()}}
    raise InvalidArgument(f"schedule must be one of {', '.join(sorted(_KINDS))}, got {type(value).__name__}.")


def schedule_from_dict(body: object) -> float | Schedule:
    """What `schedule_to_dict` wrote."""
    if not isinstance(body, dict):
        if isinstance(body, bool) or not isinstance(body, int | float):
            raise InvalidArgument(f"schedule must be a number or an object, got {body!r}. Check the file.")
        return body
    kind = _KINDS.get(str(body.get("schedule")))
    given = {name: value for name, value in body.items() if name != "schedule"}
    if kind is None or set(given) != {item.name for item in fields(kind)}:
        raise InvalidArgument(f"schedule must be one of {', '.join(sorted(_KINDS))} with its fields. Check the file.")
    if kind is ListSchedule:
        return ListSchedule(values=tuple(given["values"]))
    return kind(**given)


# ----------------------------------------------------------------------------------------------------------------------
# How much the noise of each step costs at the end, and the schedule that makes the least of it.
#
# Full-batch noisy gradient descent on a loss that is M-smooth and satisfies the Polyak–Łojasiewicz condition with μ:
# the noise of step t (from 0, of T) reaches the end damped by γ^(T−1−t), γ = 1 − μ/M. With Σ σ_t⁻² = R fixed, which is
# a zCDP budget of R/2, the bound on the excess risk is
#
#     EER / (f₁ − f*) ≤ γ^T + R Σ_t q_t σ_t²        q_t = γ^(T−1−t) α      (theorem 3.2)
#
# and the least of it is (Σ √q_t)² at σ_t² = (1/R) Σ_i √(q_i / q_t)             (lemma 3.1).
#
# References:
#     Hong, Wang, Zhou 2022, "Dynamic privacy budget allocation improves data efficiency of differentially private
#     gradient descent".
# ----------------------------------------------------------------------------------------------------------------------


def noise_to_signal(
    *, dimensions: int, lipschitz: float, budget: float, smoothness: float, records: float, excess: float
) -> float:
    """α = D G² / (2 R M N² (f₁ − f*)): how large noise is beside what there is to gain.

    Args:
        dimensions: D, number of parameters.
        lipschitz: G, bound on a record's gradient norm (the clipping norm).
        budget: R = Σ σ_t⁻² > 0; the run is (R/2)-zCDP.
        smoothness: M > 0.
        records: public number N of records.
        excess: f₁ − f* > 0, loss above the optimum at the start.

    Example:
        >>> noise_to_signal(dimensions=10, lipschitz=1.0, budget=0.5, smoothness=1.0, records=100.0, excess=1.0)
        0.001
    """
    squares = checks.positive(lipschitz=lipschitz) ** 2
    below = 2 * checks.positive(budget=budget) * checks.positive(smoothness=smoothness)
    below *= checks.positive(records=records) ** 2 * checks.positive(excess=excess)
    return checks.integer(1, dimensions=dimensions) * squares / below


def noise_influence(steps: int, *, condition_number: float, alpha: float = 1.0) -> tuple[float, ...]:
    """q_t = γ^(T−1−t) α for t = 0, …, T−1, with γ = 1 − 1/κ: late noise counts most.

    Args:
        steps: T ≥ 1.
        condition_number: κ = M/μ > 1.
        alpha: `noise_to_signal`, > 0; a factor common to all steps does not move the best schedule.

    Example:
        >>> noise_influence(3, condition_number=2.0)
        (0.25, 0.5, 1.0)
    """
    gamma = _gamma(condition_number)
    alpha = checks.positive(alpha=alpha)
    return tuple(alpha * gamma ** (steps - 1 - step) for step in range(checks.integer(1, steps=steps)))


def momentum_influence(
    steps: int, *, condition_number: float, momentum: float, learning_rate: float = 1.0
) -> tuple[float, ...]:
    """q_t = (β^(2(T−t)) − γ^(T−t)) / (β² − γ) with debiased momentum β, γ = 1 − η₀/κ: a hump before the end.

    Args:
        steps: T ≥ 1.
        condition_number: κ = M/μ > 1.
        momentum: β in (0, 1).
        learning_rate: η₀ in units of 1/M, in (0, 1].

    References:
        Hong, Wang, Zhou 2022, theorem 3.4.
    """
    beta = checks.probability(zero=False, one=False, momentum=momentum)
    rate = checks.probability(zero=False, learning_rate=learning_rate)
    gamma = 1 - rate / checks.in_range(1.0, math.inf, condition_number=condition_number)
    # The quotient is Σ_k β^(2k) γ^(n−1−k), added up so that nothing cancels where β² is near γ.
    found = [1.0]
    for count in range(1, checks.integer(1, steps=steps)):
        found.append(gamma * found[-1] + beta ** (2 * count))
    return tuple(reversed(found))


def constant_noise_schedule(steps: int, *, budget: float) -> ListSchedule:
    """σ_t² = T/R at every step: the same zCDP budget R/2, spent evenly."""
    return ListSchedule(values=(math.sqrt(steps / checks.positive(budget=budget)),) * checks.integer(1, steps=steps))


def optimal_noise_schedule(influences: Sequence[float], *, budget: float) -> ListSchedule:
    """The noise multipliers with Σ σ_t⁻² = R that make Σ q_t σ_t² least: σ_t² = (1/R) Σ_i √(q_i / q_t).

    Guarantee: fixed before the run from q alone; a run of plain Gaussian steps with these multipliers is (R/2)-zCDP.
    Subsampled steps cost what the accountant says of each.

    Args:
        influences: q_t > 0 of each step, in order.
        budget: R > 0.

    Example:
        >>> noise = optimal_noise_schedule(noise_influence(2, condition_number=4 / 3), budget=1.0)
        >>> [round(value**2, 6) for value in noise.values]
        [3.0, 1.5]

    References:
        Hong, Wang, Zhou 2022, lemma 3.1.
    """
    roots = [math.sqrt(checks.positive(influences=value)) for value in influences]
    if not roots:
        raise InvalidArgument("influences must hold a number for every step, got none. Give at least one.")
    total = math.fsum(roots) / checks.positive(budget=budget)
    return ListSchedule(values=tuple(math.sqrt(total / root) for root in roots))


def excess_risk_bound(
    noise: Sequence[float], *, condition_number: float, alpha: float, influences: Sequence[float] | None = None
) -> float:
    """γ^T + R Σ_t q_t σ_t², the bound on the final excess risk over that of the start, R = Σ σ_t⁻².

    Lay schedules of one budget side by side with it: the smaller bound promises more.

    Args:
        noise: σ_t of each step.
        condition_number: κ > 1.
        alpha: `noise_to_signal` for the budget R of this schedule, > 0.
        influences: q_t of each step; None takes those of plain gradient descent.

    Example:
        >>> noise = constant_noise_schedule(10, budget=0.1)
        >>> round(excess_risk_bound(noise.values, condition_number=5.0, alpha=0.001), 4)
        0.152

    References:
        Hong, Wang, Zhou 2022, theorem 3.2.
    """
    steps = len(noise)
    weights = (
        noise_influence(steps, condition_number=condition_number, alpha=alpha) if influences is None else influences
    )
    budget = math.fsum(checks.positive(noise=sigma) ** -2 for sigma in noise)
    spent = math.fsum(weight * sigma**2 for weight, sigma in zip(weights, noise, strict=True))
    return _gamma(condition_number) ** steps + budget * spent


def optimal_steps(*, condition_number: float, alpha: float, dynamic: bool) -> int:
    """The number of steps T* that makes the bound least, for uniform noise or the best dynamic noise.

    uniform: the T of least γ^T + α T (1 − γ^T)/(1 − γ); dynamic: of γ^T + α ((1 − γ^(T/2))/(1 − √γ))². The published
    closed forms, T* = ⌈log_γ(κα / ln(1/γ))⌉ and ⌈2 log_γ(α / (α + (1 − √γ)²))⌉, drop a term of the first and round up;
    here all whole numbers are compared. 0 says that any step adds more noise than it gains.

    Example:
        >>> optimal_steps(condition_number=10.0, alpha=1e-4, dynamic=True)
        63

    References:
        Hong, Wang, Zhou 2022, section 3.2.
    """
    gamma, alpha = _gamma(condition_number), checks.positive(alpha=alpha)

    def bound(steps: int) -> float:
        if dynamic:
            return gamma**steps + alpha * ((1 - gamma ** (steps / 2)) / (1 - math.sqrt(gamma))) ** 2
        return gamma**steps + alpha * steps * (1 - gamma**steps) / (1 - gamma)

    # At γ^T = α the noise alone is more than all that is left to gain.
    farthest = math.ceil(math.log(min(alpha, 0.5)) / math.log(gamma)) + 1
    return min(range(farthest + 1), key=bound)


def _gamma(condition_number: float) -> float:
    if not checks.positive(condition_number=condition_number) > 1:
        raise InvalidArgument(f"condition_number must be above 1, got {condition_number:g}.")
    return 1 - 1 / condition_number
