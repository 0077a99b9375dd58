"""`sordino account` and `sordino plan`: no torch, no data."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from sordino.cli.console import Output, epsilon_text, exact_text, heading, key_value_table, numbers, round_up
from sordino.cli.options import Form, command
from sordino.commands.planning import PlannedRun, PlanTable
from sordino.definitions import NeighboringRelation, PrivacyUnit, format_upper_bound

if TYPE_CHECKING:
    from sordino.commands import AccountedRun, RecommendedPlan


@command("account", forms={"run": Form(metavar="[RUN]"), "plot": Form(metavar="FILE.png|svg")})
def print_account(output: Output, found: "AccountedRun") -> None:
    """Compute the ε of a described run, of an event, or of a run folder.

    For example: [cyan]sordino account --sample-rate 0.01 --noise-multiplier 4 --steps 10000 --delta 1e-5[/cyan]
    """
    output.print_result(found.to_dict(), *_page(found.to_dict()))


def _page(document: Mapping[str, Any]) -> tuple[RenderableType, ...]:
    """The document for people."""
    epsilon, bare, attack = document["epsilon"], document["epsilon_without_amplification"], document["attack"]
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column(justify="right")
    for name, value in sorted(document["accountants"].items(), key=lambda item: float(item[1])):
        chosen = name == document["accountant"]
        table.add_row(name.replace("_", " "), Text(epsilon_text(value), style="bold" if chosen else ""))
    rows = [
        *_declared(document),
        ("sampler", document["sampler"]),
        ("accountant", document["accountant"].replace("_", " ")),
        ("true ε within", _between(**document["interval"])),
    ]
    if bare is not None and bare != epsilon:
        rows.append(("without amplification", f"ε = {epsilon_text(bare)}"))
    if attack is not None:
        rows.append(("attack", _describe_attack(attack)))
    if "plot" in document:
        rows.append(("plot", document["plot"]))
    return (
        heading(f"ε = {epsilon_text(epsilon)} at δ = {exact_text(document['delta'])}"),
        key_value_table(rows),
        Text("\nε by accountant (each is a valid upper bound)", style="dim"),
        table,
    )


def _declared(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    """For which unit and which neighbors the ε of a document holds."""
    unit, relation = PrivacyUnit(document["privacy_unit"]), NeighboringRelation(document["neighboring_relation"])
    return [("unit", unit.describe()), ("neighbors", relation.describe())]


def _describe_attack(attack: Mapping[str, Any]) -> str:
    parts = [
        f"≤ {format_upper_bound(100 * value)} % at {100 * float(rate):g} % false positives"
        for rate, value in attack["true_positive_rate"].items()
    ]
    return f"true positives {', '.join(parts)}; advantage ≤ {exact_text(attack['advantage'])}"


def _between(lower: float | str, upper: float | str) -> str:
    """The interval with as many digits as it takes to tell its ends apart, rounded outwards."""
    if isinstance(lower, str) or isinstance(upper, str):
        return "[∞, ∞]" if isinstance(lower, str) else f"[{lower:.5f}, ∞]"
    if lower == upper:
        return f"[{lower:.5f}, {upper:.5f}]"
    digits = min(15, max(5, 1 - math.floor(math.log10(upper - lower))))
    step = 10.0**digits
    return f"[{math.floor(lower * step) / step:.{digits}f}, {math.ceil(upper * step) / step:.{digits}f}]"


def _listed(options: dict[str, Any]) -> dict[str, Any]:
    """Epochs and batch sizes as they were written ↦ lists."""
    names = {"epochs": "epochs", "batch_sizes": "batch-sizes"}
    return options | {
        name: options[name] and numbers(options[name], words, "256,1024") for name, words in names.items()
    }


@command(
    "plan",
    forms={
        "epochs": Form(kind=str | None, metavar="E[,E…]"),
        "batch_sizes": Form(kind=str | None, metavar="B,B,…"),
        "sampling": Form(metavar="NAME"),
    },
    prepare=_listed,
)
def print_plan(output: Output, found: "PlannedRun | PlanTable | RecommendedPlan") -> None:
    """Find the least noise multiplier for a target ε; with noise given, the most steps, largest rate or least δ.

    For example: [cyan]sordino plan --epsilon 1 --delta 1e-5 --dataset-size 60000 --batch-size 600 --epochs 20[/cyan]

    A table: [cyan]sordino plan --epsilon 3 --delta 1e-5 --dataset-size 60000 --batch-sizes 256,4096 --epochs
    10,40[/cyan]

    All settings: [cyan]sordino plan --recommend --epsilon 1 --delta 1e-5 --dataset-size 60000 --parameters 7850[/cyan]
    """
    if isinstance(found, PlanTable):
        page = _table_page(found)
    elif isinstance(found, PlannedRun):
        page = _run_page(found)
    else:
        page = _settings_page(found)
    output.print_result(found.document, *page)


def _settings_page(done: "RecommendedPlan") -> tuple[RenderableType, ...]:
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
        ("one step", f"gradient to noise at most {found.gradient_to_noise:.3g} to 1"),
        ("to try settings", f"batch {trial} with noise multiplier {round_up(noise, 3)}, same steps, on PUBLIC records"),
        *_declared(done.document),
    ]
    sources = "\n".join(f"{name.replace('_', ' ')}: {text}." for name, text in done.document["sources"].items())
    return (
        heading(
            f"Settings for ε ≤ {exact_text(done.document['target_epsilon'])} at δ = "
            f"{exact_text(done.document['delta'])}",
            "by published rules; no record was read",
        ),
        key_value_table(rows),
        Text("\n" + sources, style="dim"),
    )


def _table_page(done: PlanTable) -> tuple[RenderableType, ...]:
    document = done.document
    grid = Table(box=None, padding=(0, 3, 1, 0), header_style="dim", show_edge=False)
    grid.add_column("batch size", justify="right", style="dim")
    for epochs in done.passes:
        grid.add_column(f"{epochs:g} epochs", justify="right")
    by_setting = {(cell.batch_size, cell.epochs): cell for cell in done.cells}
    for size in done.sizes:
        row = [Text(f"{size:g}")]
        for epochs in done.passes:
            cell = by_setting[size, epochs]
            chosen = cell is done.best
            noise = f"{'★ ' if chosen else ''}{round_up(cell.noise_multiplier, 5)}"
            below = f"\n{cell.steps:,} steps\n{100 * cell.share_of_ceiling:.0f} % signal"
            row.append(Text.assemble((noise, "bold cyan" if chosen else "bold"), (below, "dim")))
        grid.add_row(*row)
    rows = [*_declared(document), ("public", "the number of records")]
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


def _run_page(done: PlannedRun) -> tuple[RenderableType, ...]:
    document = done.document
    noise, rate, steps, delta = (document[name] for name in ("noise_multiplier", "sample_rate", "steps", "delta"))
    target, size = document["target_epsilon"], document.get("batch_size")
    rows = [
        ("noise multiplier", round_up(noise)),
        ("sample rate", _round_down(rate)),
        ("steps", f"{steps:,}"),
        ("epochs", f"{steps * rate:.6g}"),
        *_declared(document),
        ("sampler", document["sampler"]),
        ("accountant", document["accountant"].replace("_", " ")),
    ]
    if size is not None:
        rows.insert(2, ("batch size", f"{size:.6g} of {round(size / rate):,} records (public)"))
    words = {
        "noise_multiplier": f"noise multiplier {round_up(noise)}",
        "steps": f"at most {steps:,} steps",
        "sample_rate": f"sample rate at most {_round_down(rate)}",
        "delta": f"δ = {exact_text(delta)} at least",
    }
    cost = epsilon_text(document["epsilon"])
    note = f"keeps the run at ε = {cost} ≤ {exact_text(target)} for δ = {exact_text(delta)}"
    return heading(words[done.found], note), key_value_table(rows)
