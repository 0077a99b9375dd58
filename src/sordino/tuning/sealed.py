"""Runs that nobody watches: what a run prints, warns or raises is not part of what was paid for (floor 5)."""

import contextlib
import io
import logging
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from sordino.tuning.space import Config

__all__ = ["Trial", "attempt", "sealed"]

Model = TypeVar("Model")


@dataclass(frozen=True, kw_only=True)
class Trial(Generic[Model]):
    """One run: its settings and what came out, or nothing when it failed. Kept inside the search."""

    config: Config
    model: Model | None
    score: float

    @property
    def failed(self) -> bool:
        """Whether there is no model to choose."""
        return self.model is None


class _Nowhere(io.TextIOBase):
    def write(self, text: str) -> int:
        return len(text)


@contextlib.contextmanager
def sealed() -> Iterator[None]:
    """Nothing is written to standard output or error, logged or warned inside."""
    before = logging.root.manager.disable
    with (
        contextlib.redirect_stdout(_Nowhere()),
        contextlib.redirect_stderr(_Nowhere()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(before)


def attempt(train: Callable[[], tuple[Model, float]], config: Config) -> Trial[Model]:
    """A run that counts whatever happens: an exception, or no model, is a run with the worst score.

    The exception's text is dropped, as it may quote a record.
    """
    try:
        model, score = train()
        number = float(score)
    except Exception:
        return Trial(config=config, model=None, score=-math.inf)
    if model is None:
        return Trial(config=config, model=None, score=-math.inf)
    return Trial(config=config, model=model, score=-math.inf if math.isnan(number) else number)
