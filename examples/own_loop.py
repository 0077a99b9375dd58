"""Your own training loop: draw, record, add, finish, step. Nothing is hidden, and every part can be replaced.

Run: python examples/own_loop.py
"""

import argparse

import torch
from torch import nn

from sordino import KeyedRNG, Plan, PrivateStep
from sordino.gradients import GradientCapture
from sordino.sampling import split_into_microbatches


def main(arguments: list[str] | None = None) -> float:
    """Learn on which side of a plane a point lies; print the guarantee and the accuracy on new points."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=150)
    chosen = parser.parse_args(arguments)

    torch.manual_seed(0)  # made-up data and first weights; it has no part in the privacy noise
    normal = torch.randn(10)
    x = torch.randn(4000, 10)
    y = (x @ normal > 0).long()

    model = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    plan = Plan(
        noise_multiplier=2.0,
        max_grad_norm=1.0,
        sample_rate=0.1,
        steps=chosen.steps,
        expected_batch_size=400.0,
        delta=1e-5,
    )
    rng = KeyedRNG()
    step = PrivateStep(GradientCapture(model), plan, rng)

    for number in range(plan.steps):
        batch = plan.sampler.draw(dataset_size=len(x), step=number, rng=rng)
        for chunk in split_into_microbatches(batch, step=number, microbatch_size=256):
            rows = torch.from_numpy(chunk.indices)
            with step.capturing(chunk):
                nn.functional.cross_entropy(model(x[rows]), y[rows], reduction="sum").backward()
            step.add(chunk)
        step.finish()  # clipped sums + noise, over the expected batch size, in .grad
        optimizer.step()
        optimizer.zero_grad()

    x = torch.randn(1000, 10)
    with torch.no_grad():
        accuracy = float((model(x).argmax(1) == (x @ normal > 0)).float().mean())
    print(plan.guarantee().describe())
    print(f"accuracy on new points {accuracy:.1%}")
    return accuracy


if __name__ == "__main__":
    main()
