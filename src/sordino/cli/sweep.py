"""`sordino sweep FILE`: a grid of trainings on public data, side by side, with tables and a picture."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from sordino import checks
from sordino.cli.console import JsonOption, Output, finite, heading
from sordino.definitions import format_upper_bound

if TYPE_CHECKING:
    from sordino.sweeps.config import Experiment
    from sordino.sweeps.results import Row
    from sordino.sweeps.runner import ExperimentResult
    from sordino.sweeps.sweep import Sweep

__all__ = ["sweep"]


def sweep(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The sweep, a TOML file.")],
    plan: Annotated[
        bool, typer.Option("--plan", help="Only say how many cells there are and what ε each has.")
    ] = False,
    jobs: Annotated[int, typer.Option(help="Cells at a time, each on one thread.")] = 1,
    out_folder: Annotated[
        Path | None, typer.Option("--out", help="The folder of the results; sweep-NAME if not given.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Train every cell of a grid on PUBLIC data; draw accuracy, ε, time and memory.

    Finished cells are kept: the same command goes on where it was cut off, and trains anew what was changed. For
    private records there is `sordino tune`.
    """
    checks.integer(1, jobs=jobs)
    from sordino.sweeps import collect_rows, read_sweep, run_sweep, write_results

    out, asked = Output(as_json=as_json), read_sweep(file)
    if plan:
        out.print_result(_planned(asked), heading(f"{asked.title}: {len(asked.cells)} cells"), _plan_table(asked))
        return
    folder = Path(f"sweep-{asked.name}") if out_folder is None else out_folder
    out.print_status(Text.assemble((asked.title, "bold"), f": {len(asked.cells)} cells on public records"))
    line = _Progress(out, len(asked.cells))
    outcomes = run_sweep(asked, folder, jobs=jobs, on_cell=line.show)
    paths = write_results(asked, outcomes, folder)
    from sordino.sweeps.results import caveat, document

    found = collect_rows(asked, outcomes)
    failed = sum(len(row.failures) for row in found)
    files = {suffix: str(path) for suffix, path in paths.items()}
    out.print_result(
        {**document(asked, found), "files": files},
        heading(asked.title, asked.note),
        _table(asked, found),
        Text(),
        Text(caveat(asked), style="dim"),
        *([Text(f"{failed} cells failed; the same command tries them again.", style="bold yellow")] if failed else []),
        Text(f"picture  {paths['png']}", style="dim"),
    )
    if failed:
        raise typer.Exit(1)


class _Progress:
    """One line a finished cell, on stderr."""

    def __init__(self, out: Output, cells: int) -> None:
        self._console, self._cells = out.stderr, cells
        self._began, self._first = time.monotonic(), 0

    def show(self, cell: "Experiment", outcome: "ExperimentResult", done: int) -> None:
        """Tell of one cell."""
        self._first = self._first or done
        spent = (time.monotonic() - self._began) / (done - self._first + 1)
        left = f"about {spent * (self._cells - done) / 60:.1f} min left" if done < self._cells else "done"
        told = f"failed: {outcome.failure}" if outcome.failure is not None else f"{100 * outcome.accuracy:.1f} %"
        self._console.print(
            f"  {done}/{self._cells}  {cell.words}: {told}, {_epsilon(cell)}, {outcome.seconds:.1f} s · {left}",
            markup=False,
            soft_wrap=True,
        )


def _epsilon(cell: "Experiment") -> str:
    return "no guarantee" if cell.epsilon is None else f"ε = {format_upper_bound(cell.epsilon, 3)}"


def _plan_table(asked: "Sweep") -> Table:
    """Settings, σ, ε, δ and steps of every row; how often each is trained."""
    from sordino.sweeps.results import collect_rows, heads, line

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    kept = heads(asked).index("accuracy")
    for name in (*heads(asked)[:kept], "seeds"):
        table.add_column(name, justify="right")
    for row in collect_rows(asked, {}):
        table.add_row(*line(asked, row)[:kept], str(row.missing))
    return table


def _planned(asked: "Sweep") -> dict[str, object]:
    return {
        "name": asked.name,
        "title": asked.title,
        "cells": [
            {
                "settings": dict(cell.told),
                "epsilon": "no guarantee" if cell.epsilon is None else finite(cell.epsilon),
                "delta": cell.settings.delta,
                "noise_multiplier": float(cell.plan.step_plan(0).noise_multiplier),
                "steps": cell.plan.steps,
            }
            for cell in asked.cells
        ],
    }


def _table(asked: "Sweep", found: "tuple[Row, ...]") -> Table:
    from sordino.sweeps.results import heads, line

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in heads(asked):
        table.add_column(name, justify="right")
    for row in found:
        table.add_row(*line(asked, row))
    return table
