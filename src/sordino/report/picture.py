"""The picture: the guarantee, ε over steps, and accuracy or the attacker's limit, on one sheet."""

import math
from pathlib import Path
from typing import TYPE_CHECKING

from sordino.definitions import round_up
from sordino.pictures import COLOURS, SERIF, STYLE
from sordino.report.numerals import power_of_ten
from sordino.report.schema import Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw"]

_EDGE = 0.075
_STYLE = STYLE | {"axes.spines.left": False}


def draw(report: Report, path: Path) -> None:
    """Draw the report's picture to a PNG of 1600 × 900 pixels."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):  # pyright: ignore[reportArgumentType]
        figure = Figure(figsize=(16, 9), dpi=100)
        canvas = FigureCanvasAgg(figure)
        guarantee = report.guarantee
        head = figure.text(
            _EDGE, 0.8, f"ε = {round_up(guarantee.epsilon)}", fontsize=46, color=COLOURS["ink"], family=SERIF
        )
        width = head.get_window_extent(canvas.get_renderer()).width / (100 * 16)
        figure.text(
            _EDGE + width + 0.03,
            0.8,
            f"δ = {power_of_ten(guarantee.delta)}",
            fontsize=46,
            color=COLOURS["soft"],
            family=SERIF,
        )
        terms = (
            f"unit {guarantee.unit.words}   ·   neighbours {guarantee.relation.words}   ·   {guarantee.sampler}   ·   "
            f"accountant {guarantee.accountant.replace('_', ' ')}"
        )
        figure.text(_EDGE, 0.725, terms, fontsize=14, color=COLOURS["soft"])
        if report.not_for_release:
            figure.text(_EDGE, 0.93, f"Not for release. {report.not_for_release}", fontsize=15, color=COLOURS["alarm"])
        else:
            figure.text(_EDGE, 0.93, report.name, fontsize=15, color=COLOURS["soft"])
        left, right = figure.subplots(
            1, 2, gridspec_kw={"left": _EDGE, "right": 1 - _EDGE, "bottom": 0.1, "top": 0.6, "wspace": 0.22}
        )
        _epsilon(left, report)
        if report.utility.accuracy:
            _accuracy(right, report)
        else:
            _attack(right, report)
        figure.savefig(path, metadata={"Software": "sordino"})


def _title(axes: "Axes", text: str) -> None:
    axes.set_title(text, loc="left", fontsize=17, pad=16, family=SERIF)


def _epsilon(axes: "Axes", report: Report) -> None:
    _title(axes, "Privacy spent (ε)")
    points = [point for point in report.curves.spent if math.isfinite(point.epsilon)]
    steps, spent = [point.steps for point in points], [point.epsilon for point in points]
    axes.fill_between(steps, spent, color=COLOURS["tint"])
    axes.plot(steps, spent, color=COLOURS["accent"], linewidth=2.6)
    if points:
        axes.plot(steps[-1], spent[-1], "o", color=COLOURS["accent"], markersize=8, clip_on=False)
        axes.annotate(
            f"ε = {round_up(spent[-1])}",
            (steps[-1], spent[-1]),
            xytext=(0, 10),
            textcoords="offset points",
            ha="right",
            weight="bold",
            color=COLOURS["ink"],
            fontsize=13,
        )
    if report.target_epsilon is not None:
        axes.axhline(report.target_epsilon, color=COLOURS["soft"], linewidth=1.2, linestyle=(0, (2, 3)))
        axes.annotate(
            f"target {report.target_epsilon:g}",
            (0, report.target_epsilon),
            xycoords=("axes fraction", "data"),
            xytext=(0, 6),
            textcoords="offset points",
            color=COLOURS["soft"],
        )
    axes.set_xlim(0, max(steps[-1] if steps else 0, 1))
    axes.set_ylim(0, 1.15 * max([*spent, report.target_epsilon or 0.0, 1e-9]))
    axes.set_xlabel("steps", color=COLOURS["soft"], loc="right")
    axes.grid(axis="y", color=COLOURS["hair"])
    axes.set_axisbelow(True)


def _accuracy(axes: "Axes", report: Report) -> None:
    _title(axes, "Accuracy on public test records")
    rows = list(reversed(report.utility.accuracy))
    for place, item in enumerate(rows):
        axes.barh(place, 1.0, height=0.3, color=COLOURS["hair"])
        axes.barh(place, item.value, height=0.3, color=COLOURS["accent"] if item.is_private_model else COLOURS["mute"])
        axes.text(0, place + 0.24, item.name, color=COLOURS["ink"], fontsize=13)
        weight = "bold" if item.is_private_model else "normal"
        axes.text(
            1.0, place + 0.24, f"{100 * item.value:.1f} %", color=COLOURS["ink"], fontsize=13, ha="right", weight=weight
        )
    axes.set_xlim(0, 1)
    axes.set_ylim(-0.5, max(len(rows), 2) - 0.4)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines["bottom"].set_visible(False)


def _attack(axes: "Axes", report: Report) -> None:
    _title(axes, "Share that a membership attack can at most find")
    curve = report.curves.trade_off
    rates = [0.0, *(rate for rate, _ in curve), 1.0]
    most = [1 - missed for _, missed in curve]
    found = [most[0], *most, 1.0] if most else [1.0, 1.0]
    axes.fill_between(rates, found, color=COLOURS["tint"])
    axes.plot(rates, found, color=COLOURS["accent"], linewidth=2.6)
    axes.plot([0, 1], [0, 1], color=COLOURS["mute"], linewidth=1.4, linestyle=(0, (2, 3)))
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("share wrongly accused", color=COLOURS["soft"], loc="right")
    axes.grid(axis="y", color=COLOURS["hair"])
    axes.set_axisbelow(True)
