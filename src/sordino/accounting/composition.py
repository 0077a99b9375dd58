"""From a tree of events to a flat list of distinct steps with counts (floor 1).

Composition of independent steps, adaptively chosen results included, is the sum of their losses, so the order
and the nesting of `Composed` and `SelfComposed` don't matter. Sampling does not distribute over composition:
several mechanisms on *one* sample are one step.
"""

import math
from dataclasses import dataclass

from sordino.errors import UnsupportedEvent
from sordino.events import (
    Composed,
    Event,
    Gaussian,
    Laplace,
    NoPrivacy,
    Nothing,
    PoissonSampled,
    SelfComposed,
)

__all__ = ["Steps", "flatten"]


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Distinct steps and how often each happened.

    Args:
        counts: each base event with its count ≥ 1. `PoissonSampled` has 0 < rate < 1 and one mechanism inside.
        unprotected: whether some step had no protection at all, so that ε = ∞.
    """

    counts: tuple[tuple[Event, int], ...]
    unprotected: bool = False

    @property
    def total(self) -> int:
        """Number of steps."""
        return sum(count for _, count in self.counts)

    @property
    def empty(self) -> bool:
        """Whether no data were touched."""
        return not self.counts and not self.unprotected


def flatten(event: Event) -> Steps:
    """The steps of an event, with equal ones counted together and all unsampled Gaussians as one.

    Example:
        >>> from sordino.events import Gaussian, SelfComposed
        >>> flatten(SelfComposed(event=Gaussian(noise_multiplier=10.0), count=100)).counts
        ((Gaussian(noise_multiplier=1.0), 1),)
    """
    counts: dict[Event, int] = {}
    unprotected = _collect(event, 1, counts)
    precision = [count / base.noise_multiplier**2 for base, count in counts.items() if isinstance(base, Gaussian)]
    steps = [(base, count) for base, count in counts.items() if not isinstance(base, Gaussian)]
    if precision:
        steps.insert(0, (Gaussian(noise_multiplier=1 / math.sqrt(math.fsum(precision))), 1))
    return Steps(counts=tuple(steps), unprotected=unprotected)


def _collect(event: Event, count: int, counts: dict[Event, int]) -> bool:
    """Adds the event's steps to `counts`; returns whether something was unprotected."""
    if count == 0 or isinstance(event, Nothing):
        return False
    if isinstance(event, NoPrivacy):
        return True
    if isinstance(event, SelfComposed):
        return _collect(event.event, count * event.count, counts)
    if isinstance(event, Composed):
        return any(_collect(part, count, counts) for part in event.events)
    if isinstance(event, PoissonSampled):
        return _collect_sampled(event, count, counts)
    if isinstance(event, Gaussian | Laplace) and not 1 / max(event.noise_multiplier, 1e-300) < 1e150:
        return True
    counts[event] = counts.get(event, 0) + count
    return False


def _collect_sampled(event: PoissonSampled, count: int, counts: dict[Event, int]) -> bool:
    rate, inner = event.sample_rate, event.event
    if rate == 0:
        return False
    if isinstance(inner, PoissonSampled):
        # Two independent Poisson draws, one inside the other, are one draw at the product of the rates.
        return _collect(PoissonSampled(sample_rate=rate * inner.sample_rate, event=inner.event), count, counts)
    if rate == 1:
        return _collect(inner, count, counts)
    steps = flatten(inner)
    if steps.unprotected or steps.empty:
        return steps.unprotected
    if steps.total > 1:
        raise UnsupportedEvent(
            f"a Poisson sample must be used by one mechanism (Gaussians count as one), got {steps.total}. "
            "Draw a fresh sample for each mechanism."
        )
    base = PoissonSampled(sample_rate=rate, event=steps.counts[0][0])
    counts[base] = counts.get(base, 0) + count
    return False
