"""Synthetic records in the structure of a batch: its shapes and types, never its values."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

import numpy as np
import torch
from torch import Tensor

from sordino.errors import CoupledRecords, RecordCountMismatch
from sordino.training.pytree import is_leaf, map_tensors, tensors_in, tree_rebuild

INTEGER_PATTERNS = ("mixed", "ones", "zeros")
"""Values for integers and booleans: positions in a table, labels, masks and lengths are often valid as 0 and 1."""

EXAMPLES = 5
"""So many public records at least stand for synthetic ones."""

_SEED = 20160701
# In every `_PERIOD` records of a diverse batch, these have their features multiplied so. One record 50 times as far out
# makes a batch in which thresholds such as "three standard deviations" are already exceeded.
_PERIOD = 7
_FACTORS = {1: 50.0, 3: -1.0, 5: 0.0}


@dataclass(frozen=True, kw_only=True)
class AdversarialValue:
    """What one record is made to hold.

    Args:
        floats: value of every entry of a floating tensor, or None to leave them.
        integers: value of every entry of an integer tensor, "range" for 2, 3, 4, …, or None to leave them.
        tensor: the index of the only tensor of the batch that is changed, or None for all of them.
    """

    floats: float | None = None
    integers: int | str | None = None
    tensor: int | None = None

    def applied(self, row: Tensor, tensor: int) -> Tensor:
        """The record's part of the tensor with index `tensor`, holding this value."""
        if self.tensor not in {None, tensor} or row.dtype == torch.bool:
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
    """`count` synthetic records, and a stand-in for each of them.

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
            already and others look small next to them.

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
        self.count, self.pattern = count, pattern
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
        for index, (given, rowed) in enumerate(zip(example, self._per_record, strict=False)):
            if rowed and (not given.dim() or given.size(0) < EXAMPLES):
                raise RecordCountMismatch(
                    f"public_batch must hold at least {EXAMPLES} records, got fewer. Invent some more."
                )
            self._values[index] = given.detach()[_in_turn(count, len(given))] if rowed else given.detach().clone()
        for values, rowed in zip(self._values, self._per_record, strict=True):
            if diverse and rowed and values.dtype.is_floating_point:
                for first, factor in _FACTORS.items():
                    values[first:count:_PERIOD] *= factor

        self._tensors_of = {
            floating: [
                index
                for index, (values, rowed) in enumerate(zip(self._values, self._per_record, strict=True))
                if rowed and values.dtype != torch.bool and values.dtype.is_floating_point is floating
            ]
            for floating in (False, True)
        }

    def batch(self, records: Sequence[int], adversarial: Mapping[int, AdversarialValue] | None = None) -> object:
        """Some of the records; the stand-in for record i is number `count` + i.

        Args:
            records: which records, in order; a record may come more than once.
            adversarial: what the records at these positions of the batch are made to hold.
        """
        holding: dict[AdversarialValue, list[int]] = {}
        for position, value in (adversarial or {}).items():
            holding.setdefault(value, []).append(position)
        parts = iter(enumerate(zip(self._values, self._per_record, self._devices, strict=True)))

        def take(_: Tensor) -> Tensor:
            index, (values, rowed, device) = next(parts)
            taken = values[list(records)] if rowed else values.clone()
            for value, positions in holding.items() if rowed else ():
                row = taken[positions[0]]
                held = value.applied(row, index)
                if held is not row:
                    taken[positions] = held
            return taken.to(device)

        return map_tensors(take, self._structure)

    def tensors_of(self, *, floating: bool) -> list[int]:
        """The indices of the tensors that hold floating-point numbers, or integers, by record."""
        return self._tensors_of[floating]


def _in_turn(count: int, given: int) -> list[int]:
    """The rows of an example that are records, then those that are stand-ins: for each a row next to its own."""
    return [index % given for index in range(count)] + [(index + 1) % given for index in range(count)]


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


# ----------------------------------------------------------------------------------------------------------------------
# Synthetic items in the structure of one item of a dataset: what `collate_fn` is tried on.
#
# Only shapes, types and keys of the example are used, never its values.
# ----------------------------------------------------------------------------------------------------------------------


# What code may single out: missing, to be ignored, out of range. Small integer types take the nearest they have.
_STRANGE = ((float("nan"), -1), (1e6, 1000), (-1e6, -100), (float("inf"), 255))
# Longer by one, longer than the bucket that a collate function rounds up to, and shorter.
_OTHER_SIZES: tuple[Callable[[int], int], ...] = (lambda n: n + 1, lambda n: 2 * n + 257, lambda n: max(n - 1, 1))
_WORDS = ("one", "two")


@dataclass(frozen=True, kw_only=True)
class SyntheticItems:
    """Items to try `collate_fn` on.

    Args:
        items: of ordinary values.
        others: stand-ins for any one of `items`. The first is as ordinary as they are.
    """

    items: list[object]
    others: list[object]


@dataclass(frozen=True, kw_only=True)
class _Filling:
    """How leaves are filled: at random, or every number with the same value; `size` changes dimensions."""

    chance: random.Random
    strange: tuple[float | None, int] | None = None
    size: Callable[[int], int] = lambda size: size

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return tuple(self.size(size) for size in shape)

    def floats(self, shape: Sequence[int]) -> Tensor:
        if self.strange is not None and self.strange[0] is not None:
            return torch.full(self.shape(shape), self.strange[0], dtype=torch.float64)
        return torch.rand(self.shape(shape), generator=self._generator(), dtype=torch.float64)

    def integers(self, shape: Sequence[int], low: int, high: int) -> Tensor:
        if self.strange is not None:
            return torch.full(self.shape(shape), min(max(self.strange[1], low), high), dtype=torch.int64)
        return torch.randint(2, self.shape(shape), generator=self._generator())

    def _generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.chance.getrandbits(40))


def make_synthetic_items(example: object, count: int) -> SyntheticItems:
    """`count` items in the structure of `example`, and stand-ins with other values, strange values, other lengths.

    Raises:
        CoupledRecords: the example holds something that can't be generated.
    """
    chance = random.Random(_SEED)  # noqa: S311 (synthetic values, no secret)
    items = [_item(example, _Filling(chance=chance)) for _ in range(count)]
    sizes: set[int] = set()

    def noted(size: int) -> int:
        sizes.add(size)
        return size

    others = [_item(example, _Filling(chance=chance, size=noted))]
    others += [_item(example, _Filling(chance=chance, strange=strange)) for strange in _STRANGE]
    for old in sorted(sizes - {0}):
        for change in _OTHER_SIZES:
            others.append(_item(example, _Filling(chance=chance, size=_with_size(old, change(old)))))
        # What fills up shorter records must not come from the longest one's values.
        others.append(_item(example, _Filling(chance=chance, size=_with_size(old, old + 1), strange=(7.0, 3))))
    return SyntheticItems(items=items, others=others)


def substitute_items(example: object, count: int) -> list[object]:
    """`count` items that ordinary loops run on: floats in (0, 1); labels, masks, lengths and positions all 1."""
    chance = random.Random(_SEED)  # noqa: S311 (synthetic values, no secret)
    return [_item(example, _Filling(chance=chance, strange=(None, 1))) for _ in range(count)]


def public_items(records: Sequence[object], count: int) -> SyntheticItems:
    """`count` public records, repeated where there are fewer, and every one of them as a stand-in."""
    chosen = [records[index % len(records)] for index in range(count)]
    return SyntheticItems(items=chosen, others=list(reversed(records)))


def _with_size(old: int, new: int) -> Callable[[int], int]:
    return lambda size: new if size == old else size


def _item(example: object, filling: _Filling) -> object:
    if _is_sequence(example):
        return [_leaf(example[0], filling) for _ in range(filling.size(len(example)))]
    return _leaf(example, filling) if is_leaf(example) else tree_rebuild(example, lambda part: _item(part, filling))


def _is_sequence(part: object) -> TypeGuard[list[object]]:
    """Lists of numbers or words may vary in length from record to record; other containers belong to the structure."""
    return isinstance(part, list) and bool(part) and all(isinstance(x, int | float | str | np.generic) for x in part)


def _leaf(example: object, filling: _Filling) -> object:
    if example is None:
        return None
    if isinstance(example, Tensor) and example.layout is torch.strided:
        return _tensor(example.shape, example.dtype, filling).to(example.device)
    is_array = isinstance(example, np.ndarray | np.generic)
    if is_array and example.dtype.kind in "biufc" and example.dtype.str[1:] != "f16":
        dtype = torch.from_numpy(np.zeros(0, dtype=example.dtype)).dtype
        made = _tensor(example.shape, dtype, filling).numpy()
        return made if isinstance(example, np.ndarray) else made[()]
    if isinstance(example, bool):
        return bool(filling.integers((), 0, 1))
    if isinstance(example, int):
        return int(filling.integers((), -(2**31), 2**31))
    if isinstance(example, float):
        return float(filling.floats(()))
    if isinstance(example, str | bytes):
        text = " ".join(filling.chance.choice(_WORDS) for _ in range(filling.size(2)))
        return text if isinstance(example, str) else text.encode()
    raise CoupledRecords(
        f"items of the dataset must be made of tensors, arrays, numbers and texts for collate_fn to be tried on "
        f"synthetic ones, got {type(example).__name__}. Pass public_records=, five public or invented items."
    )


def _tensor(shape: Sequence[int], dtype: torch.dtype, filling: _Filling) -> Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        return filling.floats(shape).to(dtype)
    low, high = (0, 1) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    return filling.integers(shape, low, high).to(dtype)
