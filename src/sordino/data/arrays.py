"""Array files: IDX (the format of MNIST) and npz (floor 1)."""

import gzip
import lzma
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, TypeVar

import numpy as np
from jaxtyping import Float32
from numpy.lib.npyio import NpzFile

from sordino.data.records import Records
from sordino.data.schema import ArraySchema
from sordino.errors import InvalidArgument, MissingDeclaration

__all__ = [
    "array_records",
    "array_schema_from_sample",
    "is_array",
    "labels_path",
    "read_arrays",
    "read_idx",
    "to_images",
]

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
    """Features and labels of an npz file, or of an IDX image file and the label file beside it.

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
