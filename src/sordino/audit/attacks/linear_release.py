"""From sums back to records (floor 4): two sums that differ in one record, and least squares on many noisy ones."""

from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sordino.errors import InvalidArgument

__all__ = ["Reconstruction", "difference", "reconstruct_bits", "solve_release"]

Floats = NDArray[np.float64]

_RANK_TOLERANCE = 1e-9


@dataclass(frozen=True, kw_only=True, eq=False)
class Reconstruction:
    """Records as the answers have them.

    Args:
        values: an estimate for each record, within the bounds.
        determined: whether the queries fix the record's value when answers are exact.
        residual: root mean square of what the estimates leave unexplained; about the noise's standard deviation.
    """

    values: Floats
    determined: NDArray[np.bool_]
    residual: float


def difference(total: float, total_without: float) -> float:
    """One person's value, from two exact sums that differ in that person.

    Example:
        >>> difference(251_000.0, 198_500.0)
        52500.0
    """
    return float(total) - float(total_without)


def solve_release(queries: ArrayLike, answers: ArrayLike, *, low: float = 0.0, high: float = 1.0) -> Reconstruction:
    """Least squares on released linear statistics, cut to the bounds.

    Args:
        queries: (statistics, records): row i says with which weight each record counts in statistic i.
        answers: (statistics,), exact or noisy.
        low: smallest possible value of a record.
        high: largest possible value.

    Example:
        >>> found = solve_release([[1, 1, 1], [0, 1, 1]], [2.0, 1.0])
        >>> found.determined.tolist(), round(float(found.values[0]), 6)
        ([True, False, False], 1.0)

    References:
        Dinur, Nissim 2003, "Revealing information while preserving privacy"; Dwork, McSherry, Talwar 2007, for the
        least-squares decoder.
    """
    weights, told = np.asarray(queries, dtype=np.float64), np.asarray(answers, dtype=np.float64)
    if weights.ndim != 2 or told.shape != weights.shape[:1] or not weights.size:
        raise InvalidArgument(
            f"queries and answers must have shapes (statistics, records) and (statistics,), got {weights.shape} and "
            f"{told.shape}. Give one row of weights a statistic."
        )
    if not low < high:
        raise InvalidArgument(f"low must be below high, got {low} and {high}. Swap them.")
    _, singular, directions = np.linalg.svd(weights, full_matrices=False)
    known = directions[singular > _RANK_TOLERANCE * singular.max(initial=0.0)]
    # A unit vector in the row space is a combination of the released statistics: its answer is the record itself.
    determined = (known**2).sum(axis=0) > 1 - 1e-6
    middle = (low + high) / 2
    shift = np.linalg.lstsq(weights, told - weights.sum(axis=1) * middle, rcond=_RANK_TOLERANCE)[0]
    values = middle + shift
    residual = float(np.sqrt(np.mean((told - weights @ values) ** 2)))
    return Reconstruction(
        values=np.clip(values, low, high),
        determined=cast("NDArray[np.bool_]", determined),
        residual=residual,
    )


def reconstruct_bits(queries: ArrayLike, answers: ArrayLike) -> NDArray[np.int64]:
    """One bit a record from counting queries: least squares, then rounding.

    With n records and some more random queries nearly all bits come out while the noise is below about √n; only more
    noise than that, or fewer answers, protects anyone.

    Args:
        queries: (counts, records) of zeros and ones.
        answers: (counts,).

    Returns:
        Bits, (records,).
    """
    return (solve_release(queries, answers).values > 0.5).astype(np.int64)
