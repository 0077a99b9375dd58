"""Records on disk, read one by one: for data beyond memory (floor 1, no torch).

Poisson sampling asks for a few records anywhere in the data set. Columns of a Parquet or CSV file can't give them
without reading everything around them; arrays in flat files can. `mapped_table` writes such files once, part by part,
and `MappedArrays` reads them as a map-style data set of which only the records of a batch come into memory.
"""

import mmap
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from sordino.data.encoding import encode
from sordino.data.records import Records
from sordino.data.schema import Numeric, Schema
from sordino.data.tables import is_table, iterate_columns
from sordino.errors import InvalidArgument

__all__ = ["MappedArrays", "mapped_table"]

_FEATURES, _LABELS = "features.npy", "labels.npy"
# Bytes of the files' pages that may stay in this process before they are let go, about.
_RESIDENT = 1 << 25
# Room for the header of an .npy file, which holds the number of rows and so is written last.
_HEADER = 128


class MappedArrays:
    """Equally long ``.npy`` arrays, records first, as a map-style data set: item i is the tuple of their i-th rows.

    When: the records don't fit into memory. Give it to `fit`, or to a torch DataLoader.

    Args:
        files: one ``.npy`` file for each array, written by ``numpy.save`` or `mapped_table`; no pickled objects.

    Raises:
        InvalidArgument: a file can't be read as an array, or lengths differ.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> np.save(folder / "x.npy", np.eye(3, dtype=np.float32)); np.save(folder / "y.npy", np.arange(3))
        >>> records = MappedArrays(folder / "x.npy", folder / "y.npy")
        >>> len(records), records[2][0].tolist(), int(records[2][1])
        (3, [0.0, 0.0, 1.0], 2)
    """

    def __init__(self, *files: str | Path) -> None:
        self._files = tuple(Path(file) for file in files)
        self._arrays = tuple(_open(file) for file in self._files)
        lengths = {len(array) for array in self._arrays}
        if len(lengths) != 1:
            raise InvalidArgument(
                f"files must be arrays of one length, got {len(lengths)} lengths. Give them in pairs."
            )
        # A row costs the pages that it lies on.
        self._row = sum(array[:1].nbytes + mmap.PAGESIZE for array in self._arrays)
        self._read = 0

    def __len__(self) -> int:
        return len(self._arrays[0])

    def __getitem__(self, index: int) -> tuple[np.ndarray | np.generic, ...]:
        """The `index`-th row of every array, copied into memory."""
        row = tuple(np.array(array[index])[()] for array in self._arrays)
        self._let_go(1)
        return row

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[np.ndarray | np.generic, ...]]:
        """The rows at `indices`, read in the order of the file and given in the order asked for."""
        wanted = np.asarray(indices, dtype=np.int64)
        order = np.argsort(wanted, kind="stable")
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        columns = [np.array(array[wanted[order]])[back] for array in self._arrays]
        self._let_go(len(wanted))
        return list(zip(*columns, strict=True))

    def _let_go(self, rows: int) -> None:
        """Give pages back now and then; the system keeps them while it has room, but not for this process."""
        self._read += rows
        if self._read * self._row > _RESIDENT:
            self._read = 0
            for array in self._arrays:
                _advise(array, "MADV_DONTNEED")

    def __reduce__(self) -> tuple[object, ...]:
        # A worker process maps the files anew instead of getting a copy of them.
        return type(self), self._files


def mapped_table(path: str | Path, *, schema: Schema, folder: str | Path, rows: int = 1 << 16) -> MappedArrays:
    """Encode a CSV, TSV or Parquet file of any length into ``features.npy`` and ``labels.npy``, in constant memory.

    Every record is encoded by itself, by the declared schema, exactly as `load` does it; records whose label is not in
    the label set are left out. The files appear when they are whole.

    Args:
        path: the table.
        schema: declares columns, bounds, categories and labels.
        folder: where the two files go; made if need be. Files of an earlier call are overwritten.
        rows: rows in memory at a time, about.

    Returns:
        Features, float32 (n, schema.width()), and labels, int64 (n,).

    Raises:
        InvalidArgument: the file can't be read or lacks a declared column. No message quotes a record.
    """
    path, folder = Path(path).expanduser(), Path(folder).expanduser()
    if not is_table(path):
        raise InvalidArgument(f"path must be a .csv, .tsv or .parquet file, got {str(path)!r}. Convert it.")
    names = [*(column.name for column in schema.columns), schema.target]
    numeric = [column.name for column in schema.columns if isinstance(column, Numeric)]
    folder.mkdir(parents=True, exist_ok=True)
    drafts = [folder / f".{name}.draft" for name in (_FEATURES, _LABELS)]
    parts = iterate_columns(path, names, numeric=numeric, rows=rows)
    try:
        _write(drafts, (encode(part, schema) for part in parts), schema)
    except BaseException:
        # Encoded records are as private as the table: none may stay behind unseen.
        for draft in drafts:
            draft.unlink(missing_ok=True)
        raise
    for draft, name in zip(drafts, (_FEATURES, _LABELS), strict=True):
        draft.replace(folder / name)
    return MappedArrays(folder / _FEATURES, folder / _LABELS)


def _write(drafts: Sequence[Path], parts: Iterable[Records], schema: Schema) -> None:
    count = 0
    with drafts[0].open("wb") as features, drafts[1].open("wb") as labels:
        for file in (features, labels):
            file.write(bytes(_HEADER))
        for records in parts:
            features.write(np.ascontiguousarray(records.features).data)
            labels.write(np.ascontiguousarray(records.labels).data)
            count += len(records)
        _finish(features, (count, schema.width()), "<f4")
        _finish(labels, (count,), "<i8")


def _finish(file: BinaryIO, shape: tuple[int, ...], kind: str) -> None:
    """Write the header in front of the rows: format 1.0 of numpy, padded to the room that was left."""
    facts = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape!r}, }}"
    body = facts.ljust(_HEADER - 11).encode("latin1") + b"\n"
    file.seek(0)
    file.write(b"\x93NUMPY\x01\x00" + len(body).to_bytes(2, "little") + body)
    file.flush()
    os.fsync(file.fileno())


def _advise(array: np.ndarray, advice: str) -> None:
    """Tell the system how a mapped array's pages are read, where it listens."""
    pages, code = getattr(array, "_mmap", None), getattr(mmap, advice, None)
    if isinstance(pages, mmap.mmap) and code is not None:
        pages.madvise(code)


def _open(file: Path) -> np.ndarray:
    try:
        array = np.load(file, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        reason = "there is no such file"
    except (OSError, ValueError, EOFError):
        reason = "it is no array, or one of Python objects"
    else:
        if isinstance(array, np.ndarray) and array.ndim >= 1:
            # Otherwise the neighbourhood of every row is read, 128 KiB as a rule: megabytes for a batch of kilobytes.
            _advise(array, "MADV_RANDOM")
            return array
        reason = "it holds no rows"
    raise InvalidArgument(f"{str(file)!r} must be an .npy array with the records first, but {reason}. Use numpy.save.")
