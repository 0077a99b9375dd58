"""Writing a schema file from a table's header, and comparing a table with its schema.

`draft_schema` reads no record. `column_statuses` gives the exact counts of private records: for the curator's own eyes.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from sordino.data.schema import (
    BooleanColumn,
    DateColumn,
    NumericColumn,
    OrdinalColumn,
    Schema,
    TableColumn,
    TableFormat,
)
from sordino.data.tables import (
    EncodedColumn,
    Kinds,
    is_missing_text,
    iterate_columns,
    listed_indices,
    read_header,
    read_types,
    separator_hint,
    to_number,
)
from sordino.errors import InvalidArgument
from sordino.shapes import Int64

NUMBERS = ("in range", "outside", "missing", "unreadable")
"""What may be said of a number or date."""
LISTED = ("listed", "not listed", "missing")
"""What may be said of a value from a list."""
_MISSING = 2

_LEGEND = """\
# Schema of {name}, drafted from its header alone: no record was read.
#
# Replace every "?" by what is PUBLIC about the column: from a codebook, a form or a guideline, never from a look at
# these records. Delete the columns that are no features, such as identifiers and free texts; they are then not read.
#
# type         and what else it needs; a missing or unlisted value is 0
# "numeric"    low = 0, high = 5                    clipped, then scaled to [-1, 1]; log = true for a log scale
# "integer"    low = 0, high = 110                  the same, rounded
# "category"   categories = ["A", "B"]              one feature each; other = true for one more: values not listed
# "ordinal"    levels = ["none", "some", "bad"]     in order, from -1 to 1
# "boolean"    nothing, or true = ["ja"], false = ["nein"]
# "date"       low = "2023-01-01", high = "2023-12-31"; format = "%d.%m.%Y" where texts are not like 2023-01-31
# Every type takes missing = true: one more feature that says that the value is missing.
#
# Then look at it, for your own eyes:  sordino schema check {name} --schema {out}
"""


def draft_schema(
    path: Path, *, target: str | None, table_format: TableFormat, out: Path
) -> tuple[str, tuple[str, ...]]:
    """The text of a schema file with a ``?`` wherever something must be declared, and the names of its columns.

    Guarantee: reads the names and types of the columns and no record.

    Args:
        path: The table.
        target: The column to predict, if it is known.
        table_format: How a CSV file is written; it is written down.
        out: Where the text will go: JSON if it ends so, otherwise TOML with explanations.

    Raises:
        InvalidArgument: The header can't be read, or has no column named `target`.
    """
    header = read_header(path, table_format)
    hint = separator_hint(path, header, table_format)
    if hint:
        raise InvalidArgument(f"the header of {path.name!r} must have a cell for each column, got one cell. {hint}")
    if target is not None and target not in header:
        raise InvalidArgument(f"target must be a column of {path.name!r}, got {target!r}. Check the spelling.")
    types = read_types(path)
    columns = [_blank_column(name, types.get(name)) for name in header if name != target]
    form = table_format.to_dict()
    if out.suffix.lower() == ".json":
        fields = {"target": target or "?", "labels": "?", **({"format": form} if form else {}), "columns": columns}
        return json.dumps(fields, indent=2, ensure_ascii=False) + "\n", header
    lines = [
        _LEGEND.format(name=path.name, out=out.name),
        f"target = {_toml(target or '?')}  # the column to predict" + ("" if target else "; delete it below"),
        'labels = "?"  # all its values: ["no", "yes"]. If it is a number, delete this line and write low and high',
    ]
    if form:
        lines += ["", "[format]", *(f"{name} = {_toml(value)}" for name, value in form.items())]
    for column in columns:
        lines += ["", "[[columns]]", *(f"{name} = {_toml(value)}" for name, value in column.items())]
    return "\n".join(lines) + "\n", header


def _blank_column(name: str, kind: str | None) -> dict[str, object]:
    needed = {
        "numeric": ("low", "high"),
        "integer": ("low", "high"),
        "date": ("low", "high"),
        "category": ("categories",),
    }
    return {"name": name, "type": kind or "?", **dict.fromkeys(needed.get(kind or "", ()), "?")}


def _toml(value: object) -> str:
    """A text as TOML spells it, which is as JSON does."""
    return json.dumps(value, ensure_ascii=False)


def declared_statuses(schema: Schema) -> dict[str, tuple[str, ...]]:
    """For the target and each declared column, in this order, what may be said of a value."""
    columns = (schema.target_column, *schema.columns)
    return {column.name: NUMBERS if isinstance(column, NumericColumn | DateColumn) else LISTED for column in columns}


def column_statuses(path: Path, schema: Schema) -> Iterator[Mapping[str, Int64[np.ndarray, " n"]]]:
    """For the target and each declared column the status of each record, as an index in `declared_statuses`, in parts.

    Guarantee: none. What it says of each record depends on that record alone.

    Raises:
        InvalidArgument: The file can't be read or lacks a declared column. No message quotes a record.
    """
    columns = (schema.target_column, *schema.columns)
    # As text: in a numeric column missing and unreadable values look the same.
    kinds: Kinds = {column.name: "date" if column.read_as == "date" else "text" for column in columns}
    for part in iterate_columns(path, kinds, table_format=schema.table_format, rows=1 << 18):
        found = {}
        for declared in columns:
            column = part[declared.name]
            assert isinstance(column, EncodedColumn)
            codes = _statuses(column.values, declared, schema.table_format.decimal)
            found[declared.name] = column.mapped(codes, _MISSING, np.int64)
        yield found


def _statuses(values: tuple[str, ...], declared: TableColumn, decimal: str) -> list[int]:
    if isinstance(declared, NumericColumn):
        return _numbers(values, [to_number(text, decimal) for text in values], (declared.low, declared.high))
    if isinstance(declared, DateColumn):
        return _numbers(values, [declared.seconds(text) for text in values], declared.bounds)
    if isinstance(declared, BooleanColumn):
        known = {value.lower() for value in (*declared.true, *declared.false)}
        return _listed(values, [text.lower() in known for text in values])
    listed = declared.levels if isinstance(declared, OrdinalColumn) else declared.categories
    return _listed(values, [index >= 0 for index in listed_indices(values, listed)])


def _listed(values: tuple[str, ...], is_listed: list[bool]) -> list[int]:
    return [
        0 if known else _MISSING if is_missing_text(text) else 1 for text, known in zip(values, is_listed, strict=True)
    ]


def _numbers(values: tuple[str, ...], numbers: list[float], bounds: tuple[float, float]) -> list[int]:
    def status(text: str, number: float) -> int:
        if number == number:
            return 0 if bounds[0] <= number <= bounds[1] else 1
        return _MISSING if is_missing_text(text) else 3

    return [status(text, number) for text, number in zip(values, numbers, strict=True)]
