"""The accountants by name (floor 1), in the order in which ``auto`` asks them."""

from sordino import checks
from sordino.accounting.accountant import Accountant
from sordino.accounting.accountants import ClosedForm, Contour
from sordino.accounting.composition_theorems import BasicComposition, OptimalComposition
from sordino.accounting.concentrated import TruncatedConcentrated, ZeroConcentrated
from sordino.accounting.gdp import GaussianDP
from sordino.accounting.moments import Moments32
from sordino.accounting.pld import Pld
from sordino.accounting.private_selection import SelectionProfile
from sordino.accounting.renyi import Renyi
from sordino.accounting.strong import AdvancedComposition

__all__ = ["ACCOUNTANTS", "accountant_named"]

ACCOUNTANTS: tuple[Accountant, ...] = (
    ClosedForm(),
    Contour(),
    Pld(),
    Renyi(),
    SelectionProfile(),
    ZeroConcentrated(),
    GaussianDP(),
    OptimalComposition(),
    AdvancedComposition(),
    BasicComposition(),
    Moments32(),
    TruncatedConcentrated(),
)


def accountant_named(name: str) -> Accountant:
    """The accountant with this name."""
    checks.one_of([known.name for known in ACCOUNTANTS], accountant=name)
    return next(known for known in ACCOUNTANTS if known.name == name)
