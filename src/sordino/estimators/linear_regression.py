"""Linear regression: `LinearRegression` and `Ridge`.

Rows are [x, c]/N, at most 1 long; targets are moved to [−1, 1]. See `DesignMatrix`.
"""

from typing import TypeAlias

import numpy as np
from sklearn.base import RegressorMixin
from sklearn.utils.validation import check_is_fitted

from sordino import checks
from sordino.definitions import NeighboringRelation
from sordino.errors import InvalidArgument
from sordino.estimators.base import (
    PrivateEstimator,
    RecordWeights,
    check_one_target_per_record,
    fill_missing,
    require_declared,
    scaled_targets,
    validate_matrix,
)
from sordino.estimators.linear_mechanisms import (
    ConvexFit,
    ConvexMechanism,
    DescentSettings,
    DesignMatrix,
    DPGradientDescent,
    release_weights,
)
from sordino.estimators.linear_statistics import (
    AdaptiveStatistics,
    LeastSquaresStatistics,
    RegressionInference,
    replicate_intervals,
)
from sordino.estimators.losses import HuberResidual
from sordino.events import Event
from sordino.ledger import Account, Reservation
from sordino.mechanisms import GaussianBudget, make_budget
from sordino.mechanisms.base import Bounds, FloatArray, Numbers, checked_bounds
from sordino.randomness import KeyedRNG

__all__ = ["LinearRegression", "Ridge"]

_Mechanism: TypeAlias = LeastSquaresStatistics | AdaptiveStatistics | RegressionInference | ConvexMechanism

_METHODS = ("sufficient-statistics", "adassp", "output", "objective", "dp-gd")


class _LeastSquares(RegressorMixin, PrivateEstimator):
    """Parameters and steps that the two regressions share."""

    def __init__(
        self,
        *,
        epsilon: float | None = None,
        delta: float | None = None,
        data_norm: float | None = None,
        target_bounds: Bounds | None = None,
        method: str = "sufficient-statistics",
        fit_intercept: bool = True,
        intercept_scaling: float | None = None,
        huber_threshold: float = 1.0,
        inference: bool = False,
        max_sample_weight: float | None = None,
        neighboring_relation: str = "add_or_remove_one",
        dataset_size: int | None = None,
        steps: int = 100,
        max_grad_norm: float | None = None,
        learning_rate: float | None = None,
        random_state: int | None = None,
        reproducible: bool = False,
        ledger: Account | Reservation | None = None,
    ) -> None:
        self.epsilon = epsilon
        self.delta = delta
        self.data_norm = data_norm
        self.target_bounds = target_bounds
        self.method = method
        self.fit_intercept = fit_intercept
        self.intercept_scaling = intercept_scaling
        self.huber_threshold = huber_threshold
        self.inference = inference
        self.max_sample_weight = max_sample_weight
        self.neighboring_relation = neighboring_relation
        self.dataset_size = dataset_size
        self.steps = steps
        self.max_grad_norm = max_grad_norm
        self.learning_rate = learning_rate
        self.random_state = random_state
        self.reproducible = reproducible
        self.ledger = ledger

    def _regularization(self, design: DesignMatrix) -> float | None:
        raise NotImplementedError

    def fit(self, X: Numbers, y: Numbers, sample_weight: Numbers | None = None) -> "_LeastSquares":
        """Fit to records X [n, d] with targets y [n]; charged first, then read.

        Args:
            X: [n, d].
            y: [n].
            sample_weight: None, or how much each record counts [n], from 0 to the declared `max_sample_weight`; a
                weight that is no number is 0.
        """
        self._budget()
        checks.one_of(_METHODS, method=self.method)
        norm = checks.positive(
            data_norm=require_declared(self.data_norm, name="data_norm", meaning="the largest norm of a row")
        )
        bounds = checked_bounds(
            require_declared(self.target_bounds, name="target_bounds", meaning="(lowest, highest) target")
        )
        neighboring_relation = NeighboringRelation(
            checks.one_of(list(NeighboringRelation), neighboring_relation=self.neighboring_relation)
        )
        rng = self._randomness()
        records = fill_missing(validate_matrix(X, estimator=self, reset=True))
        check_one_target_per_record(y, len(records))
        counted = RecordWeights.declared(
            sample_weight=sample_weight, max_sample_weight=self.max_sample_weight, records=len(records)
        ).of_records
        design = DesignMatrix.declared(
            data_norm=norm,
            columns=records.shape[1],
            fit_intercept=self.fit_intercept,
            intercept_scaling=self.intercept_scaling,
        )
        # Without an intercept the model passes through 0, wherever the bounds lie.
        center = bounds[0] / 2 + bounds[1] / 2 if self.fit_intercept else 0.0
        half = max(bounds[1] - center, center - bounds[0])
        mechanism = self._mechanism(design, neighboring_relation, rng)
        sampler = mechanism.plan.sampler.describe() if isinstance(mechanism, DPGradientDescent) else "none"
        self._charge(_events(mechanism), neighboring_relation=neighboring_relation, sampler=sampler)
        targets = scaled_targets(y, bounds, center=center, half=half)
        present = np.isfinite(targets)
        rows = design.rows(records)
        if counted is not None and isinstance(mechanism, LeastSquaresStatistics | AdaptiveStatistics):
            # Σ w·x·xᵀ and Σ w·x·y are the moments of √w·x and √w·y, which are no longer than x and y.
            rows, targets = rows * np.sqrt(counted)[:, None], targets * np.sqrt(counted)
        if isinstance(mechanism, RegressionInference):
            solution, replicates = mechanism.release(rows[present], targets[present])
            weights = solution[:, None]
            slopes, constants = design.coefficients(replicates.T)
            self.replicates_ = np.hstack([slopes * half, constants[:, None] * half + center])
        elif isinstance(mechanism, LeastSquaresStatistics | AdaptiveStatistics):
            added = self._regularization(design)
            weights = mechanism.weights(rows[present], targets[present], regularization=added)[:, None]
        else:
            weights = release_weights(mechanism, rows, targets, present, counted)
        coefficients, intercepts = design.coefficients(weights)
        self.coef_ = coefficients[0] * half
        self.intercept_ = float(intercepts[0] * half + center)
        return self

    def _mechanism(self, design: DesignMatrix, neighboring_relation: NeighboringRelation, rng: KeyedRNG) -> _Mechanism:
        epsilon, delta = self._budget()
        if self.inference:
            return self._inference(design, neighboring_relation, rng)
        if self.method in {"sufficient-statistics", "adassp"}:
            spent = make_budget(epsilon=epsilon, delta=delta)
            if self.method == "sufficient-statistics":
                return LeastSquaresStatistics(
                    budget=spent, dimension=design.dimension, neighboring_relation=neighboring_relation, rng=rng
                )
            if not isinstance(spent, GaussianBudget):
                raise InvalidArgument("delta must be > 0 for method='adassp', got 0. Use 'sufficient-statistics'.")
            return AdaptiveStatistics(
                budget=spent, dimension=design.dimension, neighboring_relation=neighboring_relation, rng=rng
            )
        settings = None
        if self.dataset_size is not None:
            settings = DescentSettings(
                dataset_size=self.dataset_size,
                steps=self.steps,
                max_grad_norm=self.max_grad_norm,
                learning_rate=self.learning_rate,
                noise_per_weight=1.0,
            )
        return ConvexFit(
            method=self.method,
            loss=HuberResidual(threshold=self.huber_threshold),
            epsilon=epsilon,
            delta=delta,
            dimension=design.dimension,
            regularization=self._regularization(design),
            settings=settings,
            candidates=None,
            neighboring_relation=neighboring_relation,
            rng=rng,
        ).mechanism()

    def _inference(
        self, design: DesignMatrix, neighboring_relation: NeighboringRelation, rng: KeyedRNG
    ) -> RegressionInference:
        epsilon, delta = self._budget()
        if self.max_sample_weight is not None:
            raise InvalidArgument(
                "inference must be False with max_sample_weight, got True. The intervals are for records that all "
                "count alike."
            )
        if self.method != "sufficient-statistics" or not self.fit_intercept:
            raise InvalidArgument(
                f"inference must be False for method={self.method!r}, fit_intercept={self.fit_intercept}, got True. "
                "Use method='sufficient-statistics' with an intercept: other methods' distributions are not known."
            )
        return RegressionInference(
            budget=make_budget(epsilon=epsilon, delta=delta),
            dimension=design.dimension,
            constant=design.intercept / design.norm,
            neighboring_relation=neighboring_relation,
            rng=rng,
        )

    def predict(self, X: Numbers) -> FloatArray:
        """Predicted targets [n]; a missing entry is 0."""
        check_is_fitted(self)
        records = fill_missing(validate_matrix(X, estimator=self, reset=False))
        return np.asarray(records @ self.coef_ + self.intercept_)


def _events(mechanism: _Mechanism) -> list[Event]:
    if isinstance(mechanism, LeastSquaresStatistics | AdaptiveStatistics | RegressionInference):
        return mechanism.events()
    return [mechanism.event()]


class LinearRegression(_LeastSquares):
    """Private linear regression.

    ``method="sufficient-statistics"`` is the one to start with: it needs no choice, has δ = 0 too, and was the most
    accurate on public data at nearly every ε. ``"adassp"`` spends a third of its budget on the smallest eigenvalue of
    AᵀA, which is seldom far from 0, and its proof asks for several times the regularization that predicts best.

    Guarantee: coefficients and intercept are (epsilon, delta)-differentially private under `neighboring_relation`, as
    `guarantee_` states. Records longer than `data_norm` are cut back to it and targets clipped to `target_bounds`; a
    missing entry is 0, and a record without a finite target contributes nothing. Nothing else depends on the data.

    Args:
        epsilon: ε > 0. Required.
        delta: δ in [0, 1); 0 gives pure privacy where the method has it. Required.
        data_norm: the largest ℓ2 norm of a record, > 0, from public knowledge. Required.
        target_bounds: (lowest, highest) target, from public knowledge. Required.
        method: ``sufficient-statistics`` (XᵀX and Xᵀy with noise; δ = 0 for Laplace), ``adassp``, ``output`` and
            ``objective`` (of a ridge problem with Huber's loss), ``dp-gd`` (noisy gradient descent).
        fit_intercept: whether to append a constant column, which counts in the norm.
        intercept_scaling: the constant; None takes data_norm/2.
        huber_threshold: residual from which on the loss is linear, in units of half the target's range; for ``output``
            and ``objective``.
        inference: for ``sufficient-statistics``: whether `confidence_intervals` will be asked for; a tenth of the
            budget then goes to the residual variance.
        max_sample_weight: None, or the largest `sample_weight` of `fit`, > 0, from public knowledge; larger ones are
            cut to it.
        neighboring_relation: ``add_or_remove_one``, ``replace_special`` or ``replace_one`` (not for ``objective``).
        dataset_size: for ``dp-gd``: the public number of records, or a public guess.
        steps: for ``dp-gd``.
        max_grad_norm: clipping norm for ``dp-gd``, for records scaled to norm 1 and targets to [−1, 1]; None derives it
            from the plan.
        learning_rate: for ``dp-gd``; None derives it from the plan.
        random_state: None, or a seed together with `reproducible`.
        reproducible: whether this is a test run; `guarantee_` then carries "not for release".
        ledger: None, or the account, or a reservation on it, that every fit is charged to.

    Attributes:
        coef_: [d].
        intercept_: a number.
        replicates_: with `inference`, what other records and other noise might have given [500, d + 1].
        guarantee_: the guarantee.
        events_: what was done.

    Example:
        >>> X = np.tile([[0.6], [-0.2], [1.0], [-1.0]], (1000, 1))
        >>> model = LinearRegression(epsilon=1.0, delta=1e-6, data_norm=1.0, target_bounds=(-3.0, 3.0))
        >>> model.fit(X, 2 * X[:, 0] + 1).predict([[0.5]]).round(0).tolist()
        [2.0]

    References:
        Wang 2018, "Revisiting differentially private linear regression", algorithm 2.
    """

    def _regularization(self, design: DesignMatrix) -> float | None:  # noqa: ARG002 (every method has its own)
        return None

    def confidence_intervals(self, level: float = 0.95) -> FloatArray:
        """Intervals of the population's coefficients, the intercept last [d + 1, 2], sampling and noise counted.

        For a linear model with residuals of one variance, and records inside the declared norm and bounds. No release
        of its own. How often they cover: docs/proofs/confidence-intervals.md.

        Args:
            level: the share, in (0, 1), of fits whose interval holds the truth.
        """
        check_is_fitted(self, "replicates_")
        return replicate_intervals(np.append(self.coef_, self.intercept_), self.replicates_, level)


class Ridge(_LeastSquares):
    """Private ridge regression: minimizes Σ(y − x·w − b)² + alpha·(‖w‖² + (b − m)²/c²), m the middle of the bounds.

    A larger alpha shrinks more; with ``objective`` privacy needs some least alpha, which the refusal names for rows of
    norm 1. With ``sufficient-statistics`` and ``adassp`` alpha is the least regularization, and with ``dp-gd`` there is
    none.

    Guarantee: that of `LinearRegression`, whose parameters it shares; `alpha` in addition.

    Args:
        alpha: ≥ 0, in the units of the records; > 0 for ``output`` and ``objective``.

    Example:
        >>> X = np.tile([[0.6], [-0.2], [1.0], [-1.0]], (1000, 1))
        >>> model = Ridge(epsilon=1.0, delta=1e-6, data_norm=1.0, target_bounds=(-3.0, 3.0), alpha=1.0)
        >>> model.fit(X, 2 * X[:, 0] + 1).predict([[0.5]]).round(0).tolist()
        [2.0]
    """

    def __init__(
        self,
        *,
        alpha: float = 1.0,
        epsilon: float | None = None,
        delta: float | None = None,
        data_norm: float | None = None,
        target_bounds: Bounds | None = None,
        method: str = "sufficient-statistics",
        fit_intercept: bool = True,
        intercept_scaling: float | None = None,
        huber_threshold: float = 1.0,
        max_sample_weight: float | None = None,
        neighboring_relation: str = "add_or_remove_one",
        dataset_size: int | None = None,
        steps: int = 100,
        max_grad_norm: float | None = None,
        learning_rate: float | None = None,
        random_state: int | None = None,
        reproducible: bool = False,
        ledger: Account | Reservation | None = None,
    ) -> None:
        super().__init__(
            epsilon=epsilon,
            delta=delta,
            data_norm=data_norm,
            target_bounds=target_bounds,
            method=method,
            fit_intercept=fit_intercept,
            intercept_scaling=intercept_scaling,
            huber_threshold=huber_threshold,
            max_sample_weight=max_sample_weight,
            neighboring_relation=neighboring_relation,
            dataset_size=dataset_size,
            steps=steps,
            max_grad_norm=max_grad_norm,
            learning_rate=learning_rate,
            random_state=random_state,
            reproducible=reproducible,
            ledger=ledger,
        )
        self.alpha = alpha

    def _regularization(self, design: DesignMatrix) -> float | None:
        return checks.non_negative(alpha=self.alpha) / design.norm**2
