"""`sordino federate DATA`."""

from typing import Annotated

import typer

from sordino.cli.console import JsonOption
from sordino.cli.options import DatasetNameOption, DryRunOption, LedgerOption, OutFolderOption, call
from sordino.cli.outcomes import render_outcome

__all__ = ["federate"]


def federate(
    data: Annotated[str, typer.Argument(metavar="DATA", help="A name from `sordino data list`: public data.")],
    epsilon: Annotated[float, typer.Option(help="The target for one client: ε is never above it.")],
    clients: Annotated[int, typer.Option(help="Number of clients; the records are dealt to them evenly.")] = 200,
    rounds: Annotated[int, typer.Option(help="Number of rounds.")] = 30,
    cohort: Annotated[float, typer.Option(help="Clients asked in a round, on average.")] = 100,
    delta: Annotated[
        float | None, typer.Option(help="δ; a power of ten below a tenth of 1 / clients if not given.")
    ] = None,
    model: Annotated[str, typer.Option(help="logistic, mlp or cnn.")] = "logistic",
    max_update_norm: Annotated[
        float, typer.Option("--max-update-norm", help="ℓ2 clipping norm of one update, or the first one if it adapts.")
    ] = 0.3,
    fixed_norm: Annotated[
        bool, typer.Option("--fixed-norm", help="Keep the bound; otherwise it follows the median of the norms.")
    ] = False,
    local_epochs: Annotated[int, typer.Option(help="A client's passes over its records.")] = 1,
    local_batch_size: Annotated[int, typer.Option(help="Records of a client's step.")] = 10,
    local_learning_rate: Annotated[float, typer.Option(help="Learning rate of a client's steps.")] = 0.1,
    optimizer: Annotated[
        str, typer.Option(help="Of the server: fedavg, fedavgm, fedadagrad, fedadam or fedyogi.")
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
