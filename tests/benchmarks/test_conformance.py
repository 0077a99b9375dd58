import runpy
from pathlib import Path

import pytest

from sordino import Performance

ROOT = Path(__file__).parents[2]


def test_the_table_is_of_the_cases_and_says_what_a_library_that_does_not_clip_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    body = runpy.run_path(str(ROOT / "benchmarks" / "conformance.py"))
    main = body["main"]

    class Unclipped(body["Opacus"]):
        def clipped_sum(self, model, batch, loss, *, max_grad_norm):
            (len(batch[0]) * loss.mean(model, batch)).backward()
            return [parameter.grad.clone() for parameter in model.parameters()]

    monkeypatch.setitem(main.__globals__, "Opacus", Unclipped)
    monkeypatch.setattr(main.__globals__["importlib"].util, "find_spec", lambda _: True)
    found = main(["--only", "exact: a layer called twice"])
    row = found["exact: a layer called twice"]
    assert row["sordino"] == "right"
    assert row["Opacus"].startswith("wrong: the clipped sum is off by")
    assert "exact: a layer called twice" in capsys.readouterr().out


def test_the_snippets_of_the_page_run() -> None:
    page = (ROOT / "docs" / "performance.md").read_text()
    (snippet,) = [part.partition("```")[0] for part in page.split("```python\n")[1:]]
    names: dict[str, object] = {}
    exec(snippet, names)
    assert names["Performance"] is Performance
