"""Schemas from a public sample (floor 1).

Bounds, categories and labels may be read off a sample that is public: one that holds no record of the private data.
The schema that comes out is marked ``public_sample``, so that a report can say where its facts come from.
"""

from pathlib import Path

import numpy as np

from sordino.data.schema import Category, Numeric, Schema
from sordino.data.tables import Coded, Column, read_columns, read_header, to_number
from sordino.errors import InvalidArgument, MissingDeclaration

__all__ = ["schema_from_sample"]

_MAX_CATEGORIES = 100
_MISSING = frozenset({"", "?", "na", "n/a", "nan", "null", "none"})


def schema_from_sample(sample: Path, *, target: str) -> Schema:
    """Derive a schema from a **public** sample of the same form as the private table.

    A column whose values are all numbers becomes `Numeric` with the sample's smallest and largest value as bounds; any
    other, ``true`` and ``false`` too, becomes `Category` with the sample's values in alphabetical order. Labels are in
    numerical order if all are numbers. Empty cells and ``?``, ``NA`` and the like are missing values.

    Args:
        sample: A public CSV, TSV or Parquet file. Every column is used; leave out of it what isn't a feature.
        target: The label's column; its values in the sample become the label set.

    Returns:
        A schema with origin ``public_sample``.

    Raises:
        InvalidArgument: If the sample can't be read or has no column named `target`.
        MissingDeclaration: If the sample doesn't settle a column (one value only, or more than 100 texts).
    """
    header = read_header(sample)
    if target not in header:
        raise InvalidArgument(
            f"target must be a column of the public sample {sample.name!r}, got {target!r}. Check it."
        )
    columns = read_columns(sample, header)
    labels = _distinct(columns[target])
    if len(labels) < 2:
        raise MissingDeclaration(
            f"the labels of target {target!r} must be at least two, got {len(labels)} in the public sample. "
            "Give a larger sample or a schema file."
        )
    derived = tuple(_derive(name, columns[name]) for name in header if name != target)
    return Schema(columns=derived, target=target, labels=labels, origin="public_sample")


def _derive(name: str, column: Column) -> Numeric | Category:
    texts = _distinct(column)
    numbers = _numbers(texts)
    if numbers is not None:
        finite = numbers[np.isfinite(numbers)]
        low, high = float(finite.min()), float(finite.max())
        if low < high:
            return Numeric(name=name, low=low, high=high)
        raise MissingDeclaration(
            f"the bounds of column {name!r} must be declared: the public sample holds one value only. "
            "Give a larger sample or a schema file."
        )
    if 1 <= len(texts) <= _MAX_CATEGORIES:
        return Category(name=name, categories=texts)
    raise MissingDeclaration(
        f"the categories of column {name!r} must be declared: the public sample holds {len(texts)} distinct values, "
        f"where 1 to {_MAX_CATEGORIES} are allowed. Leave the column out of the sample, or give a schema file."
    )


def _numbers(texts: tuple[str, ...]) -> np.ndarray | None:
    """The numbers that all of the texts spell, one of them finite; None if there are none, or they are truth values."""
    numbers = np.array([*map(to_number, texts)], dtype=np.float64)
    is_truth = {text.lower() for text in texts} <= {"true", "false"}
    return None if is_truth or np.isnan(numbers).any() or not np.isfinite(numbers).any() else numbers


def _distinct(column: Column) -> tuple[str, ...]:
    """The different values, in the order of numbers if all are numbers, else of the alphabet."""
    assert isinstance(column, Coded)
    texts = tuple(sorted({value for value in column.values if value.lower() not in _MISSING}))
    numbers = _numbers(texts)
    return texts if numbers is None else tuple(texts[place] for place in np.argsort(numbers, kind="stable"))
