"""Events as a bag of leaves (floor 2): what was reserved, what was drawn from it, and what is left.

A leaf is any event that is not a composition. Order and nesting of `Composed` and `SelfComposed` don't matter here.
"""

from collections.abc import Mapping

from sordino.events import Composed, Event, Nothing, SelfComposed, compose

__all__ = ["leaves_of", "packed", "without"]


def leaves_of(event: Event) -> dict[Event, int]:
    """The leaves of an event with their counts ≥ 1, in the order of their first appearance.

    Example:
        >>> from sordino.events import Gaussian
        >>> leaves_of(SelfComposed(event=Gaussian(noise_multiplier=1.0), count=3))
        {Gaussian(noise_multiplier=1.0): 3}
    """
    found: dict[Event, int] = {}
    _collect(event, 1, found)
    return found


def _collect(event: Event, count: int, found: dict[Event, int]) -> None:
    if count == 0 or isinstance(event, Nothing):
        return
    if isinstance(event, SelfComposed):
        _collect(event.event, count * event.count, found)
    elif isinstance(event, Composed):
        for part in event.events:
            _collect(part, count, found)
    else:
        found[event] = found.get(event, 0) + count


def packed(leaves: Mapping[Event, int]) -> Event:
    """One event with these leaves."""
    return compose([SelfComposed(event=event, count=count) for event, count in leaves.items()])


def without(leaves: Mapping[Event, int], taken: Mapping[Event, int]) -> dict[Event, int] | None:
    """What is left of `leaves` after `taken`; None when something is taken that is not there."""
    if any(leaves.get(event, 0) < count for event, count in taken.items()):
        return None
    left = {event: count - taken.get(event, 0) for event, count in leaves.items()}
    return {event: count for event, count in left.items() if count}
