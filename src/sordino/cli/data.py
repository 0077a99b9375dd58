"""`sordino data list | show | get`: the named public datasets."""

from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from sordino.cli.console import JsonOption, heading, key_value_table
from sordino.cli.options import call

__all__ = ["data"]

data = typer.Typer(help="The named public datasets: which there are, what they hold, where they lie.")
NameArgument = Annotated[str, typer.Argument(help="Name from `sordino data list`.")]


@data.command("list")
def list_all(as_json: JsonOption = False) -> None:
    """List the named datasets."""
    out, sets = call("data_list", locals())
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="dim", pad_edge=False)
    for name in ("name", "train", "test", "task", "here"):
        number = name in {"train", "test"}
        table.add_column(name, justify="right" if number else "left", no_wrap=name != "task")
    for info in sets:
        table.add_row(
            Text(info.name, style="bold"),
            f"{info.train_shape[0]:,}",
            f"{info.test_shape[0]:,}",
            info.task,
            Text(info.origin, style="cyan") if info.present else Text("download", style="dim"),
        )
    out.print_result({"datasets": [info.to_dict() for info in sets]}, table)


@data.command("show")
def show_one(name: NameArgument, as_json: JsonOption = False) -> None:
    """Show what is known about a named dataset: shapes, labels, schema, license, files."""
    out, found = call("data_show", locals())
    info = found.info
    rows = [
        ("train", _shape(info.train_shape)),
        ("test", _shape(info.test_shape)),
        ("labels", ", ".join(found.labels)),
        ("license", info.license),
        ("source", info.source),
        ("here", f"{info.origin}: {info.location}" if info.present else f"no; `sordino data get {name}` fetches it"),
    ]
    if found.note:
        rows.append(("note", found.note))
    page: list[RenderableType] = [heading(info.title, info.task), key_value_table(rows)]
    if found.schema is not None:
        page.append(_columns(found.schema.to_dict()))
    out.print_result(found.to_dict(), *page)


@data.command("get")
def fetch(name: NameArgument, as_json: JsonOption = False) -> None:
    """Put a named dataset on this machine, checked against its checksum, and say where."""
    out, folder = call("data_get", locals())
    out.print_result({"name": name, "folder": str(folder)}, key_value_table([(name, str(folder))]))


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
