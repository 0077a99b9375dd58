"""The Markdown report, whole. After a wanted change, run this file with SORDINO_GOLDEN=1 and read what it wrote."""

import os
from dataclasses import replace
from pathlib import Path

from reported_runs import EVERYTHING, PUBLIC, make
from sordino.definitions import NeighboringRelation
from sordino.events import DiscreteLaplace, SelfComposed
from sordino.report import build_report, compute_utility, render_comparison_markdown, render_markdown
from sordino.runs import Evaluation, NoisyTable, ReleasedLoss, ReleasedLosses

LOSSES = ReleasedLosses(
    max_loss=2.0,
    budget_fraction=0.02,
    points=tuple(ReleasedLoss(step=step, loss=1.5 - 0.03 * step, stddev=0.02) for step in range(40)),
)
TABLES = (
    NoisyTable(name="all", values=("all",), right=(8400,), wrong=(1600,)),
    NoisyTable(name="confidence", values=("0.5 to 0.75", "0.75 to 1.0"), right=(2100, 6310), wrong=(1200, 395)),
    NoisyTable(name="class", values=("low", "high"), right=(7000, 1395), wrong=(500, 1104)),
    NoisyTable(name="sex", values=("a", "other"), right=(8390, 6), wrong=(1611, -9)),
)
EVALUATION = Evaluation(
    records="patients of 2024",
    event=SelfComposed(event=DiscreteLaplace(scale=8.0, sensitivity=1), count=4),
    epsilon=0.5,
    delta=0.0,
    neighboring_relation=NeighboringRelation.ADD_OR_REMOVE_ONE,
    stddev=11.3,
    disjoint=False,
    charge="1f",
    head="",
    tables=TABLES,
)
GOLDEN = Path(__file__).with_name("golden_report.md")


def fixed(report):
    """What differs from machine to machine and from day to day is set."""
    accounting = report.accounting.model_copy(update={"version": "1.2.3"})
    process = report.process.model_copy(update={"head": "0" * 64})
    environment = (("python", "3.11"), ("sordino", "1.2.3"))
    changes = {"accounting": accounting, "process": process, "environment": environment, "started": "2026-01-31"}
    return report.model_copy(update=changes)


def test_the_markdown_report_is_as_it_was_read(tmp_path):
    chances = [[0.9, 0.1], [0.8, 0.2], [0.3, 0.7], [0.44, 0.56]]
    metrics = PUBLIC | compute_utility(chances, [0, 0, 1, 0], public=True, groups={"sex": ["a", "a", "b", "b"]})
    run = make(tmp_path / "adult-2026-01-31-1", meta=EVERYTHING, metrics=metrics)
    run.write_loss_curve(LOSSES)
    run.write_evaluations([EVALUATION, replace(EVALUATION, tables=None, disjoint=True, charge=None)])
    text = render_markdown(fixed(build_report(run)))
    if os.environ.get("SORDINO_GOLDEN"):
        GOLDEN.write_text(text, encoding="utf-8")
    assert text == GOLDEN.read_text(encoding="utf-8")


def test_a_run_that_is_not_for_release_says_so_first(tmp_path):
    text = render_markdown(build_report(make(tmp_path / "run", meta={"reproducible": True})))
    assert text.splitlines()[2] == "> **NOT FOR RELEASE.** The noise came from a chosen seed."


def test_what_is_not_stated_is_said_to_be(tmp_path):
    text = render_markdown(build_report(make(tmp_path / "run")))
    assert "| Preprocessing | *not stated* |" in text


def test_runs_stand_side_by_side(tmp_path):
    reports = [build_report(make(tmp_path / name)) for name in ("one", "two")]
    text = render_comparison_markdown(reports)
    assert "| | one | two |" in text
    assert "| accuracy: this model, private | 83.6 % | 83.6 % |" in text
