"""What an engine has charged, in order (floor 3)."""

from sordino import checks
from sordino.errors import InvalidArgument
from sordino.events import Event, SelfComposed, compose, from_dict, to_dict

__all__ = ["Charges"]


class Charges:
    """The events of all logical batches drawn so far. It only grows.

    Example:
        >>> from sordino.events import Gaussian
        >>> charges = Charges()
        >>> charges.add(Gaussian(noise_multiplier=1.0), 3)
        >>> charges.event()
        SelfComposed(event=Gaussian(noise_multiplier=1.0), count=3)
    """

    def __init__(self) -> None:
        self._history: list[tuple[Event, int]] = []
        self.unplanned = 0

    def add(self, event: Event, times: int = 1, *, planned: bool = False) -> None:
        """Charge `event`, `times` times. `unplanned` counts those that no target was calibrated for."""
        self.unplanned += 0 if planned else times
        if self._history and self._history[-1][0] == event:
            self._history[-1] = (event, self._history[-1][1] + times)
        else:
            self._history.append((event, times))

    def event(self) -> Event:
        """Everything charged so far, as one event."""
        return compose([SelfComposed(event=event, count=times) for event, times in self._history])

    @property
    def count(self) -> int:
        """How many events were charged."""
        return sum(times for _, times in self._history)

    def runs(self) -> tuple[tuple[Event, int], ...]:
        """The charges in order: each event, and how often it came in a row."""
        return tuple(self._history)

    def copy(self) -> "Charges":
        """The same charges, to go on from."""
        other = Charges()
        other._history, other.unplanned = list(self._history), self.unplanned
        return other

    def state_dict(self) -> dict[str, object]:
        """The charges as plain JSON types."""
        return {"schema": 1, "history": [[to_dict(event), times] for event, times in self._history]}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Add what `state_dict` saved to what was charged here."""
        history = state.get("history")
        if state.get("schema") != 1 or not isinstance(history, list):
            raise InvalidArgument("state must be what state_dict returned, got something else. Check the checkpoint.")
        for event, times in [(from_dict(event), checks.integer(0, times=times)) for event, times in history]:
            self.add(event, times)
