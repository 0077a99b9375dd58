"""Settings from small samples, then one run on everything (floor 5).

Every run of the search reads a Poisson sample of its own, so that what the search costs is small, and most of the
budget is left for the one run that counts. Koskela and Kulkarni draw one sample for all runs; with one for each, the
run on its sample is what is selected, and the bounds of private selection see the amplified cost.

References:
    Koskela, Kulkarni 2023, "Practical differentially private hyperparameter tuning with subsampling".
"""

from collections.abc import Callable
from typing import TypeVar

from sordino import checks
from sordino.definitions import NeighboringRelation, PrivacyUnit
from sordino.events import Composed, Event
from sordino.ledger import Account, Reservation
from sordino.randomness import Randomness
from sordino.tuning.sealed import sealed
from sordino.tuning.search import UNSEEN, Space, Train, Tuned, charge, divides, drawn, winner_of
from sordino.tuning.share import Budget, PrivateScore, Share, declared_budget
from sordino.tuning.space import Config
from sordino.tuning.stopping import PoissonStopping, RandomStopping, ThresholdStopping

__all__ = ["tune_on_part"]

Model = TypeVar("Model")
Final = TypeVar("Final")


def tune_on_part(
    train: Train[Model],
    final: Callable[[Config, Share], Final],
    space: Space,
    *,
    target_epsilon: float | None = None,
    delta: float | None = None,
    subsample: float = 0.1,
    tuning_share: float = 0.3,
    method: RandomStopping | PoissonStopping | ThresholdStopping | None = None,
    run: Callable[[float], Event] | None = None,
    final_run: Callable[[float], Event] | None = None,
    score: PrivateScore | None = None,
    neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE,
    privacy_unit: PrivacyUnit = PrivacyUnit.EXAMPLE,
    ledger: Account | Reservation | None = None,
    randomness: Randomness | None = None,
) -> Tuned[Final]:
    """Search settings on samples of the records, train once on all of them, and put both on the bill.

    Guarantee: as of `tune`, for the search and the final model together. `train` must read the records of
    ``share.subset(n)`` only, its score included.

    Args:
        train: as in `tune`, on ``share.subset(n)``.
        final: (settings, share) ↦ the model that is kept, trained on all records. Settings that depend on the number
            of records (a batch size, the weight of a penalty on a sum) are scaled here.
        space: as in `tune`.
        target_epsilon: ε of everything. Required.
        delta: δ of everything. Required.
        subsample: rate in (0, 1) of each run's own Poisson sample.
        tuning_share: share in (0, 1) of ε that the search may spend; the final run gets what is left.
        method: a way of stopping, `RandomStopping` if not given.
        run: as in `tune`, for one run of the search.
        final_run: the same for the final one.
        score: as in `tune`.
        neighboring_relation: as in `tune`; not replace-one.
        privacy_unit: as in `tune`.
        ledger: as in `tune`.
        randomness: as in `tune`.

    Returns:
        The final model with the settings it was trained with. When no run gave any, they are drawn afresh.

    Example:
        >>> from sordino.tuning.space import SearchSpace
        >>> def train(config, share):
        ...     return "small", float(config["a"]) + share.subset(1000).mean()
        >>> tuned = tune_on_part(
        ...     train, lambda config, share: "large", SearchSpace({"a": [0, 5]}), target_epsilon=1.0, delta=1e-6
        ... )
        >>> tuned.model, tuned.guarantee.epsilon <= 1, tuned.share.epsilon > 0.65
        ('large', True, True)
    """
    epsilon, slack = declared_budget(target_epsilon, delta)
    checks.probability(zero=False, one=False, subsample=subsample)
    checks.probability(zero=False, one=False, tuning_share=tuning_share)
    chosen = RandomStopping() if method is None else method
    relation = NeighboringRelation(neighboring_relation)
    randomness = Randomness() if randomness is None else randomness
    search = Budget(
        epsilon=tuning_share * epsilon,
        delta=slack / 2,
        divides=divides(chosen),
        run=run,
        score=score,
        subsample=subsample,
        relation=relation,
    )
    noise = search.least_noise(chosen.event)
    first = chosen.event(search.whole(noise))
    # Half of δ is the search's, and of the rest a half is the accountant's.
    whole = Budget(
        epsilon=epsilon, delta=slack, divides=2.0, run=final_run, score=None, subsample=1.0, relation=relation
    )
    rest = whole.least_noise(lambda last: Composed(events=(first, last)))
    event = Composed(events=(first, whole.whole(rest)))
    guarantee = charge(
        event,
        whole,
        unit=privacy_unit,
        ledger=ledger,
        randomness=randomness,
        sampler=whole.training(rest),
        caveats=(UNSEEN,),
    )
    count = 0 if isinstance(chosen, ThresholdStopping) else chosen.draw(randomness.fresh("tuning count"))
    configs = [drawn(space, randomness) for _ in range(count)]
    with sealed():
        found = winner_of(train, chosen, configs, space, search, noise, randomness, 1)
    config = drawn(space, randomness) if found is None or found.failed else found.config
    seed = int(randomness.fresh("tuning seed").integers64(1)[0] % 10**9) if randomness.reproducible else None
    share = whole.share(rest, seed=seed)
    return Tuned(
        model=final(dict(config), share),
        config=config,
        score=None if found is None or found.failed else found.score,
        guarantee=guarantee,
        event=event,
        share=share,
    )
