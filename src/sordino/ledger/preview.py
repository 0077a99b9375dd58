"""What a piece of work would charge, found by doing it up to its charge and no further."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NoReturn

from sordino.definitions import NeighboringRelation, PrivacyUnit
from sordino.errors import BudgetExceeded
from sordino.events import Event
from sordino.ledger.account import Account, Reservation
from sordino.ledger.policies import AccountBudget

__all__ = ["ChargePreview", "preview_charge"]


@dataclass(frozen=True, kw_only=True)
class ChargePreview:
    """A charge that was not made.

    Args:
        event: what would be charged.
        neighboring_relation: for which it holds.
        privacy_unit: whose contribution it is about.
        fits: whether the account has it; None without an account.
        refusal: what the account says where it does not have it; empty otherwise.
    """

    event: Event
    neighboring_relation: NeighboringRelation
    privacy_unit: PrivacyUnit
    fits: bool | None
    refusal: str = ""


def preview_charge(
    work: Callable[["Account"], object], account: Account | Reservation | None = None
) -> ChargePreview | None:
    """What `work` would charge, and whether `account` has it. Nothing is charged and no record is read.

    All of sordino charges before it reads a record. `work` is carried out as it is, with something in place of the
    account that ends it at its first charge, so that the answer is what the work itself would ask for.

    Args:
        work: account ↦ anything; passes the account on as ``ledger=``.
        account: that would pay, or None to learn the event alone.

    Returns:
        The charge, or None where `work` ended without one.

    Example:
        >>> import tempfile
        >>> from sordino.events import Gaussian
        >>> from sordino.ledger import Ledger
        >>> folder = tempfile.TemporaryDirectory()
        >>> account = Ledger(folder.name + "/privacy.db").declare("adult", epsilon=1.0, delta=1e-5)
        >>> def work(ledger):
        ...     ledger.charge(Gaussian(noise_multiplier=10.0))
        ...     raise AssertionError("records are read after the charge: it does not come this far")
        >>> found = preview_charge(work, account)
        >>> found.event.noise_multiplier, found.fits, len(account.history())
        (10.0, True, 1)
        >>> folder.cleanup()
    """
    watched = _Watched(account)
    try:
        work(watched)  # pyright: ignore[reportArgumentType]
    except _FirstCharge as found:
        return found.preview
    except BudgetExceeded as error:
        if watched.refused is None:
            raise
        return replace(watched.refused, fits=False, refusal=str(error))
    return None


class _FirstCharge(BaseException):
    """Ends the work where it would charge; no `except Exception` on the way keeps it."""

    def __init__(self, preview: ChargePreview) -> None:
        super().__init__("a charge that was not made")
        self.preview = preview


class _Watched:
    """Stands where an account would: refuses what the account would refuse, and ends the work otherwise."""

    def __init__(self, account: Account | Reservation | None) -> None:
        self._account = account
        self.name = getattr(account, "name", "")
        self.refused: ChargePreview | None = None

    def charge(
        self,
        event: Event,
        *,
        note: str = "",  # noqa: ARG002
        run: str = "",  # noqa: ARG002
        neighboring_relation: NeighboringRelation | None = None,
        privacy_unit: PrivacyUnit | None = None,
    ) -> NoReturn:
        """End the work, or raise what the account would raise."""
        # What a charge leaves open is what the account declares.
        budget = self.budget()
        relation = NeighboringRelation.ADD_OR_REMOVE_ONE if budget is None else budget.neighboring_relation
        unit = PrivacyUnit.RECORD if budget is None else budget.privacy_unit
        found = ChargePreview(
            event=event,
            neighboring_relation=neighboring_relation or relation,
            privacy_unit=privacy_unit or unit,
            fits=None if self._account is None else True,
        )
        if self._account is not None:
            try:
                self._account.check_charge(event, neighboring_relation=neighboring_relation, privacy_unit=privacy_unit)
            except BudgetExceeded:
                self.refused = found
                raise
        raise _FirstCharge(found)

    reserve = charge

    def check_charge(
        self,
        event: Event,
        *,
        neighboring_relation: NeighboringRelation | None = None,
        privacy_unit: PrivacyUnit | None = None,
    ) -> NoReturn:
        """As `charge`: whoever asks first would charge next."""
        self.charge(event, neighboring_relation=neighboring_relation, privacy_unit=privacy_unit)

    def budget(self) -> AccountBudget | None:
        """What the account declares, by whose policy a search prices its runs; None without one."""
        return self._account.budget() if isinstance(self._account, Account) else None

    def remaining_delta(self) -> float:
        """What the account has for events with a δ of their own."""
        return self._account.remaining_delta() if isinstance(self._account, Account) else 0.0
