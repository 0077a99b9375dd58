"""The median with noise that follows the data: smooth sensitivity, where local sensitivity is not private.

The local sensitivity of a median, how far it moves when one record of *these* data changes, may be tiny where its
global sensitivity is the whole range. Noise of its scale is not private: it may be 0 with neighbors where it is not.
Smooth sensitivity is the least bound of it that changes by a factor of e^β at most between neighbors.

Proof: docs/proofs/smooth-sensitivity.md.

References:
    Nissim, Raskhodnikova, Smith 2007, "Smooth sensitivity and sampling in private data analysis", sections 2 and 3.1.
"""

import math
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from sordino import checks
from sordino.errors import InvalidArgument
from sordino.events import ApproximateDP, Event
from sordino.mechanisms.base import Bounds, FloatArray, Numbers, checked_bounds, to_float_array
from sordino.mechanisms.samplers import laplace
from sordino.randomness import KeyedRNG


def _sorted_with_bounds(values: Numbers, bounds: Bounds) -> tuple[FloatArray, int]:
    """Sorted values between as many copies of the bounds as can be asked for, and the index of the median."""
    low, high = checked_bounds(bounds)
    listed = to_float_array(values, "values").ravel()
    if len(listed) == 0:
        raise InvalidArgument("values must hold at least one number: how many is public here. Give the records.")
    inside = np.clip(np.where(np.isnan(listed), low / 2 + high / 2, listed), low, high)
    count = len(inside)
    padded = np.concatenate([np.full(count + 1, low), np.sort(inside), np.full(count + 1, high)])
    return padded, count + 1 + (count - 1) // 2


def local_sensitivity_of_median(values: Numbers, bounds: Bounds) -> float:
    """How far the lower median moves at most when one of these values is replaced. Not private, nor is its size.

    Example:
        >>> local_sensitivity_of_median([0.1, 0.5, 0.6], (0.0, 1.0))
        0.4
    """
    padded, middle = _sorted_with_bounds(values, bounds)
    return float(max(padded[middle + 1] - padded[middle], padded[middle] - padded[middle - 1]))


def smooth_sensitivity_of_median(values: Numbers, bounds: Bounds, beta: float) -> float:
    """The largest e^(−βk) times the local sensitivity of data that differ in k values. Not private by itself.

    After k replacements the median's neighbors may be any values that were t − k − 1 and t positions away from it,
    0 ≤ t ≤ k + 1. Terms past k = ln(range/found)/β can't matter, so most data need few.

    Args:
        values: [n], n public; missing ones are the middle of the bounds, others are cut to them.
        bounds: (lowest, highest), public.
        beta: β > 0.

    Example:
        >>> smooth_sensitivity_of_median([0.1, 0.5, 0.6], (0.0, 1.0), beta=10.0)
        0.4
    """
    beta = checks.positive(beta=beta)
    padded, middle = _sorted_with_bounds(values, bounds)
    count, whole = (len(padded) - 2) // 3, float(padded[-1] - padded[0])
    found = 0.0
    for changed in range(count + 1):
        damped = math.exp(-beta * changed)
        if damped * whole <= found:
            break
        upper = padded[middle : middle + changed + 2]
        lower = padded[middle - changed - 1 : middle + 1]
        found = max(found, damped * float((upper - lower).max()))
    return found


@dataclass(frozen=True, kw_only=True)
class SmoothMedian:
    """The lower median plus Laplace noise of scale 2·S/ε, S the smooth sensitivity for `beta`.

    Guarantee: one release is (epsilon, delta)-private for one value replaced; the number of values is public. The noise
    is drawn in floating point, so this is a study, not a mechanism for releases: `PrivateQuantile` is one.

    Args:
        epsilon: > 0.
        delta: in (0, 1).
        bounds: (lowest, highest) value, public.
        rng: where the noise comes from; by default a fresh key of this object's own.

    Example:
        >>> median = SmoothMedian(epsilon=1.0, delta=1e-6, bounds=(0.0, 1.0))
        >>> round(median.beta, 4)
        0.0368
        >>> 0.45 < median.release(np.linspace(0.4, 0.6, 10_001)) < 0.55
        True
    """

    epsilon: float
    delta: float
    bounds: Bounds
    rng: KeyedRNG = field(default_factory=KeyedRNG, repr=False, compare=False)

    def __post_init__(self) -> None:
        checks.positive(epsilon=self.epsilon)
        checks.probability(zero=False, one=False, delta=self.delta)
        checked_bounds(self.bounds)

    @cached_property
    def beta(self) -> float:
        """The largest β ≤ ε/2 with (ε/2 + β)/(e^β − 1) ≥ ln(1/δ) + ε/2, from below."""
        half = self.epsilon / 2
        needed = math.log(1 / self.delta) + half
        low, high = 0.0, half
        for _ in range(60):
            middle = (low + high) / 2
            if half + middle >= needed * math.expm1(middle) * (1 + 1e-12):
                low = middle
            else:
                high = middle
        return low

    def event(self) -> Event:
        """The event of one release, under replace-one."""
        return ApproximateDP(epsilon=self.epsilon, delta=self.delta)

    def scale(self, values: Numbers) -> float:
        """Scale of the noise for these values. Not private."""
        return 2.0 * smooth_sensitivity_of_median(values, self.bounds, self.beta) / self.epsilon

    def release(self, values: Numbers) -> float:
        """The noisy median of values [n], not cut to the bounds."""
        padded, middle = _sorted_with_bounds(values, self.bounds)
        noise = float(laplace(1, self.rng.new_stream("smooth-median"))[0])
        return float(padded[middle] + self.scale(values) * noise)
