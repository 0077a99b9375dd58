"""`run`: all cells of a sweep that are not finished yet, side by side, each kept as soon as it is done."""

import fcntl
import hashlib
import json
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from sordino import checks
from sordino.data import DatasetSplits
from sordino.errors import InvalidArgument, SordinoError
from sordino.mechanisms import PrivateSecondMoment, standard_normal
from sordino.mechanisms.calibration import GaussianBudget
from sordino.randomness import KeyedRNG
from sordino.recipes import cnn, logistic, mlp
from sordino.recipes.training_config import cross_entropy_per_record
from sordino.runs.transcript import decode_number, encode_number
from sordino.sweeps.config import Experiment, ExperimentSettings
from sordino.sweeps.sweep import Sweep
from sordino.training import PerformanceOptions, Plan
from sordino.training.averaging import TailWeightAverage
from sordino.training.fit import fit

__all__ = [
    "CurvePoint",
    "ExperimentResult",
    "FILE",
    "OnCell",
    "Prepared",
    "Store",
    "build",
    "directions",
    "prepare",
    "result_to_json",
    "run_sweep",
    "train_cell",
]


# ----------------------------------------------------------------------------------------------------------------------
# What a cell trains: the recipes' models, and a hidden layer of rectifiers on the features as they are.
# ----------------------------------------------------------------------------------------------------------------------


Prepared = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Features and labels to train on, and to measure on."""


def build(settings: ExperimentSettings, shape: tuple[int, ...], classes: int) -> nn.Module:
    """A new model with random weights from torch's generator."""
    match settings.model:
        case "logistic":
            return logistic(shape, classes)
        case "mlp":
            return mlp(shape, classes, width=settings.width)
        case "cnn":
            return cnn(shape, classes)
        case _:
            hidden = nn.Linear(math.prod(shape), settings.width)
            return nn.Sequential(nn.Flatten(), hidden, nn.ReLU(), nn.Linear(settings.width, classes))


def prepare(cell: Experiment, dataset: DatasetSplits) -> Prepared:
    """The records as the model takes them: as they are, or on private principal components."""
    assert dataset.test is not None
    train, test = dataset.train.tensors(), dataset.test.tensors()
    if not cell.settings.pca:
        return train, test
    # Directions come from records of norm 1; the records are projected as they are.
    basis = _directions_for(cell, train[0])[:, : cell.settings.pca]
    return (train[0].flatten(1) @ basis, train[1]), (test[0].flatten(1) @ basis, test[1])


def _directions_for(cell: Experiment, features: Tensor) -> Tensor:
    """Released once for all cells with the same data, noise and seed; the last ones are remembered."""
    told = cell.settings
    words = repr((cell.source, told.pca_noise_multiplier, told.seed))
    if words not in _RELEASED:
        seed = int(hashlib.sha256(words.encode()).hexdigest()[:24], 16)
        rng = KeyedRNG(seed=seed, reproducible=True)
        _RELEASED.clear()
        _RELEASED[words] = directions(_unit(features), noise_multiplier=told.pca_noise_multiplier, rng=rng).float()
    return _RELEASED[words]


_RELEASED: dict[str, Tensor] = {}


def directions(rows: Tensor, *, noise_multiplier: float, rng: KeyedRNG) -> Tensor:
    """The principal directions about 0, as columns [d, d], of rows with norm at most 1: that of most weight first.

    Guarantee: post-processing of one noisy matrix of second moments, ``Gaussian(noise_multiplier)``.

    References:
        Abadi et al. 2016, section 4; Dwork, Talwar, Thakurta, Zhang 2014, algorithm 1.
    """
    mechanism = PrivateSecondMoment(
        budget=GaussianBudget(noise_multiplier=noise_multiplier),
        data_norm=1.0,
        columns=rows.shape[1],
        rng=rng,
    )
    moments = mechanism.release(rows.numpy().astype(np.float64))
    _, vectors = np.linalg.eigh(moments)  # in rising order
    return torch.from_numpy(np.ascontiguousarray(vectors[:, ::-1]))


def _unit(features: Tensor) -> Tensor:
    """Each record flat and with norm 1, by itself."""
    flat = features.flatten(1)
    return flat / flat.norm(dim=1, keepdim=True).clamp_min(1e-12)


# ----------------------------------------------------------------------------------------------------------------------
# Training one cell, and measuring it on public records while it is trained.
# ----------------------------------------------------------------------------------------------------------------------


_CHUNK = 4096
# A course is measured at the end of so many epochs at most, and on so many training records.
_POINTS, _TRAIN_RECORDS = 25, 10_000
_FEW = 16
OnStep = Callable[[int], None]


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
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
class ExperimentResult:
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
    course: tuple[CurvePoint, ...] = ()
    seconds: float = 0.0
    memory: float | None = None
    failure: str | None = None


def train_cell(cell: Experiment, dataset: DatasetSplits) -> ExperimentResult:
    """Train one cell on public records, and measure.

    Guarantee: for the arm "private" that of ``cell.guarantee()``, with a fixed seed; for the others none.

    The seed of the cell's noise, batches and weights follows from all of its settings, so no two cells share noise.
    Only private components are shared, by cells of one seed.
    """
    rng = KeyedRNG(seed=int(cell.key, 16), reproducible=True)
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
        cell, model, train, watch, rng
    )
    seconds = time.process_time() - started - watch.seconds
    peak = _memory("VmHWM:")
    return ExperimentResult(
        accuracy=_accuracy(model, test),
        train_accuracy=_accuracy(model, _first(train)),
        epsilon=cell.epsilon,
        noise_multiplier=float(cell.plan.step_plan(0).noise_multiplier),
        course=tuple(watch.points),
        seconds=seconds,
        memory=None if peak is None or measure_from is None else max(0.0, peak - measure_from),
    )


# ── two ways to train ───────────────────────────────────────────────────────────────────────────────────────


def _train_privately(
    cell: Experiment, model: nn.Module, train: tuple[Tensor, Tensor], on_step: OnStep, rng: KeyedRNG
) -> None:
    told = cell.settings
    result = fit(
        model,
        cross_entropy_per_record,
        train,
        cell.plan,
        optimizer=lambda parameters: _optimizer(told, parameters),
        scheduler=lambda optimizer: _schedule(told, optimizer),
        performance=PerformanceOptions(microbatch_size=_CHUNK),
        rng=rng,
        averaging=TailWeightAverage(fraction=told.averaging) if told.averaging else None,
        on_step=on_step,
        progress=False,
    )
    if result.interrupted:
        # `fit` ends an interrupted run in order; a cell that was cut off is none.
        raise KeyboardInterrupt


def _train_unclipped(
    cell: Experiment, model: nn.Module, train: tuple[Tensor, Tensor], on_step: OnStep, rng: KeyedRNG
) -> None:
    """The same steps without clipping, with noise of σC on the sum or without. Protects nobody: public records only."""
    plan: Plan = cell.plan
    parameters = list(model.parameters())
    optimizer = _optimizer(cell.settings, parameters)
    schedule = _schedule(cell.settings, optimizer)
    stddev = plan.step_plan(0).mechanism.stddev if cell.settings.arm == "noise without clipping" else 0.0
    batches = plan.sampling.batches(dataset_size=len(train[1]), first_step=0, steps=plan.steps, rng=rng)
    for step, indices in enumerate(batches):
        optimizer.zero_grad(set_to_none=False)
        for chunk in torch.from_numpy(indices).split(_CHUNK):
            if len(chunk):
                cross_entropy_per_record(model, train[0][chunk], train[1][chunk]).sum().backward()
        for place, parameter in enumerate(parameters):
            stream = rng.stream("sweep", step=step, tensor=place)
            noise = standard_normal(parameter.numel(), stream).reshape(parameter.shape) if stddev else 0.0
            total = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = ((total + stddev * noise) / plan.step_plan(0).expected_batch_size).to(parameter)
        optimizer.step()
        schedule.step()
        on_step(step + 1)


def _optimizer(told: ExperimentSettings, parameters: list[nn.Parameter]) -> Optimizer:
    return SGD(parameters, lr=told.learning_rate, momentum=told.momentum, nesterov=told.momentum > 0)


def _schedule(told: ExperimentSettings, optimizer: Optimizer) -> LambdaLR:
    """From the first learning rate to the final one in a straight line, then flat."""
    last = (told.final_learning_rate or told.learning_rate) / told.learning_rate

    def factor(step: int) -> float:
        return 1 + (last - 1) * min(1.0, step / told.decay_steps) if told.decay_steps else 1.0

    return LambdaLR(optimizer, factor)


def _warm_up(cell: Experiment, model: nn.Module, train: tuple[Tensor, Tensor]) -> None:
    """One step on a few records and a copy: what is made once a process is no part of a cell's time and memory."""
    few = (train[0][:_FEW], train[1][:_FEW])
    small = replace(cell.plan, steps=1, sample_rate=1.0)
    fit(deepcopy(model), cross_entropy_per_record, few, small, rng=KeyedRNG(), progress=False)


# ── measuring ───────────────────────────────────────────────────────────────────────────────────────────────


class _Watch:
    """Measures the model at the end of some epochs, and knows how long that took."""

    def __init__(
        self, cell: Experiment, model: nn.Module, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]
    ) -> None:
        self._cell, self._model, self._records = cell, model, (_first(train), test)
        steps, epoch = cell.plan.steps, cell.source.records / cell.settings.batch_size
        count = max(1, min(_POINTS, round(steps / epoch)))
        self._at = {max(1, round(steps * (place + 1) / count)) for place in range(count)}
        self._epoch = epoch
        self.points: list[CurvePoint] = []
        self.seconds = 0.0

    def __call__(self, step: int) -> None:
        if step not in self._at:
            return
        began = time.process_time()
        found = self._cell.guarantee(step)
        seen, test = self._records
        self.points.append(
            CurvePoint(
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


# ----------------------------------------------------------------------------------------------------------------------
# Finished cells on disk: one JSON line each, written in one piece.
# ----------------------------------------------------------------------------------------------------------------------


FILE = "cells.jsonl"


class Store:
    """The cells that were trained, in one folder.

    A line is appended by one write and forced to disk, so a crash can cut off the last line at most; such a line is
    passed over, and its cell is trained again. Later lines of a cell replace earlier ones.

    Args:
        folder: made if it is not there.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._path = self.folder / FILE

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Nobody else may write to the folder meanwhile.

        Raises:
            InvalidArgument: somebody does.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / ".lock").open("w", encoding="ascii") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise InvalidArgument(
                    f"out must be a folder that no other sweep writes to, got {str(self.folder)!r}. Wait, or name "
                    "another."
                ) from error
            yield

    def outcomes(self, cells: Iterable[Experiment]) -> dict[str, ExperimentResult]:
        """What is known of `cells`, by key."""
        wanted, found = {cell.key for cell in cells}, dict[str, ExperimentResult]()
        for line in self._lines():
            try:
                body = json.loads(line)
                if body["key"] in wanted:
                    found[body["key"]] = _outcome(body["outcome"])
            except (ValueError, KeyError, TypeError, InvalidArgument):
                continue
        return found

    def keep(self, cell: Experiment, outcome: ExperimentResult) -> None:
        """Write one cell."""
        body = {"key": cell.key, "settings": asdict(cell.settings), "outcome": result_to_json(outcome)}
        line = json.dumps(body, ensure_ascii=False, allow_nan=False) + "\n"
        handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            size = os.fstat(handle).st_size
            torn = size > 0 and os.pread(handle, 1, size - 1) != b"\n"
            os.write(handle, (("\n" if torn else "") + line).encode())
            os.fsync(handle)
        finally:
            os.close(handle)

    def _lines(self) -> list[str]:
        return self._path.read_text(encoding="utf-8", errors="replace").split("\n") if self._path.is_file() else []


def result_to_json(outcome: ExperimentResult) -> dict[str, object]:
    """The outcome as JSON types, in which an infinite ε is the string "inf"."""
    course = [{**asdict(point), "epsilon": encode_number(point.epsilon)} for point in outcome.course]
    return {**asdict(outcome), "epsilon": encode_number(outcome.epsilon), "course": course}


def _outcome(body: Mapping[str, object]) -> ExperimentResult:
    course = tuple(
        CurvePoint(**{**point, "epsilon": decode_number(point["epsilon"])})
        for point in cast("list[dict[str, float]]", body["course"])
    )
    return ExperimentResult(**{**body, "epsilon": decode_number(body["epsilon"]), "course": course})


# ----------------------------------------------------------------------------------------------------------------------
# `run`: all cells of a sweep that are not finished yet, side by side, each kept as soon as it is done.
# ----------------------------------------------------------------------------------------------------------------------


OnCell = Callable[[Experiment, ExperimentResult, int], None]
"""Called with a cell, what it came to, and how many cells are finished."""
_Train = Callable[[Experiment], ExperimentResult]


def run_sweep(
    sweep: Sweep, folder: str | Path, *, jobs: int = 1, on_cell: OnCell | None = None
) -> dict[str, ExperimentResult]:
    """Train the cells that are not in `folder` yet, and keep each as soon as it is done.

    Each cell runs on one thread. A cell that fails is noted and the others go on; it is tried again the next time. An
    interrupt leaves what is finished, and the next call goes on from there.

    Guarantee: none for the results together. The data are public; each cell's ε is what one run with its settings
    would guarantee on private records if they had been fixed beforehand.

    Args:
        sweep: what to train.
        folder: of the results; made if it is not there.
        jobs: cells at a time, ≥ 1. More than one run in processes of their own; so does each cell, one after the
            other, when a panel shows memory.
        on_cell: called after every cell.

    Returns:
        What every cell came to, by key.

    Raises:
        DataUnavailable: the data can't be had.
        InvalidArgument: another sweep writes to the folder.
    """
    checks.integer(1, jobs=jobs)
    store = Store(folder)
    with store.writing():
        found = {key: outcome for key, outcome in store.outcomes(sweep.cells).items() if outcome.failure is None}
        left = [cell for cell in sweep.cells if cell.key not in found]
        if not left:
            return found
        # Here, so that data that can't be had are one error and not one a cell.
        dataset = sweep.source.load()
        alone = jobs == 1 and not sweep.is_isolated
        for cell, outcome in _here(left, dataset) if alone else _beside(left, jobs, isolated=sweep.is_isolated):
            store.keep(cell, outcome)
            found[cell.key] = outcome
            if on_cell is not None:
                on_cell(cell, outcome, len(found))
    return found


def run_experiment(cell: Experiment, dataset: DatasetSplits) -> ExperimentResult:
    """Train one cell; what goes wrong becomes its outcome. The data are public, so the message may be told."""
    try:
        return train_cell(cell, dataset)
    except Exception as error:
        return ExperimentResult(
            failure=str(error) if isinstance(error, SordinoError) else f"{type(error).__name__}: {error}"
        )


def _here(cells: Sequence[Experiment], dataset: DatasetSplits) -> Iterator[tuple[Experiment, ExperimentResult]]:
    for cell in cells:
        with _one_thread():
            outcome = run_experiment(cell, dataset)
        yield cell, replace(outcome, memory=None)


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


# ── processes ───────────────────────────────────────────────────────────────────────────────────────────────


class _Worker:
    """A process that trains one cell after another."""

    def __init__(self) -> None:
        # A fresh interpreter: a copy of this one would inherit the state of torch's threads.
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self.cell: Experiment | None = None

    def give(self, cell: Experiment) -> None:
        self.cell = cell
        with suppress(OSError):  # a process that died is found by `take`
            self.pipe.send(cell)

    def take(self) -> tuple[Experiment, ExperimentResult]:
        """The cell that is done; or that it failed because the process died."""
        assert self.cell is not None
        cell, self.cell = self.cell, None
        try:
            return cell, cast("ExperimentResult", self.pipe.recv())
        except (EOFError, OSError):
            self.process.join()
            return cell, ExperimentResult(failure=f"the process ended with exit code {self.process.exitcode}")

    @property
    def is_alive(self) -> bool:
        return self.process.exitcode is None

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _work(pipe: Connection) -> None:
    """What a worker does until its pipe is closed."""
    torch.set_num_threads(1)
    dataset: DatasetSplits | None = None
    try:
        while True:
            cell = cast("Experiment", pipe.recv())
            dataset = cell.source.load() if dataset is None else dataset
            pipe.send(run_experiment(cell, dataset))
    except (EOFError, KeyboardInterrupt, BrokenPipeError):
        return


def _beside(cells: Sequence[Experiment], jobs: int, *, isolated: bool) -> Iterator[tuple[Experiment, ExperimentResult]]:
    left, workers = list(cells), [_Worker() for _ in range(min(jobs, len(cells)))]
    try:
        for worker in workers:
            worker.give(left.pop(0))
        while busy := [worker for worker in workers if worker.cell is not None]:
            ready = wait([worker.pipe for worker in busy])
            for worker in [worker for worker in busy if worker.pipe in ready]:
                cell, outcome = worker.take()
                yield cell, outcome if isolated else replace(outcome, memory=None)
                if left:
                    if isolated or not worker.is_alive:
                        worker.end()
                        workers[workers.index(worker)] = worker = _Worker()
                    worker.give(left.pop(0))
    finally:
        for worker in workers:
            worker.end()
