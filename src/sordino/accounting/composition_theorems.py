"""Composition of mechanisms known by (ε, δ) only: basic and optimal; `historical` has the advanced theorem.

basic      Σ ε_i, Σ δ_i (Dwork et al. 2006).
optimal    the exact region for mechanisms known by (ε_i, δ_i): the composition of their dominating pairs
(Kairouz, Oh and Vishwanath 2015, theorem 3.3), computed on a lattice, which for distinct ε_i is the
approximation scheme of Murtagh and Vadhan 2016 with its error certified.
"""

import math
from dataclasses import dataclass

from sordino.accounting.base import Accountant, EventCounts, Repeated, flatten, sampled_epsilon
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


def parameters(steps: EventCounts, neighboring_relation: NeighboringRelation) -> list[tuple[float, float, int]]:
    """(ε_i, δ_i, count) of every distinct step.

    Raises:
        UnsupportedEvent: a step is not (ε, δ)-private with one pair to name, such as a Gaussian.
    """
    return [(*step_parameters(base, neighboring_relation), count) for base, count in steps.counts]


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
            # Removing has the larger loss: log(1 + q(e^ε − 1)). A replaced record has no such bound: what a batch
            # without it gives may be far from both.
            epsilon, delta = step_parameters(event.event, neighboring_relation)
            return sampled_epsilon(epsilon, event.sample_rate), event.sample_rate * delta
        case RepeatAndSelect() if event.distribution != "poisson":
            # Liu and Talwar 2019 (η = 1: 3ε; a threshold: 2ε); Papernot and Steinke 2022, theorem 2 at infinite
            # orders. With probability ≤ E[K]·δ some run shows all; K given that none does has one of its kind.
            parts = parameters(flatten(event.event, neighboring_relation), neighboring_relation)
            shape = 0.0 if event.distribution == "threshold" else event.shape
            lost = max(1.0, event.mean) * math.fsum(count * delta for _, delta, count in parts) * (1 + 1e-9)
            return (2 + shape) * math.fsum(count * epsilon for epsilon, _, count in parts), min(1.0, lost)
        case _:
            raise UnsupportedEvent(
                f"event must be (ε, δ)-private by itself, got {event.kind}. Use contour, pld or rdp."
            )


class BasicCompositionAccountant(Accountant[tuple[float, float]]):
    """Sums of ε and δ.

    Guarantee:
        `upper` is an upper bound; `lower` is 0.
    """

    name = "basic"

    def prepare(self, steps: EventCounts, neighboring_relation: NeighboringRelation) -> tuple[float, float] | None:
        """Σ ε_i and Σ δ_i."""
        parts = parameters(steps, neighboring_relation)
        totals = math.fsum(count * e for e, _, count in parts), math.fsum(count * d for _, d, count in parts)
        return totals if parts else None

    def epsilon_bounds(self, prepared: tuple[float, float], delta: float) -> tuple[float, float]:
        """Σ ε_i when δ ≥ Σ δ_i, otherwise ∞."""
        total, spent = prepared
        return 0.0, total if delta >= spent else math.inf

    def delta_bounds(self, prepared: tuple[float, float], epsilon: float) -> tuple[float, float]:
        """Σ δ_i when ε ≥ Σ ε_i, otherwise 1."""
        total, spent = prepared
        return 0.0, min(1.0, spent) if epsilon >= total else 1.0


@dataclass(frozen=True, kw_only=True)
class _KnownSteps:
    """The dominating pairs of steps known by (ε, δ), and whether nothing more is known of any."""

    plds: list[RepeatedPLD]
    exact: bool

    def interval(self, bounds: tuple[float, float]) -> tuple[float, float]:
        """`bounds`, without a lower end where a step's loss says more than its ε."""
        return bounds if self.exact else (0.0, bounds[1])


class OptimalCompositionAccountant(Accountant[_KnownSteps]):
    """The best that can be said of mechanisms known by (ε_i, δ_i) only.

    Guarantee:
        `upper` bounds the event's ε. For `PureDP` and `ApproximateDP` steps the interval contains the exact answer;
        for others, whose loss says more than their ε, `lower` is 0.
    """

    name = "optimal"
    automatic = False

    def prepare(self, steps: EventCounts, neighboring_relation: NeighboringRelation) -> _KnownSteps | None:
        """Steps with an (ε, δ)."""
        parts = parameters(steps, neighboring_relation)
        plds: list[RepeatedPLD] = [Repeated(approximate_pld(epsilon, delta), count) for epsilon, delta, count in parts]
        exact = all(isinstance(base, PureDP | ApproximateDP) for base, _ in steps.counts)
        return _KnownSteps(plds=plds, exact=exact) if parts else None

    def epsilon_bounds(self, prepared: _KnownSteps, delta: float) -> tuple[float, float]:
        """By the pairs' loss distribution."""
        return prepared.interval(pld_epsilon(prepared.plds, delta))

    def delta_bounds(self, prepared: _KnownSteps, epsilon: float) -> tuple[float, float]:
        """By the pairs' loss distribution."""
        return prepared.interval(pld_delta(prepared.plds, epsilon))
