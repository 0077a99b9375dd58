"""Which mechanism fits a linear model: one table for all methods and all losses."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sordino import checks
from sordino.definitions import NeighboringRelation
from sordino.errors import InvalidArgument, MissingDeclaration
from sordino.estimators.base import clip_rows
from sordino.estimators.linear_statistics import FunctionalMechanism, LeastSquaresStatistics
from sordino.estimators.losses import HuberHinge, HuberResidual, Logistic, Loss, SmoothMargin, Softmax
from sordino.estimators.perturbation import (
    CandidateSelection,
    ObjectivePerturbation,
    OutputPerturbation,
    min_regularization,
)
from sordino.events import Event
from sordino.mechanisms import make_budget
from sordino.mechanisms.base import FloatArray, Numbers, to_float_array
from sordino.randomness import KeyedRNG
from sordino.training.averaging import TailWeightAverage
from sordino.training.fit import OptimizerFactory, fit
from sordino.training.plan import PerformanceOptions, Plan, noise_limited_learning_rate

# ----------------------------------------------------------------------------------------------------------------------
# The training engine for estimators. A record that may not count has weight 0, so it keeps its index and adds nothing.
# ----------------------------------------------------------------------------------------------------------------------


RecordLoss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
MICROBATCH = 8192


def train_weighted(
    module: nn.Module,
    losses: RecordLoss,
    rows: Tensor,
    targets: Tensor,
    weights: npt.NDArray[np.generic],
    *,
    plan: Plan,
    optimizer: OptimizerFactory,
    averaged_fraction: float,
    rng: KeyedRNG,
    microbatch_size: int = MICROBATCH,
) -> nn.Module:
    """Train the module by DP-SGD, and return it in evaluation mode.

    Args:
        module: rows ↦ outputs.
        losses: (outputs, targets) ↦ one loss a record.
        rows: [n, …].
        targets: [n].
        weights: [n] in [0, 1], which multiply the losses.
        plan: what the training does.
        optimizer: parameters ↦ optimizer.
        averaged_fraction: share of the last steps whose weights are averaged; 0 takes the last weights.
        rng: of the whole run; used once.
        microbatch_size: most records in one forward.
    """

    def weighted(model: nn.Module, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        return losses(model(x), y) * weight

    fit(
        module,
        weighted,
        (rows, targets, torch.from_numpy(weights.astype(np.float32))),
        plan,
        optimizer=optimizer,
        performance=PerformanceOptions(microbatch_size=microbatch_size),
        rng=rng,
        averaging=TailWeightAverage(fraction=averaged_fraction) if averaged_fraction > 0 else None,
        progress=False,
    )
    return module.eval()


# ----------------------------------------------------------------------------------------------------------------------
# DP gradient descent for linear models: the training engine's plan and step, with a linear module.
#
# References:
#     Bassily, Smith, Thakurta 2014 (noisy gradient descent). Abadi et al. 2016, algorithm 1 (minibatches).
# ----------------------------------------------------------------------------------------------------------------------


_MOMENTUM = 0.9
# Of the loss's Lipschitz constant: clipping norms to choose from, the first without any bias.
_CLIP_FRACTIONS = (1.0, 0.5, 0.25)
# With fewer columns every direction has curvature, which holds the noise back, so each weight may have more of it.
_MANY_COLUMNS = 100


@dataclass(frozen=True, kw_only=True)
class DescentSettings:
    """How to descend, in units where rows have norm ≤ 1. The defaults were chosen on public data (UCI Adult).

    Args:
        dataset_size: public number of records, or a public guess of it; only the learning rate's scale depends on it.
        batch_size: expected batch size; None takes full batches.
        steps: ≥ 1.
        max_grad_norm: clipping norm > 0; None takes the loss's Lipschitz constant L, at which no gradient is clipped;
            half or a quarter of it where the noise at L would hold the learning rate below 1/curvature.
        learning_rate: > 0; None takes 1/curvature of the loss, at which descent is stable whatever the rows are, or
            less: the largest for which the noise that adds up in a weight stays below `noise_per_weight`.
        noise_per_weight: > 0, for 100 columns and more; √(100/p) times that for fewer columns p.
    """

    dataset_size: int
    batch_size: int | None = None
    steps: int = 100
    max_grad_norm: float | None = None
    learning_rate: float | None = None
    noise_per_weight: float = 4.0

    def __post_init__(self) -> None:
        checks.integer(1, dataset_size=self.dataset_size)
        checks.integer(1, steps=self.steps)
        if self.max_grad_norm is not None:
            checks.positive(max_grad_norm=self.max_grad_norm)
        if self.learning_rate is not None:
            checks.positive(learning_rate=self.learning_rate)
        if self.batch_size is not None and checks.integer(1, batch_size=self.batch_size) > self.dataset_size:
            raise InvalidArgument(
                f"batch_size must be ≤ dataset_size ({self.dataset_size}), got {self.batch_size}. Use smaller batches."
            )


@dataclass(frozen=True, kw_only=True)
class DPGradientDescent:
    """SGD with momentum on clipped, noisy gradients, averaged over the second half of the steps.

    Guarantee: that of `fit` under `plan`, whose ε is at most epsilon.

    Args:
        loss: of scores; without regularization, which privacy doesn't need here.
        epsilon: > 0.
        delta: in (0, 1).
        dimension: number of columns p ≥ 1, with the intercept's.
        settings: how to descend.
        neighboring_relation: the neighboring relation.
        rng: of the whole run; used once.
    """

    loss: Loss
    epsilon: float
    delta: float
    dimension: int
    settings: DescentSettings
    neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE
    rng: KeyedRNG = field(default_factory=KeyedRNG, repr=False, compare=False)
    plan: Plan = field(init=False)

    def __post_init__(self) -> None:
        checks.probability(zero=False, one=False, delta=self.delta, hint="Gradient descent needs some δ > 0.")
        batch = self.settings.batch_size or self.settings.dataset_size
        plan = Plan.for_epsilon(
            target_epsilon=self.epsilon,
            delta=self.delta,
            sample_rate=batch / self.settings.dataset_size,
            steps=self.settings.steps,
            max_grad_norm=self.settings.max_grad_norm or self.loss.lipschitz,
            expected_batch_size=float(batch),
            neighboring_relation=self.neighboring_relation,
        )
        if self.settings.max_grad_norm is None:
            for fraction in _CLIP_FRACTIONS:
                # The noise multiplier, and so the guarantee, is the same for every clipping norm.
                plan = replace(plan, max_grad_norm=fraction * self.loss.lipschitz)
                if self._noise_limited_learning_rate(plan) >= self._stable_learning_rate:
                    break
        object.__setattr__(self, "plan", plan)

    @property
    def learning_rate(self) -> float:
        """η, from the loss and the plan alone."""
        if self.settings.learning_rate is not None:
            return self.settings.learning_rate
        return min(self._stable_learning_rate, self._noise_limited_learning_rate(self.plan))

    @property
    def _stable_learning_rate(self) -> float:
        """1/curvature: the mean loss of rows of norm ≤ 1 is no more curved, and with momentum β Nesterov's descent is
        stable up to 2(1 + β)/(1 + 2β) > 1 times that.
        """
        return 1.0 / self.loss.curvature

    def _noise_limited_learning_rate(self, plan: Plan) -> float:
        """The largest η for which the noise that adds up in a weight over all steps stays below its bound."""
        allowed = self.settings.noise_per_weight * max(1.0, math.sqrt(_MANY_COLUMNS / self.dimension))
        return noise_limited_learning_rate(plan, allowed, momentum=_MOMENTUM)

    def event(self) -> Event:
        """The event of one release."""
        return self.plan.event()

    def release(self, rows: FloatArray, targets: FloatArray, present: npt.NDArray[np.bool_] | FloatArray) -> FloatArray:
        """Weights [p, k]; each record's loss is multiplied by `present` [n] in [0, 1], 0 for one that is absent."""
        model = nn.Linear(self.dimension, self.loss.outputs, bias=False)
        nn.init.zeros_(model.weight)
        train_weighted(
            model,
            _record_losses(self.loss),
            torch.from_numpy(rows.astype(np.float32)),
            torch.from_numpy(targets.astype(np.float32)),
            present,
            plan=self.plan,
            optimizer=lambda parameters: torch.optim.SGD(
                parameters, lr=self.learning_rate, momentum=_MOMENTUM, nesterov=True
            ),
            averaged_fraction=0.5,
            rng=self.rng,
        )
        return model.weight.detach().numpy().T.astype(np.float64)


def _record_losses(loss: Loss) -> RecordLoss:
    """The loss on torch scores [n, k] and targets [n]: one value a record."""
    match loss:
        case Logistic():
            return lambda scores, y: F.softplus(-y * scores[:, 0])
        case SmoothMargin(width=h):
            return lambda scores, y: (
                h * F.cross_entropy((scores + 1 - F.one_hot(y.long(), scores.shape[1])) / h, y.long(), reduction="none")
            )
        case Softmax():
            return lambda scores, y: F.cross_entropy(scores, y.long(), reduction="none")
        case HuberHinge(width=h):
            return lambda scores, y: _huber_hinge(1 - y * scores[:, 0], h)
        case HuberResidual():
            # Clipping bounds the gradient here, so the loss may be the square itself.
            return lambda scores, y: (scores[:, 0] - y) ** 2 / 2
        case _:
            raise InvalidArgument(f"loss must be one of the library's, got {type(loss).__name__}. Use one of them.")


def _huber_hinge(short: Tensor, width: float) -> Tensor:
    return (short.clamp(-width, width) + width) ** 2 / (4 * width) + (short - width).clamp(min=0)


# ----------------------------------------------------------------------------------------------------------------------
# Which mechanism fits a linear model: one table for all methods and all losses.
# ----------------------------------------------------------------------------------------------------------------------


ConvexMechanism: TypeAlias = (
    ObjectivePerturbation | OutputPerturbation | DPGradientDescent | CandidateSelection | FunctionalMechanism
)

_SHRINKAGE = 0.15
METHODS = ("objective", "output", "dp-gd", "dp-sgd", "exponential", "functional")


def convex_mechanism(
    method: str,
    *,
    loss: Loss,
    epsilon: float,
    delta: float,
    dimension: int,
    regularization: float | None,
    settings: DescentSettings | None,
    candidates: FloatArray | None,
    neighboring_relation: NeighboringRelation,
    rng: KeyedRNG,
) -> ConvexMechanism:
    """The mechanism that fits a linear model by the named method; it knows its event.

    Args:
        method: one of `METHODS`.
        loss: of scores of rows of norm ≤ 1.
        epsilon: > 0.
        delta: in [0, 1).
        dimension: number of columns p, with the intercept's.
        regularization: λ for rows of norm 1, or None for the method's own choice.
        settings: for the two descents, or None.
        candidates: weights [m, p, k] for the exponential mechanism, or None.
        neighboring_relation: the neighboring relation.
        rng: of this fit.
    """
    match checks.one_of(METHODS, method=method):
        case "objective":
            if neighboring_relation is NeighboringRelation.REPLACE_ONE:
                raise InvalidArgument(
                    "neighboring_relation must be 'add_or_remove_one' or 'replace_special' for method='objective', got "
                    "'replace_one': its proof is for one record more or less. Use method='output'."
                )
            chosen = _objective_regularization(loss, epsilon, dimension) if regularization is None else regularization
            return ObjectivePerturbation(
                loss=loss, epsilon=epsilon, delta=delta, regularization=chosen, dimension=dimension, rng=rng
            )
        case "output":
            return OutputPerturbation(
                loss=loss,
                epsilon=epsilon,
                delta=delta,
                regularization=regularization,
                dimension=dimension,
                neighboring_relation=neighboring_relation,
                rng=rng,
            )
        case "exponential":
            if candidates is None:
                raise MissingDeclaration(
                    "candidates must be declared for method='exponential', got None. List weights to choose from."
                )
            return CandidateSelection(
                loss=loss, epsilon=epsilon, candidates=candidates, neighboring_relation=neighboring_relation, rng=rng
            )
        case "functional":
            if not isinstance(loss, Logistic):
                raise InvalidArgument(
                    "method must be another one than 'functional' for this loss, got 'functional': its polynomial is "
                    "that of the logistic loss for two classes. Use method='objective'."
                )
            statistics = LeastSquaresStatistics(
                budget=make_budget(epsilon=epsilon, delta=delta),
                dimension=dimension,
                neighboring_relation=neighboring_relation,
                rng=rng,
            )
            return FunctionalMechanism(statistics=statistics, regularization=regularization)
        case _:
            if settings is None:
                raise MissingDeclaration(
                    f"dataset_size must be declared for method={method!r}, got None. Give the public number of "
                    "records, or a public guess of it."
                )
            return DPGradientDescent(
                loss=loss,
                epsilon=epsilon,
                delta=delta,
                dimension=dimension,
                settings=settings,
                neighboring_relation=neighboring_relation,
                rng=rng,
            )


def _objective_regularization(loss: Loss, epsilon: float, dimension: int) -> float:
    """λ from ε and the number of columns, both public; chosen on six public sets (docs/estimators.md)."""
    rest = epsilon * (1 - 2e-3)
    # Privacy: a quarter of ε for the change of variables. The logistic loss pays nothing from λ = 1/ε on, which is
    # the better deal up to ε = 1.
    least = min_regularization(loss, rest, 0.25)
    if loss.flat_at_corners and epsilon <= 1:
        least = max(least, 1 / rest)
    # Accuracy: noise in p weights is held back by a penalty that grows as it does.
    return max(least, _SHRINKAGE * math.sqrt(dimension) / epsilon)


def release_weights(
    mechanism: ConvexMechanism,
    rows: FloatArray,
    targets: FloatArray,
    present: npt.NDArray[np.bool_],
    weights: FloatArray,
) -> FloatArray:
    """Weights [p, k]: absent records are left out, or have loss 0 where batches are drawn by index.

    Args:
        mechanism: of the loss without weights.
        rows: [n, p] of norm ≤ 1.
        targets: [n].
        present: [n], which records count.
        weights: [n] in [0, 1], how much each record counts. They change no sensitivity.
    """
    if isinstance(mechanism, DPGradientDescent):
        return mechanism.release(rows, np.where(present, targets, 0.0), np.where(present, weights, 0.0))
    if isinstance(mechanism, FunctionalMechanism):
        # Σ w·x·xᵀ and Σ w·x·t are the moments of √w·x and √w·t, which are no longer than x and t.
        roots = np.sqrt(weights[present])
        return mechanism.release(rows[present] * roots[:, None], targets[present] * roots)
    return mechanism.release(rows[present], targets[present], weights[present])


# ----------------------------------------------------------------------------------------------------------------------
# From records to the rows of a convex problem and back: clipped, with a constant column, of norm ≤ 1.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class DesignMatrix:
    """Records x become rows [x, c]/N with N = √(data_norm² + c²); without an intercept x/data_norm.

    The constant column is a column like any other: it is part of the row's norm and its weight is penalized.

    Args:
        data_norm: the largest ℓ2 norm of a record, > 0; longer ones are cut back to it.
        columns: number of columns d ≥ 1 of the records.
        intercept: c > 0, or 0 for a model without intercept.

    Example:
        >>> DesignMatrix(data_norm=3.0, columns=2, intercept=4.0).rows(np.array([[30.0, 0.0]])).round(6).tolist()
        [[0.6, 0.0, 0.8]]
    """

    data_norm: float
    columns: int
    intercept: float

    def __post_init__(self) -> None:
        checks.in_range(2.0**-200, 2.0**200, data_norm=self.data_norm, hint="Rescale the records.")
        checks.non_negative(intercept=self.intercept)

    @classmethod
    def declared(
        cls, *, data_norm: float, columns: int, fit_intercept: bool, intercept_scaling: float | None
    ) -> "DesignMatrix":
        """The design for an estimator's parameters; by default c is half of `data_norm`."""
        if not fit_intercept:
            return cls(data_norm=data_norm, columns=columns, intercept=0.0)
        scaling = data_norm / 2 if intercept_scaling is None else checks.positive(intercept_scaling=intercept_scaling)
        return cls(data_norm=data_norm, columns=columns, intercept=scaling)

    @property
    def dimension(self) -> int:
        """Number of columns p of the rows."""
        return self.columns + (self.intercept > 0)

    @property
    def norm(self) -> float:
        """N."""
        return math.hypot(self.data_norm, self.intercept)

    def rows(self, records: FloatArray) -> FloatArray:
        """Rows [n, p] of norm ≤ 1."""
        clipped = clip_rows(records, self.data_norm) * (self.data_norm / self.norm)
        if self.intercept > 0:
            clipped = np.hstack([clipped, np.full((len(clipped), 1), self.intercept / self.norm)])
        # Once more, for the rounding of the two steps.
        return clip_rows(clipped, 1.0)

    def coefficients(self, weights: FloatArray) -> tuple[FloatArray, FloatArray]:
        """(coefficients [k, d], intercepts [k]) of the records for weights [p, k] of the rows."""
        coefficients = weights[: self.columns].T / self.norm
        if self.intercept == 0:
            return coefficients, np.zeros(weights.shape[1])
        return coefficients, weights[self.columns] * (self.intercept / self.norm)

    def weights(self, candidates: Numbers, outputs: int) -> FloatArray:
        """Weights [m, p, k] of the rows for candidate coefficients of the records, the intercept last.

        Args:
            candidates: [m, p], or [m, k, p] for several outputs.
            outputs: k.
        """
        given = to_float_array(candidates, "candidates")
        listed = given
        if listed.ndim == 2 and outputs == 1:
            listed = listed[:, None, :]
        if listed.ndim != 3 or listed.shape[1:] != (outputs, self.dimension):
            raise InvalidArgument(
                f"candidates must have shape (m, {f'{outputs}, ' if outputs > 1 else ''}{self.dimension}), got "
                f"{given.shape}. Give coefficients and then the intercept."
            )
        scaled = listed.copy()
        scaled[:, :, : self.columns] *= self.norm
        if self.intercept > 0:
            scaled[:, :, self.columns] *= self.norm / self.intercept
        return scaled.transpose(0, 2, 1)
