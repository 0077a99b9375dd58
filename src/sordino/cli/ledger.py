"""`sordino ledger`: budgets of datasets, what was spent on them, and what is left."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from sordino.cli.console import JsonOption, heading, key_value_table
from sordino.cli.options import DryRunOption, call, describe_event
from sordino.definitions import NeighboringRelation, PrivacyUnit, format_upper_bound
from sordino.events import Event, NoOp, from_dict

if TYPE_CHECKING:
    from sordino.ledger import LedgerEntry

__all__ = ["ledger"]

ledger = typer.Typer(help="Who spent what on which dataset, and what is left.", no_args_is_help=True)
PlaceArgument = Annotated[
    str, typer.Argument(metavar="LEDGER", help="Ledger: a file, or postgresql://user@host/database.")
]
NameArgument = Annotated[str, typer.Argument(metavar="DATASET", help="Name of the dataset in the ledger.")]
_BAR, _SHORT_BAR = 40, 16


@ledger.command("init")
def init(place: PlaceArgument, as_json: JsonOption = False) -> None:
    """Make a ledger. One that is there is left as it is."""
    output, found = call("ledger_init", locals())
    output.print_result(found, key_value_table([("ledger", place)]))


@ledger.command("declare")
def declare(
    place: PlaceArgument,
    name: NameArgument,
    epsilon: Annotated[float, typer.Option(help="Total ε of all charges.")],
    delta: Annotated[float, typer.Option(help="Total δ, below 1 / number of records; 0 for pure events.")],
    neighboring_relation: Annotated[
        NeighboringRelation, typer.Option(help="Neighboring relation of datasets.")
    ] = NeighboringRelation.ADD_OR_REMOVE_ONE,
    privacy_unit: Annotated[
        PrivacyUnit, typer.Option(help="Privacy unit: whose contribution is protected.")
    ] = PrivacyUnit.RECORD,
    policy: Annotated[
        str,
        typer.Option(
            help="Accounting policy. renyi, zcdp: charges chosen adaptively. pld: all reserved before the first charge."
        ),
    ] = "renyi",
    change: Annotated[bool, typer.Option("--change", help="Change an existing budget.")] = False,
    note: Annotated[str, typer.Option(help="Note stored with the entry.")] = "",
    as_json: JsonOption = False,
) -> None:
    """Declare the budget of a dataset, or change it. Both are lines of the ledger."""
    output, found = call("ledger_declare", locals())
    output.print_result(found.to_dict(), *_page(found.state))


@ledger.command("show")
def show(
    place: PlaceArgument,
    name: Annotated[
        str | None, typer.Argument(metavar="[DATASET]", help="Dataset name. Default: all datasets.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what was spent and what is left."""
    output, found = call("ledger_show", locals())
    documents = [account.to_dict() for account in found]
    if name is not None:
        output.print_result(documents[0], *_page(documents[0]))
    else:
        page = [_overview(documents)] if documents else [Text("no accounts yet")]
        output.print_result({"accounts": documents}, *page)


@ledger.command("charge")
def charge(
    place: PlaceArgument,
    name: NameArgument,
    event: Annotated[str, typer.Option(help="Privacy event as JSON, or a file with one.")],
    neighboring_relation: Annotated[
        NeighboringRelation | None, typer.Option(help="Relation or unit for which the event holds.")
    ] = None,
    privacy_unit: Annotated[
        PrivacyUnit | None, typer.Option(help="Relation or unit for which the event holds.")
    ] = None,
    note: Annotated[str, typer.Option(help="Note stored permanently with the entry; no values of records.")] = "",
    run: Annotated[str, typer.Option(help="Name of the run.")] = "",
    reservation: Annotated[str | None, typer.Option(help="Charge to this reservation.")] = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Charge an event before it happens. Exit code 3 when it does not fit."""
    output, found = call("ledger_charge", locals())
    line = key_value_table([(name, str(value)) for name, value in found.details.items()])
    output.print_result(found.to_dict(), line, Text(), *_page(found.state))


@ledger.command("history")
def history(place: PlaceArgument, name: NameArgument, as_json: JsonOption = False) -> None:
    """Every line of an account, oldest first, with the ε of its event by itself at the account's δ."""
    output, found = call("ledger_history", locals())
    output.print_result(found.to_dict(), _lines(found.entries, found.costs))


@ledger.command("export")
def export_ledger(
    place: PlaceArgument,
    out: Annotated[Path | None, typer.Option(help="File to write. Default: standard output.")] = None,
    as_json: JsonOption = False,
) -> None:
    """All accounts with all their lines and the digests of the chain, as one JSON document."""
    output, document = call("ledger_export", locals())
    if out is None:
        sys.stdout.write(json.dumps(document, ensure_ascii=False, allow_nan=False) + "\n")
        return
    lines = sum(len(entries) for entries in document["accounts"].values())
    rows = [("file", str(out)), ("lines", f"{lines:,}")]
    output.print_result({"file": str(out), "lines": lines}, key_value_table(rows))


@ledger.command("release")
def release(
    place: PlaceArgument,
    name: NameArgument,
    reservation: Annotated[
        str | None, typer.Argument(metavar="[RESERVATION]", help="Name of the reservation, from `sordino ledger show`.")
    ] = None,
    all: Annotated[
        bool, typer.Option("--all", help="Release all open reservations; only if no run is active.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Give back what a run reserved and never drew, after a crash. What was drawn stays charged."""
    output, found = call("ledger_release", locals())
    released = ", ".join(found.details["released"]) or "nothing"
    output.print_result(found.to_dict(), key_value_table([("released", released)]), Text(), *_page(found.state))


@ledger.command("verify")
def verify_ledger(
    place: PlaceArgument,
    head: Annotated[
        list[str] | None,
        typer.Option(metavar="DATASET=SEQ:DIGEST", help="Head printed by an earlier `ledger verify`."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check every line: the chain of digests, the totals, the budgets. Prints the heads, to be noted down elsewhere."""
    output, heads = call("ledger_verify", {**locals(), "head": head or ()})
    lines = [Text(f"{name}={value}", no_wrap=True, overflow="ignore") for name, value in heads.items()]
    output.print_result({"heads": heads}, heading("every line holds", "heads; note them down elsewhere"), *lines)


def _page(document: Mapping[str, object]) -> tuple[RenderableType, ...]:
    """An account for people."""
    budget, spent, left = _part(document, "budget"), _part(document, "spent"), _part(document, "left")
    currency, amount = str(left["measure"]), float(str(left["amount"]))
    more = f"ε ≈ {left['epsilon']:.3g} in one charge"
    if currency == "ρ" and amount > 0:
        noise = format_upper_bound((1 / (2 * amount)) ** 0.5, 3)
        more += f": a Gaussian of noise multiplier {noise} still fits (ρ = {amount:.4g})"
    rows = [
        ("budget", f"(ε = {budget['epsilon']:g}, δ = {budget['delta']:g})"),
        ("policy", str(budget["policy"])),
        ("unit", PrivacyUnit(str(document["privacy_unit"])).describe()),
        ("neighbors", NeighboringRelation(str(document["neighboring_relation"])).describe()),
        ("spent", _epsilon(spent["epsilon"])),
        ("left", more),
    ]
    rows += [
        ("reserved", f"{name}  {describe_event(from_dict(left))}")
        for name, left in _part(document, "reservations").items()
    ]
    bar = Table.grid(padding=(0, 2, 0, 0))
    bar.add_row(_bar(float(str(left["fraction"]))), f"{100 * float(str(left['fraction'])):.1f} % left")
    return heading(str(document["account"])), bar, Text(), key_value_table(rows)


def _part(document: Mapping[str, object], name: str) -> Mapping[str, object]:
    part = document[name]
    assert isinstance(part, Mapping)
    return part


def _epsilon(value: object) -> str:
    if value is None:
        return "no accountant composes these events"
    return "ε = ∞" if isinstance(value, str) else f"ε = {format_upper_bound(float(str(value)), 4)}"


def _bar(share: float, length: int = _BAR) -> Text:
    used = round(length * (1 - share))
    return Text.assemble(("━" * used, "bright_black"), ("━" * (length - used), "cyan"))


def _overview(documents: Sequence[Mapping[str, object]]) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for column in ("dataset", "budget", "policy", "spent", "left", ""):
        table.add_column(column, no_wrap=column != "dataset", overflow="fold")
    for document in documents:
        budget, left = _part(document, "budget"), _part(document, "left")
        share = float(str(left["fraction"]))
        table.add_row(
            Text(str(document["account"]), style="bold"),
            f"ε = {budget['epsilon']:g}, δ = {budget['delta']:g}",
            str(budget["policy"]),
            _epsilon(_part(document, "spent")["epsilon"]),
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
