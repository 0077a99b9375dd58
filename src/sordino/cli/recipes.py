"""`sordino recipes`, and `train --recipe NAME`: a whole pipeline, charged and written as one run."""

import contextlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from sordino.cli.console import JsonOption, Output, heading, key_value_table
from sordino.cli.ledger import print_preview
from sordino.cli.training_job import Outcome, default_delta, render_outcome, run_folder, subgroups_of
from sordino.errors import InvalidArgument
from sordino.runs import Metric, RunFolder

if TYPE_CHECKING:
    from sordino.cli.table_options import TableOptions
    from sordino.data import DatasetSplits
    from sordino.ledger import Account
    from sordino.recipes import FittedRecipe, Recipe

__all__ = ["RecipeOptions", "check_no_other_options", "list_recipes", "recipes", "train_by_recipe"]


@dataclass(frozen=True)
class RecipeOptions:
    """A training by recipe as the command asks for it.

    Args:
        recipe: its name, or "list".
        table: the records.
        epsilon: the target, or None with `setting`.
        delta: δ; None takes the default.
        setting: one of the recipe's settings, or None.
        device: where to train.
        seed: a chosen seed, or None.
        reproducible: whether a chosen seed is allowed.
        out: the run folder, or None.
    """

    recipe: str
    table: "TableOptions"
    epsilon: float | None
    delta: float | None
    setting: str | None
    device: str
    seed: int | None
    reproducible: bool
    out: Path | None


def recipes(as_json: JsonOption = False) -> None:
    """List the recipes: whole pipelines from raw records to a private model."""
    list_recipes(Output(as_json=as_json))


def list_recipes(out: Output) -> None:
    """Print what there is to choose from."""
    from sordino.recipes import RECIPES, get_recipe

    found = [get_recipe(name) for name in RECIPES]
    table = Table.grid(padding=(0, 3, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for pipeline in found:
        rest = {
            "data": ", ".join(pipeline.data_sets),
            "public inputs": ", ".join(pipeline.public_inputs) or "none",
            "settings": ", ".join(pipeline.settings),
            "needs": pipeline.needs,
        }
        lines = [Text(f"{name}: {value}", style="dim") for name, value in rest.items() if value]
        table.add_row(Text(pipeline.name, style="bold cyan"), Group(Text(pipeline.description), *lines, Text()))
    out.print_result({"recipes": [_print_facts(pipeline) for pipeline in found]}, table)


def _print_facts(pipeline: "Recipe") -> dict[str, object]:
    return {
        "name": pipeline.name,
        "description": pipeline.description,
        "data_sets": list(pipeline.data_sets),
        "public_inputs": list(pipeline.public_inputs),
        "constants": pipeline.constants,
        "guarantee": pipeline.guarantee,
        "settings": list(pipeline.settings),
        "needs": pipeline.needs,
    }


def train_by_recipe(
    asked: RecipeOptions, ledger: "Account | None", out: Output, *, dry_run: bool = False
) -> Outcome | None:
    """Fit the whole pipeline, and leave a complete run folder; for the recipe "list" only list them.

    Guarantee: `Outcome.guarantee`, of all stages together; they are charged to the ledger before a record is read.
    Nothing is measured on records that are not declared public.
    """
    if asked.recipe == "list":
        list_recipes(out)
        return None
    from sordino.randomness import KeyedRNG
    from sordino.recipes import get_recipe
    from sordino.report import write_report

    pipeline = get_recipe(asked.recipe)
    rng = KeyedRNG(seed=asked.seed, reproducible=asked.reproducible)
    dataset = asked.table.load(out, by_estimator=False, keep_texts=True)
    delta = default_delta(len(dataset.train)) if asked.delta is None else asked.delta
    prepared, stated = pipeline.plan(
        dataset, epsilon=asked.epsilon, delta=delta, setting=asked.setting, device=asked.device
    )
    out.print_status(
        _ahead(pipeline, dataset, [(stage.name, len(stage.charges)) for stage in prepared.stages], stated.epsilon)
    )

    def fit(ledger: "Account | None", folder: Path) -> "FittedRecipe":
        return pipeline.fit(
            dataset,
            epsilon=asked.epsilon,
            delta=delta,
            setting=asked.setting,
            ledger=ledger,
            run_folder=folder,
            rng=rng,
            device=asked.device,
            progress=True,
        )

    if dry_run:
        print_preview(out, fit, ledger, delta=delta)
        return None
    folder = run_folder(dataset.name, asked.out)
    with contextlib.redirect_stdout(sys.stderr):
        fitted = fit(ledger, folder)
    run = RunFolder.open(folder)
    with out.progress("measuring and writing the report"):
        metrics = _measured(dataset, fitted, test_is_public=asked.table.test_is_public(dataset))
        run.write_metrics(metrics)
        write_report(run)
    outcome = Outcome(
        run=run,
        guarantee=fitted.guarantee,
        metrics=metrics,
        steps=len(fitted.events),
        interrupted=not fitted.complete,
    )
    out.print_result(outcome.to_dict() | {"recipe": pipeline.name}, *render_outcome(outcome))
    return outcome


def _ahead(
    pipeline: "Recipe", dataset: "DatasetSplits", stages: list[tuple[str, int]], epsilon: float
) -> RenderableType:
    kind = "public" if dataset.public else "private"
    parts = ", ".join(f"{name} ({count:,} {'charge' if count == 1 else 'charges'})" for name, count in stages)
    used = ", ".join(pipeline.public_inputs) or "none"
    rows = [("stages", f"{parts}; together ε ≤ {epsilon:.4g}"), ("public inputs", used)]
    return Group(heading(f"{dataset.name}: {kind} records, recipe {pipeline.name}"), key_value_table(rows))


def _measured(dataset: "DatasetSplits", fitted: "FittedRecipe", *, test_is_public: bool) -> dict[str, Metric]:
    """Accuracy, calibration and subgroups on the test records if they are public; nothing otherwise."""
    from sordino.report import compute_utility

    test = dataset.test
    if test is None or not len(test) or not test_is_public:
        return {}
    return compute_utility(fitted.predict_proba(test), test.labels, public=True, groups=subgroups_of(dataset, test))


def check_no_other_options(recipe: str, names: tuple[str, ...], **others: object) -> None:
    """A recipe fixes all settings: other settings would have no effect, so it is refused."""
    names = (*names, *(name.replace("_", " ") for name, value in others.items() if value is not None))
    if names:
        raise InvalidArgument(
            f"{', '.join(names)} must be left out with --recipe {recipe}, got a value. A recipe fixes its settings; "
            "use `sordino.recipes` from Python to change them."
        )
