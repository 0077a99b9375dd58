"""What a step reads besides the gradient (floor 3): settings and state of the optimizer, parameters, buffers.

Between a batch and its step nothing of it may change, since nobody can tell what a new value was made of; from one step
to the next batch it may, but not to what came from a batch. The number of parts of a logical batch must not count.
"""

import gc
import math
from collections.abc import Iterator, Sequence
from weakref import ReferenceType, ref

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from sordino.errors import CoupledRecords, UnprivateStep
from sordino.training.loops.carried import Carried
from sordino.training.loops.tainted import TaintedFloat, TaintedInt
from sordino.training.loops.taped import TapedTensor

__all__ = ["Settings"]

# Schedulers are looked for, among all objects of the process, at the start of this many logical batches.
_SEARCHES = 2
_PRIVATE = (TaintedFloat, TaintedInt, TapedTensor)
# What an optimizer's setting or a tensor is known by, without reading a tensor's values.
_Known = list[object]


class Settings:
    """Watches an optimizer, the schedulers that hold it, and what it trains, from batch to step and on to the next.

    Args:
        optimizer: the user's.
        carried: memories that values of a batch were written to, and results of batches.
    """

    def __init__(self, optimizer: Optimizer, carried: Carried) -> None:
        self._optimizer, self._carried = optimizer, carried
        self._schedulers: list[ReferenceType[LRScheduler]] = []
        self._searches = 0
        # Where the module holds its parameters and buffers: a dictionary, and a name in it.
        self._places: list[tuple[dict[str, Tensor | None], str]] = []
        self._seen: tuple[_Known, list[int | None]] | None = None
        self._state: _Known = []
        self._memory: list[object] | None = None
        self._numbers: list[float] = []
        # Records of the last batch and the one before; how often settings changed as they did.
        self._rows, self._in_step = (0, 0), 0

    def watch(self, module: nn.Module | None) -> None:
        """Watch the parameters and buffers of `module` from the next batch on; of None, none."""
        parts = () if module is None else module.modules()
        held = [vars(part)[kind] for part in parts for kind in ("_parameters", "_buffers")]
        self._places = [(tensors, name) for tensors in held for name in tensors]
        self._memory = None

    def look(self, *, begins: bool, rows: int) -> None:
        """A part with `rows` records comes; `begins` says that it is the first of a logical batch.

        Raises:
            UnprivateStep: something changed since the part before.
            CoupledRecords: something holds what came from a batch.
        """
        if begins and self._searches < _SEARCHES:
            self._searches += 1
            self._schedulers = [ref(found) for found in _schedulers_of(self._optimizer)]
        self._refuse_private()
        now = _settings(self._optimizer), [_count(scheduler()) for scheduler in self._schedulers]
        if not begins and now != self._seen:
            raise UnprivateStep(
                "optimizer's settings must not change within a logical batch, got a change between two of its parts. "
                "Step schedulers after the last part only: if loader.ends_step: scheduler.step()."
            )
        if begins:
            self._refuse_counts(now[0], rows)
        self._seen, self._state = now, _state(self._optimizer)
        memory = _memory(self._places)
        if self._memory is not None and memory != self._memory:
            self._refuse_copies(self._memory, memory)
        self._memory = memory

    def check(self) -> None:
        """Before a step: all is as it was when the part came.

        Raises:
            UnprivateStep: something changed.
            CoupledRecords: something holds what came from a batch.
        """
        self._refuse_private()
        settings = None if self._seen is None else self._seen[0]
        for what, before, now in (
            ("the optimizer's settings", settings, _settings(self._optimizer)),
            ("the optimizer's state", self._state, _state(self._optimizer)),
            ("parameters and buffers", self._memory, _memory(self._places)),
        ):
            if before is not None and before != now:
                raise _changed(what)

    def check_hooks(self, gradients: Sequence[Tensor | None]) -> None:
        """After hooks that may change the private gradient: they changed no settings, and wrote nothing of a batch.

        Raises:
            UnprivateStep: a setting changed.
            CoupledRecords: a gradient, a setting or the state holds what came from a batch.
        """
        self._refuse_private()
        if any(
            isinstance(held, TapedTensor) or self._carried.was_written(held) for held in gradients if held is not None
        ):
            raise _private("gradients")
        if self._seen is not None and self._seen[0] != _settings(self._optimizer):
            raise _changed("the optimizer's settings")

    def stepped(self) -> None:
        """The optimizer has taken its step: what changed by it is released."""
        self._memory = _memory(self._places)

    def _refuse_private(self) -> None:
        """Refuse settings and state that carry a batch's notes, or lie in memory that a batch was written to."""
        for value in _values(self._optimizer):
            if isinstance(value, _PRIVATE) or (isinstance(value, Tensor) and self._carried.was_written(value)):
                raise _private("the optimizer's settings and state")

    def _refuse_copies(self, before: list[object], now: list[object]) -> None:
        """Refuse a parameter or buffer that the loop set to a result of a batch since the step."""
        for (tensors, name), old, new in zip(self._places, before, now, strict=True):
            tensor = tensors.get(name)
            if old != new and tensor is not None and self._carried.is_copy(tensor):
                raise _private("parameters and buffers")

    def _refuse_counts(self, settings: _Known, rows: int) -> None:
        """A setting that changes twice as the number of records did was made from it (``len(batch)``)."""
        numbers = [float(value) for value in settings if isinstance(value, int | float)]
        old, (older, last) = self._numbers, self._rows
        self._numbers, self._rows = numbers, (last, rows)
        # What was set after a step is seen with the next batch, and follows the batch before.
        if not older or older == last or len(numbers) != len(old):
            return
        follows = any(
            one != two and (_is_close(one * last, two * older) or _is_close(one * older, two * last))
            for one, two in zip(old, numbers, strict=True)
        )
        self._in_step = self._in_step + 1 if follows else 0
        if self._in_step > 1:
            raise _private("the optimizer's settings")


def _is_close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-9)


def _changed(what: str) -> UnprivateStep:
    return UnprivateStep(
        f"{what} must not change between a batch and optimizer.step, got a change: what the new values were made of "
        "can't be told, and they reach the parameters without clipping and noise. Make such changes (learning rate, "
        "schedulers, limits on weights) after optimizer.step, before the next batch is taken."
    )


def _private(what: str) -> CoupledRecords:
    return CoupledRecords(
        f"{what} must not be made of private batches, got what came from one (a loss, a mean, the number of "
        "records): it reaches the parameters without clipping and noise. Use constants, schedules fixed in advance, or "
        "what public records give."
    )


def _leaves(value: object) -> Iterator[object]:
    if isinstance(value, tuple | list):
        for part in value:
            yield from _leaves(part)
    else:
        yield value


def _values(optimizer: Optimizer) -> Iterator[object]:
    """Every setting and every entry of the state."""
    for group in optimizer.param_groups:
        for name, value in group.items():
            if name != "params":
                yield from _leaves(value)
    for state in optimizer.state.values():
        yield from state.values() if isinstance(state, dict) else ()


def _known(value: object) -> object:
    """A tensor by its place and torch's count of changes, other objects than plain ones by their place."""
    if isinstance(value, Tensor):
        return id(value), value._version
    return value if isinstance(value, int | float | str | None) else id(value)


def _settings(optimizer: Optimizer) -> _Known:
    return [
        _known(value)
        for group in optimizer.param_groups
        for name, whole in group.items()
        if name != "params"
        for value in _leaves(whole)
    ]


def _state(optimizer: Optimizer) -> _Known:
    return [
        (name, _known(value))
        for state in optimizer.state.values()
        if isinstance(state, dict)
        for name, value in state.items()
        if isinstance(value, Tensor | int | float)
    ]


def _memory(places: Sequence[tuple[dict[str, Tensor | None], str]]) -> list[object]:
    return [_place_of(tensors.get(name)) for tensors, name in places]


def _place_of(tensor: Tensor | None) -> object:
    if tensor is None:
        return None
    try:
        return id(tensor), tensor.data_ptr(), tensor._version
    except (RuntimeError, NotImplementedError):
        return id(tensor), 0, tensor._version  # It has no memory of its own.


def _count(scheduler: LRScheduler | None) -> int | None:
    return None if scheduler is None else scheduler.last_epoch


def _schedulers_of(optimizer: Optimizer) -> list[LRScheduler]:
    # Nothing leads from an optimizer to its schedulers; reading changes none of them.
    return [
        found
        for found in gc.get_objects()
        if issubclass(type(found), LRScheduler) and getattr(found, "optimizer", None) is optimizer
    ]
