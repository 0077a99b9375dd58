"""What the user's loop does between a batch and ``loss.backward()``, written down once and replayed (floor 3).

The loss of a drop-in loop is the user's own code. To find out whether it couples records, the first batch is handed
out as tensors that note every torch function applied to them; the notes are then run again on made-up records.
Afterwards batches are plain tensors and nothing is noted any more.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from sordino.errors import CoupledRecords, UnprivateStep
from sordino.training.structure import leaves_in, map_leaves, map_tensors, tensors_in

__all__ = ["Tape", "TapedTensor", "plain", "scaler_refusal"]

_HOW_TO_DECLARE = "Pass the loss to make_private as criterion=, a function of (output, target)"
# How far up the stack a gradient scaler's own frame is from the multiplication it makes.
_SCALER_DEPTH = 8
_READS = frozenset({"item", "__float__", "__int__", "__index__"})
# What torch does in another way, or not at all, for subclasses.
_OF_PLAIN_TENSORS = frozenset({"__format__", "__repr__", "__reduce_ex__", "__deepcopy__"})
_ARITHMETIC = frozenset(
    f"{before}{name}{after}"
    for name in ("div", "truediv", "true_divide", "divide", "mul", "multiply", "floordiv")
    for before, after in (("", ""), ("", "_"), ("__", "__"), ("__r", "__"), ("__i", "__"))
)


class RecordCount(int):
    """The number of records, read from a taped tensor's shape: it takes another value in a replay."""

    __slots__ = ()


class _Slot:
    """A value's place on the tape. Not a dataclass: those are containers to `map_leaves`."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


@dataclass(frozen=True, kw_only=True)
class _Call:
    """One noted call. `results` holds the slot of each tensor in the result, in order."""

    function: Callable[..., object]
    args: object
    kwargs: object
    results: tuple[int, ...]
    grad_enabled: bool
    autocast: tuple[str, torch.dtype] | None

    def run(self, value_of: Callable[[object], object]) -> object:
        """Call again with the values of a replay."""
        args = map_leaves(value_of, self.args)
        kwargs = map_leaves(value_of, self.kwargs)
        assert isinstance(args, tuple)
        assert isinstance(kwargs, dict)
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.grad_enabled))
            if self.autocast is not None:
                stack.enter_context(torch.autocast(self.autocast[0], dtype=self.autocast[1]))
            return self.function(*args, **kwargs)


class Tape:
    """Notes of one chunk.

    Args:
        records: number of records in the chunk.
        on_backward: called with the tape and the loss's place on it before the backward pass runs.

    Attributes:
        is_open: whether calls are noted.
        outside_is_constant: whether tensors that did not come with the batch are the same for all batches; by default
            one with a row a record counts as an input.
    """

    def __init__(self, records: int, on_backward: Callable[["Tape", int], None]) -> None:
        self.is_open = True
        self.outside_is_constant = False
        self._records = records
        self._on_backward = on_backward
        self._calls: list[_Call] = []
        self._slots = 0
        self._inputs: list[int] = []
        self._adopted: dict[int, tuple[Tensor, int]] = {}
        self._read: set[float] = set()

    # --- noting --------------------------------------------------------------------------------------------------

    def inputs(self, batch: object) -> object:
        """The batch as taped tensors; its tensors are the first inputs of a replay."""
        with _not_noting():
            taped = map_tensors(self._wrap, batch)
        self._inputs = [slot for tensor in tensors_in(taped) if (slot := self._slot_of(tensor)) is not None]
        return taped

    def note(
        self, function: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object], result: object
    ) -> object:
        """Note a call and return its result as taped tensors."""
        with _not_noting():
            return self._note(function, args, kwargs, result) if self.is_open else result

    def _note(
        self, function: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object], result: object
    ) -> object:
        device = next((tensor.device.type for tensor in tensors_in((args, dict(kwargs)))), "cpu")
        noted_args, noted_kwargs = map_leaves(self._note_value, args), map_leaves(self._note_value, dict(kwargs))
        taped = map_tensors(self._wrap, result)
        results = tuple(slot for tensor in tensors_in(taped) if (slot := self._slot_of(tensor)) is not None)
        if results or result is None:
            enabled = torch.is_autocast_enabled(device)
            call = _Call(
                function=function,
                args=noted_args,
                kwargs=noted_kwargs,
                results=results,
                grad_enabled=torch.is_grad_enabled(),
                autocast=(device, torch.get_autocast_dtype(device)) if enabled else None,
            )
            self._calls.append(call)
            return taped
        return self._note_number(function, args, result)

    def before_backward(self, loss: "TapedTensor") -> None:
        """Let the owner of the tape look at the loss."""
        if self.is_open:
            self._on_backward(self, loss.slot)

    def _wrap(self, tensor: Tensor) -> Tensor:
        if self._slot_of(tensor) is not None:
            return tensor
        taped = plain(tensor).as_subclass(TapedTensor)
        taped.tape, taped.slot = self, self._new_slot()
        return taped

    def _new_slot(self) -> int:
        self._slots += 1
        return self._slots - 1

    def _slot_of(self, value: object) -> int | None:
        return value.slot if isinstance(value, TapedTensor) and value.tape is self else None

    def _note_value(self, value: object) -> object:
        slot = self._slot_of(value)
        if slot is not None:
            return _Slot(slot)
        if isinstance(value, Tensor) and value.dim() and value.size(0) == self._records and not value.requires_grad:
            return _Slot(self._adopt(value))
        return value

    def _adopt(self, value: Tensor) -> int:
        """A tensor from outside the tape with one row a record (a target that went through numpy): an input too."""
        if id(value) not in self._adopted:
            self._adopted[id(value)] = (value, self._new_slot())
        return self._adopted[id(value)][1]

    def _note_number(self, function: Callable[..., object], args: tuple[object, ...], result: object) -> object:
        name = getattr(function, "__name__", "")
        owner = getattr(getattr(function, "__self__", None), "__name__", "")
        if isinstance(result, torch.Size) and result and result[0] == self._records and owner == "shape":
            return torch.Size((RecordCount(result[0]), *result[1:]))
        if name == "size" and isinstance(result, int) and args[1:] == (0,) and result == self._records:
            return RecordCount(result)
        if name == "size" and isinstance(result, torch.Size) and result and result[0] == self._records:
            return torch.Size((RecordCount(result[0]), *result[1:]))
        # Small whole numbers are on every line of code and would be taken for numbers read from the batch.
        if isinstance(result, float | int) and name in _READS and float(result) not in {-1.0, 0.0, 1.0, 2.0}:
            self._read.add(float(result))
        return result

    # --- replaying -----------------------------------------------------------------------------------------------

    def outside_inputs(self) -> tuple[Tensor, ...]:
        """The structure, with no rows, of the inputs that did not come with the batch."""
        return tuple(value[:0] for value, _ in self._adopted.values() if self._has_rows(value))

    def _has_rows(self, value: Tensor) -> bool:
        return not self.outside_is_constant and not _counts_records(value)

    def replay(self, loss: int, inputs: Sequence[Tensor], *, records: int) -> Tensor:
        """Run the calls that the loss at place `loss` depends on, on other inputs.

        Args:
            loss: the loss's place on the tape.
            inputs: tensors of the batch, then of `outside_inputs`, with `records` rows each.
            records: number of records.

        Raises:
            UnprivateStep: the batch's structure is not the noted one.
        """
        outside = [(value, slot) for value, slot in self._adopted.values()]
        places = [*self._inputs, *(slot for value, slot in outside if self._has_rows(value))]
        if len(places) != len(inputs):
            raise UnprivateStep(
                "batches must have the structure that the first record gives them, got another number of tensors. "
                f"Let collate_fn build every batch alike. {_HOW_TO_DECLARE}."
            )
        values: dict[int, object] = dict(zip(places, inputs, strict=True))
        for value, slot in outside:
            if not self._has_rows(value):
                values[slot] = torch.arange(records, device=value.device, dtype=value.dtype)
                if self.outside_is_constant:
                    values[slot] = value

        def value_of(noted: object) -> object:
            if isinstance(noted, _Slot):
                return values[noted.number]
            return records if isinstance(noted, RecordCount) else noted

        for call in self._needed_for(loss):
            result = call.run(value_of)
            values.update(zip(call.results, tensors_in(result), strict=False))
        value = values[loss]
        assert isinstance(value, Tensor)
        return value

    def _needed_for(self, loss: int) -> Iterator[_Call]:
        """The calls that can change the loss: backwards from it, and every in-place call."""
        needed, kept = {loss}, []
        for call in reversed(self._calls):
            if needed.intersection(call.results) or _changes_in_place(call.function):
                kept.append(call)
                inputs = [*leaves_in(call.args), *leaves_in(call.kwargs)]
                needed.update(leaf.number for leaf in inputs if isinstance(leaf, _Slot))
                if getattr(call.function, "__name__", "") in _ARITHMETIC and self._read.intersection(
                    float(leaf) for leaf in inputs if isinstance(leaf, float | int)
                ):
                    raise CoupledRecords(
                        "loss must be made of tensors only, got a number that was read from the batch (.item(), "
                        "float()). Keep it a tensor, or divide by a public constant."
                    )
        return reversed(kept)


def _changes_in_place(function: Callable[..., object]) -> bool:
    name = getattr(function, "__name__", "")
    return name.startswith("__i") or name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def _counts_records(value: Tensor) -> bool:
    """Whether it is 0, 1, 2, …: positions of records, which say nothing about them."""
    integer = not value.dtype.is_floating_point and not value.dtype.is_complex and value.dtype != torch.bool
    return value.dim() == 1 and integer and bool((value == torch.arange(len(value), device=value.device)).all())


class TapedTensor(Tensor):
    """A tensor of the first batch; every function applied to it is noted on its tape."""

    tape: Tape
    slot: int

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        tapes = [tensor.tape for tensor in tensors_in((args, dict(kwargs))) if isinstance(tensor, TapedTensor)]
        if func is Tensor.backward and isinstance(args[0], TapedTensor):
            args[0].tape.before_backward(args[0])
        elif getattr(func, "__name__", "") in {"mul", "__mul__"}:
            _refuse_scaler()
        if getattr(func, "__name__", "") in _OF_PLAIN_TENSORS:
            return func(*(plain(arg) if isinstance(arg, Tensor) else arg for arg in args), **kwargs)
        with _not_noting():
            result = func(*args, **kwargs)
        open_tapes = [tape for tape in tapes if tape.is_open]
        return open_tapes[0].note(func, args, kwargs, result) if open_tapes else result


def _not_noting() -> AbstractContextManager[None]:
    """Inside, taped tensors behave as ordinary ones."""
    return torch._C.DisableTorchFunctionSubclass()  # pyright: ignore[reportPrivateUsage]


def plain(tensor: Tensor) -> Tensor:
    """The same tensor without notes; autograd sees no difference."""
    if not isinstance(tensor, TapedTensor):
        return tensor
    with _not_noting():
        return tensor.as_subclass(Tensor)


def scaler_refusal() -> UnprivateStep:
    """What is raised when a dynamic loss scaler takes part."""
    return UnprivateStep(
        "loss must not be scaled by a GradScaler: it skips steps when a record's gradient overflows, which tells about "
        "the record. Use torch.autocast with bfloat16, without a scaler."
    )


def _refuse_scaler() -> None:
    frame = inspect.currentframe()
    for _ in range(_SCALER_DEPTH):
        if frame is None:
            return
        if isinstance(frame.f_locals.get("self"), torch.amp.GradScaler):
            raise scaler_refusal()
        frame = frame.f_back
