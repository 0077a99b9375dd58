"""What a command prints: one JSON document on stdout, or a page for people. Never both."""

import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from sordino.definitions import format_upper_bound
from sordino.errors import InvalidArgument

if TYPE_CHECKING:
    from sordino.training.distributed import DistributedContext

__all__ = [
    "JsonOption",
    "Output",
    "check_single_process_command",
    "check_single_process_options",
    "epsilon_text",
    "exact_text",
    "finite",
    "heading",
    "init_distributed",
    "is_rank_zero",
    "key_value_table",
    "print_error",
    "round_up",
    "rounded",
]


_ACCENT = "bold cyan"
_SMALL, _LONGEST = 0.01, 300


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

    def print_status(self, text: RenderableType) -> None:
        """Print what is about to happen."""
        self.console.print(Padding(text, (1, 2)))

    @contextmanager
    def progress(self, words: str, *, total: int | None = None) -> "Iterator[Callable[..., None]]":
        """Show on standard error that a job goes on, and for how long it has, while the block is carried out.

        Nothing is shown where standard error is no terminal. What is shown depends on no record: give `total` and call
        what is yielded only for things whose number is public.

        Args:
            words: what is being done.
            total: how many parts it has, if that is public.

        Yields:
            Call it after each part; ``words=`` changes what is being done.
        """
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            SpinnerColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        counted = () if total is None else (BarColumn(bar_width=24), MofNCompleteColumn())
        left = () if total is None else (TextColumn("elapsed,", style="dim"), TimeRemainingColumn(), TextColumn("left"))
        columns = (SpinnerColumn(), TextColumn("{task.description}"), *counted, TimeElapsedColumn(), *left)
        with Progress(*columns, console=self.stderr, transient=True, disable=not self.stderr.is_terminal) as shown:
            task = shown.add_task(words, total=total)

            def advance(*_: object, words: str | None = None) -> None:
                shown.update(task, advance=1 if words is None else 0, description=words)

            yield advance

    def print_result(self, document: Mapping[str, object], *page: RenderableType) -> None:
        """Print the document, or the page, as the last thing of a command."""
        if self.as_json:
            sys.stdout.write(json.dumps(document, ensure_ascii=False, allow_nan=False) + "\n")
        else:
            self.console.print(Padding(Group(*page), (1, 2)))


def heading(text: str, note: str = "") -> RenderableType:
    """The line a reader should remember, with a quieter line below it."""
    line = Text(text, style=_ACCENT)
    return Group(line, Text(note, style="dim"), Text()) if note else Group(line, Text())


def key_value_table(rows: Iterable[tuple[str, str]]) -> RenderableType:
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


def rounded(epsilon: float, digits: int = 5, *, most: float = math.inf) -> float | str:
    """ε with few digits, never below itself: five decimals, or as many more as it takes for five that are not 0.

    Args:
        epsilon: ≥ 0.
        digits: decimals of a number that is not small.
        most: what it is known to be at most; rounding does not take it above.
    """
    if math.isinf(epsilon):
        return "inf"
    if 0 < epsilon < _SMALL:
        digits += -2 - math.floor(math.log10(epsilon))
    found = float(format_upper_bound(epsilon, digits))
    while found > most >= epsilon and digits < _LONGEST:
        digits += 1
        found = float(format_upper_bound(epsilon, digits))
    return min(found, most) if epsilon <= most else found


def epsilon_text(epsilon: float | str) -> str:
    """What `rounded` gave, for people."""
    if isinstance(epsilon, str):
        return "∞"
    return f"{epsilon:.5f}" if round(epsilon, 5) == epsilon else exact_text(epsilon)


def exact_text(value: float) -> str:
    """The shortest text that is this very number: nothing is rounded in a line that says ≤."""
    return repr(float(value)).removesuffix(".0")


def round_up(value: float, digits: int = 6) -> str:
    """A noise multiplier with few digits, never below itself, so that the printed number is enough noise."""
    text = f"{value:.{digits}g}"
    if float(text) < value:
        step = 10.0 ** (math.floor(math.log10(value)) - digits + 1)
        text = f"{(math.floor(value / step) + 1) * step:.{digits}g}"
    return text if float(text) >= value else exact_text(value)


def print_error(kind: str, message: str, *, as_json: bool) -> None:
    """One line on stderr, and with `--json` one document on stdout."""
    line = Text.assemble(("sordino: ", "bold red"), " ".join(message.split()))
    Console(stderr=True, highlight=False, soft_wrap=True).print(line)
    if as_json:
        sys.stdout.write(json.dumps({"error": {"kind": kind, "message": message}}, ensure_ascii=False) + "\n")


# ----------------------------------------------------------------------------------------------------------------------
# Commands under torch's launcher: `train` is one run of all processes, every other command needs a single one.
# ----------------------------------------------------------------------------------------------------------------------


_TOGETHER = ("train",)


def _several() -> bool:
    """Whether a launcher started this process as one of several."""
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def is_rank_zero() -> bool:
    """Whether this process prints the command's last word: the first one, or the only one."""
    return not _several() or os.environ["RANK"] == "0"


def check_single_process_command(command: str | None) -> None:
    """Refuse a command that every process would carry out by itself, each with its own noise and its own charges.

    Raises:
        InvalidArgument: names the command.
    """
    if _several() and command not in _TOGETHER:
        raise InvalidArgument(
            f"command must be train in several processes, got {command}, which each of them would carry out again. "
            "Start it in one process."
        )


def check_single_process_options(**given: object) -> None:
    """Refuse options that work in a single process only.

    Raises:
        InvalidArgument: names those that were given.
    """
    names = [name for name, value in given.items() if value]
    if _several() and names:
        raise InvalidArgument(
            f"{', '.join(names)} must be left out in several processes, got a value. Start the command in one process."
        )


@contextmanager
def init_distributed() -> "Iterator[DistributedContext]":
    """The processes that the launcher started, joined into a process group; just this one where it is alone.

    The group is that of gloo: the command trains on processors. After a failure no process waits for the others; the
    launcher ends them.
    """
    from sordino.training.distributed import DistributedContext, get_distributed_context

    if not _several():
        yield DistributedContext()
        return
    import torch.distributed as dist

    dist.init_process_group("gloo")
    yield get_distributed_context()
    dist.barrier()
    dist.destroy_process_group()
