"""`sordino plan --recommend`: all settings of DP-SGD by published rules. No torch, no data."""

from collections.abc import Sequence
from dataclasses import asdict

from rich.text import Text

from sordino import checks
from sordino.cli.output import Output, facts, heading
from sordino.cli.statement import statement, subsampled_gaussian
from sordino.definitions import NeighboringRelation, PrivacyUnit
from sordino.errors import InvalidArgument, MissingDeclaration

__all__ = ["show_recommendation"]

_SOURCES = {
    "batch_size": "the smallest batch whose signal q√T/σ, the inverse of the total amount of noise, is within 10 % of "
    "the best (Sander, Stock, Sablayrolles 2023)",
    "steps": "epochs · n/B, at most (nμ)²/d (after Bassily, Feldman, Talwar, Thakurta 2019)",
    "noise_multiplier": "the least that the accountant allows",
    "max_grad_norm": "1: with normalised gradients it is one knob with the learning rate (De et al. 2022; Bu et al. "
    "2023)",
    "learning_rate": "R/(C√T·√(1 + dσ²/B²)) for the mean gradient and plain SGD (Bassily, Smith, Thakurta 2014); "
    "learning rate × steps grows like ε (Panda et al. 2024)",
}


def show_recommendation(
    out: Output,
    epsilon: float,
    delta: float | None,
    records: int | None,
    parameters: int | None,
    passes: Sequence[float] | None,
    distance: float,
    relation: NeighboringRelation,
    unit: PrivacyUnit,
    *,
    others: Sequence[object],
) -> None:
    """Print what the rules say, with their sources, or the document."""
    if delta is None or records is None or parameters is None:
        raise MissingDeclaration("a recommendation must be given --delta, --records and --parameters. Give the rest.")
    if any(other is not None for other in others) or (passes is not None and len(passes) > 1):
        raise InvalidArgument("a recommendation must be given no settings but one --epochs, got more. Drop them.")
    checks.probability(zero=False, one=False, delta=delta)
    from sordino.tuning.scaling import recommend_settings

    found = recommend_settings(
        records=records,
        parameters=parameters,
        target_epsilon=epsilon,
        delta=delta,
        epochs=passes[0] if passes else 40.0,
        distance=distance,
        relation=relation,
    )
    event = subsampled_gaussian(
        sample_rate=found.sample_rate, noise_multiplier=found.noise_multiplier, steps=found.steps
    )
    document = {
        **asdict(found),
        "target_epsilon": epsilon,
        "dataset_size_is_public": True,
        "sources": _SOURCES,
        **statement(event, delta=delta, relation=relation, unit=unit),
    }
    trial, noise = found.small_batch
    rows = [
        ("batch size", f"{found.batch_size:,} of {records:,} records (public), sample rate {found.sample_rate:.6g}"),
        ("steps", f"{found.steps:,}, {found.epochs:.4g} epochs"),
        ("noise multiplier", f"{found.noise_multiplier:.6g}"),
        ("clipping norm", f"{found.max_grad_norm:g}"),
        ("learning rate", f"{found.learning_rate:.3g}"),
        ("signal", f"{100 * min(1.0, found.signal / found.signal_ceiling):.0f} % of what ε and δ allow"),
        ("one step", f"a gradient stands {found.gradient_to_noise:.3g} to 1 against its noise, at most"),
        ("to try settings", f"batch {trial} with noise multiplier {noise:.3g}, same steps, on PUBLIC records"),
        ("unit", unit.words),
        ("neighbours", relation.words),
    ]
    sources = "\n".join(f"{name.replace('_', ' ')}: {text}." for name, text in _SOURCES.items())
    out.finish(
        document,
        heading(f"Settings for ε ≤ {epsilon:g} at δ = {delta:g}", "by published rules; no record was read"),
        facts(rows),
        Text("\n" + sources, style="dim"),
    )
