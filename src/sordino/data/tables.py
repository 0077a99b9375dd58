"""Reading CSV and Parquet columns without ever quoting a cell (floor 1).

The readers of pyarrow put the offending row into their messages. Here every failure of a reader becomes a message that
names the file and the column alone, and the original exception is dropped, context included.
"""

import bz2
import csv
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
from jaxtyping import Float64, Int64

from sordino.errors import InvalidArgument

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Coded", "Column", "is_table", "iterate_columns", "read_columns", "read_header", "to_number"]

_SEPARATORS = {".csv": ",", ".tsv": "\t"}
_COMPRESSIONS = (".gz", ".xz", ".bz2")
_PARQUET = (".parquet", ".pq")
# Rows longer than this are a file-level failure of the CSV reader.
_BLOCK_BYTES = 1 << 24
_VIEWS = ("string_view", "binary_view")
# Numbers on which every correctly rounding parser agrees; the rest is left to Python's own.
_PLAIN_NUMBER = r"\A-?[0-9]{1,15}(\.[0-9]{1,20})?([eE][-+]?[0-9]{1,2})?\z"

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Coded:
    """A column of texts: the distinct values, and each record's index in them (-1 where missing)."""

    values: tuple[str, ...]
    codes: Int64[np.ndarray, " n"]


Column = Coded | Float64[np.ndarray, " n"]
"""A column of texts, or of numbers with NaN where missing."""


def is_table(path: Path) -> bool:
    """Whether the suffix is that of a CSV, TSV (plain or compressed) or Parquet file."""
    return _kind(path) in _SEPARATORS or _kind(path) in _PARQUET


def read_header(path: Path) -> tuple[str, ...]:
    """The names of the columns, without surrounding white space.

    Raises:
        InvalidArgument: If the file can't be read, or a name is empty or repeated.
    """
    names = tuple(name.strip() for name in _raw_header(path))
    if len(set(names)) != len(names) or "" in names:
        raise InvalidArgument(f"the header of {path.name!r} must name every column once. Correct the header line.")
    return names


def read_columns(path: Path, names: Sequence[str], *, numeric: Collection[str] = ()) -> dict[str, Column]:
    """Read the named columns of a CSV, TSV or Parquet file.

    A CSV row with the wrong number of fields is left out: it is not a record of the declared form.

    Args:
        path: The file; ``.csv`` or ``.tsv`` with optional ``.gz``, ``.xz`` or ``.bz2``, or ``.parquet``.
        names: Columns to read; others are never parsed.
        numeric: Those that will be used as numbers: their texts are parsed here, fast.

    Raises:
        InvalidArgument: If the file can't be read, or lacks a column: the message names the column, and no cell.
    """
    raw = _raw_names(path, names)
    table = _read(path, [raw[name] for name in names])
    return {name: _column(path, name, table.column(raw[name]), parse=name in numeric) for name in names}


def iterate_columns(
    path: Path, names: Sequence[str], *, numeric: Collection[str] = (), rows: int = 1 << 16
) -> Iterator[dict[str, Column]]:
    """`read_columns` in parts of at most about `rows` rows, so that a file need not fit into memory.

    Where a part ends makes no difference to any row.

    Raises:
        InvalidArgument: If the file can't be read, or lacks a column: the message names the column, and no cell.
    """
    raw = _raw_names(path, names)
    for table in _parts(path, [raw[name] for name in names], rows):
        yield {name: _column(path, name, table.column(raw[name]), parse=name in numeric) for name in names}


def _raw_names(path: Path, names: Sequence[str]) -> dict[str, str]:
    """The columns as the file spells them, by their names without white space; all of `names` are there."""
    header = read_header(path)
    absent = [name for name in names if name not in header]
    if absent:
        raise InvalidArgument(
            f"the columns of {path.name!r} must include every declared column, got none named "
            f"{', '.join(map(repr, absent))}. Correct the schema or the header."
        )
    return dict(zip(header, _raw_header(path), strict=True))


def _kind(path: Path) -> str:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in _COMPRESSIONS:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def _open(path: Path) -> IO[bytes]:
    openers: dict[str, Callable[..., IO[bytes]]] = {
        ".gz": cast("Callable[..., IO[bytes]]", gzip.open),
        ".xz": cast("Callable[..., IO[bytes]]", lzma.open),
        ".bz2": cast("Callable[..., IO[bytes]]", bz2.open),
    }
    return openers.get(path.suffix.lower(), open)(path, "rb")


def _without_contents(path: Path, read: Callable[[], T]) -> T:
    """Run a reader; a failure becomes a message that holds nothing of the file's contents."""
    import pyarrow as pa

    try:
        return read()
    except FileNotFoundError:
        reason = "there is no such file. Check the path"
    except (OSError, EOFError, lzma.LZMAError, zlib.error, csv.Error, ValueError, KeyError, pa.ArrowException):
        reason = f"it can't be read as {_kind(path).lstrip('.') or 'a table'}. Check format, encoding and compression"
    # Raised outside the handler, so that the reader's exception (which may quote a row) is not kept as its context.
    raise InvalidArgument(f"{str(path)!r} must be a readable table, but {reason}.")


def _raw_header(path: Path) -> list[str]:
    def read() -> list[str]:
        if _kind(path) in _PARQUET:
            import pyarrow.parquet as pq

            with pq.ParquetFile(path) as file:
                return list(file.schema_arrow.names)
        with closing(_open(path)) as file, io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as lines:
            return next(csv.reader(lines, delimiter=_SEPARATORS[_kind(path)]), [])

    if not is_table(path):
        raise InvalidArgument(f"{str(path)!r} must be a .csv, .tsv or .parquet file. Convert it, or rename it.")
    return _without_contents(path, read)


def _read(path: Path, names: list[str]) -> "pa.Table":
    from pyarrow import csv as pa_csv

    def read() -> "pa.Table":
        if _kind(path) in _PARQUET:
            import pyarrow.parquet as pq

            return pq.read_table(path, columns=names)
        with closing(_open(path)) as file:
            return pa_csv.read_csv(file, **_csv_options(path, names))

    return _without_contents(path, read)


def _parts(path: Path, names: list[str], rows: int) -> Iterator["pa.Table"]:
    """The table in parts; each failure of the reader is told without contents."""
    import pyarrow as pa
    from pyarrow import csv as pa_csv

    with ExitStack() as stack:
        if _kind(path) in _PARQUET:
            import pyarrow.parquet as pq

            opened = _without_contents(path, lambda: stack.enter_context(pq.ParquetFile(path)))
            batches = opened.iter_batches(batch_size=rows, columns=names)
        else:
            file = _without_contents(path, lambda: stack.enter_context(closing(_open(path))))
            batches = iter(
                _without_contents(path, lambda: stack.enter_context(pa_csv.open_csv(file, **_csv_options(path, names))))
            )
        while (batch := _without_contents(path, lambda: next(batches, None))) is not None:
            yield pa.Table.from_batches([batch])


def _csv_options(path: Path, names: list[str]) -> dict[str, Any]:
    import pyarrow as pa
    from pyarrow import csv as pa_csv

    return {
        "read_options": pa_csv.ReadOptions(block_size=_BLOCK_BYTES),
        "parse_options": pa_csv.ParseOptions(
            delimiter=_SEPARATORS[_kind(path)],
            newlines_in_values=True,
            invalid_row_handler=lambda _: "skip",
        ),
        # Bytes, not inferred types: inference looks at all rows and fails on one of them.
        "convert_options": pa_csv.ConvertOptions(
            include_columns=names,
            column_types={name: pa.binary() for name in names},
            strings_can_be_null=False,
        ),
    }


def _column(path: Path, name: str, array: "pa.ChunkedArray", *, parse: bool) -> Column:
    import pyarrow as pa

    if str(array.type) in _VIEWS:
        array = array.cast(pa.large_binary())
    kind = array.type.value_type if pa.types.is_dictionary(array.type) else array.type
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return _without_contents(path, lambda: _numbers(array))
    if pa.types.is_boolean(kind) or pa.types.is_null(kind) or _is_text(kind):
        return _without_contents(path, lambda: _parsed(array) if parse and _is_text(array.type) else _coded(array))
    raise InvalidArgument(
        f"column {name!r} of {path.name!r} must hold numbers, texts or booleans, got {kind}. Convert the column."
    )


def _is_text(kind: "pa.DataType") -> bool:
    import pyarrow as pa

    tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    return any(test(kind) for test in tests) or str(kind) in _VIEWS


def _numbers(array: "pa.ChunkedArray") -> Float64[np.ndarray, " n"]:
    import pyarrow as pa

    plain = array.cast(array.type.value_type) if pa.types.is_dictionary(array.type) else array
    return np.array(plain.cast(pa.float64(), safe=False).to_numpy(), dtype=np.float64)


def _parsed(array: "pa.ChunkedArray") -> Float64[np.ndarray, " n"]:
    import pyarrow as pa
    import pyarrow.compute as pc

    # The functions of pyarrow.compute are made when it is imported, so a type checker does not know them.
    # Cell by cell, not by what the whole column looks like: one record must not change how another is read.
    plain = pc.fill_null(pc.match_substring_regex(array, _PLAIN_NUMBER), fill_value=False)  # pyright: ignore[reportAttributeAccessIssue]
    easy = pc.if_else(plain, array, pa.scalar(None, type=array.type))  # pyright: ignore[reportAttributeAccessIssue]
    numbers = np.array(easy.cast(pa.string()).cast(pa.float64()).to_numpy(), dtype=np.float64)
    others = np.flatnonzero(~np.array(plain.to_numpy(), dtype=bool))
    numbers[others] = [to_number(_as_text(cell)) for cell in array.take(pa.array(others)).to_pylist()]
    return numbers


def to_number(text: str) -> float:
    """The number that a text spells, NaN if it spells none."""
    try:
        return float(text)
    except ValueError:
        return np.nan


def _coded(array: "pa.ChunkedArray") -> Coded:
    import pyarrow as pa

    if pa.types.is_null(array.type):
        return Coded(values=(), codes=np.full(len(array), -1, dtype=np.int64))
    combined = array.combine_chunks()
    if isinstance(combined, pa.ChunkedArray):
        combined = pa.concat_arrays(combined.chunks) if combined.num_chunks else pa.array([], type=array.type)
    encoded = combined if pa.types.is_dictionary(combined.type) else combined.dictionary_encode()
    codes = np.array(encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False), dtype=np.int64)
    return Coded(values=tuple(_as_text(value) for value in encoded.dictionary.to_pylist()), codes=codes)


def _as_text(value: object) -> str:
    if isinstance(value, bytes):
        return value.decode("utf-8", errors="replace").strip()
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value).strip()
