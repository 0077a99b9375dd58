"""`sordino train`, `demo`, `tune`, `compare`, `federate` and `recipes`."""

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text

from sordino.cli.console import Output, heading, key_value_table, numbers, render_outcome
from sordino.cli.options import COMMANDS, DATA, Form, command
from sordino.definitions import format_upper_bound

if TYPE_CHECKING:
    from sordino.commands import MethodComparison, RunOutcome
    from sordino.recipes import Recipe


def _listed_recipes(options: dict[str, Any]) -> dict[str, Any]:
    """``--recipe list`` is another command."""
    if options["recipe"] == "list":
        COMMANDS["recipes"](as_json=options["as_json"])
        raise typer.Exit
    return options


@command("train", forms={"data": DATA, "sampling": Form(metavar="NAME")}, prepare=_listed_recipes)
def print_training(output: Output, found: "RunOutcome") -> None:
    """Train a private model. Nothing is measured on records that you don't declare public."""
    output.print_result(found.to_dict(), *render_outcome(found))
    if found.interrupted:
        raise typer.Exit(130)


@command("demo")
def print_demo(output: Output, found: "RunOutcome") -> None:
    """Train a private model on real data: guarantee, accuracy next to a non-private baseline, report.

    The data are the public Adult census records that come with sordino, so nothing is downloaded, and what privacy
    costs can be shown.
    """
    print_training(output, found)


@command("tune", calls="tune_estimator", forms={"data": DATA})
def print_tuning(output: Output, found: "RunOutcome") -> None:
    """Tune hyperparameters by random stopping and keep the best model. The guarantee covers the whole search.

    How many runs there were, and what the others gave, is neither printed nor stored.
    """
    chosen = [
        (name.replace("_", " "), f"{value:.4g}" if isinstance(value, float) else str(value))
        for name, value in found.details["settings"].items()
    ]
    title = Text("chosen settings", style="dim")
    output.print_result(found.to_dict(), *render_outcome(found), Text(), title, key_value_table(chosen))


@command("federate", forms={"data": DATA})
def print_federation(output: Output, found: "RunOutcome") -> None:
    """Simulate federated learning: clients train on their own records, the server adds noise to their mean update."""
    output.print_result(found.to_dict(), *render_outcome(found))


@command("recipes")
def print_recipes(output: Output, found: "list[Recipe]") -> None:
    """List the recipes: whole pipelines from raw records to a private model."""
    table = Table.grid(padding=(0, 3, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for pipeline in found:
        rest = {
            "data": ", ".join(pipeline.data_sets),
            "public inputs": ", ".join(pipeline.public_inputs) or "none",
            "settings": ", ".join(pipeline.settings),
            "needs": pipeline.needs,
        }
        lines = [Text(f"{name}: {value}", style="dim") for name, value in rest.items() if value]
        table.add_row(Text(pipeline.name, style="bold cyan"), Group(Text(pipeline.description), *lines, Text()))
    output.print_result({"recipes": [_facts(pipeline) for pipeline in found]}, table)


def _facts(pipeline: "Recipe") -> dict[str, object]:
    return {
        "name": pipeline.name,
        "description": pipeline.description,
        "data_sets": list(pipeline.data_sets),
        "public_inputs": list(pipeline.public_inputs),
        "constants": pipeline.constants,
        "guarantee": pipeline.guarantee,
        "settings": list(pipeline.settings),
        "needs": pipeline.needs,
    }


# ----------------------------------------------------------------------------------------------------------------------
# Methods side by side.
# ----------------------------------------------------------------------------------------------------------------------


def _budgets_and_methods(options: dict[str, Any]) -> dict[str, Any]:
    """ε and methods as they were written ↦ lists."""
    methods = options["methods"]
    budgets = ",".join([*(options["epsilon"] or []), *(options["more"] or [])])
    return options | {
        "epsilon": numbers(budgets, "epsilon", "--epsilon 0.1,1,8") or [0.1, 1.0, 8.0],
        "methods": None if methods is None else [name.strip() for name in methods.split(",") if name.strip()],
    }


@command(
    "compare",
    forms={
        "data": DATA,
        "epsilon": Form(kind=list[str] | None, default=None),
        "methods": Form(kind=str | None),
    },
    prepare=_budgets_and_methods,
)
def print_comparison(
    output: Output,
    found: "MethodComparison",
    *,
    more: Annotated[list[str] | None, typer.Argument(metavar="[E ...]", help="Further values of ε.")] = None,  # noqa: ARG001 (taken by `prepare`)
) -> None:
    """Compare private methods on one table.

    On public data every method is fitted at every ε. On private records every fit is paid for, so there is one ε for
    all of them together, each method gets its part, and the measurements are taken on public test records alone.
    """
    title = f"{found.data}: {found.target}, δ = {found.delta:g} a fit" if found.public else _charges(found)
    output.print_result(
        found.to_dict(),
        heading(title),
        _table(found),
        Text(),
        Text(_footnote(found), style="dim"),
        Text(f"picture  {found.picture}", style="dim"),
    )


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
        "nothing": ("no model", "the majority class, or the mean"),
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
