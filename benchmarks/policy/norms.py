"""Norms by projections beside exact ones: accuracy, ε, time, and peak memory in processes of their own."""

import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from memory import growth
from torch import nn

from policy.training import base_plan, digits, losses, mean_of, network, table, trained
from sordino.clipping import Clipping, FlatClipping
from sordino.gradients import GradientCapture
from sordino.randomness import KeyedRNG
from sordino.research import ProjectedAccumulator, ProjectedClipping
from sordino.sampling import split_into_microbatches
from sordino.training import PrivateStep


def ways_of_norms(size: dict[str, int]) -> dict[str, Clipping]:
    """Exact norms first."""
    counts = (1, 5, 10, 50) if size["seeds"] > 2 else (1, 5)
    return {"exact": FlatClipping(), **{f"r = {count}": ProjectedClipping(projections=count) for count in counts}}


def projections(size: dict[str, int]) -> dict[str, object]:
    """One noise multiplier for all; what it costs, how long a step takes (runs taking turns), and peak memory."""
    private = digits((3, 5), size["records"])
    flat = base_plan(len(private[0][0]), 1.0, max(3, size["steps"] // 6))
    ways = ways_of_norms(size)
    found: dict[str, dict[str, float]] = {}
    optimizers = {"SGD": (torch.optim.SGD, 2.0), "Adam": (torch.optim.Adam, 0.03)}
    if size["seeds"] <= 2:
        del optimizers["Adam"]
    runs: dict[tuple[str, str], list[dict[str, float]]] = {}
    for seed in range(size["seeds"]):
        for kind, (optimizer, rate) in optimizers.items():
            for name, method in ways.items():
                plan, made = replace(flat, clipping=method), partial(optimizer, lr=rate)
                run = trained(network, private, plan, seed=seed, rate=rate, optimizer=made)
                runs.setdefault((kind, name), []).append(run)
    for (kind, name), several in runs.items():
        fastest = min(run["seconds"] for run in runs[kind, "exact"])
        row = {**mean_of(several), "epsilon": replace(flat, clipping=ways[name]).guarantee().epsilon}
        row["accuracy_sd"] = statistics.stdev(run["accuracy"] for run in several)
        found[f"{kind}, {name}"] = row | {"time_ratio": min(run["seconds"] for run in several) / fastest}
    table(
        "norms by projections, network on digits 3 and 5",
        found,
        ("loss", "loss_sd", "accuracy", "accuracy_sd", "epsilon", "time_ratio"),
    )
    peaks = {name: peak(name, size) for name in ways}
    table(f"peak memory of a step, 196-{size['width']}-{size['width']}-2, batch 500", peaks, ("megabytes", "seconds"))
    return {"training": found, "memory": peaks}


def peak(way: str, size: dict[str, int]) -> dict[str, float]:
    """Peak memory above the idle model, and the time of a step, in a fresh process."""
    settings = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    command = [sys.executable, str(Path(__file__).parents[1] / "policies.py"), "--one", way, str(size["width"])]
    ended = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **settings}, check=True)
    return json.loads(ended.stdout)


def one(way: str, width: int) -> dict[str, float]:
    """`peak`, measured here."""
    torch.manual_seed(0)
    layers = [nn.Linear(196, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2)]
    model, records = nn.Sequential(*layers), 500
    batch = torch.randn(records, 196), torch.randint(0, 2, (records,))
    count = int(way.rpartition(" ")[2]) if way != "exact" else 0
    clipping = ProjectedClipping(projections=count) if count else FlatClipping()
    capture = GradientCapture(model)
    private = PrivateStep(capture, replace(base_plan(records, 1.0, 8), clipping=clipping), KeyedRNG())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ends: list[float] = []

    def step() -> None:
        ends.append(time.perf_counter())
        (chunk,) = split_into_microbatches(np.arange(records), step=len(ends))
        if isinstance(private.bounds, ProjectedAccumulator):
            private.begin(chunk)
            private.add_sums(chunk, private.bounds.sums(losses, batch, records=records))
        else:
            with private.capturing(chunk):
                losses(model, *batch).sum().backward()
            private.add(chunk)
        private.finish()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    megabytes = growth(step)
    ends.append(time.perf_counter())
    return {
        "megabytes": megabytes,
        "seconds": min(after - before for before, after in itertools.pairwise(ends)),
    }
