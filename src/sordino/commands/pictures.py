"""Pictures of commands: ε over steps and the trade-off curve, audits, and methods side by side."""

import contextlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sordino.commands.planning import FALSE_POSITIVE_RATES
from sordino.definitions import NeighboringRelation, format_upper_bound
from sordino.errors import AccountingError, InvalidArgument, UnsupportedEvent
from sordino.events import Composed, Event, SelfComposed, compose
from sordino.plot_style import COLORS, METHOD_COLORS, SERIF, saved_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from sordino.audit import AuditResult
    from sordino.recipes.tabular import Comparison

_INK, _SOFT, _HAIR, _TINT, _ACCENT = (COLORS[name] for name in ("ink", "soft", "hair", "tint", "accent"))
_OTHERS = METHOD_COLORS[1:7]
_POINTS = 24
_LEGIBLE = 4.0


def checked_path(path: Path) -> Path:
    """The path, if it names a picture that can be written."""
    if path.suffix.lower() not in {".png", ".svg"}:
        raise InvalidArgument(f"--plot must end in .png or .svg, got {path.name!r}. Name another file.")
    if not path.absolute().parent.is_dir():
        raise InvalidArgument(f"--plot must be in an existing folder, got {str(path)!r}. Create the folder.")
    return path


def plot_account(
    event: Event,
    *,
    delta: float,
    neighboring_relation: NeighboringRelation,
    document: Mapping[str, object],
    path: Path,
) -> None:
    """Draw ε over steps and the trade-off curve of an event to a PNG or SVG file."""
    with saved_figure(path, size=(14, 7.2)) as figure:
        left, right = figure.subplots(
            1, 2, gridspec_kw={"left": 0.05, "right": 0.965, "bottom": 0.1, "top": 0.735, "wspace": 0.36}
        )
        shown = document["epsilon"]
        spent = "∞" if isinstance(shown, str) else f"{shown:.5f}"
        figure.text(0.05, 0.885, f"ε = {spent}", fontsize=30, color=_INK, family=SERIF)
        figure.text(0.3, 0.885, f"δ = {delta:g}", fontsize=30, color=_SOFT, family=SERIF)
        bare = document["epsilon_without_amplification"]
        words = [
            str(document["sampler"]),
            f"neighbors {neighboring_relation.describe()}",
            f"accountant {document['accountant']}",
        ]
        if isinstance(bare, float) and bare != shown:
            words.append(f"without amplification ε = {bare:.5g}")
        figure.text(0.05, 0.835, "   ·   ".join(words).replace("_", " "), fontsize=11.5, color=_SOFT)
        asked = document["accountants"]
        known = {name: float(value) for name, value in asked.items()} if isinstance(asked, Mapping) else {}
        _epsilon_over_steps(left, event, delta, neighboring_relation, known)
        _trade_off(right, event, neighboring_relation)


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
    event: Event, grid: Sequence[int], delta: float, neighboring_relation: NeighboringRelation, accountant: str
) -> list[tuple[int, float]]:
    from sordino import accounting

    series: list[tuple[int, float]] = []
    for count in grid:
        with contextlib.suppress(AccountingError, UnsupportedEvent):
            upper = accounting.epsilon(
                first_steps(event, count), delta, neighboring_relation=neighboring_relation, accountant=accountant
            ).upper
            if math.isfinite(upper):
                series.append((count, upper))
    return series


def _epsilon_over_steps(
    axes: "Axes", event: Event, delta: float, neighboring_relation: NeighboringRelation, known: Mapping[str, float]
) -> None:
    axes.set_title("Privacy spent (ε) over steps, by accountant", loc="left", fontsize=14, pad=12, family=SERIF)
    total = number_of_steps(event)
    grid = sorted({max(1, round(total * share)) for share in np.linspace(0, 1, _POINTS) ** 1.6 if total})
    main = _series(event, grid, delta, neighboring_relation, "auto")
    if not main:
        axes.text(0.5, 0.5, "ε = ∞", transform=axes.transAxes, ha="center", color=_SOFT, fontsize=18)
        axes.set_axis_off()
        return
    top = main[-1][1]
    ends: list[tuple[float, str, str]] = []
    _curve(axes, main, _ACCENT, 2.8)
    axes.fill_between([count for count, _ in main], [value for _, value in main], color=_TINT, zorder=0)
    ends.append((top, f"certified {format_upper_bound(top, 4)}", _ACCENT))
    off: list[str] = []
    others = {name: value for name, value in known.items() if value - top > 1e-3 * top}
    for (name, value), color in zip(others.items(), _OTHERS * 3, strict=False):
        label = f"{name.replace('_', ' ')} {format_upper_bound(value, 4)}"
        if value > _LEGIBLE * top:
            off.append(label)
            continue
        series = _series(event, grid, delta, neighboring_relation, name)
        if not series:
            continue
        _curve(axes, series, color, 1.7)
        ends.append((series[-1][1], label, color))
    highest = max(value for value, _, _ in ends)
    axes.set_xlim(0, max(total, 1))
    axes.set_ylim(0, 1.12 * max(highest, 1e-12))
    strong = _published_composition(event, grid, delta)
    if strong:
        # Far above the others: the line leaves the picture, and its name says where it ends.
        axes.plot(*zip(*strong, strict=True), color=_SOFT, linewidth=1.4, linestyle=(0, (4, 3)))
        last = max(strong[-1][1], 1e-12)
        words = f"strong composition as published, no bound: {last:.4g}"
        if last > 1.12 * highest:
            off.append(words)
        else:
            ends.append((last, words, _SOFT))
    _labels(axes, ends, total, 1.12 * highest)
    if off:
        axes.text(
            0.07, 0.95, "beyond the picture: " + ", ".join(off), transform=axes.transAxes, color=_SOFT, fontsize=10
        )
    axes.set_xlabel("steps", loc="right")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.grid(axis="y", color=_HAIR)
    axes.set_axisbelow(True)


def _published_composition(event: Event, grid: Sequence[int], delta: float) -> list[tuple[int, float]]:
    """Strong composition as Abadi et al. 2016 compare with, for equal Gaussian steps; empty for other events."""
    from sordino import accounting

    with contextlib.suppress(AccountingError, UnsupportedEvent, InvalidArgument):
        return [
            (count, accounting.published_advanced_composition(first_steps(event, count), delta).value) for count in grid
        ]
    return []


def _curve(axes: "Axes", series: Sequence[tuple[int, float]], color: str, width: float) -> None:
    axes.plot(*zip(*series, strict=True), color=color, linewidth=width, solid_capstyle="round")
    axes.plot(*series[-1], "o", color=color, markersize=6, clip_on=False)


def _labels(axes: "Axes", ends: Sequence[tuple[float, str, str]], total: int, top: float) -> None:
    """Names at the ends of the curves, pushed apart where they would overlap."""
    height = -math.inf
    for value, label, color in sorted(ends):
        height = max(value, height + 0.055 * top)
        axes.text(1.025 * total, height, label, color=color, va="center", fontsize=11, weight="bold", clip_on=False)


# ── the trade-off curve ─────────────────────────────────────────────────────────────────────────────────────


def _trade_off(axes: "Axes", event: Event, neighboring_relation: NeighboringRelation) -> None:
    from sordino import accounting

    axes.set_title("Least false negative rate of any membership attack", loc="left", fontsize=14, pad=12, family=SERIF)
    rates = sorted({*np.geomspace(1e-4, 0.05, 24), *np.linspace(0.05, 0.999, 60), *FALSE_POSITIVE_RATES})
    try:
        missed = accounting.trade_off_curve(
            event, [float(rate) for rate in rates], neighboring_relation=neighboring_relation
        )
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
        f"advantage ≤ {format_upper_bound(gaps[widest], 4)}",
        (rates[widest], missed[widest]),
        xytext=(-8, -20),
        textcoords="offset points",
        ha="right",
        color=_INK,
        weight="bold",
    )
    lines = [
        f"at {100 * rate:g} % false positives ≤ "
        f"{format_upper_bound(100 * (1 - missed[rates.index(rate)]), 2)} % true positives"
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


# ----------------------------------------------------------------------------------------------------------------------
# The picture of `sordino audit`: the canaries' scores, and the shown ε compared with the stated one.
# ----------------------------------------------------------------------------------------------------------------------


def plot_audit(result: "AuditResult", path: Path) -> None:
    """Draw an audit to a PNG or SVG file."""
    with saved_figure(path, size=(13, 6.2)) as figure:
        frame = {"left": 0.05, "right": 0.96, "bottom": 0.13, "top": 0.7, "wspace": 0.16}
        left, right = figure.subplots(1, 2, width_ratios=[3, 2], gridspec_kw=frame)
        claimed = format_upper_bound(result.claimed.epsilon)
        verdict = "nothing speaks against it" if result.passed else "the claim is REJECTED"
        figure.text(0.05, 0.88, f"ε ≥ {result.bound.epsilon:.2f} was shown", fontsize=26, color=_INK, family=SERIF)
        figure.text(
            0.05, 0.81, f"ε = {claimed} is claimed at δ = {result.bound.delta:g}: {verdict}", fontsize=14, color=_SOFT
        )
        _scores(left, result)
        _scale(right, result)


def _scores(axes: "Axes", result: "AuditResult") -> None:
    """Histograms of the canaries that were in and out, and where the attacker guessed."""
    scores, present = result.scores, result.present
    low, high = np.quantile(scores, [0.002, 0.998])
    bins = np.linspace(low, high, 41).tolist()
    axes.hist(scores[~present], bins=bins, color=METHOD_COLORS[1], alpha=0.55, label="canaries that were out")
    axes.hist(scores[present], bins=bins, color=_ACCENT, alpha=0.55, label="canaries that were in")
    half = result.bound.guesses // 2
    order = np.sort(scores)
    for edge, words, side in ((order[half - 1], "guessed out", "right"), (order[-half], "guessed in", "left")):
        axes.axvline(edge, color=_SOFT, linewidth=1, linestyle=(0, (4, 3)))
        axes.annotate(
            words,
            (edge, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(-6 if side == "right" else 6, -4),
            textcoords="offset points",
            ha=side,
            va="top",
            color=_SOFT,
            fontsize=10,
        )
    axes.set_yticks([])
    axes.set_xlabel(f"score, {result.attacker}")
    correct, guesses = result.bound.correct, result.bound.guesses
    axes.set_title(f"{correct} of {guesses} guesses were right", loc="left", fontsize=12, pad=28)
    axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(-0.01, 0.995), ncols=2, fontsize=10, handlelength=1.2)


def _scale(axes: "Axes", result: "AuditResult") -> None:
    """Shown, claimed, and the most that could have been shown."""
    rows = [
        ("most that could\nbe shown", result.bound.ceiling, _HAIR),
        ("claimed", result.claimed.epsilon, _SOFT),
        ("shown", result.bound.epsilon, _ACCENT if result.passed else COLORS["alarm"]),
    ]
    for row, (_, value, color) in enumerate(rows):
        axes.barh(row, value, height=0.42, color=color)
        axes.annotate(
            f"{value:.2f}",
            (value, row),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            color=_INK,
            fontsize=12,
        )
    axes.set_yticks(range(len(rows)), [name for name, _, _ in rows])
    axes.set_xlim(0, 1.18 * max(value for _, value, _ in rows))
    axes.set_xlabel("ε")
    confidence = f"{100 * result.bound.confidence:g} % confidence"
    axes.set_title(f"{confidence} · {result.bound.family or 'any curve'}", loc="left", fontsize=12, pad=28)


# ----------------------------------------------------------------------------------------------------------------------
# The picture of `sordino compare`: accuracy or error of every method against ε, compared with models without privacy.
# ----------------------------------------------------------------------------------------------------------------------


_WORDS = {"linear": "linear, not private", "trees": "trees, not private", "nothing": "no model"}
_MARKS = "osD^vPX*hp"


def plot_comparison(found: "Comparison", others: Mapping[str, float], *, title: str, delta: float, path: Path) -> None:
    """Draw the comparison to a PNG or SVG file."""
    from sordino.report.formatting import power_of_ten

    # Names of methods stand outside the axes: the sheet grows until none is cut.
    with saved_figure(path, size=(12, 7), bbox_inches="tight", pad_inches=0.4) as figure:
        axes = figure.subplots(gridspec_kw={"left": 0.075, "right": 0.76, "bottom": 0.1, "top": 0.82})
        figure.text(0.075, 0.92, title, fontsize=24, color=_INK, family=SERIF)
        what = "accuracy" if found.measure == "accuracy" else "root mean squared error"
        neighbors = found.total.neighboring_relation.describe()
        below = f"{what} on public test records   ·   δ = {power_of_ten(delta)}   ·   neighbors {neighbors}"
        figure.text(0.075, 0.87, below, fontsize=11.5, color=_SOFT)
        budgets = sorted({cell.epsilon for cell in found.cells})
        if len(budgets) > 1:
            _lines(axes, found, others, budgets)
        else:
            _bars(axes, found)


def _scale_of(found: "Comparison") -> float:
    return 100.0 if found.measure == "accuracy" else 1.0


def _lines(axes: "Axes", found: "Comparison", others: Mapping[str, float], budgets: Sequence[float]) -> None:
    """One line a method, named at its right end; names are moved apart where they would overlap."""
    scale, ends = _scale_of(found), []
    names = list(dict.fromkeys(cell.method for cell in found.cells))
    for index, name in enumerate(names):
        cells = sorted((cell for cell in found.cells if cell.method == name), key=lambda cell: cell.epsilon)
        color = METHOD_COLORS[index % len(METHOD_COLORS)]
        means = [scale * cell.mean for cell in cells]
        axes.plot(budgets, means, color=color, linewidth=2, marker=_MARKS[index % len(_MARKS)], markersize=6)
        for cell in cells:
            if len(cell.scores) > 1:
                low, high = scale * min(cell.scores), scale * max(cell.scores)
                axes.plot([cell.epsilon] * 2, [low, high], color=color, linewidth=1)
        ends.append((means[-1], name, color))
    for name, value in others.items():
        axes.axhline(scale * value, color=_INK if name != "nothing" else _SOFT, linewidth=1.2)
        axes.lines[-1].set_linestyle((0, (6, 3)) if name != "nothing" else (0, (1, 3)))
        ends.append((scale * value, _WORDS[name], _INK if name != "nothing" else _SOFT))
    axes.set_xscale("log")
    axes.set_xticks(budgets, [f"ε = {budget:g}" for budget in budgets])
    axes.minorticks_off()
    low, high = _window(found, others, scale)
    axes.set_ylim(low, high)
    for cell in found.cells:
        if not low <= scale * cell.mean <= high:
            shown = low if scale * cell.mean < low else high
            axes.annotate(f"{scale * cell.mean:.3g}", (cell.epsilon, shown), ha="center", color=_SOFT)
    axes.grid(axis="y", color=_HAIR)
    axes.set_axisbelow(True)
    right_margin = axes.get_yaxis_transform()
    for height, (value, name, color) in zip(_apart([end[0] for end in ends], low, high), ends, strict=True):
        edge = min(max(value, low), high)
        axes.plot([1.005, 1.035], [edge, height], color=_HAIR, linewidth=1, transform=right_margin, clip_on=False)
        axes.text(1.042, height, f"{name}  {value:.4g}", va="center", fontsize=11, color=color, transform=right_margin)


def _window(found: "Comparison", others: Mapping[str, float], scale: float) -> tuple[float, float]:
    """Limits that show all methods but those far worse than no model at all."""
    values = [scale * cell.mean for cell in found.cells]
    lines = [scale * value for value in others.values()]
    if "nothing" in others:
        floor = scale * others["nothing"]
        spread = max(abs(line - floor) for line in lines) or 1.0
        values = [min(max(value, floor - 1.5 * spread), floor + 1.5 * spread) for value in values]
    low, high = min([*values, *lines]), max([*values, *lines])
    room = 0.06 * (high - low) or 1.0
    return low - room, high + room


def _apart(values: Sequence[float], low: float, high: float) -> list[float]:
    """The values, moved up and down as little as needed to stand a line of text apart."""
    step = (high - low) / 24
    order = sorted(range(len(values)), key=lambda index: values[index])
    heights = [min(max(values[index], low), high) for index in order]
    for _ in range(200):
        moved = False
        for k in range(len(heights) - 1):
            short = step - (heights[k + 1] - heights[k])
            if short > 1e-9 * step:
                heights[k], heights[k + 1], moved = heights[k] - short / 2, heights[k + 1] + short / 2, True
        if not moved:
            break
    found = [0.0] * len(values)
    for k, index in enumerate(order):
        found[index] = heights[k]
    return found


def _bars(axes: "Axes", found: "Comparison") -> None:
    """One bar a method, for one ε."""
    scale, cells = (
        _scale_of(found),
        sorted(found.cells, key=lambda cell: cell.mean, reverse=found.measure != "accuracy"),
    )
    axes.barh(range(len(cells)), [scale * cell.mean for cell in cells], color=METHOD_COLORS[0], height=0.55)
    axes.set_yticks(range(len(cells)), [cell.method for cell in cells])
    for row, cell in enumerate(cells):
        low, high = scale * min(cell.scores), scale * max(cell.scores)
        if len(cell.scores) > 1:
            axes.plot([low, high], [row, row], color=_INK, linewidth=1.4)
        axes.text(max(high, scale * cell.mean), row, f"  {scale * cell.mean:.4g}", va="center", color=_INK)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    (epsilon,) = {cell.epsilon for cell in found.cells}
    axes.set_title(f"each at its part of the budget, ε = {epsilon:.3g}", loc="left", fontsize=12)
