"""`sordino explain`, `learn` and `data list | show | get`: documentation, course and datasets of sordino."""

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.markdown import Markdown
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from sordino.cli.console import Output, heading, key_value_table
from sordino.cli.options import command
from sordino.commands.documentation import DocumentationIndex, DocumentationSection

if TYPE_CHECKING:
    from sordino.commands import CourseLesson
    from sordino.data.loading import DatasetDescription, DatasetInfo


@command("explain")
def print_section(output: Output, found: DocumentationSection | DocumentationIndex) -> None:
    """Print a section of the documentation: what an error means and what to do. Without a name, list them."""
    if isinstance(found, DocumentationIndex):
        parts = (("Errors", found.errors), ("Refusals", found.sections), ("Pages", found.pages))
        output.print_result(
            found.to_dict(),
            heading("What can be explained", "sordino explain NAME; page#section names a section of any page"),
            *(Text.assemble((f"{title}\n", "bold"), ", ".join(names), "\n") for title, names in parts),
        )
        return
    output.print_result(found.to_dict(), heading(found.title, found.address), Markdown(found.text))


@command("learn")
def print_lesson(output: Output, found: "CourseLesson") -> None:
    """Write a lesson of the course as a notebook, with exercises that check your answers."""
    if found.lesson is None:
        following = ("next", "sordino learn LESSON, then open the notebook, in Jupyter for instance")
        rows = [*found.titles.items(), ("", ""), following]
        output.print_result(found.to_dict(), heading("The course"), key_value_table(rows))
        return
    path = str(found.notebook)
    rows = [("lesson", found.titles[found.lesson]), ("notebook", path), ("next", f"jupyter lab {path}")]
    output.print_result(found.to_dict(), key_value_table(rows))


@command("data list")
def print_datasets(output: Output, found: "list[DatasetInfo]") -> None:
    """List the named datasets."""
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="dim", pad_edge=False)
    for name in ("name", "train", "test", "task", "here"):
        number = name in {"train", "test"}
        table.add_column(name, justify="right" if number else "left", no_wrap=name != "task")
    for info in found:
        table.add_row(
            Text(info.name, style="bold"),
            f"{info.train_shape[0]:,}",
            f"{info.test_shape[0]:,}",
            info.task,
            Text(info.origin, style="cyan") if info.present else Text("download", style="dim"),
        )
    output.print_result({"datasets": [info.to_dict() for info in found]}, table)


@command("data show")
def print_dataset(output: Output, found: "DatasetDescription") -> None:
    """Show what is known about a named dataset: shapes, labels, schema, license, files."""
    info = found.info
    rows = [
        ("train", _shape(info.train_shape)),
        ("test", _shape(info.test_shape)),
        ("labels", ", ".join(found.labels)),
        ("license", info.license),
        ("source", info.source),
        (
            "here",
            f"{info.origin}: {info.location}" if info.present else f"no; `sordino data get {info.name}` fetches it",
        ),
    ]
    if found.note:
        rows.append(("note", found.note))
    page: list[RenderableType] = [heading(info.title, info.task), key_value_table(rows)]
    if found.schema is not None:
        page.append(_columns(found.schema.to_dict()))
    output.print_result(found.to_dict(), *page)


@command("data get")
def print_download(output: Output, folder: Path, *, name: str) -> None:
    """Put a named dataset on this machine, checked against its checksum, and say where."""
    output.print_result({"name": name, "folder": str(folder)}, key_value_table([(name, str(folder))]))


def _shape(shape: tuple[int, ...]) -> str:
    return f"{shape[0]:,} records of {' × '.join(map(str, shape[1:]))}"


def _columns(schema: dict[str, object]) -> RenderableType:
    """The declared columns, one a line."""
    columns = schema.get("columns")
    rows = []
    for column in columns if isinstance(columns, list) else []:
        if "low" in column:
            rows.append((str(column["name"]), f"from {column['low']:g} to {column['high']:g}"))
        else:
            names = [str(category) for category in column["categories"]]
            shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
            rows.append((str(column["name"]), shown))
    return Group(Text("\ncolumns", style="dim"), Padding(key_value_table(rows), (0, 0, 0, 2)))
