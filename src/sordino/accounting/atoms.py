"""Transforms of losses with finitely many values (floor 1): randomised response and discrete noise."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sordino.accounting.laws import AtomicLaw
from sordino.accounting.mixtures import FloatArray
from sordino.accounting.transforms import UNIT_ROUNDOFF, ComplexArray, Moments

__all__ = ["AtomicLine", "AtomicTransform"]


@dataclass(frozen=True)
class AtomicTransform:
    """K(s) = log Σ p_i e^{s L_i}."""

    law: AtomicLaw
    decays: bool = False

    @property
    def largest_loss(self) -> float:
        """The largest atom."""
        return self.law.losses[-1]

    def moments(self, lam: float, *, certified: bool = True) -> Moments:  # noqa: ARG002
        """Exact up to rounding."""
        return AtomicLine(law=self.law, lam=lam).moments

    def line(self, lam: float, largest_u: float, tolerance: float) -> "AtomicLine":  # noqa: ARG002
        """The tilted atoms."""
        return AtomicLine(law=self.law, lam=lam)


@dataclass(frozen=True, kw_only=True)
class AtomicLine:
    """Atoms tilted by e^{λL}."""

    law: AtomicLaw
    lam: float

    @property
    def size(self) -> int:
        """Number of atoms."""
        return len(self.law.losses)

    @cached_property
    def _losses(self) -> FloatArray:
        return np.array(self.law.losses)

    @cached_property
    def _tilted(self) -> tuple[FloatArray, float]:
        exponent = self.lam * self._losses + np.log(np.array(self.law.masses))
        peak = float(exponent.max())
        weights = np.exp(exponent - peak)
        total = float(weights.sum())
        return weights / total, peak + math.log(total)

    @property
    def moments(self) -> Moments:
        """K(λ), its error, K'(λ), K''(λ)."""
        weights, log_mgf = self._tilted
        mean = float(weights @ self._losses)
        error = UNIT_ROUNDOFF * (64 + 4 * self.size + 8 * self.lam * float(np.max(np.abs(self._losses))))
        variance = float(weights @ (self._losses - mean) ** 2)
        return Moments(log_mgf=max(0.0, log_mgf), error=error, mean=mean, variance=variance)

    def characteristic(self, u: FloatArray) -> tuple[ComplexArray, FloatArray]:
        """Log φ_c by direct summation."""
        weights, _ = self._tilted
        centred = self._losses - self.moments.mean
        phi = np.exp(1j * np.multiply.outer(u, centred)) @ weights.astype(np.complex128)
        reach = float(np.max(np.abs(centred)))
        error = UNIT_ROUNDOFF * (64 + 8 * self.size + 8 * self.lam * reach + 4 * u * reach)
        return np.log(np.where(phi == 0, 1e-300, phi)), error

    def decay(self) -> Callable[[float], float]:
        """Atoms do not decay."""
        return _no_decay


def _no_decay(_: float) -> float:
    return 0.0
