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
_OFFERS, _LEVELS = 6, 3


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


@dataclass(frozen=True)
class _Pieces:
    """P- and Q-masses of pieces of the loss's range."""

    p: FloatArray
    q: FloatArray

    def without(self, taken: FloatArray) -> "_Pieces":
        """What is left when a share of each is taken away."""
        return _Pieces(self.p * (1 - taken), self.q * (1 - taken))


def lower_lattice(law: Law, step: float) -> LatticeLaw:
    """A lattice law whose δ is at most the law's at every ε, also after composition."""
    first, last = _span(law, step)
    halves = step / 2 * np.arange(2 * first - 1, 2 * last + 2, dtype=np.float64)
    p, q = _lessened(law, halves)
    shift = _heaviest(p, q, step * np.arange(first, last + 1, dtype=np.float64))
    edges = halves - shift
    if shift != 0:
        p, q = _lessened(law, edges)
    beyond = float(law.upper(edges[-1:])[0][0]) * (1 - 1e-12)
    # Half bins: `below` ends at its point and `above` begins there.
    points = step * np.arange(first - 1, last + 1, dtype=np.float64) - shift
    masses = np.zeros(points.size)
    below, above = _Pieces(p[0::2], q[0::2]), _Pieces(p[1::2], q[1::2])
    taken_below, taken_above = _balance(_lack(below, points[1:], step), _spare(above, points[1:]))
    masses[1:] = taken_below * below.p + taken_above * above.p
    # What is left lies between two points, with those above it or with wider and wider ranges as its partners.
    below, above = below.without(taken_below), above.without(taken_above)
    left = _Pieces(np.append(below.p[0], above.p), np.append(below.q[0], above.q))
    left.p[1:-1] += below.p[1:]
    left.q[1:-1] += below.q[1:]
    for level in range(_LEVELS):
        left = _offered(left, points, masses, step, 1 << level)
    for _ in range(_LEVELS):
        left = _lowered(_lifted(left, points, masses, step), points, masses, step)
    masses += left.p
    masses[-1] += beyond
    masses *= 1 - 64 * UNIT_ROUNDOFF
    return LatticeLaw(step=step, first=first - 1, masses=masses, infinite=law.infinite, shift=shift)


def _offered(left: _Pieces, points: FloatArray, masses: FloatArray, step: float, width: int) -> _Pieces:
    """Merges what is left in ranges of `width` points: half of it is offered to either side, again and again.

    The masses merged are added to `masses` at every `width`-th point; what is then left is returned.
    """
    starts = np.arange(0, left.p.size, width)
    ranges = _Pieces(np.add.reduceat(left.p, starts), np.add.reduceat(left.q, starts) * (1 + 2 * width * UNIT_ROUNDOFF))
    at = points[starts]
    lack = _lack(_Pieces(ranges.p[:-1], ranges.q[:-1]), at[1:], width * step)
    spare = _spare(ranges, at)[1:]
    rest = np.ones(starts.size)
    merged = np.zeros(starts.size)
    for _ in range(_OFFERS):
        offered = rest / 2
        below, above = _balance(offered[:-1] * lack, offered[1:] * spare)
        below, above = below * offered[:-1], above * offered[1:]
        merged[1:] += below * ranges.p[:-1] + above * ranges.p[1:]
        rest[:-1] -= below
        rest[1:] -= above
    masses[starts] += merged
    return left.without(1 - np.repeat(np.maximum(rest, 0.0), width)[: left.p.size])


def _lifted(left: _Pieces, points: FloatArray, masses: FloatArray, step: float) -> _Pieces:
    """Merges what is left below a point with mass that lies on the next point already; what is then left is returned.

    The lowest losses have no partner below, and may find those above them taken.
    """
    lack = _lack(_Pieces(left.p[:-2], left.q[:-2]), points[1:-1], step)
    spare = masses[2:] * (-math.expm1(-step) * (1 - 64 * UNIT_ROUNDOFF)) / 2
    below, above = _balance(lack, spare)
    below, above = np.where(left.p[:-2] > 0, below, 0.0), np.where(left.p[:-2] > 0, above, 0.0)
    moved = above / 2 * masses[2:]
    masses[2:] -= moved
    masses[1:-1] += moved + below * left.p[:-2]
    return left.without(np.append(below, (0.0, 0.0)))


def _lowered(left: _Pieces, points: FloatArray, masses: FloatArray, step: float) -> _Pieces:
    """Merges what is left above a point with mass that lies on the point before; the highest losses have no others."""
    lack = masses[:-1] * (math.expm1(step) * (1 + 64 * UNIT_ROUNDOFF)) / 2
    below, above = _balance(lack, _spare(left, points)[1:])
    below, above = np.where(left.p[1:] > 0, below, 0.0), np.where(left.p[1:] > 0, above, 0.0)
    moved = below / 2 * masses[:-1]
    masses[:-1] -= moved
    masses[1:] += moved + above * left.p[1:]
    return left.without(np.append(0.0, above))


def _lessened(law: Law, edges: FloatArray) -> tuple[FloatArray, FloatArray]:
    """P-masses between edges, and Q-masses, each with its error on the unfavourable side."""
    p, p_error, q, q_error = _differences(law, edges)
    return np.maximum(p - p_error, 0.0), q + q_error


def _heaviest(p: FloatArray, q: FloatArray, points: FloatArray) -> float:
    """How far the points are moved down, so that one lies at the loss of a bin that has most of the mass; 0 if none."""
    p_bin, q_bin = p[0::2] + p[1::2], q[0::2] + q[1::2]
    at = int(np.argmax(p_bin))
    if not (p_bin[at] > 0.5 and q_bin[at] > 0):
        return 0.0
    return float(points[at] + math.log(q_bin[at] / p_bin[at])) + 64 * UNIT_ROUNDOFF * (1 + abs(float(points[at])))


def _raised(pieces: _Pieces, points: FloatArray) -> FloatArray:
    """Q-masses times e^l."""
    with np.errstate(divide="ignore"):
        return np.exp(np.minimum(np.log(pieces.q) + points, 700.0))


def _spare(pieces: _Pieces, points: FloatArray) -> FloatArray:
    """A lower bound on p − q e^l ≥ 0 of pieces above their points."""
    raised = _raised(pieces, points)
    slack = 16 * UNIT_ROUNDOFF * (pieces.p + (1 + np.abs(points)) * raised)
    return np.where(pieces.q > 0, np.maximum(pieces.p - raised - slack, 0.0), 0.0)


def _lack(pieces: _Pieces, points: FloatArray, step: float) -> FloatArray:
    """An upper bound on q e^l − p ≥ 0 of pieces at most a step below their points."""
    raised = _raised(pieces, points)
    slack = 16 * UNIT_ROUNDOFF * (pieces.p + (1 + np.abs(points)) * raised)
    # Where the Q-mass is no double, the place says what it can be.
    return np.where(pieces.q > 0, np.maximum(raised - pieces.p, 0.0), pieces.p * math.expm1(step)) + slack


def _balance(lack: FloatArray, spare: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Shares of the pieces below and above each point that make one outcome of its loss or more, the largest."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        below = np.where(lack > 0, np.minimum(1.0, spare / lack * (1 - 8 * UNIT_ROUNDOFF)), 0.0)
        above = np.where(spare > 0, np.minimum(1.0, lack / spare * (1 + 8 * UNIT_ROUNDOFF)), 1.0)
    return np.where(below * lack <= above * spare, below, 0.0), above


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
