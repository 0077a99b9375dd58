"""The progress line of a run (floor 3): step, ε so far, time left. Nothing in it depends on a record."""

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from sordino.definitions import round_up

__all__ = ["ProgressLine"]


class ProgressLine:
    """A line on standard error while a ``with`` block runs.

    Args:
        steps: length of the run.
        delta: the δ at which ε is shown.
        visible: False shows nothing.
    """

    def __init__(self, *, steps: int, delta: float, visible: bool) -> None:
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn(f"ε ≤ {{task.fields[epsilon]}} at δ = {delta:g}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=not visible,
        )
        self._task = self._progress.add_task("", total=steps, epsilon="0.00")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def show(self, *, steps: int, epsilon: float) -> None:
        """`steps` steps are done; all that was charged comes to at most `epsilon`."""
        self._progress.update(self._task, completed=steps, epsilon=round_up(epsilon))
