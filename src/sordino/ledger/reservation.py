"""A part of an account that is set aside for a planned run (floor 2)."""

from dataclasses import dataclass, replace
from typing import Self

from sordino.definitions import NeighboringRelation, PrivacyUnit
from sordino.errors import BudgetExceeded
from sordino.events import Event
from sordino.ledger.balance import Balance
from sordino.ledger.entries import Entry
from sordino.ledger.leaves import leaves_of, packed, without
from sordino.ledger.place import masked
from sordino.ledger.store import reading, writing

__all__ = ["Charge", "Reservation", "charge_of"]


@dataclass(frozen=True, kw_only=True)
class Charge:
    """The receipt of a charge.

    Args:
        account: whose.
        seq: number of its line in the account.
        event: what was charged.
        at: when, UTC.
        digest: of its line; note it down to show later that the line was not changed.
    """

    account: str
    seq: int
    event: Event
    at: str
    digest: str


def charge_of(entry: Entry) -> Charge:
    """The receipt of a line."""
    return Charge(account=entry.account, seq=entry.seq, event=entry.event, at=entry.at, digest=entry.digest)


@dataclass(frozen=True)
class Reservation:
    """A handle on a reservation: picklable, and accepted wherever an account is, by ``ledger=``.

    As a context manager it gives back at the end what was not drawn. A process that is killed gives nothing back: the
    rest stays reserved until `close`, or ``sordino ledger release``. What was drawn stays charged in any case.

    Guarantee: only leaves of the reserved event can be drawn, each at most as often as it was reserved; all draws were
    within the account's budget from the start.

    Args:
        url: of the ledger.
        account: its account.
        name: of the reservation.
        closes: whether the end of a ``with`` block gives the rest back.
    """

    url: str
    account: str
    name: str
    closes: bool = True

    def __repr__(self) -> str:
        return f"Reservation(url={masked(self.url)!r}, account={self.account!r}, name={self.name!r})"

    def charge(
        self,
        event: Event,
        *,
        note: str = "",
        run: str = "",
        relation: NeighboringRelation | None = None,
        unit: PrivacyUnit | None = None,
    ) -> Charge:
        """Draw `event` from the reservation, before the data are read.

        Args:
            event: leaves of the reserved event that were not drawn yet.
            note: what for; the reservation's own note when empty.
            run: the run's name; the reservation's own when empty.
            relation: for which `event` holds; the account's when None.
            unit: for which `event` holds; the account's when None.

        Raises:
            BudgetExceeded: that was not reserved, was drawn already, or was given back.
            InvalidArgument: `relation` or `unit` are not the account's.
        """
        with writing(self.url, self.account) as page:
            balance = Balance.of(page)
            balance.budget.agree(relation, unit)
            left, newest = balance.left(self.name)
            after = self._after(left, event)
            entry = balance.charge(
                event, note=note or newest.note, run=run or newest.run, reservation=self.name, left=after
            )
        return charge_of(entry)

    def reserve(
        self,
        event: Event,
        *,
        note: str = "",  # noqa: ARG002
        run: str = "",  # noqa: ARG002
        relation: NeighboringRelation | None = None,
        unit: PrivacyUnit | None = None,
    ) -> "Reservation":
        """A handle on this very reservation for a part of its plan, once `event` is known to be left in it.

        Closing the part gives nothing back: the whole does.
        """
        self.check(event, relation=relation, unit=unit)
        return replace(self, closes=False)

    def check(
        self, event: Event, *, relation: NeighboringRelation | None = None, unit: PrivacyUnit | None = None
    ) -> None:
        """Raise what `charge` would raise now, and write nothing."""
        with reading(self.url, self.account) as page:
            balance = Balance.of(page)
            balance.budget.agree(relation, unit)
            self._after(balance.left(self.name)[0], event)

    def left(self) -> Event:
        """What can still be drawn."""
        with reading(self.url, self.account) as page:
            return packed(Balance.of(page).left(self.name)[0])

    def close(self) -> None:
        """Give back what was not drawn. A second time does nothing."""
        with writing(self.url, self.account) as page:
            balance = Balance.of(page)
            left, newest = balance.left(self.name)
            if left:
                balance.release(left, reservation=self.name, note=newest.note, run=newest.run)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.closes:
            self.close()

    def _after(self, left: dict[Event, int], event: Event) -> dict[Event, int]:
        after = without(left, leaves_of(event))
        if after is None:
            raise BudgetExceeded(
                f"the charge must be a part of what is left of reservation {self.name}, got something else or more. "
                "Nothing was charged and no record was read. Reserve what the run will do, or charge the account."
            )
        return after
