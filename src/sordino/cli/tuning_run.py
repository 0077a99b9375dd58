"""`tune` at work: charged in a run folder before the first run, then the search, and the winner's files."""

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console

from sordino import checks
from sordino.cli.fitting import Fit, meta_of, metrics_of, tensors_of
from sordino.cli.running import Outcome, default_delta
from sordino.definitions import NeighboringRelation, PrivacyUnit
from sordino.errors import InvalidArgument, SordinoError
from sordino.events import Event
from sordino.randomness import Randomness
from sordino.runs import RunFolder

if TYPE_CHECKING:
    from collections.abc import Callable

    from sordino.data import DataSet
    from sordino.estimators.base import PrivateEstimator
    from sordino.ledger import Account
    from sordino.recipes import Table
    from sordino.recipes.methods import FittedTable
    from sordino.tuning.estimator_runs import EstimatorRuns
    from sordino.tuning.share import Share
    from sordino.tuning.space import Config, SearchSpace

__all__ = ["Search", "perform_search"]

_EXAMPLES = 3


@dataclass(frozen=True, kw_only=True)
class Search:
    """One search as the command asks for it.

    Args:
        dataset: what is trained on; `dataset.public` decides what may be measured.
        test_is_public: whether `dataset.test` may be measured on.
        method: name of the estimator's method.
        target: the column to predict, or None for the label.
        epsilon: of everything.
        delta: of everything; None takes the default.
        mean: of the number of runs.
        shape: η of its law.
        public_score: whether runs are judged on public test records.
        score_noise: of a private score, in records.
        space: of the estimator's parameters.
        randomness: of the search.
        folder: where the run goes.
        ledger: the data set's account, or None.
    """

    dataset: "DataSet"
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
    randomness: Randomness
    folder: Path
    ledger: "Account | None"


class _Written:
    """Stands for the account: charges it, and writes the charge to the transcript, as its one line."""

    def __init__(self, run: RunFolder, ledger: "Account | None") -> None:
        self.run, self.ledger = run, ledger

    def charge(self, event: Event, *, note: str, relation: NeighboringRelation, unit: PrivacyUnit) -> None:
        """Charge the account, which may refuse, then write the line."""
        if self.ledger is not None:
            self.ledger.charge(event, note=note, run=self.run.path.name, relation=relation, unit=unit)
        self.run.append(step=0, event=event, epsilon=None)


def _accountant(ledger: "Account | None", *, gaussian: bool) -> str:
    """The one by which the account prices, so that a search that fits the target fits the account."""
    if ledger is None or ledger.budget().policy == "pld":
        return "auto"
    return "rdp" if gaussian else "basic"


def _one(job: Search) -> Fit:
    """The winner as one fit."""
    return Fit(
        dataset=job.dataset,
        test_is_public=job.test_is_public,
        method=job.method,
        target=job.target,
        epsilon=job.epsilon,
        delta=job.delta,
        seed=job.randomness.seed,
        folder=job.folder,
    )


def perform_search(job: Search, console: Console) -> "tuple[Outcome, Config]":
    """Search, and leave a complete run folder with the winner.

    Guarantee: `Outcome.guarantee`, of everything in the folder. The folder's transcript has one line, for the whole
    search; nothing in it tells how many runs there were.
    """
    from sordino.recipes.tables import table
    from sordino.report import write
    from sordino.tuning import PrivateScore, RandomStopping, tune

    rows = table(job.dataset, target=job.target)
    delta = default_delta(rows.facts.population) if job.delta is None else job.delta
    if delta * rows.facts.population >= 1:
        raise InvalidArgument(
            f"delta must be below 1 / number of records = {1 / rows.facts.population:.3g}, got {delta!r}. "
            "A larger one would allow the release of whole records."
        )
    train, runs = _training(job, rows, delta)
    method = RandomStopping(mean=job.mean, shape=job.shape)
    run = RunFolder.create(job.folder, plan=_plan(job, delta, runs.relation.value), meta=_meta(job, rows))
    try:
        with console.status("searching"):
            tuned = tune(
                train,
                job.space,
                target_epsilon=job.epsilon,
                delta=delta,
                method=method,
                run=runs.run,
                score=None if job.public_score else PrivateScore(noise_multiplier=job.score_noise),
                neighboring_relation=runs.relation,
                ledger=_Written(run, job.ledger),  # pyright: ignore[reportArgumentType]
                randomness=job.randomness,
                accountant=_accountant(job.ledger, gaussian=runs.gaussian),
            )
    except BaseException:
        run.close()
        if not any(run):
            shutil.rmtree(run.path)
        raise
    size = ("the size of the data set is treated as public", *tuned.guarantee.caveats)
    guarantee = replace(tuned.guarantee, caveats=size)
    if tuned.model is None:
        run.close()
        run.write_guarantee(guarantee)
        raise SordinoError("settings must give a model in some run, got none. The search is paid for. Narrow --space.")
    run.save_model(tensors_of(tuned.model.estimator))
    run.close()
    run.write_guarantee(guarantee)
    with console.status("measuring and writing the report"):
        metrics = metrics_of(_one(job), rows, tuned.model)
        run.write_metrics(metrics)
        write(run)
    return Outcome(run=run, guarantee=guarantee, metrics=metrics, steps=1, interrupted=False), tuned.config


def _training(
    job: Search, rows: "Table", delta: float
) -> "tuple[Callable[[Config, Share], tuple[FittedTable, float]], EstimatorRuns]":
    """One run of the search, and what it may spend."""
    from sordino.recipes.methods import fit_to, method_called
    from sordino.tuning.estimator_runs import EstimatorRuns

    method = method_called(job.method)

    def build(config: "Config", epsilon: float, slack: float, seed: int | None) -> "PrivateEstimator":
        seeded = {} if seed is None else {"random_state": seed, "reproducible": True}
        return method.estimator(rows.facts, epsilon=epsilon, delta=slack, **seeded).set_params(**config)

    unknown = set(job.space.priors) - set(build({}, 1.0, delta, None).get_params())
    if unknown:
        raise InvalidArgument(
            f"space must name parameters of {job.method}, got {', '.join(sorted(unknown))}. Check the spelling."
        )
    looks = Randomness(seed=0, reproducible=True)
    runs = EstimatorRuns(
        build=build,
        examples=[job.space.draw(looks.stream("examples", step=step)) for step in range(_EXAMPLES)],
        columns=rows.facts.columns,
        run_delta=delta,
    )

    def train(config: "Config", share: "Share") -> "tuple[FittedTable, float]":
        fitted = fit_to(runs.estimator(config, share), rows)
        runs.check(fitted.estimator, share)
        if job.public_score:
            assert rows.test is not None
            value = fitted.score(*rows.test)
            return fitted, value if rows.measure == "accuracy" else -value
        return fitted, _right(fitted, rows)

    return train, runs


def _right(fitted: "FittedTable", rows: "Table") -> float:
    """Right answers on the training records, or Σ(1 − (error/range)²): one record moves it by at most 1."""
    features, targets = rows.train
    found = fitted.predict(features)
    if rows.facts.target_bounds is None:
        return float(np.count_nonzero(found == targets))
    low, high = rows.facts.target_bounds
    told, guessed = (np.clip(part.astype(np.float64), low, high) for part in (targets, found))
    return float(np.nan_to_num(1 - ((guessed - told) / (high - low)) ** 2).sum())


def _plan(job: Search, delta: float, relation: str) -> str:
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
        "neighboring_relation": relation,
        "privacy_unit": "example",
        "dataset_size_is_public": True,
    }
    return json.dumps(body, indent=2, allow_nan=False)


def _meta(job: Search, rows: "Table") -> dict[str, object]:
    meta = meta_of(_one(job), rows)
    judged = "on public test records" if job.public_score else "on the records, with noise"
    said = (
        f"Settings were drawn at random from a space fixed beforehand, a secret random number of times (mean "
        f"{job.mean:g}), and judged {judged}. Every run, its score and the choice are within ε; only the winner left."
    )
    touches = meta["data_touches"]
    assert isinstance(touches, dict)
    return meta | {"settings": said, "tuned_on_these_data": False, "data_touches": touches | {"tuning": said}}
