"""Functions of torch that are replaced while their own module runs.

`nn.MultiheadAttention` and the recurrent modules hand all their parameters to one function. While such a module runs,
a `TorchFunctionMode` sees that one call and computes it from public operations in a layout that is ours, with the
linear maps inside captured. Nothing depends on how torch computes the function inside, so a new version of torch
can't move the records to another dimension unnoticed; a call that doesn't come to us sends its parameters an ordinary
gradient and is refused.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C import (
    _current_graph_task_id,  # pyright: ignore[reportPrivateUsage]
    _will_engine_execute_node,  # pyright: ignore[reportPrivateUsage]
)
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from sordino.errors import PrivacyError, UnsupportedModule
from sordino.gradients.batch_dim import ELEMENTWISE, BatchDimMark, BatchDimTracker, argument_tensors, keeps_rows, words
from sordino.gradients.captured_gradients import CapturedGradients
from sordino.gradients.fallback import CapturedCall, captured_operation, functional_fallback, is_record_by_record
from sordino.gradients.module_hooks import CapturedModule, OutputGradientReceiver, in_checkpoint
from sordino.gradients.numerics import storage_number
from sordino.gradients.rules.base import LayerCall, LayerRule
from sordino.gradients.rules.composite import (
    Derived,
    DerivedContext,
    LinearMap,
    Lookup,
    derived_rule,
    direct_rule,
    parts_rule,
)
from sordino.gradients.rules.embedding import EmbeddingRule

# ----------------------------------------------------------------------------------------------------------------------
# The node in the autograd graph where a layer's output gradient is read.
#
# The node passes values and gradients through unchanged. Kept tensors go through ``save_for_backward``, so torch checks
# their versions and non-reentrant checkpointing recomputes them.
# ----------------------------------------------------------------------------------------------------------------------


# The last question, as (number of the backward pass, anchor), and its answer.
_last_asked: tuple[tuple[int, int], bool] = ((-1, 0), False)

# What is called with (kept tensors, gradient at each output) when the backward pass arrives.
Receiver = Callable[[tuple[Tensor, ...], tuple[Tensor | None, ...]], None]


class _OutputGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, receive: Receiver, anchor: Tensor, outputs: int, *tensors: Tensor):
        ctx.receive = receive
        ctx.anchor = anchor
        ctx.outputs = outputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors[outputs:])
        # detach() shares memory and version counter but is not a tracked view: in-place operations on the result work.
        passed = tuple(output.detach() for output in tensors[:outputs])
        return passed if outputs != 1 else passed[0]

    @staticmethod
    def backward(ctx, *grads: Tensor | None):
        if needs_parameter_grads(ctx.anchor):
            # Detached, or the kept tensors would keep the graph that keeps them.
            saved = tuple(tensor.detach() for tensor in ctx.saved_tensors)
            ctx.receive(saved, tuple(None if grad is None else grad.detach() for grad in grads))
        return None, None, None, *grads, *(None for _ in ctx.needs_input_grad[3 + ctx.outputs :])


def needs_parameter_grads(anchor: Tensor) -> bool:
    """Whether the backward pass that is running asks for parameter gradients.

    ``autograd.grad(loss, inputs)`` doesn't, and then the anchor isn't visited either.

    Raises:
        PrivacyError: the pass builds a graph of itself.
    """
    if torch.is_grad_enabled():
        raise PrivacyError(
            "backward must be called with create_graph=False on a captured model, got create_graph=True. "
            "Gradients of gradients can't be clipped per record. For a penalty on the slope at the inputs take the "
            "difference of two outputs instead, (model(x + h * v) - model(x)) / h with random directions v of length 1."
        )
    global _last_asked  # noqa: PLW0603 (one answer for every caller)
    # All nodes of one pass get the same answer; the pass keeps the anchor alive, and no other has its number.
    asked = (_current_graph_task_id(), id(anchor))
    if _last_asked[0] != asked:
        _last_asked = (asked, _will_engine_execute_node(_node_of(anchor)))
    return _last_asked[1]


@lru_cache(maxsize=16)
def _node_of(anchor: Tensor) -> torch.autograd.graph.Node:
    """The node that gradients of `anchor` would reach: every graph has the same one as long as somebody holds it."""
    return torch.autograd.graph.get_gradient_edge(anchor).node


def capture_outputs(
    receive: Receiver, anchor: Tensor, outputs: tuple[Tensor, ...], saved: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """`outputs`, passed through a node that calls `receive` during the backward pass.

    Args:
        receive: called with the kept tensors and the gradient at each output (None where none arrived); not called
            when only gradients of other tensors were asked for.
        anchor: a scalar that requires grad, so that the first layer's output does too.
        outputs: floating tensors, not aliases of a tensor that the caller still uses.
        saved: tensors to keep until the backward pass.
    """
    passed = _OutputGradient.apply(receive, anchor, len(outputs), *outputs, *saved)
    return (passed,) if isinstance(passed, Tensor) else passed


# ----------------------------------------------------------------------------------------------------------------------
# Functions of torch that are replaced while their own module runs.
# ----------------------------------------------------------------------------------------------------------------------


# What stands in for a function of torch: called with the interceptor and the function's arguments.
Replacement = Callable[..., object]


class FunctionInterceptor(TorchFunctionMode):
    """The capture of one call: which parameters it has, and where what the backward pass brings goes.

    Args:
        module: the module that is called.
        label: its qualified name and class.
        parameters: its captured parameters by name.
        recording: what receives the uses.
        anchor: a scalar that requires grad.
        replacements: what is called instead of a function of torch, with the interceptor as its first argument.
        order: where the rows of a packed batch come from: record b is row ``order[b]``; None for as they are.
        batched: whether the module was given a batch; a recurrent module hides it from its function.
    """

    def __init__(
        self,
        *,
        module: nn.Module,
        label: str,
        parameters: Mapping[str, nn.Parameter],
        recording: CapturedGradients,
        anchor: Tensor,
        replacements: Mapping[object, Replacement],
        order: Tensor | None,
        batched: bool,
    ) -> None:
        super().__init__()
        self.module, self.label, self.order, self.batched = module, label, order, batched
        self.records = recording.records
        self.anchor = anchor
        self._recording = recording
        self._replacements = replacements
        self._parameters = parameters
        self._names = {id(parameter): name for name, parameter in parameters.items()}

    def __torch_function__(
        self, func: object, types: object, args: tuple[object, ...] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        """Route a replaced function to its replacement; everything else runs as it is."""
        del types
        assert callable(func)
        replacement = self._replacements.get(func)
        if replacement is None:
            return func(*args, **(kwargs or {}))
        return replacement(self, *args, **(kwargs or {}))

    def name(self, parameter: Tensor | None) -> str | None:
        """The name of a captured parameter; None for a frozen one or none."""
        return None if parameter is None else self._names.get(id(parameter))

    def receiver(
        self, rule: LayerRule, names: set[str], context: object, dims: tuple[int, ...]
    ) -> OutputGradientReceiver:
        """What takes the backward pass of one use of the parameters `names`; see `LayerCall` for the rest."""
        use = LayerCall(
            module=self.module,
            label=self.label,
            rule=rule,
            parameters={name: self._parameters[name] for name in sorted(names)},
            records=self.records,
            context=context,
        )
        return OutputGradientReceiver(recording=self._recording, use=use, dims=dims)

    def capture(
        self,
        rule: LayerRule,
        names: set[str],
        context: object,
        outputs: tuple[Tensor, ...],
        saved: tuple[Tensor, ...],
        *,
        dim: int = 0,
    ) -> tuple[Tensor, ...]:
        """`outputs`, with the records at `dim`, passed through a node that reads their gradients for `rule`."""
        if not names:
            return outputs
        receive = self.receiver(rule, names, context, tuple(dim for _ in outputs))
        return capture_outputs(receive, self.anchor, outputs, saved)


# ----------------------------------------------------------------------------------------------------------------------
# The walk over an autograd graph that finds parameters used in the ordinary way.
# ----------------------------------------------------------------------------------------------------------------------


# Graphs of parameters alone are small.
_MOST_NODES = 10_000
# The nodes that captured layers leave in the graph.
# autograd names the nodes of `_OutputGradient` and of the recurrent layers' `_Direction` so.
CAPTURING_NODES = frozenset({"_OutputGradientBackward", "_DirectionBackward"})


def uncaptured_parameters(loss: Tensor, names: Mapping[Tensor, str]) -> list[str]:
    """Names of the parameters in `names` that would receive an ordinary gradient from `loss`, sorted.

    Captured layers run with their parameters switched off, so every accumulation node of a parameter that is left in
    the graph is a use that no rule captured: `F.linear(x, other.weight)`, weight decay in the loss, a
    parametrization outside its layer.
    """
    found: set[str] = set()
    seen: set[torch.autograd.graph.Node] = set()
    if loss.requires_grad and loss.is_leaf:
        return sorted({names[loss]} if loss in names else ())
    pending = [loss.grad_fn] if loss.grad_fn is not None else []
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None and variable in names:
            found.add(names[variable])
        pending.extend(parent for parent, _ in node.next_functions if parent is not None)
    return sorted(found)


def graph_parameters(tensor: Tensor) -> list[Tensor] | None:
    """The leaves that `tensor` was computed from, or None where a captured layer, or too much, lies in between."""
    found: dict[int, Tensor] = {}
    seen: set[torch.autograd.graph.Node] = set()
    pending = [tensor.grad_fn] if tensor.grad_fn is not None else []
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if len(seen) > _MOST_NODES or type(node).__name__ in CAPTURING_NODES:
            return None
        variable = getattr(node, "variable", None)
        if variable is not None:
            found[id(variable)] = variable
        pending.extend(parent for parent, _ in node.next_functions if parent is not None)
    return list(found.values())


# ----------------------------------------------------------------------------------------------------------------------
# Parameters and rows of tables that a forward reads for all records alike.
#
# Class tokens, tables of positions, prompts, learned queries and first states, scales, computed weights: while a module
# is followed, a `TorchFunctionMode` replaces each parameter by a stand-in leaf that no captured layer reads.
# What is computed from stand-ins and from tensors without records is *derived*: the same for every record. It stays
# with its small graph, through layers and through other modules. Where it meets a tensor that has the records first,
# every record gets a copy of its own (or the operation is captured like a layer), and the gradient of the copy is the
# record's; what the copy was derived by pulls it back. Where that can't be done the innermost call that holds all of it
# becomes opaque: it is made again as a whole. An ordinary gradient that reaches a parameter or a stand-in is refused.
# ----------------------------------------------------------------------------------------------------------------------


_Args = tuple[object, ...]
_Kwargs = dict[str, object]

_CATS = frozenset(("cat", "concat", "concatenate"))
_PRODUCTS = frozenset(("matmul", "__matmul__", "bmm", "scaled_dot_product_attention"))
# Only the shape or the type of the other tensor is read.
_LIKE = frozenset(("expand_as", "view_as", "reshape_as", "type_as", "to"))
_LIKE_ITS_FIRST = words("zeros_like ones_like rand_like randn_like empty_like full_like new_zeros new_ones new_empty")
_EXPANSIONS = words("expand expand_as broadcast_to repeat tile")
# Values that leave for Python may steer what happens to every record.
_READS = words(
    "item tolist numpy __bool__ __float__ __int__ __index__ __array__ __contains__ equal allclose is_nonzero"
)
_EXPANDING = _EXPANSIONS | _CATS | {"stack"}
_RANDOM = words("dropout alpha_dropout feature_dropout feature_alpha_dropout dropout1d dropout2d dropout3d rrelu")
_EMBEDDING = EmbeddingRule()
# Views that may show an entry twice.
_OVERLAPPING = frozenset(("as_strided", "unfold"))
# Attributes of a tensor that are tensors too.
_VIEWS = words("T mT H mH data real imag")
_SAME_SHAPE = words("to float double half bfloat16 type type_as contiguous clone")
_KEPT_ROWS_OF_A_TABLE = _SAME_SHAPE | words(
    "view reshape unsqueeze squeeze flatten unflatten view_as __getitem__ expand"
)
# What is noted at the leaves of a graph, and is there as long as the graph is.
MARK = "sordino"


class _Opaque(Exception):
    """The parameters are used in a way that isn't followed: no error, the module is run again."""


@dataclass(eq=False, kw_only=True)
class FollowedCall:
    """One call of a module that is followed.

    Args:
        site: the module.
        outermost: no call around it is followed.
        checkpointed: it lies in a block that is run again in the backward pass.
        is_opaque: it has to be made again as a whole.
        interceptor: what followed it, once it has ended.
        leaves: what stood in for its parameters from then on, where it has turned out to be opaque.
        around: the followed call that it lies in.
        own: numbers of the module's parameters, once asked for.
    """

    site: CapturedModule
    outermost: bool
    checkpointed: bool
    is_opaque: bool = False
    interceptor: "DirectParameterInterceptor | None" = None
    leaves: list[Tensor] = field(default_factory=list)
    around: "FollowedCall | None" = None
    own: set[int] | None = None

    @property
    def owns_parameters(self) -> bool:
        """Whether the module's own forward reads parameters."""
        return any(value.requires_grad for _, value in self.site.parameters())

    def holds(self, parameter: Tensor) -> bool:
        """Whether `parameter` belongs to the module or to one inside it."""
        if self.own is None:
            self.own = {id(value) for value in self.site.module.parameters()}
        return id(parameter) in self.own


class DirectParameterInterceptor(TorchFunctionMode):
    """Follows what is computed from parameters through one call of the model or of a part of it.

    Args:
        parameters: the model's parameters by their numbers.
        names: the managed ones.
        owners: the managed ones by name.
        recording: what receives the uses.
        anchor: a scalar that requires grad.
        marks: what is known of tensors in this forward pass.
        placeholders: takes what stands in for parameters, with their names.
        refuse: called with a parameter's name when an ordinary gradient arrives.
        verified: forms of operations that were seen to treat every record alone; grows.
    """

    def __init__(
        self,
        *,
        parameters: Mapping[int, nn.Parameter],
        names: Mapping[nn.Parameter, str],
        owners: Mapping[str, nn.Parameter],
        recording: CapturedGradients,
        anchor: Tensor,
        marks: BatchDimTracker,
        placeholders: dict[Tensor, str],
        refuse: Callable[[str], None],
        verified: set[object],
    ) -> None:
        super().__init__()
        self.marks, self.calls = marks, list[FollowedCall]()
        self.ended: FollowedCall | None = None
        # Whether something derived was read outside the call of the module that owns its parameters.
        self.crossed = False
        self._names, self._recording, self._anchor, self._refuse = names, recording, anchor, refuse
        self.records = recording.records
        self._placeholders, self._verified = placeholders, verified
        self._derived: dict[int, Derived] = {}
        self._parameters, self._owners = parameters, owners
        self._constant_repeats: dict[int, tuple[weakref.ref[Tensor], frozenset[int]]] = {}
        self._leaves: dict[int, Tensor] = {}
        self._owner_of: dict[int, nn.Parameter] = {}
        self._nodes: list[object] = []

    # --- what is followed ----------------------------------------------------------------------------------------

    @property
    def is_discarding(self) -> bool:
        """Whether a call in progress will be made once more, and what happens now is thrown away."""
        return any(call.is_opaque for call in self.calls)

    def is_in_other_checkpoint(self) -> bool:
        """Whether a checkpointed block runs that the innermost followed call isn't part of."""
        inside = self._recording.is_rehearsed or in_checkpoint()
        return bool(self.calls) and inside != self.calls[-1].checkpointed

    def derived(self, value: object) -> Derived | None:
        """What `value` was derived from, or None."""
        found = self._derived.get(id(value))
        if found is not None:
            return found
        parameter = self._parameters.get(id(value), self._owner_of.get(id(value)))
        if parameter is None or not parameter.requires_grad or parameter not in self._names:
            return None
        leaf = self._leaves.get(id(parameter))
        if leaf is None:
            leaf = self._stand_in(parameter)
        return Derived(
            tensor=leaf, leaves={self._names[parameter]: leaf}, isometric=True, scope=self.scope_of(parameter)
        )

    def scope_of(self, parameter: Tensor, call: FollowedCall | None = None) -> FollowedCall | None:
        """The innermost call in progress whose module holds `parameter`."""
        calls = [*self.calls, *([] if call is None else [call])]
        return next((one for one in reversed(calls) if one.holds(parameter)), calls[0] if calls else None)

    def _stand_in(self, parameter: nn.Parameter) -> Tensor:
        name = self._names[parameter]
        leaf = parameter.detach().requires_grad_()
        # Not through `self`, which holds what was derived from the leaf, and with it the leaf's own graph.
        refuse = self._refuse
        leaf.register_hook(lambda _: refuse(name))
        self._leaves[id(parameter)] = leaf
        self._owner_of[id(leaf)] = parameter
        self._placeholders[leaf] = name
        node = torch.autograd.graph.get_gradient_edge(leaf).node
        cast("dict[str, bool]", node.metadata)[MARK] = True
        self._nodes.append(node)
        return leaf

    def __torch_function__(
        self, func: object, types: object, args: _Args = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        """Run `func`, with stand-ins for parameters and copies per record where they meet records."""
        del types
        assert callable(func)
        given = dict(kwargs or {})
        if self.marks.paused or not self.calls or self.is_discarding:
            return func(*args, **given)
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = getattr(getattr(func, "__self__", None), "__name__", name)
            if name not in _VIEWS:
                return func(*args, **given)
        tensors = argument_tensors([*args, *given.values()])
        tracked = self._tracked(tensors)
        if name in _READS:
            self._read(tensors)
        if not tracked or (name in _LIKE and self.derived(args[0]) is None) or name in _LIKE_ITS_FIRST:
            if any(id(tensor) in self._parameters for tensor in tensors):
                args, given = (
                    cast("_Args", self._swapped(args)),
                    {key: self._swapped(value) for key, value in given.items()},
                )
            result = func(*args, **given)
            self.marks.set_result(_plain(name), args, given, result)
            if tensors and isinstance(result, Tensor) and self.marks.record_free(result):
                dims = self._repeats(_plain(name), args, given, result)
                if dims:
                    self._constant_repeats[id(result)] = (weakref.ref(result), dims)
            return result
        if self.is_in_other_checkpoint():
            raise UnsupportedModule(
                f"{next(iter(tracked[0].leaves))} must be read outside checkpointed blocks, or in a module of its own "
                "inside one, got something computed from it without records that a checkpointed block reads. Leave "
                'gradient checkpointing out, or use PerformanceOptions(gradients="one-by-one").'
            )
        try:
            named = {key: self._swapped(value) for key, value in given.items()}
            return self._followed(func, name, cast("_Args", self._swapped(args)), named, tracked)
        except (_Opaque, RuntimeError):
            # The call as it was; an error that is the model's own comes up again.
            for source in tracked:
                self.give_up(source.scope)
            return func(*args, **given)

    def _tracked(self, tensors: Sequence[Tensor]) -> list[Derived]:
        found: list[Derived] = []
        for tensor in tensors:
            derived = self.derived(tensor)
            if derived is None and tensor.requires_grad and tensor.grad_fn is not None:
                derived = self._from_graph(tensor)
            if derived is not None:
                found.append(derived)
        return found

    def _from_graph(self, tensor: Tensor) -> Derived | None:
        """What a function that isn't one of torch's computed from parameters alone: its graph says so."""
        if self.marks.has_records(tensor):
            return None
        found = graph_parameters(tensor)
        leaves: dict[str, Tensor] = {}
        for leaf in found or ():
            name = self._placeholders.get(leaf, self._names.get(cast("nn.Parameter", leaf)))
            if name is None or name in leaves:
                return None
            leaves[name] = leaf
        if not leaves:
            return None
        scopes = [self.scope_of(self._owners[name]) for name in leaves]
        self._derived[id(tensor)] = derived = Derived(tensor=tensor, leaves=leaves, scope=self._outer(scopes))
        return derived

    def _open_call(self, scope: object) -> FollowedCall | None:
        """The call in progress that `scope` is, or lies in: what a call returned belongs to the one around it."""
        while isinstance(scope, FollowedCall) and scope not in self.calls:
            scope = scope.around
        return scope if isinstance(scope, FollowedCall) else (self.calls[0] if self.calls else None)

    def _outer(self, scopes: Sequence[object]) -> FollowedCall | None:
        """The outermost of the calls in progress that `scopes` belong to."""
        found = [call for scope in scopes if (call := self._open_call(scope)) is not None]
        return min(found, key=self.calls.index, default=None)

    def give_up(self, scope: object) -> None:
        """The call in progress that `scope` belongs to is made again as a whole."""
        call = self._open_call(scope)
        if call is not None:
            call.is_opaque = True

    def forget(self, call: FollowedCall) -> None:
        """A call that will be made again has ended: nothing that was derived in it is read any more."""
        call.leaves = [leaf for key, leaf in self._leaves.items() if call.holds(self._parameters[key])]
        for key in [key for key, derived in self._derived.items() if derived.scope is call]:
            del self._derived[key]
        for key in [key for key in self._leaves if call.holds(self._parameters[key])]:
            self._placeholders.pop(self._leaves.pop(key), None)
        self._nodes.clear()

    def _read(self, tensors: Sequence[Tensor]) -> None:
        """A value leaves for Python: a module that reads parameters of its own may be steered by it."""
        call = self.calls[-1]
        if any(self.marks.has_records(tensor) or tensor.requires_grad for tensor in tensors) and call.owns_parameters:
            call.is_opaque = True

    def _swapped(self, value: object) -> object:
        """`value` with stand-ins for parameters, and those that get no gradient detached."""
        if isinstance(value, Tensor):
            parameter = self._parameters.get(id(value))
            if parameter is None or not parameter.requires_grad:
                return value
            derived = self.derived(parameter)
            if derived is not None:
                return derived.tensor
            detached = parameter.detach()
            self.marks.set(detached, BatchDimMark.CONSTANT)
            return detached
        if type(value) in (list, tuple):
            items = [self._swapped(item) for item in cast("Sequence[object]", value)]
            return items if type(value) is list else tuple(items)
        return value

    def _followed(
        self, func: Callable[..., object], name: str, args: _Args, kwargs: _Kwargs, tracked: list[Derived]
    ) -> object:
        tensors = argument_tensors([*args, *kwargs.values()])
        others = [t for t in tensors if self.derived(t) is None]
        if name in _LIKE or all(self.marks.record_free(tensor) for tensor in others):
            return self._derive(func(*args, **kwargs), tracked, name, args, kwargs)
        base = _plain(name)
        if not torch.is_grad_enabled() or (base != name and self._is_target(args)):
            raise _Opaque
        try:
            return self._met(func, base, args, kwargs)
        except _Opaque:
            if base != name or name.startswith("__set"):
                raise
            return self._operation(func, name, args, kwargs)

    def _met(self, func: Callable[..., object], base: str, args: _Args, kwargs: _Kwargs) -> object:
        """What was derived meets records in an operation that is known."""
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

    def _derive(self, result: object, tracked: list[Derived], name: str, args: _Args, kwargs: _Kwargs) -> object:
        """Remember tensors that were computed from derived ones and from tensors without records."""
        scope = self._outer([source.scope for source in tracked])
        self.crossed = self.crossed or scope is not self.calls[-1]
        leaves = {key: leaf for source in tracked for key, leaf in source.leaves.items()}
        for tensor in argument_tensors([result]):
            if not tensor.requires_grad:
                if tensor.is_floating_point() or name not in ("shape", "__get__"):
                    self.marks.set(tensor, BatchDimMark.CONSTANT)
                continue
            source = tracked[0]
            same = tensor.dtype == source.tensor.dtype and 0 not in tensor.stride()
            view = same and storage_number(tensor) == storage_number(source.tensor)
            alone = len(tracked) == 1 and name not in _OVERLAPPING
            self._derived[id(tensor)] = Derived(
                tensor=tensor,
                leaves=leaves,
                isometric=alone and view and source.isometric,
                repeats=self._repeats(_plain(name), args, kwargs, tensor),
                drawn=_plain(name) in _RANDOM or any(source.drawn for source in tracked),
                lookup=self._looked_up(name, args, kwargs, tensor) if alone else None,
                scope=scope,
            )
        return result

    def _looked_up(self, name: str, args: _Args, kwargs: _Kwargs, result: Tensor) -> Lookup | None:
        """How `result` shows rows of a table, by numbers that are the same for every record."""
        given = dict(zip(("input", "weight", "padding_idx"), args, strict=False)) | kwargs
        if name == "embedding":
            table, ids, padding = self.derived(given["weight"]), given["input"], given.get("padding_idx")
            usual = not any(given.get(option) for option in ("max_norm", "scale_grad_by_freq", "sparse"))
        elif name == "__getitem__" and isinstance(args[1], Tensor):
            table, ids, padding, usual = self.derived(args[0]), args[1], None, True
        else:
            before = self.derived(args[0]) if args else None
            if before is None or before.lookup is None or name not in _KEPT_ROWS_OF_A_TABLE:
                return None
            same = result.numel() == before.tensor.numel() and result.dtype == before.tensor.dtype
            return before.lookup if same and result.shape[-1] == before.tensor.shape[-1] else None
        if table is None or not table.isometric or table.tensor.dim() != 2 or not usual:
            return None
        if not isinstance(ids, Tensor) or ids.dtype not in (torch.int64, torch.int32):
            return None
        if name == "__getitem__":
            ids = torch.where(ids < 0, ids + table.tensor.shape[0], ids)
        return Lookup(table=table, ids=ids, padding=cast("int | None", padding))

    def _repeats(self, name: str, args: _Args, kwargs: _Kwargs, result: Tensor) -> frozenset[int]:
        """The dimensions of `result` along which all slices are equal because of an expansion."""
        tensors = argument_tensors([*args, *kwargs.values()])
        first = tensors[0]
        before = self._repeated_dims(first)
        if not before and name not in _EXPANDING and name not in ELEMENTWISE:
            return before
        shape, offset = first.shape, result.dim() - first.dim()
        if name in _EXPANSIONS:
            old = {d + offset for d in range(first.dim()) if shape[d] == 1 or d in before}
            return frozenset({*range(offset), *old})
        if name in _CATS or name == "stack":
            dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
            if not isinstance(dim, int) or len({id(t) for t in tensors}) > 1 or (name != "stack" and shape[dim] != 1):
                return frozenset()
            return frozenset({dim % result.dim()})
        if name in ("transpose", "permute", "swapaxes", "unsqueeze", "movedim", "t", "T", "mT") and before:
            # A tensor of the same shape whose entries are the numbers of its dimensions shows where they go.
            return self._moved(name, args, kwargs, before, first)
        if name in ELEMENTWISE:
            return frozenset(d for d in range(result.dim()) if all(self._is_repeated_at(t, d, result) for t in tensors))
        if name in _RANDOM:
            return before
        if name in ("view", "reshape", "flatten", "unflatten", "squeeze"):
            return frozenset(d for d in before if result.shape[: d + 1] == shape[: d + 1])
        rows = 0 in before and keeps_rows(name, args, kwargs, tensors, result)
        return frozenset({0}) if rows and all(t is first or self._has_no_rows(t) for t in tensors) else frozenset()

    @staticmethod
    def _moved(name: str, args: _Args, kwargs: _Kwargs, before: frozenset[int], first: Tensor) -> frozenset[int]:
        sizes = [d + 2 for d in range(first.dim())]
        probe = torch.empty(sizes, device="meta")
        method = {"T": lambda t: t.T, "mT": lambda t: t.mT}.get(name)
        shown = (
            method(probe)
            if method
            else getattr(probe, name)(*args[1:], **{k: v for k, v in kwargs.items() if k != "input"})
        )
        return frozenset(d for d, size in enumerate(shown.shape) if size - 2 in before)

    def _repeated_dims(self, tensor: Tensor) -> frozenset[int]:
        found = self.derived(tensor)
        if found is not None:
            return found.repeats
        if self.marks.uniform(tensor):
            return frozenset(range(tensor.dim()))
        reference, dims = self._constant_repeats.get(id(tensor), (None, frozenset()))
        return dims if reference is not None and reference() is tensor else frozenset()

    def _is_repeated_at(self, tensor: Tensor, dim: int, result: Tensor) -> bool:
        own = dim - (result.dim() - tensor.dim())
        return own < 0 or tensor.shape[own] == 1 or own in self._repeated_dims(tensor)

    def _has_no_rows(self, tensor: Tensor) -> bool:
        """Whether a second argument is the same for every row of the first: weights and constants of torch's layers."""
        return self.derived(tensor) is not None and not self._repeated_dims(tensor)

    # --- what is captured ----------------------------------------------------------------------------------------

    def capture(
        self,
        rule: LayerRule,
        context: object,
        sources: Mapping[str, Derived],
        output: Tensor,
        saved: tuple[Tensor, ...],
        module: nn.Module | None = None,
        *,
        dim: int = 0,
        rows_of: int | None = None,
    ) -> Tensor:
        """`output`, with the records at `dim`, passed through a node that reads its gradient for what `sources` are."""
        if any(tensor.is_complex() for tensor in (output, *saved)):
            raise _Opaque  # The kernels multiply real numbers.
        call = self.calls[-1] if self.calls else cast("FollowedCall", self.ended)
        names = sorted({name for source in sources.values() for name in source.leaves})
        outer = self._outer([source.scope for source in sources.values()])
        self.crossed = self.crossed or (outer is not None and outer is not call)
        own = module or call.site.module
        use = LayerCall(
            module=own,
            label=call.site.label,
            rule=derived_rule,
            parameters={name: self._owners[name] for name in names},
            records=self.records,
            context=DerivedContext(rule=rule, module=own, context=context, sources=sources, rows_of=rows_of),
        )
        if rows_of is not None:
            saved = (*saved, torch.arange(self.records, device=output.device))
        receive = OutputGradientReceiver(recording=self._recording, use=use, dims=(dim,))
        (passed,) = capture_outputs(receive, self._anchor, (output,), saved)
        if dim == 0:
            self.marks.set(passed, BatchDimMark.RECORDS_FIRST)
        return passed

    def per_record(self, tensor: Tensor, dims: int, dim: int = 0) -> Tensor:
        """One copy of a derived tensor per record, where the records are at `dim` of `dims` dimensions.

        Raises:
            _Opaque: there it has something else.
        """
        source = self.derived(tensor)
        assert source is not None
        tensor = source.tensor
        if tensor.dim() == dims > dim:
            size = tensor.shape[dim]
            if size == 1:
                sizes = list(tensor.shape)
                sizes[dim] = self.records
                copies = tensor.detach().expand(sizes)
            elif size != self.records:
                raise _Opaque
            elif not size:
                copies = tensor.detach().clone()
            elif dim not in source.repeats:
                raise _Opaque
            elif source.drawn:
                # Every record reads a slice of its own, which differs from the others by random draws alone.
                return self.capture(
                    direct_rule, ("value",), {"value": source}, tensor.detach().clone(), (), dim=dim, rows_of=dim
                )
            else:
                row, lookup = tensor.narrow(dim, 0, 1), source.lookup
                if lookup is not None:
                    same = dim < lookup.ids.dim() == tensor.dim() - 1
                    lookup = replace(lookup, ids=lookup.ids.narrow(dim, 0, 1)) if same else None
                copies = tensor.detach().clone()
                source = Derived(tensor=row, leaves=source.leaves, lookup=lookup, scope=source.scope)
        elif tensor.dim() < dims and dim == 0:
            missing = dims - 1 - tensor.dim()
            copies = tensor.detach()[(None,) * (missing + 1)].expand(self.records, *[1] * missing, *tensor.shape)
        else:
            raise _Opaque
        if source.lookup is not None and dim == 0 and copies.dim() > 1:
            return self._rows(source.lookup, copies)
        return self.capture(direct_rule, ("value",), {"value": source}, copies, (), dim=dim)

    def _rows(self, lookup: Lookup, copies: Tensor) -> Tensor:
        """Copies of rows of a table: read as if every record had looked them up."""
        ids = lookup.ids.reshape(copies.shape[1:-1]).expand(copies.shape[:-1]).contiguous()
        return self.capture(_EMBEDDING, None, {"weight": lookup.table}, copies, (ids,), _layer_of(lookup))

    def per_record_argument(self, tensor: Tensor, dim: int) -> Tensor | None:
        """A derived tensor that is handed on, with the records at `dim`; None where it can't be."""
        try:
            return self.per_record(tensor, tensor.dim(), dim)
        except _Opaque:
            return None

    def is_repeated(self, tensor: Tensor, dim: int) -> bool:
        """Whether a derived tensor was expanded to as many equal slices at `dim` as there are records."""
        return tensor.dim() > dim and tensor.shape[dim] == self.records and dim in self._repeated_dims(tensor)

    def _copied(self, values: object, dims: int) -> object:
        if isinstance(values, Tensor):
            return self.per_record(values, dims) if self.derived(values) is not None else values
        if type(values) in (list, tuple):
            items = [self._copied(item, dims) for item in cast("Sequence[object]", values)]
            return items if type(values) is list else tuple(items)
        return values

    def _broadcast(self, func: Callable[..., object], args: _Args, kwargs: _Kwargs) -> object:
        tensors = argument_tensors([*args, *kwargs.values()])
        dims = max(tensor.dim() for tensor in tensors)
        if not self.marks.any_first([t for t in tensors if self.derived(t) is None], dims):
            raise _Opaque
        args = cast("_Args", self._copied(args, dims))
        kwargs = {key: self._copied(value, dims) for key, value in kwargs.items()}
        result = func(*args, **kwargs)
        for tensor in argument_tensors([result]):
            self.marks.set(tensor, BatchDimMark.RECORDS_FIRST)
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
        self.marks.set(cast("Tensor", result), BatchDimMark.RECORDS_FIRST)
        return result

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002
        sources: dict[str, Derived] = {}
        for key, value in (("weight", weight), ("bias", bias)):
            if (found := self.derived(value)) is not None:
                sources[key] = found
            elif value is not None and not self.marks.record_free(value):
                raise _Opaque
        if self.derived(input) is not None or not self.marks.records_first(input) or input.dim() < 2:
            raise _Opaque
        output = F.linear(input, weight.detach(), None if bias is None else bias.detach())
        weight_name, bias_name = ("weight" if "weight" in sources else None, "bias" if "bias" in sources else None)
        part = LinearMap(weight=weight_name, bias=bias_name)
        return self.capture(parts_rule, (part,), sources, output, (input,))

    def _product(self, func: Callable[..., object], name: str, args: _Args, kwargs: _Kwargs) -> object:
        tensors = argument_tensors([*args, *kwargs.values()])
        dims = max(tensor.dim() for tensor in tensors)
        left, right = args[:2]
        matrix = self.derived(right) if name in ("matmul", "__matmul__") else None
        if matrix is not None and matrix.tensor.dim() <= 2 and self.derived(left) is None:
            row = matrix.tensor.dim() == 1
            weight = matrix.tensor[None] if row else matrix.tensor.t()
            self._derive(weight, [matrix], "t", (matrix.tensor,), {})
            result = self._linear(cast("Tensor", left), weight)
            result = result.squeeze(-1) if row else result
            self.marks.set(result, BatchDimMark.RECORDS_FIRST)
            return result
        if dims < 3 or not self.marks.any_first([t for t in tensors if self.derived(t) is None], dims):
            raise _Opaque
        if any(self.derived(t) is not None and t.dim() < 3 for t in tensors):
            raise _Opaque
        args = cast("_Args", self._copied(args, dims))
        kwargs = {key: self._copied(value, dims) for key, value in kwargs.items()}
        result = func(*args, **kwargs)
        self.marks.set(cast("Tensor", result), BatchDimMark.RECORDS_FIRST)
        return result

    def _normalized(self, func: Callable[..., object], args: _Args, kwargs: _Kwargs) -> object:
        names = ("input", "normalized_shape", "weight", "bias", "eps")
        given = dict(zip(names if func is F.layer_norm else (*names[:3], "eps"), args, strict=False)) | kwargs
        x, weight, bias = given["input"], given.pop("weight", None), given.pop("bias", None)
        if not isinstance(x, Tensor) or self.derived(x) is not None or not self.marks.records_first(x):
            raise _Opaque
        result = cast("Tensor", func(**given))
        self.marks.set(result, BatchDimMark.RECORDS_FIRST)
        for operation, value in ((torch.mul, weight), (torch.add, bias)):
            if self.derived(value) is not None:
                result = cast("Tensor", self._broadcast(operation, (result, value), {}))
            elif value is not None:
                result = operation(result, cast("Tensor", value))
                self.marks.set(result, BatchDimMark.RECORDS_FIRST)
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
        if name == "__getitem__":
            ids = torch.where(ids < 0, ids + source.tensor.shape[0], ids)
        layer = _layer_of(Lookup(table=source, ids=ids, padding=cast("int | None", padding)))
        output = F.embedding(ids, source.tensor.detach())
        return self.capture(_EMBEDDING, None, {"weight": source}, output, (ids,), layer)

    def _operation(self, func: Callable[..., object], name: str, args: _Args, kwargs: _Kwargs) -> object:
        """Any other function of torch that treats every record alone: tried on each record by itself."""
        leaves, spec = tree_flatten((args, kwargs))
        sources = [i for i, leaf in enumerate(leaves) if self.derived(leaf) is not None]
        slots = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and self.marks.records_first(leaf)]
        rest = [leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and i not in {*sources, *slots}]
        if not slots or kwargs.get("out") is not None or any(not self.marks.record_free(leaf) for leaf in rest):
            raise _Opaque
        origins = {str(i): cast("Derived", self.derived(leaves[i])) for i in sources}
        values = [origins[str(i)].tensor.detach() if i in sources else leaf for i, leaf in enumerate(leaves)]
        detached, named = tree_unflatten(values, spec)
        state = torch.get_rng_state()
        result = func(*detached, **named)
        if not isinstance(result, Tensor) or not result.is_floating_point() or not result.dim():
            raise _Opaque
        if result.shape[0] != self.records or not torch.equal(state, torch.get_rng_state()):
            raise _Opaque
        call = captured_operation(func, spec, leaves, slots, sources)
        saved = tuple(cast("Tensor", leaves[i]) for i in slots)
        self._verify(name, call, origins, saved, result)
        return self.capture(functional_fallback, call, origins, result, saved)

    def _verify(
        self, name: str, call: CapturedCall, origins: Mapping[str, Derived], saved: tuple[Tensor, ...], result: Tensor
    ) -> None:
        values = {key: nn.Parameter(source.tensor.detach(), requires_grad=False) for key, source in origins.items()}
        form = (
            name,
            tuple((tensor.shape[1:], tensor.dtype) for tensor in saved),
            tuple(value.shape for value in values.values()),
            repr([leaf for leaf in call.constants if not isinstance(leaf, Tensor)]),
        )
        if self.records < 2 or form in self._verified:
            return
        module = self.calls[-1].site.module
        use = LayerCall(
            module=module,
            label="",
            rule=functional_fallback,
            parameters=values,
            records=self.records,
            context=call,
        )
        with torch.no_grad():
            if not is_record_by_record(use, saved, result):
                raise _Opaque
        self._verified.add(form)


def _layer_of(lookup: Lookup) -> nn.Embedding:
    values = lookup.table.tensor.detach()
    rows, width = values.shape
    return nn.Embedding(rows, width, padding_idx=lookup.padding, _weight=values, _freeze=True)


def _plain(name: str) -> str:
    """The name of an operation without the mark of its in-place form."""
    if name.startswith("__i") and name.removeprefix("__i") in ("add__", "sub__", "mul__", "truediv__"):
        return name.removeprefix("__i").removesuffix("__").replace("truediv", "div")
    return name if name.startswith("__") else name.rstrip("_")
