"""Lines of a CSV or TSV file, each judged by itself (floor 1).

Only a line feed ends a line. A line is one of

- **whole**: all its quoted cells end within it, and it has as many cells as the header. It is a record, always.
- **opening**: it leaves a quoted cell open, with text behind the opening quote. It begins a record, always.
- **continuing**: neither of them; read from within a quoted cell it is well-formed, whether it ends that cell or not.

What a line is follows from the line and the header alone, and an opening line is never continuing: a quote that opens a
cell in the one reading closes one in the other, and may then not be followed by text. A record is a whole line, or an
opening line and the continuing lines right behind it up to the first that ends outside of quotes, if it has as many
cells as the header. All other lines are left out. So one malformed line can't swallow the lines of another record:
adding or removing one line, other than within a record of several lines, adds or removes at most one record. A text
that holds line breaks *and* whole lines of the table's own form counts as several records.
"""

import csv
import re
from collections.abc import Iterator
from typing import IO

import numpy as np

from sordino.errors import InvalidArgument

__all__ = ["LONGEST_LINE", "line_blocks", "lines_with_cells", "read_header_line"]

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
