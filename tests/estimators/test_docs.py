"""Every Python block on the estimators page runs, every link leads somewhere, and all estimators are on it."""

import re
from pathlib import Path

import pytest

import sordino.estimators as room

PAGE = Path(__file__).parents[2] / "docs" / "estimators.md"
TEXT = PAGE.read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
LINKS = sorted(set(re.findall(r"\((proofs/[a-z-]+\.md)\)", TEXT)))


@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_of_the_page_runs(block):
    exec(compile(block, str(PAGE), "exec"), {})


@pytest.mark.parametrize("link", LINKS)
def test_a_linked_proof_says_what_is_assumed_and_what_is_not_covered(link):
    text = (PAGE.parent / link).read_text()
    for part in ("**Statement.**", "**Why", "| assumption | where |", "**What is not covered.**", "**References.**"):
        assert part in text


@pytest.mark.parametrize("name", room.__all__)
def test_every_estimator_is_on_the_page(name):
    assert f"`{name}`" in TEXT
