"""The figures of a report: which curves, on which axes, with which words."""

import math
from collections.abc import Sequence
from html import escape

from sordino.report.bought import NoisyLosses, PaidEvaluation
from sordino.report.charts import WIDTH, Axis, Chart, Line, linear, logarithmic, svg, ticks
from sordino.report.numerals import epsilon_words, percent_up, power_of_ten
from sordino.report.parts import Accuracy, Calibration, Curves, Point, Subgroup

__all__ = [
    "accuracy_chart",
    "attack_charts",
    "cost_chart",
    "loss_chart",
    "paid_charts",
    "profile_chart",
    "reliability_chart",
    "spent_chart",
    "subgroup_chart",
]

_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def spent_chart(curve: Sequence[Point], *, target: float | None) -> str:
    """ε over steps, with the target as a dashed line; empty where there is nothing to draw."""
    finite = [point for point in curve if math.isfinite(point.epsilon)]
    if len(finite) < 2:
        return ""
    last = finite[-1]
    highest = max(last.epsilon, target or 0.0, 1e-9)
    end = f"ε = {epsilon_words(last.epsilon)}"
    goal = () if target is None else (Line(points=[(0, target), (last.steps, target)], kind="target"),)
    note = () if target is None else ((0.0, target, "note", f"target {target:g}"),)
    return Chart(
        x=_whole(linear(last.steps, "steps", show=lambda value: f"{value:,.0f}")),
        y=linear(highest, "ε", room=1.16),
        lines=(
            *goal,
            Line(
                points=[(point.steps, point.epsilon) for point in finite],
                words=[f"after {point.steps:,} steps: ε = {epsilon_words(point.epsilon)}" for point in finite],
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


def paid_charts(evaluation: PaidEvaluation) -> list[tuple[str, str]]:
    """Shares of right answers with their intervals: (column, drawing) for all records and each column."""
    charts = []
    for column in dict.fromkeys(share.column for share in evaluation.shares):
        part = [share for share in evaluation.shares if share.column == column]
        rows = [
            (
                f"{share.value} · about {share.records:,} records",
                share.accuracy if share.is_known else 0.0,
                share.words if share.is_known else "?",
                True,
            )
            for share in part
        ]
        said = ", ".join(
            f"{share.value} {share.words} ({100 * share.lower:.1f} to {100 * share.upper:.1f} %)" for share in part
        )
        spans = [(share.lower, share.upper) for share in part]
        charts.append((column, _bars(rows, f"Share of right answers: {said}", spans=spans, gap=44, thick=12)))
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
        notes=((epsilon, delta, "value", f"({epsilon_words(epsilon)}, {power_of_ten(delta)})"),) if claimed else (),
        words="The least δ at each ε: all pairs (ε, δ) that hold at once",
    ).svg()


def attack_charts(curves: Curves) -> tuple[str, str]:
    """The greatest true positive rate at each false positive rate: on plain and on logarithmic axes."""
    if not curves.trade_off:
        return "", ""
    found = [(rate, min(1.0, 1 - missed)) for rate, missed in curves.trade_off]
    words = [f"{_percent(rate)} wrongly accused: at most {percent_up(most)} found" for rate, most in found]
    shares = tuple((value, f"{100 * value:.0f} %") for value in (0.0, 0.25, 0.5, 0.75, 1.0))
    plain_x = Axis(place=lambda value: value, marks=shares, label="wrongly accused, of those outside")
    plain_y = Axis(place=lambda value: value, marks=shares, label="found, of those inside")
    told = "The most a membership attack can find, for every share of wrong accusations"
    # At 0 the curve has no drawn rate of its own; the smallest one bounds it from above.
    plain = Chart(
        x=plain_x,
        y=plain_y,
        lines=(
            Line(points=[(0, 0), (1, 1)], kind="guess"),
            Line(points=[(0.0, found[0][1]), *found, (1.0, 1.0)], words=[words[0], *words, "all are accused"]),
        ),
        notes=((0.56, 0.36, "note below", "mere guessing"),),
        words=told,
    )
    logs = Chart(
        x=logarithmic(-4, 0, "wrongly accused, of those outside", show=_percent_power),
        y=logarithmic(-4, 0, "found, of those inside", show=_percent_power),
        lines=(
            Line(points=[(1e-4, 1e-4), (1, 1)], kind="guess"),
            Line(points=[*found, (1.0, 1.0)], words=[*words, "all are accused"]),
        ),
        notes=((0.012, 0.002, "note below", "mere guessing"),),
        words=told + ", on logarithmic axes",
    )
    return plain.svg(), logs.svg()


def reliability_chart(calibration: Calibration) -> str:
    """Accuracy over confidence; on the diagonal the model knows what it knows."""
    points = [(part.confidence, part.accuracy) for part in calibration.bins]
    words = [
        f"confidence {100 * part.confidence:.1f} %: right {100 * part.accuracy:.1f} %, {part.records:,} records"
        for part in calibration.bins
    ]
    shares = tuple((value, f"{100 * value:.0f} %") for value in (0.0, 0.25, 0.5, 0.75, 1.0))
    return Chart(
        x=Axis(place=lambda value: value, marks=shares, label="confidence of the model"),
        y=Axis(place=lambda value: value, marks=shares, label="share of right answers"),
        lines=(
            Line(points=[(0, 0), (1, 1)], kind="guess"),
            Line(points=points, kind="line dots", words=words),
        ),
        area=False,
        words="Reliability diagram: share of right answers at each confidence",
    ).svg()


def cost_chart(found: Sequence[tuple[str, float, float]]) -> str:
    """Accuracy over ε, one point a run: (name, ε, accuracy)."""
    drawn = [item for item in found if math.isfinite(item[1])]
    if not drawn:
        return ""
    shares = tuple((value, f"{100 * value:.0f} %") for value in (0.0, 0.25, 0.5, 0.75, 1.0))
    points = sorted((epsilon, value, name) for name, epsilon, value in drawn)
    return Chart(
        x=linear(ticks(max(epsilon for epsilon, _, _ in points))[-1], "ε", room=1.04),
        y=Axis(place=lambda value: value, marks=shares, label="accuracy on public test records"),
        lines=(
            Line(
                points=[(epsilon, value) for epsilon, value, _ in points],
                kind="scatter dots",
                words=[f"{name}: ε = {epsilon_words(e)}, accuracy {100 * value:.1f} %" for e, value, name in points],
            ),
        ),
        notes=tuple((epsilon, value, "note", _short(name)) for epsilon, value, name in points[:8]),
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
    full = WIDTH - 66
    parts = []
    for number, (name, value, text, strong) in enumerate(rows):
        top = 22 + number * gap
        kind, weight = ("bar strong", "value") if strong else ("bar", "label")
        parts.append(
            f'<text class="label" x="0" y="{top - 7}">{escape(_short(name, 46))}</text>'
            f'<rect class="track" x="0" y="{top}" width="{full}" height="{thick}" rx="3"/>'
            f'<rect class="{kind}" x="0" y="{top}" width="{full * value:.1f}" height="{thick}" rx="3"/>'
            f'<text class="{weight}" x="{WIDTH}" y="{top + thick / 2 + 5:.1f}" text-anchor="end">{escape(text)}</text>'
        )
        if spans:
            low, high = spans[number]
            middle = top + thick / 2
            parts.append(
                f'<line class="span" x1="{full * low:.1f}" x2="{full * high:.1f}" y1="{middle:.1f}" y2="{middle:.1f}"/>'
            )
    return svg("".join(parts), words, height=len(rows) * gap - gap + 22 + thick + 4)


def _whole(axis: Axis) -> Axis:
    """Only whole numbers, each once: steps are counted."""
    marks = {float(round(value)): text for value, text in axis.marks}
    return Axis(place=axis.place, marks=tuple((value, f"{value:,.0f}") for value in sorted(marks)), label=axis.label)


def _short(text: str, most: int = 28) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _up(value: float) -> float:
    """Three digits, not below itself."""
    if value <= 0:
        return value
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return min(1.0, math.ceil(value / unit - 1e-9) * unit)


def _power(power: int) -> str:
    return "1" if power == 0 else "10" + str(power).translate(_SUPERSCRIPTS)


def _percent(rate: float) -> str:
    return f"{100 * rate:.3g} %"


def _percent_power(power: int) -> str:
    return f"{100 * 10.0**power:g} %"
