"""Values that change from step to step, planned before any data are touched (floor 1).

A schedule may stand wherever a plan takes a number: noise multiplier, clipping norm, sample rate, expected batch size;
and it drives a learning rate. What it says for a step depends on the number of the step alone, so the accountant
composes the steps as they were planned.

Example:
    >>> [Linear(start=4.0, end=2.0).value(step, 3) for step in range(3)]
    [4.0, 3.0, 2.0]
"""

from sordino.schedules.influence import (
    excess_risk_bound,
    influence,
    least_noise,
    momentum_influence,
    noise_to_signal,
    optimal_steps,
    uniform_noise,
)
from sordino.schedules.schedule import (
    Cosine,
    Exponential,
    Linear,
    Listed,
    Schedule,
    Stepped,
    scaled,
    schedule_from_dict,
    schedule_to_dict,
    value_at,
)

__all__ = [
    "Cosine",
    "Exponential",
    "Linear",
    "Listed",
    "Schedule",
    "Stepped",
    "excess_risk_bound",
    "influence",
    "least_noise",
    "momentum_influence",
    "noise_to_signal",
    "optimal_steps",
    "scaled",
    "schedule_from_dict",
    "schedule_to_dict",
    "uniform_noise",
    "value_at",
]
