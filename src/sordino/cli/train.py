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
from sordino.cli.recipes import recipes_command
from sordino.commands import RunOutcome
from sordino.definitions import NeighboringRelation

__all__ = ["demo_command", "train_command"]


@with_table_options
def train_command(
    data: DataArgument,
    epsilon: Annotated[float | None, typer.Option(help="Target ε, never exceeded. Not with --resume.")] = None,
    delta: Annotated[float | None, typer.Option(help="δ, below 1 / number of records. Default: 1e-5 or less.")] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="logistic, mlp, cnn, an estimator's method, or module:factory. Default: "
            "logistic for labels, boosting for numbers."
        ),
    ] = None,
    recipe: Annotated[
        str | None, typer.Option("--recipe", help="Train a whole pipeline instead of a model; `list` shows them.")
    ] = None,
    setting: Annotated[str | None, typer.Option(help="Named noise level of the recipe, instead of --epsilon.")] = None,
    device: Annotated[str | None, typer.Option(help="Device on which a recipe trains. Default: cpu.")] = None,
    steps: Annotated[int | None, typer.Option(help="Number of steps. Default: the fixed setting.")] = None,
    batch_size: Annotated[
        float | None, typer.Option(help="Expected batch size in records. Default: the fixed setting.")
    ] = None,
    max_grad_norm: Annotated[float | None, typer.Option(help="Clipping norm (ℓ2). Default: the fixed setting.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Learning rate. Default: the fixed setting.")] = None,
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
        bool,
        typer.Option("--secure-mode", help="Round sums and noise to integers, against attacks on low bits; slower."),
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
        Path | None, typer.Option(help="Interrupted run on the same data; continue from its checkpoint.")
    ] = None,
    checkpoint_every: Annotated[
        int | None, typer.Option(help="Steps between checkpoints. Default: a tenth of the run.")
    ] = None,
    diagnostics: Annotated[
        str | None, typer.Option(help="`private` prints losses and batch sizes, outside the guarantee.")
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
        recipes_command(as_json=as_json)
        return
    output, found = call("train", options)
    # Processes that a launcher started train together; the first one writes the run and speaks.
    if found is not None:
        _print(output, found)


def demo_command(
    epsilon: Annotated[float, typer.Option(help="Target ε, never exceeded.")] = 1.0,
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
