"""`train` with an estimator: charged in a run folder first, fitted then, and the same files and page at the end."""

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.text import Text

from sordino import accounting, checks
from sordino.cli.output import Output
from sordino.cli.running import Outcome, default_delta, page
from sordino.cli.several import refuse_in_several
from sordino.definitions import Guarantee
from sordino.errors import InvalidArgument
from sordino.events import compose
from sordino.runs import Metric, RunFolder

if TYPE_CHECKING:
    from torch import Tensor

    from sordino.data import DataSet
    from sordino.estimators.base import PrivateEstimator
    from sordino.ledger import Account
    from sordino.recipes import Table
    from sordino.recipes.methods import FittedTable

__all__ = [
    "Fit",
    "fit_and_tell",
    "is_method",
    "meta_of",
    "metrics_of",
    "perform_fit",
    "refuse_by_hand",
    "tensors_of",
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
    from sordino.recipes.methods import METHODS

    checks.one_of((*_MODULES, *METHODS), model=model)
    return True


def refuse_by_hand(model: str, names: tuple[str, ...], **others: object) -> None:
    """Settings by hand, resuming, several processes and the like are for modules; an estimator has its own."""
    refuse_in_several(**{f"model {model}": True})
    names = (*names, *(name.replace("_", " ") for name, value in others.items() if value is not None))
    if names:
        raise InvalidArgument(
            f"{', '.join(names)} must be left out with --model {model}, got a value. "
            "Use the estimator from Python to set its parameters."
        )


@dataclass(frozen=True, kw_only=True)
class Fit:
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
        ledger: the data set's account, or None.
    """

    dataset: "DataSet"
    test_is_public: bool
    method: str
    target: str | None
    epsilon: float
    delta: float | None
    seed: int | None
    folder: Path
    ledger: "Account | None" = None


def fit_and_tell(job: Fit, out: Output) -> None:
    """Fit, and print the document or the page."""
    kind = "public" if job.dataset.public else "private"
    out.say(Text.assemble((job.dataset.name, "bold"), f": {kind} records, {job.method}"))
    outcome = perform_fit(job, out.stderr)
    out.finish(outcome.to_dict(), *page(outcome))


def perform_fit(job: Fit, console: Console) -> Outcome:
    """Fit, and leave a complete run folder.

    Guarantee: `Outcome.guarantee`. What the fit will cost is known before a record is read (its events depend on no
    record), and it is written to the transcript then. Nothing is measured on records that are not declared public.
    """
    from sordino.estimators.rehearsal import rehearse
    from sordino.recipes.methods import fit_to, method_called
    from sordino.recipes.tables import table
    from sordino.report import write

    rows = table(job.dataset, target=job.target)
    delta = default_delta(rows.facts.population) if job.delta is None else job.delta
    checks.probability(one=False, delta=delta)
    if delta * rows.facts.population >= 1:
        raise InvalidArgument(
            f"delta must be below 1 / number of records = {1 / rows.facts.population:.3g}, got {delta!r}. "
            "A larger one would allow the release of whole records."
        )
    method = method_called(job.method)
    seeded = {} if job.seed is None else {"random_state": job.seed, "reproducible": True}
    estimator = method.estimator(rows.facts, epsilon=job.epsilon, delta=delta, **seeded)
    events, relation = rehearse(estimator, rows.facts.columns)
    spent = accounting.epsilon(compose(list(events)), delta, relation=relation)
    if job.ledger is not None:
        job.ledger.check(compose(list(events)), relation=relation)
        estimator.set_params(ledger=job.ledger)
    run = RunFolder.create(job.folder, plan=_plan(job, estimator, delta, relation.value), meta=meta_of(job, rows))
    try:
        for number, event in enumerate(events):
            last = number == len(events) - 1
            run.append(step=number, event=event, epsilon=spent.upper if last else None)
        with console.status(f"fitting {type(estimator).__name__}"):
            fitted = fit_to(estimator, rows)
    except BaseException:
        run.close()
        if not any(run):
            shutil.rmtree(run.path)
        raise
    run.save_model(tensors_of(estimator))
    run.close()
    guarantee = estimator.privacy_
    # Divisors and batch sizes, or δ, were taken from the number of records, so the guarantee says so.
    if "population" in method.wants or (job.delta is None and delta < _USUAL_DELTA):
        guarantee = _with_public_size(guarantee)
    run.write_guarantee(guarantee)
    with console.status("measuring and writing the report"):
        metrics = metrics_of(job, rows, fitted)
        run.write_metrics(metrics)
        write(run)
    return Outcome(run=run, guarantee=guarantee, metrics=metrics, steps=len(events), interrupted=False)


def _with_public_size(guarantee: Guarantee) -> Guarantee:
    return Guarantee(
        epsilon=guarantee.epsilon,
        delta=guarantee.delta,
        accountant=guarantee.accountant,
        sampler=guarantee.sampler,
        relation=guarantee.relation,
        unit=guarantee.unit,
        caveats=("the size of the data set is treated as public", *guarantee.caveats),
    )


def _plan(job: Fit, estimator: "PrivateEstimator", delta: float, relation: str) -> str:
    """Everything that changes the guarantee: the estimator's parameters, all of them public."""
    from sordino.recipes.methods import method_called

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
        "delta": delta,
        "neighboring_relation": relation,
        "privacy_unit": "example",
        "dataset_size_is_public": "population" in method_called(job.method).wants,
    }
    return json.dumps(body, indent=2, allow_nan=False)


def meta_of(job: Fit, rows: "Table") -> dict[str, object]:
    """Public facts about the run. No path of this machine is among them."""
    dataset = job.dataset
    measured = "Accuracy or error on test records that are declared public."
    return {
        "target_epsilon": job.epsilon,
        "reproducible": job.seed is not None,
        "settings": "The settings are the estimator's defaults, which were fixed beforehand on public data sets",
        "tuned_on_these_data": dataset.public and dataset.name in _TUNED_ON,
        "data": {
            "name": dataset.name,
            "records": rows.facts.population if dataset.public else None,
            "labels": rows.facts.classes,
            "target": rows.facts.target,
            "source": dataset.source if dataset.public else "not public",
            "licence": dataset.licence,
            "public": dataset.public,
        },
        "training": {"model": job.method, "optimizer": None, "learning_rate": None, "averaging": None},
        "noise_arithmetic": "floating point",
        "data_touches": {
            "preprocessing": "Each record is scaled and encoded on its own, by the declared schema.",
            "normalization": "No statistic of the records is computed.",
            "schema": "Bounds, categories and labels are declared, never taken from the records.",
            "early_stopping": "None: the number of steps is fixed beforehand.",
            "evaluation": measured if job.test_is_public and dataset.test is not None else "None.",
            "logging": "No loss, norm or number of records is printed or stored.",
        },
        **({"composition": "The records are public: other uses of them concern nobody."} if dataset.public else {}),
    }


def tensors_of(estimator: "PrivateEstimator") -> "dict[str, Tensor]":
    """What was learned, by name: the module's parameters, or every array of numbers."""
    import torch

    if hasattr(estimator, "module_"):
        return dict(estimator.module_.state_dict())  # pyright: ignore[reportAttributeAccessIssue]
    return {name: torch.from_numpy(np.array(value)) for name, value in _arrays(vars(estimator))}


def _arrays(attributes: Mapping[str, object]) -> Iterator[tuple[str, np.ndarray]]:
    for name, value in attributes.items():
        if name.endswith("_") and not name.startswith("_") and isinstance(value, np.ndarray | float | int):
            array = np.asarray(value)
            if array.dtype.kind in "fib":
                yield name, array


def metrics_of(job: Fit, rows: "Table", fitted: "FittedTable") -> dict[str, Metric]:
    """What may be shown: the private model on public test records; models without privacy only when all is public."""
    from sordino.recipes.methods import non_private

    if rows.test is None or not len(rows.test[0]) or not job.test_is_public:
        return {}
    kind = f"test_{rows.measure}"
    found = {kind: Metric(value=fitted.score(*rows.test), public=True, what="private model, public test records")}
    if not job.dataset.public:
        return found
    others = non_private(rows)
    twin = "trees" if job.method == "boosting" else "linear"
    found[f"twin_{kind}"] = Metric(
        value=others[twin], public=True, what=f"scikit-learn's {twin} model without privacy, public data"
    )
    floor = "majority_accuracy" if rows.measure == "accuracy" else "trivial_rmse"
    found[floor] = Metric(
        value=others["nothing"], public=True, what="the commonest label, or the mean, of test targets"
    )
    return found
