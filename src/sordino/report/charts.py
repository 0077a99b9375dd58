"""The charts as inline SVG. Colors and type come from the page's style sheet, so light and dark are one drawing.

Each chart carries its points and their words; the page's script only looks up what lies nearest to the pointer.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from html import escape
from textwrap import wrap

from sordino.report.formatting import SUPERSCRIPTS, format_epsilon, percent_up, power_of_ten
from sordino.report.schema import (
    Accuracy,
    Calibration,
    Curves,
    EpsilonPoint,
    NoisyLosses,
    PrivateEvaluation,
    Subgroup,
    wilson_interval,
)

WIDTH, HEIGHT = 400, 256
FEWEST_IN_BIN = 20
"""Bins of a reliability diagram with fewer records are not drawn: their interval is wider than ± 20 %."""
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
    """Where values lie on an axis: `position` gives a share of its length, `marks` are values with their words."""

    position: Callable[[float], float]
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
    return Axis(position=lambda value: value / top, marks=marks, label=label)


def logarithmic(lowest: int, highest: int, label: str, *, show: Callable[[int], str]) -> Axis:
    """From 10^lowest to 10^highest; smaller values lie on the lower end."""
    span = highest - lowest
    every = max(1, math.ceil(span / 6))
    marks = tuple((10.0**power, show(power)) for power in range(highest, lowest - 1, -every))
    return Axis(
        position=lambda value: max(0.0, (math.log10(max(value, 1e-300)) - lowest) / span), marks=marks, label=label
    )


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Axes with curves on them; `band` is drawn below them, and `spans` as bars, each (position, lowest, highest)."""

    x: Axis
    y: Axis
    lines: tuple[Line, ...]
    words: str
    area: bool = True
    notes: tuple[tuple[float, float, str, str], ...] = ()
    spans: Sequence[tuple[float, float, float]] = ()
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
        for at, low, high in self.spans:
            body += (
                f'<line class="span thin" x1="{self._x(at):.1f}" x2="{self._x(at):.1f}" '
                f'y1="{self._y(low):.1f}" y2="{self._y(high):.1f}"/>'
            )
        return svg(body + self._notes(), self.words, probe=self._probe())

    def _notes(self) -> str:
        """The labels, moved up, or down at the top, until none lies on another or leaves the drawing."""
        body, taken = "", []
        for at, up, kind, text in self.notes:
            side = "end" if kind != "note below" and self.x.position(at) > 0.5 else "start"
            width, x = 6.4 * len(text), self._x(at)
            left = max(0.0, x - width) if side == "end" else min(x, WIDTH - width)
            wanted = self._y(up) - 8
            lines = sorted((wanted - 13 * k for k in range(-12, 13)), key=lambda y: abs(y - wanted))
            y = next(
                (
                    y
                    for y in lines
                    if 10 <= y <= HEIGHT - _BOTTOM
                    and not any(abs(y - b) < 13 and left < a + w and a < left + width for a, b, w in taken)
                ),
                wanted,
            )
            taken.append((left, y, width))
            start = left + width if side == "end" else left
            body += f'<text class="{kind}" x="{start:.1f}" y="{y:.1f}" text-anchor="{side}">{escape(text)}</text>'
        return body

    def _probe(self) -> str:
        """Data for the pointer: pixel positions and words of one curve."""
        labeled = [line for line in self.lines if line.words]
        if not labeled:
            return ""
        line = labeled[0]
        data = [
            [round(self._x(a), 1), round(self._y(b), 1), words]
            for (a, b), words in zip(line.points, line.words, strict=True)
        ]
        return json.dumps(data, ensure_ascii=False)

    def _x(self, value: float) -> float:
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * min(1.0, max(0.0, self.x.position(value)))

    def _y(self, value: float) -> float:
        return _TOP + (HEIGHT - _TOP - _BOTTOM) * (1 - min(1.0, max(0.0, self.y.position(value))))

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
            side = "end" if number == last and self.x.position(value) > 0.97 else "middle"
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


# ----------------------------------------------------------------------------------------------------------------------
# The figures of a report: which curves, on which axes, with which words.
# ----------------------------------------------------------------------------------------------------------------------


def spent_chart(curve: Sequence[EpsilonPoint], *, target: float | None) -> str:
    """ε over steps, with the target as a dashed line; empty where there are not two steps to draw."""
    finite = [point for point in curve if math.isfinite(point.epsilon)]
    if len(finite) < 2 or finite[-1].steps < 2:
        return ""
    last = finite[-1]
    highest = max(last.epsilon, target or 0.0, 1e-9)
    end = f"ε = {format_epsilon(last.epsilon)}"
    goal = () if target is None else (Line(points=[(0, target), (last.steps, target)], kind="target"),)
    note = () if target is None else ((0.0, target, "note", f"target {target:g}"),)
    return Chart(
        x=_whole(linear(last.steps, "steps", show=lambda value: f"{value:,.0f}")),
        y=linear(highest, "ε", room=1.16),
        lines=(
            *goal,
            Line(
                points=[(point.steps, point.epsilon) for point in finite],
                words=[f"after {point.steps:,} steps: ε = {format_epsilon(point.epsilon)}" for point in finite],
            ),
        ),
        notes=(*note, (last.steps, last.epsilon, "value", end)),
        words=f"Privacy spent over {last.steps:,} steps, ending at {end}",
    ).svg()


def loss_chart(losses: NoisyLosses) -> str:
    """The noisy losses over the steps, in the band that holds 95 % of the noise."""
    points = losses.points
    if len(points) < 2:
        return ""
    highest = max(1e-12, *(point.loss + 1.96 * point.noise for point in points))
    return Chart(
        x=_whole(linear(points[-1].steps, "steps", show=lambda value: f"{value:,.0f}")),
        y=linear(highest, "loss, with noise", room=1.05),
        lines=(
            Line(
                points=[(point.steps, point.loss) for point in points],
                words=[
                    f"up to step {point.steps:,}: {point.loss:.3f}, noise ± {1.96 * point.noise:.3f}"
                    for point in points
                ],
            ),
        ),
        area=False,
        band=[(p.steps, p.loss - 1.96 * p.noise, p.loss + 1.96 * p.noise) for p in points],
        words=f"Noisy training loss over {points[-1].steps:,} steps, ending at {points[-1].loss:.3f}",
    ).svg()


def paid_charts(evaluation: PrivateEvaluation) -> list[tuple[str, str]]:
    """Shares of right answers with their intervals: (column, drawing) for all records and each column."""
    charts = []
    for column in dict.fromkeys(share.column for share in evaluation.shares):
        rows, said = [], []
        part = [share for share in evaluation.shares if share.column == column]
        for share in part:
            words, length = share.describe(), share.accuracy if share.is_known else 0.0
            rows.append((f"{share.value} · about {share.records:,} records", length, words, True))
            said.append(f"{share.value} {words} ({100 * share.lower:.1f} to {100 * share.upper:.1f} %)")
        spans = [(share.lower, share.upper) for share in part]
        charts.append((column, _bars(rows, f"Accuracy: {', '.join(said)}", spans=spans, gap=44, thick=12)))
    return charts


def profile_chart(curves: Curves, *, epsilon: float, delta: float) -> str:
    """δ(ε) on a logarithmic axis, with the point that is claimed."""
    points = [(at, level) for at, level in curves.profile if level > 0]
    if len(points) < 2:
        return ""
    lowest = math.floor(math.log10(max(1e-16, min(level for _, level in points))))
    lowest = max(lowest, math.floor(math.log10(max(delta, 1e-300))) - 4) if delta > 0 else lowest
    drawn = [(at, level) for at, level in points if level >= 10.0**lowest]
    words = [f"ε = {at:.2f}: δ ≤ {power_of_ten(_up(level))}" for at, level in drawn]
    claimed = delta > 0 and epsilon <= points[-1][0]
    return Chart(
        x=linear(points[-1][0], "ε"),
        y=logarithmic(lowest, 0, "δ", show=_power),
        lines=(
            Line(points=drawn, words=words),
            *((Line(points=[(epsilon, delta)], kind="dots"),) if claimed else ()),
        ),
        area=False,
        notes=((epsilon, delta, "value", f"({format_epsilon(epsilon)}, {power_of_ten(delta)})"),) if claimed else (),
        words="The least δ at each ε: all pairs (ε, δ) that hold at once",
    ).svg()


def attack_charts(curves: Curves) -> tuple[str, str]:
    """The greatest true positive rate at each false positive rate: on plain and on logarithmic axes."""
    if not curves.trade_off:
        return "", ""
    found = [(rate, min(1.0, 1 - missed)) for rate, missed in curves.trade_off]
    words = [
        f"{_percent(rate)} wrongly identified: at most {percent_up(most)} correctly identified" for rate, most in found
    ]
    wrong, right = "wrongly identified, of those not in the data", "correctly identified, of those in the data"
    caption = "The largest share that a membership attack can identify, for every share of wrong identifications"
    # At 0 the curve has no drawn rate of its own; the smallest one bounds it from above.
    plain = Chart(
        x=_shares(wrong),
        y=_shares(right),
        lines=(
            Line(points=[(0, 0), (1, 1)], kind="guess"),
            Line(points=[(0.0, found[0][1]), *found, (1.0, 1.0)], words=[words[0], *words, "everybody is identified"]),
        ),
        notes=((0.56, 0.36, "note below", "guessing"),),
        words=caption,
    )
    logs = Chart(
        x=logarithmic(-4, 0, wrong, show=_percent_power),
        y=logarithmic(-4, 0, right, show=_percent_power),
        lines=(
            Line(points=[(1e-4, 1e-4), (1, 1)], kind="guess"),
            Line(points=[*found, (1.0, 1.0)], words=[*words, "everybody is identified"]),
        ),
        notes=((0.012, 0.002, "note below", "guessing"),),
        words=caption + ", on logarithmic axes",
    )
    return plain.svg(), logs.svg()


def reliability_chart(calibration: Calibration) -> str:
    """Accuracy over confidence, with 95 % intervals; empty where every bin has too few records.

    On the diagonal, confidence equals accuracy.
    """
    drawn = [part for part in calibration.bins if part.records >= FEWEST_IN_BIN]
    if not drawn:
        return ""
    points = [(part.confidence, part.accuracy) for part in drawn]
    words = [
        f"confidence {100 * part.confidence:.1f} %: accuracy {100 * part.accuracy:.1f} %, {part.records:,} records"
        for part in drawn
    ]
    spans = [(part.confidence, *wilson_interval(part.accuracy, part.records)) for part in drawn]
    return Chart(
        x=_shares("confidence of the model"),
        y=_shares("accuracy"),
        lines=(
            Line(points=[(0, 0), (1, 1)], kind="guess"),
            Line(points=points, kind="line dots", words=words),
        ),
        area=False,
        spans=spans,
        words="Reliability diagram: accuracy at each confidence",
    ).svg()


def cost_chart(found: Sequence[tuple[str, float, float]]) -> str:
    """Accuracy over ε, one point a run: (name, ε, accuracy)."""
    drawn = [item for item in found if math.isfinite(item[1])]
    if not drawn:
        return ""
    points = sorted((epsilon, value, name) for name, epsilon, value in drawn)
    return Chart(
        x=linear(ticks(max(epsilon for epsilon, _, _ in points))[-1], "ε", room=1.04),
        y=_shares("accuracy on public test records"),
        lines=(
            Line(
                points=[(epsilon, value) for epsilon, value, _ in points],
                kind="scatter dots",
                words=[f"{name}: ε = {format_epsilon(e)}, accuracy {100 * value:.1f} %" for e, value, name in points],
            ),
        ),
        notes=tuple((epsilon, value, "note", _short(name, 24)) for epsilon, value, name in points[:8]),
        area=False,
        words="Accuracy over ε, one point for each run",
    ).svg()


def accuracy_chart(accuracy: Sequence[Accuracy]) -> str:
    """Horizontal bars from 0, so that lengths compare honestly."""
    rows = [(item.name, item.value, f"{100 * item.value:.1f} %", item.is_private_model) for item in accuracy]
    said = ", ".join(f"{item.name} {100 * item.value:.1f} %" for item in accuracy)
    return _bars(rows, f"Test accuracy: {said}") if accuracy else ""


def subgroup_chart(column: str, groups: Sequence[Subgroup]) -> str:
    """Accuracy by subgroup of one column, with its 95 % interval."""
    rows = [
        (f"{group.value} · {group.records:,} records", group.accuracy, f"{100 * group.accuracy:.1f} %", True)
        for group in groups
    ]
    spans = [(group.lower, group.upper) for group in groups]
    said = ", ".join(f"{group.value} {100 * group.accuracy:.1f} %" for group in groups)
    return _bars(rows, f"Test accuracy by {column}: {said}", spans=spans, gap=44, thick=12)


def _bars(
    rows: Sequence[tuple[str, float, str, bool]],
    words: str,
    *,
    spans: Sequence[tuple[float, float]] = (),
    gap: int = 58,
    thick: int = 17,
) -> str:
    full, line = WIDTH - 66, 15
    parts, top = [], 22 - gap
    for row, (name, value, text, strong) in enumerate(rows):
        names = wrap(name, 56) or [""]
        top += gap + line * (len(names) - 1)
        kind, weight = ("bar strong", "value") if strong else ("bar", "label")
        parts += [
            f'<text class="label" x="0" y="{top - 7 - line * (len(names) - 1 - number)}">{escape(part)}</text>'
            for number, part in enumerate(names)
        ]
        parts.append(
            f'<rect class="track" x="0" y="{top}" width="{full}" height="{thick}" rx="3"/>'
            f'<rect class="{kind}" x="0" y="{top}" width="{full * value:.1f}" height="{thick}" rx="3"/>'
            f'<text class="{weight}" x="{WIDTH}" y="{top + thick / 2 + 5:.1f}" text-anchor="end">{escape(text)}</text>'
        )
        if spans:
            low, high = spans[row]
            middle = top + thick / 2
            parts.append(
                f'<line class="span" x1="{full * low:.1f}" x2="{full * high:.1f}" y1="{middle:.1f}" y2="{middle:.1f}"/>'
            )
    return svg("".join(parts), words, height=top + thick + 4)


def _shares(label: str) -> Axis:
    """From 0 to 1, marked in percent."""
    marks = tuple((value, f"{100 * value:.0f} %") for value in (0.0, 0.25, 0.5, 0.75, 1.0))
    return Axis(position=lambda value: value, marks=marks, label=label)


def _whole(axis: Axis) -> Axis:
    """Only whole numbers, each once: steps are counted."""
    marks = sorted({float(round(value)) for value, _ in axis.marks})
    return replace(axis, marks=tuple((value, f"{value:,.0f}") for value in marks))


def _short(text: str, most: int = 28) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _up(value: float) -> float:
    """Three digits, not below itself."""
    if value <= 0:
        return value
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return min(1.0, math.ceil(value / unit - 1e-9) * unit)


def _power(power: int) -> str:
    return "1" if power == 0 else "10" + str(power).translate(SUPERSCRIPTS)


def _percent(rate: float) -> str:
    return f"{100 * rate:.3g} %"


def _percent_power(power: int) -> str:
    return f"{100 * 10.0**power:g} %"
