"""Tensors that a loop brings along besides its batch (floor 3): what can be told from their values and memory."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sordino.training.probing.state import fingerprint_of

__all__ = ["Outsider", "Outsiders", "counts_records", "has_equal_rows", "memory_of", "says_nothing"]


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

    Attributes:
        first_row: what each row was before the batch was written into them, if all were alike.
    """

    value: Tensor
    place: int
    slot: int | None = None
    rowed: bool = False
    is_free: bool = True
    is_stale: bool = False
    first_row: Tensor | None = None
    # Version and fingerprint after the batch was written into it; None before.
    _written: tuple[int, Tensor | None] | None = None

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
        rowed = fits and not value.requires_grad and not is_constant
        slot = self._new_slot() if rowed else None
        found = Outsider(value=value, place=place, rowed=rowed, slot=slot, is_stale=is_stale)
        self._found[id(value)] = found
        return found

    def inputs(self, *, are_constant: bool) -> list[Outsider]:
        """Those that count as inputs of a replay: positions of records are made anew instead."""
        chosen = [one for one in self if one.rowed and one.is_free and not are_constant]
        return [one for one in chosen if one.first_row is None and not one.counts_records()]

    def late(self, place: int) -> list[Outsider]:
        """Those that were first used after `place`."""
        return [one for one in self if one.place > place]

    @staticmethod
    def start_of(found: Outsider, records: int, *, is_constant: bool) -> Tensor:
        """What stands for one with a slot, but no input, at the start of a replay of `records` records."""
        value = found.value.detach()
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
