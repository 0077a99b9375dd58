"""One key, one run (floor 3)."""

from weakref import WeakValueDictionary

from sordino.errors import InvalidArgument
from sordino.randomness import Randomness

__all__ = ["fresh"]

_USED: WeakValueDictionary[int, Randomness] = WeakValueDictionary()


def fresh(randomness: Randomness) -> Randomness:
    """A second run with the same key would repeat its noise, and the difference of two gradients would be bare."""
    if _USED.get(id(randomness)) is randomness and not randomness.reproducible:
        raise InvalidArgument("randomness must be fresh for every run, got one that was used. Make a new Randomness().")
    _USED[id(randomness)] = randomness
    return randomness
