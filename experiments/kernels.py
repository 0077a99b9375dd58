"""To which loss does each way of clipping train? Full-batch descent on a network that can fit its records.

The table of docs/diagnostics.md with two columns more: whether the mean loss falls in every step, and where it ends.

Run: python experiments/kernels.py [--steps 1000]
"""

import argparse
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

RECORDS, FEATURES, CLASSES, BOUND, RATE = 24, 4, 3, 0.5, 0.3

Norms = dict[str, Tensor]


def flat(norms: Norms) -> Tensor:
    """The norm of each record's whole gradient."""
    return torch.stack(list(norms.values())).square().sum(0).sqrt()


def ways() -> dict[str, Callable[[Norms, str], Tensor]]:
    """Factor of each record in a layer, from the layers' norms: the rows of the table of tangent kernels."""
    return {
        "none": lambda norms, name: torch.ones_like(norms[name]),
        "flat": lambda norms, _: (BOUND / flat(norms)).clamp(max=1),
        "layer-wise": lambda norms, name: (BOUND / len(norms) ** 0.5 / norms[name]).clamp(max=1),
        "global flat": lambda norms, _: (flat(norms) <= 2 * BOUND).double() / 2,
        "global layer-wise": lambda norms, name: (norms[name] <= 2 * BOUND / len(norms) ** 0.5).double() / 2,
        "large threshold": lambda norms, name: torch.full_like(norms[name], 0.25),
    }


def trained(way: Callable[[Norms, str], Tensor], steps: int) -> list[float]:
    """The mean loss before each step and at the end. Layers are weight and bias together."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 32), nn.Tanh(), nn.Linear(32, CLASSES)).double()
    x, y = 2 * torch.randn(RECORDS, FEATURES).double(), torch.arange(RECORDS) % CLASSES
    weights = {name: value.detach() for name, value in model.named_parameters()}

    def loss(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(functional_call(model, weights, (x[None],)), y[None])

    gradients_of = vmap(grad(loss), in_dims=(None, 0, 0))
    mean = vmap(loss, in_dims=(None, 0, 0))
    losses = []
    for _ in range(steps):
        losses.append(float(mean(weights, x, y).mean()))
        gradients = gradients_of(weights, x, y)
        squares: dict[str, Tensor] = {}
        for name, value in gradients.items():
            layer = name.partition(".")[0]
            squares[layer] = squares.get(layer, torch.zeros(RECORDS).double()) + value.flatten(1).square().sum(1)
        norms = {layer: value.sqrt() for layer, value in squares.items()}
        factors = {layer: way(norms, layer) for layer in norms}
        weights = {
            name: value - RATE * torch.tensordot(factors[name.partition(".")[0]], gradients[name], 1) / RECORDS
            for name, value in weights.items()
        }
    return [*losses, float(mean(weights, x, y).mean())]


def main(arguments: list[str] | None = None) -> dict[str, tuple[int, float]]:
    """Print the table; steps in which the loss rose, and the last loss over the first."""
    parser = argparse.ArgumentParser(description="Where each way of clipping trains to.")
    parser.add_argument("--steps", type=int, default=1000)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found = {}
    print("| clipping | steps in which the loss rose | last loss over the first |\n|---|---|---|")
    for name, way in ways().items():
        losses = trained(way, chosen.steps)
        rises = sum(later > earlier + 1e-12 for earlier, later in pairwise(losses))
        found[name] = (rises, losses[-1] / losses[0])
        print(f"| {name} | {rises} of {chosen.steps} | {found[name][1]:.2g} |", flush=True)
    return found


if __name__ == "__main__":
    main()
