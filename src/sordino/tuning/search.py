"""`tune`: many private runs, one winner, one bill (floor 5).

The bill is made and charged before the first run. Settings are drawn from a declared law, their number too. Nothing of
the runs is seen but the winner: no count, no scores of losers, no text, no warning.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, TypeVar

from sordino import accounting, checks
from sordino.definitions import FIXED_SEED, Guarantee, NeighboringRelation, PrivacyUnit
from sordino.errors import InvalidArgument
from sordino.estimators.base import refuse_several
from sordino.events import Event
from sordino.ledger import Account, Reservation
from sordino.randomness import Randomness
from sordino.tuning.choosing import ExponentialChoice, GeneralizedChoice
from sordino.tuning.sealed import Trial, attempt, sealed
from sordino.tuning.share import Budget, PrivateScore, Share, declared_budget
from sordino.tuning.space import Config, SearchSpace
from sordino.tuning.stopping import PoissonStopping, RandomStopping, ThresholdStopping
from sordino.wording import sampling_words

__all__ = ["Method", "Space", "Train", "Tuned", "charge", "divides", "drawn", "tune", "winner_of"]

Model = TypeVar("Model")
Train = Callable[[Config, Share], tuple[Model, float]]
Method = RandomStopping | PoissonStopping | ThresholdStopping | ExponentialChoice | GeneralizedChoice
Space = SearchSpace | Sequence[Mapping[str, object]]

UNSEEN = "how many runs there were, what the others gave and how long they took must stay unseen"
_SEEDS = 10**9


@dataclass(frozen=True, kw_only=True)
class Tuned(Generic[Model]):
    """What leaves a search, and nothing else does.

    Args:
        model: the winner, or None when no run was good enough, none was made, or the best one failed.
        config: its settings; empty without a winner.
        score: its score (with its noise when it was private), or None where scores stay inside.
        guarantee: of everything that leaves.
        event: what the whole search did, as charged.
        share: what each run could spend.
    """

    model: Model | None
    config: Config
    score: float | None
    guarantee: Guarantee
    event: Event
    share: Share

    @property
    def found(self) -> bool:
        """Whether there is a winner."""
        return self.model is not None


def tune(
    train: Train[Model],
    space: Space,
    *,
    target_epsilon: float | None = None,
    delta: float | None = None,
    method: Method | None = None,
    run: Callable[[float], Event] | None = None,
    score: PrivateScore | None = None,
    subsample: float = 1.0,
    neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE,
    privacy_unit: PrivacyUnit = PrivacyUnit.EXAMPLE,
    ledger: Account | Reservation | None = None,
    randomness: Randomness | None = None,
    workers: int = 1,
    accountant: str = "auto",
) -> Tuned[Model]:
    """Search settings on private records, with everything on the bill: all runs, their scores, and the choice.

    Guarantee: what is returned is (target_epsilon, delta)-differentially private, as its `guarantee` states, when
    every call of `train` keeps to the share it is given, draws fresh noise, and does not know of other calls; when a
    score that is not paid for by `score` (or inside `run`) is computed on public records; and when only what is
    returned is looked at. An exception of a run counts as a run with the worst score; that it was raised must not
    tell more of the records than the run may.

    Args:
        train: (settings, share) ↦ (model, score), higher is better. It must not charge a ledger: this does.
        space: a `SearchSpace`, or a list of settings, each as likely (or, for a choice, all of them).
        target_epsilon: ε of everything. Required.
        delta: δ of everything. Required.
        method: `RandomStopping` (the default), `PoissonStopping`, `ThresholdStopping`, `ExponentialChoice` or
            `GeneralizedChoice`.
        run: noise multiplier ↦ what one training does, such as ``lambda z: plan_with(z).event()``; the share then has
            a `noise_multiplier`, and the bill is tighter. None: a training is any (ε, δ)-private mechanism.
        score: None when scores are computed on public records; a `PrivateScore` adds noise to a score of the private
            ones. Choices take scores as they are and need neither.
        subsample: each run reads a Poisson sample of this rate of its own, ``share.subset(n)``, and costs less.
        neighboring_relation: which data sets count as neighbours, for every event here.
        privacy_unit: whose contribution is protected.
        ledger: None, or the account (or a reservation on it) that pays for all of it, at once and before any run.
        randomness: of the number of runs, the settings and the choice; fresh if not given.
        workers: threads that train at the same time; a threshold is awaited by one.
        accountant: a name, or ``auto``. An account with a Rényi policy prices by ``rdp``.

    Raises:
        BudgetExceeded: the account refuses; nothing was trained.
        InvalidArgument: a declaration is out of range, or the budget is too small for the score or the choice.

    Example:
        >>> def train(config, share):
        ...     return config["learning_rate"], -abs(config["learning_rate"] - 1.0)
        >>> space = SearchSpace({"learning_rate": [0.1, 1.0, 10.0]})
        >>> tuned = tune(train, space, target_epsilon=1.0, delta=1e-6, method=RandomStopping(mean=30))
        >>> tuned.found, round(tuned.guarantee.epsilon, 3), round(tuned.share.epsilon, 3)
        (True, 1.0, 0.503)

    References:
        Papernot, Steinke 2022; docs/proofs/tuning-profiles.md.
    """
    epsilon, slack = declared_budget(target_epsilon, delta)
    chosen = RandomStopping() if method is None else method
    checks.integer(1, workers=workers)
    relation = NeighboringRelation(neighboring_relation)
    randomness = Randomness() if randomness is None else randomness
    if isinstance(chosen, ExponentialChoice | GeneralizedChoice):
        if not isinstance(space, SearchSpace):
            chosen = replace(chosen, candidates=checks.integer(1, candidates=len(space)))
        if score is not None or subsample < 1:
            raise InvalidArgument(
                "score and subsample must be left out with a choice, got one: it takes scores as they are, of all "
                "records. Drop it, or take RandomStopping."
            )
    budget = Budget(
        epsilon=epsilon,
        delta=slack,
        divides=divides(chosen),
        run=run,
        score=score,
        subsample=subsample,
        relation=relation,
        accountant=accountant,
    )
    noise = budget.least_noise(chosen.event)
    event = chosen.event(budget.whole(noise))
    configs = _configs(chosen, space, randomness)
    if isinstance(chosen, ExponentialChoice | GeneralizedChoice):
        chosen.prepared(configs)
    guarantee = charge(
        event, budget, unit=privacy_unit, ledger=ledger, randomness=randomness, sampler=budget.training(noise)
    )
    with sealed():
        winner = winner_of(train, chosen, configs, space, budget, noise, randomness, workers)
    inside = isinstance(chosen, ExponentialChoice | GeneralizedChoice)
    return Tuned(
        model=None if winner is None else winner.model,
        config={} if winner is None or winner.failed else winner.config,
        score=None if inside or winner is None or winner.failed else winner.score,
        guarantee=guarantee,
        event=event,
        share=budget.share(noise),
    )


def charge(
    event: Event,
    budget: Budget,
    *,
    unit: PrivacyUnit,
    ledger: Account | Reservation | None,
    randomness: Randomness,
    sampler: Event,
    caveats: tuple[str, ...] = (UNSEEN,),
) -> Guarantee:
    """The guarantee of everything; an account is charged with it first."""
    refuse_several("search")
    spent = accounting.epsilon(event, budget.delta, relation=budget.relation, accountant=budget.accountant)
    if spent.upper > budget.epsilon:
        raise InvalidArgument(f"target_epsilon must be above what is spent, {budget.epsilon:g} is not. Raise it.")
    if ledger is not None:
        ledger.charge(event, note="tune", relation=budget.relation, unit=PrivacyUnit(unit))
    return Guarantee(
        epsilon=spent.upper,
        delta=budget.delta,
        accountant=spent.accountant,
        sampler=sampling_words(sampler),
        relation=budget.relation,
        unit=PrivacyUnit(unit),
        caveats=(*caveats, *((FIXED_SEED,) if randomness.reproducible else ())),
    )


def drawn(space: Space, randomness: Randomness) -> Config:
    """One setting of everything, drawn afresh."""
    stream = randomness.fresh("tuning settings")
    if isinstance(space, SearchSpace):
        return space.draw(stream)
    checks.integer(1, space=len(space))
    return dict(space[min(len(space) - 1, int(float(stream.uniform(1)[0]) * len(space)))])


def divides(method: Method) -> float:
    """By how much δ is divided between the runs of a method."""
    match method:
        case RandomStopping():
            return method.mean
        case PoissonStopping():
            return max(1.0, method.mean)
        case ThresholdStopping():
            return 1 / method.stop_probability
        case _:
            return float(method.candidates)


def _configs(method: Method, space: Space, randomness: Randomness) -> list[Config]:
    """The settings of all runs; a threshold draws its own as it goes, one here for the sake of early errors."""
    match method:
        case RandomStopping() | PoissonStopping():
            count = method.draw(randomness.fresh("tuning count"))
        case ThresholdStopping():
            count = 0
        case _ if not isinstance(space, SearchSpace):
            return [dict(config) for config in space]
        case _:
            count = method.candidates
    drawn(space, randomness)
    return [drawn(space, randomness) for _ in range(count)]


def winner_of(
    train: Train[Model],
    method: Method,
    configs: Sequence[Config],
    space: Space,
    budget: Budget,
    noise: float,
    randomness: Randomness,
    workers: int,
) -> Trial[Model] | None:
    """All runs, and the one that leaves, if any."""
    one = partial(_trial, train, budget=budget, noise=noise, randomness=randomness)
    if isinstance(method, ThresholdStopping):
        return _until(one, method, space, randomness)
    if isinstance(method, RandomStopping | PoissonStopping):
        best: Trial[Model] | None = None
        for trial in _all(one, configs, workers):
            # Of equal scores the first stays: runs are alike, so that this is a fair lot.
            best = trial if best is None or trial.score > best.score else best
        return best
    trials = [trial for trial in _all(one, configs, workers) if not trial.failed]
    if not trials:
        return None
    place = method.choose([trial.score for trial in trials], [trial.config for trial in trials], randomness)
    return trials[place]


def _all(one: Callable[[Config], Trial[Model]], configs: Sequence[Config], workers: int) -> Iterable[Trial[Model]]:
    if workers == 1:
        return map(one, configs)
    with ThreadPoolExecutor(max_workers=workers) as pool:
        return list(pool.map(one, configs))


def _until(
    one: Callable[[Config], Trial[Model]], method: ThresholdStopping, space: Space, randomness: Randomness
) -> Trial[Model] | None:
    while True:
        trial = one(drawn(space, randomness))
        if not trial.failed and trial.score >= method.threshold:
            return trial
        if method.ends(randomness.fresh("tuning end")):
            return None


def _trial(
    train: Train[Model], config: Config, *, budget: Budget, noise: float, randomness: Randomness
) -> Trial[Model]:
    """One run, whatever happens in it."""
    seed = int(randomness.fresh("tuning seed").integers64(1)[0] % _SEEDS) if randomness.reproducible else None
    number = int(randomness.fresh("tuning subset").integers64(1)[0] >> 1)
    mask = partial(randomness.stream, "tuning subset", step=number)
    share = budget.share(noise, seed=seed, mask=mask)

    def told() -> tuple[Model, float]:
        model, found = train(dict(config), share)
        if budget.score is None:
            return model, found
        gaussian = budget.run is not None
        return model, budget.score.noisy(float(found), randomness.fresh("tuning score"), gaussian=gaussian)

    return attempt(told, config)
