"""`sordino ledger`: budgets of datasets, what was spent on them, and what is left."""

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from sordino.cli.console import JsonOption, Output, finite, heading, key_value_table
from sordino.definitions import NeighboringRelation, PrivacyUnit, format_upper_bound
from sordino.errors import BudgetExceeded, InvalidArgument, UnsupportedEvent
from sordino.events import Event, NoOp, from_dict, from_json, to_dict

if TYPE_CHECKING:
    from collections.abc import Callable

    from sordino.ledger import Account, Ledger, LedgerEntry

__all__ = [
    "DatasetNameOption",
    "DryRunOption",
    "LedgerOption",
    "ledger",
    "open_account",
    "print_preview",
    "with_affordable_delta",
]

ledger = typer.Typer(help="Who spent what on which dataset, and what is left.", no_args_is_help=True)
PlaceArgument = Annotated[str, typer.Argument(metavar="LEDGER", help="A file, or postgresql://user@host/database.")]
NameArgument = Annotated[str, typer.Argument(metavar="DATASET", help="The name under which the dataset is declared.")]
LedgerOption = Annotated[str | None, typer.Option(help="A ledger, file or URL; with --dataset-name.")]
DatasetNameOption = Annotated[str | None, typer.Option(help="The account in --ledger that pays.")]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Only say what it would cost and whether the ledger has it. Exit code 3: not.")
]
_BAR, _SHORT_BAR = 40, 16
_Found = TypeVar("_Found")


def open_account(place: str | None, name: str | None) -> "Account | None":
    """The account that ``--ledger`` and ``--dataset-name`` name, or None when neither is given."""
    if place is None and name is None:
        return None
    if place is None or name is None:
        raise InvalidArgument("--ledger and --dataset-name must be given together, got one of them. Give both.")
    return _at(place).account(name)


def with_affordable_delta(
    work: "Callable[[float], _Found]", default: float, account: "Account | None", out: Output
) -> _Found:
    """What `work` gives for the default δ, or for the largest that the account still has for events with their own.

    An account keeps a part of its δ for events that have one of their own. Where no δ was given, what is too much
    for that part would be refused though its ε fits. `work` must charge before it reads a record, as all of sordino.
    """
    try:
        return work(default)
    except BudgetExceeded:
        left = 0.0 if account is None else account.remaining_delta()
        if not 0 < left < default:
            raise
        out.stderr.print(f"  δ = {left:g}: what the account has left for events with a δ of their own", highlight=False)
        return work(left)


def print_preview(
    out: Output, work: "Callable[[Account, Path], object]", account: "Account | None", *, delta: float | None
) -> None:
    """Print what `work` would charge and whether the account has it, with exit code 3 where it does not.

    Args:
        out: where to.
        work: (account, run folder) ↦ anything; carried out up to its first charge, in a folder that is removed.
        account: that would pay, or None.
        delta: at which ε is stated; None takes the account's, or 1e-5.
    """
    from sordino import accounting
    from sordino.ledger import preview_charge

    with TemporaryDirectory() as place, redirect_stdout(sys.stderr), out.progress("computing the charge"):
        found = preview_charge(lambda ledger: work(ledger, Path(place) / "run"), account)
    if found is None:
        print_no_charge(out, "it reads no private record")
        return
    level = delta if delta is not None else 1e-5 if account is None else account.budget().delta
    cost = accounting.epsilon(found.event, level, neighboring_relation=found.neighboring_relation)
    document: dict[str, object] = {
        "dry_run": True,
        "cost": {
            "epsilon": finite(cost.upper),
            "delta": level,
            "neighboring_relation": found.neighboring_relation.value,
            "privacy_unit": found.privacy_unit.value,
            "accountant": cost.accountant,
            "event": to_dict(found.event),
        },
        "ledger": None,
    }
    rows = [
        ("unit", found.privacy_unit.describe()),
        ("neighbors", found.neighboring_relation.describe()),
        ("what", _named(found.event)),
    ]
    verdict = "no ledger was named, so nothing is held against it"
    if account is not None:
        left, budget = account.remaining_epsilon(), account.budget()
        document["ledger"] = {
            "account": account.name,
            "fits": found.fits,
            "left_epsilon": left,
            "budget": {"epsilon": budget.epsilon, "delta": budget.delta},
            "refusal": found.refusal or None,
        }
        rows.append(("left", f"ε ≈ {left:.3g} of {budget.epsilon:g} at δ = {budget.delta:g}, account {account.name}"))
        verdict = "the account has it" if found.fits else "the account does NOT have it"
    refusal = [Text(), Text(found.refusal)] if found.refusal else []
    claim = heading(f"would cost ε = {format_upper_bound(cost.upper)} at δ = {level:g}: {verdict}", "nothing was done")
    out.print_result(document, claim, key_value_table(rows), *refusal)
    if found.fits is False:
        raise typer.Exit(3)


def print_no_charge(out: Output, why: str) -> None:
    """Say that a command would charge nothing, and why."""
    out.print_result(
        {"dry_run": True, "cost": None, "ledger": None, "why": why},
        heading("would cost nothing", f"{why}; nothing was done"),
    )


@ledger.command("init")
def init(place: PlaceArgument, as_json: JsonOption = False) -> None:
    """Make a ledger. One that is there is left as it is."""
    out = Output(as_json=as_json)
    found = _at(place)
    found.create()
    out.print_result({"ledger": place, "accounts": found.accounts()}, key_value_table([("ledger", place)]))


@ledger.command("declare")
def declare(
    place: PlaceArgument,
    name: NameArgument,
    epsilon: Annotated[float, typer.Option(help="ε of all that will ever be charged, together.")],
    delta: Annotated[float, typer.Option(help="δ, below 1 / number of records; 0 for pure events.")],
    neighboring_relation: Annotated[
        NeighboringRelation, typer.Option(help="Which datasets count as neighbors.")
    ] = NeighboringRelation.ADD_OR_REMOVE_ONE,
    unit: Annotated[
        PrivacyUnit, typer.Option("--privacy-unit", help="Whose contribution is protected.")
    ] = PrivacyUnit.RECORD,
    policy: Annotated[
        str, typer.Option(help="renyi or zcdp: choose as you go. pld: all reserved before the first charge.")
    ] = "renyi",
    change: Annotated[bool, typer.Option("--change", help="Change the budget that is there.")] = False,
    note: Annotated[str, typer.Option(help="Kept with the line.")] = "",
    as_json: JsonOption = False,
) -> None:
    """Declare the budget of a dataset, or change it. Both are lines of the ledger."""
    out = Output(as_json=as_json)
    if change:
        account = _at(place).account(name)
        account.change_budget(epsilon=epsilon, delta=delta, note=note)
    else:
        account = _at(place).declare(
            name,
            epsilon=epsilon,
            delta=delta,
            neighboring_relation=neighboring_relation,
            privacy_unit=unit,
            policy=policy,
            note=note,
        )
    document = _state(account)
    out.print_result(document, *_page(document))


@ledger.command("show")
def show(
    place: PlaceArgument,
    name: Annotated[str | None, typer.Argument(metavar="[DATASET]", help="All of them when not given.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what was spent and what is left."""
    out = Output(as_json=as_json)
    found = _at(place)
    names = found.accounts() if name is None else [name]
    documents = [_state(found.account(one)) for one in names]
    if name is not None:
        out.print_result(documents[0], *_page(documents[0]))
    else:
        out.print_result({"accounts": documents}, *([_overview(documents)] if documents else [Text("no accounts yet")]))


@ledger.command("charge")
def charge_command(
    place: PlaceArgument,
    name: NameArgument,
    event: Annotated[str, typer.Option(help="An event as JSON, or a file that holds one.")],
    neighboring_relation: Annotated[NeighboringRelation | None, typer.Option(help="For which the event holds.")] = None,
    unit: Annotated[PrivacyUnit | None, typer.Option("--privacy-unit", help="For which the event holds.")] = None,
    note: Annotated[str, typer.Option(help="What for. No values of records: it is kept for ever.")] = "",
    run: Annotated[str, typer.Option(help="Name of the run.")] = "",
    reservation: Annotated[str | None, typer.Option(help="Draw from this reservation.")] = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Charge an event before it happens. Exit code 3 when it does not fit."""
    out = Output(as_json=as_json)
    account = _at(place).account(name)
    text = event if event.lstrip().startswith("{") else _text(Path(event))
    payer, what = account if reservation is None else account.reservation(reservation), from_json(text)
    declared = {"neighboring_relation": neighboring_relation, "privacy_unit": unit}
    if dry_run:
        if reservation is not None:
            payer.check_charge(what, **declared)
            print_no_charge(out, "it was reserved before")
            return
        print_preview(out, lambda ledger, _: ledger.charge(what, **declared), account, delta=None)
        return
    receipt = payer.charge(what, note=note, run=run, **declared)
    document = {"line": receipt.seq, "digest": receipt.digest, **_state(account)}
    out.print_result(
        document, key_value_table([("line", str(receipt.seq)), ("digest", receipt.digest)]), Text(), *_page(document)
    )


@ledger.command("history")
def history(place: PlaceArgument, name: NameArgument, as_json: JsonOption = False) -> None:
    """Every line of an account, oldest first, with the ε of its event by itself at the account's δ."""
    out = Output(as_json=as_json)
    account = _at(place).account(name)
    entries = account.history()
    costs = {entry.event: account.epsilon_of(entry.event) for entry in entries if not isinstance(entry.event, NoOp)}
    alone = {event: None if cost is None else finite(cost) for event, cost in costs.items()}
    lines = [{**entry.to_dict(), "epsilon_alone": alone.get(entry.event)} for entry in entries]
    out.print_result({"account": name, "entries": lines}, _lines(entries, costs))


@ledger.command("export")
def export(
    place: PlaceArgument,
    file: Annotated[Path | None, typer.Option("--out", help="Where to; standard output if not given.")] = None,
    as_json: JsonOption = False,
) -> None:
    """All accounts with all their lines and the digests of the chain, as one JSON document."""
    out = Output(as_json=as_json)
    found = _at(place)
    accounts = {name: [entry.to_dict() for entry in found.account(name).history()] for name in found.accounts()}
    document: dict[str, object] = {"schema": 1, "accounts": accounts}
    if file is None:
        sys.stdout.write(json.dumps(document, ensure_ascii=False, allow_nan=False) + "\n")
        return
    file.write_text(json.dumps(document, ensure_ascii=False, allow_nan=False, indent=1) + "\n", encoding="utf-8")
    lines = sum(len(entries) for entries in accounts.values())
    out.print_result(
        {"file": str(file), "lines": lines}, key_value_table([("file", str(file)), ("lines", f"{lines:,}")])
    )


@ledger.command("release")
def release(
    place: PlaceArgument,
    name: NameArgument,
    reservation: Annotated[
        str | None, typer.Argument(metavar="[RESERVATION]", help="Its name, from `sordino ledger show`.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All that are open. Only when nothing runs.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Give back what a run reserved and never drew, after a crash. What was drawn stays charged."""
    out = Output(as_json=as_json)
    if (reservation is None) != everything:
        raise InvalidArgument("release must be given one reservation, or --all, got both or none. See ledger show.")
    account = _at(place).account(name)
    names = list(account.reservations()) if reservation is None else [reservation]
    for one in names:
        account.reservation(one).close()
    document = {"released": names, **_state(account)}
    out.print_result(document, key_value_table([("released", ", ".join(names) or "nothing")]), Text(), *_page(document))


@ledger.command("verify")
def verify_ledger_command(
    place: PlaceArgument,
    head: Annotated[
        list[str] | None,
        typer.Option(metavar="DATASET=SEQ:DIGEST", help="A head that an earlier `ledger verify` printed."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check every line: the chain of digests, the totals, the budgets. Prints the heads, to be noted down elsewhere."""
    out = Output(as_json=as_json)
    noted: dict[str, str] = {}
    for one in head or []:
        name, equals, value = one.rpartition("=")
        if not equals:
            raise InvalidArgument(f"--head must be DATASET=SEQ:DIGEST, got {one!r}. Copy it from ledger verify.")
        noted[name] = value
    heads = _at(place).verify(noted)
    lines = [Text(f"{name}={value}", no_wrap=True, overflow="ignore") for name, value in heads.items()]
    out.print_result({"heads": heads}, heading("every line holds", "heads; note them down elsewhere"), *lines)


# --- what is shown -----------------------------------------------------------------------------------------------


def _at(place: str) -> "Ledger":
    from sordino.ledger import Ledger

    return Ledger(place)


def _text(path: Path) -> str:
    if not path.is_file():
        raise InvalidArgument(f"--event must be JSON or a file, got {str(path)!r}. Check the path.")
    return path.read_text(encoding="utf-8")


def _state(account: "Account") -> dict[str, object]:
    """An account as JSON types."""
    budget, left = account.budget(), account.remaining()
    try:
        spent = account.spent()
        reading: dict[str, object] = {"epsilon": finite(spent.epsilon), "accountant": spent.accountant}
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
        ("reserved", f"{name}  {_named(from_dict(left))}") for name, left in _part(document, "reservations").items()
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
    return _named(entry.event)


def _named(event: Event) -> str:
    """The kinds of an event's leaves with their counts."""
    from sordino.events import event_counts

    leaves = event_counts(event)
    return ", ".join(f"{leaf.kind} × {count:,}" if count > 1 else leaf.kind for leaf, count in leaves.items())
