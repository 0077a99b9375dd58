"""The account of one dataset: what may be spent on it, what was, and what is left."""

import json
import math
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NoReturn, Self

from sordino.accounting.base import Costs, PrivacyFilter, RemainingAmount, add_costs, round_down
from sordino.definitions import Guarantee, NeighboringRelation, PrivacyUnit, format_upper_bound
from sordino.errors import BudgetExceeded, InvalidArgument, LedgerError, SordinoError
from sordino.events import Event, Gaussian, compose_counts, event_counts, subtract_counts, to_dict
from sordino.ledger.policies import AccountBudget, PLDPolicy, make_filter
from sordino.ledger.store import (
    AccountTransaction,
    LedgerEntry,
    changed_line,
    read_transaction,
    redact_password,
    write_transaction,
)

__all__ = [
    "Account",
    "AccountState",
    "Charge",
    "ChargePreview",
    "Remaining",
    "Reservation",
    "entry_body",
    "entry_charge",
    "preview_charge",
]


# ----------------------------------------------------------------------------------------------------------------------
# An account's state inside a transaction: read from its newest lines, changed by adding one.
# ----------------------------------------------------------------------------------------------------------------------


Leaves = dict[Event, int]


@dataclass(frozen=True, kw_only=True)
class AccountState:
    """What an account holds as of its line `last`."""

    page: AccountTransaction
    last: LedgerEntry
    budget: AccountBudget
    budget_at: int
    totals: Costs
    has_charges: bool

    @classmethod
    def of(cls, page: AccountTransaction) -> "AccountState":
        """The account's state.

        Raises:
            InvalidArgument: there is no such account.
        """
        last = page.last()
        if last is None:
            raise InvalidArgument(
                f"account must be declared, got {page.account!r}. Run `sordino ledger declare`, or ledger.declare(…)."
            )
        at, totals, declared = last.budget_at, last.totals, page.at(last.budget_at)
        if declared is None:
            raise LedgerError("the ledger must hold every account's budget, got one without. Verify the ledger.")
        try:
            budget = AccountBudget.from_dict(declared.contents["budget"])
        except (SordinoError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise changed_line(declared) from error
        rule = make_filter(budget)
        if rule is not None and len(totals) != rule.num_measures:
            raise changed_line(last)
        return cls(
            page=page,
            last=last,
            budget=budget,
            budget_at=at,
            totals=totals,
            has_charges=bool(last.contents.get("has_charges", True)),
        )

    def with_budget(self, budget: AccountBudget) -> "AccountState":
        """The same state under another budget."""
        return replace(self, budget=budget)

    # --- asking --------------------------------------------------------------------------------------------------

    def open(self) -> dict[str, Leaves]:
        """Open reservations and what is left of each."""
        left = {entry.reservation: _left(entry) for entry in self.page.reservations()}
        return {name: leaves for name, leaves in left.items() if leaves}

    def remaining_event(self, reservation: str) -> tuple[Leaves, LedgerEntry]:
        """What is left of a reservation, and its newest line."""
        newest = self.page.last_of(reservation)
        if newest is None:
            raise InvalidArgument(f"reservation must be one of this account's, got {reservation!r}. See its history.")
        return _left(newest), newest

    def charged(self) -> Leaves:
        """All that was charged."""
        return _merged([event_counts(entry.event) for entry in self.page.entries("charge")])

    def committed(self, rule: PrivacyFilter) -> Costs:
        """What is charged or reserved, in the filter's currencies."""
        total = self.totals
        for left in self.open().values():
            total = add_costs(total, rule.total_costs(left))
        return total

    def admits(self, event: Event) -> bool:
        """Whether `event` fits in addition to what is charged and reserved."""
        rule = make_filter(self.budget)
        if rule is not None:
            return rule.fits(add_costs(self.committed(rule), rule.total_costs(event_counts(event))))
        everything = _merged([self.charged(), *self.open().values(), event_counts(event)])
        return not everything or PLDPolicy(budget=self.budget, leaves=everything).fits()

    def remaining(self) -> RemainingAmount:
        """What is left after what is charged and reserved."""
        rule = make_filter(self.budget)
        if rule is not None:
            return rule.remaining_beside(self.committed(rule))
        leaves = _merged([self.charged(), *self.open().values()])
        return PLDPolicy(budget=self.budget, leaves=leaves).remaining()

    def remaining_epsilon(self) -> float:
        """ε, at the account's δ, of the largest Gaussian event that would still fit; of a pure one where δ is 0."""
        left = self.remaining()
        if left.measure != "ρ":
            return left.amount
        if left.amount == 0:
            return 0.0
        from sordino.accounting import epsilon

        fitting = Gaussian(noise_multiplier=1 / math.sqrt(2 * left.amount))
        return min(self.budget.epsilon, epsilon(fitting, self.budget.delta).lower)

    def advice(self, event: Event, left: float) -> str:
        """What to do instead of `event`, which does not fit, when `left` is what remains in ε."""
        from sordino.accounting.filters import RDPOrdersFilter

        rule = make_filter(self.budget)
        if isinstance(rule, RDPOrdersFilter):
            total = add_costs(self.committed(rule), rule.total_costs(event_counts(event)))
            if advice := rule.delta_advice(event, total):
                return advice
        return f"Choose ε ≤ {left:.3g}: more noise or fewer steps" if left > 0 else "Stop: nothing is left"

    # --- writing -------------------------------------------------------------------------------------------------

    def charge(
        self, event: Event, *, note: str, run: str, reservation: str = "", left: Leaves | None = None
    ) -> LedgerEntry:
        """Write a charge. Whether it fits was asked before."""
        body = self._body(
            event, self.after(event), has_charges=self.has_charges or bool(event_counts(event)), left=left
        )
        return self._append("charge", body, note=note, run=run, reservation=reservation)

    def after(self, event: Event) -> Costs:
        """The totals once `event` is charged."""
        rule = make_filter(self.budget)
        return self.totals if rule is None else add_costs(self.totals, rule.total_costs(event_counts(event)))

    def reserve(self, event: Event, *, reservation: str, note: str, run: str) -> LedgerEntry:
        """Write a reservation. Whether it fits was asked before."""
        body = self._body(event, self.totals, has_charges=self.has_charges, left=event_counts(event))
        return self._append("reserve", body, note=note, run=run, reservation=reservation)

    def release(self, left: Leaves, *, reservation: str, note: str, run: str) -> LedgerEntry:
        """Write that the rest of a reservation is given back."""
        body = self._body(compose_counts(left), self.totals, has_charges=self.has_charges, left={})
        return self._append("release", body, note=note, run=run, reservation=reservation)

    def change(self, budget: AccountBudget, *, note: str) -> LedgerEntry:
        """Write another budget."""
        body = entry_body(
            budget=budget,
            budget_at=self.last.seq + 1,
            totals=self.totals,
            has_charges=self.has_charges,
            event=None,
            left=None,
        )
        return self._append("budget", body, note=note, run="", reservation="")

    def _body(self, event: Event, totals: Costs, *, has_charges: bool, left: Leaves | None) -> str:
        return entry_body(
            budget=None, budget_at=self.budget_at, totals=totals, has_charges=has_charges, event=event, left=left
        )

    def _append(self, kind: str, body: str, *, note: str, run: str, reservation: str) -> LedgerEntry:
        return self.page.append(self.last, kind=kind, body=body, note=note, run=run, reservation=reservation)


def entry_body(
    *,
    budget: AccountBudget | None,
    budget_at: int,
    totals: Costs,
    has_charges: bool,
    event: Event | None,
    left: Mapping[Event, int] | None,
) -> str:
    """The JSON of a line."""
    body: dict[str, object] = {"budget_at": budget_at, "totals": _numbers(totals), "has_charges": has_charges}
    if budget is not None:
        body["budget"] = budget.to_dict()
    if event is not None:
        body["event"] = to_dict(event)
    if left is not None:
        body["left"] = to_dict(compose_counts(left))
    return json.dumps(body, sort_keys=True, allow_nan=False)


def _numbers(totals: Costs) -> list[float | str]:
    # JSON has no ∞: an order at which an event has no finite price stays out of use.
    return ["inf" if value == float("inf") else value for value in totals]


def _left(entry: LedgerEntry) -> Leaves:
    return event_counts(entry.left)


def _merged(bags: list[Leaves]) -> Leaves:
    total: Leaves = {}
    for bag in bags:
        for event, count in bag.items():
            total[event] = total.get(event, 0) + count
    return total


def _epsilon_alone(event: Event, budget: AccountBudget) -> float | None:
    """ε of an event by itself at the budget's δ; None where it has none."""
    from sordino.accounting import epsilon

    try:
        return epsilon(event, budget.delta, neighboring_relation=budget.neighboring_relation).upper
    except SordinoError:
        return None


def _cost_of(event: Event, budget: AccountBudget) -> str:
    """What `event` costs by itself, for a message."""
    alone = _epsilon_alone(event, budget)
    return " that does not fit" if alone is None else f" of ε = {format_upper_bound(alone)}"


# ----------------------------------------------------------------------------------------------------------------------
# A part of an account that is set aside for a planned run.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Charge:
    """The receipt of a charge.

    Args:
        account: whose.
        seq: number of its line in the account.
        event: what was charged.
        at: when, UTC.
        digest: of its line; note it down to show later that the line was not changed.
    """

    account: str
    seq: int
    event: Event
    at: str
    digest: str


def entry_charge(entry: LedgerEntry) -> Charge:
    """The receipt of a line."""
    return Charge(account=entry.account, seq=entry.seq, event=entry.event, at=entry.at, digest=entry.digest)


@dataclass(frozen=True)
class Reservation:
    """A handle on a reservation: picklable, and accepted wherever an account is, by ``ledger=``.

    As a context manager it gives back at the end what was not drawn. A process that is killed gives nothing back: the
    rest stays reserved until `close`, or ``sordino ledger release``. What was drawn stays charged in any case.

    Guarantee: only leaves of the reserved event can be drawn, each at most as often as it was reserved; all draws were
    within the account's budget from the start.

    Args:
        url: of the ledger.
        account: its account.
        name: of the reservation.
        closes: whether the end of a ``with`` block gives the rest back.
    """

    url: str
    account: str
    name: str
    closes: bool = True

    def __repr__(self) -> str:
        return f"Reservation(url={redact_password(self.url)!r}, account={self.account!r}, name={self.name!r})"

    def charge(
        self,
        event: Event,
        *,
        note: str = "",
        run: str = "",
        neighboring_relation: NeighboringRelation | None = None,
        privacy_unit: PrivacyUnit | None = None,
    ) -> Charge:
        """Draw `event` from the reservation, before the data are read.

        Args:
            event: leaves of the reserved event that were not drawn yet.
            note: what for; the reservation's own note when empty.
            run: the run's name; the reservation's own when empty.
            neighboring_relation: for which `event` holds; the account's when None.
            privacy_unit: for which `event` holds; the account's when None.

        Raises:
            BudgetExceeded: that was not reserved, was drawn already, or was given back.
            InvalidArgument: `neighboring_relation` or `privacy_unit` are not the account's.
        """
        with write_transaction(self.url, self.account) as page:
            balance = AccountState.of(page)
            balance.budget.check_relation_and_unit(neighboring_relation, privacy_unit)
            left, newest = balance.remaining_event(self.name)
            after = self._after(left, event)
            entry = balance.charge(
                event, note=note or newest.note, run=run or newest.run, reservation=self.name, left=after
            )
        return entry_charge(entry)

    def reserve(
        self,
        event: Event,
        *,
        note: str = "",  # noqa: ARG002
        run: str = "",  # noqa: ARG002
        neighboring_relation: NeighboringRelation | None = None,
        privacy_unit: PrivacyUnit | None = None,
    ) -> "Reservation":
        """A handle on this very reservation for a part of its plan, once `event` is known to be left in it.

        Closing the part gives nothing back: the whole does.
        """
        self.check_charge(event, neighboring_relation=neighboring_relation, privacy_unit=privacy_unit)
        return replace(self, closes=False)

    def check_charge(
        self,
        event: Event,
        *,
        neighboring_relation: NeighboringRelation | None = None,
        privacy_unit: PrivacyUnit | None = None,
    ) -> None:
        """Raise what `charge` would raise now, and write nothing."""
        with read_transaction(self.url, self.account) as page:
            balance = AccountState.of(page)
            balance.budget.check_relation_and_unit(neighboring_relation, privacy_unit)
            self._after(balance.remaining_event(self.name)[0], event)

    def remaining_event(self) -> Event:
        """What can still be drawn."""
        with read_transaction(self.url, self.account) as page:
            return compose_counts(AccountState.of(page).remaining_event(self.name)[0])

    def close(self) -> None:
        """Give back what was not drawn. A second time does nothing."""
        with write_transaction(self.url, self.account) as page:
            balance = AccountState.of(page)
            left, newest = balance.remaining_event(self.name)
            if left:
                balance.release(left, reservation=self.name, note=newest.note, run=newest.run)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.closes:
            self.close()

    def _after(self, left: dict[Event, int], event: Event) -> dict[Event, int]:
        after = subtract_counts(left, event_counts(event))
        if after is None:
            raise BudgetExceeded(
                f"the charge must be a part of what is left of reservation {self.name}, got something else or more. "
                "Nothing was charged and no record was read. Reserve what the run will do, or charge the account."
            )
        return after


# ----------------------------------------------------------------------------------------------------------------------
# The account of one dataset: what may be spent on it, what was, and what is left.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Remaining:
    """What is left of an account's budget, after charges and open reservations.

    Args:
        amount: ≥ 0. As ρ: a Gaussian of noise multiplier √(1/2ρ) or more still fits. As ε: what is added composes
            with the rest, so that an event of more than that may fit.
        measure: ``ρ`` under the filters ``renyi`` and ``zcdp``; ``ε`` under ``pld``, and when δ is 0.
        fraction: what is left of the whole, in [0, 1].
        open_reservations: how many reservations are open.
    """

    amount: float
    measure: str
    fraction: float
    open_reservations: int


@dataclass(frozen=True)
class Account:
    """A handle on one dataset's account: small, frozen, picklable, the same in every process.

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
        >>> charge.seq, round(account.spent().epsilon, 2), account.remaining().fraction > 0.7
        (2, 0.34, True)
        >>> folder.cleanup()
    """

    url: str
    name: str

    def __repr__(self) -> str:
        return f"Account(url={redact_password(self.url)!r}, name={self.name!r})"

    # --- spending ------------------------------------------------------------------------------------------------

    def charge(
        self,
        event: Event,
        *,
        note: str = "",
        run: str = "",
        neighboring_relation: NeighboringRelation | None = None,
        privacy_unit: PrivacyUnit | None = None,
    ) -> Charge:
        """Write down that `event` is about to happen. Call it before the data are read.

        Args:
            event: what will be done.
            note: what for. It is kept for ever: no values of records.
            run: the run's name.
            neighboring_relation: for which `event` holds; the account's when None.
            privacy_unit: for which `event` holds; the account's when None.

        Raises:
            BudgetExceeded: it does not fit what is left, or the account's events had to be reserved ahead.
            InvalidArgument: `neighboring_relation` or `privacy_unit` are not the account's.
            UnsupportedEvent: the account's policy has no price for the event.
        """
        with write_transaction(self.url, self.name) as page:
            balance = AccountState.of(page)
            balance.budget.check_relation_and_unit(neighboring_relation, privacy_unit)
            self._require(balance, event)
            return entry_charge(balance.charge(event, note=note, run=run))

    def reserve(
        self,
        event: Event,
        *,
        note: str = "",
        run: str = "",
        neighboring_relation: NeighboringRelation | None = None,
        privacy_unit: PrivacyUnit | None = None,
    ) -> Reservation:
        """Set the whole of a planned run aside, to be drawn piece by piece; what is not drawn is given back at the end.

        Args and errors are those of `charge`.
        """
        with write_transaction(self.url, self.name) as page:
            balance = AccountState.of(page)
            balance.budget.check_relation_and_unit(neighboring_relation, privacy_unit)
            self._require(balance, event)
            name = uuid.uuid4().hex[:12]
            balance.reserve(event, reservation=name, note=note, run=run)
        return Reservation(url=self.url, account=self.name, name=name)

    def check_charge(
        self,
        event: Event,
        *,
        neighboring_relation: NeighboringRelation | None = None,
        privacy_unit: PrivacyUnit | None = None,
    ) -> None:
        """Raise what `charge` would raise now, and write nothing."""
        with read_transaction(self.url, self.name) as page:
            balance = AccountState.of(page)
            balance.budget.check_relation_and_unit(neighboring_relation, privacy_unit)
            self._require(balance, event)

    def _require(self, balance: AccountState, event: Event) -> None:
        budget = balance.budget
        if not budget.adaptive and balance.has_charges and event_counts(event):
            raise BudgetExceeded(
                f"account {self.name!r} must have all its events reserved before the first charge (policy 'pld'), got "
                "a new one after it. Nothing was charged. Reserve the whole plan at the start, or declare the account "
                "with the policy 'renyi', which lets events be chosen as you go."
            )
        if not balance.admits(event):
            left = round_down(balance.remaining_epsilon())
            raise BudgetExceeded(
                f"the charge must fit what is left of account {self.name!r}, ε = {left:.3g} of {budget.epsilon:g} at "
                f"δ = {budget.delta:g} (policy {budget.policy!r}), got one{_cost_of(event, budget)}. Nothing was "
                f"charged and no record was read. {balance.advice(event, left)}; `sordino ledger show` says what is "
                "left."
            )

    # --- looking -------------------------------------------------------------------------------------------------

    def budget(self) -> AccountBudget:
        """What was declared."""
        with read_transaction(self.url, self.name) as page:
            return AccountState.of(page).budget

    def spent(self) -> Guarantee:
        """(ε, δ) of all charges so far, composed as events, for the account's unit and relation.

        Under the policies ``renyi`` and ``zcdp`` the number is a reading: had all charges been fixed in advance, they
        would be (ε, δ)-private. What is proven for charges that were chosen in the light of results is the declared
        budget, and the caveat says so.

        Raises:
            UnsupportedEvent: no accountant can compose these events.
        """
        with read_transaction(self.url, self.name) as page:
            balance = AccountState.of(page)
            budget, charged = balance.budget, balance.charged()
        answer = PLDPolicy(budget=budget, leaves=charged).interval()
        caveats = ()
        if budget.adaptive:
            proven = f"(ε = {format_upper_bound(budget.epsilon)}, δ = {budget.delta:g})"
            caveats = (f"for events chosen in the light of earlier results the proven guarantee is {proven}",)
        return Guarantee(
            epsilon=answer.upper,
            delta=budget.delta,
            neighboring_relation=budget.neighboring_relation,
            privacy_unit=budget.privacy_unit,
            accountant=answer.accountant,
            sampler="as in each charge",
            caveats=caveats,
        )

    def remaining(self) -> Remaining:
        """What is left after charges and open reservations."""
        with read_transaction(self.url, self.name) as page:
            balance = AccountState.of(page)
            left, reserved = balance.remaining(), len(balance.open())
        return Remaining(amount=left.amount, measure=left.measure, fraction=left.fraction, open_reservations=reserved)

    def remaining_epsilon(self) -> float:
        """ε, at the account's δ, of the largest event that would still fit: a Gaussian one, a pure one where δ is 0.

        Under ``pld`` the ε that is left; what is added composes with the rest, so that more than that may fit.
        """
        with read_transaction(self.url, self.name) as page:
            return round_down(AccountState.of(page).remaining_epsilon())

    def remaining_delta(self) -> float:
        """The largest δ of its own that an event may still have: what is kept for such events, less what they spent.

        That is δ/8 at first under ``renyi``, nothing under ``zcdp``, and δ itself under ``pld``.
        """
        from sordino.accounting.filters import RDPOrdersFilter

        with read_transaction(self.url, self.name) as page:
            balance = AccountState.of(page)
            rule = make_filter(balance.budget)
            if isinstance(rule, RDPOrdersFilter):
                return rule.remaining_delta(balance.committed(rule))
            return balance.budget.delta if rule is None else 0.0

    def history(self) -> list[LedgerEntry]:
        """All lines of the account, oldest first."""
        with read_transaction(self.url, self.name) as page:
            AccountState.of(page)
            return page.entries()

    def epsilon_of(self, event: Event) -> float | None:
        """ε of `event` by itself at the account's δ, an upper bound; None where it has no ε.

        Values of several events do not add up to what they cost together: see `remaining`.
        """
        return _epsilon_alone(event, self.budget())

    def event(self) -> Event:
        """Everything charged so far, as one event."""
        with read_transaction(self.url, self.name) as page:
            return compose_counts(AccountState.of(page).charged())

    def reservations(self) -> dict[str, Event]:
        """Open reservations and what is left of each."""
        with read_transaction(self.url, self.name) as page:
            return {name: compose_counts(left) for name, left in AccountState.of(page).open().items()}

    # --- changing ------------------------------------------------------------------------------------------------

    def reservation(self, name: str) -> Reservation:
        """The handle of a reservation that was made before, for instance by a run that crashed."""
        with read_transaction(self.url, self.name) as page:
            if page.last_of(name) is None:
                raise InvalidArgument(f"reservation must be one of account {self.name!r}, got {name!r}. See history().")
        return Reservation(url=self.url, account=self.name, name=name)

    def change_budget(self, *, epsilon: float | None = None, delta: float | None = None, note: str) -> AccountBudget:
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
        with write_transaction(self.url, self.name) as page:
            balance = AccountState.of(page)
            old = balance.budget
            new = replace(
                old, epsilon=old.epsilon if epsilon is None else epsilon, delta=old.delta if delta is None else delta
            )
            if new.policy == "renyi" and (new.delta == 0) != (old.delta == 0):
                raise InvalidArgument("delta must stay zero or stay above zero, got a change. Declare a new account.")
            if not balance.with_budget(new).admits(compose_counts({})):
                raise BudgetExceeded(
                    f"the budget of account {self.name!r} must cover what is charged and reserved, got less. Nothing "
                    "was changed. Release unused reservations, or choose more."
                )
            balance.change(new, note=note)
            return new


# ----------------------------------------------------------------------------------------------------------------------
# What a piece of work would charge, found by running it up to its charge and no further.
# ----------------------------------------------------------------------------------------------------------------------


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
    work: Callable[[Account], object], account: Account | Reservation | None = None
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
        """As `charge`: anyone who asks first would charge next."""
        self.charge(event, neighboring_relation=neighboring_relation, privacy_unit=privacy_unit)

    def budget(self) -> AccountBudget | None:
        """What the account declares, by whose policy a search prices its runs; None without one."""
        return self._account.budget() if isinstance(self._account, Account) else None

    def remaining_delta(self) -> float:
        """What the account has for events with a δ of their own."""
        return self._account.remaining_delta() if isinstance(self._account, Account) else 0.0
