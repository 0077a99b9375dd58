"""`sordino plan`: the least noise that keeps a run within a target ε. No torch, no data."""

import math
from typing import Annotated

import typer

from sordino import checks
from sordino.cli.account import statement, subsampled_gaussian
from sordino.cli.output import JsonOption, Output, facts, heading
from sordino.definitions import NeighboringRelation, PrivacyUnit
from sordino.errors import InvalidArgument, MissingDeclaration

__all__ = ["plan"]


def plan(
    epsilon: Annotated[float, typer.Option(help="The target: ε is never above it.")],
    delta: Annotated[float, typer.Option(help="δ, in (0, 1), well below 1 / number of records.")],
    sample_rate: Annotated[
        float | None, typer.Option(help="Probability, above 0 up to 1, that a record joins a batch.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Number of steps.")] = None,
    records: Annotated[
        int | None, typer.Option(help="Public number of records; with --batch-size instead of --sample-rate.")
    ] = None,
    batch_size: Annotated[float | None, typer.Option(help="Expected batch size.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Expected passes over the data; instead of --steps.")] = None,
    relation: Annotated[
        NeighboringRelation, typer.Option(help="Which data sets count as neighbours.")
    ] = NeighboringRelation.ADD_OR_REMOVE_ONE,
    unit: Annotated[PrivacyUnit, typer.Option(help="Whose contribution is protected.")] = PrivacyUnit.EXAMPLE,
    as_json: JsonOption = False,
) -> None:
    """Find the least noise multiplier for a target ε.

    For example: [cyan]sordino plan --epsilon 1 --delta 1e-5 --records 60000 --batch-size 600 --epochs 20[/cyan]
    """
    from sordino import accounting

    out = Output(as_json=as_json)
    checks.positive(epsilon=epsilon)
    checks.probability(zero=False, one=False, delta=delta)
    rate = _sample_rate(sample_rate, records, batch_size)
    count = _steps(steps, epochs, rate)
    noise_multiplier = accounting.calibrate_noise_multiplier(
        lambda z: subsampled_gaussian(sample_rate=rate, noise_multiplier=z, steps=count),
        target_epsilon=epsilon,
        target_delta=delta,
        relation=relation,
    )
    event = subsampled_gaussian(sample_rate=rate, noise_multiplier=noise_multiplier, steps=count)
    document = {
        "noise_multiplier": noise_multiplier,
        "target_epsilon": epsilon,
        "sample_rate": rate,
        "steps": count,
        "dataset_size_is_public": records is not None,
        **statement(event, delta=delta, relation=relation, unit=unit),
    }
    rows = [
        ("sample rate", f"{rate:.6g}"),
        ("steps", f"{count:,}"),
        ("unit", unit.words),
        ("neighbours", relation.words),
        ("sampler", str(document["sampler"])),
        ("accountant", str(document["accountant"]).replace("_", " ")),
    ]
    if records is not None:
        rows.append(("public", "the number of records"))
    note = f"keeps the run at ε = {document['epsilon']:.5f} ≤ {epsilon:g} for δ = {delta:g}"
    out.finish(document, heading(f"noise multiplier {noise_multiplier:.5f}", note), facts(rows))


def _sample_rate(sample_rate: float | None, records: int | None, batch_size: float | None) -> float:
    if (sample_rate is None) == (records is None or batch_size is None) or (
        sample_rate is not None and (records is not None or batch_size is not None)
    ):
        raise MissingDeclaration("plan must be given --sample-rate, or --records with --batch-size. Give one of them.")
    if sample_rate is not None:
        return checks.probability(zero=False, sample_rate=sample_rate)
    number, size = checks.integer(1, records=records), checks.positive(batch_size=batch_size)
    if size > number:
        raise InvalidArgument(f"batch_size must be ≤ records ({number}), got {size:g}. Draw fewer records a step.")
    return size / number


def _steps(steps: int | None, epochs: float | None, sample_rate: float) -> int:
    if (steps is None) == (epochs is None):
        raise MissingDeclaration("plan must be given --steps or --epochs, one of them. Give one.")
    if steps is not None:
        return checks.integer(1, steps=steps)
    return max(1, math.ceil(checks.positive(epochs=epochs) / sample_rate))
