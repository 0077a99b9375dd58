"""ε so far, cheaply and never too low (floor 3)."""

import math
from collections.abc import Iterator

from sordino import accounting
from sordino.events import Event, Nothing
from sordino.training.bills.charges import Charges
from sordino.training.plan import Plan

__all__ = ["SpentSoFar", "charged_at"]


def charged_at(plan: Plan, step: int, *, first: int = 0, repeats: bool = False) -> Event:
    """The event that is charged before `step` in a segment that starts at step `first`.

    Under shuffled epochs the first step of an epoch pays for all of it, and so does the first step of a segment: it
    deals what is left of its epoch anew. Under correlated noise a run's charges hold for all its segments, unless steps
    from `first` on were carried out before (`repeats`): then the segment's first step pays for all that comes again.
    """
    if plan.mechanism is not None:
        if not (repeats and plan.is_private):
            return plan.step_event(step)
        return plan.mechanism.branch_event(first) if step == first else Nothing()
    charges = plan.sampling.charges
    return plan.step_event(step) if step == first or charges(step + 1) > charges(step) else Nothing()


class SpentSoFar:
    """An upper bound of ε after any number of steps, from at most `points` accountings of the whole run.

    ε grows with the steps, so ε at the next grid point bounds ε at every step before it. The last grid point is the
    end of the run: there the value is the plan's own, together with what earlier segments spent.

    Args:
        plan: what is run.
        points: most grid points, ≥ 1.
        first: the step with which this segment starts.
        earlier: what was charged in earlier segments, in order.
        repeats: whether steps from `first` on were carried out before.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        points: int = 100,
        first: int = 0,
        earlier: Charges | None = None,
        repeats: bool = False,
    ) -> None:
        self._plan, self._repeats = plan, repeats
        self._stride = max(1, math.ceil((plan.steps - first) / points))
        self._first = self._reached = first
        self._epsilon = 0.0
        self._charges = Charges() if earlier is None else earlier.copy()
        self._total = self._after(self._all_steps())

    def after(self, steps: int) -> float:
        """At least the ε of the steps before `steps`, from `first` up to the plan's, and of earlier segments."""
        if steps > self._reached:
            reached = self._first + self._stride * math.ceil((steps - self._first) / self._stride)
            reached = min(self._plan.steps, reached)
            for event in self._events(self._reached, reached):
                self._charges.add(event)
            self._reached = reached
            # Separate accountings differ within their own error bounds: what bounds the whole run bounds every part.
            self._epsilon = max(self._epsilon, min(self._total, self._after(self._charges)))
        return self._epsilon

    def _events(self, start: int, end: int) -> Iterator[Event]:
        charged = (charged_at(self._plan, step, first=self._first, repeats=self._repeats) for step in range(start, end))
        return (event for event in charged if not isinstance(event, Nothing))

    def _all_steps(self) -> Charges:
        charges = self._charges.copy()
        for event in self._events(self._first, self._plan.steps):
            charges.add(event)
        return charges

    def _after(self, charges: Charges) -> float:
        return accounting.epsilon(charges.event(), self._plan.delta, relation=self._plan.neighboring_relation).upper
