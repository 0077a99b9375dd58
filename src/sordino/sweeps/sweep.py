"""A sweep: its cells, and the panels of its picture (floor 6)."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from sordino.errors import InvalidArgument
from sordino.sweeps.cell import Cell, DataSource, ignores
from sordino.sweeps.settings import NUMERIC, Value, close, differing

__all__ = ["COURSES", "MEASURES", "Mark", "Panel", "Sweep", "check_panel", "default_panels"]

MEASURES = ("accuracy", "train_accuracy", "epsilon", "noise_multiplier", "seconds", "memory")
"""What a panel can show of a cell. Accuracies are shares, seconds are of the training alone, memory is in megabytes."""
COURSES = ("epoch", "epsilon", "spent")
"""What else than a setting can be the horizontal axis: epochs, the ε of the cell, and ε so far while it is trained."""
_NOISE = ("noise_multiplier", "target_epsilon")


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A value from elsewhere, drawn beside the measured ones.

    Args:
        x: place.
        y: value.
        words: whose it is.
    """

    x: float
    y: float
    words: str


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One pair of axes.

    Args:
        x: a setting, or a name in `COURSES`.
        y: a name in `MEASURES`.
        lines: the setting that tells lines apart, or None for one line.
        where: settings that the panel's cells have.
        logarithmic: whether the horizontal axis is.
        title: heading; made of the names when empty.
        marks: values from elsewhere.
        low: least y shown, or None.
        high: largest y shown, or None.
    """

    x: str
    y: str = "accuracy"
    lines: str | None = None
    where: Mapping[str, Value | None] = field(default_factory=dict)
    logarithmic: bool = False
    title: str = ""
    marks: tuple[Mark, ...] = ()
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A grid of trainings on public records, and how their results are drawn.

    Args:
        name: of the file, and of what is written.
        title: heading.
        note: a sentence below the heading.
        source: the data.
        cells: every training once.
        axes: what is varied, in the order of the file; without the seed.
        base: the value of each axis that holds where a panel says nothing else, where there is one.
        panels: of the picture.
    """

    name: str
    title: str
    note: str
    source: DataSource
    cells: tuple[Cell, ...]
    axes: tuple[str, ...]
    base: Mapping[str, Value | None]
    panels: tuple[Panel, ...]

    @property
    def is_isolated(self) -> bool:
        """Whether every cell gets a process of its own, without which its memory can't be told from others'."""
        return any(panel.y == "memory" for panel in self.panels)

    def of(self, panel: Panel) -> tuple[Cell, ...]:
        """The cells of a panel: other settings that are varied have the panel's value, or the base's."""
        pins: dict[str, Value | None] = {
            name: self.base[name] for name in self.axes if name in self.base and name not in (panel.x, panel.lines)
        }
        if panel.x == "epsilon":
            # ε follows from any of these, so all of their values belong to one curve.
            pins = {name: value for name, value in pins.items() if name not in _NOISE}
        pins.update(panel.where)
        return tuple(cell for cell in self.cells if all(_has(cell, name, value) for name, value in pins.items()))


def _has(cell: Cell, name: str, wanted: Value | None) -> bool:
    # σ and target ε are compared as they are told: the σ that a target leads to is no setting of the cell.
    value = getattr(cell.settings, name) if name in _NOISE else cell.value(name)
    return ignores(cell.settings, name) or close(value, wanted)


def default_panels(sweep: Sweep) -> tuple[Panel, ...]:
    """Accuracy, and ε, over the first axis with a scale; lines for the next axis; the rest as in the first cell."""
    scaled = [name for name in sweep.axes if name in NUMERIC] or list(sweep.axes) or ["epoch"]
    lines = next((name for name in sweep.axes if name != scaled[0]), None)
    rest = [name for name in sweep.axes if name not in (scaled[0], lines, *sweep.base)]
    where = {name: sweep.cells[0].values[name] for name in rest if name in sweep.cells[0].values}
    return tuple(Panel(x=scaled[0], y=y, lines=lines, where=where) for y in ("accuracy", "epsilon"))


def check_panel(sweep: Sweep, panel: Panel, *, place: str) -> None:
    """Refuse a panel without cells, or one that would put different settings at one point.

    Raises:
        InvalidArgument: see above.
    """
    cells = sweep.of(panel)
    if not cells:
        raise InvalidArgument(f"{place} must show at least one cell, got none. Change its where, or the grid.")
    points: dict[tuple[Value | None, ...], Cell] = {}
    for cell in cells:
        x = (cell.settings.noise_multiplier, cell.settings.target_epsilon) if panel.x == "epsilon" else (None,)
        across = x if panel.x in COURSES else (cell.value(panel.x),)
        line = cell.value(panel.lines) if panel.lines else None
        other = points.setdefault((line, *across), cell)
        left = differing([replace(one.settings, seed=0) for one in (cell, other)])
        if left:
            raise InvalidArgument(
                f"{place} must put one setting at each point, got cells that differ in {', '.join(left)}. Fix it by "
                "where or by [base], or take it for lines."
            )
