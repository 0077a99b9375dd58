"""How well scores tell members from others: rates with exact intervals, AUC, advantage."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from sordino import accounting, checks
from sordino.definitions import Guarantee, NeighboringRelation
from sordino.errors import AccountingError, InvalidArgument, UnsupportedEvent
from sordino.events import Event

Floats = NDArray[np.float64]

# Below this many expected false positives a rate says more about single non-members than about the attack.
_LEAST_FALSE_POSITIVES = 5
_BAND_POINTS = 160


@dataclass(frozen=True, kw_only=True)
class RateInterval:
    """True-positive rate at one false-positive rate.

    Args:
        false_positive_rate: that was asked for; the threshold lets through at most this share of the non-members.
        value: share of members above the threshold.
        lower: end of the 95 % interval (Clopper–Pearson).
        upper: its other end.
        true_positives: members above the threshold.
        false_positives: non-members above it.
        members: number of members.
        non_members: number of non-members.
    """

    false_positive_rate: float
    value: float
    lower: float
    upper: float
    true_positives: int
    false_positives: int
    members: int
    non_members: int

    def surely_above(self, *, alpha: float) -> tuple[float, float]:
        """(FPR, TPR) such that the attack's own FPR is lower and its own TPR higher, with probability ≥ 1 − alpha.

        The threshold lies at a non-member's score, so its FPR is beta distributed and its bound is exact. A ceiling
        that lies below this point is refuted.
        """
        checks.probability(zero=False, one=False, alpha=alpha)
        return (
            _upper(self.false_positives, self.non_members, alpha / 2),
            _lower(self.true_positives, self.members, alpha / 2),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class RocCurve:
    """What an attack's scores are worth.

    Args:
        rates: true-positive rate at each false-positive rate that the number of non-members allows.
        auc: area under the curve, in [0, 1]; 0.5 is blind guessing.
        auc_interval: 95 % interval (DeLong).
        advantage: largest TPR − FPR of a threshold, in [0, 1]; chosen on the same scores, so a little too large.
        advantage_interval: simultaneous 95 % interval (Dvoretzky–Kiefer–Wolfowitz with Massart's constant).
        curve: (FPR, TPR, lower, upper) at thinned thresholds, with pointwise 95 % intervals of TPR.
        members: number of members.
        non_members: number of non-members.
    """

    rates: tuple[RateInterval, ...]
    auc: float
    auc_interval: tuple[float, float]
    advantage: float
    advantage_interval: tuple[float, float]
    curve: tuple[tuple[float, float, float, float], ...]
    members: int
    non_members: int

    def true_positive_rate(self, false_positive_rate: float) -> RateInterval:
        """The rate at one of the false-positive rates.

        Raises:
            InvalidArgument: it is not among `rates`, for instance because too few non-members were scored.
        """
        for rate in self.rates:
            if rate.false_positive_rate == false_positive_rate:
                return rate
        raise InvalidArgument(
            f"false_positive_rate must be one of {[rate.false_positive_rate for rate in self.rates]}, got "
            f"{false_positive_rate!r}. It takes {min_non_members(false_positive_rate):,} non-members to measure it."
        )


def min_non_members(false_positive_rate: float) -> int:
    """Non-members that it takes to quote a true-positive rate at this false-positive rate: 5 expected accusations.

    Example:
        >>> min_non_members(0.001), min_non_members(0.01)
        (5000, 500)
    """
    rate = checks.probability(zero=False, false_positive_rate=false_positive_rate)
    return math.ceil(_LEAST_FALSE_POSITIVES / rate - 1e-9)


def roc_curve(
    members: ArrayLike, non_members: ArrayLike, *, false_positive_rates: tuple[float, ...] = (0.1, 0.01, 0.001)
) -> RocCurve:
    """Measures scores; higher ones accuse. Thresholds are strict, so equal scores never count as an accusation.

    Guarantee: none: a statistic of the members. Keep it with the data, or measure on public records.

    Args:
        members: scores of records that were trained on, at least one, none NaN.
        non_members: scores of others, at least one, none NaN.
        false_positive_rates: in (0, 1); those with fewer than five expected false positives are left out.

    Example:
        >>> found = roc_curve([2.0, 3.0, 4.0, 1.0], [0.0, 0.5, 1.0, 2.5], false_positive_rates=())
        >>> found.auc, found.advantage
        (0.84375, 0.5)

    References:
        DeLong, DeLong and Clarke-Pearson 1988; Clopper and Pearson 1934; Massart 1990.
    """
    inside, outside = _scores(members=members), _scores(non_members=non_members)
    wanted = [checks.probability(zero=False, one=False, false_positive_rates=rate) for rate in false_positive_rates]
    ordered_in, ordered_out = np.sort(inside), np.sort(outside)
    thresholds = np.unique(np.concatenate([outside, inside]))
    gaps = _above(ordered_in, thresholds) / len(inside) - _above(ordered_out, thresholds) / len(outside)
    advantage = max(0.0, float(gaps.max(initial=0.0)))
    slack = math.sqrt(math.log(4 / 0.05) / 2) * (1 / math.sqrt(len(inside)) + 1 / math.sqrt(len(outside)))
    auc, error = _auc(inside, outside)
    return RocCurve(
        rates=tuple(
            _rate(ordered_in, ordered_out, rate) for rate in sorted(wanted) if len(outside) >= min_non_members(rate)
        ),
        auc=auc,
        auc_interval=(max(0.0, auc - 1.96 * error), min(1.0, auc + 1.96 * error)),
        advantage=advantage,
        advantage_interval=(max(0.0, advantage - slack), min(1.0, advantage + slack)),
        curve=_curve(ordered_in, ordered_out),
        members=len(inside),
        non_members=len(outside),
    )


def _scores(**argument: ArrayLike) -> Floats:
    ((name, given),) = argument.items()
    values = np.asarray(given, dtype=np.float64)
    if values.ndim != 1 or not len(values) or np.isnan(values).any():
        raise InvalidArgument(f"{name} must be scores, one number a record and at least one, got others. Flatten them.")
    return values


def _above(ordered: Floats, thresholds: Floats) -> Floats:
    return (len(ordered) - np.searchsorted(ordered, thresholds, side="right")).astype(np.float64)


def _rate(inside: Floats, outside: Floats, rate: float) -> RateInterval:
    """The threshold is the non-member's score above which at most rate · n others lie."""
    allowed = math.floor(rate * len(outside) + 1e-9)
    threshold = outside[-(allowed + 1)] if allowed < len(outside) else -math.inf
    hits = int((inside > threshold).sum())
    return RateInterval(
        false_positive_rate=rate,
        value=hits / len(inside),
        lower=_lower(hits, len(inside), 0.025),
        upper=_upper(hits, len(inside), 0.025),
        true_positives=hits,
        false_positives=int((outside > threshold).sum()),
        members=len(inside),
        non_members=len(outside),
    )


def _lower(hits: int, count: int, alpha: float) -> float:
    return 0.0 if hits == 0 else float(stats.beta.ppf(alpha, hits, count - hits + 1))


def _upper(hits: int, count: int, alpha: float) -> float:
    return 1.0 if hits == count else float(stats.beta.ppf(1 - alpha, hits + 1, count - hits))


def _auc(inside: Floats, outside: Floats) -> tuple[float, float]:
    """Mann–Whitney statistic, and its standard error from the placements of either group."""
    n, m = len(inside), len(outside)
    ranks = stats.rankdata(np.concatenate([inside, outside]))
    above = (ranks[:n] - stats.rankdata(inside)) / m
    below = 1 - (ranks[n:] - stats.rankdata(outside)) / n
    variance = (above.var(ddof=1) / n if n > 1 else 0.25) + (below.var(ddof=1) / m if m > 1 else 0.25)
    return float(above.mean()), math.sqrt(variance)


def _curve(inside: Floats, outside: Floats) -> tuple[tuple[float, float, float, float], ...]:
    """False positives 1, 2, … up to all, evenly on a logarithmic axis."""
    counts = np.unique(np.geomspace(1, len(outside), _BAND_POINTS).round().astype(int))
    points = []
    for count in counts.tolist():
        threshold = outside[-(count + 1)] if count < len(outside) else -math.inf
        hits = int((inside > threshold).sum())
        spread = _lower(hits, len(inside), 0.025), _upper(hits, len(inside), 0.025)
        points.append((float((outside > threshold).mean()), hits / len(inside), *spread))
    return tuple(points)


# ----------------------------------------------------------------------------------------------------------------------
# What no membership attack can exceed: the ceiling that a mechanism sets, or ε and δ alone.
# ----------------------------------------------------------------------------------------------------------------------


_FLAT = 600
_LOGARITHMIC = 60


@dataclass(frozen=True, kw_only=True)
class MembershipBound:
    """Upper bounds on every membership attack on the release, whatever it knows and however it was found.

    Per record TPR ≤ T(FPR) with a concave T, so the bounds hold as well for rates averaged over records.

    Args:
        curve: (FPR, largest TPR), rising.
        advantage: largest TPR − FPR.
        auc: largest area under a ROC curve.
        source: what it was computed from.
    """

    curve: tuple[tuple[float, float], ...]
    advantage: float
    auc: float
    source: str

    @property
    def accuracy(self) -> float:
        """(1 + advantage) / 2."""
        return (1 + self.advantage) / 2

    def true_positive_rate(self, false_positive_rate: float) -> float:
        """The bound at a false-positive rate: that of the next larger rate on the curve, so never too low."""
        rate = checks.probability(false_positive_rate=false_positive_rate)
        return next((most for at, most in self.curve if at >= rate * (1 - 1e-12)), 1.0)


def membership_bound(
    event: Event,
    *,
    neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE,
    false_positive_rates: tuple[float, ...] = (0.1, 0.01, 0.001),
) -> MembershipBound:
    """The ceiling that a mechanism sets, from its whole trade-off curve.

    Args:
        event: what was done, a run's composed event for instance.
        neighboring_relation: the neighboring relation.
        false_positive_rates: at these the bound is computed exactly; up to eight.

    Raises:
        UnsupportedEvent: no accountant has a curve for the event; use `membership_bound_of_epsilon`.

    Example:
        >>> from sordino.events import Gaussian
        >>> most = membership_bound(Gaussian(noise_multiplier=1.0))
        >>> round(most.true_positive_rate(0.01), 4), round(most.advantage, 4)
        (0.0924, 0.3829)

    References:
        Dong, Roth and Su 2022, "Gaussian differential privacy", proposition 2.12.
    """
    neighboring_relation, grid = NeighboringRelation(neighboring_relation), _grid()
    exact = {
        rate: accounting.true_positive_rate(event, rate, neighboring_relation=neighboring_relation)
        for rate in false_positive_rates
    }
    missed = accounting.trade_off_curve(event, grid, neighboring_relation=neighboring_relation)
    points = dict(zip(grid, (1 - share for share in missed), strict=True)) | exact
    return _made(
        points,
        accounting.membership_advantage(event, neighboring_relation=neighboring_relation).upper,
        "the whole mechanism",
    )


def membership_bound_of_epsilon(
    *, epsilon: float, delta: float, false_positive_rates: tuple[float, ...] = (0.1, 0.01, 0.001)
) -> MembershipBound:
    """The ceiling when only ε and δ are known: it is higher than the mechanism's own.

    Args:
        epsilon: ≥ 0, may be ∞.
        delta: in [0, 1].
        false_positive_rates: points that the curve must hold.

    Example:
        >>> [round(membership_bound_of_epsilon(epsilon=e, delta=0.0).accuracy, 4) for e in (0.5, 1, 2, 4)]
        [0.6225, 0.7311, 0.8808, 0.982]

    References:
        Kairouz, Oh, Viswanath 2015, "The composition theorem for differential privacy", theorem 2.1.
    """
    checks.probability(delta=delta)
    if math.isinf(epsilon):
        return _made(dict.fromkeys([*_grid(), *false_positive_rates], 1.0), 1.0, "an infinite ε")
    checks.non_negative(epsilon=epsilon)
    growth, kept = math.exp(min(epsilon, 700.0)), math.exp(-epsilon)
    points = {x: min(1.0, growth * x + delta, 1 - kept * (1 - delta - x)) for x in (*_grid(), *false_positive_rates)}
    advantage = math.tanh(epsilon / 2) + 2 * delta / (1 + growth)
    return _made(points, min(1.0, advantage), "ε and δ alone")


def membership_bound_of_claim(event: Event, claim: Guarantee | None, *, rates: tuple[float, ...]) -> MembershipBound:
    """The mechanism's ceiling; that of the claimed ε and δ where no curve can be computed for the event."""
    if claim is None:
        return membership_bound(event, false_positive_rates=rates)
    try:
        return membership_bound(event, neighboring_relation=claim.neighboring_relation, false_positive_rates=rates)
    except (AccountingError, UnsupportedEvent):
        return membership_bound_of_epsilon(epsilon=claim.epsilon, delta=claim.delta, false_positive_rates=rates)


def _grid() -> list[float]:
    return sorted({*np.geomspace(1e-5, 0.1, _LOGARITHMIC).tolist(), *np.linspace(0, 1, _FLAT + 1)[1:-1].tolist()})


def _made(points: dict[float, float], advantage: float, source: str) -> MembershipBound:
    curve = sorted(points.items())
    rates, most = [0.0, *(rate for rate, _ in curve), 1.0], [*(value for _, value in curve), 1.0]
    # T rises, so each strip lies below its right edge: the area is bounded from above.
    area = sum((right - left) * top for left, right, top in zip(rates, rates[1:], most, strict=False))
    return MembershipBound(curve=tuple(curve), advantage=advantage, auc=min(1.0, area), source=source)
