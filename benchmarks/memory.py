"""The memory of a private step beside the same step without privacy: peaks of the resident set, one process each.

Every way to take a step runs in a process of its own: it builds the model, takes one step, and then measures by how
much the resident set grows above the idle model during the next ones. Large tensors are mapped and given back one by
one (a fixed threshold of the allocator), so that the peak is the step's own. Linux only.

The processes of one model are forked from one that has imported everything, for imports take longer than steps. What a
process had before its own first step is no part of its growth.

The processor time of the plain step and of this library's is measured in one more process, round by round.

    ./run bench memory --quick
    ./run bench memory --alone --modes low_memory,groupwise --only BERT --no-times
"""

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import traceback
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, get_args

import torch
from rich.console import Console
from rich.table import Table
from steps.cases import Case, cases
from steps.clock import machine, seconds
from steps.text import bert_mini, checkpointed
from steps.ways import Step, peers, plain_step, private_step
from torch import nn

from sordino.training.plan import ClippingMode

RESULTS = Path(__file__).parent / "results"
MODES: tuple[str, ...] = get_args(ClippingMode)
_STEPS = 2
# Smaller peaks, in megabytes, have no ratio: they are pages that the process had already, or not.
_LEAST = 1.0


def own(modes: Iterable[str]) -> list[str]:
    """The plain step and this library's in `modes`."""
    return ["plain", *(f"private {mode}".removesuffix(" fast") for mode in modes)]


def models() -> list[Case]:
    """Those of the speed benchmark, and one with full gradient checkpointing."""
    (bert,) = (case for case in cases() if case.name.startswith("BERT-mini T"))
    again = dataclasses.replace(bert, name=f"{bert.name}, checkpointed", build=lambda: checkpointed(bert_mini()))
    return [*cases(), again]


def model_named(name: str) -> Case:
    """The case called `name`."""
    return next(case for case in models() if case.name == name)


def step_of(case: Case, way: str) -> Step:
    """The step of one way."""
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


def forked(name: str, way: str, *, threads: int) -> float | str:
    """`growth` in a forked process; the name of the error, where the step can't be taken."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        result: float | str = "?"
        try:
            torch.set_num_threads(threads)
            result = growth(step_of(model_named(name), way))
        except Exception as error:
            traceback.print_exc()
            result = type(error).__name__
        finally:
            os.write(writing, json.dumps(result).encode())
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        words = pipe.read()
    os.waitpid(child, 0)
    return json.loads(words) if words else "killed"


def peaks(name: str, ways: Sequence[str], *, repeats: int, threads: int) -> dict[str, Any]:
    """`forked` for every way, `repeats` times each, and what the model and its batch take themselves."""
    # One thread until the processes part: threads don't survive a fork.
    torch.set_num_threads(1)
    # Steps import more when they are first taken.
    small = Case(name="", build=lambda: nn.Linear(1, 2), batch=(torch.ones(1, 1), torch.zeros(1).long()), goal=1.0)
    for way in (way for way in ways if way not in peers()):
        step_of(small, way)()
    case = model_named(name)
    model = case.build()
    kept = [*model.parameters(), *model.buffers()]
    sizes = [sum(tensor.nbytes for tensor in tensors) / 2**20 for tensors in (kept, case.batch)]
    del model, kept
    values = {way: [forked(name, way, threads=threads) for _ in range(repeats)] for way in ways}
    return {"model_mb": sizes[0], "batch_mb": sizes[1], "values": values}


def times(name: str, ways: Sequence[str], *, rounds: int) -> dict[str, float]:
    """Processor time of a step in each of `ways`, in plain steps: medians of the ratios of each round."""
    case = model_named(name)
    steps = [step_of(case, way) for way in ways]
    for step in steps:
        step()
    taken = [[seconds(step, 1, "cpu") for step in steps] for _ in range(rounds)]
    return {way: statistics.median(row[place] / row[0] for row in taken) for place, way in enumerate(ways)}


def apart(what: str, name: str, ways: Sequence[str], number: int, settings: dict[str, str]) -> dict[str, Any]:
    """`peaks` or `times` in a fresh process."""
    words = [json.dumps([what, name, list(ways), number]), "--threads", str(torch.get_num_threads())]
    command = [sys.executable, __file__, "--part", *words]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **settings}, check=True)
    return json.loads(ended.stdout.splitlines()[-1])


def part(what: str, name: str, ways: list[str], number: int) -> dict[str, Any]:
    """What `apart` asks the process for."""
    warnings.simplefilter("ignore")
    if what == "peaks":
        return peaks(name, ways, repeats=number, threads=torch.get_num_threads())
    return times(name, ways, rounds=number)


def measure(name: str, modes: Sequence[str], *, repeats: int, compare: bool, timed: bool) -> dict[str, Any]:
    """Peaks in megabytes, and their ratios to the plain step's: medians over processes."""
    mapped = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    ways = [*own(modes), *(peers() if compare else ())]
    found = apart("peaks", name, ways, repeats, mapped)
    medians: dict[str, float | str] = {}
    for way, values in found.pop("values").items():
        numbers = [value for value in values if isinstance(value, float)]
        medians[way] = statistics.median(numbers) if numbers else values[0]
    plain = medians["plain"]
    assert isinstance(plain, float)
    ratios = {way: value / plain for way, value in medians.items() if isinstance(value, float) and plain >= _LEAST}
    row = {"name": name, **found, "peaks_mb": medians, "ratios": ratios}
    return row | ({"times": apart("times", name, own(modes), 3 * repeats + 2, {})} if timed else {})


def show(rows: list[dict[str, Any]], facts: dict[str, object]) -> None:
    """One table on the terminal."""
    names = list(dict.fromkeys(way for row in rows for way in row["peaks_mb"]))
    table = Table(
        title=f"Peak memory of a step: megabytes above the idle model, and in plain steps' · torch {facts['torch']}, "
        f"{facts['threads']} thread(s)"
    )
    for heading in ("model", "model MB", *names):
        table.add_column(heading, justify="left" if heading == "model" else "right")
    for row in rows:
        table.add_row(row["name"], f"{row['model_mb']:.1f}", *(_cell(row, name) for name in names))
        if "times" in row:
            taken = [f"{row['times'][name]:.2f}" if name in row["times"] else "" for name in names]
            table.add_row("  processor time", "", *taken)
    Console(width=60 + 16 * len(names)).print(table)


def _cell(row: dict[str, Any], way: str) -> str:
    peak, ratio = row["peaks_mb"].get(way, "–"), row["ratios"].get(way)
    words = f"{peak:.1f}" if isinstance(peak, float) else peak
    return words if ratio is None else f"{words} · {ratio:.2f}"


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    """Measure, print the table, and write it to `results`."""
    parser = argparse.ArgumentParser(description="peak memory with and without privacy")
    parser.add_argument("--quick", action="store_true", help="one process for each number")
    parser.add_argument("--threads", type=int, default=None, help="torch's threads (default: torch's own choice)")
    parser.add_argument("--only", default="", help="only models whose name contains this")
    parser.add_argument("--modes", default=",".join(MODES), help="only these modes of this library, by commas")
    parser.add_argument("--alone", action="store_true", help="leave out the other ways to take a private step")
    parser.add_argument("--no-times", action="store_true", help="peaks alone")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the JSON")
    parser.add_argument("--part", default=None, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    modes = chosen.modes.split(",")
    if unknown := sorted(set(modes) - set(MODES)):
        parser.error(f"modes must be among {', '.join(MODES)}, got {', '.join(unknown)}. Separate them by commas.")
    if chosen.threads is not None:
        torch.set_num_threads(chosen.threads)
    if chosen.part:
        print(json.dumps(part(*json.loads(chosen.part))))
        return []
    facts = machine()
    wanted = [case.name for case in models() if chosen.only in case.name]
    repeats, compare = 1 if chosen.quick else 3, not chosen.alone
    rows = [measure(name, modes, repeats=repeats, compare=compare, timed=not chosen.no_times) for name in wanted]
    show(rows, facts)
    chosen.results.mkdir(parents=True, exist_ok=True)
    file = chosen.results / f"memory-{str(facts['date'])[:19].replace(':', '')}.json"
    file.write_text(json.dumps({**facts, "quick": chosen.quick, "rows": rows}, indent=2) + "\n")
    return rows


if __name__ == "__main__":
    main()
