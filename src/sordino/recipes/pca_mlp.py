"""Private principal components, then a wide perceptron (floor 6): the classical recipe for MNIST.

60 components of rows of norm 1 with Gaussian noise on their second moments, then one hidden layer of 1000 ReLU units
by DP-SGD in lots of 600 with clipping norm 4. Projected rows are scaled to norm √60 at most, a fixed number, so that
each of the 60 inputs is of order 1; without it the layer hardly moves.

Named settings fix the noise as the source does, with its learning rate: 0.1 falling linearly to 0.052 over 10 epochs
and constant then. With a target ε the noise follows from exact accounting, and learning rate and number of epochs are
those that did best on the held-out part.

References:
    Abadi et al. 2016, "Deep learning with differential privacy", section 5.2.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from sordino import accounting
from sordino.data import Records
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
from sordino.training.plan import Performance, Plan
from sordino.training.trainer import fit

__all__ = ["Course", "PCA_MLP", "second_moments"]

_LOT, _COMPONENTS, _HIDDEN, _NORM = 600.0, 60, 1000, 4.0
_FALLING_EPOCHS, _FALLS_TO = 10, 0.52
_SCALE = math.sqrt(_COMPONENTS)
# Where a target ε is given: the noise of the components over that of the gradients.
_RATIO = 2.5


@dataclass(frozen=True, kw_only=True)
class Course:
    """How long and how fast the network trains.

    Args:
        epochs: number of epochs.
        rate: first learning rate.
        noise: (noise multiplier of the gradients, of the components) when a setting fixes them.
    """

    epochs: int
    rate: float
    noise: tuple[float, float] | None = None


_SETTINGS = {
    "large-noise": Course(epochs=60, rate=0.1, noise=(8.0, 16.0)),
    "medium-noise": Course(epochs=60, rate=0.1, noise=(4.0, 7.0)),
    "small-noise": Course(epochs=60, rate=0.1, noise=(2.0, 4.0)),
}
# (ε from which on, course)
_COURSES = (
    (0.0, Course(epochs=7, rate=0.3)),
    (1.0, Course(epochs=18, rate=0.3)),
    (4.0, Course(epochs=30, rate=0.4)),
)


def _prepare(task: Task) -> Prepared:
    columns = math.prod(task.shape)
    kept = min(_COMPONENTS, columns)
    rate = min(1.0, _LOT / task.population)
    if task.setting is not None:
        course = _SETTINGS[task.setting]
    else:
        course = next(course for least, course in reversed(_COURSES) if task.target >= least)
    noise, components_noise = course.noise or _calibrated(task, rate, course.epochs)
    plan = _plan(task, rate, course.epochs, noise)
    components = Stage(
        name="components",
        charges=(second_moments(columns, components_noise).event(),),
        settings={"kept": kept, "noise_multiplier": components_noise},
    )
    training = training_stage(plan, settings={"learning_rate": course.rate, "falls_to": course.rate * _FALLS_TO})

    def run(records: Records, payment: Payment) -> FittedModule:
        return _fit(records, payment, components=components, plan=plan, classes=task.classes, rate=course.rate)

    return Prepared(
        stages=(components, training),
        fit=run,
        training={
            "model": f"{kept} private components, {_HIDDEN} ReLU units",
            "optimizer": "SGD",
            "learning_rate": f"{course.rate:g} to {course.rate * _FALLS_TO:g} over {_FALLING_EPOCHS} epochs",
            "epochs": course.epochs,
        },
    )


def _plan(task: Task, rate: float, epochs: int, noise: float) -> Plan:
    return Plan(
        noise_multiplier=noise,
        max_grad_norm=_NORM,
        sample_rate=rate,
        steps=max(1, round(epochs / rate)),
        expected_batch_size=rate * task.population,
        delta=task.delta,
        dataset_size_is_public=True,
    )


def _calibrated(task: Task, rate: float, epochs: int) -> tuple[float, float]:
    """Noise multipliers of gradients and components with which both stages together stay within the target."""

    def event(noise: float) -> Event:
        return compose([second_moments(2, _RATIO * noise).event(), _plan(task, rate, epochs, noise).event()])

    found = accounting.calibrate_noise_multiplier(event, target_epsilon=task.target, target_delta=task.delta)
    return found, _RATIO * found


def second_moments(columns: int, noise: float, randomness: Randomness | None = None) -> PrivateSecondMoment:
    """The mechanism of the components: second moments of rows of norm 1 with this noise multiplier."""
    return PrivateSecondMoment(
        budget=GaussianBudget(noise_multiplier=noise),
        data_norm=1.0,
        columns=columns,
        randomness=Randomness() if randomness is None else randomness,
    )


def _fit(
    records: Records, payment: Payment, *, components: Stage, plan: Plan, classes: int, rate: float
) -> FittedModule:
    pay_for(components, payment)
    rows = _rows(records)
    noise, kept = components.settings["noise_multiplier"], components.settings["kept"]
    assert isinstance(noise, float)
    assert isinstance(kept, int)
    _, vectors = np.linalg.eigh(second_moments(rows.shape[1], noise, payment.randomness).release(rows))
    directions = torch.from_numpy(np.ascontiguousarray(vectors[:, ::-1][:, :kept])).float()

    def inputs(given: Records) -> Tensor:
        return _SCALE * torch.from_numpy(_rows(given)).float() @ directions

    module = nn.Sequential(nn.Linear(kept, _HIDDEN), nn.ReLU(), nn.Linear(_HIDDEN, classes))
    fit(
        module,
        losses,
        (inputs(records), records.tensors()[1]),
        plan,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=rate),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, _falling(plan)),
        transcript=payment,
        randomness=payment.randomness,
        progress=payment.progress,
        performance=Performance(),
    )
    beside: Mapping[str, Tensor] = {"components": directions}
    return FittedModule(module=module, inputs=inputs, beside=beside)


def _falling(plan: Plan) -> Callable[[int], float]:
    steps = _FALLING_EPOCHS / plan.at(0).sample_rate
    return lambda step: 1 - (1 - _FALLS_TO) * min(1.0, step / steps)


def _rows(records: Records) -> np.ndarray:
    """Features as rows of norm 1, each by itself; a row with an entry that is not finite is zero."""
    rows = records.features.reshape(len(records), -1).astype(np.float64)
    return normalised_rows(np.where(np.isfinite(rows).all(axis=1, keepdims=True), rows, 0.0))


PCA_MLP = Pipeline(
    name="pca-mlp",
    words="60 private principal components, then 1000 ReLU units by DP-SGD",
    data_sets=("mnist", "fashion-mnist"),
    prepare=_prepare,
    constants="Settings: the source's own. Targets: rate and epochs chosen on 10 000 of the training records of MNIST.",
    chosen_on=("mnist",),
    guarantee="one Gaussian release of second moments of rows of norm 1, and every Poisson-sampled step",
    settings=tuple(_SETTINGS),
)
