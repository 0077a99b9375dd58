"""The hooks around every call of a captured module.

A module with a rule runs with its parameters switched off; one of torch's composite modules runs with its function
replaced; any other module is followed, and run again as a whole where it can't be.
"""

import gc
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.hooks import RemovableHandle

from sordino.errors import RecordCountMismatch, UncapturedParameter, UnsupportedModule
from sordino.gradients.batch_dim import BatchDimMark, BatchDimTracker
from sordino.gradients.captured_gradients import CapturedGradients
from sordino.gradients.fallback import (
    call_layout,
    check_not_broadcast_row,
    check_not_single_row_input,
    functional_fallback,
    save_call,
)
from sordino.gradients.interception import (
    MARK,
    DirectParameterInterceptor,
    FollowedCall,
    FunctionInterceptor,
    Replacement,
    capture_outputs,
    uncaptured_parameters,
)
from sordino.gradients.module_hooks import (
    CallSideEffects,
    CallSnapshot,
    CapturedModule,
    ModuleHook,
    OutputGradientReceiver,
    held_attributes,
    in_checkpoint,
    in_compiled,
    in_reentrant_forward,
)
from sordino.gradients.replaced_functions import attention, recurrent_replacements
from sordino.gradients.rules.base import LayerCall, LayerRule
from sordino.gradients.rules.composite import Derived

# ----------------------------------------------------------------------------------------------------------------------
# Which modules are followed through their forward, and what happens at their borders.
# ----------------------------------------------------------------------------------------------------------------------


_Args = tuple[object, ...]
_Kwargs = Mapping[str, object]
_Result = TypeVar("_Result")


@dataclass(eq=False, kw_only=True)
class TracerState:
    """What belongs to one recording.

    Args:
        marks: what is known of its tensors.
        placeholders: what stands in for parameters, with a name for messages.
    """

    marks: BatchDimTracker
    placeholders: dict[Tensor, str] = field(default_factory=dict)


class ModuleTracer:
    """The open interceptor of a capture, what is known of tensors, and which modules turned out to be opaque.

    The whole model is followed as long as something is computed without records in one module and read in another:
    rows of a table of positions, prompts, learned queries. Whether that happens is looked at in recordings 1, 2, 4,
    8, …; otherwise only modules that read parameters of their own are followed.

    Args:
        model: the captured model.
        names: the managed parameters.
        refuse: called with a parameter's name when an ordinary gradient reaches what stands in for it.
    """

    def __init__(self, model: nn.Module, names: Mapping[nn.Parameter, str], refuse: Callable[[str], None]) -> None:
        self._model, self._names, self._refuse = model, names, refuse
        self._parameters = {id(parameter): parameter for parameter in model.parameters()}
        self._owners = {name: parameter for parameter, name in names.items()}
        self._interceptor: DirectParameterInterceptor | None = None
        self.knowledge = TracerState(marks=BatchDimTracker(0))
        # With the recording in which it was found out: there it is tried again, as a checkpointed block must be.
        self._opaque: dict[nn.Module, BatchDimTracker] = {}
        self._seen: set[nn.Module] = set()
        self._recordings = 0
        self._is_needed = False
        # Modules that were called with a row, or rows, for no record in particular.
        self._without_records: set[nn.Module] = set()
        # Inputs of the model, by number, that once had another first dimension than the records'.
        self._other_inputs: set[int] = set()
        self._verified: set[object] = set()
        self._constants = [v for held in held_attributes(model).values() for v in tree_flatten(held)[0]]
        self.own_hooks: set[int] = set()

    @property
    def marks(self) -> BatchDimTracker:
        """What is known of tensors."""
        return self.knowledge.marks

    @property
    def placeholders(self) -> dict[Tensor, str]:
        """What stands in for parameters in this recording, with a name for messages."""
        return self.knowledge.placeholders

    def begin(self, records: int) -> None:
        """A new recording: nothing is known of any tensor."""
        self.knowledge = TracerState(marks=BatchDimTracker(records))
        self._recordings += 1

    def pause(self, change: int) -> None:
        """A module that is captured at its border begins (1) or ends (-1)."""
        self.marks.paused += change

    def quietly(self, work: Callable[..., _Result], *arguments: object) -> _Result:
        """The capture's own work, which is no part of the model."""
        marks = self.marks
        marks.paused += 1
        try:
            return work(*arguments)
        finally:
            marks.paused -= 1

    # --- what is followed ----------------------------------------------------------------------------------------

    def may_follow(self, site: CapturedModule) -> bool:
        """Whether `site` is followed; otherwise it is run again as a whole, with its other hooks."""
        if self.is_opaque(site) or isinstance(site.module, torch.jit.ScriptModule):
            return False
        hooks = vars(site.module)
        both = [*hooks["_forward_pre_hooks"].items(), *hooks["_forward_hooks"].items()]
        return all(number in self.own_hooks or isinstance(hook, ModuleHook) for number, hook in both)

    def is_opaque(self, site: CapturedModule) -> bool:
        """Whether `site` was found to be opaque in an earlier recording."""
        return self._opaque.get(site.module, self.marks) is not self.marks

    @property
    def is_discarding(self) -> bool:
        """Whether the call in progress will be made once more."""
        return self._interceptor is not None and self._interceptor.is_discarding

    def watches(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> bool:
        """Whether the whole model is followed in this recording.

        A model that is called without tensors (on texts) makes those of the records by itself.
        """
        count = self._recordings
        if in_compiled() or not (self._is_needed or count & (count - 1) == 0):
            return False
        return any(isinstance(leaf, Tensor) for leaf in tree_flatten((args, dict(kwargs)))[0])

    def need(self) -> None:
        """Follow the whole model from the next recording on."""
        self._is_needed = True

    def open(
        self, site: CapturedModule, recording: CapturedGradients, anchor: Tensor, before: CallSnapshot
    ) -> FollowedCall:
        """Begin to follow a call."""
        whole = site.module is self._model
        inputs = [leaf for leaf in tree_flatten((before.args, dict(before.kwargs)))[0] if isinstance(leaf, Tensor)]
        if self._interceptor is None:
            self._mark_constants()
            interceptor = DirectParameterInterceptor(
                parameters=self._parameters,
                names=self._names,
                owners=self._owners,
                recording=recording,
                anchor=anchor,
                marks=self.marks,
                placeholders=self.placeholders,
                refuse=self._refuse,
                verified=self._verified,
            )
        else:
            interceptor = self._interceptor
        for number, leaf in enumerate(inputs):
            if whole:
                self._mark_input(number, leaf)
            else:
                if leaf.dim() and leaf.shape[0] != 1 and interceptor.calls and self.marks.record_free(leaf):
                    # Seen from this module alone, its rows could be taken for records.
                    self.need()
                if interceptor.derived(leaf) is None:
                    self.marks.set_input(leaf)
        around = interceptor.calls[-1] if interceptor.calls else None
        checkpointed = recording.is_rehearsed or in_checkpoint()
        call = FollowedCall(site=site, outermost=self._interceptor is None, checkpointed=checkpointed, around=around)
        interceptor.calls.append(call)
        if self._interceptor is None:
            self._interceptor = interceptor
            interceptor.__enter__()
        return call

    def _mark_input(self, number: int, leaf: Tensor) -> None:
        records = self.marks.records
        if leaf.dim() and leaf.shape[0] != records:
            self._other_inputs.add(number)
        if number not in self._other_inputs or (leaf.dim() and leaf.shape[0] != records):
            self.marks.set_input(leaf)

    def _mark_constants(self) -> None:
        """Buffers, parameters that are frozen now, and what attributes held when the capture began."""
        for tensor in (*self._model.buffers(), *self._constants):
            if isinstance(tensor, Tensor) and not tensor.requires_grad:
                self.marks.set(tensor, BatchDimMark.CONSTANT)
        for parameter in self._model.parameters():
            if not parameter.requires_grad:
                self.marks.set(parameter, BatchDimMark.CONSTANT)

    # --- where a call ends ---------------------------------------------------------------------------------------

    def leave(self, call: FollowedCall) -> None:
        """The call has ended; called for every call that was opened."""
        interceptor = self._interceptor
        if interceptor is None or call not in interceptor.calls:
            return
        while interceptor.calls.pop() is not call:
            pass
        interceptor.ended = call
        if call.outermost:
            interceptor.__exit__(None, None, None)
            self._interceptor, call.interceptor = None, interceptor
        else:
            call.interceptor = interceptor

    def finish(self, call: FollowedCall, before: CallSnapshot, output: object) -> object | None:
        """The output of a call that was followed to its end; None when it has to be made again as a whole.

        Raises:
            UnsupportedModule: the call changed a buffer.
        """
        interceptor, module = call.interceptor, call.site.module
        assert interceptor is not None
        if interceptor.is_discarding:
            return output
        passed = output
        inside = bool(interceptor.calls) and call.checkpointed == interceptor.calls[-1].checkpointed
        if not call.is_opaque:
            if inside:
                self._is_needed = self._is_needed or any(
                    interceptor.derived(leaf) is not None for leaf in tree_flatten(output)[0]
                )
            else:
                passed = tree_map(lambda leaf: self._at_the_border(interceptor, call, leaf), output)
        if not call.is_opaque and module not in self._seen:
            self._look_for_others(interceptor, call, passed)
            self._seen.add(module)
            if interceptor.is_discarding:
                return output
        call.is_opaque = call.is_opaque or module in self._opaque
        if module is self._model:
            self._is_needed = self._is_needed or interceptor.crossed
        if call.is_opaque:
            self._opaque.setdefault(module, self.marks)
            interceptor.forget(call)
            return None
        before.fingerprint.check_buffers(module, call.site.label)
        return passed

    def _at_the_border(self, interceptor: DirectParameterInterceptor, call: FollowedCall, leaf: object) -> object:
        """What was derived gets one copy per record, where it leaves what is followed."""
        derived = interceptor.derived(leaf)
        if call.is_opaque or derived is None:
            return leaf
        copy = interceptor.per_record_argument(cast("Tensor", leaf), 0)
        if copy is None and (call.site.module is not self._model or derived.tensor.dim()):
            # A number that the model returns stays as it is: a loss that reads it sends it an ordinary gradient.
            call.is_opaque = True
        return leaf if copy is None else copy

    def _look_for_others(self, interceptor: DirectParameterInterceptor, call: FollowedCall, output: object) -> None:
        """Whether a use was not seen (a function of one's own, a compiled extension): looked at once per module."""
        names: dict[Tensor, str] = {**{p: n for p, n in self._names.items() if p.requires_grad}, **self.placeholders}
        tensors = [leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, Tensor) and leaf.requires_grad]
        reached = {name for t in tensors if interceptor.derived(t) is None for name in uncaptured_parameters(t, names)}
        for name in reached:
            scope = interceptor.scope_of(self._owners[name], call)
            if scope is not None:
                scope.is_opaque = True

    # --- modules inside a followed one -----------------------------------------------------------------------------

    def enter(self, site: CapturedModule, args: _Args, kwargs: _Kwargs) -> tuple[bool, tuple[_Args, _Kwargs] | None]:
        """What becomes of a call inside a followed one.

        Returns:
            Whether it has nothing to do with records, so that what it computes is derived; and its arguments, where
            what was derived got one copy per record.
        """
        interceptor = self._interceptor
        if interceptor is None or interceptor.is_discarding:
            return False, None
        if site.rule is None and not site.tapped and self.may_follow(site):
            return False, None
        leaves = tree_flatten((args, dict(kwargs)))[0]
        layout = call_layout(site.module, site.label, self.marks.records)
        dims = [site.dim if site.rule else layout.input_dim(key) for key in layout.argument_keys(args, dict(kwargs))]
        checkpointed = interceptor.is_in_other_checkpoint()
        derived = [isinstance(leaf, Tensor) and interceptor.derived(leaf) is not None for leaf in leaves]
        tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        if not tensors or not (any(derived) or site.rule is not None):
            return False, None
        whole = site.rule is None and not site.tapped
        known = site.module in self._without_records
        chosen: list[int] = []
        for i in tensors:
            if derived[i]:
                repeated = interceptor.is_repeated(cast("Tensor", leaves[i]), dims[i] or 0)
                if whole or checkpointed or (repeated and not known):
                    chosen.append(i)
        alone = all(
            derived[i] or self._has_no_records(cast("Tensor", leaves[i]), dims[i] or 0, known=known) for i in tensors
        )
        if alone and not chosen:
            if checkpointed:
                # Made again in the backward pass, where nothing is traced: one row is expanded as outside.
                return False, None
            self._remember(site, interceptor)
            return True, None
        chosen = chosen if alone else [i for i in tensors if derived[i] and dims[i] is not None]
        changed = list(leaves)
        for i in chosen:
            copy = interceptor.per_record_argument(cast("Tensor", leaves[i]), dims[i] or 0)
            if copy is None:
                interceptor.give_up(cast("Derived", interceptor.derived(leaves[i])).scope)
                return False, None
            changed[i] = copy
        if not chosen:
            return False, None
        return False, cast("tuple[_Args, _Kwargs]", tree_unflatten(changed, tree_flatten((args, dict(kwargs)))[1]))

    def _has_no_records(self, tensor: Tensor, dim: int, *, known: bool) -> bool:
        """Whether an input of a captured module is the same for every record.

        One of which nothing is known has records where its size says so, unless the module was called without before.
        """
        if not self.marks.record_free(tensor):
            return False
        sized = tensor.dim() > dim and tensor.shape[dim] == self.marks.records
        return self.marks.constant(tensor) or known or not sized

    def _remember(self, site: CapturedModule, interceptor: DirectParameterInterceptor) -> None:
        if self.marks.records > 1:
            self._without_records.add(site.module)
        if interceptor.calls and interceptor.calls[0].site.module is self._model:
            self._is_needed = True

    def mark_output(self, site: CapturedModule, output: object) -> None:
        """Inside a followed module: what a captured one returns has the records first."""
        if self._interceptor is None:
            return
        recurrent = isinstance(site.module, nn.RNNBase)
        if site.dim or (site.tapped and not getattr(site.module, "batch_first", False)):
            return
        for leaf in tree_flatten(output)[0][: 1 if recurrent else None]:
            if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == self.marks.records:
                self.marks.set(leaf, BatchDimMark.RECORDS_FIRST)


def is_kept_elsewhere(call: FollowedCall) -> bool:
    """Whether what a call computed the first time, and was thrown away, is still held by somebody."""

    def alive() -> bool:
        edges = (torch.autograd.graph.get_gradient_edge(leaf).node for leaf in call.leaves)
        return any(MARK in cast("dict[str, bool]", node.metadata) for node in edges)

    if alive():
        gc.collect()
    return alive()


# ----------------------------------------------------------------------------------------------------------------------
# The hooks around every call of a captured module.
# ----------------------------------------------------------------------------------------------------------------------


_REPLACEMENTS: dict[object, Replacement] = {
    F.multi_head_attention_forward: attention,
    **recurrent_replacements(),
}


@dataclass(eq=False, kw_only=True, slots=True)
class CallFrame:
    """One call in progress: what was switched off for it and must be switched on again.

    Args:
        site: the module being called.
        switched: parameters that had requires_grad on.
        captured: those of them that are managed, by name.
        whole: the call is read as a whole, and the modules inside it are not captured.
        before: arguments and state before a call that will be run again; None for the others.
        mode: what replaces functions of torch during the call; None for the others.
        followed: what is known of a call that is followed; None for the others.
        paused: modules around it are not followed meanwhile.
        rehearsal: the call is the first of a reentrant checkpoint, without gradients. It is captured like the second,
            so that both have results of the same shapes and draw the same random numbers, and nothing is kept.
    """

    site: CapturedModule
    switched: list[nn.Parameter]
    captured: dict[str, nn.Parameter]
    whole: bool
    before: CallSnapshot | None
    mode: TorchFunctionMode | None = None
    followed: FollowedCall | None = None
    paused: bool = False
    rehearsal: bool = False


def _without_modes(hook: Callable[..., _Result]) -> Callable[..., _Result]:
    """The hook of a layer with a rule, outside torch's function modes; with a tensor of a class of its own within."""

    def run(module: nn.Module, args: _Args, *others: object) -> _Result:
        named, *output = others
        if named or any(isinstance(value, Tensor) and type(value) is not Tensor for value in (*args, *output)):
            return hook(module, args, *others)
        with torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
            return hook(module, args, *others)

    return run


class ModuleCallHooks:
    """What happens when modules are called, and the state of the calls in progress.

    Args:
        model: the captured model.
        names: the managed parameters.
    """

    def __init__(self, model: nn.Module, names: Mapping[nn.Parameter, str]) -> None:
        self.names = names
        self.anchor = torch.zeros((), requires_grad=True)
        self.recording: CapturedGradients | None = None
        self.handles: list[RemovableHandle] = []
        # Modules may be run again while this is positive, and are not captured.
        self.suspended = 0
        # How many blocks inside each other read a recording.
        self.readers = 0
        # Inside `GradientCapture.ordinary` parameters may get ordinary gradients.
        self.is_ordinary = False
        self._frames: list[CallFrame | None] = []
        self._hook_ids: dict[nn.Module, tuple[int, int]] = {}
        self._guarded: set[nn.Parameter] = set()
        # Torch's graphs hold what refuses, and Python's garbage collector can't see through them.
        refuse = weakref.WeakMethod(self._refuse_unless_reading)
        self._following = ModuleTracer(model, names, lambda name: None if (act := refuse()) is None else act(name))
        self._aside: weakref.WeakKeyDictionary[CapturedGradients, TracerState] = weakref.WeakKeyDictionary()

    @property
    def placeholders(self) -> dict[Tensor, str]:
        """What stands in for parameters in this recording, with a name for messages."""
        return self._following.placeholders

    def begin(self, recording: CapturedGradients, device: torch.device) -> None:
        """Capture into `recording` from now on."""
        self.guard()
        if self.anchor.device != device:
            self.anchor = torch.zeros((), requires_grad=True, device=device)
        self.recording = recording
        self._following.begin(recording.records)

    def suspend(self) -> CapturedGradients | None:
        """Stop capturing; what is known of the recording's tensors is kept for `resume`."""
        recording, self.recording = self.recording, None
        if recording is not None:
            self._aside[recording] = self._following.knowledge
        return recording

    def resume(self, recording: CapturedGradients | None) -> None:
        """Go on with a recording that was set aside."""
        self.recording = recording
        if recording is not None:
            # Checkpointed blocks run again in the backward pass, by what was known in the forward pass.
            self._following.knowledge = self._aside.pop(recording)

    def remove(self) -> None:
        """Take every hook off the model."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        self._guarded.clear()
        self._hook_ids.clear()

    def surround(self, model: nn.Module, first: int, last: int) -> None:
        """Accept hooks around the model's own, by their ids."""
        self._following.own_hooks |= {first, last}
        if model in self._hook_ids:
            self._hook_ids[model] = (first, last)

    def attach(self, site: CapturedModule) -> None:
        """Register the hooks of one module."""

        def enter(_module: nn.Module, args: _Args, kwargs: _Kwargs) -> tuple[_Args, _Kwargs] | None:
            return self._following.quietly(self._before, site, args, kwargs)

        def leave(_module: nn.Module, args: _Args, kwargs: _Kwargs, output: object) -> object:
            return self._following.quietly(self._after, args, kwargs, output)

        if site.rule is not None:
            # Modes that the forward pass runs in would be asked about each look at a tensor, and have no part in it.
            enter, leave = _without_modes(enter), _without_modes(leave)
        before, after = ModuleHook(enter, site.module), ModuleHook(leave, site.module)
        first = site.module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        # A rule reads the bare output; a module that is run again is run with the user's hooks.
        prepend = site.rule is not None
        last = site.module.register_forward_hook(after, prepend=prepend, with_kwargs=True, always_call=True)
        self.handles += [first, last]
        self._following.own_hooks |= {first.id, last.id}
        self._hook_ids[site.module] = (first.id, last.id)

    def watch_inputs(self, model: nn.Module) -> None:
        """Refuse calls of the whole model with one row for several records."""

        def check(_module: nn.Module, args: _Args, kwargs: _Kwargs) -> None:
            recording = self.recording
            if recording is not None and recording.open and not self.suspended and torch.is_grad_enabled():
                check_not_single_row_input(args, kwargs, recording.records)

        handle = model.register_forward_pre_hook(ModuleHook(check, model), with_kwargs=True)
        self.handles.append(handle)
        self._following.own_hooks.add(handle.id)

    def guard(self) -> None:
        """Watch for ordinary gradients of every managed parameter that requires grad by now."""
        for parameter in self.names:
            if parameter.requires_grad and parameter not in self._guarded:
                self._guard_one(parameter)

    def _guard_one(self, parameter: nn.Parameter) -> None:
        name = self.names[parameter]
        self._guarded.add(parameter)
        hook = parameter.register_hook(lambda _: None if self.is_ordinary else self._refuse_unless_reading(name))
        self.handles.append(hook)

    def _refuse_unless_reading(self, name: str) -> None:
        if not self.suspended:
            self._refuse(name)

    def _refuse(self, name: str) -> None:
        if self.recording is not None:
            self.recording.invalidate(name)
        where = "an uncaptured use" if self.recording is not None and self.recording.open else "an ordinary backward"
        raise UncapturedParameter(
            f"{name} must be used through a captured layer inside a recording, got {where}. "
            "Call the layer itself rather than reading its parameter, and keep penalties on parameters out of the loss."
        )

    def _before(self, site: CapturedModule, args: _Args, kwargs: _Kwargs) -> tuple[_Args, _Kwargs] | None:
        recording = self.recording
        if recording is None or not recording.open or self.suspended or not self._may_capture(site):
            self._frames.append(None)
            return None
        rehearsal = not torch.is_grad_enabled()
        if rehearsal:
            torch.set_grad_enabled(mode=True)
            recording.is_rehearsed = True
        is_free, changed = self._following.enter(site, args, kwargs)
        args, kwargs = changed or (args, kwargs)
        owned = site.parameters()
        captured = self._captured(owned)
        if is_free or self._following.is_discarding:
            # What it computes has nothing to do with records, or is thrown away.
            frame = CallFrame(site=site, switched=[], captured={}, whole=False, before=None)
        elif site.is_model and not captured and self._following.watches(args, kwargs):
            frame = self._follow_model(site, recording, args, kwargs)
        elif captured and (site.tapped or site.rule is None):
            # The parameters stay on: a use that the interceptor misses must be noticed.
            if site.tapped:
                frame = self._interceptor(site, captured, recording, args[0] if args else kwargs.get("input"))
            elif not site.whole and self._following.may_follow(site):
                frame = self._follow(site, captured, recording, args, kwargs)
            else:
                frame = self._whole(
                    site, CallSnapshot(args=args, kwargs=kwargs, fingerprint=CallSideEffects(site.module))
                )
        else:
            # With nothing of its own to capture, the modules inside it are captured one by one.
            frame = self._switched_off(site, owned, captured, before=None)
        frame.rehearsal = rehearsal
        frame.paused = bool(captured) and not is_free and frame.followed is None and bool(frame.captured)
        self._following.pause(frame.paused)
        self._frames.append(frame)
        return changed

    def _follow_model(
        self, site: CapturedModule, recording: CapturedGradients, args: _Args, kwargs: _Kwargs
    ) -> CallFrame:
        """The whole model, though its own forward reads no parameter."""
        if self._following.is_opaque(site):
            return self._whole(site, CallSnapshot(args=args, kwargs=kwargs, fingerprint=CallSideEffects(site.module)))
        return self._follow(site, {}, recording, args, kwargs)

    def _may_capture(self, site: CapturedModule) -> bool:
        """Whether gradients are on, or will be when a reentrant checkpoint makes this very call again."""
        if torch.is_grad_enabled():
            return True
        owned = any(value.requires_grad and value in self.names for _, value in site.parameters())
        return owned and in_reentrant_forward()

    def _captured(self, owned: Iterable[tuple[str, nn.Parameter]]) -> dict[str, nn.Parameter]:
        captured = {name: value for name, value in owned if value.requires_grad and value in self.names}
        for value in captured.values():
            if value not in self._guarded:
                self._guard_one(value)
        return captured

    def _switched_off(
        self,
        site: CapturedModule,
        owned: list[tuple[str, nn.Parameter]],
        captured: dict[str, nn.Parameter],
        before: CallSnapshot | None,
    ) -> CallFrame:
        switched = [value for _, value in owned if value.requires_grad]
        for value in switched:
            value.requires_grad_(False)
        self.suspended += before is not None
        return CallFrame(site=site, switched=switched, captured=captured, whole=before is not None, before=before)

    def _whole(self, site: CapturedModule, before: CallSnapshot) -> CallFrame:
        owned = list(site.module.named_parameters())
        return self._switched_off(site, owned, self._captured(owned), before)

    def _follow(
        self,
        site: CapturedModule,
        captured: dict[str, nn.Parameter],
        recording: CapturedGradients,
        args: _Args,
        kwargs: _Kwargs,
    ) -> CallFrame:
        before = CallSnapshot(args=args, kwargs=kwargs, fingerprint=CallSideEffects(site.module))
        call = self._following.open(site, recording, self.anchor, before)
        return CallFrame(site=site, switched=[], captured=captured, whole=False, before=before, followed=call)

    def _interceptor(
        self, site: CapturedModule, captured: dict[str, nn.Parameter], recording: CapturedGradients, first: object
    ) -> CallFrame:
        mode = FunctionInterceptor(
            module=site.module,
            label=site.label,
            parameters=captured,
            recording=recording,
            anchor=self.anchor,
            replacements=_REPLACEMENTS,
            order=first.unsorted_indices if isinstance(first, nn.utils.rnn.PackedSequence) else None,
            batched=not isinstance(first, Tensor) or first.dim() == 3,
        )
        mode.__enter__()
        return CallFrame(site=site, switched=[], captured=captured, whole=False, before=None, mode=mode)

    def _restore(self) -> CallFrame | None:
        frame = self._frames.pop() if self._frames else None
        if frame is not None:
            if frame.mode is not None:
                frame.mode.__exit__(None, None, None)
            if frame.followed is not None:
                self._following.leave(frame.followed)
            for parameter in frame.switched:
                parameter.requires_grad_(True)
            self.suspended -= frame.whole
            self._following.pause(-frame.paused)
        return frame

    def restore_all(self) -> None:
        """Switch on again what calls in progress had switched off."""
        while self._frames:
            self._following.quietly(self._restore)

    def _after(self, args: _Args, kwargs: _Kwargs, output: object) -> object:
        # First of all the flags: keeping tensors may raise inside a checkpointed block.
        frame = self._restore()
        if frame is None or not frame.rehearsal:
            return self._left(frame, args, kwargs, output)
        try:
            result = self._left(frame, args, kwargs, output)
        finally:
            torch.set_grad_enabled(mode=False)
            if self.recording is not None:
                self.recording.is_rehearsed = False
        detached = tree_map(
            lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, output if result is None else result
        )
        self._following.mark_output(frame.site, detached)
        return detached

    def _left(self, frame: CallFrame | None, args: _Args, kwargs: _Kwargs, output: object) -> object:
        recording = self.recording
        if frame is None or output is None or recording is None or not (frame.captured or frame.followed):
            return None
        result = self._captured_output(frame, recording, args, kwargs, output)
        self._following.mark_output(frame.site, output if result is None else result)
        return result

    def _captured_output(
        self, frame: CallFrame, recording: CapturedGradients, args: _Args, kwargs: _Kwargs, output: object
    ) -> object:
        site = frame.site
        if frame.followed is not None and frame.before is not None:
            passed = self._following.finish(frame.followed, frame.before, output)
            return self._run_again(site, frame.before, recording, frame.followed) if passed is None else passed
        if frame.mode is not None:
            return None
        if frame.before is not None:
            return self._capture_whole(frame, frame.before, recording, output)
        if site.rule is None or not isinstance(output, Tensor):
            raise UnsupportedModule(f"{site.label} must return one tensor, got something else. Write a layer rule.")
        return self._capture_layer(frame, site.rule, recording, args, kwargs, output)

    def _run_again(
        self, site: CapturedModule, before: CallSnapshot, recording: CapturedGradients, followed: FollowedCall
    ) -> object:
        """Make the call once more, with everything inside it read as a whole."""
        before.fingerprint.check_buffers(site.module, site.label)
        before.fingerprint.rewind(site.module)
        self._frames.append(self._whole(site, before))
        try:
            output = site.module.forward(*before.args, **before.kwargs)
        finally:
            frame = self._restore()
        assert frame is not None
        return self._capture_whole(frame, before, recording, output, followed)

    def _capture_layer(
        self,
        frame: CallFrame,
        rule: LayerRule,
        recording: CapturedGradients,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        output: Tensor,
    ) -> Tensor:
        site, records = frame.site, recording.records
        saved = rule.save(site.module, args, kwargs, output)
        if "_hf_hook" in vars(site.module):
            # accelerate moves the input to the layer's device only inside the forward.
            saved = tuple(tensor.to(output.device) for tensor in saved)
        if site.dim and all(tensor.dim() > site.dim for tensor in saved):
            saved = tuple(tensor.movedim(site.dim, 0) for tensor in saved)
        if saved[0].dim() < rule.record_dims(site.module) or saved[0].shape[0] not in (1, records):
            raise RecordCountMismatch(
                f"the input of {site.label} must have the records as its first dimension, got another leading "
                "dimension. Keep one row per record until the loss."
            )
        if saved[0].shape[0] != records:
            check_not_broadcast_row(saved[0], site.label, records)
            # One row for the whole batch (position ids): every record gets its own, so that gradients stay apart.
            saved = tuple(tensor.expand(records, *tensor.shape[1:]) for tensor in saved)
            sizes = list(output.shape)
            sizes[site.dim] = records
            output = output.expand(sizes).clone()
        use = LayerCall(module=site.module, label=site.label, rule=rule, parameters=frame.captured, records=records)
        receive = OutputGradientReceiver(recording=recording, use=use, dims=(site.dim,))
        (passed,) = capture_outputs(receive, self.anchor, (output,), saved)
        return passed

    def _capture_whole(
        self,
        frame: CallFrame,
        before: CallSnapshot,
        recording: CapturedGradients,
        output: object,
        followed: FollowedCall | None = None,
    ) -> object:
        site = frame.site
        before.fingerprint.check(site.module, site.label)
        self._refuse_hooks_outside(site)
        kept_tensors = before.fingerprint.kept_tensors(site.module, recording.records)
        kept = save_call(site.module, site.label, recording.records, before.args, before.kwargs, output, kept_tensors)
        use = LayerCall(
            module=site.module,
            label=site.label,
            rule=functional_fallback,
            parameters=frame.captured,
            records=recording.records,
            context=kept.call,
        )
        check = (
            None
            if followed is None or recording.backward_strategy is not None
            else partial(_check_nothing_kept, site, followed)
        )
        receive = OutputGradientReceiver(recording=recording, use=use, dims=kept.call.output_dims, check=check)
        return kept.rebuild(capture_outputs(receive, self.anchor, kept.outputs, kept.saved))

    def _refuse_hooks_outside(self, site: CapturedModule) -> None:
        """The module is run again with its own hooks: all of them must lie between ours."""
        first, last = self._hook_ids[site.module]
        hooks = vars(site.module)
        before, after = hooks["_forward_pre_hooks"], hooks["_forward_hooks"]
        if next(iter(before)) != first or next(reversed(after)) != last:
            raise UnsupportedModule(
                f"{site.label} must have its other hooks registered before the capture, got a later one. "
                "Register hooks first, then make the model private."
            )


def _check_nothing_kept(site: CapturedModule, followed: FollowedCall) -> None:
    """Refuse a module that is run again and hands something on by another way than its output and its attributes.

    Raises:
        UnsupportedModule: what it computed the first time is still held.
    """
    if is_kept_elsewhere(followed):
        raise UnsupportedModule(
            f"{site.label} must return what a loss reads, or keep it in an attribute with one row per record, got "
            "something that depends on its parameters and is held elsewhere. Return it, or detach() what is only shown."
        )
