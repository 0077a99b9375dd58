"""The pages on policies are true: their code runs, their links lead somewhere, and the site has them."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ["training-options.md", "proofs/adaptive-clipping.md", "proofs/adaptive-budgets.md", "proofs/privacy-units.md"]


def test_the_page_runs_from_top_to_bottom(capsys):
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / "training-options.md").read_text(), re.MULTILINE | re.DOTALL)
    exec(compile("\n".join(blocks), "training-options.md", "exec"), {})
    assert len(blocks) == 11
    assert "cyclic Poisson sampling" in capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere_and_pages_are_in_the_site(page):
    file = DOCS / page
    text = file.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)", text):
        assert (file.parent / target).is_file()
    assert page in (DOCS.parent / "mkdocs.yml").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES[1:])
def test_every_file_that_a_proof_names_is_there(page):
    root = DOCS.parent
    for name in re.findall(r"`((?:tests|training|clipping)/[\w/]+\.py)`", (DOCS / page).read_text(encoding="utf-8")):
        assert (root / name).is_file() or (root / "src" / "sordino" / name).is_file()
