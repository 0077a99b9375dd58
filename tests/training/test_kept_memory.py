"""Freed memory stays with the process while it trains, and goes back afterwards."""

import platform
import subprocess
import sys
from contextlib import nullcontext

import pytest

from sordino.training import PerformanceOptions, tuned_process

_PROBE = """
import resource
import torch
from sordino.training import tuned_process

def faults():
    # Four arrays of 24 MB, freed together: the top of the heap is then above what the library keeps by itself.
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        arrays = [torch.ones(6_000_000) for _ in range(4)]
        del arrays
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

torch.ones(6_000_000)
with tuned_process():
    with tuned_process():
        faults()
    found = faults()
    inside = resident()
print(found, inside - resident())
"""

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")


@glibc
def test_steps_inside_take_no_fresh_pages_and_the_end_gives_them_back() -> None:
    done = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True, check=True)
    fresh, given_back = (int(word) for word in done.stdout.split())
    pages_of_a_round = 4 * 6_000_000 * 4 // 4096
    # Without the block nearly every round takes them all.
    assert fresh < pages_of_a_round / 10
    assert given_back > 50_000_000


def test_without_glibc_it_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sordino.training.plan._glibc", lambda: None)
    with tuned_process():
        pass


def test_memory_is_kept_only_where_it_is_asked_for() -> None:
    assert isinstance(PerformanceOptions().keeping(), nullcontext)
    assert not isinstance(PerformanceOptions(tune_process=True).keeping(), nullcontext)
