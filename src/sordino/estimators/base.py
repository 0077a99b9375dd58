"""What every private estimator shares (floor 4): declarations, randomness, and the bill.

Parameters are stored and nothing else happens before `fit`, as scikit-learn's `clone` expects. `fit` charges first and
reads records then; all that changes the guarantee is a parameter, so it is known before the data are.
"""

import os
import sys
from collections.abc import Callable, Sequence
from functools import wraps

import numpy as np
from sklearn.base import BaseEstimator

from sordino import accounting, checks
from sordino.definitions import FIXED_SEED, Guarantee, NeighboringRelation, PrivacyUnit
from sordino.errors import InvalidArgument
from sordino.estimators.intake import declared
from sordino.events import Event, compose
from sordino.ledger import Account, Reservation
from sordino.randomness import Randomness

__all__ = ["PrivateEstimator", "refuse_several"]


def _silent(method: Callable[..., object]) -> Callable[..., object]:
    """`method`, where no over- or underflow warns or raises, whatever ``np.seterr`` says: it would tell of records."""

    @wraps(method)
    def quietly(*args: object, **named: object) -> object:
        with np.errstate(all="ignore"):
            return method(*args, **named)

    return quietly


class PrivateEstimator(BaseEstimator):
    """Base of the estimators: scikit-learn's parameter handling, and a privacy budget.

    Attributes:
        privacy_: the `Guarantee` of everything that `fit` learned.
        events_: what `fit` did, one event a release.
    """

    epsilon: float | None
    delta: float | None
    random_state: int | None
    reproducible: bool
    ledger: Account | Reservation | None = None
    privacy_: Guarantee
    events_: tuple[Event, ...]

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        if "fit" in vars(cls):
            setattr(cls, "fit", _silent(vars(cls)["fit"]))  # noqa: B010 (an annotation would hide the subclasses' own)

    def _budget(self) -> tuple[float, float]:
        """(ε, δ) as declared; δ = 0 asks for pure privacy."""
        epsilon = checks.positive(epsilon=declared(self.epsilon, name="epsilon", meaning="the privacy budget"))
        delta = declared(self.delta, name="delta", meaning="well below 1 / number of records, or 0 for pure privacy")
        return epsilon, checks.probability(one=False, delta=delta)

    def _randomness(self) -> Randomness:
        """A fresh key for every fit; a chosen one only for runs that are marked as not private."""
        if self.random_state is None and self.reproducible:
            raise InvalidArgument("random_state must be an integer with reproducible=True, got None. Give one.")
        if self.random_state is not None and not self.reproducible:
            raise InvalidArgument(
                f"random_state must be None unless reproducible=True, got {self.random_state!r}. Whoever knows the "
                "seed can take the noise off."
            )
        return Randomness(seed=self.random_state, reproducible=self.reproducible)

    def _charge(
        self,
        events: Sequence[Event],
        *,
        relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE,
        sampler: str = "none",
        caveats: tuple[str, ...] = (),
    ) -> None:
        """Write down what is about to be spent: the one place where a fit is charged, before it reads a record."""
        refuse_several(type(self).__name__)
        epsilon, delta = self._budget()
        spent = accounting.epsilon(compose(list(events)), delta, relation=relation)
        # The events were made from (ε, δ), so they cost at most ε; a surplus in the last digits is the accountant's.
        if spent.upper > epsilon * (1 + 1e-9):
            raise InvalidArgument(f"events must cost at most epsilon={epsilon:g}, got more. Please report this.")
        if self.ledger is not None:
            name = type(self).__name__
            self.ledger.charge(compose(list(events)), note=name, relation=relation, unit=PrivacyUnit.EXAMPLE)
        self.events_ = tuple(events)
        self.privacy_ = Guarantee(
            epsilon=min(spent.upper, epsilon),
            delta=delta,
            accountant=spent.accountant,
            sampler=sampler,
            relation=relation,
            caveats=(*caveats, *((FIXED_SEED,) if self.reproducible else ())),
        )


def refuse_several(name: str) -> None:
    """Refuse processes of one group, or of one launcher: each would fit anew, with its own noise and its own bill."""
    # Torch takes seconds to import; without it there is no group.
    if "RANK" in os.environ or "torch.distributed" in sys.modules:
        from sordino.training.processes import ranks

        ranks.refuse_several(name)
