import json
import runpy
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def main_of(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return runpy.run_path(str(BENCHMARKS / f"{name}.py"))["main"]


def test_the_speed_benchmark_measures_prints_and_keeps_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    main = main_of("speed", monkeypatch)
    rows = main(["--quick", "--only", "MLP", "--results", str(tmp_path), "--clock", "cpu"])
    assert [row.name for row in rows] == ["MLP 60-1000-10, B 512"]
    # A ratio below 1 would mean that the private step skips work; the upper end is a machine under any load.
    assert 0.8 < rows[0].ratio < 10
    # Per-record gradients of every parameter in memory cost more than a few private steps.
    assert rows[0].others["vmap"] > rows[0].ratio
    (file,) = tmp_path.glob("speed-*.json")
    kept = json.loads(file.read_text())
    assert kept["rows"][0]["ratio"] == rows[0].ratio
    assert {"date", "processor", "threads", "load", "torch", "sordino", "opacus"} <= set(kept)
    assert "MLP" in capsys.readouterr().out
