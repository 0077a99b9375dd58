"""Tables as public cells: each column of a declared schema is cut into a fixed, public set of cells.

What a record's cell is follows from that record and the schema alone: numbers are clipped to their bounds, a missing
number is a cell of its own, a category that is missing or not listed is one too, and a record whose label is not in the
label set, or whose numeric target is not finite, is left out.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from decimal import Decimal
from functools import cached_property
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

import numpy as np

from sordino import checks
from sordino.data.schema import (
    BooleanColumn,
    CategoricalColumn,
    DateColumn,
    NumericColumn,
    OrdinalColumn,
    Schema,
    TableColumn,
    TableFormat,
)
from sordino.data.tables import (
    Column,
    EncodedColumn,
    Kinds,
    column_numbers,
    entry_text,
    positions,
    read_columns,
    scaled_values,
    to_number,
)
from sordino.errors import InvalidArgument
from sordino.shapes import Float64, Int64

if TYPE_CHECKING:
    import pyarrow as pa

TableSource: TypeAlias = "Path | str | Mapping[str, object] | pa.Table"
"""A file, or what gives columns by their name: a data frame, an Arrow table, a dictionary."""


@dataclass(frozen=True, kw_only=True)
class DiscreteColumn:
    """One column's cells.

    A number has a cell for its lower bound, `bins` equal parts of the range, a cell for its upper bound (values at a
    bound, and those clipped to it, are often many) and a last one for a missing number; so has a date, in seconds. A
    category has one cell per listed value and a last one for a missing or unlisted value; so has a column of levels in
    order, and a boolean, whose values are no and yes.

    Args:
        column: the declared column.
        bins: number of equal parts between the bounds of a number, ≥ 1.
        required: whether a record without a listed value, or without a finite number, is left out, as for the target.

    Example:
        >>> age = DiscreteColumn(column=NumericColumn(name="age", low=0, high=100), bins=4)
        >>> age.codes(np.array([-3.0, 0.0, 10.0, 99.0, 100.0, np.nan])).tolist(), age.size
        ([0, 0, 1, 4, 5, 6], 7)
    """

    column: TableColumn
    bins: int = 20
    required: bool = False

    @property
    def name(self) -> str:
        """The column's name."""
        return self.column.name

    @cached_property
    def bounds(self) -> tuple[float, float] | None:
        """Bounds of a number or, in seconds from 1970, of a date; None for what has a list of values."""
        if isinstance(self.column, NumericColumn):
            return float(self.column.low), float(self.column.high)
        return self.column.bounds if isinstance(self.column, DateColumn) else None

    @cached_property
    def listed(self) -> tuple[str, ...]:
        """The listed values of a category, of levels, or of a boolean: a text for no, one for yes."""
        match self.column:
            case CategoricalColumn():
                return self.column.categories
            case OrdinalColumn():
                return self.column.levels
            case BooleanColumn():
                return self.column.false[0], self.column.true[0]
            case _:
                return ()

    @cached_property
    def edges(self) -> Float64[np.ndarray, " bins_and_one"]:
        """Where the equal parts of a number or a date begin and end."""
        assert self.bounds is not None
        share = np.arange(self.bins + 1) / self.bins
        edges = self.bounds[0] * (1 - share) + self.bounds[1] * share
        edges[-1] = self.bounds[1]
        return edges

    @property
    def size(self) -> int:
        """Number of cells."""
        return (len(self.listed) if self.bounds is None else self.bins + 2) + (not self.required)

    def labels(self) -> tuple[str, ...]:
        """A short name for every cell."""
        if self.bounds is None:
            return (*self.listed, *(() if self.required else ("(missing or not listed)",)))
        edges = [self._edge_text(edge) for edge in self.edges.tolist()]
        inner = [f"{low} to {high}" for low, high in itertools.pairwise(edges)]
        ends = (f"{edges[0]} or less", f"{edges[-1]} or more")
        return (ends[0], *inner, ends[1], *(() if self.required else ("(missing)",)))

    def _edge_text(self, edge: float) -> str:
        return _date_text(edge, None)[:10] if isinstance(self.column, DateColumn) else f"{edge:.6g}"

    def numbers(self, column: Column) -> Float64[np.ndarray, " n"]:
        """The numbers of a numeric or date column, clipped to its bounds; NaN where missing."""
        assert self.bounds is not None
        assert isinstance(self.column, NumericColumn | DateColumn)
        found = column_numbers(column, self.column)
        with np.errstate(all="ignore"):
            whole = isinstance(self.column, NumericColumn) and self.column.whole
            return np.clip(np.round(found) if whole else found, *self.bounds)

    def codes(self, column: Column) -> Int64[np.ndarray, " n"]:
        """The cell of each record, −1 for a record that is left out."""
        if self.bounds is None:
            if isinstance(self.column, BooleanColumn):
                signs = scaled_values(column, self.column)
                found = np.where(np.isnan(signs), -1, signs > 0).astype(np.int64)
            else:
                found = positions(column, self.listed)
            return found if self.required else np.where(found < 0, len(self.listed), found)
        low, high = self.bounds
        clipped = self.numbers(column)
        with np.errstate(all="ignore"):
            inside = np.clip(np.searchsorted(self.edges, clipped, side="right"), 1, self.bins)
        codes = np.where(clipped <= low, 0, np.where(clipped >= high, self.bins + 1, inside)).astype(np.int64)
        if self.required:
            assert isinstance(self.column, NumericColumn)
            return np.where(np.isfinite(column_numbers(column, self.column)), codes, -1)
        return np.where(np.isnan(clipped), self.bins + 2, codes)

    def values(
        self, codes: Int64[np.ndarray, " n"], uniforms: Float64[np.ndarray, " n"]
    ) -> Float64[np.ndarray, " n"] | list[str]:
        """A value in each cell: a number or date drawn uniformly from it, else a text; NaN or "" where missing."""
        if self.bounds is None:
            names = (*self.listed, "")
            return [names[code] for code in codes.tolist()]
        low, high = self.bounds
        edges = np.concatenate([[low], self.edges, [high, np.nan]])
        drawn = edges[codes] * (1 - uniforms) + edges[np.minimum(codes + 1, self.bins + 3)] * uniforms
        if isinstance(self.column, DateColumn):
            has_time = len(self.column.low) > _DATE_LENGTH or len(self.column.high) > _DATE_LENGTH
            pattern = self.column.format
            texts = ["" if math.isnan(second) else _date_text(second, pattern) for second in drawn.tolist()]
            return texts if has_time or pattern is not None else [text[:_DATE_LENGTH] for text in texts]
        if isinstance(self.column, NumericColumn) and self.column.whole:
            return np.clip(np.round(drawn), low, high)
        # Digits below a thousandth of a cell say nothing.
        digits = max(0, 3 - math.floor(math.log10(high / self.bins - low / self.bins)))
        return np.clip(np.round(drawn, min(digits, 300)), low, high)


_DATE_LENGTH = 10


def _date_text(second: float, pattern: str | None) -> str:
    """A date in ISO 8601, or in a pattern of `datetime.strftime`, without an offset: UTC."""
    moment = datetime(1970, 1, 1) + timedelta(seconds=round(second))
    return moment.isoformat() if pattern is None else moment.strftime(pattern)


@dataclass(frozen=True, kw_only=True)
class TableDomain:
    """The cells of all columns of a schema, the target last.

    Args:
        columns: one a column.
        table_format: how CSV files are written.

    Example:
        >>> domain = TableDomain.of_schema(
        ...     Schema(columns=(NumericColumn(name="age", low=0, high=100),), target="y", labels=("no", "yes")), bins=10
        ... )
        >>> domain.names, domain.sizes
        (('age', 'y'), (13, 2))
    """

    columns: tuple[DiscreteColumn, ...]
    table_format: TableFormat = field(default_factory=TableFormat)

    @classmethod
    def of_schema(cls, schema: Schema, *, bins: int = 20) -> "TableDomain":
        """The columns of a schema, each number in `bins` equal parts."""
        checks.in_range(1, 10_000, bins=checks.integer(1, bins=bins))
        columns = [DiscreteColumn(column=column, bins=bins) for column in schema.columns]
        return cls(
            columns=(*columns, DiscreteColumn(column=schema.target_column, bins=bins, required=True)),
            table_format=schema.table_format,
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the columns."""
        return tuple(column.name for column in self.columns)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of cells of each column."""
        return tuple(column.size for column in self.columns)

    def codes(self, table: TableSource) -> Int64[np.ndarray, "n d"]:
        """The cells of each record that is not left out, one row a record.

        Raises:
            InvalidArgument: the file can't be read, or a column is not there; no message quotes a cell.
        """
        found = table_columns(table, [column.column for column in self.columns], table_format=self.table_format)
        codes = np.stack([column.codes(found[column.name]) for column in self.columns], axis=1)
        return codes[(codes >= 0).all(axis=1)]

    def values(
        self, codes: Int64[np.ndarray, "n d"], uniforms: Float64[np.ndarray, "n d"]
    ) -> dict[str, Float64[np.ndarray, " n"] | list[str]]:
        """Values for the cells of records, by column."""
        return {
            column.name: column.values(codes[:, index], uniforms[:, index]) for index, column in enumerate(self.columns)
        }


def table_columns(
    table: TableSource,
    columns: Sequence[TableColumn],
    *,
    table_format: TableFormat | None = None,
) -> dict[str, Column]:
    """The declared columns of a file, or of anything that gives a column by its name (pandas, Polars, Arrow, dict).

    Raises:
        InvalidArgument: the file can't be read, or a column is not there; no message quotes a cell.
    """
    if isinstance(table, str | Path):
        kinds: Kinds = {column.name: column.read_as for column in columns}
        return read_columns(Path(table).expanduser(), kinds, table_format=table_format)
    found: dict[str, Column] = {}
    for column in columns:
        cells = _cells(table, column.name)
        if isinstance(column, NumericColumn) and isinstance(cells, np.ndarray):
            found[column.name] = cells.astype(np.float64)
        elif isinstance(column, NumericColumn):
            found[column.name] = np.array([_number(cell) for cell in cells], dtype=np.float64)
        else:
            texts = [entry_text(cell) or "" for cell in cells]
            listed = {text: index for index, text in enumerate(dict.fromkeys(texts))}
            codes = np.array([listed[text] for text in texts], dtype=np.int64)
            found[column.name] = EncodedColumn(values=tuple(listed), codes=codes)
    if len({len(column.codes if isinstance(column, EncodedColumn) else column) for column in found.values()}) > 1:
        raise InvalidArgument(
            "table must have columns of one length, got different ones. Give each record all columns."
        )
    return found


def _cells(table: object, name: str) -> Iterable[object]:
    """The values of a column: an array of numbers, or one object each."""
    names = getattr(table, "column_names", None) or getattr(table, "columns", None)
    names = table if names is None and isinstance(table, Mapping) else names
    if names is None or not hasattr(table, "__getitem__"):
        raise InvalidArgument(
            f"table must be a file or give columns by name, got {type(table).__name__}. Give a data frame or a path."
        )
    if name not in list(cast("Iterable[object]", names)):
        raise InvalidArgument(f"table must have every declared column, got none named {name!r}. Correct the schema.")
    column = table[name]  # pyright: ignore[reportIndexIssue]
    kind = getattr(column, "dtype", None)
    # NumPy's types, also in pandas; pandas' own with a value for missing entries are read entry by entry.
    if isinstance(kind, np.dtype) and kind.kind in "biuf":
        return np.asarray(column).ravel()
    for method in ("to_pylist", "tolist", "to_list"):
        if hasattr(column, method):
            return getattr(column, method)()
    return column


def _number(cell: object) -> float:
    if isinstance(cell, str):
        return to_number(cell)
    try:
        return float(cell) if isinstance(cell, Real | Decimal | np.bool_) else np.nan
    except (OverflowError, TypeError, ValueError):
        return np.nan
