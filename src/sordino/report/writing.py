"""The files of a report: `report.html`, which needs no other file and no network, and `report.png`."""

import math
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path

from jinja2 import Environment, StrictUndefined, Template

from sordino.definitions import round_up
from sordino.report.charts import accuracy_chart, attack_chart, epsilon_chart
from sordino.report.limits import question
from sordino.report.numerals import percent_up, scientific
from sordino.report.picture import draw
from sordino.report.reading import read
from sordino.report.schema import Report
from sordino.runs import RunFolder

__all__ = ["Written", "html", "write"]


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
    return Written(report=report, page=page, picture=picture)


def html(report: Report) -> str:
    """The page, whole: style and charts are inside it."""
    guarantee = report.guarantee
    return _template().render(
        report=report,
        guarantee=guarantee,
        epsilon=round_up(guarantee.epsilon),
        delta=scientific(guarantee.delta),
        factor=round_up(math.exp(min(guarantee.epsilon, 700.0))) if guarantee.epsilon < 20 else "very large",
        question=question(guarantee),
        epsilon_chart=epsilon_chart(report.curve, target=report.target_epsilon),
        accuracy_chart=accuracy_chart(report.accuracy),
        attack_chart=attack_chart(epsilon=guarantee.epsilon, delta=guarantee.delta) if report.attack else "",
    )


@cache
def _template() -> Template:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["percent_up"] = percent_up
    source = resources.files("sordino.report").joinpath("page.html.jinja").read_text(encoding="utf-8")
    return environment.from_string(source)
