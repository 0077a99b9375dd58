"""Experiment sweeps on public records: grids of trainings, resumable, with tables and pictures."""

from sordino.sweeps.config import DataSource, Experiment, ExperimentSettings
from sordino.sweeps.results import Row, collect_rows, draw, write_results
from sordino.sweeps.runner import CurvePoint, ExperimentResult, Store, run_sweep
from sordino.sweeps.sweep import Panel, ReferencePoint, Sweep, parse_sweep, read_sweep

__all__ = [
    "CurvePoint",
    "DataSource",
    "Experiment",
    "ExperimentResult",
    "ExperimentSettings",
    "Panel",
    "ReferencePoint",
    "Row",
    "Store",
    "Sweep",
    "collect_rows",
    "draw",
    "parse_sweep",
    "read_sweep",
    "run_sweep",
    "write_results",
]
