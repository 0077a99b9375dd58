"""Linear classifiers: `LogisticRegression` and `LinearSVC`.

Every method fits weights of rows [x, c]/N, which are at most 1 long whatever the records are; see `DesignMatrix`.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from scipy.special import expit, softmax
from sklearn.base import ClassifierMixin
from sklearn.utils.validation import check_is_fitted

from sordino import checks
from sordino.definitions import NeighboringRelation
from sordino.errors import InvalidArgument
from sordino.estimators.base import (
    Labels,
    PrivateEstimator,
    RecordWeights,
    check_one_target_per_record,
    declared_classes,
    encode_labels,
    fill_missing,
    require_declared,
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
from sordino.estimators.linear_statistics import CurvatureInference, normal_intervals
from sordino.estimators.losses import HuberHinge, Logistic, Loss, SmoothMargin, Softmax
from sordino.estimators.perturbation import ObjectivePerturbation
from sordino.ledger import Account, Reservation
from sordino.mechanisms import make_budget
from sordino.mechanisms.base import FloatArray, Numbers
from sordino.randomness import KeyedRNG

__all__ = ["LinearSVC", "LogisticRegression"]

_SGD_BATCH = 4096
# With intervals: what is left to the coefficients; the rest is for the noisy Hessian.
_FIT_SHARE = 0.8


class _LinearClassifier(ClassifierMixin, PrivateEstimator):
    """Parameters and steps that all linear classifiers share."""

    def __init__(
        self,
        *,
        epsilon: float | None = None,
        delta: float | None = None,
        data_norm: float | None = None,
        classes: Sequence[Hashable] | None = None,
        method: str = "objective",
        regularization: float | None = None,
        class_weight: Mapping[Hashable, float] | None = None,
        max_sample_weight: float | None = None,
        fit_intercept: bool = True,
        intercept_scaling: float | None = None,
        inference: bool = False,
        neighboring_relation: str = "add_or_remove_one",
        dataset_size: int | None = None,
        batch_size: int | None = None,
        steps: int = 100,
        max_grad_norm: float | None = None,
        learning_rate: float | None = None,
        candidates: npt.ArrayLike | None = None,
        random_state: int | None = None,
        reproducible: bool = False,
        ledger: Account | Reservation | None = None,
    ) -> None:
        self.epsilon = epsilon
        self.delta = delta
        self.data_norm = data_norm
        self.classes = classes
        self.method = method
        self.regularization = regularization
        self.class_weight = class_weight
        self.max_sample_weight = max_sample_weight
        self.fit_intercept = fit_intercept
        self.intercept_scaling = intercept_scaling
        self.inference = inference
        self.neighboring_relation = neighboring_relation
        self.dataset_size = dataset_size
        self.batch_size = batch_size
        self.steps = steps
        self.max_grad_norm = max_grad_norm
        self.learning_rate = learning_rate
        self.candidates = candidates
        self.random_state = random_state
        self.reproducible = reproducible
        self.ledger = ledger

    def _loss(self, classes: int) -> Loss:
        raise NotImplementedError

    def _settings(self) -> DescentSettings | None:
        if self.dataset_size is None:
            return None
        settings = DescentSettings(
            dataset_size=self.dataset_size,
            steps=self.steps,
            max_grad_norm=self.max_grad_norm,
            learning_rate=self.learning_rate,
        )
        if self.method == "dp-gd":
            return settings
        return replace(settings, batch_size=self.batch_size or min(_SGD_BATCH, self.dataset_size))

    def fit(self, X: Numbers, y: Labels, sample_weight: Numbers | None = None) -> "_LinearClassifier":
        """Fit to records X [n, d] with labels y [n]; charged first, then read.

        Args:
            X: [n, d].
            y: [n].
            sample_weight: None, or how much each record counts [n], from 0 to the declared `max_sample_weight`; a
                weight that is no number is 0.
        """
        self._budget()
        classes = declared_classes(self.classes)
        norm = checks.positive(
            data_norm=require_declared(self.data_norm, name="data_norm", meaning="the largest norm of a row")
        )
        neighboring_relation = NeighboringRelation(
            checks.one_of(list(NeighboringRelation), neighboring_relation=self.neighboring_relation)
        )
        rng = self._randomness()
        records = fill_missing(validate_matrix(X, estimator=self, reset=True))
        design = DesignMatrix.declared(
            data_norm=norm,
            columns=records.shape[1],
            fit_intercept=self.fit_intercept,
            intercept_scaling=self.intercept_scaling,
        )
        loss = self._loss(len(classes))
        curvature = self._curvature(loss, design, neighboring_relation, rng)
        mechanism = self._mechanism(loss, design, neighboring_relation, rng, 1.0 if curvature is None else _FIT_SHARE)
        check_one_target_per_record(y, len(records))
        weighting = RecordWeights.declared(
            class_weight=self.class_weight,
            classes=classes,
            sample_weight=sample_weight,
            max_sample_weight=self.max_sample_weight,
            records=len(records),
        )
        sampler = mechanism.plan.sampler.describe() if isinstance(mechanism, DPGradientDescent) else "none"
        events = [mechanism.event(), *([] if curvature is None else [curvature.event()])]
        self._charge(events, neighboring_relation=neighboring_relation, sampler=sampler)
        found = encode_labels(y, classes.tolist())
        present = found >= 0
        targets = found.astype(np.float64) if loss.outputs > 1 else np.where(found == 1, 1.0, -1.0)
        rows = design.rows(records)
        weights = release_weights(mechanism, rows, targets, present, weighting.of(found))
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
        self, loss: Loss, design: DesignMatrix, neighboring_relation: NeighboringRelation, rng: KeyedRNG, share: float
    ) -> ConvexMechanism:
        epsilon, delta = self._budget()
        return ConvexFit(
            method=self.method,
            loss=loss,
            epsilon=epsilon * share,
            delta=delta * share,
            dimension=design.dimension,
            regularization=self.regularization,
            settings=self._settings() if self.method in {"dp-gd", "dp-sgd"} else None,
            candidates=None if self.candidates is None else design.weights(self.candidates, loss.outputs),
            neighboring_relation=neighboring_relation,
            rng=rng,
        ).mechanism()

    def _curvature(
        self, loss: Loss, design: DesignMatrix, neighboring_relation: NeighboringRelation, rng: KeyedRNG
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
            neighboring_relation=neighboring_relation,
            rng=rng,
        )

    def decision_function(self, X: Numbers) -> FloatArray:
        """Scores [n] of the second class, or [n, K]."""
        check_is_fitted(self)
        records = fill_missing(validate_matrix(X, estimator=self, reset=False))
        scores = records @ self.coef_.T + self.intercept_
        return scores[:, 0] if scores.shape[1] == 1 else scores

    def predict(self, X: Numbers) -> npt.NDArray[np.generic]:
        """The class of each record [n]; a missing entry is 0."""
        scores = self.decision_function(X)
        places = (scores > 0).astype(np.int64) if scores.ndim == 1 else scores.argmax(axis=1)
        return self.classes_[places]


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
        scores = self.decision_function(X)
        if scores.ndim == 1:
            return np.stack([expit(-scores), expit(scores)], axis=1)
        return softmax(scores, axis=1)

    def predict_log_proba(self, X: Numbers) -> FloatArray:
        """Logarithms of the class probabilities [n, K]."""
        scores = self.decision_function(X)
        if scores.ndim == 1:
            return np.stack([-np.logaddexp(0.0, scores), -np.logaddexp(0.0, -scores)], axis=1)
        return np.log(softmax(scores, axis=1))


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

    def __init__(
        self,
        *,
        epsilon: float | None = None,
        delta: float | None = None,
        data_norm: float | None = None,
        classes: Sequence[Hashable] | None = None,
        method: str = "objective",
        huber_width: float = 0.5,
        regularization: float | None = None,
        class_weight: Mapping[Hashable, float] | None = None,
        max_sample_weight: float | None = None,
        fit_intercept: bool = True,
        intercept_scaling: float | None = None,
        neighboring_relation: str = "add_or_remove_one",
        dataset_size: int | None = None,
        batch_size: int | None = None,
        steps: int = 100,
        max_grad_norm: float | None = None,
        learning_rate: float | None = None,
        candidates: npt.ArrayLike | None = None,
        random_state: int | None = None,
        reproducible: bool = False,
        ledger: Account | Reservation | None = None,
    ) -> None:
        super().__init__(
            epsilon=epsilon,
            delta=delta,
            data_norm=data_norm,
            classes=classes,
            method=method,
            regularization=regularization,
            class_weight=class_weight,
            max_sample_weight=max_sample_weight,
            fit_intercept=fit_intercept,
            intercept_scaling=intercept_scaling,
            neighboring_relation=neighboring_relation,
            dataset_size=dataset_size,
            batch_size=batch_size,
            steps=steps,
            max_grad_norm=max_grad_norm,
            learning_rate=learning_rate,
            candidates=candidates,
            random_state=random_state,
            reproducible=reproducible,
            ledger=ledger,
        )
        self.huber_width = huber_width

    def _loss(self, classes: int) -> Loss:
        if classes == 2:
            return HuberHinge(width=self.huber_width)
        return SmoothMargin(outputs=classes, width=self.huber_width)
