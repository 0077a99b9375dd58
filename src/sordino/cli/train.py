"""`sordino train DATA` and `sordino demo`."""

from pathlib import Path
from typing import Annotated

import typer

from sordino.cli.console import JsonOption, Output
from sordino.cli.options import (
    DataArgument,
    DatasetNameOption,
    DryRunOption,
    LedgerOption,
    OutFolderOption,
    ReproducibleOption,
    SeedOption,
    call,
    with_table_options,
)
from sordino.cli.outcomes import render_outcome
from sordino.cli.recipes import recipes
from sordino.commands import RunOutcome
from sordino.definitions import NeighboringRelation

__all__ = ["demo", "train"]


@with_table_options
def train(
    data: DataArgument,
    epsilon: Annotated[float | None, typer.Option(help="The target: ε is never above it. Not with --resume.")] = None,
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
    recipe: Annotated[
        str | None, typer.Option("--recipe", help="A whole pipeline instead of a model; `list` shows them.")
    ] = None,
    setting: Annotated[str | None, typer.Option(help="A recipe's named noise, instead of --epsilon.")] = None,
    device: Annotated[str | None, typer.Option(help="Where a recipe trains; cpu if not given.")] = None,
    steps: Annotated[int | None, typer.Option(help="Number of steps, instead of the recipe's.")] = None,
    batch_size: Annotated[float | None, typer.Option(help="Expected batch size, instead of the recipe's.")] = None,
    max_grad_norm: Annotated[float | None, typer.Option(help="Clipping norm, instead of the recipe's.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Learning rate, instead of the recipe's.")] = None,
    sampling: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="How batches are drawn: poisson (if not given), without_replacement or with_replacement (of fixed "
            "size), balls_in_bins, shuffled (claims no amplification).",
        ),
    ] = None,
    neighboring_relation: Annotated[
        NeighboringRelation | None,
        typer.Option(help="Which datasets count as neighbors: add_or_remove_one if not given."),
    ] = None,
    secure_mode: Annotated[
        bool, typer.Option("--secure-mode", help="Whole-number sums and noise, against attacks on low bits; slower.")
    ] = False,
    release_losses: Annotated[
        float | None,
        typer.Option(
            "--release-losses",
            help="Also release noisy mean losses, each record's loss clipped to this value. Adds 1 % gradient noise.",
        ),
    ] = None,
    seed: SeedOption = None,
    reproducible: ReproducibleOption = False,
    out: OutFolderOption = None,
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
    **table: object,
) -> None:
    """Train a private model. Nothing is measured on records that you don't declare public."""
    options = locals()
    if recipe == "list":
        recipes(as_json=as_json)
        return
    output, found = call("train", options)
    # Processes that a launcher started train together; the first one writes the run and speaks.
    if found is not None:
        _print(output, found)


def demo(
    epsilon: Annotated[float, typer.Option(help="The target: ε is never above it.")] = 1.0,
    out: OutFolderOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train a private model on real data: guarantee, accuracy next to a non-private baseline, report.

    The data are the public Adult census records that come with sordino, so nothing is downloaded, and what privacy
    costs can be shown.
    """
    _print(*call("demo", locals()))


def _print(output: Output, found: RunOutcome) -> None:
    output.print_result(found.to_dict(), *render_outcome(found))
    if found.interrupted:
        raise typer.Exit(130)
