import json
import runpy
from pathlib import Path

import pytest

SPEED = Path(__file__).parents[2] / "benchmarks" / "speed.py"


def test_the_speed_benchmark_measures_prints_and_keeps_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = runpy.run_path(str(SPEED))["main"](["--quick", "--only", "MLP", "--results", str(tmp_path)])
    assert [row.name for row in rows] == ["MLP 60-1000-10, B 512"]
    # A ratio below 1 would mean that the private step skips work; the upper end is a machine under any load.
    assert 0.8 < rows[0].ratio < 10
    (file,) = tmp_path.glob("speed-*.json")
    kept = json.loads(file.read_text())
    assert kept["rows"][0]["ratio"] == rows[0].ratio
    assert {"date", "processor", "threads", "torch", "sordino"} <= set(kept)
    assert "MLP" in capsys.readouterr().out
