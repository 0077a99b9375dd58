"""What one logical batch of an engine costs, and its number (floor 3)."""

from collections.abc import Callable

from sordino.errors import UnprivateStep
from sordino.events import Event, Nothing, compose
from sordino.ledger import Account, Reservation
from sordino.training.bills.adaptive import AdaptiveRun
from sordino.training.bills.charges import Charges
from sordino.training.bills.prepaid import Prepaid
from sordino.training.bills.spending import charged_at
from sordino.training.bills.target import EpsilonTarget
from sordino.training.plan import Plan

__all__ = ["Meter"]


class Meter:
    """Charges the next logical batch, before its records are read, and numbers it.

    Guarantee: a batch is handed out only once the ledger, if there is one, and the engine's own charges hold it. Under
    a budget it was admitted by the filter, and the ledger holds the whole budget.

    Args:
        plan: of the batches.
        charges: the engine's own record.
        ready: raises when no batch may be given out.
        ledger: pays, in blocks ahead that end with the epoch; None pays nothing.
        steps: logical batches an epoch.
        adaptive: chooses each step's values under a budget.
        journal: writes a batch down: its number, what it charges, and the ledger's receipt.
        target: what the engine's charges must stay within; None has no end.

    Raises:
        BudgetExceeded: when it is made: `plan`, or its relation or unit, do not fit the ledger's account.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        charges: Charges,
        ready: Callable[[], None],
        ledger: Account | Reservation | None,
        steps: int,
        adaptive: AdaptiveRun | None = None,
        journal: Callable[[int, Event, str | None], None] | None = None,
        target: EpsilonTarget | None = None,
    ) -> None:
        self._target, self._fitting, self._known = target, 0, -1
        self._unplanned = charges.unplanned
        self._plan, self._ledger, self._adaptive = plan, ledger, adaptive
        self._journal = journal
        self._budget_receipt: str | None = None
        if ledger is not None:
            whole = plan.event() if adaptive is None else adaptive.event()
            ledger.check(whole, relation=plan.neighboring_relation, unit=plan.privacy_unit)
        self._charges, self._ready, self._steps = charges, ready, steps
        # Correlated noise is charged a cycle or a run ahead, as its plan says, whatever an epoch is.
        self._every_batch = plan.poisson_sampling or plan.mechanism is not None
        self._prepaid = Prepaid(
            ledger if adaptive is None else None,
            self._event_at,
            note="engine",
            relation=plan.neighboring_relation,
            unit=plan.privacy_unit,
        )
        self.reached = self._place = self._first = 0
        self._repeats = self._is_paid = self.has_charged = False

    def __call__(self, begins_epoch: bool) -> int | None:
        """Charge a batch; under shuffled epochs the first of an epoch pays for all of it.

        Returns:
            The batch's number; None when the budget refuses it, and nothing is charged.

        Raises:
            UnprivateStep: the noise has no more steps.
            BudgetExceeded: the batch does not fit the target; nothing is charged.
        """
        self.prepare()
        number = self.reached
        if self.left == 0:
            raise UnprivateStep(
                f"loader must be read for at most {self._plan.steps} batches, the steps of the noise's strategy, got "
                "one more. Stop here, or build the strategy for more steps."
            )
        if self._adaptive is not None and not self._adaptive.admit(number):
            return None
        if self._every_batch or begins_epoch:
            self._check_target(number)
        self._place = 0 if begins_epoch else self._place + 1
        event, receipt = Nothing(), None
        if self._every_batch or begins_epoch:
            receipt = self._prepaid.pay(number, coming=self._coming() if self._every_batch else 1)
            event = self._event_at(number)
        if self._journal is not None:
            self._journal(number, event, receipt or self._budget_receipt)
        if not isinstance(event, Nothing):
            self._charges.add(event, planned=self._is_planned(number))
        self.reached, self.has_charged = number + 1, True
        return number

    @property
    def adapts(self) -> bool:
        """Whether batches are admitted by a budget."""
        return self._adaptive is not None

    def prepare(self) -> None:
        """What comes before a batch is admitted: it may be given out, and its budget is paid."""
        self._ready()
        if self._adaptive is not None:
            self._pay_budget(self._adaptive)

    @property
    def left(self) -> int | None:
        """How many steps the noise has left; None when there is no end to them."""
        return None if self._plan.mechanism is None else max(0, self._plan.steps - self.reached)

    def go_on(self, step: int, *, repeats: bool) -> None:
        """Number the next batch `step`, or later: no number comes twice.

        Args:
            step: where a checkpoint stopped.
            repeats: whether steps from there on were carried out before; matters under correlated noise only.
        """
        self.reached = max(self.reached, step)
        self._first, self._repeats = self.reached, repeats

    def remaining(self) -> Event:
        """What the target's plan has still to charge: nothing without a target."""
        plan = self._plan
        if self._target is None or self.reached >= plan.steps:
            return Nothing()
        if plan.is_scheduled or plan.mechanism is not None:
            return compose([self._event_at(step) for step in range(self.reached, plan.steps)])
        return plan.event(plan.steps - self.reached)

    def retarget(self, target: EpsilonTarget) -> None:
        """Go over to the target of a later model of the engine, which was calibrated for what is left here as well."""
        if self._target is not None:
            self._target, self._fitting, self._unplanned = target, 0, self._charges.unplanned

    def _is_planned(self, number: int) -> bool:
        return self._target is not None and number < self._plan.steps

    def _check_target(self, number: int) -> None:
        """Refuse a batch beyond the target. Several are looked at together, so that few ask the accountant."""
        if self._target is None or isinstance(self._event_at(number), Nothing):
            return
        charged = self._charges.count
        if self._is_planned(number) and self._charges.unplanned == self._unplanned:
            # The target was calibrated for these steps, together with those that other models have planned.
            return
        if charged != self._known or not self._fitting:
            ahead = self._coming() if self._every_batch else 1
            events = [self._event_at(step) for step in range(number, number + max(1, ahead))]
            self._fitting = self._target.fitting(self._charges, events)
        if not self._fitting:
            raise self._target.refusal()
        self._fitting, self._known = self._fitting - 1, charged + 1

    def _coming(self) -> int:
        epoch = self._steps - self._place
        return epoch if self.left is None else max(1, min(epoch, self.left))

    def _event_at(self, number: int) -> Event:
        if self._adaptive is not None:
            return self._adaptive.charged_at(number)
        if self._plan.mechanism is not None:
            return charged_at(self._plan, number, first=self._first, repeats=self._repeats)
        return self._plan.step_event(number)

    def _pay_budget(self, adaptive: AdaptiveRun) -> None:
        """Charge the budget to the ledger, once: all that is left of it, whoever else may have gone on from there."""
        if self._is_paid or self._ledger is None:
            return
        relation, unit = self._plan.neighboring_relation, self._plan.privacy_unit
        note = "engine with an adaptive budget"
        self._budget_receipt = self._ledger.charge(adaptive.rest(), note=note, relation=relation, unit=unit).digest
        self._is_paid = True
