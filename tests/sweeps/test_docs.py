"""The page on sweeps is true: its example runs, and every sweep of the repository has its picture on it."""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread
from typer.testing import CliRunner

from sordino import sweeps
from sordino.cli import app
from sordino.sweeps.config import ARMS, CLIPPINGS
from sordino.sweeps.sweep import COURSES, MEASURES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "sweeps.md").read_text(encoding="utf-8")
FILES = sorted((ROOT / "sweeps").glob("*.toml"))


def test_the_example_of_the_page_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {}
    for language, block in re.findall(r"^```(toml|sh|python)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
        if language == "toml":
            (tmp_path / "adult.toml").write_text(block)
        elif language == "python":
            exec(compile(block, "sweeps.md", "exec"), names)
        else:
            for line in block.strip().splitlines():
                program, *arguments = shlex.split(line, comments=True)
                assert program == "sordino"
                result = CliRunner().invoke(app, arguments)
                assert result.exit_code == 0, result.stderr
    assert (tmp_path / "sweep-adult/adult.png").is_file()
    (shown,) = re.findall(r"^```text\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert capsys.readouterr().out == shown


def test_every_option_of_the_command_is_on_the_page_and_the_reverse():
    env = {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}
    offered = set(re.findall(r"(--[a-z][a-z-]+)", CliRunner().invoke(app, ["sweep", "--help"], env=env).stdout))
    shown = set(re.findall(r"`(--[a-z-]+)", PAGE))
    assert shown == offered - {"--help"}


def test_every_word_of_a_file_is_on_the_page():
    from sordino.sweeps.config import _CHECKS

    for word in (*ARMS, *CLIPPINGS, *MEASURES, *COURSES, *_CHECKS):
        assert f"`{word}`" in PAGE or f'"{word}"' in PAGE, word


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_sweep_has_its_picture_on_the_page(path):
    assert f"sweeps/{path.name}" in PAGE
    assert f"](pictures/sweeps-{path.stem}.png)" in PAGE
    picture = imread(ROOT / "docs" / "pictures" / f"sweeps-{path.stem}.png")
    assert np.var(picture[..., :3]) > 0.003
    assert sweeps.read_sweep(path).title


def test_every_picture_of_a_sweep_comes_from_a_file():
    pictures = {path.stem for path in (ROOT / "docs" / "pictures").glob("sweeps-*.png")}
    assert pictures == {f"sweeps-{path.stem}" for path in FILES}
