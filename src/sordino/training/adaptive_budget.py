"""Noise that follows from what was released, under a budget fixed in advance.

Each step asks a privacy filter before its batch is drawn; the first step that does not fit ends the run.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from torch import nn

from sordino import accounting, checks
from sordino.definitions import Guarantee
from sordino.errors import InvalidArgument, UnsupportedEvent
from sordino.events import ApproximateDP, Event, Gaussian, NoOp, SelfComposed, ZeroConcentratedDP
from sordino.gradients.numerics import read_numbers
from sordino.ledger import Account, Reservation
from sordino.randomness import KeyedRNG
from sordino.sampling import PoissonSampling
from sordino.training.exclusions import Option
from sordino.training.noisy_releases import NormRelease
from sordino.training.plan import Plan, StepPlan

FILTER_CAVEAT = "ε is a budget that a filter kept: the noise of each step was chosen on the way"
_FILTERS = ("auto", "gaussian", "zcdp", "renyi")
_ORDERS = (1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 32, 40, 48, 64, 96, 128, 256, 512)


@dataclass(frozen=True, kw_only=True)
class ReleasedStatistics:
    """What a choice may look at: nothing but results of earlier steps, which were released.

    Args:
        remaining: the share of the budget that is left, in [0, 1].
        last_gradient_norm: norm of the last private gradient, noise included; None before the first step.
        last_clipped_norm: norm of the last mean of clipped gradients, with separate noise; None unless it is released.
    """

    remaining: float
    last_gradient_norm: float | None
    last_clipped_norm: float | None = None


@dataclass(frozen=True, kw_only=True)
class StepParameters:
    """The values of one step; None takes the plan's.

    Args:
        noise_multiplier: > 0.
        max_grad_norm: > 0.
        sample_rate: in (0, 1]; the divisor moves in proportion.
    """

    noise_multiplier: float
    max_grad_norm: float | None = None
    sample_rate: float | None = None


_Decision = tuple[StepParameters | float, bool]


@dataclass(frozen=True, kw_only=True)
class AdaptiveBudget:
    """A budget that is spent step by step, as chosen on the way; for ``fit(…, budget=…)`` and ``make_private``.

    When: the noise of a step should depend on how training goes. A schedule that is fixed in advance costs less to
    account for and should be preferred where it does as well.

    Guarantee: whatever `choose` returns, the run is (ε, δ)-differentially private with this ε and the plan's δ,
    provided that `choose` knows of the records only what it is given. A step that does not fit is refused before its
    batch is drawn, and the run ends there.

    Args:
        epsilon: of the whole run, > 0.
        choose: ``choose(step, released)`` returns the step's noise multiplier, or a `StepParameters`.
        filter: "gaussian" adds μ² and "zcdp" adds ρ, both for full batches; "renyi" is for sampled ones, at one order
            that is best for the plan's own noise. "auto" takes gaussian for full batches and renyi otherwise.
        delta: in (0, 1); None takes the plan's. An engine, which has no plan with a δ, needs it.
        norm_budget_fraction: of each step's budget that releases the norm of its clipped sum for the next choice,
            in (0, 1): in many dimensions the norm of the private gradient is that of its noise. None releases none.

    Example:
        >>> budget = AdaptiveBudget(epsilon=1.0, choose=lambda step, released: 10.0 if step < 5 else 8.0)
        >>> budget.filter
        'auto'

    References:
        Hong, Wang, Zhou 2022, "Dynamic privacy budget allocation improves data efficiency of differentially private
        gradient descent", algorithm 1; Feldman, Zrnic 2021, theorem 4.3; Smith, Thakurta 2022.
    """

    epsilon: float
    choose: Callable[[int, ReleasedStatistics], float | StepParameters]
    filter: str = "auto"
    delta: float | None = None
    norm_budget_fraction: float | None = None

    def __post_init__(self) -> None:
        checks.positive(epsilon=self.epsilon)
        if self.norm_budget_fraction is not None:
            checks.probability(zero=False, one=False, norm_budget_fraction=self.norm_budget_fraction)
        if self.delta is not None:
            checks.probability(zero=False, one=False, delta=self.delta)
        checks.one_of(_FILTERS, filter=self.filter)


class AdaptiveBudgetRun:
    """One run under an `AdaptiveBudget`.

    Guarantee: every step that `admit` let through, together with all that was taken over, fits the budget.

    Args:
        budget: what may be spent, and how it is.
        plan: everything that isn't chosen on the way; its `steps` are the most that are taken by `fit`.

    Raises:
        InvalidArgument: the filter is not one for the plan's batches, the noise is correlated, or the budget's δ is
            not the plan's.
    """

    def __init__(self, budget: AdaptiveBudget, plan: Plan) -> None:
        norm = set() if budget.norm_budget_fraction is None else {Option.BUDGET_NORM}
        plan.check_options({Option.BUDGET} | norm)
        if budget.delta is not None and budget.delta != plan.delta:
            raise InvalidArgument(
                f"delta must be the plan's, {plan.delta!r}, got {budget.delta!r} in the budget. Leave it out."
            )
        self._budget, self._plan = budget, plan
        self._full = not plan.is_scheduled and plan.step_plan(0).sample_rate == 1
        self._kind = budget.filter if budget.filter != "auto" else "gaussian" if self._full else "renyi"
        if self._kind != "renyi" and not self._full:
            raise InvalidArgument(
                f"filter must be renyi with sampled batches, got {self._kind!r}. Use sample_rate=1, or filter='auto'."
            )
        self._order: float | None = None
        self._filter, self.accountant = self._make_filter()
        self._price(plan.step_event(0))
        self._chosen: dict[int, StepPlan] = {}
        self._last_norm: float | None = None
        self._last_clipped: float | None = None
        self.norm = (
            None if budget.norm_budget_fraction is None else NormRelease(budget_fraction=budget.norm_budget_fraction)
        )
        self._exhausted = False
        self.is_spent = False

    def _make_filter(self) -> "tuple[accounting.GDPFilter | accounting.ZCDPFilter | accounting.RDPFilter, str]":
        plan = self._plan
        bounds = {"epsilon": self._budget.epsilon, "delta": plan.delta}
        if self._kind == "gaussian":
            return accounting.GDPFilter(**bounds, neighboring_relation=plan.neighboring_relation), "Gaussian filter"
        if self._kind == "zcdp":
            return accounting.ZCDPFilter(**bounds, neighboring_relation=plan.neighboring_relation), "zCDP filter"
        filters = {
            order: accounting.RDPFilter(**bounds, order=order, neighboring_relation=plan.neighboring_relation)
            for order in _ORDERS
        }
        planned = plan.step_event(0)

        def lasts(order: float) -> float:
            cost = filters[order].cost(planned)
            return filters[order].budget / cost if cost > 0 else math.inf

        self._order = max(filters, key=lasts)
        return filters[self._order], f"Rényi filter of order {self._order:g}"

    def _price(self, event: Event) -> float:
        """What a step costs.

        Raises:
            InvalidArgument: the filter has no price for such steps.
        """
        try:
            return self._filter.cost(event)
        except UnsupportedEvent as error:
            raise InvalidArgument(
                f"clipping must be a method whose steps the {self._kind} filter can price, got "
                f"{type(self._plan.clipping).__name__}. Leave budget out, or use FlatClipping."
            ) from error

    def facts(self) -> dict[str, object]:
        """The budget in plain JSON types: what a run folder and a checkpoint say of it."""
        return {
            "epsilon": self._budget.epsilon,
            "delta": self._plan.delta,
            "filter": self._kind,
            "order": self._order,
        }

    def event(self) -> Event:
        """The whole budget as one event: what a ledger holds."""
        return self._as_event(self._filter.budget)

    def remaining_event(self) -> Event:
        """What is left of the budget as one event; all of it where the filter can't say less."""
        return self._as_event(self._filter.remaining) if self._filter.remaining > 0 else NoOp()

    def _as_event(self, amount: float) -> Event:
        match self._kind:
            case "gaussian":
                return Gaussian(noise_multiplier=1 / math.sqrt(amount))
            case "zcdp":
                return ZeroConcentratedDP(rho=amount)
            case _:
                return ApproximateDP(epsilon=self._budget.epsilon, delta=self._plan.delta)

    def charge_whole(self, ledger: Account | Reservation, *, run: str = "", receipt: str | None = None) -> str:
        """Charge the whole budget to `ledger`, unless `receipt` shows that it was; nothing is given back.

        Args:
            ledger: the dataset's account.
            run: name of the run.
            receipt: digest of the charge that an earlier segment of the run made, or None.

        Returns:
            The digest of the charge.

        Raises:
            BudgetExceeded: the budget does not fit what remains of the account; no record was read.
        """
        if receipt is not None and self._is_paid(ledger, receipt):
            return receipt
        return self._charge(ledger, self.event(), note="fit with an adaptive budget", run=run)

    def charge_remaining(self, ledger: Account | Reservation) -> str:
        """Charge what remains of the budget to `ledger`, for a loop that other runs of the same budget may precede."""
        return self._charge(ledger, self.remaining_event(), note="engine with an adaptive budget")

    def _charge(self, ledger: Account | Reservation, event: Event, *, note: str, run: str = "") -> str:
        plan = self._plan
        return ledger.charge(
            event,
            note=note,
            run=run,
            neighboring_relation=plan.neighboring_relation,
            privacy_unit=plan.privacy_unit,
        ).digest

    def _is_paid(self, ledger: Account | Reservation, receipt: str) -> bool:
        account = ledger if isinstance(ledger, Account) else Account(url=ledger.url, name=ledger.account)
        return any(
            entry.digest == receipt and entry.kind == "charge" and entry.event == self.event()
            for entry in account.history()
        )

    # --- steps ---------------------------------------------------------------------------------------------------

    def admit(
        self, step: int, *, broadcast: Callable[[Callable[[], _Decision]], _Decision] = lambda decided: decided()
    ) -> bool:
        """Ask for the values of step `step`, and charge them to the filter.

        Args:
            step: number of the step.
            broadcast: of several processes, calls its argument in one and gives the result to all: two scales on the
                same noise would disclose the clipped sum.

        Returns:
            False, and nothing is charged, if they don't fit.
        """
        asked: list[StepPlan] = []

        def decided() -> _Decision:
            given = self._budget.choose(step, self._released())
            asked.append(self._values(step, given))
            return given, not self._exhausted and self._filter.admit(self._event(asked[0]))

        given, fits = broadcast(decided)
        if not fits:
            self.is_spent = True
            return False
        self._chosen[step] = asked[0] if asked else self._values(step, given)
        if not asked:
            # Another process decided: the same is charged here, so that what is left is the same.
            self._filter.admit(self._event(self._chosen[step]))
        return True

    def take_over(self, event: Event, times: int = 1) -> None:
        """Charge what was spent of the same budget before, in an earlier segment; what does not fit ends the budget."""
        try:
            fits = self._filter.admit(SelfComposed(event=event, count=times))
        except UnsupportedEvent:
            fits = False
        self._exhausted = self._exhausted or not fits

    def draw(self, *, dataset_size: int, step: int, rng: KeyedRNG) -> np.ndarray:
        """Sorted int64 indices of the batch of an admitted step."""
        sampler = PoissonSampling(sample_rate=self._chosen[step].sample_rate)
        return sampler.draw(dataset_size=dataset_size, step=step, rng=rng)

    def step_plan(self, step: int) -> StepPlan:
        """The values of an admitted step."""
        return self._chosen[step]

    def charged_at(self, step: int) -> Event:
        """The event of an admitted step."""
        return self._event(self._chosen[step])

    def observe_gradient(self, gradients: Iterable[nn.Parameter], clipped_norm: float | None = None) -> None:
        """Take note of a private gradient that was just released, and of the norm that was released with it."""
        self._last_clipped = clipped_norm
        squares = read_numbers([p.grad.double().square().sum()[None] for p in gradients if p.grad is not None])
        self._last_norm = math.sqrt(math.fsum(square for (square,) in squares))

    def state_dict(self) -> dict[str, object]:
        """What later choices may look at, for a checkpoint: it was released. What was spent is in the transcript."""
        return {"last_gradient_norm": self._last_norm, "last_clipped_norm": self._last_clipped}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go on from `state`."""
        norms = [None if state[name] is None else float(str(state[name])) for name in self.state_dict()]
        self._last_norm, self._last_clipped = norms

    # --- the claim -----------------------------------------------------------------------------------------------

    @property
    def epsilon(self) -> float:
        """ε of the whole."""
        return self._budget.epsilon

    def describe(self) -> str:
        """The sampler as it is written in a guarantee."""
        return "full batches" if self._full else "Poisson sampling at rates chosen under the filter"

    def guarantee(self, planned: Guarantee) -> Guarantee:
        """`planned` with the budget's ε in place of its own."""
        caveats = (*planned.caveats, FILTER_CAVEAT)
        claim = {"epsilon": self._budget.epsilon, "accountant": self.accountant, "sampler": self.describe()}
        return replace(planned, **claim, caveats=caveats)

    @staticmethod
    def _event(now: StepPlan) -> Event:
        return PoissonSampling(sample_rate=now.sample_rate).event(now.event)

    def _released(self) -> ReleasedStatistics:
        whole = self._filter.budget
        remaining = self._filter.remaining / whole if whole > 0 else 0.0
        return ReleasedStatistics(
            remaining=remaining, last_gradient_norm=self._last_norm, last_clipped_norm=self._last_clipped
        )

    def _values(self, step: int, given: StepParameters | float) -> StepPlan:
        chosen = given if isinstance(given, StepParameters) else StepParameters(noise_multiplier=given)
        checks.positive(noise_multiplier=chosen.noise_multiplier)
        now = replace(self._plan.step_plan(step), noise_multiplier=chosen.noise_multiplier)
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


@dataclass(frozen=True)
class Admitted:
    """The sampler of a budget's run: each batch at the rate that was chosen for it, when it was admitted.

    Args:
        run: which admits a step before its batch is asked for.
    """

    run: AdaptiveBudgetRun

    def batches(self, *, dataset_size: int, first_step: int, steps: int, rng: KeyedRNG) -> Iterator[np.ndarray]:
        """Batches `first_step`, …, `steps` of them, each drawn when it is asked for."""
        for step in range(first_step, first_step + steps):
            yield self.run.draw(dataset_size=dataset_size, step=step, rng=rng)
