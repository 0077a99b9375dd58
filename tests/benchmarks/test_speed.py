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


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are read from Linux' /proc")
def test_the_memory_benchmark_measures_peaks_in_processes_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = main_of("memory", monkeypatch)
    (row,) = main(["--quick", "--alone", "--only", "MLP", "--results", str(tmp_path)])
    # Inputs of the hidden layer, their activations and gradients: 512 · 1000 numbers each.
    assert 2 < row["peaks_mb"]["plain"] < 200
    assert 0.5 < row["ratios"]["private"] < 10
    (file,) = tmp_path.glob("memory-*.json")
    assert json.loads(file.read_text())["rows"][0]["name"] == "MLP 60-1000-10, B 512"
