"""A data set as estimators take it: rows, targets, and the public facts that estimators want declared (floor 6)."""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sordino.data import Category, DataSet, Numeric, Records, Schema
from sordino.errors import InvalidArgument

__all__ = ["Facts", "Table", "table"]

Rows = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is public about a table.

    Args:
        columns: number of columns of the rows.
        population: the number of training records, treated as public.
        data_norm: the largest ℓ2 norm of a row, from the schema alone.
        one_hot: groups of columns of which at most one is set.
        target: name of what is predicted.
        classes: number of classes, or None for a number.
        target_bounds: declared bounds of the target, or None for classes.
    """

    columns: int
    population: int
    data_norm: float
    one_hot: tuple[tuple[int, ...], ...]
    target: str
    classes: int | None
    target_bounds: tuple[float, float] | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Table:
    """Rows and targets to train on and to measure on; `facts` say what is public about them.

    Args:
        name: of the data set.
        public: whether the training records are public.
        facts: the public facts.
        train: rows [n, d] in [−1, 1] and targets [n]: class positions, or numbers in their own unit.
        test: the same to measure on, or None.
    """

    name: str
    public: bool
    facts: Facts
    train: tuple[Rows, npt.NDArray[np.generic]]
    test: tuple[Rows, npt.NDArray[np.generic]] | None

    @property
    def measure(self) -> str:
        """What a model is measured by: ``accuracy`` (larger is better) or ``rmse``."""
        return "accuracy" if self.facts.classes else "rmse"


def table(dataset: DataSet, *, target: str | None = None) -> Table:
    """The data set as a table that predicts `target`: its label (None), or one of its numeric columns.

    With a numeric column as the target the label becomes a feature. Records without a schema (images, texts) are
    flattened and scaled to norm 1, each by itself.

    Raises:
        InvalidArgument: `target` is neither the label nor a numeric column.

    Example:
        >>> from sordino.data import load
        >>> adult = load("adult")
        >>> table(adult).facts.data_norm == 13**0.5, table(adult, target="age").facts.target_bounds
        (True, (17, 90))
    """
    schema = dataset.schema
    if schema is None:
        if target not in {None, "label"}:
            raise InvalidArgument(f"target must be 'label' for {dataset.name}, got {target!r}. Leave it out.")
        return _flat(dataset)
    names = [column.name for column in schema.columns]
    if target is None or target == schema.target:
        return _whole(dataset, schema)
    if target in names and isinstance(schema.columns[names.index(target)], Numeric):
        return _regression(dataset, schema, names.index(target))
    numeric = [column.name for column in schema.columns if isinstance(column, Numeric)]
    raise InvalidArgument(
        f"target must be {schema.target!r} or one of the numeric columns {', '.join(numeric)}, got {target!r}."
    )


def _flat(dataset: DataSet) -> Table:
    def rows(records: Records) -> tuple[Rows, npt.NDArray[np.generic]]:
        flat = records.features.reshape(len(records), -1).astype(np.float64)
        return flat / np.maximum(np.linalg.norm(flat, axis=1, keepdims=True), 1e-12), records.labels

    return Table(
        name=dataset.name,
        public=dataset.public,
        facts=Facts(
            columns=math.prod(dataset.train.record_shape),
            population=len(dataset.train),
            data_norm=1.0,
            one_hot=(),
            target="label",
            classes=len(dataset.labels),
            target_bounds=None,
        ),
        train=rows(dataset.train),
        test=None if dataset.test is None else rows(dataset.test),
    )


def _whole(dataset: DataSet, schema: Schema) -> Table:
    def rows(records: Records) -> tuple[Rows, npt.NDArray[np.generic]]:
        return records.features.astype(np.float64), records.labels

    return Table(
        name=dataset.name,
        public=dataset.public,
        facts=Facts(
            columns=schema.width(),
            population=len(dataset.train),
            # Numbers are in [−1, 1] and of a category at most one column is 1.
            data_norm=math.sqrt(len(schema.columns)),
            one_hot=_groups(schema),
            target=schema.target,
            classes=len(dataset.labels),
            target_bounds=None,
        ),
        train=rows(dataset.train),
        test=None if dataset.test is None else rows(dataset.test),
    )


def _regression(dataset: DataSet, schema: Schema, place: int) -> Table:
    column = schema.columns[place]
    assert isinstance(column, Numeric)
    start = sum(other.width for other in schema.columns[:place])
    width, labels = schema.width(), len(dataset.labels)

    def rows(records: Records) -> tuple[Rows, npt.NDArray[np.generic]]:
        rest = np.delete(records.features, start, axis=1).astype(np.float64)
        scaled = records.features[:, start].astype(np.float64)
        return np.hstack([rest, np.eye(labels)[records.labels]]), column.low + (scaled + 1) / 2 * (
            column.high - column.low
        )

    moved = tuple(tuple(i - (i > start) for i in group) for group in _groups(schema))
    return Table(
        name=dataset.name,
        public=dataset.public,
        facts=Facts(
            columns=width - 1 + labels,
            population=len(dataset.train),
            data_norm=math.sqrt(len(schema.columns)),  # one column less, the label more
            one_hot=(*moved, tuple(range(width - 1, width - 1 + labels))),
            target=column.name,
            classes=None,
            target_bounds=(column.low, column.high),
        ),
        train=rows(dataset.train),
        test=None if dataset.test is None else rows(dataset.test),
    )


def _groups(schema: Schema) -> tuple[tuple[int, ...], ...]:
    groups, start = [], 0
    for column in schema.columns:
        if isinstance(column, Category) and column.width > 1:
            groups.append(tuple(range(start, start + column.width)))
        start += column.width
    return tuple(groups)
