"""The clock and the machine."""

import platform
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from os import getloadavg
from pathlib import Path

import torch

__all__ = ["CLOCKS", "machine", "seconds"]

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
"""Wall time, and the time that this process has had on the processors, which other programs don't lengthen as much."""


def seconds(step: Callable[[], None], repeats: int, clock: str = "wall") -> float:
    """Mean time of one step over `repeats` of them."""
    now = CLOCKS[clock]
    _wait()
    start = now()
    for _ in range(repeats):
        step()
    _wait()
    return (now() - start) / repeats


def _wait() -> None:
    """Until a GPU has done what was asked of it."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def machine() -> dict[str, object]:
    """What the numbers depend on."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "processor": _processor(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
        "load": round(getloadavg()[0], 1),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "sordino", "numba", "opacus", "transformers")},
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    """The processor's own name, where the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
