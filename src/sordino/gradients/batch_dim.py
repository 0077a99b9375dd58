"""Which tensors have the records first, followed through a module's forward.

A bare parameter that meets a tensor may be given one copy per record only if the first dimension of the result is
known to hold the records; equal sizes prove nothing. What is known is marked on the tensors: the inputs of a module
have the records first, and an operation listed here keeps them there. Whatever isn't listed leaves no mark, and then
the module is run again as a whole instead.
"""

import weakref
from collections.abc import Mapping, Sequence
from enum import Enum

from torch import Tensor


class BatchDimMark(Enum):
    """What is known of a tensor."""

    RECORDS_FIRST = "records first"
    RECORDS = "computed from records, which are somewhere else or nowhere"
    CONSTANT = "the same for every batch"
    UNIFORM = "the same number everywhere"
    IN_ORDER = "the records' numbers along the first dimension"


def words(text: str) -> frozenset[str]:
    """The words of `text`."""
    return frozenset(text.split())


ELEMENTWISE = words(
    """add sub subtract rsub mul multiply div divide true_divide floor_divide pow neg negative exp exp2
    expm1 log log1p log2 sqrt rsqrt square reciprocal abs sign sin cos tan sinh cosh tanh sigmoid logit erf erfc relu
    relu6 gelu silu mish elu selu celu leaky_relu softplus softsign hardtanh hardswish hardsigmoid tanhshrink
    threshold logsigmoid
    clamp clip clamp_min clamp_max where maximum minimum fmax fmin lerp addcmul addcdiv floor ceil round trunc frac
    remainder fmod eq ne lt le gt ge logical_and logical_or logical_not bitwise_and bitwise_or bitwise_not isnan
    isinf isfinite nan_to_num masked_fill dropout alpha_dropout feature_dropout to type float half bfloat16 double
    long int bool contiguous clone detach requires_grad type_as __rsub__ __radd__ __rmul__ __rdiv__ __rpow__ __pow__
    __and__ __or__ __invert__ zeros_like ones_like rand_like randn_like empty_like full_like copy
    __add__ __sub__ __mul__ __truediv__ __rtruediv__ __neg__"""
)
_UNIFORM = words("zeros ones full new_zeros new_ones new_full")
_UNIFORM_LIKE = words("zeros_like ones_like full_like")
# The result's first dimension is the first argument's, if the sizes agree: rows are kept in order.
_ROW_MAJOR = words("view reshape flatten unflatten view_as reshape_as")
_FIRST_KEPT = words(
    """linear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d layer_norm rms_norm
    group_norm embedding one_hot interpolate max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d
    dropout1d dropout2d dropout3d glu pixel_shuffle bilinear prelu instance_norm batch_norm local_response_norm"""
)
# Functions of one dimension: the position of `dim` behind the first argument, and its default (None: all of them).
_DIM_AT: dict[str, tuple[int, int | None]] = {
    **dict.fromkeys(
        words(
            """softmax log_softmax mean sum prod amax amin var std logsumexp cumsum cumprod argmax argmin all any
            sort narrow select squeeze cat concat concatenate stack unsqueeze unbind"""
        ),
        (0, None),
    ),
    **dict.fromkeys(words("norm normalize topk chunk split tensor_split"), (1, None)),
}
_PRODUCTS = words("matmul bmm baddbmm scaled_dot_product_attention __matmul__")


_FREE = (BatchDimMark.CONSTANT, BatchDimMark.UNIFORM, BatchDimMark.IN_ORDER)


class BatchDimTracker:
    """What is known of the tensors of one forward pass; it keeps none of them alive.

    Args:
        records: the record count B.
    """

    def __init__(self, records: int) -> None:
        self.records = records
        # Modules with a rule of their own that are running: what they do inside is captured at their border.
        self.paused = 0
        self._known: dict[int, tuple[weakref.ref[Tensor], BatchDimMark]] = {}

    def set(self, tensor: Tensor, known: BatchDimMark) -> None:
        """Remember what is known of `tensor`."""
        self._known[id(tensor)] = (weakref.ref(tensor), known)

    def constant(self, tensor: Tensor) -> bool:
        """Whether `tensor` is the same for every batch."""
        # A custom function marks its result inside, where gradients are off; the result may have one.
        return self._get(tensor) in _FREE and not tensor.requires_grad

    def record_free(self, tensor: Tensor) -> bool:
        """Whether `tensor` was not computed from records, as far as is known, and has no gradient."""
        return not tensor.requires_grad and self._get(tensor) in (None, *_FREE)

    def has_records(self, tensor: Tensor) -> bool:
        """Whether `tensor` was computed from records."""
        return self._get(tensor) in (BatchDimMark.RECORDS_FIRST, BatchDimMark.RECORDS)

    def uniform(self, tensor: Tensor) -> bool:
        """Whether all entries of `tensor` are the same number."""
        return self._get(tensor) is BatchDimMark.UNIFORM

    def records_first(self, tensor: Tensor) -> bool:
        """Whether the first dimension of `tensor` holds the records."""
        return tensor.dim() > 0 and tensor.shape[0] == self.records and self._get(tensor) is BatchDimMark.RECORDS_FIRST

    def _get(self, tensor: Tensor) -> BatchDimMark | None:
        reference, known = self._known.get(id(tensor), (None, None))
        return known if reference is not None and reference() is tensor else None

    def any_first(self, tensors: Sequence[Tensor], dims: int) -> bool:
        """Whether one of `tensors` has the records first in a broadcast result of `dims` dimensions."""
        return any(tensor.dim() == dims and self.records_first(tensor) for tensor in tensors)

    def set_input(self, tensor: Tensor) -> None:
        """Mark an input of a module that isn't known to be without records: by convention it has them first."""
        if self._get(tensor) in _FREE or self.records not in tensor.shape:
            return
        self.set(tensor, BatchDimMark.RECORDS_FIRST if tensor.shape[0] == self.records else BatchDimMark.RECORDS)

    def set_result(self, name: str, args: Sequence[object], kwargs: Mapping[str, object], result: object) -> None:
        """Mark what the function `name` returned, by what is known of its arguments."""
        inputs = argument_tensors([*args, *kwargs.values()])
        for output in argument_tensors([result]):
            if kwargs.get("out") is None and (
                name in _UNIFORM or (name in _UNIFORM_LIKE and not self.records_first(inputs[0]))
            ):
                self.set(output, BatchDimMark.UNIFORM)
            elif kwargs.get("out") is None and self._is_in_order(name, args, kwargs, output):
                self.set(output, BatchDimMark.IN_ORDER)
            elif kwargs.get("out") is None and all(self.constant(tensor) for tensor in inputs):
                self.set(output, BatchDimMark.CONSTANT)
            elif kwargs.get("out") is None and self._keeps(name, args, kwargs, inputs, output):
                self.set(output, BatchDimMark.RECORDS_FIRST)
            elif any(self._get(tensor) in (BatchDimMark.RECORDS_FIRST, BatchDimMark.RECORDS) for tensor in inputs):
                self.set(output, BatchDimMark.RECORDS)
            else:
                self._known.pop(id(output), None)

    def _is_in_order(self, name: str, args: Sequence[object], kwargs: Mapping[str, object], output: Tensor) -> bool:
        """Whether `output` counts the records along its first dimension."""
        if output.dim() == 0 or output.shape[0] != self.records or output.is_floating_point():
            return False
        if name == "arange":
            return tuple(args) in ((self.records,), (0, self.records), (0, self.records, 1))
        first = args[0] if args else None
        if not isinstance(first, Tensor) or self._get(first) is not BatchDimMark.IN_ORDER:
            return False
        moved = name in _ROW_MAJOR or (
            name in ("to", "__getitem__", "unsqueeze") and _keeps_first(name, args, kwargs, first, output)
        )
        return name == "to" or (moved and output.numel() == self.records)

    def _keeps(
        self, name: str, args: Sequence[object], kwargs: Mapping[str, object], inputs: list[Tensor], output: Tensor
    ) -> bool:
        """Whether the first dimension of `output` is known to hold the records."""
        if output.dim() == 0 or output.shape[0] != self.records:
            return False
        if name in ELEMENTWISE:
            return self.any_first(inputs, output.dim())
        if name in _PRODUCTS and output.dim() > 2:
            return self.any_first(inputs, output.dim())
        if not self.records_first(inputs[0]):
            return False
        if name == "__getitem__" and isinstance(args[1], tuple) and all(isinstance(i, Tensor) for i in args[1]):
            rows = args[1][0]
            return self._get(rows) is BatchDimMark.IN_ORDER and rows.dim() == output.dim()
        if name in ("cat", "concat", "concatenate", "stack") and not all(self.records_first(t) for t in inputs):
            return False
        return keeps_rows(name, args, kwargs, inputs, output)


def keeps_rows(
    name: str, args: Sequence[object], kwargs: Mapping[str, object], inputs: list[Tensor], output: Tensor
) -> bool:
    """Whether row b of `output` follows from row b of the function's first argument and from its others."""
    if output.dim() == 0 or inputs[0].dim() == 0 or output.shape[0] != inputs[0].shape[0]:
        return False
    if name in _ROW_MAJOR:
        return True
    if name in _FIRST_KEPT:
        return _batched(name, inputs)
    if name in _PRODUCTS:
        # Rows of the product are those of its left factor, whatever the right one holds.
        return name in ("matmul", "__matmul__")
    return _keeps_first(name, args, kwargs, inputs[0], output)


def argument_tensors(values: Sequence[object]) -> list[Tensor]:
    """The tensors among arguments, and those in lists among them."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += [item for item in value if isinstance(item, Tensor)]
    return found


def _batched(name: str, inputs: list[Tensor]) -> bool:
    """Whether the first dimension of the input is the batch, and not the features or the channels of a single one."""
    if name.startswith("conv"):
        return len(inputs) > 1 and inputs[0].dim() == inputs[1].dim()
    return inputs[0].dim() >= 2 or name in ("embedding", "one_hot")


def _keeps_first(
    name: str, args: Sequence[object], kwargs: Mapping[str, object], first: Tensor, output: Tensor
) -> bool:
    """Whether a function that may rearrange dimensions leaves the first one of its first argument alone."""
    rest = list(args[1:])
    if name in _DIM_AT:
        position, default = _DIM_AT[name]
        dim = kwargs.get("dim", rest[position] if len(rest) > position else default)
        longer = name in ("stack", "unsqueeze")
        return dim is not None and _without_first(dim, output.dim() if longer else first.dim())
    if name in ("transpose", "swapaxes", "swapdims"):
        return len(rest) == 2 and _without_first(rest, first.dim())
    if name == "permute":
        order = rest[0] if rest and isinstance(rest[0], list | tuple) else kwargs.get("dims", rest)
        return isinstance(order, list | tuple) and len(order) > 0 and order[0] in (0, -first.dim())
    if name == "expand":
        return output.dim() == first.dim()
    if name == "pad":
        sides = kwargs.get("pad", rest[0] if rest else ())
        return isinstance(sides, list | tuple) and len(sides) <= 2 * (first.dim() - 1)
    if name == "__getitem__":
        index = rest[0] if isinstance(rest[0], tuple) else (rest[0],)
        whole = bool(index) and (index[0] is Ellipsis or (isinstance(index[0], slice) and index[0] == slice(None)))
        # Tensors as an index may move their dimension to the front.
        plain = all(isinstance(i, slice | int) or i is Ellipsis or i is None for i in index)
        return whole and plain and (index[0] is not Ellipsis or len(index) - 1 < first.dim())
    return False


def _without_first(dims: object, count: int) -> bool:
    """Whether `dims`, of a tensor with `count` dimensions, leave the first one alone."""
    chosen = list(dims) if isinstance(dims, list | tuple) else [dims]
    return bool(chosen) and all(isinstance(d, int) and d % max(count, 1) != 0 for d in chosen)
