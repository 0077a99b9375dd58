"""The event that a plan asks for at a step, worked out from plan.json without the training code (floor 6)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from sordino.events import Event, Gaussian, NoPrivacy, Nothing, PoissonSampled
from sordino.mechanisms.correlated import (
    CorrelatedGaussianMechanism,
    CyclicPoisson,
    participation_from_dict,
    strategy_from_dict,
)
from sordino.runs import Line
from sordino.schedules import schedule_from_dict, value_at

__all__ = ["Course", "is_plan", "planned_event", "planned_loss_stddev", "same_plan"]

_NEEDED = {"noise_multiplier", "sample_rate", "steps", "poisson_sampling", "delta", "neighboring_relation"}


def is_plan(plan: Mapping[str, object]) -> bool:
    """Whether this is a plan that says what each step does."""
    return plan.keys() >= _NEEDED


def same_plan(one: object, other: Mapping[str, object]) -> bool:
    """Whether two plans say the same: a field that an earlier schema lacks is as good as null."""
    stated = [
        {name: value for name, value in plan.items() if name != "schema" and value is not None}
        for plan in (one, other)
        if isinstance(plan, Mapping)
    ]
    return len(stated) == 2 and stated[0] == stated[1]


def planned_loss_stddev(plan: Mapping[str, object], step: int, *, asked: tuple[float, float] | None = None) -> float:
    """Standard deviation of the noise on the loss that step `step` releases: z L / (√share · B).

    Args:
        plan: plan.json, with a loss curve.
        step: number of the step.
        asked: the noise multiplier and sample rate that were chosen on the way, instead of the plan's.
    """
    curve = plan["loss_curve"]
    assert isinstance(curve, Mapping)
    noise, rate, size = (
        value_at(schedule_from_dict(plan[name]), step, int(str(plan["steps"])))
        for name in ("noise_multiplier", "sample_rate", "expected_batch_size")
    )
    if asked is not None:
        noise, size = asked[0], size * asked[1] / rate
    return noise * float(str(curve["bound"])) / (math.sqrt(float(str(curve["share"]))) * size)


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
    # A loop of the user's own has no last step.
    steps = int(str(plan["steps"])) or None
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


@dataclass(kw_only=True)
class Course:
    """The steps of one model, line by line, beside what its plan asks for.

    Args:
        plan: plan.json, or what the segment at hand states in its place.
        ends: whether the plan says how many steps there are; in a loop of the user's own it doesn't, and an epoch of
            shuffled batches begins when the loop says so.
    """

    plan: Mapping[str, object]
    ends: bool
    first: int = 0
    begun: int = 0
    _repeats: bool = False
    _uncharged: int = 0

    def begin(self, plan: Mapping[str, object], first: int) -> None:
        """A segment begins at step `first`."""
        # The step after a checkpoint may have been under way, and broken off, when that was written.
        self.plan, self.first, self._repeats = plan, first, 0 < first < self.begun - 1
        self._uncharged = 0

    def fault(self, line: Line) -> str:
        """What is wrong with the next line, or an empty string."""
        correlated = isinstance(self.plan.get("noise"), dict)
        if line.step == self.first and self.first:
            again = planned_event(self.plan, self.first, first=self.first, repeats=True)
            self._repeats = self._repeats or line.event == again
        self.begun = max(self.begun, line.step + 1)
        steps = int(str(self.plan["steps"]))
        if (self.ends or correlated) and line.step >= steps:
            return f"step {line.step} is beyond the plan's {steps} steps"
        if line.torn:
            return ""
        if not self.ends and not correlated and not self.plan["poisson_sampling"]:
            return self._epoch_fault(line)
        if line.event != planned_event(self.plan, line.step, first=self.first, repeats=self._repeats):
            return f"step {line.step}, attempt {line.attempt}, charges another event than the plan's"
        return ""

    def _epoch_fault(self, line: Line) -> str:
        """An epoch is charged before its first batch, and has no more batches than the plan says."""
        if isinstance(line.event, Nothing):
            self._uncharged += 1
            batches = max(1, round(1 / float(str(self.plan["sample_rate"]))))
            if line.step == self.first or self._uncharged >= batches:
                return f"step {line.step}, attempt {line.attempt}, belongs to an epoch that nothing was charged for"
            return ""
        self._uncharged = 0
        if line.event != planned_event(self.plan, line.step, first=line.step):
            return f"step {line.step}, attempt {line.attempt}, charges another event than the plan's"
        return ""
