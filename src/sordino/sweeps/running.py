"""`run`: all cells of a sweep that are not finished yet, side by side, each kept as soon as it is done (floor 6)."""

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import cast

import torch

from sordino import checks
from sordino.data import DataSet
from sordino.errors import SordinoError
from sordino.sweeps.cell import Cell
from sordino.sweeps.store import Store
from sordino.sweeps.sweep import Sweep
from sordino.sweeps.training import Outcome, train_cell

__all__ = ["OnCell", "run"]

OnCell = Callable[[Cell, Outcome, int], None]
"""Called with a cell, what it came to, and how many cells are finished."""
_Train = Callable[[Cell], Outcome]


def run(sweep: Sweep, folder: str | Path, *, jobs: int = 1, on_cell: OnCell | None = None) -> dict[str, Outcome]:
    """Train the cells that are not in `folder` yet, and keep each as soon as it is done.

    Each cell runs on one thread. A cell that fails is noted and the others go on; it is tried again the next time. An
    interrupt leaves what is finished, and the next call goes on from there.

    Guarantee: none for the results together. The data are public; each cell's ε is what one run with its settings
    would guarantee on private records if they had been fixed beforehand.

    Args:
        sweep: what to train.
        folder: of the results; made if it is not there.
        jobs: cells at a time, ≥ 1. More than one run in processes of their own; so does each cell, one after the
            other, when a panel shows memory.
        on_cell: called after every cell.

    Returns:
        What every cell came to, by key.

    Raises:
        DataUnavailable: the data can't be had.
        InvalidArgument: another sweep writes to the folder.
    """
    checks.integer(1, jobs=jobs)
    store = Store(folder)
    with store.writing():
        found = {key: outcome for key, outcome in store.outcomes(sweep.cells).items() if outcome.failure is None}
        left = [cell for cell in sweep.cells if cell.key not in found]
        if not left:
            return found
        # Here, so that data that can't be had are one error and not one a cell.
        dataset = sweep.source.load()
        alone = jobs == 1 and not sweep.is_isolated
        for cell, outcome in _here(left, dataset) if alone else _beside(left, jobs, isolated=sweep.is_isolated):
            store.keep(cell, outcome)
            found[cell.key] = outcome
            if on_cell is not None:
                on_cell(cell, outcome, len(found))
    return found


def attempt(cell: Cell, dataset: DataSet) -> Outcome:
    """Train one cell; what goes wrong becomes its outcome. The data are public, so the message may be told."""
    try:
        return train_cell(cell, dataset)
    except Exception as error:
        return Outcome(failure=str(error) if isinstance(error, SordinoError) else f"{type(error).__name__}: {error}")


def _here(cells: Sequence[Cell], dataset: DataSet) -> Iterator[tuple[Cell, Outcome]]:
    for cell in cells:
        with _one_thread():
            outcome = attempt(cell, dataset)
        yield cell, replace(outcome, memory=None)


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


# ── processes ───────────────────────────────────────────────────────────────────────────────────────────────


class _Worker:
    """A process that trains one cell after another."""

    def __init__(self) -> None:
        # A fresh interpreter: a copy of this one would inherit the state of torch's threads.
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self.cell: Cell | None = None

    def give(self, cell: Cell) -> None:
        self.cell = cell
        with suppress(OSError):  # a process that died is found by `take`
            self.pipe.send(cell)

    def take(self) -> tuple[Cell, Outcome]:
        """The cell that is done; or that it failed because the process died."""
        assert self.cell is not None
        cell, self.cell = self.cell, None
        try:
            return cell, cast("Outcome", self.pipe.recv())
        except (EOFError, OSError):
            self.process.join()
            return cell, Outcome(failure=f"the process ended with exit code {self.process.exitcode}")

    @property
    def is_alive(self) -> bool:
        return self.process.exitcode is None

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _work(pipe: Connection) -> None:
    """What a worker does until its pipe is closed."""
    torch.set_num_threads(1)
    dataset: DataSet | None = None
    try:
        while True:
            cell = cast("Cell", pipe.recv())
            dataset = cell.source.load() if dataset is None else dataset
            pipe.send(attempt(cell, dataset))
    except (EOFError, KeyboardInterrupt, BrokenPipeError):
        return


def _beside(cells: Sequence[Cell], jobs: int, *, isolated: bool) -> Iterator[tuple[Cell, Outcome]]:
    left, workers = list(cells), [_Worker() for _ in range(min(jobs, len(cells)))]
    try:
        for worker in workers:
            worker.give(left.pop(0))
        while busy := [worker for worker in workers if worker.cell is not None]:
            ready = wait([worker.pipe for worker in busy])
            for worker in [worker for worker in busy if worker.pipe in ready]:
                cell, outcome = worker.take()
                yield cell, outcome if isolated else replace(outcome, memory=None)
                if left:
                    if isolated or not worker.is_alive:
                        worker.end()
                        workers[workers.index(worker)] = worker = _Worker()
                    worker.give(left.pop(0))
    finally:
        for worker in workers:
            worker.end()
