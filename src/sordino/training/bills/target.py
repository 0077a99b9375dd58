"""A target ε that an engine's charges must stay within (floor 3)."""

from collections.abc import Sequence
from dataclasses import dataclass

from sordino import accounting
from sordino.definitions import NeighboringRelation, round_up
from sordino.errors import BudgetExceeded
from sordino.events import Event, compose
from sordino.training.bills.charges import Charges

__all__ = ["EpsilonTarget"]

# Less than this part of a target is the rounding of an earlier calibration: it would buy noise without a signal.
_LEAST_LEFT = 1e-3


@dataclass(frozen=True, kw_only=True)
class EpsilonTarget:
    """(ε, δ) that everything charged to an engine, whoever charged it, must stay within.

    Args:
        epsilon: > 0.
        delta: in (0, 1).
        relation: the neighboring relation.
        accountant: a name, or ``auto``.
    """

    epsilon: float
    delta: float
    relation: NeighboringRelation
    accountant: str

    def spent(self, event: Event) -> float:
        """ε of an event at the target's δ."""
        return accounting.epsilon(event, self.delta, relation=self.relation, accountant=self.accountant).upper

    def check_left(self, charges: Event) -> None:
        """Refuse a plan for which nothing is left.

        Raises:
            BudgetExceeded: the charges alone reach the target, or nearly.
        """
        spent = self.spent(charges)
        if spent >= self.epsilon * (1 - _LEAST_LEFT):
            raise BudgetExceeded(
                f"target_epsilon must be more than what this engine has spent or set aside, {round_up(spent)} at "
                f"δ = {self.delta:g}, got {self.epsilon:g}. Raise it, or use a new PrivacyEngine for other records."
            )

    def fitting(self, charges: Charges, coming: Sequence[Event]) -> int:
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
