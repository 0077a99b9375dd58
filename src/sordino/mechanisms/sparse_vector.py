"""The sparse vector technique: many questions, few of them above a threshold, and only those cost (floor 1).

References:
    Lyu, Su, Li 2017, "Understanding the sparse vector technique for differential privacy", algorithm 7 and
    the allocation of its budget; their table of broken variants says what must not be changed.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sordino import checks
from sordino.errors import BudgetExceeded, InvalidArgument
from sordino.events import Event, PureDP
from sordino.mechanisms.continuous import laplace
from sordino.mechanisms.releases import recordable
from sordino.mechanisms.values import Numbers, finite_array
from sordino.randomness import Randomness, Stream

__all__ = ["AboveThreshold", "AboveThresholdSession"]


class AboveThresholdSession:
    """One run of the technique: questions may be chosen after earlier answers. Made by `AboveThreshold.session`."""

    def __init__(self, mechanism: "AboveThreshold", stream: Stream) -> None:
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

    @recordable
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
        randomness: where the noise comes from; by default a fresh key of this object's own.

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
    randomness: Randomness = field(default_factory=Randomness, repr=False, compare=False)

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
        """ε₁, the threshold's share: ε₁ : ε₂ = 1 : (2c)^⅔ (c^⅔ when monotone) minimises the noise of the comparison."""
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
        return AboveThresholdSession(self, self.randomness.fresh("sparse-vector"))

    @recordable
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
