import json
import runpy
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def main_of(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return runpy.run_path(str(BENCHMARKS / f"{name}.py"))["main"]


class Watch:
    """Takes the steps, and says that the first way needs 2 seconds, the next 3, then 4, …: the machine has no say."""

    def __init__(self) -> None:
        self.ways: list[object] = []

    def seconds(self, step: Callable[[], None], repeats: int, clock: str = "wall") -> float:
        assert clock in {"wall", "cpu"}
        for _ in range(repeats):
            step()
        if step not in self.ways:
            self.ways.append(step)
        return 2.0 + self.ways.index(step)


# Hooks of another library, where it is installed.
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_the_speed_benchmark_takes_steps_prints_and_keeps_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    main = main_of("speed", monkeypatch)
    monkeypatch.setitem(main.__globals__, "seconds", Watch().seconds)
    rows = main(["--quick", "--only", "MLP", "--results", str(tmp_path), "--clock", "cpu"])
    (row,) = rows
    assert row.name == "MLP 60-1000-10, B 512"
    assert row.parameters == 60 * 1000 + 1000 + 1000 * 10 + 10
    # Plain, private, private without noise, then the others that can take the step.
    assert (row.plain_ms, row.usual_ms, row.private_ms, row.noise_ms) == (2000, 2000, 3000, -1000)
    assert row.ratio == row.ratio_low == row.ratio_high == 1.5
    measured = [ratio for ratio in row.others.values() if isinstance(ratio, float)]
    assert isinstance(row.others["vmap"], float)
    assert measured == [2.5 + 0.5 * place for place in range(len(measured))]
    (file,) = tmp_path.glob("speed-*.json")
    kept = json.loads(file.read_text())
    assert kept["rows"][0]["ratio"] == 1.5
    assert {"date", "processor", "threads", "load", "torch", "sordino", "opacus"} <= set(kept)
    assert "MLP" in capsys.readouterr().out


@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling needs g++")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_the_speed_benchmark_takes_compiled_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main = main_of("speed", monkeypatch)
    monkeypatch.setitem(main.__globals__, "seconds", Watch().seconds)
    (row,) = main(["--quick", "--alone", "--only", "logistic", "--compiled", "--results", str(tmp_path)])
    assert row.others == {"compiled": 2.5}
