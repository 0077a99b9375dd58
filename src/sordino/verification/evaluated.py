"""The item about evaluations on private records (floor 6): what was charged is what the noise on the counts costs."""

import math
from collections.abc import Sequence
from pathlib import Path

from sordino import accounting
from sordino.definitions import NeighboringRelation
from sordino.errors import LedgerError, SordinoError
from sordino.events import Composed, DiscreteLaplace, Event, Gaussian, SelfComposed
from sordino.ledger import Ledger
from sordino.runs import Evaluation, RunFolder
from sordino.verification.files import Chain
from sordino.verification.items import Item, failed, not_checked, passed

__all__ = ["check_evaluations"]

_SAME = 1e-6


def check_evaluations(run: RunFolder, chain: Chain | None, place: str | Path | None) -> Item | None:
    """Whether every evaluation states the noise that its event means, and cost no more than it says; None without any.

    Args:
        run: the run folder.
        chain: its transcript; None when it is broken.
        place: the ledger, or None.
    """
    try:
        found = run.evaluations
        if not found:
            return None
        for number, evaluation in enumerate(found, 1):
            if fault := _fault(evaluation, chain):
                return failed("evaluations", f"evaluation {number} {fault}")
        return _with_ledger(found, place)
    except (SordinoError, UnicodeDecodeError, ValueError, OverflowError) as error:
        return failed("evaluations", str(error))


def _fault(evaluation: Evaluation, chain: Chain | None) -> str:
    """What is wrong with one of them, or an empty string."""
    if chain is not None and evaluation.head not in chain.heads:
        return "was made of another run's model"
    spent = accounting.epsilon(evaluation.event, evaluation.delta, relation=evaluation.relation).upper
    if not spent <= evaluation.epsilon * (1 + _SAME):
        return f"states ε = {evaluation.epsilon:.6g}, and its event comes to {spent:.6g}"
    leaves = _leaves(evaluation.event)
    spreads = [_stddev(leaf, evaluation.relation) for leaf in leaves]
    if any(spread is None or abs(spread - evaluation.stddev) > _SAME * evaluation.stddev for spread in spreads):
        return "states another noise than its event"
    # A table is one histogram, in which one record moves one count, or two when it is replaced: two Laplace leaves.
    replaced = evaluation.relation is NeighboringRelation.REPLACE_ONE and isinstance(leaves[0], DiscreteLaplace)
    if evaluation.tables is not None and len(leaves) != len(evaluation.tables) * (2 if replaced else 1):
        return "holds another number of tables than it paid for"
    return ""


def _leaves(event: Event) -> list[Event]:
    if isinstance(event, SelfComposed):
        return _leaves(event.event) * event.count
    return [leaf for part in event.events for leaf in _leaves(part)] if isinstance(event, Composed) else [event]


def _stddev(event: Event, relation: NeighboringRelation) -> float | None:
    """Standard deviation of the noise on a count, worked out from the event; None for another mechanism."""
    if isinstance(event, Gaussian):
        return event.noise_multiplier * (math.sqrt(2) if relation is NeighboringRelation.REPLACE_ONE else 1.0)
    if isinstance(event, DiscreteLaplace):
        ratio = math.exp(-1 / event.scale)
        return math.sqrt(2 * ratio) / (1 - ratio)
    return None


def _with_ledger(found: Sequence[Evaluation], place: str | Path | None) -> Item:
    answered = sum(one.tables is not None for one in found)
    words = f"{len(found)} paid for, {answered} answered; noise and price agree"
    named = [one for one in found if one.charge is not None]
    if place is None:
        return not_checked("evaluations", f"{words}; no ledger was given") if named else passed("evaluations", words)
    try:
        ledger = Ledger(place)
        held = {entry.digest: entry for name in ledger.accounts() for entry in ledger.account(name).history()}
    except LedgerError as error:
        return failed("evaluations", str(error))
    for one in named:
        entry = held.get(one.charge or "")
        if entry is None or entry.kind != "charge" or entry.event != one.event:
            return failed("evaluations", f"charge {(one.charge or '')[:12]}… is missing, or is for something else")
    if len(named) < len(found):
        return not_checked("evaluations", f"{words}; {len(found) - len(named)} name no charge")
    return passed("evaluations", f"{words}, and the ledger holds every charge")
