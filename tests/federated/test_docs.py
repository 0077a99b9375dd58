"""The page on federated learning is true: what it shows runs."""

import re
import runpy
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


def test_the_tables_are_those_of_the_kept_rows():
    bench = runpy.run_path(str(DOCS.parent / "benchmarks" / "federated.py"))
    rows = [row for row in bench["kept"]() if row["settings"] == vars(bench["SETTINGS"][row["model"]])]
    page = (DOCS / "federated.md").read_text(encoding="utf-8")
    assert bench["table_of"](rows) in page
    assert bench["dynamic_of"](rows) in page
    assert all(row["epsilon"] is None or 0 < row["epsilon"] - row["spent"] < 1e-3 for row in rows)


def test_a_row_is_run_once_for_its_settings():
    bench = runpy.run_path(str(DOCS.parent / "benchmarks" / "federated.py"))
    order = list(bench["order"]())
    assert len(set(order)) == len(order) == 3 * 4 * 4 + 5 * 3 + 2 * 3
    made = {**vars(order[0]), "settings": vars(bench["SETTINGS"][order[0].model])}
    assert bench["is_there"](order[0], [made])
    assert not bench["is_there"](order[1], [made])
    assert not bench["is_there"](order[0], [{**made, "settings": {**made["settings"], "rounds": 1}}])
