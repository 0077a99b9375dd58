"""The hooks around every call of a captured module (floor 1, gradients).

A module with a rule runs with its parameters switched off; one of torch's composite modules runs with its function
replaced; any other module is followed, and run again as a whole where it can't be.
"""

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle

from sordino.errors import RecordCountMismatch, UncapturedParameter, UnsupportedModule
from sordino.gradients.attention import attention
from sordino.gradients.bare import FollowedCall
from sordino.gradients.edge import capture_outputs
from sordino.gradients.fallback import functional_fallback, keep_call
from sordino.gradients.following import Following, Knowledge, is_kept_elsewhere
from sordino.gradients.hooks import CallBefore, ModuleHook, UseReceiver, in_reentrant_forward
from sordino.gradients.lone import refuse_lone_input, refuse_lone_row
from sordino.gradients.purity import Fingerprint
from sordino.gradients.recording import Recording
from sordino.gradients.recurrent import recurrent_replacements
from sordino.gradients.rules.rule import LayerRule, Use
from sordino.gradients.sites import Site
from sordino.gradients.tap import Replacement, Tap

__all__ = ["Calls"]

_Args = tuple[object, ...]
_Kwargs = Mapping[str, object]

_REPLACEMENTS: dict[object, Replacement] = {
    F.multi_head_attention_forward: attention,
    **recurrent_replacements(),
}


@dataclass(eq=False, kw_only=True, slots=True)
class Frame:
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

    site: Site
    switched: list[nn.Parameter]
    captured: dict[str, nn.Parameter]
    whole: bool
    before: CallBefore | None
    mode: TorchFunctionMode | None = None
    followed: FollowedCall | None = None
    paused: bool = False
    rehearsal: bool = False


class Calls:
    """What happens when modules are called, and the state of the calls in progress.

    Args:
        model: the captured model.
        names: the managed parameters.
    """

    def __init__(self, model: nn.Module, names: Mapping[nn.Parameter, str]) -> None:
        self.names = names
        self.anchor = torch.zeros((), requires_grad=True)
        self.recording: Recording | None = None
        self.handles: list[RemovableHandle] = []
        # Modules may be run again while this is positive, and are not captured.
        self.suspended = 0
        # Inside `GradientCapture.ordinary` parameters may get ordinary gradients.
        self.is_ordinary = False
        self._frames: list[Frame | None] = []
        self._hook_ids: dict[nn.Module, tuple[int, int]] = {}
        self._guarded: set[nn.Parameter] = set()
        self._following = Following(model, names, self._refuse_unless_reading)
        self._aside: weakref.WeakKeyDictionary[Recording, Knowledge] = weakref.WeakKeyDictionary()

    @property
    def stand_ins(self) -> dict[Tensor, str]:
        """What stands in for parameters in this recording, with a name for messages."""
        return self._following.stand_ins

    def begin(self, recording: Recording, device: torch.device) -> None:
        """Capture into `recording` from now on."""
        self.guard()
        if self.anchor.device != device:
            self.anchor = torch.zeros((), requires_grad=True, device=device)
        self.recording = recording
        self._following.begin(recording.records)

    def set_aside(self) -> Recording | None:
        """Stop capturing; what is known of the recording's tensors is kept for `take_back`."""
        recording, self.recording = self.recording, None
        if recording is not None:
            self._aside[recording] = self._following.knowledge
        return recording

    def take_back(self, recording: Recording | None) -> None:
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

    def attach(self, site: Site) -> None:
        """Register the hooks of one module."""

        def enter(_module: nn.Module, args: _Args, kwargs: _Kwargs) -> tuple[_Args, _Kwargs] | None:
            return self._following.quietly(self._before, site, args, kwargs)

        def leave(_module: nn.Module, args: _Args, kwargs: _Kwargs, output: object) -> object:
            return self._following.quietly(self._after, args, kwargs, output)

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
                refuse_lone_input(args, kwargs, recording.records)

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
            self.recording.poison(name)
        where = "an uncaptured use" if self.recording is not None and self.recording.open else "an ordinary backward"
        raise UncapturedParameter(
            f"{name} must be used through a captured layer inside a recording, got {where}. "
            "Call the layer itself rather than reading its parameter, and keep penalties on parameters out of the loss."
        )

    def _before(self, site: Site, args: _Args, kwargs: _Kwargs) -> tuple[_Args, _Kwargs] | None:
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
            frame = Frame(site=site, switched=[], captured={}, whole=False, before=None)
        elif site.is_model and not captured and self._following.watches(args, kwargs):
            frame = self._follow_model(site, recording, args, kwargs)
        elif captured and (site.tapped or site.rule is None):
            # The parameters stay on: a use that the tap doesn't see must be noticed.
            if site.tapped:
                frame = self._tap(site, captured, recording, args[0] if args else kwargs.get("input"))
            elif not site.whole and self._following.may_follow(site):
                frame = self._follow(site, captured, recording, args, kwargs)
            else:
                frame = self._whole(site, CallBefore(args=args, kwargs=kwargs, fingerprint=Fingerprint(site.module)))
        else:
            # With nothing of its own to capture, the modules inside it are captured one by one.
            frame = self._switched_off(site, owned, captured, before=None)
        frame.rehearsal = rehearsal
        frame.paused = bool(captured) and not is_free and frame.followed is None and bool(frame.captured)
        self._following.pause(frame.paused)
        self._frames.append(frame)
        return changed

    def _follow_model(self, site: Site, recording: Recording, args: _Args, kwargs: _Kwargs) -> Frame:
        """The whole model, though its own forward reads no parameter."""
        if self._following.is_opaque(site):
            return self._whole(site, CallBefore(args=args, kwargs=kwargs, fingerprint=Fingerprint(site.module)))
        return self._follow(site, {}, recording, args, kwargs)

    def _may_capture(self, site: Site) -> bool:
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
        site: Site,
        owned: list[tuple[str, nn.Parameter]],
        captured: dict[str, nn.Parameter],
        before: CallBefore | None,
    ) -> Frame:
        switched = [value for _, value in owned if value.requires_grad]
        for value in switched:
            value.requires_grad_(False)
        self.suspended += before is not None
        return Frame(site=site, switched=switched, captured=captured, whole=before is not None, before=before)

    def _whole(self, site: Site, before: CallBefore) -> Frame:
        owned = list(site.module.named_parameters())
        return self._switched_off(site, owned, self._captured(owned), before)

    def _follow(
        self, site: Site, captured: dict[str, nn.Parameter], recording: Recording, args: _Args, kwargs: _Kwargs
    ) -> Frame:
        before = CallBefore(args=args, kwargs=kwargs, fingerprint=Fingerprint(site.module))
        call = self._following.open(site, recording, self.anchor, before)
        return Frame(site=site, switched=[], captured=captured, whole=False, before=before, followed=call)

    def _tap(self, site: Site, captured: dict[str, nn.Parameter], recording: Recording, first: object) -> Frame:
        mode = Tap(
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
        return Frame(site=site, switched=[], captured=captured, whole=False, before=None, mode=mode)

    def _restore(self) -> Frame | None:
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

    def _left(self, frame: Frame | None, args: _Args, kwargs: _Kwargs, output: object) -> object:
        recording = self.recording
        if frame is None or output is None or recording is None or not (frame.captured or frame.followed):
            return None
        result = self._captured_output(frame, recording, args, kwargs, output)
        self._following.mark_output(frame.site, output if result is None else result)
        return result

    def _captured_output(
        self, frame: Frame, recording: Recording, args: _Args, kwargs: _Kwargs, output: object
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

    def _run_again(self, site: Site, before: CallBefore, recording: Recording, followed: FollowedCall) -> object:
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
        frame: Frame,
        rule: LayerRule,
        recording: Recording,
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
            refuse_lone_row(saved[0], site.label, records)
            # One row for the whole batch (position ids): every record gets its own, so that gradients stay apart.
            saved = tuple(tensor.expand(records, *tensor.shape[1:]) for tensor in saved)
            sizes = list(output.shape)
            sizes[site.dim] = records
            output = output.expand(sizes).clone()
        use = Use(module=site.module, label=site.label, rule=rule, parameters=frame.captured, records=records)
        receive = UseReceiver(recording=recording, use=use, dims=(site.dim,))
        (passed,) = capture_outputs(receive, self.anchor, (output,), saved)
        return passed

    def _capture_whole(
        self,
        frame: Frame,
        before: CallBefore,
        recording: Recording,
        output: object,
        followed: FollowedCall | None = None,
    ) -> object:
        site = frame.site
        before.fingerprint.check(site.module, site.label)
        self._refuse_hooks_outside(site)
        places = before.fingerprint.kept_tensors(site.module, recording.records)
        kept = keep_call(site.module, site.label, recording.records, before.args, before.kwargs, output, places)
        use = Use(
            module=site.module,
            label=site.label,
            rule=functional_fallback,
            parameters=frame.captured,
            records=recording.records,
            context=kept.call,
        )
        check = (
            None if followed is None or recording.taking is not None else partial(_check_nothing_kept, site, followed)
        )
        receive = UseReceiver(recording=recording, use=use, dims=kept.call.output_dims, check=check)
        return kept.rebuild(capture_outputs(receive, self.anchor, kept.outputs, kept.saved))

    def _refuse_hooks_outside(self, site: Site) -> None:
        """The module is run again with its own hooks: all of them must lie between ours."""
        first, last = self._hook_ids[site.module]
        hooks = vars(site.module)
        before, after = hooks["_forward_pre_hooks"], hooks["_forward_hooks"]
        if next(iter(before)) != first or next(reversed(after)) != last:
            raise UnsupportedModule(
                f"{site.label} must have its other hooks registered before the capture, got a later one. "
                "Register hooks first, then make the model private."
            )


def _check_nothing_kept(site: Site, followed: FollowedCall) -> None:
    """Refuse a module that is run again and hands something on by another way than its output and its attributes.

    Raises:
        UnsupportedModule: what it computed the first time is still held.
    """
    if is_kept_elsewhere(followed):
        raise UnsupportedModule(
            f"{site.label} must return what a loss reads, or keep it in an attribute with one row per record, got "
            "something that depends on its parameters and is held elsewhere. Return it, or detach() what is only shown."
        )
