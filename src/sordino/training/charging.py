"""Charges: what was charged so far, and how the steps to come are charged before their records are read.

A run whose end is known reserves its whole plan first (`PlannedCharges`); a loop whose end is not known is charged in
blocks that end with the epoch (`OpenCharges`). Both are driven by `PrivateRun`.
"""

import math
from abc import ABC, abstractmethod
from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from sordino import accounting, checks
from sordino.definitions import NeighboringRelation, PrivacyUnit, format_upper_bound
from sordino.errors import BudgetExceeded, InvalidArgument
from sordino.events import Event, NoOp, SelfComposed, compose, from_dict, to_dict
from sordino.ledger import Account, Reservation
from sordino.training.adaptive_budget import AdaptiveBudgetRun
from sordino.training.plan import Plan


class ChargeLog:
    """The events of all logical batches drawn so far. It only grows.

    Example:
        >>> from sordino.events import Gaussian
        >>> charges = ChargeLog()
        >>> charges.add(Gaussian(noise_multiplier=1.0), 3)
        >>> charges.event()
        SelfComposed(event=Gaussian(noise_multiplier=1.0), count=3)
    """

    def __init__(self) -> None:
        self._history: list[tuple[Event, int]] = []
        self.unplanned = 0

    def add(self, event: Event, times: int = 1, *, planned: bool = False) -> None:
        """Charge `event`, `times` times. `unplanned` counts those that no target was calibrated for."""
        self.unplanned += 0 if planned else times
        if self._history and self._history[-1][0] == event:
            self._history[-1] = (event, self._history[-1][1] + times)
        else:
            self._history.append((event, times))

    def event(self) -> Event:
        """Everything charged so far, as one event."""
        return compose([SelfComposed(event=event, count=times) for event, times in self._history])

    @property
    def count(self) -> int:
        """How many events were charged."""
        return sum(times for _, times in self._history)

    def runs(self) -> tuple[tuple[Event, int], ...]:
        """The charges in order: each event, and how often it came in a row."""
        return tuple(self._history)

    def copy(self) -> "ChargeLog":
        """The same charges, to go on from."""
        other = ChargeLog()
        other._history, other.unplanned = list(self._history), self.unplanned
        return other

    def state_dict(self) -> dict[str, object]:
        """The charges as plain JSON types."""
        return {"schema": 1, "history": [[to_dict(event), times] for event, times in self._history]}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Add what `state_dict` saved to what was charged here."""
        history = state.get("history")
        if state.get("schema") != 1 or not isinstance(history, list):
            raise InvalidArgument("state must be what state_dict returned, got something else. Check the checkpoint.")
        for event, times in [(from_dict(event), checks.integer(0, times=times)) for event, times in history]:
            self.add(event, times)


# ----------------------------------------------------------------------------------------------------------------------
# ε so far, cheaply and never too low.
# ----------------------------------------------------------------------------------------------------------------------


def step_charge(plan: Plan, step: int, *, first: int = 0, repeats: bool = False) -> Event:
    """The event that is charged before `step` in a segment that starts at step `first`.

    Under shuffled epochs and balls in bins the first step of an epoch is charged for all of it, and so is the first
    step of a segment: it deals what is left of its epoch again. Under correlated noise a run's charges hold for all its
    segments, unless steps from `first` on were carried out before (`repeats`): then the segment's first step is charged
    for all that comes again.
    """
    if plan.mechanism is not None:
        if not (repeats and plan.is_private):
            return plan.step_event(step)
        return plan.mechanism.branch_event(first) if step == first else NoOp()
    charges = plan.sampler.num_charges
    return plan.step_event(step) if step == first or charges(step + 1) > charges(step) else NoOp()


class RunningEpsilon:
    """An upper bound of ε after any number of steps, from at most `points` accountings of the whole run.

    ε grows with the steps, so ε at the next grid point bounds ε at every step before it. The last grid point is the
    end of the run: there the value is the plan's own, together with what earlier segments spent.

    Args:
        plan: what is run.
        points: most grid points, ≥ 1.
        first: the step with which this segment starts.
        earlier: what was charged in earlier segments, in order.
        repeats: whether steps from `first` on were carried out before.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        points: int = 100,
        first: int = 0,
        earlier: ChargeLog | None = None,
        repeats: bool = False,
    ) -> None:
        self._plan, self._repeats = plan, repeats
        self._stride = max(1, math.ceil((plan.steps - first) / points))
        self._first = self._reached = first
        self._epsilon = 0.0
        self._charges = ChargeLog() if earlier is None else earlier.copy()
        whole = self._charges.copy()
        for event in self._events(first, plan.steps):
            whole.add(event)
        self._total = self._after(whole)

    def after(self, steps: int) -> float:
        """At least the ε of the steps before `steps`, from `first` up to the plan's, and of earlier segments."""
        if steps > self._reached:
            reached = self._first + self._stride * math.ceil((steps - self._first) / self._stride)
            reached = min(self._plan.steps, reached)
            for event in self._events(self._reached, reached):
                self._charges.add(event)
            self._reached = reached
            # Separate accountings differ within their own error bounds: what bounds the whole run bounds every part.
            self._epsilon = max(self._epsilon, min(self._total, self._after(self._charges)))
        return self._epsilon

    def _events(self, start: int, end: int) -> Iterator[Event]:
        charged = (
            step_charge(self._plan, step, first=self._first, repeats=self._repeats) for step in range(start, end)
        )
        return (event for event in charged if not isinstance(event, NoOp))

    def _after(self, charges: ChargeLog) -> float:
        return accounting.epsilon(
            charges.event(), self._plan.delta, neighboring_relation=self._plan.neighboring_relation
        ).upper


# ----------------------------------------------------------------------------------------------------------------------
# Charging a ledger, in blocks ahead of the steps.
# ----------------------------------------------------------------------------------------------------------------------


# Charges in a run that goes as planned: each waits for the disk, and a crash wastes at most one of them.
_NUM_CHARGES = 32


class BlockCharger:
    """Charges steps in blocks ahead, so that ten thousand steps are a few tens of lines in the ledger.

    Guarantee: when `charge` returns, the step is charged. What was charged and is not used stays charged, so that after
    a crash the ledger holds at least what was spent.

    Args:
        account: the dataset's account or a reservation on it; None charges nothing.
        event_at: the event of a step, by its number.
        note: what for.
        neighboring_relation: for which the events hold.
        privacy_unit: for which the events hold.
        run: name of the run.

    Example:
        >>> from sordino.events import Gaussian
        >>> free = BlockCharger(None, lambda step: Gaussian(noise_multiplier=1.0), note="a run",
        ...     neighboring_relation=NeighboringRelation.ADD_OR_REMOVE_ONE, privacy_unit=PrivacyUnit.RECORD)
        >>> free.charge(0, coming=100) is None
        True
    """

    def __init__(
        self,
        account: Account | Reservation | None,
        event_at: Callable[[int], Event],
        *,
        note: str,
        neighboring_relation: NeighboringRelation,
        privacy_unit: PrivacyUnit,
        run: str = "",
    ) -> None:
        self._account, self._event_at = account, event_at
        self._note, self._relation, self._unit, self._run = note, neighboring_relation, privacy_unit, run
        self._begin = self._end = 0
        self._size = 0
        self._receipt: str | None = None

    def charge(self, step: int, *, coming: int) -> str | None:
        """Charge step `step`, before its records are read.

        Args:
            step: numbers grow from call to call.
            coming: steps that are planned from here on, this one included; no more than these are charged ahead.

        Returns:
            The digest of the ledger's line that holds the step; None without a ledger.

        Raises:
            BudgetExceeded: not even this one step fits.
        """
        if self._account is None or self._begin <= step < self._end:
            return self._receipt
        self._size = self._size or math.ceil(coming / _NUM_CHARGES)
        size = max(1, min(self._size, coming))
        while True:
            event = compose([self._event_at(number) for number in range(step, step + size)])
            if isinstance(event, NoOp):
                # Steps of a cycle, or of a run, that was charged as a whole.
                self._begin, self._end = step, step + size
                return self._receipt
            try:
                charge = self._account.charge(
                    event, note=self._note, run=self._run, neighboring_relation=self._relation, privacy_unit=self._unit
                )
            except BudgetExceeded:
                if size == 1:
                    raise
                # The steps that still fit are not lost.
                size //= 2
                continue
            self._begin, self._end, self._receipt = step, step + size, charge.digest
            return self._receipt


# ----------------------------------------------------------------------------------------------------------------------
# A target ε that an engine's charges must stay within.
# ----------------------------------------------------------------------------------------------------------------------


# Less than this part of a target is the rounding of an earlier calibration: it would buy noise without a signal.
_LEAST_LEFT = 1e-3


@dataclass(frozen=True, kw_only=True)
class EpsilonTarget:
    """(ε, δ) that everything charged to an engine, by any caller, must stay within.

    Args:
        epsilon: > 0.
        delta: in (0, 1).
        neighboring_relation: the neighboring relation.
        accountant: a name, or ``auto``.
    """

    epsilon: float
    delta: float
    neighboring_relation: NeighboringRelation
    accountant: str

    def spent(self, event: Event) -> float:
        """ε of an event at the target's δ."""
        return accounting.epsilon(
            event, self.delta, neighboring_relation=self.neighboring_relation, accountant=self.accountant
        ).upper

    def check_left(self, charges: Event) -> None:
        """Refuse a plan for which nothing is left.

        Raises:
            BudgetExceeded: the charges alone reach the target, or nearly.
        """
        spent = self.spent(charges)
        if spent >= self.epsilon * (1 - _LEAST_LEFT):
            raise BudgetExceeded(
                f"target_epsilon must be more than what this engine has spent or set aside, "
                f"{format_upper_bound(spent)} at "
                f"δ = {self.delta:g}, got {self.epsilon:g}. Raise it, or use a new PrivacyEngine for other records."
            )

    def fitting(self, charges: ChargeLog, coming: Sequence[Event]) -> int:
        """How many of the `coming` events may be charged on top, in this order."""
        before = charges.event()

        def fits(count: int) -> bool:
            return self.spent(compose([before, *coming[:count]])) <= self.epsilon

        if fits(len(coming)):
            return len(coming)
        return bisect(range(1, len(coming)), False, key=lambda count: not fits(count))

    def refusal(self) -> BudgetExceeded:
        """What is raised instead of a batch that does not fit."""
        return BudgetExceeded(
            f"target_epsilon must cover every batch, got {self.epsilon:g} at δ = {self.delta:g} and one batch more "
            "than fits: the epochs it was made for are over. Stop training here; or go on after detach() and "
            "make_private_with_epsilon with a larger target_epsilon. From the start, more epochs= give more noise a "
            "step, and exceed_target=True no end, where get_epsilon tells what was spent."
        )


# ----------------------------------------------------------------------------------------------------------------------
# How the steps of a run are charged.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StepCharge:
    """What was charged for one step.

    Args:
        event: `NoOp` where an earlier step's charge holds this one too.
        receipt: digest of the ledger's line that holds the step; None without a ledger.
        is_planned: whether a target was calibrated for the step.
    """

    event: Event
    receipt: str | None
    is_planned: bool = False


class StepCharges(ABC):
    """Charges the steps of a run, one by one and in order, before their records are read.

    Args:
        plan: of the steps.
        adaptive: chooses each step's noise under a budget, or None.
    """

    def __init__(self, plan: Plan, adaptive: AdaptiveBudgetRun | None) -> None:
        self._plan, self._adaptive = plan, adaptive
        self._first, self._repeats = 0, False

    def prepare(self) -> None:  # noqa: B027 (most need nothing)
        """What comes before the next step is charged, or a budget is asked for it."""

    def resume(self, step: int, *, repeats: bool) -> None:
        """Go on from step `step`; `repeats` says that steps from there on were carried out before."""
        self._first, self._repeats = step, repeats

    @abstractmethod
    def charge(self, number: int, *, begins_epoch: bool) -> StepCharge:
        """Charge step `number`.

        Raises:
            BudgetExceeded: it does not fit; nothing is charged.
        """


class PlannedCharges(StepCharges):
    """Charges a run whose end is known: the steps that are left are reserved before the first one.

    Guarantee: no step is charged to the ledger beyond the reservation, which fitted as a whole. Under a budget that
    adapts, the whole budget is charged at once and steps only name that charge.

    Args:
        plan: of the run.
        adaptive: chooses each step's noise under a budget, or None.
        first_step: the step with which this segment starts.
        repeats: whether steps from there on were carried out before.
        receipt: digest of the ledger's charge that an earlier segment made for the whole budget, or None.
        run: name of the run folder.

    Example:
        >>> plan = Plan(noise_multiplier=1.0, max_grad_norm=1.0, sample_rate=0.1, steps=5, expected_batch_size=64.0,
        ...             delta=1e-5)
        >>> charges = PlannedCharges(plan)
        >>> with charges.reserve(None):
        ...     charges.charge(0, begins_epoch=False).event == plan.step_event(0)
        True
    """

    def __init__(
        self,
        plan: Plan,
        *,
        adaptive: AdaptiveBudgetRun | None = None,
        first_step: int = 0,
        repeats: bool = False,
        receipt: str | None = None,
        run: str = "",
    ) -> None:
        super().__init__(plan, adaptive)
        self.resume(first_step, repeats=repeats)
        self._receipt, self._run = receipt, run
        self._blocks: BlockCharger | None = None

    @contextmanager
    def reserve(self, ledger: Account | Reservation | None) -> Iterator[None]:
        """Reserve the steps that are left; what was not charged is given back at the end of the block.

        Raises:
            BudgetExceeded: the whole does not fit; nothing is reserved.
        """
        plan = self._plan
        if ledger is None:
            # The receipt of an earlier segment is that of a ledger which this one does not charge.
            self._receipt = None
            yield
        elif self._adaptive is not None:
            self._receipt = self._adaptive.charge_whole(ledger, run=self._run, receipt=self._receipt)
            yield
        else:
            declared = {"neighboring_relation": plan.neighboring_relation, "privacy_unit": plan.privacy_unit}
            whole = compose([self._event_at(step) for step in range(self._first, plan.steps)])
            with ledger.reserve(whole, note="fit", run=self._run, **declared) as reservation:
                self._blocks = BlockCharger(reservation, self._event_at, note="fit", run=self._run, **declared)
                yield

    def charge(self, number: int, *, begins_epoch: bool = False) -> StepCharge:
        """Charge step `number`; where epochs are charged, the first step of one is charged for all of it."""
        del begins_epoch
        if self._adaptive is not None:
            return StepCharge(event=self._adaptive.charged_at(number), receipt=self._receipt)
        coming = self._plan.steps - number
        receipt = None if self._blocks is None else self._blocks.charge(number, coming=coming)
        return StepCharge(event=self._event_at(number), receipt=receipt)

    def _event_at(self, step: int) -> Event:
        return step_charge(self._plan, step, first=self._first, repeats=self._repeats)


class OpenCharges(StepCharges):
    """Charges a loop whose end is not known: each logical batch, in blocks that end with the epoch.

    Guarantee: a batch is charged to the ledger, if there is one, before `charge` returns, and fits the target, if there
    is one. Under a budget it was admitted by the filter, and the ledger holds all that remained of the budget.

    Args:
        plan: of the batches.
        log: everything that the engine charged, whichever of its models it was for.
        ledger: the dataset's account; None charges nothing.
        epoch_steps: logical batches an epoch.
        adaptive: chooses each step's noise under a budget, or None.
        target: what `log` must stay within; None has no end.
        catch_up: adds to `log` what others have charged to the same run folder since.
        by_number: whether batch n is the plan's n-th: an epoch of the sampler then begins where its number says so,
            inside of a pass over the loader too, as after a checkpoint in the middle of one.

    Raises:
        BudgetExceeded: when it is made: `plan`, or its relation or unit, do not fit the ledger's account.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        log: ChargeLog,
        ledger: Account | Reservation | None,
        epoch_steps: int,
        adaptive: AdaptiveBudgetRun | None = None,
        target: EpsilonTarget | None = None,
        catch_up: Callable[[], None] | None = None,
        by_number: bool = False,
    ) -> None:
        super().__init__(plan, adaptive)
        self._by_number = by_number
        self._log, self._ledger = log, ledger
        self._catch_up = catch_up
        self._epoch_steps, self._index_in_epoch = epoch_steps, 0
        self._target, self._num_fitting, self._count_then, self._unplanned = target, 0, -1, log.unplanned
        self._budget_receipt: str | None = None
        declared = {"neighboring_relation": plan.neighboring_relation, "privacy_unit": plan.privacy_unit}
        if ledger is not None:
            ledger.check_charge(plan.event() if adaptive is None else adaptive.event(), **declared)
        # Correlated noise is charged a cycle or a run ahead, as its plan says, whatever an epoch is.
        self._every_batch = not plan.charges_epochs or plan.mechanism is not None
        self._blocks = BlockCharger(ledger if adaptive is None else None, self._event_at, note="engine", **declared)

    def prepare(self) -> None:
        """Know what others have charged; charge what remains of the budget to the ledger, once."""
        if self._catch_up is not None:
            self._catch_up()
        if self._adaptive is not None and self._ledger is not None and self._budget_receipt is None:
            self._budget_receipt = self._adaptive.charge_remaining(self._ledger)

    def charge(self, number: int, *, begins_epoch: bool) -> StepCharge:
        """Charge batch `number`; where epochs are charged, the first batch of one is charged for all of it.

        Raises:
            BudgetExceeded: the batch does not fit the target or the ledger; nothing is charged.
        """
        is_planned = self._target is not None and number < self._plan.steps
        begins_epoch = begins_epoch or (self._by_number and number % self._epoch_steps == 0)
        if not (self._every_batch or begins_epoch):
            self._index_in_epoch += 1
            return StepCharge(event=NoOp(), receipt=self._budget_receipt, is_planned=is_planned)
        self._check_target(number, is_planned=is_planned)
        self._index_in_epoch = 0 if begins_epoch else self._index_in_epoch + 1
        receipt = self._blocks.charge(number, coming=self._num_coming(number))
        return StepCharge(event=self._event_at(number), receipt=receipt or self._budget_receipt, is_planned=is_planned)

    def remaining(self, number: int) -> Event:
        """What the target's plan has still to charge from step `number` on: nothing without a target."""
        plan = self._plan
        if self._target is None or number >= plan.steps:
            return NoOp()
        if plan.is_scheduled or plan.mechanism is not None:
            return compose([self._event_at(step) for step in range(number, plan.steps)])
        return plan.event(plan.steps - number)

    def retarget(self, target: EpsilonTarget) -> None:
        """Go over to the target of a later model of the engine, which was calibrated for what is left here as well."""
        if self._target is not None:
            self._target, self._num_fitting, self._unplanned = target, 0, self._log.unplanned

    def _check_target(self, number: int, *, is_planned: bool) -> None:
        """Refuse a batch beyond the target. Several are looked at together, so that few ask the accountant."""
        if self._target is None or isinstance(self._event_at(number), NoOp):
            return
        if is_planned and self._log.unplanned == self._unplanned:
            # The target was calibrated for these steps, together with those that other models have planned.
            return
        count = self._log.count
        if count != self._count_then or not self._num_fitting:
            events = [self._event_at(step) for step in range(number, number + self._num_coming(number))]
            self._num_fitting = self._target.fitting(self._log, events)
        if not self._num_fitting:
            raise self._target.refusal()
        self._num_fitting, self._count_then = self._num_fitting - 1, count + 1

    def _num_coming(self, number: int) -> int:
        """Steps that are charged together at most, from `number` on."""
        if not self._every_batch:
            return 1
        epoch, left = self._epoch_steps - self._index_in_epoch, self._plan.steps - number
        return max(1, epoch if self._plan.mechanism is None else min(epoch, left))

    def _event_at(self, number: int) -> Event:
        if self._adaptive is not None:
            return self._adaptive.charged_at(number)
        if self._plan.mechanism is not None:
            return step_charge(self._plan, number, first=self._first, repeats=self._repeats)
        return self._plan.step_event(number)
