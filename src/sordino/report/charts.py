"""The charts as inline SVG. Colours and type come from the page's style sheet, so light and dark are one drawing.

Each chart carries its points and their words; the page's script only looks up what lies nearest to the pointer.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["Axis", "Chart", "HEIGHT", "Line", "WIDTH", "linear", "logarithmic", "svg", "ticks"]

WIDTH, HEIGHT = 400, 256
_LEFT, _RIGHT, _TOP, _BOTTOM = 50, 14, 26, 40


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


@dataclass(frozen=True, kw_only=True)
class Axis:
    """Where values lie on an axis: `place` gives a share of its length, `marks` are values with their words."""

    place: Callable[[float], float]
    marks: tuple[tuple[float, str], ...]
    label: str


@dataclass(frozen=True, kw_only=True)
class Line:
    """One curve: points in values, and a CSS class; `words` tell what each point says, for the pointer."""

    points: Sequence[tuple[float, float]]
    kind: str = "line"
    words: Sequence[str] = ()


def linear(highest: float, label: str, *, show: Callable[[float], str] = "{:g}".format, room: float = 1.0) -> Axis:
    """From 0 to `room` × `highest`, with marks up to `highest`."""
    top = max(highest, 1e-12) * room
    marks = tuple((value, show(value)) for value in ticks(highest) if value <= highest * (1 + 1e-9))
    return Axis(place=lambda value: value / top, marks=marks, label=label)


def logarithmic(lowest: int, highest: int, label: str, *, show: Callable[[int], str]) -> Axis:
    """From 10^lowest to 10^highest; smaller values lie on the lower end."""
    span = highest - lowest
    every = max(1, math.ceil(span / 6))
    marks = tuple((10.0**power, show(power)) for power in range(highest, lowest - 1, -every))
    return Axis(
        place=lambda value: max(0.0, (math.log10(max(value, 1e-300)) - lowest) / span), marks=marks, label=label
    )


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Axes with curves on them; `band` is drawn below them, as (place, lowest, highest)."""

    x: Axis
    y: Axis
    lines: tuple[Line, ...]
    words: str
    area: bool = True
    notes: tuple[tuple[float, float, str, str], ...] = ()
    band: Sequence[tuple[float, float, float]] = ()

    def svg(self) -> str:
        """The drawing. What the pointer reads are the points of the first curve that has words."""
        body = self._axes()
        if self.band:
            upper = [(at, high) for at, _, high in self.band]
            lower = [(at, low) for at, low, _ in reversed(self.band)]
            body += f'<polygon class="area" points="{self._points([*upper, *lower])}"/>'
        first = self.lines[-1].points
        if self.area and first:
            foot = f"{self._x(first[-1][0]):.1f},{self._y0():.1f} {self._x(first[0][0]):.1f},{self._y0():.1f}"
            body += f'<polygon class="area" points="{self._points(first)} {foot}"/>'
        for line in self.lines:
            tag = "polyline" if len(line.points) > 1 else None
            if tag:
                body += f'<polyline class="{line.kind}" points="{self._points(line.points)}"/>'
            if "dots" in line.kind or len(line.points) == 1:
                body += "".join(
                    f'<circle class="dot" cx="{self._x(a):.1f}" cy="{self._y(b):.1f}" r="3.5"/>' for a, b in line.points
                )
        for at, up, kind, text in self.notes:
            side = "end" if kind != "note below" and self.x.place(at) > 0.5 else "start"
            body += (
                f'<text class="{kind}" x="{self._x(at):.1f}" y="{self._y(up) - 8:.1f}" text-anchor="{side}">'
                f"{escape(text)}</text>"
            )
        return svg(body, self.words, probe=self._probe())

    def _probe(self) -> str:
        """Data for the pointer: pixel positions and words of one curve."""
        told = [line for line in self.lines if line.words]
        if not told:
            return ""
        line = told[0]
        data = [
            [round(self._x(a), 1), round(self._y(b), 1), words]
            for (a, b), words in zip(line.points, line.words, strict=True)
        ]
        return json.dumps(data, ensure_ascii=False)

    def _x(self, value: float) -> float:
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * min(1.0, max(0.0, self.x.place(value)))

    def _y(self, value: float) -> float:
        return _TOP + (HEIGHT - _TOP - _BOTTOM) * (1 - min(1.0, max(0.0, self.y.place(value))))

    def _y0(self) -> float:
        return HEIGHT - _BOTTOM

    def _points(self, points: Sequence[tuple[float, float]]) -> str:
        return " ".join(f"{self._x(a):.1f},{self._y(b):.1f}" for a, b in points)

    def _axes(self) -> str:
        right = WIDTH - _RIGHT
        parts = [
            f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{self._y(value):.1f}" y2="{self._y(value):.1f}"/>'
            f'<text class="tick" x="{_LEFT - 7}" y="{self._y(value) + 4:.1f}" text-anchor="end">{escape(text)}</text>'
            for value, text in self.y.marks
        ]
        last = len(self.x.marks) - 1
        for number, (value, text) in enumerate(sorted(self.x.marks)):
            # The outermost words end inside the drawing.
            side = "end" if number == last and self.x.place(value) > 0.97 else "middle"
            nudge = 6 if side == "end" and len(text) <= 5 else 0
            parts.append(
                f'<text class="tick" x="{self._x(value) + nudge:.1f}" y="{HEIGHT - _BOTTOM + 17}" text-anchor="{side}">'
                f"{escape(text)}</text>"
            )
        parts.append(
            f'<text class="tick axis" x="{right}" y="{HEIGHT - 5}" text-anchor="end">{escape(self.x.label)}</text>'
        )
        if self.y.label:
            parts.append(f'<text class="tick axis" x="4" y="{_TOP - 13}">{escape(self.y.label)}</text>')
        return "".join(parts)


def svg(body: str, words: str, *, probe: str = "", height: int = HEIGHT) -> str:
    """The element around a drawing, with what it shows in words."""
    label = escape(words, quote=True)
    reach = f' tabindex="0" data-points="{escape(probe, quote=True)}"' if probe else ""
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{label}"{reach}>{body}</svg>'
