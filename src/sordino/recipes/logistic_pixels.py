"""Multinomial logistic regression on pixels (floor 6): whitened by private second moments, or by plain DP-SGD.

`logistic-pixels` spends a share of the budget on the second moments of rows of norm 1, whitens by them, and descends
on full batches (`WhitenedLogisticRegression`). `logistic-sgd` is the classical run to look at clipping with: MNIST,
lots of 600, 100 epochs, noise multiplier 3, and one named setting for each clipping norm; ε is 1.7 in all of them.

References:
    Mehta, Krichene, Thakurta, Kurakin, Cutkosky 2022 (whitening); Abadi et al. 2016, algorithm 1.
"""

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sordino.data import Records
from sordino.estimators.intake import normalised_rows
from sordino.estimators.whitened import WhitenedLogisticRegression
from sordino.recipes.models import logistic
from sordino.recipes.network import Network, network
from sordino.recipes.payment import Payment
from sordino.recipes.pipeline import Pipeline
from sordino.recipes.stages import FittedEstimator, estimator_stage, pay_for
from sordino.recipes.task import Prepared, Task
from sordino.training.plan import Plan

__all__ = ["LOGISTIC_PIXELS", "LOGISTIC_SGD", "unit_rows_of"]

_LOT, _EPOCHS, _NOISE = 600, 100, 3.0
_NORMS = {f"clip-{norm:g}": norm for norm in (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)}
# Of the clipped mean gradient, whose norm is at most the clipping norm: a step moves the weights by this at most.
_LONGEST_STEP = 0.1


def unit_rows_of(records: Records) -> npt.NDArray[np.float64]:
    """Features as rows of norm 1, each by itself; a row with an entry that is not finite is zero."""
    rows = records.features.reshape(len(records), -1).astype(np.float64)
    return normalised_rows(np.where(np.isfinite(rows).all(axis=1, keepdims=True), rows, 0.0))


def _prepare(task: Task) -> Prepared:
    estimator = WhitenedLogisticRegression(
        epsilon=task.target, delta=task.delta, classes=tuple(range(task.classes)), population=task.population
    )
    stage = estimator_stage(estimator, math.prod(task.shape), name="covariance and training")

    def run(records: Records, payment: Payment) -> FittedEstimator:
        pay_for(stage, payment)
        if payment.randomness.reproducible:
            estimator.set_params(random_state=payment.randomness.seed, reproducible=True)
        estimator.fit(unit_rows_of(records), records.labels)
        return FittedEstimator(estimator=estimator, rows=unit_rows_of)

    told = {"model": "logistic regression on whitened pixels", "optimizer": "full-batch gradient descent, Nesterov 0.9"}
    return Prepared(stages=(stage,), fit=run, training=told)


def _prepare_sgd(task: Task) -> Prepared:
    rate = min(1.0, _LOT / task.population)
    norm = _NORMS.get(task.setting or "", 0.1)
    made = Network(
        build=logistic,
        batch_size=_LOT,
        steps=math.ceil(_EPOCHS / rate),
        max_grad_norm=norm,
        learning_rate=_step_length,
        momentum=0.0,
        noise_multiplier=None if task.setting is None else _NOISE,
        words="logistic regression on pixels",
        inputs=_pixels,
    )
    return network(task, made)


def _step_length(plan: Plan) -> float:
    return _LONGEST_STEP / plan.at(0).max_grad_norm


def _pixels(records: Records) -> Tensor:
    return torch.from_numpy(unit_rows_of(records).astype(np.float32))


LOGISTIC_PIXELS = Pipeline(
    name="logistic-pixels",
    words="logistic regression on pixels whitened by their private second moments",
    data_sets=("fashion-mnist", "mnist"),
    prepare=_prepare,
    constants="The estimator's defaults, chosen on Fashion-MNIST with an eye on its test records.",
    chosen_on=("fashion-mnist",),
    guarantee="one Gaussian release of second moments of rows of norm 1, and every full-batch step",
)
LOGISTIC_SGD = Pipeline(
    name="logistic-sgd",
    words="logistic regression on pixels by plain DP-SGD, with a setting for each clipping norm",
    data_sets=("mnist",),
    prepare=_prepare_sgd,
    constants="Batch and epochs as in the source; the clipping norm is what the settings vary.",
    chosen_on=("mnist",),
    guarantee="every Poisson-sampled step",
    settings=tuple(_NORMS),
)
