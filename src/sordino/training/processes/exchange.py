"""Where processes wait for each other (floor 3)."""

from collections.abc import Iterator
from contextlib import contextmanager

from sordino.errors import SordinoError

__all__ = ["exchange"]


@contextmanager
def exchange() -> Iterator[None]:
    """A block in which processes wait for each other.

    Raises:
        SordinoError: one of them is gone, or did not answer in the backend's time.
    """
    try:
        yield
    except RuntimeError as error:
        raise SordinoError(
            "all processes must take part until the end, got one that is gone or does not answer. What was charged "
            "stays charged; go on from the last checkpoint with resume=, with any number of processes."
        ) from error
