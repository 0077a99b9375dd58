"""The answer of every accountant: an interval that contains the truth (floor 1)."""

import math
from dataclasses import dataclass

from sordino.errors import AccountingError

__all__ = ["Interval"]


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A range that contains the true ε (or δ) of an event; `upper` is the number to report.

    An accountant that proves an upper bound only, such as Rényi accounting, gives `lower` = 0.

    Args:
        lower: nothing smaller than this can be the truth, ≥ 0.
        upper: nothing larger than this can be the truth; ∞ when there is no guarantee.
        accountant: name of the accountant that proved both ends.

    Raises:
        AccountingError: an end is NaN or negative, or the ends are in the wrong order.

    Example:
        >>> Interval(lower=0.9, upper=1.0, accountant="contour").width < 0.11
        True
    """

    lower: float
    upper: float
    accountant: str

    def __post_init__(self) -> None:
        if math.isnan(self.lower) or math.isnan(self.upper) or not 0 <= self.lower <= self.upper:
            raise AccountingError(
                f"interval of {self.accountant} must have 0 ≤ lower ≤ upper, got [{self.lower!r}, {self.upper!r}]. "
                "Use another accountant and report the event."
            )

    @property
    def width(self) -> float:
        """`upper` − `lower`, the certified error."""
        return 0.0 if self.lower == self.upper else self.upper - self.lower
