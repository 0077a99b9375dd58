"""The files of a report: `report.html`, which needs no other file and no network, and `report.png`."""

import base64
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import groupby
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from sordino.definitions import round_up
from sordino.report import figures, tables
from sordino.report.bought import PaidEvaluation
from sordino.report.numerals import epsilon_words, percent_up, scientific
from sordino.report.picture import draw
from sordino.report.reading import read
from sordino.report.schema import Report
from sordino.runs import RunFolder

__all__ = ["Written", "comparison_html", "html", "write"]

_MOST_GROUP_CHARTS = 5


@dataclass(frozen=True, kw_only=True)
class Written:
    """Where a report lies, and what it says."""

    report: Report
    page: Path
    picture: Path


def write(run: RunFolder, *, folder: Path | None = None) -> Written:
    """Write a run's page and picture, by default into the run folder; an earlier report is replaced.

    Guarantee: post-processing of the run folder. Values marked private appear in neither file.

    Args:
        run: the run.
        folder: where to write instead.
    """
    report = read(run)
    folder = folder or run.path
    folder.mkdir(parents=True, exist_ok=True)
    page, picture = folder / "report.html", folder / "report.png"
    page.write_text(html(report), encoding="utf-8")
    draw(report, picture)
    run.vouch(page, picture)
    return Written(report=report, page=page, picture=picture)


def html(report: Report) -> str:
    """The page, whole: style, script and charts are inside it, and its policy lets it load and run nothing else."""
    guarantee, utility = report.guarantee, report.utility
    epsilon = guarantee.epsilon
    return _render(
        "page.html.jinja",
        report=report,
        guarantee=guarantee,
        epsilon=epsilon_words(epsilon),
        delta=scientific(guarantee.delta),
        factor=round_up(math.exp(epsilon)) if epsilon < 20 else "very large",
        gaussian=_gaussian(report),
        accounting_rows=tables.accounting_rows(report),
        user_rows=tables.user_rows(report),
        mechanism_rows=tables.mechanism_rows(report),
        process_rows=tables.process_rows(report),
        composition_rows=tables.composition_rows(report),
        spent_chart=figures.spent_chart(report.curves.spent, target=report.target_epsilon),
        profile_chart=figures.profile_chart(report.curves, epsilon=epsilon, delta=guarantee.delta),
        attack_charts=figures.attack_charts(report.curves),
        accuracy_chart=figures.accuracy_chart(utility.accuracy),
        reliability_chart=figures.reliability_chart(utility.calibration) if utility.calibration else "",
        subgroup_charts=_subgroup_charts(report),
        loss_chart=figures.loss_chart(report.losses) if report.losses else "",
        evaluation_rows=tables.evaluation_rows(report),
        evaluation_charts=_evaluation_charts(report),
    )


def comparison_html(reports: Sequence[Report]) -> str:
    """Several runs side by side on one page."""
    alike = len({(one.guarantee.unit, one.guarantee.relation, one.guarantee.delta) for one in reports}) == 1
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
        rows=tables.comparison_rows(list(reports)),
        cost_chart=figures.cost_chart(measured) if alike else "",
    )


def _gaussian(report: Report) -> str:
    """μ, and a word of warning where it overstates an attack by more than a percentage point."""
    mu, regret = report.curves.gaussian_mu, report.curves.gaussian_regret
    if mu is None or math.isinf(mu):
        return ""
    return f"μ = {round_up(mu)}" + (", loose" if regret is not None and regret > 0.01 else "")


def _subgroup_charts(report: Report) -> list[tuple[str, str]]:
    charts = [
        (column, figures.subgroup_chart(column, list(groups)))
        for column, groups in groupby(report.utility.subgroups, key=lambda group: group.column)
    ]
    return charts[:_MOST_GROUP_CHARTS]


def _evaluation_charts(report: Report) -> list[tuple[str, str, PaidEvaluation]]:
    """(title, drawing, evaluation) for the last evaluation that gave an answer: reliability first, then shares."""
    answered = [one for one in report.evaluations if one.shares]
    if not answered:
        return []
    last = answered[-1]
    return [(column, drawing, last) for column, drawing in figures.paid_charts(last)][: _MOST_GROUP_CHARTS + 1]


def _render(name: str, **values: object) -> str:
    style, script = _source("page.css"), _source("page.js")
    template = _environment().get_template(name)
    return template.render(style=style, script=script, style_hash=_hash(style), script_hash=_hash(script), **values)


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
