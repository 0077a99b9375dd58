"""Noise that changes from step to step: schedules that make the least of a budget, in closed form or learned.

Every function returns a schedule of `sordino.schedules`, or numbers to make one of; a `Plan` takes it as any other.
"""

import copy
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Self, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from sordino import checks
from sordino.errors import InvalidArgument
from sordino.mechanisms.tensor_noise import standard_normal
from sordino.randomness import KeyedRNG, RandomStream
from sordino.schedules import ListSchedule

# ----------------------------------------------------------------------------------------------------------------------
# How much the noise of each step costs at the end, and the schedule that makes the least of it.
#
# Full-batch noisy gradient descent on a loss that is M-smooth and satisfies the Polyak–Łojasiewicz condition with μ:
# the noise of step t (from 0, of T) reaches the end damped by γ^(T−1−t), γ = 1 − μ/M. With Σ σ_t⁻² = R fixed, which is
# a zCDP budget of R/2, the bound on the excess risk is
#
#     EER / (f₁ − f*) ≤ γ^T + R Σ_t q_t σ_t²        q_t = γ^(T−1−t) α      (theorem 3.2)
#
# and the least of it is (Σ √q_t)² at σ_t² = (1/R) Σ_i √(q_i / q_t)             (lemma 3.1).
#
# References:
#     Hong, Wang, Zhou 2022, "Dynamic privacy budget allocation improves data efficiency of differentially private
#     gradient descent".
# ----------------------------------------------------------------------------------------------------------------------


def noise_to_signal(
    *, dimensions: int, lipschitz: float, budget: float, smoothness: float, records: float, excess: float
) -> float:
    """α = D G² / (2 R M N² (f₁ − f*)): how large noise is relative to what there is to gain.

    Args:
        dimensions: D, number of parameters.
        lipschitz: G, bound on a record's gradient norm (the clipping norm).
        budget: R = Σ σ_t⁻² > 0; the run is (R/2)-zCDP.
        smoothness: M > 0.
        records: public number N of records.
        excess: f₁ − f* > 0, loss above the optimum at the start.

    Example:
        >>> noise_to_signal(dimensions=10, lipschitz=1.0, budget=0.5, smoothness=1.0, records=100.0, excess=1.0)
        0.001
    """
    squares = checks.positive(lipschitz=lipschitz) ** 2
    below = 2 * checks.positive(budget=budget) * checks.positive(smoothness=smoothness)
    below *= checks.positive(records=records) ** 2 * checks.positive(excess=excess)
    return checks.integer(1, dimensions=dimensions) * squares / below


def noise_influence(steps: int, *, condition_number: float, alpha: float = 1.0) -> tuple[float, ...]:
    """q_t = γ^(T−1−t) α for t = 0, …, T−1, with γ = 1 − 1/κ: late noise counts most.

    Args:
        steps: T ≥ 1.
        condition_number: κ = M/μ > 1.
        alpha: `noise_to_signal`, > 0; a factor common to all steps does not move the best schedule.

    Example:
        >>> noise_influence(3, condition_number=2.0)
        (0.25, 0.5, 1.0)
    """
    gamma = _gamma(condition_number)
    alpha = checks.positive(alpha=alpha)
    return tuple(alpha * gamma ** (steps - 1 - step) for step in range(checks.integer(1, steps=steps)))


def momentum_influence(
    steps: int, *, condition_number: float, momentum: float, learning_rate: float = 1.0
) -> tuple[float, ...]:
    """q_t = (β^(2(T−t)) − γ^(T−t)) / (β² − γ) with debiased momentum β, γ = 1 − η₀/κ: a hump before the end.

    Args:
        steps: T ≥ 1.
        condition_number: κ = M/μ > 1.
        momentum: β in (0, 1).
        learning_rate: η₀ in units of 1/M, in (0, 1].

    References:
        Hong, Wang, Zhou 2022, theorem 3.4.
    """
    beta = checks.probability(zero=False, one=False, momentum=momentum)
    rate = checks.probability(zero=False, learning_rate=learning_rate)
    gamma = 1 - rate / checks.in_range(1.0, math.inf, condition_number=condition_number)
    # The quotient is Σ_k β^(2k) γ^(n−1−k), added up so that nothing cancels where β² is near γ.
    found = [1.0]
    for count in range(1, checks.integer(1, steps=steps)):
        found.append(gamma * found[-1] + beta ** (2 * count))
    return tuple(reversed(found))


def constant_noise_schedule(steps: int, *, budget: float) -> ListSchedule:
    """σ_t² = T/R at every step: the same zCDP budget R/2, spent evenly."""
    return ListSchedule(values=(math.sqrt(steps / checks.positive(budget=budget)),) * checks.integer(1, steps=steps))


def optimal_noise_schedule(influences: Sequence[float], *, budget: float) -> ListSchedule:
    """The noise multipliers with Σ σ_t⁻² = R that make Σ q_t σ_t² least: σ_t² = (1/R) Σ_i √(q_i / q_t).

    Guarantee: fixed before the run from q alone; a run of plain Gaussian steps with these multipliers is (R/2)-zCDP.
    Subsampled steps cost what the accountant says of each.

    Args:
        influences: q_t > 0 of each step, in order.
        budget: R > 0.

    Example:
        >>> noise = optimal_noise_schedule(noise_influence(2, condition_number=4 / 3), budget=1.0)
        >>> [round(value**2, 6) for value in noise.values]
        [3.0, 1.5]

    References:
        Hong, Wang, Zhou 2022, lemma 3.1.
    """
    roots = [math.sqrt(checks.positive(influences=value)) for value in influences]
    if not roots:
        raise InvalidArgument("influences must hold a number for every step, got none. Give at least one.")
    total = math.fsum(roots) / checks.positive(budget=budget)
    return ListSchedule(values=tuple(math.sqrt(total / root) for root in roots))


def momentum_effect(*, condition_number: float, momentum: float, learning_rate: float = 1.0) -> float:
    """ζ: the sign of what momentum itself adds to the bound, η₀ ζ Σ_t γ^(T−t)·‖v_t+1‖²; at most 0 it only helps.

    ζ = 4βγη₀² / ((γ − β)²(1 − β)³) + η₀/2 − 1 with γ = 1 − η₀/κ, for η₀ in units of 1/M; ∞ where γ ≤ β, for which the
    theorem says nothing.

    Args:
        condition_number: κ = M/μ > 1.
        momentum: β in (0, 1).
        learning_rate: η₀ in units of 1/M, in (0, 1].

    Example:
        >>> round(momentum_effect(condition_number=20.0, momentum=0.5, learning_rate=0.1), 4)
        -0.3003

    References:
        Hong, Wang, Zhou 2022, theorem 3.4.
    """
    beta = checks.probability(zero=False, one=False, momentum=momentum)
    rate = checks.probability(zero=False, learning_rate=learning_rate)
    gamma = _gamma(condition_number, rate)
    if gamma <= beta:
        return math.inf
    return 4 * beta * gamma * rate**2 / ((gamma - beta) ** 2 * (1 - beta) ** 3) + rate / 2 - 1


def max_momentum_learning_rate(*, condition_number: float, momentum: float) -> float:
    """The largest η₀, in units of 1/M, up to which `momentum_effect` is at most 0.

    The root of ζ itself, found by bisection: for β ≥ ½ it is below the closed form that is usually quoted,
    (β(1 − β)³/8)·(√(1/4 + 16/(β(1 − β)³)) − 1), which leaves κ out.

    Example:
        >>> rate = max_momentum_learning_rate(condition_number=20.0, momentum=0.5)
        >>> round(rate, 4), abs(momentum_effect(condition_number=20.0, momentum=0.5, learning_rate=rate)) < 1e-6
        (0.1201, True)
    """
    # ζ grows with η₀ as long as it is finite: its first term does, as γ falls towards β, and so does its second.
    low, high = 0.0, 1.0
    if momentum_effect(condition_number=condition_number, momentum=momentum) <= 0:
        return high
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        if momentum_effect(condition_number=condition_number, momentum=momentum, learning_rate=middle) <= 0:
            low = middle
        else:
            high = middle
    return low


def excess_risk_bound(
    noise: Sequence[float],
    *,
    condition_number: float,
    alpha: float,
    influences: Sequence[float] | None = None,
    momentum: float = 0.0,
    learning_rate: float = 1.0,
    velocities: Sequence[float] | None = None,
) -> float:
    """γ^T + α·R·Σ_t q_t σ_t², the bound on the final excess risk over that of the start, R = Σ σ_t⁻², γ = 1 − η₀/κ.

    Lay schedules of one budget side by side with it: the smaller bound promises more. Plain descent has q_t = η₀²·
    γ^(T−1−t). With debiased momentum q_t = 4η₀ times `momentum_influence`, and η₀ ζ Σ_t γ^(T−t)·‖v_t+1‖² is added, ζ
    from `momentum_effect`.

    Args:
        noise: σ_t of each step.
        condition_number: κ > 1.
        alpha: `noise_to_signal` for the budget R of this schedule, > 0.
        influences: q_t of each step, in place of those named above, without the factor α.
        momentum: β in [0, 1); 0 for plain descent.
        learning_rate: η₀ in units of 1/M, in (0, 1].
        velocities: ‖v_t+1‖² of each step over M times the excess risk of the start, on public data; without them the
            momentum's own term is left out where it is at most 0, and refused where it isn't.

    Raises:
        InvalidArgument: the learning rate is above `max_momentum_learning_rate` and no velocities are given.

    Example:
        >>> noise = constant_noise_schedule(10, budget=0.1)
        >>> round(excess_risk_bound(noise.values, condition_number=5.0, alpha=0.001), 4)
        0.152
        >>> momentum = {"momentum": 0.5, "learning_rate": 0.1}
        >>> round(excess_risk_bound(noise.values, condition_number=5.0, alpha=0.001, **momentum), 4)
        0.8644

    References:
        Hong, Wang, Zhou 2022, theorems 3.2 and 3.4.
    """
    steps, alpha = len(noise), checks.positive(alpha=alpha)
    beta = checks.probability(one=False, momentum=momentum)
    rate = checks.probability(zero=False, learning_rate=learning_rate)
    gamma = _gamma(condition_number, rate)
    own = 0.0
    if beta > 0:
        effect = momentum_effect(condition_number=condition_number, momentum=beta, learning_rate=rate)
        if velocities is not None:
            powers = (gamma ** (steps - 1 - step) for step in range(steps))
            own = rate * effect * math.fsum(p * v for p, v in zip(powers, velocities, strict=True))
        elif effect > 0:
            largest = max_momentum_learning_rate(condition_number=condition_number, momentum=beta)
            raise InvalidArgument(
                f"learning_rate must be ≤ {largest:.4g} for momentum={beta:g} and condition_number="
                f"{condition_number:g}, got {rate:g}. Lower it, or give velocities: momentum's own term counts there."
            )
    if influences is not None:
        weights: Sequence[float] = influences
    elif beta > 0:
        shape = momentum_influence(steps, condition_number=condition_number, momentum=beta, learning_rate=rate)
        weights = [4 * rate * weight for weight in shape]
    else:
        weights = [rate**2 * gamma ** (steps - 1 - step) for step in range(steps)]
    budget = math.fsum(checks.positive(noise=sigma) ** -2 for sigma in noise)
    spent = math.fsum(weight * sigma**2 for weight, sigma in zip(weights, noise, strict=True))
    return gamma**steps + alpha * budget * spent + own


def optimal_steps(*, condition_number: float, alpha: float, dynamic: bool) -> int:
    """The number of steps T* that makes the bound least, for uniform noise or the best dynamic noise.

    uniform: the T of least γ^T + α T (1 − γ^T)/(1 − γ); dynamic: of γ^T + α ((1 − γ^(T/2))/(1 − √γ))². The published
    closed forms, T* = ⌈log_γ(κα / ln(1/γ))⌉ and ⌈2 log_γ(α / (α + (1 − √γ)²))⌉, drop a term of the first and round up;
    here all whole numbers are compared. 0 says that any step adds more noise than it gains.

    Example:
        >>> optimal_steps(condition_number=10.0, alpha=1e-4, dynamic=True)
        63

    References:
        Hong, Wang, Zhou 2022, section 3.2.
    """
    gamma, alpha = _gamma(condition_number), checks.positive(alpha=alpha)

    def bound(steps: int) -> float:
        if dynamic:
            return gamma**steps + alpha * ((1 - gamma ** (steps / 2)) / (1 - math.sqrt(gamma))) ** 2
        return gamma**steps + alpha * steps * (1 - gamma**steps) / (1 - gamma)

    # At γ^T = α the noise alone is more than all that is left to gain.
    farthest = math.ceil(math.log(min(alpha, 0.5)) / math.log(gamma)) + 1
    return min(range(farthest + 1), key=bound)


def _gamma(condition_number: float, learning_rate: float = 1.0) -> float:
    if not checks.positive(condition_number=condition_number) > 1:
        raise InvalidArgument(f"condition_number must be above 1, got {condition_number:g}.")
    return 1 - learning_rate / condition_number


# ----------------------------------------------------------------------------------------------------------------------
# Learning to protect: noise and learning rate of each step, learned on a public task and taken elsewhere.
# ----------------------------------------------------------------------------------------------------------------------


_SCHEMA = 1
_Policy = TypeVar("_Policy")
_SLOWEST = 0.03  # of the learning rate that was given; the learned one stays within this factor and its inverse


@dataclass(frozen=True, kw_only=True)
class LearnedSchedule:
    """A shape of the noise and learning rates, one number a step each.

    Guarantee: learned from public records. On a private task it reads the number of the step and nothing else, so a
    plan with it costs what its noise multipliers cost, step by step.

    Args:
        noise_multiplier: noise multipliers up to a common factor, each > 0; for ``Plan.for_epsilon(noise_shape=…)``.
        learning_rate: each > 0.

    Example:
        >>> policy = LearnedSchedule(noise_multiplier=(2.0, 1.0), learning_rate=(0.5, 0.25))
        >>> LearnedSchedule.from_json(policy.to_json()) == policy
        True
        >>> policy.learning_rate_schedule().relative(2)(1)
        0.5
    """

    noise_multiplier: tuple[float, ...]
    learning_rate: tuple[float, ...]

    def __post_init__(self) -> None:
        for name in ("noise_multiplier", "learning_rate"):
            values = tuple(checks.positive(**{name: value}) for value in getattr(self, name))
            object.__setattr__(self, name, values)
        if not self.noise_multiplier or len(self.noise_multiplier) != len(self.learning_rate):
            raise InvalidArgument("noise and learning_rate must hold one number for each step, got other lengths.")

    def noise_shape(self) -> ListSchedule:
        """The noise's shape; a plan scales it to its budget."""
        return ListSchedule(values=self.noise_multiplier)

    def learning_rate_schedule(self) -> ListSchedule:
        """The learning rate of each step."""
        return ListSchedule(values=self.learning_rate)

    def to_json(self) -> str:
        """The policy as JSON."""
        return policy_to_json(self)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """What `to_json` wrote; anything else raises `InvalidArgument`."""
        return policy_from_json(cls, text)


def policy_to_json(policy: object) -> str:
    """A dataclass of numbers and tuples of numbers as JSON."""
    return json.dumps({"schema": _SCHEMA, **asdict(cast("Any", policy))})


def policy_from_json(kind: type[_Policy], text: str) -> _Policy:
    """What `policy_to_json` wrote of a `kind`; anything else raises `InvalidArgument`."""
    try:
        body = json.loads(text)
    except json.JSONDecodeError:
        body = None
    names = {item.name for item in fields(cast("Any", kind))}
    if not isinstance(body, dict) or set(body) != {"schema", *names} or body.pop("schema") != _SCHEMA:
        raise InvalidArgument(f"policy must be JSON with {', '.join(sorted(names))}, schema {_SCHEMA}. Check the file.")
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in body.items()})


def learn_schedule(
    model: nn.Module,
    loss: Callable[..., Tensor],
    public_data: Sequence[Tensor],
    *,
    steps: int,
    budget: float,
    max_grad_norm: float,
    expected_batch_size: float,
    learning_rate: float,
    rounds: int = 40,
    knots: int = 5,
    draws: int = 2,
    rng: KeyedRNG | None = None,
) -> LearnedSchedule:
    """Unroll private full-batch training on a public task, and descend on what the schedule makes of its last loss.

        θ_{t+1} = θ_t − η_t [ Σ_i clip_C(∇ℓ_i) / B + N(0, (σ_t C / B)² I) · ]      Σ_t σ_t⁻² = R                  (1)

    log σ_t and log η_t are straight between a few knots; σ is scaled to the budget in every round, so no penalty is
    needed. The gradient goes through all steps, clipping included. Half of the public records are trained on, the last
    loss is that of the other half.

    Guarantee: `public_data` is read without protection: give public records. The policy that comes back is public.

    Args:
        model: where training starts, of any kind that ``torch.func`` can run; it is left alone.
        loss: ``loss(model, *batch)``, one value per record.
        public_data: equally long tensors, public; a few hundred records do.
        steps: T ≥ 1.
        budget: R > 0 of the private task, Σ σ_t⁻²: a full-batch run is (R/2)-zCDP.
        max_grad_norm: C > 0.
        expected_batch_size: B > 0 of the *private* task, so that the noise is as strong as it will be there.
        learning_rate: where η begins.
        rounds: of the outer descent, ≥ 1.
        knots: ≥ 2.
        draws: of the noise in a round, ≥ 1.
        rng: of the noise; fresh when None.

    Example:
        >>> features = torch.linspace(-1, 1, 8)[:, None]
        >>> def logistic(model, x, y):
        ...     return nn.functional.softplus(-y * model(x)[:, 0])
        >>> policy = learn_schedule(nn.Linear(1, 1), logistic, (features, features[:, 0].sign()), steps=3, budget=1.0,
        ...     max_grad_norm=1.0, expected_batch_size=100.0, learning_rate=1.0, rounds=2)
        >>> len(policy.noise_multiplier), round(sum(value**-2 for value in policy.noise_multiplier), 6)
        (3, 1.0)

    References:
        Hong, Wang, Zhou 2021, "Learning to protect: learning to protect privacy by gradient perturbation schedules",
        section 4. There the schedule is a recurrent network that also reads a private norm, which is charged; here it
        reads the number of the step only, and nothing has to be charged.
    """
    count = checks.integer(1, steps=steps)
    checks.positive(budget=budget)
    unroll = _Unrolled(model, loss, public_data, checks.positive(max_grad_norm=max_grad_norm))
    spread = max_grad_norm / checks.positive(expected_batch_size=expected_batch_size)
    # The matrix that draws straight lines between knots.
    position = torch.linspace(0, checks.integer(2, knots=knots) - 1, count, dtype=torch.float64)
    between = (1 - (position[:, None] - torch.arange(knots)).abs()).clamp_min(0)
    free = torch.zeros(2, between.shape[1], dtype=torch.float64, requires_grad=True)
    outer = torch.optim.Adam([free], lr=0.1)
    stream = (KeyedRNG() if rng is None else rng).new_stream("learned policy")
    total, kept = torch.zeros_like(free.detach()), 0
    for number in range(checks.integer(1, rounds=rounds)):
        noise, rate = _policy(free, between, budget, learning_rate)
        last = torch.stack([unroll.last_loss(noise * spread, rate, stream) for _ in range(draws)]).mean()
        if not bool(last.isfinite()):
            raise InvalidArgument("learning_rate must leave training finite, got one that doesn't. Make it smaller.")
        outer.zero_grad()
        last.backward()
        outer.step()
        # Single rounds are noisy: what comes back is the mean of the second half.
        if 2 * (number + 1) >= rounds:
            total, kept = total + free.detach(), kept + 1
    noise, rate = _policy(total / kept, between, budget, learning_rate)
    return LearnedSchedule(noise_multiplier=tuple(noise.tolist()), learning_rate=tuple(rate.tolist()))


def _policy(free: Tensor, between: Tensor, budget: float, learning_rate: float) -> tuple[Tensor, Tensor]:
    """(σ_t, η_t); Σ σ_t⁻² is the budget whatever the knots say."""
    shape = (between @ free[0]).exp()
    noise = shape * ((shape**-2).sum() / budget).sqrt()
    reach = -math.log(_SLOWEST)
    return noise, learning_rate * (reach * torch.tanh(between @ free[1] / reach)).exp()


class _Unrolled:
    """Private training on public records, with its graph."""

    def __init__(
        self, model: nn.Module, loss: Callable[..., Tensor], data: Sequence[Tensor], max_grad_norm: float
    ) -> None:
        self._model, self._loss, self._bound = model, loss, max_grad_norm
        half = len(data[0]) // 2
        if half < 1:
            raise InvalidArgument("public_data must hold at least two records, got fewer.")
        self._train = tuple(part[:half] for part in data)
        self._test = tuple(part[half:] for part in data)
        self._start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def _losses(self, parameters: dict[str, Tensor], batch: tuple[Tensor, ...]) -> Tensor:
        return functional_call(_Loss(self._model, self._loss), {f"model.{k}": v for k, v in parameters.items()}, batch)

    def _mean_clipped(self, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
        def one(chosen: dict[str, Tensor], *record: Tensor) -> Tensor:
            return self._losses(chosen, tuple(part[None] for part in record)).sum()

        dims = (None, *(0 for _ in self._train))
        rows = cast("dict[str, Tensor]", vmap(grad(one), in_dims=dims)(parameters, *self._train))
        count = len(self._train[0])
        # The small number keeps the root's slope finite where a gradient is zero.
        squares = torch.stack([row.reshape(count, -1).square().sum(1) for row in rows.values()]).sum(0)
        factors = (self._bound / (squares + 1e-12).sqrt()).clamp_max(1.0)
        return {name: torch.tensordot(factors, row, 1) / count for name, row in rows.items()}

    def last_loss(self, stddev: Tensor, rate: Tensor, stream: RandomStream) -> Tensor:
        """The held-out loss after all steps; `stddev` of the noise in each step's mean gradient."""
        parameters = {name: value.clone() for name, value in self._start.items()}
        for step in range(len(stddev)):
            gradients = self._mean_clipped(parameters)
            moved = {}
            for name, value in parameters.items():
                noise = standard_normal(value.numel(), stream, dtype=value.dtype).view(value.shape).to(value)
                update = gradients[name] + stddev[step].to(value.dtype) * noise
                moved[name] = value - rate[step].to(value.dtype) * update
            parameters = moved
        return self._losses(parameters, self._test).mean()


class _Loss(nn.Module):
    def __init__(self, model: nn.Module, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.model = model
        self._loss = loss

    def forward(self, *batch: Tensor) -> Tensor:
        return self._loss(self.model, *batch)


# ----------------------------------------------------------------------------------------------------------------------
# How much the noise of each step matters at the end, measured on public data.
#
# The influence q_t above is known in closed form for strongly convex losses only. Otherwise it can be
# measured on public records of a similar task: perturb one step, train on, and look at the last loss.
# ----------------------------------------------------------------------------------------------------------------------


_LEAST = 1e-4  # of the largest: what is lost in rounding must not become an endless schedule


def estimate_influence(
    model: nn.Module,
    loss: Callable[..., Tensor],
    public_data: Sequence[Tensor],
    *,
    steps: int,
    learning_rate: float,
    perturbation: float,
    places: int = 8,
    draws: int = 4,
    rng: KeyedRNG | None = None,
) -> tuple[float, ...]:
    """q_t by experiment: how much the final loss rises when the gradient of step t alone has noise.

    Full-batch gradient descent is run once undisturbed, and for each of some steps with noise ±ξ in that step's
    gradient: half the second difference, (f(+ξ) + f(−ξ))/2 − f(0), is what noise costs in the mean, without the linear
    part. All steps are tried with the same ξ. Between them, log q is interpolated.

    Guarantee: `public_data` is read without protection. Give records that are public; what follows from the result is
    then public too, and a private run that is planned with it pays nothing for it.

    Args:
        model: where training starts; it is left alone.
        loss: ``loss(model, *batch)``, one value per record.
        public_data: equally long tensors, public.
        steps: T ≥ 1 of the run that is planned.
        learning_rate: > 0 of the descent.
        perturbation: standard deviation of ξ in each entry of the gradient, > 0: about the noise that is expected,
            z·C/B of a step.
        places: steps that are tried, ≥ 2, spread over the run.
        draws: of ξ for each, ≥ 1.
        rng: of ξ; fresh when None.

    Returns:
        One number > 0 a step, the largest of them 1, for `optimal_noise_schedule`.

    Example:
        >>> features = torch.tensor([[1.0], [-1.0]])
        >>> def squares(model, x):
        ...     return model(x).square().sum(1)
        >>> found = estimate_influence(nn.Linear(1, 1, bias=False), squares, (features,), steps=4, learning_rate=0.25,
        ...     perturbation=0.1, places=4)
        >>> [round(value, 2) for value in found]
        [0.02, 0.06, 0.25, 1.0]

    References:
        Hong, Wang, Zhou 2022, section 5 (the influence of a step, estimated by its effect on the final loss).
    """
    count = checks.integer(1, steps=steps)
    checks.positive(learning_rate=learning_rate)
    checks.positive(perturbation=perturbation)
    tried = sorted({round(step) for step in np.linspace(0, count - 1, checks.integer(2, places=places))})
    rng = KeyedRNG() if rng is None else rng
    stream = rng.new_stream("influence")
    path = _descend(copy.deepcopy(model), loss, public_data, count, learning_rate)
    start = _mean_loss(path[-1], loss, public_data)
    size = sum(parameter.numel() for parameter in path[-1].parameters())
    noises = [
        perturbation * standard_normal(size, stream, dtype=torch.float64) for _ in range(checks.integer(1, draws=draws))
    ]
    costs: list[float] = []
    for step in tried:
        rises = []
        for noise in noises:
            ends = [
                _descend(copy.deepcopy(path[step]), loss, public_data, count - step, learning_rate, sign * noise)[-1]
                for sign in (1.0, -1.0)
            ]
            rises.append(sum(_mean_loss(end, loss, public_data) for end in ends) / 2 - start)
        costs.append(math.fsum(rises) / len(rises))
    largest = max(costs)
    if not largest > 0:
        raise InvalidArgument("perturbation must raise the final loss somewhere, got one that doesn't. Make it larger.")
    logs = np.log(np.maximum(np.array(costs) / largest, _LEAST))
    return tuple(float(value) for value in np.exp(np.interp(np.arange(count), tried, logs)))


def exponential_influence(influences: Sequence[float]) -> tuple[float, ...]:
    """The exponential q_t = e^{rate·(t − T + 1)} that is nearest to measured influences, by least squares of log q.

    Measured influences of networks are noisy; one rate is not.

    Example:
        >>> [round(value, 4) for value in exponential_influence((0.25, 0.5, 1.0))]
        [0.25, 0.5, 1.0]
    """
    logs = [math.log(checks.positive(influences=value)) for value in influences]
    if len(logs) < 2:
        raise InvalidArgument(f"influences must hold at least two steps, got {len(logs)}.")
    rate = float(np.polyfit(np.arange(len(logs)), logs, 1)[0])
    return tuple(math.exp(rate * (step - len(logs) + 1)) for step in range(len(logs)))


def _descend(
    model: nn.Module,
    loss: Callable[..., Tensor],
    data: Sequence[Tensor],
    steps: int,
    rate: float,
    first_noise: Tensor | None = None,
) -> list[nn.Module]:
    """The models before each step and after the last; the first step's gradient has `first_noise` added.

    Without noise every state is kept, since runs start from them; with noise only the last.
    """
    kept = [copy.deepcopy(model)] if first_noise is None else []
    parameters = list(model.parameters())
    for step in range(steps):
        gradients = torch.autograd.grad(loss(model, *data).mean(), parameters)
        with torch.no_grad():
            start = 0
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.sub_(gradient, alpha=rate)
                if step == 0 and first_noise is not None:
                    part = first_noise[start : start + parameter.numel()].view(parameter.shape)
                    parameter.sub_(part.to(parameter), alpha=rate)
                    start += parameter.numel()
        if first_noise is None:
            kept.append(copy.deepcopy(model))
    return kept or [model]


@torch.no_grad()
def _mean_loss(model: nn.Module, loss: Callable[..., Tensor], data: Sequence[Tensor]) -> float:
    return float(loss(model, *data).double().mean())
