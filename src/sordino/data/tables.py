"""Reading columns of CSV, TSV and Parquet files without ever quoting a cell.

The readers of pyarrow put the offending row into their messages. Here every failure of a reader becomes a message that
names the file and the column alone, and the original exception is dropped, context included. What a column may hold is
decided by its declared kind and its type in the file, both public; what a cell says is decided by that cell alone.
"""

import bz2
import codecs
import csv
import gzip
import lzma
import math
import re
import zlib
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import IO, TYPE_CHECKING, Literal, TypeVar, cast

import numpy as np
import numpy.typing as npt

from sordino.data.schema import (
    BooleanColumn,
    CategoricalColumn,
    DateColumn,
    NumericColumn,
    OrdinalColumn,
    Records,
    Schema,
    TableColumn,
    TableFormat,
)
from sordino.errors import InvalidArgument, MissingDeclaration
from sordino.installation import require
from sordino.shapes import Float32, Float64, Int64

if TYPE_CHECKING:
    import pyarrow as pa


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
            f"the header of {name!r} must be UTF-8 text, got another encoding. Give --encoding latin-1 (or cp1252, "
            'iso8859-15), or in the schema "format": {"encoding": "latin-1"}; or convert the file to UTF-8.'
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
    index = np.arange(len(quotes))
    is_first = np.diff(line, prepend=-1) != 0
    closes = (index - np.maximum.accumulate(np.where(is_first, index, 0))) % 2 == 1
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
_FEATHER = (".feather", ".arrow")
# Files of other programs, and what to do with them.
_OTHERS = {
    **dict.fromkeys((".xlsx", ".xlsm", ".xls", ".ods", ".numbers"), "Save the sheet as CSV UTF-8"),
    **dict.fromkeys((".sav", ".dta", ".sas7bdat", ".xpt", ".rds", ".rdata"), "Export it as CSV UTF-8"),
    **dict.fromkeys((".json", ".jsonl", ".ndjson", ".orc", ".avro", ".h5", ".hdf5"), "Convert it to Parquet"),
    **dict.fromkeys((".db", ".sqlite", ".sqlite3", ".duckdb"), "Export the table as Parquet or CSV"),
    **dict.fromkeys((".txt", ".dat", ".data", ".tab"), "Rename it to .csv and give the separator"),
}
_VIEWS = ("string_view", "binary_view")
# Numbers on which every correctly rounding parser agrees; the rest is left to Python's own.
_PLAIN_NUMBER = r"\A-?[0-9]{1,15}(\.[0-9]{1,20})?([eE][-+]?[0-9]{1,2})?\z"
_GROUPED_NUMBER = re.compile(r"[-+]?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]*)?")
_TRUTH = {"true": 1.0, "false": 0.0}
_EXCHANGED = str.maketrans(",.", ".,")

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class EncodedColumn:
    """A column of texts: the distinct values, and each record's index in them (-1 where missing)."""

    values: tuple[str, ...]
    codes: Int64[np.ndarray, " n"]

    def mapped(self, values: Iterable[object], missing: object, dtype: npt.DTypeLike | None = None) -> np.ndarray:
        """What each record has, given what each of the distinct values stands for."""
        # The extra last entry is what the code -1 (missing) finds.
        return np.array([*values, missing], dtype=dtype)[self.codes]


Column = EncodedColumn | Float64[np.ndarray, " n"]
"""A column of texts, or of numbers with NaN where missing."""

Kinds = Mapping[str, Literal["number", "date", "text"]]
"""Names of columns, and what each is read as."""


def is_table(path: Path) -> bool:
    """Whether the suffix is that of a CSV, TSV (plain or compressed), Parquet or Feather file."""
    return _kind(path) in _SEPARATORS or _kind(path) in (*_PARQUET, *_FEATHER)


def is_csv(path: Path) -> bool:
    """Whether the suffix is that of a CSV or TSV file, plain or compressed."""
    return _kind(path) in _SEPARATORS


def read_arrow(path: Path) -> "pa.Table":
    """A whole Parquet or Feather file as it stands."""
    import pyarrow as pa

    if is_csv(path):
        raise InvalidArgument(f"path must be a .parquet or .feather file, got {path.name!r}. Read its lines instead.")
    with ExitStack() as stack:
        names = _without_contents(path, lambda: list(_arrow_schema(path).names))
        tables = _without_contents(path, lambda: [*_arrow_parts(path, names, 1 << 16, stack)])
        return pa.concat_tables(tables) if tables else _arrow_schema(path).empty_table()


def refuse_other_table(path: Path) -> None:
    """Refuse a file of a known kind that is not read, with what to do.

    Raises:
        InvalidArgument: It is one.
    """
    kind = _kind(path)
    if kind in _OTHERS:
        raise InvalidArgument(
            f"data must be a .csv, .tsv, .parquet or .feather file, got a {kind} file, {path.name!r}. {_OTHERS[kind]}, "
            "then give that file."
        )


def read_header(path: Path, table_format: TableFormat | None = None) -> tuple[str, ...]:
    """The names of the columns, without surrounding white space.

    Raises:
        InvalidArgument: If the file can't be read, or a name is empty or repeated.
    """
    names = tuple(name.strip() for name in _raw_header(path, table_format or TableFormat()))
    if not names:
        raise InvalidArgument(f"{path.name!r} must begin with a line of column names, got an empty one. Add a header.")
    if len(set(names)) != len(names) or "" in names:
        raise InvalidArgument(f"the header of {path.name!r} must name every column once. Correct the header line.")
    return names


def read_types(path: Path) -> dict[str, str]:
    """The column types that a Parquet or Feather file states: number, text, boolean or date; none of a CSV file."""
    if _kind(path) in _SEPARATORS:
        return {}
    schema = _without_contents(path, lambda: _arrow_schema(path))
    found = {column.name.strip(): _type_name(column.type) for column in schema}
    return {name: kind for name, kind in found.items() if kind not in (None, "null")}


def _type_name(kind: "pa.DataType") -> str | None:
    """What a column of this type holds; None for anything else."""
    from pyarrow import types

    tests: dict[str, tuple[Callable[..., bool], ...]] = {
        "boolean": (types.is_boolean,),
        "integer": (types.is_integer,),
        "numeric": (types.is_floating, types.is_decimal),
        "date": (types.is_date, types.is_timestamp),
        "category": (
            *(types.is_dictionary, types.is_string, types.is_large_string, types.is_binary, types.is_large_binary),
            lambda kind: str(kind) in _VIEWS,
        ),
        "null": (types.is_null,),
    }
    return next((name for name, ones in tests.items() if any(test(kind) for test in ones)), None)


def read_columns(path: Path, kinds: Kinds, *, table_format: TableFormat | None = None) -> dict[str, Column]:
    """Read the named columns of a CSV, TSV, Parquet or Feather file.

    A line of a CSV file that is no record of the declared form (a wrong number of cells, a quote that does not close)
    is left out.

    Args:
        path: The file; ``.csv`` or ``.tsv`` with optional ``.gz``, ``.xz`` or ``.bz2``, ``.parquet`` or ``.feather``.
        kinds: Columns to read, others are never parsed; ``number`` for those to read as numbers. The others are read as
            texts, whatever their type: a ``date`` may be stored as a date, and is then a text in ISO 8601.
        table_format: How a CSV file is written.

    Raises:
        InvalidArgument: If the file can't be read, lacks a column, or a column's type is neither numbers, texts nor
            booleans (nor dates, where one is declared): the message names the column, and no cell.
    """
    form = table_format or TableFormat()
    columns = _raw_names(path, list(kinds), form)  # which finds out whether there is pyarrow
    import pyarrow as pa

    return _columns(path.name, pa.concat_tables(_parts(path, columns, 1 << 20, form)), columns, kinds, form.decimal)


def iterate_columns(
    path: Path, kinds: Kinds, *, table_format: TableFormat | None = None, rows: int = 1 << 16
) -> Iterator[dict[str, Column]]:
    """`read_columns` in parts of at most `rows` rows (Parquet) or about 16 MB: a file need not fit into memory.

    Where a part ends makes no difference to any row.

    Raises:
        InvalidArgument: As `read_columns` does.
    """
    form = table_format or TableFormat()
    columns = _raw_names(path, list(kinds), form)
    for table in _parts(path, columns, rows, form):
        yield _columns(path.name, table, columns, kinds, form.decimal)


def iterate_declared(
    path: Path, schema: Schema, *, with_target: bool = True, rows: int = 1 << 18
) -> Iterator[dict[str, Column]]:
    """The declared columns of a file in parts, each column in the form that `encode_table` wants.

    Raises:
        InvalidArgument: As `read_columns` does.
    """
    kinds = declared_kinds(schema, with_target=with_target)
    return iterate_columns(path, kinds, table_format=schema.table_format, rows=rows)


def require_declared_columns(path: Path, schema: Schema) -> None:
    """Read the header and refuse a file that lacks a declared column; no record is read.

    Raises:
        InvalidArgument: As `read_columns` does.
    """
    _raw_names(path, list(declared_kinds(schema, with_target=True)), schema.table_format)


def declared_kinds(schema: Schema, *, with_target: bool) -> Kinds:
    """Names of the declared columns, and what each is read as."""
    columns = (*schema.columns, schema.target_column) if with_target else schema.columns
    return {column.name: column.read_as for column in columns}


def arrow_columns(name: str, table: "pa.Table", kinds: Kinds) -> dict[str, Column]:
    """Columns of an Arrow table in memory, which errors call `name`, exactly as those of a file.

    Raises:
        InvalidArgument: A column is not there, or of a type that can't hold what is declared.
    """
    header = [column.strip() for column in table.column_names]
    if len(set(header)) != len(header):
        raise InvalidArgument(f"the columns of {name} must have different names. Rename those that repeat.")
    _require_names(f"the columns of {name}", list(kinds), header)
    raw = dict(zip(header, table.column_names, strict=True))
    return _columns(name, table, {column: raw[column] for column in kinds}, kinds, ".")


def _columns(name: str, table: "pa.Table", columns: Mapping[str, str], kinds: Kinds, decimal: str) -> dict[str, Column]:
    return {column: _column(name, column, table.column(raw), kinds[column], decimal) for column, raw in columns.items()}


def _raw_names(path: Path, names: Sequence[str], form: TableFormat) -> dict[str, str]:
    """`names`, all of which are there, and how the file spells each: white space around it may be part of it."""
    header = read_header(path, form)
    hint = separator_hint(path, header, form) if len(names) > 1 else ""
    _require_names(f"the columns of {path.name!r}", names, header, hint)
    raw = dict(zip(header, _raw_header(path, form), strict=True))
    return {name: raw[name] for name in names}


def separator_hint(path: Path, header: Sequence[str], form: TableFormat) -> str:
    """What to do about a header of one cell that holds another separator; nothing otherwise."""
    used = _separator(path, form)
    others = [mark for mark in ";\t|," if mark != used and mark in header[0]]
    if len(header) != 1 or not others or _kind(path) not in _SEPARATORS:
        return ""
    option = "tab" if others[0] == "\t" else f"'{others[0]}'"
    name = option.strip("'")
    return (
        f"The header looks separated by {'tabs' if name == 'tab' else option}: give --separator {option}, or in the "
        f'schema "format": {{"separator": "{name}"}}.'
    )


def _require_names(what: str, names: Sequence[str], header: Sequence[str], hint: str = "") -> None:
    absent = [name for name in names if name not in header]
    if absent:
        raise InvalidArgument(
            f"{what} must include every declared column, got none named "
            f"{', '.join(map(repr, absent))}. {hint or 'Correct the schema or the header.'}"
        )


def _separator(path: Path, form: TableFormat) -> str:
    return form.separator or _SEPARATORS.get(_kind(path), ",")


def _kind(path: Path) -> str:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in _COMPRESSIONS:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def _open(path: Path, form: TableFormat) -> IO[bytes]:
    openers: dict[str, Callable[..., IO[bytes]]] = {
        ".gz": cast("Callable[..., IO[bytes]]", gzip.open),
        ".xz": cast("Callable[..., IO[bytes]]", lzma.open),
        ".bz2": cast("Callable[..., IO[bytes]]", bz2.open),
    }
    file = openers.get(path.suffix.lower(), open)(path, "rb")
    return file if form.encoding == "utf-8" else cast("IO[bytes]", _Transcoded(file, form.encoding))


@contextmanager
def open_table_text(path: Path, table_format: TableFormat | None = None) -> Iterator[tuple[IO[bytes], str]]:
    """The bytes of a CSV or TSV file, decompressed, and the separator between its cells."""
    form = table_format or TableFormat()
    with closing(_open(path, replace(form, encoding="utf-8"))) as file:
        yield file, _separator(path, form)


class _Transcoded:
    """A file of one byte a character as UTF-8: each byte by itself, so that no line can reach into another."""

    def __init__(self, file: IO[bytes], encoding: str) -> None:
        self._file = file
        self._characters = "".join(bytes([byte]).decode(encoding, errors="replace") for byte in range(256))
        self.close = file.close

    def read(self, size: int) -> bytes:
        """At most `size` bytes: a character takes up to three in UTF-8."""
        return self._utf8(self._file.read(max(1, size // 3)))

    def readline(self, size: int) -> bytes:
        """The next line, or its first `size` characters."""
        return self._utf8(self._file.readline(size))

    def _utf8(self, raw: bytes) -> bytes:
        return codecs.charmap_decode(raw, "strict", self._characters)[0].encode()  # pyright: ignore[reportArgumentType]


def _without_contents(source: Path | str, read: Callable[[], T]) -> T:
    """Run a reader; a failure becomes a message that holds nothing of the contents of the file, or of what is named."""
    require("tables", "pyarrow", user="a table")
    import pyarrow as pa

    try:
        return read()
    except FileNotFoundError:
        reason = "there is no such file. Check the path"
    except InvalidArgument:
        raise
    except (OSError, EOFError, lzma.LZMAError, zlib.error, ValueError, KeyError, pa.ArrowException):
        kind = _kind(source).lstrip(".") if isinstance(source, Path) else ""
        reason = f"it can't be read as {kind or 'a table'}. Check format, encoding and compression"
    # Raised outside the handler, so that the reader's exception (which may quote a row) is not kept as its context.
    raise InvalidArgument(f"{str(source)!r} must be a readable table, but {reason}.")


def _raw_header(path: Path, form: TableFormat) -> list[str]:
    def read() -> list[str]:
        if _kind(path) not in _SEPARATORS:
            return list(_arrow_schema(path).names)
        with closing(_open(path, form)) as file:
            return read_header_line(file, _separator(path, form), name=path.name)

    refuse_other_table(path)
    if not is_table(path):
        raise InvalidArgument(
            f"{str(path)!r} must be a .csv, .tsv, .parquet or .feather file. Convert it, or rename it."
        )
    return _without_contents(path, read)


def _arrow_schema(path: Path) -> "pa.Schema":
    if _kind(path) in _PARQUET:
        import pyarrow.parquet as pq

        with pq.ParquetFile(path) as file:
            return file.schema_arrow
    import pyarrow as pa

    with pa.OSFile(str(path)) as source, pa.ipc.open_file(source) as file:
        return file.schema


def _parts(path: Path, columns: dict[str, str], rows: int, form: TableFormat) -> Iterator["pa.Table"]:
    """The table in parts, at least one; each failure of the reader is reported without contents."""
    import pyarrow as pa

    raw, found = list(columns.values()), False
    with ExitStack() as stack:
        if _kind(path) in _SEPARATORS:
            file = _without_contents(path, lambda: stack.enter_context(closing(_open(path, form))))
            empty = pa.table({name: pa.array([], type=pa.binary()) for name in raw})
            tables = _csv_parts(path, file, raw, form)
        else:
            schema = _without_contents(path, lambda: _arrow_schema(path))
            empty = pa.Table.from_batches([], schema=pa.schema([schema.field(name) for name in raw]))
            tables = _arrow_parts(path, raw, rows, stack)
        while (table := _without_contents(path, lambda: next(tables, None))) is not None:
            found = True
            yield table
    if not found:
        yield empty


def _arrow_parts(path: Path, names: list[str], rows: int, stack: ExitStack) -> Iterator["pa.Table"]:
    import pyarrow as pa

    if _kind(path) in _PARQUET:
        import pyarrow.parquet as pq

        opened = stack.enter_context(pq.ParquetFile(path))
        for batch in opened.iter_batches(batch_size=rows, columns=names):
            yield pa.Table.from_batches([batch])
        return
    source = stack.enter_context(pa.OSFile(str(path)))
    file = stack.enter_context(pa.ipc.open_file(source))
    for number in range(file.num_record_batches):
        yield pa.Table.from_batches([file.get_batch(number)]).select(names)


def _csv_parts(path: Path, file: IO[bytes], names: list[str], form: TableFormat) -> Iterator["pa.Table"]:
    import pyarrow as pa
    from pyarrow import csv as pa_csv

    separator = _separator(path, form)
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


def _column(source: str, name: str, array: "pa.ChunkedArray", read_as: str, decimal: str) -> Column:
    import pyarrow as pa

    kind = array.type.value_type if pa.types.is_dictionary(array.type) else array.type
    holds = _type_name(kind)
    if holds == "date" and read_as == "date":
        return _without_contents(source, lambda: _coded(_whole_microseconds(array, kind), kind))
    if holds in (None, "date"):
        raise InvalidArgument(
            f"column {name!r} of {source} must hold numbers, texts or booleans, got {kind}. "
            + ("Declare it as a date, or convert it." if holds == "date" else "Convert the column.")
        )
    if holds == "null":
        missing = np.full(len(array), -1, dtype=np.int64)
        return missing * np.nan if read_as == "number" else EncodedColumn(values=(), codes=missing)
    if read_as != "number":
        return _without_contents(source, lambda: _coded(array, kind))
    if holds == "category":
        return _without_contents(source, lambda: _parsed(array, decimal))
    return _without_contents(source, lambda: _numbers(array, kind))


def _whole_microseconds(array: "pa.ChunkedArray", kind: "pa.DataType") -> "pa.ChunkedArray":
    """Times without what Python's own have no room for: nanoseconds."""
    import pyarrow as pa

    plain = array.cast(kind) if pa.types.is_dictionary(array.type) else array
    return plain.cast(pa.timestamp("us", kind.tz), safe=False) if pa.types.is_timestamp(kind) else plain


def _numbers(array: "pa.ChunkedArray", kind: "pa.DataType") -> Float64[np.ndarray, " n"]:
    """Numbers and booleans as numbers; booleans are 0 and 1."""
    import pyarrow as pa

    plain = array.cast(kind) if pa.types.is_dictionary(array.type) else array
    plain = plain.cast(pa.uint8()) if pa.types.is_boolean(kind) else plain
    return np.array(plain.cast(pa.float64(), safe=False).to_numpy(), dtype=np.float64)


def _parsed(array: "pa.ChunkedArray", decimal: str) -> Float64[np.ndarray, " n"]:
    """The numbers that texts spell, with this character before the decimals."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_dictionary(array.type):
        coded = _coded(array, array.type.value_type)
        return coded.mapped((to_number(text, decimal) for text in coded.values), np.nan, np.float64)
    # As bytes: a text column of a Parquet file may hold bytes that are no text.
    cells = array.cast(pa.large_binary())
    # The functions of pyarrow.compute are made when it is imported, so a type checker does not know them.
    # Cell by cell, not by what the whole column looks like: one record must not change how another is read.
    pattern = _PLAIN_NUMBER if decimal == "." else _PLAIN_NUMBER.replace(r"\.", ",")
    plain = pc.fill_null(pc.match_substring_regex(cells, pattern), fill_value=False)  # pyright: ignore[reportAttributeAccessIssue]
    if decimal != ".":
        points = pc.replace_substring(cells, decimal, ".")  # pyright: ignore[reportAttributeAccessIssue]
        cells, spelled = points, cells
    else:
        spelled = cells
    easy = pc.if_else(plain, cells, pa.scalar(None, type=cells.type))  # pyright: ignore[reportAttributeAccessIssue]
    numbers = np.array(easy.cast(pa.large_string()).cast(pa.float64()).to_numpy(), dtype=np.float64)
    others = np.flatnonzero(~np.array(plain.to_numpy(), dtype=bool))
    numbers[others] = [to_number(_as_text(cell), decimal) for cell in spelled.take(pa.array(others)).to_pylist()]
    return numbers


def to_number(text: str, decimal: str = ".") -> float:
    """The number that a text spells, NaN if it spells none.

    Besides Python's own spellings: ``true`` and ``false`` are 1 and 0, a final percent sign is left out (``45%`` is
    45), and so are commas between groups of three digits (``1,234.5`` is 1234.5). With a decimal comma, points and
    commas change places: ``1.234,5`` is 1234.5. The wrong one of the two spells no number, unless it groups digits.
    """
    plain = text.strip()
    if decimal == ",":
        plain = plain.translate(_EXCHANGED)
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

    is_text = _type_name(kind) == "category"
    if is_text and not pa.types.is_dictionary(array.type):
        # As bytes: a text column of a Parquet file may hold bytes that are no text. Large: all of them may be many.
        array = array.cast(pa.large_binary())
    combined = array.combine_chunks()
    if isinstance(combined, pa.ChunkedArray):
        combined = pa.concat_arrays(combined.chunks) if combined.num_chunks else pa.array([], type=array.type)
    encoded = combined if pa.types.is_dictionary(combined.type) else combined.dictionary_encode()
    codes = np.array(encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False), dtype=np.int64)
    listed = encoded.dictionary.cast(pa.large_binary()) if is_text else encoded.dictionary
    values = listed.to_pylist()
    if pa.types.is_float16(kind) or pa.types.is_float32(kind):
        # The shortest decimal that names the number at its own precision.
        narrow = np.float16 if pa.types.is_float16(kind) else np.float32
        values = [None if value is None else float(str(narrow(value))) for value in values]
    empty = np.array([value is None for value in values] + [False], dtype=bool)
    return EncodedColumn(values=tuple(map(_as_text, values)), codes=np.where(empty[codes], -1, codes))


def entry_text(entry: object) -> str | None:
    """An entry of a column of objects as the text that a file would hold; None where it is missing, or is no value."""
    if isinstance(entry, np.generic):
        entry = entry.item()
    if isinstance(entry, float | Decimal):
        entry = float(entry)
        return None if entry != entry else number_text(entry)
    # NaT is a date that differs from itself.
    if isinstance(entry, bool | int | str | bytes) or (isinstance(entry, date) and entry == entry):
        return _as_text(entry)
    return None


def _as_text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, date):
        return value.isoformat()
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


# Texts that stand for a missing value where no list has them, in lower case: pandas reads them so, except ``?``.
_MISSING = frozenset(
    {"", "?", "na", "n/a", "nan", "-nan", "null", "none", "nat", "<na>", "#n/a", "#n/a n/a", "#na"}
    | {"-1.#ind", "1.#ind", "-1.#qnan", "1.#qnan"}
)


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
    values, decimal = column.values, schema.table_format.decimal
    if schema.target_bounds is None:
        is_listed = [index >= 0 for index in listed_indices(values, schema.labels)]
    else:
        is_listed = np.isfinite([to_number(value, decimal) for value in values])
    unlisted = [not known and not is_missing_text(value) for value, known in zip(values, is_listed, strict=True)]
    return int(column.mapped(unlisted, missing=False).sum())


def _fill(
    part: Float32[np.ndarray, "m w"], column: Column, declared: TableColumn, keep: Int64[np.ndarray, " m"]
) -> None:
    """Write the features of the rows `keep`; `part` is zero."""
    if isinstance(declared, CategoricalColumn):
        index = _category_positions(column, declared)[keep]
        rows = np.flatnonzero(index >= 0)
        part[rows, index[rows]] = 1.0
        return
    scaled = scaled_values(column, declared)[keep]
    lacking = np.isnan(scaled)
    part[:, 0] = np.where(lacking, 0.0, scaled)
    if declared.missing:
        part[:, 1] = lacking


def scaled_values(column: Column, declared: TableColumn) -> Float64[np.ndarray, " n"]:
    """The one number in [-1, 1] that each value of a column other than a category becomes, NaN where it is missing."""
    if isinstance(declared, NumericColumn):
        return _scaled(column_numbers(column, declared), declared)
    assert isinstance(column, EncodedColumn)
    if isinstance(declared, DateColumn):
        (low, high), seconds = declared.bounds, column_numbers(column, declared)
        return np.clip(2 * ((np.clip(seconds, low, high) - low) / (high - low)) - 1, -1.0, 1.0)
    if isinstance(declared, OrdinalColumn):
        levels = positions(column, declared.levels)
        return np.where(levels < 0, np.nan, 2.0 * levels / (len(declared.levels) - 1) - 1.0)
    assert isinstance(declared, BooleanColumn)
    signs = {value.lower(): 1.0 for value in declared.true} | {value.lower(): -1.0 for value in declared.false}
    return column.mapped((signs.get(value.lower(), np.nan) for value in column.values), np.nan)


def column_numbers(column: Column, declared: NumericColumn | DateColumn) -> Float64[np.ndarray, " n"]:
    """Numbers in the column's unit, or seconds from 1970; NaN where missing or unreadable."""
    if isinstance(declared, NumericColumn):
        return to_numbers(column)
    assert isinstance(column, EncodedColumn)
    return column.mapped(map(declared.seconds, column.values), np.nan, np.float64)


def _category_positions(column: Column, declared: CategoricalColumn) -> Int64[np.ndarray, " n"]:
    """Index of each value's feature, -1 where it has none."""
    index = positions(column, declared.categories)
    if not (declared.other or declared.missing):
        return index
    assert isinstance(column, EncodedColumn)
    is_missing = column.mapped(map(is_missing_text, column.values), missing=True)
    count = len(declared.categories)
    other = count if declared.other else -1
    missing = count + declared.other if declared.missing else -1
    return np.where(index >= 0, index, np.where(is_missing, missing, other))


def is_missing_text(text: str) -> bool:
    """Whether a text that no list has stands for a missing value."""
    return text.lower() in _MISSING


def _scaled(numbers: Float64[np.ndarray, " m"], declared: NumericColumn) -> Float64[np.ndarray, " m"]:
    """Numbers in [-1, 1], NaN where there is none."""
    low, high = float(declared.low), float(declared.high)
    clipped = np.clip(np.round(numbers) if declared.whole else numbers, low, high)
    if declared.log:
        low, high, clipped = math.log(low), math.log(high), np.log(clipped)
    # Halves first: high - low may overflow although both bounds are finite.
    middle, radius = low / 2 + high / 2, high / 2 - low / 2
    scaled = np.clip((clipped - middle) / radius, -1.0, 1.0) if radius > 0 else np.zeros_like(clipped)
    return np.where(np.isnan(numbers), np.nan, scaled)


def to_numbers(column: Column) -> Float64[np.ndarray, " n"]:
    """The column as numbers, NaN where missing or unreadable."""
    if not isinstance(column, EncodedColumn):
        return column
    return column.mapped(map(to_number, column.values), np.nan, np.float64)


def positions(column: Column, listed: tuple[str, ...]) -> Int64[np.ndarray, " n"]:
    """Index of each text in a public list, -1 where missing or unlisted."""
    assert isinstance(column, EncodedColumn)
    return column.mapped(listed_indices(column.values, listed), -1, np.int64)


def listed_indices(values: Iterable[str], listed: tuple[str, ...]) -> list[int]:
    """Index of each of these texts in a public list, -1 where it is not listed."""
    index = {value: i for i, value in enumerate(listed)}
    for text in ("true", "false"):
        # A boolean column of a file or table has these two; lists may spell them as pandas prints them.
        index.setdefault(text, index.get(text.capitalize(), index.get(text.upper(), -1)))
    return [index.get(value, -1) for value in values]


# ----------------------------------------------------------------------------------------------------------------------
# Schemas from a public sample.
#
# Bounds, categories and labels may be read off a sample that is public: one that holds no record of the private data.
# The schema that comes out is marked ``public_sample``, so that a report can say where its facts come from.
# ----------------------------------------------------------------------------------------------------------------------


_MAX_CATEGORIES = 100
# More different numbers than this are hardly classes: whole ones, and others.
_MAX_WHOLE_LABELS, _MAX_OTHER_LABELS = 32, 12


def schema_from_sample(
    sample: Path,
    *,
    target: str,
    target_bounds: tuple[float, float] | None = None,
    table_format: TableFormat | None = None,
) -> Schema:
    """Derive a schema from a **public** sample of the same form as the private table.

    A column whose values are all numbers becomes `NumericColumn` with the sample's smallest and largest value as
    bounds, one whose values are all dates in ISO 8601 `DateColumn` in the same way. Any other, ``true`` and ``false``
    too, becomes `CategoricalColumn` with the sample's values in alphabetical order. Labels are in numerical order if
    all are numbers. Empty cells and ``?``, ``NA`` and the like are missing values.

    Args:
        sample: A public CSV, TSV or Parquet file. Every column is used; leave out of it what isn't a feature.
        target: The label's column; its values in the sample become the label set.
        target_bounds: Public bounds of the target, where it is a number to predict and not a label.
        table_format: How a CSV sample is written; the schema says the same of the private file.

    Returns:
        A schema with origin ``public_sample``.

    Raises:
        InvalidArgument: If the sample can't be read or has no column named `target`.
        MissingDeclaration: If the sample doesn't settle a column (one value only, or more than 100 texts), or the
            target holds so many different numbers that it is hardly a label.
    """
    form = table_format or TableFormat()
    header = read_header(sample, form)
    if target not in header:
        raise InvalidArgument(
            f"target must be a column of the public sample {sample.name!r}, got {target!r}. Check it."
        )
    columns = read_columns(sample, dict.fromkeys(header, "date"), table_format=form)
    labels = () if target_bounds is not None else _sample_labels(target, columns[target])
    derived = tuple(_derive(name, columns[name], form.decimal) for name in header if name != target)
    return Schema(
        columns=derived,
        target=target,
        labels=labels,
        origin="public_sample",
        target_bounds=target_bounds,
        table_format=form,
    )


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


def _derive(name: str, column: Column, decimal: str) -> TableColumn:
    texts = _distinct(column)
    numbers = _samples_numbers(texts, decimal)
    if numbers is not None:
        finite = numbers[np.isfinite(numbers)]
        low, high = float(finite.min()), float(finite.max())
        if low < high:
            return NumericColumn(name=name, low=low, high=high)
        raise MissingDeclaration(
            f"the bounds of column {name!r} must be declared: the public sample holds one value only. "
            "Give a larger sample or a schema file."
        )
    spelled = DateColumn(name=name, low="1970-01-01", high="1970-01-02")
    dates = sorted((spelled.seconds(text), text) for text in texts)
    if dates and not np.isnan([seconds for seconds, _ in dates]).any() and dates[0][0] < dates[-1][0]:
        return DateColumn(name=name, low=dates[0][1], high=dates[-1][1])
    if 1 <= len(texts) <= _MAX_CATEGORIES:
        return CategoricalColumn(name=name, categories=texts)
    raise MissingDeclaration(
        f"the categories of column {name!r} must be declared: the public sample holds {len(texts)} distinct values, "
        f"where 1 to {_MAX_CATEGORIES} are allowed. Leave the column out of the sample, or give a schema file."
    )


def _samples_numbers(texts: tuple[str, ...], decimal: str = ".") -> np.ndarray | None:
    """The numbers that all of the texts spell, one of them finite; None if there are none, or they are truth values."""
    numbers = np.array([to_number(text, decimal) for text in texts], dtype=np.float64)
    is_truth = {text.lower() for text in texts} <= {"true", "false"}
    return None if is_truth or np.isnan(numbers).any() or not np.isfinite(numbers).any() else numbers


def _distinct(column: Column) -> tuple[str, ...]:
    """The different values, in the order of numbers if all are numbers, else of the alphabet."""
    assert isinstance(column, EncodedColumn)
    texts = tuple(sorted({value for value in column.values if value.lower() not in _MISSING}))
    numbers = _samples_numbers(texts)
    return texts if numbers is None else tuple(texts[index] for index in np.argsort(numbers, kind="stable"))
