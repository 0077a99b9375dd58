"""The charts as inline SVG. Colours and type come from the page's style sheet, so light and dark are one drawing."""

import math
from collections.abc import Callable, Sequence
from html import escape

from sordino.definitions import round_up
from sordino.report.limits import attack_bound
from sordino.report.schema import Accuracy, Point

__all__ = ["accuracy_chart", "attack_chart", "epsilon_chart", "ticks"]

_WIDTH, _HEIGHT = 440, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 40, 20, 20, 42


def ticks(highest: float, *, about: int = 4) -> list[float]:
    """Round numbers from 0 up to at least `highest`, about `about` of them.

    Example:
        >>> ticks(0.93)
        [0.0, 0.25, 0.5, 0.75, 1.0]
    """
    raw = max(highest, 1e-12) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(round_number * power for round_number in (1, 2, 2.5, 5, 10) if round_number * power >= raw * (1 - 1e-9))
    count = math.ceil(highest / step - 1e-9)
    return [round(k * step, 12) for k in range(max(count, 1) + 1)]


def epsilon_chart(curve: Sequence[Point], *, target: float | None) -> str:
    """ε over steps, with the target as a dashed line."""
    finite = [point for point in curve if math.isfinite(point.epsilon)]
    if len(finite) < 2:
        return ""
    last = finite[-1]
    highest = max(last.epsilon, target or 0.0)
    y_ticks = [tick for tick in ticks(highest) if tick <= highest * (1 + 1e-9)]
    x_ticks = _whole(ticks(last.steps))
    x_ticks = [tick for tick in x_ticks if tick <= last.steps]
    x, y = _scales(last.steps, 1.14 * highest)
    points = " ".join(f"{x(point.steps):.1f},{y(point.epsilon):.1f}" for point in finite)
    area = f"{x(finite[0].steps):.1f},{y(0):.1f} {points} {x(last.steps):.1f},{y(0):.1f}"
    end = f"ε = {round_up(last.epsilon)}"
    body = _axes(x, y, x_ticks, y_ticks, x_label="steps", x_format=lambda v: f"{v:,.0f}")
    if target is not None:
        body += (
            f'<line class="target" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(target):.1f}" y2="{y(target):.1f}"/>'
            f'<text class="note" x="{_LEFT}" y="{y(target) - 7:.1f}">target {target:g}</text>'
        )
    body += (
        f'<polygon class="area" points="{area}"/><polyline class="line" points="{points}"/>'
        f'<circle class="dot" cx="{x(last.steps):.1f}" cy="{y(last.epsilon):.1f}" r="4"/>'
        f'<text class="value" x="{x(last.steps):.1f}" y="{y(last.epsilon) - 9:.1f}" text-anchor="end">{end}</text>'
    )
    return _svg(body, f"Privacy spent over {last.steps:,} steps, ending at {end}")


def accuracy_chart(accuracy: Sequence[Accuracy]) -> str:
    """Horizontal bars from 0, so that lengths compare honestly."""
    if not accuracy:
        return ""
    full = _WIDTH - 70
    gap, thick = 62, 18
    parts, said = [], []
    for number, item in enumerate(accuracy):
        top = 22 + number * gap
        kind = "bar strong" if item.is_private_model else "bar"
        value = f"{100 * item.value:.1f} %"
        weight = "value" if item.is_private_model else "label"
        parts.append(
            f'<text class="label" x="0" y="{top - 8}">{escape(item.name)}</text>'
            f'<rect class="track" x="0" y="{top}" width="{full}" height="{thick}" rx="3"/>'
            f'<rect class="{kind}" x="0" y="{top}" width="{full * item.value:.1f}" height="{thick}" rx="3"/>'
            f'<text class="{weight}" x="{_WIDTH}" y="{top + 14}" text-anchor="end">{value}</text>'
        )
        said.append(f"{item.name} {value}")
    return _svg("".join(parts), "Test accuracy: " + ", ".join(said), height=len(accuracy) * gap - 16)


def attack_chart(*, epsilon: float, delta: float) -> str:
    """The greatest true positive rate over the false positive rate, above the line of mere guessing."""
    rates = _corner(epsilon, delta)
    marks = [0.0, 0.25, 0.5, 0.75, 1.0]
    x, y = _scales(1.0, 1.0)
    bound = [(rate, attack_bound(epsilon=epsilon, delta=delta, false_positive_rate=rate)) for rate in rates]
    points = " ".join(f"{x(rate):.1f},{y(found):.1f}" for rate, found in bound)
    body = _axes(
        x,
        y,
        marks,
        marks,
        x_label="wrongly accused, of those outside",
        y_label="found, of those inside",
        x_format=lambda v: f"{100 * v:.0f} %",
        y_format=lambda v: f"{100 * v:.0f} %",
    )
    body += (
        f'<polygon class="area" points="{points} {x(0):.1f},{y(0):.1f}"/>'
        f'<line class="guess" x1="{x(0):.1f}" y1="{y(0):.1f}" x2="{x(1):.1f}" y2="{y(1):.1f}"/>'
        f'<polyline class="line" points="{points}"/>'
        f'<text class="note" x="{x(0.66):.1f}" y="{y(0.52):.1f}">mere guessing</text>'
    )
    return _svg(body, "The most a membership attack can find, for every share of wrong accusations")


def _corner(epsilon: float, delta: float) -> list[float]:
    """Where the piecewise linear bound bends: at (1 − δ) / (1 + e^ε), and where it reaches 1."""
    bend = (1 - delta) / (1 + math.exp(min(epsilon, 709.0)))
    return [0.0, bend, max(bend, 1 - delta), 1.0]


def _whole(values: list[float]) -> list[float]:
    return sorted({float(round(value)) for value in values})


def _scales(x_high: float, y_high: float) -> tuple[Callable[[float], float], Callable[[float], float]]:
    wide, tall = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
    return lambda v: _LEFT + wide * v / x_high, lambda v: _TOP + tall * (1 - v / y_high)


def _axes(
    x: Callable[[float], float],
    y: Callable[[float], float],
    x_ticks: Sequence[float],
    y_ticks: Sequence[float],
    *,
    x_label: str,
    x_format: Callable[[float], str],
    y_label: str = "",
    y_format: Callable[[float], str] = "{:g}".format,
) -> str:
    parts = [
        f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(v):.1f}" y2="{y(v):.1f}"/>'
        f'<text class="tick" x="{_LEFT - 8}" y="{y(v) + 4:.1f}" text-anchor="end">{y_format(v)}</text>'
        for v in y_ticks
    ]
    parts += [
        f'<text class="tick" x="{x(v):.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{x_format(v)}</text>'
        for v in x_ticks
    ]
    parts.append(f'<text class="tick" x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 4}" text-anchor="end">{x_label}</text>')
    if y_label:
        parts.append(f'<text class="tick" x="{_LEFT}" y="{_TOP - 6}">{y_label}</text>')
    return "".join(parts)


def _svg(body: str, words: str, *, height: int = _HEIGHT) -> str:
    label = escape(words, quote=True)
    return f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{label}">{body}</svg>'
