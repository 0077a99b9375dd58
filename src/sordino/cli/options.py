"""What commands share: the options of a table, a ledger and a run, and the call of the function of the same name."""

import inspect
import sys
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.text import Text

from sordino import commands
from sordino.cli.console import Output, heading, key_value_table
from sordino.commands.budgets import DryRun, open_account
from sordino.definitions import format_upper_bound
from sordino.events import event_counts

if TYPE_CHECKING:
    from sordino.events import Event

__all__ = [
    "DataArgument",
    "DatasetNameOption",
    "DecimalOption",
    "DryRunOption",
    "EncodingOption",
    "LabelOption",
    "LedgerOption",
    "OutFolderOption",
    "PublicSchemaOption",
    "ReproducibleOption",
    "SchemaOption",
    "SeedOption",
    "SeparatorOption",
    "TableArgument",
    "TargetBoundsOption",
    "call",
    "describe_event",
    "print_dry_run",
    "with_table_options",
]

_Command = TypeVar("_Command", bound=Callable[..., None])

DataArgument = Annotated[str, typer.Argument(metavar="DATA", help="Name from `sordino data list`, or a file.")]
TableArgument = Annotated[str, typer.Argument(metavar="DATA", help="A .csv, .tsv or .parquet file, or adult.")]
LabelOption = Annotated[str | None, typer.Option(help="Column of the label, with --public-schema-from.")]
TargetOption = Annotated[str | None, typer.Option(help="Column to predict: a label or a number.")]
SchemaOption = Annotated[Path | None, typer.Option(help="Schema file that declares your table's columns.")]
PublicSchemaOption = Annotated[Path | None, typer.Option(help="PUBLIC sample file to infer the schema from.")]
TargetBoundsOption = Annotated[
    tuple[float, float] | None,
    typer.Option(
        "--target-bounds",
        metavar="LOW HIGH",
        help="With --public-schema-from: public bounds of a numeric target.",
    ),
]
TestOption = Annotated[
    Path | None, typer.Option(help="PUBLIC file with the same columns; the model is evaluated on it.")
]
DataIsPublicOption = Annotated[
    bool, typer.Option("--data-is-public", help="Declare your file public; non-private baselines are shown too.")
]
SeparatorOption = Annotated[
    str | None, typer.Option(metavar="CHAR", help="Separator of a CSV file: ';', tab, … Default: the schema's.")
]
DecimalOption = Annotated[
    str | None, typer.Option(metavar="CHAR", help="Decimal mark of a CSV file: . or , Default: the schema's.")
]
EncodingOption = Annotated[
    str | None, typer.Option(help="Encoding of a CSV file: utf-8, latin-1, cp1252, … Default: the schema's.")
]
SeedOption = Annotated[int | None, typer.Option(help="Seed of all random numbers; only with --reproducible.")]
ReproducibleOption = Annotated[
    bool, typer.Option("--reproducible", help="Allow --seed; the result is marked not for release.")
]
OutFolderOption = Annotated[
    Path | None, typer.Option("--out", help="Run folder to create. Default: runs/NAME-DATE-NUMBER.")
]
LedgerOption = Annotated[str | None, typer.Option(help="Ledger to charge, a file or URL; with --dataset-name.")]
DatasetNameOption = Annotated[str | None, typer.Option(help="Account in --ledger to charge.")]
DryRunOption = Annotated[
    bool,
    typer.Option(
        "--dry-run", help="Print the cost and whether the ledger covers it (exit code 3 if not); run nothing."
    ),
]
_TABLE: dict[str, tuple[object, object]] = {
    "target": (TargetOption, None),
    "schema": (SchemaOption, None),
    "public_schema_from": (PublicSchemaOption, None),
    "target_bounds": (TargetBoundsOption, None),
    "separator": (SeparatorOption, None),
    "decimal": (DecimalOption, None),
    "encoding": (EncodingOption, None),
    "test": (TestOption, None),
    "data_is_public": (DataIsPublicOption, False),
}


def with_table_options(command: _Command) -> _Command:
    """The command with the options of a table, behind ``--epsilon``, in place of its ``**table``."""
    own = [one for one in inspect.signature(command).parameters.values() if one.kind is not one.VAR_KEYWORD]
    table = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=option)
        for name, (option, default) in _TABLE.items()
    ]
    place = [one.name for one in own].index("epsilon") + 1
    every = [*own[:place], *table, *own[place:]]
    command.__signature__ = inspect.Signature(every)
    command.__annotations__ = {one.name: one.annotation for one in every}
    return command


def call(name: str, options: dict[str, Any]) -> tuple[Output, Any]:
    """Call the function of `sordino.commands` that has the command's name, with the command's options.

    ``--ledger`` and ``--dataset-name`` become the account. What a model prints goes to standard error: standard output
    is for the command's own words. A dry run is printed, and ends the command.

    Args:
        name: of the function.
        options: by the names of its parameters; a ``table`` among them is spread.

    Returns:
        Where to print, and what the function gave.
    """
    given = {**options, **options.get("table", {})}
    given.pop("table", None)
    output = Output(as_json=given.pop("as_json"))
    if "dataset_name" in given:
        given["ledger"] = open_account(given["ledger"], given.pop("dataset_name"))
    function = getattr(commands, name)
    shows_progress = "progress" in inspect.signature(function).parameters
    if shows_progress:
        given["progress"] = output
    with redirect_stdout(sys.stderr), nullcontext() if shows_progress else output.stage(name.replace("_", " ")):
        found = function(**given)
    if isinstance(found, DryRun):
        print_dry_run(output, found)
        raise typer.Exit(0 if found.fits else 3)
    return output, found


def print_dry_run(output: Output, found: DryRun) -> None:
    """What a command would charge, and whether the account has it."""
    if found.charge is None or found.cost is None:
        output.print_result(found.to_dict(), heading("would cost nothing", f"{found.why}; nothing was done"))
        return
    charge, account = found.charge, found.account
    rows = [
        ("unit", charge.privacy_unit.describe()),
        ("neighbors", charge.neighboring_relation.describe()),
        ("what", describe_event(charge.event)),
    ]
    verdict = "no ledger was named, so nothing is held against it"
    if account is not None:
        left, budget = account.remaining_epsilon(), account.budget()
        rows.append(("left", f"ε ≈ {left:.3g} of {budget.epsilon:g} at δ = {budget.delta:g}, account {account.name}"))
        verdict = "the account has it" if found.fits else "the account does NOT have it"
    refusal = [Text(), Text(charge.refusal)] if charge.refusal else []
    claim = f"would cost ε = {format_upper_bound(found.cost.upper)} at δ = {found.delta:g}: {verdict}"
    output.print_result(found.to_dict(), heading(claim, "nothing was done"), key_value_table(rows), *refusal)


def describe_event(event: "Event") -> str:
    """The kinds of an event's leaves with their counts."""
    leaves = event_counts(event)
    return ", ".join(f"{leaf.kind} × {count:,}" if count > 1 else leaf.kind for leaf, count in leaves.items())
