"""The files of a report: `report.html`, which needs no other file and no network, and `report.png`."""

import base64
import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import groupby
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from sordino.definitions import format_upper_bound
from sordino.plot_style import COLORS, SERIF, saved_figure
from sordino.report import charts as figures
from sordino.report import formatting
from sordino.report.build import build_report
from sordino.report.formatting import format_epsilon, percent_up, power_of_ten, scientific
from sordino.report.schema import PrivateEvaluation, Report
from sordino.runs import ReleasedLoss, RunFolder, average_adjacent

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# ----------------------------------------------------------------------------------------------------------------------
# The picture: the guarantee, ε over steps, and accuracy or the attacker's limit, on one sheet.
# ----------------------------------------------------------------------------------------------------------------------


_EDGE = 0.075


def plot_report(report: Report, path: Path) -> None:
    """Draw the report's picture to a PNG of 1600 × 900 pixels."""
    with saved_figure(path, size=(16, 9), dpi=100) as figure:
        guarantee = report.guarantee
        head = figure.text(
            _EDGE, 0.8, f"ε = {format_epsilon(report.headline_epsilon)}", fontsize=46, color=COLORS["ink"], family=SERIF
        )
        width = head.get_window_extent().width / (100 * 16)
        figure.text(
            _EDGE + width + 0.03,
            0.8,
            f"δ = {power_of_ten(guarantee.delta)}",
            fontsize=46,
            color=COLORS["soft"],
            family=SERIF,
        )
        bounds, scope = report.attack_bounds, formatting.headline_scope(report)
        limit = (
            ""
            if bounds is None
            else f"Membership guesses are correct in at most {percent_up(bounds.right_guesses)} of cases. "
        )
        lines = [f"Protected: {formatting.protected(report).partition(': ')[2]}. {limit}".strip()]
        lines += wrap(scope, 120) if scope else wrap(f"Sampling: {guarantee.sampler}.", 120)
        figure.text(_EDGE, 0.775, "\n".join(lines), fontsize=14, color=COLORS["soft"], va="top", linespacing=1.5)
        if report.not_for_release:
            figure.text(_EDGE, 0.93, f"Not for release. {report.not_for_release}", fontsize=15, color=COLORS["alarm"])
        else:
            figure.text(_EDGE, 0.93, report.name, fontsize=15, color=COLORS["soft"])
        left, right = figure.subplots(
            1, 2, gridspec_kw={"left": _EDGE, "right": 1 - _EDGE, "bottom": 0.1, "top": 0.6, "wspace": 0.22}
        )
        _epsilon(left, report)
        if report.utility.accuracy:
            _accuracy(right, report)
        else:
            _plot_attack(right, report)


def _title(axes: "Axes", text: str) -> None:
    axes.set_title(text, loc="left", fontsize=17, pad=16, family=SERIF)


def _epsilon(axes: "Axes", report: Report) -> None:
    from matplotlib.ticker import MaxNLocator

    _title(axes, "Privacy spent by training (ε)" if report.evaluations else "Privacy spent (ε)")
    points = [point for point in report.curves.spent if math.isfinite(point.epsilon)]
    steps, spent = [point.steps for point in points], [point.epsilon for point in points]
    axes.fill_between(steps, spent, color=COLORS["tint"])
    axes.plot(steps, spent, color=COLORS["accent"], linewidth=2.6)
    if points:
        axes.plot(steps[-1], spent[-1], "o", color=COLORS["accent"], markersize=8, clip_on=False)
        axes.annotate(
            f"ε = {format_upper_bound(spent[-1])}",
            (steps[-1], spent[-1]),
            xytext=(0, 10),
            textcoords="offset points",
            ha="right",
            weight="bold",
            color=COLORS["ink"],
            fontsize=13,
        )
    if report.target_epsilon is not None:
        axes.axhline(report.target_epsilon, color=COLORS["soft"], linewidth=1.2, linestyle=(0, (2, 3)))
        axes.annotate(
            f"target {report.target_epsilon:g}",
            (0, report.target_epsilon),
            xycoords=("axes fraction", "data"),
            xytext=(0, 6),
            textcoords="offset points",
            color=COLORS["soft"],
        )
    axes.set_xlim(0, max(steps[-1] if steps else 0, 1))
    axes.set_ylim(0, 1.15 * max([*spent, report.target_epsilon or 0.0, 1e-9]))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("steps", color=COLORS["soft"], loc="right")
    axes.grid(axis="y", color=COLORS["hair"])
    axes.set_axisbelow(True)


def _accuracy(axes: "Axes", report: Report) -> None:
    _title(axes, "Accuracy on public test records")
    rows = list(reversed(report.utility.accuracy))
    for position, item in enumerate(rows):
        axes.barh(position, 1.0, height=0.3, color=COLORS["hair"])
        axes.barh(position, item.value, height=0.3, color=COLORS["accent"] if item.is_private_model else COLORS["mute"])
        axes.text(0, position + 0.24, item.name, color=COLORS["ink"], fontsize=13)
        weight = "bold" if item.is_private_model else "normal"
        axes.text(
            1.0,
            position + 0.24,
            f"{100 * item.value:.1f} %",
            color=COLORS["ink"],
            fontsize=13,
            ha="right",
            weight=weight,
        )
    axes.set_xlim(0, 1)
    axes.set_ylim(-0.5, max(len(rows), 2) - 0.4)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines["bottom"].set_visible(False)


def _plot_attack(axes: "Axes", report: Report) -> None:
    _title(axes, "Largest share that an attack can identify")
    curve = report.curves.trade_off
    rates = [0.0, *(rate for rate, _ in curve), 1.0]
    most = [1 - missed for _, missed in curve]
    found = [most[0], *most, 1.0] if most else [1.0, 1.0]
    axes.fill_between(rates, found, color=COLORS["tint"])
    axes.plot(rates, found, color=COLORS["accent"], linewidth=2.6)
    axes.plot([0, 1], [0, 1], color=COLORS["mute"], linewidth=1.4, linestyle=(0, (2, 3)))
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("share of non-members wrongly identified", color=COLORS["soft"], loc="right")
    axes.grid(axis="y", color=COLORS["hair"])
    axes.set_axisbelow(True)


# ----------------------------------------------------------------------------------------------------------------------
# The files of a report: `report.html`, which needs no other file and no network, and `report.png`.
# ----------------------------------------------------------------------------------------------------------------------


_MOST_GROUP_CHARTS = 5


@dataclass(frozen=True, kw_only=True)
class ReportFiles:
    """Where a report lies, and what it says."""

    report: Report
    page: Path
    picture: Path


def write_report(run: RunFolder, *, folder: Path | None = None) -> ReportFiles:
    """Write a run's page and picture, by default into the run folder; an earlier report is replaced.

    Guarantee: post-processing of the run folder. Values marked private appear in neither file.

    Args:
        run: the run.
        folder: where to write instead.
    """
    report = build_report(run)
    folder = folder or run.path
    folder.mkdir(parents=True, exist_ok=True)
    page, picture = folder / "report.html", folder / "report.png"
    page.write_text(render_html(report), encoding="utf-8")
    plot_report(report, picture)
    run.vouch(page, picture)
    return ReportFiles(report=report, page=page, picture=picture)


def render_html(report: Report) -> str:
    """The page, whole: style, script and charts are inside it, and its policy lets it load and run nothing else."""
    utility, epsilon, delta = report.utility, report.guarantee.epsilon, report.guarantee.delta
    return _render(
        "page.html.jinja",
        **_words(report),
        guarantee=report.guarantee,
        delta=scientific(delta),
        fewest=figures.FEWEST_IN_BIN,
        factor=format_upper_bound(math.exp(epsilon)) if epsilon < 20 else "very large",
        gaussian=_gaussian(report),
        spent_chart=figures.spent_chart(report.curves.spent, target=report.target_epsilon),
        profile_chart=figures.profile_chart(report.curves, epsilon=epsilon, delta=delta),
        attack_charts=figures.attack_charts(report.curves),
        accuracy_chart=figures.accuracy_chart(utility.accuracy),
        reliability_chart=figures.reliability_chart(utility.calibration) if utility.calibration else "",
        subgroup_charts=_subgroup_charts(report),
        loss_chart=figures.loss_chart(report.losses) if report.losses else "",
        evaluation_charts=_evaluation_charts(report),
        laboratory=_laboratory_start(report),
    )


def _words(report: Report) -> dict[str, object]:
    """What page and Markdown say in words and tables."""
    return {
        "report": report,
        "epsilon": format_epsilon(report.headline_epsilon),
        "scope": formatting.headline_scope(report),
        "sentences": formatting.epsilon_sentences(report),
        "summary_rows": formatting.summary_rows(report),
        "formal": formatting.formal_statement(report),
        "attack_rows": formatting.attack_rows(report),
        "hazards_line": formatting.hazards_line(report),
        "severities": formatting.SEVERITY_WORDS,
        "accounting_rows": formatting.accounting_rows(report),
        "user_rows": formatting.user_rows(report),
        "mechanism_rows": formatting.mechanism_rows(report),
        "process_rows": formatting.process_rows(report),
        "composition_rows": formatting.composition_rows(report),
        "evaluation_rows": formatting.evaluation_rows(report),
    }


def render_comparison_html(reports: Sequence[Report]) -> str:
    """Several runs side by side on one page."""
    alike = (
        len({(one.guarantee.privacy_unit, one.guarantee.neighboring_relation, one.guarantee.delta) for one in reports})
        == 1
    )
    measured = [
        (report.name, report.guarantee.epsilon, item.value)
        for report in reports
        for item in report.utility.accuracy
        if item.is_private_model
    ]
    return _render(
        "compare.html.jinja",
        reports=reports,
        alike=alike,
        rows=formatting.comparison_rows(list(reports)),
        cost_chart=figures.cost_chart(measured) if alike else "",
    )


def _gaussian(report: Report) -> str:
    """μ, and a word of warning where it overstates an attack by more than a percentage point."""
    mu, regret = report.curves.gaussian_mu, report.curves.gaussian_regret
    if mu is None or math.isinf(mu):
        return ""
    return f"μ = {format_upper_bound(mu)}" + (", loose" if regret is not None and regret > 0.01 else "")


def _subgroup_charts(report: Report) -> list[tuple[str, str]]:
    charts = [
        (column, figures.subgroup_chart(column, list(groups)))
        for column, groups in groupby(report.utility.subgroups, key=lambda group: group.column)
    ]
    return charts[:_MOST_GROUP_CHARTS]


def _laboratory_start(report: Report) -> dict[str, float]:
    """Where the laboratory's sliders begin: the run's settings, as far as they are numbers; nothing for no steps."""
    mechanism = report.mechanism
    if mechanism.noise_multiplier in (None, "not applicable"):
        return {}
    settings = {
        "rate": mechanism.sample_rate,
        "noise": mechanism.noise_multiplier,
        "steps": mechanism.steps_charged,
        "delta": report.guarantee.delta,
    }
    return {name: float(value) for name, value in settings.items() if isinstance(value, float | int) and value > 0}


def _evaluation_charts(report: Report) -> list[tuple[str, str, PrivateEvaluation]]:
    """(title, drawing, evaluation) for the last evaluation that gave an answer: reliability first, then shares."""
    answered = [one for one in report.evaluations if one.shares]
    if not answered:
        return []
    last = answered[-1]
    return [(column, drawing, last) for column, drawing in figures.paid_charts(last)][: _MOST_GROUP_CHARTS + 1]


def _render(name: str, **values: object) -> str:
    style, script = _source("page.css"), _source("page.js")
    if values.get("laboratory"):
        script += laboratory_script()
    template = _environment().get_template(name)
    return template.render(style=style, script=script, style_hash=_hash(style), script_hash=_hash(script), **values)


def laboratory_script() -> str:
    """The script that draws the laboratory into elements with `data-laboratory`, its table inside it."""
    return _source("laboratory.js").replace("LABORATORY_TABLE", _source("laboratory.json").strip())


def _hash(text: str) -> str:
    """How a content security policy names a style or a script: nothing else may run on the page."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@cache
def _source(name: str) -> str:
    return resources.files("sordino.report").joinpath("templates", name).read_text(encoding="utf-8")


@cache
def _environment(finalize: Callable[[object], Markup] | None = None) -> Environment:
    environment = Environment(
        loader=PackageLoader("sordino.report"),
        autoescape=True,
        finalize=finalize,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["percent_up"] = percent_up
    return environment


# ----------------------------------------------------------------------------------------------------------------------
# The report as Markdown: the same contents as the page, without the drawings.
# ----------------------------------------------------------------------------------------------------------------------


_MOST_LOSSES = 12
_SPECIAL = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", **{mark: f"\\{mark}" for mark in "\\`*_[]{}#|~!"}})


def render_markdown(report: Report) -> str:
    """The report as one Markdown document."""
    points = () if report.losses is None else report.losses.points
    losses = [ReleasedLoss(step=point.steps, loss=point.loss, stddev=point.noise) for point in points]
    return _markdown(
        "report.md.jinja",
        **_words(report),
        delta_text=formatting.delta_text(report),
        losses=average_adjacent(losses, _MOST_LOSSES),
    )


def render_comparison_markdown(reports: Sequence[Report]) -> str:
    """Several runs in one table."""
    return _markdown("compare.md.jinja", reports=reports, rows=formatting.comparison_rows(list(reports)))


def render_worksheet(report: Report) -> str:
    """Questions that no ε answers, as Markdown: what the run states is filled in, the rest stands as a question.

    Whose records they are, whom the model costs accuracy (by subgroup, with 95 % intervals), what an attacker may still
    find, what is not protected, and who decides.

    Guarantee: post-processing of what the report shows.
    """
    private = [share for one in report.evaluations for share in one.shares if share.column != "all"]
    return _markdown(
        "worksheet.md.jinja",
        report=report,
        data=dict(report.data),
        unit=report.guarantee.privacy_unit.value,
        epsilon=format_epsilon(report.headline_epsilon),
        delta_text=formatting.delta_text(report),
        groups=sorted([*report.utility.subgroups, *private], key=lambda group: group.accuracy),
    )


def _markdown(name: str, **values: object) -> str:
    """A Markdown template, in which no character of a value means anything to Markdown or HTML."""
    return _environment(_escaped).get_template(name).render(**values).rstrip("\n") + "\n"


def _escaped(value: object) -> Markup:
    """Text from a run folder on one line, in which no character means anything to Markdown or HTML."""
    return value if isinstance(value, Markup) else Markup(" ".join(str(value).split()).translate(_SPECIAL))  # noqa: S704
