"""`sordino ledger`: budgets of datasets, what was spent on them, and what is left."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from sordino.cli.console import Output, heading, key_value_table
from sordino.cli.options import Form, command, describe_event
from sordino.definitions import NeighboringRelation, PrivacyUnit, format_upper_bound
from sordino.events import Event, NoOp, from_dict

if TYPE_CHECKING:
    from sordino.commands import AccountHistory, AccountSummary
    from sordino.ledger import LedgerEntry

_LEDGER = {"place": Form(metavar="LEDGER")}
_ACCOUNT = _LEDGER | {"name": Form(metavar="DATASET")}
_BAR, _SHORT_BAR = 40, 16


@command("ledger init", forms=_LEDGER)
def print_ledger(output: Output, found: dict[str, Any]) -> None:
    """Make a ledger. One that is there is left as it is."""
    output.print_result(found, key_value_table([("ledger", found["ledger"])]))


@command("ledger declare", forms=_ACCOUNT)
def print_account_state(output: Output, found: "AccountSummary") -> None:
    """Declare the budget of a dataset, or change it. Both are lines of the ledger."""
    output.print_result(found.to_dict(), *_page(found.state))


@command("ledger show", forms=_LEDGER | {"name": Form(metavar="[DATASET]")})
def print_summaries(output: Output, found: "list[AccountSummary]", *, name: str | None) -> None:
    """Show what was spent and what is left."""
    documents = [account.to_dict() for account in found]
    if name is not None:
        output.print_result(documents[0], *_page(documents[0]))
    else:
        page = [_overview(documents)] if documents else [Text("no accounts yet")]
        output.print_result({"accounts": documents}, *page)


@command("ledger charge", forms=_ACCOUNT)
def print_charge(output: Output, found: "AccountSummary") -> None:
    """Charge an event before it happens. Exit code 3 when it does not fit."""
    line = key_value_table([(name, str(value)) for name, value in found.details.items()])
    output.print_result(found.to_dict(), line, Text(), *_page(found.state))


@command("ledger history", forms=_ACCOUNT)
def print_history(output: Output, found: "AccountHistory") -> None:
    """Every line of an account, oldest first, with the ε of its event by itself at the account's δ."""
    output.print_result(found.to_dict(), _lines(found.entries, found.costs))


@command("ledger export", forms=_LEDGER)
def print_document(output: Output, found: dict[str, Any], *, out: Path | None) -> None:
    """All accounts with all their lines and the digests of the chain, as one JSON document."""
    if out is None:
        sys.stdout.write(json.dumps(found, ensure_ascii=False, allow_nan=False) + "\n")
        return
    lines = sum(len(entries) for entries in found["accounts"].values())
    rows = [("file", str(out)), ("lines", f"{lines:,}")]
    output.print_result({"file": str(out), "lines": lines}, key_value_table(rows))


@command("ledger release", forms=_ACCOUNT | {"reservation": Form(metavar="[RESERVATION]")})
def print_release(output: Output, found: "AccountSummary") -> None:
    """Give back what a run reserved and never drew, after a crash. What was drawn stays charged."""
    released = ", ".join(found.details["released"]) or "nothing"
    output.print_result(found.to_dict(), key_value_table([("released", released)]), Text(), *_page(found.state))


@command("ledger verify", forms=_LEDGER | {"head": Form(metavar="DATASET=SEQ:DIGEST")})
def print_heads(output: Output, found: dict[str, str]) -> None:
    """Check every line: the chain of digests, the totals, the budgets. Prints the heads, to be noted down elsewhere."""
    lines = [Text(f"{name}={value}", no_wrap=True, overflow="ignore") for name, value in found.items()]
    output.print_result({"heads": found}, heading("every line holds", "heads; note them down elsewhere"), *lines)


def _page(document: Mapping[str, Any]) -> tuple[RenderableType, ...]:
    """An account for people."""
    budget, left = document["budget"], document["left"]
    more = f"ε ≈ {left['epsilon']:.3g} in one charge"
    if left["measure"] == "ρ" and left["amount"] > 0:
        noise = format_upper_bound((1 / (2 * left["amount"])) ** 0.5, 3)
        more += f": a Gaussian of noise multiplier {noise} still fits (ρ = {left['amount']:.4g})"
    rows = [
        ("budget", f"(ε = {budget['epsilon']:g}, δ = {budget['delta']:g})"),
        ("policy", budget["policy"]),
        ("unit", PrivacyUnit(document["privacy_unit"]).describe()),
        ("neighbors", NeighboringRelation(document["neighboring_relation"]).describe()),
        ("spent", _epsilon(document["spent"]["epsilon"])),
        ("left", more),
    ]
    rows += [
        ("reserved", f"{name}  {describe_event(from_dict(event))}") for name, event in document["reservations"].items()
    ]
    bar = Table.grid(padding=(0, 2, 0, 0))
    bar.add_row(_bar(left["fraction"]), f"{100 * left['fraction']:.1f} % left")
    return heading(document["account"]), bar, Text(), key_value_table(rows)


def _epsilon(value: float | str | None) -> str:
    if value is None:
        return "no accountant composes these events"
    return "ε = ∞" if isinstance(value, str) else f"ε = {format_upper_bound(value, 4)}"


def _bar(share: float, length: int = _BAR) -> Text:
    used = round(length * (1 - share))
    return Text.assemble(("━" * used, "bright_black"), ("━" * (length - used), "cyan"))


def _overview(documents: Sequence[Mapping[str, Any]]) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for column in ("dataset", "budget", "policy", "spent", "left", ""):
        table.add_column(column, no_wrap=column != "dataset", overflow="fold")
    for document in documents:
        budget, share = document["budget"], document["left"]["fraction"]
        table.add_row(
            Text(document["account"], style="bold"),
            f"ε = {budget['epsilon']:g}, δ = {budget['delta']:g}",
            budget["policy"],
            _epsilon(document["spent"]["epsilon"]),
            _bar(share, _SHORT_BAR),
            f"{100 * share:.1f} %",
        )
    return Group(table)


def _lines(entries: "Sequence[LedgerEntry]", costs: "Mapping[Event, float | None]") -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for column in ("", "when", "who", "what", "ε alone", "event", "note"):
        table.add_column(column, no_wrap=column in {"", "ε alone"}, overflow="fold")
    for entry in entries:
        what = f"{entry.kind} {entry.reservation}".strip()
        alone = costs.get(entry.event)
        cost = "" if alone is None else format_upper_bound(alone, 3)
        when = entry.at[:19].replace("T", " ")
        table.add_row(str(entry.seq), when, entry.who, what, cost, _describe(entry), entry.note)
    return table


def _describe(entry: "LedgerEntry") -> str:
    if isinstance(entry.event, NoOp):
        budget = entry.contents.get("budget")
        return f"ε = {budget['epsilon']:g}, δ = {budget['delta']:g}" if isinstance(budget, dict) else "nothing"
    return describe_event(entry.event)
