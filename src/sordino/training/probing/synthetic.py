"""Made-up records in the structure of a batch (floor 3): its shapes and types, never its values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sordino.errors import RecordCountMismatch
from sordino.training.structure import map_tensors, tensors_in

__all__ = ["EXAMPLES", "INTEGER_PATTERNS", "Poison", "SyntheticRecords"]

INTEGER_PATTERNS = ("mixed", "ones", "zeros")
"""Values for integers and booleans: positions in a table, labels, masks and lengths are often valid as 0 and 1."""

EXAMPLES = 5
"""So many public records at least stand for made-up ones."""

_SEED = 20160701
# In every `_PERIOD` records of a diverse batch, these have their features multiplied so. One record 50 times as far out
# makes a batch in which thresholds such as "three standard deviations" are already exceeded.
_PERIOD = 7
_FACTORS = {1: 50.0, 3: -1.0, 5: 0.0}


@dataclass(frozen=True, kw_only=True)
class Poison:
    """What one record is made to hold.

    Args:
        floats: value of every entry of a floating tensor, or None to leave them.
        integers: value of every entry of an integer tensor, "range" for 2, 3, 4, …, or None to leave them.
        place: the only tensor of the batch that is changed, or None for all of them.
    """

    floats: float | None = None
    integers: int | str | None = None
    place: int | None = None

    def applied(self, row: Tensor, place: int) -> Tensor:
        """The record's part of the tensor at `place` as it is under this poison."""
        if self.place not in {None, place} or row.dtype == torch.bool:
            return row
        if row.dtype.is_floating_point or row.dtype.is_complex:
            return row if self.floats is None else torch.full_like(row, self.floats)
        if self.integers is None:
            return row
        if isinstance(self.integers, str):
            return torch.arange(2, row.numel() + 2, device=row.device).reshape(row.shape).to(row.dtype)
        smallest = torch.iinfo(row.dtype).min
        return torch.full_like(row, max(self.integers, smallest))


class SyntheticRecords:
    """`count` made-up records, and a stand-in for each of them.

    Floats are uniform in (0, 1), which is valid for features and for probabilities. Integers follow `pattern`: with
    "mixed" each stand-in has the other values of 0 and 1 than its record, so that labels, masks and the number of
    valid tokens all change.

    Args:
        structure: a batch of any number of records.
        rows: the number of records of `structure`; tensors with that first dimension hold one row a record.
        count: number of records.
        pattern: one of `INTEGER_PATTERNS`.
        example: public tensors that stand for the first of `structure`, each with five records or more; their values
            are used, in turn.
        diverse: give some records features far out, of the other sign, or zero, so that thresholds are exceeded
            already and others look small beside them.

    Raises:
        RecordCountMismatch: no tensor has the records first, or the example is too short.
    """

    def __init__(
        self,
        structure: object,
        *,
        rows: int,
        count: int,
        pattern: str,
        example: Sequence[Tensor] = (),
        diverse: bool = False,
    ) -> None:
        self.count = count
        self._structure = structure
        self._per_record = [tensor.dim() > 0 and tensor.size(0) == rows for tensor in tensors_in(structure)]
        self._devices = [_device(tensor) for tensor in tensors_in(structure)]
        if not any(self._per_record):
            raise RecordCountMismatch(
                "batch must hold a tensor with the records first, got none. Give every input the shape (records, …)."
            )
        generator = torch.Generator().manual_seed(_SEED)
        self._values = [
            _values((2 * count, *tensor.shape[1:]) if rowed else tuple(tensor.shape), tensor, pattern, generator)
            for tensor, rowed in zip(tensors_in(structure), self._per_record, strict=True)
        ]
        for place, (given, rowed) in enumerate(zip(example, self._per_record, strict=False)):
            if rowed and (not given.dim() or given.size(0) < EXAMPLES):
                raise RecordCountMismatch(
                    f"public_batch must hold at least {EXAMPLES} records, got fewer. Invent some more."
                )
            self._values[place] = given.detach()[_in_turn(count, len(given))] if rowed else given.detach().clone()
        for values, rowed in zip(self._values, self._per_record, strict=True):
            if diverse and rowed and values.dtype.is_floating_point:
                for first, factor in _FACTORS.items():
                    values[first:count:_PERIOD] *= factor

    def batch(self, places: Sequence[int], poisons: Mapping[int, Poison] | None = None) -> object:
        """The records at `places`; the stand-in for record i is at `count` + i.

        Args:
            places: which records, in order; a record may come more than once.
            poisons: what the records at these positions of the batch are made to hold.
        """
        parts = iter(enumerate(zip(self._values, self._per_record, self._devices, strict=True)))

        def take(_: Tensor) -> Tensor:
            place, (values, rowed, device) = next(parts)
            taken = values[list(places)] if rowed else values.clone()
            for position, poison in (poisons or {}).items() if rowed else ():
                taken[position] = poison.applied(taken[position], place)
            return taken.to(device)

        return map_tensors(take, self._structure)

    def places(self, *, floating: bool) -> list[int]:
        """The tensors, by their place in the batch, that hold floating-point numbers, or integers, by record."""
        return [
            place
            for place, (values, rowed) in enumerate(zip(self._values, self._per_record, strict=True))
            if rowed and values.dtype != torch.bool and values.dtype.is_floating_point is floating
        ]


def _in_turn(count: int, given: int) -> list[int]:
    """The rows of an example that are records, then those that are stand-ins: for each a row next to its own."""
    return [place % given for place in range(count)] + [(place + 1) % given for place in range(count)]


def _device(tensor: Tensor) -> torch.device:
    return torch.device("cpu") if tensor.device.type == "meta" else tensor.device


def _values(shape: tuple[int, ...], like: Tensor, pattern: str, generator: torch.Generator) -> Tensor:
    """Values on the CPU, so that a large batch is on its device once."""
    if like.dtype.is_floating_point or like.dtype.is_complex:
        return torch.rand(shape, generator=generator).to(like.dtype)
    if pattern != "mixed":
        return torch.full(shape, int(pattern == "ones"), dtype=like.dtype)
    values = torch.randint(2, shape, generator=generator)
    if shape and values.numel():
        half = len(values) // 2
        values[0] = 1
        if half:
            values[half : 2 * half] = 1 - values[:half]
        if len(shape) > 1 and shape[-1] > 1:
            values[..., -1] = 1
    return values.to(like.dtype)
