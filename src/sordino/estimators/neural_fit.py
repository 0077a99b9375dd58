"""What `DPClassifier` and `DPRegressor` share: from parameters to a plan, a module of its own, and `fit` (floor 4).

Training is `sordino.training`'s own; nothing of it is written again here. A record that may not count has loss 0, so it
keeps its place and adds nothing.
"""

import contextlib
import copy
import math
from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, nn
from torch.nn import functional as F

from sordino import checks
from sordino.definitions import NeighboringRelation
from sordino.errors import InvalidArgument
from sordino.estimators.base import PrivateEstimator
from sordino.estimators.intake import declared, matrix
from sordino.mechanisms.values import FloatArray, Numbers
from sordino.randomness import Randomness
from sordino.training.averaging import TailAverage
from sordino.training.plan import Performance, Plan
from sordino.training.trainer import OptimizerFactory, fit

__all__ = ["ModuleSource", "NeuralEstimator", "RecordLoss"]

ModuleSource: TypeAlias = nn.Module | Callable[[int, int], nn.Module]
RecordLoss: TypeAlias = Callable[[Tensor, Tensor], Tensor]

_MOMENTUM = 0.9
_BATCH = 4096
# Of SGD when no learning rate is given; chosen on public data (UCI Adult), for max_grad_norm 1.
_NOISE_PER_WEIGHT = 0.5
_ADAM_RATE = 0.01
_FURTHEST = 2.0**60  # entries beyond are cut: their squares must not overflow float32
_TOGETHER = 8192


class _RowNorm(nn.Module):
    """Scales each record to norm 2 on its own, without any statistic of the others."""

    def forward(self, x_BD: Tensor) -> Tensor:
        return 2 * F.normalize(x_BD, dim=1)


def _perceptron(columns: int, outputs: int) -> nn.Module:
    """One hidden layer of 64 tanh units, started at output 0."""
    hidden, head = nn.Linear(columns, 64), nn.Linear(64, outputs)
    # Records have norm 2: weights of variance 1/4 give pre-activations of variance 1 whatever the dimension is.
    nn.init.normal_(hidden.weight, std=0.5)
    for tensor in (hidden.bias, head.weight, head.bias):
        nn.init.zeros_(tensor)
    return nn.Sequential(_RowNorm(), hidden, nn.Tanh(), head)


class NeuralEstimator(PrivateEstimator):
    """Parameters and steps that classifier and regressor share."""

    module: ModuleSource | None
    population: int | None
    batch_size: int | None
    sample_rate: float | None
    epochs: float
    max_grad_norm: float
    optimizer: str | OptimizerFactory
    lr: float | None
    loss: RecordLoss | None
    averaged_fraction: float
    neighboring_relation: str
    microbatch_size: int | None
    device: str | None
    module_: nn.Module
    _largest_rate: float  # the stable one of SGD for a clipping norm of 1

    def _plan(self) -> Plan:
        """All that changes the guarantee, from the parameters alone."""
        epsilon, delta = self._budget()
        population = checks.integer(
            1,
            population=declared(
                self.population, name="population", meaning="the public number of records, or a public guess of it"
            ),
        )
        rate = self._rate(population)
        checks.probability(averaged_fraction=self.averaged_fraction)
        Performance(microbatch_size=self.microbatch_size)
        checks.probability(zero=False, one=False, delta=delta, hint="Gradient descent needs some δ > 0.")
        return Plan.for_epsilon(
            target_epsilon=epsilon,
            delta=delta,
            sample_rate=rate,
            steps=max(1, math.ceil(checks.positive(epochs=self.epochs) / rate - 1e-9)),
            max_grad_norm=self.max_grad_norm,
            expected_batch_size=rate * population,
            neighboring_relation=NeighboringRelation(
                checks.one_of(list(NeighboringRelation), neighboring_relation=self.neighboring_relation)
            ),
        )

    def _rate(self, population: int) -> float:
        if self.sample_rate is not None:
            if self.batch_size is not None:
                raise InvalidArgument("batch_size must be None with sample_rate, got both. Give one of them.")
            return checks.probability(zero=False, sample_rate=self.sample_rate)
        if self.batch_size is None:
            return min(_BATCH, population) / population
        if checks.integer(1, batch_size=self.batch_size) > population:
            raise InvalidArgument(
                f"batch_size must be ≤ population ({population}), got {self.batch_size}. Use smaller batches."
            )
        return self.batch_size / population

    def _built(self, columns: int, outputs: int, randomness: Randomness) -> nn.Module:
        """A module of this fit's own: made by the factory, or a copy of the one that was given."""
        source = self.module
        with _initial_weights(randomness):
            if source is None:
                module = _perceptron(columns, outputs)
            elif isinstance(source, nn.Module):
                module = copy.deepcopy(source)
            else:
                module = source(columns, outputs)
        if not isinstance(module, nn.Module):
            raise InvalidArgument(
                "module must be an nn.Module or a function (columns, outputs) that makes one, got another thing. "
                "Return the module."
            )
        if self.device is not None:
            module = module.to(self.device)
        _check_outputs(module, columns, outputs)
        return module.train()

    def _stepper(self, plan: Plan) -> OptimizerFactory:
        if not isinstance(self.optimizer, str):
            if self.lr is not None:
                raise InvalidArgument(
                    f"lr must be None when optimizer is a function, got {self.lr!r}. Set the learning rate in it."
                )
            return self.optimizer
        checks.one_of(("sgd", "adam"), optimizer=self.optimizer)
        rate = None if self.lr is None else checks.positive(lr=self.lr)
        if self.optimizer == "adam":
            return lambda parameters: torch.optim.Adam(parameters, lr=_ADAM_RATE if rate is None else rate)
        chosen = _sgd_rate(plan, self._largest_rate) if rate is None else rate
        return lambda parameters: torch.optim.SGD(parameters, lr=chosen, momentum=_MOMENTUM, nesterov=True)

    def _train(
        self,
        module: nn.Module,
        plan: Plan,
        records: FloatArray,
        targets: npt.NDArray[np.generic],
        present: npt.NDArray[np.bool_],
        losses: RecordLoss,
        randomness: Randomness,
    ) -> nn.Module:
        def weighted(model: nn.Module, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
            return losses(model(x), y) * weight

        fraction = self.averaged_fraction
        data = (_single(records), torch.from_numpy(targets), torch.from_numpy(present.astype(np.float32)))
        fit(
            module,
            weighted,
            data,
            plan,
            optimizer=self._stepper(plan),
            performance=Performance(microbatch_size=self.microbatch_size or _TOGETHER),
            randomness=randomness,
            averaging=TailAverage(fraction=fraction) if fraction > 0 else None,
            progress=False,
        )
        return module.eval()

    @torch.no_grad()
    def _outputs(self, X: Numbers) -> FloatArray:
        """The module's outputs in evaluation mode, float64 [n, …]."""
        check_is_fitted(self)
        records, _ = matrix(X, estimator=self, reset=False)
        module = self.module_
        device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
        chunks = _single(records).split(_TOGETHER)
        return torch.cat([module(chunk.to(device)).cpu() for chunk in chunks]).numpy().astype(np.float64)


@contextlib.contextmanager
def _initial_weights(randomness: Randomness) -> Iterator[None]:
    """Initial weights come from torch's generator; a repeatable fit repeats them too."""
    if not randomness.reproducible or randomness.seed is None:
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(randomness.seed % 2**63)
        yield


def _single(records: FloatArray) -> Tensor:
    return torch.from_numpy(np.clip(records, -_FURTHEST, _FURTHEST).astype(np.float32))


def _sgd_rate(plan: Plan, largest: float) -> float:
    """The largest rate for which the noise that adds up in one weight stays below a bound; from the plan alone."""
    a_step = plan.at(0).mechanism.stddev / plan.at(0).expected_batch_size / (1 - _MOMENTUM)
    bound = _NOISE_PER_WEIGHT / (a_step * math.sqrt(plan.steps))
    return min(largest / plan.at(0).max_grad_norm, bound)


@torch.no_grad()
def _check_outputs(module: nn.Module, columns: int, outputs: int) -> None:
    """Try the module on a record of zeros, so that a wrong shape is told before records are read."""
    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    module.eval()
    found = module(torch.zeros(2, columns, device=device))
    allowed = [(2, outputs)] if outputs > 1 else [(2, 1), (2,)]
    if not isinstance(found, Tensor) or tuple(found.shape) not in allowed:
        raise InvalidArgument(
            f"module must give {outputs} output{'s' if outputs > 1 else ''} for a record of {columns} columns, got "
            "another shape. Change its last layer."
        )
