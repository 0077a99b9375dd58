"""Strategies fitted to a number of steps: the best bands, the best few buffers.

Both minimize log(sensitivity² · Σ_t h_t w_t²), where w = a/c is the series of A C⁻¹ and h weighs the steps. With λ the
adjoint of the division, Σ_t h_t w_t² has derivative −Σ_t λ_t w_{t−k} in c_k. What comes out is only a choice: privacy
is computed from the coefficients found, whether or not they are the best.

References:
    Choquette-Choo et al. 2023, section 4 (bands). Kalinin, Lampert 2024 (Toeplitz). Dvijotham et al. 2024, McMahan
    et al. 2024 (buffers).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from sordino import checks
from sordino.errors import InvalidArgument
from sordino.events import Event
from sordino.mechanisms.correlated.mechanism import (
    LARGEST_MATRIX,
    CorrelatedGaussianMechanism,
    CyclicPoisson,
    Participation,
    SingleParticipation,
    sensitivity,
)
from sordino.mechanisms.correlated.strategies import (
    BandedToeplitz,
    BufferedToeplitz,
    FloatArray,
    Strategy,
    noise_matrix,
    prefix_workload,
    ratio,
    series_product,
    square_root_coefficients,
    toeplitz,
)

_HOPELESS = 1e10


def optimize_banded(bands: int, *, steps: int, momentum: float = 0.0, objective: str = "mean") -> BandedToeplitz:
    """The banded Toeplitz strategy with the least error on prefix sums, its column normed to 1.

    The same one is best for any participation with at least `bands` steps between two of a record's.

    Args:
        bands: 1 ≤ bands ≤ steps; 1 is independent noise.
        steps: ≥ 1.
        momentum: of the optimizer, in [0, 1).
        objective: ``mean`` squared error over the steps, or ``max``, the last step's.

    Example:
        >>> from sordino.mechanisms.correlated.optimization import mean_error
        >>> round(mean_error(optimize_banded(8, steps=64)), 6)
        2.663975
    """
    if checks.integer(1, bands=bands) > checks.integer(1, steps=steps):
        raise InvalidArgument(f"bands must be at most steps ({steps}), got {bands}. Use fewer bands.")
    error = _error(steps, momentum, objective)

    def loss(below: FloatArray) -> tuple[float, FloatArray]:
        column = np.concatenate([[1.0], below])
        inverse = ratio(np.ones(1), column, steps)
        if _grows(inverse):
            return _HOPELESS, np.zeros_like(below)
        value, gradient = error(column, inverse)
        size = float(column @ column)
        return np.log(size * value), (2 * column / size + gradient / value)[1:]

    start = np.asarray(square_root_coefficients(bands))[1:]
    column = np.concatenate([[1.0], _minimized(loss, start)])
    return BandedToeplitz(coefficients=tuple((column / np.linalg.norm(column)).tolist()), steps=steps)


def optimize_buffered(
    buffers: int,
    *,
    steps: int,
    participation: Participation | None = None,
    momentum: float = 0.0,
    objective: str = "max",
) -> BufferedToeplitz:
    """The buffered Toeplitz strategy with the least error on prefix sums; three or four buffers are usually enough.

    Args:
        buffers: ≥ 1.
        steps: ≥ 2.
        participation: a single one by default.
        momentum: of the optimizer, in [0, 1).
        objective: ``mean`` squared error over the steps, or ``max``, the last step's.

    Example:
        >>> from sordino.mechanisms.correlated.optimization import max_error
        >>> round(max_error(optimize_buffered(3, steps=1000)), 5)
        3.26992
    """
    checks.integer(1, buffers=buffers)
    checks.integer(2, steps=steps)
    error, size = _error(steps, momentum, objective), _size(steps, participation or SingleParticipation())
    ages = np.arange(steps - 1)[:, None]

    def unpacked(point: FloatArray) -> BufferedToeplitz:
        decays, scales = 1 / (1 + np.exp(-point[:buffers])), np.exp(point[buffers:])
        return BufferedToeplitz(decays=tuple(decays.tolist()), scales=tuple(scales.tolist()), steps=steps)

    def loss(point: FloatArray) -> tuple[float, FloatArray]:
        strategy = unpacked(point)
        decays, scales = np.asarray(strategy.decays), np.asarray(strategy.scales)
        inverse, column = strategy.noise_column(), strategy.column()
        if _grows(inverse):
            return _HOPELESS, np.zeros_like(point)
        (value, gradient), (square, slope) = error(column, inverse), size(column)
        below = (slope / square + gradient / value)[1:]
        powers = decays**ages
        moved = np.vstack([np.zeros((1, buffers)), ages[1:] * powers[:-1]])
        return np.log(square * value), np.concatenate(
            [below @ moved * scales * decays * (1 - decays), powers.T @ below * scales]
        )

    # Rates spread evenly in the logarithm between one step and all of them: the moments of 1/√(1 − x).
    rates = np.geomspace(1 / steps, 0.5, buffers + 2)[1:-1] if buffers > 1 else np.array([steps**-0.5])
    start = np.concatenate([np.log((1 - rates) / rates), np.log(0.3 * np.sqrt(rates))])
    return unpacked(_minimized(loss, start))


def _error(steps: int, momentum: float, objective: str) -> Callable[[FloatArray, FloatArray], tuple[float, FloatArray]]:
    """(c, 1/c) ↦ Σ_t h_t w_t² with w = a/c, and its derivative in every entry of c."""
    checks.one_of(("mean", "max"), objective=objective)
    workload = prefix_workload(steps, momentum=momentum)
    weights = np.ones(steps) if objective == "max" else np.arange(steps, 0, -1) / steps

    def error(column: FloatArray, inverse: FloatArray) -> tuple[float, FloatArray]:
        series = series_product(inverse, workload, steps)
        adjoint = series_product(inverse, (2 * weights * series)[::-1], steps)
        # Σ_t λ_t w_{t−k} for k = 0, 1, …: the adjoint is kept reversed.
        derivative = -series_product(adjoint, series, steps)[::-1]
        return float(weights @ series**2), derivative[: len(column)]

    return error


def _size(steps: int, participation: Participation) -> Callable[[FloatArray], tuple[float, FloatArray]]:
    """Column ↦ squared norm of its copies shifted by 0, b, 2b, … and added, and the derivative."""
    starts = range(
        0, participation.min_separation * participation.max_participations(steps), participation.min_separation
    )

    def size(column: FloatArray) -> tuple[float, FloatArray]:
        total, derivative = np.zeros(steps), np.zeros(steps)
        for start in starts:
            total[start:] += column[: steps - start]
        for start in starts:
            derivative[: steps - start] += 2 * total[start:]
        return float(total @ total), derivative

    return size


def _grows(inverse: FloatArray) -> bool:
    """Whether C⁻¹ grows with the steps: a bad strategy, whose derivative would overflow."""
    return not np.isfinite(inverse).all() or float(np.abs(inverse).max()) > 1e6


def _minimized(loss: Callable[[FloatArray], tuple[float, FloatArray]], start: FloatArray) -> FloatArray:
    from scipy.optimize import minimize

    if not len(start):
        return start
    options = {"maxiter": 3000, "ftol": 1e-15, "gtol": 1e-10, "maxcor": 20}
    return np.asarray(minimize(loss, start, jac=True, method="L-BFGS-B", options=options).x)


# ----------------------------------------------------------------------------------------------------------------------
# How much noise a strategy leaves in the prefix sums, which is what the model's positions are made of.
#
# The noise of the workload's rows is A C⁻¹ Z: row t has variance Σ_s (A C⁻¹)[t, s]² for unit Z. A record's privacy
# fixes the size of Z to noise multiplier × sensitivity, so strategies compare by sensitivity × root of the variance.
# ----------------------------------------------------------------------------------------------------------------------


def prefix_variances(strategy: Strategy, *, momentum: float = 0.0) -> FloatArray:
    """Variance of the noise in each step's model position, for unit Z and learning rate 1; shape (steps,).

    Args:
        strategy: the correlation of the noise.
        momentum: of the optimizer, in [0, 1).

    Example:
        >>> from sordino.mechanisms.correlated.strategies import IndependentNoise
        >>> prefix_variances(IndependentNoise(steps=3)).tolist()
        [1.0, 2.0, 3.0]
    """
    workload = prefix_workload(strategy.steps, momentum=momentum)
    column = strategy.noise_column()
    if column is not None:
        return np.cumsum(series_product(column, workload, strategy.steps) ** 2)
    if strategy.steps > LARGEST_MATRIX:
        raise InvalidArgument(
            f"steps must be at most {LARGEST_MATRIX} for a strategy that is not Toeplitz, got {strategy.steps}. "
            "Use a Toeplitz strategy."
        )
    return np.sum((toeplitz(workload) @ noise_matrix(strategy)) ** 2, axis=1)


def mean_error(strategy: Strategy, participation: Participation | None = None, *, momentum: float = 0.0) -> float:
    """Sensitivity × root mean variance over the steps, at noise multiplier 1 and clipping norm 1.

    `participation` is a single one by default.
    """
    size = sensitivity(strategy, participation or SingleParticipation())
    return size * math.sqrt(float(np.mean(prefix_variances(strategy, momentum=momentum))))


def max_error(strategy: Strategy, participation: Participation | None = None, *, momentum: float = 0.0) -> float:
    """Sensitivity × root of the largest variance of a step, at noise multiplier 1 and clipping norm 1."""
    size = sensitivity(strategy, participation or SingleParticipation())
    return size * math.sqrt(float(np.max(prefix_variances(strategy, momentum=momentum))))


# ----------------------------------------------------------------------------------------------------------------------
# Choosing the number of bands by what it does to the error at the target ε.
#
# More bands cancel more noise, but a batch comes from a smaller group: less amplification, and a larger noise
# multiplier. One band is DP-SGD. Accounting lives elsewhere; it comes in as a function.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class NoiseCandidate:
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
) -> tuple[NoiseCandidate, ...]:
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
            strategy=optimize_banded(count, steps=steps, momentum=momentum),
            participation=CyclicPoisson(groups=count, sample_rate=sample_rate),
            noise_multiplier=1.0,
            l2_sensitivity=l2_sensitivity,
        )
        noise = calibrate(lambda noise, draft=draft: replace(draft, noise_multiplier=noise).event())
        mechanism = replace(draft, noise_multiplier=noise)
        error = mechanism.stddev * math.sqrt(float(np.mean(prefix_variances(draft.strategy, momentum=momentum))))
        choices.append(NoiseCandidate(bands=draft.strategy.bands, mechanism=mechanism, error=error))
    return tuple(sorted(choices, key=lambda choice: choice.error))
