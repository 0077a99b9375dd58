"""Texts as hashed bags of words, and the reader of the IMDB reviews (floor 1).

Hashing needs no vocabulary, and so nothing is computed from the private texts: a text's features depend on it alone.

References:
    Weinberger, Dasgupta, Langford, Smola and Attenberg (2009), Feature hashing for large scale multitask learning,
    ICML, equation (1): a sign from a second hash keeps inner products unbiased.
"""

import json
import lzma
import re
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float32

from sordino.checks import integer
from sordino.data.records import Records, fixed_order
from sordino.errors import DataUnavailable

__all__ = ["TEXT_WIDTH", "hashed_features", "read_imdb"]

TEXT_WIDTH = 4096

_WORD = re.compile(r"[a-z0-9]+(?:'[a-z]+)?")
_REVIEW = re.compile(r"aclImdb/(train|test)/(neg|pos)/(\d+_\d+)\.txt")


def hashed_features(texts: Sequence[str], *, width: int = TEXT_WIDTH) -> Float32[np.ndarray, "n width"]:
    """Hashed presence of words, each text scaled to Euclidean length 1; a text without words is all zeros.

    Args:
        texts: The texts.
        width: Number of features, at least 2.

    Returns:
        One row per text. Word w adds ±1 to feature ``crc32(w) mod width``, once however often it occurs.

    Example:
        >>> hashed_features(["Good, good film!", ""], width=64).sum(axis=1).shape
        (2,)
    """
    integer(2, width=width)
    features = np.zeros((len(texts), width), dtype=np.float32)
    # Word → (feature, sign); remembering it changes nothing but the time.
    seen: dict[str, tuple[int, float]] = {}
    for row, text in zip(features, texts, strict=True):
        for word in set(_WORD.findall(text.lower())):
            if word not in seen:
                seen[word] = _place(word, width)
            index, sign = seen[word]
            row[index] += sign
        norm = float(np.linalg.norm(row))
        if norm > 0:
            row /= norm
    return features


def _place(word: str, width: int) -> tuple[int, float]:
    code = zlib.crc32(word.encode())
    # The top bit decides the sign; the index comes from the others.
    return (code & 0x7FFFFFFF) % width, 1.0 if code >> 31 else -1.0


def read_imdb(files: tuple[Path, ...], *, keep_texts: bool = False) -> tuple[Records, Records]:
    """Train and test reviews of the authors' archive or of the JSON-lines copy, in the same fixed mixed order.

    Args:
        files: The one file.
        keep_texts: Whether the records keep the raw reviews.

    Raises:
        DataUnavailable: If the file is damaged.
    """
    path = files[0]
    reviews: dict[str, list[tuple[int, str, str]]] = {"train": [], "test": []}
    try:
        for split, review in _archive(path) if path.name.endswith(".tar.gz") else _json_lines(path):
            reviews[split].append(review)
    except (OSError, EOFError, KeyError, ValueError, tarfile.TarError, lzma.LZMAError, zlib.error) as problem:
        raise DataUnavailable(
            f"{str(path)!r} must be a complete data file, got a damaged one. Fetch it again."
        ) from problem
    return _records(reviews["train"], keep_texts), _records(reviews["test"], keep_texts)


def _archive(path: Path) -> Iterator[tuple[str, tuple[int, str, str]]]:
    with tarfile.open(path, "r|gz") as archive:
        for member in archive:
            place = _REVIEW.fullmatch(member.name)
            stream = archive.extractfile(member) if place else None
            if place and stream:
                yield place[1], (int(place[2] == "pos"), place[3], stream.read().decode("utf-8"))


def _json_lines(path: Path) -> Iterator[tuple[str, tuple[int, str, str]]]:
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            review = json.loads(line)
            yield review["split"], (int(review["label"]), str(review["id"]), review["text"])


def _records(reviews: list[tuple[int, str, str]], keep_texts: bool) -> Records:
    # Sorted first, so that both forms of the file give the same order; then mixed, so that any slice holds both labels.
    reviews.sort()
    order = fixed_order(len(reviews)).tolist()
    texts = [reviews[i][2] for i in order]
    labels = np.array([reviews[i][0] for i in order], dtype=np.int64)
    return Records(features=hashed_features(texts), labels=labels, texts=tuple(texts) if keep_texts else None)
