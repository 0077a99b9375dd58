"""The memory of a private step beside the same step without privacy: peaks of the resident set, one process each.

Every way to take a step runs in a process of its own: it builds the model, takes one step, and then measures by how
much the resident set grows above the idle model during the next ones. Large tensors are mapped and given back one by
one (a fixed threshold of the allocator), so that the peak is the step's own. Linux only.

The processor time of the plain step and of this library's is measured in one more process, round by round.

    ./run bench memory --quick
"""

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import warnings
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from steps.cases import Case, cases
from steps.clock import machine, seconds
from steps.text import bert_mini, checkpointed
from steps.ways import Step, peers, plain_step, private_step

RESULTS = Path(__file__).parent / "results"
GOAL = 1.35
_STEPS = 3
_OWN = ["plain", "private", "private lean", "private block", "private two-pass"]


def ways(*, compare: bool) -> list[str]:
    """Names of the ways that are measured, the plain step first."""
    return [*_OWN, *(peers() if compare else ())]


def models() -> list[Case]:
    """Those of the speed benchmark, and one with full gradient checkpointing."""
    (bert,) = (case for case in cases() if case.name.startswith("BERT-mini T"))
    again = dataclasses.replace(bert, name=f"{bert.name}, checkpointed", build=lambda: checkpointed(bert_mini()))
    return [*cases(), again]


def step_of(name: str, way: str) -> Step:
    """The step of one way on the case called `name`."""
    case = next(case for case in models() if case.name == name)
    if way == "plain":
        return plain_step(case)
    if way.startswith("private"):
        return private_step(case, memory=way.removeprefix("private").strip() or "fast")
    return peers()[way](case)


def status(field: str) -> float:
    """One field of this process's memory, in megabytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def growth(step: Step) -> float:
    """Megabytes by which the resident set grows during a step, after one that warms everything up."""
    step()
    before = status("VmRSS:")
    # Writing 5 sets the peak back to the present size.
    Path("/proc/self/clear_refs").write_text("5")
    for _ in range(_STEPS):
        step()
    return status("VmHWM:") - before


def times(name: str, *, rounds: int) -> list[float]:
    """Processor time of a step in each of `_OWN`, in plain steps: medians of the ratios of each round."""
    steps = [step_of(name, way) for way in _OWN]
    for step in steps:
        step()
    taken = [[seconds(step, 1, "cpu") for step in steps] for _ in range(rounds)]
    return [statistics.median(row[place] / row[0] for row in taken) for place in range(len(steps))]


def _process(*words: str) -> list[str]:
    return [sys.executable, __file__, *words, "--threads", str(torch.get_num_threads())]


def times_apart(name: str, *, rounds: int) -> dict[str, float]:
    """`times` in a fresh process, by way."""
    command = _process("--times", name, str(rounds))
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    return dict(zip(_OWN, map(float, ended.stdout.split()[-len(_OWN) :]), strict=True))


def measured(name: str, way: str) -> float | str:
    """`growth` in a fresh process; the last word of its complaint, where the step can't be taken."""
    settings = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    command = _process("--one", name, way)
    ended = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **settings}, check=False)
    if ended.returncode:
        return (ended.stderr.strip().splitlines() or ["?"])[-1].partition(":")[0].rpartition(".")[2]
    return float(ended.stdout.split()[-1])


def measure(name: str, *, repeats: int, compare: bool) -> dict[str, object]:
    """Peaks in megabytes, and their ratios to the plain step's: medians over processes."""
    peaks: dict[str, float | str] = {}
    for way in ways(compare=compare):
        values = [measured(name, way) for _ in range(repeats)]
        numbers = [value for value in values if isinstance(value, float)]
        peaks[way] = statistics.median(numbers) if numbers else values[0]
    plain = peaks["plain"]
    assert isinstance(plain, float)
    ratios = {way: value / plain if isinstance(value, float) else value for way, value in peaks.items()}
    return {"name": name, "peaks_mb": peaks, "ratios": ratios, "times": times_apart(name, rounds=3 * repeats + 2)}


def show(rows: list[dict[str, object]], facts: dict[str, object]) -> None:
    """One table on the terminal."""
    names = list(dict.fromkeys(way for row in rows for way in row["ratios"]))
    table = Table(
        title=f"Peak memory of a step, in plain steps' · torch {facts['torch']}, {facts['threads']} thread(s)"
    )
    for heading in ("model", "plain MB", *names[1:]):
        table.add_column(heading, justify="left" if heading == "model" else "right")
    for row in rows:
        ratios = row["ratios"]
        cells = [f"{v:.2f}" if isinstance(v := ratios.get(name, "–"), float) else v for name in names[1:]]
        table.add_row(row["name"], f"{row['peaks_mb']['plain']:.0f}", *cells)
        taken = [f"{row['times'][name]:.2f}" if name in row["times"] else "" for name in names[1:]]
        table.add_row("  processor time", "", *taken)
    Console(width=60 + 14 * len(names)).print(table)


def main(arguments: list[str] | None = None) -> list[dict[str, object]]:
    """Measure, print the table, and write it to `results`."""
    parser = argparse.ArgumentParser(description="peak memory with and without privacy")
    parser.add_argument("--quick", action="store_true", help="one process for each number")
    parser.add_argument("--threads", type=int, default=None, help="torch's threads (default: torch's own choice)")
    parser.add_argument("--only", default="", help="only models whose name contains this")
    parser.add_argument("--alone", action="store_true", help="leave out the other ways to take a private step")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the JSON")
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "WAY"), help=argparse.SUPPRESS)
    parser.add_argument("--times", nargs=2, metavar=("MODEL", "ROUNDS"), help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.threads is not None:
        torch.set_num_threads(chosen.threads)
    if chosen.one:
        warnings.simplefilter("ignore")
        print(growth(step_of(*chosen.one)))
        return []
    if chosen.times:
        warnings.simplefilter("ignore")
        print(*times(chosen.times[0], rounds=int(chosen.times[1])))
        return []
    facts = machine()
    wanted = [case.name for case in models() if chosen.only in case.name]
    rows = [measure(name, repeats=1 if chosen.quick else 3, compare=not chosen.alone) for name in wanted]
    show(rows, facts)
    chosen.results.mkdir(parents=True, exist_ok=True)
    file = chosen.results / f"memory-{str(facts['date'])[:19].replace(':', '')}.json"
    file.write_text(json.dumps({**facts, "quick": chosen.quick, "rows": rows}, indent=2) + "\n")
    return rows


if __name__ == "__main__":
    main()
