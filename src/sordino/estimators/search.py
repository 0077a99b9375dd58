"""`PrivateGridSearch`: the choice of parameters is charged.

scikit-learn's own search clones an estimator and fits it many times to parts of the same records, and reports one of
these fits. All of them were paid for by the records, and so was the choice among them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from sklearn.base import BaseEstimator, MetaEstimatorMixin, clone
from sklearn.model_selection import ParameterGrid
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import Binarizer, Normalizer, PolynomialFeatures
from sklearn.utils.metaestimators import available_if
from sklearn.utils.validation import check_is_fitted

from sordino import checks
from sordino.data.encoder import SchemaEncoder
from sordino.definitions import Guarantee, NeighboringRelation
from sordino.errors import InvalidArgument, MissingDeclaration
from sordino.estimators.base import (
    Labels,
    PrivateEstimator,
    check_one_target_per_record,
    common_relation,
    declared_classes,
    dry_run_events,
    encode_labels,
    independent_copy,
    scaled_targets,
    split_budget_equally,
    validate_matrix,
)
from sordino.estimators.preprocessing import MinMaxScaler
from sordino.events import Event, compose, describe_sampling
from sordino.mechanisms import ReportNoisyMax
from sordino.mechanisms.base import FloatArray, Numbers, checked_bounds

Grid = Mapping[str, Sequence[object]] | Sequence[Mapping[str, Sequence[object]]]


SEARCH_PARAMETERS = {"epsilon", "delta", "random_state", "reproducible", "ledger"}
"""Parameters of an estimator that a search sets itself."""


def _has(name: str) -> "Callable[[PrivateSearch], bool]":
    return lambda search: hasattr(_last_step(search.estimator), name)


# ----------------------------------------------------------------------------------------------------------------------
# Pipelines: every step's guarantee is known, and each private step has a charge of its own.
# ----------------------------------------------------------------------------------------------------------------------


# They change each record by itself, and learn the number of columns alone.
_ROW_BY_ROW = (Binarizer, Normalizer, PolynomialFeatures)
_DECLARE = "Declare the columns in a Schema, and put sordino.data.SchemaEncoder(schema) first"
_INSTEAD = {
    "ColumnTransformer": _DECLARE,
    "FeatureUnion": _DECLARE,
    "FunctionTransformer": "Apply its function to each record before the search",
    "IncrementalPCA": "Use sordino.estimators.PCA",
    "KBinsDiscretizer": _DECLARE,
    "KernelPCA": "Use sordino.estimators.PCA",
    "MaxAbsScaler": "Use sordino.estimators.MinMaxScaler, with declared bounds",
    "MinMaxScaler": "Use sordino.estimators.MinMaxScaler, with declared bounds",
    "OneHotEncoder": _DECLARE,
    "OrdinalEncoder": _DECLARE,
    "PCA": "Use sordino.estimators.PCA",
    "PowerTransformer": "Use sordino.estimators.StandardScaler, with declared bounds",
    "QuantileTransformer": "Use sordino.estimators.MinMaxScaler, with declared bounds",
    "RobustScaler": "Use sordino.estimators.StandardScaler, with declared bounds",
    "SimpleImputer": "Leave it out: a missing entry is the middle of its declared bounds",
    "StandardScaler": "Use sordino.estimators.StandardScaler, with declared bounds",
    "TruncatedSVD": "Use sordino.estimators.PCA",
}


def _steps(estimator: object, name: str = "") -> list[tuple[str, Any]]:
    """The steps of a pipeline, of those inside it too, by the names that parameters have; those left out are not in."""
    if not isinstance(estimator, Pipeline):
        return [] if estimator is None or estimator == "passthrough" else [(name, estimator)]
    prefix = f"{name}__" if name else ""
    return [step for inner, part in estimator.steps for step in _steps(part, prefix + inner)]


def _last_step(estimator: object) -> object:
    """The estimator itself, or the one at the end of a pipeline."""
    steps = _steps(estimator)
    return steps[-1][1] if steps else None


def _check_steps(pipeline: Pipeline) -> None:
    """Refuse a step whose guarantee is not known."""
    steps = _steps(pipeline)
    finite = False  # whether entries are finite from here on, so that no step raises an error about one
    for index, (name, step) in enumerate(steps):
        kind = type(step).__name__
        if isinstance(step, SchemaEncoder):
            if index > 0:
                raise InvalidArgument(f"SchemaEncoder must be the first step, got {name!r} at {index}. Move it.")
        elif isinstance(step, _ROW_BY_ROW):
            if not finite:
                raise InvalidArgument(
                    f"{name} must follow a step that fills missing entries, got {kind} before one: it would raise an "
                    "error about a record. Put sordino.estimators.MinMaxScaler(bounds=…) before it."
                )
        elif not isinstance(step, PrivateEstimator | MinMaxScaler):
            advice = _INSTEAD.get(kind) or (
                "Choose columns from public knowledge, or use sordino.estimators.PCA"
                if step.__class__.__module__.startswith("sklearn.feature_selection")
                else "Leave it out, or apply what is public in it to each record before the search"
            )
            raise InvalidArgument(
                f"estimator must have steps whose guarantee is known, got {kind} as {name!r}: what it learns from "
                f"records, nobody charges. {advice}."
            )
        finite = True
        if index < len(steps) - 1 and not hasattr(step, "transform"):
            raise InvalidArgument(f"{name} must transform records for the next step, got {kind}. Put it last.")


def _check_scored(estimator: object) -> None:
    """Refuse what has no right answers."""
    known = cast("PrivateEstimator", estimator).get_params(deep=False)
    if not {"classes", "target_bounds"} & set(known):
        raise InvalidArgument(
            f"estimator must be a classifier or a regressor, got {type(estimator).__name__}: a choice needs right "
            "answers to count. Choose its parameters in advance."
        )


@dataclass(kw_only=True, eq=False, repr=False)
class _Chain(PrivateEstimator):
    """The steps of a pipeline after its encoder, fitted one after the other; each private one has (epsilon, delta)."""

    pipeline: Pipeline | None = None

    @property
    def num_charged_fits(self) -> int:
        """Number of private steps, each of which has (epsilon, delta)."""
        return sum(isinstance(step, PrivateEstimator) for _, step in _steps(self.pipeline))

    def fit(self, X: Numbers, y: Labels | Numbers) -> "_Chain":
        """Fit all steps to records X [n, d], already encoded, with targets y [n]."""
        records = validate_matrix(X, estimator=self, reset=True)
        steps = [step for _, step in _steps(self.pipeline) if not isinstance(step, SchemaEncoder)]
        self._fitted: list[Any] = []
        events: list[Event] = []
        relations: list[NeighboringRelation] = []
        for index, step in enumerate(steps):
            if isinstance(step, PrivateEstimator):
                made = independent_copy(step).set_params(
                    epsilon=self.epsilon,
                    delta=self.delta,
                    random_state=None if self.random_state is None else self.random_state + 1_000_003 * (index + 1),
                    reproducible=self.reproducible,
                    ledger=None,
                )
                # A step in the middle learns without targets.
                made = made.fit(records, y) if index == len(steps) - 1 else made.fit(records)  # pyright: ignore[reportAttributeAccessIssue]
                events += made.events_
                relations.append(made.guarantee_.neighboring_relation)
            else:
                # The number of columns is all that it learns.
                made = cast("Any", clone(cast("BaseEstimator", step))).fit(np.zeros((1, records.shape[1])))
            self._fitted.append(made)
            if index < len(steps) - 1:
                records = _transformed(made, records)
        self.events_ = tuple(events)
        relation = common_relation(relations)
        count = len(relations)
        self.guarantee_ = Guarantee(
            epsilon=count * (self.epsilon or 0.0),
            delta=min(count * (self.delta or 0.0), 1.0),
            accountant="basic_composition",
            sampler="none",
            neighboring_relation=relation,
        )
        return self

    def predict(self, X: Numbers) -> npt.NDArray[np.generic]:
        """Predictions [n] of the last step."""
        records = validate_matrix(X, estimator=self, reset=False)
        for step in self._fitted[:-1]:
            records = _transformed(step, records)
        return self._fitted[-1].predict(records)

    def as_pipeline(self, encoder: SchemaEncoder | None) -> Pipeline:
        """The pipeline with its fitted steps in their places, and the fitted encoder in its own."""
        fitted = iter(self._fitted)

        def rebuilt(part: Any) -> Any:
            if isinstance(part, Pipeline):
                return Pipeline([(name, rebuilt(inner)) for name, inner in part.steps])
            if isinstance(part, SchemaEncoder):
                return encoder
            return part if part is None or isinstance(part, str) else next(fitted)

        return rebuilt(self.pipeline)


def _transformed(step: Any, records: FloatArray) -> FloatArray:
    """Records [n, d'] behind a step; scikit-learn's own refuse a table without records."""
    if len(records) == 0:
        return np.asarray(step.transform(np.zeros((1, records.shape[1]))), dtype=np.float64)[:0]
    return np.asarray(step.transform(records), dtype=np.float64)


@dataclass(kw_only=True, eq=False, repr=False)
class PrivateSearch(MetaEstimatorMixin, PrivateEstimator):
    """What searches share: how a model is judged, and that the chosen one predicts."""

    estimator: PrivateEstimator | Pipeline | None = field(default=None, kw_only=False)
    best_estimator_: Any = field(init=False)

    def _score(self, model: PrivateEstimator, X: Numbers, y: Labels | Numbers) -> float:
        """Σ over records of a number in [0, 1]; a record that may not count adds nothing."""
        found = model.predict(X)  # pyright: ignore[reportAttributeAccessIssue]
        last = _last_step(model.pipeline) if isinstance(model, _Chain) else model
        parameters = cast("PrivateEstimator", last).get_params(deep=False)
        if "classes" in parameters:
            classes = declared_classes(parameters["classes"])
            given = encode_labels(cast("Labels", y), classes.tolist())
            return float(np.count_nonzero((given >= 0) & (encode_labels(found, classes.tolist()) == given)))
        bounds = checked_bounds(parameters["target_bounds"])
        middle, half = bounds[0] / 2 + bounds[1] / 2, bounds[1] / 2 - bounds[0] / 2
        true = scaled_targets(cast("Numbers", y), bounds, center=middle, half=half)
        guessed = scaled_targets(found, bounds, center=middle, half=half)
        terms = 1.0 - ((guessed - true) / 2) ** 2
        return float(np.where(np.isfinite(terms), terms, 0.0).sum())

    def predict(self, X: Numbers) -> npt.NDArray[np.generic]:
        """The chosen model's predictions [n]."""
        check_is_fitted(self)
        return self.best_estimator_.predict(X)

    @available_if(_has("predict_proba"))
    def predict_proba(self, X: Numbers) -> FloatArray:
        """The chosen model's class probabilities [n, K]."""
        check_is_fitted(self)
        return self.best_estimator_.predict_proba(X)

    def score(self, X: Numbers, y: Labels | Numbers) -> float:
        """The chosen model's score; on private records it is a statistic of them that nothing protects."""
        check_is_fitted(self)
        return self.best_estimator_.score(X, y)


@dataclass(kw_only=True, eq=False, repr=False)
class PrivateGridSearch(PrivateSearch):
    """Fits every candidate of a grid to all records, chooses one privately, and states what all of it spent.

    The budget is split: `score_fraction` of ε pays for the choice, the rest for the fits, which get the largest common
    ε
    with which the accountant composes them to (epsilon, delta). The choice is report-noisy-max on the number of right
    answers (or, for regressions, on Σ(1 − (error/range)²), each term cut to [0, 1]) on the training records. One
    record moves that by at most 1, so 10 % of ε is plenty for thousands of records.

    Guarantee: the chosen model, its parameters, and even all models that were fitted, are together (epsilon, delta)-
    differentially private, as `guarantee_` states, provided the grid was chosen without looking at the records. Scores
    are not released.

    Args:
        estimator: a private classifier with declared `classes`, or a private regressor with `target_bounds`; its own
            `epsilon` and `delta` are not used. Or a scikit-learn `Pipeline` that ends in one, whose other steps are
            private (`StandardScaler` and `PCA` of sordino), free (`SchemaEncoder` first, `MinMaxScaler` of sordino), or
            change each record by itself (`Normalizer`, `Binarizer`, `PolynomialFeatures`). Every private step of
            every candidate is a fit of its own, and all have the same ε.
        param_grid: names ↦ values to try, or a list of such grids, as for scikit-learn's search; of a pipeline
            ``step__name``, or ``step`` for a whole step or "passthrough".
        epsilon: ε > 0 of everything. Required.
        delta: δ in [0, 1) of everything. Required.
        score_fraction: share in (0, 1) of ε that pays for the choice.
        random_state: None, or a seed together with `reproducible`.
        reproducible: whether this is a test run; `guarantee_` then carries "not for release".
        ledger: None, or the account, or a reservation on it, that all of it is charged to at once; the estimator's own
            is not used.

    Attributes:
        best_estimator_: the chosen model, fitted to all records.
        best_params_: what was tried in it.
        best_index_: its index in the grid.
        guarantee_: the guarantee of everything.
        events_: all fits, and the choice.

    Example:
        >>> from sordino.estimators import LogisticRegression
        >>> X, y = np.repeat([[1.0, 0.0], [0.0, 1.0]], 2000, axis=0), np.repeat([0, 1], 2000)
        >>> model = LogisticRegression(data_norm=1.0, classes=(0, 1))
        >>> search = PrivateGridSearch(model, {"fit_intercept": [True, False]}, epsilon=1.0, delta=1e-6).fit(X, y)
        >>> len(search.events_), search.guarantee_.epsilon <= 1, search.score(X, y)
        (3, True, 1.0)

    References:
        Dwork, Roth 2014, section 3.3; docs/proofs/noisy-max-and-permute-and-flip.md.
    """

    param_grid: Grid | None = field(default=None, kw_only=False)
    score_fraction: float = 0.1

    def fit(self, X: Numbers, y: Labels | Numbers) -> "PrivateGridSearch":
        """Fit all candidates to records X [n, d] with targets y [n], and choose; charged first, then read."""
        epsilon, delta = self._budget()
        share = checks.probability(zero=False, one=False, score_fraction=self.score_fraction)
        rng = self._randomness()
        points = self._points()
        records, encoder = self._encoded(X, points)
        check_one_target_per_record(y, len(records))
        columns = records.shape[1]
        neighboring_relation = self._relation(points, columns)
        choice = ReportNoisyMax(
            epsilon=share * epsilon,
            sensitivity=1.0,
            # A record more can only add right answers; a replaced one can also take one away.
            monotone=neighboring_relation is not NeighboringRelation.REPLACE_ONE,
            rng=rng,
        )
        candidates = split_budget_equally(
            lambda one, slack: [self._candidate(point, one, slack, index) for index, point in enumerate(points)],
            columns=columns,
            epsilon=epsilon,
            delta=delta,
            other_events=[choice.event()],
        )
        fits = [event for candidate in candidates for event in dry_run_events(candidate, columns)[0]]
        self._charge(
            [*fits, choice.event()], neighboring_relation=neighboring_relation, sampler=describe_sampling(compose(fits))
        )
        models = [candidate.fit(records, y) for candidate in candidates]  # pyright: ignore[reportAttributeAccessIssue]
        scores = [self._score(model, records, y) for model in models]
        self.best_index_ = choice.release(np.asarray(scores))
        self.best_params_ = points[self.best_index_]
        best = models[self.best_index_]
        self.best_estimator_ = best.as_pipeline(encoder) if isinstance(best, _Chain) else best
        return self

    def _encoded(self, X: Numbers, points: Sequence[Mapping[str, object]]) -> tuple[FloatArray, SchemaEncoder | None]:
        """Records [n, d], and the encoder that the pipeline begins with, which changes each record by itself."""
        name, first = (_steps(self.estimator) or [("", None)])[0]
        if not isinstance(first, SchemaEncoder):
            return validate_matrix(X, estimator=self, reset=True), None
        if varied := sorted({key for point in points for key in point if key == name or key.startswith(f"{name}__")}):
            raise InvalidArgument(
                f"param_grid must not vary the SchemaEncoder, got {', '.join(varied)}. Encode the table once."
            )
        encoder = cast("SchemaEncoder", clone(first)).fit(X)
        self.n_features_in_ = encoder.n_features_in_
        return np.asarray(encoder.transform(X), dtype=np.float64), encoder

    def _points(self) -> list[dict[str, object]]:
        if not isinstance(_last_step(self.estimator), PrivateEstimator):
            raise MissingDeclaration(
                "estimator must be a private estimator of sordino, or a Pipeline that ends in one, got another thing: "
                "what it spends must be known before it reads a record. Pass one."
            )
        if self.param_grid is None:
            raise MissingDeclaration("param_grid must be declared, got None. List the values to try.")
        points = [dict(point) for point in ParameterGrid(cast("dict[str, list[object]]", self.param_grid))]
        taken = {name for point in points for name in point if name.rpartition("__")[2] in SEARCH_PARAMETERS}
        if taken:
            raise InvalidArgument(
                f"param_grid must not hold {', '.join(sorted(taken))}: the search sets the budget. Leave it out."
            )
        return points

    def _candidate(self, point: Mapping[str, object], epsilon: float, delta: float, index: int) -> PrivateEstimator:
        # Candidates of a repeatable search must not share their noise.
        seed = None if self.random_state is None else self.random_state + 1 + index
        own = {"epsilon": epsilon, "delta": delta, "random_state": seed, "reproducible": self.reproducible}
        if isinstance(self.estimator, Pipeline):
            pipeline = cast("Pipeline", clone(self.estimator)).set_params(**point)
            _check_steps(pipeline)
            _check_scored(_last_step(pipeline))
            return _Chain(pipeline=pipeline, **own)
        candidate = independent_copy(cast("PrivateEstimator", self.estimator))
        _check_scored(candidate.set_params(**point, **own))
        return candidate.set_params(ledger=None)

    def _relation(self, points: Sequence[Mapping[str, object]], columns: int) -> NeighboringRelation:
        epsilon, delta = self._budget()
        trials = [self._candidate(point, epsilon, delta, 0) for point in points]
        return common_relation([dry_run_events(trial, columns)[1] for trial in trials])
