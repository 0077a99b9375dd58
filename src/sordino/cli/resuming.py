"""`sordino train DATA --resume RUN`: the recipe that a run was begun with, put together again from its folder."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from sordino.errors import InvalidArgument
from sordino.runs import RunFolder

if TYPE_CHECKING:
    from sordino.data import DataSet
    from sordino.recipes import ModelFactory, Recipe

__all__ = ["recipe_of", "target_epsilon_of"]


def target_epsilon_of(folder: Path) -> float:
    """The target that the run was planned for."""
    target = RunFolder.open(folder).meta.get("target_epsilon")
    if not isinstance(target, int | float):
        raise InvalidArgument("resume must name a run that `sordino train` began, got one without a target ε.")
    return float(target)


def recipe_of(folder: Path, dataset: "DataSet", model: "str | ModelFactory") -> "Recipe":
    """The recipe of the run in `folder`, for the same records.

    Args:
        folder: the run.
        dataset: the records that it was begun with; nothing of them but their form is compared.
        model: the factory of a model of the user's own; a name is read from the run.

    Raises:
        InvalidArgument: the run was not begun by `sordino train`, or with a model of another name.
    """
    from sordino.recipes import recommend
    from sordino.training.plan import Plan

    run = RunFolder.open(folder)
    training = run.meta.get("training")
    if not isinstance(training, Mapping) or "learning_rate" not in training:
        raise InvalidArgument("resume must name a run that `sordino train` began, got one of another kind.")
    plan = Plan.from_json((run.path / "plan.json").read_text())
    recipe = recommend(
        str(training["model"]) if isinstance(model, str) else model,
        shape=dataset.train.record_shape,
        classes=len(dataset.labels),
        population=len(dataset.train),
        target_epsilon=target_epsilon_of(folder),
        delta=plan.delta,
        steps=plan.steps,
    )
    if recipe.model != training["model"]:
        raise InvalidArgument(f"model must be {training['model']!r} as in the run, got {recipe.model!r}. Give --model.")
    return replace(recipe, plan=plan, learning_rate=float(str(training["learning_rate"])))
