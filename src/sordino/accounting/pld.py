"""The certified PLD accountant (floor 1): lattice losses from above and from below, composed by a tilted FFT.

It answers for every event whose loss has a law here: with atoms (Laplace, randomised response, discrete noise,
(ε, δ)), with few steps, or mixed. The lattice's step is refined until the interval is narrow or the work runs out.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from sordino.accounting.allocation import AllocationLaw, allocation_lattices, allocation_support
from sordino.accounting.composition import flatten
from sordino.accounting.discrete_gaussian import DiscreteGaussianLaw
from sordino.accounting.few_atoms import few_atoms
from sordino.accounting.interval import Interval
from sordino.accounting.lattice import LatticeLaw, lower_lattice, upper_lattice
from sordino.accounting.law_directions import LawStep, law_directions
from sordino.accounting.laws import AtomicLaw, FusedLaw, LaplaceLaw, Law, MixtureLaw, SampledLaw
from sordino.accounting.projected import AveragedLaw
from sordino.accounting.tilted import LARGEST_WINDOW, ComposedLattice, LatticeStep
from sordino.definitions import NeighboringRelation
from sordino.errors import AccountingError, UnsupportedEvent
from sordino.events import Event

__all__ = ["Pld", "PldCurve", "pld_delta", "pld_epsilon"]

_POINTS = (1 << 12, 1 << 18)  # the first lattice and the largest
_RESOLUTION = 1e-9  # of ε on one lattice, relative
_LARGEST_EPSILON = 1e15
_NARROW = 1e-4
_EXACT = 1e-9
_LARGEST_LAWS = 64
_LEFT_OUT = 1e3
_BEYOND = 3e4


def _log_tail(laws: Sequence[LawStep], log_delta: float) -> float:
    """How much of an allocation may be left out in each use: little against δ."""
    uses = sum(law.count for law in laws if isinstance(law.law, AllocationLaw))
    return max(log_delta, -600.0) - math.log(_LEFT_OUT * max(1, uses))


def _narrowed(laws: Sequence[LawStep], log_delta: float) -> list[LawStep]:
    """Mixtures cut where their tails are little against δ: with rare large losses the lattice is finer by far."""
    uses = math.fsum(law.count for law in laws)
    log_mass = max(log_delta, -600.0) - math.log(_BEYOND * max(1.0, uses))
    return [replace(step, law=_cut(step.law, log_mass)) for step in laws]


def _cut(law: Law | AllocationLaw, log_mass: float) -> Law | AllocationLaw:
    """The law with a reach beyond which P has no more than this mass; what lies beyond is still counted."""
    if isinstance(law, FusedLaw):
        parts = [_cut(part, log_mass) for part in (law.positive, law.negative)]
        return replace(law, positive=parts[0], negative=parts[1])
    if isinstance(law, AveragedLaw | MixtureLaw):
        return law.cut(log_mass)
    if isinstance(law, SampledLaw):
        return replace(law, base=_cut(law.base, log_mass))
    if isinstance(law, DiscreteGaussianLaw):
        # P(|X| > tσ) < 2 e^{−t²/2} by the Gaussian's moments; more than that many deviations leave the doubles.
        return replace(law, reach=min(37.0, math.sqrt(2 * (1 - log_mass))))
    return law


def _support(law: Law | AllocationLaw, log_tail: float) -> tuple[float, float]:
    return allocation_support(law, log_tail) if isinstance(law, AllocationLaw) else law.support


def _lattices(law: Law | AllocationLaw, step: float, log_tail: float) -> tuple[LatticeLaw, LatticeLaw]:
    if isinstance(law, AllocationLaw):
        return allocation_lattices(law, step, log_tail)
    return lower_lattice(law, step), upper_lattice(law, step)


def _steps(laws: Sequence[LawStep], points: int, log_tail: float) -> float:
    """A lattice step that puts the widest law on about `points` points, with atoms on the lattice where possible."""
    supports = [_support(law.law, log_tail) for law in laws]
    widest = max(high - low for low, high in supports)
    step = max(widest, 1e-12) / points
    # An atom far below a step would ask for as many points as it goes into the widest law.
    atoms = [abs(atom) for law in laws for atom in law.law.atoms if abs(atom) >= step]
    return min(atoms) / round(min(atoms) / step) if atoms else step


def _composed(laws: Sequence[LawStep], step: float, log_delta: float) -> tuple[ComposedLattice, ComposedLattice]:
    pairs = [(_lattices(law.law, step, _log_tail(laws, log_delta)), law.count) for law in laws]
    lower = [LatticeStep(law=pair[0], count=count) for pair, count in pairs]
    upper = [LatticeStep(law=pair[1], count=count) for pair, count in pairs]
    return ComposedLattice(lower, log_delta), ComposedLattice(upper, log_delta)


def _refuse_many(laws: Sequence[LawStep]) -> None:
    if len(laws) > _LARGEST_LAWS:
        raise AccountingError(
            f"the pld accountant must be given ≤ {_LARGEST_LAWS} distinct steps, got {len(laws)}. "
            "Use the contour or rdp accountant."
        )


def _slack(laws: Sequence[LawStep], log_tail: float) -> float:
    """Rounding of losses themselves: positions of edges and atoms, T times."""
    return math.fsum(law.count * 1e-15 * max(abs(end) for end in _support(law.law, log_tail)) for law in laws)


def pld_epsilon(laws: Sequence[LawStep], delta: float, *, floor: float = 0.0) -> tuple[float, float]:
    """Certified bounds on ε at δ of one direction; no finer than it takes to see that ε is at most `floor`."""
    exact = few_atoms([(step.law, step.count) for step in laws])
    if exact is not None:
        return exact.epsilon(delta)
    _refuse_many(laws)
    best = _from_largest(laws, delta)
    laws = _narrowed(laws, math.log(delta))
    tail = _log_tail(laws, math.log(delta))
    slack = _slack(laws, tail)
    infinite = -math.expm1(math.fsum(law.count * math.log1p(-law.law.infinite) for law in laws))
    if infinite > delta:
        return math.inf, math.inf
    refusal: AccountingError | None = None
    points, most = _POINTS
    done = 256
    # A lattice is finer than the largest losses, unless these leave no room at all.
    while math.isinf(best[1]) or best[1] - best[0] > _EXACT * best[1]:
        try:
            lower, upper = _composed(laws, _steps(laws, points, tail), math.log(delta))
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


def _from_largest(laws: Sequence[LawStep], delta: float) -> tuple[float, float]:
    """Bounds on ε from the largest losses alone, where they are finite and carry mass: the lattice starts from them."""
    top, log_mass, found = 0.0, 0.0, []
    for step in laws:
        law = step.law
        if isinstance(law, AllocationLaw | MixtureLaw | FusedLaw | AveragedLaw) or law.infinite > 0:
            return 0.0, math.inf
        if not law.atoms or not math.isfinite(law.support[1]) or isinstance(law, DiscreteGaussianLaw):
            return 0.0, math.inf
        if isinstance(law, SampledLaw) and not isinstance(law.base, AtomicLaw | LaplaceLaw):
            return 0.0, math.inf
        largest = law.support[1]
        just_below = largest - 1e-12 * abs(largest)
        mass = float(law.upper(np.array([just_below]))[0][0])
        top += step.count * largest
        log_mass += step.count * (math.log(mass) - 1e-14) if mass > 0 else -math.inf
        found.append(step.count * just_below)
    share = delta / math.exp(log_mass) if log_mass > -700 else 1.0
    low = math.fsum(found) + math.log1p(-share) if share < 1 else 0.0
    return max(0.0, low * (1 - 1e-14)), top * (1 + 1e-14)


def _finer(points: int, width: float) -> int:
    """As many points as a width that falls with their square asks for: 4 to 32 times more."""
    factor = 2 ** math.ceil(math.log2(1.3 * math.sqrt(width / _NARROW)))
    return min(_POINTS[1], points * min(32, max(4, factor)))


def _excess(curve: ComposedLattice, end: int, delta: float) -> Callable[[float], float]:
    """Log of δ's bound over `delta`: positive where the bound is above."""
    return lambda epsilon: math.log(max(curve.bounds(epsilon)[end], 1e-320) / delta)


def _upper_end(curve: ComposedLattice, delta: float, within: tuple[float, float]) -> float:
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


def _lower_end(curve: ComposedLattice, delta: float, top: float) -> float:
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
        for place in (middle - 2e-3 * width, middle + 2e-3 * width, low + width / 2):
            if low < place < high and (high - low > width / 2):
                value = excess(place)
                if value > 0:
                    low, at_low = place, value
                else:
                    high, at_high = place, value
    return low, high


def pld_delta(laws: Sequence[LawStep], epsilon: float) -> tuple[float, float]:
    """Certified bounds on δ(ε) of one direction."""
    exact = few_atoms([(step.law, step.count) for step in laws])
    if exact is not None:
        return exact.bounds(epsilon)
    _refuse_many(laws)
    best = 0.0, 1.0
    refusal: AccountingError | None = None
    log_delta = math.log(1e-6)
    points = _POINTS[0]
    for _ in range(4):
        try:
            laws = _narrowed(laws, log_delta)
            tail = _log_tail(laws, log_delta)
            lower, upper = _composed(laws, _steps(laws, points, tail), log_delta)
        except AccountingError as error:
            refusal = error
            break
        slack = _slack(laws, tail)
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

    def __init__(self, laws: Sequence[LawStep], points: int = 1 << 13) -> None:
        _refuse_many(laws)
        tail = _log_tail(laws, math.log(1e-7))
        step = _steps(laws, points, tail)
        upper = [LatticeStep(law=_lattices(law.law, step, tail)[1], count=law.count) for law in laws]
        self._tilts = [ComposedLattice(upper, log_delta) for log_delta in (-0.7, -5.0, -14.0, -40.0)]
        self._slack = _slack(laws, tail)

    def __call__(self, epsilon: float) -> float:
        """Upper bound on δ(ε), ε ≥ 0."""
        at = max(0.0, epsilon - self._slack)
        return min(tilt.bounds(at)[1] for tilt in self._tilts)


@dataclass(frozen=True)
class Pld:
    """Privacy loss distributions on a lattice, rounded both ways, composed by a tilted FFT.

    Guarantee:
        The interval contains the exact ε (δ) of the dominating pair, worst direction.
    """

    name: str = "pld"
    automatic: bool = True

    def supports(self, event: Event, relation: NeighboringRelation) -> bool:
        """Every event whose steps have a law under the relation."""
        try:
            return bool(law_directions(flatten(event, relation), relation))
        except UnsupportedEvent:
            return False

    def epsilon(self, event: Event, delta: float, relation: NeighboringRelation) -> Interval:
        """Certified interval for ε at δ."""
        bounds: list[tuple[float, float]] = []
        for laws in law_directions(flatten(event, relation), relation):
            bounds.append(pld_epsilon(laws, delta, floor=max((low for low, _ in bounds), default=0.0)))
        return Interval(lower=max(b[0] for b in bounds), upper=max(b[1] for b in bounds), accountant=self.name)

    def delta(self, event: Event, epsilon: float, relation: NeighboringRelation) -> Interval:
        """Certified interval for δ at ε."""
        bounds = [pld_delta(laws, epsilon) for laws in law_directions(flatten(event, relation), relation)]
        return Interval(lower=max(b[0] for b in bounds), upper=max(b[1] for b in bounds), accountant=self.name)
