"""The page on the ledger is true: what it shows runs."""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sordino.cli import app
from sordino.ledger import Ledger

DOCS = Path(__file__).parents[2] / "docs"


def test_the_blocks_of_the_page_run_one_after_the_other(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (DOCS / "ledger.md").read_text(encoding="utf-8")
    names = {}
    for language, block in re.findall(r"^```(sh|python)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        if language == "python":
            exec(compile(block, "ledger.md", "exec"), names)
            continue
        for line in block.strip().splitlines():
            program, *arguments = shlex.split(line)
            assert program == "sordino"
            result = CliRunner().invoke(app, arguments)
            assert result.exit_code == 0, result.stderr
    assert Ledger("privacy.db").accounts() == ["adult", "census"]
    assert len(Ledger("privacy.db").account("adult").history()) == 7


@pytest.mark.parametrize("page", ["ledger.md", "proofs/ledger.md"])
def test_links_lead_somewhere_and_pages_are_in_the_site(page):
    file = DOCS / page
    for target in re.findall(r"\]\(([^)#:]+)", file.read_text(encoding="utf-8")):
        assert (file.parent / target).is_file()
    assert page in (DOCS.parent / "mkdocs.yml").read_text(encoding="utf-8")
