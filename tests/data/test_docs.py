"""The page on data is true: its Python blocks run and print what it says, its schemas are schemas."""

import re
from pathlib import Path

import pytest

from sordino.data import ArraySchema, Schema

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("block", blocks("python"))
def test_a_block_prints_what_the_page_says(block, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "docs/data.md", "exec"), {})
    assert capsys.readouterr().out.splitlines() == re.findall(r"^# (.*)$", block, flags=re.MULTILINE)


def test_the_schemas_of_the_page_are_schemas():
    table, array = blocks("json")
    assert Schema.from_json(table).width() == 3
    assert ArraySchema.from_json(array).high == 255
