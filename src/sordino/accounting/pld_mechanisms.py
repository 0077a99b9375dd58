"""Distributions of one step's privacy loss, as masses of loss intervals under P and Q.

The PLD accountant needs, for each direction of each step, P(L > l) and Q(L > l) and their complements, with full
relative accuracy in both tails. `infinite` is the probability under P of an outcome impossible under Q.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol

import numpy as np

from sordino.accounting.gaussian_mixtures import FloatArray, Mixture, MixturePair
from sordino.definitions import NeighboringRelation
from sordino.errors import UnsupportedEvent
from sordino.events import Event, PoissonSampled, ProjectedGaussian

_LARGEST_LOSS = 700.0  # e^L must be a double
_REACH = 14.0  # standard deviations beyond every component


class PrivacyLossDistribution(Protocol):
    """The privacy loss L = log(P/Q) of one step."""

    @property
    def infinite(self) -> float:
        """P(L = ∞)."""
        ...

    @property
    def support(self) -> tuple[float, float]:
        """Losses outside have probability below 1e-40 under P and (weighted by e^{−L}) under Q."""
        ...

    @property
    def atoms(self) -> tuple[float, ...]:
        """Losses that have positive probability, where a lattice should have points."""
        ...

    def upper(self, loss: FloatArray) -> tuple[FloatArray, FloatArray]:
        """P(l < L < ∞) and Q(L > l)."""
        ...

    def lower(self, loss: FloatArray) -> tuple[FloatArray, FloatArray]:
        """P(L ≤ l) and Q(L ≤ l)."""
        ...


@dataclass(frozen=True, kw_only=True)
class DiscretePLD:
    """Finitely many losses, ascending; Q's masses are e^{−L} times P's."""

    losses: tuple[float, ...]
    masses: tuple[float, ...]
    infinite: float = 0.0

    def __post_init__(self) -> None:
        if max(-self.losses[0], self.losses[-1]) > _LARGEST_LOSS:
            raise UnsupportedEvent(
                f"losses must be ≤ {_LARGEST_LOSS:g} for their distribution, got larger ones. Use the basic accountant."
            )

    @property
    def support(self) -> tuple[float, float]:
        """The extreme losses."""
        return self.losses[0], self.losses[-1]

    @property
    def atoms(self) -> tuple[float, ...]:
        """All losses."""
        return self.losses

    def _cumulative(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        losses = np.array(self.losses)
        p = np.array(self.masses)
        return losses, p, p * np.exp(-losses)

    def upper(self, loss: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Sums from the right."""
        losses, p, q = self._cumulative()
        index = np.searchsorted(losses, loss, side="right")
        from_right = [np.append(np.cumsum(x[::-1])[::-1], 0.0) for x in (p, q)]
        return from_right[0][index], from_right[1][index]

    def lower(self, loss: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Sums from the left."""
        losses, p, q = self._cumulative()
        index = np.searchsorted(losses, loss, side="right")
        from_left = [np.append(0.0, np.cumsum(x)) for x in (p, q)]
        return from_left[0][index], from_left[1][index]


def randomized_response_pld(epsilon: float, categories: int = 2) -> DiscretePLD:
    """k-ary randomized response; two categories dominate every ε-private mechanism (Kairouz et al. 2015)."""
    total = 1 + (categories - 1) * math.exp(-epsilon)
    high, low = 1 / total, math.exp(-epsilon) / total
    if categories == 2:
        return DiscretePLD(losses=(-epsilon, epsilon), masses=(low, high))
    return DiscretePLD(losses=(-epsilon, 0.0, epsilon), masses=(low, (categories - 2) * low, high))


def approximate_pld(epsilon: float, delta: float) -> DiscretePLD:
    """The dominating pair of every (ε, δ)-private mechanism (Kairouz, Oh and Viswanath 2015, theorem 3.3)."""
    total = 1 + math.exp(-epsilon)
    low, high = (1 - delta) * math.exp(-epsilon) / total, (1 - delta) / total
    if epsilon == 0:
        return DiscretePLD(losses=(0.0,), masses=(1 - delta,), infinite=delta)
    return DiscretePLD(losses=(-epsilon, epsilon), masses=(low, high), infinite=delta)


@dataclass(frozen=True, kw_only=True)
class LaplacePLD:
    """Laplace noise of scale b: atoms at ±1/b and P(L ≤ l) = ½ e^{(l − 1/b)/2} between; Q mirrors P."""

    scale: float
    infinite: float = 0.0

    @property
    def support(self) -> tuple[float, float]:
        """±1/b."""
        return -1 / self.scale, 1 / self.scale

    @property
    def atoms(self) -> tuple[float, ...]:
        """±1/b."""
        return self.support

    def _p_lower(self, loss: FloatArray) -> FloatArray:
        top = 1 / self.scale
        inner = 0.5 * np.exp((np.minimum(loss, top) - top) / 2)
        return np.where(loss < -top, 0.0, np.where(loss >= top, 1.0, inner))

    def _p_upper(self, loss: FloatArray) -> FloatArray:
        top = 1 / self.scale
        inner = 0.5 - 0.5 * np.expm1((np.minimum(loss, top) - top) / 2)
        return np.where(loss < -top, 1.0, np.where(loss >= top, 0.0, inner))

    def upper(self, loss: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Q(L > l) = P(L < −l); strict or not differs only at the atoms."""
        top = 1 / self.scale
        q = np.where(loss < -top, 1.0, np.where(loss >= top, 0.0, 0.5 * np.exp((-np.maximum(loss, -top) - top) / 2)))
        return self._p_upper(loss), q

    def lower(self, loss: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Q(L ≤ l) = P(L ≥ −l)."""
        top = 1 / self.scale
        inner = 0.5 - 0.5 * np.expm1((-np.maximum(loss, -top) - top) / 2)
        q = np.where(loss < -top, 0.0, np.where(loss >= top, 1.0, inner))
        return self._p_lower(loss), q


@dataclass(frozen=True, kw_only=True)
class GaussianMixturePLD:
    """A Gaussian-mixture pair: the loss is monotone in y, so that intervals of loss are intervals of y."""

    pair: MixturePair
    infinite: float = 0.0
    ends: tuple[float, float] | None = None

    @property
    def atoms(self) -> tuple[float, ...]:
        """None: the loss has a density."""
        return ()

    @property
    def support(self) -> tuple[float, float]:
        """The losses of y between `ends`, or near any component; what lies beyond is still counted."""
        low = min(self.pair.upper.lowest, self.pair.lower.lowest) - _REACH
        high = max(self.pair.upper.highest, self.pair.lower.highest) + _REACH
        ends = self._loss(np.array((low, high) if self.ends is None else self.ends))
        return float(ends.min()), float(ends.max())

    def cut(self, log_mass: float) -> "GaussianMixturePLD":
        """The distribution with ends beyond which P has no more than this mass, on each side."""
        reach = _REACH + 26.0
        bracket = self.pair.upper.lowest - reach, self.pair.upper.highest + reach
        ends = []
        for right in (False, True):
            inner, outer = bracket if right else bracket[::-1]
            for _ in range(30):
                middle = (inner + outer) / 2
                mass = float(self._mass(self.pair.upper, np.array([middle]), right)[0])
                inner, outer = (inner, middle) if mass == 0 or math.log(mass) <= log_mass else (middle, outer)
            ends.append(outer)
        return replace(self, ends=(ends[0], ends[1]))

    def _loss(self, y: FloatArray) -> FloatArray:
        return self.pair.upper.log_density(y) - self.pair.lower.log_density(y)

    def _position(self, loss: FloatArray) -> FloatArray:
        """Y at which the loss is l, ±∞ outside the range of the loss."""
        sign = 1.0 if self.pair.loss_is_increasing else -1.0
        shifts = (*self.pair.upper.parts, *self.pair.lower.parts)
        if len(shifts) == 1:
            return self._closed_position(loss, shifts[0].weight, shifts[0].shift)
        reach = max(self.pair.upper.highest, self.pair.lower.highest, 0.0) - min(
            self.pair.upper.lowest, self.pair.lower.lowest, 0.0
        )
        table = np.linspace(-60.0 - reach, 60.0 + reach, 1 << 14)
        values = sign * self._loss(table)
        slopes = np.maximum(sign * self._slope(table), 1e-300)
        cell = np.searchsorted(values, sign * loss)
        left = np.clip(cell - 1, 0, table.size - 2)
        low, high = table[left], table[left + 1]
        # Newton's step from either end of a narrow cell, weighted towards the nearer one, and one more from there.
        rise = np.maximum(values[left + 1] - values[left], 1e-300)
        share = np.clip((sign * loss - values[left]) / rise, 0.0, 1.0)
        ends = (
            low + np.clip((sign * loss - values[left]) / slopes[left], 0.0, high - low),
            high - np.clip((values[left + 1] - sign * loss) / slopes[left + 1], 0.0, high - low),
        )
        position = ends[0] * (1 - share) + ends[1] * share
        for _ in range(4):
            slope = np.maximum(sign * self._slope(position), 1e-300)
            moved = np.clip(position + (sign * loss - sign * self._loss(position)) / slope, low, high)
            settled = bool(np.all(np.abs(moved - position) <= 2e-9 * (1 + np.abs(position))))
            position = moved
            if settled:  # Newton's next step is of the square of this one
                break
        position = np.where(cell == 0, -np.inf, position)
        return np.where(cell == table.size, np.inf, position)

    def _slope(self, y: FloatArray) -> FloatArray:
        return self.pair.upper.posterior_mean(y) - self.pair.lower.posterior_mean(y)

    def _closed_position(self, loss: FloatArray, weight: float, shift: float) -> FloatArray:
        """One component: |L| = log(1 − w + w e^t) with t = m y − m²/2, so t = log(1 + (e^{|L|} − 1)/w)."""
        sign = 1.0 if self.pair.upper.parts else -1.0
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            large = sign * loss > 600
            ratio = np.expm1(np.where(large, 0.0, sign * loss)) / weight
            exponent = np.where(ratio > -1, np.log1p(np.maximum(ratio, -1.0)), -np.inf)
            exponent = np.where(large, sign * loss - math.log(weight), exponent)
        return (exponent + shift * shift / 2) / shift

    def _mass(self, mixture: Mixture, y: FloatArray, right: bool) -> FloatArray:
        from scipy.special import ndtr

        sign = -1.0 if right else 1.0
        rest = max(0.0, 1 - math.fsum(part.weight for part in mixture.parts))
        total = rest * ndtr(sign * y)
        for part in mixture.parts:
            total = total + part.weight * ndtr(sign * (y - part.shift))
        return np.asarray(total)

    def upper(self, loss: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Mass on the side of y where losses are larger."""
        y = self._position(loss)
        return self._mass(self.pair.upper, y, self.pair.loss_is_increasing), self._mass(
            self.pair.lower, y, self.pair.loss_is_increasing
        )

    def lower(self, loss: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Mass on the side of y where losses are smaller."""
        y = self._position(loss)
        rises = self.pair.loss_is_increasing
        return self._mass(self.pair.upper, y, not rises), self._mass(self.pair.lower, y, not rises)


@dataclass(frozen=True, kw_only=True)
class PoissonSampledPLD:
    """A Poisson sample before a step with distribution ℓ of (P₀, Q₀) (Zhu, Dong and Wang 2022, theorem 11).

    removing: P = (1−q)Q₀ + qP₀, Q = Q₀, L = log(1−q+q e^ℓ)
    adding:   P = P₀, Q = (1−q)P₀ + qQ₀, L = −log(1−q+q e^{−ℓ}), with (P₀, Q₀) the pair of adding.
    """

    base: PrivacyLossDistribution
    sample_rate: float
    removing: bool

    @property
    def infinite(self) -> float:
        """Removing keeps q of it; adding hides it behind P₀'s share in Q."""
        return self.sample_rate * self.base.infinite if self.removing else 0.0

    def forward(self, loss: float) -> float:
        """The sampled loss of a loss ℓ of the base."""
        sign = 1.0 if self.removing else -1.0
        inner = sign * loss
        if inner > 700:
            return sign * (inner + math.log(self.sample_rate))
        return sign * math.log1p(self.sample_rate * math.expm1(inner))

    def _backward(self, loss: FloatArray) -> FloatArray:
        """ℓ at which the sampled loss is l; ±∞ when l is beyond its range."""
        sign = 1.0 if self.removing else -1.0
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            ratio = np.expm1(np.minimum(sign * loss, 700.0)) / self.sample_rate
            inner = np.where(ratio > -1, np.log1p(np.maximum(ratio, -1.0)), -np.inf)
        return sign * inner

    @property
    def support(self) -> tuple[float, float]:
        """The base's ends, carried over; the top of adding is its bound −log(1−q) when P₀ has infinite losses."""
        low, high = self.base.support
        top = self.forward(high)
        if not self.removing and self.base.infinite > 0:
            top = -math.log1p(-self.sample_rate) if self.sample_rate < 1 else math.inf
        return self.forward(low), top

    @property
    def atoms(self) -> tuple[float, ...]:
        """The base's atoms, carried over."""
        carried = tuple(self.forward(atom) for atom in self.base.atoms)
        return carried if self.removing or self.base.infinite == 0 else (*carried, self.support[1])

    def _mix(self, pair: tuple[FloatArray, FloatArray], extra: FloatArray | float) -> tuple[FloatArray, FloatArray]:
        p, q = pair
        rate = self.sample_rate
        if self.removing:
            return (1 - rate) * q + rate * p, q
        return p + extra, (1 - rate) * (p + extra) + rate * q

    def upper(self, loss: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Masses above, the base's infinite losses included when adding."""
        top = self.support[1]
        extra = np.where(loss < top, self.base.infinite, 0.0) if not self.removing else 0.0
        return self._mix(self.base.upper(self._backward(loss)), extra)

    def lower(self, loss: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Masses below or equal."""
        top = self.support[1]
        extra = np.where(loss >= top, self.base.infinite, 0.0) if not self.removing else 0.0
        return self._mix(self.base.lower(self._backward(loss)), extra)


@dataclass(frozen=True, kw_only=True)
class PointwiseMaxPLD:
    """The dominating pair whose curve is the larger of removing's and adding's at every ε, negative ones included.

    When each step may be of either kind, as under fixed-size sampling with replace-one, positive losses come
    from `positive`, negative ones from `negative`, and what is left is no loss (Zhu, Dong and Wang 2022, theorem 11).
    """

    positive: PrivacyLossDistribution
    negative: PrivacyLossDistribution

    @property
    def infinite(self) -> float:
        """That of the positive part."""
        return self.positive.infinite

    @property
    def support(self) -> tuple[float, float]:
        """From the negative part's bottom to the positive part's top."""
        return self.negative.support[0], self.positive.support[1]

    @property
    def atoms(self) -> tuple[float, ...]:
        """Zero, and the atoms of both parts."""
        return (0.0, *(a for a in self.negative.atoms if a < 0), *(a for a in self.positive.atoms if a > 0))

    def upper(self, loss: FloatArray) -> tuple[FloatArray, FloatArray]:
        """The positive part's masses above zero, complements of the negative part's below."""
        above = self.positive.upper(np.maximum(loss, 0.0))
        below = self.negative.lower(np.minimum(loss, 0.0))
        inside = 1 - self.infinite
        return np.where(loss >= 0, above[0], inside - below[0]), np.where(loss >= 0, above[1], 1 - below[1])

    def lower(self, loss: FloatArray) -> tuple[FloatArray, FloatArray]:
        """The negative part's masses below zero, complements of the positive part's above."""
        above = self.positive.upper(np.maximum(loss, 0.0))
        below = self.negative.lower(np.minimum(loss, 0.0))
        inside = 1 - self.infinite
        return np.where(loss >= 0, inside - above[0], below[0]), np.where(loss >= 0, 1 - above[1], below[1])


# ----------------------------------------------------------------------------------------------------------------------
# Clipping by an estimated norm: the unit moves the sum by a random distance that the observer may know.
#
# A norm that is estimated from r Gaussian projections is ‖g‖·√(X/r) with X χ² of r degrees of freedom, whatever
# direction g has. A gradient clipped by it is at most S = √(r/X) times as long as the clipping norm. The projections of
# one step serve all records, so that the other records' factors may give them away: here they count as published. Given
# them the step is a Gaussian (Poisson-sampled or not) at distance S, and the PLD is the average of theirs.
#
# S is rounded up to a grid. Beyond 64 times the clipping norm the unit counts as unprotected.
#
# References:
#     Bu, Gopi, Kulkarni, Lee, Shen, Tantipongpipat 2021, "Fast and memory efficient differentially private-SGD via JL
#     projections", section 4.
# ----------------------------------------------------------------------------------------------------------------------


_FARTHEST = 64.0
_CELLS, _WIDEST, _COARSE = 48, 1.01, 1.12
_BULK = 1e-3  # beyond the distance of this probability the grid is coarse
_LEAST = 1e-17  # cells with less go to the next larger distance
# Relative error of the χ² distribution's tails here, taken to the unfavorable side.
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
    above, distance = 1.0, start
    while distance < _FARTHEST:
        left = beyond(distance)
        if above - left >= _LEAST:
            found.append((distance, above - left))
            above = left
        if above < _LEAST:
            break
        distance *= fine if left > _BULK else _COARSE
    left = beyond(_FARTHEST)
    found += [(_FARTHEST, above - left)] if above - left > _LEAST else []
    return (*found, (math.inf, min(above, left)))


@dataclass(frozen=True, kw_only=True)
class AveragedPLD:
    """One of `parts` at random, and which one is known: the masses are averages. What is left has no protection.

    Args:
        parts: each distribution with its probability.
        unprotected: probability of a distance without bound.
        sample_rate: probability that the unit takes part.
        removing: the direction.
        top: end of the support where it was cut; what lies beyond is still counted.
    """

    parts: tuple[tuple[float, GaussianMixturePLD], ...]
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
        ends = [pld.support for _, pld in self.parts]
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
        for share, pld in self.parts:
            part_p, part_q = pld.upper(loss) if right else pld.lower(loss)
            p, q = p + share * part_p, q + share * part_q
        if self.sample_rate < 1:
            lone, lone_p, lone_q = self._lone
            here = lone > loss if right else lone <= loss
            p, q = p + np.where(here, lone_p, 0.0), q + np.where(here, lone_q, 0.0)
        return p, q

    def cut(self, log_mass: float) -> "AveragedPLD":
        """The distribution with a support whose upper end leaves out no more than this mass."""
        low, high = 0.0, self.support[1]
        for _ in range(40):
            middle = (low + high) / 2
            mass = float(self.upper(np.array([middle]))[0][0])
            low, high = (middle, high) if mass > 0 and math.log(mass) > log_mass else (low, middle)
        return replace(self, top=high)


def projected_plds(event: Event, neighboring_relation: NeighboringRelation) -> tuple[AveragedPLD, ...] | None:
    """(removing, adding) for a step that clips by projections, Poisson-sampled or not; None for other events.

    Raises:
        UnsupportedEvent: the relation is replace-one: two records' distances hang together in an unknown way.
    """
    rate, inner = (event.sample_rate, event.event) if isinstance(event, PoissonSampled) else (1.0, event)
    if not isinstance(inner, ProjectedGaussian):
        return None
    if neighboring_relation is NeighboringRelation.REPLACE_ONE:
        raise UnsupportedEvent(
            "clipping by projections must be accounted under add or remove one, or replace special, got replace one."
        )
    parts = distances(inner.projections)

    def pld(removing: bool) -> AveragedPLD:
        make = MixturePair.remove if removing else MixturePair.add
        return AveragedPLD(
            parts=tuple(
                (share, GaussianMixturePLD(pair=make(rate, distance / inner.noise_multiplier)))
                for distance, share in parts
                if math.isfinite(distance)
            ),
            unprotected=parts[-1][1],
            sample_rate=rate,
            removing=removing,
        )

    return pld(True), pld(False)
