"""The certified PLD accountant (floor 1): lattice losses from above and from below, composed by a tilted FFT.

It answers for every event whose loss has a law here: with atoms (Laplace, randomised response, discrete noise,
(ε, δ)), with few steps, or mixed. The lattice's step is refined until the interval is narrow or the work runs out.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sordino.accounting.allocation import AllocationLaw, allocation_lattices, allocation_support
from sordino.accounting.composition import flatten
from sordino.accounting.interval import Interval
from sordino.accounting.inversion import invert
from sordino.accounting.lattice import LatticeLaw, lower_lattice, upper_lattice
from sordino.accounting.law_directions import LawStep, law_directions
from sordino.accounting.laws import Law, MixtureLaw
from sordino.accounting.tilted import ComposedLattice, LatticeStep
from sordino.definitions import NeighboringRelation
from sordino.errors import AccountingError, UnsupportedEvent
from sordino.events import Event

__all__ = ["Pld", "PldCurve", "pld_delta", "pld_epsilon"]

_POINTS = (1 << 12, 1 << 15, 1 << 18)
_NARROW = 5e-4
_LARGEST_LAWS = 64
_LEFT_OUT = 1e3
_BEYOND = 1e6


def _log_tail(laws: Sequence[LawStep], log_delta: float) -> float:
    """How much of an allocation may be left out in each use: little against δ."""
    uses = sum(law.count for law in laws if isinstance(law.law, AllocationLaw))
    return max(log_delta, -600.0) - math.log(_LEFT_OUT * max(1, uses))


def _narrowed(laws: Sequence[LawStep], log_delta: float) -> list[LawStep]:
    """Mixtures cut where their tails are little against δ: with rare large losses the lattice is finer by far."""
    uses = math.fsum(law.count for law in laws)
    reach = min(14.0, math.sqrt(2 * (math.log(_BEYOND * max(1.0, uses)) - max(log_delta, -600.0))))
    return [
        replace(step, law=replace(step.law, reach=reach)) if isinstance(step.law, MixtureLaw) else step for step in laws
    ]


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
    atoms = sorted({abs(atom) for law in laws for atom in law.law.atoms if atom != 0})
    if atoms:
        step = atoms[0] / max(1, round(atoms[0] / step))
    return step


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


def pld_epsilon(laws: Sequence[LawStep], delta: float) -> tuple[float, float]:
    """Certified bounds on ε at δ of one direction."""
    _refuse_many(laws)
    laws = _narrowed(laws, math.log(delta))
    best = 0.0, math.inf
    tail = _log_tail(laws, math.log(delta))
    slack = _slack(laws, tail)
    infinite = -math.expm1(math.fsum(law.count * math.log1p(-law.law.infinite) for law in laws))
    if infinite > delta:
        return math.inf, math.inf
    refusal: AccountingError | None = None
    for points in _POINTS:
        try:
            lower, upper = _composed(laws, _steps(laws, points, tail), math.log(delta))
        except AccountingError as error:
            refusal = error
            break
        low = invert(lambda e, curve=lower: curve.bounds(e), delta, tolerance=1e-13)[0]
        high = invert(lambda e, curve=upper: curve.bounds(e), delta, tolerance=1e-13)[1]
        best = max(best[0], low - slack), min(best[1], high + slack)
        if best[1] - best[0] <= _NARROW * best[1]:
            break
    if math.isinf(best[1]):
        raise refusal or AccountingError("δ must be reachable on the lattice. Use the rdp accountant.")
    return max(0.0, best[0]), best[1]


def pld_delta(laws: Sequence[LawStep], epsilon: float) -> tuple[float, float]:
    """Certified bounds on δ(ε) of one direction."""
    _refuse_many(laws)
    best = 0.0, 1.0
    refusal: AccountingError | None = None
    log_delta = math.log(1e-6)
    for points in _POINTS:
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
        if best[1] - best[0] <= _NARROW * best[1]:
            break
        log_delta = math.log(max(best[1], 1e-300))
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
        bounds = [pld_epsilon(laws, delta) for laws in law_directions(flatten(event, relation), relation)]
        return Interval(lower=max(b[0] for b in bounds), upper=max(b[1] for b in bounds), accountant=self.name)

    def delta(self, event: Event, epsilon: float, relation: NeighboringRelation) -> Interval:
        """Certified interval for δ at ε."""
        bounds = [pld_delta(laws, epsilon) for laws in law_directions(flatten(event, relation), relation)]
        return Interval(lower=max(b[0] for b in bounds), upper=max(b[1] for b in bounds), accountant=self.name)
