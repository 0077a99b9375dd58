"""The front door: check the question, pick an accountant, say which one answered.

`auto` asks, in this order: the closed form, the contour integral, the PLD accountant, the Rényi bound. An
accountant that can't bound its own error passes the question on; the answer names the one that gave it.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from sordino import checks
from sordino.accounting.base import (
    Accountant,
    EventCounts,
    Interval,
    bounding_events,
    double_precision,
    flatten,
)
from sordino.accounting.composition_theorems import (
    BasicCompositionAccountant,
    OptimalCompositionAccountant,
    parameters,
)
from sordino.accounting.contour import ClosedFormAccountant, ContourAccountant
from sordino.accounting.pld import PLDAccountant
from sordino.accounting.private_selection import SelectionAccountant
from sordino.accounting.rdp import GDPAccountant, RDPAccountant, ZCDPAccountant
from sordino.definitions import NeighboringRelation
from sordino.errors import AccountingError, UnsupportedEvent
from sordino.events import (
    Event,
    PoissonSampled,
    SampledWithoutReplacement,
)

# ----------------------------------------------------------------------------------------------------------------------
# The accountants by name, in the order in which ``auto`` asks them.
# ----------------------------------------------------------------------------------------------------------------------


_CURRENT: tuple[Accountant[Any], ...] = (
    ClosedFormAccountant(),
    ContourAccountant(),
    PLDAccountant(),
    RDPAccountant(),
    SelectionAccountant(),
    ZCDPAccountant(),
    GDPAccountant(),
    OptimalCompositionAccountant(),
    BasicCompositionAccountant(),
)

if TYPE_CHECKING:
    ACCOUNTANTS: tuple[Accountant[Any], ...]


def __getattr__(name: str) -> object:
    """`ACCOUNTANTS`: all of them by name, the historical ones included, which are loaded for it."""
    if name == "ACCOUNTANTS":
        from sordino.accounting.historical import HISTORICAL_ACCOUNTANTS

        return (*_CURRENT, *HISTORICAL_ACCOUNTANTS)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _all_accountants() -> tuple[Accountant[Any], ...]:
    return cast("tuple[Accountant[Any], ...]", __getattr__("ACCOUNTANTS"))


def get_accountant(name: str) -> Accountant[Any]:
    """The accountant with this name."""
    for known in _CURRENT:
        if known.name == name:
            return known
    every = _all_accountants()
    checks.one_of([known.name for known in every], accountant=name)
    return next(known for known in every if known.name == name)


# ----------------------------------------------------------------------------------------------------------------------
# The front door: check the question, pick an accountant, say which one answered.
# ----------------------------------------------------------------------------------------------------------------------


_NARROW = 1e-4  # relative width with which ``auto`` is content
_Question = Callable[[Accountant[Any], Event], Interval]


@double_precision("ε")
def epsilon(
    event: Event,
    delta: float,
    *,
    neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE,
    accountant: str = "auto",
) -> Interval:
    """The ε of an event at a given δ: an interval that contains the truth, whose upper end is reported.

    Args:
        event: what was done.
        delta: in [0, 1].
        neighboring_relation: the neighboring relation under which noise multipliers are std / sensitivity.
        accountant: a name from `epsilons`, or ``auto``.

    Returns:
        Ends ≥ 0; both 0 when nothing was done, both ∞ when some step had no protection.

    Raises:
        InvalidArgument: δ is not in [0, 1], or the accountant is unknown.
        UnsupportedEvent: the accountant (under ``auto``: every one) has no sound answer for the event.
        AccountingError: the accountant can't bound its own error here.

    Example:
        >>> from sordino.events import Gaussian, PoissonSampled, SelfComposed
        >>> step = PoissonSampled(sample_rate=0.01, event=Gaussian(noise_multiplier=4.0))
        >>> round(epsilon(SelfComposed(event=step, count=10_000), 1e-5).upper, 6)
        0.946867
    """
    neighboring_relation = NeighboringRelation(neighboring_relation)
    delta = checks.probability(delta=delta, hint="A typical δ is below 1 / number of records.")
    chosen = None if accountant == "auto" else get_accountant(accountant)
    choices, truncated = bounding_events(event, neighboring_relation)

    def worst(room: float) -> Interval:
        return _worst([_epsilon(choice, room, neighboring_relation, chosen) for choice in choices])

    answer = worst(delta)
    if truncated == 0 or delta == 1 or math.isinf(answer.upper):
        return answer
    # The smallest ε with δ(ε) + β(1 + e^ε) ≤ δ: each side's distribution moved by at most β in total variation.
    guess = 0.0
    for _ in range(60):
        room = delta - truncated * (1 + math.exp(min(guess, 700.0)))
        if room <= 0:
            break
        answer = worst(room)
        if answer.upper <= guess or answer.upper == 0:
            return Interval(lower=0.0, upper=max(guess, answer.upper), accountant=answer.accountant)
        guess = answer.upper * (1 + 1e-7)
    raise AccountingError(
        f"the probability that a batch is truncated must be far below δ, got {truncated:.2g}. "
        "Raise the largest batch size."
    )


@double_precision("δ")
def delta(
    event: Event,
    epsilon: float,
    *,
    neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE,
    accountant: str = "auto",
) -> Interval:
    """The δ of an event at a given ε ≥ 0: an interval that contains the truth.

    Args and errors are those of `epsilon`.

    Example:
        >>> from sordino.events import Gaussian
        >>> round(delta(Gaussian(noise_multiplier=3.730631634815942), 1.0).upper, 12)
        1e-05
    """
    neighboring_relation = NeighboringRelation(neighboring_relation)
    epsilon = checks.non_negative(epsilon=epsilon)
    chosen = None if accountant == "auto" else get_accountant(accountant)
    choices, truncated = bounding_events(event, neighboring_relation)
    answer = _worst([_delta(choice, epsilon, neighboring_relation, chosen) for choice in choices])
    if truncated > 0:
        more = truncated * (1 + math.exp(min(epsilon, 700.0)))
        return replace(answer, lower=0.0, upper=min(1.0, answer.upper + more))
    return answer


def epsilon_by_accountant(
    event: Event,
    delta: float,
    *,
    neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE,
) -> dict[str, float]:
    """The reported ε by every accountant that supports the event, by name.

    Example:
        >>> from sordino.events import Gaussian
        >>> {"closed_form", "contour", "rdp"} <= set(epsilon_by_accountant(Gaussian(noise_multiplier=1.0), 1e-5))
        True
    """
    answers: dict[str, float] = {}
    for known in _all_accountants():
        try:
            answers[known.name] = epsilon(
                event, delta, neighboring_relation=neighboring_relation, accountant=known.name
            ).upper
        except (AccountingError, UnsupportedEvent):
            continue
    return answers


# ── one alternative ─────────────────────────────────────────────────────────────────────────────────────────


def _epsilon(
    event: Event, delta: float, neighboring_relation: NeighboringRelation, chosen: Accountant[Any] | None
) -> Interval:
    steps = flatten(event, neighboring_relation)
    if delta == 1 or steps.empty:
        return _exactly(0.0, 0.0, steps, chosen)
    if steps.non_private:
        return _exactly(math.inf, math.inf, steps, chosen)
    if delta == 0:
        return _exactly(*_pure(steps, neighboring_relation), steps, chosen)
    if _chance_of_use(steps) <= delta:
        return _exactly(0.0, 0.0, steps, chosen)
    return _ask(event, neighboring_relation, chosen, lambda known, one: known.epsilon(one, delta, neighboring_relation))


def _delta(
    event: Event, epsilon: float, neighboring_relation: NeighboringRelation, chosen: Accountant[Any] | None
) -> Interval:
    steps = flatten(event, neighboring_relation)
    if steps.empty:
        return _exactly(0.0, 0.0, steps, chosen)
    if steps.non_private:
        return _exactly(1.0, 1.0, steps, chosen)
    return _ask(event, neighboring_relation, chosen, lambda known, one: known.delta(one, epsilon, neighboring_relation))


def _exactly(lower: float, upper: float, steps: EventCounts, chosen: Accountant[Any] | None) -> Interval:
    """An answer that no accountant had to compute."""
    label = "exact" if chosen is None else chosen.name
    return Interval(lower=0.0 if steps.upper_bound_only else lower, upper=upper, accountant=label)


def _worst(answers: list[Interval]) -> Interval:
    """That of the alternative which costs most."""
    return replace(max(answers, key=lambda one: one.upper), lower=max(one.lower for one in answers))


def _ask(
    event: Event, neighboring_relation: NeighboringRelation, chosen: Accountant[Any] | None, question: _Question
) -> Interval:
    """The chosen accountant's answer, or the best of all; without a lower end where the steps only bound the event."""
    answer = _asked(event, neighboring_relation, chosen, question)
    return replace(answer, lower=0.0) if flatten(event, neighboring_relation).upper_bound_only else answer


def _asked(
    event: Event, neighboring_relation: NeighboringRelation, chosen: Accountant[Any] | None, question: _Question
) -> Interval:
    if chosen is not None:
        if not _supports(chosen, event, neighboring_relation):
            raise chosen.refusal(event, neighboring_relation)
        return _answer(chosen, event, question)
    refusal: AccountingError | None = None
    best: Interval | None = None
    only_bounded = flatten(event, neighboring_relation).upper_bound_only
    for known in _CURRENT:
        if known.automatic and _supports(known, event, neighboring_relation):
            try:
                answer = _answer(known, event, question)
            except AccountingError as error:
                refusal = error
                continue
            # Several intervals that contain the truth intersect in one that does.
            lower = max(answer.lower, best.lower if best else 0.0)
            best = answer if best is None or answer.upper < best.upper else best
            best = replace(best, lower=min(lower, best.upper))
            # Where every accountant works from an upper bound of its own, all are asked for the smallest.
            if not only_bounded and best.width <= _NARROW * best.upper:
                return best
    if best is not None:
        return best
    if refusal is not None:
        raise refusal
    raise UnsupportedEvent(
        f"event must be supported by some accountant under {neighboring_relation.describe()}, got {event.kind}. "
        "No sound answer is known here."
    )


def _supports(known: Accountant[Any], event: Event, neighboring_relation: NeighboringRelation) -> bool:
    try:
        with double_precision("the event's distribution"):
            return known.supports(event, neighboring_relation)
    except AccountingError:
        return False


def _answer(known: Accountant[Any], event: Event, question: _Question) -> Interval:
    """What one accountant says; numbers that are none are no answer."""
    with double_precision(f"the {known.name} accountant's answer"):
        answer = question(known, event)
        if math.isnan(answer.upper) or math.isnan(answer.lower):
            raise ValueError
        return answer


def _chance_of_use(steps: EventCounts) -> float:
    """A bound on the probability that the record is used at all: δ(0), and so ε = 0 at every δ above it."""
    total = 0.0
    for event, count in steps.counts:
        match event:
            case PoissonSampled():
                rate = event.sample_rate
            case SampledWithoutReplacement():
                rate = event.sample_size / event.dataset_size
            case _:
                return 1.0
        total += rate * count * (1 + 1e-15)
    return total * (1 + 1e-12)


def _pure(steps: EventCounts, neighboring_relation: NeighboringRelation) -> tuple[float, float]:
    """ε at δ = 0: the largest losses add up; infinite as soon as one step's loss is unbounded."""
    if any(_is_unbounded(event) for event, _ in steps.counts):
        return math.inf, math.inf
    try:
        parts = parameters(steps, neighboring_relation)
    except UnsupportedEvent:
        return 0.0, math.inf
    if any(delta > 0 for _, delta, _ in parts):
        return 0.0, math.inf
    total = math.fsum(count * epsilon for epsilon, _, count in parts)
    return total * (1 - 1e-14), total * (1 + 1e-14)


def _is_unbounded(event: Event) -> bool:
    """Whether the loss is certainly unbounded: Gaussian noise takes part."""
    inner = getattr(event, "event", event)
    return "Gaussian" in type(inner).__name__
