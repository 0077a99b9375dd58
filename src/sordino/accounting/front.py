"""The front door (floor 1): check the question, pick an accountant, say which one answered.

`auto` asks, in this order: the closed form, the contour integral, the Rényi bound. An accountant that can't bound
its own error passes the question on; the answer names the one that gave it.
"""

import math
from collections.abc import Callable

from sordino import checks
from sordino.accounting.accountant import Accountant
from sordino.accounting.accountants import ClosedForm, Contour
from sordino.accounting.composition import Steps, flatten
from sordino.accounting.interval import Interval
from sordino.accounting.renyi import Renyi
from sordino.definitions import NeighboringRelation
from sordino.errors import AccountingError, UnsupportedEvent
from sordino.events import Event, Laplace

__all__ = ["ACCOUNTANTS", "accountant_named", "delta", "epsilon", "epsilons"]

ACCOUNTANTS: tuple[Accountant, ...] = (ClosedForm(), Contour(), Renyi())
"""All accountants, in the order in which `auto` asks them."""


def accountant_named(name: str) -> Accountant:
    """The accountant with this name."""
    checks.one_of([known.name for known in ACCOUNTANTS], accountant=name)
    return next(known for known in ACCOUNTANTS if known.name == name)


def epsilon(
    event: Event,
    delta: float,
    *,
    relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE,
    accountant: str = "auto",
) -> Interval:
    """The ε of an event at a given δ: an interval that contains the truth, whose upper end is reported.

    Args:
        event: what was done.
        delta: in [0, 1].
        relation: the neighbouring relation under which noise multipliers are std / sensitivity.
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
    delta = checks.probability(delta=delta, hint="A typical δ is below 1 / number of records.")
    chosen = None if accountant == "auto" else accountant_named(accountant)
    label = "exact" if chosen is None else chosen.name
    steps = flatten(event)
    if delta == 1 or steps.empty:
        return Interval(lower=0.0, upper=0.0, accountant=label)
    if steps.unprotected:
        return Interval(lower=math.inf, upper=math.inf, accountant=label)
    if delta == 0:
        pure = _pure_epsilon(steps)
        if pure is not None:
            return Interval(lower=pure * (1 - 1e-14), upper=pure * (1 + 1e-14), accountant=label)
        return Interval(lower=0.0 if _may_be_pure(steps) else math.inf, upper=math.inf, accountant=label)
    return _ask(event, relation, chosen, lambda known: known.epsilon(event, delta, relation))


def delta(
    event: Event,
    epsilon: float,
    *,
    relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE,
    accountant: str = "auto",
) -> Interval:
    """The δ of an event at a given ε ≥ 0: an interval that contains the truth.

    Args and errors are those of `epsilon`.

    Example:
        >>> from sordino.events import Gaussian
        >>> round(delta(Gaussian(noise_multiplier=3.730631634815942), 1.0).upper, 12)
        1e-05
    """
    epsilon = checks.non_negative(epsilon=epsilon)
    chosen = None if accountant == "auto" else accountant_named(accountant)
    label = "exact" if chosen is None else chosen.name
    steps = flatten(event)
    if steps.empty:
        return Interval(lower=0.0, upper=0.0, accountant=label)
    if steps.unprotected:
        return Interval(lower=1.0, upper=1.0, accountant=label)
    return _ask(event, relation, chosen, lambda known: known.delta(event, epsilon, relation))


def epsilons(
    event: Event,
    delta: float,
    *,
    relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE,
) -> dict[str, float]:
    """The reported ε by every accountant that supports the event, by name.

    Example:
        >>> from sordino.events import Gaussian
        >>> sorted(epsilons(Gaussian(noise_multiplier=1.0), 1e-5))[:2]
        ['closed_form', 'contour']
    """
    answers: dict[str, float] = {}
    for known in ACCOUNTANTS:
        if known.supports(event, relation):
            try:
                answers[known.name] = epsilon(event, delta, relation=relation, accountant=known.name).upper
            except (AccountingError, UnsupportedEvent):
                continue
    return answers


def _ask(
    event: Event, relation: NeighboringRelation, chosen: Accountant | None, question: Callable[[Accountant], Interval]
) -> Interval:
    if chosen is not None:
        if not chosen.supports(event, relation):
            raise UnsupportedEvent(
                f"event must be supported by the {chosen.name} accountant under {relation.words}, got {event.kind}. "
                "Choose accountant='auto'."
            )
        return question(chosen)
    refusal: AccountingError | None = None
    for known in ACCOUNTANTS:
        if known.supports(event, relation):
            try:
                return question(known)
            except AccountingError as error:
                refusal = error
    if refusal is not None:
        raise refusal
    raise UnsupportedEvent(
        f"event must be supported by some accountant under {relation.words}, got {event.kind}. "
        "No sound answer is known here."
    )


def _pure_epsilon(steps: Steps) -> float | None:
    """ε at δ = 0 where it is finite: the largest losses add up (Laplace only, here)."""
    if all(isinstance(event, Laplace) for event, _ in steps.counts):
        return math.fsum(count / event.noise_multiplier for event, count in steps.counts if isinstance(event, Laplace))
    return None


def _may_be_pure(steps: Steps) -> bool:
    """Whether no Gaussian takes part, so that ε at δ = 0 may be finite after all."""
    return not any("gaussian" in repr(event).lower() for event, _ in steps.counts)
