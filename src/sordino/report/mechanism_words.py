"""Clipping, schedules and the correlation of the noise as plan.json names them, in words (floor 6). No torch."""

from collections.abc import Mapping

from sordino.errors import SordinoError
from sordino.mechanisms.correlated import (
    BandedInverse,
    BandedToeplitz,
    BinaryTree,
    BufferedToeplitz,
    CyclicPoisson,
    DenseStrategy,
    EveryEpoch,
    IndependentNoise,
    MinSeparation,
    participation_from_dict,
    strategy_from_dict,
)
from sordino.report.numerals import shown

__all__ = ["clipping_words", "noise_words", "schedule_words"]

_MANY = 4
_FILTERS = {"gaussian": "a Gaussian filter", "zcdp": "a zCDP filter", "renyi": "a Rényi filter"}


def clipping_words(body: object) -> str | None:
    """A clipping method; None when the plan names none.

    Example:
        >>> clipping_words({"kind": "quantile", "quantile": 0.5, "inner": {"kind": "flat"}})
        'flat clipping at the private 0.5 quantile'
    """
    if not isinstance(body, Mapping):
        return shown(body) if isinstance(body, str) else None
    inner = clipping_words(body.get("inner")) or "flat clipping"
    match body.get("kind"):
        case "flat":
            return "flat clipping"
        case "automatic":
            stability = body.get("stability")
            return f"automatic clipping, stability {shown(stability)}" if stability else "normalised gradients"
        case "psac":
            return f"per-sample adaptive clipping, stability {shown(body.get('stability'))}"
        case "global":
            return f"global clipping, threshold {shown(body.get('threshold'))} times the bound"
        case "grouped":
            by = body.get("by")
            of = f"each {by}" if isinstance(by, str) else f"{len(by) if isinstance(by, list) else 'some'} named groups"
            weights = body.get("weights")
            return f"{inner} of {of}, {weights if isinstance(weights, str) else 'given'} bounds"
        case "quantile":
            return f"{inner} at the private {shown(body.get('quantile'))} quantile"
        case "adaclip":
            return "AdaClip"
        case "projected":
            return f"flat clipping by norms estimated from {shown(body.get('projections'))} projections"
        case _:
            kind = shown(body.get("kind", ""))
            rest = ", ".join(f"{name} {shown(part)}" for name, part in body.items() if name != "kind")
            return ": ".join(filter(None, (kind, rest))).replace("_", " ") or None


def schedule_words(body: Mapping[str, object]) -> str:
    """A schedule; a list of many values by its ends.

    Example:
        >>> schedule_words({"schedule": "exponential", "start": 6.0, "end": 3.0, "over": None})
        'schedule exponential: start 6, end 3'
    """
    kind = body.get("kind", body.get("schedule", ""))
    values = body.get("values")
    if isinstance(values, list) and len(values) > _MANY:
        return f"schedule {kind}: {len(values):,} values, from {shown(values[0])} to {shown(values[-1])}"
    parts = {name: part for name, part in body.items() if name not in ("kind", "schedule") and part is not None}
    rest = ", ".join(f"{name} {shown(part)}" for name, part in parts.items())
    return " ".join(f"schedule {kind}: {rest}".split())


def noise_words(plan: Mapping[str, object], meta: Mapping[str, object]) -> str | None:
    """How the noises of the steps hang together: by the plan's strategy, by a budget, or not at all.

    Example:
        >>> noise_words({"noise": None}, {})
        'independent from step to step'
    """
    if isinstance(budget := meta.get("budget"), Mapping):
        kept = _FILTERS.get(str(budget.get("filter")), "a filter")
        return f"independent from step to step, its scale chosen on the way under a budget that {kept} keeps"
    if "noise" not in plan:
        return None
    body = plan["noise"]
    if not isinstance(body, Mapping):
        return "independent from step to step"
    try:
        return f"correlated, {_strategy(body.get('strategy'))}; {_participation(body.get('participation'))}"
    except SordinoError:
        return "correlated, in a way that plan.json garbles"


def _strategy(body: object) -> str:
    strategy = strategy_from_dict(body)
    match strategy:
        case IndependentNoise():
            return "by the identity"
        case BandedToeplitz():
            return f"banded Toeplitz, {_count(strategy.bands, 'band')}"
        case BandedInverse():
            return f"banded inverse, {_count(len(strategy.coefficients), 'band')}"
        case BufferedToeplitz():
            return f"buffered Toeplitz, {_count(strategy.buffers, 'buffer')}"
        case BinaryTree():
            return "binary tree, refined from below"
        case DenseStrategy():
            return "dense matrix"
        case _:
            return type(strategy).__name__


def _participation(body: object) -> str:
    participation = participation_from_dict(body)
    match participation:
        case CyclicPoisson():
            return f"a record is in at most one step of each cycle of {participation.groups}"
        case EveryEpoch():
            return f"a record is in one step of each epoch of {participation.steps_per_epoch}, always the same"
        case MinSeparation():
            most = participation.participations
            times = "a record's steps are" if most is None else f"a record is in at most {_count(most, 'step')},"
            return f"{times} at least {participation.separation} apart"
        case _:
            return "a record is in at most one step"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
