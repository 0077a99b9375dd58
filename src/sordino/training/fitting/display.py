"""The progress line of a run (floor 3): step, ε so far, time left. Nothing in it depends on a record.

Diagnostics are the exception: asked for by name, shown on standard error, never written, and a caveat in the guarantee.
"""

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from sordino import checks
from sordino.definitions import round_up

__all__ = ["DIAGNOSED", "Diagnostics", "ProgressLine", "diagnostics_called"]

DIAGNOSED = "losses and batch sizes were shown while it ran: what was seen there is not covered"
_BANNER = (
    "PRIVATE DIAGNOSTICS: the losses and batch sizes below are computed from the records without noise. They are not "
    "covered by the guarantee. Keep this terminal to yourself, and choose nothing by what you see."
)


class Diagnostics:
    """Mean loss and size of the batch that is being read. Private: for whoever may see the records themselves."""

    def __init__(self) -> None:
        self._total, self._records = 0.0, 0

    def add(self, losses: Tensor) -> None:
        """Take in the losses of a chunk, shape (records,)."""
        self._total += float(losses.detach().sum())
        self._records += len(losses)

    def words(self) -> str:
        """What was taken in since the last call."""
        mean = self._total / self._records if self._records else float("nan")
        text = f"loss {mean:.4f}, {self._records} records"
        self._total, self._records = 0.0, 0
        return text


def diagnostics_called(name: str | None) -> Diagnostics | None:
    """The diagnostics that were asked for; only "private" ones can be, so that nobody takes them for safe."""
    if name is None:
        return None
    checks.one_of(("private",), diagnostics=name, hint="Leave it out for a run whose output may be shared.")
    return Diagnostics()


class ProgressLine:
    """A line on standard error while a ``with`` block runs.

    Args:
        steps: length of the run.
        delta: the δ at which ε is shown.
        visible: False shows nothing.
        diagnostics: shown after every step, below a warning, whatever `visible` says.
    """

    def __init__(self, *, steps: int, delta: float, visible: bool, diagnostics: Diagnostics | None = None) -> None:
        self._diagnostics = diagnostics
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn(f"ε ≤ {{task.fields[epsilon]}} at δ = {delta:g}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=not visible and diagnostics is None,
        )
        self._task = self._progress.add_task("", total=steps, epsilon="0.00")

    def __enter__(self) -> Self:
        self._progress.start()
        if self._diagnostics is not None:
            self._progress.console.print(_BANNER, style="bold red", highlight=False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def show(self, *, steps: int, epsilon: float) -> None:
        """`steps` steps are done; all that was charged comes to at most `epsilon`."""
        self._progress.update(self._task, completed=steps, epsilon=round_up(epsilon))
        if self._diagnostics is not None:
            self._progress.console.print(f"step {steps}: {self._diagnostics.words()} (private)", highlight=False)
