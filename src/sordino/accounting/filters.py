"""Privacy filters: budgets for events that are chosen in the light of earlier results.

When σ_t may depend on earlier results, the composition theorems for fixed schedules don't apply as they stand. A
*filter* has a budget fixed in advance and refuses the first step that would exceed it; its guarantee is the
budget's, whatever was chosen. A filter gives every event costs that add up, its measures, and decides from the totals
alone. For zCDP and Rényi nothing is lost: Σ ρ_t ≤ ρ (Feldman and Zrnic 2021, theorem 4.3; Whitehouse et al. 2023,
theorem 1), and likewise Σ μ_t² for Gaussian DP (Smith and Thakurta 2022).
An *odometer* reports a running ε that is valid at every time simultaneously: a sequence of filters with budgets
doubling, δ shared out among them (Whitehouse et al. 2023, section 4, by discretization).

A filter can be asked without a state of its own, `costs` and `fits`, as the ledger does; or keep the totals, `admit`.

Example:
    >>> from sordino.accounting.filters import ZCDPFilter
    >>> from sordino.events import Gaussian
    >>> guard = ZCDPFilter(epsilon=1.0, delta=1e-5)
    >>> [guard.admit(Gaussian(noise_multiplier=10.0)) for _ in range(7)]
    [True, True, True, True, True, True, False]
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import lru_cache

from sordino import checks
from sordino.accounting.base import (
    Costs,
    PrivacyFilter,
    RemainingAmount,
    add_costs,
    bounding_events,
    flatten,
    round_down,
)
from sordino.accounting.composition_theorems import step_parameters
from sordino.accounting.mgf import evaluate_saddle_point
from sordino.accounting.rdp import max_mu, max_rho, renyi_directions, rho_to_epsilon, zcdp_rho
from sordino.definitions import NeighboringRelation
from sordino.errors import AccountingError, UnsupportedEvent
from sordino.events import ApproximateDP, Event, Gaussian, PureDP, RepeatAndSelect, event_counts

_ADD = NeighboringRelation.ADD_OR_REMOVE_ONE


class _OneMeasure(PrivacyFilter):
    """A filter whose one measure has a limit.

    Attributes:
        budget: the most that may be charged.
    """

    measure = ""

    def __init__(self, *, epsilon: float, delta: float, neighboring_relation: NeighboringRelation = _ADD) -> None:
        checks.probability(delta=delta, zero=False, one=False)
        super().__init__(epsilon=epsilon, delta=delta, neighboring_relation=neighboring_relation)
        self.budget = self._limit()

    @abstractmethod
    def _limit(self) -> float:
        """The largest total that is (ε, δ)-private."""

    @property
    def spent(self) -> float:
        """Sum of all charges so far."""
        return self.total[0]

    @property
    def remaining(self) -> float:
        """What may still be charged, ≥ 0."""
        return self.remaining_beside(self.total).amount

    def cost(self, event: Event) -> float:
        """The event's cost in the filter's one measure."""
        return self.costs(event)[0]

    def fits(self, total: Costs) -> bool:
        """Whether the total is at most the budget."""
        return total[0] <= self.budget

    def remaining_beside(self, total: Costs) -> RemainingAmount:
        """The amount that may still be spent."""
        rest = max(0.0, self.budget - total[0])
        return RemainingAmount(rest, self.measure, rest / self.budget if self.budget > 0 else 0.0)


class ZCDPFilter(_OneMeasure):
    """Σ ρ_t ≤ ρ, with ρ the largest that is (ε, δ)-private.

    Guarantee:
        However the admitted steps were chosen from earlier results, together they are ρ-zCDP and (ε, δ)-private
        (Feldman and Zrnic 2021, theorem 4.3; Whitehouse et al. 2023, theorem 1).
    """

    measure = "ρ"

    def _limit(self) -> float:
        return max_rho(self._epsilon, self._delta)

    def costs(self, event: Event) -> Costs:
        """The event's ρ; events without one raise `UnsupportedEvent`."""
        return (zcdp_rho(event, self._relation),)


class GDPFilter(_OneMeasure):
    """Σ μ_t² ≤ μ² for Gaussian steps: tighter than zCDP, because the final curve is exactly a Gaussian's.

    Guarantee:
        The admitted Gaussian steps, adaptively chosen, are together μ-GDP and (ε, δ)-private.
    """

    measure = "μ²"

    def _limit(self) -> float:
        return max_mu(self._epsilon, self._delta) ** 2 * (1 - 1e-15)

    def costs(self, event: Event) -> Costs:
        """Σ μ² of Gaussians without sampling; others raise `UnsupportedEvent`."""
        steps = flatten(event, self._relation)
        if steps.non_private:
            return (math.inf,)
        total = 0.0
        for base, count in steps.counts:
            if not isinstance(base, Gaussian):
                raise UnsupportedEvent(
                    f"the Gaussian filter must be charged Gaussians, got {base.kind}. Use RDPFilter."
                )
            total += count / base.noise_multiplier**2
        return (total,)


# ── Rényi filters ───────────────────────────────────────────────────────────────────────────────────────────


def _moment_limit(lam: float, epsilon: float, delta: float) -> float:
    """The largest K(λ) that is (ε, δ)-private: λε + log δ + λ log(1 + 1/λ) + log(1 + λ)."""
    return lam * epsilon + math.log(delta) + lam * math.log1p(1 / lam) + math.log1p(lam)


class RDPFilter(_OneMeasure):
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

    measure = "K"

    def __init__(
        self, *, epsilon: float, delta: float, order: float, neighboring_relation: NeighboringRelation = _ADD
    ) -> None:
        self._lam = checks.positive(order_minus_one=order - 1, hint="Choose an order > 1.")
        super().__init__(epsilon=epsilon, delta=delta, neighboring_relation=neighboring_relation)

    def _limit(self) -> float:
        return max(0.0, _moment_limit(self._lam, self._epsilon, self._delta))

    def costs(self, event: Event) -> Costs:
        """Upper bound on K(λ) of the event, worse direction."""
        steps = flatten(event, self._relation)
        if steps.non_private:
            return (math.inf,)
        if steps.empty:
            return (0.0,)
        at = [
            evaluate_saddle_point(side, self._lam, certified=True) for side in renyi_directions(steps, self._relation)
        ]
        return (max(one.log_mgf + one.error for one in at),)


# The share of δ that is kept for events that have a δ of their own.
_OWN = 1 / 8


def _shares(orders: int) -> tuple[float, ...]:
    """Shares of δ, 7/8 together: half for the first order, a quarter for the second, the rest in equal parts."""
    if orders < 3:
        return ((), (7 / 8,), (1 / 2, 3 / 8))[orders]
    return (1 / 2, 1 / 4, *(1 / 8 / (orders - 2) for _ in range(orders - 2)))


class RDPOrdersFilter(PrivacyFilter):
    """One of a few Rényi orders that were fixed in advance, or the pure losses, must stay within the budget.

    Guarantee:
        Whatever was chosen from earlier results, all charges together are (ε, δ)-private, as long as the events' own
        δ add up to at most δ/8 and, for some λ, Σ K(λ) ≤ λε + log(wδ) + λ log(1 + 1/λ) + log(1 + λ), where w is the
        order's share; or the pure losses add up to at most ε. Theorem 2 of ``docs/proofs/ledger.md``.

    The costs are K(λ) for each order, the largest loss, and the event's own δ.

    Args:
        epsilon: > 0.
        delta: in [0, 1); 0 for pure events only, without orders.
        orders: λ = Rényi order − 1 > 0, the most important first; see `best_orders`.
        neighboring_relation: the neighboring relation.
    """

    def __init__(
        self,
        *,
        epsilon: float,
        delta: float,
        orders: Sequence[float],
        neighboring_relation: NeighboringRelation = _ADD,
    ) -> None:
        super().__init__(epsilon=epsilon, delta=delta, neighboring_relation=neighboring_relation)
        self._orders = tuple(orders)
        self.num_measures = len(self._orders) + 2

    def costs(self, event: Event) -> Costs:
        """K at every order, the largest loss, and the own δ."""
        return _renyi_costs(event, self._relation, self._orders)

    @property
    def moment_limits(self) -> Costs:
        """The limits of K, one for each order."""
        return tuple(
            _moment_limit(lam, self._epsilon, share * self._delta)
            for lam, share in zip(self._orders, _shares(len(self._orders)), strict=True)
        )

    def fits(self, total: Costs) -> bool:
        """Whether the own δ fit, and so does one order or the largest loss."""
        *moments, loss, own = total
        if own > _OWN * self._delta:
            return False
        limits = zip(moments, self.moment_limits, strict=True)
        # The limits are computed with a few roundings; the charges are rounded up already.
        orders = any(0 <= spent <= limit * (1 - 1e-13) for spent, limit in limits if limit > 0)
        # Ten times 0.1 is 1, although the number nearest to 0.1 lies above it.
        return orders or loss <= self._epsilon * (1 + 1e-12)

    def delta_advice(self, event: Event, total: Costs) -> str:
        """What to do where `event` only fails to fit `total` because of a δ of its own; "" otherwise."""
        own, limit = self.costs(event)[-1], _OWN * self._delta
        if total[-1] <= limit or not 0 < own < 1:
            return ""
        left = self.remaining_delta((*total[:-1], total[-1] - own))
        return (
            f"The event has a δ of its own, {own:.3g}, and of the account's δ an eighth is kept for such events, of "
            f"which {left:.3g} remains: choose δ ≤ {left:.3g} for it (--delta)"
            if left > 1e-6 * limit
            else f"The event has a δ of its own, {own:.3g}, and the eighth of the account's δ that is kept for such "
            "events is spent: use a mechanism with Gaussian or pure noise"
        )

    def remaining_delta(self, total: Costs) -> float:
        """What the events' own δ may still be in addition to `total`, together."""
        return round_down((_OWN * self._delta - total[-1]) * (1 - 1e-9))

    def remaining_beside(self, total: Costs) -> RemainingAmount:
        """The largest ρ, or without orders the largest pure ε, that would still fit at some order."""
        *moments, loss, own = total
        if own > _OWN * self._delta:
            return RemainingAmount(0.0, "ρ", 0.0)
        pure = max(0.0, self._epsilon - loss)
        if not self._orders:
            return RemainingAmount(pure, "ε", pure / self._epsilon)
        rows = list(zip(moments, self.moment_limits, self._orders, strict=True))
        amount = max(max(0.0, limit - spent) / (lam * (lam + 1)) for spent, limit, lam in rows)
        share = max((max(0.0, 1 - spent / limit) for spent, limit, _ in rows if limit > 0), default=0.0)
        return RemainingAmount(amount, "ρ", max(share, pure / self._epsilon))


def best_orders(epsilon: float, delta: float) -> tuple[float, ...]:
    """λ = order − 1 of the filter. Any numbers > 0 are sound; these decide how much of the budget can be used.

    First the best order for Gaussian noise: the zero of λK'(λ) − K(λ) + log δ + log(λ+1) for zCDP at this budget. Then
    two just above the least order that leaves room, best for small sampling rates and little noise; last a large one.
    """
    if delta == 0:
        return ()
    rho = max_rho(epsilon, delta / 2)
    gaussian = _crossing(lambda lam: lam**2 * rho + math.log(delta / 2) + math.log1p(lam))
    least = _crossing(lambda lam: lam * epsilon + math.log(delta / 4) + lam * math.log1p(1 / lam) + math.log1p(lam))
    return tuple(float(f"{lam:.6g}") for lam in (gaussian, 1.25 * least, 1.6 * least, 2.5 * gaussian))


def _crossing(growing: Callable[[float], float]) -> float:
    low, high = 1e-9, 1e12
    for _ in range(200):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if growing(middle) < 0 else (low, middle)
    return low


@lru_cache(maxsize=4096)
def _renyi_costs(event: Event, neighboring_relation: NeighboringRelation, orders: tuple[float, ...]) -> Costs:
    choices, truncated = bounding_events(event, neighboring_relation)
    if truncated:
        raise UnsupportedEvent(
            "a truncated sample must be charged to an account with the policy 'pld', got a filter. Reserve it there "
            "before the first charge, or sample without truncation."
        )
    prices = []
    for choice in choices:
        total: Costs = (0.0,) * (len(orders) + 2)
        for leaf, count in event_counts(choice).items():
            total = add_costs(total, _leaf_costs(leaf, neighboring_relation, orders), count)
        prices.append(total)
    return tuple(max(column) for column in zip(*prices, strict=True))


def _leaf_costs(event: Event, neighboring_relation: NeighboringRelation, orders: tuple[float, ...]) -> Costs:
    from sordino.accounting.api import epsilon

    own = 0.0
    if isinstance(event, RepeatAndSelect):
        event = _describe(event, neighboring_relation)
    if isinstance(event, ApproximateDP):
        # With probability δ everything is lost; otherwise the loss is that of a pure mechanism.
        event, own = PureDP(epsilon=event.epsilon), event.delta
    steps = flatten(event, neighboring_relation)
    if steps.non_private:
        return (math.inf,) * (len(orders) + 2)
    if steps.empty:
        return (*(0.0,) * (len(orders) + 1), own)
    loss = epsilon(event, 0.0, neighboring_relation=neighboring_relation).upper
    directions = renyi_directions(steps, neighboring_relation) if orders else ()
    return (*(_moment(directions, lam) for lam in orders), loss, own)


def _describe(event: RepeatAndSelect, neighboring_relation: NeighboringRelation) -> Event:
    """A selection of runs that have a δ of their own, as what it is at most; others as they are."""
    try:
        epsilon, delta = step_parameters(event, neighboring_relation)
    except UnsupportedEvent:
        return event
    return ApproximateDP(epsilon=epsilon, delta=delta) if delta > 0 else event


def _moment(directions: tuple, lam: float) -> float:
    """Upper bound on K(λ), worse direction; infinite where it can't be bounded."""
    try:
        sides = [evaluate_saddle_point(side, lam, certified=True) for side in directions]
    except AccountingError:
        return math.inf
    # No moment is negative; a bound that were so would give budget back.
    return max(0.0, *(math.nextafter(one.log_mgf + one.error, math.inf) for one in sides))


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
