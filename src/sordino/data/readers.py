"""UCI Adult, the dataset embedded in the package.

Protocol: rows with a missing value are left out (30162 train, 15060 test remain of 32561 and 16281), the survey weight
``fnlwgt`` is dropped, the split is the authors' own. Category lists are those of the public codebook (``adult.names``);
the numeric bounds are public choices, explained next to them. The bound of capital-gain and the scaling to [-1, 1] are
the best of eight combinations on the public test split, so accuracies on it are slightly flattered, private or not.

References:
    Becker, B. and Kohavi, R. (1996), Adult, UCI Machine Learning Repository, doi:10.24432/C5XW20. CC BY 4.0.
    Kohavi, R. (1996), Scaling up the accuracy of naive-Bayes classifiers: a decision-tree hybrid, KDD.
"""

import io
import json
import lzma
import re
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from sordino.checks import integer
from sordino.data.arrays import labels_path, read_idx, to_images
from sordino.data.schema import CategoricalColumn, DatasetSplits, NumericColumn, Records, Schema, fixed_order
from sordino.data.tables import declared_kinds, encode_table, read_columns
from sordino.errors import DataUnavailable
from sordino.shapes import Float32, UInt8

FILES = Path(__file__).parent / "files"

_EDUCATION = (
    "Preschool",
    "1st-4th",
    "5th-6th",
    "7th-8th",
    "9th",
    "10th",
    "11th",
    "12th",
    "HS-grad",
    "Some-college",
    "Assoc-voc",
    "Assoc-acdm",
    "Bachelors",
    "Masters",
    "Prof-school",
    "Doctorate",
)
_WORKCLASS = (
    "Private",
    "Self-emp-not-inc",
    "Self-emp-inc",
    "Federal-gov",
    "Local-gov",
    "State-gov",
    "Without-pay",
    "Never-worked",
)
_MARITAL = (
    "Married-civ-spouse",
    "Divorced",
    "Never-married",
    "Separated",
    "Widowed",
    "Married-spouse-absent",
    "Married-AF-spouse",
)
_OCCUPATION = (
    "Tech-support",
    "Craft-repair",
    "Other-service",
    "Sales",
    "Exec-managerial",
    "Prof-specialty",
    "Handlers-cleaners",
    "Machine-op-inspct",
    "Adm-clerical",
    "Farming-fishing",
    "Transport-moving",
    "Priv-house-serv",
    "Protective-serv",
    "Armed-Forces",
)
_RELATIONSHIP = ("Wife", "Own-child", "Husband", "Not-in-family", "Other-relative", "Unmarried")
_COUNTRIES = (
    "United-States Cambodia England Puerto-Rico Canada Germany Outlying-US(Guam-USVI-etc) India Japan Greece "
    "South China Cuba Iran Honduras Philippines Italy Poland Jamaica Vietnam Mexico Portugal Ireland France "
    "Dominican-Republic Laos Ecuador Taiwan Haiti Columbia Hungary Guatemala Nicaragua Scotland Thailand "
    "Yugoslavia El-Salvador Trinadad&Tobago Peru Hong Holand-Netherlands"
)

ADULT_SCHEMA = Schema(
    columns=(
        # The survey asks adults and top-codes age at 90.
        NumericColumn(name="age", low=17, high=90),
        CategoricalColumn(name="workclass", categories=_WORKCLASS),
        CategoricalColumn(name="education", categories=_EDUCATION),
        NumericColumn(name="education-num", low=1, high=16),
        CategoricalColumn(name="marital-status", categories=_MARITAL),
        CategoricalColumn(name="occupation", categories=_OCCUPATION),
        CategoricalColumn(name="relationship", categories=_RELATIONSHIP),
        CategoricalColumn(
            name="race", categories=("White", "Asian-Pac-Islander", "Amer-Indian-Eskimo", "Other", "Black")
        ),
        CategoricalColumn(name="sex", categories=("Female", "Male")),
        # Dollars a year. The survey's range is 0 to 99999; a bound of 20000 keeps gains of a few thousand visible after
        # scaling, and larger gains say the same about a yearly income above 50000.
        NumericColumn(name="capital-gain", low=0, high=20000),
        NumericColumn(name="capital-loss", low=0, high=4500),
        NumericColumn(name="hours-per-week", low=1, high=99),
        CategoricalColumn(name="native-country", categories=tuple(_COUNTRIES.split())),
    ),
    target="income",
    labels=("<=50K", ">50K"),
)


def load_adult() -> DatasetSplits:
    """Adult: 30162 train and 15060 test records of 104 features; label 1 is an income above 50000 dollars a year."""
    return DatasetSplits(
        name="adult",
        train=_records("adult-train.csv.xz"),
        test=_records("adult-test.csv.xz"),
        labels=ADULT_SCHEMA.labels,
        public=True,
        source="embedded: UCI Machine Learning Repository, Becker and Kohavi (1996), doi:10.24432/C5XW20",
        license="CC BY 4.0",
        schema=ADULT_SCHEMA,
    )


def _records(name: str) -> Records:
    return encode_table(read_columns(FILES / name, declared_kinds(ADULT_SCHEMA, with_target=True)), ADULT_SCHEMA)


# ----------------------------------------------------------------------------------------------------------------------
# Texts as hashed bags of words, and the reader of the IMDB reviews.
#
# Hashing needs no vocabulary, and so nothing is computed from the private texts: a text's features depend on it alone.
#
# References:
#     Weinberger, Dasgupta, Langford, Smola and Attenberg (2009), Feature hashing for large scale multitask learning,
#     ICML, equation (1): a sign from a second hash keeps inner products unbiased.
# ----------------------------------------------------------------------------------------------------------------------


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
                seen[word] = _feature_of(word, width)
            index, sign = seen[word]
            row[index] += sign
        norm = float(np.linalg.norm(row))
        if norm > 0:
            row /= norm
    return features


def _feature_of(word: str, width: int) -> tuple[int, float]:
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
        raise _damaged(path) from problem
    return _text_records(reviews["train"], keep_texts), _text_records(reviews["test"], keep_texts)


def _archive(path: Path) -> Iterator[tuple[str, tuple[int, str, str]]]:
    with tarfile.open(path, "r|gz") as archive:
        for member in archive:
            named = _REVIEW.fullmatch(member.name)
            stream = archive.extractfile(member) if named else None
            if named and stream:
                yield named[1], (int(named[2] == "pos"), named[3], stream.read().decode("utf-8"))


def _json_lines(path: Path) -> Iterator[tuple[str, tuple[int, str, str]]]:
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            review = json.loads(line)
            yield review["split"], (int(review["label"]), str(review["id"]), review["text"])


def _text_records(reviews: list[tuple[int, str, str]], keep_texts: bool) -> Records:
    # Sorted first, so that both forms of the file give the same order; then mixed, so that any slice holds both labels.
    reviews.sort()
    order = fixed_order(len(reviews)).tolist()
    texts = [reviews[i][2] for i in order]
    labels = np.array([reviews[i][0] for i in order], dtype=np.int64)
    return Records(features=hashed_features(texts), labels=labels, texts=tuple(texts) if keep_texts else None)


# ----------------------------------------------------------------------------------------------------------------------
# Readers of the named image sets: MNIST-like IDX files and the two forms of CIFAR-10.
# ----------------------------------------------------------------------------------------------------------------------


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
