"""Every number of a report that follows from the transcript's event: ε and its interval, curves, risk, user level."""

import math
from itertools import pairwise

from scipy.special import ndtr, ndtri

from sordino import accounting
from sordino.definitions import NeighboringRelation, PrivacyUnit
from sordino.errors import AccountingError, UnsupportedEvent
from sordino.events import Composed, Event, FixedSizeSampled, PoissonSampled, RandomAllocation, SelfComposed, compose
from sordino.report.limits import advantage_bound, attack_bound, question
from sordino.report.parts import Accounting, Curves, Interval, Point, Risk, UserLevel
from sordino.runs import Line

__all__ = ["FALSE_POSITIVE_RATES", "accounted", "curves", "risk", "user_level"]

FALSE_POSITIVE_RATES = (0.001, 0.01, 0.1)
_PRIORS = (0.001, 0.01, 0.1)
_GROUPS = (2, 5, 10)
_MOST_POINTS = 240
_FEWEST_POINTS = 24
_PROFILE_POINTS = 48
# False positive rates of the drawn trade-off curve: evenly spaced, and evenly spaced in their logarithm.
_RATES = tuple(sorted({*(k / 40 for k in range(1, 40)), *(10 ** (-4 + k / 10) for k in range(31)), 0.001, 0.01, 0.1}))
# Accountants whose curve answers in a millisecond; for the others no Gaussian curve is fitted.
_QUICK = ("exact", "closed_form", "contour")


def accounted(
    event: Event, delta: float, *, relation: NeighboringRelation, claimed: float | None, version: str
) -> Accounting:
    """ε of the event with the interval that contains the true one, and ε without amplification."""
    answer = accounting.epsilon(event, delta, relation=relation)
    bare = accounting.without_amplification(event)
    try:
        plain = answer.upper if bare == event else accounting.epsilon(bare, delta, relation=relation).upper
    except (AccountingError, UnsupportedEvent):
        plain = None
    return Accounting(
        accountant=answer.accountant,
        version=version,
        interval=Interval(lower=min(answer.lower, answer.upper), upper=answer.upper),
        claimed_epsilon=claimed,
        without_amplification=plain,
        sampled=bare != event or _is_sampled(event),
    )


def _is_sampled(event: Event) -> bool:
    match event:
        case PoissonSampled() | FixedSizeSampled() | RandomAllocation():
            return True
        case SelfComposed():
            return _is_sampled(event.event)
        case Composed():
            return any(map(_is_sampled, event.events))
        case _:
            return False


def user_level(
    event: Event, delta: float, *, relation: NeighboringRelation, unit: PrivacyUnit
) -> tuple[UserLevel, ...]:
    """ε for users who own several examples each; empty when the unit is no example, or no rule is known."""
    if unit is not PrivacyUnit.EXAMPLE:
        return ()
    found = []
    for size in _GROUPS:
        try:
            group = accounting.for_group(event, size)
            found.append(UserLevel(size=size, epsilon=accounting.epsilon(group, delta, relation=relation).upper))
        except (AccountingError, UnsupportedEvent):
            continue
    return tuple(found)


def curves(
    lines: list[Line], event: Event, delta: float, *, relation: NeighboringRelation, answer: Accounting
) -> Curves:
    """ε over the steps, δ(ε), and the trade-off curve."""
    spent = _spent(lines, delta=delta, relation=relation)
    if math.isinf(answer.interval.upper):
        return Curves(spent=spent, profile=(), trade_off=(), gaussian_mu=None, gaussian_regret=None)
    fit = None
    try:
        if answer.accountant in _QUICK:
            # How loose the fit is, is read off the curve below; one rate is the least that the search takes.
            fit = accounting.best_gaussian(event, relation=relation, rates=(0.1,))
        found = accounting.trade_off(event, list(_RATES), relation=relation)
        points = [k * 2 * max(answer.interval.upper, 0.1) / _PROFILE_POINTS for k in range(_PROFILE_POINTS + 1)]
        deltas = accounting.privacy_profile(event, points, relation=relation)
    except (AccountingError, UnsupportedEvent):
        # Only ε at one δ is known; what that says of an attacker is drawn from it.
        found, points, deltas = [], [], []
    epsilon = answer.interval.upper
    # Both are lower bounds on the false negative rate; the larger one holds.
    least = [1 - attack_bound(epsilon=epsilon, delta=delta, false_positive_rate=rate) for rate in _RATES]
    least = [max(pair) for pair in zip(least, found or least, strict=True)]
    return Curves(
        spent=spent,
        profile=tuple(zip(points, deltas, strict=True)),
        trade_off=tuple(zip(_RATES, least, strict=True)),
        gaussian_mu=fit.mu if fit else None,
        gaussian_regret=_regret(fit.mu, least) if fit else None,
    )


def risk(
    drawn: Curves, epsilon: float, delta: float, *, relation: NeighboringRelation, unit: PrivacyUnit
) -> Risk | None:
    """What an attacker can at most do, read off the curves; None when nothing is promised."""
    if math.isinf(epsilon) or delta >= 1 or not drawn.trade_off:
        return None
    missed = dict(drawn.trade_off)
    best = advantage_bound(epsilon=epsilon, delta=delta)
    if drawn.profile:
        best = min(best, drawn.profile[0][1])
    return Risk(
        question=question(relation, unit),
        found=tuple((rate, 1 - missed[rate]) for rate in FALSE_POSITIVE_RATES),
        advantage=best,
        right_guesses=min(1.0, (1 + best) / 2),
        # Hayes, Mahloujifar and Balle 2023, theorem 2: the prior in the place of the false positive rate.
        reconstruction=tuple((prior, 1 - missed[prior]) for prior in _PRIORS),
        from_mechanism=bool(drawn.profile),
    )


def _regret(mu: float, least: list[float]) -> float:
    """How much μ-GDP overstates the true positive rate at most: Φ(μ + Φ⁻¹(FPR)) less the run's own bound."""
    if math.isinf(mu):
        return 0.0
    gaps = [ndtr(mu + ndtri(rate)) - (1 - beta) for rate, beta in zip(_RATES, least, strict=True)]
    return max(0.0, *map(float, gaps))


def _spent(lines: list[Line], *, delta: float, relation: NeighboringRelation) -> tuple[Point, ...]:
    """ε over the steps charged: what the transcript says where it says it, otherwise computed at a few steps."""
    told = [Point(steps=place, epsilon=line.epsilon) for place, line in enumerate(lines, 1) if line.epsilon is not None]
    # Where many steps share one upper bound it is tight at the last of them: only that one is drawn.
    written = [point for point, later in pairwise(told) if point.epsilon != later.epsilon] + told[-1:]
    if len(told) < min(_FEWEST_POINTS, len(lines)):
        wanted = sorted({math.ceil(len(lines) * k / _FEWEST_POINTS) for k in range(1, _FEWEST_POINTS + 1)})
        events = [line.event for line in lines]
        written = [
            Point(steps=count, epsilon=accounting.epsilon(compose(events[:count]), delta, relation=relation).upper)
            for count in wanted
        ]
    if len(written) > _MOST_POINTS:
        last = len(written) - 1
        written = [written[round(last * k / (_MOST_POINTS - 1))] for k in range(_MOST_POINTS)]
    return (Point(steps=0, epsilon=0.0), *written)
