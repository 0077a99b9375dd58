"""What may be spent on one data set (floor 2), as it is written in the ledger."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields

from sordino import checks
from sordino.definitions import NeighboringRelation, PrivacyUnit
from sordino.errors import InvalidArgument, LedgerError

__all__ = ["Budget", "POLICIES"]

POLICIES = ("renyi", "zcdp", "pld")


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The declared limit of an account.

    Args:
        epsilon: ε > 0.
        delta: δ in [0, 1); 0 only with the policy ``renyi``, for pure events.
        relation: which data sets count as neighbours; every charge must be made for the same.
        unit: whose contribution is protected; every charge must be made for the same.
        policy: ``renyi`` or ``zcdp``, filters for events that are chosen as one goes; or ``pld``, exact composition of
            events that are all reserved before the first charge.
        orders: λ = Rényi order − 1 > 0 of the filter ``renyi``, fixed by the first declaration.
    """

    epsilon: float
    delta: float
    relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE
    unit: PrivacyUnit = PrivacyUnit.EXAMPLE
    policy: str = "renyi"
    orders: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        checks.positive(epsilon=self.epsilon)
        checks.one_of(POLICIES, policy=self.policy, hint="See docs/ledger.md.")
        checks.probability(
            zero=self.policy == "renyi", one=False, delta=self.delta, hint="Choose one below 1 / number of records."
        )
        object.__setattr__(self, "relation", NeighboringRelation(self.relation))
        if self.unit not in list(PrivacyUnit):
            raise InvalidArgument(f"unit must be one of {', '.join(PrivacyUnit)}, got {self.unit!r}. Use PrivacyUnit.")
        object.__setattr__(self, "unit", PrivacyUnit(self.unit))
        object.__setattr__(self, "orders", tuple(checks.positive(orders=order) for order in self.orders))
        if self.orders and (self.policy != "renyi" or self.delta == 0):
            raise InvalidArgument(f"orders must be left out under the policy {self.policy!r} or without δ. Drop them.")
        if self.policy == "renyi" and not self.orders:
            object.__setattr__(self, "orders", _orders(self.epsilon, self.delta))

    @property
    def adaptive(self) -> bool:
        """Whether events may be chosen in the light of earlier results."""
        return self.policy != "pld"

    def agree(self, relation: NeighboringRelation | None, unit: PrivacyUnit | None) -> None:
        """Refuse a charge that speaks of other neighbours or of another unit.

        Raises:
            InvalidArgument: they differ.
        """
        if relation is not None and NeighboringRelation(relation) is not self.relation:
            raise InvalidArgument(
                f"relation must be {self.relation.value}, as the account was declared, got "
                f"{NeighboringRelation(relation).value}: their costs can't be added. Train for the account's relation, "
                "or declare an account of its own for each relation and state both."
            )
        if unit is not None and PrivacyUnit(unit) is not self.unit:
            raise InvalidArgument(
                f"unit must be {self.unit.value}, as the account was declared, got {PrivacyUnit(unit).value}: their "
                "costs can't be added. Train for the account's unit, or declare an account of its own for each unit."
            )

    def to_dict(self) -> dict[str, object]:
        """As plain JSON types."""
        body = asdict(self)
        return {**body, "relation": self.relation.value, "unit": self.unit.value, "orders": list(self.orders)}

    @classmethod
    def from_dict(cls, body: object) -> "Budget":
        """What `to_dict` wrote."""
        if not isinstance(body, dict) or set(body) != {item.name for item in fields(cls)}:
            raise LedgerError("the ledger's budget must have its own fields, got others. Run `sordino ledger verify`.")
        return cls(**{**body, "orders": tuple(body["orders"])})


def _orders(epsilon: float, delta: float) -> tuple[float, ...]:
    """λ = order − 1 of the filter. Any numbers > 0 are sound; these decide how much of the budget can be used.

    First the best order for Gaussian noise: the zero of λK'(λ) − K(λ) + log δ + log(λ+1) for zCDP at this budget. Then
    two just above the least order that leaves room, best for small sampling rates and little noise; last a large one.
    """
    if delta == 0:
        return ()
    from sordino.accounting import largest_rho

    rho = largest_rho(epsilon, delta / 2)
    gaussian = _crossing(lambda lam: lam**2 * rho + math.log(delta / 2) + math.log1p(lam))
    least = _crossing(lambda lam: lam * epsilon + math.log(delta / 4) + lam * math.log1p(1 / lam) + math.log1p(lam))
    return tuple(float(f"{lam:.6g}") for lam in (gaussian, 1.25 * least, 1.6 * least, 2.5 * gaussian))


def _crossing(growing: Callable[[float], float]) -> float:
    low, high = 1e-9, 1e12
    for _ in range(200):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if growing(middle) < 0 else (low, middle)
    return low
