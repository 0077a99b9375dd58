"""How values leave the tensors of a batch (floor 3): sizes, numbers, truth, memory of other libraries."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from sordino.training.loops.calls import Call, map_values
from sordino.training.loops.carried import Carried
from sordino.training.loops.decisions import refuse_decision, refuse_steering
from sordino.training.loops.sizing import counts_rows, rows_of, size_at
from sordino.training.loops.tainted import tainted
from sordino.training.loops.taped import not_noting, plain

__all__ = ["Leaving"]

# How the bare values of a tensor are read: into Python numbers, into truth, into other memory.
_NUMBERS = frozenset({"__float__", "__int__", "__index__", "__complex__"})
_TRUTHS = frozenset({"__bool__", "is_nonzero", "equal", "allclose", "__contains__"})
_ESCAPES = frozenset({"numpy", "__array__", "tolist", "data_ptr", "untyped_storage", "storage", "__dlpack__"})


class Leaving:
    """The part of a tape that sees values leave.

    Args:
        records: number of records in the chunk.
        carried: what the loop carries from batch to batch.

    Attributes:
        is_open: whether calls are noted.
        was_read: whether a bare number was read.
    """

    def __init__(self, records: int, carried: Carried) -> None:
        self.records = records
        self.is_open, self.was_read = True, False
        self._carried = carried
        self._calls: list[Call] = []
        self._slots = self._places = 0
        self._read: list[tuple[int, float]] = []
        # Where values first left for other libraries, and where a number was first read.
        self._escaped: int | None = None
        self._told: int | None = None

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
            self.read(float(len(plain(first))))  # pyright: ignore[reportArgumentType]
        elif name in _TRUTHS or (name == "item" and isinstance(result, bool)):
            self.decide(counts=False)
        elif name in _NUMBERS and isinstance(result, float | int):
            self.read(result)
        elif name in _ESCAPES:
            self._escape()
        elif name == "item":
            self.was_read = True
            self._told = self._next_place() if self._told is None else self._told
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
            return self._note_count(rows_of, (tensor,), result, varies) if place in {0, -tensor.dim()} else result
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
        refuse_steering()
        self._told = self._next_place() if self._told is None else self._told
        # Small whole numbers are on every line of code and would be taken for numbers read from the batch.
        if self.is_open and value not in {-1.0, 0.0, 1.0, 2.0}:
            self._read.append((self._next_place(), float(value)))
