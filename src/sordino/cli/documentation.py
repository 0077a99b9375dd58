"""`sordino explain NAME` and `sordino learn LESSON`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markdown import Markdown
from rich.text import Text

from sordino.cli.console import JsonOption, heading, key_value_table
from sordino.cli.options import call
from sordino.commands.documentation import DocumentationIndex

__all__ = ["explain_command", "learn_command"]


def explain_command(
    name: Annotated[
        str, typer.Argument(help="Name of an error (CoupledRecords), a section (coupled-records) or a page (tuning).")
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """Print a section of the documentation: what an error means and what to do. Without a name, list them."""
    output, found = call("explain", locals())
    if isinstance(found, DocumentationIndex):
        parts = (("Errors", found.errors), ("Refusals", found.sections), ("Pages", found.pages))
        output.print_result(
            found.to_dict(),
            heading("What can be explained", "sordino explain NAME; page#section names a section of any page"),
            *(Text.assemble((f"{title}\n", "bold"), ", ".join(names), "\n") for title, names in parts),
        )
        return
    output.print_result(found.to_dict(), heading(found.title, found.address), Markdown(found.text))


def learn_command(
    lesson: Annotated[str | None, typer.Argument(help="Name of a lesson. Default: list all.")] = None,
    out: Annotated[Path | None, typer.Option(help="Notebook to write. Default: LESSON.ipynb.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Write a lesson of the course as a notebook, with exercises that check your answers."""
    output, found = call("learn", locals())
    if found.lesson is None:
        following = ("next", "sordino learn LESSON, then open the notebook, in Jupyter for instance")
        rows = [*found.titles.items(), ("", ""), following]
        output.print_result(found.to_dict(), heading("The course"), key_value_table(rows))
        return
    place = str(found.notebook)
    rows = [("lesson", found.titles[found.lesson]), ("notebook", place), ("next", f"jupyter lab {place}")]
    output.print_result(found.to_dict(), key_value_table(rows))
