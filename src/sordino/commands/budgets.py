"""What commands charge: δ where none was given, and what a command would cost (`dry_run=True`)."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, TypeVar

from sordino.errors import BudgetExceeded, InvalidArgument
from sordino.events import to_dict

if TYPE_CHECKING:
    from sordino.accounting import Interval
    from sordino.commands.progress import Progress
    from sordino.ledger import Account, ChargePreview

__all__ = ["DryRun", "default_delta", "open_account", "preview", "with_affordable_delta"]

_Found = TypeVar("_Found")


def open_account(place: str | None, name: str | None) -> "Account | None":
    """The account that ``--ledger`` and ``--dataset-name`` name, or None when neither is given."""
    if place is None and name is None:
        return None
    if place is None or name is None:
        raise InvalidArgument("--ledger and --dataset-name must be given together, got one of them. Give both.")
    from sordino.ledger import Ledger

    return Ledger(place).account(name)


def default_delta(population: int) -> float:
    """1e-5, or for large datasets the largest power of ten that stays below 2/3 of 1 / population.

    Example:
        >>> default_delta(30_162), default_delta(2_000_000)
        (1e-05, 1e-07)
    """
    return min(1e-5, float(f"1e-{len(str(3 * population // 2))}"))


def with_affordable_delta(
    work: Callable[[float], _Found], default: float, account: "Account | None", progress: "Progress"
) -> _Found:
    """What `work` gives for the default δ, or for the largest that the account still has for events with their own.

    An account keeps a part of its δ for events that have one of their own. Where no δ was given, what is too much
    for that part would be refused though its ε fits. `work` must charge before it reads a record, as all of sordino.
    """
    try:
        return work(default)
    except BudgetExceeded:
        left = 0.0 if account is None else account.remaining_delta()
        if not 0 < left < default:
            raise
        progress.note(f"  δ = {left:g}: what the account has left for events with a δ of their own")
        return work(left)


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """What a command would charge; nothing was charged and no record was read.

    Args:
        charge: what would be charged, and whether the account has it; None where nothing would be.
        cost: its ε at `delta`; None where nothing would be charged.
        delta: at which `cost` is stated.
        account: that would be charged, or None.
        why: why nothing would be charged.
    """

    charge: "ChargePreview | None" = None
    cost: "Interval | None" = None
    delta: float = 0.0
    account: "Account | None" = None
    why: str = ""

    @property
    def fits(self) -> bool:
        """False where the account does not have it."""
        return self.charge is None or self.charge.fits is not False

    def to_dict(self) -> dict[str, object]:
        """As JSON types."""
        if self.charge is None or self.cost is None:
            return {"dry_run": True, "cost": None, "ledger": None, "why": self.why}
        ledger = None
        if self.account is not None:
            budget = self.account.budget()
            ledger = {
                "account": self.account.name,
                "fits": self.charge.fits,
                "left_epsilon": self.account.remaining_epsilon(),
                "budget": {"epsilon": budget.epsilon, "delta": budget.delta},
                "refusal": self.charge.refusal or None,
            }
        return {
            "dry_run": True,
            "cost": {
                "epsilon": "inf" if self.cost.upper == float("inf") else self.cost.upper,
                "delta": self.delta,
                "neighboring_relation": self.charge.neighboring_relation.value,
                "privacy_unit": self.charge.privacy_unit.value,
                "accountant": self.cost.accountant,
                "event": to_dict(self.charge.event),
            },
            "ledger": ledger,
        }


def preview(
    work: "Callable[[Account, Path], object]", account: "Account | None", *, delta: float | None, progress: "Progress"
) -> DryRun:
    """What `work` would charge, and whether the account has it.

    Args:
        work: (account, run folder) ↦ anything; carried out up to its first charge, in a folder that is removed.
        account: that would be charged, or None.
        delta: at which ε is stated; None takes the account's, or 1e-5.
        progress: where it is said that this goes on.
    """
    from sordino import accounting
    from sordino.ledger import preview_charge

    with TemporaryDirectory() as place, progress.stage("computing the charge"):
        found = preview_charge(lambda ledger: work(ledger, Path(place) / "run"), account)
    if found is None:
        return DryRun(why="it reads no private record")
    level = delta if delta is not None else 1e-5 if account is None else account.budget().delta
    cost = accounting.epsilon(found.event, level, neighboring_relation=found.neighboring_relation)
    return DryRun(charge=found, cost=cost, delta=level, account=account)
