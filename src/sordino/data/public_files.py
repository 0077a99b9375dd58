"""Files that a user declares public must not be the private file in another place or form (floor 1).

A public file may be read without noise: its bounds become the schema, exact counts of its records are shown. Whether a
file is public can't be seen; that it is the private one can.
"""

import bz2
import gzip
import lzma
import zlib
from collections.abc import Callable
from contextlib import closing
from itertools import zip_longest
from pathlib import Path
from typing import IO, cast

import numpy as np

from sordino.data.records import Records
from sordino.errors import InvalidArgument

__all__ = ["require_other_file", "require_other_records"]

_CHUNK = 1 << 20
_MAGIC = {
    b"\x1f\x8b": cast("Callable[..., IO[bytes]]", gzip.open),
    b"\xfd7zXZ": cast("Callable[..., IO[bytes]]", lzma.open),
    b"BZh": cast("Callable[..., IO[bytes]]", bz2.open),
}


def require_other_file(name: str, public: Path, *, private: Path) -> None:
    """Refuse `public` if it is the private file: the same path, a link to it, or a copy, compressed or not.

    Raises:
        InvalidArgument: it is; the message calls it `name`.
    """
    if not (public.is_file() and private.is_file()):
        return  # the reader says so
    if public.samefile(private) or _same_contents(public, private):
        raise _refused(name)


def require_other_records(name: str, public: Records, *, private: Records) -> None:
    """Refuse public records that are the private ones, in any order: a converted or shuffled copy.

    Raises:
        InvalidArgument: they are; the message calls them `name`.
    """
    if not len(public) or len(public) != len(private) or public.record_shape != private.record_shape:
        return
    if np.array_equal(np.sort(public.labels), np.sort(private.labels)) and np.array_equal(
        _sorted_rows(public), _sorted_rows(private)
    ):
        raise _refused(name)


def _refused(name: str) -> InvalidArgument:
    return InvalidArgument(
        f"{name} must be a file of other, public records (a public sample), got the private file or a copy of it. "
        "Give a file of public records."
    )


def _sorted_rows(records: Records) -> np.ndarray:
    """Features and label of each record as bytes, in an order that is theirs alone."""
    rows = np.column_stack([records.features.reshape(len(records), -1).astype(np.float64), records.labels])
    return np.sort(np.ascontiguousarray(rows + 0.0).view(f"S{rows.shape[1] * 8}").ravel())


def _same_contents(first: Path, second: Path) -> bool:
    """Whether both files hold the same bytes, after decompression."""
    try:
        with closing(_opened(first)) as one, closing(_opened(second)) as other:
            pieces = zip_longest(iter(lambda: one.read(_CHUNK), b""), iter(lambda: other.read(_CHUNK), b""))
            return all(a == b for a, b in pieces)
    except (OSError, EOFError, lzma.LZMAError, zlib.error):
        return False  # a damaged file; its reader says so


def _opened(file: Path) -> IO[bytes]:
    with file.open("rb") as stream:
        start = stream.read(6)
    return next((opener for magic, opener in _MAGIC.items() if start.startswith(magic)), open)(file, "rb")
