"""`sordino tune DATA`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from sordino.cli.console import JsonOption, key_value_table
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

__all__ = ["tune_command"]


@with_table_options
def tune_command(
    data: DataArgument,
    epsilon: Annotated[float, typer.Option(help="ε of the whole search: all runs, their scores, and the choice.")],
    model: Annotated[str, typer.Option(help="An estimator's method, as for train.")] = "dp-gd",
    delta: Annotated[float | None, typer.Option(help="δ of the whole search, as for train.")] = None,
    runs: Annotated[float, typer.Option(help="Mean of the secret number of runs, > 1.")] = 20.0,
    shape: Annotated[float, typer.Option(help="Shape η > −1 of the number of runs: 0 logarithmic, 1 geometric.")] = 0.0,
    score: Annotated[
        str, typer.Option(help="Records that score the runs: `private` ones or `public` test records.")
    ] = ("private"),
    score_noise: Annotated[float, typer.Option(help="Noise scale of a private score, in records.")] = 30.0,
    space: Annotated[
        Path | None, typer.Option(help="JSON file with the search space. Default: the method's own.")
    ] = None,
    seed: SeedOption = None,
    reproducible: ReproducibleOption = False,
    out: OutFolderOption = None,
    ledger: LedgerOption = None,
    dataset_name: DatasetNameOption = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
    **table: object,
) -> None:
    """Search settings by random stopping and keep the best model: what leaves is ε-private, search included.

    How many runs there were, and what the others gave, is neither printed nor stored.
    """
    output, found = call("tune", locals())
    chosen = [
        (name.replace("_", " "), f"{value:.4g}" if isinstance(value, float) else str(value))
        for name, value in found.details["settings"].items()
    ]
    title = Text("chosen settings", style="dim")
    output.print_result(found.to_dict(), *render_outcome(found), Text(), title, key_value_table(chosen))
