"""Learning to protect with a private input: noise that follows the norm of the clipped gradient, which is paid for.

Public digits 4 and 6 choose the rule: how strongly the noise follows the norm, and whether updates are smoothed by a
filter (the projector). Private digits 3 and 5 are trained with it under a budget that also pays for the norms.

Run: SORDINO_DATA=… python examples/norm_policy.py   (--small: made-up digits, for a quick look)
"""

import argparse
import math
import statistics
from collections.abc import Callable

import torch
from torch import Tensor, nn

from sordino import Plan, data, fit
from sordino.research import LowPass, restore_parameters
from sordino.training import AdaptiveBudget, ReleasedStatistics


def losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """One value per record."""
    return nn.functional.cross_entropy(model(x), y, reduction="none")


def digits(pair: tuple[int, int], count: int, small: bool) -> tuple[Tensor, Tensor]:
    """14 × 14 pixels, each record scaled to norm 2 on its own."""
    if small:
        generator = torch.Generator().manual_seed(sum(pair))
        y = torch.randint(2, (count,), generator=generator)
        x = torch.randn(count, 196, generator=generator) + 0.3 * (2 * y[:, None] - 1)
        return 2 * nn.functional.normalize(x, dim=1), y
    x, y = data.load_dataset("mnist").train.tensors()
    keep = ((y == pair[0]) | (y == pair[1])).nonzero().flatten()[:count]
    x = nn.functional.avg_pool2d(x[keep].reshape(-1, 1, 28, 28).float(), 2).flatten(1)
    return 2 * nn.functional.normalize(x, dim=1), (y[keep] == pair[1]).long()


def follows(slope: float, plan: Plan) -> Callable[[int, ReleasedStatistics], float]:
    """σ_t = √(steps left / budget left) · (norm / first norm)^slope: only what was released goes in."""
    whole = plan.steps / plan.step_plan(0).noise_multiplier ** 2  # Σ σ⁻²
    first: list[float] = []

    def choose(step: int, released: ReleasedStatistics) -> float:
        even = math.sqrt((plan.steps - step) / max(released.remaining * whole, 1e-12))
        norm = released.last_clipped_norm
        if norm is None or norm <= 0:
            return even
        first.append(norm)
        # One step takes at most four times its share, and at least a quarter of it.
        return even * min(max((norm / first[0]) ** slope, 0.5), 2.0)

    return choose


def train(
    records: tuple[Tensor, Tensor], plan: Plan, epsilon: float, slope: float | None, smooth: bool, rate: float
) -> tuple[float, str]:
    """The last loss, and the guarantee; slope None is the plan's own constant noise, without bought norms."""
    model = nn.Linear(196, 2)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    if smooth:
        LowPass().attach(optimizer)
    budget = (
        None
        if slope is None
        else AdaptiveBudget(epsilon=epsilon, choose=follows(slope, plan), norm_budget_fraction=0.05)
    )
    result = fit(model, losses, records, plan, optimizer=optimizer, progress=False, budget=budget)
    restore_parameters(optimizer)
    with torch.no_grad():
        return float(losses(model, *records).mean()), result.guarantee.describe()


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Final private training loss with uniform noise and with the rule that public digits chose; means over runs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epsilon", type=float, default=0.3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--records", type=int, default=2000)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--learning-rate", type=float, default=0.5)
    parser.add_argument("--small", action="store_true")
    chosen = parser.parse_args(arguments)
    plan = Plan.for_epsilon(
        target_epsilon=chosen.epsilon,
        delta=1e-5,
        sample_rate=1.0,
        steps=chosen.steps,
        max_grad_norm=1.0,
        expected_batch_size=float(chosen.records),
        dataset_size_is_public=True,
    )

    def mean_loss(records: tuple[Tensor, Tensor], slope: float | None, smooth: bool) -> tuple[float, float, str]:
        runs = [train(records, plan, chosen.epsilon, slope, smooth, chosen.learning_rate) for _ in range(chosen.runs)]
        spread = statistics.stdev(run[0] for run in runs) if len(runs) > 1 else 0.0
        return statistics.fmean(run[0] for run in runs), spread, runs[0][1]

    public = digits((4, 6), chosen.records, chosen.small)
    rules = [(slope, smooth) for slope in (-0.5, 0.0, 0.5) for smooth in (False, True)]
    tried = {rule: mean_loss(public, *rule)[0] for rule in rules}
    best = min(rules, key=lambda rule: tried[rule])
    print(
        "public digits:",
        {f"slope {slope:g}{', smoothed' * smooth}": round(tried[slope, smooth], 4) for slope, smooth in rules},
    )

    private = digits((3, 5), chosen.records, chosen.small)
    found: dict[str, float] = {}
    for name, rule in (("uniform", (None, False)), ("uniform, smoothed", (None, True)), ("follows the norm", best)):
        found[name], spread, sentence = mean_loss(private, *rule)
        print(f"{name}: final loss {found[name]:.4f} ± {spread:.4f}")
    print(f"the rule was slope {best[0]:g}{', smoothed' * best[1]}")
    print(sentence)
    return found


if __name__ == "__main__":
    main()
