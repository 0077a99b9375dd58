"""The picture of `sordino account --plot`: ε over steps by accountant, and the trade-off curve."""

import contextlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sordino.cli.statement import FALSE_POSITIVE_RATES
from sordino.definitions import NeighboringRelation, round_up
from sordino.errors import AccountingError, InvalidArgument, UnsupportedEvent
from sordino.events import Composed, Event, SelfComposed, compose
from sordino.pictures import COLOURS, METHOD_COLOURS, SERIF, STYLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["COLOURS", "METHOD_COLOURS", "STYLE", "checked_path", "draw", "first_steps", "number_of_steps"]

_INK, _SOFT, _HAIR, _TINT, _ACCENT = (COLOURS[name] for name in ("ink", "soft", "hair", "tint", "accent"))
_OTHERS = METHOD_COLOURS[1:7]
_POINTS = 24
_LEGIBLE = 4.0


def checked_path(path: Path) -> Path:
    """The path, if it names a picture that can be written."""
    if path.suffix.lower() not in {".png", ".svg"}:
        raise InvalidArgument(f"--plot must end in .png or .svg, got {path.name!r}. Name another file.")
    if not path.absolute().parent.is_dir():
        raise InvalidArgument(f"--plot must be in an existing folder, got {str(path)!r}. Create the folder.")
    return path


def draw(
    event: Event,
    *,
    delta: float,
    relation: NeighboringRelation,
    document: Mapping[str, object],
    path: Path,
) -> None:
    """Draw ε over steps and the trade-off curve of an event to a PNG or SVG file."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):  # pyright: ignore[reportArgumentType]
        figure = Figure(figsize=(14, 7.2), dpi=110)
        FigureCanvasAgg(figure)
        left, right = figure.subplots(
            1, 2, gridspec_kw={"left": 0.05, "right": 0.965, "bottom": 0.1, "top": 0.735, "wspace": 0.36}
        )
        shown = document["epsilon"]
        spent = "∞" if isinstance(shown, str) else f"{shown:.5f}"
        figure.text(0.05, 0.885, f"ε = {spent}", fontsize=30, color=_INK, family=SERIF)
        figure.text(0.3, 0.885, f"δ = {delta:g}", fontsize=30, color=_SOFT, family=SERIF)
        bare = document["epsilon_without_amplification"]
        words = [str(document["sampler"]), f"neighbours {relation.words}", f"accountant {document['accountant']}"]
        if isinstance(bare, float) and bare != shown:
            words.append(f"without amplification ε = {bare:.5g}")
        figure.text(0.05, 0.835, "   ·   ".join(words).replace("_", " "), fontsize=11.5, color=_SOFT)
        asked = document["accountants"]
        known = {name: float(value) for name, value in asked.items()} if isinstance(asked, Mapping) else {}
        _epsilon_over_steps(left, event, delta, relation, known)
        _trade_off(right, event, relation)
        figure.savefig(path, metadata={"Date": None} if path.suffix.lower() == ".svg" else {"Software": "sordino"})


# ── ε over steps ────────────────────────────────────────────────────────────────────────────────────────────


def number_of_steps(event: Event) -> int:
    """Steps of an event in time: repetitions and parts of compositions count, everything else is one."""
    match event:
        case SelfComposed():
            return event.count * number_of_steps(event.event)
        case Composed():
            return sum(number_of_steps(part) for part in event.events)
        case _:
            return 1


def first_steps(event: Event, count: int) -> Event:
    """The first `count` steps of an event.

    Example:
        >>> from sordino.events import Gaussian
        >>> first_steps(SelfComposed(event=Gaussian(noise_multiplier=1.0), count=9), 4).count
        4
    """
    if count >= number_of_steps(event):
        return event
    match event:
        case SelfComposed():
            whole, rest = divmod(count, number_of_steps(event.event))
            return compose(
                [SelfComposed(event=event.event, count=whole), first_steps(event.event, rest)][: 1 + (rest > 0)]
            )
        case Composed():
            taken: list[Event] = []
            for part in event.events:
                if count <= 0:
                    break
                taken.append(first_steps(part, count))
                count -= number_of_steps(part)
            return compose(taken)
        case _:
            return compose([])


def _series(
    event: Event, grid: Sequence[int], delta: float, relation: NeighboringRelation, accountant: str
) -> list[tuple[int, float]]:
    from sordino import accounting

    series: list[tuple[int, float]] = []
    for count in grid:
        with contextlib.suppress(AccountingError, UnsupportedEvent):
            upper = accounting.epsilon(first_steps(event, count), delta, relation=relation, accountant=accountant).upper
            if math.isfinite(upper):
                series.append((count, upper))
    return series


def _epsilon_over_steps(
    axes: "Axes", event: Event, delta: float, relation: NeighboringRelation, known: Mapping[str, float]
) -> None:
    axes.set_title("Privacy spent (ε) over steps, by accountant", loc="left", fontsize=14, pad=12, family=SERIF)
    total = number_of_steps(event)
    grid = sorted({max(1, round(total * share)) for share in np.linspace(0, 1, _POINTS) ** 1.6 if total})
    main = _series(event, grid, delta, relation, "auto")
    if not main:
        axes.text(0.5, 0.5, "ε = ∞", transform=axes.transAxes, ha="center", color=_SOFT, fontsize=18)
        axes.set_axis_off()
        return
    top = main[-1][1]
    ends: list[tuple[float, str, str]] = []
    _curve(axes, main, _ACCENT, 2.8)
    axes.fill_between([count for count, _ in main], [value for _, value in main], color=_TINT, zorder=0)
    ends.append((top, f"certified {round_up(top, 4)}", _ACCENT))
    off: list[str] = []
    others = {name: value for name, value in known.items() if value - top > 1e-3 * top}
    for (name, value), color in zip(others.items(), _OTHERS * 3, strict=False):
        label = f"{name.replace('_', ' ')} {round_up(value, 4)}"
        if value > _LEGIBLE * top:
            off.append(label)
            continue
        series = _series(event, grid, delta, relation, name)
        if not series:
            continue
        _curve(axes, series, color, 1.7)
        ends.append((series[-1][1], label, color))
    highest = max(value for value, _, _ in ends)
    axes.set_xlim(0, max(total, 1))
    axes.set_ylim(0, 1.12 * max(highest, 1e-12))
    _labels(axes, ends, total, 1.12 * highest)
    if off:
        axes.text(
            0.02, 0.95, "beyond the picture: " + ", ".join(off), transform=axes.transAxes, color=_SOFT, fontsize=10
        )
    axes.set_xlabel("steps", loc="right")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.grid(axis="y", color=_HAIR)
    axes.set_axisbelow(True)


def _curve(axes: "Axes", series: Sequence[tuple[int, float]], color: str, width: float) -> None:
    axes.plot(*zip(*series, strict=True), color=color, linewidth=width, solid_capstyle="round")
    axes.plot(*series[-1], "o", color=color, markersize=6, clip_on=False)


def _labels(axes: "Axes", ends: Sequence[tuple[float, str, str]], total: int, top: float) -> None:
    """Names at the ends of the curves, pushed apart where they would overlap."""
    place = -math.inf
    for value, label, color in sorted(ends):
        place = max(value, place + 0.055 * top)
        axes.text(1.025 * total, place, label, color=color, va="center", fontsize=11, weight="bold", clip_on=False)


# ── the trade-off curve ─────────────────────────────────────────────────────────────────────────────────────


def _trade_off(axes: "Axes", event: Event, relation: NeighboringRelation) -> None:
    from sordino import accounting

    axes.set_title("Least false negative rate of any membership attack", loc="left", fontsize=14, pad=12, family=SERIF)
    rates = sorted({*np.geomspace(1e-4, 0.05, 24), *np.linspace(0.05, 0.999, 60), *FALSE_POSITIVE_RATES})
    try:
        missed = accounting.trade_off(event, [float(rate) for rate in rates], relation=relation)
    except (AccountingError, UnsupportedEvent):
        axes.text(0.5, 0.5, "no curve is known for this event", transform=axes.transAxes, ha="center", color=_SOFT)
        axes.set_axis_off()
        return
    chance = [1 - rate for rate in rates]
    axes.fill_between(rates, missed, chance, color=_TINT)
    axes.plot([0, 1], [1, 0], color=_SOFT, linewidth=1.2, linestyle=(0, (2, 3)))
    axes.plot(rates, missed, color=_ACCENT, linewidth=2.8)
    gaps = [blind - miss for blind, miss in zip(chance, missed, strict=True)]
    widest = int(np.argmax(gaps))
    axes.plot([rates[widest]] * 2, [missed[widest], chance[widest]], color=_INK, linewidth=1.3)
    axes.annotate(
        f"advantage ≤ {round_up(gaps[widest], 4)}",
        (rates[widest], missed[widest]),
        xytext=(-8, -20),
        textcoords="offset points",
        ha="right",
        color=_INK,
        weight="bold",
    )
    lines = [
        f"at {100 * rate:g} % false positives ≤ {round_up(100 * (1 - missed[rates.index(rate)]), 2)} % true positives"
        for rate in FALSE_POSITIVE_RATES
    ]
    axes.text(
        0.985, 0.95, "\n".join(lines), transform=axes.transAxes, ha="right", va="top", color=_INK, linespacing=1.7
    )
    axes.text(0.985, 0.785, "dotted: guessing blindly", transform=axes.transAxes, ha="right", color=_SOFT, fontsize=10)
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    axes.set_xlabel("false positive rate", loc="right")
    axes.grid(color=_HAIR)
    axes.set_axisbelow(True)
