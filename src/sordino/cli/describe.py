"""`sordino describe FILE`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group, RenderableType
from rich.padding import Padding
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
from sordino.errors import InvalidArgument

if TYPE_CHECKING:
    from sordino.commands import DescribedTable
    from sordino.description import CategorySummary, CrossTable, Estimate, NumericSummary

__all__ = ["describe_command"]

_SHOWN, _BAR, _NAME = 12, 16, 28


def describe_command(
    data: TableArgument,
    epsilon: Annotated[float, typer.Option(help="ε of everything that the command releases.")],
    delta: Annotated[
        float, typer.Option(help="δ, well below 1 / number of records; 0 for geometric and Laplace noise.")
    ] = 1e-6,
    schema: SchemaOption = None,
    public_schema_from: PublicSchemaOption = None,
    target: LabelOption = None,
    target_bounds: TargetBoundsOption = None,
    quantiles: Annotated[str, typer.Option(help="Quantile levels, separated by commas.")] = "0.25,0.5,0.75",
    bins: Annotated[int, typer.Option(help="Number of equal bins of a numeric column.")] = 10,
    cross: Annotated[
        list[str] | None,
        typer.Option(
            help="Cross table COLUMN:COLUMN, may be repeated; `none` for none. Default: categories by target."
        ),
    ] = None,
    confidence: Annotated[float, typer.Option(help="Confidence level of each interval.")] = 0.95,
    out: Annotated[Path | None, typer.Option(help="Also write the result to a new .json file.")] = None,
    run: Annotated[
        Path | None, typer.Option("--run", help="Run folder to create. Default: runs/describe-NAME-DATE-NUMBER.")
    ] = None,
    seed: SeedOption = None,
    reproducible: ReproducibleOption = False,
    ledger: LedgerOption = None,
    dataset_name: DatasetNameOption = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Noisy counts, means, quantiles, histograms and cross tables with intervals, all in one charge."""
    output, found = call("describe", {**locals(), "quantiles": _levels(quantiles), "cross": _pairs(cross)})
    output.print_result(found.to_dict(), *_page(found))


def _levels(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError as error:
        raise InvalidArgument(f"quantiles must be numbers, got {text!r}. Write --quantiles 0.25,0.5,0.75.") from error


def _pairs(cross: list[str] | None) -> tuple[tuple[str, str], ...] | None:
    if cross is None:
        return None
    if cross == ["none"]:
        return ()
    found = []
    for text in cross:
        one, colon, other = text.partition(":")
        if not colon:
            raise InvalidArgument(f"cross must be COLUMN:COLUMN or none, got {text!r}. Write --cross age:income.")
        found.append((one.strip(), other.strip()))
    return tuple(found)


# ----------------------------------------------------------------------------------------------------------------------
# The page, at most 80 columns wide.
# ----------------------------------------------------------------------------------------------------------------------


def _page(described: "DescribedTable") -> list[RenderableType]:
    from sordino.description import NumericSummary

    name, found, run, out = described.name, described.description, described.run.path, described.out
    guarantee = found.guarantee
    confidence = f"{100 * found.confidence:g} %"
    rows = [
        ("table", name),
        ("unit", guarantee.privacy_unit.describe()),
        ("neighbors", guarantee.neighboring_relation.describe()),
        *(("caveat", caveat) for caveat in guarantee.caveats),
        ("records", f"{found.records.value:,.0f}   {_interval(found.records, whole=True)}"),
        ("intervals", f"{confidence} each, for the table's own value: noise is the only error"),
    ]
    claim = f"(ε = {format_upper_bound(guarantee.epsilon)}, δ = {guarantee.delta:g})-differentially private"
    blocks: list[RenderableType] = [heading(claim), key_value_table(rows)]
    for summary in found.columns:
        body = _numeric(summary) if isinstance(summary, NumericSummary) else _category(summary)
        blocks += [Text(), Text(summary.name, style="bold"), Padding(body, (0, 0, 0, 2))]
    for table in found.cross_tables:
        blocks += [Text(), *_crossed(table)]
    files = [("run", str(run)), *([("document", str(out))] if out is not None else [])]
    return [*blocks, Text(), key_value_table(files)]


def _interval(estimate: "Estimate", *, whole: bool) -> str:
    low, high = (f"{end:,.0f}" if whole else _short(end) for end in (estimate.low, estimate.high))
    return f"{low} to {high}"


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.5g}"


def _numeric(summary: "NumericSummary") -> RenderableType:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True, overflow="ellipsis")
    table.add_row("mean", _short(summary.mean.value), _interval(summary.mean, whole=False))
    for level, estimate in summary.quantiles:
        name = "median" if level == 0.5 else f"{100 * level:g} %"
        table.add_row(name, _short(estimate.value), _interval(estimate, whole=False))
    table.add_row("missing", f"{max(summary.missing.value, 0):,.0f}", _interval(summary.missing, whole=True))
    return Group(table, _bars(summary.histogram))


def _category(summary: "CategorySummary") -> RenderableType:
    largest = sorted(summary.counts, key=lambda pair: -pair[1].value)
    more = [Text(f"and {len(largest) - _SHOWN} more; --json has all", style="dim")] if len(largest) > _SHOWN else []
    return Group(_bars(largest[:_SHOWN]), *more)


def _bars(cells: "list[tuple[str, Estimate]] | tuple[tuple[str, Estimate], ...]") -> RenderableType:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True, overflow="ellipsis", max_width=_NAME)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True, overflow="ellipsis")
    table.add_column(no_wrap=True, style="cyan")
    longest = max((estimate.value for _, estimate in cells), default=0.0)
    for name, estimate in cells:
        bar = "━" * round(_BAR * max(estimate.value, 0.0) / longest) if longest > 0 else ""
        table.add_row(name, f"{max(estimate.value, 0):,.0f}", _interval(estimate, whole=True), bar)
    return table


def _crossed(found: "CrossTable") -> list[RenderableType]:
    title = Text.assemble((" × ".join(found.columns), "bold"), (f"   each ± {found.margin:,.0f}", "dim"))
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("", style="dim", no_wrap=True, overflow="ellipsis", max_width=_NAME)
    shown = 5 if len(found.header) > 5 else len(found.header)
    for name in found.header[:shown]:
        table.add_column(name, justify="right", overflow="fold", max_width=11)
    for name, row in zip(found.rows, found.counts, strict=True):
        table.add_row(name, *(f"{max(count, 0):,}" for count in row[:shown]))
    left = len(found.header) - shown
    note = [Text(f"and {left} more columns; --json has all", style="dim")] if left else []
    return [title, Padding(Group(table, *note), (0, 0, 0, 2))]
