"""What a command prints: one JSON document on stdout, or a page for people. Never both."""

import json
import math
import sys
from collections.abc import Iterable, Mapping
from typing import Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from sordino.definitions import round_up

__all__ = ["JsonOption", "Output", "facts", "finite", "heading", "print_error", "rounded"]

_ACCENT = "bold cyan"


def _remember(ctx: typer.Context, value: bool) -> bool:
    ctx.meta["sordino.json"] = value
    return value


JsonOption = Annotated[
    bool, typer.Option("--json", callback=_remember, help="One JSON document on stdout, everything else on stderr.")
]


class Output:
    """Where a command's words go.

    Args:
        as_json: stdout is kept for the one JSON document; everything else then goes to stderr.
    """

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        self.console = Console(stderr=as_json, highlight=False)
        self.stderr = Console(stderr=True, highlight=False)

    def say(self, text: RenderableType) -> None:
        """Print what is about to happen."""
        self.console.print(Padding(text, (1, 2)))

    def finish(self, document: Mapping[str, object], *page: RenderableType) -> None:
        """Print the document, or the page, as the last thing of a command."""
        if self.as_json:
            sys.stdout.write(json.dumps(document, ensure_ascii=False, allow_nan=False) + "\n")
        else:
            self.console.print(Padding(Group(*page), (1, 2)))


def heading(text: str, note: str = "") -> RenderableType:
    """The line a reader should remember, with a quieter line below it."""
    line = Text(text, style=_ACCENT)
    return Group(line, Text(note, style="dim"), Text()) if note else Group(line, Text())


def facts(rows: Iterable[tuple[str, str]]) -> RenderableType:
    """Names and values in two aligned columns."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, Text(value))
    return table


def finite(value: float) -> float | str:
    """JSON has no ∞: it is the string "inf"."""
    return "inf" if math.isinf(value) else value


def rounded(epsilon: float, digits: int = 5) -> float | str:
    """ε with few digits, never below itself."""
    return "inf" if math.isinf(epsilon) else float(round_up(epsilon, digits))


def print_error(kind: str, message: str, *, as_json: bool) -> None:
    """One line on stderr, and with `--json` one document on stdout."""
    line = Text.assemble(("sordino: ", "bold red"), " ".join(message.split()))
    Console(stderr=True, highlight=False, soft_wrap=True).print(line)
    if as_json:
        sys.stdout.write(json.dumps({"error": {"kind": kind, "message": message}}, ensure_ascii=False) + "\n")
