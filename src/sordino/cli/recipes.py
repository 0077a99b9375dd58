"""`sordino recipes`: whole pipelines to choose from."""

from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from sordino.cli.console import JsonOption
from sordino.cli.options import call

if TYPE_CHECKING:
    from sordino.recipes import Recipe

__all__ = ["recipes_command"]


def recipes_command(as_json: JsonOption = False) -> None:
    """List the recipes: whole pipelines from raw records to a private model."""
    output, found = call("recipes", locals())
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
