"""Filters and odometers for adaptively chosen noise.

When σ_t may depend on earlier results, the composition theorems for fixed schedules don't apply as they stand. A
*filter* has a budget fixed in advance and refuses the first step that would exceed it; its guarantee is the
budget's, whatever was chosen. For zCDP and Rényi the filter loses nothing: Σ ρ_t ≤ ρ (Feldman and Zrnic 2021,
theorem 4.3; Whitehouse et al. 2023, theorem 1), and likewise Σ μ_t² for Gaussian DP (Smith and Thakurta 2022).
An *odometer* reports a running ε that is valid at every time simultaneously: a sequence of filters with budgets
doubling, δ shared out among them (Whitehouse et al. 2023, section 4, by discretization).

Example:
    >>> from sordino.accounting.filters import ZCDPFilter
    >>> from sordino.events import Gaussian
    >>> guard = ZCDPFilter(epsilon=1.0, delta=1e-5)
    >>> [guard.admit(Gaussian(noise_multiplier=10.0)) for _ in range(7)]
    [True, True, True, True, True, True, False]
"""

import math
from typing import Protocol

from sordino import checks
from sordino.accounting.base import flatten
from sordino.accounting.mgf import evaluate_saddle_point
from sordino.accounting.rdp import renyi_directions
from sordino.accounting.zcdp_gdp import max_mu, max_rho, rho_to_epsilon, zcdp_rho
from sordino.definitions import NeighboringRelation
from sordino.errors import BudgetExceeded, UnsupportedEvent
from sordino.events import Event, Gaussian

__all__ = ["GDPFilter", "PrivacyFilter", "RDPFilter", "ZCDPFilter", "ZCDPOdometer"]

_ADD = NeighboringRelation.ADD_OR_REMOVE_ONE


class PrivacyFilter(Protocol):
    """A budget in one additive currency; `admit` charges or refuses, and a refusal changes nothing."""

    @property
    def spent(self) -> float:
        """What was charged, in the filter's currency."""
        ...

    @property
    def budget(self) -> float:
        """The most that may be charged."""
        ...

    def cost(self, event: Event) -> float:
        """The event's price."""
        ...

    def admit(self, event: Event) -> bool:
        """Charges the event if it fits; False, and nothing charged, if not."""
        ...


class _Additive:
    """Charges are kept as exact summands, so that rounding never lets one step too many in."""

    def __init__(self, budget: float) -> None:
        self._budget = budget
        self._charges: list[float] = []

    @property
    def spent(self) -> float:
        """Sum of all charges so far."""
        return math.fsum(self._charges)

    @property
    def budget(self) -> float:
        """The most that may be charged."""
        return self._budget

    @property
    def remaining(self) -> float:
        """What may still be charged, ≥ 0."""
        return max(0.0, self._budget - self.spent)

    def _admit(self, price: float) -> bool:
        price = checks.non_negative(price=price) if math.isfinite(price) else math.inf
        if math.fsum([*self._charges, price]) > self._budget:
            return False
        if len(self._charges) > 64:
            # Long runs: fold the summands, rounding up.
            self._charges = [math.nextafter(math.fsum(self._charges), math.inf)]
        self._charges.append(price)
        return True


class ZCDPFilter(_Additive):
    """Σ ρ_t ≤ ρ, with ρ the largest that is (ε, δ)-private.

    Guarantee:
        However the admitted steps were chosen from earlier results, together they are ρ-zCDP and (ε, δ)-private
        (Feldman and Zrnic 2021; Whitehouse et al. 2023).

    Args:
        epsilon: > 0.
        delta: in (0, 1).
        neighboring_relation: the neighboring relation.
    """

    def __init__(self, *, epsilon: float, delta: float, neighboring_relation: NeighboringRelation = _ADD) -> None:
        checks.positive(epsilon=epsilon)
        checks.probability(delta=delta, zero=False, one=False)
        super().__init__(max_rho(epsilon, delta))
        self._relation = NeighboringRelation(neighboring_relation)

    def cost(self, event: Event) -> float:
        """The event's ρ; events without one raise `UnsupportedEvent`."""
        return zcdp_rho(event, self._relation)

    def admit(self, event: Event) -> bool:
        """Charges the event's ρ if it fits; False, and nothing charged, if not."""
        return self._admit(self.cost(event))

    def require(self, event: Event) -> None:
        """`admit`, or raise.

        Raises:
            BudgetExceeded: the event does not fit; nothing was charged.
        """
        if not self.admit(event):
            raise BudgetExceeded("the step must fit the remaining budget, got one that does not. Stop here.")


class GDPFilter(_Additive):
    """Σ μ_t² ≤ μ² for Gaussian steps: tighter than zCDP, because the final curve is exactly a Gaussian's.

    Guarantee:
        The admitted Gaussian steps, adaptively chosen, are together μ-GDP and (ε, δ)-private.
    """

    def __init__(self, *, epsilon: float, delta: float, neighboring_relation: NeighboringRelation = _ADD) -> None:
        checks.positive(epsilon=epsilon)
        checks.probability(delta=delta, zero=False, one=False)
        super().__init__(max_mu(epsilon, delta) ** 2 * (1 - 1e-15))
        self._relation = NeighboringRelation(neighboring_relation)

    def cost(self, event: Event) -> float:
        """Σ μ² of Gaussians without sampling; others raise `UnsupportedEvent`."""
        steps = flatten(event, self._relation)
        if steps.non_private:
            return math.inf
        total = 0.0
        for base, count in steps.counts:
            if not isinstance(base, Gaussian):
                raise UnsupportedEvent(
                    f"the Gaussian filter must be charged Gaussians, got {base.kind}. Use RDPFilter."
                )
            total += count / base.noise_multiplier**2
        return total

    def admit(self, event: Event) -> bool:
        """Charges the event's μ² if it fits; False, and nothing charged, if not."""
        return self._admit(self.cost(event))


class RDPFilter(_Additive):
    """Σ K_t(λ) ≤ budget at one order fixed in advance: for sampled and any other adaptively chosen steps.

    Guarantee:
        The admitted steps have Rényi divergence of order λ + 1 at most budget/λ and are (ε, δ)-private
        (Feldman and Zrnic 2021, theorem 4.3).

    Args:
        epsilon: > 0.
        delta: in (0, 1).
        order: the Rényi order > 1, fixed before the first step; a good choice is the best order of the plan.
        neighboring_relation: the neighboring relation.
    """

    def __init__(
        self, *, epsilon: float, delta: float, order: float, neighboring_relation: NeighboringRelation = _ADD
    ) -> None:
        checks.positive(epsilon=epsilon)
        checks.probability(delta=delta, zero=False, one=False)
        self._lam = checks.positive(order_minus_one=order - 1, hint="Choose an order > 1.")
        lam = self._lam
        room = lam * epsilon + math.log(delta) + lam * math.log1p(1 / lam) + math.log1p(lam)
        super().__init__(max(0.0, room))
        self._relation = NeighboringRelation(neighboring_relation)

    def cost(self, event: Event) -> float:
        """Upper bound on K(λ) of the event, worst direction."""
        steps = flatten(event, self._relation)
        if steps.non_private:
            return math.inf
        if steps.empty:
            return 0.0
        at = [
            evaluate_saddle_point(side, self._lam, certified=True) for side in renyi_directions(steps, self._relation)
        ]
        return max(one.log_mgf + one.error for one in at)

    def admit(self, event: Event) -> bool:
        """Charges the event's K(λ) if it fits; False, and nothing charged, if not."""
        return self._admit(self.cost(event))


class ZCDPOdometer:
    """A running ε for adaptively chosen zCDP steps that may be read, and acted on, at any time.

    Guarantee:
        With probability 1 − δ over the whole run, at every time simultaneously: the steps so far are
        (`epsilon`, δ)-private in the sense of an odometer (Rogers et al. 2016). The k-th filter has the budget
        ρ₀·2^k and the share δ/2^{k+1}; the shares add up to δ.

    Args:
        delta: in (0, 1).
        smallest_epsilon: the first reading; > 0.
        neighboring_relation: the neighboring relation.
    """

    def __init__(
        self, *, delta: float, smallest_epsilon: float = 0.1, neighboring_relation: NeighboringRelation = _ADD
    ) -> None:
        self._delta = checks.probability(delta=delta, zero=False, one=False)
        self._first = max_rho(checks.positive(smallest_epsilon=smallest_epsilon), delta / 2)
        self._relation = NeighboringRelation(neighboring_relation)
        self._charges: list[float] = []

    @property
    def rho(self) -> float:
        """Σ ρ so far."""
        return math.fsum(self._charges)

    def charge(self, event: Event) -> float:
        """Adds the event and returns the new ε."""
        self._charges.append(zcdp_rho(event, self._relation))
        return self.epsilon

    @property
    def epsilon(self) -> float:
        """ε of the smallest budget not exceeded so far; 0 before the first step."""
        rho = self.rho
        if rho == 0:
            return 0.0
        if math.isinf(rho):
            return math.inf
        level = max(0, math.ceil(math.log2(rho / self._first)))
        while self._first * 2.0**level < rho:
            level += 1
        return rho_to_epsilon(self._first * 2.0**level, self._delta / 2.0 ** (level + 1))
