"""Indices checked before a kernel reads them (floor 3).

The probe tries labels and ids that may not exist. On the CPU most kernels say so; on an accelerator an index outside
its table ends the process, and a few kernels read whatever lies there.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["IndicesChecked"]


class IndicesChecked(TorchDispatchMode):
    """Inside, an index outside the table it is for raises ``IndexError`` before the kernel runs."""

    def __torch_dispatch__(
        self,
        func: "torch._ops.OpOverload",  # pyright: ignore[reportPrivateUsage]
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        check = _CHECKS.get(func.overloadpacket.__name__)
        if check is not None:
            check(args)
        return func(*args, **(kwargs or {}))


def _require(indices: object, size: int, *, also: object = None, signed: bool = False) -> None:
    if not isinstance(indices, Tensor) or indices.dtype == torch.bool or not indices.numel():
        return
    inside = (indices >= (-size if signed else 0)) & (indices < size)
    if isinstance(also, int):
        inside |= indices == also
    if not bool(inside.all()):
        raise IndexError("index out of range")


def _table(args: Sequence[object]) -> None:
    """Rows of a table: (table, indices, …)."""
    if isinstance(args[0], Tensor):
        _require(args[1], args[0].size(0))


def _along(args: Sequence[object]) -> None:
    """Places along a dimension: (tensor, dim, indices, …)."""
    if isinstance(args[0], Tensor) and isinstance(args[1], int) and args[0].dim():
        _require(args[2], args[0].size(args[1]))


def _advanced(args: Sequence[object]) -> None:
    """Indexing as in ``tensor[a, b]``: (tensor, list of indices, …)."""
    if isinstance(args[0], Tensor) and isinstance(args[1], list | tuple):
        if any(isinstance(index, Tensor) and index.dtype == torch.bool for index in args[1]):
            return
        for size, index in zip(args[0].shape, args[1], strict=False):
            _require(index, size, signed=True)


def _classes(args: Sequence[object]) -> None:
    """Labels: (log-probabilities, target, weight, reduction, ignore_index)."""
    if isinstance(args[0], Tensor):
        _require(args[1], args[0].size(1 if args[0].dim() > 1 else 0), also=args[4] if len(args) > 4 else -100)


def _symbols(args: Sequence[object]) -> None:
    """Alignment: (log-probabilities (T, B, classes), targets, input lengths, target lengths, …)."""
    if not isinstance(args[0], Tensor):
        return
    _require(args[1], args[0].size(-1))
    longest = args[1].size(-1) if isinstance(args[1], Tensor) else 0
    _require(torch.as_tensor(args[2]), args[0].size(0) + 1)
    _require(torch.as_tensor(args[3]), longest + 1)


_CHECKS: dict[str, Callable[[Sequence[object]], None]] = {
    "embedding": _table,
    "_embedding_bag": _table,
    "_embedding_bag_forward_only": _table,
    "index_select": _along,
    "gather": _along,
    **dict.fromkeys(("scatter", "scatter_", "scatter_add", "scatter_add_", "index_add", "index_add_"), _along),
    **dict.fromkeys(("scatter_reduce", "scatter_reduce_", "index_copy", "index_copy_", "index_fill_"), _along),
    **dict.fromkeys(("index", "index_put", "index_put_", "_index_put_impl_"), _advanced),
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward", "multi_margin_loss"), _classes),
    **dict.fromkeys(("_ctc_loss", "_ctc_loss.Tensor", "_cudnn_ctc_loss"), _symbols),
}
