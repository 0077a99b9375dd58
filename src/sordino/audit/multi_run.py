"""Lower bounds on ε from many independent runs, with and without one record (room `audit`, floor 4; numpy and scipy).

References:
    Jagielski, Ullman and Oprea 2020 (Clopper-Pearson). Nasr et al. 2023, section 4 (trade-off curves).
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import ndtri
from scipy.stats import beta

from sordino import checks
from sordino.accounting.gaussian import gaussian_epsilon
from sordino.audit.bounds import LowerBound
from sordino.audit.families import Family
from sordino.errors import InvalidArgument

__all__ = ["Trials", "clopper_pearson", "gaussian_mu", "gaussian_multi_run", "multi_run_curve", "trials"]

_LARGEST_STRENGTH = 32.0


@dataclass(frozen=True, kw_only=True)
class Trials:
    """An attack on many runs: how often it was wrong.

    Args:
        without: runs without the record, ≥ 1.
        false_positives: of these, taken for runs with it.
        including: runs with the record, ≥ 1.
        false_negatives: of these, taken for runs without it.
    """

    without: int
    false_positives: int
    including: int
    false_negatives: int

    def __post_init__(self) -> None:
        for runs, wrong in ((self.without, self.false_positives), (self.including, self.false_negatives)):
            if checks.integer(0, wrong=wrong) > checks.integer(1, runs=runs):
                raise InvalidArgument(f"errors must be at most the {runs} runs, got {wrong}. Count each run once.")

    @property
    def correct(self) -> int:
        """Runs that were told apart."""
        return self.without + self.including - self.false_positives - self.false_negatives

    def rates(self, confidence: float) -> tuple[float, float]:
        """Upper bounds on the false-positive and false-negative rates that hold together with `confidence`.

        Each is a one-sided Clopper-Pearson bound at half of 1 − confidence.
        """
        half = (1 - checks.probability(zero=False, one=False, confidence=confidence)) / 2
        return (
            _upper(self.false_positives, self.without, half),
            _upper(self.false_negatives, self.including, half),
        )


def trials(with_record: ArrayLike, without_record: ArrayLike) -> Trials:
    """Errors of a threshold on scores: it is chosen on the first half of the runs and judged on the second.

    No run helps to choose the threshold that judges it, so that any bound on the result keeps its confidence.

    Args:
        with_record: [n] scores of independent runs with the record, n ≥ 4; larger means more likely with it.
        without_record: [n] scores of independent runs without it, n ≥ 4.

    Example:
        >>> import numpy as np
        >>> trials(np.arange(10) + 5.0, np.arange(10) - 5.0)
        Trials(without=5, false_positives=0, including=5, false_negatives=0)
    """
    positive, negative = np.asarray(with_record, dtype=np.float64), np.asarray(without_record, dtype=np.float64)
    if positive.ndim != 1 or negative.ndim != 1 or min(len(positive), len(negative)) < 4:
        raise InvalidArgument("scores must be two vectors of at least 4 runs each, got fewer. Run more.")
    # Every other run: a drift over the runs then spoils neither half more than the other.
    learn_in, judge_in, learn_out, judge_out = positive[::2], positive[1::2], negative[::2], negative[1::2]
    threshold = _best_threshold(learn_in, learn_out)
    return Trials(
        without=len(judge_out),
        false_positives=int((judge_out >= threshold).sum()),
        including=len(judge_in),
        false_negatives=int((judge_in < threshold).sum()),
    )


def _best_threshold(positive: np.ndarray, negative: np.ndarray) -> float:
    """The score from which on to guess "with": the largest bound on μ on the runs it is chosen on."""
    scores = np.unique(np.concatenate([positive, negative]))
    false_positives = len(negative) - np.searchsorted(np.sort(negative), scores, side="left")
    false_negatives = np.searchsorted(np.sort(positive), scores, side="left")
    promise = ndtri(1 - _uppers(false_positives, len(negative), 0.025)) - ndtri(
        _uppers(false_negatives, len(positive), 0.025)
    )
    return float(scores[np.argmax(promise)])


def clopper_pearson(found: Trials, *, delta: float, confidence: float = 0.95) -> LowerBound:
    """The lower bound on ε of many runs, whatever the mechanism.

    Guarantee: runs of an (ε, δ)-private training give a bound above ε with probability at most 1 − `confidence`,
    provided that the attack was fixed before these runs.

    Example:
        >>> found = Trials(without=1000, false_positives=100, including=1000, false_negatives=100)
        >>> round(clopper_pearson(found, delta=1e-5).epsilon, 4)
        1.9897

    References:
        Kairouz, Oh and Viswanath 2015, theorem 2.1 (errors of an attack); Jagielski, Ullman and Oprea 2020.
    """
    checks.probability(one=False, delta=delta)

    def bound(one: Trials) -> float:
        false_positive, false_negative = one.rates(confidence)
        ratios = [
            (1 - delta - false_negative) / false_positive,
            (1 - delta - false_positive) / false_negative,
        ]
        return max([0.0, *(math.log(ratio) for ratio in ratios if ratio > 0)])

    return _bound("many runs, Clopper-Pearson", bound(found), bound(_perfect(found)), found, delta, confidence, None)


def gaussian_multi_run(found: Trials, *, delta: float, confidence: float = 0.95) -> LowerBound:
    """The lower bound on ε of many runs of a μ-GDP mechanism: μ ≥ Φ⁻¹(1 − FPR) − Φ⁻¹(FNR).

    Only this direction is taken, never the absolute value: an attack that is worse than chance shows nothing.

    Guarantee: as `clopper_pearson`, for μ-GDP trainings.

    Example:
        >>> found = Trials(without=1000, false_positives=100, including=1000, false_negatives=100)
        >>> round(gaussian_multi_run(found, delta=1e-5).epsilon, 2)
        12.2

    References:
        Nasr et al. 2023, equation 4.
    """
    checks.probability(zero=False, one=False, delta=delta)

    def bound(one: Trials) -> float:
        mu = gaussian_mu(one, confidence)
        return gaussian_epsilon(delta, mu)[0] if mu > 0 else 0.0

    family = "Gaussian (μ-GDP)"
    return _bound("many runs, Gaussian", bound(found), bound(_perfect(found)), found, delta, confidence, family)


def gaussian_mu(found: Trials, confidence: float = 0.95) -> float:
    """The lower bound on μ, ≥ 0."""
    false_positive, false_negative = found.rates(confidence)
    return max(0.0, float(ndtri(1 - false_positive) - ndtri(false_negative)))


def multi_run_curve(found: Trials, *, delta: float, family: Family, confidence: float = 0.95) -> LowerBound:
    """The lower bound on ε of many runs of a mechanism whose trade-off curve is one of a family.

    For subsampled mechanisms, whose curve is not Gaussian: give an `EventFamily`.

    Guarantee: as `clopper_pearson`, for trainings whose curve is in the family.
    """
    checks.probability(zero=False, one=False, delta=delta)

    def bound(one: Trials) -> float:
        false_positive, false_negative = one.rates(confidence)
        if 1 - false_negative <= false_positive:
            return 0.0

        def rejected(strength: float) -> bool:
            # Even the least FPR for this TPR is more than the attack needed.
            return family.least_false_positive_rate(strength)(1 - false_negative) > false_positive

        low, high = 0.0, 1.0
        while high < _LARGEST_STRENGTH and rejected(high):
            low, high = high, 2 * high
        while high - low > 1e-5 * (1 + low):
            middle = (low + high) / 2
            low, high = (middle, high) if rejected(middle) else (low, middle)
        return family.epsilon(low, delta) if low > 0 else 0.0

    return _bound(
        "many runs, trade-off curve", bound(found), bound(_perfect(found)), found, delta, confidence, family.name
    )


def _upper(wrong: int, runs: int, alpha: float) -> float:
    return float(_uppers(np.array([wrong]), runs, alpha)[0])


def _uppers(wrong: np.ndarray, runs: int, alpha: float) -> np.ndarray:
    return np.where(wrong == runs, 1.0, beta.ppf(1 - alpha, wrong + 1, np.maximum(runs - wrong, 1)))


def _perfect(found: Trials) -> Trials:
    return Trials(without=found.without, false_positives=0, including=found.including, false_negatives=0)


def _bound(
    method: str, epsilon: float, ceiling: float, found: Trials, delta: float, confidence: float, family: str | None
) -> LowerBound:
    runs = found.without + found.including
    return LowerBound(
        method=method,
        epsilon=epsilon,
        delta=delta,
        confidence=confidence,
        ceiling=ceiling,
        family=family,
        canaries=runs,
        guesses=runs,
        correct=found.correct,
    )
