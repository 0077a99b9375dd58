"""The account of one data set (floor 2): what may be spent on it, what was, and what is left."""

import uuid
from dataclasses import dataclass, replace

from sordino.definitions import Guarantee, NeighboringRelation, PrivacyUnit, round_up
from sordino.errors import BudgetExceeded, InvalidArgument
from sordino.events import Event
from sordino.ledger.balance import Balance
from sordino.ledger.budget import Budget
from sordino.ledger.entries import Entry
from sordino.ledger.leaves import leaves_of, packed
from sordino.ledger.place import masked
from sordino.ledger.policies import Composition
from sordino.ledger.reservation import Charge, Reservation, charge_of
from sordino.ledger.store import reading, writing

__all__ = ["Account", "Remaining"]


@dataclass(frozen=True, kw_only=True)
class Remaining:
    """What is left of an account's budget, after charges and open reservations.

    Args:
        amount: ≥ 0. As ρ: a Gaussian of noise multiplier √(1/2ρ) or more still fits. As ε: what is added composes
            with the rest, so that an event of more than that may fit.
        currency: ``ρ`` under the filters ``renyi`` and ``zcdp``; ``ε`` under ``pld``, and when δ is 0.
        share: what is left of the whole, in [0, 1].
        reserved: how many reservations are open.
    """

    amount: float
    currency: str
    share: float
    reserved: int


@dataclass(frozen=True)
class Account:
    """A handle on one data set's account: small, frozen, picklable, the same in every process.

    Guarantee: all that is ever charged to the account, by whatever process, is together (ε, δ)-differentially private
    with the declared ε and δ, for the declared unit and relation, provided that everything that reads the data is
    charged. A charge that would not fit is refused before anything is read.

    Args:
        url: of the ledger.
        name: of the account.

    Example:
        >>> import tempfile
        >>> from sordino.events import Gaussian
        >>> from sordino.ledger import Ledger
        >>> folder = tempfile.TemporaryDirectory()
        >>> account = Ledger(folder.name + "/privacy.db").declare("adult", epsilon=1.0, delta=1e-5)
        >>> charge = account.charge(Gaussian(noise_multiplier=10.0), note="a sum")
        >>> charge.seq, round(account.spent().epsilon, 2), account.remaining().share > 0.7
        (2, 0.34, True)
        >>> folder.cleanup()
    """

    url: str
    name: str

    def __repr__(self) -> str:
        return f"Account(url={masked(self.url)!r}, name={self.name!r})"

    # --- spending ------------------------------------------------------------------------------------------------

    def charge(
        self,
        event: Event,
        *,
        note: str = "",
        run: str = "",
        relation: NeighboringRelation | None = None,
        unit: PrivacyUnit | None = None,
    ) -> Charge:
        """Write down that `event` is about to happen. Call it before the data are read.

        Args:
            event: what will be done.
            note: what for. It is kept for ever: no values of records.
            run: the run's name.
            relation: for which `event` holds; the account's when None.
            unit: for which `event` holds; the account's when None.

        Raises:
            BudgetExceeded: it does not fit what is left, or the account's events had to be reserved ahead.
            InvalidArgument: `relation` or `unit` are not the account's.
            UnsupportedEvent: the account's policy has no price for the event.
        """
        with writing(self.url, self.name) as page:
            balance = Balance.of(page)
            balance.budget.agree(relation, unit)
            self._require(balance, event)
            return charge_of(balance.charge(event, note=note, run=run))

    def reserve(
        self,
        event: Event,
        *,
        note: str = "",
        run: str = "",
        relation: NeighboringRelation | None = None,
        unit: PrivacyUnit | None = None,
    ) -> Reservation:
        """Set the whole of a planned run aside, to be drawn piece by piece; what is not drawn is given back at the end.

        Args and errors are those of `charge`.
        """
        with writing(self.url, self.name) as page:
            balance = Balance.of(page)
            balance.budget.agree(relation, unit)
            self._require(balance, event)
            name = uuid.uuid4().hex[:12]
            balance.reserve(event, reservation=name, note=note, run=run)
        return Reservation(url=self.url, account=self.name, name=name)

    def check(
        self, event: Event, *, relation: NeighboringRelation | None = None, unit: PrivacyUnit | None = None
    ) -> None:
        """Raise what `charge` would raise now, and write nothing."""
        with reading(self.url, self.name) as page:
            balance = Balance.of(page)
            balance.budget.agree(relation, unit)
            self._require(balance, event)

    def _require(self, balance: Balance, event: Event) -> None:
        budget = balance.budget
        if not budget.adaptive and balance.touched and leaves_of(event):
            raise BudgetExceeded(
                f"account {self.name!r} must have all its events reserved before the first charge (policy 'pld'), got "
                "a new one after it. Nothing was charged. Reserve the whole plan at the start, or declare the account "
                "with the policy 'renyi', which lets events be chosen as you go."
            )
        if not balance.admits(event):
            raise BudgetExceeded(
                f"the charge must fit what is left of account {self.name!r} (ε = {budget.epsilon:g}, "
                f"δ = {budget.delta:g}, policy {budget.policy!r}), got one that does not. Nothing was charged and no "
                "record was read. Use more noise or fewer steps, or stop; `sordino ledger show` says what is left."
            )

    # --- looking -------------------------------------------------------------------------------------------------

    def budget(self) -> Budget:
        """What was declared."""
        with reading(self.url, self.name) as page:
            return Balance.of(page).budget

    def spent(self) -> Guarantee:
        """(ε, δ) of all charges so far, composed as events, for the account's unit and relation.

        Under the policies ``renyi`` and ``zcdp`` the number is a reading: had all charges been fixed in advance, they
        would be (ε, δ)-private. What is proven for charges that were chosen in the light of results is the declared
        budget, and the caveat says so.

        Raises:
            UnsupportedEvent: no accountant can compose these events.
        """
        with reading(self.url, self.name) as page:
            balance = Balance.of(page)
            budget, charged = balance.budget, balance.charged()
        answer = Composition(budget=budget, leaves=charged).interval()
        caveats = ()
        if budget.adaptive:
            proven = f"(ε = {round_up(budget.epsilon)}, δ = {budget.delta:g})"
            caveats = (f"for events chosen in the light of earlier results the proven guarantee is {proven}",)
        return Guarantee(
            epsilon=answer.upper,
            delta=budget.delta,
            relation=budget.relation,
            unit=budget.unit,
            accountant=answer.accountant,
            sampler="as in each charge",
            caveats=caveats,
        )

    def remaining(self) -> Remaining:
        """What is left after charges and open reservations."""
        with reading(self.url, self.name) as page:
            balance = Balance.of(page)
            left, reserved = balance.remaining(), len(balance.open())
        return Remaining(amount=left.amount, currency=left.currency, share=left.share, reserved=reserved)

    def history(self) -> list[Entry]:
        """All lines of the account, oldest first."""
        with reading(self.url, self.name) as page:
            Balance.of(page)
            return page.entries()

    def event(self) -> Event:
        """Everything charged so far, as one event."""
        with reading(self.url, self.name) as page:
            return packed(Balance.of(page).charged())

    def reservations(self) -> dict[str, Event]:
        """Open reservations and what is left of each."""
        with reading(self.url, self.name) as page:
            return {name: packed(left) for name, left in Balance.of(page).open().items()}

    # --- changing ------------------------------------------------------------------------------------------------

    def reservation(self, name: str) -> Reservation:
        """The handle of a reservation that was made before, for instance by a run that crashed."""
        with reading(self.url, self.name) as page:
            if page.last_of(name) is None:
                raise InvalidArgument(f"reservation must be one of account {self.name!r}, got {name!r}. See history().")
        return Reservation(url=self.url, account=self.name, name=name)

    def change_budget(self, *, epsilon: float | None = None, delta: float | None = None, note: str) -> Budget:
        """Write down another budget. Unit, relation and policy stay.

        The guarantee is then that of the largest budget that could have been declared: a raise that answers to results
        was not fixed in advance.

        Args:
            epsilon: > 0; as before when None.
            delta: as before when None.
            note: why.

        Raises:
            BudgetExceeded: more than that is charged or reserved already.
        """
        if not note.strip():
            raise InvalidArgument("note must say why the budget is changed, got none. Give a reason.")
        with writing(self.url, self.name) as page:
            balance = Balance.of(page)
            old = balance.budget
            new = replace(
                old, epsilon=old.epsilon if epsilon is None else epsilon, delta=old.delta if delta is None else delta
            )
            if new.policy == "renyi" and (new.delta == 0) != (old.delta == 0):
                raise InvalidArgument("delta must stay zero or stay above zero, got a change. Declare a new account.")
            if not balance.under(new).admits(packed({})):
                raise BudgetExceeded(
                    f"the budget of account {self.name!r} must cover what is charged and reserved, got less. Nothing "
                    "was changed. Release reservations that nobody uses, or choose more."
                )
            balance.change(new, note=note)
            return new
