"""Settings from public records, then one private run with the whole budget (floor 5).

The cheapest way of all where public records of a similar kind exist: the search reads none that are private, so nothing
of it is on the bill, and it may be as clever, as long and as visible as one likes.
"""

import math
from collections.abc import Callable
from typing import TypeVar

from sordino import checks
from sordino.definitions import NeighboringRelation, PrivacyUnit
from sordino.errors import InvalidArgument
from sordino.events import Event
from sordino.ledger import Account, Reservation
from sordino.randomness import Randomness
from sordino.tuning.search import Space, Tuned, charge, drawn
from sordino.tuning.share import Budget, Share, declared_budget
from sordino.tuning.space import Config, SearchSpace

__all__ = ["transfer"]

Model = TypeVar("Model")


def transfer(
    public_score: Callable[[Config, Share], float],
    train: Callable[[Config, Share], Model],
    space: Space,
    *,
    target_epsilon: float | None = None,
    delta: float | None = None,
    trials: int = 20,
    run: Callable[[float], Event] | None = None,
    neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE,
    privacy_unit: PrivacyUnit = PrivacyUnit.EXAMPLE,
    ledger: Account | Reservation | None = None,
    randomness: Randomness | None = None,
) -> Tuned[Model]:
    """Try settings on public records with the noise that the private run will have, and train privately once.

    Guarantee: the model is (target_epsilon, delta)-differentially private, as its `guarantee` states, when
    `public_score` reads no private record and `train` keeps to its share. The search is not on the bill, and the
    guarantee says that the settings come from public records. An exception of `public_score` is raised as it is.

    Args:
        public_score: (settings, share) ↦ a score on public records, higher is better. With the share's noise the trial
            is like the run to come; noise of more records needs a share of its own.
        train: (settings, share) ↦ the model, on the private records.
        space: a `SearchSpace`, or a list of settings, all of which are tried.
        target_epsilon: ε of the private run. Required.
        delta: δ of it. Required.
        trials: how many settings are drawn from a space.
        run: as in `tune`.
        neighboring_relation: as in `tune`.
        privacy_unit: as in `tune`.
        ledger: as in `tune`; charged before `train` is called, after the search.
        randomness: of the settings.

    Example:
        >>> tuned = transfer(
        ...     lambda config, share: -abs(config["a"] - 2),
        ...     lambda config, share: f"a = {config['a']}, ε = {share.epsilon:.3f}",
        ...     SearchSpace({"a": [1, 2, 3]}), target_epsilon=1.0, delta=1e-6, trials=50,
        ... )
        >>> tuned.model, tuned.guarantee.caveats
        ('a = 2, ε = 1.000', ('the settings were tuned on public records',))
    """
    epsilon, slack = declared_budget(target_epsilon, delta)
    checks.integer(1, trials=trials)
    randomness = Randomness() if randomness is None else randomness
    budget = Budget(
        epsilon=epsilon,
        delta=slack,
        divides=0.5,
        run=run,
        score=None,
        subsample=1.0,
        relation=NeighboringRelation(neighboring_relation),
    )
    noise = budget.least_noise(lambda event: event)
    share, event = budget.share(noise, seed=0 if randomness.reproducible else None), budget.whole(noise)
    configs: list[Config] = (
        [drawn(space, randomness) for _ in range(trials)]
        if isinstance(space, SearchSpace)
        else [dict(one) for one in space]
    )
    scores = [float(public_score(dict(config), share)) for config in configs]
    if not configs or all(math.isnan(score) for score in scores):
        raise InvalidArgument("public_score must give a number for some settings, got none. Widen the space.")
    _, place = max((score, -i) for i, score in enumerate(scores) if not math.isnan(score))
    config = configs[-place]
    guarantee = charge(
        event,
        budget,
        unit=privacy_unit,
        ledger=ledger,
        randomness=randomness,
        sampler=event,
        caveats=("the settings were tuned on public records",),
    )
    return Tuned(
        model=train(dict(config), share), config=config, score=None, guarantee=guarantee, event=event, share=share
    )
