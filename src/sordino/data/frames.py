"""Tables in memory (pandas, Polars, Arrow) as the columns that the readers of files give.

What is public decides how a column is taken: its declared kind and its type. What an entry becomes is decided by that
entry alone, exactly as if it stood in a file; no entry raises, and none is quoted.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np

from sordino.data.schema import Schema
from sordino.data.tables import Column, EncodedColumn, arrow_columns, declared_kinds, entry_text
from sordino.errors import InvalidArgument
from sordino.installation import require

if TYPE_CHECKING:
    import pyarrow as pa

_NAME = "the table"


def frame_columns(frame: object, schema: Schema, *, with_target: bool) -> dict[str, Column]:
    """The declared columns of a table, and its target if wanted.

    Raises:
        InvalidArgument: It is no table, lacks a declared column, or a column's type can't hold what is declared.
    """
    require("tables", "pyarrow", user="a table")
    kinds = declared_kinds(schema, with_target=with_target)
    return arrow_columns(_NAME, _arrow_table(frame, list(kinds)), kinds)


def text_column(values: object) -> EncodedColumn:
    """One column in memory as texts, as a file would give them."""
    require("tables", "pyarrow", user="a table")
    import pyarrow as pa

    found = arrow_columns(_NAME, pa.table({"y": _arrow_array("y", values)}), {"y": "text"})["y"]
    assert isinstance(found, EncodedColumn)
    return found


def _arrow_table(frame: object, names: Sequence[str]) -> "pa.Table":
    """The named columns as an Arrow table; a name that is not there, or there twice, is left to the caller."""
    import pyarrow as pa

    if isinstance(frame, pa.RecordBatch):
        return pa.Table.from_batches([frame])
    if isinstance(frame, pa.Table):
        return frame
    if isinstance(frame, Mapping):
        return pa.table({name: _arrow_array(name, frame[name]) for name in names if name in frame})
    to_arrow, columns = getattr(frame, "to_arrow", None), getattr(frame, "columns", None)
    if callable(to_arrow):  # Polars
        table = to_arrow()
        assert isinstance(table, pa.Table)
        return table
    if columns is None or not hasattr(frame, "dtypes"):
        raise InvalidArgument(
            f"X must be a DataFrame of pandas or Polars, an Arrow table or a mapping of columns, got "
            f"{type(frame).__name__}. Columns are found by their names."
        )
    found = [str(name) for name in columns]
    if any(found.count(name) > 1 for name in names):
        raise InvalidArgument(f"the columns of {_NAME} must have different names. Rename those that repeat.")
    own = {str(name): name for name in columns}
    arrays = {name: _arrow_array(name, frame[own[name]]) for name in names if name in own}  # pyright: ignore[reportIndexIssue]
    return pa.table(arrays)


def _arrow_array(name: str, series: object) -> "pa.Array | pa.ChunkedArray":
    """One column of pandas. Numbers, truth values and dates by their own types; all else entry by entry, as texts."""
    import pyarrow as pa

    if isinstance(series, pa.Array | pa.ChunkedArray):
        return series
    if hasattr(series, "to_arrow"):  # Polars
        return cast("pa.Array", series.to_arrow())  # pyright: ignore[reportAttributeAccessIssue]
    kind = getattr(series, "dtype", None)
    if isinstance(kind, np.dtype):
        entries = np.asarray(series)
    elif hasattr(series, "to_numpy"):
        entries = np.asarray(series.to_numpy(dtype=object))  # pyright: ignore[reportAttributeAccessIssue]
    else:
        entries = np.empty(len(cast("Sequence[object]", series)), dtype=object)
        entries[:] = list(cast("Sequence[object]", series))
    if entries.dtype.kind in "iufbM":
        return pa.array(entries, from_pandas=True)
    if entries.dtype.kind not in "OU":
        raise InvalidArgument(
            f"column {name!r} of {_NAME} must hold numbers, texts, booleans or dates, got {kind}. Convert the column."
        )
    return pa.array([entry_text(entry) for entry in entries.tolist()], type=pa.large_string())
