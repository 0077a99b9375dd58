"""What a loop carries in tensors without notes: memory it wrote to, copies of results, and constants.

A tensor that did not come with a batch carries no notes. What is written into it in place (``counts[c] = …``,
``center.mul_(0.9).add_(…)``, ``queue[i] = …``) would look like a constant ever after; so would a copy that torch makes
without asking, as ``torch.tensor(x.mean(0))`` does.
"""

import math
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from sordino.errors import CoupledRecords
from sordino.training.loss_tracing.traced_tensor import TaintedFloat, TaintedInt
from sordino.training.probing.snapshots import readable_fingerprint
from sordino.training.pytree import tensors_in, tree_leaves, tree_map

__all__ = [
    "CrossBatchState",
    "ExternalTensor",
    "ExternalTensors",
    "Place",
    "Reading",
    "StaleValue",
    "TracedCall",
    "ValueRef",
    "batch_tag",
    "counts_records",
    "counts_rows",
    "declared_targets",
    "has_data_dependent_size",
    "has_equal_rows",
    "is_public",
    "is_uninformative",
    "map_values",
    "mark_public",
    "record_rows",
    "size_at",
    "storage_address",
    "tag_batch",
    "texts_in",
    "values_in",
]


# ----------------------------------------------------------------------------------------------------------------------
# Tensors that a loop brings along besides its batch: what their values show and memory.
# ----------------------------------------------------------------------------------------------------------------------


Reading = Literal["rows", "columns", "constants"]
"""How a replay reads outsiders that are as long as there are records: with a row a record; zeros and ones with the
records in another dimension; or as constants whose size fits by chance."""


@dataclass(eq=False, kw_only=True)
class ExternalTensor:
    """A tensor that did not come with the batch.

    Args:
        value: the tensor.
        place: of its first use on the tape.
        slot: on the tape, if it takes other values in a replay.
        rowed: whether it has as many rows as there are records.
        is_free: whether its rows may be those of records: all alike, or drawn by chance within the batch.
        is_stale: whether values of an earlier batch were written into it.
        column: the first dimension after the first one that is as long as there are records, where the tensor is all
            zeros or all ones, as a first hidden state (layers, records, width) is.
        fill: what it is then filled with.

    Attributes:
        first_row: what each row was before the batch was written into them, if all were alike.
    """

    value: Tensor
    place: int
    slot: int | None = None
    rowed: bool = False
    is_free: bool = True
    is_stale: bool = False
    column: int | None = None
    fill: float = 0.0
    first_row: Tensor | None = None
    # Version and fingerprint after the batch was written into it; None before.
    _written: tuple[int, Tensor | None] | None = None

    @property
    def was_written(self) -> bool:
        """Whether values of the batch were written into it."""
        return self._written is not None

    def begin_write(self) -> None:
        """Values of the batch are about to be written into it: look at what it is without them."""
        if self._written is None:
            self.is_stale = self.is_stale and bool((self.value != 0).any())
            self.first_row = self.value[:1].detach().clone() if self.rowed and has_equal_rows(self.value) else None
        elif not self._is_untouched():
            self.first_row = None

    def end_write(self) -> None:
        """They are written."""
        self._written = self.value._version, readable_fingerprint(self.value)

    def has_free_rows(self) -> bool:
        """Whether its rows are alike, or were before the batch was written into them and nothing else since."""
        if self._written is None:
            return has_equal_rows(self.value)
        return self.first_row is not None and self._is_untouched()

    def counts_records(self) -> bool:
        """Whether it holds positions of records, by itself."""
        return self._written is None and counts_records(self.value)

    def is_filled(self) -> bool:
        """Whether it is what it was filled with, or was before the batch was written into it and nothing else since."""
        if self.column is None:
            return False
        return bool((self.value == self.fill).all()) if self._written is None else self._is_untouched()

    def _is_untouched(self) -> bool:
        """Whether nobody wrote to it but calls that the tape has seen."""
        version, bits = self._written or (-1, None)
        now = None if bits is None else readable_fingerprint(self.value)
        return self.value._version == version and (bits is None or (now is not None and torch.equal(bits, now)))


class ExternalTensors:
    """The outsiders of one tape, by identity.

    Args:
        records: number of records in the batch.
        new_slot: gives out places for values on the tape.
    """

    def __init__(self, records: int, new_slot: Callable[[], int]) -> None:
        self._records, self._new_slot = records, new_slot
        self._found: dict[int, ExternalTensor] = {}

    def __iter__(self) -> Iterator[ExternalTensor]:
        return iter(self._found.values())

    def clear(self) -> None:
        """Let go of them."""
        self._found.clear()

    def get(self, value: Tensor) -> ExternalTensor | None:
        """The entry of `value`, if it was seen before."""
        return self._found.get(id(value))

    def add(self, value: Tensor, place: int, *, is_stale: bool, is_constant: bool) -> ExternalTensor:
        """A new entry; a tensor with a row a record takes a slot, unless it is known to be constant."""
        fits = value.dim() > 0 and value.size(0) == self._records
        varies = not value.requires_grad and not is_constant
        rowed = fits and varies
        column = self._column(value) if varies and not is_stale else None
        slot = self._new_slot() if rowed or column is not None else None
        found = ExternalTensor(value=value, place=place, rowed=rowed, slot=slot, is_stale=is_stale, column=column)
        if column is not None:
            found.fill = float(value.detach().flatten()[0])
        self._found[id(value)] = found
        return found

    def _column(self, value: Tensor) -> int | None:
        if value.is_complex() or not value.numel() or self._records not in value.shape[1:]:
            return None
        filled = bool((value == 0).all()) or bool((value == 1).all())
        return value.shape.index(self._records, 1) if filled else None

    def readings(self) -> list[Reading]:
        """How they may be read, the likeliest first."""
        columns = any(one.column is not None for one in self)
        both = any(one.column is not None and one.rowed for one in self)
        may_be_constant = columns or bool(self.inputs("rows"))
        return ["rows", *(["columns"] if both else []), *(["constants"] if may_be_constant else [])]

    def inputs(self, reading: Reading) -> list[ExternalTensor]:
        """Those that count as inputs of a replay: positions of records are made anew instead."""
        chosen = [one for one in self if one.rowed and one.is_free and reading != "constants"]
        chosen = [one for one in chosen if one.column is None or reading != "columns"]
        return [one for one in chosen if one.first_row is None and not one.counts_records()]

    def late(self, place: int) -> list[ExternalTensor]:
        """Those that were first used after `place`."""
        return [one for one in self if one.place > place]

    @staticmethod
    def start_of(found: ExternalTensor, records: int, reading: Reading) -> Tensor:
        """What stands for one with a slot, but no input, at the start of a replay of `records` records."""
        value, is_constant = found.value.detach(), reading == "constants"
        if found.column is not None and (not found.rowed or reading == "columns"):
            if not found.is_filled():
                return value.clone() if found.rowed or not found.was_written else torch.ones_like(value)
            shape = list(value.shape)
            shape[found.column] = shape[found.column] if is_constant else records
            return value.new_full(shape, found.fill)
        if not found.rowed:
            # It is written to later on; what it holds by now was written by the real batch.
            return torch.ones_like(value)
        if found.first_row is not None and found.is_free:
            rows = len(value) if is_constant else records
            return found.first_row.expand(rows, *value.shape[1:]).clone()
        if is_constant or not (found.is_free or found.counts_records()):
            return value.clone()
        return torch.arange(records, device=value.device, dtype=value.dtype)


def has_equal_rows(value: Tensor) -> bool:
    """Whether all its rows are the same."""
    rows = value.detach()
    return bool(((rows == rows[:1]) | ((rows != rows) & (rows[:1] != rows[:1]))).all())


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


def _check_not_part_of(module: nn.Module, place: int) -> None:
    held = [*module.named_parameters(), *module.named_buffers()]
    names = sorted(name for name, tensor in held if place and storage_address(tensor) == place)
    if names:
        raise CoupledRecords(
            f"{', '.join(names)} must not be written to by the loop, got values of the batch: what a module stores "
            "of records is released without noise. Use a public constant, or compute it on public records."
        )


# ----------------------------------------------------------------------------------------------------------------------
# Where a tensor comes from: the batch that the loader gave last, an earlier one, or elsewhere.
#
# A batch's own tensors carry a mark, so that a tensor of an earlier batch is known. What torch makes of them is on the
# batch's tape.
# ----------------------------------------------------------------------------------------------------------------------


Place = tuple[int, int]
"""(step, chunk) of the batch that a tensor belongs to."""

_TAG = "_sordino_chunk"
_PUBLIC = "_sordino_public"


def tag_batch(batch: object, place: Place) -> None:
    """Mark the batch's own tensors with their place."""
    for tensor in tensors_in(batch):
        setattr(tensor, _TAG, place)


def batch_tag(tensor: Tensor) -> Place | None:
    """The place of the batch that `tensor` is known to belong to, None when nothing is known."""
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
# Calls of torch as they stand on a tape: what was called, on which values, with which results.
# ----------------------------------------------------------------------------------------------------------------------


class ValueRef:
    """A value's place on the tape. Not a dataclass: those are containers to `tree_map`."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


class StaleValue:
    """A value that belongs to an earlier batch."""

    __slots__ = ()


@dataclass(frozen=True, kw_only=True)
class TracedCall:
    """One noted call.

    Args:
        function: what was called.
        args: positional arguments, with slots for values of the tape.
        kwargs: arguments by name.
        results: the slot of each tensor in the result, in order, or that of the number.
        place: how many calls and reads came before.
        grad_enabled: whether gradients were on.
        autocast: device type and type of autocast, if it was on.
        writes: the memory that was changed in place, or None.
        is_number: whether the result is a number.
        is_broken: whether an argument took part in autograd by something that is not on the tape.
    """

    function: Callable[..., object]
    args: object
    kwargs: object
    results: tuple[int, ...]
    place: int
    grad_enabled: bool
    autocast: tuple[str, torch.dtype] | None
    writes: int | None = None
    is_number: bool = False
    is_broken: bool = False

    def run(self, value_of: Callable[[object], object]) -> object:
        """Call again with the values of a replay."""
        args = map_values(value_of, self.args)
        kwargs = map_values(value_of, self.kwargs)
        assert isinstance(args, tuple)
        assert isinstance(kwargs, dict)
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.grad_enabled))
            if self.autocast is not None:
                stack.enter_context(torch.autocast(self.autocast[0], dtype=self.autocast[1]))
            return self.function(*args, **kwargs)

    def inputs(self) -> Iterator[object]:
        """Every argument that is not a container."""
        yield from values_in(self.args)
        yield from values_in(self.kwargs)

    def numbers(self) -> list[float]:
        """The constants among the arguments."""
        return [float(leaf) for leaf in self.inputs() if isinstance(leaf, float | int) and not isinstance(leaf, bool)]

    def form(self, names: Mapping[int, int]) -> Hashable:
        """What is called on what, with `names` for slots and without the values of constants."""
        function = self.function
        owner = getattr(getattr(function, "__self__", None), "__name__", "")
        who = (
            id(function) if isinstance(function, nn.Module) else getattr(function, "__name__", repr(type(function))),
            owner,
        )
        return (who, self.grad_enabled, self.autocast, *(_form(leaf, names) for leaf in self.inputs()))


def _form(leaf: object, names: Mapping[int, int]) -> Hashable:
    if isinstance(leaf, ValueRef):
        return ("slot", names.get(leaf.number))
    if isinstance(leaf, Tensor):
        return ("tensor", leaf.dtype, leaf.requires_grad)
    if isinstance(leaf, str | bool | torch.dtype | torch.device | type(None)):
        return leaf
    return type(leaf).__name__


def map_values(function: Callable[[object], object], arguments: object) -> object:
    """`tree_map`, which also looks into slices."""

    def mapped(leaf: object) -> object:
        if isinstance(leaf, slice):
            return slice(function(leaf.start), function(leaf.stop), function(leaf.step))
        return function(leaf)

    return tree_map(mapped, arguments)


def values_in(arguments: object) -> Iterator[object]:
    """`tree_leaves`, which also looks into slices."""
    for leaf in tree_leaves(arguments):
        if isinstance(leaf, slice):
            yield from (leaf.start, leaf.stop, leaf.step)
        else:
            yield leaf


def declared_targets(
    function: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]
) -> list[Tensor]:
    """The tensors that a function of torch changes: its first one, or those of ``out=``."""
    name = getattr(function, "__name__", "")
    in_place = name.startswith("__i") or name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    first = list(tensors_in((args, dict(kwargs))))[:1] if in_place else []
    return [*first, *tensors_in(kwargs.get("out"))]


# ----------------------------------------------------------------------------------------------------------------------
# Sizes that depend on records: on their number, or on values, as those of ``x[y == 1]``.
# ----------------------------------------------------------------------------------------------------------------------


_BY_VALUES = frozenset(
    {"nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount", "repeat_interleave"}
    | {"_unique2", "unique_dim", "_return_output", "_return_inverse", "_return_counts", "_return_inverse_false"}
)
_MASKS = (torch.bool, torch.uint8)


def has_data_dependent_size(
    function: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]
) -> bool:
    """Whether the shape of what a function of torch returns may depend on more than shapes."""
    name = getattr(function, "__name__", "")
    if name in _BY_VALUES or (name == "where" and len(args) + len(kwargs) == 1):
        return True
    if any(getattr(tensor, "sized_by_values", False) for tensor in tensors_in((args, dict(kwargs)))):
        return True
    if name == "__getitem__" and any(tensor.dtype in _MASKS for tensor in tensors_in(args[1:])):
        return True
    return any(isinstance(leaf, TaintedFloat | TaintedInt) and not leaf.counts for leaf in _numbers(args, kwargs))


def _numbers(args: tuple[object, ...], kwargs: Mapping[str, object]) -> Iterator[object]:
    for leaf in tree_leaves((args, dict(kwargs))):
        if isinstance(leaf, slice):
            yield from (leaf.start, leaf.stop, leaf.step)
        elif isinstance(leaf, TaintedInt):
            yield leaf


def counts_rows(tensor: Tensor, records: int) -> bool:
    """Whether records have a part in the sizes of `tensor`."""
    return tensor.dim() > 0 and (tensor.size(0) == records or getattr(tensor, "sized_by_values", False))


def record_rows(tensor: Tensor) -> int:
    """The first size."""
    return tensor.size(0)


def size_at(tensor: Tensor, place: int) -> int:
    """The size of one dimension."""
    return tensor.size(place)
