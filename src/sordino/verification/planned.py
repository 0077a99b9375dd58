"""The event that a plan asks for at a step, worked out from plan.json without the training code (floor 6)."""

from collections.abc import Mapping

from sordino.events import Event, Gaussian, NoPrivacy, Nothing, PoissonSampled
from sordino.mechanisms.correlated import (
    CorrelatedGaussianMechanism,
    CyclicPoisson,
    participation_from_dict,
    strategy_from_dict,
)
from sordino.schedules import schedule_from_dict, value_at

__all__ = ["is_plan", "planned_event"]

_NEEDED = {"noise_multiplier", "sample_rate", "steps", "poisson_sampling", "delta", "neighboring_relation"}


def is_plan(plan: Mapping[str, object]) -> bool:
    """Whether this is a plan that says what each step does."""
    return plan.keys() >= _NEEDED


def planned_event(plan: Mapping[str, object], step: int, *, first: int, repeats: bool = False) -> Event:
    """What step `step` of a segment that starts at step `first` must charge.

    Args:
        plan: plan.json.
        step: number of the step.
        first: first step of its segment; it pays for what is left of a shuffled epoch.
        repeats: whether steps from `first` on were carried out before; matters under correlated noise only.
    """
    if isinstance(noise := plan.get("noise"), dict):
        return _correlated_event(noise, float(str(plan["noise_multiplier"])), step, first=first, repeats=repeats)
    steps = int(str(plan["steps"]))
    noise = value_at(schedule_from_dict(plan["noise_multiplier"]), step, steps)
    rate = value_at(schedule_from_dict(plan["sample_rate"]), step, steps)
    if not plan["poisson_sampling"] and step != first and step % max(1, round(1 / rate)):
        return Nothing()
    if noise == 0:
        return NoPrivacy(reason="noise_multiplier is 0")
    event = Gaussian(noise_multiplier=noise)
    return PoissonSampled(sample_rate=rate, event=event) if plan["poisson_sampling"] and rate != 1 else event


def _correlated_event(
    noise: Mapping[str, object], noise_multiplier: float, step: int, *, first: int, repeats: bool
) -> Event:
    participation = participation_from_dict(noise["participation"])
    mechanism = CorrelatedGaussianMechanism(
        strategy=strategy_from_dict(noise["strategy"]),
        participation=participation,
        noise_multiplier=noise_multiplier,
        l2_sensitivity=1.0,
    )
    if repeats and noise_multiplier:
        return mechanism.branch_event(first) if step == first else Nothing()
    cyclic = isinstance(participation, CyclicPoisson)
    if step % participation.groups if cyclic else step:
        return Nothing()
    if noise_multiplier == 0:
        return NoPrivacy(reason="noise_multiplier is 0")
    one = Gaussian(noise_multiplier=noise_multiplier)
    if not cyclic:
        return mechanism.event()
    rate = participation.group_rate
    return one if rate == 1 else PoissonSampled(sample_rate=rate, event=one)
