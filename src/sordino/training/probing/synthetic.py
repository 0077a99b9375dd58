"""Made-up records in the structure of a batch (floor 3): its shapes and types, never its values."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sordino.errors import RecordCountMismatch
from sordino.training.structure import map_tensors, tensors_in

__all__ = ["INTEGER_PATTERNS", "Poison", "SyntheticRecords"]

INTEGER_PATTERNS = ("mixed", "ones", "zeros")
"""Values for integers and booleans: positions in a table, labels, masks and lengths are often valid as 0 and 1."""

_SEED = 20160701
# One record this far out makes a batch in which thresholds such as "three standard deviations" are already exceeded.
_FAR_OUT = 50.0


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
    """`count` made-up records and one more, the stand-in for the first.

    Floats are uniform in (0, 1), which is valid for features and for probabilities. Integers follow `pattern`:
    "mixed" gives the first record ones and its stand-in zeros with a one at the end, so that labels, masks and the
    number of valid tokens all change.

    Args:
        structure: a batch of any number of records.
        rows: the number of records of `structure`; tensors with that first dimension hold one row a record.
        count: number of records.
        pattern: one of `INTEGER_PATTERNS`.
        example: public tensors that stand for the first of `structure`, each with more than `count` records or with
            none; their values are used.
        far_out: make the features of the second record large, so that others look small beside it.

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
        far_out: bool = False,
    ) -> None:
        self.count = count
        self._structure = structure
        self._per_record = [tensor.dim() > 0 and tensor.size(0) == rows for tensor in tensors_in(structure)]
        if not any(self._per_record):
            raise RecordCountMismatch(
                "batch must hold a tensor with the records first, got none. Give every input the shape (records, …)."
            )
        generator = torch.Generator().manual_seed(_SEED)
        self._values = [
            _values((count + 1, *tensor.shape[1:]) if rowed else tuple(tensor.shape), tensor, pattern, generator)
            for tensor, rowed in zip(tensors_in(structure), self._per_record, strict=True)
        ]
        for place, (given, rowed) in enumerate(zip(example, self._per_record, strict=False)):
            if rowed and (not given.dim() or given.size(0) <= count):
                raise RecordCountMismatch(
                    f"public_batch must hold at least {count + 1} records, got fewer. Invent some more."
                )
            self._values[place] = given[: count + 1].detach().clone() if rowed else given.detach().clone()
        for values, rowed in zip(self._values, self._per_record, strict=True):
            if far_out and rowed and values.dtype.is_floating_point:
                values[1] *= _FAR_OUT

    def batch(self, places: Sequence[int], *, poison: Poison | None = None) -> object:
        """The records at `places`, `count` being the stand-in; `poison` changes the first of them."""
        parts = iter(enumerate(zip(self._values, self._per_record, strict=True)))

        def take(_: Tensor) -> Tensor:
            place, (values, rowed) = next(parts)
            taken = values[list(places)] if rowed else values.clone()
            if poison is not None and rowed:
                taken[0] = poison.applied(taken[0], place)
            return taken

        return map_tensors(take, self._structure)

    def places(self, *, floating: bool) -> list[int]:
        """The tensors, by their place in the batch, that hold floating-point numbers, or integers, by record."""
        return [
            place
            for place, (values, rowed) in enumerate(zip(self._values, self._per_record, strict=True))
            if rowed and values.dtype != torch.bool and values.dtype.is_floating_point is floating
        ]

    def without_first(self) -> list[int]:
        """The places of a batch in which the first record is replaced by its stand-in."""
        return [self.count, *range(1, self.count)]


def _values(shape: tuple[int, ...], like: Tensor, pattern: str, generator: torch.Generator) -> Tensor:
    device = torch.device("cpu") if like.device.type == "meta" else like.device
    if like.dtype.is_floating_point or like.dtype.is_complex:
        return torch.rand(shape, generator=generator).to(device, like.dtype)
    if pattern != "mixed":
        return torch.full(shape, int(pattern == "ones"), dtype=like.dtype, device=device)
    values = torch.randint(2, shape, generator=generator)
    if len(shape) > 1 and values.numel():
        values[..., -1] = 1
    if len(shape) and values.numel():
        values[0], values[-1] = 1, 0
        if len(shape) > 1:
            values[-1][..., -1] = 1
    return values.to(device, like.dtype)
