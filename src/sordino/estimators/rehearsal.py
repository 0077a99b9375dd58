"""What fits will cost, before a record is read, and how several fits share one budget (floor 4).

What an estimator spends is fixed by its parameters: the events of a fit to no records are those of any other fit. The
contract tests hold every estimator to that.
"""

import math
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
from sklearn.base import clone

from sordino import accounting, checks
from sordino.definitions import NeighboringRelation
from sordino.errors import InvalidArgument
from sordino.estimators.base import PrivateEstimator
from sordino.events import Event, compose

__all__ = ["common_relation", "equal_shares", "rehearse"]

_TRIALS, _WORTHWHILE = 6, 1.01


def rehearse(estimator: PrivateEstimator, columns: int) -> tuple[tuple[Event, ...], NeighboringRelation]:
    """The events of a fit to records of so many columns, and their relation; no record is read, nothing is charged.

    Example:
        >>> from sordino.estimators import LogisticRegression
        >>> rehearse(LogisticRegression(epsilon=1.0, delta=1e-6, data_norm=1.0, classes=(0, 1)), 3)[0]
        (ApproximateDP(epsilon=1.0, delta=1e-06),)
    """
    trial = cast("PrivateEstimator", clone(estimator))
    if "ledger" in trial.get_params(deep=False):
        trial.set_params(ledger=None)
    trial.fit(np.zeros((0, columns)), np.zeros(0))  # pyright: ignore[reportAttributeAccessIssue]
    return trial.events_, trial.privacy_.relation


def common_relation(relations: Sequence[NeighboringRelation]) -> NeighboringRelation:
    """The one relation of all; events under different ones don't add up."""
    if len(set(relations)) != 1:
        raise InvalidArgument(
            f"neighboring_relation must be the same for all fits, got {', '.join(sorted(set(relations)))}. Choose one."
        )
    return relations[0]


def equal_shares(
    build: Callable[[float, float], Sequence[PrivateEstimator]],
    *,
    columns: int,
    epsilon: float,
    delta: float,
    beside: Sequence[Event] = (),
) -> Sequence[PrivateEstimator]:
    """Estimators with a common ε, near the largest for which all fits and `beside` together stay within (ε, δ).

    Their events are composed by the accountant, so k fits with Gaussian noise get about ε/√k each instead of ε/k. What
    is known of a fit as (ε, δ) alone, as of objective perturbation, gains only when there are many.

    Guarantee: the fits of what is returned, and `beside`, compose to at most (epsilon, delta) under their relation.

    Args:
        build: (ε, δ) of one fit ↦ the estimators, always as many.
        columns: of the records.
        epsilon: of everything, > 0.
        delta: of everything, in [0, 1).
        beside: what else is paid from the same budget.

    Returns:
        Estimators that are not fitted.

    Raises:
        InvalidArgument: `beside` leaves nothing.
    """
    count = checks.integer(1, estimators=len(build(epsilon, delta)))
    each_delta = delta / 2 / count

    def spent(share: float) -> float:
        found = [rehearse(estimator, columns) for estimator in build(share, each_delta)]
        relation = common_relation([relation for _, relation in found])
        events = [event for events, _ in found for event in events]
        return accounting.epsilon(compose([*events, *beside]), delta, relation=relation).upper

    # Basic composition: Σ ε_i + ε of `beside` ≤ ε, with a hair kept back for rounding.
    rest = epsilon - (accounting.epsilon(compose(list(beside)), 0.0).upper if beside else 0.0)
    share, high = rest / count * (1 - 1e-9), rest
    if share <= 0 or (total := spent(share)) > epsilon:
        raise InvalidArgument(
            f"epsilon must be above what is spent beside the fits, got {epsilon:g}. Raise it, or compare less."
        )
    for _ in range(_TRIALS):
        # What is spent grows about as the share does; a trial that spends too much is a bound for the next.
        trial = min(share * epsilon / total, math.sqrt(share * high) if high < rest else high)
        if trial < share * _WORTHWHILE:
            break
        found = spent(trial)
        if found <= epsilon:
            share, total = trial, found
        else:
            high = trial
    return build(share, each_delta)
