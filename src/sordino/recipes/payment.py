"""How stages of a pipeline are paid for (floor 6): planned before a record is read, charged one by one, in order."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sordino.errors import InvalidArgument
from sordino.events import Event, Gaussian, Nothing, PoissonSampled, compose, to_dict
from sordino.randomness import Randomness
from sordino.runs import RunFolder

__all__ = ["Payment", "Stage"]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One part of a pipeline that reads records.

    Args:
        name: what it releases, in a word or two: "components", "covariance", "training".
        charges: one event for each charge, in order; a training has one a step.
        settings: public facts for plan.json: plain JSON types.
    """

    name: str
    charges: tuple[Event, ...]
    settings: Mapping[str, object] = field(default_factory=dict)

    @property
    def words(self) -> str:
        """The stage in a line: how many charges, of what noise.

        Example:
            >>> Stage(name="components", charges=(Gaussian(noise_multiplier=7.0),)).words
            'components: 1 charge, noise multiplier 7'
        """
        noises = [noise for event in self.charges if (noise := _noise_multiplier(event)) is not None]
        count = f"{len(self.charges):,} {'charge' if len(self.charges) == 1 else 'charges'}"
        if not noises:
            return f"{self.name}: {count}"
        spread = f"{min(noises):.4g}" if min(noises) == max(noises) else f"{min(noises):.4g} to {max(noises):.4g}"
        return f"{self.name}: {count}, noise multiplier {spread}"

    def to_dict(self) -> dict[str, object]:
        """The stage as JSON types, equal charges in a row counted."""
        return {"name": self.name, "charges": counted(self.charges), "settings": dict(self.settings)}


def _noise_multiplier(event: Event) -> float | None:
    inner = event.event if isinstance(event, PoissonSampled) else event
    return inner.noise_multiplier if isinstance(inner, Gaussian) else None


def counted(events: Sequence[Event]) -> list[dict[str, object]]:
    """Events in order as JSON types, equal ones in a row with their count."""
    found: list[tuple[Event, int]] = []
    for event in events:
        if found and found[-1][0] == event:
            found[-1] = (event, found[-1][1] + 1)
        else:
            found.append((event, 1))
    return [{"event": to_dict(event), "count": count} for event, count in found]


class Payment:
    """What a pipeline's stages are given to pay with. Charge first, read records then.

    It is a transcript for `sordino.fit`: pass it as ``transcript=``, and every step is charged.

    Guarantee: nothing but the planned events, in their order, can be charged; an unplanned one raises, so a stage
    that pays before it reads can't read more than was planned.

    Args:
        planned: all charges in order.
        randomness: the one key of the run; pass it to every stage.
        progress: whether stages may show steps and time.
        run: gets a line for every charge.
        receipt: the ledger's name of the charge that paid for everything.
        epsilon: of everything; it stands in the last line.
    """

    def __init__(
        self,
        planned: Sequence[Event],
        *,
        randomness: Randomness,
        progress: bool = False,
        run: RunFolder | None = None,
        receipt: str | None = None,
        epsilon: float | None = None,
    ) -> None:
        self.randomness, self.progress = randomness, progress
        self._planned, self._run, self._receipt, self._epsilon = tuple(planned), run, receipt, epsilon
        self._charged = 0

    def charge(self, event: Event) -> None:
        """Pay for `event`, which is about to happen."""
        number = self._charged
        if number >= len(self._planned) or self._planned[number] != event:
            raise InvalidArgument(
                f"event must be charge {number} of the {len(self._planned)} that were planned, got another one. "
                "A stage charges what `Prepared.stages` says, in that order."
            )
        self._charged += 1
        if self._run is not None:
            last = self._charged == len(self._planned)
            epsilon = self._epsilon if last else None
            self._run.append(step=number, event=event, epsilon=epsilon, charge=self._receipt)

    def append(self, *, step: int, event: Event, epsilon: float) -> None:  # noqa: ARG002 (they count one stage only)
        """What `sordino.fit` calls before each step."""
        self.charge(event)

    @property
    def events(self) -> tuple[Event, ...]:
        """What has been charged, one event a charge."""
        return self._planned[: self._charged]

    @property
    def event(self) -> Event:
        """The composition of what has been charged."""
        return compose([event for event in self.events if not isinstance(event, Nothing)])

    @property
    def complete(self) -> bool:
        """Whether all that was planned was charged."""
        return self._charged == len(self._planned)
