"""Selection among private runs by privacy profiles: tighter than Rényi bounds where both apply.

Let δ_Q(ε) be the profile of one run Q, the larger of both directions. The number of runs is drawn without looking at
data, the best run leaves, γ and η are those of its distribution and m is its mean. For any e ≥ 0 put
c = max(e^e, 1 + (1/γ − 1)·δ_Q(e)). Then

    truncated negative binomial     δ(ε) ≤ m · δ_Q(ε − (1+η) log c),
    first run above a threshold     δ(ε) ≤ δ_Q(ε − log c) / γ,
    Poisson                         δ(ε) ≤ m · δ_Q(ε − m·δ_Q(0)).

Proofs: docs/proofs/tuning-profiles.md. A run on a fresh Poisson sample of the records has the profile
δ(log(1 + q(e^ε − 1))) = q·δ_Q(ε) at most, whatever Q is (Balle, Barthe and Gaboardi 2018, theorem 8).

References:
    Liu, Talwar 2019. Papernot, Steinke 2022. Koskela, Redberg, Wang 2024, "Privacy profiles for private selection".
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from sordino.accounting.base import Accountant, EventCounts, flatten, sampled_epsilon
from sordino.accounting.rdp import success_probability
from sordino.definitions import NeighboringRelation
from sordino.errors import AccountingError, UnsupportedEvent
from sordino.events import ApproximateDP, Event, NoOp, PoissonSampled, PureDP, RepeatAndSelect, compose_counts

_LARGEST = 600.0
_HALVINGS = 24


@dataclass(frozen=True, kw_only=True)
class _Profile:
    """δ(ε) and ε(δ) of one run, upper bounds, worse direction."""

    delta: Callable[[float], float]
    epsilon: Callable[[float], float]


def _profile(event: Event, neighboring_relation: NeighboringRelation) -> _Profile:
    from sordino.accounting import api

    if isinstance(event, PureDP | ApproximateDP):
        return _worst(event.epsilon, event.delta if isinstance(event, ApproximateDP) else 0.0)
    amplified = neighboring_relation is not NeighboringRelation.REPLACE_ONE
    try:
        flatten(event, neighboring_relation)
        # The short way is as tight for these, and takes no lattice.
        if isinstance(event, PoissonSampled) and isinstance(event.event, PureDP | ApproximateDP) and amplified:
            return _sampled(_profile(event.event, neighboring_relation), event.sample_rate)
    except UnsupportedEvent:
        if isinstance(event, PoissonSampled) and amplified:
            return _sampled(_profile(event.event, neighboring_relation), event.sample_rate)
        raise
    return _Profile(
        delta=lambda epsilon: api.delta(event, epsilon, neighboring_relation=neighboring_relation).upper,
        epsilon=lambda delta: api.epsilon(event, delta, neighboring_relation=neighboring_relation).upper,
    )


def _worst(epsilon: float, delta: float) -> _Profile:
    """The most that an (ε, δ)-private run can do: with probability δ everything, otherwise randomized response."""
    scale = 1 + math.exp(-epsilon)

    def of_epsilon(at: float) -> float:
        return min(1.0, delta + (1 - delta) * max(0.0, -math.expm1(min(at - epsilon, 0.0))) / scale * (1 + 1e-12))

    def of_delta(at: float) -> float:
        if at < delta:
            return math.inf
        # The inverse with its rounding on the safe side; no more than ε in any case.
        left = 1 - (at - delta) / (1 - delta) * scale + 1e-15 if delta < 1 else 0.0
        return min(epsilon, max(0.0, epsilon + math.log(left) + 1e-12)) if left > 0 else 0.0

    return _Profile(delta=of_epsilon, epsilon=of_delta)


def _sampled(inner: _Profile, rate: float) -> _Profile:
    """The profile on a Poisson sample: for a whole training on one sample no better distribution is known."""
    if rate == 0:
        return _Profile(delta=lambda epsilon: 0.0, epsilon=lambda delta: 0.0)  # noqa: ARG005

    def delta(epsilon: float) -> float:
        return rate * inner.delta(math.log1p(math.expm1(min(epsilon, _LARGEST)) / rate))

    def epsilon(delta: float) -> float:
        return 0.0 if delta >= rate else sampled_epsilon(inner.epsilon(delta / rate), rate)

    return _Profile(delta=delta, epsilon=epsilon)


@lru_cache(maxsize=64)
def _penalty(event: RepeatAndSelect, neighboring_relation: NeighboringRelation) -> float:
    """What is added to ε: (1+η) log c at about the best e, or the Poisson term; ∞ when nothing is known."""
    run = _profile(event.event, neighboring_relation)
    if event.distribution == "poisson":
        return event.mean * run.delta(0.0)
    gamma = 1 / event.mean if event.distribution == "threshold" else success_probability(event.mean, event.shape)
    odds = (1 - gamma) / gamma
    exponent = 1.0 if event.distribution == "threshold" else 1 + event.shape
    low, high = 0.0, 0.05
    while math.expm1(high) < odds * run.delta(high):
        low, high = high, 2 * high
        if high > _LARGEST:
            return math.inf
    for _ in range(_HALVINGS):
        if high - low <= 1e-4 * high:
            break
        middle = (low + high) / 2
        low, high = (middle, high) if math.expm1(middle) < odds * run.delta(middle) else (low, middle)
    # Any e is valid; at this one the first term is the larger, up to rounding.
    return exponent * max(high, math.log1p(odds * run.delta(high))) * (1 + 1e-12)


def _mean(event: RepeatAndSelect) -> float:
    """What δ is multiplied by: the mean number of runs, or 1/γ."""
    return (event.mean if event.distribution == "poisson" else max(1.0, event.mean)) * (1 + 1e-9)


def _epsilon(event: RepeatAndSelect, delta: float, neighboring_relation: NeighboringRelation) -> float:
    share = delta / _mean(event)
    if share >= 1:
        return 0.0
    if share == 0:
        return math.inf
    penalty = _penalty(event, neighboring_relation)
    return math.inf if math.isinf(penalty) else penalty + _profile(event.event, neighboring_relation).epsilon(share)


def _delta(event: RepeatAndSelect, epsilon: float, neighboring_relation: NeighboringRelation) -> float:
    rest = epsilon - _penalty(event, neighboring_relation)
    return 1.0 if rest < 0 else min(1.0, _mean(event) * _profile(event.event, neighboring_relation).delta(rest))


@dataclass(frozen=True, kw_only=True)
class _Selections:
    """The selections of an event with their counts, and everything else as one event."""

    chosen: list[tuple[RepeatAndSelect, int]]
    rest: Event | None
    neighboring_relation: NeighboringRelation


class SelectionAccountant(Accountant[_Selections]):
    """Selections by the profile of one run; with anything else their ε and δ are added.

    Guarantee:
        `upper` is an upper bound; `lower` is 0.
    """

    name = "selection"

    def prepare(self, steps: EventCounts, neighboring_relation: NeighboringRelation) -> _Selections | None:
        """Events with a selection."""
        chosen = [(base, count) for base, count in steps.counts if isinstance(base, RepeatAndSelect)]
        rest = compose_counts({base: n for base, n in steps.counts if not isinstance(base, RepeatAndSelect)})
        others = None if isinstance(rest, NoOp) else rest
        return _Selections(chosen=chosen, rest=others, neighboring_relation=neighboring_relation) if chosen else None

    def supports(self, event: Event, neighboring_relation: NeighboringRelation) -> bool:
        """Events with a selection whose run has a profile."""
        try:
            self.delta(event, 1.0, neighboring_relation)
        except (UnsupportedEvent, AccountingError):
            return False
        return True

    def epsilon_bounds(self, prepared: _Selections, delta: float) -> tuple[float, float]:
        """Σ ε_i(δ_i), where half of δ is for the selections in equal parts, and half for the rest if there is one."""
        chosen, rest, relation = prepared.chosen, prepared.rest, prepared.neighboring_relation
        share = (delta if rest is None else delta / 2) / sum(count for _, count in chosen)
        upper = math.fsum(count * _epsilon(one, share, relation) for one, count in chosen)
        return 0.0, upper if rest is None else upper + _profile(rest, relation).epsilon(delta / 2)

    def delta_bounds(self, prepared: _Selections, epsilon: float) -> tuple[float, float]:
        """Σ δ_i(ε_i) with ε in equal parts."""
        chosen, rest, relation = prepared.chosen, prepared.rest, prepared.neighboring_relation
        share = epsilon / (sum(count for _, count in chosen) + (rest is not None))
        total = math.fsum(count * _delta(one, share, relation) for one, count in chosen)
        return 0.0, min(1.0, total if rest is None else total + _profile(rest, relation).delta(share))
