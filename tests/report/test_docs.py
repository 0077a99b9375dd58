"""The page on reports is true: what it shows runs, and it names every option, format and fact."""

import json
import re
from pathlib import Path

from typer.testing import CliRunner

from reported_runs import make
from sordino.cli import app
from sordino.report import Audit, build_report
from sordino.report.build import DATA_ACCESSES, registry_texts
from sordino.report.registry import registry_yaml

PAGE = (Path(__file__).parents[2] / "docs" / "report.md").read_text(encoding="utf-8")


def test_the_blocks_of_the_page_run_one_after_the_other(capsys):
    names = {}
    for block in re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
        exec(compile(block, "report.md", "exec"), names)
    assert capsys.readouterr().out == "# Privacy report: run report.html\n"


def test_the_audit_that_is_shown_is_read(tmp_path):
    (shown,) = re.findall(r"^```json\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    run = make(tmp_path / "run")
    (run.path / "audit.json").write_text(shown)
    assert build_report(run).audits == (Audit.model_validate(json.loads(shown)),)


def test_every_option_of_the_command_is_on_the_page_and_the_reverse():
    synopsis = PAGE.split("```")[1]
    env = {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}
    offered = set(re.findall(r"(--[a-z][a-z-]+)", CliRunner().invoke(app, ["report", "--help"], env=env).stdout))
    assert set(re.findall(r"--[a-z-]+", synopsis)) == offered - {"--help", "--json"}


def test_every_fact_that_a_run_can_state_is_on_the_page(tmp_path):
    for name in DATA_ACCESSES:
        assert f"`{name}`" in PAGE
    (row,) = [line for line in PAGE.splitlines() if line.startswith("| `registry` | `name`")]
    names = re.findall(r"`(\w+)`", row)[1:]
    said = {name: "Finance" if name == "sector" else "Industry" for name in names}
    assert registry_texts({"registry": said | {"unknown": "x"}}) == said
    text = registry_yaml(build_report(make(tmp_path / "run", meta={"registry": said})))
    assert "not stated" not in text.split("implementation:")[0]
