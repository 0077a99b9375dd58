"""Noise, clipping norm, learning rate, sample rate, number of steps and update rule of a run, learned together.

`learn_policy` searches on public tasks; what it finds is a plan and an optimizer of any private run. The policy reads
nothing of the private records but the private gradient, so the accountant of the plan charges all of it.
"""

import math
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, fields
from typing import ClassVar, Self, final

import numpy as np
import torch
from torch import Tensor

from sordino import checks
from sordino.errors import InvalidArgument
from sordino.mechanisms.tensor_noise import standard_normal
from sordino.optimizers import GradientFilter
from sordino.randomness import KeyedRNG
from sordino.research.noise_schedules import policy_from_json, policy_to_json
from sordino.schedules import ListSchedule
from sordino.training import Plan

_INPUTS, _HIDDEN = 3, 4
_WEIGHTS = _INPUTS + _HIDDEN * (_INPUTS + 2)  # straight path; for each hidden unit its inputs, offset and output
_IDENTITY = (1.0, 0.0, 0.0, *(0.0 for _ in range(_WEIGHTS - _INPUTS)))
_FAST, _SLOW = 0.5, 0.9


@final
@dataclass(frozen=True, kw_only=True)
class LearnedUpdate(GradientFilter):
    """A small network that turns the private gradient into an update, each entry on its own.

        z = (g, m_fast, m_slow) / s          u = s·(a·z + Σ_h v_h tanh(w_h·z + b_h))

    with m the bias-corrected means of earlier private gradients (factors 0.5 and 0.9), and s the standard deviation
    of the step's noise, a public number. One network serves every parameter of every model.

    Guarantee: post-processing of the private gradients; no further privacy is spent.

    Args:
        weights: a (3), then for each of 4 hidden units w (3), b, v: 23 numbers. (1, 0, …, 0) leaves gradients alone.
        noise_stddev: s > 0 of each step, as ``plan.step_plan(t).gradient_noise_stddev`` says.

    Example:
        >>> update, memory = LearnedUpdate(weights=(0.0, 1.0, *(0.0,) * 21), noise_stddev=(0.1, 0.1)), {}
        >>> [round(float(update.filter_gradient(torch.tensor([g]), memory)), 4) for g in (3.0, 0.0)]
        [3.0, 1.0]
    """

    weights: tuple[float, ...] = _IDENTITY
    noise_stddev: tuple[float, ...]
    name: ClassVar[str] = "learned_update"

    def __post_init__(self) -> None:
        if len(self.weights) != _WEIGHTS or not all(math.isfinite(value) for value in self.weights):
            raise InvalidArgument(f"weights must be {_WEIGHTS} finite numbers, got {len(self.weights)}. See its Args.")
        stddev = tuple(checks.positive(noise_stddev=value) for value in self.noise_stddev)
        object.__setattr__(self, "noise_stddev", stddev)

    def filter_gradient(self, gradient: Tensor, memory: dict[str, Tensor]) -> Tensor:
        """The update, by the formula above."""
        working = gradient.to(torch.float64 if gradient.dtype == torch.float64 else torch.float32)
        if "count" not in memory:
            memory["count"] = torch.zeros((), dtype=torch.int64)
            memory["fast"], memory["slow"] = torch.zeros_like(working), torch.zeros_like(working)
        step = int(memory["count"])
        if step >= len(self.noise_stddev):
            raise InvalidArgument(
                f"noise_stddev must hold one number for every step, got {len(self.noise_stddev)} for step {step}."
            )
        memory["count"] += 1
        inputs = [working]
        for name, factor in (("fast", _FAST), ("slow", _SLOW)):
            memory[name] = memory[name].lerp(working, 1 - factor)
            inputs.append(memory[name] / (1 - factor ** (step + 1)))
        scale = self.noise_stddev[step]
        z = torch.stack(inputs) / scale
        table = torch.tensor(self.weights, dtype=working.dtype, device=working.device)
        units = table[_INPUTS:].reshape(_HIDDEN, _INPUTS + 2)
        straight = torch.tensordot(table[:_INPUTS], z, 1)
        offsets = units[:, _INPUTS].reshape(_HIDDEN, *(1 for _ in range(working.dim())))
        hidden = torch.tanh(torch.tensordot(units[:, :_INPUTS], z, 1) + offsets)
        return scale * (straight + torch.tensordot(units[:, -1], hidden, 1))


@dataclass(frozen=True, kw_only=True)
class LearnedPolicy:
    """Everything that a run may set, as numbers; phases are equal parts of the run.

    Guarantee: learned from public tasks. On a private task it reads the number of the step and the private gradient,
    and the run costs what `plan` says, no more.

    Args:
        steps: T ≥ 1.
        sample_rate: q in (0, 1].
        noise_shape: relative noise multiplier of each phase, > 0; `plan` scales it to its budget.
        max_grad_norm: C > 0 of each phase.
        learning_rate: > 0 of each phase.
        update: weights of `LearnedUpdate`, or none for plain descent.

    Example:
        >>> policy = LearnedPolicy(steps=4, sample_rate=1.0, noise_shape=(2.0, 1.0), max_grad_norm=(1.0, 0.5),
        ...     learning_rate=(1.0, 0.5))
        >>> plan = policy.plan(target_epsilon=1.0, delta=1e-5, dataset_size=1000)
        >>> [round(plan.step_plan(t).noise_multiplier / plan.step_plan(3).noise_multiplier, 6) for t in range(4)]
        [2.0, 2.0, 1.0, 1.0]
        >>> plan.guarantee().epsilon <= 1.0 and LearnedPolicy.from_json(policy.to_json()) == policy
        True
    """

    steps: int
    sample_rate: float
    noise_shape: tuple[float, ...]
    max_grad_norm: tuple[float, ...]
    learning_rate: tuple[float, ...]
    update: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        checks.integer(1, steps=self.steps)
        checks.probability(zero=False, sample_rate=self.sample_rate)
        for name in ("noise_shape", "max_grad_norm", "learning_rate"):
            values = tuple(checks.positive(**{name: value}) for value in getattr(self, name))
            if not values:
                raise InvalidArgument(f"{name} must hold a number for each phase, got none. Give at least one.")
            object.__setattr__(self, name, values)
        object.__setattr__(self, "update", tuple(map(float, self.update)))
        if self.update:
            LearnedUpdate(weights=self.update, noise_stddev=())

    def per_step(self, values: tuple[float, ...]) -> tuple[float, ...]:
        """One number a step, of numbers for each phase."""
        return tuple(values[step * len(values) // self.steps] for step in range(self.steps))

    def plan(self, *, target_epsilon: float, delta: float, dataset_size: int) -> Plan:
        """The private run: Poisson samples, noise scaled so that ε is at most `target_epsilon`; its size is public."""
        return Plan.for_epsilon(
            target_epsilon=target_epsilon,
            delta=delta,
            sample_rate=self.sample_rate,
            steps=self.steps,
            max_grad_norm=ListSchedule(values=self.per_step(self.max_grad_norm)),
            expected_batch_size=self.sample_rate * checks.integer(1, dataset_size=dataset_size),
            dataset_size_is_public=True,
            noise_shape=ListSchedule(values=self.per_step(self.noise_shape)),
        )

    def learning_rate_schedule(self) -> ListSchedule:
        """The learning rate of each step."""
        return ListSchedule(values=self.per_step(self.learning_rate))

    def update_filter(self, plan: Plan) -> LearnedUpdate | None:
        """The filter for the optimizer of a run with `plan`; None for plain descent."""
        if not self.update:
            return None
        stddev = tuple(plan.step_plan(step).gradient_noise_stddev for step in range(plan.steps))
        return LearnedUpdate(weights=self.update, noise_stddev=stddev)

    def to_json(self) -> str:
        """The policy as JSON."""
        return policy_to_json(self)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """What `to_json` wrote; anything else raises `InvalidArgument`."""
        return policy_from_json(cls, text)


def learn_policy(
    evaluate: Callable[[LearnedPolicy, int], float],
    start: LearnedPolicy,
    *,
    learn: Collection[str],
    max_steps: int = 200,
    rounds: int = 20,
    population: int = 24,
    rng: KeyedRNG | None = None,
) -> LearnedPolicy:
    """Search policies by the cross-entropy method: draw, evaluate on public tasks, keep a quarter, draw around them.

    All of a round's policies are evaluated with the same number, so that chance is common to them. The result is the
    center of the last draws.

    Guarantee: none of its own; `evaluate` must read public records only. The policy that comes back is then public.

    Args:
        evaluate: a policy and a number ↦ what is to be small, for instance the mean loss of simulated private runs on
            public tasks whose noise has the size that it will have on the private task. Infinity is allowed.
        start: where the search begins; what is not in `learn` stays.
        learn: names of fields of `LearnedPolicy`. A single number for all phases stays a single number; give `start`
            several phases to learn a schedule.
        max_steps: largest T; the sample rate is kept in [0.01, 1].
        rounds: ≥ 1.
        population: policies in a round, ≥ 4.
        rng: of the search; fresh when None.

    Example:
        >>> start = LearnedPolicy(steps=10, sample_rate=1.0, noise_shape=(1.0,), max_grad_norm=(1.0,),
        ...     learning_rate=(1.0,))
        >>> found = learn_policy(lambda policy, _: abs(policy.learning_rate[0] - 3), start, learn=("learning_rate",))
        >>> round(found.learning_rate[0], 1)
        3.0

    References:
        Hong, Wang, Zhou 2021, "Learning to protect": a recurrent network and schedules, learned by unrolling;
        Rubinstein 1999, "The cross-entropy method", for the search, which also takes whole numbers and sample rates.
    """
    unknown = set(learn) - {item.name for item in fields(LearnedPolicy)}
    if unknown or not learn:
        raise InvalidArgument(f"learn must name fields of LearnedPolicy, got {sorted(unknown) or 'none'}.")
    checks.integer(1, rounds=rounds)
    checks.integer(4, population=population)
    checks.integer(start.steps, max_steps=max_steps)
    names = sorted(learn)
    base = {name: _encode(start, name) for name in names}
    sizes = [len(base[name]) for name in names]
    center = np.concatenate([base[name] for name in names])
    spread = np.concatenate([np.full(len(base[name]), 0.15 if name == "update" else 0.5) for name in names])
    stream = (KeyedRNG() if rng is None else rng).new_stream("policy search")

    def decoded(vector: np.ndarray) -> LearnedPolicy:
        parts = dict(zip(names, np.split(vector, np.cumsum(sizes)[:-1]), strict=True))
        changed = {name: _decode(name, part, max_steps) for name, part in parts.items()}
        return LearnedPolicy(**{**asdict(start), **changed})

    for number in range(rounds):
        draws = standard_normal(population * len(center), stream, dtype=torch.float64).reshape(population, -1)
        vectors = center + spread * draws.numpy()
        vectors[0] = center
        scores = [evaluate(decoded(vector), number) for vector in vectors]
        best = vectors[np.argsort(np.nan_to_num(scores, nan=math.inf))[: population // 4]]
        # The spread is taken around the old center: it stays wide as long as the best lie to one side.
        spread = np.maximum(np.sqrt(0.4 * spread**2 + 0.6 * ((best - center) ** 2).mean(axis=0)), 0.02)
        center = 0.3 * center + 0.7 * best.mean(axis=0)
    return decoded(center)


def _encode(policy: LearnedPolicy, name: str) -> np.ndarray:
    """Logarithms; the network's weights as they are, the identity where there is none."""
    value = getattr(policy, name)
    if name == "update":
        return np.array(value or _IDENTITY)
    return np.log(np.atleast_1d(np.array(value, dtype=float)))


def _decode(name: str, part: np.ndarray, max_steps: int) -> object:
    if name == "update":
        return tuple(part.tolist())
    values = np.exp(part)
    if name == "steps":
        return int(np.clip(round(values[0]), 1, max_steps))
    if name == "sample_rate":
        return float(np.clip(values[0], 0.01, 1.0))
    return tuple(values.tolist())
