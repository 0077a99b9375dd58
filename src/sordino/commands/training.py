"""`train` and `demo`: a private model from a named dataset or a file, in a run folder with its guarantee and report."""

import math
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, cast

from sordino import checks
from sordino.commands.outcomes import (
    RunOutcome,
    closed_after_failure,
    composition_statement,
    describe_data,
    measure_test_records,
    probabilities,
    run_folder,
    write_results,
)
from sordino.commands.planning import check_sampling
from sordino.commands.running import (
    SILENT,
    DryRun,
    Progress,
    check_single_process_options,
    default_delta,
    init_distributed,
    perform,
    preview,
)
from sordino.commands.tables import TableOptions, default_model, load_table
from sordino.definitions import NeighboringRelation
from sordino.errors import InvalidArgument
from sordino.runs import Metric, RunFolder
from sordino.sampling import FixedSizeSampling, RandomAllocationSampling, ShuffledSampling, make_sampler

if TYPE_CHECKING:
    from torch import nn

    from sordino.data import DatasetSplits
    from sordino.ledger import Account
    from sordino.randomness import KeyedRNG
    from sordino.recipes import ModelFactory, Recipe, TrainingConfig
    from sordino.training.distributed import DistributedContext
    from sordino.training.plan import Plan


def demo(*, epsilon: float = 1.0, out: Path | str | None = None, progress: Progress = SILENT) -> RunOutcome:
    """Train a private model on the embedded Adult data, and measure it next to one without privacy.

    Args:
        epsilon: Target ε, never exceeded.
        out: Run folder to create. Default: runs/NAME-DATE-NUMBER.
        progress: what is said meanwhile.

    Returns:
        The run.
    """
    from sordino.data import load_dataset

    dataset = load_dataset("adult")
    config = get_recommended_config("logistic", dataset, epsilon, None, None)
    progress.status(
        f"{len(dataset.train):,} public census records, logistic regression, {config.plan.steps} private steps",
        title="Adult",
    )
    return _run(_Job(dataset=dataset, config=config, epsilon=epsilon, folder=run_folder("adult", out)), progress)


def train(
    data: "str | Path | DatasetSplits",
    *,
    epsilon: float | None = None,
    delta: float | None = None,
    model: "str | ModelFactory | None" = None,
    recipe: str | None = None,
    setting: str | None = None,
    device: str | None = None,
    steps: int | None = None,
    batch_size: float | None = None,
    max_grad_norm: float | None = None,
    learning_rate: float | None = None,
    sampling: str | None = None,
    neighboring_relation: NeighboringRelation | None = None,
    secure_mode: bool = False,
    release_losses: float | None = None,
    seed: int | None = None,
    reproducible: bool = False,
    out: Path | str | None = None,
    resume: Path | str | None = None,
    checkpoint_every: int | None = None,
    diagnostics: str | None = None,
    ledger: "Account | None" = None,
    dry_run: bool = False,
    progress: Progress = SILENT,
    **table: Unpack[TableOptions],
) -> RunOutcome | DryRun | None:
    """Train a private model and write its run folder.

    Guarantee: `RunOutcome.guarantee`. Nothing is measured on records that are not declared public. A failure before the
    first charge leaves no folder; a later one leaves the folder with all that was charged.

    Args:
        data: Name from `sordino data list`, or a file.
        epsilon: Target ε, never exceeded. Not with --resume.
        delta: δ, below 1 / number of records. Default: 1e-5 or less.
        model: logistic, mlp, cnn, an estimator's method, or module:factory. Default: logistic for labels, boosting for
            numbers.
        recipe: Train a whole pipeline instead of a model; `list` shows them.
        setting: Named noise level of the recipe, instead of --epsilon.
        device: Device on which a recipe trains. Default: cpu.
        steps: Number of steps. Default: the fixed setting.
        batch_size: Expected batch size in records. Default: the fixed setting.
        max_grad_norm: Clipping norm (ℓ2). Default: the fixed setting.
        learning_rate: Learning rate. Default: the fixed setting.
        sampling: How batches are drawn: poisson (if not given), without_replacement or with_replacement (of fixed
            size), balls_in_bins, shuffled (claims no amplification).
        neighboring_relation: Which datasets count as neighbors: add_or_remove_one if not given.
        secure_mode: Round sums and noise to integers, against attacks on low bits; slower.
        release_losses: Also release noisy mean losses, each record's loss clipped to this value. Adds 1 % gradient
            noise.
        seed: Seed of all random numbers; only with --reproducible.
        reproducible: Allow --seed; the result is marked not for release.
        out: Run folder to create. Default: runs/NAME-DATE-NUMBER.
        resume: Interrupted run on the same data; continue from its checkpoint.
        checkpoint_every: Steps between checkpoints. Default: a tenth of the run.
        diagnostics: `private` prints losses and batch sizes, outside the guarantee.
        ledger: the account that is charged.
        dry_run: only say what it would cost.
        progress: what is said meanwhile.
        **table: how a file is declared and read, see `sordino.commands.TableOptions`.

    Returns:
        The run; with `dry_run` its cost; None in processes of a launcher other than the first.

    Raises:
        BudgetExceeded: the account does not have it; nothing was read.
        InvalidArgument: an option is out of range or goes with another one.
        MissingDeclaration: a declaration is missing.
    """
    from sordino.randomness import KeyedRNG

    given = {
        "steps": steps,
        "batch size": batch_size,
        "clipping norm": max_grad_norm,
        "learning rate": learning_rate,
        "sampling": sampling,
        "neighboring relation": neighboring_relation,
        "secure noise": secure_mode or None,
        "loss curve": release_losses,
    }
    by_hand = tuple(name for name, value in given.items() if value is not None)
    check_single_process_options(recipe=recipe, diagnostics=diagnostics, dry_run=dry_run)
    if dry_run and resume is not None:
        raise InvalidArgument("dry_run must be left out with --resume, got both. The run's own plan is taken.")
    if recipe is not None:
        others = {"model": model, "target_bounds": table.get("target_bounds"), "resume": resume}
        others |= {"every": checkpoint_every, "diagnostics": diagnostics}
        _check_no_other_options(
            f"--recipe {recipe}",
            by_hand,
            others,
            "A recipe fixes its settings; use `sordino.recipes` from Python to change them.",
        )
        from sordino.recipes import get_recipe

        pipeline, rng = get_recipe(recipe), KeyedRNG(seed=seed, reproducible=reproducible)
        dataset = load_table(data, table, progress, by_estimator=False, keep_texts=True)
        delta = default_delta(len(dataset.train)) if delta is None else delta
        settings = {"epsilon": epsilon, "delta": delta, "setting": setting, "device": device or "cpu"}
        work = _by_recipe(pipeline, dataset, settings, rng, progress)
        folder = run_folder(dataset.name, out)
        return perform(work, folder, ledger, dry_run=dry_run, delta=delta, progress=progress)
    for name, value in {"--setting": setting, "--device": device}.items():
        if value is not None:
            raise InvalidArgument(
                f"{name} must be left out without --recipe, got {value!r}. Name a recipe, see `sordino recipes`."
            )
    resume = None if resume is None else Path(resume)
    goal = _goal(epsilon, delta, resume, by_hand)
    model = default_model(data, table) if model is None else model
    from sordino.commands.estimators import EstimatorJob, is_method, run_estimator

    rng = KeyedRNG(seed=seed, reproducible=reproducible)
    if isinstance(model, str) and is_method(model):
        check_single_process_options(**{f"model {model}": True})
        others = {"resume": resume, "checkpoints": checkpoint_every, "diagnostics": diagnostics}
        advice = "Use the estimator from Python to set its parameters."
        _check_no_other_options(f"--model {model}", by_hand, others, advice)
        dataset = load_table(data, table, progress, by_estimator=True)
        job = EstimatorJob(
            dataset=dataset, method=model, target=table.get("target"), epsilon=goal, delta=delta, seed=seed
        )
        progress.status(f"{_kind(dataset)} records, {model}", title=dataset.name)
        return perform(
            lambda payer, folder: run_estimator(job, folder, payer, progress),
            run_folder(dataset.name, out),
            ledger,
            dry_run=dry_run,
            delta=default_delta(len(dataset.train)) if delta is None else delta,
            progress=progress,
        )
    dataset = load_table(data, table, progress, by_estimator=False)
    factory = load_model_factory(model) if isinstance(model, str) else model
    if resume is not None:
        config = get_training_config(resume, dataset, factory)
    else:
        config = _with_extras(get_recommended_config(factory, dataset, goal, delta, steps), secure_mode, release_losses)
        config = _by_hand(
            config, len(dataset.train), goal, batch_size, max_grad_norm, learning_rate, sampling, neighboring_relation
        )
    job = _Job(
        dataset=dataset,
        config=config,
        epsilon=goal,
        overrides=by_hand,
        rng=rng,
        folder=resume or run_folder(dataset.name, out),
        resumes=resume is not None,
        checkpoint_every=checkpoint_every,
        diagnostics=diagnostics,
        ledger=ledger,
    )
    if dry_run:
        return preview(
            lambda payer, place: _run(replace(job, ledger=payer, folder=place), progress),
            ledger,
            delta=config.plan.delta,
            progress=progress,
        )
    words = f"{_kind(dataset)} records, {config.model} model, {config.plan.steps} private steps"
    with init_distributed() as ranks:
        if not ranks.is_rank_zero:
            _assist(job, ranks)
            return None
        if ranks.world_size > 1:
            words += f", {ranks.world_size} processes"
        progress.status(words, title=dataset.name)
        return _run(job, progress, ranks)


def _kind(dataset: "DatasetSplits") -> str:
    return "public" if dataset.public else "private"


def _check_no_other_options(what: str, names: tuple[str, ...], others: Mapping[str, object], advice: str) -> None:
    """Refuse what would be without effect with a recipe or an estimator, which have their own settings."""
    names = (*names, *(name.replace("_", " ") for name, value in others.items() if value is not None))
    if names:
        raise InvalidArgument(f"{', '.join(names)} must be left out with {what}, got a value. {advice}")


# ----------------------------------------------------------------------------------------------------------------------
# Settings: recommended ones, those given by hand, and those of a run that is resumed.
# ----------------------------------------------------------------------------------------------------------------------


def _goal(epsilon: float | None, delta: float | None, resume: Path | None, by_hand: tuple[str, ...]) -> float:
    """The target ε: given, or that of the run to resume, whose settings stay as they are."""
    if resume is not None:
        if epsilon is not None or delta is not None or by_hand:
            raise InvalidArgument("settings must be left out with --resume, got some. The run's own are taken.")
        return get_target_epsilon(resume)
    if delta is not None:
        checks.probability(zero=False, one=False, delta=delta)
    return checks.positive(epsilon=epsilon, hint="Give --epsilon.")


def get_recommended_config(
    model: "str | ModelFactory",
    dataset: "DatasetSplits",
    epsilon: float,
    delta: float | None,
    steps: int | None = None,
) -> "TrainingConfig":
    """The settings that were fixed in advance for this kind of model and so many records."""
    from sordino.recipes import recommend_config

    return recommend_config(
        model,
        shape=dataset.train.record_shape,
        classes=dataset.num_classes,
        dataset_size=len(dataset.train),
        target_epsilon=epsilon,
        delta=default_delta(len(dataset.train)) if delta is None else delta,
        steps=steps,
    )


def get_target_epsilon(folder: Path) -> float:
    """The target that the run was planned for."""
    target = RunFolder.open(folder).meta.get("target_epsilon")
    if not isinstance(target, int | float):
        raise InvalidArgument("resume must name a run that `sordino train` began, got one without a target ε.")
    return float(target)


def get_training_config(folder: Path, dataset: "DatasetSplits", model: "str | ModelFactory") -> "TrainingConfig":
    """The recipe of the run in `folder`, for the same records.

    Args:
        folder: the run.
        dataset: the records that it was begun with; nothing of them but their form is compared.
        model: the factory of a model of the user's own; a name is read from the run.

    Raises:
        InvalidArgument: the run was not begun by `sordino train`, or with a model of another name.
    """
    from sordino.recipes import recommend_config
    from sordino.training.plan import Plan

    run = RunFolder.open(folder)
    training = run.meta.get("training")
    if not isinstance(training, Mapping) or "learning_rate" not in training:
        raise InvalidArgument("resume must name a run that `sordino train` began, got one of another kind.")
    plan = Plan.from_json((run.path / "plan.json").read_text())
    recipe = recommend_config(
        str(training["model"]) if isinstance(model, str) else model,
        shape=dataset.train.record_shape,
        classes=dataset.num_classes,
        dataset_size=len(dataset.train),
        target_epsilon=get_target_epsilon(folder),
        delta=plan.delta,
        steps=plan.steps,
    )
    if recipe.model != training["model"]:
        raise InvalidArgument(f"model must be {training['model']!r} as in the run, got {recipe.model!r}. Give --model.")
    return replace(recipe, plan=plan, learning_rate=float(str(training["learning_rate"])))


def _with_extras(recipe: "TrainingConfig", secure_mode: bool, loss_bound: float | None) -> "TrainingConfig":
    from sordino.training.noisy_releases import LossRelease

    curve = None if loss_bound is None else LossRelease(max_loss=loss_bound)
    return replace(recipe, plan=replace(recipe.plan, secure_mode=secure_mode, loss_release=curve))


def _by_hand(
    recipe: "TrainingConfig",
    population: int,
    epsilon: float,
    batch_size: float | None,
    max_grad_norm: float | None,
    learning_rate: float | None,
    sampling: str | None,
    neighboring_relation: NeighboringRelation | None,
) -> "TrainingConfig":
    """The recipe with settings given by hand, its noise calibrated again.

    The recipe's learning rate keeps the noise that adds up over the run within a bound. When the plan changes and no
    learning rate is given, it is lowered by as much as that noise grows.
    """
    old = recipe.plan
    if batch_size is not None and not 0 < batch_size <= population:
        raise InvalidArgument(f"batch_size must be above 0 and at most the number of records, got {batch_size:g}.")
    if any(value is not None for value in (batch_size, max_grad_norm, sampling, neighboring_relation)):
        size = old.step_plan(0).expected_batch_size if batch_size is None else batch_size
        norm = old.step_plan(0).max_grad_norm if max_grad_norm is None else checks.positive(max_grad_norm=max_grad_norm)
        draft = replace(old, sample_rate=size / population, expected_batch_size=size, max_grad_norm=norm)
        plan = _with_sampling(draft, sampling, neighboring_relation, population).with_target_epsilon(epsilon)
        growth = _noise(plan) / _noise(old)
        recipe = replace(recipe, plan=plan, learning_rate=recipe.learning_rate / max(1.0, growth))
    if learning_rate is not None:
        recipe = replace(recipe, learning_rate=checks.positive(learning_rate=learning_rate))
    return recipe


def _with_sampling(
    plan: "Plan", sampling: str | None, neighboring_relation: NeighboringRelation | None, population: int
) -> "Plan":
    """The plan with its batches drawn as `sampling` says, of about as many records."""
    name, relation = sampling or "poisson", neighboring_relation or plan.neighboring_relation
    check_sampling(name, relation)
    size = plan.step_plan(0).expected_batch_size
    sampler = make_sampler(name, sample_rate=size / population, dataset_size=population)
    changes: dict[str, Any] = {"neighboring_relation": relation}
    if isinstance(sampler, FixedSizeSampling):
        size = float(sampler.batch_size)
        changes |= {"sampling": name, "dataset_size": population}
    elif isinstance(sampler, ShuffledSampling | RandomAllocationSampling):
        size = population / sampler.steps_per_epoch
        changes |= {"poisson_sampling": False, "sampling": name if name == "balls_in_bins" else None}
    changes |= {"sample_rate": size / population, "expected_batch_size": size}
    return replace(plan, **changes)


def _noise(plan: "Plan") -> float:
    """Standard deviation of the noise that adds up in one weight over the run, at learning rate 1."""
    return plan.step_plan(0).mechanism.stddev / plan.step_plan(0).expected_batch_size * math.sqrt(plan.steps)


def load_model_factory(name: str) -> "str | ModelFactory":
    """A model's name, or the factory that ``module:factory`` names, looked up in the working directory too."""
    module_name, colon, attribute = name.partition(":")
    if not colon:
        return name
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(import_module(module_name), attribute, None)
    except ModuleNotFoundError as error:
        raise InvalidArgument(
            f"model must name a module that can be imported, got {name!r}. Check the path."
        ) from error
    finally:
        sys.path.remove(str(Path.cwd()))
    if not callable(found):
        raise InvalidArgument(
            f"model must name a function (shape, classes) in its module, got {name!r}. Define it there."
        )
    return cast("Callable[[tuple[int, ...], int], object]", found)  # pyright: ignore[reportReturnType]


# ----------------------------------------------------------------------------------------------------------------------
# A module: trained into a run folder, its files, and what is stated and measured.
# ----------------------------------------------------------------------------------------------------------------------


_TUNED_ON = ("adult", "mnist", "fashion-mnist")


@dataclass(frozen=True, kw_only=True)
class _Job:
    """One training of a module.

    Args:
        dataset: what is trained on; it says what may be measured.
        config: model, plan and optimizer.
        epsilon: the goal.
        overrides: names of settings that were given by hand.
        rng: fresh; None makes one.
        folder: where the run goes, or where it lies when `resumes`.
        resumes: whether the run in `folder` is taken up again.
        checkpoint_every: steps between checkpoints; None makes about ten.
        diagnostics: None, or "private".
        ledger: the dataset's account, or None.
    """

    dataset: "DatasetSplits"
    config: "TrainingConfig"
    epsilon: float
    overrides: tuple[str, ...] = ()
    rng: "KeyedRNG | None" = None
    folder: Path
    resumes: bool = False
    checkpoint_every: int | None = None
    diagnostics: str | None = None
    ledger: "Account | None" = None


def _run(job: _Job, progress: Progress, ranks: "DistributedContext | None" = None) -> RunOutcome:
    """Train, and write a complete run folder; of several processes this is the first, and the others `_assist`."""
    from sordino.randomness import KeyedRNG
    from sordino.recipes import train_with_config
    from sordino.recipes.recipe import seeded_torch_rng
    from sordino.recipes.saved_model import describe_module
    from sordino.training import tuned_process

    plan, rng = job.config.plan, job.rng or KeyedRNG()
    every = max(1, plan.steps // 10) if job.checkpoint_every is None else job.checkpoint_every

    def begun() -> RunFolder:
        if job.resumes:
            return RunFolder.open(job.folder)
        return RunFolder.create(job.folder, plan=plan.to_json(), meta=_metadata(job, rng))

    run = begun() if ranks is None else ranks.rank_zero_first(begun)
    with tuned_process(), seeded_torch_rng(rng), closed_after_failure(run):
        result = train_with_config(
            job.dataset,
            job.config,
            run_folder=None if job.resumes else run,
            resume_from=job.folder if job.resumes else None,
            checkpoint_every=every,
            diagnostics=job.diagnostics,
            ledger=job.ledger,
            progress=progress.is_shown,
            rng=rng,
        )
    with progress.stage("measuring and writing the report"):
        metrics = _measured(job.dataset, job.config, result.model)
        run.write_model_description(describe_module(job.dataset, job.config.model))
        write_results(run, metrics)
    return RunOutcome(
        run=run, guarantee=result.guarantee, metrics=metrics, steps=result.steps, interrupted=result.interrupted
    )


def _assist(job: _Job, ranks: "DistributedContext") -> None:
    """Train as one of several processes while the first one charges, writes and measures.

    Guarantee: that of `fit`, of which this is a part.
    """
    from sordino.randomness import KeyedRNG
    from sordino.recipes import train_with_config
    from sordino.recipes.recipe import seeded_torch_rng
    from sordino.training import tuned_process

    # A folder that can't be made is refused in all processes.
    ranks.rank_zero_first(lambda: None)
    rng = job.rng or KeyedRNG()
    with tuned_process(), seeded_torch_rng(rng):
        train_with_config(
            job.dataset,
            job.config,
            resume_from=job.folder if job.resumes else None,
            ledger=job.ledger,
            progress=False,
            rng=rng,
        )


def _measured(dataset: "DatasetSplits", config: "TrainingConfig", model: "nn.Module") -> dict[str, Metric]:
    """Accuracy, calibration and subgroups on public test records, and a baseline on public data; nothing otherwise."""
    from sordino.recipes import accuracy, non_private_baseline

    found = measure_test_records(dataset, lambda test: probabilities(model, test))
    if found and dataset.public:
        assert dataset.test is not None
        baseline = non_private_baseline(dataset, config)
        found["baseline_test_accuracy"] = Metric(
            value=accuracy(baseline, dataset.test), public=True, what="non-private baseline, public data"
        )
    return found


def _metadata(job: _Job, rng: "KeyedRNG") -> dict[str, object]:
    """Public facts about the run. No path of this machine is among them."""
    dataset, config = job.dataset, job.config
    settings = "The settings come from a recipe that was fixed in advance on public datasets"
    if job.overrides:
        settings += f", except for those given by hand: {', '.join(job.overrides)}"
    return {
        "target_epsilon": job.epsilon,
        "reproducible": rng.reproducible,
        **({} if job.diagnostics is None else {"diagnostics": job.diagnostics}),
        "settings": settings,
        "tuned_on_these_data": dataset.public and dataset.name in _TUNED_ON,
        "data": describe_data(
            dataset,
            records=len(dataset.train) if config.plan.dataset_size_is_public else None,
            labels=dataset.num_classes,
        ),
        "training": {
            "model": config.model,
            "optimizer": f"SGD, momentum {config.momentum:g}",
            "learning_rate": config.learning_rate,
            "averaging": re.sub(r"(?<!^)(?=[A-Z])", " ", type(config.averaging).__name__).lower()
            if config.averaging
            else None,
        },
        "noise_arithmetic": "integers on a grid, drawn exactly" if config.plan.secure_mode else "floating point",
        "data_accesses": _data_accesses(job),
        **composition_statement(public=dataset.public, charged=job.ledger is not None),
    }


def _data_accesses(job: _Job) -> dict[str, str]:
    """What the command does to the records outside the mechanism: in one line."""
    schema = job.dataset.schema
    origin = "a public sample" if schema is not None and schema.origin == "public_sample" else "a declaration"
    shape = f"Bounds, categories and labels come from {origin}, never from the records."
    measured = "Accuracy, calibration and subgroups on test records that are declared public."
    if job.dataset.public:
        measured += " A baseline was trained without privacy on the records, which are public."
    return {
        "preprocessing": "Each record is scaled and encoded on its own, by the declared schema."
        if schema is not None
        else "Each record is scaled on its own, by fixed numbers.",
        "normalization": "No statistic of the records is computed.",
        "schema": shape if schema is not None else "The form of the records and the labels are fixed by the dataset.",
        "early_stopping": "None: steps were fixed in advance, and the last model, or an average, is kept.",
        "evaluation": measured if job.dataset.test_is_public else "None.",
        "logging": (
            "Progress shows steps, ε and time. No loss, norm or batch size is printed or stored"
            + (", except for noisy losses that ε pays for." if job.config.plan.loss_release is not None else ".")
        )
        if job.diagnostics is None
        else "Losses and batch sizes were shown on the terminal, without noise; they are not stored.",
    }


# ----------------------------------------------------------------------------------------------------------------------
# Recipes: a whole pipeline, charged and written as one run.
# ----------------------------------------------------------------------------------------------------------------------


def _by_recipe(
    pipeline: "Recipe", dataset: "DatasetSplits", settings: dict[str, Any], rng: "KeyedRNG", progress: Progress
) -> "Callable[[Account | None, Path], RunOutcome]":
    """(account, run folder) ↦ the whole pipeline, fitted into a complete run folder.

    Guarantee: `RunOutcome.guarantee`, of all stages together; they are charged before a record is read.
    """
    prepared, stated = pipeline.plan(dataset, **settings)
    counts = [(stage.name, len(stage.charges)) for stage in prepared.stages]
    stages = ", ".join(f"{part} ({count:,} {'charge' if count == 1 else 'charges'})" for part, count in counts)
    progress.status(
        f"{_kind(dataset)} records, recipe {pipeline.name}: {stages}; together ε ≤ {stated.epsilon:.4g}; "
        f"public inputs: {', '.join(pipeline.public_inputs) or 'none'}",
        title=dataset.name,
    )

    def work(payer: "Account | None", folder: Path) -> RunOutcome:
        fitted = pipeline.fit(dataset, **settings, ledger=payer, run_folder=folder, rng=rng, progress=progress.is_shown)
        run = RunFolder.open(folder)
        with progress.stage("measuring and writing the report"):
            metrics = measure_test_records(dataset, fitted.predict_proba)
            write_results(run, metrics)
        return RunOutcome(
            run=run,
            guarantee=fitted.guarantee,
            metrics=metrics,
            steps=len(fitted.events),
            interrupted=not fitted.complete,
            details={"recipe": pipeline.name},
        )

    return work
