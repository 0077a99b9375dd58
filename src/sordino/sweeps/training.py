"""Training one cell, and measuring it on public records while it is trained (floor 6)."""

import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from sordino.data import DataSet
from sordino.mechanisms import standard_normal
from sordino.randomness import Randomness
from sordino.recipes.running import losses
from sordino.sweeps.cell import Cell
from sordino.sweeps.models import build, prepare
from sordino.sweeps.settings import Settings
from sordino.training import Performance, Plan
from sordino.training.averaging import TailAverage
from sordino.training.trainer import fit

__all__ = ["Outcome", "Point", "train_cell"]

_CHUNK = 4096
# A course is measured at the end of so many epochs at most, and on so many training records.
_POINTS, _TRAIN_RECORDS = 25, 10_000
_FEW = 16
OnStep = Callable[[int], None]


@dataclass(frozen=True, kw_only=True)
class Point:
    """A cell after some of its steps.

    Args:
        epoch: expected passes over the data so far.
        accuracy: share of public test records.
        train_accuracy: share of the first training records, at most 10 000.
        epsilon: ε so far, or None where nothing is guaranteed.
    """

    epoch: float
    accuracy: float
    train_accuracy: float
    epsilon: float | None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a cell came to. A failed one has words in `failure` and nothing else.

    Args:
        accuracy: share of public test records, of the model at the end (its average, where there is one).
        train_accuracy: share of the first training records.
        epsilon: ε, or None where nothing is guaranteed.
        noise_multiplier: σ that was used.
        course: the model during training; without averaging.
        seconds: of the processor (one thread) for the training, without measuring.
        memory: megabytes by which the process grew while training; None where the system doesn't tell, or where the
            process had trained other cells before, whose memory it would use again.
        failure: what went wrong.
    """

    accuracy: float = 0.0
    train_accuracy: float = 0.0
    epsilon: float | None = None
    noise_multiplier: float = 0.0
    course: tuple[Point, ...] = ()
    seconds: float = 0.0
    memory: float | None = None
    failure: str | None = None


def train_cell(cell: Cell, dataset: DataSet) -> Outcome:
    """Train one cell on public records, and measure.

    Guarantee: for the arm "private" that of ``cell.guarantee()``, with a fixed seed; for the others none.

    The seed of the cell's noise, batches and weights follows from all of its settings, so no two cells share noise.
    Only private components are shared, by cells of one seed.
    """
    randomness = Randomness(seed=int(cell.key, 16), reproducible=True)
    told = cell.settings
    train, test = prepare(cell, dataset)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(cell.key[:8], 16))
        model = build(told, tuple(train[0].shape[1:]), len(dataset.labels))
    _warm_up(cell, model, train)
    watch = _Watch(cell, model, train, test)
    measure_from = _memory("VmRSS:", reset=True)
    started = time.process_time()
    (_train_privately if told.arm in ("private", "clipping without noise") else _train_unclipped)(
        cell, model, train, watch, randomness
    )
    seconds = time.process_time() - started - watch.seconds
    peak = _memory("VmHWM:")
    return Outcome(
        accuracy=_accuracy(model, test),
        train_accuracy=_accuracy(model, _first(train)),
        epsilon=cell.epsilon,
        noise_multiplier=float(cell.plan.at(0).noise_multiplier),
        course=tuple(watch.points),
        seconds=seconds,
        memory=None if peak is None or measure_from is None else max(0.0, peak - measure_from),
    )


# ── two ways to train ───────────────────────────────────────────────────────────────────────────────────────


def _train_privately(
    cell: Cell, model: nn.Module, train: tuple[Tensor, Tensor], on_step: OnStep, randomness: Randomness
) -> None:
    told = cell.settings
    result = fit(
        model,
        losses,
        train,
        cell.plan,
        optimizer=lambda parameters: _optimizer(told, parameters),
        scheduler=lambda optimizer: _schedule(told, optimizer),
        performance=Performance(microbatch_size=_CHUNK),
        randomness=randomness,
        averaging=TailAverage(fraction=told.averaging) if told.averaging else None,
        on_step=on_step,
        progress=False,
    )
    if result.interrupted:
        # `fit` ends an interrupted run in order; a cell that was cut off is none.
        raise KeyboardInterrupt


def _train_unclipped(
    cell: Cell, model: nn.Module, train: tuple[Tensor, Tensor], on_step: OnStep, randomness: Randomness
) -> None:
    """The same steps without clipping, with noise of σC on the sum or without. Protects nobody: public records only."""
    plan: Plan = cell.plan
    parameters = list(model.parameters())
    optimizer = _optimizer(cell.settings, parameters)
    schedule = _schedule(cell.settings, optimizer)
    stddev = plan.at(0).mechanism.stddev if cell.settings.arm == "noise without clipping" else 0.0
    batches = plan.sampling.batches(population=len(train[1]), first_step=0, steps=plan.steps, randomness=randomness)
    for step, indices in enumerate(batches):
        optimizer.zero_grad(set_to_none=False)
        for chunk in torch.from_numpy(indices).split(_CHUNK):
            if len(chunk):
                losses(model, train[0][chunk], train[1][chunk]).sum().backward()
        for place, parameter in enumerate(parameters):
            stream = randomness.stream("sweep", step=step, tensor=place)
            noise = standard_normal(parameter.numel(), stream).reshape(parameter.shape) if stddev else 0.0
            total = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = ((total + stddev * noise) / plan.at(0).expected_batch_size).to(parameter)
        optimizer.step()
        schedule.step()
        on_step(step + 1)


def _optimizer(told: Settings, parameters: list[nn.Parameter]) -> Optimizer:
    return SGD(parameters, lr=told.learning_rate, momentum=told.momentum, nesterov=told.momentum > 0)


def _schedule(told: Settings, optimizer: Optimizer) -> LambdaLR:
    """From the first learning rate to the final one in a straight line, then flat."""
    last = (told.final_learning_rate or told.learning_rate) / told.learning_rate

    def factor(step: int) -> float:
        return 1 + (last - 1) * min(1.0, step / told.decay_steps) if told.decay_steps else 1.0

    return LambdaLR(optimizer, factor)


def _warm_up(cell: Cell, model: nn.Module, train: tuple[Tensor, Tensor]) -> None:
    """One step on a few records and a copy: what is made once a process is no part of a cell's time and memory."""
    few = (train[0][:_FEW], train[1][:_FEW])
    small = replace(cell.plan, steps=1, sample_rate=1.0)
    fit(deepcopy(model), losses, few, small, randomness=Randomness(), progress=False)


# ── measuring ───────────────────────────────────────────────────────────────────────────────────────────────


class _Watch:
    """Measures the model at the end of some epochs, and knows how long that took."""

    def __init__(self, cell: Cell, model: nn.Module, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]) -> None:
        self._cell, self._model, self._records = cell, model, (_first(train), test)
        steps, epoch = cell.plan.steps, cell.source.records / cell.settings.batch_size
        count = max(1, min(_POINTS, round(steps / epoch)))
        self._at = {max(1, round(steps * (place + 1) / count)) for place in range(count)}
        self._epoch = epoch
        self.points: list[Point] = []
        self.seconds = 0.0

    def __call__(self, step: int) -> None:
        if step not in self._at:
            return
        began = time.process_time()
        found = self._cell.guarantee(step)
        seen, test = self._records
        self.points.append(
            Point(
                epoch=step / self._epoch,
                accuracy=_accuracy(self._model, test),
                train_accuracy=_accuracy(self._model, seen),
                epsilon=None if found is None else found.epsilon,
            )
        )
        self.seconds += time.process_time() - began


def _first(records: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return records[0][:_TRAIN_RECORDS], records[1][:_TRAIN_RECORDS]


@torch.no_grad()
def _accuracy(model: nn.Module, records: tuple[Tensor, Tensor]) -> float:
    chunks = zip(records[0].split(_CHUNK), records[1].split(_CHUNK), strict=True)
    right = [(model(features).argmax(1) == labels).sum() for features, labels in chunks]
    return float(torch.stack(right).sum()) / len(records[1])


def _memory(field: str, *, reset: bool = False) -> float | None:
    """One field of this process's memory in megabytes; None where there is no /proc. `reset` lowers the peak to now."""
    try:
        if reset:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(field)), None)
