"""`sordino plan`: the least noise for a target ε, or whatever else is left open, or a table. No torch, no data."""

import math
from dataclasses import dataclass, replace
from typing import Annotated

import typer

from sordino import checks
from sordino.cli.output import JsonOption, Output, facts, heading
from sordino.cli.plan_recommend import show_recommendation
from sordino.cli.plan_table import batch_ladder, listed, show_table
from sordino.cli.statement import statement, subsampled_gaussian
from sordino.definitions import NeighboringRelation, PrivacyUnit
from sordino.errors import InvalidArgument, MissingDeclaration

__all__ = ["plan"]


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
        typer.Option("--records", "--population", help="Public number of records; with batch sizes instead of a rate."),
    ] = None,
    batch_size: Annotated[float | None, typer.Option(help="Expected batch size.")] = None,
    epochs: Annotated[
        str | None, typer.Option(metavar="E[,E…]", help="Expected passes over the data; several make a table.")
    ] = None,
    batch_sizes: Annotated[
        str | None, typer.Option(metavar="B,B,…", help="A table of noise: batch sizes × epochs, with --records.")
    ] = None,
    relation: Annotated[
        NeighboringRelation, typer.Option(help="Which data sets count as neighbours.")
    ] = NeighboringRelation.ADD_OR_REMOVE_ONE,
    unit: Annotated[PrivacyUnit, typer.Option(help="Whose contribution is protected.")] = PrivacyUnit.EXAMPLE,
    recommend: Annotated[
        bool, typer.Option("--recommend", help="All settings by published rules, from --records and --parameters.")
    ] = False,
    parameters: Annotated[int | None, typer.Option(help="Trainable parameters; with --recommend.")] = None,
    distance: Annotated[float, typer.Option(help="From the start to the goal, in weights; with --recommend.")] = 1.0,
    as_json: JsonOption = False,
) -> None:
    """Find the least noise multiplier for a target ε; with noise given, the most steps, largest rate or least δ.

    For example: [cyan]sordino plan --epsilon 1 --delta 1e-5 --records 60000 --batch-size 600 --epochs 20[/cyan]

    A table: [cyan]sordino plan --epsilon 3 --delta 1e-5 --records 60000 --batch-sizes 256,4096 --epochs 10,40[/cyan]

    All settings: [cyan]sordino plan --recommend --epsilon 1 --delta 1e-5 --records 60000 --parameters 7850[/cyan]
    """
    out = Output(as_json=as_json)
    target = checks.positive(epsilon=epsilon)
    passes = None if epochs is None else listed(epochs, "epochs")
    if recommend:
        others = (noise_multiplier, sample_rate, steps, batch_size, batch_sizes)
        show_recommendation(out, target, delta, records, parameters, passes, distance, relation, unit, others=others)
        return
    sizes = None if batch_sizes is None else listed(batch_sizes, "batch-sizes")
    if sizes is None and passes is not None and len(passes) > 1:
        sizes = [batch_size] if batch_size is not None else (batch_ladder(records) if records is not None else None)
        batch_size = None
    if sizes is not None or (passes is not None and len(passes) > 1):
        if delta is None or records is None or sizes is None or passes is None:
            raise MissingDeclaration(
                "a table must be given --delta, --records, --epochs and --batch-sizes (or none). Give the rest."
            )
        if (noise_multiplier, sample_rate, steps, batch_size) != (None,) * 4:
            raise InvalidArgument("a table must be given batch sizes and epochs only, got other settings. Drop them.")
        show_table(out, sizes, passes, records=records, epsilon=target, delta=delta, relation=relation, unit=unit)
        return
    question = _Question(
        epsilon=target,
        delta=None if delta is None else checks.probability(zero=False, one=False, delta=delta),
        noise_multiplier=None if noise_multiplier is None else checks.positive(noise_multiplier=noise_multiplier),
        sample_rate=_sample_rate(sample_rate, records, batch_size, needed=noise_multiplier is None),
        steps=None if steps is None else checks.integer(1, steps=steps),
        epochs=passes[0] if passes else None,
        relation=relation,
    )
    found, answer = question.solved(records)
    _show(out, found, answer, records=records, unit=unit)


@dataclass(frozen=True, kw_only=True)
class _Question:
    """A run with one setting left open; the target ε is always given."""

    epsilon: float
    delta: float | None
    noise_multiplier: float | None
    sample_rate: float | None
    steps: int | None
    epochs: float | None
    relation: NeighboringRelation

    def solved(self, records: int | None) -> tuple[str, "_Question"]:
        """The name of the open setting and the question with it filled in, on the safe side."""
        from sordino import accounting

        asked = self._with_steps()
        missing = [
            name for name in ("noise_multiplier", "steps", "sample_rate", "delta") if getattr(asked, name) is None
        ]
        settings = (
            "--noise-multiplier, --steps (or --epochs), --sample-rate (or --records with --batch-size) and --delta"
        )
        if not missing:
            raise InvalidArgument(f"plan must be left one of {settings} to find, got all. Drop one.")
        if len(missing) > 1:
            raise MissingDeclaration(f"plan must be given all but one of {settings}. Give the rest.")
        goal = {"target_epsilon": self.epsilon, "relation": self.relation}
        (name,) = missing
        rate, count, noise, delta = asked.sample_rate, asked.steps, asked.noise_multiplier, asked.delta
        if name == "delta" and rate is not None and count is not None and noise is not None:
            event = subsampled_gaussian(sample_rate=rate, noise_multiplier=noise, steps=count)
            return name, replace(asked, delta=_upwards(accounting.calibrate_delta(event, **goal)))
        assert delta is not None
        if name == "noise_multiplier" and rate is not None and count is not None:
            value = accounting.calibrate_noise_multiplier(
                lambda z: subsampled_gaussian(sample_rate=rate, noise_multiplier=z, steps=count),
                target_delta=delta,
                **goal,
            )
            return name, replace(asked, noise_multiplier=value)
        if name == "steps" and rate is not None and noise is not None:
            most = accounting.calibrate_steps(
                lambda t: subsampled_gaussian(sample_rate=rate, noise_multiplier=noise, steps=t),
                target_delta=delta,
                **goal,
            )
            return name, replace(asked, steps=most)
        assert noise is not None
        return name, replace(asked, **_largest_rate(asked, noise, delta, records))

    def _with_steps(self) -> "_Question":
        """Epochs become steps as soon as the rate is known."""
        if self.steps is not None and self.epochs is not None:
            raise MissingDeclaration("plan must be given --steps or --epochs, one of them. Give one.")
        if self.epochs is None or self.sample_rate is None:
            if self.steps is None and self.epochs is None and self.noise_multiplier is None:
                raise MissingDeclaration("plan must be given --steps or --epochs, one of them. Give one.")
            return self
        return replace(self, steps=max(1, math.ceil(self.epochs / self.sample_rate - 1e-9)))


def _largest_rate(asked: _Question, noise: float, delta: float, records: int | None) -> dict[str, float]:
    """The largest sample rate for the steps given, as a whole batch when the number of records is known."""
    from sordino import accounting

    if asked.steps is None:
        raise MissingDeclaration("a sample rate can be found for --steps, not for --epochs. Give --steps.")
    goal = {"target_epsilon": asked.epsilon, "relation": asked.relation}
    count = asked.steps
    if records is None:
        rate = accounting.calibrate_sample_rate(
            lambda q: subsampled_gaussian(sample_rate=q, noise_multiplier=noise, steps=count),
            target_delta=delta,
            **goal,
        )
        return {"sample_rate": rate}
    size = accounting.calibrate_batch_size(
        lambda b: subsampled_gaussian(sample_rate=b / records, noise_multiplier=noise, steps=count),
        population=records,
        target_delta=delta,
        **goal,
    )
    if size == 0:
        raise InvalidArgument(
            "epsilon must allow a batch of one record, got a target too small. Raise it, or add noise."
        )
    return {"sample_rate": size / records}


def _upwards(delta: float) -> float:
    """δ with four digits, rounded up."""
    unit = 10.0 ** (math.floor(math.log10(max(delta, 1e-300))) - 3)
    return min(1.0, float(f"{math.ceil(delta / unit) * unit:.4g}")) if delta > 0 else 1e-300


def _show(out: Output, found: str, answer: _Question, *, records: int | None, unit: PrivacyUnit) -> None:
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
        **statement(event, delta=delta, relation=answer.relation, unit=unit),
    }
    rows = [
        ("noise multiplier", f"{noise:.6g}"),
        ("sample rate", f"{rate:.6g}"),
        ("steps", f"{steps:,}"),
        ("epochs", f"{steps * rate:.6g}"),
        ("unit", unit.words),
        ("neighbours", answer.relation.words),
        ("sampler", str(document["sampler"])),
        ("accountant", str(document["accountant"]).replace("_", " ")),
    ]
    if records is not None:
        document["batch_size"] = rate * records
        rows.insert(2, ("batch size", f"{rate * records:.6g} of {records:,} records (public)"))
    words = {
        "noise_multiplier": f"noise multiplier {noise:.5f}",
        "steps": f"at most {steps:,} steps",
        "sample_rate": f"sample rate at most {rate:.6g}",
        "delta": f"δ = {delta:.4g} at least",
    }
    note = f"keeps the run at ε = {document['epsilon']:.5f} ≤ {answer.epsilon:g} for δ = {delta:g}"
    out.finish(document, heading(words[found], note), facts(rows))


def _sample_rate(
    sample_rate: float | None, records: int | None, batch_size: float | None, *, needed: bool
) -> float | None:
    missing = sample_rate is None and (records is None or batch_size is None)
    if missing and not needed and batch_size is None:
        return None
    if missing or (sample_rate is not None and (records is not None or batch_size is not None)):
        raise MissingDeclaration("plan must be given --sample-rate, or --records with --batch-size. Give one of them.")
    if sample_rate is not None:
        return checks.probability(zero=False, sample_rate=sample_rate)
    number, size = checks.integer(1, records=records), checks.positive(batch_size=batch_size)
    if size > number:
        raise InvalidArgument(f"batch_size must be ≤ records ({number}), got {size:g}. Draw fewer records a step.")
    return size / number
