"""Learning to protect: a schedule learned on public digits 4 and 6, used to train on private digits 3 and 5.

Run: SORDINO_DATA=… python examples/learned_policy.py   (--small: made-up digits, for a quick look)
"""

import argparse

import torch
from torch import Tensor, nn

from sordino import Plan, data, fit
from sordino.research import LearnedSchedule, learn_schedule


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


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Final private training loss with uniform noise and with the learned policy."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epsilon", type=float, default=0.3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--records", type=int, default=2000)
    parser.add_argument("--learning-rate", type=float, default=0.5)
    parser.add_argument("--small", action="store_true")
    chosen = parser.parse_args(arguments)
    common = {
        "target_epsilon": chosen.epsilon,
        "delta": 1e-5,
        "sample_rate": 1.0,
        "steps": chosen.steps,
        "max_grad_norm": 1.0,
        "expected_batch_size": float(chosen.records),
    }
    uniform = Plan.for_epsilon(**common, dataset_size_is_public=True)

    learned = learn_schedule(
        nn.Linear(196, 2),
        losses,
        digits((4, 6), 200, chosen.small),
        steps=chosen.steps,
        budget=chosen.steps / uniform.step_plan(0).noise_multiplier ** 2,
        max_grad_norm=1.0,
        expected_batch_size=float(chosen.records),
        learning_rate=chosen.learning_rate,
        rounds=chosen.rounds,
    )
    policy = LearnedSchedule.from_json(learned.to_json())  # what would be saved and taken elsewhere
    dynamic = Plan.for_epsilon(**common, dataset_size_is_public=True, noise_shape=policy.noise_shape())
    rates = policy.learning_rate_schedule()

    x, y = digits((3, 5), chosen.records, chosen.small)
    found: dict[str, float] = {}
    for name, plan in (("uniform", uniform), ("learned", dynamic)):
        model = nn.Linear(196, 2)
        first = chosen.learning_rate if name == "uniform" else rates.values[0]
        optimizer = torch.optim.SGD(model.parameters(), lr=first)
        pace = (lambda _: 1.0) if name == "uniform" else rates.relative(chosen.steps)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, pace)
        result = fit(model, losses, (x, y), plan, optimizer=optimizer, scheduler=scheduler, progress=False)
        with torch.no_grad():
            found[name] = float(losses(model, x, y).mean())
        print(f"{name}: final loss {found[name]:.4f}")
        print(result.guarantee.describe())
    return found


if __name__ == "__main__":
    main()
