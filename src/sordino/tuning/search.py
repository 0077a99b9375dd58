"""`tune`: many private trials, one best trial, one charge.

The charge is made before the first run. Settings are drawn from a declared distribution, their number too. Nothing of
the runs is seen but the winner: no count, no scores of losers, no text, no warning.
"""

import contextlib
import io
import logging
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from sordino import accounting, checks
from sordino.definitions import FIXED_SEED_CAVEAT, Guarantee, NeighboringRelation, PrivacyUnit
from sordino.errors import InvalidArgument, MissingDeclaration
from sordino.estimators.base import check_single_process
from sordino.events import ApproximateDP, Composed, Event, Gaussian, PoissonSampled, compose, describe_sampling
from sordino.ledger import Account, Reservation
from sordino.mechanisms.samplers import laplace, normal
from sordino.randomness import KeyedRNG, RandomStream
from sordino.tuning.methods import (
    Config,
    ExponentialSelection,
    GeneralizedExponentialSelection,
    PoissonStopping,
    RandomStopping,
    SearchSpace,
    Selection,
    ThresholdStopping,
)

# ----------------------------------------------------------------------------------------------------------------------
# Runs without output: what a run prints, warns or raises is not part of what was paid for.
# ----------------------------------------------------------------------------------------------------------------------


Model = TypeVar("Model")


@dataclass(frozen=True, kw_only=True)
class Trial(Generic[Model]):
    """One run: its settings and what came out, or nothing when it failed. Kept inside the search."""

    config: Config
    model: Model | None
    score: float

    @property
    def failed(self) -> bool:
        """Whether there is no model to choose."""
        return self.model is None


class _Nowhere(io.TextIOBase):
    def write(self, text: str) -> int:
        return len(text)


@contextlib.contextmanager
def _suppress_output() -> Iterator[None]:
    """Nothing is written to standard output or error, logged or warned inside."""
    before = logging.root.manager.disable
    with (
        contextlib.redirect_stdout(_Nowhere()),
        contextlib.redirect_stderr(_Nowhere()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(before)


# ----------------------------------------------------------------------------------------------------------------------
# What one run of a search may spend, and the score it is judged by.
# ----------------------------------------------------------------------------------------------------------------------


RunEvent = Callable[[float], Event]


@dataclass(frozen=True, kw_only=True)
class TrialBudget:
    """What one run may spend on the records, without its score, which the search pays itself.

    Args:
        event: what the training of one run does at most. Every run must, whatever its settings are.
        epsilon: ε of the training, or None when `noise_multiplier` says what to do.
        delta: δ of the training, or None.
        noise_multiplier: of the training, when the search was given ``run=``; otherwise None.
        seed: None, or in a repeatable search a number of this run's own.
        sample_rate: of the records that this run may read; 1 for all.
    """

    event: Event
    epsilon: float | None
    delta: float | None
    noise_multiplier: float | None
    seed: int | None = None
    sample_rate: float = 1.0
    _mask: Callable[[], RandomStream] = field(
        default=lambda: KeyedRNG().new_stream("subset"), repr=False, compare=False
    )

    def subset(self, records: int) -> npt.NDArray[np.bool_]:
        """Which of so many records this run may read, each by a coin of its own; the same for every call of a run."""
        checks.integer(0, records=records)
        if self.sample_rate == 1:
            return np.ones(records, dtype=np.bool_)
        return self._mask().uniform(records) < self.sample_rate


@dataclass(frozen=True, kw_only=True)
class PrivateScore:
    """A score that is computed on the private records: the search adds noise to it, and pays for that in every run.

    The noise's scale is `noise_multiplier` × `sensitivity`: Laplace for runs with an (ε, δ) of their own, Gaussian
    for runs with a noise multiplier.

    Guarantee: the noisy score of one run is private as ``event(…)`` says when one privacy unit moves the score by at
    most `sensitivity`, for every model that a run may give. A number of right answers moves by 1.

    Args:
        noise_multiplier: > 0; for right answers, the noise in records. 30 is little for thousands of records.
        sensitivity: > 0.
    """

    noise_multiplier: float = 30.0
    sensitivity: float = 1.0

    def __post_init__(self) -> None:
        checks.positive(noise_multiplier=self.noise_multiplier)
        checks.positive(sensitivity=self.sensitivity)

    def noisy(self, score: float, stream: RandomStream, *, gaussian: bool) -> float:
        """The score with its noise."""
        draw = normal if gaussian else laplace
        return score + self.noise_multiplier * self.sensitivity * float(draw(1, stream)[0])


@dataclass(frozen=True, kw_only=True)
class TuningBudget:
    """How a search spends: the event of one run at a noise level z, and the largest budget a run can have.

    Args:
        epsilon: of everything, > 0.
        delta: of everything, in (0, 1).
        divides: by how much δ is divided between runs.
        run: None when a run is only known by its (ε, δ); otherwise noise multiplier ↦ the event of its training.
        score: None for scores on public records.
        subsample: probability that a record may be read by a run.
        neighboring_relation: the neighboring relation.
        accountant: a name, or ``auto``.
    """

    epsilon: float
    delta: float
    divides: float
    run: RunEvent | None
    score: PrivateScore | None
    subsample: float
    neighboring_relation: NeighboringRelation
    accountant: str = "auto"

    def __post_init__(self) -> None:
        checks.positive(epsilon=self.epsilon)
        checks.probability(zero=False, one=False, delta=self.delta)
        checks.probability(zero=False, subsample=self.subsample)
        if self.subsample < 1 and self.neighboring_relation is NeighboringRelation.REPLACE_ONE:
            raise InvalidArgument(
                "subsample must be 1 under replace-one, got less: no amplification of a whole training is known there. "
                "Use add-or-remove-one."
            )

    @property
    def run_delta(self) -> float:
        """δ of one run that is known by (ε, δ): all runs' together fit what a Rényi account keeps for such events."""
        return self.delta / (9 * self.divides)

    def training_event(self, noise: float) -> Event:
        """What one run's training does at noise level z; without ``run=`` z is 1/ε of training and score together."""
        if self.run is not None:
            return self.run(noise)
        return ApproximateDP(epsilon=1 / noise - self._score_epsilon, delta=self.run_delta)

    @property
    def _score_epsilon(self) -> float:
        return 0.0 if self.score is None else 1 / self.score.noise_multiplier

    def trial_event(self, noise: float) -> Event:
        """What one run does at noise level z: training and score, on its sample."""
        if self.run is None:
            event: Event = ApproximateDP(epsilon=1 / noise, delta=self.run_delta)
        elif self.score is None:
            event = self.run(noise)
        else:
            event = compose([self.run(noise), Gaussian(noise_multiplier=self.score.noise_multiplier)])
        return PoissonSampled(sample_rate=self.subsample, event=event) if self.subsample < 1 else event

    def min_noise_multiplier(self, everything: Callable[[Event], Event]) -> float:
        """The least z with which everything that the runs do stays within the budget.

        Raises:
            InvalidArgument: the score alone takes all that one run may spend.
            AccountingError: no amount of noise is enough.
        """
        noise = accounting.calibrate_noise_multiplier(
            lambda z: everything(self.trial_event(z)),
            target_epsilon=self.epsilon,
            delta=self.delta,
            neighboring_relation=self.neighboring_relation,
            accountant=self.accountant,
        )
        if self.run is None and 1 / noise <= self._score_epsilon * (1 + 1e-9):
            raise InvalidArgument(
                f"score must leave something of a run's ε, got noise multiplier {1 / self._score_epsilon:g}, which "
                "takes all. Add noise to the score, or raise target_epsilon."
            )
        return noise

    def trial_budget(
        self, noise: float, *, seed: int | None = None, mask: Callable[[], RandomStream] | None = None
    ) -> TrialBudget:
        """What a run at noise level z is given."""
        event = self.training_event(noise)
        known = event if isinstance(event, ApproximateDP) and self.run is None else None
        parts = {} if mask is None else {"_mask": mask}
        return TrialBudget(
            event=event,
            epsilon=None if known is None else known.epsilon,
            delta=None if known is None else known.delta,
            noise_multiplier=noise if known is None else None,
            seed=seed,
            sample_rate=self.subsample,
            **parts,
        )


def _declared_budget(target_epsilon: float | None, delta: float | None) -> tuple[float, float]:
    """(ε, δ) of everything, which must be said."""
    if target_epsilon is None or delta is None:
        raise MissingDeclaration("target_epsilon and delta must be declared, of everything together. Give both.")
    return checks.positive(target_epsilon=target_epsilon), checks.probability(zero=False, one=False, delta=delta)


# ----------------------------------------------------------------------------------------------------------------------
# `tune`: many private trials, one best trial, one charge.
# ----------------------------------------------------------------------------------------------------------------------


Train = Callable[[Config, TrialBudget], tuple[Model, float]]
Method = RandomStopping | PoissonStopping | ThresholdStopping | ExponentialSelection | GeneralizedExponentialSelection
Space = SearchSpace | Sequence[Mapping[str, object]]

HIDDEN_TRIALS_CAVEAT = "how many runs there were, what the others gave and how long they took must stay unseen"
_SEEDS = 10**9


@dataclass(frozen=True, kw_only=True)
class TuningResult(Generic[Model]):
    """What leaves a search, and nothing else does.

    Args:
        model: the winner, or None when no run was good enough, none was made, or the best one failed.
        config: its settings; empty without a winner.
        score: its score (with its noise when it was private), or None where scores stay inside.
        guarantee: of everything that leaves.
        event: what the whole search did, as charged.
        trial_budget: what each run could spend.
    """

    model: Model | None
    config: Config
    score: float | None
    guarantee: Guarantee
    event: Event
    trial_budget: TrialBudget

    @property
    def has_model(self) -> bool:
        """Whether there is a winner."""
        return self.model is not None


def tune(
    train: Train[Model],
    space: Space,
    *,
    target_epsilon: float | None = None,
    delta: float | None = None,
    method: Method | None = None,
    run_event: Callable[[float], Event] | None = None,
    score: PrivateScore | None = None,
    subsample: float = 1.0,
    neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE,
    privacy_unit: PrivacyUnit = PrivacyUnit.RECORD,
    ledger: Account | Reservation | None = None,
    rng: KeyedRNG | None = None,
    workers: int = 1,
    accountant: str = "auto",
) -> TuningResult[Model]:
    """Search settings on private records, with everything in the guarantee: all runs, their scores, and the choice.

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
        method: `RandomStopping` (the default), `PoissonStopping`, `ThresholdStopping`, `ExponentialSelection` or
            `GeneralizedExponentialSelection`.
        run_event: noise multiplier ↦ what one training does, such as ``lambda z: plan_with(z).event()``; the trial's
            budget then has a `noise_multiplier`, and the charge is tighter. None: a training is any (ε, δ)-private
            mechanism.
        score: None when scores are computed on public records; a `PrivateScore` adds noise to a score of the private
            ones. Choices take scores as they are and need neither.
        subsample: each run reads a Poisson sample of this rate of its own, ``share.subset(n)``, and costs less.
        neighboring_relation: which datasets count as neighbors, for every event here.
        privacy_unit: whose contribution is protected.
        ledger: None, or the account (or a reservation on it) that pays for all of it, at once and before any run.
        rng: of the number of runs, the settings and the choice; fresh if not given.
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
        >>> tuned.has_model, round(tuned.guarantee.epsilon, 3), round(tuned.trial_budget.epsilon, 3)
        (True, 1.0, 0.503)

    References:
        Papernot, Steinke 2022; docs/proofs/tuning-profiles.md.
    """
    epsilon, slack = _declared_budget(target_epsilon, delta)
    chosen = RandomStopping() if method is None else method
    checks.integer(1, workers=workers)
    neighboring_relation = NeighboringRelation(neighboring_relation)
    rng = KeyedRNG() if rng is None else rng
    if isinstance(chosen, Selection):
        if not isinstance(space, SearchSpace):
            chosen = replace(chosen, candidates=checks.integer(1, candidates=len(space)))
        if score is not None or subsample < 1:
            raise InvalidArgument(
                "score and subsample must be left out with a choice, got one: it takes scores as they are, of all "
                "records. Drop it, or take RandomStopping."
            )
    budget = TuningBudget(
        epsilon=epsilon,
        delta=slack,
        divides=_delta_divisor(chosen),
        run=run_event,
        score=score,
        subsample=subsample,
        neighboring_relation=neighboring_relation,
        accountant=accountant,
    )
    noise = budget.min_noise_multiplier(chosen.event)
    event = chosen.event(budget.trial_event(noise))
    configs = _configs(chosen, space, rng)
    if isinstance(chosen, Selection):
        chosen.check_candidates(configs)
    guarantee = _charge_search(
        event, budget, privacy_unit=privacy_unit, ledger=ledger, rng=rng, sampler=budget.training_event(noise)
    )
    winner = select_winner(train, chosen, configs, space, budget, noise, rng, workers)
    return TuningResult(
        model=None if winner is None else winner.model,
        config={} if winner is None else winner.config,
        score=None if isinstance(chosen, Selection) or winner is None else winner.score,
        guarantee=guarantee,
        event=event,
        trial_budget=budget.trial_budget(noise),
    )


def _charge_search(
    event: Event,
    budget: TuningBudget,
    *,
    privacy_unit: PrivacyUnit,
    ledger: Account | Reservation | None,
    rng: KeyedRNG,
    sampler: Event,
    caveats: tuple[str, ...] = (HIDDEN_TRIALS_CAVEAT,),
) -> Guarantee:
    """The guarantee of everything; an account is charged with it first."""
    check_single_process("search")
    spent = accounting.epsilon(
        event, budget.delta, neighboring_relation=budget.neighboring_relation, accountant=budget.accountant
    )
    if spent.upper > budget.epsilon:
        raise InvalidArgument(f"target_epsilon must be above what is spent, {budget.epsilon:g} is not. Raise it.")
    if ledger is not None:
        ledger.charge(
            event, note="tune", neighboring_relation=budget.neighboring_relation, privacy_unit=PrivacyUnit(privacy_unit)
        )
    return Guarantee(
        epsilon=spent.upper,
        delta=budget.delta,
        accountant=spent.accountant,
        sampler=describe_sampling(sampler),
        neighboring_relation=budget.neighboring_relation,
        privacy_unit=PrivacyUnit(privacy_unit),
        caveats=(*caveats, *((FIXED_SEED_CAVEAT,) if rng.reproducible else ())),
    )


def _draw_config(space: Space, rng: KeyedRNG) -> Config:
    """One setting of everything, drawn afresh."""
    stream = rng.new_stream("tuning settings")
    if isinstance(space, SearchSpace):
        return space.draw(stream)
    checks.integer(1, space=len(space))
    return dict(space[min(len(space) - 1, int(float(stream.uniform(1)[0]) * len(space)))])


def _delta_divisor(method: Method) -> float:
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


def _configs(method: Method, space: Space, rng: KeyedRNG) -> list[Config]:
    """The settings of all runs; a threshold draws its own as it goes, one here for the sake of early errors."""
    match method:
        case RandomStopping() | PoissonStopping():
            count = method.draw(rng.new_stream("tuning count"))
        case ThresholdStopping():
            count = 0
        case _ if not isinstance(space, SearchSpace):
            return [dict(config) for config in space]
        case _:
            count = method.candidates
    _draw_config(space, rng)
    return [_draw_config(space, rng) for _ in range(count)]


def select_winner(
    train: Train[Model],
    method: Method,
    configs: Sequence[Config],
    space: Space,
    budget: TuningBudget,
    noise: float,
    rng: KeyedRNG,
    workers: int,
) -> Trial[Model] | None:
    """All runs, without output, and the one that is released, if any; one that failed is none."""
    one = partial(_trial, train, budget=budget, noise=noise, rng=rng)
    with _suppress_output():
        if isinstance(method, ThresholdStopping):
            return _until(one, method, space, rng)
        trials = _all(one, configs, workers)
        if not isinstance(method, Selection):
            # Of equal scores the first stays: runs are alike, so that this is a fair lot.
            best = max(trials, key=lambda trial: trial.score, default=None)
            return None if best is None or best.failed else best
        trials = [trial for trial in trials if not trial.failed]
        if not trials:
            return None
        return trials[method.choose([trial.score for trial in trials], [trial.config for trial in trials], rng)]


def _all(one: Callable[[Config], Trial[Model]], configs: Sequence[Config], workers: int) -> Iterable[Trial[Model]]:
    if workers == 1:
        return map(one, configs)
    with ThreadPoolExecutor(max_workers=workers) as pool:
        return list(pool.map(one, configs))


def _until(
    one: Callable[[Config], Trial[Model]], method: ThresholdStopping, space: Space, rng: KeyedRNG
) -> Trial[Model] | None:
    while True:
        trial = one(_draw_config(space, rng))
        if not trial.failed and trial.score >= method.threshold:
            return trial
        if method.ends(rng.new_stream("tuning end")):
            return None


def _trial(train: Train[Model], config: Config, *, budget: TuningBudget, noise: float, rng: KeyedRNG) -> Trial[Model]:
    """A run that counts whatever happens: an exception, or no model, is a run with the worst score.

    The exception's text is dropped, as it may quote a record.
    """
    seed = _seed(rng)
    number = int(rng.new_stream("tuning subset").integers64(1)[0] >> 1)
    mask = partial(rng.stream, "tuning subset", step=number)
    try:
        model, found = train(dict(config), budget.trial_budget(noise, seed=seed, mask=mask))
        score = float(found)
        if budget.score is not None:
            gaussian = budget.run is not None
            score = budget.score.noisy(score, rng.new_stream("tuning score"), gaussian=gaussian)
    except Exception:
        model, score = None, -math.inf
    return Trial(config=config, model=model, score=-math.inf if model is None or math.isnan(score) else score)


def _seed(rng: KeyedRNG) -> int | None:
    """In a repeatable search a number of this run's own."""
    return int(rng.new_stream("tuning seed").integers64(1)[0] % _SEEDS) if rng.reproducible else None


# ----------------------------------------------------------------------------------------------------------------------
# Settings from small samples, then one run on everything.
#
# Every run of the search reads a Poisson sample of its own, so that what the search costs is small, and most of the
# budget is left for the one run that counts. Koskela and Kulkarni draw one sample for all runs; with one for each, the
# run on its sample is what is selected, and the bounds of private selection see the amplified cost.
#
# References:
#     Koskela, Kulkarni 2023, "Practical differentially private hyperparameter tuning with subsampling".
# ----------------------------------------------------------------------------------------------------------------------


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
        >>> def train(config, share):
        ...     return "small", float(config["a"]) + share.subset(1000).mean()
        >>> tuned = tune_on_subsample(
        ...     train, lambda config, share: "large", SearchSpace({"a": [0, 5]}), target_epsilon=1.0, delta=1e-6
        ... )
        >>> tuned.model, tuned.guarantee.epsilon <= 1, tuned.trial_budget.epsilon > 0.65
        ('large', True, True)
    """
    epsilon, slack = _declared_budget(target_epsilon, delta)
    checks.probability(zero=False, one=False, subsample=subsample)
    checks.probability(zero=False, one=False, tuning_fraction=tuning_fraction)
    chosen = RandomStopping() if method is None else method
    neighboring_relation = NeighboringRelation(neighboring_relation)
    rng = KeyedRNG() if rng is None else rng
    search = TuningBudget(
        epsilon=tuning_fraction * epsilon,
        delta=slack / 2,
        divides=_delta_divisor(chosen),
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
    guarantee = _charge_search(
        event,
        whole,
        privacy_unit=privacy_unit,
        ledger=ledger,
        rng=rng,
        sampler=whole.training_event(rest),
    )
    count = 0 if isinstance(chosen, ThresholdStopping) else chosen.draw(rng.new_stream("tuning count"))
    configs = [_draw_config(space, rng) for _ in range(count)]
    found = select_winner(train, chosen, configs, space, search, noise, rng, 1)
    config = _draw_config(space, rng) if found is None else found.config
    share = whole.trial_budget(rest, seed=_seed(rng))
    return TuningResult(
        model=final(dict(config), share),
        config=config,
        score=None if found is None else found.score,
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
    epsilon, slack = _declared_budget(target_epsilon, delta)
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
        [_draw_config(space, rng) for _ in range(trials)]
        if isinstance(space, SearchSpace)
        else [dict(one) for one in space]
    )
    scored = [(float(public_score(dict(config), share)), config) for config in configs]
    known = [pair for pair in scored if not math.isnan(pair[0])]
    if not known:
        raise InvalidArgument("public_score must give a number for some settings, got none. Widen the space.")
    config = max(known, key=lambda pair: pair[0])[1]
    guarantee = _charge_search(
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
