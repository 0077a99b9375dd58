"""The moments accountant as published (floor 1): integer moments up to 32 and Markov's inequality.

    α(λ) = max over both directions of log E[e^{λL}],   ε = min over λ of (Σ α(λ) + log(1/δ)) / λ,

for λ = 1, …, 32, the moments by numerical integration (Abadi et al. 2016, section 3.2 and theorem 2). Kept as a
definition to compare with: the conversion is looser than `rdp`'s and the orders are few.
"""

import math
from dataclasses import dataclass

from sordino.accounting.composition import flatten
from sordino.accounting.directions import directions
from sordino.accounting.interval import Interval
from sordino.accounting.saddle import saddle
from sordino.definitions import NeighboringRelation
from sordino.errors import AccountingError, UnsupportedEvent
from sordino.events import Event, Gaussian, PoissonSampled

__all__ = ["Moments32"]

_LARGEST_MOMENT = 32


@dataclass(frozen=True)
class Moments32:
    """Abadi et al.'s moments accountant, for Gaussians and Poisson-sampled Gaussians.

    Guarantee:
        `upper` is an upper bound; `lower` is 0.
    """

    name: str = "moments"
    automatic: bool = False

    def supports(self, event: Event, relation: NeighboringRelation) -> bool:
        """Gaussians with and without Poisson sampling, as in the paper; not under replace-one."""
        if relation is NeighboringRelation.REPLACE_ONE:
            return False
        try:
            steps = flatten(event, relation)
        except UnsupportedEvent:
            return False
        return bool(steps.counts) and all(
            isinstance(base, Gaussian) or (isinstance(base, PoissonSampled) and isinstance(base.event, Gaussian))
            for base, _ in steps.counts
        )

    def _log_moments(self, event: Event, relation: NeighboringRelation) -> list[tuple[int, float]]:
        found: list[tuple[int, float]] = []
        sides = directions(flatten(event, relation), relation)
        for order in range(1, _LARGEST_MOMENT + 1):
            try:
                at = [saddle(steps, float(order), certified=True) for steps in sides]
            except AccountingError:
                break
            found.append((order, max(one.log_mgf + one.error for one in at)))
        return found

    def epsilon(self, event: Event, delta: float, relation: NeighboringRelation) -> Interval:
        """Min over λ of (α(λ) + log(1/δ))/λ."""
        upper = min((moment - math.log(delta)) / order for order, moment in self._log_moments(event, relation))
        return Interval(lower=0.0, upper=max(0.0, upper), accountant=self.name)

    def delta(self, event: Event, epsilon: float, relation: NeighboringRelation) -> Interval:
        """Min over λ of e^{α(λ) − λε}."""
        exponent = min(moment - order * epsilon for order, moment in self._log_moments(event, relation))
        return Interval(lower=0.0, upper=math.exp(min(0.0, exponent)), accountant=self.name)
