"""The exponential mechanism: choose a candidate with probability growing with its score (floor 1).

References:
    McSherry, Talwar 2007. Durfee, Rogers 2019, "Practical differentially private top-k selection" (bounded range).
    Cesar, Rogers 2021, "Bounding, concentrating, and truncating" (ε²/8-zCDP).
"""

from dataclasses import dataclass, field

import numpy as np

from sordino import checks
from sordino.errors import InvalidArgument
from sordino.events import BoundedRange, Event
from sordino.mechanisms.continuous import gumbel
from sordino.mechanisms.releases import recordable
from sordino.mechanisms.values import Bounds, FloatArray, Numbers, checked_bounds
from sordino.randomness import Randomness

__all__ = ["ExponentialMechanism", "clean_scores"]


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
class ExponentialMechanism:
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
        randomness: where the noise comes from; by default a fresh key of this object's own.

    Example:
        >>> mechanism = ExponentialMechanism(epsilon=1.0, sensitivity=1.0)
        >>> mechanism.probabilities([0, 1, 2]).round(6).tolist()
        [0.186324, 0.307196, 0.50648]
    """

    epsilon: float
    sensitivity: float
    monotone: bool = False
    score_bounds: Bounds | None = None
    randomness: Randomness = field(default_factory=Randomness, repr=False, compare=False)

    def __post_init__(self) -> None:
        checks.positive(epsilon=self.epsilon)
        checks.positive(sensitivity=self.sensitivity)
        if self.score_bounds is not None:
            checked_bounds(self.score_bounds, name="score_bounds")

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
        """The law of the choice. It is as private as the scores are: for tests and teaching, not for release."""
        logs = self.log_weights(scores, measures)
        weights = np.exp(logs - logs.max())
        return weights / weights.sum()

    @recordable
    def release(self, scores: Numbers, measures: Numbers | None = None) -> int:
        """The position of the chosen candidate."""
        logs = self.log_weights(scores, measures)
        return int(np.argmax(logs + gumbel(logs.size, self.randomness.fresh("exponential"))))
