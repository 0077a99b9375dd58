"""Clipping by an estimated norm (floor 1): the unit moves the sum by a random distance that the observer may know.

A norm that is estimated from r Gaussian projections is ‖g‖·√(X/r) with X of χ² law, r degrees of freedom, whatever
direction g has. A gradient clipped by it is at most S = √(r/X) times as long as the clipping norm. The projections of
one step serve all records, so that the other records' factors may give them away: here they count as published. Given
them the step is a Gaussian (Poisson-sampled or not) at distance S, and the loss's law is the average of those laws.

S is rounded up to a grid. Beyond 64 times the clipping norm the unit counts as unprotected.

References:
    Bu, Gopi, Kulkarni, Lee, Shen, Tantipongpipat 2021, "Fast and memory efficient differentially private-SGD via JL
    projections", section 4.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from sordino.accounting.laws import MixtureLaw
from sordino.accounting.mixtures import FloatArray, MixturePair
from sordino.definitions import NeighboringRelation
from sordino.errors import UnsupportedEvent
from sordino.events import Event, PoissonSampled, ProjectedGaussian

__all__ = ["AveragedLaw", "distances", "projected_laws"]

_FARTHEST = 64.0
_CELLS, _WIDEST, _COARSE = 48, 1.01, 1.12
_BULK = 1e-3  # beyond the distance of this probability the grid is coarse
_LEAST = 1e-17  # cells with less go to the next larger distance
# Relative error of the χ² law's tails here, taken to the unfavourable side.
_TAIL_ERROR = 1e-10


@lru_cache(maxsize=64)
def distances(projections: int) -> tuple[tuple[float, float], ...]:
    """(distance, probability), ascending; the last distance is ∞. Each holds for all smaller ones down to the previous.

    Example:
        >>> round(sum(distance * share for distance, share in distances(10_000)[:-1]), 3)
        1.001
    """
    from scipy.special import chdtr, chdtri

    def beyond(distance: float) -> float:
        """P(S > s) = P(X < r/s²)."""
        return min(1.0, float(chdtr(projections, projections / distance**2)) * (1 + _TAIL_ERROR))

    # chdtri inverts the upper tail.
    start = math.sqrt(projections / float(chdtri(projections, _BULK)))
    bulk_end = math.sqrt(projections / float(chdtri(projections, 1 - _BULK)))
    fine = min(_WIDEST, (bulk_end / start) ** (1 / _CELLS))
    found: list[tuple[float, float]] = []
    above, place = 1.0, start
    while place < _FARTHEST:
        left = beyond(place)
        if above - left >= _LEAST:
            found.append((place, above - left))
            above = left
        if above < _LEAST:
            break
        place *= fine if left > _BULK else _COARSE
    left = beyond(_FARTHEST)
    found += [(_FARTHEST, above - left)] if above - left > _LEAST else []
    return (*found, (math.inf, min(above, left)))


@dataclass(frozen=True, kw_only=True)
class AveragedLaw:
    """One of `parts` at random, and which one is known: the masses are averages. What is left has no protection.

    Args:
        parts: each law with its probability.
        unprotected: probability of a distance without bound.
        sample_rate: probability that the unit takes part.
        removing: the direction.
        top: end of the support where it was cut; what lies beyond is still counted.
    """

    parts: tuple[tuple[float, MixtureLaw], ...]
    unprotected: float
    sample_rate: float
    removing: bool
    top: float = math.inf

    @property
    def infinite(self) -> float:
        """Removing: the unit stands out when it takes part. Adding hides it behind its absence."""
        exposed = self.unprotected * self.sample_rate if self.removing else 0.0
        return exposed if self.sample_rate < 1 else self.unprotected

    @property
    def atoms(self) -> tuple[float, ...]:
        """None that a lattice should be fitted to."""
        return ()

    @property
    def support(self) -> tuple[float, float]:
        """From the lowest to the highest end, or `top`."""
        ends = [law.support for _, law in self.parts]
        low, high = min(end[0] for end in ends), max(end[1] for end in ends)
        if not self.removing and self.sample_rate < 1:
            high = max(high, self._lone[0])
        return max(low, -2 * min(self.top, high) - 1), min(high, self.top)

    @property
    def _lone(self) -> tuple[float, float, float]:
        """Loss, P- and Q-mass of the unprotected part where it tells nothing for sure."""
        missed = math.log1p(-self.sample_rate) if self.sample_rate < 1 else -math.inf
        if self.removing:
            return missed, self.unprotected * (1 - self.sample_rate), self.unprotected
        return -missed, self.unprotected, self.unprotected * (1 - self.sample_rate)

    def upper(self, loss: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Averages from the right."""
        return self._averaged(loss, right=True)

    def lower(self, loss: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Averages from the left."""
        return self._averaged(loss, right=False)

    def _averaged(self, loss: FloatArray, *, right: bool) -> tuple[FloatArray, FloatArray]:
        p, q = np.zeros_like(loss), np.zeros_like(loss)
        for share, law in self.parts:
            part_p, part_q = law.upper(loss) if right else law.lower(loss)
            p, q = p + share * part_p, q + share * part_q
        if self.sample_rate < 1:
            place, lone_p, lone_q = self._lone
            here = place > loss if right else place <= loss
            p, q = p + np.where(here, lone_p, 0.0), q + np.where(here, lone_q, 0.0)
        return p, q

    def cut(self, log_mass: float) -> "AveragedLaw":
        """The law with a support whose upper end leaves out no more than this mass."""
        low, high = 0.0, self.support[1]
        for _ in range(40):
            middle = (low + high) / 2
            mass = float(self.upper(np.array([middle]))[0][0])
            low, high = (middle, high) if mass > 0 and math.log(mass) > log_mass else (low, middle)
        return replace(self, top=high)


def projected_laws(event: Event, relation: NeighboringRelation) -> tuple[AveragedLaw, ...] | None:
    """(removing, adding) for a step that clips by projections, Poisson-sampled or not; None for other events.

    Raises:
        UnsupportedEvent: the relation is replace-one: two records' distances hang together in an unknown way.
    """
    rate, inner = (event.sample_rate, event.event) if isinstance(event, PoissonSampled) else (1.0, event)
    if not isinstance(inner, ProjectedGaussian):
        return None
    if relation is NeighboringRelation.REPLACE_ONE:
        raise UnsupportedEvent(
            "clipping by projections must be accounted under add or remove one, or replace special, got replace one."
        )
    parts = distances(inner.projections)

    def law(removing: bool) -> AveragedLaw:
        make = MixturePair.remove if removing else MixturePair.add
        return AveragedLaw(
            parts=tuple(
                (share, MixtureLaw(pair=make(rate, distance / inner.noise_multiplier)))
                for distance, share in parts
                if math.isfinite(distance)
            ),
            unprotected=parts[-1][1],
            sample_rate=rate,
            removing=removing,
        )

    return law(True), law(False)
