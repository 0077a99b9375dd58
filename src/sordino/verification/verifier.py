"""One pass over a run folder."""

import importlib.util
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, cast

from sordino import accounting, checks
from sordino.accounting import Interval
from sordino.accounting.dp_accounting_interop import to_dp_event
from sordino.accounting.filters import GDPFilter, RDPFilter, ZCDPFilter
from sordino.definitions import Guarantee, NeighboringRelation
from sordino.errors import InvalidArgument, LedgerError, SordinoError, UnsupportedEvent
from sordino.events import (
    ApproximateDP,
    Event,
    Gaussian,
    NoOp,
    PoissonSampled,
    ProjectedGaussian,
    SampledWithoutReplacement,
    SampledWithReplacement,
    ZeroConcentratedDP,
    compose,
    event_counts,
    from_dict,
)
from sordino.installation import require
from sordino.ledger import Ledger
from sordino.runs import RunFolder, RunSegment, TranscriptLine
from sordino.verification.checks import (
    CheckResult,
    Course,
    TranscriptChain,
    VerificationReport,
    check_anchor,
    check_checkpoint,
    check_evaluations,
    check_files,
    check_model,
    check_released_losses,
    describe_budget_mismatch,
    describe_mismatch,
    failed,
    is_plan,
    ledger_lines,
    not_checked,
    passed,
    planned_event,
    read_chain,
)

# ----------------------------------------------------------------------------------------------------------------------
# Runs whose ε is a budget that a filter kept, and not what a plan adds up to.
#
# The transcript holds what each step asked for and got. From it the filter is asked again, line by line, and what was
# really done is composed by an accountant that knows nothing of filters: it must come to no more than the budget.
# ----------------------------------------------------------------------------------------------------------------------


_ROOM = 1e-9  # rounding between two computations of one number
_KINDS = ("gaussian", "zcdp", "renyi")


@dataclass(frozen=True, kw_only=True)
class RunBudget:
    """What run.json says of the budget.

    Args:
        epsilon: of the whole run.
        delta: of the whole run.
        filter: "gaussian", "zcdp" or "renyi".
        order: the Rényi order that was fixed before the first step, or None.
        neighboring_relation: the plan's neighboring relation.
    """

    epsilon: float
    delta: float
    filter: str
    order: float | None
    neighboring_relation: NeighboringRelation

    def made(self) -> GDPFilter | ZCDPFilter | RDPFilter:
        """The filter as it was before the first step."""
        options = {"epsilon": self.epsilon, "delta": self.delta, "neighboring_relation": self.neighboring_relation}
        if self.order is not None:
            return RDPFilter(**options, order=self.order)
        return GDPFilter(**options) if self.filter == "gaussian" else ZCDPFilter(**options)

    def describe(self) -> str:
        """The filter as a guarantee names it."""
        named = {"gaussian": "Gaussian filter", "zcdp": "zCDP filter"}
        return named.get(self.filter) or f"Rényi filter of order {self.order:g}"

    def is_held_by(self, event: Event) -> bool:
        """Whether a ledger's charge of `event` pays for all of it."""
        amount = self.made().budget
        match event:
            case Gaussian() if self.filter == "gaussian":
                return event.noise_multiplier**-2 >= amount * (1 - _ROOM)
            case ZeroConcentratedDP() if self.filter == "zcdp":
                return event.rho >= amount * (1 - _ROOM)
            case ApproximateDP():
                return event.epsilon >= self.epsilon and event.delta >= self.delta
            case _:
                return False


def run_budget(meta: Mapping[str, object], plan: Mapping[str, object]) -> RunBudget | None:
    """The budget of a run, or None for a run that follows its plan.

    Raises:
        InvalidArgument: run.json speaks of a budget and does not say what it is.
    """
    body = meta.get("budget")
    if body is None:
        return None
    if not isinstance(body, Mapping) or set(body) != {"epsilon", "delta", "filter", "order"}:
        raise InvalidArgument("run.json must say epsilon, delta, filter and order of its budget, got other fields.")
    kind = str(body["filter"])
    checks.one_of(_KINDS, filter=kind)
    return RunBudget(
        epsilon=checks.positive(epsilon=body["epsilon"]),
        delta=checks.probability(zero=False, one=False, delta=body["delta"]),
        filter=kind,
        order=checks.positive(order=body["order"]) if kind == "renyi" else None,
        neighboring_relation=NeighboringRelation(str(plan["neighboring_relation"])),
    )


def check_requests(
    plan: Mapping[str, object], budget: RunBudget, lines: tuple[TranscriptLine, ...], ends: bool = True
) -> CheckResult:
    """Whether the filter, asked again, admits every line of the transcript, and no step is beyond a plan that `ends`.

    A torn line counts as all that was left, so nothing may follow it.
    """
    steps, kept, torn = int(str(plan["steps"])), budget.made(), False
    for line in lines:
        if ends and line.step >= steps:
            return failed("plan", f"step {line.step} is beyond the plan's {steps} steps")
        where = f"step {line.step}, attempt {line.attempt},"
        if torn:
            return failed("plan", f"{where} follows a torn line, which ends a budget")
        torn = line.torn
        if torn:
            continue
        if not _is_request(line.event, plan):
            return failed("plan", f"{where} charges what no step of this plan can ask for")
        try:
            admitted = kept.admit(line.event)
        except SordinoError as error:
            return failed("plan", str(error))
        if not admitted:
            return failed("plan", f"{where} does not fit what the {budget.filter} filter had left")
    share = kept.spent / kept.budget if kept.budget > 0 else 0.0
    words = f"{len(lines)} steps were admitted; they used {100 * share:.4g} % of the {budget.filter} filter"
    return passed("plan", words + ("; a torn line counts as the rest" if torn else ""))


def _is_request(event: Event, plan: Mapping[str, object]) -> bool:
    """Whether a step can have asked for this: a Gaussian, or one on a Poisson sample."""
    inner = event.event if isinstance(event, PoissonSampled) else event
    clipping = plan.get("clipping")
    projected = isinstance(clipping, Mapping) and clipping.get("kind") == "projected"
    return isinstance(inner, ProjectedGaussian if projected else Gaussian)


def check_claim(
    plan: Mapping[str, object],
    plans: Sequence[Mapping[str, object]],
    budget: RunBudget,
    claim: Guarantee | None,
    sentence: str,
    realized: Interval,
) -> CheckResult:
    """Whether the run claims its budget, and what it did comes to no more.

    Args:
        plan: what the last segment planned.
        plans: plan.json, and what segments state in its place.
        budget: what was fixed before the first step.
        claim: guarantee.json.
        sentence: the claim in words, as it was written.
        realized: ε of the transcript, composed as if it had been fixed in advance; torn lines left out.
    """
    summary = f"the budget is ε = {budget.epsilon:.6g}; what was done comes to {realized.upper:.6g}"
    if budget.delta != plan.get("delta"):
        return failed("guarantee", "the budget's δ is not the plan's")
    if not math.isfinite(realized.upper) or realized.upper > budget.epsilon * (1 + _ROOM):
        return failed("guarantee", summary)
    if claim is None:
        return passed("guarantee", f"guarantee.json was not written; {summary}")
    if (claim.epsilon, claim.delta) != (budget.epsilon, budget.delta):
        return failed("guarantee", f"it states ε = {claim.epsilon:.9g} at δ = {claim.delta:g}, and {summary}")
    differing = _garbled(plan, claim, sentence, whole=True) or describe_budget_mismatch(plans, claim, budget.describe())
    return passed("guarantee", summary) if differing is None else failed("guarantee", differing)


def _garbled(plan: Mapping[str, object], claim: Guarantee, sentence: str, *, whole: bool = False) -> str | None:
    """What a guarantee says otherwise than the plan's fields, or than its own numbers; None when it agrees.

    A `whole` plan has all the fields; another one may lack some.
    """
    for name in ("delta", "neighboring_relation", "privacy_unit"):
        if (whole or name in plan) and plan.get(name) != getattr(claim, name):
            return f"{name} is not the plan's"
    return None if sentence == claim.describe() else "its sentence says something else than its numbers"


# ----------------------------------------------------------------------------------------------------------------------
# ε by an implementation that shares no code with ours: dp-accounting's privacy loss distributions.
#
# Its estimate is pessimistic, so it bounds the true ε from above as ours does, by other means: privacy losses on a
# lattice, composed by Fourier transforms, against our contour integrals. Install it with ``sordino[verify]``.
#
# References:
#     Doroshenko, Ghazi, Kamath, Kumar, Manurangsi 2022 (connecting the dots).
# ----------------------------------------------------------------------------------------------------------------------


# Its error grows with the number of compositions times the square of the lattice's width.
_WIDTHS = ((1_000, 1e-3), (100_000, 1e-4))
_FINEST = 2e-5


def is_available() -> bool:
    """Whether dp-accounting is installed."""
    return importlib.util.find_spec("dp_accounting") is not None


# Close enough for the best of them to be within 1e-5 of the best order of all.
_RENYI_ORDERS = tuple(1 + 10 ** (index / 200 - 3) for index in range(1600))


def dp_accounting_epsilon(
    event: Event, delta: float, *, neighboring_relation: NeighboringRelation, compositions: int
) -> float:
    """An upper bound of ε, computed by dp-accounting.

    Args:
        event: what was done.
        delta: in (0, 1).
        neighboring_relation: the neighboring relation.
        compositions: how many steps `event` composes; the more, the finer the lattice.

    Raises:
        UnsupportedEvent: dp-accounting has no counterpart of the event.
    """
    if isinstance(event, NoOp):
        return 0.0
    require("verify", "dp_accounting", user="the second accountant")
    import dp_accounting
    from dp_accounting import pld, rdp

    library = cast("Any", dp_accounting)
    relations = {
        NeighboringRelation.ADD_OR_REMOVE_ONE: library.NeighboringRelation.ADD_OR_REMOVE_ONE,
        NeighboringRelation.REPLACE_ONE: library.NeighboringRelation.REPLACE_ONE,
        NeighboringRelation.REPLACE_SPECIAL: library.NeighboringRelation.REPLACE_SPECIAL,
    }
    width = next((width for most, width in _WIDTHS if compositions <= most), _FINEST)
    exchanged = to_dp_event(event, neighboring_relation=neighboring_relation)
    accountant = cast("Any", pld).PLDAccountant(relations[neighboring_relation], value_discretization_interval=width)
    if not accountant.supports(exchanged):
        sampled = SampledWithoutReplacement | SampledWithReplacement
        if any(isinstance(leaf, sampled) for leaf in event_counts(event)):
            # It has a Rényi bound of one of them, which is several times larger, and takes a displaced record for one
            # that is left out: it says nothing about our interval.
            raise UnsupportedEvent("batches of fixed size have no privacy loss distribution in dp-accounting.")
        # Of a zCDP event only Rényi bounds are known.
        accountant = cast("Any", rdp).RdpAccountant(_RENYI_ORDERS, relations[neighboring_relation])
    if not accountant.supports(exchanged):
        raise UnsupportedEvent(f"event must have an accountant in dp-accounting, got {event.kind}. Use sordino's own.")
    accountant.compose(exchanged)
    found = float(accountant.get_epsilon(delta))
    return math.inf if math.isnan(found) else found


# ----------------------------------------------------------------------------------------------------------------------
# Whether a run of several stages charged what its plan lists.
# ----------------------------------------------------------------------------------------------------------------------


def check_stages(plan: Mapping[str, object], lines: Sequence[TranscriptLine]) -> CheckResult:
    """Line by line against the stages of plan.json, and each training stage against the plan that it states."""
    try:
        stages = [_stage(body) for body in _list(plan["stages"])]
    except (SordinoError, KeyError, TypeError, ValueError):
        return failed("plan", "plan.json garbles its stages")
    for name, charges, training in stages:
        if training is not None and charges != _planned(training):
            return failed("plan", f"stage {name} lists other charges than its own plan asks for")
    planned = [event for _, charges, _ in stages for event in charges]
    for number, (line, event) in enumerate(zip_longest(lines, planned)):
        if line is None:
            break
        if event is None:
            return failed("plan", f"charge {number} is beyond the {len(planned)} that are planned")
        if not line.torn and line.event != event:
            return failed("plan", f"charge {number} is for another event than the plan's")
    counts = ", ".join(f"{name} ({len(charges)})" for name, charges, _ in stages)
    return passed("plan", f"{len(lines)} of {len(planned)} charges, in order, are the plan's: {counts}")


def _stage(body: object) -> tuple[str, list[Event], Mapping[str, object] | None]:
    """Name, charges, and the training plan that it states, if any."""
    if not isinstance(body, Mapping):
        raise TypeError
    charges = list(_charges(_list(body["charges"])))
    settings = body.get("settings")
    stated = settings.get("plan") if isinstance(settings, Mapping) else None
    training = stated if isinstance(stated, Mapping) and is_plan(stated) else None
    return str(body["name"]), charges, training


def _charges(groups: Sequence[object]) -> Iterator[Event]:
    for group in groups:
        if not isinstance(group, Mapping):
            raise TypeError
        yield from [from_dict(group["event"])] * int(group["count"])


def _planned(plan: Mapping[str, object]) -> list[Event]:
    return [planned_event(plan, step, first=0) for step in range(int(str(plan["steps"])))]


def _list(value: object) -> Sequence[object]:
    if not isinstance(value, list):
        raise TypeError
    return value


# ----------------------------------------------------------------------------------------------------------------------
# One pass over a run folder.
# ----------------------------------------------------------------------------------------------------------------------


_SAME = 1e-9  # two computations of one ε by one accountant
_LATTICE = 5e-3  # what the second implementation's lattice may add, relative and absolute


def verify(
    run: str | Path | RunFolder, *, ledger: str | Path | None = None, head: str | None = None
) -> VerificationReport:
    """Check a run folder against itself, against two accountants, and, if given, against a ledger and an anchor.

    Guarantee: reads the run folder and the ledger only; no record is touched.

    Args:
        run: the folder.
        ledger: the ledger that the run was charged to: a file or a URL.
        head: the hash of the finished run (`VerificationReport.head`) that was published or noted down before.

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
    released = (check_released_losses(folder, chain), check_evaluations(folder, chain, ledger))
    items += [check_model(folder), *(item for item in released if item is not None)]
    try:
        checkpoint = check_checkpoint(folder, chain)
    except SordinoError as error:
        checkpoint = failed("checkpoint", str(error))
    items += [] if checkpoint is None else [checkpoint]
    return VerificationReport(items=tuple(items), head=folder.head if chain is not None else "")


def _numbers(folder: RunFolder, chain: TranscriptChain) -> list[CheckResult]:
    plan, budget = folder.plan, _budget(folder)
    # Under a budget a torn line stands for all that was left, and is no event of its own.
    counted = [line for line in chain.lines if budget is None or not line.torn]
    event = compose([line.event for line in counted if not isinstance(line.event, NoOp)])
    ends = folder.meta.get("open_ended") is not True
    items = [_check_plan(plan, chain, ends) if budget is None else check_requests(plan, budget, chain.lines, ends)]
    # What is claimed at the end is claimed as the last segment planned it.
    plans = [plan, *(segment.plan for segment in chain.segments if segment.plan is not None)]
    plan = (chain.segments[-1].plan if chain.segments else None) or plan
    try:
        claim = folder.guarantee
        delta = float(str(plan["delta"])) if claim is None else claim.delta
        neighboring_relation = (
            NeighboringRelation(str(plan["neighboring_relation"])) if claim is None else claim.neighboring_relation
        )
        interval = accounting.epsilon(event, delta, neighboring_relation=neighboring_relation)
    except KeyError:
        missing = "neither guarantee.json nor plan.json names δ and the relation"
        return [*items, not_checked("guarantee", missing), not_checked("second accountant", missing)]
    except (SordinoError, ValueError, UnicodeDecodeError) as error:
        return [*items, failed("guarantee", str(error)), not_checked("second accountant", "there is no ε to compare")]
    seeded = any(segment.seeded for segment in chain.segments)
    if claim is not None and seeded and not any("not for release" in caveat for caveat in claim.caveats):
        items.append(failed("guarantee", "its noise came from a chosen seed, and it does not say so"))
    elif budget is not None:
        items.append(check_claim(plan, plans, budget, claim, folder.guarantee_description, interval))
    else:
        items.append(_check_guarantee(plan, plans, claim, folder.guarantee_description, interval, chain.lines))
    return [*items, _check_second(event, delta, neighboring_relation, claim, interval)]


def _budget(folder: RunFolder) -> RunBudget | None:
    """The budget that the run says it had; one that can't be read is none, and the plan then fails."""
    try:
        return run_budget(folder.meta, folder.plan)
    except (SordinoError, KeyError, ValueError):
        return None


def _check_plan(plan: Mapping[str, object], chain: TranscriptChain, ends: bool) -> CheckResult:
    """Whether every line charges what the plan says, and, where the plan `ends`, no step is beyond it."""
    if "stages" in plan:
        return check_stages(plan, chain.lines)
    if not is_plan(plan):
        return not_checked("plan", "plan.json does not say what a step does")
    courses: dict[int, Course] = {}
    for entry in chain.entries:
        course = courses.setdefault(entry.model, Course(plan=plan, ends=ends))
        if isinstance(entry, RunSegment):
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
    lines: tuple[TranscriptLine, ...],
) -> CheckResult:
    stated = [line.epsilon for line in lines if line.epsilon is not None]
    if stated and stated != sorted(stated):
        return failed("guarantee", "ε so far falls from one line to another")
    if claim is None:
        return not_checked("guarantee", f"guarantee.json was not written; the transcript's ε is {interval.upper:.6g}")
    if garbled := _garbled(plan, claim, sentence):
        return failed("guarantee", garbled)
    if not _close(claim.epsilon, interval.upper):
        return failed("guarantee", f"it states ε = {claim.epsilon:.9g}, and the transcript gives {interval.upper:.9g}")
    differing = describe_mismatch(plans, claim, compose([line.event for line in lines]), interval.accountant)
    if differing is not None:
        return failed("guarantee", differing)
    return passed("guarantee", f"ε = {claim.epsilon:.6g} at δ = {claim.delta:g} follows from the transcript")


def _close(one: float, other: float) -> bool:
    return one == other or abs(one - other) <= _SAME * max(1.0, abs(other))


def _check_second(
    event: Event, delta: float, neighboring_relation: NeighboringRelation, claim: Guarantee | None, interval: Interval
) -> CheckResult:
    name = "second accountant"
    if math.isinf(interval.upper):
        return not_checked(name, "ε is infinite: the run is not private")
    if not is_available():
        return not_checked(name, "dp-accounting is not installed; install sordino[verify]")
    try:
        second = dp_accounting_epsilon(
            event,
            delta,
            neighboring_relation=neighboring_relation,
            compositions=sum(event_counts(event).values()),
        )
    except (UnsupportedEvent, NotImplementedError, ValueError) as error:
        return not_checked(name, f"dp-accounting can't account for these events: {type(error).__name__}")
    low, high = interval.lower, interval.upper * (1 + _LATTICE) + _LATTICE
    ours = interval.upper if claim is None else claim.epsilon
    if not low * (1 - _SAME) <= second <= high or ours < second / (1 + _LATTICE) - _LATTICE:
        return failed(name, f"dp-accounting finds ε = {second:.6g}, outside [{low:.6g}, {high:.6g}]")
    return passed(name, f"dp-accounting finds ε ≤ {second:.6g}; ours is in [{low:.6g}, {interval.upper:.6g}]")


def _check_ledger(
    chain: TranscriptChain, place: str | Path | None, budget: RunBudget | None = None
) -> list[CheckResult]:
    """Whether the ledger holds every charge that the transcript names; nothing when there is neither."""
    paid_for: dict[str, Counter[Event]] = {}
    for line in chain.lines:
        if line.charge is not None and not isinstance(line.event, NoOp):
            paid_for.setdefault(line.charge, Counter()).update(event_counts(line.event))
    if place is None:
        words = f"{len(paid_for)} charges are named, and no ledger was given"
        return [not_checked("ledger", words)] if paid_for else []
    try:
        ledger = Ledger(place)
        ledger.verify()
        held = ledger_lines(ledger)
    except LedgerError as error:
        return [failed("ledger", str(error))]
    for digest, used in paid_for.items():
        entry = held.get(digest)
        charged = None if entry is None or entry.kind != "charge" else entry.event
        if budget is not None and charged is not None and budget.is_held_by(charged):
            continue
        paid = {} if charged is None else event_counts(charged)
        if any(paid.get(event, 0) < count for event, count in used.items()):
            return [failed("ledger", f"charge {digest[:12]}… is missing, or is for less than the steps it pays for")]
    unpaid = sum(line.charge is None and not isinstance(line.event, NoOp) for line in chain.lines)
    if unpaid:
        return [failed("ledger", f"{unpaid} lines name no charge")]
    return [passed("ledger", f"{len(paid_for)} charges pay for all {len(chain.lines)} lines")]
