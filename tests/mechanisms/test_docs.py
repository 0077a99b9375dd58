"""Every Python block on the mechanisms page runs, and every proof page it links exists."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "mechanisms.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
LINKS = sorted(set(re.findall(r"\((proofs/[a-z-]+\.md)\)", PAGE.read_text())))


@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_of_the_page_runs(block):
    exec(compile(block, str(PAGE), "exec"), {})


@pytest.mark.parametrize("link", LINKS)
def test_a_linked_proof_says_what_is_assumed_and_what_is_not_covered(link):
    text = (PAGE.parent / link).read_text()
    for part in ("**Statement.**", "**Why", "| assumption | where |", "**What is not covered.**", "**References.**"):
        assert part in text
    for name in re.findall(r"`(mechanisms/[a-z_]+\.py)`", text):
        assert (PAGE.parents[1] / "src" / "sordino" / name).is_file()


def test_every_linked_page_of_the_proofs_exists():
    for page in (PAGE.parent / "proofs").glob("*.md"):
        for target in re.findall(r"\]\(([a-z-]+\.md)\)", page.read_text()):
            assert (page.parent / target).is_file()
