"""The generalised exponential mechanism: candidates whose errors have sensitivities of their own (floor 1).

The exponential mechanism scales its noise by the largest sensitivity of all candidates; here a candidate with a
small sensitivity is chosen as precisely as if the others were not there.

References:
    Raskhodnikova, Smith 2016, "Lipschitz extensions for node-private graph statistics and the generalized
    exponential mechanism".
"""

import math
from dataclasses import dataclass, field

import numpy as np

from sordino import checks
from sordino.errors import InvalidArgument
from sordino.events import Event
from sordino.mechanisms.exponential import ExponentialMechanism, clean_scores
from sordino.mechanisms.values import FloatArray, Numbers
from sordino.randomness import Randomness

__all__ = ["GeneralizedExponentialMechanism"]


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
        randomness: where the noise comes from; by default a fresh key of this object's own.

    Example:
        >>> mechanism = GeneralizedExponentialMechanism(epsilon=1.0, sensitivities=(1, 2, 50), failure_probability=0.05)
        >>> mechanism.probabilities([10, 5, 0]).round(6).tolist()
        [0.621373, 0.365214, 0.013413]
    """

    epsilon: float
    sensitivities: tuple[float, ...]
    failure_probability: float = 0.05
    randomness: Randomness = field(default_factory=Randomness, repr=False, compare=False)

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
        """The law of the choice. It is as private as the errors are: for tests and teaching, not for release."""
        return self._inner().probabilities(-self.normalized_errors(errors))

    def release(self, errors: Numbers) -> int:
        """The position of the chosen candidate."""
        return self._inner().release(-self.normalized_errors(errors))

    def _inner(self) -> ExponentialMechanism:
        return ExponentialMechanism(epsilon=self.epsilon, sensitivity=1.0, randomness=self.randomness)
