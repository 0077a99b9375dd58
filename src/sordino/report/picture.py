"""The picture: the guarantee, ε over steps, and accuracy or the attacker's limit, on one sheet."""

import math
from pathlib import Path
from typing import TYPE_CHECKING

from sordino.definitions import round_up
from sordino.report.numerals import power_of_ten
from sordino.report.schema import Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.typing import RcKeyType

__all__ = ["draw"]

_EDGE, _SERIF = 0.075, "DejaVu Serif"
_PAPER, _INK, _SOFT, _HAIR, _MUTE = "#faf9f6", "#1c1f23", "#5b626b", "#e4e2dc", "#b9bdc1"
_ACCENT, _TINT, _ALARM = "#0b6e69", "#e3eeec", "#a63a24"
_STYLE: "dict[RcKeyType, object]" = {
    "font.family": ["DejaVu Sans"],
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.edgecolor": _HAIR,
    "axes.facecolor": _PAPER,
    "axes.titlecolor": _INK,
    "xtick.color": _SOFT,
    "ytick.color": _SOFT,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "figure.facecolor": _PAPER,
    "savefig.facecolor": _PAPER,
    "svg.fonttype": "none",
}


def draw(report: Report, path: Path) -> None:
    """Draw the report's picture to a PNG of 1600 × 900 pixels."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(16, 9), dpi=100)
        canvas = FigureCanvasAgg(figure)
        guarantee = report.guarantee
        head = figure.text(_EDGE, 0.8, f"ε = {round_up(guarantee.epsilon)}", fontsize=46, color=_INK, family=_SERIF)
        width = head.get_window_extent(canvas.get_renderer()).width / (100 * 16)
        figure.text(
            _EDGE + width + 0.03,
            0.8,
            f"δ = {power_of_ten(guarantee.delta)}",
            fontsize=46,
            color=_SOFT,
            family=_SERIF,
        )
        terms = (
            f"unit {guarantee.unit.words}   ·   neighbours {guarantee.relation.words}   ·   {guarantee.sampler}   ·   "
            f"accountant {guarantee.accountant.replace('_', ' ')}"
        )
        figure.text(_EDGE, 0.725, terms, fontsize=14, color=_SOFT)
        if report.not_for_release:
            figure.text(_EDGE, 0.93, f"Not for release. {report.not_for_release}", fontsize=15, color=_ALARM)
        else:
            figure.text(_EDGE, 0.93, report.name, fontsize=15, color=_SOFT)
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
    axes.set_title(text, loc="left", fontsize=17, pad=16, family=_SERIF)


def _epsilon(axes: "Axes", report: Report) -> None:
    _title(axes, "Privacy spent (ε)")
    points = [point for point in report.curves.spent if math.isfinite(point.epsilon)]
    steps, spent = [point.steps for point in points], [point.epsilon for point in points]
    axes.fill_between(steps, spent, color=_TINT)
    axes.plot(steps, spent, color=_ACCENT, linewidth=2.6)
    if points:
        axes.plot(steps[-1], spent[-1], "o", color=_ACCENT, markersize=8, clip_on=False)
        axes.annotate(
            f"ε = {round_up(spent[-1])}",
            (steps[-1], spent[-1]),
            xytext=(0, 10),
            textcoords="offset points",
            ha="right",
            weight="bold",
            color=_INK,
            fontsize=13,
        )
    if report.target_epsilon is not None:
        axes.axhline(report.target_epsilon, color=_SOFT, linewidth=1.2, linestyle=(0, (2, 3)))
        axes.annotate(
            f"target {report.target_epsilon:g}",
            (0, report.target_epsilon),
            xycoords=("axes fraction", "data"),
            xytext=(0, 6),
            textcoords="offset points",
            color=_SOFT,
        )
    axes.set_xlim(0, max(steps[-1] if steps else 0, 1))
    axes.set_ylim(0, 1.15 * max([*spent, report.target_epsilon or 0.0, 1e-9]))
    axes.set_xlabel("steps", color=_SOFT, loc="right")
    axes.grid(axis="y", color=_HAIR)
    axes.set_axisbelow(True)


def _accuracy(axes: "Axes", report: Report) -> None:
    _title(axes, "Accuracy on public test records")
    rows = list(reversed(report.utility.accuracy))
    for place, item in enumerate(rows):
        axes.barh(place, 1.0, height=0.3, color=_HAIR)
        axes.barh(place, item.value, height=0.3, color=_ACCENT if item.is_private_model else _MUTE)
        axes.text(0, place + 0.24, item.name, color=_INK, fontsize=13)
        weight = "bold" if item.is_private_model else "normal"
        axes.text(1.0, place + 0.24, f"{100 * item.value:.1f} %", color=_INK, fontsize=13, ha="right", weight=weight)
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
    axes.fill_between(rates, found, color=_TINT)
    axes.plot(rates, found, color=_ACCENT, linewidth=2.6)
    axes.plot([0, 1], [0, 1], color=_MUTE, linewidth=1.4, linestyle=(0, (2, 3)))
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("share wrongly accused", color=_SOFT, loc="right")
    axes.grid(axis="y", color=_HAIR)
    axes.set_axisbelow(True)
