"""What a command prints: one JSON document on stdout, or a page for people. Never both."""

import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from sordino.commands.running import Progress, is_rank_zero
from sordino.definitions import format_upper_bound
from sordino.errors import InvalidArgument

if TYPE_CHECKING:
    from sordino.commands import RunOutcome
    from sordino.runs import Metric

_ACCENT = "bold cyan"


def _remember(ctx: typer.Context, value: bool) -> bool:
    ctx.meta["sordino.json"] = value
    return value


JsonOption = Annotated[
    bool,
    typer.Option("--json", callback=_remember, help="Print one JSON document on stdout, everything else on stderr."),
]


class Output(Progress):
    """Where a command's words go.

    Args:
        as_json: stdout is kept for the one JSON document; everything else then goes to stderr.
    """

    is_shown = True

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        self.console = Console(file=sys.stderr if as_json else sys.stdout, highlight=False)
        self.stderr = Console(stderr=True, highlight=False)

    def status(self, text: str, *, title: str = "") -> None:
        """Print what is about to happen; of several processes one does."""
        if is_rank_zero():
            line = Text.assemble((title, "bold"), f": {text}") if title else Text(text)
            self.console.print(Padding(line, (1, 2)))

    def note(self, text: str) -> None:
        """Print a line on standard error."""
        self.stderr.print(text, highlight=False)

    @contextmanager
    def stage(self, words: str, *, total: int | None = None) -> "Iterator[Callable[..., None]]":
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


def numbers(text: str, name: str, example: str) -> list[float]:
    """Numbers, separated by commas."""
    try:
        return [float(part) for part in text.split(",") if part.strip()]
    except ValueError as error:
        raise InvalidArgument(f"{name} must be numbers with commas between, got {text!r}. Write {example}.") from error


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
# A training's outcome and its figures, for the commands that write a run folder.
# ----------------------------------------------------------------------------------------------------------------------


def render_outcome(outcome: "RunOutcome") -> tuple[RenderableType, ...]:
    """The outcome for people."""
    guarantee, path = outcome.guarantee, outcome.run.path
    rows = [
        ("unit", guarantee.privacy_unit.describe()),
        ("neighbors", guarantee.neighboring_relation.describe()),
        ("sampler", guarantee.sampler),
        ("accountant", guarantee.accountant.replace("_", " ")),
        *(("caveat", caveat) for caveat in guarantee.caveats),
    ]
    if outcome.interrupted:
        rows.append(("interrupted", f"after {outcome.steps:,} steps; what was charged stays charged"))
    claim = f"(ε = {format_upper_bound(guarantee.epsilon)}, δ = {guarantee.delta:g})"
    claim += "-differentially private" if guarantee.is_private else ": NOT private"
    blocks: list[RenderableType] = [heading(claim), key_value_table(rows)]
    if outcome.metrics:
        from sordino.report import label_names

        blocks += [Text(), render_metrics(outcome.metrics, label_names(outcome.run))]
    files = [("model", "model.safetensors"), ("report", "report.html"), ("picture", "report.png")]
    where = key_value_table([(name, str(path / file)) for name, file in files])
    return (*blocks, Text(), where)


def render_metrics(metrics: "Mapping[str, Metric]", labels: Sequence[str]) -> RenderableType:
    """Accuracy or errors on public records, and what they are compared with; `labels` are the names of the labels."""
    names = {
        "test_accuracy": "test accuracy, private",
        "baseline_test_accuracy": "non-private baseline",
        "majority_accuracy": "the majority class",
    }
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    for name, words in names.items():
        if name in metrics:
            own = name == "test_accuracy"
            bar = Text("━" * round(40 * metrics[name].value), style="cyan" if own else "bright_black")
            table.add_row(words, Text(f"{100 * metrics[name].value:.1f} %", style="bold" if own else ""), bar)
    blocks: list[RenderableType] = [table] if table.row_count else []
    if metrics.get("test_accuracy") and _learned_nothing(metrics):
        words = "Not above the majority class: this accuracy is reached without learning."
        blocks.append(Text(words, style="yellow"))
    from sordino.report import describe_figures

    return Group(*blocks, key_value_table(describe_figures(metrics, labels)))


def _learned_nothing(metrics: "Mapping[str, Metric]") -> bool:
    floor = metrics.get("majority_accuracy")
    return floor is not None and metrics["test_accuracy"].value <= floor.value
