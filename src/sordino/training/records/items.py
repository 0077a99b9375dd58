"""Made-up items in the structure of one item of a data set (floor 3): what `collate_fn` is tried on.

Only shapes, types and keys of the example are used, never its values.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeGuard

import numpy as np
import torch
from torch import Tensor

from sordino.errors import CoupledRecords
from sordino.training.structure import is_leaf, rebuild

__all__ = ["Items", "made_up_items", "public_items", "substitute_items"]

_SEED = 20160701
# What code may single out: missing, to be ignored, out of range. Small integer types take the nearest they have.
_STRANGE = ((float("nan"), -1), (1e6, 1000), (-1e6, -100), (float("inf"), 255))
# Longer by one, longer than the bucket that a collate function rounds up to, and shorter.
_OTHER_SIZES: tuple[Callable[[int], int], ...] = (lambda n: n + 1, lambda n: 2 * n + 257, lambda n: max(n - 1, 1))
_WORDS = ("one", "two")


@dataclass(frozen=True, kw_only=True)
class Items:
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


def made_up_items(example: object, count: int) -> Items:
    """`count` items in the structure of `example`, and stand-ins with other values, strange values, other lengths.

    Raises:
        CoupledRecords: the example holds something that can't be made up.
    """
    chance = random.Random(_SEED)  # noqa: S311 (made-up values, no secret)
    items = [_item(example, _Filling(chance=chance)) for _ in range(count)]
    sizes: set[int] = set()

    def noted(size: int) -> int:
        sizes.add(size)
        return size

    others = [_item(example, _Filling(chance=chance, size=noted))]
    others += [_item(example, _Filling(chance=chance, strange=strange)) for strange in _STRANGE]
    for old in sorted(sizes - {0}):
        for change in _OTHER_SIZES:
            size = _Exchange(old=old, new=change(old))
            others.append(_item(example, _Filling(chance=chance, size=size)))
        # What fills up shorter records must not come from the longest one's values.
        size = _Exchange(old=old, new=old + 1)
        others.append(_item(example, _Filling(chance=chance, size=size, strange=(7.0, 3))))
    return Items(items=items, others=others)


def substitute_items(example: object, count: int) -> list[object]:
    """`count` items that ordinary loops run on: floats in (0, 1); labels, masks, lengths and positions all 1."""
    chance = random.Random(_SEED)  # noqa: S311 (made-up values, no secret)
    return [_item(example, _Filling(chance=chance, strange=(None, 1))) for _ in range(count)]


def public_items(records: Sequence[object], count: int) -> Items:
    """`count` public records, repeated where there are fewer, and every one of them as a stand-in."""
    chosen = [records[place % len(records)] for place in range(count)]
    return Items(items=chosen, others=list(reversed(records)))


@dataclass(frozen=True, kw_only=True)
class _Exchange:
    old: int
    new: int

    def __call__(self, size: int) -> int:
        return self.new if size == self.old else size


def _item(example: object, filling: _Filling) -> object:
    if _is_sequence(example):
        return [_leaf(example[0], filling) for _ in range(filling.size(len(example)))]
    return _leaf(example, filling) if is_leaf(example) else rebuild(example, lambda part: _item(part, filling))


def _is_sequence(part: object) -> TypeGuard[list[object]]:
    """Lists of numbers or words may vary in length from record to record; other containers belong to the structure."""
    return isinstance(part, list) and bool(part) and all(isinstance(x, int | float | str | np.generic) for x in part)


def _leaf(example: object, filling: _Filling) -> object:
    made = _made_up(example, filling)
    if made is None and example is not None:
        raise CoupledRecords(
            f"items of the data set must be made of tensors, arrays, numbers and texts for collate_fn to be tried on "
            f"made-up ones, got {type(example).__name__}. Pass public_records=, five public or invented items."
        )
    return made


def _made_up(example: object, filling: _Filling) -> object:
    if isinstance(example, Tensor) and example.layout is torch.strided:
        return _tensor(example.shape, example.dtype, filling).to(example.device)
    if isinstance(example, np.ndarray | np.generic) and example.dtype.kind in "biufc":
        dtype = torch.from_numpy(np.zeros(0, dtype=example.dtype)).dtype if example.dtype.str[1:] != "f16" else None
        if dtype is None:
            return None
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
    return None


def _tensor(shape: Sequence[int], dtype: torch.dtype, filling: _Filling) -> Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        return filling.floats(shape).to(dtype)
    low, high = (0, 1) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    return filling.integers(shape, low, high).to(dtype)
