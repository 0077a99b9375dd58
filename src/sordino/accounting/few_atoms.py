"""Compositions of losses with few values, exactly: binomial sums instead of a lattice (floor 1).

k uses of a law with two losses a < b are k + 1 losses ia + (k − i)b with binomial masses (Kairouz, Oh and Viswanath
2015, theorem 3.3, for pure mechanisms); k uses of one with equally spaced losses are a power of a polynomial. All terms
are positive, so that sums keep their relative accuracy at every δ.
"""

import math
from collections.abc import Sequence

import numpy as np

from sordino.accounting.inversion import invert
from sordino.accounting.laws import AtomicLaw, SampledLaw
from sordino.accounting.mixtures import FloatArray
from sordino.accounting.transforms import UNIT_ROUNDOFF

__all__ = ["FewAtoms", "few_atoms"]

_LARGEST_COMPOSED = 2_000_000
_LARGEST_POWER = 3000


class FewAtoms:
    """δ(ε) of finitely many losses, with its error.

    Args:
        losses: of the composition.
        masses: under P.
        infinite: P(L = ∞), and its relative error.
        error: relative error of masses.
        shift: absolute error of losses.
    """

    def __init__(self, losses: FloatArray, masses: FloatArray, *, infinite: float, error: float, shift: float) -> None:
        order = np.argsort(losses)
        order = order[masses[order] > 0]
        self._losses, self._masses = losses[order], masses[order]
        self._lost = 4e-308 * losses.size  # masses that are no doubles
        self._infinite, self._error, self._shift = infinite, error + 8 * UNIT_ROUNDOFF * losses.size, shift

    def bounds(self, epsilon: float) -> tuple[float, float]:
        """[lower, upper] of δ(ε)."""
        ends = []
        for at in (epsilon + self._shift, epsilon - self._shift):
            start = int(np.searchsorted(self._losses, at))
            excess = at - self._losses[start:]
            ends.append(float(-(self._masses[start:] @ np.expm1(excess))))
        slack = 1e-14 * self._infinite
        low = self._infinite - slack + max(0.0, ends[0] * (1 - self._error))
        high = self._infinite + slack + max(0.0, ends[1] * (1 + self._error)) + self._lost
        return min(1.0, low), min(1.0, high)

    def epsilon(self, delta: float) -> tuple[float, float]:
        """Bounds on the smallest ε with δ(ε) ≤ `delta`."""
        if self._infinite * (1 - 1e-14) > delta:
            return math.inf, math.inf
        return invert(self.bounds, delta)


def few_atoms(laws: Sequence[tuple[object, int]]) -> FewAtoms | None:
    """The composition of (law, count), when it is one of few losses; None otherwise."""
    parts: list[tuple[FloatArray, FloatArray]] = []
    size, error, scale = 1, 0.0, 0.0
    kept = 0.0
    for law, count in laws:
        atoms = _atoms(law)
        if atoms is None or count > _LARGEST_COMPOSED:
            return None
        losses, masses, infinite = atoms
        composed = _power(losses, masses, count)
        if composed is None:
            return None
        parts.append(composed[:2])
        error += composed[2]
        size *= composed[0].size
        scale += count * max(abs(float(losses[0])), abs(float(losses[-1])))
        if size > _LARGEST_COMPOSED or infinite >= 1:
            return None
        kept += count * math.log1p(-infinite)
    losses, masses = parts[0]
    for more, weight in parts[1:]:
        losses = np.add.outer(losses, more).ravel()
        masses = np.multiply.outer(masses, weight).ravel()
    if not math.isfinite(scale):
        return None
    infinite = -math.expm1(kept)
    return FewAtoms(losses, masses, infinite=infinite, error=error, shift=16 * UNIT_ROUNDOFF * scale)


def _atoms(law: object) -> tuple[FloatArray, FloatArray, float] | None:
    """Losses ascending, their masses under P, and the mass at ∞."""
    if isinstance(law, AtomicLaw):
        return np.array(law.losses), np.array(law.masses), law.infinite
    if isinstance(law, SampledLaw) and isinstance(law.base, AtomicLaw) and law.base.infinite == 0:
        losses, p = np.array(law.base.losses), np.array(law.base.masses)
        carried = np.array([law.forward(float(loss)) for loss in losses])
        if not np.all(np.isfinite(carried)):
            return None
        mixed = (1 - law.sample_rate) * p * np.exp(-losses) + law.sample_rate * p if law.removing else p
        return carried, mixed, 0.0
    return None


def _power(losses: FloatArray, masses: FloatArray, count: int) -> tuple[FloatArray, FloatArray, float] | None:
    """Losses and masses of `count` uses, and the relative error of masses."""
    own = 16 * UNIT_ROUNDOFF * count
    if count == 1:
        return losses, masses, own
    if losses.size == 1:
        return losses * count, masses**count, own
    if losses.size == 2:
        from scipy.special import gammaln

        up = np.arange(count + 1, dtype=np.float64)
        with np.errstate(divide="ignore"):
            low, high = np.log(masses)
        if not math.isfinite(low) or not math.isfinite(high):
            return None
        exponent = gammaln(count + 1) - gammaln(up + 1) - gammaln(count - up + 1) + up * high + (count - up) * low
        largest = float(gammaln(count + 1)) + count * (abs(low) + abs(high))
        return up * losses[1] + (count - up) * losses[0], np.exp(exponent), own + 16 * UNIT_ROUNDOFF * largest
    gaps = np.diff(losses)
    if count * losses.size > _LARGEST_POWER or float(np.ptp(gaps)) > 1e-13 * float(np.max(np.abs(losses))):
        return None
    power: FloatArray = np.ones(1)
    for _ in range(count):
        power = np.convolve(power, masses)
    place = np.arange(power.size) * ((losses[-1] - losses[0]) / (losses.size - 1))
    return count * losses[0] + place, power, own * losses.size
