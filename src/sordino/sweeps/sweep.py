"""A sweep: its cells, and the panels of its picture."""

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

from sordino import checks
from sordino.data.catalog import CATALOG
from sordino.errors import InvalidArgument
from sordino.sweeps.config import (
    NUMERIC,
    DataSource,
    Experiment,
    Value,
    canonical,
    checked,
    close,
    differing,
    ignores,
    settings_from,
)

__all__ = [
    "COURSES",
    "MEASURES",
    "Panel",
    "ReferencePoint",
    "Sweep",
    "check_panel",
    "default_panels",
    "parse_sweep",
    "read_sweep",
]


MEASURES = ("accuracy", "train_accuracy", "epsilon", "noise_multiplier", "seconds", "memory")
"""What a panel can show of a cell. Accuracies are shares, seconds are of the training alone, memory is in megabytes."""
COURSES = ("epoch", "epsilon", "spent")
"""What else than a setting can be the horizontal axis: epochs, the ε of the cell, and ε so far while it is trained."""
_NOISE = ("noise_multiplier", "target_epsilon")


@dataclass(frozen=True, kw_only=True)
class ReferencePoint:
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
    marks: tuple[ReferencePoint, ...] = ()
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
    cells: tuple[Experiment, ...]
    axes: tuple[str, ...]
    base: Mapping[str, Value | None]
    panels: tuple[Panel, ...]

    @property
    def is_isolated(self) -> bool:
        """Whether every cell gets a process of its own, without which its memory can't be told from others'."""
        return any(panel.y == "memory" for panel in self.panels)

    def of(self, panel: Panel) -> tuple[Experiment, ...]:
        """The cells of a panel: other settings that are varied have the panel's value, or the base's."""
        pins: dict[str, Value | None] = {
            name: self.base[name] for name in self.axes if name in self.base and name not in (panel.x, panel.lines)
        }
        if panel.x == "epsilon":
            # ε follows from any of these, so all of their values belong to one curve.
            pins = {name: value for name, value in pins.items() if name not in _NOISE}
        pins.update(panel.where)
        return tuple(cell for cell in self.cells if all(_has(cell, name, value) for name, value in pins.items()))


def _has(cell: Experiment, name: str, wanted: Value | None) -> bool:
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
    points: dict[tuple[Value | None, ...], Experiment] = {}
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


# ----------------------------------------------------------------------------------------------------------------------
# A sweep from its TOML file: every error names the key and its line.
# ----------------------------------------------------------------------------------------------------------------------


_TOP = ("title", "note", "data", "base", "grid", "grids", "panels")
_DATA = ("name", "records", "public", "test", "schema")
_PANEL = ("x", "y", "lines", "where", "logarithmic", "title", "marks", "low", "high")
_PARTNERS = {
    "noise_multiplier": "target_epsilon",
    "target_epsilon": "noise_multiplier",
    "epochs": "steps",
    "steps": "epochs",
}
_MOST_CELLS = 10_000


def read_sweep(path: str | Path) -> Sweep:
    """The sweep that a TOML file declares; no data are read.

    Args:
        path: of the file. Its name without the suffix is the sweep's name; paths of data files are relative to it.

    Raises:
        InvalidArgument: the file can't be read, or says something that it can't; the message names key and line.
    """
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"sweep must be a TOML file, got {str(path)!r}. Check the path.") from error
    return parse_sweep(text, name=file.stem, folder=file.parent)


def parse_sweep(text: str, *, name: str = "sweep", folder: Path | None = None) -> Sweep:
    """The sweep that TOML text declares; no data are read.

    Args:
        text: as in a file.
        name: of the sweep.
        folder: where relative paths of data files begin; None is the working directory.

    Raises:
        InvalidArgument: as for `read`.

    Example:
        >>> sweep = parse_sweep('''
        ... [data]
        ... name = "adult"
        ... [base]
        ... batch_size = 1000
        ... learning_rate = 1.0
        ... epochs = 2
        ... [grid]
        ... noise_multiplier = [1.0, 2.0]
        ... ''')
        >>> [round(cell.epsilon, 2) for cell in sweep.cells]
        [1.94, 0.55]
    """
    try:
        body = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidArgument(f"{name}.toml must be TOML, got text that isn't: {error}.") from error
    lines = _Lines(text, name)
    _only(body, _TOP, "", lines)
    source = _source(_table(body, "data", lines), lines, folder or Path())
    base = {
        key: checked(key, value, place=lines.place("base", key)) for key, value in _table(body, "base", lines).items()
    }
    grids = _grids(body, lines)
    cells = _cells(base, grids, source)
    axes = tuple(dict.fromkeys(key for grid in grids for key, values in grid.items() if key != "seed"))
    # A value of the base that a grid replaces everywhere fixes nothing.
    held = {axis: base[axis] for axis in axes if any(cell.values.get(axis) == base.get(axis, ()) for cell in cells)}
    plain = Sweep(
        name=name,
        title=_text(body, "title", lines) or name,
        note=_text(body, "note", lines),
        source=source,
        cells=cells,
        axes=axes,
        base=held,
        panels=(),
    )
    return replace(plain, panels=_panels(body, plain, lines))


class _Lines:
    """Where the keys of a TOML text stand."""

    def __init__(self, text: str, name: str) -> None:
        self._name, self._found = name, dict[tuple[str, int, str], int]()
        section, place, seen = "", 0, dict[str, int]()
        for number, line in enumerate(text.splitlines(), start=1):
            if header := re.match(r"\s*\[\[?\s*([\w.\-]+)\s*\]\]?\s*(#.*)?$", line):
                section = header[1]
                place = seen[section] = seen.get(section, -1) + 1
                self._found.setdefault((section, place, ""), number)
            elif key := re.match(r"\s*[\"']?([\w\-]+)[\"']?\s*=", line):
                self._found.setdefault((section, place, key[1]), number)

    def place(self, section: str, key: str, number: int = 0) -> str:
        """The key with its file, line and section, as an error names it."""
        line = self._found.get((section, number, key)) or self._found.get((section, number, ""))
        words = [f"{self._name}.toml", *([f"line {line}"] if line else []), *([f"[{section}]"] if section else [])]
        return f"{key or section} ({', '.join(words)})"


def _only(table: Mapping[str, object], known: Sequence[str], section: str, lines: _Lines, number: int = 0) -> None:
    for key in table:
        if key not in known:
            place = lines.place(section, key, number)
            raise InvalidArgument(f"{place} must be one of {', '.join(known)}, got a key that is unknown.")


def _table(body: Mapping[str, object], key: str, lines: _Lines) -> dict[str, object]:
    found = body.get(key, {})
    if not isinstance(found, dict):
        raise InvalidArgument(f"{lines.place('', key)} must be a table, got something else. Write [{key}].")
    return found


def _tables(body: Mapping[str, object], key: str, lines: _Lines) -> list[dict[str, object]]:
    found = body.get(key, [])
    if not isinstance(found, list) or not all(isinstance(table, dict) for table in found):
        raise InvalidArgument(f"{lines.place('', key)} must be tables, got something else. Write [[{key}]].")
    return found


def _text(table: Mapping[str, object], key: str, lines: _Lines, section: str = "", number: int = 0) -> str:
    found = table.get(key, "")
    if not isinstance(found, str):
        raise InvalidArgument(f"{lines.place(section, key, number)} must be text, got {found!r}. Put it in quotes.")
    return found


# ── data ────────────────────────────────────────────────────────────────────────────────────────────────────


def _source(table: Mapping[str, object], lines: _Lines, folder: Path) -> DataSource:
    _only(table, _DATA, "data", lines)
    name = _text(table, "name", lines, "data")
    if not name:
        raise InvalidArgument(f"{lines.place('data', 'name')} must be a data set, got none. See `sordino data list`.")
    records = table.get("records")
    if records is not None:
        checks.integer(1, hint="", **{lines.place("data", "records"): records})
    if name in CATALOG:
        extra = [key for key in ("test", "schema") if key in table]
        if extra or table.get("public", True) is not True:
            key = extra[0] if extra else "public"
            raise InvalidArgument(f"{lines.place('data', key)} must be left out for a named set, which is public.")
        size = CATALOG[name].train_shape[0]
        if records is not None and int(str(records)) > size:
            place = lines.place("data", "records")
            raise InvalidArgument(f"{place} must be at most the {size} training records, got {records}. Lower it.")
        return DataSource(name=name, records=int(str(records or size)))
    if table.get("public") is not True:
        raise InvalidArgument(
            f"{lines.place('data', 'name')} must be public, got {name!r}, which is not declared so: looking at the "
            "accuracies of many settings on private records is a selection that no cell's ε covers. Use `sordino "
            "tune`, which includes the whole search in the guarantee, or declare data that anyone may see with "
            "public = true."
        )
    if records is None:
        raise InvalidArgument(
            f"{lines.place('data', 'records')} must be declared for a file, got nothing: ε is told before data are "
            "read. Write how many training records to use."
        )
    paths = {key: str(folder / text) for key in ("test", "schema") if (text := _text(table, key, lines, "data"))}
    return DataSource(name=str(folder / name), records=int(str(records)), **paths)


# ── grids and cells ─────────────────────────────────────────────────────────────────────────────────────────


def _grids(body: Mapping[str, object], lines: _Lines) -> list[dict[str, list[Value]]]:
    one, many = _table(body, "grid", lines), _tables(body, "grids", lines)
    if one and many:
        raise InvalidArgument(f"{lines.place('', 'grids')} must be left out beside [grid], got both. Keep one.")
    tables = [("grid", 0, one)] if not many else [("grids", number, table) for number, table in enumerate(many)]
    return [
        {key: _values(key, value, lines.place(section, key, number)) for key, value in table.items()}
        for section, number, table in tables
    ]


def _values(key: str, value: object, place: str) -> list[Value]:
    values = value if isinstance(value, list) else [value]
    found = [checked(key, item, place=place) for item in values]
    if not found or len(set(map(str, found))) < len(found):
        raise InvalidArgument(f"{place} must be different values, at least one, got {value!r}. Write a list.")
    return found


def _cells(
    base: Mapping[str, Value], grids: Sequence[Mapping[str, list[Value]]], source: DataSource
) -> tuple[Experiment, ...]:
    found: dict[str, Experiment] = {}
    for grid in grids:
        kept = {key: value for key, value in base.items() if _PARTNERS.get(key) not in grid}
        for values in product(*grid.values()):
            told = dict(zip(grid, values, strict=True))
            words = ", ".join(f"{key} = {value}" for key, value in told.items())
            place = f"the cell with {words}" if words else "the cell"
            settings = settings_from({**kept, **told}, population=source.records, place=place)
            cell = Experiment(settings=canonical(settings), source=source, told=told, values={**kept, **told})
            found.setdefault(cell.key, cell)
            if len(found) > _MOST_CELLS:
                raise InvalidArgument(f"grid must have at most {_MOST_CELLS} cells, got more. Vary less.")
    return tuple(found.values())


# ── panels ──────────────────────────────────────────────────────────────────────────────────────────────────


def _panels(body: Mapping[str, object], sweep: Sweep, lines: _Lines) -> tuple[Panel, ...]:
    tables = _tables(body, "panels", lines)
    if not tables:
        panels = default_panels(sweep)
        for panel in panels:
            check_panel(sweep, panel, place="the picture, which has no [[panels]],")
        return panels
    found = []
    for number, table in enumerate(tables):
        panel = _panel(table, number, sweep, lines)
        check_panel(sweep, panel, place=lines.place("panels", "", number))
        found.append(panel)
    return tuple(found)


def _panel(table: Mapping[str, object], number: int, sweep: Sweep, lines: _Lines) -> Panel:
    def place(key: str) -> str:
        return lines.place("panels", key, number)

    _only(table, _PANEL, "panels", lines, number)
    told = {key: _text(table, key, lines, "panels", number) for key in ("x", "y", "lines", "title")}
    checks.one_of((*sweep.axes, *COURSES), **{place("x"): told["x"]})
    checks.one_of(MEASURES, **{place("y"): told["y"] or "accuracy"})
    if told["lines"]:
        checks.one_of(sweep.axes, **{place("lines"): told["lines"]})
    checks.one_of((True, False), hint="", **{place("logarithmic"): table.get("logarithmic", False)})
    where = _table(table, "where", lines)
    for key in where:
        checks.one_of(sweep.axes, **{place("where"): key})
    limits = {
        key: checks.in_range(-1e9, 1e9, hint="", **{place(key): table[key]}) for key in ("low", "high") if key in table
    }
    return Panel(
        x=told["x"],
        y=told["y"] or "accuracy",
        lines=told["lines"] or None,
        where={
            # "none" leaves out the cells that say σ by a target ε, or the reverse.
            key: None if value == "none" and key in _NOISE else checked(key, value, place=place("where"))
            for key, value in where.items()
        },
        logarithmic=bool(table.get("logarithmic", False)),
        title=told["title"],
        marks=_marks(table.get("marks", []), place("marks")),
        **limits,
    )


def _marks(told: object, place: str) -> tuple[ReferencePoint, ...]:
    if not isinstance(told, list):
        raise InvalidArgument(f"{place} must be a list, got {told!r}. Write [{{x = 1, y = 0.9, words = '…'}}].")
    found = []
    for item in told:
        if not isinstance(item, dict) or set(item) != {"x", "y", "words"} or not isinstance(item["words"], str):
            raise InvalidArgument(f"{place} must have x, y and words each, got {item!r}. Write all three.")
        numbers = [checks.in_range(-1e9, 1e9, **{place: item[key]}) for key in ("x", "y")]
        found.append(ReferencePoint(x=numbers[0], y=numbers[1], words=item["words"]))
    return tuple(found)
