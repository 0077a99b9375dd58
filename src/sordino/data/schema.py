"""Records in memory: features, labels, and a data set's train and test split."""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

import numpy as np

from sordino.checks import one_of
from sordino.errors import InvalidArgument, MissingDeclaration
from sordino.shapes import Float32, Float64, Int64

if TYPE_CHECKING:
    import torch

__all__ = [
    "ArraySchema",
    "CategoricalColumn",
    "DatasetSplits",
    "NumericColumn",
    "Records",
    "Schema",
    "fixed_order",
    "read_schema",
]


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
class NumericColumn:
    """A number with public bounds: clipped to [low, high], then scaled linearly to [-1, 1].

    A missing or unreadable number becomes the midpoint, which is 0 after scaling.

    Args:
        name: The column's name in the file's header.
        low: Public lower bound, in the column's own unit.
        high: Public upper bound, above `low`.

    Raises:
        InvalidArgument: If the bounds are not finite or not in order.
    """

    name: str
    low: float
    high: float

    def __post_init__(self) -> None:
        _require_name(self.name)
        _require_bounds(f"the bounds of column {self.name!r}", self.low, self.high)

    @property
    def width(self) -> int:
        """One feature."""
        return 1

    @property
    def feature_names(self) -> tuple[str, ...]:
        """The column's own name."""
        return (self.name,)

    def to_dict(self) -> dict[str, object]:
        """The JSON form."""
        return {"name": self.name, "type": "numeric", "low": self.low, "high": self.high}


@dataclass(frozen=True, kw_only=True)
class CategoricalColumn:
    """A value from a public list, one-hot; a missing or unlisted value is all zeros.

    Values are compared as text, without surrounding white space; whole numbers are written without a decimal point.

    Args:
        name: The column's name in the file's header.
        categories: The public list, in the order of the features; at least one, all different.

    Raises:
        InvalidArgument: If the list is empty or holds a value twice.
    """

    name: str
    categories: tuple[str, ...]

    def __post_init__(self) -> None:
        _require_name(self.name)
        object.__setattr__(self, "categories", tuple(self.categories))
        _require_texts(f"the categories of column {self.name!r}", self.categories, at_least=1)

    @property
    def width(self) -> int:
        """One feature per category."""
        return len(self.categories)

    @property
    def feature_names(self) -> tuple[str, ...]:
        """``column=category`` for every category."""
        return tuple(f"{self.name}={value}" for value in self.categories)

    def to_dict(self) -> dict[str, object]:
        """The JSON form."""
        return {"name": self.name, "type": "category", "categories": list(self.categories)}


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

    columns: tuple[NumericColumn | CategoricalColumn, ...]
    target: str
    labels: tuple[str, ...] = ()
    origin: Origin = "declared"
    target_bounds: tuple[float, float] | None = None

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
    def one_hot(self) -> tuple[range, ...]:
        """For each category the features that it becomes after encoding, in order."""
        ends = [sum(column.width for column in self.columns[: place + 1]) for place in range(len(self.columns))]
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
        fields = _object(text)
        _only_known("schema", fields, {"target", "labels", "columns", "origin", "low", "high"})
        fields = _with_target_bounds(fields)
        raw_columns = fields.get("columns")
        _check_not_missing(fields, raw_columns)
        is_number = "low" in fields or "high" in fields
        return cls(
            columns=tuple(_column(item) for item in _list("columns", raw_columns)),
            target=_text("target", fields["target"]),
            labels=_texts("labels", fields["labels"]) if "labels" in fields else (),
            origin=_origin(fields),
            target_bounds=(_number("low of the target", fields["low"]), _number("high of the target", fields["high"]))
            if is_number
            else None,
        )


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
        fields = {"array": {"low": self.low, "high": self.high}, "labels": list(self.labels), "origin": self.origin}
        return json.dumps(fields, indent=2, ensure_ascii=False) + "\n"

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
    """Read either kind of schema from a JSON file; an array schema has a field ``array``.

    Raises:
        InvalidArgument: If there is no such file or it is not a schema.
        MissingDeclaration: If it lacks a declaration.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as problem:
        raise InvalidArgument(f"schema must be a readable JSON file, got {str(path)!r}. Check the path.") from problem
    return ArraySchema.from_json(text) if "array" in _object(text) else Schema.from_json(text)


def _with_target_bounds(fields: Mapping[str, object]) -> Mapping[str, object]:
    """The fields with the bounds of a numeric target beside it, also where it was declared among the columns."""
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
        needed = {"numeric": ("low", "high"), "category": ("categories",)}.get(str(item.get("type")), ("type",))
        absent = [field for field in needed if field not in item]
        if absent:
            missing.append(f"{', '.join(map(repr, absent))} of column {item.get('name', '(unnamed)')!r}")
    if missing:
        raise MissingDeclaration(
            f"the schema must declare every bound, category list and label, got none for: {'; '.join(missing)}. "
            f"Add them; a complete schema looks like {_EXAMPLE}."
        )


def _origin(fields: Mapping[str, object]) -> Origin:
    return cast("Origin", one_of(("declared", "public_sample"), origin=fields.get("origin", "declared")))


def _column(item: object) -> NumericColumn | CategoricalColumn:
    if not isinstance(item, Mapping):
        raise InvalidArgument(f"columns must be a list of objects. A complete schema looks like {_EXAMPLE}.")
    name = _text("the name of a column", item.get("name"))
    if one_of(("numeric", "category"), type=item["type"]) == "numeric":
        _only_known(f"column {name!r}", item, {"name", "type", "low", "high"})
        return NumericColumn(
            name=name, low=_number(f"low of {name!r}", item["low"]), high=_number("high", item["high"])
        )
    _only_known(f"column {name!r}", item, {"name", "type", "categories"})
    return CategoricalColumn(name=name, categories=_texts(f"the categories of column {name!r}", item["categories"]))


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
# Records in memory: features, labels, and a data set's train and test split.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Records:
    """Records that belong together: row i of `features`, `labels` and `texts` is one record.

    Args:
        features: float32, records first: tables (n, d), images (n, channels, height, width) in [0, 1].
        labels: n of them: int64, each the index of a label of the data set, or float64, each the number to predict.
        texts: The raw texts of a text data set, when they were asked for; else None.
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

    def tensors(self) -> "tuple[torch.Tensor, torch.Tensor]":
        """Features and labels as CPU tensors that share this object's memory."""
        import torch  # imported here so that listing data sets stays fast

        return torch.from_numpy(self.features), torch.from_numpy(self.labels)


@dataclass(frozen=True, eq=False)
class DatasetSplits:
    """A data set with its public facts.

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
    """A fixed order that mixes a sorted public data set: the same in every run, and no source of randomness.

    Position i holds the record whose index has the i-th smallest SHA-256 digest.
    """
    digests = [hashlib.sha256(index.to_bytes(8, "little")).digest() for index in range(count)]
    return np.array(sorted(range(count), key=digests.__getitem__), dtype=np.int64)
