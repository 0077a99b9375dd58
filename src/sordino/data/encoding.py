"""From columns to features and labels, one record at a time (floor 1).

Every row of the result depends on the same row of the file and on the declared schema alone, so that adding or removing
one record of the file changes at most one record of the result. Nothing here raises because of a record.
"""

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float32, Float64, Int64

from sordino.data.records import Records
from sordino.data.schema import Category, Numeric, Schema
from sordino.data.tables import Coded, Column, to_number

__all__ = ["encode", "positions", "to_numbers"]


def encode(columns: Mapping[str, Column], schema: Schema) -> Records:
    """Encode the declared columns; records whose label is not in the label set are left out.

    Args:
        columns: The declared columns and the target, as read from the file.
        schema: The declared schema.

    Returns:
        Records with features (n, schema.width()): numbers in [-1, 1], categories one-hot.
    """
    labels = positions(columns[schema.target], schema.labels)
    keep = np.flatnonzero(labels >= 0)
    features = np.zeros((len(keep), schema.width()), dtype=np.float32)
    start = 0
    for declared in schema.columns:
        part = features[:, start : start + declared.width]
        _fill(part, columns[declared.name], declared, keep)
        start += declared.width
    return Records(features=features, labels=labels[keep])


def _fill(
    part: Float32[np.ndarray, "m w"], column: Column, declared: Numeric | Category, keep: Int64[np.ndarray, " m"]
) -> None:
    if isinstance(declared, Numeric):
        part[:, 0] = _scaled(to_numbers(column)[keep], declared)
        return
    index = positions(column, declared.categories)[keep]
    rows = np.flatnonzero(index >= 0)
    part[rows, index[rows]] = 1.0


def _scaled(numbers: Float64[np.ndarray, " m"], declared: Numeric) -> Float64[np.ndarray, " m"]:
    # Halves first: high - low may overflow although both bounds are finite.
    middle = declared.low / 2 + declared.high / 2
    radius = declared.high / 2 - declared.low / 2
    clipped = np.clip(np.where(np.isnan(numbers), middle, numbers), declared.low, declared.high)
    return np.clip((clipped - middle) / radius, -1.0, 1.0) if radius > 0 else np.zeros_like(clipped)


def to_numbers(column: Column) -> Float64[np.ndarray, " n"]:
    """The column as numbers, NaN where missing or unreadable."""
    if not isinstance(column, Coded):
        return column
    # The extra last entry is what the code -1 (missing) finds.
    numbers = np.array([*map(to_number, column.values), np.nan], dtype=np.float64)
    return numbers[column.codes]


def positions(column: Column, listed: tuple[str, ...]) -> Int64[np.ndarray, " n"]:
    """Index of each text in a public list, -1 where missing or unlisted."""
    assert isinstance(column, Coded)
    index = {value: i for i, value in enumerate(listed)}
    found = np.array([*(index.get(value, -1) for value in column.values), -1], dtype=np.int64)
    return found[column.codes]
