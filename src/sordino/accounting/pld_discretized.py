"""Rounding a privacy loss to a lattice, up and down, with second-order error.

Upper: within a bin (l_i, l_{i+1}] of P-mass p and Q-mass q the mass goes to the two ends so that both masses are
kept. δ(ε) = E[(1 − e^ε y)₊] is convex in y = e^{−L}, so a spread that keeps the mean of y can only raise it (the
chord over a convex curve; Doroshenko et al. 2022, "connect the dots"). Lower: a bin around l_i is merged into one
outcome, which only lowers δ (data processing); its loss −log(q/p) differs from l_i by O(h²), so a common shift s
puts almost every bin's loss at or above l_i − s, and the rest go one point down.

Masses are differences of tails, from whichever side is smaller, and each difference's rounding error is moved to
the unfavorable side.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from sordino.accounting.base import Repeated
from sordino.accounting.gaussian_mixtures import FloatArray
from sordino.accounting.mgf import UNIT_ROUNDOFF, ComplexArray
from sordino.accounting.pld_mechanisms import PrivacyLossDistribution
from sordino.errors import AccountingError

_TAIL_ERROR = 32 * UNIT_ROUNDOFF  # relative error of a tail probability
_OFFERS, _LEVELS = 6, 3


@dataclass(frozen=True, kw_only=True)
class DiscretizedPLD:
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


def _differences(
    pld: PrivacyLossDistribution, edges: FloatArray
) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """P- and Q-mass of each (edge_i, edge_{i+1}], and bounds on their errors."""
    above, below = pld.upper(edges), pld.lower(edges)
    results: list[FloatArray] = []
    for right, left in zip(above, below, strict=True):
        use_right = right[:-1] <= left[1:]
        mass = np.where(use_right, right[:-1] - right[1:], left[1:] - left[:-1])
        error = _TAIL_ERROR * np.where(use_right, right[:-1], left[1:])
        results += [np.maximum(mass, 0.0), error]
    return results[0], results[1], results[2], results[3]


def _span(pld: PrivacyLossDistribution, step: float) -> tuple[int, int]:
    # One point to spare at each end: an atom that rounding puts just beyond the last point would count as infinite.
    low, high = pld.support
    return math.floor(low / step - 1e-6) - 1, math.ceil(high / step + 1e-6) + 1


def pessimistic_discretization(pld: PrivacyLossDistribution, step: float) -> DiscretizedPLD:
    """A lattice distribution whose δ is at least the distribution's at every ε, also after composition."""
    first, last = _span(pld, step)
    edges = step * np.arange(first, last + 1, dtype=np.float64)
    p, p_error, q, q_error = _differences(pld, edges)
    start = edges[:-1]
    growth = np.exp(np.minimum(start, 700.0))
    scale = -math.expm1(-step)
    up = (p - q * growth) / scale
    slack = (p_error + q_error * growth + 4 * UNIT_ROUNDOFF * p) / scale
    up = np.clip(up + slack, 0.0, p)
    masses = np.zeros(edges.size)
    masses[:-1] += p - up
    masses[1:] += up + p_error
    masses[0] += float(pld.lower(edges[:1])[0][0])
    beyond = float(pld.upper(edges[-1:])[0][0])
    return DiscretizedPLD(step=step, first=first, masses=masses, infinite=min(1.0, pld.infinite + beyond * (1 + 1e-12)))


@dataclass(frozen=True)
class _Pieces:
    """P- and Q-masses of pieces of the loss's range."""

    p: FloatArray
    q: FloatArray

    def without(self, taken: FloatArray) -> "_Pieces":
        """What is left when a share of each is taken away."""
        return _Pieces(self.p * (1 - taken), self.q * (1 - taken))


def optimistic_discretization(pld: PrivacyLossDistribution, step: float) -> DiscretizedPLD:
    """A lattice distribution whose δ is at most the distribution's at every ε, also after composition."""
    first, last = _span(pld, step)
    halves = step / 2 * np.arange(2 * first - 1, 2 * last + 2, dtype=np.float64)
    p, q = _lessened(pld, halves)
    shift = _heaviest(p, q, step * np.arange(first, last + 1, dtype=np.float64))
    edges = halves - shift
    if shift != 0:
        p, q = _lessened(pld, edges)
    beyond = float(pld.upper(edges[-1:])[0][0]) * (1 - 1e-12)
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
    return DiscretizedPLD(step=step, first=first - 1, masses=masses, infinite=pld.infinite, shift=shift)


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


def _lessened(pld: PrivacyLossDistribution, edges: FloatArray) -> tuple[FloatArray, FloatArray]:
    """P-masses between edges, and Q-masses, each with its error on the unfavorable side."""
    p, p_error, q, q_error = _differences(pld, edges)
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
    # Where the Q-mass is no double, the position says what it can be.
    return np.where(pieces.q > 0, np.maximum(raised - pieces.p, 0.0), pieces.p * math.expm1(step)) + slack


def _balance(lack: FloatArray, spare: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Shares of the pieces below and above each point that make one outcome of its loss or more, the largest."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        below = np.where(lack > 0, np.minimum(1.0, spare / lack * (1 - 8 * UNIT_ROUNDOFF)), 0.0)
        above = np.where(spare > 0, np.minimum(1.0, lack / spare * (1 + 8 * UNIT_ROUNDOFF)), 1.0)
    return np.where(below * lack <= above * spare, below, 0.0), above


def _merged(
    p: FloatArray, q: FloatArray, step: float, first: int, beyond: float, infinite: float, uncertain: float = 0.0
) -> DiscretizedPLD:
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
    return DiscretizedPLD(
        step=step, first=first - 1, masses=masses, infinite=infinite, shift=shift, uncertain=uncertain
    )


# ── distributions that are already many atoms ────────────────────────────────────────────────────────────────────────


def spread(loss: FloatArray, p: FloatArray, step: float, infinite: float, uncertain: float) -> DiscretizedPLD:
    """Atoms with ascending losses to their two neighbors on the lattice, both masses kept: δ grows or stays."""
    position = loss / step
    index = np.floor(position).astype(np.int64)
    inside = np.expm1(-np.clip(position - index, 0.0, 1.0) * step) / math.expm1(-step)
    # Rounding of the position moves the split by a few units; all of it goes up.
    up = np.minimum(p * (inside + 8 * UNIT_ROUNDOFF * (1 + np.abs(position))), p)
    first = int(index[0])
    size = int(index[-1]) - first + 2
    masses: FloatArray = np.zeros(size)
    masses += np.bincount(index - first, weights=p - up, minlength=size)
    masses += np.bincount(index - first + 1, weights=up, minlength=size)
    return DiscretizedPLD(step=step, first=first, masses=masses, infinite=infinite, uncertain=uncertain)


def gathered(loss: FloatArray, p: FloatArray, q: FloatArray, step: float, uncertain: float) -> DiscretizedPLD:
    """Atoms with ascending losses, those around each lattice point as one outcome: δ falls or stays."""
    index = np.rint(loss / step).astype(np.int64)
    first = int(index[0])
    size = int(index[-1]) - first + 1
    p_bin: FloatArray = np.zeros(size)
    q_bin: FloatArray = np.zeros(size)
    # Sums of many atoms: their rounding goes to the unfavorable side.
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


# ----------------------------------------------------------------------------------------------------------------------
# Composition of lattice losses by one exponentially tilted Fourier transform, with its error.
#
# An untilted FFT of a loss distribution has an error floor of about 1e-16 of its peak, which swamps δ below 1e-13 and
# grows with the number of steps. Here every step's mass is first tilted, p_i e^{λ l_i − K(λ)}, with λ at the saddle of
# the δ asked for: the composed distribution then peaks where it is needed, and the error is relative to δ.
#
# Errors, all added to the bounds (`N` points, T steps):
#
#     transforms  ‖error‖₂ ≤ c log₂N · u · ‖p̃‖₂ per FFT; |(z+e)^T − z^T| ≤ T(1+e)^{T−1} e; Cauchy–Schwarz with the
#                 weights of δ (Higham 2002, section 24.1; c = 8 is generous for a mixed-radix transform);
#     wrap-round  tilted mass outside the window, by Chernoff bounds on both sides;
#     powers      T · |log z| roundoffs.
# ----------------------------------------------------------------------------------------------------------------------


_FFT_CONSTANT = 8.0
LARGEST_WINDOW = 1 << 21
_ROUGH_POINTS = 1 << 12
_WRAP = 1e-11  # tilted mass outside the window, relative to δ's own sum, but not below 1e-17


@dataclass(frozen=True, kw_only=True)
class _Cumulants:
    log_mgf: float
    mean: float
    variance: float


def _cumulants(pld: DiscretizedPLD, lam: float) -> _Cumulants:
    exponent = pld.log_masses + lam * pld.losses
    peak = float(exponent.max())
    weights = np.exp(exponent - peak)
    total = float(weights.sum())
    mean = float(weights @ pld.losses) / total
    variance = float(weights @ (pld.losses - mean) ** 2) / total
    return _Cumulants(log_mgf=peak + math.log(total), mean=mean, variance=variance)


def _thinned(pld: DiscretizedPLD) -> DiscretizedPLD:
    """About a thousand points that stand for all, each mass on its neighbor: it only steers."""
    factor = pld.masses.size // _ROUGH_POINTS
    if factor < 2:
        return pld
    size = -(-pld.masses.size // factor)
    masses = np.zeros(size)
    masses += np.bincount(np.arange(pld.masses.size) // factor, weights=pld.masses, minlength=size)
    return DiscretizedPLD(step=pld.step * factor, first=0, masses=masses, infinite=0.0, shift=-pld.losses[factor // 2])


def _sum(steps: Sequence[Repeated[DiscretizedPLD]], lam: float) -> _Cumulants:
    parts = [(step.count, _cumulants(step.loss, lam)) for step in steps]
    return _Cumulants(
        log_mgf=math.fsum(count * part.log_mgf for count, part in parts),
        mean=math.fsum(count * part.mean for count, part in parts),
        variance=math.fsum(count * part.variance for count, part in parts),
    )


class ComposedPLD:
    """δ(ε) of composed lattice distributions, as [lower, upper] bounds on the lattice's own exact value.

    Args:
        steps: distributions on one common lattice step.
        log_delta: the log of the δ around which the tilt is put.
    """

    def __init__(self, steps: Sequence[Repeated[DiscretizedPLD]], log_delta: float) -> None:
        self._infinite = -math.expm1(
            math.fsum(step.count * math.log1p(-min(step.loss.infinite, 1 - 1e-16)) for step in steps)
        )
        self._uncertain = math.fsum(step.count * step.loss.uncertain for step in steps) * (1 + 1e-12)
        self._step = steps[0].loss.step
        rough = [Repeated(_thinned(step.loss), step.count) for step in steps]
        self._lam = self._saddle(rough, log_delta)
        self._at = _sum(steps, self._lam)
        epsilon = self._at.mean - 1 / self._lam - 1 / (self._lam + 1)
        share = log_delta - self._at.log_mgf + self._lam * epsilon
        self._wrap = max(1e-17, _WRAP * math.exp(max(-50.0, min(0.0, share))))
        low, size = self._window(steps, rough)
        self._compose(steps, low, size)

    @staticmethod
    def _saddle(steps: Sequence[Repeated[DiscretizedPLD]], log_delta: float) -> float:
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

    def _window(
        self, steps: Sequence[Repeated[DiscretizedPLD]], rough: Sequence[Repeated[DiscretizedPLD]]
    ) -> tuple[int, int]:
        """First index and length of a window of all but `wrap` of the tilted mass; `rough` steers its bounds."""
        ends = [
            (step.count * step.loss.first, step.count * (step.loss.first + step.loss.masses.size - 1)) for step in steps
        ]
        lowest, highest = sum(low for low, _ in ends), sum(high for _, high in ends)
        total_shift = math.fsum(step.count * step.loss.shift for step in steps)
        spread = math.sqrt(self._at.variance + self._step**2)
        goal = -math.log(self._wrap / 2)
        # Chernoff's bounds, with the deviations that are best for the rough distributions.
        thetas = [float(factor) / spread for factor in np.geomspace(0.05, 40.0, 16)]
        middle = _sum(rough, self._lam).log_mgf

        def farthest(side: int) -> float:
            def bound(plds: Sequence[Repeated[DiscretizedPLD]], at: float, theta: float) -> float:
                return (_sum(plds, self._lam + side * theta).log_mgf - at + goal) / theta

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

    def _compose(self, steps: Sequence[Repeated[DiscretizedPLD]], low: int, size: int) -> None:
        from scipy import fft

        length = int(fft.next_fast_len(size, real=True) or size)
        spectrum = np.ones(length // 2 + 1, dtype=np.complex128)
        deviation, power_error = 0.0, 0.0
        offset = 0
        for step in steps:
            pld = step.loss
            exponent = self._lam * pld.losses - _cumulants(pld, self._lam).log_mgf
            tilted = np.exp(pld.log_masses + exponent)
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
                    + float(tilted @ np.abs(np.maximum(pld.log_masses, -750.0)))
                )
            )
            deviation += step.count * (_FFT_CONSTANT * math.log2(length) * UNIT_ROUNDOFF + drift) * norm
            logs: ComplexArray = np.log(np.where(transformed == 0, 1e-300, transformed))
            modulus = np.exp(np.clip(step.count * logs.real, -740.0, 0.0))
            noise = 4 * UNIT_ROUNDOFF * step.count * (np.abs(logs) + 1) * modulus
            power_error += float(np.linalg.norm(noise)) * math.sqrt(2 / length)
            spectrum = spectrum * (modulus * np.exp(1j * step.count * logs.imag))
            offset += step.count * pld.first
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
        start, stop = (int(index) for index in np.searchsorted(self._losses, (epsilon, epsilon + 50 / self._lam)))
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


# ----------------------------------------------------------------------------------------------------------------------
# One of t steps, chosen uniformly for each record (balls in bins): its loss, enclosed from both sides.
#
# With Gaussian noise and m = 1/z the dominating pair is (Feldman and Shenfeld 2025; Chua et al. 2025)
#
#     P = (1/t) Σ_i N(m·e_i, I),   Q = N(0, I),   dP/dQ = V = (W_1 + … + W_t)/t,   W_i = e^{m x_i − m²/2} iid under Q,
#
# and the other way round for adding. Every δ(ε), of compositions too, is the mean under Q of a convex function of V: (V
# − e^ε)₊ when removing, (1 − e^ε V)₊ when adding. Convex order passes through sums of independent terms, so the
# lognormal W alone is rounded to a lattice of step h, and the sum is one power of one Fourier transform:
#
#     up     each bin's mass goes to its two ends, its mean kept: a spread, every mean of a convex function grows;
#     down   each bin is put at or below its conditional mean: for increasing convex functions the mean falls.
#            (Adding needs decreasing ones; there the trivial distribution of no loss is used.)
#
# P's masses at s are s/t times Q's, which is the transform of W once size-biased. Errors: bin masses, moved to the
# unfavorable side; W beyond the lattice, which counts as lost; wrap-round, by Chernoff; rounding of the transforms, in
# the machine's long double, pointwise: |ẑ − z| ≤ c log₂N · u · Σ|x| (Higham 2002, section 24.1), times T|z|^{T−1}.
# Where long double is no wider than double the interval is wider, not wrong.
# ----------------------------------------------------------------------------------------------------------------------


_ALLOCATION_TAIL_ERROR = 64 * 2.0**-53
_LARGEST_POINTS = 1 << 20
_BALANCED = 300
_LEAST_SHIFT, _LARGEST_SHIFT, _LARGEST_STEPS = 1e-3, 6.0, 10**7
_SPREAD = 1e-5  # relative growth of the variance that the upper rounding may bring


@dataclass(frozen=True, kw_only=True)
class RandomAllocationPLD:
    """The loss of one use in one of `steps` steps, with shift m = 1 / noise multiplier, in one direction."""

    steps: int
    shift: float
    removing: bool
    infinite: float = 0.0

    @property
    def atoms(self) -> tuple[float, ...]:
        """None."""
        return ()


@dataclass(frozen=True, kw_only=True)
class _SumPLD:
    """Masses of W_1 + … + W_t at `start` + k·`spacing` under Q and P, and what may be wrong with any sum over them."""

    start: float
    spacing: float
    q: FloatArray
    p: FloatArray
    q_error: float
    p_error: float


def _bins(edges: FloatArray, shift: float) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """Q-mass and mean (P-mass) of W in each bin, with bounds on their errors."""
    from scipy.special import ndtr

    with np.errstate(divide="ignore"):
        y = (np.log(edges) + shift * shift / 2) / shift
    results: list[FloatArray] = []
    for centered in (y, y - shift):
        below, above = ndtr(centered), ndtr(-centered)
        use_above = above[:-1] <= below[1:]
        mass = np.where(use_above, above[:-1] - above[1:], below[1:] - below[:-1])
        far = np.where(np.isfinite(centered), np.abs(centered), 0.0)
        size = _ALLOCATION_TAIL_ERROR * (1 + np.maximum(far[:-1], far[1:]) ** 2 / 4)
        results += [np.maximum(mass, 0.0), size * np.where(use_above, above[:-1], below[1:])]
    return results[0], results[1], results[2], results[3]


def _allocation_raised(low: float, count: int, spacing: float, shift: float) -> FloatArray:
    """Masses at low + k·h that dominate W's in convex order between the ends; errors are added.

    W below the lowest point moves up to it, which is upward for increasing functions; for decreasing ones it is lost.
    """
    points = low + spacing * np.arange(count, dtype=np.float64)
    mass, mass_error, mean, mean_error = _bins(points, shift)
    right = np.clip((mean - points[:-1] * mass) / spacing, 0.0, mass)
    error = np.minimum((mean_error + points[:-1] * mass_error) / spacing, mass) + mass_error
    masses = np.zeros(count)
    masses[:-1] += mass - right + error
    masses[1:] += right + error
    below, below_error, _, _ = _bins(np.array([0.0, low]), shift)
    masses[0] += float(below[0] + below_error[0])
    return masses


def _allocation_lowered(low: float, count: int, spacing: float, shift: float) -> tuple[float, FloatArray]:
    """An offset and masses at offset + k·h such that each bin's mass lies at or below its conditional mean."""
    offset, first = low, low + spacing / 2
    for _ in range(4):
        mass, _, mean, _ = _bins(np.array([0.0, first]), shift)
        offset = float(min(mean[0] / mass[0], first)) if mass[0] > 1e-290 else low
        first = offset + spacing / 2
    points = offset + spacing * np.arange(count, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        slope = -(1 + (np.log(points) + shift * shift / 2) / (shift * shift)) / points
    # A bin's conditional mean is h²/12·(log density)' off its middle: the bin is moved until it is not below its point.
    # The last term is the rounding of tails, which would otherwise put bins below their points.
    move = (0.02 * np.abs(slope) - slope) * spacing**2 / 12 + points * (1e-9 + 2e-13 * points * shift / spacing)
    move = np.clip(np.nan_to_num(move, nan=0.0), -spacing / 2.5, spacing / 2.5)
    edges = np.concatenate([[0.0], points[1:] - spacing / 2 + move[1:], [points[-1] + spacing / 2]])
    edges[1] = first
    _allocation_balance(edges, points, shift)
    mass, mass_error, mean, mean_error = _bins(edges, shift)
    least = np.maximum(mean - mean_error, 0.0) / np.maximum(mass + mass_error, 1e-300)
    kept = np.maximum(mass - mass_error, 0.0)
    masses = np.where(least >= points, kept, 0.0)
    late = np.where((least < points) & (least >= points - spacing), kept, 0.0)
    masses[:-1] += late[1:]
    return offset, masses


def _allocation_balance(edges: FloatArray, points: FloatArray, shift: float) -> None:
    """Near zero, where the density changes within a bin: each upper edge such that the mean is just above the point.

    Only a proposal: what the bins hold is computed from the edges afterwards.
    """

    def below(edge: float, center: float) -> float:
        return math.erfc(-((math.log(edge) + shift * shift / 2) / shift - center) / math.sqrt(2)) / 2

    for j in range(1, min(_BALANCED, points.size - 1)):
        start, point = float(edges[j]), float(points[j]) * (1 + 1e-9)
        mass, mean = below(start, 0.0), below(start, shift)
        edge = max(point, 2 * point - start)
        for _ in range(6):
            y = (math.log(edge) + shift * shift / 2) / shift
            density = math.exp(-y * y / 2) / (math.sqrt(2 * math.pi) * shift * edge)
            excess = below(edge, shift) - mean - point * (below(edge, 0.0) - mass)
            slope = (edge - point) * density
            if slope <= 1e-290:
                break
            edge = min(max(edge - excess / slope, point * (1 + 1e-12)), float(points[j + 1]))
        # Never left of the smooth rule: an edge too far left makes the next one too far right, and so on.
        edges[j + 1] = min(max(edge, float(edges[j + 1])), float(points[j + 1]))


def _chernoff(log_masses: FloatArray, points: FloatArray, steps: int, goal: float, scale: float) -> float:
    """A sum beyond which (below which, for a negative scale) both masses of the sum are under e^{goal}."""
    ends: list[float] = []
    for factor in np.geomspace(0.02, 30.0, 18):
        theta = float(factor) / scale
        exponent = log_masses + theta * points
        peak = float(exponent.max())
        weights = np.exp(exponent - peak)
        total = math.log(float(weights.sum())) + peak
        biased = math.log(float(weights @ points)) + peak
        ends.append(((steps - 1) * total + max(total, biased) - goal) / theta)
    return min(ends) if scale > 0 else max(ends)


def _summed(steps: int, offset: float, spacing: float, masses: FloatArray, goal: float) -> _SumPLD:
    """The distribution of the sum of `steps` terms on the lattice."""
    from scipy import fft

    points = offset + spacing * np.arange(masses.size, dtype=np.float64)
    with np.errstate(divide="ignore"):
        logs = np.log(masses)
    deviation = math.sqrt(steps * max(float(masses @ points**2) - 1.0, spacing**2))
    top = _chernoff(logs, points, steps, goal, deviation + float(points[-1]) / 40)
    bottom = _chernoff(logs, points, steps, goal, -deviation)
    most = steps * (masses.size - 1) + 1
    first = max(0, math.floor((bottom - steps * offset) / spacing) - 1)
    size = min(most, math.ceil((top - steps * offset) / spacing) + 2) - first
    if size > 4 * _LARGEST_POINTS:
        raise AccountingError(f"an allocation's lattice must hold ≤ {4 * _LARGEST_POINTS} points, got {size}.")
    length = int(fft.next_fast_len(max(size, 2), real=True) or size)
    index = np.arange(masses.size) % length
    terms = [np.bincount(index, weights=term, minlength=length) for term in (masses, masses * points)]
    plain, biased = (np.asarray(fft.rfft(term.astype(np.longdouble))) for term in terms)
    unit = float(np.finfo(np.longdouble).eps)
    stage = _FFT_CONSTANT * math.log2(length) * unit
    noise = stage * max(1.0, float(masses.sum()), float(masses @ points))
    size_plain = np.abs(plain).astype(np.float64) + noise
    size_biased = np.abs(biased).astype(np.float64) + noise
    # Frequencies where the power has died out count as error instead of being computed.
    with np.errstate(divide="ignore"):
        log_size = (steps - 1) * np.log(size_plain)
    alive = log_size > -110
    power = np.zeros(plain.size, dtype=np.clongdouble)
    power[alive] = np.exp((steps - 1) * np.log(plain[alive]))
    rest = np.exp(np.minimum(log_size, 1.0))
    growth = noise * (steps - 1) / size_plain + 4 * unit * steps * (np.abs(log_size) / steps + 4)
    q = np.asarray(fft.irfft(power * plain, length)).astype(np.float64)
    p = np.asarray(fft.irfft(power * biased, length)).astype(np.float64)
    pointwise = [
        2 * float(np.sum(rest * (growth * own + noise + np.where(alive, stage, 1.0) * own))) / length
        for own in (size_plain, size_biased)
    ]
    wrapped = 2 * math.exp(goal)
    q, p = (np.roll(pld, -(first % length)) for pld in (q, p))
    # What lies below the noise is noise; it is dropped and counted.
    for pld, error in zip((q, p), pointwise, strict=True):
        pld[pld < 4 * error + 2.0**-53 * np.abs(pld)] = 0.0
    return _SumPLD(
        start=steps * offset + first * spacing,
        spacing=spacing,
        q=q,
        p=p,
        q_error=5 * length * pointwise[0] + 2 * wrapped,
        p_error=5 * length * pointwise[1] + 2 * wrapped,
    )


@lru_cache(maxsize=16)
def _plds(steps: int, shift: float, log_tail: float) -> tuple[_SumPLD, _SumPLD, float, float]:
    """The PLDs from below and above, and the P- and Q-mass of some W beyond the lattice (for Q, below it too)."""
    from scipy.special import ndtr, ndtri_exp

    if not _LEAST_SHIFT <= shift <= _LARGEST_SHIFT or steps > _LARGEST_STEPS:
        raise AccountingError(
            f"an allocation must have ≤ {_LARGEST_STEPS:g} steps and a noise multiplier in [{1 / _LARGEST_SHIFT:g}, "
            f"{1 / _LEAST_SHIFT:g}], got {steps} and {1 / shift:.4g}. Use the rdp accountant."
        )
    beyond = -float(ndtri_exp(log_tail - math.log(4)))
    under = -float(ndtri_exp(log_tail - math.log(4 * steps)))
    top = math.exp(shift * (shift + beyond) - shift * shift / 2)
    low = math.exp(-shift * under - shift * shift / 2)
    lost = float(ndtr(-beyond) + (steps - 1) * ndtr(-beyond - shift)) * (1 + 1e-9)
    lost_q = steps * float(ndtr(-under) + ndtr(-beyond - shift)) * (1 + 1e-9)
    scale = math.sqrt(-math.expm1(-shift * shift)) * math.exp(-shift * shift / 2)
    variance = math.expm1(shift * shift)
    width = top - low + min(steps * (1 - low), 8 * math.sqrt(steps * min(variance, top * top)))
    spacing = max(min(scale / 32, math.sqrt(6 * _SPREAD * variance)), 1.5 * width / _LARGEST_POINTS)
    count = math.ceil((top - low) / spacing) + 2
    offset, down = _allocation_lowered(low, count, spacing, shift)
    up = _allocation_raised(low, count, spacing, shift)
    lower = _summed(steps, offset, spacing, down, log_tail - 2)
    upper = _summed(steps, low, spacing, up, log_tail - 2)
    return lower, upper, lost, lost_q


def _atoms(pld: _SumPLD, steps: int, removing: bool) -> tuple[NDArray[np.float64], FloatArray, FloatArray, float]:
    """Losses, P- and Q-masses of this direction, and the mass at an infinite loss."""
    sums = pld.start + pld.spacing * np.arange(pld.q.size, dtype=np.float64)
    masses = pld.p if removing else pld.q
    kept = (masses > 0) & (sums > 0)
    with np.errstate(divide="ignore"):
        loss = np.log(sums[kept] / steps)
    at_zero = float(masses[sums <= 0].sum())
    if removing:
        return loss, masses[kept], masses[kept] * np.exp(-loss), 0.0
    return -loss[::-1], masses[kept][::-1], (masses[kept] * np.exp(loss))[::-1], at_zero


def allocation_support(pld: RandomAllocationPLD, log_tail: float) -> tuple[float, float]:
    """The range of losses on the lattice."""
    _, upper, _, _ = _plds(pld.steps, pld.shift, log_tail)
    loss, _, _, _ = _atoms(upper, pld.steps, pld.removing)
    if loss.size == 0:
        raise AccountingError("an allocation's loss must be resolved, got noise too small. Use the rdp accountant.")
    return float(loss[0]), float(loss[-1])


def allocation_lattices(
    pld: RandomAllocationPLD, step: float, log_tail: float
) -> tuple[DiscretizedPLD, DiscretizedPLD]:
    """Lattice distributions whose δ is at most and at least the distribution's, apart from their `uncertain`."""
    lower, upper, lost, lost_q = _plds(pld.steps, pld.shift, log_tail)
    lost = lost if pld.removing else lost_q
    loss, p, _, infinite = _atoms(upper, pld.steps, pld.removing)
    above = spread(loss, p, step, infinite + lost, upper.p_error if pld.removing else upper.q_error)
    loss, p, q, _ = _atoms(lower, pld.steps, pld.removing)
    if not pld.removing or loss.size == 0:
        return DiscretizedPLD(step=step, first=0, masses=np.ones(1), infinite=0.0), above
    return gathered(loss, p, q, step, lower.p_error), above
