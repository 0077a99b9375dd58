"""Pipelines with one stage: a network trained by DP-SGD on records that are prepared one by one (floor 6)."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sordino import checks
from sordino.data import Records
from sordino.errors import InvalidArgument
from sordino.recipes.payment import Payment
from sordino.recipes.running import losses
from sordino.recipes.stages import FittedModule, training_stage
from sordino.recipes.task import Prepared, Task
from sordino.training.augmentation import augmented
from sordino.training.averaging import Averaging
from sordino.training.plan import Performance, Plan
from sordino.training.trainer import fit

__all__ = ["Network", "image_shape", "network", "quiet_rate"]


@dataclass(frozen=True, kw_only=True)
class Network:
    """How a network is trained: public numbers, fixed beforehand.

    Args:
        build: (shape of a record, classes) ↦ module that returns logits.
        batch_size: expected batch size; None for full batches.
        steps: number of steps.
        max_grad_norm: clipping norm.
        learning_rate: of SGD, or the plan ↦ it.
        momentum: in [0, 1); Nesterov's when `nesterov`.
        averaging: of the weights, or None.
        view: a random view of a batch (features, labels), each record by itself; None for the records as they are.
        views: views of a record whose gradients are averaged before clipping.
        microbatch_size: records that fit into memory together.
        inputs: records ↦ the network's inputs, each record by itself; None passes features on.
        noise_multiplier: fixes the noise; None takes the least that keeps the target.
        words: the network in words, for the report.
    """

    build: Callable[[Sequence[int], int], nn.Module]
    batch_size: int | None
    steps: int
    max_grad_norm: float
    learning_rate: float | Callable[[Plan], float]
    momentum: float = 0.9
    nesterov: bool = True
    averaging: Averaging | None = None
    view: Callable[..., tuple[object, ...]] | None = None
    views: int = 1
    microbatch_size: int | None = None
    inputs: Callable[[Records], Tensor] | None = None
    noise_multiplier: float | None = None
    words: str = ""

    def plan(self, task: Task) -> Plan:
        """The plan whose noise is fixed, or the least for the task's target."""
        size = task.population if self.batch_size is None else min(self.batch_size, task.population)
        facts = {
            "max_grad_norm": self.max_grad_norm,
            "sample_rate": size / task.population,
            "steps": self.steps,
            "expected_batch_size": float(size),
            "delta": task.delta,
            "dataset_size_is_public": True,
        }
        if self.noise_multiplier is not None:
            return Plan(noise_multiplier=self.noise_multiplier, **facts)
        return Plan.for_epsilon(target_epsilon=task.target, **facts)

    def rate(self, plan: Plan) -> float:
        """The learning rate under this plan."""
        return self.learning_rate(plan) if callable(self.learning_rate) else self.learning_rate


def quiet_rate(*, largest: float, noise_per_weight: float, momentum: float = 0.9) -> Callable[[Plan], float]:
    """The largest learning rate, at most `largest`, whose noise adds up to at most `noise_per_weight` in a weight."""

    def rate(plan: Plan) -> float:
        a_step = plan.at(0).gradient_noise / (1 - momentum)
        return min(largest, noise_per_weight / (a_step * math.sqrt(plan.steps)))

    return rate


def network(task: Task, made: Network) -> Prepared:
    """The pipeline that trains this network."""
    plan = made.plan(task)
    rate = made.rate(plan)
    stage = training_stage(plan, settings={"learning_rate": rate, "momentum": made.momentum, "views": made.views})

    def run(records: Records, payment: Payment) -> FittedModule:
        features, labels = records.tensors()
        if made.inputs is not None:
            features = made.inputs(records)
        loss = losses
        if made.view is not None:
            loss = augmented(losses, made.view, views=made.views)
        module = made.build(tuple(features.shape[1:]), task.classes)
        fit(
            module,
            loss,
            (features, labels),
            plan,
            optimizer=lambda parameters: torch.optim.SGD(
                parameters, lr=rate, momentum=made.momentum, nesterov=made.nesterov and made.momentum > 0
            ),
            averaging=made.averaging,
            transcript=payment,
            randomness=payment.randomness,
            progress=payment.progress,
            performance=Performance(microbatch_size=made.microbatch_size, device=task.device),
        )
        return FittedModule(module=module, inputs=made.inputs)

    averaging = None if made.averaging is None else type(made.averaging).__name__
    told = {"model": made.words, "optimizer": f"SGD, momentum {made.momentum:g}", "learning_rate": rate}
    return Prepared(stages=(stage,), fit=run, training={**told, "views": made.views, "averaging": averaging})


def image_shape(task: Task, *, channels: Sequence[int], least: int) -> tuple[int, int, int]:
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
