"""The rules by which an account grants or refuses. Two filters, and the composition of what is fixed ahead.

A filter prices every event in numbers that add up, its currencies. Whether a total fits is decided without looking at
results, and holds whatever was chosen from them; the proofs are in ``docs/proofs/ledger.md``.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, Protocol

from sordino import checks
from sordino.definitions import NeighboringRelation, PrivacyUnit
from sordino.errors import AccountingError, InvalidArgument, LedgerError, UnsupportedEvent
from sordino.events import ApproximateDP, Composed, Event, NoOp, PureDP, RepeatAndSelect, SelfComposed, compose

if TYPE_CHECKING:
    from sordino.accounting import Interval

__all__ = [
    "AccountBudget",
    "Filter",
    "PLDPolicy",
    "POLICIES",
    "RDPPolicy",
    "RemainingAmount",
    "ZCDPPolicy",
    "add_costs",
    "compose_counts",
    "event_counts",
    "make_filter",
    "round_down",
    "subtract_counts",
    "total_cost",
]


# ----------------------------------------------------------------------------------------------------------------------
# What may be spent on one data set, as it is written in the ledger.
# ----------------------------------------------------------------------------------------------------------------------


POLICIES = ("renyi", "zcdp", "pld")


@dataclass(frozen=True, kw_only=True)
class AccountBudget:
    """The declared limit of an account.

    Args:
        epsilon: ε > 0.
        delta: δ in [0, 1); 0 only with the policy ``renyi``, for pure events.
        neighboring_relation: which data sets count as neighbors; every charge must be made for the same.
        privacy_unit: whose contribution is protected; every charge must be made for the same.
        policy: ``renyi`` or ``zcdp``, filters for events that are chosen as one goes; or ``pld``, exact composition of
            events that are all reserved before the first charge.
        orders: λ = Rényi order − 1 > 0 of the filter ``renyi``, fixed by the first declaration.
    """

    epsilon: float
    delta: float
    neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE
    privacy_unit: PrivacyUnit = PrivacyUnit.RECORD
    policy: str = "renyi"
    orders: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        checks.positive(epsilon=self.epsilon)
        checks.one_of(POLICIES, policy=self.policy, hint="See `sordino explain ledger`.")
        checks.probability(
            zero=self.policy == "renyi", one=False, delta=self.delta, hint="Choose one below 1 / number of records."
        )
        object.__setattr__(self, "neighboring_relation", NeighboringRelation(self.neighboring_relation))
        if self.privacy_unit not in list(PrivacyUnit):
            raise InvalidArgument(
                f"privacy_unit must be one of {', '.join(PrivacyUnit)}, got {self.privacy_unit!r}. Use PrivacyUnit."
            )
        object.__setattr__(self, "privacy_unit", PrivacyUnit(self.privacy_unit))
        object.__setattr__(self, "orders", tuple(checks.positive(orders=order) for order in self.orders))
        if self.orders and (self.policy != "renyi" or self.delta == 0):
            raise InvalidArgument(f"orders must be left out under the policy {self.policy!r} or without δ. Drop them.")
        if self.policy == "renyi" and not self.orders:
            object.__setattr__(self, "orders", _orders(self.epsilon, self.delta))

    @property
    def adaptive(self) -> bool:
        """Whether events may be chosen in the light of earlier results."""
        return self.policy != "pld"

    def check_relation_and_unit(
        self, neighboring_relation: NeighboringRelation | None, privacy_unit: PrivacyUnit | None
    ) -> None:
        """Refuse a charge that speaks of other neighbors or of another unit.

        Raises:
            InvalidArgument: they differ.
        """
        if (
            neighboring_relation is not None
            and NeighboringRelation(neighboring_relation) is not self.neighboring_relation
        ):
            raise InvalidArgument(
                f"neighboring_relation must be {self.neighboring_relation.value}, as the account was declared, got "
                f"{NeighboringRelation(neighboring_relation).value}: their costs can't be added. Train for the "
                f"account's relation, "
                "or declare an account of its own for each relation and state both."
            )
        if privacy_unit is not None and PrivacyUnit(privacy_unit) is not self.privacy_unit:
            raise InvalidArgument(
                f"privacy_unit must be {self.privacy_unit.value}, as the account was declared, got "
                f"{PrivacyUnit(privacy_unit).value}: their "
                "costs can't be added. Train for the account's unit, or declare an account of its own for each unit."
            )

    def to_dict(self) -> dict[str, object]:
        """As plain JSON types."""
        body = asdict(self)
        return {
            **body,
            "neighboring_relation": self.neighboring_relation.value,
            "privacy_unit": self.privacy_unit.value,
            "orders": list(self.orders),
        }

    @classmethod
    def from_dict(cls, body: object) -> "AccountBudget":
        """What `to_dict` wrote."""
        if not isinstance(body, dict) or set(body) != {item.name for item in fields(cls)}:
            raise LedgerError("the ledger's budget must have its own fields, got others. Run `sordino ledger verify`.")
        return cls(**{**body, "orders": tuple(body["orders"])})


def _orders(epsilon: float, delta: float) -> tuple[float, ...]:
    """λ = order − 1 of the filter. Any numbers > 0 are sound; these decide how much of the budget can be used.

    First the best order for Gaussian noise: the zero of λK'(λ) − K(λ) + log δ + log(λ+1) for zCDP at this budget. Then
    two just above the least order that leaves room, best for small sampling rates and little noise; last a large one.
    """
    if delta == 0:
        return ()
    from sordino.accounting import max_rho

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


# ----------------------------------------------------------------------------------------------------------------------
# Events as a bag of leaves: what was reserved, what was drawn from it, and what is left.
#
# A leaf is any event that is not a composition. Order and nesting of `Composed` and `SelfComposed` don't matter here.
# ----------------------------------------------------------------------------------------------------------------------


def event_counts(event: Event) -> dict[Event, int]:
    """The leaves of an event with their counts ≥ 1, in the order of their first appearance.

    Example:
        >>> from sordino.events import Gaussian
        >>> event_counts(SelfComposed(event=Gaussian(noise_multiplier=1.0), count=3))
        {Gaussian(noise_multiplier=1.0): 3}
    """
    found: dict[Event, int] = {}
    _collect(event, 1, found)
    return found


def _collect(event: Event, count: int, found: dict[Event, int]) -> None:
    if count == 0 or isinstance(event, NoOp):
        return
    if isinstance(event, SelfComposed):
        _collect(event.event, count * event.count, found)
    elif isinstance(event, Composed):
        for part in event.events:
            _collect(part, count, found)
    else:
        found[event] = found.get(event, 0) + count


def compose_counts(leaves: Mapping[Event, int]) -> Event:
    """One event with these leaves."""
    return compose([SelfComposed(event=event, count=count) for event, count in leaves.items()])


def subtract_counts(leaves: Mapping[Event, int], taken: Mapping[Event, int]) -> dict[Event, int] | None:
    """What is left of `leaves` after `taken`; None when something is taken that is not there."""
    if any(leaves.get(event, 0) < count for event, count in taken.items()):
        return None
    left = {event: count - taken.get(event, 0) for event, count in leaves.items()}
    return {event: count for event, count in left.items() if count}


# ----------------------------------------------------------------------------------------------------------------------
# The rules by which an account grants or refuses. Two filters, and the composition of what is fixed ahead.
# ----------------------------------------------------------------------------------------------------------------------


Costs = tuple[float, ...]


class RemainingAmount(NamedTuple):
    """An amount ≥ 0 in a currency, ``ε`` or ``ρ``, and its share of the whole in [0, 1]."""

    amount: float
    measure: str
    fraction: float


class Filter(Protocol):
    """An additive price for every event, and a rule for totals."""

    @property
    def num_measures(self) -> int:
        """How many numbers a price has."""
        ...

    def cost(self, event: Event) -> Costs:
        """Upper bounds that add up over events."""
        ...

    def fits(self, total: Costs) -> bool:
        """Whether a total is within the budget."""
        ...

    def remaining(self, total: Costs) -> RemainingAmount:
        """What is left of the budget beside a total."""
        ...


def make_filter(budget: AccountBudget) -> Filter | None:
    """The budget's filter; None under ``pld``."""
    if budget.policy == "renyi":
        return RDPPolicy(budget)
    return ZCDPPolicy(budget) if budget.policy == "zcdp" else None


def add_costs(one: Sequence[float], other: Sequence[float], times: int = 1) -> Costs:
    """One + times · other, rounded up."""
    return tuple(
        a if b == 0 else math.nextafter(a + math.nextafter(b * times, math.inf), math.inf)
        for a, b in zip(one, other, strict=True)
    )


def round_down(value: float) -> float:
    """Three significant digits, never more than `value`; 0 for what is not above it."""
    if value <= 0:
        return 0.0
    scale = 10.0 ** (2 - math.floor(math.log10(value)))
    return math.floor(value * scale * (1 + 1e-12)) / scale


def total_cost(rule: Filter, leaves: Mapping[Event, int]) -> Costs:
    """The price of a bag of leaves."""
    total: Costs = (0.0,) * rule.num_measures
    for event, count in leaves.items():
        total = add_costs(total, rule.cost(event), count)
    return total


class ZCDPPolicy:
    """Σ ρ ≤ the largest ρ that is (ε, δ)-private: the zCDP filter.

    Guarantee:
        Whatever was chosen from earlier results, all charges together are (ε, δ)-private.

    References:
        Feldman and Zrnic 2021, theorem 4.3; Whitehouse et al. 2023, theorem 1.
    """

    num_measures = 1

    def __init__(self, budget: AccountBudget) -> None:
        from sordino.accounting import max_rho

        self._budget = budget
        self.limit = max_rho(budget.epsilon, budget.delta)

    def cost(self, event: Event) -> Costs:
        """The event's ρ; `UnsupportedEvent` for events without one."""
        from sordino.accounting import zcdp_rho

        return (zcdp_rho(event, self._budget.neighboring_relation),)

    def fits(self, total: Costs) -> bool:
        """Whether ρ is at most the limit."""
        return total[0] <= self.limit

    def remaining(self, total: Costs) -> RemainingAmount:
        """The ρ that may still be spent."""
        rest = max(0.0, self.limit - total[0])
        return RemainingAmount(rest, "ρ", rest / self.limit)


# The share of δ that is kept for events that have a δ of their own.
_OWN = 1 / 8


def _shares(orders: int) -> tuple[float, ...]:
    """Shares of δ, 7/8 together: half for the first order, a quarter for the second, the rest in equal parts."""
    if orders < 3:
        return ((), (7 / 8,), (1 / 2, 3 / 8))[orders]
    return (1 / 2, 1 / 4, *(1 / 8 / (orders - 2) for _ in range(orders - 2)))


class RDPPolicy:
    """One of a few Rényi orders that were fixed in advance, or the pure losses, must stay within the budget.

    Guarantee:
        Whatever was chosen from earlier results, all charges together are (ε, δ)-private, as long as the events' own
        δ add up to at most δ/8 and, for some λ, Σ K(λ) ≤ λε + log(wδ) + λ log(1 + 1/λ) + log(1 + λ), where w is the
        order's share; or the pure losses add up to at most ε. Theorem 2 of ``docs/proofs/ledger.md``.

    The prices are K(λ) for each order, the largest loss, and the event's own δ.
    """

    def __init__(self, budget: AccountBudget) -> None:
        self._budget = budget
        self._orders = budget.orders
        self._shares = _shares(len(self._orders))
        self.num_measures = len(self._orders) + 2

    def cost(self, event: Event) -> Costs:
        """K at every order, the largest loss, and the own δ."""
        return _renyi_price(event, self._budget.neighboring_relation, self._orders)

    def room(self, epsilon: float) -> Costs:
        """The limits of K at a budget ε."""
        delta = self._budget.delta
        return tuple(
            lam * epsilon + math.log(share * delta) + lam * math.log1p(1 / lam) + math.log1p(lam)
            for lam, share in zip(self._orders, self._shares, strict=True)
        )

    def fits(self, total: Costs) -> bool:
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

    def delta_advice(self, event: Event, total: Costs) -> str:
        """What to do where `event` only fails to fit `total` because of a δ of its own; "" otherwise."""
        own, limit = self.cost(event)[-1], _OWN * self._budget.delta
        if total[-1] <= limit or not 0 < own < 1:
            return ""
        left = round_down((limit - (total[-1] - own)) * (1 - 1e-9))
        return (
            f"The event has a δ of its own, {own:.3g}, and of the account's δ an eighth is kept for such events, of "
            f"which {left:.3g} remains: choose δ ≤ {left:.3g} for it (--delta)"
            if left > 1e-6 * limit
            else f"The event has a δ of its own, {own:.3g}, and the eighth of the account's δ that is kept for such "
            "events is spent: use a mechanism with Gaussian or pure noise"
        )

    def remaining(self, total: Costs) -> RemainingAmount:
        """The largest ρ, or without orders the largest pure ε, that would still fit at some order."""
        *moments, loss, own = total
        budget = self._budget
        if own > _OWN * budget.delta:
            return RemainingAmount(0.0, "ρ", 0.0)
        pure = max(0.0, budget.epsilon - loss)
        if not self._orders:
            return RemainingAmount(pure, "ε", pure / budget.epsilon)
        rows = list(zip(moments, self.room(budget.epsilon), self._orders, strict=True))
        amount = max(max(0.0, limit - spent) / (lam * (lam + 1)) for spent, limit, lam in rows)
        share = max((max(0.0, 1 - spent / limit) for spent, limit, _ in rows if limit > 0), default=0.0)
        return RemainingAmount(amount, "ρ", max(share, pure / budget.epsilon))


@lru_cache(maxsize=4096)
def _renyi_price(event: Event, neighboring_relation: NeighboringRelation, orders: tuple[float, ...]) -> Costs:
    from sordino.accounting.base import bounding_events

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
            total = add_costs(total, _leaf_price(leaf, neighboring_relation, orders), count)
        prices.append(total)
    return tuple(max(column) for column in zip(*prices, strict=True))


def _leaf_price(event: Event, neighboring_relation: NeighboringRelation, orders: tuple[float, ...]) -> Costs:
    from sordino.accounting import epsilon
    from sordino.accounting.base import flatten
    from sordino.accounting.rdp import renyi_directions

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
    from sordino.accounting.composition_theorems import step_parameters

    try:
        epsilon, delta = step_parameters(event, neighboring_relation)
    except UnsupportedEvent:
        return event
    return ApproximateDP(epsilon=epsilon, delta=delta) if delta > 0 else event


def _moment(directions: tuple, lam: float) -> float:
    """Upper bound on K(λ), worse direction; infinite where it can't be bounded."""
    from sordino.accounting.mgf import evaluate_saddle_point

    try:
        sides = [evaluate_saddle_point(side, lam, certified=True) for side in directions]
    except AccountingError:
        return math.inf
    # No moment is negative; a bound that were so would give budget back.
    return max(0.0, *(math.nextafter(one.log_mgf + one.error, math.inf) for one in sides))


@dataclass(frozen=True, kw_only=True)
class PLDPolicy:
    """All events of an account together, fixed before the first charge: the policy ``pld``.

    Guarantee:
        In whatever order the events are drawn, and whatever is left out, in the light of earlier results: all charges
        together are (ε, δ)-private. Theorem 3 of ``docs/proofs/ledger.md``.
    """

    budget: AccountBudget
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

        return epsilon(
            compose_counts(self.leaves), self.budget.delta, neighboring_relation=self.budget.neighboring_relation
        )

    def remaining(self) -> RemainingAmount:
        """The ε that is left: what is added composes with the rest, so more than that much may fit."""
        rest = max(0.0, self.budget.epsilon - self.epsilon())
        return RemainingAmount(rest, "ε", rest / self.budget.epsilon)
