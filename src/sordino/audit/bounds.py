"""Lower bounds on ε from one training run (room `audit`, floor 4; numpy and scipy only).

m canaries are each put in with probability ½; an attacker guesses on r of them, a number fixed before the scores were
seen, and v guesses are right. How likely are v right guesses when the claim holds? Where that is less likely than
1 − confidence, the claim is rejected; the bound is the largest ε below which every claim is rejected.

References:
    Steinke, Nasr and Jagielski 2023, theorem 5.2 and appendix D (one run). Mahloujifar, Melis and Chaudhuri 2025,
    algorithm 1 (trade-off curves).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import binom

from sordino import checks
from sordino.audit.families import Family, GaussianFamily
from sordino.errors import InvalidArgument

__all__ = ["Guesses", "LowerBound", "guess", "one_run", "one_run_curve", "one_run_p_value", "rejects_curve"]

_LARGEST_EPSILON = 64.0
_LARGEST_STRENGTH = 32.0
_SCAN = 0.05


@dataclass(frozen=True, kw_only=True)
class LowerBound:
    """What an audit has shown.

    Args:
        method: name of the audit.
        epsilon: what ε is at least, or, for an estimate, about.
        delta: at this δ.
        confidence: probability with which the bound holds, over coins and noise; 0 for an estimate.
        ceiling: the most that this audit could have shown, had every guess been right.
        family: the family of trade-off curves that the answer is conditional on, or None for all of (ε, δ)-DP.
        is_estimate: whether this is a guess at ε, not a bound.
        canaries, guesses, correct: what the bound was made from.
    """

    method: str
    epsilon: float
    delta: float
    confidence: float
    ceiling: float
    family: str | None = None
    is_estimate: bool = False
    canaries: int
    guesses: int
    correct: int

    def to_dict(self) -> dict[str, object]:
        """The bound as JSON types; ∞ is the string "inf"."""
        body = dict(vars(self))
        return {
            name: "inf" if isinstance(value, float) and math.isinf(value) else value for name, value in body.items()
        }


@dataclass(frozen=True, kw_only=True)
class Guesses:
    """How many canaries there were, on how many the attacker guessed, and how many guesses were right."""

    canaries: int
    guesses: int
    correct: int

    def __post_init__(self) -> None:
        _checked(self.canaries, self.guesses, self.correct)


def guess(scores: ArrayLike, present: ArrayLike, *, above: int, below: int) -> Guesses:
    """Guess "in" for the `above` highest scores and "out" for the `below` lowest, and count the right ones.

    The two numbers must be fixed before the scores are looked at: the best of several is not covered by any bound here.
    Scores that are not a number count as the middle one; ties are broken by the canary's place.

    Args:
        scores: [m], larger means more likely in.
        present: [m], whether each canary was in.
        above: how many guesses of "in", ≥ 0.
        below: how many guesses of "out", ≥ 0; at most m guesses together.

    Example:
        >>> guess([3.0, 1.0, 2.0, 0.0], [True, False, False, True], above=1, below=1)
        Guesses(canaries=4, guesses=2, correct=1)
    """
    values, truth = np.array(scores, dtype=np.float64), np.asarray(present, dtype=bool)
    if values.ndim != 1 or values.shape != truth.shape:
        raise InvalidArgument(
            f"scores and present must be vectors of one length, got {values.shape} and {truth.shape}. One a canary."
        )
    if checks.integer(0, above=above) + checks.integer(0, below=below) > len(values):
        raise InvalidArgument(f"above and below must be at most {len(values)} together, got more. Guess on fewer.")
    broken = np.isnan(values)
    values[broken] = np.median(values[~broken]) if not broken.all() else 0.0
    order = np.argsort(values, kind="stable")
    right = int(truth[order[len(order) - above :]].sum()) + int((~truth[order[:below]]).sum())
    return Guesses(canaries=len(values), guesses=above + below, correct=right)


def one_run_p_value(guesses: Guesses, *, epsilon: float, delta: float) -> float:
    """How likely so many right guesses are at most, if the mechanism is (ε, δ)-private.

    p = β + 2mδα with W ~ Bin(r, e^ε/(1 + e^ε)), β = P[W ≥ v] and α = max over i of P[v − i ≤ W < v]/i.

    Example:
        >>> tally = Guesses(canaries=1000, guesses=100, correct=85)
        >>> round(one_run_p_value(tally, epsilon=1.0, delta=1e-5), 7)
        0.0045425
    """
    checks.non_negative(epsilon=epsilon)
    checks.probability(delta=delta)
    r, v = guesses.guesses, guesses.correct
    q = 1 / (1 + math.exp(-epsilon))
    tail = float(binom.sf(v - 1, r, q))
    if v == 0 or delta == 0:
        return min(1.0, tail)
    # Sums of the probabilities just below v, over ever longer stretches: no difference of two tails is taken.
    stretch = np.cumsum(binom.pmf(np.arange(v - 1, -1, -1), r, q))
    alpha = float(np.max(stretch / np.arange(1, v + 1)))
    return min(1.0, tail + 2 * guesses.canaries * delta * alpha)


def one_run(guesses: Guesses, *, delta: float, confidence: float = 0.95) -> LowerBound:
    """The lower bound on ε that one run gives, whatever the mechanism.

    Guarantee: an (ε, δ)-private training gives a bound above ε with probability at most 1 − `confidence`, provided
    that the guesses' number was fixed before, and each canary was in with probability ½, independently.

    Args:
        guesses: what the attacker did.
        delta: of the claim, in [0, 1). The bound collapses unless m·δ is small.
        confidence: in (0, 1).

    Example:
        >>> bound = one_run(Guesses(canaries=1000, guesses=100, correct=90), delta=1e-5)
        >>> round(bound.epsilon, 4), round(bound.ceiling, 4)
        (1.6261, 3.4654)

    References:
        Steinke, Nasr and Jagielski 2023, theorem 5.2.
    """
    alpha = _alpha(confidence)
    checks.probability(one=False, delta=delta)

    def bound(correct: int) -> float:
        tally = Guesses(canaries=guesses.canaries, guesses=guesses.guesses, correct=correct)

        def rejected(epsilon: float) -> bool:
            return one_run_p_value(tally, epsilon=epsilon, delta=delta) <= alpha

        return _largest_rejected(rejected, largest=_LARGEST_EPSILON)

    return LowerBound(
        method="one run",
        epsilon=bound(guesses.correct),
        delta=delta,
        confidence=confidence,
        ceiling=bound(guesses.guesses),
        **vars(guesses),
    )


def rejects_curve(guesses: Guesses, least_false_positive_rate: Callable[[float], float], *, alpha: float) -> bool:
    """Whether so many right guesses are less likely than `alpha` under a trade-off curve.

    Args:
        guesses: what the attacker did.
        least_false_positive_rate: the curve, as `Family` gives it.
        alpha: in (0, 1).

    References:
        Mahloujifar, Melis and Chaudhuri 2025, algorithm 1.
    """
    m, r, v = guesses.canaries, guesses.guesses, guesses.correct
    right, wrong = alpha * v / m, alpha * (r - v) / m
    for i in range(v - 1, -1, -1):
        grown = max(wrong, least_false_positive_rate(right))
        right = min(1.0, right + i / (r - i) * (grown - wrong))
        wrong = grown
    return right + wrong > r / m


def one_run_curve(
    guesses: Guesses, *, delta: float, confidence: float = 0.95, family: Family | None = None
) -> LowerBound:
    """The lower bound on ε that one run gives when the mechanism's trade-off curve is one of a family.

    It is tighter than `one_run` by as much as the family says more than (ε, δ), and holds for that family only.

    Guarantee: a training whose trade-off curve is in the family, with this ε at δ, gives a bound above ε with
    probability at most 1 − `confidence`, under the provisos of `one_run`.

    Args:
        guesses: what the attacker did.
        delta: where ε is read off the curve, in (0, 1).
        confidence: in (0, 1).
        family: `GaussianFamily` when None.

    Example:
        >>> round(one_run_curve(Guesses(canaries=1000, guesses=100, correct=90), delta=1e-5).epsilon, 4)
        2.4564

    References:
        Mahloujifar, Melis and Chaudhuri 2025, theorem 3.2.
    """
    known = GaussianFamily() if family is None else family
    alpha = _alpha(confidence)
    checks.probability(zero=False, one=False, delta=delta)

    def bound(correct: int) -> float:
        tally = Guesses(canaries=guesses.canaries, guesses=guesses.guesses, correct=correct)

        def rejected(strength: float) -> bool:
            if strength > 0:
                return rejects_curve(tally, known.least_false_positive_rate(strength), alpha=alpha)
            return correct > 0 and rejects_curve(tally, lambda rate: rate, alpha=alpha)

        strength = _largest_rejected(rejected, largest=_LARGEST_STRENGTH)
        return known.epsilon(strength, delta) if strength > 0 else 0.0

    return LowerBound(
        method="one run, trade-off curve",
        epsilon=bound(guesses.correct),
        delta=delta,
        confidence=confidence,
        ceiling=bound(guesses.guesses),
        family=known.name,
        **vars(guesses),
    )


def _largest_rejected(rejected: Callable[[float], bool], *, largest: float) -> float:
    """The largest value such that it and all smaller ones are rejected: a scan, then bisection of the last stretch.

    The scan is fine at first and doubles later. It matters because the δ term need not grow with ε.
    """
    if not rejected(0.0):
        return 0.0
    low, step = 0.0, _SCAN
    while low < largest and rejected(low + step):
        low += step
        step = max(_SCAN, low / 8)
    high = min(largest, low + step)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if rejected(middle) else (low, middle)
        if high - low <= 1e-7 * (1 + low):
            break
    return low


def _alpha(confidence: float) -> float:
    return 1 - checks.probability(zero=False, one=False, confidence=confidence)


def _checked(canaries: int, guesses: int, correct: int) -> None:
    if checks.integer(0, guesses=guesses) > checks.integer(1, canaries=canaries):
        raise InvalidArgument(f"guesses must be at most {canaries}, got {guesses}. One guess a canary.")
    if checks.integer(0, correct=correct) > guesses:
        raise InvalidArgument(f"correct must be at most {guesses}, got {correct}. Count only right guesses.")
