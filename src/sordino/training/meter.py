"""What one logical batch of an engine costs, and its number (floor 3)."""

from collections.abc import Callable
from itertools import count

from sordino.ledger import Account, Reservation
from sordino.training.charges import Charges
from sordino.training.plan import Plan
from sordino.training.prepaid import Prepaid

__all__ = ["Meter"]


class Meter:
    """Charges the next logical batch, before its records are read, and numbers it.

    Guarantee: a batch is handed out only once the ledger, if there is one, and the engine's own charges hold it.

    Args:
        plan: of the batches.
        charges: the engine's own record.
        ready: raises when no batch may be given out.
        ledger: pays, in blocks ahead that end with the epoch; None pays nothing.
        steps: logical batches an epoch.

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
    ) -> None:
        if ledger is not None:
            ledger.check(plan.event(), relation=plan.neighboring_relation, unit=plan.privacy_unit)
        self._charges, self._ready, self._steps = charges, ready, steps
        self._event_at, self._every_batch = plan.step_event, plan.poisson_sampling
        self._prepaid = Prepaid(
            ledger,
            self._event_at,
            note="engine",
            relation=plan.neighboring_relation,
            unit=plan.privacy_unit,
        )
        self._numbers, self._place = count(), 0

    def __call__(self, begins_epoch: bool) -> int:
        """Charge a batch; under shuffled epochs the first of an epoch pays for all of it."""
        self._ready()
        number = next(self._numbers)
        self._place = 0 if begins_epoch else self._place + 1
        if self._every_batch or begins_epoch:
            self._prepaid.pay(number, coming=self._steps - self._place if self._every_batch else 1)
            self._charges.add(self._event_at(number))
        return number
