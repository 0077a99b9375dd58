"""Runs whose ε is a budget that a filter kept, and not what a plan adds up to (floor 6).

The transcript holds what each step asked for and got. From it the filter is asked again, line by line, and what was
really done is composed by an accountant that knows nothing of filters: it must come to no more than the budget.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sordino import checks
from sordino.accounting import Interval
from sordino.accounting.filters import ConcentratedFilter, GaussianFilter, RenyiFilter
from sordino.definitions import Guarantee, NeighboringRelation
from sordino.errors import InvalidArgument, SordinoError
from sordino.events import ApproximateDP, Event, Gaussian, PoissonSampled, ProjectedGaussian, ZeroConcentratedDP
from sordino.runs import Line
from sordino.verification.items import Item, failed, passed
from sordino.verification.worded import wrong_budget_words

__all__ = ["Budget", "budget_of", "check_claim", "check_requests"]

_ROOM = 1e-9  # rounding between two computations of one number
_KINDS = ("gaussian", "zcdp", "renyi")


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What run.json says of the budget.

    Args:
        epsilon: of the whole run.
        delta: of the whole run.
        filter: "gaussian", "zcdp" or "renyi".
        order: the Rényi order that was fixed before the first step, or None.
        relation: the plan's neighbouring relation.
    """

    epsilon: float
    delta: float
    filter: str
    order: float | None
    relation: NeighboringRelation

    def made(self) -> GaussianFilter | ConcentratedFilter | RenyiFilter:
        """The filter as it was before the first step."""
        options = {"epsilon": self.epsilon, "delta": self.delta, "relation": self.relation}
        match self.filter:
            case "gaussian":
                return GaussianFilter(**options)
            case "zcdp":
                return ConcentratedFilter(**options)
            case _:
                assert self.order is not None
                return RenyiFilter(**options, order=self.order)

    @property
    def words(self) -> str:
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


def budget_of(meta: Mapping[str, object], plan: Mapping[str, object]) -> Budget | None:
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
    return Budget(
        epsilon=checks.positive(epsilon=body["epsilon"]),
        delta=checks.probability(zero=False, one=False, delta=body["delta"]),
        filter=kind,
        order=checks.positive(order=body["order"]) if kind == "renyi" else None,
        relation=NeighboringRelation(str(plan["neighboring_relation"])),
    )


def check_requests(plan: Mapping[str, object], budget: Budget, lines: tuple[Line, ...], ends: bool = True) -> Item:
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
    budget: Budget,
    claim: Guarantee | None,
    sentence: str,
    realised: Interval,
) -> Item:
    """Whether the run claims its budget, and what it did comes to no more.

    Args:
        plan: what the last segment planned.
        plans: plan.json, and what segments state in its place.
        budget: what was fixed before the first step.
        claim: guarantee.json.
        sentence: the claim in words, as it was written.
        realised: ε of the transcript, composed as if it had been fixed in advance; torn lines left out.
    """
    told = f"the budget is ε = {budget.epsilon:.6g}; what was done comes to {realised.upper:.6g}"
    if budget.delta != plan.get("delta"):
        return failed("guarantee", "the budget's δ is not the plan's")
    if not math.isfinite(realised.upper) or realised.upper > budget.epsilon * (1 + _ROOM):
        return failed("guarantee", told)
    if claim is None:
        return passed("guarantee", f"guarantee.json was not written; {told}")
    if (claim.epsilon, claim.delta) != (budget.epsilon, budget.delta):
        return failed("guarantee", f"it states ε = {claim.epsilon:.9g} at δ = {claim.delta:g}, and {told}")
    for name, value in (("neighboring_relation", claim.relation), ("privacy_unit", claim.unit)):
        if plan.get(name) != value:
            return failed("guarantee", f"{name} is not the plan's")
    if sentence != claim.sentence():
        return failed("guarantee", "its sentence says something else than its numbers")
    differing = wrong_budget_words(plans, claim, budget.words)
    if differing is not None:
        return failed("guarantee", differing)
    return passed("guarantee", told)
