"""The small objects that stand between torch's hooks and the capture."""

import inspect
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.nn.modules.instancenorm import _InstanceNorm  # pyright: ignore[reportPrivateUsage]
from torch.nn.utils.parametrizations import _SpectralNorm  # pyright: ignore[reportPrivateUsage]
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.checkpoint import CheckpointFunction

from sordino.errors import PrivacyError, UnsupportedModule
from sordino.gradients.captured_gradients import CapturedGradients
from sordino.gradients.rules.base import LayerCall, LayerRule, get_rule, runs_own_forward

# ----------------------------------------------------------------------------------------------------------------------
# Whether a call did nothing but compute: no random numbers drawn, no buffer changed.
#
# The functional fallback runs a module again. A module that draws random numbers would give other numbers then, and one
# that changes buffers stores what it saw of the records without noise.
# ----------------------------------------------------------------------------------------------------------------------


# What nn.Module itself keeps in its dictionary.
_OWN = frozenset(vars(nn.Module()))
# A leaf of an attribute of a module: the module, the attribute's name, the leaf's number.
HeldAttribute = tuple[nn.Module, str, int]
_Held = dict[tuple[nn.Module, str], object]


def held_attributes(module: nn.Module) -> _Held:
    """The attributes of `module` and of those inside it that hold tensors, containers copied."""
    return {
        (inner, key): tree_map(lambda leaf: leaf, value)
        for inner in module.modules()
        for key, value in vars(inner).items()
        if key not in _OWN and any(isinstance(leaf, Tensor) for leaf in _leaves(value))
    }


def restore_attributes(held: _Held) -> None:
    """Set attributes to what `held_attributes` found."""
    for (module, key), value in held.items():
        vars(module)[key] = tree_map(lambda leaf: leaf, value)


def attribute_values(held: Iterable[HeldAttribute]) -> list[object]:
    """What the attributes hold now."""
    return [_leaves(vars(module)[key])[number] for module, key, number in held]


def put_attributes(held: Sequence[HeldAttribute], values: Sequence[object]) -> None:
    """Replace what the attributes hold."""
    for (module, key, number), value in zip(held, values, strict=True):
        leaves, spec = tree_flatten(vars(module)[key])
        leaves[number] = value
        vars(module)[key] = tree_unflatten(leaves, spec)


def _leaves(value: object) -> list[object]:
    if isinstance(value, Tensor):
        return [value]
    return tree_flatten(value)[0] if isinstance(value, list | tuple | dict) else []


class CallSideEffects:
    """The state of the random generators and of a module's buffers before a call."""

    def __init__(self, module: nn.Module) -> None:
        self._generators = _generator_states(module)
        self._buffers = _buffer_versions(module)
        self._held = held_attributes(module)

    def rewind(self, module: nn.Module) -> None:
        """Put random generators and attributes back to what they were, so that the call can be made again."""
        for attribute in held_attributes(module):
            if attribute not in self._held:
                del vars(attribute[0])[attribute[1]]
        restore_attributes(self._held)
        torch.set_rng_state(self._generators[0])
        if len(self._generators) > 1:
            torch.cuda.set_rng_state(self._generators[1], _device(module))

    def kept_tensors(self, module: nn.Module, records: int) -> list[HeldAttribute]:
        """Where the call kept floating tensors, each with the records first, in attributes."""
        found: list[HeldAttribute] = []
        for (inner, key), value in held_attributes(module).items():
            before = {id(leaf) for leaf in _leaves(self._held.get((inner, key)))}
            found += [
                (inner, key, number)
                for number, leaf in enumerate(_leaves(value))
                if isinstance(leaf, Tensor)
                and id(leaf) not in before
                and leaf.is_floating_point()
                and leaf.dim() > 0
                and leaf.shape[0] == records
            ]
        return found

    def check_buffers(self, module: nn.Module, label: str) -> None:
        """Refuse when the call changed buffers.

        Raises:
            UnsupportedModule: named by `label`.
        """
        changed = {name for name, *_ in {*_buffer_versions(module)} ^ {*self._buffers}}
        if changed:
            raise UnsupportedModule(
                f"{label} must leave its buffers alone in training, got a change of {', '.join(sorted(changed))}. "
                "Statistics of records can't be stored without noise: call .eval() on it or replace it."
            )

    def check(self, module: nn.Module, label: str) -> None:
        """Refuse when the call drew random numbers or changed buffers.

        Raises:
            UnsupportedModule: named by `label`.
        """
        self.check_buffers(module, label)
        states = _generator_states(module)
        if any(not torch.equal(old, new) for old, new in zip(self._generators, states, strict=True)):
            raise UnsupportedModule(
                f"{label} must be deterministic to be run again per record, got random numbers in its forward pass. "
                "Set its dropout to 0, or apply nn.Dropout outside it."
            )


def _generator_states(module: nn.Module) -> list[Tensor]:
    states = [torch.get_rng_state()]
    device = _device(module)
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states


def _device(module: nn.Module) -> torch.device:
    return next((parameter.device for parameter in module.parameters()), torch.device("cpu"))


def _buffer_versions(module: nn.Module) -> list[tuple[str, int, int]]:
    return [(name, id(buffer), buffer._version) for name, buffer in module.named_buffers()]


# ----------------------------------------------------------------------------------------------------------------------
# The small objects that stand between torch's hooks and the capture.
# ----------------------------------------------------------------------------------------------------------------------


_in_compiled = False
_CHECKPOINTS = CheckpointFunction.__module__
_REENTRANT_FORWARD = CheckpointFunction.forward.__code__


def in_reentrant_forward() -> bool:
    """Whether this is the first forward pass of a block under a reentrant checkpoint."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not _REENTRANT_FORWARD:
        frame = frame.f_back
    return frame is not None


def in_checkpoint() -> bool:
    """Whether a checkpointed block runs, for the first time or again in the backward pass."""
    if torch._C._current_graph_task_id() != -1:  # pyright: ignore[reportPrivateUsage]
        return True
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    pack = hooks[0] if hooks is not None else None
    return getattr(pack, "__module__", None) == _CHECKPOINTS or (not torch.is_grad_enabled() and in_reentrant_forward())


def untraced(call: Callable[..., object], *arguments: object) -> object:
    """``call(*arguments)``, left alone by torch.compile where that compiles the module that the hook is on."""
    compiling = torch.compiler.is_dynamo_compiling() or get_eval_frame_callback() is not None
    return _break_graph(call, *arguments) if compiling else call(*arguments)


@torch._disable_dynamo  # pyright: ignore[reportPrivateUsage]
def _break_graph(call: Callable[..., object], *arguments: object) -> object:
    global _in_compiled  # noqa: PLW0603 (hooks run one at a time)
    before, _in_compiled = _in_compiled, True
    try:
        return call(*arguments)
    finally:
        _in_compiled = before


def in_compiled() -> bool:
    """Whether the hook that runs belongs to a module that torch.compile compiles."""
    return _in_compiled


class PlainPython:
    """From here to `end`, what torch.compile compiled runs as plain Python, in the whole process.

    A compiler sees modules with hooks, and torch's modes, as code of the model: it would compile the capture with it,
    again for every number of records, and where it fails, it would fail on the records of one batch.
    """

    _running: ClassVar[set[int]] = set()
    _before: ClassVar[AbstractContextManager[object] | None] = None

    def __init__(self) -> None:
        # Where the compiler was not loaded, nothing is compiled; loading it takes a second.
        if PlainPython._before is None and "torch._dynamo" in sys.modules:
            PlainPython._before = torch.compiler.set_stance("force_eager")
        PlainPython._running.add(id(self))

    def end(self) -> None:
        """Of all that run at the same time, the last to end puts back what was before."""
        PlainPython._running.discard(id(self))
        if not PlainPython._running and PlainPython._before is not None:
            PlainPython._before.__exit__(None, None, None)
            PlainPython._before = None

    def __enter__(self) -> None:
        """Begun already."""

    def __exit__(self, *_: object) -> None:
        self.end()

    def __del__(self) -> None:
        self.end()


@dataclass(frozen=True, eq=False, kw_only=True)
class CallSnapshot:
    """What a call that will be run again was given, ahead of any other hook."""

    args: tuple[object, ...]
    kwargs: Mapping[str, object]
    fingerprint: CallSideEffects


@dataclass(eq=False, kw_only=True, slots=True)
class OutputGradientReceiver:
    """Hands what the backward pass brings to the recording, each gradient with the records first."""

    recording: CapturedGradients
    use: LayerCall
    dims: tuple[int, ...] = (0,)
    check: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        self.recording.expect(self.use)

    def __call__(self, saved: tuple[Tensor, ...], grads: tuple[Tensor | None, ...]) -> None:
        """Take the kept tensors and the gradient at each output."""
        if self.check is not None:
            try:
                self.check()
            except PrivacyError:
                self.recording.invalidate(self.use.label)
                raise
            self.check = None
        moved = (g if g is None or dim == 0 else g.movedim(dim, 0) for g, dim in zip(grads, self.dims, strict=True))
        self.recording.receive(self.use, saved, tuple(moved))


class ModuleHook:
    """A hook that belongs to one module: on a copy of the model it does nothing, and pickling drops the capture."""

    def __init__(self, call: Callable[..., object], module: nn.Module) -> None:
        self._call, self._module = call, module

    def __call__(self, module: nn.Module, *arguments: object) -> object:
        """Forward to the capture when called by its own module."""
        return untraced(self._call, module, *arguments) if module is self._module else None

    @staticmethod
    def attached_to(module: nn.Module) -> bool:
        """Whether a capture's hook belongs to `module`."""
        hooks = vars(module)["_forward_pre_hooks"].values()
        return any(isinstance(hook, ModuleHook) and hook._module is module for hook in hooks)

    def __deepcopy__(self, memo: object) -> "ModuleHook":
        return self

    def __reduce__(self) -> tuple[type["_Inert"], tuple[()]]:
        return _Inert, ()


class _Inert:
    def __call__(self, *_: object) -> None:
        return None


# ----------------------------------------------------------------------------------------------------------------------
# Where a model is captured: one site per module that owns parameters.
# ----------------------------------------------------------------------------------------------------------------------


# Tables that Hugging Face's T5 and its kin look up by distances between positions: no record goes in.
_POSITION_TABLES = frozenset(("relative_attention_bias",))
_TAPPED: tuple[type[nn.Module], ...] = (nn.MultiheadAttention, nn.LSTM, nn.GRU, nn.RNN)


@dataclass(frozen=True, eq=False, kw_only=True)
class CapturedModule:
    """A module whose calls are captured.

    Args:
        module: the module.
        label: its qualified name and class, for messages.
        rule: the rule that reads it; None for the functional fallback.
        dim: where its input and output have the records: 1 inside a transformer layer of torch that has time first.
        is_model: it is the captured model itself.
        tapped: it hands its parameters to a function of torch that is replaced while it runs.
        whole: it is read with everything inside it, as `per_record` asked.
    """

    module: nn.Module
    label: str
    rule: LayerRule | None
    is_model: bool = False
    tapped: bool = False
    dim: int = 0
    whole: bool = False

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters that the module's own forward reads: direct ones, and those of children that only hold."""
        if self.whole:
            return list(self.module.named_parameters())
        own = [(name, value) for name, value in vars(self.module)["_parameters"].items() if value is not None]
        if self.rule is None:
            for prefix, child in _holders(self.module):
                own += child.named_parameters(prefix)
        return own


# Modules that are read as a whole, as the user asked.
_WHOLE: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()

Module = TypeVar("Module", bound=nn.Module)


def per_record(module: Module) -> Module:
    """Have `module` read as a whole: each record's gradient by running it again with that record alone.

    When: what is inside folds records into rows, routes tokens or uses parameters in a way that no rule reads, but the
    module's own inputs and outputs have the records as their first dimension (or one row for all of them). It is
    slower than rules: the module runs once more, vectorized over records by `torch.func.vmap` where it can be, else
    record by record.

    Call it before the model is made private. It changes nothing of the module, and a copy is not marked.

    Args:
        module: draws no random numbers and changes no buffer in its forward pass; what does is refused then.

    Returns:
        `module` itself, so that it can be called where a layer is built.

    Example:
        >>> from torch import nn
        >>> model = nn.Sequential(per_record(nn.Sequential(nn.Linear(3, 4), nn.Tanh())), nn.Linear(4, 2))
    """
    _WHOLE.add(module)
    return module


def find_captured_modules(model: nn.Module) -> list[CapturedModule]:
    """A site for the model and for every module that owns parameters, in the order of ``model.named_modules()``."""
    sites = []
    time_first: set[nn.Module] = set()
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if module in inside:
            continue
        if module in _WHOLE:
            inside.update(module.modules())
            label = f"{name or 'the model'} ({type(module).__name__})"
            sites.append(CapturedModule(module=module, label=label, rule=None, whole=True))
            continue
        time_first.update(_time_first_children(module))
        # A parametrization is part of the layer it belongs to, a table of positions part of its attention.
        part = "parametrizations" in name.split(".") or _position_table(name.rpartition(".")[2], module)
        if module is model and not _owns_parameters(module):
            sites.append(
                CapturedModule(module=module, label=f"the model ({type(module).__name__})", rule=None, is_model=True)
            )
        elif _owns_parameters(module) and not part:
            label = f"{name or 'the model'} ({type(module).__name__})"
            rule = get_rule(module)
            reason = None if rule is None else rule.refusal(module)
            if reason is not None:
                raise UnsupportedModule(f"{label} must have {reason}. Set it before making the model private.")
            tapped = rule is None and _tapped(module)
            dim = int(rule is not None and module in time_first)
            sites.append(
                CapturedModule(module=module, label=label, rule=rule, is_model=module is model, tapped=tapped, dim=dim)
            )
    return sites


def _owns_parameters(module: nn.Module) -> bool:
    if isinstance(module, nn.ParameterList | nn.ParameterDict):
        return False
    held = (parameter for _, child in _holders(module) for parameter in child.parameters())
    return any(True for _ in module.parameters(recurse=False)) or any(True for _ in held)


def _holders(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Children whose parameters the module reads without calling them."""
    return [
        (name, child)
        for name, child in module.named_children()
        if isinstance(child, nn.ParameterList | nn.ParameterDict)
        or name == "parametrizations"
        or _position_table(name, child)
        or isinstance(module, nn.MultiheadAttention)
    ]


def _position_table(name: str, module: nn.Module) -> bool:
    return name in _POSITION_TABLES and isinstance(module, nn.Embedding)


def _time_first_children(module: nn.Module) -> list[nn.Module]:
    """Children that torch's own transformer calls with time as the first dimension."""
    layers = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
    own = next(
        (base for base in (*layers, nn.TransformerEncoder, nn.TransformerDecoder) if isinstance(module, base)), None
    )
    if own is None or type(module).forward is not own.forward or not runs_own_forward(module):
        return []
    attentions = [child for child in module.modules() if isinstance(child, nn.MultiheadAttention)]
    if not attentions or any(attention.batch_first for attention in attentions):
        return []
    return [child for child in module.children() if isinstance(child, nn.Linear | nn.LayerNorm | nn.RMSNorm)]


def _tapped(module: nn.Module) -> bool:
    """Whether `module` hands its parameters to one function of torch: a module of torch's with torch's forward."""
    if not runs_own_forward(module) or hasattr(module, "parametrizations"):
        return False
    base = next((base for base in _TAPPED if isinstance(module, base)), None)
    if base is None or type(module).forward is not base.forward:
        return False
    return all(isinstance(value, nn.Parameter) for value in _read(module))


def _read(module: nn.Module) -> list[Tensor]:
    """The tensors that the module hands over as parameters: computed ones (weight norm) belong to no one."""
    if isinstance(module, nn.RNNBase):
        return [weight for layer in module.all_weights for weight in layer]
    names = ("in_proj_weight", "in_proj_bias", "q_proj_weight", "k_proj_weight", "v_proj_weight", "bias_k", "bias_v")
    inner = getattr(module, "out_proj")  # noqa: B009
    values = [*(getattr(module, name, None) for name in names), inner.weight, inner.bias]
    if hasattr(inner, "parametrizations"):
        return [torch.zeros(())]
    return [value for value in values if value is not None]


def check_hooks_present(model: nn.Module) -> None:
    """Refuse a model whose parameters are elsewhere between its forward passes.

    Raises:
        UnsupportedModule: one is on the meta device, as accelerate leaves what it offloads.
    """
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise UnsupportedModule(
                f"{name} must be in memory while it is trained, got a parameter on the meta device, as offloading by "
                "accelerate leaves it. Load the model without offloading: a device_map of devices alone, none of its "
                'parts on "disk", nor on "cpu" together with an accelerator.'
            )


def check_not_complex(parameters: Iterable[nn.Parameter], names: Mapping[nn.Parameter, str]) -> None:
    """Refuse complex parameters: norms, sums and noise are those of real numbers.

    Raises:
        UnsupportedModule: one of `parameters` is complex.
    """
    for parameter in parameters:
        if parameter.is_complex():
            raise UnsupportedModule(
                f"{names[parameter]} must be real, got a complex parameter. Keep real and imaginary part in a last "
                "dimension of 2, and use torch.view_as_complex in forward."
            )


def may_mix_records(module: nn.Module) -> bool:
    """Whether `module` is of a kind that `check_no_record_mixing` has to look at before each call."""
    return isinstance(module, _BatchNorm | _InstanceNorm | _SpectralNorm)


def check_no_record_mixing(module: nn.Module, label: str) -> None:
    """Refuse a normalization whose output for one record depends on the others, or that stores what it saw.

    Raises:
        UnsupportedModule: batch statistics are in use, or running statistics would be updated.
    """
    if isinstance(module, _SpectralNorm) and module.training:
        raise UnsupportedModule(
            f"{label} must leave its buffers alone in training, got spectral normalization, which takes a step of its "
            "power iteration in each forward pass. Call .eval() on it, the parametrization alone, after model.train()."
        )
    batch_statistics = isinstance(module, _BatchNorm) and (module.training or module.running_mean is None)
    running_statistics = isinstance(module, _InstanceNorm) and module.training and module.running_mean is not None
    if batch_statistics or running_statistics:
        reason = "mixes the records of a batch" if batch_statistics else "stores statistics of the records"
        remedy = "nn.GroupNorm, or call .eval() on it" if batch_statistics else "track_running_stats=False"
        raise UnsupportedModule(f"{label} must treat every record alone, got a layer that {reason}. Use {remedy}.")
