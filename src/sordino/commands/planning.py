"""`account` and `plan`: the ε of a run, and the least noise for a target, without data. No torch."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sordino import checks
from sordino.commands.running import SILENT, Progress, rounded
from sordino.definitions import Guarantee, NeighboringRelation, PrivacyUnit
from sordino.errors import AccountingError, InvalidArgument, MissingDeclaration, UnsupportedEvent
from sordino.events import (
    Event,
    Gaussian,
    NonPrivate,
    NoOp,
    SelfComposed,
    describe_sampling,
    from_json,
    to_dict,
)
from sordino.runs.transcript import encode_number

if TYPE_CHECKING:
    from sordino.tuning.recommended_settings import RecommendedSettings

_Found = TypeVar("_Found")

FALSE_POSITIVE_RATES = (1e-2, 1e-3)
"""Where a membership attack's true positive rate is bounded."""

_QUICK = ("closed_form", "contour", "rdp")
"""Accountants that answer in a fraction of a second."""


def _summarize(
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
    relation = {"neighboring_relation": neighboring_relation}
    best = accounting.epsilon(event, delta, **relation)
    if everyone:
        by_accountant = accounting.epsilon_by_accountant(event, delta, **relation)
    else:
        asked = {
            name: _answer(lambda name=name: accounting.epsilon(event, delta, accountant=name, **relation))
            for name in _QUICK
        }
        by_accountant = {name: found.upper for name, found in asked.items() if found is not None}
    bare = _answer(lambda: accounting.epsilon(accounting.without_amplification(event), delta, **relation))
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
        "interval": {"lower": encode_number(best.lower), "upper": encode_number(best.upper)},
        "delta": delta,
        # If every record took part in every step: what is left when the sampling can't be trusted or is known.
        "epsilon_without_amplification": None if bare is None else rounded(bare.upper),
        "attack": _answer(lambda: _attack(event, neighboring_relation)),
        "neighboring_relation": neighboring_relation.value,
        "privacy_unit": unit.value,
        "sampler": guarantee.sampler,
        "description": guarantee.describe(),
        "event": to_dict(event),
    }


def _answer(ask: Callable[[], _Found]) -> _Found | None:
    """What an accountant answers; None where it has no sound answer."""
    try:
        return ask()
    except (AccountingError, UnsupportedEvent):
        return None


def _attack(event: Event, neighboring_relation: NeighboringRelation) -> dict[str, object]:
    """What any membership attack on one record can at most reach."""
    from sordino import accounting

    relation = {"neighboring_relation": neighboring_relation}
    found = {f"{rate:g}": accounting.true_positive_rate(event, rate, **relation) for rate in FALSE_POSITIVE_RATES}
    return {
        "advantage": rounded(accounting.membership_advantage(event, **relation).upper),
        "true_positive_rate": {rate: min(1.0, float(rounded(value, 6))) for rate, value in found.items()},
    }


def check_sampling(sampling: str, neighboring_relation: NeighboringRelation) -> None:
    """Refuse samplers whose events are not those of the neighbors asked for, as `sordino.training.Plan` does.

    Raises:
        InvalidArgument: the sampler is not known, or needs neighbors of one size.
    """
    from sordino.sampling import SAMPLERS

    checks.one_of(SAMPLERS, sampling=sampling)
    adds = neighboring_relation is NeighboringRelation.ADD_OR_REMOVE_ONE
    if adds and sampling not in ("poisson", "balls_in_bins"):
        raise InvalidArgument(
            "sampling must be poisson or balls_in_bins with neighbors that add or remove one record, got "
            f"{sampling!r}: its batches depend on the number of records. Give --neighboring-relation replace_one "
            "(noise for twice the clipping norm) or replace_special."
        )


def subsampled_gaussian(
    *,
    sample_rate: float,
    noise_multiplier: float,
    steps: int,
    sampling: str = "poisson",
    dataset_size: int | None = None,
) -> Event:
    """The event of DP-SGD with batches drawn as `sampling` says."""
    from sordino.sampling import make_sampler

    sampler = make_sampler(sampling, sample_rate=sample_rate, dataset_size=dataset_size)
    checks.non_negative(noise_multiplier=noise_multiplier)
    if not checks.integer(0, steps=steps):
        return NoOp()
    if noise_multiplier == 0:
        return NonPrivate(reason="noise_multiplier is 0")
    step = sampler.event(Gaussian(noise_multiplier=noise_multiplier))
    return SelfComposed(event=step, count=sampler.num_charges(steps))


@dataclass(frozen=True, kw_only=True)
class _Document:
    """What a command found, with all that is needed to read it.

    Args:
        document: as JSON types.
    """

    document: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """As JSON types."""
        return self.document


class AccountedRun(_Document):
    """The ε of an event, and all that is needed to read it."""

    @property
    def epsilon(self) -> float:
        """ε, rounded up."""
        return float(self.document["epsilon"])


def account(
    run: Path | str | None = None,
    *,
    sample_rate: float | None = None,
    noise_multiplier: float | None = None,
    steps: int | None = None,
    event: "str | Event | None" = None,
    delta: float | None = None,
    neighboring_relation: NeighboringRelation | None = None,
    privacy_unit: PrivacyUnit | None = None,
    all: bool = False,
    plot: Path | str | None = None,
    progress: Progress = SILENT,
) -> AccountedRun:
    """Compute the ε of a described run, of an event, or of a run folder.

    Args:
        run: Run folder whose transcript is accounted.
        sample_rate: Probability in (0, 1] that a record is in a batch.
        noise_multiplier: Noise standard deviation over the sensitivity under --neighboring-relation.
        steps: Number of steps.
        event: Privacy event as JSON, or a file with one.
        delta: δ in (0, 1). Default for a run folder: its own.
        neighboring_relation: Neighboring relation of datasets.
        privacy_unit: Privacy unit: whose contribution is protected.
        all: Include the slow accountants.
        plot: Draw ε over steps and the trade-off curve.
        progress: what is said meanwhile.
    """
    described = {"--sample-rate": sample_rate, "--noise-multiplier": noise_multiplier, "--steps": steps}
    given = [name for name, value in described.items() if value is not None]
    if sum((run is not None, event is not None, bool(given))) != 1:
        raise InvalidArgument(
            "account must be given exactly one of a run folder, --event, or --sample-rate with --noise-multiplier "
            "and --steps. See `sordino account --help`."
        )
    if run is not None:
        spent, delta, neighboring_relation, privacy_unit = _read(run, delta, neighboring_relation, privacy_unit)
    elif event is not None:
        spent = read_event(event)
    else:
        if sample_rate is None or noise_multiplier is None or steps is None:
            missing = ", ".join(name for name in described if name not in given)
            raise MissingDeclaration(f"{missing} must be given with {', '.join(given)}, got none. Give all three.")
        spent = subsampled_gaussian(sample_rate=sample_rate, noise_multiplier=noise_multiplier, steps=steps)
    if delta is None:
        raise MissingDeclaration("--delta must be given, got none. Choose one well below 1 / number of records.")
    neighboring_relation, privacy_unit = (
        neighboring_relation or NeighboringRelation.ADD_OR_REMOVE_ONE,
        privacy_unit or PrivacyUnit.RECORD,
    )
    if plot is not None:
        from sordino.commands.pictures import checked_path

        plot = checked_path(Path(plot))
    with progress.stage("computing ε" if plot is None else "computing ε, and drawing"):
        document = _summarize(
            spent, delta=delta, neighboring_relation=neighboring_relation, unit=privacy_unit, everyone=all
        )
        if plot is not None:
            from sordino.commands.pictures import plot_account

            plot_account(spent, delta=delta, neighboring_relation=neighboring_relation, document=document, path=plot)
            document["plot"] = str(plot)
    return AccountedRun(document=document)


def _read(
    path: Path | str, delta: float | None, neighboring_relation: NeighboringRelation | None, unit: PrivacyUnit | None
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


def read_event(event: str | Event) -> Event:
    """An event, also as JSON or in a file."""
    if isinstance(event, Event):
        return event
    if event.lstrip().startswith("{"):
        return from_json(event)
    if not Path(event).is_file():
        raise InvalidArgument(f"--event must be JSON or a file, got {event!r}. Check the path.")
    return from_json(Path(event).read_text(encoding="utf-8"))


# ----------------------------------------------------------------------------------------------------------------------
# `plan`: the least noise for a target ε, or whatever else is left open, or a table, or all settings by rules.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Goal:
    """What a plan is for: the target, and what it is stated for."""

    epsilon: float
    delta: float | None
    neighboring_relation: NeighboringRelation
    privacy_unit: PrivacyUnit
    sampling: str
    records: int | None

    @property
    def target(self) -> dict[str, Any]:
        """What a calibration is given, δ apart."""
        return {"target_epsilon": self.epsilon, "neighboring_relation": self.neighboring_relation}

    def event(self, sample_rate: float, noise_multiplier: float, steps: int) -> Event:
        """The event of a run."""
        return subsampled_gaussian(
            sample_rate=sample_rate,
            noise_multiplier=noise_multiplier,
            steps=steps,
            sampling=self.sampling,
            dataset_size=self.records,
        )

    def least_noise(self, event: Callable[[float], Event]) -> float:
        """The least noise multiplier for the target, of what `event` makes of one."""
        from sordino import accounting

        assert self.delta is not None
        return accounting.calibrate_noise_multiplier(event, delta=self.delta, **self.target)

    def summarize(self, event: Event, *, delta: float) -> dict[str, object]:
        """ε of a run that keeps the target, with all that is needed to read it."""
        return _summarize(
            event,
            delta=delta,
            neighboring_relation=self.neighboring_relation,
            unit=self.privacy_unit,
            most=self.epsilon,
        )


def _steps(epochs: float, sample_rate: float) -> int:
    """Steps of so many expected passes over the data."""
    return max(1, math.ceil(epochs / sample_rate - 1e-9))


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


@dataclass(frozen=True, kw_only=True)
class RecommendedPlan(_Document):
    """All settings by published rules.

    Args:
        settings: what the rules say.
        records: public number of records.
        document: as JSON types, with the sources.
    """

    settings: "RecommendedSettings"
    records: int


def _recommended(goal: _Goal, parameters: int | None, epochs: float, distance: float) -> RecommendedPlan:
    from sordino.tuning.recommended_settings import recommend_settings

    if goal.delta is None or goal.records is None or parameters is None:
        raise MissingDeclaration(
            "a recommendation must be given --delta, --dataset-size and --parameters. Give the rest."
        )
    checks.probability(zero=False, one=False, delta=goal.delta)
    found = recommend_settings(
        dataset_size=goal.records,
        num_parameters=parameters,
        delta=goal.delta,
        epochs=epochs,
        distance=distance,
        **goal.target,
    )
    event = goal.event(found.sample_rate, found.noise_multiplier, found.steps)
    document = {
        **asdict(found),
        "target_epsilon": goal.epsilon,
        "dataset_size_is_public": True,
        "sources": _SOURCES,
        **goal.summarize(event, delta=goal.delta),
    }
    return RecommendedPlan(settings=found, records=goal.records, document=document)


# ----------------------------------------------------------------------------------------------------------------------
# The table of `plan`: noise for batch sizes × epochs, and which cell is the cheapest for its noise.
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


def _listed(numbers: "float | Sequence[float]", name: str) -> list[float]:
    """Positive numbers, each once, ascending."""
    found = {float(number) for number in ([numbers] if isinstance(numbers, int | float) else numbers)}
    if not found or any(not 0 < number < math.inf for number in found):
        text = ",".join(f"{number:g}" for number in found)
        raise InvalidArgument(f"{name} must be finite numbers > 0, got {text!r}. Write 256,1024.")
    return sorted(found)


def _batch_ladder(records: int) -> list[float]:
    """Powers of two from about 1/256 of the records to about a quarter."""
    top = max(1, math.floor(math.log2(max(2, records) / 4)))
    return [float(2**power) for power in range(max(0, top - 6), top + 1, 2)]


def _cell(goal: _Goal, size: float, epochs: float, ceiling: float) -> PlanCell:
    assert goal.records is not None
    rate = _rate(size, goal.records)
    steps = _steps(epochs, rate)
    noise = goal.least_noise(lambda noise: goal.event(rate, noise, steps))
    signal = rate * math.sqrt(steps) / noise
    return PlanCell(
        batch_size=size,
        epochs=epochs,
        sample_rate=rate,
        steps=steps,
        noise_multiplier=noise,
        signal=signal,
        share_of_ceiling=min(1.0, signal / ceiling),
        gradients=round(rate * steps * goal.records),
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


@dataclass(frozen=True, kw_only=True)
class PlanTable(_Document):
    """Noise for batch sizes × epochs.

    Args:
        cells: one a setting.
        best: the cheapest for its noise.
        sizes: batch sizes.
        passes: epochs.
        document: as JSON types.
    """

    cells: list[PlanCell]
    best: PlanCell
    sizes: list[float]
    passes: list[float]


def _table(goal: _Goal, sizes: list[float], passes: list[float], progress: Progress) -> PlanTable:
    """Every cell, calibrated."""
    checks.integer(1, records=goal.records)
    checks.probability(zero=False, one=False, delta=goal.delta)
    if len(sizes) * len(passes) > _LARGEST_TABLE:
        raise InvalidArgument(f"a table must have ≤ {_LARGEST_TABLE} cells, got more. Give fewer sizes or epochs.")
    ceiling = 1 / goal.least_noise(lambda noise: Gaussian(noise_multiplier=noise))
    cells = []
    with progress.stage("calibrating", total=len(sizes) * len(passes)) as advance:
        for size, epochs in product(sizes, passes):
            cells.append(_cell(goal, size, epochs, ceiling))
            advance()
    best = cheapest_cell(cells)
    document: dict[str, object] = {
        "target_epsilon": goal.epsilon,
        "delta": goal.delta,
        "neighboring_relation": goal.neighboring_relation.value,
        "privacy_unit": goal.privacy_unit.value,
        "records": goal.records,
        "dataset_size_is_public": True,
        "signal_ceiling": ceiling,
        "rule": "fewest gradients with a signal q·√steps/σ within 10 % of the table's best (Sander et al. 2023)",
        "table": [{**asdict(cell), "cheapest": cell is best} for cell in cells],
    }
    return PlanTable(cells=cells, best=best, sizes=sizes, passes=passes, document=document)


# ----------------------------------------------------------------------------------------------------------------------
# What is left open of one run.
# ----------------------------------------------------------------------------------------------------------------------


def plan(
    *,
    epsilon: float,
    delta: float | None = None,
    noise_multiplier: float | None = None,
    sample_rate: float | None = None,
    steps: int | None = None,
    dataset_size: int | None = None,
    batch_size: float | None = None,
    epochs: "float | Sequence[float] | None" = None,
    batch_sizes: Sequence[float] | None = None,
    neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE,
    privacy_unit: PrivacyUnit = PrivacyUnit.RECORD,
    recommend: bool = False,
    parameters: int | None = None,
    weight_distance: float = 1.0,
    sampling: str = "poisson",
    progress: Progress = SILENT,
) -> "PlannedRun | PlanTable | RecommendedPlan":
    """Find the least noise multiplier for a target ε; with noise given, the most steps, largest rate or least δ.

    Args:
        epsilon: Target ε, never exceeded.
        delta: δ in (0, 1), well below 1 / number of records. If omitted, the smallest δ is computed.
        noise_multiplier: Noise standard deviation over sensitivity, to compute another value from.
        sample_rate: Probability in (0, 1] that a record is in a batch.
        steps: Number of steps.
        dataset_size: Public number of records; with a batch size instead of a rate.
        batch_size: Expected batch size.
        epochs: Expected passes over the data; several values make a table.
        batch_sizes: Batch sizes for a table over epochs, with --dataset-size.
        neighboring_relation: Neighboring relation of datasets.
        privacy_unit: Privacy unit: whose contribution is protected.
        recommend: Recommend all settings by published rules, from --dataset-size and --parameters.
        parameters: Number of trainable parameters; with --recommend.
        weight_distance: ℓ2 distance from initial to final weights; with --recommend.
        sampling: How batches are drawn: poisson, without_replacement or with_replacement (both with --dataset-size),
            balls_in_bins, shuffled (claims no amplification).
        progress: what is said meanwhile.
    """
    goal = _Goal(
        epsilon=checks.positive(epsilon=epsilon),
        delta=delta,
        neighboring_relation=neighboring_relation,
        privacy_unit=privacy_unit,
        sampling=sampling,
        records=dataset_size,
    )
    check_sampling(sampling, neighboring_relation)
    if sampling != "poisson" and (recommend or batch_sizes is not None):
        raise InvalidArgument(f"sampling must be poisson in tables and recommendations, got {sampling!r}. Drop it.")
    passes = None if epochs is None else _listed(epochs, "epochs")
    several = passes is not None and len(passes) > 1
    if recommend:
        if several or any(one is not None for one in (noise_multiplier, sample_rate, steps, batch_size, batch_sizes)):
            raise InvalidArgument("a recommendation must be given no settings but one --epochs, got more. Drop them.")
        with progress.stage("calibrating"), _own_names():
            return _recommended(goal, parameters, passes[0] if passes else 40.0, weight_distance)
    sizes = None if batch_sizes is None else _listed(batch_sizes, "batch-sizes")
    if sizes is None and several:
        if batch_size is not None:
            sizes = [batch_size]
        elif dataset_size is not None:
            sizes = _batch_ladder(dataset_size)
        batch_size = None
    if sizes is not None or several:
        if delta is None or dataset_size is None or sizes is None or passes is None:
            raise MissingDeclaration(
                "a table must be given --delta, --dataset-size, --epochs and --batch-sizes (or none). Give the rest."
            )
        if (noise_multiplier, sample_rate, steps, batch_size) != (None,) * 4:
            raise InvalidArgument("a table must be given batch sizes and epochs only, got other settings. Drop them.")
        with _own_names():
            return _table(goal, sizes, passes, progress)
    if delta is not None:
        checks.probability(zero=False, one=False, delta=delta)
    settings = {
        "noise_multiplier": None if noise_multiplier is None else checks.positive(noise_multiplier=noise_multiplier),
        "steps": None if steps is None else checks.integer(1, steps=steps),
        "sample_rate": _sample_rate(sample_rate, dataset_size, batch_size, needed=noise_multiplier is None),
    }
    with progress.stage("calibrating"), _own_names():
        return _solved(goal, settings, passes[0] if passes else None)


@dataclass(frozen=True, kw_only=True)
class PlannedRun(_Document):
    """A run with the setting that was left open.

    Args:
        found: its name.
        document: everything about the run, as JSON types.
    """

    found: str


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


def _solved(goal: _Goal, settings: dict[str, Any], epochs: float | None) -> PlannedRun:
    """The run with its one open setting filled in, on the safe side."""
    noise, rate = settings["noise_multiplier"], settings["sample_rate"]
    if (settings["steps"] is not None and epochs is not None) or (
        settings["steps"] is None and epochs is None and noise is None
    ):
        raise MissingDeclaration("plan must be given --steps or --epochs, one of them. Give one.")
    if epochs is not None and rate is not None:
        settings["steps"] = _steps(epochs, rate)
    missing = [name for name, value in (settings | {"delta": goal.delta}).items() if value is None]
    names = "--noise-multiplier, --steps (or --epochs), --sample-rate (or --dataset-size with --batch-size) and --delta"
    if not missing:
        raise InvalidArgument(f"plan must be left one of {names} to find, got all. Drop one.")
    if len(missing) > 1:
        raise MissingDeclaration(f"plan must be given all but one of {names}. Give the rest.")
    (found,) = missing
    delta = goal.delta
    if delta is None:
        from sordino import accounting

        delta = _upwards(accounting.calibrate_delta(goal.event(**settings), **goal.target))
    else:
        settings[found] = _found(goal, found, settings)
    document = {
        "found": found,
        "noise_multiplier": settings["noise_multiplier"],
        "target_epsilon": goal.epsilon,
        "sampling": goal.sampling,
        "sample_rate": settings["sample_rate"],
        "steps": settings["steps"],
        "dataset_size_is_public": goal.records is not None,
        **goal.summarize(goal.event(**settings), delta=delta),
    }
    if goal.records is not None:
        document["batch_size"] = settings["sample_rate"] * goal.records
    return PlannedRun(found=found, document=document)


def _found(goal: _Goal, name: str, settings: dict[str, Any]) -> float:
    """The least noise, or the most steps, or the largest rate: a whole batch when the number of records is known."""
    from sordino import accounting

    def event(value: Any) -> Event:
        return goal.event(**(settings | {name: value}))

    if name == "noise_multiplier":
        return goal.least_noise(event)
    given: dict[str, Any] = {"delta": goal.delta, **goal.target}
    if name == "steps":
        if (most := accounting.calibrate_steps(event, **given)) == 0:
            raise InvalidArgument("epsilon must allow one step, got a target too small. Raise it, or add noise.")
        return most
    if goal.sampling != "poisson":
        raise InvalidArgument(
            f"sampling must be poisson where a sample rate is to be found, got {goal.sampling!r}. Give the rate."
        )
    records = goal.records
    if records is None:
        return accounting.calibrate_sample_rate(event, **given)
    size = accounting.calibrate_batch_size(lambda b: event(b / records), dataset_size=records, **given)
    if size == 0:
        raise InvalidArgument(
            "epsilon must allow a batch of one record, got a target too small. Raise it, or add noise."
        )
    return size / records


def _upwards(delta: float) -> float:
    """δ with four digits, rounded up."""
    unit = 10.0 ** (math.floor(math.log10(max(delta, 1e-300))) - 3)
    return min(1.0, float(f"{math.ceil(delta / unit) * unit:.4g}")) if delta > 0 else 1e-300


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
    return _rate(checks.positive(batch_size=batch_size), checks.integer(1, records=records))


def _rate(batch_size: float, records: int) -> float:
    if batch_size > records:
        raise InvalidArgument(
            f"batch_size must be ≤ records ({records}), got {batch_size:g}. Draw fewer records a step."
        )
    return batch_size / records
