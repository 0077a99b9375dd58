"""`sordino synthesize FILE`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from sordino.cli.console import JsonOption, heading, key_value_table
from sordino.cli.options import (
    DatasetNameOption,
    DryRunOption,
    LabelOption,
    LedgerOption,
    PublicSchemaOption,
    ReproducibleOption,
    SchemaOption,
    SeedOption,
    TableArgument,
    TargetBoundsOption,
    call,
)
from sordino.definitions import format_upper_bound

if TYPE_CHECKING:
    from sordino.commands import SyntheticTable

__all__ = ["synthesize_command"]

_SHOWN = 12


def synthesize_command(
    data: TableArgument,
    epsilon: Annotated[float, typer.Option(help="ε of everything that the command releases.")],
    delta: Annotated[float, typer.Option(help="δ, well below 1 / number of records.")] = 1e-6,
    schema: SchemaOption = None,
    public_schema_from: PublicSchemaOption = None,
    target: LabelOption = None,
    target_bounds: TargetBoundsOption = None,
    out: Annotated[Path, typer.Option(help="Synthetic table to create, .csv, .tsv or .parquet.")] = Path(
        "synthetic.csv"
    ),
    rows: Annotated[
        int | None, typer.Option(help="Number of records to draw. Default: the noisy number of records.")
    ] = None,
    method: Annotated[str, typer.Option(help="aim, mst, or independent (no dependence between columns).")] = "aim",
    degree: Annotated[int | None, typer.Option(help="aim: maximum number of columns of a marginal.")] = None,
    bins: Annotated[int, typer.Option(help="Number of equal bins of each numeric column.")] = 20,
    max_model_mb: Annotated[float, typer.Option(help="aim: maximum size of the model's tables, in megabytes.")] = 4.0,
    run: Annotated[
        Path | None, typer.Option("--run", help="Run folder to create. Default: runs/NAME-DATE-NUMBER.")
    ] = None,
    seed: SeedOption = None,
    reproducible: ReproducibleOption = False,
    ledger: LedgerOption = None,
    dataset_name: DatasetNameOption = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Draw a synthetic table with the same columns, whose joint distribution was learned privately."""
    output, found = call("synthesize", locals())
    output.print_result(found.to_dict(), *_page(found))


def _page(found: "SyntheticTable") -> list[RenderableType]:
    synthesizer, table, guarantee = found.synthesizer, found.table, found.synthesizer.guarantee_
    claim = f"(ε = {format_upper_bound(guarantee.epsilon)}, δ = {guarantee.delta:g})-differentially private"
    rows = [
        ("unit", guarantee.privacy_unit.describe()),
        ("neighbors", guarantee.neighboring_relation.describe()),
        ("accountant", guarantee.accountant.replace("_", " ")),
        *(("caveat", caveat) for caveat in guarantee.caveats),
        ("synthetic", f"{table.num_rows:,} records of {table.num_columns} columns"),
        ("estimated size", f"about {synthesizer.model_.total:,.0f} private records, a noisy number"),
    ]
    together = [one for one in synthesizer.measured_ if len(one.columns) > 1]
    finest: dict[tuple[str, ...], float] = {}
    for one in together:
        finest[one.columns] = min(one.stddev, finest.get(one.columns, one.stddev))
    measured = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    measured.add_column("columns measured together", overflow="fold")
    measured.add_column("noise, records a cell", justify="right", no_wrap=True)
    best = sorted(finest.items(), key=lambda item: (item[1], item[0]))
    for columns, stddev in best[:_SHOWN]:
        measured.add_row(" × ".join(columns), f"± {stddev:,.1f}")
    more = [Text(f"and {len(best) - _SHOWN} more; --json lists all", style="dim")]
    return [
        heading(claim),
        key_value_table(rows),
        Text(),
        *([measured] if best else [Text("Every column was measured by itself: no dependence is kept.", style="dim")]),
        *(more if len(best) > _SHOWN else []),
        Text(),
        key_value_table([("table", str(found.out)), ("run", str(found.run.path))]),
    ]
