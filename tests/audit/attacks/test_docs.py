"""The page on attacks is true: its blocks print what it shows, and it names every option and every attack."""

import re
import runpy
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sordino import data, research
from sordino.audit import attacks
from sordino.cli import app
from sordino.errors import DataUnavailable

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "attacks.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", PAGE, re.MULTILINE | re.DOTALL)


def test_the_blocks_of_the_page_print_what_it_shows(capsys):
    names = {}
    assert len(BLOCKS) == 4
    for block, shown in BLOCKS:
        exec(compile(block, "attacks.md", "exec"), names)
        assert capsys.readouterr().out == shown


def test_every_option_of_the_command_is_on_the_page_and_the_reverse():
    synopsis = PAGE.split("```sh\n")[1].split("```")[0]
    env = {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}
    offered = set(re.findall(r"(--[a-z][a-z-]+)", CliRunner().invoke(app, ["attack", "--help"], env=env).stdout))
    assert set(re.findall(r"--[a-z-]+", synopsis)) == offered - {"--help"}


def test_every_attack_of_the_table_exists():
    table = PAGE.split("| attack |")[1].split("\n\n")[0]
    named = re.findall(r"`(\w+)`", table)
    assert len(named) == 16
    assert set(named) <= {*attacks.__all__, *research.__all__}


def test_the_pictures_are_there_and_small():
    shown = re.findall(r"\]\((pictures/[^)]+)\)", PAGE)
    assert shown
    for name in shown:
        assert 5_000 < (ROOT / "docs" / name).stat().st_size < 150_000


def test_the_picture_of_the_leaking_gradient_can_be_drawn_again(tmp_path, capsys):
    try:
        data.load_dataset("mnist")
    except DataUnavailable:
        pytest.skip("mnist is not on this machine")
    found = runpy.run_path(str(ROOT / "examples" / "attack_pictures.py"))["main"](
        ["--out", str(tmp_path), "--digits", "1"]
    )
    assert found["open 0"] > 20
    assert max(found["matched 0"], found["turned 0"]) < 10
    assert (tmp_path / "gradient-leak.png").is_file()
    assert "13.8 % at most" in capsys.readouterr().out
