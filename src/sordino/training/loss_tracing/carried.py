"""What a loop carries past the gradient, from batch to step and from one batch to the next.

Three ways, and who looks at them: tensors of a batch themselves (their tags), memory that a batch was written into and
copies of its results (`CrossBatchState`), and the settings, state and parameters that a step reads besides the gradient
(`OptimizerSettingsWatch`). A tensor that did not come with a batch carries no notes: what is written into it in place
(``counts[c] = …``, ``queue[i] = …``) would look like a constant ever after, and so would a copy that torch makes
without asking, as ``torch.tensor(x.mean(0))`` does.
"""

import itertools
import math
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from sordino.errors import CoupledRecords, NonPrivateStep
from sordino.training.loss_tracing.traced_tensor import TaintedFloat, TaintedInt, TracedTensor
from sordino.training.probing.snapshots import readable_fingerprint
from sordino.training.pytree import tensors_in, tree_leaves

# ----------------------------------------------------------------------------------------------------------------------
# Where a tensor comes from: the batch that the loader gave last, an earlier one, or elsewhere.
#
# A batch's own tensors carry a mark, so that a tensor of an earlier batch is known. What torch makes of them is on the
# batch's trace.
# ----------------------------------------------------------------------------------------------------------------------


BatchTag = tuple[int, int]
"""(step, microbatch) of the batch that a tensor belongs to."""

_TAG = "_sordino_chunk"
_PUBLIC = "_sordino_public"


def tag_batch(batch: object, tag: BatchTag) -> None:
    """Mark the batch's own tensors."""
    for tensor in tensors_in(batch):
        setattr(tensor, _TAG, tag)


def batch_tag(tensor: Tensor) -> BatchTag | None:
    """The tag of the batch that `tensor` is known to belong to, None when nothing is known."""
    return getattr(tensor, _TAG, None)


def mark_public(batch: object) -> None:
    """Mark tensors as made without private records."""
    for tensor in tensors_in(batch):
        setattr(tensor, _PUBLIC, True)


def is_public(tensor: Tensor) -> bool:
    """Whether it was marked as made without private records."""
    return getattr(tensor, _PUBLIC, False) is True


def texts_in(batch: object) -> dict[int, object]:
    """Everything in a batch that is neither a tensor nor a number, by identity."""
    return {id(leaf): leaf for leaf in tree_leaves(batch) if not isinstance(leaf, Tensor | int | float | None)}


# ----------------------------------------------------------------------------------------------------------------------
# What values show.
# ----------------------------------------------------------------------------------------------------------------------


def storage_address(tensor: Tensor) -> int:
    """Where the tensor's memory begins; views of one tensor have it in common."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0  # No memory of its own: then it could lie in any.


def counts_records(value: Tensor) -> bool:
    """Whether it is 0, 1, 2, …: positions of records, which say nothing about them."""
    integer = not value.dtype.is_floating_point and not value.dtype.is_complex and value.dtype != torch.bool
    return value.dim() == 1 and integer and bool((value == torch.arange(len(value), device=value.device)).all())


def is_uninformative(value: Tensor) -> bool:
    """Whether it holds 0, 1, 2, …, or nothing but zeros or nothing but ones."""
    return counts_records(value) or bool((value == 0).all()) or bool((value == 1).all())


# The module's values are compared in this many first batches, and then whenever their number is a power of two.
FIRST_BATCHES = 3


def compares_values(batches: int) -> bool:
    """Whether the module's values are compared in a batch that comes after this many."""
    return batches < FIRST_BATCHES or batches & (batches - 1) == 0


# ----------------------------------------------------------------------------------------------------------------------
# What a loop carries in tensors without notes: memory it wrote to, copies of results, and constants.
# ----------------------------------------------------------------------------------------------------------------------


# From this many memories on, those that are gone are forgotten; then again at twice what is left.
_FORGET = 256
# So many results, and numbers read, are remembered; larger results than these are not looked for.
_RESULTS, _LARGEST = 512, 4096
# A number with so few binary digits may be met by chance.
_SHORT = 2.0**12
_LONG = (torch.float32, torch.float64)


class CrossBatchState:
    """Memories that a loop wrote values of its batches to, and tensors that stayed as they were; none is kept alive.

    Args:
        module: the private module, whose parameters and buffers may not be written to; or None.
    """

    def __init__(self, module: nn.Module | None = None) -> None:
        self._module = module
        self._written: dict[int, StorageWeakRef] = {}
        self._limit = _FORGET
        # How often torch had changed each.
        self._constants = WeakTensorKeyDictionary()
        self._results: deque[Tensor] = deque(maxlen=_RESULTS)
        self._numbers: deque[float] = deque(maxlen=_RESULTS)

    def write(self, tensor: Tensor) -> None:
        """Values of a batch were written into `tensor`.

        Raises:
            CoupledRecords: it is a part of the module.
        """
        if self._module is not None:
            _check_not_part_of(self._module, storage_address(tensor))
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
        """Remember a tensor of a checked loss: unchanged in a later batch, it holds nothing of that batch."""
        self._constants[tensor] = tensor._version

    def is_constant(self, tensor: Tensor) -> bool:
        """Whether it was there in an earlier batch and torch did not change it since."""
        return self._constants.get(tensor) == tensor._version

    def remember(self, result: Tensor) -> None:
        """A small result was computed from a batch."""
        if result.dtype.is_floating_point and 0 < result.numel() <= _LARGEST:
            self._results.append(result.detach().flatten().clone())

    def tell(self, number: float) -> None:
        """A number was computed from a batch."""
        if math.isfinite(number) and number * _SHORT != round(number * _SHORT):
            self._numbers.append(number)

    def is_told(self, number: float) -> bool:
        """Whether `number` was read from a batch, or is a result of one that consists of one number."""
        if not math.isfinite(number) or number * _SHORT == round(number * _SHORT):
            return False
        # A device would have to be waited for.
        single = (result for result in self._results if result.numel() == 1 and result.device.type == "cpu")
        return number in self._numbers or any(result.item() == number for result in single)

    def is_copy(self, tensor: Tensor) -> bool:
        """Whether `tensor` holds a result of this batch or of one not long ago, or a number that was read from it."""
        if tensor.dtype not in _LONG or not 0 < tensor.numel() <= _LARGEST or is_uninformative(tensor):
            return False
        values = tensor.detach().flatten()
        # What anybody might write down, one half or 0.75, is met by chance.
        if bool((values * _SHORT == (values * _SHORT).round()).all()):
            return False
        if any(_are_equal(result, values) for result in self._results if result.numel() == values.numel()):
            return True
        if not self._numbers:
            return False
        known = torch.tensor(list(self._numbers), dtype=torch.float64, device=values.device).to(values.dtype)
        return bool(torch.isin(values, known).any())


def _are_equal(result: Tensor, values: Tensor) -> bool:
    return result.device == values.device and torch.equal(result.to(values.dtype), values)


def _memory(tensor: Tensor) -> StorageWeakRef | None:
    try:
        return StorageWeakRef(tensor.untyped_storage())
    except (RuntimeError, NotImplementedError):
        return None


def _check_not_part_of(module: nn.Module, address: int) -> None:
    held = [*module.named_parameters(), *module.named_buffers()]
    names = sorted(name for name, tensor in held if address and storage_address(tensor) == address)
    if names:
        raise CoupledRecords(
            f"{', '.join(names)} must not be written to by the loop, got values of the batch: what a module stores "
            "of records is released without noise. Use a public constant, or compute it on public records."
        )


# ----------------------------------------------------------------------------------------------------------------------
# What a step reads besides the gradient: settings and state of the optimizer, parameters, buffers.
#
# Between a batch and its step nothing of it may change, since it can't be known what a new value was made of; from one
# step to the next batch it may, but not to what came from a batch.
# ----------------------------------------------------------------------------------------------------------------------


_PRIVATE = (TaintedFloat, TaintedInt, TracedTensor)
# Exactly these types carry no notes; most settings have one of them.
_PLAIN = frozenset({bool, int, float, str, type(None)})
# What an optimizer's setting or a tensor is known by, without reading a tensor's values.
_Known = list[object]
_Held = list[tuple[dict[str, Tensor | None], str]]


class OptimizerSettingsWatch:
    """Watches an optimizer and what it trains, from batch to step and on to the next.

    Args:
        optimizer: the user's.
        carried: memories that values of a batch were written to, and results of batches.
    """

    def __init__(self, optimizer: Optimizer, carried: CrossBatchState) -> None:
        self._optimizer, self._carried = optimizer, carried
        # Where the module holds its parameters and buffers: a dictionary, and a name in it.
        self._held: _Held = []
        self._seen: _Known | None = None
        self._state: _Known = []
        self._memory: list[object] | None = None
        # Fingerprints of the same tensors, in batches in which values are compared; writing .data goes past all else.
        self._bits: list[Tensor | None] | None = None
        self._batches = 0
        self._numbers: list[float] = []
        # Records of the last two batches; −log of the chance that settings changed as they did by accident.
        self._rows, self._evidence = (0, 0), 0.0

    def watch(self, module: nn.Module | None) -> None:
        """Watch the parameters and buffers of `module` from the next batch on; of None, none."""
        parts = () if module is None else module.modules()
        held = [vars(part)[kind] for part in parts for kind in ("_parameters", "_buffers")]
        self._held = [(tensors, name) for tensors in held for name in tensors]
        self._memory = self._bits = None

    def check_unchanged(self, *, begins: bool, rows: int) -> None:
        """A part with `rows` records comes; `begins` says that it is the first of a logical batch.

        Raises:
            NonPrivateStep: something changed since the part before.
            CoupledRecords: something holds what came from a batch.
        """
        settings = _settings(self._optimizer)
        self._refuse_private(settings)
        now = _known_settings(settings)
        if not begins and now != self._seen:
            raise NonPrivateStep(
                "optimizer's settings must not change within a logical batch, got a change between two of its parts. "
                "Step schedulers after the last part only: if loader.is_last_microbatch: scheduler.step()."
            )
        if begins:
            if self._seen is not None and now != self._seen:
                self._refuse_told()
            self._refuse_counts(now, rows)
        self._seen, self._state = now, _known_state(self._optimizer)
        memory = _memory_of(self._held)
        if self._memory is not None:
            self._refuse_copies(self._memory, memory)
        self._memory = memory
        if begins:
            self._bits = _fingerprints(self._held) if compares_values(self._batches) else None
            self._batches += 1

    def check(self) -> None:
        """Before a step: all is as it was when the part came.

        Raises:
            NonPrivateStep: something changed.
            CoupledRecords: something holds what came from a batch.
        """
        settings = _settings(self._optimizer)
        self._refuse_private(settings)
        for what, before, now in (
            ("the optimizer's settings", self._seen, _known_settings(settings)),
            ("the optimizer's state", self._state, _known_state(self._optimizer)),
            ("parameters and buffers", self._memory, _memory_of(self._held)),
        ):
            if before is not None and before != now:
                raise _changed(what)
        if self._bits is not None and any(_have_changed(self._bits, _fingerprints(self._held))):
            raise _changed("parameters and buffers")

    def check_hooks(self, gradients: Sequence[Tensor | None]) -> None:
        """After hooks that may change the private gradient: they changed no settings, and wrote nothing of a batch.

        Raises:
            NonPrivateStep: a setting changed.
            CoupledRecords: a gradient, a setting or the state holds what came from a batch.
        """
        settings = _settings(self._optimizer)
        self._refuse_private(settings)
        if any(
            isinstance(held, TracedTensor) or self._carried.was_written(held) for held in gradients if held is not None
        ):
            raise _private("gradients")
        if self._seen is not None and self._seen != _known_settings(settings):
            raise _changed("the optimizer's settings")

    def stepped(self) -> None:
        """The optimizer has taken its step: what changed by it is released."""
        self._memory = _memory_of(self._held)
        self._bits = None if self._bits is None else _fingerprints(self._held)

    def _refuse_private(self, settings: list[object]) -> None:
        """Refuse settings and state that carry a batch's notes, or lie in memory that a batch was written to."""
        states = (state for state in self._optimizer.state.values() if isinstance(state, dict))
        held = itertools.chain.from_iterable(state.values() for state in states)
        for value in itertools.chain(settings, held):
            if type(value) in _PLAIN:
                continue
            if isinstance(value, _PRIVATE) or (isinstance(value, Tensor) and self._carried.was_written(value)):
                raise _private("the optimizer's settings and state")

    def _refuse_copies(self, before: list[object], now: list[object]) -> None:
        """Refuse a parameter or buffer that the loop set to a result of a batch since the step."""
        bits = self._bits
        written = itertools.repeat(False) if bits is None else _have_changed(bits, _fingerprints(self._held))
        for (tensors, name), old, new, is_written in zip(self._held, before, now, written, strict=False):
            tensor = tensors.get(name)
            if (old != new or is_written) and tensor is not None and self._carried.is_copy(tensor):
                raise _private("parameters and buffers")

    def _refuse_told(self) -> None:
        """Refuse settings that are a number read from a batch; a device would have to be waited for."""
        for value in _settings(self._optimizer):
            single = isinstance(value, Tensor) and value.numel() == 1 and value.device.type == "cpu"
            number = value.item() if single and isinstance(value, Tensor) else value
            if isinstance(number, float) and self._carried.is_told(number):
                raise _private("the optimizer's settings")

    def _refuse_counts(self, settings: _Known, rows: int) -> None:
        """A setting that changes again and again as the number of records did was made from it (``len(batch)``).

        A Poisson batch of b records has about √(2πb) likely sizes, so a public schedule agrees with one in so many
        batches: the batches that agree in a row are counted with these odds, and refused at 1 : 1000.
        """
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
        self._evidence = self._evidence + math.log(2 * math.pi * max(older, last)) / 2 if follows else 0.0
        if self._evidence > _ACCIDENT:
            raise _private("the optimizer's settings")


_ACCIDENT = math.log(1000)


def _is_close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-9)


def _changed(what: str) -> NonPrivateStep:
    return NonPrivateStep(
        f"{what} must not change between a batch and optimizer.step, got a change: what the new values were made of "
        "can't be known, and they reach the parameters without clipping and noise. Make such changes (learning rate, "
        "schedulers, limits on weights) after optimizer.step, before the next batch is taken."
    )


def _private(what: str) -> CoupledRecords:
    return CoupledRecords(
        f"{what} must not be made of private batches, got what came from one (a loss, a mean, the number of "
        "records): it reaches the parameters without clipping and noise. Use constants, schedules fixed in advance, or "
        "what public records give."
    )


def _add_leaves(value: object, found: list[object]) -> None:
    if type(value) in _PLAIN:
        found.append(value)
    elif isinstance(value, (tuple, list)):
        for part in value:
            _add_leaves(part, found)
    else:
        found.append(value)


def _settings(optimizer: Optimizer) -> list[object]:
    """Every setting."""
    found: list[object] = []
    for group in optimizer.param_groups:
        for name, value in group.items():
            if name != "params":
                _add_leaves(value, found)
    return found


def _known(value: object) -> object:
    """A tensor by its identity and torch's count of changes, other objects than plain ones by their identity."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Tensor):
        return id(value), value._version
    return value if isinstance(value, int | float | str | None) else id(value)


def _known_settings(settings: list[object]) -> _Known:
    return [_known(value) for value in settings]


def _known_state(optimizer: Optimizer) -> _Known:
    return [
        (name, _known(value))
        for state in optimizer.state.values()
        if isinstance(state, dict)
        for name, value in state.items()
        if isinstance(value, Tensor | int | float)
    ]


def _memory_of(held: _Held) -> list[object]:
    """What each tensor is known by: the object, where it lies, and torch's count of its changes."""
    tensors = [tensors.get(name) for tensors, name in held]
    return [None if tensor is None else (id(tensor), _address(tensor), tensor._version) for tensor in tensors]


def _address(tensor: Tensor) -> int:
    try:
        return tensor.data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0  # It has no memory of its own.


def _fingerprints(held: _Held) -> list[Tensor | None]:
    tensors = [tensors.get(name) for tensors, name in held]
    return [None if tensor is None else readable_fingerprint(tensor) for tensor in tensors]


def _have_changed(before: Sequence[Tensor | None], now: Sequence[Tensor | None]) -> list[bool]:
    """For each tensor whether its bits are others than before; what can't be read, or is elsewhere now, is not."""
    return [
        old is not None and new is not None and old.device == new.device and not torch.equal(old, new)
        for old, new in zip(before, now, strict=True)
    ]
