"""The cost of a private step beside the same step without privacy, measured side by side in one process.

A private step is everything `fit` does for one logical batch after it was drawn: captured forward and backward, norms,
clipped sums, noise from the cryptographic generator on every parameter, the optimizer. The plain step is the usual loop
with a mean loss. Rounds alternate between the two, and the ratio is taken round by round, so that a machine that slows
down slows both.

    ./run bench speed --quick
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

from sordino.gradients import GradientCapture
from sordino.randomness import Randomness
from sordino.recipes.models import cnn
from sordino.sampling import Chunk
from sordino.training import Plan, PrivateStep

RESULTS = Path(__file__).parent / "results"
TARGET = 2.0


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        B, T, D = x_BTD.shape
        q, k, v = self.qkv(self.first(x_BTD)).view(B, T, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, D)
        x_BTD = x_BTD + self.out(mixed)
        return x_BTD + self.down(F.gelu(self.up(self.second(x_BTD))))


class Transformer(nn.Module):
    """A causal language model."""

    def __init__(self, *, tokens: int = 1000, width: int = 256, layers: int = 2, heads: int = 4, length: int = 64):
        super().__init__()
        self.embed, self.place = nn.Embedding(tokens, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, tokens)

    def forward(self, ids_BT: Tensor) -> Tensor:
        places = torch.arange(ids_BT.shape[1]).expand_as(ids_BT)
        return self.head(self.norm(self.blocks(self.embed(ids_BT) + self.place(places))))


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model with one batch."""

    name: str
    build: Callable[[], nn.Module]
    batch: tuple[Tensor, Tensor]

    def losses(self, model: nn.Module) -> Tensor:
        inputs, targets = self.batch
        outputs = model(inputs)
        if targets.dim() == 1:
            return F.cross_entropy(outputs, targets, reduction="none")
        return F.cross_entropy(outputs.transpose(1, 2), targets, reduction="none").mean(1)


def cases() -> list[Case]:
    """The four models of the table."""
    generator = torch.Generator().manual_seed(0)

    def labelled(records: int, *shape: int) -> tuple[Tensor, Tensor]:
        labels = torch.randint(10, (records,), generator=generator)
        return torch.rand(records, *shape, generator=generator), labels

    ids = torch.randint(1000, (16, 65), generator=generator)
    return [
        Case(name="logistic 784-10, B 512", build=lambda: nn.Linear(784, 10), batch=labelled(512, 784)),
        Case(
            name="MLP 60-1000-10, B 512",
            build=lambda: nn.Sequential(nn.Linear(60, 1000), nn.ReLU(), nn.Linear(1000, 10)),
            batch=labelled(512, 60),
        ),
        Case(name="CNN 28x28, B 256", build=lambda: cnn((1, 28, 28), 10), batch=labelled(256, 1, 28, 28)),
        Case(
            name="transformer 2x256 T 64, B 16",
            build=Transformer,
            batch=(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()),
        ),
    ]


def plain_step(case: Case) -> Callable[[], None]:
    """A step of the usual loop."""
    model = case.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        case.losses(model).mean().backward()
        optimizer.step()

    return step


def private_step(case: Case, *, noise_multiplier: float = 1.0) -> Callable[[], None]:
    """The same step with clipping and noise."""
    model = case.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    records = len(case.batch[0])
    plan = Plan(
        noise_multiplier=noise_multiplier,
        max_grad_norm=1.0,
        sample_rate=0.01,
        steps=1,
        expected_batch_size=float(records),
        delta=1e-5,
    )
    capture = GradientCapture(model)
    private = PrivateStep(capture, plan, Randomness())
    number = 0

    def step() -> None:
        nonlocal number
        chunk = Chunk(step=number, chunk=0, is_last=True, indices=np.arange(records))
        with private.recording(chunk):
            case.losses(model).sum().backward()
        private.add(chunk)
        private.finish()
        optimizer.step()
        optimizer.zero_grad()
        number += 1

    return step


def seconds(step: Callable[[], None], repeats: int) -> float:
    """Mean time of one step over `repeats` of them."""
    start = time.perf_counter()
    for _ in range(repeats):
        step()
    return (time.perf_counter() - start) / repeats


@dataclass(frozen=True, kw_only=True)
class Row:
    """What was measured for one case; times in milliseconds, medians over rounds."""

    name: str
    parameters: int
    plain_ms: float
    private_ms: float
    noise_ms: float
    ratio: float
    ratio_low: float
    ratio_high: float
    rounds: int


def measure(case: Case, *, rounds: int, round_seconds: float) -> Row:
    """Medians over rounds; low and high are the quartiles of the ratio."""
    steps = [plain_step(case), private_step(case), private_step(case, noise_multiplier=0.0)]
    for step in steps:
        seconds(step, 3)
    repeats = max(1, round(round_seconds / max(seconds(step, 2) for step in steps)))
    times = np.array([[seconds(step, repeats) for step in steps] for _ in range(rounds)])
    plain, private, noise = (1e3 * statistics.median(t) for t in (times[:, 0], times[:, 1], times[:, 1] - times[:, 2]))
    ratios = times[:, 1] / times[:, 0]
    low, middle, high = np.quantile(ratios, (0.25, 0.5, 0.75))
    return Row(
        name=case.name,
        parameters=sum(parameter.numel() for parameter in case.build().parameters()),
        plain_ms=plain,
        private_ms=private,
        noise_ms=noise,
        ratio=float(middle),
        ratio_low=float(low),
        ratio_high=float(high),
        rounds=rounds,
    )


def machine() -> dict[str, object]:
    """What the numbers depend on."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "sordino": version("sordino"),
    }


def processor() -> str:
    """The processor's own name, where the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def show(rows: list[Row], facts: dict[str, object]) -> None:
    """One table on the terminal."""
    where = f"torch {facts['torch']}, {facts['threads']} thread(s), {facts['processor']}"
    table = Table(title=f"A private step beside a plain one · {where}")
    for heading in ("model", "parameters", "plain ms", "private ms", "of it noise", "ratio", "quartiles"):
        table.add_column(heading, justify="left" if heading == "model" else "right")
    for row in rows:
        mark = "" if row.ratio < TARGET else " !"
        table.add_row(
            row.name,
            f"{row.parameters:,}",
            f"{row.plain_ms:.2f}",
            f"{row.private_ms:.2f}",
            f"{max(0.0, row.noise_ms):.2f}",
            f"{row.ratio:.2f}{mark}",
            f"{row.ratio_low:.2f}–{row.ratio_high:.2f}",
        )
    Console(width=110).print(table)


def main(arguments: list[str] | None = None) -> list[Row]:
    """Measure, print the table, and write it to `results`."""
    parser = argparse.ArgumentParser(description="step time with and without privacy")
    parser.add_argument("--quick", action="store_true", help="under a minute")
    parser.add_argument("--threads", type=int, default=None, help="torch's threads (default: torch's own choice)")
    parser.add_argument("--only", default="", help="only models whose name contains this")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the JSON")
    chosen = parser.parse_args(arguments)
    if chosen.threads is not None:
        torch.set_num_threads(chosen.threads)
    rounds, round_seconds = (9, 0.15) if chosen.quick else (31, 0.5)
    wanted = [case for case in cases() if chosen.only in case.name]
    rows = [measure(case, rounds=rounds, round_seconds=round_seconds) for case in wanted]
    facts = machine()
    show(rows, facts)
    chosen.results.mkdir(parents=True, exist_ok=True)
    file = chosen.results / f"speed-{str(facts['date'])[:19].replace(':', '')}.json"
    file.write_text(
        json.dumps({**facts, "quick": chosen.quick, "rows": [asdict(row) for row in rows]}, indent=2) + "\n"
    )
    return rows


if __name__ == "__main__":
    main()
