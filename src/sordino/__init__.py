"""sordino: differentially private machine learning on PyTorch.

The names below load what they need when they are first used: ``import sordino`` alone imports neither torch
nor numpy, so the parts that only count (accounting, the command line's `account` and `plan`) start at once.

Example:
    >>> import sordino
    >>> sordino.NeighboringRelation.ADD_OR_REMOVE_ONE.describe()
    'add or remove one'
"""

from typing import TYPE_CHECKING

from sordino.installation import lazy_names

if TYPE_CHECKING:
    from sordino import accounting, commands, data, estimators, events, recipes, report
    from sordino.definitions import Guarantee, NeighboringRelation, PrivacyUnit
    from sordino.description import describe
    from sordino.errors import BudgetExceeded, InvalidArgument, MissingDeclaration, PrivacyError, SordinoError
    from sordino.gradients import per_record
    from sordino.randomness import KeyedRNG
    from sordino.recipes.saved_model import load_model
    from sordino.runs import RunFolder
    from sordino.sampling import PoissonSampling
    from sordino.training.engine import PrivacyEngine
    from sordino.training.fit import FitResult, fit
    from sordino.training.plan import PerformanceOptions, Plan
    from sordino.training.step import PrivateStep
    from sordino.verification import verify

__version__ = "0.1.0"

__all__ = [
    "BudgetExceeded",
    "FitResult",
    "Guarantee",
    "InvalidArgument",
    "KeyedRNG",
    "MissingDeclaration",
    "NeighboringRelation",
    "PerformanceOptions",
    "Plan",
    "PoissonSampling",
    "PrivacyEngine",
    "PrivacyError",
    "PrivacyUnit",
    "PrivateStep",
    "RunFolder",
    "SordinoError",
    "__version__",
    "accounting",
    "commands",
    "data",
    "describe",
    "estimators",
    "events",
    "fit",
    "load_model",
    "per_record",
    "recipes",
    "report",
    "verify",
]

__getattr__, __dir__ = lazy_names(__name__)
