"""`PrivateGridSearch`: the choice of parameters is charged.

scikit-learn's own search clones an estimator and fits it many times to parts of the same records, and reports one of
these fits. All of them were paid for by the records, and so was the choice among them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import numpy as np
import numpy.typing as npt
from sklearn.base import MetaEstimatorMixin
from sklearn.model_selection import ParameterGrid
from sklearn.utils.metaestimators import available_if
from sklearn.utils.validation import check_is_fitted

from sordino import checks
from sordino.definitions import NeighboringRelation
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
from sordino.events import compose, describe_sampling
from sordino.ledger import Account, Reservation
from sordino.mechanisms import ReportNoisyMax
from sordino.mechanisms.base import FloatArray, Numbers, checked_bounds

__all__ = ["PrivateGridSearch"]

Grid = Mapping[str, Sequence[object]] | Sequence[Mapping[str, Sequence[object]]]


def _has(name: str) -> "Callable[[PrivateGridSearch], bool]":
    return lambda search: hasattr(search.estimator, name)


class PrivateGridSearch(MetaEstimatorMixin, PrivateEstimator):
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
            `epsilon` and `delta` are not used.
        param_grid: names ↦ values to try, or a list of such grids, as for scikit-learn's search.
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
        best_index_: its place in the grid.
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

    def __init__(
        self,
        estimator: PrivateEstimator | None = None,
        param_grid: Grid | None = None,
        *,
        epsilon: float | None = None,
        delta: float | None = None,
        score_fraction: float = 0.1,
        random_state: int | None = None,
        reproducible: bool = False,
        ledger: Account | Reservation | None = None,
    ) -> None:
        self.estimator = estimator
        self.param_grid = param_grid
        self.epsilon = epsilon
        self.delta = delta
        self.score_fraction = score_fraction
        self.random_state = random_state
        self.reproducible = reproducible
        self.ledger = ledger

    def fit(self, X: Numbers, y: Labels | Numbers) -> "PrivateGridSearch":
        """Fit all candidates to records X [n, d] with targets y [n], and choose; charged first, then read."""
        epsilon, delta = self._budget()
        share = checks.probability(zero=False, one=False, score_fraction=self.score_fraction)
        rng = self._randomness()
        points = self._points()
        records = validate_matrix(X, estimator=self, reset=True)
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
            lambda one, slack: [self._candidate(point, one, slack, place) for place, point in enumerate(points)],
            columns=columns,
            epsilon=epsilon,
            delta=delta,
            other_events=[choice.event()],
        )
        fits = [event for candidate in candidates for event in dry_run_events(candidate, columns)[0]]
        self._charge(
            [*fits, choice.event()], neighboring_relation=neighboring_relation, sampler=describe_sampling(compose(fits))
        )
        models = [candidate.fit(X, y) for candidate in candidates]  # pyright: ignore[reportAttributeAccessIssue]
        scores = [self._right(model, X, y) for model in models]
        self.best_index_ = choice.release(np.asarray(scores))
        self.best_params_ = points[self.best_index_]
        self.best_estimator_ = models[self.best_index_]
        return self

    def _points(self) -> list[dict[str, object]]:
        if not isinstance(self.estimator, PrivateEstimator):
            raise MissingDeclaration(
                "estimator must be a private estimator of sordino, got another thing: what it spends must be known "
                "before it reads a record. Pass one."
            )
        if self.param_grid is None:
            raise MissingDeclaration("param_grid must be declared, got None. List the values to try.")
        points = [dict(point) for point in ParameterGrid(cast("dict[str, list[object]]", self.param_grid))]
        taken = {"epsilon", "delta", "random_state", "reproducible", "ledger"} & {
            name for point in points for name in point
        }
        if taken:
            raise InvalidArgument(
                f"param_grid must not hold {', '.join(sorted(taken))}: the search sets the budget. Leave it out."
            )
        return points

    def _candidate(self, point: Mapping[str, object], epsilon: float, delta: float, place: int) -> PrivateEstimator:
        candidate = independent_copy(cast("PrivateEstimator", self.estimator))
        # Candidates of a repeatable search must not share their noise.
        seed = None if self.random_state is None else self.random_state + 1 + place
        candidate.set_params(**point, epsilon=epsilon, delta=delta, random_state=seed, reproducible=self.reproducible)
        return candidate.set_params(ledger=None)

    def _relation(self, points: Sequence[Mapping[str, object]], columns: int) -> NeighboringRelation:
        epsilon, delta = self._budget()
        trials = [self._candidate(point, epsilon, delta, 0) for point in points]
        return common_relation([dry_run_events(trial, columns)[1] for trial in trials])

    def _right(self, model: PrivateEstimator, X: Numbers, y: Labels | Numbers) -> float:
        """Σ over records of a number in [0, 1]; a record that may not count adds nothing."""
        found = model.predict(X)  # pyright: ignore[reportAttributeAccessIssue]
        parameters = model.get_params(deep=False)
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
