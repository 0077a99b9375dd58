"""Pairs of distributions whose two sides are Gaussian mixtures of one common width.

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
        """The record is in P's dataset only."""
        return MixturePair(Mixture((MixtureComponent(weight=sample_rate, shift=shift),)), Mixture())

    @staticmethod
    def add(sample_rate: float, shift: float) -> "MixturePair":
        """The record is in Q's dataset only."""
        return MixturePair(Mixture(), Mixture((MixtureComponent(weight=sample_rate, shift=shift),)))

    @staticmethod
    def replace(sample_rate: float, shift: float) -> "MixturePair":
        """The record takes opposite extreme values in the two datasets, `shift` apart."""
        return MixturePair(
            Mixture((MixtureComponent(weight=sample_rate, shift=shift / 2),)),
            Mixture((MixtureComponent(weight=sample_rate, shift=-shift / 2),)),
        )
