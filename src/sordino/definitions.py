"""What is promised: the neighboring relation, the unit, and the guarantee that names both.

Example:
    >>> from sordino.definitions import Guarantee
    >>> claim = Guarantee(epsilon=1.0, delta=1e-5, accountant="contour", sampler="Poisson sampling")
    >>> print(claim.describe()[:58])
    (ε = 1.00, δ = 1e-05)-differentially private: unit one rec
"""

import math
from dataclasses import dataclass, field
from enum import StrEnum

from sordino import checks
from sordino.errors import InvalidArgument

__all__ = ["FIXED_SEED_CAVEAT", "Guarantee", "NeighboringRelation", "PrivacyUnit", "format_upper_bound"]

FIXED_SEED_CAVEAT = "fixed seed: not for release"
"""The caveat of all that was made with a chosen seed: no guarantee against anyone who knows it."""


class NeighboringRelation(StrEnum):
    """Which pairs of datasets count as neighbors.

    `REPLACE_SPECIAL` is the zero-out relation: one record is exchanged for a record that contributes
    nothing (Kairouz et al. 2021, "Practical and private (deep) learning without sampling or shuffling").
    """

    ADD_OR_REMOVE_ONE = "add_or_remove_one"
    REPLACE_ONE = "replace_one"
    REPLACE_SPECIAL = "replace_special"

    @classmethod
    def _missing_(cls, value: object) -> "NeighboringRelation":
        raise InvalidArgument(
            f"neighboring_relation must be one of {', '.join(cls)}, got {value!r}. Use NeighboringRelation."
        )

    @property
    def sensitivity_factor(self) -> float:
        """How far one unit moves a sum whose terms have norm ≤ 1: 2 under replace-one, otherwise 1."""
        return 2.0 if self is NeighboringRelation.REPLACE_ONE else 1.0

    def describe(self) -> str:
        """The relation as it is written in a guarantee."""
        return {
            NeighboringRelation.ADD_OR_REMOVE_ONE: "add or remove one",
            NeighboringRelation.REPLACE_ONE: "replace one",
            NeighboringRelation.REPLACE_SPECIAL: "zero out one",
        }[self]


class PrivacyUnit(StrEnum):
    """Whose contribution is protected as a whole."""

    RECORD = "record"
    USER = "user"
    CLIENT = "client"

    @classmethod
    def _missing_(cls, value: object) -> "PrivacyUnit | None":
        return cls.RECORD if value == "example" else None

    def describe(self) -> str:
        """The unit as it is written in a guarantee."""
        return f"one {self.value}"


def format_upper_bound(value: float, digits: int = 2) -> str:
    """`value` with `digits` decimals, never rounded below itself: a printed ε must not understate.

    Example:
        >>> format_upper_bound(1.001), format_upper_bound(1.0), format_upper_bound(float("inf"))
        ('1.01', '1.00', '∞')
    """
    if math.isinf(value):
        return "∞"
    text = f"{value:.{digits}f}"
    if float(text) < value:
        text = f"{float(text) + 10.0**-digits:.{digits}f}"
    return text


@dataclass(frozen=True, kw_only=True)
class Guarantee:
    """(ε, δ)-differential privacy with everything needed to read it.

    Args:
        epsilon: the upper end of the accountant's interval, ≥ 0; ∞ when the run is not private.
        delta: in [0, 1].
        neighboring_relation: the neighboring relation.
        privacy_unit: the privacy unit.
        accountant: name of the accountant that gave `epsilon`.
        sampler: how batches were drawn, in words.
        caveats: what weakens the statement (a fixed seed, no noise, …), in words.
    """

    epsilon: float
    delta: float
    accountant: str
    sampler: str
    neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE
    privacy_unit: PrivacyUnit = PrivacyUnit.RECORD
    caveats: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        if not math.isinf(self.epsilon):
            checks.non_negative(epsilon=self.epsilon)
        checks.probability(delta=self.delta)

    @property
    def is_private(self) -> bool:
        """Whether ε is finite and δ < 1."""
        return math.isfinite(self.epsilon) and self.delta < 1

    def describe(self) -> str:
        """One line with ε, δ, unit, relation, sampler, accountant and any caveats."""
        head = f"(ε = {format_upper_bound(self.epsilon)}, δ = {self.delta:g})"
        claim = f"{head}-differentially private" if self.is_private else f"{head}: NOT private"
        line = (
            f"{claim}: unit {self.privacy_unit.describe()}, neighbors {self.neighboring_relation.describe()}, "
            f"sampler {self.sampler}, accountant {self.accountant.replace('_', ' ')}"
        )
        return line + "".join(f"; {caveat}" for caveat in self.caveats)
