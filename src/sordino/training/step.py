"""One private step: clipped sums over the chunks, noise once, divide by a public number.

    g̃ = (Σ_chunks Σ_i min(1, C/‖g_i‖) g_i + N(0, (z·Δ)² I)) / expected_batch_size    (Abadi et al. 2016, algorithm 1)

The sum is held until its last chunk; what is abandoned before is thrown away, and its step number is not used again,
unless the very same batch is begun again before noise was drawn for it.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from sordino.errors import InvalidArgument, NonPrivateStep
from sordino.gradients import Contributions, Recorder
from sordino.gradients.backward_strategies import GroupwiseInBackward, NormsInBackward, TwoPassBackward
from sordino.randomness import KeyedRNG
from sordino.runs import ReleasedLoss
from sordino.sampling import Microbatch
from sordino.training.accumulators import ClippedSumAccumulator, accumulation_dtype
from sordino.training.exclusions import Option
from sordino.training.noisy_releases import NormRelease
from sordino.training.plan import ClippingMode, PerformanceOptions, Plan, StepPlan
from sordino.training.special_accumulators import make_accumulator

if TYPE_CHECKING:
    from sordino.training.sharded import ShardedModel


# ----------------------------------------------------------------------------------------------------------------------
# Clipped sums of a sharded model that are scattered while they are formed: no process keeps a whole one.
#
# A chunk's sums arrive layer by layer. As soon as those of one exchange are there, all processes add them up and each
# keeps its rows. The order of the exchanges is agreed on once, so processes never wait for different parameters: who
# has no records, or meets the layers in another order, gives zeros or waits with what comes later in it.
# ----------------------------------------------------------------------------------------------------------------------


class ReduceScatteredSums(dict[nn.Parameter, Tensor]):
    """Where a chunk's whole sums are put: they are taken out again by and by, and this process's rows are kept.

    Guarantee: releases nothing. After `end_chunk` in all processes, the rows of all together are the sums of every
    chunk so far, each entry once.

    Args:
        shards: of the model.
        parameters: whole ones, all that are trained.
    """

    def __init__(self, shards: "ShardedModel", parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self._shards, self._parameters = shards, list(parameters)
        self.rows: dict[nn.Parameter, Tensor] = {}
        self._arrived: list[nn.Parameter] = []
        self._left: list[list[nn.Parameter]] = []
        self._begin_chunk()

    def __setitem__(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Take one sum of the chunk, and exchange those that are next in order and complete."""
        super().__setitem__(parameter, value)
        self._arrived.append(parameter)
        while self._left and all(each in self for each in self._left[0]):
            self._exchange(self._left.pop(0))

    def end_chunk(self) -> None:
        """Exchange what is left of the chunk; every process calls it for every chunk."""
        if not self._left and not self._shards.has_order(self._parameters):
            self._shards.agree_on_order(self._parameters, self._arrived)
            self._begin_chunk()
        while self._left:
            self._exchange(self._left.pop(0))
        # A layer that was used again after its sum was exchanged has added to it.
        for bucket in self._shards.late(self._parameters, self):
            self._exchange(bucket)
        self._begin_chunk()

    def _begin_chunk(self) -> None:
        self._arrived = []
        known = self._shards.has_order(self._parameters)
        self._left = self._shards.in_order(self._parameters) if known else []

    def _exchange(self, bucket: list[nn.Parameter]) -> None:
        sums = {parameter: self._taken(parameter) for parameter in bucket}
        for parameter, rows in zip(bucket, self._shards.summed(bucket, sums), strict=True):
            held = self.rows.get(parameter)
            self.rows[parameter] = rows if held is None else held.add_(rows)

    def _taken(self, parameter: nn.Parameter) -> Tensor:
        value, dtype = self.pop(parameter, None), accumulation_dtype(parameter)
        return torch.zeros_like(parameter, dtype=dtype) if value is None else value.to(dtype)


# ----------------------------------------------------------------------------------------------------------------------
# One private step: clipped sums over the chunks, noise once, divide by a public number.
# ----------------------------------------------------------------------------------------------------------------------


class PrivateStep:
    """Gathers one logical batch and turns it into the private gradient.

    Guarantee: `finish` is one ``plan.step_event(step)`` on the dataset when the chunks given since `begin` are the
    whole logical batch drawn by ``plan.sampler`` for that step. Nothing else leaves this object.

    Args:
        capture: hooks on the model, or other contributions; decides which parameters are trained.
        plan: clipping, noise and divisor.
        rng: source of the noise.
        after_step: number of the last step that is over already; later ones must be larger.
        step_plan_fn: the values of a step where they are chosen on the way; the plan's by default.
        by_unit: whether rows are records of units, which are put together before they are clipped.
        norm: releases the norm of every sum besides, or None.
        clipping_mode: how sums are taken, see `PerformanceOptions`.
        all_reduce_: replaces tensors by their sums over all processes, each of which holds a part of the batch; None
            for one process.
        shards: of the model, where each process holds a part of the parameters.
        is_even: whether all processes give as many microbatches, so that sums may be exchanged after each.
    """

    def __init__(
        self,
        capture: Contributions,
        plan: Plan,
        rng: KeyedRNG,
        *,
        after_step: int = -1,
        step_plan_fn: Callable[[int], StepPlan] | None = None,
        by_unit: bool = False,
        norm: NormRelease | None = None,
        clipping_mode: ClippingMode = "fast",
        all_reduce_: Callable[[Sequence[Tensor]], None] | None = None,
        shards: "ShardedModel | None" = None,
        is_even: bool = False,
    ) -> None:
        options = PerformanceOptions(clipping_mode=clipping_mode).options()
        plan.check_options(options | ({Option.UNITS_IN_LOOP} if by_unit else set()))
        self._capture = capture
        # Asked once: the answer takes as long as an operation on a small tensor.
        self._recorded = capture if isinstance(capture, Recorder) else None
        self._at = plan.step_plan if step_plan_fn is None else step_plan_fn
        self._randomness = rng
        self._step: int | None = None
        self._now: StepPlan | None = None
        self._next_chunk = 0
        self._last_step = self._noised = after_step
        self._first_step = after_step + 1
        self._sums: dict[nn.Parameter, Tensor] = {}
        self._summed: list[nn.Parameter] = []
        self._stream = None if plan.mechanism is None else plan.mechanism.start()
        self._trained: list[str] | None = None
        self._buys_losses = plan.loss_release is not None
        self._seen = False
        self._points: list[ReleasedLoss] = []
        self.bounds = make_accumulator(capture, plan, rng, by_unit=by_unit)
        self._norm, self._memory = norm, clipping_mode
        # Parameters that a backward pass was found to use again.
        self._shared: set[nn.Parameter] = set()
        self._all_reduce_, self._shards, self._is_even = all_reduce_, shards, is_even
        self.released_norm: float | None = None

    @property
    def is_open(self) -> bool:
        """Whether a logical batch has been begun and neither finished nor abandoned."""
        return self._step is not None

    @property
    def last_step(self) -> int:
        """Number of the last logical batch begun, or `after_step`."""
        return self._last_step

    @property
    def loss_release(self) -> tuple[ReleasedLoss, ...]:
        """The losses that were released so far; none unless the plan releases them."""
        return tuple(self._points)

    @property
    def last_release(self) -> int:
        """Number of the last step whose noise was drawn, or `after_step`."""
        return self._noised

    @property
    def next_noise(self) -> int | None:
        """The step whose correlated noise comes next; None when the noises of steps are independent."""
        return None if self._stream is None else self._stream.next_step

    def expects(self, chunk: Microbatch) -> bool:
        """Whether `chunk` continues the open logical batch: every chunk before it is in the sum."""
        return self.is_open and chunk.step == self._step and chunk.index == self._next_chunk

    def await_chunk(self, chunk: Microbatch) -> None:
        """`chunk` was given out: an open sum that misses a chunk before it is thrown away, and so is what was recorded.

        A logical batch that was abandoned before its noise was drawn may so be begun once more.
        """
        if self.is_open and not self.expects(chunk):
            self.abandon()
        self._capture.discard()
        if chunk.step == self._last_step and chunk.step > self._noised and not self.is_open:
            self._last_step = chunk.step - 1

    def taken(self, step: int) -> int:
        """How many parts of logical batch `step` are in the open sum."""
        return self._next_chunk if self._step == step else 0

    def capturing(self, chunk: Microbatch, *, scale: float = 1.0) -> AbstractContextManager[object]:
        """Capture the forward and backward of one chunk; opens the logical batch with its first chunk.

        Args:
            chunk: the next chunk of the open logical batch, or the first of a new one.
            scale: what the per-record gradients must be multiplied by, 1 for a loss that is a sum over records.

        Raises:
            NonPrivateStep: the chunk is not the one that comes next. The open batch is abandoned.
        """
        self.begin(chunk)
        return self._recorder().capturing(chunk.num_records, scale=scale, backward_strategy=self._taking(chunk))

    def start(self, chunk: Microbatch, *, rows: int, scale: float = 1.0) -> None:
        """`capturing` without a block: forward and backward passes are captured until `add` or `abandon`.

        `rows` is the number of records in the batch that stands for the chunk: a chunk of no records may come as
        synthetic ones, which `add` leaves out.
        """
        self.begin(chunk)
        self._recorder().start(rows, scale=scale, backward_strategy=self._taking(chunk))

    def _recorder(self) -> Recorder:
        if self._recorded is None:
            self.abandon()
            raise NonPrivateStep("capture must record a model to be recorded, got another. Call `begin`, then `add`.")
        return self._recorded

    def _taking(self, chunk: Microbatch) -> NormsInBackward | GroupwiseInBackward | TwoPassBackward | None:
        """What measures or clips while backward passes run."""
        if not isinstance(self.bounds, ClippedSumAccumulator) or self._memory == "fast":
            return None
        if self._memory == "low_memory":
            return self.bounds.early()
        return (
            self.bounds.blocks() if self._memory == "groupwise" else self.bounds.passes(chunk.num_records, self._shared)
        )

    def backward(self, losses: Tensor) -> None:
        """The backward pass of the chunk being recorded, from one loss per record, in as many passes as it takes."""
        loss = losses.sum()
        self._recorder().backward(lambda again: loss.backward(retain_graph=again))

    def begin(self, chunk: Microbatch) -> None:
        """Open the logical batch with its first chunk, or check that `chunk` is the next one."""
        if chunk.index == 0 and not self.is_open:
            if chunk.step <= self._last_step:
                raise NonPrivateStep(f"step must be after step {self._last_step}, got {chunk.step}. Draw a new batch.")
            self._now = self._at(chunk.step)
            self.bounds.begin(self._now)
            self._step = self._last_step = chunk.step
            self._next_chunk = 0
            self._summed = self._capture.trainable()
            self._sums = self._new_sums()
            self._catch_up(chunk.step)
        if chunk.step != self._step or chunk.index != self._next_chunk:
            self.abandon()
            raise NonPrivateStep("chunk must be the next one of the open batch. Take batches from the loader in order.")

    def _catch_up(self, step: int) -> None:
        """Bring correlated noise past steps that were abandoned or left out; their numbers are used up."""
        if self._stream is None:
            return
        if self._stream.next_step < self._first_step:
            self.abandon()
            raise NonPrivateStep(
                f"correlated noise must go on from the state after step {self._first_step - 1}, got none: without it "
                "nothing of the earlier noise is taken back. Call load_state first."
            )
        trained = [self._capture.names[parameter] for parameter in self._summed]
        if self._trained is not None and self._trained != trained:
            self.abandon()
            raise NonPrivateStep(
                "trained parameters must stay the same in a run with correlated noise, got others: later noise takes "
                "back what was added to the same parameter. Unfreeze between runs only."
            )
        self._trained = trained
        while self._stream.next_step < step:
            self._stream.skip_step(self._totals(), rng=self._randomness, step=self._stream.next_step)

    def add_losses(self, losses: Tensor) -> None:
        """Take in the losses of the chunk being recorded, shape (records,), for the plan's loss curve."""
        if self._buys_losses and isinstance(self.bounds, ClippedSumAccumulator):
            self.bounds.add_losses(losses)
        self._seen = True

    def add(self, chunk: Microbatch) -> None:
        """Clip the recorded chunk's per-record gradients and add them to the sum, once.

        What was recorded for a chunk of no records is the gradient of synthetic ones: it is left out.
        """
        if chunk.step != self._step or chunk.index != self._next_chunk:
            raise NonPrivateStep("chunk must be the one just recorded. Call `capturing`, then `add`.")
        self._check_losses(chunk)
        self.bounds.add(self._sums, records=chunk.num_records)
        self._end_chunk()

    def add_sums(self, chunk: Microbatch, sums: Mapping[nn.Parameter, Tensor]) -> None:
        """Add a chunk whose clipped sums were computed elsewhere, by the bounds of this step."""
        if chunk.step != self._step or chunk.index != self._next_chunk:
            raise NonPrivateStep("chunk must be the one just opened. Call `begin`, then `add_sums`.")
        self._check_losses(chunk)
        for parameter, value in sums.items():
            present = self._sums.get(parameter)
            self._sums[parameter] = value if present is None else present.add_(value)
        self._end_chunk()

    def _end_chunk(self) -> None:
        if isinstance(self._sums, ReduceScatteredSums):
            self._sums.end_chunk()
        self._capture.discard()
        self._next_chunk += 1

    def _new_sums(self) -> dict[nn.Parameter, Tensor]:
        """Whole sums of the logical batch; where memory is spared, rows of them from each chunk on."""
        if self._shards is None or self._memory == "fast" or not self._is_even:
            return {}
        return ReduceScatteredSums(self._shards, self._summed)

    def _check_losses(self, chunk: Microbatch) -> None:
        if self._buys_losses and chunk.num_records and not self._seen:
            self.abandon()
            raise NonPrivateStep(
                "losses must be given for every chunk under a plan with a loss curve, got none. Call `add_losses` "
                "before `add`, or train with sordino.fit."
            )
        self._seen = False

    def finish(self) -> None:
        """Add the noise, divide, and write the result to every trained parameter's ``.grad``.

        Raises:
            NonPrivateStep: no batch is open, or the set of trained parameters changed since it was opened.
        """
        if self._step is None:
            raise NonPrivateStep("a batch must be open to finish it. Run forward and backward on a batch first.")
        if list(map(id, self._summed)) != list(map(id, self._capture.trainable())):
            self.abandon()
            raise NonPrivateStep(
                "trained parameters must stay the same within a batch. Freeze or unfreeze between steps."
            )
        mechanism, extra = self.bounds.mechanism()
        noise = mechanism if self._stream is None else self._stream
        now, totals = self._now, self._totals() if self._shards is None else []
        assert now is not None
        self._noised = self._step
        if self._all_reduce_ is not None:
            self._all_reduce_([*totals, *extra, *self.bounds.partial_sums()])
        if self._shards is not None:
            totals, noise = self._rows(self._shards), self._shards.noise(mechanism, self._summed, extra)
        if self._norm is None:
            noise.add_noise_([*totals, *extra], rng=self._randomness, step=self._step)
        else:
            noise, norm = self._norm.joint_scale(noise, totals)
            noise.add_noise_([*totals, *extra, norm], rng=self._randomness, step=self._step)
            self.released_norm = self._norm.released_norm(norm, expected_batch_size=now.expected_batch_size)
        self.bounds.update_clip_norms(extra)
        self._keep_loss(now)
        if totals:
            torch._foreach_div_(totals, now.expected_batch_size)  # pyright: ignore[reportPrivateUsage]
        if self._shards is not None:
            for parameter, total in zip(self._summed, totals, strict=True):
                self._shards.set_gradient(parameter, total)
        else:
            for parameter, gradient in zip(self._summed, _in_dtypes_of(self._summed, totals), strict=True):
                parameter.grad = gradient
        self._close()

    def _keep_loss(self, now: StepPlan) -> None:
        """Note the loss that was just released, with the noise that lies on it."""
        if now.loss_release is None or self._step is None or not isinstance(self.bounds, ClippedSumAccumulator):
            return
        assert self.bounds.released_loss is not None
        spread = now.loss_release.stddev(
            noise_multiplier=now.noise_multiplier, expected_batch_size=now.expected_batch_size
        )
        self._points.append(ReleasedLoss(step=self._step, loss=self.bounds.released_loss, stddev=spread))

    def abandon(self) -> None:
        """Throw the open batch away. Its step stays charged and its number is not used again."""
        self._capture.discard()
        self._close()

    def state_dict(self) -> dict[str, object]:
        """What later steps need of earlier ones, for a checkpoint: adapted bounds and the buffers of correlated noise.

        The buffers are secret: with the released gradients they give the clipped sums away.
        """
        stream = None
        if self._stream is not None:
            stream = {
                "buffers": self._stream.state_tensors(),
                "position": self._stream.state_json(),
                "trained": self._trained,
            }
        # As a tensor, so that the size of a checkpoint says how many there are and nothing else.
        points = [[point.step, point.loss, point.stddev] for point in self._points]
        losses = torch.tensor(points, dtype=torch.float64) if points else None
        return {"bounds": self.bounds.state_dict(), "noise": stream, "losses": losses}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go on from `state`, before the first step.

        Raises:
            PrivacyError: the noise of a step was given already, or the buffers belong to another plan's noise.
        """
        self.bounds.load_state_dict(cast("Mapping[str, object]", state["bounds"]))
        losses = cast("Tensor | None", state["losses"])
        points = [] if losses is None else losses.tolist()
        self._points = [ReleasedLoss(step=int(step), loss=loss, stddev=spread) for step, loss, spread in points]
        noise = state["noise"]
        if (noise is None) != (self._stream is None):
            raise InvalidArgument("state_dict must be one of this plan, with its noise. Was the file exchanged?")
        if self._stream is not None:
            body = cast("Mapping[str, object]", noise)
            self._stream.load_state_dict(cast("Mapping[str, Tensor]", body["buffers"]), str(body["position"]))
            self._trained = cast("list[str] | None", body["trained"])

    def _close(self) -> None:
        self._step, self._seen = None, False
        self._sums, self._summed = {}, []
        if self._shards is not None:
            self._shards.scatter()

    def _rows(self, shards: "ShardedModel") -> list[Tensor]:
        """This process's rows of every parameter's sum over all processes."""
        if isinstance(self._sums, ReduceScatteredSums):
            return [self._sums.rows[parameter] for parameter in self._summed]
        self._totals()
        return shards.summed(self._summed, self._sums)

    def _totals(self) -> list[Tensor]:
        """The sum of every trained parameter, zero where no chunk used it."""
        totals: list[Tensor] = []
        for p in self._summed:
            total = self._sums.get(p)
            if total is None or total.dtype != accumulation_dtype(p):
                total = (
                    torch.zeros_like(p, dtype=accumulation_dtype(p))
                    if total is None
                    else total.to(accumulation_dtype(p))
                )
                self._sums[p] = total
            totals.append(total)
        return totals


def _in_dtypes_of(parameters: Sequence[nn.Parameter], totals: Sequence[Tensor]) -> Sequence[Tensor]:
    """The totals, each in the type of its parameter, by one operation for all."""
    if all(total.dtype is parameter.dtype for parameter, total in zip(parameters, totals, strict=True)):
        return totals
    cast = [torch.empty_like(total, dtype=p.dtype) for p, total in zip(parameters, totals, strict=True)]
    torch._foreach_copy_(cast, list(totals))  # pyright: ignore[reportPrivateUsage]
    return cast
