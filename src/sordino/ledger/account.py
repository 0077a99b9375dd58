"""The account of one dataset: its budget, what may be spent on it by which rule, what was, and what is left.

The filters are those of `sordino.accounting.filters`; the proofs are in ``docs/proofs/ledger.md``.
"""

import json
import math
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NoReturn, Self

from sordino import checks
from sordino.accounting.base import Costs, PrivacyFilter, RemainingAmount, add_costs, round_down
from sordino.definitions import Guarantee, NeighboringRelation, PrivacyUnit, format_upper_bound
from sordino.errors import BudgetExceeded, InvalidArgument, LedgerError, SordinoError
from sordino.events import Event, Gaussian, compose_counts, event_counts, subtract_counts, to_dict
from sordino.ledger.store import (
    AccountTransaction,
    LedgerEntry,
    changed_line,
    read_transaction,
    redact_password,
    write_transaction,
)

if TYPE_CHECKING:
    from sordino.accounting import Interval


# ----------------------------------------------------------------------------------------------------------------------
# What may be spent on one dataset, as it is written in the ledger.
# ----------------------------------------------------------------------------------------------------------------------


POLICIES = ("renyi", "zcdp", "pld")


@dataclass(frozen=True, kw_only=True)
class AccountBudget:
    """The declared limit of an account.

    Args:
        epsilon: ε > 0.
        delta: δ in [0, 1); 0 only with the policy ``renyi``, for pure events.
        neighboring_relation: which datasets count as neighbors; every charge must be made for the same.
        privacy_unit: whose contribution is protected; every charge must be made for the same.
        policy: ``renyi`` or ``zcdp``, filters for events that are chosen as one goes; or ``pld``, exact composition of
            events that are all reserved before the first charge.
        orders: λ = Rényi order − 1 > 0 of the filter ``renyi``, fixed by the first declaration.
    """

    epsilon: float
    delta: float
    neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE
    privacy_unit: PrivacyUnit = PrivacyUnit.RECORD
    policy: str = "renyi"
    orders: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        checks.positive(epsilon=self.epsilon)
        checks.one_of(POLICIES, policy=self.policy, hint="See `sordino explain ledger`.")
        checks.probability(
            zero=self.policy == "renyi", one=False, delta=self.delta, hint="Choose one below 1 / number of records."
        )
        object.__setattr__(self, "neighboring_relation", NeighboringRelation(self.neighboring_relation))
        if self.privacy_unit not in list(PrivacyUnit):
            raise InvalidArgument(
                f"privacy_unit must be one of {', '.join(PrivacyUnit)}, got {self.privacy_unit!r}. Use PrivacyUnit."
            )
        object.__setattr__(self, "privacy_unit", PrivacyUnit(self.privacy_unit))
        object.__setattr__(self, "orders", tuple(checks.positive(orders=order) for order in self.orders))
        if self.orders and (self.policy != "renyi" or self.delta == 0):
            raise InvalidArgument(f"orders must be left out under the policy {self.policy!r} or without δ. Drop them.")
        if self.policy == "renyi" and not self.orders:
            from sordino.accounting.filters import best_orders

            object.__setattr__(self, "orders", best_orders(self.epsilon, self.delta))

    @property
    def adaptive(self) -> bool:
        """Whether events may be chosen in the light of earlier results."""
        return self.policy != "pld"

    def check_relation_and_unit(
        self, neighboring_relation: NeighboringRelation | None, privacy_unit: PrivacyUnit | None
    ) -> None:
        """Refuse a charge that speaks of other neighbors or of another unit.

        Raises:
            InvalidArgument: they differ.
        """
        for name, given, own, more in (
            ("neighboring_relation", neighboring_relation, self.neighboring_relation, " and state both"),
            ("privacy_unit", privacy_unit, self.privacy_unit, ""),
        ):
            if given is not None and type(own)(given) is not own:
                word = name.rpartition("_")[2]
                raise InvalidArgument(
                    f"{name} must be {own.value}, as the account was declared, got {type(own)(given).value}: their "
                    f"costs can't be added. Train for the account's {word}, or declare an account of its own for each "
                    f"{word}{more}."
                )

    def to_dict(self) -> dict[str, object]:
        """As plain JSON types."""
        body = asdict(self)
        return {
            **body,
            "neighboring_relation": self.neighboring_relation.value,
            "privacy_unit": self.privacy_unit.value,
            "orders": list(self.orders),
        }

    @classmethod
    def from_dict(cls, body: object) -> "AccountBudget":
        """What `to_dict` wrote."""
        if not isinstance(body, dict) or set(body) != {item.name for item in fields(cls)}:
            raise LedgerError("the ledger's budget must have its own fields, got others. Run `sordino ledger verify`.")
        return cls(**{**body, "orders": tuple(body["orders"])})


# ----------------------------------------------------------------------------------------------------------------------
# The rules by which an account grants or refuses: a privacy filter, or the composition of what is fixed ahead.
# ----------------------------------------------------------------------------------------------------------------------


def make_filter(budget: AccountBudget) -> PrivacyFilter | None:
    """The budget's filter; None under ``pld``."""
    from sordino.accounting.filters import RDPOrdersFilter, ZCDPFilter

    if budget.policy == "pld":
        return None
    if budget.policy == "zcdp":
        return ZCDPFilter(epsilon=budget.epsilon, delta=budget.delta, neighboring_relation=budget.neighboring_relation)
    return RDPOrdersFilter(
        epsilon=budget.epsilon,
        delta=budget.delta,
        orders=budget.orders,
        neighboring_relation=budget.neighboring_relation,
    )


@dataclass(frozen=True, kw_only=True)
class PLDPolicy:
    """All events of an account together, fixed before the first charge: the policy ``pld``.

    Guarantee:
        In whatever order the events are drawn, and whatever is left out, in the light of earlier results: all charges
        together are (ε, δ)-private. Theorem 3 of ``docs/proofs/ledger.md``.
    """

    budget: AccountBudget
    leaves: Mapping[Event, int]

    def fits(self) -> bool:
        """Whether ε of everything is within the budget."""
        return self.epsilon() <= self.budget.epsilon

    def epsilon(self) -> float:
        """ε of everything at the account's δ."""
        return self.interval().upper

    def interval(self) -> "Interval":
        """The interval that contains ε, with the accountant's name."""
        from sordino.accounting import epsilon

        return epsilon(
            compose_counts(self.leaves), self.budget.delta, neighboring_relation=self.budget.neighboring_relation
        )

    def remaining(self) -> RemainingAmount:
        """The ε that is left: what is added composes with the rest, so more than that much may fit."""
        rest = max(0.0, self.budget.epsilon - self.epsilon())
        return RemainingAmount(rest, "ε", rest / self.budget.epsilon)


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

    # --- asking --------------------------------------------------------------------------------------------------

    def open(self) -> dict[str, Leaves]:
        """Open reservations and what is left of each."""
        left = {entry.reservation: event_counts(entry.left) for entry in self.page.reservations()}
        return {name: leaves for name, leaves in left.items() if leaves}

    def remaining_event(self, reservation: str) -> tuple[Leaves, LedgerEntry]:
        """What is left of a reservation, and its newest line."""
        newest = self.page.last_of(reservation)
        if newest is None:
            raise InvalidArgument(f"reservation must be one of this account's, got {reservation!r}. See its history.")
        return event_counts(newest.left), newest

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
        rule, leaves = make_filter(self.budget), event_counts(event)
        totals = self.totals if rule is None else add_costs(self.totals, rule.total_costs(leaves))
        after = replace(self, totals=totals, has_charges=self.has_charges or bool(leaves))
        return after._append("charge", event=event, left=left, note=note, run=run, reservation=reservation)

    def reserve(self, event: Event, *, reservation: str, note: str, run: str) -> LedgerEntry:
        """Write a reservation. Whether it fits was asked before."""
        left = event_counts(event)
        return self._append("reserve", event=event, left=left, note=note, run=run, reservation=reservation)

    def release(self, left: Leaves, *, reservation: str, note: str, run: str) -> LedgerEntry:
        """Write that the rest of a reservation is given back."""
        event = compose_counts(left)
        return self._append("release", event=event, left={}, note=note, run=run, reservation=reservation)

    def change(self, budget: AccountBudget, *, note: str) -> LedgerEntry:
        """Write another budget."""
        after = replace(self, budget_at=self.last.seq + 1)
        return after._append("budget", budget=budget, note=note)

    def _append(
        self,
        kind: str,
        *,
        event: Event | None = None,
        left: Leaves | None = None,
        budget: AccountBudget | None = None,
        **words: str,
    ) -> LedgerEntry:
        """Write a line with this state behind the last one, and with its note, run and reservation."""
        state: dict[str, Any] = {name: getattr(self, name) for name in ("budget_at", "totals", "has_charges")}
        body = entry_body(**state, budget=budget, event=event, left=left)
        return self.page.append(self.last, kind=kind, body=body, **words)


@contextmanager
def _opened(
    handle: "Account | Reservation",
    neighboring_relation: NeighboringRelation | None = None,
    privacy_unit: PrivacyUnit | None = None,
    *,
    writes: bool = False,
) -> Iterator[AccountState]:
    """The account's state inside a transaction, once relation and unit are known to be its own."""
    begin = write_transaction if writes else read_transaction
    with begin(handle.url, handle.account if isinstance(handle, Reservation) else handle.name) as page:
        state = AccountState.of(page)
        state.budget.check_relation_and_unit(neighboring_relation, privacy_unit)
        yield state


def entry_body(
    *,
    budget_at: int,
    totals: Costs,
    has_charges: bool,
    budget: AccountBudget | None = None,
    event: Event | None = None,
    left: Mapping[Event, int] | None = None,
) -> str:
    """The JSON of a line."""
    # JSON has no ∞: an order at which an event has no finite price stays out of use.
    numbers = ["inf" if math.isinf(value) else value for value in totals]
    body: dict[str, object] = {"budget_at": budget_at, "totals": numbers, "has_charges": has_charges}
    if budget is not None:
        body["budget"] = budget.to_dict()
    if event is not None:
        body["event"] = to_dict(event)
    if left is not None:
        body["left"] = to_dict(compose_counts(left))
    return json.dumps(body, sort_keys=True, allow_nan=False)


def _merged(bags: list[Leaves]) -> Leaves:
    total: Counter[Event] = Counter()
    for bag in bags:
        total.update(bag)
    return dict(total)


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
        with _opened(self, neighboring_relation, privacy_unit, writes=True) as balance:
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
        with _opened(self, neighboring_relation, privacy_unit) as balance:
            self._after(balance.remaining_event(self.name)[0], event)

    def remaining_event(self) -> Event:
        """What can still be drawn."""
        with _opened(self) as balance:
            return compose_counts(balance.remaining_event(self.name)[0])

    def close(self) -> None:
        """Give back what was not drawn. A second time does nothing."""
        with _opened(self, writes=True) as balance:
            left, newest = balance.remaining_event(self.name)
            if left:
                balance.release(left, reservation=self.name, note=newest.note, run=newest.run)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.closes:
            self.close()

    def _after(self, left: Leaves, event: Event) -> Leaves:
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
        with _opened(self, neighboring_relation, privacy_unit, writes=True) as balance:
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
        with _opened(self, neighboring_relation, privacy_unit, writes=True) as balance:
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
        with _opened(self, neighboring_relation, privacy_unit) as balance:
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
        with _opened(self) as balance:
            return balance.budget

    def spent(self) -> Guarantee:
        """(ε, δ) of all charges so far, composed as events, for the account's unit and relation.

        Under the policies ``renyi`` and ``zcdp`` the number is a reading: had all charges been fixed in advance, they
        would be (ε, δ)-private. What is proven for charges that were chosen in the light of results is the declared
        budget, and the caveat says so.

        Raises:
            UnsupportedEvent: no accountant can compose these events.
        """
        with _opened(self) as balance:
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
        with _opened(self) as balance:
            left, reserved = balance.remaining(), len(balance.open())
        return Remaining(amount=left.amount, measure=left.measure, fraction=left.fraction, open_reservations=reserved)

    def remaining_epsilon(self) -> float:
        """ε, at the account's δ, of the largest event that would still fit: a Gaussian one, a pure one where δ is 0.

        Under ``pld`` the ε that is left; what is added composes with the rest, so that more than that may fit.
        """
        with _opened(self) as balance:
            return round_down(balance.remaining_epsilon())

    def remaining_delta(self) -> float:
        """The largest δ of its own that an event may still have: what is kept for such events, less what they spent.

        That is δ/8 at first under ``renyi``, nothing under ``zcdp``, and δ itself under ``pld``.
        """
        from sordino.accounting.filters import RDPOrdersFilter

        with _opened(self) as balance:
            rule = make_filter(balance.budget)
            if isinstance(rule, RDPOrdersFilter):
                return rule.remaining_delta(balance.committed(rule))
            return balance.budget.delta if rule is None else 0.0

    def history(self) -> list[LedgerEntry]:
        """All lines of the account, oldest first."""
        with _opened(self) as balance:
            return balance.page.entries()

    def epsilon_of(self, event: Event) -> float | None:
        """ε of `event` by itself at the account's δ, an upper bound; None where it has no ε.

        Values of several events do not add up to what they cost together: see `remaining`.
        """
        return _epsilon_alone(event, self.budget())

    def event(self) -> Event:
        """Everything charged so far, as one event."""
        with _opened(self) as balance:
            return compose_counts(balance.charged())

    def reservations(self) -> dict[str, Event]:
        """Open reservations and what is left of each."""
        with _opened(self) as balance:
            return {name: compose_counts(left) for name, left in balance.open().items()}

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
        with _opened(self, writes=True) as balance:
            old = balance.budget
            new = replace(
                old, epsilon=old.epsilon if epsilon is None else epsilon, delta=old.delta if delta is None else delta
            )
            if new.policy == "renyi" and (new.delta == 0) != (old.delta == 0):
                raise InvalidArgument("delta must stay zero or stay above zero, got a change. Declare a new account.")
            if not replace(balance, budget=new).admits(compose_counts({})):
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
