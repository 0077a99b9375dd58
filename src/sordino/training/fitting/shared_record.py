"""The run folder of a run in several processes (floor 3): the first one writes it, the others follow."""

from pathlib import Path

import numpy as np
from torch import nn

from sordino.definitions import Guarantee
from sordino.events import Event, Nothing
from sordino.randomness import Randomness
from sordino.runs import RunFolder
from sordino.training.bills.adaptive import AdaptiveRun
from sordino.training.fitting.checkpoint import whole
from sordino.training.fitting.record import Parts, RunRecord, record_of
from sordino.training.plan import Plan
from sordino.training.processes.ranks import Ranks

__all__ = ["record_among"]


class _Followed(RunRecord):
    """A run that another process writes: its checkpoint is loaded here too, and nothing is written.

    Where the model is sharded, what is written there is gathered from here too.
    """

    def begin(self, parts: Parts, randomness: Randomness) -> None:
        """Load the checkpoint, before the first process writes that a segment begins."""
        self.load(parts)
        self._randomness = randomness
        self.seeded = randomness.reproducible or any(segment.seeded for segment in self.folder.segments())

    def charge(
        self, *, step: int, event: Event, epsilon: float, indices: np.ndarray, charge: str | None = None
    ) -> None:
        """Count it; the first process writes it."""
        del step, epsilon, indices, charge
        if not isinstance(event, Nothing):
            self._charged.add(event)

    def save(self, parts: Parts, done: int) -> None:
        """The first process writes it."""
        if done != self._saved:
            self._saved = done
            parts.state(keep=False)

    def finish(self, model: nn.Module, guarantee: Guarantee, *, complete: bool) -> None:
        """The first process writes it."""
        del guarantee, complete
        whole(model.state_dict(), keep=False)

    def give_up(self) -> None:
        """Nothing was begun here."""


def record_among(
    ranks: Ranks,
    plan: Plan,
    *,
    run: RunFolder | str | Path | None,
    resume: str | Path | None,
    every: int | None,
    diagnostics: str | None,
    adaptive: AdaptiveRun | None,
) -> RunRecord | None:
    """`record_of` in the first process; the others only read a run that is resumed, from the same disk.

    Those of a sharded model help to write every run.
    """
    if ranks.shards is not None:
        ranks.require_same(run=run is not None, resume=resume is not None, checkpoint_every=every)
    made: list[RunRecord | None] = []
    ranks.agreed(
        lambda: made.append(
            record_of(plan, run=run, resume=resume, every=every, diagnostics=diagnostics, adaptive=adaptive)
        )
    )
    if made:
        return made[0]
    if resume is not None:
        seen = every if ranks.shards is not None else None
        return _Followed(RunFolder.open(resume), plan, every=seen, is_new=False, adaptive=adaptive)
    if run is None or ranks.shards is None:
        return None
    path = run.path if isinstance(run, RunFolder) else run
    return _Followed(RunFolder.open(path), plan, every=every, is_new=True)
