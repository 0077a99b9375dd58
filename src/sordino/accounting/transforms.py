"""What the contour integral needs to know of one step's privacy loss L under P (floor 1).

A transform knows K(s) = log E_P[e^{sL}]. A line is that transform on the vertical line Re s = λ:

    E_P[e^{(λ+iu)L}] = e^{K(λ)} · φ(u),      φ(u) = characteristic function of the *tilted* loss,

returned as log φ_c(u), with φ_c the characteristic function of L − K'(λ), so that phases stay small and T steps
are T · log φ_c with relative accuracy. Every numerical result comes with a bound on its error.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sordino.accounting.mixtures import FloatArray

__all__ = ["ComplexArray", "GaussianTransform", "LaplaceTransform", "Line", "Moments", "Transform"]

ComplexArray = NDArray[np.complex128]

UNIT_ROUNDOFF = 2.0**-53


@dataclass(frozen=True, kw_only=True)
class Moments:
    """K(λ) with a bound on its error, and the mean and variance of the tilted loss (no bound: they only steer)."""

    log_mgf: float
    error: float
    mean: float
    variance: float


class Line(Protocol):
    """One step's loss on the line Re s = λ."""

    @property
    def moments(self) -> Moments:
        """K, K', K'' at λ."""
        ...

    @property
    def size(self) -> int:
        """Cost of one evaluation, in nodes."""
        ...

    def characteristic(self, u: FloatArray) -> tuple[ComplexArray, FloatArray]:
        """Log φ_c on the uniform grid u_n = n·u_1, and a bound on |error of φ_c| at each point."""
        ...

    def decay(self) -> Callable[[float], float]:
        """A function U ↦ bound on log |φ(u)| that holds for *all* u ≥ U."""
        ...


class Transform(Protocol):
    """K(s) of one step, and its lines."""

    @property
    def largest_loss(self) -> float:
        """The essential supremum of the loss, ∞ when it is unbounded."""
        ...

    @property
    def decays(self) -> bool:
        """Whether the characteristic function of the loss tends to 0: no atoms."""
        ...

    def moments(self, lam: float, *, certified: bool = True) -> Moments:
        """K(λ), K'(λ), K''(λ) at a real λ > 0; `certified` = False may skip the bound on K's error."""
        ...

    def line(self, lam: float, largest_u: float, tolerance: float) -> Line:
        """The line at λ, set up so that |error of φ| ≤ about `tolerance` up to `largest_u`."""
        ...


@dataclass(frozen=True, kw_only=True)
class GaussianTransform:
    """The Gaussian mechanism with μ = sensitivity/std: K(s) = s(s+1)μ²/2; the loss is N(μ²/2, μ²)."""

    mu: float
    largest_loss: float = math.inf
    decays: bool = True

    def moments(self, lam: float, *, certified: bool = True) -> Moments:  # noqa: ARG002
        """Exact up to rounding."""
        square = self.mu * self.mu
        log_mgf = lam * (lam + 1) * square / 2
        return Moments(log_mgf=log_mgf, error=8 * UNIT_ROUNDOFF * log_mgf, mean=(lam + 0.5) * square, variance=square)

    def line(self, lam: float, largest_u: float, tolerance: float) -> "GaussianLine":  # noqa: ARG002
        """The tilted loss is N((λ+½)μ², μ²)."""
        return GaussianLine(moments=self.moments(lam), mu=self.mu)


@dataclass(frozen=True, kw_only=True)
class GaussianLine:
    """φ_c(u) = e^{−μ²u²/2}."""

    moments: Moments
    mu: float
    size: int = 1

    def characteristic(self, u: FloatArray) -> tuple[ComplexArray, FloatArray]:
        """Exact up to rounding."""
        log_phi = -((self.mu * u) ** 2) / 2
        return log_phi.astype(np.complex128), 8 * UNIT_ROUNDOFF * -log_phi * np.exp(log_phi)

    def decay(self) -> Callable[[float], float]:
        """The bound is the value itself."""
        return lambda u: -((self.mu * u) ** 2) / 2


@dataclass(frozen=True, kw_only=True)
class LaplaceTransform:
    """The Laplace mechanism with scale b × ℓ1 sensitivity.

    The loss is 1/b with probability ½, −1/b with probability ½e^{−1/b}, and has a density between, so that
    E[e^{sL}] = ((s+1) e^{s/b} + s e^{−(s+1)/b}) / (2s+1) (Mironov 2017, proposition 6, with α = s + 1).
    """

    scale: float
    decays: bool = False

    @property
    def largest_loss(self) -> float:
        """1/b."""
        return 1 / self.scale

    def moments(self, lam: float, *, certified: bool = True) -> Moments:  # noqa: ARG002
        """K by the closed form with e^{λ/b} factored out; derivatives from the exact tilted law."""
        top = 1 / self.scale
        upper, lower, inner = self._masses(lam)
        total = upper + lower + inner
        # The inner part is a density ∝ e^{(λ+½)l} on [−top, top].
        mean_inner, square_inner = _exponential_moments(lam + 0.5, top)
        mean = (top * (upper - lower) + inner * mean_inner) / total
        square = (top * top * (upper + lower) + inner * square_inner) / total
        log_mgf = lam * top + math.log(total)
        return Moments(
            log_mgf=max(0.0, log_mgf),
            error=UNIT_ROUNDOFF * (8 * lam * top + 32),
            mean=mean,
            variance=max(0.0, square - mean * mean),
        )

    def _masses(self, lam: float) -> tuple[float, float, float]:
        """Tilted masses of the top atom, the bottom atom and the inner part, relative to e^{λ/b}."""
        top = 1 / self.scale
        inner = -math.expm1(-(2 * lam + 1) * top) / (2 * (2 * lam + 1))
        return 0.5, 0.5 * math.exp(-(2 * lam + 1) * top), inner

    def line(self, lam: float, largest_u: float, tolerance: float) -> "LaplaceLine":  # noqa: ARG002
        """The tilted loss: two atoms and an exponential density between."""
        return LaplaceLine(moments=self.moments(lam), lam=lam, top=1 / self.scale)


def _no_decay(_: float) -> float:
    return 0.0


def _exponential_moments(rate: float, top: float) -> tuple[float, float]:
    """Mean and mean square of the density ∝ e^{rate·l} on [−top, top], rate > 0."""
    x = rate * top
    if x < 1e-3:
        return top * x / 3, top * top / 3
    coth = 1 / math.tanh(x) if x < 350 else 1.0
    mean = top * (coth - 1 / x)
    return mean, top * top * (1 - 2 * coth / x + 2 / (x * x))


@dataclass(frozen=True, kw_only=True)
class LaplaceLine:
    """φ(u) from E[e^{sL}] in closed form."""

    moments: Moments
    lam: float
    top: float
    size: int = 1

    def characteristic(self, u: FloatArray) -> tuple[ComplexArray, FloatArray]:
        """The closed form at s = λ + iu over its value at λ, centred."""
        s = self.lam + 1j * u
        value = (
            (s + 1) * np.exp(1j * u * self.top) + s * np.exp(-(2 * self.lam + 1) * self.top - 1j * u * self.top)
        ) / (2 * s + 1)
        phi = value * math.exp(self.lam * self.top - self.moments.log_mgf)
        centred = phi * np.exp(-1j * u * self.moments.mean)
        error = UNIT_ROUNDOFF * (64 + 8 * u * self.top + 8 * self.lam * self.top)
        return np.log(centred), np.asarray(error)

    def decay(self) -> Callable[[float], float]:
        """The atoms do not decay: |φ| ≤ 1 is all that is claimed."""
        return _no_decay
