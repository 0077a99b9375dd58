"""Array files: IDX (the format of MNIST) and npz."""

import gzip
import lzma
import mmap
import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import IO, BinaryIO, TypeVar

import numpy as np
from numpy.lib.npyio import NpzFile

from sordino.data.schema import ArraySchema, Records, Schema
from sordino.data.tables import encode_table, is_table, iterate_declared
from sordino.errors import InvalidArgument, MissingDeclaration
from sordino.shapes import Float32

_IDX_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_FEATURE_KEYS = ("features", "images", "x")
_LABEL_KEYS = ("labels", "y")
# Labels that a public sample may hold; more have to be declared.
_MAX_LABELS = 1 << 16

T = TypeVar("T")


def is_array(path: Path) -> bool:
    """Whether the name is that of an npz or IDX file: ``*.npz``, ``*.idx``, ``*-ubyte``, the last two also ``.gz``."""
    name = path.name.lower().removesuffix(".gz")
    return name.endswith((".npz", ".idx", "-ubyte"))


def read_idx(path: Path) -> np.ndarray:
    """Read one IDX file, plain or gzipped: an array of 1 to 8 dimensions in the machine's byte order.

    Raises:
        InvalidArgument: If the file is not there, or its header and length don't agree.
    """
    return _without_contents(path, lambda: _parse_idx(path.read_bytes()))


def _parse_idx(raw: bytes) -> np.ndarray:
    data = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
    zero, kind, rank = struct.unpack(">HBB", data[:4])
    if zero != 0 or kind not in _IDX_TYPES or not 1 <= rank <= 8:
        raise ValueError("not an IDX header")
    shape = struct.unpack(f">{rank}I", data[4 : 4 + 4 * rank])
    values = np.frombuffer(data, dtype=_IDX_TYPES[kind], offset=4 + 4 * rank)
    # reshape refuses a length that differs from the declared shape.
    return values.reshape(shape).astype(values.dtype.newbyteorder("="))


def labels_path(images: Path) -> Path:
    """The label file that belongs to an IDX image file: ``images`` becomes ``labels`` and ``idx3`` ``idx1``."""
    name = images.name.replace("images", "labels").replace("idx3", "idx1").replace("idx4", "idx1")
    if name == images.name:
        raise MissingDeclaration(
            f"the labels of {images.name!r} must be in a file whose name has 'labels' in place of 'images'. "
            "Rename both files like train-images-idx3-ubyte and train-labels-idx1-ubyte."
        )
    return images.with_name(name)


def read_arrays(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Features and labels of an npz file, or of an IDX image file and the label file next to it.

    Raises:
        InvalidArgument: If a file can't be read, or features and labels differ in length or kind.
    """
    features, labels = (
        _read_npz(path) if path.suffix.lower() == ".npz" else (read_idx(path), read_idx(labels_path(path)))
    )
    if features.ndim < 2 or labels.ndim != 1 or len(features) != len(labels):
        raise InvalidArgument(
            f"the arrays of {path.name!r} must be features (n, …) and labels (n,), "
            f"got {features.ndim} and {labels.ndim} dimensions or different lengths. Put the records first."
        )
    if features.dtype.kind not in "buif" or labels.dtype.kind not in "buif":
        raise InvalidArgument(
            f"the arrays of {path.name!r} must be numbers with numbers as labels, "
            f"got {features.dtype} and {labels.dtype}. Convert them; NaN stands for a missing number or label."
        )
    return features, labels


def unlisted_array_labels(path: Path, schema: ArraySchema) -> int:
    """The number of **public** records whose label is neither missing (NaN) nor the index of a listed label."""
    _, labels = read_arrays(path)
    return int((~np.isin(labels, np.arange(len(schema.labels))) & (labels == labels)).sum())


def array_records(path: Path, schema: ArraySchema) -> Records:
    """Records of an array file; those whose label is not the index of a listed label (NaN, 0.5) are left out."""
    features, labels = read_arrays(path)
    keep = np.isin(labels, np.arange(len(schema.labels)))
    return Records(
        features=to_images(features[keep], low=schema.low, high=schema.high),
        labels=labels[keep].astype(np.int64),
    )


def to_images(values: np.ndarray, *, low: float = 0.0, high: float = 255.0) -> Float32[np.ndarray, "n ..."]:
    """Numbers clipped to [low, high] and scaled to [0, 1]; (n, h, w) gets a channel axis; NaN becomes 0.5."""
    shaped = values[:, None] if values.ndim == 3 else values
    if shaped.dtype == np.uint8 and (low, high) == (0.0, 255.0):
        return np.divide(shaped, np.float32(255), dtype=np.float32)
    middle = low / 2 + high / 2
    with np.errstate(all="ignore"):  # a warning would tell that some number overflows
        numbers = shaped.astype(np.float64)
    clipped = np.clip(np.where(np.isnan(numbers), middle, numbers), low, high)
    return ((clipped / 2 - low / 2) / (high / 2 - low / 2)).astype(np.float32)


def array_schema_from_sample(sample: Path) -> ArraySchema:
    """Derive range and labels from a **public** array file of the same form; labels are named by their numbers."""
    features, labels = read_arrays(sample)
    whole = labels[np.isin(labels, np.arange(_MAX_LABELS))]
    count = int(whole.max(initial=0)) + 1
    if count < 2:
        raise MissingDeclaration("labels must be declared: the public sample holds fewer than two. Give a schema file.")
    finite = features[np.isfinite(features)]
    low, high = (0.0, 255.0) if features.dtype == np.uint8 else (float(finite.min()), float(finite.max()))
    return ArraySchema(labels=tuple(map(str, range(count))), low=low, high=high, origin="public_sample")


def _read_npz(path: Path) -> tuple[np.ndarray, np.ndarray]:
    def read() -> dict[str, np.ndarray]:
        # Never with pickles: a data file must not run code.
        with path.open("rb") as stream, _npz(stream) as file:
            return {key.lower(): file[key] for key in file.files if key.lower() in (*_FEATURE_KEYS, *_LABEL_KEYS)}

    arrays = _without_contents(path, read)
    features = [arrays[key] for key in _FEATURE_KEYS if key in arrays]
    labels = [arrays[key] for key in _LABEL_KEYS if key in arrays]
    if len(features) != 1 or len(labels) != 1:
        raise InvalidArgument(
            f"the arrays of {path.name!r} must be one of {', '.join(_FEATURE_KEYS)} "
            f"and one of {', '.join(_LABEL_KEYS)}. Save it with numpy.savez(path, features=…, labels=…)."
        )
    return features[0], labels[0]


def _npz(stream: IO[bytes]) -> NpzFile:
    archive = np.load(stream, allow_pickle=False)
    if not isinstance(archive, NpzFile):
        raise ValueError("a single array")
    return archive


def _without_contents(path: Path, read: Callable[[], T]) -> T:
    try:
        return read()
    except FileNotFoundError:
        reason = "there is no such file. Check the path"
    except (OSError, EOFError, ValueError, struct.error, zipfile.BadZipFile, zlib.error, lzma.LZMAError):
        reason = "its header and contents don't agree. Check format and compression"
    # Raised outside the handler, so that the reader's exception is not kept as its context.
    raise InvalidArgument(f"{str(path)!r} must be a readable array file, but {reason}.")


# ----------------------------------------------------------------------------------------------------------------------
# Records on disk, read one by one: for data beyond memory.
#
# Poisson sampling asks for a few records anywhere in the dataset. Columns of a Parquet or CSV file can't give them
# without reading everything around them; arrays in flat files can. `mapped_table` writes such files once, part by part,
# and `MappedArrays` reads them as a map-style dataset of which only the records of a batch come into memory.
# ----------------------------------------------------------------------------------------------------------------------


_FEATURES, _LABELS = "features.npy", "labels.npy"
# Bytes of the files' pages that may stay in this process before they are let go, about.
_RESIDENT = 1 << 25
# Room for the header of an .npy file, which holds the number of rows and so is written last.
_HEADER = 128


class MappedArrays:
    """Equally long ``.npy`` arrays, records first, as a map-style dataset: item i is the tuple of their i-th rows.

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
        # A worker process maps the files again instead of getting a copy of them.
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
    folder.mkdir(parents=True, exist_ok=True)
    drafts = [folder / f".{name}.draft" for name in (_FEATURES, _LABELS)]
    parts = iterate_declared(path, schema, rows=rows)
    try:
        _write(drafts, (encode_table(part, schema) for part in parts), schema)
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
            # Otherwise the neighborhood of every row is read, 128 KiB as a rule: megabytes for a batch of kilobytes.
            _advise(array, "MADV_RANDOM")
            return array
        reason = "it holds no rows"
    raise InvalidArgument(f"{str(file)!r} must be an .npy array with the records first, but {reason}. Use numpy.save.")
