"""What each part of a small step costs: of a custom loop around an engine, of `fit`, and of the same loop without.

The model is so small that all of it is Python: logistic regression with 8 inputs on 64 records.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import cast
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from sordino import Plan, PrivacyEngine, fit
from sordino.training import PrivateStep
from sordino.training.fit import _FitLoop  # pyright: ignore[reportPrivateUsage]

__all__ = ["PAGE", "measure_parts", "table_of_parts", "write_parts"]

PAGE = Path(__file__).parents[2] / "docs" / "performance.md"
_BEGIN, _END = "<!-- parts: begin -->", "<!-- parts: end -->"
_RECORDS, _BATCH, _WARM = 6400, 64, 20
_now = time.process_time

_LOOP = {
    "`next(batch)`": "draws, charges, collates, wraps the batch in traced tensors, secret generators",
    "`optimizer.zero_grad()`": "torch",
    "forward and loss": "hooks, what the layer saw, the trace of each operation, the module's state before and after",
    "`loss.backward()`": "compares the trace with the form that was checked, then the backward pass",
    "`optimizer.step()`": "norms, clipped sum, noise, division, the settings of optimizer and scheduler, the step",
}
_FIT = {
    "drawing": "draws and charges the batch",
    "reading": "reads the records, secret generators, begins the recording",
    "forward and loss": "hooks, what the layer saw, the module's state before and after",
    "backward": "the backward pass",
    "norms and sum": "norms, factors, weighted sum",
    "noise": "noise and division",
    "optimizer": "the optimizer's step, `zero_grad`",
}


def measure_parts(steps: int) -> dict[str, dict[str, float]]:
    """Milliseconds of process time of each part of a step, by who takes it: a tenth of the steps take less.

    What other programs do on the machine only adds, most of all to code that the processor's caches lose meanwhile.
    """
    torch.manual_seed(0)
    x = torch.randn(_RECORDS, 8)
    dataset = TensorDataset(x, (x[:, 0] > 0).float())
    plain = _loop(iter_batches=DataLoader(dataset, batch_size=_BATCH, shuffle=True), steps=steps)
    return {"plain": plain, "loop": _private_loop(dataset, steps), "fit": _fit(dataset, steps)}


def _loop(
    iter_batches: Iterable[object],
    steps: int,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> dict[str, float]:
    model = model or nn.Linear(8, 1)
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[list[float]] = []
    while len(found) < steps + _WARM:
        batches: Iterator[object] = iter(iter_batches)
        while True:
            marks = [_now()]
            batch = next(batches, None)
            if batch is None:
                break
            inputs, targets = cast("tuple[Tensor, Tensor]", batch)
            marks.append(_now())
            optimizer.zero_grad()
            marks.append(_now())
            loss = F.binary_cross_entropy_with_logits(model(inputs).squeeze(1), targets)
            marks.append(_now())
            loss.backward()
            marks.append(_now())
            optimizer.step()
            marks.append(_now())
            found.append([after - before for before, after in pairwise(marks)])
    parts = zip(*found[_WARM:], strict=True)
    return {name: _milliseconds(part) for name, part in zip(_LOOP, parts, strict=True)}


def _private_loop(dataset: TensorDataset, steps: int) -> dict[str, float]:
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    module, private, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(dataset, batch_size=_BATCH),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    return _loop(loader, steps, module, private)


def _fit(dataset: TensorDataset, steps: int) -> dict[str, float]:
    spent: dict[str, float] = defaultdict(float)
    found: list[dict[str, float]] = []

    @contextmanager
    def timed(owner: type, name: str) -> Iterator[None]:
        inner: Callable[..., object] = getattr(owner, name)

        def outer(*args: object, **kwargs: object) -> object:
            start = _now()
            try:
                return inner(*args, **kwargs)
            finally:
                spent[name] += _now() - start

        with patch.object(owner, name, outer):
            yield

    last = _now()

    def on_step(_step: int) -> None:
        nonlocal last
        total, last = _now() - last, _now()
        passes = spent["_losses"] + spent["backward"] + spent["add"]
        parts = [
            total - spent["_accumulate"] - spent["_update"],
            spent["_accumulate"] - passes,
            spent["_losses"],
            spent["backward"],
            spent["add"],
            spent["finish"],
            spent["_update"] - spent["finish"],
        ]
        found.append(dict(zip(_FIT, parts, strict=True)))
        spent.clear()

    plan = Plan(
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        sample_rate=_BATCH / _RECORDS,
        steps=steps + _WARM,
        expected_batch_size=float(_BATCH),
        delta=1e-5,
    )
    model = nn.Linear(8, 1)

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(model(x).squeeze(1), y, reduction="none")

    with ExitStack() as stack:
        for name in ("_accumulate", "_losses", "_update"):
            stack.enter_context(timed(_FitLoop, name))
        for name in ("backward", "add", "finish"):
            stack.enter_context(timed(PrivateStep, name))
        fit(model, loss, dataset, plan, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), on_step=on_step)
    return {name: _milliseconds([step[name] for step in found[_WARM:]]) for name in _FIT}


def _milliseconds(seconds: Sequence[float]) -> float:
    return 1e3 * statistics.quantiles(seconds, n=10)[0]


def table_of_parts(parts: dict[str, dict[str, float]], facts: dict[str, object]) -> str:
    """The two tables, in Markdown."""
    where = f"{facts['processor']}, torch {facts['torch']}, load {facts['load']}, {str(facts['date'])[:10]}"
    lines = [
        f"Process time in milliseconds, the first decile of the steps, one thread ({where}).",
        "",
        "| part of a custom loop | plain | private | what it does |",
        "|---|---|---|---|",
        *(f"| {name} | {parts['plain'][name]:.2f} | {parts['loop'][name]:.2f} | {_LOOP[name]} |" for name in _LOOP),
        f"| together | {sum(parts['plain'].values()):.2f} | {sum(parts['loop'].values()):.2f} | |",
        "",
        "| part of a step of `fit` | private | what it does |",
        "|---|---|---|",
        *(f"| {name} | {parts['fit'][name]:.2f} | {_FIT[name]} |" for name in _FIT),
        f"| together | {sum(parts['fit'].values()):.2f} | |",
    ]
    return "\n".join(lines)


def write_parts(table: str) -> None:
    """Put the tables into the page."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(_BEGIN)
    PAGE.write_text(f"{before}{_BEGIN}\n\n{table}\n\n{_END}{rest.partition(_END)[2]}", encoding="utf-8")
