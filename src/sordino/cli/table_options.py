"""What commands that read a table share: the word about its labels."""

from typing import TYPE_CHECKING

from rich.text import Text

from sordino.cli.console import is_rank_zero
from sordino.errors import InvalidArgument

if TYPE_CHECKING:
    from sordino.cli.console import Output
    from sordino.data import DatasetSplits

__all__ = ["print_labels"]

# The most labels that are named.
_SHOWN = 12


def print_labels(dataset: "DatasetSplits", out: "Output") -> None:
    """Say which labels the schema lists and that other records do not count, before private records are trained on.

    How many records do not count is private and is not told. That none is left is told: training on no record at all
    would tell it too, since the command takes the number of records as public.

    Raises:
        InvalidArgument: no record has a listed label.
    """
    if dataset.public:
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
