"""Settings from small samples, then one run on everything.

Every run of the search reads a Poisson sample of its own, so that what the search costs is small, and most of the
budget is left for the one run that counts. Koskela and Kulkarni draw one sample for all runs; with one for each, the
run on its sample is what is selected, and the bounds of private selection see the amplified cost.

References:
    Koskela, Kulkarni 2023, "Practical differentially private hyperparameter tuning with subsampling".
"""

import math
from collections.abc import Callable
from typing import TypeVar

from sordino import checks
from sordino.definitions import NeighboringRelation, PrivacyUnit
from sordino.errors import InvalidArgument
from sordino.events import Composed, Event
from sordino.ledger import Account, Reservation
from sordino.randomness import KeyedRNG
from sordino.tuning.methods import Config, PoissonStopping, RandomStopping, SearchSpace, ThresholdStopping
from sordino.tuning.search import (
    HIDDEN_TRIALS_CAVEAT,
    PrivateScore,
    Space,
    Train,
    TrialBudget,
    TuningBudget,
    TuningResult,
    charge_search,
    declared_budget,
    delta_divisor,
    draw_config,
    select_winner,
    suppress_output,
)

__all__ = ["tune_on_public_data", "tune_on_subsample"]


Model = TypeVar("Model")
Final = TypeVar("Final")


def tune_on_subsample(
    train: Train[Model],
    final: Callable[[Config, TrialBudget], Final],
    space: Space,
    *,
    target_epsilon: float | None = None,
    delta: float | None = None,
    subsample: float = 0.1,
    tuning_fraction: float = 0.3,
    method: RandomStopping | PoissonStopping | ThresholdStopping | None = None,
    run_event: Callable[[float], Event] | None = None,
    final_event: Callable[[float], Event] | None = None,
    score: PrivateScore | None = None,
    neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE,
    privacy_unit: PrivacyUnit = PrivacyUnit.RECORD,
    ledger: Account | Reservation | None = None,
    rng: KeyedRNG | None = None,
) -> TuningResult[Final]:
    """Search settings on samples of the records, train once on all of them, and charge both.

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
        tuning_fraction: share in (0, 1) of ε that the search may spend; the final run gets what is left.
        method: a way of stopping, `RandomStopping` if not given.
        run_event: as in `tune`, for one run of the search.
        final_event: the same for the final one.
        score: as in `tune`.
        neighboring_relation: as in `tune`; not replace-one.
        privacy_unit: as in `tune`.
        ledger: as in `tune`.
        rng: as in `tune`.

    Returns:
        The final model with the settings it was trained with. When no run gave any, they are drawn afresh.

    Example:
        >>> from sordino.tuning.methods import SearchSpace
        >>> def train(config, share):
        ...     return "small", float(config["a"]) + share.subset(1000).mean()
        >>> tuned = tune_on_subsample(
        ...     train, lambda config, share: "large", SearchSpace({"a": [0, 5]}), target_epsilon=1.0, delta=1e-6
        ... )
        >>> tuned.model, tuned.guarantee.epsilon <= 1, tuned.trial_budget.epsilon > 0.65
        ('large', True, True)
    """
    epsilon, slack = declared_budget(target_epsilon, delta)
    checks.probability(zero=False, one=False, subsample=subsample)
    checks.probability(zero=False, one=False, tuning_fraction=tuning_fraction)
    chosen = RandomStopping() if method is None else method
    neighboring_relation = NeighboringRelation(neighboring_relation)
    rng = KeyedRNG() if rng is None else rng
    search = TuningBudget(
        epsilon=tuning_fraction * epsilon,
        delta=slack / 2,
        divides=delta_divisor(chosen),
        run=run_event,
        score=score,
        subsample=subsample,
        neighboring_relation=neighboring_relation,
    )
    noise = search.min_noise_multiplier(chosen.event)
    first = chosen.event(search.trial_event(noise))
    # Half of δ is the search's, and of the rest a half is the accountant's.
    whole = TuningBudget(
        epsilon=epsilon,
        delta=slack,
        divides=2.0,
        run=final_event,
        score=None,
        subsample=1.0,
        neighboring_relation=neighboring_relation,
    )
    rest = whole.min_noise_multiplier(lambda last: Composed(events=(first, last)))
    event = Composed(events=(first, whole.trial_event(rest)))
    guarantee = charge_search(
        event,
        whole,
        privacy_unit=privacy_unit,
        ledger=ledger,
        rng=rng,
        sampler=whole.training_event(rest),
        caveats=(HIDDEN_TRIALS_CAVEAT,),
    )
    count = 0 if isinstance(chosen, ThresholdStopping) else chosen.draw(rng.new_stream("tuning count"))
    configs = [draw_config(space, rng) for _ in range(count)]
    with suppress_output():
        found = select_winner(train, chosen, configs, space, search, noise, rng, 1)
    config = draw_config(space, rng) if found is None or found.failed else found.config
    seed = int(rng.new_stream("tuning seed").integers64(1)[0] % 10**9) if rng.reproducible else None
    share = whole.trial_budget(rest, seed=seed)
    return TuningResult(
        model=final(dict(config), share),
        config=config,
        score=None if found is None or found.failed else found.score,
        guarantee=guarantee,
        event=event,
        trial_budget=share,
    )


# ----------------------------------------------------------------------------------------------------------------------
# Settings from public records, then one private run with the whole budget.
#
# The cheapest way of all where public records of a similar kind exist: the search reads none that are private, so
# nothing of it is charged, and it may be as clever, as long and as visible as one likes.
# ----------------------------------------------------------------------------------------------------------------------


def tune_on_public_data(
    public_score: Callable[[Config, TrialBudget], float],
    train: Callable[[Config, TrialBudget], Model],
    space: Space,
    *,
    target_epsilon: float | None = None,
    delta: float | None = None,
    trials: int = 20,
    run_event: Callable[[float], Event] | None = None,
    neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE,
    privacy_unit: PrivacyUnit = PrivacyUnit.RECORD,
    ledger: Account | Reservation | None = None,
    rng: KeyedRNG | None = None,
) -> TuningResult[Model]:
    """Try settings on public records with the noise that the private run will have, and train privately once.

    Guarantee: the model is (target_epsilon, delta)-differentially private, as its `guarantee` states, when
    `public_score` reads no private record and `train` keeps to its share. The search is not charged, and the
    guarantee says that the settings come from public records. An exception of `public_score` is raised as it is.

    Args:
        public_score: (settings, share) ↦ a score on public records, higher is better. With the share's noise the trial
            is like the run to come; noise of more records needs a share of its own.
        train: (settings, share) ↦ the model, on the private records.
        space: a `SearchSpace`, or a list of settings, all of which are tried.
        target_epsilon: ε of the private run. Required.
        delta: δ of it. Required.
        trials: how many settings are drawn from a space.
        run_event: as in `tune`.
        neighboring_relation: as in `tune`.
        privacy_unit: as in `tune`.
        ledger: as in `tune`; charged before `train` is called, after the search.
        rng: of the settings.

    Example:
        >>> tuned = tune_on_public_data(
        ...     lambda config, share: -abs(config["a"] - 2),
        ...     lambda config, share: f"a = {config['a']}, ε = {share.epsilon:.3f}",
        ...     SearchSpace({"a": [1, 2, 3]}), target_epsilon=1.0, delta=1e-6, trials=50,
        ... )
        >>> tuned.model, tuned.guarantee.caveats
        ('a = 2, ε = 1.000', ('the settings were tuned on public records',))
    """
    epsilon, slack = declared_budget(target_epsilon, delta)
    checks.integer(1, trials=trials)
    rng = KeyedRNG() if rng is None else rng
    budget = TuningBudget(
        epsilon=epsilon,
        delta=slack,
        divides=0.5,
        run=run_event,
        score=None,
        subsample=1.0,
        neighboring_relation=NeighboringRelation(neighboring_relation),
    )
    noise = budget.min_noise_multiplier(lambda event: event)
    share, event = budget.trial_budget(noise, seed=0 if rng.reproducible else None), budget.trial_event(noise)
    configs: list[Config] = (
        [draw_config(space, rng) for _ in range(trials)]
        if isinstance(space, SearchSpace)
        else [dict(one) for one in space]
    )
    scores = [float(public_score(dict(config), share)) for config in configs]
    if not configs or all(math.isnan(score) for score in scores):
        raise InvalidArgument("public_score must give a number for some settings, got none. Widen the space.")
    _, place = max((score, -i) for i, score in enumerate(scores) if not math.isnan(score))
    config = configs[-place]
    guarantee = charge_search(
        event,
        budget,
        privacy_unit=privacy_unit,
        ledger=ledger,
        rng=rng,
        sampler=event,
        caveats=("the settings were tuned on public records",),
    )
    return TuningResult(
        model=train(dict(config), share),
        config=config,
        score=None,
        guarantee=guarantee,
        event=event,
        trial_budget=share,
    )
