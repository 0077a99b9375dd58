"""What the user's loop does between a batch and ``loss.backward()``: written down, and replayed on synthetic records.

Every batch is handed out as tensors that note each function of torch applied to them (`TracedTensor`). The notes
(`OperationTrace`, a list of `TracedCall`) say how the loss was made of the batch and of tensors from outside it
(`ExternalTensors`). Whenever the loop makes a loss in a way that it did not before, the notes are run again on
synthetic records, and the independence probe tells whether records are coupled. What a replay can't tell about (values
of other batches, bare numbers, parts that torch does not show) is refused by `OperationTrace.look`.
"""

import inspect
import site
import sysconfig
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal, NamedTuple, TypeGuard, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sordino.errors import CoupledRecords, NonPrivateStep
from sordino.gradients.numerics import is_autocast
from sordino.training.loss_tracing.carried import (
    CrossBatchState,
    counts_records,
    is_public,
    is_uninformative,
    storage_address,
)
from sordino.training.loss_tracing.traced_tensor import (
    TaintedFloat,
    TaintedInt,
    TracedTensor,
    not_noting,
    tainted,
    untainted,
    without_trace,
)
from sordino.training.optimizer_checks import is_private_parameter
from sordino.training.probing.probe_runner import graph_leaves
from sordino.training.probing.snapshots import readable_fingerprint
from sordino.training.probing.torch_modes import Args, Function, with_public_divisor
from sordino.training.pytree import map_tensors, tensors_in, tree_leaves, tree_map

# ----------------------------------------------------------------------------------------------------------------------
# Whose code is asking for the truth of a private value.
# ----------------------------------------------------------------------------------------------------------------------


# Code of libraries may check what it is given (a distribution its parameters); the loop's own may not branch.
_LIBRARIES = (
    *site.getsitepackages(),
    sysconfig.get_paths()["stdlib"],
    str(Path(torch.__file__).parent),
    str(Path(__file__).parent.parent),
)
# Frames through which every call of a traced tensor or number goes.
_BETWEEN = (str(Path(__file__).parent), str(Path(torch.__file__).parent / "_tensor.py"))
_SCHEDULERS = str(Path(torch.__file__).parent / "optim" / "lr_scheduler.py")


def _asking() -> FrameType | None:
    """The code that asks for a private value: the first frame that is not one of those every such call goes through."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(_BETWEEN):
        frame = frame.f_back
    return frame


def _check_no_branching() -> None:
    """Refuse a branch on values of the batch in the user's own code.

    Raises:
        NonPrivateStep: the caller is not a library's code.
    """
    frame = _asking()
    if frame is None or frame.f_code.co_filename.startswith(_LIBRARIES):
        return
    raise NonPrivateStep(
        "between the loader's batch and optimizer.step the loop must not decide by private values (if, while or assert "
        "on a tensor of the batch or a number read from it), got such a decision: it would let one record change what "
        "all others do. A record whose loss is not finite counts for nothing, so no check is needed; make other "
        "checks in the dataset, or after the step."
    )


def _check_no_metric_scheduler() -> None:
    """Refuse a learning-rate scheduler that reads a number of the batches that its optimizer trains on privately.

    Raises:
        NonPrivateStep: the caller is such a scheduler.
    """
    frame = _asking()
    if frame is None or frame.f_code.co_filename != _SCHEDULERS:
        return
    optimizer = getattr(frame.f_locals.get("self"), "optimizer", None)
    held = [p for group in optimizer.param_groups for p in group["params"]] if isinstance(optimizer, Optimizer) else []
    if is_private_parameter(held):
        raise NonPrivateStep(
            "scheduler must not depend on losses of private batches (ReduceLROnPlateau), got a number read from one: "
            "the learning rate would tell of records without noise. Fix the schedule in advance, or step it on public "
            "validation data."
        )


# ----------------------------------------------------------------------------------------------------------------------
# Calls of torch as they stand on a trace: what was called, on which values, with which results.
# ----------------------------------------------------------------------------------------------------------------------


class ValueRef:
    """A value's number on the trace. Not a dataclass: those are containers to `tree_map`."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


class StaleValue:
    """A value that belongs to an earlier batch."""

    __slots__ = ()


class _Arguments(NamedTuple):
    """Arguments of a call, with slots for values of the trace.

    `leaves` are all that are not containers, also those in slices; `is_sized` says that a number read from values is
    among them.
    """

    args: object
    kwargs: object
    leaves: list[object]
    is_sized: bool


@dataclass(frozen=True, kw_only=True)
class TracedCall:
    """One noted call.

    Args:
        function: what was called.
        given: on which arguments.
        results: the slot of each tensor in the result, in order, or that of the number.
        index: how many calls and reads came before.
        grad_enabled: whether gradients were on.
        autocast: device type and type of autocast, if it was on.
        writes: the memory that was changed in place, or None.
        is_number: whether the result is a number.
        is_broken: whether an argument took part in autograd by something that is not on the trace.
    """

    function: Function
    given: _Arguments
    results: Sequence[int]
    index: int
    grad_enabled: bool = False
    autocast: tuple[str, torch.dtype] | None = None
    writes: int | None = None
    is_number: bool = False
    is_broken: bool = False

    @property
    def leaves(self) -> list[object]:
        """Every argument that is not a container."""
        return self.given.leaves

    def run(self, value_of: Callable[[object], object]) -> object:
        """Call again with the values of a replay."""
        args, kwargs = map_values(value_of, self.given.args), map_values(value_of, self.given.kwargs)
        assert isinstance(args, tuple)
        assert isinstance(kwargs, dict)
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.grad_enabled))
            if self.autocast is not None:
                stack.enter_context(torch.autocast(self.autocast[0], dtype=self.autocast[1]))
            return self.function(*args, **kwargs)

    def numbers(self) -> list[float]:
        """The constants among the arguments."""
        return [float(leaf) for leaf in self.leaves if isinstance(leaf, (float, int)) and not isinstance(leaf, bool)]

    def form(self, names: Mapping[int, int]) -> Hashable:
        """What is called on what, with `names` for slots and without the values of constants."""
        function = self.function
        owner = getattr(getattr(function, "__self__", None), "__name__", "")
        who = (
            id(function) if isinstance(function, nn.Module) else getattr(function, "__name__", repr(type(function))),
            owner,
        )
        return (who, self.grad_enabled, self.autocast, *(_form(leaf, names) for leaf in self.leaves))


_PART_OF_FORM = (str, bool, torch.dtype, torch.device, type(None))


def _form(leaf: object, names: Mapping[int, int]) -> Hashable:
    if isinstance(leaf, ValueRef):
        return ("slot", names.get(leaf.number))
    if isinstance(leaf, Tensor):
        return ("tensor", leaf.dtype, leaf.requires_grad)
    return leaf if isinstance(leaf, _PART_OF_FORM) else type(leaf).__name__


def map_values(function: Callable[[object], object], arguments: object) -> object:
    """`tree_map`, which also looks into slices."""

    def mapped(leaf: object) -> object:
        if isinstance(leaf, slice):
            return slice(function(leaf.start), function(leaf.stop), function(leaf.step))
        return function(leaf)

    return tree_map(mapped, arguments)


def declared_targets(function: Function, tensors: Sequence[Tensor], out: object) -> list[Tensor]:
    """The tensors that a function of torch changes: the first of its `tensors`, or those of ``out=``."""
    name = getattr(function, "__name__", "")
    in_place = name.startswith("__i") or name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    return [*(tensors[:1] if in_place else ()), *(() if out is None else tensors_in(out))]


# ----------------------------------------------------------------------------------------------------------------------
# Sizes that depend on records: on their number, or on values, as those of ``x[y == 1]``.
# ----------------------------------------------------------------------------------------------------------------------


_BY_VALUES = frozenset(
    {"nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount", "repeat_interleave"}
    | {"_unique2", "unique_dim", "_return_output", "_return_inverse", "_return_counts", "_return_inverse_false"}
)
_MASKS = (torch.bool, torch.uint8)


def has_data_dependent_size(function: Function, tensors: Sequence[Tensor], arguments: int) -> bool:
    """Whether the shape of what a function of torch makes of so many arguments may depend on more than shapes."""
    name = getattr(function, "__name__", "")
    if name in _BY_VALUES or (name == "where" and arguments == 1):
        return True
    if any(getattr(tensor, "sized_by_values", False) for tensor in tensors):
        return True
    return name == "__getitem__" and any(tensor.dtype in _MASKS for tensor in tensors[1:])


def counts_rows(tensor: Tensor, records: int) -> bool:
    """Whether records have a part in the sizes of `tensor`."""
    return tensor.dim() > 0 and (tensor.size(0) == records or getattr(tensor, "sized_by_values", False))


def record_rows(tensor: Tensor) -> int:
    """The first size."""
    return tensor.size(0)


def size_at(tensor: Tensor, dim: int) -> int:
    """The size of one dimension."""
    return tensor.size(dim)


# ----------------------------------------------------------------------------------------------------------------------
# Tensors that a loop brings along besides its batch: what their values show and memory.
# ----------------------------------------------------------------------------------------------------------------------


Reading = Literal["rows", "columns", "constants"]
"""How a replay reads external tensors that are as long as there are records: with a row a record; zeros and ones with
the records in another dimension; or as constants whose size fits by chance."""


@dataclass(eq=False, kw_only=True)
class ExternalTensor:
    """A tensor that did not come with the batch.

    Args:
        value: the tensor.
        index: of its first use on the trace.
        slot: on the trace, if it takes other values in a replay.
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
    index: int
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

    def stand_in(self, records: int, reading: "Reading") -> Tensor:
        """What stands for it, where it has a slot but is no input, at the start of a replay of `records` records."""
        value, is_constant = self.value.detach(), reading == "constants"
        if self.column is not None and (not self.rowed or reading == "columns"):
            if not self.is_filled():
                return value.clone() if self.rowed or not self.was_written else torch.ones_like(value)
            shape = list(value.shape)
            shape[self.column] = shape[self.column] if is_constant else records
            return value.new_full(shape, self.fill)
        if not self.rowed:
            # It is written to later on; what it holds by now was written by the real batch.
            return torch.ones_like(value)
        if self.first_row is not None and self.is_free:
            rows = len(value) if is_constant else records
            return self.first_row.expand(rows, *value.shape[1:]).clone()
        if is_constant or not (self.is_free or self.counts_records()):
            return value.clone()
        return torch.arange(records, device=value.device, dtype=value.dtype)

    def _is_untouched(self) -> bool:
        """Whether it was only written to by calls that the trace has seen."""
        version, bits = self._written or (-1, None)
        now = None if bits is None else readable_fingerprint(self.value)
        return self.value._version == version and (bits is None or (now is not None and torch.equal(bits, now)))


def has_equal_rows(value: Tensor) -> bool:
    """Whether all its rows are the same."""
    rows = value.detach()
    return bool(((rows == rows[:1]) | ((rows != rows) & (rows[:1] != rows[:1]))).all())


# ----------------------------------------------------------------------------------------------------------------------
# The trace of one microbatch.
# ----------------------------------------------------------------------------------------------------------------------


HOW_TO_DECLARE = "Pass the loss to make_private as criterion=, a function of (output, target)"
# Their results have values that no record has a part in.
_SHAPES_ONLY = frozenset(
    f"{name}{kind}" for name in ("ones", "zeros", "empty", "full", "rand", "randn", "randint") for kind in ("_like",)
) | {"new_ones", "new_zeros", "new_empty", "new_full"}
# Tensors of more entries are compared by sums.
_FEW = 64
# How the bare values of a tensor are read: into Python numbers, into truth, into other memory.
_NUMBERS = frozenset({"__float__", "__int__", "__index__", "__complex__"})
_TRUTHS = frozenset({"__bool__", "is_nonzero", "equal", "allclose", "__contains__"})
# Arguments of exactly these types are recorded as they are.
_WITHOUT_NOTES = frozenset({bool, int, float, str, type(None)})
_ESCAPES = frozenset({"numpy", "__array__", "tolist", "data_ptr", "untyped_storage", "storage", "__dlpack__"})


@dataclass(frozen=True, kw_only=True)
class LookedAt:
    """How a loss was made.

    Args:
        form: the calls that lead to it, without the values of constants.
        rows: what its tensors from outside are, as far as a check is one for the same only.
        late: constants that may have been made from bare values of the batch.
        numbers: all constants, those in tensors of one number among them.
    """

    form: Hashable
    rows: Hashable
    late: tuple[float, ...]
    numbers: tuple[float, ...]


class OperationTrace:
    """Notes of one microbatch.

    Args:
        records: number of records in it.
        on_backward: called with the trace and the loss's slot on it before the backward pass runs.
        carried: what the loop carries from batch to batch.

    Attributes:
        is_open: whether calls are noted.
        is_passing: whether a backward pass is running from losses that `on_backward` has seen.
        is_weighted: whether one is running from several numbers, weighted by the loop.
        is_by_record: whether the loss at hand holds one loss per record.
        outside: how tensors that did not come with the batch are read; by default one with a row a record counts as an
            input.
        may_leave: whether tensors without notes that hold values of records are within the loop's reach.
        loss: the tensor whose backward pass is running or about to.
        passes: runs the backward passes that a loss takes, given one that is called with whether its graph must be
            kept; None for a single one.
    """

    loss: Tensor | None = None
    passes: Callable[[Callable[[bool], object]], object] | None = None
    may_leave = False

    def __init__(
        self, records: int, on_backward: Callable[["OperationTrace", int], None], carried: CrossBatchState | None = None
    ) -> None:
        self.records = records
        self.is_open = True
        self.is_passing = self.is_weighted = self.is_by_record = False
        self.outside: Reading = "rows"
        self._carried = CrossBatchState() if carried is None else carried
        self._on_backward = on_backward
        self._calls: list[TracedCall] = []
        self._slots = self._index = 0
        self._inputs: list[int] = []
        # Tensors that did not come with the batch, by identity.
        self._external: dict[int, ExternalTensor] = {}
        # By slot: the node of autograd that made the value, and the memory it lies in.
        self._nodes: dict[int, object] = {}
        self._memory: dict[int, int] = {}
        self._read: list[tuple[int, float]] = []
        # Where values first left for other libraries, and where a number was first read.
        self._escaped: int | None = None
        self._disclosed: int | None = None

    def _next_index(self) -> int:
        self._index += 1
        return self._index

    def _new_slot(self) -> int:
        self._slots += 1
        return self._slots - 1

    def inputs(self, batch: object, *, padded: Collection[int] = ()) -> object:
        """The batch as traced tensors; its tensors are the first inputs of a replay.

        Args:
            batch: as the loader gave it.
            padded: the indices of tensors whose shape follows the longest record.
        """
        with not_noting():
            traced = map_tensors(self.wrap, batch)
            for index, tensor in enumerate(tensors_in(traced)):
                if isinstance(tensor, TracedTensor):
                    tensor.sized_by_values = index in padded
        self._inputs = [slot for tensor in tensors_in(traced) if (slot := self._slot_of(tensor)) is not None]
        return traced

    def close(self) -> None:
        """Note nothing more, and let go of what was noted."""
        self.is_open = False
        self._calls.clear()
        self._external.clear()
        self.loss = None
        self._nodes.clear()

    def is_whole(self, batch: object) -> bool:
        """Whether `batch` has the tensors that the loader gave, in their order, and nothing was done with them."""
        leaves = list(tree_leaves(batch))
        given = [leaf.slot for leaf in leaves if isinstance(leaf, TracedTensor) and leaf.operation_trace is self]
        unused = not self._calls and self._escaped is None and self._slots == len(self._inputs)
        return unused and len(leaves) == len(given) and given == self._inputs

    # --- calls of torch ------------------------------------------------------------------------------------------

    def call(self, function: Function, args: Args, kwargs: Mapping[str, object], tensors: Sequence[Tensor]) -> object:
        """Call a function of torch, note the call, and return its result as traced tensors.

        Args:
            function: what is called.
            args: positional arguments.
            kwargs: arguments by name.
            tensors: all tensors among the arguments, in order.
        """
        with not_noting():
            targets = declared_targets(function, tensors, kwargs.get("out"))
            if self.is_open:
                for target in self._outside_targets(targets, tensors):
                    self._external_tensor(target).begin_write()
            return self._note(function, args, kwargs, with_public_divisor(function, args, kwargs), tensors, targets)

    def note(self, function: Function, args: Args, kwargs: Mapping[str, object], result: object) -> object:
        """Note a call that was made already, as of the module, and return its result as traced tensors."""
        with not_noting():
            tensors = list(tensors_in((args, kwargs)))
            targets = declared_targets(function, tensors, kwargs.get("out"))
            return self._note(function, args, kwargs, result, tensors, targets)

    def _note(
        self,
        function: Function,
        args: Args,
        kwargs: Mapping[str, object],
        result: object,
        tensors: Sequence[Tensor],
        targets: Sequence[Tensor],
    ) -> object:
        if result is not None and next(tensors_in(result), None) is None:
            return self._note_value(function, args, kwargs, result)
        for target in self._outside_targets(targets, tensors):
            self._write_to(target)
        if not self.is_open:
            traced = map_tensors(self.wrap, result)
            self._remember(tensors_in(traced))
            return traced
        name = getattr(function, "__name__", "")
        device = tensors[0].device.type if tensors else "cpu"
        given = self._noted_all(self._with_rows_counted(function, args), kwargs)
        broken = any(self._is_broken(tensor) for tensor in tensors if all(tensor is not target for target in targets))
        traced = map_tensors(self.wrap, result)
        made = [tensor for tensor in tensors_in(traced) if isinstance(tensor, TracedTensor)]
        self._remember(made)
        sized = given.is_sized or has_data_dependent_size(function, tensors, len(args) + len(kwargs))
        for tensor in made:
            tensor.keeps_values = tensor.keeps_values and name not in _SHAPES_ONLY
            tensor.sized_by_values = tensor.sized_by_values or sized
        # An argument that was changed in place has another node now.
        for tensor in [*made, *(tensors if targets else ())]:
            slot = self._slot_of(tensor)
            if slot is not None:
                self._nodes[slot] = tensor.grad_fn
        self._calls.append(
            TracedCall(
                function=function,
                given=given,
                results=[slot for tensor in made if (slot := self._slot_of(tensor)) is not None],
                index=self._next_index(),
                grad_enabled=torch.is_grad_enabled(),
                autocast=(device, torch.get_autocast_dtype(device)) if is_autocast(device) else None,
                writes=storage_address(targets[0]) if targets else None,
                is_broken=broken,
            )
        )
        return traced

    @staticmethod
    def _outside_targets(targets: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
        """Tensors from outside into which a call on `tensors` that changes `targets` writes values of the batch."""
        tells = targets and any(one.keeps_values for one in tensors if isinstance(one, TracedTensor))
        return [one for one in targets if not isinstance(one, TracedTensor)] if tells else []

    def _write_to(self, target: Tensor) -> None:
        """A tensor from outside was changed in place, and holds values of the batch."""
        if self.is_open:
            found = self._external_tensor(target)
            found.slot = self._new_slot() if found.slot is None else found.slot
            self._memory[found.slot] = storage_address(target)
            found.end_write()
        self._carried.write(target)

    def note_arguments(self, args: Args, kwargs: Mapping[str, object]) -> int:
        """Note what a module is called on, and return its slot: a replay gives (args, kwargs) there."""
        with not_noting():
            slot, given = self._new_slot(), self._noted_all(args, kwargs)
            call = TracedCall(
                function=_both,
                given=given,
                results=[slot],
                index=self._next_index(),
                grad_enabled=torch.is_grad_enabled(),
                is_number=True,
                is_broken=any(self._is_broken(tensor) for tensor in tensors_in((args, kwargs))),
            )
            self._calls.append(call)
        return slot

    def _note_computation(self, function: Function, args: Args) -> int:
        """Note a computation whose result is a number, or no tensor, and return its slot."""
        slot, given = self._new_slot(), self._noted_all(args, {})
        self._calls.append(
            TracedCall(function=function, given=given, results=[slot], index=self._next_index(), is_number=True)
        )
        return slot

    def _with_rows_counted(self, function: Function, args: Args) -> Args:
        """Arguments of an indexing in which plain numbers 0, 1, … up to the last of a dimension are noted as all of it.

        ``scores[range(len(scores)), labels]`` holds as many numbers as there are rows, without notes.
        """
        if getattr(function, "__name__", "") not in {"__getitem__", "__setitem__"} or not isinstance(args[0], Tensor):
            return args
        tensor, index = args[0], args[1]
        parts = list(index) if isinstance(index, tuple) else [index]
        for dim, part in enumerate(parts):
            if part is None or part is Ellipsis or _is_mask(part) or dim >= tensor.dim():
                break
            if _is_all_of(part, tensor.size(dim)):
                parts[dim] = ValueRef(self._note_computation(_all_of, (tensor, dim)))
        return (tensor, tuple(parts) if isinstance(index, tuple) else parts[0], *args[2:])

    def _remember(self, results: Iterable[Tensor]) -> None:
        for tensor in results:
            if isinstance(tensor, TracedTensor) and not (tensor.dim() and tensor.size(0) == self.records):
                self._carried.remember(without_trace(tensor))

    def leave(self, tensors: Sequence[Tensor]) -> None:
        """Tensors that the module made in its forward may be within the loop's reach, in its attributes or by hooks."""
        self.may_leave = True
        for tensor in tensors:
            self._carried.remember(tensor)

    def wrap(self, tensor: Tensor) -> Tensor:
        """A tensor made of the batch, with notes."""
        if isinstance(tensor, TracedTensor) and tensor.operation_trace is self:
            return tensor
        traced = without_trace(tensor).as_subclass(TracedTensor)
        traced.operation_trace, traced.slot, traced.keeps_values, traced.sized_by_values = (
            self,
            self._new_slot(),
            True,
            False,
        )
        self._memory[traced.slot] = storage_address(tensor)
        self._nodes[traced.slot] = tensor.grad_fn
        return traced

    def _slot_of(self, value: object) -> int | None:
        if isinstance(value, TracedTensor):
            return value.slot if value.operation_trace is self else None
        found = self._external.get(id(value))
        return None if found is None else found.slot

    def _external_tensor(self, value: Tensor) -> ExternalTensor:
        """What is known of a tensor from outside; with a row a record it has a slot, unless it is a known constant."""
        found = self._external.get(id(value))
        if found is not None:
            return found
        is_stale, varies = self._carried.was_written(value), not value.requires_grad
        varies = varies and not self._carried.is_constant(value)
        rowed = varies and value.dim() > 0 and value.size(0) == self.records
        found = ExternalTensor(value=value, index=self._next_index(), rowed=rowed, is_stale=is_stale)
        if varies and not is_stale and self._is_filled(value):
            found.column, found.fill = value.shape.index(self.records, 1), float(value.detach().flatten()[0])
        if rowed or found.column is not None:
            found.slot = self._new_slot()
            self._memory[found.slot] = storage_address(value)
        self._external[id(value)] = found
        return found

    def _is_filled(self, value: Tensor) -> bool:
        """Whether it is all zeros or all ones, with the records in another dimension than the first."""
        if value.is_complex() or not value.numel() or self.records not in value.shape[1:]:
            return False
        return bool((value == 0).all()) or bool((value == 1).all())

    def _is_broken(self, tensor: Tensor) -> bool:
        """Whether autograd knows of something that happened to the tensor and the trace doesn't."""
        slot = self._slot_of(tensor)
        if not tensor.requires_grad:
            return False
        return tensor.grad_fn is not (None if slot is None else self._nodes.get(slot))

    def _noted_all(self, args: object, kwargs: Mapping[str, object]) -> _Arguments:
        """How the arguments of a call stand on the trace."""
        leaves: list[object] = []
        sized: list[bool] = []

        def noted(leaf: object) -> object:
            if type(leaf) not in _WITHOUT_NOTES:
                if isinstance(leaf, TaintedInt):
                    sized.append(not leaf.counts)
                leaf = self._noted(leaf)
            leaves.append(leaf)
            return leaf

        return _Arguments(map_values(noted, args), map_values(noted, kwargs) if kwargs else {}, leaves, any(sized))

    def _noted(self, value: object) -> object:
        if isinstance(value, TracedTensor) and value.operation_trace is self:
            return ValueRef(value.slot)
        if isinstance(value, (TaintedFloat, TaintedInt)):
            if value.source is not self:
                return StaleValue()
            return untainted(value) if value.slot is None else ValueRef(value.slot)
        if not isinstance(value, Tensor):
            return value
        if isinstance(value, TracedTensor):
            if value.keeps_values:
                return StaleValue()
            value = without_trace(value)
        found = self._external_tensor(value)
        if found.is_stale:
            return StaleValue()
        return value if found.slot is None else ValueRef(found.slot)

    # --- numbers, truth, and values that leave torch ----------------------------------------------------------------

    def _note_value(self, function: Function, args: Args, kwargs: Mapping[str, object], result: object) -> object:
        name = getattr(function, "__name__", "")
        owner = getattr(getattr(function, "__self__", None), "__name__", "")
        counted = name in {"size", "numel", "nelement"} or owner == "shape"
        first = args[0] if args else None
        if counted and isinstance(first, Tensor):
            return self._note_size(first, args[1:], kwargs, result, name)
        if name == "__len__" and getattr(first, "sized_by_values", False):
            # len() gives a bare number.
            self._escape()
            self.read(float(len(without_trace(first))))  # pyright: ignore[reportArgumentType]
        elif name in _TRUTHS or (name == "item" and isinstance(result, bool)):
            self.decide(counts=False)
        elif name in _NUMBERS and isinstance(result, float | int):
            self.read(result)
        elif name in _ESCAPES:
            self._escape()
        elif name == "item":
            self._disclose()
            return self.note_number(function, args, result)
        return result

    def _escape(self) -> None:
        self._escaped = self._next_index() if self._escaped is None else self._escaped

    def _disclose(self) -> None:
        self._disclosed = self._next_index() if self._disclosed is None else self._disclosed

    def _note_size(
        self, tensor: Tensor, given: Args, kwargs: Mapping[str, object], result: object, name: str
    ) -> object:
        """Sizes in which the records have a part, by their number or by values: they take other values in a replay."""
        if not counts_rows(tensor, self.records):
            return result
        varies = getattr(tensor, "sized_by_values", False)
        if isinstance(result, torch.Size):
            dims = range(len(result) if varies else 1)
            noted = [self.note_number(size_at, (tensor, dim), result[dim], counts=not varies) for dim in dims]
            return torch.Size((*noted, *result[len(noted) :]))  # pyright: ignore[reportArgumentType]
        if name == "size":
            dim = given[0] if given else kwargs.get("dim")
            if varies:
                return self.note_number(size_at, (tensor, dim), result)
            is_first = dim in {0, -tensor.dim()}
            return self.note_number(record_rows, (tensor,), result, counts=True) if is_first else result
        return self.note_number(Tensor.numel, (tensor,), result, counts=not varies)

    def note_number(self, function: Function, args: Args, result: object, *, counts: bool = False) -> object:
        """Note a computation whose result is a number."""
        if isinstance(result, float):
            self._carried.tell(float.__pos__(result))
        if not self.is_open:
            return result if counts else tainted(result, self, None)
        with not_noting():
            slot = self._note_computation(function, args)
        return tainted(result, self, slot, counts=counts)

    def decide(self, *, counts: bool) -> None:
        """A comparison is being made: refused in the loop's own code, unless it is about sizes."""
        if self.is_open and not counts:
            _check_no_branching()

    def read(self, value: float) -> None:
        """The bare number is being read."""
        _check_no_metric_scheduler()
        self._disclose()
        # Small whole numbers are on every line of code and would be taken for numbers read from the batch.
        if self.is_open and value not in {-1.0, 0.0, 1.0, 2.0}:
            self._read.append((self._next_index(), float(value)))

    def backward(
        self,
        losses: Sequence[TracedTensor],
        run: Callable[[bool], object],
        *,
        is_weighted: bool = False,
        by_record: bool = False,
    ) -> object:
        """Let the owner of the trace look at the losses, then run the backward pass, or both where it takes two.

        Args:
            losses: each a sum or mean over the records; `by_record` says that each holds one loss per record.
            run: the backward pass.
            is_weighted: whether it starts from several numbers, weighted by the loop.
            by_record: whether `run` takes the sum or mean over the records.
        """
        self.is_weighted, self.is_by_record = is_weighted, by_record
        try:
            for loss in losses:
                with not_noting():
                    is_broken = not is_weighted and self._is_broken(loss)
                if is_broken:
                    raise untraceable_loss_error()
                self.loss = loss
                self._on_backward(self, loss.slot)
            self.is_passing = not is_weighted
            return run(False) if self.passes is None or is_weighted else self.passes(run)
        finally:
            self.is_passing = self.is_weighted = self.is_by_record = False

    # --- looking -------------------------------------------------------------------------------------------------

    def look(self, value: int, *, by_chance: Callable[[], bool]) -> LookedAt:
        """How the value of a slot was made, once for each backward pass: everything that a check of it holds for.

        Args:
            value: the slot of a loss, or of arguments of the module.
            by_chance: whether random numbers were drawn for the batch outside the module.

        Raises:
            CoupledRecords: the value depends on an earlier batch, or on values read from the batch.
            NonPrivateStep: a part of it can't be followed.
        """
        calls = self._needed_for([value])
        self._check(calls)
        rows = self._rows_from_outside(calls, by_chance)
        names: dict[int, int] = {slot: -index - 1 for index, slot in enumerate(self._inputs)}
        for call in calls:
            for slot in call.results:
                names.setdefault(slot, len(names))
        late = [call for call in calls if self._escaped is not None and call.index > self._escaped]
        bare = [number for call in late for number in call.numbers()]
        if self.may_leave:
            used = {id(leaf): leaf for call in calls for leaf in call.leaves if isinstance(leaf, Tensor)}
            bare += [float(value) for leaf in used.values() for value in _few_values(leaf)]
        numbers = [leaf for call in calls for leaf in call.leaves if _is_number(leaf)]
        return LookedAt(
            form=(names.get(value), *(call.form(names) for call in calls)),
            rows=rows,
            late=tuple(bare),
            numbers=tuple(float(leaf.detach() if isinstance(leaf, Tensor) else leaf) for leaf in numbers),
        )

    def _rows_from_outside(self, calls: Sequence[TracedCall], by_chance: Callable[[], bool]) -> Hashable:
        """Look at the tensors from outside with as many rows as there are records: whose rows are they?

        Rows that are all alike, or were before the batch was written into them, or are drawn by chance within the
        batch, may belong to records. Others follow from the position in the batch, from other records, or from nothing
        that is known: they may stand for themselves, as a table does whose size fits by chance, and a replay shows
        whether they do.
        """
        rowed = [one for one in self._external.values() if one.rowed and not one.counts_records()]
        filled = [one for one in self._external.values() if one.column is not None and not one.rowed]
        if not rowed and not filled:
            return ()
        used = {leaf.number for call in calls for leaf in call.leaves if isinstance(leaf, ValueRef)}
        rowed = [one for one in rowed if one.slot in used]
        for one in rowed:
            one.is_free = one.has_free_rows() or by_chance()
        found = [True if one.is_free else (one.value.shape, one.value.dtype) for one in rowed]
        return (*found, *(one.is_filled() for one in filled if one.slot in used))

    def _check(self, calls: Sequence[TracedCall]) -> None:
        """Refuse what a replay can't tell about: values of other batches, bare numbers, parts off the trace."""
        for call in calls:
            if any(isinstance(leaf, StaleValue) for leaf in call.leaves):
                raise CoupledRecords(
                    "loss must be made of one batch, got a tensor or number of an earlier batch (a moving average, a "
                    "center, a hidden state, a queue), or one that was written to before. What is kept from records to "
                    "the next step is without noise: use a public constant, or keep it from what the trained model "
                    "gives on public records."
                )
            if call.is_broken and call.grad_enabled:
                raise _outside_graph_error() if self._has_outside_graph(call.leaves) else untraceable_loss_error()
            read = {value for index, value in self._read if index < call.index}
            if read and read.intersection(call.numbers()):
                raise CoupledRecords(
                    "loss must be made of tensors, got a number that was read from the batch (float(), int()). Keep it "
                    "a tensor, or use a public constant."
                )
            self._check_outside(call.leaves)

    def _has_outside_graph(self, inputs: Sequence[object]) -> bool:
        """Whether a tensor from outside the batch has a graph to what is no private parameter: another module's."""
        outside = {one.slot: one.value for one in self._external.values()}
        given = (outside.get(leaf.number) if isinstance(leaf, ValueRef) else leaf for leaf in inputs)
        graphs = (graph_leaves(value) for value in given if isinstance(value, Tensor) and value.grad_fn is not None)
        return any(not is_private_parameter([cast("nn.Parameter", leaf)]) for leaves in graphs for leaf in leaves)

    def _check_outside(self, inputs: Sequence[object]) -> None:
        for leaf in inputs:
            if isinstance(leaf, Tensor) and not self._carried.is_constant(leaf) and self._carried.is_copy(leaf):
                raise CoupledRecords(
                    "loss must be made of torch's own results, got a plain tensor that holds one of them "
                    "(torch.tensor(…) of a tensor or number of a batch, an attribute of the module): what it does to "
                    "other records can't be tried out. Use the result itself, .clone() or .detach()."
                )
        left = [index for index in (self._escaped, self._disclosed) if index is not None]
        if not left:
            return
        late = [one for one in self._external.values() if one.index > min(left) and (one.rowed or one.slot is None)]
        late = [one for one in late if not self._carried.is_constant(one.value)]
        by_slot = {one.slot: one.value for one in late}
        for leaf in inputs:
            value = by_slot.get(leaf.number) if isinstance(leaf, ValueRef) else leaf
            if not isinstance(value, Tensor) or is_public(value):
                continue  # What was declared public is, whenever it was made.
            if any(value is one.value for one in late) and not is_uninformative(value):
                raise CoupledRecords(
                    "loss must be made of torch tensors, got a tensor from elsewhere after values of the batch were "
                    "read (.item(), float(), numpy, lists): it may have been computed from other records. Stay with "
                    "tensors up to the loss, compute metrics after it, or make targets and weights in the dataset."
                )

    @property
    def has_bound_rows(self) -> bool:
        """Whether a tensor from outside has as many rows as there are records, and they may not be those of records."""
        return any(one.rowed and not one.is_free for one in self._external.values())

    def outside_shapes(self) -> Hashable:
        """The shapes of all tensors from outside that are as long as there are records."""
        return tuple(one.value.shape for one in self._external.values() if one.rowed or one.column is not None)

    def outside_readings(self) -> list[Reading]:
        """How tensors from outside may be read, the likeliest first."""
        columns = any(one.column is not None for one in self._external.values())
        both = any(one.column is not None and one.rowed for one in self._external.values())
        may_be_constant = columns or bool(self._replayed_tensors("rows"))
        return ["rows", *(["columns"] if both else []), *(["constants"] if may_be_constant else [])]

    def _replayed_tensors(self, reading: Reading) -> list[ExternalTensor]:
        """Those that count as inputs of a replay: positions of records are made again instead."""
        chosen = [one for one in self._external.values() if one.rowed and one.is_free and reading != "constants"]
        chosen = [one for one in chosen if one.column is None or reading != "columns"]
        return [one for one in chosen if one.first_row is None and not one.counts_records()]

    def outside_inputs(self) -> tuple[Tensor, ...]:
        """The structure, with no rows, of the inputs that did not come with the batch."""
        return tuple(one.value[:0] for one in self._replayed_tensors(self.outside))

    def keep_constants(self) -> None:
        """Tell what is carried from batch to batch which tensors a checked loss was made with."""
        for one in self._external.values():
            if one.slot is None:
                self._carried.keep_constant(one.value)

    # --- replaying -----------------------------------------------------------------------------------------------

    def replay(self, loss: int, inputs: Sequence[Tensor], *, records: int) -> Tensor:
        """Run the calls that the loss in slot `loss` depends on, on other inputs.

        Args:
            loss: the loss's slot on the trace.
            inputs: tensors of the batch, then of `outside_inputs`, with `records` rows each.
            records: number of records.

        Raises:
            NonPrivateStep: the batch's structure is not the noted one.
        """
        value = self.replay_all([loss], inputs, records=records)[loss]
        assert isinstance(value, Tensor)
        return value

    def replay_all(self, wanted: Sequence[int], inputs: Sequence[Tensor], *, records: int) -> dict[int, object]:
        """`replay` for several values at once, by slot."""
        rowed = self._replayed_tensors(self.outside)
        slots = [*self._inputs, *(one.slot for one in rowed if one.slot is not None)]
        if len(slots) != len(inputs):
            raise NonPrivateStep(
                "batches must have the structure that the first record gives them, got another number of tensors. "
                f"Let collate_fn build every batch alike. {HOW_TO_DECLARE}."
            )
        values: dict[int, object] = dict(zip(slots, inputs, strict=True))
        for one in self._external.values():
            if one.slot is not None and one.slot not in values:
                values[one.slot] = one.stand_in(records, self.outside)

        def value_of(noted: object) -> object:
            return values[noted.number] if isinstance(noted, ValueRef) else noted

        for call in self._needed_for(wanted):
            result = call.run(value_of)
            values.update(zip(call.results, [result] if call.is_number else tensors_in(result), strict=False))
        return values

    def _needed_for(self, wanted: Sequence[int]) -> list[TracedCall]:
        """The calls that can change the values: backwards from them, with every change of memory they lie in."""
        needed, kept = set(wanted), []
        memory = {self._memory[slot] for slot in needed if slot in self._memory}
        for call in reversed(self._calls):
            if needed.intersection(call.results) or call.writes in memory:
                kept.append(call)
                slots = [leaf.number for leaf in call.leaves if isinstance(leaf, ValueRef)]
                needed.update(slots)
                memory.update(self._memory[slot] for slot in slots if slot in self._memory)
        return kept[::-1]


def _is_mask(part: object) -> bool:
    return isinstance(part, bool) or (isinstance(part, Tensor) and part.dtype == torch.bool)


def _is_all_of(part: object, size: int) -> bool:
    """Whether an index without notes is 0, 1, … up to the last of a dimension."""
    if isinstance(part, range):
        return part == range(size)
    if isinstance(part, np.ndarray):
        return part.dtype.kind in "iu" and part.shape == (size,) and bool((part == np.arange(size)).all())
    if isinstance(part, list):
        return len(part) == size and all(type(one) is int and one == index for index, one in enumerate(part))
    if isinstance(part, Tensor) and not isinstance(part, TracedTensor) and part.shape == (size,):
        return not part.dtype.is_floating_point and torch.equal(part.cpu(), torch.arange(size, dtype=part.dtype))
    return False


def _all_of(tensor: Tensor, dim: int) -> list[int]:
    """All positions along a dimension."""
    return list(range(tensor.size(dim)))


def _outside_graph_error() -> NonPrivateStep:
    """What is raised when a loss leads through the output of another trainable module."""
    return NonPrivateStep(
        "loss must send gradients to the private module only, got an input that another trainable module made (a "
        "generator's output). Pass it on without its graph, and declare it if no record has a part in it: "
        "module(engine.mark_public(x.detach())). For the other module's own step call the private module in "
        "evaluation mode with requires_grad_(False)."
    )


def _both(*args: object, **kwargs: object) -> tuple[tuple[object, ...], dict[str, object]]:
    return args, kwargs


def untraceable_loss_error() -> NonPrivateStep:
    """What is raised when a loss, or a part of it, is made by something that torch functions don't show."""
    return NonPrivateStep(
        "loss must be seen before the step, got one with a part that could not be followed from the module's output to "
        "loss.backward() (a custom autograd function; a penalty on parameters, for which there is weight_decay; "
        "torch.autograd.grad through the module: for an adversarial input call the module in evaluation mode). "
        f"{HOW_TO_DECLARE}."
    )


def _is_number(leaf: object) -> TypeGuard[float | Tensor]:
    """Whether it is a constant of one number."""
    if isinstance(leaf, Tensor):
        return leaf.numel() == 1 and not leaf.is_complex()
    return isinstance(leaf, (float, int)) and not isinstance(leaf, bool)


def _few_values(tensor: Tensor) -> list[float]:
    """Numbers by which a tensor is compared from batch to batch: its values, or sums over them."""
    if tensor.dtype.is_complex or not tensor.numel():
        return []
    values = tensor.detach().flatten()
    return (
        values if len(values) <= _FEW else torch.stack([values.double().sum(), values.double().square().sum()])
    ).tolist()
