"""The page on auditing is true: what it shows runs, and its links lead somewhere."""

import re
import shlex
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from sordino.cli import app

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("auditing.md", "proofs/audit-one-run.md", "proofs/audit-replay.md")


def test_every_snippet_of_the_auditing_page_runs():
    torch.manual_seed(0)
    names: dict[str, object] = {}
    for snippet in re.findall(r"```python\n(.*?)```", (DOCS / "auditing.md").read_text(encoding="utf-8"), re.DOTALL):
        exec(compile(snippet, "auditing.md", "exec"), names)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere_and_the_page_is_in_the_table_of_contents(page):
    text = (DOCS / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)", text):
        assert (DOCS / page).parent.joinpath(target).exists(), target
    assert f": {page}\n" in (DOCS.parent / "mkdocs.yml").read_text(encoding="utf-8")


def test_every_shown_command_has_the_options_that_are_shown():
    text = (DOCS / "auditing.md").read_text(encoding="utf-8")
    env = {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}
    for line in "\n".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL)).splitlines():
        if not line.strip():
            continue
        program, command, *arguments = shlex.split(line)
        assert (program, command) == ("sordino", "audit")
        asked = arguments[0] if arguments[0] in ("conformance", "replay") else "training"
        shown = CliRunner().invoke(app, ["audit", asked, "--help"], env=env).stdout
        assert all(option in shown for option in arguments if option.startswith("--"))
