"""A sweep: its cells, and the panels of its picture (floor 6)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sordino.errors import InvalidArgument
from sordino.sweeps.cell import Cell, DataSource
from sordino.sweeps.settings import NUMERIC, Value, close

__all__ = ["MEASURES", "Mark", "Panel", "Sweep"]

MEASURES = ("accuracy", "train_accuracy", "epsilon", "noise_multiplier", "seconds", "memory")
"""What a panel can show of a cell. Accuracies are shares, seconds are of the training alone, memory is in megabytes."""
COURSES = ("epoch", "epsilon")
"""What else than a setting can be the horizontal axis: epochs of the training, and the ε of the cell."""


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
        x: a setting, ``epoch`` or ``epsilon``.
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
    where: Mapping[str, Value] = field(default_factory=dict)
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
            pins.pop("noise_multiplier", None)
            pins.pop("target_epsilon", None)
        pins.update(panel.where)
        return tuple(cell for cell in self.cells if all(_has(cell, name, value) for name, value in pins.items()))


def _has(cell: Cell, name: str, wanted: Value | None) -> bool:
    value = cell.value(name)
    return value is None or close(value, wanted)


def default_panels(axes: Sequence[str]) -> tuple[Panel, ...]:
    """Accuracy, and ε, over the first axis with a scale; lines for the first of the others."""
    scaled = [name for name in axes if name in NUMERIC] or list(axes) or ["epoch"]
    lines = next((name for name in axes if name != scaled[0]), None)
    return tuple(Panel(x=scaled[0], y=y, lines=lines) for y in ("accuracy", "epsilon"))


def check_panel(sweep: Sweep, panel: Panel, *, place: str) -> None:
    """Refuse a panel without cells, or one that would put different settings at one point.

    Raises:
        InvalidArgument: see above.
    """
    cells = sweep.of(panel)
    if not cells:
        raise InvalidArgument(f"{place} must show at least one cell, got none. Change its where, or the grid.")
    left = [name for name in sweep.axes if name not in (panel.x, panel.lines)]
    if panel.x == "epsilon":
        left = [name for name in left if name not in ("noise_multiplier", "target_epsilon")]
    for name in left:
        values = {str(cell.value(name)) for cell in cells if cell.value(name) is not None}
        if len(values) > 1:
            raise InvalidArgument(
                f"{place} must fix {name}, which has {len(values)} values, got nothing for it. Add it to where, to "
                "lines, or to [base]."
            )
