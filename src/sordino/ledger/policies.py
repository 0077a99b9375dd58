"""The rules by which an account grants or refuses (floor 2). Two filters, and the composition of what is fixed ahead.

A filter prices every event in numbers that add up, its currencies. Whether a total fits is decided without looking at
results, and holds whatever was chosen from them; the proofs are in ``docs/proofs/ledger.md``.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, Protocol

from sordino.definitions import NeighboringRelation
from sordino.errors import AccountingError, UnsupportedEvent
from sordino.events import ApproximateDP, Event, PureDP, Selection
from sordino.ledger.budget import Budget
from sordino.ledger.leaves import leaves_of, packed

if TYPE_CHECKING:
    from sordino.accounting import Interval

__all__ = ["Composition", "Filter", "Left", "RenyiOrders", "ZeroConcentratedSum", "added", "filter_of", "priced"]

Prices = tuple[float, ...]


class Left(NamedTuple):
    """An amount ≥ 0 in a currency, ``ε`` or ``ρ``, and its share of the whole in [0, 1]."""

    amount: float
    currency: str
    share: float


class Filter(Protocol):
    """An additive price for every event, and a rule for totals."""

    @property
    def currencies(self) -> int:
        """How many numbers a price has."""
        ...

    def price(self, event: Event) -> Prices:
        """Upper bounds that add up over events."""
        ...

    def fits(self, total: Prices) -> bool:
        """Whether a total is within the budget."""
        ...

    def left(self, total: Prices) -> Left:
        """What is left of the budget beside a total."""
        ...


def filter_of(budget: Budget) -> Filter | None:
    """The budget's filter; None under ``pld``."""
    if budget.policy == "renyi":
        return RenyiOrders(budget)
    return ZeroConcentratedSum(budget) if budget.policy == "zcdp" else None


def added(one: Sequence[float], other: Sequence[float], times: int = 1) -> Prices:
    """One + times · other, rounded up."""
    return tuple(
        a if b == 0 else math.nextafter(a + math.nextafter(b * times, math.inf), math.inf)
        for a, b in zip(one, other, strict=True)
    )


def priced(rule: Filter, leaves: Mapping[Event, int]) -> Prices:
    """The price of a bag of leaves."""
    total: Prices = (0.0,) * rule.currencies
    for event, count in leaves.items():
        total = added(total, rule.price(event), count)
    return total


class ZeroConcentratedSum:
    """Σ ρ ≤ the largest ρ that is (ε, δ)-private: the zCDP filter.

    Guarantee:
        Whatever was chosen from earlier results, all charges together are (ε, δ)-private.

    References:
        Feldman and Zrnic 2021, theorem 4.3; Whitehouse et al. 2023, theorem 1.
    """

    currencies = 1

    def __init__(self, budget: Budget) -> None:
        from sordino.accounting import largest_rho

        self._budget = budget
        self.limit = largest_rho(budget.epsilon, budget.delta)

    def price(self, event: Event) -> Prices:
        """The event's ρ; `UnsupportedEvent` for events without one."""
        from sordino.accounting import concentrated_rho

        return (concentrated_rho(event, self._budget.relation),)

    def fits(self, total: Prices) -> bool:
        """Whether ρ is at most the limit."""
        return total[0] <= self.limit

    def left(self, total: Prices) -> Left:
        """The ρ that may still be spent."""
        rest = max(0.0, self.limit - total[0])
        return Left(rest, "ρ", rest / self.limit)


# The share of δ that is kept for events that have a δ of their own.
_OWN = 1 / 8


def _shares(orders: int) -> tuple[float, ...]:
    """Shares of δ, 7/8 together: half for the first order, a quarter for the second, the rest in equal parts."""
    if orders < 3:
        return ((), (7 / 8,), (1 / 2, 3 / 8))[orders]
    return (1 / 2, 1 / 4, *(1 / 8 / (orders - 2) for _ in range(orders - 2)))


class RenyiOrders:
    """One of a few Rényi orders that were fixed in advance, or the pure losses, must stay within the budget.

    Guarantee:
        Whatever was chosen from earlier results, all charges together are (ε, δ)-private, as long as the events' own
        δ add up to at most δ/8 and, for some λ, Σ K(λ) ≤ λε + log(wδ) + λ log(1 + 1/λ) + log(1 + λ), where w is the
        order's share; or the pure losses add up to at most ε. Theorem 2 of ``docs/proofs/ledger.md``.

    The prices are K(λ) for each order, the largest loss, and the event's own δ.
    """

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._orders = budget.orders
        self._shares = _shares(len(self._orders))
        self.currencies = len(self._orders) + 2

    def price(self, event: Event) -> Prices:
        """K at every order, the largest loss, and the own δ."""
        return _renyi_price(event, self._budget.relation, self._orders)

    def room(self, epsilon: float) -> Prices:
        """The limits of K at a budget ε."""
        delta = self._budget.delta
        return tuple(
            lam * epsilon + math.log(share * delta) + lam * math.log1p(1 / lam) + math.log1p(lam)
            for lam, share in zip(self._orders, self._shares, strict=True)
        )

    def fits(self, total: Prices) -> bool:
        """Whether the own δ fit, and so does one order or the largest loss."""
        *moments, loss, own = total
        budget = self._budget
        if own > _OWN * budget.delta:
            return False
        room = self.room(budget.epsilon)
        # The room is computed with a few roundings; the charges are rounded up already.
        orders = any(0 <= spent <= limit * (1 - 1e-13) for spent, limit in zip(moments, room, strict=True) if limit > 0)
        # Ten times 0.1 is 1, although the number nearest to 0.1 lies above it.
        return orders or loss <= budget.epsilon * (1 + 1e-12)

    def left(self, total: Prices) -> Left:
        """The largest ρ, or without orders the largest pure ε, that would still fit at some order."""
        *moments, loss, own = total
        budget = self._budget
        if own > _OWN * budget.delta:
            return Left(0.0, "ρ", 0.0)
        pure = max(0.0, budget.epsilon - loss)
        if not self._orders:
            return Left(pure, "ε", pure / budget.epsilon)
        rows = list(zip(moments, self.room(budget.epsilon), self._orders, strict=True))
        amount = max(max(0.0, limit - spent) / (lam * (lam + 1)) for spent, limit, lam in rows)
        share = max((max(0.0, 1 - spent / limit) for spent, limit, _ in rows if limit > 0), default=0.0)
        return Left(amount, "ρ", max(share, pure / budget.epsilon))


@lru_cache(maxsize=4096)
def _renyi_price(event: Event, relation: NeighboringRelation, orders: tuple[float, ...]) -> Prices:
    from sordino.accounting.composition import alternatives

    choices, truncated = alternatives(event, relation)
    if truncated:
        raise UnsupportedEvent(
            "a truncated sample must be charged to an account with the policy 'pld', got a filter. Reserve it there "
            "before the first charge, or sample without truncation."
        )
    prices = []
    for choice in choices:
        total: Prices = (0.0,) * (len(orders) + 2)
        for leaf, count in leaves_of(choice).items():
            total = added(total, _leaf_price(leaf, relation, orders), count)
        prices.append(total)
    return tuple(max(column) for column in zip(*prices, strict=True))


def _leaf_price(event: Event, relation: NeighboringRelation, orders: tuple[float, ...]) -> Prices:
    from sordino.accounting import epsilon
    from sordino.accounting.composition import flatten
    from sordino.accounting.renyi_steps import renyi_directions

    own = 0.0
    if isinstance(event, Selection):
        event = _told(event, relation)
    if isinstance(event, ApproximateDP):
        # With probability δ everything is lost; otherwise the loss is that of a pure mechanism.
        event, own = PureDP(epsilon=event.epsilon), event.delta
    steps = flatten(event, relation)
    if steps.unprotected:
        return (math.inf,) * (len(orders) + 2)
    if steps.empty:
        return (*(0.0,) * (len(orders) + 1), own)
    loss = epsilon(event, 0.0, relation=relation).upper
    directions = renyi_directions(steps, relation) if orders else ()
    return (*(_moment(directions, lam) for lam in orders), loss, own)


def _told(event: Selection, relation: NeighboringRelation) -> Event:
    """A selection of runs that have a δ of their own, as what it is at most; others as they are."""
    from sordino.accounting.composition_theorems import step_parameters

    try:
        epsilon, delta = step_parameters(event, relation)
    except UnsupportedEvent:
        return event
    return ApproximateDP(epsilon=epsilon, delta=delta) if delta > 0 else event


def _moment(directions: tuple, lam: float) -> float:
    """Upper bound on K(λ), worse direction; infinite where it can't be bounded."""
    from sordino.accounting.saddle import saddle

    try:
        sides = [saddle(side, lam, certified=True) for side in directions]
    except AccountingError:
        return math.inf
    # No moment is negative; a bound that were so would give budget back.
    return max(0.0, *(math.nextafter(one.log_mgf + one.error, math.inf) for one in sides))


@dataclass(frozen=True, kw_only=True)
class Composition:
    """All events of an account together, fixed before the first charge: the policy ``pld``.

    Guarantee:
        In whatever order the events are drawn, and whatever is left out, in the light of earlier results: all charges
        together are (ε, δ)-private. Theorem 3 of ``docs/proofs/ledger.md``.
    """

    budget: Budget
    leaves: Mapping[Event, int]

    def fits(self) -> bool:
        """Whether ε of everything is within the budget."""
        return self.epsilon() <= self.budget.epsilon

    def epsilon(self) -> float:
        """ε of everything at the account's δ."""
        return self.interval().upper

    def interval(self) -> "Interval":
        """The interval that contains ε, with the accountant's name."""
        from sordino.accounting import epsilon

        return epsilon(packed(self.leaves), self.budget.delta, relation=self.budget.relation)

    def left(self) -> Left:
        """The ε that is left: what is added composes with the rest, so more than that much may fit."""
        rest = max(0.0, self.budget.epsilon - self.epsilon())
        return Left(rest, "ε", rest / self.budget.epsilon)
