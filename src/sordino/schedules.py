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
from collections.abc import Callable
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
