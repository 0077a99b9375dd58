"""How well scores tell members from others (floor 4): rates with exact intervals, AUC, advantage."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from sordino import checks
from sordino.errors import InvalidArgument

__all__ = ["Rate", "Roc", "fewest_for", "roc"]

Floats = NDArray[np.float64]

# Below this many expected false positives a rate says more about single non-members than about the attack.
_LEAST_FALSE_POSITIVES = 5
_BAND_POINTS = 160


@dataclass(frozen=True, kw_only=True)
class Rate:
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

        The threshold lies at a non-member's score, so its FPR has a beta law and the bound on it is exact. A ceiling
        that lies below this point is refuted.
        """
        checks.probability(zero=False, one=False, alpha=alpha)
        return (
            _upper(self.false_positives, self.non_members, alpha / 2),
            _lower(self.true_positives, self.members, alpha / 2),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Roc:
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

    rates: tuple[Rate, ...]
    auc: float
    auc_interval: tuple[float, float]
    advantage: float
    advantage_interval: tuple[float, float]
    curve: tuple[tuple[float, float, float, float], ...]
    members: int
    non_members: int

    def at(self, false_positive_rate: float) -> Rate:
        """The rate at one of the false-positive rates.

        Raises:
            InvalidArgument: it is not among `rates`, for instance because too few non-members were scored.
        """
        for rate in self.rates:
            if rate.false_positive_rate == false_positive_rate:
                return rate
        raise InvalidArgument(
            f"false_positive_rate must be one of {[rate.false_positive_rate for rate in self.rates]}, got "
            f"{false_positive_rate!r}. It takes {fewest_for(false_positive_rate):,} non-members to measure it."
        )


def fewest_for(false_positive_rate: float) -> int:
    """Non-members that it takes to quote a true-positive rate at this false-positive rate: 5 expected accusations.

    Example:
        >>> fewest_for(0.001), fewest_for(0.01)
        (5000, 500)
    """
    rate = checks.probability(zero=False, false_positive_rate=false_positive_rate)
    return math.ceil(_LEAST_FALSE_POSITIVES / rate - 1e-9)


def roc(
    members: ArrayLike, non_members: ArrayLike, *, false_positive_rates: tuple[float, ...] = (0.1, 0.01, 0.001)
) -> Roc:
    """Measures scores; higher ones accuse. Thresholds are strict, so equal scores never count as an accusation.

    Guarantee: none: a statistic of the members. Keep it beside the data, or measure on public records.

    Args:
        members: scores of records that were trained on, at least one, none NaN.
        non_members: scores of others, at least one, none NaN.
        false_positive_rates: in (0, 1); those with fewer than five expected false positives are left out.

    Example:
        >>> found = roc([2.0, 3.0, 4.0, 1.0], [0.0, 0.5, 1.0, 2.5], false_positive_rates=())
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
    return Roc(
        rates=tuple(
            _rate(ordered_in, ordered_out, rate) for rate in sorted(wanted) if len(outside) >= fewest_for(rate)
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


def _rate(inside: Floats, outside: Floats, rate: float) -> Rate:
    """The threshold is the non-member's score above which at most rate · n others lie."""
    allowed = math.floor(rate * len(outside) + 1e-9)
    threshold = outside[-(allowed + 1)] if allowed < len(outside) else -math.inf
    hits = int((inside > threshold).sum())
    return Rate(
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
