"""The page on loss curves and the proofs of what is bought are true: code runs, links and files are there."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ["noisy-losses.md", "proofs/noisy-losses.md", "proofs/private-evaluation.md"]


def test_the_page_runs_from_top_to_bottom(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"^```python\n(.*?)^```", (DOCS / PAGES[0]).read_text(), re.MULTILINE | re.DOTALL)
    exec(compile(block, PAGES[0], "exec"), {})
    assert capsys.readouterr().out.startswith("step 0: ")


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere_and_pages_are_in_the_site(page):
    file = DOCS / page
    for target in re.findall(r"\]\(([^)#:]+)", file.read_text(encoding="utf-8")):
        assert (file.parent / target).is_file()
    assert page in (DOCS.parent / "mkdocs.yml").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES[1:])
def test_every_file_that_a_proof_names_is_there(page):
    names = re.findall(r"`((?:tests|training|report|verification|mechanisms)/[\w/]+\.py)`", (DOCS / page).read_text())
    assert names
    for name in names:
        assert (DOCS.parent / name).is_file() or (DOCS.parent / "src" / "sordino" / name).is_file()


def test_the_table_of_prices_is_right():
    from sordino.training import LossRelease

    rows = re.findall(r"^\| ([\d.]+)[^|]*\| \+ ([\d.]+) % \| ([\d.]+) · z", (DOCS / PAGES[0]).read_text(), re.MULTILINE)
    assert len(rows) == 4
    for share, growth, spread in (map(float, row) for row in rows):
        curve = LossRelease(max_loss=1.0, budget_fraction=share)
        assert 100 * (curve.noise_factor - 1) == pytest.approx(growth, rel=0.03)
        assert curve.stddev(noise_multiplier=1.0, expected_batch_size=1.0) == pytest.approx(spread, rel=0.03)
