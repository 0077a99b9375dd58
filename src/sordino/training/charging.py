"""What an engine has charged, in order."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from sordino import accounting, checks
from sordino.definitions import NeighboringRelation, PrivacyUnit, format_upper_bound
from sordino.errors import BudgetExceeded, InvalidArgument
from sordino.events import Event, NoOp, SelfComposed, compose, from_dict, to_dict
from sordino.ledger import Account, Reservation
from sordino.training.plan import Plan

__all__ = ["BlockCharger", "ChargeLog", "EpsilonTarget", "RunningEpsilon", "reserve_plan", "step_charge"]


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

    Under shuffled epochs the first step of an epoch pays for all of it, and so does the first step of a segment: it
    deals what is left of its epoch anew. Under correlated noise a run's charges hold for all its segments, unless steps
    from `first` on were carried out before (`repeats`): then the segment's first step pays for all that comes again.
    """
    if plan.mechanism is not None:
        if not (repeats and plan.is_private):
            return plan.step_event(step)
        return plan.mechanism.branch_event(first) if step == first else NoOp()
    charges = plan.sampling.num_charges
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
        self._total = self._after(self._all_steps())

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

    def _all_steps(self) -> ChargeLog:
        charges = self._charges.copy()
        for event in self._events(self._first, self._plan.steps):
            charges.add(event)
        return charges

    def _after(self, charges: ChargeLog) -> float:
        return accounting.epsilon(
            charges.event(), self._plan.delta, neighboring_relation=self._plan.neighboring_relation
        ).upper


# ----------------------------------------------------------------------------------------------------------------------
# Paying a ledger for steps, in blocks ahead.
# ----------------------------------------------------------------------------------------------------------------------


# Payments in a run that goes as planned: each waits for the disk, and a crash wastes at most one of them.
_PAYMENTS = 32


class BlockCharger:
    """Pays for steps in blocks ahead, so that ten thousand steps are a few tens of lines in the ledger.

    Guarantee: when `charge` returns, the step is charged. What was paid and is not used stays charged, so that after a
    crash the ledger holds at least what was spent.

    Args:
        account: what is charged; None charges nothing.
        event_at: what a step will do, by its number.
        note: what for.
        neighboring_relation: for which the events hold.
        privacy_unit: for which the events hold.
        run: name of the run.
        receipt: the ledger's name of a charge that holds every step, when `purse` is None.

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
        receipt: str | None = None,
    ) -> None:
        self._purse, self._event_at = account, event_at
        self._note, self._relation, self._unit, self._run = note, neighboring_relation, privacy_unit, run
        self._begin = self._end = 0
        self._size = 0
        self._receipt = receipt

    def charge(self, step: int, *, coming: int) -> str | None:
        """Pay for step `step`, before its records are read.

        Args:
            step: numbers grow from call to call.
            coming: steps that are planned from here on, this one included; no more than these are paid ahead.

        Returns:
            The digest of the ledger's line that holds the step; None without a ledger.

        Raises:
            BudgetExceeded: not even this one step fits.
        """
        if self._purse is None or self._begin <= step < self._end:
            return self._receipt
        self._size = self._size or math.ceil(coming / _PAYMENTS)
        size = max(1, min(self._size, coming))
        while True:
            event = compose([self._event_at(number) for number in range(step, step + size)])
            if isinstance(event, NoOp):
                # Steps of a cycle, or of a run, that was paid as a whole.
                self._begin, self._end = step, step + size
                return self._receipt
            try:
                charge = self._purse.charge(
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


@contextmanager
def reserve_plan(
    ledger: Account | Reservation | None, plan: Plan, *, first: int, repeats: bool = False, run: str = ""
) -> Iterator[BlockCharger]:
    """Reserve a plan's steps from `first` on; at the end of the block, what was not paid is given back.

    `repeats` says that steps from `first` on were carried out before.

    Raises:
        BudgetExceeded: the whole does not fit; nothing is reserved.
    """
    neighboring_relation, unit, note = plan.neighboring_relation, plan.privacy_unit, "fit"

    def event_at(step: int) -> Event:
        return step_charge(plan, step, first=first, repeats=repeats)

    def paid_from(purse: Account | Reservation | None) -> BlockCharger:
        return BlockCharger(
            purse, event_at, note=note, neighboring_relation=neighboring_relation, privacy_unit=unit, run=run
        )

    if ledger is None:
        yield paid_from(None)
        return
    whole = compose([event_at(step) for step in range(first, plan.steps)])
    with ledger.reserve(
        whole, note=note, run=run, neighboring_relation=neighboring_relation, privacy_unit=unit
    ) as reservation:
        yield paid_from(reservation)


# ----------------------------------------------------------------------------------------------------------------------
# A target ε that an engine's charges must stay within.
# ----------------------------------------------------------------------------------------------------------------------


# Less than this part of a target is the rounding of an earlier calibration: it would buy noise without a signal.
_LEAST_LEFT = 1e-3


@dataclass(frozen=True, kw_only=True)
class EpsilonTarget:
    """(ε, δ) that everything charged to an engine, whoever charged it, must stay within.

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
        low, high = 0, len(coming)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def refusal(self) -> BudgetExceeded:
        """What is raised instead of a batch that does not fit."""
        return BudgetExceeded(
            f"target_epsilon must cover every batch, got {self.epsilon:g} at δ = {self.delta:g} and one batch more "
            "than fits: the epochs it was made for are over. Stop training here; or go on after detach() and "
            "make_private_with_epsilon with a larger target_epsilon. From the start, more epochs= give more noise a "
            "step, and exceed_target=True no end, where get_epsilon tells what was spent."
        )
