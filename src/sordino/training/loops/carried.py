"""What a loop carries in tensors without notes (floor 3): memory it wrote to, copies of results, and constants.

A tensor that did not come with a batch carries no notes. What is written into it in place (``counts[c] = …``,
``centre.mul_(0.9).add_(…)``, ``queue[i] = …``) would look like a constant ever after; so would a copy that torch makes
without asking, as ``torch.tensor(x.mean(0))`` does.
"""

import math
from collections import deque
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from sordino.errors import CoupledRecords
from sordino.training.loops.outsiders import memory_of, says_nothing

__all__ = ["Carried"]

# From this many memories on, those that are gone are forgotten; then again at twice what is left.
_FORGET = 256
# So many results, and numbers read, are remembered; larger results than these are not looked for.
_RESULTS, _LARGEST = 512, 4096
# A number with so few binary digits may be met by chance.
_SHORT = 2.0**12
_LONG = (torch.float32, torch.float64)


class Carried:
    """Memories that a loop wrote values of its batches to, and tensors that stayed as they were; none is kept alive.

    Args:
        module: the private module, whose parameters and buffers may not be written to; or None.
    """

    def __init__(self, module: nn.Module | None = None) -> None:
        self._module = module
        self._written: dict[int, StorageWeakRef] = {}
        self._limit = self._most = _FORGET
        self._constants: dict[int, tuple[ReferenceType[Tensor], int]] = {}
        self._results: deque[Tensor] = deque(maxlen=_RESULTS)
        self._numbers: deque[float] = deque(maxlen=_RESULTS)

    def write(self, tensor: Tensor) -> None:
        """Values of a batch were written into `tensor`.

        Raises:
            CoupledRecords: it is a part of the module.
        """
        if self._module is not None:
            _refuse_part_of(self._module, memory_of(tensor))
        memory = _memory(tensor)
        if memory is None:
            return
        self._written[memory.cdata] = memory
        if len(self._written) > self._limit:
            self._written = {key: value for key, value in self._written.items() if not value.expired()}
            self._limit = max(_FORGET, 2 * len(self._written))

    def was_written(self, tensor: Tensor) -> bool:
        """Whether values of a batch were written into the memory of `tensor`."""
        memory = _memory(tensor) if self._written else None
        return memory is not None and memory.cdata in self._written

    def is_left(self) -> bool:
        """Whether some memory that was written to is still there: what is made of it carries no notes either."""
        return any(not memory.expired() for memory in self._written.values())

    def keep_constant(self, tensor: Tensor) -> None:
        """Remember a tensor of a proved loss: unchanged in a later batch, it holds nothing of that batch."""
        self._constants[id(tensor)] = (ref(tensor), tensor._version)
        if len(self._constants) > self._most:
            self._constants = {key: held for key, held in self._constants.items() if held[0]() is not None}
            self._most = max(_FORGET, 2 * len(self._constants))

    def is_constant(self, tensor: Tensor) -> bool:
        """Whether it was there in an earlier batch and torch did not change it since."""
        reference, version = self._constants.get(id(tensor), (None, -1))
        return reference is not None and reference() is tensor and tensor._version == version

    def remember(self, result: Tensor) -> None:
        """A small result was computed from a batch."""
        if result.dtype.is_floating_point and 0 < result.numel() <= _LARGEST:
            self._results.append(result.detach().flatten().clone())

    def tell(self, number: float) -> None:
        """A number was computed from a batch."""
        if math.isfinite(number) and number * _SHORT != round(number * _SHORT):
            self._numbers.append(number)

    def is_copy(self, tensor: Tensor) -> bool:
        """Whether `tensor` holds a result of this batch or of one not long ago, or a number that was read from it."""
        if tensor.dtype not in _LONG or not 0 < tensor.numel() <= _LARGEST or says_nothing(tensor):
            return False
        values = tensor.detach().flatten()
        # What anybody might write down, one half or 0.75, is met by chance.
        if bool((values * _SHORT == (values * _SHORT).round()).all()):
            return False
        if any(_are_equal(result, values) for result in self._results if result.numel() == values.numel()):
            return True
        if not self._numbers:
            return False
        told = torch.tensor(list(self._numbers), dtype=torch.float64, device=values.device).to(values.dtype)
        return bool(torch.isin(values, told).any())


def _are_equal(result: Tensor, values: Tensor) -> bool:
    return result.device == values.device and torch.equal(result.to(values.dtype), values)


def _memory(tensor: Tensor) -> StorageWeakRef | None:
    try:
        return StorageWeakRef(tensor.untyped_storage())
    except (RuntimeError, NotImplementedError):
        return None


def _refuse_part_of(module: nn.Module, place: int) -> None:
    held = [*module.named_parameters(), *module.named_buffers()]
    names = sorted(name for name, tensor in held if place and memory_of(tensor) == place)
    if names:
        raise CoupledRecords(
            f"{', '.join(names)} must not be written to by the loop, got values of the batch: what a module stores "
            "of records is released without noise. Use a public constant, or compute it on public records."
        )
