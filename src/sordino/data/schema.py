"""Records in memory: features, labels, and a dataset's train and test split."""

import codecs
import hashlib
import json
import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, date, datetime, timedelta
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, Self, cast

import numpy as np

from sordino.checks import one_of
from sordino.errors import InvalidArgument, MissingDeclaration
from sordino.shapes import Float32, Float64, Int64

if TYPE_CHECKING:
    import torch


# ----------------------------------------------------------------------------------------------------------------------
# Declared schemas: what is public about a table or an array of private records.
#
# A differentially private training run may use bounds, category lists and label sets only when they are public. They
# are therefore *declared*: written by the user, or taken from a public sample, never computed from the private data.
# ----------------------------------------------------------------------------------------------------------------------


Origin = Literal["declared", "public_sample"]

_EXAMPLE = (
    '{"target": "income", "labels": ["low", "high"], "columns": ['
    '{"name": "age", "type": "numeric", "low": 0, "high": 100}, '
    '{"name": "work", "type": "category", "categories": ["private", "public"]}]}'
)


@dataclass(frozen=True, kw_only=True)
class _Column:
    """What every column declares: a name, and whether one more feature says that a value is missing."""

    name: str
    missing: bool = False

    kind: ClassVar[str]
    """The type's name in a schema file."""
    read_as: ClassVar[Literal["number", "date", "text"]] = "text"
    """What the readers of tables take the values for."""

    def __post_init__(self) -> None:
        _require_name(self.name)

    @property
    def width(self) -> int:
        """Number of features: one, and one more for `missing`."""
        return 1 + self.missing

    @property
    def feature_names(self) -> tuple[str, ...]:
        """The column's own name, and ``column is missing``."""
        return (self.name, f"{self.name} is missing") if self.missing else (self.name,)

    def to_dict(self) -> dict[str, object]:
        """The JSON form: what is declared, but what is as usual."""
        found: dict[str, object] = {"name": self.name, "type": self.kind}
        for declared in fields(self):
            value = getattr(self, declared.name)
            if declared.name not in ("name", "missing") and value != declared.default:
                found[declared.name] = list(value) if isinstance(value, tuple) else value
        return found | ({"missing": True} if self.missing else {})


@dataclass(frozen=True, kw_only=True)
class NumericColumn(_Column):
    """A number with public bounds: clipped to [low, high], then scaled to [-1, 1].

    A missing or unreadable number becomes the middle, which is 0 after scaling.

    Args:
        name: The column's name in the file's header.
        low: Public lower bound, in the column's own unit.
        high: Public upper bound, above `low`.
        whole: Whether it is an integer (type ``integer``): other numbers are rounded to the nearest, ties to even.
        log: Whether its logarithm is scaled instead of the number; `low` must then be above 0.
        missing: Whether a second feature is 1 where the number is missing or unreadable, and 0 elsewhere.

    Raises:
        InvalidArgument: If the bounds are not finite or not in order, or not above 0 with `log`.
    """

    kind = "numeric"
    read_as = "number"

    low: float
    high: float
    whole: bool = False
    log: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_bounds(f"the bounds of column {self.name!r}", self.low, self.high)
        if self.whole and not (float(self.low).is_integer() and float(self.high).is_integer()):
            raise InvalidArgument(
                f"the bounds of integer column {self.name!r} must be whole numbers, got low={self.low!r}, "
                f"high={self.high!r}. Round them, or declare the column numeric."
            )
        if self.log and not self.low > 0:
            raise InvalidArgument(
                f"low of column {self.name!r} must be above 0 on a log scale, got {self.low!r}. Raise it, or leave "
                "out log."
            )

    def to_dict(self) -> dict[str, object]:
        """The JSON form; a whole number has a type of its own."""
        found = super().to_dict()
        return found | {"type": "integer"} if found.pop("whole", False) else found


@dataclass(frozen=True, kw_only=True)
class CategoricalColumn(_Column):
    """A value from a public list, one-hot; a missing or unlisted value is all zeros.

    Values are compared as text, without surrounding white space; whole numbers are written without a decimal point.

    Args:
        name: The column's name in the file's header.
        categories: The public list, in the order of the features; at least one, all different.
        other: Whether one more feature stands for values that are neither listed nor missing.
        missing: Whether one more feature stands for missing values: empty, ``?``, ``NA`` and the like, if not listed.

    Raises:
        InvalidArgument: If the list is empty or holds a value twice.
    """

    kind = "category"

    categories: tuple[str, ...]
    other: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "categories", tuple(self.categories))
        _require_texts(f"the categories of column {self.name!r}", self.categories, at_least=1)

    @property
    def width(self) -> int:
        """One feature per category, one for `other`, one for `missing`."""
        return len(self.categories) + self.other + self.missing

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of the values that the features stand for; no two are the same."""
        names = list(self.categories)
        for wanted, name in ((self.other, "other"), (self.missing, "missing")):
            if wanted:
                names.append(name if name not in names else f"({name})")
        return tuple(names)

    @property
    def feature_names(self) -> tuple[str, ...]:
        """``column=category`` for every category, then ``column is other`` and ``column is missing``."""
        names = [f"{self.name}={value}" for value in self.categories]
        names += [f"{self.name} is other"] * self.other + [f"{self.name} is missing"] * self.missing
        return tuple(names)


@dataclass(frozen=True, kw_only=True)
class OrdinalColumn(_Column):
    """A value from a public list that is in order: one number, from -1 for the first to 1 for the last.

    A missing or unlisted value is 0. Values are compared as those of `CategoricalColumn`.

    Args:
        name: The column's name in the file's header.
        levels: The public list, lowest first; at least two, all different.
        missing: Whether a second feature is 1 where the value is missing or unlisted, and 0 elsewhere.

    Raises:
        InvalidArgument: If the list holds fewer than two values or one twice.
    """

    kind = "ordinal"

    levels: tuple[str, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "levels", tuple(self.levels))
        _require_texts(f"the levels of column {self.name!r}", self.levels, at_least=2)


@dataclass(frozen=True, kw_only=True)
class BooleanColumn(_Column):
    """Yes or no: 1 for one of the values `true`, -1 for one of the values `false`, 0 for a missing or another value.

    Args:
        name: The column's name in the file's header.
        true: The values that mean yes, compared without regard to case.
        false: The values that mean no.
        missing: Whether a second feature is 1 where the value is neither, and 0 elsewhere.

    Raises:
        InvalidArgument: If a list is empty, or a value stands in both.
    """

    kind = "boolean"

    true: tuple[str, ...] = ("true", "t", "yes", "y", "1")
    false: tuple[str, ...] = ("false", "f", "no", "n", "0")

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("true", "false"):
            object.__setattr__(self, key, tuple(getattr(self, key)))
            _require_texts(f"{key} of column {self.name!r}", getattr(self, key), at_least=1)
        both = {value.lower() for value in self.true} & {value.lower() for value in self.false}
        if both:
            raise InvalidArgument(
                f"true and false of column {self.name!r} must be different values, got {sorted(both)} in both. "
                "Remove the repetition."
            )


@dataclass(frozen=True, kw_only=True)
class DateColumn(_Column):
    """A date, or a date with a time, between public bounds: clipped, then scaled linearly to [-1, 1].

    A missing or unreadable date becomes the middle, 0. A date with an offset from UTC is moved to UTC; one without is
    taken as it stands.

    Args:
        name: The column's name in the file's header.
        low: Public earliest date, in ISO 8601: ``2023-01-01`` or ``2023-01-01T12:00``.
        high: Public latest date, after `low`.
        format: How texts spell dates, by the codes of `datetime.strptime` (``%d.%m.%Y``); None for ISO 8601.
        missing: Whether a second feature is 1 where the date is missing or unreadable, and 0 elsewhere.

    Raises:
        InvalidArgument: If a bound is no date in ISO 8601, they are not in order, or `format` can't spell a date.
    """

    kind = "date"
    read_as = "date"

    low: str
    high: str
    format: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        ends = [self.seconds(end, iso=True) for end in (self.low, self.high)]
        if any(math.isnan(end) for end in ends):
            raise InvalidArgument(
                f"low and high of date column {self.name!r} must be dates like 2023-01-31, got low={self.low!r}, "
                f"high={self.high!r}. Write them in ISO 8601."
            )
        if not ends[0] < ends[1]:
            raise InvalidArgument(
                f"the bounds of column {self.name!r} must be in order, got low={self.low!r}, high={self.high!r}. "
                "Correct them."
            )
        if self.format is not None and not _spells_dates(self.format):
            raise InvalidArgument(
                f"format of column {self.name!r} must spell year, month and day, got {self.format!r}. Write for "
                "example %d.%m.%Y; leave it out for 2023-01-31."
            )

    def seconds(self, text: str, *, iso: bool = False) -> float:
        """Seconds from 1970 to the date that a text spells; NaN if it spells none.

        ISO 8601 is read under every `format`: files that store dates as dates give it.
        """
        text = text.strip()
        found = None
        if self.format is not None and not iso:
            found = _parsed_date(lambda: datetime.strptime(text, str(self.format)))
        if found is None and text[4:5] == "-":
            found = _parsed_date(lambda: datetime.fromisoformat(text))
        if found is None:
            return math.nan
        if found.tzinfo is None:
            found = found.replace(tzinfo=UTC)
        return (found - datetime(1970, 1, 1, tzinfo=UTC)) / timedelta(seconds=1)

    @property
    def bounds(self) -> tuple[float, float]:
        """The bounds in seconds from 1970."""
        return self.seconds(self.low, iso=True), self.seconds(self.high, iso=True)


TableColumn = NumericColumn | CategoricalColumn | OrdinalColumn | BooleanColumn | DateColumn
"""A declared column. Its features have norm at most 1 together, whatever the record."""


def _parsed_date(read: Callable[[], datetime]) -> datetime | None:
    try:
        return read()
    except (ValueError, OverflowError):
        return None


def _spells_dates(pattern: str) -> bool:
    """Whether a text in this pattern gives the date back that it was made of."""
    some = datetime(2023, 11, 30)
    found = _parsed_date(lambda: datetime.strptime(some.strftime(pattern), pattern))
    return found is not None and found.replace(tzinfo=None).date() == some.date()


@dataclass(frozen=True, kw_only=True)
class TableFormat:
    """How a CSV file is written; Parquet and Feather files say it themselves.

    Args:
        separator: The character between cells; None for a comma in ``.csv`` files and a tab in ``.tsv`` files.
        decimal: ``.`` or ``,`` before the decimals of a number. The other one may stand between groups of three digits.
        encoding: ``utf-8``, or an encoding with one byte a character, such as ``latin-1`` or ``cp1252``.

    Raises:
        InvalidArgument: If a value is none of these.
    """

    separator: str | None = None
    decimal: str = "."
    encoding: str = "utf-8"

    def __post_init__(self) -> None:
        if self.separator is not None:
            object.__setattr__(self, "separator", {"tab": "\t", "\\t": "\t"}.get(self.separator, self.separator))
            mark = self.separator
            if len(mark) != 1 or not mark.isascii() or mark.isalnum() or mark in '"\r\n.-+':
                raise InvalidArgument(
                    f"separator must be one character such as , ; | or tab, got {mark!r}. Look at the file's first "
                    "line."
                )
        one_of((".", ","), decimal=self.decimal)
        object.__setattr__(self, "encoding", _encoding(self.encoding))

    def to_dict(self) -> dict[str, object]:
        """The JSON form: what differs from the usual."""
        return {name: value for name, value in vars(self).items() if value != getattr(type(self), name)}


# What encodings with escape sequences read as something else.
_PLAIN_TEXTS = (bytes(range(128)), rb"\n\x41\u0041+AGE-~{", b"\x1b$B!!\x1b(J\x1b$)C\x0e!!\x0f")


def _encoding(name: str) -> str:
    """The codec's own name. One byte must be one character: else a broken one could take in those of other records."""
    try:
        found = codecs.lookup(name).name
        pairs = [b"".join(bytes([first, second]) for second in range(256)) for first in range(256)]
        single = (
            "escape" not in found
            and all(text.decode(found) == text.decode("ascii") for text in _PLAIN_TEXTS)
            and all(len(text.decode(found, errors="replace")) == 2 * 256 for text in pairs)
        )
    except (LookupError, UnicodeDecodeError, TypeError, ValueError):
        found, single = "", False
    if found in ("utf-8", "ascii", "utf-8-sig"):
        return "utf-8"
    if not single:
        raise InvalidArgument(
            f"encoding must be utf-8 or one with one byte a character (latin-1, cp1252, iso8859-15, …), got {name!r}. "
            "Convert the file to UTF-8."
        )
    return found


@dataclass(frozen=True, kw_only=True)
class Schema:
    """The public description of a table: its feature columns, its target and the set of labels.

    Columns of the file that the schema doesn't name are not read.

    A target is one of two kinds: a label, with `labels`, or a number, with `target_bounds`.

    Args:
        columns: The feature columns, in the order of the features.
        target: The column that holds the label or the number to predict; not among `columns`.
        labels: The public label set; a record's label is the index in it. At least two, or none for a number.
        origin: Where the facts come from: ``declared``, or ``public_sample`` when derived from a public sample.
        target_bounds: Public bounds (low, high) of a numeric target, in its own unit; None for a label.
        table_format: How CSV files of this form are written.

    Raises:
        InvalidArgument: If names repeat, the target is also a feature, or it is neither a label nor a number.

    Example:
        >>> age = NumericColumn(name="age", low=0, high=100)
        >>> job = CategoricalColumn(name="job", categories=("clerk", "sales"))
        >>> schema = Schema(columns=(age, job), target="income", labels=("low", "high"))
        >>> schema.feature_names
        ('age', 'job=clerk', 'job=sales')
        >>> Schema.from_json(schema.to_json()) == schema
        True
    """

    columns: tuple[TableColumn, ...]
    target: str
    labels: tuple[str, ...] = ()
    origin: Origin = "declared"
    target_bounds: tuple[float, float] | None = None
    table_format: TableFormat = field(default_factory=TableFormat)

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", tuple(self.columns))
        object.__setattr__(self, "labels", tuple(self.labels))
        one_of(("declared", "public_sample"), origin=self.origin)
        _require_name(self.target)
        if not self.columns:
            raise InvalidArgument("columns must be at least one column, got none. Declare the features to train on.")
        names = [column.name for column in self.columns]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise InvalidArgument(f"columns must be named once each, got {twice} repeatedly. Remove the repetition.")
        if self.target in names:
            raise InvalidArgument(
                f"target must be a column that is not a feature, got {self.target!r}. Remove it from the columns."
            )
        if self.target_bounds is None:
            _require_texts(f"the labels of target {self.target!r}", self.labels, at_least=2)
            return
        if self.labels:
            raise InvalidArgument(
                f"target {self.target!r} must have labels or bounds, got both. Declare labels for classes, low and "
                "high for a number."
            )
        low, high = self.target_bounds
        _require_bounds(f"the bounds of target {self.target!r}", low, high)
        object.__setattr__(self, "target_bounds", (low, high))

    def width(self) -> int:
        """Number of features after encoding."""
        return sum(column.width for column in self.columns)

    @property
    def target_column(self) -> "CategoricalColumn | NumericColumn":
        """The target as a column."""
        if self.target_bounds is None:
            return CategoricalColumn(name=self.target, categories=self.labels)
        low, high = self.target_bounds
        return NumericColumn(name=self.target, low=low, high=high)

    @property
    def data_norm(self) -> float:
        """The largest ℓ2 norm that the features of a record can have: each column's have norm at most 1."""
        return math.sqrt(len(self.columns))

    @property
    def one_hot(self) -> tuple[range, ...]:
        """For each category the features that it becomes after encoding, in order: at most one of them is set."""
        ends = accumulate(column.width for column in self.columns)
        pairs = zip(self.columns, ends, strict=True)
        return tuple(range(end - column.width, end) for column, end in pairs if isinstance(column, CategoricalColumn))

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the features after encoding, `width` of them."""
        return tuple(name for column in self.columns for name in column.feature_names)

    def to_dict(self) -> dict[str, object]:
        """The JSON form as a dictionary."""
        bounds = self.target_bounds
        return {
            "target": self.target,
            **({"labels": list(self.labels)} if bounds is None else {"low": bounds[0], "high": bounds[1]}),
            "columns": [column.to_dict() for column in self.columns],
            "origin": self.origin,
            **({"format": self.table_format.to_dict()} if self.table_format != TableFormat() else {}),
        }

    def to_json(self) -> str:
        """The schema as JSON text; `from_json` reads it back."""
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Schema":
        """Read a schema from JSON text.

        A numeric target has ``low`` and ``high`` instead of ``labels``; or it stands among the columns, as a numeric
        one, and there are no labels.

        Raises:
            MissingDeclaration: If a bound, a category list, the label set or the target is not there.
            InvalidArgument: If the text is not JSON, or a value is of the wrong type or out of range.
        """
        return cls.from_dict(_object(text))

    @classmethod
    def from_dict(cls, body: Mapping[str, object]) -> "Schema":
        """Read a schema from its JSON or TOML form as a dictionary; raises as `from_json` does."""
        _only_known("schema", body, {"target", "labels", "columns", "origin", "low", "high", "format"})
        body = _with_target_bounds({name: value for name, value in body.items() if not _is_blank(value)})
        raw_columns = body.get("columns")
        _check_not_missing(body, raw_columns)
        bounds = None
        if "low" in body or "high" in body:
            bounds = _number("low of the target", body["low"]), _number("high of the target", body["high"])
        return cls(
            columns=tuple(_column(item) for item in _list("columns", raw_columns)),
            target=_text("target", body["target"]),
            labels=_texts("labels", body["labels"]) if "labels" in body else (),
            origin=_origin(body),
            target_bounds=bounds,
            table_format=_table_format(body.get("format", {})),
        )

    def encode(self, frame: object) -> "Records":
        """A table in memory as records, exactly as the same table is loaded from a file.

        Records whose label is not listed, or whose numeric target is no finite number, are left out. Each record is
        encoded by itself and nothing is learned, so this costs no privacy; the records are as private as before.

        Args:
            frame: A DataFrame of pandas or Polars, or an Arrow table, with all declared columns and the target.

        Raises:
            InvalidArgument: It is no table, lacks a declared column, or a column's type can't hold what is declared.

        Example:
            >>> import pyarrow as pa
            >>> age = NumericColumn(name="age", low=0, high=100)
            >>> schema = Schema(columns=(age,), target="income", labels=("low", "high"))
            >>> schema.encode(pa.table({"age": [25, None], "income": ["high", "low"]})).features.tolist()
            [[-0.5], [0.0]]
        """
        from sordino.data.frames import frame_columns
        from sordino.data.tables import encode_table

        return encode_table(frame_columns(frame, self, with_target=True), self)


@dataclass(frozen=True, kw_only=True)
class ArraySchema:
    """The public description of an array file (IDX, npz): range of the numbers and the set of labels.

    Numbers are clipped to [low, high] and scaled linearly to [0, 1], as images are; NaN becomes the midpoint.

    Args:
        labels: The public label set; the file's integer labels are indices in it.
        low: Public lower bound of every number.
        high: Public upper bound, above `low`.
        origin: ``declared`` or ``public_sample``.
    """

    labels: tuple[str, ...]
    low: float = 0.0
    high: float = 255.0
    origin: Origin = "declared"

    def __post_init__(self) -> None:
        object.__setattr__(self, "labels", tuple(self.labels))
        one_of(("declared", "public_sample"), origin=self.origin)
        _require_bounds("the range of the array", self.low, self.high)
        _require_texts("labels", self.labels, at_least=2)

    def to_json(self) -> str:
        """The schema as JSON text; `from_json` reads it back."""
        body = {"array": {"low": self.low, "high": self.high}, "labels": list(self.labels), "origin": self.origin}
        return json.dumps(body, indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "ArraySchema":
        """Read an array schema: ``{"array": {"low": 0, "high": 255}, "labels": ["cat", "dog"]}``.

        Raises:
            MissingDeclaration: If the range or the label set is not there.
            InvalidArgument: If the text is not JSON, or a value is of the wrong type or out of range.
        """
        fields = _object(text)
        _only_known("array schema", fields, {"array", "labels", "origin"})
        bounds = fields.get("array")
        if not isinstance(bounds, Mapping) or "low" not in bounds or "high" not in bounds:
            raise MissingDeclaration('array must be declared as {"low": …, "high": …}. Add the public range.')
        if "labels" not in fields:
            raise MissingDeclaration("labels must be declared. Add the list of labels, in the order of their numbers.")
        return cls(
            labels=_texts("labels", fields["labels"]),
            low=_number("low", bounds["low"]),
            high=_number("high", bounds["high"]),
            origin=_origin(fields),
        )


def read_schema(path: Path) -> Schema | ArraySchema:
    """Read either kind of schema from a JSON or TOML file; an array schema has a field ``array``.

    Raises:
        InvalidArgument: If there is no such file or it is not a schema.
        MissingDeclaration: If it lacks a declaration.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as problem:
        raise InvalidArgument(
            f"schema must be a readable JSON or TOML file, got {str(path)!r}. Check the path."
        ) from problem
    if path.suffix.lower() != ".toml":
        return ArraySchema.from_json(text) if "array" in _object(text) else Schema.from_json(text)
    try:
        fields = tomllib.loads(text)
    except tomllib.TOMLDecodeError as problem:
        # A schema is public, and so is where it is malformed.
        raise InvalidArgument(f"schema {path.name!r} must be TOML text, but: {problem}. Correct it.") from problem
    return ArraySchema.from_json(json.dumps(fields, default=str)) if "array" in fields else Schema.from_dict(fields)


def _with_target_bounds(fields: Mapping[str, object]) -> Mapping[str, object]:
    """The fields with the bounds of a numeric target added, also where it was declared among the columns."""
    target, columns = fields.get("target"), fields.get("columns")
    if not isinstance(columns, list) or fields.keys() & {"labels", "low", "high"}:
        return fields
    own = [item for item in columns if isinstance(item, Mapping) and item.get("name") == target]
    if len(own) != 1 or own[0].get("type") != "numeric" or not {"low", "high"} <= own[0].keys():
        return fields
    rest = [item for item in columns if item is not own[0]]
    return {**fields, "columns": rest, "low": own[0]["low"], "high": own[0]["high"]}


def _check_not_missing(fields: Mapping[str, object], raw_columns: object) -> None:
    missing = [f"{name!r}" for name in ("target", "columns") if name not in fields]
    if not fields.keys() & {"labels", "low", "high"}:
        missing.append("'labels' (or 'low' and 'high', where the target is a number)")
    elif "labels" not in fields:
        missing += [f"{name!r} of the target" for name in ("low", "high") if name not in fields]
    for item in raw_columns if isinstance(raw_columns, list) else ():
        if not isinstance(item, Mapping):
            continue
        kind = str(item.get("type"))
        needed = tuple(_TYPES[kind][1]) if kind in _TYPES else ("type",)
        absent = [name for name in needed if name not in item or _is_blank(item[name])]
        if absent:
            missing.append(f"{', '.join(map(repr, absent))} of column {item.get('name', '(unnamed)')!r}")
    if missing:
        raise MissingDeclaration(
            f"the schema must declare every bound, category list and label, got none for: {'; '.join(missing)}. "
            f"Add them; a complete schema looks like {_EXAMPLE}."
        )


def _origin(fields: Mapping[str, object]) -> Origin:
    return cast("Origin", one_of(("declared", "public_sample"), origin=fields.get("origin", "declared")))


def _is_blank(value: object) -> bool:
    """Whether a field is still as a draft leaves it."""
    return value in ("", "?", None)


def _column(item: object) -> TableColumn:
    if not isinstance(item, Mapping):
        raise InvalidArgument(f"columns must be a list of objects. A complete schema looks like {_EXAMPLE}.")
    name = _text("the name of a column", item.get("name"))
    make, needed, optional = _TYPES[str(one_of(tuple(_TYPES), type=item["type"]))]
    readers: _Readers = needed | optional | {"missing": _flag}
    _only_known(f"column {name!r}", item, {"name", "type", *readers})
    given = {key: read(f"{key} of column {name!r}", item[key]) for key, read in readers.items() if key in item}
    return make(name=name, **given)


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise InvalidArgument(f"{name} must be true or false, got {value!r}. Write it without quotes.")
    return value


def _table_format(fields: object) -> TableFormat:
    if not isinstance(fields, Mapping):
        raise InvalidArgument(f"format must be an object, got {fields!r}. Give separator, decimal and encoding.")
    _only_known("format", fields, {"separator", "decimal", "encoding"})
    return TableFormat(**{name: _text(f"{name} of the format", value) for name, value in fields.items()})


def _object(text: str) -> Mapping[str, object]:
    try:
        value = json.loads(text)
    except ValueError as problem:
        raise InvalidArgument(f"schema must be JSON text. A complete schema looks like {_EXAMPLE}.") from problem
    if not isinstance(value, dict):
        raise InvalidArgument(f"schema must be a JSON object. A complete schema looks like {_EXAMPLE}.")
    return value


def _only_known(what: str, fields: Mapping[str, object], known: set[str]) -> None:
    # A misspelt field must not be dropped silently: it could be the one that declares a bound.
    unknown = sorted(set(fields) - known)
    if unknown:
        raise InvalidArgument(f"{what} must have only the fields {sorted(known)}, got {unknown}. Check the spelling.")


def _list(name: str, value: object) -> list[object]:
    if not isinstance(value, list):
        raise InvalidArgument(f"{name} must be a list, got {value!r}. Write it in square brackets.")
    return value


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise InvalidArgument(f"{name} must be text, got {value!r}. Write it in double quotes.")
    return value


def _texts(name: str, value: object) -> tuple[str, ...]:
    return tuple(_text(f"every entry of {name}", item) for item in _list(name, value))


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidArgument(f"{name} must be a number, got {value!r}. Write it without quotes.")
    return value


def _date(name: str, value: object) -> str:
    # TOML has dates of its own.
    return _text(name, value.isoformat() if isinstance(value, date) else value)


def _optional_text(name: str, value: object) -> str | None:
    return None if value is None else _text(name, value)


_Readers = dict[str, Callable[[str, object], object]]
# Of each type in a schema file: the column, and how what it needs and what it may have are read.
_TYPES: dict[str, tuple[Callable[..., TableColumn], _Readers, _Readers]] = {
    "numeric": (NumericColumn, {"low": _number, "high": _number}, {"log": _flag}),
    "integer": (partial(NumericColumn, whole=True), {"low": _number, "high": _number}, {"log": _flag}),
    "category": (CategoricalColumn, {"categories": _texts}, {"other": _flag}),
    "ordinal": (OrdinalColumn, {"levels": _texts}, {}),
    "boolean": (BooleanColumn, {}, {"true": _texts, "false": _texts}),
    "date": (DateColumn, {"low": _date, "high": _date}, {"format": _optional_text}),
}


def _require_name(name: str) -> None:
    if not isinstance(name, str) or not name or name != name.strip():
        raise InvalidArgument(f"name must be text without surrounding white space, got {name!r}. Strip it.")


def _require_bounds(what: str, low: float, high: float) -> None:
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise InvalidArgument(f"{what} must be finite with low < high, got low={low!r}, high={high!r}. Correct them.")


def _require_texts(what: str, values: tuple[str, ...], *, at_least: int) -> None:
    if any(not isinstance(value, str) or value != value.strip() for value in values):
        raise InvalidArgument(f"{what} must be text without surrounding white space. Strip the entries.")
    if len(values) < at_least or len(set(values)) != len(values):
        raise InvalidArgument(f"{what} must be at least {at_least} different values, got {len(values)}. Correct it.")


# ----------------------------------------------------------------------------------------------------------------------
# Records in memory: features, labels, and a dataset's train and test split.
# ----------------------------------------------------------------------------------------------------------------------


# Of a public file without test records every so many is kept out of training.
_HELD_OUT_EVERY = 5


@dataclass(frozen=True, eq=False)
class Records:
    """Records that belong together: row i of `features`, `labels` and `texts` is one record.

    Args:
        features: float32, records first: tables (n, d), images (n, channels, height, width) in [0, 1].
        labels: n of them: int64, each the index of a label of the dataset, or float64, each the number to predict.
        texts: The raw texts of a text dataset, when they were asked for; else None.
    """

    features: Float32[np.ndarray, "n ..."]
    labels: Int64[np.ndarray, " n"] | Float64[np.ndarray, " n"]
    texts: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.features.dtype != np.float32 or self.labels.dtype not in (np.int64, np.float64):
            raise InvalidArgument(
                f"records must be float32 features and int64 labels (float64 for numbers to predict), "
                f"got {self.features.dtype} and {self.labels.dtype}. "
                "Convert them first."
            )
        if self.labels.ndim != 1 or self.features.ndim < 2 or len(self.features) != len(self.labels):
            raise InvalidArgument(
                "records must be features (n, …) with labels (n,), got dimensions "
                f"{self.features.ndim} and {self.labels.ndim} or different lengths. Put the records first."
            )
        if self.texts is not None and len(self.texts) != len(self.labels):
            raise InvalidArgument("texts must be one per record. Give as many texts as labels.")

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def record_shape(self) -> tuple[int, ...]:
        """Shape of one record's features: public, unlike the number of records."""
        return self.features.shape[1:]

    def only(self, chosen: np.ndarray) -> "Records":
        """The records of which `chosen` (n, boolean) is true."""
        texts = (
            None if self.texts is None else tuple(text for text, keep in zip(self.texts, chosen, strict=True) if keep)
        )
        return Records(self.features[chosen], self.labels[chosen], texts)

    def tensors(self) -> "tuple[torch.Tensor, torch.Tensor]":
        """Features and labels as CPU tensors that share this object's memory."""
        import torch  # imported here so that listing datasets stays fast

        return torch.from_numpy(self.features), torch.from_numpy(self.labels)


@dataclass(frozen=True, eq=False)
class DatasetSplits:
    """A dataset with its public facts.

    Args:
        name: The set's name, or the stem of the user's file.
        train: Records to train on.
        test: Records to measure on, or None: a user's file has no test split unless one is named, since
            accuracy on a random part of private data is itself a release to be paid for.
        labels: The label set; labels of records are indices in it. Empty where the target is a number.
        public: Whether the records are public. Only then may statistics without noise be shown.
        source: Where the records come from.
        license: The license of the records.
        schema: The declared schema of a table; None for images and texts.
        array_schema: The declared range of a user's array file, else None.
        held_out_every: k where every k-th record of a public file was kept out of `train` for `test`, else None.
        test_declared_public: Whether `test` came from a file that was declared public, beside private `train` records.
    """

    name: str
    train: Records
    test: Records | None
    labels: tuple[str, ...]
    public: bool
    source: str
    license: str
    schema: Schema | None
    array_schema: ArraySchema | None = None
    held_out_every: int | None = None
    test_declared_public: bool = False

    @property
    def test_is_public(self) -> bool:
        """Whether a model may be measured on the test records."""
        return self.test is not None and (self.public or self.test_declared_public)

    def with_held_out_records(self) -> Self:
        """Every fifth record as test records, of a public set that has none; mapped files stay whole.

        A record's number decides, so that the same file is always split alike.

        Raises:
            InvalidArgument: The records are not public: accuracy on some of them would be a release of its own.
        """
        if not self.public:
            raise InvalidArgument(
                "records must be public to be measured on, got private ones. Give a public test file."
            )
        if self.test is not None or isinstance(self.train.features, np.memmap) or len(self.train) < _HELD_OUT_EVERY:
            return self
        held = np.arange(len(self.train)) % _HELD_OUT_EVERY == _HELD_OUT_EVERY - 1
        return replace(self, train=self.train.only(~held), test=self.train.only(held), held_out_every=_HELD_OUT_EVERY)

    def input_facts(self) -> dict[str, object]:
        """What a model of these records is given and what it predicts, in JSON types: public facts alone."""
        shape = self.train.record_shape if self.schema is None else (self.schema.width(),)
        array = {"low": 0.0, "high": 255.0} if len(shape) == 3 else None
        if self.array_schema is not None:
            array = {"low": self.array_schema.low, "high": self.array_schema.high}
        inputs = {"table": None if self.schema is None else self.schema.to_dict(), "array": array}
        return {
            "schema": 1,
            "inputs": {name: value for name, value in inputs.items() if value is not None},
            "shape": list(shape),
            "features": [] if self.schema is None else list(self.schema.feature_names),
            "target": "label" if self.schema is None else self.schema.target,
            "labels": list(self.labels),
        }

    @property
    def num_classes(self) -> int:
        """Number of labels, for models that predict a label.

        Raises:
            InvalidArgument: The target is a number.
        """
        if not self.labels:
            target = "" if self.schema is None else f" {self.schema.target!r}"
            raise InvalidArgument(
                f"target must be a label for this model, got the number{target}. Choose a method that predicts "
                "numbers: --model adassp, boosting, network, …, or its estimator in Python."
            )
        return len(self.labels)

    def __post_init__(self) -> None:
        if self.test is self.train and not self.public:
            raise InvalidArgument(
                "test must be other, public records, got the private training records themselves. "
                "Give test=None, or public records."
            )


def fixed_order(count: int) -> Int64[np.ndarray, " count"]:
    """A fixed order that mixes a sorted public dataset: the same in every run, and no source of randomness.

    Position i holds the record whose index has the i-th smallest SHA-256 digest.
    """
    digests = [hashlib.sha256(index.to_bytes(8, "little")).digest() for index in range(count)]
    return np.array(sorted(range(count), key=digests.__getitem__), dtype=np.int64)
