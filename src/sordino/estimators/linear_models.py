"""Linear models: `LogisticRegression`, `LinearSVC`, `LinearRegression` and `Ridge`.

Every method fits weights of rows [x, c]/N, which are at most 1 long whatever the records are; see `DesignMatrix`.
Targets of regressions are moved to [−1, 1].
"""

from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from scipy.special import softmax
from sklearn.utils.validation import check_is_fitted

from sordino import checks
from sordino.definitions import NeighboringRelation
from sordino.errors import InvalidArgument
from sordino.estimators.base import (
    Labels,
    PrivateEstimator,
    PrivateRegressor,
    WeightedClassifier,
    class_probabilities,
    declared_classes,
    declared_norm,
    declared_relation,
    fill_missing,
    validate_matrix,
)
from sordino.estimators.linear_mechanisms import (
    ConvexMechanism,
    DescentSettings,
    DesignMatrix,
    DPGradientDescent,
    convex_mechanism,
    release_weights,
)
from sordino.estimators.linear_statistics import (
    AdaptiveStatistics,
    CurvatureInference,
    LeastSquaresStatistics,
    RegressionInference,
    normal_intervals,
    replicate_intervals,
)
from sordino.estimators.losses import HuberHinge, HuberResidual, Logistic, Loss, SmoothMargin, Softmax
from sordino.estimators.perturbation import ObjectivePerturbation
from sordino.mechanisms import GaussianBudget, make_budget
from sordino.mechanisms.base import FloatArray, Numbers
from sordino.randomness import KeyedRNG


@dataclass(kw_only=True, eq=False, repr=False)
class _LinearModel(PrivateEstimator):
    """Parameters and steps that all linear models share."""

    data_norm: float | None = None
    fit_intercept: bool = True
    intercept_scaling: float | None = None
    neighboring_relation: str = "add_or_remove_one"
    dataset_size: int | None = None
    steps: int = 100
    max_grad_norm: float | None = None
    learning_rate: float | None = None

    def _design(self, columns: int) -> DesignMatrix:
        return DesignMatrix.declared(
            data_norm=declared_norm(self.data_norm),
            columns=columns,
            fit_intercept=self.fit_intercept,
            intercept_scaling=self.intercept_scaling,
        )

    def _settings(self, *, noise_per_weight: float = DescentSettings.noise_per_weight) -> DescentSettings | None:
        if self.dataset_size is None:
            return None
        return DescentSettings(
            dataset_size=self.dataset_size,
            steps=self.steps,
            max_grad_norm=self.max_grad_norm,
            learning_rate=self.learning_rate,
            noise_per_weight=noise_per_weight,
        )


def _sampler(mechanism: object) -> str:
    return mechanism.plan.sampler.describe() if isinstance(mechanism, DPGradientDescent) else "none"


# ----------------------------------------------------------------------------------------------------------------------
# Classifiers.
# ----------------------------------------------------------------------------------------------------------------------


_SGD_BATCH = 4096
# With intervals: what is left to the coefficients; the rest is for the noisy Hessian.
_FIT_SHARE = 0.8


@dataclass(kw_only=True, eq=False, repr=False)
class _LinearClassifier(_LinearModel, WeightedClassifier):
    """Parameters and steps that all linear classifiers share."""

    method: str = "objective"
    regularization: float | None = None
    batch_size: int | None = None
    candidates: npt.ArrayLike | None = None
    inference = False  # a parameter of `LogisticRegression`

    def _loss(self, classes: int) -> Loss:
        raise NotImplementedError

    def fit(self, X: Numbers, y: Labels, sample_weight: Numbers | None = None) -> "_LinearClassifier":
        """Fit to records X [n, d] with labels y [n]; charged first, then read.

        Args:
            X: [n, d].
            y: [n].
            sample_weight: None, or how much each record counts [n], from 0 to the declared `max_sample_weight`; a
                weight that is no number is 0.
        """
        classes = declared_classes(self.classes)
        relation = declared_relation(self.neighboring_relation)
        rng = self._randomness()
        records = fill_missing(validate_matrix(X, estimator=self, reset=True))
        design = self._design(records.shape[1])
        loss = self._loss(len(classes))
        curvature = self._curvature(loss, design, relation, rng)
        mechanism = self._mechanism(loss, design, relation, rng, 1.0 if curvature is None else _FIT_SHARE)
        found, counted = self._weighted_labels(y, len(records), sample_weight)
        events = [mechanism.event(), *([] if curvature is None else [curvature.event()])]
        self._charge(events, neighboring_relation=relation, sampler=_sampler(mechanism))
        present = found >= 0
        targets = found.astype(np.float64) if loss.outputs > 1 else np.where(found == 1, 1.0, -1.0)
        rows = design.rows(records)
        weights = release_weights(mechanism, rows, targets, present, counted)
        self.classes_ = classes
        self.coef_, self.intercept_ = design.coefficients(weights)
        if curvature is not None and isinstance(mechanism, ObjectivePerturbation):
            unpulled, errors = curvature.release(
                rows[present], weights[:, 0], regularization=mechanism.regularization, stddev=mechanism.stddev
            )
            self.unpenalised_, self.standard_errors_ = (
                np.concatenate([part.ravel() for part in design.coefficients(column[:, None])])
                for column in (unpulled, errors)
            )
        return self

    def _mechanism(
        self, loss: Loss, design: DesignMatrix, relation: NeighboringRelation, rng: KeyedRNG, share: float
    ) -> ConvexMechanism:
        epsilon, delta = self._budget()
        settings = self._settings() if self.method in {"dp-gd", "dp-sgd"} else None
        if settings is not None and self.method == "dp-sgd":
            settings = replace(settings, batch_size=self.batch_size or min(_SGD_BATCH, settings.dataset_size))
        return convex_mechanism(
            self.method,
            loss=loss,
            epsilon=epsilon * share,
            delta=delta * share,
            dimension=design.dimension,
            regularization=self.regularization,
            settings=settings,
            candidates=None if self.candidates is None else design.weights(self.candidates, loss.outputs),
            neighboring_relation=relation,
            rng=rng,
        )

    def _curvature(
        self, loss: Loss, design: DesignMatrix, relation: NeighboringRelation, rng: KeyedRNG
    ) -> CurvatureInference | None:
        if not self.inference:
            return None
        if self.class_weight is not None or self.max_sample_weight is not None:
            raise InvalidArgument(
                "inference must be False with class_weight or max_sample_weight, got True. The intervals are for "
                "records that all count alike."
            )
        if self.method != "objective" or not isinstance(loss, Logistic):
            raise InvalidArgument(
                f"inference must be False for method={self.method!r} and {len(self.classes or ())} classes, got True. "
                "Use method='objective' with two classes: other methods' distributions are not known."
            )
        epsilon, delta = self._budget()
        return CurvatureInference(
            budget=make_budget(epsilon=epsilon * (1 - _FIT_SHARE), delta=delta * (1 - _FIT_SHARE)),
            dimension=design.dimension,
            neighboring_relation=relation,
            rng=rng,
        )

    def _scores(self, X: Numbers) -> FloatArray:
        check_is_fitted(self)
        records = fill_missing(validate_matrix(X, estimator=self, reset=False))
        scores = records @ self.coef_.T + self.intercept_
        return scores[:, 0] if scores.shape[1] == 1 else scores


@dataclass(kw_only=True, eq=False, repr=False)
class LogisticRegression(_LinearClassifier):
    """Private logistic regression, binary and multinomial.

    ``method="objective"`` needs nothing but the four declarations. On public data ``"dp-gd"`` was as accurate, and
    more so at ε = 0.1, but wants a guess of the number of records.

    Guarantee: coefficients and intercepts are (epsilon, delta)-differentially private under `neighboring_relation`, as
    `guarantee_` states. Records longer than `data_norm` are cut back to it, a missing entry is 0; a record with a label
    that is not among `classes` contributes nothing. Nothing else depends on the data: no attribute, no warning, no
    error.

    Args:
        epsilon: ε > 0. Required.
        delta: δ in [0, 1); 0 gives pure privacy for the methods that have it. Required.
        data_norm: the largest ℓ2 norm of a record, > 0, from public knowledge. Required.
        classes: all labels, at least two. Required.
        method: ``objective`` (perturbation of the objective), ``output`` (of the minimizer), ``dp-gd`` and ``dp-sgd``
            (noisy gradient descent through the training engine), ``exponential`` (choice among `candidates`),
            ``functional`` (two classes: a quadratic in place of the loss, with noisy coefficients).
        regularization: λ > 0 of (λ/2)‖W‖² added to the *sum* of losses, for records scaled to norm 1; None: the
            method's own. With weights it is added to the sum of losses weighted by weight / largest weight.
        class_weight: None, or how much a record of each class counts, {class: weight ≥ 0}, from public knowledge or
            from counts that were paid for; a class that is not named counts 1.
        max_sample_weight: None, or the largest `sample_weight` of `fit`, > 0, from public knowledge; larger ones are
            cut to it.
        fit_intercept: whether to append a constant column, which counts in the norm and is penalized.
        intercept_scaling: the constant; None takes data_norm/2.
        inference: for ``objective`` and two classes: whether `confidence_intervals` will be asked for; a fifth of the
            budget then goes to a noisy Hessian.
        neighboring_relation: ``add_or_remove_one``, ``replace_special`` or ``replace_one`` (not for ``objective``).
        dataset_size: for the two descents: the public number of records, or a public guess.
        batch_size: for ``dp-sgd``: the expected size of a batch; None takes 4096 or `dataset_size`.
        steps: for the two descents.
        max_grad_norm: clipping norm for the two descents, for records scaled to norm 1; None takes the largest norm of
            a record's gradient, or down to a quarter of it where there is little budget.
        learning_rate: for the two descents; None takes the largest that is stable, or less where there is little
            budget.
        candidates: for ``exponential``: coefficients with the intercept last, (m, d + 1), or (m, K, d + 1) for K > 2.
        random_state: None, or a seed together with `reproducible`.
        reproducible: whether this is a test run; `guarantee_` then carries "not for release".
        ledger: None, or the account, or a reservation on it, that every fit is charged to.

    Attributes:
        coef_: [1, d] or [K, d].
        intercept_: [1] or [K].
        classes_: the declared classes.
        unpenalised_: with `inference`, coefficients without the penalty's pull, the intercept last [d + 1].
        standard_errors_: with `inference`, their deviations, sampling and noise counted [d + 1].
        guarantee_: the guarantee.
        events_: what was done.

    Example:
        >>> X, y = np.repeat([[1.0, 0.0], [0.0, 1.0]], 500, axis=0), np.repeat([0, 1], 500)
        >>> model = LogisticRegression(epsilon=1.0, delta=1e-6, data_norm=1.0, classes=(0, 1)).fit(X, y)
        >>> float(model.score(X, y)), model.guarantee_.epsilon
        (1.0, 1.0)

    References:
        docs/proofs/objective-perturbation.md and docs/proofs/output-perturbation.md.
    """

    inference: bool = False

    def confidence_intervals(self, level: float = 0.95) -> FloatArray:
        """Intervals of the population's coefficients, the intercept last [d + 1, 2], sampling and noise counted.

        For a logistic model, and records inside the declared norm. No release of its own. How often they cover:
        docs/proofs/confidence-intervals.md.

        Args:
            level: the share, in (0, 1), of fits whose interval holds the truth.
        """
        check_is_fitted(self, "standard_errors_")
        return normal_intervals(self.unpenalised_, self.standard_errors_, level)

    def _loss(self, classes: int) -> Loss:
        return Logistic() if classes == 2 else Softmax(outputs=classes)

    def predict_proba(self, X: Numbers) -> FloatArray:
        """Class probabilities [n, K]."""
        return class_probabilities(self._scores(X))

    def predict_log_proba(self, X: Numbers) -> FloatArray:
        """Logarithms of the class probabilities [n, K]."""
        scores = self._scores(X)
        if scores.ndim == 1:
            return np.stack([-np.logaddexp(0.0, scores), -np.logaddexp(0.0, -scores)], axis=1)
        return np.log(softmax(scores, axis=1))


@dataclass(kw_only=True, eq=False, repr=False)
class LinearSVC(_LinearClassifier):
    """A private linear support vector classifier: Huber hinge loss, rounded multi-class hinge for more classes.

    Guarantee: that of `LogisticRegression`, whose parameters it shares; `huber_width` in addition.

    Args:
        huber_width: half-width h > 0 of the parabola that rounds the hinge's kink, for more than two classes the
            temperature at which the maximum is rounded; the curvature is 1/(2h) in both.

    Example:
        >>> X, y = np.repeat([[1.0, 0.0], [0.0, 1.0]], 500, axis=0), np.repeat(["no", "yes"], 500)
        >>> model = LinearSVC(epsilon=1.0, delta=1e-6, data_norm=1.0, classes=("no", "yes")).fit(X, y)
        >>> float(model.score(X, y))
        1.0
    """

    huber_width: float = 0.5

    def _loss(self, classes: int) -> Loss:
        if classes == 2:
            return HuberHinge(width=self.huber_width)
        return SmoothMargin(outputs=classes, width=self.huber_width)


# ----------------------------------------------------------------------------------------------------------------------
# Regressions.
# ----------------------------------------------------------------------------------------------------------------------


_Mechanism: TypeAlias = LeastSquaresStatistics | AdaptiveStatistics | RegressionInference | ConvexMechanism

_METHODS = ("sufficient-statistics", "adassp", "output", "objective", "dp-gd")


@dataclass(kw_only=True, eq=False, repr=False)
class _LeastSquares(_LinearModel, PrivateRegressor):
    """Parameters and steps that the two regressions share."""

    method: str = "sufficient-statistics"
    huber_threshold: float = 1.0
    inference = False  # a parameter of `LinearRegression`

    def _regularization(self, design: DesignMatrix) -> float | None:  # noqa: ARG002 (every method has its own)
        return None

    def fit(self, X: Numbers, y: Numbers, sample_weight: Numbers | None = None) -> "_LeastSquares":
        """Fit to records X [n, d] with targets y [n]; charged first, then read.

        Args:
            X: [n, d].
            y: [n].
            sample_weight: None, or how much each record counts [n], from 0 to the declared `max_sample_weight`; a
                weight that is no number is 0.
        """
        low, high = self._target_ends()
        # Without an intercept the model passes through 0, wherever the bounds lie.
        center, half = self._target_scale() if self.fit_intercept else (0.0, max(high, -low))
        relation = declared_relation(self.neighboring_relation)
        records = fill_missing(validate_matrix(X, estimator=self, reset=True))
        design = self._design(records.shape[1])
        mechanism = self._mechanism(design, relation, self._randomness())
        targets, counted = self._targets(y, len(records), sample_weight, scale=(center, half))
        if isinstance(mechanism, LeastSquaresStatistics | AdaptiveStatistics | RegressionInference):
            events = mechanism.events()
        else:
            events = [mechanism.event()]
        self._charge(events, neighboring_relation=relation, sampler=_sampler(mechanism))
        present = np.isfinite(targets)
        rows = design.rows(records)
        if isinstance(mechanism, RegressionInference):
            solution, replicates = mechanism.release(rows[present], targets[present])
            weights = solution[:, None]
            slopes, constants = design.coefficients(replicates.T)
            self.replicates_ = np.hstack([slopes * half, constants[:, None] * half + center])
        elif isinstance(mechanism, LeastSquaresStatistics | AdaptiveStatistics):
            # Σ w·x·xᵀ and Σ w·x·y are the moments of √w·x and √w·y, which are no longer than x and y.
            roots = np.sqrt(counted[present])
            added = self._regularization(design)
            weights = mechanism.weights(rows[present] * roots[:, None], targets[present] * roots, regularization=added)
            weights = weights[:, None]
        else:
            weights = release_weights(mechanism, rows, targets, present, counted)
        coefficients, intercepts = design.coefficients(weights)
        self.coef_ = coefficients[0] * half
        self.intercept_ = float(intercepts[0] * half + center)
        return self

    def _mechanism(self, design: DesignMatrix, relation: NeighboringRelation, rng: KeyedRNG) -> _Mechanism:
        epsilon, delta = self._budget()
        checks.one_of(_METHODS, method=self.method)
        if self.inference:
            return self._inference(design, relation, rng)
        if self.method in {"sufficient-statistics", "adassp"}:
            budget = make_budget(epsilon=epsilon, delta=delta)
            if self.method == "sufficient-statistics":
                return LeastSquaresStatistics(
                    budget=budget, dimension=design.dimension, neighboring_relation=relation, rng=rng
                )
            if not isinstance(budget, GaussianBudget):
                raise InvalidArgument("delta must be > 0 for method='adassp', got 0. Use 'sufficient-statistics'.")
            return AdaptiveStatistics(budget=budget, dimension=design.dimension, neighboring_relation=relation, rng=rng)
        return convex_mechanism(
            self.method,
            loss=HuberResidual(threshold=self.huber_threshold),
            epsilon=epsilon,
            delta=delta,
            dimension=design.dimension,
            regularization=self._regularization(design),
            settings=self._settings(noise_per_weight=1.0),
            candidates=None,
            neighboring_relation=relation,
            rng=rng,
        )

    def _inference(self, design: DesignMatrix, relation: NeighboringRelation, rng: KeyedRNG) -> RegressionInference:
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
            neighboring_relation=relation,
            rng=rng,
        )

    def predict(self, X: Numbers) -> FloatArray:
        """Predicted targets [n]; a missing entry is 0."""
        check_is_fitted(self)
        records = fill_missing(validate_matrix(X, estimator=self, reset=False))
        return np.asarray(records @ self.coef_ + self.intercept_)


@dataclass(kw_only=True, eq=False, repr=False)
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

    inference: bool = False

    def confidence_intervals(self, level: float = 0.95) -> FloatArray:
        """Intervals of the population's coefficients, the intercept last [d + 1, 2], sampling and noise counted.

        For a linear model with residuals of one variance, and records inside the declared norm and bounds. No release
        of its own. How often they cover: docs/proofs/confidence-intervals.md.

        Args:
            level: the share, in (0, 1), of fits whose interval holds the truth.
        """
        check_is_fitted(self, "replicates_")
        return replicate_intervals(np.append(self.coef_, self.intercept_), self.replicates_, level)


@dataclass(kw_only=True, eq=False, repr=False)
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

    alpha: float = 1.0

    def _regularization(self, design: DesignMatrix) -> float | None:
        return checks.non_negative(alpha=self.alpha) / design.norm**2
