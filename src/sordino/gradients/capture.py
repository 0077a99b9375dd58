"""Hooks that capture a model's layers so that per-record gradients can be clipped (floor 1, gradients).

During a recording every module that owns parameters runs with them switched off (``requires_grad=False``) or replaced
by stand-ins, so torch propagates gradients through the layer but never computes its ordinary weight gradient. What the
layer's rule needs is kept, and the gradient at its output is read by a node in the graph. A managed parameter that
still receives an ordinary gradient was therefore used outside its layer: refused.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from sordino import checks
from sordino.errors import InvalidArgument, PrivacyError, RecordCountMismatch
from sordino.gradients.blocks import Blocks
from sordino.gradients.calls import Calls
from sordino.gradients.contributions import Recorder
from sordino.gradients.early import Early
from sordino.gradients.graph import ordinary_uses
from sordino.gradients.hooks import ModuleHook
from sordino.gradients.numerics import full_precision
from sordino.gradients.passes import TwoPasses
from sordino.gradients.recording import Recording
from sordino.gradients.rules.rule import Use
from sordino.gradients.rules.timings import KernelTimings
from sordino.gradients.sites import find_sites, may_couple, refuse_absent, refuse_complex, refuse_coupling

__all__ = ["GradientCapture"]


class GradientCapture(Recorder):
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
        lean: keep per-record gradients only where they are smaller than what is freed for them; results are the same
            up to rounding.
        timings: where the fastest kernels are measured and kept; None takes the cost model's.

    Raises:
        InvalidArgument: a listed parameter is not the model's, or the model is captured already.
        UnsupportedModule: a layer mixes records (batch normalisation in training mode), or a parameter is complex.

    Example:
        >>> model = nn.Linear(3, 1)
        >>> capture = GradientCapture(model)
        >>> with capture.recording(records=2):
        ...     model(torch.ones(2, 3)).sum().backward()
        >>> [round(float(norm), 3) for norm in capture.squared_norms().sqrt()]
        [2.0, 2.0]
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Iterable[nn.Parameter] | None = None,
        *,
        lean: bool = False,
        timings: KernelTimings | None = None,
    ) -> None:
        named = {parameter: name for name, parameter in model.named_parameters()}
        wanted = list(named) if parameters is None else list(dict.fromkeys(parameters))
        if any(parameter not in named for parameter in wanted):
            raise InvalidArgument("parameters must be parameters of the model, got one that is not. List them from it.")
        refuse_absent(model)
        refuse_complex(wanted, named)
        if any(ModuleHook.attached_to(module) for module in model.modules()):
            raise InvalidArgument("model must be captured once, got a captured model. Detach the first capture.")
        self.model, self._lean, self._timings = model, lean, timings
        self.names = {parameter: named[parameter] for parameter in wanted}
        self._calls = Calls(model, self.names)
        for name, module in model.named_modules():
            refuse_coupling(module, f"{name or 'the model'} ({type(module).__name__})")
        self._attach()

    # --- lifecycle -----------------------------------------------------------------------------------------------

    def _attach(self) -> None:
        for name, module in self.model.named_modules():
            label = f"{name or 'the model'} ({type(module).__name__})"
            if may_couple(module):
                hook = ModuleHook(lambda inner, _args, _kwargs, label=label: refuse_coupling(inner, label), module)
                self._calls.handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        for site in find_sites(self.model):
            self._calls.attach(site)
        self._calls.watch_inputs(self.model)
        self._calls.guard()

    def detach(self) -> None:
        """Remove every hook; the model is as before."""
        self.discard()
        self._calls.remove()

    def start(self, records: int, *, scale: float = 1.0, taking: Early | Blocks | TwoPasses | None = None) -> None:
        """Begin a recording; whatever was recorded before and not read is discarded.

        Args:
            records: number of records in the chunk, ≥ 0.
            scale: factor on every captured gradient, > 0; the record count, when the loss is a mean over the chunk.
            taking: clips and adds up while backward passes run; the recording is read by `add_taken_sums` only. With
                `TwoPasses` the backward pass is run by `backward`. `Early` takes norms alone, to be read as without.
        """
        checks.integer(0, records=records)
        checks.positive(scale=scale)
        self.stop()
        if taking is not None:
            taking.reading = self._reading
        device = next(iter(self.names)).device if self.names else torch.device("cpu")
        recording = Recording(
            records, scale=scale, device=device, lean=self._lean, timings=self._timings, taking=taking
        )
        self._calls.begin(recording, device)

    def stop(self) -> None:
        """End the recording: later forward and backward passes are not captured. It can still be read."""
        if self._calls.recording is not None:
            self._calls.recording.open = False
        self._calls.restore_all()

    def discard(self) -> None:
        """Forget the recording and free what it holds."""
        self.stop()
        self._calls.recording = None

    def set_aside(self) -> Recording | None:
        """Stop capturing without ending the recording, for a forward pass of no training; give it to `take_back`."""
        return self._calls.set_aside()

    def take_back(self, recording: object) -> None:
        """Go on with a recording that was set aside; what was recorded meanwhile is discarded."""
        assert recording is None or isinstance(recording, Recording)
        self.discard()
        self._calls.take_back(recording)

    def surrounded_by(self, first: RemovableHandle, last: RemovableHandle) -> None:
        """Accept the model's outermost hooks, a forward pre-hook and a forward hook that do nothing in a second run."""
        self._calls.surround(self.model, first.id, last.id)

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
            return self._readable().squared_norms().sum(0)

    def squared_bounds(self, groups: Sequence[Sequence[nn.Parameter]] | None = None) -> Float[Tensor, "..."]:
        """Square of a bound on the norm of what each record adds to the sums at weight 1, rounding included.

        Clipping must read these: a record whose terms are huge and cancel has a small gradient, but its sum in single
        precision is off by the rounding of the terms. For most records bound and norm agree to 1e-3 or better; where
        every term is kept apart they are equal. Derivation: ``docs/proofs/clipping.md``.

        Args:
            groups: parameters whose gradients are bounded apart, each in at most one group; None takes all together.

        Returns:
            One float64 value per record, at least its `squared_norms`; not finite where that is not finite. With
            `groups` one row for each.

        Raises:
            UncapturedParameter: a use of a managed parameter was not captured.
            PrivacyError: there is no recording, or a kept input was modified in place.
        """
        recording = self._readable()
        if groups is None:
            with self._reading():
                return recording.squared_bounds().sum(0)
        members = [parameter for group in groups for parameter in group]
        if len(set(members)) != len(members) or not set(self.trainable()) <= set(members):
            raise InvalidArgument(
                "groups must hold every trained parameter once, got others. Build them from trainable()."
            )
        recording.group(groups)
        with self._reading():
            return recording.squared_bounds()

    def add_weighted_sums(
        self, weights: Float[Tensor, "..."], into: dict[nn.Parameter, Tensor], *, last: bool = False
    ) -> None:
        """Add ``scale · Σ_b weights[b] · gradient[b]`` to the entry of every parameter used in this chunk.

        A record of weight 0 contributes nothing, even when its gradient is not finite.

        Args:
            weights: one factor per record; a row of them for each group, after `squared_bounds` with groups.
            into: sums by parameter; a missing entry is created, an unused parameter's entry is left alone.
            last: free what was kept of each layer as soon as its sum is formed; the recording can't be read again.
        """
        recording = self._readable()
        rows = weights[None] if weights.dim() == 1 else weights
        if rows.shape != (recording.groups, recording.records):
            raise RecordCountMismatch("weights must be one number per record of the chunk, got another shape.")
        with self._reading():
            recording.add_weighted_sums(rows, into, last=last)

    @property
    def takes_sums(self) -> bool:
        """Whether the recording is clipped while backward passes run, and must be read by `add_taken_sums`."""
        return self._calls.recording is not None and self._calls.recording.taking is not None

    def backward(self, run: Callable[[bool], object]) -> object:
        """Run the backward pass of the recording's loss, twice where norms come first.

        Args:
            run: one backward pass; called with whether its graph must be kept for another.

        Raises:
            PrivacyError: it was run before, or the second pass was not like the first.
        """
        recording = self._calls.recording
        return run(False) if recording is None else recording.backward(run)

    def add_taken_sums(self, into: dict[nn.Parameter, Tensor]) -> None:
        """Add the clipped sums of a recording with `taking` to the entry of every parameter that was used.

        Guarantee: as of `add_weighted_sums`, with the factors of `taking` for the bounds of each group.

        Raises:
            UncapturedParameter: a use of a managed parameter was not captured.
            PrivacyError: there is no recording, or a kept input was modified in place.
        """
        with self._reading():
            self._readable().add_taken_sums(into)

    def per_record_gradients(self) -> Iterator[tuple[dict[nn.Parameter, Float[Tensor, "b *shape"]], float]]:
        """The gradient of every record, formed a few records at a time and not kept.

        For a mechanism that must look at each record's numbers. It costs a gradient of the whole model per record;
        `squared_bounds` and `add_weighted_sums` never form them. Nothing here is clipped.

        Yields:
            For the next records in order, the gradient of every parameter that was used, records first, and the
            factor `scale` that it still lacks.

        Raises:
            UncapturedParameter: a use of a managed parameter was not captured.
            PrivacyError: there is no recording, or a kept input was modified in place.
        """
        with self._reading():
            recording = self._readable()
            for gradients in recording.per_record_gradients():
                yield gradients, recording.scale

    def uncaptured_uses(self, loss: Tensor) -> list[str]:
        """Names of managed parameters that `loss` would send an ordinary gradient to: the check before backward."""
        names: dict[Tensor, str] = {**self.names, **self._calls.stand_ins}
        return ordinary_uses(loss, names)

    def uses(self) -> list[Use]:
        """What was captured in the recording, checked; for a graph that reads it again."""
        return self._readable().uses

    @contextmanager
    def ordinary(self) -> Iterator[None]:
        """A block in which nothing is captured and parameters may get ordinary gradients: to compare with them.

        Only on made-up records: what is computed inside is not private.
        """
        aside, self._calls.is_ordinary = self.set_aside(), True
        try:
            yield
        finally:
            self._calls.is_ordinary = False
            self.take_back(aside)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Modules may be run again while a recording is read, and products have full precision."""
        self._calls.suspended += 1
        try:
            with full_precision(self._calls.anchor.device):
                yield
        finally:
            self._calls.suspended -= 1

    def _readable(self) -> Recording:
        if self._calls.recording is None:
            raise PrivacyError("a recording must exist to be read, got none. Run forward and backward inside one.")
        return self._calls.recording
