"""The page on recipes is true: what it shows runs, and it names every recipe of its room."""

import json
import re
import runpy
import shlex
from pathlib import Path

from typer.testing import CliRunner

from sordino.cli import app
from sordino.recipes import RECIPES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")


def test_the_blocks_of_the_page_run_one_after_the_other(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for language, block in re.findall(r"^```(sh|python)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
        if language == "python":
            exec(compile(block, "recipes.md", "exec"), names)
            continue
        for line in block.strip().splitlines():
            program, *arguments = shlex.split(line, comments=True)
            assert program == "sordino"
            result = CliRunner().invoke(app, arguments)
            assert result.exit_code == 0, result.stderr
    assert (tmp_path / "runs/adult/report.html").is_file()


def test_the_list_has_every_recipe():
    result = CliRunner().invoke(app, ["recipes", "--json"])
    listed = json.loads(result.stdout)["recipes"]
    assert [recipe["name"] for recipe in listed] == list(RECIPES)
    shown = CliRunner().invoke(app, ["train", "adult", "--recipe", "list", "--json"])
    assert json.loads(shown.stdout) == json.loads(result.stdout)


def test_every_recipe_is_on_the_page():
    assert {name for name in RECIPES if f"`{name}`" not in PAGE} == set()


def test_a_setting_beside_a_recipe_is_refused():
    result = CliRunner().invoke(app, ["train", "adult", "--recipe", "adult-mlp", "--epsilon", "1", "--steps", "3"])
    assert result.exit_code == 2
    assert "steps must be left out with --recipe adult-mlp" in result.stderr


def test_kept_results_are_on_the_page_and_have_the_fields_that_it_needs():
    bench = runpy.run_path(str(ROOT / "benchmarks" / "accuracy.py"))
    for name in RECIPES:
        for row in bench["kept"](name):
            assert row["recipe"] == name
            assert row["epsilon"] is None or row["epsilon_spent"] <= row["epsilon"]
            assert row["epsilon_spent"] <= row["epsilon_rdp"]
            assert 0 <= row["accuracy"] <= 1
    assert (ROOT / "docs" / "results.md").read_text(encoding="utf-8") == bench["page"]()
