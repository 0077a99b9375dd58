"""What the user's loop does between a batch and ``loss.backward()``, written down and replayed (floor 3).

The loss of a drop-in loop is the user's own code. To find out whether it couples records, every batch is handed out as
tensors that note each torch function applied to them; the notes are run again on made-up records whenever the loop
does something it did not do before.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence

import torch
from torch import Tensor

from sordino.errors import CoupledRecords, UnprivateStep
from sordino.training.calls import Call, Slot, Stale, changes_in_place, map_values
from sordino.training.decisions import refuse_decision
from sordino.training.outsiders import counts_records, memory_of, says_nothing
from sordino.training.structure import map_tensors, tensors_in
from sordino.training.tainted import TaintedFloat, TaintedInt, tainted, untainted
from sordino.training.taped import TapedTensor, not_noting, plain, scaler_refusal

__all__ = ["Tape", "TapedTensor", "plain", "scaler_refusal"]

HOW_TO_DECLARE = "Pass the loss to make_private as criterion=, a function of (output, target)"
# How the bare values of a tensor are read: into Python numbers, into truth, into other memory.
_NUMBERS = frozenset({"__float__", "__int__", "__index__", "__complex__"})
_TRUTHS = frozenset({"__bool__", "is_nonzero", "equal", "allclose", "__contains__"})
_ESCAPES = frozenset({"numpy", "__array__", "tolist", "data_ptr", "untyped_storage", "storage", "__dlpack__"})
# Their results have values that no record has a part in.
_SHAPES_ONLY = frozenset(
    f"{name}{kind}" for name in ("ones", "zeros", "empty", "full", "rand", "randn", "randint") for kind in ("_like",)
) | {"new_ones", "new_zeros", "new_empty", "new_full"}


class Tape:
    """Notes of one chunk.

    Args:
        records: number of records in the chunk.
        on_backward: called with the tape and the loss's place on it before the backward pass runs.

    Attributes:
        is_open: whether calls are noted.
        is_passing: whether a backward pass is running from losses that `on_backward` has seen.
        was_read: whether a bare number was read from it.
        outside_is_constant: whether tensors that did not come with the batch are the same for all batches; by default
            one with a row a record counts as an input.
    """

    def __init__(self, records: int, on_backward: Callable[["Tape", int], None]) -> None:
        self.records = records
        self.is_open = True
        self.is_passing = self.was_read = self.outside_is_constant = False
        self._on_backward = on_backward
        self._calls: list[Call] = []
        self._slots = self._places = 0
        self._inputs: list[int] = []
        # Tensors that did not come with the batch: with a slot if they have a row a record, and the place of first use.
        self._outside: dict[int, tuple[Tensor, int | None, int]] = {}
        self._read: list[tuple[int, float]] = []
        self._escaped: int | None = None
        self._nodes: dict[int, object] = {}
        self._memory: dict[int, int] = {}

    # --- noting --------------------------------------------------------------------------------------------------

    def inputs(self, batch: object) -> object:
        """The batch as taped tensors; its tensors are the first inputs of a replay."""
        with not_noting():
            taped = map_tensors(self._wrap, batch)
        self._inputs = [slot for tensor in tensors_in(taped) if (slot := self._slot_of(tensor)) is not None]
        return taped

    def close(self) -> None:
        """Note nothing more, and let go of what was noted."""
        self.is_open = False
        self._calls.clear()
        self._outside.clear()
        self._nodes.clear()

    def note(
        self, function: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object], result: object
    ) -> object:
        """Note a call and return its result as taped tensors."""
        with not_noting():
            if not any(True for _ in tensors_in(result)) and result is not None:
                return self._note_value(function, args, kwargs, result)
            if not self.is_open:
                return map_tensors(self._wrap, result)
            return self._note_call(function, args, kwargs, result)

    def _note_call(
        self, function: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object], result: object
    ) -> object:
        given = list(tensors_in((args, dict(kwargs))))
        device = given[0].device.type if given else "cpu"
        noted = map_values(self._noted, args), map_values(self._noted, dict(kwargs))
        writes = changes_in_place(function) and bool(given)
        broken = any(self._is_broken(tensor) for tensor in given if not (writes and tensor is given[0]))
        taped = map_tensors(self._wrap, result)
        name = getattr(function, "__name__", "")
        for tensor in tensors_in(taped):
            if isinstance(tensor, TapedTensor) and (name in _SHAPES_ONLY):
                tensor.keeps_values = False
        # An argument that was changed in place has another node now.
        for tensor in [*tensors_in(taped), *(given if writes else ())]:
            slot = self._slot_of(tensor)
            if slot is not None:
                self._nodes[slot] = tensor.grad_fn
        self._calls.append(
            Call(
                function=function,
                args=noted[0],
                kwargs=noted[1],
                results=tuple(slot for tensor in tensors_in(taped) if (slot := self._slot_of(tensor)) is not None),
                place=self._next_place(),
                grad_enabled=torch.is_grad_enabled(),
                autocast=(device, torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else None,
                writes=memory_of(given[0]) if writes else None,
                is_broken=broken,
            )
        )
        return taped

    def _next_place(self) -> int:
        self._places += 1
        return self._places

    def _wrap(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, TapedTensor) and tensor.tape is self:
            return tensor
        taped = plain(tensor).as_subclass(TapedTensor)
        taped.tape, taped.slot, taped.keeps_values = self, self._new_slot(), True
        self._memory[taped.slot] = memory_of(tensor)
        self._nodes[taped.slot] = tensor.grad_fn
        return taped

    def _new_slot(self) -> int:
        self._slots += 1
        return self._slots - 1

    def _slot_of(self, value: object) -> int | None:
        return value.slot if isinstance(value, TapedTensor) and value.tape is self else None

    def _is_broken(self, tensor: Tensor) -> bool:
        """Whether autograd knows of something that happened to the tensor and the tape doesn't."""
        slot = self._slot_of(tensor)
        if not tensor.requires_grad:
            return False
        return tensor.grad_fn is not (None if slot is None else self._nodes.get(slot))

    def _noted(self, value: object) -> object:
        slot = self._slot_of(value)
        if slot is not None:
            return Slot(slot)
        if isinstance(value, TaintedFloat | TaintedInt):
            if value.source is not self:
                return Stale()
            return untainted(value) if value.slot is None else Slot(value.slot)
        if not isinstance(value, Tensor):
            return value
        if isinstance(value, TapedTensor):
            if value.keeps_values:
                return Stale()
            value = plain(value)
        if id(value) not in self._outside:
            rowed = value.dim() > 0 and value.size(0) == self.records and not value.requires_grad
            self._outside[id(value)] = (value, self._new_slot() if rowed else None, self._next_place())
        slot = self._outside[id(value)][1]
        return value if slot is None else Slot(slot)

    # --- values that leave the tape ------------------------------------------------------------------------------

    def _note_value(
        self, function: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object], result: object
    ) -> object:
        name = getattr(function, "__name__", "")
        owner = getattr(getattr(function, "__self__", None), "__name__", "")
        counted = name in {"size", "numel", "nelement"} or owner == "shape"
        first = args[0] if args else None
        if counted and isinstance(first, Tensor):
            return self._note_size(first, args[1:], kwargs, result, name)
        if name in _TRUTHS or (name == "item" and isinstance(result, bool)):
            self.decide(counts=False)
        elif name in _NUMBERS and isinstance(result, float | int):
            self.read(result)
        elif name in _ESCAPES:
            self.was_read = True
            self._escaped = self._next_place() if self._escaped is None else self._escaped
        elif name == "item":
            self.was_read = True
            return self.note_number(function, args, result)
        return result

    def _note_size(
        self,
        tensor: Tensor,
        given: tuple[object, ...],
        kwargs: Mapping[str, object],
        result: object,
        name: str,
    ) -> object:
        """Sizes in which the number of records has a part: they take other values in a replay."""
        if not tensor.dim() or tensor.size(0) != self.records:
            return result
        if isinstance(result, torch.Size):
            return torch.Size((self._note_count(_rows, tensor, result[0]), *result[1:]))  # pyright: ignore[reportArgumentType]
        if name == "size":
            place = given[0] if given else kwargs.get("dim")
            return self._note_count(_rows, tensor, result) if place in {0, -tensor.dim()} else result
        return self._note_count(Tensor.numel, tensor, result)

    def _note_count(self, function: Callable[..., object], tensor: Tensor, result: object) -> object:
        return self.note_number(function, (tensor,), result, counts=True)

    def note_number(
        self, function: Callable[..., object], args: tuple[object, ...], result: object, *, counts: bool = False
    ) -> object:
        """Note a computation whose result is a number."""
        if not self.is_open:
            return result if counts else tainted(result, self, None)
        with not_noting():
            slot = self._new_slot()
            self._calls.append(
                Call(
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
            refuse_decision()

    def read(self, value: float) -> None:
        """The bare number is being read."""
        self.was_read = True
        # Small whole numbers are on every line of code and would be taken for numbers read from the batch.
        if self.is_open and value not in {-1.0, 0.0, 1.0, 2.0}:
            self._read.append((self._next_place(), float(value)))

    # --- backward ------------------------------------------------------------------------------------------------

    def backward(self, losses: Sequence[TapedTensor], run: Callable[[], object]) -> object:
        """Let the owner of the tape look at the losses, then run the backward pass."""
        for loss in losses:
            if self._is_broken(loss):
                raise not_followed()
            self._on_backward(self, loss.slot)
        self.is_passing = True
        try:
            return run()
        finally:
            self.is_passing = False

    def outside_inputs(self) -> tuple[Tensor, ...]:
        """The structure, with no rows, of the inputs that did not come with the batch."""
        return tuple(value[:0] for value, _ in self._rowed())

    def _rowed(self) -> list[tuple[Tensor, int]]:
        """Tensors from outside with a row a record, and their slots: inputs too."""
        return [
            (value, slot)
            for value, slot, _ in self._outside.values()
            if slot is not None and not self.outside_is_constant and not counts_records(value)
        ]

    def form(self, loss: int) -> tuple[Hashable, tuple[float, ...]]:
        """What leads to the loss, without values; and the constants in it that may have been made from bare values."""
        names: dict[int, int] = {slot: -place - 1 for place, slot in enumerate(self._inputs)}
        calls = self._needed_for([loss])
        for call in calls:
            for slot in call.results:
                names.setdefault(slot, len(names))
        late = [call for call in calls if self._escaped is not None and call.place > self._escaped]
        return (
            (names.get(loss), *(call.form(names) for call in calls)),
            tuple(number for call in late for number in call.numbers()),
        )

    def check(self, loss: int) -> None:
        """Refuse what a replay can't tell about: values of other batches, bare numbers, parts off the tape.

        Raises:
            CoupledRecords: the loss depends on an earlier batch, or on values read from the batch.
            UnprivateStep: a part of the loss can't be followed.
        """
        for call in self._needed_for([loss]):
            inputs = list(call.inputs())
            if any(isinstance(leaf, Stale) for leaf in inputs):
                raise CoupledRecords(
                    "loss must be made of one batch, got a tensor or number of an earlier batch (a moving average, a "
                    "centre, a hidden state, a queue). What is kept from records to the next step is without noise: "
                    "use a public constant, or keep it from what the trained model gives on public records."
                )
            if call.is_broken and call.grad_enabled:
                raise not_followed()
            read = {value for place, value in self._read if place < call.place}
            if read.intersection(call.numbers()):
                raise CoupledRecords(
                    "loss must be made of tensors, got a number that was read from the batch (float(), int()). Keep it "
                    "a tensor, or use a public constant."
                )
            self._check_outside(inputs)

    def _check_outside(self, inputs: Sequence[object]) -> None:
        escaped = self._escaped
        if escaped is None:
            return
        late = [(value, slot) for value, slot, place in self._outside.values() if place > escaped]
        by_slot = {slot: value for value, slot in late}
        for leaf in inputs:
            value = by_slot.get(leaf.number) if isinstance(leaf, Slot) else leaf
            if any(value is other for other, _ in late) and isinstance(value, Tensor) and not says_nothing(value):
                raise CoupledRecords(
                    "loss must be made of torch tensors, got a tensor from elsewhere after values of the batch were "
                    "read into numpy or lists: it may have been computed from other records. Stay with tensors up to "
                    "the loss, compute metrics after it, or make targets and weights in the data set."
                )

    def replay(self, loss: int, inputs: Sequence[Tensor], *, records: int) -> Tensor:
        """Run the calls that the loss at place `loss` depends on, on other inputs.

        Args:
            loss: the loss's place on the tape.
            inputs: tensors of the batch, then of `outside_inputs`, with `records` rows each.
            records: number of records.

        Raises:
            UnprivateStep: the batch's structure is not the noted one.
        """
        value = self.replay_all([loss], inputs, records=records)[loss]
        assert isinstance(value, Tensor)
        return value

    def replay_all(self, wanted: Sequence[int], inputs: Sequence[Tensor], *, records: int) -> dict[int, object]:
        """`replay` for several values at once, by place."""
        places = [*self._inputs, *(slot for _, slot in self._rowed())]
        if len(places) != len(inputs):
            raise UnprivateStep(
                "batches must have the structure that the first record gives them, got another number of tensors. "
                f"Let collate_fn build every batch alike. {HOW_TO_DECLARE}."
            )
        values: dict[int, object] = dict(zip(places, inputs, strict=True))
        for value, slot, _ in self._outside.values():
            if slot is not None and slot not in values:
                rows = torch.arange(records, device=value.device, dtype=value.dtype)
                values[slot] = value if self.outside_is_constant else rows

        def value_of(noted: object) -> object:
            return values[noted.number] if isinstance(noted, Slot) else noted

        for call in self._needed_for(wanted):
            result = call.run(value_of)
            values.update(zip(call.results, [result] if call.is_number else tensors_in(result), strict=False))
        return values

    def _needed_for(self, wanted: Sequence[int]) -> list[Call]:
        """The calls that can change the values: backwards from them, with every change of memory they lie in."""
        needed, kept = set(wanted), []
        memory = {self._memory[slot] for slot in needed if slot in self._memory}
        for call in reversed(self._calls):
            if needed.intersection(call.results) or call.writes in memory:
                kept.append(call)
                slots = [leaf.number for leaf in call.inputs() if isinstance(leaf, Slot)]
                needed.update(slots)
                memory.update(self._memory[slot] for slot in slots if slot in self._memory)
        return kept[::-1]


def not_followed() -> UnprivateStep:
    """What is raised when a loss, or a part of it, is made by something that torch functions don't show."""
    return UnprivateStep(
        "loss must be seen before the step, got one with a part that could not be followed from the module's output to "
        "loss.backward() (a custom autograd function; a penalty on parameters, for which there is weight_decay). "
        f"{HOW_TO_DECLARE}."
    )


def _rows(tensor: Tensor) -> int:
    return tensor.size(0)
