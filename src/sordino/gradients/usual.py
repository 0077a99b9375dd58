"""Decisions that depend on values, and what becomes of them in a graph that is recorded (floor 1, gradients).

Some kernels look at their results and take a slower way where rounding or the range of a number type would spoil them.
A recorded graph has no such turns: it is recorded as if everything were usual, and says with each run whether it was.
A batch for which it wasn't has to be computed again, without the graph.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

__all__ = ["is_recorded", "is_usual", "recorded"]

_noted: list[Tensor] | None = None


def is_usual(condition: Tensor) -> bool:
    """Whether `condition` holds everywhere; in a graph that is recorded it is noted, and taken to hold."""
    if _noted is None:
        return bool(condition.all())
    _noted.append(condition.all())
    return True


def is_recorded() -> bool:
    """Whether a graph is recorded now."""
    return _noted is not None


@contextmanager
def recorded() -> Iterator[list[Tensor]]:
    """A block whose operations are recorded as a graph; gives the conditions that must hold when the graph is run."""
    global _noted  # noqa: PLW0603 (a recording covers all that runs meanwhile)
    _noted = []
    try:
        yield _noted
    finally:
        _noted = None
