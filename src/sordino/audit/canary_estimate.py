"""An estimate of ε from one run with canaries of random direction (room `audit`, floor 4): not a bound.

Each canary's update is a random unit vector times the clipping norm. Without it in the training, the cosine between it
and what the model moved by is N(0, 1/d); with it, N(μ, s²), which is fitted. ε is that of the two normal laws.

References:
    Andrew et al. 2023, algorithm 2.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import ndtr

from sordino import checks
from sordino.errors import InvalidArgument
from sordino.randomness import Randomness

__all__ = ["OneShotEstimate", "normal_pair_epsilon", "one_shot"]

_LARGEST_EPSILON = 500.0


@dataclass(frozen=True, kw_only=True)
class OneShotEstimate:
    """About how large ε is, if both laws are normal. It proves nothing.

    Args:
        epsilon: the estimate.
        interval: 95 % of the estimates from canaries drawn again with replacement.
        delta: at this δ.
        canaries: how many cosines were fitted.
    """

    epsilon: float
    interval: tuple[float, float]
    delta: float
    canaries: int

    def __str__(self) -> str:
        low, high = self.interval
        return f"ε is about {self.epsilon:.2f} ({low:.2f} to {high:.2f} over canaries): an estimate, not a bound"


def normal_pair_epsilon(mean: float, deviation: float, *, delta: float, reference_deviation: float = 1.0) -> float:
    """ε at δ of N(mean, deviation²) against N(0, reference_deviation²), the worse of the two directions.

    Args:
        mean: of the first law.
        deviation: of the first law, > 0.
        delta: in (0, 1).
        reference_deviation: > 0.

    Example:
        >>> round(normal_pair_epsilon(1.0, 1.0, delta=1e-5), 3)
        4.377
    """
    checks.positive(deviation=deviation)
    checks.positive(reference_deviation=reference_deviation)
    checks.probability(zero=False, one=False, delta=delta)
    m, s = mean / reference_deviation, deviation / reference_deviation

    def worst(epsilon: float) -> float:
        return max(_delta(epsilon, (m, s), (0.0, 1.0)), _delta(epsilon, (0.0, 1.0), (m, s)))

    low, high = 0.0, _LARGEST_EPSILON
    if worst(low) <= delta:
        return 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if worst(middle) > delta else (low, middle)
    return low


def _delta(epsilon: float, first: tuple[float, float], second: tuple[float, float]) -> float:
    """P(S) − e^ε Q(S) on S = {log p/q > ε}, which a quadratic bounds: a·x² + b·x + c > 0."""
    (m, s), (n, t) = first, second
    a = (1 / t**2 - 1 / s**2) / 2
    b = m / s**2 - n / t**2
    c = math.log(t / s) - (m / s) ** 2 / 2 + (n / t) ** 2 / 2 - epsilon
    if abs(a) < 1e-14:
        if b == 0:
            return max(0.0, 1 - math.exp(epsilon)) if c > 0 else 0.0
        edges, inside = (-c / b, math.copysign(math.inf, b)), True
    else:
        square = b * b - 4 * a * c
        if square <= 0:
            return 0.0 if a < 0 else max(0.0, -math.expm1(epsilon))
        # The root without cancellation first, the other from the product of the two.
        far = -(b + math.copysign(math.sqrt(square), b)) / 2
        edges, inside = (far / a, c / far), a < 0
    low, high = min(edges), max(edges)

    def mass(mean: float, deviation: float) -> float:
        lower, upper = (low - mean) / deviation, (high - mean) / deviation
        if inside:
            # In the upper tail the mirrored difference keeps its digits.
            return float(ndtr(-lower) - ndtr(-upper)) if lower > 0 else float(ndtr(upper) - ndtr(lower))
        return float(ndtr(lower) + ndtr(-upper))

    q = mass(n, t)
    return max(0.0, mass(m, s) - (math.exp(epsilon + math.log(q)) if q > 0 else 0.0))


def one_shot(
    cosines: ArrayLike, *, dimension: int, delta: float, draws: int = 200, randomness: Randomness | None = None
) -> OneShotEstimate:
    """About how large ε is, from the cosines of the canaries that were in.

    Guarantee: none. With few canaries the estimate is far too high (about 2.7 for a true 1.0 with 100 of them), and it
    assumes normal laws.

    Args:
        cosines: [k] cosines between each canary and what the model moved by, k ≥ 3.
        dimension: of the parameters, ≥ 1.
        delta: in (0, 1).
        draws: resamplings for the interval, ≥ 20.
        randomness: for the resamplings.

    Example:
        >>> estimate = one_shot([0.11, 0.09, 0.10, 0.12, 0.08], dimension=10_000, delta=1e-6)
        >>> estimate.canaries, estimate.epsilon > 10
        (5, True)

    References:
        Andrew et al. 2023, section 3.
    """
    values = np.asarray(cosines, dtype=np.float64)
    if values.ndim != 1 or len(values) < 3 or not np.isfinite(values).all():
        raise InvalidArgument("cosines must be a vector of at least 3 finite numbers, got another. Use more canaries.")
    checks.integer(1, dimension=dimension)
    count, deviation = checks.integer(20, draws=draws), dimension**-0.5

    def estimate(sample: np.ndarray) -> float:
        spread = max(float(sample.std(ddof=1)), 1e-9 * deviation)
        return normal_pair_epsilon(float(sample.mean()), spread, delta=delta, reference_deviation=deviation)

    stream = (Randomness() if randomness is None else randomness).fresh("one-shot resampling")
    places = (stream.uniform(count * len(values)) * len(values)).astype(int).reshape(count, len(values))
    low, high = np.quantile([estimate(values[row]) for row in places], [0.025, 0.975])
    return OneShotEstimate(
        epsilon=estimate(values), interval=(float(low), float(high)), delta=delta, canaries=len(values)
    )
