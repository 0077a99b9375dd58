"""The named sets and their loaders (floor 1)."""

from collections.abc import Callable

from sordino.data.adult import load_adult
from sordino.data.records import DataSet

__all__ = ["NAMED", "load_named"]


def _adult(*, keep_texts: bool) -> DataSet:
    return load_adult()


NAMED: dict[str, Callable[..., DataSet]] = {"adult": _adult}


def load_named(name: str, *, keep_texts: bool = False) -> DataSet:
    """Load one named set."""
    return NAMED[name](keep_texts=keep_texts)
