"""The exponential mechanism: choose a candidate with probability growing with its score.

References:
    McSherry, Talwar 2007. Durfee, Rogers 2019, "Practical differentially private top-k selection" (bounded range).
    Cesar, Rogers 2021, "Bounding, concentrating, and truncating" (ε²/8-zCDP).
"""

import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from decimal import Decimal, localcontext

import numpy as np
import numpy.typing as npt

from sordino import checks
from sordino.errors import BudgetExceeded, InvalidArgument
from sordino.events import BoundedRange, Event, PureDP
from sordino.events import RandomizedResponse as RandomizedResponseEvent
from sordino.mechanisms.base import (
    Bounds,
    FloatArray,
    Numbers,
    category_codes,
    checked_bounds,
    finite_array,
    observable_release,
)
from sordino.mechanisms.samplers import exponential, gumbel, laplace, uniform_below
from sordino.randomness import KeyedRNG, RandomStream


def clean_scores(scores: Numbers, *, bounds: Bounds | None = None, name: str = "scores") -> FloatArray:
    """Scores as a vector of floats, higher is better; one that is not finite counts as the worst.

    With declared `bounds` scores are clipped to them and the worst is the lower bound, so a failed candidate keeps
    the mechanism private. Without, the worst is the lowest finite score.
    """
    array = np.array(scores)
    if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "biuf":
        raise InvalidArgument(
            f"{name} must be a vector of at least one real number, got shape {array.shape} of {array.dtype}. "
            "Give one number for each candidate."
        )
    array = array.astype(np.float64)
    finite = np.isfinite(array)
    worst = bounds[0] if bounds else float(np.min(array, where=finite, initial=np.inf))
    array[~finite] = worst if np.isfinite(worst) else 0.0
    return np.clip(array, *bounds) if bounds else array


@dataclass(frozen=True, kw_only=True)
class _ChoiceByScore:
    """What every mechanism has that chooses a candidate by its score."""

    epsilon: float
    sensitivity: float
    monotone: bool = False
    score_bounds: Bounds | None = None
    rng: KeyedRNG = field(default_factory=KeyedRNG, repr=False, compare=False)

    def __post_init__(self) -> None:
        checks.positive(epsilon=self.epsilon)
        checks.positive(sensitivity=self.sensitivity)
        if self.score_bounds is not None:
            checked_bounds(self.score_bounds, name="score_bounds")


@dataclass(frozen=True, kw_only=True)
class ExponentialMechanism(_ChoiceByScore):
    """Chooses candidate i with probability ∝ measureᵢ · exp(ε·scoreᵢ/(2Δ)); ε·scoreᵢ/Δ for monotone scores.

    Sampled as the largest of log-weights plus Gumbel noise, so nothing overflows; a candidate of measure 0 is never
    chosen. Measures turn pieces of a continuous range into candidates (`PrivateQuantile`).

    Guarantee: one release is ε-bounded-range (hence ε-private and ε²/8-zCDP) when one privacy unit moves every score
    by at most `sensitivity`. With `monotone`, one unit moves all scores in the same direction.

    Args:
        epsilon: > 0.
        sensitivity: > 0, the largest change of any score, under the declared relation.
        monotone: whether adding a record can only raise, or only lower, all scores.
        score_bounds: (lowest, highest) score; scores are clipped to it. Needed where a score may be NaN or infinite.
        rng: where the noise comes from; by default a fresh key of this object's own.

    Example:
        >>> mechanism = ExponentialMechanism(epsilon=1.0, sensitivity=1.0)
        >>> mechanism.probabilities([0, 1, 2]).round(6).tolist()
        [0.186324, 0.307196, 0.50648]
    """

    @property
    def coefficient(self) -> float:
        """What a score is multiplied by in the exponent."""
        return self.epsilon / ((1.0 if self.monotone else 2.0) * self.sensitivity)

    def event(self) -> Event:
        """The event of one release."""
        return BoundedRange(epsilon=self.epsilon)

    def log_weights(self, scores: Numbers, measures: Numbers | None = None) -> FloatArray:
        """Logarithms of the weights, up to a constant; −∞ for a candidate of measure 0."""
        cleaned = clean_scores(scores, bounds=self.score_bounds)
        # Differences first: scores far from 0 would lose their digits in the product.
        weights = self.coefficient * (cleaned - cleaned.max())
        if measures is None:
            return weights
        sizes = np.asarray(measures, dtype=np.float64)
        if sizes.shape != weights.shape:
            raise InvalidArgument(
                f"measures must have one entry a score ({weights.size}), got shape {sizes.shape}. Give both or none."
            )
        with np.errstate(divide="ignore", invalid="ignore"):
            sizes = np.log(np.where(sizes > 0, sizes, 0.0))
        # Without any positive measure every candidate is as good as another.
        return weights + sizes if np.isfinite(sizes).any() else np.zeros_like(weights)

    def probabilities(self, scores: Numbers, measures: Numbers | None = None) -> FloatArray:
        """Probabilities of the choice, as private as the scores: for tests and teaching, not for release."""
        logs = self.log_weights(scores, measures)
        weights = np.exp(logs - logs.max())
        return weights / weights.sum()

    @observable_release
    def release(self, scores: Numbers, measures: Numbers | None = None) -> int:
        """The position of the chosen candidate."""
        logs = self.log_weights(scores, measures)
        return int(np.argmax(logs + gumbel(logs.size, self.rng.new_stream("exponential"))))


# ----------------------------------------------------------------------------------------------------------------------
# The generalized exponential mechanism: candidates whose errors have sensitivities of their own.
#
# The exponential mechanism scales its noise by the largest sensitivity of all candidates; here a candidate with a small
# sensitivity is chosen as precisely as if the others were not there.
#
# References:
#     Raskhodnikova, Smith 2016, "Lipschitz extensions for node-private graph statistics and the generalized
#     exponential mechanism".
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class GeneralizedExponentialMechanism:
    """Chooses a candidate with a small error, where one privacy unit moves error i by at most `sensitivities[i]`.

    Errors are turned into sᵢ = maxⱼ ((eᵢ + tΔᵢ) − (eⱼ + tΔⱼ))/(Δᵢ + Δⱼ), t = (2/ε)·ln(k/β), whose sensitivity is
    1, and the exponential mechanism chooses on −s. With probability 1 − β, eᵢ ≤ minⱼ(eⱼ + 4Δⱼ·ln(k/β)/ε).

    Guarantee: one release is ε-bounded-range, hence ε-private.

    Args:
        epsilon: > 0.
        sensitivities: one positive number for each candidate, under the declared relation.
        failure_probability: β, in (0, 1); it tunes accuracy and has no part in privacy.
        rng: where the noise comes from; by default a fresh key of this object's own.

    Example:
        >>> mechanism = GeneralizedExponentialMechanism(epsilon=1.0, sensitivities=(1, 2, 50), failure_probability=0.05)
        >>> mechanism.probabilities([10, 5, 0]).round(6).tolist()
        [0.621373, 0.365214, 0.013413]
    """

    epsilon: float
    sensitivities: tuple[float, ...]
    failure_probability: float = 0.05
    rng: KeyedRNG = field(default_factory=KeyedRNG, repr=False, compare=False)

    def __post_init__(self) -> None:
        checks.positive(epsilon=self.epsilon)
        checks.probability(failure_probability=self.failure_probability, zero=False, one=False)
        for sensitivity in self.sensitivities:
            checks.positive(sensitivity=sensitivity)
        if not self.sensitivities:
            raise InvalidArgument("sensitivities must be at least one number, got none. Give one a candidate.")

    @property
    def penalty(self) -> float:
        """t: how many sensitivities are added to each error."""
        return 2.0 / self.epsilon * math.log(len(self.sensitivities) / self.failure_probability)

    def event(self) -> Event:
        """The event of one release."""
        return self._inner().event()

    def normalized_errors(self, errors: Numbers) -> FloatArray:
        """s: errors in units of sensitivity, each against its strongest rival; the least is 0."""
        # An error that is not finite counts as the worst, that is, the largest.
        checked = -clean_scores(np.negative(np.asarray(errors, dtype=np.float64)), name="errors")
        if checked.size != len(self.sensitivities):
            raise InvalidArgument(
                f"errors must have {len(self.sensitivities)} entries, one a candidate, got {checked.size}. "
                "Give one error for each sensitivity."
            )
        sensitivity = np.asarray(self.sensitivities, dtype=np.float64)
        shifted = checked + self.penalty * sensitivity
        return ((shifted[:, None] - shifted) / (sensitivity[:, None] + sensitivity)).max(axis=1)

    def probabilities(self, errors: Numbers) -> FloatArray:
        """Probabilities of the choice, as private as the errors: for tests and teaching, not for release."""
        return self._inner().probabilities(-self.normalized_errors(errors))

    def release(self, errors: Numbers) -> int:
        """The position of the chosen candidate."""
        return self._inner().release(-self.normalized_errors(errors))

    def _inner(self) -> ExponentialMechanism:
        return ExponentialMechanism(epsilon=self.epsilon, sensitivity=1.0, rng=self.rng)


# ----------------------------------------------------------------------------------------------------------------------
# Report-noisy-max and permute-and-flip: the position of a high score, and nothing else.
#
# References:
#     Dwork, Roth 2014, section 3.3 (noisy max). McKenna, Sheldon 2020, "Permute-and-flip". Ding, Kifer, Steinke,
#     Wang, Xiao, Zhang 2021, "The permute-and-flip mechanism is identical to report-noisy-max with exponential noise".
# ----------------------------------------------------------------------------------------------------------------------


_DRAWS = {"exponential": exponential, "gumbel": gumbel, "laplace": laplace}


@dataclass(frozen=True, kw_only=True)
class ReportNoisyMax(_ChoiceByScore):
    """Adds noise to every score and reports which is largest: the position alone, never the noisy score.

    ``gumbel`` noise gives the exponential mechanism; ``exponential`` noise that of permute-and-flip, which
    is never worse in expected score; ``laplace`` is the textbook form.

    Guarantee: one release is ε-private when one privacy unit moves every score by at most `sensitivity` (all in the
    same direction with `monotone`). Only with ``gumbel`` noise is it ε-bounded-range; the others are charged as
    ε-private and no less.

    Args:
        epsilon: > 0.
        sensitivity: > 0, the largest change of any score, under the declared relation.
        noise: ``gumbel``, ``exponential`` or ``laplace``.
        monotone: whether adding a record can only raise, or only lower, all scores.
        score_bounds: (lowest, highest) score; scores are clipped to it. Needed where a score may be NaN or infinite.
        rng: where the noise comes from; by default a fresh key of this object's own.

    Example:
        >>> ReportNoisyMax(epsilon=50.0, sensitivity=1.0).release([0.0, 100.0, 3.0])
        1
    """

    noise: str = "gumbel"

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.one_of(tuple(_DRAWS), noise=self.noise)

    @property
    def scale(self) -> float:
        """Scale of the noise on each score."""
        return (1.0 if self.monotone else 2.0) * self.sensitivity / self.epsilon

    def event(self) -> Event:
        """The event of one release."""
        return BoundedRange(epsilon=self.epsilon) if self.noise == "gumbel" else PureDP(epsilon=self.epsilon)

    @observable_release
    def release(self, scores: Numbers) -> int:
        """The position of the largest noisy score."""
        cleaned = clean_scores(scores, bounds=self.score_bounds)
        noise = _DRAWS[self.noise](cleaned.size, self.rng.new_stream("noisy-max"))
        return int(np.argmax((cleaned - cleaned.max()) / self.scale + noise))


@dataclass(frozen=True, kw_only=True)
class PermuteAndFlip(_ChoiceByScore):
    """Visits candidates in random order and takes one with probability exp(ε·(score − best)/(2Δ)).

    Its expected score is never below the exponential mechanism's.

    Guarantee: one release is ε-private when one privacy unit moves every score by at most `sensitivity` (all in the
    same direction with `monotone`). It is not ε-bounded-range: it is charged ε, hence ε²/2-zCDP, not ε²/8.

    Args:
        epsilon: > 0.
        sensitivity: > 0, the largest change of any score, under the declared relation.
        monotone: whether adding a record can only raise, or only lower, all scores.
        score_bounds: (lowest, highest) score; scores are clipped to it. Needed where a score may be NaN or infinite.
        rng: where the coins come from; by default a fresh key of this object's own.

    Example:
        >>> PermuteAndFlip(epsilon=50.0, sensitivity=1.0).release([0.0, 100.0, 3.0])
        1
    """

    def event(self) -> Event:
        """The event of one release."""
        return PureDP(epsilon=self.epsilon)

    def acceptance(self, scores: Numbers) -> FloatArray:
        """Probability of taking each candidate when it is visited; 1 for the best."""
        cleaned = clean_scores(scores, bounds=self.score_bounds)
        return np.exp(self.epsilon * (cleaned - cleaned.max()) / ((1.0 if self.monotone else 2.0) * self.sensitivity))

    @observable_release
    def release(self, scores: Numbers) -> int:
        """The position of the chosen candidate."""
        acceptance = self.acceptance(scores)
        stream = self.rng.new_stream("permute-and-flip")
        order = _random_order(acceptance.size, stream)
        # All coins are flipped at once; the first candidate that is taken in the random order is the result.
        taken = stream.uniform(acceptance.size) < acceptance[order]
        return int(order[np.argmax(taken)])


def _random_order(count: int, stream: RandomStream) -> npt.NDArray[np.intp]:
    """A uniform permutation: the ranks of random words, drawn again when two are equal."""
    while True:
        words = stream.integers64(count)
        order = np.argsort(words)
        if not (np.diff(words[order]) == 0).any():
            return order


# ----------------------------------------------------------------------------------------------------------------------
# The sparse vector technique: many questions, few of them above a threshold, and only those cost.
#
# References:
#     Lyu, Su, Li 2017, "Understanding the sparse vector technique for differential privacy", algorithm 7 and
#     the allocation of its budget; their table of broken variants says what must not be changed.
# ----------------------------------------------------------------------------------------------------------------------


class AboveThresholdSession:
    """One run of the technique: questions may be chosen after earlier answers. Made by `AboveThreshold.session`."""

    def __init__(self, mechanism: "AboveThreshold", stream: RandomStream) -> None:
        self.mechanism = mechanism
        self._stream = stream
        self._noisy_threshold = mechanism.threshold + mechanism.threshold_scale * float(laplace(1, stream)[0])
        self._left = mechanism.max_positives

    @property
    def is_over(self) -> bool:
        """Whether all positives are used up."""
        return self._left == 0

    def ask(self, value: float) -> bool:
        """Whether the noisy value is above the noisy threshold.

        Raises:
            BudgetExceeded: after the last positive answer; the answers themselves tell when that is.
        """
        if self.is_over:
            raise BudgetExceeded(
                f"max_positives must be larger for more answers, got {self.mechanism.max_positives}. "
                "Start another session, which is charged again."
            )
        above = self._answer(value)
        self._left -= above
        return above

    @observable_release
    def _answer(self, value: float) -> bool:
        noise = self.mechanism.value_scale * float(laplace(1, self._stream)[0])
        return bool(float(finite_array(value)) + noise >= self._noisy_threshold)


@dataclass(frozen=True, kw_only=True)
class AboveThreshold:
    """Answers "above the threshold?" for a sequence of values until `max_positives` were answered yes.

    The threshold is noised once, with its own share of ε; every value is noised afresh, with noise that grows with
    `max_positives`. Noisy values are never released, and nothing is after the last positive.

    Guarantee: one session, or one `release`, is ε-private with δ = 0 when one privacy unit moves every value by at
    most `sensitivity` (all in the same direction with `monotone`). A value that is not finite counts as 0.

    Args:
        epsilon: > 0, for the whole session.
        sensitivity: > 0, the largest change of any value, under the declared relation.
        threshold: public.
        max_positives: c ≥ 1.
        monotone: whether one record moves all values in the same direction, as it does counts.
        rng: where the noise comes from; by default a fresh key of this object's own.

    Example:
        >>> mechanism = AboveThreshold(epsilon=100.0, sensitivity=1.0, threshold=50.0)
        >>> mechanism.release([0.0, 0.0, 100.0, 100.0]).tolist()
        [False, False, True]
    """

    epsilon: float
    sensitivity: float
    threshold: float
    max_positives: int = 1
    monotone: bool = False
    rng: KeyedRNG = field(default_factory=KeyedRNG, repr=False, compare=False)

    def __post_init__(self) -> None:
        checks.positive(epsilon=self.epsilon)
        checks.positive(sensitivity=self.sensitivity)
        checks.in_range(-1e300, 1e300, threshold=self.threshold)
        checks.integer(1, max_positives=self.max_positives)

    @property
    def _uses(self) -> float:
        return self.max_positives * (1.0 if self.monotone else 2.0)

    @property
    def threshold_epsilon(self) -> float:
        """ε₁, the threshold's share: ε₁ : ε₂ = 1 : (2c)^⅔ (c^⅔ when monotone) minimizes the noise of the comparison."""
        return self.epsilon / (1.0 + self._uses ** (2.0 / 3.0))

    @property
    def value_epsilon(self) -> float:
        """ε₂, the values' share; the two add up to `epsilon`."""
        return self.epsilon - self.threshold_epsilon

    @property
    def threshold_scale(self) -> float:
        """Scale of the threshold's Laplace noise, Δ/ε₁."""
        return self.sensitivity / self.threshold_epsilon

    @property
    def value_scale(self) -> float:
        """Scale of each value's Laplace noise, 2cΔ/ε₂ (cΔ/ε₂ when monotone)."""
        return self._uses * self.sensitivity / self.value_epsilon

    def event(self) -> Event:
        """The event of one session, however many questions it answers."""
        return PureDP(epsilon=self.epsilon)

    def session(self) -> AboveThresholdSession:
        """Start a run with fresh noise; every run is one `event`."""
        return AboveThresholdSession(self, self.rng.new_stream("sparse-vector"))

    @observable_release
    def release(self, values: Numbers) -> npt.NDArray[np.bool_]:
        """One whole session on the values in order: answers up to and including the last positive one."""
        array = finite_array(values, name="values")
        if array.ndim != 1:
            raise InvalidArgument(f"values must be a vector, got {array.ndim} dimensions. Flatten them.")
        session = self.session()
        answers: list[bool] = []
        for value in array:
            if session.is_over:
                break
            answers.append(session.ask(float(value)))
        return np.array(answers, dtype=np.bool_)


# ----------------------------------------------------------------------------------------------------------------------
# Randomized response: every record is randomized on its own, before anybody collects it.
#
# References:
#     Warner 1965. Kairouz, Oh, Viswanath 2014, "Extremal mechanisms for local differential privacy" (k answers).
# ----------------------------------------------------------------------------------------------------------------------


_UNIT = 1 << 62


@dataclass(frozen=True, kw_only=True)
class RandomizedResponseMechanism:
    """The truth with probability e^ε/(e^ε + k − 1), otherwise one of the other k − 1 answers at random. Exact.

    Guarantee: each record's answer is ε-private in the local model, under replace-one of that record. A value that
    is not a declared category is answered by a category at random, hence tells nothing.

    Args:
        epsilon: > 0.
        categories: the possible answers, ≥ 2, declared, never read from the data.
        rng: where the coins come from; by default a fresh key of this object's own.

    Example:
        >>> mechanism = RandomizedResponseMechanism(epsilon=1.0, categories=("yes", "no"))
        >>> round(mechanism.truth_probability, 4), len(mechanism.release(["yes", "no", "no"]))
        (0.7311, 3)
    """

    epsilon: float
    categories: tuple[Hashable, ...] = (False, True)
    rng: KeyedRNG = field(default_factory=KeyedRNG, repr=False, compare=False)

    def __post_init__(self) -> None:
        checks.positive(epsilon=self.epsilon)
        checks.in_range(2.0**-40, math.inf, epsilon=self.epsilon, hint="Coins have 62 bits.")
        distinct = len(set(self.categories))
        if distinct != len(self.categories) or distinct < 2:
            raise InvalidArgument(
                f"categories must be at least two different answers, got {len(self.categories)} of which {distinct} "
                "differ. Declare every possible answer once."
            )

    @property
    def _threshold(self) -> int:
        # Rounded down, so that the odds of truth against any one other answer never exceed e^ε.
        with localcontext() as context:
            context.prec = 60
            odds = Decimal(self.epsilon).exp()
            return min(int(odds / (odds + len(self.categories) - 1) * _UNIT), _UNIT - 1)

    @property
    def truth_probability(self) -> float:
        """Probability that an answer is the record's own."""
        return self._threshold / _UNIT

    def event(self) -> Event:
        """The event of one record's answer."""
        return RandomizedResponseEvent(epsilon=self.epsilon, categories=len(self.categories))

    @observable_release
    def release(self, values: Iterable[object]) -> npt.NDArray[np.generic]:
        """One randomized answer for each value, in order."""
        codes = category_codes(values, self.categories)
        stream = self.rng.new_stream("randomized-response")
        truthful = uniform_below(_UNIT, len(codes), stream) < self._threshold
        shift = 1 + uniform_below(len(self.categories) - 1, len(codes), stream)
        anything = uniform_below(len(self.categories), len(codes), stream)
        answers = np.where(truthful, codes, (codes + shift) % len(self.categories))
        return np.array(self.categories)[np.where(codes < 0, anything, answers)]

    def estimate(self, answers: Iterable[object]) -> FloatArray:
        """Unbiased shares of the categories among the records, from their answers (post-processing).

        Noise can make a share negative; shares sum to 1.
        """
        codes = category_codes(answers, self.categories)
        if not len(codes) or (codes < 0).any():
            raise InvalidArgument("answers must be at least one declared category. Give what `release` returned.")
        observed = np.bincount(codes, minlength=len(self.categories)) / len(codes)
        other = (1.0 - self.truth_probability) / (len(self.categories) - 1)
        return (observed - other) / (self.truth_probability - other)
