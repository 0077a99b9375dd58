"""An account's state inside a transaction (floor 2): read from its newest lines, changed by adding one."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

from sordino.errors import InvalidArgument, LedgerError
from sordino.events import Event, from_dict, to_dict
from sordino.ledger.budget import Budget
from sordino.ledger.entries import Entry
from sordino.ledger.leaves import leaves_of, packed
from sordino.ledger.policies import Composition, Filter, Left, Prices, added, filter_of, priced
from sordino.ledger.store import Page

__all__ = ["Balance", "body_of"]

Leaves = dict[Event, int]


@dataclass(frozen=True, kw_only=True)
class Balance:
    """What an account holds as of its line `last`."""

    page: Page
    last: Entry
    budget: Budget
    budget_at: int
    totals: Prices
    touched: bool

    @classmethod
    def of(cls, page: Page) -> "Balance":
        """The account's state.

        Raises:
            InvalidArgument: there is no such account.
        """
        last = page.last()
        if last is None:
            raise InvalidArgument(
                f"account must be declared, got {page.account!r}. Run `sordino ledger declare`, or ledger.declare(…)."
            )
        body = last.contents
        at, totals = body["budget_at"], body["totals"]
        assert isinstance(at, int)
        assert isinstance(totals, list)
        declared = page.at(at)
        if declared is None:
            raise LedgerError("the ledger must hold every account's budget, got one without. Verify the ledger.")
        budget = Budget.from_dict(declared.contents["budget"])
        return cls(
            page=page,
            last=last,
            budget=budget,
            budget_at=at,
            totals=tuple(float(value) for value in totals),
            touched=bool(body["touched"]),
        )

    def under(self, budget: Budget) -> "Balance":
        """The same state under another budget."""
        return replace(self, budget=budget)

    # --- asking --------------------------------------------------------------------------------------------------

    def open(self) -> dict[str, Leaves]:
        """Open reservations and what is left of each."""
        left = {entry.reservation: _left(entry) for entry in self.page.reservations()}
        return {name: leaves for name, leaves in left.items() if leaves}

    def left(self, reservation: str) -> tuple[Leaves, Entry]:
        """What is left of a reservation, and its newest line."""
        newest = self.page.last_of(reservation)
        if newest is None:
            raise InvalidArgument(f"reservation must be one of this account's, got {reservation!r}. See its history.")
        return _left(newest), newest

    def charged(self) -> Leaves:
        """All that was charged."""
        return _merged([leaves_of(entry.event) for entry in self.page.entries("charge")])

    def committed(self, rule: Filter) -> Prices:
        """What is charged or reserved, in the filter's currencies."""
        total = self.totals
        for left in self.open().values():
            total = added(total, priced(rule, left))
        return total

    def admits(self, event: Event) -> bool:
        """Whether `event` fits beside what is charged and reserved."""
        rule = filter_of(self.budget)
        if rule is not None:
            return rule.fits(added(self.committed(rule), priced(rule, leaves_of(event))))
        everything = _merged([self.charged(), *self.open().values(), leaves_of(event)])
        return not everything or Composition(budget=self.budget, leaves=everything).fits()

    def remaining(self) -> Left:
        """What is left beside what is charged and reserved."""
        rule = filter_of(self.budget)
        if rule is not None:
            return rule.left(self.committed(rule))
        leaves = _merged([self.charged(), *self.open().values()])
        return Composition(budget=self.budget, leaves=leaves).left()

    # --- writing -------------------------------------------------------------------------------------------------

    def charge(self, event: Event, *, note: str, run: str, reservation: str = "", left: Leaves | None = None) -> Entry:
        """Write a charge. Whether it fits was asked before."""
        body = self._body(event, self.after(event), touched=self.touched or bool(leaves_of(event)), left=left)
        return self._append("charge", body, note=note, run=run, reservation=reservation)

    def after(self, event: Event) -> Prices:
        """The totals once `event` is charged."""
        rule = filter_of(self.budget)
        return self.totals if rule is None else added(self.totals, priced(rule, leaves_of(event)))

    def reserve(self, event: Event, *, reservation: str, note: str, run: str) -> Entry:
        """Write a reservation. Whether it fits was asked before."""
        body = self._body(event, self.totals, touched=self.touched, left=leaves_of(event))
        return self._append("reserve", body, note=note, run=run, reservation=reservation)

    def release(self, left: Leaves, *, reservation: str, note: str, run: str) -> Entry:
        """Write that the rest of a reservation is given back."""
        body = self._body(packed(left), self.totals, touched=self.touched, left={})
        return self._append("release", body, note=note, run=run, reservation=reservation)

    def change(self, budget: Budget, *, note: str) -> Entry:
        """Write another budget."""
        body = body_of(
            budget=budget, budget_at=self.last.seq + 1, totals=self.totals, touched=self.touched, event=None, left=None
        )
        return self._append("budget", body, note=note, run="", reservation="")

    def _body(self, event: Event, totals: Prices, *, touched: bool, left: Leaves | None) -> str:
        return body_of(budget=None, budget_at=self.budget_at, totals=totals, touched=touched, event=event, left=left)

    def _append(self, kind: str, body: str, *, note: str, run: str, reservation: str) -> Entry:
        return self.page.append(self.last, kind=kind, body=body, note=note, run=run, reservation=reservation)


def body_of(
    *,
    budget: Budget | None,
    budget_at: int,
    totals: Prices,
    touched: bool,
    event: Event | None,
    left: Mapping[Event, int] | None,
) -> str:
    """The JSON of a line."""
    body: dict[str, object] = {"budget_at": budget_at, "totals": _numbers(totals), "touched": touched}
    if budget is not None:
        body["budget"] = budget.to_dict()
    if event is not None:
        body["event"] = to_dict(event)
    if left is not None:
        body["left"] = to_dict(packed(left))
    return json.dumps(body, sort_keys=True, allow_nan=False)


def _numbers(totals: Prices) -> list[float | str]:
    # JSON has no ∞: an order at which an event has no finite price stays out of use.
    return ["inf" if value == float("inf") else value for value in totals]


def _left(entry: Entry) -> Leaves:
    return leaves_of(from_dict(entry.contents["left"]))


def _merged(bags: list[Leaves]) -> Leaves:
    total: Leaves = {}
    for bag in bags:
        for event, count in bag.items():
            total[event] = total.get(event, 0) + count
    return total
