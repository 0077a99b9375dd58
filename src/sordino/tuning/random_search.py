"""`PrivateRandomSearch`: random stopping over an estimator's parameters, as scikit-learn calls it."""

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from sordino import accounting
from sordino.accounting.base import flatten
from sordino.definitions import FIXED_SEED_CAVEAT, Guarantee, NeighboringRelation
from sordino.errors import InvalidArgument, MissingDeclaration, SordinoError
from sordino.estimators.base import (
    Labels,
    PrivateEstimator,
    check_one_target_per_record,
    common_relation,
    dry_run_events,
    independent_copy,
    validate_matrix,
)
from sordino.estimators.search import SEARCH_PARAMETERS, PrivateSearch
from sordino.events import ApproximateDP, Event, Gaussian, PureDP, compose
from sordino.mechanisms.base import Numbers
from sordino.randomness import KeyedRNG
from sordino.tuning.methods import Config, RandomStopping, SearchSpace
from sordino.tuning.search import PrivateScore, TrialBudget, tune

# ----------------------------------------------------------------------------------------------------------------------
# Estimators as the runs of a search: what one of them does, whatever its settings are.
# ----------------------------------------------------------------------------------------------------------------------


# An estimator's own calibration rounds its noise in the sixth digit.
_ROOM = 3e-5
Build = Callable[[Config, float, float, int | None], PrivateEstimator]


@dataclass(frozen=True, kw_only=True)
class EstimatorRuns:
    """Fits of estimators that differ in their settings, as runs that are alike in what they spend.

    Where all that a fit does is Gaussian noise on all records (`gaussian`), the search knows one run by its noise
    multiplier, which gives the smaller ε; otherwise by its (ε, δ).

    Guarantee: an estimator whose fit does more than the share says is refused by `check`, whatever the records are.

    Args:
        build: (settings, ε, δ, seed or None) ↦ an estimator.
        examples: settings to look at, before a record is read.
        columns: of the records.
        run_delta: δ at which the noise of a Gaussian fit is asked for; it only names the noise.
    """

    build: Build
    examples: Sequence[Config]
    columns: int
    run_delta: float
    gaussian: bool = field(init=False)
    neighboring_relation: NeighboringRelation = field(init=False)

    def __post_init__(self) -> None:
        found = [
            dry_run_events(self.build(config, 1.0, self.run_delta, None), self.columns) for config in self.examples
        ]
        object.__setattr__(
            self, "neighboring_relation", common_relation([neighboring_relation for _, neighboring_relation in found])
        )
        alone = [_gaussian(events, self.neighboring_relation) for events, _ in found]
        object.__setattr__(self, "gaussian", all(one is not None for one in alone))

    @property
    def run(self) -> Callable[[float], Event] | None:
        """``run=`` of the search."""
        return (lambda noise: Gaussian(noise_multiplier=noise)) if self.gaussian else None

    def estimator(self, config: Config, share: TrialBudget) -> PrivateEstimator:
        """The estimator of one run, not fitted."""
        if share.noise_multiplier is None:
            assert share.epsilon is not None
            assert share.delta is not None
            return self.build(config, share.epsilon, share.delta, share.seed)
        noisier = Gaussian(noise_multiplier=share.noise_multiplier * (1 + _ROOM))
        epsilon = accounting.epsilon(noisier, self.run_delta, neighboring_relation=self.neighboring_relation).upper
        return self.build(config, epsilon, self.run_delta, share.seed)

    def check(self, fitted: PrivateEstimator, share: TrialBudget) -> None:
        """Refuse a fit that spent more than its share. What a fit spends doesn't depend on records."""
        if fitted.guarantee_.neighboring_relation is not self.neighboring_relation or not self._within(
            fitted.events_, share
        ):
            raise SordinoError("a fit must spend what its share allows, got one that does more. It does not count.")

    def _within(self, events: Sequence[Event], share: TrialBudget) -> bool:
        if share.noise_multiplier is not None:
            alone = _gaussian(events, self.neighboring_relation)
            return alone is not None and alone.noise_multiplier >= share.noise_multiplier
        event = cast("ApproximateDP | PureDP", share.event)
        limit = event.delta if isinstance(event, ApproximateDP) else 0.0
        return accounting.epsilon(
            compose(list(events)), limit, neighboring_relation=self.neighboring_relation
        ).upper <= event.epsilon * (1 + 1e-9)


def _gaussian(events: Sequence[Event], neighboring_relation: NeighboringRelation) -> Gaussian | None:
    """The one Gaussian that all events together are, or None."""
    try:
        counts = flatten(compose(list(events)), neighboring_relation).counts
    except (SordinoError, InvalidArgument):
        return None
    if len(counts) == 1 and counts[0][1] == 1 and isinstance(counts[0][0], Gaussian):
        return counts[0][0]
    return None


# ----------------------------------------------------------------------------------------------------------------------
# `PrivateRandomSearch`: random stopping over an estimator's parameters, as scikit-learn calls it.
# ----------------------------------------------------------------------------------------------------------------------


_EXAMPLES = 3


@dataclass(kw_only=True, eq=False, repr=False)
class PrivateRandomSearch(PrivateSearch):
    """Fits an estimator with settings drawn from a space, a random number of times, and keeps the best one.

    Every fit reads all records and is judged by them: by the number of right answers, or for regressions by
    Σ(1 − (error/range)²), with noise. Twenty settings cost here what two or three cost a `PrivateGridSearch`.

    Guarantee: the chosen model, its parameters and its noisy score are (epsilon, delta)-differentially private, as
    `guarantee_` states, when nothing but them is looked at: not how many fits there were, nor how long they took.

    Args:
        estimator: a private classifier with declared `classes`, or a private regressor with `target_bounds`; its own
            `epsilon` and `delta` are not used.
        space: names ↦ `Uniform`, `LogUniform`, `Integers`, `Choice` or a list; or a `SearchSpace`.
        epsilon: ε > 0 of everything. Required.
        delta: δ in (0, 1) of everything. Required.
        mean: of the number of fits, > 1.
        shape: η of its distribution, > −1; see `RandomStopping`.
        score_noise: of the score, in records.
        random_state: None, or a seed together with `reproducible`.
        reproducible: whether this is a test run; `guarantee_` then carries "not for release".
        ledger: None, or the account, or a reservation on it, that all of it is charged to at once; the estimator's own
            is not used.

    Attributes:
        best_estimator_: the chosen model, fitted to all records.
        best_params_: what was drawn for it.
        best_score_: its score, with noise.
        guarantee_: the guarantee of everything.
        events_: the one event of everything.

    Example:
        >>> import numpy as np
        >>> from sordino.estimators import LogisticRegression
        >>> X, y = np.repeat([[1.0, 0.0], [0.0, 1.0]], 2000, axis=0), np.repeat([0, 1], 2000)
        >>> model = LogisticRegression(data_norm=1.0, classes=(0, 1))
        >>> search = PrivateRandomSearch(model, {"fit_intercept": [True, False]}, epsilon=1.0, delta=1e-6).fit(X, y)
        >>> len(search.events_), search.guarantee_.epsilon <= 1, search.score(X, y)
        (1, True, 1.0)

    References:
        Papernot, Steinke 2022; docs/proofs/tuning-profiles.md.
    """

    space: SearchSpace | Mapping[str, object] | None = field(default=None, kw_only=False)
    mean: float = 20.0
    shape: float = 0.0
    score_noise: float = 30.0

    def fit(self, X: Numbers, y: Labels | Numbers) -> "PrivateRandomSearch":
        """Fit and choose, to records X [n, d] with targets y [n]; charged first, then read."""
        epsilon, delta = self._budget()
        rng = self._randomness()
        space = self._space()
        records = validate_matrix(X, estimator=self, reset=True)
        check_one_target_per_record(y, len(records))
        looks = KeyedRNG(seed=0, reproducible=True)
        runs = EstimatorRuns(
            build=self._build,
            examples=[space.draw(looks.stream("examples", step=step)) for step in range(_EXAMPLES)],
            columns=records.shape[1],
            run_delta=delta,
        )

        self._check_countable(runs.neighboring_relation)
        name = uuid.uuid4().hex
        planned = Guarantee(
            epsilon=epsilon,
            delta=delta,
            accountant="budget",
            sampler="none",
            neighboring_relation=runs.neighboring_relation,
            caveats=(FIXED_SEED_CAVEAT,) if self.reproducible else (),
        )

        def train(config: Config, share: TrialBudget) -> tuple[PrivateEstimator, float]:
            # What the search may spend is counted before it reads a record, and what it spent when that is known.
            self._count_fit(ApproximateDP(epsilon=epsilon, delta=delta), planned, name=name)
            model = runs.estimator(config, share)
            model.fit(X, y)  # pyright: ignore[reportAttributeAccessIssue]
            runs.check(model, share)
            return model, self._score(model, X, y)

        tuned = tune(
            train,
            space,
            target_epsilon=epsilon,
            delta=delta,
            method=RandomStopping(mean=self.mean, shape=self.shape),
            run_event=runs.run,
            score=PrivateScore(noise_multiplier=self.score_noise),
            neighboring_relation=runs.neighboring_relation,
            ledger=self.ledger,
            rng=rng,
        )
        self.events_ = (tuned.event,)
        self._count_fit(tuned.event, tuned.guarantee, name=name)
        if tuned.model is None:
            raise InvalidArgument(
                "space must hold settings with which the estimator can be fitted, got none in this search. It is paid "
                "for. Try the settings on synthetic records first."
            )
        self.best_estimator_, self.best_params_, self.best_score_ = tuned.model, tuned.config, tuned.score
        return self

    def _space(self) -> SearchSpace:
        if not isinstance(self.estimator, PrivateEstimator):
            raise MissingDeclaration(
                "estimator must be a private estimator of sordino, got another thing: what it spends must be known "
                "before it reads a record. Pass one."
            )
        if self.space is None:
            raise MissingDeclaration("space must be declared, got None. Say how each parameter is drawn.")
        space = self.space if isinstance(self.space, SearchSpace) else SearchSpace(self.space)
        taken = SEARCH_PARAMETERS & set(space.priors)
        if taken:
            raise InvalidArgument(
                f"space must not hold {', '.join(sorted(taken))}: the search sets the budget. Leave it out."
            )
        unknown = set(space.priors) - set(self.estimator.get_params())
        if unknown:
            raise InvalidArgument(
                f"space must name parameters of the estimator, got {', '.join(sorted(unknown))}. Check the spelling."
            )
        return space

    def _build(self, config: Config, epsilon: float, delta: float, seed: int | None) -> PrivateEstimator:
        model = independent_copy(cast("PrivateEstimator", self.estimator))
        own = {"epsilon": epsilon, "delta": delta, "random_state": seed, "reproducible": seed is not None}
        return model.set_params(**config, **own, ledger=None)
