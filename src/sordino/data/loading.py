"""`load`: a named data set, or a file of the user's own with its declared schema (floor 1)."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from sordino.data.arrays import array_records, array_schema_from_sample, is_array
from sordino.data.catalogue import CATALOGUE
from sordino.data.encoding import encode
from sordino.data.named import load_named
from sordino.data.public_files import require_other_file, require_other_records
from sordino.data.records import DataSet, Records
from sordino.data.samples import schema_from_sample
from sordino.data.schema import ArraySchema, Numeric, Schema, read_schema
from sordino.data.tables import is_table, iterate_columns, read_header
from sordino.errors import DataUnavailable, InvalidArgument, MissingDeclaration

__all__ = ["load"]

_SHOWN = 20


def load(
    name_or_path: str | Path,
    *,
    target: str | None = None,
    schema: Schema | ArraySchema | str | Path | None = None,
    public_schema_from: str | Path | None = None,
    test: str | Path | None = None,
    keep_texts: bool = False,
) -> DataSet:
    """Load a named public data set, or a file of the user's own.

    Bounds, categories and labels of a user's file are declared, by `schema` or by a public sample; they are never
    computed from the file. Every record is encoded by itself: missing or unreadable numbers become the middle of their
    bounds, unlisted categories all zeros, and records whose label is not in the label set are left out.

    Args:
        name_or_path: A name from `available`, or the path of a CSV, TSV, Parquet, npz or IDX file.
        target: The label's column; needed with `public_schema_from`, otherwise checked against the schema.
        schema: The declared schema, or the JSON file that holds it.
        public_schema_from: A public sample of the same form, from which the schema is derived and so marked.
        test: A second file of the same form, to measure on. Without it a user's file has no test split. Neither may be
            the private file, a link to it, a copy, a compressed or converted copy, or hold the same records.
        keep_texts: Keep the raw texts of a text data set beside its features.

    Raises:
        MissingDeclaration: If a bound, category list, label set or the target was not declared.
        DataUnavailable: If a named set is not on this machine; the message says which file to place where.
        InvalidArgument: If an argument doesn't fit, or a file can't be read. No message quotes a record.

    Example:
        >>> adult = load("adult")
        >>> len(adult.train), len(adult.test), adult.schema.width()
        (30162, 15060, 104)
    """
    if str(name_or_path) in CATALOGUE:
        _refuse_for_named(str(name_or_path), schema=schema, public_schema_from=public_schema_from, test=test)
        found = load_named(str(name_or_path), keep_texts=keep_texts)
        _require_target(target, found.schema.target if found.schema else "label")
        return found
    path = Path(name_or_path).expanduser()
    if not is_table(path) and not is_array(path):
        raise DataUnavailable(
            f"data must be one of {', '.join(CATALOGUE)} or a .csv, .tsv, .parquet, .npz or IDX file, "
            f"got {str(name_or_path)!r}. Run `sordino data list` to see the named sets."
        )
    sample = Path(public_schema_from).expanduser() if public_schema_from is not None else None
    if sample is not None and schema is not None:
        raise InvalidArgument("schema must be given alone, got public_schema_from as well. Give one of them.")
    declared = read_schema(Path(schema)) if isinstance(schema, str | Path) else schema
    test_path = Path(test).expanduser() if test is not None else None
    for name, public in (("public_schema_from", sample), ("test", test_path)):
        if public is not None:
            require_other_file(name, public, private=path)
    return (_array_set if is_array(path) else _table_set)(path, test_path, declared, sample, target)


def _table_set(
    path: Path, test: Path | None, declared: Schema | ArraySchema | None, sample: Path | None, target: str | None
) -> DataSet:
    if isinstance(declared, ArraySchema):
        raise InvalidArgument("schema must describe the columns of a table, got an array schema. Declare the columns.")
    if sample is not None:
        if target is None:
            raise MissingDeclaration("target must be declared with public_schema_from. Name the label's column.")
        declared = schema_from_sample(sample, target=target)
    if declared is None:
        raise _undeclared(path, target)
    _require_target(target, declared.target)
    names = [*(column.name for column in declared.columns), declared.target]
    numeric = [column.name for column in declared.columns if isinstance(column, Numeric)]

    def records(file: Path) -> Records:
        parts = [encode(columns, declared) for columns in iterate_columns(file, names, numeric=numeric, rows=1 << 18)]
        return Records(
            features=np.concatenate([part.features for part in parts]),
            labels=np.concatenate([part.labels for part in parts]),
        )

    return _user_set(path, declared.labels, declared, records, sample=sample, test=test)


def _array_set(
    path: Path, test: Path | None, declared: Schema | ArraySchema | None, sample: Path | None, target: str | None
) -> DataSet:
    if isinstance(declared, Schema):
        raise InvalidArgument(
            "schema must describe an array file, got the columns of a table. Declare an array schema."
        )
    _require_target(target, "label")
    declared = array_schema_from_sample(sample) if sample is not None else declared
    if declared is None:
        raise MissingDeclaration(
            f"the range of the numbers and the labels of {path.name!r} must be declared. Give a schema file like "
            '{"array": {"low": 0, "high": 255}, "labels": ["cat", "dog"]}, or public_schema_from = a public sample.'
        )
    return _user_set(path, declared.labels, None, lambda file: array_records(file, declared), sample=sample, test=test)


def _user_set(
    path: Path,
    labels: tuple[str, ...],
    schema: Schema | None,
    records: Callable[[Path], Records],
    *,
    sample: Path | None,
    test: Path | None,
) -> DataSet:
    train = records(path)
    if sample is not None:
        require_other_records("public_schema_from", records(sample), private=train)
    measured = records(test) if test is not None else None
    if measured is not None:
        require_other_records("test", measured, private=train)
    return DataSet(
        name=path.name.split(".")[0],
        train=train,
        test=measured,
        labels=labels,
        public=False,
        source=str(path),
        licence="the user's own",
        schema=schema,
    )


def _undeclared(path: Path, target: str | None) -> MissingDeclaration:
    header = read_header(path)
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
        "Give schema = a JSON file with them (docs/data.md has the format), or public_schema_from = a public sample."
    )


def _require_target(target: str | None, declared: str) -> None:
    if target is not None and target != declared:
        raise InvalidArgument(f"target must be {declared!r}, as the schema declares, got {target!r}. Leave it out.")


def _refuse_for_named(name: str, **given: object) -> None:
    extra = sorted(key for key, value in given.items() if value is not None)
    if extra:
        raise InvalidArgument(
            f"{', '.join(extra)} must be left out for the named set {name!r}, whose schema and split are its own. "
            "For a file of that name, give its path with a suffix."
        )
