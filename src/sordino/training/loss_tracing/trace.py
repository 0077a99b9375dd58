"""What the user's loop does between a batch and ``loss.backward()``, written down and replayed.

The loss of a drop-in loop is the user's own code. To find out whether it couples records, every batch is handed out as
tensors that note each torch function applied to them; the notes are run again on synthetic records whenever the loop
does something it did not do before.
"""

import inspect
import site
import sysconfig
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TypeGuard, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sordino.errors import CoupledRecords, NonPrivateStep
from sordino.training.loss_tracing.batch_state import (
    CrossBatchState,
    ExternalTensor,
    ExternalTensors,
    Reading,
    StaleValue,
    TracedCall,
    ValueRef,
    counts_rows,
    declared_targets,
    has_data_dependent_size,
    is_public,
    is_uninformative,
    map_values,
    record_rows,
    size_at,
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
from sordino.training.probing.probe import graph_leaves
from sordino.training.pytree import map_tensors, tensors_in

__all__ = [
    "OperationTrace",
    "TracedTensor",
    "ValueEscapeTracking",
    "check_no_branching",
    "check_no_metric_scheduler",
    "without_trace",
]


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
# Frames through which every call of a taped tensor or number goes.
_BETWEEN = (str(Path(__file__).parent), str(Path(torch.__file__).parent / "_tensor.py"))
_SCHEDULERS = str(Path(torch.__file__).parent / "optim" / "lr_scheduler.py")


def _asking() -> FrameType | None:
    """The code that asks for a private value: the first frame that is not one of those every such call goes through."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(_BETWEEN):
        frame = frame.f_back
    return frame


def check_no_branching() -> None:
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
        "checks in the data set, or after the step."
    )


def check_no_metric_scheduler() -> None:
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
# How values leave the tensors of a batch: sizes, numbers, truth, memory of other libraries.
# ----------------------------------------------------------------------------------------------------------------------


# How the bare values of a tensor are read: into Python numbers, into truth, into other memory.
_NUMBERS = frozenset({"__float__", "__int__", "__index__", "__complex__"})
_TRUTHS = frozenset({"__bool__", "is_nonzero", "equal", "allclose", "__contains__"})
_ESCAPES = frozenset({"numpy", "__array__", "tolist", "data_ptr", "untyped_storage", "storage", "__dlpack__"})


class ValueEscapeTracking:
    """The part of a tape that sees values leave.

    Args:
        records: number of records in the chunk.
        carried: what the loop carries from batch to batch.

    Attributes:
        is_open: whether calls are noted.
        was_read: whether a bare number was read.
    """

    def __init__(self, records: int, carried: CrossBatchState) -> None:
        self.records = records
        self.is_open, self.was_read = True, False
        self._carried = carried
        self._calls: list[TracedCall] = []
        self._slots = self._places = 0
        self._read: list[tuple[int, float]] = []
        # Where values first left for other libraries, and where a number was first read.
        self._escaped: int | None = None
        self._disclosed: int | None = None

    def _next_place(self) -> int:
        self._places += 1
        return self._places

    def _new_slot(self) -> int:
        self._slots += 1
        return self._slots - 1

    def _noted(self, value: object) -> object:
        """How an argument stands on the tape."""
        raise NotImplementedError

    def _note_value(
        self, function: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object], result: object
    ) -> object:
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
            self.was_read = True
            self._disclosed = self._next_place() if self._disclosed is None else self._disclosed
            return self.note_number(function, args, result)
        return result

    def _escape(self) -> None:
        self.was_read = True
        self._escaped = self._next_place() if self._escaped is None else self._escaped

    def _note_size(
        self,
        tensor: Tensor,
        given: tuple[object, ...],
        kwargs: Mapping[str, object],
        result: object,
        name: str,
    ) -> object:
        """Sizes in which the records have a part, by their number or by values: they take other values in a replay."""
        if not counts_rows(tensor, self.records):
            return result
        varies = getattr(tensor, "sized_by_values", False)
        if isinstance(result, torch.Size):
            places = range(len(result) if varies else 1)
            noted = [self._note_count(size_at, (tensor, place), result[place], varies) for place in places]
            return torch.Size((*noted, *result[len(noted) :]))  # pyright: ignore[reportArgumentType]
        if name == "size":
            place = given[0] if given else kwargs.get("dim")
            if varies:
                return self._note_count(size_at, (tensor, place), result, varies)
            return self._note_count(record_rows, (tensor,), result, varies) if place in {0, -tensor.dim()} else result
        return self._note_count(Tensor.numel, (tensor,), result, varies)

    def _note_count(
        self, function: Callable[..., object], args: tuple[object, ...], result: object, varies: bool
    ) -> object:
        self.was_read = self.was_read or varies
        return self.note_number(function, args, result, counts=not varies)

    def note_number(
        self, function: Callable[..., object], args: tuple[object, ...], result: object, *, counts: bool = False
    ) -> object:
        """Note a computation whose result is a number."""
        if isinstance(result, float):
            self._carried.tell(float.__pos__(result))
        if not self.is_open:
            return result if counts else tainted(result, self, None)
        with not_noting():
            slot = self._new_slot()
            self._calls.append(
                TracedCall(
                    function=function,
                    args=map_values(self._noted, args),
                    kwargs={},
                    results=(slot,),
                    place=self._next_place(),
                    grad_enabled=False,
                    autocast=None,
                    is_number=True,
                )
            )
        return tainted(result, self, slot, counts=counts)

    def decide(self, *, counts: bool) -> None:
        """A comparison is being made: refused in the loop's own code, unless it is about sizes."""
        if self.is_open and not counts:
            self.was_read = True
            check_no_branching()

    def read(self, value: float) -> None:
        """The bare number is being read."""
        self.was_read = True
        check_no_metric_scheduler()
        self._disclosed = self._next_place() if self._disclosed is None else self._disclosed
        # Small whole numbers are on every line of code and would be taken for numbers read from the batch.
        if self.is_open and value not in {-1.0, 0.0, 1.0, 2.0}:
            self._read.append((self._next_place(), float(value)))


# ----------------------------------------------------------------------------------------------------------------------
# What the user's loop does between a batch and ``loss.backward()``, written down and replayed.
# ----------------------------------------------------------------------------------------------------------------------


HOW_TO_DECLARE = "Pass the loss to make_private as criterion=, a function of (output, target)"
# Their results have values that no record has a part in.
_SHAPES_ONLY = frozenset(
    f"{name}{kind}" for name in ("ones", "zeros", "empty", "full", "rand", "randn", "randint") for kind in ("_like",)
) | {"new_ones", "new_zeros", "new_empty", "new_full"}
# Tensors of more entries are compared by sums.
_FEW = 64


class OperationTrace(ValueEscapeTracking):
    """Notes of one chunk.

    Args:
        records: number of records in the chunk.
        on_backward: called with the tape and the loss's place on it before the backward pass runs.
        carried: what the loop carries from batch to batch.

    Attributes:
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
        super().__init__(records, CrossBatchState() if carried is None else carried)
        self.is_passing = self.is_weighted = self.is_by_record = False
        self.outside: Reading = "rows"
        self._on_backward = on_backward
        self._inputs: list[int] = []
        self._outsiders = ExternalTensors(records, self._new_slot)
        self._nodes: dict[int, object] = {}
        self._memory: dict[int, int] = {}

    # --- noting --------------------------------------------------------------------------------------------------

    def inputs(self, batch: object, *, padded: Collection[int] = ()) -> object:
        """The batch as taped tensors; its tensors are the first inputs of a replay.

        Args:
            batch: as the loader gave it.
            padded: the places of tensors whose shape follows the longest record.
        """
        with not_noting():
            taped = map_tensors(self._wrap, batch)
            for place, tensor in enumerate(tensors_in(taped)):
                if isinstance(tensor, TracedTensor):
                    tensor.sized_by_values = place in padded
        self._inputs = [slot for tensor in tensors_in(taped) if (slot := self._slot_of(tensor)) is not None]
        return taped

    def close(self) -> None:
        """Note nothing more, and let go of what was noted."""
        self.is_open = False
        self._calls.clear()
        self._outsiders.clear()
        self.loss = None
        self._nodes.clear()

    def note_arguments(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> int:
        """Note what a module is called on, and return its place: a replay gives (args, kwargs) there."""
        with not_noting():
            given = list(tensors_in((args, dict(kwargs))))
            slot = self._new_slot()
            self._calls.append(
                TracedCall(
                    function=_arguments,
                    args=map_values(self._noted, args),
                    kwargs=map_values(self._noted, dict(kwargs)),
                    results=(slot,),
                    place=self._next_place(),
                    grad_enabled=torch.is_grad_enabled(),
                    autocast=None,
                    is_number=True,
                    is_broken=any(self._is_broken(tensor) for tensor in given),
                )
            )
        return slot

    def begin(self, function: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        """A call begins: what it writes to is looked at before."""
        for target in self._outside_targets(function, args, kwargs):
            self._outsider(target).begin_write()

    def _outside_targets(
        self, function: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> list[Tensor]:
        """Tensors from outside into which the call writes values of the batch."""
        targets = [one for one in declared_targets(function, args, kwargs) if not isinstance(one, TracedTensor)]
        given = tensors_in((args, dict(kwargs))) if targets else ()
        tells = any(one.keeps_values for one in given if isinstance(one, TracedTensor))
        return targets if tells else []

    def note(
        self, function: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object], result: object
    ) -> object:
        """Note a call and return its result as taped tensors."""
        with not_noting():
            if not any(True for _ in tensors_in(result)) and result is not None:
                return self._note_value(function, args, kwargs, result)
            targets = self._written_to(function, args, kwargs)
            if not self.is_open:
                taped = map_tensors(self._wrap, result)
                self._remember(taped)
                return taped
            return self._note_call(function, args, kwargs, result, targets)

    def _written_to(
        self, function: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> list[Tensor]:
        """What the call has changed in place; a tensor from outside then holds values of the batch."""
        for target in self._outside_targets(function, args, kwargs):
            if self.is_open:
                found = self._outsider(target)
                found.slot = self._new_slot() if found.slot is None else found.slot
                self._memory[found.slot] = storage_address(target)
                found.end_write()
            self._carried.write(target)
        return declared_targets(function, args, kwargs)

    def _note_call(
        self,
        function: Callable[..., object],
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        result: object,
        targets: list[Tensor],
    ) -> object:
        given = list(tensors_in((args, dict(kwargs))))
        device = given[0].device.type if given else "cpu"
        noted = map_values(self._noted, self._with_rows_counted(function, args)), map_values(self._noted, dict(kwargs))
        broken = any(self._is_broken(tensor) for tensor in given if all(tensor is not target for target in targets))
        taped = map_tensors(self._wrap, result)
        self._remember(taped)
        sized = has_data_dependent_size(function, args, kwargs)
        for tensor in tensors_in(taped):
            if isinstance(tensor, TracedTensor):
                tensor.keeps_values = tensor.keeps_values and getattr(function, "__name__", "") not in _SHAPES_ONLY
                tensor.sized_by_values = tensor.sized_by_values or sized
        # An argument that was changed in place has another node now.
        for tensor in [*tensors_in(taped), *(given if targets else ())]:
            slot = self._slot_of(tensor)
            if slot is not None:
                self._nodes[slot] = tensor.grad_fn
        self._calls.append(
            TracedCall(
                function=function,
                args=noted[0],
                kwargs=noted[1],
                results=tuple(slot for tensor in tensors_in(taped) if (slot := self._slot_of(tensor)) is not None),
                place=self._next_place(),
                grad_enabled=torch.is_grad_enabled(),
                autocast=(device, torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else None,
                writes=storage_address(targets[0]) if targets else None,
                is_broken=broken,
            )
        )
        return taped

    def _with_rows_counted(self, function: Callable[..., object], args: tuple[object, ...]) -> tuple[object, ...]:
        """Arguments of an indexing in which plain numbers 0, 1, … up to the last of a dimension are noted as all of it.

        ``scores[range(len(scores)), labels]`` holds as many numbers as there are rows, without notes.
        """
        if getattr(function, "__name__", "") not in {"__getitem__", "__setitem__"} or not isinstance(args[0], Tensor):
            return args
        tensor, index = args[0], args[1]
        parts = list(index) if isinstance(index, tuple) else [index]
        for place, part in enumerate(parts):
            if part is None or part is Ellipsis or _is_mask(part) or place >= tensor.dim():
                break
            if _is_all_of(part, tensor.size(place)):
                slot = self._new_slot()
                self._calls.append(
                    TracedCall(
                        function=_all_of,
                        args=(self._noted(tensor), place),
                        kwargs={},
                        results=(slot,),
                        place=self._next_place(),
                        grad_enabled=False,
                        autocast=None,
                        is_number=True,
                    )
                )
                parts[place] = ValueRef(slot)
        return (tensor, tuple(parts) if isinstance(index, tuple) else parts[0], *args[2:])

    def _remember(self, results: object) -> None:
        for tensor in tensors_in(results):
            if isinstance(tensor, TracedTensor) and not (tensor.dim() and tensor.size(0) == self.records):
                self._carried.remember(without_trace(tensor))

    def leave(self, tensors: Sequence[Tensor]) -> None:
        """Tensors that the module made in its forward may be within the loop's reach, in its attributes or by hooks."""
        self.may_leave = True
        for tensor in tensors:
            self._carried.remember(tensor)

    def adopt(self, tensor: Tensor) -> Tensor:
        """A tensor that the module made of the batch and kept, as one of the batch."""
        return self._wrap(tensor)

    def _wrap(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, TracedTensor) and tensor.tape is self:
            return tensor
        taped = without_trace(tensor).as_subclass(TracedTensor)
        taped.tape, taped.slot, taped.keeps_values, taped.sized_by_values = self, self._new_slot(), True, False
        self._memory[taped.slot] = storage_address(tensor)
        self._nodes[taped.slot] = tensor.grad_fn
        return taped

    def _slot_of(self, value: object) -> int | None:
        if isinstance(value, TracedTensor):
            return value.slot if value.tape is self else None
        found = self._outsiders.get(value) if isinstance(value, Tensor) else None
        return None if found is None else found.slot

    def _outsider(self, value: Tensor) -> ExternalTensor:
        found = self._outsiders.get(value)
        if found is None:
            stale, constant = self._carried.was_written(value), self._carried.is_constant(value)
            found = self._outsiders.add(value, self._next_place(), is_stale=stale, is_constant=constant)
            if found.slot is not None:
                self._memory[found.slot] = storage_address(value)
        return found

    def _is_broken(self, tensor: Tensor) -> bool:
        """Whether autograd knows of something that happened to the tensor and the tape doesn't."""
        slot = self._slot_of(tensor)
        if not tensor.requires_grad:
            return False
        return tensor.grad_fn is not (None if slot is None else self._nodes.get(slot))

    def _noted(self, value: object) -> object:
        if isinstance(value, TracedTensor) and value.tape is self:
            return ValueRef(value.slot)
        if isinstance(value, TaintedFloat | TaintedInt):
            if value.source is not self:
                return StaleValue()
            return untainted(value) if value.slot is None else ValueRef(value.slot)
        if not isinstance(value, Tensor):
            return value
        if isinstance(value, TracedTensor):
            if value.keeps_values:
                return StaleValue()
            value = without_trace(value)
        found = self._outsider(value)
        if found.is_stale:
            return StaleValue()
        return value if found.slot is None else ValueRef(found.slot)

    # --- backward ------------------------------------------------------------------------------------------------

    def backward(
        self,
        losses: Sequence[TracedTensor],
        run: Callable[[bool], object],
        *,
        is_weighted: bool = False,
        by_record: bool = False,
    ) -> object:
        """Let the owner of the tape look at the losses, then run the backward pass, or both where it takes two.

        Args:
            losses: each a sum or mean over the records; `by_record` says that each holds one loss per record.
            run: the backward pass.
            is_weighted: whether it starts from several numbers, weighted by the loop.
            by_record: whether `run` takes the sum or mean over the records.
        """
        self.is_weighted, self.is_by_record = is_weighted, by_record
        try:
            for loss in losses:
                if not is_weighted and self._is_broken(loss):
                    raise untraceable_loss_error()
                self.loss = loss
                self._on_backward(self, loss.slot)
            self.is_passing = not is_weighted
            return run(False) if self.passes is None or is_weighted else self.passes(run)
        finally:
            self.is_passing = self.is_weighted = self.is_by_record = False

    @property
    def has_bound_rows(self) -> bool:
        """Whether a tensor from outside has as many rows as there are records, and they may not be those of records."""
        return any(one.rowed and not one.is_free for one in self._outsiders)

    def outside_shapes(self) -> Hashable:
        """The shapes of all tensors from outside that are as long as there are records."""
        return tuple(one.value.shape for one in self._outsiders if one.rowed or one.column is not None)

    def outside_readings(self) -> list[Reading]:
        """How tensors from outside may be read, the likeliest first."""
        return self._outsiders.readings()

    def outside_inputs(self) -> tuple[Tensor, ...]:
        """The structure, with no rows, of the inputs that did not come with the batch."""
        return tuple(one.value[:0] for one in self._outsiders.inputs(self.outside))

    def rows_from_outside(self, wanted: int, *, by_chance: Callable[[], bool]) -> Hashable:
        """Look at the tensors from outside with as many rows as there are records: whose rows are they?

        Rows that are all alike, or were before the batch was written into them, or are drawn by chance within the
        batch, may belong to records. Others follow from the place in the batch, from other records, or from nothing
        that is known: they may stand for themselves, as a table does whose size fits by chance, and a replay shows
        whether they do.

        Args:
            wanted: the place of a value.
            by_chance: whether random numbers were drawn for the batch outside the module.

        Returns:
            What was found of each that the value depends on: a proof is one for the same.
        """
        rowed = [one for one in self._outsiders if one.rowed and not one.counts_records()]
        filled = [one for one in self._outsiders if one.column is not None and not one.rowed]
        if not rowed and not filled:
            return ()
        used = {
            leaf.number for call in self._needed_for([wanted]) for leaf in call.inputs() if isinstance(leaf, ValueRef)
        }
        rowed = [one for one in rowed if one.slot in used]
        for one in rowed:
            one.is_free = one.has_free_rows() or by_chance()
        found = [True if one.is_free else (one.value.shape, one.value.dtype) for one in rowed]
        return (*found, *(one.is_filled() for one in filled if one.slot in used))

    def form(self, loss: int) -> tuple[Hashable, tuple[float, ...]]:
        """What leads to the loss, without values; and the constants in it that may have been made from bare values."""
        names: dict[int, int] = {slot: -place - 1 for place, slot in enumerate(self._inputs)}
        calls = self._needed_for([loss])
        for call in calls:
            for slot in call.results:
                names.setdefault(slot, len(names))
        late = [call for call in calls if self._escaped is not None and call.place > self._escaped]
        numbers = [number for call in late for number in call.numbers()]
        if self.may_leave:
            used = {id(leaf): leaf for call in calls for leaf in call.inputs() if isinstance(leaf, Tensor)}
            numbers += [float(value) for leaf in used.values() for value in _few_values(leaf)]
        return (names.get(loss), *(call.form(names) for call in calls)), tuple(numbers)

    def numbers(self, loss: int) -> tuple[float, ...]:
        """All constants in what leads to the loss, those in tensors of one number among them."""
        leaves = [leaf for call in self._needed_for([loss]) for leaf in call.inputs()]
        return tuple(float(leaf.detach() if isinstance(leaf, Tensor) else leaf) for leaf in leaves if _is_number(leaf))

    def keep_constants(self) -> None:
        """Tell what is carried from batch to batch which tensors a proved loss was made with."""
        for one in self._outsiders:
            if one.slot is None:
                self._carried.keep_constant(one.value)

    def check(self, loss: int) -> None:
        """Refuse what a replay can't tell about: values of other batches, bare numbers, parts off the tape.

        Raises:
            CoupledRecords: the loss depends on an earlier batch, or on values read from the batch.
            NonPrivateStep: a part of the loss can't be followed.
        """
        for call in self._needed_for([loss]):
            inputs = list(call.inputs())
            if any(isinstance(leaf, StaleValue) for leaf in inputs):
                raise CoupledRecords(
                    "loss must be made of one batch, got a tensor or number of an earlier batch (a moving average, a "
                    "center, a hidden state, a queue), or one that was written to before. What is kept from records to "
                    "the next step is without noise: use a public constant, or keep it from what the trained model "
                    "gives on public records."
                )
            if call.is_broken and call.grad_enabled:
                raise _outside_graph_error() if self._has_outside_graph(inputs) else untraceable_loss_error()
            read = {value for place, value in self._read if place < call.place}
            if read.intersection(call.numbers()):
                raise CoupledRecords(
                    "loss must be made of tensors, got a number that was read from the batch (float(), int()). Keep it "
                    "a tensor, or use a public constant."
                )
            self._check_outside(inputs)

    def _has_outside_graph(self, inputs: Sequence[object]) -> bool:
        """Whether a tensor from outside the batch has a graph to what is no private parameter: another module's."""
        outside = {one.slot: one.value for one in self._outsiders}
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
        left = [place for place in (self._escaped, self._disclosed) if place is not None]
        if not left:
            return
        late = [one for one in self._outsiders.late(min(left)) if not self._carried.is_constant(one.value)]
        late = [one for one in late if one.rowed or one.slot is None]
        by_slot = {one.slot: one.value for one in late}
        for leaf in inputs:
            value = by_slot.get(leaf.number) if isinstance(leaf, ValueRef) else leaf
            if not isinstance(value, Tensor) or is_public(value):
                continue  # What was declared public is, whenever it was made.
            if any(value is one.value for one in late) and not is_uninformative(value):
                raise CoupledRecords(
                    "loss must be made of torch tensors, got a tensor from elsewhere after values of the batch were "
                    "read (.item(), float(), numpy, lists): it may have been computed from other records. Stay with "
                    "tensors up to the loss, compute metrics after it, or make targets and weights in the data set."
                )

    def replay(self, loss: int, inputs: Sequence[Tensor], *, records: int) -> Tensor:
        """Run the calls that the loss at place `loss` depends on, on other inputs.

        Args:
            loss: the loss's place on the tape.
            inputs: tensors of the batch, then of `outside_inputs`, with `records` rows each.
            records: number of records.

        Raises:
            NonPrivateStep: the batch's structure is not the noted one.
        """
        value = self.replay_all([loss], inputs, records=records)[loss]
        assert isinstance(value, Tensor)
        return value

    def replay_all(self, wanted: Sequence[int], inputs: Sequence[Tensor], *, records: int) -> dict[int, object]:
        """`replay` for several values at once, by place."""
        rowed = self._outsiders.inputs(self.outside)
        places = [*self._inputs, *(one.slot for one in rowed if one.slot is not None)]
        if len(places) != len(inputs):
            raise NonPrivateStep(
                "batches must have the structure that the first record gives them, got another number of tensors. "
                f"Let collate_fn build every batch alike. {HOW_TO_DECLARE}."
            )
        values: dict[int, object] = dict(zip(places, inputs, strict=True))
        for one in self._outsiders:
            if one.slot is not None and one.slot not in values:
                values[one.slot] = self._outsiders.start_of(one, records, self.outside)

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
                slots = [leaf.number for leaf in call.inputs() if isinstance(leaf, ValueRef)]
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
        return len(part) == size and all(type(one) is int and one == place for place, one in enumerate(part))
    if isinstance(part, Tensor) and not isinstance(part, TracedTensor) and part.shape == (size,):
        return not part.dtype.is_floating_point and torch.equal(part.cpu(), torch.arange(size, dtype=part.dtype))
    return False


def _all_of(tensor: Tensor, place: int) -> list[int]:
    """All places along a dimension."""
    return list(range(tensor.size(place)))


def _outside_graph_error() -> NonPrivateStep:
    """What is raised when a loss leads through the output of another trainable module."""
    return NonPrivateStep(
        "loss must send gradients to the private module only, got an input that another trainable module made (a "
        "generator's output). Pass it on without its graph, and declare it if no record has a part in it: "
        "module(engine.mark_public(x.detach())). For the other module's own step call the private module in "
        "evaluation mode with requires_grad_(False)."
    )


def _arguments(*args: object, **kwargs: object) -> tuple[tuple[object, ...], dict[str, object]]:
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
    return isinstance(leaf, float | int) and not isinstance(leaf, bool)


def _few_values(tensor: Tensor) -> list[float]:
    """Numbers by which a tensor is compared from batch to batch: its values, or sums over them."""
    if tensor.dtype.is_complex or not tensor.numel():
        return []
    values = tensor.detach().flatten()
    return (
        values if len(values) <= _FEW else torch.stack([values.double().sum(), values.double().square().sum()])
    ).tolist()
