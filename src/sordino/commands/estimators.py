"""Estimators, charged first and fitted then: one for `train`, a search for `tune_estimator`, many for `compare`."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from sordino import accounting, checks
from sordino.commands.outcomes import (
    RunOutcome,
    closed_after_failure,
    composition_statement,
    describe_data,
    run_folder,
    subgroups_of,
    write_results,
)
from sordino.commands.pictures import checked_path
from sordino.commands.running import SILENT, DryRun, Progress, default_delta, perform, preview, with_affordable_delta
from sordino.commands.tables import TableOptions, load_table
from sordino.definitions import Guarantee, NeighboringRelation, PrivacyUnit
from sordino.errors import InvalidArgument, MissingDeclaration, SordinoError
from sordino.events import Event, compose
from sordino.randomness import KeyedRNG
from sordino.runs import Metric, RunFolder
from sordino.runs.transcript import encode_number

if TYPE_CHECKING:
    from sordino.data import DatasetSplits
    from sordino.estimators.base import PrivateEstimator
    from sordino.ledger import Account
    from sordino.recipes import TabularTask
    from sordino.recipes.tabular import Comparison, FittedTable, PublicFacts, TabularMethod
    from sordino.tuning.methods import Config, RandomStopping, SearchSpace
    from sordino.tuning.random_search import EstimatorRuns
    from sordino.tuning.search import TrialBudget

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


@dataclass(frozen=True, kw_only=True)
class EstimatorJob:
    """One fit of an estimator as `train` asks for it.

    Args:
        dataset: what is trained on; it says what may be measured.
        method: name of the method.
        target: the column to predict, or None for the label.
        epsilon: of the fit.
        delta: of the fit; None takes the default.
        seed: a chosen seed, or None.
    """

    dataset: "DatasetSplits"
    method: str
    target: str | None
    epsilon: float
    delta: float | None
    seed: int | None


def run_estimator(job: EstimatorJob, folder: Path, ledger: "Account | None", progress: Progress) -> RunOutcome:
    """Fit, and write a complete run folder, once the whole fit is charged to the account, if there is one.

    Guarantee: `RunOutcome.guarantee`. What the fit will cost is known before a record is read (its events depend on no
    record), and it is written to the transcript then. Nothing is measured on records that are not declared public.
    """
    return _with_delta(
        job, ledger, lambda rows, delta: _run_estimator(job, rows, delta, folder, ledger, progress), progress
    )


def _with_delta(
    job: EstimatorJob,
    ledger: "Account | None",
    work: "Callable[[TabularTask, float], RunOutcome]",
    progress: Progress,
) -> RunOutcome:
    """Work with the δ that was given, in [0, 1 / number of records), or with the default that the account has."""
    from sordino.recipes.tabular import make_tabular_task

    rows = make_tabular_task(job.dataset, target=job.target)
    size = rows.facts.dataset_size
    if job.delta is None:
        return with_affordable_delta(lambda delta: work(rows, delta), default_delta(size), ledger, progress)
    delta = checks.probability(one=False, delta=job.delta)
    if delta * size >= 1:
        raise InvalidArgument(
            f"delta must be below 1 / number of records = {1 / size:.3g}, got {delta!r}. "
            "A larger one would allow the release of whole records."
        )
    return work(rows, delta)


def _run_estimator(
    job: EstimatorJob, rows: "TabularTask", delta: float, folder: Path, ledger: "Account | None", progress: Progress
) -> RunOutcome:
    from sordino.estimators.base import dry_run_events
    from sordino.recipes import Stage
    from sordino.recipes.tabular import fit_to, get_method

    method = get_method(job.method)
    seeded = {} if job.seed is None else {"random_state": job.seed, "reproducible": True}
    estimator = method.estimator(rows.facts, epsilon=job.epsilon, delta=delta, **seeded)
    events, neighboring_relation = dry_run_events(estimator, rows.facts.columns)
    whole = compose(list(events))
    spent = accounting.epsilon(whole, delta, neighboring_relation=neighboring_relation)
    if ledger is not None:
        ledger.check_charge(whole, neighboring_relation=neighboring_relation)
    parameters = {
        name: value if isinstance(value, int | float | str | bool | list | tuple | None) else repr(value)
        for name, value in estimator.get_params(deep=False).items()
        if name not in {"random_state", "ledger"}
    }
    plan = _plan(
        job,
        delta,
        neighboring_relation,
        steps=len(events),
        dataset_size_is_public="dataset_size" in method.wants,
        estimator=type(estimator).__name__,
        parameters=parameters,
        # What `verify` holds the transcript against, charge by charge.
        stages=[Stage(name=job.method, charges=tuple(events)).to_dict()],
    )
    run = RunFolder.create(folder, plan=plan, meta=_metadata(job, rows, charged=ledger is not None))
    with closed_after_failure(run):
        # Charged here and not by the estimator, so that every line of the transcript names the charge that paid for it.
        charge = None
        if ledger is not None:
            charge = ledger.charge(
                whole,
                note=type(estimator).__name__,
                run=run.path.name,
                neighboring_relation=neighboring_relation,
                privacy_unit=PrivacyUnit.RECORD,
            ).digest
        # The estimator draws its key itself, and the fit is one segment.
        run.begin(key=None, first_step=0, most=compose(list(dict.fromkeys(events))), seeded=job.seed is not None)
        for number, event in enumerate(events):
            last = number == len(events) - 1
            run.append(step=number, event=event, epsilon=spent.upper if last else None, charge=charge)
        with progress.stage(f"fitting {type(estimator).__name__}"):
            fitted = fit_to(estimator, rows)
    _save(run, job, fitted)
    run.close()
    guarantee = estimator.guarantee_
    # Divisors and batch sizes, or δ, were taken from the number of records, so the guarantee says so.
    if "dataset_size" in method.wants or (job.delta is None and delta < _USUAL_DELTA):
        guarantee = _with_public_size(guarantee)
    run.write_guarantee(guarantee)
    with progress.stage("measuring and writing the report"):
        metrics = _measured(job, rows, fitted)
        write_results(run, metrics)
    return RunOutcome(run=run, guarantee=guarantee, metrics=metrics, steps=len(events))


def _with_public_size(guarantee: Guarantee) -> Guarantee:
    return replace(guarantee, caveats=("the size of the dataset is treated as public", *guarantee.caveats))


def _plan(
    job: EstimatorJob,
    delta: float,
    neighboring_relation: NeighboringRelation,
    *,
    steps: int,
    dataset_size_is_public: bool,
    **own: object,
) -> str:
    """Everything that changes the guarantee, all of it public; `own` is what a fit or a search alone has."""
    body = {
        "schema": 1,
        "method": job.method,
        **own,
        "steps": steps,
        "delta": delta,
        "neighboring_relation": neighboring_relation.value,
        "privacy_unit": "record",
        "dataset_size_is_public": dataset_size_is_public,
    }
    return json.dumps(body, indent=2, allow_nan=False)


def _metadata(job: EstimatorJob, rows: "TabularTask", *, charged: bool) -> dict[str, Any]:
    """Public facts about the run. No path of this machine is among them."""
    dataset = job.dataset
    measured = "Accuracy or error on test records that are declared public."
    return {
        "target_epsilon": job.epsilon,
        "reproducible": job.seed is not None,
        "settings": "The settings are the estimator's defaults, which were fixed in advance on public datasets",
        "tuned_on_these_data": dataset.public and dataset.name in _TUNED_ON,
        "data": {
            **describe_data(
                dataset, records=rows.facts.dataset_size if dataset.public else None, labels=rows.facts.classes
            ),
            "target": rows.facts.target,
        },
        "training": {"model": job.method, "optimizer": None, "learning_rate": None, "averaging": None},
        "noise_arithmetic": "floating point",
        "data_accesses": {
            "preprocessing": "Each record is scaled and encoded on its own, by the declared schema.",
            "normalization": "No statistic of the records is computed.",
            "schema": "Bounds, categories and labels are declared, never taken from the records.",
            "early_stopping": "None: the number of steps is fixed in advance.",
            "evaluation": measured if dataset.test_is_public else "None.",
            "logging": "No loss, norm or number of records is printed or stored.",
        },
        **composition_statement(public=dataset.public, charged=charged),
    }


def _save(run: RunFolder, job: EstimatorJob, fitted: "FittedTable") -> None:
    """Write what was learned, and what it is."""
    import torch

    from sordino.recipes.saved_model import describe_estimator
    from sordino.recipes.tabular import predicted_from

    arrays = fitted.estimator.learned_arrays()
    run.save_model({name: torch.from_numpy(np.array(value)) for name, value in arrays.items()})
    run.write_model_description(describe_estimator(predicted_from(job.dataset, job.target), fitted))


def _measured(job: EstimatorJob, rows: "TabularTask", fitted: "FittedTable") -> dict[str, Metric]:
    """What may be shown: the private model on public test records; models without privacy only when all is public."""
    from sordino.recipes.tabular import non_private_scores
    from sordino.report import compute_label_utility, compute_regression_utility, compute_utility

    if rows.test is None or not len(rows.test[0]) or not job.dataset.test_is_public:
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
        baseline = "trees" if job.method in {"boosting", "forest"} else "linear"
        found[f"baseline_test_{rows.metric}"] = Metric(
            value=others[baseline], public=True, what=f"scikit-learn's {baseline} model without privacy, public data"
        )
    return found


# ----------------------------------------------------------------------------------------------------------------------
# `tune_estimator`: charged in a run folder before the first run, then the search, and the winner's files.
# ----------------------------------------------------------------------------------------------------------------------


def tune_estimator(
    data: "str | Path | DatasetSplits",
    *,
    epsilon: float,
    model: str = "dp-gd",
    delta: float | None = None,
    runs: float = 20.0,
    shape: float = 0.0,
    score: str = "private",
    score_noise: float = 30.0,
    space: Path | str | None = None,
    seed: int | None = None,
    reproducible: bool = False,
    out: Path | str | None = None,
    ledger: "Account | None" = None,
    dry_run: bool = False,
    progress: Progress = SILENT,
    **table: Unpack[TableOptions],
) -> RunOutcome | DryRun:
    """Search an estimator's settings by random stopping, and write the best model's run folder.

    Guarantee: `RunOutcome.guarantee`, of everything in the folder. The folder's transcript has one line, for the whole
    search; nothing in it tells how many runs there were, or what the others gave.

    Args:
        data: Name from `sordino data list`, or a file.
        epsilon: ε of the whole search: all runs, their scores, and the choice.
        model: An estimator's method, as for train.
        delta: δ of the whole search, as for train.
        runs: Mean of the secret number of runs, > 1.
        shape: Shape η > −1 of the number of runs: 0 logarithmic, 1 geometric.
        score: Records that score the runs: `private` ones or `public` test records.
        score_noise: Noise scale of a private score, in records.
        space: JSON file with the search space. Default: the method's own.
        seed: Seed of all random numbers; only with --reproducible.
        reproducible: Allow --seed; the result is marked not for release.
        out: Run folder to create. Default: runs/NAME-DATE-NUMBER.
        ledger: the account that is charged.
        dry_run: only say what it would cost.
        progress: what is said meanwhile.
        **table: how a file is declared and read, see `sordino.commands.TableOptions`.

    Returns:
        The run, whose `details` have the chosen settings; with `dry_run` the cost.

    Raises:
        BudgetExceeded: the account does not have it; nothing was read.
        InvalidArgument: an option is out of range.
        MissingDeclaration: a declaration is missing.
        SordinoError: no run gave a model; the search is charged all the same.
    """
    from sordino.tuning import RandomStopping

    checks.positive(epsilon=epsilon)
    checks.one_of(("private", "public"), score=score)
    if checks.positive(runs=runs) <= 1:
        raise InvalidArgument(f"runs must be above 1, got {runs:g}: one run needs no search. Give --runs 20, or train.")
    if delta is not None:
        checks.probability(zero=False, one=False, delta=delta)
    if not is_method(model):
        raise InvalidArgument(f"model must be an estimator's method, got {model!r}. Tune modules from Python.")
    dataset, target = load_table(data, table, progress, by_estimator=True), table.get("target")
    if score == "public" and not dataset.test_is_public:
        raise MissingDeclaration("test must be declared for a public score: a PUBLIC file to measure on. Give --test.")
    search = _Search(
        distribution=RandomStopping(mean=runs, shape=shape),
        public_score=score == "public",
        score_noise=score_noise,
        space=_space(model, space, number=_is_number(dataset, target)),
        rng=KeyedRNG(seed=seed, reproducible=reproducible),
    )
    job = EstimatorJob(dataset=dataset, method=model, target=target, epsilon=epsilon, delta=delta, seed=seed)
    kind = "public" if dataset.public else "private"
    progress.status(f"{kind} records, settings of {model} by random stopping", title=dataset.name)

    def work(payer: "Account | None", folder: Path) -> RunOutcome:
        return _with_delta(
            job, payer, lambda rows, level: _run_search(job, search, rows, level, folder, payer, progress), progress
        )

    return perform(
        work,
        run_folder(f"{dataset.name}-tuned", out),
        ledger,
        dry_run=dry_run,
        delta=default_delta(len(dataset.train)) if delta is None else delta,
        progress=progress,
    )


_EXAMPLES = 3
_COUNTED = 10_000


@dataclass(frozen=True, kw_only=True)
class _Search:
    """How settings are searched.

    Args:
        distribution: of the number of runs.
        public_score: whether runs are judged on public test records.
        score_noise: of a private score, in records.
        space: of the estimator's parameters.
        rng: of the search.
    """

    distribution: "RandomStopping"
    public_score: bool
    score_noise: float
    space: "SearchSpace"
    rng: KeyedRNG


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


def _run_search(
    job: EstimatorJob,
    search: _Search,
    rows: "TabularTask",
    delta: float,
    folder: Path,
    ledger: "Account | None",
    progress: Progress,
) -> RunOutcome:
    from sordino.tuning import PrivateScore, tune

    train, runs = _training(job, search, rows, delta)
    tuning = {
        "method": "random stopping",
        "mean": search.distribution.mean,
        "shape": search.distribution.shape,
        "score": "public" if search.public_score else "private",
        "score_noise": None if search.public_score else search.score_noise,
        "space": {name: repr(prior) for name, prior in search.space.priors.items()},
    }
    plan = _plan(job, delta, runs.neighboring_relation, steps=1, dataset_size_is_public=True, tuning=tuning)
    meta = _search_metadata(search, _metadata(job, rows, charged=ledger is not None))
    run = RunFolder.create(folder, plan=plan, meta=meta)
    with closed_after_failure(run), progress.stage(f"searching: {_words_of(search.distribution)}"):
        tuned = tune(
            train,
            search.space,
            target_epsilon=job.epsilon,
            delta=delta,
            method=search.distribution,
            run_event=runs.run,
            score=None if search.public_score else PrivateScore(noise_multiplier=search.score_noise),
            neighboring_relation=runs.neighboring_relation,
            ledger=_Written(run, ledger),  # pyright: ignore[reportArgumentType]
            rng=search.rng,
            accountant=_accountant(ledger, gaussian=runs.gaussian),
        )
    guarantee = _with_public_size(tuned.guarantee)
    if tuned.model is None:
        run.close()
        run.write_guarantee(guarantee)
        raise SordinoError("settings must give a model in some run, got none. The search is paid for. Narrow --space.")
    _save(run, job, tuned.model)
    run.close()
    run.write_guarantee(guarantee)
    with progress.stage("measuring and writing the report"):
        metrics = _measured(job, rows, tuned.model)
        write_results(run, metrics)
    details = {
        "settings": tuned.config,
        "tuning": "random stopping",
        "score": "public" if search.public_score else "private",
    }
    return RunOutcome(run=run, guarantee=guarantee, metrics=metrics, steps=1, details=details)


def _training(
    job: EstimatorJob, search: _Search, rows: "TabularTask", delta: float
) -> "tuple[Callable[[Config, TrialBudget], tuple[FittedTable, float]], EstimatorRuns]":
    """One run of the search, and what it may spend."""
    from sordino.recipes.tabular import fit_to, get_method
    from sordino.tuning.random_search import EstimatorRuns

    method = get_method(job.method)

    def build(config: "Config", epsilon: float, slack: float, seed: int | None) -> "PrivateEstimator":
        seeded = {} if seed is None else {"random_state": seed, "reproducible": True}
        return method.estimator(rows.facts, epsilon=epsilon, delta=slack, **seeded).set_params(**config)

    unknown = set(search.space.priors) - set(build({}, 1.0, delta, None).get_params())
    if unknown:
        raise InvalidArgument(
            f"space must name parameters of {job.method}, got {', '.join(sorted(unknown))}. Check the spelling."
        )
    looks = KeyedRNG(seed=0, reproducible=True)
    runs = EstimatorRuns(
        build=build,
        examples=[search.space.draw(looks.stream("examples", step=step)) for step in range(_EXAMPLES)],
        columns=rows.facts.columns,
        run_delta=delta,
    )

    def train(config: "Config", share: "TrialBudget") -> "tuple[FittedTable, float]":
        fitted = fit_to(runs.estimator(config, share), rows)
        runs.check(fitted.estimator, share)
        if search.public_score:
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


def _search_metadata(search: _Search, meta: dict[str, Any]) -> dict[str, object]:
    judged = "on public test records" if search.public_score else "on the records, with noise"
    said = (
        f"Settings were drawn at random from a space fixed in advance, a secret random number of times (mean "
        f"{search.distribution.mean:g}), and judged {judged}. Every run, its score and the choice are within ε; only "
        "the winner left."
    )
    accesses = meta["data_accesses"] | {"tuning": said}
    return meta | {"settings": said, "tuned_on_these_data": False, "data_accesses": accesses}


_KINDS = ("uniform", "log_uniform", "integers")


def _is_number(dataset: "DatasetSplits", target: str | None) -> bool:
    """Whether a number is predicted: the schema's target, or one of its numeric columns."""
    return not dataset.labels or (dataset.schema is not None and target not in {None, dataset.schema.target})


def _space(model: str, path: Path | str | None, *, number: bool) -> "SearchSpace":
    """The file's space, or the method's own: ranges that were fixed in advance."""
    from sordino.tuning.methods import Integers, LogUniform, SearchSpace, Uniform

    if path is None:
        own = {
            "dp-gd": {"learning_rate": LogUniform(1.0, 256.0), "max_grad_norm": LogUniform(0.05, 1.0)},
            "dp-sgd": {"learning_rate": LogUniform(1.0, 256.0), "max_grad_norm": LogUniform(0.05, 1.0)},
            "objective": {"regularization": LogUniform(0.3, 100.0)},
            "output": {"regularization": LogUniform(1.0, 300.0)},
            "svm": {"regularization": LogUniform(0.3, 100.0)},
            "forest": {"n_estimators": [25, 50, 100, 200], "smoothing": LogUniform(0.3, 10.0)},
            "boosting": {"max_iter": [25, 50, 100, 200], "learning_rate": LogUniform(0.05, 0.5)},
        }
        if number:
            # A squared loss curves with the norm of the rows: steps above 1 diverge. λ of least squares is the
            # method's own.
            own["dp-gd"] = {"learning_rate": LogUniform(0.05, 1.0), "max_grad_norm": LogUniform(0.05, 1.0)}
            del own["objective"], own["output"]
        if model not in own:
            raise MissingDeclaration(f"space must be declared for {model}, which has none of its own. Give --space.")
        return SearchSpace(own[model])
    try:
        body = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidArgument(
            f"space must be a JSON file, got {Path(path).name!r}. See `sordino explain tuning`."
        ) from error
    if not isinstance(body, dict) or not body:
        raise InvalidArgument("space must be an object of settings, got something else. See `sordino explain tuning`.")
    makers = {"uniform": Uniform, "log_uniform": LogUniform, "integers": Integers}
    found: dict[str, object] = {}
    for name, setting in body.items():
        if isinstance(setting, list):
            found[name] = setting
        elif isinstance(setting, dict) and len(setting) == 1 and (kind := next(iter(setting))) in _KINDS:
            low, high = setting[kind] if isinstance(setting[kind], list) and len(setting[kind]) == 2 else (None, None)
            if not isinstance(low, int | float) or not isinstance(high, int | float):
                raise InvalidArgument(
                    f"{name} must have [low, high], got something else. See `sordino explain tuning`."
                )
            found[name] = makers[kind](low, high)
        else:
            raise InvalidArgument(f"{name} must be a list or one of {', '.join(_KINDS)}. See `sordino explain tuning`.")
    return SearchSpace(found)


# ----------------------------------------------------------------------------------------------------------------------
# `compare`: all methods that can learn a table, side by side, and what comparing costs.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class MethodComparison:
    """Methods side by side.

    Args:
        found: their scores and what all fits cost together.
        non_private: scores of models without privacy; empty for private records.
        methods: those compared.
        data: name of the dataset.
        target: what is predicted.
        public: whether the records are public.
        delta: of a fit.
        repeats: fits of each method at each ε.
        picture: the file with the picture.
    """

    found: "Comparison"
    non_private: Mapping[str, float]
    methods: "Sequence[TabularMethod]"
    data: str
    target: str
    public: bool
    delta: float
    repeats: int
    picture: Path

    def to_dict(self) -> dict[str, object]:
        """As JSON types."""
        found, total = self.found, self.found.total
        return {
            "measure": found.measure,
            "delta": self.delta,
            "public": self.public,
            "results": [
                {"method": cell.method, "epsilon": cell.epsilon, "score": cell.mean, "scores": list(cell.scores)}
                for cell in found.cells
            ],
            "non_private": dict(self.non_private),
            "total": {
                "epsilon": encode_number(total.epsilon),
                "delta": total.delta,
                "neighboring_relation": total.neighboring_relation.value,
                "accountant": total.accountant,
                "description": total.describe(),
            },
            "picture": str(self.picture),
        }


def compare(
    data: "str | Path | DatasetSplits",
    *,
    epsilon: float | Sequence[float] = (0.1, 1.0, 8.0),
    delta: float | None = None,
    methods: Sequence[str] | None = None,
    repeats: int = 1,
    plot: Path | str | None = None,
    ledger: "Account | None" = None,
    dry_run: bool = False,
    progress: Progress = SILENT,
    **table: Unpack[TableOptions],
) -> MethodComparison | DryRun:
    """Fit private methods on one table, measure them on public test records, and draw the picture.

    On public data every method is fitted at every ε. On private records every fit is charged, so there is one ε for
    all of them together, and each method gets its part.

    Guarantee: on private records `MethodComparison.found.total`, of all fits together.

    Args:
        data: Name from `sordino data list`, or a file.
        epsilon: ε of each fit; several values on public data, one on private data.
        delta: δ, as for train.
        methods: Method names, separated by commas. Default: all that support the table.
        repeats: Number of fits per method and ε, on public data.
        plot: Picture file, .png or .svg. Default: compare-NAME.png.
        ledger: the account that is charged.
        dry_run: only say what it would cost.
        progress: what is said meanwhile.
        **table: how a file is declared and read, see `sordino.commands.TableOptions`.

    Returns:
        The scores; with `dry_run` the cost.

    Raises:
        BudgetExceeded: the account does not have it; nothing was read.
        InvalidArgument: an option is out of range.
        MissingDeclaration: a declaration is missing.
    """
    budgets = sorted(
        {checks.positive(epsilon=value) for value in ([epsilon] if isinstance(epsilon, int | float) else epsilon)}
    )
    checks.integer(1, repeats=repeats)
    if delta is not None:
        checks.probability(zero=False, one=False, delta=delta)
    dataset = load_table(data, table, progress, by_estimator=True)
    picture = checked_path(Path(f"compare-{dataset.name}.png" if plot is None else plot))
    if ledger is not None and dataset.public:
        raise InvalidArgument(
            "ledger must be left out for public records, got one: they have no privacy budget. Drop --ledger."
        )
    if not dataset.public and len(budgets) != 1:
        raise InvalidArgument(
            f"epsilon must be one number on private records, got {len(budgets)}: every fit is paid for, and all "
            "methods share one budget. Give --epsilon once, or declare the data public."
        )
    if dataset.test is None:
        raise MissingDeclaration(
            "test must be declared: a PUBLIC file to measure on. Accuracy on private records is a release of its own."
        )
    from sordino.recipes import tabular
    from sordino.recipes.tabular import make_tabular_task, non_private_scores

    rows = make_tabular_task(dataset, target=table.get("target"))
    chosen = _chosen_methods(methods, rows.facts)
    slack = default_delta(rows.facts.dataset_size) if delta is None else delta
    progress.status(_describe_comparison(dataset.public, len(chosen), budgets), title=dataset.name)
    if dry_run and dataset.public:
        return DryRun(why="the records are public")

    def shared(level: float, payer: "Account | None", advance: "Callable[[], None] | None" = None) -> "Comparison":
        return tabular.compare_private(rows, chosen, epsilon=budgets[0], delta=level, ledger=payer, progress=advance)

    def affordable(payer: "Account | None", advance: "Callable[[], None] | None" = None) -> "Comparison":
        if delta is not None:
            return shared(delta, payer, advance)
        return with_affordable_delta(lambda level: shared(level, payer, advance), slack, payer, progress)

    if dry_run:
        return preview(lambda payer, _: affordable(payer), ledger, delta=slack, progress=progress)
    fits = len(chosen) * (len(budgets) * repeats if dataset.public else 1)
    with progress.stage("fitting", total=fits) as advance:
        if dataset.public:
            found = tabular.compare_public(
                rows, chosen, epsilons=budgets, delta=slack, repeats=repeats, progress=advance
            )
            others = non_private_scores(rows)
        else:
            found, others = affordable(ledger, advance), {}
    from sordino.commands.pictures import plot_comparison

    plot_comparison(found, others, title=f"{dataset.name}: {rows.facts.target}", delta=slack, path=picture)
    return MethodComparison(
        found=found,
        non_private=others,
        methods=chosen,
        data=dataset.name,
        target=rows.facts.target,
        public=dataset.public,
        delta=slack,
        repeats=repeats,
        picture=picture,
    )


def _chosen_methods(names: Sequence[str] | None, facts: "PublicFacts") -> "list[TabularMethod]":
    from sordino.recipes.tabular import supported_methods

    suited = {method.name: method for method in supported_methods(facts)}
    if names is None:
        return list(suited.values())
    for name in names:
        checks.one_of(suited, methods=name)
    if not names or len(set(names)) != len(names):
        raise InvalidArgument("methods must be names with commas between, each once. Leave it out for all.")
    return [suited[name] for name in names]


def _describe_comparison(public: bool, methods: int, budgets: list[float]) -> str:
    if public:
        return f"public records, {methods} methods at ε = {', '.join(f'{value:g}' for value in budgets)}"
    return (
        f"PRIVATE records. {methods} methods SHARE ε = {budgets[0]:g}: every one of them gets only its part, and all "
        "of it is spent."
    )
