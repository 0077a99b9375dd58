"""Composition of mechanisms known by (ε, δ) only: basic and optimal; `historical` has the advanced theorem.

basic      Σ ε_i, Σ δ_i (Dwork et al. 2006).
optimal    the exact region for mechanisms known by (ε_i, δ_i): the composition of their dominating pairs
(Kairouz, Oh and Vishwanath 2015, theorem 3.3), computed on a lattice, which for distinct ε_i is the
approximation scheme of Murtagh and Vadhan 2016 with its error certified.
"""

import math
from dataclasses import dataclass

from sordino.accounting.base import Interval, flatten, sampled_epsilon
from sordino.accounting.pld import RepeatedPLD, pld_delta, pld_epsilon
from sordino.accounting.pld_mechanisms import approximate_pld
from sordino.definitions import NeighboringRelation
from sordino.errors import UnsupportedEvent
from sordino.events import (
    ApproximateDP,
    BoundedRange,
    DiscreteLaplace,
    Event,
    Laplace,
    PoissonSampled,
    PureDP,
    RandomizedResponse,
    RepeatAndSelect,
)

__all__ = [
    "BasicCompositionAccountant",
    "OptimalCompositionAccountant",
    "parameters",
    "step_parameters",
]


def parameters(event: Event, neighboring_relation: NeighboringRelation) -> list[tuple[float, float, int]]:
    """(ε_i, δ_i, count) of every distinct step.

    Raises:
        UnsupportedEvent: a step is not (ε, δ)-private with one pair to name, such as a Gaussian.
    """
    return [
        (*step_parameters(base, neighboring_relation), count)
        for base, count in flatten(event, neighboring_relation).counts
    ]


def step_parameters(event: Event, neighboring_relation: NeighboringRelation) -> tuple[float, float]:
    """(ε, δ) of one step that has a pair to name."""
    match event:
        case PureDP() | RandomizedResponse() | BoundedRange():
            return event.epsilon, 0.0
        case ApproximateDP():
            return event.epsilon, event.delta
        case Laplace():
            return 1 / event.noise_multiplier, 0.0
        case DiscreteLaplace():
            return event.sensitivity / event.scale, 0.0
        case PoissonSampled() if neighboring_relation is not NeighboringRelation.REPLACE_ONE:
            epsilon, delta = step_parameters(event.event, neighboring_relation)
            return sampled_epsilon(epsilon, event.sample_rate), event.sample_rate * delta
        case RepeatAndSelect() if event.distribution != "poisson":
            # Liu and Talwar 2019 (η = 1: 3ε; a threshold: 2ε); Papernot and Steinke 2022, theorem 2 at infinite
            # orders. With probability ≤ E[K]·δ some run shows all; K given that none does has one of its kind.
            parts = parameters(event.event, neighboring_relation)
            shape = 0.0 if event.distribution == "threshold" else event.shape
            lost = max(1.0, event.mean) * math.fsum(count * delta for _, delta, count in parts) * (1 + 1e-9)
            return (2 + shape) * math.fsum(count * epsilon for epsilon, _, count in parts), min(1.0, lost)
        case _:
            raise UnsupportedEvent(
                f"event must be (ε, δ)-private by itself, got {event.kind}. Use contour, pld or rdp."
            )


def _supported(event: Event, neighboring_relation: NeighboringRelation) -> bool:
    try:
        return bool(parameters(event, neighboring_relation))
    except UnsupportedEvent:
        return False


@dataclass(frozen=True)
class BasicCompositionAccountant:
    """Sums of ε and δ.

    Guarantee:
        `upper` is an upper bound; `lower` is 0.
    """

    name: str = "basic"
    automatic: bool = True

    def supports(self, event: Event, neighboring_relation: NeighboringRelation) -> bool:
        """Steps with an (ε, δ)."""
        return _supported(event, neighboring_relation)

    def epsilon(self, event: Event, delta: float, neighboring_relation: NeighboringRelation) -> Interval:
        """Σ ε_i when δ ≥ Σ δ_i, otherwise ∞."""
        parts = parameters(event, neighboring_relation)
        spent = math.fsum(count * part_delta for _, part_delta, count in parts)
        total = math.fsum(count * epsilon for epsilon, _, count in parts)
        return Interval(lower=0.0, upper=total if delta >= spent else math.inf, accountant=self.name)

    def delta(self, event: Event, epsilon: float, neighboring_relation: NeighboringRelation) -> Interval:
        """Σ δ_i when ε ≥ Σ ε_i, otherwise 1."""
        parts = parameters(event, neighboring_relation)
        total = math.fsum(count * part for part, _, count in parts)
        spent = math.fsum(count * part_delta for _, part_delta, count in parts)
        return Interval(lower=0.0, upper=min(1.0, spent) if epsilon >= total else 1.0, accountant=self.name)


@dataclass(frozen=True)
class OptimalCompositionAccountant:
    """The best that can be said of mechanisms known by (ε_i, δ_i) only.

    Guarantee:
        `upper` bounds the event's ε. For `PureDP` and `ApproximateDP` steps the interval contains the exact answer;
        for others, whose loss says more than their ε, `lower` is 0.
    """

    name: str = "optimal"
    automatic: bool = False

    def supports(self, event: Event, neighboring_relation: NeighboringRelation) -> bool:
        """Steps with an (ε, δ)."""
        return _supported(event, neighboring_relation)

    def _plds(self, event: Event, neighboring_relation: NeighboringRelation) -> list[RepeatedPLD]:
        return [
            RepeatedPLD(pld=approximate_pld(epsilon, delta), count=count)
            for epsilon, delta, count in parameters(event, neighboring_relation)
        ]

    def _exact(self, event: Event, neighboring_relation: NeighboringRelation) -> bool:
        return all(isinstance(base, PureDP | ApproximateDP) for base, _ in flatten(event, neighboring_relation).counts)

    def epsilon(self, event: Event, delta: float, neighboring_relation: NeighboringRelation) -> Interval:
        """By the pairs' loss distribution."""
        lower, upper = pld_epsilon(self._plds(event, neighboring_relation), delta)
        return Interval(
            lower=lower if self._exact(event, neighboring_relation) else 0.0, upper=upper, accountant=self.name
        )

    def delta(self, event: Event, epsilon: float, neighboring_relation: NeighboringRelation) -> Interval:
        """By the pairs' loss distribution."""
        lower, upper = pld_delta(self._plds(event, neighboring_relation), epsilon)
        return Interval(
            lower=lower if self._exact(event, neighboring_relation) else 0.0, upper=upper, accountant=self.name
        )
