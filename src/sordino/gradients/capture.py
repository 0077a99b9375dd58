"""Hooks that capture a model's layers so that per-record gradients can be clipped (floor 1, gradients).

During a recording every module that owns parameters runs with them switched off (``requires_grad=False``), so torch
propagates gradients through the layer but never computes its ordinary weight gradient. What the layer's rule needs is
kept, and the gradient at its output is read by a node in the graph. A managed parameter that still receives an
ordinary gradient was therefore used outside its layer: refused.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from sordino import checks
from sordino.errors import (
    InvalidArgument,
    PrivacyError,
    RecordCountMismatch,
    UncapturedParameter,
    UnsupportedModule,
)
from sordino.gradients.attention import attention
from sordino.gradients.edge import capture_outputs
from sordino.gradients.fallback import functional_fallback, keep_call
from sordino.gradients.graph import ordinary_uses
from sordino.gradients.hooks import CallBefore, Frame, ModuleHook, UseReceiver
from sordino.gradients.numerics import full_precision
from sordino.gradients.purity import Fingerprint
from sordino.gradients.recording import Recording
from sordino.gradients.recurrent import recurrent_replacements
from sordino.gradients.rules.rule import LayerRule, Use
from sordino.gradients.sites import Site, find_sites, may_couple, refuse_coupling
from sordino.gradients.tap import Replacement, Tap

__all__ = ["GradientCapture"]

_REPLACEMENTS: dict[object, Replacement] = {
    F.multi_head_attention_forward: attention,
    **recurrent_replacements(),
}


class GradientCapture:
    """Per-record gradient norms and weighted gradient sums of any model, in one forward and one backward pass.

    The model stays the user's object: hooks are registered, nothing is wrapped or replaced. Forward and backward of
    one chunk of records run inside `recording`; afterwards `squared_norms` and `add_weighted_sums` read it.

    Guarantee:
        Norms and sums come from the same kept values. ``add_weighted_sums`` with weights for which
        ``weight · bound ≤ C``, with the bounds of `squared_bounds`, lets each record contribute at most C(1 + 1e-6).
        A use of a managed parameter that is not captured raises, and nothing can be read from that recording.

    Args:
        model: the model; its leading input dimension is the record.
        parameters: the parameters to capture, by default all of the model's. Frozen ones are captured from the first
            forward pass after they are unfrozen. Parameters of the model that are not listed receive no gradient.

    Raises:
        InvalidArgument: a listed parameter is not the model's, or the model is captured already.
        UnsupportedModule: a layer mixes records (batch normalisation in training mode).

    Example:
        >>> model = nn.Linear(3, 1)
        >>> capture = GradientCapture(model)
        >>> with capture.recording(records=2):
        ...     model(torch.ones(2, 3)).sum().backward()
        >>> [round(float(norm), 3) for norm in capture.squared_norms().sqrt()]
        [2.0, 2.0]
    """

    def __init__(self, model: nn.Module, parameters: Iterable[nn.Parameter] | None = None) -> None:
        named = {parameter: name for name, parameter in model.named_parameters()}
        wanted = list(named) if parameters is None else list(dict.fromkeys(parameters))
        if any(parameter not in named for parameter in wanted):
            raise InvalidArgument("parameters must be parameters of the model, got one that is not. List them from it.")
        if any(ModuleHook.attached_to(module) for module in model.modules()):
            raise InvalidArgument("model must be captured once, got a captured model. Detach the first capture.")
        self.model = model
        self.names: dict[nn.Parameter, str] = {parameter: named[parameter] for parameter in wanted}
        self._anchor = torch.zeros((), requires_grad=True)
        self._recording: Recording | None = None
        self._frames: list[Frame | None] = []
        self._suspended = 0
        self._handles: list[RemovableHandle] = []
        self._hook_ids: dict[nn.Module, tuple[int, int]] = {}
        self._guarded: set[nn.Parameter] = set()
        for name, module in model.named_modules():
            refuse_coupling(module, f"{name or 'the model'} ({type(module).__name__})")
        self._attach()

    # --- lifecycle -----------------------------------------------------------------------------------------------

    def _attach(self) -> None:
        for name, module in self.model.named_modules():
            label = f"{name or 'the model'} ({type(module).__name__})"
            if may_couple(module):
                hook = ModuleHook(lambda inner, _args, _kwargs, label=label: refuse_coupling(inner, label), module)
                self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        for site in find_sites(self.model):
            self._attach_site(site)
        self._guard()

    def _attach_site(self, site: Site) -> None:
        before = ModuleHook(lambda _module, args, kwargs: self._before(site, args, kwargs), site.module)
        after = ModuleHook(lambda _module, args, kwargs, output: self._after(site, args, kwargs, output), site.module)
        first = site.module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        # A rule reads the bare output; a module that is run again is run with the user's hooks.
        prepend = site.rule is not None
        last = site.module.register_forward_hook(after, prepend=prepend, with_kwargs=True, always_call=True)
        self._handles += [first, last]
        self._hook_ids[site.module] = (first.id, last.id)

    def _guard(self) -> None:
        """Watch for ordinary gradients of every managed parameter that requires grad by now."""
        for parameter in self.names:
            if parameter.requires_grad and parameter not in self._guarded:
                self._guard_one(parameter)

    def _guard_one(self, parameter: nn.Parameter) -> None:
        name = self.names[parameter]
        self._guarded.add(parameter)
        self._handles.append(parameter.register_hook(lambda _: self._refuse(name)))

    def _refuse(self, name: str) -> None:
        if self._recording is not None:
            self._recording.poison(name)
        where = "an uncaptured use" if self._recording is not None and self._recording.open else "an ordinary backward"
        raise UncapturedParameter(
            f"{name} must be used through a captured layer inside a recording, got {where}. "
            "Call the layer itself rather than reading its parameter, and keep penalties on parameters out of the loss."
        )

    def detach(self) -> None:
        """Remove every hook; the model is as before."""
        self.discard()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._guarded.clear()
        self._hook_ids.clear()

    def start(self, records: int, *, scale: float = 1.0) -> None:
        """Begin a recording; whatever was recorded before and not read is discarded.

        Args:
            records: number of records in the chunk, ≥ 0.
            scale: factor on every captured gradient, > 0; the record count, when the loss is a mean over the chunk.
        """
        checks.integer(0, records=records)
        checks.positive(scale=scale)
        self.stop()
        self._guard()
        device = next(iter(self.names)).device if self.names else torch.device("cpu")
        if self._anchor.device != device:
            self._anchor = torch.zeros((), requires_grad=True, device=device)
        self._recording = Recording(records, scale=scale, device=device)

    def stop(self) -> None:
        """End the recording: later forward and backward passes are not captured. It can still be read."""
        if self._recording is not None:
            self._recording.open = False
        self._restore_all()

    @contextmanager
    def recording(self, records: int, *, scale: float = 1.0) -> Iterator[None]:
        """`start` and `stop` around a block that holds forward and backward of one chunk.

        An exception inside the block discards the recording.
        """
        self.start(records, scale=scale)
        try:
            yield
        except BaseException:
            self.discard()
            raise
        self.stop()

    def discard(self) -> None:
        """Forget the recording and free what it holds."""
        self.stop()
        self._recording = None

    def set_aside(self) -> Recording | None:
        """Stop capturing without ending the recording, for a forward pass of no training; give it to `take_back`."""
        recording, self._recording = self._recording, None
        return recording

    def take_back(self, recording: Recording | None) -> None:
        """Go on with a recording that was set aside; what was recorded meanwhile is discarded."""
        self.discard()
        self._recording = recording

    def surrounded_by(self, first: RemovableHandle, last: RemovableHandle) -> None:
        """Accept the model's outermost hooks, a forward pre-hook and a forward hook that do nothing in a second run."""
        if self.model in self._hook_ids:
            self._hook_ids[self.model] = (first.id, last.id)

    # --- reading -------------------------------------------------------------------------------------------------

    def squared_norms(self) -> Float[Tensor, " B"]:
        """Squared norm of each record's gradient, summed over all uses and parameters, times ``scale²``.

        Returns:
            One float64 value per record, never below the true value by more than 1e-6 relative; not finite for a
            record whose gradient is not finite.

        Raises:
            UncapturedParameter: a use of a managed parameter was not captured.
            PrivacyError: there is no recording, or a kept input was modified in place.
        """
        with self._reading():
            return self._readable().squared_norms()

    def squared_bounds(self) -> Float[Tensor, " B"]:
        """Square of a bound on the norm of what each record adds to the sums at weight 1, rounding included.

        Clipping must read these: a record whose terms are huge and cancel has a small gradient, but its sum in single
        precision is off by the rounding of the terms. For most records bound and norm agree to 1e-3 or better; where
        every term is kept apart they are equal. Derivation: ``docs/proofs/clipping.md``.

        Returns:
            One float64 value per record, at least its `squared_norms`; not finite where that is not finite.

        Raises:
            UncapturedParameter: a use of a managed parameter was not captured.
            PrivacyError: there is no recording, or a kept input was modified in place.
        """
        with self._reading():
            return self._readable().squared_bounds()

    def add_weighted_sums(self, weights: Float[Tensor, " B"], into: dict[nn.Parameter, Tensor]) -> None:
        """Add ``scale · Σ_b weights[b] · gradient[b]`` to the entry of every parameter used in this chunk.

        A record of weight 0 contributes nothing, even when its gradient is not finite.

        Args:
            weights: one factor per record.
            into: sums by parameter; a missing entry is created, an unused parameter's entry is left alone.
        """
        recording = self._readable()
        if weights.shape != (recording.records,):
            raise RecordCountMismatch("weights must be one number per record of the chunk, got another shape.")
        with self._reading():
            recording.add_weighted_sums(weights, into)

    def uncaptured_uses(self, loss: Tensor) -> list[str]:
        """Names of managed parameters that `loss` would send an ordinary gradient to: the check before backward."""
        return ordinary_uses(loss, self.names)

    def trainable(self) -> list[nn.Parameter]:
        """The managed parameters that require grad now."""
        return [parameter for parameter in self.names if parameter.requires_grad]

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Modules may be run again while a recording is read, and products have full precision."""
        self._suspended += 1
        try:
            with full_precision(self._anchor.device):
                yield
        finally:
            self._suspended -= 1

    def _readable(self) -> Recording:
        if self._recording is None:
            raise PrivacyError("a recording must exist to be read, got none. Run forward and backward inside one.")
        return self._recording

    # --- hooks ---------------------------------------------------------------------------------------------------

    def _before(self, site: Site, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        recording = self._recording
        if recording is None or not recording.open or self._suspended or not torch.is_grad_enabled():
            self._frames.append(None)
            return
        owned = site.parameters()
        # With nothing of its own to capture, the modules inside it are captured one by one.
        whole = (
            site.rule is None
            and not site.tapped
            and any(value.requires_grad and value in self.names for _, value in owned)
        )
        if whole:
            owned = list(site.module.named_parameters())
        switched = [value for _, value in owned if value.requires_grad]
        captured = {name: value for name, value in owned if value.requires_grad and value in self.names}
        for value in captured.values():
            if value not in self._guarded:
                self._guard_one(value)
        if site.tapped and captured:
            # The parameters stay on: a use that the tap doesn't see must be noticed.
            self._frames.append(self._tap(site, captured, recording, args[0] if args else kwargs.get("input")))
            return
        for value in switched:
            value.requires_grad_(False)
        before = CallBefore(args=args, kwargs=kwargs, fingerprint=Fingerprint(site.module)) if whole else None
        self._suspended += whole
        self._frames.append(Frame(site=site, switched=switched, captured=captured, whole=whole, before=before))

    def _tap(self, site: Site, captured: dict[str, nn.Parameter], recording: Recording, first: object) -> Frame:
        mode = Tap(
            module=site.module,
            label=site.label,
            parameters=captured,
            recording=recording,
            anchor=self._anchor,
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
            for parameter in frame.switched:
                parameter.requires_grad_(True)
            self._suspended -= frame.whole
        return frame

    def _restore_all(self) -> None:
        while self._frames:
            self._restore()

    def _after(self, site: Site, args: tuple[object, ...], kwargs: Mapping[str, object], output: object) -> object:
        # First of all the flags: keeping tensors may raise inside a checkpointed block.
        frame = self._restore()
        recording = self._recording
        if frame is None or output is None or recording is None or not frame.captured or frame.mode is not None:
            return None
        if frame.before is not None:
            return self._capture_whole(frame, frame.before, recording, output)
        if site.rule is None or not isinstance(output, Tensor):
            raise UnsupportedModule(f"{site.label} must return one tensor, got something else. Write a layer rule.")
        return self._capture_layer(frame, site.rule, recording, args, kwargs, output)

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
        if site.dim and all(tensor.dim() > site.dim for tensor in saved):
            saved = tuple(tensor.movedim(site.dim, 0) for tensor in saved)
        if saved[0].dim() < rule.record_dims(site.module) or saved[0].shape[0] not in (1, records):
            raise RecordCountMismatch(
                f"the input of {site.label} must have the records as its first dimension, got another leading "
                "dimension. Keep one row per record until the loss."
            )
        if saved[0].shape[0] != records:
            # One row for the whole batch (position ids): every record gets its own, so that gradients stay apart.
            saved = tuple(tensor.expand(records, *tensor.shape[1:]) for tensor in saved)
            sizes = list(output.shape)
            sizes[site.dim] = records
            output = output.expand(sizes).clone()
        use = Use(module=site.module, label=site.label, rule=rule, parameters=frame.captured, records=records)
        receive = UseReceiver(recording=recording, use=use, dims=(site.dim,))
        (passed,) = capture_outputs(receive, self._anchor, (output,), saved)
        return passed

    def _capture_whole(self, frame: Frame, before: CallBefore, recording: Recording, output: object) -> object:
        site = frame.site
        before.fingerprint.check(site.module, site.label)
        self._refuse_hooks_outside(site)
        kept = keep_call(site.module, site.label, recording.records, before.args, before.kwargs, output)
        use = Use(
            module=site.module,
            label=site.label,
            rule=functional_fallback,
            parameters=frame.captured,
            records=recording.records,
            context=kept.call,
        )
        receive = UseReceiver(recording=recording, use=use, dims=kept.call.output_dims)
        return kept.rebuild(capture_outputs(receive, self._anchor, kept.outputs, kept.saved))

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
