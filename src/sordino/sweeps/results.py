"""Results as a table: one row for each setting, seeds taken together; CSV, Markdown and JSON."""

import csv
import io
import json
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from sordino.definitions import format_upper_bound
from sordino.plot_style import COLORS, METHOD_COLOURS, SERIF, STYLE
from sordino.runs.transcript import write_bytes
from sordino.sweeps.config import NUMERIC, Experiment, Value
from sordino.sweeps.runner import ExperimentResult, result_to_json
from sordino.sweeps.sweep import COURSES, Panel, Sweep

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "NOTHING",
    "Row",
    "caveat",
    "collect_rows",
    "comma_separated",
    "document",
    "draw",
    "heads",
    "line",
    "markdown",
    "write_results",
]


NOTHING = "no guarantee"
"""What stands where ε would, for cells that protect nobody."""


_WORDS = {"batch_size": "B", "max_grad_norm": "C", "target_epsilon": "target ε", "pca_noise_multiplier": "σ of PCA"}


@dataclass(frozen=True, kw_only=True)
class Row:
    """Cells that differ in the seed alone.

    Args:
        cell: the first of them.
        outcomes: of those that are finished.
        failures: what went wrong in the others that were tried.
        missing: how many were not tried.
    """

    cell: Experiment
    outcomes: tuple[ExperimentResult, ...]
    failures: tuple[str, ...]
    missing: int

    @property
    def values(self) -> dict[str, Value]:
        """What the grid says of them."""
        return {name: value for name, value in self.cell.told.items() if name != "seed"}

    @property
    def epsilon(self) -> float | None:
        """ε by the accountant, or None where nothing is guaranteed."""
        return self.cell.epsilon

    def measured(self, name: str) -> tuple[float, ...]:
        """One number of every finished outcome that has it."""
        found = [getattr(outcome, name) for outcome in self.outcomes]
        return tuple(float(value) for value in found if value is not None)

    def mean(self, name: str) -> float | None:
        """Mean of `measured`, or None where there is none."""
        found = self.measured(name)
        return math.fsum(found) / len(found) if found else None

    def spread(self, name: str) -> float | None:
        """Standard deviation over the seeds (with n − 1), or None for fewer than two."""
        found, mean = self.measured(name), self.mean(name)
        if mean is None or len(found) < 2:
            return None
        return math.sqrt(math.fsum((value - mean) ** 2 for value in found) / (len(found) - 1))


def collect_rows(sweep: Sweep, outcomes: Mapping[str, ExperimentResult]) -> tuple[Row, ...]:
    """The rows of a sweep, in the order of its cells."""
    together: dict[object, list[Experiment]] = {}
    for cell in sweep.cells:
        together.setdefault(replace(cell.settings, seed=0), []).append(cell)
    found = []
    for cells in together.values():
        tried = [outcomes[cell.key] for cell in cells if cell.key in outcomes]
        found.append(
            Row(
                cell=cells[0],
                outcomes=tuple(outcome for outcome in tried if outcome.failure is None),
                failures=tuple(outcome.failure for outcome in tried if outcome.failure is not None),
                missing=len(cells) - len(tried),
            )
        )
    return tuple(found)


def caveat(sweep: Sweep) -> str:
    """What ε in the table means, and what it doesn't."""
    size = f"{sweep.source.records:,} records"
    return (
        f"ε is what one run with these settings, fixed beforehand, would guarantee on {size}: add or remove one, "
        "size treated as public. Measured on public records. Choosing settings by such a table on private records is "
        "a release of its own: `sordino tune` includes it in the guarantee."
    )


_COLUMNS = ("epsilon", "delta", "noise_multiplier", "steps", "accuracy", "spread", "seeds", "seconds", "memory_mb")


def _cells_of(row: Row) -> dict[str, float | int | str | None]:
    epsilon = row.epsilon
    return {
        "epsilon": NOTHING if epsilon is None else "inf" if math.isinf(epsilon) else epsilon,
        "delta": row.cell.settings.delta if row.cell.is_private else None,
        "noise_multiplier": float(row.cell.plan.step_plan(0).noise_multiplier),
        "steps": row.cell.settings.steps,
        "accuracy": row.mean("accuracy"),
        "spread": row.spread("accuracy"),
        "seeds": len(row.outcomes),
        "seconds": row.mean("seconds"),
        "memory_mb": row.mean("memory"),
    }


def comma_separated(sweep: Sweep, found: tuple[Row, ...]) -> str:
    """The table as CSV: settings that vary, then what was found."""
    text = io.StringIO()
    shown = [name for name in sweep.axes if name not in _COLUMNS]
    writer = csv.DictWriter(text, [*shown, *_COLUMNS, "failures"], lineterminator="\n")
    writer.writeheader()
    for row in found:
        settings = {name: row.cell.value(name) for name in shown}
        writer.writerow({**settings, **_cells_of(row), "failures": "; ".join(row.failures)})
    return text.getvalue()


def heads(sweep: Sweep) -> list[str]:
    """The columns that are read: settings that vary, then what was found."""
    return [
        *(_WORDS.get(name, name.replace("_", " ")) for name in _settings_shown(sweep)),
        *("σ", "ε", "δ", "steps", "accuracy", "seconds"),
        *(["MB"] if sweep.is_isolated else []),
    ]


def line(sweep: Sweep, row: Row) -> list[str]:
    """One row as it is read, in the order of `heads`."""
    told = ["–" if (value := row.cell.value(name)) is None else _plain(value) for name in _settings_shown(sweep)]
    epsilon, spread, accuracy = row.epsilon, row.spread("accuracy"), row.mean("accuracy")
    seconds, memory = row.mean("seconds"), row.mean("memory")
    noise = float(row.cell.plan.step_plan(0).noise_multiplier)
    found = [
        f"{noise:.4g}" if noise else "0",
        NOTHING if epsilon is None else format_upper_bound(epsilon, 3),
        f"{row.cell.settings.delta:g}" if row.cell.is_private else "–",
        f"{row.cell.settings.steps:,}",
        ("failed" if row.failures else "–")
        if accuracy is None
        else f"{100 * accuracy:.1f} %" + (f" ± {100 * spread:.1f}" if spread is not None else ""),
        "–" if seconds is None else f"{seconds:.1f}",
    ]
    return [*told, *found, *(["–" if memory is None else f"{memory:.0f}"] if sweep.is_isolated else [])]


def _settings_shown(sweep: Sweep) -> list[str]:
    return [name for name in sweep.axes if name not in ("noise_multiplier", "steps", "delta")]


def _plain(value: Value) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def markdown(sweep: Sweep, found: tuple[Row, ...]) -> str:
    """The table as Markdown."""
    columns = heads(sweep)
    lines = [f"# {sweep.title}", "", *([sweep.note, ""] if sweep.note else []), caveat(sweep), ""]
    lines += ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(line(sweep, row)) + " |" for row in found]
    failures = [f"- {row.cell.words}: {failure}" for row in found for failure in row.failures]
    return "\n".join([*lines, *(["", "Failed:", "", *failures] if failures else [])]) + "\n"


def document(sweep: Sweep, found: tuple[Row, ...]) -> dict[str, object]:
    """Everything as one JSON object: settings, ε or "no guarantee", what was measured, and the courses."""
    return {
        "name": sweep.name,
        "title": sweep.title,
        "data": asdict(sweep.source),
        "caveat": caveat(sweep),
        "axes": list(sweep.axes),
        "cells": [
            {
                "settings": {name: row.cell.value(name) for name in sweep.axes},
                "guarantee": None if (guarantee := row.cell.guarantee()) is None else guarantee.describe(),
                **_cells_of(row),
                "accuracies": list(row.measured("accuracy")),
                "courses": [result_to_json(outcome)["course"] for outcome in row.outcomes],
                "failures": list(row.failures),
                "missing": row.missing,
            }
            for row in found
        ],
    }


# ----------------------------------------------------------------------------------------------------------------------
# The picture of a sweep: its panels side by side, one PNG.
# ----------------------------------------------------------------------------------------------------------------------


_MARKS = "osD^vPX*hp"
_FIGURE_WORDS = {
    "accuracy": "accuracy (%)",
    "train_accuracy": "accuracy on training records (%)",
    "epsilon": "ε",
    "noise_multiplier": "noise multiplier σ",
    "seconds": "processor seconds of training",
    "memory": "memory while training (MB)",
    "max_grad_norm": "clipping norm C",
    "batch_size": "expected batch size B",
    "target_epsilon": "target ε",
    "delta": "δ",
    "pca": "principal components (0: all pixels)",
    "width": "hidden units",
    "epoch": "epochs",
    "spent": "ε spent so far",
    "learning_rate": "learning rate",
    "projections": "projections r (0: exact norms)",
}
_PERCENT = ("accuracy", "train_accuracy")
# Known from the plan alone.
_PLANNED = ("epsilon", "noise_multiplier")
# One curve a training.
_ALONG = ("epoch", "spent")
_LEGIBLE = 30.0
# Of small text, in an inch.
_CHARACTERS = 11.0


def draw(sweep: Sweep, found: Sequence[Row], path: Path) -> None:
    """Draw all panels to a PNG or SVG file. Cells that protect nobody are dashed, and their label says so."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    count = len(sweep.panels)
    columns = 1 if count == 1 else 3 if count in (3, 5, 6) or count > 8 else 2
    lines = -(-count // columns)
    width, height = (11.0 if columns == 1 else 6.4 * columns), 5.0 * lines + 1.7
    with matplotlib.rc_context(STYLE):  # pyright: ignore[reportArgumentType]
        figure = Figure(figsize=(width, height), dpi=100)
        FigureCanvasAgg(figure)
        edge = 0.75 / width
        axes = figure.subplots(
            lines,
            columns,
            squeeze=False,
            gridspec_kw={
                "left": edge,
                "right": 1 - 0.35 / width,
                "bottom": 0.7 / height,
                "top": 1 - 1.95 / height,
                "wspace": 0.2,
                "hspace": 0.42,
            },
        )
        figure.text(edge, 1 - 0.65 / height, sweep.title, fontsize=23, color=COLORS["ink"], family=SERIF)
        words = textwrap.fill(_below(sweep, found), int(_CHARACTERS * width), break_long_words=False)
        figure.text(edge, 1 - 0.9 / height, words, fontsize=11, color=COLORS["soft"], va="top", linespacing=1.5)
        for place, each in enumerate(axes.flat):
            if place < count:
                _panel(each, sweep, sweep.panels[place], found)
            else:
                each.set_axis_off()
        figure.savefig(path, metadata={"Date": None} if path.suffix.lower() == ".svg" else {"Software": "sordino"})


def _below(sweep: Sweep, found: Sequence[Row]) -> str:
    seeds = max((len(row.outcomes) for row in found), default=0)
    words = [f"{Path(sweep.source.name).name}, {sweep.source.records:,} public training records"]
    words.append("one run a point" if seeds <= 1 else f"mean of {seeds} seeds, bars: one standard deviation")
    if any(panel.x in _ALONG and panel.y != "epsilon" for panel in sweep.panels):
        words.append("curves of a training, dotted: on training records")
    return "   ·   ".join([*words, *([sweep.note] if sweep.note else [])])


def _panel(axes: "Axes", sweep: Sweep, panel: Panel, found: Sequence[Row]) -> None:
    keys = {cell.key for cell in sweep.of(panel)}
    known = panel.y in _PLANNED and panel.x not in _ALONG
    rows = [row for row in found if row.cell.key in keys and (row.outcomes or known)]
    title = panel.title or f"{_title(panel.y)} against {_title(panel.x)}"
    axes.set_title(title, loc="left", fontsize=13.5, pad=12, family=SERIF)
    if not rows:
        axes.text(0.5, 0.5, "nothing is finished", transform=axes.transAxes, ha="center", color=COLORS["soft"])
        axes.set_axis_off()
        return
    names = list(dict.fromkeys(str(row.cell.value(panel.x)) for row in rows)) if _is_named(panel) else []
    lines = {None: rows} if panel.lines is None else _by_line(rows, panel.lines)
    for place, (value, members) in enumerate(lines.items()):
        color, mark = METHOD_COLOURS[place % len(METHOD_COLOURS)], _MARKS[place % len(_MARKS)]
        label = "" if panel.lines is None else _label(panel.lines, value)
        for part in ([row for row in members if row.cell.is_private], [r for r in members if not r.cell.is_private]):
            if part:
                _courses(axes, panel, part, label, color, mark) if panel.x in _ALONG else _points(
                    axes, panel, part, label, color, mark, names
                )
    _marks(axes, panel)
    _scales(axes, panel, rows, names)
    axes.grid(axis="y", color=COLORS["hair"])
    axes.set_axisbelow(True)
    axes.set_xlabel(_word(panel.x), loc="right")
    axes.set_ylabel(_word(panel.y))
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, fontsize=9.5, labelcolor=COLORS["ink"])


def _by_line(rows: Sequence[Row], name: str) -> dict[Value | None, list[Row]]:
    lines: dict[Value | None, list[Row]] = {}
    for row in rows:
        lines.setdefault(row.cell.value(name), []).append(row)
    return lines


def _points(
    axes: "Axes", panel: Panel, rows: Sequence[Row], label: str, color: str, mark: str, names: list[str]
) -> None:
    """One point a row, with a bar over its seeds; a row to which the axis means nothing is a line across."""
    private = rows[0].cell.is_private
    label = label if private else f"{label or rows[0].cell.settings.arm}: {NOTHING}"
    style = {"color": color, "linestyle": "-" if private else (0, (5, 3)), "linewidth": 2}
    places = _places(panel, rows, names)
    flat = [row for row, place in zip(rows, places, strict=True) if place is None]
    dots = sorted(
        ((place, row) for row, place in zip(rows, places, strict=True) if place is not None), key=lambda dot: dot[0]
    )
    scale = 100.0 if panel.y in _PERCENT else 1.0
    shown = [
        (place, scale * mean, scale * (_spread(panel, row) or 0))
        for place, row in dots
        if (mean := _y(panel, row)) is not None and math.isfinite(mean)
    ]
    if shown:
        across, values, bars = zip(*shown, strict=True)
        axes.errorbar(
            across,
            values,
            yerr=bars if any(bars) else None,
            marker=mark,
            markersize=6,
            markerfacecolor=color if private else COLORS["paper"],
            elinewidth=1.2,
            capsize=3,
            label=label or None,
            **({**style, "linestyle": "none"} if _is_named(panel) else style),
        )
    for row in flat:
        mean = _y(panel, row)
        if mean is not None:
            axes.axhline(scale * mean, label=label or None, **{**style, "linewidth": 1.4})


def _courses(axes: "Axes", panel: Panel, rows: Sequence[Row], label: str, color: str, mark: str) -> None:
    """The mean course of the seeds; training records dotted."""
    for row in rows:
        private = row.cell.is_private
        if panel.x == "spent" and not private:
            continue
        courses = [outcome.course for outcome in row.outcomes]
        points = list(zip(*courses, strict=True))
        epochs = [seeds[0].epsilon if panel.x == "spent" else seeds[0].epoch for seeds in points]
        name = "epsilon" if panel.y == "epsilon" else "accuracy"
        means, ends = [], []
        for seeds in points:
            values = [getattr(point, name) for point in seeds if getattr(point, name) is not None]
            scale = 100.0 if name == "accuracy" else 1.0
            means.append(scale * sum(values) / len(values) if values else math.nan)
            ends.append(scale * (max(values) - min(values)) / 2 if values else math.nan)
        told = label or row.cell.words
        axes.plot(
            epochs,
            means,
            color=color,
            linewidth=2,
            linestyle="-" if private else (0, (5, 3)),
            marker=mark,
            markersize=4,
            label=told if private else f"{told}: {NOTHING}",
        )
        if len(courses) > 1:
            low = [mean - end for mean, end in zip(means, ends, strict=True)]
            high = [mean + end for mean, end in zip(means, ends, strict=True)]
            axes.fill_between(epochs, low, high, color=color, alpha=0.15, linewidth=0)
        if name == "accuracy":
            trained = [100 * sum(point.train_accuracy for point in seeds) / len(seeds) for seeds in points]
            axes.plot(epochs, trained, color=color, linewidth=1.2, linestyle=(0, (1, 2)))


def _y(panel: Panel, row: Row) -> float | None:
    if panel.y == "noise_multiplier":
        return float(row.cell.plan.step_plan(0).noise_multiplier)
    return row.epsilon if panel.y == "epsilon" else row.mean(panel.y)


def _spread(panel: Panel, row: Row) -> float | None:
    return None if panel.y in _PLANNED else row.spread(panel.y)


def _places(panel: Panel, rows: Sequence[Row], names: list[str]) -> list[float | None]:
    """Where each row stands across; None for a row to which the axis means nothing, or that has no ε."""
    if panel.x == "epsilon":
        return [row.epsilon if row.epsilon is None or math.isfinite(row.epsilon) else None for row in rows]
    values = [row.cell.value(panel.x) for row in rows]
    if _is_named(panel):
        return [None if value is None else float(names.index(str(value))) for value in values]
    return [None if value is None else float(value) for value in values]


def _is_named(panel: Panel) -> bool:
    """Whether the horizontal axis has names and no scale."""
    return panel.x not in (*NUMERIC, *COURSES)


def _scales(axes: "Axes", panel: Panel, rows: Sequence[Row], names: list[str]) -> None:
    from matplotlib.ticker import MaxNLocator

    places = [place for place in _places(panel, rows, names) if place is not None] if panel.x not in _ALONG else []
    if panel.logarithmic:
        axes.set_xscale("log")
    elif panel.x == "epoch":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if panel.x in NUMERIC and 0 < len(set(places)) <= 9:
        axes.set_xticks(sorted(set(places)), [f"{place:.4g}" for place in sorted(set(places))])
        axes.minorticks_off()
    elif _is_named(panel):
        axes.set_xticks(range(len(names)), [name.replace("_", " ") for name in names])
        axes.set_xlim(-0.5, len(names) - 0.5)
    elif panel.logarithmic and places:
        shown = [tick for tick in (0.01, 0.03, 0.1, 0.3, 0.5, 1, 2, 4, 8, 16, 32) if min(places) <= tick <= max(places)]
        axes.set_xticks(shown, [f"{tick:g}" for tick in shown])
        axes.minorticks_off()
    if panel.y in ("epsilon", "seconds") and panel.x not in _ALONG:
        values = [value for row in rows if (value := _y(panel, row)) and math.isfinite(value)]
        if values and max(values) > _LEGIBLE * min(values):
            axes.set_yscale("log")
            axes.tick_params(axis="y", which="minor", length=0)
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    scale = 100.0 if panel.y in _PERCENT else 1.0
    if panel.low is not None:
        axes.set_ylim(bottom=scale * panel.low)
    if panel.high is not None:
        axes.set_ylim(top=scale * panel.high)


def _marks(axes: "Axes", panel: Panel) -> None:
    """Values from elsewhere, hollow, each with its words."""
    scale = 100.0 if panel.y in _PERCENT else 1.0
    for words in dict.fromkeys(mark.words for mark in panel.marks):
        same = [mark for mark in panel.marks if mark.words == words]
        axes.plot(
            [mark.x for mark in same],
            [scale * mark.y for mark in same],
            linestyle="none",
            marker="D",
            markersize=8,
            markerfacecolor="none",
            markeredgecolor=COLORS["ink"],
            label=words,
        )


def _word(name: str) -> str:
    return _FIGURE_WORDS.get(name, name.replace("_", " "))


def _title(name: str) -> str:
    words = _word(name).partition(" (")[0]
    return words[:1].upper() + words[1:] if name in _FIGURE_WORDS and not words.startswith(("ε", "δ")) else words


def _label(name: str, value: Value | None) -> str:
    if value is None:
        return ""
    short = {"noise_multiplier": "σ", "batch_size": "B", "max_grad_norm": "C", "delta": "δ", "target_epsilon": "ε"}
    if name == "projections":
        return f"r = {value}" if value else "exact norms"
    if isinstance(value, str):
        return value.replace("_", " ")
    return f"{short.get(name, name.replace('_', ' '))} = {value:.4g}"


# ----------------------------------------------------------------------------------------------------------------------
# What a sweep leaves in its folder: the picture, and the table in three forms.
# ----------------------------------------------------------------------------------------------------------------------


def write_results(sweep: Sweep, outcomes: Mapping[str, ExperimentResult], folder: str | Path) -> dict[str, Path]:
    """Write ``NAME.png``, ``NAME.json``, ``NAME.csv`` and ``NAME.md`` into `folder`, from what is finished so far.

    Guarantee: none; the records are public. Cells without one carry "no guarantee" in every form.

    Returns:
        The path of each, by its suffix.
    """
    at = Path(folder)
    at.mkdir(parents=True, exist_ok=True)
    found = collect_rows(sweep, outcomes)
    body = json.dumps(document(sweep, found), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    texts = {"json": body, "csv": comma_separated(sweep, found), "md": markdown(sweep, found)}
    paths = {suffix: at / f"{sweep.name}.{suffix}" for suffix in ("png", *texts)}
    for suffix, text in texts.items():
        write_bytes(paths[suffix], text.encode())
    draw(sweep, found, paths["png"])
    return paths
