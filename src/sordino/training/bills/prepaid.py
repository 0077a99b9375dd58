"""Paying a ledger for steps, in blocks ahead (floor 3)."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sordino.definitions import NeighboringRelation, PrivacyUnit
from sordino.errors import BudgetExceeded
from sordino.events import Event, Nothing, compose
from sordino.ledger import Account, Reservation
from sordino.training.bills.spending import charged_at
from sordino.training.plan import Plan

__all__ = ["Prepaid", "set_aside"]

# Payments in a run that goes as planned: each waits for the disk, and a crash wastes at most one of them.
_PAYMENTS = 32


class Prepaid:
    """Pays for steps in blocks ahead, so that ten thousand steps are a few tens of lines in the ledger.

    Guarantee: when `pay` returns, the step is charged. What was paid and is not used stays charged, so that after a
    crash the ledger holds at least what was spent.

    Args:
        purse: what pays; None pays nothing.
        event_at: what a step will do, by its number.
        note: what for.
        relation: for which the events hold.
        unit: for which the events hold.
        run: name of the run.
        receipt: the ledger's name of a charge that holds every step, when `purse` is None.

    Example:
        >>> from sordino.events import Gaussian
        >>> free = Prepaid(None, lambda step: Gaussian(noise_multiplier=1.0), note="a run",
        ...     relation=NeighboringRelation.ADD_OR_REMOVE_ONE, unit=PrivacyUnit.EXAMPLE)
        >>> free.pay(0, coming=100) is None
        True
    """

    def __init__(
        self,
        purse: Account | Reservation | None,
        event_at: Callable[[int], Event],
        *,
        note: str,
        relation: NeighboringRelation,
        unit: PrivacyUnit,
        run: str = "",
        receipt: str | None = None,
    ) -> None:
        self._purse, self._event_at = purse, event_at
        self._note, self._relation, self._unit, self._run = note, relation, unit, run
        self._begin = self._end = 0
        self._size = 0
        self._receipt = receipt

    def pay(self, step: int, *, coming: int) -> str | None:
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
            if isinstance(event, Nothing):
                # Steps of a cycle, or of a run, that was paid as a whole.
                self._begin, self._end = step, step + size
                return self._receipt
            try:
                charge = self._purse.charge(
                    event, note=self._note, run=self._run, relation=self._relation, unit=self._unit
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
def set_aside(
    ledger: Account | Reservation | None, plan: Plan, *, first: int, repeats: bool = False, run: str = ""
) -> Iterator[Prepaid]:
    """Reserve a plan's steps from `first` on; at the end of the block, what was not paid is given back.

    `repeats` says that steps from `first` on were carried out before.

    Raises:
        BudgetExceeded: the whole does not fit; nothing is reserved.
    """
    relation, unit, note = plan.neighboring_relation, plan.privacy_unit, "fit"

    def event_at(step: int) -> Event:
        return charged_at(plan, step, first=first, repeats=repeats)

    def paid_from(purse: Account | Reservation | None) -> Prepaid:
        return Prepaid(purse, event_at, note=note, relation=relation, unit=unit, run=run)

    if ledger is None:
        yield paid_from(None)
        return
    whole = compose([event_at(step) for step in range(first, plan.steps)])
    with ledger.reserve(whole, note=note, run=run, relation=relation, unit=unit) as reservation:
        yield paid_from(reservation)
