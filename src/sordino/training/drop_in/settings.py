"""Settings of an optimizer within one logical batch (floor 3): the number of its parts is private, and must not count.

A scheduler that steps once a part would make the learning rate a function of how many records were drawn.
"""

import gc
from weakref import ReferenceType, ref

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from sordino.errors import UnprivateStep

__all__ = ["Settings"]

# Schedulers are looked for, among all objects of the process, at the start of this many logical batches.
_SEARCHES = 2


class Settings:
    """Watches an optimizer's settings, and the schedulers that hold it, from part to part of a logical batch."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._schedulers: list[ReferenceType[LRScheduler]] = []
        self._searches = 0
        self._seen: object = None

    def look(self, *, begins: bool) -> None:
        """Look at the settings when a part comes; `begins` says that it is the first of a logical batch.

        Raises:
            UnprivateStep: something changed since the part before.
        """
        if begins and self._searches < _SEARCHES:
            self._searches += 1
            self._schedulers = [ref(found) for found in _schedulers_of(self._optimizer)]
        now = _written(self._optimizer), [_count(scheduler()) for scheduler in self._schedulers]
        if not begins and now != self._seen:
            raise UnprivateStep(
                "optimizer's settings must not change within a logical batch, got a change between two of its parts: "
                "their number is private. Step schedulers after the last part only: if loader.ends_step: "
                "scheduler.step()."
            )
        self._seen = now


def _written(optimizer: Optimizer) -> list[dict[str, str]]:
    return [
        {name: _text(value) for name, value in group.items() if name != "params"} for group in optimizer.param_groups
    ]


def _text(value: object) -> str:
    return repr(value.tolist()) if isinstance(value, torch.Tensor) else repr(value)


def _count(scheduler: LRScheduler | None) -> int | None:
    return None if scheduler is None else scheduler.last_epoch


def _schedulers_of(optimizer: Optimizer) -> list[LRScheduler]:
    # Nothing leads from an optimizer to its schedulers; reading changes none of them.
    return [
        found
        for found in gc.get_objects()
        if issubclass(type(found), LRScheduler) and getattr(found, "optimizer", None) is optimizer
    ]
