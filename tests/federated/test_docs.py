"""The page on federated learning is true: what it shows runs."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def test_the_blocks_of_the_page_run_one_after_the_other(capsys):
    text = (DOCS / "federated.md").read_text(encoding="utf-8")
    names = {}
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 4
    for block in blocks:
        exec(compile(block, "federated.md", "exec"), names)
    told = capsys.readouterr().out
    assert "unit one client" in told
    assert "at least 40 clients" in told
    assert "local: holds against the server too" in told


@pytest.mark.parametrize("page", ["federated.md", "proofs/distributed-gaussian.md"])
def test_links_lead_somewhere_and_pages_are_in_the_site(page):
    file = DOCS / page
    for target in re.findall(r"\]\(([^)#:]+)", file.read_text(encoding="utf-8")):
        assert (file.parent / target).is_file()
    assert page in (DOCS.parent / "mkdocs.yml").read_text(encoding="utf-8")
