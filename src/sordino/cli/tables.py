"""`sordino describe`, `synthesize` and `schema draft | check`: what tables release, and how they are declared."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from sordino.cli.console import Output, heading, key_value_table, numbers
from sordino.cli.options import Form, command
from sordino.definitions import format_upper_bound
from sordino.errors import InvalidArgument

if TYPE_CHECKING:
    from sordino.commands import DescribedTable, SchemaCheck, SchemaDraft, SyntheticTable
    from sordino.description import CategorySummary, CrossTable, Estimate, NumericSummary

_SHOWN, _BAR, _NAME = 12, 16, 28
_TABLE = Form(metavar="DATA", help="A .csv, .tsv or .parquet file, or adult.")
_FILE = Form(metavar="FILE", help="A .csv, .tsv, .parquet or .feather file.")


# ----------------------------------------------------------------------------------------------------------------------
# Statistics of a table, at most 80 columns wide.
# ----------------------------------------------------------------------------------------------------------------------


def _levels_and_pairs(options: dict[str, Any]) -> dict[str, Any]:
    """Quantiles and cross tables as they were written ↦ numbers and pairs of columns."""
    levels = numbers(options["quantiles"], "quantiles", "--quantiles 0.25,0.5,0.75")
    return options | {"quantiles": tuple(levels), "cross": _pairs(options["cross"])}


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


@command(
    "describe",
    calls="describe_file",
    forms={
        "data": _TABLE,
        "quantiles": Form(kind=str, default="0.25,0.5,0.75"),
        "cross": Form(kind=list[str] | None),
    },
    prepare=_levels_and_pairs,
)
def print_description(output: Output, found: "DescribedTable") -> None:
    """Noisy counts, means, quantiles, histograms and cross tables with intervals, all in one charge."""
    output.print_result(found.to_dict(), *_description_page(found))


def _description_page(described: "DescribedTable") -> list[RenderableType]:
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


# ----------------------------------------------------------------------------------------------------------------------
# A synthetic table.
# ----------------------------------------------------------------------------------------------------------------------


@command("synthesize", forms={"data": _TABLE})
def print_synthesis(output: Output, found: "SyntheticTable") -> None:
    """Draw a synthetic table with the same columns, whose joint distribution was learned privately."""
    output.print_result(found.to_dict(), *_synthesis_page(found))


def _synthesis_page(found: "SyntheticTable") -> list[RenderableType]:
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


# ----------------------------------------------------------------------------------------------------------------------
# The declared schema: drafted, and held against a table.
# ----------------------------------------------------------------------------------------------------------------------


@command("schema draft", forms={"file": _FILE})
def print_schema_draft(output: Output, found: "SchemaDraft", *, file: Path) -> None:
    """Write a schema with blanks to fill in. Only the file's header is read, and no record."""
    names, path = found.columns, found.path
    shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    rows = [
        ("schema", str(path)),
        ("columns", shown),
        ("next", 'replace every "?" by what is public, delete columns that are no features'),
        ("then", f"sordino schema check {file} --schema {path}"),
    ]
    output.print_result(found.to_dict(), key_value_table(rows))


@command("schema check", forms={"file": _FILE})
def print_schema_check(output: Output, found: "SchemaCheck") -> None:
    """Say how many values of each column can be read, lie in range and are listed, and how many records have no label.

    Without --epsilon the shares are exact: for anyone who may see the records, and NOT FOR RELEASE. With --epsilon they
    are noisy, all of them together ε-private, and may be shown.
    """
    output.print_result(found.to_dict(), *_check_page(found))


def _check_page(found: "SchemaCheck") -> tuple[RenderableType, ...]:
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
