"""`sordino compare DATA`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from sordino.cli.console import JsonOption, heading
from sordino.cli.options import DataArgument, DatasetNameOption, DryRunOption, LedgerOption, call, with_table_options
from sordino.definitions import format_upper_bound
from sordino.errors import InvalidArgument

if TYPE_CHECKING:
    from sordino.commands import MethodComparison

__all__ = ["compare_command"]


@with_table_options
def compare_command(
    data: DataArgument,
    more: Annotated[list[str] | None, typer.Argument(metavar="[E ...]", help="Further values of ε.")] = None,
    epsilon: Annotated[
        list[str] | None, typer.Option(help="ε of each fit; several values on public data, one on private data.")
    ] = None,
    delta: Annotated[float | None, typer.Option(help="δ, as for train.")] = None,
    methods: Annotated[
        str | None, typer.Option(help="Method names, separated by commas. Default: all that support the table.")
    ] = None,
    repeats: Annotated[int, typer.Option(help="Number of fits per method and ε, on public data.")] = 1,
    plot: Annotated[Path | None, typer.Option(help="Picture file, .png or .svg. Default: compare-NAME.png.")] = None,
    ledger: LedgerOption = None,
    dataset_name: DatasetNameOption = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
    **table: object,
) -> None:
    """Compare private methods on one table.

    On public data every method is fitted at every ε. On private records every fit is paid for, so there is one ε for
    all of them together, each method gets its part, and the measurements are taken on public test records alone.
    """
    options = locals()
    options["epsilon"] = _numbers([*(epsilon or []), *(options.pop("more") or [])]) or [0.1, 1.0, 8.0]
    options["methods"] = None if methods is None else [name.strip() for name in methods.split(",") if name.strip()]
    output, done = call("compare", options)
    title = f"{done.data}: {done.target}, δ = {done.delta:g} a fit" if done.public else _charges(done)
    output.print_result(
        done.to_dict(),
        heading(title),
        _table(done),
        Text(),
        Text(_footnote(done), style="dim"),
        Text(f"picture  {done.picture}", style="dim"),
    )


def _numbers(texts: list[str]) -> list[float]:
    """ε written with spaces or commas between, each once, in rising order."""
    found = set()
    for text in ",".join(texts).split(","):
        try:
            found.add(float(text)) if text.strip() else None
        except ValueError as error:
            raise InvalidArgument(f"epsilon must be numbers, got {text.strip()!r}. Write --epsilon 0.1,1,8.") from error
    return sorted(found)


def _charges(done: "MethodComparison") -> str:
    return f"All of it together: (ε = {format_upper_bound(done.found.total.epsilon)}, δ = {done.found.total.delta:g})"


def _shown(value: float, measure: str) -> str:
    return f"{100 * value:.1f} %" if measure == "accuracy" else f"{value:.4g}"


def _table(done: "MethodComparison") -> Table:
    found = done.found
    budgets = sorted({cell.epsilon for cell in found.cells})
    best = max if found.measure == "accuracy" else min
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("accuracy" if found.measure == "accuracy" else "RMSE", no_wrap=True)
    for budget in budgets:
        table.add_column(f"ε = {budget:.3g}", justify="right", no_wrap=True)
    table.add_column("", style="dim", overflow="fold")
    for method in done.methods:
        row = []
        for budget in budgets:
            here = [cell for cell in found.cells if cell.epsilon == budget]
            (cell,) = [cell for cell in here if cell.method == method.name]
            top = cell.mean == best(other.mean for other in here)
            row.append(Text(_shown(cell.mean, found.measure), style="bold cyan" if top else ""))
        table.add_row(method.name, *row, method.description)
    words = {
        "linear": ("linear model", "NOT private"),
        "trees": ("boosted trees", "NOT private"),
        "nothing": ("no model", "the commonest label, or the mean"),
    }
    for name, value in done.non_private.items():
        table.add_row(words[name][0], *[""] * (len(budgets) - 1), _shown(value, found.measure), words[name][1])
    return table


def _footnote(done: "MethodComparison") -> str:
    found = done.found
    if not done.public:
        return f"Measured on public test records. {found.total.describe()}"
    fits = sum(len(cell.events) for cell in found.cells)
    spread = (
        "one fit each: figures within a point may swap places" if done.repeats == 1 else f"means of {done.repeats} fits"
    )
    return (
        f"Measured on public test records, {spread}. On private records these {fits} fits would together "
        f"cost ε = {format_upper_bound(found.total.epsilon)} at δ = {found.total.delta:.2g}."
    )
