"""The worksheet says what the run states, asks the rest, and shows no group without its interval."""

import re

import pytest
from typer.testing import CliRunner

from reported_runs import EVERYTHING, PUBLIC, make
from sordino.cli import app
from sordino.report import Declarations, build_report, compute_utility, render_worksheet, store_declarations

OPEN = r"\_\_\_\_\_\_\_\_"


@pytest.fixture
def run(tmp_path):
    return make(tmp_path / "run", meta=EVERYTHING)


def test_what_is_declared_is_filled_in_and_the_rest_is_asked(run):
    empty = render_worksheet(build_report(run))
    assert f"Who is responsible for them? {OPEN}" in empty
    assert f"Accuracy by subgroup was not measured. Which groups could lose? {OPEN}" in empty
    store_declarations(
        run, Declarations(owner="Example University", legal_basis="Consent | <b>", approved_by="The board", purpose="T")
    )
    told = render_worksheet(build_report(run))
    assert "Who is responsible for them? **Example University**" in told
    assert "Who approved this ε, and why this one? **The board**" in told
    assert "<b>" not in told
    # A declaration answers its own question only.
    assert empty.count(OPEN) - told.count(OPEN) == 4
    assert "Where do questions and complaints go? " + OPEN in told


def test_groups_stand_from_the_lowest_with_intervals(run):
    chances = [[0.9, 0.1]] * 60 + [[0.2, 0.8]] * 40
    labels = [0] * 45 + [1] * 15 + [1] * 40
    run.write_metrics(PUBLIC | compute_utility(chances, labels, public=True, groups={"sex": ["a"] * 60 + ["b"] * 40}))
    report = build_report(run)
    text = render_worksheet(report)
    rows = re.findall(r"^\| (sex: .) \| (\d+) \| ([\d.]+) % \| ([\d.]+) to ([\d.]+) % \|$", text, flags=re.MULTILINE)
    assert [row[:3] for row in rows] == [("sex: a", "60", "75.0"), ("sex: b", "40", "100.0")]
    for row, group in zip(rows, sorted(report.utility.subgroups, key=lambda one: one.accuracy), strict=True):
        assert (float(row[3]), float(row[4])) == (round(100 * group.lower, 1), round(100 * group.upper, 1))
    assert "The lowest is sex: a with 75.0 %" in text


def test_the_odds_of_an_attacker_are_those_of_the_report(run):
    report = build_report(run)
    text = render_worksheet(report)
    # 40 Gaussian steps with σ = 25 are one with μ = √40/25: Φ(μ/2) = 55.03 %, never rounded down.
    assert "right in **at most 55.1 %** of cases" in text
    assert all(item.title in text for item in report.not_covered)


def test_the_command_writes_it(run, tmp_path):
    result = CliRunner().invoke(
        app, ["report", str(run.path), "--format", "worksheet", "--out", str(tmp_path / "w.md")]
    )
    assert result.exit_code == 0
    assert (tmp_path / "w.md").read_text(encoding="utf-8").startswith("# Worksheet: ")
    two = CliRunner().invoke(app, ["report", str(run.path), "--compare", str(run.path), "--format", "worksheet"])
    assert two.exit_code == 2
