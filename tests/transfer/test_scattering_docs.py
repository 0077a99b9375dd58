"""The page on scattering is true: its block runs, and its figures are means of rows of the benchmark."""

import json
import re
import statistics
from pathlib import Path

from sordino.recipes import get_recipe

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "scattering.md").read_text(encoding="utf-8")


def test_the_block_of_the_page_runs(capsys):
    for block in re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
        exec(compile(block, "scattering.md", "exec"), {})
    shown = capsys.readouterr().out
    assert "torch.Size([5, 81, 7, 7])" in shown
    assert "torch.Size([5, 3969])" in shown


def test_the_page_names_both_recipes_and_what_they_need():
    for name in ("scatter", "scatter-sgd"):
        assert f"`{name}`" in PAGE
        assert get_recipe(name).public_inputs == ()


def test_every_measured_figure_is_the_mean_of_rows_that_were_kept():
    rows = json.loads((ROOT / "benchmarks" / "results" / "accuracy-scatter.json").read_text())["rows"]
    found = re.findall(
        r"^\| ([a-z0-9-]+)(?: \(JPEG\))? \| ([\d.]+) \| ([\d.]+)(?: ± ([\d.]+))? \| (\d+) \|", PAGE, re.MULTILINE
    )
    assert found
    for data, epsilon, mean, spread, seeds in found:
        values = [100 * row["accuracy"] for row in rows if (row["data"], row["epsilon"]) == (data, float(epsilon))]
        assert len(values) == int(seeds)
        assert abs(statistics.fmean(values) - float(mean)) < 0.006
        if spread:
            assert abs(statistics.stdev(values) - float(spread)) < 0.006
