"""Lower bounds on ε from one training run.

m canaries are each put in with probability ½; an attacker guesses on r of them, a number fixed before the scores were
seen, and v guesses are right. How likely are v right guesses when the claim holds? Where that is less likely than
1 − confidence, the claim is rejected; the bound is the largest ε below which every claim is rejected.

References:
    Steinke, Nasr and Jagielski 2023, theorem 5.2 and appendix D (one run). Mahloujifar, Melis and Chaudhuri 2025,
    algorithm 1 (trade-off curves).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import ndtr, ndtri
from scipy.stats import beta, binom

from sordino import accounting, checks
from sordino.accounting.closed_form import gaussian_epsilon
from sordino.definitions import NeighboringRelation
from sordino.errors import InvalidArgument
from sordino.events import Event

# ----------------------------------------------------------------------------------------------------------------------
# Families of trade-off curves, ordered by strength: what an audit's null hypothesis may be.
# ----------------------------------------------------------------------------------------------------------------------


_POINTS = 96
_TOP_DELTA = 1e-9


@runtime_checkable
class TradeOffFamily(Protocol):
    """Trade-off curves f_s that fall as the strength s > 0 grows: a larger s hides less."""

    @property
    def name(self) -> str:
        """What the answer is conditional on, in words."""
        ...

    def least_false_positive_rate(self, strength: float) -> Callable[[float], float]:
        """True-positive rate ↦ the least false-positive rate that any attack on f_s pays for it."""
        ...

    def epsilon(self, strength: float, delta: float) -> float:
        """ε of f_s at δ, from below."""
        ...


@dataclass(frozen=True)
class GaussianTradeOffFamily:
    """μ-GDP; the strength is μ.

    Example:
        >>> family = GaussianTradeOffFamily()
        >>> round(family.epsilon(1.0, 1e-5), 3), round(family.least_false_positive_rate(1.0)(0.5), 4)
        (4.377, 0.1587)

    References:
        Dong, Roth and Su 2022, definition 2.6.
    """

    @property
    def name(self) -> str:
        """What the answer is conditional on, in words."""
        return "Gaussian (μ-GDP)"

    def least_false_positive_rate(self, strength: float) -> Callable[[float], float]:
        """Φ(Φ⁻¹(t) − μ)."""
        return lambda rate: float(ndtr(ndtri(rate) - strength))

    def epsilon(self, strength: float, delta: float) -> float:
        """ε of N(0, 1) against N(μ, 1) at δ, from below."""
        return gaussian_epsilon(delta, strength)[0]


@dataclass(frozen=True, kw_only=True)
class EventTradeOffFamily:
    """The curves of one mechanism with its noise divided by the strength: strength 1 is the mechanism as claimed.

    The curve comes from δ(ε) at finitely many ε. Each gives a valid line TPR ≤ e^ε·FPR + δ(ε), so the family is never
    stronger than its events (Dong, Roth and Su 2022, proposition 2.12).

    Args:
        event: noise factor in (0, ∞) ↦ the event with its noise multiplier times the factor.
        name: what the event is, in words.
        neighboring_relation: the neighboring relation of the events.

    Example:
        >>> from sordino.events import Gaussian
        >>> family = EventTradeOffFamily(event=lambda factor: Gaussian(noise_multiplier=factor), name="Gaussian")
        >>> round(family.epsilon(1.0, 1e-5), 3), round(family.least_false_positive_rate(1.0)(0.5), 2)
        (4.377, 0.16)
    """

    event: Callable[[float], Event]
    name: str
    neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE
    _lines: dict[float, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict, init=False, repr=False)

    def least_false_positive_rate(self, strength: float) -> Callable[[float], float]:
        """The largest of the lines' false-positive rates."""
        if strength not in self._lines:
            event = self.event(1 / checks.positive(strength=strength))
            top = accounting.epsilon(event, _TOP_DELTA, neighboring_relation=self.neighboring_relation).upper
            # Denser towards 0, where most attacks have their error rates.
            points = min(top, 500.0) * np.linspace(0.0, 1.0, _POINTS) ** 2
            profile = accounting.privacy_profile(event, points.tolist(), neighboring_relation=self.neighboring_relation)
            self._lines[strength] = np.exp(points), np.array(profile)
        growth, profile = self._lines[strength]

        def rate(positive: float) -> float:
            forward = (positive - profile) / growth
            # ε < 0: 1 − TPR ≥ e^−ε (1 − FPR − δ(ε)), the same lines with the two errors exchanged.
            backward = 1 - profile - (1 - positive) * growth
            return max(0.0, float(forward.max()), float(backward.max()))

        return rate

    def epsilon(self, strength: float, delta: float) -> float:
        """ε of the event at δ, from below."""
        found = accounting.epsilon(self.event(1 / strength), delta, neighboring_relation=self.neighboring_relation)
        return found.lower if math.isfinite(found.lower) else 0.0


# ----------------------------------------------------------------------------------------------------------------------
# Lower bounds on ε from one training run.
# ----------------------------------------------------------------------------------------------------------------------


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
class CanaryGuesses:
    """How many canaries there were, on how many the attacker guessed, and how many guesses were right."""

    canaries: int
    guesses: int
    correct: int

    def __post_init__(self) -> None:
        if checks.integer(0, guesses=self.guesses) > checks.integer(1, canaries=self.canaries):
            raise InvalidArgument(f"guesses must be at most {self.canaries}, got {self.guesses}. One guess a canary.")
        if checks.integer(0, correct=self.correct) > self.guesses:
            raise InvalidArgument(
                f"correct must be at most {self.guesses}, got {self.correct}. Count only right guesses."
            )

    def perfect(self) -> "CanaryGuesses":
        """The same, had every guess been right."""
        return replace(self, correct=self.guesses)

    def tally(self) -> "CanaryGuesses":
        """Canaries, guesses and how many were right."""
        return self


def guess_canaries(scores: ArrayLike, present: ArrayLike, *, above: int, below: int) -> CanaryGuesses:
    """Guess "in" for the `above` highest scores and "out" for the `below` lowest, and count the right ones.

    The two numbers must be fixed before the scores are looked at: the best of several is not covered by any bound here.
    Scores that are not a number count as the middle one; ties are broken by the canary's position.

    Args:
        scores: [m], larger means more likely in.
        present: [m], whether each canary was in.
        above: how many guesses of "in", ≥ 0.
        below: how many guesses of "out", ≥ 0; at most m guesses together.

    Example:
        >>> guess_canaries([3.0, 1.0, 2.0, 0.0], [True, False, False, True], above=1, below=1)
        CanaryGuesses(canaries=4, guesses=2, correct=1)
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
    return CanaryGuesses(canaries=len(values), guesses=above + below, correct=right)


def one_run_p_value(guesses: CanaryGuesses, *, epsilon: float, delta: float) -> float:
    """How likely so many right guesses are at most, if the mechanism is (ε, δ)-private.

    p = β + 2mδα with W ~ Bin(r, e^ε/(1 + e^ε)), β = P[W ≥ v] and α = max over i of P[v − i ≤ W < v]/i.

    Example:
        >>> tally = CanaryGuesses(canaries=1000, guesses=100, correct=85)
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


def one_run_lower_bound(guesses: CanaryGuesses, *, delta: float, confidence: float = 0.95) -> LowerBound:
    """The lower bound on ε that one run gives, whatever the mechanism.

    Guarantee: an (ε, δ)-private training gives a bound above ε with probability at most 1 − `confidence`, provided
    that the guesses' number was fixed before, and each canary was in with probability ½, independently.

    Args:
        guesses: what the attacker did.
        delta: of the claim, in [0, 1). The bound collapses unless m·δ is small.
        confidence: in (0, 1).

    Example:
        >>> bound = one_run_lower_bound(CanaryGuesses(canaries=1000, guesses=100, correct=90), delta=1e-5)
        >>> round(bound.epsilon, 4), round(bound.ceiling, 4)
        (1.6261, 3.4654)

    References:
        Steinke, Nasr and Jagielski 2023, theorem 5.2.
    """
    alpha = _alpha(confidence)
    checks.probability(one=False, delta=delta)

    def bound(tally: CanaryGuesses) -> float:
        def rejected(epsilon: float) -> bool:
            return one_run_p_value(tally, epsilon=epsilon, delta=delta) <= alpha

        return _max_rejected(rejected, largest=_LARGEST_EPSILON)

    return _shown("one run", bound, guesses, delta=delta, confidence=confidence)


def rejects_curve(guesses: CanaryGuesses, least_false_positive_rate: Callable[[float], float], *, alpha: float) -> bool:
    """Whether so many right guesses are less likely than `alpha` under a trade-off curve.

    Args:
        guesses: what the attacker did.
        least_false_positive_rate: the curve, as `TradeOffFamily` gives it.
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


def one_run_trade_off_bound(
    guesses: CanaryGuesses, *, delta: float, confidence: float = 0.95, family: TradeOffFamily | None = None
) -> LowerBound:
    """The lower bound on ε that one run gives when the mechanism's trade-off curve is one of a family.

    It is tighter than `one_run_lower_bound` by as much as the family says more than (ε, δ), and holds for that family
    only.

    Guarantee: a training whose trade-off curve is in the family, with this ε at δ, gives a bound above ε with
    probability at most 1 − `confidence`, under the provisos of `one_run_lower_bound`.

    Args:
        guesses: what the attacker did.
        delta: where ε is read off the curve, in (0, 1).
        confidence: in (0, 1).
        family: `GaussianTradeOffFamily` when None.

    Example:
        >>> round(one_run_trade_off_bound(CanaryGuesses(canaries=1000, guesses=100, correct=90), delta=1e-5).epsilon, 4)
        2.4564

    References:
        Mahloujifar, Melis and Chaudhuri 2025, theorem 3.2.
    """
    known = GaussianTradeOffFamily() if family is None else family
    alpha = _alpha(confidence)
    checks.probability(zero=False, one=False, delta=delta)

    def bound(tally: CanaryGuesses) -> float:
        def rejected(strength: float) -> bool:
            if strength > 0:
                return rejects_curve(tally, known.least_false_positive_rate(strength), alpha=alpha)
            return tally.correct > 0 and rejects_curve(tally, lambda rate: rate, alpha=alpha)

        strength = _max_rejected(rejected, largest=_LARGEST_STRENGTH)
        return known.epsilon(strength, delta) if strength > 0 else 0.0

    return _shown("one run, trade-off curve", bound, guesses, delta=delta, confidence=confidence, family=known.name)


def _max_rejected(rejected: Callable[[float], bool], *, largest: float) -> float:
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


_Found = TypeVar("_Found", CanaryGuesses, "MembershipTrials")


def _shown(
    method: str,
    bound: Callable[[_Found], float],
    found: _Found,
    *,
    delta: float,
    confidence: float,
    family: str | None = None,
) -> LowerBound:
    """What a bound says of what was found, and of the best that could have been."""
    return LowerBound(
        method=method,
        epsilon=bound(found),
        delta=delta,
        confidence=confidence,
        ceiling=bound(found.perfect()),
        family=family,
        **vars(found.tally()),
    )


# ----------------------------------------------------------------------------------------------------------------------
# Lower bounds on ε from many independent runs, with and without one record.
#
# References:
#     Jagielski, Ullman and Oprea 2020 (Clopper-Pearson). Nasr et al. 2023, section 4 (trade-off curves).
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class MembershipTrials:
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
        """Runs that were distinguished."""
        return self.without + self.including - self.false_positives - self.false_negatives

    def perfect(self) -> "MembershipTrials":
        """The same, had every run been distinguished."""
        return replace(self, false_positives=0, false_negatives=0)

    def tally(self) -> CanaryGuesses:
        """Runs as canaries that were all guessed on."""
        runs = self.without + self.including
        return CanaryGuesses(canaries=runs, guesses=runs, correct=self.correct)

    def rates(self, confidence: float) -> tuple[float, float]:
        """Upper bounds on the false-positive and false-negative rates that hold together with `confidence`.

        Each is a one-sided Clopper-Pearson bound at half of 1 − confidence.
        """
        half = (1 - checks.probability(zero=False, one=False, confidence=confidence)) / 2
        return (
            _upper(self.false_positives, self.without, half),
            _upper(self.false_negatives, self.including, half),
        )


def make_trials(with_record: ArrayLike, without_record: ArrayLike) -> MembershipTrials:
    """Errors of a threshold on scores: it is chosen on the first half of the runs and judged on the second.

    No run helps to choose the threshold that judges it, so that any bound on the result keeps its confidence.

    Args:
        with_record: [n] scores of independent runs with the record, n ≥ 4; larger means more likely with it.
        without_record: [n] scores of independent runs without it, n ≥ 4.

    Example:
        >>> import numpy as np
        >>> make_trials(np.arange(10) + 5.0, np.arange(10) - 5.0)
        MembershipTrials(without=5, false_positives=0, including=5, false_negatives=0)
    """
    positive, negative = np.asarray(with_record, dtype=np.float64), np.asarray(without_record, dtype=np.float64)
    if positive.ndim != 1 or negative.ndim != 1 or min(len(positive), len(negative)) < 4:
        raise InvalidArgument("scores must be two vectors of at least 4 runs each, got fewer. Run more.")
    # Every other run: a drift over the runs then spoils neither half more than the other.
    learn_in, judge_in, learn_out, judge_out = positive[::2], positive[1::2], negative[::2], negative[1::2]
    threshold = _best_threshold(learn_in, learn_out)
    return MembershipTrials(
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


def clopper_pearson(found: MembershipTrials, *, delta: float, confidence: float = 0.95) -> LowerBound:
    """The lower bound on ε of many runs, whatever the mechanism.

    Guarantee: runs of an (ε, δ)-private training give a bound above ε with probability at most 1 − `confidence`,
    provided that the attack was fixed before these runs.

    Example:
        >>> found = MembershipTrials(without=1000, false_positives=100, including=1000, false_negatives=100)
        >>> round(clopper_pearson(found, delta=1e-5).epsilon, 4)
        1.9897

    References:
        Kairouz, Oh and Viswanath 2015, theorem 2.1 (errors of an attack); Jagielski, Ullman and Oprea 2020.
    """
    checks.probability(one=False, delta=delta)

    def bound(one: MembershipTrials) -> float:
        false_positive, false_negative = one.rates(confidence)
        ratios = [
            (1 - delta - false_negative) / false_positive,
            (1 - delta - false_positive) / false_negative,
        ]
        return max([0.0, *(math.log(ratio) for ratio in ratios if ratio > 0)])

    return _shown("many runs, Clopper-Pearson", bound, found, delta=delta, confidence=confidence)


def gaussian_multi_run(found: MembershipTrials, *, delta: float, confidence: float = 0.95) -> LowerBound:
    """The lower bound on ε of many runs of a μ-GDP mechanism: μ ≥ Φ⁻¹(1 − FPR) − Φ⁻¹(FNR).

    Only this direction is taken, never the absolute value: an attack that is worse than chance shows nothing.

    Guarantee: as `clopper_pearson`, for μ-GDP trainings.

    Example:
        >>> found = MembershipTrials(without=1000, false_positives=100, including=1000, false_negatives=100)
        >>> round(gaussian_multi_run(found, delta=1e-5).epsilon, 2)
        12.2

    References:
        Nasr et al. 2023, equation 4.
    """
    checks.probability(zero=False, one=False, delta=delta)

    def bound(one: MembershipTrials) -> float:
        mu = gaussian_mu(one, confidence)
        return gaussian_epsilon(delta, mu)[0] if mu > 0 else 0.0

    family = GaussianTradeOffFamily().name
    return _shown("many runs, Gaussian", bound, found, delta=delta, confidence=confidence, family=family)


def gaussian_mu(found: MembershipTrials, confidence: float = 0.95) -> float:
    """The lower bound on μ, ≥ 0."""
    false_positive, false_negative = found.rates(confidence)
    return max(0.0, float(ndtri(1 - false_positive) - ndtri(false_negative)))


def multi_run_trade_off_bound(
    found: MembershipTrials, *, delta: float, family: TradeOffFamily, confidence: float = 0.95
) -> LowerBound:
    """The lower bound on ε of many runs of a mechanism whose trade-off curve is one of a family.

    For subsampled mechanisms, whose curve is not Gaussian: give an `EventTradeOffFamily`.

    Guarantee: as `clopper_pearson`, for trainings whose curve is in the family.
    """
    checks.probability(zero=False, one=False, delta=delta)

    def bound(one: MembershipTrials) -> float:
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

    return _shown("many runs, trade-off curve", bound, found, delta=delta, confidence=confidence, family=family.name)


def _upper(wrong: int, runs: int, alpha: float) -> float:
    return float(_uppers(np.array([wrong]), runs, alpha)[0])


def _uppers(wrong: np.ndarray, runs: int, alpha: float) -> np.ndarray:
    return np.where(wrong == runs, 1.0, beta.ppf(1 - alpha, wrong + 1, np.maximum(runs - wrong, 1)))
