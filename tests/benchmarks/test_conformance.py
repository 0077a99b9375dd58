import json
import os
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

from sordino.audit import CASES

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
    installed = SimpleNamespace(util=SimpleNamespace(find_spec=lambda _: True), import_module=lambda _: None)
    monkeypatch.setitem(main.__globals__, "importlib", installed)
    found = main(["--only", "exact: a layer called twice"])
    row = found["exact: a layer called twice"]
    assert row["sordino"] == {"found": "right", "passed": True}
    assert row["Opacus"]["found"].startswith("wrong: the clipped sum is off by")
    assert set(row["Opacus"]["tried"]) == {"hooks", "functorch", "ew", "ghost"}
    assert "exact: a layer called twice" in capsys.readouterr().out


def test_a_process_that_ends_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    in_a_process = runpy.run_path(str(ROOT / "benchmarks" / "conformance.py"))["in_a_process"]

    class Ending:
        name, refusals = "ending", (ValueError,)

        def clipped_sum(self, *_: object, **__: object) -> None:
            os._exit(3)

    found = in_a_process(Ending(), "exact: a layer called twice")
    assert (found.verdict, found.description) == ("wrong", "crash: the process ended")


def test_the_page_holds_the_table_of_the_kept_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    table_of = runpy.run_path(str(ROOT / "benchmarks" / "conformance.py"))["table_of"]
    kept = json.loads((ROOT / "benchmarks" / "results" / "conformance.json").read_text())
    assert table_of(kept["found"]) in (ROOT / "docs" / "comparison.md").read_text()
    assert set(kept["found"]) == set(CASES)


def test_the_tables_of_libraries_are_those_of_the_kept_results_and_count_what_is_offered() -> None:
    tables = runpy.run_path(str(ROOT / "benchmarks" / "libraries.py"))["tables"]
    results = ROOT / "benchmarks" / "results"
    asked = json.loads((results / "conformance.json").read_text())
    kept = json.loads((results / "libraries.json").read_text())
    assert tables(kept, asked) in (ROOT / "docs" / "comparison.md").read_text()
    cases = {"a": ("right", True), "b": ("wrong: twice the noise", False), "c": ("–", True)}
    few = {
        name: {"sordino": {"found": "right", "passed": True}, "Opacus": {"found": found, "passed": passed}}
        for name, (found, passed) in cases.items()
    }
    rows = tables(kept, {"found": few}).splitlines()
    assert next(row for row in rows if row.startswith("| sordino")).endswith("| 3 of 3 |")
    assert next(row for row in rows if row.startswith("| Opacus")).endswith("| 1 of 2 |")
