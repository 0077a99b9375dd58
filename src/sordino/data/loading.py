"""`load`: a named dataset, or a file of the user's own with its declared schema."""

import bz2
import gzip
import lzma
import zlib
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import IO, cast

import numpy as np

from sordino.data.arrays import array_records, array_schema_from_sample, is_array, unlisted_array_labels
from sordino.data.catalog import CATALOG, Found, NamedDataset, dataset_folder, download_dataset, find, get_named_dataset
from sordino.data.readers import (
    ADULT_SCHEMA,
    FILES,
    load_adult,
    read_cifar_binary,
    read_cifar_jpeg,
    read_imdb,
    read_mnist,
)
from sordino.data.schema import ArraySchema, DatasetSplits, Records, Schema, TableFormat, read_schema
from sordino.data.tables import (
    encode_table,
    is_table,
    iterate_columns,
    iterate_declared,
    read_header,
    refuse_other_table,
    schema_from_sample,
    unlisted_labels,
)
from sordino.errors import DataUnavailable, InvalidArgument, MissingDeclaration

# ----------------------------------------------------------------------------------------------------------------------
# `load_named`: one named set, from wherever it lies, fetched if need be.
# ----------------------------------------------------------------------------------------------------------------------


def load_named(name: str, *, keep_texts: bool = False) -> DatasetSplits:
    """Load one named set; one that is not on this machine is fetched into the cache first.

    Args:
        name: A name from the catalog.
        keep_texts: Keep the raw texts, for a set that has texts.

    Raises:
        DataUnavailable: If the set is not here and can't be fetched, or its files are damaged.
    """
    if name == "adult":
        return load_adult()
    wanted = get_named_dataset(name)
    found = find(wanted)
    if found is None:
        download_dataset(name)
        found = find(wanted)
    if found is None:
        raise DataUnavailable(f"the dataset {name!r} must be on this machine, got none. Run `sordino data get {name}`.")
    train, test = _read(found, keep_texts=keep_texts)
    _require_shapes(wanted, found, train, test)
    return DatasetSplits(
        # A lossy copy goes by its own name in every table.
        name=found.layout.title if found.layout.lossy else name,
        train=train,
        test=test,
        labels=wanted.labels,
        public=True,
        source=f"{wanted.source} ({found.origin}: {', '.join(path.name for path in found.files)})",
        license=wanted.license,
        schema=None,
    )


def _read(found: Found, *, keep_texts: bool) -> tuple[Records, Records]:
    first = found.layout.files[0]
    if first == "cifar-10-binary.tar.gz":
        return read_cifar_binary(found.files)
    if first == "cifar10_jpeg.bin.xz":
        return read_cifar_jpeg(found.files)
    if found.layout.title == "IMDB":
        return read_imdb(found.files, keep_texts=keep_texts)
    return read_mnist(found.files)


def _require_shapes(wanted: NamedDataset, found: Found, train: Records, test: Records) -> None:
    shapes = (train.features.shape, test.features.shape)
    if shapes != (wanted.train_shape, wanted.test_shape):
        raise DataUnavailable(
            f"the dataset {wanted.name!r} must have the shapes {wanted.train_shape} and {wanted.test_shape}, got "
            f"{shapes[0]} and {shapes[1]} from {found.files[0].parent}. Replace the files, or run "
            f"`sordino data get {wanted.name}`."
        )


# ----------------------------------------------------------------------------------------------------------------------
# Files that a user declares public must not be the private file in another place or form.
#
# A public file may be read without noise: its bounds become the schema, exact counts of its records are shown. Whether
# a file is public can't be seen; that it is the private one can.
# ----------------------------------------------------------------------------------------------------------------------


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


# ----------------------------------------------------------------------------------------------------------------------
# `load`: a named dataset, or a file of the user's own with its declared schema.
# ----------------------------------------------------------------------------------------------------------------------


_SHOWN = 20


def load_dataset(
    name_or_path: str | Path,
    *,
    target: str | None = None,
    schema: Schema | ArraySchema | str | Path | None = None,
    public_schema_from: str | Path | None = None,
    target_bounds: tuple[float, float] | None = None,
    test: str | Path | None = None,
    test_is_public: bool = True,
    table_format: TableFormat | None = None,
    keep_texts: bool = False,
) -> DatasetSplits:
    """Load a named public dataset, or a file of the user's own.

    Bounds, categories and labels of a user's file are declared, by `schema` or by a public sample; they are never
    computed from the file. Every record is encoded by itself: missing or unreadable numbers become the middle of their
    bounds, unlisted categories all zeros, and records whose label is not in the label set, or whose numeric target is
    no finite number, are left out.

    Args:
        name_or_path: A name from `available`, or the path of a CSV, TSV, Parquet, npz or IDX file.
        target: The label's column; needed with `public_schema_from`, otherwise checked against the schema.
        schema: The declared schema, or the JSON file that holds it.
        public_schema_from: A public sample of the same form, from which the schema is derived and so marked.
        target_bounds: With `public_schema_from`: public bounds of the target where it is a number to predict.
        test: A second file of the same form, to measure on. Without it a user's file has no test split. Neither may be
            the private file, a link to it, a copy, a compressed or converted copy, or hold the same records.
        test_is_public: Whether that file's records are public. If so, labels outside the label set are refused with the
            number of their rows; otherwise such rows are left out without a word, as in the private file.
        table_format: How the CSV files are written, in place of what the schema says.
        keep_texts: Keep the raw texts of a text dataset with its features.

    Raises:
        MissingDeclaration: If a bound, category list, label set or the target was not declared.
        DataUnavailable: If a named set is not on this machine; the message says which file to place where.
        InvalidArgument: If an argument doesn't fit, or a file can't be read. No message quotes a record.

    Example:
        >>> adult = load_dataset("adult")
        >>> len(adult.train), len(adult.test), adult.schema.width()
        (30162, 15060, 104)
    """
    if str(name_or_path) in CATALOG:
        _check_for_named(str(name_or_path), schema=schema, public_schema_from=public_schema_from, test=test)
        found = load_named(str(name_or_path), keep_texts=keep_texts)
        _require_target(target, found.schema.target if found.schema else "label")
        return found
    path = Path(name_or_path).expanduser()
    refuse_other_table(path)
    if not is_table(path) and not is_array(path):
        raise InvalidArgument(
            f"data must be one of {', '.join(CATALOG)} or a .csv, .tsv, .parquet, .feather, .npz or IDX file, "
            f"got {str(name_or_path)!r}. Run `sordino data list` to see the named sets."
        )
    sample = Path(public_schema_from).expanduser() if public_schema_from is not None else None
    if sample is not None and schema is not None:
        raise InvalidArgument("schema must be given alone, got public_schema_from as well. Give one of them.")
    if target_bounds is not None and (sample is None or is_array(path)):
        raise InvalidArgument(
            "target_bounds must be given with public_schema_from, for a table, got it otherwise. In a schema file "
            "write low and high next to target."
        )
    declared = read_schema(Path(schema)) if isinstance(schema, str | Path) else schema
    if table_format is not None and isinstance(declared, Schema):
        declared = replace(declared, table_format=table_format)
    test_path = Path(test).expanduser() if test is not None else None
    for name, public in (("public_schema_from", sample), ("test", test_path)):
        if public is not None:
            require_other_file(name, public, private=path)
    if is_array(path):
        found, records, count_unlisted = _array_reader(path, declared, sample, target)
    else:
        found, records, count_unlisted = _table_reader(path, declared, sample, target, target_bounds, table_format)
    train = records(path)
    if sample is not None:
        require_other_records("public_schema_from", records(sample), private=train)
    measured = None
    if test_path is not None:
        measured = records(test_path)
        require_other_records("test", measured, private=train)
        if test_is_public:
            _check_test_labels(test_path, found.labels, count_unlisted(test_path), measured)
    return DatasetSplits(
        name=path.name.split(".")[0],
        train=train,
        test=measured,
        labels=found.labels,
        public=False,
        source=str(path),
        license="the user's own",
        schema=found if isinstance(found, Schema) else None,
        array_schema=found if isinstance(found, ArraySchema) else None,
        test_declared_public=test_path is not None and test_is_public,
    )


def _table_reader(
    path: Path,
    declared: Schema | ArraySchema | None,
    sample: Path | None,
    target: str | None,
    target_bounds: tuple[float, float] | None,
    table_format: TableFormat | None,
) -> tuple[Schema, Callable[[Path], Records], Callable[[Path], int]]:
    """The schema of a table, the reader of its records, and the count of public records with an unlisted label."""
    if isinstance(declared, ArraySchema):
        raise InvalidArgument("schema must describe the columns of a table, got an array schema. Declare the columns.")
    if sample is not None:
        if target is None:
            raise MissingDeclaration("target must be declared with public_schema_from. Name the label's column.")
        declared = schema_from_sample(sample, target=target, target_bounds=target_bounds, table_format=table_format)
    if declared is None:
        raise _undeclared(path, target, table_format)
    _require_target(target, declared.target)

    def records(file: Path) -> Records:
        parts = [encode_table(columns, declared) for columns in iterate_declared(file, declared)]
        return Records(
            features=np.concatenate([part.features for part in parts]),
            labels=np.concatenate([part.labels for part in parts]),
        )

    def count_unlisted(file: Path) -> int:
        parts = iterate_columns(file, {declared.target: "text"}, table_format=declared.table_format)
        return sum(unlisted_labels(columns, declared) for columns in parts)

    return declared, records, count_unlisted


def _array_reader(
    path: Path, declared: Schema | ArraySchema | None, sample: Path | None, target: str | None
) -> tuple[ArraySchema, Callable[[Path], Records], Callable[[Path], int]]:
    """As `_table_reader`, of an array file."""
    if isinstance(declared, Schema):
        raise InvalidArgument(
            "schema must describe an array file, got the columns of a table. Declare an array schema."
        )
    _require_target(target, "label")
    found = array_schema_from_sample(sample) if sample is not None else declared
    if found is None:
        raise MissingDeclaration(
            f"the range of the numbers and the labels of {path.name!r} must be declared. Give a schema file like "
            '{"array": {"low": 0, "high": 255}, "labels": ["cat", "dog"]}, or public_schema_from = a public sample.'
        )
    return found, lambda file: array_records(file, found), lambda file: unlisted_array_labels(file, found)


def _check_test_labels(path: Path, labels: tuple[str, ...], unlisted: int, records: Records) -> None:
    """Refuse a public test file with targets that the schema rules out: without them accuracy could be 100 %."""
    shown = ", ".join(map(repr, labels[:_SHOWN])) + (" and others" if len(labels) > _SHOWN else "")
    rows = f"{unlisted} {'row' if unlisted == 1 else 'rows'}"
    if unlisted and not labels:
        raise InvalidArgument(
            f"the target of the test file {path.name!r} must be a number, as the schema declares it, got {rows} with "
            "something else. Correct the file; if the target is a label, list the labels in the schema."
        )
    if unlisted:
        raise InvalidArgument(
            f"the labels of the test file {path.name!r} must be among {shown}, as the schema lists them, got "
            f"{rows} with another label. Correct the schema's labels, or the file."
        )
    if not len(records):
        wanted = f"one of the labels {shown}" if labels else "a number as the target"
        raise InvalidArgument(
            f"the test file {path.name!r} must hold records with {wanted}, got none. Give another one."
        )


def _undeclared(path: Path, target: str | None, table_format: TableFormat | None) -> MissingDeclaration:
    header = read_header(path, table_format)
    if target is not None and target not in header:
        return MissingDeclaration(f"target must be a column of {path.name!r}, got {target!r}. Name the label's column.")
    features = [repr(name) for name in header if name != target]
    shown = ", ".join(features[:_SHOWN]) + (f" and {len(features) - _SHOWN} more" if len(features) > _SHOWN else "")
    wanted = [
        "the label column (target)" if target is None else f"the label set of {target!r}",
        f"bounds (numeric) or categories for {shown}",
    ]
    return MissingDeclaration(
        f"the schema of {path.name!r} must be declared, got none: missing are {' and '.join(wanted)}. "
        f"`sordino schema draft {path.name}` writes a schema to fill in. Give schema = that file, or "
        "public_schema_from = a public sample."
    )


def _require_target(target: str | None, declared: str) -> None:
    if target is not None and target != declared:
        raise InvalidArgument(f"target must be {declared!r}, as the schema declares, got {target!r}. Leave it out.")


def _check_for_named(name: str, **given: object) -> None:
    extra = sorted(key for key, value in given.items() if value is not None)
    if extra:
        raise InvalidArgument(
            f"{', '.join(extra)} must be left out for the named set {name!r}, whose schema and split are its own. "
            "For a file of that name, give its path with a suffix."
        )


# ----------------------------------------------------------------------------------------------------------------------
# `available` and `show`: what the named sets are and where they lie.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class DatasetInfo:
    """One line of ``sordino data list``.

    Args:
        name: The name that `load` takes.
        title: The name to show; differs when the copy on this machine is a lossy one.
        task: What is predicted from what.
        train_shape: Shape of the train features, records first.
        test_shape: Shape of the test features.
        classes: Number of labels.
        license: Terms of the records.
        source: Authors, year and home.
        present: Whether the set is on this machine now.
        origin: ``embedded``, ``SORDINO_DATA``, ``cache`` or ``system package`` when present, else ``download``.
        location: The folder it is in, or the address it would come from.
    """

    name: str
    title: str
    task: str
    train_shape: tuple[int, ...]
    test_shape: tuple[int, ...]
    classes: int
    license: str
    source: str
    present: bool
    origin: str
    location: str

    def to_dict(self) -> dict[str, object]:
        """The fields, for JSON."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class DatasetDescription:
    """What ``sordino data show`` tells about one set.

    Args:
        info: The line of the list.
        labels: The label set.
        note: What a user should know about the form of the records.
        files: Name, SHA-256 and address of each file of the canonical form; empty when embedded.
        place: The folder in which files fetched by hand are found.
        schema: The declared schema of a table, else None.
    """

    info: DatasetInfo
    labels: tuple[str, ...]
    note: str
    files: tuple[tuple[str, str, str], ...]
    place: Path
    schema: Schema | None

    def to_dict(self) -> dict[str, object]:
        """The fields, for JSON."""
        return {
            **self.info.to_dict(),
            "labels": list(self.labels),
            "note": self.note,
            "files": [{"name": name, "sha256": sha256, "url": url} for name, sha256, url in self.files],
            "place": str(self.place),
            "schema": self.schema.to_dict() if self.schema else None,
        }


def list_datasets() -> list[DatasetInfo]:
    """Every named set, and whether it is on this machine now; reads no data and needs no network.

    Example:
        >>> [info.name for info in list_datasets()]
        ['adult', 'mnist', 'fashion-mnist', 'cifar10', 'imdb']
    """
    return [_info(item) for item in CATALOG.values()]


def describe_dataset(name: str) -> DatasetDescription:
    """All that is known about one named set.

    Raises:
        InvalidArgument: If no set has this name.
    """
    item = get_named_dataset(name)
    return DatasetDescription(
        info=_info(item),
        labels=item.labels,
        note=item.note,
        files=tuple((file.name, file.sha256, file.urls[0]) for file in item.files),
        place=dataset_folder(name) if item.files else FILES,
        schema=ADULT_SCHEMA if name == "adult" else None,
    )


def _info(item: NamedDataset) -> DatasetInfo:
    found = find(item) if item.layouts else None
    if found is not None:
        origin, location = found.origin, str(found.files[0].parent)
    elif item.files:
        origin, location = "download", item.files[0].urls[0].rpartition("/")[0] + "/"
    else:
        origin, location = "embedded", str(FILES)
    layout = found.layout if found else item.layouts[0] if item.layouts else None
    return DatasetInfo(
        name=item.name,
        title=layout.title if layout else item.name.capitalize(),
        task=item.task,
        train_shape=item.train_shape,
        test_shape=item.test_shape,
        classes=len(item.labels),
        license=item.license,
        source=item.source,
        present=origin != "download",
        origin=origin,
        location=location,
    )
