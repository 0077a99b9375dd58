"""One pass over a run folder (floor 6)."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from sordino import accounting
from sordino.accounting import Interval
from sordino.definitions import Guarantee, NeighboringRelation
from sordino.errors import LedgerError, SordinoError, UnsupportedEvent
from sordino.events import Composed, Event, Nothing, SelfComposed, compose
from sordino.ledger import Ledger
from sordino.runs import Line, RunFolder, Segment
from sordino.verification.budgeted import Budget, budget_of, check_claim, check_requests
from sordino.verification.evaluated import check_evaluations
from sordino.verification.files import (
    Chain,
    check_anchor,
    check_checkpoint,
    check_files,
    check_model,
    read_chain,
)
from sordino.verification.items import Item, Verification, failed, not_checked, passed
from sordino.verification.planned import Course, is_plan
from sordino.verification.released import check_loss_curve
from sordino.verification.second import is_available, second_epsilon
from sordino.verification.staged import check_stages
from sordino.verification.worded import wrong_words

__all__ = ["verify"]

_SAME = 1e-9  # two computations of one ε by one accountant
_LATTICE = 5e-3  # what the second implementation's lattice may add, relative and absolute


def verify(run: str | Path | RunFolder, *, ledger: str | Path | None = None, head: str | None = None) -> Verification:
    """Check a run folder against itself, against two accountants, and, if given, against a ledger and an anchor.

    Guarantee: reads the run folder and the ledger only; no record is touched.

    Args:
        run: the folder.
        ledger: the ledger that the run was charged to: a file or a URL.
        head: the hash of the finished run (`Verification.head`) that was published or noted down before.

    Raises:
        InvalidArgument: no run lies there.

    References:
        Crosby, Wallach 2009 (what a chain of hashes can and can't show).
    """
    folder = run if isinstance(run, RunFolder) else RunFolder.open(run)
    chain, item = read_chain(folder)
    items = [check_files(folder), item]
    if head is not None:
        items.append(check_anchor(folder, chain, head, items[0]))
    if chain is None:
        names = ("plan", "guarantee", "second accountant")
        items += [not_checked(name, "the chain is broken") for name in names]
    else:
        items += _numbers(folder, chain)
        items += _check_ledger(chain, ledger, _budget(folder))
    released = (check_loss_curve(folder, chain), check_evaluations(folder, chain, ledger))
    items += [check_model(folder), *(item for item in released if item is not None)]
    try:
        checkpoint = check_checkpoint(folder, chain)
    except SordinoError as error:
        checkpoint = failed("checkpoint", str(error))
    items += [] if checkpoint is None else [checkpoint]
    return Verification(items=tuple(items), head=folder.head if chain is not None else "")


def _numbers(folder: RunFolder, chain: Chain) -> list[Item]:
    plan, budget = folder.plan, _budget(folder)
    # Under a budget a torn line stands for all that was left, and is no event of its own.
    counted = [line for line in chain.lines if budget is None or not line.torn]
    event = compose([line.event for line in counted if not isinstance(line.event, Nothing)])
    ends = folder.meta.get("open_ended") is not True
    items = [_check_plan(plan, chain, ends) if budget is None else check_requests(plan, budget, chain.lines, ends)]
    # What is claimed at the end is claimed as the last segment planned it.
    plans, plan = [plan, *chain.plans], chain.last_plan or plan
    try:
        claim = folder.guarantee
        delta = float(str(plan["delta"])) if claim is None else claim.delta
        relation = NeighboringRelation(str(plan["neighboring_relation"])) if claim is None else claim.relation
        interval = accounting.epsilon(event, delta, relation=relation)
    except KeyError:
        missing = "neither guarantee.json nor plan.json names δ and the relation"
        return [*items, not_checked("guarantee", missing), not_checked("second accountant", missing)]
    except (SordinoError, ValueError, UnicodeDecodeError) as error:
        return [*items, failed("guarantee", str(error)), not_checked("second accountant", "there is no ε to compare")]
    if claim is not None and chain.seeded and not any("not for release" in caveat for caveat in claim.caveats):
        items.append(failed("guarantee", "its noise came from a chosen seed, and it does not say so"))
    elif budget is not None:
        items.append(check_claim(plan, plans, budget, claim, folder.sentence, interval))
    else:
        items.append(_check_guarantee(plan, plans, claim, folder.sentence, interval, chain.lines))
    return [*items, _check_second(event, delta, relation, claim, interval)]


def _budget(folder: RunFolder) -> Budget | None:
    """The budget that the run says it had; one that can't be read is none, and the plan then fails."""
    try:
        return budget_of(folder.meta, folder.plan)
    except (SordinoError, KeyError, ValueError):
        return None


def _check_plan(plan: Mapping[str, object], chain: Chain, ends: bool) -> Item:
    """Whether every line charges what the plan says, and, where the plan `ends`, no step is beyond it."""
    if "stages" in plan:
        return check_stages(plan, chain.lines)
    if not is_plan(plan):
        return not_checked("plan", "plan.json does not say what a step does")
    courses: dict[int, Course] = {}
    for entry in chain.entries:
        course = courses.setdefault(entry.model, Course(plan=plan, ends=ends))
        if isinstance(entry, Segment):
            begun = plan if entry.plan is None else entry.plan
            if not is_plan(begun):
                return failed("plan", f"segment {entry.number} states a plan that does not say what a step does")
            for name in ("neighboring_relation", "privacy_unit"):
                if begun.get(name) != plan.get(name):
                    return failed("plan", f"segment {entry.number} is for another {name} than plan.json")
            course.begin(begun, entry.first_step)
            continue
        fault = course.fault(entry)
        if fault:
            return failed("plan", fault)
    repeated = sum(line.attempt > 1 for line in chain.lines)
    reached = sum(course.begun for course in courses.values())
    of = f"{reached} of {plan['steps']} steps" if ends else f"{reached} steps"
    return passed("plan", f"{of}, {repeated} of the charges repeat a step; all charge the plan's")


def _check_guarantee(
    plan: Mapping[str, object],
    plans: Sequence[Mapping[str, object]],
    claim: Guarantee | None,
    sentence: str,
    interval: Interval,
    lines: tuple[Line, ...],
) -> Item:
    told = [line.epsilon for line in lines if line.epsilon is not None]
    if told and told != sorted(told):
        return failed("guarantee", "ε so far falls from one line to another")
    if claim is None:
        return not_checked("guarantee", f"guarantee.json was not written; the transcript's ε is {interval.upper:.6g}")
    for name, value in (("delta", claim.delta), ("neighboring_relation", claim.relation), ("privacy_unit", claim.unit)):
        if name in plan and plan[name] != value:
            return failed("guarantee", f"{name} is not the plan's")
    if sentence != claim.sentence():
        return failed("guarantee", "its sentence says something else than its numbers")
    if not _close(claim.epsilon, interval.upper):
        return failed("guarantee", f"it states ε = {claim.epsilon:.9g}, and the transcript gives {interval.upper:.9g}")
    differing = wrong_words(plans, claim, compose([line.event for line in lines]), interval.accountant)
    if differing is not None:
        return failed("guarantee", differing)
    return passed("guarantee", f"ε = {claim.epsilon:.6g} at δ = {claim.delta:g} follows from the transcript")


def _close(one: float, other: float) -> bool:
    return one == other or abs(one - other) <= _SAME * max(1.0, abs(other))


def _check_second(
    event: Event, delta: float, relation: NeighboringRelation, claim: Guarantee | None, interval: Interval
) -> Item:
    name = "second accountant"
    if math.isinf(interval.upper):
        return not_checked(name, "ε is infinite: the run is not private")
    if not is_available():
        return not_checked(name, "dp-accounting is not installed; install sordino[verify]")
    try:
        second = second_epsilon(event, delta, relation=relation, compositions=_compositions(event))
    except (UnsupportedEvent, NotImplementedError, ValueError) as error:
        return not_checked(name, f"dp-accounting can't account for these events: {type(error).__name__}")
    low, high = interval.lower, interval.upper * (1 + _LATTICE) + _LATTICE
    ours = interval.upper if claim is None else claim.epsilon
    if not low * (1 - _SAME) <= second <= high or ours < second / (1 + _LATTICE) - _LATTICE:
        return failed(name, f"dp-accounting finds ε = {second:.6g}, outside [{low:.6g}, {high:.6g}]")
    return passed(name, f"dp-accounting finds ε ≤ {second:.6g}; ours is in [{low:.6g}, {interval.upper:.6g}]")


def _compositions(event: Event) -> int:
    if isinstance(event, SelfComposed):
        return event.count * _compositions(event.event)
    return sum(map(_compositions, event.events)) if isinstance(event, Composed) else 1


def _check_ledger(chain: Chain, place: str | Path | None, budget: Budget | None = None) -> list[Item]:
    """Whether the ledger holds every charge that the transcript names; nothing when there is neither."""
    paid_for: dict[str, Counter[Event]] = {}
    for line in chain.lines:
        if line.charge is not None and not isinstance(line.event, Nothing):
            paid_for.setdefault(line.charge, Counter())[line.event] += 1
    if place is None:
        words = f"{len(paid_for)} charges are named, and no ledger was given"
        return [not_checked("ledger", words)] if paid_for else []
    try:
        ledger = Ledger(place)
        ledger.verify()
        held = {entry.digest: entry for name in ledger.accounts() for entry in ledger.account(name).history()}
    except LedgerError as error:
        return [failed("ledger", str(error))]
    for digest, used in paid_for.items():
        entry = held.get(digest)
        charged = None if entry is None or entry.kind != "charge" else entry.event
        if budget is not None and charged is not None and budget.is_held_by(charged):
            continue
        paid = Counter() if charged is None else _leaves(charged)
        if any(paid[event] < count for event, count in used.items()):
            return [failed("ledger", f"charge {digest[:12]}… is missing, or is for less than the steps it pays for")]
    unpaid = sum(line.charge is None and not isinstance(line.event, Nothing) for line in chain.lines)
    if unpaid:
        return [failed("ledger", f"{unpaid} lines name no charge")]
    return [passed("ledger", f"{len(paid_for)} charges pay for all {len(chain.lines)} lines")]


def _leaves(event: Event) -> Counter[Event]:
    if isinstance(event, SelfComposed):
        inner = _leaves(event.event)
        return Counter({part: count * event.count for part, count in inner.items()})
    if isinstance(event, Composed):
        total: Counter[Event] = Counter()
        for part in event.events:
            total.update(_leaves(part))
        return total
    return Counter({event: 1})
