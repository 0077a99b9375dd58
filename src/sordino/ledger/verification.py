"""Reading an account again from its first line (floor 2): chain, totals, reservations, budget."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from sordino.errors import LedgerError, SordinoError
from sordino.events import Event, from_dict
from sordino.ledger.budget import Budget
from sordino.ledger.entries import FIRST, Entry
from sordino.ledger.leaves import leaves_of, without
from sordino.ledger.policies import Composition, Filter, Prices, added, filter_of, priced
from sordino.ledger.store import reading

__all__ = ["verified"]


def verified(url: str, account: str) -> list[str]:
    """The digests of an account's lines, in order, once all of them were checked.

    Raises:
        LedgerError: a line was changed, put in or taken out, or more was charged than the budget allowed.
    """
    with reading(url, account) as page:
        entries = page.entries()
    previous, replay = FIRST, _Replay()
    for number, entry in enumerate(entries, start=1):
        if entry.seq != number or entry.previous != previous or entry.seal() != entry.digest:
            raise _broken(entry, "does not follow from the one before: it, or that one, was changed or taken out")
        try:
            for fault in replay.faults(entry):
                raise _broken(entry, fault)
        except LedgerError:
            raise
        except (SordinoError, AssertionError, KeyError, TypeError, ValueError) as error:
            raise _broken(entry, "can't be read") from error
        previous = entry.digest
    return [entry.digest for entry in entries]


def _broken(entry: Entry, fault: str) -> LedgerError:
    return LedgerError(
        f"line {entry.seq} of account {entry.account!r} {fault}. Restore the ledger from a copy; what it says now is "
        "not to be trusted."
    )


@dataclass
class _Replay:
    """The account's state, computed from the events alone."""

    budget: Budget | None = None
    budget_at: int = 0
    totals: Prices = ()
    touched: bool = False
    charged: dict[Event, int] = field(default_factory=dict)
    open: dict[str, dict[Event, int]] = field(default_factory=dict)

    def faults(self, entry: Entry) -> Iterator[str]:
        """What is wrong with the next line; after that the state holds it."""
        body = entry.contents
        if (entry.kind == "declare") != (entry.seq == 1):
            yield "declares the account in the wrong place"
        if entry.kind in {"declare", "budget"}:
            self._declare(Budget.from_dict(body["budget"]), entry.seq)
        elif entry.kind in {"charge", "reserve", "release"}:
            yield from self._move(entry, leaves_of(entry.event))
        else:
            yield f"is of an unknown kind {entry.kind!r}"
        stored = body["totals"]
        assert isinstance(stored, list)
        if tuple(float(value) for value in stored) != self.totals or body["touched"] is not self.touched:
            yield "states other totals than its events add up to"
        if body["budget_at"] != self.budget_at:
            yield "names another budget than the one that is in force"
        left = body.get("left")
        if left is not None and leaves_of(from_dict(left)) != self.open.get(entry.reservation, {}):
            yield "states that something else is left of its reservation"
        # What is drawn from a reservation was granted with it; price by price it only gains the rounding of sums.
        granted = entry.kind == "release" or (entry.kind == "charge" and entry.reservation)
        if not granted and not self._fits():
            yield "goes beyond the budget"

    def _declare(self, budget: Budget, seq: int) -> None:
        self.budget, self.budget_at = budget, seq
        rule = filter_of(budget)
        if rule is not None and not self.totals:
            self.totals = (0.0,) * rule.currencies

    def _move(self, entry: Entry, leaves: dict[Event, int]) -> Iterator[str]:
        name = entry.reservation
        if entry.kind == "reserve":
            if name in self.open:
                yield "reserves under a name that was used"
            yield from self._late(leaves)
            self.open[name] = leaves
            return
        if name:
            left = without(self.open.get(name, {}), leaves)
            if left is None:
                yield "takes more from its reservation than was left"
            self.open[name] = left or {}
        elif entry.kind == "charge":
            yield from self._late(leaves)
        if entry.kind == "charge":
            rule = self._rule()
            if rule is not None:
                self.totals = added(self.totals, priced(rule, leaves))
            for event, count in leaves.items():
                self.charged[event] = self.charged.get(event, 0) + count
            self.touched = self.touched or bool(leaves)

    def _late(self, leaves: dict[Event, int]) -> Iterator[str]:
        if self.budget is not None and not self.budget.adaptive and self.touched and leaves:
            yield "adds an event after the first charge"

    def _rule(self) -> Filter | None:
        assert self.budget is not None
        return filter_of(self.budget)

    def _fits(self) -> bool:
        rule = self._rule()
        if rule is not None:
            total = self.totals
            for left in self.open.values():
                total = added(total, priced(rule, left))
            return rule.fits(total)
        assert self.budget is not None
        everything = dict(self.charged)
        for left in self.open.values():
            for event, count in left.items():
                everything[event] = everything.get(event, 0) + count
        if self.touched and self._known == everything:
            return True
        self._known = everything
        return not everything or Composition(budget=self.budget, leaves=everything).fits()

    _known: dict[Event, int] | None = None
