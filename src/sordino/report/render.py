"""The files of a report: `report.html`, which needs no other file and no network, and `report.png`."""

import base64
import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import groupby
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING

from jinja2 import Environment, PackageLoader, StrictUndefined

from sordino.definitions import format_upper_bound
from sordino.installation import require
from sordino.plot_style import COLORS, SERIF, STYLE
from sordino.report import charts as figures
from sordino.report import formatting
from sordino.report.build import build_report
from sordino.report.formatting import format_epsilon, percent_up, power_of_ten, scientific
from sordino.report.schema import PrivateEvaluation, Report
from sordino.runs import ReleasedLoss, RunFolder, average_adjacent

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "ReportFiles",
    "plot_report",
    "render_comparison_html",
    "render_comparison_markdown",
    "render_html",
    "render_markdown",
    "render_worksheet",
    "write_report",
]


# ----------------------------------------------------------------------------------------------------------------------
# The picture: the guarantee, ε over steps, and accuracy or the attacker's limit, on one sheet.
# ----------------------------------------------------------------------------------------------------------------------


_EDGE = 0.075
_STYLE = STYLE | {"axes.spines.left": False}


def plot_report(report: Report, path: Path) -> None:
    """Draw the report's picture to a PNG of 1600 × 900 pixels."""
    require("report", "matplotlib", user="a picture")
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):  # pyright: ignore[reportArgumentType]
        figure = Figure(figsize=(16, 9), dpi=100)
        canvas = FigureCanvasAgg(figure)
        guarantee = report.guarantee
        head = figure.text(
            _EDGE, 0.8, f"ε = {format_epsilon(report.headline_epsilon)}", fontsize=46, color=COLORS["ink"], family=SERIF
        )
        width = head.get_window_extent(canvas.get_renderer()).width / (100 * 16)
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
        figure.savefig(path, metadata={"Software": "sordino"})


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
    for place, item in enumerate(rows):
        axes.barh(place, 1.0, height=0.3, color=COLORS["hair"])
        axes.barh(place, item.value, height=0.3, color=COLORS["accent"] if item.is_private_model else COLORS["mute"])
        axes.text(0, place + 0.24, item.name, color=COLORS["ink"], fontsize=13)
        weight = "bold" if item.is_private_model else "normal"
        axes.text(
            1.0, place + 0.24, f"{100 * item.value:.1f} %", color=COLORS["ink"], fontsize=13, ha="right", weight=weight
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
    guarantee, utility = report.guarantee, report.utility
    epsilon = guarantee.epsilon
    return _render(
        "page.html.jinja",
        report=report,
        guarantee=guarantee,
        epsilon=format_epsilon(report.headline_epsilon),
        delta=scientific(guarantee.delta),
        scope=formatting.headline_scope(report),
        sentences=formatting.epsilon_sentences(report),
        summary_rows=formatting.summary_rows(report),
        formal=formatting.formal_statement(report),
        attack_rows=formatting.attack_rows(report),
        fewest=figures.FEWEST_IN_BIN,
        factor=format_upper_bound(math.exp(epsilon)) if epsilon < 20 else "very large",
        gaussian=_gaussian(report),
        hazards_line=formatting.hazards_line(report),
        severities=formatting.SEVERITY_WORDS,
        accounting_rows=formatting.accounting_rows(report),
        user_rows=formatting.user_rows(report),
        mechanism_rows=formatting.mechanism_rows(report),
        process_rows=formatting.process_rows(report),
        composition_rows=formatting.composition_rows(report),
        spent_chart=figures.spent_chart(report.curves.spent, target=report.target_epsilon),
        profile_chart=figures.profile_chart(report.curves, epsilon=epsilon, delta=guarantee.delta),
        attack_charts=figures.attack_charts(report.curves),
        accuracy_chart=figures.accuracy_chart(utility.accuracy),
        reliability_chart=figures.reliability_chart(utility.calibration) if utility.calibration else "",
        subgroup_charts=_subgroup_charts(report),
        loss_chart=figures.loss_chart(report.losses) if report.losses else "",
        evaluation_rows=formatting.evaluation_rows(report),
        evaluation_charts=_evaluation_charts(report),
        laboratory=_laboratory_start(report),
    )


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
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("sordino.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["percent_up"] = percent_up
    return environment


# ----------------------------------------------------------------------------------------------------------------------
# The report as Markdown: the same contents as the page, without the drawings.
# ----------------------------------------------------------------------------------------------------------------------


_NOT_STATED = "*not stated*"
_SEVERITIES = (
    "Limitations: " + "; ".join(f"*{name}*: {words}" for name, words in formatting.SEVERITY_WORDS.items()) + "."
)
_MOST_LOSSES = 12
_SPECIAL = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", **{mark: f"\\{mark}" for mark in "\\`*_[]{}#|~!"}})


def render_markdown(report: Report) -> str:
    """The report as one Markdown document."""
    return "\n".join(_sections(report)).rstrip("\n") + "\n"


def render_comparison_markdown(reports: Sequence[Report]) -> str:
    """Several runs in one table."""
    names = [_safe(report.name) for report in reports]
    head = ["# Runs, side by side", "", f"| | {' | '.join(names)} |", f"|---{'|---' * len(names)}|"]
    rows = formatting.comparison_rows(list(reports))
    body = [f"| {_safe(name)} | {' | '.join(_stated(value) for value in values)} |" for name, values in rows]
    return "\n".join([*head, *body]) + "\n"


def render_worksheet(report: Report) -> str:
    """Questions that no ε answers, as Markdown: what the run states is filled in, the rest stands as a question.

    Whose records they are, whom the model costs accuracy (by subgroup, with 95 % intervals), what an attacker may still
    find, what is not protected, and who decides.

    Guarantee: post-processing of what the report shows.
    """
    return "\n".join(_worksheet(report)).rstrip("\n") + "\n"


_OPEN = "\\_\\_\\_\\_\\_\\_\\_\\_"


def _worksheet(report: Report) -> Iterator[str]:
    def asked(question: str, answer: str | None) -> str:
        return f"- {question} {f'**{_safe(answer)}**' if answer else _OPEN}"

    guarantee, declared, data = report.guarantee, report.declarations, dict(report.data)
    yield f"# Worksheet: {_safe(report.name)}\n"
    yield f"{_OPEN} marks what the run does not state. A person has to answer it before the results are released.\n"
    yield "## Whose records are they?\n"
    yield asked("Which records?", data.get("name"))
    yield asked("Who is responsible for them?", declared.owner)
    yield asked("Why may they be used?", declared.legal_basis)
    yield asked("What is the model for?", declared.purpose)
    yield asked("Were the people asked, and can they still say no?", None)
    yield asked("Who gains from the model, and are they the same people?", None)
    unit = guarantee.privacy_unit.value
    epsilon = f"ε = {format_epsilon(report.headline_epsilon)} at δ = {power_of_ten(guarantee.delta)}"
    yield asked("What is protected as a whole?", f"one {unit}, {epsilon}")
    if unit == "record":
        yield asked("How many records can one person have? Each of them costs ε again.", None)
    yield from _worksheet_groups(report)
    yield "\n## What may an attacker still find?\n"
    bounds = report.attack_bounds
    if bounds is None:
        yield asked("How often may the best guess about one person be right?", None)
    else:
        share = percent_up(bounds.right_guesses)
        yield f"- Guesses {_safe(bounds.question)}: right in **at most {share}** of cases; by chance 50 %"
        for blind, found in bounds.reconstruction:
            yield f"- A record that is guessed blindly with chance {percent_up(blind)}: at most {percent_up(found)}"
    yield asked("What would be the worst consequence for one person, at these odds?", None)
    yield "\n## What is not protected?\n"
    yield from (f"- **{_safe(item.title)}** {_safe(item.text)}" for item in report.not_covered)
    yield asked("Which facts about a whole group could the model teach, and who could use them against it?", None)
    yield "\n## Who decides?\n"
    yield asked("Who approved this ε, and why this one?", declared.approved_by)
    yield asked("Where do questions and complaints go?", declared.contact)
    yield asked("When is the model withdrawn or trained again? That is charged too.", None)
    yield f"- May it be released, as far as the run shows? **{_safe(report.release.text)}**"


def _worksheet_groups(report: Report) -> Iterator[str]:
    yield "\n## Who loses accuracy?\n"
    public = [(g.column, g.value, f"{g.records:,}", g.accuracy, g.lower, g.upper) for g in report.utility.subgroups]
    private = [
        (share.column, share.value, f"about {share.records:,}", share.accuracy, share.lower, share.upper)
        for evaluation in report.evaluations
        for share in evaluation.shares
        if share.column != "all"
    ]
    found = sorted([*public, *private], key=lambda row: row[3])
    if not found:
        yield f"- Accuracy by subgroup was not measured. Which groups could lose? {_OPEN}"
        yield "- Measure it on public records (`compute_utility(…, groups=…)`), or by a private evaluation."
        return
    yield "| subgroup | records | accuracy | 95 % interval |\n|---|---|---|---|"
    for column, value, records, accuracy, lower, upper in found:
        interval = f"{100 * lower:.1f} to {100 * upper:.1f} %"
        yield f"| {_safe(column)}: {_safe(value)} | {records} | {100 * accuracy:.1f} % | {interval} |"
    column, value, _, worst, lower, upper = found[0]
    yield ""
    yield (
        f"- The lowest is {_safe(column)}: {_safe(value)} with {100 * worst:.1f} %. Of {len(found)} groups one is the "
        f"lowest by chance alone: its interval is {100 * lower:.1f} to {100 * upper:.1f} %."
    )
    yield (
        "- How much of it is privacy's, and how much the data's? `sordino diagnose RUN` trains the same model without "
        f"privacy and compares both group by group. {_OPEN}"
    )
    yield f"- Which groups have too few records to be measured? {_OPEN}"


def _sections(report: Report) -> Iterator[str]:
    guarantee = report.guarantee
    yield f"# Privacy report: {_safe(report.name)}\n"
    if report.not_for_release:
        yield f"> **NOT FOR RELEASE.** {_safe(report.not_for_release)}\n"
    yield f"**ε = {format_epsilon(report.headline_epsilon)}, δ = {power_of_ten(guarantee.delta)}**\n"
    if scope := formatting.headline_scope(report):
        yield f"{_safe(scope)}\n"
    yield f"{_safe(' '.join(formatting.epsilon_sentences(report)))}\n"
    yield f"**{formatting.hazards_line(report)}**\n"
    yield f"## May it be released?\n\n{_safe(report.release.text)}\n"
    yield from (f"{number}. {_safe(text)}" for number, text in enumerate(report.release.conditions, 1))
    if report.release.conditions:
        yield ""
    yield from _table("The run", _summary(report))
    yield from _remarks("What is not covered", ((item.title, item.text) for item in report.not_covered))
    yield from _remarks("What is covered", ((item.title, item.text) for item in report.covered))
    yield from _table("Other access to the records", [(access.title, access.text) for access in report.data_accesses])
    yield f"## Who is trusted\n\n{_safe(report.trust)}\n"
    yield from _table("Other uses of the same records", formatting.composition_rows(report))
    yield from _utility(report)
    yield from _evaluations(report)
    yield "## Checks\n"
    yield f"{formatting.hazards_line(report)} {_SEVERITIES}\n"
    for item in report.privacy_hazards:
        word = f"{item.status}, {item.severity}" if item.status == "limitation" else item.status
        yield f"- **{word}**: {_safe(item.title)}. {_safe(item.text)}"
    yield ""
    yield from _attack(report)
    yield from _audits(report)
    yield f"## Details for specialists\n\n{_safe(formatting.formal_statement(report))}.\n"
    yield from _losses(report)
    yield from _table("How ε was computed", formatting.accounting_rows(report))
    if report.user_level:
        yield from _table("One person with several records", formatting.user_rows(report))
    yield from _table("The mechanism", formatting.mechanism_rows(report))
    yield from _table("Randomness and processes", formatting.process_rows(report))
    yield from _table("Training", report.training)
    yield from _table("Data", report.data)
    yield from _table("Software", report.environment)
    if report.missing:
        yield f"Not stated by the run: {_safe('; '.join(report.missing))}.\n"


def _summary(report: Report) -> Iterator[tuple[str, str | None]]:
    for name, value, option in formatting.summary_rows(report):
        yield name, value or (f"not stated (write it with {option})" if option else None)


def _attack(report: Report) -> Iterator[str]:
    bounds = report.attack_bounds
    if bounds is None:
        return
    yield "## Limits on every attack\n"
    yield (
        "The attacker knows every other record, the code and the settings, has unlimited computing power, and wants "
        f"to know {bounds.question}. Membership guesses are correct in at most {percent_up(bounds.right_guesses)} of "
        "cases (50 % is chance). The attacker's advantage, true minus false positive rate, is at most "
        f"{percent_up(bounds.advantage)}.\n"
    )
    yield "| wrongly identified, of those not in the data | correctly identified, at most |\n|---|---|"
    for rate, found in bounds.found:
        yield f"| {100 * rate:g} % | {percent_up(found)} |"
    yield "\n| a record is guessed without the model | reconstructed with it, at most |\n|---|---|"
    for prior, chance in bounds.reconstruction:
        yield f"| in 1 of {1 / prior:,.0f} cases | in {percent_up(chance)} of cases |"
    yield ""


def _audits(report: Report) -> Iterator[str]:
    yield "## Audits and attacks\n"
    for audit in report.audits:
        right = "" if audit.correct is None else f", {audit.correct:,} right"
        yield (
            f"- {_safe(audit.method)}: ε ≥ {audit.epsilon_lower:.2f} with {100 * (1 - audit.alpha):g} % confidence; "
            f"{audit.canaries:,} canaries, {audit.guesses:,} guesses{right}. Attacker: {_safe(audit.attacker)}."
        )
    if report.audits:
        yield ""
    rows = formatting.attack_rows(report)
    if rows:
        yield from _rows(rows)
    if not report.audits and not rows:
        yield "The run folder holds none.\n"


def _utility(report: Report) -> Iterator[str]:
    utility = report.utility
    yield "## How well it predicts\n"
    if not utility.accuracy and not utility.figures:
        yield (
            "Not measured on public records. Accuracy on private records is a separate release that ε does not cover.\n"
        )
    else:
        yield from _rows([*((item.name, f"{100 * item.value:.1f} %") for item in utility.accuracy), *utility.figures])
    if utility.calibration:
        found = utility.calibration
        yield (
            f"Calibration: mean gap (ECE) {100 * found.expected_error:.1f} %, largest gap (MCE) "
            f"{100 * found.maximum_error:.1f} %.\n"
        )
    if utility.subgroups:
        yield "| subgroup | records | accuracy | 95 % interval |\n|---|---|---|---|"
        for group in utility.subgroups:
            yield (
                f"| {_safe(group.column)}: {_safe(group.value)} | {group.records:,} | {100 * group.accuracy:.1f} % | "
                f"{100 * group.lower:.1f} to {100 * group.upper:.1f} % |"
            )
        yield ""
    if utility.withheld:
        yield f"Measured values that are marked private and not shown: {utility.withheld}.\n"


def _evaluations(report: Report) -> Iterator[str]:
    if not report.evaluations:
        return
    yield from _table("Private evaluation", formatting.evaluation_rows(report))
    for one in report.evaluations:
        if not one.shares:
            yield f"The evaluation on {_safe(one.records)} was charged and gave no answer.\n"
            continue
        yield f"| {_safe(one.records)} | records, noisy | accuracy | 95 % interval, sampling and noise |"
        yield "|---|---|---|---|"
        for share in one.shares:
            name = _safe(share.value if share.column == "all" else f"{share.column}: {share.value}")
            yield (
                f"| {name} | {share.records:,} | {share.describe()} | {100 * share.lower:.1f} to "
                f"{100 * share.upper:.1f} % |"
            )
        yield ""
        if one.calibration and one.calibration_noise is not None:
            yield (
                f"Calibration: mean gap (ECE) {100 * one.calibration.expected_error:.1f} %, of which noise alone makes "
                f"about {100 * one.calibration_noise:.1f} %.\n"
            )


def _losses(report: Report) -> Iterator[str]:
    curve = report.losses
    if curve is None or not curve.points:
        return
    yield "## Released training loss\n"
    yield (
        f"{curve.released:,} noisy means of losses clipped to {curve.max_loss:g}; ε covers them. Each line is the "
        "mean since the line before.\n"
    )
    yield "| steps | loss | noise, 95 % |\n|---|---|---|"
    points = [ReleasedLoss(step=point.steps, loss=point.loss, stddev=point.noise) for point in curve.points]
    for point in average_adjacent(points, _MOST_LOSSES):
        yield f"| {point.step:,} | {point.loss:.3f} | ± {1.96 * point.stddev:.3f} |"
    yield ""


def _table(title: str, rows: Iterable[tuple[str, str | None]]) -> Iterator[str]:
    listed = list(rows)
    if listed:
        yield f"## {title}\n"
        yield from _rows(listed)


def _rows(rows: Iterable[tuple[str, str | None]]) -> Iterator[str]:
    yield "| | |\n|---|---|"
    for name, value in rows:
        yield f"| {_safe(name)} | {_stated(value)} |"
    yield ""


def _remarks(title: str, remarks: Iterable[tuple[str, str]]) -> Iterator[str]:
    listed = list(remarks)
    if listed:
        yield f"## {title}\n"
        yield from (f"- **{_safe(head)}.** {_safe(text)}" for head, text in listed)
        yield ""


def _stated(value: str | None) -> str:
    return _NOT_STATED if value is None or value == "" else _safe(value)


def _safe(text: str) -> str:
    """Text from a run folder on one line, in which no character means anything to Markdown or HTML."""
    return " ".join(text.split()).translate(_SPECIAL)
