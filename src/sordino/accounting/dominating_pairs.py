"""Dominating pairs whose two sides are Gaussian mixtures of one common width.

Everything is measured in units of the noise's standard deviation, so the base measure is N(0, 1) and a
component is a shift. One step of a Poisson-subsampled Gaussian mechanism with noise multiplier z, m = 1/z:

    remove        P = (1−q) N(0) + q N(m)          Q = N(0)
    add           P = N(0)                         Q = (1−q) N(0) + q N(m)
    replace one   P = (1−q) N(0) + q N(m/2)        Q = (1−q) N(0) + q N(−m/2)

Replace-one has half the shift on each side because z is standard deviation over the sensitivity *under the
relation*, which is the distance between the two extreme contributions.

References:
    Zhu, Dong and Wang 2022, theorem 11 (remove and add pairs); Lebeda et al. 2024 and Schuchardt et al. 2024
    (pair under replace-one); Ganesh 2024 (mixtures for groups).
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from sordino.definitions import NeighboringRelation
from sordino.errors import UnsupportedEvent
from sordino.events import (
    Event,
    Gaussian,
    GaussianMixture,
    GroupPoissonSampled,
    PoissonSampled,
    SampledWithoutReplacement,
    SampledWithReplacement,
)

__all__ = ["FloatArray", "Mixture", "MixtureComponent", "MixturePair", "gaussian_pairs", "replacement_shift"]


FloatArray = NDArray[np.float64]

# Above this exponent the sum 1 + Σ p (e^t − 1) is formed with its largest term factored out.
_LARGE = 30.0


@dataclass(frozen=True, kw_only=True)
class MixtureComponent:
    """One component away from the origin: probability `weight`, mean `shift` in standard deviations."""

    weight: float
    shift: float


@dataclass(frozen=True)
class Mixture:
    """Σ weight · N(shift, 1), the rest of the probability at shift 0.

    The density relative to N(0, 1) is w(y) = 1 + Σ p_i (e^{t_i(y)} − 1) with t_i(y) = m_i y − m_i²/2. All
    shifts have one sign, so that arg w(y + iβ) has the sign of β times theirs for |β| · spread < π.
    """

    parts: tuple[MixtureComponent, ...] = ()

    @cached_property
    def lowest(self) -> float:
        """The smallest shift, the origin included."""
        return min((0.0, *(part.shift for part in self.parts)))

    @cached_property
    def highest(self) -> float:
        """The largest shift, the origin included."""
        return max((0.0, *(part.shift for part in self.parts)))

    @property
    def certain(self) -> bool:
        """Whether nothing stays at the origin, so that a single component is a plain Gaussian."""
        return len(self.parts) == 1 and self.parts[0].weight == 1

    @cached_property
    def spread(self) -> float:
        """Distance between the extreme shifts."""
        return self.highest - self.lowest

    def log_density(self, y: FloatArray) -> FloatArray:
        """Log w(y), with full relative accuracy where w is close to 1."""
        if not self.parts:
            return np.zeros_like(y)
        if len(self.parts) == 1:
            only = self.parts[0]
            exponent = only.shift * y - only.shift * only.shift / 2
            if -math.inf < float(exponent.max()) <= _LARGE and only.weight < 0.5:
                return np.log1p(only.weight * np.expm1(exponent))
        exponents = [part.shift * y - part.shift * part.shift / 2 for part in self.parts]
        excess = np.asarray(
            sum(part.weight * np.expm1(np.minimum(t, _LARGE)) for part, t in zip(self.parts, exponents, strict=True))
        )
        top = np.maximum(np.max(exponents, axis=0), 0.0)
        near = (top <= _LARGE) & (excess > -0.5)
        if bool(np.all(near)):
            return np.log1p(excess)
        inside = self._rest * np.exp(-top)
        for part, t in zip(self.parts, exponents, strict=True):
            inside = inside + part.weight * np.exp(t - top)
        return np.where(near, np.log1p(np.maximum(excess, -0.5)), top + np.log(inside))

    @cached_property
    def _rest(self) -> float:
        return max(0.0, 1 - math.fsum(part.weight for part in self.parts))

    def log_density_off_axis(self, y: FloatArray, beta: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Log |w(y + iβ)| and arg w(y + iβ); `beta` broadcasts against `y`."""
        if not self.parts:
            return np.zeros_like(y * beta), np.zeros_like(y * beta)
        exponents = [part.shift * y - part.shift * part.shift / 2 for part in self.parts]
        top = np.maximum(np.max(exponents, axis=0), 0.0)
        real, imaginary = np.asarray(self._rest * np.exp(-top)), np.zeros_like(y * beta)
        for part, t in zip(self.parts, exponents, strict=True):
            size = part.weight * np.exp(t - top)
            real = real + size * np.cos(part.shift * beta)
            imaginary = imaginary + size * np.sin(part.shift * beta)
        return top + np.log(np.hypot(real, imaginary)), np.arctan2(imaginary, real)

    def posterior_mean(self, y: FloatArray) -> FloatArray:
        """Mean shift given y: w'(y)/w(y), which never falls with y."""
        if not self.parts:
            return np.zeros_like(y)
        log_w = self.log_density(y)
        return np.asarray(
            sum(
                part.weight * part.shift * np.exp(np.minimum(part.shift * y - part.shift**2 / 2 - log_w, 700.0))
                for part in self.parts
            )
        )

    def loss_sensitivity(self, y: FloatArray) -> FloatArray:
        """How much a relative rounding error of the exponents t_i moves log w: Σ p_i e^{t_i}/w · (|t_i| + 1)."""
        if not self.parts:
            return np.zeros_like(y)
        log_w = self.log_density(y)
        total = np.zeros_like(y)
        for part in self.parts:
            t = part.shift * y - part.shift**2 / 2
            share = part.weight * np.exp(np.minimum(t - log_w, 700.0))
            total = total + share * (np.abs(part.shift * y) + part.shift**2 + 1)
        return total


@dataclass(frozen=True)
class MixturePair:
    """P and Q of one direction of one step; the loss is log(P/Q) under P.

    Either all shifts of P are ≥ 0 and all of Q are ≤ 0, or the other way round, except that one side may be
    N(0, 1) alone. That makes the loss monotone in y.
    """

    upper: Mixture
    lower: Mixture

    @cached_property
    def max_shift(self) -> float:
        """Largest distance between a component of P and one of Q: bounds |d loss / dy|."""
        return max(
            abs(self.upper.highest - self.lower.lowest),
            abs(self.upper.lowest - self.lower.highest),
        )

    @cached_property
    def spread(self) -> float:
        """The wider of the two mixtures; losses are analytic for |Im y| < π / spread."""
        return max(self.upper.spread, self.lower.spread)

    @property
    def loss_is_increasing(self) -> bool:
        """Whether the loss grows with y."""
        return self.upper.highest + self.upper.lowest > self.lower.highest + self.lower.lowest

    @staticmethod
    def remove(sample_rate: float, shift: float) -> "MixturePair":
        """The record is in P's data set only."""
        return MixturePair(Mixture((MixtureComponent(weight=sample_rate, shift=shift),)), Mixture())

    @staticmethod
    def add(sample_rate: float, shift: float) -> "MixturePair":
        """The record is in Q's data set only."""
        return MixturePair(Mixture(), Mixture((MixtureComponent(weight=sample_rate, shift=shift),)))

    @staticmethod
    def replace(sample_rate: float, shift: float) -> "MixturePair":
        """The record takes opposite extreme values in the two data sets, `shift` apart."""
        return MixturePair(
            Mixture((MixtureComponent(weight=sample_rate, shift=shift / 2),)),
            Mixture((MixtureComponent(weight=sample_rate, shift=-shift / 2),)),
        )


# ----------------------------------------------------------------------------------------------------------------------
# What sampling does to a dominating pair: one place for every scheme, for Gaussians and for laws.
#
# In units of the noise's standard deviation, with m = 1/z the shift of a record under the relation:
#
#     Poisson              add/remove, zero-out: shift m with probability q. Replace-one: ±m/2, each with probability q.
#     Poisson, group of k  Binomial(k, q) records, shift m each (Ganesh 2024). Add/remove and zero-out only.
#     fixed size           the sampled record *displaces* another one, which may lie opposite: shift 2m under add/remove
#                          (Lebeda et al. 2024), m under replace-one, where z already counts the full diameter.
#                          Under replace-one and zero-out each step may look like removing or like adding, as the rest
#                          of the data chooses, so that the pair is the larger of both curves (`PointwiseMaxPLD`).
#     random distance      the mixture that the event states (Ganesh 2024). Add/remove and zero-out only.
#     with replacement     Binomial(size, 1/population) displaced records, shift 2m each, add/remove only.
# ----------------------------------------------------------------------------------------------------------------------


_NEGLIGIBLE = 1e-60
_LARGEST_COUNT = 400


def replacement_shift(noise_multiplier: float, neighboring_relation: NeighboringRelation) -> float:
    """Largest distance between two records' contributions, in standard deviations."""
    return (1.0 if neighboring_relation is NeighboringRelation.REPLACE_ONE else 2.0) / noise_multiplier


def gaussian_pairs(event: Event, neighboring_relation: NeighboringRelation) -> tuple[MixturePair, ...] | None:
    """The pairs of a sampled Gaussian: (remove, add), or one for a symmetric relation; None if it isn't one.

    Raises:
        UnsupportedEvent: the scheme has no pair of this form under the relation.
    """
    if isinstance(event, PoissonSampled) and isinstance(event.event, Gaussian):
        shift = 1 / event.event.noise_multiplier
        if neighboring_relation is NeighboringRelation.REPLACE_ONE:
            return (MixturePair.replace(event.sample_rate, shift),)
        return MixturePair.remove(event.sample_rate, shift), MixturePair.add(event.sample_rate, shift)
    if isinstance(event, GroupPoissonSampled) and isinstance(event.event, Gaussian):
        _require(
            event, neighboring_relation, (NeighboringRelation.ADD_OR_REMOVE_ONE, NeighboringRelation.REPLACE_SPECIAL)
        )
        return _both(_binomial(event.group_size, event.sample_rate, 1 / event.event.noise_multiplier))
    if isinstance(event, SampledWithoutReplacement) and isinstance(event.event, Gaussian):
        _require(event, neighboring_relation, (NeighboringRelation.ADD_OR_REMOVE_ONE,))
        shift, rate = (
            replacement_shift(event.event.noise_multiplier, neighboring_relation),
            event.sample_size / event.dataset_size,
        )
        if rate == 1:
            return MixturePair.remove(1.0, shift), MixturePair.add(1.0, shift)
        return MixturePair.remove(rate, shift), MixturePair.add(rate, shift)
    if isinstance(event, SampledWithReplacement) and isinstance(event.event, Gaussian):
        _require(event, neighboring_relation, (NeighboringRelation.ADD_OR_REMOVE_ONE,))
        shift = replacement_shift(event.event.noise_multiplier, neighboring_relation)
        return _both(_binomial(event.sample_size, 1 / event.dataset_size, shift))
    if isinstance(event, GaussianMixture):
        _require(
            event, neighboring_relation, (NeighboringRelation.ADD_OR_REMOVE_ONE, NeighboringRelation.REPLACE_SPECIAL)
        )
        return _both(_random_distance(event))
    return None


def _random_distance(event: GaussianMixture) -> Mixture:
    """One component for each distance other than 0; equal ones joined."""
    weights: dict[float, list[float]] = {}
    for distance, probability in zip(event.sensitivities, event.probabilities, strict=True):
        if distance > 0 and probability > 0:
            weights.setdefault(distance / event.noise_multiplier, []).append(probability)
    return Mixture(tuple(MixtureComponent(weight=min(1.0, math.fsum(weights[m])), shift=m) for m in sorted(weights)))


def _require(event: Event, neighboring_relation: NeighboringRelation, allowed: tuple[NeighboringRelation, ...]) -> None:
    if neighboring_relation not in allowed:
        raise UnsupportedEvent(
            f"{event.kind} must be accounted under {' or '.join(one.describe() for one in allowed)} here, "
            f"got {neighboring_relation.describe()}. Use the pld accountant or set the relation."
        )


def _both(mixture: Mixture) -> tuple[MixturePair, ...]:
    return MixturePair(mixture, Mixture()), MixturePair(Mixture(), mixture)


def _binomial(trials: int, rate: float, shift: float) -> Mixture:
    """Binomial(trials, rate) shifts. Counts with probability below 1e-60 are dropped, which moves no δ in a double."""
    from scipy.special import bdtrc

    most = min(trials, _LARGEST_COUNT)
    if trials > most and float(bdtrc(most, trials, rate)) > _NEGLIGIBLE:
        raise UnsupportedEvent(
            f"a record must take part at most {_LARGEST_COUNT} times in a batch, got {trials} draws at rate {rate:g}. "
            "Use smaller batches or groups."
        )
    logs = [
        math.lgamma(trials + 1) - math.lgamma(j + 1) - math.lgamma(trials - j + 1) + j * math.log(rate)
        for j in range(1, most + 1)
    ]
    if rate < 1:
        logs = [value + (trials - j) * math.log1p(-rate) for j, value in enumerate(logs, start=1)]
    else:
        logs = [0.0 if j == trials else -math.inf for j in range(1, most + 1)]
    kept = [(j, math.exp(value)) for j, value in enumerate(logs, start=1) if value > math.log(_NEGLIGIBLE)]
    return Mixture(tuple(MixtureComponent(weight=weight, shift=j * shift) for j, weight in kept))
