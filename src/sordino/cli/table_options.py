"""What commands that read a table share: the word about its labels, and the kind of its target."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from sordino.cli.console import is_rank_zero
from sordino.errors import InvalidArgument

if TYPE_CHECKING:
    from sordino.cli.console import Output
    from sordino.data import DatasetSplits

__all__ = ["DEFAULT_REGRESSOR", "TargetBoundsOption", "default_model", "print_labels"]

# The most labels that are named.
_SHOWN = 12


def print_labels(dataset: "DatasetSplits", out: "Output") -> None:
    """Say which labels the schema lists and that other records do not count, before private records are trained on.

    How many records do not count is private and is not shown. That none is left is shown: training on no record at all
    would tell it too, since the command takes the number of records as public.

    Raises:
        InvalidArgument: no record has a listed label.
    """
    if dataset.public:
        return
    if not dataset.labels:
        _print_number(dataset, out)
        return
    labels = ", ".join(map(repr, dataset.labels[:_SHOWN]))
    if len(dataset.labels) > _SHOWN:
        labels += f" and {len(dataset.labels) - _SHOWN} more"
    column = f" in column {dataset.schema.target!r}" if dataset.schema else ""
    if not len(dataset.train):
        raise InvalidArgument(
            f"data must have records with one of the listed labels, {labels}, got none{column}. Correct the labels of "
            "the schema, or the file."
        )
    if is_rank_zero():
        out.print_status(Text(f"labels{column}: {labels}. Records with another label, or with none, do not count."))


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
