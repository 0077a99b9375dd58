"""`sordino account`: no torch, no data."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from sordino.cli.console import JsonOption, epsilon_text, exact_text, heading, key_value_table
from sordino.cli.options import call
from sordino.definitions import NeighboringRelation, PrivacyUnit, format_upper_bound

__all__ = ["account_command"]


def account_command(
    run: Annotated[
        Path | None, typer.Argument(metavar="[RUN]", help="Run folder whose transcript is accounted.")
    ] = None,
    sample_rate: Annotated[
        float | None, typer.Option(help="Probability in (0, 1] that a record is in a batch.")
    ] = None,
    noise_multiplier: Annotated[
        float | None, typer.Option(help="Noise standard deviation over the sensitivity under --neighboring-relation.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Number of steps.")] = None,
    event: Annotated[str | None, typer.Option(help="Privacy event as JSON, or a file with one.")] = None,
    delta: Annotated[float | None, typer.Option(help="δ in (0, 1). Default for a run folder: its own.")] = None,
    neighboring_relation: Annotated[
        NeighboringRelation | None, typer.Option(help="Neighboring relation of datasets.")
    ] = None,
    privacy_unit: Annotated[
        PrivacyUnit | None, typer.Option(help="Privacy unit: whose contribution is protected.")
    ] = None,
    all: Annotated[bool, typer.Option("--all", help="Include the slow accountants.")] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png|svg", help="Draw ε over steps and the trade-off curve.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compute the ε of a described run, of an event, or of a run folder.

    For example: [cyan]sordino account --sample-rate 0.01 --noise-multiplier 4 --steps 10000 --delta 1e-5[/cyan]
    """
    output, found = call("account", locals())
    output.print_result(found.to_dict(), *_page(found.to_dict()))


def _page(document: dict[str, object]) -> tuple[RenderableType, ...]:
    """The document for people."""
    epsilon = document["epsilon"]
    interval, accountants = document["interval"], document["accountants"]
    assert isinstance(epsilon, float | str)
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column(justify="right")
    if isinstance(accountants, dict):
        for name, value in sorted(accountants.items(), key=lambda item: float(item[1])):
            chosen = name == document["accountant"]
            table.add_row(name.replace("_", " "), Text(epsilon_text(value), style="bold" if chosen else ""))
    rows = [
        ("unit", PrivacyUnit(str(document["privacy_unit"])).describe()),
        ("neighbors", NeighboringRelation(str(document["neighboring_relation"])).describe()),
        ("sampler", str(document["sampler"])),
        ("accountant", str(document["accountant"]).replace("_", " ")),
    ]
    if isinstance(interval, dict):
        rows.append(("true ε within", _between(interval["lower"], interval["upper"])))
    bare, attack = document["epsilon_without_amplification"], document["attack"]
    if bare is not None and bare != epsilon:
        assert isinstance(bare, float | str)
        rows.append(("without amplification", f"ε = {epsilon_text(bare)}"))
    if isinstance(attack, dict):
        rows.append(("attack", _describe_attack(attack)))
    if "plot" in document:
        rows.append(("plot", str(document["plot"])))
    return (
        heading(f"ε = {epsilon_text(epsilon)} at δ = {exact_text(float(str(document['delta'])))}"),
        key_value_table(rows),
        Text("\nε by accountant (each is a valid upper bound)", style="dim"),
        table,
    )


def _describe_attack(attack: Mapping[str, object]) -> str:
    found = attack["true_positive_rate"]
    assert isinstance(found, Mapping)
    parts = [
        f"≤ {format_upper_bound(100 * value)} % at {100 * float(rate):g} % false positives"
        for rate, value in found.items()
    ]
    return f"true positives {', '.join(parts)}; advantage ≤ {exact_text(float(str(attack['advantage'])))}"


def _between(lower: float | str, upper: float | str) -> str:
    """The interval with as many digits as it takes to tell its ends apart, rounded outwards."""
    if isinstance(lower, str) or isinstance(upper, str):
        return "[∞, ∞]" if isinstance(lower, str) else f"[{lower:.5f}, ∞]"
    if lower == upper:
        return f"[{lower:.5f}, {upper:.5f}]"
    digits = min(15, max(5, 1 - math.floor(math.log10(upper - lower))))
    step = 10.0**digits
    return f"[{math.floor(lower * step) / step:.{digits}f}, {math.ceil(upper * step) / step:.{digits}f}]"
