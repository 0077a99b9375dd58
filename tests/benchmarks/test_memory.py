import json
import runpy
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are read from Linux' /proc")


def main_of(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return runpy.run_path(str(BENCHMARKS / "memory.py"))["main"]


def test_the_memory_benchmark_measures_peaks_in_processes_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (row,) = main_of(monkeypatch)(["--quick", "--alone", "--only", "MLP", "--results", str(tmp_path)])
    # Inputs of the hidden layer, their activations and gradients: 512 · 1000 numbers each.
    assert 2 < row["peaks_mb"]["plain"] < 200
    assert all(0.5 < ratio < 10 for ratio in row["ratios"].values())
    ways = {"plain", "private", "private low_memory", "private groupwise", "private two_pass"}
    assert set(row["ratios"]) == set(row["times"]) == ways
    (file,) = tmp_path.glob("memory-*.json")
    kept = json.loads(file.read_text())["rows"][0]
    assert kept["name"] == "MLP 60-1000-10, B 512"
    assert kept["peaks_mb"] == row["peaks_mb"]


def test_modes_can_be_chosen_and_tiny_peaks_have_no_ratio(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [
        "--quick",
        "--alone",
        "--no-times",
        "--modes",
        "low_memory",
        "--only",
        "logistic",
        "--results",
        str(tmp_path),
    ]
    (row,) = main_of(monkeypatch)(words)
    assert set(row["peaks_mb"]) == {"plain", "private low_memory"}
    assert row["ratios"] == {}
    assert "times" not in row
    assert row["batch_mb"] == pytest.approx((512 * 784 * 4 + 512 * 8) / 2**20)
    assert "logistic" in capsys.readouterr().out


def test_unknown_modes_are_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit):
        main_of(monkeypatch)(["--modes", "low_memory,tiny"])
    assert "modes must be among fast, low_memory, groupwise, two_pass, got tiny." in " ".join(
        capsys.readouterr().err.split()
    )
