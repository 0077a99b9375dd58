"""A private classifier for UCI Adult, which is embedded in the package, in one call.

Run: python examples/fit_adult.py
"""

import argparse

import torch
from torch import Tensor, nn

from sordino import Plan, data, fit
from sordino.training.averaging import TailWeightAverage


class RowNorm(nn.Module):
    """Scales each record to norm 2 on its own: statistics of the dataset would have to be paid for."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * nn.functional.normalize(x, dim=1)


def losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """One value per record."""
    return nn.functional.cross_entropy(model(x), y, reduction="none")


def main(arguments: list[str] | None = None) -> float:
    """Train, print the guarantee and the accuracy on the public test records."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=100)
    chosen = parser.parse_args(arguments)

    adult = data.load_dataset("adult")
    x, y = adult.train.tensors()
    plan = Plan.for_epsilon(
        target_epsilon=chosen.epsilon,
        delta=1e-5,
        sample_rate=1.0,  # every record in every step: no sampling to account for
        steps=chosen.steps,
        max_grad_norm=1.0,
        expected_batch_size=float(len(x)),
        dataset_size_is_public=True,
    )
    result = fit(
        nn.Sequential(RowNorm(), nn.Linear(x.shape[1], 2)),
        losses,
        (x, y),
        plan,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=8.0, momentum=0.9, nesterov=True),
        averaging=TailWeightAverage(),
    )

    assert adult.test is not None
    x, y = adult.test.tensors()
    with torch.no_grad():
        accuracy = float((result.model(x).argmax(1) == y).float().mean())
    print(result.guarantee.describe())
    print(f"test accuracy {accuracy:.1%}")
    return accuracy


if __name__ == "__main__":
    main()
