"""Strategies fitted to a number of steps: the best bands, the best few buffers (floor 1).

Both minimise log(sensitivity² · Σ_t h_t w_t²), where w = a/c is the series of A C⁻¹ and h weighs the steps. With λ the
adjoint of the division, Σ_t h_t w_t² has derivative −Σ_t λ_t w_{t−k} in c_k. What comes out is only a choice: privacy
is computed from the coefficients found, whether or not they are the best.

References:
    Choquette-Choo et al. 2023, section 4 (bands). Kalinin, Lampert 2024 (Toeplitz). Dvijotham et al. 2024, McMahan
    et al. 2024 (buffers).
"""

from collections.abc import Callable

import numpy as np

from sordino import checks
from sordino.errors import InvalidArgument
from sordino.mechanisms.correlated.participation import Participation, SingleParticipation
from sordino.mechanisms.correlated.series import FloatArray, prefix_workload, product, ratio
from sordino.mechanisms.correlated.strategies import BandedToeplitz, BufferedToeplitz, square_root_coefficients

__all__ = ["optimal_banded", "optimal_buffered"]

_HOPELESS = 1e10


def optimal_banded(bands: int, *, steps: int, momentum: float = 0.0, objective: str = "mean") -> BandedToeplitz:
    """The banded Toeplitz strategy with the least error on prefix sums, its column normed to 1.

    The same one is best for any participation with at least `bands` steps between two of a record's.

    Args:
        bands: 1 ≤ bands ≤ steps; 1 is independent noise.
        steps: ≥ 1.
        momentum: of the optimizer, in [0, 1).
        objective: ``mean`` squared error over the steps, or ``max``, the last step's.

    Example:
        >>> from sordino.mechanisms.correlated.prefix_error import mean_error
        >>> round(mean_error(optimal_banded(8, steps=64)), 6)
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
    column = np.concatenate([[1.0], _minimised(loss, start)])
    return BandedToeplitz(coefficients=tuple((column / np.linalg.norm(column)).tolist()), steps=steps)


def optimal_buffered(
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
        >>> from sordino.mechanisms.correlated.prefix_error import max_error
        >>> round(max_error(optimal_buffered(3, steps=1000)), 5)
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
    return unpacked(_minimised(loss, start))


def _error(steps: int, momentum: float, objective: str) -> Callable[[FloatArray, FloatArray], tuple[float, FloatArray]]:
    """(c, 1/c) ↦ Σ_t h_t w_t² with w = a/c, and its derivative in every entry of c."""
    checks.one_of(("mean", "max"), objective=objective)
    workload = prefix_workload(steps, momentum=momentum)
    weights = np.ones(steps) if objective == "max" else np.arange(steps, 0, -1) / steps

    def error(column: FloatArray, inverse: FloatArray) -> tuple[float, FloatArray]:
        series = product(inverse, workload, steps)
        adjoint = product(inverse, (2 * weights * series)[::-1], steps)
        # Σ_t λ_t w_{t−k} for k = 0, 1, …: the adjoint is kept reversed.
        derivative = -product(adjoint, series, steps)[::-1]
        return float(weights @ series**2), derivative[: len(column)]

    return error


def _size(steps: int, participation: Participation) -> Callable[[FloatArray], tuple[float, FloatArray]]:
    """Column ↦ squared norm of its copies shifted by 0, b, 2b, … and added, and the derivative."""
    starts = range(0, participation.separation * participation.most(steps), participation.separation)

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


def _minimised(loss: Callable[[FloatArray], tuple[float, FloatArray]], start: FloatArray) -> FloatArray:
    from scipy.optimize import minimize

    if not len(start):
        return start
    options = {"maxiter": 3000, "ftol": 1e-15, "gtol": 1e-10, "maxcor": 20}
    return np.asarray(minimize(loss, start, jac=True, method="L-BFGS-B", options=options).x)
