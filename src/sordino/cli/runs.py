"""`sordino runs list|show|compare` and `sordino verify`."""

from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from sordino.cli.console import JsonOption, heading, key_value_table
from sordino.cli.options import call
from sordino.commands.run_folders import describe_value
from sordino.definitions import format_upper_bound

__all__ = ["runs", "verify_command"]


runs = typer.Typer(help="Look at run folders.", no_args_is_help=True)
_FOLDER = Path("runs")
_MARKS = {"pass": Text("pass", style="green"), "fail": Text("FAIL", style="bold red")}


@runs.command("list")
def list_runs(
    folder: Annotated[Path, typer.Argument(help="Folder that contains the run folders.")] = _FOLDER,
    as_json: JsonOption = False,
) -> None:
    """All runs in a folder, oldest first."""
    output, found = call("runs_list", locals())
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("run", "data", "model", "state", "ε", "δ", "steps", "accuracy"):
        number = name in {"ε", "δ", "steps", "accuracy"}
        table.add_column(
            name, justify="right" if number else "left", no_wrap=number or name == "state", overflow="fold"
        )
    for one in found.runs:
        accuracy = one.metrics.get("test_accuracy")
        table.add_row(
            one.path.name,
            one.data,
            one.model,
            Text(one.state, style="" if one.state == "complete" else "yellow"),
            "" if one.epsilon is None else format_upper_bound(one.epsilon),
            f"{one.plan.get('delta', '')}",
            f"{one.charged:,}",
            "" if accuracy is None else f"{100 * accuracy:.1f} %",
        )
    words = f"{len(found.runs)} runs in {folder}"
    rows = [(name, "can't be read; try sordino verify") for name in found.unreadable]
    output.print_result(found.to_dict(), heading(words), table, key_value_table(rows))


@runs.command("show")
def show_run(run: Annotated[Path, typer.Argument(help="Run folder.")], as_json: JsonOption = False) -> None:
    """One run: what was planned, what was charged, what came out."""
    output, one = call("runs_show", locals())
    rows = [
        ("started", one.started),
        ("state", one.state),
        ("steps charged", f"{one.charged:,}" + (f", {one.repeated:,} of them repeated" if one.repeated else "")),
        ("segments", f"{one.segments:,}"),
        *((name.replace("_", " "), describe_value(value)) for name, value in one.plan.items() if name != "schema"),
        *((f"{part} {name}".replace("_", " "), describe_value(value)) for part, name, value in one.flat_facts()),
        *((name.replace("_", " "), value) for name, value in one.measured().items()),
    ]
    claim = f"ε so far = {format_upper_bound(one.epsilon)}" if one.epsilon is not None else "nothing was charged"
    words = claim if one.guarantee is None else one.guarantee.describe()
    output.print_result(one.to_dict(), heading(words), key_value_table(rows))


@runs.command("compare")
def compare_runs(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN RUN…", help="Two or more run folders.")],
    as_json: JsonOption = False,
) -> None:
    """Runs side by side: only what differs between them."""
    output, found = call("runs_compare", locals())
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", overflow="fold")
    for one in found.runs:
        table.add_column(Text(one.path.name, overflow="fold"), justify="right", overflow="fold")
    for name in found.differing:
        words = (name.replace("_", " "), *(column.get(name, "") for column in found.columns))
        table.add_row(*(Text(word) for word in words))
    same = f"{len(found.runs)} runs" if found.differing else "The runs do not differ."
    output.print_result(found.to_dict(), heading(same), table)


def verify_command(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    ledger: Annotated[
        str | None, typer.Option(help="Ledger that the run was charged to, a file or postgresql://…")
    ] = None,
    head: Annotated[str | None, typer.Option(help="Earlier published hash of the run.")] = None,
    anchor: Annotated[
        bool, typer.Option("--anchor", help="Print only the hash of the whole run, for publication.")
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Also exit with code 1 if something could not be checked.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Check a run: hashes, plan against transcript, the guarantee by two accountants. Exit code 1 when it fails."""
    output, found = call("verify", {"run": run, "ledger": ledger, "head": head, "as_json": as_json})
    good = found.complete if strict else found.passed
    if anchor and good and not as_json:
        typer.echo(found.head)
        return
    table = Table.grid(padding=(0, 2, 0, 0))
    for style in ("dim", "", ""):
        table.add_column(style=style, overflow="fold")
    for item in found.items:
        table.add_row(item.name, _MARKS.get(item.status, Text("not checked", style="yellow")), Text(item.detail))
    verdict = "The run holds together." if good else "The run does NOT hold together."
    if found.passed and not good:
        verdict = "Nothing failed, but not everything could be checked."
    output.print_result(found.to_dict() | {"strict": strict, "ok": good}, heading(verdict), table)
    if not good:
        raise typer.Exit(1)
