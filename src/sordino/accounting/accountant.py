"""What an accountant is (floor 1): the one interface that every file of this room implements."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import numpy as np

from sordino.accounting.interval import Interval
from sordino.definitions import NeighboringRelation
from sordino.errors import AccountingError, SordinoError
from sordino.events import Event

__all__ = ["Accountant", "double_precision"]


@contextmanager
def double_precision(what: str) -> Iterator[None]:
    """Report arithmetic that leaves the doubles as `AccountingError`: an accountant that can't compute has no answer.

    Floating-point warnings are off inside: tails underflow, and errors are bounded, not signalled.
    """
    try:
        with np.errstate(all="ignore"):
            yield
    except SordinoError:
        raise
    except (ArithmeticError, ValueError, MemoryError) as error:
        raise AccountingError(
            f"{what} must be computable in double precision, got an intermediate result beyond it. Ask another "
            "accountant, or for less extreme values."
        ) from error


class Accountant(Protocol):
    """Turns an event into ε or δ, soundly, or refuses.

    Guarantee:
        The true ε (δ) of every mechanism that the event describes lies in the returned interval, under the
        relation given. An event that the accountant can't bound raises `UnsupportedEvent`; an input where its
        own numerical error can't be bounded raises `AccountingError`.
    """

    @property
    def name(self) -> str:
        """The name under which the accountant is chosen and reported."""
        ...

    @property
    def automatic(self) -> bool:
        """Whether ``auto`` may use it: sound, and not dominated by another accountant everywhere."""
        ...

    def supports(self, event: Event, relation: NeighboringRelation) -> bool:
        """Whether this accountant has a sound answer for the event under the relation."""
        ...

    def epsilon(self, event: Event, delta: float, relation: NeighboringRelation) -> Interval:
        """The smallest ε for which the event is (ε, `delta`)-private, as an interval."""
        ...

    def delta(self, event: Event, epsilon: float, relation: NeighboringRelation) -> Interval:
        """The smallest δ for which the event is (`epsilon`, δ)-private, as an interval."""
        ...
