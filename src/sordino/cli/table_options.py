"""What commands that read a table share: how its file is written, the word about its labels, the kind of its target."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from sordino.cli.console import is_rank_zero
from sordino.errors import InvalidArgument

if TYPE_CHECKING:
    from sordino.cli.console import Output
    from sordino.data import DatasetSplits, TableFormat

__all__ = [
    "DEFAULT_REGRESSOR",
    "DecimalOption",
    "EncodingOption",
    "SeparatorOption",
    "TargetBoundsOption",
    "declared_public",
    "default_model",
    "print_labels",
    "table_format",
]

SeparatorOption = Annotated[
    str | None, typer.Option(metavar="CHAR", help="Between the cells of a CSV file: ';', tab, …; else the schema's.")
]
DecimalOption = Annotated[
    str | None, typer.Option(metavar="CHAR", help="Before the decimals in a CSV file: . or ,; else the schema's.")
]
EncodingOption = Annotated[
    str | None, typer.Option(help="Of a CSV file: utf-8, latin-1, cp1252, …; else the schema's.")
]


def table_format(
    schema: Path | None, separator: str | None, decimal: str | None, encoding: str | None
) -> "TableFormat | None":
    """How the CSV files of a command are written: what the options say, for the rest what the schema says.

    Returns:
        None if no option was given.
    """
    options = {"separator": separator, "decimal": decimal, "encoding": encoding}
    given = {name: value for name, value in options.items() if value is not None}
    if not given:
        return None
    from sordino.data.schema import Schema, TableFormat, read_schema

    declared = None if schema is None else read_schema(schema)
    return replace(declared.table_format if isinstance(declared, Schema) else TableFormat(), **given)


# The most labels that are named.
_SHOWN = 12


def print_labels(dataset: "DatasetSplits", out: "Output") -> None:
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
    _print_format(dataset, out)
    if not dataset.labels:
        _print_number(dataset, out)
        return
    if is_rank_zero():
        out.print_status(Text(f"labels{column}: {labels}. Records with another label, or with none, do not count."))


def declared_public(dataset: "DatasetSplits", out: "Output") -> "DatasetSplits":
    """The data set of ``--data-is-public``; without test records every fifth record is kept out for them."""
    split = replace(dataset, public=True).with_held_out_records()
    if split.held_out_every is not None and dataset.held_out_every is None and is_rank_zero():
        out.print_status(
            Text(f"every {split.held_out_every}th record is kept out of training and measured on; --test names others")
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


def _print_format(dataset: "DatasetSplits", out: "Output") -> None:
    """Say how a private table is read, the same whatever it holds: a wrong format would make values missing."""
    if dataset.schema is not None and is_rank_zero():
        mark = dataset.schema.table_format.decimal
        out.print_status(
            Text(
                f"numbers have {mark!r} before their decimals, in CSV files; a value that can't be read is missing. "
                "`sordino schema check` counts them."
            )
        )


def _print_number(dataset: "DatasetSplits", out: "Output") -> None:
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
    if is_rank_zero():
        out.print_status(
            Text(f"number in column {column}: clipped to {low:g} … {high:g}. Records without a number do not count.")
        )


TargetBoundsOption = Annotated[
    tuple[float, float] | None,
    typer.Option(
        "--target-bounds",
        metavar="LOW HIGH",
        help="With --public-schema-from: the target is a number between these public bounds.",
    ),
]


def default_model(schema: Path | None, target_bounds: tuple[float, float] | None) -> str:
    """The model where none is named: by the kind of target, which the schema says."""
    from sordino.data.schema import Schema, read_schema

    if target_bounds is not None:
        return DEFAULT_REGRESSOR
    declared = None if schema is None else read_schema(schema)
    is_number = isinstance(declared, Schema) and declared.target_bounds is not None
    return DEFAULT_REGRESSOR if is_number else "logistic"


DEFAULT_REGRESSOR = "boosting"
"""What predicts a number where no model is named: the most accurate on most of the public sets it was measured on."""
