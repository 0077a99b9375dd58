"""`sordino report`: formats, places, comparison, exit codes."""

import json

import pytest
import yaml
from typer.testing import CliRunner

from reported_runs import EVERYTHING, make
from sordino.cli import app
from sordino.report import Report, build_report, render_comparison_markdown, render_html, render_markdown

WIDE = {"COLUMNS": "300", "NO_COLOR": "1"}


def ask(*arguments):
    return CliRunner().invoke(app, ["report", *map(str, arguments)], env=WIDE)


@pytest.mark.parametrize(
    ("form", "name"),
    [("html", "report.html"), ("md", "report.md"), ("json", "report.json"), ("registry", "registry.yaml")],
)
def test_each_format_lands_in_the_run_folder(form, name, tmp_path):
    run = make(tmp_path / "run", meta=EVERYTHING)
    result = ask(run.path, "--format", form)
    assert result.exit_code == 0, result.stderr
    assert name in result.stdout
    text = (run.path / name).read_text(encoding="utf-8")
    report = build_report(run)
    if form == "registry":
        assert yaml.safe_load(text)["deployment"]["administrative"]["status"] == "Draft"
    else:
        wanted = {"html": render_html, "md": render_markdown, "json": lambda one: one.to_json() + "\n"}[form]
        assert text == wanted(report)
    if form == "json":
        assert Report.from_json(text) == report
    assert (run.path / "report.png").exists() == (form == "html")


def test_a_report_goes_where_it_is_sent(tmp_path):
    run = make(tmp_path / "run")
    assert ask(run.path, "--format", "md", "--out", tmp_path / "deep" / "here.md").exit_code == 0
    assert (tmp_path / "deep" / "here.md").read_text(encoding="utf-8") == render_markdown(build_report(run))
    assert ask(run.path, "--out", tmp_path / "folder").exit_code == 0
    assert (tmp_path / "folder" / "report.html").is_file()
    assert (tmp_path / "folder" / "report.png").is_file()
    assert not (run.path / "report.html").exists()


@pytest.mark.parametrize("form", ["html", "md", "json"])
def test_several_runs_are_put_side_by_side(form, tmp_path):
    target = f"comparison.{form}"
    runs = [make(tmp_path / name) for name in ("one", "two", "three")]
    result = ask(runs[0].path, "--format", form, "--compare", runs[1].path, runs[2].path)
    assert result.exit_code == 0, result.stderr
    text = (runs[0].path / target).read_text(encoding="utf-8")
    assert all(word in text for word in ("one", "two", "three"))
    if form == "md":
        assert text == render_comparison_markdown([build_report(run) for run in runs])
    if form == "json":
        assert [body["name"] for body in json.loads(text)] == ["one", "two", "three"]
    assert "<svg" in text or form != "html"


def test_runs_that_differ_in_unit_are_not_drawn_on_one_axis(tmp_path):
    one, two = make(tmp_path / "one"), make(tmp_path / "two", epsilon=None, plan={"privacy_unit": "user"})
    assert ask(one.path, "--compare", two.path).exit_code == 0
    text = (one.path / "comparison.html").read_text(encoding="utf-8")
    assert "cannot be compared" in text
    assert "<svg" not in text


def test_strict_fails_with_the_names_of_what_is_missing_and_still_writes(tmp_path):
    poor, whole = make(tmp_path / "poor"), make(tmp_path / "whole", meta=EVERYTHING)
    result = ask(poor.path, "--strict")
    assert result.exit_code == 1
    assert "tuning and choice of settings" in result.stderr
    assert (poor.path / "report.html").is_file()
    assert ask(whole.path, "--strict").exit_code == 0
    assert ask(poor.path).exit_code == 0


@pytest.mark.parametrize("arguments", [[], ["--strict"]])
def test_json_is_one_document_whatever_the_exit_code(arguments, tmp_path):
    run = make(tmp_path / "run")
    result = ask(run.path, "--json", *arguments)
    body = json.loads(result.stdout)
    assert body["page"] == str(run.path / "report.html")
    assert "tuning and choice of settings" in body["missing"]
    assert result.exit_code == bool(arguments)


@pytest.mark.parametrize("extra", [["{other}"], ["--format", "registry", "--compare", "{other}"], ["--format", "pdf"]])
def test_what_makes_no_sense_is_a_usage_error(extra, tmp_path):
    run, other = make(tmp_path / "run"), make(tmp_path / "other")
    assert ask(run.path, *(part.format(other=other.path) for part in extra)).exit_code == 2
    assert not (run.path / "report.html").exists()
