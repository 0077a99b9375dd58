"""Private principal components, then a wide perceptron (floor 6): the classical recipe for MNIST.

Second moments of rows of norm 1 with Gaussian noise give 61 directions. The first is nearly that of the mean, for rows
of pixels are not centred, and is dropped; what a record has along the other 60 is scaled to norm 12, each record by
itself, so that the inputs are of order 1. Then one hidden layer of 1000 ReLU units is trained by DP-SGD.

Named settings fix the noise as the source does, with its lots of 600, its clipping norm 4 and its learning rate: 0.1
falling linearly to 0.052 over 10 epochs and constant then. With a target ε the noise follows from exact accounting, and
lots of 3000, clipping norm 1, learning rate, steps and an average of the last weights are what did best on the held-out
part.

References:
    Abadi et al. 2016, "Deep learning with differential privacy", section 5.2.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor, nn

from sordino import accounting
from sordino.data import Records
from sordino.errors import InvalidArgument
from sordino.estimators.intake import normalised_rows
from sordino.events import Event, compose
from sordino.mechanisms import PrivateSecondMoment
from sordino.mechanisms.budgets import GaussianBudget
from sordino.randomness import Randomness
from sordino.recipes.payment import Payment, Stage
from sordino.recipes.pipeline import Pipeline
from sordino.recipes.running import losses
from sordino.recipes.stages import FittedModule, pay_for, training_stage
from sordino.recipes.task import Prepared, Task
from sordino.training.averaging import TailAverage
from sordino.training.plan import Performance, Plan
from sordino.training.trainer import fit

__all__ = ["Course", "PCA_MLP", "second_moments"]

_COMPONENTS, _HIDDEN, _LENGTH = 60, 1000, 12.0
_FALLING_EPOCHS, _FALLS_TO = 10, 0.52
# Where a target ε is given: the noise of the components over that of the gradients.
_RATIO = 2.0


@dataclass(frozen=True, kw_only=True)
class Course:
    """How the network trains.

    Args:
        lot: expected batch size.
        epochs: number of epochs.
        max_grad_norm: clipping norm.
        rate: first learning rate.
        falls: whether it falls over the first epochs.
        averaged: share of the steps whose weights are averaged; 0 for the last weights.
        noise: (noise multiplier of the gradients, of the components) when a setting fixes them.
    """

    epochs: float
    lot: float = 3000.0
    max_grad_norm: float = 1.0
    rate: float = 4.0
    falls: bool = False
    averaged: float = 0.3
    noise: tuple[float, float] | None = None

    @classmethod
    def of_the_source(cls, *, noise: tuple[float, float]) -> Self:
        """The source's own, with the noise of one of its settings."""
        return cls(epochs=60, lot=600.0, max_grad_norm=4.0, rate=0.1, falls=True, averaged=0.0, noise=noise)

    def sample_rate(self, population: int) -> float:
        """Of a data set of this size."""
        return min(1.0, self.lot / population)

    def plan(self, task: Task, noise: float) -> Plan:
        """The training's plan under this noise multiplier."""
        rate = self.sample_rate(task.population)
        return Plan(
            noise_multiplier=noise,
            max_grad_norm=self.max_grad_norm,
            sample_rate=rate,
            steps=max(1, round(self.epochs / rate)),
            expected_batch_size=rate * task.population,
            delta=task.delta,
            dataset_size_is_public=True,
        )

    def calibrated(self, task: Task) -> tuple[float, float]:
        """Noise multipliers of gradients and components with which both stages together stay within the target."""

        def event(noise: float) -> Event:
            return compose([second_moments(2, _RATIO * noise).event(), self.plan(task, noise).event()])

        found = accounting.calibrate_noise_multiplier(event, target_epsilon=task.target, target_delta=task.delta)
        return found, _RATIO * found

    def scheduler(self, population: int) -> Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LambdaLR]:
        """The learning rate over the steps."""
        steps = _FALLING_EPOCHS / self.sample_rate(population)
        lost = 1 - _FALLS_TO if self.falls else 0.0
        return lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: 1 - lost * min(1.0, step / steps)
        )


_SETTINGS = {
    "large-noise": Course.of_the_source(noise=(8.0, 16.0)),
    "medium-noise": Course.of_the_source(noise=(4.0, 7.0)),
    "small-noise": Course.of_the_source(noise=(2.0, 4.0)),
}
# (ε from which on, course)
_COURSES = (
    (0.0, Course(epochs=12)),
    (1.0, Course(epochs=30, rate=6.0)),
    (4.0, Course(epochs=60, rate=8.0)),
)


def _prepare(task: Task) -> Prepared:
    columns = math.prod(task.shape)
    if columns <= _COMPONENTS:
        raise InvalidArgument(
            f"dataset must have more than {_COMPONENTS} columns, got {columns}. Choose another: `sordino recipes`."
        )
    if task.setting is not None:
        course = _SETTINGS[task.setting]
    else:
        course = next(course for least, course in reversed(_COURSES) if task.target >= least)
    noise, components_noise = course.noise or course.calibrated(task)
    plan = course.plan(task, noise)
    components = Stage(
        name="components",
        charges=(second_moments(columns, components_noise).event(),),
        settings={"kept": _COMPONENTS, "noise_multiplier": components_noise},
    )
    falls = f" to {course.rate * _FALLS_TO:g} over {_FALLING_EPOCHS} epochs" if course.falls else ""
    training = training_stage(plan, settings={"learning_rate": f"{course.rate:g}{falls}"})

    def run(records: Records, payment: Payment) -> FittedModule:
        return _fit(records, payment, components=components, course=course, plan=plan, task=task)

    return Prepared(
        stages=(components, training),
        fit=run,
        training={
            "model": f"{_COMPONENTS} private components, {_HIDDEN} ReLU units",
            "optimizer": "SGD",
            "learning_rate": f"{course.rate:g}{falls}",
            "epochs": course.epochs,
            "averaging": "tail average" if course.averaged else None,
        },
    )


def second_moments(columns: int, noise: float, randomness: Randomness | None = None) -> PrivateSecondMoment:
    """The mechanism of the components: second moments of rows of norm 1 with this noise multiplier."""
    return PrivateSecondMoment(
        budget=GaussianBudget(noise_multiplier=noise),
        data_norm=1.0,
        columns=columns,
        randomness=Randomness() if randomness is None else randomness,
    )


def _fit(
    records: Records, payment: Payment, *, components: Stage, course: Course, plan: Plan, task: Task
) -> FittedModule:
    pay_for(components, payment)
    rows = _rows(records)
    noise = components.settings["noise_multiplier"]
    assert isinstance(noise, float)
    _, vectors = np.linalg.eigh(second_moments(rows.shape[1], noise, payment.randomness).release(rows))
    directions = np.ascontiguousarray(vectors[:, ::-1][:, 1 : 1 + _COMPONENTS])

    def inputs(given: Records) -> Tensor:
        return torch.from_numpy((_LENGTH * normalised_rows(_rows(given) @ directions)).astype(np.float32))

    module = nn.Sequential(nn.Linear(_COMPONENTS, _HIDDEN), nn.ReLU(), nn.Linear(_HIDDEN, task.classes))
    fit(
        module,
        losses,
        (inputs(records), records.tensors()[1]),
        plan,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=course.rate),
        scheduler=course.scheduler(task.population),
        averaging=TailAverage(fraction=course.averaged) if course.averaged else None,
        transcript=payment,
        randomness=payment.randomness,
        progress=payment.progress,
        performance=Performance(device=task.device),
    )
    beside: Mapping[str, Tensor] = {"components": torch.from_numpy(directions)}
    return FittedModule(module=module, inputs=inputs, beside=beside)


def _rows(records: Records) -> np.ndarray:
    """Features as rows of norm 1, each by itself; a row with an entry that is not finite is zero."""
    rows = records.features.reshape(len(records), -1).astype(np.float64)
    return normalised_rows(np.where(np.isfinite(rows).all(axis=1, keepdims=True), rows, 0.0))


PCA_MLP = Pipeline(
    name="pca-mlp",
    words="60 private principal components, then 1000 ReLU units by DP-SGD",
    data_sets=("mnist", "fashion-mnist"),
    prepare=_prepare,
    constants="Settings: the source's. Targets: chosen on 10 000 held-out training records of MNIST.",
    chosen_on=("mnist",),
    guarantee="one Gaussian release of second moments of rows of norm 1, and every Poisson-sampled step",
    settings=tuple(_SETTINGS),
)
