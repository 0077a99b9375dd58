"""`sordino tune DATA`: settings searched on private records, with the whole search in the guarantee."""

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from sordino import checks
from sordino.cli.console import JsonOption, Output, key_value_table
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
from sordino.errors import InvalidArgument, MissingDeclaration

if TYPE_CHECKING:
    from sordino.data import DatasetSplits
    from sordino.tuning.methods import SearchSpace

__all__ = ["tune_command"]


def tune_command(
    data: DataArgument,
    epsilon: Annotated[float, typer.Option(help="ε of everything: all runs, their scores, and the choice.")],
    model: Annotated[str | None, typer.Option(help="An estimator's method, as for train; dp-gd if not given.")] = None,
    target: TargetOption = None,
    delta: Annotated[float | None, typer.Option(help="δ of everything, as for train.")] = None,
    runs: Annotated[float, typer.Option(help="Mean of the secret number of runs, above 1.")] = 20.0,
    shape: Annotated[float, typer.Option(help="η > −1 of its distribution: 0 logarithmic, 1 geometric.")] = 0.0,
    score: Annotated[str, typer.Option(help="What runs are judged by: `private` records or `public` test ones.")] = (
        "private"
    ),
    score_noise: Annotated[float, typer.Option(help="Noise of a private score, in records.")] = 30.0,
    space: Annotated[Path | None, typer.Option(help="A JSON file with the search space; the method's own.")] = None,
    schema: SchemaOption = None,
    public_schema_from: PublicSchemaOption = None,
    target_bounds: TargetBoundsOption = None,
    separator: SeparatorOption = None,
    decimal: DecimalOption = None,
    encoding: EncodingOption = None,
    test: TestOption = None,
    data_is_public: DataIsPublicOption = False,
    seed: SeedOption = None,
    reproducible: ReproducibleOption = False,
    out_folder: OutFolderOption = None,
    ledger: LedgerOption = None,
    dataset_name: DatasetNameOption = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Search settings by random stopping and keep the best model: what leaves is ε-private, search included.

    How many runs there were, and what the others gave, is neither printed nor stored.
    """
    checks.positive(epsilon=epsilon)
    checks.one_of(("private", "public"), score=score)
    if checks.positive(runs=runs) <= 1:
        raise InvalidArgument(f"runs must be above 1, got {runs:g}: one run needs no search. Give --runs 20, or train.")
    if delta is not None:
        checks.probability(zero=False, one=False, delta=delta)
    from sordino.cli.estimator_job import TuningJob, is_method, run_tuning_job
    from sordino.cli.training_job import default_delta, render_outcome, run_folder
    from sordino.randomness import KeyedRNG

    model = "dp-gd" if model is None else model
    if not is_method(model):
        raise InvalidArgument(f"model must be an estimator's method, got {model!r}. Tune modules from Python.")
    out, account = Output(as_json=as_json), open_account(ledger, dataset_name)
    dataset = TableOptions(
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
    ).load(out, by_estimator=True)
    test_is_public = dataset.public or test is not None
    if score == "public" and (dataset.test is None or not test_is_public):
        raise MissingDeclaration("test must be declared for a public score: a PUBLIC file to measure on. Give --test.")
    job = TuningJob(
        dataset=dataset,
        test_is_public=test_is_public,
        method=model,
        target=target,
        epsilon=epsilon,
        delta=delta,
        mean=runs,
        shape=shape,
        public_score=score == "public",
        score_noise=score_noise,
        space=_space(model, space, number=_is_number(dataset, target)),
        rng=KeyedRNG(seed=seed, reproducible=reproducible),
        folder=run_folder(f"{dataset.name}-tuned", out_folder),
        ledger=account,
    )
    kind = "public" if dataset.public else "private"
    out.print_status(Text.assemble((dataset.name, "bold"), f": {kind} records, settings of {model} by random stopping"))
    if dry_run:
        print_preview(
            out,
            lambda ledger, place: run_tuning_job(replace(job, ledger=ledger, folder=place), out),
            account,
            delta=default_delta(len(dataset.train)) if delta is None else delta,
        )
        return
    outcome, config = run_tuning_job(job, out)
    document = {**outcome.to_dict(), "settings": config, "tuning": "random stopping", "score": score}
    chosen = key_value_table(
        [
            (name.replace("_", " "), f"{value:.4g}" if isinstance(value, float) else str(value))
            for name, value in config.items()
        ]
    )
    out.print_result(document, *render_outcome(outcome), Text(), Text("chosen settings", style="dim"), chosen)


_KINDS = ("uniform", "log_uniform", "integers")


def _is_number(dataset: "DatasetSplits", target: str | None) -> bool:
    """Whether a number is predicted: the schema's target, or one of its numeric columns."""
    return not dataset.labels or (dataset.schema is not None and target not in {None, dataset.schema.target})


def _space(model: str, path: Path | None, *, number: bool) -> "SearchSpace":
    """The file's space, or the method's own: ranges that were fixed in advance."""
    from sordino.tuning.methods import Integers, LogUniform, SearchSpace, Uniform

    if path is None:
        own = {
            "dp-gd": {"learning_rate": LogUniform(1.0, 256.0), "max_grad_norm": LogUniform(0.05, 1.0)},
            "dp-sgd": {"learning_rate": LogUniform(1.0, 256.0), "max_grad_norm": LogUniform(0.05, 1.0)},
            "objective": {"regularization": LogUniform(0.3, 100.0)},
            "output": {"regularization": LogUniform(1.0, 300.0)},
            "svm": {"regularization": LogUniform(0.3, 100.0)},
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
        body = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"space must be a JSON file, got {path.name!r}. See `sordino explain tuning`.") from error
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
