"""`sordino account`: the ε of a run that is described, or that lies in a run folder. No torch, no data."""

import contextlib
import math
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from sordino import checks
from sordino.cli.console import JsonOption, Output, epsilon_text, exact_text, finite, heading, key_value_table, rounded
from sordino.definitions import Guarantee, NeighboringRelation, PrivacyUnit, format_upper_bound
from sordino.errors import AccountingError, InvalidArgument, MissingDeclaration, UnsupportedEvent
from sordino.events import (
    Event,
    Gaussian,
    NonPrivate,
    NoOp,
    PoissonSampled,
    SelfComposed,
    describe_sampling,
    from_json,
    to_dict,
)

__all__ = ["FALSE_POSITIVE_RATES", "account", "quick_epsilons", "subsampled_gaussian", "summarize_event"]


# ----------------------------------------------------------------------------------------------------------------------
# What `account` and `plan` say of an event: ε by whom, what it means, what it would be without sampling.
# ----------------------------------------------------------------------------------------------------------------------


FALSE_POSITIVE_RATES = (1e-2, 1e-3)
"""Where a membership attack's true positive rate is bounded."""

_QUICK = ("closed_form", "contour", "rdp")
"""Accountants that answer in a fraction of a second."""


def summarize_event(
    event: Event,
    *,
    delta: float,
    neighboring_relation: NeighboringRelation,
    unit: PrivacyUnit,
    everyone: bool = False,
    most: float = math.inf,
) -> dict[str, object]:
    """ε by the quick accountants, or by everyone, with all that is needed to read it, as JSON types.

    `most` is a target that ε is known to keep: rounding does not take it above.
    """
    from sordino import accounting

    checks.probability(zero=False, one=False, delta=delta)
    best = accounting.epsilon(event, delta, neighboring_relation=neighboring_relation)
    ask = accounting.epsilon_by_accountant if everyone else quick_epsilons
    by_accountant = ask(event, delta, neighboring_relation=neighboring_relation)
    guarantee = Guarantee(
        epsilon=best.upper,
        delta=delta,
        accountant=best.accountant,
        sampler=describe_sampling(event),
        neighboring_relation=neighboring_relation,
        privacy_unit=unit,
    )
    return {
        "epsilon": rounded(best.upper, most=most),
        "accountants": {name: rounded(value) for name, value in by_accountant.items()},
        "accountant": best.accountant,
        "interval": {"lower": finite(best.lower), "upper": finite(best.upper)},
        "delta": delta,
        "epsilon_without_amplification": _without_amplification(event, delta, neighboring_relation),
        "attack": _attack(event, neighboring_relation),
        "neighboring_relation": neighboring_relation.value,
        "privacy_unit": unit.value,
        "sampler": guarantee.sampler,
        "description": guarantee.describe(),
        "event": to_dict(event),
    }


def _without_amplification(event: Event, delta: float, neighboring_relation: NeighboringRelation) -> float | str | None:
    """ε if every record took part in every step: what is left when the sampling can't be trusted or is known."""
    from sordino import accounting

    try:
        return rounded(
            accounting.epsilon(
                accounting.without_amplification(event), delta, neighboring_relation=neighboring_relation
            ).upper
        )
    except (AccountingError, UnsupportedEvent):
        return None


def _attack(event: Event, neighboring_relation: NeighboringRelation) -> dict[str, object] | None:
    """What any membership attack on one record can at most reach; None when no curve is known for the event."""
    from sordino import accounting

    try:
        found = {
            f"{rate:g}": accounting.true_positive_rate(event, rate, neighboring_relation=neighboring_relation)
            for rate in FALSE_POSITIVE_RATES
        }
        advantage = accounting.membership_advantage(event, neighboring_relation=neighboring_relation).upper
    except (AccountingError, UnsupportedEvent):
        return None
    return {
        "advantage": rounded(advantage),
        "true_positive_rate": {rate: min(1.0, float(rounded(value, 6))) for rate, value in found.items()},
    }


def quick_epsilons(event: Event, delta: float, *, neighboring_relation: NeighboringRelation) -> dict[str, float]:
    """ε by each quick accountant that has a sound answer."""
    from sordino import accounting

    answers: dict[str, float] = {}
    for name in _QUICK:
        with contextlib.suppress(UnsupportedEvent, AccountingError):
            answers[name] = accounting.epsilon(
                event, delta, neighboring_relation=neighboring_relation, accountant=name
            ).upper
    return answers


def subsampled_gaussian(*, sample_rate: float, noise_multiplier: float, steps: int) -> Event:
    """The event of DP-SGD with Poisson sampling."""
    checks.probability(zero=False, sample_rate=sample_rate)
    checks.non_negative(noise_multiplier=noise_multiplier)
    if not checks.integer(0, steps=steps):
        return NoOp()
    if noise_multiplier == 0:
        return NonPrivate(reason="noise_multiplier is 0")
    step: Event = Gaussian(noise_multiplier=noise_multiplier)
    if sample_rate < 1:
        step = PoissonSampled(sample_rate=sample_rate, event=step)
    return SelfComposed(event=step, count=steps)


# ----------------------------------------------------------------------------------------------------------------------
# `sordino account`: the ε of a run that is described, or that lies in a run folder. No torch, no data.
# ----------------------------------------------------------------------------------------------------------------------


def account(
    run: Annotated[Path | None, typer.Argument(metavar="[RUN]", help="A run folder: account what it did.")] = None,
    sample_rate: Annotated[
        float | None, typer.Option(help="Probability, above 0 up to 1, that a record joins a batch.")
    ] = None,
    noise_multiplier: Annotated[
        float | None, typer.Option(help="Noise standard deviation over the sensitivity under --neighboring-relation.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Number of steps.")] = None,
    event: Annotated[str | None, typer.Option(help="An event as JSON, or a file that holds one.")] = None,
    delta: Annotated[float | None, typer.Option(help="δ, in (0, 1). A run folder brings its own.")] = None,
    neighboring_relation: Annotated[
        NeighboringRelation | None, typer.Option(help="Which datasets count as neighbors.")
    ] = None,
    unit: Annotated[PrivacyUnit | None, typer.Option("--privacy-unit", help="Whose contribution is protected.")] = None,
    everyone: Annotated[bool, typer.Option("--all", help="Ask the slow accountants too.")] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png|svg", help="Draw ε over steps and the trade-off curve.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compute the ε of a described run, of an event, or of a run folder.

    For example: [cyan]sordino account --sample-rate 0.01 --noise-multiplier 4 --steps 10000 --delta 1e-5[/cyan]
    """
    out = Output(as_json=as_json)
    described = {"--sample-rate": sample_rate, "--noise-multiplier": noise_multiplier, "--steps": steps}
    given = [name for name, value in described.items() if value is not None]
    if sum((run is not None, event is not None, bool(given))) != 1:
        raise InvalidArgument(
            "account must be given exactly one of a run folder, --event, or --sample-rate with --noise-multiplier "
            "and --steps. See `sordino account --help`."
        )
    if run is not None:
        spent, delta, neighboring_relation, unit = _read(run, delta, neighboring_relation, unit)
    elif event is not None:
        spent = from_json(event if event.lstrip().startswith("{") else _text(Path(event)))
    else:
        if sample_rate is None or noise_multiplier is None or steps is None:
            missing = ", ".join(name for name in described if name not in given)
            raise MissingDeclaration(f"{missing} must be given with {', '.join(given)}, got none. Give all three.")
        spent = subsampled_gaussian(sample_rate=sample_rate, noise_multiplier=noise_multiplier, steps=steps)
    if delta is None:
        raise MissingDeclaration("--delta must be given, got none. Choose one well below 1 / number of records.")
    neighboring_relation, unit = (
        neighboring_relation or NeighboringRelation.ADD_OR_REMOVE_ONE,
        unit or PrivacyUnit.RECORD,
    )
    drawing = None if plot is None else _figures().checked_path(plot)
    with out.progress("computing ε" if drawing is None else "computing ε, and drawing"):
        document = summarize_event(
            spent, delta=delta, neighboring_relation=neighboring_relation, unit=unit, everyone=everyone
        )
        if drawing is not None:
            _figures().plot_account(
                spent, delta=delta, neighboring_relation=neighboring_relation, document=document, path=drawing
            )
            document["plot"] = str(drawing)
    out.print_result(document, *_page(document))


def _figures() -> ModuleType:
    """Loaded on demand: most answers need no picture."""
    from sordino.cli import plots

    return plots


def _read(
    path: Path, delta: float | None, neighboring_relation: NeighboringRelation | None, unit: PrivacyUnit | None
) -> tuple[Event, float | None, NeighboringRelation, PrivacyUnit]:
    """What a run folder did; relation and unit are the run's own and can't be chosen afterwards."""
    from sordino.runs import RunFolder

    folder = RunFolder.open(path)
    plan = folder.plan
    fixed = NeighboringRelation(str(plan["neighboring_relation"])), PrivacyUnit(str(plan["privacy_unit"]))
    for name, chosen, own in (
        ("--neighboring-relation", neighboring_relation, fixed[0]),
        ("--privacy-unit", unit, fixed[1]),
    ):
        if chosen not in (None, own):
            raise InvalidArgument(f"{name} must be {own.value}, as the run was planned, got {chosen}. Drop it.")
    own_delta = plan.get("delta")
    if delta is None and isinstance(own_delta, float):
        delta = own_delta
    return folder.event(), delta, *fixed


def _text(path: Path) -> str:
    if not path.is_file():
        raise InvalidArgument(f"--event must be JSON or a file, got {str(path)!r}. Check the path.")
    return path.read_text()


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
