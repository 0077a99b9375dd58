"""Rows of length 1 in float32, made a chunk at a time, for tables too large for several copies (floor 4)."""

from collections.abc import Iterator
from typing import cast

import numpy as np
import numpy.typing as npt
from sklearn.base import BaseEstimator
from sklearn.utils.validation import validate_data

from sordino.estimators.intake import matrix, normalised_rows
from sordino.mechanisms.values import Numbers

__all__ = ["chunks", "unit_rows_in_float32"]

_CHUNK = 4096


def chunks(records: int) -> Iterator[slice]:
    """Slices of a few thousand records that cover all of them."""
    return (slice(start, start + _CHUNK) for start in range(0, records, _CHUNK))


def unit_rows_in_float32(
    X: Numbers, *, estimator: BaseEstimator, reset: bool
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
    """Rows scaled to length 1, each by itself, as a fresh float32 [n, d], and which are whole; the others are 0.

    A float32 matrix is read a chunk at a time; anything else is first taken in as by `matrix`.
    """
    if isinstance(X, np.ndarray) and X.dtype == np.float32 and X.ndim == 2 and X.shape[1]:
        validate_data(estimator, cast("str", X), reset=reset, skip_check_array=True)  # its stub knows only the default
        whole, present = X, np.zeros(len(X), dtype=np.bool_)
        for part in chunks(len(X)):
            present[part] = np.isfinite(X[part]).all(axis=1)
    else:
        whole, present = matrix(X, estimator=estimator, reset=reset)
    rows = np.empty(whole.shape, dtype=np.float32)
    for part in chunks(len(whole)):
        # Lengths are measured in float64: entries near the ends of float32's range must not overflow.
        kept = np.where(present[part, None], whole[part], 0.0).astype(np.float64)
        rows[part] = normalised_rows(kept)
    return rows, present
