"""The table of `sordino plan`: noise for batch sizes × epochs, and which cell is the cheapest for its noise.

The rule. In `steps` updates at sample rate q a record is present q·steps times, against noise σ√steps: the signal of
a run is q√steps/σ, the inverse of its total amount of noise (Sander, Stock and Sablayrolles 2023, "TAN without a
burn: scaling laws of DP-SGD", where η = q√(S/2)/σ). For a given (ε, δ) it is at most the μ of the Gaussian that
the guarantee allows, which is reached when every step uses every record. Compute is the number of per-example
gradients, epochs × records. The cheapest cell is the one with the fewest gradients whose signal is within a tenth of
the table's best; among equals, the one with the most signal. How many steps a model needs is not in the rule.
"""

import math
from dataclasses import asdict, dataclass
from itertools import product

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from sordino import checks
from sordino.cli.output import Output, facts, heading
from sordino.cli.statement import subsampled_gaussian
from sordino.definitions import NeighboringRelation, PrivacyUnit
from sordino.errors import InvalidArgument
from sordino.events import Gaussian

__all__ = ["Cell", "batch_ladder", "cheapest", "listed", "show_table"]

_WITHIN = 0.9
_LARGEST_TABLE = 64


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One setting: its noise, and what it costs and gives."""

    batch_size: float
    epochs: float
    sample_rate: float
    steps: int
    noise_multiplier: float
    signal: float
    share_of_ceiling: float
    gradients: int


def listed(text: str, name: str) -> list[float]:
    """Positive numbers, separated by commas, each once, ascending."""
    try:
        numbers = {float(part) for part in text.split(",")}
    except ValueError as error:
        raise InvalidArgument(f"{name} must be numbers with commas between, got {text!r}. Write 256,1024.") from error
    if any(not 0 < number < math.inf for number in numbers):
        raise InvalidArgument(f"{name} must be finite numbers > 0, got {text!r}. Write 256,1024.")
    return sorted(numbers)


def batch_ladder(records: int) -> list[float]:
    """Powers of two from about 1/256 of the records to about a quarter."""
    top = max(1, math.floor(math.log2(max(2, records) / 4)))
    return [float(2**power) for power in range(max(0, top - 6), top + 1, 2)]


def _cell(
    size: float,
    epochs: float,
    *,
    records: int,
    epsilon: float,
    delta: float,
    relation: NeighboringRelation,
    ceiling: float,
) -> Cell:
    from sordino import accounting

    if size > records:
        raise InvalidArgument(f"batch_size must be ≤ records ({records}), got {size:g}. Draw fewer records a step.")
    rate = size / records
    steps = max(1, math.ceil(epochs / rate - 1e-9))
    noise = accounting.calibrate_noise_multiplier(
        lambda z: subsampled_gaussian(sample_rate=rate, noise_multiplier=z, steps=steps),
        target_epsilon=epsilon,
        target_delta=delta,
        relation=relation,
    )
    signal = rate * math.sqrt(steps) / noise
    return Cell(
        batch_size=size,
        epochs=epochs,
        sample_rate=rate,
        steps=steps,
        noise_multiplier=noise,
        signal=signal,
        share_of_ceiling=min(1.0, signal / ceiling),
        gradients=round(rate * steps * records),
    )


def cheapest(cells: list[Cell]) -> Cell:
    """The fewest gradients among cells within a tenth of the best signal; the most signal among equals.

    Example:
        >>> low = Cell(batch_size=1, epochs=1, sample_rate=0.1, steps=10, noise_multiplier=1.0, signal=0.316,
        ...            share_of_ceiling=0.9, gradients=10)
        >>> cheapest([low]) is low
        True
    """
    enough = _WITHIN * max(cell.signal for cell in cells)
    return min(
        (cell for cell in cells if cell.signal >= enough), key=lambda cell: (round(cell.epochs, 9), -cell.signal)
    )


def show_table(
    out: Output,
    sizes: list[float],
    passes: list[float],
    *,
    records: int,
    epsilon: float,
    delta: float,
    relation: NeighboringRelation,
    unit: PrivacyUnit,
) -> None:
    """Calibrate every cell and print the table, or its document."""
    from sordino import accounting

    checks.integer(1, records=records)
    checks.probability(zero=False, one=False, delta=delta)
    if len(sizes) * len(passes) > _LARGEST_TABLE:
        raise InvalidArgument(f"a table must have ≤ {_LARGEST_TABLE} cells, got more. Give fewer sizes or epochs.")
    ceiling = 1 / accounting.calibrate_noise_multiplier(
        lambda z: Gaussian(noise_multiplier=z), target_epsilon=epsilon, target_delta=delta, relation=relation
    )
    cells = [
        _cell(
            size,
            epochs,
            records=records,
            epsilon=epsilon,
            delta=delta,
            relation=relation,
            ceiling=ceiling,
        )
        for size, epochs in product(sizes, passes)
    ]
    best = cheapest(cells)
    document: dict[str, object] = {
        "target_epsilon": epsilon,
        "delta": delta,
        "relation": relation.value,
        "unit": unit.value,
        "records": records,
        "dataset_size_is_public": True,
        "signal_ceiling": ceiling,
        "rule": "fewest gradients with a signal q·√steps/σ within 10 % of the table's best (Sander et al. 2023)",
        "table": [{**asdict(cell), "cheapest": cell is best} for cell in cells],
    }
    out.finish(document, *_page(cells, best, sizes, passes, epsilon, delta, relation, unit))


def _page(
    cells: list[Cell],
    best: Cell,
    sizes: list[float],
    passes: list[float],
    epsilon: float,
    delta: float,
    relation: NeighboringRelation,
    unit: PrivacyUnit,
) -> tuple[RenderableType, ...]:
    grid = Table(box=None, padding=(0, 3, 1, 0), header_style="dim", show_edge=False)
    grid.add_column("batch size", justify="right", style="dim")
    for epochs in passes:
        grid.add_column(f"{epochs:g} epochs", justify="right")
    by_place = {(cell.batch_size, cell.epochs): cell for cell in cells}
    for size in sizes:
        row = [Text(f"{size:g}")]
        for epochs in passes:
            cell = by_place[size, epochs]
            chosen = cell is best
            row.append(
                Text.assemble(
                    (f"{'★ ' if chosen else ''}{cell.noise_multiplier:.5g}", "bold cyan" if chosen else "bold"),
                    (f"\n{cell.steps:,} steps\n{100 * cell.share_of_ceiling:.0f} % signal", "dim"),
                )
            )
        grid.add_row(*row)
    rows = [("unit", unit.words), ("neighbours", relation.words), ("public", "the number of records")]
    rule = (
        "signal = q√steps/σ, of the most that ε and δ allow. ★ the fewest gradients (epochs) within 10 % of the "
        "table's best signal\n(total amount of noise: Sander, Stock and Sablayrolles 2023); it doesn't know how many "
        "steps a model needs."
    )
    return (
        heading(f"noise multipliers for ε ≤ {epsilon:g} at δ = {delta:g}"),
        grid,
        facts(rows),
        Text("\n" + rule, style="dim"),
    )
