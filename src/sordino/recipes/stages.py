"""Stages and models that most pipelines are made of."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from sordino import checks
from sordino.data import Records
from sordino.errors import InvalidArgument
from sordino.estimators.base import PrivateEstimator, dry_run_events
from sordino.recipes.recipe import PreparedRecipe, RecipeTask, Stage, StageCharger
from sordino.recipes.training_config import NetworkSpec, cross_entropy_per_record
from sordino.training.averaging import Averaging, average_over_views
from sordino.training.charging import step_charge
from sordino.training.fit import OptimizerFactory, fit
from sordino.training.plan import PerformanceOptions, Plan
from sordino.training.probing.snapshots import evaluation_mode

_CHUNK = 4096


def training_stage(plan: Plan, *, name: str = "training", settings: Mapping[str, object] | None = None) -> Stage:
    """The stage of ``fit(…, plan, transcript=payment)``: one charge a step.

    Example:
        >>> plan = Plan(noise_multiplier=4.0, max_grad_norm=1.0, sample_rate=0.1, steps=3, expected_batch_size=60.0,
        ...             delta=1e-5)
        >>> len(training_stage(plan).charges)
        3
    """
    charges = tuple(step_charge(plan, step) for step in range(plan.steps))
    return Stage(name=name, charges=charges, settings={**(settings or {}), "plan": json.loads(plan.to_json())})


def estimator_stage(estimator: PrivateEstimator, columns: int, *, name: str) -> Stage:
    """The stage of an estimator's fit to records of so many columns."""
    events, _ = dry_run_events(estimator, columns)
    settings = {
        key: value if isinstance(value, int | float | str | bool | None) else repr(value)
        for key, value in estimator.get_params(deep=False).items()
        if key not in {"random_state", "reproducible", "ledger"}
    }
    return Stage(name=name, charges=events, settings={"estimator": type(estimator).__name__, **settings})


def charge_stage(stage: Stage, payment: StageCharger) -> None:
    """Charge all of a stage at once, before it reads a record."""
    for event in stage.charges:
        payment.charge(event)


@dataclass(frozen=True, kw_only=True, eq=False)
class FittedModule:
    """A torch module with what is done to records before it.

    Args:
        module: features ↦ logits (B, K).
        inputs: records ↦ the module's inputs, each record by itself; None passes features on.
        extra: further tensors that were learned, for the run folder.
    """

    module: nn.Module
    inputs: Callable[[Records], Tensor] | None = None
    extra: Mapping[str, Tensor] | None = None

    @torch.no_grad()
    def logits(self, records: Records) -> npt.NDArray[np.floating]:
        """Scores [n, K], in evaluation mode."""
        features = records.tensors()[0] if self.inputs is None else self.inputs(records)
        device = next(self.module.parameters()).device
        with evaluation_mode(self.module):
            parts = [self.module(chunk.to(device)).double().cpu() for chunk in features.split(_CHUNK)]
        return torch.cat(parts).numpy()

    def tensors(self) -> Mapping[str, Tensor]:
        """The module's state and what was learned in addition."""
        return {**(self.extra or {}), **self.module.state_dict()}


def fitted_module(
    module: nn.Module,
    data: tuple[Tensor, Tensor],
    payment: StageCharger,
    plan: Plan,
    *,
    optimizer: OptimizerFactory,
    inputs: Callable[[Records], Tensor] | None = None,
    extra: Mapping[str, Tensor] | None = None,
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor] = cross_entropy_per_record,
    scheduler: Callable[[Optimizer], LRScheduler] | None = None,
    averaging: Averaging | None = None,
    performance: PerformanceOptions | None = None,
) -> FittedModule:
    """Train the module on (inputs, labels), each step charged to `payment`; the options are those of `sordino.fit`."""
    fit(
        module,
        loss,
        data,
        plan,
        optimizer=optimizer,
        scheduler=scheduler,
        averaging=averaging,
        transcript=payment,
        rng=payment.rng,
        progress=payment.progress,
        performance=performance,
    )
    return FittedModule(module=module, inputs=inputs, extra=extra)


def restored_module(
    module: nn.Module,
    tensors: Mapping[str, Tensor],
    *,
    inputs: Callable[[Records], Tensor] | None = None,
    extra: Mapping[str, Tensor] | None = None,
) -> FittedModule:
    """A module with the parameters that `FittedModule.tensors` gave; `extra` are those that are not the module's."""
    own = {name: tensor for name, tensor in tensors.items() if name not in (extra or {})}
    module.load_state_dict(own)
    return FittedModule(module=module, inputs=inputs, extra=extra)


@dataclass(frozen=True, kw_only=True, eq=False)
class FittedEstimator:
    """A classifier of `sordino.estimators` with what is done to records before it.

    Args:
        estimator: fitted, with `predict_proba`.
        rows: records ↦ rows [n, d], each record by itself.
    """

    estimator: PrivateEstimator
    rows: Callable[[Records], npt.NDArray[np.floating]]

    def logits(self, records: Records) -> npt.NDArray[np.floating]:
        """Logarithms of the probabilities [n, K]."""
        found = self.estimator.predict_proba(self.rows(records))  # pyright: ignore[reportAttributeAccessIssue]
        return np.log(np.maximum(found, 1e-300))

    def tensors(self) -> Mapping[str, Tensor]:
        """Every array of numbers that was learned, by name."""
        return {name: torch.from_numpy(np.array(value)) for name, value in self.estimator.learned_arrays().items()}

    @classmethod
    def restored(
        cls,
        estimator: PrivateEstimator,
        tensors: Mapping[str, Tensor],
        *,
        columns: int,
        rows: Callable[[Records], npt.NDArray[np.floating]],
    ) -> Self:
        """The model that `tensors` came from; `estimator` has its parameters."""
        arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
        return cls(estimator=estimator.set_learned_arrays(arrays, columns=columns), rows=rows)


# ----------------------------------------------------------------------------------------------------------------------
# Pipelines with one stage: a network trained by DP-SGD on records that are prepared one by one.
# ----------------------------------------------------------------------------------------------------------------------


def network_recipe(task: RecipeTask, made: NetworkSpec) -> PreparedRecipe:
    """The pipeline that trains this network."""
    target = None if made.noise_multiplier is not None else task.target
    plan = made.plan(dataset_size=task.dataset_size, delta=task.delta, target_epsilon=target)
    rate = made.rate(plan)
    stage = training_stage(plan, settings={"learning_rate": rate, "momentum": made.momentum, "views": made.views})

    def run(records: Records, payment: StageCharger) -> FittedModule:
        features, labels = records.tensors()
        if made.inputs is not None:
            features = made.inputs(records)
        loss = cross_entropy_per_record
        if made.view is not None:
            loss = average_over_views(cross_entropy_per_record, made.view, views=made.views)
        return fitted_module(
            made.build(tuple(features.shape[1:]), task.classes),
            (features, labels),
            payment,
            plan,
            inputs=made.inputs,
            loss=loss,
            optimizer=lambda parameters: torch.optim.SGD(
                parameters, lr=rate, momentum=made.momentum, nesterov=made.nesterov and made.momentum > 0
            ),
            averaging=made.averaging,
            performance=PerformanceOptions(microbatch_size=made.microbatch_size, device=task.device),
        )

    def restore(tensors: Mapping[str, Tensor]) -> FittedModule:
        zeros = Records(np.zeros((1, *task.shape), dtype=np.float32), np.zeros(1, dtype=np.int64))
        shape = task.shape if made.inputs is None else tuple(made.inputs(zeros).shape[1:])
        return restored_module(made.build(shape, task.classes), tensors, inputs=made.inputs)

    averaging = None if made.averaging is None else type(made.averaging).__name__
    settings = {"model": made.description, "optimizer": f"SGD, momentum {made.momentum:g}", "learning_rate": rate}
    training = {**settings, "views": made.views, "averaging": averaging}
    return PreparedRecipe(stages=(stage,), fit=run, training=training, restore=restore)


def image_shape(task: RecipeTask, *, channels: Sequence[int], least: int) -> tuple[int, int, int]:
    """The task's (channels, height, width).

    Raises:
        InvalidArgument: records are no images of so many channels and at least `least` × `least` pixels.
    """
    shape = task.shape
    if len(shape) != 3 or shape[0] not in channels or min(shape[1:]) < least:
        raise InvalidArgument(
            f"dataset must have images of {' or '.join(map(str, channels))} channels and at least {least} × {least} "
            f"pixels, got records of shape {shape}. Choose another recipe: `sordino recipes`."
        )
    return (checks.integer(1, channels=shape[0]), shape[1], shape[2])
