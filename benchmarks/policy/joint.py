"""Noise, clipping norm, sample rate, steps and an update network learned together on public tasks, and taken to others.

Public tasks are pairs of digits, by logistic regression. A policy is scored by simulated private descent on them, with
noise of the size that it will have on the private task: the simulation scales noise by a Gaussian approximation, which
only ranks policies. Private runs are `fit` with plans of the exact accountant.
"""

import math
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from policy.training import DELTA, Task, adult, digits, logistic, losses, network, table
from sordino import Plan, fit
from sordino.accounting import epsilon
from sordino.events import Gaussian
from sordino.randomness import KeyedRNG
from sordino.research import LearnedPolicy, LearnedUpdate, learn_policy

EPSILON = 0.3
PUBLIC = ((4, 6), (1, 7), (0, 8), (2, 9))
START = LearnedPolicy(steps=50, sample_rate=1.0, noise_shape=(1.0,), max_grad_norm=(1.0,), learning_rate=(1.0,))
PHASES = replace(START, noise_shape=(1.0,) * 4, max_grad_norm=(1.0,) * 4, learning_rate=(1.0,) * 4)
SCHEDULES = ("noise_shape", "max_grad_norm", "learning_rate")
ARMS: dict[str, tuple[LearnedPolicy, tuple[str, ...]]] = {
    "learning rate": (START, ("learning_rate",)),
    "constants η, C, q, T": (START, ("learning_rate", "max_grad_norm", "sample_rate", "steps")),
    "schedules σ, C, η, with q, T": (PHASES, (*SCHEDULES, "sample_rate", "steps")),
    "schedules, q, T and update network": (PHASES, (*SCHEDULES, "sample_rate", "steps", "update")),
}


def gaussian_budget(target_epsilon: float, delta: float) -> float:
    """1/σ of the single Gaussian release that is (ε, δ)-private."""
    low, high = 1e-3, 20.0
    while high - low > 1e-4 * high:
        middle = math.sqrt(low * high)
        spent = epsilon(Gaussian(noise_multiplier=1 / middle), delta).upper
        low, high = (middle, high) if spent <= target_epsilon else (low, middle)
    return low


def noise_of(policy: LearnedPolicy, budget: float) -> np.ndarray:
    """Noise multipliers with q² Σ (exp(σ⁻²) − 1) = budget²: a central limit, good enough to rank policies."""
    shape = np.array(policy.per_step(policy.noise_shape))
    low, high = 1e-2, 1e5
    for _ in range(60):
        middle = math.sqrt(low * high)
        total = policy.sample_rate**2 * np.sum(np.expm1(np.minimum((middle * shape) ** -2.0, 500.0)))
        low, high = (low, middle) if total <= budget**2 else (middle, high)
    return high * shape


@torch.no_grad()
def simulated(policy: LearnedPolicy, task: Task, *, records: int, budget: float, seed: int) -> float:
    """Loss on other public records after private descent on public ones, with the noise of `records` records."""
    (x, y), (tx, ty) = task
    generator = torch.Generator().manual_seed(seed)
    noise = noise_of(policy, budget)
    norms, rates = policy.per_step(policy.max_grad_norm), policy.per_step(policy.learning_rate)
    stddev = tuple(float(s) * c / (policy.sample_rate * records) for s, c in zip(noise, norms, strict=True))
    rule = LearnedUpdate(weights=policy.update, noise_stddev=stddev) if policy.update else None
    rows = torch.cat([x, torch.ones(len(x), 1)], dim=1)
    tests = torch.cat([tx, torch.ones(len(tx), 1)], dim=1)
    lengths, targets = rows.norm(dim=1), nn.functional.one_hot(y, 2).float()
    weights, memory = torch.zeros(rows.shape[1], 2), {}
    for step in range(policy.steps):
        taken = torch.rand(len(x), generator=generator) < policy.sample_rate
        slopes = torch.softmax(rows[taken] @ weights, 1) - targets[taken]
        factors = (norms[step] / (slopes.norm(dim=1) * lengths[taken]).clamp_min(1e-12)).clamp(max=1)
        gradient = rows[taken].T @ (factors[:, None] * slopes) / (policy.sample_rate * len(x))
        gradient = gradient + stddev[step] * torch.randn(weights.shape, generator=generator)
        weights = weights - rates[step] * (rule.filter_gradient(gradient, memory) if rule else gradient)
    loss = nn.functional.cross_entropy(tests @ weights, ty)
    return float(loss) if bool(loss.isfinite()) else math.inf


def private_run(make: Callable[[Tensor], nn.Module], task: Task, policy: LearnedPolicy, plan: Plan, seed: int) -> dict:
    """One run of `fit`: mean loss and accuracy on test records."""
    (x, y), (tx, ty) = task
    model = make(x)
    schedule = policy.learning_rate_schedule()
    optimizer = torch.optim.SGD(model.parameters(), lr=schedule.values[0])
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule.relative(plan.steps))
    rule = policy.update_filter(plan)
    if rule is not None:
        rule.attach(optimizer)
    rng = KeyedRNG(seed=seed, reproducible=True)
    fit(model, losses, (x, y), plan, optimizer=optimizer, scheduler=scheduler, progress=False, rng=rng)
    with torch.no_grad():
        return {
            "loss": float(losses(model, tx, ty).mean()),
            "accuracy": float((model(tx).argmax(1) == ty).float().mean()),
        }


def joint(size: dict[str, int]) -> dict[str, object]:
    """Policies of growing freedom, each searched as long, on tasks that no search has read."""
    records, rounds = size["records"], max(2, size["rounds"] // 2)
    public = [digits(pair, 400) for pair in PUBLIC]
    budget = gaussian_budget(EPSILON, DELTA)

    def score(policy: LearnedPolicy, number: int) -> float:
        found = [
            simulated(policy, task, records=records, budget=budget, seed=100 * number + place)
            for place, task in enumerate(public)
        ]
        return statistics.fmean(found)

    policies = {
        name: learn_policy(
            score, start, learn=names, rounds=rounds, max_steps=120, rng=KeyedRNG(seed=0, reproducible=True)
        )
        for name, (start, names) in ARMS.items()
    }
    # A control: what of a gain is only a smaller rate, which suits a task that the search has not read.
    plain = policies["learning rate"]
    policies["half that learning rate"] = replace(plain, learning_rate=(plain.learning_rate[0] / 2,))
    tasks: dict[str, tuple[Callable[[Tensor], nn.Module], Task]] = {
        "logistic, digits 3 and 5": (logistic, digits((3, 5), records)),
        "network, digits 3 and 5": (partial(network, seed=0), digits((3, 5), records)),
        "logistic, Adult": (logistic, adult(records)[0]),
    }
    found: dict[str, object] = {"policies": {name: policy.to_json() for name, policy in policies.items()}}
    found["public"] = {name: score(policy, rounds + 1) for name, policy in policies.items()}
    for title, (make, task) in tasks.items():
        rows: dict[str, dict[str, float]] = {}
        reference: list[float] = []
        for name, policy in policies.items():
            plan = policy.plan(target_epsilon=EPSILON, delta=DELTA, dataset_size=len(task[0][0]))
            runs = [private_run(make, task, policy, plan, seed) for seed in range(size["seeds"])]
            reference = reference or [run["loss"] for run in runs]
            changes = [100 * (run["loss"] / other - 1) for run, other in zip(runs, reference, strict=True)]
            rows[name] = {
                "loss": statistics.fmean(run["loss"] for run in runs),
                "loss_sd": statistics.stdev(run["loss"] for run in runs),
                "change_percent": statistics.fmean(changes),
                "change_sd": statistics.stdev(changes),
                "accuracy": statistics.fmean(run["accuracy"] for run in runs),
                "epsilon": plan.guarantee().epsilon,
            }
        columns = ("loss", "loss_sd", "change_percent", "change_sd", "accuracy", "epsilon")
        table(f"joint policies, {title}, ε = {EPSILON}, test records", rows, columns)
        found[title] = rows
    return found
