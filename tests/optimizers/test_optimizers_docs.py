"""The page on optimizers is true: its code runs, its links lead somewhere, and the site has it."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = ["optimizers.md", "proofs/adaclip.md", "proofs/projected-norms.md"]


def test_the_page_runs_from_top_to_bottom(capsys):
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / "optimizers.md").read_text(), re.MULTILINE | re.DOTALL)
    exec(compile("\n".join(blocks), "optimizers.md", "exec"), {})
    assert "with 100 projections" in capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere_and_the_site_has_the_page(page):
    for target in re.findall(r"\]\(([^)#]+)\)", (DOCS / page).read_text()):
        assert ((DOCS / page).parent / target).exists()
    assert page in (ROOT / "mkdocs.yml").read_text()
