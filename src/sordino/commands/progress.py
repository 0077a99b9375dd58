"""What a command says while it works: nothing when it is called from Python, lines and bars on a terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["Progress", "SILENT"]


class Progress:
    """Says nothing. The command line passes one that prints; derive a class to receive more.

    What is said depends on no private record.
    """

    is_shown = False
    """Whether a training shows its own progress line."""

    def status(self, text: str, *, title: str = "") -> None:
        """Say what is about to happen; `title` is what it is about."""

    def note(self, text: str) -> None:
        """Say something on the side."""

    @contextmanager
    def stage(self, words: str, *, total: int | None = None) -> "Iterator[Callable[..., None]]":
        """Show that a job goes on while the block is carried out.

        Args:
            words: what is being done.
            total: how many parts it has, if that is public.

        Yields:
            Called after each part whose number is public; ``words=`` changes what is being done.
        """
        del words, total

        def advance(*_: object, words: str | None = None) -> None:
            """Say nothing."""
            del words

        yield advance


SILENT = Progress()
