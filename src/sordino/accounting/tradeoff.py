"""What a guarantee means for an attacker: trade-off curve, advantage, true-positive rate, reconstruction.

All from δ(ε) of each direction, never from two separately rounded distributions. For P against Q and any ε,

    TPR = P(S) ≤ e^ε Q(S) + δ_{P‖Q}(ε) = e^ε FPR + δ(ε),

so that the largest TPR at a FPR is min over ε of e^ε·FPR + δ(ε), negative ε included, where
δ_{P‖Q}(−ε) = 1 − e^{−ε} + e^{−ε} δ_{Q‖P}(ε) (Dong, Roth and Su 2022, proposition 2.12; Kulynych et al. 2024).
Every ε gives a valid bound, so the search needs no certificate.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import numpy as np

from sordino import checks
from sordino.accounting.api import delta as delta_of
from sordino.accounting.base import EventCounts, Interval, Repeated, double_precision, flatten
from sordino.accounting.closed_form import add_direction_delta, bracket_crossing, gaussian_delta, remove_direction_delta
from sordino.accounting.contour import contour_delta
from sordino.accounting.event_mgfs import mgf_directions
from sordino.accounting.pld import PldCurve, pld_delta, pld_directions, pld_epsilon
from sordino.accounting.pld_mechanisms import DiscretePLD
from sordino.definitions import NeighboringRelation
from sordino.errors import AccountingError, UnsupportedEvent
from sordino.events import Event, Gaussian, PoissonSampled

_Curve = Callable[[float], float]
_ADD = NeighboringRelation.ADD_OR_REMOVE_ONE
_FEW_RATES = 8
_TABLE = 65


def _direction_curves(event: Event, neighboring_relation: NeighboringRelation) -> tuple[_Curve, ...]:
    """δ_upper(ε) for ε ≥ 0, one for each direction (one when symmetric)."""
    steps = flatten(event, neighboring_relation)
    if steps.non_private:
        return (lambda _: 1.0,)
    if steps.empty:
        return (lambda _: 0.0,)
    if (
        len(steps.counts) == 1
        and steps.counts[0][1] == 1
        and neighboring_relation is not NeighboringRelation.REPLACE_ONE
    ):
        base = steps.counts[0][0]
        if isinstance(base, Gaussian):
            return (lambda epsilon: gaussian_delta(epsilon, 1 / base.noise_multiplier)[1],)
        if isinstance(base, PoissonSampled) and isinstance(base.event, Gaussian):
            rate, mu = base.sample_rate, 1 / base.event.noise_multiplier
            return (
                lambda epsilon: remove_direction_delta(epsilon, rate, mu)[1],
                lambda epsilon: add_direction_delta(epsilon, rate, mu)[1],
            )
    return _composed_curves(event, neighboring_relation)


def _composed_curves(event: Event, neighboring_relation: NeighboringRelation) -> tuple[_Curve, ...]:
    steps = flatten(event, neighboring_relation)
    plds = cache(lambda: tuple(PldCurve(side) for side in pld_directions(steps, neighboring_relation)))
    try:
        sides = mgf_directions(steps, neighboring_relation)
    except UnsupportedEvent:
        return plds()
    if not all(any(step.loss.decays for step in side) for side in sides):
        return plds()

    refused = False

    def curve(side: int, epsilon: float) -> float:
        nonlocal refused
        if not refused:
            try:
                return contour_delta(sides[side], epsilon)[1]
            except AccountingError:  # the loss's transform decays too slowly: the other accountant's curve is as sound
                refused = True
        return plds()[min(side, len(plds()) - 1)](epsilon)

    return tuple(partial(curve, side) for side in range(len(sides)))


@double_precision("the privacy loss's tail")
def privacy_loss_tail(
    event: Event, thresholds: list[float], *, neighboring_relation: NeighboringRelation = _ADD
) -> list[Interval]:
    """P(Z > t) of the privacy loss Z = log(P/Q) of the dominating pair, worse direction, at each threshold t > 0.

    δ is convex in x = e^ε, and P(Z > t) = δ − x dδ/dx there: differences to both sides of it, of a δ that is known
    from both sides, enclose the slope.

    Args:
        event: what was done.
        thresholds: t > 0 each.
        neighboring_relation: the neighboring relation.

    Returns:
        An interval for each threshold; `lower` is 0 where only an upper bound of the loss is known.

    Example:
        >>> (tail,) = privacy_loss_tail(Gaussian(noise_multiplier=1.0), [1.0])
        >>> tail.lower <= 0.308537538726 <= tail.upper and tail.width < 1e-4
        True
    """
    neighboring_relation = NeighboringRelation(neighboring_relation)
    points = [checks.positive(thresholds=threshold) for threshold in checks.several(thresholds=thresholds)]
    steps = flatten(event, neighboring_relation)
    if steps.empty or steps.non_private:
        lost = 0.0 if steps.empty else 1.0
        lower = 0.0 if steps.upper_bound_only else lost
        return [Interval(lower=lower, upper=lost, accountant="exact") for _ in points]
    name, curves = _enclosing_curves(steps, neighboring_relation)
    answers = []
    for point in points:
        ends = [_tail_ends(curve, point) for curve in curves]
        lower = 0.0 if steps.upper_bound_only else max(low for low, _ in ends)
        answers.append(Interval(lower=lower, upper=max(high for _, high in ends), accountant=name))
    return answers


_DIFFERENCES = (0.1, 0.03, 0.01, 3e-3, 1e-3, 1e-4)


def _tail_ends(curve: Callable[[float], tuple[float, float]], point: float) -> tuple[float, float]:
    """Bounds on δ − x dδ/dx at x = e^t: secants of a convex function on both sides enclose its slopes."""
    low, high = curve(point)
    least, most = low, 1.0
    for part in _DIFFERENCES:
        # x·(1 ± part), at least halfway to 1 on the left.
        part = min(part, -math.expm1(-point) / 2)
        left, right = curve(point + math.log1p(-part))[1], curve(point + math.log1p(part))[1]
        least = max(least, low + (low - right) / part)
        most = min(most, high + (left - low) / part)
    return least, max(least, most)


def _enclosing_curves(
    steps: EventCounts, neighboring_relation: NeighboringRelation
) -> tuple[str, list[Callable[[float], tuple[float, float]]]]:
    """ε ↦ bounds on δ(ε), once for each direction, and the accountant's name."""
    try:
        sides = mgf_directions(steps, neighboring_relation)
        if all(any(step.loss.decays for step in side) for side in sides):
            for side in sides:
                contour_delta(side, 1.0)
            return "contour", [partial(contour_delta, side) for side in sides]
    except (AccountingError, UnsupportedEvent):
        pass
    return "pld", [partial(pld_delta, side) for side in pld_directions(steps, neighboring_relation)]


@double_precision("the privacy profile")
def privacy_profile(
    event: Event, epsilons: list[float], *, neighboring_relation: NeighboringRelation = _ADD
) -> list[float]:
    """δ(ε) at many ε ≥ 0: upper bounds, from curves that are set up once.

    Example:
        >>> [round(x, 4) for x in privacy_profile(Gaussian(noise_multiplier=1.0), [0.0, 1.0])]
        [0.3829, 0.1269]
    """
    points = [checks.non_negative(epsilon=epsilon) for epsilon in checks.several(epsilons=epsilons)]
    curves = _direction_curves(event, NeighboringRelation(neighboring_relation))
    return [min(1.0, max(curve(point) for curve in curves)) for point in points]


def _max_tpr(forward: _Curve, backward: _Curve, fpr: float) -> float:
    """Min over real ε of e^ε·FPR + δ(ε), by golden section: the function is convex in e^ε, so unimodal."""

    def value(epsilon: float) -> float:
        curve = forward(epsilon) if epsilon >= 0 else -math.expm1(epsilon) + math.exp(epsilon) * backward(-epsilon)
        return math.exp(min(epsilon, 700.0)) * fpr + curve

    low, high = -1.0, 1.0
    best = value(0.0)
    for _ in range(12):
        # Convex: a fall from one point to the next puts the minimum beyond the first of the two.
        if value(high) > best:
            break
        best, low, high = value(high), (high / 2 if high > 1 else 0.0), high * 2
    if high == 1.0:
        while value(low) < best and low > -64:
            best, high, low = value(low), (low / 2 if low < -1 else 0.0), low * 2
    ratio = (math.sqrt(5) - 1) / 2
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    at_left, at_right = value(left), value(right)
    for _ in range(48):
        best = min(best, at_left, at_right)
        if high - low < 1e-5 * (1 + abs(high)):  # the value is flat at its minimum: off by about 1e-10
            break
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - ratio * (high - low)
            at_left = value(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + ratio * (high - low)
            at_right = value(right)
    return min(1.0, max(fpr, best))


@double_precision("the true-positive rate")
def true_positive_rate(
    event: Event, false_positive_rate: float, *, neighboring_relation: NeighboringRelation = _ADD
) -> float:
    """Upper bound on any membership attack's true-positive rate at a false-positive rate, worst direction.

    Guarantee:
        No attack on a single record of a neighboring pair does better.

    Args:
        event: what was done.
        false_positive_rate: in (0, 1).
        neighboring_relation: the neighboring relation.

    Returns:
        A rate in [FPR, 1].

    Example:
        >>> round(true_positive_rate(Gaussian(noise_multiplier=1.0), 0.001), 10)
        0.0182984684
    """
    neighboring_relation = NeighboringRelation(neighboring_relation)
    fpr = checks.probability(false_positive_rate=false_positive_rate, zero=False, one=False)
    curves = _direction_curves(event, neighboring_relation)
    reverse = tuple(reversed(curves))
    return max(_max_tpr(forward, backward, fpr) for forward, backward in zip(curves, reverse, strict=True))


@double_precision("the trade-off curve")
def trade_off_curve(
    event: Event, false_positive_rates: list[float], *, neighboring_relation: NeighboringRelation = _ADD
) -> list[float]:
    """The trade-off curve f: smallest false-negative rate at each false-positive rate (lower bounds).

    Up to eight rates are each optimized over ε; more share the bounds TPR ≤ e^ε·FPR + δ(ε) of one set of 130 ε per
    direction, which is as sound, convex, and within about a percent of it.

    Example:
        >>> [round(x, 4) for x in trade_off_curve(Gaussian(noise_multiplier=2.0), [0.01, 0.1])]
        [0.9661, 0.7828]
    """
    rates = [
        checks.probability(false_positive_rate=rate)
        for rate in checks.several(false_positive_rates=false_positive_rates)
    ]
    if len(rates) <= _FEW_RATES:
        return [1 - true_positive_rate(event, rate, neighboring_relation=neighboring_relation) for rate in rates]
    curves = _direction_curves(event, NeighboringRelation(neighboring_relation))
    tables = [_table(curve) for curve in curves]
    lines = [_lines(*pair) for pair in zip(tables, reversed(tables), strict=True)]
    return [
        1 - max(min(1.0, max(rate, min(slope * rate + level for slope, level in side))) for side in lines)
        for rate in rates
    ]


def _table(curve: _Curve) -> list[tuple[float, float]]:
    """(ε, δ(ε)) from 0 to where δ is below 1e-9 or ε above 64: fine steps near zero, relative ones beyond."""
    reach = 1.0
    while reach < 64 and curve(reach) > 1e-9:
        reach *= 2
    low, count = reach / 400, _TABLE
    grid = [0.0, *(low * (reach / low) ** (k / (count - 2)) for k in range(count - 1))]
    return [(epsilon, curve(epsilon)) for epsilon in grid]


def _lines(forward: list[tuple[float, float]], backward: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """(slope, level) of the bounds TPR ≤ slope · FPR + level, negative ε from the other direction's curve."""
    above = [(math.exp(epsilon), delta) for epsilon, delta in forward]
    below = [(math.exp(-epsilon), -math.expm1(-epsilon) + math.exp(-epsilon) * delta) for epsilon, delta in backward]
    return above + below


@double_precision("the advantage")
def membership_advantage(event: Event, *, neighboring_relation: NeighboringRelation = _ADD) -> Interval:
    """The largest TPR − FPR of any membership attack: δ at ε = 0, the total variation distance.

    Example:
        >>> round(membership_advantage(Gaussian(noise_multiplier=1.0)).upper, 10)
        0.3829249225
    """
    return delta_of(event, 0.0, neighboring_relation=neighboring_relation)


@double_precision("the bound")
def reconstruction_bound(event: Event, prior: float, *, neighboring_relation: NeighboringRelation = _ADD) -> float:
    """Upper bound on the probability of reconstructing a record that is guessed blindly with probability `prior`.

    Hayes et al. 2023, theorem 2: success ≤ 1 − f(prior), a test against the prior as false-positive rate.

    Example:
        >>> round(reconstruction_bound(Gaussian(noise_multiplier=1.0), 0.01), 8)
        0.09236225
    """
    return true_positive_rate(
        event, checks.probability(prior=prior, zero=False, one=False), neighboring_relation=neighboring_relation
    )


# ── μ-GDP of best fit ───────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, kw_only=True)
class GaussianFit:
    """The smallest μ whose Gaussian curve lies above the event's at every ε ≥ 0 tried, and how loose it is.

    Args:
        mu: the fit; a summary, checked at the ε tried only.
        regret: largest TPR(μ-GDP) − TPR(event) over false-positive rates tried, ≥ 0: small means that μ says it all.
    """

    mu: float
    regret: float


@double_precision("the best Gaussian")
def fit_gaussian_trade_off(
    event: Event,
    *,
    neighboring_relation: NeighboringRelation = _ADD,
    epsilons: tuple[float, ...] = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0),
    rates: tuple[float, ...] = (1e-3, 1e-2, 0.1, 0.3),
) -> GaussianFit:
    """Fits μ to δ(ε) from above, with its regret (Gomez et al. 2025).

    Example:
        >>> fit = fit_gaussian_trade_off(Gaussian(noise_multiplier=2.0))
        >>> round(fit.mu, 6), fit.regret < 1e-6
        (0.5, True)
    """
    mu = 0.0
    for point in epsilons:
        try:
            target = delta_of(event, point, neighboring_relation=neighboring_relation).upper
        except AccountingError:
            continue
        if target >= 1:
            return GaussianFit(mu=math.inf, regret=0.0)
        if target > 1e-290 and gaussian_delta(point, max(mu, 1e-12))[1] < target:
            high = max(mu, 1e-6)
            while gaussian_delta(point, high)[0] < target:
                high *= 2
            mu = bracket_crossing(lambda m, e=point, t=target: gaussian_delta(e, m)[0] < t, mu, high, 1e-12)[1]
    if mu == 0:
        return GaussianFit(mu=0.0, regret=0.0)
    fitted = Gaussian(noise_multiplier=1 / mu)
    gaps = [
        true_positive_rate(fitted, r) - true_positive_rate(event, r, neighboring_relation=neighboring_relation)
        for r in rates
    ]
    return GaussianFit(mu=mu, regret=max(0.0, *gaps))


# ----------------------------------------------------------------------------------------------------------------------
# What shuffling is known to cost at least.
# ----------------------------------------------------------------------------------------------------------------------


def shuffle_lower_bound(noise_multiplier: float, *, steps_per_epoch: int, delta: float, epochs: int = 1) -> float:
    """A *lower* bound on ε of shuffled Gaussian batches: the event that some noisy sum of an epoch exceeds C.

    Under zero-out with the other records opposite, P has one coordinate at shift 2 and the rest at 0 against Q's
    one at shift 1 (Chua et al. 2024, "How private are DP-SGD implementations?", theorem 4.3). Never use it as a
    guarantee: it shows how far a Poisson accountant's number would understate.

    Returns:
        A lower bound on ε, 0 when the event shows nothing.
    """
    checks.positive(noise_multiplier=noise_multiplier)
    checks.integer(1, steps_per_epoch=steps_per_epoch)
    checks.integer(1, epochs=epochs)
    checks.probability(delta=delta, zero=False, one=False)
    if epochs > 1:
        return _composed_maxima(noise_multiplier, steps_per_epoch, delta, epochs)
    from scipy.special import log_ndtr

    thresholds = np.linspace(0.0, 2.0 + 45.0 * noise_multiplier, 20_001)
    rest = (steps_per_epoch - 1) * log_ndtr(thresholds / noise_multiplier)
    hit_p, hit_q = (-np.expm1(log_ndtr((thresholds - shift) / noise_multiplier) + rest) for shift in (2.0, 1.0))
    useful = (hit_p > delta) & (hit_q > 0)
    return max(0.0, float(np.max(np.log((hit_p[useful] - delta) / hit_q[useful]), initial=0.0)))


def _composed_maxima(noise_multiplier: float, steps: int, delta: float, epochs: int) -> float:
    """Several epochs: the largest noisy sum of each, in bins (post-processing), composed by the lower lattice."""
    from scipy.special import log_ndtr

    edges = np.append(np.linspace(0.0, 2.0 + 9.0 * noise_multiplier, 800), np.inf)
    rest = (steps - 1) * log_ndtr(edges / noise_multiplier)
    masses = []
    for shift in (2.0, 1.0):
        below = np.exp(log_ndtr((edges - shift) / noise_multiplier) + rest)
        masses.append(np.append(below[0], np.diff(below)))
    solid = (masses[0] > 1e-13) & (masses[1] > 1e-13)
    p, q = (np.where(solid, mass, 0.0)[solid] for mass in masses)
    losses = np.log(p / q)
    order = np.argsort(losses)
    pld = DiscretePLD(losses=tuple(losses[order].tolist()), masses=tuple(p[order].tolist()))
    return pld_epsilon([Repeated(pld, epochs)], delta)[0]
