"""Any torch module as a private estimator: `DPClassifier` and `DPRegressor`."""

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Self, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from scipy.special import log_softmax, softmax
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from sordino import checks
from sordino.errors import InvalidArgument
from sordino.estimators.base import (
    Labels,
    PrivateEstimator,
    PrivateRegressor,
    WeightedClassifier,
    declared_classes,
    declared_relation,
    declared_size,
    fill_missing,
    validate_matrix,
)
from sordino.estimators.linear_mechanisms import (
    MICROBATCH,
    RecordLoss,
    train_weighted,
)
from sordino.mechanisms.base import FloatArray, Numbers
from sordino.randomness import KeyedRNG
from sordino.training.fit import OptimizerFactory
from sordino.training.plan import PerformanceOptions, Plan, noise_limited_learning_rate

# ----------------------------------------------------------------------------------------------------------------------
# What `DPClassifier` and `DPRegressor` share: from parameters to a plan, a module of its own, and `fit`.
#
# Training is `sordino.training`'s own; nothing of it is written again here.
# ----------------------------------------------------------------------------------------------------------------------


ModuleSource: TypeAlias = nn.Module | Callable[[int, int], nn.Module]

_MOMENTUM = 0.9
_BATCH = 4096
# Of SGD when no learning rate is given; chosen on public data (UCI Adult), for max_grad_norm 1.
_NOISE_PER_WEIGHT = 0.5
_ADAM_RATE = 0.01
_FURTHEST = 2.0**60  # entries beyond are cut: their squares must not overflow float32


class RowNorm(nn.Module):
    """Scales each record to norm 2 on its own, without any statistic of the others."""

    def forward(self, x_BD: Tensor) -> Tensor:
        """(B, D) → (B, D)."""
        return 2 * F.normalize(x_BD, dim=1)


def _perceptron(columns: int, outputs: int) -> nn.Module:
    """One hidden layer of 64 tanh units, started at output 0."""
    hidden, head = nn.Linear(columns, 64), nn.Linear(64, outputs)
    # Records have norm 2: weights of variance 1/4 give pre-activations of variance 1 whatever the dimension is.
    nn.init.normal_(hidden.weight, std=0.5)
    for tensor in (hidden.bias, head.weight, head.bias):
        nn.init.zeros_(tensor)
    return nn.Sequential(RowNorm(), hidden, nn.Tanh(), head)


@dataclass(kw_only=True, eq=False, repr=False)
class NeuralEstimator(PrivateEstimator):
    """Parameters and steps that classifier and regressor share."""

    module: ModuleSource | None = field(default=None, kw_only=False)
    dataset_size: int | None = None
    batch_size: int | None = None
    sample_rate: float | None = None
    epochs: float = 20.0
    max_grad_norm: float = 1.0
    optimizer: str | Callable[[list[nn.Parameter]], Optimizer] = "sgd"
    learning_rate: float | None = None
    loss: RecordLoss | None = None
    averaged_fraction: float = 0.5
    neighboring_relation: str = "add_or_remove_one"
    microbatch_size: int | None = None
    device: str | None = None

    module_: nn.Module = field(init=False)
    _largest_rate: ClassVar[float]  # the stable one of SGD for a clipping norm of 1

    def learned_arrays(self) -> dict[str, npt.NDArray[np.generic]]:
        """The module's parameters and buffers."""
        return {name: tensor.detach().cpu().numpy() for name, tensor in self.module_.state_dict().items()}

    def set_learned_arrays(self, arrays: Mapping[str, npt.NDArray[np.generic]], *, columns: int) -> Self:
        """As every estimator does it; the module is made again from the parameters."""
        classes = self.get_params(deep=False).get("classes")
        module = self._built(columns, 1 if classes is None else len(classes), KeyedRNG())
        module.load_state_dict({name: torch.from_numpy(np.array(array)) for name, array in arrays.items()})
        super().set_learned_arrays({}, columns=columns)
        self.module_ = module.eval()
        return self

    def _plan(self) -> Plan:
        """All that changes the guarantee, from the parameters alone."""
        epsilon, delta = self._budget()
        population = declared_size(self.dataset_size)
        rate = self._rate(population)
        checks.probability(averaged_fraction=self.averaged_fraction)
        PerformanceOptions(microbatch_size=self.microbatch_size)
        checks.probability(zero=False, one=False, delta=delta, hint="Gradient descent needs some δ > 0.")
        return Plan.for_epsilon(
            target_epsilon=epsilon,
            delta=delta,
            sample_rate=rate,
            steps=max(1, math.ceil(checks.positive(epochs=self.epochs) / rate - 1e-9)),
            max_grad_norm=self.max_grad_norm,
            expected_batch_size=rate * population,
            neighboring_relation=declared_relation(self.neighboring_relation),
        )

    def _rate(self, dataset_size: int) -> float:
        if self.sample_rate is not None:
            if self.batch_size is not None:
                raise InvalidArgument("batch_size must be None with sample_rate, got both. Give one of them.")
            return checks.probability(zero=False, sample_rate=self.sample_rate)
        if self.batch_size is None:
            return min(_BATCH, dataset_size) / dataset_size
        if checks.integer(1, batch_size=self.batch_size) > dataset_size:
            raise InvalidArgument(
                f"batch_size must be ≤ dataset_size ({dataset_size}), got {self.batch_size}. Use smaller batches."
            )
        return self.batch_size / dataset_size

    def _built(self, columns: int, outputs: int, rng: KeyedRNG) -> nn.Module:
        """A module of this fit's own: made by the factory, or a copy of the one that was given."""
        source = self.module
        with _initial_weights(rng):
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
            if self.learning_rate is not None:
                raise InvalidArgument(
                    f"learning_rate must be None when optimizer is a function, got {self.learning_rate!r}. Set the "
                    f"learning rate in it."
                )
            return self.optimizer
        checks.one_of(("sgd", "adam"), optimizer=self.optimizer)
        rate = None if self.learning_rate is None else checks.positive(learning_rate=self.learning_rate)
        if self.optimizer == "adam":
            return lambda parameters: torch.optim.Adam(parameters, lr=_ADAM_RATE if rate is None else rate)
        chosen = rate
        if chosen is None:
            bound = noise_limited_learning_rate(plan, _NOISE_PER_WEIGHT, momentum=_MOMENTUM)
            chosen = min(self._largest_rate / plan.step_plan(0).max_grad_norm, bound)
        return lambda parameters: torch.optim.SGD(parameters, lr=chosen, momentum=_MOMENTUM, nesterov=True)

    def _train(
        self,
        module: nn.Module,
        plan: Plan,
        records: FloatArray,
        targets: npt.NDArray[np.generic],
        weights: FloatArray,
        losses: RecordLoss,
        rng: KeyedRNG,
    ) -> None:
        """Charge, and train on the records whose weight is not 0."""
        self._charge([plan.event()], neighboring_relation=plan.neighboring_relation, sampler=plan.sampler.describe())
        self.module_ = train_weighted(
            module,
            losses,
            _single(records),
            torch.from_numpy(targets),
            weights,
            plan=plan,
            optimizer=self._stepper(plan),
            averaged_fraction=self.averaged_fraction,
            rng=rng,
            microbatch_size=self.microbatch_size or MICROBATCH,
        )

    @torch.no_grad()
    def _outputs(self, X: Numbers) -> FloatArray:
        """The module's outputs in evaluation mode, float64 [n, …]."""
        check_is_fitted(self)
        records = fill_missing(validate_matrix(X, estimator=self, reset=False))
        chunks, device = _single(records).split(MICROBATCH), _device(self.module_)
        return torch.cat([self.module_(chunk.to(device)).cpu() for chunk in chunks]).numpy().astype(np.float64)


@contextlib.contextmanager
def _initial_weights(rng: KeyedRNG) -> Iterator[None]:
    """Initial weights come from torch's generator; a repeatable fit repeats them too."""
    if not rng.reproducible or rng.seed is None:
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(rng.seed % 2**63)
        yield


def _single(records: FloatArray) -> Tensor:
    return torch.from_numpy(np.clip(records, -_FURTHEST, _FURTHEST).astype(np.float32))


def _device(module: nn.Module) -> torch.device:
    return next((parameter.device for parameter in module.parameters()), torch.device("cpu"))


@torch.no_grad()
def _check_outputs(module: nn.Module, columns: int, outputs: int) -> None:
    """Try the module on a record of zeros, so that a wrong shape is refused before records are read."""
    module.eval()
    found = module(torch.zeros(2, columns, device=_device(module)))
    allowed = [(2, outputs)] if outputs > 1 else [(2, 1), (2,)]
    if not isinstance(found, Tensor) or tuple(found.shape) not in allowed:
        raise InvalidArgument(
            f"module must give {outputs} output{'s' if outputs > 1 else ''} for a record of {columns} columns, got "
            "another shape. Change its last layer."
        )


# ----------------------------------------------------------------------------------------------------------------------
# Any torch module as a private estimator: `DPClassifier` and `DPRegressor`.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True, eq=False, repr=False)
class DPClassifier(NeuralEstimator, WeightedClassifier):
    """Any torch module as a private classifier, trained by DP-SGD.

    Guarantee: the weights of `module_` are (epsilon, delta)-differentially private under `neighboring_relation`, as
    `guarantee_` states, provided that module, loss and optimizer were chosen without looking at the records. A missing
    entry is 0; a record with a label that is not among `classes` contributes nothing. The number of records is not
    used.

    Args:
        module: a function (columns, classes) ↦ module of logits, or a module, which is copied for every fit and keeps
            its weights as the start; None takes one hidden layer of 64 tanh units on records scaled to one norm.
        epsilon: ε > 0. Required.
        delta: δ in (0, 1). Required.
        classes: all labels, at least two. Required.
        dataset_size: the public number of records, or a public guess; batch size and learning rate refer to it.
            Required.
        batch_size: expected batch size; None takes 4096 or `dataset_size`.
        sample_rate: probability in (0, 1] that a record joins a batch, instead of `batch_size`.
        epochs: > 0; the number of steps is epochs / sample rate.
        max_grad_norm: clipping norm > 0 of a record's gradient.
        optimizer: ``sgd`` (with momentum), ``adam``, or a function (parameters) ↦ optimizer.
        learning_rate: learning rate > 0; None derives it from the plan (``sgd``) or takes 0.01 (``adam``).
        class_weight: None, or how much a record of each class counts, {class: weight ≥ 0}, from public knowledge or
            from counts that were paid for; a class that is not named counts 1.
        max_sample_weight: None, or the largest `sample_weight` of `fit`, > 0, from public knowledge; larger ones are
            cut to it.
        loss: (logits [n, K], indices of classes [n]) ↦ one loss a record [n]; None takes cross entropy.
        averaged_fraction: share of the last steps, in [0, 1], whose weights are averaged; 0 takes the last weights.
        neighboring_relation: ``add_or_remove_one``, ``replace_special`` or ``replace_one``.
        microbatch_size: most records in one forward; changes only memory.
        device: where to train; None leaves the module where it is.
        random_state: None, or a seed together with `reproducible`.
        reproducible: whether this is a test run; `guarantee_` then carries "not for release".
        ledger: None, or the account, or a reservation on it, that every fit is charged to.

    Attributes:
        module_: the trained module, in evaluation mode.
        classes_: the declared classes.
        guarantee_: the guarantee.
        events_: what was done.

    Example:
        >>> X, y = np.repeat([[1.0, 0.0], [0.0, 1.0]], 500, axis=0), np.repeat(["no", "yes"], 500)
        >>> model = DPClassifier(epsilon=1.0, delta=1e-5, classes=("no", "yes"), dataset_size=1000).fit(X, y)
        >>> float(model.score(X, y)), round(model.guarantee_.epsilon, 2)
        (1.0, 1.0)

    References:
        Abadi et al. 2016, algorithm 1; docs/proofs/private-step.md.
    """

    _largest_rate = 4.0

    def fit(self, X: Numbers, y: Labels, sample_weight: Numbers | None = None) -> "DPClassifier":
        """Fit to records X [n, d] with labels y [n]; charged first, then read.

        Args:
            X: [n, d].
            y: [n].
            sample_weight: None, or how much each record counts [n], from 0 to the declared `max_sample_weight`; a
                weight that is no number is 0. Losses are multiplied by it before gradients are clipped, so a
                `max_grad_norm` below the usual gradient takes most of its effect.
        """
        classes = declared_classes(self.classes)
        plan = self._plan()
        rng = self._randomness()
        self._stepper(plan)
        records = fill_missing(validate_matrix(X, estimator=self, reset=True))
        module = self._built(records.shape[1], len(classes), rng)
        found, weights = self._weighted_labels(y, len(records), sample_weight)
        counted = np.where(found >= 0, weights, 0.0)
        self._train(module, plan, records, np.maximum(found, 0), counted, self.loss or _cross_entropy, rng)
        self.classes_ = classes
        return self

    def _scores(self, X: Numbers) -> FloatArray:
        """Logits [n, K], or for two classes the second's minus the first's [n]."""
        scores = self._outputs(X)
        return scores[:, 1] - scores[:, 0] if scores.shape[1] == 2 else scores

    def predict_proba(self, X: Numbers) -> FloatArray:
        """Class probabilities [n, K]."""
        return np.asarray(softmax(self._outputs(X), axis=1))

    def predict_log_proba(self, X: Numbers) -> FloatArray:
        """Logarithms of the class probabilities [n, K]."""
        return np.asarray(log_softmax(self._outputs(X), axis=1))


@dataclass(kw_only=True, eq=False, repr=False)
class DPRegressor(NeuralEstimator, PrivateRegressor):
    """Any torch module as a private regressor, trained by DP-SGD on targets scaled to [−1, 1].

    Guarantee: that of `DPClassifier`, whose parameters it shares but for `classes`; `target_bounds` in addition.
    Targets are clipped to the bounds; a record with a target that is not finite contributes nothing.

    Args:
        module: a function (columns, 1) ↦ module with one output a record, or a module; see `DPClassifier`.
        target_bounds: (lowest, highest) target, from public knowledge. Required.
        loss: (outputs [n], scaled targets [n]) ↦ one loss a record [n]; None takes half the squared error.

    Attributes:
        module_: the trained module, in evaluation mode; its output is the scaled target.
        guarantee_: the guarantee.
        events_: what was done.

    Example:
        >>> X = np.repeat([[1.0, 0.0], [0.0, 1.0]], 500, axis=0)
        >>> model = DPRegressor(epsilon=8.0, delta=1e-5, target_bounds=(0.0, 10.0), dataset_size=1000)
        >>> low, high = model.fit(X, 10 * X[:, 0]).predict([[0.0, 1.0], [1.0, 0.0]])
        >>> bool(low < 2 and high > 8)
        True
    """

    # A squared loss curves with the activations' norm, which 64 tanh units can bring to 25 and more.
    _largest_rate = 0.1

    @property
    def scale(self) -> tuple[float, float]:
        """Center and half width of the declared targets: a prediction is center + half · the module's output."""
        return self._target_scale()

    def set_learned_arrays(self, arrays: Mapping[str, npt.NDArray[np.generic]], *, columns: int) -> Self:
        """As every estimator does it; the scale of the targets follows from the bounds."""
        self._center, self._half = self._target_scale()
        return super().set_learned_arrays(arrays, columns=columns)

    def fit(self, X: Numbers, y: Numbers, sample_weight: Numbers | None = None) -> "DPRegressor":
        """Fit to records X [n, d] with targets y [n]; charged first, then read.

        Args:
            X: [n, d].
            y: [n].
            sample_weight: None, or how much each record counts [n], from 0 to the declared `max_sample_weight`; a
                weight that is no number is 0. Losses are multiplied by it before gradients are clipped.
        """
        center, half = self._target_scale()
        plan = self._plan()
        rng = self._randomness()
        records = fill_missing(validate_matrix(X, estimator=self, reset=True))
        module = self._built(records.shape[1], 1, rng)
        targets, weights = self._targets(y, len(records), sample_weight, scale=(center, half))
        present = np.isfinite(targets)
        chosen = self.loss or _squared
        self._train(
            module,
            plan,
            records,
            np.where(present, targets, 0.0).astype(np.float32),
            np.where(present, weights, 0.0),
            lambda outputs, scaled: chosen(outputs.flatten(), scaled),
            rng,
        )
        self._center, self._half = center, half
        return self

    def predict(self, X: Numbers) -> FloatArray:
        """Predicted targets [n]; a missing entry is 0."""
        return self._outputs(X).ravel() * self._half + self._center


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="none")


def _squared(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets) ** 2 / 2
