"""`fit`: a private model from a model, a loss, data and a plan, in one call.

One batch, one way: the plan's sampler draws a logical batch → it is charged to the transcript → its records are read,
chunk by chunk → `PrivateStep` clips, sums, adds noise once and divides by a public number → the optimizer steps.
"""

import logging
import signal
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from sordino.definitions import FIXED_SEED_CAVEAT, Guarantee, PrivacyUnit
from sordino.errors import (
    CoupledRecords,
    InvalidArgument,
    LossShapeError,
    PrivacyError,
    SordinoError,
    UnsupportedModule,
)
from sordino.events import Event
from sordino.gradients import GradientCapture
from sordino.ledger import Account, Reservation
from sordino.randomness import KeyedRNG
from sordino.runs import ReleasedLoss, RunFolder
from sordino.sampling import Microbatch
from sordino.training.accumulators import ClippedSumAccumulator, LossAccumulator
from sordino.training.adaptive_budget import AdaptiveBudget, AdaptiveBudgetRun
from sordino.training.averaging import Averaging, WeightAverage
from sordino.training.charging import PlannedCharges
from sordino.training.compiled_step import CompiledStep
from sordino.training.distributed import DistributedContext, get_distributed_context, parameter_shapes, unwrap_ddp
from sordino.training.exclusions import Option
from sordino.training.generators import BatchGenerators, owned_generators, private_generators
from sordino.training.loader import max_batch_size
from sordino.training.loss_tracing.carried import compares_values
from sordino.training.loss_tracing.loss_tracer import ForwardMonitor, is_recheck_due, module_state_key
from sordino.training.optimizer_checks import (
    OptimizerFactory,
    optimizer_for,
    register_private_parameters,
    schedule_for,
    unregister_private_parameters,
)
from sordino.training.plan import PerformanceOptions, Plan
from sordino.training.private_run import ChargedBatch, PrivateRun
from sordino.training.probing.one_by_one import check_records, is_not_captured
from sordino.training.probing.padding import check_padding
from sordino.training.probing.probe_runner import ProbeOptions, ProbeTask, attempt
from sordino.training.pytree import map_tensors
from sordino.training.record_source import (
    RecordSource,
    UnitAssignment,
    UnitSource,
    check_no_repeated_units,
    make_record_source,
    per_unit_loss,
)
from sordino.training.run_writer import (
    DIAGNOSTICS_CAVEAT,
    Diagnostics,
    ProgressBar,
    RunWriter,
    TrainingState,
    get_diagnostics,
    open_run_writer,
    require_unused_key,
)

# ----------------------------------------------------------------------------------------------------------------------
# Ctrl-C between updates, never inside one.
# ----------------------------------------------------------------------------------------------------------------------


@contextmanager
def defer_keyboard_interrupt() -> Iterator[None]:
    """Ctrl-C waits for the end of the block, so that an update is whole or has not begun."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    waiting: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: waiting.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if waiting:
        handler(*waiting[0])


# ----------------------------------------------------------------------------------------------------------------------
# What `fit` is given to call, and what it returns.
# ----------------------------------------------------------------------------------------------------------------------


class LossFunction(Protocol):
    """``loss(model, *batch)``: one loss per record, shape (records,)."""

    def __call__(self, model: nn.Module, /, *batch: Tensor) -> Tensor:
        """The losses of the records of one batch, in order."""
        ...


class Transcript(Protocol):
    """Where a run is charged. An exception raised here stops the run before the step touches a record."""

    def append(self, *, step: int, event: Event, epsilon: float) -> None:
        """Charge step `step`, which does `event`; the run has then spent at most `epsilon`."""
        ...


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """The result of a run.

    Args:
        model: the user's own module, trained in place; with averaging its weights are the averages.
        plan: what was run.
        guarantee: what the steps that were charged guarantee; under a budget that adapts, the budget.
        steps: steps that were finished, those before a resume among them.
        charged_steps: steps that were charged; at most one more than `steps`, not counting repeated ones.
        interrupted: whether Ctrl-C ended the run early; the model is then that of the last finished step.
        seconds: wall-clock time of the run.
        budget_exhausted: whether a budget that adapts refused a step and so ended the run.
        released_losses: the noisy mean loss of every finished step, when the plan releases it; otherwise None.
        gradients: "captured" or "one-by-one", as they were taken; see `PerformanceOptions`.
    """

    model: nn.Module
    plan: Plan
    guarantee: Guarantee
    steps: int
    charged_steps: int
    interrupted: bool
    seconds: float
    budget_exhausted: bool = False
    released_losses: tuple[ReleasedLoss, ...] | None = None
    gradients: str = "captured"


# ----------------------------------------------------------------------------------------------------------------------
# What a loss must be: one value per record that depends on a trained parameter.
# ----------------------------------------------------------------------------------------------------------------------


def per_record_losses(losses: object, *, records: int) -> Tensor:
    """`losses` of `records` records, shape (records,); no message shows either number.

    Raises:
        LossShapeError: it is not one value per record.
        InvalidArgument: no trained parameter takes part.
    """
    if not isinstance(losses, Tensor) or losses.dim() != 1:
        got = f"{losses.dim()} dimensions" if isinstance(losses, Tensor) else type(losses).__name__
        raise LossShapeError(
            f"loss must be a tensor of shape (records,), one value per record, got {got}. "
            'Use reduction="none" and average over everything but the records.'
        )
    if len(losses) != records:
        raise LossShapeError(
            "loss must have one value per record, got another number of values. "
            "Average over everything but the first dimension."
        )
    if not losses.requires_grad:
        raise InvalidArgument("loss must depend on a trained parameter, got one that doesn't. Unfreeze something.")
    return losses


# ----------------------------------------------------------------------------------------------------------------------
# `fit`: a private model from a model, a loss, data and a plan, in one call.
# ----------------------------------------------------------------------------------------------------------------------


# Repetitions of the probe after so many chunks take a large batch, earlier ones a small one.
_SMALL_AGAIN = 16
ONE_RECORD_PER_UNIT_CAVEAT = "every record is taken to be all that its {} gave"


_LOG = logging.getLogger("sordino")
_NOT_ALONE = "One record at a time it is refused as well:"
_ONE_BY_ONE = 'training takes one record at a time (gradients="one-by-one"), which is exact and may be slower: %s'


def fit(
    model: nn.Module,
    loss_fn: LossFunction | Callable[..., Tensor],
    data: Sequence[Tensor] | Dataset[object],
    plan: Plan,
    *,
    optimizer: Optimizer | OptimizerFactory | None = None,
    scheduler: LRScheduler | Callable[[Optimizer], LRScheduler] | None = None,
    collate_fn: Callable[[list[object]], object] | None = None,
    performance: PerformanceOptions | None = None,
    rng: KeyedRNG | None = None,
    averaging: Averaging | None = None,
    run_folder: RunFolder | str | Path | None = None,
    checkpoint_every: int | None = None,
    resume_from: str | Path | None = None,
    ledger: Account | Reservation | None = None,
    transcript: Transcript | None = None,
    on_step: Callable[[int], None] | None = None,
    progress: bool = True,
    diagnostics: str | None = None,
    budget: AdaptiveBudget | None = None,
    units: UnitAssignment | None = None,
    public_batch: Sequence[object] | None = None,
) -> FitResult:
    """Train `model` under `plan`, and say what the result guarantees.

    The model is trained in the mode it is in (call ``model.train()`` first after an evaluation) and comes back as the
    same object, without hooks. All that changes the guarantee is in `plan`; `performance` only changes speed.

    Guarantee: the weights after every step, everything passed to `on_step`, the transcript and the result together
    are (ε, δ)-differentially private as ``FitResult.guarantee`` states, provided that model, loss, optimizer and
    schedule were chosen without looking at `data`. Ctrl-C stops between two updates; what was charged stays charged.
    The clock is outside the guarantee: how long a step takes depends on how many records it drew.

    Args:
        model: any module whose layers treat records alone; its leading dimension is the record.
        loss_fn: ``loss(model, *batch)`` returns one value per record, shape (records,).
        data: equally long tensors with the records first, a ``TensorDataset``, or a map-style dataset.
        plan: sampler, clipping, noise, number of steps, δ.
        optimizer: an optimizer over the model's parameters, or a function that makes one from a list of them. The
            default is plain SGD with learning rate 1 / max_grad_norm: the clipped mean gradient has norm at most
            max_grad_norm, so before noise a step moves the parameters by about 1 at most.
        scheduler: a torch learning-rate scheduler of `optimizer`, or a function that makes one; stepped once a step.
        collate_fn: for a map-style dataset: a list of records → batch; torch's default when None.
        performance: chunk size and device; None takes batches whole, on the device where the model is.
        rng: fresh for every run; None draws a new key from the operating system.
        averaging: `TailWeightAverage` or `ExponentialWeightAverage` of the weights: costs no privacy.
        run_folder: a new folder for plan, transcript, checkpoints, model and guarantee; or a `RunFolder` that is open.
        checkpoint_every: steps between checkpoints, ≥ 1; None makes one only when Ctrl-C ends the run.
        resume_from: the folder of a run that was cut off, with the same plan, kind of model and optimizer. It goes on
            from its last checkpoint with fresh noise; steps after it are taken again, and both times are charged.
        ledger: the dataset's account: the whole plan is reserved on it at the start, drawn in blocks ahead of the
            steps, and what was not drawn is given back at the end.
        transcript: charged before the records of a step are read, together with or instead of a run.
        on_step: called after every finished step with the number of steps done.
        progress: show step, ε so far and time left. Neither losses nor norms are shown.
        diagnostics: "private" also shows each step's mean loss and batch size, on this terminal only. They are not
            covered by the guarantee, which then says so.
        budget: chooses each step's noise from what was released, within its ε; the plan's steps are then the most that
            are taken. A resumed run goes on with what the transcript leaves of it.
        units: which user each record belongs to: a user's records are drawn, clipped and protected together.
        public_batch: at least five public or invented records, as `loss_fn` gets them after the model. Model and loss
            are tried on them before the first step, instead of on synthetic records of random features and labels 0 and
            1.

    Raises:
        BudgetExceeded: the plan does not fit what is left of the ledger's account; no record was read.
        InvalidArgument: an argument is unusable, or `rng` has been used by another run.
        LossShapeError: the loss is not one value per record.
        PrivacyError: the model or the loss can't be made private as they are; the message says why.

    Example:
        >>> features, labels = torch.ones(100, 3), torch.zeros(100).long()
        >>> plan = Plan(noise_multiplier=5.0, max_grad_norm=1.0, sample_rate=1.0, steps=3, expected_batch_size=100.0,
        ...             delta=1e-5)
        >>> def loss(model, x, y):
        ...     return nn.functional.cross_entropy(model(x), y, reduction="none")
        >>> result = fit(nn.Linear(3, 2), loss, (features, labels), plan, progress=False)
        >>> result.steps, round(result.guarantee.epsilon, 3)
        (3, 1.326)

    References:
        Abadi et al. 2016, algorithm 1.
    """
    adaptive = None if budget is None else AdaptiveBudgetRun(budget, plan)
    performance = PerformanceOptions() if performance is None else performance
    model = unwrap_ddp(model)
    options = performance.options() | (set() if adaptive is None else {Option.BUDGET})
    ranks = get_distributed_context().bind(model, plan, options)
    if performance.device is None:
        performance = replace(performance, device=_device_of(model))
    rng = ranks.with_shared_key(require_unused_key(KeyedRNG() if rng is None else rng))
    source = make_record_source(data, collate_fn, may_pad=units is None)
    if units is None:
        check_no_repeated_units(data)
    else:
        units.check(plan)
        source, loss_fn = UnitSource(source, units), per_unit_loss(loss_fn)
    plan.check_dataset_size(len(source))
    watched = get_diagnostics(diagnostics)
    model.to(performance.device)
    ranks.require_same(
        plan=plan.to_json(),
        records=len(source),
        model=parameter_shapes(model),
        budget=None if adaptive is None else adaptive.facts(),
    )
    ranks.broadcast_module(model)
    stepper = optimizer_for(model, optimizer, plan)
    schedule = schedule_for(stepper, scheduler)
    writer = open_run_writer(
        plan,
        run_folder=run_folder,
        resume_from=resume_from,
        every=checkpoint_every,
        diagnostics=diagnostics,
        adaptive=adaptive,
        ranks=ranks,
    )
    try:
        loop = _FitLoop(
            parts=TrainingState(
                model=model,
                optimizer=stepper,
                schedule=schedule,
                average=None if averaging is None else WeightAverage(averaging, model, steps=plan.steps),
            ),
            loss=loss_fn,
            source=source,
            plan=plan,
            performance=performance,
            rng=rng,
            writer=writer,
            transcript=transcript if ranks.is_rank_zero else None,
            diagnostics=watched,
            adaptive=adaptive,
            ranks=ranks,
            public_batch=public_batch,
        )
        with ranks.rank_zero_context(loop.charges.reserve, ledger), performance.keeping():
            loop.train(on_step, progress=progress and ranks.is_rank_zero)
        result = loop.result()
        if writer is not None:
            complete = result.steps == plan.steps or result.budget_exhausted
            losses = result.released_losses or ()
            writer.finish(model, result.guarantee, complete=complete, losses=losses)
    except BaseException:
        if writer is not None:
            writer.abort()
        raise
    return result


class _FitLoop:
    """One call of `fit`: a run, and the model, loss and data that drive it."""

    def __init__(
        self,
        *,
        parts: TrainingState,
        loss: Callable[..., Tensor],
        source: RecordSource,
        plan: Plan,
        performance: PerformanceOptions,
        rng: KeyedRNG,
        writer: RunWriter | None,
        transcript: Transcript | None,
        diagnostics: Diagnostics | None,
        adaptive: AdaptiveBudgetRun | None,
        ranks: DistributedContext,
        public_batch: Sequence[object] | None,
    ) -> None:
        self._started = time.monotonic()
        self._parts, self._model, self._optimizer = parts, parts.model, parts.optimizer
        self._loss, self._source, self._plan, self._performance = loss, source, plan, performance
        self._writer, self._transcript, self._diagnostics, self._ranks = writer, transcript, diagnostics, ranks
        self._device = torch.device(performance.device or _device_of(parts.model))
        ranks.rank_zero_last(lambda: None if writer is None else writer.start(parts, rng))
        first, repeats = (0, False) if writer is None else (writer.first_step, writer.repeats)
        self.charges = PlannedCharges(
            plan,
            adaptive=adaptive,
            first_step=first,
            repeats=repeats,
            receipt=None if writer is None else writer.receipt,
            run="" if writer is None else writer.folder.path.name,
        )
        self._run = PrivateRun(
            plan,
            rng=rng,
            charges=self.charges,
            record=self._write,
            log=None if writer is None else writer.earlier.copy(),
            adaptive=adaptive,
            ranks=ranks,
            first_step=first,
            repeats=repeats,
        )
        self._done, self._interrupted, self._num_chunks = first, False, 0
        self._probed: dict[Hashable, int] = {}
        self._public_batch = public_batch
        # Why one record at a time is used without being requested.
        self._refusal: PrivacyError | None = None
        self._generators, self._owned = BatchGenerators(rng, rank=ranks.rank), owned_generators(source)
        self._compiled: CompiledStep | None = None
        self._losses_released: tuple[ReleasedLoss, ...] = ()

    def train(self, on_step: Callable[[int], None] | None, *, progress: bool) -> None:
        """All steps of the plan that are left, or those before Ctrl-C."""
        shown = progress or self._diagnostics is not None
        held = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        claimed = list(self._model.parameters())
        self._managed = self._ranks.full_parameters(held)
        try:
            self._attach()
        except UnsupportedModule as refusal:
            if not self._may_go_one_by_one():
                raise
            self._go_one_by_one(refusal)
        register_private_parameters(claimed, self._optimizer)
        if self._performance.compile and self._diagnostics is None:
            self._compiled = CompiledStep(cast("GradientCapture", self._recorder), self._plan, self._loss)
        try:
            self._optimizer.zero_grad(set_to_none=True)
            self._probe(self._source.structure())
            with ProgressBar(
                steps=self._plan.steps, delta=self._plan.delta, visible=progress, diagnostics=self._diagnostics
            ) as bar:
                for batch in self._run.batches(dataset_size=len(self._source)):
                    self._accumulate(batch)
                    self._update()
                    bar.show(steps=self._done, epsilon=self._run.epsilon() if shown else 0.0)
                    if self._writer is not None:
                        self._writer.after_step(self._parts, self._run, self._done)
                    if on_step is not None:
                        on_step(self._done)
        except KeyboardInterrupt:
            # Of a sharded model no rank can save a checkpoint alone: the last one is where to go on from.
            if self._ranks.shards is not None:
                raise
            self._interrupted = True
            if self._writer is not None:
                self._writer.save(self._parts, self._run, self._done)
        finally:
            self._run.abandon()
            self._losses_released = self._run.released_losses
            self._recorder.detach()
            unregister_private_parameters(claimed)
            # What lies in .grad after an abandoned step has no noise on it.
            self._optimizer.zero_grad(set_to_none=True)
            if self._parts.average is not None:
                self._parts.average.load()

    def _write(self, batch: ChargedBatch) -> None:
        """Write a charged batch to the run folder and the transcript, before its records are read."""
        if self._writer is not None:
            self._writer.charge(batch, epsilon=self._run.epsilon())
        if self._transcript is not None:
            self._transcript.append(step=batch.step, event=batch.event, epsilon=self._run.epsilon())

    def _attach(self) -> None:
        """Hook the model and have the run take its gradients, by the performance that is wanted now."""
        self._recorder = self._performance.recorder(self._model, self._managed)
        self._run.attach(self._recorder, clipping_mode=self._performance.clipping_mode, is_even=True)
        if self._writer is not None and self._writer.run_state is not None:
            self._run.load_state_dict(self._writer.run_state)

    def _may_go_one_by_one(self) -> bool:
        """Whether a refusal to capture may still be answered by one record at a time: before the first step."""
        return self._performance.may_change and self._done == self._run.first_step and self._ranks.shards is None

    def _go_one_by_one(self, refusal: PrivacyError) -> None:
        """Take one record at a time, because of `refusal`; `_probe` sees to it that this changes nothing but speed."""
        self._refusal = refusal
        self._performance = replace(self._performance, gradients="one-by-one")
        self._attach()

    def _accumulate(self, batch: ChargedBatch) -> None:
        """Add the clipped gradients of a batch's records to the open sum, microbatch by microbatch."""
        assert batch.indices is not None
        indices, source = batch.indices, self._source
        present = source.present(indices) if isinstance(source, UnitSource) else indices
        self._ranks.gather()
        size, evenly = self._performance.chunk_size, self._performance.clipping_mode != "fast"
        recorder = self._recorder
        for chunk in self._ranks.local_microbatches(present, step=batch.step, microbatch_size=size, evenly=evenly):
            with private_generators(self._generators.stream(batch.step, chunk.index), self._owned):
                self._add(chunk)
            if recorder is not self._recorder:
                self._accumulate(batch)
                return

    def _add(self, chunk: Microbatch) -> None:
        """Add a chunk to the sum, unless its probe chooses another recorder: then the batch is split again."""
        recorder, step = self._recorder, self._run.step
        batch = None
        if chunk.num_records:
            found, batch = self._source.read(chunk.indices, device=self._device)
            chunk, batch = replace(chunk, indices=found), batch if len(found) else None
        if batch is not None:
            self._probe(batch, chunk.num_records)
        if recorder is not self._recorder:
            return
        if isinstance(step.bounds, LossAccumulator) and batch is not None:
            projected = step.bounds
            step.begin(chunk)
            sums = attempt(lambda: projected.sums(self._loss, batch, records=chunk.num_records))
            if sums is None:
                raise _hidden_failure(f"with {type(self._plan.clipping).__name__}")
            step.add_sums(chunk, sums)
            return
        if (
            self._compiled is not None
            and batch is not None
            and self._num_chunks
            and isinstance(step.bounds, ClippedSumAccumulator)
        ):
            step.begin(chunk)
            compiled, bounds = self._compiled, step.bounds
            sums = attempt(lambda: compiled.sums(bounds, batch))
            if sums is not None:
                self._num_chunks += 1
                step.add_sums(chunk, sums)
                return
            if compiled.is_new:
                # Before graphs run, the loss that they were made from is looked at once more.
                self._probe(batch, chunk.num_records, is_due=True)
            if recorder is not self._recorder:
                return
        if self._record_together(chunk, batch):
            step.add(chunk)
        else:
            step.add_sums(chunk, self._record_apart(chunk, cast("tuple[object, ...]", batch)))

    def _record_together(self, chunk: Microbatch, batch: tuple[object, ...] | None) -> bool:
        """Forward and backward of a chunk; whether model and loss ran."""
        step = self._run.step
        try:
            with step.capturing(chunk):
                # Not every model takes a batch without records; it adds nothing to the sum.
                if batch is not None:
                    losses = self._losses(chunk, batch)
                    if self._diagnostics is not None:
                        self._diagnostics.add(losses)
                    step.add_losses(losses)
                    step.backward(losses)
        except SordinoError:
            raise
        except Exception:
            return False
        return True

    def _record_apart(self, chunk: Microbatch, batch: tuple[object, ...]) -> dict[nn.Parameter, Tensor]:
        """The clipped sum of a chunk on which model or loss raised, from one record at a time.

        A record for which they raise alone counts as zero, as one without a finite gradient does. The message may
        quote it, and that there is one tells of it: neither goes further.
        """
        self._refuse_failure()
        sums: dict[nn.Parameter, Tensor] = {}
        chunks = self._num_chunks
        for position in range(chunk.num_records):
            one = replace(chunk, indices=chunk.indices[position : position + 1])
            rows = map_tensors(
                lambda tensor, position=position: (
                    tensor[position : position + 1] if tensor.dim() and tensor.size(0) == chunk.num_records else tensor
                ),
                batch,
            )
            try:
                with self._recorder.capturing(1):
                    self._losses(one, cast("tuple[object, ...]", rows)).sum().backward()
            except SordinoError:
                raise
            except Exception:
                self._recorder.discard()
                continue
            self._run.step.bounds.add(sums, records=1)
            self._recorder.discard()
        self._num_chunks = chunks
        return sums

    def _refuse_failure(self) -> None:
        """Where records can't be taken one by one, a failure ends the run, with a message that says nothing of it."""
        if self._plan.loss_release is not None or self._performance.clipping_mode in {"groupwise", "two_pass"}:
            raise _hidden_failure("with a loss curve, or with clipping_mode='groupwise' or 'two_pass'")

    def _losses(self, chunk: Microbatch, batch: tuple[object, ...]) -> Tensor:
        watch = ForwardMonitor(self._model, values=compares_values(self._num_chunks))
        self._num_chunks += 1
        try:
            losses = self._loss(self._model, *batch)
        except BaseException:
            watch.close()
            raise
        watch.end()
        return per_record_losses(losses, records=chunk.num_records)

    def _update(self) -> None:
        """Noise, division, the optimizer's step; whole, or not begun when Ctrl-C comes."""
        with defer_keyboard_interrupt():
            self._run.release(self._model.parameters())
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
            if self._parts.schedule is not None:
                self._parts.schedule.step()
            if self._parts.average is not None:
                self._parts.average.update(self._done)
            self._done += 1

    def _probe(self, batch: tuple[object, ...] | None, records: int = 0, *, is_due: bool = False) -> None:
        """On synthetic records, in every new state of the model (modes, attributes), and at times: losses may change.

        Once more where a batch has more records than were tried.
        """
        marks = module_state_key(self._model)
        known = self._probed.get(marks)
        again = known is not None and known >= records
        padding = self._source.padding
        is_new_length = padding is not None and bool(padding.untried)
        is_due = is_due or is_recheck_due(self._num_chunks)
        if batch is None or (again and not is_due and not is_new_length):
            return
        # A larger batch is rare, and rarer if there is room above it.
        most = max_batch_size(self._plan, self._performance.chunk_size, processes=self._ranks.world_size)
        most = most if records <= most else 2 * records
        self._probed[marks] = max(known or 0, most)
        made_up = map_tensors(lambda tensor: tensor.to(self._device), batch)
        size = self._performance.chunk_size
        options = ProbeOptions(
            public_batch=self._public_batch,
            values_released=self._plan.loss_release is not None,
            is_split=self._ranks.world_size > 1 or (size is not None and 1 < size < len(self._source)),
            num_records=most,
            two_passes=self._performance.clipping_mode == "two_pass",
            again=again,
            is_thorough=self._num_chunks > _SMALL_AGAIN,
        )
        task = ProbeTask(
            model=self._model, recorder=self._recorder, records=made_up, run=self._loss_of, options=options
        )
        try:
            check_records(task, as_in_a_batch=self._refusal is not None, advises=not self._may_go_one_by_one())
        except PrivacyError as refusal:
            if isinstance(refusal, CoupledRecords):
                raise  # the cause of both refusals
            if self._refusal is not None:
                raise type(self._refusal)(f"{self._refusal.args[0]} {_NOT_ALONE} {refusal.args[0]}") from refusal
            if not is_not_captured(refusal) or not self._may_go_one_by_one():
                raise
            self._recorder.detach()
            self._go_one_by_one(refusal)
            self._probed.clear()
            self._probe(batch, records)
            _LOG.warning(_ONE_BY_ONE, refusal.args[0])
        # Meanwhile the recorder may be another one.
        check_padding(padding, replace(task, recorder=self._recorder))

    def _loss_of(self, batch: object) -> Tensor:
        return self._loss(self._model, *cast("tuple[object, ...]", batch))

    def result(self) -> FitResult:
        """What was reached, and what it guarantees."""
        run, writer = self._run, self._writer
        seeded = run.rng.reproducible if writer is None else writer.seeded
        caveats = (FIXED_SEED_CAVEAT,) if seeded else ()
        diagnosed = self._diagnostics is not None or (writer is not None and writer.is_diagnosed)
        caveats += (DIAGNOSTICS_CAVEAT,) if diagnosed else ()
        if self._plan.privacy_unit is not PrivacyUnit.RECORD and not isinstance(self._source, UnitSource):
            caveats += (ONE_RECORD_PER_UNIT_CAVEAT.format(self._plan.privacy_unit.value),)
        guarantee = run.guarantee(caveats=caveats)
        return FitResult(
            model=self._model,
            plan=self._plan,
            guarantee=guarantee if writer is None else writer.guarantee(guarantee),
            steps=self._done,
            charged_steps=run.next_step,
            interrupted=self._interrupted,
            seconds=time.monotonic() - self._started,
            budget_exhausted=run.adaptive is not None and run.adaptive.is_spent,
            released_losses=None if self._plan.loss_release is None else self._losses_released,
            gradients="one-by-one" if self._performance.is_one_by_one else "captured",
        )


def _hidden_failure(where: str) -> PrivacyError:
    return PrivacyError(
        f"model and loss must run on every record {where}, got a failure, whose message is not shown as it may quote a "
        "record. Let the loss of an invalid record be NaN, which counts as zero."
    )


def _device_of(model: nn.Module) -> str:
    return next((str(parameter.device) for parameter in model.parameters()), "cpu")
