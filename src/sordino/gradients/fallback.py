"""Any module that no rule reads: per-record gradients by running it again, one record each.

The module is called once in the forward pass, by torch itself. Afterwards its per-record gradients are the
vector-Jacobian products of the module alone, from the inputs it was called with and the gradients that reached its
outputs: vectorized by ``torch.func.vmap``, or record by record where it can't be vectorized. Each record runs as a
batch of one, so that whatever the module does with its batch dimension, no record's gradient sees another's inputs.
"""

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.backends import mkldnn
from torch.func import functional_call, vjp, vmap
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from sordino.errors import RecordCountMismatch, UnsupportedModule
from sordino.gradients.module_hooks import (
    HeldAttribute,
    attribute_values,
    held_attributes,
    put_attributes,
    restore_attributes,
)
from sordino.gradients.numerics import storage_number
from sordino.gradients.rules.base import LayerCall
from sordino.gradients.rules.composite import GradientsRule

# ----------------------------------------------------------------------------------------------------------------------
# One row where every record should have its own.
#
# A row for the whole batch, position ids or a constant, is expanded to all records. The same shape comes out of
# ``x[mask]`` when one record is left: expanding that would let this record count once for every record of the batch.
# ----------------------------------------------------------------------------------------------------------------------


def check_not_single_row_input(args: tuple[object, ...], kwargs: Mapping[str, object], records: int) -> None:
    """Refuse a call of the model whose inputs have one row, when there are more records than one.

    Raises:
        RecordCountMismatch: no input has the records in one of its first two dimensions, and one has a single row.
    """
    # Most models are called with tensors alone.
    bare = not kwargs and all(isinstance(value, Tensor) for value in args)
    leaves = args if bare else tree_flatten((args, dict(kwargs)))[0]
    inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()]
    single = any(tensor.shape[0] == 1 for tensor in inputs)
    if records > 1 and single and not any(records in tensor.shape[:2] for tensor in inputs):
        raise RecordCountMismatch(
            "the model must be called with all records of the batch, got one row. Run the whole batch through the "
            "model, and weigh the losses of records that should not count by zero."
        )


def check_not_broadcast_row(tensor: Tensor, label: str, records: int) -> None:
    """Refuse to expand a row that was computed from the outputs of captured layers: they had a row per record.

    Raises:
        RecordCountMismatch: the row requires grad.
    """
    if records > 1 and tensor.is_floating_point() and tensor.requires_grad:
        raise RecordCountMismatch(
            f"the input of {label} must have one row per record, got one row that was computed from the records. Keep "
            "one row per record until the loss."
        )


# ----------------------------------------------------------------------------------------------------------------------
# Where the records are in a module's inputs and outputs.
#
# Everywhere the first dimension, except in torch's recurrent and attention modules, which have their own conventions.
# ----------------------------------------------------------------------------------------------------------------------


# Where a leaf came from: the position or the name of the argument.
ArgumentKey = int | str


@dataclass(frozen=True, kw_only=True)
class CallLayout:
    """Record dimensions of a call; this class is the plain convention, records first.

    Args:
        label: the module's name, for messages.
        records: number of records B.
    """

    label: str
    records: int

    def argument_keys(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> list[ArgumentKey]:
        """For every leaf of (args, kwargs) the argument it belongs to."""
        argument_keys: list[ArgumentKey] = []
        for position, value in enumerate(args):
            argument_keys += [position] * len(tree_flatten(value)[0])
        for name, value in kwargs.items():
            argument_keys += [name] * len(tree_flatten(value)[0])
        return argument_keys

    def input_dim(self, key: ArgumentKey) -> int | None:  # noqa: ARG002
        """The record dimension of an input, or None when it holds no records."""
        return 0

    def output_dim(self, leaf: int) -> int:  # noqa: ARG002
        """The record dimension of an output leaf."""
        return 0

    def keep_input(self, tensor: Tensor, key: ArgumentKey) -> tuple[Tensor, int | None] | None:
        """(the tensor with records first, where the record dimension was), or None for a constant."""
        dim = self.input_dim(key)
        if dim is None or tensor.dim() == 0:
            return None
        self._check(tensor, dim, "input")
        if tensor.shape[dim] != self.records:
            check_not_broadcast_row(tensor, self.label, self.records)
        return self.spread(tensor, dim).movedim(dim, 0), dim

    def spread(self, tensor: Tensor, dim: int) -> Tensor:
        """`tensor` with its record dimension expanded from 1 to B where it was broadcast."""
        self._check(tensor, dim, "output")
        sizes = list(tensor.shape)
        sizes[dim] = self.records
        return tensor.expand(sizes)

    def _check(self, tensor: Tensor, dim: int, what: str) -> None:
        if tensor.dim() <= dim or tensor.shape[dim] not in (1, self.records):
            raise RecordCountMismatch(
                f"an {what} of {self.label} must have the records as its {('first', 'second')[dim]} dimension, "
                "got another size there. Keep one row per record until the loss."
            )


@dataclass(frozen=True, kw_only=True)
class _Recurrent(CallLayout):
    """nn.RNN, nn.LSTM, nn.GRU: states always have the records second."""

    batch_first: bool

    def input_dim(self, key: ArgumentKey) -> int | None:
        return 0 if self.batch_first and key in (0, "input") else 1

    def output_dim(self, leaf: int) -> int:
        return 0 if self.batch_first and leaf == 0 else 1


@dataclass(frozen=True, kw_only=True)
class _Attention(CallLayout):
    """nn.MultiheadAttention: masks are shared, per record, or per record and head."""

    batch_first: bool
    heads: int

    def input_dim(self, key: ArgumentKey) -> int | None:
        if key in (0, 1, 2, "query", "key", "value"):
            return 0 if self.batch_first else 1
        return 0 if key in (3, "key_padding_mask") else None

    def output_dim(self, leaf: int) -> int:
        return 0 if self.batch_first or leaf > 0 else 1

    def keep_input(self, tensor: Tensor, key: ArgumentKey) -> tuple[Tensor, int | None] | None:
        if key in (5, "attn_mask") and tensor.dim() == 3:
            if tensor.shape[0] != self.records * self.heads:
                self._check(tensor, 0, "input")
            return tensor.unflatten(0, (self.records, self.heads)), None
        return super().keep_input(tensor, key)


def call_layout(module: nn.Module, label: str, records: int) -> CallLayout:
    """The convention that `module` follows."""
    if isinstance(module, nn.RNNBase):
        return _Recurrent(label=label, records=records, batch_first=module.batch_first)
    if isinstance(module, nn.MultiheadAttention):
        return _Attention(label=label, records=records, batch_first=module.batch_first, heads=module.num_heads)
    return CallLayout(label=label, records=records)


# ----------------------------------------------------------------------------------------------------------------------
# Any module that no rule reads: per-record gradients by running it again, one record each.
# ----------------------------------------------------------------------------------------------------------------------


_Gradients = dict[str, Tensor]
_OneRecord = Callable[[_Gradients, tuple[Tensor, ...], tuple[Tensor, ...]], _Gradients]
_Forward = Callable[[_Gradients], tuple[Tensor, ...]]
_Pull = Callable[[_Forward, _Gradients, tuple[Tensor, ...]], _Gradients]


@dataclass(frozen=True, kw_only=True)
class CapturedCall:
    """How to call the module again with one record.

    Args:
        spec: structure of (args, kwargs).
        constants: the leaves of (args, kwargs); None where a record's tensor goes.
        slots: which leaves are records' tensors, in the order they were kept.
        input_dims: where each of them had its records; None when a record's slice goes in as it is.
        outputs: which leaves of the output are captured; those that the call kept in attributes come behind them.
        output_dims: where each of them has its records.
        kept: attributes in which the call kept tensors that are captured too.
        function: what is called instead of the module, with the tensors behind `sources` put back.
        sources: (index among the leaves, name) of each tensor that gradients are wanted of.
    """

    spec: TreeSpec
    constants: tuple[object, ...]
    slots: tuple[int, ...]
    input_dims: tuple[int | None, ...]
    outputs: tuple[int, ...]
    output_dims: tuple[int, ...]
    kept: tuple[HeldAttribute, ...] = ()
    function: Callable[..., object] | None = None
    sources: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True, kw_only=True)
class SavedCall:
    """A captured call with its tensors: inputs with the records first, outputs as the module returned them."""

    call: CapturedCall
    saved: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    leaves: tuple[object, ...]
    output_spec: TreeSpec

    def rebuild(self, passed: tuple[Tensor, ...]) -> object:
        """The module's output with its captured leaves replaced by `passed`, and its attributes too."""
        leaves = list(self.leaves)
        for position, tensor in zip(self.call.outputs, passed, strict=False):
            leaves[position] = tensor
        put_attributes(self.call.kept, passed[len(self.call.outputs) :])
        return tree_unflatten(leaves, self.output_spec)


def save_call(
    module: nn.Module,
    label: str,
    records: int,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    output: object,
    attributes: Sequence[HeldAttribute] = (),
) -> SavedCall:
    """Sort the inputs and outputs of a call into records' tensors and constants.

    Args:
        module: what was called.
        label: its name, for messages.
        records: number of records B.
        args: what it was given.
        kwargs: the same by name.
        output: what it returned.
        attributes: where it kept floating tensors.

    Raises:
        RecordCountMismatch: a tensor's record dimension is neither 1 nor the record count.
        UnsupportedModule: packed sequences, or no floating output.
    """
    if any(isinstance(value, nn.utils.rnn.PackedSequence) for value in (*args, *kwargs.values())):
        raise UnsupportedModule(f"{label} must be called with padded tensors, got a packed sequence. Pad it.")
    layout = call_layout(module, label, records)
    constants, spec = tree_flatten((tuple(args), dict(kwargs)))
    argument_keys = layout.argument_keys(tuple(args), dict(kwargs))
    slots, dims, saved = [], [], []
    for position, (leaf, key) in enumerate(zip(constants, argument_keys, strict=True)):
        if isinstance(leaf, Tensor) and (kept := layout.keep_input(leaf, key)) is not None:
            slots.append(position)
            dims.append(kept[1])
            saved.append(kept[0])
    leaves, output_spec = tree_flatten(output)
    # A parameter that is returned as it is would be an ordinary use.
    own = {id(parameter) for parameter in module.parameters()}
    leaves = [leaf.detach() if isinstance(leaf, Tensor) and id(leaf) in own else leaf for leaf in leaves]
    positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    if not positions:
        raise UnsupportedModule(f"{label} must return a floating tensor, got none. Return tensors, tuples or dicts.")
    output_dims = tuple(layout.output_dim(position) for position in positions)
    others = [*constants, *module.parameters(), *module.buffers()]
    owned = {storage_number(leaf) for leaf in others if isinstance(leaf, Tensor)}
    outputs = tuple(_own(layout.spread(leaves[i], dim), owned) for i, dim in zip(positions, output_dims, strict=True))
    if not slots and any(leaves[i].shape[dim] != 1 for i, dim in zip(positions, output_dims, strict=True)):
        raise RecordCountMismatch(
            f"the output of {label} must have a leading dimension of 1 when no record goes in, got another. "
            "Return one row and let it broadcast."
        )
    stored = [value for value in attribute_values(attributes) if isinstance(value, Tensor)]
    outputs += tuple(_own(layout.spread(value, 0), owned) for value in stored)
    chosen = set(slots)
    call = CapturedCall(
        spec=spec,
        constants=tuple(None if i in chosen else leaf for i, leaf in enumerate(constants)),
        slots=tuple(slots),
        input_dims=tuple(dims),
        outputs=tuple(positions),
        output_dims=(*output_dims, *(0 for _ in stored)),
        kept=tuple(attributes),
    )
    return SavedCall(call=call, saved=tuple(saved), outputs=outputs, leaves=tuple(leaves), output_spec=output_spec)


def _own(output: Tensor, owned: set[int]) -> Tensor:
    """A tensor that no one else modifies in place: outputs may be views of inputs or parameters."""
    return output.clone() if storage_number(output) in owned or 0 in output.stride() else output


class FunctionalFallback(GradientsRule):
    """Per-record gradients of a whole module, or of one function of torch, by vector-Jacobian products."""

    def gradients(self, use: LayerCall, names: Sequence[str]) -> _Gradients:
        """By running it again, one record each."""
        return _per_record(use, list(names))


functional_fallback = FunctionalFallback()

# Modules and functions that torch.func refused once: they go record by record from then on.
_SEQUENTIAL: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()
_SEQUENTIAL_FUNCTIONS: set[str] = set()


def _per_record(use: LayerCall, names: list[str]) -> _Gradients:
    arrived = [position for position, grad in enumerate(use.grads) if grad is not None]
    grads = tuple(grad for grad in use.grads if grad is not None)
    parameters = {name: use.parameters[name].detach() for name in names}
    saved = tuple(_as_parameters(tensor, use) for tensor in use.saved)
    call = use.context
    assert isinstance(call, CapturedCall)
    before = held_attributes(use.module) if call.kept else None
    # oneDNN's fused recurrent kernel has no batching rule.
    recurrent = isinstance(use.module, nn.RNNBase)
    with warnings.catch_warnings(action="ignore"), mkldnn.flags(enabled=False) if recurrent else nullcontext():
        try:
            if not _is_sequential(call, use.module):
                try:
                    one = _one_record(use, call, arrived, _pull_by_func)
                    return vmap(one, in_dims=(None, 0, 0), randomness="error")(parameters, saved, grads)
                except RuntimeError:
                    _set_sequential(call, use.module)
            one = _one_record(use, call, arrived, _pull_plainly)
            rows = [
                one(parameters, tuple(tensor[b] for tensor in saved), tuple(grad[b] for grad in grads))
                for b in range(use.records)
            ]
            return {name: torch.stack([row[name] for row in rows]) for name in names}
        except RuntimeError as error:
            raise UnsupportedModule(
                f"{use.label} must run on a single record, got {type(error).__name__}. Write a layer rule for it."
            ) from error
        finally:
            if before is not None:
                restore_attributes(before)


def _is_sequential(call: CapturedCall, module: nn.Module) -> bool:
    return module in _SEQUENTIAL if call.function is None else _name(call.function) in _SEQUENTIAL_FUNCTIONS


def _set_sequential(call: CapturedCall, module: nn.Module) -> None:
    if call.function is None:
        _SEQUENTIAL.add(module)
    else:
        _SEQUENTIAL_FUNCTIONS.add(_name(call.function))


def _name(function: object) -> str:
    return getattr(function, "__name__", repr(function))


def _as_parameters(tensor: Tensor, use: LayerCall) -> Tensor:
    """`tensor` in single precision where it came from autocast: the module runs again without it."""
    half = tensor.dtype in (torch.bfloat16, torch.float16)
    read = use.parameters.values() if cast("CapturedCall", use.context).function else use.module.parameters()
    return tensor.float() if half and all(p.dtype == torch.float32 for p in read) else tensor


def _pull_by_func(forward: _Forward, parameters: _Gradients, grads: tuple[Tensor, ...]) -> _Gradients:
    outputs, pull = vjp(forward, parameters)[:2]
    return pull(tuple(grad.to(output.dtype) for grad, output in zip(grads, outputs, strict=True)))[0]


def _pull_plainly(forward: _Forward, parameters: _Gradients, grads: tuple[Tensor, ...]) -> _Gradients:
    """By plain autograd, which knows custom functions that torch.func doesn't."""
    with torch.enable_grad():
        leaves = {name: value.detach().requires_grad_() for name, value in parameters.items()}
        outputs = forward(leaves)
        pairs = [(o, g.to(o.dtype)) for o, g in zip(outputs, grads, strict=True) if o.requires_grad]
        if not pairs:
            return {name: torch.zeros_like(value) for name, value in parameters.items()}
        found = torch.autograd.grad(
            [output for output, _ in pairs],
            list(leaves.values()),
            [grad for _, grad in pairs],
            allow_unused=True,
            materialize_grads=True,
        )
    return dict(zip(leaves, found, strict=True))


def _one_record(use: LayerCall, call: CapturedCall, arrived: list[int], pull: _Pull) -> _OneRecord:
    def gradient(parameters: _Gradients, inputs: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> _Gradients:
        def forward(chosen: _Gradients) -> tuple[Tensor, ...]:
            outputs = _outputs(use, call, chosen, inputs)
            return tuple(outputs[i] for i in arrived)

        return pull(forward, parameters, grads)

    return gradient


def _outputs(use: LayerCall, call: CapturedCall, chosen: _Gradients, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """What one record's call returns, and keeps in attributes, without the record dimension."""
    leaves = list(call.constants)
    for position, dim, tensor in zip(call.slots, call.input_dims, inputs, strict=True):
        leaves[position] = tensor if dim is None else tensor.unsqueeze(dim)
    if call.function is not None:
        for position, name in call.sources:
            leaves[position] = chosen[name] if name in chosen else use.parameters[name]
        args, kwargs = tree_unflatten(leaves, call.spec)
        result = call.function(*args, **kwargs)
    else:
        args, kwargs = tree_unflatten(leaves, call.spec)
        result = functional_call(use.module, chosen, args, kwargs)
    flat, _ = tree_flatten(result)
    found = [*(flat[i] for i in call.outputs), *attribute_values(call.kept)]
    return [cast("Tensor", one).squeeze(dim) for one, dim in zip(found, call.output_dims, strict=True)]


def captured_operation(
    function: Callable[..., object],
    spec: TreeSpec,
    constants: Sequence[object],
    slots: Sequence[int],
    sources: Sequence[int],
) -> CapturedCall:
    """A call of one function of torch, whose inputs at `slots` and whose only output have the records first.

    Args:
        function: the function.
        spec: structure of (args, kwargs).
        constants: the leaves of (args, kwargs).
        slots: which of them are records' tensors.
        sources: which of them gradients are wanted of; each is called by its index.
    """
    absent = {*slots, *sources}
    return CapturedCall(
        spec=spec,
        constants=tuple(None if i in absent else leaf for i, leaf in enumerate(constants)),
        slots=tuple(slots),
        input_dims=tuple(0 for _ in slots),
        outputs=(0,),
        output_dims=(0,),
        function=function,
        sources=tuple((position, str(position)) for position in sources),
    )


def is_record_by_record(use: LayerCall, saved: tuple[Tensor, ...], result: Tensor) -> bool:
    """Whether an operation has the same result for each record alone, up to rounding."""
    call = cast("CapturedCall", use.context)
    chosen = {name: use.parameters[name].detach() for _, name in call.sources}
    try:
        rows = [_outputs(use, call, chosen, tuple(t[b].detach() for t in saved))[0] for b in range(use.records)]
        whole = torch.stack(rows)
    except (RuntimeError, IndexError, ValueError, TypeError):
        return False
    if whole.shape != result.shape:
        return False
    eps = torch.finfo(result.dtype).eps
    scale = float(result.detach().abs().nan_to_num(posinf=0.0).amax()) if result.numel() else 0.0
    return torch.allclose(whole, result.detach(), rtol=64 * eps**0.75, atol=64 * eps**0.75 * scale, equal_nan=True)
