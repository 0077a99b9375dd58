"""Experiment sweeps on public records: grids of trainings, resumable, with tables and pictures (floor 6)."""

from sordino.sweeps.cell import Cell, DataSource
from sordino.sweeps.figure import draw
from sordino.sweeps.publishing import publish
from sordino.sweeps.reading import parse, read
from sordino.sweeps.running import run
from sordino.sweeps.settings import Settings
from sordino.sweeps.store import Store
from sordino.sweeps.sweep import Mark, Panel, Sweep
from sordino.sweeps.tables import Row, rows
from sordino.sweeps.training import Outcome, Point

__all__ = [
    "Cell",
    "DataSource",
    "Mark",
    "Outcome",
    "Panel",
    "Point",
    "Row",
    "Settings",
    "Store",
    "Sweep",
    "draw",
    "parse",
    "publish",
    "read",
    "rows",
    "run",
]
