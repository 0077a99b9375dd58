"""Families of trade-off curves, ordered by strength: what an audit's null hypothesis may be (room `audit`, floor 4)."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
from scipy.special import ndtr, ndtri

from sordino import accounting, checks
from sordino.accounting.gaussian import gaussian_epsilon
from sordino.definitions import NeighboringRelation
from sordino.events import Event

__all__ = ["EventFamily", "Family", "GaussianFamily"]

_POINTS = 96
_TOP_DELTA = 1e-9


@runtime_checkable
class Family(Protocol):
    """Trade-off curves f_s that fall as the strength s > 0 grows: a larger s hides less."""

    @property
    def name(self) -> str:
        """What the answer is conditional on, in words."""
        ...

    def least_false_positive_rate(self, strength: float) -> Callable[[float], float]:
        """True-positive rate ↦ the least false-positive rate that any attack on f_s pays for it."""
        ...

    def epsilon(self, strength: float, delta: float) -> float:
        """ε of f_s at δ, from below."""
        ...


@dataclass(frozen=True)
class GaussianFamily:
    """μ-GDP; the strength is μ.

    Example:
        >>> family = GaussianFamily()
        >>> round(family.epsilon(1.0, 1e-5), 3), round(family.least_false_positive_rate(1.0)(0.5), 4)
        (4.377, 0.1587)

    References:
        Dong, Roth and Su 2022, definition 2.6.
    """

    @property
    def name(self) -> str:
        """What the answer is conditional on, in words."""
        return "Gaussian (μ-GDP)"

    def least_false_positive_rate(self, strength: float) -> Callable[[float], float]:
        """Φ(Φ⁻¹(t) − μ)."""
        return lambda rate: float(ndtr(ndtri(rate) - strength))

    def epsilon(self, strength: float, delta: float) -> float:
        """ε of N(0, 1) against N(μ, 1) at δ, from below."""
        return gaussian_epsilon(delta, strength)[0]


@dataclass(frozen=True, kw_only=True)
class EventFamily:
    """The curves of one mechanism with its noise divided by the strength: strength 1 is the mechanism as claimed.

    The curve comes from δ(ε) at finitely many ε. Each gives a valid line TPR ≤ e^ε·FPR + δ(ε), so the family is never
    stronger than its events (Dong, Roth and Su 2022, proposition 2.12).

    Args:
        event: noise factor in (0, ∞) ↦ the event with its noise multiplier times the factor.
        name: what the event is, in words.
        relation: the neighbouring relation of the events.

    Example:
        >>> from sordino.events import Gaussian
        >>> family = EventFamily(event=lambda factor: Gaussian(noise_multiplier=factor), name="Gaussian")
        >>> round(family.epsilon(1.0, 1e-5), 3), round(family.least_false_positive_rate(1.0)(0.5), 2)
        (4.377, 0.16)
    """

    event: Callable[[float], Event]
    name: str
    relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE
    _lines: dict[float, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict, init=False, repr=False)

    def least_false_positive_rate(self, strength: float) -> Callable[[float], float]:
        """The largest of the lines' false-positive rates."""
        if strength not in self._lines:
            event = self.event(1 / checks.positive(strength=strength))
            top = accounting.epsilon(event, _TOP_DELTA, relation=self.relation).upper
            # Denser towards 0, where most attacks have their error rates.
            points = min(top, 500.0) * np.linspace(0.0, 1.0, _POINTS) ** 2
            profile = accounting.privacy_profile(event, points.tolist(), relation=self.relation)
            self._lines[strength] = np.exp(points), np.array(profile)
        growth, profile = self._lines[strength]

        def rate(positive: float) -> float:
            forward = (positive - profile) / growth
            # ε < 0: 1 − TPR ≥ e^−ε (1 − FPR − δ(ε)), the same lines with the two errors exchanged.
            backward = 1 - profile - (1 - positive) * growth
            return max(0.0, float(forward.max()), float(backward.max()))

        return rate

    def epsilon(self, strength: float, delta: float) -> float:
        """ε of the event at δ, from below."""
        found = accounting.epsilon(self.event(1 / strength), delta, relation=self.relation)
        return found.lower if math.isfinite(found.lower) else 0.0
