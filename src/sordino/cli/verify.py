"""`sordino verify RUN`: whether a run folder's files, lines and numbers fit together."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from sordino.cli.output import JsonOption, Output, heading

__all__ = ["verify"]

_MARKS = {"pass": Text("pass", style="green"), "fail": Text("FAIL", style="bold red")}


def verify(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    ledger: Annotated[
        str | None, typer.Option(help="The ledger that the run was charged to: a file, or postgresql://…")
    ] = None,
    head: Annotated[str | None, typer.Option(help="A hash of the run that was published before.")] = None,
    anchor: Annotated[
        bool, typer.Option("--anchor", help="Print only the hash that stands for the whole run, to publish it.")
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Also fail when something could not be checked.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Check a run: hashes, plan against transcript, the guarantee by two accountants. Exit code 1 when it fails."""
    from sordino import verification

    found = verification.verify(run, ledger=ledger, head=head)
    good = found.complete if strict else found.passed
    out = Output(as_json=as_json)
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
    out.finish(found.to_dict() | {"strict": strict, "ok": good}, heading(verdict), table)
    if not good:
        raise typer.Exit(1)
