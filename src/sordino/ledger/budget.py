"""What may be spent on one data set (floor 2), as it is written in the ledger."""

import math
from dataclasses import asdict, dataclass, fields

from sordino import checks
from sordino.definitions import NeighboringRelation, PrivacyUnit
from sordino.errors import InvalidArgument, LedgerError

__all__ = ["POLICIES", "Budget"]

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
        orders: λ of the Rényi filter, fixed by the first declaration.
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
        object.__setattr__(self, "orders", tuple(float(order) for order in self.orders))
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


# Around the order that is best for Gaussian noise: where other noise, and sampling at small rates, is at its best.
_SPREAD = (1.0, 0.7, 0.83, 1.5, 3.0)


def _orders(epsilon: float, delta: float) -> tuple[float, ...]:
    """λ = order − 1 of the filter: the zero of λK'(λ) − K(λ) + log δ + log(λ+1) for zCDP at this budget, and around.

    Any positive numbers would be sound; these only decide how much of the budget can be used.
    """
    if delta == 0:
        return ()
    from sordino.accounting import largest_rho

    rho = largest_rho(epsilon, delta / 2)
    low, high = 1e-9, 1e12
    for _ in range(200):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if middle**2 * rho + math.log(delta / 2) + math.log1p(middle) < 0 else (low, middle)
    return tuple(float(f"{low * factor:.6g}") for factor in _SPREAD)
