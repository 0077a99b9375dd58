"""The page on diagnostics is true: its blocks print what it shows, and it names every option of the command."""

import re
from pathlib import Path

from typer.testing import CliRunner

from sordino.cli import app

PAGE = (Path(__file__).parents[2] / "docs" / "diagnostics.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", PAGE, re.MULTILINE | re.DOTALL)


def test_the_blocks_of_the_page_print_what_it_shows(capsys):
    names = {}
    assert len(BLOCKS) == 4
    for block, shown in BLOCKS:
        exec(compile(block, "diagnostics.md", "exec"), names)
        assert capsys.readouterr().out == shown


def test_every_option_of_the_command_is_on_the_page_and_the_reverse():
    synopsis = PAGE.split("```")[1]
    env = {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}
    offered = set(re.findall(r"(--[a-z][a-z-]+)", CliRunner().invoke(app, ["diagnose", "--help"], env=env).stdout))
    assert set(re.findall(r"--[a-z-]+", synopsis)) == offered - {"--help"}
