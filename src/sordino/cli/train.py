"""`sordino train DATA`: a private model from a named dataset or from a file of the user's own."""

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.text import Text

from sordino import checks
from sordino.cli.console import JsonOption, Output, check_single_process_options, init_distributed
from sordino.cli.ledger import DatasetNameOption, DryRunOption, LedgerOption, open_account, print_preview
from sordino.cli.table_options import (
    DataArgument,
    DataIsPublicOption,
    DecimalOption,
    EncodingOption,
    OutFolderOption,
    PublicSchemaOption,
    ReproducibleOption,
    SchemaOption,
    SeedOption,
    SeparatorOption,
    TableOptions,
    TargetBoundsOption,
    TargetOption,
    TestOption,
)
from sordino.errors import InvalidArgument
from sordino.runs import RunFolder

if TYPE_CHECKING:
    from sordino.cli.training_job import TrainingJob
    from sordino.data import DatasetSplits
    from sordino.recipes import ModelFactory, TrainingConfig
    from sordino.training.plan import Plan

__all__ = ["demo", "get_target_epsilon", "get_training_config", "load_model_factory", "train"]


# ----------------------------------------------------------------------------------------------------------------------
# `sordino train DATA --resume RUN`: the recipe that a run was begun with, put together again from its folder.
# ----------------------------------------------------------------------------------------------------------------------


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


# ----------------------------------------------------------------------------------------------------------------------
# `sordino train DATA`: a private model from a named dataset or from a file of the user's own.
# ----------------------------------------------------------------------------------------------------------------------


def train(
    data: DataArgument,
    epsilon: Annotated[float | None, typer.Option(help="The target: ε is never above it. Not with --resume.")] = None,
    target: TargetOption = None,
    delta: Annotated[
        float | None, typer.Option(help="δ, below 1 / number of records; 1e-5 or less if not given.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="logistic, mlp, cnn; an estimator's method; or module:factory. "
            "If not given: logistic for labels, boosting for numbers."
        ),
    ] = None,
    pipeline: Annotated[
        str | None, typer.Option("--recipe", help="A whole pipeline instead of a model; `list` shows them.")
    ] = None,
    setting: Annotated[str | None, typer.Option(help="A recipe's named noise, instead of --epsilon.")] = None,
    device: Annotated[str | None, typer.Option(help="Where a recipe trains; cpu if not given.")] = None,
    schema: SchemaOption = None,
    public_schema_from: PublicSchemaOption = None,
    target_bounds: TargetBoundsOption = None,
    separator: SeparatorOption = None,
    decimal: DecimalOption = None,
    encoding: EncodingOption = None,
    test: TestOption = None,
    data_is_public: DataIsPublicOption = False,
    steps: Annotated[int | None, typer.Option(help="Number of steps, instead of the recipe's.")] = None,
    batch_size: Annotated[float | None, typer.Option(help="Expected batch size, instead of the recipe's.")] = None,
    max_grad_norm: Annotated[float | None, typer.Option(help="Clipping norm, instead of the recipe's.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Learning rate, instead of the recipe's.")] = None,
    secure_mode: Annotated[
        bool, typer.Option("--secure-mode", help="Whole-number sums and noise, against attacks on low bits; slower.")
    ] = False,
    loss_release: Annotated[
        float | None,
        typer.Option(
            "--release-losses",
            help="Also release noisy mean losses, each record's loss clipped to this value. Adds 1 % gradient noise.",
        ),
    ] = None,
    seed: SeedOption = None,
    reproducible: ReproducibleOption = False,
    out_folder: OutFolderOption = None,
    resume: Annotated[
        Path | None, typer.Option(help="A run of the same data that was cut off: go on from its checkpoint.")
    ] = None,
    checkpoint_every: Annotated[int | None, typer.Option(help="Steps between checkpoints; about ten a run.")] = None,
    diagnostics: Annotated[
        str | None, typer.Option(help="`private` shows losses and batch sizes here, outside the guarantee.")
    ] = None,
    ledger: LedgerOption = None,
    dataset_name: DatasetNameOption = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Train a private model. Nothing is measured on records that you don't declare public."""
    by_hand = _given(steps, batch_size, max_grad_norm, learning_rate, secure_mode or None, loss_release)
    check_single_process_options(recipe=pipeline, diagnostics=diagnostics, dry_run=dry_run)
    out = Output(as_json=as_json)
    table = TableOptions(
        data=data,
        target=target,
        schema=schema,
        public_schema_from=public_schema_from,
        target_bounds=target_bounds,
        test=test,
        data_is_public=data_is_public,
        separator=separator,
        decimal=decimal,
        encoding=encoding,
    )
    if dry_run and resume is not None:
        raise InvalidArgument("dry_run must be left out with --resume, got both. The run's own plan is taken.")
    if pipeline is not None:
        from sordino.cli.recipes import RecipeOptions, check_no_other_options, train_by_recipe

        others = {"model": model, "target_bounds": target_bounds, "resume": resume}
        check_no_other_options(pipeline, by_hand, every=checkpoint_every, diagnostics=diagnostics, **others)
        where = "cpu" if device is None else device
        asked = RecipeOptions(pipeline, table, epsilon, delta, setting, where, seed, reproducible, out_folder)
        train_by_recipe(asked, open_account(ledger, dataset_name), out, dry_run=dry_run)
        return
    for name, value in {"--setting": setting, "--device": device}.items():
        if value is not None:
            raise InvalidArgument(
                f"{name} must be left out without --recipe, got {value!r}. Name a recipe, see `sordino recipes`."
            )
    goal = _goal(epsilon, delta, resume, by_hand)
    model = table.default_model() if model is None else model
    from sordino.cli.estimator_job import EstimatorJob, check_no_overrides, is_method, run_and_print
    from sordino.cli.training_job import TrainingJob, run_folder
    from sordino.randomness import KeyedRNG

    account = open_account(ledger, dataset_name)
    rng = KeyedRNG(seed=seed, reproducible=reproducible)
    by_estimator = is_method(model)
    if by_estimator:
        check_no_overrides(model, by_hand, resume=resume, checkpoints=checkpoint_every, diagnostics=diagnostics)
    dataset = table.load(out, by_estimator=by_estimator)
    folder = resume or run_folder(dataset.name, out_folder)
    test_is_public = table.test_is_public(dataset)
    if by_estimator:
        asked = {"method": model, "target": target, "epsilon": goal, "delta": delta, "seed": seed}
        run_and_print(
            EstimatorJob(dataset=dataset, test_is_public=test_is_public, folder=folder, ledger=account, **asked),
            out,
            dry_run=dry_run,
        )
        return
    # Torch takes seconds to import: only now, when nothing is missing.
    if resume is not None:
        recipe = get_training_config(resume, dataset, load_model_factory(model))
    else:
        recipe = _with_extras(_recipe(model, dataset, goal, delta, steps), secure_mode, loss_release)
        recipe = _by_hand(recipe, len(dataset.train), goal, batch_size, max_grad_norm, learning_rate)
    job = TrainingJob(
        dataset=dataset,
        test_is_public=test_is_public,
        recipe=recipe,
        target_epsilon=goal,
        overrides=by_hand,
        rng=rng,
        folder=folder,
        resumes=resume is not None,
        checkpoint_every=checkpoint_every,
        diagnostics=diagnostics,
        ledger=account,
    )
    if dry_run:
        from sordino.cli.training_job import run_training_job

        print_preview(
            out,
            lambda ledger, place: run_training_job(replace(job, ledger=ledger, folder=place), out),
            account,
            delta=recipe.plan.delta,
        )
        return
    _perform_and_tell(job, out)


def _perform_and_tell(job: "TrainingJob", out: Output) -> None:
    """Train, and print the document or the page; an interrupted run ends with exit code 130.

    Processes that a launcher started train together; the first one writes the run and speaks.
    """
    from sordino.cli.training_job import render_outcome, run_training_job, run_training_worker

    kind = "public" if job.dataset.public else "private"
    words = f": {kind} records, {job.recipe.model} model, {job.recipe.plan.steps} private steps"
    with init_distributed() as ranks:
        if not ranks.is_rank_zero:
            run_training_worker(job, ranks)
            return
        if ranks.world_size > 1:
            words += f", {ranks.world_size} processes"
        out.print_status(Text.assemble((job.dataset.name, "bold"), words))
        outcome = run_training_job(job, out, ranks)
    out.print_result(outcome.to_dict(), *render_outcome(outcome))
    if outcome.interrupted:
        raise typer.Exit(130)


def _goal(epsilon: float | None, delta: float | None, resume: Path | None, by_hand: tuple[str, ...]) -> float:
    """The target ε: given, or that of the run to resume, whose settings stay as they are."""
    if resume is not None:
        if epsilon is not None or delta is not None or by_hand:
            raise InvalidArgument("settings must be left out with --resume, got some. The run's own are taken.")
        return get_target_epsilon(resume)
    if delta is not None:
        checks.probability(zero=False, one=False, delta=delta)
    return checks.positive(epsilon=epsilon, hint="Give --epsilon.")


def _recipe(
    model: str, dataset: "DatasetSplits", epsilon: float, delta: float | None, steps: int | None
) -> "TrainingConfig":
    from sordino.cli.training_job import default_delta
    from sordino.recipes import recommend_config

    return recommend_config(
        load_model_factory(model),
        shape=dataset.train.record_shape,
        classes=dataset.num_classes,
        dataset_size=len(dataset.train),
        target_epsilon=epsilon,
        delta=default_delta(len(dataset.train)) if delta is None else delta,
        steps=steps,
    )


def _with_extras(recipe: "TrainingConfig", secure_mode: bool, loss_bound: float | None) -> "TrainingConfig":
    from sordino.training.noisy_releases import LossRelease

    curve = None if loss_bound is None else LossRelease(max_loss=loss_bound)
    return replace(recipe, plan=replace(recipe.plan, secure_mode=secure_mode, loss_release=curve))


def _given(*values: float | None) -> tuple[str, ...]:
    names = ("steps", "batch size", "clipping norm", "learning rate", "secure noise", "loss curve")
    return tuple(name for name, value in zip(names, values, strict=True) if value is not None)


def _by_hand(
    recipe: "TrainingConfig",
    population: int,
    epsilon: float,
    batch_size: float | None,
    max_grad_norm: float | None,
    learning_rate: float | None,
) -> "TrainingConfig":
    """The recipe with settings given by hand, its noise calibrated again.

    The recipe's learning rate keeps the noise that adds up over the run within a bound. When the plan changes and no
    learning rate is given, it is lowered by as much as that noise grows.
    """
    old = recipe.plan
    if batch_size is not None and not 0 < batch_size <= population:
        raise InvalidArgument(f"batch_size must be above 0 and at most the number of records, got {batch_size:g}.")
    if batch_size is not None or max_grad_norm is not None:
        size = old.step_plan(0).expected_batch_size if batch_size is None else batch_size
        norm = old.step_plan(0).max_grad_norm if max_grad_norm is None else checks.positive(max_grad_norm=max_grad_norm)
        draft = replace(old, sample_rate=size / population, expected_batch_size=size, max_grad_norm=norm)
        plan = draft.with_target_epsilon(epsilon)
        growth = _noise(plan) / _noise(old)
        recipe = replace(recipe, plan=plan, learning_rate=recipe.learning_rate / max(1.0, growth))
    if learning_rate is not None:
        recipe = replace(recipe, learning_rate=checks.positive(learning_rate=learning_rate))
    return recipe


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
# `sordino demo`: the main job on the embedded Adult data, start to finish.
# ----------------------------------------------------------------------------------------------------------------------


def demo(
    epsilon: Annotated[float, typer.Option(help="The target: ε is never above it.")] = 1.0,
    out_folder: OutFolderOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train a private model on real data: guarantee, accuracy next to a non-private baseline, report.

    The data are the public Adult census records that come with sordino, so nothing is downloaded, and what privacy
    costs can be shown.
    """
    from sordino.cli.training_job import TrainingJob, default_delta, render_outcome, run_folder, run_training_job
    from sordino.data import load_dataset
    from sordino.randomness import KeyedRNG
    from sordino.recipes import recommend_config

    out = Output(as_json=as_json)
    dataset = load_dataset("adult")
    population = len(dataset.train)
    recipe = recommend_config(
        "logistic",
        shape=dataset.train.record_shape,
        classes=dataset.num_classes,
        dataset_size=population,
        target_epsilon=epsilon,
        delta=default_delta(population),
    )
    out.print_status(
        Text.assemble(
            ("Adult", "bold"),
            f": {population:,} public census records, logistic regression, {recipe.plan.steps} private steps",
        )
    )
    outcome = run_training_job(
        TrainingJob(
            dataset=dataset,
            test_is_public=True,
            recipe=recipe,
            target_epsilon=epsilon,
            overrides=(),
            rng=KeyedRNG(),
            folder=run_folder("adult", out_folder),
        ),
        out,
    )
    out.print_result(outcome.to_dict(), *render_outcome(outcome))
    if outcome.interrupted:
        raise typer.Exit(130)
