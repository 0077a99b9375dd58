"""The experiments of docs/experiments.md: grids of trainings on public data, with a table and a picture.

    ./run experiment fashion-noise            train what is not finished yet, then draw
    ./run experiment fashion-noise --quick    the same grid on few records and steps, to see that it runs
    ./run experiment fashion-noise --full     the sources' length, three seeds a point: hours, for a night
    ./run experiment fashion-noise --plan     only say how many cells there are and what ε each has

A file `NAME.toml` beside this one says what is varied. [base] holds for every cell, [grid] (or each of several
[[grids]]) is varied in all combinations, and cells that differ in `seed` alone are one point. [[panels]] are the axes
of the picture. [full] has what `--full` replaces: values of [base], the seeds of all grids, the note.
Every finished cell is one line of `OUT/cells.jsonl`: a command that was cut off goes on from there, and a cell whose
settings were changed is trained again. The data are public. ε of a cell is what one run with its settings, fixed
in advance, would guarantee on private records; cells without clipping or without noise have no guarantee, and say so.
"""

import argparse
import hashlib
import json
import math
import multiprocessing
import os
import sys
import textwrap
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from copy import deepcopy
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache, cached_property
from itertools import product
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR

from sordino import accounting
from sordino.checks import one_of
from sordino.clipping import Clipping, QuantileClipping, get_clipping
from sordino.data import load_dataset
from sordino.data.catalog import CATALOG
from sordino.definitions import Guarantee, format_upper_bound
from sordino.errors import InvalidArgument
from sordino.events import Event, Gaussian, compose
from sordino.mechanisms import PrivateSecondMoment, standard_normal
from sordino.mechanisms.calibration import GaussianBudget
from sordino.plot_style import COLORS, METHOD_COLORS, SERIF, STYLE
from sordino.randomness import KeyedRNG
from sordino.recipes import cnn, logistic, mlp, scattering_recipes
from sordino.recipes.training_config import cross_entropy_per_record
from sordino.research import ProjectedClipping
from sordino.training import PerformanceOptions, Plan
from sordino.training.fit import fit

HERE = Path(__file__).parent
NO_GUARANTEE = "no guarantee"
MODES = ("private", "noise without clipping", "clipping without noise", "neither")
CHUNK, CURVE_POINTS, TRAIN_RECORDS_MEASURED = 4096, 25, 10_000
QUICK_RECORDS, QUICK_STEPS = 6000, 5

Value = str | int | float
Pair = tuple[Tensor, Tensor]


# ── one cell: settings, plan, guarantee ─────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One training. All of it follows from these settings, the seed of its weights, batches and noise included.

    Args:
        data: a named public dataset, or one of `TASKS`; its first `records` training records are used.
        mode: one of `MODES`. Only the first protects anybody.
        model: logistic, mlp (tanh, records of norm 2), cnn, or relu (one hidden layer on the features as they are).
        pca: private principal components kept, released with `pca_noise_multiplier`; 0 takes the features.
        target_epsilon: of everything in the cell; None where the noise multiplier is given.
        clipping: a name of `sordino.clipping.get_clipping`, or "quantile".
        projections: r of norms estimated by random projections; 0 for exact norms.
        final_learning_rate: reached linearly after `decay_steps`.
    """

    data: str
    records: int
    mode: str = "private"
    model: str = "logistic"
    width: int = 64
    pca: int = 0
    pca_noise_multiplier: float = 7.0
    noise_multiplier: float | None = None
    target_epsilon: float | None = None
    delta: float = 1e-5
    batch_size: float
    max_grad_norm: float = 1.0
    clipping: str = "flat"
    projections: int = 0
    steps: int
    learning_rate: float
    final_learning_rate: float | None = None
    decay_steps: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        one_of(MODES, mode=self.mode)
        one_of(("logistic", "mlp", "cnn", "relu"), model=self.model)
        if (self.noise_multiplier is None) == (self.target_epsilon is None) and "noise_multiplier" not in self.unused:
            raise InvalidArgument("a cell must have noise_multiplier or target_epsilon, got both or neither. Give one.")

    @property
    def unused(self) -> tuple[str, ...]:
        """Settings that have no part in what is trained."""
        clipping, noise = ("clipping", "projections"), ("noise_multiplier", "target_epsilon")
        return {
            "private": (),
            "noise without clipping": clipping,
            "clipping without noise": noise,
            "neither": (*clipping, *noise, "max_grad_norm"),
        }[self.mode]

    @property
    def canonical(self) -> "Cell":
        """The same training, with every unused setting at its default: equal trainings are one cell."""
        names = {item.name: item.default for item in fields(self) if item.name in self.unused}
        return replace(self, **names)

    @property
    def key(self) -> str:
        """A fingerprint of all settings."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:24]

    @cached_property
    def plan(self) -> Plan:
        """The plan. Without clipping its clipping norm only says how much noise there is."""
        draft = Plan(
            noise_multiplier=0.0,
            max_grad_norm=self.max_grad_norm,
            sample_rate=self.batch_size / self.records,
            steps=self.steps,
            expected_batch_size=self.batch_size,
            delta=self.delta,
            dataset_size_is_public=True,
            clipping=self._clipping(0.0),
        )
        noise = self.noise_multiplier or 0.0
        if self.target_epsilon is not None:
            noise = accounting.calibrate_noise_multiplier(
                lambda candidate: self._with_components(replace(draft, noise_multiplier=candidate).event()),
                target_epsilon=self.target_epsilon,
                delta=self.delta,
                neighboring_relation=draft.neighboring_relation,
            )
        return replace(draft, noise_multiplier=noise, clipping=self._clipping(noise))

    def _clipping(self, noise_multiplier: float) -> Clipping:
        if self.projections:
            return ProjectedClipping(projections=self.projections)
        if self.clipping == "quantile":
            # A twentieth of the batch is usual; the counts may not cost more than the gradient.
            return QuantileClipping(quantile=0.5, count_noise=max(self.batch_size / 20, noise_multiplier))
        return get_clipping(self.clipping)

    def _with_components(self, event: Event) -> Event:
        return compose([Gaussian(noise_multiplier=self.pca_noise_multiplier), event]) if self.pca else event

    def guarantee(self, steps: int | None = None) -> Guarantee | None:
        """What the first `steps` steps (all by default) would guarantee on private records; None: nothing."""
        if self.mode != "private":
            return None
        found = self.plan.guarantee(steps=steps)
        spent = accounting.epsilon(
            self._with_components(self.plan.event(steps)), self.delta, neighboring_relation=found.neighboring_relation
        )
        return replace(found, epsilon=spent.upper, accountant=spent.accountant)

    def delta_after(self, steps: int, epsilon: float) -> float:
        """δ at which the first `steps` steps would be (ε, δ)-private: the certified upper end."""
        event, relation = self._with_components(self.plan.event(steps)), self.plan.neighboring_relation
        return accounting.delta(event, epsilon, neighboring_relation=relation).upper

    @cached_property
    def epsilon(self) -> float | None:
        """ε of the cell, or None where nothing is guaranteed."""
        found = self.guarantee()
        return None if found is None else found.epsilon

    def value(self, name: str) -> Value | None:
        """A setting, σ as it was calibrated; None where the setting has no part in the training."""
        if name in self.unused:
            return None
        found = self.plan.step_plan(0).noise_multiplier if name == "noise_multiplier" else getattr(self, name)
        return float(found) if name == "noise_multiplier" else found


# ── an experiment from its file ─────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One pair of axes.

    Args:
        x: a setting that is varied, "epoch", "epsilon" (of the cell), or "spent" (ε so far, while it is trained).
        y: accuracy, loss (on training records), epsilon, delta (so far, at an ε of `epsilons`), noise_multiplier,
            seconds (of the processor) or memory (megabytes).
        lines: the setting that tells lines apart.
        epsilons: for delta: ε of each line, by the value of its setting.
        where: settings of the panel's cells; others that are varied have the value of [base]. "none" is no value, "all"
            every one.
        marks: values from elsewhere, each with x, y and words.
    """

    x: str
    y: str = "accuracy"
    lines: str | None = None
    where: Mapping[str, Value] = field(default_factory=dict)
    logarithmic: bool = False
    title: str = ""
    marks: Sequence[Mapping[str, Value]] = ()
    epsilons: Mapping[str, float] = field(default_factory=dict)
    low: float | None = None


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A grid of trainings on public records, and how their results are drawn."""

    name: str
    title: str
    note: str
    cells: tuple[Cell, ...]
    axes: tuple[str, ...]
    base: Mapping[str, Value]
    panels: tuple[Panel, ...]

    def cells_of(self, panel: Panel) -> tuple[Cell, ...]:
        """The cells that a panel shows, each point once."""
        fixed = {name: value for name, value in self.base.items() if name in self.axes}
        # ε follows from any of these, so all of their values belong to one curve.
        free = (panel.x, panel.lines, *(("noise_multiplier", "target_epsilon") if panel.x == "epsilon" else ()))
        wanted = {name: value for name, value in fixed.items() if name not in free} | dict(panel.where)

        def shows(cell: Cell) -> bool:
            for name, value in wanted.items():
                other = getattr(cell, name) != (None if value == "none" else value)
                if name not in cell.unused and value != "all" and other:
                    return False
            return True

        return tuple(cell for cell in self.cells if shows(cell))


def read_experiment(path: Path, *, quick: bool = False, full: bool = False) -> Experiment:
    """The experiment that a file declares; no data are read.

    Raises:
        InvalidArgument: a key, setting or value that is unknown or missing.
    """
    body = tomllib.loads(path.read_text(encoding="utf-8"))
    _only(body, ("title", "note", "data", "base", "grid", "grids", "panels", "full"), path.name)
    base, grids = body["base"], body.get("grids") or [body["grid"]]
    note = body.get("note", "")
    if full:
        longer = body.get("full", {})
        _only(longer, ("note", "seed", *base), f"{path.name} [full]")
        note = longer.get("note", note)
        base = base | {name: value for name, value in longer.items() if name not in ("note", "seed")}
        grids = [grid | {"seed": longer.get("seed", [0, 1, 2])} for grid in grids]
    panels = tuple(_build(Panel, table, f"{path.name} [[panels]] {table.get('title', '')}") for table in body["panels"])
    cells: dict[str, Cell] = {}
    for grid in grids:
        for values in product(*(value if isinstance(value, list) else [value] for value in grid.values())):
            varied = dict(zip(grid, values, strict=True))
            cell = _cell(body["data"], base, varied, path.name, quick=quick)
            cells.setdefault(cell.key, cell)
    axes = tuple(dict.fromkeys(name for grid in grids for name in grid if name != "seed"))
    # A value of [base] that every grid replaces fixes nothing.
    held = {
        name: value for name, value in base.items() if any(name not in grid or value in grid[name] for grid in grids)
    }
    found = Experiment(
        name=path.stem,
        title=body["title"],
        note=note,
        cells=tuple(cells.values()),
        axes=axes,
        base=held,
        panels=panels,
    )
    for panel in panels:
        one_of((*axes, "epoch", "epsilon", "spent"), x=panel.x)
        one_of(("accuracy", "loss", "epsilon", "delta", "noise_multiplier", "seconds", "memory"), y=panel.y)
        if panel.y == "delta":
            one_of(("epoch",), x=panel.x)
            wanted = {_shown(cell.value(panel.lines)) for cell in found.cells_of(panel)} if panel.lines else set()
            if not wanted or wanted - set(panel.epsilons):
                raise InvalidArgument(
                    f"epsilons must hold an ε for each line of {panel.title!r}, got {dict(panel.epsilons)}. "
                    f"Give one for {', '.join(sorted(wanted)) or 'each value of lines'}."
                )
        _check_points(found, panel)
    return found


def _cell(
    data: Mapping[str, Value], base: Mapping[str, Value], varied: dict[str, Value], place: str, *, quick: bool
) -> Cell:
    other = {"noise_multiplier": "target_epsilon", "target_epsilon": "noise_multiplier"}
    other |= {"epochs": "steps", "steps": "epochs"}
    values = {name: value for name, value in base.items() if other.get(name) not in varied} | varied
    _only(data, ("name", "records"), f"{place} [data]")
    name = str(data["name"])
    one_of((*CATALOG, *TASKS), name=name)
    records = int(data["records"] if "records" in data else TASKS[name][0] if name in TASKS else _size(name))
    if quick:
        records = min(records, QUICK_RECORDS)
    for name, steps in (("epochs", "steps"), ("decay_epochs", "decay_steps")):
        if name in values:
            values[steps] = max(1, round(float(values.pop(name)) * records / float(values["batch_size"])))
    if quick:
        values["steps"] = min(QUICK_STEPS, int(values["steps"]))
    if values.get("projections") == "exact":
        values["projections"] = 0
    values.update(data=data["name"], records=records)
    return _build(Cell, values, f"{place}: a cell").canonical


def _size(name: str) -> int:
    return CATALOG[name].train_shape[0]


def _only(table: Mapping[str, object], known: Iterable[str], place: str) -> None:
    unknown = sorted(set(table) - set(known))
    if unknown:
        raise InvalidArgument(
            f"{place} must have no unknown key, got {', '.join(unknown)}. Keys are {', '.join(known)}."
        )


def _build(kind, table: Mapping[str, object], place: str):
    _only(table, [item.name for item in fields(kind)], place)
    try:
        return kind(**table)
    except TypeError as error:
        raise InvalidArgument(f"{place} must be complete, got {dict(table)}: {error}. Add what is missing.") from error


def _check_points(experiment: Experiment, panel: Panel) -> None:
    """A panel shows at least one cell, and never two settings at one point."""
    shown = experiment.cells_of(panel)
    if not shown:
        raise InvalidArgument(f"the panel {panel.title!r} must show a cell, got none. Change its where, or the grid.")
    points: dict[object, Cell] = {}
    for cell in shown:
        across = {"epoch": None, "spent": None, "epsilon": (cell.noise_multiplier, cell.target_epsilon)}
        place = across[panel.x] if panel.x in across else cell.value(panel.x)
        line = cell.value(panel.lines) if panel.lines else None
        kind = cell.mode if panel.lines is None else cell.mode == "private"
        first = replace(points.setdefault((line, place, kind), cell), seed=0)
        if first != replace(cell, seed=0):
            names = [item.name for item in fields(Cell) if getattr(first, item.name) != getattr(cell, item.name)]
            raise InvalidArgument(
                f"the panel {panel.title!r} must put one setting at each point, got cells that differ in "
                f"{', '.join(names)}. Fix it by where or [base], or take it for lines."
            )


# ── training one cell ───────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a cell came to.

    Args:
        accuracy: share of the public test records at the end, in [0, 1].
        epsilon: ε, or None where nothing is guaranteed.
        curve: (epoch, accuracy, accuracy on the first training records, ε so far) while it was trained.
        seconds: of the processor (one thread) for the training, without measuring.
        memory: megabytes by which the process grew while training; None where the system doesn't tell.
        loss: mean cross-entropy of the first training records at the end, in nats.
    """

    accuracy: float
    epsilon: float | None
    curve: tuple[tuple[float, float, float, float | None], ...]
    seconds: float
    memory: float | None
    loss: float | None = None


def train_cell(cell: Cell) -> Result:
    """Train one cell on public records with one thread, and measure.

    Guarantee: in the mode "private" that of ``cell.guarantee()``, with a fixed seed; in the others none.
    """
    torch.set_num_threads(1)
    train, test, classes = load_records(cell)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(cell.key[:8], 16))
        model = build_model(cell, tuple(train[0].shape[1:]), classes)
    # One step on a few records and a copy: what is made once a process is no part of a cell's time and memory.
    few, small = (train[0][:16], train[1][:16]), replace(cell.plan, steps=1, sample_rate=1.0)
    fit(deepcopy(model), cross_entropy_per_record, few, small, rng=KeyedRNG(), progress=False)

    epoch = cell.records / cell.batch_size
    count = max(1, min(CURVE_POINTS, round(cell.steps / epoch)))
    at = {max(1, round(cell.steps * (place + 1) / count)) for place in range(count)}
    curve: list[tuple[float, float, float, float | None]] = []
    measuring = 0.0
    seen = (train[0][:TRAIN_RECORDS_MEASURED], train[1][:TRAIN_RECORDS_MEASURED])

    def on_step(step: int) -> None:
        nonlocal measuring
        if step in at:
            began, spent = time.process_time(), cell.guarantee(step)
            point = (step / epoch, accuracy(model, test), accuracy(model, seen), spent.epsilon if spent else None)
            curve.append(point)
            measuring += time.process_time() - began

    rng = KeyedRNG(seed=int(cell.key, 16), reproducible=True)
    before = _memory("VmRSS:", reset=True)
    started = time.process_time()
    clipped = cell.mode in ("private", "clipping without noise")
    (train_clipped if clipped else train_unclipped)(cell, model, train, on_step, rng)
    seconds, peak = time.process_time() - started - measuring, _memory("VmHWM:")
    return Result(
        accuracy=accuracy(model, test),
        epsilon=cell.epsilon,
        curve=tuple(curve),
        seconds=seconds,
        memory=None if peak is None or before is None else max(0.0, peak - before),
        loss=mean_loss(model, seen),
    )


def load_records(cell: Cell) -> tuple[Pair, Pair, int]:
    """Training and test records as the model takes them: as they are, or on private principal components."""
    train, test, classes = _load(cell.data)
    train = (train[0][: cell.records], train[1][: cell.records])
    if cell.pca:
        words = repr((cell.data, cell.records, cell.pca_noise_multiplier, cell.seed))
        rng = KeyedRNG(seed=int(hashlib.sha256(words.encode()).hexdigest()[:24], 16), reproducible=True)
        basis = directions(train[0], noise_multiplier=cell.pca_noise_multiplier, rng=rng)[:, : cell.pca].float()
        train, test = ((features.flatten(1) @ basis, labels) for features, labels in (train, test))
    return train, test, classes


def digits_three_and_five() -> tuple[Pair, Pair, int]:
    """MNIST, the digits 3 (label 0) and 5 (label 1)."""
    train, test, _ = _load("mnist")

    def part(records: Pair) -> Pair:
        keep = (records[1] == 3) | (records[1] == 5)
        return records[0][keep], (records[1][keep] == 5).long()

    return part(train), part(test), 2


def bike_rentals() -> tuple[Pair, Pair, int]:
    """UCI bike sharing, hours of two years: are there more rentals than in the median hour? 15 numbers an hour.

    The two columns whose sum is the number of rentals are left out. Columns have mean 0 and variance 1 over the public
    training records, cut at 3. The first fold of the folder uci/ of SORDINO_DATA is tested.
    """
    folder = Path(os.environ.get("SORDINO_DATA", "data")) / "uci"
    table = np.loadtxt(folder / "bike.data.csv.gz", delimiter=",")
    tested = np.loadtxt(folder / "bike.test_mask.csv.gz", delimiter=",")[:, 0] > 0
    order = np.random.default_rng(0).permutation(len(table))
    table, tested = table[order], tested[order]
    center, spread = table[~tested].mean(axis=0), table[~tested].std(axis=0)
    features = torch.from_numpy(np.clip((table - center)[:, :-3] / spread[:-3], -3, 3)).float()
    labels = torch.from_numpy(table[:, -1] > np.median(table[~tested, -1])).long()
    return (features[~tested], labels[~tested]), (features[tested], labels[tested]), 2


def scattered_photographs() -> tuple[Pair, Pair, int]:
    """CIFAR-10 on the 1000 whitened scattering directions of the recipe `scatter`, constants that read no record."""
    shape = (3, 32, 32)
    train, test, classes = _load("cifar10")
    axes = scattering_recipes._directions(shape, mirror=False)

    def rows(records: Pair) -> Pair:
        return torch.from_numpy(scattering_recipes.scattered(records[0], mirror=False, directions=axes)), records[1]

    return rows(train), rows(test), classes


# Tasks made of public datasets: number of training records, and what makes them.
TASKS: Mapping[str, tuple[int, Callable[[], tuple[Pair, Pair, int]]]] = {
    "mnist-3-5": (11_552, digits_three_and_five),
    "bike": (15_642, bike_rentals),
    "cifar10-scattering": (50_000, scattered_photographs),
}


@cache
def _load(name: str) -> tuple[Pair, Pair, int]:
    """Training records, test records and the number of classes."""
    if name in TASKS:
        return TASKS[name][1]()
    dataset = load_dataset(name)
    return dataset.train.tensors(), dataset.test.tensors(), dataset.num_classes


def directions(features: Tensor, *, noise_multiplier: float, rng: KeyedRNG) -> Tensor:
    """Principal directions about 0, as columns [d, d], of the records scaled to norm 1: that of most weight first.

    Guarantee: post-processing of one noisy matrix of second moments, ``Gaussian(noise_multiplier)``.

    References:
        Abadi et al. 2016, section 4; Dwork, Talwar, Thakurta, Zhang 2014, algorithm 1.
    """
    flat = features.flatten(1)
    rows = flat / flat.norm(dim=1, keepdim=True).clamp_min(1e-12)
    budget = GaussianBudget(noise_multiplier=noise_multiplier)
    mechanism = PrivateSecondMoment(budget=budget, data_norm=1.0, columns=rows.shape[1], rng=rng)
    _, vectors = np.linalg.eigh(mechanism.release(rows.numpy().astype(np.float64)))  # in rising order
    return torch.from_numpy(np.ascontiguousarray(vectors[:, ::-1]))


def build_model(cell: Cell, shape: tuple[int, ...], classes: int) -> nn.Module:
    """A new model with random weights from torch's generator."""
    match cell.model:
        case "logistic":
            return logistic(shape, classes)
        case "mlp":
            return mlp(shape, classes, width=cell.width)
        case "cnn":
            return cnn(shape, classes)
        case _:
            hidden = nn.Linear(math.prod(shape), cell.width)
            return nn.Sequential(nn.Flatten(), hidden, nn.ReLU(), nn.Linear(cell.width, classes))


def _schedule(cell: Cell, optimizer: torch.optim.Optimizer) -> LambdaLR:
    """From the first learning rate to the final one in a straight line, then flat."""
    last = (cell.final_learning_rate or cell.learning_rate) / cell.learning_rate
    return LambdaLR(
        optimizer, lambda step: 1 + (last - 1) * min(1.0, step / cell.decay_steps) if cell.decay_steps else 1.0
    )


def train_clipped(cell: Cell, model: nn.Module, train: Pair, on_step: Callable[[int], None], rng: KeyedRNG) -> None:
    """By `fit`; with a noise multiplier of 0 for "clipping without noise"."""
    result = fit(
        model,
        cross_entropy_per_record,
        train,
        cell.plan,
        optimizer=lambda parameters: SGD(parameters, lr=cell.learning_rate),
        scheduler=lambda optimizer: _schedule(cell, optimizer),
        performance=PerformanceOptions(microbatch_size=CHUNK),
        rng=rng,
        on_step=on_step,
        progress=False,
    )
    if result.interrupted:
        raise KeyboardInterrupt  # `fit` ends an interrupted run in order; a cell that was cut off is none


def train_unclipped(cell: Cell, model: nn.Module, train: Pair, on_step: Callable[[int], None], rng: KeyedRNG) -> None:
    """The same steps without clipping, with noise of σC on the sum or without. Protects nobody: public records only."""
    plan, parameters = cell.plan.step_plan(0), list(model.parameters())
    optimizer = SGD(parameters, lr=cell.learning_rate)
    schedule = _schedule(cell, optimizer)
    stddev = plan.mechanism.stddev if cell.mode == "noise without clipping" else 0.0
    batches = cell.plan.sampler.batches(dataset_size=len(train[1]), first_step=0, steps=cell.steps, rng=rng)
    for step, indices in enumerate(batches):
        optimizer.zero_grad(set_to_none=False)
        for chunk in torch.from_numpy(indices).split(CHUNK):
            if len(chunk):
                cross_entropy_per_record(model, train[0][chunk], train[1][chunk]).sum().backward()
        for place, parameter in enumerate(parameters):
            total = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            if stddev:
                noise = standard_normal(parameter.numel(), rng.stream("experiment", step=step, tensor=place))
                total = total + stddev * noise.reshape(parameter.shape)
            parameter.grad = (total / plan.expected_batch_size).to(parameter)
        optimizer.step()
        schedule.step()
        on_step(step + 1)


@torch.no_grad()
def accuracy(model: nn.Module, records: Pair) -> float:
    """Share of records whose largest logit is that of their label, in [0, 1]."""
    chunks = zip(records[0].split(CHUNK), records[1].split(CHUNK), strict=True)
    return sum(int((model(features).argmax(1) == labels).sum()) for features, labels in chunks) / len(records[1])


@torch.no_grad()
def mean_loss(model: nn.Module, records: Pair) -> float:
    """Mean cross-entropy, in nats."""
    chunks = zip(records[0].split(CHUNK), records[1].split(CHUNK), strict=True)
    return sum(float(cross_entropy_per_record(model, *chunk).double().sum()) for chunk in chunks) / len(records[1])


def _memory(name: str, *, reset: bool = False) -> float | None:
    """One field of this process's memory in megabytes; None where there is no /proc. `reset` lowers the peak to now."""
    try:
        if reset:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(name)), None)


# ── all cells, each kept as soon as it is done ──────────────────────────────────────────────────────────────


def finished(folder: Path, cells: Iterable[Cell]) -> dict[str, Result]:
    """What is known of `cells`, by key. A line that a crash cut off is passed over, and its cell trained again."""
    wanted, found = {cell.key for cell in cells}, {}
    path = folder / "cells.jsonl"
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else ():
        try:
            body = json.loads(line)
            if body["key"] in wanted:
                curve = tuple(tuple(point) for point in body["result"]["curve"])
                found[body["key"]] = Result(**{**body["result"], "curve": curve})
        except (ValueError, KeyError, TypeError):
            continue
    return found


def keep(folder: Path, cell: Cell, result: Result) -> None:
    """Add one line, forced to disk; it starts on a line of its own, whatever a crash left behind."""
    body = json.dumps({"key": cell.key, "settings": asdict(cell), "result": asdict(result)})
    with (folder / "cells.jsonl").open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            body = body if file.read(1) == b"\n" else "\n" + body
        file.write(body.encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def run_experiment(
    experiment: Experiment, folder: Path, *, jobs: int = 1, say: Callable[[str], None] = print
) -> dict[str, Result]:
    """Train the cells that are not in `folder` yet, `jobs` at a time.

    A cell that fails is named and left out, the others go on, and the next call tries it again. Where a panel shows
    memory, each cell has a process of its own.

    Guarantee: none for the results together. Choosing among cells by their accuracy would be a release of its own if
    the records were private; they are public.
    """
    folder.mkdir(parents=True, exist_ok=True)
    results = finished(folder, experiment.cells)
    left = [cell for cell in experiment.cells if cell.key not in results]
    # Memory that a process got for one cell is used again for the next, so only a fresh process can measure it.
    isolated = any(panel.y == "memory" for panel in experiment.panels)
    context = multiprocessing.get_context("spawn")  # a copy of this process would inherit the state of torch's threads
    with ProcessPoolExecutor(jobs, mp_context=context, max_tasks_per_child=1 if isolated else None) as pool:
        futures = {pool.submit(train_cell, cell): cell for cell in left}
        try:
            for future in as_completed(futures):
                cell = futures[future]
                words = ", ".join(f"{name} {_shown(cell.value(name))}" for name in experiment.axes)
                if error := future.exception():
                    say(f"  {words}: failed, {type(error).__name__}: {error}")
                    continue
                result = future.result() if isolated else replace(future.result(), memory=None)
                results[cell.key] = result
                keep(folder, cell, result)
                epsilon = NO_GUARANTEE if result.epsilon is None else f"ε = {format_upper_bound(result.epsilon, 3)}"
                done = f"{len(results)}/{len(experiment.cells)}"
                say(f"  {done}  {words}: {100 * result.accuracy:.1f} %, {epsilon}, {result.seconds:.1f} s")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return results


# ── table ───────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, kw_only=True)
class Row:
    """Cells that differ in the seed alone; `results` are those of the finished ones."""

    cell: Cell
    results: tuple[Result, ...]
    missing: int

    def mean(self, name: str) -> float | None:
        """Mean over the seeds; ε and σ are known without any training."""
        if name in ("epsilon", "noise_multiplier"):
            return self.cell.epsilon if name == "epsilon" else self.cell.plan.step_plan(0).noise_multiplier
        found = self.measured(name)
        return math.fsum(found) / len(found) if found else None

    def spread(self, name: str) -> float | None:
        """Standard deviation over the seeds (with n − 1); None for fewer than two."""
        found = [] if name in ("epsilon", "noise_multiplier") else self.measured(name)
        return float(np.std(found, ddof=1)) if len(found) > 1 else None

    def measured(self, name: str) -> list[float]:
        """One number of every finished cell that has it."""
        return [value for result in self.results if (value := getattr(result, name)) is not None]


def collect_rows(experiment: Experiment, results: Mapping[str, Result]) -> list[Row]:
    """One row for all seeds of a setting, in the order of the cells."""
    together: dict[Cell, list[Cell]] = {}
    for cell in experiment.cells:
        together.setdefault(replace(cell, seed=0), []).append(cell)
    rows = []
    for cells in together.values():
        found = tuple(results[cell.key] for cell in cells if cell.key in results)
        rows.append(Row(cell=cells[0], results=found, missing=len(cells) - len(found)))
    return rows


def caveat(experiment: Experiment) -> str:
    """What ε in the table means, and what it doesn't."""
    return (
        f"ε is what one run with these settings, fixed in advance, would guarantee on {experiment.cells[0].records:,} "
        "records: add or remove one, size treated as public. Measured on public records. Choosing settings by such a "
        "table on private records is a release of its own: `sordino tune` includes it in the guarantee."
    )


def markdown(experiment: Experiment, rows: Sequence[Row]) -> str:
    """The table as Markdown."""
    names = [name for name in experiment.axes if name != "noise_multiplier"]
    heads = [*(name.replace("_", " ") for name in names), "σ", "ε", "δ", "steps", "accuracy", "seconds", "MB"]
    lines = [f"# {experiment.title}", "", experiment.note, "", caveat(experiment), ""]
    lines += ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for row in rows:
        cell, mean, spread = row.cell, row.mean("accuracy"), row.spread("accuracy")
        seconds, memory = row.mean("seconds"), row.mean("memory")
        shown = [
            *(_shown(cell.value(name)) for name in names),
            f"{row.mean('noise_multiplier'):.4g}",
            NO_GUARANTEE if cell.epsilon is None else format_upper_bound(cell.epsilon, 3),
            "–" if cell.epsilon is None else f"{cell.delta:g}",
            f"{cell.steps:,}",
            "–" if mean is None else f"{100 * mean:.1f} %" + (f" ± {100 * spread:.1f}" if spread is not None else ""),
            "–" if seconds is None else f"{seconds:.1f}",
            "–" if memory is None else f"{memory:.0f}",
        ]
        lines.append("| " + " | ".join(shown) + " |")
    return "\n".join(lines) + "\n"


def document(experiment: Experiment, rows: Sequence[Row]) -> dict[str, object]:
    """Everything as JSON types: settings, guarantee or "no guarantee", what was measured, and the curves."""
    cells = [
        {
            "settings": {name: row.cell.value(name) for name in experiment.axes},
            "epsilon": NO_GUARANTEE if row.cell.epsilon is None else row.cell.epsilon,
            "guarantee": None if (found := row.cell.guarantee()) is None else found.describe(),
            "results": [asdict(result) for result in row.results],
            "missing": row.missing,
        }
        for row in rows
    ]
    return {"name": experiment.name, "title": experiment.title, "caveat": caveat(experiment), "cells": cells}


def _shown(value: Value | None) -> str:
    return "–" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value).replace("_", " ")


# ── picture ─────────────────────────────────────────────────────────────────────────────────────────────────

WORDS = {
    "accuracy": "accuracy (%)",
    "loss": "loss on training records",
    "epsilon": "ε",
    "noise_multiplier": "noise multiplier σ",
    "seconds": "processor seconds of training",
    "memory": "memory while training (MB)",
    "max_grad_norm": "clipping norm C",
    "batch_size": "expected batch size B",
    "target_epsilon": "target ε",
    "delta": "δ",
    "pca": "principal components",
    "width": "hidden units",
    "epoch": "epochs",
    "spent": "ε spent so far",
    "projections": "projections r (0: exact norms)",
}
SYMBOLS = {"noise_multiplier": "σ", "batch_size": "B", "max_grad_norm": "C", "delta": "δ", "target_epsilon": "ε"}
MARKERS = "osD^vPX*hp"


def draw(experiment: Experiment, rows: Sequence[Row], path: Path) -> None:
    """Draw all panels to a PNG or SVG file. Cells that protect nobody are dashed, and their label says so."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    count = len(experiment.panels)
    columns = 1 if count == 1 else 3 if count in (3, 5, 6) else 2
    lines = -(-count // columns)
    width, height = (11.0 if columns == 1 else 6.4 * columns), 5.0 * lines + 1.7
    edges = {"left": 0.75 / width, "right": 1 - 0.35 / width, "bottom": 0.7 / height, "top": 1 - 1.95 / height}
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height), dpi=100)
        FigureCanvasAgg(figure)
        axes = figure.subplots(lines, columns, squeeze=False, gridspec_kw={**edges, "wspace": 0.2, "hspace": 0.42})
        top = {"fontsize": 23, "color": COLORS["ink"], "family": SERIF}
        figure.text(edges["left"], 1 - 0.65 / height, experiment.title, **top)
        seeds = max((len(row.results) for row in rows), default=0)
        below = [
            f"{rows[0].cell.data}, {rows[0].cell.records:,} public training records",
            "one run a point" if seeds <= 1 else f"mean of {seeds} seeds, bars: one standard deviation",
            *(
                ["dotted: on training records"]
                if any(panel.x in ("epoch", "spent") for panel in experiment.panels)
                else []
            ),
            *([experiment.note] if experiment.note else []),
        ]
        words = textwrap.fill("   ·   ".join(below), int(11 * width), break_long_words=False)
        figure.text(
            edges["left"], 1 - 0.9 / height, words, fontsize=11, color=COLORS["soft"], va="top", linespacing=1.5
        )
        for place, each in enumerate(axes.flat):
            if place < count:
                _draw_panel(each, experiment, experiment.panels[place], rows)
            else:
                each.set_axis_off()
        stamp = {"Date": None} if path.suffix == ".svg" else {"Software": "sordino"}
        # Long numbers and names at the edges are never cut: the sheet grows.
        figure.savefig(path, metadata=stamp, bbox_inches="tight", pad_inches=0.3)


def _draw_panel(axes, experiment: Experiment, panel: Panel, rows: Sequence[Row]) -> None:
    axes.set_title(panel.title or WORDS.get(panel.y, panel.y), loc="left", fontsize=13.5, pad=12, family=SERIF)
    shown = set(experiment.cells_of(panel))
    rows = [row for row in rows if row.cell in shown and (row.results or panel.y in ("epsilon", "noise_multiplier"))]
    names = sorted({_shown(row.cell.value(panel.x)) for row in rows}) if isinstance(_first(panel, rows), str) else []
    lines: dict[object, list[Row]] = {}
    for row in rows:
        lines.setdefault((row.cell.value(panel.lines) if panel.lines else None, row.cell.epsilon is None), []).append(
            row
        )
    numbers = [(value, unprotected) for value, unprotected in lines if isinstance(value, float | int)]
    order = [*sorted(numbers), *(line for line in lines if line not in numbers)]
    lines = {line: lines[line] for line in order}
    colors = {value: place for place, value in enumerate(dict.fromkeys(value for value, _ in lines))}
    for (value, unprotected), members in lines.items():
        place = colors[value] % len(MARKERS)
        label = _label(panel.lines, value) if panel.lines else ""
        if panel.y == "delta":
            label = f"{label}, ε = {panel.epsilons[_shown(value)]:g}"
        if unprotected and panel.lines != "mode":
            words = "not private" if members[0].cell.mode == "neither" else members[0].cell.mode
            label = f"{label}, {words}" if label else words
        style = {
            "color": METHOD_COLORS[place],
            "marker": MARKERS[place],
            "linestyle": (0, (5, 3)) if unprotected else "-",
            "label": f"{label}: {NO_GUARANTEE}" if unprotected else label or None,
        }
        (_draw_curves if panel.x in ("epoch", "spent") else _draw_points)(axes, panel, members, style, names)
    scale = 100.0 if panel.y == "accuracy" else 1.0
    for words in dict.fromkeys(mark["words"] for mark in panel.marks):
        x, y = zip(*((m["x"], scale * m["y"]) for m in panel.marks if m["words"] == words), strict=True)
        hollow = {"markersize": 8, "markerfacecolor": "none", "markeredgecolor": COLORS["ink"]}
        axes.plot(x, y, linestyle="none", marker="D", label=words, **hollow)
    if panel.logarithmic:
        axes.set_xscale("log")
    ticks = sorted({place for row in rows if (place := _across(panel, row, names)) is not None})
    if names:
        axes.set_xticks(range(len(names)), names)
        axes.set_xlim(-0.5, len(names) - 0.5)
    elif panel.x not in ("epoch", "spent", "epsilon") and 0 < len(ticks) <= 9:
        axes.set_xticks(ticks, [f"{tick:.4g}" for tick in ticks])
        axes.minorticks_off()
    elif panel.logarithmic:
        low, high = axes.get_xlim()
        places = [lead * 10.0**power for power in range(-6, 7) for lead in (1, 2, 5)]
        places = [place for place in places if low <= place <= high]
        axes.set_xticks(places, [f"{place:g}" for place in places])
        axes.minorticks_off()
    if panel.x == "epoch":
        axes.xaxis.get_major_locator().set_params(integer=True)
    measured = rows if panel.y != "delta" else ()
    heights = [value for row in measured if (value := row.mean(panel.y)) and math.isfinite(value)]
    if panel.y in ("epsilon", "seconds") and heights and max(heights) > 30 * min(heights):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    if panel.y == "delta":
        axes.set_yscale("log")
    if panel.low is not None:
        axes.set_ylim(bottom=scale * panel.low)
    axes.grid(axis="y", color=COLORS["hair"])
    axes.set_axisbelow(True)
    axes.set_xlabel(WORDS.get(panel.x, panel.x.replace("_", " ")), loc="right")
    axes.set_ylabel(WORDS.get(panel.y, panel.y))
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, fontsize=9.5, labelcolor=COLORS["ink"])


def _first(panel: Panel, rows: Sequence[Row]) -> Value | None:
    if panel.x in ("epoch", "spent", "epsilon"):
        return None
    return next((value for row in rows if (value := row.cell.value(panel.x)) is not None), None)


def _across(panel: Panel, row: Row, names: Sequence[str]) -> float | None:
    """Where a row stands across; None for one to which the axis means nothing."""
    if panel.x in ("epoch", "spent"):
        return None
    value = row.cell.epsilon if panel.x == "epsilon" else row.cell.value(panel.x)
    if panel.x == "pca" and not value:
        return None  # no components: a line across, not a point at the left end
    return None if value is None else float(names.index(_shown(value))) if names else float(value)


def _draw_points(axes, panel: Panel, rows: Sequence[Row], style: dict, names: Sequence[str]) -> None:
    """One point a row, with a bar over its seeds; a row to which the axis means nothing is a line across."""
    scale = 100.0 if panel.y == "accuracy" else 1.0
    placed = [(_across(panel, row, names), row) for row in rows]
    dots = sorted(
        (place, scale * mean, scale * (row.spread(panel.y) or 0))
        for place, row in placed
        if place is not None and (mean := row.mean(panel.y)) is not None and math.isfinite(mean)
    )
    if dots:
        x, y, bars = zip(*dots, strict=True)
        line = {**style, "linestyle": "none"} if names else style
        axes.errorbar(
            x, y, yerr=bars if any(bars) else None, linewidth=2, markersize=6, elinewidth=1.2, capsize=3, **line
        )
    for place, row in placed:
        if place is None and (mean := row.mean(panel.y)) is not None:
            pixels = panel.x == "pca" and row.cell.mode == "private"
            look = {"color": COLORS["soft"], "linestyle": (0, (1, 2)), "label": "all pixels, no components"}
            axes.axhline(
                scale * mean,
                linewidth=1.4,
                **(look if pixels else {name: style[name] for name in ("color", "linestyle", "label")}),
            )


def _draw_curves(axes, panel: Panel, rows: Sequence[Row], style: dict, _names: Sequence[str]) -> None:
    """The mean curve of the seeds; accuracy on training records dotted."""
    for row in rows:
        if panel.x == "spent" and row.cell.epsilon is None:
            continue
        # [seed, point, 4]: epoch, accuracy, accuracy on training records, ε (nan where nothing is guaranteed).
        curves = np.array([result.curve for result in row.results], dtype=float)
        means, spreads = curves.mean(axis=0), curves.std(axis=0, ddof=1) if len(curves) > 1 else 0 * curves[0]
        x = means[:, 3 if panel.x == "spent" else 0]
        if panel.y == "delta":
            axes.plot(x, _deltas(panel, row.cell, x), linewidth=2, markersize=4, **style)
            continue
        column, scale = (3, 1.0) if panel.y == "epsilon" else (1, 100.0)
        y, bars = scale * means[:, column], scale * spreads[:, column]
        axes.plot(x, y, linewidth=2, markersize=4, **style)
        if len(curves) > 1:
            axes.fill_between(x, y - bars, y + bars, color=style["color"], alpha=0.15, linewidth=0)
        if column == 1:
            axes.plot(x, 100 * means[:, 2], color=style["color"], linewidth=1.2, linestyle=(0, (1, 2)))


def _deltas(panel: Panel, cell: Cell, epochs: np.ndarray) -> list[float]:
    epsilon = panel.epsilons[_shown(cell.value(panel.lines or ""))]
    return [cell.delta_after(round(epoch * cell.records / cell.batch_size), epsilon) for epoch in epochs]


def _label(name: str, value: Value | None) -> str:
    if value is None or isinstance(value, str):
        return (value or "").replace("_", " ")
    if name == "projections":
        return f"r = {value}" if value else "exact norms"
    return f"{SYMBOLS.get(name, name.replace('_', ' '))} = {value:.4g}"


# ── the command ─────────────────────────────────────────────────────────────────────────────────────────────


def main(arguments: Sequence[str] | None = None) -> int:
    """`./run experiment NAME`; 1 when a cell failed."""
    names = sorted(path.stem for path in HERE.glob("*.toml"))
    parser = argparse.ArgumentParser(prog="./run experiment", description="A grid of trainings on public data.")
    parser.add_argument("name", choices=names, help="a file of experiments/")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--quick", action="store_true", help="few records and steps: to see that it runs")
    length.add_argument("--full", action="store_true", help="the sources' length and three seeds: hours")
    parser.add_argument("--plan", action="store_true", help="only say how many cells there are and what ε each has")
    parser.add_argument("--jobs", type=int, default=1, help="cells at a time, each on one thread")
    parser.add_argument("--out", type=Path, help="folder of the results; experiments/results/NAME if not given")
    asked = parser.parse_args(arguments)
    experiment = read_experiment(HERE / f"{asked.name}.toml", quick=asked.quick, full=asked.full)
    print(f"{experiment.title}: {len(experiment.cells)} cells on public records")
    if asked.plan:
        print(markdown(experiment, collect_rows(experiment, {})))
        return 0
    folder = asked.out or HERE / "results" / f"{asked.name}{'-quick' if asked.quick else '-full' if asked.full else ''}"
    rows = collect_rows(experiment, run_experiment(experiment, folder, jobs=asked.jobs))
    (folder / f"{asked.name}.md").write_text(markdown(experiment, rows), encoding="utf-8")
    text = json.dumps(document(experiment, rows), indent=1, ensure_ascii=False)
    (folder / f"{asked.name}.json").write_text(text + "\n", encoding="utf-8")
    draw(experiment, rows, folder / f"{asked.name}.png")
    print(markdown(experiment, rows))
    print(f"picture  {folder / asked.name}.png")
    return 1 if any(row.missing for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
