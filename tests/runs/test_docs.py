"""The pages on runs are true: their code runs, and their links lead somewhere."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_on_runs_runs_from_top_to_bottom(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / "runs.md").read_text(), re.MULTILINE | re.DOTALL)
    exec(compile("\n".join(blocks), "runs.md", "exec"), {})
    assert re.fullmatch(r"[0-9a-f]{64}\n", capsys.readouterr().out)


@pytest.mark.parametrize("page", ["runs.md", "proofs/resume.md"])
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", (DOCS / page).read_text()):
        assert ((DOCS / page).parent / target).exists()
