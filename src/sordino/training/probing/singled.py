"""Values that code singles out by comparing with them (floor 3): marks of padding, missing labels, special tokens.

``labels != 50256`` treats one value in its own way. No list of marks has them all, but the comparison tells which.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["SingledOut"]

_EQUAL = frozenset({"eq", "ne", "eq_", "ne_"})
_ORDER = frozenset({"lt", "le", "gt", "ge", "lt_", "le_", "gt_", "ge_"})
_LABELLED = frozenset({"nll_loss_forward", "nll_loss2d_forward"})
_SIZED_BY_VALUES = frozenset({"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive"})
_READING = frozenset({"_local_scalar_dense", "equal", "is_nonzero"})
# So many values of each kind are tried; code that compares with more has a reason that is not special values.
_MOST = 12


class SingledOut(TorchDispatchMode):
    """Inside, notes the numbers that tensors are compared with, and what the precision of results rests on.

    Attributes:
        integers: numbers that integer tensors are compared with; for an order also their neighbours.
        floats: numbers that floating tensors are compared with for equality.
        is_half: whether something was computed in half precision.
        sizes_follow_values: whether shapes depended on values, as they do where records are sent to experts.
        reads_values: whether Python read a number out of a tensor, and may branch on it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_half = self.sizes_follow_values = self.reads_values = False
        self.integers: dict[int, None] = {}
        self.floats: dict[float, None] = {}

    def __torch_dispatch__(
        self,
        func: "torch._ops.OpOverload",  # pyright: ignore[reportPrivateUsage]
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        name = func.overloadpacket.__name__
        if name in _EQUAL or name in _ORDER:
            self._compared(args, ordered=name in _ORDER)
        elif name == "isin" and len(args) > 1:
            for value in _few(args[1]):
                self._compared((args[0], value), ordered=False)
        elif name in _LABELLED and len(args) > 4:
            self._compared((args[1], args[4]), ordered=False)
        self.sizes_follow_values = self.sizes_follow_values or name in _SIZED_BY_VALUES
        self.reads_values = self.reads_values or name in _READING
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.dtype in {torch.float16, torch.bfloat16}:
            self.is_half = True
        return result

    def _compared(self, args: Sequence[object], *, ordered: bool) -> None:
        tensor, other = args[0], args[1] if len(args) > 1 else None
        if not isinstance(tensor, Tensor) or tensor.dtype == torch.bool or tensor.dtype.is_complex:
            return
        values = _few(other)
        if len(values) != 1:
            return
        (value,) = values
        if tensor.dtype.is_floating_point:
            if not ordered and len(self.floats) < _MOST:
                self.floats[float(value)] = None
            return
        for near in (value - 1, value, value + 1) if ordered else (value,):
            if near == int(near) and len(self.integers) < _MOST:
                self.integers[int(near)] = None


def _few(values: object) -> list[float]:
    """The numbers in a number or a small tensor."""
    if isinstance(values, Tensor):
        return values.flatten().tolist() if values.numel() <= _MOST and not values.dtype.is_complex else []
    return [values] if isinstance(values, int | float) and values == values and abs(values) < 2**62 else []
