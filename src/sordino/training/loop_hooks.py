"""One model under one plan: which chunk a forward belongs to, and which step an optimizer may take.

The module and the optimizer stay the user's objects. Three hooks do everything: before and after the root module's
forward, and before the optimizer's step. Chunks come from the loader, which calls `set_microbatch`.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sordino.errors import InvalidArgument, NonPrivateStep
from sordino.gradients import GradientCapture, OneByOne
from sordino.gradients.module_hooks import untraced
from sordino.sampling import Microbatch
from sordino.training.accumulators import ClippedSumAccumulator
from sordino.training.compiled_step import CompiledStep
from sordino.training.generators import BatchGenerators, check_not_seeded
from sordino.training.loader import left_out
from sordino.training.loss_tracing.carried import OptimizerSettingsWatch, batch_tag, is_public, tag_batch, texts_in
from sordino.training.loss_tracing.criterion import LoopProbe
from sordino.training.loss_tracing.loss_tracer import (
    ForwardMonitor,
    LossTracer,
)
from sordino.training.loss_tracing.trace import OperationTrace
from sordino.training.loss_tracing.traced_tensor import (
    TracedTensor,
    leave_untraced,
    not_noting,
    trace_again,
    without_trace,
)
from sordino.training.optimizer_checks import (
    check_module_and_optimizer,
    optimizer_parameters,
    register_private_parameters,
    unregister_private_parameters,
)
from sordino.training.plan import PerformanceOptions
from sordino.training.private_run import PrivateRun, RunState
from sordino.training.probing.probe_runner import attempt, graph_nodes
from sordino.training.probing.snapshots import preserve_rng_state, random_states
from sordino.training.pytree import map_tensors, tensors_in, tree_leaves
from sordino.training.record_source import UnitMicrobatch
from sordino.training.special_accumulators import UnitAccumulator

# ----------------------------------------------------------------------------------------------------------------------
# Hooks of one module that its copies carry without taking part.
# ----------------------------------------------------------------------------------------------------------------------


class RootHook:
    """A hook of one module: a copy of the module carries one that only looks, and pickling drops it.

    Args:
        call: the hook, called as torch calls it but without the module.
        module: whose hook it is.
        on_copy: called instead of it, with the module first, when a copy of `module` runs.
    """

    def __init__(
        self, call: Callable[..., object], module: nn.Module, on_copy: Callable[..., None] | None = None
    ) -> None:
        self._call, self._module, self._on_copy = call, module, on_copy

    def __call__(self, module: nn.Module, *arguments: object) -> object:
        """Called by torch."""
        if module is self._module:
            return untraced(self._call, *arguments)
        return None if self._on_copy is None else self._on_copy(module, *arguments)

    def __deepcopy__(self, memo: object) -> "RootHook":
        return self

    def __reduce__(self) -> tuple[object, tuple[()]]:
        return _inert, ()


def check_not_copied(_gradient: Tensor) -> None:
    """A gradient hook for the outputs of a copy that ran on private records."""
    raise NonPrivateStep(
        "a copy of a private module must not be trained on private batches, got a backward pass through one: its "
        "gradients are not clipped and have no noise. Train the module itself, or call the copy under torch.no_grad()."
    )


def _inert() -> Callable[..., None]:
    return _do_nothing


def _do_nothing(*_: object) -> None:
    return None


# ----------------------------------------------------------------------------------------------------------------------
# One model under one plan: which chunk a forward belongs to, and which step an optimizer may take.
# ----------------------------------------------------------------------------------------------------------------------


# By this attribute torch tells a GradScaler that an optimizer takes the scale into account in its own step().
_HANDLES_SCALE = "_step_supports_amp_scaling"


@dataclass(kw_only=True)
class _Call:
    """A running forward pass of the root module: for training, free (no gradients), or put aside.

    Put aside are evaluation, and predictions in training mode on anything but the current batch; `untrained` says why
    no backward pass may go through such a prediction.
    """

    kind: str
    args: tuple[object, ...]
    kwargs: Mapping[str, object]
    recording: object = None
    watch: ForwardMonitor | None = None
    untrained: str | None = None


class LoopHooks:
    """Turns the user's own forward, backward and step into private steps.

    Guarantee: `optimizer` only ever steps on gradients that `PrivateStep.finish` wrote for the logical batch at hand;
    everything else raises before a parameter changes.

    Args:
        module: the root module; its forward is called on the loader's batches.
        optimizer: the user's; decides which parameters are trained.
        run: order, numbers and noise of the steps; its key also gives the random numbers of the passes.
        mean_over_records: whether the user's loss is a mean over the records of a chunk, otherwise a sum.
        by_unit: whether chunks are `UnitMicrobatch`s.
        performance: how gradients and sums are taken.

    Raises:
        InvalidArgument: the optimizer can't be private, or holds parameters that are not the module's.
    """

    def __init__(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        run: PrivateRun,
        mean_over_records: bool,
        by_unit: bool = False,
        performance: PerformanceOptions | None = None,
    ) -> None:
        check_module_and_optimizer(module, optimizer)
        self.module, self.optimizer, self.run = module, optimizer, run
        self._by_unit, self._ranks = by_unit, run.ranks
        self._mean, self._performance = mean_over_records, performance or PerformanceOptions()
        self._following = LossTracer(module, self._run_check)
        leave_untraced(self)
        self._chunk: Microbatch | None = None
        # The part that was given last; and the same, until it is in the sum.
        self._handed: Microbatch | None = None
        self._given: Microbatch | None = None
        self._rows = 0
        self._texts: dict[int, object] = {}
        # Where forwards that take no part in the step ended, and why they don't.
        self._untrained_outputs: list[tuple[torch.autograd.graph.Node, str]] = []
        self._settings = OptimizerSettingsWatch(optimizer, self._following.carried)
        self._calls: list[_Call] = []
        self._claimed: list[nn.Parameter] = []
        self._started = self._backward = self._busy = False
        # The sums of the part at hand where a compiled pass gave them.
        self._sums: dict[nn.Parameter, Tensor] | None = None
        # In secret states while a batch is under way; and the user's states when its loop ended before its step.
        self._generators = BatchGenerators(run.rng, rank=self._ranks.rank)
        self._states_left: list[np.ndarray] | None = None
        self._has_trained = self._has_left_out = False
        self._capture_held()
        self._ranks.scatter()
        for parameter in module.parameters():
            parameter.grad = None
        # Has a GradScaler call step(), where it is refused.
        self._handles_scale = vars(optimizer).get(_HANDLES_SCALE)
        setattr(optimizer, _HANDLES_SCALE, True)
        self._step_handles = [
            optimizer.register_step_pre_hook(lambda _, args, kwargs: self._before_step(args, kwargs)),
            optimizer.register_step_pre_hook(_LastHook(self._after_hooks)),
            optimizer.register_step_post_hook(lambda *_: self._settings.stepped()),
        ]

    def set_probe(self, probe: LoopProbe) -> None:
        """Have model and loss checked independent before the first record is used."""
        self._following.probe = probe

    @property
    def _is_detached(self) -> bool:
        return self.run.state is RunState.ENDED

    @property
    def processes(self) -> int:
        """How many processes train together."""
        return self._ranks.world_size

    def detach(self) -> None:
        """Give module and optimizer back as they were; later steps are the user's own again."""
        self.run.end()
        self._generators.close()
        self._following.restore_attributes()
        self._release_held()
        for handle in self._step_handles:
            handle.remove()
        if self._handles_scale is None:
            vars(self.optimizer).pop(_HANDLES_SCALE, None)
        unregister_private_parameters(self._claimed)
        trace_again(self)

    # --- parameters ----------------------------------------------------------------------------------------------

    def _capture_held(self, *, after_step: int | None = None) -> None:
        """Capture the parameters that the optimizer holds now; step `after_step` and those before are over."""
        self._held = optimizer_parameters(self.optimizer)
        owned = self._ranks.owned_parameters(self.module.parameters())
        if not {id(parameter) for parameter in self._held} <= {id(parameter) for parameter in owned}:
            raise InvalidArgument(
                "optimizer must hold only parameters of the module, got one that is not. Build it from "
                "module.parameters()."
            )
        unregister_private_parameters(self._claimed)
        self._claimed = owned
        register_private_parameters(owned, self.optimizer)
        self.capture = self._performance.recorder(self.module, self._ranks.full_parameters(self._held), own_loop=True)
        self._following.passes = self.capture.backward if self._performance.clipping_mode == "two_pass" else None
        if isinstance(self.capture, OneByOne):
            # Only the loss of the batch at hand may reach the parameters: no layer tells its gradient from others.
            self._following.is_one_by_one = True
            self.capture.allows = lambda: self._busy or self._following.is_passing
        self.run.attach(
            self.capture,
            by_unit=self._by_unit,
            clipping_mode=self._performance.clipping_mode,
            after_step=after_step,
        )
        # Shards come and go in other memory; their module is left to the looks at its values.
        self._settings.watch(self.module if self._ranks.shards is None else None)
        before = RootHook(self._before_forward, self.module)
        after = RootHook(lambda _args, _kwargs, output: self._after_forward(output), self.module, self._after_copy)
        # Outside the capture's own hooks on the root: the recording starts before they look for it.
        first = self.module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        last = self.module.register_forward_hook(after, with_kwargs=True, always_call=True)
        self.capture.register_outer_hooks(first, last)
        self._handles = [first, last]

    def _release_held(self) -> None:
        self.run.abandon()
        self.capture.detach()
        for handle in self._handles:
            handle.remove()

    def _held_changed(self) -> bool:
        """Whether the optimizer holds, or the module owns, other parameters than before."""
        owned = self._ranks.owned_parameters(self.module.parameters())
        return not (_same(optimizer_parameters(self.optimizer), self._held) and _same(owned, self._claimed))

    # --- the loader ----------------------------------------------------------------------------------------------

    def parts_taken(self) -> int | None:
        """How many parts of the logical batch at hand are in its sum; None when its step was taken or there is none."""
        chunk = self._given
        return None if chunk is None or self._is_detached else self.run.step.taken(chunk.step)

    def leave_out(self) -> None:
        """The loop asks for the next batch without a step on the present one: it may look, but not train as well.

        Raises:
            NonPrivateStep: the module was called in training mode before.
        """
        if self._has_trained:
            raise left_out()
        self._has_left_out = True

    def set_microbatch(self, chunk: Microbatch, batch: object, rows: int) -> object:
        """Make `chunk` the current one, and return `batch` as the user gets it. An unfinished step is given up.

        Args:
            chunk: a part of a logical batch.
            batch: its records, or synthetic ones when it has none.
            rows: number of records in `batch`.
        """
        self.run.check_not_ended()
        self._generators.close()
        self.run.step.await_chunk(chunk)
        # Hooks between ours (filters of the private gradient) may change the gradient; this one comes last.
        _step_hooks(self.optimizer).move_to_end(self._step_handles[1].id)
        self._chunk = None
        self._settings.check_unchanged(begins=chunk.index == 0, rows=rows)
        if chunk.index == 0 and self._held_changed():
            self._release_held()
            self._capture_held(after_step=min(self.run.step.last_step, chunk.step - 1))
        if chunk.index == 0:
            self._ranks.gather()
        self._chunk = self._handed = self._given = chunk
        self._rows = rows
        self._started = self._backward = False
        self._sums = None
        self._texts = texts_in(batch)
        self._untrained_outputs = []
        batch = self._following.begin(batch, rows, self._on_backward)
        tag_batch(batch, (chunk.step, chunk.index))
        self._generators.open(chunk.step, chunk.index)
        self._following.mark_chance()
        self._states_left = None
        return batch

    def let_go(self, chunk: Microbatch) -> None:
        """The loop over batches asks for the next one or has ended: its random numbers are its own again."""
        if chunk is self._handed and self._generators.are_open:
            self._generators.close()
            self._states_left = random_states()

    def _check_generators(self, chunk: Microbatch) -> None:
        """See that the forward pass on `chunk` draws secret numbers, and that the loop drew no others for it."""
        if self._generators.are_open:
            check_not_seeded()
        elif not self._open_again(chunk):
            raise NonPrivateStep(
                "random numbers for a batch must be drawn while its loop runs, got some drawn after its end, which "
                "follow from a record's position in the batch. Write `batches = iter(loader)` and `next(batches)` "
                "instead of next(iter(loader)), or step inside the loop."
            )

    def _open_again(self, chunk: Microbatch) -> bool:
        """Go on with secret numbers for a batch whose loop has ended, if none were drawn since."""
        if self._states_left is None or not all(map(np.array_equal, self._states_left, random_states())):
            return False
        self._generators.open(chunk.step, chunk.index, again=True)
        self._following.mark_chance()
        return True

    def _untrained(self, call: _Call) -> str | None:
        """Why a forward in training mode is no part of a private step; None for one on the current batch."""
        chunk = self._chunk
        if chunk is None:
            return (
                "without a batch, or after the step on it. Take the next batch first. Public records take part in the "
                "loss of a private batch, as many as it has: module(engine.mark_public(records))."
            )
        here = (chunk.step, chunk.index)
        given = list(tensors_in((call.args, call.kwargs)))
        # A copy loses its tag, but what a traced tensor became is still on its trace.
        elsewhere = any(
            tensor.operation_trace is not self._following.trace for tensor in given if isinstance(tensor, TracedTensor)
        )
        if elsewhere or any(batch_tag(tensor) not in {None, here} for tensor in given):
            return (
                "on an earlier or later batch than the loader gave last. Let nothing fetch batches ahead of the loop; "
                "the DataLoader's own workers may."
            )
        if not self._comes_from_batch(given, call):
            if any(tensor.grad_fn is not None for tensor in given):
                return (
                    "on tensors that another trainable module made (a generator's output). Pass them on without their "
                    "graph, and declare them if no record has a part in them: module(engine.mark_public(x.detach())). "
                    "For the other module's own step call the private module in evaluation mode with "
                    "requires_grad_(False)."
                )
            return (
                "on tensors from elsewhere: records that the loader did not draw are not accounted for. Call the "
                "module on the loader's batch or on what torch functions made of it, move preprocessing to the dataset "
                "or collate_fn, and mark public or synthetic inputs with engine.mark_public(tensor)."
            )
        return None

    def _comes_from_batch(self, given: list[Tensor], call: _Call) -> bool:
        """Whether some input is known to be of this batch, or public. Further ones (noise, positions) are allowed."""
        known = any(isinstance(t, TracedTensor) or batch_tag(t) is not None or is_public(t) for t in given)
        return known or any(id(leaf) in self._texts for leaf in tree_leaves((call.args, dict(call.kwargs))))

    # --- forward and backward ------------------------------------------------------------------------------------

    def _before_forward(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> tuple[object, object] | None:
        self._following.restore_attributes()
        kind = "free" if self._busy or not torch.is_grad_enabled() else "train" if self.module.training else "aside"
        call = _Call(kind=kind, args=args, kwargs=kwargs)
        self._calls.append(call)
        chunk = self._chunk
        if kind == "train":
            call.untrained = self._untrained(call)
        if kind == "train" and call.untrained is None and chunk is not None:
            if self._sums is not None:
                raise _one_pass()
            if self._has_left_out:
                raise left_out()
            self._check_generators(chunk)
            self._start(chunk, call)
            call.watch = self._following.watch(args, kwargs)
        elif not self._busy:
            if torch.is_grad_enabled():
                call.kind, call.recording = "aside", self.capture.suspend()
            self._following.begin_untrained()
            if call.untrained is not None:
                call.watch = self._following.watch_untrained()
                if chunk is not None and not self._generators.are_open:
                    self._open_again(chunk)
        if any(isinstance(tensor, TracedTensor) for tensor in tensors_in((args, kwargs))):
            return map_tensors(without_trace, args), map_tensors(without_trace, kwargs)
        return None

    def _start(self, chunk: Microbatch, call: _Call) -> None:
        if not self._started:
            self._following.try_forward(call.args, call.kwargs)
        self._following.check_state()
        if self._started:
            return
        self._has_trained = True
        self.run.step.start(chunk, rows=self._rows, scale=float(self._rows) if self._mean else 1.0)
        self._started = True

    def _after_forward(self, output: object) -> object:
        call = self._calls.pop()
        if call.kind == "aside":
            self.capture.resume(call.recording)
        if call.watch is not None:
            self._end_watch(call.watch, failed=output is None)
        chunk = self._chunk
        if call.kind != "train" and not self._busy:
            self._following.mark_chance()
            return None if output is None else self._beside(call, output)
        if call.kind != "train" or output is None or chunk is None:
            return None
        output, tracked = self._following.outputs(call.args, call.kwargs, output, bool(chunk.num_records))
        for tensor in tracked:
            tensor.register_hook(self._note_backward)
        # An output without a tensor that we can see is trusted to be used: a step without backward is only noise.
        self._backward = self._backward or not tracked
        return output

    def _beside(self, call: _Call, output: object) -> object:
        """The output of a forward pass that is not trained."""
        if call.untrained is not None and any(parameter.requires_grad for parameter in self.module.parameters()):
            refuse = partial(self._refuse_untrained, call.untrained)
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(refuse)
                    if tensor.grad_fn is not None:
                        self._untrained_outputs.append((tensor.grad_fn, call.untrained))
        return self._following.trace_untrained_forward(call.args, call.kwargs, output, self.capture)

    def _refuse_untrained(self, why: str, _gradient: Tensor) -> None:
        """A gradient hook for the outputs of a training forward on anything but the current batch."""
        if self._is_detached or self._busy:
            return
        self._chunk = None
        raise _passes_through(why)

    def _end_watch(self, watch: ForwardMonitor, *, failed: bool) -> None:
        if failed:
            watch.close()
            return
        try:
            watch.end()
        except BaseException:
            self._chunk = None
            raise

    def _after_copy(self, module: nn.Module, args: object, kwargs: object, output: object) -> None:
        """A copy of the module may be called on anything, but must not learn from private batches."""
        private = any(isinstance(t, TracedTensor) or batch_tag(t) is not None for t in tensors_in((args, kwargs)))
        learns = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in module.parameters())
        if self._is_detached or self._busy or not private or not learns:
            return
        with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(check_not_copied)

    def _note_backward(self, _gradient: Tensor) -> None:
        try:
            check_not_seeded()
            self._following.check_gradient()
        except NonPrivateStep:
            self._chunk = None
            raise
        self._backward = True

    def owns(self, losses: Tensor) -> bool:
        """Whether `losses` were made of the batch at hand."""
        return isinstance(losses, TracedTensor) and losses.operation_trace is self._following.trace

    def backward(self, losses: Tensor, *, retain_graph: bool) -> None:
        """The backward pass of one loss per record, which is checked like the sum or mean that is taken here."""

        def run(again: bool) -> None:
            with not_noting():
                total = losses.mean() if self._mean else losses.sum()
                total.backward(retain_graph=again or retain_graph)

        if isinstance(losses, TracedTensor):
            losses.operation_trace.backward([losses], run, by_record=True)
        else:
            run(False)

    # --- compiled passes -----------------------------------------------------------------------------------------

    def compiled_step(self, loss: Callable[..., Tensor]) -> CompiledStep:
        """Graphs for passes of ``loss(module, *batch)``, one value per record, to be given to `compiled_pass`.

        Raises:
            InvalidArgument: something of the loop or its plan can't be compiled.
        """
        self.run.check_not_ended()
        refused = {
            'gradients="one-by-one"': not isinstance(self.capture, GradientCapture),
            f'clipping_mode="{self._performance.clipping_mode}"': self._performance.clipping_mode != "fast",
            "units": self._by_unit,
            "criterion": self._following.probe.criterion is not None,
            "several processes": self.processes > 1,
        }
        for name, applies in refused.items():
            if applies:
                raise InvalidArgument(
                    f"compiled_backward must be used without {name}, got both. Leave one of them out: "
                    "engine.backward(losses) works with each."
                )
        capture = cast("GradientCapture", self.capture)
        return CompiledStep(capture, self.run.plan, loss, self._following.carried.was_written)

    def compiled_pass(self, compiled: CompiledStep, batch: tuple[object, ...]) -> bool:
        """Take the sums of the batch at hand by graphs; whether they did it, or the ordinary way must.

        The ordinary way takes a batch without records, one with something unusual, and every batch for which graphs
        were recorded: the trace of its loss is then checked, in the state of the module that the graphs hold.

        Raises:
            NonPrivateStep: `batch` is not the batch at hand as the loader gave it, or was used already.
            UnsupportedModule: module or loss can't be compiled.
        """
        self.run.check_not_ended()
        chunk, trace, step = self._chunk, self._following.trace, self.run.step
        if chunk is None or trace is None:
            raise NonPrivateStep(
                "compiled_backward must get the batch that the loader gave last, got one without it, or after the step "
                "on it. Take the next batch first."
            )
        if self._started:
            raise _one_pass()
        if not trace.is_whole(batch):
            raise NonPrivateStep(
                "compiled_backward must get the batch as the loader gave it, all its tensors in their order and before "
                "anything else is computed from them, got another. Prepare the batch in the loss function, the dataset "
                "or collate_fn, and compute metrics after the call."
            )
        if self._has_left_out:
            raise left_out()
        self._check_generators(chunk)
        if not chunk.num_records or not isinstance(step.bounds, ClippedSumAccumulator):
            return False
        bounds, capture = step.bounds, cast("GradientCapture", self.capture)
        step.begin(chunk)
        compiled.use(capture)
        plain = cast("tuple[object, ...]", map_tensors(without_trace, batch))
        found: list[dict[nn.Parameter, Tensor] | None] = []
        with preserve_rng_state():
            self._run_check(lambda: found.append(attempt(lambda: compiled.sums(bounds, plain))))
        self._sums = found[0]
        if self._sums is None:
            return False
        self._has_trained = self._started = self._backward = True
        return True

    def _on_backward(self, trace: OperationTrace, loss: int) -> None:
        """Before a backward pass: check the loss on synthetic records if it is a new one."""
        try:
            self._following.check_before_backward(trace, loss)
        except NonPrivateStep as refusal:
            self._chunk = None
            # A part of the loss may come from a forward that takes no part: that is then what to tell.
            nodes = set() if trace.loss is None else graph_nodes(trace.loss)
            why = next((why for node, why in self._untrained_outputs if node in nodes), None)
            if why is None:
                raise
            raise _passes_through(why) from refusal
        except BaseException:
            self._chunk = None
            raise

    def _run_check(self, check: Callable[[], None]) -> None:
        """Run the probe through our own hooks without taking part; after a refusal the batch can't be used."""
        recording = self.capture.suspend()
        self._busy = True
        try:
            check()
        except BaseException:
            self._chunk = None
            raise
        finally:
            self._busy = False
            self.capture.resume(recording)

    # --- step ----------------------------------------------------------------------------------------------------

    def _before_step(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        if any(value is not None for value in (*args[1:], *kwargs.values())):
            raise NonPrivateStep(
                "optimizer.step must be called without a closure, got an argument. Call loss.backward() before it."
            )
        self._check_no_scaler()
        chunk = self._chunk
        if chunk is None or not self._started or not self._backward:
            raise NonPrivateStep(
                "optimizer.step must follow a forward and a backward pass on the current batch, got none. Take a batch "
                "from the private loader, call the module on it, and call loss.backward()."
            )
        self._chunk = None
        try:
            self._finish(chunk)
        except BaseException:
            self.run.abandon()
            raise
        finally:
            self._generators.close()

    def _check_no_scaler(self) -> None:
        """A gradient scaler sets these attributes of an optimizer that handles the scale, before it calls step()."""
        found = [name for name in ("grad_scale", "found_inf") if getattr(self.optimizer, name, None) is not None]
        for name in found:
            delattr(self.optimizer, name)
        if found:
            raise NonPrivateStep(
                "optimizer must not be stepped by a GradScaler: it skips steps when a record's gradient overflows, "
                "which tells about the record. Use torch.autocast with bfloat16, without a scaler."
            )

    def _after_hooks(self) -> None:
        """Other hooks ran since the private gradient was made: no setting changed, and nothing came from a batch."""
        if next(reversed(_step_hooks(self.optimizer))) != self._step_handles[1].id:
            raise NonPrivateStep(
                "hooks of the optimizer must not be registered between a batch and optimizer.step, got one that runs "
                "after the private gradient was made and may change it. Register it before the batch is taken."
            )
        self._settings.check_hooks([parameter.grad for parameter in self._held])

    def _finish(self, chunk: Microbatch) -> None:
        if self._sums is None:
            self._following.check_step()
        if self._held_changed():
            raise NonPrivateStep(
                "optimizer must hold the same parameters in forward and step, got a change in between. Add parameter "
                "groups between a step and the next batch."
            )
        self._settings.check()
        self._busy = True
        try:
            if self._sums is not None:
                self.run.step.add_sums(chunk, self._sums)
            elif isinstance(self.run.step.bounds, UnitAccumulator) and isinstance(chunk, UnitMicrobatch):
                self.run.step.add_sums(chunk, self.run.step.bounds.sums(chunk))
            else:
                self.run.step.add(chunk)
        finally:
            self._busy = False
        # Also those that the optimizer does not hold: a raw gradient must not stay where somebody could read it.
        for parameter in self.module.parameters():
            parameter.grad = None
        if chunk.is_last:
            # From here on its noise is drawn: the batch can't be given again.
            self._given = None
            self.run.release(self._held)
        self._following.end()


def _passes_through(why: str) -> NonPrivateStep:
    return NonPrivateStep(
        "backward pass must go through training forwards on the private loader's batch only, got one through a "
        f"forward {why} A prediction needs no backward pass; for gradients of inputs call module.eval() before the "
        "forward."
    )


def _one_pass() -> NonPrivateStep:
    return NonPrivateStep(
        "a batch must have one compiled_backward and no other training forward, got a second one. Call the module "
        "under torch.no_grad() for metrics, or use engine.backward(losses) where a batch takes several passes."
    )


class _LastHook:
    """Called before a step, after all other hooks; it changes no gradient."""

    only_looks = True

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def __call__(self, *_: object) -> None:
        """Called by torch."""
        self._call()


def _step_hooks(optimizer: Optimizer) -> "OrderedDict[int, object]":
    return vars(optimizer)["_optimizer_step_pre_hooks"]


def _same(one: list[nn.Parameter], other: list[nn.Parameter]) -> bool:
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))
