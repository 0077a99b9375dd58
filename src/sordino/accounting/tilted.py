"""Composition of lattice losses by one exponentially tilted Fourier transform, with its error (floor 1).

An untilted FFT of a loss distribution has an error floor of about 1e-16 of its peak, which swamps δ below 1e-13
and grows with the number of steps. Here every step's mass is first tilted, p_i e^{λ l_i − K(λ)}, with λ at the
saddle of the δ asked for: the composed law then peaks where it is needed, and the error is relative to δ.

Errors, all added to the bounds (`N` points, T steps):

    transforms  ‖error‖₂ ≤ c log₂N · u · ‖p̃‖₂ per FFT; |(z+e)^T − z^T| ≤ T(1+e)^{T−1} e; Cauchy–Schwarz with the
                weights of δ (Higham 2002, section 24.1; c = 8 is generous for a mixed-radix transform);
    wrap-round  tilted mass outside the window, by Chernoff bounds on both sides;
    powers      T · |log z| roundoffs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sordino.accounting.lattice import LatticeLaw
from sordino.accounting.mixtures import FloatArray
from sordino.accounting.transforms import UNIT_ROUNDOFF, ComplexArray
from sordino.errors import AccountingError

__all__ = ["LARGEST_WINDOW", "ComposedLattice", "LatticeStep"]

_FFT_CONSTANT = 8.0
LARGEST_WINDOW = 1 << 21
_ROUGH_POINTS = 1 << 12
_WRAP = 1e-11  # tilted mass outside the window, relative to δ's own sum, but not below 1e-17


@dataclass(frozen=True, kw_only=True)
class LatticeStep:
    """One lattice law, `count` times."""

    law: LatticeLaw
    count: int


@dataclass(frozen=True, kw_only=True)
class _Cumulants:
    log_mgf: float
    mean: float
    variance: float


def _cumulants(law: LatticeLaw, lam: float) -> _Cumulants:
    exponent = law.log_masses + lam * law.losses
    peak = float(exponent.max())
    weights = np.exp(exponent - peak)
    total = float(weights.sum())
    mean = float(weights @ law.losses) / total
    variance = float(weights @ (law.losses - mean) ** 2) / total
    return _Cumulants(log_mgf=peak + math.log(total), mean=mean, variance=variance)


def _thinned(law: LatticeLaw) -> LatticeLaw:
    """About a thousand points that stand for all, each mass on its neighbour: it only steers."""
    factor = law.masses.size // _ROUGH_POINTS
    if factor < 2:
        return law
    size = -(-law.masses.size // factor)
    masses = np.zeros(size)
    masses += np.bincount(np.arange(law.masses.size) // factor, weights=law.masses, minlength=size)
    return LatticeLaw(step=law.step * factor, first=0, masses=masses, infinite=0.0, shift=-law.losses[factor // 2])


def _sum(steps: Sequence[LatticeStep], lam: float) -> _Cumulants:
    parts = [(step.count, _cumulants(step.law, lam)) for step in steps]
    return _Cumulants(
        log_mgf=math.fsum(count * part.log_mgf for count, part in parts),
        mean=math.fsum(count * part.mean for count, part in parts),
        variance=math.fsum(count * part.variance for count, part in parts),
    )


class ComposedLattice:
    """δ(ε) of composed lattice laws, as [lower, upper] bounds on the lattice's own exact value.

    Args:
        steps: laws on one common lattice step.
        log_delta: the log of the δ around which the tilt is put.
    """

    def __init__(self, steps: Sequence[LatticeStep], log_delta: float) -> None:
        self._infinite = -math.expm1(
            math.fsum(step.count * math.log1p(-min(step.law.infinite, 1 - 1e-16)) for step in steps)
        )
        self._uncertain = math.fsum(step.count * step.law.uncertain for step in steps) * (1 + 1e-12)
        self._step = steps[0].law.step
        rough = [LatticeStep(law=_thinned(step.law), count=step.count) for step in steps]
        self._lam = self._saddle(rough, log_delta)
        self._at = _sum(steps, self._lam)
        epsilon = self._at.mean - 1 / self._lam - 1 / (self._lam + 1)
        share = log_delta - self._at.log_mgf + self._lam * epsilon
        self._wrap = max(1e-17, _WRAP * math.exp(max(-50.0, min(0.0, share))))
        low, size = self._window(steps, rough)
        self._compose(steps, low, size)

    @staticmethod
    def _saddle(steps: Sequence[LatticeStep], log_delta: float) -> float:
        """λ with saddle-point δ near the target, by bisection on log λ (it only steers)."""
        low, high = math.log(1e-4), math.log(1e7)
        for _ in range(26):
            lam = math.exp((low + high) / 2)
            here = _sum(steps, lam)
            epsilon = here.mean - 1 / lam - 1 / (lam + 1)
            curvature = here.variance + 1 / lam**2 + 1 / (lam + 1) ** 2
            value = here.log_mgf - lam * epsilon - math.log(lam) - math.log1p(lam) - math.log(curvature) / 2 - 0.92
            if abs(value - log_delta) < 0.3:
                break
            low, high = ((low + high) / 2, high) if value > log_delta else (low, (low + high) / 2)
        return math.exp((low + high) / 2)

    def _window(self, steps: Sequence[LatticeStep], rough: Sequence[LatticeStep]) -> tuple[int, int]:
        """First index and length of a window of all but `wrap` of the tilted mass; `rough` steers its bounds."""
        ends = [
            (step.count * step.law.first, step.count * (step.law.first + step.law.masses.size - 1)) for step in steps
        ]
        lowest, highest = sum(low for low, _ in ends), sum(high for _, high in ends)
        total_shift = math.fsum(step.count * step.law.shift for step in steps)
        spread = math.sqrt(self._at.variance + self._step**2)
        goal = -math.log(self._wrap / 2)
        # Chernoff's bounds, with the deviations that are best for the rough laws.
        thetas = [float(factor) / spread for factor in np.geomspace(0.05, 40.0, 16)]
        middle = _sum(rough, self._lam).log_mgf

        def farthest(side: int) -> float:
            def bound(laws: Sequence[LatticeStep], at: float, theta: float) -> float:
                return (_sum(laws, self._lam + side * theta).log_mgf - at + goal) / theta

            theta = min(thetas, key=lambda one: bound(rough, middle, one))
            return bound(steps, self._at.log_mgf, theta)

        right, left = farthest(1), farthest(-1)
        first = max(lowest, math.floor((-left + total_shift) / self._step))
        last = min(highest, math.ceil((right + total_shift) / self._step))
        size = last - first + 1
        if size > LARGEST_WINDOW:
            raise AccountingError(
                f"the loss's window must hold ≤ {LARGEST_WINDOW} points, got {size}. Use the rdp accountant."
            )
        self._total_shift = total_shift
        return first, max(size, 2)

    def _compose(self, steps: Sequence[LatticeStep], low: int, size: int) -> None:
        from scipy import fft

        length = int(fft.next_fast_len(size, real=True) or size)
        spectrum = np.ones(length // 2 + 1, dtype=np.complex128)
        deviation, power_error = 0.0, 0.0
        offset = 0
        for step in steps:
            law = step.law
            exponent = self._lam * law.losses - _cumulants(law, self._lam).log_mgf
            tilted = np.exp(law.log_masses + exponent)
            folded = np.bincount(np.arange(tilted.size) % length, weights=tilted, minlength=length)
            transformed: ComplexArray = np.asarray(fft.rfft(folded), dtype=np.complex128)
            norm = float(np.linalg.norm(folded)) + 4 * UNIT_ROUNDOFF * math.sqrt(tilted.size)
            # Rounding of the tilt's exponent, weighted by the tilted mass itself.
            drift = (
                8
                * UNIT_ROUNDOFF
                * (
                    1
                    + math.sqrt(float(tilted @ exponent**2))
                    + float(tilted @ np.abs(np.maximum(law.log_masses, -750.0)))
                )
            )
            deviation += step.count * (_FFT_CONSTANT * math.log2(length) * UNIT_ROUNDOFF + drift) * norm
            logs: ComplexArray = np.log(np.where(transformed == 0, 1e-300, transformed))
            modulus = np.exp(np.clip(step.count * logs.real, -740.0, 0.0))
            noise = 4 * UNIT_ROUNDOFF * step.count * (np.abs(logs) + 1) * modulus
            power_error += float(np.linalg.norm(noise)) * math.sqrt(2 / length)
            spectrum = spectrum * (modulus * np.exp(1j * step.count * logs.imag))
            offset += step.count * law.first
        if deviation > 0.01:
            raise AccountingError(
                "the composition's rounding must be small, got too many steps. Use the contour accountant."
            )
        pmf = np.asarray(fft.irfft(spectrum, length))
        own = _FFT_CONSTANT * math.log2(length) * UNIT_ROUNDOFF * float(np.linalg.norm(pmf))
        self._norm_error = 1.1 * (deviation + power_error + own)
        self._pmf = np.roll(pmf, -((low - offset) % length))
        self._losses = self._step * (low + np.arange(length)) - self._total_shift
        self._scale_error = 16 * UNIT_ROUNDOFF * (1 + abs(self._at.log_mgf) + sum(step.count for step in steps))

    @property
    def points(self) -> int:
        """Length of the window."""
        return self._losses.size

    def bounds(self, epsilon: float) -> tuple[float, float]:
        """[lower, upper] on the lattice's δ(ε)."""
        # Beyond 50/λ the weights are below e^{−50}, and the masses sum to about 1.
        start, stop = (int(place) for place in np.searchsorted(self._losses, (epsilon, epsilon + 50 / self._lam)))
        excess = self._losses[start:stop] - epsilon
        weights: FloatArray = np.exp(-self._lam * excess) * -np.expm1(-excess)
        exponent = self._at.log_mgf - self._lam * epsilon
        scale = math.exp(min(exponent, 700.0))
        value = float(weights @ self._pmf[start:stop])
        error = (
            self._norm_error * float(np.linalg.norm(weights)) + 2 * self._wrap + 4e-22 + self._scale_error * abs(value)
        )
        error += 4 * UNIT_ROUNDOFF * (abs(exponent) + self._lam * abs(epsilon)) * abs(value)
        slack = 1e-14 * self._infinite
        low = self._infinite - slack + max(0.0, scale * (value - error)) - self._uncertain
        high = self._infinite + slack + max(0.0, scale * (value + error)) + self._uncertain
        return min(1.0, max(0.0, low)), min(1.0, high)
