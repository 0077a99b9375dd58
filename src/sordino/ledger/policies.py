"""The rules by which an account grants or refuses: a privacy filter, or the composition of what is fixed ahead.

The filters are those of `sordino.accounting.filters`; the proofs are in ``docs/proofs/ledger.md``.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING

from sordino import checks
from sordino.definitions import NeighboringRelation, PrivacyUnit
from sordino.errors import InvalidArgument, LedgerError
from sordino.events import Event, compose_counts

if TYPE_CHECKING:
    from sordino.accounting import Interval
    from sordino.accounting.base import PrivacyFilter, RemainingAmount

__all__ = ["AccountBudget", "PLDPolicy", "POLICIES", "make_filter"]


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
        if (
            neighboring_relation is not None
            and NeighboringRelation(neighboring_relation) is not self.neighboring_relation
        ):
            raise InvalidArgument(
                f"neighboring_relation must be {self.neighboring_relation.value}, as the account was declared, got "
                f"{NeighboringRelation(neighboring_relation).value}: their costs can't be added. Train for the "
                f"account's relation, "
                "or declare an account of its own for each relation and state both."
            )
        if privacy_unit is not None and PrivacyUnit(privacy_unit) is not self.privacy_unit:
            raise InvalidArgument(
                f"privacy_unit must be {self.privacy_unit.value}, as the account was declared, got "
                f"{PrivacyUnit(privacy_unit).value}: their "
                "costs can't be added. Train for the account's unit, or declare an account of its own for each unit."
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


def make_filter(budget: AccountBudget) -> "PrivacyFilter | None":
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

    def remaining(self) -> "RemainingAmount":
        """The ε that is left: what is added composes with the rest, so more than that much may fit."""
        from sordino.accounting.base import RemainingAmount

        rest = max(0.0, self.budget.epsilon - self.epsilon())
        return RemainingAmount(rest, "ε", rest / self.budget.epsilon)
