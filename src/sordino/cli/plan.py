"""`sordino plan`: the least noise for a target ε, or whatever else is left open, or a table. No torch, no data."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Annotated

import typer
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from sordino import checks
from sordino.cli.account import subsampled_gaussian, summarize_event
from sordino.cli.console import JsonOption, Output, epsilon_text, exact_text, heading, key_value_table, round_up
from sordino.definitions import NeighboringRelation, PrivacyUnit
from sordino.errors import AccountingError, InvalidArgument, MissingDeclaration
from sordino.events import Gaussian

__all__ = ["PlanCell", "batch_ladder", "cheapest_cell", "listed", "plan", "show_recommendation", "show_table"]


# ----------------------------------------------------------------------------------------------------------------------
# `sordino plan --recommend`: all settings of DP-SGD by published rules. No torch, no data.
# ----------------------------------------------------------------------------------------------------------------------


_SOURCES = {
    "batch_size": "the smallest batch whose signal q√T/σ, the inverse of the total amount of noise, is within 10 % of "
    "the best (Sander, Stock, Sablayrolles 2023)",
    "steps": "epochs · n/B, at most (nμ)²/d (after Bassily, Feldman, Talwar, Thakurta 2019)",
    "noise_multiplier": "the least that the accountant allows",
    "max_grad_norm": "1: with normalized gradients it is one knob with the learning rate (De et al. 2022; Bu et al. "
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
    neighboring_relation: NeighboringRelation,
    unit: PrivacyUnit,
    *,
    others: Sequence[object],
) -> None:
    """Print what the rules say, with their sources, or the document."""
    if delta is None or records is None or parameters is None:
        raise MissingDeclaration(
            "a recommendation must be given --delta, --dataset-size and --parameters. Give the rest."
        )
    if any(other is not None for other in others) or (passes is not None and len(passes) > 1):
        raise InvalidArgument("a recommendation must be given no settings but one --epochs, got more. Drop them.")
    checks.probability(zero=False, one=False, delta=delta)
    from sordino.tuning.recommended_settings import recommend_settings

    with out.progress("calibrating"), _own_names():
        found = recommend_settings(
            dataset_size=records,
            num_parameters=parameters,
            target_epsilon=epsilon,
            delta=delta,
            epochs=passes[0] if passes else 40.0,
            distance=distance,
            neighboring_relation=neighboring_relation,
        )
    event = subsampled_gaussian(
        sample_rate=found.sample_rate, noise_multiplier=found.noise_multiplier, steps=found.steps
    )
    document = {
        **asdict(found),
        "target_epsilon": epsilon,
        "dataset_size_is_public": True,
        "sources": _SOURCES,
        **summarize_event(event, delta=delta, neighboring_relation=neighboring_relation, unit=unit, most=epsilon),
    }
    trial, noise = found.small_batch
    rows = [
        ("batch size", f"{found.batch_size:,} of {records:,} records (public), sample rate {found.sample_rate:.6g}"),
        ("steps", f"{found.steps:,}, {found.epochs:.4g} epochs"),
        ("noise multiplier", round_up(found.noise_multiplier)),
        ("clipping norm", f"{found.max_grad_norm:g}"),
        ("learning rate", f"{found.learning_rate:.3g}"),
        ("signal", f"{100 * min(1.0, found.signal / found.signal_ceiling):.0f} % of what ε and δ allow"),
        ("one step", f"a gradient stands {found.gradient_to_noise:.3g} to 1 against its noise, at most"),
        ("to try settings", f"batch {trial} with noise multiplier {round_up(noise, 3)}, same steps, on PUBLIC records"),
        ("unit", unit.describe()),
        ("neighbors", neighboring_relation.describe()),
    ]
    sources = "\n".join(f"{name.replace('_', ' ')}: {text}." for name, text in _SOURCES.items())
    out.print_result(
        document,
        heading(
            f"Settings for ε ≤ {exact_text(epsilon)} at δ = {exact_text(delta)}",
            "by published rules; no record was read",
        ),
        key_value_table(rows),
        Text("\n" + sources, style="dim"),
    )


# ----------------------------------------------------------------------------------------------------------------------
# The table of `sordino plan`: noise for batch sizes × epochs, and which cell is the cheapest for its noise.
#
# The rule. In `steps` updates at sample rate q a record is present q·steps times, against noise σ√steps: the signal of
# a run is q√steps/σ, the inverse of its total amount of noise (Sander, Stock and Sablayrolles 2023, "TAN without a
# burn: scaling laws of DP-SGD", where η = q√(S/2)/σ). For a given (ε, δ) it is at most the μ of the Gaussian that the
# guarantee allows, which is reached when every step uses every record. Compute is the number of per-example gradients,
# epochs × records. The cheapest cell is the one with the fewest gradients whose signal is within a tenth of the table's
# best; among equals, the one with the most signal. How many steps a model needs is not in the rule.
# ----------------------------------------------------------------------------------------------------------------------


_WITHIN = 0.9
_LARGEST_TABLE = 64


@dataclass(frozen=True, kw_only=True)
class PlanCell:
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
    neighboring_relation: NeighboringRelation,
    ceiling: float,
) -> PlanCell:
    from sordino import accounting

    if size > records:
        raise InvalidArgument(f"batch_size must be ≤ records ({records}), got {size:g}. Draw fewer records a step.")
    rate = size / records
    steps = max(1, math.ceil(epochs / rate - 1e-9))
    noise = accounting.calibrate_noise_multiplier(
        lambda z: subsampled_gaussian(sample_rate=rate, noise_multiplier=z, steps=steps),
        target_epsilon=epsilon,
        delta=delta,
        neighboring_relation=neighboring_relation,
    )
    signal = rate * math.sqrt(steps) / noise
    return PlanCell(
        batch_size=size,
        epochs=epochs,
        sample_rate=rate,
        steps=steps,
        noise_multiplier=noise,
        signal=signal,
        share_of_ceiling=min(1.0, signal / ceiling),
        gradients=round(rate * steps * records),
    )


def cheapest_cell(cells: list[PlanCell]) -> PlanCell:
    """The fewest gradients among cells within a tenth of the best signal; the most signal among equals.

    Example:
        >>> low = PlanCell(batch_size=1, epochs=1, sample_rate=0.1, steps=10, noise_multiplier=1.0, signal=0.316,
        ...            share_of_ceiling=0.9, gradients=10)
        >>> cheapest_cell([low]) is low
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
    neighboring_relation: NeighboringRelation,
    unit: PrivacyUnit,
) -> None:
    """Calibrate every cell and print the table, or its document."""
    from sordino import accounting

    checks.integer(1, records=records)
    checks.probability(zero=False, one=False, delta=delta)
    if len(sizes) * len(passes) > _LARGEST_TABLE:
        raise InvalidArgument(f"a table must have ≤ {_LARGEST_TABLE} cells, got more. Give fewer sizes or epochs.")
    with _own_names():
        ceiling = 1 / accounting.calibrate_noise_multiplier(
            lambda z: Gaussian(noise_multiplier=z),
            target_epsilon=epsilon,
            delta=delta,
            neighboring_relation=neighboring_relation,
        )
    cells = []
    with out.progress("calibrating", total=len(sizes) * len(passes)) as advance, _own_names():
        for size, epochs in product(sizes, passes):
            cells.append(
                _cell(
                    size,
                    epochs,
                    records=records,
                    epsilon=epsilon,
                    delta=delta,
                    neighboring_relation=neighboring_relation,
                    ceiling=ceiling,
                )
            )
            advance()
    best = cheapest_cell(cells)
    document: dict[str, object] = {
        "target_epsilon": epsilon,
        "delta": delta,
        "neighboring_relation": neighboring_relation.value,
        "privacy_unit": unit.value,
        "records": records,
        "dataset_size_is_public": True,
        "signal_ceiling": ceiling,
        "rule": "fewest gradients with a signal q·√steps/σ within 10 % of the table's best (Sander et al. 2023)",
        "table": [{**asdict(cell), "cheapest": cell is best} for cell in cells],
    }
    out.print_result(document, *_page(cells, best, sizes, passes, epsilon, delta, neighboring_relation, unit))


def _page(
    cells: list[PlanCell],
    best: PlanCell,
    sizes: list[float],
    passes: list[float],
    epsilon: float,
    delta: float,
    neighboring_relation: NeighboringRelation,
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
        ("neighbors", neighboring_relation.describe()),
        ("public", "the number of records"),
    ]
    rule = (
        "signal = q√steps/σ, of the most that ε and δ allow. ★ the fewest gradients (epochs) within 10 % of the "
        "table's best signal\n(total amount of noise: Sander, Stock and Sablayrolles 2023); it doesn't know how many "
        "steps a model needs."
    )
    return (
        heading(f"noise multipliers for ε ≤ {exact_text(epsilon)} at δ = {exact_text(delta)}"),
        grid,
        key_value_table(rows),
        Text("\n" + rule, style="dim"),
    )


# ----------------------------------------------------------------------------------------------------------------------
# `sordino plan`: the least noise for a target ε, or whatever else is left open, or a table. No torch, no data.
# ----------------------------------------------------------------------------------------------------------------------


def plan(
    epsilon: Annotated[float, typer.Option(help="The target: ε is never above it.")],
    delta: Annotated[
        float | None, typer.Option(help="δ, in (0, 1), well below 1 / number of records. Left out: the least is found.")
    ] = None,
    noise_multiplier: Annotated[
        float | None, typer.Option(help="Noise over sensitivity, when something else is to be found.")
    ] = None,
    sample_rate: Annotated[
        float | None, typer.Option(help="Probability, above 0 up to 1, that a record joins a batch.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Number of steps.")] = None,
    records: Annotated[
        int | None,
        typer.Option("--dataset-size", help="Public number of records; with batch sizes instead of a rate."),
    ] = None,
    batch_size: Annotated[float | None, typer.Option(help="Expected batch size.")] = None,
    epochs: Annotated[
        str | None, typer.Option(metavar="E[,E…]", help="Expected passes over the data; several make a table.")
    ] = None,
    batch_sizes: Annotated[
        str | None, typer.Option(metavar="B,B,…", help="A table of noise: batch sizes × epochs, with --dataset-size.")
    ] = None,
    neighboring_relation: Annotated[
        NeighboringRelation, typer.Option(help="Which datasets count as neighbors.")
    ] = NeighboringRelation.ADD_OR_REMOVE_ONE,
    unit: Annotated[
        PrivacyUnit, typer.Option("--privacy-unit", help="Whose contribution is protected.")
    ] = PrivacyUnit.RECORD,
    recommend: Annotated[
        bool, typer.Option("--recommend", help="All settings by published rules, from --dataset-size and --parameters.")
    ] = False,
    parameters: Annotated[int | None, typer.Option(help="Trainable parameters; with --recommend.")] = None,
    distance: Annotated[
        float, typer.Option("--weight-distance", help="ℓ2 distance from first to final weights; with --recommend.")
    ] = 1.0,
    as_json: JsonOption = False,
) -> None:
    """Find the least noise multiplier for a target ε; with noise given, the most steps, largest rate or least δ.

    For example: [cyan]sordino plan --epsilon 1 --delta 1e-5 --dataset-size 60000 --batch-size 600 --epochs 20[/cyan]

    A table: [cyan]sordino plan --epsilon 3 --delta 1e-5 --dataset-size 60000 --batch-sizes 256,4096 --epochs
    10,40[/cyan]

    All settings: [cyan]sordino plan --recommend --epsilon 1 --delta 1e-5 --dataset-size 60000 --parameters 7850[/cyan]
    """
    out = Output(as_json=as_json)
    target = checks.positive(epsilon=epsilon)
    passes = None if epochs is None else listed(epochs, "epochs")
    if recommend:
        others = (noise_multiplier, sample_rate, steps, batch_size, batch_sizes)
        show_recommendation(
            out, target, delta, records, parameters, passes, distance, neighboring_relation, unit, others=others
        )
        return
    sizes = None if batch_sizes is None else listed(batch_sizes, "batch-sizes")
    if sizes is None and passes is not None and len(passes) > 1:
        sizes = [batch_size] if batch_size is not None else (batch_ladder(records) if records is not None else None)
        batch_size = None
    if sizes is not None or (passes is not None and len(passes) > 1):
        if delta is None or records is None or sizes is None or passes is None:
            raise MissingDeclaration(
                "a table must be given --delta, --dataset-size, --epochs and --batch-sizes (or none). Give the rest."
            )
        if (noise_multiplier, sample_rate, steps, batch_size) != (None,) * 4:
            raise InvalidArgument("a table must be given batch sizes and epochs only, got other settings. Drop them.")
        show_table(
            out,
            sizes,
            passes,
            records=records,
            epsilon=target,
            delta=delta,
            neighboring_relation=neighboring_relation,
            unit=unit,
        )
        return
    question = _Question(
        epsilon=target,
        delta=None if delta is None else checks.probability(zero=False, one=False, delta=delta),
        noise_multiplier=None if noise_multiplier is None else checks.positive(noise_multiplier=noise_multiplier),
        sample_rate=_sample_rate(sample_rate, records, batch_size, needed=noise_multiplier is None),
        steps=None if steps is None else checks.integer(1, steps=steps),
        epochs=passes[0] if passes else None,
        neighboring_relation=neighboring_relation,
    )
    with out.progress("calibrating"), _own_names():
        found, answer = question.solved(records)
        document = _priced(found, answer, records=records, unit=unit)
    _show(out, document, found, answer, records=records, unit=unit)


@contextmanager
def _own_names() -> Iterator[None]:
    """A target that can't be reached is an ``--epsilon`` that can't be kept: a usage error by the option's name."""
    try:
        yield
    except AccountingError as error:
        message = str(error.args[0]) if error.args else ""
        if not message.startswith("target_epsilon "):
            raise
        raise InvalidArgument(message.removeprefix("target_")) from error


@dataclass(frozen=True, kw_only=True)
class _Question:
    """A run with one setting left open; the target ε is always given."""

    epsilon: float
    delta: float | None
    noise_multiplier: float | None
    sample_rate: float | None
    steps: int | None
    epochs: float | None
    neighboring_relation: NeighboringRelation

    def solved(self, records: int | None) -> tuple[str, "_Question"]:
        """The name of the open setting and the question with it filled in, on the safe side."""
        from sordino import accounting

        asked = self._with_steps()
        missing = [
            name for name in ("noise_multiplier", "steps", "sample_rate", "delta") if getattr(asked, name) is None
        ]
        settings = (
            "--noise-multiplier, --steps (or --epochs), --sample-rate (or --dataset-size with --batch-size) and --delta"
        )
        if not missing:
            raise InvalidArgument(f"plan must be left one of {settings} to find, got all. Drop one.")
        if len(missing) > 1:
            raise MissingDeclaration(f"plan must be given all but one of {settings}. Give the rest.")
        goal = {"target_epsilon": self.epsilon, "neighboring_relation": self.neighboring_relation}
        (name,) = missing
        rate, count, noise, delta = asked.sample_rate, asked.steps, asked.noise_multiplier, asked.delta
        if name == "delta" and rate is not None and count is not None and noise is not None:
            event = subsampled_gaussian(sample_rate=rate, noise_multiplier=noise, steps=count)
            return name, replace(asked, delta=_upwards(accounting.calibrate_delta(event, **goal)))
        assert delta is not None
        if name == "noise_multiplier" and rate is not None and count is not None:
            value = accounting.calibrate_noise_multiplier(
                lambda z: subsampled_gaussian(sample_rate=rate, noise_multiplier=z, steps=count),
                delta=delta,
                **goal,
            )
            return name, replace(asked, noise_multiplier=value)
        if name == "steps" and rate is not None and noise is not None:
            most = accounting.calibrate_steps(
                lambda t: subsampled_gaussian(sample_rate=rate, noise_multiplier=noise, steps=t),
                delta=delta,
                **goal,
            )
            if most == 0:
                raise InvalidArgument("epsilon must allow one step, got a target too small. Raise it, or add noise.")
            return name, replace(asked, steps=most)
        assert noise is not None
        return name, replace(asked, **_max_rate(asked, noise, delta, records))

    def _with_steps(self) -> "_Question":
        """Epochs become steps as soon as the rate is known."""
        if self.steps is not None and self.epochs is not None:
            raise MissingDeclaration("plan must be given --steps or --epochs, one of them. Give one.")
        if self.epochs is None or self.sample_rate is None:
            if self.steps is None and self.epochs is None and self.noise_multiplier is None:
                raise MissingDeclaration("plan must be given --steps or --epochs, one of them. Give one.")
            return self
        return replace(self, steps=max(1, math.ceil(self.epochs / self.sample_rate - 1e-9)))


def _max_rate(asked: _Question, noise: float, delta: float, records: int | None) -> dict[str, float]:
    """The largest sample rate for the steps given, as a whole batch when the number of records is known."""
    from sordino import accounting

    if asked.steps is None:
        raise MissingDeclaration("a sample rate can be found for --steps, not for --epochs. Give --steps.")
    goal = {"target_epsilon": asked.epsilon, "neighboring_relation": asked.neighboring_relation}
    count = asked.steps
    if records is None:
        rate = accounting.calibrate_sample_rate(
            lambda q: subsampled_gaussian(sample_rate=q, noise_multiplier=noise, steps=count),
            delta=delta,
            **goal,
        )
        return {"sample_rate": rate}
    size = accounting.calibrate_batch_size(
        lambda b: subsampled_gaussian(sample_rate=b / records, noise_multiplier=noise, steps=count),
        dataset_size=records,
        delta=delta,
        **goal,
    )
    if size == 0:
        raise InvalidArgument(
            "epsilon must allow a batch of one record, got a target too small. Raise it, or add noise."
        )
    return {"sample_rate": size / records}


def _round_down(rate: float) -> str:
    """A rate with six digits, never above itself."""
    text = f"{rate:.6g}"
    return text if float(text) <= rate else exact_text(rate)


def _upwards(delta: float) -> float:
    """δ with four digits, rounded up."""
    unit = 10.0 ** (math.floor(math.log10(max(delta, 1e-300))) - 3)
    return min(1.0, float(f"{math.ceil(delta / unit) * unit:.4g}")) if delta > 0 else 1e-300


def _priced(found: str, answer: _Question, *, records: int | None, unit: PrivacyUnit) -> dict[str, object]:
    """The answer with its ε, as JSON types."""
    noise, rate, steps, delta = answer.noise_multiplier, answer.sample_rate, answer.steps, answer.delta
    assert noise is not None
    assert rate is not None
    assert steps is not None
    assert delta is not None
    event = subsampled_gaussian(sample_rate=rate, noise_multiplier=noise, steps=steps)
    document = {
        "found": found,
        "noise_multiplier": noise,
        "target_epsilon": answer.epsilon,
        "sample_rate": rate,
        "steps": steps,
        "dataset_size_is_public": records is not None,
        **summarize_event(
            event,
            delta=delta,
            neighboring_relation=answer.neighboring_relation,
            unit=unit,
            most=answer.epsilon,
        ),
    }
    if records is not None:
        document["batch_size"] = rate * records
    return document


def _show(
    out: Output, document: dict[str, object], found: str, answer: _Question, *, records: int | None, unit: PrivacyUnit
) -> None:
    noise, rate, steps, delta = answer.noise_multiplier, answer.sample_rate, answer.steps, answer.delta
    assert noise is not None
    assert rate is not None
    assert steps is not None
    assert delta is not None
    rows = [
        ("noise multiplier", round_up(noise)),
        ("sample rate", _round_down(rate)),
        ("steps", f"{steps:,}"),
        ("epochs", f"{steps * rate:.6g}"),
        ("unit", unit.describe()),
        ("neighbors", answer.neighboring_relation.describe()),
        ("sampler", str(document["sampler"])),
        ("accountant", str(document["accountant"]).replace("_", " ")),
    ]
    if records is not None:
        rows.insert(2, ("batch size", f"{rate * records:.6g} of {records:,} records (public)"))
    words = {
        "noise_multiplier": f"noise multiplier {round_up(noise)}",
        "steps": f"at most {steps:,} steps",
        "sample_rate": f"sample rate at most {_round_down(rate)}",
        "delta": f"δ = {exact_text(delta)} at least",
    }
    cost = document["epsilon"]
    assert isinstance(cost, float | str)
    note = f"keeps the run at ε = {epsilon_text(cost)} ≤ {exact_text(answer.epsilon)} for δ = {exact_text(delta)}"
    out.print_result(document, heading(words[found], note), key_value_table(rows))


def _sample_rate(
    sample_rate: float | None, records: int | None, batch_size: float | None, *, needed: bool
) -> float | None:
    missing = sample_rate is None and (records is None or batch_size is None)
    if missing and not needed and batch_size is None:
        return None
    if missing or (sample_rate is not None and (records is not None or batch_size is not None)):
        raise MissingDeclaration(
            "plan must be given --sample-rate, or --dataset-size with --batch-size. Give one of them."
        )
    if sample_rate is not None:
        return checks.probability(zero=False, sample_rate=sample_rate)
    number, size = checks.integer(1, records=records), checks.positive(batch_size=batch_size)
    if size > number:
        raise InvalidArgument(f"batch_size must be ≤ records ({number}), got {size:g}. Draw fewer records a step.")
    return size / number
