"""`PrivateRun`: order, step numbers, charges and noise of one private training, whichever caller drives it.

    IDLE ── begin_batch ──→ CHARGED ── first microbatch in the sum ──→ GATHERING ── release ──→ IDLE
      ↑                        └─────────── abandon ──────────────────────┘
      └── the batch's number is used up: what was charged stays charged

`fit` draws batches itself and pushes them through a loss. The engine's hooks turn the forward, backward and step of a
custom training loop into the same transitions. The federated server's rounds are batches and its updates are
per-record contributions. A run knows neither models nor data.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import cast

import numpy as np
from torch import nn

from sordino.definitions import Guarantee
from sordino.errors import InvalidArgument, NonPrivateStep
from sordino.events import Event, NoOp
from sordino.gradients import Contributions
from sordino.randomness import KeyedRNG
from sordino.runs import ReleasedLoss
from sordino.schedules import Schedule
from sordino.training.adaptive_budget import AdaptiveBudgetRun
from sordino.training.charging import ChargeLog, RunningEpsilon, StepCharges
from sordino.training.distributed import DistributedContext
from sordino.training.plan import ClippingMode, Plan, StepPlan
from sordino.training.step import PrivateStep


class RunState(Enum):
    """Where a run is between two batches, or within one."""

    IDLE = "idle"
    CHARGED = "charged"
    GATHERING = "gathering"
    ENDED = "ended"


@dataclass(frozen=True, kw_only=True, eq=False)
class ChargedBatch:
    """One logical batch, charged before any of its records is read.

    Args:
        step: its number; never used twice in a run.
        event: what was charged for it; `NoOp` where an earlier step's charge holds it too.
        receipt: digest of the ledger's line that holds the step; None without a ledger.
        indices: sorted int64 indices of its records, shape (b,), where the run draws batches itself; otherwise None.
    """

    step: int
    event: Event
    receipt: str | None
    indices: np.ndarray | None = None


class PrivateRun:
    """The order, the step numbers, the charges and the noise of one private training.

    Guarantee: every batch that `begin_batch` or `batches` gives out is in `charges` (ledger, target, budget), in
    `record` and in `log` before it is given out, and its number is never given out again. `release` is one
    ``plan.step_event(step)`` on the dataset when the microbatches given to `step` are the whole batch.

    Args:
        plan: every setting that affects the guarantee.
        rng: random key of the draws and the noise.
        charges: charges each step to ledger, target and budget.
        record: writes a charged batch down, before its records are read; None writes nothing.
        log: gets every charged event; the charges of an engine's other models may be in it.
        adaptive: chooses each step's noise under a budget, or None.
        ranks: processes that train together; rank zero charges first.
        first_step: number of the first batch.
        repeats: whether steps from `first_step` on were carried out before, by a run that was cut off.
        max_steps: number of the last batch plus 1; None has no end, except that of correlated noise.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        rng: KeyedRNG,
        charges: StepCharges,
        record: Callable[[ChargedBatch], None] | None = None,
        log: ChargeLog | None = None,
        adaptive: AdaptiveBudgetRun | None = None,
        ranks: DistributedContext | None = None,
        first_step: int = 0,
        repeats: bool = False,
        max_steps: int | None = None,
    ) -> None:
        self.plan, self.rng, self.charges, self.adaptive = plan, rng, charges, adaptive
        self.ranks = DistributedContext() if ranks is None else ranks
        self.log = ChargeLog() if log is None else log
        self._record = record
        self._max_steps = plan.steps if plan.mechanism is not None else max_steps
        self.first_step = self.next_step = first_step
        self.repeats = repeats
        self._earlier = self.log.copy()
        self._running_epsilon: RunningEpsilon | None = None
        self._new_step: Callable[[int], PrivateStep] | None = None
        self._step: PrivateStep | None = None
        self._has_ended = False

    # --- states --------------------------------------------------------------------------------------------------

    @property
    def state(self) -> RunState:
        """Where the run is."""
        if self._has_ended:
            return RunState.ENDED
        if self._step is not None and self._step.is_open:
            return RunState.GATHERING
        released = self.first_step - 1 if self._step is None else self._step.last_release
        return RunState.CHARGED if released < self.next_step - 1 else RunState.IDLE

    @property
    def num_left(self) -> int | None:
        """How many steps the noise or the plan has left; None when there is no end to them."""
        return None if self._max_steps is None else max(0, self._max_steps - self.next_step)

    @property
    def draws_by_number(self) -> bool:
        """Whether a batch must be the one of its number: its rate, noise or participation is that of its step."""
        return self.adaptive is not None or self.num_left is not None or isinstance(self.plan.sample_rate, Schedule)

    @property
    def has_charged(self) -> bool:
        """Whether a batch was charged since the run began or was resumed."""
        return self.next_step > self.first_step

    def end(self) -> None:
        """Give out no more batches; the open one is abandoned."""
        self.abandon()
        self._has_ended = True

    def check_not_ended(self) -> None:
        """Refuse to go on with a run whose steps would not be private.

        Raises:
            NonPrivateStep: after `end`.
        """
        if self._has_ended:
            raise NonPrivateStep(
                "loader must belong to an engine that is attached, got one after detach(): steps on its batches would "
                "not be private. Call make_private again, or train on your own DataLoader if you want no privacy."
            )

    # --- IDLE → CHARGED ------------------------------------------------------------------------------------------

    def begin_batch(
        self, *, begins_epoch: bool = False, draw: Callable[[], np.ndarray] | None = None
    ) -> ChargedBatch | None:
        """Charge the next logical batch. A batch that is still open is abandoned: it stays charged.

        Args:
            begins_epoch: whether a pass over the data begins with it; matters where epochs are charged.
            draw: draws its indices, once the budget has admitted it and before it is charged: reads no record.

        Returns:
            The batch; None when the budget refuses it, and nothing is charged.

        Raises:
            NonPrivateStep: the run has ended, or the plan has no more steps.
            BudgetExceeded: the batch does not fit; nothing is charged and its number stays free.
        """
        self.check_not_ended()
        if self.num_left == 0:
            raise NonPrivateStep(
                f"loader must be read for at most {self._max_steps} batches, the steps of the plan, got one more. Stop "
                "here, or plan more steps."
            )
        self.abandon()
        number, ranks = self.next_step, self.ranks
        if self.adaptive is not None:
            ranks.rank_zero_first(self.charges.prepare)
            if not self.adaptive.admit(number, broadcast=ranks.broadcast_from_rank_zero):
                return None
        indices = None if draw is None else draw()
        return ranks.rank_zero_first(partial(self._charge, number, begins_epoch, indices))

    def _charge(self, number: int, begins_epoch: bool, indices: np.ndarray | None) -> ChargedBatch:
        if self.adaptive is None:
            self.charges.prepare()
        charge = self.charges.charge(number, begins_epoch=begins_epoch)
        batch = ChargedBatch(step=number, event=charge.event, receipt=charge.receipt, indices=indices)
        # Before it is recorded: Ctrl-C in between must not leave a recorded step out of the guarantee.
        self.next_step = number + 1
        try:
            if self._record is not None:
                self._record(batch)
        except Exception:
            self.next_step = number
            raise
        if not isinstance(charge.event, NoOp):
            self.log.add(charge.event, planned=charge.is_planned)
        return batch

    def batches(self, *, dataset_size: int) -> Iterator[ChargedBatch]:
        """The plan's batches from `next_step` on, each drawn and charged when it is asked for.

        Args:
            dataset_size: privacy units that can be drawn, ≥ 0.

        Raises:
            NonPrivateStep: another loop took batches meanwhile.
            InvalidArgument: batches of fixed size are planned for another number of units.
        """
        self.plan.check_dataset_size(dataset_size)
        first, steps = self.next_step, self.plan.steps - self.next_step
        draws = self.plan.sampler.batches(dataset_size=dataset_size, first_step=first, steps=steps, rng=self.rng)
        for number in range(first, self.plan.steps):
            if number != self.next_step:
                raise NonPrivateStep(
                    "batches must be read by one loop at a time, got a second one that went on meanwhile. Finish one "
                    "loop first."
                )
            if self.adaptive is None:
                batch = self.begin_batch(draw=lambda: next(draws))
            else:
                draw = partial(self.adaptive.draw, dataset_size=dataset_size, step=number, rng=self.rng)
                batch = self.begin_batch(draw=draw)
            if batch is None:
                return
            yield batch

    # --- CHARGED → GATHERING → IDLE ------------------------------------------------------------------------------

    def attach(
        self,
        capture: Contributions,
        *,
        by_unit: bool = False,
        clipping_mode: ClippingMode = "fast",
        is_even: bool = False,
        after_step: int | None = None,
    ) -> None:
        """Take per-record contributions from `capture` from here on; what is in the open sum is thrown away.

        Args:
            capture: hooks on the model, or other contributions; decides which parameters are trained.
            by_unit: whether rows are records of units, which are put together before they are clipped.
            clipping_mode: how sums are taken, see `PerformanceOptions`.
            is_even: whether all processes give as many microbatches.
            after_step: number of the last step that is over; by default the last one whose noise was drawn.
        """
        released = self.first_step - 1 if self._step is None else self._step.last_release
        chosen = {} if self.adaptive is None else {"step_plan_fn": self.adaptive.step_plan, "norm": self.adaptive.norm}
        self._new_step = lambda after: PrivateStep(
            capture,
            self.plan,
            self.rng,
            after_step=after,
            by_unit=by_unit,
            clipping_mode=clipping_mode,
            all_reduce_=None if self.ranks.world_size == 1 else self.ranks.all_reduce_,
            shards=self.ranks.shards,
            is_even=is_even,
            **chosen,
        )
        self._step = self._new_step(released if after_step is None else after_step)

    @property
    def step(self) -> PrivateStep:
        """Gathers the microbatches of the batch that was charged last."""
        assert self._step is not None, "attach comes first"
        return self._step

    def release(self, parameters: Iterable[nn.Parameter]) -> None:
        """Add the noise once, divide by the public number, and write the private gradient to every ``.grad``.

        Args:
            parameters: whose private gradient a budget's choice may look at: the trained ones.

        Raises:
            NonPrivateStep: no batch is being gathered.
        """
        self.step.finish()
        if self.adaptive is not None:
            self.adaptive.observe_gradient(parameters, self.step.released_norm)

    def abandon(self) -> None:
        """Throw the open sum away. Its batch stays charged and its number is not used again."""
        if self._step is not None:
            self._step.abandon()

    @property
    def released_losses(self) -> tuple[ReleasedLoss, ...]:
        """The losses that were released so far; none unless the plan releases them."""
        return () if self._step is None else self._step.loss_release

    @property
    def coming_step(self) -> StepPlan:
        """The values of the coming step."""
        return self.plan.step_plan(self.step.last_step + 1)

    # --- what holds ----------------------------------------------------------------------------------------------

    def epsilon(self) -> float:
        """An upper bound of ε at the plan's δ of all that was charged, cheap to ask after every step.

        Of a run whose end is known. Under a budget it is the budget.
        """
        if self.adaptive is not None:
            return self.adaptive.epsilon
        if self._running_epsilon is None:
            self._running_epsilon = RunningEpsilon(
                self.plan, first=self.first_step, earlier=self._earlier, repeats=self.repeats
            )
        return self._running_epsilon.after(self.next_step)

    def guarantee(self, *, caveats: tuple[str, ...] = ()) -> Guarantee:
        """What the steps charged since step 0 guarantee, each counted once; under a budget, the budget."""
        if self.adaptive is not None:
            return self.adaptive.guarantee(self.plan.guarantee(steps=0, caveats=caveats))
        return self.plan.guarantee(steps=self.next_step, caveats=caveats)

    # --- checkpoints ---------------------------------------------------------------------------------------------

    def facts(self) -> dict[str, object]:
        """The next step and the budget, in plain JSON types."""
        stream = self.step.next_noise
        return {
            "next_step": self.next_step if stream is None else stream,
            "budget": None if self.adaptive is None else self.adaptive.facts(),
        }

    def state_dict(self) -> dict[str, object]:
        """What later steps need of earlier ones: adapted clipping norms, buffers of correlated noise, the last norm.

        The buffers are secret: with the released gradients they give the clipped sums away.
        """
        return {
            "step": self.step.state_dict(),
            "adaptive": None if self.adaptive is None else self.adaptive.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go on from `state_dict` of another run of the plan."""
        self.step.load_state_dict(cast("Mapping[str, object]", state["step"]))
        if self.adaptive is not None:
            self.adaptive.load_state_dict(cast("Mapping[str, object]", state["adaptive"]))

    def check_facts(self, facts: Mapping[str, object]) -> None:
        """Refuse a checkpoint that this run can't go on from.

        Raises:
            InvalidArgument: the budget is not that of the checkpoint.
            NonPrivateStep: noise that later steps take back was drawn here already.
        """
        if self.plan.mechanism is not None and self.step.last_step >= 0:
            raise NonPrivateStep(
                "checkpoint must be loaded before the first step with correlated noise, got an engine that took some: "
                "its noise would come twice. Make a new engine."
            )
        own = self.facts()["budget"]
        if facts["budget"] != own:
            raise InvalidArgument(
                f"budget must be that of the checkpoint, {facts['budget']}, got {own}. Call make_private with it."
            )

    def resume(self, step: int, state: Mapping[str, object] | None = None, *, repeats: bool = False) -> None:
        """Number the next batch `step`, or later: no number comes twice.

        Args:
            step: where a checkpoint stopped.
            state: what `state_dict` said there; None keeps what this run has.
            repeats: whether steps from there on were carried out before; matters under correlated noise only.
        """
        state = self.state_dict() if state is None else state
        self.abandon()
        assert self._new_step is not None
        self._step = self._new_step(max(self.step.last_step, step - 1))
        self.load_state_dict(state)
        charged = self.has_charged
        self.next_step = max(self.next_step, step)
        self.repeats = repeats
        self.charges.resume(self.next_step, repeats=repeats)
        if not charged:
            self.first_step = self.next_step
