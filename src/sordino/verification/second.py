"""ε by an implementation that shares no code with ours: dp-accounting's privacy loss distributions (floor 6).

Its estimate is pessimistic, so it bounds the true ε from above as ours does, by other means: privacy losses on a
lattice, composed by Fourier transforms, against our contour integrals. Install it with ``sordino[verify]``.

References:
    Doroshenko, Ghazi, Kamath, Kumar, Manurangsi 2022 (connecting the dots).
"""

import importlib.util
import math
from typing import Any, cast

from sordino.accounting.interchange import to_dp_event
from sordino.definitions import NeighboringRelation
from sordino.events import Event, Nothing

__all__ = ["is_available", "second_epsilon"]

# Its error grows with the number of compositions times the square of the lattice's width.
_WIDTHS = ((1_000, 1e-3), (100_000, 1e-4))
_FINEST = 2e-5


def is_available() -> bool:
    """Whether dp-accounting is installed."""
    return importlib.util.find_spec("dp_accounting") is not None


def second_epsilon(event: Event, delta: float, *, relation: NeighboringRelation, compositions: int) -> float:
    """An upper bound of ε, computed by dp-accounting.

    Args:
        event: what was done.
        delta: in (0, 1).
        relation: the neighbouring relation.
        compositions: how many steps `event` composes; the more, the finer the lattice.

    Raises:
        UnsupportedEvent: dp-accounting has no counterpart of the event.
    """
    if isinstance(event, Nothing):
        return 0.0
    import dp_accounting
    from dp_accounting import pld

    library = cast("Any", dp_accounting)
    relations = {
        NeighboringRelation.ADD_OR_REMOVE_ONE: library.NeighboringRelation.ADD_OR_REMOVE_ONE,
        NeighboringRelation.REPLACE_ONE: library.NeighboringRelation.REPLACE_ONE,
        NeighboringRelation.REPLACE_SPECIAL: library.NeighboringRelation.REPLACE_SPECIAL,
    }
    width = next((width for most, width in _WIDTHS if compositions <= most), _FINEST)
    accountant = cast("Any", pld).PLDAccountant(relations[relation], value_discretization_interval=width)
    accountant.compose(to_dp_event(event, relation=relation))
    found = float(accountant.get_epsilon(delta))
    return math.inf if math.isnan(found) else found
