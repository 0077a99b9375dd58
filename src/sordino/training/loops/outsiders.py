"""Tensors that a loop brings along besides its batch (floor 3): what can be told from their values and memory."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from sordino.training.probing.state import fingerprint_of

__all__ = ["Outsider", "Outsiders", "Reading", "counts_records", "has_equal_rows", "memory_of", "says_nothing"]


Reading = Literal["rows", "columns", "constants"]
"""How a replay reads outsiders that are as long as there are records: with a row a record; zeros and ones with the
records in another dimension; or as constants whose size fits by chance."""


@dataclass(eq=False, kw_only=True)
class Outsider:
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
        self._written = self.value._version, fingerprint_of(self.value)

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
        now = None if bits is None else fingerprint_of(self.value)
        return self.value._version == version and (bits is None or (now is not None and torch.equal(bits, now)))


class Outsiders:
    """The outsiders of one tape, by identity.

    Args:
        records: number of records in the batch.
        new_slot: gives out places for values on the tape.
    """

    def __init__(self, records: int, new_slot: Callable[[], int]) -> None:
        self._records, self._new_slot = records, new_slot
        self._found: dict[int, Outsider] = {}

    def __iter__(self) -> Iterator[Outsider]:
        return iter(self._found.values())

    def clear(self) -> None:
        """Let go of them."""
        self._found.clear()

    def get(self, value: Tensor) -> Outsider | None:
        """The entry of `value`, if it was seen before."""
        return self._found.get(id(value))

    def add(self, value: Tensor, place: int, *, is_stale: bool, is_constant: bool) -> Outsider:
        """A new entry; a tensor with a row a record takes a slot, unless it is known to be constant."""
        fits = value.dim() > 0 and value.size(0) == self._records
        varies = not value.requires_grad and not is_constant
        rowed = fits and varies
        column = self._column(value) if varies and not is_stale else None
        slot = self._new_slot() if rowed or column is not None else None
        found = Outsider(value=value, place=place, rowed=rowed, slot=slot, is_stale=is_stale, column=column)
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

    def inputs(self, reading: Reading) -> list[Outsider]:
        """Those that count as inputs of a replay: positions of records are made anew instead."""
        chosen = [one for one in self if one.rowed and one.is_free and reading != "constants"]
        chosen = [one for one in chosen if one.column is None or reading != "columns"]
        return [one for one in chosen if one.first_row is None and not one.counts_records()]

    def late(self, place: int) -> list[Outsider]:
        """Those that were first used after `place`."""
        return [one for one in self if one.place > place]

    @staticmethod
    def start_of(found: Outsider, records: int, reading: Reading) -> Tensor:
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


def memory_of(tensor: Tensor) -> int:
    """Where the tensor's memory begins; views of one tensor have it in common."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0  # No memory of its own: then it could lie in any.


def counts_records(value: Tensor) -> bool:
    """Whether it is 0, 1, 2, …: positions of records, which say nothing about them."""
    integer = not value.dtype.is_floating_point and not value.dtype.is_complex and value.dtype != torch.bool
    return value.dim() == 1 and integer and bool((value == torch.arange(len(value), device=value.device)).all())


def says_nothing(value: Tensor) -> bool:
    """Whether it holds 0, 1, 2, …, or nothing but zeros or nothing but ones."""
    return counts_records(value) or bool((value == 0).all()) or bool((value == 1).all())
