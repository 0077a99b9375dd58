"""Features of records, kept for a block of code and never in an object that a fit returns (floor 6).

Features of a record are as private as the record. They are slow to make and asked for several times in one fit, so they
are kept while a block runs; the fitted model holds the map from records to features only.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from sordino.data import Records

__all__ = ["feature_cache", "kept_here", "once_a_block"]

_T = TypeVar("_T")
_CACHE: ContextVar[dict[Hashable, Any] | None] = ContextVar("features of records", default=None)


@contextmanager
def feature_cache() -> Iterator[None]:
    """Keep features of records until the block ends: inside it, those of a record are made once.

    When: around several fits or predictions of recipes on the same records. A block within another one shares its
    features. `Pipeline.fit` is such a block by itself.

    Example:
        >>> with feature_cache():
        ...     pass  # pipeline.fit(dataset, …), then fitted.accuracy(dataset.test) and fitted.predict(dataset.test)
    """
    if _CACHE.get() is not None:
        yield
        return
    token = _CACHE.set({})
    try:
        yield
    finally:
        _CACHE.reset(token)


def kept_here(name: Hashable, make: Callable[[], _T]) -> _T:
    """What `make` gave for this name in the open block; made anew, and kept nowhere, outside of one."""
    cache = _CACHE.get()
    if cache is None:
        return make()
    if name not in cache:
        cache[name] = make()
    return cache[name]


def once_a_block(name: Hashable, records: Records, make: Callable[[], _T]) -> _T:
    """What `make` gives for this `Records` object, which it depends on alone; made once in a block."""
    made: WeakKeyDictionary[Records, _T] = kept_here(("records", name), WeakKeyDictionary)
    found = made.get(records)
    if found is None:
        found = made[records] = make()
    return found
