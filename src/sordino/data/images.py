"""Readers of the named image sets: MNIST-like IDX files and the two forms of CIFAR-10 (floor 1)."""

import io
import lzma
import tarfile
import zlib
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from sordino.data.arrays import labels_path, read_idx, to_images
from sordino.data.records import Records, fixed_order
from sordino.errors import DataUnavailable

__all__ = ["read_cifar_binary", "read_cifar_jpeg", "read_mnist"]

_BYTES = 3 * 32 * 32


def read_mnist(files: tuple[Path, ...]) -> tuple[Records, Records]:
    """Train and test records of the four IDX files: images in [0, 1] of shape (n, 1, 28, 28)."""
    train, _, test, _ = files
    return _idx_records(train), _idx_records(test)


def read_cifar_binary(files: tuple[Path, ...]) -> tuple[Records, Records]:
    """Train and test records of the authors' binary archive: images in [0, 1] of shape (n, 3, 32, 32).

    Raises:
        DataUnavailable: If the archive is damaged or lacks one of its six files.
    """
    names = [f"cifar-10-batches-bin/{name}.bin" for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")]
    try:
        with tarfile.open(files[0], "r:gz") as archive:
            streams = [archive.extractfile(name) for name in names]
            raw = [np.frombuffer(stream.read(), dtype=np.uint8).reshape(-1, 1 + _BYTES) for stream in streams if stream]
    except (OSError, EOFError, KeyError, ValueError, tarfile.TarError, zlib.error) as problem:
        raise _damaged(files[0]) from problem
    if len(raw) != len(names):
        raise _damaged(files[0])
    return _cifar_records(np.concatenate(raw[:5])), _cifar_records(raw[5])


def read_cifar_jpeg(files: tuple[Path, ...]) -> tuple[Records, Records]:
    """Train and test records of the lossy copy, in a fixed mixed order (the file is sorted by class).

    Each record of the file is: split (1 byte, 0 train, 1 test), label (1 byte), length (2 bytes, little-endian), JPEG.

    Raises:
        DataUnavailable: If the file is damaged, or pillow is not installed.
    """
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as problem:
        raise DataUnavailable("CIFAR-10 (JPEG) must be decoded by pillow. Install sordino[images].") from problem
    try:
        data = lzma.decompress(files[0].read_bytes())
        rows: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
        position = 0
        while position < len(data):
            split, label = data[position], data[position + 1]
            length = int.from_bytes(data[position + 2 : position + 4], "little")
            with Image.open(io.BytesIO(data[position + 4 : position + 4 + length])) as image:
                pixels = np.asarray(image.convert("RGB"), dtype=np.uint8).transpose(2, 0, 1).reshape(_BYTES)
            rows[split].append(np.concatenate([np.array([label], dtype=np.uint8), pixels]))
            position += 4 + length
        stacked = [np.stack(part) for part in rows]
    except (OSError, EOFError, IndexError, ValueError, lzma.LZMAError, UnidentifiedImageError) as problem:
        raise _damaged(files[0]) from problem
    return _cifar_records(_mixed(stacked[0])), _cifar_records(_mixed(stacked[1]))


def _idx_records(images: Path) -> Records:
    return Records(features=to_images(read_idx(images)), labels=read_idx(labels_path(images)).astype(np.int64))


def _cifar_records(rows: UInt8[np.ndarray, "n 3073"]) -> Records:
    images = rows[:, 1:].reshape(-1, 3, 32, 32)
    return Records(features=to_images(images), labels=rows[:, 0].astype(np.int64))


def _mixed(rows: UInt8[np.ndarray, "n 3073"]) -> UInt8[np.ndarray, "n 3073"]:
    # So that any slice holds all classes.
    return rows[fixed_order(len(rows))]


def _damaged(path: Path) -> DataUnavailable:
    return DataUnavailable(f"{str(path)!r} must be a complete data file, got a damaged one. Fetch it again.")
