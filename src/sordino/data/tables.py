"""Reading columns of CSV, TSV and Parquet files without ever quoting a cell.

The readers of pyarrow put the offending row into their messages. Here every failure of a reader becomes a message that
names the file and the column alone, and the original exception is dropped, context included. What a column may hold is
decided by its declared kind and its type in the file, both public; what a cell says is decided by that cell alone.
"""

import bz2
import csv
import gzip
import lzma
import re
import zlib
from codecs import BOM_UTF8
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypeVar, cast

import numpy as np

from sordino.data.schema import CategoricalColumn, NumericColumn, Records, Schema
from sordino.errors import InvalidArgument, MissingDeclaration
from sordino.installation import require
from sordino.shapes import Float32, Float64, Int64

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = [
    "Column",
    "EncodedColumn",
    "LONGEST_LINE",
    "arrow_columns",
    "encode_features",
    "encode_table",
    "is_table",
    "iterate_columns",
    "line_blocks",
    "lines_with_cells",
    "number_text",
    "open_table_text",
    "positions",
    "read_columns",
    "read_header",
    "read_header_line",
    "schema_from_sample",
    "to_number",
    "to_numbers",
    "unlisted_labels",
]


# ----------------------------------------------------------------------------------------------------------------------
# Lines of a CSV or TSV file, each judged by itself.
#
# Only a line feed ends a line. A line is one of
#
# - **whole**: all its quoted cells end within it, and it has as many cells as the header. It is a record, always.
# - **opening**: it leaves a quoted cell open, with text behind the opening quote. It begins a record, always.
# - **continuing**: neither of them; read from within a quoted cell it is well-formed, whether it ends that cell or not.
#
# What a line is follows from the line and the header alone, and an opening line is never continuing: a quote that opens
# a cell in the one reading closes one in the other, and may then not be followed by text. A record is a whole line, or
# an opening line and the continuing lines right behind it up to the first that ends outside of quotes, if it has as
# many cells as the header. All other lines are left out. So one malformed line can't swallow the lines of another
# record: adding or removing one line, other than within a record of several lines, adds or removes at most one record.
# A text that holds line breaks *and* whole lines of the table's own form counts as several records.
# ----------------------------------------------------------------------------------------------------------------------


LONGEST_LINE = 1 << 24
"""Bytes of the longest record that is read; a longer one is left out."""

# Bytes read at a time. At most LONGEST_LINE, so that only a line that begins in an earlier block can be too long.
_BLOCK = 1 << 24
_FEED, _RETURN, _QUOTE = b'\n\r"'
_LONE_RETURN = re.compile(rb"\r(?!\n)")
_LINE_BREAK = re.compile(rb"\r?\n")
# The inside of a quoted cell, in which two quotes stand for one.
_INSIDE = rb'[^"]*+(?:""[^"]*+)*+'


class _Grammar:
    """What a line with this separator and number of cells is. Patterns are of whole lines, without the line feed."""

    def __init__(self, separator: str, cells: int) -> None:
        self.separator, self.cells = separator.encode(), cells
        mark = re.escape(self.separator)
        loose = rb'(?:"' + _INSIDE + rb'"|[^"' + mark + rb"][^" + mark + rb"]*+|)"
        strict = rb'(?:"' + _INSIDE + rb'"|[^"\r' + mark + rb"]*+)(?=" + mark + rb"|\r?\Z)"
        ended = _INSIDE + rb'"(?:' + mark + strict + rb")*+"
        # Quotes within a cell that doesn't begin with one are ordinary characters.
        self.closed = re.compile(loose + rb"(?:" + mark + loose + rb")*+\r?")
        self.opening = re.compile(rb"(?:" + strict + mark + rb')*+"(?:"")*+[^"\r' + mark + rb"]" + _INSIDE)
        self.ending = re.compile(ended + rb"\r?")
        self.staying = re.compile(rb"(?:" + ended + mark + rb'")?+' + _INSIDE)
        self.quoted = re.compile(rb"(?<![^\n" + mark + rb'])"' + _INSIDE + rb'"')

    def fits(self, line: bytes) -> bool:
        """Whether a closed line has the right number of cells."""
        return self.quoted.sub(b"", line).count(self.separator) == self.cells - 1

    def is_whole(self, line: bytes) -> bool:
        """Whether a line is a record by itself."""
        return bool(self.closed.fullmatch(line)) and self.fits(line)


def read_header_line(file: IO[bytes], separator: str, *, name: str) -> list[str]:
    """The cells of the first line of `file`, which is left at the start of the second; errors call the file `name`.

    Raises:
        InvalidArgument: the line is not UTF-8, is longer than `LONGEST_LINE`, or its cells don't end within it.
    """
    line = file.readline(LONGEST_LINE + 1)
    if len(line) > LONGEST_LINE:
        raise InvalidArgument(
            f"the header of {name!r} must be at most {LONGEST_LINE} bytes long, got more. Correct it."
        )
    # The decoder's exception would quote the file; raised outside the handler it isn't kept as context.
    try:
        text = line.decode("utf-8-sig").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError:
        text = None
    if text is None:
        raise InvalidArgument(
            f"the header of {name!r} must be UTF-8 text, got another encoding. Convert the file to UTF-8."
        )
    if "\r" in text:
        raise InvalidArgument(
            f"the lines of {name!r} must end with a line feed, got a carriage return alone. Convert the line ends."
        )
    if not _Grammar(separator, 1).closed.fullmatch(text.encode()):
        raise InvalidArgument(
            f"the header of {name!r} must close each quoted cell within its line. Correct the header line."
        )
    return next(csv.reader([text], delimiter=separator), [])


def line_blocks(file: IO[bytes], separator: str, cells: int) -> Iterator[bytes]:
    """The records of the rest of `file`, one a line, in blocks that every CSV parser reads line by line.

    Args:
        file: open behind the header.
        separator: one ASCII character between cells.
        cells: number of cells of the header.

    Yields:
        Blocks of about 16 MB, none empty, each line of them ended by a line feed and with its quoted cells closed. A
        line break or a carriage return within a record is a space. Lines with a wrong number of cells are among them:
        `lines_with_cells` leaves them out.
    """
    grammar, held = _Grammar(separator, cells), b""
    for block in _whole_lines(file):
        kept, held = _records_of(held + block, grammar)
        if kept:
            yield kept


def lines_with_cells(block: bytes, separator: str, cells: int) -> bytes:
    """The lines of a block of `line_blocks` that have this number of cells."""
    # Without what stands in quotes, every separator is one between cells.
    bare = _Grammar(separator, cells).quoted.sub(b"", block) if b'"' in block else block
    plain, whole = (np.frombuffer(text, dtype=np.uint8) for text in (bare, block))
    found = np.searchsorted(np.flatnonzero(plain == ord(separator)), np.flatnonzero(plain == _FEED))
    fits = np.diff(found, prepend=0) == cells - 1
    return whole[np.repeat(fits, np.diff(np.flatnonzero(whole == _FEED), prepend=-1))].tobytes()


def _whole_lines(file: IO[bytes]) -> Iterator[bytes]:
    """Blocks of whole lines; those longer than `LONGEST_LINE` are left out, wherever the blocks begin."""
    held, too_long = b"", False
    while piece := file.read(_BLOCK):
        first = piece.find(b"\n")
        if first < 0:
            held = b"" if too_long else held + piece
            if len(held) > LONGEST_LINE:
                held, too_long = b"", True
            continue
        if too_long or len(held) + first > LONGEST_LINE:
            # An empty line in its place: what follows is not right behind what was before.
            piece = piece[first:]
            held, too_long = b"", False
        last = piece.rfind(b"\n") + 1
        yield held + piece[:last]
        held = piece[last:]
    if held:
        yield held + b"\n"


def _records_of(block: bytes, grammar: _Grammar) -> tuple[bytes, bytes]:
    """The closed lines of `block`, and from its last record on if only later lines can tell whether that is one."""
    if block.count(b"\r") != block.count(b"\r\n"):
        block = _LONE_RETURN.sub(b" ", block)
    if b'"' not in block:
        return block, b""
    values = np.frombuffer(block, dtype=np.uint8)
    ends = np.flatnonzero(values == _FEED)
    pieces, start, rest = [], 0, len(block)
    for number in _doubtful_lines(values, ends, ord(grammar.separator)):
        first, last = _border(ends, number), int(ends[number])
        # A line within the record before was looked at with that.
        if first < start or grammar.closed.fullmatch(block, first, last):
            continue
        pieces.append(block[start:first])
        start = last + 1
        if grammar.opening.fullmatch(block, first, last):
            end = _end_of_record(block, ends, number, grammar)
            if end is None:
                start = rest = first
                break
            record = _LINE_BREAK.sub(b" ", block[first:end]).rstrip(b"\r")
            if end > last and grammar.fits(record):
                pieces.append(record + b"\n")
                start = end + 1
    return b"".join([*pieces, block[start:rest]]), block[rest:]


def _end_of_record(block: bytes, ends: np.ndarray, number: int, grammar: _Grammar) -> int | None:
    """Where the record of several lines that begins in line `number` ends; that line's own end if there is no such.

    None if the block ends first.
    """
    opening = _border(ends, number)
    for last in map(int, ends[number + 1 :]):
        first, number = int(ends[number]) + 1, number + 1
        if last - opening > LONGEST_LINE or grammar.is_whole(block[first:last]):
            break
        if grammar.ending.fullmatch(block, first, last):
            return last
        if not grammar.staying.fullmatch(block, first, last):
            break
    else:
        return None
    return int(ends[np.searchsorted(ends, opening)])


def _border(ends: np.ndarray, number: int) -> int:
    """Where line `number` begins."""
    return int(ends[number - 1]) + 1 if number else 0


def _doubtful_lines(values: np.ndarray, ends: np.ndarray, separator: int) -> list[int]:
    """The lines that must be looked at alone: all but those that are surely closed.

    Surely closed is a line without a quote at the start of a cell (its quotes are ordinary characters), and one whose
    quotes alternate between the start of a cell and its end, where two in a row stand for one.
    """
    quotes = np.flatnonzero(values == _QUOTE)
    line = np.searchsorted(ends, quotes)
    place = np.arange(len(quotes))
    is_first = np.diff(line, prepend=-1) != 0
    closes = (place - np.maximum.accumulate(np.where(is_first, place, 0))) % 2 == 1
    before = np.where(quotes > 0, values[quotes - 1], _FEED)
    after = values[quotes + 1]
    starts_cell = (before == separator) | (before == _FEED)
    ends_cell = (after == separator) | (after == _FEED) | (after == _RETURN)
    regular = np.where(closes, ends_cell | (after == _QUOTE), starts_cell | (before == _QUOTE))
    # The last quote of a line must be one that closes.
    regular &= closes | (np.diff(line, append=-1) == 0)
    return np.intersect1d(line[~regular], line[starts_cell]).tolist()


# ----------------------------------------------------------------------------------------------------------------------
# Reading columns of CSV, TSV and Parquet files without ever quoting a cell.
# ----------------------------------------------------------------------------------------------------------------------


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
class EncodedColumn:
    """A column of texts: the distinct values, and each record's index in them (-1 where missing)."""

    values: tuple[str, ...]
    codes: Int64[np.ndarray, " n"]


Column = EncodedColumn | Float64[np.ndarray, " n"]
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
    columns = _raw_names(path, names)  # which finds out whether there is pyarrow
    import pyarrow as pa

    table = pa.concat_tables(_parts(path, columns, rows=1 << 20))
    return {name: _column(path, name, table.column(raw), numeric=name in numeric) for name, raw in columns.items()}


def arrow_columns(frame: object, wanted: "Schema | Sequence[str]") -> dict[str, Column]:
    """The named columns of a table in memory, read as those of a file are.

    Args:
        frame: a DataFrame of pandas or Polars, an Arrow table, or a mapping of columns.
        wanted: a schema, whose feature columns are read; or names, read as texts.

    Raises:
        InvalidArgument: it is no table, lacks a column, or a column's type can't hold what is declared.
    """
    import pyarrow as pa

    names = [column.name for column in wanted.columns] if isinstance(wanted, Schema) else list(wanted)
    numeric = (
        {column.name for column in wanted.columns if isinstance(column, NumericColumn)}
        if isinstance(wanted, Schema)
        else set()
    )
    known = (
        list(frame)
        if isinstance(frame, Mapping)
        else [str(name) for name in getattr(frame, "column_names", None) or getattr(frame, "columns", ())]
    )
    missing = [name for name in names if name not in known]
    if missing:
        raise InvalidArgument(
            f"X must have the declared columns, got none named {', '.join(map(repr, missing))}. Add it."
        )
    columns = {name: cast("Mapping[str, object]", frame)[name] for name in names}
    where = Path("the table")
    found = {}
    for name, values in columns.items():
        array = _without_contents(where, lambda values=values: _arrow_array(values))
        chunked = array if isinstance(array, pa.ChunkedArray) else pa.chunked_array([array])
        found[name] = _column(where, name, chunked, numeric=name in numeric)
    return found


def _arrow_array(values: object) -> "pa.Array | pa.ChunkedArray":
    """One column in memory as Arrow's; one of mixed objects as texts."""
    import pyarrow as pa

    if isinstance(values, pa.Array | pa.ChunkedArray):
        return values
    if hasattr(values, "to_arrow"):
        return cast("pa.Array", values.to_arrow())  # pyright: ignore[reportAttributeAccessIssue]
    try:
        return pa.array(values, from_pandas=True)
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        cells = [None if value is None or value != value else value for value in cast("Sequence[object]", values)]
        return pa.array([None if cell is None else _as_text(cell) for cell in cells])


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


@contextmanager
def open_table_text(path: Path) -> Iterator[tuple[IO[bytes], str]]:
    """A CSV or TSV file, decompressed, and the separator between its cells."""
    with closing(_open(path)) as file:
        yield file, _SEPARATORS[_kind(path)]


def _without_contents(path: Path, read: Callable[[], T]) -> T:
    """Run a reader; a failure becomes a message that holds nothing of the file's contents."""
    require("tables", "pyarrow", user="a table")
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
    """The table in parts, at least one; a failure of the reader is reported without contents."""
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
        return missing * np.nan if numeric else EncodedColumn(values=(), codes=missing)
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


def _coded(array: "pa.ChunkedArray", kind: "pa.DataType") -> EncodedColumn:
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
    return EncodedColumn(values=tuple(map(_as_text, values)), codes=np.where(empty[codes], -1, codes))


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


# ----------------------------------------------------------------------------------------------------------------------
# From columns to features and labels, one record at a time.
#
# Every row of the result depends on the same row of the file and on the declared schema alone, so that adding or
# removing one record of the file changes at most one record of the result. Nothing here raises because of a record.
# ----------------------------------------------------------------------------------------------------------------------


# Texts that stand for a missing value in a public sample or test file, in lower case.
_MISSING = frozenset({"", "?", "na", "n/a", "nan", "null", "none"})


def encode_table(columns: Mapping[str, Column], schema: Schema) -> Records:
    """Encode the declared columns; records whose label is not in the label set, or is no finite number, are left out.

    Args:
        columns: The declared columns and the target, as read from the file.
        schema: The declared schema.

    Returns:
        Records with features (n, schema.width()): numbers in [-1, 1], categories one-hot. Labels are indices in the
        label set, or the numbers of a numeric target in its own unit, not clipped.
    """
    if schema.target_bounds is None:
        labels = positions(columns[schema.target], schema.labels)
        keep = np.flatnonzero(labels >= 0)
    else:
        labels = to_numbers(columns[schema.target])
        keep = np.flatnonzero(np.isfinite(labels))
    return Records(features=encode_features(columns, schema, keep), labels=labels[keep])


def encode_features(
    columns: Mapping[str, Column], schema: Schema, keep: Int64[np.ndarray, " m"] | None = None
) -> Float32[np.ndarray, "m w"]:
    """The declared columns as features (m, schema.width()), of the rows `keep` or of all; no target is needed."""
    if keep is None:
        first = columns[schema.columns[0].name]
        keep = np.arange(len(first.codes if isinstance(first, EncodedColumn) else first))
    features = np.zeros((len(keep), schema.width()), dtype=np.float32)
    start = 0
    for declared in schema.columns:
        part = features[:, start : start + declared.width]
        _fill(part, columns[declared.name], declared, keep)
        start += declared.width
    return features


def unlisted_labels(columns: Mapping[str, Column], schema: Schema) -> int:
    """The number of **public** records with a label that the schema does not list, or with no number as the target.

    A missing label (none, an empty cell, ``?``, ``NA`` and the like) is not counted.
    """
    column = columns[schema.target]
    assert isinstance(column, EncodedColumn)
    listed = {*schema.labels}

    def is_listed(value: str) -> bool:
        return value in listed if schema.target_bounds is None else bool(np.isfinite(to_number(value)))

    unlisted = [not is_listed(value) and value.lower() not in _MISSING for value in column.values]
    return int(np.array([*unlisted, False])[column.codes].sum())


def _fill(
    part: Float32[np.ndarray, "m w"],
    column: Column,
    declared: NumericColumn | CategoricalColumn,
    keep: Int64[np.ndarray, " m"],
) -> None:
    if isinstance(declared, NumericColumn):
        part[:, 0] = _scaled(to_numbers(column)[keep], declared)
        return
    index = positions(column, declared.categories)[keep]
    rows = np.flatnonzero(index >= 0)
    part[rows, index[rows]] = 1.0


def _scaled(numbers: Float64[np.ndarray, " m"], declared: NumericColumn) -> Float64[np.ndarray, " m"]:
    # Halves first: high - low may overflow although both bounds are finite.
    middle = declared.low / 2 + declared.high / 2
    radius = declared.high / 2 - declared.low / 2
    clipped = np.clip(np.where(np.isnan(numbers), middle, numbers), declared.low, declared.high)
    return np.clip((clipped - middle) / radius, -1.0, 1.0) if radius > 0 else np.zeros_like(clipped)


def to_numbers(column: Column) -> Float64[np.ndarray, " n"]:
    """The column as numbers, NaN where missing or unreadable."""
    if not isinstance(column, EncodedColumn):
        return column
    # The extra last entry is what the code -1 (missing) finds.
    numbers = np.array([*map(to_number, column.values), np.nan], dtype=np.float64)
    return numbers[column.codes]


def positions(column: Column, listed: tuple[str, ...]) -> Int64[np.ndarray, " n"]:
    """Index of each text in a public list, -1 where missing or unlisted."""
    assert isinstance(column, EncodedColumn)
    index = {value: i for i, value in enumerate(listed)}
    found = np.array([*(index.get(value, -1) for value in column.values), -1], dtype=np.int64)
    return found[column.codes]


# ----------------------------------------------------------------------------------------------------------------------
# Schemas from a public sample.
#
# Bounds, categories and labels may be read off a sample that is public: one that holds no record of the private data.
# The schema that comes out is marked ``public_sample``, so that a report can say where its facts come from.
# ----------------------------------------------------------------------------------------------------------------------


_MAX_CATEGORIES = 100
# More different numbers than this are hardly classes: whole ones, and others.
_MAX_WHOLE_LABELS, _MAX_OTHER_LABELS = 32, 12


def schema_from_sample(sample: Path, *, target: str, target_bounds: tuple[float, float] | None = None) -> Schema:
    """Derive a schema from a **public** sample of the same form as the private table.

    A column whose values are all numbers becomes `NumericColumn` with the sample's smallest and largest value as
    bounds; any other, ``true`` and ``false`` too, becomes `CategoricalColumn` with the sample's values in alphabetical
    order. Labels are in numerical order if all are numbers. Empty cells and ``?``, ``NA`` and the like are missing
    values.

    Args:
        sample: A public CSV, TSV or Parquet file. Every column is used; leave out of it what isn't a feature.
        target: The label's column; its values in the sample become the label set.
        target_bounds: Public bounds of the target, where it is a number to predict and not a label.

    Returns:
        A schema with origin ``public_sample``.

    Raises:
        InvalidArgument: If the sample can't be read or has no column named `target`.
        MissingDeclaration: If the sample doesn't settle a column (one value only, or more than 100 texts), or the
            target holds so many different numbers that it is hardly a label.
    """
    header = read_header(sample)
    if target not in header:
        raise InvalidArgument(
            f"target must be a column of the public sample {sample.name!r}, got {target!r}. Check it."
        )
    columns = read_columns(sample, header)
    labels = () if target_bounds is not None else _sample_labels(target, columns[target])
    derived = tuple(_derive(name, columns[name]) for name in header if name != target)
    return Schema(columns=derived, target=target, labels=labels, origin="public_sample", target_bounds=target_bounds)


def _sample_labels(target: str, column: Column) -> tuple[str, ...]:
    """The label set: the values in the sample. Refuses a column of measurements: each value would be a class."""
    labels = _distinct(column)
    if len(labels) < 2:
        raise MissingDeclaration(
            f"the labels of target {target!r} must be at least two, got {len(labels)} in the public sample. "
            "Give a larger sample or a schema file."
        )
    numbers = _samples_numbers(labels)
    whole = numbers is not None and bool((numbers == np.round(numbers)).all())
    if numbers is not None and len(labels) > (_MAX_WHOLE_LABELS if whole else _MAX_OTHER_LABELS):
        raise MissingDeclaration(
            f"target {target!r} must be declared as a number or as a label: the public sample holds {len(labels)} "
            "different numbers, each of which would be a class. To predict the number give target_bounds "
            f"(--target-bounds LOW HIGH), or a schema with low and high of {target!r}. If they are classes, give a "
            "schema that lists them as labels."
        )
    return labels


def _derive(name: str, column: Column) -> NumericColumn | CategoricalColumn:
    texts = _distinct(column)
    numbers = _samples_numbers(texts)
    if numbers is not None:
        finite = numbers[np.isfinite(numbers)]
        low, high = float(finite.min()), float(finite.max())
        if low < high:
            return NumericColumn(name=name, low=low, high=high)
        raise MissingDeclaration(
            f"the bounds of column {name!r} must be declared: the public sample holds one value only. "
            "Give a larger sample or a schema file."
        )
    if 1 <= len(texts) <= _MAX_CATEGORIES:
        return CategoricalColumn(name=name, categories=texts)
    raise MissingDeclaration(
        f"the categories of column {name!r} must be declared: the public sample holds {len(texts)} distinct values, "
        f"where 1 to {_MAX_CATEGORIES} are allowed. Leave the column out of the sample, or give a schema file."
    )


def _samples_numbers(texts: tuple[str, ...]) -> np.ndarray | None:
    """The numbers that all of the texts spell, one of them finite; None if there are none, or they are truth values."""
    numbers = np.array([*map(to_number, texts)], dtype=np.float64)
    is_truth = {text.lower() for text in texts} <= {"true", "false"}
    return None if is_truth or np.isnan(numbers).any() or not np.isfinite(numbers).any() else numbers


def _distinct(column: Column) -> tuple[str, ...]:
    """The different values, in the order of numbers if all are numbers, else of the alphabet."""
    assert isinstance(column, EncodedColumn)
    texts = tuple(sorted({value for value in column.values if value.lower() not in _MISSING}))
    numbers = _samples_numbers(texts)
    return texts if numbers is None else tuple(texts[place] for place in np.argsort(numbers, kind="stable"))
