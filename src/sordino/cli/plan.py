"""`sordino plan`: no torch, no data."""

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from sordino.cli.console import JsonOption, Output, epsilon_text, exact_text, heading, key_value_table, round_up
from sordino.cli.options import call
from sordino.commands.planning import PlannedRun, PlanTable
from sordino.definitions import NeighboringRelation, PrivacyUnit
from sordino.errors import InvalidArgument

if TYPE_CHECKING:
    from sordino.commands import RecommendedPlan

__all__ = ["plan_command"]


def plan_command(
    epsilon: Annotated[float, typer.Option(help="Target ε, never exceeded.")],
    delta: Annotated[
        float | None,
        typer.Option(help="δ in (0, 1), well below 1 / number of records. If omitted, the smallest δ is computed."),
    ] = None,
    noise_multiplier: Annotated[
        float | None, typer.Option(help="Noise standard deviation over sensitivity, to compute another value from.")
    ] = None,
    sample_rate: Annotated[
        float | None, typer.Option(help="Probability in (0, 1] that a record is in a batch.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Number of steps.")] = None,
    dataset_size: Annotated[
        int | None,
        typer.Option(help="Public number of records; with a batch size instead of a rate."),
    ] = None,
    batch_size: Annotated[float | None, typer.Option(help="Expected batch size.")] = None,
    epochs: Annotated[
        str | None, typer.Option(metavar="E[,E…]", help="Expected passes over the data; several values make a table.")
    ] = None,
    batch_sizes: Annotated[
        str | None, typer.Option(metavar="B,B,…", help="Batch sizes for a table over epochs, with --dataset-size.")
    ] = None,
    neighboring_relation: Annotated[
        NeighboringRelation, typer.Option(help="Neighboring relation of datasets.")
    ] = NeighboringRelation.ADD_OR_REMOVE_ONE,
    privacy_unit: Annotated[
        PrivacyUnit, typer.Option(help="Privacy unit: whose contribution is protected.")
    ] = PrivacyUnit.RECORD,
    recommend: Annotated[
        bool,
        typer.Option(
            "--recommend", help="Recommend all settings by published rules, from --dataset-size and --parameters."
        ),
    ] = False,
    parameters: Annotated[int | None, typer.Option(help="Number of trainable parameters; with --recommend.")] = None,
    weight_distance: Annotated[
        float, typer.Option(help="ℓ2 distance from initial to final weights; with --recommend.")
    ] = 1.0,
    sampling: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="How batches are drawn: poisson, without_replacement or with_replacement (both with --dataset-size), "
            "balls_in_bins, shuffled (claims no amplification).",
        ),
    ] = "poisson",
    as_json: JsonOption = False,
) -> None:
    """Find the least noise multiplier for a target ε; with noise given, the most steps, largest rate or least δ.

    For example: [cyan]sordino plan --epsilon 1 --delta 1e-5 --dataset-size 60000 --batch-size 600 --epochs 20[/cyan]

    A table: [cyan]sordino plan --epsilon 3 --delta 1e-5 --dataset-size 60000 --batch-sizes 256,4096 --epochs
    10,40[/cyan]

    All settings: [cyan]sordino plan --recommend --epsilon 1 --delta 1e-5 --dataset-size 60000 --parameters 7850[/cyan]
    """
    options = {
        **locals(),
        "epochs": None if epochs is None else _listed(epochs, "epochs"),
        "batch_sizes": None if batch_sizes is None else _listed(batch_sizes, "batch-sizes"),
    }
    output, found = call("plan", options)
    if isinstance(found, PlanTable):
        output.print_result(found.document, *_table_page(found))
    elif isinstance(found, PlannedRun):
        _show(output, found)
    else:
        _show_recommendation(output, found)


def _listed(text: str, name: str) -> list[float]:
    """Numbers, separated by commas."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise InvalidArgument(f"{name} must be numbers with commas between, got {text!r}. Write 256,1024.") from error


def _show_recommendation(output: Output, done: "RecommendedPlan") -> None:
    """What the rules say, with their sources."""
    found = done.settings
    trial, noise = found.small_batch
    rows = [
        (
            "batch size",
            f"{found.batch_size:,} of {done.records:,} records (public), sample rate {found.sample_rate:.6g}",
        ),
        ("steps", f"{found.steps:,}, {found.epochs:.4g} epochs"),
        ("noise multiplier", round_up(found.noise_multiplier)),
        ("clipping norm", f"{found.max_grad_norm:g}"),
        ("learning rate", f"{found.learning_rate:.3g}"),
        ("signal", f"{100 * min(1.0, found.signal / found.signal_ceiling):.0f} % of what ε and δ allow"),
        ("one step", f"a gradient stands {found.gradient_to_noise:.3g} to 1 against its noise, at most"),
        ("to try settings", f"batch {trial} with noise multiplier {round_up(noise, 3)}, same steps, on PUBLIC records"),
        ("unit", PrivacyUnit(done.document["privacy_unit"]).describe()),
        ("neighbors", NeighboringRelation(done.document["neighboring_relation"]).describe()),
    ]
    sources = "\n".join(f"{name.replace('_', ' ')}: {text}." for name, text in done.document["sources"].items())
    output.print_result(
        done.document,
        heading(
            f"Settings for ε ≤ {exact_text(done.document['target_epsilon'])} at δ = "
            f"{exact_text(done.document['delta'])}",
            "by published rules; no record was read",
        ),
        key_value_table(rows),
        Text("\n" + sources, style="dim"),
    )


def _table_page(done: "PlanTable") -> tuple[RenderableType, ...]:
    document = done.document
    relation, unit = NeighboringRelation(document["neighboring_relation"]), PrivacyUnit(document["privacy_unit"])
    grid = Table(box=None, padding=(0, 3, 1, 0), header_style="dim", show_edge=False)
    grid.add_column("batch size", justify="right", style="dim")
    for epochs in done.passes:
        grid.add_column(f"{epochs:g} epochs", justify="right")
    by_place = {(cell.batch_size, cell.epochs): cell for cell in done.cells}
    for size in done.sizes:
        row = [Text(f"{size:g}")]
        for epochs in done.passes:
            cell = by_place[size, epochs]
            chosen = cell is done.best
            row.append(
                Text.assemble(
                    (
                        f"{'★ ' if chosen else ''}{round_up(cell.noise_multiplier, 5)}",
                        "bold cyan" if chosen else "bold",
                    ),
                    (f"\n{cell.steps:,} steps\n{100 * cell.share_of_ceiling:.0f} % signal", "dim"),
                )
            )
        grid.add_row(*row)
    rows = [
        ("unit", unit.describe()),
        ("neighbors", relation.describe()),
        ("public", "the number of records"),
    ]
    rule = (
        "signal = q√steps/σ, of the most that ε and δ allow. ★ the fewest gradients (epochs) within 10 % of the "
        "table's best signal\n(total amount of noise: Sander, Stock and Sablayrolles 2023); it doesn't know how many "
        "steps a model needs."
    )
    return (
        heading(
            f"noise multipliers for ε ≤ {exact_text(document['target_epsilon'])} at δ = {exact_text(document['delta'])}"
        ),
        grid,
        key_value_table(rows),
        Text("\n" + rule, style="dim"),
    )


def _round_down(rate: float) -> str:
    """A rate with six digits, never above itself."""
    text = f"{rate:.6g}"
    return text if float(text) <= rate else exact_text(rate)


def _show(output: Output, done: "PlannedRun") -> None:
    document = done.document
    noise, rate, steps, delta = (document[name] for name in ("noise_multiplier", "sample_rate", "steps", "delta"))
    target, size = document["target_epsilon"], document.get("batch_size")
    rows = [
        ("noise multiplier", round_up(noise)),
        ("sample rate", _round_down(rate)),
        ("steps", f"{steps:,}"),
        ("epochs", f"{steps * rate:.6g}"),
        ("unit", PrivacyUnit(document["privacy_unit"]).describe()),
        ("neighbors", NeighboringRelation(document["neighboring_relation"]).describe()),
        ("sampler", str(document["sampler"])),
        ("accountant", str(document["accountant"]).replace("_", " ")),
    ]
    if size is not None:
        rows.insert(2, ("batch size", f"{size:.6g} of {round(size / rate):,} records (public)"))
    words = {
        "noise_multiplier": f"noise multiplier {round_up(noise)}",
        "steps": f"at most {steps:,} steps",
        "sample_rate": f"sample rate at most {_round_down(rate)}",
        "delta": f"δ = {exact_text(delta)} at least",
    }
    cost = document["epsilon"]
    assert isinstance(cost, float | str)
    note = f"keeps the run at ε = {epsilon_text(cost)} ≤ {exact_text(target)} for δ = {exact_text(delta)}"
    output.print_result(document, heading(words[done.found], note), key_value_table(rows))
