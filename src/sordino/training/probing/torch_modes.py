"""Modes of torch that look at every call in a block: class weights, bounds of indices, comparisons, cut gradients."""

import inspect
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from sordino.errors import CoupledRecords
from sordino.training.pytree import tensors_in

Function = Callable[..., object]
"""A function of torch, as a `TorchFunctionMode` sees it."""

Operator = torch._ops.OpOverload  # pyright: ignore[reportPrivateUsage]
"""An operation of torch, as a `TorchDispatchMode` sees it."""

Args = tuple[object, ...]
Kwargs = Mapping[str, object] | None


# ----------------------------------------------------------------------------------------------------------------------
# Mean classification losses in a private forward: divided by all their targets, a public number.
# ----------------------------------------------------------------------------------------------------------------------


_CLASS_LOSSES: dict[Callable[..., object], inspect.Signature] = {
    function: inspect.signature(function) for function in (F.cross_entropy, F.nll_loss)
}


def with_public_divisor(function: Function, args: Args, kwargs: Mapping[str, object]) -> object:
    """Call a function of torch; a mean cross entropy or negative log likelihood divides by the number of all targets.

    Torch divides by the targets that are not ``ignore_index``: one record's ignored targets would scale up the gradient
    of every other record. The number of all targets, records × positions, follows from shapes alone. An ignored target
    adds nothing; without ignored targets the result is torch's own.
    """
    call = _mean_over_targets(function, args, kwargs)
    if call is None or call.arguments["weight"] is not None or not _targets(call).numel():
        return function(*args, **kwargs)
    call.arguments["reduction"] = "sum"
    total = function(*call.args, **call.kwargs)
    assert isinstance(total, Tensor)
    return total / _targets(call).numel()


def _mean_over_targets(function: Function, args: Args, kwargs: Mapping[str, object]) -> inspect.BoundArguments | None:
    """The call with its defaults, if it is one of a mean classification loss with targets that are classes."""
    signature = _CLASS_LOSSES.get(function)
    if signature is None:
        return None
    call = signature.bind(*args, **kwargs)
    call.apply_defaults()
    target = call.arguments["target"]
    is_class = isinstance(target, Tensor) and not target.is_floating_point()
    old_options = call.arguments["size_average"] is not None or call.arguments["reduce"] is not None
    return call if call.arguments["reduction"] == "mean" and is_class and not old_options else None


def _targets(call: inspect.BoundArguments) -> Tensor:
    target = call.arguments["target"]
    assert isinstance(target, Tensor)
    return target


class PublicDivisor(TorchFunctionMode):
    """Inside, `with_public_divisor` for every call."""

    def __torch_function__(self, func: Function, types: object, args: Args = (), kwargs: Kwargs = None) -> object:
        # Every function of torch in a forward pass comes here.
        if func not in _CLASS_LOSSES:
            return func(*args, **(kwargs or {}))
        return with_public_divisor(func, args, kwargs or {})


class NoClassWeights(TorchFunctionMode):
    """Refuses mean classification losses with class weights: they divide by the weights of the whole batch.

    One record's label then scales every other record's gradient.
    """

    def __torch_function__(self, func: Function, types: object, args: Args = (), kwargs: Kwargs = None) -> object:
        call = _mean_over_targets(func, args, kwargs or {})
        weight = None if call is None else call.arguments["weight"]
        if isinstance(weight, Tensor) and weight.numel() and bool((weight != weight.flatten()[0]).any()):
            raise CoupledRecords(
                "loss must not divide by the class weights of the batch: a mean cross entropy with class weights "
                "lets one label scale every other record. Use reduction='none' and take .mean() of the result."
            )
        return func(*args, **(kwargs or {}))


# ----------------------------------------------------------------------------------------------------------------------
# Indices checked before a kernel reads them.
#
# The probe tries labels and ids that may not exist. On the CPU most kernels say so; on an accelerator an index outside
# its table ends the process, and a few kernels read whatever lies there.
# ----------------------------------------------------------------------------------------------------------------------


class IndexBoundsCheck(TorchDispatchMode):
    """Inside, an index outside the table it is for raises ``IndexError`` before the kernel runs."""

    def __torch_dispatch__(self, func: Operator, types: object, args: Args = (), kwargs: Kwargs = None) -> object:
        check = _CHECKS.get(func.overloadpacket.__name__)
        if check is not None and isinstance(args[0], Tensor):
            check(args[0], *args[1:])
        return func(*args, **(kwargs or {}))


def _require(indices: object, size: int, *, also: object = None, signed: bool = False) -> None:
    if not isinstance(indices, Tensor) or indices.dtype == torch.bool or not indices.numel():
        return
    inside = (indices >= (-size if signed else 0)) & (indices < size)
    if isinstance(also, int):
        inside |= indices == also
    if not bool(inside.all()):
        raise IndexError("index out of range")


def _table(table: Tensor, indices: object, *_: object) -> None:
    """Rows of a table."""
    _require(indices, table.size(0))


def _along(tensor: Tensor, dim: object, indices: object, *_: object) -> None:
    """Positions along a dimension."""
    if isinstance(dim, int) and tensor.dim():
        _require(indices, tensor.size(dim))


def _advanced(tensor: Tensor, indices: object, *_: object) -> None:
    """Indexing as in ``tensor[a, b]``."""
    if not isinstance(indices, list | tuple):
        return
    if not any(isinstance(index, Tensor) and index.dtype == torch.bool for index in indices):
        for size, index in zip(tensor.shape, indices, strict=False):
            _require(index, size, signed=True)


def _classes(log_probs: Tensor, target: object, _weight: object, _reduction: object, *ignored: object) -> None:
    """Labels: (log-probabilities, target, weight, reduction, ignore_index)."""
    _require(target, log_probs.size(1 if log_probs.dim() > 1 else 0), also=ignored[0] if ignored else -100)


def _symbols(log_probs: Tensor, targets: object, input_lengths: object, target_lengths: object, *_: object) -> None:
    """Alignment: log-probabilities (T, B, classes)."""
    _require(targets, log_probs.size(-1))
    longest = targets.size(-1) if isinstance(targets, Tensor) else 0
    _require(torch.as_tensor(input_lengths), log_probs.size(0) + 1)
    _require(torch.as_tensor(target_lengths), longest + 1)


_CHECKS: dict[str, Callable[..., None]] = {
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


# ----------------------------------------------------------------------------------------------------------------------
# Values that code singles out by comparing with them: marks of padding, missing labels, special tokens.
#
# ``labels != 50256`` treats one value in its own way. No list of marks has them all, but the comparison tells which.
# ----------------------------------------------------------------------------------------------------------------------


_EQUAL = frozenset({"eq", "ne", "eq_", "ne_"})
_ORDER = frozenset({"lt", "le", "gt", "ge", "lt_", "le_", "gt_", "ge_"})
_LABELLED = frozenset({"nll_loss_forward", "nll_loss2d_forward"})
_SIZED_BY_VALUES = frozenset({"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive"})
_READING = frozenset({"_local_scalar_dense", "equal", "is_nonzero"})
# So many values of each kind are tried; code that compares with more has a reason that is not special values.
_MOST = 12


class ComparisonConstants(TorchDispatchMode):
    """Inside, notes the numbers that tensors are compared with, and what the precision of results rests on.

    Attributes:
        integers: numbers that integer tensors are compared with; for an order also their neighbors.
        floats: numbers that floating tensors are compared with for equality.
        is_half: whether something was computed in half precision.
        convolves: whether there was a convolution.
        sizes_follow_values: whether shapes depended on values, as they do where records are sent to experts.
        reads_values: whether Python read a number out of a tensor, and may branch on it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_half = self.sizes_follow_values = self.reads_values = self.convolves = False
        self.integers: dict[int, None] = {}
        self.floats: dict[float, None] = {}

    def __torch_dispatch__(self, func: Operator, types: object, args: Args = (), kwargs: Kwargs = None) -> object:
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
        self.convolves = self.convolves or "convolution" in name
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


# ----------------------------------------------------------------------------------------------------------------------
# Where a gradient is not the derivative of the values.
# ----------------------------------------------------------------------------------------------------------------------


_READ_AS_NUMBERS = frozenset(
    {"item", "tolist", "numpy", "__array__", "__float__", "__int__", "__index__", "__dlpack__"}
)
_HOOKING = frozenset({"register_hook", "register_post_accumulate_grad_hook", "grad_fn"})
_SHAPE_ONLY = frozenset(
    f"{prefix}{name}" for name in ("zeros", "ones", "full", "empty", "rand", "randn") for prefix in ("", "new_")
) | frozenset(f"{name}_like" for name in ("zeros", "ones", "full", "empty", "rand", "randn"))


class GradientCuts(TorchFunctionMode):
    """Inside, notes what makes a gradient other than the derivative of the values.

    Tensors are detached or read as numbers (``a + (b - b).detach()`` has the value of ``a`` alone, and ``b`` may rule
    its gradient), or code asks for a hook on a tensor or its node.

    Attributes:
        found: whether there was any of it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def __torch_function__(self, func: Function, types: object, args: Args = (), kwargs: Kwargs = None) -> object:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = getattr(getattr(func, "__self__", None), "__name__", "")
        if name in _HOOKING:
            self.found = True
        elif (
            not self.found
            and name not in _SHAPE_ONLY
            and any(tensor.requires_grad for tensor in tensors_in((args, kwargs)))
        ):
            self.found = name in _READ_AS_NUMBERS or any(
                tensor.is_floating_point() and not tensor.requires_grad for tensor in tensors_in(result)
            )
        return result


class GraphWithoutValues(torch.autograd.graph.saved_tensors_hooks):
    """Inside, graphs have all their nodes but no values, so that memory is freed as soon as it is without a graph.

    Attributes:
        keeps: whether values are kept now.
        is_read: whether something was derived by a value that was not kept, which raises.
    """

    def __init__(self) -> None:
        self.keeps: Callable[[], bool] = lambda: False
        self.is_read = False
        super().__init__(lambda value: value if self.keeps() else None, self._read)

    def __exit__(self, *exception: object) -> None:
        # The graph's nodes hold this object. What `keeps` looks at may hold the graph: a cycle that Python can't see.
        self.keeps = lambda: False
        super().__exit__(*exception)

    def _read(self, value: Tensor | None) -> Tensor:
        if value is None:
            self.is_read = True
            raise RuntimeError("a value of this graph was not kept")
        return value


def _few(values: object) -> list[float]:
    """The numbers in a number or a small tensor."""
    if isinstance(values, Tensor):
        return values.flatten().tolist() if values.numel() <= _MOST and not values.dtype.is_complex else []
    return [values] if isinstance(values, int | float) and values == values and abs(values) < 2**62 else []
