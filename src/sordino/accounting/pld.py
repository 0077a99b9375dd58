"""The certified PLD accountant: lattice losses from above and from below, composed by a tilted FFT.

It answers for every event whose loss has a distribution here: with atoms (Laplace, randomized response, discrete noise,
(ε, δ)), with few steps, or mixed. The lattice's step is refined until the interval is narrow or the work runs out.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from sordino.accounting.base import Accountant, EventCounts, Repeated, worst_direction
from sordino.accounting.closed_form import invert_privacy_profile
from sordino.accounting.discrete_gaussian import DiscreteGaussianPLD
from sordino.accounting.dominating_pairs import DominatingPair, composed_pairs
from sordino.accounting.gaussian_mixtures import FloatArray
from sordino.accounting.mgf import UNIT_ROUNDOFF
from sordino.accounting.pld_discretized import (
    LARGEST_WINDOW,
    ComposedPLD,
    DiscretizedPLD,
    RandomAllocationPLD,
    allocation_lattices,
    allocation_support,
    optimistic_discretization,
    pessimistic_discretization,
)
from sordino.accounting.pld_mechanisms import (
    AveragedPLD,
    DiscretePLD,
    GaussianMixturePLD,
    LaplacePLD,
    PointwiseMaxPLD,
    PoissonSampledPLD,
)
from sordino.definitions import NeighboringRelation
from sordino.errors import AccountingError

# ----------------------------------------------------------------------------------------------------------------------
# Compositions of losses with few values, exactly: binomial sums instead of a lattice.
#
# k uses of a PLD with two losses a < b are k + 1 losses ia + (k − i)b with binomial masses (Kairouz, Oh and Viswanath
# 2015, theorem 3.3, for pure mechanisms); k uses of one with equally spaced losses are a power of a polynomial. All
# terms are positive, so that sums keep their relative accuracy at every δ.
# ----------------------------------------------------------------------------------------------------------------------


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
        return invert_privacy_profile(self.bounds, delta)


def few_atoms(plds: Sequence[tuple[object, int]]) -> FewAtoms | None:
    """The composition of (distribution, count), when it is one of few losses; None otherwise."""
    parts: list[tuple[FloatArray, FloatArray]] = []
    size, error, scale = 1, 0.0, 0.0
    kept = 0.0
    for pld, count in plds:
        atoms = _atoms(pld)
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


def _atoms(pld: object) -> tuple[FloatArray, FloatArray, float] | None:
    """Losses ascending, their masses under P, and the mass at ∞."""
    if isinstance(pld, DiscretePLD):
        return np.array(pld.losses), np.array(pld.masses), pld.infinite
    if isinstance(pld, PoissonSampledPLD) and isinstance(pld.base, DiscretePLD) and pld.base.infinite == 0:
        losses, p = np.array(pld.base.losses), np.array(pld.base.masses)
        carried = np.array([pld.forward(float(loss)) for loss in losses])
        if not np.all(np.isfinite(carried)):
            return None
        mixed = (1 - pld.sample_rate) * p * np.exp(-losses) + pld.sample_rate * p if pld.removing else p
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
    gaps = np.arange(power.size) * ((losses[-1] - losses[0]) / (losses.size - 1))
    return count * losses[0] + gaps, power, own * losses.size


# ----------------------------------------------------------------------------------------------------------------------
# The distributions of a composition's steps, in each direction of the neighboring relation.
# ----------------------------------------------------------------------------------------------------------------------


RepeatedPLD: TypeAlias = Repeated[DominatingPair]


def pld_directions(
    steps: EventCounts, neighboring_relation: NeighboringRelation
) -> tuple[tuple[RepeatedPLD, ...], ...]:
    """The distributions of all steps, once for each direction; symmetric steps are in both.

    Raises:
        UnsupportedEvent: a step has no distribution under this relation, or more losses than can be listed.
    """
    found = composed_pairs(steps, neighboring_relation)
    for side in found:
        for pld, _ in side:
            base = pld.base if isinstance(pld, PoissonSampledPLD) else pld
            if isinstance(base, DiscreteGaussianPLD):
                base.require_listable()
    return found


# ----------------------------------------------------------------------------------------------------------------------
# The certified PLD accountant: lattice losses from above and from below, composed by a tilted FFT.
# ----------------------------------------------------------------------------------------------------------------------


_POINTS = (1 << 12, 1 << 18)  # the first lattice and the largest
_RESOLUTION = 1e-9  # of ε on one lattice, relative
_LARGEST_EPSILON = 1e15
_NARROW = 1e-4
_EXACT = 1e-9
_MAX_DISTINCT_STEPS = 64
_LEFT_OUT = 1e3
_BEYOND = 3e4


def _log_tail(plds: Sequence[RepeatedPLD], log_delta: float) -> float:
    """How much of an allocation may be left out in each use: little against δ."""
    uses = sum(pld.count for pld in plds if isinstance(pld.loss, RandomAllocationPLD))
    return max(log_delta, -600.0) - math.log(_LEFT_OUT * max(1, uses))


def _narrowed(plds: Sequence[RepeatedPLD], log_delta: float) -> list[RepeatedPLD]:
    """Mixtures cut where their tails are little against δ: with rare large losses the lattice is finer by far."""
    uses = math.fsum(pld.count for pld in plds)
    log_mass = max(log_delta, -600.0) - math.log(_BEYOND * max(1.0, uses))
    return [Repeated(_cut(pld, log_mass), count) for pld, count in plds]


def _cut(pld: DominatingPair, log_mass: float) -> DominatingPair:
    """The distribution with a reach beyond which P has no more than this mass; what lies beyond is still counted."""
    if isinstance(pld, PointwiseMaxPLD):
        parts = [_cut(part, log_mass) for part in (pld.positive, pld.negative)]
        return replace(pld, positive=parts[0], negative=parts[1])
    if isinstance(pld, AveragedPLD | GaussianMixturePLD):
        return pld.cut(log_mass)
    if isinstance(pld, PoissonSampledPLD):
        return replace(pld, base=_cut(pld.base, log_mass))
    if isinstance(pld, DiscreteGaussianPLD):
        # P(|X| > tσ) < 2 e^{−t²/2} by the Gaussian's moments; more than that many deviations leave the doubles.
        return replace(pld, reach=min(37.0, math.sqrt(2 * (1 - log_mass))))
    return pld


def _support(pld: DominatingPair, log_tail: float) -> tuple[float, float]:
    return allocation_support(pld, log_tail) if isinstance(pld, RandomAllocationPLD) else pld.support


def _lattices(pld: DominatingPair, step: float, log_tail: float) -> tuple[DiscretizedPLD, DiscretizedPLD]:
    if isinstance(pld, RandomAllocationPLD):
        return allocation_lattices(pld, step, log_tail)
    return optimistic_discretization(pld, step), pessimistic_discretization(pld, step)


def _steps(plds: Sequence[RepeatedPLD], points: int, log_tail: float) -> float:
    """A lattice step that puts the widest PLD on about `points` points, with atoms on the lattice where possible."""
    supports = [_support(pld.loss, log_tail) for pld in plds]
    widest = max(high - low for low, high in supports)
    step = max(widest, 1e-12) / points
    # An atom far below a step would ask for as many points as it goes into the widest distribution.
    atoms = [abs(atom) for pld in plds for atom in pld.loss.atoms if abs(atom) >= step]
    return min(atoms) / round(min(atoms) / step) if atoms else step


def _composed(plds: Sequence[RepeatedPLD], step: float, log_delta: float) -> tuple[ComposedPLD, ComposedPLD]:
    pairs = [(_lattices(pld.loss, step, _log_tail(plds, log_delta)), pld.count) for pld in plds]
    lower, upper = ([Repeated(pair[end], count) for pair, count in pairs] for end in (0, 1))
    return ComposedPLD(lower, log_delta), ComposedPLD(upper, log_delta)


def _check_not_too_many(plds: Sequence[RepeatedPLD]) -> None:
    if len(plds) > _MAX_DISTINCT_STEPS:
        raise AccountingError(
            f"the pld accountant must be given ≤ {_MAX_DISTINCT_STEPS} distinct steps, got {len(plds)}. "
            "Use the contour or rdp accountant."
        )


def _slack(plds: Sequence[RepeatedPLD], log_tail: float) -> float:
    """Rounding of losses themselves: positions of edges and atoms, T times."""
    return math.fsum(pld.count * 1e-15 * max(abs(end) for end in _support(pld.loss, log_tail)) for pld in plds)


def pld_epsilon(plds: Sequence[RepeatedPLD], delta: float, *, floor: float = 0.0) -> tuple[float, float]:
    """Certified bounds on ε at δ of one direction; no finer than it takes to see that ε is at most `floor`."""
    exact = few_atoms(plds)
    if exact is not None:
        return exact.epsilon(delta)
    _check_not_too_many(plds)
    best = _from_largest(plds, delta)
    plds = _narrowed(plds, math.log(delta))
    tail = _log_tail(plds, math.log(delta))
    slack = _slack(plds, tail)
    infinite = -math.expm1(math.fsum(pld.count * math.log1p(-pld.loss.infinite) for pld in plds))
    if infinite > delta:
        return math.inf, math.inf
    refusal: AccountingError | None = None
    points, most = _POINTS
    done = 256
    # A lattice is finer than the largest losses, unless these leave no room at all.
    while math.isinf(best[1]) or best[1] - best[0] > _EXACT * best[1]:
        try:
            lower, upper = _composed(plds, _steps(plds, points, tail), math.log(delta))
            high = _upper_end(upper, delta, best)
            low = _lower_end(lower, delta, high)
        except AccountingError as error:
            refusal, points = error, points // 2
            most = points
            if points > done:
                continue
            break
        done = points
        best = max(best[0], low - slack), min(best[1], high + slack)
        # A composition takes as many more points as its steps do: a lattice that would be refused is not begun.
        while most > 2 * done and max(lower.points, upper.points) * most > LARGEST_WINDOW * done:
            most //= 2
        if best[1] - best[0] <= _NARROW * best[1] or best[1] <= floor or points >= most:
            break
        points = min(most, _finer(points, (best[1] - best[0]) / best[1]))
    if math.isinf(best[1]):
        raise refusal or AccountingError("δ must be reachable on the lattice. Use the rdp accountant.")
    return max(0.0, best[0]), best[1]


def _from_largest(plds: Sequence[RepeatedPLD], delta: float) -> tuple[float, float]:
    """Bounds on ε from the largest losses alone, where they are finite and carry mass: the lattice starts from them."""
    top, log_mass, found = 0.0, 0.0, []
    for pld, count in plds:
        if (
            isinstance(pld, RandomAllocationPLD | GaussianMixturePLD | PointwiseMaxPLD | AveragedPLD)
            or pld.infinite > 0
        ):
            return 0.0, math.inf
        if not pld.atoms or not math.isfinite(pld.support[1]) or isinstance(pld, DiscreteGaussianPLD):
            return 0.0, math.inf
        if isinstance(pld, PoissonSampledPLD) and not isinstance(pld.base, DiscretePLD | LaplacePLD):
            return 0.0, math.inf
        largest = pld.support[1]
        just_below = largest - 1e-12 * abs(largest)
        mass = float(pld.upper(np.array([just_below]))[0][0])
        top += count * largest
        log_mass += count * (math.log(mass) - 1e-14) if mass > 0 else -math.inf
        found.append(count * just_below)
    share = delta / math.exp(log_mass) if log_mass > -700 else 1.0
    low = math.fsum(found) + math.log1p(-share) if share < 1 else 0.0
    return max(0.0, low * (1 - 1e-14)), top * (1 + 1e-14)


def _finer(points: int, width: float) -> int:
    """As many points as a width that falls with their square asks for: 4 to 32 times more."""
    factor = 2 ** math.ceil(math.log2(1.3 * math.sqrt(width / _NARROW)))
    return min(_POINTS[1], points * min(32, max(4, factor)))


def _excess(curve: ComposedPLD, end: int, delta: float) -> Callable[[float], float]:
    """Log of δ's bound over `delta`: positive where the bound is above."""
    return lambda epsilon: math.log(max(curve.bounds(epsilon)[end], 1e-320) / delta)


def _upper_end(curve: ComposedPLD, delta: float, within: tuple[float, float]) -> float:
    """An ε at which δ's upper bound is at most `delta`, the smallest to `_RESOLUTION`."""
    excess = _excess(curve, 1, delta)
    if excess(0.0) <= 0:
        return 0.0
    low, high = (within[0] * 0.99, within[1] * 1.01) if math.isfinite(within[1]) else (0.0, 1.0)
    while excess(high) > 0:
        low, high = high, 2 * high
        if high > _LARGEST_EPSILON:
            raise AccountingError(f"delta must be reachable by some ε ≤ {_LARGEST_EPSILON:g}, got {delta!r}.")
    return _pinned(excess, low if low > 0 and excess(low) > 0 else 0.0, high)[1]


def _lower_end(curve: ComposedPLD, delta: float, top: float) -> float:
    """An ε below `top` at which δ's lower bound exceeds `delta`, or 0; found from above, where the bounds are tight."""
    excess = _excess(curve, 0, delta)
    low, stride = top, 1e-5 * top
    while low > 0 and excess(low) <= 0:
        low, stride = max(0.0, low - stride), 4 * stride
    return _pinned(excess, low, min(top, low + stride / 4))[0] if low > 0 else 0.0


def _pinned(excess: Callable[[float], float], low: float, high: float) -> tuple[float, float]:
    """A bracket of the crossing, narrowed from both sides: the excess is nearly a line."""
    at_low, at_high = excess(low), excess(high)
    for _ in range(40):
        width = high - low
        if width <= _RESOLUTION * high or not at_low > at_high:
            break
        middle = low + width * min(0.998, max(0.002, at_low / (at_low - at_high)))
        for point in (middle - 2e-3 * width, middle + 2e-3 * width, low + width / 2):
            if low < point < high and (high - low > width / 2):
                value = excess(point)
                if value > 0:
                    low, at_low = point, value
                else:
                    high, at_high = point, value
    return low, high


def pld_delta(plds: Sequence[RepeatedPLD], epsilon: float) -> tuple[float, float]:
    """Certified bounds on δ(ε) of one direction."""
    exact = few_atoms(plds)
    if exact is not None:
        return exact.bounds(epsilon)
    _check_not_too_many(plds)
    best = 0.0, 1.0
    refusal: AccountingError | None = None
    log_delta = math.log(1e-6)
    points = _POINTS[0]
    for _ in range(4):
        try:
            plds = _narrowed(plds, log_delta)
            tail = _log_tail(plds, log_delta)
            lower, upper = _composed(plds, _steps(plds, points, tail), log_delta)
        except AccountingError as error:
            refusal = error
            break
        slack = _slack(plds, tail)
        low, high = lower.bounds(epsilon + slack)[0], upper.bounds(max(0.0, epsilon - slack))[1]
        best = max(best[0], low), min(best[1], high)
        if best[1] - best[0] <= _NARROW * best[1] or points >= _POINTS[1]:
            break
        log_delta = math.log(max(best[1], 1e-300))
        points = _finer(points, (best[1] - best[0]) / best[1])
    if best == (0.0, 1.0) and refusal is not None:
        raise refusal
    return best


class PldCurve:
    """Upper bounds on δ(ε) of one direction at many ε: a few tilts, composed once.

    Each tilt's bound holds at every ε and is tight near its own δ; the smallest is taken.
    """

    def __init__(self, plds: Sequence[RepeatedPLD], points: int = 1 << 13) -> None:
        _check_not_too_many(plds)
        tail = _log_tail(plds, math.log(1e-7))
        step = _steps(plds, points, tail)
        upper = [Repeated(_lattices(pld, step, tail)[1], count) for pld, count in plds]
        self._tilts = [ComposedPLD(upper, log_delta) for log_delta in (-0.7, -5.0, -14.0, -40.0)]
        self._slack = _slack(plds, tail)

    def __call__(self, epsilon: float) -> float:
        """Upper bound on δ(ε), ε ≥ 0."""
        at = max(0.0, epsilon - self._slack)
        return min(tilt.bounds(at)[1] for tilt in self._tilts)


class PLDAccountant(Accountant[tuple[tuple[RepeatedPLD, ...], ...]]):
    """Privacy loss distributions on a lattice, rounded both ways, composed by a tilted FFT.

    Guarantee:
        The interval contains the exact ε (δ) of the dominating pair, worst direction.
    """

    name = "pld"

    def prepare(
        self, steps: EventCounts, neighboring_relation: NeighboringRelation
    ) -> tuple[tuple[RepeatedPLD, ...], ...]:
        """Every event whose steps have a distribution under the relation."""
        return pld_directions(steps, neighboring_relation)

    def epsilon_bounds(self, prepared: tuple[tuple[RepeatedPLD, ...], ...], delta: float) -> tuple[float, float]:
        """Certified interval for ε at δ."""
        bounds: list[tuple[float, float]] = []
        for plds in prepared:
            bounds.append(pld_epsilon(plds, delta, floor=max((low for low, _ in bounds), default=0.0)))
        return worst_direction(bounds)

    def delta_bounds(self, prepared: tuple[tuple[RepeatedPLD, ...], ...], epsilon: float) -> tuple[float, float]:
        """Certified interval for δ at ε."""
        return worst_direction([pld_delta(plds, epsilon) for plds in prepared])
