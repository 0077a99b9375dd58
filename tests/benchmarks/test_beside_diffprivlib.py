"""The section of the page is made from the rows that are kept, and holds what was asked for: 4 sets at 3 ε."""

import json
import runpy
from pathlib import Path

BENCH = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "beside_diffprivlib.py"))


def test_the_section_is_that_of_the_rows_and_the_page_has_it():
    rows = json.loads(BENCH["ROWS"].read_text())
    section = BENCH["section"](rows)
    assert section == BENCH["SECTION"].read_text()
    assert section.strip() in (Path(__file__).parents[2] / "docs" / "results.md").read_text()
    for library in ("sordino", "diffprivlib"):
        own = {(row["set"], row["epsilon"]) for row in rows if row["library"] == library}
        assert own == {(name, epsilon) for name in BENCH["SETS"] for epsilon in BENCH["EPSILONS"]}


def test_a_mean_far_below_the_mean_of_the_targets_is_not_spelled_out():
    assert BENCH["_cell"]([-1e9, -3.0], percent=False) == "all below −1"
    assert BENCH["_cell"]([0.5, 0.7], percent=False) == "0.60 ± 0.14"
    assert BENCH["_cell"]([0.5, 0.5], percent=True) == "50.0 ± 0.0"
