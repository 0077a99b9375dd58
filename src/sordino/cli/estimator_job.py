"""`train` with an estimator: charged in a run folder first, fitted then, and the same files and page at the end."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.text import Text

from sordino import accounting, checks
from sordino.cli.console import Output, check_single_process_options
from sordino.cli.ledger import print_preview, with_affordable_delta
from sordino.cli.training_job import Outcome, composition_statement, default_delta, render_outcome, subgroups_of
from sordino.definitions import Guarantee, NeighboringRelation, PrivacyUnit
from sordino.errors import InvalidArgument, SordinoError
from sordino.events import Event, compose
from sordino.randomness import KeyedRNG
from sordino.runs import Metric, RunFolder

if TYPE_CHECKING:
    from collections.abc import Callable

    from sordino.data import DatasetSplits
    from sordino.estimators.base import PrivateEstimator
    from sordino.ledger import Account
    from sordino.recipes import TabularTask
    from sordino.recipes.tabular import FittedTable
    from sordino.tuning.methods import Config, RandomStopping, SearchSpace
    from sordino.tuning.random_search import EstimatorRuns
    from sordino.tuning.search import TrialBudget

__all__ = [
    "EstimatorJob",
    "TuningJob",
    "check_no_overrides",
    "estimator_metadata",
    "estimator_metrics",
    "is_method",
    "run_and_print",
    "run_estimator_job",
    "run_tuning_job",
]


_TUNED_ON = ("adult",)
_USUAL_DELTA = 1e-5
_MODULES = ("logistic", "mlp", "cnn")


def is_method(model: str) -> bool:
    """Whether `model` names an estimator's method; other names are modules.

    Raises:
        InvalidArgument: it is no name of either.
    """
    if ":" in model or model in _MODULES:
        return False
    from sordino.recipes.tabular import TABULAR_METHODS

    checks.one_of((*_MODULES, *TABULAR_METHODS), model=model)
    return True


def check_no_overrides(model: str, names: tuple[str, ...], **others: object) -> None:
    """Settings by hand, resuming, several processes and the like are for modules; an estimator has its own."""
    check_single_process_options(**{f"model {model}": True})
    names = (*names, *(name.replace("_", " ") for name, value in others.items() if value is not None))
    if names:
        raise InvalidArgument(
            f"{', '.join(names)} must be left out with --model {model}, got a value. "
            "Use the estimator from Python to set its parameters."
        )


@dataclass(frozen=True, kw_only=True)
class EstimatorJob:
    """One fit of an estimator as the command asks for it.

    Args:
        dataset: what is trained on; `dataset.public` decides what may be measured.
        test_is_public: whether `dataset.test` may be measured on.
        method: name of the method.
        target: the column to predict, or None for the label.
        epsilon: of the fit.
        delta: of the fit; None takes the default.
        seed: a chosen seed, or None.
        folder: where the run goes.
        ledger: the dataset's account, or None.
    """

    dataset: "DatasetSplits"
    test_is_public: bool
    method: str
    target: str | None
    epsilon: float
    delta: float | None
    seed: int | None
    folder: Path
    ledger: "Account | None" = None


def run_and_print(job: EstimatorJob, out: Output, *, dry_run: bool = False) -> None:
    """Fit, and print the document or the page; or only print what that would cost."""
    kind = "public" if job.dataset.public else "private"
    out.print_status(Text.assemble((job.dataset.name, "bold"), f": {kind} records, {job.method}"))
    if dry_run:
        print_preview(
            out,
            lambda ledger, place: run_estimator_job(replace(job, ledger=ledger, folder=place), out),
            job.ledger,
            delta=default_delta(len(job.dataset.train)) if job.delta is None else job.delta,
        )
        return
    outcome = run_estimator_job(job, out)
    out.print_result(outcome.to_dict(), *render_outcome(outcome))


def run_estimator_job(job: EstimatorJob, out: Output) -> Outcome:
    """Fit, and leave a complete run folder.

    Guarantee: `Outcome.guarantee`. What the fit will cost is known before a record is read (its events depend on no
    record), and it is written to the transcript then. Nothing is measured on records that are not declared public.
    """
    from sordino.recipes.tabular import make_tabular_task

    rows = make_tabular_task(job.dataset, target=job.target)
    if job.delta is not None:
        return _run_estimator(job, rows, _checked_delta(job.delta, rows), out)
    default = default_delta(rows.facts.dataset_size)
    return with_affordable_delta(lambda delta: _run_estimator(job, rows, delta, out), default, job.ledger, out)


def _checked_delta(delta: float, rows: "TabularTask") -> float:
    """A δ that was given: in [0, 1 / number of records)."""
    checks.probability(one=False, delta=delta)
    if delta * rows.facts.dataset_size >= 1:
        raise InvalidArgument(
            f"delta must be below 1 / number of records = {1 / rows.facts.dataset_size:.3g}, got {delta!r}. "
            "A larger one would allow the release of whole records."
        )
    return delta


def _run_estimator(job: EstimatorJob, rows: "TabularTask", delta: float, out: Output) -> Outcome:
    from sordino.estimators.base import dry_run_events
    from sordino.recipes.tabular import fit_to, get_method
    from sordino.report import write_report

    method = get_method(job.method)
    seeded = {} if job.seed is None else {"random_state": job.seed, "reproducible": True}
    estimator = method.estimator(rows.facts, epsilon=job.epsilon, delta=delta, **seeded)
    events, neighboring_relation = dry_run_events(estimator, rows.facts.columns)
    spent = accounting.epsilon(compose(list(events)), delta, neighboring_relation=neighboring_relation)
    if job.ledger is not None:
        job.ledger.check_charge(compose(list(events)), neighboring_relation=neighboring_relation)
    plan = _plan(job, estimator, delta, neighboring_relation.value, events)
    run = RunFolder.create(job.folder, plan=plan, meta=estimator_metadata(job, rows))
    try:
        # Charged here and not by the estimator, so that every line of the transcript names the charge that paid for it.
        charge = None if job.ledger is None else _charge(job.ledger, run, estimator, events, neighboring_relation)
        # The estimator draws its key itself, and the fit is one segment.
        run.begin(key=None, first_step=0, most=compose(list(dict.fromkeys(events))), seeded=job.seed is not None)
        for number, event in enumerate(events):
            last = number == len(events) - 1
            run.append(step=number, event=event, epsilon=spent.upper if last else None, charge=charge)
        with out.progress(f"fitting {type(estimator).__name__}"):
            fitted = fit_to(estimator, rows)
    except BaseException:
        run.close()
        if not any(run):
            shutil.rmtree(run.path)
        raise
    _save(run, job, fitted)
    run.close()
    guarantee = estimator.guarantee_
    # Divisors and batch sizes, or δ, were taken from the number of records, so the guarantee says so.
    if "dataset_size" in method.wants or (job.delta is None and delta < _USUAL_DELTA):
        guarantee = _with_public_size(guarantee)
    run.write_guarantee(guarantee)
    with out.progress("measuring and writing the report"):
        metrics = estimator_metrics(job, rows, fitted)
        run.write_metrics(metrics)
        write_report(run)
    return Outcome(run=run, guarantee=guarantee, metrics=metrics, steps=len(events), interrupted=False)


def _charge(
    ledger: "Account",
    run: RunFolder,
    estimator: "PrivateEstimator",
    events: Sequence[Event],
    neighboring_relation: NeighboringRelation,
) -> str:
    """Charge the whole fit to the account, which may refuse; the ledger's name of the charge."""
    return ledger.charge(
        compose(list(events)),
        note=type(estimator).__name__,
        run=run.path.name,
        neighboring_relation=neighboring_relation,
        privacy_unit=PrivacyUnit.RECORD,
    ).digest


def _with_public_size(guarantee: Guarantee) -> Guarantee:
    return Guarantee(
        epsilon=guarantee.epsilon,
        delta=guarantee.delta,
        accountant=guarantee.accountant,
        sampler=guarantee.sampler,
        neighboring_relation=guarantee.neighboring_relation,
        privacy_unit=guarantee.privacy_unit,
        caveats=("the size of the dataset is treated as public", *guarantee.caveats),
    )


def _plan(
    job: EstimatorJob,
    estimator: "PrivateEstimator",
    delta: float,
    neighboring_relation: str,
    events: Sequence[Event],
) -> str:
    """Everything that changes the guarantee: the estimator's parameters and its charges, all of them public."""
    from sordino.recipes import Stage
    from sordino.recipes.tabular import get_method

    parameters = {
        name: value if isinstance(value, int | float | str | bool | list | tuple | None) else repr(value)
        for name, value in estimator.get_params(deep=False).items()
        if name not in {"random_state", "ledger"}
    }
    body = {
        "schema": 1,
        "method": job.method,
        "estimator": type(estimator).__name__,
        "parameters": parameters,
        # What `verify` holds the transcript against, charge by charge.
        "stages": [Stage(name=job.method, charges=tuple(events)).to_dict()],
        "steps": len(events),
        "delta": delta,
        "neighboring_relation": neighboring_relation,
        "privacy_unit": "record",
        "dataset_size_is_public": "dataset_size" in get_method(job.method).wants,
    }
    return json.dumps(body, indent=2, allow_nan=False)


def estimator_metadata(job: EstimatorJob, rows: "TabularTask") -> dict[str, object]:
    """Public facts about the run. No path of this machine is among them."""
    dataset = job.dataset
    measured = "Accuracy or error on test records that are declared public."
    return {
        "target_epsilon": job.epsilon,
        "reproducible": job.seed is not None,
        "settings": "The settings are the estimator's defaults, which were fixed in advance on public datasets",
        "tuned_on_these_data": dataset.public and dataset.name in _TUNED_ON,
        "data": {
            "name": dataset.name,
            "records": rows.facts.dataset_size if dataset.public else None,
            "labels": rows.facts.classes,
            "target": rows.facts.target,
            "source": dataset.source if dataset.public else "not public",
            "license": dataset.license,
            "public": dataset.public,
            "held_out_every": dataset.held_out_every,
        },
        "training": {"model": job.method, "optimizer": None, "learning_rate": None, "averaging": None},
        "noise_arithmetic": "floating point",
        "data_accesses": {
            "preprocessing": "Each record is scaled and encoded on its own, by the declared schema.",
            "normalization": "No statistic of the records is computed.",
            "schema": "Bounds, categories and labels are declared, never taken from the records.",
            "early_stopping": "None: the number of steps is fixed in advance.",
            "evaluation": measured if job.test_is_public and dataset.test is not None else "None.",
            "logging": "No loss, norm or number of records is printed or stored.",
        },
        **composition_statement(public=dataset.public, charged=job.ledger is not None),
    }


def _save(run: RunFolder, job: EstimatorJob, fitted: "FittedTable") -> None:
    """Write what was learned, and what it is."""
    import torch

    from sordino.recipes.saved_model import describe_estimator
    from sordino.recipes.tabular import predicted_from

    arrays = fitted.estimator.learned_arrays()
    run.save_model({name: torch.from_numpy(np.array(value)) for name, value in arrays.items()})
    run.write_model_description(describe_estimator(predicted_from(job.dataset, job.target), fitted))


def estimator_metrics(job: EstimatorJob, rows: "TabularTask", fitted: "FittedTable") -> dict[str, Metric]:
    """What may be shown: the private model on public test records; models without privacy only when all is public."""
    from sordino.recipes.tabular import non_private_scores
    from sordino.report import compute_label_utility, compute_regression_utility, compute_utility

    if rows.test is None or not len(rows.test[0]) or not job.test_is_public:
        return {}
    features, targets = rows.test
    if rows.facts.classes is None:
        found = compute_regression_utility(fitted.predict(features), targets, public=True)
    else:
        assert job.dataset.test is not None
        groups = subgroups_of(job.dataset, job.dataset.test)
        chances = fitted.predict_proba(features)
        if chances is not None:
            found = compute_utility(chances, targets, public=True, groups=groups)
        else:
            found = compute_label_utility(
                fitted.predict(features),
                targets,
                classes=rows.facts.classes,
                scores=fitted.scores(features),
                public=True,
                groups=groups,
            )
    if job.dataset.public:
        others = non_private_scores(rows)
        baseline = "trees" if job.method == "boosting" else "linear"
        found[f"baseline_test_{rows.metric}"] = Metric(
            value=others[baseline], public=True, what=f"scikit-learn's {baseline} model without privacy, public data"
        )
    return found


# ----------------------------------------------------------------------------------------------------------------------
# `tune` at work: charged in a run folder before the first run, then the search, and the winner's files.
# ----------------------------------------------------------------------------------------------------------------------


_EXAMPLES = 3
_COUNTED = 10_000


@dataclass(frozen=True, kw_only=True)
class TuningJob:
    """One search as the command asks for it.

    Args:
        dataset: what is trained on; `dataset.public` decides what may be measured.
        test_is_public: whether `dataset.test` may be measured on.
        method: name of the estimator's method.
        target: the column to predict, or None for the label.
        epsilon: of everything.
        delta: of everything; None takes the default.
        mean: of the number of runs.
        shape: η of its distribution.
        public_score: whether runs are judged on public test records.
        score_noise: of a private score, in records.
        space: of the estimator's parameters.
        rng: of the search.
        folder: where the run goes.
        ledger: the dataset's account, or None.
    """

    dataset: "DatasetSplits"
    test_is_public: bool
    method: str
    target: str | None
    epsilon: float
    delta: float | None
    mean: float
    shape: float
    public_score: bool
    score_noise: float
    space: "SearchSpace"
    rng: KeyedRNG
    folder: Path
    ledger: "Account | None"


class _Written:
    """Stands for the account: charges it, and writes the charge to the transcript, as its one line."""

    def __init__(self, run: RunFolder, ledger: "Account | None") -> None:
        self.run, self.ledger = run, ledger

    def charge(
        self, event: Event, *, note: str, neighboring_relation: NeighboringRelation, privacy_unit: PrivacyUnit
    ) -> None:
        """Charge the account, which may refuse, then write the line."""
        if self.ledger is not None:
            self.ledger.charge(
                event,
                note=note,
                run=self.run.path.name,
                neighboring_relation=neighboring_relation,
                privacy_unit=privacy_unit,
            )
        self.run.append(step=0, event=event, epsilon=None)


def _accountant(ledger: "Account | None", *, gaussian: bool) -> str:
    """The one by which the account prices, so that a search that fits the target fits the account."""
    budget = None if ledger is None else ledger.budget()
    if budget is None or budget.policy == "pld":
        return "auto"
    return "rdp" if gaussian else "basic"


def _words_of(distribution: "RandomStopping") -> str:
    """How many fits there will be, as far as it is public: 19 of 20 searches have at most as many."""
    left, most = 0.95, 0
    while left > 0 and most < _COUNTED:
        most += 1
        left -= distribution.probability(most)
    return f"a secret number of fits, {distribution.mean:g} on average, at most {most:,} in 19 of 20 searches"


def _one(job: TuningJob) -> EstimatorJob:
    """The winner as one fit."""
    return EstimatorJob(
        dataset=job.dataset,
        test_is_public=job.test_is_public,
        method=job.method,
        target=job.target,
        epsilon=job.epsilon,
        delta=job.delta,
        seed=job.rng.seed,
        folder=job.folder,
    )


def run_tuning_job(job: TuningJob, out: Output) -> "tuple[Outcome, Config]":
    """Search, and leave a complete run folder with the winner.

    Guarantee: `Outcome.guarantee`, of everything in the folder. The folder's transcript has one line, for the whole
    search; nothing in it tells how many runs there were.
    """
    from sordino.recipes.tabular import make_tabular_task

    rows = make_tabular_task(job.dataset, target=job.target)
    if job.delta is not None:
        return _run_search(job, rows, _checked_delta(job.delta, rows), out)
    default = default_delta(rows.facts.dataset_size)
    return with_affordable_delta(lambda delta: _run_search(job, rows, delta, out), default, job.ledger, out)


def _run_search(job: TuningJob, rows: "TabularTask", delta: float, out: Output) -> "tuple[Outcome, Config]":
    from sordino.report import write_report
    from sordino.tuning import PrivateScore, RandomStopping, tune

    train, runs = _training(job, rows, delta)
    method = RandomStopping(mean=job.mean, shape=job.shape)
    run = RunFolder.create(
        job.folder, plan=_tuning_run_plan(job, delta, runs.neighboring_relation.value), meta=_meta(job, rows)
    )
    try:
        with out.progress(f"searching: {_words_of(method)}"):
            tuned = tune(
                train,
                job.space,
                target_epsilon=job.epsilon,
                delta=delta,
                method=method,
                run_event=runs.run,
                score=None if job.public_score else PrivateScore(noise_multiplier=job.score_noise),
                neighboring_relation=runs.neighboring_relation,
                ledger=_Written(run, job.ledger),  # pyright: ignore[reportArgumentType]
                rng=job.rng,
                accountant=_accountant(job.ledger, gaussian=runs.gaussian),
            )
    except BaseException:
        run.close()
        if not any(run):
            shutil.rmtree(run.path)
        raise
    size = ("the size of the dataset is treated as public", *tuned.guarantee.caveats)
    guarantee = replace(tuned.guarantee, caveats=size)
    if tuned.model is None:
        run.close()
        run.write_guarantee(guarantee)
        raise SordinoError("settings must give a model in some run, got none. The search is paid for. Narrow --space.")
    _save(run, _one(job), tuned.model)
    run.close()
    run.write_guarantee(guarantee)
    with out.progress("measuring and writing the report"):
        metrics = estimator_metrics(_one(job), rows, tuned.model)
        run.write_metrics(metrics)
        write_report(run)
    return Outcome(run=run, guarantee=guarantee, metrics=metrics, steps=1, interrupted=False), tuned.config


def _training(
    job: TuningJob, rows: "TabularTask", delta: float
) -> "tuple[Callable[[Config, TrialBudget], tuple[FittedTable, float]], EstimatorRuns]":
    """One run of the search, and what it may spend."""
    from sordino.recipes.tabular import fit_to, get_method
    from sordino.tuning.random_search import EstimatorRuns

    method = get_method(job.method)

    def build(config: "Config", epsilon: float, slack: float, seed: int | None) -> "PrivateEstimator":
        seeded = {} if seed is None else {"random_state": seed, "reproducible": True}
        return method.estimator(rows.facts, epsilon=epsilon, delta=slack, **seeded).set_params(**config)

    unknown = set(job.space.priors) - set(build({}, 1.0, delta, None).get_params())
    if unknown:
        raise InvalidArgument(
            f"space must name parameters of {job.method}, got {', '.join(sorted(unknown))}. Check the spelling."
        )
    looks = KeyedRNG(seed=0, reproducible=True)
    runs = EstimatorRuns(
        build=build,
        examples=[job.space.draw(looks.stream("examples", step=step)) for step in range(_EXAMPLES)],
        columns=rows.facts.columns,
        run_delta=delta,
    )

    def train(config: "Config", share: "TrialBudget") -> "tuple[FittedTable, float]":
        fitted = fit_to(runs.estimator(config, share), rows)
        runs.check(fitted.estimator, share)
        if job.public_score:
            assert rows.test is not None
            value = fitted.score(*rows.test)
            return fitted, value if rows.metric == "accuracy" else -value
        return fitted, _right(fitted, rows)

    return train, runs


def _right(fitted: "FittedTable", rows: "TabularTask") -> float:
    """Right answers on the training records, or Σ(1 − (error/range)²): one record moves it by at most 1."""
    features, targets = rows.train
    found = fitted.predict(features)
    if rows.facts.target_bounds is None:
        return float(np.count_nonzero(found == targets))
    low, high = rows.facts.target_bounds
    true, guessed = (np.clip(part.astype(np.float64), low, high) for part in (targets, found))
    return float(np.nan_to_num(1 - ((guessed - true) / (high - low)) ** 2).sum())


def _tuning_run_plan(job: TuningJob, delta: float, neighboring_relation: str) -> str:
    """Everything that changes the guarantee, all of it public."""
    body = {
        "schema": 1,
        "method": job.method,
        "steps": 1,
        "tuning": {
            "method": "random stopping",
            "mean": checks.positive(runs=job.mean),
            "shape": job.shape,
            "score": "public" if job.public_score else "private",
            "score_noise": None if job.public_score else job.score_noise,
            "space": {name: repr(prior) for name, prior in job.space.priors.items()},
        },
        "delta": delta,
        "neighboring_relation": neighboring_relation,
        "privacy_unit": "record",
        "dataset_size_is_public": True,
    }
    return json.dumps(body, indent=2, allow_nan=False)


def _meta(job: TuningJob, rows: "TabularTask") -> dict[str, object]:
    meta = estimator_metadata(_one(job), rows)
    judged = "on public test records" if job.public_score else "on the records, with noise"
    said = (
        f"Settings were drawn at random from a space fixed in advance, a secret random number of times (mean "
        f"{job.mean:g}), and judged {judged}. Every run, its score and the choice are within ε; only the winner left."
    )
    accesses = meta["data_accesses"]
    assert isinstance(accesses, dict)
    return meta | {"settings": said, "tuned_on_these_data": False, "data_accesses": accesses | {"tuning": said}}
