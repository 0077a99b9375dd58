"""Estimators as the runs of a search: what one of them does, whatever its settings are (floor 5)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

from sordino import accounting
from sordino.accounting.composition import flatten
from sordino.definitions import NeighboringRelation
from sordino.errors import InvalidArgument, SordinoError
from sordino.estimators.base import PrivateEstimator
from sordino.estimators.rehearsal import common_relation, rehearse
from sordino.events import ApproximateDP, Event, Gaussian, PureDP, compose
from sordino.tuning.share import Share
from sordino.tuning.space import Config

__all__ = ["EstimatorRuns"]

# An estimator's own calibration rounds its noise in the sixth digit.
_ROOM = 3e-5
Build = Callable[[Config, float, float, int | None], PrivateEstimator]


@dataclass(frozen=True, kw_only=True)
class EstimatorRuns:
    """Fits of estimators that differ in their settings, as runs that are alike in what they spend.

    Where all that a fit does is Gaussian noise on all records (`gaussian`), the search knows one run by its noise
    multiplier, which is the tighter bill; otherwise by its (ε, δ).

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
    relation: NeighboringRelation = field(init=False)

    def __post_init__(self) -> None:
        found = [rehearse(self.build(config, 1.0, self.run_delta, None), self.columns) for config in self.examples]
        object.__setattr__(self, "relation", common_relation([relation for _, relation in found]))
        alone = [_gaussian(events, self.relation) for events, _ in found]
        object.__setattr__(self, "gaussian", all(one is not None for one in alone))

    @property
    def run(self) -> Callable[[float], Event] | None:
        """``run=`` of the search."""
        return (lambda noise: Gaussian(noise_multiplier=noise)) if self.gaussian else None

    def estimator(self, config: Config, share: Share) -> PrivateEstimator:
        """The estimator of one run, not fitted."""
        if share.noise_multiplier is None:
            assert share.epsilon is not None
            assert share.delta is not None
            return self.build(config, share.epsilon, share.delta, share.seed)
        noisier = Gaussian(noise_multiplier=share.noise_multiplier * (1 + _ROOM))
        epsilon = accounting.epsilon(noisier, self.run_delta, relation=self.relation).upper
        return self.build(config, epsilon, self.run_delta, share.seed)

    def check(self, fitted: PrivateEstimator, share: Share) -> None:
        """Refuse a fit that spent more than its share. What a fit spends doesn't depend on records."""
        if fitted.privacy_.relation is not self.relation or not self._within(fitted.events_, share):
            raise SordinoError("a fit must spend what its share allows, got one that does more. It does not count.")

    def _within(self, events: Sequence[Event], share: Share) -> bool:
        if share.noise_multiplier is not None:
            alone = _gaussian(events, self.relation)
            return alone is not None and alone.noise_multiplier >= share.noise_multiplier
        told = cast("ApproximateDP | PureDP", share.event)
        limit = told.delta if isinstance(told, ApproximateDP) else 0.0
        return accounting.epsilon(compose(list(events)), limit, relation=self.relation).upper <= told.epsilon * (
            1 + 1e-9
        )


def _gaussian(events: Sequence[Event], relation: NeighboringRelation) -> Gaussian | None:
    """The one Gaussian that all events together are, or None."""
    try:
        counts = flatten(compose(list(events)), relation).counts
    except (SordinoError, InvalidArgument):
        return None
    if len(counts) == 1 and counts[0][1] == 1 and isinstance(counts[0][0], Gaussian):
        return counts[0][0]
    return None
