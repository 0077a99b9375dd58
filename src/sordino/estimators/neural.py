"""Any torch module as a private estimator: `DPClassifier` and `DPRegressor` (floor 4)."""

from collections.abc import Callable, Hashable, Sequence

import numpy as np
import numpy.typing as npt
from scipy.special import log_softmax, softmax
from sklearn.base import ClassifierMixin, RegressorMixin
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from sordino.estimators.intake import Labels, codes, declared, declared_classes, matrix, one_a_record, scaled_targets
from sordino.estimators.neural_fit import ModuleSource, NeuralEstimator, RecordLoss
from sordino.ledger import Account, Reservation
from sordino.mechanisms.values import Bounds, FloatArray, Numbers, checked_bounds

__all__ = ["DPClassifier", "DPRegressor"]


class DPClassifier(ClassifierMixin, NeuralEstimator):
    """Any torch module as a private classifier, trained by DP-SGD.

    Guarantee: the weights of `module_` are (epsilon, delta)-differentially private under `neighboring_relation`, as
    `privacy_` states, provided that module, loss and optimizer were chosen without looking at the records. A record
    with a NaN, or a label that is not among `classes`, contributes nothing. The number of records is not used.

    Args:
        module: a function (columns, classes) ↦ module of logits, or a module, which is copied for every fit and keeps
            its weights as the start; None takes one hidden layer of 64 tanh units on records scaled to one norm.
        epsilon: ε > 0. Required.
        delta: δ in (0, 1). Required.
        classes: all labels, at least two. Required.
        population: the public number of records, or a public guess; batch size and learning rate refer to it. Required.
        batch_size: expected batch size; None takes 4096 or `population`.
        sample_rate: probability in (0, 1] that a record joins a batch, instead of `batch_size`.
        epochs: > 0; the number of steps is epochs / sample rate.
        max_grad_norm: clipping norm > 0 of a record's gradient.
        optimizer: ``sgd`` (with momentum), ``adam``, or a function (parameters) ↦ optimizer.
        lr: learning rate > 0; None derives it from the plan (``sgd``) or takes 0.01 (``adam``).
        loss: (logits [n, K], class positions [n]) ↦ one loss a record [n]; None takes cross entropy.
        averaged_fraction: share of the last steps, in [0, 1], whose weights are averaged; 0 takes the last weights.
        neighboring_relation: ``add_or_remove_one``, ``replace_special`` or ``replace_one``.
        microbatch_size: most records in one forward; changes only memory.
        device: where to train; None leaves the module where it is.
        random_state: None, or a seed together with `reproducible`.
        reproducible: whether this is a test run; `privacy_` then carries "not for release".
        ledger: None, or the account, or a reservation on it, that every fit is charged to.

    Attributes:
        module_: the trained module, in evaluation mode.
        classes_: the declared classes.
        privacy_: the guarantee.
        events_: what was done.

    Example:
        >>> X, y = np.repeat([[1.0, 0.0], [0.0, 1.0]], 500, axis=0), np.repeat(["no", "yes"], 500)
        >>> model = DPClassifier(epsilon=1.0, delta=1e-5, classes=("no", "yes"), population=1000).fit(X, y)
        >>> float(model.score(X, y)), round(model.privacy_.epsilon, 2)
        (1.0, 1.0)

    References:
        Abadi et al. 2016, algorithm 1; docs/proofs/private-step.md.
    """

    _largest_rate = 4.0

    def __init__(
        self,
        module: ModuleSource | None = None,
        *,
        epsilon: float | None = None,
        delta: float | None = None,
        classes: Sequence[Hashable] | None = None,
        population: int | None = None,
        batch_size: int | None = None,
        sample_rate: float | None = None,
        epochs: float = 20.0,
        max_grad_norm: float = 1.0,
        optimizer: str | Callable[[list[nn.Parameter]], Optimizer] = "sgd",
        lr: float | None = None,
        loss: RecordLoss | None = None,
        averaged_fraction: float = 0.5,
        neighboring_relation: str = "add_or_remove_one",
        microbatch_size: int | None = None,
        device: str | None = None,
        random_state: int | None = None,
        reproducible: bool = False,
        ledger: Account | Reservation | None = None,
    ) -> None:
        self.module = module
        self.epsilon = epsilon
        self.delta = delta
        self.classes = classes
        self.population = population
        self.batch_size = batch_size
        self.sample_rate = sample_rate
        self.epochs = epochs
        self.max_grad_norm = max_grad_norm
        self.optimizer = optimizer
        self.lr = lr
        self.loss = loss
        self.averaged_fraction = averaged_fraction
        self.neighboring_relation = neighboring_relation
        self.microbatch_size = microbatch_size
        self.device = device
        self.random_state = random_state
        self.reproducible = reproducible
        self.ledger = ledger

    def fit(self, X: Numbers, y: Labels) -> "DPClassifier":
        """Fit to records X [n, d] with labels y [n]; charged first, then read."""
        classes = declared_classes(self.classes)
        plan = self._plan()
        randomness = self._randomness()
        self._stepper(plan)
        records, present = matrix(X, estimator=self, reset=True)
        module = self._built(records.shape[1], len(classes), randomness)
        one_a_record(y, len(records))
        self._charge([plan.event()], relation=plan.neighboring_relation, sampler=plan.sampling.words)
        found = codes(y, classes.tolist())
        losses = self.loss or _cross_entropy
        present = present & (found >= 0)
        self.module_ = self._train(module, plan, records, np.maximum(found, 0), present, losses, randomness)
        self.classes_ = classes
        return self

    def decision_function(self, X: Numbers) -> FloatArray:
        """Logits [n, K], or for two classes the second's minus the first's [n]."""
        scores = self._outputs(X)
        return scores[:, 1] - scores[:, 0] if scores.shape[1] == 2 else scores

    def predict(self, X: Numbers) -> npt.NDArray[np.generic]:
        """The class of each record [n]; a record with an entry that is not finite is taken as zero."""
        scores = self.decision_function(X)
        return self.classes_[(scores > 0).astype(np.int64) if scores.ndim == 1 else scores.argmax(axis=1)]

    def predict_proba(self, X: Numbers) -> FloatArray:
        """Class probabilities [n, K]."""
        return np.asarray(softmax(self._outputs(X), axis=1))

    def predict_log_proba(self, X: Numbers) -> FloatArray:
        """Logarithms of the class probabilities [n, K]."""
        return np.asarray(log_softmax(self._outputs(X), axis=1))


class DPRegressor(RegressorMixin, NeuralEstimator):
    """Any torch module as a private regressor, trained by DP-SGD on targets scaled to [−1, 1].

    Guarantee: that of `DPClassifier`, whose parameters it shares but for `classes`; `target_bounds` beside them.
    Targets are clipped to the bounds; a record with a target that is not finite contributes nothing.

    Args:
        module: a function (columns, 1) ↦ module with one output a record, or a module; see `DPClassifier`.
        target_bounds: (lowest, highest) target, from public knowledge. Required.
        loss: (outputs [n], scaled targets [n]) ↦ one loss a record [n]; None takes half the squared error.

    Attributes:
        module_: the trained module, in evaluation mode; its output is the scaled target.
        privacy_: the guarantee.
        events_: what was done.

    Example:
        >>> X = np.repeat([[1.0, 0.0], [0.0, 1.0]], 500, axis=0)
        >>> model = DPRegressor(epsilon=8.0, delta=1e-5, target_bounds=(0.0, 10.0), population=1000)
        >>> low, high = model.fit(X, 10 * X[:, 0]).predict([[0.0, 1.0], [1.0, 0.0]])
        >>> bool(low < 2 and high > 8)
        True
    """

    # A squared loss curves with the activations' norm, which 64 tanh units can bring to 25 and more.
    _largest_rate = 0.1

    def __init__(
        self,
        module: ModuleSource | None = None,
        *,
        epsilon: float | None = None,
        delta: float | None = None,
        target_bounds: Bounds | None = None,
        population: int | None = None,
        batch_size: int | None = None,
        sample_rate: float | None = None,
        epochs: float = 20.0,
        max_grad_norm: float = 1.0,
        optimizer: str | Callable[[list[nn.Parameter]], Optimizer] = "sgd",
        lr: float | None = None,
        loss: RecordLoss | None = None,
        averaged_fraction: float = 0.5,
        neighboring_relation: str = "add_or_remove_one",
        microbatch_size: int | None = None,
        device: str | None = None,
        random_state: int | None = None,
        reproducible: bool = False,
        ledger: Account | Reservation | None = None,
    ) -> None:
        self.module = module
        self.epsilon = epsilon
        self.delta = delta
        self.target_bounds = target_bounds
        self.population = population
        self.batch_size = batch_size
        self.sample_rate = sample_rate
        self.epochs = epochs
        self.max_grad_norm = max_grad_norm
        self.optimizer = optimizer
        self.lr = lr
        self.loss = loss
        self.averaged_fraction = averaged_fraction
        self.neighboring_relation = neighboring_relation
        self.microbatch_size = microbatch_size
        self.device = device
        self.random_state = random_state
        self.reproducible = reproducible
        self.ledger = ledger

    def _scale(self) -> tuple[Bounds, float, float]:
        """The bounds, their middle, and half their distance."""
        bounds = checked_bounds(declared(self.target_bounds, name="target_bounds", meaning="(lowest, highest) target"))
        return bounds, bounds[0] / 2 + bounds[1] / 2, bounds[1] / 2 - bounds[0] / 2

    def fit(self, X: Numbers, y: Numbers) -> "DPRegressor":
        """Fit to records X [n, d] with targets y [n]; charged first, then read."""
        bounds, centre, half = self._scale()
        plan = self._plan()
        randomness = self._randomness()
        records, present = matrix(X, estimator=self, reset=True)
        module = self._built(records.shape[1], 1, randomness)
        one_a_record(y, len(records))
        self._charge([plan.event()], relation=plan.neighboring_relation, sampler=plan.sampling.words)
        targets = scaled_targets(y, bounds, centre=centre, half=half)
        present = present & np.isfinite(targets)
        chosen = self.loss or _squared
        self.module_ = self._train(
            module,
            plan,
            records,
            np.where(present, targets, 0.0).astype(np.float32),
            present,
            lambda outputs, scaled: chosen(outputs.flatten(), scaled),
            randomness,
        )
        self._centre, self._half = centre, half
        return self

    def predict(self, X: Numbers) -> FloatArray:
        """Predicted targets [n]; a record with an entry that is not finite is taken as zero."""
        return self._outputs(X).ravel() * self._half + self._centre


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="none")


def _squared(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets) ** 2 / 2
