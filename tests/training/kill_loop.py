"""Trains a run to its end while killing it with SIGKILL at random moments. Prints what was seen, as JSON.

Usage: python kill_loop.py FOLDER KILLS SEED STEPS. Torch is imported once, the children are forked.
"""

import hashlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

from sordino.errors import SordinoError
from sordino.randomness import KeyedRNG
from sordino.runs import RunFolder
from sordino.training.averaging import TailWeightAverage
from sordino.training.fit import fit
from sordino.training.plan import Plan

PLAN = Plan(
    noise_multiplier=2.0,
    max_grad_norm=1.0,
    sample_rate=0.1,
    steps=int(sys.argv[4]),
    expected_batch_size=20.0,
    delta=1e-5,
)


TWO_LINES = 600  # bytes: the line that begins a segment, and a step


def losses(model, x, y):
    return nn.functional.cross_entropy(model(x), y, reduction="none")


def spy_on_noise(journal):
    """Every stream of noise is written down, by its first bytes, before it is used."""
    plain = KeyedRNG.stream

    def stream(self, purpose, *, step, tensor=0, rank=0):
        if "noise" in purpose or "gauss" in purpose:
            first = bytearray(32)
            plain(self, purpose, step=step, tensor=tensor, rank=rank).fill(memoryview(first))
            line = f"{self.commitment} {step} {tensor} {hashlib.sha256(first).hexdigest()}\n"
            os.write(journal, line.encode())
        return plain(self, purpose, step=step, tensor=tensor, rank=rank)

    KeyedRNG.stream = stream


def work(folder, journal):
    spy_on_noise(journal)
    torch.manual_seed(0)
    features, labels = torch.randn(200, 4), torch.randint(0, 2, (200,))
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    where = {"resume_from": folder} if folder.exists() else {"run_folder": folder}
    fit(
        model,
        losses,
        (features, labels),
        PLAN,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.05),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [10, 30]),
        averaging=TailWeightAverage(fraction=0.5),
        checkpoint_every=2,
        on_step=lambda done: time.sleep(0.02),
        progress=False,
        **where,
    )


def forked(folder, journal):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work(folder, journal)
            code = 0
        finally:
            os._exit(code)
    return child


def look(folder, noise_file):
    """What a reader finds after a kill: is it readable, and is every step that drew noise on the bill?"""
    if not folder.exists():
        return {"exists": False, "readable": True, "billed": True, "lines": 0}
    try:
        run = RunFolder.open(folder)
        segments, billed = -1, set()
        keys = [segment.key for segment in run.segments()]
        for entry in run.entries():
            if hasattr(entry, "key"):
                segments += 1
            else:
                billed.add((keys[segments], entry.step))
        lines = len(list(run))
        readable = run.plan["steps"] == PLAN.steps and bool(run.meta)
    except (SordinoError, OSError) as error:
        return {"exists": True, "readable": False, "billed": False, "lines": 0, "error": str(error)}
    drawn = {tuple(line.split()[:2]) for line in noise_file.read_text().splitlines()}
    return {
        "exists": True,
        "readable": readable,
        "billed": drawn <= {(key, str(step)) for key, step in billed},
        "lines": lines,
    }


def wait_for_a_moment(folder, generator):
    """Mostly some steps after the child has begun to write, sometimes at any time before."""
    if generator.random() < 0.15:
        time.sleep(generator.uniform(0.0, 0.3))
        return
    size, patience = written(folder), time.monotonic() + 60
    while written(folder) < size + TWO_LINES and time.monotonic() < patience:
        time.sleep(0.0005)
    time.sleep(generator.uniform(0.0, 0.05))


def written(folder):
    file = folder / "transcript.jsonl"
    return file.stat().st_size if file.exists() else 0


def main():
    folder, kills, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    generator = random.Random(seed)
    noise_file = folder.parent / "noise.txt"
    journal = os.open(noise_file, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    looks, killed = [], 0
    while killed < kills:
        child = forked(folder, journal)
        wait_for_a_moment(folder, generator)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            break
        killed += 1
        looks.append(look(folder, noise_file))
    _, status = os.waitpid(forked(folder, journal), 0) if killed == kills else (0, status)
    print(json.dumps({"killed": killed, "status": status, "looks": looks, "last": look(folder, noise_file)}))


if __name__ == "__main__":
    main()
