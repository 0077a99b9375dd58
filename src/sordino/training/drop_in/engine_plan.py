"""The plan of an engine from what `make_private` is given (floor 3): every refusal comes before a record is read."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from torch.utils.data import DataLoader

from sordino import checks
from sordino.clipping import Clipping, ProjectedClipping, clipping_called
from sordino.definitions import NeighboringRelation, PrivacyUnit
from sordino.errors import InvalidArgument
from sordino.events import Event, Nothing
from sordino.schedules import Schedule
from sordino.training.bills.adaptive import AdaptiveBudget
from sordino.training.bills.target import EpsilonTarget
from sordino.training.noise import CorrelatedNoise
from sordino.training.plan import Plan
from sordino.training.records.loader import population_of
from sordino.training.records.sizes import steps_per_epoch
from sordino.training.records.units import Units
from sordino.training.sums.adaclip import check_bounds

__all__ = ["calibrated", "check_budget", "check_together", "delta_of", "engine_plan"]

# The plan wants a δ; an engine is asked for ε at any δ afterwards and reads only the plan's events.
_ANY_DELTA = 1e-5


def engine_plan(
    data_loader: DataLoader[object],
    *,
    noise_multiplier: float | Schedule,
    max_grad_norm: float | Schedule,
    expected_batch_size: float | None,
    sample_rate: float | None,
    steps: int,
    delta: float,
    poisson_sampling: bool,
    neighboring_relation: NeighboringRelation,
    clipping: str | Clipping,
    noise: CorrelatedNoise | Literal["auto"] | None,
    units: Units | None,
    secure: bool,
) -> Plan:
    """The plan of one model.

    Raises:
        InvalidArgument: an option is out of range, or two of them don't go together.
        UnknownSampler: the loader draws in a way that can't be accounted for, or breaks the noise's participation.
    """
    records = len(population_of(data_loader)) if units is None else units.count
    rate = 1 / steps_per_epoch(data_loader, None) if sample_rate is None else sample_rate
    method = clipping_called(clipping)
    if isinstance(method, ProjectedClipping):
        raise InvalidArgument(
            "clipping must be by exact norms in a loop of your own, got ProjectedClipping. Train with sordino.fit, or "
            "use FlatClipping."
        )
    if noise == "auto":
        if not steps:
            raise InvalidArgument("noise must be None or CorrelatedNoise, got 'auto'. Use make_private_with_epsilon.")
        noise = None
    plan = Plan(
        noise_multiplier=noise_multiplier,
        max_grad_norm=max_grad_norm,
        sample_rate=rate,
        # Correlated noise has an end: its strategy is one for so many steps.
        steps=noise.strategy.steps if noise is not None and not steps else steps,
        expected_batch_size=records * rate if expected_batch_size is None else expected_batch_size,
        delta=delta,
        neighboring_relation=neighboring_relation,
        privacy_unit=PrivacyUnit.EXAMPLE if units is None or units.protects_records else PrivacyUnit.USER,
        dataset_size_is_public=sample_rate is None or expected_batch_size is None,
        poisson_sampling=poisson_sampling,
        clipping=method,
        noise=noise,
        secure_noise=secure,
    )
    check_bounds(plan, by_unit=units is not None)
    if units is not None:
        units.check(plan)
    return plan


def calibrated(
    plan: Plan, target: EpsilonTarget, *, noise: CorrelatedNoise | Literal["auto"] | None, before: Event
) -> Plan:
    """`plan` with the least noise that stays within `target` on top of `before`; "auto" also chooses its correlation.

    Raises:
        BudgetExceeded: `before` alone reaches the target.
    """
    target.check_left(before)
    if noise == "auto":
        best = Plan.for_epsilon(
            target_epsilon=target.epsilon,
            delta=plan.delta,
            sample_rate=plan.sample_rate,
            steps=plan.steps,
            max_grad_norm=plan.max_grad_norm,
            expected_batch_size=plan.expected_batch_size,
            neighboring_relation=plan.neighboring_relation,
            poisson_sampling=plan.poisson_sampling,
            clipping=plan.clipping,
            secure_noise=plan.secure_noise,
            noise="auto",
        )
        plan = replace(plan, noise=best.noise)
    earlier = None if isinstance(before, Nothing) else before
    return plan.with_noise_for(target.epsilon, accountant=target.accountant, before=earlier)


def delta_of(budget: AdaptiveBudget | None, delta: float | None = None) -> float:
    """δ for the plan; `delta` is the engine's own.

    Raises:
        InvalidArgument: a budget that names none, where the engine names none.
    """
    if budget is None or (budget.delta is None and delta is not None):
        return _ANY_DELTA if delta is None else delta
    if budget.delta is None:
        raise InvalidArgument("delta must be given in the budget of an engine, got None. Give AdaptiveBudget(delta=…).")
    return budget.delta


def check_budget(data_loader: DataLoader[object], others: Sequence[Plan]) -> None:
    """Refuse a budget where it could not be kept.

    Raises:
        InvalidArgument: worker processes would read ahead of the filter, or the engine has another model.
    """
    checks.one_of(
        (0,),
        num_workers=data_loader.num_workers,
        hint="With a budget a batch is chosen after the step before it; workers would read ahead of the filter.",
    )
    if others:
        raise InvalidArgument(
            "budget must be all that its engine spends, got one beside another model. Use one engine for each."
        )


def check_together(plan: Plan, others: Sequence[Plan], *, budgeted: bool) -> None:
    """Refuse a model whose guarantee could not be told together with those of an engine's other models.

    Raises:
        InvalidArgument: another relation or unit, or a budget that the other one holds for itself.
    """
    for name in ("neighboring_relation", "privacy_unit"):
        here = getattr(plan, name)
        if any(here is not getattr(other, name) for other in others):
            raise InvalidArgument(
                f"{name} must be the same for everything one engine makes private, got {here.value!r} besides "
                "another. Use one engine for each."
            )
    if budgeted:
        raise InvalidArgument(
            "budget must be all that its engine spends, got another model beside it. Use one engine for each."
        )
