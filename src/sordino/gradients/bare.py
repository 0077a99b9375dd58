"""Parameters that a module's own forward reads: class tokens, position tables, scales, matrices (floor 1, gradients).

While such a module runs, a `TorchFunctionMode` puts a stand-in leaf in the place of each of its parameters. What is
computed from stand-ins alone is *derived* and stays with its small graph. Where something derived meets a tensor that
has the records first, every record gets a copy of its own (or the product is captured like a linear layer's), and the
gradient of the copy is the record's. Anything else makes the module opaque: it is run again as a whole. An ordinary
gradient that reaches a parameter or a stand-in is refused.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from sordino.gradients.edge import capture_outputs
from sordino.gradients.flow import ELEMENTWISE, Mark, Marks, tensors_in, words
from sordino.gradients.hooks import UseReceiver
from sordino.gradients.recording import Recording
from sordino.gradients.rules.derived import Derived, DerivedContext, derived_rule
from sordino.gradients.rules.embedding import EmbeddingRule
from sordino.gradients.rules.parts import Part, direct_rule, parts_rule
from sordino.gradients.rules.rule import LayerRule, Use

__all__ = ["BareTap"]

_Args = tuple[object, ...]
_Kwargs = dict[str, object]

_CATS = frozenset(("cat", "concat", "concatenate"))
_PRODUCTS = frozenset(("matmul", "__matmul__", "bmm", "scaled_dot_product_attention"))
# Only the shape or the type of the other tensor is read.
_LIKE = frozenset(("expand_as", "view_as", "reshape_as", "type_as", "to"))
# Values that leave for Python may steer what happens to every record.
_READS = words(
    "item tolist numpy __bool__ __float__ __int__ __index__ __array__ __contains__ equal allclose is_nonzero"
)
_EMBEDDING = EmbeddingRule()


class _Opaque(Exception):
    """The parameters are used in a way that isn't followed: no error, the module is run again."""


class BareTap(TorchFunctionMode):
    """Follows the parameters of one module through one call.

    Args:
        module: the module that is called.
        label: its qualified name and class.
        parameters: its captured parameters by name.
        recording: what receives the uses.
        anchor: a scalar that requires grad.
        detached: its other parameters, which receive no gradient.
        marks: what is known of tensors in this forward pass.
        refuse: called with a parameter's name when an ordinary gradient arrives.
    """

    def __init__(
        self,
        *,
        module: nn.Module,
        label: str,
        parameters: Mapping[str, nn.Parameter],
        recording: Recording,
        anchor: Tensor,
        detached: Iterable[nn.Parameter],
        marks: Marks,
        refuse: Callable[[str], None],
    ) -> None:
        super().__init__()
        self.opaque = False
        self.marks = marks
        self._module, self._label, self._parameters = module, label, parameters
        self._recording, self._anchor, self.records = recording, anchor, recording.records
        self._derived: dict[int, Derived] = {}
        self.stand_ins: dict[nn.Parameter, Tensor] = {}
        self._by_id: dict[int, Tensor] = {}
        for name, parameter in parameters.items():
            if parameter in self.stand_ins:
                continue
            leaf = parameter.detach().requires_grad_()
            leaf.register_hook(lambda _, name=name: refuse(name))
            self.stand_ins[parameter] = leaf
            self._by_id[id(parameter)] = leaf
            self._remember(Derived(tensor=leaf, leaves={name: leaf}, isometric=True))
        for parameter in detached:
            self._by_id[id(parameter)] = parameter.detach()
            marks.set(self._by_id[id(parameter)], Mark.CONSTANT)

    # --- what is followed ----------------------------------------------------------------------------------------

    def _remember(self, derived: Derived) -> None:
        self._derived[id(derived.tensor)] = derived

    def derived(self, value: object) -> Derived | None:
        """What `value` was derived from, or None."""
        return self._derived.get(id(self._by_id.get(id(value), value)))

    def __torch_function__(
        self, func: object, types: object, args: _Args = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        """Run `func`, with stand-ins for parameters and copies per record where they meet records."""
        del types
        assert callable(func)
        given = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if self.opaque or self.marks.paused:
            return func(*args, **given)
        tensors = tensors_in([*args, *given.values()])
        tracked = [found for tensor in tensors if (found := self.derived(tensor)) is not None]
        args = tuple(self._swap(value) for value in args)
        given = {key: self._swap(value) for key, value in given.items()}
        if name in _READS and not all(self.marks.constant(tensor) for tensor in tensors):
            self.opaque = True
        if not tracked or (name in _LIKE and not self._is_target(args)):
            result = func(*args, **given)
            if name != "__get__":
                self.marks.set_result(_plain(name), args, given, result)
            return result
        try:
            return self._followed(func, name, args, given, tracked)
        except (_Opaque, RuntimeError):
            # The call as it was; an error that is the model's own comes up again.
            self.opaque = True
            return func(*args, **given)

    def _swap(self, value: object) -> object:
        if isinstance(value, list | tuple):
            return type(value)(self._swap(item) for item in value) if type(value) in (list, tuple) else value
        return self._by_id.get(id(value), value)

    def _followed(
        self, func: Callable[..., object], name: str, args: _Args, kwargs: _Kwargs, tracked: list[Derived]
    ) -> object:
        others = [t for t in tensors_in([*args, *kwargs.values()]) if self.derived(t) is None]
        if name in _LIKE or all(self.marks.constant(tensor) for tensor in others):
            return self._derive(func(*args, **kwargs), tracked, name)
        base = _plain(name)
        if not torch.is_grad_enabled() or (base != name and self._is_target(args)):
            raise _Opaque
        if base in ELEMENTWISE:
            return self._broadcast(func, args, kwargs)
        if base in _CATS or base == "stack":
            return self._joined(func, base, args, kwargs)
        if base == "linear":
            return self._linear(*cast("tuple[Tensor, ...]", args), **cast("dict[str, Tensor]", kwargs))
        if base in _PRODUCTS:
            return self._product(func, base, args, kwargs)
        if base in ("layer_norm", "rms_norm"):
            return self._normalized(func, args, kwargs)
        if base in ("embedding", "__getitem__"):
            return self._lookup(base, args, kwargs)
        raise _Opaque

    def _is_target(self, args: _Args) -> bool:
        return bool(args) and self.derived(args[0]) is not None

    def _derive(self, result: object, tracked: list[Derived], name: str) -> object:
        """Remember tensors that were computed from derived ones and constants."""
        leaves = {key: leaf for source in tracked for key, leaf in source.leaves.items()}
        for tensor in tensors_in([result]):
            if not tensor.requires_grad:
                if tensor.is_floating_point() or name not in ("shape", "__get__"):
                    self.marks.set(tensor, Mark.CONSTANT)
                continue
            source = tracked[0]
            same = tensor.numel() == source.tensor.numel() and tensor.dtype == source.tensor.dtype
            view = same and tensor.untyped_storage().data_ptr() == source.tensor.untyped_storage().data_ptr()
            alone = len(tracked) == 1 and name != "as_strided"
            row = self._row(tensor, source, leaves, name) if alone else None
            isometric = alone and view and source.isometric and tensor.numel() == next(iter(leaves.values())).numel()
            self._remember(Derived(tensor=tensor, leaves=leaves, isometric=isometric, row=row))
        return result

    def _row(self, tensor: Tensor, source: Derived, leaves: Mapping[str, Tensor], name: str) -> Derived | None:
        """The first row, when `tensor` repeats a single one."""
        before = source.tensor
        if name not in ("expand", "expand_as", "broadcast_to", "repeat", "to", "float") or tensor.shape[0] < 2:
            return None
        longer = tensor.dim() > before.dim()
        if name in ("to", "float"):
            repeats = source.row is not None and tensor.shape == before.shape
        else:
            repeats = longer or (before.dim() > 0 and before.shape[0] == 1)
        if not repeats:
            return None
        row = tensor[:1]
        return Derived(tensor=row, leaves=leaves, isometric=False)

    # --- what is captured ----------------------------------------------------------------------------------------

    def capture(
        self,
        rule: LayerRule,
        context: object,
        sources: Mapping[str, Derived],
        output: Tensor,
        saved: tuple[Tensor, ...],
        module: nn.Module | None = None,
    ) -> Tensor:
        """`output`, records first, passed through a node that reads its gradient for what `sources` depend on."""
        if any(tensor.is_complex() for tensor in (output, *saved)):
            raise _Opaque  # The kernels multiply real numbers.
        names = {name for source in sources.values() for name in source.leaves}
        use = Use(
            module=self._module,
            label=self._label,
            rule=derived_rule,
            parameters={name: self._parameters[name] for name in sorted(names)},
            records=self.records,
            context=DerivedContext(rule=rule, module=module or self._module, context=context, sources=sources),
        )
        receive = UseReceiver(recording=self._recording, use=use)
        (passed,) = capture_outputs(receive, self._anchor, (output,), saved)
        self.marks.set(passed, Mark.RECORDS_FIRST)
        return passed

    def per_record(self, tensor: Tensor, dims: int) -> Tensor:
        """One copy of a derived tensor per record, for a place where the records are the first of `dims` dimensions.

        Raises:
            _Opaque: its first dimension holds something else.
        """
        source = self.derived(tensor)
        assert source is not None
        tensor = source.tensor
        if tensor.dim() == dims and dims > 0:
            if source.row is not None and tensor.shape[0] == self.records:
                source = source.row
            elif not self.records and not tensor.shape[0]:
                return self.capture(direct_rule, ("value",), {"value": source}, tensor.detach(), ())
            elif tensor.shape[0] != 1:
                raise _Opaque
            shape = (self.records, *source.tensor.shape[1:])
            copies = source.tensor.detach().expand(shape)
        elif tensor.dim() < dims:
            missing = dims - 1 - tensor.dim()
            copies = tensor.detach()[(None,) * (missing + 1)].expand(self.records, *[1] * missing, *tensor.shape)
        else:
            raise _Opaque
        return self.capture(direct_rule, ("value",), {"value": source}, copies, ())

    def per_record_argument(self, tensor: Tensor) -> Tensor | None:
        """A derived tensor that is handed to another module, with the records first; None where it can't be."""
        try:
            return self.per_record(tensor, tensor.dim())
        except _Opaque:
            self.opaque = True
            return None

    def _copied(self, values: object, dims: int) -> object:
        return tree_map(lambda v: self.per_record(v, dims) if self.derived(v) is not None else v, values)

    def _broadcast(self, func: Callable[..., object], args: _Args, kwargs: _Kwargs) -> object:
        tensors = tensors_in([*args, *kwargs.values()])
        dims = max(tensor.dim() for tensor in tensors)
        if not self.marks.any_first([t for t in tensors if self.derived(t) is None], dims):
            raise _Opaque
        args, kwargs = cast("tuple[_Args, _Kwargs]", self._copied((args, kwargs), dims))
        result = func(*args, **kwargs)
        for tensor in tensors_in([result]):
            self.marks.set(tensor, Mark.RECORDS_FIRST)
        return result

    def _joined(self, func: Callable[..., object], name: str, args: _Args, kwargs: _Kwargs) -> object:
        parts = args[0] if args else kwargs.get("tensors")
        dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
        if not isinstance(parts, list | tuple) or not isinstance(dim, int):
            raise _Opaque
        dims = parts[0].dim() + (name == "stack")
        others = [part for part in parts if self.derived(part) is None]
        if dim % dims == 0 or any(not self.marks.records_first(part) for part in others):
            raise _Opaque
        result = func([self.per_record(p, p.dim()) if self.derived(p) is not None else p for p in parts], dim=dim)
        self.marks.set(cast("Tensor", result), Mark.RECORDS_FIRST)
        return result

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002
        sources: dict[str, Derived] = {}
        for key, value in (("weight", weight), ("bias", bias)):
            if (found := self.derived(value)) is not None:
                sources[key] = found
            elif value is not None and not self.marks.constant(value):
                raise _Opaque
        if self.derived(input) is not None or not self.marks.records_first(input) or input.dim() < 2:
            raise _Opaque
        output = F.linear(input, weight.detach(), None if bias is None else bias.detach())
        weight_name, bias_name = ("weight" if "weight" in sources else None, "bias" if "bias" in sources else None)
        part = Part(weight=weight_name, bias=bias_name)
        return self.capture(parts_rule, (part,), sources, output, (input,))

    def _product(self, func: Callable[..., object], name: str, args: _Args, kwargs: _Kwargs) -> object:
        tensors = tensors_in([*args, *kwargs.values()])
        dims = max(tensor.dim() for tensor in tensors)
        left, right = args[:2]
        matrix = self.derived(right) if name in ("matmul", "__matmul__") else None
        if matrix is not None and matrix.tensor.dim() <= 2 and self.derived(left) is None:
            row = matrix.tensor.dim() == 1
            weight = matrix.tensor[None] if row else matrix.tensor.t()
            self._derive(weight, [matrix], "t")
            result = self._linear(cast("Tensor", left), weight)
            result = result.squeeze(-1) if row else result
            self.marks.set(result, Mark.RECORDS_FIRST)
            return result
        if dims < 3 or not self.marks.any_first([t for t in tensors if self.derived(t) is None], dims):
            raise _Opaque
        if any(self.derived(t) is not None and t.dim() < 3 for t in tensors):
            raise _Opaque
        args, kwargs = cast("tuple[_Args, _Kwargs]", self._copied((args, kwargs), dims))
        result = func(*args, **kwargs)
        self.marks.set(cast("Tensor", result), Mark.RECORDS_FIRST)
        return result

    def _normalized(self, func: Callable[..., object], args: _Args, kwargs: _Kwargs) -> object:
        names = ("input", "normalized_shape", "weight", "bias", "eps")
        given = dict(zip(names if func is F.layer_norm else (*names[:3], "eps"), args, strict=False)) | kwargs
        x, weight, bias = given["input"], given.pop("weight", None), given.pop("bias", None)
        if not isinstance(x, Tensor) or self.derived(x) is not None or not self.marks.records_first(x):
            raise _Opaque
        result = cast("Tensor", func(**given))
        self.marks.set(result, Mark.RECORDS_FIRST)
        for operation, value in ((torch.mul, weight), (torch.add, bias)):
            if self.derived(value) is not None:
                result = cast("Tensor", self._broadcast(operation, (result, value), {}))
            elif value is not None:
                result = operation(result, cast("Tensor", value))
                self.marks.set(result, Mark.RECORDS_FIRST)
        return result

    def _lookup(self, name: str, args: _Args, kwargs: _Kwargs) -> Tensor:
        given = dict(zip(("input", "weight", "padding_idx"), args, strict=False)) | kwargs
        ids, table = (given["input"], given["weight"]) if name == "embedding" else (args[1], args[0])
        padding = given.get("padding_idx") if name == "embedding" else None
        source = self.derived(table)
        usual = not any(given.get(option) for option in ("max_norm", "scale_grad_by_freq", "sparse"))
        if not isinstance(ids, Tensor) or ids.dtype not in (torch.int64, torch.int32) or source is None or not usual:
            raise _Opaque
        if source.tensor.dim() != 2 or not self.marks.records_first(ids):
            raise _Opaque
        rows, width = source.tensor.shape
        values = source.tensor.detach()
        if name == "__getitem__":
            ids = torch.where(ids < 0, ids + rows, ids)
        layer = nn.Embedding(rows, width, padding_idx=cast("int | None", padding), _weight=values, _freeze=True)
        return self.capture(_EMBEDDING, None, {"weight": source}, F.embedding(ids, values), (ids,), layer)


def _plain(name: str) -> str:
    """The name of an operation without the mark of its in-place form."""
    if name.startswith("__i") and name.removeprefix("__i") in ("add__", "sub__", "mul__", "truediv__"):
        return name.removeprefix("__i").removesuffix("__").replace("truediv", "div")
    return name if name.startswith("__") else name.rstrip("_")
