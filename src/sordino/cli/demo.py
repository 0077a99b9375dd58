"""`sordino demo`: the main job on the embedded Adult data, start to finish."""

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from sordino.cli.output import JsonOption, Output

__all__ = ["demo"]


def demo(
    epsilon: Annotated[float, typer.Option(help="The target: ε is never above it.")] = 1.0,
    out_folder: Annotated[
        Path | None, typer.Option("--out", help="The run folder; runs/adult-DATE-NUMBER if not given.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Train a private model on real data: guarantee, accuracy beside the non-private twin, report.

    The data are the public Adult census records that come with sordino, so nothing is downloaded, and what privacy
    costs can be shown.
    """
    from sordino.cli.running import Job, default_delta, page, perform, run_folder
    from sordino.data import load
    from sordino.randomness import Randomness
    from sordino.recipes import recommend

    out = Output(as_json=as_json)
    dataset = load("adult")
    population = len(dataset.train)
    recipe = recommend(
        "logistic",
        shape=dataset.train.record_shape,
        classes=len(dataset.labels),
        population=population,
        target_epsilon=epsilon,
        delta=default_delta(population),
    )
    out.say(
        Text.assemble(
            ("Adult", "bold"),
            f": {population:,} public census records, logistic regression, {recipe.plan.steps} private steps",
        )
    )
    outcome = perform(
        Job(
            dataset=dataset,
            test_is_public=True,
            recipe=recipe,
            target_epsilon=epsilon,
            by_hand=(),
            randomness=Randomness(),
            folder=run_folder("adult", out_folder),
        ),
        out.stderr,
    )
    out.finish(outcome.to_dict(), *page(outcome))
    if outcome.interrupted:
        raise typer.Exit(130)
