"""The one door through which every mechanism releases, so that an audit can stand beside it (floor 1).

`recordable` marks the methods that turn a value into a noisy one. Nobody listens outside an audit, and a marked method
then is what it was but for one look at a variable. Inside ``with recording_releases(observer)`` the observer is asked
instead, with the value, the mechanism, which knows its sensitivity and scale, and a way to draw the true answer.

Example:
    >>> from sordino.mechanisms import LaplaceMechanism
    >>> class Listener:
    ...     def released(self, release, draw):
    ...         print(release.operation, release.value, release.mechanism.scale)
    ...         return 7.0
    >>> with recording_releases(Listener()):
    ...     LaplaceMechanism(epsilon=2.0, l1_sensitivity=1.0).release(3.0)
    release 3.0 0.5
    7.0
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar, cast, runtime_checkable

__all__ = ["Observer", "Release", "recordable", "recording_releases"]

_Owner = TypeVar("_Owner")
_Answer = TypeVar("_Answer")
_Asked = ParamSpec("_Asked")


@dataclass(frozen=True, kw_only=True)
class Release:
    """One call of a mechanism. It holds private values: it is for audits on data made for them.

    Args:
        mechanism: the object that was asked; it states sensitivity, scale and event.
        operation: name of the method.
        value: its first argument, what is to be released.
        rest: the other arguments by position.
        named: the other arguments by name.
    """

    mechanism: object
    operation: str
    value: object
    rest: tuple[object, ...] = ()
    named: Mapping[str, object]


@runtime_checkable
class Observer(Protocol):
    """Who stands beside the mechanisms."""

    def released(self, release: Release, draw: Callable[[], object]) -> object:
        """What the caller is answered: ``draw()``, or something else in its place."""
        ...


_OBSERVER: ContextVar[Observer | None] = ContextVar("sordino_release_observer", default=None)


@contextmanager
def recording_releases(observer: Observer) -> Iterator[None]:
    """Let `observer` see every release in the block, in this thread or task.

    Guarantee: none; whatever the observer keeps or changes is outside every guarantee. For tests and audits.
    """
    token = _OBSERVER.set(observer)
    try:
        yield
    finally:
        _OBSERVER.reset(token)


def recordable(
    method: Callable[Concatenate[_Owner, _Asked], _Answer],
) -> Callable[Concatenate[_Owner, _Asked], _Answer]:
    """Mark a method of a mechanism as a release. Releases inside it belong to it and are not shown by themselves."""

    @wraps(method)
    def release(mechanism: _Owner, *args: _Asked.args, **kwargs: _Asked.kwargs) -> _Answer:
        observer = _OBSERVER.get()
        if observer is None:
            return method(mechanism, *args, **kwargs)

        def draw() -> object:
            token = _OBSERVER.set(None)
            try:
                return method(mechanism, *args, **kwargs)
            finally:
                _OBSERVER.reset(token)

        asked = Release(
            mechanism=mechanism,
            operation=method.__name__,
            value=args[0] if args else next(iter(kwargs.values()), None),
            rest=tuple(args[1:]),
            named=dict(kwargs),
        )
        return cast("_Answer", observer.released(asked, draw))

    return release
