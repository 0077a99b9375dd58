"""Finished cells on disk: one JSON line each, written in one piece (floor 6)."""

import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import cast

from sordino.errors import InvalidArgument
from sordino.runs.files import decode, encode
from sordino.sweeps.cell import Cell
from sordino.sweeps.training import Outcome, Point

__all__ = ["FILE", "Store", "plain"]

FILE = "cells.jsonl"


class Store:
    """The cells that were trained, in one folder.

    A line is appended by one write and forced to disk, so a crash can cut off the last line at most; such a line is
    passed over, and its cell is trained again. Later lines of a cell replace earlier ones.

    Args:
        folder: made if it is not there.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._path = self.folder / FILE

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Nobody else may write to the folder meanwhile.

        Raises:
            InvalidArgument: somebody does.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / ".lock").open("w", encoding="ascii") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise InvalidArgument(
                    f"out must be a folder that no other sweep writes to, got {str(self.folder)!r}. Wait, or name "
                    "another."
                ) from error
            yield

    def outcomes(self, cells: Iterable[Cell]) -> dict[str, Outcome]:
        """What is known of `cells`, by key."""
        wanted, found = {cell.key for cell in cells}, dict[str, Outcome]()
        for line in self._lines():
            try:
                body = json.loads(line)
                if body["key"] in wanted:
                    found[body["key"]] = _outcome(body["outcome"])
            except (ValueError, KeyError, TypeError, InvalidArgument):
                continue
        return found

    def keep(self, cell: Cell, outcome: Outcome) -> None:
        """Write one cell."""
        body = {"key": cell.key, "settings": asdict(cell.settings), "outcome": plain(outcome)}
        line = json.dumps(body, ensure_ascii=False, allow_nan=False) + "\n"
        handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            size = os.fstat(handle).st_size
            torn = size > 0 and os.pread(handle, 1, size - 1) != b"\n"
            os.write(handle, (("\n" if torn else "") + line).encode())
            os.fsync(handle)
        finally:
            os.close(handle)

    def _lines(self) -> list[str]:
        return self._path.read_text(encoding="utf-8", errors="replace").split("\n") if self._path.is_file() else []


def plain(outcome: Outcome) -> dict[str, object]:
    """The outcome as JSON types, in which an infinite ε is the string "inf"."""
    course = [{**asdict(point), "epsilon": encode(point.epsilon)} for point in outcome.course]
    return {**asdict(outcome), "epsilon": encode(outcome.epsilon), "course": course}


def _outcome(body: Mapping[str, object]) -> Outcome:
    course = tuple(
        Point(**{**point, "epsilon": decode(point["epsilon"])})
        for point in cast("list[dict[str, float]]", body["course"])
    )
    return Outcome(**{**body, "epsilon": decode(body["epsilon"]), "course": course})
