"""Rounding a privacy loss to a lattice, up and down, with second-order error (floor 1).

Upper: within a bin (l_i, l_{i+1}] of P-mass p and Q-mass q the mass goes to the two ends so that both masses are
kept. δ(ε) = E[(1 − e^ε y)₊] is convex in y = e^{−L}, so a spread that keeps the mean of y can only raise it (the
chord over a convex curve; Doroshenko et al. 2022, "connect the dots"). Lower: a bin around l_i is merged into one
outcome, which only lowers δ (data processing); its loss −log(q/p) differs from l_i by O(h²), so a common shift s
puts almost every bin's loss at or above l_i − s, and the rest go one point down.

Masses are differences of tails, from whichever side is smaller, and each difference's rounding error is moved to
the unfavourable side.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sordino.accounting.laws import Law
from sordino.accounting.mixtures import FloatArray
from sordino.accounting.transforms import UNIT_ROUNDOFF

__all__ = ["LatticeLaw", "gathered", "lower_lattice", "spread", "upper_lattice"]

_TAIL_ERROR = 32 * UNIT_ROUNDOFF  # relative error of a tail probability


@dataclass(frozen=True, kw_only=True)
class LatticeLaw:
    """P-masses at the losses (first + k) · step − shift, and the mass at ∞.

    `uncertain` bounds what one use may add to or take from any δ(ε), beyond what the masses say.
    """

    step: float
    first: int
    masses: FloatArray
    infinite: float
    shift: float = 0.0
    uncertain: float = 0.0

    @cached_property
    def losses(self) -> FloatArray:
        """The lattice points, shift included."""
        return self.step * (self.first + np.arange(self.masses.size, dtype=np.float64)) - self.shift

    @cached_property
    def log_masses(self) -> FloatArray:
        """Logarithms, −∞ at points without mass."""
        with np.errstate(divide="ignore"):
            return np.log(self.masses)


def _differences(law: Law, edges: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """P- and Q-mass of each (edge_i, edge_{i+1}], and bounds on their errors."""
    above, below = law.upper(edges), law.lower(edges)
    results: list[FloatArray] = []
    for right, left in zip(above, below, strict=True):
        use_right = right[:-1] <= left[1:]
        mass = np.where(use_right, right[:-1] - right[1:], left[1:] - left[:-1])
        error = _TAIL_ERROR * np.where(use_right, right[:-1], left[1:])
        results += [np.maximum(mass, 0.0), error]
    return results[0], results[1], results[2], results[3]


def _span(law: Law, step: float) -> tuple[int, int]:
    # One point to spare at each end: an atom that rounding puts just beyond the last point would count as infinite.
    low, high = law.support
    return math.floor(low / step - 1e-6) - 1, math.ceil(high / step + 1e-6) + 1


def upper_lattice(law: Law, step: float) -> LatticeLaw:
    """A lattice law whose δ is at least the law's at every ε, also after composition."""
    first, last = _span(law, step)
    edges = step * np.arange(first, last + 1, dtype=np.float64)
    p, p_error, q, q_error = _differences(law, edges)
    start = edges[:-1]
    growth = np.exp(np.minimum(start, 700.0))
    scale = -math.expm1(-step)
    up = (p - q * growth) / scale
    slack = (p_error + q_error * growth + 4 * UNIT_ROUNDOFF * p) / scale
    up = np.clip(up + slack, 0.0, p)
    masses = np.zeros(edges.size)
    masses[:-1] += p - up
    masses[1:] += up + p_error
    masses[0] += float(law.lower(edges[:1])[0][0])
    beyond = float(law.upper(edges[-1:])[0][0])
    return LatticeLaw(step=step, first=first, masses=masses, infinite=min(1.0, law.infinite + beyond * (1 + 1e-12)))


def lower_lattice(law: Law, step: float) -> LatticeLaw:
    """A lattice law whose δ is at most the law's at every ε, also after composition."""
    first, last = _span(law, step)
    edges = step * (np.arange(first, last + 2, dtype=np.float64) - 0.5)
    p, p_error, q, q_error = _differences(law, edges)
    p, q = np.maximum(p - p_error, 0.0), q + q_error
    beyond = float(law.upper(edges[-1:])[0][0]) * (1 - 1e-12)
    return _merged(p, q, step, first, beyond, law.infinite)


def _merged(
    p: FloatArray, q: FloatArray, step: float, first: int, beyond: float, infinite: float, uncertain: float = 0.0
) -> LatticeLaw:
    """Bins of P-mass p and Q-mass q around the points from `first` on, each as one outcome."""
    points = step * np.arange(first, first + p.size, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        gap = np.where(p > 0, points + np.log(q / np.maximum(p, 1e-320)), -step)
    gap = np.where(p > 0, np.minimum(gap, step), -step)
    shift = _common_shift(gap, p, step)
    masses = np.zeros(points.size + 1)
    late = gap > shift
    masses[1:] += np.where(late, 0.0, p)
    masses[:-1] += np.where(late, p, 0.0)
    masses[-1] += beyond
    return LatticeLaw(step=step, first=first - 1, masses=masses, infinite=infinite, shift=shift, uncertain=uncertain)


# ── laws that are already many atoms ────────────────────────────────────────────────────────────────────────


def spread(loss: FloatArray, p: FloatArray, step: float, infinite: float, uncertain: float) -> LatticeLaw:
    """Atoms with ascending losses to their two neighbours on the lattice, both masses kept: δ grows or stays."""
    place = loss / step
    index = np.floor(place).astype(np.int64)
    inside = np.expm1(-np.clip(place - index, 0.0, 1.0) * step) / math.expm1(-step)
    # Rounding of the place moves the split by a few units; all of it goes up.
    up = np.minimum(p * (inside + 8 * UNIT_ROUNDOFF * (1 + np.abs(place))), p)
    first = int(index[0])
    size = int(index[-1]) - first + 2
    masses: FloatArray = np.zeros(size)
    masses += np.bincount(index - first, weights=p - up, minlength=size)
    masses += np.bincount(index - first + 1, weights=up, minlength=size)
    return LatticeLaw(step=step, first=first, masses=masses, infinite=infinite, uncertain=uncertain)


def gathered(loss: FloatArray, p: FloatArray, q: FloatArray, step: float, uncertain: float) -> LatticeLaw:
    """Atoms with ascending losses, those around each lattice point as one outcome: δ falls or stays."""
    index = np.rint(loss / step).astype(np.int64)
    first = int(index[0])
    size = int(index[-1]) - first + 1
    p_bin: FloatArray = np.zeros(size)
    q_bin: FloatArray = np.zeros(size)
    # Sums of many atoms: their rounding goes to the unfavourable side.
    p_bin += np.bincount(index - first, weights=p, minlength=size) * (1 - 1e-11)
    q_bin += np.bincount(index - first, weights=q, minlength=size) * (1 + 1e-11)
    return _merged(p_bin, q_bin, step, first, 0.0, 0.0, uncertain)


def _common_shift(gap: FloatArray, p: FloatArray, step: float) -> float:
    """The s ≥ 0 that loses least: s for all the mass, or a whole step for the bins whose loss is lower still."""
    order = np.argsort(gap)
    total = float(np.sum(p))
    share = np.cumsum(p[order]) / max(total, 1e-300)
    candidates = [0.0]
    for level in (0.5, 0.9, 0.99, 0.999, 0.9999, 0.999999, 1 - 1e-9):
        index = min(int(np.searchsorted(share, level)), gap.size - 1)
        candidates.append(min(step, max(0.0, float(gap[order[index]]))))
    costs = [s * total + step * float(np.sum(p[gap > s])) for s in candidates]
    return candidates[int(np.argmin(costs))] + 1e-15 * step
