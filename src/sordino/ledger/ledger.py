"""The ledger: one file or database that holds the accounts of all datasets."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sordino.accounting.base import Costs, PrivacyFilter, add_costs
from sordino.definitions import NeighboringRelation, PrivacyUnit
from sordino.errors import InvalidArgument, LedgerError, SordinoError
from sordino.events import Event, NoOp, event_counts, from_dict, subtract_counts
from sordino.ledger import store
from sordino.ledger.account import Account, AccountBudget, AccountState, PLDPolicy, entry_body, make_filter
from sordino.ledger.store import FIRST, LedgerEntry, ledger_url, read_transaction, redact_password

# ----------------------------------------------------------------------------------------------------------------------
# Reading an account again from its first line: chain, totals, reservations, budget.
# ----------------------------------------------------------------------------------------------------------------------


def verified(url: str, account: str) -> list[str]:
    """The digests of an account's lines, in order, once all of them were checked.

    Raises:
        LedgerError: a line was changed, put in or taken out, or more was charged than the budget allowed.
    """
    with read_transaction(url, account) as page:
        entries = page.raw_entries()
    if not entries:
        raise LedgerError(
            f"account {account!r} must hold its declaration, got no line. Restore the ledger from a copy; what it says "
            "now is not to be trusted."
        )
    previous, replay = FIRST, _Replay()
    for number, entry in enumerate(entries, start=1):
        if entry.seq != number or entry.previous != previous or not _is_sealed(entry):
            raise _broken(entry, "does not follow from the one before: it, or that one, was changed or taken out")
        try:
            for fault in replay.faults(entry):
                raise _broken(entry, fault)
        except LedgerError:
            raise
        except (SordinoError, AssertionError, KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise _broken(entry, "can't be read") from error
        previous = entry.digest
    return [entry.digest for entry in entries]


def _is_sealed(entry: LedgerEntry) -> bool:
    try:
        entry.check()
    except LedgerError:
        return False
    return True


def _broken(entry: LedgerEntry, fault: str) -> LedgerError:
    return LedgerError(
        f"line {entry.seq} of account {entry.account!r} {fault}. Restore the ledger from a copy; what it says now is "
        "not to be trusted."
    )


@dataclass
class _Replay:
    """The account's state, computed from the events alone."""

    budget: AccountBudget | None = None
    budget_at: int = 0
    totals: Costs = ()
    has_charges: bool = False
    charged: dict[Event, int] = field(default_factory=dict)
    open: dict[str, dict[Event, int]] = field(default_factory=dict)

    def faults(self, entry: LedgerEntry) -> Iterator[str]:
        """What is wrong with the next line; after that the state holds it."""
        body = entry.contents
        if (entry.kind == "declare") != (entry.seq == 1):
            yield "declares the account in the wrong place"
        if entry.kind in {"declare", "budget"}:
            self._declare(AccountBudget.from_dict(body["budget"]), entry.seq)
        elif entry.kind in {"charge", "reserve", "release"}:
            yield from self._move(entry, event_counts(entry.event))
        else:
            yield f"is of an unknown kind {entry.kind!r}"
        stored = body["totals"]
        assert isinstance(stored, list)
        if tuple(float(value) for value in stored) != self.totals or body["has_charges"] is not self.has_charges:
            yield "states other totals than its events add up to"
        if body["budget_at"] != self.budget_at:
            yield "names another budget than the one that is in force"
        left = body.get("left")
        if left is not None and event_counts(from_dict(left)) != self.open.get(entry.reservation, {}):
            yield "states that something else is left of its reservation"
        # What is drawn from a reservation was granted with it; price by price it only gains the rounding of sums.
        granted = entry.kind == "release" or (entry.kind == "charge" and entry.reservation)
        if not granted and not self._fits():
            yield "goes beyond the budget"

    def _declare(self, budget: AccountBudget, seq: int) -> None:
        self.budget, self.budget_at = budget, seq
        rule = make_filter(budget)
        if rule is not None and not self.totals:
            self.totals = (0.0,) * rule.num_measures

    def _move(self, entry: LedgerEntry, leaves: dict[Event, int]) -> Iterator[str]:
        name = entry.reservation
        if entry.kind == "reserve":
            if name in self.open:
                yield "reserves under a name that was used"
            yield from self._late(leaves)
            self.open[name] = leaves
            return
        if name:
            left = subtract_counts(self.open.get(name, {}), leaves)
            if left is None:
                yield "takes more from its reservation than was left"
            self.open[name] = left or {}
        elif entry.kind == "charge":
            yield from self._late(leaves)
        if entry.kind == "charge":
            rule = self._rule()
            if rule is not None:
                self.totals = add_costs(self.totals, rule.total_costs(leaves))
            for event, count in leaves.items():
                self.charged[event] = self.charged.get(event, 0) + count
            self.has_charges = self.has_charges or bool(leaves)

    def _late(self, leaves: dict[Event, int]) -> Iterator[str]:
        if self.budget is not None and not self.budget.adaptive and self.has_charges and leaves:
            yield "adds an event after the first charge"

    def _rule(self) -> PrivacyFilter | None:
        assert self.budget is not None
        return make_filter(self.budget)

    def _fits(self) -> bool:
        rule = self._rule()
        if rule is not None:
            total = self.totals
            for left in self.open.values():
                total = add_costs(total, rule.total_costs(left))
            return rule.fits(total)
        assert self.budget is not None
        everything = dict(self.charged)
        for left in self.open.values():
            for event, count in left.items():
                everything[event] = everything.get(event, 0) + count
        if self.has_charges and self._known == everything:
            return True
        self._known = everything
        return not everything or PLDPolicy(budget=self.budget, leaves=everything).fits()

    _known: dict[Event, int] | None = None


# ----------------------------------------------------------------------------------------------------------------------
# The ledger: one file or database that holds the accounts of all datasets.
# ----------------------------------------------------------------------------------------------------------------------


class Ledger:
    """Who spent what on which dataset: append-only accounts, each with a budget that all processes share.

    Guarantee: of any number of processes that charge one account at the same time, exactly as many succeed as fit its
    budget. A charge is on the disk before `charge` returns; a process that dies before leaves nothing behind.

    Args:
        url: a file on a local disk (SQLite), or a URL ``postgresql://user@host/database``. The file is made by the
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

    def __init__(self, url: str | Path) -> None:
        self._url = ledger_url(url)

    def __repr__(self) -> str:
        return f"Ledger({redact_password(self._url)!r})"

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
        neighboring_relation: NeighboringRelation | str = NeighboringRelation.ADD_OR_REMOVE_ONE,
        privacy_unit: PrivacyUnit | str = PrivacyUnit.RECORD,
        policy: str = "renyi",
        orders: Sequence[float] = (),
        note: str = "",
    ) -> Account:
        """Declare a dataset's budget, once. The same declaration again returns the account that is there.

        Args:
            name: of the dataset.
            epsilon: ε > 0 of everything that will ever be charged, together.
            delta: δ in (0, 1), or 0 with the policy ``renyi`` when all events are pure.
            neighboring_relation: which datasets count as neighbors.
            privacy_unit: whose contribution is protected.
            policy: ``renyi`` (any events, chosen as you go), ``zcdp`` (events with a ρ, chosen as you go), or ``pld``
                (tightest; all events reserved before the first charge).
            orders: λ = order − 1 > 0 of the filter ``renyi``, the most important first; by the budget when empty.
            note: kept with the declaration.

        Raises:
            InvalidArgument: a value out of its range, or the account exists with another budget.
        """
        if not name.strip() or name != name.strip():
            raise InvalidArgument(f"name must be some characters without space around, got {name!r}. Name the data.")
        budget = AccountBudget(
            epsilon=epsilon,
            delta=delta,
            neighboring_relation=NeighboringRelation(neighboring_relation),
            privacy_unit=PrivacyUnit(privacy_unit) if privacy_unit in list(PrivacyUnit) else privacy_unit,  # pyright: ignore[reportArgumentType]
            policy=policy,
            orders=tuple(orders),
        )
        self.create()
        with store.write_transaction(self._url, name) as page:
            last = page.last()
            if last is None:
                rule = make_filter(budget)
                totals = () if rule is None else (0.0,) * rule.num_measures
                body = entry_body(budget=budget, budget_at=1, totals=totals, has_charges=False, event=NoOp())
                page.append(None, kind="declare", body=body, note=note)
            elif AccountState.of(page).budget != budget:
                raise InvalidArgument(
                    f"account {name!r} must be declared once, got another budget for it. Use change_budget(…), which "
                    "is written down, or another name."
                )
        return self.account(name)

    def account(self, name: str) -> Account:
        """The account of a dataset.

        Raises:
            InvalidArgument: it was not declared.
            LedgerError: there is no ledger here.
        """
        with store.read_transaction(self._url, name) as page:
            AccountState.of(page)
        return Account(self._url, name)

    def accounts(self) -> list[str]:
        """Names of all accounts, sorted."""
        return store.accounts(self._url)

    def verify(self, heads: Mapping[str, str] | None = None) -> dict[str, str]:
        """Check every line: the chain of digests, the totals, and that no budget was ever exceeded.

        The chain shows a line that was changed, inserted or removed. A person with write access to the database can
        also write a new chain, or cut off its end; that shows against heads that were noted down elsewhere.

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
