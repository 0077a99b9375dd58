"""DP gradient descent for linear models: the training engine's plan and step, with a linear module (floor 4).

References:
    Bassily, Smith, Thakurta 2014 (noisy gradient descent). Abadi et al. 2016, algorithm 1 (minibatches).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sordino import checks
from sordino.definitions import NeighboringRelation
from sordino.errors import InvalidArgument
from sordino.estimators.losses import HuberHinge, HuberResidual, Logistic, Loss, SmoothMargin, Softmax
from sordino.events import Event
from sordino.mechanisms.values import FloatArray
from sordino.randomness import Randomness
from sordino.training.averaging import TailAverage
from sordino.training.plan import Performance, Plan
from sordino.training.trainer import fit

__all__ = ["Descent", "DescentSettings"]

_MOMENTUM = 0.9
_MICROBATCH = 8192


@dataclass(frozen=True, kw_only=True)
class DescentSettings:
    """How to descend, in units where rows have norm ≤ 1. The defaults were chosen on public data (UCI Adult).

    Args:
        population: public number of records, or a public guess of it; only the learning rate's scale depends on it.
        batch_size: expected batch size; None takes full batches.
        steps: ≥ 1.
        max_grad_norm: clipping norm > 0.
        learning_rate: > 0; None takes the largest for which the noise in a weight stays below `noise_per_weight`, and
            at most `largest_learning_rate`.
        largest_learning_rate: > 0.
        noise_per_weight: > 0.
    """

    population: int
    batch_size: int | None = None
    steps: int = 100
    max_grad_norm: float = 0.25
    learning_rate: float | None = None
    largest_learning_rate: float = 200.0
    noise_per_weight: float = 4.0

    def __post_init__(self) -> None:
        checks.integer(1, population=self.population)
        checks.integer(1, steps=self.steps)
        checks.positive(max_grad_norm=self.max_grad_norm)
        if self.learning_rate is not None:
            checks.positive(learning_rate=self.learning_rate)
        if self.batch_size is not None and checks.integer(1, batch_size=self.batch_size) > self.population:
            raise InvalidArgument(
                f"batch_size must be ≤ population ({self.population}), got {self.batch_size}. Use smaller batches."
            )


@dataclass(frozen=True, kw_only=True)
class Descent:
    """SGD with momentum on clipped, noisy gradients, averaged over the second half of the steps.

    Guarantee: that of `fit` under `plan`, whose ε is at most epsilon.

    Args:
        loss: of scores; without regularisation, which privacy doesn't need here.
        epsilon: > 0.
        delta: in (0, 1).
        dimension: number of columns p ≥ 1, with the intercept's.
        settings: how to descend.
        relation: the neighbouring relation.
        randomness: of the whole run; used once.
    """

    loss: Loss
    epsilon: float
    delta: float
    dimension: int
    settings: DescentSettings
    relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE
    randomness: Randomness = field(default_factory=Randomness, repr=False, compare=False)
    plan: Plan = field(init=False)

    def __post_init__(self) -> None:
        checks.probability(zero=False, one=False, delta=self.delta, hint="Gradient descent needs some δ > 0.")
        batch = self.settings.batch_size or self.settings.population
        plan = Plan.for_epsilon(
            target_epsilon=self.epsilon,
            delta=self.delta,
            sample_rate=batch / self.settings.population,
            steps=self.settings.steps,
            max_grad_norm=self.settings.max_grad_norm,
            expected_batch_size=float(batch),
            neighboring_relation=self.relation,
        )
        object.__setattr__(self, "plan", plan)

    @property
    def learning_rate(self) -> float:
        """η, from the plan alone."""
        if self.settings.learning_rate is not None:
            return self.settings.learning_rate
        a_step = self.plan.at(0).mechanism.stddev / self.plan.at(0).expected_batch_size / (1 - _MOMENTUM)
        bound = self.settings.noise_per_weight / (a_step * math.sqrt(self.plan.steps))
        return min(self.settings.largest_learning_rate, bound)

    def event(self) -> Event:
        """The event of one release."""
        return self.plan.event()

    def release(self, rows: FloatArray, targets: FloatArray, present: npt.NDArray[np.bool_]) -> FloatArray:
        """Weights [p, k]; a record that is absent has loss 0."""
        model = nn.Linear(self.dimension, self.loss.outputs, bias=False)
        nn.init.zeros_(model.weight)
        losses = _record_losses(self.loss)

        def weighted(module: nn.Module, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
            return losses(module(x), y) * weight

        fit(
            model,
            weighted,
            tuple(torch.from_numpy(part.astype(np.float32)) for part in (rows, targets, present)),
            self.plan,
            optimizer=lambda parameters: torch.optim.SGD(
                parameters, lr=self.learning_rate, momentum=_MOMENTUM, nesterov=True
            ),
            performance=Performance(microbatch_size=_MICROBATCH),
            randomness=self.randomness,
            averaging=TailAverage(fraction=0.5),
            progress=False,
        )
        return model.weight.detach().numpy().T.astype(np.float64)


def _record_losses(loss: Loss) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss on torch scores [n, k] and targets [n]: one value a record."""
    match loss:
        case Logistic():
            return lambda scores, y: F.softplus(-y * scores[:, 0])
        case Softmax():
            return lambda scores, y: F.cross_entropy(scores, y.long(), reduction="none")
        case SmoothMargin(width=h):
            return lambda scores, y: (
                h * F.cross_entropy((scores + 1 - F.one_hot(y.long(), scores.shape[1])) / h, y.long(), reduction="none")
            )
        case HuberHinge(width=h):
            return lambda scores, y: _huber_hinge(1 - y * scores[:, 0], h)
        case HuberResidual():
            # Clipping bounds the gradient here, so the loss may be the square itself.
            return lambda scores, y: (scores[:, 0] - y) ** 2 / 2
        case _:
            raise InvalidArgument(f"loss must be one of the library's, got {type(loss).__name__}. Use one of them.")


def _huber_hinge(short: Tensor, width: float) -> Tensor:
    return (short.clamp(-width, width) + width) ** 2 / (4 * width) + (short - width).clamp(min=0)
