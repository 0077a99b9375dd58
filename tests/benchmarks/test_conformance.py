import runpy
from pathlib import Path

import pytest

from sordino import Performance

ROOT = Path(__file__).parents[2]


def test_no_hard_model_moves_the_sum_by_more_than_the_bound(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    body = runpy.run_path(str(ROOT / "benchmarks" / "conformance.py"))
    for name, build in body["MODELS"].items():
        assert body["verdict"](body["sordino_step"], build).startswith("right"), name


def test_the_conformance_table_catches_a_step_that_does_not_clip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    body = runpy.run_path(str(ROOT / "benchmarks" / "conformance.py"))

    def unclipped(model, x) -> None:
        (100 * model(x).square().sum(1)).sum().backward()
        for parameter in model.parameters():
            parameter.data -= parameter.grad

    assert body["verdict"](unclipped, body["MODELS"]["a layer called twice"]).startswith("wrong")


def test_the_snippets_of_the_page_run() -> None:
    page = (ROOT / "docs" / "performance.md").read_text()
    (snippet,) = [part.partition("```")[0] for part in page.split("```python\n")[1:]]
    names: dict[str, object] = {}
    exec(snippet, names)
    assert names["Performance"] is Performance
