"""`sordino schema draft | check`: a schema file from a table's header, and how well a table fits its schema."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from sordino.cli.console import JsonOption, heading, key_value_table
from sordino.cli.options import (
    DatasetNameOption,
    DecimalOption,
    DryRunOption,
    EncodingOption,
    LedgerOption,
    SeparatorOption,
    call,
)

if TYPE_CHECKING:
    from sordino.commands import SchemaCheck

__all__ = ["schema"]

schema = typer.Typer(help="The declared schema of your table: draft it, check it.", no_args_is_help=True)
FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="A .csv, .tsv, .parquet or .feather file.")]
_SHOWN = 12


@schema.command("draft")
def draft(
    file: FileArgument,
    target: Annotated[str | None, typer.Option(help="Column to predict.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Schema file to create, .toml or .json. Default: NAME.schema.toml.")
    ] = None,
    separator: SeparatorOption = None,
    decimal: DecimalOption = None,
    encoding: EncodingOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a schema with blanks to fill in. Only the file's header is read, and no record."""
    output, found = call("schema_draft", locals())
    names, place = found.columns, found.path
    shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    rows = [
        ("schema", str(place)),
        ("columns", shown),
        ("next", 'replace every "?" by what is public, delete columns that are no features'),
        ("then", f"sordino schema check {file} --schema {place}"),
    ]
    output.print_result(found.to_dict(), key_value_table(rows))


@schema.command("check")
def check_table(
    file: FileArgument,
    schema: Annotated[Path, typer.Option(help="Schema file, .json or .toml.")],
    epsilon: Annotated[
        float | None, typer.Option(help="Release noisy shares with this ε. Default: exact shares, not for release.")
    ] = None,
    delta: Annotated[
        float | None, typer.Option(help="With --epsilon: δ for Gaussian noise; 0 for geometric noise.")
    ] = None,
    separator: SeparatorOption = None,
    decimal: DecimalOption = None,
    encoding: EncodingOption = None,
    ledger: LedgerOption = None,
    dataset_name: DatasetNameOption = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Say how many values of each column can be read, lie in range and are listed, and how many records have no label.

    Without --epsilon the shares are exact: for anyone who may see the records, and NOT FOR RELEASE. With --epsilon they
    are noisy, all of them together ε-private, and may be shown.
    """
    output, found = call("schema_check", locals())
    output.print_result(found.to_dict(), *_page(found))


def _page(found: "SchemaCheck") -> tuple[RenderableType, ...]:
    from sordino.data.schema_files import declared_statuses

    declared, guarantee = found.schema, found.guarantee
    kinds = {column.name: str(column.to_dict()["type"]) for column in declared.columns}
    kinds = {declared.target: "label" if declared.target_bounds is None else "number"} | kinds
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("column", overflow="fold")
    for name in ("type", "fits", "does not", "missing", "unreadable"):
        table.add_column(name, justify="left" if name == "type" else "right", no_wrap=True)
    for name, statuses in declared_statuses(declared).items():
        shares = [f"{100 * share:.1f} %" for share in found.shares(name)]
        style = "bold" if name == declared.target else ""
        table.add_row(Text(name, style=style), kinds[name], *shares, *[""] * (4 - len(statuses)))
    meaning = "fits: in range or listed. Does not: outside the range or not listed. A record counts if its target fits."
    if guarantee is None:
        title = heading("NOT FOR RELEASE", "exact shares of private records, for the curator's own eyes")
        return title, table, Text(), Text(meaning, style="dim")
    title = heading(guarantee.describe(), "noisy shares; they may be released")
    spread = ", ".join(sorted({f"{value:.3g}" for value in found.noise.values()}))
    return title, table, Text(), Text(f"{meaning} Standard deviation of the noise, in records: {spread}.", style="dim")
