"""One of t steps, chosen uniformly for each record (balls in bins): its loss, enclosed from both sides (floor 1).

With Gaussian noise and m = 1/z the dominating pair is (Feldman and Shenfeld 2025; Chua et al. 2025)

    P = (1/t) Σ_i N(m·e_i, I),   Q = N(0, I),   dP/dQ = V = (W_1 + … + W_t)/t,   W_i = e^{m x_i − m²/2} iid under Q,

and the other way round for adding. Every δ(ε), of compositions too, is the mean under Q of a convex function of V:
(V − e^ε)₊ when removing, (1 − e^ε V)₊ when adding. Convex order passes through sums of independent terms, so the
lognormal W alone is rounded to a lattice of step h, and the sum is one power of one Fourier transform:

    up     each bin's mass goes to its two ends, its mean kept: a spread, every mean of a convex function grows;
    down   each bin is put at or below its conditional mean: for increasing convex functions the mean falls.
           (Adding needs decreasing ones; there the trivial law of no loss is used.)

P's masses at s are s/t times Q's, which is the transform of W once size-biased. Errors: bin masses, moved to the
unfavourable side; W beyond the lattice, which counts as lost; wrap-round, by Chernoff; rounding of the transforms, in
the machine's long double, pointwise: |ẑ − z| ≤ c log₂N · u · Σ|x| (Higham 2002, section 24.1), times T|z|^{T−1}.
Where long double is no wider than double the interval is wider, not wrong.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from sordino.accounting.lattice import LatticeLaw, gathered, spread
from sordino.accounting.mixtures import FloatArray
from sordino.errors import AccountingError

__all__ = ["AllocationLaw", "allocation_lattices", "allocation_support"]

_TAIL_ERROR = 64 * 2.0**-53
_FFT_CONSTANT = 8.0
_LARGEST_POINTS = 1 << 20
_BALANCED = 300
_LEAST_SHIFT, _LARGEST_SHIFT, _LARGEST_STEPS = 1e-3, 6.0, 10**7
_SPREAD = 1e-5  # relative growth of the variance that the upper rounding may bring


@dataclass(frozen=True, kw_only=True)
class AllocationLaw:
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
class _SumLaw:
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
    for centred in (y, y - shift):
        below, above = ndtr(centred), ndtr(-centred)
        use_above = above[:-1] <= below[1:]
        mass = np.where(use_above, above[:-1] - above[1:], below[1:] - below[:-1])
        far = np.where(np.isfinite(centred), np.abs(centred), 0.0)
        size = _TAIL_ERROR * (1 + np.maximum(far[:-1], far[1:]) ** 2 / 4)
        results += [np.maximum(mass, 0.0), size * np.where(use_above, above[:-1], below[1:])]
    return results[0], results[1], results[2], results[3]


def _raised(low: float, count: int, spacing: float, shift: float) -> FloatArray:
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


def _lowered(low: float, count: int, spacing: float, shift: float) -> tuple[float, FloatArray]:
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
    _balance(edges, points, shift)
    mass, mass_error, mean, mean_error = _bins(edges, shift)
    least = np.maximum(mean - mean_error, 0.0) / np.maximum(mass + mass_error, 1e-300)
    kept = np.maximum(mass - mass_error, 0.0)
    masses = np.where(least >= points, kept, 0.0)
    late = np.where((least < points) & (least >= points - spacing), kept, 0.0)
    masses[:-1] += late[1:]
    return offset, masses


def _balance(edges: FloatArray, points: FloatArray, shift: float) -> None:
    """Near zero, where the density changes within a bin: each upper edge such that the mean is just above the point.

    Only a proposal: what the bins hold is computed from the edges afterwards.
    """

    def below(edge: float, centre: float) -> float:
        return math.erfc(-((math.log(edge) + shift * shift / 2) / shift - centre) / math.sqrt(2)) / 2

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


def _summed(steps: int, offset: float, spacing: float, masses: FloatArray, goal: float) -> _SumLaw:
    """The law of the sum of `steps` terms on the lattice."""
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
    place = np.arange(masses.size) % length
    terms = [np.bincount(place, weights=term, minlength=length) for term in (masses, masses * points)]
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
    q, p = (np.roll(law, -(first % length)) for law in (q, p))
    # What lies below the noise is noise; it is dropped and counted.
    for law, error in zip((q, p), pointwise, strict=True):
        law[law < 4 * error + 2.0**-53 * np.abs(law)] = 0.0
    return _SumLaw(
        start=steps * offset + first * spacing,
        spacing=spacing,
        q=q,
        p=p,
        q_error=5 * length * pointwise[0] + 2 * wrapped,
        p_error=5 * length * pointwise[1] + 2 * wrapped,
    )


@lru_cache(maxsize=16)
def _laws(steps: int, shift: float, log_tail: float) -> tuple[_SumLaw, _SumLaw, float, float]:
    """The laws from below and above, and the P- and Q-mass of some W beyond the lattice (for Q, below it too)."""
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
    offset, down = _lowered(low, count, spacing, shift)
    up = _raised(low, count, spacing, shift)
    lower = _summed(steps, offset, spacing, down, log_tail - 2)
    upper = _summed(steps, low, spacing, up, log_tail - 2)
    return lower, upper, lost, lost_q


def _atoms(law: _SumLaw, steps: int, removing: bool) -> tuple[NDArray[np.float64], FloatArray, FloatArray, float]:
    """Losses, P- and Q-masses of this direction, and the mass at an infinite loss."""
    sums = law.start + law.spacing * np.arange(law.q.size, dtype=np.float64)
    masses = law.p if removing else law.q
    kept = (masses > 0) & (sums > 0)
    with np.errstate(divide="ignore"):
        loss = np.log(sums[kept] / steps)
    at_zero = float(masses[sums <= 0].sum())
    if removing:
        return loss, masses[kept], masses[kept] * np.exp(-loss), 0.0
    return -loss[::-1], masses[kept][::-1], (masses[kept] * np.exp(loss))[::-1], at_zero


def allocation_support(law: AllocationLaw, log_tail: float) -> tuple[float, float]:
    """The range of losses on the lattice."""
    _, upper, _, _ = _laws(law.steps, law.shift, log_tail)
    loss, _, _, _ = _atoms(upper, law.steps, law.removing)
    if loss.size == 0:
        raise AccountingError("an allocation's loss must be resolved, got noise too small. Use the rdp accountant.")
    return float(loss[0]), float(loss[-1])


def allocation_lattices(law: AllocationLaw, step: float, log_tail: float) -> tuple[LatticeLaw, LatticeLaw]:
    """Lattice laws whose δ is at most and at least the law's, apart from their `uncertain`."""
    lower, upper, lost, lost_q = _laws(law.steps, law.shift, log_tail)
    lost = lost if law.removing else lost_q
    loss, p, _, infinite = _atoms(upper, law.steps, law.removing)
    above = spread(loss, p, step, infinite + lost, upper.p_error if law.removing else upper.q_error)
    loss, p, q, _ = _atoms(lower, law.steps, law.removing)
    if not law.removing or loss.size == 0:
        return LatticeLaw(step=step, first=0, masses=np.ones(1), infinite=0.0), above
    return gathered(loss, p, q, step, lower.p_error), above
