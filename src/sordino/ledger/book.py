"""The ledger (floor 2): one file or database that holds the accounts of all data sets."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from sordino.definitions import NeighboringRelation, PrivacyUnit
from sordino.errors import InvalidArgument, LedgerError
from sordino.events import Nothing
from sordino.ledger import store
from sordino.ledger.account import Account
from sordino.ledger.balance import Balance, body_of
from sordino.ledger.budget import Budget
from sordino.ledger.place import masked, url_of
from sordino.ledger.policies import filter_of
from sordino.ledger.verification import verified

__all__ = ["Ledger"]


class Ledger:
    """Who spent what on which data set: append-only accounts, each with a budget that all processes share.

    Guarantee: of any number of processes that charge one account at the same time, exactly as many succeed as fit its
    budget. A charge is on the disk before `charge` returns; a process that dies before leaves nothing behind.

    Args:
        place: a file on a local disk (SQLite), or a URL ``postgresql://user@host/database``. The file is made by the
            first `declare`.

    Raises:
        InvalidArgument: another database, or a file on a network file system.

    Example:
        >>> import tempfile
        >>> from sordino.events import Gaussian
        >>> folder = tempfile.TemporaryDirectory()
        >>> ledger = Ledger(folder.name + "/privacy.db")
        >>> account = ledger.declare("adult", epsilon=3.0, delta=1e-5)
        >>> ledger.accounts(), account.spent().epsilon
        (['adult'], 0.0)
        >>> folder.cleanup()
    """

    def __init__(self, place: str | Path) -> None:
        self._url = url_of(place)

    def __repr__(self) -> str:
        return f"Ledger({masked(self._url)!r})"

    @property
    def url(self) -> str:
        """Where the ledger lies; with the password, if it has one."""
        return self._url

    def create(self) -> None:
        """Make the file or the table, unless it is there."""
        store.create(self._url)

    def declare(
        self,
        name: str,
        *,
        epsilon: float,
        delta: float,
        relation: NeighboringRelation | str = NeighboringRelation.ADD_OR_REMOVE_ONE,
        unit: PrivacyUnit | str = PrivacyUnit.EXAMPLE,
        policy: str = "renyi",
        orders: Sequence[float] = (),
        note: str = "",
    ) -> Account:
        """Declare a data set's budget, once. The same declaration again returns the account that is there.

        Args:
            name: of the data set.
            epsilon: ε > 0 of everything that will ever be charged, together.
            delta: δ in (0, 1), or 0 with the policy ``renyi`` when all events are pure.
            relation: which data sets count as neighbours.
            unit: whose contribution is protected.
            policy: ``renyi`` (any events, chosen as you go), ``zcdp`` (events with a ρ, chosen as you go), or ``pld``
                (tightest; all events reserved before the first charge).
            orders: λ = order − 1 > 0 of the filter ``renyi``, the most important first; by the budget when empty.
            note: kept with the declaration.

        Raises:
            InvalidArgument: a value out of its range, or the account exists with another budget.
        """
        if not name.strip() or name != name.strip():
            raise InvalidArgument(f"name must be some characters without space around, got {name!r}. Name the data.")
        budget = Budget(
            epsilon=epsilon,
            delta=delta,
            relation=NeighboringRelation(relation),
            unit=PrivacyUnit(unit) if unit in list(PrivacyUnit) else unit,  # pyright: ignore[reportArgumentType]
            policy=policy,
            orders=tuple(orders),
        )
        self.create()
        with store.writing(self._url, name) as page:
            last = page.last()
            if last is None:
                rule = filter_of(budget)
                totals = () if rule is None else (0.0,) * rule.currencies
                body = body_of(budget=budget, budget_at=1, totals=totals, touched=False, event=Nothing(), left=None)
                page.append(None, kind="declare", body=body, note=note)
            elif Balance.of(page).budget != budget:
                raise InvalidArgument(
                    f"account {name!r} must be declared once, got another budget for it. Use change_budget(…), which "
                    "is written down, or another name."
                )
        return self.account(name)

    def account(self, name: str) -> Account:
        """The account of a data set.

        Raises:
            InvalidArgument: it was not declared.
            LedgerError: there is no ledger here.
        """
        with store.reading(self._url, name) as page:
            Balance.of(page)
        return Account(self._url, name)

    def accounts(self) -> list[str]:
        """Names of all accounts, sorted."""
        return store.accounts(self._url)

    def verify(self, heads: Mapping[str, str] | None = None) -> dict[str, str]:
        """Check every line: the chain of digests, the totals, and that no budget was ever exceeded.

        The chain shows a line that was changed, put in or taken out. Whoever may write to the database can also write
        a whole new chain, or cut off its end; that shows against heads that were noted down elsewhere.

        Args:
            heads: from an earlier `verify`, by account: ``"SEQ:DIGEST"``. The chain must still hold that line.

        Returns:
            The heads now: number and digest of each account's newest line.

        Raises:
            LedgerError: something does not hold; the message names account and line.
        """
        found = {name: verified(self._url, name) for name in self.accounts()}
        for name, head in (heads or {}).items():
            seq, colon, digest = head.partition(":")
            if not (colon and seq.isdigit() and digest):
                raise InvalidArgument(f"head must be SEQ:DIGEST, as verify returns it, got {head!r}. Copy it whole.")
            lines = found.get(name, [])
            if not 0 < int(seq) <= len(lines) or lines[int(seq) - 1] != digest:
                raise LedgerError(
                    f"account {name!r} must hold the line {seq} that was noted down, got another or none: the ledger "
                    "was rewritten or cut. Restore it from a copy; what it says now is not to be trusted."
                )
        return {name: f"{len(lines)}:{lines[-1]}" for name, lines in found.items()}
