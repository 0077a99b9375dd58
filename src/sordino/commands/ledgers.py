"""`ledger_…`: privacy budgets of datasets, what was spent on them, and what is left."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sordino.commands.planning import read_event
from sordino.commands.running import SILENT, DryRun, Progress, preview
from sordino.definitions import NeighboringRelation, PrivacyUnit
from sordino.errors import InvalidArgument, UnsupportedEvent
from sordino.events import Event, NoOp, to_dict
from sordino.runs.transcript import encode_number

if TYPE_CHECKING:
    from sordino.ledger import Account, Ledger, LedgerEntry


@dataclass(frozen=True, kw_only=True)
class AccountSummary:
    """What was spent of an account and what is left, after a command.

    Args:
        state: as JSON types.
        details: what the command did, before it, as JSON types.
    """

    state: Mapping[str, Any]
    details: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """As JSON types."""
        return {**self.details, **self.state}


def ledger_init(place: str) -> dict[str, Any]:
    """Make a ledger. One that is there is left as it is.

    Args:
        place: Ledger: a file, or postgresql://user@host/database.
    """
    found = _at(place)
    found.create()
    return {"ledger": place, "accounts": found.accounts()}


def ledger_declare(
    place: str,
    name: str,
    *,
    epsilon: float,
    delta: float,
    neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE,
    privacy_unit: PrivacyUnit = PrivacyUnit.RECORD,
    policy: str = "renyi",
    change: bool = False,
    note: str = "",
) -> AccountSummary:
    """Declare the budget of a dataset, or change it. Both are lines of the ledger.

    Args:
        place: Ledger: a file, or postgresql://user@host/database.
        name: Name of the dataset in the ledger.
        epsilon: Total ε of all charges.
        delta: Total δ, below 1 / number of records; 0 for pure events.
        neighboring_relation: Neighboring relation of datasets.
        privacy_unit: Privacy unit: whose contribution is protected.
        policy: Accounting policy. renyi, zcdp: charges chosen adaptively. pld: all reserved before the first charge.
        change: Change an existing budget.
        note: Note stored with the entry.
    """
    if change:
        account = _at(place).account(name)
        account.change_budget(epsilon=epsilon, delta=delta, note=note)
    else:
        account = _at(place).declare(
            name,
            epsilon=epsilon,
            delta=delta,
            neighboring_relation=neighboring_relation,
            privacy_unit=privacy_unit,
            policy=policy,
            note=note,
        )
    return AccountSummary(state=_state(account))


def ledger_show(place: str, name: str | None = None) -> list[AccountSummary]:
    """What was spent and what is left.

    Args:
        place: Ledger: a file, or postgresql://user@host/database.
        name: Dataset name. Default: all datasets.
    """
    found = _at(place)
    names = found.accounts() if name is None else [name]
    return [AccountSummary(state=_state(found.account(one))) for one in names]


def ledger_charge(
    place: str,
    name: str,
    *,
    event: str | Event,
    neighboring_relation: NeighboringRelation | None = None,
    privacy_unit: PrivacyUnit | None = None,
    note: str = "",
    run: str = "",
    reservation: str | None = None,
    dry_run: bool = False,
    progress: Progress = SILENT,
) -> AccountSummary | DryRun:
    """Charge an event before it happens.

    Args:
        place: Ledger: a file, or postgresql://user@host/database.
        name: Name of the dataset in the ledger.
        event: Privacy event as JSON, or a file with one.
        neighboring_relation: Relation or unit for which the event holds.
        privacy_unit: Relation or unit for which the event holds.
        note: Note stored permanently with the entry; no values of records.
        run: Name of the run.
        reservation: Charge to this reservation.
        dry_run: only say what it would cost.
        progress: what is said meanwhile.

    Raises:
        BudgetExceeded: it does not fit.
    """
    account = _at(place).account(name)
    what = read_event(event)
    payer = account if reservation is None else account.reservation(reservation)
    declared = {"neighboring_relation": neighboring_relation, "privacy_unit": privacy_unit}
    if dry_run:
        if reservation is not None:
            payer.check_charge(what, **declared)
            return DryRun(why="it was reserved before")
        return preview(lambda ledger, _: ledger.charge(what, **declared), account, delta=None, progress=progress)
    receipt = payer.charge(what, note=note, run=run, **declared)
    return AccountSummary(state=_state(account), details={"line": receipt.seq, "digest": receipt.digest})


@dataclass(frozen=True, kw_only=True)
class AccountHistory:
    """Every line of an account, oldest first.

    Args:
        account: its name.
        entries: the lines.
        costs: ε of each event by itself at the account's δ; None where no accountant composes it.
    """

    account: str
    entries: "Sequence[LedgerEntry]"
    costs: "Mapping[Event, float | None]"

    def to_dict(self) -> dict[str, Any]:
        """As JSON types."""
        alone = {event: None if cost is None else encode_number(cost) for event, cost in self.costs.items()}
        lines = [{**entry.to_dict(), "epsilon_alone": alone.get(entry.event)} for entry in self.entries]
        return {"account": self.account, "entries": lines}


def ledger_history(place: str, name: str) -> AccountHistory:
    """Every line of an account, oldest first, with the ε of its event by itself at the account's δ.

    Args:
        place: Ledger: a file, or postgresql://user@host/database.
        name: Name of the dataset in the ledger.
    """
    account = _at(place).account(name)
    entries = account.history()
    costs = {entry.event: account.epsilon_of(entry.event) for entry in entries if not isinstance(entry.event, NoOp)}
    return AccountHistory(account=name, entries=entries, costs=costs)


def ledger_export(place: str, *, out: Path | str | None = None) -> dict[str, Any]:
    """All accounts with all their lines and the digests of the chain.

    Args:
        place: Ledger: a file, or postgresql://user@host/database.
        out: File to write. Default: standard output.
    """
    found = _at(place)
    accounts = {name: [entry.to_dict() for entry in found.account(name).history()] for name in found.accounts()}
    document: dict[str, Any] = {"schema": 1, "accounts": accounts}
    if out is not None:
        Path(out).write_text(
            json.dumps(document, ensure_ascii=False, allow_nan=False, indent=1) + "\n", encoding="utf-8"
        )
    return document


def ledger_release(
    place: str,
    name: str,
    reservation: str | None = None,
    *,
    all: bool = False,
) -> AccountSummary:
    """Give back what a run reserved and never drew, after a crash. What was drawn stays charged.

    Args:
        place: Ledger: a file, or postgresql://user@host/database.
        name: Name of the dataset in the ledger.
        reservation: Name of the reservation, from `sordino ledger show`.
        all: Release all open reservations; only if no run is active.
    """
    if (reservation is None) != all:
        raise InvalidArgument("release must be given one reservation, or --all, got both or none. See ledger show.")
    account = _at(place).account(name)
    names = list(account.reservations()) if reservation is None else [reservation]
    for one in names:
        account.reservation(one).close()
    return AccountSummary(state=_state(account), details={"released": names})


def ledger_verify(place: str, *, head: Sequence[str] = ()) -> dict[str, str]:
    """Check every line: the chain of digests, the totals, the budgets.

    Args:
        place: Ledger: a file, or postgresql://user@host/database.
        head: Head printed by an earlier `ledger verify`.

    Returns:
        The heads, to be noted down elsewhere.
    """
    noted: dict[str, str] = {}
    for one in head:
        name, equals, value = one.rpartition("=")
        if not equals:
            raise InvalidArgument(f"--head must be DATASET=SEQ:DIGEST, got {one!r}. Copy it from ledger verify.")
        noted[name] = value
    return dict(_at(place).verify(noted))


def _at(place: str) -> "Ledger":
    from sordino.ledger import Ledger

    return Ledger(place)


def _state(account: "Account") -> dict[str, Any]:
    """An account as JSON types."""
    budget, left = account.budget(), account.remaining()
    try:
        spent = account.spent()
        reading: dict[str, Any] = {"epsilon": encode_number(spent.epsilon), "accountant": spent.accountant}
        sentence = spent.describe()
    except UnsupportedEvent:
        reading = {"epsilon": None, "accountant": None}
        sentence = "no accountant composes these events"
    return {
        "account": account.name,
        "budget": {"epsilon": budget.epsilon, "delta": budget.delta, "policy": budget.policy},
        "privacy_unit": budget.privacy_unit.value,
        "neighboring_relation": budget.neighboring_relation.value,
        "spent": {**reading, "delta": budget.delta, "description": sentence},
        "left": {
            "epsilon": account.remaining_epsilon(),
            "amount": left.amount,
            "measure": left.measure,
            "fraction": left.fraction,
        },
        "reservations": {name: to_dict(event) for name, event in account.reservations().items()},
    }
