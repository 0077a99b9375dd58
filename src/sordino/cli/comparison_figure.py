"""The picture of `sordino compare`: accuracy or error of every method against ε, beside models without privacy."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sordino.cli.figures import COLOURS, METHOD_COLOURS, STYLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from sordino.recipes.comparing import Comparison

__all__ = ["draw"]

_WORDS = {"linear": "linear, not private", "trees": "trees, not private", "nothing": "no model"}
_MARKS = "osD^vPX*hp"


def draw(found: "Comparison", others: Mapping[str, float], *, title: str, delta: float, path: Path) -> None:
    """Draw the comparison to a PNG or SVG file."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):  # pyright: ignore[reportArgumentType]
        figure = Figure(figsize=(12, 7), dpi=110)
        FigureCanvasAgg(figure)
        axes = figure.subplots(gridspec_kw={"left": 0.075, "right": 0.76, "bottom": 0.1, "top": 0.82})
        figure.text(0.075, 0.92, title, fontsize=24, color=COLOURS["ink"], family="DejaVu Serif")
        what = "accuracy" if found.measure == "accuracy" else "root mean squared error"
        below = f"{what} on public test records   ·   δ = {delta:g}   ·   neighbours {found.total.relation.words}"
        figure.text(0.075, 0.87, below, fontsize=11.5, color=COLOURS["soft"])
        budgets = sorted({cell.epsilon for cell in found.cells})
        if len(budgets) > 1:
            _lines(axes, found, others, budgets)
        else:
            _bars(axes, found)
        figure.savefig(path, metadata={"Date": None} if path.suffix.lower() == ".svg" else {"Software": "sordino"})


def _scale(found: "Comparison") -> float:
    return 100.0 if found.measure == "accuracy" else 1.0


def _lines(axes: "Axes", found: "Comparison", others: Mapping[str, float], budgets: Sequence[float]) -> None:
    """One line a method, named at its right end; names are moved apart where they would overlap."""
    scale, ends = _scale(found), []
    names = list(dict.fromkeys(cell.method for cell in found.cells))
    for place, name in enumerate(names):
        cells = sorted((cell for cell in found.cells if cell.method == name), key=lambda cell: cell.epsilon)
        colour = METHOD_COLOURS[place % len(METHOD_COLOURS)]
        means = [scale * cell.mean for cell in cells]
        axes.plot(budgets, means, color=colour, linewidth=2, marker=_MARKS[place % len(_MARKS)], markersize=6)
        for cell in cells:
            if len(cell.scores) > 1:
                low, high = scale * min(cell.scores), scale * max(cell.scores)
                axes.plot([cell.epsilon] * 2, [low, high], color=colour, linewidth=1)
        ends.append((means[-1], name, colour))
    for name, value in others.items():
        axes.axhline(scale * value, color=COLOURS["ink"] if name != "nothing" else COLOURS["soft"], linewidth=1.2)
        axes.lines[-1].set_linestyle((0, (6, 3)) if name != "nothing" else (0, (1, 3)))
        ends.append((scale * value, _WORDS[name], COLOURS["ink"] if name != "nothing" else COLOURS["soft"]))
    axes.set_xscale("log")
    axes.set_xticks(budgets, [f"ε = {budget:g}" for budget in budgets])
    axes.minorticks_off()
    low, high = _window(found, others, scale)
    axes.set_ylim(low, high)
    for cell in found.cells:
        if not low <= scale * cell.mean <= high:
            shown = low if scale * cell.mean < low else high
            axes.annotate(f"{scale * cell.mean:.3g}", (cell.epsilon, shown), ha="center", color=COLOURS["soft"])
    axes.grid(axis="y", color=COLOURS["hair"])
    axes.set_axisbelow(True)
    beside = axes.get_yaxis_transform()
    for place, (value, name, colour) in zip(_apart([end[0] for end in ends], low, high), ends, strict=True):
        edge = min(max(value, low), high)
        axes.plot([1.005, 1.035], [edge, place], color=COLOURS["hair"], linewidth=1, transform=beside, clip_on=False)
        axes.text(1.042, place, f"{name}  {value:.4g}", va="center", fontsize=11, color=colour, transform=beside)


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
    order = sorted(range(len(values)), key=lambda place: values[place])
    places = [min(max(values[place], low), high) for place in order]
    for _ in range(200):
        moved = False
        for k in range(len(places) - 1):
            short = step - (places[k + 1] - places[k])
            if short > 1e-9 * step:
                places[k], places[k + 1], moved = places[k] - short / 2, places[k + 1] + short / 2, True
        if not moved:
            break
    found = [0.0] * len(values)
    for k, place in enumerate(order):
        found[place] = places[k]
    return found


def _bars(axes: "Axes", found: "Comparison") -> None:
    """One bar a method, for one ε."""
    scale, cells = _scale(found), sorted(found.cells, key=lambda cell: cell.mean, reverse=found.measure != "accuracy")
    axes.barh(range(len(cells)), [scale * cell.mean for cell in cells], color=METHOD_COLOURS[0], height=0.55)
    axes.set_yticks(range(len(cells)), [cell.method for cell in cells])
    for place, cell in enumerate(cells):
        axes.text(scale * cell.mean, place, f"  {scale * cell.mean:.4g}", va="center", color=COLOURS["ink"])
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    (epsilon,) = {cell.epsilon for cell in found.cells}
    axes.set_title(f"each at its part of the budget, ε = {epsilon:.3g}", loc="left", fontsize=12)
