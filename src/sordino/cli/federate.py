"""`sordino federate DATA`."""

from typing import Annotated

import typer

from sordino.cli.console import JsonOption
from sordino.cli.options import DatasetNameOption, DryRunOption, LedgerOption, OutFolderOption, call
from sordino.cli.outcomes import render_outcome

__all__ = ["federate_command"]


def federate_command(
    data: Annotated[str, typer.Argument(metavar="DATA", help="Name of a public dataset from `sordino data list`.")],
    epsilon: Annotated[float, typer.Option(help="Target ε of one client, never exceeded.")],
    clients: Annotated[int, typer.Option(help="Number of clients; records are split evenly.")] = 200,
    rounds: Annotated[int, typer.Option(help="Number of rounds.")] = 30,
    cohort: Annotated[float, typer.Option(help="Expected number of clients per round.")] = 100,
    delta: Annotated[float | None, typer.Option(help="δ. Default: a power of ten below 0.1 / clients.")] = None,
    model: Annotated[str, typer.Option(help="logistic, mlp or cnn.")] = "logistic",
    max_update_norm: Annotated[
        float, typer.Option("--max-update-norm", help="ℓ2 clipping norm of an update; the initial one if it adapts.")
    ] = 0.3,
    fixed_norm: Annotated[
        bool, typer.Option("--fixed-norm", help="Keep the clipping norm fixed. Default: it follows the median norm.")
    ] = False,
    local_epochs: Annotated[int, typer.Option(help="Passes of a client over its records.")] = 1,
    local_batch_size: Annotated[int, typer.Option(help="Batch size of a client, in records.")] = 10,
    local_learning_rate: Annotated[float, typer.Option(help="Learning rate of a client.")] = 0.1,
    optimizer: Annotated[
        str, typer.Option(help="Server optimizer: fedavg, fedavgm, fedadagrad, fedadam or fedyogi.")
    ] = "fedavg",
    out: OutFolderOption = None,
    ledger: LedgerOption = None,
    dataset_name: DatasetNameOption = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Simulate federated learning: clients train on their own records, the server adds noise to their mean update."""
    output, found = call("federate", locals())
    output.print_result(found.to_dict(), *render_outcome(found))
