"""ε so far, cheaply and never too low (floor 3)."""

import math

from sordino.training.plan import Plan

__all__ = ["SpentSoFar"]


class SpentSoFar:
    """An upper bound of ε after any number of steps, from at most `points` accountings of the whole run.

    ε grows with the steps, so ε at the next grid point bounds ε at every step before it. The last grid point is the
    end of the run: there the value is the plan's own.

    Args:
        plan: what is run.
        points: most grid points, ≥ 1.
    """

    def __init__(self, plan: Plan, *, points: int = 100) -> None:
        self._plan = plan
        self._stride = max(1, math.ceil(plan.steps / points))
        self._reached = 0
        self._epsilon = 0.0
        self._total = plan.guarantee().epsilon

    def after(self, steps: int) -> float:
        """At least the ε of the first `steps` steps, from 0 up to the plan's."""
        if steps > self._reached:
            self._reached = min(self._plan.steps, self._stride * math.ceil(steps / self._stride))
            # Separate accountings differ within their own error bounds: what bounds the whole run bounds every part.
            spent = min(self._total, self._plan.guarantee(steps=self._reached).epsilon)
            self._epsilon = max(self._epsilon, spent)
        return self._epsilon
