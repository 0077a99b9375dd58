"""The page on transfer is true: its blocks run, and it names the recipes that there are."""

import re
from pathlib import Path

from sordino.recipes import RECIPES, get_recipe

PAGE = (Path(__file__).parents[2] / "docs" / "transfer.md").read_text(encoding="utf-8")


def test_the_blocks_of_the_page_run_one_after_the_other(capsys):
    names: dict[str, object] = {}
    for block in re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
        exec(compile(block, "transfer.md", "exec"), names)
    shown = capsys.readouterr().out
    assert "torch.Size([100, 32]) torch.float32" in shown
    assert "a network for clouds, weather service 2024 (SHA-256 " in shown
    assert "['7.weight', '7.bias', '8.weight', '8.bias']" in shown
    assert shown.count("differentially private: unit one record") == 2


def test_the_page_names_the_recipes_on_public_models():
    named = set(re.findall(r"^\| `([a-z-]+)` \|", PAGE, re.MULTILINE))
    assert named <= set(RECIPES)
    uses = {name for name in RECIPES if get_recipe(name).needs == "sordino[recipes]"}
    assert uses <= named
