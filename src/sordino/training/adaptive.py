"""Noise that follows from what was released, under a budget fixed in advance (floor 3).

Each step asks a privacy filter before its batch is drawn; the first step that does not fit ends the run.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
from torch import nn

from sordino import checks
from sordino.accounting.filters import ConcentratedFilter, GaussianFilter, RenyiFilter
from sordino.definitions import Guarantee
from sordino.errors import InvalidArgument
from sordino.events import ApproximateDP, Event, Gaussian, Nothing, ZeroConcentratedDP
from sordino.ledger import Account, Reservation
from sordino.randomness import Randomness
from sordino.sampling import PoissonSampling
from sordino.training.plan import Plan
from sordino.training.prepaid import Prepaid
from sordino.training.step_plan import StepPlan

__all__ = ["AdaptiveBudget", "AdaptiveRun", "Released", "StepChoice"]

_FILTERS = ("auto", "gaussian", "zcdp", "renyi")
_ORDERS = (1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 32, 40, 48, 64, 96, 128, 256, 512)


@dataclass(frozen=True, kw_only=True)
class Released:
    """What a choice may look at: nothing but results of earlier steps, which were released.

    Args:
        remaining: the share of the budget that is left, in [0, 1].
        last_gradient_norm: norm of the last private gradient, noise included; None before the first step.
    """

    remaining: float
    last_gradient_norm: float | None


@dataclass(frozen=True, kw_only=True)
class StepChoice:
    """The values of one step; None takes the plan's.

    Args:
        noise_multiplier: > 0.
        max_grad_norm: > 0.
        sample_rate: in (0, 1]; the divisor moves in proportion.
    """

    noise_multiplier: float
    max_grad_norm: float | None = None
    sample_rate: float | None = None


@dataclass(frozen=True, kw_only=True)
class AdaptiveBudget:
    """A budget that is spent step by step, as chosen on the way; for ``fit(…, budget=…)``.

    When: the noise of a step should depend on how training goes. A schedule that is fixed in advance costs less to
    account for and should be preferred where it does as well.

    Guarantee: whatever `choose` returns, the run is (ε, δ)-differentially private with this ε and the plan's δ,
    provided that `choose` knows of the records only what it is given. A step that does not fit is refused before its
    batch is drawn, and the run ends there.

    Args:
        epsilon: of the whole run, > 0.
        choose: ``choose(step, released)`` returns the step's noise multiplier, or a `StepChoice`.
        filter: "gaussian" adds μ² and "zcdp" adds ρ, both for full batches; "renyi" is for sampled ones, at one order
            that is best for the plan's own noise. "auto" takes gaussian for full batches and renyi otherwise.

    Example:
        >>> budget = AdaptiveBudget(epsilon=1.0, choose=lambda step, released: 10.0 if step < 5 else 8.0)
        >>> budget.filter
        'auto'

    References:
        Hong, Wang, Zhou 2022, "Dynamic privacy budget allocation improves data efficiency of differentially private
        gradient descent", algorithm 1; Feldman, Zrnic 2021, theorem 4.3; Smith, Thakurta 2022.
    """

    epsilon: float
    choose: Callable[[int, Released], float | StepChoice]
    filter: str = "auto"

    def __post_init__(self) -> None:
        checks.positive(epsilon=self.epsilon)
        checks.one_of(_FILTERS, filter=self.filter)


class AdaptiveRun:
    """One run under an `AdaptiveBudget`.

    Guarantee: every batch that `batches` yields was admitted by the filter before it was drawn.

    Args:
        budget: what may be spent, and how it is.
        plan: everything that isn't chosen on the way; its `steps` are the most that are taken.

    Raises:
        InvalidArgument: the filter is not one for the plan's batches, or the noise is correlated.
    """

    def __init__(self, budget: AdaptiveBudget, plan: Plan) -> None:
        if plan.noise is not None or not plan.poisson_sampling:
            raise InvalidArgument(
                "budget must be None with correlated noise or without Poisson sampling, got AdaptiveBudget: their "
                "steps are charged together. Use Poisson sampling, or sample_rate=1."
            )
        self._budget, self._plan = budget, plan
        self._full = not plan.is_scheduled and plan.at(0).sample_rate == 1
        self._kind = budget.filter if budget.filter != "auto" else "gaussian" if self._full else "renyi"
        if self._kind != "renyi" and not self._full:
            raise InvalidArgument(
                f"filter must be renyi with sampled batches, got {self._kind!r}. Use sample_rate=1, or filter='auto'."
            )
        self._filter, self._accountant = self._made()
        self._chosen: dict[int, StepPlan] = {}
        self._last_norm: float | None = None
        self.is_spent = False

    def _made(self) -> tuple[GaussianFilter | ConcentratedFilter | RenyiFilter, str]:
        epsilon, delta, relation = self._budget.epsilon, self._plan.delta, self._plan.neighboring_relation
        if self._kind == "gaussian":
            return GaussianFilter(epsilon=epsilon, delta=delta, relation=relation), "Gaussian filter"
        if self._kind == "zcdp":
            return ConcentratedFilter(epsilon=epsilon, delta=delta, relation=relation), "zCDP filter"
        planned = self._plan.step_event(0)

        def lasts(order: float) -> float:
            made = RenyiFilter(epsilon=epsilon, delta=delta, order=order, relation=relation)
            cost = made.cost(planned)
            return made.budget / cost if cost > 0 else math.inf

        order = max(_ORDERS, key=lasts)
        made = RenyiFilter(epsilon=epsilon, delta=delta, order=order, relation=relation)
        return made, f"Rényi filter of order {order:g}"

    def event(self) -> Event:
        """The whole budget as one event: what a ledger holds."""
        match self._kind:
            case "gaussian":
                return Gaussian(noise_multiplier=1 / math.sqrt(self._filter.budget))
            case "zcdp":
                return ZeroConcentratedDP(rho=self._filter.budget)
            case _:
                return ApproximateDP(epsilon=self._budget.epsilon, delta=self._plan.delta)

    @contextmanager
    def paid(self, ledger: Account | Reservation | None, *, run: str = "") -> Iterator[Prepaid]:
        """Charge the whole budget at the start; nothing is given back."""
        relation, unit = self._plan.neighboring_relation, self._plan.privacy_unit
        if ledger is not None:
            ledger.charge(self.event(), note="fit with an adaptive budget", run=run, relation=relation, unit=unit)
        yield Prepaid(None, lambda _: Nothing(), note="", relation=relation, unit=unit)

    def batches(self, *, population: int, steps: int, randomness: Randomness) -> Iterator[np.ndarray]:
        """Batch after batch, until the plan's steps or the budget are used up."""
        for step in range(steps):
            now = self._choice(step)
            if not self._filter.admit(self._event(now)):
                self.is_spent = True
                return
            self._chosen[step] = now
            sampler = PoissonSampling(sample_rate=now.sample_rate)
            yield sampler.draw(population=population, step=step, randomness=randomness)

    def at(self, step: int) -> StepPlan:
        """The values of an admitted step."""
        return self._chosen[step]

    def charged_at(self, step: int) -> Event:
        """The event of an admitted step."""
        return self._event(self._chosen[step])

    def learn(self, gradients: Iterable[nn.Parameter]) -> None:
        """Take note of a private gradient that was just released."""
        squares = [p.grad.double().square().sum() for p in gradients if p.grad is not None]
        self._last_norm = math.sqrt(math.fsum(float(square) for square in squares))

    @property
    def epsilon(self) -> float:
        """ε of the whole."""
        return self._budget.epsilon

    def guarantee(self, planned: Guarantee) -> Guarantee:
        """`planned` with the budget's ε in place of its own."""
        sampler = "full batches" if self._full else "Poisson sampling at rates chosen under the filter"
        return replace(planned, epsilon=self._budget.epsilon, accountant=self._accountant, sampler=sampler)

    @staticmethod
    def _event(now: StepPlan) -> Event:
        return PoissonSampling(sample_rate=now.sample_rate).event(now.event)

    def _choice(self, step: int) -> StepPlan:
        whole = self._filter.budget
        remaining = self._filter.remaining / whole if whole > 0 else 0.0
        given = self._budget.choose(step, Released(remaining=remaining, last_gradient_norm=self._last_norm))
        chosen = given if isinstance(given, StepChoice) else StepChoice(noise_multiplier=given)
        checks.positive(noise_multiplier=chosen.noise_multiplier)
        now = replace(self._plan.at(step), noise_multiplier=chosen.noise_multiplier)
        if chosen.max_grad_norm is not None:
            now = replace(now, max_grad_norm=chosen.max_grad_norm)
        if chosen.sample_rate is not None and chosen.sample_rate != now.sample_rate:
            if self._kind != "renyi":
                raise InvalidArgument(
                    f"sample_rate must stay 1 under the {self._kind} filter, got {chosen.sample_rate!r}. "
                    "Use filter='renyi'."
                )
            size = now.expected_batch_size * chosen.sample_rate / now.sample_rate
            now = replace(now, sample_rate=chosen.sample_rate, expected_batch_size=size)
        return now
