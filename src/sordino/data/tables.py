"""Reading columns of CSV, TSV and Parquet files without ever quoting a cell (floor 1).

The readers of pyarrow put the offending row into their messages. Here every failure of a reader becomes a message that
names the file and the column alone, and the original exception is dropped, context included. What a column may hold is
decided by its declared kind and its type in the file, both public; what a cell says is decided by that cell alone.
"""

import bz2
import gzip
import lzma
import re
import zlib
from codecs import BOM_UTF8
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypeVar, cast

import numpy as np
from jaxtyping import Float64, Int64

from sordino.data.lines import line_blocks, lines_with_cells, read_header_line
from sordino.errors import InvalidArgument

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Coded", "Column", "is_table", "iterate_columns", "number_text", "read_columns", "read_header", "to_number"]

_SEPARATORS = {".csv": ",", ".tsv": "\t"}
_COMPRESSIONS = (".gz", ".xz", ".bz2")
_PARQUET = (".parquet", ".pq")
_VIEWS = ("string_view", "binary_view")
# Numbers on which every correctly rounding parser agrees; the rest is left to Python's own.
_PLAIN_NUMBER = r"\A-?[0-9]{1,15}(\.[0-9]{1,20})?([eE][-+]?[0-9]{1,2})?\z"
_GROUPED_NUMBER = re.compile(r"[-+]?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]*)?")
_TRUTH = {"true": 1.0, "false": 0.0}

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

    A line of a CSV file that is no record of the declared form (a wrong number of cells, a quote that does not close)
    is left out.

    Args:
        path: The file; ``.csv`` or ``.tsv`` with optional ``.gz``, ``.xz`` or ``.bz2``, or ``.parquet``.
        names: Columns to read; others are never parsed.
        numeric: Those to read as numbers; the others are read as texts, whatever their type.

    Raises:
        InvalidArgument: If the file can't be read, lacks a column, or a column's type is neither numbers, texts nor
            booleans: the message names the column, and no cell.
    """
    import pyarrow as pa

    columns = _raw_names(path, names)
    table = pa.concat_tables(_parts(path, columns, rows=1 << 20))
    return {name: _column(path, name, table.column(raw), numeric=name in numeric) for name, raw in columns.items()}


def iterate_columns(
    path: Path, names: Sequence[str], *, numeric: Collection[str] = (), rows: int = 1 << 16
) -> Iterator[dict[str, Column]]:
    """`read_columns` in parts of at most `rows` rows (Parquet) or about 16 MB: a file need not fit into memory.

    Where a part ends makes no difference to any row.

    Raises:
        InvalidArgument: As `read_columns` does.
    """
    columns = _raw_names(path, names)
    for table in _parts(path, columns, rows):
        yield {name: _column(path, name, table.column(raw), numeric=name in numeric) for name, raw in columns.items()}


def _raw_names(path: Path, names: Sequence[str]) -> dict[str, str]:
    """`names`, all of which are there, and how the file spells each: white space around it may be part of it."""
    header = read_header(path)
    absent = [name for name in names if name not in header]
    if absent:
        raise InvalidArgument(
            f"the columns of {path.name!r} must include every declared column, got none named "
            f"{', '.join(map(repr, absent))}. Correct the schema or the header."
        )
    raw = dict(zip(header, _raw_header(path), strict=True))
    return {name: raw[name] for name in names}


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
    except InvalidArgument:
        raise
    except (OSError, EOFError, lzma.LZMAError, zlib.error, ValueError, KeyError, pa.ArrowException):
        reason = f"it can't be read as {_kind(path).lstrip('.') or 'a table'}. Check format, encoding and compression"
    # Raised outside the handler, so that the reader's exception (which may quote a row) is not kept as its context.
    raise InvalidArgument(f"{str(path)!r} must be a readable table, but {reason}.")


def _raw_header(path: Path) -> list[str]:
    def read() -> list[str]:
        if _kind(path) in _PARQUET:
            import pyarrow.parquet as pq

            with pq.ParquetFile(path) as file:
                return list(file.schema_arrow.names)
        with closing(_open(path)) as file:
            return read_header_line(file, _SEPARATORS[_kind(path)], name=path.name)

    if not is_table(path):
        raise InvalidArgument(f"{str(path)!r} must be a .csv, .tsv or .parquet file. Convert it, or rename it.")
    return _without_contents(path, read)


def _parts(path: Path, columns: dict[str, str], rows: int) -> Iterator["pa.Table"]:
    """The table in parts, at least one; each failure of the reader is told without contents."""
    import pyarrow as pa

    raw, found = list(columns.values()), False
    with ExitStack() as stack:
        if _kind(path) in _PARQUET:
            import pyarrow.parquet as pq

            opened = _without_contents(path, lambda: stack.enter_context(pq.ParquetFile(path)))
            empty = pa.Table.from_batches([], schema=pa.schema([opened.schema_arrow.field(name) for name in raw]))
            batches = opened.iter_batches(batch_size=rows, columns=raw)
            tables = (pa.Table.from_batches([batch]) for batch in batches)
        else:
            file = _without_contents(path, lambda: stack.enter_context(closing(_open(path))))
            empty = pa.table({name: pa.array([], type=pa.binary()) for name in raw})
            tables = _csv_parts(path, file, raw)
        while (table := _without_contents(path, lambda: next(tables, None))) is not None:
            found = True
            yield table
    if not found:
        yield empty


def _csv_parts(path: Path, file: IO[bytes], names: list[str]) -> Iterator["pa.Table"]:
    import pyarrow as pa
    from pyarrow import csv as pa_csv

    separator = _SEPARATORS[_kind(path)]
    header = read_header_line(file, separator, name=path.name)
    # Bytes, not inferred types: inference looks at all rows and fails on one of them.
    convert = pa_csv.ConvertOptions(
        include_columns=names, column_types=dict.fromkeys(names, pa.binary()), strings_can_be_null=False
    )
    parse = pa_csv.ParseOptions(delimiter=separator)

    def parsed(block: bytes) -> "pa.Table":
        # One block of the parser's own: none of its block borders meets a line. The parser drops a byte-order mark at
        # the start, which is a part of a record here; an empty line is none.
        block = b"\n" + block if block.startswith(BOM_UTF8) else block
        read = pa_csv.ReadOptions(column_names=header, block_size=len(block) + 1)
        return pa_csv.read_csv(pa.BufferReader(block), read_options=read, parse_options=parse, convert_options=convert)

    for block in line_blocks(file, separator, len(header)):
        try:
            table = parsed(block)
        except pa.ArrowInvalid:
            # The parser's own handler of such lines prints those that are not UTF-8.
            table = None
        if table is None:
            fitting = lines_with_cells(block, separator, len(header))
            table = parsed(fitting) if fitting.strip(b"\r\n") else None
        if table is not None:
            yield table


def _column(path: Path, name: str, array: "pa.ChunkedArray", *, numeric: bool) -> Column:
    import pyarrow as pa

    kind = array.type.value_type if pa.types.is_dictionary(array.type) else array.type
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)
    if not (is_number or pa.types.is_boolean(kind) or pa.types.is_null(kind) or _is_text(kind)):
        raise InvalidArgument(
            f"column {name!r} of {path.name!r} must hold numbers, texts or booleans, got {kind}. Convert the column."
        )
    if pa.types.is_null(kind):
        missing = np.full(len(array), -1, dtype=np.int64)
        return missing * np.nan if numeric else Coded(values=(), codes=missing)
    if not numeric:
        return _without_contents(path, lambda: _coded(array, kind))
    if _is_text(kind):
        return _without_contents(path, lambda: _parsed(array))
    return _without_contents(path, lambda: _numbers(array, kind))


def _is_text(kind: "pa.DataType") -> bool:
    import pyarrow as pa

    tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    return any(test(kind) for test in tests) or str(kind) in _VIEWS


def _numbers(array: "pa.ChunkedArray", kind: "pa.DataType") -> Float64[np.ndarray, " n"]:
    """Numbers and booleans as numbers; booleans are 0 and 1."""
    import pyarrow as pa

    plain = array.cast(kind) if pa.types.is_dictionary(array.type) else array
    plain = plain.cast(pa.uint8()) if pa.types.is_boolean(kind) else plain
    return np.array(plain.cast(pa.float64(), safe=False).to_numpy(), dtype=np.float64)


def _parsed(array: "pa.ChunkedArray") -> Float64[np.ndarray, " n"]:
    """The numbers that texts spell."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_dictionary(array.type):
        coded = _coded(array, array.type.value_type)
        # The extra last entry is what the code -1 (missing) finds.
        return np.array([*map(to_number, coded.values), np.nan], dtype=np.float64)[coded.codes]
    # As bytes: a text column of a Parquet file may hold bytes that are no text.
    cells = array.cast(pa.large_binary())
    # The functions of pyarrow.compute are made when it is imported, so a type checker does not know them.
    # Cell by cell, not by what the whole column looks like: one record must not change how another is read.
    plain = pc.fill_null(pc.match_substring_regex(cells, _PLAIN_NUMBER), fill_value=False)  # pyright: ignore[reportAttributeAccessIssue]
    easy = pc.if_else(plain, cells, pa.scalar(None, type=cells.type))  # pyright: ignore[reportAttributeAccessIssue]
    numbers = np.array(easy.cast(pa.large_string()).cast(pa.float64()).to_numpy(), dtype=np.float64)
    others = np.flatnonzero(~np.array(plain.to_numpy(), dtype=bool))
    numbers[others] = [to_number(_as_text(cell)) for cell in cells.take(pa.array(others)).to_pylist()]
    return numbers


def to_number(text: str) -> float:
    """The number that a text spells, NaN if it spells none.

    Beside Python's own spellings: ``true`` and ``false`` are 1 and 0, a percent sign at the end is left out (``45%`` is
    45), and so are commas between groups of three digits (``1,234.5`` is 1234.5). A decimal comma is no number.
    """
    plain = text.strip()
    if plain.lower() in _TRUTH:
        return _TRUTH[plain.lower()]
    plain = plain.removesuffix("%").rstrip()
    if _GROUPED_NUMBER.fullmatch(plain):
        plain = plain.replace(",", "")
    try:
        return float(plain)
    except ValueError:
        return np.nan


def number_text(value: float) -> str:
    """A number as the text that category lists and label sets use: whole numbers without a decimal point."""
    return str(int(value)) if value == value and abs(value) < 2**53 and value == int(value) else repr(value)


def _coded(array: "pa.ChunkedArray", kind: "pa.DataType") -> Coded:
    """A column of any kind as texts."""
    import pyarrow as pa

    if _is_text(kind) and not pa.types.is_dictionary(array.type):
        # As bytes: a text column of a Parquet file may hold bytes that are no text. Large: all of them may be many.
        array = array.cast(pa.large_binary())
    combined = array.combine_chunks()
    if isinstance(combined, pa.ChunkedArray):
        combined = pa.concat_arrays(combined.chunks) if combined.num_chunks else pa.array([], type=array.type)
    encoded = combined if pa.types.is_dictionary(combined.type) else combined.dictionary_encode()
    codes = np.array(encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False), dtype=np.int64)
    listed = encoded.dictionary.cast(pa.large_binary()) if _is_text(kind) else encoded.dictionary
    values = listed.to_pylist()
    if pa.types.is_float16(kind) or pa.types.is_float32(kind):
        # The shortest decimal that names the number at its own precision.
        narrow = np.float16 if pa.types.is_float16(kind) else np.float32
        values = [None if value is None else float(str(narrow(value))) for value in values]
    empty = np.array([value is None for value in values] + [False], dtype=bool)
    return Coded(values=tuple(map(_as_text, values)), codes=np.where(empty[codes], -1, codes))


def _as_text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bytes):
        return value.decode("utf-8", errors="replace").strip()
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | str):
        return str(value).strip()
    return number_text(float(cast("float", value)))
