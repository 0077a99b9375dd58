"""The records of a command: a table as its options name and declare it, and what is said about it beforehand."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from sordino.errors import InvalidArgument, MissingDeclaration

if TYPE_CHECKING:
    from sordino.commands.running import Progress
    from sordino.data import ArraySchema, DatasetSplits, Schema, TableFormat


class TableOptions(TypedDict, total=False):
    """How records are named and declared, for commands that train on a table.

    Args:
        target: Column to predict: a label or a number.
        schema: Schema file that declares your table's columns.
        public_schema_from: PUBLIC sample file to infer the schema from.
        target_bounds: With --public-schema-from: public bounds of a numeric target.
        separator: Separator of a CSV file: ';', tab, … Default: the schema's.
        decimal: Decimal mark of a CSV file: . or , Default: the schema's.
        encoding: Encoding of a CSV file: utf-8, latin-1, cp1252, … Default: the schema's.
        test: PUBLIC file with the same columns; the model is evaluated on it.
        data_is_public: Declare your file public; non-private baselines are shown too.
    """

    target: str | None
    schema: "Path | str | Schema | ArraySchema | None"
    public_schema_from: Path | str | None
    target_bounds: tuple[float, float] | None
    separator: str | None
    decimal: str | None
    encoding: str | None
    test: Path | str | None
    data_is_public: bool


def load_table(
    data: "str | Path | DatasetSplits",
    options: TableOptions,
    progress: "Progress",
    *,
    by_estimator: bool,
    keep_texts: bool = False,
) -> "DatasetSplits":
    """The records, after the word about how they are read and which of them count.

    Args:
        data: a named set, a file, or records that were loaded before, which have no options but the target's.
        options: of a file.
        progress: where that is said.
        by_estimator: whether the target may be a numeric column, which only the table knows; the label of a sample
            must be named in any case.
        keep_texts: keep the raw texts of a text dataset.
    """
    from sordino.data import DatasetSplits, load_dataset

    if isinstance(data, DatasetSplits):
        others = [name for name, value in options.items() if value not in (None, False) and name != "target"]
        if others:
            raise InvalidArgument(
                f"{', '.join(others)} must be left out for records that are loaded, got a value. "
                "Give them to sordino.data.load_dataset."
            )
        found = data
    else:
        schema, sample = options.get("schema"), options.get("public_schema_from")
        found = load_dataset(
            data,
            target=None if by_estimator and sample is None else options.get("target"),
            schema=schema,
            public_schema_from=sample,
            target_bounds=options.get("target_bounds"),
            test=options.get("test"),
            table_format=table_format(
                schema, options.get("separator"), options.get("decimal"), options.get("encoding")
            ),
            keep_texts=keep_texts,
        )
        if options.get("data_is_public"):
            found = _declared_public(found, progress)
    _say_labels(found, progress)
    return found


def _declared(schema: "Path | str | Schema | ArraySchema | None") -> "Schema | ArraySchema | None":
    from sordino.data.schema import read_schema

    return read_schema(Path(schema)) if isinstance(schema, str | Path) else schema


def table_format(
    schema: "Path | str | Schema | ArraySchema | None",
    separator: str | None,
    decimal: str | None,
    encoding: str | None,
) -> "TableFormat | None":
    """How the CSV files of a command are written: what the options say, for the rest what the schema says.

    Returns:
        None if no option was given.
    """
    options = {"separator": separator, "decimal": decimal, "encoding": encoding}
    given = {name: value for name, value in options.items() if value is not None}
    if not given:
        return None
    from sordino.data.schema import Schema, TableFormat

    declared = _declared(schema)
    return replace(declared.table_format if isinstance(declared, Schema) else TableFormat(), **given)


# The most labels that are named.
_SHOWN = 12


def _say_labels(dataset: "DatasetSplits", progress: "Progress") -> None:
    """Say which labels the schema lists and that other records do not count, before private records are trained on.

    How many records do not count is private and is not shown. That none is left is shown: training on no record at all
    would tell it too, since the command takes the number of records as public.

    Raises:
        InvalidArgument: no record has a listed label.
    """
    labels = ", ".join(map(repr, dataset.labels[:_SHOWN]))
    if len(dataset.labels) > _SHOWN:
        labels += f" and {len(dataset.labels) - _SHOWN} more"
    column = f" in column {dataset.schema.target!r}" if dataset.schema else ""
    if not len(dataset.train):
        listed = f" and one of the listed labels, {labels}" if labels else ""
        raise InvalidArgument(
            f"data must have records with as many cells as the header{listed}, got none{column}. Correct the labels of "
            "the schema, or the file; `sordino schema check` counts both."
        )
    if dataset.public:
        _check_columns(dataset)
        return
    _say_format(dataset, progress)
    if not dataset.labels:
        _say_number(dataset, progress)
        return
    progress.status(f"labels{column}: {labels}. Records with another label, or with none, are left out.")


def _declared_public(dataset: "DatasetSplits", progress: "Progress") -> "DatasetSplits":
    """The dataset of ``--data-is-public``; without test records every fifth record is kept out for them."""
    split = replace(dataset, public=True).with_held_out_records()
    if split.held_out_every is not None and dataset.held_out_every is None:
        progress.status(
            f"every {split.held_out_every}th record is kept out of training and measured on; --test names others"
        )
    return split


def _check_columns(dataset: "DatasetSplits") -> None:
    """Refuse a public file of which a declared column holds nothing: every record would be trained on as missing.

    Of a private file it is not looked at: whether a column holds anything may follow from one record.

    Raises:
        InvalidArgument: no value of a column can be read, or is listed.
    """
    features, start = dataset.train.features, 0
    for column in dataset.schema.columns if dataset.schema and len(features) else ():
        listed = getattr(column, "categories", ())
        own = features[:, start : start + (len(listed) or 1)]
        start += column.width
        if own.any():
            continue
        fields = column.to_dict()
        kinds = {"numeric": "a number", "integer": "a number", "date": "a date"}
        wanted = kinds.get(str(fields["type"]), "a listed value")
        advice = "Correct the listed values"
        if fields["type"] in ("numeric", "integer"):
            other = "," if dataset.schema and dataset.schema.table_format.decimal == "." else "."
            advice = f"Give --decimal {other} if its numbers are written like 3{other}5"
        elif fields["type"] == "date":
            advice = "Declare how its dates are written, as format"
        raise InvalidArgument(
            f"column {column.name!r} must hold {wanted} that differs from a missing one, got none. {advice}, "
            "or leave the column out of the schema; `sordino schema check` shows what it holds."
        )


def _say_format(dataset: "DatasetSplits", progress: "Progress") -> None:
    """Say how a private table is read, the same whatever it holds: a wrong format would make values missing."""
    if dataset.schema is not None:
        mark = dataset.schema.table_format.decimal
        progress.status(
            f"decimal mark of CSV files: {mark!r}. A value that can't be read counts as missing. "
            "`sordino schema check` counts them."
        )


def _say_number(dataset: "DatasetSplits", progress: "Progress") -> None:
    """Say the same of a numeric target."""
    assert dataset.schema is not None
    assert dataset.schema.target_bounds is not None
    low, high = dataset.schema.target_bounds
    column = repr(dataset.schema.target)
    if not len(dataset.train):
        raise InvalidArgument(
            f"data must have records with a number in column {column}, got none. Correct the target of the schema, or "
            "the file."
        )
    progress.status(f"number in column {column}: clipped to {low:g} … {high:g}. Records without a number are left out.")


def default_model(data: "str | Path | DatasetSplits", options: TableOptions) -> str:
    """The model where none is named: by the kind of target, which the schema says."""
    from sordino.data.schema import DatasetSplits, Schema

    if options.get("target_bounds") is not None:
        return DEFAULT_REGRESSOR
    declared = data.schema if isinstance(data, DatasetSplits) else _declared(options.get("schema"))
    is_number = isinstance(declared, Schema) and declared.target_bounds is not None
    return DEFAULT_REGRESSOR if is_number else "logistic"


DEFAULT_REGRESSOR = "boosting"
"""What predicts a number where no model is named: the most accurate on most of the public sets it was measured on."""


@dataclass(frozen=True, kw_only=True)
class TableFile:
    """A table as a command names it.

    Args:
        path: its file.
        schema: what is public about it.
        name: the file's name without endings, or that of the named set.
        public: whether it is a named public set.
    """

    path: Path
    schema: "Schema"
    name: str
    public: bool

    @classmethod
    def of_options(
        cls,
        data: str | Path,
        schema: "Path | str | Schema | None",
        sample: Path | str | None,
        target: str | None,
        bounds: tuple[float, float] | None,
    ) -> "TableFile":
        """A file with its declared schema or a public sample, or the embedded ``adult``; no record is read.

        Raises:
            MissingDeclaration: the schema is not declared.
            InvalidArgument: a file is not there or of the wrong kind, or both a schema and a sample were given.
        """
        from sordino.data.loading import require_other_file
        from sordino.data.readers import ADULT_SCHEMA, FILES
        from sordino.data.schema import ArraySchema
        from sordino.data.tables import is_table, require_declared_columns, schema_from_sample

        if str(data) == "adult":
            if schema is not None or sample is not None:
                raise InvalidArgument("schema must be left out for adult, got one: it has its own. Drop the option.")
            return cls(path=FILES / "adult-train.csv.xz", schema=ADULT_SCHEMA, name="adult", public=True)
        if bounds is not None and sample is None:
            raise InvalidArgument("target_bounds must be left out without --public-schema-from. The schema has them.")
        path = Path(data).expanduser()
        if not is_table(path):
            raise InvalidArgument(
                f"data must be adult or a .csv, .tsv or .parquet file, got {str(data)!r}. Convert it."
            )
        if (schema is None) == (sample is None):
            raise MissingDeclaration("schema must be declared, or taken from a PUBLIC sample, not both. Give --schema.")
        if sample is not None:
            if target is None:
                raise MissingDeclaration("target must be declared with --public-schema-from. Name the label's column.")
            require_other_file("public_schema_from", Path(sample), private=path)
            declared = schema_from_sample(Path(sample), target=target, target_bounds=bounds)
        else:
            declared = _declared(schema)
            assert declared is not None
        if isinstance(declared, ArraySchema):
            raise InvalidArgument("schema must describe the columns of a table, got an array schema. Declare columns.")
        if target is not None and target != declared.target:
            raise InvalidArgument(f"target must be {declared.target!r}, as declared, got {target!r}. Leave it out.")
        require_declared_columns(path, declared)
        return cls(path=path, schema=declared, name=path.name.split(".")[0], public=False)
