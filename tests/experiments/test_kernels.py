"""Where each way of clipping trains to: the order that docs/diagnostics.md states, in a short run."""

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_losses_fall_as_the_page_says(capsys):
    found = runpy.run_path(str(ROOT / "experiments" / "kernels.py"))["main"](["--steps", "80"])
    # Equal factors make descent without clipping slower; dropped records leave the loss where it is.
    assert found["none"][1] < found["large threshold"][1] < 1
    assert found["global flat"][1] == found["global layer-wise"][1] == 1
    assert found["none"][0] == found["large threshold"][0] == 0
    # Clipped gradients raise the loss in some steps, and still lead down.
    for name in ("flat", "layer-wise"):
        assert found[name][0] > 0
        assert found[name][1] < 1
    table = capsys.readouterr().out
    page = (ROOT / "docs" / "diagnostics.md").read_text(encoding="utf-8")
    assert all(f"| {name} |" in table and f"| {name} |" in page for name in found)
