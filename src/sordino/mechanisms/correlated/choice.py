"""Choosing the number of bands by what it does to the error at the target ε (floor 1).

More bands cancel more noise, but a batch comes from a smaller group: less amplification, and a larger noise multiplier.
One band is DP-SGD. Accounting lives elsewhere; it comes in as a function.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from sordino import checks
from sordino.errors import InvalidArgument
from sordino.events import Event
from sordino.mechanisms.correlated.mechanism import CorrelatedGaussianMechanism
from sordino.mechanisms.correlated.optimal import optimal_banded
from sordino.mechanisms.correlated.participation import CyclicPoisson
from sordino.mechanisms.correlated.prefix_error import prefix_variances

__all__ = ["NoiseChoice", "choose_correlated_noise"]


@dataclass(frozen=True, kw_only=True)
class NoiseChoice:
    """A mechanism for the target, and what it costs.

    Args:
        bands: number of bands; 1 is independent noise.
        mechanism: with the noise multiplier that meets the target.
        error: standard deviation of the noise in the model's position at learning rate 1, root mean square over the
            steps, on the *sum* of clipped gradients.
    """

    bands: int
    mechanism: CorrelatedGaussianMechanism
    error: float


def choose_correlated_noise(
    *,
    steps: int,
    sample_rate: float,
    calibrate: Callable[[Callable[[float], Event]], float],
    l2_sensitivity: float = 1.0,
    momentum: float = 0.0,
    bands: Sequence[int] | None = None,
) -> tuple[NoiseChoice, ...]:
    """Bands tried, the best first: the first element is the one to use.

    Nothing private is looked at, so the choice costs nothing.

    Args:
        steps: length of the run, ≥ 1.
        sample_rate: the part of all records in an expected batch, in (0, 1].
        calibrate: (noise multiplier ↦ event) ↦ the noise multiplier that meets the target, such as
            `sordino.accounting.calibrate_noise_multiplier` with its target filled in.
        l2_sensitivity: of one step's clipped sum under the declared relation.
        momentum: of the optimizer, in [0, 1).
        bands: candidates, each ≤ steps and ≤ 1/sample_rate; by default powers of two. 1 is always among them.

    Example:
        >>> from sordino.mechanisms.correlated import choose_correlated_noise
        >>> choices = choose_correlated_noise(steps=100, sample_rate=0.1, calibrate=lambda event: 1.0, bands=[10])
        >>> [choice.bands for choice in choices]
        [10, 1]
    """
    checks.integer(1, steps=steps)
    checks.probability(zero=False, sample_rate=sample_rate)
    checks.positive(l2_sensitivity=l2_sensitivity)
    largest = min(steps, math.floor(1 / sample_rate + 1e-9))
    tried = [2**power for power in range(largest.bit_length())] if bands is None else sorted({1, *bands})
    if tried[0] < 1 or tried[-1] > largest:
        raise InvalidArgument(
            f"bands must be from 1 to {largest}, got {tried}. A cycle can't have more groups than that."
        )
    choices = []
    for count in tried:
        draft = CorrelatedGaussianMechanism(
            strategy=optimal_banded(count, steps=steps, momentum=momentum),
            participation=CyclicPoisson(groups=count, sample_rate=sample_rate),
            noise_multiplier=1.0,
            l2_sensitivity=l2_sensitivity,
        )
        choices.append(_calibrated(draft, calibrate, momentum))
    return tuple(sorted(choices, key=lambda choice: choice.error))


def _calibrated(
    draft: CorrelatedGaussianMechanism, calibrate: Callable[[Callable[[float], Event]], float], momentum: float
) -> NoiseChoice:
    def with_noise(noise_multiplier: float) -> CorrelatedGaussianMechanism:
        return CorrelatedGaussianMechanism(
            strategy=draft.strategy,
            participation=draft.participation,
            noise_multiplier=noise_multiplier,
            l2_sensitivity=draft.l2_sensitivity,
        )

    mechanism = with_noise(calibrate(lambda noise_multiplier: with_noise(noise_multiplier).event()))
    error = mechanism.stddev * math.sqrt(float(np.mean(prefix_variances(draft.strategy, momentum=momentum))))
    return NoiseChoice(bands=draft.strategy.bands, mechanism=mechanism, error=error)
