"""Composition of mechanisms known by (ε, δ) only (floor 1): basic and optimal. `strong` has the advanced theorem.

basic      Σ ε_i, Σ δ_i (Dwork et al. 2006).
optimal    the exact region for mechanisms known by (ε_i, δ_i): the composition of their dominating pairs
(Kairouz, Oh and Vishwanath 2015, theorem 3.3), computed on a lattice, which for distinct ε_i is the
approximation scheme of Murtagh and Vadhan 2016 with its error certified.
"""

import math
from dataclasses import dataclass

from sordino.accounting.amplification import sampled_epsilon
from sordino.accounting.composition import flatten
from sordino.accounting.interval import Interval
from sordino.accounting.law_directions import LawStep
from sordino.accounting.laws import approximate_law
from sordino.accounting.pld import pld_delta, pld_epsilon
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
    Selection,
)

__all__ = ["BasicComposition", "OptimalComposition", "parameters", "step_parameters"]


def parameters(event: Event, relation: NeighboringRelation) -> list[tuple[float, float, int]]:
    """(ε_i, δ_i, count) of every distinct step.

    Raises:
        UnsupportedEvent: a step is not (ε, δ)-private with one pair to name, such as a Gaussian.
    """
    return [(*step_parameters(base, relation), count) for base, count in flatten(event, relation).counts]


def step_parameters(event: Event, relation: NeighboringRelation) -> tuple[float, float]:
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
        case PoissonSampled() if relation is not NeighboringRelation.REPLACE_ONE:
            epsilon, delta = step_parameters(event.event, relation)
            return sampled_epsilon(epsilon, event.sample_rate), event.sample_rate * delta
        case Selection() if event.distribution != "poisson":
            # Liu and Talwar 2019 (η = 1: 3ε; a threshold: 2ε); Papernot and Steinke 2022, theorem 2 at infinite
            # orders. With probability ≤ E[K]·δ some run shows all; the law of K given that none does is of its kind.
            parts = parameters(event.event, relation)
            shape = 0.0 if event.distribution == "threshold" else event.shape
            lost = max(1.0, event.mean) * math.fsum(count * delta for _, delta, count in parts) * (1 + 1e-9)
            return (2 + shape) * math.fsum(count * epsilon for epsilon, _, count in parts), min(1.0, lost)
        case _:
            raise UnsupportedEvent(
                f"event must be (ε, δ)-private by itself, got {event.kind}. Use contour, pld or rdp."
            )


def _supported(event: Event, relation: NeighboringRelation) -> bool:
    try:
        return bool(parameters(event, relation))
    except UnsupportedEvent:
        return False


@dataclass(frozen=True)
class BasicComposition:
    """Sums of ε and δ.

    Guarantee:
        `upper` is an upper bound; `lower` is 0.
    """

    name: str = "basic"
    automatic: bool = True

    def supports(self, event: Event, relation: NeighboringRelation) -> bool:
        """Steps with an (ε, δ)."""
        return _supported(event, relation)

    def epsilon(self, event: Event, delta: float, relation: NeighboringRelation) -> Interval:
        """Σ ε_i when δ ≥ Σ δ_i, otherwise ∞."""
        parts = parameters(event, relation)
        spent = math.fsum(count * part_delta for _, part_delta, count in parts)
        total = math.fsum(count * epsilon for epsilon, _, count in parts)
        return Interval(lower=0.0, upper=total if delta >= spent else math.inf, accountant=self.name)

    def delta(self, event: Event, epsilon: float, relation: NeighboringRelation) -> Interval:
        """Σ δ_i when ε ≥ Σ ε_i, otherwise 1."""
        parts = parameters(event, relation)
        total = math.fsum(count * part for part, _, count in parts)
        spent = math.fsum(count * part_delta for _, part_delta, count in parts)
        return Interval(lower=0.0, upper=min(1.0, spent) if epsilon >= total else 1.0, accountant=self.name)


@dataclass(frozen=True)
class OptimalComposition:
    """The best that can be said of mechanisms known by (ε_i, δ_i) only.

    Guarantee:
        `upper` bounds the event's ε. For `PureDP` and `ApproximateDP` steps the interval contains the exact answer;
        for others, whose loss says more than their ε, `lower` is 0.
    """

    name: str = "optimal"
    automatic: bool = False

    def supports(self, event: Event, relation: NeighboringRelation) -> bool:
        """Steps with an (ε, δ)."""
        return _supported(event, relation)

    def _laws(self, event: Event, relation: NeighboringRelation) -> list[LawStep]:
        return [
            LawStep(law=approximate_law(epsilon, delta), count=count)
            for epsilon, delta, count in parameters(event, relation)
        ]

    def _exact(self, event: Event, relation: NeighboringRelation) -> bool:
        return all(isinstance(base, PureDP | ApproximateDP) for base, _ in flatten(event, relation).counts)

    def epsilon(self, event: Event, delta: float, relation: NeighboringRelation) -> Interval:
        """By the pairs' loss distribution."""
        lower, upper = pld_epsilon(self._laws(event, relation), delta)
        return Interval(lower=lower if self._exact(event, relation) else 0.0, upper=upper, accountant=self.name)

    def delta(self, event: Event, epsilon: float, relation: NeighboringRelation) -> Interval:
        """By the pairs' loss distribution."""
        lower, upper = pld_delta(self._laws(event, relation), epsilon)
        return Interval(lower=lower if self._exact(event, relation) else 0.0, upper=upper, accountant=self.name)
