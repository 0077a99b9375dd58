"""Hooks that capture a model's layers so that per-record gradients can be clipped.

During a recording every module that owns parameters runs with them switched off (``requires_grad=False``) or replaced
by stand-ins, so torch propagates gradients through the layer but never computes its ordinary weight gradient. What the
layer's rule needs is kept, and the gradient at its output is read by a node in the graph. A managed parameter that
still receives an ordinary gradient was therefore used outside its layer: refused.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from sordino import checks
from sordino.errors import InvalidArgument, PrivacyError, RecordCountMismatch
from sordino.gradients.backward_strategies import GroupwiseInBackward, NormsInBackward, TwoPassBackward
from sordino.gradients.captured_gradients import CapturedGradients
from sordino.gradients.interception import uncaptured_parameters
from sordino.gradients.module_calls import ModuleCallHooks
from sordino.gradients.module_hooks import (
    ModuleHook,
    PlainPython,
    check_hooks_present,
    check_no_record_mixing,
    check_not_complex,
    find_captured_modules,
    may_mix_records,
)
from sordino.gradients.numerics import full_precision
from sordino.gradients.rules.base import KernelTimings, LayerCall, get_rule
from sordino.shapes import Float

if TYPE_CHECKING:
    from sordino.gradients.backward_strategies import GroupwiseInBackward, NormsInBackward, TwoPassBackward


# ----------------------------------------------------------------------------------------------------------------------
# What clipping asks of a chunk's contributions, whatever they are.
# ----------------------------------------------------------------------------------------------------------------------


class Contributions(Protocol):
    """The contributions of a chunk's records, one a record: norms, weighted sums, and the numbers themselves.

    A `Recorder` has them of gradients. Anything else that replaces a record's gradient, such as a
    client's update, is clipped, summed and noised alike if it has these.
    """

    @property
    def names(self) -> Mapping[nn.Parameter, str]:
        """The names of the parameters that contributions are made to."""
        ...

    def trainable(self) -> list[nn.Parameter]:
        """The parameters that are trained now, in an order that stays."""
        ...

    def squared_norm_bounds(self, groups: Sequence[Sequence[nn.Parameter]] | None) -> Float[Tensor, "..."]:
        """Square of a bound on the norm of each contribution, over all parameters or a row for each group of them.

        Not finite for a contribution that is not finite.
        """
        ...

    def add_weighted_sums(
        self, weights: Float[Tensor, "..."], into: dict[nn.Parameter, Tensor], *, last: bool = False
    ) -> None:
        """Add Σ_b weights[b] · contribution[b] to `into`; what has weight 0 adds nothing, even when it isn't finite.

        `weights` has one factor for each record, or a row of them for each group of the last `squared_norm_bounds`.
        After `last` the chunk is not read again.
        """
        ...

    def per_record_gradients(self) -> Iterator[tuple[dict[nn.Parameter, Float[Tensor, "b *shape"]], float]]:
        """The contributions of some records at a time, records first, and a factor that they still lack."""
        ...

    def discard(self) -> None:
        """Forget the chunk."""
        ...


class Recorder(ABC):
    """Gradients of a model's records as `Contributions`: forward and backward of a chunk run between `start`, `stop`.

    The model stays the user's object: hooks are registered, nothing is wrapped or replaced. Between `start` and `stop`
    what torch.compile compiled runs as plain Python.

    Attributes:
        model: whose gradients they are.
        names: the parameters that are recorded, with their names.
    """

    model: nn.Module
    names: dict[nn.Parameter, str]

    @abstractmethod
    def start(
        self,
        records: int,
        *,
        scale: float = 1.0,
        backward_strategy: "NormsInBackward | GroupwiseInBackward | TwoPassBackward | None" = None,
    ) -> None:
        """Begin a recording; whatever was recorded before and not read is discarded.

        Args:
            records: number of records in the chunk, ≥ 0.
            scale: factor on every recorded gradient, > 0; the record count, when the loss is a mean over the chunk.
            backward_strategy: clips and adds up while backward passes run, where the recorder can.
        """

    @abstractmethod
    def stop(self) -> None:
        """End the recording: later forward and backward passes are not recorded. It can still be read."""

    @contextmanager
    def capturing(
        self,
        records: int,
        *,
        scale: float = 1.0,
        backward_strategy: "NormsInBackward | GroupwiseInBackward | TwoPassBackward | None" = None,
    ) -> Iterator[None]:
        """`start` and `stop` around a block that holds forward and backward of one chunk.

        An exception inside the block discards the recording.
        """
        self.start(records, scale=scale, backward_strategy=backward_strategy)
        try:
            yield
        except BaseException:
            self.discard()
            raise
        self.stop()

    @abstractmethod
    def discard(self) -> None:
        """Forget the recording and free what it holds."""

    @abstractmethod
    def detach(self) -> None:
        """Remove every hook; the model is as before."""

    @abstractmethod
    def suspend(self) -> object:
        """Stop recording without ending the recording, for a forward pass of no training; give it to `resume`."""

    @abstractmethod
    def resume(self, recording: object) -> None:
        """Go on with a recording that was set aside; what was recorded meanwhile is discarded."""

    def register_outer_hooks(self, first: RemovableHandle, last: RemovableHandle) -> None:
        """Accept the model's outermost hooks, a pre-hook and a hook that do nothing in a second run of the forward."""
        del first, last

    @property
    def sums_in_backward(self) -> bool:
        """Whether the recording is clipped while backward passes run, and must be read by `add_backward_sums`."""
        return False

    def backward(self, run: Callable[[bool], object]) -> object:
        """Run the backward pass of the recording's loss, twice where norms come first.

        Args:
            run: one backward pass; called with whether its graph must be kept for another.
        """
        return run(False)

    def reading(self) -> AbstractContextManager[None]:
        """A block that reads the recording several times, and prepares for it once."""
        return nullcontext()

    def add_backward_sums(self, into: dict[nn.Parameter, Tensor]) -> None:
        """Add the clipped sums of a recording with `sums_in_backward`."""
        raise NotImplementedError

    def trainable(self) -> list[nn.Parameter]:
        """The recorded parameters that require grad now."""
        return [parameter for parameter in self.names if parameter.requires_grad]

    @abstractmethod
    def squared_norm_bounds(self, groups: Sequence[Sequence[nn.Parameter]] | None = None) -> Float[Tensor, "..."]:
        """As of `Contributions`."""

    @abstractmethod
    def add_weighted_sums(
        self, weights: Float[Tensor, "..."], into: dict[nn.Parameter, Tensor], *, last: bool = False
    ) -> None:
        """As of `Contributions`."""

    @abstractmethod
    def per_record_gradients(self) -> Iterator[tuple[dict[nn.Parameter, Float[Tensor, "b *shape"]], float]]:
        """As of `Contributions`."""


# ----------------------------------------------------------------------------------------------------------------------
# Hooks that capture a model's layers so that per-record gradients can be clipped.
# ----------------------------------------------------------------------------------------------------------------------


class GradientCapture(Recorder):
    """Per-record gradient norms and weighted gradient sums of any model, in one forward and one backward pass.

    The model stays the user's object: hooks are registered, nothing is wrapped or replaced. Forward and backward of
    one chunk of records run inside `capturing`; afterwards `squared_norms` and `add_weighted_sums` read it.

    Guarantee:
        Norms and sums come from the same kept values. ``add_weighted_sums`` with weights for which
        ``weight · bound ≤ C``, with the bounds of `squared_norm_bounds`, lets each record contribute at most C(1 +
        1e-6). A use of a managed parameter that is not captured raises, and nothing can be read from that recording.

    Args:
        model: the model; its leading input dimension is the record.
        parameters: the parameters to capture, by default all of the model's. Frozen ones are captured from the first
            forward pass after they are unfrozen. Parameters of the model that are not listed receive no gradient.
        low_memory: keep per-record gradients only where they are smaller than what is freed for them; results are the
            same up to rounding.
        timings: where the fastest kernels are measured and kept; None takes the cost model's.

    Raises:
        InvalidArgument: a listed parameter is not the model's, or the model is captured already.
        UnsupportedModule: a layer mixes records (batch normalization in training mode), or a parameter is complex.

    Example:
        >>> model = nn.Linear(3, 1)
        >>> capture = GradientCapture(model)
        >>> with capture.capturing(records=2):
        ...     model(torch.ones(2, 3)).sum().backward()
        >>> [round(float(norm), 3) for norm in capture.squared_norms().sqrt()]
        [2.0, 2.0]
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Iterable[nn.Parameter] | None = None,
        *,
        low_memory: bool = False,
        timings: KernelTimings | None = None,
    ) -> None:
        named = {parameter: name for name, parameter in model.named_parameters()}
        wanted = list(named) if parameters is None else list(dict.fromkeys(parameters))
        if any(parameter not in named for parameter in wanted):
            raise InvalidArgument("parameters must be parameters of the model, got one that is not. List them from it.")
        check_hooks_present(model)
        check_not_complex(wanted, named)
        if any(ModuleHook.attached_to(module) for module in model.modules()):
            raise InvalidArgument("model must be captured once, got a captured model. Detach the first capture.")
        self.model, self._lean, self._timings = model, low_memory, timings
        self.names = {parameter: named[parameter] for parameter in wanted}
        self._calls = ModuleCallHooks(model, self.names)
        self._plain_python: PlainPython | None = None
        for name, module in model.named_modules():
            check_no_record_mixing(module, f"{name or 'the model'} ({type(module).__name__})")
        self._attach()

    # --- lifecycle -----------------------------------------------------------------------------------------------

    def _attach(self) -> None:
        for name, module in self.model.named_modules():
            label = f"{name or 'the model'} ({type(module).__name__})"
            if may_mix_records(module):
                hook = ModuleHook(
                    lambda inner, _args, _kwargs, label=label: check_no_record_mixing(inner, label), module
                )
                self._calls.handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        for site in find_captured_modules(self.model):
            self._calls.attach(site)
        self._calls.watch_inputs(self.model)
        self._calls.guard()

    def detach(self) -> None:
        """Remove every hook; the model is as before."""
        self.discard()
        self._calls.remove()

    def start(
        self,
        records: int,
        *,
        scale: float = 1.0,
        backward_strategy: NormsInBackward | GroupwiseInBackward | TwoPassBackward | None = None,
    ) -> None:
        """Begin a recording; whatever was recorded before and not read is discarded.

        Args:
            records: number of records in the chunk, ≥ 0.
            scale: factor on every captured gradient, > 0; the record count, when the loss is a mean over the chunk.
            backward_strategy: clips and adds up while backward passes run; the recording is read by `add_backward_sums`
                only. With `TwoPassBackward` the backward pass is run by `backward`. `NormsInBackward` takes norms
                alone, to be read as without.
        """
        checks.integer(0, records=records)
        checks.positive(scale=scale)
        self.discard()
        if backward_strategy is not None:
            backward_strategy.reading = self.reading
        device = next(iter(self.names)).device if self.names else torch.device("cpu")
        recording = CapturedGradients(
            records,
            scale=scale,
            device=device,
            low_memory=self._lean,
            timings=self._timings,
            backward_strategy=backward_strategy,
        )
        self._calls.begin(recording, device)
        self._plain_python = PlainPython()

    def stop(self) -> None:
        """End the recording: later forward and backward passes are not captured. It can still be read."""
        if self._plain_python is not None:
            self._plain_python.end()
        if self._calls.recording is not None:
            self._calls.recording.open = False
        self._calls.restore_all()

    def discard(self) -> None:
        """Forget the recording and free what it holds."""
        self.stop()
        if self._calls.recording is not None:
            self._calls.recording.clear()
        self._calls.recording = None

    def suspend(self) -> CapturedGradients | None:
        """Stop capturing without ending the recording, for a forward pass of no training; give it to `resume`."""
        return self._calls.suspend()

    def resume(self, recording: object) -> None:
        """Go on with a recording that was set aside; what was recorded meanwhile is discarded."""
        assert recording is None or isinstance(recording, CapturedGradients)
        self.discard()
        self._calls.resume(recording)

    def register_outer_hooks(self, first: RemovableHandle, last: RemovableHandle) -> None:
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
        with self.reading():
            return self._readable().squared_norms().sum(0)

    def squared_norm_bounds(self, groups: Sequence[Sequence[nn.Parameter]] | None = None) -> Float[Tensor, "..."]:
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
            with self.reading():
                bounds = recording.squared_norm_bounds()
                return bounds[0] if len(bounds) == 1 else bounds.sum(0)
        members = [parameter for group in groups for parameter in group]
        if len(set(members)) != len(members) or not set(self.trainable()) <= set(members):
            raise InvalidArgument(
                "groups must hold every trained parameter once, got others. Build them from trainable()."
            )
        recording.group(groups)
        with self.reading():
            return recording.squared_norm_bounds()

    def add_weighted_sums(
        self, weights: Float[Tensor, "..."], into: dict[nn.Parameter, Tensor], *, last: bool = False
    ) -> None:
        """Add ``scale · Σ_b weights[b] · gradient[b]`` to the entry of every parameter used in this chunk.

        A record of weight 0 contributes nothing, even when its gradient is not finite.

        Args:
            weights: one factor per record; a row of them for each group, after `squared_norm_bounds` with groups.
            into: sums by parameter; a missing entry is created, an unused parameter's entry is left alone.
            last: free what was kept of each layer as soon as its sum is formed; the recording can't be read again.
        """
        recording = self._readable()
        rows = weights[None] if weights.dim() == 1 else weights
        if rows.shape != (recording.groups, recording.records):
            raise RecordCountMismatch("weights must be one number per record of the chunk, got another shape.")
        with self.reading():
            recording.add_weighted_sums(rows, into, last=last)

    @property
    def sums_in_backward(self) -> bool:
        """Whether the recording is clipped while backward passes run, and must be read by `add_backward_sums`."""
        return self._calls.recording is not None and self._calls.recording.backward_strategy is not None

    def backward(self, run: Callable[[bool], object]) -> object:
        """Run the backward pass of the recording's loss, twice where norms come first.

        Args:
            run: one backward pass; called with whether its graph must be kept for another.

        Raises:
            PrivacyError: it was run before, or the second pass was not like the first.
        """
        recording = self._calls.recording
        return run(False) if recording is None else recording.backward(run)

    def add_backward_sums(self, into: dict[nn.Parameter, Tensor]) -> None:
        """Add the clipped sums of a recording with `taking` to the entry of every parameter that was used.

        Guarantee: as of `add_weighted_sums`, with the factors of `taking` for the bounds of each group.

        Raises:
            UncapturedParameter: a use of a managed parameter was not captured.
            PrivacyError: there is no recording, or a kept input was modified in place.
        """
        with self.reading():
            self._readable().add_backward_sums(into)

    def per_record_gradients(self) -> Iterator[tuple[dict[nn.Parameter, Float[Tensor, "b *shape"]], float]]:
        """The gradient of every record, formed a few records at a time and not kept.

        For a mechanism that must look at each record's numbers. It costs a gradient of the whole model per record;
        `squared_norm_bounds` and `add_weighted_sums` never form them. Nothing here is clipped.

        Yields:
            For the next records in order, the gradient of every parameter that was used, records first, and the
            factor `scale` that it still lacks.

        Raises:
            UncapturedParameter: a use of a managed parameter was not captured.
            PrivacyError: there is no recording, or a kept input was modified in place.
        """
        with self.reading():
            recording = self._readable()
            for gradients in recording.per_record_gradients():
                yield gradients, recording.scale

    def uncaptured_uses(self, loss: Tensor) -> list[str]:
        """Names of managed parameters that `loss` would send an ordinary gradient to: the check before backward."""
        names: dict[Tensor, str] = {**self.names, **self._calls.placeholders}
        return uncaptured_parameters(loss, names)

    def layer_calls(self) -> list[LayerCall]:
        """What was captured in the recording, checked; for a graph that reads it again."""
        return self._readable().layer_calls

    @contextmanager
    def ordinary(self) -> Iterator[None]:
        """A block in which nothing is captured and parameters may get ordinary gradients: to compare with them.

        Only on synthetic records: what is computed inside is not private.
        """
        aside, self._calls.is_ordinary = self.suspend(), True
        try:
            yield
        finally:
            self._calls.is_ordinary = False
            self.resume(aside)

    def reading(self) -> AbstractContextManager[None]:
        """A block that reads a recording: modules may be run again, and products have full precision."""
        return _Reading(self._calls)

    def _readable(self) -> CapturedGradients:
        if self._calls.recording is None:
            raise PrivacyError("a recording must exist to be read, got none. Run forward and backward inside one.")
        return self._calls.recording


class _Reading:
    """As of `GradientCapture.reading`; a block inside another has nothing more to do."""

    def __init__(self, calls: ModuleCallHooks) -> None:
        self._calls = calls
        self._precision = None if calls.readers else full_precision(calls.anchor.device)

    def __enter__(self) -> None:
        if self._precision is not None:
            self._precision.__enter__()
        self._calls.suspended += 1
        self._calls.readers += 1

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._calls.suspended -= 1
        self._calls.readers -= 1
        if self._precision is not None:
            self._precision.__exit__(kind, raised, traceback)


# ----------------------------------------------------------------------------------------------------------------------
# The check that a layer rule gives autograd's gradients.
# ----------------------------------------------------------------------------------------------------------------------


def check_layer_rule(module: nn.Module, *inputs: Tensor, tolerance: float = 1e-5) -> None:
    """Compare what a module's rule computes with plain autograd, one record at a time.

    Call it in a test of every rule you write, with inputs that reach each of its options. Norms, weighted sums and
    per-record gradients are compared, for the module called once and called twice.

    Args:
        module: the layer; its rule is looked up as it will be in training, and the functional fallback is checked
            where there is none.
        inputs: public example tensors with the records as their first dimension, at least one record.
        tolerance: largest difference allowed, relative to the largest gradient.

    Raises:
        PrivacyError: the rule disagrees with autograd; the message says in what.

    Example:
        >>> check_layer_rule(nn.Linear(3, 2), torch.randn(4, 5, 3))
    """
    records = inputs[0].shape[0]
    layer = copy.deepcopy(module).requires_grad_(True)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        output = layer(*inputs)
    cotangents = [torch.randn(output.shape, generator=generator).to(output) for _ in range(2)]
    expected = _one_by_one(layer, inputs, cotangents[0])
    twice = _one_by_one(layer, inputs, cotangents[0] + cotangents[1])
    weights = torch.rand(records, generator=generator, dtype=torch.float64).to(output.device)
    _compare(layer, inputs, cotangents[:1], expected, weights, tolerance)
    _compare(layer, inputs, cotangents, twice, weights, tolerance)
    _compare_per_example(layer, inputs, cotangents[0], expected, tolerance)


def _one_by_one(layer: nn.Module, inputs: tuple[Tensor, ...], cotangent: Tensor) -> dict[str, Tensor]:
    names = [name for name, _ in layer.named_parameters()]
    rows = []
    for b in range(cotangent.shape[0]):
        loss = (layer(*(tensor[b : b + 1] for tensor in inputs)) * cotangent[b : b + 1]).sum()
        rows.append(torch.autograd.grad(loss, list(layer.parameters()), allow_unused=True, materialize_grads=True))
    return {name: torch.stack([row[i] for row in rows]) for i, name in enumerate(names)}


def _compare(
    layer: nn.Module,
    inputs: tuple[Tensor, ...],
    cotangents: list[Tensor],
    expected: dict[str, Tensor],
    weights: Tensor,
    tolerance: float,
) -> None:
    capture = GradientCapture(layer)
    try:
        with capture.capturing(cotangents[0].shape[0]):
            torch.stack([(layer(*inputs) * cotangent).sum() for cotangent in cotangents]).sum().backward()
        squared = capture.squared_norms()
        sums: dict[nn.Parameter, Tensor] = {}
        capture.add_weighted_sums(weights, sums)
    finally:
        capture.detach()
    calls = "called once" if len(cotangents) == 1 else "called twice"
    true = torch.stack([gradient.double().flatten(1).square().sum(1) for gradient in expected.values()]).sum(0)
    _agree(squared.sqrt(), true.sqrt(), f"norms, {calls}", layer, tolerance)
    for name, parameter in layer.named_parameters():
        wanted = torch.tensordot(weights, expected[name].double(), dims=1)
        _agree(sums.get(parameter, torch.zeros_like(wanted)), wanted, f"the sum for {name}, {calls}", layer, tolerance)


def _compare_per_example(
    layer: nn.Module, inputs: tuple[Tensor, ...], cotangent: Tensor, expected: dict[str, Tensor], tolerance: float
) -> None:
    rule = get_rule(layer)
    if rule is None:
        return
    output = layer(*inputs)
    parameters = dict(layer.named_parameters())
    use = LayerCall(module=layer, label="", rule=rule, parameters=parameters, records=cotangent.shape[0])
    use.saved = tuple(tensor.detach() for tensor in rule.save(layer, inputs, {}, output))
    use.grads = (cotangent,)
    for name in parameters:
        _agree(rule.per_record_gradient(use, name), expected[name], f"the gradients for {name}", layer, tolerance)


def _agree(got: Tensor, wanted: Tensor, what: str, layer: nn.Module, tolerance: float) -> None:
    largest = float(wanted.abs().max()) if wanted.numel() else 0.0
    if got.shape != wanted.shape or not bool(
        (got.double() - wanted.double()).abs().le(tolerance * largest + 1e-12).all()
    ):
        raise PrivacyError(
            f"the rule of {type(layer).__name__} must give autograd's gradients, got other values for {what}. "
            "Correct the rule before training with it."
        )
