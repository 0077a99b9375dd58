"""The cost of a private step beside the same step without privacy, measured side by side in one process.

A private step is everything `fit` does for one logical batch after it was drawn: captured forward and backward, norms,
clipped sums, noise from the cryptographic generator on every parameter, the optimizer. The plain step is the usual loop
with a mean loss. Both run in a `tuned_process`, which `fit` takes with `tune_process=True`, and the plain step once
more without, as in a usual loop; `--fresh` leaves memory to the C library. Rounds alternate between all ways, and
ratios are taken round by round, so that a machine that slows down slows all of them. Other ways to take a private step
are measured where they are installed (the bench extra).

    ./run bench speed --quick

`--parts` tells instead what each part of a step of a tiny model costs, in a custom loop and in `fit`.
"""

import argparse
import json
import math
import statistics
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from steps.cases import Case, cases
from steps.clock import CLOCKS, machine, seconds
from steps.parts import measure_parts, table_of_parts, write_parts
from steps.ways import Step, compiled_step, peers, plain_step, private_step

from sordino.training import tuned_process

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, kw_only=True)
class Row:
    """What was measured for one case; times in milliseconds, medians over rounds, low and high are quartiles.

    Args:
        usual_ms: the plain step where freed memory goes back to the system, as in a usual loop; None where all do.
        others: median ratios of the other ways; why not, where one can't take the step.
    """

    name: str
    parameters: int
    plain_ms: float
    usual_ms: float | None
    private_ms: float
    noise_ms: float
    ratio: float
    ratio_low: float
    ratio_high: float
    goal: float
    rounds: int
    others: dict[str, float | str]


def measure(
    case: Case,
    *,
    rounds: int,
    round_seconds: float,
    clock: str,
    compare: bool,
    compiled: bool = False,
    autotune: bool = False,
    keep: bool = True,
) -> Row:
    """Medians over rounds; low and high are the quartiles of the ratio."""
    steps = [plain_step(case), *(private_step(case, noise_multiplier=z, autotune=autotune) for z in (1.0, 0.0))]
    others: dict[str, float | str] = {}
    names: list[str] = []
    ways = {"compiled": compiled_step} if compiled and case.compiled_goal is not None else {}
    for name, way in (ways | (peers() if compare else {})).items():
        step = attempt(lambda way=way: way(case))
        if isinstance(step, str):
            others[name] = step
        else:
            names.append(name)
            steps.append(step)
    memory = tuned_process if keep else nullcontext
    with memory():
        for step in steps:
            seconds(step, 2)
        # A slow way is run less often in a round than the others.
        repeats = [max(1, round(round_seconds / max(seconds(step, 1), 1e-6))) for step in steps]
        repeats = [min(count, repeats[0]) for count in repeats]
    rows, usual = [], []
    for _ in range(rounds):
        with memory():
            for step in steps[:3]:
                step()
            rows.append([seconds(step, count, clock) for step, count in zip(steps, repeats, strict=True)])
        if keep:
            steps[0]()
            usual.append(seconds(steps[0], repeats[0], clock))
    times = np.array(rows)
    plain, private, noise = (1e3 * statistics.median(t) for t in (times[:, 0], times[:, 1], times[:, 1] - times[:, 2]))
    ratios = times / times[:, :1]
    low, middle, high = np.quantile(ratios[:, 1], (0.25, 0.5, 0.75))
    others |= {name: float(np.median(ratios[:, 3 + place])) for place, name in enumerate(names)}
    return Row(
        name=case.name,
        parameters=sum(parameter.numel() for parameter in case.build().parameters() if parameter.requires_grad),
        plain_ms=plain,
        usual_ms=1e3 * statistics.median(usual) if usual else None,
        private_ms=private,
        noise_ms=noise,
        ratio=float(middle),
        ratio_low=float(low),
        ratio_high=float(high),
        goal=case.goal,
        rounds=rounds,
        others=others,
    )


def attempt(make: Callable[[], Step]) -> Step | str:
    """The step after one trial, or the kind of error that it ended with."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            step = make()
            step()
    except Exception as error:
        return type(error).__name__
    return step


def geometric_mean(rows: list[Row]) -> float:
    """Of the ratios."""
    return math.exp(statistics.fmean(math.log(row.ratio) for row in rows))


def show(rows: list[Row], facts: dict[str, object], clock: str) -> None:
    """One table on the terminal."""
    by = f", noise by Numba {facts['numba']}" if facts["numba"] else ""
    where = (
        f"torch {facts['torch']}{by}, {facts['threads']} thread(s), {facts['gpu'] or facts['processor']}, {clock} time"
    )
    others = list(dict.fromkeys(name for row in rows for name in row.others))
    table = Table(title=f"A private step in plain steps · {where}")
    for heading in (
        "model",
        "plain ms",
        "usual ms",
        "private ms",
        "noise",
        "ratio",
        "quartiles",
        "goal",
        "to usual",
        *others,
    ):
        table.add_column(heading, justify="left" if heading == "model" else "right")
    for row in rows:
        mark = "" if row.ratio <= row.goal else " !"
        table.add_row(
            row.name,
            f"{row.plain_ms:.2f}",
            "–" if row.usual_ms is None else f"{row.usual_ms:.2f}",
            f"{row.private_ms:.2f}",
            f"{max(0.0, row.noise_ms):.2f}",
            f"{row.ratio:.2f}{mark}",
            f"{row.ratio_low:.2f}–{row.ratio_high:.2f}",
            f"{row.goal:.2f}",
            "–" if row.usual_ms is None else f"{row.private_ms / row.usual_ms:.2f}",
            *(f"{value:.2f}" if isinstance(value := row.others.get(name, "–"), float) else value for name in others),
        )
    console = Console(width=130 + 14 * len(others))
    console.print(table)
    console.print(f"geometric mean of the ratios: {geometric_mean(rows):.2f}")


def main(arguments: list[str] | None = None) -> list[Row]:
    """Measure, print the table, and write it to `results`."""
    parser = argparse.ArgumentParser(description="step time with and without privacy")
    parser.add_argument("--quick", action="store_true", help="a minute or two")
    parser.add_argument("--threads", type=int, default=None, help="torch's threads (default: torch's own choice)")
    parser.add_argument("--only", default="", help="only models whose name contains this")
    parser.add_argument("--alone", action="store_true", help="leave out the other ways to take a private step")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: on a machine that does other things")
    parser.add_argument("--fresh", action="store_true", help="freed memory may go back to the system after each step")
    parser.add_argument("--autotune", action="store_true", help="kernels by the clock, measured before the first round")
    parser.add_argument("--compiled", action="store_true", help="the small models' steps also as compiled graphs")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the JSON")
    parser.add_argument("--parts", action="store_true", help="only what each part of a small step costs")
    parser.add_argument("--write", action="store_true", help="with --parts: write the tables into docs/performance.md")
    chosen = parser.parse_args(arguments)
    if chosen.threads is not None:
        torch.set_num_threads(chosen.threads)
    if chosen.parts:
        table = table_of_parts(measure_parts(300 if chosen.quick else 2000), machine())
        print(table)
        if chosen.write:
            write_parts(table)
        return []
    rounds, round_seconds = (5, 0.1) if chosen.quick else (15, 0.4)
    wanted = [case.on(chosen.device) for case in cases() if chosen.only in case.name]
    if not wanted:
        parser.error(f"--only: no model's name contains {chosen.only!r}: {', '.join(case.name for case in cases())}")
    facts = machine()
    how = {"clock": chosen.clock, "autotune": chosen.autotune}
    options = {**how, "compare": not chosen.alone, "compiled": chosen.compiled}
    options["keep"] = not chosen.fresh
    rows = [measure(case, rounds=rounds, round_seconds=round_seconds, **options) for case in wanted]
    show(rows, facts, chosen.clock)
    chosen.results.mkdir(parents=True, exist_ok=True)
    file = chosen.results / f"speed-{str(facts['date'])[:19].replace(':', '')}.json"
    body = {**facts, **how, "quick": chosen.quick, "fresh": chosen.fresh, "geometric_mean": geometric_mean(rows)}
    file.write_text(json.dumps({**body, "rows": [asdict(row) for row in rows]}, indent=2) + "\n")
    return rows


if __name__ == "__main__":
    main()
